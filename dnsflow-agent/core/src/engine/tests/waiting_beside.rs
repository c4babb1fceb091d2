//! What waits, and what comes meanwhile.

use std::collections::VecDeque;

use super::{
    edits::{WAYS, node},
    hostile::places,
    limits::many,
    starts::{is_dump, is_open, is_open_at_all},
    *,
};
use crate::{
    ovn::rows::Encapsulation,
    policy::plan::keys_of,
    values::limits::{CHANGES_UNDER_WAY_MAX, COMPARE_INTERVAL, REMOVALS_WAITING_MAX},
};

/// The dump that the engine has asked for comes before all else that waits.
fn compare(node: &mut Node) {
    loop {
        let waiting = node.waiting.as_mut().expect("commands wait");
        if let Some(at) = waiting.iter().position(is_dump) {
            let dump = waiting.remove(at).expect("it waits");
            waiting.push_front(dump);
            assert!(node.carry_out_next());
            return;
        }
        node.pass(Duration::from_secs(1));
    }
}

/// The logical port of a pod goes, its rule is taken away, and the port comes back.
#[test]
fn what_waits_for_a_logical_port_that_has_gone_is_not_there_when_it_comes_back() {
    let mut node = Node::with(&[allow("example.com"), allow("other.test"), deny_all()]);
    for name in 0..16 {
        let told = addresses(name * 256, 256);
        node.answer("p1", &format!("n{name}.example.com"), &told, 600);
    }
    node.waiting = Some(VecDeque::new());
    let row = node.remove_logical_port("p1");
    let edited = [deny_all(), allow("other.test")];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    node.add_logical_port("p1", 5, row);
    let sent = node.waiting.as_ref().map_or(0, VecDeque::len);
    for _ in 0..sent {
        node.carry_out_next();
    }
    assert_eq!(node.open().len(), 0);
}

/// A pod has two ports with one address, on two networks. One update takes the logical port of the second away, and a
/// rule.
#[test]
fn what_an_edit_closes_does_not_wait_because_a_port_with_the_same_address_goes() {
    let rules = [allow("example.com"), deny_all()];
    let mut node = Node::with(&rules);
    let row = RowId::new(0x107);
    node.add_interface("udn", 5, "uid-p1", row);
    let binding = PortBinding {
        tunnel_key: 7,
        ..port_binding("ns1_udn", 5)
    };
    let of_one = node.group();
    node.pods.insert("ns1_udn".to_owned(), row);
    node.give(Input::Sb(SbUpdate {
        port_bindings: vec![(row, Some(binding))],
        port_groups: vec![node.group()],
        ..SbUpdate::default()
    }));
    for name in 0..2 {
        let told = addresses(name * 256, 256);
        node.answer("p1", &format!("n{name}.example.com"), &told, 600);
    }
    assert_eq!(node.own(), 2 * 512);
    node.waiting = Some(VecDeque::new());
    node.give(Input::Sb(SbUpdate {
        port_bindings: vec![(row, None)],
        port_groups: vec![of_one],
        logical_flows: vec![(logical_flow_row(0), None)],
        ..SbUpdate::default()
    }));
    let sent = node.waiting.as_ref().map_or(0, VecDeque::len);
    for _ in 0..sent {
        node.carry_out_next();
    }
    // Both ports share the flow of the rule. Without it, tags do nothing.
    let of_one = |key: &&FlowKey| keys_of(key).is_some_and(|keys| keys.port == 5);
    let tagged = node.of_addresses().filter(of_one).count();
    assert!(tagged == 0 || node.of_rules().count() == 0, "{tagged}");
}

/// An address of a pod has ended, and its flow waits to be removed behind those of others. The address comes to be
/// that of a node.
#[test]
fn what_has_ended_is_closed_when_the_address_comes_to_be_refused() {
    for waits in [false, true] {
        let mut node = with_removals_that_wait(waits);
        node.give(Input::Sb(SbUpdate {
            encapsulations: vec![(
                RowId::new(0xeca),
                Some(Encapsulation { ip: ADDRESS.into() }),
            )],
            ..SbUpdate::default()
        }));
        let sent = node.waiting.as_ref().map_or(0, VecDeque::len);
        for _ in 0..sent {
            node.carry_out_next();
        }
        assert!(!node.destinations().contains("203.0.113.1"), "{waits}");
    }
}

/// The connection is there again, and the switch is not compared. A pod is told much, and an edit comes to what waits.
#[test]
fn an_edit_before_the_comparison_takes_nothing_away_that_waits() {
    for is_edited in [false, true] {
        let rules = |further| [deny("bad.test"), allow("example.com"), further, deny_all()];
        let before = rules(allow("other.test"));
        let mut node = Node::with(&before);
        node.waiting = Some(VecDeque::new());
        node.give(Input::SwitchDown);
        node.give(Input::SwitchUp);
        while !node.waiting.iter().flatten().any(is_dump) {
            if !node.carry_out_next() {
                node.pass(Duration::from_millis(100));
            }
        }
        // The dump takes its time.
        let waiting = node.waiting.as_mut().expect("commands wait");
        waiting.retain(|command| !is_dump(command));
        let told = addresses(0, 256);
        node.answer("p1", "www.example.com", &told, 600);
        node.answer("p1", "bad.test", &[ADDRESS], 600);
        if is_edited {
            let edited = rules(many(deny("bad.test"), 1));
            node.set_firewall(&edited);
            node.set_ovn(&edited);
        }
        while node.carry_out_next() {}
        assert!(!node.engine.is_writing(), "all is confirmed");
        assert!(places(&node, ADDRESS).contains(&0), "{is_edited}");
    }
}

