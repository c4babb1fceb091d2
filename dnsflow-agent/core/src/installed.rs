//! How the access to one address is enforced: by flows of its own, or by a group.
//!
//! Each cache entry carries an [`Installed`] and does not look into it. The cache says which flow templates are
//! wanted ([`Installed::enforce`]) and asks whether the address is in use.

mod batch;
mod flows;
mod groups;

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use crate::{
    Timestamp,
    io::input::{BatchId, MarkChange, MarkFound},
    policy::plan::{Plan, Planned, Room},
    values::{
        flow::{Cookie, FlowBody, FlowKey},
        ids::PortId,
        limits::COUNTERS_DELAY_MAX,
    },
};

pub(crate) use batch::{Batch, Expected, Written};
pub(crate) use flows::{Flows, Presence};
pub(crate) use groups::{GroupId, Groups, GroupsVersion};

/// How one address is enforced in switch and kernel.
#[derive(Debug)]
pub(crate) enum Installed {
    /// Flows to the address.
    Flows(Flows),
    /// The mark of the packets to the address.
    Marked(Marked),
    /// The mark, until a comparison has found the flows that replace it.
    Replaced(Box<Replaced>),
}

/// The mark of an address, and the flows that replace it.
#[derive(Debug)]
pub(crate) struct Replaced {
    marked: Marked,
    flows: Flows,
    beside: Beside,
}

/// A mark beside flows.
#[derive(Clone, Copy, Debug, Default)]
struct Beside {
    /// Whether the mark is by former rules: it ends when the switch has the flows, or does not take them.
    ends: bool,
    /// Whether the switch has the flows.
    is_confirmed: bool,
}

/// An address with a group.
#[derive(Debug)]
pub(crate) struct Marked {
    group: GroupId,
    /// The end that the kernel was told; `None` until the flows of the group are in force.
    until: Option<Timestamp>,
    /// The group that the kernel was told, if it was told an end.
    told: GroupId,
    /// When the kernel was told of the group.
    set_at: Timestamp,
    /// When a packet was last marked, or the kernel was first told of a group.
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
    /// Whether marks of an earlier run still wait for their groups.
    pub(crate) is_first: bool,
}

/// The state of a mark in the kernel, compared with its address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ReadMark {
    /// The mark of its group, or of the former one as long as that has flows.
    Right,
    /// Not the mark of its group, which is in force.
    Wrong,
    /// The mark of an earlier run, with another number than its group has, which is not in force.
    Former,
    /// The mark of a former group, which ends. The flows of its group have not come into force.
    Over,
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
    /// How many flows of the address are new.
    pub(crate) added: usize,
    /// Whether flows of the address were added or removed.
    pub(crate) changed: bool,
    /// The room by which some rules have not all of their flows, if some have not.
    pub(crate) cut: Option<Room>,
}

/// The wanted state of an address.
pub(crate) struct Wanted<'a> {
    /// The flows.
    pub(crate) planned: Planned,
    /// Flows that are in the switch already.
    pub(crate) found: Option<&'a BTreeMap<FlowKey, Cookie>>,
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
    /// Whether the address gets flows of its own at once, and no mark. If a rule denies a name of the address, they also
    /// match a packet that a load balancer has sent there, whose destination was another one when it was marked. If a
    /// load balancer has the address in front, a mark would decide over the address behind, whatever its rules.
    pub(crate) needs_flows: bool,
    /// Whether a load balancer leads to the address: it gets flows of its own, too. If it has a mark, that stays
    /// meanwhile ([`Installed::replace`]): without flows, nothing is open behind a load balancer.
    pub(crate) is_backend: bool,
}

impl Default for Installed {
    fn default() -> Self {
        Self::Flows(Flows::default())
    }
}

impl Installed {
    /// Its flows and its mark.
    fn into_parts(self) -> (Flows, Option<Marked>) {
        match self {
            Self::Flows(flows) => (flows, None),
            Self::Marked(marked) => (Flows::default(), Some(marked)),
            Self::Replaced(replaced) => (replaced.flows, Some(replaced.marked)),
        }
    }

    fn of_parts(flows: Flows, marked: Option<Marked>, beside: Beside) -> Self {
        match marked {
            None => Self::Flows(flows),
            Some(marked) if flows.is_empty() => Self::Marked(marked),
            Some(marked) => Self::Replaced(Box::new(Replaced {
                marked,
                flows,
                beside,
            })),
        }
    }

    fn beside(&self) -> Beside {
        match self {
            Self::Flows(_) | Self::Marked(_) => Beside::default(),
            Self::Replaced(replaced) => replaced.beside,
        }
    }

