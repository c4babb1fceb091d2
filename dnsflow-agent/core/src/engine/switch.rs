//! The switch: what is written to it, what it answers, and the comparison with what should be in it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    net::IpAddr,
    time::Duration,
};

use super::{Engine, hold::FOR_NOTHING};
use crate::{
    Command, Timestamp,
    denied::Settling,
    flow::{Cookie, FlowBody, FlowChange, FlowKey, InstalledFlow, Lifeline},
    hold::Wait,
    input::{BatchError, BatchId},
    limits::{
        COMPARE_INTERVAL, COUNTERS_DELAY_MAX, FOREIGN_FLOWS_MAX, RENEW_INTERVAL, RESTORE_DELAY,
        RESTORE_MAX, RESTORING_MAX, REVALIDATION_INTERVAL, UNKNOWN_MAX,
    },
    name::DomainName,
    plan::Spot,
    port::{Adopted, Lease, PortId},
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
    /// Its number.
    dump: u32,
    /// What it has shown so far that no lease has.
    unknown: Vec<InstalledFlow>,
    compare_at: Option<Timestamp>,
    /// A comparison from then on tells of all flows that there were when it was set.
    count_at: Option<Timestamp>,
    renew_at: Option<Timestamp>,
    /// Lost flows are put back from then on.
    restore_at: Option<Timestamp>,
    /// Lifelines that are in the switch, for all that is known.
    lifelines: BTreeSet<Lifeline>,
    /// Those that the dump under way has shown, with their cookies.
    lifelines_found: BTreeMap<Lifeline, Cookie>,
    /// Leases that have lost flows, and perhaps some that have not.
    to_restore: VecDeque<(PortId, IpAddr)>,
    /// Batches under way that put flows back.
    restoring: BTreeSet<BatchId>,
    /// How many flows were put back since the last time that there were none.
    restored: usize,
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

    /// A dump that is under way will not be answered: one interval later, another.
    pub(super) fn forget_questions(&mut self, now: Timestamp) {
        self.dump_since = None;
        self.compare_at = Some(now + COMPARE_INTERVAL);
    }

    /// How many comparisons have ended.
    pub(super) fn comparisons(&self) -> u32 {
        self.dump - u32::from(self.dump_since.is_some())
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
    /// Compares once the counters of every flow that there is now will tell.
    pub(super) fn count_soon(&mut self, now: Timestamp) {
        if self.switch.count_at.is_some() {
            return;
        }
        let at = now + COUNTERS_DELAY_MAX;
        self.switch.count_at = Some(at);
        self.switch.compare_at = self.switch.compare_at.map(|planned| planned.min(at));
        for port in self.ports.values_mut() {
            port.count_begins();
        }
    }

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
        self.looks.disconnected();
        self.denied.disconnected();
        self.world.interrupted();
        let mut unsent = std::mem::take(&mut self.switch.unsent);
        unsent.extend(self.switch.pending.keys());
        self.switch = Switch {
            adopted: self.switch.adopted,
            next_batch: self.switch.next_batch,
            dump: self.switch.dump,
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
    /// Returns the batch that they are in, if they are sent.
    pub(super) fn flush(&mut self, atomic: bool) -> Option<BatchId> {
        let changes = std::mem::take(&mut self.changes);
        self.send(self.switch.compared, atomic, changes, Vec::new())
    }

    fn send(
        &mut self,
        sends: bool,
        atomic: bool,
        mut changes: Vec<FlowChange>,
        openings: Vec<Opening>,
    ) -> Option<BatchId> {
        if !self.switch.foreign.is_empty() {
            let foreign = &self.switch.foreign;
            changes.retain(
                |change| !matches!(change, FlowChange::Add(key, _) if foreign.contains(key)),
            );
        }
        if changes.is_empty() {
            return None;
        }
        let batch = self.switch.next_batch();
        let others_wait = !self.changes.is_empty();
        if !sends {
            self.switch.unsent.insert(batch);
            self.looks.sent(None, others_wait);
            return None;
        }
        if self.switch.unsent.contains(&batch) {
            // The leases that were written in it are not in the switch.
            self.switch.next_batch += 1;
        }
        let batch = self.switch.next_batch();
        self.switch.next_batch += 1;
        self.looks.sent(Some(batch), others_wait);
        for change in &changes {
            match change {
                FlowChange::Add(_, FlowBody { cookie, .. })
                | FlowChange::Delete(_, cookie)
                | FlowChange::Renew(FlowBody { cookie, .. })
                    if cookie.is_of_lifeline() => {}
                FlowChange::Add(..) => self.counters.flows_added += 1,
                FlowChange::Delete(..) => self.counters.flows_removed += 1,
                FlowChange::Renew(_) => {}
            }
        }
        self.tie(&mut changes);
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
        Some(batch)
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
        self.switch.restoring.remove(&batch);
        let settle = pending.settles_from.since(now) + self.revalidation;
        self.looks.applied(batch, settle, now);
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
            self.switch.dump += 1;
            self.switch.unknown.clear();
            self.switch.lifelines_found.clear();
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
            // OVN may have come back with other tables.
            let question = self.world.verify();
            self.ask(question);
            self.copy_at.get_or_insert(now);
        }
    }

    fn renew(&mut self) {
        let lifelines = self.switch.lifelines.iter();
        let renewals: Vec<FlowChange> = lifelines
            .map(|lifeline| FlowChange::Renew(self.planner.lifeline_body(*lifeline)))
            .collect();
        self.flush(true);
        self.changes = renewals;
        self.flush(false);
    }

    /// Adds, in front, the lifelines that these changes need and that are not there.
    fn tie(&mut self, changes: &mut Vec<FlowChange>) {
        let mut missing = Vec::new();
        for change in &*changes {
            if let FlowChange::Add(key, body) = change
                && body.hard_timeout_s == 0
            {
                let lifeline = Lifeline {
                    table: key.table,
                    cookie: body.cookie,
                };
                if self.switch.lifelines.insert(lifeline) {
                    missing.push(lifeline);
                }
            }
        }
        if !missing.is_empty() {
            let lifelines = missing.into_iter();
            let add = |lifeline: Lifeline| {
                FlowChange::Add(lifeline.key(), self.planner.lifeline_body(lifeline))
            };
            changes.splice(..0, lifelines.map(add));
        }
    }

    /// Compares the lifelines that a dump has shown with those that there should be: puts back what is
    /// missing, and removes what nothing depends on any more.
    fn compare_lifelines(&mut self) {
        let found = std::mem::take(&mut self.switch.lifelines_found);
        let needed = self.planner.lifelines();
        for (lifeline, cookie) in &found {
            if !needed.contains(lifeline) {
                self.switch.lifelines.remove(lifeline);
                self.changes
                    .push(FlowChange::Delete(lifeline.key(), *cookie));
            }
        }
        for lifeline in needed {
            let body = self.planner.lifeline_body(lifeline);
            self.switch.lifelines.insert(lifeline);
            if found.get(&lifeline) != Some(&body.cookie) {
                self.changes.push(FlowChange::Add(lifeline.key(), body));
            }
        }
    }

    /// Notes that a flow is to be put back, if it is still wanted.
    pub(super) fn flow_lost(&mut self, key: &FlowKey, cookie: Cookie, now: Timestamp) {
        if let Some(lifeline) = Lifeline::of(key) {
            // All that depends on it is lost too, and brings it back.
            self.switch.lifelines.remove(&lifeline);
            return;
        }
        let Some((port_id, lease)) = self.lease_of(key) else {
            return;
        };
        let is_queued = lease.is_lost();
        if let Some(flow) = lease.flow_with_mut(key)
            && flow.pattern.body.cookie == cookie
        {
            flow.lost = true;
            if !is_queued {
                self.switch
                    .to_restore
                    .push_back((port_id, destination(key)));
            }
            self.switch.restore_at.get_or_insert(now + RESTORE_DELAY);
        }
    }

    /// Never overwrites it; tells where it stands in the place of one of ours.
    pub(super) fn foreign_flow(&mut self, key: FlowKey, cookie: u64) {
        if self.switch.foreign.len() >= FOREIGN_FLOWS_MAX {
            return;
        }
        let (table, priority) = (key.table, key.priority);
        let lease = self.lease_of(&key);
        let leased = lease.is_some_and(|(_, lease)| lease.flow_with(&key).is_some());
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

    /// The port that a flow is for.
    fn port_at(&mut self, key: &FlowKey) -> Option<PortId> {
        let Self {
            spots,
            ports,
            world,
            ..
        } = self;
        let spots = spots.get_or_insert_with(|| {
            let ports = ports.iter();
            ports
                .filter_map(|(id, port)| Some((world.spot(&port.row)?, *id)))
                .collect()
        });
        spots.get(&Spot::of(key)?).copied()
    }

    /// The lease that a flow would be of, and its port.
    fn lease_of(&mut self, key: &FlowKey) -> Option<(PortId, &mut Lease)> {
        let port_id = self.port_at(key)?;
        let port = self.ports.get_mut(&port_id)?;
        Some((port_id, port.leases.get_mut(&destination(key))?))
    }

    /// Puts back what was lost, some at a time: what answers open goes in between.
    pub(super) fn put_back_lost(&mut self, now: Timestamp) {
        let Switch {
            compared,
            restore_at,
            to_restore,
            opened,
            ..
        } = &self.switch;
        let may = *compared && restore_at.is_none() && opened.changes.is_empty();
        if !may || to_restore.is_empty() {
            return;
        }
        while self.switch.restoring.len() < RESTORING_MAX {
            while self.changes.len() < RESTORE_MAX
                && let Some((port_id, address)) = self.switch.to_restore.pop_front()
            {
                self.put_back(port_id, address, now);
            }
            if self.changes.is_empty() {
                break;
            }
            self.switch.restored += self.changes.len();
            // One step, and one pass of the revalidators; else it would be one every few changes.
            let batch = self.flush(true);
            self.switch.restoring.extend(batch);
        }
        if self.switch.to_restore.is_empty() {
            self.switch.to_restore = VecDeque::new();
            let flows = std::mem::take(&mut self.switch.restored);
            self.reports
                .extend((flows > 0).then_some(Report::Restored { flows }));
        }
    }

    /// Writes the lost flows of one lease.
    fn put_back(&mut self, port_id: PortId, address: IpAddr, now: Timestamp) {
        let port = self.ports.get_mut(&port_id);
        let Some(lease) = port.and_then(|port| port.leases.get_mut(&address)) else {
            return;
        };
        let before = self.changes.len();
        for flow in lease.flows.iter_mut().filter(|flow| flow.lost) {
            flow.lost = false;
            flow.written_at = now;
            flow.counted = false;
            self.changes.extend(flow.pattern.addition(address));
        }
        let written = self.changes.len() - before;
        if written > 0 {
            self.looks.written_anew();
            lease.written_in = Some(self.switch.next_batch());
            self.counters.flows_restored += written as u64;
        }
    }

    /// Compares flows of ours in the switch with those that should be there: a part of a dump, or
    /// the last of it.
    pub(super) fn found_in_switch(
        &mut self,
        found: Vec<InstalledFlow>,
        more: bool,
        now: Timestamp,
    ) {
        let Some(since) = self.switch.dump_since else {
            return;
        };
        for installed in found {
            if let Some(lifeline) = Lifeline::of(&installed.key) {
                let found = &mut self.switch.lifelines_found;
                found.insert(lifeline, installed.cookie);
                continue;
            }
            if self.is_leased(&installed, since, now) {
                continue;
            }
            if self.switch.unknown.len() < UNKNOWN_MAX {
                self.switch.unknown.push(installed);
            } else {
                self.switch.compare_soon(now);
            }
        }
        if !more {
            self.switch.dump_since = None;
            self.compared(since, now);
        }
    }

    /// Looks for the lease of a flow in the switch; `false` where there is none.
    fn is_leased(&mut self, installed: &InstalledFlow, since: Timestamp, now: Timestamp) -> bool {
        let dump = self.switch.dump;
        let lease = self.lease_of(&installed.key);
        let Some(flow) = lease.and_then(|(_, lease)| lease.flow_with_mut(&installed.key)) else {
            return false;
        };
        if flow.pattern.body.cookie != installed.cookie {
            return false;
        }
        flow.seen_in = dump;
        if installed.packets != flow.packets {
            flow.packets = installed.packets;
            flow.used_at = now;
        }
        flow.counted |= flow.written_at + COUNTERS_DELAY_MAX <= since;
        true
    }

    /// A dump that began at `since` is complete.
    fn compared(&mut self, since: Timestamp, now: Timestamp) {
        // Leases that were written in a batch which was not sent are looked at now.
        self.switch.next_batch += u64::from(!self.switch.unsent.is_empty());
        self.switch.unsent.clear();
        let unknown = std::mem::take(&mut self.switch.unknown);
        let is_all = unknown.len() < UNKNOWN_MAX;
        let mut unknown: HashMap<FlowKey, InstalledFlow> = unknown
            .into_iter()
            .map(|flow| (flow.key.clone(), flow))
            .collect();
        let adopted = if std::mem::replace(&mut self.switch.adopted, is_all) {
            0
        } else {
            self.adopt(&mut unknown, now)
        };
        let added = self.find_lost(since);
        let removed = unknown.len();
        self.compare_lifelines();
        if self.switch.count_at.take_if(|at| *at <= since).is_some() {
            for port in self.ports.values_mut() {
                port.count_ends();
            }
        }
        // In one step with what takes the place of the flows that go.
        for (key, installed) in unknown {
            if let Some(port) = self.port_at(&key) {
                self.put_back(port, destination(&key), now);
            }
            self.changes.push(FlowChange::Delete(key, installed.cookie));
        }
        if added + removed + adopted > 0 {
            self.reports.push(Report::Resynced {
                added,
                removed,
                adopted,
            });
        }
        if !std::mem::replace(&mut self.switch.compared, true) {
            // Those of an earlier run may be about to go.
            self.switch.renew_at = Some(now);
            // There may have been a gap while nobody looked.
            self.looks.gap_ended(now);
        }
        for (port, address) in std::mem::take(&mut self.switch.awaiting_counters) {
            self.decide(port, address, now);
        }
    }

    /// Finds the flows that the last dump has not shown; returns how many there are.
    fn find_lost(&mut self, since: Timestamp) -> usize {
        let Switch {
            pending,
            foreign,
            dump,
            to_restore,
            ..
        } = &mut self.switch;
        let mut lost = 0;
        for (port_id, port) in &mut self.ports {
            for (address, lease) in &mut port.leases {
                let is_on_its_way = lease
                    .written_in
                    .is_some_and(|batch| pending.contains_key(&batch));
                let mut to_put_back = false;
                for flow in &mut lease.flows {
                    // Written after the dump began, or on the way: it may not be in there.
                    let is_new = flow.written_at >= since;
                    if flow.seen_in != *dump && !is_new && !is_on_its_way && !flow.lost {
                        let key = flow.pattern.key(*address);
                        flow.lost = key.is_some_and(|key| !foreign.contains(&key));
                        lost += usize::from(flow.lost);
                    }
                    to_put_back |= flow.lost;
                }
                if to_put_back {
                    to_restore.push_back((*port_id, *address));
                }
            }
        }
        lost
    }

    /// Takes over flows of an earlier run that the rules of today would still write; what is
    /// taken over is removed from `found`. Returns how many.
    fn adopt(&mut self, found: &mut HashMap<FlowKey, InstalledFlow>, now: Timestamp) -> usize {
        let mut touched: BTreeSet<(PortId, IpAddr)> = BTreeSet::new();
        for (key, installed) in found.iter() {
            let Some(port_id) = self.port_at(key) else {
                continue;
            };
            let Some(port) = self.ports.get_mut(&port_id) else {
                continue;
            };
            let lease: &mut Lease = port.leases.entry(destination(key)).or_default();
            let until = now + self.config.leases.min_ttl;
            let adopted = lease.adopted.get_or_insert_with(|| {
                Box::new(Adopted {
                    flows: BTreeMap::new(),
                    until,
                })
            });
            adopted.flows.insert(key.clone(), installed.cookie);
            adopted.until = until;
            touched.insert((port_id, destination(key)));
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
            let Some(mut kept) = lease.adopted.take() else {
                continue;
            };
            kept.flows.retain(|key, cookie| {
                let flow = lease.flow_with(key);
                flow.is_some_and(|flow| flow.pattern.body.cookie == *cookie)
            });
            for key in kept.flows.keys() {
                adopted += usize::from(found.remove(key).is_some());
                if let Some(flow) = lease.flow_with_mut(key) {
                    flow.seen_in = self.switch.dump;
                }
            }
            lease.adopted = Some(kept).filter(|kept| !kept.flows.is_empty());
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
    key.matches.addresses.dst()
}
