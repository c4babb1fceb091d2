//! The scopes of groups, their numbers, and the numbers of groups in each.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeBounds,
    sync::Arc,
};

use crate::{
    Timestamp,
    policy::plan::{PortFacts, SavedGroup},
    values::{
        flow::Tag,
        limits::{
            GROUP_FLOWS_MAX, GROUP_FLOWS_PER_SCOPE_MAX, GROUP_NAMES_PER_SCOPE_MAX, GROUP_RESTS,
        },
    },
};

/// The numbers from here on are those of groups that close.
const FIRST_CLOSED: u16 = Tag::NUMBER_MAX - 1;

/// The ports of one logical switch for which the rules of the same port groups hold: those of a namespace.
#[derive(Debug)]
pub(super) struct Scope {
    /// The key of the logical switch.
    pub(super) datapath: u32,
    /// The port groups whose rules hold.
    pub(super) port_groups: Arc<[Arc<str>]>,
    /// How many ports there are.
    ports: usize,
    /// The numbers that groups have.
    numbers: BTreeSet<u16>,
    /// Those of them that groups with several patterns have.
    unions: BTreeSet<u16>,
    /// No number before this one is free.
    first_free: u16,
    /// How many flows the groups with one pattern have.
    of_one: Flows,
    /// How many those with several patterns have.
    of_several: Flows,
    /// The octets of their patterns ([`Patterns::octets`](crate::policy::plan::Patterns)).
    octets: usize,
}

/// How many flows groups have.
#[derive(Clone, Copy, Debug, Default)]
struct Flows {
    all: usize,
    /// Those of groups that no address has, which stay for a while.
    unused: usize,
}

/// All scopes, and the tags that are taken.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    scopes: BTreeMap<u16, Scope>,
    /// Tags that packets may still get, although no group has them, and when that was last known.
    resting: BTreeMap<Tag, Timestamp>,
    /// The groups of an earlier run whose scopes have not come.
    saved: BTreeMap<Tag, SavedGroup>,
    /// How many flows all groups have.
    flows: usize,
}

impl Scope {
    fn flows(&mut self, are_several: bool) -> &mut Flows {
        match are_several {
            true => &mut self.of_several,
            false => &mut self.of_one,
        }
    }

    fn is_of(&self, facts: PortFacts<'_>) -> bool {
        self.datapath == facts.keys.datapath && are_of(&self.port_groups, facts)
    }
}

/// Whether the rules of these port groups hold for a port, and no others.
fn are_of(port_groups: &[Arc<str>], facts: PortFacts<'_>) -> bool {
    let mut sets = facts.sets.iter();
    facts.sets.len() == port_groups.len() && sets.all(|set| port_groups.contains(set.group()))
}

impl Scopes {
    /// Takes over the groups of an earlier run.
    pub(super) fn load(&mut self, saved: BTreeMap<Tag, SavedGroup>) {
        self.saved = saved;
    }

    /// A scope.
    pub(super) fn get(&self, number: u16) -> Option<&Scope> {
        self.scopes.get(&number)
    }

    /// Whether there is a scope in this logical switch.
    pub(super) fn are_in(&self, datapath: u32) -> bool {
        let mut scopes = self.scopes.values();
        scopes.any(|scope| scope.datapath == datapath)
    }

    /// Whether this is the scope of a port.
    pub(super) fn is_of(&self, number: u16, facts: PortFacts<'_>) -> bool {
        self.get(number).is_some_and(|scope| scope.is_of(facts))
    }

