//! What one answer opens, for whom, and what it does not open.

use super::{restart::southbound, *};

#[test]
fn an_answer_opens_its_addresses_for_the_pod_at_the_rules_place() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS], 300);
    assert_eq!(
        node.open(),
        [("10.244.0.5".into(), "203.0.113.1".into(), 11_000)]
    );
    let registers = |key: &FlowKey| -> Vec<_> {
        assert_eq!((key.table, key.matches.metadata), (BASE + 4, 3));
        let registers = key.matches.registers.iter();
        registers
            .map(|(register, bits)| (*register, bits.value(), bits.mask()))
            .collect()
    };
    let of_rules: Vec<_> = node.of_rules().map(registers).collect();
    assert_eq!(of_rules, [[(0, 0x100, 0x100)]]);
    let of_addresses: Vec<_> = node.of_addresses().map(registers).collect();
    assert_eq!(of_addresses, [[(14, 5, u32::MAX)]]);
    let opened = node.reports.iter().find_map(|report| match report {
        Report::Opened {
            namespace,
            port,
            name,
            rules,
            activation,
            ..
        } => Some((
            namespace.as_str(),
            port.as_str(),
            name.to_string(),
            rules.clone(),
            *activation,
        )),
        _ => None,
    });
    assert_eq!(
        opened,
        Some((
            "ns1",
            "ns1_p1",
            "www.example.com".into(),
            vec![0],
            Some(Duration::from_micros(50))
        ))
    );
}

#[test]
fn the_same_answer_again_changes_nothing() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 300);
    assert_eq!(node.batches().len(), 1);
    node.answer("p1", "www.example.com", &[OTHER, ADDRESS], 300);
    assert_eq!(node.batches(), []);
    assert_eq!(node.engine.counters().answers_known, 1);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    assert_eq!(node.batches(), [], "another name, the same flow");
}

#[test]
fn a_name_that_no_rule_mentions_opens_nothing() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    for name in ["notexample.com", "example.com.evil.test", "com"] {
        node.answer("p1", name, &[ADDRESS], 300);
    }
    assert_eq!(node.batches(), []);
    assert_eq!(node.kernel.deferred.len(), 3, "no wake-up");
    // Where there is no room for the filter, the engine sees them.
    node.kernel.no_room = true;
    node.answer("p1", "notexample.com", &[ADDRESS], 300);
    assert_eq!(node.batches(), []);
    assert_eq!(node.engine.counters().answers_unmatched, 1);
    assert_eq!(node.engine.told.cache.entries_mut().count(), 0);
}

#[test]
fn only_the_pod_that_asked_gets_the_address() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    node.answer("p2", "example.com", &[ADDRESS], 300);
    assert_eq!(
        node.open(),
        [("10.244.0.6".into(), "203.0.113.1".into(), 11_000)]
    );
}

#[test]
fn both_networks_of_a_pod_get_the_address() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    // The second interface of the same sandbox: asked on one, connected on the other.
    node.add_pod_as("p1udn", 7, "uid-p1", RowId::new(0x107));
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let sources: Vec<_> = node.open().into_iter().map(|(src, ..)| src).collect();
    assert_eq!(sources, ["10.244.0.5", "10.244.0.7"]);
}

/// Pod p1 with a second port, at 10.244.0.7, in a port group of its own: a rule allows example.com at the first port,
/// and a rule denies it at the second.
fn with_other_rules_at_a_second_port() -> Node {
    let rules = [allow("example.com"), deny("example.com")];
    let mut node = Node::with(&rules[..0]);
    node.add_pod_as("p1udn", 7, "uid-p1", RowId::new(0x107));
    node.set_firewall(&rules);
    let of_second = |text: String| text.replace(GROUP, "a1");
    let acls = [0, 1].map(|index| {
        let acl = acl(index, &rules).expect("a rule");
        let matches = match index {
            0 => acl.matches,
            _ => of_second(acl.matches),
        };
        (acl_row(index), Some(Acl { matches, ..acl }))
    });
    node.give(Input::Nb(NbUpdate {
        acls: acls.into(),
        ..NbUpdate::default()
    }));
    let logical_flows = [0, 1].map(|index| {
        let flow = logical_flow(index, &rules).expect("a rule");
        let matches = match index {
            0 => flow.matches,
            _ => of_second(flow.matches),
        };
        (
            logical_flow_row(index),
            Some(LogicalFlow { matches, ..flow }),
        )
    });
    let group = |row: u128, name: &str, port: &str| {
        let group = PortGroup {
            name: name.into(),
            ports: [port.into()].into(),
        };
        (RowId::new(row << 100), Some(group))
    };
    node.give(Input::Sb(SbUpdate {
        port_groups: vec![group(0xe, GROUP, "ns1_p1"), group(0xf, "a1", "ns1_p1udn")],
        logical_flows: logical_flows.into(),
        ..SbUpdate::default()
    }));
    node.pass(Duration::ZERO);
    node
}

