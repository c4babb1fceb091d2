use std::borrow::Cow;

use proptest::prelude::*;

use super::{pairing::Pairing, resource::ResourceProblems, *};
use crate::{
    ovn::{
        acl::of_ports,
        hash::{Family, address_set_hashes},
        rows::{Acl, LogicalFlow, RowId},
        view::AclRow,
    },
    policy::plan::matched_by_any,
    values::{
        firewall::{PORTS_PER_RULE_MAX, Rule},
        flow::Protocol,
    },
};

const PORT_GROUP: &str = "a9633447981174624809";

fn dns(text: &str) -> DnsName {
    text.parse().expect("a name")
}

fn allow(name: &str) -> Rule {
    Rule {
        action: RuleAction::Allow,
        destination: Destination::Name(dns(name)),
        ports: vec![],
    }
}

fn deny_all() -> Rule {
    Rule {
        action: RuleAction::Deny,
        destination: Destination::Cidr("0.0.0.0/0".parse().expect("a network")),
        ports: vec![],
    }
}

const IPV4: IpVersions = IpVersions {
    v4: true,
    v6: false,
};

fn firewall(rules: Vec<Rule>) -> Firewall {
    Firewall {
        rules: rules.into(),
        ..Firewall::default()
    }
}

fn acl(index: u32, set: u64) -> Acl {
    Acl {
        namespace: "ns1".into(),
        rule_index: index,
        priority: 10000 - index as u16,
        matches: format!("(ip4.dst == $a{set}) && inport == @{PORT_GROUP}"),
        action: "allow".into(),
    }
}

fn logical_flow(acl: &Acl) -> LogicalFlow {
    LogicalFlow {
        pipeline: Pipeline::Egress,
        table_id: 4,
        priority: acl.priority + ACL_PRIORITY_OFFSET,
        matches: format!("reg0[8] == 1 && ({})", acl.matches),
        actions: "next;".into(),
        stage_hint: Some(1),
    }
}

fn set_of(name: &str) -> u64 {
    address_set_hashes(&dns(name), Family::V4)[0]
}

/// The rules beside these ACLs, which have the row ids 0, 1, …
fn pairing_with(firewall: &Firewall, acls: &[(Acl, Vec<LogicalFlow>)]) -> Pairing {
    let mut pairing = Pairing::new("ns1", true);
    for (id, (acl, flows)) in (0..).zip(acls) {
        set_row(&mut pairing, id, acl, flows);
    }
    pairing.set_firewall(firewall);
    pairing.settle(&CachedActions::new());
    pairing
}

fn set_row(pairing: &mut Pairing, id: u128, acl: &Acl, flows: &[LogicalFlow]) {
    let flows = flows.iter().map(|flow| (RowId::new(0), flow));
    let row = AclRow {
        acl,
        is_present: true,
        flows: flows.collect(),
    };
    pairing.set_row(RowId::new(id), Some(&row));
}

fn pair_with(firewall: &Firewall, acls: &[(Acl, Vec<LogicalFlow>)]) -> NamespaceRules {
    pairing_with(firewall, acls).rules().clone()
}

fn with_flows(acl: Acl) -> (Acl, Vec<LogicalFlow>) {
    let flow = logical_flow(&acl);
    (acl, vec![flow])
}

/// Index and name of each usable rule.
fn usable(rules: &NamespaceRules) -> Vec<(u32, Cow<'_, str>)> {
    let rules = rules.sets.values().flat_map(RuleSet::rules);
    let usable = rules.map(|rule| (rule.index, rule.name.written()));
    let mut usable: Vec<_> = usable.collect();
    usable.sort();
    usable
}

#[test]
fn an_acl_belongs_to_the_rule_whose_name_its_address_set_is_for() {
    let firewall = firewall(vec![allow("example.com"), deny_all()]);
    let paired = pair_with(&firewall, &[with_flows(acl(0, set_of("example.com")))]);
    assert_eq!(usable(&paired), [(0, "example.com".into())]);
    assert_eq!(paired.problems, BTreeMap::new());
    assert_eq!(paired.sets.keys().collect::<Vec<_>>(), [PORT_GROUP]);
}

