//! The EgressFirewall as the core sees it, free of Kubernetes types.

use std::{collections::BTreeMap, fmt, sync::Arc};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::values::{flow::Transport, name::DnsName};

/// Ports of one rule that are read, each with a flow in every group of the rule's name. A rule with more opens nothing if
/// it allows, and closes every port of an address if it denies.
pub const PORTS_PER_RULE_MAX: usize = 1_024;

/// The identity of an EgressFirewall: namespace and name (in a cluster always `default`).
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FirewallId {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for FirewallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// IP versions.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct IpVersions {
    /// Whether IPv4 is one of them.
    pub v4: bool,
    /// Whether IPv6 is one of them.
    pub v6: bool,
}

impl IpVersions {
    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        !self.v4 && !self.v6
    }
}

/// The networks with all addresses, for people.
impl fmt::Display for IpVersions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.v4, self.v6) {
            (_, false) => "0.0.0.0/0",
            (false, true) => "::/0",
            (true, true) => "0.0.0.0/0, and one of ::/0,",
        })
    }
}

/// The IP versions over which all passes that no rule mentions, beside another one over which a rule denies it.
pub fn open_beside(rules: &[Rule]) -> IpVersions {
    let (mut denied, mut decided) = (IpVersions::default(), IpVersions::default());
    for rule in rules.iter().filter(|rule| rule.ports.is_empty()) {
        let Destination::Cidr(network) = &rule.destination else {
            continue;
        };
        if network.prefix_len() == 0 {
            let is_denied = rule.action == RuleAction::Deny;
            let [of_denied, of_all] = [&mut denied, &mut decided].map(|versions| match network {
                IpNet::V4(_) => &mut versions.v4,
                IpNet::V6(_) => &mut versions.v6,
            });
            *of_denied |= is_denied;
            *of_all = true;
        }
    }
    IpVersions {
        v4: denied.v6 && !decided.v4,
        v6: denied.v4 && !decided.v6,
    }
}

/// The rules of an EgressFirewall that decide over addresses whose name nobody knows, by their indices: for IPv4, and for
/// IPv6. Each denies all addresses, or allows some.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Floor {
    v4: BTreeMap<u32, bool>,
    v6: BTreeMap<u32, bool>,
}

impl Floor {
    /// That of these rules.
    pub fn of(rules: &[Rule]) -> Self {
        let mut floor = Self::default();
        for (index, rule) in (0..).zip(rules) {
            floor.set(index, Some(rule));
        }
        floor
    }

    /// The IP versions over which the rule decides for such addresses.
    fn versions(rule: &Rule) -> IpVersions {
        let of_network = |network: &IpNet| IpVersions {
            v4: matches!(network, IpNet::V4(_)),
            v6: matches!(network, IpNet::V6(_)),
        };
        match (rule.action, &rule.destination) {
            (RuleAction::Allow, Destination::Nodes) => IpVersions { v4: true, v6: true },
            (RuleAction::Allow, Destination::Cidr(network)) => of_network(network),
            (RuleAction::Deny, Destination::Cidr(network))
                if network.prefix_len() == 0 && rule.ports.is_empty() =>
            {
                of_network(network)
            }
            _ => IpVersions::default(),
        }
    }

    /// Sets the rule at an index, or removes it. Returns whether these are others than before.
    pub(crate) fn set(&mut self, index: u32, rule: Option<&Rule>) -> bool {
        let denies = rule.is_some_and(|rule| rule.action == RuleAction::Deny);
        let versions = rule.map(Self::versions).unwrap_or_default();
        let set = |rules: &mut BTreeMap<u32, bool>, is_one: bool| {
            let new = is_one.then_some(denies);
            let old = match new {
                Some(denies) => rules.insert(index, denies),
                None => rules.remove(&index),
            };
            old != new
        };
        let changed = [
            set(&mut self.v4, versions.v4),
            set(&mut self.v6, versions.v6),
        ];
        changed.contains(&true)
    }

    /// The IP versions of the cluster of which not all addresses are denied behind the rule at this index, before anything
    /// but names allows some. Without the versions of the cluster, those count that rules behind have; IPv4 if none has.
    pub fn open_behind(&self, index: u32, cluster: Option<IpVersions>) -> IpVersions {
        let [v4, v6] = [&self.v4, &self.v6].map(|rules| {
            let mut behind = rules.range(index.saturating_add(1)..);
            behind.next().map(|(_, denies)| *denies)
        });
        let cluster = cluster.unwrap_or(IpVersions {
            v4: v4.is_some() || v6.is_none(),
            v6: v6.is_some(),
        });
        IpVersions {
            v4: cluster.v4 && v4 != Some(true),
            v6: cluster.v6 && v6 != Some(true),
        }
    }
}

impl Rule {
    /// Whether the resource has further ports, which were not read.
    pub fn has_more_ports(&self) -> bool {
        self.ports.len() > PORTS_PER_RULE_MAX
    }

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
    /// `ports`; empty means all traffic. At most one more than [`PORTS_PER_RULE_MAX`], which says that there are others.
    pub ports: Vec<Transport>,
}

/// The type of a rule.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
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
    /// `to.cidrSelector`.
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
