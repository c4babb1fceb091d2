//! What an earlier run of the agent has left in its journal, and the records of this run.
//!
//! A name of the journal is in one place: with its port while the pod is there, else here. It stays here until the first
//! comparison has ended: until then, its port may come.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use crate::{
    Timestamp,
    cache::{
        Cache,
        entries::{
            Entries,
            names::{Origin, Term},
        },
        journal::{Journal, PART_MAX, Parts, Place, PlaceOf, Record, Saved, SavedEntry, SavedName},
    },
    values::{ids::PortId, name::DomainName},
};

/// What an earlier run has left.
#[derive(Debug, Default)]
pub(super) struct EarlierRun {
    /// The ports that have not come yet, or have gone since.
    awaited: BTreeMap<Arc<str>, Awaited>,
    /// The number of their names.
    names: usize,
    /// When they were taken over. The time that is left for a name is counted from then on.
    loaded_at: Timestamp,
    /// The ports that are there.
    came: HashMap<PortId, Came>,
    /// Its ports, with the UIDs of their pods, until the first comparison has ended.
    ports: BTreeMap<Arc<str>, Option<Arc<str>>>,
    /// The hashes of its rules, by namespace, until then.
    rules: BTreeMap<Arc<str>, u64>,
    /// Until when flows that deny stay although nobody knows their names.
    denials: Option<Timestamp>,
    /// How many ports have gone whose names were kept.
    returned: u32,
    /// Whether the first comparison has ended. Until then, not all rules may be known, and a name that was denied stays
    /// so.
    is_over: bool,
}

/// A port that is not there.
#[derive(Debug)]
struct Awaited {
    /// The pod's UID.
    pod: Option<Arc<str>>,
    entries: Vec<SavedEntry>,
}

/// A port that is there.
#[derive(Debug)]
struct Came {
    /// The logical port.
    name: Arc<str>,
    /// The pod's UID.
    pod: Option<Arc<str>>,
}

impl EarlierRun {
    fn load(&mut self, saved: Saved, now: Timestamp) {
        self.loaded_at = now;
        (self.ports, self.rules, self.denials) = (saved.ports, saved.rules, saved.denials);
        for (name, pod) in &self.ports {
            let (pod, entries) = (pod.clone(), Vec::new());
            self.awaited
                .insert(Arc::clone(name), Awaited { pod, entries });
        }
        for entry in saved.entries {
            if let Some(of_port) = self.awaited.get_mut(&entry.port) {
                self.names += entry.names.len();
                of_port.entries.push(entry);
            }
        }
    }

    /// A port has come. Returns the answers to its pod: address, name and term.
    fn open(
        &mut self,
        port: PortId,
        (name, pod): (Arc<str>, Option<Arc<str>>),
    ) -> Vec<(IpAddr, DomainName, Term)> {
        let awaited = self.awaited.remove(&name);
        self.names -= awaited
            .as_ref()
            .map_or(0, |awaited| count(&awaited.entries));
        // Another pod under the same name inherits nothing.
        let awaited = awaited.filter(|awaited| awaited.pod == pod);
        let saved = awaited.map_or_else(Vec::new, |awaited| awaited.entries);
        self.came.insert(port, Came { name, pod });
        let loaded_at = self.loaded_at;
        let names = saved.into_iter().flat_map(|entry| {
            let names = entry.names.into_iter();
            names.map(move |saved| {
                let term = Term::of(saved.term(loaded_at), Origin::Journal);
                (entry.address, saved.name, term)
            })
        });
        names.collect()
    }

