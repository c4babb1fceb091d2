//! What one pod can have, and what makes room.

use super::{
    handover::{GROUP_OF_NS2, set_rule_of_ns2},
    *,
};
use crate::values::{firewall::PORTS_PER_RULE_MAX, limits::GROUP_FLOWS_PER_SCOPE_MAX};

#[test]
fn a_pod_that_resolves_without_end_forgets_what_matters_least() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let written = [allow("example.com"), deny_all(), allow("other.test")];
    node.set_firewall(&written);
    node.answer("p1", "example.com", &[[198, 51, 100, 1]], 60);
    // OVN does not enforce the rule for these yet.
    for i in 0..4096 + 10 {
        let address = Ipv4Addr::from(0x0b00_0000 + i).octets();
        node.answer("p1", &format!("n{}.other.test", i / 100), &[address], 3600);
    }
    assert_eq!(node.engine.counters().addresses_evicted, 11);
    assert_eq!(
        node.destinations(),
        ["198.51.100.1".to_owned()].into(),
        "what is open goes last"
    );
}

#[test]
fn an_address_in_use_is_never_evicted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 2;
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 60);
    for (_, packets) in node.switch.values_mut() {
        *packets += 1;
    }
    node.pass(COMPARE_INTERVAL);
    node.answer("p1", "example.com", &[[203, 0, 113, 3]], 60);
    assert_eq!(node.engine.counters().addresses_refused, 1);
    assert_eq!(node.destinations().len(), 2);
    // Out of use, the one that expires first makes room.
    node.pass(IDLE_GRACE);
    node.answer("p1", "example.com", &[OTHER], 600);
    node.answer("p1", "example.com", &[[203, 0, 113, 3]], 60);
    assert_eq!(
        node.destinations(),
        ["203.0.113.2".to_owned(), "203.0.113.3".to_owned()].into()
    );
}

#[test]
fn an_address_that_may_be_in_use_is_never_evicted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_name_max = 2;
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.pass(COUNTERS_DELAY_MAX * 2);
    node.answer("p1", "example.com", &[OTHER], 60);
    for (_, packets) in node.switch.values_mut() {
        *packets += 1;
    }
    let third = [203, 0, 113, 3];
    node.answer("p1", "example.com", &[third], 60);
    assert_eq!(node.engine.counters().addresses_refused, 1);
    assert_eq!(node.destinations().len(), 2, "nobody has counted yet");
    // The counters are read soon, and tell.
    node.pass(COUNTERS_DELAY_MAX);
    node.answer("p1", "example.com", &[third], 60);
    assert_eq!(node.engine.counters().addresses_refused, 2);
    node.pass(IDLE_GRACE);
    node.answer("p1", "example.com", &[third], 60);
    assert!(node.destinations().contains("203.0.113.3"));
    assert_eq!(node.destinations().len(), 2);
}

#[test]
fn where_room_gets_short_it_is_soon_known_what_may_go() {
    for (of_port, of_name) in [(8, 256), (4096, 8)] {
        let mut node = Node::with(&[allow("example.com"), deny_all()]);
        node.engine.told.cache.limits_mut().addresses_per_port_max = of_port;
        node.engine.told.cache.limits_mut().addresses_per_name_max = of_name;
        let told = |host: u8| match of_name {
            8 => "example.com".to_owned(),
            _ => format!("n{host}.example.com"),
        };
        for host in 1..=8 {
            node.answer("p1", &told(host), &[[203, 0, 113, host]], 600);
        }
        node.pass(COUNTERS_DELAY_MAX);
        node.answer("p1", &told(9), &[[203, 0, 113, 9]], 600);
        assert!(node.destinations().contains("203.0.113.9"));
        assert_eq!(node.engine.counters().addresses_refused, 0);
    }
}

