//! How the access to one address is enforced: by the tag that its packets get, and by the flows of the tag's group.
//!
//! Each cache entry carries an [`Installed`] and does not look into it. The cache says which patterns the address has
//! ([`Installed::enforce`]) and asks whether the address is in use.

mod batch;
mod flows;
mod groups;

use std::{net::IpAddr, time::Duration};

use crate::{
    Timestamp,
    io::input::{BatchId, MarkChange, MarkFound},
    policy::plan::{Patterns, Plan, TagFlows},
    values::{flow::Tag, ids::PortId, limits::COUNTERS_DELAY_MAX},
};

pub(crate) use batch::{Batch, Expected, Written};
pub(crate) use flows::{Flows, Presence};
pub(crate) use groups::{Fit, Followed, Groups, NotInForce, Tagging};
use groups::{NoGroup, Taken};

/// How one address is enforced in switch and kernel.
#[derive(Debug, Default)]
pub(crate) enum Installed {
    /// Its packets get no tag.
    #[default]
    Untagged,
    /// The same until the first comparison has told which tags are taken. The kernel may have a mark of the earlier run.
    BeforeComparison(Option<Kept>),
    /// Flows give its packets the tag.
    ByFlows(Tagged),
    /// The program on the pod's veth gives its packets a mark that stands for the tag.
    Marked(Marked),
}

/// A mark of an earlier run: its end, and the tag that it stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    until: Timestamp,
    told: Tag,
}

/// An address whose packets get their tag by flows.
#[derive(Debug)]
pub(crate) struct Tagged {
    tag: Tag,
    flows: Flows,
    /// Whether only packets of established connections get it.
    has_ended: bool,
    /// Whether the kernel may have a mark for the address. The flows decide before the mark. The next reading of the marks
    /// removes it, or the flows if it stands for the tag.
    may_be_marked: bool,
}

/// An address whose packets get their tag by a mark.
#[derive(Debug)]
pub(crate) struct Marked {
    tag: Tag,
    /// The end that the kernel was told; `None` until the flows of the group are in force.
    until: Option<Timestamp>,
    /// The tag that the kernel was told, if it was told an end.
    told: Tag,
    /// When the kernel was told of the tag.
    set_at: Timestamp,
    /// When a packet was last marked, or the kernel was first told of a tag.
    used_at: Timestamp,
    /// Whether a packet was marked.
    is_used: bool,
    /// Whether the use was read after the pod has had the time to use the address.
    is_counted: bool,
    /// The last reading that has found the mark.
    found_in: u32,
}

/// A reading of all marks: a part of a comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// The number of the comparison.
    pub(crate) number: u32,
    /// When the reading began.
    pub(crate) since: Timestamp,
}

/// The state of a mark in the kernel, compared with its address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ReadMark {
    /// That of its tag, or a former one until the flows of the group are in force.
    Right,
    /// Not that of its tag, whose flows are in force.
    Wrong,
}

/// How much an address is used.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Usage {
    /// The packets; `None` where they are not counted for the address.
    pub(crate) packets: Option<u64>,
    /// When the last packet was seen, if there was one.
    pub(crate) at: Option<Timestamp>,
}

/// The changes by [`Installed::enforce`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Enforced {
    /// How many flows of the address are new, or one if it has a mark that is new.
    pub(crate) added: usize,
    /// Whether the tag of its packets is another one, or comes otherwise.
    pub(crate) changed: bool,
    /// Whether it has the flows of its patterns.
    pub(crate) fit: Fit,
}

/// Whose access is enforced, and how long the kernel may enforce it without the agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The port.
    pub(crate) port: PortId,
    /// The address.
    pub(crate) address: IpAddr,
    /// A mark ends then.
    pub(crate) until: Timestamp,
    /// Whether the address gets its tag by flows, and no mark. A mark says nothing about a packet that a load balancer has
    /// sent to the address, whose destination was another one when it was marked: what a rule denies would pass. If a load
    /// balancer has the address in front, a mark would decide over the address behind, whatever its rules.
    pub(crate) needs_flows: bool,
    /// Whether a load balancer leads to the address: it gets its tag by flows, too. If it has a mark, that stays for now
    /// ([`Cache::compared`](crate::cache::Cache::compared)).
    pub(crate) is_backend: bool,
    /// Whether only established connections to the address pass. No mark says that.
    pub(crate) has_ended: bool,
}

