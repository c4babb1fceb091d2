//! Connections that OVN has blocked while flows of ours were missing: which of them go on.

use super::Engine;
use crate::{Command, Timestamp, blocked::BlockedConnection, firewall::RuleAction, report::Report};

impl Engine {
    /// Asks for the blocked connections when a look is due.
    pub(super) fn look_for_blocked(&mut self, now: Timestamp) {
        if !self.looks.begin(now) {
            return;
        }
        if self.world.is_static() {
            // Without OVN, nobody blocks a connection.
            self.looks.found(0, false, now);
        } else {
            self.commands.push(Command::FindBlocked);
        }
    }

    /// Has those unblocked that the rules let pass now.
    pub(super) fn blocked_found(
        &mut self,
        mut connections: Vec<BlockedConnection>,
        more: bool,
        now: Timestamp,
    ) {
        connections.retain(|connection| self.lets_pass(connection));
        self.looks.found(connections.len(), more, now);
        if !connections.is_empty() {
            self.commands.push(Command::Unblock(connections));
        }
    }

    /// Counts and tells what became of them.
    pub(super) fn unblocked(&mut self, unblocked: usize, failed: usize) {
        self.counters.connections_unblocked += unblocked as u64;
        self.counters.connections_left_blocked += failed as u64;
        if unblocked + failed > 0 {
            self.reports.push(Report::Unblocked {
                connections: unblocked,
                failed,
            });
        }
    }

    /// Whether a flow of ours in the switch lets the packets of this connection's pod pass. What
    /// OVN alone allows or denies is not ours to judge: such a connection is left as it is.
    fn lets_pass(&self, connection: &BlockedConnection) -> bool {
        let port = self.port_by_name.get(&connection.port);
        let Some(port) = port.and_then(|id| self.ports.get(id)) else {
            return false;
        };
        let Some(lease) = port.leases.get(&connection.dst) else {
            return false;
        };
        let flows = lease.flows.iter().filter(|flow| {
            let transport = flow.pattern.transport;
            flow.pattern.src == connection.src
                && (transport.is_none() || connection.is_for(transport.into_iter()))
        });
        // The first rule that matches has the highest priority.
        let Some(deciding) = flows.max_by_key(|flow| flow.pattern.priority) else {
            return false;
        };
        let priority = deciding.pattern.priority;
        let sets = self.world.sets(&port.row);
        let mut rules = sets.iter().flat_map(|set| set.rules());
        let rule = rules.find(|rule| {
            let mut templates = rule.templates.iter();
            templates.any(|template| template.priority == priority)
        });
        rule.is_some_and(|rule| {
            let RuleAction::Allow = rule.verdict else {
                return false;
            };
            !deciding.lost
                && !self
                    .world
                    .is_denied_before(&rule.namespace, rule.index, connection)
        })
    }
}
