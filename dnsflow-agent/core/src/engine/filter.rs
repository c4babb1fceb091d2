//! Which answers have to leave the kernel: for each interface of a pod, the names that the rules
//! of its namespace mention.
//!
//! The names are those of the EgressFirewall as it is written, whether or not OVN enforces it yet.
//! An interface whose namespace is not known has no filter.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::Engine;
use crate::{Command, Timestamp, input::ScopeId, name::DomainName, ovn::rows::Interface};

/// After how long the kept answers are asked for once more: an answer may have been judged by the
/// names of before and kept just after.
const RECALL_AGAIN: Duration = Duration::from_millis(10);

/// The filter as it was last commanded.
#[derive(Debug, Default)]
pub(super) struct Filter {
    /// Something may have changed.
    pub(super) dirty: bool,
    interfaces: BTreeMap<u32, ScopeId>,
    scopes: BTreeMap<String, Scope>,
    next_scope: u32,
    recall_at: Option<Timestamp>,
}

#[derive(Debug)]
struct Scope {
    id: ScopeId,
    names: BTreeSet<DomainName>,
}

impl Filter {
    /// When [`Engine::recall`] wants to be called.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.recall_at
    }

    fn next_scope(&mut self) -> ScopeId {
        self.next_scope += 1;
        ScopeId(self.next_scope)
    }
}

impl Engine {
    /// Brings the filter in line with interfaces and EgressFirewalls.
    pub(super) fn update_filter(&mut self, now: Timestamp) {
        if !self.synced.firewalls || !std::mem::take(&mut self.filter.dirty) {
            return;
        }
        let mut wanted: BTreeMap<u32, String> = BTreeMap::new();
        for port in self.ports.values() {
            if let (Some(ifindex), Some(namespace)) = (port.ifindex, self.filtered_as(&port.row)) {
                wanted.insert(ifindex, namespace.to_owned());
            }
        }
        let namespaces: BTreeSet<&String> = wanted.values().collect();
        let mut recall = false;
        for namespace in &namespaces {
            let names = self.world.names_in(namespace);
            let known = self.filter.scopes.get_mut(*namespace);
            let (id, more) = match known {
                Some(scope) if scope.names == names => continue,
                Some(scope) => {
                    let more = !names.is_subset(&scope.names);
                    scope.names = names.clone();
                    (scope.id, more)
                }
                None => {
                    let (id, more) = (self.filter.next_scope(), !names.is_empty());
                    let names = names.clone();
                    let scope = Scope { id, names };
                    self.filter.scopes.insert((*namespace).clone(), scope);
                    (id, more)
                }
            };
            self.commands
                .push(Command::FilterNames { scope: id, names });
            recall |= more;
        }
        let gone = |ifindex: &u32| !wanted.contains_key(ifindex);
        let gone: Vec<u32> = self
            .filter
            .interfaces
            .keys()
            .copied()
            .filter(gone)
            .collect();
        for ifindex in gone {
            self.filter.interfaces.remove(&ifindex);
            self.commands.push(Command::FilterInterface {
                ifindex,
                scope: None,
            });
        }
        for (ifindex, namespace) in &wanted {
            let Some(scope) = self.filter.scopes.get(namespace).map(|scope| scope.id) else {
                continue;
            };
            if self.filter.interfaces.insert(*ifindex, scope) != Some(scope) {
                self.commands.push(Command::FilterInterface {
                    ifindex: *ifindex,
                    scope: Some(scope),
                });
            }
        }
        let unused: Vec<String> = self
            .filter
            .scopes
            .keys()
            .filter(|namespace| !namespaces.contains(namespace))
            .cloned()
            .collect();
        for namespace in unused {
            if let Some(scope) = self.filter.scopes.remove(&namespace) {
                self.commands.push(Command::ForgetNames { scope: scope.id });
            }
        }
        if recall {
            self.commands.push(Command::RecallAnswers);
            self.filter.recall_at = Some(now + RECALL_AGAIN);
        }
    }

    /// Asks once more for the answers that no rule mentioned, when that is due.
    pub(super) fn recall(&mut self, now: Timestamp) {
        if self.filter.recall_at.is_some_and(|at| at <= now) {
            self.filter.recall_at = None;
            self.commands.push(Command::RecallAnswers);
        }
    }

    /// The namespace whose names matter at an interface.
    fn filtered_as<'a>(&'a self, row: &'a Interface) -> Option<&'a str> {
        let by_binding = self.world.namespace_of_pod(row);
        by_binding.or_else(|| self.world.namespace_of(row))
    }
}
