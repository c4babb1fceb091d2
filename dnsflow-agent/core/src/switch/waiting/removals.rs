//! The order in which flows that only end are removed.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::Bound,
};

use crate::{
    io::input::BatchId,
    values::flow::{Addresses, Ends, FlowChange, FlowKey},
};

/// The ends between which flows only end, in the queue of no pod; and the removals that the switch has not confirmed.
#[derive(Debug, Default)]
pub(super) struct Removals {
    waiting: BTreeSet<Ends>,
    /// How many flows wait.
    count: usize,
    /// The last ends of the pod's address whose turn it was.
    last: Option<Ends>,
    /// The parts that the switch has not confirmed.
    under_way: BTreeMap<BatchId, Vec<FlowKey>>,
    /// The flows whose removals were under way during the current dump, which may show them all the same.
    shown: HashSet<FlowKey>,
    /// Whether a dump is under way.
    is_dumping: bool,
}

impl Removals {
    /// Whether none waits or is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_empty()
    }

    /// How many flows wait.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// So many more wait between these ends.
    pub(super) fn push(&mut self, ends: Ends, added: usize) {
        self.waiting.insert(ends);
        self.count += added;
    }

    /// Between these ends, so many wait no longer, or in the queue of a pod.
    pub(super) fn forget(&mut self, ends: Ends, removals: usize) {
        if self.waiting.remove(&ends) {
            self.count -= removals;
        }
    }

    /// The ends whose turn it is: those of another pod than the last ones, so that a pod with few need not wait for one
    /// with many. None while the switch has not confirmed the part before.
    pub(super) fn next(&self) -> Option<Ends> {
        if !self.under_way.is_empty() {
            return None;
        }
        let behind = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.waiting.range((behind, Bound::Unbounded)).next();
        next.or(self.waiting.first()).copied()
    }

    /// These ends have had their turn, with so many removals.
    pub(super) fn take(&mut self, ends: Ends, removals: usize) {
        self.forget(ends, removals);
        self.last = last_of(ends);
    }

    /// So many of the removals between the ends whose turn it is go, and the others have the next turn.
    pub(super) fn take_some(&mut self, removals: usize) {
        self.count -= removals;
    }

    /// A part goes in this batch.
    pub(super) fn sent(&mut self, batch: BatchId, part: &[FlowChange]) {
        let keys = part.iter().filter_map(FlowChange::key);
        let keys: Vec<FlowKey> = keys.cloned().collect();
        if self.is_dumping {
            self.shown.extend(keys.iter().cloned());
        }
        self.under_way.insert(batch, keys);
    }

    /// The switch has answered a batch.
    pub(super) fn answered(&mut self, batch: BatchId) {
        self.under_way.remove(&batch);
    }

    /// Whether the removal of this flow was under way during the current dump.
    pub(super) fn were_under_way(&self, key: &FlowKey) -> bool {
        self.shown.contains(key)
    }

    /// A dump begins.
    pub(super) fn dump_begins(&mut self) {
        self.is_dumping = true;
        self.shown = self.under_way.values().flatten().cloned().collect();
    }

    /// The dump has ended.
    pub(super) fn dump_ends(&mut self) {
        self.is_dumping = false;
        self.shown = HashSet::new();
    }
}

/// The last ends of the same address of a pod, in their order; other ends are alone.
fn last_of(ends: Ends) -> Option<Ends> {
    let Ends::Addresses(addresses) = ends else {
        return Some(ends);
    };
    let src = addresses.src();
    let last = match src {
        IpAddr::V4(_) => Ipv4Addr::BROADCAST.into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits(u128::MAX).into(),
    };
    Addresses::between(src, last).map(Ends::Addresses)
}
