//! Pods with several ports: which of them an answer is for, and the share that they have together.

use super::{
    edits::{node, use_all},
    limits::many,
    *,
};
use crate::ovn::rows::Interface;

/// The interface of pod p1 on a user-defined network.
fn on_network(network: &str, host: u8) -> (RowId, Option<Interface>) {
    let interface = Interface {
        network: Some(network.to_owned()),
        addresses: vec![[10, 9, 0, host].into()],
        ..interface(&format!("{network}_ns1_p1"), host, "uid-p1")
    };
    (RowId::new(0x100 + u128::from(host)), Some(interface))
}

/// Pod p1 comes to have so many further ports, each on a secondary network of its own. OVN knows them.
fn join_networks(node: &mut Node, networks: u8) {
    let rows = (0..networks).map(|network| on_network(&format!("net{network}"), 0x20 + network));
    let rows: Vec<_> = rows.collect();
    let ports = (0x20..).zip(&rows).map(|(host, (row, interface))| {
        let name = interface.as_ref().map(|row| row.iface_id.as_str());
        (*row, Some(port_binding(name.unwrap_or_default(), host)))
    });
    node.give(Input::Sb(SbUpdate {
        port_bindings: ports.collect(),
        ..SbUpdate::default()
    }));
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: rows,
    }));
}

/// A user-defined network comes to be the primary one of its pods.
fn make_primary(node: &mut Node, network: &str) {
    let switch = LogicalSwitch {
        network: Some(network.to_owned()),
        is_primary: true,
        networks: vec![],
    };
    node.give(Input::Nb(NbUpdate {
        switches: vec![(RowId::new(0x500), Some(switch))],
        ..NbUpdate::default()
    }));
}

/// Pod p2 beside pod p1, which has so many ports on secondary networks.
fn beside_networks(networks: u8) -> Node {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    join_networks(&mut node, networks);
    node
}

/// How many open addresses the pod at 10.244.0.`host` has.
fn open_at(node: &Node, host: u8) -> usize {
    let source = format!("10.244.0.{host}");
    let open = node.open().into_iter();
    open.filter(|(src, ..)| *src == source).count()
}

/// What an answer with 64 addresses brings for a pod on so many secondary networks: addresses and names.
fn learned_on(networks: u8) -> (usize, usize) {
    let mut node = beside_networks(networks);
    node.answer("p1", "www.example.com", &addresses(0, 64), 3600);
    assert_eq!(node.destinations().len(), 64);
    let cache = &mut node.engine.told.cache;
    cache.check();
    (cache.entries_mut().count(), cache.name_count())
}

#[test]
fn an_answer_is_not_learned_for_ports_on_which_no_rule_holds() {
    assert_eq!(learned_on(40), learned_on(0));
}

/// Where the node has room for 1,000 names, pod p2 uses 100 addresses, and pod p1 is told 1,000. Returns how many of p2's
/// are open then.
fn open_beside_pod_on(networks: u8) -> usize {
    let mut node = beside_networks(networks);
    node.engine.told.cache.limits_mut().names_per_node_max = 1000;
    node.answer("p2", "www.example.com", &addresses(100_000, 100), 3600);
    for _ in 0..3 {
        use_all(&mut node);
        node.pass(COMPARE_INTERVAL);
    }
    for answer in 0..50 {
        use_all(&mut node);
        let name = format!("n{answer}.example.com");
        node.answer("p1", &name, &addresses(answer * 20, 20), 3600);
        node.pass(Duration::from_secs(1));
    }
    node.engine.told.cache.check();
    open_at(&node, 6)
}

#[test]
fn a_pod_on_many_networks_takes_no_names_from_one_that_has_fewer() {
    assert_eq!((open_beside_pod_on(40), open_beside_pod_on(0)), (100, 100));
}

