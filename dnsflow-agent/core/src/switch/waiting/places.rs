//! The changes that wait, by the ends of their flows.

use std::{collections::BTreeMap, net::IpAddr};

use crate::values::{
    flow::{Ends, FlowChange, FlowKey},
    ids::PortId,
};

/// One change for each flow: the last one.
#[derive(Debug, Default)]
pub(super) struct Places(BTreeMap<Ends, Place>);

#[derive(Debug, Default)]
struct Place {
    /// In the order of their keys.
    changes: Vec<FlowChange>,
    /// The pod in whose queue it is.
    owner: Option<PortId>,
}

impl Places {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many changes wait between these ends.
    pub(super) fn len(&self, ends: Ends) -> usize {
        self.0.get(&ends).map_or(0, |place| place.changes.len())
    }

    /// The pod in whose queue the changes between these ends are.
    pub(super) fn owner(&self, ends: Ends) -> Option<PortId> {
        self.0.get(&ends)?.owner
    }

    /// The changes between these ends are in the queue of this pod. Returns whether they were not.
    pub(super) fn own(&mut self, ends: Ends, port: PortId) -> bool {
        let place = self.0.entry(ends).or_default();
        place.owner.replace(port) != Some(port)
    }

    /// Takes a change. Returns how many more wait now: one or none.
    pub(super) fn push(&mut self, ends: Ends, change: FlowChange) -> usize {
        let changes = &mut self.0.entry(ends).or_default().changes;
        match changes.binary_search_by(|waiting| waiting.key().cmp(&change.key())) {
            Ok(at) => {
                merge(&mut changes[at], change);
                0
            }
            Err(at) => {
                if changes.is_empty() {
                    // Most addresses have one flow.
                    changes.reserve_exact(1);
                }
                changes.insert(at, change);
                1
            }
        }
    }

    /// Takes the changes between these ends out.
    pub(super) fn take(&mut self, ends: Ends) -> Vec<FlowChange> {
        self.0.remove(&ends).unwrap_or_default().changes
    }

    /// The change of this flow.
    pub(super) fn change_of(&self, key: &FlowKey) -> Option<&FlowChange> {
        let changes = &self.0.get(&ends_of(key))?.changes;
        let at = changes.binary_search_by(|change| change.key().cmp(&Some(key)));
        Some(&changes[at.ok()?])
    }

    /// All changes.
    pub(super) fn changes(&self) -> impl Iterator<Item = &FlowChange> {
        self.0.values().flat_map(|place| &place.changes)
    }

    /// The ends at these addresses of pods between which flows only end.
    pub(super) fn only_ending_at(&self, is_at: impl Fn(IpAddr) -> bool) -> Vec<Ends> {
        let only_ends = |place: &Place| {
            let mut changes = place.changes.iter();
            changes.all(|change| matches!(change, FlowChange::Delete(..)))
        };
        let places = self.0.iter();
        let places = places.filter(|(ends, place)| is_at(ends.src()) && only_ends(place));
        places.map(|(ends, _)| *ends).collect()
    }
}

/// What is left of a change that waits when another change of its flow comes.
fn merge(waiting: &mut FlowChange, change: FlowChange) {
    match (&mut *waiting, change) {
        (FlowChange::Add(_, body), FlowChange::Delete(key, cookie)) => {
            // A removal of the flow that the addition replaces says nothing of the addition.
            if cookie.is_none_or(|cookie| cookie == body.cookie) {
                // The addition is not sent. It may have been to replace a flow with another cookie.
                *waiting = FlowChange::Delete(key, None);
            }
        }
        (FlowChange::Delete(_, cookie), FlowChange::Delete(_, other)) => {
            *cookie = cookie.filter(|cookie| other == Some(*cookie));
        }
        (_, change) => *waiting = change,
    }
}

/// Puts changes that have waited before the changes from index `from` on, which are of flows between the same ends: but
/// for those whose flows are changed once more.
pub(super) fn put_before(before: Vec<FlowChange>, changes: &mut Vec<FlowChange>, from: usize) {
    if before.is_empty() {
        return;
    }
    let before = before.into_iter();
    let before = before.filter_map(|change| Some((change.key()?.clone(), change)));
    let mut before: BTreeMap<FlowKey, FlowChange> = before.collect();
    for change in &mut changes[from..] {
        if let Some(mut waiting) = change.key().and_then(|key| before.remove(key)) {
            merge(&mut waiting, change.clone());
            *change = waiting;
        }
    }
    changes.splice(from..from, before.into_values());
}

/// Whose packets the flow of a change is for, and where they go; `None` for a change of many flows. The two flows of a
/// verdict, for packets that a load balancer sends elsewhere and for the others, have the same ends.
pub(super) fn ends(change: &FlowChange) -> Option<Ends> {
    change.key().map(ends_of)
}

fn ends_of(key: &FlowKey) -> Ends {
    match key.matches.ends {
        Ends::Verdict { src, mark, .. } => Ends::Verdict {
            src,
            mark,
            is_untranslated: false,
        },
        ends @ Ends::Addresses(_) => ends,
    }
}
