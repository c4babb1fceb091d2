//! EgressFirewalls as ovn-kubernetes turns them into rows of the NB database, and as manifests.
//!
//! Rows, names and the order of transactions follow recordings of ovn-kubernetes (August 2026),
//! with and without its DNS name resolver feature, single-stack and dual-stack. ovn-kubernetes knows a rule
//! by its *index*: an edit changes the existing rows in place, in one transaction, and inserts or deletes at
//! the end.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::IpAddr,
    path::PathBuf,
};

use anyhow::{Context, Result};
use ipnet::IpNet;
use serde_json::{Value, json};

use crate::{
    database::{Database, Row, map, map_value, set},
    lab::{Cluster, Lab},
    topology::{CLUSTER_SUBNET, CLUSTER_SUBNET_V6},
};

/// The priority of the rule with index 0 (`EgressFirewallStartPriority` in ovn-kubernetes'
/// go-controller/pkg/types/const.go).
const START_PRIORITY: usize = 10_000;

/// `k8s.ovn.org/owner-type` of the address sets of names.
const DNS_SETS: &str = "EgressFirewallDNS";

/// `spec.egress[].type`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Action {
    /// Let it pass.
    Allow,
    /// Drop it.
    Deny,
}

/// `spec.egress[].to`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum To {
    /// `dnsName`, as written.
    Name(String),
    /// `cidrSelector`.
    Cidr(IpNet),
    /// `nodeSelector`, by the addresses of the nodes that it selects.
    Nodes(BTreeSet<IpAddr>),
}

/// `spec.egress[].ports[]`: protocol (`udp`, `tcp` or `sctp`) and destination port.
pub type PortSpec = (&'static str, u16);

/// The severities with which a namespace's packets are logged.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Severities {
    /// Of those that a rule lets pass.
    pub allow: &'static str,
    /// Of those that a rule drops.
    pub deny: &'static str,
}

/// One entry of `spec.egress`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RuleSpec {
    /// `type`.
    pub action: Action,
    /// `to`.
    pub to: To,
    /// `ports`; empty means all traffic.
    pub ports: Vec<PortSpec>,
}

impl RuleSpec {
    /// Allows a `dnsName`.
    pub fn allow_name(name: &str) -> Self {
        Self {
            action: Action::Allow,
            to: To::Name(name.to_owned()),
            ports: Vec::new(),
        }
    }

    /// Denies a `dnsName`.
    pub fn deny_name(name: &str) -> Self {
        Self {
            action: Action::Deny,
            ..Self::allow_name(name)
        }
    }

    /// Allows a `cidrSelector`.
    pub fn allow(cidr: &str) -> Result<Self> {
        Ok(Self {
            action: Action::Allow,
            ..Self::deny(cidr)?
        })
    }

    /// Denies a `cidrSelector`.
    pub fn deny(cidr: &str) -> Result<Self> {
        Ok(Self {
            action: Action::Deny,
            to: To::Cidr(cidr.parse().with_context(|| format!("`{cidr}`"))?),
            ports: Vec::new(),
        })
    }

    /// Allows the nodes with these addresses by a `nodeSelector`.
    pub fn allow_nodes(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        Self {
            action: Action::Allow,
            to: To::Nodes(addresses.into_iter().collect()),
            ports: Vec::new(),
        }
    }

    /// The same rule for these ports only.
    pub fn ports(mut self, ports: &[PortSpec]) -> Self {
        self.ports = ports.to_vec();
        self
    }

    fn acl_action(&self) -> &'static str {
        match self.action {
            Action::Allow => "allow",
            Action::Deny => "drop",
        }
    }
}

/// The hash that ovn-kubernetes makes names of: `a` and the decimal 64-bit FNV-1a
/// (`HashForOVN` in go-controller/pkg/util/util.go).
pub(crate) fn hash_for_ovn(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("a{hash}")
}

/// The port group of a namespace's pods.
pub fn namespace_port_group(namespace: &str) -> String {
    hash_for_ovn(&format!("default-network-controller:Namespace:{namespace}"))
}

