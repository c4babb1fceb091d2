//! The switch: what is written to it, what it answers, and the comparison with what should be in it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    time::Duration,
};

use super::{Engine, hold::FOR_NOTHING};
use crate::core::{
    Command, Timestamp,
    denied::Settling,
    flow::{Addresses, Cookie, FlowChange, FlowKey, InstalledFlow},
    hold::Wait,
    input::{BatchError, BatchId},
    limits::{
        COMPARE_INTERVAL, COUNTERS_DELAY_MAX, FOREIGN_FLOWS_MAX, RENEW_INTERVAL, RESTORE_DELAY,
        REVALIDATION_INTERVAL,
    },
    name::DomainName,
    plan::Spot,
    port::{Lease, PortId},
    report::Report,
    tally::Label as _,
};

/// What an answer opened, to be told once the switch has confirmed it.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) port: String,
    pub(super) name: DomainName,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) rules: Vec<u32>,
    /// How many flow changes it took.
    pub(super) changes: usize,
    pub(super) captured_at: Timestamp,
}

#[derive(Debug)]
struct Pending {
    openings: Vec<Opening>,
    sent_at: Timestamp,
    /// Whether the flows that deny were counted behind its changes.
    counted: bool,
    /// When the switch may begin to look at its megaflows for it.
    settles_from: Timestamp,
}

/// What answers opened since commands were last taken.
#[derive(Debug, Default)]
struct Opened {
    changes: Vec<FlowChange>,
    openings: Vec<Opening>,
}

/// The engine's side of the OpenFlow connection.
#[derive(Debug, Default)]
pub(super) struct Switch {
    up: bool,
    /// Whether the switch has agreed with the leases since it came up.
    compared: bool,
    /// Whether flows of an earlier run may still be taken over.
    adopted: bool,
    /// The dump that is under way, since when.
    dump_since: Option<Timestamp>,
    compare_at: Option<Timestamp>,
    renew_at: Option<Timestamp>,
    restore_at: Option<Timestamp>,
    lost: BTreeMap<FlowKey, Cookie>,
    awaiting_counters: BTreeSet<(PortId, IpAddr)>,
    monitored: BTreeSet<u8>,
    opened: Opened,
    next_batch: u64,
    pending: BTreeMap<BatchId, Pending>,
    /// Batches that the switch has confirmed, until when they settle.
    settling: BTreeMap<BatchId, Timestamp>,
    /// Batches that were not sent, or not answered: the next comparison covers them.
    unsent: BTreeSet<BatchId>,
    /// When a batch was last sent.
    sent_at: Timestamp,
    /// Flows of others with the keys that flows of ours could have: never overwritten.
    foreign: HashSet<FlowKey>,
}

impl Switch {
    pub(super) fn is_up(&self) -> bool {
        self.up
    }

    pub(super) fn is_compared(&self) -> bool {
        self.compared
    }

    /// Compares at the next opportunity.
    pub(super) fn compare_soon(&mut self, now: Timestamp) {
        self.compare_at = self.compare_at.map(|at| at.min(now));
    }

    /// Compares once the counters of every flow that there is now will tell.
    pub(super) fn count_soon(&mut self, now: Timestamp) {
        let at = now + COUNTERS_DELAY_MAX;
        self.compare_at = self.compare_at.map(|planned| planned.min(at));
    }

    /// A dump that is under way will not be answered: one interval later, another.
    pub(super) fn forget_questions(&mut self, now: Timestamp) {
        self.dump_since = None;
        self.compare_at = Some(now + COMPARE_INTERVAL);
    }

    /// The batch that the next changes will be in.
    pub(super) fn next_batch(&self) -> BatchId {
        BatchId(self.next_batch)
    }

