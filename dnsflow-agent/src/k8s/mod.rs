//! The edge to the Kubernetes API: EgressFirewalls, the Services of the cluster's DNS, ServiceCIDRs, and Events.
//!
//! [`watch()`] lists and watches EgressFirewalls in all namespaces and hands them to the core as
//! [`Input::Firewalls`](dnsflow_core::Input::Firewalls). [`watch_dns_services()`] does so with the Services by which
//! pods reach their resolvers, and [`watch_service_cidrs()`] with the networks of Services. Kubernetes types end in
//! [`convert`], [`dns_services`] and [`service_cidrs`]. The agent must never write to an EgressFirewall or its status,
//! because ovn-kubernetes owns them: [`events`] reports its problems instead. If the API server is away, its last
//! content must stay in force.

pub mod client;
pub mod dns_services;
pub mod events;
mod follow;
pub(crate) mod list;
pub mod permissions;
pub(crate) mod reports;
pub mod service_cidrs;
pub(crate) mod slim;
pub mod watch;
mod watcher;

pub use client::ClientOptions;
pub use dns_services::watch_dns_services;
pub use dnsflow_asking::{
    convert,
    dns_service::{DnsService, Selection},
    egress_firewall,
};
pub use reports::Objects;
pub use service_cidrs::watch_service_cidrs;
pub use watch::watch;

/// Directives for a `tracing` filter: kube itself logs each failed request; this module logs each
/// cause once.
pub const QUIET_TARGETS: &str = "kube_client=off,kube_runtime=off";