#[test]
fn addresses_chosen_to_go_stay_once_they_are_in_use() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 32;
    for host in 1..=32 {
        node.answer(
            "p1",
            "example.com",
            &[[203, 0, 113, host]],
            60 * u32::from(host),
        );
    }
    // Somebody has counted their packets: none.
    node.pass(COMPARE_INTERVAL + COUNTERS_DELAY_MAX);
    // Two of 32 are chosen, and the first goes.
    node.answer("p1", "example.com", &[[203, 0, 113, 33]], 3600);
    assert!(!node.destinations().contains("203.0.113.1"));
    let second = node.switch.iter_mut().find(
        |(key, _)| matches!(key.matches.ends, crate::values::flow::Ends::Addresses(Addresses::V4 { dst, .. }) if dst.octets()[3] == 2),
    );
    second.expect("it is open").1.1 += 1;
    node.pass(COMPARE_INTERVAL);
    node.answer("p1", "example.com", &[[203, 0, 113, 34]], 3600);
    let open = node.destinations();
    assert!(open.contains("203.0.113.2") && !open.contains("203.0.113.3"));
    assert_eq!(node.engine.counters().addresses_evicted, 2);
    assert_eq!(open.len(), 32);
}

#[test]
fn a_name_keeps_only_so_many_addresses() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_name_max = 2;
    for host in 1..=4 {
        node.answer(
            "p1",
            "example.com",
            &[[203, 0, 113, host]],
            60 * u32::from(host),
        );
        node.pass(COMPARE_INTERVAL);
    }
    node.answer("p1", "www.example.com", &[[203, 0, 113, 9]], 60);
    let kept = ["203.0.113.3", "203.0.113.4", "203.0.113.9"];
    assert_eq!(node.destinations(), kept.map(str::to_owned).into());
    assert_eq!(node.engine.counters().addresses_evicted, 2);
    assert_eq!(node.limits_reported(), ["ns1: example.com of ns1_p1, 2"]);
    // As long as it is near the limit that is no news; after it was far below, it is.
    node.answer("p1", "example.com", &[[203, 0, 113, 10]], 240);
    assert_eq!(node.limits_reported(), [] as [&str; 0]);
    node.pass(Duration::from_secs(300));
    for host in 5..=7 {
        node.answer("p1", "example.com", &[[203, 0, 113, host]], 600);
    }
    assert_eq!(node.limits_reported(), ["ns1: example.com of ns1_p1, 2"]);
}

#[test]
fn a_limit_is_told_only_where_it_costs_access() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 2;
    node.engine.told.cache.limits_mut().addresses_per_name_max = 2;
    node.set_firewall(&[allow("example.com"), deny_all(), allow("other.test")]);
    for host in 1..=4 {
        node.answer("p1", "other.test", &[[198, 51, 100, host]], 60);
    }
    assert_eq!(node.limits_reported(), [] as [&str; 0]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.answer("p1", "www.example.com", &[OTHER], 60);
    assert_eq!(node.limits_reported(), [] as [&str; 0]);
    node.answer("p1", "ftp.example.com", &[[203, 0, 113, 3]], 60);
    node.answer("p1", "nfs.example.com", &[[203, 0, 113, 4]], 60);
    assert_eq!(node.limits_reported(), ["ns1: ns1_p1, 2"]);
}

/// A rule for many ports of TCP.
pub(super) fn many(rule: Rule, ports: usize) -> Rule {
    Rule {
        ports: tcp(ports),
        ..rule
    }
}

/// The priorities of the flows to each address, and how many of each there are.
fn priorities(node: &Node) -> BTreeMap<String, BTreeMap<u16, usize>> {
    let mut flows: BTreeMap<String, BTreeMap<u16, usize>> = BTreeMap::new();
    for (_, dst, priority) in node.open() {
        *flows.entry(dst).or_default().entry(priority).or_default() += 1;
    }
    flows
}

/// The priority of the flow that closes an address without room: before all rules.
pub(super) const CLOSED: u16 = 11_002;

/// Those flows to an address that fall to the rules from the first one on, with these numbers of ports.
fn ports_of(rules: &[usize]) -> BTreeMap<u16, usize> {
    let rules = rules.iter().enumerate();
    rules
        .filter(|(_, ports)| **ports > 0)
        .map(|(place, ports)| (11_000 - place as u16, *ports))
        .collect()
}