/// The node has room for 600 names. Pods p2 and p1, which has so many ports on secondary networks, are told 100 addresses
/// each before OVN's databases are read. Returns how many addresses are known then at the ports of each, and how many are
/// open at last.
fn told_before_ovn_is_read(networks: u8) -> [(usize, usize); 2] {
    let rules = [allow("example.com"), deny_all()];
    let mut node = Node::bare();
    node.engine.told.cache.limits_mut().names_per_node_max = 600;
    node.trust_server();
    node.give(Input::SwitchUp);
    let mut rows: Vec<_> = [("p1", 5), ("p2", 6)]
        .into_iter()
        .map(|(pod, host)| {
            let interface = interface(&format!("ns1_{pod}"), host, &format!("uid-{pod}"));
            (RowId::new(0x100 + u128::from(host)), Some(interface))
        })
        .collect();
    let on_networks = (0..networks).map(|net| on_network(&format!("net{net}"), 0x20 + net));
    rows.extend(on_networks);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: rows,
    }));
    node.pods = [("p1", 0x105), ("p2", 0x106)]
        .map(|(pod, row)| (format!("ns1_{pod}"), RowId::new(row)))
        .into();
    node.give(firewalls(true, Some(firewall(&rules))));
    for (pod, from) in [("p2", 100_000), ("p1", 0)] {
        node.answer(pod, "www.example.com", &addresses(from, 100), 3600);
    }
    let known = ["ns1_p1", "ns1_p2"].map(|name| {
        let port = node.engine.ports.named(name).expect("it is there");
        let of_pod = node.engine.ports.of_pod(port).into_iter();
        of_pod
            .map(|port| node.engine.told.cache.count(port))
            .sum::<usize>()
    });
    node.give(Input::Nb(NbUpdate {
        reset: true,
        acls: acls(&rules),
        ..NbUpdate::default()
    }));
    node.give(Input::Sb(SbUpdate {
        reset: true,
        datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
        port_bindings: [("p1", 5), ("p2", 6)]
            .map(|(pod, host)| {
                let binding = port_binding(&format!("ns1_{pod}"), host);
                (RowId::new(0x100 + u128::from(host)), Some(binding))
            })
            .into(),
        port_groups: vec![node.group()],
        logical_flows: logical_flows(&rules),
        ..SbUpdate::default()
    }));
    node.pass(COMPARE_INTERVAL);
    node.engine.told.cache.check();
    let all = node.engine.told.cache.entries_mut().count();
    let open = [5, 6].map(|host| open_at(&node, host));
    assert_eq!(all, open.iter().sum(), "nothing is left on other networks");
    [(known[0], open[0]), (known[1], open[1])]
}

/// Until then, an answer may concern each port.
#[test]
fn a_pod_on_many_networks_takes_no_names_from_others_before_ovn_is_read() {
    let [of_pod, of_other] = told_before_ovn_is_read(40);
    assert_eq!(of_other, (100, 100));
    assert_eq!(of_pod.0, 500, "it has a share, and the rest of the room");
    assert_eq!(told_before_ovn_is_read(0), [(100, 100); 2]);
}

/// Rules hold for two ports of pod p1, each with 300 names; pod p2 has 400. The node is full. Returns how many of p2's are
/// open after ten further ones.
fn open_beside_two_ports(sandboxes: &str) -> usize {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().names_per_node_max = 1000;
    node.add_pod("p2", 6);
    let row = RowId::new(0x107);
    let of_p1 = interface("ns1_p1b", 7, "uid-p1");
    let give = |node: &mut Node, sandbox: Option<String>| {
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(
                row,
                Some(Interface {
                    sandbox,
                    ..of_p1.clone()
                }),
            )],
        }));
    };
    let alone = sandboxes != "one";
    give(&mut node, of_p1.sandbox.clone().filter(|_| !alone));
    node.add_logical_port("p1b", 7, row);
    for pod in ["p1", "p1b"].into_iter().take(1 + usize::from(alone)) {
        for (at, name) in ["a.example.com", "b.example.com"].into_iter().enumerate() {
            node.answer(pod, name, &addresses(150 * at as u32, 150), 3600);
        }
    }
    for (at, name) in ["a.example.com", "b.example.com"].into_iter().enumerate() {
        node.answer("p2", name, &addresses(1000 + 200 * at as u32, 200), 3600);
    }
    assert_eq!([5, 6, 7].map(|host| open_at(&node, host)), [300, 400, 300]);
    if sandboxes == "one, later" {
        give(&mut node, of_p1.sandbox.clone());
    }
    node.engine.told.cache.check();
    for _ in 0..3 {
        use_all(&mut node);
        node.pass(COMPARE_INTERVAL);
    }
    node.answer("p2", "c.example.com", &addresses(2000, 10), 3600);
    node.engine.told.cache.check();
    open_at(&node, 6)
}

#[test]
fn the_ports_of_a_pod_have_one_share_of_the_names() {
    assert_eq!(open_beside_two_ports("one"), 410);
    assert_eq!(open_beside_two_ports("one, later"), 410);
    assert_eq!(
        open_beside_two_ports("two"),
        400,
        "p2 has most, and uses all"
    );
}

