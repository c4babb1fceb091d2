use std::time::Duration;

use dnsflow_core::{
    flow::Protocol,
    history::ConnectionView,
    view::{FlowView, NameView, Origin, Reason},
};

use super::*;
use crate::k8s::convert::{self, Reading};

fn connection(last: u8, last_s: u64, names: &[&str]) -> ConnectionView {
    ConnectionView {
        namespace: "ns1".into(),
        pod: "pod1".into(),
        address: [203, 0, 113, last].into(),
        protocol: Protocol::Tcp,
        port: 443,
        names: names.iter().map(|&name| name.to_owned()).collect(),
        verdict: Verdict::Allowed,
        reason: Reason::AllowedByName,
        rule: Some(0),
        is_refused: false,
        is_node: false,
        first_s: 60,
        last_s,
        count: 2,
    }
}

fn entry(name: &str, rules: &[u32], packets: u64) -> EntryView {
    EntryView {
        port: "ns1_pod1".into(),
        namespace: "ns1".into(),
        pod: "pod1".into(),
        network: None,
        address: [203, 0, 113, 9].into(),
        names: vec![NameView {
            name: name.into(),
            origin: Origin::Answer,
            ttl_left_s: 30,
            told_s: 3,
            resolver: None,
            rules: rules.to_vec(),
        }],
        refused: None,
        is_adopted: false,
        flows: vec![FlowView {
            flow: String::new(),
            packets,
            idle_s: 7,
            is_missing: false,
        }],
    }
}

/// Rules 0 to 5.
fn firewall() -> Firewall {
    let resource = serde_saphyr::from_str(
        "{metadata: {name: default, namespace: ns1}, spec: {egress: [
           {type: Allow, to: {dnsName: a.test}},
           {type: Allow, to: {dnsName: '*.b.test'}},
           {type: Allow, to: {dnsName: c.test}},
           {type: Allow, to: {dnsName: d.test}},
           {type: Allow, to: {nodeSelector: {}}},
           {type: Deny, to: {cidrSelector: 0.0.0.0/0}}]}}",
    );
    match convert::firewall(&resource.expect("YAML")).reading {
        Reading::Firewall(_, firewall) => firewall,
        other => panic!("{other:?}"),
    }
}

fn known(seconds: u64, connections: Vec<ConnectionView>) -> Known {
    Known {
        connections,
        time: Duration::from_secs(seconds),
        forgotten: 0,
    }
}

#[test]
fn a_rule_is_used_by_connections_and_by_entries() {
    let connections = vec![
        connection(1, 9, &["www.a.test"]),
        connection(2, 5, &["y.b.test", "a.test"]),
        connection(3, 6, &["x.b.test"]),
        connection(4, 4, &[]),
    ];
    let entries = [entry("z.b.test", &[1], 0), entry("c.test", &[2], 0)];
    let firewall = firewall();
    let pruning = Pruning::new(
        "ns1",
        (&firewall, true),
        7200,
        &known(3600, connections),
        &entries,
        None,
    );
    let uses: Vec<_> = pruning
        .rules
        .iter()
        .map(|rule| (rule.used, rule.places, rule.last_s))
        .collect();
    assert_eq!(
        uses,
        [
            (Used::Connected, 2, Some(5)),
            (Used::Connected, 1, Some(6)),
            (Used::Told, 0, None),
            (Used::Never, 0, None),
            (Used::NotKnown, 0, None),
            (Used::Connected, 1, Some(4)),
        ]
    );
    let unused: Vec<_> = pruning.unused().map(|rule| rule.rule).collect();
    assert_eq!(unused, [3]);
    assert_eq!(pruning.rules[1].narrower, ["x.b.test", "z.b.test"]);
    let of_wildcard: Vec<_> = pruning.rules[1]
        .names
        .iter()
        .map(|name| name.last_s)
        .collect();
    assert_eq!(of_wildcard, [Some(6), None]);
    assert!(pruning.rules[0].narrower.is_empty());
    assert_eq!(pruning.known_since, Since::AnHour);
    assert_eq!(pruning.only_by_answer, None);
}

#[test]
fn an_entry_whose_flow_has_packets_is_a_use() {
    let firewall = firewall();
    let entries = [entry("d.test", &[3], 4)];
    let pruning = Pruning::new(
        "ns1",
        (&firewall, true),
        7200,
        &known(60, Vec::new()),
        &entries,
        None,
    );
    assert_eq!(pruning.rules[3].used, Used::Connected);
    assert_eq!(pruning.rules[3].last_s, Some(7));
    assert_eq!(pruning.known_since, Since::AgentStart);
}

#[test]
fn the_time_that_is_known_of_begins_with_the_rules() {
    let firewall = firewall();
    let pruning = Pruning::new(
        "ns1",
        (&firewall, true),
        40,
        &known(600, Vec::new()),
        &[],
        None,
    );
    assert_eq!(
        (pruning.known_s, pruning.known_since),
        (40, Since::FirewallChange)
    );
}

#[test]
fn what_ovn_kubernetes_alone_would_have_denied_is_found() {
    let connections = vec![
        connection(1, 9, &["a.test"]),
        connection(2, 9, &["a.test"]),
        // Another rule of ovn-kubernetes lets it pass.
        connection(3, 9, &["c.test"]),
        connection(4, 9, &[]),
    ];
    let address = |last: u8| IpAddr::from([203, 0, 113, last]);
    let resolved = [
        (0, [address(1)].into()),
        (3, [address(3), address(4)].into()),
    ]
    .into();
    let firewall = firewall();
    let pruning = Pruning::new(
        "ns1",
        (&firewall, true),
        7200,
        &known(3600, connections),
        &[],
        Some(&resolved),
    );
    let only = pruning.only_by_answer.expect("it was asked");
    let only: Vec<_> = only.iter().map(|one| (&*one.target, one.rule)).collect();
    assert_eq!(only, [("203.0.113.2:443", 0)]);
}
