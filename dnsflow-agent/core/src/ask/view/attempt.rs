//! The verdict over a pod's attempt to connect, by the same walk through the rules as an explanation.

use std::{net::IpAddr, time::Duration};

use super::{
    Reason, Verdict, View,
    explain::{Asked, Decision, rule_at},
    rule_text,
};
use crate::{
    Timestamp,
    ask::{attempts::Heard, history::Tried, judge::Doubt},
    io::report::{Denied, ToldName},
    pods::ports::Port,
    policy::Mention,
    values::{
        connection::Attempt, firewall::RuleAction, ids::PortId, limits::NAMES_PER_CONNECTION_MAX,
        name::DomainName, resolver::Resolver,
    },
};

/// The verdict over an attempt.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Judged {
    /// No EgressFirewall of which the agent knows all is asked about it: the destination is in the cluster
    /// or on the link, a rule by node may match, not everything was read yet, or the rules have changed since.
    NotJudged,
    /// It is allowed.
    Allowed(Box<Tried>),
    /// It is denied.
    Denied(Box<Tried>, Box<Denied>),
    /// It is denied, behind a Service: the rules do not see the address of the attempt.
    DeniedBehind(Box<Denied>),
}

/// The newest names that lead a pod to an address, in order, and the number of all.
#[derive(Debug, Default)]
pub(super) struct Newest<'a> {
    /// How long ago each was told, and by whom, where that is known.
    names: Vec<(Duration, &'a DomainName, Option<Resolver>)>,
    count: usize,
}

impl<'a> Newest<'a> {
    /// Adds a name that was told so long ago.
    fn add(
        &mut self,
        ago: Duration,
        name: &'a DomainName,
        resolver: impl FnOnce() -> Option<Resolver>,
    ) {
        self.count += 1;
        let at = self.names.partition_point(|(known, ..)| *known <= ago);
        if at < NAMES_PER_CONNECTION_MAX {
            self.names.truncate(NAMES_PER_CONNECTION_MAX - 1);
            self.names.insert(at, (ago, name, resolver()));
        }
    }

    /// The newest names.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a DomainName> {
        self.names.iter().map(|(_, name, _)| *name)
    }

    /// The same, for a report.
    fn told(&self) -> Vec<ToldName> {
        let told = self.names.iter().map(|(ago, name, resolver)| ToldName {
            name: (*name).clone(),
            ago: *ago,
            resolver: *resolver,
        });
        told.collect()
    }
}