#[test]
fn rules_of_one_name_have_all_their_flows_whatever_their_ports() {
    let ports = [256 - 1, 2, 1024, 1, 1];
    let rules = ports.map(|ports| many(allow("example.com"), ports));
    let rules = [&rules[..], &[deny_all()]].concat();
    let mut node = Node::with(&rules);
    node.reports.clear();
    node.answer("p1", "example.com", &[ADDRESS], 60);
    assert_eq!(priorities(&node)["203.0.113.1"], ports_of(&ports));
    assert_eq!(node.engine.counters().addresses_cut, 0);
    assert_eq!(node.limits_reported(), [] as [&str; 0]);
    // An edit changes the flows of the rules alone.
    let of_address: Vec<FlowKey> = node.of_addresses().cloned().collect();
    let fewer = [many(allow("example.com"), 2), deny_all()];
    node.set_firewall(&fewer);
    node.set_ovn(&fewer);
    assert_eq!(priorities(&node)["203.0.113.1"], ports_of(&[2]));
    assert_eq!(node.of_addresses().cloned().collect::<Vec<_>>(), of_address);
}

#[test]
fn a_rule_that_denies_closes_each_of_its_ports_at_each_address() {
    let ports = [1024, 0, 1];
    let rules = [
        many(deny("bad.test"), 1024),
        allow("good.test"),
        many(deny("bad.test"), 1),
    ];
    let mut node = Node::with(&rules);
    let told: Vec<[u8; 4]> = (0..100).map(|n| [198, 18, 0, n]).collect();
    node.answer("p1", "bad.test", &told, 60);
    assert_eq!(node.own(), 100);
    assert_eq!(node.of_rules().count(), 1024 + 1);
    for flows in priorities(&node).values() {
        assert_eq!(*flows, ports_of(&ports));
    }
    assert_eq!(node.engine.counters().addresses_cut, 0);
    // One before it goes on to count.
    let rules = [many(allow("bad.test"), 1), many(deny("bad.test"), 1024)];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    for flows in priorities(&node).values() {
        assert_eq!(*flows, ports_of(&[1, 1024]));
    }
}

#[test]
fn a_rule_with_more_ports_than_are_read_denies_what_rules_behind_it_allow() {
    let ovn = [many(deny("bad.test"), 2_000), allow("bad.test")];
    let read = [
        many(deny("bad.test"), PORTS_PER_RULE_MAX + 1),
        allow("bad.test"),
    ];
    let mut node = Node::with(&[allow("bad.test")]);
    node.set_firewall(&read);
    node.set_ovn(&ovn);
    node.answer("p1", "bad.test", &[ADDRESS], 60);
    assert_eq!(priorities(&node)["203.0.113.1"], ports_of(&[1, 1]));
    let denial = node.of_rules().find(|key| key.priority == 11_000);
    assert_eq!(denial.and_then(|key| key.matches.transport), None);
    // Without its name, the one behind it decides.
    let invalid = Destination::Invalid("too many ports".into());
    let refused = [
        Rule {
            destination: invalid,
            ..deny("bad.test")
        },
        allow("bad.test"),
    ];
    let mut node = Node::with(&[allow("bad.test")]);
    node.set_firewall(&refused);
    node.set_ovn(&ovn);
    node.answer("p1", "bad.test", &[ADDRESS], 60);
    assert_ne!(
        priorities(&node).get("203.0.113.1"),
        Some(&[(11_000, 1)].into())
    );
}

