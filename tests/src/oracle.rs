//! The meaning of an EgressFirewall: the first-match oracle that the lab's verdicts are compared
//! with.
//!
//! Written from the documentation of the resource, and from nothing else: it shares no code with the
//! agent, and must not. Sources: the EgressFirewall's definition and guide in ovn-kubernetes
//! (`docs/features/network-security-controls/egress-firewall.md`: rules are evaluated in their
//! order, the first that matches decides, and without a match the traffic passes), the field
//! descriptions of its resource (ports, `dnsName`, wildcards of exactly one label), and this
//! project's README for what `dnsName: example.com` covers.
//!
//! For destinations outside the cluster only: a rule never applies to the cluster's own networks.

use std::{collections::BTreeSet, net::IpAddr};

use crate::firewall::{Action, RuleSpec, To};

/// The destination of a pod's packet, and the names of the address.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Destination<'a> {
    /// Where to.
    pub address: IpAddr,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: &'a str,
    /// The destination port.
    pub port: u16,
    /// The names of the pod's questions whose answers had the address. The names of CNAMEs on the
    /// way do not count.
    pub told: BTreeSet<&'a str>,
    /// The rules' `dnsName`s, as written, for which ovn-kubernetes itself has found the address.
    pub central: BTreeSet<&'a str>,
}

/// The index of the rule that decides, if one does.
pub fn deciding_rule(rules: &[RuleSpec], to: &Destination<'_>) -> Option<usize> {
    rules.iter().position(|rule| applies(rule, to))
}

/// The verdict of the rules; `None` if no rule applies: the packet then passes.
pub fn verdict(rules: &[RuleSpec], to: &Destination<'_>) -> Option<Action> {
    Some(rules[deciding_rule(rules, to)?].action)
}

fn applies(rule: &RuleSpec, to: &Destination<'_>) -> bool {
    let is_there = match &rule.to {
        To::Cidr(cidr) => cidr.contains(&to.address),
        To::Nodes(addresses) => addresses.contains(&to.address),
        To::Name(name) => {
            to.central.contains(name.as_str()) || to.told.iter().any(|told| covers(name, told))
        }
    };
    // Without ports a rule is for all traffic, of any protocol.
    is_there && (rule.ports.is_empty() || rule.ports.contains(&(to.protocol, to.port)))
}

/// Whether a `dnsName` covers this name.
///
/// `example.com` covers itself and everything below; `*.example.com` covers what has exactly one
/// label more. Neither case (RFC 4343) nor a final dot makes a difference.
pub fn covers(dns_name: &str, name: &str) -> bool {
    let (rule, name) = (labels(dns_name), labels(name));
    match rule.split_first() {
        Some((first, parent)) if first == "*" => name.len() == rule.len() && name.ends_with(parent),
        _ => name.ends_with(&rule),
    }
}

fn labels(name: &str) -> Vec<String> {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.split('.').map(str::to_ascii_lowercase).collect()
}

#[cfg(test)]
mod tests;
