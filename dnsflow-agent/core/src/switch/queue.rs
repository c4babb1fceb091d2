//! What answers open for pods that are told much, on its way to the switch.
//!
//! ovs-vswitchd takes the changes of all pods one after the other. If those of one pod went there as fast
//! as they come, what opens an address for another pod would stand behind thousands. So a pod has few changes
//! under way at a time. Its other changes wait here in their order. Those of other pods go past them, unless they are of
//! a flow that waits here.
//! What else was weighed: `docs/decisions/under-way.md`.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use super::Opening;
use crate::{
    installed::Batch,
    io::input::BatchId,
    values::{
        flow::{Ends, FlowChange, FlowKey},
        ids::PortId,
        limits::CHANGES_UNDER_WAY_MAX,
    },
};

/// The changes of a batch that each pod's answers have made.
pub(super) type Shares = BTreeMap<PortId, usize>;

/// Changes that go to the switch now.
pub(super) struct Part {
    pub(super) batch: Batch,
    /// What they open; of a batch that goes in several parts, with the last of them.
    pub(super) openings: Vec<Opening>,
    /// Whether there is more of the batch.
    pub(super) has_more: bool,
}

/// The changes of all pods that wait, and the number of those that do not.
#[derive(Debug, Default)]
pub(super) struct Queues {
    ports: BTreeMap<PortId, Queue>,
    /// The batches that wait.
    batches: BTreeSet<BatchId>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Changes that the switch has not confirmed.
    under_way: usize,
    /// Changes that were not sent, in their order.
    waiting: VecDeque<(Batch, Vec<Opening>)>,
    /// The ends of the flows of these changes, and of some that are on their way; emptied once nothing waits.
    places: HashSet<Ends>,
}

impl Queue {
    fn has_room(&self) -> bool {
        self.under_way < CHANGES_UNDER_WAY_MAX
    }

    /// The changes that wait, in their order.
    fn changes(&self) -> impl Iterator<Item = &FlowChange> {
        self.waiting.iter().flat_map(|(batch, _)| &batch.changes)
    }

    /// Whether a change of one of these flows waits.
    fn has_one_of(&self, keys: &HashSet<&FlowKey>) -> bool {
        let mut keys_waiting = self.changes().filter_map(FlowChange::key);
        keys_waiting.any(|key| keys.contains(key))
    }
}

impl Queues {
    /// Whether further changes of this pod have to wait.
    pub(super) fn are_full(&self, port: PortId) -> bool {
        let queue = self.ports.get(&port);
        queue.is_some_and(|queue| !queue.waiting.is_empty() || !queue.has_room())
    }

    /// Takes the last batch of a pod that waits, if there is room in it; to be handed back by
    /// [`Queues::push`].
    pub(super) fn take_last(&mut self, port: PortId) -> Option<Batch> {
        let (batch, _) = self.ports.get_mut(&port)?.waiting.back_mut()?;
        (batch.len() < CHANGES_UNDER_WAY_MAX).then(|| batch.take())
    }

    /// Takes back a batch, or takes a new one.
    pub(super) fn push(&mut self, port: PortId, batch: Batch, opening: Option<Opening>) {
        let waiting = self.ports.get(&port).map(|queue| &queue.waiting);
        let last = waiting.and_then(|waiting| waiting.back());
        let is_last = last.is_some_and(|(last, _)| last.id() == batch.id());
        if batch.is_empty() && !is_last {
            return;
        }
        let queue = self.ports.entry(port).or_default();
        queue.places.extend(places(&batch.changes));
        match queue.waiting.back_mut() {
            Some((last, openings)) if is_last => {
                *last = batch;
                openings.extend(opening);
            }
            _ => {
                self.batches.extend(batch.id());
                queue
                    .waiting
                    .push_back((batch, opening.into_iter().collect()));
            }
        }
    }

    /// Whether this batch waits.
    pub(super) fn contain(&self, batch: BatchId) -> bool {
        self.batches.contains(&batch)
    }

    /// So many changes of a pod are on their way.
    pub(super) fn sent(&mut self, port: PortId, changes: usize) {
        if changes > 0 {
            self.ports.entry(port).or_default().under_way += changes;
        }
    }

    /// The switch has answered these changes, or they were not sent after all.
    pub(super) fn answered(&mut self, shares: &Shares) {
        for (port, changes) in shares {
            if let Some(queue) = self.ports.get_mut(port) {
                queue.under_way = queue.under_way.saturating_sub(*changes);
                if queue.under_way == 0 && queue.waiting.is_empty() {
                    self.ports.remove(port);
                }
            }
        }
    }

