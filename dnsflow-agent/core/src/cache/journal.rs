//! The journal: what pods were told, for the next agent.
//!
//! Flows and marks outlive the agent, and names decide over them. So each change of a name is a [`Record`], which is
//! given out before the commands that follow from the change, and is written before they are carried out. The next
//! agent folds the records ([`Folding`]) and so knows each name behind a flow or a mark that it finds.
//!
//! The records of all that lives are given out in parts ([`Parts`]): with them a new file begins.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use crate::{
    Timestamp,
    values::{flow::Tag, ids::PortId, limits::TERM_SLOT_S, name::DomainName},
};

pub use crate::policy::plan::{Patterns, SavedGroup};

/// A change that the next agent has to know.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Record {
    /// A port has this number from now on.
    Port {
        /// The number.
        number: PortId,
        /// The logical port (`iface-id`).
        name: Arc<str>,
        /// The pod's UID (`iface-id-ver`).
        pod: Option<Arc<str>>,
    },
    /// The port with this name is gone, with all of its names.
    PortGone(Arc<str>),
    /// An address has a name for this time.
    Name {
        /// The port that was told.
        port: PortId,
        /// The address.
        address: IpAddr,
        /// The name.
        name: DomainName,
        /// For how long.
        term: RecordedTerm,
    },
    /// An address has a name no longer.
    NameGone {
        /// The port that was told.
        port: PortId,
        /// The address.
        address: IpAddr,
        /// The name.
        name: DomainName,
    },
    /// A tag stands for this group from now on; without one, for none.
    Group {
        /// The tag.
        tag: Tag,
        /// The group.
        group: Option<SavedGroup>,
    },
    /// There was no journal: flows that deny, whose names nobody knows, stay until then.
    Denials(Timestamp),
    /// The kernel opens by rules with this hash in a namespace; `None` while an edit is under way.
    Rules {
        /// The namespace.
        namespace: Arc<str>,
        /// The hash of its rules in their places.
        hash: Option<u64>,
    },
}

/// How long a name counts for an address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RecordedTerm {
    /// A name that no rule denies counts until then.
    pub until: Timestamp,
    /// A name that a rule denies counts until then at least.
    pub deny_until: Timestamp,
    /// Whether a rule denies the name.
    pub is_denied: bool,
    /// Whether the name's own time is over: it lets established connections pass, and no others.
    pub is_ended: bool,
}

impl RecordedTerm {
    /// Whether a term is recorded as this one: each answer prolongs terms, and is not worth a record.
    pub(crate) fn is_alike(self, other: Self) -> bool {
        let slot = |time: Timestamp| time.since(Timestamp::default()).as_secs() / TERM_SLOT_S;
        let state = |term: Self| (term.is_denied, term.is_ended);
        let of = |term: Self| (slot(term.until), slot(term.deny_until), state(term));
        of(self) == of(other)
    }
}

/// What an earlier run has left.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Saved {
    /// The hashes of its rules, by namespace.
    pub rules: BTreeMap<Arc<str>, u64>,
    /// Its ports, with the UIDs of their pods.
    pub ports: BTreeMap<Arc<str>, Option<Arc<str>>>,
    /// Its groups, by their tags.
    pub groups: BTreeMap<Tag, SavedGroup>,
    /// Until when flows that deny stay although nobody knows their names.
    pub denials: Option<Timestamp>,
    /// Its entries.
    pub entries: Vec<SavedEntry>,
}

/// The names of one address of one port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedEntry {
    /// The logical port (`iface-id`), one of [`Saved::ports`]. The entries of a port share the text.
    pub port: Arc<str>,
    /// The address.
    pub address: IpAddr,
    /// The names that lead to it.
    pub names: Vec<SavedName>,
}

/// A name, and the time for which it still counts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedName {
    /// The name.
    pub name: DomainName,
    /// The time that is left for the name.
    pub rest: Duration,
    /// The least time that is left if a rule denies the name.
    pub deny_rest: Duration,
    /// Whether a rule denies the name.
    pub is_denied: bool,
    /// Whether its own time is over.
    pub is_ended: bool,
}

impl SavedName {
    /// The term of a name that was taken over at `loaded_at`.
    pub(crate) fn term(&self, loaded_at: Timestamp) -> RecordedTerm {
        RecordedTerm {
            until: loaded_at + self.rest,
            deny_until: loaded_at + self.deny_rest,
            is_denied: self.is_denied,
            is_ended: self.is_ended,
        }
    }
}

/// The records so far, put together.
#[derive(Debug, Default)]
pub struct Folding {
    names: HashMap<PortId, Arc<str>>,
    ports: BTreeMap<Arc<str>, FoldedPort>,
    rules: BTreeMap<Arc<str>, u64>,
    groups: BTreeMap<Tag, SavedGroup>,
    denials: Option<Timestamp>,
}

