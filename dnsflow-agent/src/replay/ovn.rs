//! The rows of an OVN that has caught up with the rules: no more of them than the agent reads.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dnsflow_core::{
    ovn::{
        acl::NameMatch,
        hash::{Family, address_set_hashes, default_port_group},
        rows::{
            Acl, Datapath, LogicalFlow, NbUpdate, Pipeline, PortBinding, PortGroup, RowId, SbUpdate,
        },
    },
    policy::{FIREWALL_NAME, rules::ACL_PRIORITY_OFFSET},
    values::{
        firewall::{Destination, FirewallUpdate, Rule, RuleAction},
        name::DnsName,
    },
};
use ipnet::IpNet;

use crate::options::PodAddresses;

/// The OpenFlow table of all logical flows: the first one of the pipeline, wherever that begins.
pub(super) const TABLE: u8 = 0;
/// The priority of the ACL of a first rule; each further one is one lower.
const FIRST_PRIORITY: u16 = 10_000;
/// The row of the only logical switch.
const DATAPATH: RowId = row(0);

/// A row whose identity is told by its first 32 bits, as a cookie is.
const fn row(number: u32) -> RowId {
    RowId::new((number as u128) << 96)
}

/// The port groups of the pods' namespaces, the logical ports of the pods, an ACL for each rule for a name or a network,
/// and a logical flow for those of names.
pub(super) fn rows(
    ports: &BTreeMap<String, &PodAddresses>,
    firewalls: &FirewallUpdate,
) -> (NbUpdate, SbUpdate) {
    let mut sb = SbUpdate {
        reset: true,
        datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 1 }))],
        ..SbUpdate::default()
    };
    let mut groups: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (number, (port, pod)) in (1..).zip(ports) {
        let namespace = pod.namespace.as_str();
        groups.entry(namespace).or_default().insert(port.clone());
        let binding = PortBinding {
            logical_port: port.clone(),
            datapath: DATAPATH,
            tunnel_key: number,
            namespace: Some(namespace.to_owned()),
        };
        sb.port_bindings.push((row(number), Some(binding)));
    }
    let in_groups = groups.into_iter().map(|(namespace, ports)| PortGroup {
        name: default_port_group(namespace),
        ports,
    });
    sb.port_groups = (0..).map(row).zip(in_groups.map(Some)).collect();
    let mut nb = NbUpdate {
        reset: true,
        ..NbUpdate::default()
    };
    let addresses = || ports.values().flat_map(|pod| &pod.addresses);
    let versions = [
        addresses().any(IpAddr::is_ipv4),
        addresses().any(IpAddr::is_ipv6),
    ];
    let mut numbers = 1..;
    for (id, firewall) in &firewalls.firewalls {
        let firewall = firewall.iter().filter(|_| id.name == FIREWALL_NAME);
        let rules = firewall.flat_map(|firewall| (0..).zip(&*firewall.rules));
        for ((index, rule), number) in rules.zip(&mut numbers) {
            let acl = match &rule.destination {
                Destination::Name(name) => {
                    let matches = name_match(&id.namespace, rule, name, versions);
                    acl(&id.namespace, index, rule, matches.to_string())
                }
                Destination::Cidr(network) => {
                    let matches = network_match(&id.namespace, network);
                    nb.acls
                        .push((row(number), Some(acl(&id.namespace, index, rule, matches))));
                    continue;
                }
                Destination::Nodes | Destination::Invalid(_) => continue,
            };
            let flow = LogicalFlow {
                pipeline: Pipeline::Egress,
                table_id: 0,
                priority: acl.priority.saturating_add(ACL_PRIORITY_OFFSET),
                matches: format!("({})", acl.matches),
                actions: match rule.action {
                    RuleAction::Allow => "next;".to_owned(),
                    RuleAction::Deny => "/* drop */".to_owned(),
                },
                stage_hint: Some(number),
            };
            nb.acls.push((row(number), Some(acl)));
            sb.logical_flows.push((row(number), Some(flow)));
        }
    }
    (nb, sb)
}

/// With an address set for each IP version that the pods have: IPv4, IPv6.
fn name_match(namespace: &str, rule: &Rule, name: &DnsName, [v4, v6]: [bool; 2]) -> NameMatch {
    let hash = |family| address_set_hashes(name, family)[0];
    NameMatch {
        v4: v4.then(|| hash(Family::V4)),
        v6: v6.then(|| hash(Family::V6)),
        port_group: default_port_group(namespace),
        transports: rule.ports.clone(),
    }
}

/// Without the ports, which nobody reads here.
fn network_match(namespace: &str, network: &IpNet) -> String {
    let version = match network {
        IpNet::V4(_) => 4,
        IpNet::V6(_) => 6,
    };
    let group = default_port_group(namespace);
    format!("(ip{version}.dst == {network}) && inport == @{group}")
}

fn acl(namespace: &str, index: u16, rule: &Rule, matches: String) -> Acl {
    Acl {
        namespace: namespace.into(),
        rule_index: index.into(),
        priority: FIRST_PRIORITY.saturating_sub(index),
        matches,
        action: match rule.action {
            RuleAction::Allow => "allow".to_owned(),
            RuleAction::Deny => "drop".to_owned(),
        },
    }
}
