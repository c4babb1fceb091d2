//! What one pod can have, and what makes room.

use super::*;
use crate::values::{
    firewall::PORTS_PER_RULE_MAX,
    limits::{FEW_FLOWS, FLOWS_PER_ADDRESS_MAX},
};

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

#[test]
fn rules_whose_flows_do_not_fit_open_nothing() {
    let rules = [
        many(allow("example.com"), FLOWS_PER_ADDRESS_MAX - 1),
        many(allow("example.com"), 2),
        many(allow("example.com"), 1024),
        many(allow("example.com"), 1),
        many(allow("example.com"), 1),
        deny_all(),
    ];
    let mut node = Node::with(&rules);
    node.reports.clear();
    node.answer("p1", "example.com", &[ADDRESS], 60);
    let fits = [(11_000, FLOWS_PER_ADDRESS_MAX - 1), (10_997, 1)].into();
    assert_eq!(priorities(&node)["203.0.113.1"], fits);
    assert_eq!(node.engine.counters().addresses_cut, 1);
    let limit = "ns1: FlowsOfAddress of ns1_p1, 256";
    assert_eq!(node.limits_reported(), [limit]);
    // An edit makes room.
    let fewer = [many(allow("example.com"), 2), deny_all()];
    node.set_firewall(&fewer);
    node.set_ovn(&fewer);
    assert_eq!(node.switch.len(), 2);
}

