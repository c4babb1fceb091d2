//! How much the answers to one pod may change in the switch and in the kernel, for each second and at once.
//!
//! The name server decides how many addresses it returns to a pod. Each allowed address is written into the switch,
//! which takes the flows of all pods on one thread; or it gets a mark in the kernel, which costs the agent alone, and
//! far less. So a pod has a budget of its own. If the node's budget is used up, only pods with half of their own left
//! go on. `docs/decisions/budgets.md` has the reason why an answer over budget is not opened later.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use crate::{
    Timestamp,
    tools::rate::{Account, Rate},
    values::{
        ids::PortId,
        limits::{
            FLOW_BURST_TIME, LIMIT_REPORT_INTERVAL, Limit, MARKS_PER_FLOW_CHANGE,
            NODE_FLOW_BURST_TIME, NODE_FLOW_CHANGES_PER_SECOND,
        },
    },
};

/// The changes by an answer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Changes {
    /// Flows in the switch.
    pub(crate) flows: usize,
    /// Marks in the kernel, of which [`MARKS_PER_FLOW_CHANGE`] cost as much as one flow.
    pub(crate) marks: usize,
}

impl Changes {
    /// The changes since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            flows: self.flows.saturating_sub(before.flows),
            marks: self.marks.saturating_sub(before.marks),
        }
    }

    fn time(self, rate: Rate) -> Duration {
        let Self { flows, marks } = self;
        rate.time_of(flows)
            .saturating_add(rate.time_of(marks) / MARKS_PER_FLOW_CHANGE)
    }
}

/// The budgets for changes by the answers to each port.
#[derive(Debug)]
pub(crate) struct FlowBudget {
    of_port: Rate,
    of_node: Rate,
    node: Account,
    ports: HashMap<PortId, PortBudget>,
    per_second: u32,
}

#[derive(Debug, Default)]
struct PortBudget {
    changed: Account,
    /// When each limit was last reported.
    reported_at: BTreeMap<Limit, Timestamp>,
}

impl FlowBudget {
    /// Nothing was spent. A pod may change `per_second` flows each second.
    pub(crate) fn new(per_second: u32) -> Self {
        Self {
            of_port: Rate::per_second(per_second, FLOW_BURST_TIME),
            of_node: Rate::per_second(NODE_FLOW_CHANGES_PER_SECOND, NODE_FLOW_BURST_TIME),
            node: Account::default(),
            ports: HashMap::new(),
            per_second,
        }
    }

    /// How many flows a pod may change each second.
    pub(crate) fn per_second(&self) -> usize {
        usize::try_from(self.per_second).unwrap_or(usize::MAX)
    }

    /// Whether answers to this port may change something now.
    pub(crate) fn has_left(&self, port: PortId, now: Timestamp) -> bool {
        let port = self.ports.get(&port);
        let spent = port.map(|port| port.changed).unwrap_or_default();
        spent.has_left(self.of_port, now)
            && (self.node.has_left(self.of_node, now) || spent.has_half_left(self.of_port, now))
    }

    /// An answer to this port has changed so much.
    pub(crate) fn spend(&mut self, port: PortId, changes: Changes, now: Timestamp) {
        if changes != Changes::default() {
            self.spend_denied(port, changes, now);
            self.node
                .spend_time(changes.time(self.of_node), self.of_node, now);
        }
    }

    /// The same where a rule denies. These changes are made whatever is left, so the node's budget is not charged.
    /// Otherwise denials of one pod would use up the budget of others.
    pub(crate) fn spend_denied(&mut self, port: PortId, changes: Changes, now: Timestamp) {
        if changes != Changes::default() {
            let spent = &mut self.ports.entry(port).or_default().changed;
            spent.spend_time(changes.time(self.of_port), self.of_port, now);
        }
    }

    /// Whether it is to be reported now that an answer to this port was over a limit.
    pub(crate) fn is_to_be_reported(
        &mut self,
        port: PortId,
        limit: &Limit,
        now: Timestamp,
    ) -> bool {
        let reported_at = &mut self.ports.entry(port).or_default().reported_at;
        let is_late = |at: &Timestamp| now.since(*at) >= LIMIT_REPORT_INTERVAL;
        let report = reported_at.get(limit).is_none_or(is_late);
        if report {
            reported_at.insert(limit.clone(), now);
        }
        report
    }

    /// A port is gone.
    pub(crate) fn forget(&mut self, port: PortId) {
        self.ports.remove(&port);
    }

    /// How many ports have an account.
    #[cfg(test)]
    pub(crate) fn accounts(&self) -> usize {
        self.ports.len()
    }
}

#[cfg(test)]
mod tests;