fn address_set_id(dns_name: &str, family: &str, cluster: Cluster) -> String {
    let name = if cluster.name_resolver {
        let lower = dns_name.to_ascii_lowercase();
        format!("{}.", lower.trim_end_matches('.'))
    } else {
        dns_name.to_owned()
    };
    format!("default-network-controller:EgressFirewallDNS:{name}:{family}")
}

/// The address set of a `dnsName` for `family`: `v4` or `v6`.
pub fn address_set(dns_name: &str, family: &str, cluster: Cluster) -> String {
    hash_for_ovn(&address_set_id(dns_name, family, cluster))
}

/// The families of a cluster: the number in OVN's `ip4` and `ip6`, and the name.
fn families(cluster: Cluster) -> &'static [(u8, &'static str)] {
    if cluster.dual_stack {
        &[(4, "v4"), (6, "v6")]
    } else {
        &[(4, "v4")]
    }
}

/// The network that a namespace's EgressFirewall is enforced on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Network {
    /// The port group of the namespace's pods on it.
    pub port_group: String,
    /// The network's own subnets, which rules never apply to.
    pub subnets: Vec<IpNet>,
}

impl Network {
    /// The cluster's default network.
    pub fn default_of(namespace: &str) -> Self {
        let subnets = [CLUSTER_SUBNET, CLUSTER_SUBNET_V6];
        Self {
            port_group: namespace_port_group(namespace),
            subnets: subnets.iter().filter_map(|s| s.parse().ok()).collect(),
        }
    }
}

/// `match` of the ACL of a rule.
pub fn acl_match(network: &Network, rule: &RuleSpec, cluster: Cluster) -> String {
    let destination = match &rule.to {
        To::Name(name) => {
            let sets = families(cluster).iter().map(|(version, family)| {
                format!("ip{version}.dst == ${}", address_set(name, family, cluster))
            });
            sets.collect::<Vec<_>>().join(" || ")
        }
        To::Cidr(cidr) => {
            let version = if cidr.addr().is_ipv4() { 4 } else { 6 };
            let mut text = format!("ip{version}.dst == {cidr}");
            let is_served = |subnet: &&IpNet| cluster.dual_stack || subnet.addr().is_ipv4();
            let subnets = network.subnets.iter().filter(is_served);
            let subnets = subnets.filter(|subnet| cidr.contains(*subnet) || subnet.contains(cidr));
            let excluded = subnets.map(|subnet| format!("ip{version}.dst != {subnet}"));
            let excluded: Vec<_> = excluded.collect();
            if !excluded.is_empty() {
                // Without blanks (`getV4ClusterSubnetsExclusion` in its egressfirewall.go).
                text += &format!(" && {}", excluded.join("&&"));
            }
            text
        }
        To::Nodes(addresses) => {
            let mut addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
            addresses.sort();
            let addresses = addresses.iter().map(|address| {
                let version = if address.contains(':') { 6 } else { 4 };
                format!("ip{version}.dst == {address}")
            });
            addresses.collect::<Vec<_>>().join(" || ")
        }
    };
    let mut text = format!("({destination}) && inport == @{}", network.port_group);
    if !rule.ports.is_empty() {
        // Always in this order, whatever the rule's own.
        let mut protocols = Vec::new();
        for protocol in ["udp", "tcp", "sctp"] {
            let ports: Vec<_> = rule
                .ports
                .iter()
                .filter(|(of, _)| *of == protocol)
                .map(|(_, port)| format!("{protocol}.dst == {port}"))
                .collect();
            if !ports.is_empty() {
                protocols.push(format!("({protocol} && ( {} ))", ports.join(" || ")));
            }
        }
        text += &format!(" && ({})", protocols.join(" || "));
    }
    text
}

/// Whose rows are written, and how.
#[derive(Clone, Debug)]
struct Target<'a> {
    namespace: &'a str,
    network: Network,
    cluster: Cluster,
    has_tiers: bool,
}

