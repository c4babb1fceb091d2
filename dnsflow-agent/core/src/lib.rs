//! The decisions of dnsflow: which address a pod may reach, and which OpenFlow flow says so.
//!
//! Nothing in here opens a socket, reads a clock or knows an async runtime. The edges feed
//! [`Input`]s together with the time and carry out the [`Command`]s that come back.

mod access;
pub mod ask;
pub mod cache;
pub mod dns;
pub mod engine;
mod installed;
pub mod io;
pub mod ovn;
pub mod pods;
pub mod policy;
mod sources;
pub mod switch;
#[cfg(any(test, feature = "test-util"))]
pub mod testing;
pub mod tools;
pub mod values;

pub use io::input::{Command, Input};
pub use tools::time::Timestamp;
