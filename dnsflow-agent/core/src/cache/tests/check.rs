//! What tests of the engine ask a cache.

use super::*;
use crate::values::limits::{ENDED_NAMES_MAX, LIMITS_REPORTED_MAX};

impl Cache {
    /// Changes the limits of a cache in use.
    pub(crate) fn limits_mut(&mut self) -> &mut CacheLimits {
        &mut self.limits
    }

    /// Whether nothing is left to look at.
    pub(crate) fn is_idle(&self) -> bool {
        self.due.sizes()[0] == 0
    }

    /// How many items the collections have: ports, names, entries that are due, and others.
    pub(crate) fn sizes(&self) -> [usize; 5] {
        let [due, undecided] = self.due.sizes();
        [
            self.ports.iter().len(),
            self.name_count(),
            due,
            undecided,
            self.mention_unknown.len(),
        ]
    }

    /// How often all entries of a port were looked at to find the least important ones.
    pub(crate) fn looks(&self, port: PortId) -> usize {
        self.port(port).candidates.looks
    }

    fn entries(&self) -> impl Iterator<Item = (Key, &Entry)> {
        self.ports.iter().flat_map(|(id, port)| {
            let entries = port.entries.iter();
            entries.map(move |(address, entry)| ((*id, address), entry))
        })
    }

    /// How many names of full addresses were looked at for further ones.
    pub(crate) fn names_looked_at(&self) -> usize {
        self.entries().map(|(_, entry)| entry.names.looked_at).sum()
    }

    /// How many names were looked at for whatever reason.
    pub(crate) fn work(&self) -> usize {
        let works = self.entries().map(|(_, entry)| entry.names.work.get());
        works.sum()
    }

    /// Checks that each collection is within its limit, and that all agree.
    pub(crate) fn check(&self) {
        let limits = &self.limits;
        self.ports.check();
        let looks = self.entries().map(|(key, entry)| (key, entry.look));
        self.due.check(looks);
        for (id, port) in self.ports.iter() {
            let addresses_max = limits.addresses_per_port_max;
            assert!(port.entries.len() <= addresses_max, "{id:?}");
            let names = port.entries.sizes().names;
            assert!(names <= limits.names_per_port_max(), "{id:?}");
            let reported = port.limits_reported.len();
            assert!(reported <= LIMITS_REPORTED_MAX, "{id:?}");
            assert!(port.ended.len() <= ENDED_NAMES_MAX, "{id:?}");
            let candidates = port.candidates.sizes();
            let are_few = candidates.iter().all(|count| *count <= addresses_max);
            assert!(are_few, "{id:?}");
        }
        assert!(self.name_count() <= limits.names_per_node_max);
        let mut mention_unknown = self.mention_unknown.keys();
        assert!(mention_unknown.all(|id| self.ports.contains(*id)));
    }
}
