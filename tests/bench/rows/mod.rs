//! The rows, in the order in which they are measured.

mod activation;
mod connect;
mod core;
mod cpu;
mod first_packet;
mod known;
mod memory;
mod opened;
mod rate;
mod restart;
mod round_trip;
mod routed;
mod throughput;
mod wires;

use anyhow::Result;

use super::{report::Measured, stage::Stage};

/// A measurement. One may fill more than one line of the table.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// What is measured, for whoever waits.
    pub(crate) told: &'static str,
    /// Where the way in which the agent opens addresses makes a difference.
    pub(crate) differs: Differs,
    pub(crate) measure: fn(&Stage<'_>) -> Result<Measured>,
}

/// Where it makes a difference to a row how the agent opens addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Differs {
    /// Nowhere, or the row measures both.
    Nowhere,
    /// Where packets can be marked.
    InKernel,
    /// Also where the switch sees no mark: the row is about the agent's own work.
    Everywhere,
}

/// All of them.
pub(crate) const ALL: &[Row] = &[
    Row {
        name: "activation",
        told: "from the captured answer to the flow in the switch, and by ovs-ofctl",
        differs: Differs::Everywhere,
        measure: activation::agent_and_ofctl,
    },
    Row {
        name: "dnstap",
        told: "the same behind unbound's dnstap",
        differs: Differs::Nowhere,
        measure: activation::dnstap,
    },
    Row {
        name: "cpu",
        told: "processor time per answer",
        differs: Differs::Everywhere,
        measure: cpu::measure,
    },
    Row {
        name: "round-trip",
        told: "what the agent adds to a DNS round trip",
        differs: Differs::InKernel,
        measure: round_trip::measure,
    },
    Row {
        name: "connect",
        told: "resolve, then connect at once",
        differs: Differs::InKernel,
        measure: connect::measure,
    },
    Row {
        name: "syn",
        told: "first packets lost",
        differs: Differs::InKernel,
        measure: first_packet::alone,
    },
    Row {
        name: "neighbour",
        told: "first packets lost while denied neighbours keep drop megaflows alive",
        differs: Differs::InKernel,
        measure: first_packet::beside_neighbours,
    },
    Row {
        name: "rate",
        told: "answers per second, each opening an address",
        differs: Differs::Everywhere,
        measure: rate::measure,
    },
    Row {
        name: "known",
        told: "answers per second, the addresses open already",
        differs: Differs::Everywhere,
        measure: known::measure,
    },
    Row {
        name: "opened",
        told: "resolve, then connect at once, where the kernel opens and forwards, without Open vSwitch",
        differs: Differs::Nowhere,
        measure: opened::measure,
    },
    Row {
        name: "throughput",
        told: "TCP with the programs attached and without",
        differs: Differs::Nowhere,
        measure: throughput::measure,
    },
    Row {
        name: "throughput-routed",
        told: "the same where the kernel forwards, without Open vSwitch",
        differs: Differs::Nowhere,
        measure: routed::measure,
    },
    Row {
        name: "memory",
        told: "the agent's memory with 100,000 cache entries, and a wipe of 100,000 flows",
        differs: Differs::InKernel,
        measure: memory::measure,
    },
    Row {
        name: "restart",
        told: "a restart of ovn-controller with 10,000 addresses in use",
        differs: Differs::InKernel,
        measure: restart::measure,
    },
    Row {
        name: "match",
        told: "one name against 10,000 rules",
        differs: Differs::Nowhere,
        measure: core::matching,
    },
    Row {
        name: "explain",
        told: "questions of people among 8,000 rules",
        differs: Differs::Nowhere,
        measure: core::explain,
    },
    Row {
        name: "resync",
        told: "plan and diff of 100,000 flows",
        differs: Differs::Nowhere,
        measure: core::resync,
    },
];
