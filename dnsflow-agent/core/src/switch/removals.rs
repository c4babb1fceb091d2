//! Removals of flows that nothing replaces, on their way to the switch.
//!
//! The addresses of a pod may end together, by thousands, and a pod may go. If all removals went to the switch as they
//! come, what opens an address for another pod would stand behind them. So they wait here, and go in parts: each when
//! the switch has confirmed the one before it. What is added goes past.
//!
//! No flow is added while a removal waits between the same ends ([`Removals::overtaken_by`]): the removal would come
//! behind it, or the former flow would decide beside it.
//! What else was weighed: `docs/decisions/under-way.md`.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
    ops::Bound,
};

use crate::{
    io::input::BatchId,
    values::{
        flow::{Addresses, Cookie, Ends, FlowChange, FlowKey, Sentinel},
        limits::{CHANGES_UNDER_WAY_MAX, REMOVALS_WAITING_MAX},
    },
};

/// The removals that wait, and those that the switch has not confirmed.
#[derive(Debug, Default)]
pub(super) struct Removals {
    /// The flows that wait to be removed.
    waiting: BTreeMap<Ends, BTreeMap<FlowKey, Cookie>>,
    /// How many of them there are.
    count: usize,
    /// The ends whose removals went last: the next ones are those behind them.
    last: Option<Ends>,
    /// The parts that the switch has not confirmed.
    under_way: BTreeMap<BatchId, Vec<FlowKey>>,
    /// The flows whose removals were under way during the current dump, which may show them all the same.
    shown: HashSet<FlowKey>,
}

impl Removals {
    /// Whether none waits or is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_empty()
    }

    /// Whether the removal of this flow may wait. Where one waits, the others between the same ends do, too.
    pub(super) fn have_room_for(&self, key: &FlowKey) -> bool {
        self.count < REMOVALS_WAITING_MAX || self.waiting.contains_key(&ends(key))
    }

    /// Takes a removal. There is no flow between its ends that is added with it.
    pub(super) fn push(&mut self, key: FlowKey, cookie: Cookie) {
        let of_ends = self.waiting.entry(ends(&key)).or_default();
        self.count += usize::from(of_ends.insert(key, cookie).is_none());
    }

    /// Takes the next part: about [`CHANGES_UNDER_WAY_MAX`]. Nothing while the switch has not confirmed the part before
    /// it. The removals between the same ends stay together: of a flow that denies and one that allows, none is left
    /// alone.
    pub(super) fn take_next(&mut self) -> Vec<FlowChange> {
        let mut part = Vec::new();
        if !self.under_way.is_empty() {
            return part;
        }
        while let Some((next, removals)) = self.next() {
            if !part.is_empty() && part.len() + removals > CHANGES_UNDER_WAY_MAX {
                break;
            }
            self.last = Some(next);
            part.extend(self.take(next));
        }
        part
    }

    /// The ends whose turn it is, and how many removals wait there.
    fn next(&self) -> Option<(Ends, usize)> {
        let behind = (
            self.last.map_or(Bound::Unbounded, Bound::Excluded),
            Bound::Unbounded,
        );
        let next = self.waiting.range(behind).next();
        let next = next.or_else(|| self.waiting.first_key_value());
        next.map(|(ends, removals)| (*ends, removals.len()))
    }

    fn take(&mut self, ends: Ends) -> impl Iterator<Item = FlowChange> + use<> {
        let removals = self.waiting.remove(&ends).unwrap_or_default();
        self.count -= removals.len();
        let removals = removals.into_iter();
        removals.map(|(key, cookie)| FlowChange::Delete(key, cookie))
    }

    /// A part goes in this batch. `may_be_shown`: a dump is under way.
    pub(super) fn sent(&mut self, batch: BatchId, part: &[FlowChange], may_be_shown: bool) {
        let keys = part.iter().filter_map(FlowChange::key);
        let keys: Vec<FlowKey> = keys.cloned().collect();
        if may_be_shown {
            self.shown.extend(keys.iter().cloned());
        }
        self.under_way.insert(batch, keys);
    }

    /// The switch has answered a batch.
    pub(super) fn answered(&mut self, batch: BatchId) {
        self.under_way.remove(&batch);
    }

    /// Takes the removals that wait at these addresses of pods.
    pub(super) fn take_at(&mut self, is_at: impl Fn(IpAddr) -> bool) -> Vec<FlowChange> {
        let all = self.waiting.keys();
        let taken: Vec<Ends> = all.filter(|ends| is_at(ends.src())).copied().collect();
        let mut removals = Vec::new();
        for ends in taken {
            removals.extend(self.take(ends));
        }
        removals
    }

    /// Takes the removals that wait between the ends of flows that are added. Returns those that have to go before the
    /// changes. The others are of flows that the changes replace.
    pub(super) fn overtaken_by(&mut self, changes: &[FlowChange]) -> Vec<FlowChange> {
        let mut before = Vec::new();
        if self.waiting.is_empty() {
            return before;
        }
        let added = changes.iter().filter_map(|change| match change {
            FlowChange::Add(key, _) => Some(key),
            FlowChange::Delete(..) | FlowChange::Renew(_) => None,
        });
        let added: HashSet<&FlowKey> = added.collect();
        let places: BTreeSet<Ends> = added.iter().map(|key| ends(key)).collect();
        for ends in places {
            before.extend(self.take(ends));
        }
        before.retain(|removal| removal.key().is_none_or(|key| !added.contains(key)));
        before
    }

    /// Whether a dump shows a flow only because its removal waits, or was under way.
    pub(super) fn explain(&self, key: &FlowKey, cookie: Cookie) -> bool {
        let waiting = self.waiting.get(&ends(key));
        let waiting = waiting.and_then(|of_ends| of_ends.get(key));
        self.shown.contains(key) || waiting == Some(&cookie)
    }

    /// A dump begins.
    pub(super) fn dump_begins(&mut self) {
        self.shown = self.under_way.values().flatten().cloned().collect();
    }

    /// The dump has ended.
    pub(super) fn dump_ends(&mut self) {
        self.shown = HashSet::new();
    }

    /// The sentinel flows of the flows that wait: without these, the switch would remove all of the flows together.
    pub(super) fn sentinels(&self) -> BTreeSet<Sentinel> {
        let waiting = self.waiting.values().flatten();
        let sentinels = waiting.map(|(key, cookie)| Sentinel {
            table: key.table,
            cookie: *cookie,
        });
        sentinels.collect()
    }

    /// How many removals wait between these addresses.
    pub(super) fn between(&self, src: IpAddr, dst: IpAddr) -> usize {
        if self.waiting.is_empty() {
            return 0;
        }
        let ends = Addresses::between(src, dst).map(Ends::Addresses);
        let waiting = ends.and_then(|ends| self.waiting.get(&ends));
        waiting.map_or(0, BTreeMap::len)
    }

    /// How many removals wait.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.count
    }
}

/// Whose packets a flow is for, and where they go: those of a verdict, whether or not a load balancer sends them
/// elsewhere.
pub(super) fn ends(key: &FlowKey) -> Ends {
    match key.matches.ends {
        Ends::Verdict { src, mark, .. } => Ends::Verdict {
            src,
            mark,
            is_untranslated: false,
        },
        ends @ Ends::Addresses(_) => ends,
    }
}