/// The whole ACL row of the rule with this index.
fn acl_row(target: &Target<'_>, index: usize, rule: &RuleSpec) -> Value {
    let namespace = target.namespace;
    let mut row = json!({
        "action": rule.acl_action(),
        "direction": "to-lport",
        "external_ids": map([
            ("k8s.ovn.org/id", format!("default-network-controller:EgressFirewall:{namespace}:{index}").as_str()),
            ("k8s.ovn.org/name", namespace),
            ("k8s.ovn.org/owner-controller", "default-network-controller"),
            ("k8s.ovn.org/owner-type", "EgressFirewall"),
            ("rule-index", &index.to_string()),
        ]),
        "match": acl_match(&target.network, rule, target.cluster),
        "meter": "acl-logging",
        "name": format!("EF:{namespace}:{index}"),
        "priority": START_PRIORITY - index,
    });
    if target.has_tiers {
        row["tier"] = json!(2);
    }
    row
}

/// The manifest of a namespace's EgressFirewall.
pub fn manifest(namespace: &str, rules: &[RuleSpec]) -> String {
    let mut text = format!(
        "apiVersion: k8s.ovn.org/v1\n\
         kind: EgressFirewall\n\
         metadata:\n  name: default\n  namespace: {namespace}\n\
         spec:\n  egress:\n"
    );
    for rule in rules {
        let to = match &rule.to {
            To::Name(name) => format!("dnsName: \"{name}\""),
            To::Cidr(cidr) => format!("cidrSelector: {cidr}"),
            To::Nodes(_) => "nodeSelector: {matchLabels: {selected: \"yes\"}}".to_owned(),
        };
        text += &format!("  - type: {:?}\n    to:\n      {to}\n", rule.action);
        if !rule.ports.is_empty() {
            text += "    ports:\n";
            for (protocol, port) in &rule.ports {
                text += &format!(
                    "    - protocol: {}\n      port: {port}\n",
                    protocol.to_uppercase()
                );
            }
        }
    }
    text
}

impl Lab {
    /// Gives a namespace this EgressFirewall: the manifest that the agent reads, and the rows
    /// that ovn-kubernetes writes; returns when OVN has brought them to the flow tables. No
    /// rules at all means that the resource is deleted.
    ///
    /// As ovn-kubernetes does, a firewall that shrinks leaves one stale ACL behind: the row
    /// whose index is the new number of rules.
    pub fn set_firewall(&self, namespace: &str, rules: &[RuleSpec]) -> Result<()> {
        self.write_manifest(namespace, rules)?;
        self.write_firewall_rows(namespace, rules)?;
        self.sync()
    }

    /// As [`Lab::set_firewall`], with a manifest that somebody else has written. `rules` are its rules.
    pub fn apply(&self, namespace: &str, manifest: &str, rules: &[RuleSpec]) -> Result<()> {
        self.put_manifest(namespace, manifest)?;
        self.write_firewall_rows(namespace, rules)?;
        self.sync()
    }

    /// The manifest of [`Lab::set_firewall`] alone.
    pub fn write_manifest(&self, namespace: &str, rules: &[RuleSpec]) -> Result<()> {
        if rules.is_empty() {
            let file = self.manifest(namespace);
            return fs::remove_file(&file)
                .with_context(|| format!("cannot remove {}", file.display()));
        }
        self.put_manifest(namespace, &manifest(namespace, rules))
    }

    fn manifest(&self, namespace: &str) -> PathBuf {
        self.manifests().join(format!("{namespace}.yaml"))
    }

    /// Renamed into place: a reader sees the old file or the new one.
    fn put_manifest(&self, namespace: &str, text: &str) -> Result<()> {
        let new = self.base().join("etc/manifest.new");
        fs::write(&new, text)?;
        fs::rename(new, self.manifest(namespace))?;
        Ok(())
    }