    fn marked(&self) -> Option<&Marked> {
        match self {
            Self::Flows(_) => None,
            Self::Marked(marked) => Some(marked),
            Self::Replaced(replaced) => Some(&replaced.marked),
        }
    }

    fn marked_mut(&mut self) -> Option<&mut Marked> {
        match self {
            Self::Flows(_) => None,
            Self::Marked(marked) => Some(marked),
            Self::Replaced(replaced) => Some(&mut replaced.marked),
        }
    }

    /// Whether nothing is open.
    pub(crate) fn is_empty(&self) -> bool {
        self.marked().is_none() && self.len() == 0
    }

    /// How many flows of its own the address should have.
    pub(crate) fn len(&self) -> usize {
        self.own().map_or(0, Flows::len)
    }

    /// Whether some of the flows that let the pod reach the address must be restored.
    pub(crate) fn is_lost(&self, groups: &Groups) -> bool {
        let of_group = self.group().and_then(|group| groups.flows(group));
        self.own().into_iter().chain(of_group).any(Flows::is_lost)
    }

    /// The group of the address, if it has one.
    pub(crate) fn group(&self) -> Option<GroupId> {
        self.marked().map(|marked| marked.group)
    }

    /// Whether the kernel marks packets to the address.
    pub(crate) fn is_marked(&self) -> bool {
        self.marked().is_some_and(|marked| marked.until.is_some())
    }

