//! The names whose answers leave the kernel.
//!
//! A pod's interface belongs to a name set: the names that the rules of its namespace mention. The
//! program passes answers for these names and for all names below them. At an interface without a
//! name set, the program passes all answers. It never passes fewer: if something does not fit or
//! fails, the kernel gets no name set for the interfaces concerned.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use aya::{
    Ebpf,
    maps::{HashMap, MapData, MapError},
};
use dnsflow_common::{
    key::{NAME_SET_EMPTY, NAME_SET_UNHELD, NAMES_MAX, NameKey},
    question::NameHash,
};
use dnsflow_core::{io::input::NameSetId, values::name::DomainName};
use tracing::warn;

use super::{CaptureError, absent, program::take_map};

/// The two maps that make up the filter.
pub trait Tables {
    /// Puts an interface under a name set, and tells the kernel whether the name set is empty.
    ///
    /// # Errors
    ///
    /// Where there is no room, or the kernel refuses.
    fn put_interface(&mut self, ifindex: u32, put: PutNameSet) -> io::Result<()>;

    /// Takes an interface out of its name set; none is no error.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses.
    fn take_interface(&mut self, ifindex: u32) -> io::Result<()>;

    /// Puts a name into a name set.
    ///
    /// # Errors
    ///
    /// Where there is no room, or the kernel refuses.
    fn put_name(&mut self, name_set: NameSetId, name: NameHash) -> io::Result<()>;

    /// Takes a name out of a name set; none is no error.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses.
    fn take_name(&mut self, name_set: NameSetId, name: NameHash) -> io::Result<()>;
}

/// A name set as the kernel has it for an interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PutNameSet {
    /// The name set.
    pub name_set: NameSetId,
    /// Whether the name set is empty. Then nothing is held at the interface.
    pub empty: bool,
    /// Whether nothing is held there, though there are names.
    pub unheld: bool,
}

/// The state of the filter.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct FilterState {
    /// The number of interfaces without their name set in the kernel, because something did not fit
    /// or failed.
    pub unfiltered_interfaces: usize,
    /// The number of changes that the kernel has refused.
    pub failures: u64,
}

/// The wanted filter, and the part of it that the kernel has.
#[derive(Debug)]
pub struct NameFilter<T = KernelTables> {
    tables: T,
    name_sets: BTreeMap<NameSetId, NameSet>,
    interfaces: BTreeMap<u32, Interface>,
    /// Names in the kernel, over all name sets.
    names: usize,
    failures: u64,
}

#[derive(Debug, Default)]
struct NameSet {
    /// The names in the kernel.
    names: BTreeSet<NameHash>,
    /// The wanted names that the kernel does not have.
    missing: BTreeSet<NameHash>,
    /// Whether these are all wanted names.
    complete: bool,
    /// Whether no answer is held.
    unheld: bool,
}

#[derive(Clone, Copy, Debug)]
struct Interface {
    name_set: NameSetId,
    /// The name set that the kernel has for the interface.
    put: Option<PutNameSet>,
}

impl<T: Tables> NameFilter<T> {
    /// Filters nothing yet.
    pub fn new(tables: T) -> Self {
        Self {
            tables,
            name_sets: BTreeMap::new(),
            interfaces: BTreeMap::new(),
            names: 0,
            failures: 0,
        }
    }

    /// Puts an interface under a name set; `None` takes the interface out. Nothing is filtered at
    /// the interface without a name set, or before all names of the name set are in the kernel.
    pub fn set_name_set(&mut self, ifindex: u32, name_set: Option<NameSetId>) {
        match name_set {
            Some(name_set) => {
                let put = self.interfaces.get(&ifindex).and_then(|it| it.put);
                self.interfaces.insert(ifindex, Interface { name_set, put });
                self.apply(ifindex);
            }
            None => {
                if self.open(ifindex) {
                    self.interfaces.remove(&ifindex);
                }
            }
        }
    }

