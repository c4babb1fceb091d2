//! The ports, each with its entries and limits, and how much all ports have together.
//!
//! [`CachedPorts::change`] is the only way to change a port. It keeps the totals of the node the sums over the ports.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
};

use crate::{
    cache::{
        candidates::Candidates,
        ended::EndedNames,
        entries::{Entries, Entry, Sizes},
    },
    installed::Place,
    tools::shares::Shares,
    values::{ids::PortId, limits::Limit},
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
    pub(crate) ended: EndedNames,
}

/// The DNS answers to all ports.
#[derive(Debug, Default)]
pub(super) struct CachedPorts {
    ports: BTreeMap<PortId, CachedPort>,
    totals: Totals,
    /// The answers to a port that does not exist: none.
    nothing: CachedPort,
}

/// How much all ports have together.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// The number of names of each port that a rule denies.
    pub(super) denied_names: Shares<PortId>,
    /// The number of all other names of each port.
    pub(super) other_names: Shares<PortId>,
    /// The number of flows that entries have of their own.
    pub(super) flows: usize,
    /// Those of them that have addresses with more than there is always room for ([`Sizes::flows_of_large`]).
    pub(super) flows_of_large: usize,
}

impl CachedPorts {
    /// Adds a port.
    pub(super) fn open(&mut self, id: PortId) {
        self.ports.insert(id, CachedPort::default());
    }

    /// Removes a port.
    pub(super) fn close(&mut self, id: PortId) -> Option<CachedPort> {
        let port = self.ports.remove(&id)?;
        self.totals
            .count(id, port.entries.sizes(), Sizes::default());
        Some(port)
    }

    /// How many ports there are.
    pub(super) fn len(&self) -> usize {
        self.ports.len()
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
        self.totals.count(id, before, port.entries.sizes());
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
    fn count(&mut self, id: PortId, before: Sizes, after: Sizes) {
        self.flows = self.flows + after.flows - before.flows;
        self.flows_of_large = self.flows_of_large + after.flows_of_large - before.flows_of_large;
        if after != before {
            self.denied_names.set(id, after.denied_names);
            self.other_names.set(id, after.names - after.denied_names);
        }
    }

    /// How many names all addresses have.
    pub(super) fn names(&self) -> usize {
        self.denied_names.total() + self.other_names.total()
    }
}

#[cfg(test)]
mod tests;
