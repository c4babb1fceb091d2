//! The groups: sets of flow templates that packets are matched to by their marks.
//!
//! A group is a plan that is in use, with a number. The program on a pod's veth writes the number into the mark
//! of each packet to an address that has the group; the flows of the group match the mark. Opening an address
//! whose group is in force changes nothing in the switch (`docs/decisions/verdict.md`).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
    num::NonZeroU64,
};

use super::{
    Reading,
    batch::{Batch, Written},
    flows::Flows,
};
use crate::{
    Timestamp,
    io::input::BatchId,
    policy::{
        plan::{Patterns, Plan, Planned, PortFacts},
        rules::{ChangedName, ChangedNames},
    },
    values::{
        flow::{Cookie, FlowKey, Masked, Target},
        ids::PortId,
        limits::{
            GROUP_RESTS, GROUP_STAYS, GROUPS_PER_PORT_AT_LAST, GROUPS_PER_PORT_MAX, MARKS_REFUSED,
            SWEPT_MAX,
        },
    },
};

/// The number of a group, from 1 on.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct GroupId(u32);

/// All groups of the node.
#[derive(Debug)]
pub(crate) struct Groups {
    /// The bits of the mark that are ours; `None` if addresses have flows of their own.
    mask: Option<u32>,
    /// The interfaces whose packets are marked.
    interfaces: BTreeMap<PortId, u32>,
    /// The ports whose packets cannot be marked, as the programs were not attached: their addresses have flows of their
    /// own.
    not_attached: BTreeSet<PortId>,
    by_key: HashMap<GroupKey, GroupId>,
    groups: BTreeMap<GroupId, Group>,
    /// Numbers that were in use lately: the switch may have megaflows of them.
    resting: BTreeMap<GroupId, Rest>,
    /// Numbers of an earlier run that packets are still marked with: the groups of their addresses have other ones, and
    /// are not in force.
    former: BTreeSet<GroupId>,
    /// Those of them that the reading under way has found.
    found_former: BTreeSet<GroupId>,
    /// When the last complete reading of the kernel's marks began.
    read_at: Option<Timestamp>,
    /// The kernel has refused a mark: addresses get flows of their own until then.
    refused_until: Option<Timestamp>,
    /// Those that are not in force any more, since this was last asked for.
    out_of_force: BTreeSet<GroupId>,
    /// The groups of each port.
    of_ports: BTreeMap<PortId, OfPort>,
    /// When numbers have last become free, by the number of the change.
    numbers_changed: u64,
    /// The number of changes so far by which an address could get a group that it could not get before.
    changes: u64,
}

/// The groups of one port.
#[derive(Debug, Default)]
struct OfPort {
    /// How many there are.
    groups: usize,
    /// How many numbers of former ones rest.
    resting: usize,
    /// When an address of the port could last get one of them, or a further one, that it could not get before, by the
    /// number of the change.
    changed: u64,
}

/// The rest of a number.
#[derive(Debug)]
struct Rest {
    until: Timestamp,
    /// Whose group it was. Not known of a number of an earlier run.
    port: Option<PortId>,
}

/// Another one when an address of a port may get a group that it could not get before.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct GroupsVersion(NonZeroU64);

/// The addresses that share a group, as long as it lives.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum GroupKey {
    /// Those with these patterns: an edit changes the flows of the group, and the number stays.
    Patterns(Patterns),
    /// Those with this very plan, which follows from more than patterns.
    Plan(Plan),
}

impl GroupKey {
    fn of(planned: &Planned) -> Self {
        match &planned.patterns {
            Some(patterns) => Self::Patterns(patterns.clone()),
            None => Self::Plan(planned.plan.clone()),
        }
    }

    fn is_of(&self, planned: &Planned) -> bool {
        match (self, &planned.patterns) {
            (Self::Patterns(own), Some(patterns)) => own == patterns,
            (Self::Plan(own), None) => *own == planned.plan,
            (Self::Patterns(_), None) | (Self::Plan(_), Some(_)) => false,
        }
    }
}

