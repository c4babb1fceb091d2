//! What the BPF programs and the agent share: the layouts of a captured record and of the maps, the
//! names of all reasons for skipping or losing a packet, the packet walk, and how a question is
//! read and hashed.
//!
//! Everything here runs in the kernel as well: no allocation, no panic, no unbounded loop.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

#[cfg(test)]
extern crate std;

pub mod bound;
pub mod key;
pub mod question;
pub mod reason;
pub mod record;
pub mod walk;

pub use reason::Reason;
