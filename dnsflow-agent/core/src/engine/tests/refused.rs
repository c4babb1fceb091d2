//! What is never opened, and what becomes of it when that changes.

use std::net::Ipv6Addr;

use super::{restart::southbound, *};
use crate::{
    io::input::LargeTable,
    ovn::rows::{Encapsulation, GatewayPort, Interface, LoadBalancer, NodeSet},
    policy::refused::{Nat64Prefix, Refusals},
    testing::answer_frame_of_ipv6,
    values::resolver::Resolver,
};

fn node_has(node: &mut Node, address: Option<[u8; 4]>) {
    let row = address.map(|ip| Encapsulation { ip: ip.into() });
    node.give(Input::Sb(SbUpdate {
        encapsulations: vec![(RowId::new(0xeca), row)],
        ..SbUpdate::default()
    }));
}

fn refusals_of(node: &Node) -> Vec<(&'static str, u64)> {
    let refused = node.engine.refused().iter();
    let refused = refused.filter(|(_, count)| *count > 0);
    refused
        .map(|(reason, count)| (crate::tools::counter_vec::Label::as_str(reason), count))
        .collect()
}

/// The EgressFirewall denies the name already. OVN follows a moment later, and so does the deferred answer.
#[test]
fn a_refused_address_of_a_name_is_denied_once_ovn_follows() {
    let rules = [deny("bad.test")];
    for allowed in [&[][..], &[allow("bad.test")]] {
        let mut node = Node::with(allowed);
        node_has(&mut node, Some(OTHER));
        node.set_firewall(&rules);
        node.answer("p1", "bad.test", &[OTHER], 60);
        assert_eq!(node.open(), [], "{allowed:?}");
        node.set_ovn(&rules);
        assert_eq!(node.destinations().len(), 1, "{allowed:?}");
    }
}

#[test]
fn addresses_of_nodes_and_services_are_not_opened() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node_has(&mut node, Some(ADDRESS));
    node.give(Input::Nb(NbUpdate {
        gateway_ports: vec![(
            RowId::new(0x6a),
            Some(GatewayPort {
                addresses: [IpAddr::from(OTHER)].into(),
            }),
        )],
        load_balancers: vec![(
            RowId::new(0x1b),
            Some(LoadBalancer {
                service: Some("default/kubernetes".into()),
                network: None,
                addresses: [IpAddr::from([10, 96, 0, 1])].into(),
                backends: Box::default(),
            }),
        )],
        ..NbUpdate::default()
    }));
    node.answer(
        "p1",
        "example.com",
        &[ADDRESS, OTHER, [10, 96, 0, 1], [10, 96, 0, 2]],
        60,
    );
    assert_eq!(node.destinations(), ["10.96.0.2".to_owned()].into());
    assert_eq!(refusals_of(&node), [("service", 1), ("node", 2)]);
}

/// A load balancer of the Service `kubernetes` that leads to these addresses.
fn leads_to(network: Option<&str>, addresses: &[[u8; 4]]) -> LoadBalancer {
    LoadBalancer {
        service: Some("default/kubernetes".into()),
        network: network.map(str::to_owned),
        addresses: [IpAddr::from([10, 96, 0, 1])].into(),
        backends: addresses.iter().copied().map(IpAddr::from).collect(),
    }
}

#[test]
fn the_api_server_is_known_by_its_service() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let mut leads = |network, addresses: &[[u8; 4]]| {
        let row = leads_to(network, addresses);
        node.give(Input::Nb(NbUpdate {
            load_balancers: vec![(RowId::new(0x1b), Some(row))],
            ..NbUpdate::default()
        }));
        node.answer("p1", "example.com", &[ADDRESS, OTHER], 600);
        node.destinations()
    };
    let both = BTreeSet::from(["203.0.113.1".to_owned(), "203.0.113.2".to_owned()]);
    assert_eq!(leads(None, &[]), both);
    assert_eq!(leads(None, &[OTHER]), ["203.0.113.1".to_owned()].into());
    // The API server moves.
    assert_eq!(leads(None, &[ADDRESS]), ["203.0.113.2".to_owned()].into());
    // A tenant chooses what belongs to a user-defined network.
    assert_eq!(leads(Some("udn1"), &[ADDRESS]), both);
    let refused = refusals_of(&node);
    assert!(matches!(refused[..], [("api_server", _)]), "{refused:?}");
}