#[test]
fn a_rule_that_denies_and_whose_flows_do_not_fit_closes_all_ports() {
    let rules = [
        many(deny("bad.test"), 1024),
        allow("bad.test"),
        many(deny("bad.test"), 1),
    ];
    let mut node = Node::with(&rules);
    let told: Vec<[u8; 4]> = (0..100).map(|n| [198, 18, 0, n]).collect();
    node.answer("p1", "bad.test", &told, 60);
    assert_eq!(priorities(&node).len(), 100);
    for flows in priorities(&node).values() {
        assert_eq!(*flows, [(11_000, 1)].into());
    }
    assert!(node.of_rules().all(|key| key.matches.transport.is_none()));
    // A rule before it that fits goes on to count.
    let rules = [many(allow("bad.test"), 1), many(deny("bad.test"), 1024)];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    for flows in priorities(&node).values() {
        assert_eq!(*flows, [(11_000, 1), (10_999, 1)].into());
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
    assert_eq!(priorities(&node)["203.0.113.1"], [(11_000, 1)].into());
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

/// A pod fills the room for flows that all pods have together.
#[test]
fn further_addresses_of_the_pod_with_most_flows_have_one_where_the_node_has_many() {
    for (rule, closes) in [(deny("many.test"), 1), (allow("many.test"), 0)] {
        let rules = [many(rule, 100), many(allow("few.test"), 1)];
        let mut node = Node::with(&rules);
        node.add_pod("p2", 6);
        node.engine.told.cache.limits_mut().names_per_node_max = 1000;
        // The rest of the 2,000 flows is for other pods.
        let most = 1500;
        let told: Vec<[u8; 4]> = (0..100).map(|n| [198, 18, 0, n]).collect();
        node.reports.clear();
        node.answer("p1", "many.test", &told, 600);
        assert_eq!(node.switch.len(), most + (100 - most / 100) * closes);
        assert_eq!(node.limits_reported(), ["ns1: FlowsOfNode of ns1_p1, 2000"]);
        // One that needs no more has all of its flows.
        node.answer("p1", "few.test", &[ADDRESS], 600);
        assert_eq!(priorities(&node)["203.0.113.1"], [(10_999, 1)].into());
        // Another pod has its share.
        node.answer("p2", "many.test", &[OTHER], 600);
        assert_eq!(priorities(&node)["203.0.113.2"], [(11_000, 100)].into());
    }
}

/// Flows of a pod with many addresses, and many flows of each.
#[test]
fn further_addresses_of_a_pod_with_many_flows_have_few() {
    for (rule, closes) in [(deny("many.test"), 1), (allow("many.test"), 0)] {
        let rules = [
            many(rule, FLOWS_PER_ADDRESS_MAX),
            many(allow("few.test"), FEW_FLOWS),
            many(allow("edited.test"), 1),
        ];
        let mut node = Node::with(&rules);
        node.engine.told.cache.limits_mut().addresses_per_port_max = 512;
        let max = 512 * FEW_FLOWS;
        let all = max / FLOWS_PER_ADDRESS_MAX;
        let told: Vec<[u8; 4]> = (0..100).map(|n| [198, 18, 0, n]).collect();
        node.reports.clear();
        node.answer("p1", "many.test", &told, 600);
        assert_eq!(node.switch.len(), max + (100 - all) * closes);
        assert_eq!(node.limits_reported(), ["ns1: FlowsOfPod of ns1_p1, 4096"]);
        // One that needs no more has all of its flows.
        node.answer("p1", "few.test", &[ADDRESS], 600);
        assert_eq!(
            priorities(&node)["203.0.113.1"],
            [(10_999, FEW_FLOWS)].into()
        );
        // Another pod has room of its own.
        node.add_pod("p2", 6);
        node.answer("p2", "many.test", &[OTHER], 600);
        let flows = &priorities(&node)["203.0.113.2"];
        assert_eq!(*flows, [(11_000, FLOWS_PER_ADDRESS_MAX)].into());
        // An edit brings no more, and takes none away.
        let told: Vec<[u8; 4]> = (0..100).map(|n| [198, 19, 0, n]).collect();
        node.answer("p1", "edited.test", &told, 600);
        let before = node.switch.len();
        let mut edited = rules.clone();
        edited[2] = many(allow("edited.test"), FEW_FLOWS + 1);
        node.set_firewall(&edited);
        node.set_ovn(&edited);
        assert_eq!(node.switch.len(), before);
        node.engine.told.cache.check();
    }
}

#[test]
fn an_address_gets_its_flows_when_the_pod_has_fewer_and_is_told_again() {
    let rules = [
        many(allow("first.test"), FLOWS_PER_ADDRESS_MAX),
        many(allow("second.test"), FEW_FLOWS + 1),
        deny_all(),
    ];
    let mut node = Node::with(&rules);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 32;
    node.answer("p1", "first.test", &[ADDRESS], 60);
    node.answer("p1", "second.test", &[OTHER], 600);
    assert_eq!(node.switch.len(), FLOWS_PER_ADDRESS_MAX);
    node.pass(MIN_TTL + IDLE_GRACE + 2 * COMPARE_INTERVAL);
    assert_eq!(node.switch.len(), 0);
    node.answer("p1", "second.test", &[OTHER], 600);
    assert_eq!(node.switch.len(), FEW_FLOWS + 1);
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
fn each_name_of_rules_has_its_part_of_the_flows_of_an_address() {
    // Many rules of one name have no more than one rule of many ports, in their order.
    let mut rules = vec![many(allow("other.test"), 30); 10];
    rules.push(many(allow("example.com"), 100));
    let mut node = Node::with(&rules);
    for name in ["other.test", "n.example.com"] {
        node.answer("p1", name, &[ADDRESS], 600);
    }
    let mut expected: BTreeMap<u16, usize> = (10_996..=11_000).map(|rule| (rule, 30)).collect();
    expected.insert(10_990, 100);
    assert_eq!(priorities(&node)["203.0.113.1"], expected);
    // A rule that denies has a part, too: it closes its own ports, and no others.
    let rules = [
        many(allow("other.test"), 200),
        many(deny("bad.test"), 100),
        allow("example.com"),
    ];
    let mut node = Node::with(&rules);
    for name in ["other.test", "bad.test", "example.com"] {
        node.answer("p1", name, &[ADDRESS], 600);
    }
    // The name that needs little leaves the rest of its part to both.
    assert_eq!(
        priorities(&node)["203.0.113.1"],
        [(10_999, 100), (10_998, 1)].into()
    );
}

/// How many flows of rules have been added or removed since the last call.
fn changes(node: &mut Node) -> usize {
    let batches = node.batches();
    batches.iter().map(|(_, changes)| changes.len()).sum()
}

/// The most flows that so many addresses of a pod can have, whatever the rules, where it has room for `all`: the last
/// one with all of its flows may have 256, and the others have eight.
fn flows_max(addresses: usize, all: usize) -> usize {
    let many = all * FEW_FLOWS;
    let with_many = many / FLOWS_PER_ADDRESS_MAX + 1;
    many - 1 + FLOWS_PER_ADDRESS_MAX + (addresses - with_many) * FEW_FLOWS
}

fn flows_of_pod_max(addresses: usize) -> usize {
    flows_max(addresses, addresses)
}

#[test]
fn denied_names_of_a_pod_have_so_many_flows_whatever_the_ports_of_their_rules() {
    const ADDRESSES: u32 = 64;
    let most = flows_of_pod_max(ADDRESSES as usize);
    let ports = [1, FEW_FLOWS, FEW_FLOWS + 1, 255, 256];
    let mut reached = 0;
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
                let flows = changes(&mut node);
                assert_eq!(node.switch.len(), flows);
                assert!(flows <= most, "{of_first} with {first}, {second}: {flows}");
                reached = reached.max(flows);
            }
        }
    }
    assert!(reached > most * 98 / 100, "{reached} of {most}");
    let default = CacheLimits::default().addresses_per_port_max;
    assert_eq!(flows_of_pod_max(default), 64_759);
}

