//! A table with an end: what was used least recently goes first, and no interface can push out
//! the entries of the others.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
};

use super::Timestamp;

/// A key that belongs to an interface.
pub trait OfInterface {
    /// The interface index of the veth's host side.
    fn ifindex(&self) -> u32;
}

/// The limits of a [`Recent`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How many entries there are at most.
    pub entries: usize,
    /// How many of them one interface can have.
    pub per_interface: usize,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    used: u64,
    used_at: Timestamp,
}

/// Entries by key, and the order in which they were used.
#[derive(Debug)]
pub struct Recent<K, V> {
    limits: Limits,
    entries: HashMap<K, Entry<V>>,
    /// By the number of the use.
    order: BTreeMap<u64, K>,
    /// The same for each interface.
    order_of_interface: BTreeMap<u32, BTreeMap<u64, K>>,
    uses: u64,
}

impl<K: Clone + Eq + Hash + OfInterface, V> Recent<K, V> {
    /// An empty table.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: HashMap::new(),
            order: BTreeMap::new(),
            order_of_interface: BTreeMap::new(),
            uses: 0,
        }
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entry of this key; it keeps its place in the order.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        Some(&mut self.entries.get_mut(key)?.value)
    }

    /// The entry of this key, which counts as used now.
    pub fn use_entry(&mut self, key: &K, now: Timestamp) -> Option<&mut V> {
        let entry = self.entries.get_mut(key)?;
        self.uses += 1;
        let of_interface = self.order_of_interface.entry(key.ifindex()).or_default();
        for order in [&mut self.order, of_interface] {
            order.remove(&entry.used);
            order.insert(self.uses, key.clone());
        }
        entry.used = self.uses;
        entry.used_at = now;
        Some(&mut entry.value)
    }

    /// Adds an entry, or replaces the one of this key. Returns what had to go for it, the
    /// replaced entry aside.
    pub fn insert(&mut self, key: K, value: V, now: Timestamp) -> Option<V> {
        self.remove(&key);
        let of_interface = self.order_of_interface.entry(key.ifindex()).or_default();
        let first = if of_interface.len() >= self.limits.per_interface {
            of_interface.values().next().cloned()
        } else if self.entries.len() >= self.limits.entries {
            self.order.values().next().cloned()
        } else {
            None
        };
        let gone = first.and_then(|first| self.remove(&first));
        self.uses += 1;
        self.order.insert(self.uses, key.clone());
        self.order_of_interface
            .entry(key.ifindex())
            .or_default()
            .insert(self.uses, key.clone());
        self.entries.insert(
            key,
            Entry {
                value,
                used: self.uses,
                used_at: now,
            },
        );
        gone
    }

    /// Removes the entry of this key.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let entry = self.entries.remove(key)?;
        self.order.remove(&entry.used);
        if let Some(order) = self.order_of_interface.get_mut(&key.ifindex()) {
            order.remove(&entry.used);
            if order.is_empty() {
                self.order_of_interface.remove(&key.ifindex());
            }
        }
        Some(entry.value)
    }

    /// Removes the entry that was used least recently.
    pub fn pop(&mut self) -> Option<V> {
        let key = self.order.values().next().cloned()?;
        self.remove(&key)
    }

    /// Removes the entry that was used least recently, if that was before `limit`.
    pub fn pop_unused_since(&mut self, limit: Timestamp) -> Option<V> {
        let key = self.order.values().next()?;
        let entry = self.entries.get(key)?;
        if entry.used_at >= limit {
            return None;
        }
        self.pop()
    }

    /// Removes every entry of an interface.
    pub fn remove_interface(&mut self, ifindex: u32) -> Vec<V> {
        let order = self.order_of_interface.get(&ifindex);
        let keys: Vec<K> = order
            .into_iter()
            .flat_map(BTreeMap::values)
            .cloned()
            .collect();
        keys.iter().filter_map(|key| self.remove(key)).collect()
    }
}

#[cfg(test)]
mod tests;
