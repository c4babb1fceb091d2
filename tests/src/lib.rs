//! The lab: a one-node OVN-Kubernetes look-alike in network namespaces, made of Debian's own
//! programs, which are unpacked below `target/` and never installed.

pub mod account;
pub mod agent;
pub mod apiserver;
pub mod cgroup;
pub mod conntrack;
pub mod counts;
pub mod database;
pub mod dns;
pub mod download;
pub mod firewall;
pub mod flood;
pub mod frames;
pub mod go;
pub mod hunt;
pub mod lab;
pub mod liar;
mod marks;
pub mod neighbour;
pub mod netns;
pub mod oracle;
pub mod ovs;
pub mod pod;
pub mod probe;
pub mod process;
pub mod processor;
pub mod random;
pub mod relay;
pub mod root;
pub mod scenes;
pub mod schemas;
pub mod standstill;
pub mod support;
pub mod topology;
pub mod udn;
pub mod web;
pub mod wire;
