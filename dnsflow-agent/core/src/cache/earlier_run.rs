//! The state that an earlier run of the agent has left: the entries of its snapshot, and the owners of its flows in
//! the switch.
//!
//! An entry of the snapshot is in one place: with its port once the pod has come back, else here. It stays here until
//! all flows of the earlier run have been adopted or removed, so that a snapshot has it as well. If this run ends
//! before, the next one has to know the owners of the flows.

use std::{
    collections::{BTreeMap, HashSet},
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use crate::{
    Timestamp,
    cache::{
        entries::names::Term,
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
    /// The rules of its namespaces.
    rules: BTreeMap<Arc<str>, Arc<[RuleInPlace]>>,
    /// The entries of the ports that have not come yet.
    awaited: SavedPorts,
    /// When they were taken over. The time that is left for a name is counted from then on.
    loaded_at: Timestamp,
    /// The entries of pods that are gone, until all flows have been adopted.
    gone: SavedPorts,
    /// Their addresses.
    left_by_gone: HashSet<IpAddr>,
    /// Whose the flows are that are found for the ports that have come.
    former: BTreeMap<PortId, Former>,
    /// Whether all flows have been adopted. Until then, not all rules may be known, and a name of the snapshot
    /// that was denied stays so.
    is_adopted: bool,
    /// The number of changes so far to this part of a snapshot.
    version: u64,
}

/// Whose the flows of an earlier run are that are found for a port, as far as the snapshot says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Former {
    /// The pod's: the snapshot has the pod.
    Same,
    /// Another pod's, which the snapshot has under the port's name.
    Another,
    /// The snapshot has no pod under the port's name. The pod may have come after the snapshot, or have the address of a
    /// pod that is gone.
    Unknown,
}

impl EarlierRun {
    /// Takes over a snapshot.
    pub(super) fn load(&mut self, saved: Saved, now: Timestamp) {
        self.loaded_at = now;
        let rules = saved.rules.into_iter();
        let rules = rules.map(|SavedRules { namespace, rules }| (namespace, rules.into()));
        self.rules = rules.collect();
        for entry in saved.entries {
            let of_port = self.awaited.entry(Arc::clone(&entry.port)).or_default();
            of_port.push(entry);
        }
    }

    /// The rules of a namespace, until all flows have been adopted; `None` if the snapshot does not have the namespace.
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
        let former = match (saved.is_empty(), of_others.is_empty()) {
            (_, false) => Former::Another,
            (true, true) => Former::Unknown,
            (false, true) => Former::Same,
        };
        self.former.insert(port, former);
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
        !self.rules.is_empty() && self.former.get(&port) == Some(&Former::Unknown)
    }

    /// A port is gone.
    pub(super) fn closed(&mut self, port: PortId) {
        self.former.remove(&port);
    }

    /// All ports have come: the pods of the others are gone.
    pub(super) fn forget_awaited(&mut self, gone_max: usize) {
        let awaited = std::mem::take(&mut self.awaited);
        self.note_gone(awaited.into_values().flatten().collect(), gone_max);
    }

    /// Notes that the pods of these entries are gone.
    fn note_gone(&mut self, entries: Vec<SavedEntry>, gone_max: usize) {
        if self.is_adopted || entries.is_empty() {
            return;
        }
        let known: usize = self.gone.values().map(Vec::len).sum();
        let most = gone_max.saturating_sub(known);
        for (place, entry) in entries.into_iter().enumerate() {
            self.left_by_gone.insert(entry.address);
            if place < most {
                let of_port = self.gone.entry(Arc::clone(&entry.port)).or_default();
                of_port.push(entry);
            }
        }
        self.version += 1;
    }

    /// Whether a flow between a port and an address is one of the port's pod.
    pub(super) fn is_own(&self, port: PortId, address: IpAddr) -> bool {
        match self.former.get(&port) {
            Some(Former::Same) => true,
            Some(Former::Another) | None => false,
            Some(Former::Unknown) => !self.left_by_gone.contains(&address),
        }
    }

    /// All flows have been adopted or removed: nothing is left of pods that are gone.
    pub(super) fn adopted_all(&mut self) {
        self.left_by_gone = HashSet::new();
        self.version += u64::from(!self.gone.is_empty());
        self.gone = SavedPorts::new();
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
