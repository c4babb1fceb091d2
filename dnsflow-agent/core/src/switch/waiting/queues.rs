//! The order in which pods that are told much get their changes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::Opening;
use crate::{
    installed::Batch,
    io::input::BatchId,
    values::{flow::Ends, ids::PortId, limits::CHANGES_UNDER_WAY_MAX},
};

/// The changes of a batch that each pod's answers have made.
pub(in crate::switch) type ChangesByPort = BTreeMap<PortId, usize>;

/// The batches of all pods that wait, and the number of changes that do not.
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
    /// Batches that were not sent, in their order.
    waiting: VecDeque<Queued>,
}

impl Queue {
    fn has_room(&self) -> bool {
        self.under_way < CHANGES_UNDER_WAY_MAX
    }
}

/// A batch that waits.
#[derive(Debug)]
pub(super) struct Queued {
    /// The batch without its changes.
    pub(super) batch: Batch,
    openings: Vec<Opening>,
    /// The ends between which its changes wait. The changes may have gone along with others.
    pub(super) waits_at: VecDeque<Ends>,
    /// How many changes came with it.
    len: usize,
}

impl Queued {
    pub(super) fn new(
        batch: Batch,
        opening: Option<Opening>,
        waits_at: Vec<Ends>,
        len: usize,
    ) -> Self {
        Self {
            batch,
            openings: opening.into_iter().collect(),
            waits_at: waits_at.into(),
            len,
        }
    }

    /// Adds the changes of another answer for the same batch.
    fn add(&mut self, more: Self) {
        let Self {
            batch,
            openings,
            waits_at,
            len,
        } = more;
        self.batch.add(batch);
        self.openings.extend(openings);
        self.waits_at.extend(waits_at);
        self.len += len;
    }
}

impl Queues {
    /// Whether further changes of this pod have to wait.
    pub(super) fn is_full(&self, port: PortId) -> bool {
        let queue = self.ports.get(&port);
        queue.is_some_and(|queue| !queue.waiting.is_empty() || !queue.has_room())
    }

    /// The waiting batch of a pod to which further changes can be added, if it has room. `denies`: whether a rule
    /// denies their addresses.
    pub(super) fn with_room(&self, port: PortId, denies: bool) -> Option<BatchId> {
        let waiting = &self.ports.get(&port)?.waiting;
        let queued = match denies {
            true => waiting.front().filter(|first| first.batch.denies),
            false => waiting.back(),
        };
        let queued = queued.filter(|queued| queued.len < CHANGES_UNDER_WAY_MAX)?;
        queued.batch.id()
    }

    /// Takes a batch, or changes for the last one. A batch without changes need not wait.
    pub(super) fn push(&mut self, port: PortId, queued: Queued) {
        let waiting = self.ports.get_mut(&port).map(|queue| &mut queue.waiting);
        let same = waiting.and_then(|waiting| match queued.batch.denies {
            true => waiting.front_mut(),
            false => waiting.back_mut(),
        });
        match same {
            Some(same) if same.batch.id() == queued.batch.id() => same.add(queued),
            _ if queued.len == 0 => {}
            _ => {
                self.batches.extend(queued.batch.id());
                let waiting = &mut self.ports.entry(port).or_default().waiting;
                match queued.batch.denies {
                    true => waiting.push_front(queued),
                    false => waiting.push_back(queued),
                }
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
    pub(super) fn answered(&mut self, shares: &ChangesByPort) {
        for (port, changes) in shares {
            if let Some(queue) = self.ports.get_mut(port) {
                queue.under_way = queue.under_way.saturating_sub(*changes);
                if queue.under_way == 0 && queue.waiting.is_empty() {
                    self.ports.remove(port);
                }
            }
        }
    }

    /// A pod whose batches wait, and that has room for changes.
    pub(super) fn next(&self) -> Option<PortId> {
        let mut queues = self.ports.iter();
        let next = queues.find(|(_, queue)| queue.has_room() && !queue.waiting.is_empty());
        next.map(|(port, _)| *port)
    }

    /// The batch of a pod that comes next.
    pub(super) fn front_mut(&mut self, port: PortId) -> Option<&mut Queued> {
        self.ports.get_mut(&port)?.waiting.front_mut()
    }

    /// Takes out the batch of a pod that comes next.
    pub(super) fn take_front(&mut self, port: PortId) -> Option<(Batch, Vec<Opening>)> {
        let queued = self.ports.get_mut(&port)?.waiting.pop_front()?;
        queued.batch.id().map(|id| self.batches.remove(&id));
        Some((queued.batch, queued.openings))
    }

    /// The pods in whose queues one of these batches is.
    pub(super) fn with_batches(&self, batches: &BTreeSet<BatchId>) -> Vec<PortId> {
        if self.batches.is_disjoint(batches) {
            return Vec::new();
        }
        let is_one = |queued: &Queued| queued.batch.id().is_some_and(|id| batches.contains(&id));
        let queues = self.ports.iter();
        let queues = queues.filter(|(_, queue)| queue.waiting.iter().any(is_one));
        queues.map(|(port, _)| *port).collect()
    }

    /// The batches that wait.
    pub(super) fn into_batches(self) -> BTreeSet<BatchId> {
        self.batches
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
