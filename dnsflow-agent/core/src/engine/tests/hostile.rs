//! Pods and name servers that ask and answer for no other reason than to do harm.

use std::collections::VecDeque;

use proptest::{
    prelude::*,
    test_runner::{Config as ProptestConfig, TestRunner},
};

use super::{
    edits::use_all,
    limits::{CLOSED, many},
    restart::after_restart_with,
    starts::is_open,
    *,
};
use crate::pods::budget::Changes;
use crate::values::limits::{
    CACHED_NAMES_MAX, CHANGES_UNDER_WAY_MAX, FLOW_BURST_TIME, FLOW_CHANGES_PER_SECOND,
    FOREIGN_FLOWS_MAX, FRAGMENTED_MAX, HELD_MAX, NAMES_PER_ADDRESS_MAX, NODE_FLOW_BURST_TIME,
    NODE_FLOW_CHANGES_PER_SECOND, REFUSALS_REPORTED_MAX, TCP_CONNECTIONS_MAX,
};

/// The size of each collection that what pods are told can make grow.
fn sizes(node: &Node) -> Vec<usize> {
    let engine = &node.engine;
    engine.told.cache.check();
    let (ports, most) = engine.told.refused.remembered();
    vec![
        engine.told.cache.sizes().iter().sum(),
        engine.hold.len(),
        engine.told.budget.accounts(),
        engine.out.accounts(),
        ports,
        most,
    ]
}

#[test]
fn nothing_is_remembered_reported_or_asked_because_of_a_name_that_no_rule_mentions() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.kernel.no_room = true;
    node.reports.clear();
    let before = sizes(&node);
    let mut told = addresses(0, 1000);
    told.extend([[127, 0, 0, 1], [10, 96, 0, 1], [169, 254, 169, 254]]);
    for _ in 0..100 {
        node.answer("p1", "evil.test", &told, 3600);
    }
    assert_eq!(node.engine.counters().answers_unmatched, 100);
    assert_eq!(sizes(&node), before);
    assert_eq!(node.engine.told.cache.deadline(), None);
    assert_eq!(node.reports, []);
    assert_eq!(node.log, []);
}

#[test]
fn records_are_read_only_for_a_name_that_a_rule_mentions() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.kernel.no_room = true;
    let ifindex = ifindex_of(RowId::new(0x105));
    // Two records are said to come, and one does: only who reads them finds that out.
    let told = |name| {
        let mut bytes = answer_frame(name, &[[203, 0, 113, 1]], 300);
        bytes[42 + 7] = 2;
        bytes
    };
    node.frame(ifindex, &told("evil.test"));
    let counts = |node: &Node| {
        let counters = node.engine.counters();
        (counters.answers_unmentioned, counters.answers_malformed)
    };
    assert_eq!(counts(&node), (1, 0));
    node.frame(ifindex, &told("example.com"));
    assert_eq!(counts(&node), (1, 1));
}

#[test]
fn of_an_answer_that_is_too_long_the_first_addresses_count() {
    let mut node = Node::with(&[deny("bad.test"), allow("example.com")]);
    let refused = |node: &Node| node.engine.counters().addresses_refused;
    node.answer("p1", "example.com", &addresses(0, 300), 300);
    assert_eq!((node.destinations().len(), refused(&node)), (256, 44));
    // What is denied has another limit.
    node.answer("p1", "bad.test", &addresses(1000, 1030), 300);
    assert_eq!(
        (node.destinations().len(), refused(&node)),
        (256 + 1024, 50)
    );
}

#[test]
fn a_static_answer_asked_for_again_and_again_takes_the_same_room() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let told = addresses(0, 1000);
    let mut known = None;
    for _ in 0..50 {
        node.answer("p1", "example.com", &told, 60);
        let sizes = sizes(&node);
        assert_eq!(*known.get_or_insert(sizes.clone()), sizes);
        node.pass(Duration::from_secs(1));
    }
    assert_eq!(node.destinations().len(), 256, "the limit of a name");
    assert_eq!(node.limits_reported(), ["ns1: example.com of ns1_p1, 256"]);
    let refused = node.engine.counters().addresses_refused;
    assert_eq!(refused, 50 * (1000 - 256), "each of them is counted");
    node.pass(Duration::from_secs(300));
    assert!(node.engine.told.cache.is_idle(), "and all is forgotten");
}

#[test]
fn what_is_remembered_before_rules_are_read_goes_once_none_mentions_it() {
    let rules = [allow("example.com"), deny_all()];
    let row = RowId::new(0x105);
    let mut node = Node::bare();
    node.trust_server();
    node.give(Input::SwitchUp);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    node.pods.insert("ns1_p1".into(), row);
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.answer("p1", "evil.test", &[ADDRESS, OTHER], 600);
    assert_eq!(node.engine.told.cache.entries_mut().count(), 2);
    node.give(Input::Firewalls(FirewallUpdate {
        reset: true,
        firewalls: vec![],
    }));
    node.set_firewall(&rules);
    node.give(Input::Nb(NbUpdate {
        reset: true,
        ..NbUpdate::default()
    }));
    assert_eq!(
        node.engine.told.cache.entries_mut().count(),
        2,
        "whose pod it is, nobody knows"
    );
    node.give(Input::Sb(SbUpdate {
        reset: true,
        datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
        ..SbUpdate::default()
    }));
    node.add_logical_port("p1", 5, row);
    node.set_ovn(&rules);
    node.pass(Duration::ZERO);
    node.engine.told.cache.check();
    assert_eq!(node.engine.told.cache.entries_mut().count(), 1);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
}

#[test]
fn a_pod_changes_only_so_many_flows_and_its_neighbour_notices_nothing() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    node.reports.clear();
    node.log.clear();
    let begin = node.now;
    let mut next = 0;
    while node.now.since(begin) < Duration::from_secs(120) {
        // Two new addresses each millisecond, four to a name of their own.
        node.answer(
            "p1",
            &format!("n{next}.example.com"),
            &addresses(next, 4),
            1,
        );
        next += 4;
        node.pass(Duration::from_millis(2));
        if next % 4000 == 0 {
            let host = u8::try_from(next / 4000).expect("few");
            node.answer("p2", "www.example.com", &[[198, 51, 100, host]], 60);
            assert!(node.destinations().contains(&format!("198.51.100.{host}")));
        }
    }
    let (_, ports) = (node.engine.told.cache.check(), node.batches());
    let changes: usize = ports.iter().map(|(_, changes)| changes.len()).sum();
    let seconds = FLOW_BURST_TIME.as_secs() + node.now.since(begin).as_secs();
    let budget = usize::try_from(seconds).expect("few") * FLOW_CHANGES_PER_SECOND as usize;
    assert!(changes <= budget + 1000, "{changes} of {budget}");
    assert!(
        changes >= budget / 2,
        "{changes} of {budget}: the limit is not that of the budget"
    );
    assert!(node.engine.counters().addresses_over_budget > 100_000);
    let reported = node.limits_reported();
    let over = format!("ns1: FlowChanges of ns1_p1, {FLOW_CHANGES_PER_SECOND}");
    let times = reported.iter().filter(|report| **report == over).count();
    assert_eq!(times, 2, "once a minute: {reported:?}");
}

