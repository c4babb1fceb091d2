//! The entries of one port: the addresses that its pod was told, and the names that lead to them.
//!
//! [`Entries`] owns them, with their indices by name and by order, and their totals. Indices and totals agree with
//! the entries after each call: names and flows of their own change in its methods alone.

pub(super) mod names;

use std::{
    collections::{BTreeMap, BTreeSet, btree_map},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::{
    Timestamp,
    cache::{
        Origin, Resolution,
        due::Look,
        entries::names::{Names, Term},
        journal::RecordedTerm,
        ports::Key,
    },
    installed::{Fit, Installed, Place},
    policy::{refused::Translation, rules::NamePattern},
    tools::table::IndexMap,
    values::{
        flow::Tag,
        limits::MARK_SLACK,
        name::{DnsName, DomainName, FromEnd},
    },
};

/// The entries of one port.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    /// In boxes: a table that grows has twice the room that it needs. In the order in which they came, which is mostly
    /// that of the boxes in memory: a look at all entries goes one way.
    by_address: IndexMap<IpAddr, Box<Entry>>,
    /// The addresses of IPv6 that may stand for one of IPv4, behind that one.
    translated: BTreeSet<(Ipv4Addr, Ipv6Addr)>,
    translation: Translation,
    /// For each name, the addresses whose entries have the name.
    by_name: BTreeMap<FromEnd, Addresses>,
    /// The addresses of which a name was remembered over the budget, without a plan since.
    unplanned: BTreeSet<IpAddr>,
    sizes: Sizes,
    /// The changes for the journal: address, name, and the new term, if the address still has the name.
    changed: Vec<ChangedName>,
    /// Whether a look has found that all entries are denied, and no entry has changed since that is not.
    all_are_denied: bool,
    /// The same for the entries with a name.
    all_named_are_denied: bool,
}

/// Names that are looked at for one that a rule covers. Few pods know more names below a rule.
const COVERED_LOOKED_AT_MAX: usize = 64;

/// The addresses of a name, in the order in which they came.
#[derive(Debug)]
enum Addresses {
    /// Mostly there is one.
    One(IpAddr),
    Several(Box<Several>),
}

/// In a box, so that the usual case is small.
#[derive(Debug)]
struct Several(Vec<IpAddr>);

/// How much all entries of a port have together.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Sizes {
    /// Names.
    pub(super) names: usize,
    /// Those of them that a rule denies.
    pub(super) denied_names: usize,
    /// Addresses to which only established connections pass.
    pub(super) ended: usize,
    /// Flows of their own.
    pub(super) flows: usize,
}

/// A name of an address with its new term; without one, if the address does not have the name any more.
pub(super) type ChangedName = (IpAddr, DomainName, Option<RecordedTerm>);

/// One address that a pod was told.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// The names that lead to the address, and until when.
    pub(crate) names: Names,
    /// The tag of its packets, which follows from names and rules.
    pub(crate) installed: Installed,
    /// Whether the address is never opened. Then only the rules count that deny it.
    pub(crate) is_refused: bool,
    /// Whether a load balancer leads to the address, or has done so since the pod was told it: an address that came and
    /// went as one would change flows each time.
    pub(super) is_backend: bool,
    /// Whether a load balancer has the address in front, likewise.
    pub(crate) is_front: bool,
    /// Whether packets have gone there: connections may be there still, and idle, also when the flow that has counted the
    /// packets is gone.
    pub(super) may_have_connections: bool,
    /// Whether it has the flows of its patterns.
    pub(crate) fit: Fit,
    /// When the entry is looked at again, if ever.
    pub(super) look: Look,
}

// There is one for each address of each pod.
const _: () = assert!(cfg!(test) || size_of::<Entry>() <= 128);

impl Entries {
    /// There are none.
    pub(super) fn new(translation: Translation) -> Self {
        Self {
            translation,
            ..Self::default()
        }
    }

    // What there is.

