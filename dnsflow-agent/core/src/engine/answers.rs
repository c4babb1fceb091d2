//! What a pod was told: from the captured frame to the lease, and the lease's end.

use std::net::{IpAddr, SocketAddr};

use dnsflow_common::walk::{self, Packet};

use super::{Engine, Scope, hold::longer, switch::Opening};
use crate::{
    Timestamp,
    dns::{Answer, DnsError},
    firewall::RuleAction,
    fragments::{DatagramKey, Fragment},
    hold::Wait,
    input::Frame,
    limits::{LIMITS_TOLD_MAX, LeaseLimits, NAMES_PER_ADDRESS_MAX, REFUSALS_TOLD_MAX},
    name::DomainName,
    port::{Addresses, Lease, LeasedFlow, Port, PortId},
    report::Report,
    resolver::Resolver,
    tally::Label as _,
    tcp::{ConnectionKey, Segment},
};

impl Engine {
    pub(super) fn frame(&mut self, frame: Frame<'_>, now: Timestamp) {
        self.counters.frames += 1;
        let (wait, connection) = self.told_by(frame, now);
        if frame.held {
            self.hold(frame, connection, wait, now);
        }
    }

    /// What there is to wait for before the pod gets the frame, and in which connection it is one
    /// of many.
    fn told_by(&mut self, frame: Frame<'_>, now: Timestamp) -> (Wait, Option<ConnectionKey>) {
        let nothing = (Wait::Nothing, None);
        let Ok(packet) = walk::from_server(&frame.bytes, &self.config.dns_ports) else {
            self.counters.frames_not_dns += 1;
            return nothing;
        };
        if !self.port_by_ifindex.contains_key(&frame.ifindex) {
            self.counters.frames_unknown_interface += 1;
            return nothing;
        }
        match packet {
            Packet::UdpAnswer(message) => match message.payload_of(frame.bytes) {
                Some(message) => (self.message(frame, message, now), None),
                None => {
                    self.counters.frames_not_dns += 1;
                    nothing
                }
            },
            Packet::TcpSegment(found) => {
                let Some(segment) = segment(&found, frame) else {
                    return nothing;
                };
                let mut wait = Wait::Nothing;
                for message in self.tcp.feed(&segment, now) {
                    wait = longer(wait, self.message(frame, &message, now));
                }
                (wait, Some(segment.key))
            }
            Packet::Fragment(found) => {
                if let Some(fragment) = fragment(&found, frame)
                    && let Some(datagram) = self.fragments.feed(&fragment, now)
                    && self.is_trusted(datagram.source)
                {
                    self.message(frame, &datagram.payload, now);
                }
                nothing
            }
        }
    }

    /// The program cannot tell whose a later fragment is: the whole datagram can.
    fn is_trusted(&self, source: SocketAddr) -> bool {
        let resolver = Resolver {
            address: source.ip(),
            port: source.port(),
        };
        let trusted = self.trusted.as_ref();
        trusted.is_some_and(|trusted| trusted.contains(&resolver))
    }

    fn message(&mut self, frame: Frame<'_>, message: &[u8], now: Timestamp) -> Wait {
        let Some(&port_id) = self.port_by_ifindex.get(&frame.ifindex) else {
            return Wait::Nothing;
        };
        match Answer::decode(message) {
            Ok(answer) => return self.answer(port_id, answer, frame.captured_at, now),
            Err(DnsError::Malformed(_)) => self.counters.answers_malformed += 1,
            Err(_) => self.counters.answers_unusable += 1,
        }
        Wait::Nothing
    }