#[test]
fn all_addresses_of_nodes_are_refused_by_the_set_of_ovn_kubernetes_or_by_the_interfaces_here() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 600);
    let mut set = |address: [u8; 4]| {
        let addresses = [address.into()].into();
        node.give(Input::Nb(NbUpdate {
            node_sets: vec![(RowId::new(0xa5), Some(NodeSet { addresses }))],
            ..NbUpdate::default()
        }));
        node.destinations()
    };
    assert_eq!(set(ADDRESS), ["203.0.113.2".to_owned()].into());
    assert_eq!(set(OTHER), ["203.0.113.1".to_owned()].into());
    node.give(Input::NodeAddresses([ADDRESS.into()].into()));
    assert_eq!(node.destinations(), BTreeSet::new());
    node.give(Input::NodeAddresses(BTreeSet::new()));
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!(refusals_of(&node), [("node", 3)]);
}

#[test]
fn a_second_service_at_the_address_of_a_dns_server_is_told_and_a_second_port_is_not() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let server = Resolver {
        address: [10, 96, 0, 10].into(),
        port: 53,
    };
    node.give(Input::Resolvers([server].into()));
    let mut covered = |row, service: &str| {
        let balancer = LoadBalancer {
            service: Some(service.into()),
            network: None,
            addresses: [server.address].into(),
            backends: Box::default(),
        };
        node.give(Input::Nb(NbUpdate {
            load_balancers: vec![(RowId::new(row), Some(balancer))],
            ..NbUpdate::default()
        }));
        let told = std::mem::take(&mut node.reports).into_iter();
        told.filter_map(|report| match report {
            Report::ResolverCovered { by, .. } => Some(by.into_iter().collect::<Vec<_>>()),
            _ => None,
        })
        .collect::<Vec<_>>()
    };
    assert_eq!(covered(0x1b, "kube-system/dns"), [[""; 0]; 0]);
    assert_eq!(covered(0x1c, "kube-system/dns"), [[""; 0]; 0]);
    let both = ["the Service evil/dns", "the Service kube-system/dns"];
    assert_eq!(covered(0x1d, "evil/dns"), [both]);
}

#[test]
fn what_comes_to_be_refused_is_closed_and_opens_again_when_it_is_no_more() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 600);
    assert_eq!(node.destinations().len(), 2);
    node.reports.clear();
    node_has(&mut node, Some(ADDRESS));
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
    assert_eq!(refusals_of(&node), [("node", 1)]);
    assert!(
        node.reports
            .iter()
            .any(|report| matches!(report, Report::AddressRefused { reason: "node", .. }))
    );
    // Told again, it stays closed.
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    assert_eq!(node.destinations().len(), 1);
    node.log.clear();
    node_has(&mut node, None);
    assert_eq!(node.destinations().len(), 2);
    node.pass(Duration::from_secs(1));
    let looks = node.log.contains(&Command::FindBlocked);
    assert!(looks, "OVN may have blocked a connection meanwhile");
    // The cluster's DNS.
    let resolver = format!("{}:53", Ipv4Addr::from(OTHER));
    node.give(Input::Resolvers([resolver.parse().expect("one")].into()));
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
}

#[test]
fn addresses_of_the_service_networks_are_closed_and_open_again_when_the_network_goes() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let networks = |texts: &[&str]| {
        let networks = texts.iter().map(|text| text.parse().expect("a network"));
        Input::ServiceNetworks(networks.collect())
    };
    let inside = [10, 96, 1, 1];
    node.answer("p1", "example.com", &[ADDRESS, inside], 600);
    assert_eq!(node.destinations().len(), 2);
    node.give(networks(&["10.96.0.0/16", "fd00:10:96::/112"]));
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!(refusals_of(&node), [("service", 1)]);
    // A further network, as an administrator adds one.
    node.give(networks(&["10.96.0.0/16", "203.0.113.0/24"]));
    assert_eq!(node.destinations(), BTreeSet::new());
    node.give(networks(&["203.0.113.0/24"]));
    assert_eq!(node.destinations(), ["10.96.1.1".to_owned()].into());
}

