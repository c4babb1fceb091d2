//! The groups: flows that packets are matched to by their tags.
//!
//! A group is the set of patterns that an address's names match, with a number. Its flows follow from the patterns and
//! from the rules alone. The packets to an address get the tag of its group, by a flow of the address or by the mark that
//! the program on the pod's veth gives them. Opening an address whose group is in force adds one flow, or none
//! (`docs/decisions/tags.md`).
//!
//! A group is one of a scope: all ports of one logical switch for which the rules of the same port groups hold, as a
//! namespace has one. So no namespace takes the numbers of another.

mod scopes;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
};

use super::{
    batch::{Batch, Written},
    flows::Flows,
};
use crate::{
    Timestamp,
    io::input::BatchId,
    policy::{
        plan::{Patterns, Plan, Planner, PortFacts, SavedGroup},
        rules::{ChangedName, ChangedNames},
    },
    values::{
        flow::{Ends, FlowKey, Tag, Target},
        ids::PortId,
        limits::{GROUP_STAYS, MARKS_REFUSED, NO_ROOM_MAX, NO_ROOM_STAYS, SWEPT_MAX},
    },
};

use scopes::Scopes;

/// All groups of the node.
#[derive(Debug)]
pub(crate) struct Groups {
    /// The bits of the mark that are ours; `None` if packets are not marked.
    mask: Option<u32>,
    /// The interfaces whose packets are marked.
    interfaces: BTreeMap<PortId, u32>,
    /// The ports whose packets cannot be marked, as the programs were not attached.
    not_attached: BTreeSet<PortId>,
    /// The indices of interfaces whose ports have gone, since when: the kernel may still have marks for them. Another
    /// interface may get the index.
    left: BTreeMap<u32, Timestamp>,
    scopes: Scopes,
    /// The scope of each port, and the flows that make tags of its marks.
    ports: BTreeMap<PortId, OfPort>,
    /// The flows in which tags end, by logical switch.
    ends: BTreeMap<u32, Flows>,
    by_key: HashMap<(u16, Key), Tag>,
    groups: BTreeMap<Tag, Group>,
    /// Whose flows the switch has not confirmed.
    not_in_force: NotInForce,
    /// When the last comparison began that has shown all tags and marks.
    looked_at: Option<Timestamp>,
    /// The kernel has refused a mark: addresses get flows until then.
    refused_until: Option<Timestamp>,
    out_of_force: NotInForce,
    /// Addresses without a name that flows of an earlier run deny: a mark would come behind these.
    denied: BTreeSet<(PortId, IpAddr)>,
    no_room: NoRoom,
    /// The changes for the journal.
    changed: Vec<ChangedGroup>,
}

/// Groups and ports whose flows are not in force, or not any more.
#[derive(Debug, Default)]
pub(crate) struct NotInForce {
    /// The groups.
    pub(crate) groups: BTreeSet<Tag>,
    /// The ports.
    pub(crate) ports: BTreeSet<PortId>,
}

/// Patterns for which there was no room lately. To find that out takes long, and many addresses may have them.
#[derive(Debug, Default)]
struct NoRoom {
    since: Timestamp,
    /// By scope and patterns: the group that their addresses have in its place, if they have one.
    lately: HashMap<(u16, Patterns), Option<Tag>>,
}

impl NoRoom {
    fn get(&mut self, scope: u16, patterns: &Patterns, now: Timestamp) -> Option<Option<Tag>> {
        if self.since + NO_ROOM_STAYS <= now {
            self.since = now;
            self.lately.clear();
        }
        if self.lately.is_empty() {
            return None;
        }
        self.lately.get(&(scope, patterns.clone())).copied()
    }

    fn note(&mut self, scope: u16, patterns: &Patterns, tag: Option<Tag>) {
        if self.lately.len() < NO_ROOM_MAX {
            self.lately.insert((scope, patterns.clone()), tag);
        }
    }
}

/// A group that is new, or without one, a tag that has none any more.
pub(crate) type ChangedGroup = (Tag, Option<SavedGroup>);

/// Facts and templates for the flows of a port.
pub(crate) struct Tagging<'a> {
    /// The facts.
    pub(crate) facts: PortFacts<'a>,
    /// What makes flows.
    pub(crate) planner: &'a mut Planner,
}

/// Why an address gets no group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum NoGroup {
    /// Its rules have no flows.
    NoFlows,
    /// It is not known yet which tags are taken.
    BeforeComparison,
    /// The groups of its scope have as many flows or numbers as they may.
    NoRoom,
}

/// The group of an address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// Its tag.
    pub(crate) tag: Tag,
    /// Whether it is that of the address's patterns.
    pub(crate) fit: Fit,
}

/// What becomes of a port ([`Groups::follow_port`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Followed {
    /// Its scope.
    pub(crate) scope: u16,
    /// Whether all addresses of the port are to be planned anew: they get their tags in other tables, or their marks stand
    /// for tags of another scope.
    pub(crate) is_anew: bool,
    /// Whether the groups of the scope may not be in line with the rules: no port had them.
    pub(crate) is_stale: bool,
}

