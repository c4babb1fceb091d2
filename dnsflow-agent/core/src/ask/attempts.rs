//! The destinations of the pods' connections: the names of the addresses, and the latest reports.
//!
//! This is state of its own beside the engine. Nothing here opens an address, and nothing here takes the time of the
//! thread that does: that thread only judges an attempt ([`View::judge_attempt`]). Mentioned answers are in the
//! engine's cache. Unmentioned ones are remembered here, for the names of denied connections.
//!
//! [`View::judge_attempt`]: crate::ask::view::View::judge_attempt

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
};

use dnsflow_common::walk::{self, Packet, Ports, ServerPorts as _};

use crate::{
    Timestamp,
    dns::{Failure, FailureKind, Question, Response},
    io::{input::Frame, report::Denied},
    tools::{
        rate::{Account, Rate},
        recent::{Limits, OfInterface, Recent},
    },
    values::{
        connection::Attempt,
        flow::Transport,
        limits::{
            ASKED_SERVERS, ASKED_SERVERS_PER_INTERFACE, DENIAL_REPORT_AGAIN,
            DENIAL_REPORT_BURST_TIME, DENIAL_REPORT_INTERVAL, FAILED_ANSWERS,
            FAILED_ANSWERS_PER_INTERFACE, HEARD_NAMES_PER_ADDRESS_MAX, HEARD_TIME, PLACES,
            PLACES_PER_INTERFACE,
        },
        name::DomainName,
        resolver::Resolver,
    },
};

/// A name that a pod was told an address for, although no rule mentions the name.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Heard {
    /// The name that the pod has asked for.
    pub name: DomainName,
    /// When the kernel saw the answer.
    pub at: Timestamp,
    /// Who has answered.
    pub resolver: Resolver,
}

/// The same, with the pod and the address.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HeardAt {
    /// The interface index of the pod.
    pub ifindex: u32,
    /// The address.
    pub address: IpAddr,
    /// The name.
    pub heard: Heard,
}

/// A DNS server that a pod has asked and that was not trusted then.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AskedServer {
    /// The interface index of the pod.
    pub ifindex: u32,
    /// The server.
    pub server: Resolver,
    /// When the kernel last told of it.
    pub at: Timestamp,
}

/// An error that a trusted DNS server has answered.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FailedAnswer {
    /// The interface index of the pod.
    pub ifindex: u32,
    /// The question, and the error.
    pub failure: Failure,
    /// When the kernel saw the answer.
    pub at: Timestamp,
    /// Who has answered.
    pub resolver: Resolver,
}

/// A question of a pod.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Questioned {
    ifindex: u32,
    question: Question,
}

impl OfInterface for Questioned {
    fn ifindex(&self) -> u32 {
        self.ifindex
    }
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Place<T> {
    ifindex: u32,
    address: IpAddr,
    transport: T,
}

impl<T> OfInterface for Place<T> {
    fn ifindex(&self) -> u32 {
        self.ifindex
    }
}

const LIMITS: Limits = Limits {
    entries: PLACES,
    per_interface: PLACES_PER_INTERFACE,
    bytes: 0,
    bytes_per_interface: 0,
};

const LIMITS_OF_SERVERS: Limits = Limits {
    entries: ASKED_SERVERS,
    per_interface: ASKED_SERVERS_PER_INTERFACE,
    ..LIMITS
};

const LIMITS_OF_FAILED: Limits = Limits {
    entries: FAILED_ANSWERS,
    per_interface: FAILED_ANSWERS_PER_INTERFACE,
    ..LIMITS
};

/// The latest attempts of the pods, and the names for them.
#[derive(Debug)]
pub struct Attempts {
    dns_ports: Ports,
    heard: Recent<Place<()>, Vec<Heard>>,
    /// When a denied attempt was reported, and the decision.
    reported: Recent<Place<Transport>, (Timestamp, u64)>,
    servers: Recent<Place<Transport>, Timestamp>,
    failed: Recent<Questioned, FailedAnswer>,
    accounts: BTreeMap<u32, Account>,
    left_out: u64,
}

const RATE: Rate = Rate::every(DENIAL_REPORT_INTERVAL, DENIAL_REPORT_BURST_TIME);

impl Attempts {
    /// Nothing was heard yet. DNS servers answer from these ports.
    pub fn new(dns_ports: Ports) -> Self {
        Self {
            dns_ports,
            heard: Recent::new(LIMITS),
            reported: Recent::new(LIMITS),
            servers: Recent::new(LIMITS_OF_SERVERS),
            failed: Recent::new(LIMITS_OF_FAILED),
            accounts: BTreeMap::new(),
            left_out: 0,
        }
    }

    /// Remembers the addresses of an answer that no rule mentions, and an error of a name that a rule mentions. The
    /// kernel has checked that the pod asked a DNS server that is trusted. A message that is no usable answer is left
    /// out.
    pub fn hear(&mut self, frame: Frame<'_>, now: Timestamp) {
        let found = walk::from_server_or_empty(&frame.bytes, &self.dns_ports);
        let Ok((Packet::UdpAnswer(found), empty)) = found else {
            return;
        };
        let source = found.ip.addresses(&frame.bytes);
        let Some((source, payload)) = source.zip(found.payload_of(frame.bytes)) else {
            return;
        };
        let resolver = Resolver {
            address: source.src,
            port: found.src_port,
        };
        if empty.is_some() {
            let is_told = |failure: &Failure| {
                matches!(failure.kind, FailureKind::Error(_)) || failure.question.is_for_addresses()
            };
            if let Some(failure) = Failure::read(payload).filter(is_told) {
                let key = Questioned {
                    ifindex: frame.ifindex,
                    question: failure.question.clone(),
                };
                let failed = FailedAnswer {
                    ifindex: frame.ifindex,
                    failure,
                    at: frame.captured_at,
                    resolver,
                };
                self.failed.insert(key, failed, now);
            }
            return;
        }
        let Ok(response) = Response::read(payload) else {
            return;
        };
        let Ok(answer) = response.answer(PLACES_PER_INTERFACE) else {
            return;
        };
        for (address, _) in &answer.addresses {
            let place = Place {
                ifindex: frame.ifindex,
                address: *address,
                transport: (),
            };
            let heard = Heard {
                name: answer.name.clone(),
                at: frame.captured_at,
                resolver,
            };
            match self.heard.use_entry(&place, now) {
                Some(names) => {
                    names.retain(|known| known.name != heard.name);
                    names.truncate(HEARD_NAMES_PER_ADDRESS_MAX - 1);
                    // The newest first.
                    names.insert(0, heard);
                }
                None => {
                    self.heard.insert(place, vec![heard], now);
                }
            }
        }
    }

