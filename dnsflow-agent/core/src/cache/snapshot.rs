//! The names behind the flows that the agent leaves in the switch, for the next agent.
//!
//! The next agent finds the flows in the switch by their cookie. The switch does not have the names of the flows and
//! the ends of the names; the snapshot has. It also has names whose flows could not be written yet: an agent may end
//! before it has read all of its sources.
//!
//! A flow of the last seconds has no name there. So a snapshot also has the rules: a rule that has come to the place of
//! another one since then has not opened the flow.
//!
//! A snapshot is given out in parts, one for each port, so it is never in memory as a whole.

use std::{net::IpAddr, sync::Arc, time::Duration};

use crate::{
    Timestamp,
    policy::plan::RuleInPlace,
    values::{ids::PortId, name::DomainName},
};

/// The last snapshot of an earlier run.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Saved {
    /// The rules of its namespaces.
    pub rules: Vec<SavedRules>,
    /// Its entries.
    pub entries: Vec<SavedEntry>,
}

/// A part of a snapshot.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum SavedPart {
    /// The rules of all namespaces with pods on the node: the first part.
    Rules(Vec<SavedRules>),
    /// Entries.
    Entries(Vec<SavedEntry>),
}

/// The rules in force in a namespace.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedRules {
    /// The namespace.
    pub namespace: Arc<str>,
    /// Its rules, each as often as its flows have priorities.
    pub rules: Vec<RuleInPlace>,
    /// Whether others were in force that the switch had not followed.
    pub is_partial: bool,
}

/// The names of one address of one port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedEntry {
    /// The logical port (`iface-id`). The entries of a port share the text.
    pub port: Arc<str>,
    /// The pod's UID (`iface-id-ver`): another pod under the same name inherits nothing.
    pub pod: Option<Arc<str>>,
    /// The address.
    pub address: IpAddr,
    /// The names that lead to it.
    pub names: Vec<SavedName>,
}

/// A name, and the time for which it still counts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedName {
    /// The name.
    pub name: DomainName,
    /// The time that is left for the name.
    pub rest: Duration,
    /// The least time that is left if a rule denies the name.
    pub deny_rest: Duration,
    /// Whether a rule denies the name.
    pub is_denied: bool,
}

/// A snapshot that is given out in parts ([`Engine::next_part`]).
///
/// [`Engine::next_part`]: crate::engine::Engine::next_part
#[derive(Debug)]
pub struct Snapshot {
    /// When it was begun. The time that is left for a name is counted from then on.
    pub(crate) at: Timestamp,
    /// Whether the rules were given out.
    pub(crate) has_rules: bool,
    /// The last port that was given out, if any. A port that comes meanwhile has a greater number.
    pub(crate) port: Option<PortId>,
    /// The last of the ports that was given out although it has not come back yet, if any.
    pub(crate) awaited: Option<Arc<str>>,
}

impl FromIterator<SavedPart> for Saved {
    fn from_iter<T: IntoIterator<Item = SavedPart>>(parts: T) -> Self {
        let mut saved = Self::default();
        for part in parts {
            match part {
                SavedPart::Rules(rules) => saved.rules.extend(rules),
                SavedPart::Entries(entries) => saved.entries.extend(entries),
            }
        }
        saved
    }
}

impl SavedEntry {
    /// The entry, so much later.
    pub(crate) fn aged(&self, time: Duration) -> Self {
        let names = self.names.iter().map(|saved| SavedName {
            name: saved.name.clone(),
            rest: saved.rest.saturating_sub(time),
            deny_rest: saved.deny_rest.saturating_sub(time),
            is_denied: saved.is_denied,
        });
        Self {
            port: Arc::clone(&self.port),
            pod: self.pod.clone(),
            address: self.address,
            names: names.collect(),
        }
    }
}

impl Snapshot {
    /// Begins a snapshot of the present.
    pub fn begin(now: Timestamp) -> Self {
        Self {
            at: now,
            has_rules: false,
            port: None,
            awaited: None,
        }
    }
}