    /// The number of addresses.
    pub(crate) fn len(&self) -> usize {
        self.by_address.len()
    }

    /// How much they have together.
    pub(super) fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// An entry, if there is one.
    pub(super) fn get(&self, address: IpAddr) -> Option<&Entry> {
        self.by_address.get(&address).map(Box::as_ref)
    }

    /// The same, to change fields that no index or total depends on.
    pub(super) fn get_mut(&mut self, address: IpAddr) -> Option<&mut Entry> {
        self.by_address.get_mut(&address).map(Box::as_mut)
    }

    /// An entry by its place, as long as none goes.
    pub(super) fn at(&self, place: usize) -> Option<(IpAddr, &Entry)> {
        let (address, entry) = self.by_address.get_index(place)?;
        Some((*address, entry))
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (IpAddr, &Entry)> {
        let entries = self.by_address.iter();
        entries.map(|(address, entry)| (*address, &**entry))
    }

    /// The same, to change fields that no index or total depends on.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (IpAddr, &mut Entry)> {
        let entries = self.by_address.iter_mut();
        entries.map(|(address, entry)| (*address, &mut **entry))
    }

    /// The address if it has an entry, and those that may stand for it.
    pub(crate) fn forms_of(&self, address: IpAddr) -> impl Iterator<Item = IpAddr> {
        let itself = self.get(address).map(|_| address);
        let translated = match address {
            IpAddr::V4(address) => Some(
                self.translated
                    .range((address, Ipv6Addr::UNSPECIFIED)..)
                    .take_while(move |(inner, _)| *inner == address),
            ),
            IpAddr::V6(_) => None,
        };
        let translated = translated.into_iter().flatten();
        let translated = translated.map(|(_, form)| IpAddr::V6(*form));
        itself.into_iter().chain(translated)
    }

    /// The addresses that have this name.
    pub(crate) fn of_name(&self, name: &DomainName) -> &[IpAddr] {
        let addresses = self.by_name.get(&FromEnd(name.clone()));
        addresses.map_or(&[], Addresses::as_slice)
    }

    /// How many addresses have this name, and are open for new connections.
    pub(super) fn counting_of_name(&self, name: &DomainName) -> usize {
        let entries = self.of_name(name).iter();
        let entries = entries.filter_map(|address| self.get(*address));
        entries.filter(|entry| !entry.has_ended()).count()
    }

    /// The addresses that have this name, or a name below it. There may be others among them.
    pub(crate) fn below<'a>(&'a self, name: &'a DomainName) -> impl Iterator<Item = IpAddr> + 'a {
        let names = self.by_name.range(FromEnd(name.clone())..);
        let below = names.take_while(|(other, _)| other.may_be_below(name));
        below.flat_map(|(_, addresses)| addresses.as_slice().iter().copied())
    }

    /// One of the address's names that a rule covers. Few names below the rule's are looked at.
    pub(crate) fn covered(
        &self,
        address: IpAddr,
        rule: &DnsName,
        pattern: NamePattern,
    ) -> Option<&DomainName> {
        let names = self.by_name.range(FromEnd(rule.name().clone())..);
        let below = names.take_while(|(other, _)| other.may_be_below(rule.name()));
        let mut few = below.take(COVERED_LOOKED_AT_MAX);
        let covered = few.find(|(FromEnd(name), addresses)| {
            addresses.as_slice().contains(&address) && pattern.covers_name(rule, name)
        });
        covered.map(|(FromEnd(name), _)| name)
    }

    /// The addresses of which a name was remembered over the budget, without a plan since.
    pub(crate) fn unplanned(&self) -> &BTreeSet<IpAddr> {
        &self.unplanned
    }

    /// Whether all entries, or all with a name, are known to be denied.
    pub(super) fn are_all_denied(&self, with_names: bool) -> bool {
        match with_names {
            true => self.all_named_are_denied,
            false => self.all_are_denied,
        }
    }