#[test]
fn each_port_of_a_pod_has_what_its_own_rules_say_of_an_answer() {
    const LOOPBACK: [u8; 4] = [127, 0, 0, 1];
    let flow = |src: &str, dst: &str, priority| (src.to_owned(), dst.to_owned(), priority);
    for asker in ["p1", "p1udn"] {
        let mut node = with_other_rules_at_a_second_port();
        node.answer(asker, "example.com", &[LOOPBACK, ADDRESS], 300);
        let told = [
            flow("10.244.0.5", "203.0.113.1", 11_000),
            flow("10.244.0.7", "127.0.0.1", 10_999),
            flow("10.244.0.7", "203.0.113.1", 10_999),
        ];
        let open: BTreeSet<_> = node.open().into_iter().collect();
        assert_eq!(open, told.into(), "{asker} has asked");
        let refused = node.engine.refused().iter().map(|(_, count)| count);
        assert_eq!(refused.sum::<u64>(), 1, "{asker} has asked");
    }
    // What is denied has another limit.
    for asker in ["p1", "p1udn"] {
        let mut node = with_other_rules_at_a_second_port();
        node.answer(asker, "example.com", &addresses(0, 300), 300);
        let of = |source: &str| {
            let open = node.open().into_iter();
            open.filter(|(src, ..)| src == source).count()
        };
        assert_eq!(
            (of("10.244.0.5"), of("10.244.0.7")),
            (256, 300),
            "{asker} has asked"
        );
    }
}

#[test]
fn an_answer_to_another_pod_opens_nothing_for_the_one_that_has_its_interface_index() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let ifindex = ifindex_of(RowId::new(0x105));
    let mut of_another = answer_frame("example.com", &[ADDRESS], 300);
    // The last octet of the destination.
    of_another[33] = 99;
    node.passed(ifindex, node.now, &of_another);
    assert_eq!(node.open(), []);
    assert_eq!(node.engine.counters().frames_unknown_interface, 1);
    let of_pod = node.to_pod(ifindex, of_another);
    node.passed(ifindex, node.now, &of_pod);
    assert_ne!(node.open(), []);
}

#[test]
fn what_is_no_usable_answer_is_counted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let ifindex = ifindex_of(RowId::new(0x105));
    let good = answer_frame("example.com", &[ADDRESS], 300);
    node.frame(ifindex, &good[..20]);
    assert_eq!(node.engine.counters().frames_not_dns, 1);
    node.frame(99, &good);
    assert_eq!(node.engine.counters().frames_unknown_interface, 1);
    let mut malformed = good.clone();
    malformed[42 + 12] = 0xff;
    node.frame(ifindex, &malformed);
    assert_eq!(node.engine.counters().answers_malformed, 1);
    let mut truncated = good;
    truncated[42 + 2] |= 0x02;
    node.frame(ifindex, &truncated);
    assert_eq!(node.engine.counters().answers_unusable, 1);
    assert_eq!(node.batches(), []);
}

#[test]
fn what_a_server_has_said_counts_no_longer_than_the_server_is_trusted() {
    let resolver = |address: [u8; 4]| Resolver {
        address: address.into(),
        port: 53,
    };
    for (server, open) in [([10, 96, 0, 10], 2), ([10, 96, 0, 11], 0)] {
        let mut node = Node::with(&[allow("other.test"), deny_all()]);
        // No rule mentions it: it waits in the kernel.
        node.answer("p1", "example.com", &[ADDRESS], 300);
        assert_eq!(node.kernel.deferred.len(), 1);
        let captured_at = node.now;
        node.give(Input::Resolvers([resolver(server)].into()));
        let rules = [allow("example.com"), deny_all()];
        node.set_firewall(&rules);
        node.set_ovn(&rules);
        // It waits in the ring buffer of an earlier agent.
        let bytes = answer_frame("www.example.com", &[OTHER], 300);
        node.passed(ifindex_of(node.pods["ns1_p1"]), captured_at, &bytes);
        assert_eq!(node.destinations().len(), open, "{server:?}");
        assert!(node.kernel.deferred.is_empty());
    }
}

/// The time between an answer and an edit is no measure of the agent.
#[test]
fn what_an_edit_opens_has_no_activation() {
    for is_ovn_first in [true, false] {
        let mut node = Node::with(&[allow("other.test"), deny_all()]);
        node.answer("p1", "www.example.com", &[ADDRESS], 300);
        node.pass(Duration::from_secs(60));
        let rules = [allow("example.com"), deny_all()];
        if is_ovn_first {
            node.set_ovn(&rules);
        }
        node.set_firewall(&rules);
        node.set_ovn(&rules);
        assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
        node.answer("p1", "www.example.com", &[OTHER], 300);
        let activations = node.reports.iter().filter_map(|report| match report {
            Report::Opened { activation, .. } => Some(*activation),
            _ => None,
        });
        let activations: Vec<_> = activations.collect();
        let of_answer = Some(Duration::from_micros(50));
        // Rules that OVN enforces later are planned for the addresses that wait for them, which is not reported.
        let expected = match is_ovn_first {
            true => vec![None, of_answer],
            false => vec![of_answer],
        };
        assert_eq!(activations, expected);
    }
}