#[test]
fn an_answer_over_budget_goes_back_at_once_and_an_open_address_stays_open() {
    let mut node = Node::with(&[allow("example.com"), deny("bad.test"), deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    let port = node.engine.ports.named("ns1_p1").expect("it is there");
    let all = Changes {
        flows: usize::MAX,
        marks: 0,
    };
    node.engine.told.budget.spend(port, all, node.now);
    node.batches();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.answer("p1", "ftp.example.com", &[OTHER], 600);
    assert_eq!(node.batches(), []);
    assert_eq!(node.engine.counters().addresses_over_budget, 1);
    assert_eq!(
        node.engine.next_deadline().map(|(at, _)| at > node.now),
        Some(true)
    );
    // What a rule denies is closed in any case.
    node.answer("p1", "bad.test", &[[198, 51, 100, 1]], 600);
    assert!(node.destinations().contains("198.51.100.1"));
    // Later it opens.
    node.pass(FLOW_BURST_TIME * 2);
    node.answer("p1", "ftp.example.com", &[OTHER], 600);
    assert!(node.destinations().contains("203.0.113.2"));
}

#[test]
fn a_browser_that_opens_all_its_tabs_is_within_its_budget() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    for name in 0..400 {
        node.answer(
            "p1",
            &format!("n{name}.example.com"),
            &addresses(name * 8, 8),
            60,
        );
    }
    assert_eq!(node.destinations().len(), 3200);
    assert_eq!(node.engine.counters().addresses_over_budget, 0);
}

#[test]
fn what_a_rule_denies_is_not_worn_down_by_other_names() {
    let mut node = Node::with(&[deny("bad.test"), allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 12;
    node.answer("p1", "bad.test", &[ADDRESS], 1);
    for i in 0..100 {
        node.answer("p1", &format!("n{i}.example.com"), &addresses(i, 1), 3600);
        node.pass(COMPARE_INTERVAL);
    }
    let denied = |node: &Node, host: &str| {
        let open = node.open();
        open.iter()
            .any(|(_, to, priority)| to == host && *priority == 11_000)
    };
    assert!(denied(&node, "203.0.113.1"));
    assert_eq!(node.destinations().len(), 12);
    // Others make room for what is denied.
    for host in 2..=12 {
        node.answer("p1", "bad.test", &[[203, 0, 113, host]], 1);
    }
    assert!((1..=12).all(|host| denied(&node, &format!("203.0.113.{host}"))));
    node.reports.clear();
    node.answer("p1", "www.example.com", &[[198, 51, 100, 1]], 3600);
    assert!(!node.destinations().contains("198.51.100.1"));
    assert_eq!(
        node.limits_reported(),
        ["ns1: DeniedAddresses of ns1_p1, 12"]
    );
    node.engine.told.cache.check();
    // Its time ends all the same.
    node.pass(node.engine.told.cache.limits().deny_ttl + 2 * COMPARE_INTERVAL);
    assert_eq!(node.destinations(), BTreeSet::new());
    node.answer("p1", "www.example.com", &[[198, 51, 100, 1]], 3600);
    assert!(node.destinations().contains("198.51.100.1"));
}

#[test]
fn at_a_pod_full_of_denied_addresses_an_answer_does_not_look_at_all_of_them_for_each_of_its_own() {
    let rules = [deny("bad.test"), allow("example.com"), deny_all()];
    let mut node = Node::with(&rules);
    let most = 512;
    node.engine.told.cache.limits_mut().addresses_per_port_max = most;
    let port = node.engine.ports.named("ns1_p1").expect("it is there");
    let most = u32::try_from(most).expect("few");
    node.answer("p1", "bad.test", &addresses(0, most), 600);
    assert_eq!(node.destinations().len(), 512);
    let looks = |node: &Node| node.engine.told.cache.looks(port);
    let before = looks(&node);
    for answer in 1..5 {
        node.answer("p1", "bad.test", &addresses(answer * most, most), 600);
        node.answer(
            "p1",
            &format!("n{answer}.example.com"),
            &addresses(answer * most, 8),
            600,
        );
        node.engine.told.cache.check();
    }
    assert_eq!(looks(&node) - before, 1);
    // An address that no rule denies any more gives way again.
    let released = [allow("bad.test"), deny("worse.test"), deny_all()];
    node.set_firewall(&released);
    node.set_ovn(&released);
    node.pass(Duration::ZERO);
    node.answer("p1", "worse.test", &addresses(0x10_0000, 1), 600);
    assert!(node.destinations().contains("11.16.0.0"));
    node.engine.told.cache.check();
}

#[test]
fn what_is_denied_to_some_pods_leaves_the_others_the_budget_of_the_node() {
    let rules = [deny("bad.test"), many(allow("example.com"), 2)];
    let mut node = Node::with(&rules);
    node.add_pod("p3", 7);
    // More than half of what the pod may change at once.
    let port = node.engine.ports.named("ns1_p3").expect("it is there");
    let changes = Changes {
        flows: 4608,
        marks: 0,
    };
    node.engine.told.budget.spend(port, changes, node.now);
    for pod in 0..17 {
        // The testing node reads the interface's index out of its hexadecimal digits.
        let (pod, host) = (format!("d{pod}"), 0x10 * (1 + pod / 10) + pod % 10);
        node.add_pod(&pod, host);
        for part in 0..4 {
            node.answer(&pod, "bad.test", &addresses(1024 * part, 1024), 60);
        }
    }
    let of_node = NODE_FLOW_CHANGES_PER_SECOND as usize * NODE_FLOW_BURST_TIME.as_secs() as usize;
    assert!(node.switch.len() > of_node, "{}", node.switch.len());
    node.answer("p3", "www.example.com", &[OTHER], 60);
    assert!(node.destinations().contains("203.0.113.2"));
}

#[test]
fn all_addresses_of_a_denied_name_are_denied() {
    let mut node = Node::with(&[deny("bad.test")]);
    node.answer("p1", "bad.test", &addresses(0, 400), 60);
    node.answer("p1", "bad.test", &addresses(400, 400), 60);
    assert_eq!(node.destinations().len(), 800);
}

/// The EgressFirewall denies the name already, and OVN follows a moment later.
#[test]
fn all_addresses_of_a_name_are_denied_once_ovn_follows() {
    let rules = [deny("bad.test")];
    let edits: [&[Rule]; 3] = [&[], &[allow("example.com")], &[allow("bad.test")]];
    for before in edits {
        let mut node = Node::with(before);
        node.set_firewall(&rules);
        node.answer("p1", "bad.test", &addresses(0, 400), 60);
        node.set_ovn(&rules);
        assert_eq!(node.destinations().len(), 400, "{before:?}");
    }
}

/// OVN enforces the rule before the agent has read the edit, and the pod asks in between.
#[test]
fn all_addresses_of_a_name_are_denied_that_ovn_denies_first() {
    for (subdomains, name) in [
        (true, "bad.test"),
        (true, "x.bad.test"),
        (false, "bad.test"),
    ] {
        let mut node = Node::bare();
        node.engine = Engine::new(Config {
            subdomains,
            ..Config::default()
        });
        let mut node = node.start(&[allow("bad.test")]);
        let after = [deny("bad.test")];
        node.set_ovn(&after);
        node.answer("p1", name, &addresses(0, 400), 600);
        node.set_firewall(&after);
        node.pass(Duration::from_secs(1));
        let denied = node.destinations().len();
        assert_eq!(denied, 400, "{name} sub-domains: {subdomains}");
    }
}

/// The pod has used up its budget, and asks between the edit and OVN.
#[test]
fn a_name_that_is_to_be_denied_is_remembered_over_budget() {
    let before = [allow("test"), deny_all()];
    let after = [deny("bad.test"), allow("test"), deny_all()];
    for is_over in [false, true] {
        let mut node = Node::with(&before);
        // The address is open by another name.
        node.answer("p1", "good.test", &[ADDRESS], 600);
        node.set_firewall(&after);
        let port = node.engine.ports.named("ns1_p1").expect("it is there");
        if is_over {
            let all = Changes {
                flows: usize::MAX,
                marks: 0,
            };
            node.engine.told.budget.spend(port, all, node.now);
        }
        node.answer("p1", "bad.test", &[ADDRESS], 600);
        node.set_ovn(&after);
        node.pass(Duration::from_secs(1));
        assert!(
            places(&node, ADDRESS).contains(&0),
            "over budget: {is_over}"
        );
    }
}

/// The edit is taken back before OVN has followed.
#[test]
fn a_name_that_was_to_be_denied_opens_within_the_budget() {
    let rules = [allow("example.com"), allow("good.test"), deny_all()];
    let edited = [deny("example.com"), allow("good.test"), deny_all()];
    for way in edits::WAYS {
        let mut node = Node::bare();
        node.engine = Engine::new(edits::config(way));
        let mut node = node.start(&rules);
        // The address is open by another name.
        node.answer("p1", "good.test", &[OTHER], 60);
        node.set_firewall(&edited);
        let port = node.engine.ports.named("ns1_p1").expect("it is there");
        let changes = Changes {
            flows: 10_000,
            marks: 0,
        };
        node.engine.told.budget.spend(port, changes, node.now);
        let told = [ADDRESS, OTHER];
        node.answer("p1", "www.example.com", &told, 600);
        node.set_firewall(&rules);
        let over_budget = node.engine.counters().addresses_over_budget;
        node.answer("p1", "www.example.com", &told, 600);
        let open = |node: &Node| told.map(|address| places(node, address));
        assert_eq!(open(&node), [[].into(), [1].into()], "{way:?}");
        let counted = node.engine.counters().addresses_over_budget;
        assert_eq!(counted, over_budget + 2, "{way:?}");
        // The other name counts for as long as its answers say.
        node.answer("p1", "good.test", &[OTHER], 3600);
        node.pass(Duration::from_secs(70));
        assert_eq!(open(&node), [[].into(), [1].into()], "{way:?}");
        node.answer("p1", "www.example.com", &told, 600);
        assert_eq!(open(&node), [[0].into(), [0, 1].into()], "{way:?}");
    }
}

/// The pod has filled the address with names that a rule allows.
#[test]
fn a_name_that_is_to_be_denied_finds_room_at_its_address() {
    let before = [allow("example.com"), deny_all()];
    let after = [deny("bad.test"), allow("example.com"), deny_all()];
    for names in [1, NAMES_PER_ADDRESS_MAX] {
        let mut node = Node::with(&before);
        for i in 0..names {
            node.answer("p1", &format!("n{i}.example.com"), &[ADDRESS], 3600);
        }
        node.set_firewall(&after);
        node.answer("p1", "bad.test", &[ADDRESS], 600);
        node.set_ovn(&after);
        node.pass(Duration::from_secs(1));
        assert!(places(&node, ADDRESS).contains(&0), "{names} names");
    }
}

/// All addresses of the pod are in use.
#[test]
fn a_name_that_is_to_be_denied_finds_room_at_a_full_pod() {
    let before = [allow("example.com")];
    let after = [deny("bad.test"), allow("example.com")];
    for used in [false, true] {
        let mut node = Node::with(&before);
        node.engine.told.cache.limits_mut().addresses_per_port_max = 2;
        node.answer(
            "p1",
            "example.com",
            &[[198, 51, 100, 1], [198, 51, 100, 2]],
            3600,
        );
        node.pass(COUNTERS_DELAY_MAX * 2);
        node.pass(IDLE_GRACE * 3);
        if used {
            use_all(&mut node);
            node.pass(COMPARE_INTERVAL);
        }
        node.set_firewall(&after);
        node.answer("p1", "bad.test", &[ADDRESS], 600);
        node.set_ovn(&after);
        node.pass(Duration::from_secs(1));
        assert!(places(&node, ADDRESS).contains(&0), "in use: {used}");
    }
}

#[test]
fn names_of_one_address_do_not_crowd_out_one_that_is_denied() {
    let mut node = Node::with(&[deny("bad.test"), allow("example.com"), deny_all()]);
    for i in 0..2 * NAMES_PER_ADDRESS_MAX {
        node.answer("p1", &format!("n{i}.example.com"), &[ADDRESS], 3600);
    }
    assert_eq!(
        node.engine.counters().names_dropped,
        NAMES_PER_ADDRESS_MAX as u64
    );
    node.answer("p1", "bad.test", &[ADDRESS], 60);
    let open = node.open();
    let priorities: BTreeSet<u16> = open.iter().map(|(.., priority)| *priority).collect();
    assert_eq!(priorities, [10_999, 11_000].into());
    node.engine.told.cache.check();
}

/// An address is told to p1 with as many denied names as it has room for; the first rule denies them.
fn full_of_denied_names(rules: &[Rule]) -> Node {
    let mut node = Node::with(rules);
    for i in 0..NAMES_PER_ADDRESS_MAX {
        node.answer("p1", &format!("n{i}.bad.test"), &[ADDRESS], 60);
    }
    node
}

fn names_of(node: &Node, address: [u8; 4]) -> usize {
    let port = node.engine.ports.named("ns1_p1").expect("it is there");
    let entry = node.engine.told.cache.entry(port, address.into());
    entry.map_or(0, |entry| entry.names.len())
}

/// Whether an address is closed because the flows of its rules have no room.
pub(super) fn is_closed(node: &Node, address: [u8; 4]) -> bool {
    let address = IpAddr::from(address).to_string();
    let mut open = node.open().into_iter();
    open.any(|(_, dst, priority)| dst == address && priority == CLOSED)
}

/// The places of the rules that have flows to an address.
pub(super) fn places(node: &Node, address: [u8; 4]) -> BTreeSet<u16> {
    let address = IpAddr::from(address).to_string();
    let of_address = node
        .open()
        .into_iter()
        .filter(|(_, dst, priority)| *dst == address && *priority != CLOSED);
    of_address.map(|(.., priority)| 11_000 - priority).collect()
}

#[test]
fn denied_names_of_an_address_leave_room_for_one_of_each_other_rule_also_over_a_restart() {
    let others = ["worse.test", "other.test", "x.bad.test"];
    let mut rules = vec![deny("bad.test")];
    rules.extend(others.map(deny));
    // OVN does not enforce these.
    let crowd = |name| format!("n{name}.test");
    rules.extend((1..NAMES_PER_ADDRESS_MAX).map(|name| deny(&crowd(name))));
    for is_crowd_alike in [true, false] {
        let mut node = Node::with(&rules[..4]);
        node.set_firewall(&rules);
        node.answer("p1", "bad.test", &[ADDRESS], 60);
        for name in 1..NAMES_PER_ADDRESS_MAX {
            let name = match is_crowd_alike {
                true => format!("n{name}.bad.test"),
                false => crowd(name),
            };
            node.answer("p1", &name, &[ADDRESS], 60);
        }
        let all = BTreeSet::from([0, 1, 2, 3]);
        for name in others {
            node.answer("p1", name, &[ADDRESS], 60);
        }
        assert_eq!(places(&node, ADDRESS), all);
        let more = if is_crowd_alike { 0 } else { others.len() };
        assert_eq!(names_of(&node, ADDRESS), NAMES_PER_ADDRESS_MAX + more);
        let saved = node.folded(&[]);
        node.switch.clear();
        node.sentinels.clear();
        let after = after_restart_with(&mut node, &saved, &rules[..4], Config::default());
        assert_eq!(places(&after, ADDRESS), all);
        assert_eq!(names_of(&after, ADDRESS), NAMES_PER_ADDRESS_MAX + more);
    }
}

#[test]
fn further_denied_names_of_the_same_rules_take_no_room_and_are_not_planned() {
    let rules = [deny("bad.test"), deny("worse.test"), allow("example.com")];
    let mut node = full_of_denied_names(&rules);
    node.answer("p1", "worse.test", &[ADDRESS], 60);
    let planned = |node: &mut Node| node.engine.told.plans.planner().take_planned();
    planned(&mut node);
    node.batches();
    let dropped = node.engine.counters().names_dropped;
    for i in 0..100 {
        node.answer("p1", &format!("m{i}.bad.test"), &[ADDRESS], 60);
        node.answer("p1", "worse.test", &[ADDRESS], 60);
    }
    assert_eq!(planned(&mut node), 0);
    assert_eq!(node.batches(), []);
    assert_eq!(names_of(&node, ADDRESS), NAMES_PER_ADDRESS_MAX);
    assert_eq!(node.engine.counters().names_dropped, dropped + 100);
    node.engine.told.cache.check();
}

#[test]
fn an_address_is_denied_for_as_long_as_a_name_that_had_no_room_would_last() {
    let mut node = full_of_denied_names(&[deny("bad.test")]);
    let deny_ttl = node.engine.told.cache.limits().deny_ttl;
    node.pass(deny_ttl / 2);
    node.answer("p1", "last.bad.test", &[ADDRESS], 60);
    node.pass(deny_ttl * 3 / 4);
    assert_eq!(
        (names_of(&node, ADDRESS), places(&node, ADDRESS)),
        (1, [0].into())
    );
    node.pass(deny_ttl / 2);
    assert_eq!(places(&node, ADDRESS), BTreeSet::new());
}

#[test]
fn a_denied_name_pushes_out_no_allowed_one_where_another_stands_for_it() {
    let mut node = Node::with(&[deny("bad.test"), allow("example.com")]);
    node.answer("p1", "a.bad.test", &[ADDRESS], 60);
    for i in 1..NAMES_PER_ADDRESS_MAX {
        node.answer("p1", &format!("n{i}.example.com"), &[ADDRESS], 60);
    }
    for i in 0..2 * NAMES_PER_ADDRESS_MAX {
        node.answer("p1", &format!("m{i}.bad.test"), &[ADDRESS], 60);
    }
    assert_eq!(places(&node, ADDRESS), [0, 1].into());
}

/// Names below one name are free for its owner, which lets as many as are kept lead to the address of another name.
#[test]
fn names_below_one_name_do_not_close_the_address_of_an_allowed_one() {
    for evil in [allow("evil.test"), deny("evil.test")] {
        let rules = [many(evil, 1), many(allow("good.test"), 2), deny_all()];
        for way in edits::WAYS {
            let mut node = Node::bare();
            node.engine = Engine::new(edits::config(way));
            let mut node = node.start(&rules);
            let tell = |node: &mut Node, names: std::ops::Range<usize>| {
                for name in names {
                    node.answer("p1", &format!("n{name}.evil.test"), &[ADDRESS], 3600);
                }
            };
            tell(&mut node, 0..NAMES_PER_ADDRESS_MAX);
            node.answer("p1", "www.good.test", &[ADDRESS], 600);
            assert_eq!(places(&node, ADDRESS), [0, 1].into());
            // Further ones change nothing.
            node.pass(COMPARE_INTERVAL);
            node.batches();
            tell(&mut node, NAMES_PER_ADDRESS_MAX..3 * NAMES_PER_ADDRESS_MAX);
            assert_eq!(node.batches(), []);
            assert_eq!(places(&node, ADDRESS), [0, 1].into());
            assert_eq!(names_of(&node, ADDRESS), NAMES_PER_ADDRESS_MAX);
            let dropped = node.engine.counters().names_dropped;
            assert_eq!(dropped, 2 * NAMES_PER_ADDRESS_MAX as u64 + 1);
            node.engine.told.cache.check();
        }
    }
}

#[test]
fn a_denied_name_takes_the_place_of_one_for_which_another_stands() {
    let mut node = Node::with(&[
        deny("bad.test"),
        allow("example.com"),
        allow("other.test"),
        deny_all(),
    ]);
    node.answer("p1", "other.test", &[ADDRESS], 60);
    for i in 1..NAMES_PER_ADDRESS_MAX {
        node.answer("p1", &format!("n{i}.example.com"), &[ADDRESS], 3600);
    }
    node.answer("p1", "bad.test", &[ADDRESS], 60);
    assert_eq!(places(&node, ADDRESS), [0, 1, 2].into());
    node.engine.told.cache.check();
}

/// One name of an address stands for others that the same rules match.
#[test]
fn an_address_is_open_for_as_long_as_a_name_that_had_no_room_would_last() {
    let rules = [allow("example.com"), allow("other.test"), deny_all()];
    for way in edits::WAYS {
        let mut node = Node::bare();
        node.engine = Engine::new(edits::config(way));
        let mut node = node.start(&rules);
        // The first one is given up for another name's sake.
        for name in 0..NAMES_PER_ADDRESS_MAX {
            let ttl = if name == 5 { 900 } else { 300 };
            node.answer("p1", &format!("n{name}.example.com"), &[ADDRESS], ttl);
        }
        node.answer("p1", "other.test", &[ADDRESS], 300);
        // No room is left for these.
        node.answer("p1", "last.example.com", &[ADDRESS], 1800);
        node.answer("p1", "last.other.test", &[ADDRESS], 1200);
        assert_eq!(names_of(&node, ADDRESS), NAMES_PER_ADDRESS_MAX);
        node.pass(Duration::from_secs(1190));
        assert_eq!(places(&node, ADDRESS), [0, 1].into(), "{way:?}");
        node.pass(Duration::from_secs(600));
        assert!(places(&node, ADDRESS).contains(&0), "{way:?}");
        node.pass(Duration::from_secs(200));
        assert_eq!(places(&node, ADDRESS), BTreeSet::new(), "{way:?}");
    }
}

/// OVN does not enforce the rule that denies it yet.
#[test]
fn a_name_that_is_to_be_denied_is_given_up_for_no_allowed_one() {
    let before = [allow("example.com"), allow("other.test"), deny_all()];
    let mut after = vec![deny("n0.example.com")];
    after.extend(before.clone());
    let mut node = Node::with(&before);
    for name in 0..NAMES_PER_ADDRESS_MAX {
        let ttl = if name == 0 { 600 } else { 3600 };
        node.answer("p1", &format!("n{name}.example.com"), &[ADDRESS], ttl);
    }
    node.set_firewall(&after);
    node.answer("p1", "other.test", &[ADDRESS], 600);
    assert_eq!(places(&node, ADDRESS), [0, 1].into());
    node.set_ovn(&after);
    node.pass(Duration::from_secs(1));
    assert_eq!(places(&node, ADDRESS), [0, 1, 2].into());
}

/// The pod is told names below one name for an address: one of them, or as many as are kept.
fn crowd(node: &mut Node, names: usize) {
    for name in 0..names {
        node.answer("p1", &format!("n{name}.evil.test"), &[ADDRESS], 3600);
    }
}

/// Each way to enforce a rule, with one name that is free for its owner, and with as many as an address keeps.
fn ways_and_names() -> Vec<(Option<u32>, usize)> {
    let ways = edits::WAYS.map(|way| [(way, 1), (way, NAMES_PER_ADDRESS_MAX)]);
    ways.concat()
}

fn started_in(way: Option<u32>, rules: &[Rule]) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(edits::config(way));
    node.start(rules)
}

/// An edit has taken the rule of the names away.
#[test]
fn names_of_a_rule_that_is_gone_do_not_close_the_address_of_an_allowed_one() {
    for (way, names) in ways_and_names() {
        let mut node = started_in(way, &[allow("evil.test"), allow("good.test"), deny_all()]);
        crowd(&mut node, names);
        let edited = [allow("good.test"), deny_all()];
        node.set_firewall(&edited);
        node.set_ovn(&edited);
        node.pass(Duration::from_secs(60));
        node.answer("p1", "www.good.test", &[ADDRESS], 600);
        assert_eq!(places(&node, ADDRESS), [0].into(), "{way:?}, {names} names");
        node.engine.told.cache.check();
    }
}

/// OVN does not enforce the rule of the names yet, or never.
#[test]
fn names_of_a_rule_that_is_not_in_force_do_not_close_the_address_of_an_allowed_one() {
    for (way, names) in ways_and_names() {
        let mut node = started_in(way, &[allow("good.test"), deny_all()]);
        node.set_firewall(&[allow("good.test"), allow("evil.test"), deny_all()]);
        crowd(&mut node, names);
        node.answer("p1", "www.good.test", &[ADDRESS], 600);
        assert_eq!(places(&node, ADDRESS), [0].into(), "{way:?}, {names} names");
        node.engine.told.cache.check();
    }
}

/// An edit denies two names, and OVN does not enforce it yet. One of them comes first, or the other.
#[test]
fn names_that_are_to_be_denied_leave_room_for_one_of_each_other_rule() {
    let of_one_port = Rule {
        ports: tcp(1),
        ..deny("evil.test")
    };
    let before = [deny_all()];
    let after = [of_one_port, deny("bad.test"), deny_all()];
    for (way, names) in ways_and_names() {
        for is_first in [false, true] {
            let mut node = started_in(way, &before);
            node.set_firewall(&after);
            if !is_first {
                crowd(&mut node, names);
            }
            node.answer("p1", "bad.test", &[ADDRESS], 60);
            if is_first {
                crowd(&mut node, names);
            }
            node.set_ovn(&after);
            node.pass(Duration::from_secs(1));
            let both = [0, 1].into();
            assert_eq!(
                places(&node, ADDRESS),
                both,
                "{way:?}, {names} names, {is_first}"
            );
            node.engine.told.cache.check();
        }
    }
}

/// All names of the address are to be denied, each by a rule of its own.
#[test]
fn a_name_that_is_to_be_denied_pushes_out_no_other_one_and_gives_way_to_none() {
    let before = [allow("good.test"), deny_all()];
    let crowd: Vec<String> = (0..NAMES_PER_ADDRESS_MAX)
        .map(|name| format!("n{name}.test"))
        .collect();
    let mut after = vec![allow("good.test"), deny("bad.test")];
    after.extend(crowd.iter().map(|name| deny(name)));
    for way in edits::WAYS {
        let mut node = started_in(way, &before);
        node.set_firewall(&after);
        for name in &crowd {
            node.answer("p1", name, &[ADDRESS], 60);
        }
        let dropped = node.engine.counters().names_dropped;
        node.answer("p1", "good.test", &[ADDRESS], 600);
        assert_eq!(node.engine.counters().names_dropped, dropped + 1);
        assert_eq!(names_of(&node, ADDRESS), NAMES_PER_ADDRESS_MAX);
        node.answer("p1", "bad.test", &[ADDRESS], 60);
        assert_eq!(names_of(&node, ADDRESS), NAMES_PER_ADDRESS_MAX + 1);
        // OVN has rows for 20 rules here.
        node.set_ovn(&after);
        node.pass(Duration::from_secs(1));
        assert_eq!(places(&node, ADDRESS), (1..20).collect(), "{way:?}");
    }
}

/// Each name has rules of its own, so that none gives way to a further one.
#[test]
fn names_of_a_full_address_are_looked_at_once_for_further_ones() {
    let crowd: Vec<String> = (0..=NAMES_PER_ADDRESS_MAX)
        .map(|name| format!("n{name}.test"))
        .collect();
    let mut rules: Vec<Rule> = crowd.iter().map(|name| allow(name)).collect();
    rules.push(deny_all());
    let mut node = Node::with(&rules);
    let told = addresses(0, 127);
    for name in &crowd[..NAMES_PER_ADDRESS_MAX] {
        node.answer("p1", name, &told, 3600);
        node.pass(Duration::from_secs(20));
    }
    let full = NAMES_PER_ADDRESS_MAX * told.len();
    let looked_at = |node: &Node| node.engine.told.cache.names_looked_at();
    assert_eq!(looked_at(&node), 0);
    let last = &crowd[NAMES_PER_ADDRESS_MAX];
    for further in 0..100 {
        for name in [last.clone(), format!("x{further}.{last}")] {
            node.answer("p1", &name, &told, 600);
        }
        assert_eq!(looked_at(&node), full, "{further}");
        // A pod of another namespace comes, which says nothing of these names.
        let name = format!("ns2_p{further}");
        let binding = PortBinding {
            namespace: Some("ns2".into()),
            ..port_binding(&name, 22)
        };
        node.give(Input::Sb(SbUpdate {
            port_bindings: vec![(RowId::new(0x1000 + further), Some(binding))],
            ..SbUpdate::default()
        }));
    }
    // The rule comes into force: once more, and to find the name that gives way.
    let edited = [vec![allow(last)], rules].concat();
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    node.answer("p1", last, &told, 600);
    assert_eq!(looked_at(&node), 3 * full);
    assert_eq!(names_of(&node, told[0]), NAMES_PER_ADDRESS_MAX);
    assert_eq!(places(&node, told[0]), (0..20).collect());
    node.answer("p1", &format!("x.{last}"), &told, 600);
    assert_eq!(looked_at(&node), 4 * full, "only to find the next one");
    node.engine.told.cache.check();
}

#[test]
fn a_pod_has_room_for_so_many_names_and_the_node_for_those_of_many() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 100;
    node.set_firewall(&[allow("example.com"), deny_all(), allow("other.test")]);
    for i in 0..2000 {
        // OVN does not enforce the rule for these yet: they cost no flow.
        let address = [192, 0, 2, u8::try_from(i % 50).expect("few")];
        node.answer("p1", &format!("n{i}.other.test"), &[address], 3600);
    }
    node.engine.told.cache.check();
    let names = node.engine.told.cache.name_count();
    let most = node.engine.told.cache.limits().names_per_port_max();
    assert!((most / 2..=most).contains(&names), "{names} of {most}");
    assert!(names < CACHED_NAMES_MAX);
}

/// What a hostile pod, or a hostile name server, does.
#[derive(Clone, Debug)]
enum Harm {
    /// An answer with a name below one of [`SUFFIXES`] and many addresses, perhaps held.
    Answer {
        pod: usize,
        labels: Vec<u8>,
        suffix: usize,
        from: u32,
        count: u32,
        ttl: u32,
        held: bool,
    },
    /// The same answer many times.
    Flood(u32),
    /// A frame that nobody has asked for, of whatever kind, on whatever interface.
    Frame {
        ifindex: u32,
        bytes: Vec<u8>,
        held: bool,
    },
    /// A TCP segment or an IP fragment of a stream of its own.
    Part { stream: u16, is_tcp: bool },
    /// Time passes, in milliseconds.
    Pass(u64),
    /// The EgressFirewall says something else.
    Edit(bool),
    /// The pod is another one under the same name.
    Recreate(usize),
}

const SUFFIXES: [&str; 5] = [
    "example.com",
    "bad.test",
    "evil.test",
    "a.b.example.com",
    "test",
];
const HOSTILE: [(&str, u8); 2] = [("p1", 5), ("p2", 6)];

fn harm() -> impl Strategy<Value = Harm> {
    let labels = prop_oneof![
        proptest::collection::vec(1..=63_u8, 0..4),
        proptest::collection::vec(Just(1_u8), 0..115),
    ];
    let count = prop_oneof![1..6_u32, 200..3000_u32];
    let answer = (
        0..2_usize,
        labels,
        0..5_usize,
        0..1_u32 << 14,
        count,
        any::<bool>(),
    );
    prop_oneof![
        8 => (answer, prop_oneof![Just(0), Just(1), Just(u32::MAX)]).prop_map(
            |((pod, labels, suffix, from, count, held), ttl)| {
                Harm::Answer { pod, labels, suffix, from, count, ttl, held }
            }
        ),
        2 => (1..40_u32).prop_map(Harm::Flood),
        2 => (0..300_u32, proptest::collection::vec(any::<u8>(), 0..120), any::<bool>())
            .prop_map(|(ifindex, bytes, held)| Harm::Frame { ifindex, bytes, held }),
        2 => (any::<u16>(), any::<bool>()).prop_map(|(stream, is_tcp)| Harm::Part { stream, is_tcp }),
        3 => prop_oneof![0..20_u64, 1000..5000_u64, 3_000_000..5_000_000_u64].prop_map(Harm::Pass),
        1 => any::<bool>().prop_map(Harm::Edit),
        1 => (0..2_usize).prop_map(Harm::Recreate),
    ]
}

/// An answer whose name has labels of these lengths before the suffix; as many as fit.
fn hostile_frame(labels: &[u8], suffix: &str, addresses: &[[u8; 4]], ttl: u32) -> Vec<u8> {
    let mut name = suffix.to_owned();
    for (number, length) in labels.iter().enumerate() {
        let label = format!("{number:x}").repeat(63);
        let longer = format!("{}.{name}", &label[..usize::from(*length)]);
        if longer.len() <= 253 {
            name = longer;
        }
    }
    // What a datagram has room for, if no name is compressed.
    let room = 65_000 / (name.len() + 16);
    let addresses = &addresses[..addresses.len().min(room)];
    answer_frame(&name, addresses, ttl)
}

/// The first part of something in IPv4: a TCP segment with half a message, or a fragment.
fn part(stream: u16, is_tcp: bool) -> Vec<u8> {
    let mut frame = vec![0; 12];
    let (flags, protocol) = if is_tcp { (0, 6) } else { (0x20, 17) };
    frame.extend([0x08, 0x00, 0x45, 0, 0, 64]);
    frame.extend(stream.to_be_bytes());
    frame.extend([flags, 0, 64, protocol, 0, 0, 10, 96, 0, 10, 10, 244, 0, 5]);
    frame.extend([0, 53]);
    frame.extend(stream.to_be_bytes());
    if is_tcp {
        frame.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x12, 1, 0, 0, 0, 0, 0]);
    }
    frame.resize(14 + 64, 7);
    frame
}

