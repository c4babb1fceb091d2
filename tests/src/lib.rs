//! The lab: a one-node OVN-Kubernetes look-alike in network namespaces, made of Debian's own
//! programs, which are unpacked below `target/` and never installed.

pub mod frames;
pub mod root;