    /// Looks whether all entries are denied.
    pub(super) fn look_for_undenied(&mut self) {
        let mut undenied = self.by_address.values().filter(|entry| !entry.is_denied());
        let first = undenied.next();
        self.all_are_denied = first.is_none();
        let mut undenied = first.into_iter().chain(undenied);
        self.all_named_are_denied = undenied.all(|entry| entry.names.is_empty());
    }

    /// The addresses with a denied name.
    pub(crate) fn denied(&self) -> Vec<IpAddr> {
        let denied = self.iter().filter(|(_, entry)| entry.is_denied());
        denied.map(|(address, _)| address).collect()
    }

    // What changes them.

    /// The entry of an address.
    fn entry_or_new(&mut self, address: IpAddr) -> &mut Entry {
        self.by_address.entry(address).or_insert_with(|| {
            if let IpAddr::V6(form) = address {
                let inner = self.translation.inner(form);
                self.translated.extend(inner.map(|inner| (inner, form)));
            }
            Box::default()
        })
    }

    /// An entry has changed: it may not be denied any more.
    fn changed(&mut self, address: IpAddr) {
        // If all are denied, so are all with a name.
        if self.all_named_are_denied
            && let Some(entry) = self.get(address)
            && !entry.is_over()
            && !entry.is_denied()
        {
            self.all_named_are_denied = entry.names.is_empty();
            self.all_are_denied = false;
        }
    }

    /// Adds a name to an address. Returns whether the address had none, and how many addresses the name has.
    pub(super) fn add(&mut self, resolution: Resolution<'_>) -> (bool, usize) {
        let Resolution {
            address,
            name,
            term,
            standing,
            ..
        } = resolution;
        let entry = self.entry_or_new(address);
        let is_new = entry.names.is_empty();
        let had_ended = entry.has_ended();
        entry.may_have_connections |= term.is_ended;
        entry.names.add(name.clone(), term, standing.get());
        let has_ended = entry.has_ended();
        self.sizes.count_ended(had_ended, has_ended);
        // A name of the journal is there already.
        if term.origin != Origin::Journal {
            let recorded = Some((&term).into());
            self.changed.push((address, name.clone(), recorded));
        }
        self.sizes.names += 1;
        self.sizes.denied_names += usize::from(term.is_denied);
        self.changed(address);
        let addresses = match self.by_name.entry(FromEnd(name.clone())) {
            btree_map::Entry::Vacant(place) => place.insert(Addresses::One(address)),
            btree_map::Entry::Occupied(place) => {
                let addresses = place.into_mut();
                addresses.push(address);
                addresses
            }
        };
        (is_new, addresses.as_slice().len())
    }

    /// Changes the terms of an entry's names.
    fn change_terms(&mut self, address: IpAddr, change: impl FnOnce(&mut Names) -> bool) -> bool {
        let Some(entry) = self.by_address.get_mut(&address) else {
            return false;
        };
        let before = entry.names.denied();
        let had_ended = entry.has_ended();
        let result = change(&mut entry.names);
        self.sizes.count_ended(had_ended, entry.has_ended());
        self.sizes.denied_names = self.sizes.denied_names + entry.names.denied() - before;
        self.changed(address);
        result
    }

    /// Prolongs the term of a name ([`Names::prolong`]). Returns whether the address has the name.
    pub(super) fn prolong(&mut self, address: IpAddr, name: &DomainName, term: Term) -> bool {
        let before = self.term(address, name);
        let is_known = self.change_terms(address, |names| names.prolong(name, term));
        self.note_term(address, name, before);
        is_known
    }

    /// Has a name of an address count for as long as another one.
    pub(super) fn stand_for(&mut self, address: IpAddr, name: &DomainName, other: &DomainName) {
        let before = self.term(address, name);
        self.change_terms(address, |names| names.stand_for(name, other));
        self.note_term(address, name, before);
    }

