//! The decision over a connection to a Service: the EgressFirewall holds behind the load balancer, so that the backends
//! decide.

use std::{collections::BTreeSet, fmt::Write, net::IpAddr};

use super::{
    View,
    explain::{Asked, Beside, Decision, Ruling, Sets, rule_at},
    transport_text,
};
use crate::{
    ask::judge::Doubt,
    pods::ports::Port,
    values::{
        firewall::RuleAction,
        flow::{Protocol, Transport},
        ids::PortId,
        verdict::{Reason, Verdict},
    },
};

/// The rules are asked about at most this many backends: it is done by the thread that opens addresses.
const BACKENDS_MAX: usize = 16;

/// The same of an attempt: pods make many of them.
const BACKENDS_OF_ATTEMPT_MAX: usize = 4;

/// At most this many ports of a Service are named.
const PORTS_SHOWN: usize = 4;

/// An address and a port of a Service, with the endpoints to which OVN leads its connections.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Frontend {
    /// Namespace and name of the Service.
    pub service: String,
    /// The user-defined network on which it is; none on the default one.
    pub network: Option<String>,
    /// The address.
    pub address: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The port; none for all ports.
    pub port: Option<u16>,
    /// The endpoints; none where they are not the same on each node.
    pub backends: Option<Vec<Backend>>,
}

/// An endpoint of a Service.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// Its port; none for that of the connection.
    pub port: Option<u16>,
}

impl Frontend {
    /// Whether it takes connections of this kind, or some of them.
    fn takes(&self, transport: Option<Transport>) -> bool {
        let Some(Transport { protocol, port }) = transport else {
            return true;
        };
        // A load balancer without ports takes every protocol (ovn-nb(5), `vips`).
        match self.port {
            None => true,
            Some(own) => self.protocol == protocol && port.is_none_or(|port| port == own),
        }
    }

    fn port_text(&self) -> Option<String> {
        Some(transport_text(Transport {
            protocol: self.protocol,
            port: Some(self.port?),
        }))
    }

    /// A connection that it has led to a backend.
    fn led_to(&self, backend: Backend, transport: Option<Transport>) -> Option<Transport> {
        let protocol = match (self.port, transport) {
            (None, transport) => transport?.protocol,
            (Some(_), _) => self.protocol,
        };
        let asked = transport.and_then(|transport| transport.port);
        Some(Transport {
            protocol,
            port: backend.port.or(self.port).or(asked),
        })
    }
}