#[test]
fn a_form_of_an_address_of_ipv4_that_comes_to_be_refused_is_closed() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let forms = [
        "64:ff9b::cb00:7101",
        "64:ff9b:1:cb00:71:100::",
        "2002:cb00:7101::9",
    ];
    let others = ["64:ff9b::cb00:7102", "2001:db8::cb00:7101"];
    let addresses: Vec<Ipv6Addr> = forms
        .iter()
        .chain(&others)
        .map(|text| text.parse().expect("an address"))
        .collect();
    let bytes = answer_frame_of_ipv6("example.com", &addresses, 600);
    node.frame(ifindex_of(node.pods["ns1_p1"]), &bytes);
    let open = |node: &Node| -> BTreeSet<IpAddr> {
        let cache = &node.engine.told.cache;
        let (port, _) = node.engine.ports.iter().next().expect("one pod");
        let addresses = cache.addresses(port).into_iter();
        let is_open = |address: &IpAddr| {
            cache
                .entry(port, *address)
                .is_some_and(|entry| !entry.is_refused)
        };
        addresses.filter(is_open).collect()
    };
    assert_eq!(open(&node).len(), 5);
    node_has(&mut node, Some(ADDRESS));
    assert_eq!(
        open(&node),
        others.map(|text| text.parse().expect("an address")).into()
    );
    node_has(&mut node, None);
    assert_eq!(open(&node).len(), 5);
}

/// What is refused to a namespace is refused also where the namespace of a port is known later than what it was told.
#[test]
fn what_is_refused_to_a_namespace_is_refused_where_the_namespace_is_known_later() {
    let rules = [allow("example.com"), deny_all()];
    for is_told_first in [false, true] {
        let mut node = Node::bare();
        node.trust_server();
        let row = RowId::new(0x105);
        node.pods.insert("ns1_p1".into(), row);
        node.give(Input::SwitchUp);
        node.give(firewalls(true, Some(firewall(&rules))));
        let mut acls = acls(&rules);
        // Of the user-defined network of the namespace, not of its default network.
        let of_network = acls[1].1.as_mut().expect("there are two rules");
        of_network.matches =
            "(ip4.dst == 0.0.0.0/0 && ip4.dst != 203.0.113.0/24) && inport == @a777".into();
        node.give(Input::Nb(NbUpdate {
            reset: true,
            acls,
            ..NbUpdate::default()
        }));
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-p1")))],
        }));
        if is_told_first {
            node.answer("p1", "example.com", &[ADDRESS], 600);
        }
        let sb = southbound(&node, &rules);
        node.give(Input::Sb(sb));
        if !is_told_first {
            node.answer("p1", "example.com", &[ADDRESS], 600);
        }
        node.pass(Duration::from_secs(1));
        assert_eq!(node.destinations(), BTreeSet::new(), "{is_told_first}");
    }
}

/// The name is told before OVN has the rules of its EgressFirewall, and with them the namespace of the port group.
#[test]
fn what_is_refused_to_a_namespace_is_refused_where_its_rules_come_later() {
    let rules = [allow("example.com"), deny_all()];
    for is_told_first in [false, true] {
        let mut node = Node::with(&[]);
        node.set_firewall(&rules);
        if is_told_first {
            node.answer("p1", "example.com", &[ADDRESS], 600);
        }
        let mut acls = acls(&rules);
        // Of the user-defined network of the namespace, not of its default network.
        let of_network = acls[1].1.as_mut().expect("there are two rules");
        of_network.matches =
            "(ip4.dst == 0.0.0.0/0 && ip4.dst != 203.0.113.0/24) && inport == @a777".into();
        node.give(Input::Nb(NbUpdate {
            acls,
            ..NbUpdate::default()
        }));
        node.give(Input::Sb(SbUpdate {
            logical_flows: logical_flows(&rules),
            ..SbUpdate::default()
        }));
        node.answer("p1", "example.com", &[ADDRESS, [198, 51, 100, 1]], 600);
        node.pass(Duration::from_secs(1));
        assert_eq!(
            node.destinations(),
            ["198.51.100.1".to_owned()].into(),
            "{is_told_first}"
        );
    }
}

/// What a Service beside so many others costs that comes, changes and goes, with so many addresses open.
fn work_of_a_service(services: u16, open: u16) -> [usize; 3] {
    let address = |bits: u16| -> [u8; 4] {
        let [high, low] = bits.to_be_bytes();
        [10, 96, high, low]
    };
    let row = |number: u16, address: [u8; 4]| {
        let balancer = LoadBalancer {
            service: Some(format!("ns1/service{number}")),
            network: None,
            addresses: [address.into()].into(),
            backends: Box::default(),
        };
        (RowId::new(number.into()), Some(balancer))
    };
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.give(Input::Nb(NbUpdate {
        load_balancers: (0..services)
            .map(|number| row(number, address(number)))
            .collect(),
        ..NbUpdate::default()
    }));
    for number in 0..open {
        let [high, low] = number.to_be_bytes();
        node.answer("p1", "example.com", &[[198, 18, high, low]], 600);
    }
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 600);
    let changes = [
        row(9_999, ADDRESS),
        row(9_999, OTHER),
        (RowId::new(9_999), None),
    ];
    changes.map(|change| {
        let before = node.engine.told.refused.work.get();
        let is_gone = change.1.is_none();
        node.give(Input::Nb(NbUpdate {
            load_balancers: vec![change],
            ..NbUpdate::default()
        }));
        let is_open = usize::from(open) + 1 + usize::from(is_gone);
        assert_eq!(node.destinations().len(), is_open);
        node.engine.told.refused.work.get() - before
    })
}