    fn term(&self, address: IpAddr, name: &DomainName) -> Option<Term> {
        self.get(address)?.names.term(name)
    }

    /// Notes for the journal that a name has another term than before, if that is worth a record.
    fn note_term(&mut self, address: IpAddr, name: &DomainName, before: Option<Term>) {
        let term = self.term(address, name);
        let recorded = term.as_ref().map(RecordedTerm::from);
        let before = before.as_ref().map(RecordedTerm::from);
        let is_alike = recorded
            .zip(before)
            .is_some_and(|(one, other)| one.is_alike(other));
        if recorded.is_some() && !is_alike {
            self.changed.push((address, name.clone(), recorded));
        }
    }

    /// Notes for each name of an address whether a rule denies the name ([`Names::deny`]).
    pub(super) fn deny(
        &mut self,
        address: IpAddr,
        is_denied: impl Fn(&DomainName, &Term) -> bool,
        released: Timestamp,
    ) -> bool {
        let mut changed = Vec::new();
        let may_end = self.change_terms(address, |names| {
            names.deny(is_denied, released, |name| changed.push(name.clone()))
        });
        for name in changed {
            self.note_term(address, &name, None);
        }
        may_end
    }

    /// Names whose time is over stay for as long as they are in use ([`Names::stay_in_use`]).
    pub(super) fn stay_in_use(
        &mut self,
        address: IpAddr,
        now: Timestamp,
        mut in_use: impl FnMut(&DomainName) -> Option<Timestamp>,
    ) {
        let Some(entry) = self.by_address.get_mut(&address) else {
            return;
        };
        let mut changed = Vec::new();
        entry.names.stay_in_use(now, |name| {
            let until = in_use(name);
            changed.extend(until.map(|_| name.clone()));
            until
        });
        for name in changed {
            self.note_term(address, &name, None);
        }
    }

    /// Names of an address have ended ([`Names::end`]).
    pub(super) fn end_names(
        &mut self,
        address: IpAddr,
        until: Timestamp,
        is_one: impl Fn(&DomainName, &Term) -> bool,
    ) {
        let mut changed = Vec::new();
        self.change_terms(address, |names| {
            names.end(until, |name, term| {
                let ends = is_one(name, term);
                changed.extend(ends.then(|| name.clone()));
                ends
            })
        });
        for name in changed {
            self.note_term(address, &name, None);
        }
    }

    /// Takes out the changes for the journal.
    pub(super) fn take_changed(&mut self) -> Vec<ChangedName> {
        std::mem::take(&mut self.changed)
    }

    /// Takes a name from an address.
    pub(super) fn forget_name(&mut self, address: IpAddr, name: &DomainName) {
        if let Some(entry) = self.by_address.get_mut(&address)
            && let had_ended = entry.has_ended()
            && let Some(term) = entry.names.remove(name)
        {
            self.sizes.count_ended(had_ended, entry.has_ended());
            self.sizes.names -= 1;
            self.sizes.denied_names -= usize::from(term.is_denied);
            self.changed.push((address, name.clone(), None));
        }
        self.changed(address);
        if let btree_map::Entry::Occupied(mut addresses) = self.by_name.entry(FromEnd(name.clone()))
            && addresses.get_mut().remove(address)
        {
            addresses.remove();
        }
    }

    /// Takes the names from an address that are over. Returns them.
    pub(super) fn forget_names(
        &mut self,
        address: IpAddr,
        is_over: impl Fn(&DomainName, &Term) -> bool,
    ) -> Vec<DomainName> {
        let names = self.get(address).into_iter();
        let names = names.flat_map(|entry| entry.names.iter());
        let over = names.filter(|(name, term)| is_over(name, term));
        let over: Vec<DomainName> = over.map(|(name, _)| name.clone()).collect();
        for name in &over {
            self.forget_name(address, name);
        }
        over
    }

