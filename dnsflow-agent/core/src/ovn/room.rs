//! Which load balancers there is room for.

use std::collections::{BTreeMap, BTreeSet};

use super::rows::RowId;
use crate::tools::shares::Shares;

/// What a load balancer takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Size {
    /// Whose it is.
    pub owner: u64,
    /// How many addresses it has, in front and behind.
    pub addresses: usize,
}

/// The load balancers to leave out, so that all others have so many addresses at most. One after the other, whoever has
/// most loses its largest one.
pub fn without_room(sizes: &BTreeMap<RowId, Size>, max: usize) -> BTreeSet<RowId> {
    let mut left_out = BTreeSet::new();
    let all: usize = sizes.values().map(|size| size.addresses).sum();
    if all <= max {
        return left_out;
    }
    let mut shares = Shares::default();
    let mut rows: BTreeMap<u64, BTreeSet<(usize, RowId)>> = BTreeMap::new();
    for (id, Size { owner, addresses }) in sizes {
        shares.change(*owner, 0, *addresses);
        rows.entry(*owner).or_default().insert((*addresses, *id));
    }
    while shares.total() > max
        && let Some(owner) = shares.most()
        && let Some((addresses, id)) = rows.get_mut(&owner).and_then(BTreeSet::pop_last)
    {
        shares.change(owner, addresses, 0);
        left_out.insert(id);
    }
    left_out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn left_out(sizes: &[(u64, usize)], max: usize) -> Vec<usize> {
        let sizes = sizes
            .iter()
            .enumerate()
            .map(|(row, &(owner, addresses))| (RowId::new(row as u128), Size { owner, addresses }));
        let sizes: BTreeMap<_, _> = sizes.collect();
        let left_out = without_room(&sizes, max);
        let rows = sizes.keys().enumerate();
        let left_out = rows.filter(|(_, id)| left_out.contains(id));
        left_out.map(|(row, _)| row).collect()
    }

    #[test]
    fn whoever_has_most_loses_its_largest_load_balancers() {
        let sizes = [(1, 4), (2, 5), (2, 6), (1, 1), (3, 7)];
        for (max, wanted) in [
            (23, &[][..]),
            (22, &[2]),
            (17, &[2]),
            (16, &[2, 4]),
            (10, &[2, 4]),
            (9, &[1, 2, 4]),
            (0, &[0, 1, 2, 3, 4]),
        ] {
            assert_eq!(left_out(&sizes, max), wanted, "{max}");
        }
    }

    proptest! {
        /// Nobody loses anything because another one has more.
        #[test]
        fn whoever_has_no_more_than_an_equal_share_loses_nothing(
            sizes in proptest::collection::vec((0..5u64, 0..20usize), 0..30),
            max in 0..100usize,
        ) {
            let left_out = left_out(&sizes, max);
            let kept = sizes.iter().enumerate().filter(|(row, _)| !left_out.contains(row));
            let kept: usize = kept.map(|(_, (_, addresses))| addresses).sum();
            prop_assert!(kept <= max, "{} of {}", kept, max);
            let owners: BTreeSet<u64> = sizes.iter().map(|(owner, _)| *owner).collect();
            for owner in &owners {
                let own = || sizes.iter().enumerate().filter(|(_, (one, _))| one == owner);
                let all: usize = own().map(|(_, (_, addresses))| addresses).sum();
                let is_small = all * owners.len() <= max;
                prop_assert!(!is_small || own().all(|(row, _)| !left_out.contains(&row)), "{}", owner);
            }
        }
    }
}