    /// The number of a port's scope, which is made if there is none. If it is not known which numbers are free
    /// (`are_known`), only one of an earlier run is. Returns the groups of the earlier run with it.
    pub(super) fn of(
        &mut self,
        facts: PortFacts<'_>,
        are_known: bool,
    ) -> Option<(u16, Vec<(Tag, SavedGroup)>)> {
        let mut scopes = self.scopes.iter();
        if let Some((number, _)) = scopes.find(|(_, scope)| scope.is_of(facts)) {
            return Some((*number, Vec::new()));
        }
        let is_of = |saved: &SavedGroup| {
            saved.datapath == facts.keys.datapath && are_of(&saved.port_groups, facts)
        };
        let mut saved = self.saved.iter();
        let saved = saved.find_map(|(tag, saved)| is_of(saved).then_some(tag.scope()));
        let saved = saved.filter(|number| !self.scopes.contains_key(number));
        let number = saved.or_else(|| self.free_scope().filter(|_| are_known))?;
        let scope = Scope {
            datapath: facts.keys.datapath,
            port_groups: facts.sets.iter().map(|set| set.group().clone()).collect(),
            ports: 0,
            numbers: BTreeSet::new(),
            first_free: 1,
            of_one: Flows::default(),
            of_several: Flows::default(),
            unions: BTreeSet::new(),
            octets: 0,
        };
        self.scopes.insert(number, scope);
        let of_scope = self
            .saved
            .extract_if(.., |tag, saved| tag.scope() == number && is_of(saved));
        Some((number, of_scope.collect()))
    }

    fn free_scope(&self) -> Option<u16> {
        (1..=Tag::SCOPE_MAX).find(|number| {
            let tags = Tag::new(*number, 0)..=Tag::new(*number, Tag::NUMBER_MAX);
            !self.scopes.contains_key(number)
                && self.resting.range(tags.clone()).next().is_none()
                && self.saved.range(tags).next().is_none()
        })
    }

    /// Forgets the groups of an earlier run whose scopes have not come: returns their tags.
    pub(super) fn forget_saved(&mut self) -> Vec<Tag> {
        std::mem::take(&mut self.saved).into_keys().collect()
    }

    /// The groups of an earlier run whose scopes have not come.
    pub(super) fn saved(
        &self,
        tags: impl RangeBounds<Tag>,
    ) -> impl Iterator<Item = (Tag, &SavedGroup)> {
        self.saved.range(tags).map(|(tag, saved)| (*tag, saved))
    }

    /// A port has this scope. Returns whether it is the first one.
    pub(super) fn enter(&mut self, number: u16) -> bool {
        let scope = self.scopes.get_mut(&number);
        scope.is_some_and(|scope| {
            scope.ports += 1;
            scope.ports == 1
        })
    }

    /// A port has this scope no longer.
    pub(super) fn leave(&mut self, number: u16) {
        if let Some(scope) = self.scopes.get_mut(&number) {
            scope.ports = scope.ports.saturating_sub(1);
        }
    }

    /// Whether groups of a scope may have so many flows more. Those with several patterns (`are_several`) have a room of
    /// their own, half as large as that of those with one. Groups that no address has take no room from these, but as much
    /// again at most. A scope with many leaves the last quarter of the node's room to others.
    pub(super) fn has_room(&self, number: u16, further: usize, are_several: bool) -> bool {
        let Some(scope) = self.get(number) else {
            return false;
        };
        let (flows, max) = match are_several {
            true => (scope.of_several, GROUP_FLOWS_PER_SCOPE_MAX / 2),
            false => (scope.of_one, GROUP_FLOWS_PER_SCOPE_MAX),
        };
        let of_scope = scope.of_one.all + scope.of_several.all + further;
        let is_fair = || of_scope <= GROUP_FLOWS_MAX / 4 / self.scopes.len().max(1);
        let are_few = self.flows + further <= GROUP_FLOWS_MAX / 4 * 3;
        flows.all - flows.unused + further <= max
            && flows.all + further <= 2 * max
            && (are_few || is_fair())
    }

    /// A group has so many flows in place of others.
    pub(super) fn count(&mut self, number: u16, (before, now): (usize, usize), are_several: bool) {
        self.flows = self.flows + now - before;
        if let Some(scope) = self.scopes.get_mut(&number) {
            let flows = scope.flows(are_several);
            flows.all = flows.all + now - before;
        }
    }

