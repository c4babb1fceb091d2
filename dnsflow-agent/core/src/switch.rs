//! The switch: the batches written to it, its replies, and the comparison of its flows with the
//! cache.
//!
//! A `Batch` is made before changes are planned into it (`Switch::begin`), and sent afterwards (`Switch::commit`).
//! The openings of all answers of a turn share one batch (`Switch::begin_openings`), but for pods that have too many
//! changes under way. The shared batch is sent before any other batch. Removals go a part at a time (`waiting`).

pub mod blocked;
pub mod deny_counters;
pub mod hold;
pub mod revalidation;

mod comparison;
mod foreign;
mod quiet_time;
mod sentinels;
mod waiting;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use crate::{
    Command, Timestamp,
    access::Access,
    installed::{Batch, Expected, Written},
    io::{
        input::{BatchError, BatchId, CookieCount, Looked},
        output::Output,
        report::Report,
    },
    pods::ports::Ports,
    policy::{Policy, plan::Planner},
    switch::{
        blocked::BlockedSearches,
        deny_counters::RevalidationWait,
        hold::Wait,
        revalidation::{Revalidation, RevalidationEvent},
    },
    tools::{
        counter_vec::{CounterVec, Label as _},
        deadline::{self, Deadline, Why},
    },
    values::{
        connection::{BlockedConnection, Path},
        flow::{Addresses, Ends, FlowBody, FlowChange, FlowKey, Sentinel, Tag},
        ids::PortId,
        limits::{
            CHANGES_PER_BATCH_MAX, CHANGES_UNDER_WAY_MAX, COMPARE_INTERVAL, REVALIDATION_INTERVAL,
        },
        name::DomainName,
    },
};
use comparison::{Comparison, Lost, RefusedBatches};
use foreign::ForeignFlows;
use quiet_time::QuietTime;
use sentinels::Sentinels;
use waiting::{ChangesByPort, Part, Waiting};

/// The addresses that an answer opened; reported once the switch has confirmed the flows.
#[derive(Debug)]
pub(crate) struct Opening {
    /// The namespace whose rules hold for the pod that asked.
    pub(crate) namespace: Option<String>,
    /// The logical port of the pod that asked.
    pub(crate) port: String,
    /// The name that was asked for.
    pub(crate) name: DomainName,
    /// The addresses that were not open before.
    pub(crate) addresses: Vec<IpAddr>,
    /// The rules that the name matched.
    pub(crate) rules: Vec<u32>,
    /// The number of its flow changes.
    pub(crate) changes: usize,
    /// When the kernel saw the answer. `None`: the kernel has opened the addresses, or a rule that came later opens them.
    pub(crate) waits_since: Option<Timestamp>,
}

/// A batch that the switch has not answered.
#[derive(Debug)]
struct Pending {
    openings: Vec<Opening>,
    sent_at: Timestamp,
    /// When its flows count as written.
    written_at: Timestamp,
    /// Whether the flows that deny were counted behind its changes.
    counted: bool,
    /// The paths of its flows.
    paths: BTreeSet<Path>,
    /// When the batch before it was sent.
    before: Timestamp,
    /// Whose answers have made its changes.
    shares: ChangesByPort,
    /// The batch that this is a part of, unless it is the last one.
    part_of: Option<BatchId>,
    /// The changes of an atomic batch: if the switch refuses one of them, the others are sent again.
    all_or_none: Option<Vec<FlowChange>>,
}

/// A batch, and the openings of a turn's answers with it.
#[derive(Debug)]
struct Openings {
    batch: Batch,
    openings: Vec<Opening>,
    shares: ChangesByPort,
    /// The batch that this is a part of, unless it is the last one.
    part_of: Option<BatchId>,
}

/// The effect of the switch's reply to a batch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Answered {
    /// Whether frames need not wait for the batch any longer. If not, they wait for the datapath.
    pub(crate) is_over: bool,
    /// Whether the switch has all of its flows.
    pub(crate) is_written: bool,
}

impl From<Batch> for Openings {
    /// A batch that opens nothing for an answer.
    fn from(batch: Batch) -> Self {
        Self {
            batch,
            openings: Vec::new(),
            shares: ChangesByPort::new(),
            part_of: None,
        }
    }
}

/// How far the connection has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    /// There is none.
    Down,
    /// There is one, and the flows in the switch are not known.
    Up,
    /// The switch has agreed with the cache since the connection came up.
    Compared,
}