#[test]
fn both_forms_of_the_address_set_are_known() {
    let firewall = firewall(vec![allow("Example.com")]);
    for hash in address_set_hashes(&dns("Example.com"), Family::V4) {
        let paired = pair_with(&firewall, &[with_flows(acl(0, hash))]);
        assert_eq!(usable(&paired), [(0, "Example.com".into())]);
    }
}

fn deny(name: &str) -> Rule {
    Rule {
        action: RuleAction::Deny,
        ..allow(name)
    }
}

#[test]
fn two_spellings_of_a_name_are_two_rules_whatever_address_sets_they_have() {
    let rules = [
        deny("Example.COM"),
        allow("example.com"),
        allow("example.com."),
    ];
    let firewall = firewall(rules.to_vec());
    for resolver in [false, true] {
        let acls: Vec<_> = (0..)
            .zip(&rules)
            .map(|(index, rule)| {
                let Destination::Name(name) = &rule.destination else {
                    panic!("{rule:?}");
                };
                let sets = address_set_hashes(name, Family::V4);
                with_flows(acl(index, sets[usize::from(resolver)]))
            })
            .collect();
        let paired = pair_with(&firewall, &acls);
        let found: Vec<_> = paired.sets[PORT_GROUP]
            .rules()
            .iter()
            .map(|rule| (rule.index, rule.name.written(), rule.action))
            .collect();
        let wanted = [
            (0, "Example.COM".into(), RuleAction::Deny),
            (1, "example.com".into(), RuleAction::Allow),
            (2, "example.com.".into(), RuleAction::Allow),
        ];
        assert_eq!(found, wanted, "resolver: {resolver}");
        let caveat = Problem::DeniesByName(dns("Example.COM"), IPV4);
        assert_eq!(paired.problems, BTreeMap::from([(0, caveat)]));
    }
}

#[test]
fn a_firewall_is_enforced_where_its_acls_say_so() {
    let ports = |rule: Rule, ports: &[(Protocol, Option<u16>)]| Rule {
        ports: ports
            .iter()
            .map(|&(protocol, port)| Transport { protocol, port })
            .collect(),
        ..rule
    };
    let old = [allow("example.com"), deny_all(), allow("other.test")];
    let mut acls = vec![
        acl(0, set_of("example.com")),
        acl(1, 0),
        acl(2, set_of("other.test")),
    ];
    acls[1].matches = format!("(ip4.dst == 0.0.0.0/0) && inport == @{PORT_GROUP}");
    acls[1].action = "drop".into();
    let check = |rules: &[Rule], acls: &[Acl], expected: bool| {
        let mut pairing = Pairing::new("ns1", true);
        for (id, acl) in (0..).zip(acls) {
            set_row(&mut pairing, id, acl, &[]);
        }
        let enforced = pairing.is_enforced(&firewall(rules.to_vec()));
        assert_eq!(enforced, expected, "{rules:#?} {acls:#?}");
    };
    check(&old, &acls, true);
    // OVN has more: it was shortened, and left one behind.
    check(&old[..2], &acls, true);
    check(&[], &acls, true);
    // It has less, another order, other actions, other ports.
    check(&old, &acls[..2], false);
    check(&[old[2].clone(), deny_all(), old[0].clone()], &acls, false);
    check(
        &[allow("example.com"), allow("x.test"), old[2].clone()],
        &acls,
        false,
    );
    check(
        &[deny("example.com"), deny_all(), old[2].clone()],
        &acls,
        false,
    );
    let https = (Protocol::Tcp, Some(443));
    let one_port = [ports(allow("example.com"), &[https])];
    check(&one_port, &acls, false);
    acls[0].matches += " && ((tcp && ( tcp.dst == 443 )))";
    check(&one_port, &acls, true);
    check(&[allow("example.com")], &acls, false);
    // All ports of a protocol are all that OVN is told of.
    acls[0].matches = acls[0]
        .matches
        .replace("(tcp && ( tcp.dst == 443 ))", "(tcp)");
    let all = ports(allow("example.com"), &[https, (Protocol::Tcp, None)]);
    check(&[all], &acls, true);
    // Of more ports than are read, OVN has all.
    let port = |port: usize| (Protocol::Tcp, u16::try_from(port).ok());
    let listed = |count: usize| {
        ports(
            allow("example.com"),
            &(1..=count).map(port).collect::<Vec<_>>(),
        )
    };
    let mut long = vec![acl(0, set_of("example.com"))];
    long[0].matches += &of_ports(&listed(2_000).ports);
    check(&[listed(PORTS_PER_RULE_MAX + 1)], &long, true);
    check(&[listed(PORTS_PER_RULE_MAX)], &long, false);
    check(&[listed(1)], &long, false);
    // What cannot be told counts as right.
    let invalid = Rule {
        destination: Destination::Invalid("no destination".into()),
        ..deny_all()
    };
    check(&[invalid], &acls, true);
    acls[0].matches = "frobnicate".into();
    check(&old, &acls, true);
}

