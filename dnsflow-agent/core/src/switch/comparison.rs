//! The flows in the switch: their comparison with the cache, and flows that come and go.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use super::{Phase, Switch, waiting::Waiting};
use crate::{
    Command, Timestamp,
    access::{Access, Holder},
    installed::{Batch, ReadMark, Reading, Written},
    io::{
        input::{BatchId, FlowQuestion, MarkChange, MarkFound},
        output::Output,
        report::Report,
    },
    values::{
        flow::{Cookie, Ends, FlowChange, FlowKey, InstalledFlow, Sentinel, Tag},
        limits::{
            COMPARE_INTERVAL, REFUSED_BATCHES_MAX, RESTORE_DELAY, RESTORE_MAX, RESTORING_MAX,
            UNKNOWN_MAX, UNKNOWN_OF_GROUPS_MAX,
        },
    },
};

/// Unknown flows of addresses that one comparison looks at.
const UNKNOWN_OF_ADDRESSES_MAX: usize = UNKNOWN_MAX - UNKNOWN_OF_GROUPS_MAX;

/// The comparison of the switch with the cache.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    /// Comparisons that have begun.
    pub(super) number: u32,
    /// Comparisons that have ended.
    pub(super) ended: u32,
    /// When the current dump began.
    pub(super) since: Option<Timestamp>,
    /// The flows to addresses in the dump so far that no entry has.
    pub(super) unknown: Vec<InstalledFlow>,
    /// The flows of groups in the dump so far that no group has.
    pub(super) unknown_of_groups: Vec<InstalledFlow>,
    /// Whether all marks were looked at.
    pub(super) are_marks_read: bool,
    /// Whether some flows of the dump were not looked at.
    pub(super) is_cut: bool,
    /// Batches that the switch had not confirmed when the current dump began, and those that had waited then: the dump,
    /// which comes over another connection, may not show their flows.
    pub(super) unshown: BTreeSet<BatchId>,
    /// When the next comparison begins.
    pub(super) at: Option<Timestamp>,
    /// Whether one has ended since the last call of [`Switch::settled`] that gave anything.
    pub(super) has_ended: bool,
}

/// Lost flows.
#[derive(Debug, Default)]
pub(super) struct Lost {
    pub(super) holders: LostHolders,
    /// Nothing is restored before this time.
    pub(super) at: Option<Timestamp>,
    /// The batches under way that restore flows.
    pub(super) batches: BTreeSet<BatchId>,
    /// Flows restored since the last time that no flow was lost.
    pub(super) restored: usize,
}

/// Batches with a change that the switch has refused, until a comparison that has begun behind that ends: it tells
/// which of the flows are there.
#[derive(Debug, Default)]
pub(super) struct RefusedBatches {
    /// Those of which the dump under way tells, and when their flows count as written.
    in_dump: BTreeMap<BatchId, Timestamp>,
    /// Those since, without the first of them if there are too many.
    since: BTreeMap<BatchId, Timestamp>,
    /// The last one of those that were left out. All before it count as refused.
    left_out: Option<BatchId>,
    /// The same for the dump under way.
    left_out_in_dump: Option<BatchId>,
}

impl RefusedBatches {
    /// Notes one.
    pub(super) fn note(&mut self, batch: BatchId, written_at: Timestamp) {
        self.since.insert(batch, written_at);
        if self.since.len() > REFUSED_BATCHES_MAX {
            let first = self.since.pop_first().map(|(batch, _)| batch);
            self.left_out = self.left_out.max(first);
        }
    }

    /// When the flows of those that are remembered count as written.
    pub(super) fn written_at(&self) -> BTreeSet<Timestamp> {
        let all = self.in_dump.values().chain(self.since.values());
        all.copied().collect()
    }

    /// Whether this is one.
    pub(super) fn contain(&self, batch: BatchId) -> bool {
        let is_left_out = Some(batch) <= self.left_out.max(self.left_out_in_dump);
        is_left_out || self.in_dump.contains_key(&batch) || self.since.contains_key(&batch)
    }

