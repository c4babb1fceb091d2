//! How many flows the pods of a node have together.

use super::{
    backends::lead_to,
    edits::{WAYS, config, node},
    limits::many,
    restart::{read_but_southbound, southbound, started},
    starts::{edit, is_open, is_open_at_all},
    *,
};
/// How the addresses of many pods come to many flows.
#[derive(Clone, Copy, Debug)]
enum Growth {
    /// At once.
    New,
    /// By a further name of addresses with two flows each.
    FurtherName,
    /// By an edit of their rule, which had two ports.
    Edit,
    /// By a Service that comes to lead to addresses with marks.
    Service,
}

/// How many flows addresses have of their own.
fn own(node: &Node) -> usize {
    let keys = node.switch.keys();
    keys.filter(|key| key.matches.ends.dst().is_some()).count()
}

/// The flows of all pods have a limit, beyond which a further address has one. An address that has two flows or a mark is
/// no further one.
#[test]
fn flows_of_all_pods_have_a_limit_whichever_way_they_come() {
    // The limit is 2,000: twice as many at most, and one for each name.
    const NAMES: usize = 1000;
    let most = 2 * 2 * NAMES + NAMES / 4;
    let mut beyond = Vec::new();
    for growth in [
        Growth::New,
        Growth::FurtherName,
        Growth::Edit,
        Growth::Service,
    ] {
        let (way, rule): (_, fn(&str) -> Rule) = match growth {
            Growth::New | Growth::FurtherName | Growth::Edit => (WAYS[0], deny),
            Growth::Service => (WAYS[1], allow),
        };
        let of_many = || many(rule("many.test"), 100);
        let mut node = node(way, &[many(rule("few.test"), 2), of_many()]);
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        let pods = (0x10..0x15).map(|host| (host, format!("pod{host}")));
        let pods: Vec<(u8, String)> = pods.collect();
        let told = addresses(0, 10);
        for (host, pod) in &pods {
            node.add_pod(pod, *host);
            match growth {
                Growth::New => {}
                Growth::FurtherName | Growth::Edit => node.answer(pod, "few.test", &told, 600),
                Growth::Service => node.answer(pod, "many.test", &told, 3600),
            }
        }
        let before = own(&node);
        assert!(before < NAMES);
        match growth {
            Growth::New | Growth::FurtherName => {}
            Growth::Edit => edit(&mut node, &[many(rule("few.test"), 100), of_many()]),
            Growth::Service => {
                lead_to(&mut node, 1, &told);
                // A comparison gives flows to few addresses.
                node.pass(Duration::from_secs(450));
            }
        }
        for (_, pod) in &pods {
            match growth {
                Growth::Edit | Growth::Service => {}
                Growth::New | Growth::FurtherName => {
                    node.answer(pod, "many.test", &told, 600);
                }
            }
        }
        node.pass(Duration::from_secs(1));
        node.engine.told.cache.check();
        let flows = own(&node);
        if flows > most {
            beyond.push(format!("{growth:?}: {before}, then {flows} of {most}"));
        }
    }
    assert_eq!(beyond, [] as [String; 0]);
}

/// What looks at the addresses of a pod again.
#[derive(Clone, Copy, Debug)]
enum Look {
    /// An edit that moves their rule.
    Edit,
    /// An edit that adds a port to their rule, which has one.
    Port,
    /// The end of their name. They are in use.
    End,
}

/// Another pod fills the node. An address with a mark has no flow of its own.
#[test]
fn an_open_address_does_not_close_because_another_pod_has_filled_the_node() {
    let mut closed = Vec::new();
    for way in WAYS {
        for look in [Look::Edit, Look::Port, Look::End] {
            for is_filled in [false, true] {
                let of_ports = |ports| many(allow("example.com"), ports);
                let ports = match look {
                    Look::Edit | Look::End => 2,
                    Look::Port => 1,
                };
                let denied = || many(deny("bad.test"), 100);
                let mut node = node(way, &[denied(), of_ports(ports), deny_all()]);
                node.add_pod("p2", 6);
                node.engine.told.cache.limits_mut().names_per_node_max = 1000;
                let told = addresses(0, 10);
                node.answer("p1", "example.com", &told, 60);
                node.answer("p1", "bad.test", &addresses(100, 10), 600);
                if is_filled {
                    node.answer("p2", "bad.test", &addresses(200, 20), 600);
                }
                let open = |node: &Node| {
                    let open = told.iter();
                    open.filter(|address| is_open_at_all(node, **address))
                        .count()
                };
                assert_eq!(open(&node), told.len());
                match look {
                    Look::Edit => {
                        let moved = [denied(), allow("new.test"), of_ports(2), deny_all()];
                        edit(&mut node, &moved);
                        node.pass(Duration::from_secs(1));
                    }
                    Look::Port => {
                        edit(&mut node, &[denied(), of_ports(2), deny_all()]);
                        node.pass(Duration::from_secs(1));
                    }
                    Look::End => {
                        for _ in 0..30 {
                            super::edits::use_all(&mut node);
                            node.pass(Duration::from_secs(5));
                        }
                    }
                }
                if open(&node) < told.len() {
                    let of_marks = way.is_some();
                    closed.push(format!("{look:?}, marks: {of_marks}, filled: {is_filled}"));
                }
            }
        }
    }
    assert_eq!(closed, [] as [String; 0]);
}