#[test]
fn further_addresses_have_one_flow_each_whatever_the_ports_of_their_rules() {
    for rule in [deny("many.test"), allow("many.test")] {
        let rules = [
            many(rule, 256),
            many(allow("few.test"), 8),
            many(allow("edited.test"), 1),
        ];
        let mut node = Node::with(&rules);
        node.add_pod("p2", 6);
        let told: Vec<[u8; 4]> = (0..100).map(|n| [198, 18, 0, n]).collect();
        node.reports.clear();
        node.answer("p1", "many.test", &told, 600);
        assert_eq!((node.own(), node.of_rules().count()), (100, 256));
        for flows in priorities(&node).values() {
            assert_eq!(*flows, ports_of(&[256]));
        }
        node.answer("p1", "few.test", &[ADDRESS], 600);
        assert_eq!(priorities(&node)["203.0.113.1"], ports_of(&[0, 8]));
        // The pods of a namespace share the flows of its rules.
        node.answer("p2", "many.test", &[OTHER], 600);
        assert_eq!(priorities(&node)["203.0.113.2"], ports_of(&[256]));
        assert_eq!((node.own(), node.of_rules().count()), (102, 256 + 8));
        assert_eq!(node.limits_reported(), [] as [&str; 0]);
        // An edit of ports changes them once, however many addresses there are.
        let told: Vec<[u8; 4]> = (0..100).map(|n| [198, 19, 0, n]).collect();
        node.answer("p1", "edited.test", &told, 600);
        let of_addresses: Vec<FlowKey> = node.of_addresses().cloned().collect();
        let mut edited = rules.clone();
        edited[2] = many(allow("edited.test"), 8 + 1);
        changes(&mut node);
        node.set_firewall(&edited);
        node.set_ovn(&edited);
        assert_eq!(changes(&mut node), 8);
        assert_eq!(
            node.of_addresses().cloned().collect::<Vec<_>>(),
            of_addresses
        );
        assert_eq!(priorities(&node)["198.19.0.7"], ports_of(&[0, 0, 8 + 1]));
        node.engine.told.cache.check();
    }
}

/// The rules of each of these names, in turns of so many with 1,024 ports each.
fn rules_of(names: &[&str], each: usize, rule: fn(&str) -> Rule) -> Vec<Rule> {
    let names = names.iter();
    let rules = names.flat_map(|name| vec![many(rule(name), PORTS_PER_RULE_MAX); each]);
    rules.collect()
}

/// A node with more rules than the testing node has rows for.
pub(super) fn node_with_many(rules: &[Rule]) -> Node {
    let mut node = Node::bare();
    node.read_sources();
    edit_many(&mut node, rules);
    node.pass(Duration::ZERO);
    node.log.clear();
    node.reports.clear();
    node
}

fn edit_many(node: &mut Node, rules: &[Rule]) {
    node.set_firewall(rules);
    follow(node, rules);
}

/// A pod is told a name as soon as it may change so many flows.
pub(super) fn tell(node: &mut Node, name: &str, address: [u8; 4], ttl: u32) {
    node.pass(Duration::from_secs(60));
    node.answer("p1", name, &[address], ttl);
}

/// An address is told name after name. Each time it has another group, and the former ones are nobody's.
#[test]
fn groups_that_an_address_has_had_take_no_room_from_the_one_that_it_has() {
    const NAMES: usize = 60;
    let names: Vec<String> = (0..NAMES).map(|at| format!("n{at}.test")).collect();
    let rules: Vec<Rule> = names.iter().map(|name| many(allow(name), 16)).collect();
    let mut node = node_with_many(&rules);
    for name in &names {
        node.answer("p1", name, &[ADDRESS], 3600);
        // Its budget allows so much.
        node.pass(Duration::from_secs(2));
    }
    assert_eq!(node.engine.counters().addresses_over_budget, 0);
    assert_eq!(node.engine.counters().addresses_cut, 0);
    assert_eq!(priorities(&node)["203.0.113.1"], ports_of(&[16; NAMES]));
}

/// Each of two names has room for its flows, and an address with both has none.
#[test]
fn an_address_without_room_has_the_flows_of_its_first_rule() {
    let rules = rules_of(&["a.test", "b.test"], 12, allow);
    for order in [["a.test", "b.test"], ["b.test", "a.test"]] {
        let mut node = node_with_many(&rules);
        for name in order {
            tell(&mut node, name, ADDRESS, 3600);
        }
        tell(&mut node, "b.test", OTHER, 3600);
        let of_first = [vec![1024; 12], vec![0; 12]].concat();
        let of_second = [vec![0; 12], vec![1024; 12]].concat();
        let flows = priorities(&node);
        assert_eq!(flows["203.0.113.1"], ports_of(&of_first), "{order:?}");
        assert_eq!(flows["203.0.113.2"], ports_of(&of_second), "{order:?}");
        assert_eq!(node.engine.counters().addresses_cut, 1);
        let limit = format!("ns1: FlowsOfNamespace of ns1_p1, {GROUP_FLOWS_PER_SCOPE_MAX}");
        assert_eq!(node.limits_reported(), [limit]);
        node.engine.told.cache.check();
    }
}