    /// How many are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.in_dump.len() + self.since.len()
    }

    pub(super) fn dump_begins(&mut self) {
        self.in_dump.append(&mut self.since);
        while self.in_dump.len() > REFUSED_BATCHES_MAX {
            let first = self.in_dump.pop_first().map(|(batch, _)| batch);
            self.left_out = self.left_out.max(first);
        }
        self.left_out_in_dump = self.left_out_in_dump.max(self.left_out.take());
    }

    pub(super) fn compared(&mut self) {
        self.in_dump.clear();
        self.left_out_in_dump = None;
    }
}

/// Who has lost flows, in order; some may have none any more. Each waits once, however often its flows are found lost.
#[derive(Debug, Default)]
pub(super) struct LostHolders {
    order: VecDeque<Holder>,
    waiting: HashSet<Holder>,
}

impl LostHolders {
    /// Adds one behind the others, unless it waits already.
    fn push(&mut self, holder: Holder) {
        if self.waiting.insert(holder) {
            self.order.push_back(holder);
        }
    }

    /// Takes the first one.
    fn pop(&mut self) -> Option<Holder> {
        let holder = self.order.pop_front()?;
        self.waiting.remove(&holder);
        Some(holder)
    }

    fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }
}

impl Switch {
    // Flows that come and go.

    /// Notes that a flow is lost, if it is still wanted.
    pub(crate) fn flow_lost(
        &mut self,
        key: &FlowKey,
        cookie: Cookie,
        access: &mut Access<'_>,
        now: Timestamp,
    ) {
        if let Some(sentinel) = Sentinel::of(key) {
            self.sentinels.lost(&sentinel);
            return;
        }
        let Some(holder) = access.holder_of(key) else {
            return;
        };
        let Some((_, flows)) = access.flows(holder) else {
            return;
        };
        if flows.lose(key, cookie) {
            self.lost.holders.push(holder);
            self.lost.at.get_or_insert(now + RESTORE_DELAY);
            access.lost(holder);
        }
    }

    /// Notes a flow of somebody else, which is never overwritten. Reports the flow if it has the
    /// key of one of ours.
    pub(crate) fn foreign_flow(
        &mut self,
        key: FlowKey,
        cookie: u64,
        access: &mut Access<'_>,
        out: &mut Output,
    ) {
        if self.foreign.are_full() {
            return;
        }
        let holder = access.holder_of(&key);
        let flows = holder.and_then(|holder| access.flows(holder));
        let is_ours = flows.is_some_and(|(_, flows)| flows.contains(&key));
        self.foreign.note(key, cookie, is_ours, out);
    }

    /// Whether somebody else has a flow with the key of one that could be ours.
    pub(crate) fn has_foreign(&self) -> bool {
        !self.foreign.are_none()
    }

    /// Whether somebody else has a flow with this key.
    pub(crate) fn is_foreign(&self, key: &FlowKey) -> bool {
        self.foreign.contain(key)
    }

    /// Restores our own flow with this key, if there is one.
    pub(crate) fn foreign_flow_gone(&mut self, key: &FlowKey, now: Timestamp) {
        if self.foreign.gone(key) {
            self.compare_by(now);
        }
    }

    /// Restores lost flows, some at a time, so that openings can go in between.
    pub(crate) fn restore_lost(&mut self, access: &mut Access<'_>, out: &mut Output) {
        let now = out.now();
        let may = self.is_compared() && self.lost.at.is_none() && self.openings.is_none();
        if !may || self.lost.holders.is_empty() {
            return;
        }
        while self.lost.batches.len() < RESTORING_MAX {
            let mut batch = self.begin(now);
            while batch.len() < RESTORE_MAX
                && let Some(holder) = self.lost.holders.pop()
            {
                restore(access, holder, &mut batch, out);
            }
            if batch.is_empty() {
                break;
            }
            self.lost.restored += batch.len();
            // One bundle, so that there is one pass of the revalidators; otherwise there would be
            // one every few changes.
            let batch = self.commit(batch, true, access.planner(), out);
            self.lost.batches.extend(batch);
        }
        if self.lost.holders.is_empty() {
            self.lost.holders = LostHolders::default();
            let flows = std::mem::take(&mut self.lost.restored);
            out.reports
                .extend((flows > 0).then_some(Report::Restored { flows }));
        }
    }

    // The comparison.

    /// The batches that the switch had not answered when the connection was lost.
    pub(crate) fn unanswered(&self) -> impl Iterator<Item = BatchId> {
        self.unanswered.iter().copied()
    }