    /// Sets the names of a name set: those of its rules, without wildcards. Only changes are
    /// written.
    pub fn set_names<'a>(
        &mut self,
        name_set: NameSetId,
        names: impl IntoIterator<Item = &'a DomainName>,
    ) {
        let wanted: BTreeSet<_> = names
            .into_iter()
            .map(|name| NameHash::of(name.wire()))
            .collect();
        self.name_sets.entry(name_set).or_default();
        // New names are put before old ones are taken: the names that stay are always there.
        if self.put_names(name_set, &wanted).is_err() {
            self.set_complete(name_set, false);
        }
        let old = self.name_sets.get(&name_set).map(|entry| {
            let old = entry.names.difference(&wanted);
            old.copied().collect::<Vec<_>>()
        });
        self.take_names(name_set, old.unwrap_or_default());
        // There may be room now.
        let put = self.put_names(name_set, &wanted);
        if let Err(error) = &put {
            warn!(
                name_set = name_set.0, %error,
                "cannot filter the answers for a namespace: the agent reads all of them"
            );
            self.failures += 1;
        }
        self.note_missing(name_set, &wanted);
        self.set_complete(name_set, put.is_ok());
        self.retry();
    }

    fn note_missing(&mut self, name_set: NameSetId, wanted: &BTreeSet<NameHash>) {
        if let Some(entry) = self.name_sets.get_mut(&name_set) {
            entry.missing = wanted.difference(&entry.names).copied().collect();
        }
    }

    /// Puts the names that the kernel does not have yet.
    fn put_names(&mut self, name_set: NameSetId, wanted: &BTreeSet<NameHash>) -> io::Result<()> {
        let entry = self.name_sets.entry(name_set).or_default();
        for &name in wanted {
            if entry.names.contains(&name) {
                continue;
            }
            if self.names >= NAMES_MAX as usize {
                return Err(io::Error::other("there are too many names"));
            }
            self.tables.put_name(name_set, name)?;
            entry.names.insert(name);
            self.names += 1;
        }
        Ok(())
    }

    fn set_complete(&mut self, name_set: NameSetId, complete: bool) {
        if let Some(entry) = self.name_sets.get_mut(&name_set) {
            entry.complete = complete;
            self.apply_all(name_set);
        }
    }

    /// Holds answers at the interfaces of a name set, or no longer.
    pub fn set_held(&mut self, name_set: NameSetId, held: bool) {
        self.name_sets.entry(name_set).or_default().unheld = !held;
        self.apply_all(name_set);
    }

    /// Removes a name set and its names. Nothing is filtered at its interfaces any more.
    pub fn remove_name_set(&mut self, name_set: NameSetId) {
        let Some(entry) = self.name_sets.get_mut(&name_set) else {
            return;
        };
        entry.complete = false;
        entry.missing.clear();
        let names = entry.names.iter().copied().collect();
        self.apply_all(name_set);
        self.take_names(name_set, names);
        if self
            .name_sets
            .get(&name_set)
            .is_some_and(|it| it.names.is_empty())
        {
            self.name_sets.remove(&name_set);
        }
        self.retry();
    }

    /// The state of the filter.
    pub fn state(&self) -> FilterState {
        let unfiltered = self
            .interfaces
            .values()
            .filter(|it| it.put.is_none_or(|put| put.name_set != it.name_set));
        FilterState {
            unfiltered_interfaces: unfiltered.count(),
            failures: self.failures,
        }
    }

    fn take_names(&mut self, name_set: NameSetId, names: Vec<NameHash>) {
        let Some(entry) = self.name_sets.get_mut(&name_set) else {
            return;
        };
        for name in names {
            match self.tables.take_name(name_set, name) {
                Ok(()) => {
                    entry.names.remove(&name);
                    self.names -= 1;
                }
                Err(error) => {
                    warn!(name_set = name_set.0, %error, "cannot remove a name from the filter");
                    self.failures += 1;
                }
            }
        }
    }

    /// Tries again to put the names and the interfaces for which there was no room.
    fn retry(&mut self) {
        let incomplete = self.name_sets.iter();
        let incomplete = incomplete.filter(|(_, it)| !it.missing.is_empty());
        let incomplete: Vec<NameSetId> = incomplete.map(|(name_set, _)| *name_set).collect();
        for name_set in incomplete {
            if self.names >= NAMES_MAX as usize {
                break;
            }
            let entry = self.name_sets.get_mut(&name_set);
            let missing = entry.map(|it| std::mem::take(&mut it.missing));
            let missing = missing.unwrap_or_default();
            let put = self.put_names(name_set, &missing);
            self.note_missing(name_set, &missing);
            if put.is_ok() {
                self.set_complete(name_set, true);
            }
        }
        let waiting: Vec<_> = self
            .interfaces
            .iter()
            .filter(|(_, it)| it.put.is_none())
            .map(|(ifindex, _)| *ifindex)
            .collect();
        for ifindex in waiting {
            self.apply(ifindex);
        }
    }

    fn apply_all(&mut self, name_set: NameSetId) {
        let concerned: Vec<_> = self
            .interfaces
            .iter()
            .filter(|(_, it)| it.name_set == name_set)
            .map(|(ifindex, _)| *ifindex)
            .collect();
        for ifindex in concerned {
            self.apply(ifindex);
        }
    }

    /// Puts the interface's name set into the kernel if all its names are there; otherwise takes it
    /// out.
    fn apply(&mut self, ifindex: u32) {
        let Some(interface) = self.interfaces.get_mut(&ifindex) else {
            return;
        };
        let name_set = interface.name_set;
        let wanted = self.name_sets.get(&name_set).filter(|it| it.complete);
        let Some(wanted) = wanted else {
            self.open(ifindex);
            return;
        };
        let put = PutNameSet {
            name_set,
            empty: wanted.names.is_empty(),
            unheld: wanted.unheld,
        };
        if interface.put != Some(put) {
            match self.tables.put_interface(ifindex, put) {
                Ok(()) => interface.put = Some(put),
                Err(error) => {
                    warn!(ifindex, %error, "cannot filter the answers at an interface: the agent reads all of them");
                    self.failures += 1;
                    self.open(ifindex);
                }
            }
        }
    }

    /// Takes the interface's name set out of the kernel. Returns whether it is out.
    fn open(&mut self, ifindex: u32) -> bool {
        let Some(interface) = self.interfaces.get_mut(&ifindex) else {
            return true;
        };
        if interface.put.is_none() {
            return true;
        }
        match self.tables.take_interface(ifindex) {
            Ok(()) => {
                interface.put = None;
                true
            }
            Err(error) => {
                warn!(ifindex, %error, "cannot remove the filter of an interface");
                self.failures += 1;
                false
            }
        }
    }
}

