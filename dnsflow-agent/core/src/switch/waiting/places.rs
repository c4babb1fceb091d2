//! The changes that wait, by the ends of their flows.

use std::collections::BTreeMap;

use crate::values::{
    flow::{Cookie, Ends, FlowChange, FlowKey},
    ids::PortId,
};

/// One change for each flow: the last one.
#[derive(Debug, Default)]
pub(super) struct Places(BTreeMap<Ends, Place>);

#[derive(Debug, Default)]
struct Place {
    /// In the order of their keys.
    changes: Vec<Change>,
    /// The pod in whose queue it is.
    owner: Option<PortId>,
}

/// A change that waits.
#[derive(Debug)]
pub(super) struct Change {
    change: FlowChange,
    /// The cookie of the flow that the switch has; `None` if that is not known.
    there: Option<Cookie>,
}

impl Change {
    fn new(change: FlowChange) -> Self {
        let there = match &change {
            FlowChange::Delete(_, cookie) => *cookie,
            FlowChange::Add(..) | FlowChange::Renew(_) => None,
        };
        Self { change, there }
    }

    /// Merges the change with a later change of the same flow.
    fn merge(&mut self, other: FlowChange) {
        match (&self.change, other) {
            (FlowChange::Add(_, body), FlowChange::Delete(key, cookie)) => {
                // A removal of the flow that the addition replaces says nothing of the addition.
                if cookie.is_none_or(|cookie| cookie == body.cookie) {
                    // The addition is not sent. It may have been to replace a flow with another cookie.
                    self.change = FlowChange::Delete(key, self.there);
                }
            }
            (FlowChange::Delete(..), FlowChange::Delete(key, cookie)) => {
                self.there = self.there.filter(|there| cookie == Some(*there));
                self.change = FlowChange::Delete(key, self.there);
            }
            (_, other) => self.change = other,
        }
    }
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

    /// The places of a pod where flows only end are no longer in its queue. Returns them, each with the number of its
    /// changes.
    pub(super) fn disown(&mut self, port: PortId) -> Vec<(Ends, usize)> {
        let mut disowned = Vec::new();
        let only_ends = |place: &Place| {
            let mut changes = place.changes.iter();
            changes.all(|waiting| matches!(waiting.change, FlowChange::Delete(..)))
        };
        let of_port = self.0.iter_mut();
        for (ends, place) in of_port.filter(|(_, place)| place.owner == Some(port)) {
            if matches!(ends, Ends::Addresses(_)) && only_ends(place) {
                place.owner = None;
                disowned.push((*ends, place.changes.len()));
            }
        }
        disowned
    }

    /// Takes a change. Returns how many more wait now: one or none.
    pub(super) fn push(&mut self, ends: Ends, change: FlowChange) -> usize {
        let changes = &mut self.0.entry(ends).or_default().changes;
        match changes.binary_search_by(|waiting| waiting.change.key().cmp(&change.key())) {
            Ok(at) => {
                changes[at].merge(change);
                0
            }
            Err(at) => {
                if changes.is_empty() {
                    // Most addresses have one flow.
                    changes.reserve_exact(1);
                }
                changes.insert(at, Change::new(change));
                1
            }
        }
    }

    /// A group to which the changes between these ends lead packets, if changes of its flows wait in the queue of a pod: they
    /// come first.
    pub(super) fn waiting_group_of(&self, ends: Ends) -> Option<Ends> {
        let changes = &self.0.get(&ends)?.changes;
        let mut groups = changes
            .iter()
            .filter_map(|waiting| group_of(&waiting.change));
        groups.find(|group| self.owner(*group).is_some())
    }

    /// Whether the changes between these ends may go one after another: they add the flows of a group, and the flows by which
    /// packets come to it follow, or they remove those of a group that is gone.
    pub(super) fn may_be_divided(&self, ends: Ends) -> bool {
        let changes = self.0.get(&ends).map(|place| &*place.changes);
        let changes = changes.filter(|_| matches!(ends, Ends::Tagged { .. }));
        changes.is_some_and(|changes| {
            let mut changes = changes.iter();
            let adds = |waiting: &Change| matches!(waiting.change, FlowChange::Add(..));
            let first = changes.next().map(adds);
            changes.all(|waiting| Some(adds(waiting)) == first)
        })
    }