/// The message has 1,024 addresses at most.
#[test]
fn one_answer_for_a_denied_name_changes_so_many_flows() {
    let most = flows_max(1024, CacheLimits::default().addresses_per_port_max);
    assert_eq!(most, 40_183);
    // Each further address has one flow that closes all ports.
    for (ports, with_many) in [(254, 130), (FLOWS_PER_ADDRESS_MAX, 128)] {
        let mut node = Node::with(&[many(deny("bad.test"), ports)]);
        node.answer("p1", "bad.test", &addresses(0, 2000), 60);
        let flows = changes(&mut node);
        assert_eq!(flows, with_many * ports + (1024 - with_many));
        assert!(flows <= most, "{flows}");
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
        many(deny("bad.test"), FLOWS_PER_ADDRESS_MAX),
        many(allow("a.test"), FLOWS_PER_ADDRESS_MAX),
        many(allow("b.test"), FEW_FLOWS),
    ];
    let mut node = Node::with(&rules);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 64;
    node.answer("p1", "a.test", &addresses(0, 2), 600);
    node.answer("p1", "b.test", &addresses(2, ADDRESSES - 2), 600);
    let allowed = changes(&mut node);
    assert_eq!(allowed, 2 * FLOWS_PER_ADDRESS_MAX + 62 * FEW_FLOWS);
    node.pass(COUNTERS_DELAY_MAX * 2 + COMPARE_INTERVAL);
    changes(&mut node);
    node.answer("p1", "bad.test", &addresses(1000, ADDRESSES), 60);
    let denied = node.switch.len();
    assert_eq!(node.destinations().len(), 64);
    assert!(denied <= flows_of_pod_max(64));
    assert_eq!(changes(&mut node), allowed + denied);
}

/// Another pod fills the node. An edit then takes most flows of a pod that had them before, though all rules allow them.
#[test]
fn an_edit_closes_nothing_because_another_pod_has_filled_the_node() {
    for is_filled in [false, true] {
        let rules = [many(allow("many.test"), 50), deny_all()];
        let edited = [
            allow("other.test"),
            many(allow("many.test"), 50),
            deny_all(),
        ];
        let mut node = Node::with(&rules);
        node.add_pod("p2", 6);
        node.engine.told.cache.limits_mut().names_per_node_max = 1000;
        let told = addresses(0, 30);
        node.answer("p1", "many.test", &told, 600);
        assert!(
            told.iter()
                .all(|address| super::starts::is_open(&node, *address, 0))
        );
        if is_filled {
            node.answer("p2", "many.test", &addresses(1000, 100), 600);
        }
        super::starts::edit(&mut node, &edited);
        node.pass(Duration::from_secs(1));
        let open = told
            .iter()
            .filter(|address| super::starts::is_open_at_all(&node, **address));
        assert_eq!(open.count(), told.len(), "filled: {is_filled}");
    }
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
