//! What the owners of the engine's state give out during a turn, in order.

use crate::{Command, counters::Counters, report::Report};

/// Commands, reports and counters of all owners.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// What is to be done, in this order.
    pub(crate) commands: Vec<Command>,
    /// What is to be told.
    pub(crate) reports: Vec<Report>,
    /// What happened so far.
    pub(crate) counters: Counters,
}

impl Output {
    /// Gives out a command.
    pub(crate) fn command(&mut self, command: Command) {
        self.commands.push(command);
    }

    /// Counts and tells what became of connections that were to be unblocked.
    pub(crate) fn unblocked(&mut self, unblocked: usize, failed: usize) {
        self.counters.connections_unblocked += unblocked as u64;
        self.counters.connections_left_blocked += failed as u64;
        if unblocked + failed > 0 {
            self.report(Report::Unblocked {
                connections: unblocked,
                failed,
            });
        }
    }

    /// Gives out a report.
    pub(crate) fn report(&mut self, report: Report) {
        self.reports.push(report);
    }
}
