//! The state that an earlier run of the agent has left: the entries of its snapshot, and the owners of its flows in
//! the switch. And what pods have left that went in this run.
//!
//! An entry of the snapshot is in one place: with its port while the pod is there, else here. It stays here until the
//! flows of the earlier run have been adopted, or a dump shows that they are gone, so that a snapshot has it as well. If
//! this run ends before, the next one has to know the owners of the flows.
//!
//! The entries of each port that goes come here, too: its flows may be in the switch, and another pod with its address
//! would be taken for their owner, by this run or by the next one. Behind the first comparison, they stay until a dump
//! shows no flow to their addresses that nobody has.

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use crate::{
    Timestamp,
    cache::{
        entries::{Entries, names::Term},
        snapshot::{Saved, SavedEntry, SavedRules, Snapshot},
    },
    policy::plan::RuleInPlace,
    values::{ids::PortId, name::DomainName},
};

/// Entries of ports that are not there, by logical port.
#[derive(Debug, Default)]
struct Kept {
    ports: BTreeMap<Arc<str>, OfPort>,
    /// The number of their names. An address without a name counts as one.
    names: usize,
}

/// The entries of one logical port. They may be of several pods.
#[derive(Debug, Default)]
struct OfPort {
    /// When the last one came.
    at: Timestamp,
    entries: Vec<SavedEntry>,
}

/// Where entries are kept: [`EarlierRun::awaited`] or [`EarlierRun::gone`].
type Place = fn(&mut EarlierRun) -> &mut Kept;

/// The state of an earlier run.
#[derive(Debug, Default)]
pub(super) struct EarlierRun {
    /// The rules of its namespaces, sorted.
    rules: BTreeMap<Arc<str>, Arc<[RuleInPlace]>>,
    /// The entries of the ports that have not come yet, or have gone since.
    awaited: Kept,
    /// When they were taken over. The time that is left for a name is counted from then on.
    loaded_at: Timestamp,
    /// The entries of pods that are gone.
    gone: Kept,
    /// The addresses of the ports and pods that are gone: flows to them may be theirs.
    left: HashSet<IpAddr>,
    /// Whether they had more addresses: any flow may be theirs.
    is_left_cut: bool,
    /// Those of the addresses to which the dump under way shows a flow that nobody has.
    shown: HashSet<IpAddr>,
    /// The ports that are there.
    came: BTreeMap<PortId, Came>,
    /// Whether all flows have been adopted. Until then, not all rules may be known, and a name of the snapshot
    /// that was denied stays so.
    is_adopted: bool,
    /// The number of changes so far to this part of a snapshot.
    version: u64,
}

/// A port that is there.
#[derive(Debug)]
struct Came {
    /// The logical port.
    name: Box<str>,
    /// The pod's UID.
    pod: Option<Box<str>>,
    /// Whose the flows are that are found for it.
    former: Former,
}

/// Whose the flows of an earlier run are that are found for a port, as far as the snapshot says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Former {
    /// The pod's: the snapshot has the pod.
    Same,
    /// The snapshot has the pod, which came behind the flows ([`SavedEntry::is_late`]). It may have the address of a pod
    /// that is gone.
    Late,
    /// Another pod's, which the snapshot has under the port's name.
    Another,
    /// The snapshot has no pod under the port's name. The pod may have come after the snapshot, or have the address of a
    /// pod that is gone.
    Unknown,
}

impl Kept {
    fn add(&mut self, entry: SavedEntry, at: Timestamp) {
        self.names += size(&entry);
        let of_port = self.ports.entry(Arc::clone(&entry.port)).or_default();
        of_port.at = at;
        of_port.entries.push(entry);
    }

    /// Takes the entries of a port out.
    fn take(&mut self, port: &str) -> Vec<SavedEntry> {
        let of_port = self.ports.remove(port).unwrap_or_default();
        self.names -= of_port.entries.iter().map(size).sum::<usize>();
        of_port.entries
    }

    /// The entries of a port.
    fn of(&self, port: &str) -> &[SavedEntry] {
        let of_port = self.ports.get(port);
        of_port.map_or(&[], |of_port| &of_port.entries)
    }

