//! Waits until the switch's datapath follows new flows.
//!
//! A confirmed flow decides over packets that no megaflow covers. An older megaflow that drops, for the same address
//! or for a neighbour of it, stays until a revalidator of ovs-vswitchd has checked it again. Until then the first
//! packet of the pod can still be dropped.
//!
//! So the agent asks the datapath for megaflows that drop packets on one of these paths. If there is none, the wait
//! is over. If there is one, the agent asks again a little later: a loaded machine can take far longer than any
//! estimate. A megaflow stays if another rule denies part of the path (another port, for example). It then costs nine
//! tenths of the longest hold. If the datapath cannot be asked about any of the paths, an estimate of the revalidators'
//! time ends the wait.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    Timestamp,
    io::input::{BatchId, Looked},
    tools::counter_vec::{CounterVec, labels},
    values::{
        connection::Path,
        limits::{LOOK_PAUSE, LOOK_PAUSE_PART, PATHS_PER_LOOK_MAX, REVALIDATION_INTERVAL},
    },
};

labels! {
    /// The reason for which the answers' wait for a batch ended.
    RevalidationEvent {
        /// No megaflow drops on its paths.
        Clear = "clear",
        /// The datapath could not be asked, and the estimated time is over.
        Estimated = "estimated",
        /// A megaflow still drops after the longest time that a wait may take.
        Dropping = "dropping",
    }
}

/// The batches that the switch has confirmed, and whose flows the datapath may not follow yet.
#[derive(Debug, Default)]
pub struct Revalidation {
    /// How long a pass of the revalidators takes behind a change, at most.
    estimate: Duration,
    estimate_max: Duration,
    waiting: BTreeMap<BatchId, Waiting>,
    /// The look that is under way.
    look: Option<Look>,
    /// The next look begins not earlier than this.
    look_from: Timestamp,
    events: CounterVec<RevalidationEvent>,
}

#[derive(Debug)]
struct Waiting {
    /// The paths of its flows. Empty if there are too many to look at.
    paths: BTreeSet<Path>,
    /// When the switch confirmed the batch.
    since: Timestamp,
    /// When the estimated time is over.
    estimated: Timestamp,
    /// When the wait ends, whatever the datapath says.
    longest: Timestamp,
    /// Whether a frame waits for the batch.
    is_awaited: bool,
    /// In how many looks it was.
    looks: u32,
}

#[derive(Debug)]
struct Look {
    batches: Vec<BatchId>,
    began_at: Timestamp,
}

impl Revalidation {
    /// Nothing to wait for yet. No wait is longer than nine tenths of `hold_max`, the time for which
    /// frames are held at most: an answer that is late is worse than a packet that is repeated.
    pub fn new(hold_max: Duration) -> Self {
        Self {
            estimate_max: hold_max / 10 * 9,
            ..Self::default()
        }
    }

    /// Sets the estimate for the batches that come from now on.
    pub fn set_estimate(&mut self, estimate: Duration) {
        self.estimate = estimate.min(self.estimate_max);
    }

    /// The estimate.
    pub fn estimate(&self) -> Duration {
        self.estimate
    }

    /// The switch has confirmed a batch. `before` is when the batch before it was sent: the pass for
    /// that one may be under way.
    pub fn begin(
        &mut self,
        batch: BatchId,
        paths: BTreeSet<Path>,
        before: Timestamp,
        now: Timestamp,
    ) {
        let begins = now.max(before + REVALIDATION_INTERVAL);
        let is_looked_at = paths.len() <= PATHS_PER_LOOK_MAX;
        let waiting = Waiting {
            paths: if is_looked_at { paths } else { BTreeSet::new() },
            since: now,
            estimated: begins + self.estimate,
            longest: begins + self.estimate_max,
            is_awaited: false,
            looks: 0,
        };
        self.waiting.insert(batch, waiting);
    }

    /// Whether a frame has to wait for this batch. Notes that a frame does.
    pub fn awaits(&mut self, batch: BatchId) -> bool {
        let waiting = self.waiting.get_mut(&batch);
        waiting.is_some_and(|waiting| {
            waiting.is_awaited = true;
            true
        })
    }