#[test]
fn until_ovn_catches_up_a_moved_rule_stays_where_ovn_has_it() {
    let edited = firewall(vec![allow("new.test"), allow("example.com"), deny_all()]);
    let paired = pair_with(&edited, &[with_flows(acl(0, set_of("example.com")))]);
    assert_eq!(usable(&paired), [(0, "example.com".into())]);
    assert_eq!(paired.problems[&0], Problem::NoAcl(dns("new.test")));
}

#[test]
fn an_acl_of_a_name_that_no_rule_has_is_not_used() {
    let edited = firewall(vec![allow("new.test")]);
    let paired = pair_with(&edited, &[with_flows(acl(0, set_of("example.com")))]);
    assert_eq!(usable(&paired), []);
    assert_eq!(paired.problems[&0], Problem::NoAcl(dns("new.test")));
}

#[test]
fn an_acl_beyond_the_rules_is_stale() {
    let shorter = firewall(vec![allow("example.com")]);
    let paired = pair_with(
        &shorter,
        &[
            with_flows(acl(0, set_of("example.com"))),
            with_flows(acl(1, set_of("example.com"))),
        ],
    );
    assert_eq!(usable(&paired), [(0, "example.com".into())]);
    assert_eq!(paired.problems[&1], Problem::StaleAcl);
}

#[test]
fn logical_flows_are_waited_for() {
    let firewall = firewall(vec![allow("example.com")]);
    let acl = acl(0, set_of("example.com"));
    let waiting = Problem::NoLogicalFlows(dns("example.com"));
    let none = pair_with(&firewall, &[(acl.clone(), vec![])]);
    assert_eq!((usable(&none), &none.problems[&0]), (vec![], &waiting));
    // Still made from the match before the edit.
    let mut old = logical_flow(&acl);
    old.matches = old.matches.replace("ip4.dst == $a", "ip4.dst == $a9");
    let late = pair_with(&firewall, &[(acl, vec![old])]);
    assert_eq!((usable(&late), &late.problems[&0]), (vec![], &waiting));
}

#[test]
fn until_northd_catches_up_a_moved_rule_stays_where_its_logical_flow_is() {
    let edited = firewall(vec![allow("new.test"), allow("example.com"), deny_all()]);
    let old_flow = logical_flow(&acl(0, set_of("example.com")));
    let paired = pair_with(
        &edited,
        &[
            (acl(0, set_of("new.test")), vec![old_flow]),
            (acl(1, set_of("example.com")), vec![]),
        ],
    );
    assert_eq!(usable(&paired), [(0, "example.com".into())]);
    assert_eq!(
        paired.problems[&0],
        Problem::NoLogicalFlows(dns("new.test"))
    );
}