    /// Takes in an answer; gives what has to be waited for until all that it asks for is installed.
    fn answer(
        &mut self,
        told: PortId,
        answer: Answer,
        captured_at: Timestamp,
        now: Timestamp,
    ) -> Wait {
        let Answer {
            name,
            mut addresses,
            ..
        } = answer;
        addresses.retain(|(address, _)| self.may_open(told, &name, *address));
        let changes_before = self.changes.len();
        let mut opened = Vec::new();
        let mut rules: Vec<u32> = Vec::new();
        let mut denies = false;
        for port_id in self.ports_told(told) {
            let Some(port) = self.ports.get(&port_id) else {
                continue;
            };
            let sets = self.world.sets(&port.row);
            for rule in sets.iter().flat_map(|set| set.matching(&name)) {
                denies |= rule.verdict == RuleAction::Deny;
                if !rules.contains(&rule.index) {
                    rules.push(rule.index);
                }
            }
            let LeaseLimits {
                min_ttl,
                max_ttl,
                deny_ttl,
                ..
            } = self.config.leases;
            for (address, ttl) in &addresses {
                let mut until = captured_at + (*ttl).max(min_ttl).min(max_ttl.max(min_ttl));
                if denies {
                    until = until.max(captured_at + deny_ttl);
                }
                if until <= now {
                    continue;
                }
                let fresh = self.remember(port_id, *address, &name, until, now);
                let is_lost = || {
                    let port = self.ports.get(&port_id)?;
                    Some(port.leases.get(address)?.is_lost())
                };
                if (fresh || is_lost() == Some(true))
                    && self.replan_lease(port_id, *address, now) > 0
                {
                    opened.push(*address);
                }
            }
        }
        let mut opening = None;
        if rules.is_empty() {
            self.counters.answers_unmatched += 1;
        } else if opened.is_empty() {
            self.counters.answers_known += 1;
        } else {
            self.counters.answers_opening += 1;
            opened.sort_unstable();
            opened.dedup();
            rules.sort_unstable();
            opening = self.ports.get(&told).map(|port| Opening {
                port: port.row.iface_id.clone(),
                name,
                addresses: opened,
                rules: rules.clone(),
                changes: self.changes.len() - changes_before,
                captured_at,
            });
        }
        // Also what was closed to make room, or put back: leases tell the batch that it goes in.
        self.open(changes_before, opening);
        if rules.is_empty() {
            return Wait::Nothing;
        }
        let waits = self.ports_told(told).into_iter().flat_map(|port| {
            let leases = self.ports.get(&port).map(|port| &port.leases);
            let addresses = addresses.iter().map(|(address, _)| address);
            addresses.filter_map(move |address| leases?.get(address))
        });
        waits
            .map(|lease| self.switch.wait_for(lease))
            .fold(Wait::Nothing, longer)
    }

    /// Whether the address may be opened; a refusal is counted, and told if it is news.
    fn may_open(&mut self, told: PortId, name: &DomainName, address: IpAddr) -> bool {
        let Err(reason) = self.config.refusals.check(address) else {
            return true;
        };
        self.refused.count(reason);
        if self.refused_told.len() >= REFUSALS_TOLD_MAX {
            self.refused_told.clear();
        }
        if self.refused_told.insert((name.clone(), address))
            && let Some(port) = self.ports.get(&told)
        {
            self.reports.push(Report::AddressRefused {
                port: port.row.iface_id.clone(),
                name: name.clone(),
                address,
                reason: reason.as_str(),
            });
        }
        false
    }

    /// The ports that an answer to this one is for.
    fn ports_told(&self, port: PortId) -> Vec<PortId> {
        let mut ports = self.ports_of_pod(port);
        if self.config.scope == Scope::Namespace
            && let Some(namespace) = self.namespace_of(port)
        {
            ports.extend(self.ports_in(&namespace));
            ports.sort_unstable();
            ports.dedup();
        }
        ports
    }

    /// The ports on this node that a namespace's rules hold for.
    fn ports_in(&self, namespace: &str) -> Vec<PortId> {
        let is_in = |port: &Port| self.world.namespace_of(&port.row) == Some(namespace);
        let ports = self.ports.iter().filter(|(_, port)| is_in(port));
        ports.map(|(id, _)| *id).collect()
    }