    /// What has to be waited for until the flows of a lease are installed.
    pub(super) fn wait_for(&self, lease: &Lease) -> Wait {
        match lease.written_in {
            Some(batch) if self.unsent.contains(&batch) => FOR_NOTHING,
            Some(batch) if self.pending.contains_key(&batch) => Wait::Batch(batch),
            // Not sent yet, but about to be.
            Some(batch) if batch == self.next_batch() && self.sends_openings() => {
                Wait::Batch(batch)
            }
            Some(batch) if batch >= self.next_batch() => FOR_NOTHING,
            Some(batch) if let Some(until) = self.settling.get(&batch) => Wait::Until(*until),
            _ => Wait::Nothing,
        }
    }

    /// The flows that deny were counted behind the changes of a batch.
    pub(super) fn counted(&mut self, batch: BatchId) {
        if let Some(pending) = self.pending.get_mut(&batch) {
            pending.counted = true;
        }
    }

    /// Forgets batches that have settled.
    pub(super) fn forget_settled(&mut self, now: Timestamp) {
        while let Some(first) = self.settling.first_entry()
            && *first.get() <= now
        {
            first.remove();
        }
    }

    /// Whether what an answer opens is sent at once.
    fn sends_openings(&self) -> bool {
        self.up
    }

    pub(super) fn await_counters(&mut self, port: PortId, address: IpAddr) {
        self.awaiting_counters.insert((port, address));
    }

    /// When something is due; a comparison only if its result could be judged.
    pub(super) fn deadline(&self, can_judge: bool) -> Option<Timestamp> {
        if !self.up {
            return None;
        }
        let compare_at = self
            .compare_at
            .filter(|_| can_judge && self.dump_since.is_none());
        [compare_at, self.renew_at, self.restore_at]
            .into_iter()
            .flatten()
            .min()
    }
}

impl Engine {
    pub(super) fn switch_up(&mut self, now: Timestamp) {
        self.switch.up = true;
        self.rules_changed = true;
        self.switch.compare_at = Some(now);
        self.switch.renew_at = Some(now + RENEW_INTERVAL);
        self.count_from(now);
        let question = self.world.verify();
        self.ask(question);
        self.copy_at.get_or_insert(now);
    }

    pub(super) fn switch_down(&mut self) {
        self.ready = false;
        self.denied.disconnected();
        self.world.interrupted();
        let mut unsent = std::mem::take(&mut self.switch.unsent);
        unsent.extend(self.switch.pending.keys());
        self.switch = Switch {
            adopted: self.switch.adopted,
            next_batch: self.switch.next_batch,
            awaiting_counters: std::mem::take(&mut self.switch.awaiting_counters),
            unsent,
            ..Switch::default()
        };
    }

    /// Takes the last of the changes, those from `from` on, as what an answer opens. They are sent
    /// with what other answers open meanwhile, before any other change.
    pub(super) fn open(&mut self, from: usize, opening: Option<Opening>) {
        let opened = &mut self.switch.opened;
        opened.changes.extend(self.changes.drain(from..));
        opened.openings.extend(opening);
    }

    /// Sends what answers opened.
    pub(super) fn flush_opened(&mut self) {
        let Opened { changes, openings } = std::mem::take(&mut self.switch.opened);
        let sends = self.switch.sends_openings();
        self.send(sends, false, changes, openings);
    }

    /// Sends the other changes that have come together. Until the switch has been compared they
    /// are dropped: the comparison covers them, and writes nothing that is there already.
    pub(super) fn flush(&mut self, atomic: bool) {
        let changes = std::mem::take(&mut self.changes);
        self.send(self.switch.compared, atomic, changes, Vec::new());
    }