#[test]
fn a_row_beyond_the_rules_serves_until_its_name_has_another_place() {
    let shorter = firewall(vec![allow("example.com")]);
    let beyond = with_flows(acl(2, set_of("example.com")));
    let paired = pair_with(&shorter, &[beyond]);
    assert_eq!(usable(&paired), [(2, "example.com".into())]);
    assert_eq!(paired.problems[&2], Problem::StaleAcl);
}

#[test]
fn the_two_logical_flows_of_a_stateful_acl_make_one_rule() {
    let firewall = firewall(vec![allow("example.com")]);
    let acl = acl(0, set_of("example.com"));
    let established = logical_flow(&acl);
    let new = LogicalFlow {
        matches: established.matches.replace("reg0[8]", "reg0[7]"),
        ..established.clone()
    };
    let paired = pair_with(&firewall, &[(acl, vec![established, new])]);
    let [rule] = paired.sets[PORT_GROUP].rules() else {
        panic!("{paired:?}");
    };
    assert_eq!(rule.templates.len(), 2);
}

#[test]
fn a_template_that_is_not_understood_is_reported_and_harms_no_other() {
    let firewall = firewall(vec![allow("example.com"), allow("other.test")]);
    let (acl0, mut flows0) = with_flows(acl(0, set_of("example.com")));
    flows0[0].actions = "frobnicate(); next;".into();
    let paired = pair_with(
        &firewall,
        &[(acl0, flows0), with_flows(acl(1, set_of("other.test")))],
    );
    assert_eq!(
        usable(&paired),
        [(0, "example.com".into()), (1, "other.test".into())]
    );
    let name = dns("example.com");
    let rule = paired.sets[PORT_GROUP].matching(name.name()).next();
    let rule = rule.expect("the rule");
    assert_eq!(rule.templates[0].actions(42, &CachedActions::new()), None);
    assert_eq!(
        paired.problems[&0].to_string(),
        "a logical flow of dnsName `example.com` is not understood: its actions hold `frobnicate()`: dnsflow copies \
         such actions from a flow of OVN's, and there is none yet"
    );
}

#[test]
fn what_the_resource_says_wrongly_is_reported_at_its_index() {
    let firewall = firewall(vec![
        Rule {
            action: RuleAction::Deny,
            ..allow("bad.test")
        },
        Rule {
            destination: Destination::Invalid("no destination".into()),
            ..deny_all()
        },
    ]);
    let paired = pair_with(&firewall, &[]);
    assert_eq!(paired.problems[&0], Problem::NoAcl(dns("bad.test")));
    assert_eq!(paired.problems[&1].to_string(), "no destination");
}

#[test]
fn a_rule_that_denies_by_name_comes_with_a_caveat() {
    let deny = Rule {
        action: RuleAction::Deny,
        ..allow("bad.test")
    };
    let alone = firewall(vec![deny.clone()]);
    let paired = pair_with(&alone, &[with_flows(acl(0, set_of("bad.test")))]);
    assert_eq!(usable(&paired), [(0, "bad.test".into())]);
    let caveat = Problem::DeniesByName(dns("bad.test"), IPV4);
    assert_eq!(caveat.severity(), Severity::Caveat);
    assert_eq!(paired.problems, BTreeMap::from([(0, caveat.clone())]));
    // What keeps the rule from working is said first.
    let waiting = pair_with(&alone, &[]);
    assert_eq!(waiting.problems[&0], Problem::NoAcl(dns("bad.test")));
    // All addresses are denied behind it, before an Allow by CIDR or behind one.
    let allow_all = Rule {
        action: RuleAction::Allow,
        ..deny_all()
    };
    for (behind, is_alone) in [
        (vec![allow("good.test"), deny_all()], false),
        (vec![deny_all(), allow_all.clone()], false),
        (vec![allow_all, deny_all()], true),
    ] {
        let rules = [vec![deny.clone()], behind].concat();
        let of_resource = ResourceProblems::of(&rules.clone().into());
        let problem = of_resource.problems().get(&0).map(|problem| &**problem);
        assert_eq!(problem == Some(&caveat), is_alone, "{rules:?}");
    }
}