    /// A port is gone, with these entries. Returns its name, unless its names are kept: during a start, its pod may come
    /// back, as when its interface is made anew. Of pods that are not there, at most `kept_max` names are kept.
    fn closed(&mut self, port: PortId, entries: &Entries, kept_max: usize) -> Option<Arc<str>> {
        let Came { name, pod } = self.came.remove(&port)?;
        let taken = self.names + entries.sizes().names;
        if self.is_over || taken > kept_max {
            return Some(name);
        }
        // As in the journal, the time that is left for a name is counted from the start on.
        let entries = entries
            .iter()
            .map(|(address, entry)| {
                let names = entry.names.iter();
                let names = names.map(|(name, term)| SavedName {
                    name: name.clone(),
                    rest: term.until.since(self.loaded_at),
                    deny_rest: term.deny_until.since(self.loaded_at),
                    is_denied: term.is_denied,
                    is_ended: term.is_ended,
                });
                SavedEntry {
                    port: Arc::clone(&name),
                    address,
                    names: names.collect(),
                }
            })
            .collect();
        self.names = taken;
        self.returned += 1;
        self.awaited.insert(name, Awaited { pod, entries });
        None
    }

    /// All ports have come: the pods of the others are gone.
    fn forget_awaited(&mut self) -> impl Iterator<Item = Arc<str>> + use<> {
        self.names = 0;
        std::mem::take(&mut self.awaited).into_keys()
    }
}

/// How many names these entries have.
fn count(saved: &[SavedEntry]) -> usize {
    saved.iter().map(|entry| entry.names.len()).sum()
}

impl Cache {
    /// Takes over what an earlier run has left.
    pub(crate) fn load(&mut self, mut saved: Saved, now: Timestamp) {
        self.groups.load(std::mem::take(&mut saved.groups));
        self.ports.journal = Journal::of(&saved.rules);
        self.earlier.load(saved, now);
    }

    /// An earlier run has left no journal.
    pub(crate) fn begin_journal(&mut self, now: Timestamp) {
        let until = now + self.limits.deny_ttl;
        self.earlier.denials = Some(until);
        self.ports.journal.note(Record::Denials(until));
    }

    /// The answers of an earlier run to the pod of a port that has come: address, name and term.
    pub(super) fn of_earlier_run(
        &mut self,
        number: PortId,
        name: &str,
        pod: Option<&str>,
    ) -> Vec<(IpAddr, DomainName, Term)> {
        let (name, pod): (Arc<str>, Option<Arc<str>>) = (name.into(), pod.map(Into::into));
        self.ports.journal.note(Record::Port {
            number,
            name: Arc::clone(&name),
            pod: pod.clone(),
        });
        self.earlier.open(number, (name, pod))
    }

    /// A port is gone, with these entries.
    pub(super) fn port_gone(&mut self, port: PortId, entries: &Entries) {
        let names_max = self.limits.names_per_node_max;
        let kept_max = names_max.saturating_sub(self.name_count());
        if let Some(name) = self.earlier.closed(port, entries, kept_max) {
            self.ports.journal.note(Record::PortGone(name));
        }
    }

    /// Whether a port is one of the earlier run's.
    pub(crate) fn is_of_earlier_run(&self, name: &str, pod: Option<&str>) -> bool {
        let known = self.earlier.ports.get(name);
        known.is_some_and(|known| known.as_deref() == pod)
    }

    /// Until when flows that deny stay although nobody knows their names: a run has begun without a journal.
    pub(crate) fn denials_until(&self) -> Option<Timestamp> {
        self.earlier.denials
    }

    /// Whether an earlier run has left a journal in which it had come to its ports.
    pub(crate) fn knows_earlier_run(&self) -> bool {
        !self.earlier.ports.is_empty()
    }

    /// The hash of the rules of a namespace by which the programs of an earlier run open.
    pub(crate) fn earlier_rules(&self, namespace: &str) -> Option<u64> {
        self.earlier.rules.get(namespace).copied()
    }

    /// Forgets the ports of an earlier run that have not come back: all ports were opened. Their pods are gone.
    pub(crate) fn forget_awaited(&mut self) {
        for name in self.earlier.forget_awaited() {
            self.ports.journal.note(Record::PortGone(name));
        }
    }

    /// The first comparison has ended.
    pub(crate) fn start_is_over(&mut self) {
        self.forget_awaited();
        let earlier = &mut self.earlier;
        earlier.is_over = true;
        // By which rules its programs open was decided before.
        (earlier.ports, earlier.rules) = Default::default();
    }

    /// Whether the first comparison has ended.
    pub(super) fn is_start_over(&self) -> bool {
        self.earlier.is_over
    }