impl Installed {
    fn marked(&self) -> Option<&Marked> {
        match self {
            Self::Marked(marked) => Some(marked),
            Self::Untagged | Self::BeforeComparison(_) | Self::ByFlows(_) => None,
        }
    }

    fn marked_mut(&mut self) -> Option<&mut Marked> {
        match self {
            Self::Marked(marked) => Some(marked),
            Self::Untagged | Self::BeforeComparison(_) | Self::ByFlows(_) => None,
        }
    }

    /// Whether its packets get no tag.
    pub(crate) fn is_empty(&self) -> bool {
        self.tag().is_none()
    }

    /// Whether new connections get the tag, too.
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Untagged | Self::BeforeComparison(_) => false,
            Self::ByFlows(tagged) => !tagged.has_ended,
            Self::Marked(_) => true,
        }
    }

    /// Whether the address waits for the first comparison.
    fn is_before_comparison(&self) -> bool {
        matches!(self, Self::BeforeComparison(_))
    }

    /// How many flows of its own the address should have.
    pub(crate) fn len(&self) -> usize {
        self.own().map_or(0, Flows::len)
    }

    /// Whether some of the flows that let the pod reach the address must be restored.
    pub(crate) fn is_lost(&self, groups: &Groups) -> bool {
        let of_group = self.tag().and_then(|tag| groups.flows(tag));
        self.own().into_iter().chain(of_group).any(Flows::is_lost)
    }

    /// The tag of its packets.
    pub(crate) fn tag(&self) -> Option<Tag> {
        match self {
            Self::Untagged | Self::BeforeComparison(_) => None,
            Self::ByFlows(tagged) => Some(tagged.tag),
            Self::Marked(marked) => Some(marked.tag),
        }
    }

    /// Whether its tag comes by a mark.
    pub(crate) fn is_by_mark(&self) -> bool {
        matches!(self, Self::Marked(_))
    }

    /// Whether the kernel marks packets to the address.
    pub(crate) fn is_marked(&self) -> bool {
        self.marked().is_some_and(|marked| marked.until.is_some())
    }

    /// The flows that give its packets the tag.
    pub(crate) fn own(&self) -> Option<&Flows> {
        match self {
            Self::ByFlows(tagged) => Some(&tagged.flows),
            Self::Untagged | Self::BeforeComparison(_) | Self::Marked(_) => None,
        }
    }

    /// The same, to be changed.
    pub(crate) fn own_mut(&mut self) -> Option<&mut Flows> {
        match self {
            Self::ByFlows(tagged) => Some(&mut tagged.flows),
            Self::Untagged | Self::BeforeComparison(_) | Self::Marked(_) => None,
        }
    }

    /// How the flows that let the pod reach the address came into the switch: those of its group, and those that give its
    /// packets their tag. They may be in two batches, which do not take effect in their order.
    pub(crate) fn written(&self, port: PortId, groups: &Groups) -> [Written; 2] {
        let of_group = |tag| match groups.is_in_force(tag) {
            true => Written::Before,
            false => groups
                .flows(tag)
                .map_or(Written::Before, |flows| flows.written),
        };
        match self {
            Self::Untagged => Default::default(),
            Self::BeforeComparison(_) => [Written::Unsent { comparisons: 0 }, Written::Before],
            Self::ByFlows(tagged) => match (of_group(tagged.tag), tagged.flows.written) {
                // The address was open before the connection was lost.
                (Written::Unsent { .. }, own @ (Written::Before | Written::In(_))) => {
                    [Written::Before, own]
                }
                (of_group, own) => [of_group, own],
            },
            Self::Marked(marked) => {
                if groups.is_in_force_at(port, marked.tag) {
                    return Default::default();
                }
                let of_port = groups.flows_of_port(port).map(|flows| flows.written);
                let written = [of_group(marked.tag), of_port.unwrap_or_default()];
                let is_unsent = |one: &Written| matches!(one, Written::Unsent { .. });
                match marked.until.is_some() && written.iter().any(is_unsent) {
                    // The address was open before the connection was lost.
                    true => Default::default(),
                    false => written,
                }
            }
        }
    }

    /// The batches with the flows of its group, if the kernel marks packets with a former one until the switch has them.
    pub(crate) fn awaits(&self, port: PortId, groups: &Groups) -> impl Iterator<Item = BatchId> {
        let written = match self.is_marked() {
            true => self.written(port, groups),
            false => Default::default(),
        };
        written.into_iter().filter_map(|written| match written {
            Written::In(batch) => Some(batch),
            Written::Before | Written::Unsent { .. } => None,
        })
    }

    /// Enforces the patterns for the address, `None` if no rule matches a name of it, and restores lost flows.
    pub(crate) fn enforce(
        &mut self,
        (place, patterns): (Place, Option<&Patterns>),
        tagging: &mut Tagging<'_>,
        groups: &mut Groups,
        batch: &mut Batch,
    ) -> Enforced {
        let Some(patterns) = patterns else {
            return self.withdraw(place, groups, batch);
        };
        let now = batch.now();
        let known = self.tag();
        let taken = match known {
            Some(tag) if groups.is_for(tag, patterns, tagging.facts) => {
                groups.write(tag, batch);
                let fit = Fit::Exact;
                Ok(Taken { tag, fit })
            }
            _ => groups.take(patterns, known, tagging, batch),
        };
        let Taken { tag, fit } = match taken {
            Ok(taken) => taken,
            Err(why) => {
                let is_before = why == NoGroup::BeforeComparison;
                let enforced = match is_before && self.is_before_comparison() {
                    true => Enforced::default(),
                    false => self.withdraw(place, groups, batch),
                };
                if is_before && !self.is_before_comparison() {
                    *self = Self::BeforeComparison(None);
                }
                let fit = match why {
                    NoGroup::NoFlows => Fit::Exact,
                    NoGroup::BeforeComparison => Fit::Provisional,
                    NoGroup::NoRoom => Fit::Cut,
                };
                return Enforced { fit, ..enforced };
            }
        };
        if let Some(known) = known.filter(|known| *known != tag) {
            groups.release(known, (place.port, place.address), now);
        }
        let may_be_marked = groups.is_clean(place.port)
            && groups.mark(tag).is_some()
            && !place.needs_flows
            && !place.has_ended;
        if may_be_marked {
            groups.write_port(place.port, batch);
        }
        let enforced = match self {
            Self::Marked(marked) if may_be_marked => {
                let changed = marked.tag != tag;
                if changed {
                    // In another scope, the mark stands for another group.
                    if marked.told.scope() != tag.scope() && marked.until.take().is_some() {
                        remove_mark(place, groups, batch);
                    }
                    marked.tag = tag;
                    marked.set(place, groups, batch);
                }
                Enforced {
                    added: usize::from(changed),
                    changed,
                    fit,
                }
            }
            Self::Untagged | Self::BeforeComparison(_)
                if may_be_marked
                    && !place.is_backend
                    && groups.are_tried((place.port, place.address), now) =>
            {
                let mut marked = Marked::new(tag, now);
                if let Self::BeforeComparison(Some(kept)) = self {
                    match kept.told.scope() == tag.scope() {
                        true => (marked.until, marked.told) = (Some(kept.until), kept.told),
                        false => remove_mark(place, groups, batch),
                    }
                }
                marked.set(place, groups, batch);
                *self = Self::Marked(marked);
                Enforced {
                    added: 1,
                    changed: true,
                    fit,
                }
            }
            // An address that had ended is open again.
            Self::ByFlows(tagged)
                if tagged.has_ended
                    && may_be_marked
                    && !place.is_backend
                    && groups.are_tried((place.port, place.address), now)
                    && groups.is_in_force_at(place.port, tag) =>
            {
                tagged.tag = tag;
                self.go_over(place, groups, batch);
                Enforced {
                    added: 1,
                    changed: true,
                    fit,
                }
            }
            _ => self.give_flows((place, tag), tagging, groups, batch),
        };
        Enforced { fit, ..enforced }
    }

    /// The packets to the address get this tag by flows.
    fn give_flows(
        &mut self,
        (place, tag): (Place, Tag),
        tagging: &mut Tagging<'_>,
        groups: &Groups,
        batch: &mut Batch,
    ) -> Enforced {
        let Tagging { facts, planner } = tagging;
        let flows = TagFlows {
            tag,
            is_ipv6: place.address.is_ipv6(),
            has_ended: place.has_ended,
            mask: groups.mask(),
        };
        let plan: Plan = planner.of_tag(*facts, flows);
        let (mut flows, was_marked) = match std::mem::take(self) {
            Self::Untagged => (Flows::default(), false),
            Self::BeforeComparison(kept) => (Flows::default(), kept.is_some()),
            Self::ByFlows(tagged) => (tagged.flows, tagged.may_be_marked),
            Self::Marked(marked) => (Flows::default(), marked.until.is_some()),
        };
        let enforced = flows.enforce(place.address.into(), plan, batch);
        // What a rule denies closes at once, and so does what a load balancer has in front.
        let stays = was_marked && !place.needs_flows;
        if was_marked && !stays {
            remove_mark(place, groups, batch);
        }
        *self = Self::ByFlows(Tagged {
            tag,
            flows,
            has_ended: place.has_ended,
            may_be_marked: stays,
        });
        enforced
    }

    /// An address with a mark gets its tag by flows. The mark stays until the switch has them.
    pub(crate) fn replace_mark(
        &mut self,
        place: Place,
        tagging: &mut Tagging<'_>,
        groups: &Groups,
        batch: &mut Batch,
    ) {
        if let Self::Marked(Marked { tag, .. }) = *self {
            self.give_flows((place, tag), tagging, groups, batch);
        }
    }

    /// No packet to the address gets a tag.
    pub(crate) fn withdraw(
        &mut self,
        place: Place,
        groups: &mut Groups,
        batch: &mut Batch,
    ) -> Enforced {
        let changed = !self.is_empty();
        self.close(place, groups, batch);
        *self = Self::Untagged;
        Enforced {
            changed,
            ..Enforced::default()
        }
    }

    /// Closes the address.
    pub(crate) fn close(&self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        if let Some(tag) = self.tag() {
            groups.release(tag, (place.port, place.address), batch.now());
        }
        let is_marked = match self {
            Self::Untagged => false,
            Self::BeforeComparison(kept) => kept.is_some(),
            Self::ByFlows(tagged) => {
                tagged.flows.close(place.address.into(), batch);
                tagged.may_be_marked
            }
            Self::Marked(marked) => marked.until.is_some(),
        };
        if is_marked {
            remove_mark(place, groups, batch);
        }
    }

    // Marks.

    /// Tells the kernel of the tag, whose flows are in force, or of another interface.
    pub(crate) fn mark(&mut self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        if let Some(marked) = self.marked_mut() {
            marked.set(place, groups, batch);
        }
    }

    /// Tells the kernel a later end, if the end that it knows comes before `needed`, or if it knows none and the
    /// flows are in force.
    pub(crate) fn prolong(
        &mut self,
        place: Place,
        needed: Timestamp,
        groups: &mut Groups,
        batch: &mut Batch,
    ) {
        if let Some(marked) = self.marked_mut()
            && match marked.until {
                Some(until) => until < needed,
                None => groups.is_in_force_at(place.port, marked.tag),
            }
        {
            marked.set(place, groups, batch);
        }
    }

    /// The kernel has not taken the mark.
    pub(crate) fn mark_refused(&mut self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        if self.is_by_mark() {
            self.withdraw(place, groups, batch);
        }
    }

    /// Whether an address with flows may get its tag by a mark, at once.
    fn may_get_mark(&self, place: Place, groups: &Groups, now: Timestamp) -> bool {
        let Self::ByFlows(tagged) = self else {
            return false;
        };
        !place.needs_flows
            && !place.is_backend
            && !place.has_ended
            && !tagged.flows.is_lost()
            && groups.mark(tagged.tag).is_some()
            && groups.are_tried((place.port, place.address), now)
            && groups.is_in_force_at(place.port, tagged.tag)
    }

    /// An address with flows gets a mark beside them, if it may have one. A reading that finds the mark ends the flows; one
    /// that does not find it sets it again. Returns whether the kernel is told.
    pub(crate) fn mark_beside(&mut self, place: Place, groups: &Groups, batch: &mut Batch) -> bool {
        if self.may_get_mark(place, groups, batch.now())
            && let Self::ByFlows(tagged) = self
            && set_mark(place, tagged.tag, groups, batch)
        {
            tagged.may_be_marked = true;
            return true;
        }
        false
    }

    /// Whether this mark may end the flows of an address.
    pub(crate) fn may_go_over(
        &self,
        place: Place,
        found: &MarkFound,
        groups: &Groups,
        now: Timestamp,
    ) -> bool {
        let mark = || self.tag().and_then(|tag| groups.mark(tag));
        self.may_get_mark(place, groups, now) && found.until > now && mark() == Some(found.mark)
    }

    /// The kernel has a mark that stands for the tag of an address with flows: these end. Since the mark was set, the address
    /// may have got a later end, or the mark may have been removed, so the kernel is told again.
    pub(crate) fn go_over(&mut self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        if let Self::ByFlows(tagged) = self {
            tagged.flows.close(place.address.into(), batch);
            let mut marked = Marked::new(tagged.tag, batch.now());
            marked.set(place, groups, batch);
            *self = Self::Marked(marked);
        }
    }

    /// Records the kernel's mark of the address; `None` if it should have no mark, or has flows in its place that the
    /// switch has confirmed (`is_confirmed`).
    pub(crate) fn read(
        &mut self,
        (port, found): (PortId, &MarkFound),
        reading: Reading,
        is_confirmed: impl Fn(Written) -> bool,
        groups: &Groups,
    ) -> Option<ReadMark> {
        let marked = match self {
            Self::Untagged => return None,
            Self::BeforeComparison(kept) => return kept.is_some().then_some(ReadMark::Right),
            Self::ByFlows(tagged) => {
                let stays = tagged.may_be_marked
                    && (!is_confirmed(tagged.flows.written) || tagged.flows.is_lost());
                tagged.may_be_marked = stays;
                return stays.then_some(ReadMark::Right);
            }
            Self::Marked(marked) => marked,
        };
        marked.found_in = reading.number;
        if marked.until.is_none() {
            marked.go_on_with(found, reading.since);
        } else if marked.set_at > reading.since {
            return Some(ReadMark::Right);
        } else {
            if let Some(used_at) = found.used_at {
                marked.is_used = true;
                marked.used_at = marked.used_at.max(used_at);
            }
            marked.is_counted |= marked.set_at + COUNTERS_DELAY_MAX <= reading.since;
        }
        let is_right = groups.mark(marked.tag) == Some(found.mark);
        let is_wrong =
            !is_right && marked.until.is_some() && groups.is_in_force_at(port, marked.tag);
        Some(match is_wrong {
            true => ReadMark::Wrong,
            false => ReadMark::Right,
        })
    }

    /// At a start, the kernel goes on with this mark until the address has the flows or the mark that it should have, if
    /// the mark's group is known. Returns whether it does.
    pub(crate) fn keep_found(&mut self, place: Place, found: &MarkFound, groups: &Groups) -> bool {
        let Place {
            port,
            needs_flows,
            is_backend,
            ..
        } = place;
        let told = groups.tag_of(port, found.mark);
        let Some(told) = told.filter(|told| groups.contain(*told)) else {
            return false;
        };
        match self {
            Self::Untagged => false,
            Self::BeforeComparison(kept) => {
                let until = found.until;
                *kept = Some(Kept { until, told });
                true
            }
            Self::ByFlows(_) if needs_flows => false,
            // Of many addresses that a load balancer leads to, some at a time get flows.
            Self::ByFlows(tagged)
                if is_backend
                    && !tagged.has_ended
                    && matches!(tagged.flows.written, Written::Unsent { .. }) =>
            {
                let mut marked = Marked::new(tagged.tag, found.until);
                (marked.until, marked.told) = (Some(found.until), told);
                *self = Self::Marked(marked);
                true
            }
            Self::ByFlows(tagged) => {
                tagged.may_be_marked = true;
                true
            }
            Self::Marked(marked) => {
                if marked.until.is_none() {
                    (marked.until, marked.told) = (Some(found.until), told);
                }
                true
            }
        }
    }

    /// The flows of its group do not come: removes the mark of the former one, if the kernel has it.
    pub(crate) fn end_former(&mut self, place: Place, groups: &Groups, batch: &mut Batch) {
        let marked = self.marked_mut();
        if let Some(marked) = marked.filter(|marked| marked.told != marked.tag)
            && marked.until.take().is_some()
        {
            remove_mark(place, groups, batch);
        }
    }

    /// Whether the kernel should have had a mark that this reading has not found, or should have been told of one.
    pub(crate) fn is_unread(&self, port: PortId, reading: Reading, groups: &Groups) -> bool {
        match self.marked() {
            None => false,
            Some(marked) if marked.until.is_none() => groups.is_in_force_at(port, marked.tag),
            Some(marked) => marked.set_at <= reading.since && marked.found_in != reading.number,
        }
    }

    // Whether it is in use.

    /// The priority of the entry for eviction: 0 if the address is not open for new connections, 1 if it is out of use.
    /// `None` if the address may be in use.
    pub(crate) fn eviction_priority(&self, idle_grace: Duration, now: Timestamp) -> Option<u8> {
        match self {
            Self::Untagged | Self::BeforeComparison(_) => Some(0),
            Self::ByFlows(tagged) if tagged.has_ended => Some(0),
            Self::ByFlows(tagged) => tagged.flows.eviction_priority(idle_grace, now),
            Self::Marked(marked) => marked.eviction_priority(idle_grace, now),
        }
    }

    /// How much the address is used, as far as is known.
    pub(crate) fn usage(&self) -> Usage {
        match self {
            Self::Untagged | Self::BeforeComparison(_) => Usage::default(),
            Self::ByFlows(tagged) => tagged.flows.usage(),
            Self::Marked(marked) => Usage {
                packets: None,
                at: marked.is_used.then_some(marked.used_at),
            },
        }
    }

    /// When a packet to the address last got the tag, or the tag was given.
    pub(crate) fn used_at(&self) -> Option<Timestamp> {
        match self {
            Self::Untagged | Self::BeforeComparison(_) => None,
            Self::ByFlows(tagged) => tagged.flows.used_at(),
            Self::Marked(marked) => marked.last_use(),
        }
    }
}

