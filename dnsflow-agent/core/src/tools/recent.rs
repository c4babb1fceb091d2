//! A table with limits: the least recently used entry goes first, and no interface can push out the entries of the
//! others, as long as it has more of them.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
};

use crate::Timestamp;

/// A key that belongs to an interface.
pub trait OfInterface {
    /// The interface index of the veth's host side.
    fn ifindex(&self) -> u32;
}

/// The limits of a [`Recent`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// At most this many entries.
    pub entries: usize,
    /// At most this many entries of one interface.
    pub per_interface: usize,
    /// How many bytes all entries hold together.
    pub bytes: usize,
    /// How many bytes the entries of one interface hold together.
    pub bytes_per_interface: usize,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    bytes: usize,
    used: u64,
    used_at: Timestamp,
}

/// The entries of one interface.
#[derive(Debug)]
struct Interface<K> {
    /// Its entries by the number of the use.
    order: BTreeMap<u64, K>,
    bytes: usize,
}

impl<K> Default for Interface<K> {
    fn default() -> Self {
        Self {
            order: BTreeMap::new(),
            bytes: 0,
        }
    }
}

/// Entries by key, and the order in which they were used.
#[derive(Debug)]
pub struct Recent<K, V> {
    limits: Limits,
    entries: HashMap<K, Entry<V>>,
    /// By the number of the use.
    order: BTreeMap<u64, K>,
    interfaces: BTreeMap<u32, Interface<K>>,
    bytes: usize,
    uses: u64,
}

impl<K: Clone + Eq + Hash + OfInterface, V> Recent<K, V> {
    /// An empty table.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: HashMap::new(),
            order: BTreeMap::new(),
            interfaces: BTreeMap::new(),
            bytes: 0,
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

    /// How many bytes all entries hold.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, entry)| (key, &entry.value))
    }

    /// The entry of this key; it keeps its place in the order.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        Some(&mut self.entries.get_mut(key)?.value)
    }

    /// The entry of this key, which counts as used now.
    pub fn use_entry(&mut self, key: &K, now: Timestamp) -> Option<&mut V> {
        let entry = self.entries.get_mut(key)?;
        self.uses += 1;
        let interface = self.interfaces.entry(key.ifindex()).or_default();
        for order in [&mut self.order, &mut interface.order] {
            order.remove(&entry.used);
            order.insert(self.uses, key.clone());
        }
        entry.used = self.uses;
        entry.used_at = now;
        Some(&mut entry.value)
    }

    /// Adds an entry, which holds no bytes yet, or replaces the one of this key. Returns the entry that had to go for
    /// it, other than the replaced one: an entry of the same interface if that is at its limit, else one of the
    /// interface that has most.
    pub fn insert(&mut self, key: K, value: V, now: Timestamp) -> Option<V> {
        self.remove(&key);
        let ifindex = key.ifindex();
        let interface = self.interfaces.get(&ifindex);
        let count = interface.map_or(0, |interface| interface.order.len());
        let gone = if count >= self.limits.per_interface {
            self.pop_of(ifindex)
        } else if self.entries.len() >= self.limits.entries {
            self.pop_of_largest(|interface| interface.order.len())
        } else {
            None
        };
        self.uses += 1;
        self.order.insert(self.uses, key.clone());
        let interface = self.interfaces.entry(ifindex).or_default();
        interface.order.insert(self.uses, key.clone());
        self.entries.insert(
            key,
            Entry {
                value,
                bytes: 0,
                used: self.uses,
                used_at: now,
            },
        );
        gone
    }

    /// The entry of this key holds so many bytes now. Returns the entries that had to go for them: entries of the
    /// same interface if that is over its limit, else of the interface whose entries hold most. The entry itself can
    /// be among them.
    pub fn weigh(&mut self, key: &K, bytes: usize) -> Vec<V> {
        let mut gone = Vec::new();
        let ifindex = key.ifindex();
        let (Some(entry), Some(interface)) =
            (self.entries.get_mut(key), self.interfaces.get_mut(&ifindex))
        else {
            return gone;
        };
        self.bytes = self.bytes - entry.bytes + bytes;
        interface.bytes = interface.bytes - entry.bytes + bytes;
        entry.bytes = bytes;
        let limit = self.limits.bytes_per_interface;
        while self
            .interfaces
            .get(&ifindex)
            .is_some_and(|it| it.bytes > limit)
        {
            gone.extend(self.pop_of(ifindex));
        }
        while self.bytes > self.limits.bytes {
            gone.extend(self.pop_of_largest(|interface| interface.bytes));
        }
        gone
    }

    /// Removes the entry of this key.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let entry = self.entries.remove(key)?;
        self.order.remove(&entry.used);
        self.bytes -= entry.bytes;
        if let Some(interface) = self.interfaces.get_mut(&key.ifindex()) {
            interface.order.remove(&entry.used);
            interface.bytes -= entry.bytes;
            if interface.order.is_empty() {
                self.interfaces.remove(&key.ifindex());
            }
        }
        Some(entry.value)
    }

    /// Removes the entry of an interface that was used least recently.
    fn pop_of(&mut self, ifindex: u32) -> Option<V> {
        let key = self.interfaces.get(&ifindex)?.order.values().next()?;
        self.remove(&key.clone())
    }

    /// The same of the interface for which `size` is largest.
    fn pop_of_largest(&mut self, size: impl Fn(&Interface<K>) -> usize) -> Option<V> {
        let interfaces = self.interfaces.iter();
        let (ifindex, _) = interfaces.max_by_key(|(_, interface)| size(interface))?;
        self.pop_of(*ifindex)
    }

    /// Removes the entry that was used least recently, if that was before `limit`.
    pub fn pop_unused_since(&mut self, limit: Timestamp) -> Option<V> {
        let key = self.order.values().next()?;
        let entry = self.entries.get(key)?;
        if entry.used_at >= limit {
            return None;
        }
        self.remove(&key.clone())
    }

    /// Removes every entry of an interface.
    pub fn remove_interface(&mut self, ifindex: u32) {
        while self.pop_of(ifindex).is_some() {}
    }
}

#[cfg(test)]
mod tests;
