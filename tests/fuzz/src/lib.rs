//! What the fuzz targets call: the agent's core, compiled without the agent's edges, which would
//! bring a Kubernetes client and a BPF object along.

#[path = "../../../dnsflow-agent/src/core/mod.rs"]
pub mod core;
