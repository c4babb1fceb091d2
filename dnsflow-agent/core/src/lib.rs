//! The decisions of dnsflow: which address a pod may reach, and which OpenFlow flow says so.
//!
//! Nothing in here opens a socket, reads a clock or knows an async runtime. The edges feed
//! [`Input`]s together with the time and carry out the [`Command`]s that come back.

mod access;
mod answers;
pub mod attempts;
pub mod blocked;
mod budget;
mod cache;
pub mod connection;
pub mod counter_vec;
pub mod counters;
pub mod deadline;
pub mod denied;
pub mod dns;
pub mod engine;
mod filter;
pub mod firewall;
pub mod flow;
pub mod fragments;
pub mod history;
pub mod hold;
pub mod ids;
pub mod input;
mod installed;
pub mod limits;
pub mod name;
mod output;
pub mod ovn;
pub mod pipeline;
pub mod plan;
mod policy;
pub mod ports;
pub mod profile;
mod rate;
pub mod recent;
pub mod recording;
pub mod refused;
pub mod report;
pub mod resolver;
pub mod revalidation;
pub mod rules;
mod shares;
pub mod snapshot;
mod sources;
mod switch;
pub mod tcp;
#[cfg(any(test, feature = "test-util"))]
pub mod testing;
pub mod time;
pub mod trial;
pub mod verdict;
pub mod view;

pub use input::{Command, Input};
pub use time::Timestamp;
