//! `dnsflow cleanup`: takes every flow of ours out of the switch, when dnsflow leaves a node.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use dnsflow_core::{
    io::input::{BatchError, BatchId, FlowQuestion, FlowReply},
    values::flow::{FlowChange, InstalledFlow, text},
};
use tokio::{runtime, time::timeout};

use crate::{
    capture::{left_filters, remove_pins},
    one_agent::{Claim, Met, OneAgentError},
    openflow::{CHANGES_MAX, Connection, Event},
    state::{self, StateError},
};

/// Longer than a switch with a million flows takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why flows may be left.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// An agent runs.
    #[error(
        "an agent runs on this node: {0}. It would bring back the flows that are removed. End that agent first; to end \
         all of them, apply your own cleanup directory (docs/install.md, Uninstalling)"
    )]
    Agent(Met),
    /// The kernel refuses the socket.
    #[error("cannot find out whether an agent runs on this node")]
    Claim(#[source] io::Error),
    /// No runtime.
    #[error("cannot start the runtime")]
    Runtime(#[source] io::Error),
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
    /// The programs cannot be removed.
    #[error("the programs may be left on the veths")]
    Pins(#[source] io::Error),
    /// The kernel does not list the programs.
    #[error("cannot find out which programs are on the veths")]
    Filters(#[source] io::Error),
    /// What would be removed cannot be written.
    #[error("cannot write what would be removed")]
    Output(#[from] io::Error),
}

/// The directories in which the agent has left something.
#[derive(Clone, Copy, Debug)]
pub struct Dirs<'a> {
    /// The snapshot.
    pub state: Option<&'a Path>,
    /// The programs.
    pub pins: Option<&'a Path>,
}

/// What was removed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Removed {
    /// Flows.
    pub flows: usize,
    /// Interfaces with filters of clsact.
    pub interfaces: usize,
}

/// Removes every flow of ours, the snapshot, and the programs. Waits for an agent that
/// ends; meanwhile no other one starts.
pub fn run(socket: PathBuf, dirs: &Dirs<'_>) -> Result<Removed, CleanupError> {
    let _claim = Claim::make().map_err(|error| match error {
        OneAgentError::Another(met) => CleanupError::Agent(met),
        OneAgentError::Io(error) => CleanupError::Claim(error),
    })?;
    let flows = block_on(remove_flows(Connection::new(socket)))?;
    if let Some(dir) = dirs.state {
        state::remove(dir)?;
    }
    if let Some(dir) = dirs.pins {
        remove_pins(dir).map_err(CleanupError::Pins)?;
    }
    let filters = left_filters().map_err(CleanupError::Filters)?;
    for left in &filters {
        left.remove().map_err(CleanupError::Pins)?;
    }
    Ok(Removed {
        flows,
        interfaces: filters.len(),
    })
}

/// Writes what [`run`] would remove, a line for each flow, and removes nothing.
pub fn dry_run(
    socket: PathBuf,
    dirs: &Dirs<'_>,
    output: &mut impl Write,
) -> Result<(), CleanupError> {
    let found = block_on(write_flows(Connection::new(socket), output))?;
    writeln!(output, "{found} flows would be removed")?;
    if let Some(snapshot) = dirs.state.and_then(state::find) {
        writeln!(output, "{} would be removed", snapshot.display())?;
    }
    if let Some(dir) = dirs.pins.filter(|dir| dir.exists()) {
        writeln!(output, "{} would be removed", dir.display())?;
    }
    for left in left_filters().map_err(CleanupError::Filters)? {
        writeln!(
            output,
            "the filters of clsact on {} would be removed",
            left.interface
        )?;
    }
    Ok(())
}

fn block_on<T>(work: impl Future<Output = Result<T, CleanupError>>) -> Result<T, CleanupError> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CleanupError::Runtime)?;
    let ended = runtime.block_on(async { timeout(PATIENCE, work).await });
    ended.map_err(|_| CleanupError::NoAnswer)?
}

async fn write_flows(
    mut connection: Connection,
    output: &mut impl Write,
) -> Result<usize, CleanupError> {
    let mut found = 0;
    loop {
        match connection.next().await {
            Event::Up => connection.ask(FlowQuestion::Dump),
            Event::Down { reason } => return Err(CleanupError::NoSwitch(reason)),
            Event::Reply(FlowReply::Flows { flows, more }) => {
                for flow in &flows {
                    writeln!(output, "{}", text::installed(flow))?;
                }
                found += flows.len();
                if !more {
                    return Ok(found);
                }
            }
            Event::Refused { request, reason } => {
                return Err(CleanupError::NoSwitch(format!("{request}: {reason}")));
            }
            // This connection changes and monitors nothing.
            Event::Reply(FlowReply::Found(_) | FlowReply::Counted { .. })
            | Event::Applied { .. }
            | Event::CountLost { .. }
            | Event::FlowLost { .. }
            | Event::ForeignFlow { .. }
            | Event::ForeignFlowGone { .. }
            | Event::MonitorGap => {}
        }
    }
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
                    .map(|InstalledFlow { key, cookie, .. }| FlowChange::Delete(key, Some(cookie)))
                    .collect();
                connection.apply(BatchId(0), true, changes, Vec::new());
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