    /// Begins a look if one is due; returns its paths.
    pub fn look(&mut self, now: Timestamp) -> Option<Vec<Path>> {
        if self.look_at()? > now {
            return None;
        }
        let mut paths = BTreeSet::new();
        let mut batches = Vec::new();
        let waiting = self.waiting.iter_mut();
        let mut waiting: Vec<_> = waiting
            .filter(|(_, waiting)| waiting.is_looked_at())
            .collect();
        // Batches take turns: a pod that sends all the time what stays denied could fill each look.
        waiting.sort_by_key(|(_, waiting)| waiting.looks);
        for (batch, waiting) in waiting {
            if paths.len() + waiting.paths.len() > PATHS_PER_LOOK_MAX {
                // A later batch of fewer paths may fit.
                continue;
            }
            waiting.looks += 1;
            paths.extend(waiting.paths.iter().cloned());
            batches.push(*batch);
        }
        self.look = Some(Look {
            batches,
            began_at: now,
        });
        Some(paths.into_iter().collect())
    }

    /// Takes the result of the look. Returns the batches whose wait is over.
    ///
    /// A batch does not wait for paths of which nothing is known, if it has others: a pod whose megaflows are too many
    /// to look at would make all wait that share its batches.
    pub fn looked(&mut self, looked: &Looked, now: Timestamp) -> Vec<BatchId> {
        let Some(Look { batches, began_at }) = self.look.take() else {
            return Vec::new();
        };
        // ovs-vswitchd answers on the thread that also takes flows. Half of the thread's time stays
        // free.
        let took = now.since(began_at);
        self.look_from = now + took.max(LOOK_PAUSE).max(self.waited(now) / LOOK_PAUSE_PART);
        let Looked { dropping, unknown } = looked;
        let mut over = batches;
        over.retain(|batch| {
            let waiting = self.waiting.get_mut(batch);
            waiting.is_some_and(|waiting| {
                waiting.paths.retain(|path| !unknown.contains(path));
                // Without a path, the estimate counts.
                waiting.is_looked_at() && !waiting.paths.iter().any(|path| dropping.contains(path))
            })
        });
        for batch in &over {
            self.end(*batch, RevalidationEvent::Clear);
        }
        over
    }

    /// The batches whose time is over. `is_held` says whether a frame is still held for a batch: a frame
    /// that has left did not wait to the end, and is not counted here.
    pub fn expired(&mut self, is_held: impl Fn(BatchId) -> bool, now: Timestamp) -> Vec<BatchId> {
        let expired = self.waiting.iter();
        let expired = expired.filter(|(_, waiting)| waiting.until().0 <= now);
        let over: Vec<(BatchId, RevalidationEvent)> = expired
            .map(|(batch, waiting)| (*batch, waiting.until().1))
            .collect();
        for (batch, why) in &over {
            if is_held(*batch) {
                self.end(*batch, *why);
            } else {
                self.waiting.remove(batch);
            }
        }
        over.into_iter().map(|(batch, _)| batch).collect()
    }

    /// The connection to the switch is lost. Returns all batches: their wait is over.
    pub fn disconnected(&mut self) -> Vec<BatchId> {
        self.look = None;
        std::mem::take(&mut self.waiting).into_keys().collect()
    }

    fn end(&mut self, batch: BatchId, event: RevalidationEvent) {
        if self
            .waiting
            .remove(&batch)
            .is_some_and(|waiting| waiting.is_awaited)
        {
            self.events.count(event);
        }
    }

    /// How long the newest batch has waited that is looked at.
    fn waited(&self, now: Timestamp) -> Duration {
        let waiting = self
            .waiting
            .values()
            .filter(|waiting| waiting.is_looked_at());
        let newest = waiting.map(|waiting| waiting.since).max();
        newest.map_or(Duration::ZERO, |since| now.since(since))
    }

    /// When the next look is due, where there is something to look for and no look is under way.
    fn look_at(&self) -> Option<Timestamp> {
        let mut waiting = self.waiting.values();
        let is_due = self.look.is_none() && waiting.any(Waiting::is_looked_at);
        is_due.then_some(self.look_from)
    }

    /// When [`Revalidation::expired`] or [`Revalidation::look`] should be called next.
    pub fn deadline(&self) -> Option<Timestamp> {
        let until = self.waiting.values().map(|waiting| waiting.until().0).min();
        [until, self.look_at()].into_iter().flatten().min()
    }

    /// The reasons for which frames' waits ended, counted.
    pub fn events(&self) -> &CounterVec<RevalidationEvent> {
        &self.events
    }
}

impl Waiting {
    /// When the wait ends by time, and why.
    fn until(&self) -> (Timestamp, RevalidationEvent) {
        if self.is_looked_at() {
            (self.longest, RevalidationEvent::Dropping)
        } else {
            (self.estimated, RevalidationEvent::Estimated)
        }
    }

    fn is_looked_at(&self) -> bool {
        self.is_awaited && !self.paths.is_empty()
    }
}

#[cfg(test)]
mod tests;
