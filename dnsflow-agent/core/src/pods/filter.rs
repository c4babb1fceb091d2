//! The name filter of the kernel: for each interface of a pod, the names in the rules of its namespace. Answers for
//! other names stay in the kernel.
//!
//! The names come from the EgressFirewall as written, also before OVN enforces it. An interface without a known
//! namespace has no filter.
//!
//! The interfaces of pods behind an EgressFirewall are watched as well: the kernel reports the destinations of their
//! connections. At the interfaces of pods whose names are recorded, all answers leave the kernel; unmentioned ones
//! are also deferred there.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    Command, Timestamp,
    io::{input::NameSetId, output::Output},
    tools::deadline::{self, Deadline, Why},
    values::name::DomainName,
};

/// The deferred answers are replayed once more after this time: the kernel may have judged an
/// answer by the old names and deferred it after the first replay.
const REPLAY_AGAIN: Duration = Duration::from_millis(10);

/// The filter as the last commands set it.
#[derive(Debug, Default)]
pub(crate) struct Filter {
    /// Whether interfaces, namespaces or EgressFirewalls may have changed since.
    is_outdated: bool,
    interfaces: BTreeMap<u32, NameSetId>,
    watched: BTreeSet<u32>,
    recorded: BTreeSet<u32>,
    name_sets: BTreeMap<String, NameSet>,
    next_name_set: u32,
    /// How many changes the kernel may not know yet ([`Command::ConfirmFilter`]).
    unconfirmed: usize,
    /// Whether the deferred answers are to be replayed when the kernel knows all changes.
    replays: bool,
    replay_at: Option<Timestamp>,
    /// When the kernel last came to know all changes.
    confirmed_at: Option<Timestamp>,
}

#[derive(Debug)]
struct NameSet {
    id: NameSetId,
    /// The version of the names, where they come from.
    version: u64,
    names: BTreeSet<DomainName>,
    /// Whether answers are held.
    held: bool,
}

impl Filter {
    /// Notes that interfaces, their namespaces or EgressFirewalls may have changed.
    pub(crate) fn outdate(&mut self) {
        self.is_outdated = true;
    }

    /// Whether some interface has the names of this namespace.
    pub(crate) fn is_for(&self, namespace: &str) -> bool {
        self.name_sets.contains_key(namespace)
    }

    /// The names that rules mention at an interface of this namespace, as the kernel was told; `None` if it filters
    /// nothing there.
    pub(crate) fn names_at(&self, ifindex: u32, namespace: &str) -> Option<&BTreeSet<DomainName>> {
        let name_set = self.name_sets.get(namespace)?;
        let is_there = self.interfaces.get(&ifindex) == Some(&name_set.id);
        is_there.then_some(&name_set.names)
    }

    /// Whether [`Filter::update`] has anything to do.
    pub(crate) fn is_outdated(&self) -> bool {
        self.is_outdated
    }

