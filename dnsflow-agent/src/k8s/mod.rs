//! EgressFirewalls from the Kubernetes API.
//!
//! [`watch()`] lists and watches the resource in all namespaces and tells the core about it as
//! [`Input::Firewalls`](crate::core::Input::Firewalls). Kubernetes types end in [`convert`]. What
//! is read here must never be written back (ovn-kubernetes owns the resource, its status
//! included), and an API server that is away must never take a firewall away.

pub mod convert;
pub mod egress_firewall;
pub(crate) mod reports;
pub mod watch;

pub use watch::{ClientOptions, watch};

/// Directives for a `tracing` filter: kube logs each failed request anew, by itself; what matters
/// of it is logged here once per cause.
pub const QUIET_TARGETS: &str = "kube_client=off,kube_runtime=off";