/// The same where a rule of one name denies: it closes all ports, in whatever place it is.
#[test]
fn an_address_without_room_is_closed_if_a_rule_denies_it() {
    let of_name = |name, rule: fn(&str) -> Rule| rules_of(&[name], 12, rule);
    for rules in [
        [of_name("a.test", allow), of_name("b.test", deny)].concat(),
        [of_name("b.test", deny), of_name("a.test", allow)].concat(),
    ] {
        for order in [["a.test", "b.test"], ["b.test", "a.test"]] {
            let mut node = node_with_many(&rules);
            for name in order {
                tell(&mut node, name, ADDRESS, 3600);
            }
            // No rule of OVN's comes before it.
            let flows = priorities(&node);
            assert_eq!(flows["203.0.113.1"], [(CLOSED, 1)].into(), "{order:?}");
            let closed = node.of_rules().find(|key| key.priority == CLOSED);
            assert_eq!(closed.and_then(|key| key.matches.transport), None);
            assert_eq!(node.engine.counters().addresses_cut, 1);
            let limit = format!("ns1: FlowsOfNamespace of ns1_p1, {GROUP_FLOWS_PER_SCOPE_MAX}");
            assert_eq!(node.limits_reported(), [limit]);
        }
    }
}

const FOUR: [&str; 4] = ["a.test", "b.test", "c.test", "d.test"];

/// Rules of four names, so many for each, and behind them those of another name.
fn rules_of_five(each: usize, others: usize) -> Vec<Rule> {
    let of_four = rules_of(&FOUR, each, allow);
    [of_four, rules_of(&["e.test"], others, allow)].concat()
}

/// As many flows as the groups of a namespace may have: those with one pattern, and those with several.
const ALL_FLOWS_MAX: usize = GROUP_FLOWS_PER_SCOPE_MAX * 3 / 2;

/// Each of five names has an address of its own, and two pairs of them have one in common: the namespace has as many
/// flows as it may. The addresses of the second pair and of the last name end after `ttl`.
fn full_of_flows(ttl: u32) -> Node {
    let mut node = node_with_many(&rules_of_five(4, 16));
    for (at, name) in FOUR.iter().enumerate() {
        tell(&mut node, name, [198, 18, 0, at as u8], 3600);
    }
    for (at, ttl, pair) in [(0, 3600, &FOUR[..2]), (1, ttl, &FOUR[2..])] {
        for name in pair {
            tell(&mut node, name, [198, 19, 0, at], ttl);
        }
    }
    tell(&mut node, "e.test", [198, 18, 0, 4], ttl);
    assert_eq!(node.of_rules().count(), ALL_FLOWS_MAX);
    assert_eq!(node.engine.counters().addresses_cut, 0);
    node
}

#[test]
fn an_address_gets_its_flows_when_there_is_room_and_the_pod_is_told_again() {
    let mut node = full_of_flows(300);
    for name in ["a.test", "c.test"] {
        tell(&mut node, name, ADDRESS, 3600);
    }
    assert_eq!(priorities(&node)["203.0.113.1"], ports_of(&[1024; 4]));
    node.pass(Duration::from_secs(300) + IDLE_GRACE);
    assert!(!node.destinations().contains("198.19.0.1"));
    tell(&mut node, "c.test", ADDRESS, 3600);
    let of_both = ports_of(&[[1024; 4], [0; 4], [1024; 4]].concat());
    assert_eq!(priorities(&node)["203.0.113.1"], of_both);
}

