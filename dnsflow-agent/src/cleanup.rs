//! `dnsflow cleanup`: takes every flow of ours out of the switch, when dnsflow leaves a node.

pub mod nodes;

use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use dnsflow_core::{
    io::input::{BatchId, FlowQuestion, FlowReply},
    values::flow::{FlowChange, InstalledFlow, text},
};
use tokio::{runtime, time::timeout};

use crate::{
    capture::{left_filters, remove_pins},
    one_agent::{Claim, OneAgentError},
    openflow::{CHANGES_MAX, Connection, Event},
    state,
};

/// Longer than a switch with a million flows takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why the programs cannot be removed.
const PROGRAMS_LEFT: &str = "the programs may be left on the veths";
/// Why it is not known which programs would be removed.
const FILTERS_UNKNOWN: &str = "cannot find out which programs are on the veths";
/// Why it is not known what would be removed.
const UNWRITTEN: &str = "cannot write what would be removed";

/// The directories in which the agent has left something.
#[derive(Clone, Copy, Debug)]
pub struct Dirs<'a> {
    /// The journal.
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

/// Removes every flow of ours, the journal, and the programs. Waits for an agent that
/// ends; meanwhile no other one starts.
pub fn run(socket: PathBuf, dirs: &Dirs<'_>) -> anyhow::Result<Removed> {
    let _claim = Claim::make().map_err(|error| match error {
        OneAgentError::Another(met) => anyhow!(
            "an agent runs on this node: {met}. It would bring back the flows that are removed. End that agent first; \
             `kubectl dnsflow uninstall` ends all of them (docs/install.md, Uninstalling)"
        ),
        OneAgentError::Io(error) => anyhow::Error::new(error)
            .context("cannot find out whether an agent runs on this node"),
    })?;
    let flows = block_on(remove_flows(Connection::new(socket)))?;
    if let Some(dir) = dirs.state {
        state::remove(dir)?;
    }
    if let Some(dir) = dirs.pins {
        remove_pins(dir).context(PROGRAMS_LEFT)?;
    }
    let filters = left_filters().context(FILTERS_UNKNOWN)?;
    for left in &filters {
        left.remove().context(PROGRAMS_LEFT)?;
    }
    Ok(Removed {
        flows,
        interfaces: filters.len(),
    })
}

/// Writes what [`run`] would remove, a line for each flow, and removes nothing.
pub fn dry_run(socket: PathBuf, dirs: &Dirs<'_>, output: &mut impl Write) -> anyhow::Result<()> {
    let found = block_on(write_flows(Connection::new(socket), output))?;
    writeln!(output, "{found} flows would be removed").context(UNWRITTEN)?;
    if let Some(journal) = dirs.state.and_then(state::find) {
        writeln!(output, "{} would be removed", journal.display()).context(UNWRITTEN)?;
    }
    if let Some(dir) = dirs.pins.filter(|dir| dir.exists()) {
        writeln!(output, "{} would be removed", dir.display()).context(UNWRITTEN)?;
    }
    for left in left_filters().context(FILTERS_UNKNOWN)? {
        writeln!(
            output,
            "the filters of clsact on {} would be removed",
            left.interface
        )
        .context(UNWRITTEN)?;
    }
    Ok(())
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let ended = runtime.block_on(async { timeout(PATIENCE, work).await });
    ended.map_err(|_| {
        let patience = PATIENCE.as_secs();
        anyhow!("the switch did not answer within {patience} s")
    })?
}

/// All flows of dnsflow. One is asked for at a time.
const DUMP: FlowQuestion = FlowQuestion::Dump { number: 0 };

async fn write_flows(mut connection: Connection, output: &mut impl Write) -> anyhow::Result<usize> {
    let mut found = 0;
    loop {
        match connection.next().await {
            Event::Up => connection.ask(DUMP),
            Event::Down { reason } => bail!("{reason}"),
            Event::Reply(FlowReply::Flows { flows, more, .. }) => {
                for flow in &flows {
                    writeln!(output, "{}", text::installed(flow)).context(UNWRITTEN)?;
                }
                found += flows.len();
                if !more {
                    return Ok(found);
                }
            }
            Event::Refused { request, reason } => bail!("{request}: {reason}"),
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

async fn remove_flows(mut connection: Connection) -> anyhow::Result<usize> {
    let mut removed = 0;
    let mut found = Vec::new();
    loop {
        match connection.next().await {
            Event::Up => connection.ask(DUMP),
            Event::Down { reason } => bail!("{reason}"),
            Event::Reply(FlowReply::Flows {
                mut flows, more, ..
            }) => {
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
                result.map_err(|error| {
                    let text = format!("the switch refuses to remove flows: {error}");
                    anyhow::Error::new(error).context(text)
                })?;
                // An agent that was still running may have added flows meanwhile.
                connection.ask(DUMP);
            }
            Event::Refused { request, reason } => bail!("{request}: {reason}"),
            Event::Reply(FlowReply::Found(_) | FlowReply::Counted { .. })
            | Event::CountLost { .. }
            | Event::FlowLost { .. }
            | Event::ForeignFlow { .. }
            | Event::ForeignFlowGone { .. }
            | Event::MonitorGap => {}
        }
    }
}