/// Whether an address has the flows of its patterns.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Fit {
    /// It has.
    #[default]
    Exact,
    /// There is no room for them: it has others, or none.
    Cut,
    /// Until the first comparison: it is not known which tags are taken. It has the former ones, is closed if a rule denies
    /// it that these let pass, or has none.
    Provisional,
}

/// The addresses that share a group, as long as it lives.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum Key {
    /// Those with these patterns.
    Patterns(Patterns),
    /// Those without room for the flows of their patterns, of which one denies: they are closed.
    Closed { is_ipv6: bool },
}

impl Key {
    fn are_several(&self) -> bool {
        matches!(self, Self::Patterns(patterns) if patterns.are_several())
    }

    fn octets(&self) -> usize {
        match self {
            Self::Patterns(patterns) => patterns.octets(),
            Self::Closed { .. } => 0,
        }
    }
}

#[derive(Debug)]
struct Group {
    key: Key,
    plan: Plan,
    flows: Flows,
    /// Whether there was no room for the flows of the patterns: there are none, or they close.
    is_cut: bool,
    /// Whether the switch has confirmed the flows, and none was lost since.
    in_force: bool,
    /// The last batch that has all of its flows, as far as they are missing.
    looked_in: Option<BatchId>,
    /// How many addresses have the group.
    addresses: usize,
    /// Since when no address has the group, if none has.
    unused_since: Timestamp,
    /// The addresses that get their marks when the flows are in force.
    waiting: BTreeSet<(PortId, IpAddr)>,
    /// When an edit has last taken away all that let packets pass.
    closed_at: Option<Timestamp>,
}

impl Group {
    /// Whether it lets some packets pass: what it lets pass comes before what it denies to all ports.
    fn lets_pass(&self) -> bool {
        let templates = || self.plan.iter();
        let to_all = templates().filter(|template| template.denies && template.transport.is_none());
        let denied = to_all.map(|template| template.priority).max();
        let mut allowed = templates().filter(|template| !template.denies);
        allowed.any(|template| Some(template.priority) > denied)
    }
}