impl View<'_> {
    /// Judges an attempt. `heard` are names that lead to the destination and that no rule mentioned when
    /// the pod was told.
    pub fn judge_attempt(&self, attempt: &Attempt, heard: &[Heard], now: Timestamp) -> Judged {
        let id = self.ports.at_veth(attempt.ifindex);
        let Some((id, port)) = id.and_then(|id| Some((id, self.ports.get(id)?))) else {
            return Judged::NotJudged;
        };
        let row = &port.row;
        let address = attempt.address;
        let Some(namespace) = self.policy.namespace_of_names(row) else {
            return Judged::NotJudged;
        };
        // Other rules were in force then.
        if self
            .policy
            .changed_at(namespace)
            .is_some_and(|changed_at| attempt.at < changed_at)
        {
            return Judged::NotJudged;
        }
        let newest = self.newest(id, address, heard, now);
        let entry = self.cache.counting_entry(id, address);
        let is_told = |name| entry.is_some_and(|entry| entry.names.until(name).is_some());
        let names = newest.names();
        let names = names.filter(|name| is_told(name) || self.is_unmentioned(port, name));
        let names: Vec<&DomainName> = names.collect();
        let asked = Asked {
            address: Some(address),
            names: &names,
            transport: Some(attempt.transport()),
            ..Asked::default()
        };
        let mut decision = self.decide(id, port, asked);
        let behind = match decision.ruling.reason {
            Reason::InCluster => self.denied_behind((id, port), asked),
            _ => None,
        };
        let is_behind = behind.is_some();
        decision = behind.unwrap_or(decision);
        let Decision {
            ruling,
            firewall,
            remedy,
            ..
        } = decision;
        let rule = firewall
            .zip(ruling.rule)
            .and_then(|(firewall, rule)| rule_at(firewall, rule));
        let passes = rule.is_none_or(|rule| rule.action == RuleAction::Allow);
        let by_flows = matches!(ruling.doubt, Some(Doubt::Unconfirmed | Doubt::OtherFlows));
        let may_pass = ruling.verdict == Verdict::NotKnown && (passes || by_flows);
        if is_elsewhere(ruling.reason) || may_pass {
            return Judged::NotJudged;
        }
        let is_allowed = ruling.verdict == Verdict::Allowed;
        let tried = Box::new(Tried {
            namespace: namespace.to_owned(),
            port: row.iface_id.clone(),
            attempt: *attempt,
            names: newest.names().cloned().collect(),
            verdict: match is_allowed {
                true => Verdict::Allowed,
                false => Verdict::Blocked,
            },
            reason: ruling.reason,
            rule: ruling.rule,
            is_refused: self.refusal(address, row).is_some(),
            is_node: self.refused.is_node(address),
        });
        if is_allowed {
            return Judged::Allowed(tried);
        }
        let denies = ruling.rule.map(|rule| format!("rule {rule} denies it"));
        let rest = denies.and_then(|denies| ruling.text.strip_prefix(&denies));
        let text = match rest {
            Some(rest) => rest.trim_start_matches(", and ").to_owned(),
            None => ruling.text,
        };
        let denied = Denied {
            namespace: tried.namespace.clone(),
            port: tried.port.clone(),
            attempt: *attempt,
            names: newest.told(),
            names_left_out: newest.count - newest.names.len(),
            reason: ruling.reason,
            rule: ruling.rule,
            rule_text: rule.map(rule_text).unwrap_or_default(),
            text,
            remedy,
        };
        match is_behind {
            true => Judged::DeniedBehind(Box::new(denied)),
            false => Judged::Denied(tried, Box::new(denied)),
        }
    }

    /// The newest names of an address of a port, with those that were heard of.
    pub(super) fn newest<'a>(
        &'a self,
        id: PortId,
        address: IpAddr,
        heard: impl IntoIterator<Item = &'a Heard>,
        now: Timestamp,
    ) -> Newest<'a> {
        let known = self.cache.entry(id, address).map(|entry| &entry.names);
        let mut newest = Newest::default();
        for (name, term) in known.into_iter().flat_map(|names| names.iter()) {
            let ago = self.cache.told_since(term, now);
            newest.add(ago, name, || self.resolver(term));
        }
        for heard in heard {
            if known.is_none_or(|names| names.until(&heard.name).is_none()) {
                let ago = now.since(heard.at);
                newest.add(ago, &heard.name, || Some(heard.resolver));
            }
        }
        newest
    }

    /// Whether a name counts that was heard of. Of one that a rule mentions by now, only the cache counts.
    pub(super) fn is_unmentioned(&self, port: &Port, name: &DomainName) -> bool {
        self.policy.mention(&port.row, name) == Mention::None
    }
}

/// Whether no EgressFirewall decides, or one by facts that the agent does not have.
fn is_elsewhere(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::InPod
            | Reason::InCluster
            | Reason::LeadsOut
            | Reason::OnLink
            | Reason::NoAddressOfFamily
            | Reason::AgentStarting
            | Reason::NodeSelector
            | Reason::AclLeftBehind
    )
}

/// Whether packets to an address stay on the pod's link.
pub(super) fn is_on_link(address: IpAddr) -> bool {
    let by_family = match address {
        IpAddr::V4(v4) => v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    by_family || address.is_multicast()
}