    /// The rows of [`Lab::set_firewall`] alone, without waiting.
    pub fn write_firewall_rows(&self, namespace: &str, rules: &[RuleSpec]) -> Result<()> {
        let mut nb = self.nb()?;
        let acls = firewall_acls(&mut nb, namespace)?;
        let matches = acls.values().filter_map(|acl| acl["match"].as_str());
        let before: BTreeSet<&str> = matches.flat_map(sets_in).collect();
        let wanted = name_sets(rules, self.cluster());
        let is_new = |set: &&NameSet<'_>| !before.contains(set.name.as_str());
        create_address_sets(&mut nb, wanted.iter().filter(is_new))?;
        let target = Target {
            namespace,
            network: self.network_of(namespace)?,
            cluster: self.cluster(),
            has_tiers: self.has_tiers(),
        };
        let operations = edits(&target, rules, &acls);
        if !operations.is_empty() {
            nb.transact(&operations)?;
        }
        let kept: BTreeSet<&str> = wanted.iter().map(|set| set.name.as_str()).collect();
        delete_unused_address_sets(&mut nb, before.difference(&kept).copied().collect())
    }

    /// Switches OVN's ACL logging for a namespace's EgressFirewall on or off, as ovn-kubernetes
    /// does for the annotation `k8s.ovn.org/acl-logging`. Returns when the flow tables have the
    /// change.
    pub fn log_firewall(&self, namespace: &str, severities: Option<Severities>) -> Result<()> {
        let mut nb = self.nb()?;
        let mut operations = Vec::new();
        for acl in firewall_acls(&mut nb, namespace)?.into_values() {
            let severity = severities.map(|severities| match acl["action"].as_str() {
                Some("drop") => severities.deny,
                _ => severities.allow,
            });
            operations.push(json!({
                "op": "update", "table": "ACL", "where": [["_uuid", "==", acl["_uuid"]]],
                "row": {"log": severity.is_some(), "severity": set(severity)},
            }));
        }
        nb.transact(&operations)?;
        self.sync()
    }

    /// The ACLs of a namespace's EgressFirewall by rule index, as they are.
    pub fn firewall_acls(&self, namespace: &str) -> Result<BTreeMap<usize, Row>> {
        firewall_acls(&mut self.nb()?, namespace)
    }

    /// Fills the address sets of a `dnsName` as ovn-kubernetes' controller does with *its own* DNS
    /// answers. Returns when the flow tables have the change.
    pub fn resolve_centrally(&self, dns_name: &str, addresses: &[IpAddr]) -> Result<()> {
        let mut nb = self.nb()?;
        for (version, family) in families(self.cluster()) {
            let addresses = addresses.iter().filter(|a| a.is_ipv4() == (*version == 4));
            nb.transact(&[json!({
                "op": "update", "table": "Address_Set",
                "where": [["name", "==", address_set(dns_name, family, self.cluster())]],
                "row": {"addresses": set(addresses)},
            })])?;
        }
        self.sync()
    }
}

/// The address set of a `dnsName` for one family.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct NameSet<'a> {
    name: String,
    dns_name: &'a str,
    family: &'static str,
    id: String,
}

/// The address sets that these rules need.
fn name_sets(rules: &[RuleSpec], cluster: Cluster) -> BTreeSet<NameSet<'_>> {
    let mut sets = BTreeSet::new();
    for rule in rules {
        if let To::Name(dns_name) = &rule.to {
            sets.extend(families(cluster).iter().map(|(_, family)| NameSet {
                name: address_set(dns_name, family, cluster),
                dns_name,
                family,
                id: address_set_id(dns_name, family, cluster),
            }));
        }
    }
    sets
}

/// The rows with this `k8s.ovn.org/owner-type`.
fn owned_by(kind: &str) -> Value {
    json!([[
        "external_ids",
        "includes",
        map([("k8s.ovn.org/owner-type", kind)])
    ]])
}

/// Creates those of the address sets that do not exist.
fn create_address_sets<'a>(
    nb: &mut Database,
    sets: impl Iterator<Item = &'a NameSet<'a>>,
) -> Result<()> {
    let mut sets = sets.peekable();
    if sets.peek().is_none() {
        return Ok(());
    }
    let known = nb.select("Address_Set", owned_by(DNS_SETS))?;
    let known = known.iter().filter_map(|row| row["name"].as_str());
    let mut taken: BTreeSet<String> = known.map(str::to_owned).collect();
    let mut operations = Vec::new();
    for set in sets {
        // Names that differ in case only may have one set.
        if taken.insert(set.name.clone()) {
            operations.push(json!({
                "op": "insert", "table": "Address_Set",
                "row": {
                    "name": set.name,
                    "external_ids": map([
                        ("ip-family", set.family),
                        ("k8s.ovn.org/id", &set.id),
                        ("k8s.ovn.org/name", set.dns_name),
                        ("k8s.ovn.org/owner-controller", "default-network-controller"),
                        ("k8s.ovn.org/owner-type", DNS_SETS),
                    ]),
                },
            }));
        }
    }
    if !operations.is_empty() {
        nb.transact(&operations)?;
    }
    Ok(())
}