    /// All of them.
    fn iter(&self) -> impl Iterator<Item = &SavedEntry> {
        self.ports.values().flat_map(|of_port| &of_port.entries)
    }

    fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// Forgets those that came before `since`, unless they stay.
    fn retain(&mut self, since: Timestamp, stays: impl Fn(&SavedEntry) -> bool) {
        self.ports.retain(|_, OfPort { at, entries }| {
            entries.retain(|entry| *at >= since || stays(entry));
            !entries.is_empty()
        });
        self.names = self.iter().map(size).sum();
    }
}

/// The room that an entry takes.
fn size(entry: &SavedEntry) -> usize {
    entry.names.len().max(1)
}

impl EarlierRun {
    /// Takes over a snapshot.
    pub(super) fn load(&mut self, saved: Saved, now: Timestamp) {
        self.loaded_at = now;
        let rules = saved.rules.into_iter();
        let rules = rules.map(
            |SavedRules {
                 namespace,
                 mut rules,
             }| {
                rules.sort_unstable();
                (namespace, rules.into())
            },
        );
        self.rules = rules.collect();
        for entry in saved.entries {
            self.awaited.add(entry, now);
        }
    }

    /// The rules of a namespace, sorted, until all flows have been adopted; `None` if the snapshot does not have the namespace.
    pub(super) fn rules(&self, namespace: &str) -> Option<Arc<[RuleInPlace]>> {
        self.rules.get(namespace).cloned()
    }

    /// The rules, as the next snapshot has them until all flows have been adopted.
    pub(super) fn saved_rules(&self) -> Vec<SavedRules> {
        let rules = self.rules.iter().map(|(namespace, rules)| SavedRules {
            namespace: Arc::clone(namespace),
            rules: rules.to_vec(),
        });
        rules.collect()
    }

    /// A port has come. Returns the answers to its pod: address, name and term. At most `kept_max` names of pods that are
    /// not there are kept.
    pub(super) fn open(
        &mut self,
        port: PortId,
        name: &str,
        pod: Option<&str>,
        kept_max: usize,
    ) -> Vec<(IpAddr, DomainName, Term)> {
        let saved = self.awaited.take(name);
        let is_same = |saved: &SavedEntry| saved.pod.as_deref() == pod;
        let (saved, of_others): (Vec<_>, Vec<_>) = saved.into_iter().partition(is_same);
        let gone = self.gone.of(name).iter();
        let has_others = gone.chain(&of_others).any(|saved| !is_same(saved));
        let former = match saved.first() {
            _ if has_others => Former::Another,
            None if self.is_adopted && self.gone.is_empty() => Former::Same,
            None => Former::Unknown,
            Some(saved) if saved.is_late => Former::Late,
            Some(_) => Former::Same,
        };
        let came = Came {
            name: name.into(),
            pod: pod.map(Into::into),
            former,
        };
        self.came.insert(port, came);
        self.keep(of_others, self.loaded_at, kept_max, |run| &mut run.gone);
        let loaded_at = self.loaded_at;
        let names = saved.into_iter().flat_map(|entry| {
            let names = entry.names.into_iter();
            names.map(move |saved| {
                let term = Term::of_saved(&saved, loaded_at);
                (entry.address, saved.name, term)
            })
        });
        names.collect()
    }

    /// Whether there is a snapshot with rules, and it has no pod under the name of a port that has come.
    pub(super) fn lacks_pod_of(&self, port: PortId) -> bool {
        !self.rules.is_empty() && self.former(port) == Some(Former::Unknown)
    }

    fn former(&self, port: PortId) -> Option<Former> {
        self.came.get(&port).map(|came| came.former)
    }

    /// Whether the pod of a port has come behind flows in the switch that nobody has.
    pub(super) fn is_late(&self, port: PortId) -> bool {
        let former = self.former(port);
        let may_be_left = !self.is_adopted || !self.gone.is_empty();
        may_be_left && former.is_some_and(|former| former != Former::Same)
    }

