//! The EgressFirewall as the core sees it, free of Kubernetes types.

use ipnet::IpNet;

use super::{flow::Transport, name::DnsName};

/// Which EgressFirewall: its namespace and name (which is always `default` in a cluster).
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
    /// `spec.egress`; the index is the rule's index, also where a rule is invalid.
    pub rules: Vec<Rule>,
    /// Whether names without a wildcard also match their sub-domains, where the resource's
    /// annotation says so; `None` leaves it to the agent's option.
    pub subdomains: Option<bool>,
    /// What ovn-kubernetes says in `status.messages`, where it could not apply the resource.
    pub refusal: Option<String>,
}

impl Firewall {
    /// Whether the other one says the same, whatever ovn-kubernetes says of the two.
    pub fn is_like(&self, other: &Self) -> bool {
        (&self.rules, self.subdomains) == (&other.rules, other.subdomains)
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

/// What a rule does with the traffic that it matches.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum RuleAction {
    /// Let it pass.
    Allow,
    /// Drop it.
    Deny,
}

/// Where the traffic of a rule goes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Destination {
    /// `to.dnsName`.
    Name(DnsName),
    /// `to.cidrSelector`.
    Cidr(IpNet),
    /// `to.nodeSelector`; OVN-Kubernetes evaluates it.
    Nodes,
    /// What the resource says cannot be used, and why. The rule keeps its place in the order.
    Invalid(String),
}

/// Changed EgressFirewalls.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct FirewallUpdate {
    /// The whole list: what it does not name no longer exists.
    pub reset: bool,
    /// The new resource, or `None` where it went.
    pub firewalls: Vec<(FirewallId, Option<Firewall>)>,
}