#[test]
fn a_service_costs_by_itself_and_not_by_the_others_or_by_what_is_open() {
    let few = work_of_a_service(10, 5);
    assert!(few.iter().all(|work| *work > 0));
    assert_eq!(few, work_of_a_service(1_000, 5));
    assert_eq!(few, work_of_a_service(10, 50));
}

/// The networks in which addresses stand for those of IPv4: by themselves, or by the option for RFC 6052.
const TRANSLATING: [&str; 6] = [
    "::ffff:0:0:0/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "2002::/16",
    "2001:db8:100::/40",
    "2001:db8:122:344::/64",
];

/// An address of IPv6 that stands for one of IPv4 by one of these networks.
fn form_of(address: [u8; 4], network: &str) -> Ipv6Addr {
    let network: ipnet::Ipv6Net = network.parse().expect("a network");
    let mut form = network.network().octets();
    let at = match network.prefix_len() {
        16 => [2, 3, 4, 5],
        40 => [5, 6, 7, 9],
        48 => [6, 7, 9, 10],
        64 => [9, 10, 11, 12],
        _ => [12, 13, 14, 15],
    };
    for (at, octet) in at.into_iter().zip(address) {
        form[at] = octet;
    }
    form.into()
}

/// What a Service costs at whose address nothing is open, and one at whose address something is, with so many addresses
/// open beside it: by this network, or of IPv4.
fn work_beside_open(network: Option<&str>, names: u32) -> [usize; 2] {
    let prefixes = TRANSLATING[4..].iter();
    let prefixes: Vec<Nat64Prefix> = prefixes
        .map(|prefix| prefix.parse().expect("a prefix"))
        .collect();
    let refusals = Refusals::new(&[], &[], &[], &prefixes).expect("few networks");
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        refusals,
        ..Config::default()
    });
    let mut node = node.start(&[allow("example.com"), deny_all()]);
    for name in 0..names {
        let text = format!("n{name}.example.com");
        let told = addresses(name * 256, 256);
        let Some(network) = network else {
            node.answer("p1", &text, &told, 3600);
            continue;
        };
        let told = told.into_iter().map(|address| form_of(address, network));
        let frame = answer_frame_of_ipv6(&text, &told.collect::<Vec<_>>(), 3600);
        node.frame(ifindex_of(node.pods["ns1_p1"]), &frame);
    }
    let open = names as usize * 256;
    let entries = node.engine.told.cache.entries_mut();
    assert_eq!(entries.count(), open, "{network:?}");
    let [known, ..] = addresses(7, 1)[..] else {
        unreachable!("one was asked for")
    };
    let work = [[10, 96, 7, 1], known].map(|address| {
        let row = LoadBalancer {
            service: Some("ns1/service".into()),
            network: None,
            addresses: [address.into()].into(),
            backends: Box::default(),
        };
        let before = node.engine.told.refused.work.get();
        node.give(Input::Nb(NbUpdate {
            load_balancers: vec![(RowId::new(0x700), Some(row))],
            ..NbUpdate::default()
        }));
        node.engine.told.refused.work.get() - before
    });
    let entries = node.engine.told.cache.entries_mut();
    let refused = entries.filter(|(.., entry)| entry.is_refused).count();
    assert_eq!(refused, 1, "{network:?}: the form of the second one");
    node.engine.told.cache.check();
    work
}

#[test]
fn a_service_costs_by_itself_and_not_by_the_translated_addresses_that_are_open() {
    let of_ipv4 = work_beside_open(None, 1);
    for network in TRANSLATING {
        for names in [1, 16] {
            assert_eq!(
                work_beside_open(Some(network), names),
                of_ipv4,
                "{network} {names}"
            );
        }
    }
}

