use super::*;

impl Due {
    /// How many entries wait for their time, and for their use.
    pub(in crate::cache) fn sizes(&self) -> [usize; 2] {
        [self.items.len(), self.undecided.len()]
    }

    /// Checks that these are the entries, each with its look.
    pub(in crate::cache) fn check(&self, entries: impl Iterator<Item = (Key, Look)>) {
        let mut looked_at = BTreeSet::new();
        let mut keys = BTreeSet::new();
        for ((port, address), look) in entries {
            looked_at.extend(look.0.map(|at| (at, port, address)));
            keys.insert((port, address));
            assert!(
                look.0.is_some() || self.undecided.contains(&(port, address)),
                "{port:?} {address} stays for ever"
            );
        }
        assert_eq!(looked_at, self.items, "one item for each entry");
        assert!(self.undecided.is_subset(&keys));
    }
}
