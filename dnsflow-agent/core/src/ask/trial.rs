//! The verdict of an EgressFirewall over a connection, by its rules alone.
//!
//! The engine enforces rules by OVN's rows. Here is no OVN: an EgressFirewall that was never applied has
//! no rows. The rules match as they do in the engine ([`RuleSet`]), and the first that matches decides.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use crate::{
    ask::judge::{Bearing, Doubt, decide},
    policy::rules::{ActiveRule, NamePattern, RuleSet},
    values::{
        firewall::{Destination, Firewall, Rule, RuleAction},
        flow::Transport,
        name::DomainName,
        verdict::Verdict,
    },
};

/// An EgressFirewall whose rules are tried.
#[derive(Clone, Debug)]
pub struct Trial {
    rules: Arc<[Rule]>,
    /// The rules by name.
    names: RuleSet,
}

/// A connection, with the facts by which rules match it.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// The destination.
    pub address: IpAddr,
    /// Protocol and port.
    pub transport: Transport,
    /// The names that the pod was told the address for.
    pub names: &'a [DomainName],
    /// Whether a rule by name never opens the address.
    pub is_refused: bool,
    /// Whether the address is one of a node.
    pub is_node: bool,
}

/// The verdict over a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Outcome {
    /// The verdict of the rule that decides.
    pub verdict: Verdict,
    /// The rule that decides; none where none matches, which lets pass.
    pub rule: Option<u32>,
    /// An earlier rule of the other kind that may match, for a reason that the agent does not know.
    pub unless: Option<Unless>,
}

/// Why an earlier rule may decide otherwise.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Unless {
    /// The rule selects nodes, and the address is one of a node.
    IsSelected(u32),
    /// The rule is by name, and ovn-kubernetes may have resolved the address itself.
    IsResolved(u32),
}

impl Trial {
    /// Tries this EgressFirewall. `subdomains` applies where the EgressFirewall does not say.
    pub fn new(firewall: &Firewall, subdomains: bool) -> Self {
        let mut names = RuleSet::default();
        for (index, rule) in (0..).zip(firewall.rules.iter()) {
            if let Destination::Name(name) = &rule.destination {
                let pattern = NamePattern::of(name, firewall, subdomains);
                names.push(ActiveRule::without_acl("", index, rule, name, pattern));
            }
        }
        Self {
            rules: Arc::clone(&firewall.rules),
            names,
        }
    }

    /// The rules, in their order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The rules by name that match `name`, whatever their ports.
    pub fn matching(&self, name: &DomainName) -> impl Iterator<Item = u32> {
        self.names.matching(name).map(|rule| rule.index)
    }

    /// The verdict over a connection.
    pub fn decide(&self, facts: &Facts<'_>) -> Outcome {
        let told = facts.names.iter().flat_map(|name| self.matching(name));
        let told: BTreeSet<u32> = told.collect();
        self.decide_by(facts, |rule| told.contains(&rule))
    }

    /// The same, where the caller decides which rules by name match, not the answers to the pod.
    pub fn decide_by(&self, facts: &Facts<'_>, matches_name: impl Fn(u32) -> bool) -> Outcome {
        let rules = (0..).zip(self.rules.iter());
        let rules = rules.filter(|(_, rule)| is_for(rule, facts.transport));
        let bearings = rules.filter_map(|(index, rule)| {
            let (matches, doubt) = match &rule.destination {
                Destination::Invalid(_) => (false, None),
                Destination::Cidr(network) => (network.contains(&facts.address), None),
                Destination::Nodes => (false, facts.is_node.then_some(Doubt::Node)),
                Destination::Name(_) => {
                    let is_told = matches_name(index);
                    let is_opened = rule.action == RuleAction::Deny || !facts.is_refused;
                    // Where the pod was told a name, ovn-kubernetes is unlikely to know another one.
                    let may_be_resolved = (is_told && !is_opened) || facts.names.is_empty();
                    let doubt = may_be_resolved.then_some(Doubt::Resolved);
                    (is_told && is_opened, doubt)
                }
            };
            (matches || doubt.is_some()).then_some(Bearing {
                rule: index,
                action: rule.action,
                once_asked: false,
                doubt: doubt.filter(|_| !matches),
            })
        });
        let bearings: Vec<Bearing> = bearings.collect();
        let decided = decide(&bearings, false);
        Outcome {
            verdict: match decided.action {
                RuleAction::Allow => Verdict::Allowed,
                RuleAction::Deny => Verdict::Blocked,
            },
            rule: decided.rule,
            unless: decided.unless.map(|unless| match unless.doubt {
                Doubt::Node => Unless::IsSelected(unless.rule),
                _ => Unless::IsResolved(unless.rule),
            }),
        }
    }
}

/// Whether a rule is for this protocol and port.
fn is_for(rule: &Rule, wanted: Transport) -> bool {
    // A rule that denies more ports than are read closes all.
    let all = rule.ports.is_empty() || rule.has_more_ports();
    all || rule.ports.iter().any(|port| port.is_for(wanted))
}

#[cfg(test)]
mod tests;