/// The logical switch of a tenant's network.
fn tenants_switch(network: &str) -> LogicalSwitch {
    LogicalSwitch {
        network: Some("tenant.network".to_owned()),
        is_primary: true,
        networks: vec![network.parse().expect("a network")],
    }
}

/// What a tenant's network costs that comes, changes and goes, with so many names open at a port that is not on the
/// network.
fn work_of_a_network(names: u32) -> [usize; 3] {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    for name in 0..names {
        let told = addresses(name * 256, 256);
        node.answer("p1", &format!("n{name}.example.com"), &told, 600);
    }
    // All that is open is in the network.
    let changes = [
        Some(tenants_switch("11.0.0.0/8")),
        Some(tenants_switch("11.0.0.0/9")),
        None,
    ];
    changes.map(|switch| {
        let before = node.engine.told.refused.work.get();
        node.give(Input::Nb(NbUpdate {
            switches: vec![(RowId::new(0x15), switch)],
            ..NbUpdate::default()
        }));
        assert_eq!(node.destinations().len(), names as usize * 256);
        node.engine.told.refused.work.get() - before
    })
}

#[test]
fn a_network_of_a_tenant_costs_by_itself_and_not_by_what_others_have_open() {
    assert_eq!(work_of_a_network(1), work_of_a_network(8));
}

#[test]
fn a_network_of_a_tenant_closes_at_its_own_ports_alone_and_only_as_long_as_it_is_there() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let row = RowId::new(0x107);
    // The network is the pod's primary one before it has addresses.
    let switch = |networks: &[&str]| LogicalSwitch {
        networks: networks
            .iter()
            .map(|network| network.parse().expect("a network"))
            .collect(),
        ..tenants_switch("192.0.2.0/24")
    };
    let set = |node: &mut Node, networks: &[&str]| {
        node.give(Input::Nb(NbUpdate {
            switches: vec![(RowId::new(0x15), Some(switch(networks)))],
            ..NbUpdate::default()
        }));
    };
    set(&mut node, &[]);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(
            row,
            Some(Interface {
                network: Some("tenant.network".to_owned()),
                ..interface("ns1_udn", 7, "uid-p1")
            }),
        )],
    }));
    node.add_logical_port("udn", 7, row);
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    let open = |node: &Node| {
        let open = node.open().into_iter();
        let open = open.map(|(src, dst, _)| (src, dst));
        open.collect::<BTreeSet<_>>()
    };
    let all = open(&node);
    assert_eq!(all.len(), 4);
    let closed = |dst: &str| ("10.244.0.7".to_owned(), dst.to_owned());
    let without = |closed: &[(String, String)]| {
        let mut open = all.clone();
        open.retain(|one| !closed.contains(one));
        open
    };
    let before = node.engine.told.refused.work.get();
    set(&mut node, &["203.0.113.1/32"]);
    assert_eq!(open(&node), without(&[closed("203.0.113.1")]));
    // Two addresses of the port are looked at, and one is checked.
    assert_eq!(node.engine.told.refused.work.get() - before, 3);
    set(&mut node, &["203.0.113.2/32"]);
    assert_eq!(open(&node), without(&[closed("203.0.113.2")]));
    set(&mut node, &["203.0.113.0/24"]);
    let both = ["203.0.113.1", "203.0.113.2"].map(closed);
    assert_eq!(open(&node), without(&both));
    set(&mut node, &[]);
    assert_eq!(open(&node), all);
}

/// ovs-vswitchd tells the network of an interface later than the interface.
#[test]
fn a_port_whose_network_is_another_one_is_checked_again() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.give(Input::Nb(NbUpdate {
        switches: vec![(RowId::new(0x15), Some(tenants_switch("203.0.113.1/32")))],
        ..NbUpdate::default()
    }));
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 600);
    let row = node.pods["ns1_p1"];
    for (network, open) in [(Some("tenant.network"), 1), (None, 2)] {
        let interface = Interface {
            network: network.map(str::to_owned),
            ..interface("ns1_p1", 5, "uid-p1")
        };
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, Some(interface))],
        }));
        assert_eq!(node.destinations().len(), open, "{network:?}");
    }
}

