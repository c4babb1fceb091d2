//! What the BPF program and the agent share: record layout, skip reasons and the packet walk.
#![no_std]