/// The scope of a port, and its own flows.
#[derive(Debug, Default)]
struct OfPort {
    scope: u16,
    /// The tables in which its addresses get their tags.
    tables: BTreeSet<u8>,
    /// Whether it has the scope since the rules were last followed.
    is_new: bool,
    /// Whether the scope had no port before.
    is_first: bool,
    /// Those that make tags of marks.
    flows: Flows,
    in_force: bool,
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
            left: BTreeMap::new(),
            scopes: Scopes::default(),
            ports: BTreeMap::new(),
            ends: BTreeMap::new(),
            by_key: HashMap::new(),
            groups: BTreeMap::new(),
            not_in_force: NotInForce::default(),
            looked_at: None,
            refused_until: None,
            out_of_force: NotInForce::default(),
            denied: BTreeSet::new(),
            no_room: NoRoom::default(),
            changed: Vec::new(),
        }
    }

    /// Takes over the groups of an earlier run.
    pub(crate) fn load(&mut self, saved: BTreeMap<Tag, SavedGroup>) {
        self.scopes.load(saved);
    }

    /// Takes out the changes for the journal.
    pub(crate) fn take_changed(&mut self) -> Vec<ChangedGroup> {
        std::mem::take(&mut self.changed)
    }

    /// The groups behind this one in the order of their tags, `most` at most, as the journal has them.
    pub(crate) fn behind(&self, last: Option<Tag>, most: usize) -> Vec<(Tag, SavedGroup)> {
        let rest = (last.map_or(Unbounded, Excluded), Unbounded);
        let groups = self.groups.range(rest);
        let groups = groups.filter_map(|(tag, group)| Some((*tag, self.saved(*tag, &group.key)?)));
        let mut groups: Vec<_> = groups.take(most).collect();
        let saved = self.scopes.saved(rest).take(most);
        groups.extend(saved.map(|(tag, saved)| (tag, saved.clone())));
        groups.sort_unstable_by_key(|(tag, _)| *tag);
        groups.truncate(most);
        groups
    }

    fn saved(&self, tag: Tag, key: &Key) -> Option<SavedGroup> {
        let Key::Patterns(patterns) = key else {
            // It has the same number in each run.
            return None;
        };
        let scope = self.scopes.get(tag.scope())?;
        Some(SavedGroup {
            datapath: scope.datapath,
            port_groups: scope.port_groups.clone(),
            patterns: patterns.clone(),
        })
    }

    // Interfaces.

    /// Whether packets are marked on this node.
    pub(crate) fn are_marked(&self) -> bool {
        self.mask.is_some()
    }

    /// The bits of the mark that are ours.
    pub(crate) fn mask(&self) -> Option<u32> {
        self.mask
    }

    /// Whether it is known whether and where the port's packets are marked.
    pub(crate) fn knows(&self, port: PortId) -> bool {
        !self.are_marked()
            || self.interfaces.contains_key(&port)
            || self.not_attached.contains(&port)
    }

    /// Packets of the port are marked at this interface. Returns whether that is news.
    pub(crate) fn attached(&mut self, port: PortId, ifindex: u32, now: Timestamp) -> bool {
        if !self.are_marked() {
            return false;
        }
        // A port that goes late: the index was its interface's.
        let mut before = self
            .interfaces
            .extract_if(.., |other, known| *other != port && *known == ifindex);
        if before.by_ref().count() > 0 {
            self.left.insert(ifindex, now);
        }
        drop(before);
        self.not_attached.remove(&port);
        let own = self.interfaces.insert(port, ifindex);
        let former = own.filter(|own| *own != ifindex);
        self.left.extend(former.map(|former| (former, now)));
        own != Some(ifindex)
    }

    /// The programs were not attached to the interface of a port. Returns whether that is news of a port whose packets
    /// are not marked.
    pub(crate) fn not_attached(&mut self, port: PortId) -> bool {
        self.are_marked() && !self.interfaces.contains_key(&port) && self.not_attached.insert(port)
    }

    /// The interface of a port.
    pub(crate) fn interface(&self, port: PortId) -> Option<u32> {
        self.interfaces.get(&port).copied()
    }

    /// The port is gone.
    pub(crate) fn closed(&mut self, port: PortId, batch: &mut Batch) {
        let ifindex = self.interfaces.remove(&port);
        self.left
            .extend(ifindex.map(|ifindex| (ifindex, batch.now())));
        self.not_attached.remove(&port);
        self.leave(port, batch);
    }

    /// No rule is enforced for the port.
    pub(crate) fn leave(&mut self, port: PortId, batch: &mut Batch) {
        if let Some(of_port) = self.ports.remove(&port) {
            of_port.flows.close(Target::Whole, batch);
            self.scopes.leave(of_port.scope);
            self.not_in_force.ports.remove(&port);
        }
    }

    // Addresses.

    /// Whether the kernel has refused a mark lately: no further address is tried.
    pub(crate) fn are_refused(&self, now: Timestamp) -> bool {
        self.refused_until.is_some_and(|until| until > now)
    }

    /// The kernel has refused a mark, mostly because it has no room: for a while, no address is tried.
    pub(crate) fn refused(&mut self, now: Timestamp) {
        self.refused_until = Some(now + MARKS_REFUSED);
    }

    /// Whether a further address of the port may get a mark.
    pub(crate) fn are_tried(&self, (port, address): (PortId, IpAddr), now: Timestamp) -> bool {
        self.is_clean(port) && !self.are_refused(now) && !self.denied.contains(&(port, address))
    }

    /// Flows of nobody deny these addresses, and stay.
    pub(crate) fn denials_stay(&mut self, addresses: BTreeSet<(PortId, IpAddr)>) {
        self.denied = addresses;
    }

    /// Whether packets of the port are marked, and no mark is one of an interface that had the index before: it would be
    /// read as one of this port.
    pub(crate) fn is_clean(&self, port: PortId) -> bool {
        let ifindex = self.interface(port);
        ifindex.is_some_and(|ifindex| !self.left.contains_key(&ifindex))
    }

    /// Whether it is known which tags are taken.
    fn know_tags(batch: &Batch) -> bool {
        batch.comparisons() > 0
    }

    /// The scope of a port. The port, its logical switch and the groups of an earlier run have their flows in the batch from
    /// now on.
    fn scope(&mut self, tagging: &mut Tagging<'_>, batch: &mut Batch) -> Option<u16> {
        let facts = tagging.facts;
        if facts.sets.is_empty() {
            // No rule holds for the port, or not yet: nothing says which scope is its own.
            return None;
        }
        let known = self.ports.get(&facts.port).map(|of_port| of_port.scope);
        if let Some(scope) = known.filter(|scope| self.scopes.is_of(*scope, facts)) {
            return Some(scope);
        }
        let (scope, saved) = self.scopes.of(facts, Self::know_tags(batch))?;
        for (tag, saved) in saved {
            self.add(tag, Key::Patterns(saved.patterns), tagging, batch);
        }
        if let Some(known) = known {
            self.scopes.leave(known);
        }
        let of_port = self.ports.entry(facts.port).or_default();
        of_port.scope = scope;
        of_port.tables = facts.tables();
        of_port.is_new = true;
        of_port.is_first = self.scopes.enter(scope);
        if self.mask.is_some() {
            self.not_in_force.ports.insert(facts.port);
        }
        self.write_fixed(tagging, batch);
        Some(scope)
    }

    /// Writes the flows of a port and of its logical switch, as far as they are others now.
    fn write_fixed(&mut self, Tagging { facts, planner }: &mut Tagging<'_>, batch: &mut Batch) {
        let mask = self.mask.filter(|_| self.is_clean(facts.port));
        let Some(of_port) = self.ports.get_mut(&facts.port) else {
            return;
        };
        let plan = mask.map(|mask| planner.of_marks(*facts, of_port.scope, mask));
        let before = batch.len();
        of_port
            .flows
            .enforce(Target::Whole, plan.unwrap_or_default(), batch);
        if batch.adds_since(before) {
            self.lost_at(facts.port);
        }
        let ends = planner.of_ends(*facts, self.mask);
        let flows = self.ends.entry(facts.keys.datapath).or_default();
        flows.enforce(Target::Whole, ends, batch);
    }

    /// The group of one more address with these patterns. Its flows are in force, on their way, or in the batch from now on.
    /// Before the first comparison, an address may go on with the group that it has (`known`).
    pub(crate) fn take(
        &mut self,
        patterns: &Patterns,
        known: Option<Tag>,
        tagging: &mut Tagging<'_>,
        batch: &mut Batch,
    ) -> Result<Taken, NoGroup> {
        let scope = self.scope(tagging, batch);
        let scope = scope.ok_or(match Self::know_tags(batch) {
            true => NoGroup::NoRoom,
            false => NoGroup::BeforeComparison,
        })?;
        let sets = tagging.facts.sets;
        let fitting = match self.no_room.get(scope, patterns, batch.now()) {
            Some(Some(tag)) if self.groups.contains_key(&tag) => Ok((tag, Fit::Cut)),
            Some(None) => Err(NoGroup::NoRoom),
            Some(Some(_)) | None => self.fitting(scope, patterns, tagging, batch),
        };
        let (tag, fit) = match fitting {
            Err(NoGroup::BeforeComparison) => {
                let denying = patterns.denying(sets);
                let known = known
                    .filter(|tag| self.may_stay(*tag, patterns, denying.as_ref(), tagging.facts));
                let tag = match (known, denying) {
                    (Some(known), _) => known,
                    (None, Some(_)) => self.closed_group(scope, patterns.is_ipv6, tagging, batch),
                    (None, None) => return Err(NoGroup::BeforeComparison),
                };
                (tag, Fit::Provisional)
            }
            fitting => fitting?,
        };
        let taken = Taken { tag, fit };
        self.write(taken.tag, batch);
        if known != Some(taken.tag)
            && let Some(group) = self.groups.get_mut(&taken.tag)
        {
            if group.addresses == 0 {
                let flows = (group.plan.len(), 0);
                self.scopes
                    .count_unused(taken.tag.scope(), flows, group.key.are_several());
            }
            group.addresses += 1;
        }
        Ok(taken)
    }

    /// The group of these patterns, or the one that their addresses have if there is no room.
    fn fitting(
        &mut self,
        scope: u16,
        patterns: &Patterns,
        tagging: &mut Tagging<'_>,
        batch: &mut Batch,
    ) -> Result<(Tag, Fit), NoGroup> {
        let sets = tagging.facts.sets;
        if !patterns.are_too_many() {
            match self.group(scope, patterns, tagging, batch) {
                Ok(tag) => return Ok((tag, Fit::Exact)),
                Err(NoGroup::NoRoom) => {}
                Err(error) => return Err(error),
            }
        }
        // What a rule denies is closed, and a name of others takes nothing from the name whose rule is the first.
        let tag = match patterns.denying(sets) {
            Some(_) => Ok(self.closed_group(scope, patterns.is_ipv6, tagging, batch)),
            None => match patterns.of_first(sets) {
                Some(first) => self.group(scope, &first, tagging, batch),
                None => Err(NoGroup::NoRoom),
            },
        };
        if matches!(tag, Ok(_) | Err(NoGroup::NoRoom)) {
            self.no_room.note(scope, patterns, tag.ok());
        }
        Ok((tag?, Fit::Cut))
    }

    /// Whether the group denies what the rules of these patterns deny, of which those are that deny, and no other pod's
    /// rules decide.
    fn may_stay(
        &self,
        tag: Tag,
        patterns: &Patterns,
        denying: Option<&Patterns>,
        facts: PortFacts<'_>,
    ) -> bool {
        let group = self.groups.get(&tag).filter(|group| !group.plan.is_empty());
        self.scopes.is_of(tag.scope(), facts)
            && group.is_some_and(|group| match &group.key {
                Key::Closed { .. } => true,
                Key::Patterns(own) => {
                    let mut denying = denying.iter().flat_map(|denying| &*denying.patterns);
                    own.are_denials >= patterns.are_denials
                        && denying.all(|one| own.patterns.binary_search(one).is_ok())
                }
            })
    }

    /// The group with these patterns.
    fn group(
        &mut self,
        scope: u16,
        patterns: &Patterns,
        tagging: &mut Tagging<'_>,
        batch: &mut Batch,
    ) -> Result<Tag, NoGroup> {
        let key = Key::Patterns(patterns.clone());
        if let Some(tag) = self.by_key.get(&(scope, key.clone())).copied() {
            if self.groups.get(&tag).is_some_and(|group| group.is_cut) {
                self.plan_anew(tag, tagging, batch);
            }
            return match self.groups.get(&tag) {
                Some(group) if group.is_cut => Err(NoGroup::NoRoom),
                Some(group) if !group.plan.is_empty() => Ok(tag),
                Some(_) | None => Err(NoGroup::NoFlows),
            };
        }
        let size = tagging.planner.size(tagging.facts, patterns);
        if size == 0 {
            return Err(NoGroup::NoFlows);
        }
        if !Self::know_tags(batch) {
            return Err(NoGroup::BeforeComparison);
        }
        let are_several = patterns.are_several();
        if !self.scopes.has_room(scope, size, are_several)
            || !self.scopes.has_room_for_names(scope, patterns.octets())
        {
            return Err(NoGroup::NoRoom);
        }
        let tag = self.scopes.free(scope, are_several);
        let tag = tag.ok_or(NoGroup::NoRoom)?;
        let saved = self.saved(tag, &key);
        self.changed.push((tag, saved));
        self.add(tag, key, tagging, batch);
        Ok(tag)
    }

    /// The group that closes its addresses.
    fn closed_group(
        &mut self,
        scope: u16,
        is_ipv6: bool,
        tagging: &mut Tagging<'_>,
        batch: &mut Batch,
    ) -> Tag {
        let tag = Scopes::closed(scope, is_ipv6);
        if !self.groups.contains_key(&tag) {
            self.add(tag, Key::Closed { is_ipv6 }, tagging, batch);
        }
        tag
    }

    /// The flows of a group that has so many now, and whether there is no room for more of them. Then they close if a rule
    /// denies one of the patterns.
    fn plan(
        &self,
        (scope, key): (u16, &Key),
        now: usize,
        Tagging { facts, planner }: &mut Tagging<'_>,
    ) -> (Plan, bool) {
        let patterns = match key {
            Key::Patterns(patterns) => patterns,
            Key::Closed { is_ipv6 } => return (planner.of_closed(*facts, *is_ipv6), false),
        };
        let further = planner.size(*facts, patterns).saturating_sub(now);
        let are_several = patterns.are_several();
        if further == 0 || self.scopes.has_room(scope, further, are_several) {
            return (planner.of_group(*facts, patterns), false);
        }
        let closed = patterns.denying(facts.sets);
        let closed = closed.map(|_| planner.of_closed(*facts, patterns.is_ipv6));
        (closed.unwrap_or_default(), true)
    }

    fn add(&mut self, tag: Tag, key: Key, tagging: &mut Tagging<'_>, batch: &mut Batch) {
        self.scopes.take(tag, key.are_several());
        let (plan, is_cut) = self.plan((tag.scope(), &key), 0, tagging);
        let flows = (0, plan.len());
        self.scopes.count(tag.scope(), flows, key.are_several());
        self.scopes
            .count_unused(tag.scope(), flows, key.are_several());
        self.scopes.count_names(tag.scope(), 0, key.octets());
        self.not_in_force.groups.insert(tag);
        let mut flows = Flows::default();
        flows.enforce(Target::Tag(tag), plan.clone(), batch);
        self.by_key.insert((tag.scope(), key.clone()), tag);
        let group = Group {
            key,
            plan,
            flows,
            is_cut,
            in_force: false,
            looked_in: None,
            addresses: 0,
            unused_since: batch.now(),
            waiting: BTreeSet::new(),
            closed_at: None,
        };
        self.groups.insert(tag, group);
    }

    /// The tag of the group with these patterns for the addresses of a port, if there is one.
    pub(crate) fn of(&self, port: PortId, patterns: &Patterns) -> Option<Tag> {
        let scope = self.ports.get(&port)?.scope;
        let key = (scope, Key::Patterns(patterns.clone()));
        self.by_key.get(&key).copied()
    }

    /// Whether a group has exactly these patterns, and is one of the port.
    pub(crate) fn is_for(&self, tag: Tag, patterns: &Patterns, facts: PortFacts<'_>) -> bool {
        let group = self.groups.get(&tag);
        self.scopes.is_of(tag.scope(), facts)
            && group.is_some_and(|group| {
                let is_same = matches!(&group.key, Key::Patterns(own) if own == patterns);
                is_same && !group.is_cut && !group.plan.is_empty()
            })
    }

    /// Whether a group lets some packets pass.
    pub(crate) fn lets_pass(&self, tag: Tag) -> bool {
        self.groups.get(&tag).is_some_and(Group::lets_pass)
    }

    /// The same before the edit of this step.
    pub(crate) fn let_pass(&self, tag: Tag, now: Timestamp) -> bool {
        let group = self.groups.get(&tag);
        group.is_some_and(|group| group.lets_pass() || group.closed_at == Some(now))
    }

    /// The patterns of a group.
    pub(crate) fn patterns(&self, tag: Tag) -> Option<&Patterns> {
        match &self.groups.get(&tag)?.key {
            Key::Patterns(patterns) => Some(patterns),
            Key::Closed { .. } => None,
        }
    }

    /// Brings a port's scope and its own flows in line with the rules; `None` if it has no scope.
    pub(crate) fn follow_port(
        &mut self,
        tagging: &mut Tagging<'_>,
        batch: &mut Batch,
    ) -> Option<Followed> {
        let facts = tagging.facts;
        let scope = self.scope(tagging, batch)?;
        self.write_fixed(tagging, batch);
        let of_port = self.ports.get_mut(&facts.port)?;
        let tables = facts.tables();
        let is_moved = of_port.tables != tables;
        of_port.tables = tables;
        Some(Followed {
            scope,
            is_anew: std::mem::take(&mut of_port.is_new) || is_moved,
            is_stale: std::mem::take(&mut of_port.is_first) || is_moved,
        })
    }

    /// Brings the flows of a scope's groups in line with the rules, of which those of these names have changed, or all. Until
    /// the switch has flows that are new, a group is not in force: what is told meanwhile waits for them. Returns the
    /// groups whose addresses need not be planned anew: their patterns stay, and so do their tags.
    pub(crate) fn follow(
        &mut self,
        scope: u16,
        mut tagging: Tagging<'_>,
        names: Option<&ChangedNames>,
        batch: &mut Batch,
    ) -> BTreeSet<Tag> {
        self.no_room = NoRoom::default();
        let mut following = BTreeSet::new();
        let of_scope = Tag::new(scope, 0)..=Tag::new(scope, Tag::NUMBER_MAX);
        let mut changes = Vec::new();
        for (tag, group) in self.groups.range(of_scope) {
            let (change, grows) = match (&group.key, names) {
                (Key::Closed { .. }, Some(_)) => continue,
                (Key::Closed { .. }, None) => (Some(ChangedName::Otherwise), false),
                (Key::Patterns(patterns), names) => {
                    let all = Some(ChangedName::Otherwise);
                    let change = names.map_or(all, |names| patterns.change(names));
                    let size = change.map(|_| tagging.planner.size(tagging.facts, patterns));
                    (change, size > Some(group.plan.len()))
                }
            };
            changes.push((grows, *tag, change));
        }
        // Those that need less make room for others.
        changes.sort_by_key(|(grows, tag, _)| (*grows, *tag));
        for (_, tag, change) in changes {
            let Some(group) = self.groups.get(&tag) else {
                continue;
            };
            let has_flows = |group: &Group| !group.is_cut && !group.plan.is_empty();
            let had_flows = has_flows(group);
            if change.is_some() {
                self.plan_anew(tag, &mut tagging, batch);
            }
            if change != Some(ChangedName::Otherwise)
                && had_flows
                && let Some(group) = self.groups.get(&tag)
                && matches!(group.key, Key::Patterns(_))
                && has_flows(group)
            {
                following.insert(tag);
            }
        }
        following
    }

    /// Makes the flows of a group those of the rules, and writes its flows that are lost.
    fn plan_anew(&mut self, tag: Tag, tagging: &mut Tagging<'_>, batch: &mut Batch) {
        let Some(group) = self.groups.get(&tag) else {
            return;
        };
        let (plan, is_cut) = self.plan((tag.scope(), &group.key), group.plan.len(), tagging);
        let Some(group) = self.groups.get_mut(&tag) else {
            return;
        };
        group.is_cut = is_cut;
        if group.plan == plan {
            return self.write(tag, batch);
        }
        if matches!(group.flows.written, Written::Unsent { .. }) && batch.is_before_comparison() {
            group.flows.lose_all();
        }
        let before = batch.len();
        group.flows.enforce(Target::Tag(tag), plan.clone(), batch);
        let flows = (group.plan.len(), plan.len());
        let are_several = group.key.are_several();
        self.scopes.count(tag.scope(), flows, are_several);
        if group.addresses == 0 {
            self.scopes.count_unused(tag.scope(), flows, are_several);
        }
        let let_pass = group.lets_pass();
        group.plan = plan;
        if let_pass && !group.lets_pass() {
            group.closed_at = Some(batch.now());
        }
        if batch.adds_since(before) {
            self.lost(tag);
        }
    }

    /// Writes the flows of a group that are lost. Where the switch is connected and not compared, it is not known whether the
    /// flows are there: all of them are written.
    pub(crate) fn write(&mut self, tag: Tag, batch: &mut Batch) {
        let group = self.groups.get_mut(&tag).filter(|group| !group.in_force);
        // One edit plans many addresses of the group.
        let Some(group) =
            group.filter(|group| batch.id().is_some_and(|id| group.looked_in != Some(id)))
        else {
            return;
        };
        group.looked_in = batch.id();
        let is_unsent = matches!(group.flows.written, Written::Unsent { .. });
        if is_unsent && batch.is_before_comparison() {
            group.flows.write_again(Target::Tag(tag), batch);
        } else {
            group.flows.restore(Target::Tag(tag), batch);
        }
    }

    /// The flows of a group that have waited with the changes of one pod go in this batch.
    pub(crate) fn go_in(&mut self, tag: Tag, written: Written) {
        if let Some(group) = self.groups.get_mut(&tag) {
            group.flows.written = written;
        }
    }

    /// Writes the flows of a port that are lost, likewise.
    pub(crate) fn write_port(&mut self, port: PortId, batch: &mut Batch) {
        let of_port = self
            .ports
            .get_mut(&port)
            .filter(|of_port| !of_port.in_force);
        let Some(of_port) = of_port.filter(|_| batch.id().is_some()) else {
            return;
        };
        let is_unsent = matches!(of_port.flows.written, Written::Unsent { .. });
        if is_unsent && batch.is_before_comparison() {
            of_port.flows.write_again(Target::Whole, batch);
        } else {
            of_port.flows.restore(Target::Whole, batch);
        }
    }

    /// An address has this group no longer.
    pub(crate) fn release(&mut self, tag: Tag, (port, address): (PortId, IpAddr), now: Timestamp) {
        if let Some(group) = self.groups.get_mut(&tag) {
            group.waiting.remove(&(port, address));
            group.addresses = group.addresses.saturating_sub(1);
            group.unused_since = now;
            if group.addresses == 0 {
                let flows = (0, group.plan.len());
                self.scopes
                    .count_unused(tag.scope(), flows, group.key.are_several());
            }
        }
        if let Some(of_port) = self.ports.get_mut(&port) {
            of_port.waiting.remove(&address);
        }
    }

    /// The address gets its mark when the flows of the group and of the port are in force. Returns whether they are.
    pub(crate) fn is_ready(&mut self, tag: Tag, (port, address): (PortId, IpAddr)) -> bool {
        let Some(group) = self.groups.get_mut(&tag) else {
            return false;
        };
        if !group.in_force {
            group.waiting.insert((port, address));
            return false;
        }
        let Some(of_port) = self.ports.get_mut(&port) else {
            return false;
        };
        if !of_port.in_force {
            of_port.waiting.insert(address);
        }
        of_port.in_force
    }

    // Groups.

    /// The bits in the mark of packets with this tag, if there are enough.
    pub(crate) fn mark(&self, tag: Tag) -> Option<u32> {
        let mask = self.mask?;
        let number = u32::from(tag.number());
        (number <= mask >> mask.trailing_zeros()).then(|| number << mask.trailing_zeros())
    }

    /// The tag of a port's packets with this mark.
    pub(crate) fn tag_of(&self, port: PortId, mark: u32) -> Option<Tag> {
        let mask = self.mask?;
        let number = (mark & mask) >> mask.trailing_zeros();
        let scope = self.ports.get(&port)?.scope;
        Some(Tag::new(scope, u16::try_from(number).ok()?))
    }

    /// Whether there is a group with this tag.
    pub(crate) fn contain(&self, tag: Tag) -> bool {
        self.groups.contains_key(&tag)
    }

    /// Whether flows with this key are those of a group to which packets may come.
    pub(crate) fn are_of_group(&self, key: &FlowKey) -> bool {
        let Ends::Tagged { tag, .. } = key.matches.ends else {
            return false;
        };
        let group = self.groups.get(&tag);
        group.is_some_and(|group| group.addresses > 0 || !group.plan.is_empty())
    }

    /// The switch still has a flow that gives packets this tag, or one of its group, whose removal waits: it rests on if no
    /// group has it.
    pub(crate) fn rest(&mut self, tag: Tag, now: Timestamp) {
        if !self.contain(tag) {
            self.scopes.rest(tag, now);
        }
    }

    /// The kernel has this mark for an address of the port: its tag rests on, likewise.
    pub(crate) fn rest_mark(&mut self, (port, mark): (PortId, u32), now: Timestamp) {
        if let Some(tag) = self.tag_of(port, mark) {
            self.rest(tag, now);
        }
    }

    /// Tags that rest do so for longer: programs of an earlier run may still mark packets with them.
    pub(crate) fn rest_on(&mut self, now: Timestamp) {
        self.scopes.rest_on(now);
    }

    /// Whether the flows of a group are in force, also for packets that are marked.
    pub(crate) fn is_in_force(&self, tag: Tag) -> bool {
        self.groups.get(&tag).is_some_and(|group| group.in_force)
    }

    /// The same for packets of the port that are marked.
    pub(crate) fn is_in_force_at(&self, port: PortId, tag: Tag) -> bool {
        let of_port = self.ports.get(&port);
        of_port.is_some_and(|of_port| of_port.in_force && of_port.scope == tag.scope())
            && self.is_in_force(tag)
    }

    /// The flows of a group.
    pub(crate) fn flows(&self, tag: Tag) -> Option<&Flows> {
        self.groups.get(&tag).map(|group| &group.flows)
    }

    /// The same, to be changed.
    pub(crate) fn flows_mut(&mut self, tag: Tag) -> Option<&mut Flows> {
        self.groups.get_mut(&tag).map(|group| &mut group.flows)
    }

    /// The flows that make the tags of a port's marks.
    pub(crate) fn flows_of_port(&self, port: PortId) -> Option<&Flows> {
        self.ports.get(&port).map(|of_port| &of_port.flows)
    }

    /// The same, to be changed.
    pub(crate) fn flows_of_port_mut(&mut self, port: PortId) -> Option<&mut Flows> {
        self.ports.get_mut(&port).map(|of_port| &mut of_port.flows)
    }

    /// The flows in which the tags of a logical switch end, to be changed.
    pub(crate) fn ends_mut(&mut self, datapath: u32) -> Option<&mut Flows> {
        self.ends.get_mut(&datapath)
    }

    /// Every tag with a group, every port with a scope, and every logical switch where tags end.
    pub(crate) fn holders(&self) -> (Vec<Tag>, Vec<PortId>, Vec<u32>) {
        let tags = self.groups.keys().copied().collect();
        let ports = self.ports.keys().copied().collect();
        (tags, ports, self.ends.keys().copied().collect())
    }

    /// How many flows there should be.
    pub(crate) fn flow_count(&self) -> usize {
        let of_groups = self.groups.values().map(|group| group.flows.len());
        let of_ports = self.ports.values().map(|of_port| of_port.flows.len());
        let ends = self.ends.values().map(Flows::len);
        of_groups.chain(of_ports).chain(ends).sum()
    }

    /// A flow of the group was lost.
    pub(crate) fn lost(&mut self, tag: Tag) {
        if let Some(group) = self.groups.get_mut(&tag)
            && std::mem::take(&mut group.in_force)
        {
            self.not_in_force.groups.insert(tag);
            self.out_of_force.groups.insert(tag);
        }
    }

    /// A flow of the port was lost.
    pub(crate) fn lost_at(&mut self, port: PortId) {
        if let Some(of_port) = self.ports.get_mut(&port)
            && std::mem::take(&mut of_port.in_force)
        {
            self.not_in_force.ports.insert(port);
            self.out_of_force.ports.insert(port);
        }
    }

    /// The connection is lost: the switch may come back without the flows. `comparisons` is how many have ended.
    pub(crate) fn disconnected(&mut self, comparisons: u32) {
        let written = Written::Unsent { comparisons };
        for (tag, group) in &mut self.groups {
            if std::mem::take(&mut group.in_force) {
                self.out_of_force.groups.insert(*tag);
            }
            group.flows.written = written;
        }
        for (port, of_port) in &mut self.ports {
            if std::mem::take(&mut of_port.in_force) {
                self.out_of_force.ports.insert(*port);
            }
            of_port.flows.written = written;
        }
        for flows in self.ends.values_mut() {
            flows.written = written;
        }
        self.not_in_force = NotInForce {
            groups: self.groups.keys().copied().collect(),
            ports: match self.mask {
                Some(_) => self.ports.keys().copied().collect(),
                None => BTreeSet::new(),
            },
        };
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

    /// The groups and ports that are not in force any more, since the last call.
    pub(crate) fn take_out_of_force(&mut self) -> NotInForce {
        std::mem::take(&mut self.out_of_force)
    }

    /// A comparison has ended, which began at `since`, and has shown all flows and marks (`is_complete`) or some. Returns the
    /// addresses that get their marks now.
    pub(crate) fn compared(
        &mut self,
        comparison: u32,
        (since, is_complete): (Timestamp, bool),
    ) -> Vec<(PortId, IpAddr)> {
        for tag in self.scopes.forget_saved() {
            self.changed.push((tag, None));
            self.scopes.rest(tag, since);
        }
        if is_complete {
            self.looked_at = Some(since);
            self.scopes.end_rests(since);
        }
        self.come_into_force(|_, flows| flows.are_all_seen(comparison))
    }

    /// All marks were read, from `since` on. Returns the ports at whose interfaces no other one has marks any more.
    pub(crate) fn marks_read(&mut self, since: Timestamp) -> Vec<PortId> {
        let clean = self.left.extract_if(.., |_, at| *at < since);
        let clean: BTreeSet<u32> = clean.map(|(ifindex, _)| ifindex).collect();
        let interfaces = self.interfaces.iter();
        let interfaces = interfaces.filter(|(_, ifindex)| clean.contains(ifindex));
        interfaces.map(|(port, _)| *port).collect()
    }

    fn come_into_force(
        &mut self,
        is_there: impl Fn(Target, &Flows) -> bool,
    ) -> Vec<(PortId, IpAddr)> {
        let Self {
            not_in_force,
            groups,
            ports,
            ..
        } = self;
        let mut marked = Vec::new();
        not_in_force.groups.retain(|tag| {
            let Some(group) = groups.get_mut(tag) else {
                return false;
            };
            group.in_force = is_there(Target::Tag(*tag), &group.flows);
            if group.in_force {
                marked.extend(std::mem::take(&mut group.waiting));
            }
            !group.in_force
        });
        not_in_force.ports.retain(|port| {
            let Some(of_port) = ports.get_mut(port) else {
                return false;
            };
            let flows = &of_port.flows;
            of_port.in_force = !flows.is_empty() && is_there(Target::Whole, flows);
            if of_port.in_force {
                let waiting = std::mem::take(&mut of_port.waiting);
                marked.extend(waiting.into_iter().map(|address| (*port, address)));
            }
            !of_port.in_force
        });
        marked
    }

    /// Removes the flows of groups that no address has had for a while. An address whose next group has not come
    /// into force keeps the mark of the former one, so the end is that of the last comparison.
    pub(crate) fn sweep(&mut self, batch: &mut Batch) {
        let now = batch.now();
        let Some(looked_at) = self.looked_at else {
            return;
        };
        let groups = self.groups.iter();
        let over = groups.filter(|(_, group)| group.is_over(looked_at));
        let over: Vec<Tag> = over.map(|(tag, _)| *tag).collect();
        let before = batch.len();
        for tag in over {
            if batch.len() - before >= SWEPT_MAX {
                break;
            }
            if let Some(group) = self.groups.remove(&tag) {
                group.flows.close(Target::Tag(tag), batch);
                self.out_of_force.groups.insert(tag);
                self.scopes.count_names(tag.scope(), group.key.octets(), 0);
                let flows = (group.plan.len(), 0);
                let are_several = group.key.are_several();
                self.scopes.count(tag.scope(), flows, are_several);
                self.scopes.count_unused(tag.scope(), flows, are_several);
                self.by_key.remove(&(tag.scope(), group.key));
                self.scopes.give_back(tag, now);
                self.changed.push((tag, None));
            }
        }
        let scopes = &self.scopes;
        for (_, flows) in self
            .ends
            .extract_if(.., |datapath, _| !scopes.are_in(*datapath))
        {
            flows.close(Target::Whole, batch);
        }
    }
}

impl Group {
    /// Whether no address has had the group for a while before `at`.
    fn is_over(&self, at: Timestamp) -> bool {
        self.addresses == 0 && self.unused_since + GROUP_STAYS <= at
    }
}
