//! Changes of flows that wait in the agent before they go to the switch.
//!
//! ovs-vswitchd takes the changes of all pods one after the other. If all changes of one pod went there at once, the
//! openings of another pod would wait behind thousands. So each pod has few changes under way at a time, and its
//! other changes wait in its queue ([`queues`]). Addresses of a pod may also end together, and a pod may go. So
//! removals wait in one set for the whole node, and go in parts ([`removals`]). The changes of other pods go past.
//!
//! Only the last change of each flow waits ([`places`]), so that the waiting changes lead to the wanted flows. A
//! batch that goes past takes along the waiting changes between the ends of its flows ([`Waiting::take_along`]). So
//! changes of one flow keep their order, and no former flow decides beside a new one. `docs/decisions/under-way.md`
//! weighs the designs.

mod places;
mod queues;
mod removals;

use std::collections::{BTreeSet, HashSet};

use super::Opening;
use crate::{
    installed::Batch,
    io::input::BatchId,
    values::{
        flow::{Cookie, Ends, FlowChange, FlowKey, Sentinel, Tag},
        ids::PortId,
        limits::{CHANGES_UNDER_WAY_MAX, REMOVALS_WAITING_MAX},
    },
};
use places::{Change, Places, changes_of, ends, group_of, place_of};
pub(super) use queues::ChangesByPort;
use queues::{Queued, Queues};
use removals::Removals;

/// All that waits, and how much of it is under way.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    places: Places,
    queues: Queues,
    removals: Removals,
}

/// Changes that go to the switch now.
pub(super) struct Part {
    pub(super) batch: Batch,
    /// Their openings. A batch in several parts has them with its last part.
    pub(super) openings: Vec<Opening>,
    /// Whether there is more of the batch.
    pub(super) has_more: bool,
}

