//! The entries that an earlier run of the agent has left in its snapshot.
//!
//! An entry of the snapshot is in one place: with its port while the pod is there, else here. It stays here until the
//! flows of the earlier run have been adopted, so that a snapshot has it as well: this run may end before.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use crate::{
    Timestamp,
    cache::{
        entries::{Entries, names::Term},
        snapshot::{SavedEntry, Snapshot},
    },
    values::{ids::PortId, name::DomainName},
};

/// The entries of an earlier run.
#[derive(Debug, Default)]
pub(super) struct EarlierRun {
    /// The entries of the ports that have not come yet, or have gone since, by logical port.
    awaited: BTreeMap<Arc<str>, Vec<SavedEntry>>,
    /// The number of their names. An address without a name counts as one.
    names: usize,
    /// When they were taken over. The time that is left for a name is counted from then on.
    loaded_at: Timestamp,
    /// The ports that are there.
    came: HashMap<PortId, Came>,
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
    /// Whether the snapshot had entries under the port's name.
    is_saved: bool,
}

/// The room that an entry takes.
fn size(entry: &SavedEntry) -> usize {
    entry.names.len().max(1)
}

impl EarlierRun {
    /// Takes over the entries of a snapshot.
    pub(super) fn load(&mut self, entries: Vec<SavedEntry>, now: Timestamp) {
        self.loaded_at = now;
        self.keep(entries, usize::MAX);
    }

    /// A port has come. Returns the answers to its pod: address, name and term.
    pub(super) fn open(
        &mut self,
        port: PortId,
        name: &str,
        pod: Option<&str>,
    ) -> Vec<(IpAddr, DomainName, Term)> {
        let mut saved = self.awaited.remove(name).unwrap_or_default();
        self.names -= saved.iter().map(size).sum::<usize>();
        let came = Came {
            name: name.into(),
            pod: pod.map(Into::into),
            is_saved: !saved.is_empty(),
        };
        self.came.insert(port, came);
        // Another pod under the same name inherits nothing.
        saved.retain(|saved| saved.pod.as_deref() == pod);
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

    /// Whether the snapshot has no pod under the name of a port that has come.
    pub(super) fn lacks_pod_of(&self, port: PortId) -> bool {
        self.came.get(&port).is_some_and(|came| !came.is_saved)
    }

    /// A port is gone, with these entries. During a start, its pod may come back, as when its interface is made anew. Of
    /// pods that are not there, at most `kept_max` names are kept.
    pub(super) fn closed(&mut self, port: PortId, entries: &Entries, kept_max: usize) {
        if let Some(Came { name, pod, .. }) = self.came.remove(&port)
            && !self.is_adopted
        {
            // As in the snapshot, the time that is left for a name is counted from the start on.
            let saved = entries.saved((&name, pod.as_deref()), self.loaded_at);
            self.version += u64::from(!saved.is_empty());
            self.keep(saved, kept_max);
        }
    }

    /// All ports have come: the pods of the others are gone.
    pub(super) fn forget_awaited(&mut self) {
        self.version += u64::from(!self.awaited.is_empty());
        (self.awaited, self.names) = (BTreeMap::new(), 0);
    }

    /// Keeps entries whose ports are not there, as far as there is room.
    fn keep(&mut self, entries: Vec<SavedEntry>, kept_max: usize) {
        for entry in entries {
            if self.names + size(&entry) <= kept_max {
                self.names += size(&entry);
                let of_port = self.awaited.entry(Arc::clone(&entry.port)).or_default();
                of_port.push(entry);
            }
        }
    }

    /// All flows have been adopted, or are being removed.
    pub(super) fn adopted_all(&mut self) {
        self.forget_awaited();
        self.is_adopted = true;
    }

    /// Whether all flows have been adopted, or are being removed.
    pub(super) fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    /// A number that grows whenever a snapshot would differ.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// The next part of a snapshot: the names of one of the ports that are not there.
    pub(super) fn next_part(&self, snapshot: &mut Snapshot) -> Option<Vec<SavedEntry>> {
        let age = snapshot.at.since(self.loaded_at);
        let last = snapshot.awaited.as_deref();
        let rest = (last.map_or(Unbounded, Excluded), Unbounded);
        let (port, entries) = self.awaited.range::<str, _>(rest).next()?;
        snapshot.awaited = Some(Arc::clone(port));
        Some(entries.iter().map(|entry| entry.aged(age)).collect())
    }
}
