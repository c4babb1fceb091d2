//! Which answers have to leave the kernel: for each interface of a pod, the names that the rules
//! of its namespace mention.
//!
//! The names are those of the EgressFirewall as it is written, whether or not OVN enforces it yet.
//! An interface whose namespace is not known has no filter.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    Command, Timestamp,
    deadline::{self, Deadline, Why},
    input::ScopeId,
    name::DomainName,
    output::Output,
};

/// After how long the kept answers are asked for once more: an answer may have been judged by the
/// names of before and kept just after.
const RECALL_AGAIN: Duration = Duration::from_millis(10);

/// The filter as it was last commanded.
#[derive(Debug, Default)]
pub(crate) struct Filter {
    /// Something that the filter is made of may have changed.
    is_outdated: bool,
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
    /// Interfaces, their namespaces or EgressFirewalls may be others.
    pub(crate) fn outdate(&mut self) {
        self.is_outdated = true;
    }

    /// Whether [`Filter::update`] has anything to do.
    pub(crate) fn is_outdated(&self) -> bool {
        self.is_outdated
    }

    /// When [`Filter::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        deadline::at(self.recall_at, Why::Replay)
    }

    /// Asks once more for the answers that no rule mentioned, when that is due.
    pub(crate) fn timeout(&mut self, now: Timestamp, out: &mut Output) {
        if self.recall_at.take_if(|at| *at <= now).is_some() {
            out.command(Command::RecallAnswers);
        }
    }

    /// Brings the filter in line. `wanted` has the namespace of each interface that is to be
    /// filtered, `names_in` the names that the rules of a namespace mention.
    pub(crate) fn update(
        &mut self,
        wanted: &BTreeMap<u32, &str>,
        names_in: impl Fn(&str) -> BTreeSet<DomainName>,
        now: Timestamp,
        out: &mut Output,
    ) {
        self.is_outdated = false;
        let namespaces: BTreeSet<&str> = wanted.values().copied().collect();
        let mut recall = false;
        for namespace in &namespaces {
            recall |= self.name(namespace, names_in(namespace), out);
        }
        self.interfaces.retain(|ifindex, _| {
            let keep = wanted.contains_key(ifindex);
            if !keep {
                out.command(Command::FilterInterface {
                    ifindex: *ifindex,
                    scope: None,
                });
            }
            keep
        });
        for (ifindex, namespace) in wanted {
            let scope = self.scopes.get(*namespace).map(|scope| scope.id);
            if let Some(scope) = scope
                && self.interfaces.insert(*ifindex, scope) != Some(scope)
            {
                out.command(Command::FilterInterface {
                    ifindex: *ifindex,
                    scope: Some(scope),
                });
            }
        }
        self.scopes.retain(|namespace, scope| {
            let keep = namespaces.contains(namespace.as_str());
            if !keep {
                out.command(Command::ForgetNames { scope: scope.id });
            }
            keep
        });
        if recall {
            out.command(Command::RecallAnswers);
            self.recall_at = Some(now + RECALL_AGAIN);
        }
    }

    /// Makes these the names of a namespace; returns whether some of them are new.
    fn name(&mut self, namespace: &str, names: BTreeSet<DomainName>, out: &mut Output) -> bool {
        let (id, more) = match self.scopes.get_mut(namespace) {
            Some(scope) if scope.names == names => return false,
            Some(scope) => {
                let more = !names.is_subset(&scope.names);
                scope.names.clone_from(&names);
                (scope.id, more)
            }
            None => {
                self.next_scope += 1;
                let id = ScopeId(self.next_scope);
                let scope = Scope {
                    id,
                    names: names.clone(),
                };
                self.scopes.insert(namespace.to_owned(), scope);
                (id, !names.is_empty())
            }
        };
        out.command(Command::FilterNames { scope: id, names });
        more
    }
}

#[cfg(test)]
mod tests;