    /// Once behind each comparison, as soon as all flows that were missing are on their way: the batches under way.
    pub(crate) fn settled(&mut self) -> Option<BTreeSet<BatchId>> {
        if !self.comparison.has_ended || !self.lost.holders.is_empty() {
            return None;
        }
        self.comparison.has_ended = false;
        Some(self.pending.keys().copied().collect())
    }

    /// A comparison that begins at this time or later reads the counters of all flows that there are now.
    pub(crate) fn read_counters(&mut self, at: Timestamp) {
        self.compare_by(at);
    }

    /// Compares at this time at the latest.
    pub(crate) fn compare_by(&mut self, at: Timestamp) {
        let planned = &mut self.comparison.at;
        *planned = planned.map(|planned| planned.min(at));
    }

    /// Whether a comparison is due.
    pub(crate) fn is_comparison_due(&self, now: Timestamp) -> bool {
        let Comparison { at, since, .. } = &self.comparison;
        self.is_up() && since.is_none() && at.is_some_and(|at| at <= now)
    }

    /// Asks for a dump, and before that for the marks if there can be some (`with_marks`).
    pub(crate) fn start_comparison(&mut self, with_marks: bool, out: &mut Output) {
        let now = out.now();
        let comparison = &mut self.comparison;
        comparison.since = Some(now);
        comparison.number += 1;
        comparison.unknown.clear();
        comparison.unknown_of_groups.clear();
        comparison.are_marks_read = !with_marks;
        comparison.is_cut = false;
        let openings = self.openings.iter();
        let of_turn = openings.filter_map(|openings| openings.batch.id());
        comparison.unshown = self.pending.keys().copied().chain(of_turn).collect();
        self.sentinels.dump_begins();
        self.waiting.dump_begins();
        self.refused.dump_begins();
        comparison.at = Some(now + COMPARE_INTERVAL);
        match with_marks {
            true => out.command(Command::ReadMarks),
            false => self.ask_for_dump(out),
        }
    }

    fn ask_for_dump(&self, out: &mut Output) {
        out.command(Command::Ask(FlowQuestion::Dump {
            number: self.comparison.number,
        }));
    }

    /// Whether the comparison under way has this number.
    pub(crate) fn is_comparison(&self, number: u32) -> bool {
        self.comparison.since.is_some() && self.comparison.number == number
    }

    /// Compares the marks that were read with the cache, and behind the last goes on with the flows. Returns the
    /// changes of marks that follow, if a comparison is under way. If the marks cannot be read (`None`), a first
    /// comparison begins anew later. If records of earlier agents' programs wait (`records_wait`), marks of unknown
    /// addresses may be theirs.
    pub(crate) fn marks_read(
        &mut self,
        found: Option<Vec<MarkFound>>,
        (more, records_wait): (bool, bool),
        access: &mut Access<'_>,
        out: &mut Output,
    ) -> Option<Batch> {
        let now = out.now();
        let reading = Reading {
            number: self.comparison.number,
            since: self.comparison.since?,
        };
        let is_first = self.comparison.ended == 0;
        if found.is_none() && is_first {
            // No address gets a tag before those of an earlier run are known.
            self.question_refused(now);
            return None;
        }
        if !more {
            self.ask_for_dump(out);
        }
        if !records_wait {
            access.classes.earlier_are_read();
        }
        if access.classes.may_earlier_open() {
            access.cache.groups_mut().rest_on(now);
        }
        let mut batch = self.begin(now);
        for found in found? {
            let MarkFound {
                ifindex, address, ..
            } = found;
            let port = access.ports.at_veth(ifindex);
            let cache = &mut *access.cache;
            if let Some(port) = port {
                cache.groups_mut().rest_mark((port, found.mark), now);
            }
            let stays = port.is_some_and(|port| {
                // What ends waits among the removals.
                let waits = || {
                    let own = access.ports.get(port).into_iter();
                    let mut own = own.flat_map(|port| &port.row.addresses);
                    own.any(|own| self.waiting_between(*own, address) > 0)
                };
                let is_confirmed = |written| self.has_confirmed(written) && !waits();
                let read = cache.mark_found((port, &found), reading, is_confirmed, &mut batch);
                out.counters.marks_restored += u64::from(read == Some(ReadMark::Wrong));
                let is_open = found.until > now;
                let is_known = is_open && cache.entry(port, address).is_some();
                if is_first && is_known {
                    return cache.keep_mark(port, &found);
                }
                // The record of its name may wait.
                let may_wait = || is_open && access.classes.may_earlier_open_at(ifindex);
                read.is_some() || may_wait() && cache.is_mark_known(port, &found)
            });
            if !stays {
                batch.mark(MarkChange::Remove { ifindex, address });
                out.counters.marks_removed += 1;
            }
        }
        if !more {
            self.comparison.are_marks_read = true;
            access.classes.marks_read(reading.since);
            let missing = access.cache.marks_read(reading, &mut batch);
            out.counters.marks_restored += missing as u64;
            for port in access.cache.groups_mut().marks_read(reading.since) {
                access.replan_port(port, &mut batch);
            }
        }
        Some(batch)
    }

