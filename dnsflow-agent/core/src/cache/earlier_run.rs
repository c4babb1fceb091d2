//! The state that an earlier run of the agent has left: the entries of its snapshot, and the owners of its flows in
//! the switch.
//!
//! An entry of the snapshot is in one place: with its port while the pod is there, else here. It stays here until
//! all flows of the earlier run have been adopted or removed, so that a snapshot has it as well. If this run ends
//! before, the next one has to know the owners of the flows. Until then the entries of each port that goes come here:
//! its flows may be in the switch, where another pod with its address would be taken for their owner.

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

/// Saved entries by logical port.
type SavedPorts = BTreeMap<Arc<str>, Vec<SavedEntry>>;

/// The state of an earlier run.
#[derive(Debug, Default)]
pub(super) struct EarlierRun {
    /// The rules of its namespaces, sorted.
    rules: BTreeMap<Arc<str>, Arc<[RuleInPlace]>>,
    /// The entries of the ports that have not come yet, or have gone since.
    awaited: SavedPorts,
    /// When they were taken over. The time that is left for a name is counted from then on.
    loaded_at: Timestamp,
    /// The entries of pods that are gone, until all flows have been adopted.
    gone: SavedPorts,
    /// The addresses of the ports and pods that are gone: flows to them may be theirs.
    left: HashSet<IpAddr>,
    /// Whether they had more addresses: any flow may be theirs.
    is_left_cut: bool,
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

/// The number of entries.
fn count(ports: &SavedPorts) -> usize {
    ports.values().map(Vec::len).sum()
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
            let of_port = self.awaited.entry(Arc::clone(&entry.port)).or_default();
            of_port.push(entry);
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

    /// A port has come. Returns the answers to its pod: address, name and term. At most `gone_max` entries of pods
    /// that are gone are kept.
    pub(super) fn open(
        &mut self,
        port: PortId,
        name: &str,
        pod: Option<&str>,
        gone_max: usize,
    ) -> Vec<(IpAddr, DomainName, Term)> {
        let saved = self.awaited.remove(name).unwrap_or_default();
        let is_same = |saved: &SavedEntry| saved.pod.as_deref() == pod;
        let (saved, of_others): (Vec<_>, Vec<_>) = saved.into_iter().partition(is_same);
        let gone = self.gone.get(name).into_iter().flatten();
        let has_others = gone.chain(&of_others).any(|saved| !is_same(saved));
        let former = match saved.first() {
            _ if has_others => Former::Another,
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
        self.note_gone(of_others, gone_max);
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

    /// Whether the pod of a port has come behind the flows that may be adopted.
    pub(super) fn is_late(&self, port: PortId) -> bool {
        let former = self.former(port);
        !self.is_adopted && former.is_some_and(|former| former != Former::Same)
    }

    /// A port is gone, with these entries. Its pod may come back, as when its interface is made anew. Until then another
    /// pod may have its address.
    pub(super) fn closed(&mut self, port: PortId, entries: &Entries, kept_max: usize) {
        let is_late = self.is_late(port);
        let came = self.came.remove(&port);
        let Some(Came { name, pod, .. }) = came.filter(|_| !self.is_adopted) else {
            return;
        };
        // As in the snapshot, the time that is left for a name is counted from the start on.
        let saved = entries.saved((&name, pod.as_deref(), is_late), self.loaded_at);
        let kept = count(&self.awaited) + count(&self.gone);
        self.keep(saved, kept_max.saturating_sub(kept), |run| &mut run.awaited);
    }

    /// All ports have come: the pods of the others are gone.
    pub(super) fn forget_awaited(&mut self, gone_max: usize) {
        let awaited = std::mem::take(&mut self.awaited);
        self.note_gone(awaited.into_values().flatten().collect(), gone_max);
    }

    /// Notes that the pods of these entries are gone.
    fn note_gone(&mut self, entries: Vec<SavedEntry>, gone_max: usize) {
        if !self.is_adopted {
            let room = gone_max.saturating_sub(count(&self.gone));
            self.keep(entries, room, |run| &mut run.gone);
        }
    }

    /// Keeps so many of these entries, whose ports are not there, among others of the kind.
    fn keep(
        &mut self,
        entries: Vec<SavedEntry>,
        room: usize,
        others: impl Fn(&mut Self) -> &mut SavedPorts,
    ) {
        self.version += u64::from(!entries.is_empty());
        self.is_left_cut |= entries.len() > room;
        for entry in entries.into_iter().take(room) {
            self.left.insert(entry.address);
            let of_port = others(self).entry(Arc::clone(&entry.port)).or_default();
            of_port.push(entry);
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

    /// All flows have been adopted or removed: nothing is left of pods that are gone.
    pub(super) fn adopted_all(&mut self) {
        self.left = HashSet::new();
        let kept = [&mut self.awaited, &mut self.gone].map(std::mem::take);
        self.version += u64::from(kept.iter().any(|ports| !ports.is_empty()));
        self.is_adopted = true;
        self.rules.clear();
    }

    /// Whether all flows have been adopted or removed.
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
            let (port, entries) = ports.range::<str, _>(rest).next()?;
            *last = Some(Arc::clone(port));
            Some(entries.iter().map(|entry| entry.aged(age)).collect())
        })
    }
}