#[derive(Debug)]
struct Group {
    port: PortId,
    key: GroupKey,
    plan: Plan,
    /// Whether some rules have not all of their flows in it.
    is_cut: bool,
    flows: Flows,
    /// Whether the switch has confirmed the flows, and none was lost since.
    in_force: bool,
    /// How many addresses have the group.
    addresses: usize,
    /// Since when no address has the group, if none has.
    unused_since: Timestamp,
    /// The addresses that get their marks when the flows are in force.
    waiting: BTreeSet<IpAddr>,
}

impl Groups {
    /// There are none. `mask` are the bits of the mark that are ours.
    pub(crate) fn new(mask: Option<u32>) -> Self {
        Self {
            mask: mask.filter(|mask| *mask != 0),
            interfaces: BTreeMap::new(),
            not_attached: BTreeSet::new(),
            by_key: HashMap::new(),
            groups: BTreeMap::new(),
            resting: BTreeMap::new(),
            former: BTreeSet::new(),
            found_former: BTreeSet::new(),
            read_at: None,
            refused_until: None,
            out_of_force: BTreeSet::new(),
            of_ports: BTreeMap::new(),
            numbers_changed: 0,
            changes: 0,
        }
    }

    /// Whether addresses get groups on this node.
    pub(crate) fn are_on(&self) -> bool {
        self.mask.is_some()
    }