    /// When [`Filter::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        deadline::at(self.replay_at, Why::Replay)
    }

    /// Replays the deferred answers once more, if that is due.
    pub(crate) fn timeout(&mut self, out: &mut Output) {
        let now = out.now();
        if self.replay_at.take_if(|at| *at <= now).is_some() {
            out.command(Command::ReplayAnswers);
        }
    }

    /// Whether the kernel may have judged an answer that it saw at this time by names that are no longer
    /// wanted.
    pub(crate) fn was_wider(&self, captured_at: Timestamp) -> bool {
        let confirmed = self.confirmed_at;
        self.unconfirmed > 0 || confirmed.is_some_and(|at| captured_at <= at + REPLAY_AGAIN)
    }

    /// The kernel knows the changes of one more [`Filter::update`]. Behind the last one, the deferred answers are
    /// replayed, if names have come.
    pub(crate) fn confirmed(&mut self, out: &mut Output) {
        let now = out.now();
        self.unconfirmed = self.unconfirmed.saturating_sub(1);
        if self.unconfirmed > 0 {
            return;
        }
        self.confirmed_at = Some(now);
        if std::mem::take(&mut self.replays) {
            out.command(Command::ReplayAnswers);
            self.replay_at = Some(now + REPLAY_AGAIN);
        }
    }

    /// Gives out the commands that make the filter as wanted. `wanted` has the namespace of each
    /// interface with a filter; `names_in` returns the names that the rules of a namespace mention, with their version:
    /// `None` if it is the one that is known; `holds`: whether answers are held there.
    pub(crate) fn update(
        &mut self,
        wanted: &BTreeMap<u32, &str>,
        names_in: impl Fn(&str, Option<u64>) -> Option<(u64, BTreeSet<DomainName>)>,
        holds: impl Fn(&str) -> bool,
        out: &mut Output,
    ) {
        self.is_outdated = false;
        let namespaces: BTreeSet<&str> = wanted.values().copied().collect();
        let mut is_other = false;
        for namespace in &namespaces {
            let known = self.name_sets.get(*namespace).map(|known| known.version);
            let Some((version, names)) = names_in(namespace, known) else {
                continue;
            };
            let (more, fewer) = self.name(namespace, version, names, out);
            self.replays |= more;
            is_other |= more || fewer;
        }
        for namespace in &namespaces {
            let held = holds(namespace);
            if let Some(name_set) = self.name_sets.get_mut(*namespace)
                && name_set.held != held
            {
                name_set.held = held;
                out.command(Command::HoldAnswers {
                    name_set: name_set.id,
                    held,
                });
            }
        }
        self.interfaces.retain(|ifindex, _| {
            let keep = wanted.contains_key(ifindex);
            if !keep {
                out.command(Command::FilterInterface {
                    ifindex: *ifindex,
                    name_set: None,
                });
            }
            keep
        });
        for (ifindex, namespace) in wanted {
            let name_set = self.name_sets.get(*namespace).map(|name_set| name_set.id);
            if let Some(name_set) = name_set
                && self.interfaces.insert(*ifindex, name_set) != Some(name_set)
            {
                is_other = true;
                out.command(Command::FilterInterface {
                    ifindex: *ifindex,
                    name_set: Some(name_set),
                });
            }
        }
        self.name_sets.retain(|namespace, name_set| {
            let keep = namespaces.contains(namespace.as_str());
            if !keep {
                out.command(Command::ForgetNames {
                    name_set: name_set.id,
                });
            }
            keep
        });
        if is_other {
            self.unconfirmed += 1;
            out.command(Command::ConfirmFilter);
        }
    }

    /// Gives out the commands that watch the attempts of exactly these interfaces.
    pub(crate) fn watch(&mut self, wanted: BTreeSet<u32>, out: &mut Output) {
        replace(&mut self.watched, wanted, out, |ifindex, watched| {
            Command::WatchAttempts { ifindex, watched }
        });
    }

    /// Gives out the commands that record the answers of exactly these interfaces.
    pub(crate) fn record(&mut self, wanted: BTreeSet<u32>, out: &mut Output) {
        replace(&mut self.recorded, wanted, out, |ifindex, recorded| {
            Command::RecordAnswers { ifindex, recorded }
        });
    }

    /// Sets the names of a namespace; returns whether there are more of them, and whether some are gone.
    fn name(
        &mut self,
        namespace: &str,
        version: u64,
        names: BTreeSet<DomainName>,
        out: &mut Output,
    ) -> (bool, bool) {
        let (id, more, fewer) = match self.name_sets.get_mut(namespace) {
            Some(name_set) if name_set.names == names => {
                name_set.version = version;
                return (false, false);
            }
            Some(name_set) => {
                name_set.version = version;
                let more = !names.is_subset(&name_set.names);
                let fewer = !name_set.names.is_subset(&names);
                name_set.names.clone_from(&names);
                (name_set.id, more, fewer)
            }
            None => {
                self.next_name_set += 1;
                let id = NameSetId(self.next_name_set);
                let name_set = NameSet {
                    id,
                    version,
                    names: names.clone(),
                    held: true,
                };
                self.name_sets.insert(namespace.to_owned(), name_set);
                (id, !names.is_empty(), false)
            }
        };
        out.command(Command::FilterNames {
            name_set: id,
            names,
        });
        (more, fewer)
    }
}

/// Makes a set of interfaces the wanted one. Gives out a command for each that comes (`true`) or goes.
fn replace(
    set: &mut BTreeSet<u32>,
    wanted: BTreeSet<u32>,
    out: &mut Output,
    command: impl Fn(u32, bool) -> Command,
) {
    for ifindex in set.symmetric_difference(&wanted) {
        out.command(command(*ifindex, wanted.contains(ifindex)));
    }
    *set = wanted;
}

#[cfg(test)]
mod tests;