    fn send(
        &mut self,
        sends: bool,
        atomic: bool,
        mut changes: Vec<FlowChange>,
        openings: Vec<Opening>,
    ) {
        if !self.switch.foreign.is_empty() {
            let foreign = &self.switch.foreign;
            changes.retain(
                |change| !matches!(change, FlowChange::Add(key, _) if foreign.contains(key)),
            );
        }
        if changes.is_empty() {
            return;
        }
        let batch = self.switch.next_batch();
        if !sends {
            self.switch.unsent.insert(batch);
            return;
        }
        if self.switch.unsent.contains(&batch) {
            // The leases that were written in it are not in the switch.
            self.switch.next_batch += 1;
        }
        let batch = self.switch.next_batch();
        self.switch.next_batch += 1;
        for change in &changes {
            match change {
                FlowChange::Add(..) => self.counters.flows_added += 1,
                FlowChange::Delete(..) => self.counters.flows_removed += 1,
                FlowChange::Renew(_) => {}
            }
        }
        let settles_from = self.switch.sent_at + REVALIDATION_INTERVAL;
        self.switch.sent_at = self.turn_at;
        // Openings are never atomic.
        let count = self.cookies_to_count(&openings, self.turn_at);
        self.switch.pending.insert(
            batch,
            Pending {
                openings,
                sent_at: self.turn_at,
                counted: false,
                settles_from,
            },
        );
        self.commands.push(Command::Apply {
            batch,
            atomic,
            changes,
            count,
        });
    }

    pub(super) fn applied(
        &mut self,
        batch: BatchId,
        result: Result<(), BatchError>,
        now: Timestamp,
    ) {
        let Some(pending) = self.switch.pending.remove(&batch) else {
            return;
        };
        let settling = self.settling(&pending.openings, pending.counted, pending.sent_at);
        match &result {
            Ok(()) if settling == Settling::Quiet => {
                self.held.applied(batch, Duration::ZERO, now);
            }
            Ok(()) => {
                let begins_in = pending.settles_from.since(now);
                let settle = begins_in + self.revalidation;
                self.held.applied(batch, settle, now);
                self.switch.settling.insert(batch, now + settle);
            }
            // The comparison after the reconnect covers them: the answers wait for it.
            Err(BatchError::ConnectionLost) => {}
            Err(BatchError::Refused(_)) => self.held.applied(batch, Duration::ZERO, now),
        }
        match result {
            Ok(()) => {
                if !pending.openings.is_empty() {
                    self.denied.count(settling);
                }
                for opening in pending.openings {
                    let namespace = self
                        .port_by_name
                        .get(&opening.port)
                        .and_then(|id| self.namespace_of(*id));
                    self.reports.push(Report::Opened {
                        namespace: namespace.unwrap_or_default(),
                        port: opening.port,
                        name: opening.name,
                        addresses: opening.addresses,
                        rules: opening.rules,
                        flows: opening.changes,
                        activation: now.since(opening.captured_at),
                        settling: settling.as_str(),
                    });
                }
            }
            // The comparison after the reconnect covers them.
            Err(BatchError::ConnectionLost) => {}
            Err(error @ BatchError::Refused(_)) => {
                if let BatchError::Refused(refused) = &error {
                    self.counters.flows_refused += refused.len() as u64;
                }
                self.reports.push(Report::FlowsRefused {
                    reason: error.to_string(),
                });
            }
        }
    }

    pub(super) fn namespace_of(&self, port: PortId) -> Option<String> {
        let port = self.ports.get(&port)?;
        self.world.namespace_of(&port.row).map(str::to_owned)
    }

    /// Keeps the flow monitor on the tables in which rules are enforced.
    pub(super) fn monitor_tables(&mut self) {
        let tables = self.world.tables();
        // A table that no rule is in any more costs nothing; one too few would.
        if self.switch.up && !tables.is_subset(&self.switch.monitored) {
            self.switch.monitored.extend(tables);
            self.commands
                .push(Command::MonitorTables(self.switch.monitored.clone()));
        }
    }

    /// Whether it is known what should be in the switch: else flows of an earlier run would be
    /// taken for foreign ones.
    pub(super) fn can_judge(&self) -> bool {
        self.synced.all(self.world.is_static()) && self.world.can_plan()
    }

    /// Asks for a dump when one is due and its result could be judged.
    pub(super) fn start_comparison(&mut self, now: Timestamp) {
        let switch = &self.switch;
        let is_due = switch.compare_at.is_some_and(|at| at <= now);
        if switch.up && switch.dump_since.is_none() && is_due && self.can_judge() {
            self.switch.dump_since = Some(now);
            self.switch.compare_at = Some(now + COMPARE_INTERVAL);
            self.commands.push(Command::DumpFlows);
        }
    }