impl View<'_> {
    /// The Services, by namespace and name, that have one of these addresses.
    pub fn services_at(&self, addresses: &[IpAddr]) -> BTreeSet<String> {
        let addresses = addresses.iter();
        addresses
            .flat_map(|address| self.policy.services_at(*address))
            .map(str::to_owned)
            .collect()
    }

    /// The decision over a connection whose address is in the cluster, if it is that of a Service. `None` where no
    /// rule holds for it.
    pub(super) fn decide_by_backends(
        &self,
        (id, port): (PortId, &Port),
        asked: Asked<'_>,
        beside: &Beside,
    ) -> Option<Decision<'_>> {
        let address = asked.address?;
        let Some(frontends) = &beside.frontends else {
            let backend = self.leads_out(port, address)?;
            let text = format!(
                "the Service leads to {backend}, where the rules hold; OVN, which knows its ports, does not answer"
            );
            return Some(not_known(text));
        };
        let here = frontends
            .iter()
            .filter(|one| one.address == address && one.network == port.row.network);
        let here: Vec<&Frontend> = here.collect();
        let service = &here.first()?.service;
        let taken = here.iter().filter(|one| one.takes(asked.transport));
        let taken: Vec<&Frontend> = taken.copied().collect();
        if taken.is_empty() {
            let mut decision = self.decide_not_taken((id, port), asked);
            let asked = asked.transport.map(transport_text).unwrap_or_default();
            let text = &mut decision.ruling.text;
            *text = format!(
                "the Service {service} has no port {asked}, and the rules hold for its address: {text}"
            );
            let ports = ports_of(&here);
            let remedy = format!("connect to a port of the Service: {ports}");
            decision.remedy = (!ports.is_empty()).then_some(remedy);
            return Some(decision);
        }
        let by_ports = self.decide_taken((id, port), (service, &taken), asked, beside);
        // The question has no port: the Service may not have the port of the connection.
        if asked.transport.is_some() || taken.iter().any(|one| one.port.is_none()) {
            return by_ports;
        }
        let (verdict, text) = match &by_ports {
            Some(by_ports) => (by_ports.ruling.verdict, by_ports.ruling.text.as_str()),
            None => (Verdict::Allowed, "it stays in the cluster"),
        };
        let of_others = self.decide_not_taken((id, port), asked);
        if verdict == of_others.ruling.verdict {
            return by_ports;
        }
        let text = format!(
            "at the Service {service}, {}: {text}; at other ports, the rules hold for its address: {}",
            ports_of(&here),
            of_others.ruling.text
        );
        let verdict = match Verdict::NotKnown {
            not_known if verdict == not_known || of_others.ruling.verdict == not_known => not_known,
            _ => Verdict::Depends,
        };
        Some(Decision::without_rules(Ruling::without_rule(
            verdict,
            Reason::DependsOnPort,
            text,
        )))
    }

    /// The decision over a connection to the address of a Service that does not have the port: no load balancer takes
    /// it, and the rules see the address.
    fn decide_not_taken(&self, (id, port): (PortId, &Port), asked: Asked<'_>) -> Decision<'_> {
        let is_not_taken = Asked {
            is_not_taken: true,
            ..asked
        };
        self.decide(id, port, is_not_taken)
    }

    /// The decision over a connection that one of these frontends takes. `None` where no rule holds for it.
    fn decide_taken(
        &self,
        (id, port): (PortId, &Port),
        (service, taken): (&str, &[&Frontend]),
        asked: Asked<'_>,
        beside: &Beside,
    ) -> Option<Decision<'_>> {
        let mut led: BTreeSet<(Backend, Option<Transport>)> = BTreeSet::new();
        for frontend in taken {
            let Some(backends) = &frontend.backends else {
                let text = format!("each node leads to other backends of the Service {service}");
                return Some(not_known(text));
            };
            led.extend(backends.iter().map(|backend| {
                let transport = frontend.led_to(*backend, asked.transport);
                (*backend, transport)
            }));
        }
        self.decide_by_each((id, port), (service, &led), beside)
    }

    /// The decision over connections that OVN leads to one of these endpoints.
    fn decide_by_each(
        &self,
        (id, port): (PortId, &Port),
        (service, led): (&str, &BTreeSet<(Backend, Option<Transport>)>),
        beside: &Beside,
    ) -> Option<Decision<'_>> {
        let namespace = self.policy.namespace_of_names(&port.row);
        let is_outside = |address| !self.refused.is_inside(address, &port.row, namespace);
        let outside = led
            .iter()
            .filter(|(backend, _)| is_outside(backend.address));
        let outside: Vec<_> = outside.collect();
        if outside.is_empty() {
            return None;
        }
        if outside.len() > BACKENDS_MAX {
            let text = format!(
                "the Service {service} leads to {} endpoints out of the pods' networks, where the rules hold",
                outside.len()
            );
            return Some(not_known(text));
        }
        let sets = beside.sets.as_ref();
        let decided = outside.iter().map(|(backend, transport)| {
            let decision = self.decide(
                id,
                port,
                Asked {
                    address: Some(backend.address),
                    transport: *transport,
                    is_behind_service: true,
                    sets: sets
                        .and_then(|sets| sets.get(&backend.address))
                        .map_or(Sets::Unknown, Sets::Known),
                    ..Asked::default()
                },
            );
            (*backend, *transport, decision)
        });
        let decided: Vec<_> = decided.collect();
        let is_partly_inside = outside.len() < led.len();
        let verdicts = decided.iter().map(|(.., decision)| decision.ruling.verdict);
        let verdicts = verdicts.chain(is_partly_inside.then_some(Verdict::Allowed));
        // OVN chooses one of them.
        let verdict = verdicts.reduce(|one, other| match (one, other) {
            (one, other) if one == other => one,
            (Verdict::NotKnown, _) | (_, Verdict::NotKnown) => Verdict::NotKnown,
            _ => Verdict::Depends,
        });
        let verdict = verdict.unwrap_or(Verdict::NotKnown);
        let mut each = String::new();
        for (backend, transport, decision) in &decided {
            let separator = if each.is_empty() { "" } else { ", " };
            let endpoint = endpoint(*backend, *transport);
            let verdict = word(decision.ruling.verdict);
            let _ = write!(each, "{separator}{endpoint} ({verdict})");
        }
        // A connection may go to each of them.
        let remedies = decided
            .iter()
            .filter_map(|(.., decision)| decision.remedy.clone());
        let remedies: BTreeSet<String> = remedies.collect();
        let remedies: Vec<String> = remedies.into_iter().collect();
        let remedy = (!remedies.is_empty()).then(|| remedies.join("; and "));
        let deciding = decided
            .into_iter()
            .find(|(.., decision)| decision.ruling.verdict == verdict);
        let Some((backend, transport, mut decision)) = deciding else {
            let inside = if is_partly_inside {
                ", and to pods"
            } else {
                ""
            };
            let text = format!("the Service {service} leads to {each}{inside}");
            let ruling = Ruling::without_rule(verdict, Reason::LeadsOut, text);
            let mut decision = Decision::without_rules(ruling);
            decision.remedy = remedy;
            return Some(decision);
        };
        decision.remedy = remedy;
        let text = &mut decision.ruling.text;
        let endpoint = endpoint(backend, transport);
        *text = format!("the Service {service} leads to {endpoint}, where the rules hold: {text}");
        Some(decision)
    }

    /// The decision over a connection to an address of Services that lead out of the pods' networks alone, if the rules
    /// deny it whatever its port and whichever endpoint OVN chooses. The thread that opens addresses asks for each
    /// attempt: it knows no ports of Services, and looks at few endpoints.
    pub(super) fn denied_behind(
        &self,
        (id, port): (PortId, &Port),
        asked: Asked<'_>,
    ) -> Option<Decision<'_>> {
        let (row, address) = (&port.row, asked.address?);
        // Of a load balancer of another network, the pod has no endpoint.
        if row.network.is_some() {
            return None;
        }
        let namespace = self.policy.namespace_of_names(row);
        let mut backends = self.policy.backends_behind(address);
        let some: BTreeSet<IpAddr> = backends.by_ref().take(BACKENDS_OF_ATTEMPT_MAX).collect();
        let is_inside = |backend: &IpAddr| self.refused.is_inside(*backend, row, namespace);
        if backends.next().is_some() || some.iter().any(is_inside) {
            return None;
        }
        let service = self.policy.services_at(address).next()?;
        let beside = Beside::default();
        let led = |backend: &IpAddr| {
            let backend = Backend {
                address: *backend,
                port: None,
            };
            BTreeSet::from([(backend, None)])
        };
        let behind = |backend| self.decide_by_each((id, port), (service, &led(backend)), &beside);
        let is_denied_behind = |backend| behind(backend).is_some_and(|decision| denies(&decision));
        // A port that the Service does not have is one of its address.
        let is_denied =
            some.iter().all(is_denied_behind) && denies(&self.decide_not_taken((id, port), asked));
        let all: BTreeSet<(Backend, Option<Transport>)> = some.iter().flat_map(led).collect();
        is_denied.then(|| self.decide_by_each((id, port), (service, &all), &beside))?
    }

    /// A backend outside the pods' networks of the Services at an address.
    fn leads_out(&self, port: &Port, address: IpAddr) -> Option<IpAddr> {
        let row = &port.row;
        let namespace = self.policy.namespace_of_names(row);
        let backends = self.policy.backends_behind(address);
        let outside = backends.filter(|backend| !self.refused.is_inside(*backend, row, namespace));
        outside.min()
    }
}