/// The engine's side of the OpenFlow connection.
#[derive(Debug)]
pub(crate) struct Switch {
    phase: Phase,
    comparison: Comparison,
    lost: Lost,
    sentinels: Sentinels,
    monitored: BTreeSet<u8>,
    /// The openings of this turn.
    openings: Option<Openings>,
    /// Changes of pods that have too many under way, and flows that are removed a part at a time.
    waiting: Waiting,
    next_batch: u64,
    /// Changes of one batch, at most: half of [`CHANGES_PER_BATCH_MAX`], as each may need a sentinel flow.
    changes_max: usize,
    pending: BTreeMap<BatchId, Pending>,
    /// Batches with a part that the switch has refused.
    incomplete: BTreeSet<BatchId>,
    /// Batches with a change that the switch has refused.
    refused: RefusedBatches,
    /// Batches that the switch had not answered when the connection was lost: the next comparison
    /// covers them.
    unanswered: BTreeSet<BatchId>,
    /// When a batch was last sent.
    sent_at: Timestamp,
    /// Flows of others whose keys our flows could have. They are never overwritten.
    foreign: ForeignFlows,
    /// Batches that are not sent, because all of their flows are others'.
    left_out: Vec<BatchId>,
    /// Groups whose flows have gone in another batch than the one that they waited for.
    moved: Vec<(Tag, Written)>,
    /// Confirmed batches whose flows the datapath may not follow yet.
    revalidation: Revalidation,
    /// Whether a megaflow that drops can exist.
    quiet_time: QuietTime,
    /// When to look for connections that OVN has blocked in a gap of our flows.
    blocked_searches: BlockedSearches,
    /// Without a journal of the earlier run, its flows that deny stay until then, at the ports whose rules have not
    /// changed: nobody knows the names that they deny.
    denials: Option<(Timestamp, BTreeSet<PortId>)>,
}

impl Switch {
    /// There is no connection yet. `hold_max`: the longest time for which an answer is held.
    /// `keep_flows_s`: how long flows stay without an agent. `idle_grace`: how long an unused address
    /// stays open.
    pub(crate) fn new(hold_max: Duration, keep_flows_s: u16, idle_grace: Duration) -> Self {
        Self {
            phase: Phase::Down,
            comparison: Comparison::default(),
            lost: Lost::default(),
            sentinels: Sentinels::new(keep_flows_s),
            monitored: BTreeSet::new(),
            openings: None,
            waiting: Waiting::default(),
            next_batch: 0,
            changes_max: CHANGES_PER_BATCH_MAX / 2,
            pending: BTreeMap::new(),
            incomplete: BTreeSet::new(),
            refused: RefusedBatches::default(),
            unanswered: BTreeSet::new(),
            sent_at: Timestamp::default(),
            foreign: ForeignFlows::default(),
            left_out: Vec::new(),
            moved: Vec::new(),
            revalidation: Revalidation::new(hold_max),
            quiet_time: QuietTime::new(!hold_max.is_zero(), idle_grace),
            blocked_searches: BlockedSearches::default(),
            denials: None,
        }
    }