/// What a port was told.
#[derive(Debug)]
struct FoldedPort {
    pod: Option<Arc<str>>,
    terms: BTreeMap<(IpAddr, DomainName), RecordedTerm>,
}

impl Folding {
    /// Takes the next record. One about a port without a number is about nothing that is known.
    pub fn take(&mut self, record: Record) {
        match record {
            Record::Port { number, name, pod } => {
                self.names.insert(number, Arc::clone(&name));
                let port = self.ports.entry(name).or_insert_with(|| FoldedPort {
                    pod: None,
                    terms: BTreeMap::new(),
                });
                // Another pod under the same name inherits nothing.
                if port.pod != pod {
                    port.terms.clear();
                    port.pod = pod;
                }
            }
            Record::PortGone(name) => {
                self.ports.remove(&name);
            }
            Record::Name {
                port,
                address,
                name,
                term,
            } => {
                if let Some(port) = self.port(port) {
                    port.terms.insert((address, name), term);
                }
            }
            Record::NameGone {
                port,
                address,
                name,
            } => {
                if let Some(port) = self.port(port) {
                    port.terms.remove(&(address, name));
                }
            }
            Record::Group { tag, group } => match group {
                Some(group) => drop(self.groups.insert(tag, group)),
                None => drop(self.groups.remove(&tag)),
            },
            Record::Denials(until) => self.denials = Some(until),
            Record::Rules { namespace, hash } => match hash {
                Some(hash) => drop(self.rules.insert(namespace, hash)),
                None => drop(self.rules.remove(&namespace)),
            },
        }
    }

    fn port(&mut self, number: PortId) -> Option<&mut FoldedPort> {
        self.ports.get_mut(self.names.get(&number)?)
    }

    /// What has been left, at this time.
    pub fn end(self, now: Timestamp) -> Saved {
        let mut entries: Vec<SavedEntry> = Vec::new();
        let ports = self.ports.iter();
        let ports = ports.map(|(name, port)| (Arc::clone(name), port.pod.clone()));
        let ports = ports.collect();
        for (port, FoldedPort { terms, .. }) in self.ports {
            for ((address, name), term) in terms {
                let name = SavedName {
                    name,
                    rest: term.until.since(now),
                    deny_rest: term.deny_until.since(now),
                    is_denied: term.is_denied,
                    is_ended: term.is_ended,
                };
                match entries.last_mut() {
                    Some(entry) if entry.port == port && entry.address == address => {
                        entry.names.push(name);
                    }
                    _ => entries.push(SavedEntry {
                        port: Arc::clone(&port),
                        address,
                        names: vec![name],
                    }),
                }
            }
        }
        Saved {
            rules: self.rules,
            ports,
            groups: self.groups,
            denials: self.denials,
            entries,
        }
    }
}

/// The parts of all that lives, as far as they were given out ([`Engine::next_part`]).
///
/// [`Engine::next_part`]: crate::engine::Engine::next_part
#[derive(Debug, Default)]
pub struct Parts {
    /// Whether the rules were given out.
    pub(crate) has_rules: bool,
    /// Whether the groups were.
    pub(crate) has_groups: bool,
    /// The last group that was given out, if any.
    pub(crate) group: Option<Tag>,
    /// The last port that was begun, if any. A port that comes meanwhile has a greater number.
    pub(crate) port: Option<PortId>,
    /// The last of the ports that have not come yet, if any was begun.
    pub(crate) awaited: Option<Arc<str>>,
    /// How many of these were begun. They have numbers that no port gets.
    pub(crate) awaited_count: u32,
    /// Where the port that was begun last goes on.
    pub(crate) place: Option<Place>,
    /// How many ports had become awaited ones again when the first part was given out.
    pub(crate) returned: u32,
}

/// The records of a part at most: a turn of the hot thread writes one part.
pub(crate) const PART_MAX: usize = if cfg!(test) { 3 } else { 256 };

/// How far the names of a port were given out.
///
/// Addresses are given out from the last one to the first, and the names of an address in their order. A change meanwhile
/// has a record of its own. One that goes leaves its place to the last one, which was given out already, and one that
/// comes is the last one: so none is left out.
#[derive(Debug)]
pub(crate) struct Place {
    /// The port.
    pub(crate) of: PlaceOf,
    /// Of the addresses, so many are left.
    left: usize,
    /// The address and the name that were given out last, if that address has further ones.
    last: Option<(IpAddr, DomainName)>,
}

/// A port whose names are given out.
#[derive(Clone, Debug)]
pub(crate) enum PlaceOf {
    /// One that is there.
    Port(PortId),
    /// One that is not, by its name and the number that it has here.
    Awaited(Arc<str>, PortId),
}

impl Place {
    /// Before the first name.
    pub(crate) fn before(of: PlaceOf) -> Self {
        Self {
            of,
            left: usize::MAX,
            last: None,
        }
    }