    /// So many flows are those of a group that no address has, in place of others.
    pub(super) fn count_unused(
        &mut self,
        number: u16,
        (before, now): (usize, usize),
        are_several: bool,
    ) {
        if let Some(scope) = self.scopes.get_mut(&number) {
            let flows = scope.flows(are_several);
            flows.unused = flows.unused + now - before;
        }
    }

    /// Whether a scope may have a group whose patterns have so many octets.
    pub(super) fn has_room_for_names(&self, number: u16, octets: usize) -> bool {
        let of_scope = self.get(number).map_or(0, |scope| scope.octets);
        of_scope + octets <= GROUP_NAMES_PER_SCOPE_MAX
    }

    /// The patterns of a scope's groups have so many octets in place of others.
    pub(super) fn count_names(&mut self, number: u16, before: usize, now: usize) {
        if let Some(scope) = self.scopes.get_mut(&number) {
            scope.octets = scope.octets + now - before;
        }
    }

    /// The tag of the group that closes its addresses: no other group has it, and no mark stands for it.
    pub(super) fn closed(scope: u16, is_ipv6: bool) -> Tag {
        Tag::new(scope, FIRST_CLOSED + u16::from(is_ipv6))
    }

    /// A free tag for a further group of a scope: the first one, since marks have the fewest numbers. Groups with several
    /// patterns have half of the numbers.
    pub(super) fn free(&mut self, number: u16, are_several: bool) -> Option<Tag> {
        let Self {
            scopes, resting, ..
        } = self;
        let scope = scopes.get_mut(&number)?;
        if are_several && scope.unions.len() >= usize::from(Tag::NUMBER_MAX) / 2 {
            return None;
        }
        let free = (scope.first_free..FIRST_CLOSED).find(|free| {
            !scope.numbers.contains(free) && !resting.contains_key(&Tag::new(number, *free))
        });
        scope.first_free = free.unwrap_or(FIRST_CLOSED);
        free.map(|free| Tag::new(number, free))
    }

    /// A group has this tag.
    pub(super) fn take(&mut self, tag: Tag, are_several: bool) {
        if let Some(scope) = self.scopes.get_mut(&tag.scope()) {
            scope.numbers.insert(tag.number());
            if are_several {
                scope.unions.insert(tag.number());
            }
        }
        self.resting.remove(&tag);
    }

    /// A group with this tag is gone. The tag rests.
    pub(super) fn give_back(&mut self, tag: Tag, now: Timestamp) {
        if let Some(scope) = self.scopes.get_mut(&tag.scope()) {
            scope.numbers.remove(&tag.number());
            scope.unions.remove(&tag.number());
        }
        self.rest(tag, now);
    }

    /// Packets may get the tag, which no group has.
    pub(super) fn rest(&mut self, tag: Tag, now: Timestamp) {
        self.resting.insert(tag, now);
    }

    /// All tags that rest do so for longer.
    pub(super) fn rest_on(&mut self, now: Timestamp) {
        for since in self.resting.values_mut() {
            *since = now;
        }
    }

    /// All flows and marks were looked at, from `since` on: tags that have rested before that are free, and so are scopes
    /// without ports and groups.
    pub(super) fn end_rests(&mut self, since: Timestamp) {
        let Self {
            scopes, resting, ..
        } = self;
        for (tag, _) in resting.extract_if(.., |_, rests| *rests + GROUP_RESTS <= since) {
            if let Some(scope) = scopes.get_mut(&tag.scope()) {
                scope.first_free = scope.first_free.min(tag.number().max(1));
            }
        }
        scopes.retain(|number, scope| {
            let tags = Tag::new(*number, 0)..=Tag::new(*number, Tag::NUMBER_MAX);
            let mut resting = resting.range(tags);
            scope.ports > 0 || !scope.numbers.is_empty() || resting.next().is_some()
        });
    }
}
