//! A switch that obeys at once. Its flows count the packets that the capture has.

use std::{collections::BTreeMap, net::IpAddr};

use dnsflow_core::{
    Command, Input,
    io::input::{CookieCount, FlowQuestion, FlowReply, FoundFlow, Looked},
    values::flow::{Cookie, FlowChange, FlowKey, InstalledFlow},
};

use super::ovn::TABLE;

/// The flows, and what the pods have sent.
#[derive(Default)]
pub(super) struct SimulatedSwitch {
    flows: BTreeMap<FlowKey, Cookie>,
    /// Packets by source and destination.
    sent: BTreeMap<(IpAddr, IpAddr), u64>,
}

impl SimulatedSwitch {
    /// A pod has sent a packet.
    pub(super) fn saw(&mut self, source: IpAddr, destination: IpAddr) {
        *self.sent.entry((source, destination)).or_default() += 1;
    }

    /// Carries out a command; gives what comes back.
    pub(super) fn obey(&mut self, command: Command) -> Vec<Input> {
        match command {
            Command::Apply {
                batch,
                changes,
                count,
                ..
            } => {
                changes.into_iter().for_each(|change| self.change(change));
                let counted = (!count.is_empty()).then(|| counted(Some(batch), &count));
                let applied = Input::Applied {
                    batch,
                    result: Ok(()),
                };
                counted.into_iter().chain([applied]).collect()
            }
            Command::ReadMarks => vec![Input::Marks {
                found: None,
                more: false,
                records_wait: false,
            }],
            Command::Ask(FlowQuestion::Dump { number, .. }) => {
                let flows = self.flows.iter();
                let flows = flows.map(|(key, cookie)| InstalledFlow {
                    key: key.clone(),
                    cookie: *cookie,
                    packets: self.packets(key),
                    hard_timeout_s: 0,
                });
                vec![Input::Reply(FlowReply::Flows {
                    number,
                    flows: flows.collect(),
                    more: false,
                })]
            }
            Command::Ask(FlowQuestion::Count(cookies)) => vec![counted(None, &cookies)],
            // No actions are copied: each logical flow of `ovn` is built from its text.
            Command::Ask(FlowQuestion::Find(cookies)) => {
                let found = cookies.into_iter().map(|cookie| FoundFlow {
                    cookie,
                    table: TABLE,
                    actions: Vec::new(),
                });
                vec![Input::Reply(FlowReply::Found(found.collect()))]
            }
            // No megaflow drops, and no connection is blocked.
            Command::FindDropping(_) => vec![Input::Dropping(Looked::default())],
            Command::FindBlocked => vec![Input::Blocked {
                connections: Vec::new(),
                more: false,
            }],
            Command::Unblock(connections) => vec![Input::Unblocked {
                unblocked: connections.len(),
                failed: 0,
            }],
            Command::ConfirmFilter => vec![Input::FilterConfirmed],
            Command::WatchLogicalFlows { priorities } => {
                vec![Input::LogicalFlowsWatched { priorities }]
            }
            Command::SampleLogicalFlows(stage) => {
                vec![Input::LogicalFlowSample {
                    stage,
                    flows: Vec::new(),
                }]
            }
            Command::Attachment(_)
            | Command::Mark(_)
            | Command::ChangeClasses(_)
            | Command::EndEarlierOpening
            | Command::LeaveNetworks(_)
            | Command::TrustResolvers(_)
            | Command::FilterNames { .. }
            | Command::HoldAnswers { .. }
            | Command::ForgetNames { .. }
            | Command::FilterInterface { .. }
            | Command::WatchAttempts { .. }
            | Command::RecordAnswers { .. }
            | Command::ReplayAnswers
            | Command::Release(_)
            | Command::MonitorTables(_) => Vec::new(),
        }
    }

    fn change(&mut self, change: FlowChange) {
        match change {
            FlowChange::Add(key, body) => {
                self.flows.insert(key, body.cookie);
            }
            FlowChange::Delete(key, cookie) => {
                let found = self.flows.get(&key);
                if cookie.is_none_or(|cookie| found == Some(&cookie)) {
                    self.flows.remove(&key);
                }
            }
            // Nothing times out here.
            FlowChange::Renew(_) => {}
        }
    }

    fn packets(&self, key: &FlowKey) -> u64 {
        // Each address has flows of its own in a replay: no kernel marks packets.
        let Some(addresses) = key.matches.ends.addresses() else {
            return 0;
        };
        let packets = self.sent.get(&(addresses.src(), addresses.dst()));
        packets.copied().unwrap_or_default()
    }
}

fn counted(batch: Option<dnsflow_core::io::input::BatchId>, cookies: &[u32]) -> Input {
    let counts = cookies.iter().map(|cookie| CookieCount {
        cookie: *cookie,
        flows: 1,
        packets: 0,
    });
    Input::Reply(FlowReply::Counted {
        batch,
        counts: counts.collect(),
    })
}
