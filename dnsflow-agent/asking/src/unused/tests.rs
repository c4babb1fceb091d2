use dnsflow_core::ask::view::{FlowView, NameView, Origin};

use super::*;
use crate::fixtures::{connection, known, read};

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
        flows: vec![FlowView {
            flow: String::new(),
            packets,
            idle_s: 7,
            is_missing: false,
            is_of_group: false,
        }],
        packets: Some(packets),
        used_s: (packets > 0).then_some(7),
    }
}

/// Rules 0 to 5.
fn firewall() -> Firewall {
    let (_, firewall, _) = read(
        "{type: Allow, to: {dnsName: a.test}},
         {type: Allow, to: {dnsName: '*.b.test'}},
         {type: Allow, to: {dnsName: c.test}},
         {type: Allow, to: {dnsName: d.test}},
         {type: Allow, to: {nodeSelector: {}}},
         {type: Deny, to: {cidrSelector: 0.0.0.0/0}}",
    );
    firewall
}

/// What these connections and entries say of the rules, which came so many seconds ago.
fn use_by(known: &Known, entries: &[EntryView], came_s: u64) -> FirewallUse {
    let evidence = Evidence {
        firewall: firewall(),
        subdomains: true,
        came_s,
        known: known.clone(),
        entries: entries.to_vec(),
    };
    FirewallUse::new("ns1", &evidence, None)
}

#[test]
fn a_rule_is_used_by_connections_and_by_entries() {
    let connections = vec![
        connection(1, 9, &["www.a.test", "a.test"]),
        connection(2, 5, &["y.b.test", "a.test"]),
        connection(3, 6, &["x.b.test"]),
        connection(4, 4, &[]),
    ];
    let entries = [
        entry("z.b.test", &[1], 0),
        entry("c.test", &[2], 0),
        entry("a.test", &[0], 0),
    ];
    let whole = use_by(&known(3600, connections), &entries, 7200);
    let uses: Vec<_> = whole
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
    let unused: Vec<_> = whole.unused().map(|rule| rule.rule).collect();
    assert_eq!(unused, [3]);
    assert_eq!(whole.rules[1].narrower, ["x.b.test", "z.b.test"]);
    let of_wildcard: Vec<_> = whole.rules[1]
        .names
        .iter()
        .map(|name| name.last_s)
        .collect();
    assert_eq!(of_wildcard, [Some(6), None]);
    assert!(whole.rules[0].narrower.is_empty());
    let names = [("a.test", 5), ("www.a.test", 9)].map(|(name, last_s)| NameUse {
        name: name.into(),
        last_s: Some(last_s),
    });
    assert_eq!(whole.rules[0].names, names);
    assert_eq!(whole.known_since, Since::AnHour);
    assert_eq!(whole.only_by_answer, None);
}

#[test]
fn an_entry_that_has_packets_is_a_use() {
    let entry = entry("d.test", &[3], 4);
    let whole = use_by(&known(60, Vec::new()), &[entry], 7200);
    assert_eq!(whole.rules[3].used, Used::Connected);
    assert_eq!(whole.rules[3].last_s, Some(7));
    let name = NameUse {
        name: "d.test".into(),
        last_s: Some(7),
    };
    assert_eq!(whole.rules[3].names, [name]);
    assert_eq!(whole.known_since, Since::AgentStart);
}

/// What entries say of these rules: the uses, in words, and the rules that nothing has used.
fn of_entries(egress: &str, entries: &[EntryView]) -> (Vec<Used>, Vec<u32>) {
    let (_, firewall, _) = read(egress);
    let evidence = Evidence {
        firewall,
        subdomains: true,
        came_s: 7200,
        known: known(3600, Vec::new()),
        entries: entries.to_vec(),
    };
    let whole = FirewallUse::new("ns1", &evidence, None);
    let used = whole.rules.iter().map(|rule| rule.used);
    let unused = whole.unused().map(|rule| rule.rule);
    (used.collect(), unused.collect())
}