    /// Compares one message of a dump with the flows that should be there.
    pub(crate) fn shown(
        &mut self,
        found: Vec<InstalledFlow>,
        access: &mut Access<'_>,
        now: Timestamp,
    ) {
        let Some(since) = self.comparison.since else {
            return;
        };
        let number = self.comparison.number;
        for flow in found {
            if let Some(sentinel) = Sentinel::of(&flow.key) {
                self.sentinels
                    .found(sentinel, flow.cookie, flow.hard_timeout_s);
                continue;
            }
            let holder = access.holder_of(&flow.key);
            let flows = holder.and_then(|holder| access.flows(holder));
            if flows.is_some_and(|(_, flows)| flows.compare(&flow, number, since, now)) {
                continue;
            }
            if self.waiting.explains(&flow.key, flow.cookie) {
                access.ends(&flow.key, flow.cookie, now);
                continue;
            }
            let (unknown, max) = match flow.key.matches.ends {
                Ends::Addresses(_) | Ends::Established(_) => {
                    (&mut self.comparison.unknown, UNKNOWN_OF_ADDRESSES_MAX)
                }
                _ => (
                    &mut self.comparison.unknown_of_groups,
                    UNKNOWN_OF_GROUPS_MAX,
                ),
            };
            if unknown.len() < max {
                unknown.push(flow);
            } else {
                access.ends(&flow.key, flow.cookie, now);
                self.comparison.is_cut = true;
                self.compare_by(now);
            }
        }
    }