#[test]
fn what_a_rule_denies_is_closed_wherever_it_leads() {
    let both = [
        Rule {
            ports: vec![Transport {
                protocol: Protocol::Tcp,
                port: Some(443),
            }],
            ..allow("bad.test")
        },
        deny("bad.test"),
    ];
    let mut node = Node::with(&both);
    node.answer("p1", "bad.test", &[ADDRESS], 600);
    let priorities = |node: &Node| -> BTreeSet<u16> {
        let open = node.open();
        open.iter().map(|(.., priority)| *priority).collect()
    };
    assert_eq!(priorities(&node), [10_999, 11_000].into());
    node_has(&mut node, Some(ADDRESS));
    assert_eq!(
        priorities(&node),
        [10_999].into(),
        "what denies stays, what allows goes"
    );
    node.answer("p1", "bad.test", &[[127, 0, 0, 1]], 600);
    assert!(
        node.destinations().contains("127.0.0.1"),
        "it is closed, not opened"
    );
    assert!(node.open().iter().all(|(.., priority)| *priority == 10_999));
}

/// What an agent finds after a restart, with these refusals.
fn restarted(before: &mut Node, saved: &Saved, refusals: Refusals) -> Node {
    let rules = [allow("example.com"), deny_all()];
    let config = Config {
        refusals,
        ..Config::default()
    };
    restart::after_restart_with(before, saved, &rules, config)
}

#[test]
fn after_a_restart_what_is_refused_now_is_closed() {
    let refusals = || {
        let denied = ["203.0.113.1".parse().expect("a network")];
        Refusals::new(&[], &denied, &[], &[]).expect("few networks")
    };
    let mut before = Node::with(&[allow("example.com"), deny_all()]);
    before.answer("p1", "example.com", &[ADDRESS, OTHER], 600);
    let snapshot = before.folded(&[]);
    let node = restarted(&mut before, &snapshot, refusals());
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
}

#[test]
fn the_networks_that_ovn_knows_are_not_opened() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let switch = |networks: &[&str]| LogicalSwitch {
        network: None,
        is_primary: false,
        networks: networks
            .iter()
            .map(|network| network.parse().expect("a network"))
            .collect(),
    };
    let cidr = Acl {
        matches: format!(
            "(ip4.dst == 0.0.0.0/0 && ip4.dst != 198.51.0.0/16) && inport == @{GROUP}"
        ),
        ..acl(1, &[allow("example.com"), deny_all()]).expect("an ACL")
    };
    node.give(Input::Nb(NbUpdate {
        acls: vec![(acl_row(7), Some(cidr))],
        switches: vec![(
            RowId::new(9),
            Some(switch(&["203.0.112.0/24", "203.0.113.0/24"])),
        )],
        ..NbUpdate::default()
    }));
    let networks = ["198.51.0.0/16", "203.0.112.0/23"].map(|text| text.parse().expect("a network"));
    assert!(node.reports.contains(&Report::ClusterNetworks {
        networks: networks.to_vec(),
        left_out: 0,
    }));
    node.batches();
    node.answer("p1", "example.com", &[ADDRESS, [198, 51, 100, 1]], 300);
    assert_eq!(node.batches(), []);
    let refused: Vec<_> = node.engine.refused().iter().collect();
    assert!(refused.contains(&(Refused::Cluster, 2)), "{refused:?}");
    // The switch and the rule are gone.
    node.give(Input::Nb(NbUpdate {
        acls: vec![(acl_row(7), None)],
        switches: vec![(RowId::new(9), None)],
        ..NbUpdate::default()
    }));
    node.answer("p1", "example.com", &[ADDRESS, [198, 51, 100, 1]], 300);
    assert_eq!(node.destinations().len(), 2);
}

#[test]
fn an_address_that_is_never_opened_is_counted_and_told_once() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    for _ in 0..3 {
        node.answer("p1", "example.com", &[[127, 0, 0, 1], ADDRESS], 60);
    }
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!(
        node.engine
            .refused()
            .iter()
            .map(|(_, count)| count)
            .sum::<u64>(),
        3
    );
    let told = node
        .reports
        .iter()
        .filter(|report| matches!(report, Report::AddressRefused { .. }));
    assert_eq!(told.count(), 1);
}

#[test]
fn a_table_that_is_too_large_closes_nothing() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    let before = node.destinations();
    assert!(!before.is_empty());
    for is_left_out in [true, false] {
        node.give(Input::LargeTables {
            database: "OVN_Northbound",
            tables: vec![LargeTable {
                database: "OVN_Northbound",
                table: "ACL",
                limit: "2 rows".into(),
                purpose: "tests",
                remedy: "remove rows",
                is_left_out,
            }],
        });
        assert_eq!(node.destinations(), before);
    }
    node.answer("p1", "example.com", &[OTHER], 60);
    assert!(
        node.destinations().len() > before.len(),
        "known rules go on"
    );
}