#[test]
fn packets_to_an_address_of_two_names_count_for_the_rule_that_decides() {
    let second = entry("b.test", &[1], 4);
    let both = EntryView {
        names: [entry("a.test", &[0], 4).names, second.names.clone()].concat(),
        ..second
    };
    let (used, _) = of_entries(
        "{type: Allow, to: {dnsName: a.test}}, {type: Allow, to: {dnsName: b.test}}",
        std::slice::from_ref(&both),
    );
    assert_eq!(used, [Used::Connected, Used::Told]);
    // The port of the packets is not known.
    let with_ports = "{type: Allow, to: {dnsName: a.test}, ports: [{protocol: TCP, port: 443}]},
                      {type: Allow, to: {dnsName: b.test}}";
    let (used, _) = of_entries(with_ports, std::slice::from_ref(&both));
    assert_eq!(used, [Used::NotKnown, Used::NotKnown]);
    // Packets that a network allows are seen as well, with a mark and with flows.
    let network =
        "{type: Allow, to: {cidrSelector: 203.0.113.0/24}, ports: [{protocol: TCP, port: 443}]},
                   {type: Allow, to: {dnsName: b.test}}";
    let counted = entry("b.test", &[1], 4);
    let marked = EntryView {
        packets: None,
        ..counted.clone()
    };
    for entry in [counted, marked] {
        let (used, _) = of_entries(network, &[entry]);
        assert_eq!(used, [Used::NotKnown, Used::NotKnown]);
    }
}

#[test]
fn the_rule_that_denies_the_rest_is_not_unused() {
    let (used, unused) = of_entries(
        "{type: Allow, to: {dnsName: a.test}}, {type: Deny, to: {cidrSelector: 10.0.0.0/8}},
         {type: Deny, to: {cidrSelector: 0.0.0.0/0}}, {type: Deny, to: {cidrSelector: '::/0'}}",
        &[],
    );
    let closes = Used::Closes;
    assert_eq!(used, [Used::Never, Used::Never, closes, closes]);
    assert_eq!(unused, [0, 1]);
}

#[test]
fn the_time_that_is_known_of_begins_with_the_rules() {
    let whole = use_by(&known(600, Vec::new()), &[], 40);
    assert_eq!(
        (whole.known_s, whole.known_since),
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
    let evidence = Evidence {
        firewall: firewall(),
        subdomains: true,
        came_s: 7200,
        known: known(3600, connections),
        entries: Vec::new(),
    };
    let whole = FirewallUse::new("ns1", &evidence, Some(&resolved));
    let only = whole.only_by_answer.expect("it was asked");
    let only = only.iter();
    let only: Vec<_> = only
        .map(|one| (&*one.target, one.rule, one.last_s))
        .collect();
    assert_eq!(only, [("203.0.113.2:443", 0, 9)]);
}

#[test]
fn only_what_a_rule_by_name_allows_depends_on_an_answer() {
    let (_, firewall, _) = read(
        "{type: Deny, to: {dnsName: bad.test}}, {type: Allow, to: {cidrSelector: 203.0.113.0/24}},
         {type: Deny, to: {cidrSelector: 0.0.0.0/0}}",
    );
    // OVN denies one by a name that the pod was not told, and both rules deny the other.
    let connections = vec![connection(1, 5, &[]), connection(2, 5, &["bad.test"])];
    let address = |last: u8| IpAddr::from([203, 0, 113, last]);
    let resolved = [(0, [address(1), address(2)].into())].into();
    let evidence = Evidence {
        firewall,
        subdomains: true,
        came_s: 7200,
        known: known(3600, connections),
        entries: Vec::new(),
    };
    let whole = FirewallUse::new("ns1", &evidence, Some(&resolved));
    assert_eq!(whole.only_by_answer, Some(Vec::new()));
}

#[test]
fn what_came_before_the_last_edit_is_no_use() {
    let connections = vec![connection(1, 16, &["a.test"]), connection(4, 1, &[])];
    let entries = [entry("a.test", &[0], 4), entry("c.test", &[2], 4)];
    let whole = use_by(&known(3600, connections), &entries, 1);
    assert_eq!(
        (whole.known_s, whole.known_since),
        (1, Since::FirewallChange)
    );
    let uses = whole.rules.iter().map(|rule| (rule.places, rule.last_s));
    let uses: Vec<_> = uses.collect();
    assert_eq!(
        uses,
        [
            (0, None),
            (0, None),
            (0, None),
            (0, None),
            (0, None),
            (1, Some(1))
        ]
    );
    // The names are those of today's answers.
    assert_eq!(whole.rules[0].used, Used::Told);
}
