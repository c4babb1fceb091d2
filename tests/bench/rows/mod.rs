//! The rows, in the order in which they are measured.

mod activation;
mod connect;
mod core;
mod cpu;
mod first_packet;
mod memory;
mod rate;
mod restart;
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
    /// Whether the way in which the agent opens addresses makes a difference.
    pub(crate) by_verdict: bool,
    pub(crate) measure: fn(&Stage<'_>) -> Result<Measured>,
}

/// All of them.
pub(crate) const ALL: &[Row] = &[
    Row {
        name: "activation",
        told: "from the captured answer to the flow in the switch, and by ovs-ofctl",
        by_verdict: true,
        measure: activation::agent_and_ofctl,
    },
    Row {
        name: "dnstap",
        told: "the same behind unbound's dnstap",
        by_verdict: false,
        measure: activation::dnstap,
    },
    Row {
        name: "cpu",
        told: "processor time per answer",
        by_verdict: true,
        measure: cpu::measure,
    },
    Row {
        name: "round-trip",
        told: "what the agent adds to a DNS round trip",
        by_verdict: true,
        measure: round_trip::measure,
    },
    Row {
        name: "connect",
        told: "resolve, then connect at once",
        by_verdict: true,
        measure: connect::measure,
    },
    Row {
        name: "syn",
        told: "first packets lost",
        by_verdict: true,
        measure: first_packet::alone,
    },
    Row {
        name: "neighbour",
        told: "first packets lost while denied neighbours keep drop megaflows alive",
        by_verdict: true,
        measure: first_packet::beside_neighbours,
    },
    Row {
        name: "rate",
        told: "answers per second, each opening an address",
        by_verdict: true,
        measure: rate::measure,
    },
    Row {
        name: "throughput",
        told: "TCP with the programs attached and without",
        by_verdict: false,
        measure: throughput::measure,
    },
    Row {
        name: "memory",
        told: "the agent's memory with 100,000 cache entries, and a wipe of 100,000 flows",
        by_verdict: true,
        measure: memory::measure,
    },
    Row {
        name: "restart",
        told: "a restart of ovn-controller with 10,000 addresses in use",
        by_verdict: true,
        measure: restart::measure,
    },
    Row {
        name: "match",
        told: "one name against 10,000 rules",
        by_verdict: false,
        measure: core::matching,
    },
    Row {
        name: "resync",
        told: "plan and diff of 100,000 flows",
        by_verdict: false,
        measure: core::resync,
    },
];