/// By marks, a pod with many groups of many ports goes. Their flows end together, a minute later.
#[test]
fn groups_of_a_pod_that_goes_do_not_stand_before_what_opens_for_another() {
    for way in WAYS {
        let mut rules: Vec<Rule> = (0..18)
            .map(|name| many(allow(&format!("n{name}.test")), 200))
            .collect();
        rules.extend([allow("other.test"), deny_all()]);
        let mut node = node(way, &rules);
        node.add_pod("p2", 6);
        for name in 0..18 {
            node.answer("p1", &format!("n{name}.test"), &addresses(name, 1), 3600);
            node.pass(Duration::from_secs(1));
        }
        assert!(node.switch.len() >= 18 * 200);
        node.pass(Duration::from_secs(30));
        node.batches();
        node.remove_interface("p1");
        node.pass(Duration::from_secs(60) + 20 * COMPARE_INTERVAL);
        assert_eq!((node.own(), node.of_rules().count()), (0, 0));
        let largest = node.batches().into_iter().map(|(_, changes)| changes.len());
        let largest = largest.max();
        assert!(largest <= Some(256), "{way:?}: {largest:?}");
    }
}

/// The switch takes its time. Pods come, are told many addresses, and go: all that waits is to be removed.
#[test]
fn what_waits_for_pods_that_are_gone_has_a_limit() {
    let mut node = Node::with(&[deny("bad.test"), deny_all()]);
    node.waiting = Some(VecDeque::new());
    let told = addresses(0, 4096);
    let hosts = 10..50;
    for host in hosts.clone() {
        let name = format!("pod{host}");
        node.add_pod(&name, host);
        let interface = node.pods[&format!("ns1_{name}")];
        let ifindex = ifindex_of(interface);
        node.give(Input::Attached { interface, ifindex });
        for (part, told) in told.chunks(256).enumerate() {
            node.answer(&name, &format!("n{part}.bad.test"), told, 600);
        }
        node.remove_interface(&name);
        node.waiting = Some(VecDeque::new());
    }
    let waiting = hosts.flat_map(|host| {
        let switch = &node.engine.switch;
        let told = told.iter();
        told.map(move |dst| switch.waiting_between([10, 244, 0, host].into(), (*dst).into()))
    });
    let waiting: usize = waiting.sum();
    assert!(waiting <= REMOVALS_WAITING_MAX, "{waiting}");
}