    /// With [`Scope::Namespace`], a port without addresses gets those that its namespace knows.
    pub(super) fn share_within_namespace(&mut self, port_id: PortId, now: Timestamp) {
        let is_new = |port: &Port| port.leases.is_empty();
        if self.config.scope != Scope::Namespace || !self.ports.get(&port_id).is_some_and(is_new) {
            return;
        }
        let Some(namespace) = self.namespace_of(port_id) else {
            return;
        };
        let known: Vec<(IpAddr, DomainName, Timestamp)> = self
            .ports_in(&namespace)
            .into_iter()
            .filter_map(|id| self.ports.get(&id))
            .max_by_key(|port| port.leases.len())
            .into_iter()
            .flat_map(|port| &port.leases)
            .flat_map(|(address, lease)| {
                let names = lease.names.iter();
                names.map(|(name, until)| (*address, name.clone(), *until))
            })
            .collect();
        for (address, name, until) in known {
            self.remember(port_id, address, &name, until, now);
        }
    }

    /// Every port of the pod that `port` belongs to: a pod on a user-defined network asks on one
    /// port and connects on another.
    fn ports_of_pod(&self, port: PortId) -> Vec<PortId> {
        let sandbox = self
            .ports
            .get(&port)
            .and_then(|port| port.row.sandbox.as_ref());
        match sandbox {
            None => vec![port],
            Some(sandbox) => self
                .ports
                .iter()
                .filter(|(_, other)| other.row.sandbox.as_ref() == Some(sandbox))
                .map(|(id, _)| *id)
                .collect(),
        }
    }

    /// Notes that `name` leads to `address`; returns whether that is news.
    pub(super) fn remember(
        &mut self,
        port_id: PortId,
        address: IpAddr,
        name: &DomainName,
        until: Timestamp,
        now: Timestamp,
    ) -> bool {
        let limits = self.config.leases;
        let Some(port) = self.ports.get_mut(&port_id) else {
            return false;
        };
        let leases = port.leases.len();
        if let Some(lease) = port.leases.get_mut(&address) {
            if lease.names.prolong(name, until) {
                self.leases_version += 1;
                return false;
            }
            if lease.names.len() >= NAMES_PER_ADDRESS_MAX {
                self.counters.names_dropped += 1;
                return false;
            }
        } else if leases >= limits.addresses_per_port_max && !self.evict(port_id, now) {
            self.no_room(now);
            return false;
        }
        let of_name = |port: &Port| port.addresses_of.get(name).map_or(0, Addresses::len);
        let full = |port: &Port| of_name(port) >= limits.addresses_per_name_max;
        if self.ports.get(&port_id).is_some_and(full) && !self.evict_of_name(port_id, name, now) {
            self.no_room(now);
            return false;
        }
        let Some(port) = self.ports.get_mut(&port_id) else {
            return false;
        };
        let lease = port.leases.entry(address).or_default();
        let is_new = lease.names.is_empty();
        lease.names.insert(name.clone(), until);
        let uncounted = port.note_address(is_new);
        let addresses = port.addresses_of.entry(name.clone()).or_default();
        addresses.push(address);
        // Some may have to go; by then it should be known which are not in use.
        let of_name = addresses.len() > limits.addresses_per_name_max / 2;
        let of_port = uncounted > limits.addresses_per_port_max / 2;
        if !port.limits_told.is_empty() {
            // Far below a limit, reaching it is news again.
            if addresses.len() <= limits.addresses_per_name_max / 2 {
                port.limits_told.remove(&Some(name.clone()));
            }
            if port.leases.len() <= limits.addresses_per_port_max / 2 {
                port.limits_told.remove(&None);
            }
        }
        self.due.insert((until, port_id, address));
        if of_name || of_port {
            self.count_soon(now);
        }
        true
    }

    /// An address is not remembered, because all others are in use or may be: for the next one,
    /// it will be known.
    fn no_room(&mut self, now: Timestamp) {
        self.counters.addresses_refused += 1;
        self.count_soon(now);
    }

