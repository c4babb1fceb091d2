//! The verdict over a pod's attempt to connect, by the same walk through the rules as an explanation.

use std::net::IpAddr;

use super::{Reason, RuleStep, StepOutcome, Verdict, View, explain::Asked};
use crate::{
    Timestamp,
    ask::{attempts::Heard, history::Tried},
    io::report::{Denied, ToldName},
    policy::Mention,
    values::connection::Attempt,
};

/// The verdict over an attempt.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Judged {
    /// No EgressFirewall of which the agent knows all is asked about it: the destination is in the cluster
    /// or on the link, a rule by node may match, or not everything was read yet.
    NotJudged,
    /// It is allowed.
    Allowed(Box<Tried>),
    /// It is denied.
    Denied(Box<Tried>, Box<Denied>),
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
        let namespace = self.policy.namespace_of_names(row);
        let inside = self.refused.is_inside(address, row, namespace);
        let Some(namespace) = namespace.filter(|_| !inside && !is_on_link(address)) else {
            return Judged::NotJudged;
        };
        if !self.sources.are_read() {
            return Judged::NotJudged;
        }
        // Of a name that a rule mentions by now, only the cache counts.
        let is_unmentioned =
            |heard: &&Heard| self.policy.mention(row, &heard.name) == Mention::None;
        let asked = heard.iter().find(is_unmentioned).map(|heard| &heard.name);
        let asked = Asked {
            address: Some(address),
            name: asked,
            transport: Some(attempt.transport()),
            sets: None,
        };
        let decided = self.decide(id, port, asked);
        let by_node = |step: &RuleStep| step.outcome == StepOutcome::Unknown;
        let is_node = self.refused.is_node(address);
        let is_allowed = decided.verdict == Verdict::Allowed;
        if !is_allowed && is_node && decided.steps.iter().any(by_node) {
            return Judged::NotJudged;
        }
        let mut names: Vec<ToldName> = self
            .cache
            .entry(id, address)
            .into_iter()
            .flat_map(|entry| entry.names.iter())
            .map(|(name, term)| ToldName {
                name: name.clone(),
                ago: self.cache.told_since(term, now),
                resolver: self.resolver(term),
            })
            .collect();
        for heard in heard {
            if names.iter().all(|told| told.name != heard.name) {
                names.push(ToldName {
                    name: heard.name.clone(),
                    ago: now.since(heard.at),
                    resolver: Some(heard.resolver),
                });
            }
        }
        names.sort_by_key(|told| told.ago);
        let tried = Box::new(Tried {
            namespace: namespace.to_owned(),
            port: row.iface_id.clone(),
            attempt: *attempt,
            names: names.iter().map(|told| told.name.clone()).collect(),
            verdict: decided.verdict,
            reason: decided.reason,
            rule: decided.rule,
            is_refused: self.refusal(address, row).is_some(),
            is_node,
        });
        if is_allowed {
            return Judged::Allowed(tried);
        }
        let rule = decided
            .steps
            .iter()
            .find(|step| step.outcome == StepOutcome::Decides);
        let denies = decided.rule.map(|rule| format!("rule {rule} denies it"));
        let rest = denies.and_then(|denies| decided.text.strip_prefix(&denies));
        let text = match rest {
            Some(rest) => rest.trim_start_matches(", and ").to_owned(),
            None => decided.text,
        };
        let denied = Denied {
            namespace: tried.namespace.clone(),
            port: tried.port.clone(),
            attempt: *attempt,
            names,
            reason: decided.reason,
            rule: decided.rule,
            rule_text: rule.map_or_else(String::new, |step| {
                let ports: String = step.ports.iter().map(|ports| format!(" {ports}")).collect();
                format!("{} {}{ports}", step.action, step.destination)
            }),
            text,
            remedy: decided.remedy,
            unless_resolved: may_be_resolved(decided.reason),
        };
        Judged::Denied(tried, Box::new(denied))
    }
}

/// Whether a rule by name may match an address that the pod was not told, or not any more.
fn may_be_resolved(reason: Reason) -> bool {
    match reason {
        Reason::NotResolved
        | Reason::Expired
        | Reason::LimitReached
        | Reason::ToldToOtherPod
        | Reason::FlowMissing
        | Reason::DryRun
        | Reason::NoResolverTrusted
        | Reason::PortNotTrusted
        | Reason::NotAttached
        | Reason::AddressRefused => true,
        Reason::NoFirewall
        | Reason::NoRuleDenies
        | Reason::AllowedByNetwork
        | Reason::AllowedByName
        | Reason::AllowedByOvn
        | Reason::DeniedByRule
        | Reason::DeniedByEarlierRule
        | Reason::WrongPort
        | Reason::AclMissing
        | Reason::FirewallNotTakenOver
        | Reason::RuleNotUsable
        | Reason::AgentStarting => false,
    }
}

/// Whether packets to an address stay on the pod's link, or in the pod.
fn is_on_link(address: IpAddr) -> bool {
    let by_family = match address {
        IpAddr::V4(v4) => v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    by_family || address.is_loopback() || address.is_multicast() || address.is_unspecified()
}
