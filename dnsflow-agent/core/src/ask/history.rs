//! The destinations to which pods of this node have connected, or have tried to, within the last hour.
//!
//! This is state of its own beside the engine, as [`attempts`](crate::ask::attempts) is: it decides over no address.
//! It shows the effect of another EgressFirewall ([`trial`](crate::ask::trial)), and unused rules.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{
    Timestamp,
    ovn::rows::pod_of_port,
    tools::recent::{Limits, OfInterface, Recent},
    values::{
        connection::Attempt,
        flow::{Protocol, Transport},
        limits::{
            HISTORY_CONNECTIONS, HISTORY_PER_INTERFACE, HISTORY_TIME, NAMES_PER_CONNECTION_MAX,
        },
        name::DomainName,
        verdict::{Reason, Verdict},
    },
};

/// A pod's attempt to connect, and its verdict.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tried {
    /// The namespace of the EgressFirewall that holds for the pod.
    pub namespace: String,
    /// The logical port of the pod.
    pub port: String,
    /// The attempt.
    pub attempt: Attempt,
    /// The names that the pod was told the address for, the newest first: [`NAMES_PER_CONNECTION_MAX`] at most.
    pub names: Vec<DomainName>,
    /// Whether the rules allow it.
    pub verdict: Verdict,
    /// Why.
    pub reason: Reason,
    /// The rule that decides, by its index in `spec.egress`.
    pub rule: Option<u32>,
    /// Whether a rule by name never opens the address.
    pub is_refused: bool,
    /// Whether the address is one of a node.
    pub is_node: bool,
}

/// Connections of one pod to one place, as people ask for them.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ConnectionView {
    /// The namespace of the EgressFirewall that holds for the pod.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The destination.
    pub address: IpAddr,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// The destination port.
    pub port: u16,
    /// The names that the pod was told the address for, the newest first.
    pub names: Vec<String>,
    /// The verdict of the last attempt.
    pub verdict: Verdict,
    /// Why.
    pub reason: Reason,
    /// The rule that decided over the last attempt.
    pub rule: Option<u32>,
    /// Whether a rule by name never opens the address.
    pub is_refused: bool,
    /// Whether the address is one of a node.
    pub is_node: bool,
    /// The seconds since the first attempt.
    pub first_s: u64,
    /// The seconds since the last attempt.
    pub last_s: u64,
    /// The attempts that the kernel told of: one in ten seconds.
    pub count: u64,
}

impl ConnectionView {
    /// Protocol and port.
    pub fn transport(&self) -> Transport {
        Transport {
            protocol: self.protocol,
            port: Some(self.port),
        }
    }
}

/// Which connections belong together: a pod's interface, and where they lead to.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Place {
    ifindex: u32,
    address: IpAddr,
    transport: Transport,
}

impl OfInterface for Place {
    fn ifindex(&self) -> u32 {
        self.ifindex
    }
}

#[derive(Debug)]
struct Seen {
    tried: Tried,
    first: Timestamp,
    last: Timestamp,
    count: u64,
}

/// The connections of the last hour.
#[derive(Debug)]
pub struct History {
    since: Timestamp,
    seen: Recent<Place, Seen>,
    forgotten: u64,
}

const LIMITS: Limits = Limits {
    entries: HISTORY_CONNECTIONS,
    per_interface: HISTORY_PER_INTERFACE,
    bytes: 0,
    bytes_per_interface: 0,
};

impl History {
    /// Nothing was seen yet.
    pub fn new(now: Timestamp) -> Self {
        Self {
            since: now,
            seen: Recent::new(LIMITS),
            forgotten: 0,
        }
    }

    /// Remembers an attempt.
    pub fn note(&mut self, tried: Tried, now: Timestamp) {
        self.forget_old(now);
        let place = Place {
            ifindex: tried.attempt.ifindex,
            address: tried.attempt.address,
            transport: tried.attempt.transport(),
        };
        // The kernel may give the index of an interface that is gone to that of another pod.
        let known = self.seen.use_entry(&place, now);
        match known.filter(|seen| seen.tried.port == tried.port) {
            Some(seen) => {
                let before = std::mem::replace(&mut seen.tried, tried);
                for name in before.names {
                    if !seen.tried.names.contains(&name) {
                        seen.tried.names.push(name);
                    }
                }
                seen.tried.names.truncate(NAMES_PER_CONNECTION_MAX);
                seen.last = now;
                seen.count += 1;
            }
            None => {
                let mut tried = tried;
                tried.names.truncate(NAMES_PER_CONNECTION_MAX);
                let seen = Seen {
                    tried,
                    first: now,
                    last: now,
                    count: 1,
                };
                if self.seen.insert(place, seen, now).is_some() {
                    self.forgotten += 1;
                }
            }
        }
    }

    /// Forgets connections that are older than an hour.
    fn forget_old(&mut self, now: Timestamp) {
        let before = now.checked_sub(HISTORY_TIME).unwrap_or_default();
        while self.seen.pop_unused_since(before).is_some() {}
    }

    /// The places where pods behind the EgressFirewall of this namespace have connected to, in order; all
    /// pods where none is named.
    pub fn places(&mut self, namespace: Option<&str>, now: Timestamp) -> Vec<Place> {
        self.forget_old(now);
        let seen = self.seen.iter().filter(|(_, seen)| {
            namespace.is_none_or(|namespace| seen.tried.namespace == namespace)
        });
        let mut places: Vec<Place> = seen.map(|(place, _)| *place).collect();
        places.sort_unstable();
        places
    }

    /// The remembered connections to these places.
    pub fn connections(&mut self, places: &[Place], now: Timestamp) -> Vec<ConnectionView> {
        let seen = places.iter().filter_map(|place| {
            let seen = &*self.seen.get_mut(place)?;
            Some(seen.view(now))
        });
        seen.collect()
    }

    /// The time that is known of, an hour at most.
    pub fn known_for(&self, now: Timestamp) -> std::time::Duration {
        now.since(self.since).min(HISTORY_TIME)
    }

    /// How many places were forgotten within their hour, because there was no room.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }
}

impl Seen {
    fn view(&self, now: Timestamp) -> ConnectionView {
        let Self {
            tried,
            first,
            last,
            count,
        } = self;
        let (_, pod) = pod_of_port(&tried.port);
        ConnectionView {
            namespace: tried.namespace.clone(),
            pod: pod.to_owned(),
            address: tried.attempt.address,
            protocol: tried.attempt.protocol,
            port: tried.attempt.port,
            names: tried.names.iter().map(ToString::to_string).collect(),
            verdict: tried.verdict,
            reason: tried.reason,
            rule: tried.rule,
            is_refused: tried.is_refused,
            is_node: tried.is_node,
            first_s: now.since(*first).as_secs(),
            last_s: now.since(*last).as_secs(),
            count: *count,
        }
    }
}

#[cfg(test)]
mod tests;