fn do_harm(node: &mut Node, harms: &[Harm]) {
    let mut last = None;
    for (turn, harm) in harms.iter().enumerate() {
        match harm {
            Harm::Answer {
                pod,
                labels,
                suffix,
                from,
                count,
                ttl,
                held,
            } => {
                let told = addresses(*from, *count);
                let bytes = hostile_frame(labels, SUFFIXES[*suffix], &told, *ttl);
                let ifindex = ifindex_of(node.pods[&format!("ns1_{}", HOSTILE[*pod].0)]);
                let bytes = node.to_pod(ifindex, bytes);
                last = Some((ifindex, bytes.clone()));
                let frame = Frame {
                    held: *held,
                    opened: false,
                    ..frame(ifindex, node.now, &bytes)
                };
                node.give_frame(frame);
            }
            Harm::Flood(times) => {
                for _ in 0..*times {
                    if let Some((ifindex, bytes)) = &last {
                        node.give_frame(frame(*ifindex, node.now, bytes));
                    }
                }
            }
            Harm::Frame {
                ifindex,
                bytes,
                held,
            } => {
                let frame = Frame {
                    held: *held,
                    opened: false,
                    ..frame(*ifindex, node.now, bytes)
                };
                node.give_frame(frame);
            }
            Harm::Part { stream, is_tcp } => {
                for number in 0..200 {
                    let bytes = part(stream.wrapping_add(number), *is_tcp);
                    let ifindex = ifindex_of(node.pods["ns1_p1"]);
                    node.give_frame(frame(ifindex, node.now, &bytes));
                }
            }
            Harm::Pass(millis) => node.pass(Duration::from_millis(*millis)),
            Harm::Edit(denies_all) => {
                let mut rules = vec![deny("bad.test"), allow("example.com")];
                rules.extend(denies_all.then(deny_all));
                node.set_firewall(&rules);
                node.set_ovn(&rules);
            }
            Harm::Recreate(pod) => {
                let (name, host) = HOSTILE[*pod];
                node.remove_interface(name);
                let row = RowId::new(0x1000 * (turn as u128 + 1) + u128::from(host));
                node.add_pod_as(name, host, &format!("uid-{turn}"), row);
            }
        }
        check_bounds(node);
    }
}