    /// A port is gone, with these entries. During a start, its pod may come back, as when its interface is made anew.
    /// Until then another pod may have its address.
    pub(super) fn closed(
        &mut self,
        port: PortId,
        entries: &Entries,
        now: Timestamp,
        kept_max: usize,
    ) {
        let is_late = self.is_late(port);
        if let Some(Came { name, pod, .. }) = self.came.remove(&port) {
            // As in the snapshot, the time that is left for a name is counted from the start on.
            let saved = entries.saved((&name, pod.as_deref(), is_late), self.loaded_at);
            let place: Place = match self.is_adopted {
                true => |run| &mut run.gone,
                false => |run| &mut run.awaited,
            };
            self.keep(saved, now, kept_max, place);
        }
    }

    /// All ports have come: the pods of the others are gone.
    pub(super) fn forget_awaited(&mut self, kept_max: usize) {
        let awaited = std::mem::take(&mut self.awaited).ports.into_values();
        let entries = awaited.flat_map(|of_port| of_port.entries).collect();
        self.keep(entries, self.loaded_at, kept_max, |run| &mut run.gone);
    }

    /// Keeps entries, whose ports are not there.
    fn keep(&mut self, entries: Vec<SavedEntry>, at: Timestamp, kept_max: usize, place: Place) {
        self.version += u64::from(!entries.is_empty());
        for entry in entries {
            if self.awaited.names + self.gone.names + size(&entry) > kept_max {
                self.is_left_cut = true;
                continue;
            }
            self.left.insert(entry.address);
            place(self).add(entry, at);
        }
    }

    /// A dump shows a flow to this address that nobody has.
    pub(super) fn shown(&mut self, address: IpAddr) {
        if self.left.contains(&address) {
            self.shown.insert(address);
        }
    }

    /// A dump that has begun then is complete: what pods that had gone before have left, it has shown.
    pub(super) fn compared(&mut self, since: Timestamp) {
        let shown = std::mem::take(&mut self.shown);
        if !self.is_adopted || self.gone.is_empty() {
            return;
        }
        let before = self.gone.names;
        self.gone
            .retain(since, |entry| shown.contains(&entry.address));
        self.version += u64::from(self.gone.names != before);
        self.left = self.gone.iter().map(|entry| entry.address).collect();
        if self.gone.is_empty() {
            self.nothing_is_left();
        }
    }

    /// All flows in the switch are those of the pods that are there.
    fn nothing_is_left(&mut self) {
        (self.awaited, self.gone) = (Kept::default(), Kept::default());
        (self.left, self.is_left_cut) = (HashSet::new(), false);
        for came in self.came.values_mut() {
            came.former = Former::Same;
        }
    }

    /// Whether a flow between a port and an address is one of the port's pod.
    pub(super) fn is_own(&self, port: PortId, address: IpAddr) -> bool {
        match self.former(port) {
            Some(Former::Same) => true,
            Some(Former::Another) | None => false,
            Some(Former::Late | Former::Unknown) => {
                !self.is_left_cut && !self.left.contains(&address)
            }
        }
    }

    /// All flows have been adopted, or are being removed. A dump that begins later shows what pods have left.
    pub(super) fn adopted_all(&mut self, now: Timestamp) {
        self.version += u64::from(!self.awaited.is_empty() || !self.gone.is_empty());
        for of_port in self.gone.ports.values_mut() {
            of_port.at = now;
        }
        self.is_adopted = true;
        self.rules.clear();
        if self.gone.is_empty() {
            self.nothing_is_left();
        }
    }

    /// Whether all flows have been adopted, or are being removed.
    pub(super) fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    /// A number that grows whenever a snapshot would differ.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// The next part of a snapshot: the names of one of the ports and pods that are not there.
    pub(super) fn next_part(&self, snapshot: &mut Snapshot) -> Option<Vec<SavedEntry>> {
        let Snapshot {
            at, awaited, gone, ..
        } = snapshot;
        let age = at.since(self.loaded_at);
        let not_there = [(&self.awaited, awaited), (&self.gone, gone)];
        not_there.into_iter().find_map(|(ports, last)| {
            let rest = (last.as_deref().map_or(Unbounded, Excluded), Unbounded);
            let (port, of_port) = ports.ports.range::<str, _>(rest).next()?;
            *last = Some(Arc::clone(port));
            let entries = of_port.entries.iter();
            Some(entries.map(|entry| entry.aged(age)).collect())
        })
    }
}