/// Deletes those of the address sets that no EgressFirewall needs any more.
fn delete_unused_address_sets(nb: &mut Database, mut sets: BTreeSet<&str>) -> Result<()> {
    if sets.is_empty() {
        return Ok(());
    }
    let acls = nb.select("ACL", owned_by("EgressFirewall"))?;
    let matches = acls.iter().filter_map(|acl| acl["match"].as_str());
    for used in matches.flat_map(sets_in) {
        sets.remove(used);
    }
    let delete = |name: &&str| json!({"op": "delete", "table": "Address_Set", "where": [["name", "==", name]]});
    let operations: Vec<Value> = sets.iter().map(delete).collect();
    if !operations.is_empty() {
        nb.transact(&operations)?;
    }
    Ok(())
}

/// The address sets that a match mentions.
fn sets_in(text: &str) -> impl Iterator<Item = &str> {
    let after_dollars = text.split('$').skip(1);
    after_dollars.map(
        |rest| match rest.find(|c: char| !c.is_ascii_alphanumeric()) {
            Some(end) => &rest[..end],
            None => rest,
        },
    )
}

fn firewall_acls(nb: &mut Database, namespace: &str) -> Result<BTreeMap<usize, Row>> {
    let ids = map([
        ("k8s.ovn.org/name", namespace),
        ("k8s.ovn.org/owner-type", "EgressFirewall"),
    ]);
    nb.select("ACL", json!([["external_ids", "includes", ids]]))?
        .into_iter()
        .map(|row| {
            let index = map_value(&row["external_ids"], "rule-index")
                .and_then(|index| index.parse().ok())
                .context("an EgressFirewall's ACL without rule-index")?;
            Ok((index, row))
        })
        .collect()
}

/// The transaction that changes the present rows into the rows of `rules`.
fn edits(target: &Target<'_>, rules: &[RuleSpec], acls: &BTreeMap<usize, Row>) -> Vec<Value> {
    let mut operations = Vec::new();
    let mut added = Vec::new();
    let mut removed = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let wanted = acl_row(target, index, rule);
        match acls.get(&index) {
            Some(row) => {
                let mut changed = Row::new();
                for column in ["match", "action"] {
                    if row[column] != wanted[column] {
                        changed.insert(column.to_owned(), wanted[column].clone());
                    }
                }
                if !changed.is_empty() {
                    operations.push(json!({
                        "op": "update", "table": "ACL", "where": [["_uuid", "==", row["_uuid"]]],
                        "row": changed,
                    }));
                }
            }
            None => {
                let id = format!("acl{index}");
                added.push(json!(["named-uuid", id]));
                operations
                    .push(json!({"op": "insert", "table": "ACL", "uuid-name": id, "row": wanted}));
            }
        }
    }
    // A deleted resource takes all its rows along; one that shrinks keeps the first beyond its end.
    let kept = if rules.is_empty() { 0 } else { rules.len() + 1 };
    removed.extend(acls.range(kept..).map(|(_, row)| row["_uuid"].clone()));
    for (mutator, rows) in [("insert", added), ("delete", removed)] {
        if !rows.is_empty() {
            // An ACL is deleted by taking it out of its port group: nothing else refers to it.
            operations.push(json!({
                "op": "mutate", "table": "Port_Group",
                "where": [["name", "==", target.network.port_group]],
                "mutations": [["acls", mutator, set(rows)]],
            }));
        }
    }
    operations
}

#[cfg(test)]
mod tests;