    /// How many batches are unanswered, how many pods have changes on their way, how many flows wait to be removed, how
    /// many entries have lost flows, and how many flows of others are remembered.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> [usize; 5] {
        let [queues, removals] = self.waiting.sizes();
        [
            self.pending.len(),
            queues,
            removals,
            self.lost.holders.len(),
            self.foreign.len(),
        ]
    }

    // What others ask.

    /// Whether there is a connection.
    pub(crate) fn is_up(&self) -> bool {
        self.phase != Phase::Down
    }

    /// Whether the switch has not confirmed a batch, or a batch waits for another. No batch is sent without a connection.
    pub(crate) fn is_writing(&self) -> bool {
        self.is_up() && !(self.waiting.is_empty() && self.pending.is_empty())
    }

    /// Whether the switch has agreed with the cache since it came up.
    pub(crate) fn is_compared(&self) -> bool {
        self.phase == Phase::Compared
    }

    /// The rules of these ports may be others.
    pub(crate) fn rules_of_ports_change(&mut self, ports: &[PortId], now: Timestamp) {
        let Some((_, unchanged)) = &mut self.denials else {
            return;
        };
        let before = unchanged.len();
        unchanged.retain(|port| !ports.contains(port));
        if unchanged.len() < before {
            self.compare_by(now);
        }
    }

    /// Whether the first comparison has ended.
    pub(crate) fn is_start_over(&self) -> bool {
        self.comparison.ended > 0
    }

    /// How many comparisons have ended.
    pub(crate) fn comparisons(&self) -> u32 {
        self.comparison.ended
    }

    /// The wait of an answer until flows that came into the switch like this are in force.
    pub(crate) fn wait_for(&mut self, written: Written) -> Wait {
        match written {
            Written::Before => Wait::default(),
            Written::Unsent { comparisons } if comparisons == self.comparison.ended => {
                Wait::comparison()
            }
            Written::Unsent { .. } => Wait::default(),
            Written::In(batch) if self.unanswered.contains(&batch) => Wait::comparison(),
            Written::In(batch) if self.pending.contains_key(&batch) => Wait::batch(batch),
            Written::In(batch) if self.opens_in(batch) => Wait::batch(batch),
            Written::In(batch) if self.waiting.contains(batch) => Wait::batch(batch),
            Written::In(batch) if self.revalidation.awaits(batch) => Wait::batch(batch),
            Written::In(_) => Wait::default(),
        }
    }

    /// Whether the switch has all flows that came into it like this, or had them when it was last compared.
    pub(crate) fn has_confirmed(&self, written: Written) -> bool {
        match written {
            Written::Before => true,
            Written::Unsent { comparisons } => comparisons != self.comparison.ended,
            Written::In(batch) => {
                let is_on_its_way = self.pending.contains_key(&batch)
                    || self.opens_in(batch)
                    || self.waiting.contains(batch);
                !is_on_its_way && !self.unanswered.contains(&batch) && !self.refused.contain(batch)
            }
        }
    }

    /// When the flows of batches count as written of which the switch has refused a part, until a comparison tells.
    pub(crate) fn refused_at(&self) -> BTreeSet<Timestamp> {
        self.refused.written_at()
    }

    /// Whether this is the batch of this turn's openings.
    fn opens_in(&self, batch: BatchId) -> bool {
        let openings = self.openings.as_ref();
        openings.is_some_and(|openings| openings.batch.id() == Some(batch))
    }

    /// When something is due. A comparison is due only if its result could be judged (`can_judge`).
    pub(crate) fn deadline(&self, can_judge: bool) -> Option<Deadline> {
        let counts = deadline::at(self.quiet_time.deadline(), Why::Count);
        let searches = deadline::at(self.blocked_searches.deadline(), Why::Blocked);
        if !self.is_up() {
            return deadline::first([counts, searches]);
        }
        let revalidation = deadline::at(self.revalidation.deadline(), Why::Revalidation);
        let compare_at = self
            .comparison
            .at
            .filter(|_| can_judge && self.comparison.since.is_none());
        deadline::first([
            counts,
            searches,
            revalidation,
            deadline::at(compare_at, Why::Comparison),
            deadline::at(self.sentinels.deadline(), Why::Renewal),
            deadline::at(self.lost.at, Why::Restore),
        ])
    }

    /// Whether new flows had to wait for revalidation, for each batch of openings.
    pub(crate) fn revalidation_waits(&self) -> &CounterVec<RevalidationWait> {
        self.quiet_time.events()
    }

    /// The reasons for which waits for revalidation ended.
    pub(crate) fn revalidation_events(&self) -> &CounterVec<RevalidationEvent> {
        self.revalidation.events()
    }

    // Batches.

    /// Makes a batch of changes, to be sent by [`Switch::commit`]. The batch is not sent before the
    /// switch has been compared: the comparison writes its flows, as far as they are missing.
    pub(crate) fn begin(&mut self, now: Timestamp) -> Batch {
        self.batch(self.is_compared(), now)
    }

    /// Takes the batch of this turn's openings, or makes it; to be handed back by [`Switch::open`].
    /// The batch is sent as soon as there is a connection. A pod that has too many changes under way has
    /// a batch of its own, which waits, and so has an answer that may change too many flows.
    pub(crate) fn begin_openings(
        &mut self,
        asker: PortId,
        expected: Expected,
        now: Timestamp,
    ) -> Batch {
        let is_up = self.is_up();
        let is_full = self.waiting.is_full(asker);
        let shared = match &mut self.openings {
            _ if is_full => {
                let waiting = self.waiting.with_room(asker, expected.denies);
                waiting.map(|waiting| self.batch_of(Written::In(waiting), now))
            }
            _ if is_up && expected.most > CHANGES_UNDER_WAY_MAX => None,
            Some(openings) => Some(openings.batch.take()),
            None => None,
        };
        let mut batch = shared.unwrap_or_else(|| self.batch(is_up, now));
        batch.at = now;
        batch.waits = is_full || expected.most > CHANGES_UNDER_WAY_MAX;
        batch.denies = expected.denies;
        batch.before = batch.len();
        batch.comparisons = self.comparison.ended;
        batch
    }

    fn batch(&mut self, sends: bool, now: Timestamp) -> Batch {
        let written = if sends {
            Written::In(self.next_id())
        } else {
            Written::Unsent {
                comparisons: self.comparison.ended,
            }
        };
        self.batch_of(written, now)
    }

    fn batch_of(&self, written: Written, now: Timestamp) -> Batch {
        Batch {
            written,
            written_at: match written {
                Written::In(_) if self.is_compared() => now,
                Written::In(_) | Written::Unsent { .. } | Written::Before => Timestamp::default(),
            },
            at: now,
            comparisons: self.comparison.ended,
            denies: false,
            waits: false,
            ends_gap: false,
            replaces: false,
            changes: Vec::new(),
            before: 0,
            marks: Vec::new(),
            awaited: BTreeSet::new(),
            paths: BTreeSet::new(),
        }
    }

    fn next_id(&mut self) -> BatchId {
        let id = BatchId(self.next_batch);
        self.next_batch += 1;
        id
    }

    /// How many changes wait between a pod's address and another one.
    pub(crate) fn waiting_between(&self, src: IpAddr, dst: IpAddr) -> usize {
        let ends = Addresses::between(src, dst).map(Ends::Addresses);
        ends.map_or(0, |ends| self.waiting_at(ends))
    }

    /// How many changes wait between these ends.
    pub(crate) fn waiting_at(&self, ends: Ends) -> usize {
        self.waiting.len(ends)
    }

    /// Takes back the batch of openings, with the opening of one answer to this pod. [`Switch::flush_openings`] sends
    /// the batch for all answers of the turn.
    pub(crate) fn open(&mut self, asker: PortId, mut batch: Batch, opening: Option<Opening>) {
        if self.waiting.is_full(asker) || self.is_apart(&batch) {
            self.waiting.push(asker, batch, opening);
            return;
        }
        let before = batch.before;
        self.take_along(&mut batch, before);
        let openings = self.openings.take();
        let (mut openings, mut shares) = openings
            .map(|before| (before.openings, before.shares))
            .unwrap_or_default();
        openings.extend(opening);
        if !batch.is_empty() {
            if batch.id().is_some() {
                let changes = batch.added();
                *shares.entry(asker).or_default() += changes;
                self.waiting.sent(asker, changes);
            }
            self.openings = Some(Openings {
                batch,
                openings,
                shares,
                part_of: None,
            });
        }
    }

    /// What waits between the same ends goes before the changes from index `from` on, and so do the flows of the groups to
    /// which they lead packets.
    fn take_along(&mut self, batch: &mut Batch, from: usize) {
        let written = batch.written;
        let groups = self.waiting.take_along(batch, from).into_iter();
        self.moved.extend(groups.map(|tag| (tag, written)));
    }

    /// The groups whose flows have waited with the changes of a pod, and have gone in another batch since the last call.
    pub(crate) fn take_moved(&mut self) -> Vec<(Tag, Written)> {
        std::mem::take(&mut self.moved)
    }

    /// Whether the batch of an answer is not the one that the answers of this turn share: then its changes wait in the
    /// queue of its pod, and go in parts.
    fn is_apart(&self, batch: &Batch) -> bool {
        batch.id().is_some()
            && match &self.openings {
                Some(shared) => shared.batch.id() != batch.id(),
                None => batch.waits || batch.len() > CHANGES_UNDER_WAY_MAX,
            }
    }

    /// Reports an opening without a change of flows: with the last batch under way that the answer has to wait for,
    /// or at once. An opening that waits for the comparison is not reported, as without groups.
    pub(crate) fn opened_by_group(&mut self, opening: Opening, wait: &Wait, out: &mut Output) {
        let now = out.now();
        if wait.comparison {
            return;
        }
        let batches = wait.batches.iter().rev();
        let mut pending = batches.filter(|batch| self.pending.contains_key(batch));
        if let Some(last) = pending.next()
            && let Some(pending) = self.pending.get_mut(last)
        {
            pending.openings.push(opening);
            return;
        }
        self.quiet_time.count(RevalidationWait::Group);
        out.report(opening.report(RevalidationWait::Group, now));
    }

    /// Sends the openings of this turn, and those that have waited, as far as there is room for them; then the next part
    /// of the flows that are to be removed.
    pub(crate) fn flush_openings(&mut self, planner: &mut Planner, out: &mut Output) {
        let now = out.now();
        self.send_openings(planner, out);
        while let Some(port) = self.waiting.next() {
            self.send_next(port, planner, out);
        }
        if !self.is_compared() {
            // Their batch would not be sent.
            return;
        }
        let part = self.waiting.take_removals();
        if !part.is_empty() {
            let mut batch = self.begin(now);
            self.add_part(part, &mut batch);
            self.take_along(&mut batch, 0);
            self.send(batch.into(), true, planner, out);
        }
    }

    fn send_openings(&mut self, planner: &mut Planner, out: &mut Output) {
        let now = out.now();
        if let Some(mut openings) = self.openings.take() {
            openings.batch.at = now;
            // Openings are never atomic.
            self.send(openings, false, planner, out);
        }
    }

    /// Sends the next changes of a pod that wait; returns whether there were any.
    fn send_next(&mut self, port: PortId, planner: &mut Planner, out: &mut Output) -> bool {
        let now = out.now();
        let Some(part) = self.waiting.take_next(port) else {
            return false;
        };
        let Part {
            mut batch,
            openings,
            has_more,
        } = part;
        batch.at = now;
        let part_of = batch.id().filter(|_| has_more);
        if has_more {
            // Nobody waits for a part but the last.
            batch.written = Written::In(self.next_id());
        } else if self.comparison.since.is_some() {
            self.comparison.unshown.extend(batch.id());
        }
        self.waiting.sent(port, batch.len());
        let shares = ChangesByPort::from([(port, batch.len())]);
        let openings = Openings {
            batch,
            openings,
            shares,
            part_of,
        };
        self.send(openings, false, planner, out);
        true
    }

    // What only ends.

    /// A pod is gone, and its flows were put off.
    pub(crate) fn pod_gone(&mut self, port: PortId, batch: &mut Batch) {
        batch.extend(self.waiting.pod_gone(port));
    }

    /// Takes removals out of the batch that nobody waits for: those of these flows, where nothing is added between the
    /// same ends. The next part of all that wait goes with the batch.
    pub(crate) fn put_off(&mut self, batch: &mut Batch, is_one: impl Fn(&FlowKey) -> bool) {
        if batch.id().is_none() {
            // The comparison finds the flows.
            return;
        }
        self.waiting.put_off(&mut batch.changes, is_one);
        let part = self.waiting.take_removals();
        if !part.is_empty() {
            self.add_part(part, batch);
        }
    }

    /// Adds a part of the removals to the batch, which is sent, before all else: the batch may add one of the flows.
    fn add_part(&mut self, part: Vec<FlowChange>, batch: &mut Batch) {
        if let Some(id) = batch.id() {
            self.waiting.removals_sent(id, &part);
        }
        let mut changes = part.iter();
        batch.replaces |= changes.any(|change| matches!(change, FlowChange::Add(..)));
        batch.changes.splice(..0, part);
    }

    /// Adds the waiting changes between the ends of these flows to the batch, before all else, if one of these flows
    /// ends.
    pub(crate) fn end(&mut self, batch: &mut Batch, is_one: impl Fn(&FlowKey) -> bool) {
        if batch.id().is_some() {
            let ending = self.waiting.take_ending(is_one);
            batch.replaces |= !ending.is_empty();
            batch.changes.splice(..0, ending);
        }
    }

    /// Sends the changes: all or none (`atomic`), or one by one. Returns the number of the batch,
    /// if it is sent.
    pub(crate) fn commit(
        &mut self,
        mut batch: Batch,
        atomic: bool,
        planner: &mut Planner,
        out: &mut Output,
    ) -> Option<BatchId> {
        if batch.id().is_none() {
            batch.give_out_marks(out);
            if batch.replaces || batch.changes.iter().any(FlowChange::ends_flow) {
                // The dump under way may have shown the flow already, as one that is wanted.
                self.compare_by(out.now());
            }
            self.waiting.follow(batch.changes);
            return None;
        }
        self.take_along(&mut batch, 0);
        let awaited = std::mem::take(&mut batch.awaited);
        let sent = self.send(batch.into(), atomic, planner, out);
        for port in self.waiting.with_batches(&awaited) {
            while self.send_next(port, planner, out) {}
        }
        sent
    }

    /// The same for a batch of any size: it goes in as many parts as the edge needs.
    fn send(
        &mut self,
        mut openings: Openings,
        atomic: bool,
        planner: &mut Planner,
        out: &mut Output,
    ) -> Option<BatchId> {
        let batch = &mut openings.batch;
        batch.give_out_marks(out);
        while batch.id().is_some() && batch.len() > self.changes_max {
            let rest = batch.changes.split_off(self.changes_max);
            let mut part = batch.take_changes();
            batch.changes = rest;
            // Nobody waits for a part but the last.
            part.written = Written::In(self.next_id());
            let part = Openings {
                part_of: batch.id(),
                ..part.into()
            };
            self.send_part(part, atomic, planner, out);
        }
        self.send_part(openings, atomic, planner, out)
    }

    fn send_part(
        &mut self,
        openings: Openings,
        atomic: bool,
        planner: &mut Planner,
        out: &mut Output,
    ) -> Option<BatchId> {
        let Openings {
            batch,
            openings,
            shares,
            part_of,
        } = openings;
        let id = batch.id()?;
        let written_at = batch.written_at();
        let Batch {
            mut changes,
            at,
            ends_gap,
            paths,
            ..
        } = batch;
        let was_empty = changes.is_empty();
        // Of a batch that has waited, other pods' answers may have written all that was left. It ends with its parts.
        let is_end = was_empty && !shares.is_empty();
        self.foreign.leave(&mut changes, out);
        if changes.is_empty() && !is_end {
            self.waiting.answered(id, &shares);
            if !was_empty {
                self.left_out.push(id);
            }
            if ends_gap {
                // Marks alone have opened addresses, and count already.
                self.blocked_searches.gap_ended(at);
            }
            return None;
        }
        if ends_gap {
            self.blocked_searches.restoring(id);
        }
        for change in &changes {
            match change {
                FlowChange::Add(_, FlowBody { cookie, .. })
                | FlowChange::Delete(_, Some(cookie))
                | FlowChange::Renew(FlowBody { cookie, .. })
                    if cookie.is_of_sentinel() => {}
                FlowChange::Add(..) => out.counters.flows_added += 1,
                FlowChange::Delete(..) => out.counters.flows_removed += 1,
                FlowChange::Renew(_) => {}
            }
        }
        self.sentinels.tie(&mut changes, planner);
        let before = std::mem::replace(&mut self.sent_at, at);
        let estimate = self.revalidation.estimate();
        let count = self.quiet_time.to_count(&openings, estimate, at);
        self.pending.insert(
            id,
            Pending {
                openings,
                sent_at: at,
                written_at,
                counted: false,
                paths,
                before,
                shares,
                part_of,
                // One change is atomic by itself.
                all_or_none: (atomic && changes.len() > 1).then(|| changes.clone()),
            },
        );
        out.command(Command::Apply {
            batch: id,
            atomic,
            changes,
            count,
        });
        Some(id)
    }

    /// The batches that were not sent since the last call. The switch will not answer them, so nothing need wait for
    /// them.
    pub(crate) fn take_left_out(&mut self) -> Vec<BatchId> {
        std::mem::take(&mut self.left_out)
    }

    /// The switch has refused an atomic batch, perhaps for one change of one pod: sends the batch again, with each
    /// change by itself. Changes that are no longer wanted are left out. Returns whether there was a change to send;
    /// the switch's reply to it is the reply to the batch.
    pub(crate) fn send_one_by_one(
        &mut self,
        batch: BatchId,
        access: &mut Access<'_>,
        out: &mut Output,
    ) -> bool {
        let pending = self.pending.get_mut(&batch);
        let Some(mut changes) = pending.and_then(|pending| pending.all_or_none.take()) else {
            return false;
        };
        let count = changes.len();
        changes.retain(|change| self.is_wanted(change, access));
        if changes.len() < count {
            // A flow that was to be replaced is there still, and what ends it may have come before.
            self.compare_by(out.now());
        }
        self.foreign.leave(&mut changes, out);
        if changes.is_empty() {
            return false;
        }
        out.command(Command::Apply {
            batch,
            atomic: false,
            changes,
            count: Vec::new(),
        });
        true
    }

    /// Whether the switch should be as this change makes it.
    fn is_wanted(&self, change: &FlowChange, access: &mut Access<'_>) -> bool {
        let mut is_there = |key: &FlowKey, cookie| match Sentinel::of(key) {
            Some(sentinel) => self.sentinels.contain(&sentinel),
            None => {
                let holder = access.holder_of(key);
                let flows = holder.and_then(|holder| access.flows(holder));
                flows.is_some_and(|(_, flows)| match cookie {
                    Some(cookie) => flows.has(key, cookie),
                    None => flows.contains(key),
                })
            }
        };
        match change {
            FlowChange::Add(key, body) => is_there(key, Some(body.cookie)),
            FlowChange::Delete(key, cookie) => !is_there(key, *cookie),
            FlowChange::Renew(_) => true,
        }
    }

    /// The switch has answered a batch; `is_awaited` says whether frames wait for the batch.
    pub(crate) fn answered(
        &mut self,
        batch: BatchId,
        result: Result<(), BatchError>,
        is_awaited: bool,
        out: &mut Output,
    ) -> Answered {
        let now = out.now();
        let mut is_written = result.is_ok();
        let Some(pending) = self.pending.remove(&batch) else {
            return Answered {
                is_over: false,
                is_written,
            };
        };
        let has_refused_part = self.incomplete.remove(&batch);
        is_written &= !has_refused_part;
        self.lost.batches.remove(&batch);
        if has_refused_part || matches!(result, Err(BatchError::Refused(_))) {
            self.refused.note(batch, pending.written_at);
        }
        self.waiting.answered(batch, &pending.shares);
        let pass_from = pending.before + REVALIDATION_INTERVAL;
        let estimate = self.revalidation.estimate();
        self.blocked_searches
            .answered(batch, pass_from.since(now) + estimate, now);
        let is_over = match result {
            Ok(()) => {
                let Pending {
                    openings,
                    sent_at,
                    counted,
                    paths,
                    before,
                    ..
                } = pending;
                let revalidation_wait = self
                    .quiet_time
                    .revalidation_wait(&openings, counted, estimate, sent_at);
                if !openings.is_empty() {
                    self.quiet_time.count(revalidation_wait);
                }
                for opening in openings {
                    out.report(opening.report(revalidation_wait, now));
                }
                let is_quiet = revalidation_wait == RevalidationWait::Quiet;
                if !is_quiet {
                    self.revalidation.begin(batch, paths, before, now);
                    if is_awaited {
                        self.revalidation.awaits(batch);
                    }
                }
                is_quiet
            }
            Err(BatchError::ConnectionLost) => {
                self.unanswered.insert(batch);
                false
            }
            Err(ref error @ BatchError::Refused(ref refused)) => {
                out.flows_refused(refused.len(), error.to_string());
                self.incomplete.extend(pending.part_of);
                true
            }
        };
        Answered {
            is_over,
            is_written,
        }
    }

    /// The batches whose wait for revalidation is over by time. `is_held` says whether a frame is still
    /// held for a batch.
    pub(crate) fn revalidated(
        &mut self,
        is_held: impl Fn(BatchId) -> bool,
        now: Timestamp,
    ) -> Vec<BatchId> {
        self.revalidation.expired(is_held, now)
    }

    /// Sets how long a pass of the revalidators takes behind a change of flows.
    pub(crate) fn revalidates_in(&mut self, time: Duration) {
        self.revalidation.set_estimate(time);
    }

    /// Asks the datapath for megaflows that drop, if frames wait for the answer.
    pub(crate) fn find_dropping(&mut self, out: &mut Output) {
        let now = out.now();
        if let Some(paths) = self.revalidation.look(now) {
            out.command(Command::FindDropping(paths));
        }
    }

    /// Takes the result of a look at the datapath. Returns the batches whose wait is over.
    pub(crate) fn dropping_found(&mut self, looked: &Looked, now: Timestamp) -> Vec<BatchId> {
        self.revalidation.looked(looked, now)
    }

    // The connection.

    /// There is a connection.
    pub(crate) fn connected(&mut self, now: Timestamp) {
        self.phase = Phase::Up;
        self.comparison.at = Some(now);
        self.sentinels.connected(now);
        self.quiet_time.connected(now);
    }

    /// The connection is lost, and with it all replies. Returns the batches whose wait is over.
    pub(crate) fn disconnected(&mut self) -> Vec<BatchId> {
        self.quiet_time.disconnected();
        self.blocked_searches.disconnected();
        self.unanswered.extend(self.pending.keys());
        self.unanswered.extend(self.waiting.disconnected());
        self.phase = Phase::Down;
        self.comparison = Comparison {
            number: self.comparison.number,
            ended: self.comparison.ended,
            ..Comparison::default()
        };
        self.lost = Lost::default();
        self.sentinels.disconnected();
        self.monitored.clear();
        self.openings = None;
        self.moved.clear();
        self.pending.clear();
        self.incomplete.clear();
        self.refused = RefusedBatches::default();
        self.sent_at = Timestamp::default();
        self.foreign.clear();
        self.revalidation.disconnected()
    }

    /// The switch will not answer the current dump. The next dump begins one interval later.
    pub(crate) fn question_refused(&mut self, now: Timestamp) {
        self.comparison.since = None;
        self.waiting.dump_ends();
        self.comparison.at = Some(now + COMPARE_INTERVAL);
    }

    /// The flow monitor was silent for a while.
    pub(crate) fn monitor_gap(&mut self, now: Timestamp) {
        self.compare_by(now);
        self.quiet_time.gap();
    }

    /// Sets the tables that the flow monitor covers.
    pub(crate) fn monitor(&mut self, tables: BTreeSet<u8>, out: &mut Output) {
        // A table that no rule uses any more does no harm; a missing one would.
        if self.is_up() && !tables.is_subset(&self.monitored) {
            self.monitored.extend(tables);
            out.command(Command::MonitorTables(self.monitored.clone()));
        }
    }

    // Time.

    /// Carries out all due work. Returns whether lost flows are to be restored: OVN may have come back with other
    /// tables.
    pub(crate) fn timeout(&mut self, planner: &mut Planner, out: &mut Output) -> bool {
        let now = out.now();
        if let Some(renewals) = self.sentinels.renew(planner, now) {
            let mut batch = self.begin(now);
            batch.extend(renewals);
            self.commit(batch, false, planner, out);
        }
        self.lost.at.take_if(|at| *at <= now).is_some()
    }

    // Blocked connections.

    /// Asks for the connections that OVN has blocked, when a search is due.
    pub(crate) fn search_for_blocked(&mut self, out: &mut Output) {
        if self.blocked_searches.begin(out.now()) {
            out.command(Command::FindBlocked);
        }
    }

    /// Asks to unblock those of the connections that the rules now let pass.
    pub(crate) fn blocked_found(
        &mut self,
        mut connections: Vec<BlockedConnection>,
        more: bool,
        access: &Access<'_>,
        out: &mut Output,
    ) {
        let now = out.now();
        access.retain_passing(&mut connections);
        self.blocked_searches.found(connections.len(), more, now);
        if !connections.is_empty() {
            out.command(Command::Unblock(connections));
        }
    }

    // Quiet time.

    /// Sets how long the switch keeps a megaflow after its last packet, as its database says.
    pub(crate) fn megaflows_idle_for(&mut self, idle: Duration) {
        self.quiet_time.megaflows_idle_for(idle);
    }

    /// The rules of a namespace have changed, or where OVN enforces them.
    pub(crate) fn rules_changed(&mut self, namespace: &str, now: Timestamp) {
        self.quiet_time.rules_changed(namespace, now);
    }

    /// A flow that is counted was removed.
    pub(crate) fn count_lost(&mut self, cookie: u32) {
        self.quiet_time.count_lost(cookie);
    }

    /// The flows with some cookies were counted, behind the changes of a batch if there is one.
    pub(crate) fn counted(
        &mut self,
        batch: Option<BatchId>,
        counts: Vec<CookieCount>,
        now: Timestamp,
    ) {
        self.quiet_time.counted(counts, now);
        if let Some(pending) = batch.and_then(|batch| self.pending.get_mut(&batch)) {
            pending.counted = true;
        }
    }

    /// Asks for the counters of the flows that deny, if that is due.
    pub(crate) fn count_denials(&mut self, ports: &Ports, policy: &Policy, out: &mut Output) {
        self.quiet_time.timeout(ports, policy, out);
    }
}

impl Opening {
    /// The report of the opening, once its flows are in force.
    fn report(self, revalidation_wait: RevalidationWait, now: Timestamp) -> Report {
        Report::Opened {
            namespace: self.namespace.unwrap_or_default(),
            port: self.port,
            name: self.name,
            addresses: self.addresses,
            rules: self.rules,
            flows: self.changes,
            activation: self.waits_since.map(|since| now.since(since)),
            revalidation_wait: revalidation_wait.as_str(),
        }
    }
}

#[cfg(test)]
mod tests;