/// Every collection that hostile input can make grow is within a bound that follows from the limits.
fn check_bounds(node: &Node) {
    let engine = &node.engine;
    let ports = engine.ports.iter().count();
    engine.told.cache.check();
    let most = engine.told.cache.limits().addresses_per_port_max;
    assert!(node.own() <= ports * most, "{} flows", node.own());
    // Those of two names, each alone and both together, as far as they are denied or not; and that in which tags end.
    let of_rules = node.of_rules().count();
    assert!(of_rules <= 8, "{of_rules} flows of rules");
    assert!(node.switch.len() <= node.own() + of_rules + 1);
    assert!(engine.hold.len() <= HELD_MAX);
    let [connections, datagrams] = engine.answers.sizes();
    assert!(connections <= TCP_CONNECTIONS_MAX && datagrams <= FRAGMENTED_MAX);
    let [pending, queues, removals, lost, foreign] = engine.switch.sizes();
    assert!(pending == 0 && queues == 0 && removals == 0);
    assert!(lost <= ports * most && foreign <= FOREIGN_FLOWS_MAX);
    assert!(engine.told.budget.accounts() <= ports && engine.out.accounts() <= ports);
    let (remembered, of_one) = engine.told.refused.remembered();
    assert!(remembered <= ports && of_one <= REFUSALS_REPORTED_MAX);
    assert!(engine.out.commands.is_empty() && engine.out.reports.is_empty());
}

