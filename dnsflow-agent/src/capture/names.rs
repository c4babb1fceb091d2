//! The names whose answers leave the kernel.
//!
//! A pod's interface belongs to a scope: what its namespace's rules mention. The program passes
//! answers for these names and everything below them, and for all names where an interface has no
//! scope. Never fewer: whenever something does not fit or fails, the interfaces of the scope have
//! no scope in the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
};

use aya::maps::{HashMap, Map, MapData, MapError};
use dnsflow_common::{
    key::{NAMES_MAX, NameKey, SCOPE_EMPTY},
    question::NameHash,
};
use dnsflow_core::{input::ScopeId, name::DomainName};
use tracing::warn;

use super::CaptureError;

/// The two maps that make up the filter.
pub trait Tables {
    /// Puts an interface under a scope, and says whether that has any names.
    ///
    /// # Errors
    ///
    /// Where there is no room, or the kernel refuses.
    fn put_interface(&mut self, ifindex: u32, put: PutScope) -> io::Result<()>;

    /// Takes an interface out of its scope; none is no error.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses.
    fn take_interface(&mut self, ifindex: u32) -> io::Result<()>;

    /// Puts a name into a scope.
    ///
    /// # Errors
    ///
    /// Where there is no room, or the kernel refuses.
    fn put_name(&mut self, scope: ScopeId, name: NameHash) -> io::Result<()>;

    /// Takes a name out of a scope; none is no error.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses.
    fn take_name(&mut self, scope: ScopeId, name: NameHash) -> io::Result<()>;
}

/// A scope as the kernel has it for an interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PutScope {
    /// The scope.
    pub scope: ScopeId,
    /// Whether it has no names: nothing is ever held there.
    pub empty: bool,
}

/// How the filter is doing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct FilterState {
    /// Interfaces whose scope has no filter, because something did not fit or failed.
    pub unfiltered_interfaces: usize,
    /// Changes that the kernel refused, ever.
    pub failures: u64,
}

/// What the filter is to be, and which of it the kernel has.
#[derive(Debug)]
pub struct NameFilter<T = KernelTables> {
    tables: T,
    scopes: BTreeMap<ScopeId, Scope>,
    interfaces: BTreeMap<u32, Interface>,
    /// Names in the kernel, over all scopes.
    names: usize,
    failures: u64,
}

#[derive(Debug, Default)]
struct Scope {
    /// The names in the kernel.
    names: BTreeSet<NameHash>,
    /// Whether these are all.
    complete: bool,
}

#[derive(Clone, Copy, Debug)]
struct Interface {
    scope: ScopeId,
    /// The scope in the kernel.
    put: Option<PutScope>,
}

impl<T: Tables> NameFilter<T> {
    /// Filters nothing yet.
    pub fn new(tables: T) -> Self {
        Self {
            tables,
            scopes: BTreeMap::new(),
            interfaces: BTreeMap::new(),
            names: 0,
            failures: 0,
        }
    }

    /// Puts an interface under a scope. Until the scope's names are set, and for as long as they
    /// do not fit, nothing is filtered there; neither where the scope is `None`.
    pub fn set_scope(&mut self, ifindex: u32, scope: Option<ScopeId>) {
        match scope {
            Some(scope) => {
                let put = self.interfaces.get(&ifindex).and_then(|it| it.put);
                self.interfaces.insert(ifindex, Interface { scope, put });
                self.settle(ifindex);
            }
            None => {
                if self.open(ifindex) {
                    self.interfaces.remove(&ifindex);
                }
            }
        }
    }