impl Marked {
    fn new(tag: Tag, now: Timestamp) -> Self {
        Self {
            tag,
            until: None,
            told: tag,
            set_at: now,
            used_at: now,
            is_used: false,
            is_counted: false,
            found_in: 0,
        }
    }

    /// 1 if the address is out of use; `None` if it may be in use.
    fn eviction_priority(&self, idle_grace: Duration, now: Timestamp) -> Option<u8> {
        let is_in_use = self.is_used && self.used_at + idle_grace > now;
        (self.is_counted && !is_in_use).then_some(1)
    }

    /// When the mark was last used, or set. `None` if the kernel has never had it: no packet can have used it.
    fn last_use(&self) -> Option<Timestamp> {
        (self.until.is_some() || self.is_used).then_some(self.used_at)
    }

    /// A mark of an earlier run gets no new term. Its last use is the kernel's, and none if its time was over.
    fn go_on_with(&mut self, found: &MarkFound, since: Timestamp) {
        let used_at = found.used_at.filter(|_| found.until > since);
        self.is_used = used_at.is_some();
        self.used_at = used_at.unwrap_or_default();
    }

    /// Tells the kernel of the tag, or does so as soon as the flows are in force.
    fn set(&mut self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        if groups.is_ready(self.tag, (place.port, place.address))
            && set_mark(place, self.tag, groups, batch)
        {
            (self.until, self.told) = (Some(place.until), self.tag);
            self.set_at = batch.now();
        }
    }
}

/// Tells the kernel the mark that stands for the tag of an address. Returns whether there is one.
fn set_mark(place: Place, tag: Tag, groups: &Groups, batch: &mut Batch) -> bool {
    let Some((ifindex, mark)) = groups.interface(place.port).zip(groups.mark(tag)) else {
        return false;
    };
    batch.mark(MarkChange::Set {
        ifindex,
        address: place.address,
        mark,
        until: place.until,
    });
    true
}

/// Takes the mark of an address from the kernel.
fn remove_mark(place: Place, groups: &Groups, batch: &mut Batch) {
    let Place { port, address, .. } = place;
    if let Some(ifindex) = groups.interface(port) {
        batch.mark(MarkChange::Remove { ifindex, address });
    }
}
