//! What a pod was told: from the captured frame to the lease, and the lease's end.

use std::{
    collections::{BTreeMap, hash_map::Entry},
    net::IpAddr,
    time::Duration,
};

use dnsflow_common::walk::{self, Packet};

use super::{Engine, sets_of, switch::Opening};
use crate::core::{
    Timestamp,
    dns::{Answer, DnsError},
    flow::FlowChange,
    input::Frame,
    limits::{ADDRESSES_PER_PORT_MAX, IDLE_GRACE, MAX_TTL, MIN_TTL, NAMES_PER_ADDRESS_MAX},
    name::DomainName,
    plan::{PortFacts, flows_for_names},
    port::{Lease, PortId},
};

impl Engine {
    pub(super) fn frame(&mut self, frame: Frame<'_>, now: Timestamp) {
        self.counters.frames += 1;
        let message = match walk::from_server(&frame.bytes, &self.config.dns_ports) {
            Ok(Packet::UdpAnswer(message)) => message.payload_of(frame.bytes),
            Ok(Packet::TcpSegment(_) | Packet::Fragment(_)) | Err(_) => None,
        };
        let Some(message) = message else {
            self.counters.frames_not_dns += 1;
            return;
        };
        let Some(&port_id) = self.port_by_ifindex.get(&frame.ifindex) else {
            self.counters.frames_unknown_interface += 1;
            return;
        };
        match Answer::decode(message) {
            Ok(answer) => self.answer(port_id, answer, frame.captured_at, now),
            Err(DnsError::Malformed(_)) => self.counters.answers_malformed += 1,
            Err(_) => self.counters.answers_unusable += 1,
        }
    }

    fn answer(&mut self, told: PortId, answer: Answer, captured_at: Timestamp, now: Timestamp) {
        let Answer { name, addresses } = answer;
        let mut opened = Vec::new();
        let mut rules: Vec<u32> = Vec::new();
        let mut matched = false;
        for port_id in self.ports_of_pod(told) {
            let Some(port) = self.ports.get(&port_id) else {
                continue;
            };
            let sets = sets_of(
                &self.ovn,
                &self.rules,
                &self.namespace_by_group,
                &port.row.iface_id,
            );
            for rule in sets.iter().flat_map(|set| set.matching(&name)) {
                matched = true;
                if !rules.contains(&rule.index) {
                    rules.push(rule.index);
                }
            }
            for (address, ttl) in &addresses {
                let fresh = self.remember(port_id, *address, &name, *ttl, now);
                if fresh && self.replan_lease(port_id, *address, now) > 0 {
                    opened.push(*address);
                }
            }
        }
        if !matched {
            self.counters.answers_unmatched += 1;
        } else if opened.is_empty() {
            self.counters.answers_known += 1;
        } else {
            self.counters.answers_opening += 1;
            opened.sort_unstable();
            opened.dedup();
            rules.sort_unstable();
            let opening = self.ports.get(&told).map(|port| Opening {
                port: port.row.iface_id.clone(),
                name,
                addresses: opened,
                rules,
                captured_at,
            });
            self.flush(false, opening);
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
    fn remember(
        &mut self,
        port_id: PortId,
        address: IpAddr,
        name: &DomainName,
        ttl: Duration,
        now: Timestamp,
    ) -> bool {
        let until = now + ttl.clamp(MIN_TTL, MAX_TTL);
        let Some(port) = self.ports.get_mut(&port_id) else {
            return false;
        };
        if port.leases.len() >= ADDRESSES_PER_PORT_MAX && !port.leases.contains_key(&address) {
            self.evict(port_id);
        }
        let Some(port) = self.ports.get_mut(&port_id) else {
            return false;
        };
        let lease = match port.leases.entry(address) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Lease::default()),
        };
        if let Some(known) = lease.names.get_mut(name) {
            *known = until.max(*known);
            return false;
        }
        if lease.names.len() >= NAMES_PER_ADDRESS_MAX {
            self.counters.names_dropped += 1;
            return false;
        }
        lease.names.insert(name.clone(), until);
        self.due.insert((until, port_id, address));
        true
    }

    /// Forgets the address of a port that would expire first, one that is not open if there is any.
    fn evict(&mut self, port_id: PortId) {
        let Some(port) = self.ports.get_mut(&port_id) else {
            return;
        };
        let first = port
            .leases
            .iter()
            .min_by_key(|(address, lease)| (!lease.flows.is_empty(), lease.due(), **address))
            .map(|(address, _)| *address);
        if let Some(address) = first
            && let Some(lease) = port.leases.remove(&address)
        {
            self.counters.addresses_evicted += 1;
            self.close(lease);
        }
    }

    fn close(&mut self, lease: Lease) {
        for flow in lease.flows {
            self.changes
                .push(FlowChange::Delete(flow.key, flow.body.cookie));
        }
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
            ovn,
            rules,
            namespace_by_group,
            locator,
            cookies,
            ..
        } = self;
        let Some(port) = ports.get_mut(&port_id) else {
            return;
        };
        let Some(lease) = port.leases.get_mut(&address) else {
            return;
        };
        let sets = sets_of(ovn, rules, namespace_by_group, &port.row.iface_id);
        let facts = ovn
            .place_of(&port.row.iface_id)
            .zip(locator.base())
            .map(|(place, base)| PortFacts {
                place,
                addresses: &port.row.addresses,
                sets: &sets,
                base,
            });
        let used_until = |key| {
            let flow = lease.flows.iter().find(|flow| flow.key == key)?;
            Some(flow.used_at + IDLE_GRACE)
        };
        let mut extended = Vec::new();
        for (name, until) in lease.names.iter().filter(|(_, until)| **until <= now) {
            let flows = facts.map(|facts| flows_for_names(facts, address, [name], cookies));
            let keys = flows.into_iter().flat_map(BTreeMap::into_keys);
            let in_use = keys.filter_map(used_until).max();
            if let Some(in_use) = in_use.filter(|in_use| *in_use > now) {
                extended.push((name.clone(), in_use.max(*until)));
            }
        }
        let adopted_in_use = lease
            .adopted
            .keys()
            .cloned()
            .filter_map(used_until)
            .max()
            .filter(|in_use| *in_use > now);
        for (name, in_use) in extended {
            lease.names.insert(name, in_use);
        }
        if !lease.adopted.is_empty() && lease.adopted_until <= now {
            lease.adopted_until = adopted_in_use.unwrap_or(lease.adopted_until);
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
        lease.names.retain(|_, until| *until > now);
        if lease.adopted_until <= now {
            lease.adopted.clear();
        }
        if lease.is_over() {
            if let Some(lease) = port.leases.remove(&address) {
                self.close(lease);
            }
        } else if let Some(due) = lease.due() {
            self.due.insert((due, port_id, address));
        }
    }
}