/// Pods p2 to p4 have a quarter of the flows of the node each, and are told further addresses. Pod p1 has nothing. `networks`:
/// how many secondary networks p4 is on.
fn open_of_last_quarter(networks: u8) -> [usize; 2] {
    let rules = [many(allow("many.test"), 50), deny_all()];
    let mut node = node(None, &rules);
    node.engine.told.cache.limits_mut().names_per_node_max = 1000;
    join_networks(&mut node, networks);
    for (host, pod) in [(6, "p2"), (7, "p3"), (8, "p4")] {
        node.add_pod(pod, host);
    }
    for pod in ["p2", "p3", "p4"] {
        node.answer(pod, "many.test", &addresses(0, 10), 3600);
        node.pass(Duration::from_secs(5));
    }
    node.answer("p1", "many.test", &addresses(0, 2), 3600);
    node.pass(Duration::from_secs(5));
    [5, 8].map(|host| open_at(&node, host))
}

#[test]
fn the_share_of_the_flows_is_that_of_pods_and_not_of_ports() {
    assert_eq!(open_of_last_quarter(40), open_of_last_quarter(0));
}

/// Pod p1 is on the default network and on a primary one. Its rules hold on the latter.
#[test]
fn an_answer_to_a_pod_on_a_primary_network_is_learned_for_that_network_alone() {
    for is_primary in [true, false] {
        let mut node = Node::with(&[allow("example.com"), deny_all()]);
        let (row, interface) = on_network("blue", 0x20);
        let name = interface.as_ref().map(|row| row.iface_id.clone());
        let name = name.unwrap_or_default();
        if is_primary {
            make_primary(&mut node, "blue");
        }
        let of_group = match is_primary {
            true => name.clone(),
            false => "ns1_p1".into(),
        };
        node.give(Input::Sb(SbUpdate {
            port_bindings: vec![(row, Some(port_binding(&name, 0x20)))],
            port_groups: vec![(
                node.group().0,
                Some(PortGroup {
                    name: GROUP.into(),
                    ports: [of_group].into(),
                }),
            )],
            ..SbUpdate::default()
        }));
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, interface)],
        }));
        node.answer("p1", "example.com", &[ADDRESS], 300);
        let sources: Vec<_> = node.open().into_iter().map(|(src, ..)| src).collect();
        let source = if is_primary {
            "10.9.0.32"
        } else {
            "10.244.0.5"
        };
        assert_eq!(sources, [source]);
        assert_eq!(node.engine.told.cache.name_count(), 1);
    }
}

/// No answer counts on a secondary network, and no rule holds there.
#[test]
fn a_pod_on_many_networks_takes_no_more_room_of_the_filter_than_its_ways_out() {
    let mut node = beside_networks(40);
    let is_filter = |command: &&Command| matches!(command, Command::FilterInterface { .. });
    let filtered = |node: &Node| node.log.iter().filter(is_filter).count();
    assert_eq!((filtered(&node), node.kernel.watched.len()), (1, 2));
    make_primary(&mut node, "net0");
    assert_eq!((filtered(&node), node.kernel.watched.len()), (2, 3));
}

#[test]
fn the_filter_follows_a_port_to_another_network() {
    let mut node = beside_networks(1);
    make_primary(&mut node, "blue");
    for (network, filtered) in [("blue", 3), ("net0", 2), ("blue", 3)] {
        let (row, interface) = on_network("net0", 0x20);
        let moved = interface.map(|row| Interface {
            network: Some(network.to_owned()),
            ..row
        });
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, moved)],
        }));
        assert_eq!(node.kernel.watched.len(), filtered, "{network}");
    }
}

/// Rules hold for each port of their port group, whatever its network.
#[test]
fn an_answer_is_learned_for_each_port_on_which_rules_hold() {
    let mut node = Node::with(&[deny("bad.test"), deny_all()]);
    join_networks(&mut node, 1);
    node.give(Input::Sb(SbUpdate {
        port_groups: vec![(
            node.group().0,
            Some(PortGroup {
                name: GROUP.into(),
                ports: ["ns1_p1".into(), "net0_ns1_p1".into()].into(),
            }),
        )],
        ..SbUpdate::default()
    }));
    node.answer("p1", "bad.test", &[ADDRESS], 300);
    let sources: Vec<_> = node.open().into_iter().map(|(src, ..)| src).collect();
    assert_eq!(sources, ["10.9.0.32", "10.244.0.5"]);
}
