//! The dnsflow agent: a pure [`core`] that decides, and thin edges that turn the outside world
//! into its inputs and its commands into IO.
//!
//! Dependencies point one way: edges know `core`, `core` knows no edge.

pub mod core;
pub mod openflow;
