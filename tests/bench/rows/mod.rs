//! The rows, in the order in which they are measured.

mod activation;
mod connect;
mod core;
mod cpu;
mod first_packet;
mod memory;
mod rate;
mod round_trip;
mod throughput;

use anyhow::Result;

use super::{report::Measured, stage::Stage};

/// A measurement. One may fill more than one line of the table.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// What is measured, for whoever waits.
    pub(crate) told: &'static str,
    pub(crate) measure: fn(&Stage<'_>) -> Result<Measured>,
}

/// All of them.
pub(crate) const ALL: &[Row] = &[
    Row {
        name: "activation",
        told: "from the captured answer to the flow in the switch, and by ovs-ofctl",
        measure: activation::agent_and_ofctl,
    },
    Row {
        name: "dnstap",
        told: "the same behind unbound's dnstap",
        measure: activation::dnstap,
    },
    Row {
        name: "cpu",
        told: "processor time per answer",
        measure: cpu::measure,
    },
    Row {
        name: "round-trip",
        told: "what the agent adds to a DNS round trip",
        measure: round_trip::measure,
    },
    Row {
        name: "connect",
        told: "resolve, then connect at once",
        measure: connect::measure,
    },
    Row {
        name: "syn",
        told: "first packets lost",
        measure: first_packet::alone,
    },
    Row {
        name: "neighbour",
        told: "first packets lost while denied neighbours keep drop megaflows alive",
        measure: first_packet::beside_neighbours,
    },
    Row {
        name: "rate",
        told: "answers per second, each opening an address",
        measure: rate::measure,
    },
    Row {
        name: "throughput",
        told: "TCP with the programs attached and without",
        measure: throughput::measure,
    },
    Row {
        name: "memory",
        told: "the agent's memory with 100,000 cache entries, and a wipe of 100,000 flows",
        measure: memory::measure,
    },
    Row {
        name: "match",
        told: "one name against 10,000 rules",
        measure: core::matching,
    },
    Row {
        name: "resync",
        told: "plan and diff of 100,000 flows",
        measure: core::resync,
    },
];
