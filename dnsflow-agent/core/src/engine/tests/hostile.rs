//! Pods and name servers that ask and answer for no other reason than to do harm.

use super::*;
use crate::limits::{
    CACHED_NAMES_MAX, FLOW_BURST_TIME, FLOW_CHANGES_PER_SECOND, NAMES_PER_ADDRESS_MAX,
};

/// Different addresses, as many as are asked for.
fn addresses(from: u32, count: u32) -> Vec<[u8; 4]> {
    let addresses = from..from + count;
    addresses
        .map(|i| Ipv4Addr::from(0x0b00_0000 + i).octets())
        .collect()
}

/// The size of each collection that what pods are told can make grow.
fn sizes(node: &Node) -> Vec<usize> {
    let engine = &node.engine;
    engine.cache.check();
    let (ports, most) = engine.refused.remembered();
    vec![
        engine.cache.sizes().iter().sum(),
        engine.hold.len(),
        engine.budget.accounts(),
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
    assert_eq!(node.engine.cache.deadline(), None);
    assert_eq!(node.reports, []);
    assert_eq!(node.log, []);
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
    assert!(node.engine.cache.is_idle(), "and all is forgotten");
}

#[test]
fn what_is_remembered_before_rules_are_read_goes_once_none_mentions_it() {
    let rules = [allow("example.com"), deny_all()];
    let row = RowId::new(0x105);
    let mut node = Node::bare();
    node.give(Input::SwitchUp);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    node.pods.insert("ns1_p1".into(), row);
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.answer("p1", "evil.test", &[ADDRESS, OTHER], 600);
    assert_eq!(node.engine.cache.entries_mut().count(), 2);
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
        node.engine.cache.entries_mut().count(),
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
    node.engine.cache.check();
    assert_eq!(node.engine.cache.entries_mut().count(), 1);
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
        // Four new addresses each millisecond, under a name of their own.
        node.answer(
            "p1",
            &format!("n{next}.example.com"),
            &addresses(next, 4),
            1,
        );
        next += 4;
        node.pass(Duration::from_millis(1));
        if next % 4000 == 0 {
            let host = u8::try_from(next / 4000).expect("few");
            node.answer("p2", "www.example.com", &[[198, 51, 100, host]], 60);
            assert!(node.destinations().contains(&format!("198.51.100.{host}")));
        }
    }
    let (_, ports) = (node.engine.cache.check(), node.batches());
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
    node.engine.budget.spend(port, usize::MAX, node.now);
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
    node.engine.cache.limits_mut().addresses_per_port_max = 12;
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
    node.engine.cache.check();
    // Its time ends all the same.
    node.pass(node.engine.cache.limits().deny_ttl + 2 * COMPARE_INTERVAL);
    assert_eq!(node.destinations(), BTreeSet::new());
    node.answer("p1", "www.example.com", &[[198, 51, 100, 1]], 3600);
    assert!(node.destinations().contains("198.51.100.1"));
}

#[test]
fn all_addresses_of_a_denied_name_are_denied() {
    let mut node = Node::with(&[deny("bad.test")]);
    node.answer("p1", "bad.test", &addresses(0, 400), 60);
    node.answer("p1", "bad.test", &addresses(400, 400), 60);
    assert_eq!(node.destinations().len(), 800);
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
    node.engine.cache.check();
}

#[test]
fn a_pod_has_room_for_so_many_names_and_the_node_for_those_of_many() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.cache.limits_mut().addresses_per_port_max = 100;
    node.set_firewall(&[allow("example.com"), deny_all(), allow("other.test")]);
    for i in 0..2000 {
        // OVN does not enforce the rule for these yet: they cost no flow.
        let address = [192, 0, 2, u8::try_from(i % 50).expect("few")];
        node.answer("p1", &format!("n{i}.other.test"), &[address], 3600);
    }
    node.engine.cache.check();
    let names = node.engine.cache.names_in_all();
    let most = node.engine.cache.limits().names_per_port_max();
    assert!((most / 2..=most).contains(&names), "{names} of {most}");
    assert!(names < CACHED_NAMES_MAX);
}
