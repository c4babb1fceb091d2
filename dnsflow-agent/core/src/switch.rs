//! The switch: the batches written to it, its replies, and the comparison of its flows with the
//! cache.
//!
//! A `Batch` is made before changes are planned into it (`Switch::begin`), and sent afterwards
//! (`Switch::commit`). The openings of all answers of a turn share one batch
//! (`Switch::begin_openings`), but for pods that have too many changes under way. The shared batch is sent
//! before any other batch. What only ends goes a part at a time (`waiting`).

pub mod blocked;
pub mod denied;
pub mod hold;
pub mod revalidation;

mod denials;
mod waiting;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    net::IpAddr,
    time::Duration,
};

use crate::{
    Command, Timestamp,
    access::{Access, Holder},
    installed::{Batch, ReadMark, Reading, Written},
    io::{
        input::{BatchError, BatchId, CookieCount, FlowQuestion, MarkChange, MarkFound},
        output::Output,
        report::Report,
    },
    pods::ports::Ports,
    policy::{Policy, plan::Planner},
    switch::{
        blocked::Looks,
        denied::RevalidationWait,
        hold::Wait,
        revalidation::{Revalidation, RevalidationEvent},
    },
    tools::{
        counter_vec::{CounterVec, Label as _},
        deadline::{self, Deadline, Why},
    },
    values::{
        connection::{BlockedConnection, Path},
        flow::{Cookie, FlowBody, FlowChange, FlowKey, InstalledFlow, Sentinel},
        ids::PortId,
        limits::{
            CHANGES_PER_BATCH_MAX, CHANGES_UNDER_WAY_MAX, COMPARE_INTERVAL, FOREIGN_FLOWS_MAX,
            RESTORE_DELAY, RESTORE_MAX, RESTORING_MAX, REVALIDATION_INTERVAL, UNKNOWN_MAX,
        },
        name::DomainName,
    },
};
use denials::Denials;
use waiting::{Part, Shares, Waiting};

/// What an answer opened; reported once the switch has confirmed the flows.
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
    /// When the kernel saw the answer.
    pub(crate) captured_at: Timestamp,
}

/// A batch that the switch has not answered.
#[derive(Debug)]
struct Pending {
    openings: Vec<Opening>,
    sent_at: Timestamp,
    /// Whether the flows that deny were counted behind its changes.
    counted: bool,
    /// The paths of its flows.
    paths: BTreeSet<Path>,
    /// When the batch before it was sent.
    before: Timestamp,
    /// Whose answers have made its changes.
    shares: Shares,
    /// The changes of an atomic batch: if the switch refuses one of them, the others are sent again.
    all_or_none: Option<Vec<FlowChange>>,
}

/// What the answers of a turn open.
#[derive(Debug)]
struct Openings {
    batch: Batch,
    openings: Vec<Opening>,
    shares: Shares,
}

/// A flow of somebody else.
#[derive(Debug)]
struct Foreign {
    cookie: u64,
    /// Whether people were told that it is in the way of one of ours.
    is_reported: bool,
}

/// The comparison of the switch with the cache.
#[derive(Debug, Default)]
struct Comparison {
    /// Comparisons that have begun.
    number: u32,
    /// Comparisons that have ended.
    ended: u32,
    /// When the current dump began.
    since: Option<Timestamp>,
    /// The flows in the dump so far that no entry has.
    unknown: Vec<InstalledFlow>,
    /// The marks of an earlier run that no entry has.
    marks: Vec<(PortId, MarkFound)>,
    /// Batches that the switch had not confirmed when the current dump began, and those that had waited then: the dump,
    /// which comes over another connection, may not show their flows.
    unshown: BTreeSet<BatchId>,
    /// The sentinel flows that the dump has shown, with their cookies and hard timeouts.
    sentinels: BTreeMap<Sentinel, (Cookie, u16)>,
    /// When the next comparison begins.
    at: Option<Timestamp>,
    /// Whether one has ended since the last call of [`Switch::settled`] that gave anything.
    has_ended: bool,
}

/// Lost flows.
#[derive(Debug, Default)]
struct Lost {
    /// Who has lost flows; some may have none any more.
    holders: VecDeque<Holder>,
    /// Nothing is restored before this time.
    at: Option<Timestamp>,
    /// The batches under way that restore flows.
    batches: BTreeSet<BatchId>,
    /// Flows restored since the last time that no flow was lost.
    restored: usize,
}