    /// Takes so many of the changes between these ends out: those of the rules that come first.
    pub(super) fn take_some(&mut self, ends: Ends, most: usize) -> Vec<Change> {
        let changes = self.0.get_mut(&ends).map(|place| &mut place.changes);
        changes.map_or_else(Vec::new, |changes| {
            let rest = changes.len().saturating_sub(most);
            changes.drain(rest..).collect()
        })
    }

    /// Takes the changes between these ends out.
    pub(super) fn take(&mut self, ends: Ends) -> Vec<Change> {
        self.0.remove(&ends).unwrap_or_default().changes
    }

    /// The change of this flow.
    pub(super) fn change_of(&self, key: &FlowKey) -> Option<&FlowChange> {
        let changes = &self.0.get(&place_of(key))?.changes;
        let at = changes.binary_search_by(|change| change.change.key().cmp(&Some(key)));
        Some(&changes[at.ok()?].change)
    }

    /// The flows that the switch has meanwhile: their tables and cookies, as far as these are known.
    pub(super) fn there(&self) -> impl Iterator<Item = (u8, Cookie)> {
        let changes = self.0.values().flat_map(|place| &place.changes);
        changes.filter_map(|change| Some((change.change.key()?.table, change.there?)))
    }

    /// Whether some of the changes add flows.
    pub(super) fn have_additions(&self) -> bool {
        let mut changes = self.0.values().flat_map(|place| &place.changes);
        changes.any(|waiting| matches!(waiting.change, FlowChange::Add(..)))
    }

    /// The ends between which one of these flows ends.
    pub(super) fn ending(&self, is_one: impl Fn(&FlowKey) -> bool) -> Vec<Ends> {
        let ends_one = |place: &Place| {
            let mut changes = place.changes.iter();
            changes
                .any(|waiting| matches!(&waiting.change, FlowChange::Delete(key, _) if is_one(key)))
        };
        let places = self.0.iter();
        let places = places.filter(|(_, place)| ends_one(place));
        places.map(|(ends, _)| *ends).collect()
    }
}

/// The changes, without the state of their flows in the switch.
pub(super) fn changes_of(waiting: Vec<Change>) -> impl Iterator<Item = FlowChange> {
    waiting.into_iter().map(|waiting| waiting.change)
}

/// Puts changes that have waited before the changes from index `from` on, which are of flows between the same ends: but
/// for those whose flows are changed once more.
pub(super) fn put_before(before: Vec<Change>, changes: &mut Vec<FlowChange>, from: usize) {
    if before.is_empty() {
        return;
    }
    let before = before.into_iter();
    let before = before.filter_map(|waiting| Some((waiting.change.key()?.clone(), waiting)));
    let mut before: BTreeMap<FlowKey, Change> = before.collect();
    for change in &mut changes[from..] {
        if let Some(mut waiting) = change.key().and_then(|key| before.remove(key)) {
            waiting.merge(change.clone());
            *change = waiting.change;
        }
    }
    changes.splice(from..from, changes_of(before.into_values().collect()));
}

/// The flows of the group to which a change leads packets: what leads there comes behind them.
pub(super) fn group_of(change: &FlowChange) -> Option<Ends> {
    let FlowChange::Add(key, body) = change else {
        return None;
    };
    let is_ipv6 = key.matches.ends.dst()?.is_ipv6();
    let tag = body.cookie.tag()?;
    Some(Ends::Tagged { tag, is_ipv6 })
}

/// Whose packets the flow of a change is for, and where they go; `None` for a change of many flows.
pub(super) fn ends(change: &FlowChange) -> Option<Ends> {
    change.key().map(place_of)
}

/// Between which ends changes of a flow wait. One for established connections takes the place of one for all packets, and
/// the reverse.
pub(super) fn place_of(key: &FlowKey) -> Ends {
    match key.matches.ends {
        Ends::Established(addresses) => Ends::Addresses(addresses),
        ends => ends,
    }
}