#[test]
fn whatever_is_asked_and_answered_every_collection_stays_within_its_bound() {
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let harms = proptest::collection::vec(harm(), 1..40);
    let result = runner.run(&harms, |harms| {
        let mut node = Node::with(&[deny("bad.test"), allow("example.com"), deny_all()]);
        node.add_pod("p2", 6);
        let limits = node.engine.told.cache.limits_mut();
        (limits.addresses_per_port_max, limits.addresses_per_name_max) = (64, 16);
        do_harm(&mut node, &harms);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// Two answers of one turn, one of them for a denied name with many addresses and many flows of each.
#[test]
fn flows_of_a_denied_name_do_not_stand_before_those_of_a_neighbour() {
    let of_many_ports = Rule {
        ports: tcp(MANY),
        ..deny("bad.test")
    };
    let told = [
        ("ns1_p2", answer_frame("example.com", &[OTHER], 60)),
        ("ns1_p1", answer_frame("bad.test", &addresses(0, 257), 60)),
    ];
    for told in [[0, 1], [1, 0]].map(|order| order.map(|at: usize| told[at].clone())) {
        let mut node = Node::with(&[of_many_ports.clone(), allow("example.com")]);
        node.add_pod("p2", 6);
        node.waiting = Some(VecDeque::new());
        for (port, bytes) in told {
            let ifindex = ifindex_of(node.pods[port]);
            let bytes = node.to_pod(ifindex, bytes);
            let frame = frame(ifindex, node.now, &bytes);
            node.engine.handle_frame(frame, node.now);
        }
        node.obey();
        let sent = node.waiting.iter().flatten();
        let sent = sent.filter_map(|command| match command {
            Command::Apply { changes, .. } => Some(changes),
            _ => None,
        });
        let sent: Vec<usize> = sent
            .map(|changes| {
                let of_rules = changes.iter().filter(|change| !is_for_sentinel(change));
                of_rules.count()
            })
            .collect();
        // The first one has the flow of its rule and of its address.
        let [of_neighbour, of_denied] = sent[..] else {
            panic!("{sent:?}")
        };
        assert_eq!(of_neighbour, 2);
        assert!(of_denied <= CHANGES_UNDER_WAY_MAX, "{of_denied}");
        // All of the others follow, each part when the one before it was confirmed.
        assert!(node.carry_out_next());
        assert!(node.destinations().contains("203.0.113.2"));
        while node.carry_out_next() {}
        assert_eq!(node.destinations().len(), 258);
    }
}

/// Two answers of one turn: the neighbour's, and one with few flows for which many have to go.
#[test]
fn the_flows_that_make_room_do_not_stand_before_those_of_a_neighbour() {
    const ADDRESSES: u32 = 100;
    let of_some_ports = Rule {
        ports: tcp(8),
        ..allow("example.com")
    };
    let mut node = Node::with(&[
        deny("bad.test"),
        of_some_ports,
        allow("other.test"),
        deny_all(),
    ]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = ADDRESSES as usize;
    node.add_pod("p2", 6);
    for place in 0..ADDRESSES {
        let told = addresses(place, 1);
        node.answer("p1", &format!("n{place}.example.com"), &told, 3600);
        node.pass(Duration::from_secs(1));
    }
    assert_eq!(node.destinations().len(), ADDRESSES as usize);
    node.pass(IDLE_GRACE * 3);
    node.waiting = Some(VecDeque::new());
    let told = [
        ("ns1_p2", answer_frame("other.test", &[OTHER], 60)),
        (
            "ns1_p1",
            answer_frame("bad.test", &addresses(1000, 100), 60),
        ),
    ];
    for (port, bytes) in told {
        let ifindex = ifindex_of(node.pods[port]);
        let bytes = node.to_pod(ifindex, bytes);
        let frame = frame(ifindex, node.now, &bytes);
        node.engine.handle_frame(frame, node.now);
    }
    node.obey();
    let sent = node.waiting.iter().flatten();
    let sent: Vec<usize> = sent
        .filter_map(|command| match command {
            Command::Apply { changes, .. } => Some(changes.len()),
            _ => None,
        })
        .collect();
    assert!(
        sent.iter()
            .all(|changes| *changes <= 2 * CHANGES_UNDER_WAY_MAX),
        "{sent:?}"
    );
}

/// OVN's rows for these rules, however many.
fn set_all_rows(node: &mut Node, rules: &[Rule]) {
    let all = || 0..rules.len() as u32;
    node.give(Input::Nb(NbUpdate {
        acls: all().map(|at| (acl_row(at), acl(at, rules))).collect(),
        ..NbUpdate::default()
    }));
    let flow = |at| (logical_flow_row(at), logical_flow(at, rules));
    node.give(Input::Sb(SbUpdate {
        logical_flows: all().map(flow).collect(),
        ..SbUpdate::default()
    }));
}

/// An address has 64 names, each with a rule of its own. One of them gives way to a name that is to be denied, over the
/// budget: the address is not planned anew. An edit takes the rule of the name away that gave way.
#[test]
fn a_name_that_gives_way_over_the_budget_leaves_no_flow_behind() {
    let names = NAMES_PER_ADDRESS_MAX as u32;
    for is_over_budget in [false, true] {
        let mut rules: Vec<Rule> = (0..names).map(|at| allow(&format!("n{at}.test"))).collect();
        rules.extend([allow("bad.test"), deny_all()]);
        let mut node = Node::with(&rules);
        set_all_rows(&mut node, &rules);
        for at in 0..names {
            // The first one ends first.
            let ttl = if at == 0 { 600 } else { 3600 };
            node.answer("p1", &format!("n{at}.test"), &[ADDRESS], ttl);
        }
        assert!((0..names as u16).all(|place| is_open(&node, ADDRESS, place)));
        let mut edited = rules.clone();
        edited[names as usize] = deny("bad.test");
        node.set_firewall(&edited);
        if is_over_budget {
            let port = node.engine.ports.named("ns1_p1").expect("it is there");
            let changes = Changes {
                flows: 10_000,
                marks: 0,
            };
            node.engine.told.budget.spend(port, changes, node.now);
        }
        node.answer("p1", "bad.test", &[ADDRESS], 3600);
        // The edit is taken back, and the rule of the first name, too.
        let mut edited = rules.clone();
        edited[0] = allow("other.test");
        node.set_firewall(&edited);
        set_all_rows(&mut node, &edited);
        node.pass(Duration::from_secs(30));
        assert!(!is_open(&node, ADDRESS, 0), "over budget: {is_over_budget}");
    }
}

/// How many names and rules an answer has the engine look at.
fn work_of(node: &mut Node, name: &str) -> usize {
    let before = node.engine.told.cache.work();
    node.engine.told.plans.planner().take_looked_at();
    node.answer("p1", name, &[ADDRESS], 600);
    let planned = node.engine.told.plans.planner().take_looked_at();
    node.engine.told.cache.work() - before + planned
}

/// An address has many names, each denied by a rule of its own or to be denied by one, in the order of the rules or the
/// other way.
#[test]
fn a_further_denied_name_costs_as_much_where_its_address_has_many() {
    const RULES: usize = 600;
    const MOST: usize = 4 * MANY;
    for (is_in_force, is_reverse) in [(true, false), (true, true), (false, false)] {
        let mut names: Vec<String> = (0..RULES).map(|at| format!("n{at}.test")).collect();
        let mut rules: Vec<Rule> = names.iter().map(|name| deny(name)).collect();
        rules.push(deny_all());
        let mut node = Node::with(&[deny_all()]);
        node.set_firewall(&rules);
        if is_in_force {
            set_all_rows(&mut node, &rules);
        }
        if is_reverse {
            names.reverse();
        }
        for front in ["", "a.", "a.b."] {
            for (at, name) in names.iter().enumerate() {
                let name = format!("{front}{name}");
                // It comes, and is prolonged.
                let work = work_of(&mut node, &name) + work_of(&mut node, &name);
                assert!(
                    work <= MOST,
                    "{is_in_force}, {is_reverse}: {front}{at}, {work}"
                );
            }
        }
        assert_eq!(names_of(&node, ADDRESS), 3 * RULES);
        // No group has as many patterns.
        assert_eq!(places(&node, ADDRESS), BTreeSet::new());
        assert_eq!(is_closed(&node, ADDRESS), is_in_force);
    }
}

#[derive(Clone, Debug)]
enum OfMany {
    /// The pod is told a name with so many labels in front of that of a rule.
    Answer { rule: usize, front: usize, ttl: u32 },
    /// A rule denies a name or allows it, with so many ports. OVN follows later.
    Edit {
        rule: usize,
        is_denied: bool,
        ports: usize,
    },
    /// OVN follows.
    Ovn,
    /// Time passes, in seconds.
    Pass(u64),
}

const RULES_OF_MANY: usize = 60;

fn of_many() -> impl Strategy<Value = OfMany> {
    // Few enough for all groups that the address has had lately.
    let ports = 0..3_usize;
    let ttl = prop_oneof![1..5_u32, 3500..3600_u32];
    prop_oneof![
        24 => (0..RULES_OF_MANY, 0..3_usize, ttl)
            .prop_map(|(rule, front, ttl)| OfMany::Answer { rule, front, ttl }),
        1 => (0..RULES_OF_MANY, any::<bool>(), ports)
            .prop_map(|(rule, is_denied, ports)| OfMany::Edit { rule, is_denied, ports }),
        1 => Just(OfMany::Ovn),
        1 => prop_oneof![1..5_u64, 600..900_u64].prop_map(OfMany::Pass),
    ]
}

/// Ports of a rule with many.
const MANY: usize = 256;

/// Plans everything anew, from all names and rules. Nothing changes.
fn plan_anew(node: &mut Node) {
    let now = node.now;
    let port = node.engine.ports.named("ns1_p1").expect("it is there");
    let (mut access, switch, _) = node.engine.access();
    let mut batch = switch.begin(now);
    access.replan(port, &mut batch);
    assert_eq!(batch.len(), 0);
    assert_eq!(node.engine.counters().addresses_cut, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_address_with_many_names_has_the_flows_of_all_of_them(
        steps in proptest::collection::vec(of_many(), 300..600),
        is_marked in any::<bool>(),
    ) {
        let mut rules: Vec<Rule> = (0..RULES_OF_MANY)
            .map(|at| many(deny(&format!("n{at}.test")), at % 3))
            .collect();
        rules.push(deny_all());
        let mut node = started_in(edits::WAYS[usize::from(is_marked)], &[deny_all()]);
        node.set_firewall(&rules);
        set_all_rows(&mut node, &rules);
        for (at, step) in steps.into_iter().enumerate() {
            match step {
                OfMany::Answer { rule, front, ttl } => {
                    let name = format!("{}n{rule}.test", ["", "a.", "a.b."][front]);
                    node.answer("p1", &name, &[ADDRESS], ttl);
                }
                OfMany::Edit { rule, is_denied, ports } => {
                    let name = format!("n{rule}.test");
                    let edited = if is_denied { deny(&name) } else { allow(&name) };
                    rules[rule] = many(edited, ports);
                    node.set_firewall(&rules);
                }
                OfMany::Ovn => set_all_rows(&mut node, &rules),
                OfMany::Pass(seconds) => node.pass(Duration::from_secs(seconds)),
            }
            if at % 50 == 49 {
                plan_anew(&mut node);
            }
        }
        plan_anew(&mut node);
    }
}
