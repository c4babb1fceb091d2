//! The verdict over a pod's attempt to connect, by the same walk through the rules as an explanation.

use std::net::IpAddr;

use super::{Reason, StepOutcome, Verdict, View, explain::Asked};
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
        let Some(namespace) = self.policy.namespace_of_names(row) else {
            return Judged::NotJudged;
        };
        // Of a name that a rule mentions by now, only the cache counts.
        let is_unmentioned =
            |heard: &&Heard| self.policy.mention(row, &heard.name) == Mention::None;
        let asked = heard.iter().find(is_unmentioned).map(|heard| &heard.name);
        let asked = Asked {
            address: Some(address),
            name: asked,
            transport: Some(attempt.transport()),
            ..Asked::default()
        };
        let decided = self.decide(id, port, asked);
        if is_elsewhere(decided.reason) {
            return Judged::NotJudged;
        }
        let is_allowed = decided.verdict == Verdict::Allowed;
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
            verdict: match is_allowed {
                true => Verdict::Allowed,
                false => Verdict::Blocked,
            },
            reason: decided.reason,
            rule: decided.rule,
            is_refused: self.refusal(address, row).is_some(),
            is_node: self.refused.is_node(address),
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
        };
        Judged::Denied(tried, Box::new(denied))
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