    /// The names that the pod was told the destination for, the newest first.
    pub fn heard(&mut self, attempt: &Attempt) -> Vec<Heard> {
        let place = Place {
            ifindex: attempt.ifindex,
            address: attempt.address,
            transport: (),
        };
        self.heard.get_mut(&place).cloned().unwrap_or_default()
    }

    /// The names that led pods to an address, the newest first.
    pub fn heard_at(&self, address: IpAddr) -> Vec<HeardAt> {
        self.heard_where(|place, _| place.address == address)
    }

    /// The addresses to which a name led pods, or the name with a search domain behind it, the newest first.
    pub fn heard_of(&self, name: &DomainName) -> Vec<HeardAt> {
        self.heard_where(|_, heard| heard.name.wire().starts_with(name.wire()))
    }

    /// The errors that answered questions for a name.
    pub fn failed_for(&self, name: &DomainName) -> Vec<FailedAnswer> {
        let failed = self.failed.iter();
        let of_name = failed.filter(|(asked, _)| asked.question.name == *name);
        of_name.map(|(_, failed)| failed.clone()).collect()
    }

    fn heard_where(&self, is_it: impl Fn(&Place<()>, &Heard) -> bool) -> Vec<HeardAt> {
        let all = self.heard.iter().flat_map(|(place, heard)| {
            let heard = heard.iter();
            heard.map(move |heard| (place, heard))
        });
        let found = all.filter(|(place, heard)| is_it(place, heard));
        let found = found.map(|(place, heard)| HeardAt {
            ifindex: place.ifindex,
            address: place.address,
            heard: heard.clone(),
        });
        let mut found: Vec<HeardAt> = found.collect();
        found.sort_by_key(|one| std::cmp::Reverse(one.heard.at));
        found
    }

    /// Remembers the destination of an attempt if it may be a DNS server. Of trusted ones the kernel does not tell.
    pub fn note_server(&mut self, attempt: &Attempt, now: Timestamp) {
        if self.dns_ports.contains(attempt.port) {
            let place = Place {
                ifindex: attempt.ifindex,
                address: attempt.address,
                transport: attempt.transport(),
            };
            self.servers.insert(place, attempt.at, now);
        }
    }

    /// The DNS servers that a pod has asked and that were not trusted, the newest first.
    pub fn servers_asked(&self, ifindex: u32) -> Vec<AskedServer> {
        let servers = self.servers.iter();
        let of_pod = servers.filter(|(place, _)| place.ifindex == ifindex);
        let of_pod = of_pod.filter_map(|(place, at)| {
            let server = Resolver {
                address: place.address,
                port: place.transport.port?,
            };
            Some(AskedServer {
                ifindex,
                server,
                at: *at,
            })
        });
        let mut of_pod: Vec<AskedServer> = of_pod.collect();
        of_pod.sort_by_key(|one| (std::cmp::Reverse(one.at), one.server));
        of_pod
    }

    /// Whether to report a denied attempt: the same was not reported lately, and the pod has not led to too many reports.
    /// In the second case, it is counted. After an edit, another reason or another rule is news.
    pub fn is_news(&mut self, denied: &Denied, now: Timestamp) -> bool {
        let Denied {
            attempt,
            reason,
            rule,
            rule_text,
            ..
        } = denied;
        let place = Place {
            ifindex: attempt.ifindex,
            address: attempt.address,
            transport: attempt.transport(),
        };
        let mut decision = DefaultHasher::new();
        (reason, rule, rule_text).hash(&mut decision);
        let decision = decision.finish();
        let lately = |(at, known): &mut (Timestamp, u64)| {
            now.since(*at) < DENIAL_REPORT_AGAIN && *known == decision
        };
        if self.reported.get_mut(&place).is_some_and(lately) {
            return false;
        }
        let account = self.accounts.entry(attempt.ifindex).or_default();
        if !account.has_left(RATE, now) {
            self.left_out += 1;
            return false;
        }
        account.spend(1, RATE, now);
        self.reported.insert(place, (now, decision), now);
        true
    }

    /// How many denied attempts were not reported because their pods have led to too many reports.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Forgets old names and attempts. To be called now and then.
    pub fn forget_old(&mut self, now: Timestamp) {
        let before = |time| now.checked_sub(time).unwrap_or_default();
        let (heard, reported) = (before(HEARD_TIME), before(DENIAL_REPORT_AGAIN));
        while self.heard.pop_unused_since(heard).is_some() {}
        while self.servers.pop_unused_since(heard).is_some() {}
        while self.failed.pop_unused_since(heard).is_some() {}
        while self.reported.pop_unused_since(reported).is_some() {}
        self.accounts.retain(|_, account| !account.is_full(now));
    }
}

#[cfg(test)]
mod tests;