    /// Makes these the names of a scope: those of its rules, whether or not with sub-domains or a
    /// wildcard in front. Only what has changed is written.
    pub fn set_names<'a>(
        &mut self,
        scope: ScopeId,
        names: impl IntoIterator<Item = &'a DomainName>,
    ) {
        let wanted: BTreeSet<_> = names
            .into_iter()
            .map(|name| NameHash::of(name.wire()))
            .collect();
        self.scopes.entry(scope).or_default();
        // The new names first: at no time is an interface without those that stay.
        if self.put_names(scope, &wanted).is_err() {
            self.set_complete(scope, false);
        }
        let old = self.scopes.get(&scope).map(|entry| {
            let old = entry.names.difference(&wanted);
            old.copied().collect::<Vec<_>>()
        });
        self.take_names(scope, old.unwrap_or_default());
        // Where there was no room, there may be some now.
        let put = self.put_names(scope, &wanted);
        if let Err(error) = &put {
            warn!(scope = scope.0, %error, "answers for a namespace are not filtered");
            self.failures += 1;
        }
        self.set_complete(scope, put.is_ok());
        self.retry();
    }

    /// Writes what is not there yet.
    fn put_names(&mut self, scope: ScopeId, wanted: &BTreeSet<NameHash>) -> io::Result<()> {
        let entry = self.scopes.entry(scope).or_default();
        for &name in wanted {
            if entry.names.contains(&name) {
                continue;
            }
            if self.names >= NAMES_MAX as usize {
                return Err(io::Error::other("there are too many names"));
            }
            self.tables.put_name(scope, name)?;
            entry.names.insert(name);
            self.names += 1;
        }
        Ok(())
    }

    fn set_complete(&mut self, scope: ScopeId, complete: bool) {
        if let Some(entry) = self.scopes.get_mut(&scope) {
            entry.complete = complete;
            self.settle_all(scope);
        }
    }

    /// Forgets a scope and its names: nothing is filtered at its interfaces any more.
    pub fn remove_scope(&mut self, scope: ScopeId) {
        let Some(entry) = self.scopes.get_mut(&scope) else {
            return;
        };
        entry.complete = false;
        let names = entry.names.iter().copied().collect();
        self.settle_all(scope);
        self.take_names(scope, names);
        if self
            .scopes
            .get(&scope)
            .is_some_and(|it| it.names.is_empty())
        {
            self.scopes.remove(&scope);
        }
    }

    /// How it is doing.
    pub fn state(&self) -> FilterState {
        let unfiltered = self
            .interfaces
            .values()
            .filter(|it| it.put.is_none_or(|put| put.scope != it.scope));
        FilterState {
            unfiltered_interfaces: unfiltered.count(),
            failures: self.failures,
        }
    }

    fn take_names(&mut self, scope: ScopeId, names: Vec<NameHash>) {
        let Some(entry) = self.scopes.get_mut(&scope) else {
            return;
        };
        for name in names {
            match self.tables.take_name(scope, name) {
                Ok(()) => {
                    entry.names.remove(&name);
                    self.names -= 1;
                }
                Err(error) => {
                    warn!(scope = scope.0, %error, "a name stays in the filter");
                    self.failures += 1;
                }
            }
        }
    }

    /// Interfaces that found no room try again.
    fn retry(&mut self) {
        let waiting: Vec<_> = self
            .interfaces
            .iter()
            .filter(|(_, it)| it.put.is_none())
            .map(|(ifindex, _)| *ifindex)
            .collect();
        for ifindex in waiting {
            self.settle(ifindex);
        }
    }

    fn settle_all(&mut self, scope: ScopeId) {
        let concerned: Vec<_> = self
            .interfaces
            .iter()
            .filter(|(_, it)| it.scope == scope)
            .map(|(ifindex, _)| *ifindex)
            .collect();
        for ifindex in concerned {
            self.settle(ifindex);
        }
    }

    /// Gives the kernel the interface's scope if its names are all there, else none.
    fn settle(&mut self, ifindex: u32) {
        let Some(interface) = self.interfaces.get_mut(&ifindex) else {
            return;
        };
        let scope = interface.scope;
        let wanted = self.scopes.get(&scope).filter(|it| it.complete);
        let Some(names) = wanted.map(|it| &it.names) else {
            self.open(ifindex);
            return;
        };
        let empty = names.is_empty();
        let put = PutScope { scope, empty };
        if interface.put != Some(put) {
            match self.tables.put_interface(ifindex, put) {
                Ok(()) => interface.put = Some(put),
                Err(error) => {
                    warn!(ifindex, %error, "answers at an interface are not filtered");
                    self.failures += 1;
                    self.open(ifindex);
                }
            }
        }
    }

    /// Takes the interface's scope from the kernel; returns whether it is gone.
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
                warn!(ifindex, %error, "an interface keeps its filter");
                self.failures += 1;
                false
            }
        }
    }
}

/// The maps of the loaded programs.
pub struct KernelTables {
    scopes: HashMap<MapData, u32, u32>,
    names: HashMap<MapData, Key, u8>,
}

type Key = [u8; size_of::<NameKey>()];

impl fmt::Debug for KernelTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelTables").finish_non_exhaustive()
    }
}

impl KernelTables {
    pub(super) fn new(scopes: Map, names: Map) -> Result<Self, CaptureError> {
        let scopes =
            HashMap::try_from(scopes).map_err(|_| CaptureError::Object { what: "SCOPES" })?;
        let names = HashMap::try_from(names).map_err(|_| CaptureError::Object { what: "NAMES" })?;
        Ok(Self { scopes, names })
    }
}

fn gone(result: Result<(), MapError>) -> io::Result<()> {
    match result {
        Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    }
}

fn key(scope: ScopeId, name: NameHash) -> Key {
    zerocopy::transmute!(NameKey::new(scope.0, name))
}

impl Tables for KernelTables {
    fn put_interface(&mut self, ifindex: u32, put: PutScope) -> io::Result<()> {
        let PutScope { scope, empty } = put;
        let empty = if empty { SCOPE_EMPTY } else { 0 };
        self.scopes
            .insert(ifindex, scope.0 | empty, 0)
            .map_err(io::Error::other)
    }

    fn take_interface(&mut self, ifindex: u32) -> io::Result<()> {
        gone(self.scopes.remove(&ifindex))
    }

    fn put_name(&mut self, scope: ScopeId, name: NameHash) -> io::Result<()> {
        self.names
            .insert(key(scope, name), 1, 0)
            .map_err(io::Error::other)
    }

    fn take_name(&mut self, scope: ScopeId, name: NameHash) -> io::Result<()> {
        gone(self.names.remove(&key(scope, name)))
    }
}

#[cfg(test)]
mod tests;