/// Whether a rule denies, whatever the agent does not know but the addresses that ovn-kubernetes has resolved.
fn denies(decision: &Decision<'_>) -> bool {
    let Ruling {
        verdict,
        rule,
        doubt,
        ..
    } = &decision.ruling;
    let rule = decision.firewall.zip(*rule);
    let rule = rule.and_then(|(firewall, rule)| rule_at(firewall, rule));
    let is_certain = matches!(
        (verdict, doubt),
        (Verdict::Blocked | Verdict::NotYet, _) | (Verdict::NotKnown, Some(Doubt::Resolved))
    );
    is_certain && rule.is_some_and(|rule| rule.action == RuleAction::Deny)
}

fn not_known(text: String) -> Decision<'static> {
    Decision::without_rules(Ruling::without_rule(
        Verdict::NotKnown,
        Reason::LeadsOut,
        text,
    ))
}

/// The ports of a Service, as far as they are named: `tcp/80, tcp/443`.
fn ports_of(frontends: &[&Frontend]) -> String {
    let ports: BTreeSet<String> = frontends.iter().filter_map(|one| one.port_text()).collect();
    let ports: Vec<String> = ports.into_iter().take(PORTS_SHOWN).collect();
    ports.join(", ")
}

/// `203.0.113.7 tcp/443`.
fn endpoint(backend: Backend, transport: Option<Transport>) -> String {
    match transport {
        Some(transport) => format!("{} {}", backend.address, transport_text(transport)),
        None => backend.address.to_string(),
    }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Allowed => "allowed",
        Verdict::Blocked => "blocked",
        Verdict::NotYet => "not yet",
        Verdict::Depends => "depends",
        Verdict::NotKnown => "not known",
    }
}