    pub(super) fn switch_timeout(&mut self, now: Timestamp) {
        if self.switch.renew_at.is_some_and(|at| at <= now) {
            self.switch.renew_at = Some(now + RENEW_INTERVAL);
            self.renew();
        }
        if self.switch.restore_at.is_some_and(|at| at <= now) {
            self.switch.restore_at = None;
            self.put_back(now);
        }
    }

    fn renew(&mut self) {
        let bodies: BTreeMap<Cookie, _> = self
            .ports
            .values()
            .flat_map(|port| port.leases.values())
            .flat_map(|lease| &lease.flows)
            .map(|flow| (flow.body.cookie, &flow.body))
            .collect();
        let renewals: Vec<FlowChange> = bodies
            .into_values()
            .map(|body| FlowChange::Renew(body.clone()))
            .collect();
        self.flush(true);
        self.changes = renewals;
        self.flush(false);
    }

    pub(super) fn flow_lost(&mut self, key: FlowKey, cookie: Cookie, now: Timestamp) {
        self.switch.lost.insert(key, cookie);
        self.switch.restore_at.get_or_insert(now + RESTORE_DELAY);
    }

    /// Never overwrites it; tells where it stands in the place of one of ours.
    pub(super) fn foreign_flow(&mut self, key: FlowKey, cookie: u64) {
        if self.switch.foreign.len() >= FOREIGN_FLOWS_MAX {
            return;
        }
        let (table, priority) = (key.table, key.priority);
        let spots = self.ports_by_spot();
        let leased = Spot::of(&key)
            .and_then(|spot| self.ports.get(spots.get(&spot)?))
            .and_then(|port| port.leases.get(&destination(&key)))
            .is_some_and(|lease| lease.flows.iter().any(|flow| flow.key == key));
        if self.switch.foreign.insert(key) && leased {
            self.reports.push(Report::PlaceTaken {
                table,
                priority,
                cookie,
            });
        }
    }

    /// Puts our own flow there again, if there is one.
    pub(super) fn foreign_flow_gone(&mut self, key: &FlowKey, now: Timestamp) {
        if self.switch.foreign.remove(key) {
            self.switch.compare_soon(now);
        }
    }

    /// The ports by where their packets are found.
    fn ports_by_spot(&self) -> HashMap<Spot, PortId> {
        let ports = self.ports.iter();
        ports
            .filter_map(|(id, port)| Some((self.world.spot(&port.row)?, *id)))
            .collect()
    }

    /// Puts back what was lost, and checks whether OVN came back with other tables.
    fn put_back(&mut self, now: Timestamp) {
        let lost = std::mem::take(&mut self.switch.lost);
        let before = self.changes.len();
        let spots = self.ports_by_spot();
        for (key, cookie) in lost {
            let Some(lease) = Spot::of(&key)
                .and_then(|spot| self.ports.get_mut(spots.get(&spot)?))
                .and_then(|port| port.leases.get_mut(&destination(&key)))
            else {
                continue;
            };
            let flow = lease
                .flows
                .iter_mut()
                .find(|flow| flow.key == key && flow.body.cookie == cookie);
            if let Some(flow) = flow {
                flow.written_at = Some(now);
                flow.counted = false;
                lease.written_in = Some(self.switch.next_batch());
                self.changes.push(FlowChange::Add(key, flow.body.clone()));
            }
        }
        let restored = self.changes.len() - before;
        if restored > 0 {
            self.counters.flows_restored += restored as u64;
            self.reports.push(Report::Restored { flows: restored });
            let question = self.world.verify();
            self.ask(question);
            self.copy_at.get_or_insert(now);
        }
    }