    /// The facts from which flows of the port are planned. `None` if it is not known yet whether and where its
    /// packets are marked.
    pub(crate) fn facts<'a>(&self, facts: PortFacts<'a>) -> Option<PortFacts<'a>> {
        if self.are_on() && !self.interfaces.contains_key(&facts.port) {
            return Some(facts).filter(|facts| self.not_attached.contains(&facts.port));
        }
        Some(PortFacts {
            mark_mask: self.mask,
            ..facts
        })
    }

    // Interfaces.

    /// Packets of the port are marked at this interface. Returns whether that is news.
    pub(crate) fn attached(&mut self, port: PortId, ifindex: u32) -> bool {
        if !self.are_on() {
            return false;
        }
        // A port that goes late: the index was its interface's.
        self.interfaces
            .retain(|other, known| *other == port || *known != ifindex);
        self.not_attached.remove(&port);
        self.interfaces.insert(port, ifindex) != Some(ifindex)
    }

    /// The programs were not attached to the interface of a port. Returns whether that is news of a port whose packets
    /// are not marked.
    pub(crate) fn not_attached(&mut self, port: PortId) -> bool {
        self.are_on() && !self.interfaces.contains_key(&port) && self.not_attached.insert(port)
    }

    /// The interface of a port.
    pub(crate) fn interface(&self, port: PortId) -> Option<u32> {
        self.interfaces.get(&port).copied()
    }

    /// The port is gone.
    pub(crate) fn closed(&mut self, port: PortId) {
        self.interfaces.remove(&port);
        self.not_attached.remove(&port);
        self.forget_without_numbers(port);
    }

    /// Forgets a port that is gone, and has no groups and no numbers that rest.
    fn forget_without_numbers(&mut self, port: PortId) {
        let has_none = |of_port: &OfPort| of_port.groups + of_port.resting == 0;
        if !self.interfaces.contains_key(&port) && self.of_ports.get(&port).is_some_and(has_none) {
            self.of_ports.remove(&port);
        }
    }

    // Addresses.

    /// Whether the kernel has refused a mark lately: no further address is tried.
    pub(crate) fn are_refused(&self, now: Timestamp) -> bool {
        self.refused_until.is_some_and(|until| until > now)
    }

    /// Whether the kernel has ever refused a mark.
    pub(crate) fn were_refused(&self) -> bool {
        self.refused_until.is_some()
    }

    /// Another one when an address of a port may get a group that it could not get before: one is new or in force, or
    /// numbers are free again for a further one.
    pub(crate) fn version(&self, port: PortId) -> GroupsVersion {
        let of_port = self.of_ports.get(&port);
        let of_port = of_port.map_or(0, |of_port| of_port.changed);
        let of_numbers = match self.has_room(port) {
            true => self.numbers_changed,
            false => 0,
        };
        GroupsVersion(NonZeroU64::MIN.saturating_add(of_port.max(of_numbers)))
    }

    /// Whether a port may have a further group. A port with many leaves the last quarter of the numbers to others.
    fn has_room(&self, port: PortId) -> bool {
        let taken = self.groups.len() + self.resting.len() + self.former.len();
        let are_few = 4 * taken >= 3 * self.numbers() as usize;
        let most = match are_few {
            true => GROUPS_PER_PORT_AT_LAST,
            false => GROUPS_PER_PORT_MAX,
        };
        let of_port = self.of_ports.get(&port);
        of_port.is_none_or(|of_port| of_port.groups + of_port.resting < most)
    }

    /// How many numbers there are.
    fn numbers(&self) -> u32 {
        self.mask.map_or(0, |mask| mask >> mask.trailing_zeros())
    }

    /// The number of a change.
    fn change(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }

    /// Whether packets of the port are marked, and a further address is tried.
    pub(crate) fn are_tried(&self, port: PortId, now: Timestamp) -> bool {
        self.interfaces.contains_key(&port) && !self.are_refused(now)
    }

    /// The group of one more address with this plan. Its flows are in force, on their way, or in the batch from
    /// now on. `None` if the port's packets are not marked, no number is left (for this port, or at all), or the numbers
    /// of an earlier run are not known.
    pub(crate) fn take(
        &mut self,
        port: PortId,
        planned: &Planned,
        batch: &mut Batch,
    ) -> Option<GroupId> {
        self.interfaces.get(&port)?;
        if !self.knows_marks(batch) {
            return None;
        }
        let key = GroupKey::of(planned);
        let id = match self.by_key.get(&key) {
            Some(id) => *id,
            None => self.make(port, key, planned, batch)?,
        };
        self.enforce(id, planned, batch);
        let group = self.groups.get_mut(&id)?;
        group.addresses += 1;
        // A port that comes again has the same plans, and another id.
        let former = std::mem::replace(&mut group.port, port);
        if former != port {
            let change = self.change();
            self.of_ports.entry(former).or_default().groups -= 1;
            self.forget_without_numbers(former);
            let of_port = self.of_ports.entry(port).or_default();
            of_port.groups += 1;
            of_port.changed = change;
        }
        Some(id)
    }

    /// Whether no mark of an earlier run can use the flows in this batch: their numbers are known, and marks whose
    /// number stands for another plan now are removed.
    fn knows_marks(&self, batch: &Batch) -> bool {
        batch.id().is_none() || batch.comparisons > 0 && self.read_at.is_some()
    }

    /// Makes this the plan of a group, for all of its addresses, and writes its flows that are lost. Until the switch has
    /// flows that are new, the group is not in force: what is told meanwhile waits for them.
    pub(crate) fn enforce(&mut self, id: GroupId, planned: &Planned, batch: &mut Batch) {
        let Planned { plan, is_cut, .. } = planned;
        let target = self.target(id);
        let Some((group, target)) = self.groups.get_mut(&id).zip(target) else {
            return;
        };
        group.is_cut = *is_cut;
        if group.plan == *plan {
            return self.write(id, batch);
        }
        if matches!(group.flows.written, Written::Unsent { .. }) && batch.is_before_comparison() {
            group.flows.lose_all();
        }
        let before = batch.len();
        group.flows.enforce(target, plan.clone(), None, batch);
        group.plan.clone_from(plan);
        if batch.adds_since(before) {
            self.lost(id);
        }
    }

    /// The rules of these names have changed: `plan` gives the plans of the port's groups by their patterns. Returns the
    /// groups whose addresses need not be planned anew: each has flows for all of its rules, before and behind the change.
    /// Where a pattern may be another one, addresses leave the group, and have its mark until the next one is in force: its
    /// flows change with the first address that stays.
    pub(crate) fn follow(
        &mut self,
        facts: PortFacts<'_>,
        names: &ChangedNames,
        batch: &mut Batch,
        mut plan: impl FnMut(&Patterns) -> Planned,
    ) -> BTreeSet<GroupId> {
        let groups = self.groups.iter();
        let of_port = groups.filter(|(_, group)| group.port == facts.port);
        let of_port = of_port.filter_map(|(id, group)| match &group.key {
            GroupKey::Patterns(patterns) if patterns.are_of(facts) => Some((*id, patterns.clone())),
            GroupKey::Patterns(_) | GroupKey::Plan(_) => None,
        });
        let of_port: Vec<(GroupId, Patterns)> = of_port.collect();
        let mut following = BTreeSet::new();
        for (id, patterns) in of_port {
            if let Some(change) = patterns.change(names) {
                if change != ChangedName::InPlace {
                    continue;
                }
                let planned = plan(&patterns);
                let was_cut = self.groups.get(&id).is_some_and(|group| group.is_cut);
                if planned.is_cut || was_cut || !self.is_for(id, &planned, batch) {
                    continue;
                }
                self.enforce(id, &planned, batch);
            }
            following.insert(id);
        }
        following
    }

    /// Writes the flows of a group that are lost. Where the switch is connected and not compared, it is not known
    /// whether the flows are there: all of them are written, but for those that wait for the first comparison.
    fn write(&mut self, id: GroupId, batch: &mut Batch) {
        if !self.knows_marks(batch) {
            return;
        }
        let target = self.target(id);
        let group = self.groups.get_mut(&id).filter(|group| !group.in_force);
        let Some((group, target)) = group.zip(target) else {
            return;
        };
        let is_unsent = matches!(group.flows.written, Written::Unsent { .. });
        if is_unsent && batch.is_before_comparison() {
            group.flows.write_again(target, batch);
        } else {
            group.flows.restore(target, batch);
        }
    }

    fn make(
        &mut self,
        port: PortId,
        key: GroupKey,
        planned: &Planned,
        batch: &mut Batch,
    ) -> Option<GroupId> {
        let Planned { plan, is_cut, .. } = planned;
        let now = batch.now();
        self.end_rests(now);
        if !self.has_room(port) {
            return None;
        }
        let id = self.number(&key)?;
        let target = self.target(id)?;
        let mut flows = Flows::default();
        flows.enforce(target, plan.clone(), None, batch);
        self.by_key.insert(key.clone(), id);
        let group = Group {
            port,
            key,
            plan: plan.clone(),
            is_cut: *is_cut,
            flows,
            in_force: false,
            addresses: 0,
            unused_since: now,
            waiting: BTreeSet::new(),
        };
        self.groups.insert(id, group);
        let change = self.change();
        let of_port = self.of_ports.entry(port).or_default();
        of_port.groups += 1;
        of_port.changed = change;
        Some(id)
    }

    /// A number for a group: mostly the one that it had in the last run.
    fn number(&self, key: &GroupKey) -> Option<GroupId> {
        let max = self.numbers();
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let first = hasher.finish().checked_rem(max.into())? as u32;
        let ids = (0..max).map(|at| GroupId((first + at) % max + 1));
        let is_free = |id: &GroupId| {
            let is_marked = self.resting.contains_key(id) || self.former.contains(id);
            !self.groups.contains_key(id) && !is_marked
        };
        ids.take(NUMBERS_TRIED).find(is_free)
    }

    /// Numbers that have rested are free.
    fn end_rests(&mut self, now: Timestamp) {
        let over: Vec<Rest> = self
            .resting
            .extract_if(.., |_, rest| rest.until <= now)
            .map(|(_, rest)| rest)
            .collect();
        if !over.is_empty() {
            self.numbers_changed = self.change();
        }
        for port in over.into_iter().filter_map(|rest| rest.port) {
            self.of_ports.entry(port).or_default().resting -= 1;
            self.forget_without_numbers(port);
        }
    }

    /// An address has this group no longer.
    pub(crate) fn release(&mut self, id: GroupId, address: IpAddr, now: Timestamp) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.waiting.remove(&address);
            group.addresses = group.addresses.saturating_sub(1);
            group.unused_since = now;
        }
    }

    /// The address gets its mark when the flows of the group are in force.
    pub(crate) fn wait(&mut self, id: GroupId, address: IpAddr) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.waiting.insert(address);
        }
    }

    /// The kernel has refused a mark, mostly because it has no room: for a while, no address is tried.
    pub(crate) fn refused(&mut self, now: Timestamp) {
        self.refused_until = Some(now + MARKS_REFUSED);
    }

    // Groups.

    /// The bits in the mark of packets with this group.
    pub(crate) fn mark(&self, id: GroupId) -> Option<Masked> {
        self.mask.map(|mask| id.mark(mask))
    }

    /// The match of a group's flows in place of the destination.
    pub(crate) fn target(&self, id: GroupId) -> Option<Target> {
        self.mark(id).map(Target::Group)
    }

    /// The group that a flow with these bits belongs to.
    pub(crate) fn of_mark(&self, mark: Masked) -> Option<GroupId> {
        let mask = self.mask.filter(|mask| *mask == mark.mask())?;
        let id = GroupId(mark.value() >> mask.trailing_zeros());
        self.groups.contains_key(&id).then_some(id)
    }

    /// The switch still has a flow of a former group with these bits.
    pub(crate) fn ends(&mut self, mark: Masked, now: Timestamp) {
        let id = self.number_in(mark.value());
        if let Some(rest) = id.and_then(|id| self.resting.get_mut(&id)) {
            rest.until = now + GROUP_RESTS;
        }
    }

    /// Whether no group has the number of these bits. Then it rests.
    pub(crate) fn rest(&mut self, mark: Masked, now: Timestamp) -> bool {
        let id = self.number_in(mark.value());
        let unused = id.filter(|id| !self.groups.contains_key(id));
        let Some(id) = unused else { return false };
        let until = now + GROUP_RESTS;
        let rest = self.resting.entry(id);
        rest.or_insert(Rest { until, port: None }).until = until;
        true
    }

    /// Numbers that rest do so for longer: programs of an earlier run may still mark packets with them.
    pub(crate) fn rest_on(&mut self, now: Timestamp) {
        for rest in self.resting.values_mut() {
            rest.until = now + GROUP_RESTS;
        }
    }

    /// Packets are still marked with this number of an earlier run. It is given to no plan, and its flows stay, until the
    /// marks are read again. If a group has the number, packets pass by the flows of this group, and others end.
    pub(crate) fn keep_former(&mut self, mark: u32) {
        let id = self.number_in(mark);
        self.former
            .extend(id.filter(|id| !self.groups.contains_key(id)));
    }

    /// A reading that is not the first has found a mark with a number that was kept, and whose address still waits for its
    /// group.
    pub(crate) fn found_former(&mut self, mark: u32) {
        self.found_former.extend(self.number_in(mark));
    }

    /// Whether packets are still marked with this number of an earlier run.
    pub(crate) fn is_former(&self, mark: u32) -> bool {
        let id = self.number_in(mark);
        id.is_some_and(|id| self.former.contains(&id))
    }

    /// The number in a mark.
    pub(crate) fn number_in(&self, mark: u32) -> Option<GroupId> {
        let mask = self.mask?;
        Some(GroupId(mark >> mask.trailing_zeros()))
    }

    /// The plan of a group.
    pub(crate) fn plan(&self, id: GroupId) -> Plan {
        let group = self.groups.get(&id);
        group.map(|group| group.plan.clone()).unwrap_or_default()
    }

    /// Whether an address with this plan may stay in the group, whose flows may be written in this batch.
    pub(crate) fn is_for(&self, id: GroupId, planned: &Planned, batch: &Batch) -> bool {
        let group = self.groups.get(&id).filter(|_| !planned.plan.is_empty());
        group.is_some_and(|group| {
            let may_change = self.knows_marks(batch);
            group.key.is_of(planned) && (may_change || group.plan == planned.plan)
        })
    }

    /// Whether the group of this mark ends: no address has had it for a while before `at`, or there is none.
    pub(crate) fn is_over(&self, mark: u32, at: Timestamp) -> bool {
        let group = self.number_in(mark).and_then(|id| self.groups.get(&id));
        group.is_none_or(|group| group.is_over(at))
    }

    /// Whether the flows are in force.
    pub(crate) fn is_in_force(&self, id: GroupId) -> bool {
        self.groups.get(&id).is_some_and(|group| group.in_force)
    }

    /// Whether the flows for this port's packets with these bits are in force.
    pub(crate) fn is_mark_in_force(&self, port: PortId, mark: u32) -> bool {
        let group = self.number_in(mark).and_then(|id| self.groups.get(&id));
        group.is_some_and(|group| group.in_force && group.port == port)
    }

    /// The addresses that wait for a group.
    pub(crate) fn awaiting(&self, id: GroupId) -> Vec<(PortId, IpAddr)> {
        let group = self.groups.get(&id).filter(|group| !group.in_force);
        let waiting = group.into_iter().flat_map(|group| {
            let addresses = group.waiting.iter();
            addresses.map(|address| (group.port, *address))
        });
        waiting.collect()
    }

    /// The flows of a group.
    pub(crate) fn flows(&self, id: GroupId) -> Option<&Flows> {
        self.groups.get(&id).map(|group| &group.flows)
    }

    /// The same, to be changed.
    pub(crate) fn flows_mut(&mut self, id: GroupId) -> Option<&mut Flows> {
        self.groups.get_mut(&id).map(|group| &mut group.flows)
    }

    /// Every group.
    pub(crate) fn ids(&self) -> Vec<GroupId> {
        self.groups.keys().copied().collect()
    }

    /// Whether this comparison has found all flows of all groups.
    pub(crate) fn are_all_shown(&self, comparison: u32) -> bool {
        let mut groups = self.groups.values();
        groups.all(|group| group.flows.are_all_seen(comparison))
    }

    /// The flows of all groups that this comparison has found.
    pub(crate) fn shown(&self, comparison: u32) -> impl Iterator<Item = (FlowKey, Cookie)> {
        self.groups.iter().flat_map(move |(id, group)| {
            let target = self.target(*id).into_iter();
            target.flat_map(move |target| group.flows.shown(target, comparison))
        })
    }

    /// How many flows all groups have.
    pub(crate) fn flow_count(&self) -> usize {
        self.groups.values().map(|group| group.flows.len()).sum()
    }

    /// A flow of the group was lost.
    pub(crate) fn lost(&mut self, id: GroupId) {
        if let Some(group) = self.groups.get_mut(&id)
            && std::mem::take(&mut group.in_force)
        {
            self.out_of_force.insert(id);
        }
    }

    /// The connection is lost: the switch may come back without the flows. `comparisons` is how many have ended.
    pub(crate) fn disconnected(&mut self, comparisons: u32) {
        for (id, group) in &mut self.groups {
            if std::mem::take(&mut group.in_force) {
                self.out_of_force.insert(*id);
            }
            group.flows.written = Written::Unsent { comparisons };
        }
    }

    /// The switch has confirmed a batch, but for flows that somebody else has (`is_foreign`). Returns the addresses that
    /// get their marks now.
    pub(crate) fn written(
        &mut self,
        batch: BatchId,
        is_foreign: impl Fn(&FlowKey) -> bool,
    ) -> Vec<(PortId, IpAddr)> {
        self.come_into_force(|target, flows| {
            flows.written == Written::In(batch)
                && !flows.is_lost()
                && !flows.keys(target).any(|key| is_foreign(&key))
        })
    }

    /// The groups that are not in force any more, since the last call.
    pub(crate) fn take_out_of_force(&mut self) -> BTreeSet<GroupId> {
        std::mem::take(&mut self.out_of_force)
    }

    /// A comparison has ended. Returns the addresses that get their marks now.
    pub(crate) fn compared(&mut self, comparison: u32) -> Vec<(PortId, IpAddr)> {
        self.come_into_force(|_, flows| flows.are_all_seen(comparison))
    }

    fn come_into_force(
        &mut self,
        is_there: impl Fn(Target, &Flows) -> bool,
    ) -> Vec<(PortId, IpAddr)> {
        let mut marked = Vec::new();
        let Some(mask) = self.mask else {
            return marked;
        };
        for (id, group) in &mut self.groups {
            let target = Target::Group(id.mark(mask));
            if !group.in_force && is_there(target, &group.flows) {
                group.in_force = true;
                self.changes += 1;
                self.of_ports.entry(group.port).or_default().changed = self.changes;
                let waiting = std::mem::take(&mut group.waiting);
                marked.extend(waiting.into_iter().map(|address| (group.port, address)));
            }
        }
        marked
    }

    /// All marks of the kernel were read. Those of groups that were over at the beginning are removed, and so are those
    /// of an earlier run whose addresses do not wait for their groups.
    pub(crate) fn marks_read(&mut self, reading: Reading) {
        let is_news = self.read_at.replace(reading.since).is_none();
        if is_news {
            let change = self.change();
            self.numbers_changed = change;
            for of_port in self.of_ports.values_mut() {
                of_port.changed = change;
            }
        }
        if !reading.is_first {
            let found = std::mem::take(&mut self.found_former);
            let former = std::mem::replace(&mut self.former, found);
            if former != self.former {
                self.numbers_changed = self.change();
            }
        }
    }

    /// Removes the flows of groups that no address has had for a while. An address whose next group has not come
    /// into force keeps the mark of the former one, so the end is that of the last reading: no mark of these groups
    /// is left in the kernel.
    pub(crate) fn sweep(&mut self, batch: &mut Batch) {
        let now = batch.now();
        self.end_rests(now);
        let Some(read_at) = self.read_at else {
            return;
        };
        let groups = self.groups.iter();
        let over = groups.filter(|(_, group)| group.is_over(read_at));
        let over: Vec<GroupId> = over.map(|(id, _)| *id).collect();
        let before = batch.len();
        for id in over {
            if batch.len() - before >= SWEPT_MAX {
                break;
            }
            let target = self.target(id);
            if let Some((group, target)) = self.groups.remove(&id).zip(target) {
                group.flows.close(target, batch);
                self.out_of_force.insert(id);
                self.by_key.remove(&group.key);
                let rest = Rest {
                    until: now + GROUP_RESTS,
                    port: Some(group.port),
                };
                self.resting.insert(id, rest);
                let change = self.change();
                let of_port = self.of_ports.entry(group.port).or_default();
                of_port.groups -= 1;
                of_port.resting += 1;
                of_port.changed = change;
            }
        }
    }
}

impl GroupId {
    /// The number in these bits.
    fn mark(self, mask: u32) -> Masked {
        Masked::new(self.0 << mask.trailing_zeros(), mask)
    }
}

impl Group {
    /// Whether no address has had the group for a while before `at`.
    fn is_over(&self, at: Timestamp) -> bool {
        self.addresses == 0 && self.unused_since + GROUP_STAYS <= at
    }
}

/// How many numbers are tried for a plan. With half of all numbers in use, this many neighbours are practically
/// never in use together.
const NUMBERS_TRIED: usize = 256;