    /// Adds the next names to these records, of so many addresses, which `at` gives. Returns whether there are more.
    pub(crate) fn go_on<'n, N: Iterator<Item = (&'n DomainName, RecordedTerm)>>(
        &mut self,
        port: PortId,
        len: usize,
        at: impl Fn(usize) -> Option<(IpAddr, N)>,
        to: &mut Vec<Record>,
    ) -> bool {
        self.left = self.left.min(len);
        while let Some((address, names)) = self.left.checked_sub(1).and_then(&at) {
            let last = self.last.take().filter(|(of, _)| *of == address);
            let last = last.as_ref().map(|(_, name)| name);
            let mut given = last;
            for (name, term) in names.skip_while(|(name, _)| last.is_some_and(|last| *name <= last))
            {
                if to.len() >= PART_MAX {
                    self.last = given.map(|name| (address, name.clone()));
                    return true;
                }
                given = Some(name);
                to.push(Record::Name {
                    port,
                    address,
                    name: name.clone(),
                    term,
                });
            }
            self.left -= 1;
        }
        false
    }
}

/// The records of a turn, and the facts that they are made of.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    records: Vec<Record>,
    /// The rules of namespaces.
    rules: BTreeMap<Arc<str>, RecordedRules>,
}

/// The rules of a namespace.
#[derive(Debug)]
enum RecordedRules {
    /// They have this hash. They are those of this version, if they are of this run.
    Hash(u64, Option<u64>),
    /// They have changed when so many comparisons had ended.
    Changed(u32),
}

impl Journal {
    /// There is no record yet. An earlier run has left these hashes.
    pub(crate) fn of(hashes: &BTreeMap<Arc<str>, u64>) -> Self {
        let rules = hashes.iter();
        let rules = rules.map(|(namespace, hash)| {
            let rules = RecordedRules::Hash(*hash, None);
            (Arc::clone(namespace), rules)
        });
        Self {
            records: Vec::new(),
            rules: rules.collect(),
        }
    }

    /// A record of this turn.
    pub(crate) fn note(&mut self, record: Record) {
        self.records.push(record);
    }

    /// The rules of a namespace may be others, and so many comparisons have ended: until the kernel is told, nobody knows
    /// by which ones it opens.
    pub(crate) fn rules_change(&mut self, namespace: &str, comparisons: u32) {
        let changed = RecordedRules::Changed(comparisons);
        match self.rules.get_mut(namespace) {
            Some(RecordedRules::Changed(known)) => *known = comparisons,
            Some(rules @ RecordedRules::Hash(..)) => {
                *rules = changed;
                self.note(Record::Rules {
                    namespace: namespace.into(),
                    hash: None,
                });
            }
            None => drop(self.rules.insert(namespace.into(), changed)),
        }
    }

    /// So many comparisons have ended: the kernel opens by rules of this version in a namespace, if one has begun since
    /// they have changed.
    pub(crate) fn rules_are_in_force(
        &mut self,
        namespace: &str,
        (version, comparisons): (u64, u32),
        hash: impl FnOnce() -> u64,
    ) {
        let known = match self.rules.get(namespace) {
            Some(RecordedRules::Hash(_, Some(known))) if *known == version => return,
            // The first one that ends may have begun before.
            Some(RecordedRules::Changed(changed)) if comparisons < changed + 2 => return,
            Some(RecordedRules::Hash(hash, _)) => Some(*hash),
            Some(RecordedRules::Changed(_)) | None => None,
        };
        let hash = hash();
        let namespace: Arc<str> = namespace.into();
        let rules = RecordedRules::Hash(hash, Some(version));
        self.rules.insert(Arc::clone(&namespace), rules);
        if known != Some(hash) {
            self.note(Record::Rules {
                namespace,
                hash: Some(hash),
            });
        }
    }

    /// Forgets the rules of all other namespaces: they have no pod here.
    pub(crate) fn keep_rules(&mut self, stay: &BTreeSet<&str>) {
        let gone = self
            .rules
            .extract_if(.., |namespace, _| !stay.contains(&**namespace));
        for (namespace, rules) in gone {
            if matches!(rules, RecordedRules::Hash(..)) {
                self.records.push(Record::Rules {
                    namespace,
                    hash: None,
                });
            }
        }
    }

    /// The records of all rules.
    pub(crate) fn of_rules(&self) -> Vec<Record> {
        let rules = self.rules.iter();
        let rules = rules.filter_map(|(namespace, rules)| match rules {
            RecordedRules::Hash(hash, _) => Some(Record::Rules {
                namespace: Arc::clone(namespace),
                hash: Some(*hash),
            }),
            RecordedRules::Changed(_) => None,
        });
        rules.collect()
    }

    /// Takes the records out.
    pub(crate) fn take(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.records)
    }
}

#[cfg(test)]
mod tests;