/// A pod has addresses with many flows, and another pod has filled the node since then. The agent starts anew.
#[test]
fn a_start_closes_nothing_because_another_pod_has_filled_the_node() {
    for is_filled in [false, true] {
        let rules = [many(allow("many.test"), 50), deny_all()];
        let mut before = node(WAYS[0], &rules);
        // Its interface is the first one.
        before.add_pod("p0", 4);
        before.engine.told.cache.limits_mut().names_per_node_max = 1000;
        let told = addresses(0, 30);
        before.answer("p1", "many.test", &told, 600);
        if is_filled {
            before.answer("p0", "many.test", &addresses(1000, 40), 600);
        }
        let open = |node: &Node| {
            let open = node.open().into_iter();
            let of_p1 = open.filter(|(src, ..)| src == "10.244.0.5");
            of_p1.map(|(_, dst, _)| dst).collect::<BTreeSet<_>>().len()
        };
        assert_eq!(open(&before), told.len());
        let saved = before.engine.snapshot(before.now);
        let mut node = started(&mut before, &saved, config(WAYS[0]));
        node.engine.told.cache.limits_mut().names_per_node_max = 1000;
        node.give(Input::SwitchUp);
        node.give(firewalls(true, Some(firewall(&rules))));
        node.give(Input::Nb(NbUpdate {
            reset: true,
            acls: acls(&rules),
            ..NbUpdate::default()
        }));
        node.pods = before.pods.clone();
        let pods = [("p0", 4_u8), ("p1", 5)];
        let row = |host: u8| RowId::new(0x100 + u128::from(host));
        let of_pod = |(name, host): (&str, u8)| {
            let port = format!("ns1_{name}");
            let interface = interface(&port, host, &format!("uid-{name}"));
            (row(host), Some(interface))
        };
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: pods.map(of_pod).into(),
        }));
        let of_pod = |(name, host): (&str, u8)| {
            let binding = port_binding(&format!("ns1_{name}"), host);
            (row(host), Some(binding))
        };
        node.give(Input::Sb(SbUpdate {
            reset: true,
            datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
            port_bindings: pods.map(of_pod).into(),
            port_groups: vec![node.group()],
            logical_flows: logical_flows(&rules),
            ..SbUpdate::default()
        }));
        node.pass(2 * COMPARE_INTERVAL);
        assert_eq!(open(&node), told.len(), "filled: {is_filled}");
    }
}

/// A stateful switch has two logical flows for each rule. Room for one flow is room for no rule.
#[test]
fn a_further_address_with_one_port_is_opened_in_a_full_node() {
    for is_stateful in [false, true] {
        let rules = [many(deny("many.test"), 100), many(allow("few.test"), 1)];
        let mut node = Node::with(&rules);
        if is_stateful {
            let second = logical_flow(1, &rules).map(|flow| LogicalFlow {
                matches: flow.matches.replace("reg0[8]", "reg0[7]"),
                ..flow
            });
            node.give(Input::Sb(SbUpdate {
                logical_flows: vec![(RowId::new((0xf00 + 0x50) << 96), second)],
                ..SbUpdate::default()
            }));
        }
        node.add_pod("p2", 6);
        node.engine.told.cache.limits_mut().names_per_node_max = 1000;
        node.answer("p1", "many.test", &addresses(0, 100), 600);
        node.answer("p1", "few.test", &[ADDRESS], 600);
        assert!(is_open_at_all(&node, ADDRESS), "stateful: {is_stateful}");
    }
}

/// A pod with many flows has room for eight more at a further address. It has more if the node is full.
#[test]
fn a_pod_has_no_more_room_where_the_node_is_full() {
    for is_full in [false, true] {
        let mut node = node(WAYS[1], &[deny("bad.test"), many(allow("many.test"), 100)]);
        node.add_pod("p2", 6);
        let limits = node.engine.told.cache.limits_mut();
        limits.addresses_per_port_max = 100;
        limits.names_per_node_max = if is_full { 200 } else { 100_000 };
        let told = addresses(0, 50);
        node.answer("p1", "many.test", &told, 600);
        assert_eq!(own(&node), 0);
        node.answer("p1", "bad.test", &told, 600);
        node.pass(Duration::from_secs(1));
        let (flows, most) = (own(&node), 8 * 100 + 101 + 8 * 50);
        assert!(flows <= most, "full: {is_full}: {flows} of {most}");
    }
}

/// The node has as many names as it may have, and an address whose name is not known. It gives way for no further name,
/// but for an address.
#[test]
fn an_address_without_a_name_gives_way_for_no_name() {
    const NAMES: usize = 6;
    let rules = [allow("example.com"), deny_all()];
    for is_saved in [true, false] {
        let mut before = node(WAYS[0], &rules);
        before.answer("p1", "example.com", &[ADDRESS], 3600);
        let saved = match is_saved {
            true => before.engine.saved(before.now),
            false => Saved::default(),
        };
        let mut node = started(&mut before, &[], config(WAYS[0]));
        node.engine.load_snapshot(saved, node.now);
        let mut node = read_but_southbound(node, &before, &rules);
        node.give(Input::Sb(southbound(&node, &rules)));
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        node.pass(Duration::from_secs(30));
        assert!(is_open(&node, ADDRESS, 0));
        let tell = |node: &mut Node, at: u32| {
            let name = format!("n{at}.example.com");
            node.answer("p1", &name, &addresses(at, 1), 3600);
        };
        for at in 0..NAMES as u32 + 1 {
            tell(&mut node, at);
        }
        let names = node.engine.told.cache.name_count();
        assert!(names <= NAMES, "saved: {is_saved}: {names} of {NAMES}");
        if !is_saved {
            assert!(is_open(&node, ADDRESS, 0));
            let limits = node.engine.told.cache.limits_mut();
            (limits.addresses_per_port_max, limits.names_per_node_max) = (NAMES, 100);
            tell(&mut node, 100);
            assert!(!is_open(&node, ADDRESS, 0));
        }
    }
}
