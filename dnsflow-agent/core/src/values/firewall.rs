//! The EgressFirewall as the core sees it, free of Kubernetes types.

use std::{collections::BTreeMap, sync::Arc};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::values::{flow::Transport, name::DnsName};

/// The identity of an EgressFirewall: namespace and name (in a cluster always `default`).
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FirewallId {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl std::fmt::Display for FirewallId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A namespace's EgressFirewall: its rules in their order, of which the first match wins.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Firewall {
    /// `spec.egress`; the index is the rule's index, also where a rule is invalid. All copies share the
    /// rules: a cluster may have tens of thousands.
    pub rules: Arc<[Rule]>,
    /// Whether names without a wildcard also match their sub-domains, by the resource's annotation;
    /// `None` without an annotation: the agent's option then decides.
    pub subdomains: Option<bool>,
    /// Whether the agent makes a dry run of the resource, by its annotation: it decides, and installs
    /// nothing.
    pub dry_run: bool,
    /// Whether no answer to the pods of the namespace is held, by the resource's annotation.
    pub hold_off: bool,
    /// ovn-kubernetes' reason in `status.messages`, if it could not apply the resource.
    pub refusal: Option<String>,
}

impl Firewall {
    /// Whether the other firewall has the same content, whatever the status of the two.
    pub fn is_like(&self, other: &Self) -> bool {
        (&self.rules, self.subdomains) == (&other.rules, other.subdomains)
    }
}

/// The rules of an EgressFirewall that decide over addresses whose name nobody knows, by their indices.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Floor(BTreeMap<u32, bool>);

impl Floor {
    /// That of these rules.
    pub fn of(rules: &[Rule]) -> Self {
        let mut floor = Self::default();
        for (index, rule) in (0..).zip(rules) {
            floor.add(index, rule);
        }
        floor
    }

    /// Whether the rule decides over such addresses, and denies all of them.
    fn denies_all(rule: &Rule) -> Option<bool> {
        match (rule.action, &rule.destination) {
            (RuleAction::Allow, Destination::Cidr(_) | Destination::Nodes) => Some(false),
            (RuleAction::Deny, Destination::Cidr(network)) => {
                let is_all = network.prefix_len() == 0 && rule.ports.is_empty();
                is_all.then_some(true)
            }
            _ => None,
        }
    }

    /// Adds a rule. Returns whether it is one of these.
    pub(crate) fn add(&mut self, index: u32, rule: &Rule) -> bool {
        let denies = Self::denies_all(rule);
        self.0.extend(denies.map(|denies| (index, denies)));
        denies.is_some()
    }

    /// Removes the rule at an index. Returns whether it was one of these.
    pub(crate) fn remove(&mut self, index: u32) -> bool {
        self.0.remove(&index).is_some()
    }

    /// Whether all addresses are denied behind the rule at this index, before anything but names allows some.
    pub fn denies_behind(&self, index: u32) -> bool {
        let mut behind = self.0.range(index.saturating_add(1)..);
        behind.next().is_some_and(|(_, denies)| *denies)
    }
}

impl Rule {
    /// The name that the rule denies, if it does.
    pub fn denied_name(&self) -> Option<&DnsName> {
        match (self.action, &self.destination) {
            (RuleAction::Deny, Destination::Name(name)) => Some(name),
            _ => None,
        }
    }
}

/// One entry of `spec.egress`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule {
    /// `type`.
    pub action: RuleAction,
    /// `to`.
    pub destination: Destination,
    /// `ports`; empty means all traffic.
    pub ports: Vec<Transport>,
}

/// The type of a rule.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleAction {
    /// Let it pass.
    Allow,
    /// Drop it.
    Deny,
}

/// The destination of a rule.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Destination {
    /// `to.dnsName`.
    Name(DnsName),
    /// `to.cidrSelector`, without bits behind the prefix: OVN makes no flow of one with such bits.
    Cidr(IpNet),
    /// `to.nodeSelector`; OVN-Kubernetes evaluates it.
    Nodes,
    /// A destination that cannot be used, and why. The rule keeps its index.
    Invalid(String),
}

/// Changed EgressFirewalls.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct FirewallUpdate {
    /// Whether this is the whole list: EgressFirewalls that it does not name are gone.
    pub reset: bool,
    /// The new resource, or `None` if it is gone.
    pub firewalls: Vec<(FirewallId, Option<Firewall>)>,
}