    /// Forgets the address of a port that matters least; `false` where all may be in use.
    fn evict(&mut self, port_id: PortId, now: Timestamp) -> bool {
        let grace = self.config.leases.idle_grace;
        let comparisons = self.switch.comparisons();
        let Some(port) = self.ports.get_mut(&port_id) else {
            return false;
        };
        let Some(address) = port.expendable(grace, comparisons, now) else {
            self.limit_reached(port_id, None);
            return false;
        };
        if let Some(lease) = port.take_lease(address) {
            self.counters.addresses_evicted += 1;
            if !lease.flows.is_empty() {
                self.limit_reached(port_id, None);
            }
            self.close(address, &lease);
        }
        true
    }

    /// Takes a name from the one of its addresses that matters least.
    fn evict_of_name(&mut self, port_id: PortId, name: &DomainName, now: Timestamp) -> bool {
        let grace = self.config.leases.idle_grace;
        let Some(port) = self.ports.get_mut(&port_id) else {
            return false;
        };
        let addresses = port.addresses_of.get(name).into_iter().flatten();
        let least = addresses
            .filter_map(|address| {
                let lease = port.leases.get(address)?;
                let matters = lease.dispensability(grace, now)?;
                Some((matters, lease.names.get(name), *address))
            })
            .min();
        let is_open =
            |address| matches!(port.leases.get(address), Some(lease) if !lease.flows.is_empty());
        if least.as_ref().is_none_or(|(.., address)| is_open(address)) {
            self.limit_reached(port_id, Some(name));
        }
        let Some((.., address)) = least else {
            return false;
        };
        let Some(port) = self.ports.get_mut(&port_id) else {
            return false;
        };
        port.forget_name(name, address);
        self.counters.addresses_evicted += 1;
        self.end_expired(port_id, address, now);
        self.replan_lease(port_id, address, now);
        true
    }

    /// Tells that not all is open that the rules allow: once, until it was far below the limit.
    fn limit_reached(&mut self, port_id: PortId, name: Option<&DomainName>) {
        let Some(namespace) = self.namespace_of(port_id) else {
            return;
        };
        let Some(port) = self.ports.get_mut(&port_id) else {
            return;
        };
        if port.limits_told.len() >= LIMITS_TOLD_MAX {
            port.limits_told.clear();
        }
        if port.limits_told.insert(name.cloned()) {
            let limits = self.config.leases;
            self.reports.push(Report::LimitReached {
                namespace,
                port: port.row.iface_id.clone(),
                name: name.cloned(),
                max: match name {
                    Some(_) => limits.addresses_per_name_max,
                    None => limits.addresses_per_port_max,
                },
            });
        }
    }

    fn close(&mut self, address: IpAddr, lease: &Lease) {
        self.leases_version += 1;
        self.changes.extend(lease.deletions(address));
    }

    /// Looks at the leases that are due: those without flows end, the others only once the
    /// switch has said whether they are in use.
    pub(super) fn expire(&mut self, now: Timestamp) {
        while let Some(&(at, port_id, address)) = self.due.first() {
            if at > now {
                break;
            }
            self.due.pop_first();
            let Some(lease) = self
                .ports
                .get_mut(&port_id)
                .and_then(|port| port.leases.get_mut(&address))
            else {
                continue;
            };
            match lease.due() {
                Some(due) if due > now => {
                    self.due.insert((due, port_id, address));
                }
                _ if lease.flows.is_empty() => self.end_expired(port_id, address, now),
                _ => self.switch.await_counters(port_id, address),
            }
        }
    }