    /// A pod whose changes wait, and that has room for some.
    pub(super) fn next(&self) -> Option<PortId> {
        let mut queues = self.ports.iter();
        let next = queues.find(|(_, queue)| queue.has_room() && !queue.waiting.is_empty());
        next.map(|(port, _)| *port)
    }

    /// Takes the changes of a pod that come next: [`CHANGES_UNDER_WAY_MAX`] at most.
    pub(super) fn take_next(&mut self, port: PortId) -> Option<Part> {
        let queue = self.ports.get_mut(&port)?;
        let (mut batch, openings) = queue.waiting.pop_front()?;
        if batch.len() <= CHANGES_UNDER_WAY_MAX {
            batch.id().map(|id| self.batches.remove(&id));
            if queue.waiting.is_empty() {
                queue.places.clear();
            }
            return Some(Part {
                batch,
                openings,
                has_more: false,
            });
        }
        let rest = batch.changes.split_off(CHANGES_UNDER_WAY_MAX);
        let part = batch.take_changes();
        batch.changes = rest;
        queue.waiting.push_front((batch, openings));
        Some(Part {
            batch: part,
            openings: Vec::new(),
            has_more: true,
        })
    }

    /// The pods, but for `except`, whose waiting changes are of the same flows as these.
    pub(super) fn with_flows_of(
        &self,
        changes: &[FlowChange],
        except: Option<PortId>,
    ) -> Vec<PortId> {
        if self.batches.is_empty() {
            return Vec::new();
        }
        // Few answers change what waits in another queue. Only such a queue is looked at change by change.
        let places: HashSet<Ends> = places(changes).collect();
        let queues = self.ports.iter();
        let mut concerned: Vec<(&PortId, &Queue)> = queues
            .filter(|(port, queue)| Some(**port) != except && !queue.places.is_disjoint(&places))
            .collect();
        if !concerned.is_empty() {
            let keys: HashSet<&FlowKey> = changes.iter().filter_map(FlowChange::key).collect();
            concerned.retain(|(_, queue)| queue.has_one_of(&keys));
        }
        concerned.into_iter().map(|(port, _)| *port).collect()
    }

    /// Takes out all changes of these flows that wait for other pods than this one.
    pub(super) fn forget(&mut self, flows: &HashSet<FlowKey>, except: PortId) {
        let places: HashSet<Ends> = flows.iter().map(|key| key.matches.ends).collect();
        for (port, queue) in &mut self.ports {
            if *port == except || queue.places.is_disjoint(&places) {
                continue;
            }
            for (batch, _) in &mut queue.waiting {
                batch
                    .changes
                    .retain(|change| change.key().is_none_or(|key| !flows.contains(key)));
            }
        }
    }

    /// Takes out of the changes those of flows for which changes of a pod wait.
    pub(super) fn take_known(
        &self,
        port: PortId,
        changes: &mut Vec<FlowChange>,
    ) -> Vec<FlowChange> {
        let queue = self.ports.get(&port).into_iter();
        let waiting = queue.flat_map(|queue| queue.changes());
        let known: HashSet<&FlowKey> = waiting.filter_map(FlowChange::key).collect();
        let is_known =
            |change: &mut FlowChange| change.key().is_some_and(|key| known.contains(key));
        changes.extract_if(.., is_known).collect()
    }

    /// The pods in whose queues one of these batches is.
    pub(super) fn with_batches(&self, batches: &BTreeSet<BatchId>) -> Vec<PortId> {
        if self.batches.is_disjoint(batches) {
            return Vec::new();
        }
        let is_one =
            |(batch, _): &(Batch, Vec<Opening>)| batch.id().is_some_and(|id| batches.contains(&id));
        let queues = self.ports.iter();
        let queues = queues.filter(|(_, queue)| queue.waiting.iter().any(is_one));
        queues.map(|(port, _)| *port).collect()
    }

    /// The connection is lost. Returns the batches that waited.
    pub(super) fn disconnected(&mut self) -> BTreeSet<BatchId> {
        std::mem::take(self).batches
    }

    /// Whether no pod has changes under way or waiting.
    pub(super) fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// How many pods have changes under way or waiting.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.ports.len()
    }
}

/// The ends of the flows that are changed.
fn places(changes: &[FlowChange]) -> impl Iterator<Item = Ends> {
    let keys = changes.iter().filter_map(FlowChange::key);
    keys.map(|key| key.matches.ends)
}