/// The engine's side of the OpenFlow connection.
#[derive(Debug)]
pub(crate) struct Switch {
    up: bool,
    /// Whether the switch has agreed with the cache since it came up.
    compared: bool,
    /// Whether flows of an earlier run were adopted.
    adopted: bool,
    comparison: Comparison,
    lost: Lost,
    renew_at: Option<Timestamp>,
    /// The sentinel flows that should be in the switch now.
    sentinels: BTreeSet<Sentinel>,
    /// Their hard timeout, in seconds.
    keep_flows_s: u16,
    monitored: BTreeSet<u8>,
    /// The openings of this turn.
    openings: Option<Openings>,
    /// Changes of pods that have too many under way, and flows that are removed a part at a time.
    waiting: Waiting,
    next_batch: u64,
    /// Changes of one batch, at most: half of [`CHANGES_PER_BATCH_MAX`], as each may need a sentinel flow.
    changes_max: usize,
    pending: BTreeMap<BatchId, Pending>,
    /// Batches that the switch had not answered when the connection was lost: the next comparison
    /// covers them.
    unanswered: BTreeSet<BatchId>,
    /// When a batch was last sent.
    sent_at: Timestamp,
    /// Flows of others whose keys our flows could have. They are never overwritten.
    foreign: HashMap<FlowKey, Foreign>,
    /// Batches that are not sent, because all of their flows are others'.
    left_out: Vec<BatchId>,
    /// Confirmed batches whose flows the datapath may not follow yet.
    revalidation: Revalidation,
    /// Whether a megaflow that drops can exist.
    denials: Denials,
    /// When to look for connections that OVN has blocked in a gap of our flows.
    looks: Looks,
}