/// The maps of the loaded programs.
#[derive(Debug)]
pub struct KernelTables {
    name_sets: HashMap<MapData, u32, u32>,
    names: HashMap<MapData, Key, u8>,
}

type Key = [u8; size_of::<NameKey>()];

impl KernelTables {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        Ok(Self {
            name_sets: take_map(ebpf, "NAME_SETS")?,
            names: take_map(ebpf, "NAMES")?,
        })
    }
}

fn gone(removal: Result<(), MapError>) -> io::Result<()> {
    absent(removal).map_err(io::Error::other)
}

fn key(name_set: NameSetId, name: NameHash) -> Key {
    zerocopy::transmute!(NameKey::new(name_set.0, name))
}

impl Tables for KernelTables {
    fn put_interface(&mut self, ifindex: u32, put: PutNameSet) -> io::Result<()> {
        let PutNameSet {
            name_set,
            empty,
            unheld,
        } = put;
        let empty = if empty { NAME_SET_EMPTY } else { 0 };
        let unheld = if unheld { NAME_SET_UNHELD } else { 0 };
        self.name_sets
            .insert(ifindex, name_set.0 | empty | unheld, 0)
            .map_err(io::Error::other)
    }

    fn take_interface(&mut self, ifindex: u32) -> io::Result<()> {
        gone(self.name_sets.remove(&ifindex))
    }

    fn put_name(&mut self, name_set: NameSetId, name: NameHash) -> io::Result<()> {
        self.names
            .insert(key(name_set, name), 1, 0)
            .map_err(io::Error::other)
    }

    fn take_name(&mut self, name_set: NameSetId, name: NameHash) -> io::Result<()> {
        gone(self.names.remove(&key(name_set, name)))
    }
}

#[cfg(test)]
mod tests;
