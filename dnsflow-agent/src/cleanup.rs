//! `dnsflow cleanup`: takes every flow of ours out of the switch, when dnsflow leaves a node.

use std::{path::PathBuf, time::Duration};

use dnsflow_core::{
    flow::{FlowChange, InstalledFlow},
    input::{BatchError, BatchId, FlowQuestion, FlowReply},
};
use tokio::{runtime, time::timeout};

use crate::{
    openflow::{CHANGES_MAX, Connection, Event},
    state::{self, StateError},
};

/// Longer than a switch with a million flows takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why flows may be left.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// No runtime.
    #[error("cannot start the runtime")]
    Runtime(#[source] std::io::Error),
    /// The switch cannot be reached.
    #[error("{0}")]
    NoSwitch(String),
    /// The switch does not answer.
    #[error("the switch did not answer within {} s", PATIENCE.as_secs())]
    NoAnswer,
    /// The switch refuses to remove flows.
    #[error("the switch refuses to remove flows: {0}")]
    Refused(#[from] BatchError),
    /// The snapshot cannot be removed.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Removes every flow of ours, and the snapshot. Returns the number of flows. The agent must not be
/// running, because it would restore the flows.
pub fn run(socket: PathBuf, state_dir: Option<PathBuf>) -> Result<usize, CleanupError> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CleanupError::Runtime)?;
    let removed = runtime.block_on(async {
        timeout(PATIENCE, remove_flows(Connection::new(socket)))
            .await
            .map_err(|_| CleanupError::NoAnswer)?
    })?;
    if let Some(dir) = state_dir {
        state::remove(&dir)?;
    }
    Ok(removed)
}

async fn remove_flows(mut connection: Connection) -> Result<usize, CleanupError> {
    let mut removed = 0;
    let mut found = Vec::new();
    loop {
        match connection.next().await {
            Event::Up => connection.ask(FlowQuestion::Dump),
            Event::Down { reason } => return Err(CleanupError::NoSwitch(reason)),
            Event::Reply(FlowReply::Flows { mut flows, more }) => {
                // The flows beyond one batch come again with the next dump.
                flows.truncate(CHANGES_MAX - found.len());
                found.append(&mut flows);
                if more {
                    continue;
                }
                if found.is_empty() {
                    return Ok(removed);
                }
                removed += found.len();
                let changes = found
                    .drain(..)
                    .map(|InstalledFlow { key, cookie, .. }| FlowChange::Delete(key, cookie))
                    .collect();
                connection.apply(BatchId(0), true, changes);
            }
            Event::Applied { result, .. } => {
                result?;
                // An agent that was still running may have added flows meanwhile.
                connection.ask(FlowQuestion::Dump);
            }
            Event::Refused { request, reason } => {
                return Err(CleanupError::NoSwitch(format!("{request}: {reason}")));
            }
            Event::Reply(FlowReply::Found(_) | FlowReply::Counted { .. })
            | Event::CountLost { .. }
            | Event::FlowLost { .. }
            | Event::ForeignFlow { .. }
            | Event::ForeignFlowGone { .. }
            | Event::MonitorGap => {}
        }
    }
}
