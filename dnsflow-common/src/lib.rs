//! What the BPF program and the agent share: the layout of a captured record, the names of all
//! reasons for skipping or losing a packet, and the packet walk.
//!
//! Everything here runs in the kernel as well: no allocation, no panic, no unbounded loop.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod reason;
pub mod record;
pub mod walk;

pub use reason::Reason;
