//! The output of the owners of the engine's state during a turn, in order.

use std::collections::HashMap;

use crate::{
    Command, Timestamp,
    io::{counters::Counters, report::Report},
    tools::rate::{Account, Rate},
    values::{
        ids::PortId,
        limits::{REPORT_BURST_TIME, REPORT_INTERVAL},
    },
};

/// Commands, reports and counters of all owners.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// The time of the step.
    now: Timestamp,
    /// The commands, in the order in which they are to be carried out.
    pub(crate) commands: Vec<Command>,
    /// The reports to give out.
    pub(crate) reports: Vec<Report>,
    /// The counters so far.
    pub(crate) counters: Counters,
    /// The budget of reports about each pod's answers.
    pods: HashMap<PortId, Account>,
    /// The budget of reports about refused flows. A batch may have flows of several pods.
    refused_flows: Account,
}

/// How often reports of one account are given out.
const RATE: Rate = Rate::every(REPORT_INTERVAL, REPORT_BURST_TIME);

impl Output {
    /// Nothing yet, at this time.
    #[cfg(test)]
    pub(crate) fn at(now: Timestamp) -> Self {
        Self {
            now,
            ..Self::default()
        }
    }

    /// A step begins.
    pub(crate) fn begin(&mut self, now: Timestamp) {
        self.now = now;
    }

    /// The time of the step.
    pub(crate) fn now(&self) -> Timestamp {
        self.now
    }

    /// Gives out a command.
    pub(crate) fn command(&mut self, command: Command) {
        self.commands.push(command);
    }

    /// Counts and reports the results of unblocking connections.
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

    /// Gives out a report that the answers to a pod lead to. A pod that leads to more of them than its
    /// budget has costs the others no line of the log: the rest is counted.
    pub(crate) fn report_of_pod(&mut self, port: PortId, report: Report) {
        let account = self.pods.entry(port).or_default();
        if spend_one(account, self.now) {
            self.report(report);
        } else {
            self.counters.reports_left_out += 1;
        }
    }

    /// Counts flows that the switch has refused, and reports them. A switch that refuses all flows does so for each
    /// answer: the rest of the reports is counted.
    pub(crate) fn flows_refused(&mut self, flows: usize, reason: String) {
        self.counters.flows_refused += flows as u64;
        if spend_one(&mut self.refused_flows, self.now) {
            self.report(Report::FlowsRefused { reason });
        } else {
            self.counters.reports_left_out += 1;
        }
    }

    /// A port is gone.
    pub(crate) fn forget(&mut self, port: PortId) {
        self.pods.remove(&port);
    }

    /// How many ports have an account.
    #[cfg(test)]
    pub(crate) fn accounts(&self) -> usize {
        self.pods.len()
    }
}

/// Spends one report, if there is one left.
fn spend_one(account: &mut Account, now: Timestamp) -> bool {
    let has_left = account.has_left(RATE, now);
    if has_left {
        account.spend(1, RATE, now);
    }
    has_left
}