/// The number of addresses to which the packets of a pod meet a flow of the first rule.
fn closed(node: &Node) -> usize {
    let of_rule = node.open().into_iter().filter(|(.., at)| *at == 11_000);
    of_rule.map(|(_, to, _)| to).collect::<BTreeSet<_>>().len()
}

pub(super) fn truncated(name: &str, addresses: &[[u8; 4]]) -> Vec<u8> {
    let mut bytes = answer_frame(name, addresses, 60);
    bytes[42 + 2] |= 0x02;
    bytes
}

/// Its resolver may use a truncated answer.
#[test]
fn a_truncated_answer_closes_what_a_rule_denies_and_opens_nothing() {
    let mut node = Node::with(&[deny("bad.test"), allow("example.com")]);
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    node.frame(ifindex, &truncated("bad.test", &[ADDRESS, OTHER]));
    node.frame(ifindex, &truncated("example.com", &[[203, 0, 113, 9]]));
    assert_eq!((closed(&node), node.destinations().len()), (2, 2));
    assert_eq!(node.engine.counters().answers_unusable, 1);
}

#[test]
fn a_truncated_answer_closes_what_a_later_rule_denies() {
    for is_ovn_first in [true, false] {
        let mut node = Node::with(&[allow("example.com")]);
        let ifindex = ifindex_of(node.pods["ns1_p1"]);
        node.frame(ifindex, &truncated("bad.test", &[ADDRESS]));
        assert_eq!(node.kernel.deferred.len(), 1);
        let rules = [deny("bad.test"), allow("example.com")];
        if is_ovn_first {
            node.set_ovn(&rules);
        }
        node.set_firewall(&rules);
        node.set_ovn(&rules);
        assert_eq!(closed(&node), 1, "{is_ovn_first}");
    }
}

#[test]
fn a_denied_name_is_closed_however_many_octets_its_answer_stands_for() {
    let label = "a".repeat(60);
    let name = format!("{label}.{label}.{label}.{label}.bad.test");
    let mut node = Node::with(&[deny("bad.test")]);
    node.answer("p1", &name, &addresses(0, 300), 60);
    assert_eq!(closed(&node), 300);
}

#[test]
fn a_truncated_answer_before_the_rules_are_known_waits_for_them() {
    let rules = [deny("bad.test")];
    let mut node = Node::bare();
    node.trust_server();
    let row = RowId::new(0x105);
    node.pods.insert("ns1_p1".into(), row);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    node.frame(ifindex_of(row), &truncated("bad.test", &[ADDRESS]));
    assert_eq!(node.kernel.deferred.len(), 1);
    node.give(Input::SwitchUp);
    node.give(Input::Nb(NbUpdate {
        reset: true,
        acls: acls(&rules),
        ..NbUpdate::default()
    }));
    let sb = southbound(&node, &rules);
    node.give(Input::Sb(sb));
    node.give(firewalls(true, Some(firewall(&rules))));
    assert_eq!((closed(&node), node.kernel.deferred.len()), (1, 0));
}

/// Where the rules hold only for the pod's port of another network, its own port has the answer as one that is allowed.
#[test]
fn a_truncated_answer_closes_at_the_port_for_which_the_rules_hold() {
    let rules = [deny("bad.test"), deny_all()];
    let mut node = Node::with(&rules);
    node.add_pod_as("p1udn", 7, "uid-p1", RowId::new(0x107));
    let group = PortGroup {
        name: GROUP.into(),
        ports: ["ns1_p1udn".to_owned()].into(),
    };
    let (row, _) = node.group();
    node.give(Input::Sb(SbUpdate {
        port_groups: vec![(row, Some(group))],
        ..SbUpdate::default()
    }));
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    node.frame(ifindex, &truncated("bad.test", &[ADDRESS]));
    assert_eq!(closed(&node), 1);
}

/// The pod asks for all records of a denied name (type 255).
#[test]
fn a_question_of_any_type_closes_what_a_rule_denies() {
    for kind in [1, 255] {
        let mut node = Node::with(&[deny("bad.test")]);
        let mut bytes = answer_frame("bad.test", &[ADDRESS], 300);
        // Ethernet, IPv4, UDP, the DNS header and the name are before it.
        let at = 42 + 12 + "bad.test".len() + 2;
        assert_eq!(bytes[at..at + 2], [0, 1]);
        bytes[at + 1] = kind;
        let ifindex = ifindex_of(node.pods["ns1_p1"]);
        let bytes = node.to_pod(ifindex, bytes);
        node.passed(ifindex, node.now, &bytes);
        assert_eq!(node.destinations().len(), 1, "type {kind}");
    }
}
