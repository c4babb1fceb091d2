//! What asks a running agent, and what it is told: the subcommands, the values of the answers, printing.
//!
//! It knows an agent by its control socket alone ([`client`]), and decides nothing that the agent decides.

pub mod client;
pub mod commands;
pub mod event;
#[cfg(test)]
mod fixtures;
pub mod history;
pub mod learned;
pub mod page;
pub(crate) mod print;
pub mod pruned;
pub mod reported;
pub mod trial;

use std::collections::BTreeMap;

use dnsflow_core::view::NodeView;
use serde::{Deserialize, Serialize};

/// The answer to `status`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Status {
    /// The version of the agent, with its commit where that is known.
    pub version: String,
    /// The seconds since the agent has started.
    pub up_s: u64,
    /// What the agent knows of its node.
    #[serde(flatten)]
    pub node: NodeView,
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
