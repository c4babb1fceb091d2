//! The ports, each with its entries and limits, and how much all ports have together.
//!
//! [`CachedPorts::change`] is the only way to change a port. It keeps the totals of the node the sums over the ports.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
};

use crate::{
    cache::{
        candidates::Candidates,
        ended::{EndedName, FailedConnection, FailedQuestion, Latest},
        entries::{Entries, Entry, Sizes},
        journal::{Journal, Record},
    },
    installed::Place,
    policy::refused::Translation,
    tools::shares::Shares,
    values::{
        ids::{PortId, SandboxId},
        limits::Limit,
    },
};

/// A port, and an address that it was told.
pub(super) type Key = (PortId, IpAddr);

/// The DNS answers to one port.
#[derive(Debug, Default)]
pub(crate) struct CachedPort {
    /// The entries of its addresses.
    pub(crate) entries: Entries,
    /// Who gives way among the entries.
    pub(super) candidates: Candidates,
    /// The limits whose reports were given out.
    pub(crate) limits_reported: BTreeSet<Limit>,
    /// The last names that have ended.
    pub(crate) ended: Latest<EndedName>,
    /// The last questions that were answered without an address.
    pub(crate) failed: Latest<FailedQuestion>,
    /// The last connections that a DNS server has ended without an answer.
    pub(crate) failed_connections: Latest<FailedConnection>,
}

/// The DNS answers to all ports.
#[derive(Debug, Default)]
pub(super) struct CachedPorts {
    ports: BTreeMap<PortId, CachedPort>,
    /// The sandbox of each port.
    sandboxes: BTreeMap<PortId, SandboxId>,
    /// The ports of each sandbox.
    by_sandbox: BTreeMap<SandboxId, BTreeSet<PortId>>,
    totals: Totals,
    /// The records of this turn.
    pub(super) journal: Journal,
    translation: Translation,
    /// The answers to a port that does not exist: none.
    nothing: CachedPort,
}

/// How much all ports have together.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// The number of names of each pod that a rule denies.
    pub(super) denied_names: Shares<SandboxId>,
    /// The number of all other names of each pod.
    pub(super) other_names: Shares<SandboxId>,
    /// The number of each pod's addresses to which only established connections pass.
    pub(super) ended: Shares<SandboxId>,
    /// The number of flows that entries have of their own.
    pub(super) flows: usize,
}

impl CachedPorts {
    /// There are none.
    pub(super) fn new(translation: Translation) -> Self {
        Self {
            translation,
            ..Self::default()
        }
    }

    /// Adds a port of a sandbox.
    pub(super) fn open(&mut self, id: PortId, sandbox: SandboxId) {
        let port = CachedPort {
            entries: Entries::new(self.translation.clone()),
            ..CachedPort::default()
        };
        self.ports.insert(id, port);
        self.enter(id, sandbox);
    }

    /// Removes a port.
    pub(super) fn close(&mut self, id: PortId) -> Option<CachedPort> {
        self.leave(id);
        self.ports.remove(&id)
    }

    /// A port has another sandbox.
    pub(super) fn regroup(&mut self, id: PortId, sandbox: SandboxId) {
        if self.contains(id) {
            self.leave(id);
            self.enter(id, sandbox);
        }
    }

    fn enter(&mut self, id: PortId, sandbox: SandboxId) {
        let sizes = self.get(id).entries.sizes();
        self.sandboxes.insert(id, sandbox);
        self.by_sandbox.entry(sandbox).or_default().insert(id);
        self.totals.count(sandbox, Sizes::default(), sizes);
    }

    fn leave(&mut self, id: PortId) {
        let sizes = self.get(id).entries.sizes();
        let Some(sandbox) = self.sandboxes.remove(&id) else {
            return;
        };
        self.totals.count(sandbox, sizes, Sizes::default());
        if let Some(ports) = self.by_sandbox.get_mut(&sandbox) {
            ports.remove(&id);
            if ports.is_empty() {
                self.by_sandbox.remove(&sandbox);
            }
        }
    }