impl Switch {
    /// There is no connection yet. `hold_max`: the longest time for which an answer is held.
    /// `keep_flows_s`: how long flows stay without an agent. `idle_grace`: how long an unused address
    /// stays open.
    pub(crate) fn new(hold_max: Duration, keep_flows_s: u16, idle_grace: Duration) -> Self {
        Self {
            up: false,
            compared: false,
            adopted: false,
            comparison: Comparison::default(),
            lost: Lost::default(),
            renew_at: None,
            sentinels: BTreeSet::new(),
            keep_flows_s,
            monitored: BTreeSet::new(),
            openings: None,
            waiting: Waiting::default(),
            next_batch: 0,
            changes_max: CHANGES_PER_BATCH_MAX / 2,
            pending: BTreeMap::new(),
            unanswered: BTreeSet::new(),
            sent_at: Timestamp::default(),
            foreign: HashMap::new(),
            left_out: Vec::new(),
            revalidation: Revalidation::new(hold_max),
            denials: Denials::new(!hold_max.is_zero(), idle_grace),
            looks: Looks::default(),
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
        self.up
    }

    /// Whether the switch has not confirmed a batch, or a batch waits for another. No batch is sent without a connection.
    pub(crate) fn is_writing(&self) -> bool {
        self.up && !(self.waiting.is_empty() && self.pending.is_empty())
    }

    /// Whether the switch has agreed with the cache since it came up.
    pub(crate) fn is_compared(&self) -> bool {
        self.compared
    }

    /// Whether the flows of an earlier run have been found, and adopted or removed.
    pub(crate) fn has_adopted(&self) -> bool {
        self.adopted
    }

    /// How many comparisons have ended.
    pub(crate) fn comparisons(&self) -> u32 {
        self.comparison.ended
    }

    /// What an answer has to wait for until flows that came into the switch like this are in force.
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

    /// Whether this is the batch of this turn's openings.
    fn opens_in(&self, batch: BatchId) -> bool {
        let openings = self.openings.as_ref();
        openings.is_some_and(|openings| openings.batch.id() == Some(batch))
    }

    /// When something is due. A comparison is due only if its result could be judged (`can_judge`).
    pub(crate) fn deadline(&self, can_judge: bool) -> Option<Deadline> {
        let counts = deadline::at(self.denials.deadline(), Why::Count);
        let looks = deadline::at(self.looks.deadline(), Why::Blocked);
        if !self.up {
            return deadline::first([counts, looks]);
        }
        let revalidation = deadline::at(self.revalidation.deadline(), Why::Revalidation);
        let compare_at = self
            .comparison
            .at
            .filter(|_| can_judge && self.comparison.since.is_none());
        deadline::first([
            counts,
            looks,
            revalidation,
            deadline::at(compare_at, Why::Comparison),
            deadline::at(self.renew_at, Why::Renewal),
            deadline::at(self.lost.at, Why::Restore),
        ])
    }

    /// Whether new flows had to wait for revalidation, for each batch of openings.
    pub(crate) fn revalidation_waits(&self) -> &CounterVec<RevalidationWait> {
        self.denials.events()
    }

    /// What ended the waits for revalidation.
    pub(crate) fn revalidation_events(&self) -> &CounterVec<RevalidationEvent> {
        self.revalidation.events()
    }

    // Batches.

    /// Makes a batch of changes, to be sent by [`Switch::commit`]. The batch is not sent before the
    /// switch has been compared: the comparison writes its flows, as far as they are missing.
    pub(crate) fn begin(&mut self, now: Timestamp) -> Batch {
        self.batch(self.compared, now)
    }

    /// Takes the batch of this turn's openings, or makes it; to be handed back by [`Switch::open`].
    /// The batch is sent as soon as there is a connection. A pod that has too many changes under way has
    /// a batch of its own, which waits, and so has an answer that may change `most` flows if these are too many.
    pub(crate) fn begin_openings(&mut self, asker: PortId, most: usize, now: Timestamp) -> Batch {
        let shared = match &mut self.openings {
            _ if self.waiting.is_full(asker) => {
                let last = self.waiting.last_with_room(asker);
                last.map(|last| self.batch_of(Written::In(last), now))
            }
            _ if self.up && most > CHANGES_UNDER_WAY_MAX => None,
            Some(openings) => Some(openings.batch.take()),
            None => None,
        };
        let mut batch = shared.unwrap_or_else(|| self.batch(self.up, now));
        batch.at = now;
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
            written_at: if self.compared {
                now
            } else {
                Timestamp::default()
            },
            at: now,
            comparisons: self.comparison.ended,
            ends_gap: false,
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
        self.waiting.between(src, dst)
    }

    /// Takes back the batch of openings, with what one answer to this pod opened.
    /// [`Switch::flush_openings`] sends the batch for all answers of the turn.
    pub(crate) fn open(&mut self, asker: PortId, mut batch: Batch, opening: Option<Opening>) {
        if self.waiting.is_full(asker) || self.is_apart(&batch) {
            self.waiting.push(asker, batch, opening);
            return;
        }
        self.waiting.take_along(&mut batch.changes, batch.before);
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
            });
        }
    }

    /// Whether the batch of an answer is not the one that the answers of this turn share: then its changes wait in the
    /// queue of its pod, and go in parts.
    fn is_apart(&self, batch: &Batch) -> bool {
        batch.id().is_some()
            && match &self.openings {
                Some(shared) => shared.batch.id() != batch.id(),
                None => batch.len() > CHANGES_UNDER_WAY_MAX,
            }
    }

    /// Reports what an answer opened without a change of flows: with the last batch under way that the answer has to wait
    /// for, or at once. What waits for the comparison is not reported, as without verdicts.
    pub(crate) fn opened_by_verdict(
        &mut self,
        opening: Opening,
        wait: &Wait,
        now: Timestamp,
        out: &mut Output,
    ) {
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
        self.denials.count(RevalidationWait::Verdict);
        out.report(opening.report(RevalidationWait::Verdict, now));
    }

    /// Sends the openings of this turn, and those that have waited, as far as there is room for them; then the next part
    /// of the flows that are to be removed.
    pub(crate) fn flush_openings(
        &mut self,
        planner: &mut Planner,
        now: Timestamp,
        out: &mut Output,
    ) {
        self.send_openings(planner, now, out);
        while let Some(port) = self.waiting.next() {
            self.send_next(port, planner, now, out);
        }
        let part = self.waiting.take_removals();
        if !part.is_empty() {
            let mut batch = self.begin(now);
            self.add_part(part, &mut batch);
            self.send(batch, true, Vec::new(), Shares::new(), planner, out);
        }
    }

    fn send_openings(&mut self, planner: &mut Planner, now: Timestamp, out: &mut Output) {
        if let Some(openings) = self.openings.take() {
            let Openings {
                batch,
                openings,
                shares,
            } = openings;
            let batch = Batch { at: now, ..batch };
            // Openings are never atomic.
            self.send(batch, false, openings, shares, planner, out);
        }
    }

    /// Sends the next changes of a pod that wait; returns whether there were any.
    fn send_next(
        &mut self,
        port: PortId,
        planner: &mut Planner,
        now: Timestamp,
        out: &mut Output,
    ) -> bool {
        let Some(part) = self.waiting.take_next(port) else {
            return false;
        };
        let Part {
            mut batch,
            openings,
            has_more,
        } = part;
        batch.at = now;
        if has_more {
            // Nobody waits for a part but the last.
            batch.written = Written::In(self.next_id());
        } else if self.comparison.since.is_some() {
            self.comparison.unshown.extend(batch.id());
        }
        self.waiting.sent(port, batch.len());
        let shares = Shares::from([(port, batch.len())]);
        self.send(batch, false, openings, shares, planner, out);
        true
    }

    // What only ends.

    /// Takes removals out of the batch that nobody waits for: those at these addresses of pods, where nothing is added
    /// between the same ends. The next part of all that wait goes with the batch. Those of a verdict do not wait: its
    /// number rests from now on.
    pub(crate) fn put_off(&mut self, batch: &mut Batch, is_at: impl Fn(IpAddr) -> bool) {
        if batch.id().is_none() {
            // The comparison finds the flows.
            return;
        }
        self.waiting.put_off(&mut batch.changes, is_at);
        let part = self.waiting.take_removals();
        if !part.is_empty() {
            self.add_part(part, batch);
        }
    }

    /// Adds a part of the removals to the batch, which is sent.
    fn add_part(&mut self, part: Vec<FlowChange>, batch: &mut Batch) {
        if let Some(id) = batch.id() {
            self.waiting.removals_sent(id, &part);
        }
        batch.extend(part);
    }

    /// Adds what only ends at these addresses of pods to the batch, before all else.
    pub(crate) fn end_at(&mut self, batch: &mut Batch, is_at: impl Fn(IpAddr) -> bool) {
        if batch.id().is_some() {
            let removals = self.waiting.take_removals_at(is_at);
            batch.changes.splice(..0, removals);
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
        self.waiting.take_along(&mut batch.changes, 0);
        for port in self.waiting.with_batches(&batch.awaited) {
            while self.send_next(port, planner, batch.at, out) {}
        }
        self.send(batch, atomic, Vec::new(), Shares::new(), planner, out)
    }

    /// The same for a batch of any size: it goes in as many parts as the edge needs.
    fn send(
        &mut self,
        mut batch: Batch,
        atomic: bool,
        openings: Vec<Opening>,
        shares: Shares,
        planner: &mut Planner,
        out: &mut Output,
    ) -> Option<BatchId> {
        batch.give_out_marks(out);
        while batch.id().is_some() && batch.len() > self.changes_max {
            let rest = batch.changes.split_off(self.changes_max);
            let mut part = batch.take_changes();
            batch.changes = rest;
            // Nobody waits for a part but the last.
            part.written = Written::In(self.next_id());
            self.send_part(part, atomic, Vec::new(), Shares::new(), planner, out);
        }
        self.send_part(batch, atomic, openings, shares, planner, out)
    }

    fn send_part(
        &mut self,
        batch: Batch,
        atomic: bool,
        openings: Vec<Opening>,
        shares: Shares,
        planner: &mut Planner,
        out: &mut Output,
    ) -> Option<BatchId> {
        let id = batch.id()?;
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
        self.leave_foreign(&mut changes, out);
        if changes.is_empty() && !is_end {
            self.waiting.answered(id, &shares);
            if !was_empty {
                self.left_out.push(id);
            }
            if ends_gap {
                // Marks alone have opened addresses, and count already.
                self.looks.gap_ended(at);
            }
            return None;
        }
        if ends_gap {
            self.looks.restoring(id);
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
        self.tie(&mut changes, planner);
        let before = std::mem::replace(&mut self.sent_at, at);
        let estimate = self.revalidation.estimate();
        let count = self.denials.to_count(&openings, estimate, at);
        self.pending.insert(
            id,
            Pending {
                openings,
                sent_at: at,
                counted: false,
                paths,
                before,
                shares,
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

    /// Takes out of the changes what would overwrite flows of others.
    fn leave_foreign(&mut self, changes: &mut Vec<FlowChange>, out: &mut Output) {
        if self.foreign.is_empty() {
            return;
        }
        changes.retain(|change| {
            let foreign = match change {
                FlowChange::Add(key, _) => self.foreign.get_mut(key).map(|foreign| (key, foreign)),
                FlowChange::Delete(..) | FlowChange::Renew(_) => None,
            };
            let is_ours = foreign.is_none();
            if let Some((key, foreign)) = foreign {
                foreign.is_in_the_way(key, out);
            }
            is_ours
        });
    }

    /// The batches that were not sent since the last call. Nothing will be known of them: what waits for them need not.
    pub(crate) fn take_left_out(&mut self) -> Vec<BatchId> {
        std::mem::take(&mut self.left_out)
    }

    /// The switch has refused an atomic batch, perhaps for one change of one pod: sends the batch again, with each change
    /// by itself. What was taken back since then is left out. Returns whether there was anything to send; the answer to
    /// that is the answer to the batch.
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
        changes.retain(|change| self.is_wanted(change, access));
        self.leave_foreign(&mut changes, out);
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
            Some(sentinel) => self.sentinels.contains(&sentinel),
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
    /// Returns whether their wait is over. If not, the frames wait for the datapath.
    pub(crate) fn applied(
        &mut self,
        batch: BatchId,
        result: Result<(), BatchError>,
        is_awaited: bool,
        now: Timestamp,
        out: &mut Output,
    ) -> bool {
        let Some(pending) = self.pending.remove(&batch) else {
            return false;
        };
        self.lost.batches.remove(&batch);
        self.waiting.answered(batch, &pending.shares);
        let pass_from = pending.before + REVALIDATION_INTERVAL;
        let estimate = self.revalidation.estimate();
        self.looks
            .applied(batch, pass_from.since(now) + estimate, now);
        match result {
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
                    .denials
                    .revalidation_wait(&openings, counted, estimate, sent_at);
                if !openings.is_empty() {
                    self.denials.count(revalidation_wait);
                }
                for opening in openings {
                    out.report(opening.report(revalidation_wait, now));
                }
                let is_quiet = revalidation_wait == RevalidationWait::Quiet;
                if !is_quiet {
                    self.revalidation
                        .begin(batch, paths, before, is_awaited, now);
                }
                is_quiet
            }
            Err(BatchError::ConnectionLost) => {
                self.unanswered.insert(batch);
                false
            }
            Err(error @ BatchError::Refused(_)) => {
                if let BatchError::Refused(refused) = &error {
                    out.counters.flows_refused += refused.len() as u64;
                }
                out.report(Report::FlowsRefused {
                    reason: error.to_string(),
                });
                true
            }
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
    pub(crate) fn find_dropping(&mut self, now: Timestamp, out: &mut Output) {
        if let Some(paths) = self.revalidation.look(now) {
            out.command(Command::FindDropping(paths));
        }
    }

    /// Takes the paths on which a megaflow drops, or `None` if the datapath could not be asked.
    /// Returns the batches whose wait is over.
    pub(crate) fn dropping_found(
        &mut self,
        dropping: Option<&[Path]>,
        now: Timestamp,
    ) -> Vec<BatchId> {
        self.revalidation.looked(dropping, now)
    }

    // The connection.

    /// There is a connection.
    pub(crate) fn connected(&mut self, now: Timestamp) {
        self.up = true;
        self.comparison.at = Some(now);
        self.renew_at = Some(now + self.renew_interval());
        self.denials.connected(now);
    }

    /// The connection is lost, and with it all replies. Returns the batches whose wait is over.
    pub(crate) fn disconnected(&mut self) -> Vec<BatchId> {
        self.denials.disconnected();
        self.looks.disconnected();
        self.unanswered.extend(self.pending.keys());
        self.unanswered.extend(self.waiting.disconnected());
        self.up = false;
        self.compared = false;
        self.comparison = Comparison {
            number: self.comparison.number,
            ended: self.comparison.ended,
            ..Comparison::default()
        };
        self.lost = Lost::default();
        self.renew_at = None;
        self.sentinels.clear();
        self.monitored.clear();
        self.openings = None;
        self.pending.clear();
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
        self.compare_soon(now);
        self.denials.gap();
    }

    /// Sets the tables that the flow monitor covers.
    pub(crate) fn monitor(&mut self, tables: BTreeSet<u8>, out: &mut Output) {
        // A table that no rule uses any more does no harm; a missing one would.
        if self.up && !tables.is_subset(&self.monitored) {
            self.monitored.extend(tables);
            out.command(Command::MonitorTables(self.monitored.clone()));
        }
    }

    // Sentinel flows.

    /// Two renewals may be lost.
    fn renew_interval(&self) -> Duration {
        Duration::from_secs(self.keep_flows_s.into()) / 3
    }

    /// Restarts the hard timeout of the sentinel flows.
    fn renew(&mut self, planner: &mut Planner, now: Timestamp, out: &mut Output) {
        let mut batch = self.begin(now);
        let bodies = self.sentinels.iter();
        let bodies = bodies.map(|sentinel| planner.sentinel_body(*sentinel, self.keep_flows_s));
        batch.extend(bodies.map(FlowChange::Renew));
        self.commit(batch, false, planner, out);
    }

    /// Adds, in front of the changes, the missing sentinel flows that the changes need.
    fn tie(&mut self, changes: &mut Vec<FlowChange>, planner: &mut Planner) {
        let mut missing = Vec::new();
        for change in &*changes {
            if let FlowChange::Add(key, body) = change
                && body.hard_timeout_s == 0
            {
                let sentinel = Sentinel {
                    table: key.table,
                    cookie: body.cookie,
                };
                if self.sentinels.insert(sentinel) {
                    missing.push(sentinel);
                }
            }
        }
        if !missing.is_empty() {
            let add = |sentinel: Sentinel| {
                let body = planner.sentinel_body(sentinel, self.keep_flows_s);
                FlowChange::Add(sentinel.key(), body)
            };
            changes.splice(..0, missing.into_iter().map(add));
        }
    }

    /// Compares the sentinel flows of a dump with those that there should be: restores missing
    /// ones, and removes those that no flow needs any more, but for those in `stay`. Those of an earlier run
    /// may have another timeout, which a renewal would keep.
    fn compare_sentinels(
        &mut self,
        planner: &mut Planner,
        stay: &BTreeSet<Sentinel>,
        batch: &mut Batch,
    ) {
        let found = std::mem::take(&mut self.comparison.sentinels);
        let needed = planner.sentinels();
        for (sentinel, (cookie, _)) in &found {
            if !needed.contains(sentinel) && !stay.contains(sentinel) {
                self.sentinels.remove(sentinel);
                batch.extend([FlowChange::Delete(sentinel.key(), Some(*cookie))]);
            }
        }
        let mut missing = Vec::new();
        for sentinel in needed {
            let body = planner.sentinel_body(sentinel, self.keep_flows_s);
            self.sentinels.insert(sentinel);
            if found.get(&sentinel) != Some(&(body.cookie, body.hard_timeout_s)) {
                missing.push(FlowChange::Add(sentinel.key(), body));
            }
        }
        // Before the flows that need them.
        batch.changes.splice(..0, missing);
    }

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
            // The flows of this sentinel flow are lost, too. Restoring them restores the sentinel
            // flow.
            self.sentinels.remove(&sentinel);
            return;
        }
        let Some(holder) = access.holder_of(key) else {
            return;
        };
        let Some((_, flows)) = access.flows(holder) else {
            return;
        };
        let is_queued = flows.is_lost();
        if flows.lose(key, cookie) {
            if !is_queued {
                self.lost.holders.push_back(holder);
            }
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
        if self.foreign.len() >= FOREIGN_FLOWS_MAX {
            return;
        }
        let holder = access.holder_of(&key);
        let flows = holder.and_then(|holder| access.flows(holder));
        let is_ours = flows.is_some_and(|(_, flows)| flows.contains(&key));
        let foreign = self.foreign.entry(key.clone()).or_insert(Foreign {
            cookie,
            is_reported: false,
        });
        if is_ours {
            foreign.is_in_the_way(&key, out);
        }
    }

    /// Whether somebody else has a flow with this key.
    pub(crate) fn is_foreign(&self, key: &FlowKey) -> bool {
        self.foreign.contains_key(key)
    }

    /// Restores our own flow with this key, if there is one.
    pub(crate) fn foreign_flow_gone(&mut self, key: &FlowKey, now: Timestamp) {
        if self.foreign.remove(key).is_some() {
            self.compare_soon(now);
        }
    }

    /// Restores lost flows, some at a time, so that openings can go in between.
    pub(crate) fn restore_lost(
        &mut self,
        access: &mut Access<'_>,
        now: Timestamp,
        out: &mut Output,
    ) {
        let may = self.compared && self.lost.at.is_none() && self.openings.is_none();
        if !may || self.lost.holders.is_empty() {
            return;
        }
        while self.lost.batches.len() < RESTORING_MAX {
            let mut batch = self.begin(now);
            while batch.len() < RESTORE_MAX
                && let Some(holder) = self.lost.holders.pop_front()
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
            self.lost.holders = VecDeque::new();
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

    /// Compares at the next opportunity.
    fn compare_soon(&mut self, now: Timestamp) {
        let planned = &mut self.comparison.at;
        *planned = planned.map(|at| at.min(now));
    }

    /// A comparison that begins at this time or later reads the counters of all flows that there are now.
    pub(crate) fn read_counters(&mut self, at: Timestamp) {
        let planned = &mut self.comparison.at;
        *planned = planned.map(|planned| planned.min(at));
    }

    /// Asks for a dump when one is due and its result could be judged, and before that for the marks if there can be
    /// some (`with_marks`).
    pub(crate) fn start_comparison(
        &mut self,
        can_judge: impl FnOnce() -> bool,
        with_marks: bool,
        now: Timestamp,
        out: &mut Output,
    ) {
        let comparison = &mut self.comparison;
        let is_due = comparison.at.is_some_and(|at| at <= now);
        if self.up && comparison.since.is_none() && is_due && can_judge() {
            comparison.since = Some(now);
            comparison.number += 1;
            comparison.unknown.clear();
            comparison.marks.clear();
            comparison.sentinels.clear();
            let openings = self.openings.iter();
            let of_turn = openings.filter_map(|openings| openings.batch.id());
            comparison.unshown = self.pending.keys().copied().chain(of_turn).collect();
            self.waiting.dump_begins();
            comparison.at = Some(now + COMPARE_INTERVAL);
            match with_marks {
                true => out.command(Command::ReadMarks),
                false => out.command(Command::Ask(FlowQuestion::Dump)),
            }
        }
    }

    /// Compares the marks that were read with the cache, and behind the last goes on with the flows. Returns the
    /// changes of marks that follow, if a comparison is under way.
    pub(crate) fn marks_read(
        &mut self,
        found: Option<Vec<MarkFound>>,
        more: bool,
        access: &mut Access<'_>,
        now: Timestamp,
        out: &mut Output,
    ) -> Option<Batch> {
        let reading = Reading {
            number: self.comparison.number,
            since: self.comparison.since?,
            is_first: !self.adopted,
        };
        if !more {
            out.command(Command::Ask(FlowQuestion::Dump));
        }
        let mut batch = self.begin(now);
        for found in found? {
            let MarkFound {
                ifindex, address, ..
            } = found;
            let port = access.ports.at_veth(ifindex);
            let cache = &mut *access.cache;
            let read = port.and_then(|port| cache.mark_found(port, &found, reading, &mut batch));
            match (read, port) {
                (Some(ReadMark::Right), _) => {}
                (Some(ReadMark::Wrong), _) => out.counters.marks_restored += 1,
                (Some(ReadMark::Over), _) => out.counters.marks_removed += 1,
                // Its flows tell whether it still counts.
                (None, Some(port)) if !self.adopted && found.until > now => {
                    self.comparison.marks.push((port, found));
                }
                (None, _) => {
                    batch.mark(MarkChange::Remove { ifindex, address });
                    out.counters.marks_removed += 1;
                }
            }
        }
        if !more {
            let missing = access.cache.marks_read(reading, &mut batch);
            out.counters.marks_restored += missing as u64;
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
                let found = (flow.cookie, flow.hard_timeout_s);
                self.comparison.sentinels.insert(sentinel, found);
                continue;
            }
            let holder = access.holder_of(&flow.key);
            let flows = holder.and_then(|holder| access.flows(holder));
            if flows.is_some_and(|(_, flows)| flows.compare(&flow, number, since, now))
                || self.waiting.explains(&flow.key, flow.cookie)
            {
                continue;
            }
            if self.comparison.unknown.len() < UNKNOWN_MAX {
                self.comparison.unknown.push(flow);
            } else {
                self.compare_soon(now);
            }
        }
    }

    /// The dump is complete. Returns the changes that follow from the comparison, if one was under
    /// way.
    pub(crate) fn compared(
        &mut self,
        access: &mut Access<'_>,
        now: Timestamp,
        out: &mut Output,
    ) -> Option<Batch> {
        let since = self.comparison.since.take()?;
        self.comparison.ended += 1;
        self.comparison.has_ended = true;
        self.unanswered.clear();
        self.waiting.dump_ends();
        if !std::mem::replace(&mut self.compared, true) {
            // The sentinel flows of an earlier run may be about to time out.
            self.renew_at = Some(now);
            // There may have been a gap before the connection.
            self.looks.gap_ended(now);
        }
        let mut batch = self.begin(now);
        let unknown = std::mem::take(&mut self.comparison.unknown);
        let is_all = unknown.len() < UNKNOWN_MAX;
        let mut unknown: HashMap<FlowKey, InstalledFlow> = unknown
            .into_iter()
            .map(|flow| (flow.key.clone(), flow))
            .collect();
        let marks = std::mem::take(&mut self.comparison.marks);
        let had_adopted = std::mem::replace(&mut self.adopted, is_all);
        let adopted = if had_adopted {
            0
        } else {
            let flows = access.adopt(&mut unknown, self.comparison.number, &mut batch);
            let number = self.comparison.number;
            flows + access.adopt_marks(marks, &unknown, number, &mut batch, out)
        };
        // Flows that have come to be wanted since the dump has shown them: to remove them now would remove the new
        // ones, which have the same cookies.
        let number = self.comparison.number;
        unknown.retain(|key, flow| {
            let holder = access.holder_of(key);
            let flows = holder.and_then(|holder| access.flows(holder));
            !flows.is_some_and(|(_, flows)| flows.compare(flow, number, since, now))
        });
        // Flows stay until the marks are set that replace them: the next comparison removes them.
        let mut stay = BTreeSet::new();
        unknown.retain(|key, flow| {
            let stays = access.awaits_mark(key, flow.cookie);
            if stays {
                stay.insert(Sentinel {
                    table: key.table,
                    cookie: flow.cookie,
                });
            }
            !stays
        });
        let added = self.find_lost(access, since);
        let removed = unknown.len();
        access.counters_read(since);
        // In one batch with the flows that replace them.
        let mut restored = HashSet::new();
        for (key, installed) in unknown {
            if let Some(holder) = access.holder_of(&key)
                && restored.insert(holder)
            {
                restore(access, holder, &mut batch, out);
            }
            batch.extend([FlowChange::Delete(key, Some(installed.cookie))]);
        }
        if added + removed + adopted > 0 {
            out.report(Report::Resynced {
                added,
                removed,
                adopted,
            });
        }
        if !had_adopted && is_all {
            access.adopted_all(&mut batch);
            // What has ended meanwhile gets no further term.
            access.cache.expire(&mut batch);
        }
        access.decide_undecided(&mut batch);
        access.cache.compared(self.comparison.number, &mut batch);
        self.put_off(&mut batch, |_| true);
        // Flows that wait to be removed keep theirs.
        stay.extend(self.waiting.sentinels());
        // Behind everything that may need one.
        self.compare_sentinels(access.planner(), &stay, &mut batch);
        Some(batch)
    }

    /// Finds the flows that the dump has not shown; returns how many there are.
    fn find_lost(&mut self, access: &mut Access<'_>, since: Timestamp) -> usize {
        let number = self.comparison.number;
        let mut lost = 0;
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
                lost += flows.mark_lost(target, number, since, |key| self.is_foreign(key));
            }
            if flows.is_lost() {
                self.lost.holders.push_back(holder);
                access.lost(holder);
            }
        }
        lost
    }

    // Time.

    /// Does what is due. Returns whether lost flows are to be restored: OVN may have come back with
    /// other tables.
    pub(crate) fn timeout(
        &mut self,
        planner: &mut Planner,
        now: Timestamp,
        out: &mut Output,
    ) -> bool {
        if self.renew_at.is_some_and(|at| at <= now) {
            self.renew_at = Some(now + self.renew_interval());
            self.renew(planner, now, out);
        }
        self.lost.at.take_if(|at| *at <= now).is_some()
    }

    // Blocked connections.

    /// Asks for the connections that OVN has blocked, when a look is due.
    pub(crate) fn look_for_blocked(&mut self, now: Timestamp, out: &mut Output) {
        if self.looks.begin(now) {
            out.command(Command::FindBlocked);
        }
    }

    /// Asks to unblock those of the connections that the rules now let pass.
    pub(crate) fn blocked_found(
        &mut self,
        mut connections: Vec<BlockedConnection>,
        more: bool,
        access: &Access<'_>,
        now: Timestamp,
        out: &mut Output,
    ) {
        connections.retain(|connection| access.lets_pass(connection));
        self.looks.found(connections.len(), more, now);
        if !connections.is_empty() {
            out.command(Command::Unblock(connections));
        }
    }

    // Denials.

    /// Sets how long the switch keeps a megaflow after its last packet, as its database says.
    pub(crate) fn megaflows_idle_for(&mut self, idle: Duration) {
        self.denials.megaflows_idle_for(idle);
    }

    /// The rules of a namespace have changed, or where OVN enforces them.
    pub(crate) fn rules_changed(&mut self, namespace: &str, now: Timestamp) {
        self.denials.rules_changed(namespace, now);
    }

    /// A flow that is counted was removed.
    pub(crate) fn count_lost(&mut self, cookie: u32) {
        self.denials.count_lost(cookie);
    }

    /// The flows with some cookies were counted, behind the changes of a batch if there is one.
    pub(crate) fn counted(
        &mut self,
        batch: Option<BatchId>,
        counts: Vec<CookieCount>,
        now: Timestamp,
    ) {
        self.denials.counted(counts, now);
        if let Some(pending) = batch.and_then(|batch| self.pending.get_mut(&batch)) {
            pending.counted = true;
        }
    }

    /// Asks for the counters of the flows that deny, if that is due.
    pub(crate) fn count_denials(
        &mut self,
        ports: &Ports,
        policy: &Policy,
        now: Timestamp,
        out: &mut Output,
    ) {
        self.denials.timeout(ports, policy, now, out);
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
            activation: now.since(self.captured_at),
            revalidation_wait: revalidation_wait.as_str(),
        }
    }
}

impl Foreign {
    /// One of our flows should be there. Reports so once.
    fn is_in_the_way(&mut self, key: &FlowKey, out: &mut Output) {
        if !std::mem::replace(&mut self.is_reported, true) {
            out.report(Report::ForeignFlow {
                table: key.table,
                priority: key.priority,
                cookie: self.cookie,
            });
        }
    }
}

/// Writes the lost flows of one holder.
fn restore(access: &mut Access<'_>, holder: Holder, batch: &mut Batch, out: &mut Output) {
    if let Some((target, flows)) = access.flows(holder) {
        let written = flows.restore(target, batch);
        out.counters.flows_restored += written as u64;
    }
}

#[cfg(test)]
mod tests;