    /// The dump is complete. Returns the changes that follow from the comparison, if one was under
    /// way.
    pub(crate) fn compared(&mut self, access: &mut Access<'_>, out: &mut Output) -> Option<Batch> {
        let now = out.now();
        let since = self.comparison.since.take()?;
        self.comparison.ended += 1;
        self.comparison.has_ended = true;
        self.unanswered.clear();
        self.refused.compared();
        self.waiting.dump_ends();
        if std::mem::replace(&mut self.phase, Phase::Compared) != Phase::Compared {
            // The sentinel flows of an earlier run may be about to time out.
            self.sentinels.renew_at(now);
            // There may have been a gap before the connection.
            self.blocked_searches.gap_ended(now);
        }
        let mut batch = self.begin(now);
        let number = self.comparison.number;
        let unknown = std::mem::take(&mut self.comparison.unknown);
        let of_groups = std::mem::take(&mut self.comparison.unknown_of_groups);
        let is_cut = self.comparison.is_cut;
        let unknown = unknown.into_iter().chain(of_groups);
        let mut unknown: HashMap<FlowKey, InstalledFlow> =
            unknown.map(|flow| (flow.key.clone(), flow)).collect();
        let found: Vec<FlowKey> = unknown.keys().cloned().collect();
        if self.comparison.ended == 1 {
            // As before the comparison: what is missing in the switch is lost, and restored in parts.
            let mut unsent = self.batch(false, now);
            access.keep_flows(found.iter(), &mut unsent);
            self.commit(unsent, true, access.planner(), out);
        }
        // Flows that have come to be wanted since the dump has shown them: to remove them now would remove the new
        // ones, which have the same cookies.
        unknown.retain(|key, flow| {
            let holder = access.holder_of(key);
            let flows = holder.and_then(|holder| access.flows(holder));
            !flows.is_some_and(|(_, flows)| flows.compare(flow, number, since, now))
        });
        for (key, flow) in &unknown {
            access.ends(key, flow.cookie, now);
        }
        if self.comparison.ended == 1
            && let Some(until) = access.cache.denials_until()
        {
            let ports = access.ports.iter().map(|(port, _)| port);
            self.denials = Some((until, ports.collect()));
        }
        self.denials.take_if(|(until, _)| *until <= now);
        let denials = self.denials.as_ref().map(|(_, ports)| {
            let unknown = unknown.iter().map(|(key, flow)| (key, flow.cookie));
            access.denials(ports, unknown)
        });
        let denials = denials.unwrap_or_default();
        access.denials_stay(&denials);
        let mut stay = BTreeSet::new();
        unknown.retain(|key, flow| {
            let stays = denials.contains(key);
            if stays {
                stay.insert(Sentinel {
                    table: key.table,
                    cookie: flow.cookie,
                });
            }
            !stays
        });
        let (added, missing) = self.find_lost(access, since);
        let removed = unknown.len();
        access.counters_read(since);
        // In one batch with the flows that replace them.
        let mut restored = HashSet::new();
        for (key, installed) in unknown {
            for holder in access.replacing(&key) {
                if restored.insert(holder) {
                    restore(access, holder, &mut batch, out);
                }
            }
            batch.extend([FlowChange::Delete(key, Some(installed.cookie))]);
        }
        if added + removed > 0 {
            out.report(Report::Resynced { added, removed });
        }
        if self.comparison.ended == 1 {
            access.start_is_over(&mut batch);
            access.keep_flows(found.iter(), &mut batch);
            // What has ended meanwhile gets no further term.
            access.cache.expire(&mut batch);
        }
        let before = batch.len();
        out.counters.addresses_ended += access.decide_undecided(&mut batch) as u64;
        let ending = Waiting::ending(&mut batch.changes, before);
        let is_complete = self.comparison.are_marks_read && !is_cut;
        let comparison = (number, since, is_complete);
        access.cache.compared(comparison, &missing, &mut batch);
        access.replace_marks(&mut batch);
        let groups = access.cache.groups();
        self.put_off(&mut batch, |key| !groups.are_of_group(key));
        // Behind the groups that are new.
        batch.extend(self.waiting.have_wait(ending));
        // Flows that wait to be removed keep theirs, and so do those that were not looked at.
        stay.extend(self.waiting.sentinels());
        if is_cut || self.waiting.may_replace() {
            // Those of the flows that will be replaced are not known.
            stay.extend(self.sentinels.all_found());
        }
        // Behind everything that may need one.
        self.sentinels.compare(access.planner(), &stay, &mut batch);
        Some(batch)
    }

    /// Finds the flows that the dump has not shown. Returns how many are lost, and the groups that miss flows that the
    /// switch has answered for before the dump.
    fn find_lost(&mut self, access: &mut Access<'_>, since: Timestamp) -> (usize, BTreeSet<Tag>) {
        let number = self.comparison.number;
        let mut lost = 0;
        let mut missing = BTreeSet::new();
        // Whoever still has lost flows is found again, and ports that are gone are not.
        self.lost.holders = LostHolders::default();
        for holder in access.holders() {
            let Some((target, flows)) = access.flows(holder) else {
                continue;
            };
            let is_on_its_way = match flows.written {
                Written::In(batch) => {
                    self.pending.contains_key(&batch)
                        || self.waiting.contains(batch)
                        || self.comparison.unshown.contains(&batch)
                }
                Written::Before | Written::Unsent { .. } => false,
            };
            if !is_on_its_way {
                let is_sent = !matches!(flows.written, Written::Unsent { .. });
                if let Holder::Group(tag) = holder
                    && is_sent
                    && flows.are_any_missing(number, since)
                {
                    missing.insert(tag);
                }
                let may_be_missing =
                    |key: &FlowKey| self.is_foreign(key) || self.waiting.writes(key);
                lost += flows.mark_lost(target, number, since, may_be_missing);
            }
            if flows.is_lost() {
                self.lost.holders.push(holder);
                access.lost(holder);
            }
        }
        (lost, missing)
    }
}

/// Writes the lost flows of one holder.
fn restore(access: &mut Access<'_>, holder: Holder, batch: &mut Batch, out: &mut Output) {
    if let Some((target, flows)) = access.flows(holder) {
        let written = flows.restore(target, batch);
        out.counters.flows_restored += written as u64;
    }
}