    /// The rules by which the kernel opens, for the journal.
    pub(crate) fn journal_mut(&mut self) -> &mut Journal {
        &mut self.ports.journal
    }

    /// Takes out the records of this turn.
    pub(crate) fn take_records(&mut self) -> Vec<Record> {
        let groups = self.groups.take_changed().into_iter();
        let groups = groups.map(|(tag, group)| Record::Group { tag, group });
        groups.chain(self.ports.journal.take()).collect()
    }

    /// The next part of all that lives: the rules, then the groups, then the names of one port after another, then those of
    /// ports that are not there. `None` if it has all of them.
    ///
    /// A name whose flows are not wanted or cannot be written yet is one of them: the rules may not be known, or the
    /// switch may be away.
    pub(crate) fn next_part(&self, parts: &mut Parts) -> Option<Vec<Record>> {
        // A port that has gone is one of the others again, maybe before the place that was reached there. All are given out
        // anew.
        if parts.returned != self.earlier.returned {
            *parts = Parts {
                returned: self.earlier.returned,
                ..Parts::default()
            };
        }
        if !std::mem::replace(&mut parts.has_rules, true) {
            let denials = self.earlier.denials.map(Record::Denials);
            let rules = self.ports.journal.of_rules().into_iter();
            return Some(denials.into_iter().chain(rules).collect());
        }
        if !parts.has_groups {
            let groups = self.groups.behind(parts.group, PART_MAX);
            parts.group = groups.last().map(|(tag, _)| *tag);
            parts.has_groups = groups.len() < PART_MAX;
            let records = groups.into_iter().map(|(tag, group)| Record::Group {
                tag,
                group: Some(group),
            });
            return Some(records.collect());
        }
        let mut records = Vec::new();
        let mut place = match parts.place.take() {
            Some(place) => place,
            None => self.next_place(parts, &mut records)?,
        };
        let has_more = match place.of.clone() {
            PlaceOf::Port(number) => {
                let entries = &self.ports.get(number).entries;
                let at = |index| {
                    let (address, entry) = entries.at(index)?;
                    let names = entry.names.iter();
                    Some((address, names.map(|(name, term)| (name, term.into()))))
                };
                place.go_on(number, entries.len(), at, &mut records)
            }
            PlaceOf::Awaited(name, number) => {
                let awaited = self.earlier.awaited.get(&name);
                let entries = awaited.map_or(&[][..], |awaited| &awaited.entries);
                let at = |index| {
                    let entry: &SavedEntry = entries.get(index)?;
                    let names = entry.names.iter();
                    let term = |saved: &SavedName| saved.term(self.earlier.loaded_at);
                    Some((
                        entry.address,
                        names.map(move |saved| (&saved.name, term(saved))),
                    ))
                };
                place.go_on(number, entries.len(), at, &mut records)
            }
        };
        parts.place = has_more.then_some(place);
        Some(records)
    }

    /// Begins the next port, whose record comes first.
    fn next_place(&self, parts: &mut Parts, to: &mut Vec<Record>) -> Option<Place> {
        if let Some((number, _)) = self.ports.next_after(parts.port) {
            parts.port = Some(number);
            if let Some(Came { name, pod }) = self.earlier.came.get(&number) {
                let (name, pod) = (Arc::clone(name), pod.clone());
                to.push(Record::Port { number, name, pod });
            }
            return Some(Place::before(PlaceOf::Port(number)));
        }
        let last = parts.awaited.as_deref();
        let rest = (last.map_or(Unbounded, Excluded), Unbounded);
        let (name, Awaited { pod, .. }) = self.earlier.awaited.range::<str, _>(rest).next()?;
        parts.awaited = Some(Arc::clone(name));
        let number = PortId(u32::MAX - parts.awaited_count);
        parts.awaited_count += 1;
        let (name, pod) = (Arc::clone(name), pod.clone());
        to.push(Record::Port {
            number,
            name: Arc::clone(&name),
            pod,
        });
        Some(Place::before(PlaceOf::Awaited(name, number)))
    }
}
