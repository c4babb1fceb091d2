//! The command line of `dnsflow`, and what asks a running agent: the client, the values of the answers, the
//! subcommands, printing, and kubectl's plugin.
//!
//! It knows an agent by its control socket alone ([`client`]), and decides nothing that the agent decides.

pub mod client;
pub mod commands;
pub mod convert;
pub mod dns_service;
pub mod egress_firewall;
pub mod event;
pub mod exit;
#[cfg(test)]
mod fixtures;
pub mod history;
pub mod kubectl;
pub mod large_table;
pub mod learn;
mod lenient;
pub mod manifests;
pub mod moment;
pub mod nearest;
pub mod node;
pub mod northbound;
pub mod options;
pub mod output;
pub mod page;
pub mod print;
pub mod report;
pub mod rollout;
pub mod trial;
pub mod unused;

use std::collections::BTreeMap;

use dnsflow_core::ask::view::NodeView;
use serde::{Deserialize, Serialize};

/// The version of this program, with its commit where that is known.
pub const VERSION: &str = env!("DNSFLOW_VERSION");

/// The answer to `status`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Status {
    /// The version of the agent, with its commit where that is known.
    pub version: String,
    /// The seconds since the agent has started.
    pub up_s: u64,
    /// EgressFirewalls and manifests that are not usable as written, by name; an agent lists so many at most.
    #[serde(default)]
    pub object_problems: Vec<ObjectProblem>,
    /// The number of further ones.
    #[serde(default)]
    pub object_problems_left_out: usize,
    /// What the agent knows of its node.
    #[serde(flatten)]
    pub node: NodeView,
}

/// An object that is not usable as written.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ObjectProblem {
    /// The object: `namespace/name`, or the path of its manifest, with the object behind it.
    pub object: String,
    /// Whether the rest of it, or an earlier reading of it, is in force.
    pub is_in_force: bool,
    /// What is wrong, with the remedy.
    pub reasons: Vec<String>,
}

/// How an agent was started: what its options are, each as it was given.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct AgentCommand {
    /// The version of the agent, with its commit where that is known.
    pub version: String,
    /// The command line.
    pub arguments: Vec<String>,
    /// The options that came by environment, and `RUST_LOG`. No other variable is told.
    pub environment: BTreeMap<String, String>,
}

/// What is logged, as directives of `RUST_LOG`: `LEVEL` or `TARGET=LEVEL`, with commas.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Levels {
    /// What is logged now.
    pub level: String,
    /// What the agent has started with.
    pub started_with: String,
}
