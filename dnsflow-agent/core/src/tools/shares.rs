//! How much of something each owner has, and who has most.

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
};

/// Sizes by owner.
#[derive(Debug)]
pub(crate) struct Shares<K> {
    sizes: HashMap<K, usize>,
    by_size: BTreeSet<(usize, K)>,
    total: usize,
}

impl<K> Default for Shares<K> {
    fn default() -> Self {
        Self {
            sizes: HashMap::new(),
            by_size: BTreeSet::new(),
            total: 0,
        }
    }
}

impl<K: Copy + Eq + Hash + Ord> Shares<K> {
    /// How much all have together.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// How much one has.
    pub(crate) fn of(&self, owner: K) -> usize {
        self.sizes.get(&owner).copied().unwrap_or_default()
    }

    /// One of those who have most; `None` where nobody has anything.
    pub(crate) fn most(&self) -> Option<K> {
        self.by_size.last().map(|(_, owner)| *owner)
    }

    /// From now on, an owner has so much.
    pub(crate) fn set(&mut self, owner: K, size: usize) {
        let before = match size {
            0 => self.sizes.remove(&owner),
            _ => self.sizes.insert(owner, size),
        };
        let before = before.unwrap_or_default();
        if before == size {
            return;
        }
        self.by_size.remove(&(before, owner));
        if size > 0 {
            self.by_size.insert((size, owner));
        }
        self.total = self.total - before + size;
    }

    /// From now on, a part of what an owner has is of another size.
    pub(crate) fn change(&mut self, owner: K, before: usize, after: usize) {
        if before != after {
            self.set(owner, self.of(owner) + after - before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_and_the_largest_share_are_known() {
        let mut shares = Shares::default();
        assert_eq!((shares.total(), shares.most()), (0, None));
        for (owner, size) in [('a', 3), ('b', 5), ('a', 4), ('c', 1)] {
            shares.set(owner, size);
        }
        assert_eq!(
            (shares.total(), shares.most(), shares.of('a')),
            (10, Some('b'), 4)
        );
        shares.change('b', 2, 0);
        assert_eq!((shares.total(), shares.of('b')), (8, 3));
        shares.change('b', 3, 0);
        assert_eq!((shares.total(), shares.most()), (5, Some('a')));
        shares.set('a', 0);
        shares.set('c', 0);
        assert_eq!((shares.total(), shares.most()), (0, None));
        assert!(shares.sizes.is_empty() && shares.by_size.is_empty());
    }
}
