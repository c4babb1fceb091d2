//! The dnsflow agent: a pure core that decides ([`dnsflow_core`], a crate of its own), and thin
//! edges that turn the outside world into its inputs and its commands into IO. [`agent`] ties them
//! together.
//!
//! Dependencies point one way: edges know the core, the core knows no edge.

use dnsflow_asking::node;
pub use dnsflow_asking::{self as asking, exit, kubectl, options, output};

pub mod agent;
pub mod api;
pub mod bundle;
pub mod capture;
mod causes;
pub mod check;
pub mod cleanup;
pub mod clock;
pub mod conntrack;
pub mod control;
pub mod databases;
pub mod denied_connections;
pub mod inquiries;
pub mod journal;
pub mod k8s;
pub mod logging;
pub mod manifests;
pub mod memory;
pub mod metrics;
mod netlink;
pub mod node_addresses;
pub mod one_agent;
pub mod open_by;
pub mod openflow;
pub mod ovn_db;
pub mod replay;
pub mod rights;
pub mod state;
pub mod vswitch_db;
pub mod vswitchd;
pub mod wait;