    /// Compares every flow of ours in the switch with those that should be there.
    pub(super) fn compared(&mut self, found: Vec<InstalledFlow>, now: Timestamp) {
        let Some(since) = self.switch.dump_since.take() else {
            return;
        };
        let mut found: HashMap<FlowKey, InstalledFlow> = found
            .into_iter()
            .map(|flow| (flow.key.clone(), flow))
            .collect();
        let before = self.changes.len();
        // Leases that were written in a batch which was not sent are looked at now.
        self.switch.next_batch += u64::from(!self.switch.unsent.is_empty());
        self.switch.unsent.clear();
        let batch = self.switch.next_batch();
        let Switch {
            pending, foreign, ..
        } = &self.switch;
        let leases = self
            .ports
            .values_mut()
            .flat_map(|port| port.leases.values_mut());
        for lease in leases {
            for flow in &mut lease.flows {
                match found.remove(&flow.key) {
                    Some(installed) if installed.cookie == flow.body.cookie => {
                        if installed.packets != flow.packets {
                            flow.packets = installed.packets;
                            flow.used_at = now;
                        }
                        flow.counted = flow.counted
                            || flow
                                .written_at
                                .is_none_or(|at| at + COUNTERS_DELAY_MAX <= since);
                    }
                    _ if foreign.contains(&flow.key) => {}
                    // Written after the dump began, or on the way: it may not be in there.
                    _ if flow.written_at.is_some_and(|at| at >= since) => {}
                    _ if lease
                        .written_in
                        .is_some_and(|batch| pending.contains_key(&batch)) => {}
                    _ => {
                        flow.written_at = Some(now);
                        flow.counted = false;
                        lease.written_in = Some(batch);
                        self.changes
                            .push(FlowChange::Add(flow.key.clone(), flow.body.clone()));
                    }
                }
            }
        }
        let added = self.changes.len() - before;
        let adopted = if std::mem::replace(&mut self.switch.adopted, true) {
            0
        } else {
            self.adopt(&mut found, now)
        };
        let removed = found.len();
        for (key, installed) in found {
            self.changes.push(FlowChange::Delete(key, installed.cookie));
        }
        self.counters.flows_restored += added as u64;
        if added + removed + adopted > 0 {
            self.reports.push(Report::Resynced {
                added,
                removed,
                adopted,
            });
        }
        self.switch.compared = true;
        for (port, address) in std::mem::take(&mut self.switch.awaiting_counters) {
            self.decide(port, address, now);
        }
    }

    /// Takes over flows of an earlier run that the rules of today would still write; what is
    /// taken over is removed from `found`. Returns how many.
    fn adopt(&mut self, found: &mut HashMap<FlowKey, InstalledFlow>, now: Timestamp) -> usize {
        let spots = self.ports_by_spot();
        let mut touched: BTreeSet<(PortId, IpAddr)> = BTreeSet::new();
        for (key, installed) in found.iter() {
            let port_id = Spot::of(key).and_then(|spot| spots.get(&spot));
            let Some(port) = port_id.and_then(|id| self.ports.get_mut(id)) else {
                continue;
            };
            let lease: &mut Lease = port.leases.entry(destination(key)).or_default();
            lease.adopted.insert(key.clone(), installed.cookie);
            lease.adopted_until = now + self.config.leases.min_ttl;
            touched.extend(port_id.map(|id| (*id, destination(key))));
        }
        let mut adopted = 0;
        for (port_id, address) in touched {
            self.replan_lease(port_id, address, now);
            let Some(lease) = self
                .ports
                .get_mut(&port_id)
                .and_then(|port| port.leases.get_mut(&address))
            else {
                continue;
            };
            lease
                .adopted
                .retain(|key, _| lease.flows.iter().any(|flow| flow.key == *key));
            for key in lease.adopted.keys() {
                adopted += usize::from(found.remove(key).is_some());
            }
            match lease.due() {
                Some(due) => {
                    self.due.insert((due, port_id, address));
                }
                None => {
                    if let Some(port) = self.ports.get_mut(&port_id) {
                        port.take_lease(address);
                    }
                }
            }
        }
        adopted
    }
}

/// The address that a flow opens.
fn destination(key: &FlowKey) -> IpAddr {
    match key.matches.addresses {
        Addresses::V4 { dst, .. } => dst.into(),
        Addresses::V6 { dst, .. } => dst.into(),
    }
}
