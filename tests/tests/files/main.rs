//! Files that are right or wrong by themselves: the tree, the manifests of `deploy/`, and the recordings of
//! ovn-kubernetes. Nothing runs beside these tests.

mod chart;
mod deploy;
mod examples;
mod floors;
mod keys;
#[path = "../manifests/mod.rs"]
mod manifests;
mod monitoring;
mod option_schema;
mod recordings;
mod reference;
#[path = "../snapshots/mod.rs"]
mod snapshots;
mod tidy;