/// Each rule has another place behind the edit, and so have its flows.
#[test]
fn an_edit_closes_nothing_because_the_namespace_has_as_many_flows_as_it_may() {
    let mut node = full_of_flows(3600);
    let before = priorities(&node);
    let edited = [&[allow("other.test")][..], &rules_of_five(4, 16)].concat();
    edit_many(&mut node, &edited);
    node.pass(Duration::from_secs(1));
    let moved = |flows: &BTreeMap<u16, usize>| -> BTreeMap<u16, usize> {
        let flows = flows.iter();
        flows
            .map(|(priority, ports)| (priority - 1, *ports))
            .collect()
    };
    let expected: BTreeMap<_, _> = before
        .iter()
        .map(|(to, flows)| (to.clone(), moved(flows)))
        .collect();
    assert_eq!(priorities(&node), expected);
    assert_eq!(node.engine.counters().addresses_cut, 0);
    node.engine.told.cache.check();
}

/// An edit adds rules to some names, and takes as many from another. All addresses with one name have room for the flows of
/// its rules; of the two with two names, one has none.
#[test]
fn an_edit_writes_no_more_flows_than_the_namespace_may_have() {
    let mut node = full_of_flows(3600);
    edit_many(&mut node, &rules_of_five(5, 12));
    node.pass(Duration::from_secs(1));
    let flows = node.of_rules().count();
    assert!(flows <= ALL_FLOWS_MAX, "{flows}");
    let priorities = priorities(&node);
    let of_names = |names: std::ops::Range<usize>| {
        let mut of_names = vec![0; 20];
        of_names[5 * names.start..5 * names.end].fill(1024);
        ports_of(&of_names)
    };
    for name in 0..4 {
        let to = format!("198.18.0.{name}");
        assert_eq!(priorities[&to], of_names(name..name + 1), "{to}");
    }
    // The rules of the first of two names are the first ones.
    assert_eq!(priorities["198.19.0.0"], of_names(0..1));
    assert_eq!(priorities["198.19.0.1"], of_names(2..4));
    assert_eq!(node.engine.counters().addresses_cut, 1);
    node.engine.told.cache.check();
}

/// A pod of ns2 comes, whose EgressFirewall has this rule. Returns its interface.
fn add_pod_of_ns2(node: &mut Node, rule: Rule) -> u32 {
    let flow = set_rule_of_ns2(node, rule);
    let row = RowId::new(0x109);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(row, Some(interface("ns2_payroll", 9, "uid-payroll")))],
    }));
    let binding = PortBinding {
        namespace: Some("ns2".into()),
        ..port_binding("ns2_payroll", 9)
    };
    let group = PortGroup {
        name: GROUP_OF_NS2.into(),
        ports: ["ns2_payroll".into()].into(),
    };
    node.give(Input::Sb(SbUpdate {
        logical_flows: vec![(logical_flow_row(18), Some(flow))],
        port_bindings: vec![(row, Some(binding))],
        port_groups: vec![(RowId::new(0xd << 100), Some(group))],
        ..SbUpdate::default()
    }));
    ifindex_of(row)
}

/// A namespace has as many flows as it may, and a pod of another namespace does not notice.
#[test]
fn a_namespace_full_of_flows_leaves_others_theirs() {
    let mut node = full_of_flows(3600);
    let ifindex = add_pod_of_ns2(&mut node, many(allow("bank.test"), 100));
    let bytes = node.to_pod(ifindex, answer_frame("bank.test", &[OTHER], 600));
    node.frame(ifindex, &bytes);
    assert_eq!(priorities(&node)["203.0.113.2"], ports_of(&[100]));
    assert_eq!(node.engine.counters().addresses_cut, 0);
}

/// The owner of a name that an earlier rule allows lets the name lead to the address of another one.
#[test]
fn a_name_server_of_an_allowed_name_does_not_close_the_address_of_another() {
    for ports in [100, 200] {
        let rules = [
            many(allow("other.test"), ports),
            many(allow("example.com"), 100),
            deny_all(),
        ];
        let mut node = Node::with(&rules);
        node.answer("p1", "example.com", &[ADDRESS], 600);
        node.answer("p1", "other.test", &[ADDRESS], 600);
        let flows = &priorities(&node)["203.0.113.1"];
        assert_eq!(flows.get(&10_999), Some(&100), "{ports} ports: {flows:?}");
    }
}

