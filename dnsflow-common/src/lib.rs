//! What the BPF programs and the agent share: the layouts of records and maps, the reasons for which a
//! packet is skipped or lost, the packet walk, and the reading and hashing of a question.
//!
//! All code here runs in the kernel as well. It does not allocate and does not panic, and each loop has a
//! bound.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

#[cfg(test)]
extern crate std;

pub mod bound;
pub mod key;
pub mod opening;
pub mod question;
pub mod reason;
pub mod record;
pub mod walk;

pub use reason::Reason;