/// The kernel has no room for the marks of an answer: its addresses get flows.
#[test]
fn flows_in_place_of_refused_marks_do_not_stand_before_what_opens_for_another() {
    let mut node = node(WAYS[1], &[many(allow("example.com"), 100), deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.pass(Duration::from_secs(30));
    node.batches();
    let budget = |node: &Node| node.engine.counters().addresses_over_budget;
    node.refuses_marks = true;
    node.answer("p1", "n.example.com", &addresses(0, 256), 600);
    assert_eq!(budget(&node), 0);
    let largest = node.batches().into_iter().map(|(_, changes)| changes.len());
    let largest = largest.max();
    // Nor is anything left of the budget.
    node.refuses_marks = false;
    node.answer("p1", "m.example.com", &addresses(1000, 256), 600);
    assert!(
        largest <= Some(256),
        "{largest:?}, over budget {}",
        budget(&node)
    );
}

/// A name of one address has ended beside others of so many that `ADDRESS` waits to be removed (`waits`). From now on,
/// commands wait.
fn with_removals_that_wait(waits: bool) -> Node {
    let mut node = Node::with(&[allow("example.com"), allow("other.test"), deny_all()]);
    let ttl = if waits { 1 } else { 600 };
    node.answer("p1", "www.other.test", &[ADDRESS], ttl);
    for name in 0..15 {
        let told = addresses(name * 256, 256);
        node.answer("p1", &format!("n{name}.example.com"), &told, 1);
    }
    node.pass(MIN_TTL - Duration::from_secs(1));
    node.waiting = Some(VecDeque::new());
    node.pass(Duration::from_secs(2));
    compare(&mut node);
    node
}

/// A logical switch with these networks comes.
fn add_switch(node: &mut Node, network: Option<&str>, networks: &[&str]) {
    let networks = networks.iter();
    let switch = LogicalSwitch {
        network: network.map(str::to_owned),
        is_primary: false,
        networks: networks
            .map(|network| network.parse().expect("a network"))
            .collect(),
    };
    node.give(Input::Nb(NbUpdate {
        switches: vec![(RowId::new(0x15), Some(switch))],
        ..NbUpdate::default()
    }));
}

/// An address has ended and its flow waits to be removed. The network of the address comes to be one of the cluster.
#[test]
fn what_has_ended_is_closed_when_its_network_comes_to_be_refused() {
    for waits in [false, true] {
        let mut node = with_removals_that_wait(waits);
        add_switch(&mut node, None, &["203.0.113.0/24"]);
        for _ in 0..node.waiting.as_ref().map_or(0, VecDeque::len) {
            node.carry_out_next();
        }
        assert!(!is_open_at_all(&node, ADDRESS), "waits: {waits}");
    }
}

/// Most flows of p1 wait in its queue. A name beside ends, whose flows at the same addresses wait to be removed. The
/// next comparison takes what waits for lost.
#[test]
fn what_waits_is_not_lost_because_a_name_beside_it_has_ended() {
    for is_beside in [false, true] {
        let rules = [allow("old.test"), allow("example.com"), deny_all()];
        let mut node = Node::with(&rules);
        let told: Vec<Vec<[u8; 4]>> = (0..8).map(|name| addresses(name * 256, 256)).collect();
        for (name, told) in told.iter().enumerate().filter(|_| is_beside) {
            node.answer("p1", &format!("o{name}.old.test"), told, 1);
        }
        node.pass(MIN_TTL - Duration::from_secs(1));
        node.waiting = Some(VecDeque::new());
        for (name, told) in told.iter().enumerate() {
            node.answer("p1", &format!("n{name}.example.com"), told, 600);
        }
        node.pass(Duration::from_secs(2));
        node.engine.switch.read_counters(node.now);
        compare(&mut node);
        // What was sent by now is confirmed.
        for _ in 0..node.waiting.as_ref().map_or(0, VecDeque::len) {
            assert!(node.carry_out_next());
        }
        node.reports.clear();
        node.engine.switch.read_counters(node.now);
        compare(&mut node);
        let lost = node.reports.iter().filter_map(|report| match report {
            Report::Resynced { added, .. } => Some(*added),
            _ => None,
        });
        assert_eq!(lost.sum::<usize>(), 0, "beside: {is_beside}");
    }
}

/// A denial goes before all that waits for its pod.
#[test]
fn a_denial_waits_for_no_more_changes_than_is_said() {
    /// What is under way, the flows of one address, and sentinel flows.
    const SAID: usize = 4 * CHANGES_UNDER_WAY_MAX;
    for others in [16, 120] {
        let rules = [
            deny("worse.test"),
            many(deny("bad.test"), 256),
            allow("example.com"),
            deny_all(),
        ];
        let mut node = Node::with(&rules);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        assert!(is_open(&node, ADDRESS, 2));
        node.batches();
        node.waiting = Some(VecDeque::new());
        node.answer("p1", "bad.test", &addresses(0, others), 600);
        node.answer("p1", "worse.test", &[ADDRESS], 600);
        while !is_open(&node, ADDRESS, 0) {
            assert!(node.carry_out_next());
        }
        let before = node.batches().into_iter().map(|(_, changes)| changes.len());
        let before: usize = before.sum();
        assert!(before <= SAID, "{others} others: {before} changes");
    }
}

/// A tenant has a network with the addresses whose flows wait to be removed for a pod of others.
#[test]
fn what_has_ended_for_others_does_not_go_at_once_because_a_tenant_has_a_network_there() {
    let mut node = with_removals_that_wait(true);
    for _ in 0..node.waiting.as_ref().map_or(0, VecDeque::len) {
        node.carry_out_next();
    }
    let before = node.open().len();
    assert!(before > 2 * CHANGES_UNDER_WAY_MAX);
    add_switch(&mut node, Some("tenant.network"), &["11.0.0.0/8"]);
    let changes = node.waiting.iter().flatten().map(|command| match command {
        Command::Apply { changes, .. } => changes.len(),
        _ => 0,
    });
    assert!(changes.sum::<usize>() <= 2 * CHANGES_UNDER_WAY_MAX);
}

/// What a pod is told goes in batches of about as many changes as it may have under way. Of denied names, each answer is
/// a batch.
#[test]
fn denials_go_in_batches_as_other_answers_do() {
    let rules = [deny("bad.test"), allow("example.com"), deny_all()];
    let mut batches = [0; 2];
    for (name, batches) in ["example.com", "bad.test"].iter().zip(&mut batches) {
        let mut node = Node::with(&rules);
        node.waiting = Some(VecDeque::new());
        for (at, told) in addresses(0, 1024).into_iter().enumerate() {
            node.answer("p1", &format!("n{}.{name}", at % 8), &[told], 600);
        }
        while node.carry_out_next() {}
        let changed = node.batches();
        assert_eq!(
            changed
                .iter()
                .map(|(_, changes)| changes.len())
                .sum::<usize>(),
            // One is of the rule.
            1024 + 1
        );
        *batches = changed.len();
    }
    // As many answers as there are until the queue is full go in a batch each.
    assert!(batches[1] <= 2 * batches[0], "{batches:?}");
}