#[test]
fn an_address_with_several_names_has_the_flows_of_all_their_rules() {
    let mut rules = vec![many(allow("other.test"), 30); 10];
    rules.push(many(allow("example.com"), 100));
    let mut node = Node::with(&rules);
    for name in ["other.test", "n.example.com"] {
        node.answer("p1", name, &[ADDRESS], 600);
    }
    let expected = [vec![30; 10], vec![100]].concat();
    assert_eq!(priorities(&node)["203.0.113.1"], ports_of(&expected));
    // A rule that denies closes its own ports, and no others.
    let rules = [
        many(allow("other.test"), 200),
        many(deny("bad.test"), 100),
        allow("example.com"),
    ];
    let mut node = Node::with(&rules);
    for name in ["other.test", "bad.test", "example.com"] {
        node.answer("p1", name, &[ADDRESS], 600);
    }
    assert_eq!(priorities(&node)["203.0.113.1"], ports_of(&[200, 100, 1]));
    assert_eq!(node.own(), 1);
}

/// How many flows have been added or removed since the last call.
fn changes(node: &mut Node) -> usize {
    let batches = node.batches();
    batches.iter().map(|(_, changes)| changes.len()).sum()
}

/// The flow in which the tags of the logical switch end. It is there from the start on.
const ENDS: usize = 1;

#[test]
fn denied_names_of_a_pod_have_a_flow_for_each_address_and_one_for_each_port() {
    const ADDRESSES: u32 = 64;
    let ports = [1, 8, 255, 256, 1024];
    for first in ports {
        for second in ports {
            for of_first in [1, 3, 32] {
                let rules = [many(deny("a.test"), first), many(deny("b.test"), second)];
                let mut node = Node::with(&rules);
                node.engine.told.cache.limits_mut().addresses_per_port_max = 64;
                node.answer("p1", "a.test", &addresses(0, of_first), 60);
                let rest = ADDRESSES - of_first;
                node.answer("p1", "b.test", &addresses(of_first, rest), 60);
                // The pod is full.
                node.answer("p1", "b.test", &addresses(1000, ADDRESSES), 60);
                let all = ADDRESSES as usize + first + second;
                assert_eq!(node.switch.len(), all + ENDS);
                assert_eq!(changes(&mut node), all, "{of_first} with {first}, {second}");
            }
        }
    }
}

/// The message has 1,024 addresses at most.
#[test]
fn one_answer_for_a_denied_name_changes_so_many_flows() {
    for ports in [1, 254, 1024] {
        let mut node = Node::with(&[many(deny("bad.test"), ports)]);
        node.answer("p1", "bad.test", &addresses(0, 2000), 60);
        assert_eq!(changes(&mut node), ports + 1024);
        assert_eq!(node.engine.counters().addresses_refused, 2000 - 1024);
        for part in 1..8 {
            node.answer("p1", "bad.test", &addresses(2000 * part, 2000), 60);
        }
        assert_eq!(changes(&mut node), 3 * 1024, "until the pod is full");
    }
}

/// What makes room for them goes, with its flows.
#[test]
fn one_answer_for_a_denied_name_removes_no_more_flows_than_a_pod_has() {
    const ADDRESSES: u32 = 64;
    let rules = [
        many(deny("bad.test"), 256),
        many(allow("a.test"), 256),
        many(allow("b.test"), 8),
    ];
    let mut node = Node::with(&rules);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 64;
    node.answer("p1", "a.test", &addresses(0, 2), 600);
    node.answer("p1", "b.test", &addresses(2, ADDRESSES - 2), 600);
    assert_eq!(changes(&mut node), 64 + 256 + 8);
    node.pass(COUNTERS_DELAY_MAX * 2 + COMPARE_INTERVAL);
    changes(&mut node);
    node.answer("p1", "bad.test", &addresses(1000, ADDRESSES), 60);
    assert_eq!(node.destinations().len(), 64);
    assert_eq!(node.own(), 64);
    assert_eq!(changes(&mut node), 64 + (64 + 256));
}