/// The ACL has an address set for each IP version of the cluster.
#[test]
fn a_deny_of_all_addresses_of_one_ip_version_stands_behind_no_other() {
    let deny = Rule {
        action: RuleAction::Deny,
        ..allow("bad.test")
    };
    let by_cidr = |action, network: &str| Rule {
        action,
        destination: Destination::Cidr(network.parse().expect("a network")),
        ..deny_all()
    };
    let all = |network| by_cidr(RuleAction::Deny, network);
    let (v4, v6) = ([Family::V4], [Family::V6]);
    let both = [Family::V4, Family::V6];
    let of_both = || vec![all("::/0"), all("0.0.0.0/0")];
    let behind_allow = || {
        vec![
            by_cidr(RuleAction::Allow, "2001:db8::/32"),
            all("0.0.0.0/0"),
        ]
    };
    for (cluster, behind, open) in [
        (&v4[..], vec![], Some("0.0.0.0/0")),
        (&v4, vec![all("::/0")], Some("0.0.0.0/0")),
        (&v4, vec![all("0.0.0.0/0")], None),
        (&v4, behind_allow(), None),
        (&v6, vec![all("0.0.0.0/0")], Some("::/0")),
        (&v6, vec![all("::/0")], None),
        (&both, vec![], Some("0.0.0.0/0, and one of ::/0,")),
        (&both, vec![all("::/0")], Some("0.0.0.0/0")),
        (&both, vec![all("0.0.0.0/0")], Some("::/0")),
        (&both, behind_allow(), Some("::/0")),
        (&both, of_both(), None),
    ] {
        let sets = cluster.iter().map(|version| {
            let set = address_set_hashes(&dns("bad.test"), *version)[0];
            match version {
                Family::V4 => format!("ip4.dst == $a{set}"),
                Family::V6 => format!("ip6.dst == $a{set}"),
            }
        });
        let sets = sets.collect::<Vec<_>>().join(" || ");
        let acl = Acl {
            matches: format!("({sets}) && inport == @{PORT_GROUP}"),
            ..acl(0, 0)
        };
        let rules = [vec![deny.clone()], behind].concat();
        let paired = pair_with(&firewall(rules.clone()), &[with_flows(acl)]);
        let problem = paired.problems.get(&0).map(Problem::to_string);
        let remedy = open.map(|open| format!("add a Deny of cidrSelector {open} as the last rule"));
        let is_as_expected = match (&problem, &remedy) {
            (Some(problem), Some(remedy)) => problem.contains(remedy),
            (problem, remedy) => problem.is_none() && remedy.is_none(),
        };
        assert!(is_as_expected, "{cluster:?}, {rules:?}: {problem:?}");
    }
}

/// The rule that denies by name stays as it is.
#[test]
fn the_caveat_of_a_deny_by_name_follows_an_edit_of_the_rules_behind() {
    let deny = Rule {
        action: RuleAction::Deny,
        ..allow("bad.test")
    };
    let acls = [with_flows(acl(0, set_of("bad.test")))];
    let mut pairing = pairing_with(&firewall(vec![deny.clone()]), &acls);
    let mut has_caveat = |rules: Vec<Rule>| {
        pairing.set_firewall(&firewall(rules));
        pairing.settle(&CachedActions::new());
        pairing.rules().problems.contains_key(&0)
    };
    assert!(has_caveat(vec![deny.clone()]));
    assert!(!has_caveat(vec![deny.clone(), deny_all()]));
    assert!(has_caveat(vec![deny]));
}