    /// The sandbox of a port, while the port is there.
    pub(super) fn sandbox(&self, id: PortId) -> Option<SandboxId> {
        self.sandboxes.get(&id).copied()
    }

    /// The port of a pod that has most by this measure, the first of several.
    pub(super) fn largest_of(
        &self,
        sandbox: SandboxId,
        size: impl Fn(Sizes) -> usize,
    ) -> Option<PortId> {
        let ports = self.by_sandbox.get(&sandbox)?.iter();
        let size = |id: PortId| size(self.get(id).entries.sizes());
        ports.copied().max_by_key(|id| (size(*id), Reverse(*id)))
    }

    /// Whether a port is there.
    pub(super) fn contains(&self, id: PortId) -> bool {
        self.ports.contains_key(&id)
    }

    /// A port, with nothing if it is not there.
    pub(super) fn get(&self, id: PortId) -> &CachedPort {
        self.ports.get(&id).unwrap_or(&self.nothing)
    }

    /// The first port behind this one.
    pub(super) fn next_after(&self, id: Option<PortId>) -> Option<(PortId, &CachedPort)> {
        let rest = (id.map_or(Unbounded, Excluded), Unbounded);
        self.ports.range(rest).next().map(|(id, port)| (*id, port))
    }

    /// Changes a port, if it is there.
    pub(super) fn change<T: Default>(
        &mut self,
        id: PortId,
        change: impl FnOnce(&mut CachedPort) -> T,
    ) -> T {
        let Some(port) = self.ports.get_mut(&id) else {
            return T::default();
        };
        let before = port.entries.sizes();
        let result = change(port);
        let after = port.entries.sizes();
        for (address, name, term) in port.entries.take_changed() {
            self.journal.note(match term {
                Some(term) => Record::Name {
                    port: id,
                    address,
                    name,
                    term,
                },
                None => Record::NameGone {
                    port: id,
                    address,
                    name,
                },
            });
        }
        if after != before
            && let Some(sandbox) = self.sandboxes.get(&id)
        {
            self.totals.count(*sandbox, before, after);
        }
        result
    }

    /// Changes the flows or the mark of an address, if the port has an entry for it.
    pub(super) fn enforce<T: Default>(
        &mut self,
        key: Key,
        change: impl FnOnce(&mut Entry, Place) -> T,
    ) -> T {
        self.change(key.0, |port| {
            port.entries.enforce(key.1, |entry| {
                let place = entry.place(key);
                change(entry, place)
            })
        })
    }

    /// An entry, to change fields that no index or total depends on.
    pub(super) fn entry_mut(&mut self, (id, address): Key) -> Option<&mut Entry> {
        self.ports.get_mut(&id)?.entries.get_mut(address)
    }

    /// All of them, likewise.
    pub(super) fn entries_mut(&mut self) -> impl Iterator<Item = (PortId, IpAddr, &mut Entry)> {
        self.ports.iter_mut().flat_map(|(id, port)| {
            let entries = port.entries.iter_mut();
            entries.map(|(address, entry)| (*id, address, entry))
        })
    }

    /// How much all ports have together.
    pub(super) fn totals(&self) -> &Totals {
        &self.totals
    }
}

impl Totals {
    /// A port of the pod has so much now.
    fn count(&mut self, pod: SandboxId, before: Sizes, after: Sizes) {
        let others = |sizes: Sizes| sizes.names - sizes.denied_names;
        self.flows = self.flows + after.flows - before.flows;
        self.denied_names
            .change(pod, before.denied_names, after.denied_names);
        self.other_names.change(pod, others(before), others(after));
        self.ended.change(pod, before.ended, after.ended);
    }

    /// How many names all addresses have.
    pub(super) fn names(&self) -> usize {
        self.denied_names.total() + self.other_names.total()
    }
}

#[cfg(test)]
mod tests;