/// How often all addresses of the pod were looked at to find the least important ones.
fn looks(node: &Node) -> usize {
    let port = node.engine.ports.named("ns1_p1").expect("it is there");
    node.engine.told.cache.looks(port)
}

/// The pod may have so many addresses with two names each. It has them, and nobody knows yet whether they are in use.
fn full_of_addresses_in_use(rules: &[Rule], most: u32) -> Node {
    let mut node = Node::with(rules);
    node.engine.told.cache.limits_mut().addresses_per_port_max = most as usize;
    for name in ["a.example.com", "b.example.com"] {
        node.answer("p1", name, &addresses(0, most), 3600);
    }
    assert_eq!(node.destinations().len(), most as usize);
    node
}

/// The elements of both in turns.
fn in_turns(one: &[[u8; 4]], other: &[[u8; 4]]) -> Vec<[u8; 4]> {
    let turns = 0..one.len().max(other.len());
    let turns = turns.flat_map(|at| [one.get(at), other.get(at)]);
    turns.flatten().copied().collect()
}

/// A known address asks for room for a name, and a new one for room for an address.
#[test]
fn a_pod_full_of_addresses_in_use_is_not_looked_at_for_each_address_of_an_answer() {
    let rules = [allow("example.com"), deny_all()];
    for (known, new) in [(64, 0), (0, 64), (32, 32)] {
        let mut node = full_of_addresses_in_use(&rules, 128);
        let before = looks(&node);
        let told = in_turns(&addresses(0, known), &addresses(1000, new));
        node.answer("p1", "c.example.com", &told, 3600);
        assert_eq!(node.engine.counters().addresses_refused, 64);
        let looks = looks(&node) - before;
        assert!(looks <= 2, "{known} known, {new} new: {looks}");
        node.engine.told.cache.check();
    }
}

/// For a denied name, an address in use gives way. For an allowed one, none does.
#[test]
fn a_pod_full_of_addresses_in_use_is_not_looked_at_for_each_answer() {
    let rules = [deny("bad.test"), allow("example.com"), deny_all()];
    let mut of_denied = None;
    for is_allowed_asked in [false, true] {
        let mut node = full_of_addresses_in_use(&rules, 128);
        let before = looks(&node);
        for at in 0..64 {
            node.answer("p1", "bad.test", &addresses(1000 + at, 1), 3600);
            if is_allowed_asked {
                node.answer("p1", "c.example.com", &addresses(2000 + at, 1), 3600);
            }
        }
        let denied = node.open().into_iter().filter(|(.., at)| *at == 11_000);
        assert_eq!(denied.count(), 64);
        let looks = looks(&node) - before;
        let of_denied = of_denied.get_or_insert(looks);
        assert!(looks <= 2 * *of_denied, "{looks}, {of_denied}");
        node.engine.told.cache.check();
    }
}

/// In a full node, a known address asks for room for a name as well.
#[test]
fn a_pod_in_a_full_node_is_not_looked_at_for_each_address_of_an_answer() {
    let rules = [allow("example.com"), deny_all()];
    for known in [0, 32] {
        let mut node = Node::with(&rules);
        let limits = node.engine.told.cache.limits_mut();
        (limits.addresses_per_port_max, limits.names_per_node_max) = (128, 128);
        node.answer("p1", "a.example.com", &addresses(0, 128), 3600);
        let before = looks(&node);
        let told = in_turns(&addresses(0, known), &addresses(1000, 32));
        node.answer("p1", "c.example.com", &told, 3600);
        let refused = u64::from(known) + 32;
        assert_eq!(node.engine.counters().addresses_refused, refused);
        let most = 1 + usize::from(known > 0);
        assert_eq!(looks(&node) - before, most, "{known} known");
        node.engine.told.cache.check();
    }
}