    /// Decides over a lease that is due, now that its flows' counters are known.
    pub(super) fn decide(&mut self, port_id: PortId, address: IpAddr, now: Timestamp) {
        let Self {
            ports,
            world,
            planner,
            config,
            ..
        } = self;
        let idle_grace = config.leases.idle_grace;
        let Some(port) = ports.get_mut(&port_id) else {
            return;
        };
        let Some(lease) = port.leases.get_mut(&address) else {
            return;
        };
        let sets = world.sets(&port.row);
        let facts = world.facts(port_id, &port.row, &sets);
        let used_until = |flow: &LeasedFlow| flow.used_at + idle_grace;
        let mut extended = Vec::new();
        for (name, until) in lease.names.iter().filter(|(_, until)| **until <= now) {
            let plan = facts.map(|facts| planner.for_names(facts, address, [name]));
            let patterns = plan.iter().flatten();
            let flows = patterns.filter_map(|pattern| lease.flow_at(pattern));
            let in_use = flows.map(used_until).max();
            if let Some(in_use) = in_use.filter(|in_use| *in_use > now) {
                extended.push((name.clone(), in_use.max(*until)));
            }
        }
        let adopted = lease.adopted.as_ref();
        let adopted_in_use = adopted
            .into_iter()
            .flat_map(|adopted| adopted.flows.keys())
            .filter_map(|key| lease.flow_with(key))
            .map(used_until)
            .max()
            .filter(|in_use| *in_use > now);
        for (name, in_use) in extended {
            lease.names.insert(name, in_use);
        }
        if let Some(adopted) = &mut lease.adopted
            && adopted.until <= now
        {
            adopted.until = adopted_in_use.unwrap_or(adopted.until);
        }
        self.end_expired(port_id, address, now);
        self.replan_lease(port_id, address, now);
    }

    /// Drops what has expired of a lease, and the lease when nothing else holds it.
    fn end_expired(&mut self, port_id: PortId, address: IpAddr, now: Timestamp) {
        let Some(port) = self.ports.get_mut(&port_id) else {
            return;
        };
        let Some(lease) = port.leases.get_mut(&address) else {
            return;
        };
        lease.adopted.take_if(|adopted| adopted.until <= now);
        let expired =
            |(name, until): (&DomainName, &Timestamp)| (*until <= now).then(|| name.clone());
        let expired: Vec<DomainName> = lease.names.iter().filter_map(expired).collect();
        for name in &expired {
            port.forget_name(name, address);
        }
        let Some(lease) = port.leases.get(&address) else {
            return;
        };
        if lease.is_over() {
            if let Some(lease) = port.take_lease(address) {
                self.close(address, &lease);
            }
        } else if let Some(due) = lease.due() {
            self.due.insert((due, port_id, address));
        }
    }
}

/// The TCP segment in a frame; `None` where the frame was cut within its headers.
fn segment<'a>(found: &walk::Segment, frame: Frame<'a>) -> Option<Segment<'a>> {
    let addresses = found.ip.addresses(&frame.bytes)?;
    Some(Segment {
        key: ConnectionKey {
            ifindex: frame.ifindex,
            server: SocketAddr::new(addresses.src, found.src_port),
            client: SocketAddr::new(addresses.dst, found.dst_port),
        },
        sequence: found.seq,
        flags: found.flags,
        payload: captured(frame, found.payload, found.payload_len),
        payload_len: usize::try_from(found.payload_len).ok()?,
    })
}

/// The fragment in a frame; `None` where the frame was cut within its headers.
fn fragment<'a>(found: &walk::Fragment, frame: Frame<'a>) -> Option<Fragment<'a>> {
    let addresses = found.ip.addresses(&frame.bytes)?;
    Some(Fragment {
        key: DatagramKey {
            ifindex: frame.ifindex,
            source: addresses.src,
            destination: addresses.dst,
            id: found.id,
        },
        // The walk lets no other through.
        protocol: PROTOCOL_UDP,
        offset: found.offset,
        more: found.more,
        payload: captured(frame, found.payload, found.payload_len),
        payload_len: usize::try_from(found.payload_len).ok()?,
    })
}

/// IP protocol 17 (RFC 768).
const PROTOCOL_UDP: u8 = 17;

/// What of a payload was captured.
fn captured(frame: Frame<'_>, start: u32, len: u32) -> &[u8] {
    let start = usize::try_from(start).unwrap_or(usize::MAX);
    let rest = frame.bytes.get(start..).unwrap_or_default();
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    rest.get(..len).unwrap_or(rest)
}