#[test]
fn names_match_by_pattern() {
    let check = |rule: &str, subdomains: bool, name: &str, expected: bool| {
        let firewall = Firewall {
            rules: [allow(rule)].into(),
            subdomains: Some(subdomains),
            ..Firewall::default()
        };
        let paired = pair_with(&firewall, &[with_flows(acl(0, set_of(rule)))]);
        let name: DomainName = name.parse().expect("a name");
        let found = paired.sets[PORT_GROUP].matching(&name).count() == 1;
        assert_eq!(found, expected, "{rule} {name}");
    };
    check("example.com", true, "example.com", true);
    check("example.com", true, "a.b.WWW.example.COM", true);
    check("example.com", true, "notexample.com", false);
    check("example.com", true, "com", false);
    check("example.com", true, "example.com.evil.test", false);
    check("example.com", false, "example.com", true);
    check("example.com", false, "www.example.com", false);
    for subdomains in [true, false] {
        check("*.example.com", subdomains, "www.example.com", true);
        check("*.example.com", subdomains, "example.com", false);
        check("*.example.com", subdomains, "a.www.example.com", false);
    }
}

#[test]
fn the_rules_of_a_name_are_looked_at_once_for_all_names_below_it() {
    let texts = [
        ("example.com", NamePattern::Subdomains),
        ("example.com", NamePattern::Exact),
        ("example.com", NamePattern::OneLabel),
        ("b.example.com", NamePattern::Subdomains),
        ("other.test", NamePattern::Subdomains),
    ];
    let mut set = RuleSet::default();
    for (index, (name, pattern)) in (0..).zip(texts) {
        let rule = ActiveRule::without_acl("ns1", index, &allow(name), &dns(name), pattern);
        set.push(rule);
    }
    let sets = [&set];
    let names = |texts: &[String]| -> Vec<DomainName> {
        let names = texts.iter().map(|text| text.parse());
        names.collect::<Result<_, _>>().expect("names")
    };
    let of_each = |names: &[DomainName]| -> BTreeSet<usize> {
        let found = names.iter().flat_map(|name| set.matching_indices(name));
        found.collect()
    };
    let of_any = |names: &[DomainName]| -> Vec<usize> {
        let found = matched_by_any(&sets, names.iter()).into_iter();
        found.map(|(_, rule)| rule).collect()
    };
    let deep = ["example.com", "a.example.com", "a.b.example.com", "test"];
    for count in 0..=deep.len() {
        let some = names(&deep.map(str::to_owned)[..count]);
        assert_eq!(
            of_any(&some).into_iter().collect::<BTreeSet<_>>(),
            of_each(&some)
        );
    }
    let many: Vec<_> = (0..64).map(|i| format!("n{i}.www.example.com")).collect();
    assert_eq!(of_any(&names(&many)), [0]);
}

const ALIKE: [&str; 7] = [
    "test",
    "a.test",
    "b.a.test",
    "c.b.a.test",
    "d.c.b.a.test",
    "xa.test",
    "b.xa.test",
];
const PATTERNS: [NamePattern; 3] = [
    NamePattern::Exact,
    NamePattern::Subdomains,
    NamePattern::OneLabel,
];

proptest! {
    #[test]
    fn names_are_alike_if_the_same_rules_match(
        rules in proptest::collection::vec((0..ALIKE.len(), 0..PATTERNS.len(), 0..2_usize), 0..8),
    ) {
        let mut sets = [RuleSet::default(), RuleSet::default()];
        for (name, pattern, set) in rules {
            let rule = deny(ALIKE[name]);
            let dns = dns(ALIKE[name]);
            sets[set].push(ActiveRule::without_acl("ns1", 0, &rule, &dns, PATTERNS[pattern]));
        }
        let sets = [&sets[0], &sets[1]];
        let matched = |name: &DomainName| -> Vec<Vec<usize>> {
            let matched = sets.iter().map(|set| set.matching_indices(name).collect());
            matched.collect()
        };
        let has_rules = |name: &[u8]| sets.iter().any(|set| set.has_rules(name));
        let alike = |name: &DomainName| AlikeNames::of(name, has_rules);
        let names: Vec<DomainName> = ALIKE.iter().map(|text| dns(text).name().clone()).collect();
        for name in &names {
            let of_name = alike(name);
            let all = matched(name);
            prop_assert!(of_name.is_some() || all.iter().all(Vec::is_empty));
            for other in names.iter().filter(|other| alike(other) == of_name) {
                prop_assert_eq!(&matched(other), &all, "{} for {}", other, name);
            }
        }
    }
}