    /// Changes the flows or the mark of an address, if there is an entry.
    pub(super) fn enforce<T: Default>(
        &mut self,
        address: IpAddr,
        change: impl FnOnce(&mut Entry) -> T,
    ) -> T {
        let Some(entry) = self.by_address.get_mut(&address) else {
            return T::default();
        };
        let before = entry.installed.len();
        // What comes in its place counts anew.
        entry.note_use();
        let result = change(entry);
        self.sizes.flows = self.sizes.flows + entry.installed.len() - before;
        result
    }

    /// Notes whether a name of an address was remembered over the budget, without a plan since.
    pub(super) fn set_unplanned(&mut self, address: IpAddr, is_unplanned: bool) {
        match is_unplanned && self.by_address.contains_key(&address) {
            true => self.unplanned.insert(address),
            false => self.unplanned.remove(&address),
        };
    }

    /// Removes an entry, with its names.
    pub(super) fn take(&mut self, address: IpAddr) -> Option<Entry> {
        self.forget_names(address, |_, _| true);
        self.unplanned.remove(&address);
        if let IpAddr::V6(form) = address {
            for inner in self.translation.inner(form) {
                self.translated.remove(&(inner, form));
            }
        }
        let entry = self.by_address.swap_remove(&address)?;
        self.sizes.flows -= entry.installed.len();
        Some(*entry)
    }
}

impl Sizes {
    fn count_ended(&mut self, before: bool, after: bool) {
        self.ended = self.ended + usize::from(after) - usize::from(before);
    }
}

impl Addresses {
    fn as_slice(&self) -> &[IpAddr] {
        match self {
            Self::One(address) => std::slice::from_ref(address),
            Self::Several(several) => &several.0,
        }
    }

    fn push(&mut self, address: IpAddr) {
        match self {
            Self::One(first) => {
                *self = Self::Several(Box::new(Several(vec![*first, address])));
            }
            Self::Several(several) => several.0.push(address),
        }
    }

    /// Takes an address out. Returns whether there is none any more.
    fn remove(&mut self, address: IpAddr) -> bool {
        match self {
            Self::One(one) => *one == address,
            Self::Several(several) => {
                several.0.retain(|other| *other != address);
                several.0.is_empty()
            }
        }
    }
}

impl Entry {
    /// The next end of a name.
    pub(super) fn due(&self) -> Option<Timestamp> {
        self.names.ends().min()
    }

    /// The last end of a name.
    pub(crate) fn ends_at(&self) -> Timestamp {
        self.names.last_end().unwrap_or_default()
    }

    /// Whether a rule denies a name of the address.
    pub(crate) fn is_denied(&self) -> bool {
        self.names.denied() > 0
    }

    /// Whether the entry has no name.
    pub(super) fn is_over(&self) -> bool {
        self.names.is_empty()
    }

    /// Remembers that packets have gone to the address, if they have.
    pub(super) fn note_use(&mut self) {
        self.may_have_connections |= self.installed.usage().at.is_some();
    }

    /// Whether only established connections to the address pass: its time is over.
    pub(crate) fn has_ended(&self) -> bool {
        self.names.have_ended()
    }

    /// Whether the address gets its tag by flows: by a mark, the address behind a load balancer would be open or closed by
    /// the rules of the one in front of it.
    pub(crate) fn needs_flows(&self) -> bool {
        self.is_denied() || self.is_front
    }

    /// Whether the address has the tag of one of these groups.
    pub(crate) fn follows(&self, groups: &BTreeSet<Tag>) -> bool {
        let tag = self.installed.tag();
        tag.is_some_and(|tag| groups.contains(&tag))
    }

    /// Where the entry is enforced, and until when without the agent.
    pub(super) fn place(&self, (port, address): Key) -> Place {
        Place {
            port,
            address,
            until: self.ends_at() + MARK_SLACK,
            needs_flows: self.needs_flows(),
            is_backend: self.is_backend,
            has_ended: self.has_ended(),
        }
    }
}

#[cfg(test)]
mod tests;