    /// The flows that packets to the address meet by the mark that the kernel has.
    pub(crate) fn of_mark<'a>(&self, groups: &'a Groups) -> Option<&'a Flows> {
        let marked = self.marked().filter(|marked| marked.until.is_some())?;
        groups.flows(marked.told)
    }

    /// The flow like this one, whatever the destination, of a group that the kernel is still to be told of.
    pub(crate) fn awaited<'a>(&self, key: &FlowKey, groups: &'a Groups) -> Option<&'a FlowBody> {
        let marked = self.marked().filter(|marked| marked.until.is_none())?;
        groups.flows(marked.group)?.body(key)
    }

    /// The flows of its own.
    pub(crate) fn own(&self) -> Option<&Flows> {
        match self {
            Self::Flows(flows) => Some(flows),
            Self::Marked(_) => None,
            Self::Replaced(replaced) => Some(&replaced.flows),
        }
    }

    /// The same, to be changed.
    pub(crate) fn own_mut(&mut self) -> Option<&mut Flows> {
        match self {
            Self::Flows(flows) => Some(flows),
            Self::Marked(_) => None,
            Self::Replaced(replaced) => Some(&mut replaced.flows),
        }
    }

    /// How the flows of the address, or of its group, came into the switch.
    pub(crate) fn written(&self, groups: &Groups) -> Written {
        let written = |flows: Option<&Flows>| flows.map(|flows| flows.written).unwrap_or_default();
        let marked = self.marked().filter(|_| !self.is_ending());
        let Some(marked) = marked else {
            return written(self.own());
        };
        if groups.is_in_force(marked.group) {
            return Written::Before;
        }
        match written(groups.flows(marked.group)) {
            // The address was open before the connection was lost.
            Written::Unsent { .. } if marked.until.is_some() => Written::Before,
            written => written,
        }
    }

    /// The batch with the flows of its group, if the kernel marks packets with a former one until the switch has them.
    pub(crate) fn awaits(&self, groups: &Groups) -> Option<BatchId> {
        match self.written(groups) {
            Written::In(batch) if self.is_marked() => Some(batch),
            _ => None,
        }
    }

    /// Enforces the plan for the address, and restores lost flows. The address gets the group of the plan, if there
    /// is one and if the address needs no flows of its own. Else it gets flows of its own, as far as it has room.
    pub(crate) fn enforce(
        &mut self,
        place: Place,
        wanted: Wanted<'_>,
        groups: &mut Groups,
        batch: &mut Batch,
    ) -> Enforced {
        let now = batch.now();
        let Wanted { planned, found } = wanted;
        let Place {
            port,
            address,
            needs_flows,
            is_backend,
            ..
        } = place;
        let has_flows = self.own().is_some_and(|flows| !flows.is_empty());
        let (cut_of_own, cut_of_group) = (planned.cut_of_own(), planned.cut_of_group());
        // If the kernel refused the mark, there would be no room for flows that have gone for it.
        let is_there = has_flows || found.is_some_and(|found| !found.is_empty());
        let may_lose = cut_of_own == cut_of_group || groups.were_refused();
        let keeps_flows = is_there && planned.own.is_some() && may_lose;
        // Without room, a mark opens at least what is not sent there by a load balancer: whoever makes a Service would
        // close the address to others.
        let has_room = planned.own.is_none();
        let takes_flows =
            needs_flows || (is_backend && has_room || keeps_flows) && self.marked().is_none();
        if let Some(marked) = self.marked()
            && !takes_flows
            && groups.is_for(marked.group, &planned, batch)
        {
            groups.enforce(marked.group, &planned, batch);
            let mut cut = cut_of_group;
            if let Self::Replaced(replaced) = self {
                let before = batch.len();
                let Replaced { flows, beside, .. } = &mut **replaced;
                flows.enforce(address.into(), planned.into_own(), found, batch);
                beside.is_confirmed &= !batch.adds_since(before);
                cut = cut_of_own;
            }
            return Enforced {
                cut,
                ..Enforced::default()
            };
        }
        let count = planned.plan.len();
        // The kernel has room for another mark of an address that has one.
        let is_tried = self.marked().is_some() || !groups.are_refused(now);
        let group = match count {
            0 => None,
            _ if takes_flows || !is_tried => None,
            _ => groups.take(port, &planned, batch),
        };
        let mut beside = self.beside();
        let (mut flows, marked) = std::mem::take(self).into_parts();
        let (enforced, marked) = match (marked, group) {
            // The mark comes after the flows of the group, so that its own flows would go first. The next plan
            // finds the group in force.
            (None, Some(group)) if has_flows && !groups.is_in_force(group) => {
                groups.release(group, address, now);
                let wanted = planned.into_own();
                let enforced = flows.enforce(address.into(), wanted, found, batch);
                (enforced, None)
            }
            (None, None) => {
                let wanted = planned.into_own();
                let enforced = flows.enforce(address.into(), wanted, found, batch);
                (enforced, None)
            }
            (None, Some(group)) => {
                flows.enforce(address.into(), Plan::new(), None, batch);
                let mut marked = Marked::new(group, now);
                marked.set(place, groups, batch);
                (Enforced::by_mark(count), Some(marked))
            }
            (Some(mut marked), Some(group)) => {
                beside.ends = false;
                let before = std::mem::replace(&mut marked.group, group);
                groups.release(before, address, now);
                marked.set(place, groups, batch);
                if has_flows {
                    let wanted = planned.into_own();
                    let before = batch.len();
                    flows.enforce(address.into(), wanted, found, batch);
                    beside.is_confirmed &= !batch.adds_since(before);
                }
                (Enforced::by_mark(count), Some(marked))
            }
            (Some(marked), None) => {
                let wanted = planned.into_own();
                let before = batch.len();
                let enforced = flows.enforce(address.into(), wanted, found, batch);
                let enforced = Enforced {
                    changed: true,
                    ..enforced
                };
                // Flows that were found are there.
                let were_there = beside.is_confirmed || !has_flows;
                beside.is_confirmed = were_there && !batch.adds_since(before);
                // What a rule denies closes at once, and so does a mark that decides behind a load balancer, what no rule
                // opens, or flows that are there.
                let is_awaited = !beside.is_confirmed && !flows.is_empty() && !needs_flows;
                let stays = marked.until.is_some() && is_awaited;
                beside.ends = stays;
                if !stays {
                    marked.remove(place, groups, batch);
                }
                (enforced, Some(marked).filter(|_| stays))
            }
        };
        *self = Self::of_parts(flows, marked, beside);
        let cut = match self {
            Self::Marked(_) => cut_of_group,
            Self::Flows(_) | Self::Replaced(_) => cut_of_own,
        };
        Enforced { cut, ..enforced }
    }

    /// Closes the address.
    pub(crate) fn close(&self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        if let Some(marked) = self.marked() {
            marked.remove(place, groups, batch);
        }
        if let Some(flows) = self.own() {
            flows.close(place.address.into(), batch);
        }
    }

    // Marks.

    /// Tells the kernel of the group, whose flows are in force, or of another interface.
    pub(crate) fn mark(&mut self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        if let Some(marked) = self.marked_mut() {
            marked.set(place, groups, batch);
        }
    }

    /// Tells the kernel a later end, if the end that it knows comes before `needed`, or if it knows none and the
    /// group's flows are in force.
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
                None => groups.is_in_force(marked.group),
            }
        {
            marked.set(place, groups, batch);
        }
    }

    /// Takes the mark from the address.
    pub(crate) fn unmark(&mut self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        let (flows, marked) = std::mem::take(self).into_parts();
        if let Some(marked) = marked {
            marked.remove(place, groups, batch);
        }
        *self = Self::Flows(flows);
    }

    /// Whether the address has nothing but a mark.
    pub(crate) fn is_by_mark_alone(&self) -> bool {
        matches!(self, Self::Marked(_))
    }

    /// Whether the address has nothing but a mark that the kernel is still to be told of.
    pub(crate) fn is_untold(&self) -> bool {
        matches!(self, Self::Marked(marked) if marked.until.is_none())
    }

    /// Whether the address has nothing but flows that were not sent to the switch.
    pub(crate) fn is_unsent(&self) -> bool {
        matches!(self, Self::Flows(flows) if matches!(flows.written, Written::Unsent { .. }))
    }

    /// Gives the address flows of its own beside its mark, if it has one. The mark stays until
    /// [`Installed::compared`].
    pub(crate) fn replace(&mut self, place: Place, groups: &Groups, batch: &mut Batch) {
        let (mut flows, marked) = std::mem::take(self).into_parts();
        if let Some(marked) = &marked {
            let planned = Planned {
                plan: groups.plan(marked.group),
                ..Planned::default()
            };
            flows.enforce(place.address.into(), planned.into_own(), None, batch);
        }
        *self = Self::of_parts(flows, marked, Beside::default());
    }

    /// Removes a mark that is replaced, once this comparison has found all flows that replace it. Returns whether it
    /// has.
    pub(crate) fn compared(
        &mut self,
        place: Place,
        comparison: u32,
        groups: &mut Groups,
        batch: &mut Batch,
    ) -> bool {
        let is_over = match self {
            Self::Flows(_) | Self::Marked(_) => false,
            Self::Replaced(replaced) => replaced.flows.are_all_seen(comparison),
        };
        if is_over {
            self.end_mark(place, groups, batch);
        }
        is_over
    }

    /// The switch has confirmed the flows of this batch. If they replace a mark by former rules, that is removed.
    pub(crate) fn confirmed(
        &mut self,
        place: Place,
        written_in: BatchId,
        groups: &mut Groups,
        batch: &mut Batch,
    ) {
        if let Self::Replaced(replaced) = self
            && replaced.flows.written == Written::In(written_in)
            && !replaced.flows.is_lost()
        {
            replaced.beside.is_confirmed = true;
            if replaced.beside.ends {
                self.end_mark(place, groups, batch);
            }
        }
    }

    /// Whether the address has a mark by former rules, and flows that replace it.
    pub(crate) fn is_ending(&self) -> bool {
        self.beside().ends
    }

    /// The batch with flows that are to replace the mark of the address, if the switch has not confirmed them.
    pub(crate) fn unconfirmed_in(&self) -> Option<BatchId> {
        match self {
            Self::Replaced(replaced) if !replaced.beside.is_confirmed => {
                match replaced.flows.written {
                    Written::In(batch) => Some(batch),
                    Written::Before | Written::Unsent { .. } => None,
                }
            }
            Self::Flows(_) | Self::Marked(_) | Self::Replaced(_) => None,
        }
    }

    /// Removes the mark of an address that has flows.
    pub(crate) fn end_mark(&mut self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        let (mut flows, marked) = std::mem::take(self).into_parts();
        if let Some(marked) = marked {
            marked.remove(place, groups, batch);
        }
        // So far, packets may have passed by the mark.
        flows.count_anew(batch.now());
        *self = Self::Flows(flows);
    }

    /// Records the kernel's mark of the address; `None` if it should have no mark.
    pub(crate) fn read(
        &mut self,
        found: &MarkFound,
        reading: Reading,
        groups: &Groups,
    ) -> Option<ReadMark> {
        let marked = self.marked_mut()?;
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
        let mark = groups.mark(marked.group);
        Some(if mark.is_some_and(|mark| mark.value() == found.mark) {
            ReadMark::Right
        } else if groups.is_in_force(marked.group) {
            match marked.until {
                Some(_) => ReadMark::Wrong,
                // The kernel is told of it behind the reading.
                None => ReadMark::Right,
            }
        } else if reading.is_first || groups.is_former(found.mark) {
            ReadMark::Former
        } else if groups.is_over(found.mark, reading.since) {
            ReadMark::Over
        } else {
            ReadMark::Right
        })
    }

    /// The kernel goes on with this mark of an earlier run until the group of the address is in force.
    pub(crate) fn keep_former(&mut self, found: &MarkFound, groups: &Groups) {
        if let Some(marked) = self.marked_mut()
            && marked.until.is_none()
        {
            marked.until = Some(found.until);
            marked.told = groups.number_in(found.mark).unwrap_or(marked.told);
        }
    }

    /// The flows of its group do not come: removes the mark of the former one, if the kernel has it.
    pub(crate) fn end_former(&mut self, place: Place, groups: &Groups, batch: &mut Batch) {
        let Place { port, address, .. } = place;
        let marked = self.marked_mut();
        if let Some(marked) = marked.filter(|marked| marked.told != marked.group)
            && marked.until.take().is_some()
            && let Some(ifindex) = groups.interface(port)
        {
            batch.mark(MarkChange::Remove { ifindex, address });
        }
    }

    /// Removes the mark of a former group from the kernel. The address gets the one of its group when that is in
    /// force.
    pub(crate) fn remove_former(&mut self, found: &MarkFound, batch: &mut Batch) {
        if let Some(marked) = self.marked_mut() {
            marked.until = None;
        }
        batch.mark(MarkChange::Remove {
            ifindex: found.ifindex,
            address: found.address,
        });
    }

    /// Whether the kernel should have had a mark that this reading has not found, or should have been told of one.
    pub(crate) fn is_unread(&self, reading: Reading, groups: &Groups) -> bool {
        match self.marked() {
            None => false,
            Some(marked) if marked.until.is_none() => groups.is_in_force(marked.group),
            Some(marked) => marked.set_at <= reading.since && marked.found_in != reading.number,
        }
    }

    // Whether it is in use.

    /// The priority of the entry for eviction: 0 if the address is not open, 1 if it is out of use.
    /// `None` if the address may be in use.
    pub(crate) fn eviction_priority(&self, idle_grace: Duration, now: Timestamp) -> Option<u8> {
        let of_mark = self
            .marked()
            .map(|marked| marked.eviction_priority(idle_grace, now));
        let of_flows = self
            .own()
            .map(|flows| flows.eviction_priority(idle_grace, now));
        let all = of_mark.into_iter().chain(of_flows);
        all.reduce(|one, other| one.zip(other).map(|(one, other)| one.max(other)))
            .flatten()
    }

    /// How much the address is used, as far as is known.
    pub(crate) fn usage(&self) -> Usage {
        match (self.marked(), self.own()) {
            (Some(marked), _) => Usage {
                packets: None,
                at: marked.is_used.then_some(marked.used_at),
            },
            (None, flows) => flows.map(Flows::usage).unwrap_or_default(),
        }
    }

    /// When one of the flows of this plan was last used. A mark does not tell by which of the flows of its group
    /// a packet passed.
    pub(crate) fn used_at(&self, plan: &Plan) -> Option<Timestamp> {
        let of_mark = self.marked().and_then(Marked::last_use);
        let of_flows = self.own().and_then(|flows| flows.used_at(plan));
        of_mark.filter(|_| !plan.is_empty()).max(of_flows)
    }

    // What the switch says.

    /// Forgets flows of its own ([`Flows::forget_unseen`]).
    pub(crate) fn forget_unseen(&mut self, comparison: u32) -> bool {
        let flows = self.own_mut();
        flows.is_some_and(|flows| flows.forget_unseen(comparison))
    }
}