impl Waiting {
    /// Whether no change waits, and no change that has waited is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.removals.is_empty()
    }

    /// The connection is lost. Returns the batches that waited.
    pub(super) fn disconnected(&mut self) -> BTreeSet<BatchId> {
        std::mem::take(self).queues.into_batches()
    }

    /// How many pods have changes under way or waiting, and how many flows wait to be removed.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.queues.len(), self.removals.len()]
    }

    // What pods are told.

    /// Whether further changes of this pod have to wait.
    pub(super) fn is_full(&self, port: PortId) -> bool {
        self.queues.is_full(port)
    }

    /// The waiting batch of a pod to which further changes can be added, if it has room. `denies`: whether a rule
    /// denies their addresses.
    pub(super) fn with_room(&self, port: PortId, denies: bool) -> Option<BatchId> {
        self.queues.with_room(port, denies)
    }

    /// Takes the changes of a batch into the queue of a pod. Denials go before all changes that wait there, together
    /// with the waiting changes between the same ends.
    pub(super) fn push(&mut self, port: PortId, mut batch: Batch, opening: Option<Opening>) {
        let changes = std::mem::take(&mut batch.changes);
        let (len, denies) = (changes.len(), batch.denies);
        let mut waits_at = Vec::new();
        for change in changes {
            let Some(ends) = ends(&change) else {
                continue;
            };
            if self.places.owner(ends).is_none() {
                self.removals.forget(ends, self.places.len(ends));
            }
            if self.places.own(ends, port) || denies && waits_at.last() != Some(&ends) {
                waits_at.push(ends);
            }
            self.places.push(ends, change);
        }
        let queued = Queued::new(batch, opening, waits_at, len);
        self.queues.push(port, queued);
    }

    /// Whether this batch waits.
    pub(super) fn contains(&self, batch: BatchId) -> bool {
        self.queues.contain(batch)
    }

    /// So many changes of a pod are on their way.
    pub(super) fn sent(&mut self, port: PortId, changes: usize) {
        self.queues.sent(port, changes);
    }

    /// The switch has answered a batch with these changes of pods, or the changes were not sent after all.
    pub(super) fn answered(&mut self, batch: BatchId, shares: &ChangesByPort) {
        self.queues.answered(shares);
        self.removals.answered(batch);
    }

    /// A pod whose changes wait, and that has room for some.
    pub(super) fn next(&self) -> Option<PortId> {
        self.queues.next()
    }

    /// The pods in whose queues one of these batches is.
    pub(super) fn with_batches(&self, batches: &BTreeSet<BatchId>) -> Vec<PortId> {
        self.queues.with_batches(batches)
    }

    /// Takes the changes of a pod that come next: about [`CHANGES_UNDER_WAY_MAX`]. Those between the same ends stay
    /// together, but for the flows of a group that is new.
    pub(super) fn take_next(&mut self, port: PortId) -> Option<Part> {
        let queued = self.queues.front_mut(port)?;
        let mut changes = Vec::new();
        while let Some(ends) = queued.waits_at.front() {
            // Without an owner, the changes of its pod have gone along with others, and those of now only end.
            if self.places.owner(*ends).is_some() {
                if let Some(group) = self.places.waiting_group_of(*ends) {
                    queued.waits_at.push_front(group);
                    continue;
                }
                let more = self.places.len(*ends);
                let room = CHANGES_UNDER_WAY_MAX.saturating_sub(changes.len());
                if more > room && self.places.may_be_divided(*ends) {
                    changes.extend(changes_of(self.places.take_some(*ends, room)));
                    break;
                }
                if !changes.is_empty() && more > room {
                    break;
                }
                changes.extend(changes_of(self.places.take(*ends)));
            }
            queued.waits_at.pop_front();
        }
        let has_more = !queued.waits_at.is_empty();
        let (mut batch, openings) = match has_more {
            true => (queued.batch.take_changes(), Vec::new()),
            false => self.queues.take_front(port)?,
        };
        batch.changes = changes;
        // Where a removal has waited and the flow is written again, the addition alone is left.
        batch.replaces = true;
        Some(Part {
            batch,
            openings,
            has_more,
        })
    }

    // What only ends.

    /// Takes the removals of these flows out of the changes, where nothing is added between the same ends. The number of a
    /// group rests meanwhile.
    pub(super) fn put_off(
        &mut self,
        changes: &mut Vec<FlowChange>,
        is_one: impl Fn(&FlowKey) -> bool,
    ) {
        let added = changes.iter().filter_map(|change| match change {
            FlowChange::Add(..) => ends(change),
            FlowChange::Delete(..) | FlowChange::Renew(_) => None,
        });
        let added: HashSet<Ends> = added.collect();
        let may_wait = |change: &mut FlowChange| match change {
            FlowChange::Delete(key, cookie) => {
                let is_of_sentinel = cookie.is_some_and(Cookie::is_of_sentinel);
                is_one(key) && !is_of_sentinel && !added.contains(&place_of(key))
            }
            FlowChange::Add(..) | FlowChange::Renew(_) => false,
        };
        let put_off: Vec<FlowChange> = changes.extract_if(.., may_wait).collect();
        changes.extend(self.have_wait(put_off));
    }

    /// Takes the changes of addresses out that take away what these had of names that have ended, from index `from` on, but
    /// for addresses that change before: those keep their order.
    pub(super) fn ending(changes: &mut Vec<FlowChange>, from: usize) -> Vec<FlowChange> {
        let before: HashSet<Ends> = changes[..from].iter().filter_map(ends).collect();
        let may_wait = |change: &mut FlowChange| {
            ends(change)
                .is_some_and(|ends| matches!(ends, Ends::Addresses(_)) && !before.contains(&ends))
        };
        changes.extract_if(from.., may_wait).collect()
    }

    /// Has changes wait that only take away. Returns those for which there is no room.
    pub(super) fn have_wait(&mut self, changes: Vec<FlowChange>) -> Vec<FlowChange> {
        let mut beyond = Vec::new();
        for change in changes {
            match ends(&change) {
                Some(ends) if self.has_room_for(ends) => self.remove(ends, change),
                _ => beyond.push(change),
            }
        }
        beyond
    }

    /// Whether a removal between these ends may wait. Where a change waits, the others between the same ends do, too.
    fn has_room_for(&self, ends: Ends) -> bool {
        self.removals.len() < REMOVALS_WAITING_MAX || self.places.len(ends) > 0
    }

    /// Has a removal wait, or what takes the place of a flow with more.
    fn remove(&mut self, ends: Ends, change: FlowChange) {
        let added = self.places.push(ends, change);
        if self.places.owner(ends).is_none() {
            self.removals.push(ends, added);
        }
    }

    /// Takes the next part of the removals: about [`CHANGES_UNDER_WAY_MAX`]. There is none while the switch has not
    /// confirmed the part before. The removals between the same addresses stay together: of a flow that denies and one
    /// that allows, none is left alone. No packet comes to the flows of a group that is gone.
    pub(super) fn take_removals(&mut self) -> Vec<FlowChange> {
        let mut part = Vec::new();
        while let Some(ends) = self.removals.next() {
            let more = self.places.len(ends);
            let room = CHANGES_UNDER_WAY_MAX.saturating_sub(part.len());
            if more > room && self.places.may_be_divided(ends) {
                self.removals.take_some(room);
                part.extend(changes_of(self.places.take_some(ends, room)));
                break;
            }
            if !part.is_empty() && more > room {
                break;
            }
            self.removals.take(ends, more);
            part.extend(changes_of(self.places.take(ends)));
        }
        part
    }

    /// A part of the removals goes in this batch.
    pub(super) fn removals_sent(&mut self, batch: BatchId, part: &[FlowChange]) {
        self.removals.sent(batch, part);
    }

    /// Takes the waiting changes between the ends of these flows, if one of these flows ends.
    pub(super) fn take_ending(&mut self, is_one: impl Fn(&FlowKey) -> bool) -> Vec<FlowChange> {
        let mut changes = Vec::new();
        for ends in self.places.ending(is_one) {
            changes.extend(changes_of(self.take(ends)));
        }
        changes
    }

    // What goes past.

    /// Takes along the waiting changes between the ends of these changes' flows, from index `from` on, and those of the groups
    /// to which they lead packets. They go before these changes. Returns the groups.
    pub(super) fn take_along(&mut self, batch: &mut Batch, from: usize) -> Vec<Tag> {
        if self.places.is_empty() {
            return Vec::new();
        }
        let mut before = Vec::new();
        let places: BTreeSet<Ends> = batch.changes[from..].iter().filter_map(ends).collect();
        for ends in places {
            before.extend(self.take(ends));
        }
        batch.replaces |= !before.is_empty();
        places::put_before(before, &mut batch.changes, from);
        let own: BTreeSet<Ends> = batch.changes[from..].iter().filter_map(ends).collect();
        let groups: BTreeSet<Ends> = batch.changes[from..].iter().filter_map(group_of).collect();
        let mut taken = Vec::new();
        let mut first = Vec::new();
        for ends in groups.difference(&own) {
            let changes = self.take(*ends);
            if let Ends::Tagged { tag, .. } = ends
                && !changes.is_empty()
            {
                taken.push(*tag);
            }
            first.extend(changes_of(changes));
        }
        batch.replaces |= !first.is_empty();
        batch.changes.splice(from..from, first);
        taken
    }

    fn take(&mut self, ends: Ends) -> Vec<Change> {
        if self.places.owner(ends).is_none() {
            self.removals.forget(ends, self.places.len(ends));
        }
        self.places.take(ends)
    }

    /// A batch is not sent, because the comparison will find its changes. If changes of the same flows wait, those of
    /// the batch take their place.
    pub(super) fn follow(&mut self, changes: Vec<FlowChange>) {
        for change in changes {
            if let Some(key) = change.key()
                && self.places.change_of(key).is_some()
                && let Some(ends) = ends(&change)
            {
                self.places.push(ends, change);
            }
        }
    }

    /// A pod is gone. The removals of its flows no longer wait in its queue. Returns those for which there is no
    /// room.
    pub(super) fn pod_gone(&mut self, port: PortId) -> Vec<FlowChange> {
        let mut beyond = Vec::new();
        for (ends, changes) in self.places.disown(port) {
            match self.removals.len() < REMOVALS_WAITING_MAX {
                true => self.removals.push(ends, changes),
                false => beyond.extend(changes_of(self.places.take(ends))),
            }
        }
        beyond
    }

    /// How many changes wait between these ends.
    pub(super) fn len(&self, ends: Ends) -> usize {
        self.places.len(ends)
    }

    // The comparison.

    /// Whether a dump shows a flow only because a change of it waits, or its removal was under way.
    pub(super) fn explains(&self, key: &FlowKey, cookie: Cookie) -> bool {
        let is_removal = |change: &FlowChange| matches!(change, FlowChange::Delete(_, of) if of.is_none_or(|of| of == cookie));
        // What is written takes the place of the flow.
        self.writes(key) || self.places.change_of(key).is_some_and(is_removal)
    }

    /// Whether a dump does not show a flow because a change that writes it waits, or was under way.
    pub(super) fn writes(&self, key: &FlowKey) -> bool {
        self.removals.were_under_way(key)
            || matches!(self.places.change_of(key), Some(FlowChange::Add(..)))
    }

    /// Whether a change waits that may take the place of a flow.
    pub(super) fn may_replace(&self) -> bool {
        self.places.have_additions()
    }

    /// A dump begins.
    pub(super) fn dump_begins(&mut self) {
        self.removals.dump_begins();
    }

    /// The dump has ended.
    pub(super) fn dump_ends(&mut self) {
        self.removals.dump_ends();
    }

    /// The sentinel flows of the flows that wait to be removed: without these, the switch would remove all of the flows
    /// together.
    pub(super) fn sentinels(&self) -> BTreeSet<Sentinel> {
        let flows = self.places.there();
        flows
            .map(|(table, cookie)| Sentinel { table, cookie })
            .collect()
    }
}
