//! The load balancers for which there is room.
//!
//! A tenant chooses the addresses in front of its Services, 65,536 of one, and those behind. All of them are in the
//! agents' memory on all nodes. What is left out counts as a row that cannot be read.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{BuildHasher as _, RandomState},
    sync::LazyLock,
};

use dnsflow_core::{
    ovn::{
        room::{Size, without_room},
        rows::{LoadBalancer, RowId},
    },
    values::limits::BALANCED_ADDRESSES_MAX,
};

/// With keys of this process: two namespaces that have one hash would share their room.
static OWNERS: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// Which rows are left out.
#[derive(Clone, Debug)]
pub(super) struct Balancers {
    sizes: BTreeMap<RowId, Size>,
    left_out: BTreeSet<RowId>,
    /// The most addresses of all that are not.
    max: usize,
}

impl Default for Balancers {
    fn default() -> Self {
        Self::limited_to(BALANCED_ADDRESSES_MAX)
    }
}

impl Balancers {
    /// None yet, with another limit.
    pub(super) fn limited_to(max: usize) -> Self {
        Self {
            sizes: BTreeMap::new(),
            left_out: BTreeSet::new(),
            max,
        }
    }

    /// Forgets all rows: they are read anew.
    pub(super) fn reset(&mut self) {
        *self = Self::limited_to(self.max);
    }

    /// Takes over the sizes of rows, each as it is now. Returns the rows that are left out from now on, and those that
    /// are no more.
    pub(super) fn change(
        &mut self,
        rows: impl Iterator<Item = (RowId, Option<Size>)>,
    ) -> [Vec<RowId>; 2] {
        // Most updates have none, and then nothing follows from the others.
        let mut rows = rows.peekable();
        if rows.peek().is_none() {
            return Default::default();
        }
        for (id, size) in rows {
            match size {
                Some(size) => self.sizes.insert(id, size),
                None => self.sizes.remove(&id),
            };
        }
        let mut now = without_room(&self.sizes, self.max);
        if !self.left_out.is_empty() {
            // Near the limit, a row would go and come with each change of another one.
            let without_room_to_come = without_room(&self.sizes, self.max / 4 * 3);
            now.extend(self.left_out.intersection(&without_room_to_come));
        }
        let before = std::mem::replace(&mut self.left_out, now);
        let [gone, come] = [
            self.left_out.difference(&before),
            before.difference(&self.left_out),
        ];
        [gone.copied().collect(), come.copied().collect()]
    }

    /// Whether a row is left out.
    pub(super) fn leaves_out(&self, id: RowId) -> bool {
        self.left_out.contains(&id)
    }
}

/// What a row takes.
pub(super) fn size(row: &LoadBalancer) -> Size {
    let service = row.service.as_deref().unwrap_or_default();
    // The owner begins with the namespace.
    let namespace = service.split('/').next();
    Size {
        owner: OWNERS.hash_one(namespace),
        addresses: row.addresses.len() + row.backends.len(),
    }
}