impl Enforced {
    /// A mark was set in place of so many flows.
    fn by_mark(flows: usize) -> Self {
        Self {
            added: flows,
            changed: true,
            cut: None,
        }
    }
}

impl Marked {
    fn new(group: GroupId, now: Timestamp) -> Self {
        Self {
            group,
            until: None,
            told: group,
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

    /// Tells the kernel of the group, or does so as soon as its flows are in force.
    fn set(&mut self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        let now = batch.now();
        let Place {
            port,
            address,
            until,
            ..
        } = place;
        if !groups.is_in_force(self.group) {
            groups.wait(self.group, address);
        } else if let (Some(ifindex), Some(mark)) =
            (groups.interface(port), groups.mark(self.group))
        {
            batch.mark(MarkChange::Set {
                ifindex,
                address,
                mark: mark.value(),
                until,
            });
            (self.until, self.told) = (Some(until), self.group);
            self.set_at = now;
        }
    }

    fn remove(&self, place: Place, groups: &mut Groups, batch: &mut Batch) {
        let now = batch.now();
        let Place { port, address, .. } = place;
        groups.release(self.group, address, now);
        if self.until.is_some()
            && let Some(ifindex) = groups.interface(port)
        {
            batch.mark(MarkChange::Remove { ifindex, address });
        }
    }
}
