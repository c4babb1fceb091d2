//! Addresses that the kernel opens by itself.

use std::num::NonZeroU32;

use dnsflow_common::question::Depth;

use super::{edits, limits::many, starts::edit, *};
use crate::io::input::{ClassChange, MarkChange};

const MASK: u32 = 0xffe0_0000;

fn rules() -> [Rule; 2] {
    [allow("example.com"), deny_all()]
}

fn node() -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        mark_mask: NonZeroU32::new(MASK),
        ..Config::default()
    });
    node.start(&rules())
}

/// A node whose kernel opens what is one label below `example.com`.
fn opening() -> Node {
    let mut node = node();
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    assert_eq!(
        node.kernel.classes.len(),
        0,
        "the flows are to come into force first"
    );
    node.answer("p1", "api.example.com", &[OTHER], 600);
    let classes = node.kernel.classes.keys();
    let classes: Vec<_> = classes
        .map(|(_, class)| (class.base.to_string(), class.depth, class.is_ipv6))
        .collect();
    assert_eq!(classes, [("example.com".to_owned(), Depth::Child, false)]);
    node.log.clear();
    node
}

/// An address that nobody was told before.
const FRESH: [u8; 4] = [203, 0, 113, 77];

fn is_marked(node: &Node, address: [u8; 4]) -> bool {
    let place = (ifindex_of(node.pods["ns1_p1"]), address.into());
    node.marks.contains_key(&place)
}

fn has_removed_marks(node: &Node) -> bool {
    node.log.iter().any(|command| match command {
        Command::Mark(changes) => {
            let is_removal = |change: &MarkChange| matches!(change, MarkChange::Remove { .. });
            changes.iter().any(is_removal)
        }
        _ => false,
    })
}

#[test]
fn a_further_address_of_a_class_is_open_before_the_agent_knows() {
    let mut node = opening();
    let waiting = node.waiting.insert(Default::default());
    waiting.clear();
    node.answer("p1", "cdn.example.com", &[FRESH], 600);
    assert!(is_marked(&node, FRESH), "no command was carried out");
    let waiting = node.waiting.take().expect("commands");
    assert!(
        !waiting
            .iter()
            .any(|command| matches!(command, Command::Apply { .. }))
    );
    let removed = waiting.iter().any(|command| match command {
        Command::Mark(changes) => {
            let is_removal = |change: &MarkChange| matches!(change, MarkChange::Remove { .. });
            changes.iter().any(is_removal)
        }
        _ => false,
    });
    assert!(!removed, "{waiting:?}");
    assert_eq!(node.engine.counters().addresses_opened_by_kernel, 1);
    // Names that rules may tell apart go to the agent.
    let mut node = opening();
    node.answer("p1", "a.b.example.com", &[FRESH], 600);
    node.answer("p1", "example.com", &[[203, 0, 113, 78]], 600);
    assert_eq!(node.engine.counters().addresses_opened_by_kernel, 0);
    assert!(is_marked(&node, FRESH));
}

#[test]
fn after_an_edit_the_kernel_opens_nothing_by_former_rules() {
    let mut node = opening();
    let edited = [allow("other.test"), deny_all()];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    assert_eq!(node.kernel.classes, Default::default());
    let position = |wanted: fn(&Command) -> bool| node.log.iter().position(wanted);
    let forgotten = position(|command| matches!(command, Command::ChangeClasses(_)));
    let changed = position(|command| matches!(command, Command::Apply { .. } | Command::Mark(_)));
    assert!(forgotten.is_some() && forgotten < changed, "{:?}", node.log);
    node.answer("p1", "cdn.example.com", &[FRESH], 600);
    assert!(!is_marked(&node, FRESH));
}

/// The program has looked the class up just before, and the agent hears of it later.
#[test]
fn what_the_kernel_opens_beside_an_edit_is_closed() {
    for edited in [vec![deny_all()], vec![allow("other.test"), deny_all()]] {
        let mut node = opening();
        let classes = node.kernel.classes.clone();
        node.set_firewall(&edited);
        node.set_ovn(&edited);
        node.kernel.classes = classes;
        node.answer("p1", "cdn.example.com", &[FRESH], 600);
        assert!(!is_marked(&node, FRESH), "{edited:?}");
    }
}

#[test]
fn without_its_flows_a_class_is_not_opened() {
    let mut node = opening();
    let key = node.of_rules().next().expect("a flow").clone();
    let (cookie, _) = node.switch.remove(&key).expect("it is there");
    node.switch_answers = false;
    node.give(Input::FlowLost { key, cookie });
    assert_eq!(node.kernel.classes, Default::default());
    let mut node = opening();
    node.give(Input::SwitchDown);
    assert_eq!(node.kernel.classes, Default::default());
}

#[test]
fn a_class_that_the_kernel_has_refused_or_lost_comes_with_a_later_answer() {
    let mut node = node();
    node.kernel.refuses_classes = true;
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node.answer("p1", "api.example.com", &[OTHER], 600);
    assert_eq!(node.kernel.classes, Default::default());
    node.kernel.refuses_classes = false;
    node.answer("p1", "cdn.example.com", &[FRESH], 600);
    assert_eq!(node.kernel.classes.len(), 1);
    assert!(is_marked(&node, FRESH), "the agent opens it meanwhile");
    let mut sets = node.log.iter().filter_map(|command| match command {
        Command::ChangeClasses(changes) => changes.iter().find_map(|change| match change {
            ClassChange::Set { element, .. } => Some(*element),
            ClassChange::Remove { .. } => None,
        }),
        _ => None,
    });
    let lost = sets.next_back().expect("the class");
    node.give(Input::ClassesRefused([lost].into()));
    assert_eq!(node.kernel.classes, Default::default());
    node.answer("p1", "img.example.com", &[[203, 0, 113, 78]], 600);
    assert_eq!(node.engine.counters().addresses_opened_by_kernel, 0);
    assert_eq!(node.kernel.classes.len(), 1);
}

#[test]
fn what_meets_a_limit_is_closed() {
    let mut node = opening();
    let addresses = node.engine.told.cache.limits().addresses_per_name_max;
    let told: Vec<[u8; 4]> = (0..16_u8).map(|last| [198, 51, 100, last]).collect();
    for round in 0..=addresses / told.len() {
        let told: Vec<_> = told
            .iter()
            .map(|[a, b, _, last]| [*a, *b, round as u8, *last])
            .collect();
        node.answer("p1", "many.example.com", &told, 600);
    }
    let told = node.marks.keys().filter(|(_, address)| {
        let IpAddr::V4(address) = address else {
            return false;
        };
        address.octets()[0] == 198
    });
    assert_eq!(told.count(), addresses);
}

#[test]
fn an_address_that_is_refused_is_left_to_the_agent() {
    let metadata = [169, 254, 169, 254];
    let mut node = opening();
    node.answer("p1", "meta.example.com", &[metadata], 600);
    assert!(!is_marked(&node, metadata));
    assert!(!has_removed_marks(&node), "the kernel had opened it");
    let refused = node.engine.refused().iter();
    assert_eq!(refused.map(|(_, count)| count).sum::<u64>(), 1);
}

/// A tenant's network with these pods, on which no pod of the node is.
fn network_of_another(node: &mut Node, pods: &[&str]) {
    let networks = pods.iter().map(|text| text.parse().expect("a network"));
    let switch = LogicalSwitch {
        network: Some("another.network".into()),
        is_primary: true,
        networks: networks.collect(),
    };
    node.give(Input::Nb(NbUpdate {
        switches: vec![(RowId::new(0x5175), Some(switch))],
        ..NbUpdate::default()
    }));
}

/// The networks of pods that an ACL leaves out are others, on the user-defined network of the namespace.
pub(super) fn own_networks(node: &mut Node, pods: &[&str]) {
    let excluded = pods.iter().map(|one| format!("ip4.dst != {one}"));
    let excluded: Vec<_> = excluded.collect();
    let acl = acl(1, &rules()).map(|acl| Acl {
        matches: match pods {
            [] => acl.matches,
            _ => format!(
                "(ip4.dst == 0.0.0.0/0 && {}) && inport == @a777",
                excluded.join("&&")
            ),
        },
        ..acl
    });
    node.give(Input::Nb(NbUpdate {
        acls: vec![(acl_row(7), acl)],
        ..NbUpdate::default()
    }));
}

/// A tenant chooses the addresses of its network.
#[test]
fn addresses_of_a_tenants_network_are_left_to_the_agent_for_its_own_ports_alone() {
    let mut node = opening();
    network_of_another(&mut node, &["203.0.113.0/24", "0.0.0.0/1"]);
    node.answer("p1", "cdn.example.com", &[FRESH], 600);
    assert_eq!(node.engine.counters().addresses_opened_by_kernel, 1);
    assert_eq!(node.kernel.classes.len(), 1);

    let told = |node: &mut Node, name: &str, last| {
        let address = [198, 51, 100, last];
        node.answer("p1", &format!("{name}.example.com"), &[address], 600);
        assert!(is_marked(node, address));
    };
    own_networks(&mut node, &["10.9.0.0/16", "203.0.113.0/24"]);
    assert!(!is_marked(&node, FRESH), "it is a pod's");
    for last in 1..4 {
        told(&mut node, "img", last);
        assert_eq!(node.kernel.classes, Default::default());
    }
    assert_eq!(node.engine.counters().addresses_opened_by_kernel, 1);

    // Names seldom lead to private addresses: these are left to the agent for all.
    own_networks(&mut node, &["10.9.0.0/16"]);
    told(&mut node, "doc", 4);
    assert_eq!(node.kernel.classes.len(), 1);
    told(&mut node, "new", 5);
    assert_eq!(node.engine.counters().addresses_opened_by_kernel, 2);
    node.log.clear();
    node.answer("p1", "vpn.example.com", &[[10, 9, 0, 1]], 600);
    assert!(!is_marked(&node, [10, 9, 0, 1]));
    assert!(!has_removed_marks(&node), "the kernel had opened it");
}

#[test]
fn a_pod_that_goes_takes_its_classes_along() {
    let mut node = opening();
    node.remove_interface("p1");
    assert_eq!(node.kernel.classes, Default::default());
    let changes = node.log.iter().filter_map(|command| match command {
        Command::ChangeClasses(changes) => Some(changes.clone()),
        _ => None,
    });
    let changes: Vec<_> = changes.flatten().collect();
    assert!(
        matches!(changes[..], [ClassChange::Remove { .. }]),
        "{changes:?}"
    );
}

/// A denied name leads to the address as well, so that it has flows of its own.
#[test]
fn an_address_with_flows_of_its_own_keeps_the_mark_until_they_are_there() {
    let rules = [allow("example.com"), deny("bad.test"), deny_all()];
    for is_edited in [false, true] {
        let mut node = opening();
        node.set_firewall(&rules);
        node.set_ovn(&rules);
        node.answer("p1", "api.example.com", &[OTHER], 600);
        assert_eq!(node.kernel.classes.len(), 1);
        node.answer("p1", "bad.test", &[FRESH], 600);
        assert!(!is_marked(&node, FRESH));
        let classes = node.kernel.classes.clone();
        if is_edited {
            node.set_firewall(&rules[1..]);
            node.set_ovn(&rules[1..]);
            node.kernel.classes = classes;
        }
        node.switch_answers = false;
        node.answer("p1", "cdn.example.com", &[FRESH], 600);
        assert_eq!(is_marked(&node, FRESH), !is_edited);
        node.switch_answers = true;
        node.pass(2 * COMPARE_INTERVAL);
        if !is_edited {
            assert!(!is_marked(&node, FRESH), "its flows decide");
            let port = node.engine.ports.named("ns1_p1").expect("it is there");
            let noted = node.engine.told.classes.take_beside(port, &[FRESH.into()]);
            assert!(noted.is_empty(), "nothing is left to close");
        }
    }
}

/// An edit closes what the kernel has opened by a mark beside flows, before the next reading of the marks.
#[test]
fn an_edit_closes_an_address_that_the_kernel_has_opened_beside_flows() {
    let rules = [allow("example.com"), deny("bad.test"), deny_all()];
    let mut node = opening();
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    node.answer("p1", "api.example.com", &[OTHER], 600);
    node.answer("p1", "bad.test", &[FRESH], 600);
    node.answer("p1", "cdn.example.com", &[FRESH], 600);
    assert!(is_marked(&node, FRESH));
    node.set_firewall(&rules[1..]);
    node.set_ovn(&rules[1..]);
    assert!(!is_marked(&node, FRESH));
}

/// An answer is for each port of the pod, and the flows of another one may not be in force.
#[test]
fn a_second_network_of_a_pod_takes_its_classes_away() {
    let mut node = opening();
    node.add_pod_as("p1udn", 7, "uid-p1", RowId::new(0x107));
    assert_eq!(node.kernel.classes, Default::default());
    node.answer("p1", "cdn.example.com", &[FRESH], 600);
    assert_eq!(node.kernel.classes, Default::default());
}

/// ovn-kubernetes enforces an EgressFirewall on one network of a pod, and the pod asks and connects there.
#[test]
fn a_network_without_rules_leaves_the_classes_of_the_other_one() {
    fn hold_at(node: &mut Node, ports: &[&str]) {
        let group = PortGroup {
            name: GROUP.into(),
            ports: ports.iter().map(|port| (*port).to_owned()).collect(),
        };
        let (row, _) = node.group();
        node.give(Input::Sb(SbUpdate {
            port_groups: vec![(row, Some(group))],
            ..SbUpdate::default()
        }));
    }
    let mut node = node();
    node.add_pod_as("p1udn", 7, "uid-p1", RowId::new(0x107));
    hold_at(&mut node, &["ns1_p1udn"]);
    node.answer("p1udn", "www.example.com", &[ADDRESS], 600);
    node.answer("p1udn", "api.example.com", &[OTHER], 600);
    assert_eq!(node.kernel.classes.len(), 1);
    node.answer("p1udn", "cdn.example.com", &[FRESH], 600);
    assert_eq!(node.engine.counters().addresses_opened_by_kernel, 1);
    // An answer at the port without rules is for the other one, too.
    node.answer("p1", "img.example.com", &[[203, 0, 113, 78]], 600);
    assert_eq!(node.engine.counters().addresses_opened_by_kernel, 1);
    assert_eq!(node.kernel.classes.len(), 1);
    hold_at(&mut node, &["ns1_p1", "ns1_p1udn"]);
    assert_eq!(node.kernel.classes, Default::default());
    node.answer("p1udn", "new.example.com", &[[203, 0, 113, 79]], 600);
    assert_eq!(node.kernel.classes, Default::default());
}

/// A node whose kernel opens what is one label below `example.com`, and which has told the kernel so by the first of these
/// rules. A rule denies a name that leads to [`FRESH`]: that has flows of its own.
fn opening_beside(rules: &[Rule], is_denied: bool) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        mark_mask: NonZeroU32::new(MASK),
        ..Config::default()
    });
    let mut node = node.start(rules);
    node.answer("p1", "www.example.com", &[ADDRESS], 3600);
    node.answer("p1", "api.example.com", &[OTHER], 3600);
    assert_eq!(node.kernel.classes.len(), 1);
    if is_denied {
        node.answer("p1", "bad.test", &[FRESH], 3600);
    }
    node
}

/// The kernel has opened [`FRESH`] by this mark. Returns the record of it, which the agent reads later.
fn open_fresh(node: &mut Node, mark: u32) -> (Timestamp, Vec<u8>) {
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    let bytes = node.to_pod(ifindex, answer_frame("cdn.example.com", &[FRESH], 3600));
    let until = node.now + Duration::from_secs(3660);
    node.marks
        .insert((ifindex, FRESH.into()), (mark, until, None));
    (node.now, bytes)
}

/// The kernel opens an address that has flows by a class, and then an edit narrows the rule. The record comes behind the
/// edit. The kernel may know the class again by then, by the new rule.
#[test]
fn an_address_opened_by_a_former_rule_is_closed_though_the_kernel_knows_its_class_again() {
    for class_is_back in [true, false] {
        let rules = |ports| {
            [
                many(allow("example.com"), ports),
                deny("bad.test"),
                deny_all(),
            ]
        };
        let mut node = opening_beside(&rules(2), true);
        let ifindex = ifindex_of(node.pods["ns1_p1"]);
        let former = *node.kernel.classes.values().next().expect("a class");
        let (captured_at, bytes) = open_fresh(&mut node, former);
        node.now = node.now + Duration::from_millis(5);
        edit(&mut node, &rules(1));
        if class_is_back {
            // Captured before the other one as well.
            let earlier = node.to_pod(ifindex, answer_frame("api.example.com", &[OTHER], 3600));
            node.give_frame(frame(ifindex, captured_at, &earlier));
            assert_eq!(node.kernel.classes.len(), 1);
        }
        node.give_frame(Frame {
            opened: true,
            ..frame(ifindex, captured_at, &bytes)
        });
        assert!(!is_marked(&node, FRESH), "class is back: {class_is_back}");
    }
}

/// The kernel opens an address, and just then the address becomes one of a node. The record comes behind that. A denied
/// name may lead to the address as well.
#[test]
fn an_address_that_is_refused_meanwhile_is_closed_though_it_has_flows() {
    for is_denied in [true, false] {
        let rules = [allow("example.com"), deny("bad.test"), deny_all()];
        let mut node = opening_beside(&rules, is_denied);
        let ifindex = ifindex_of(node.pods["ns1_p1"]);
        let mark = *node.kernel.classes.values().next().expect("a class");
        let (captured_at, bytes) = open_fresh(&mut node, mark);
        node.now = node.now + Duration::from_millis(1);
        let port = crate::ovn::rows::GatewayPort {
            addresses: [FRESH.into()].into(),
        };
        node.give(Input::Nb(NbUpdate {
            gateway_ports: vec![(RowId::new(0x9a7e), Some(port))],
            ..NbUpdate::default()
        }));
        node.give_frame(Frame {
            opened: true,
            ..frame(ifindex, captured_at, &bytes)
        });
        assert!(!is_marked(&node, FRESH), "denied: {is_denied}");
    }
}

/// An edit swaps two rules, so that the group of one name has the flows of the other from then on. Its rows and an answer
/// come in one turn of the agent, at the end of which its commands are carried out. The kernel opens an address by the
/// former class before that turn, or in it, behind the answer. Then the agent has the record. Returns whether the kernel
/// goes on marking.
fn is_marked_by_the_former_class(is_in_turn: bool) -> bool {
    let a = |ports| many(allow("a.test"), ports);
    let b = |ports| many(allow("b.test"), ports);
    let before = [a(2), b(1), deny("bad.test"), deny_all()];
    let edited = [b(2), a(1), deny("bad.test"), deny_all()];
    let mut node = edits::node(Some(MASK), &before);
    node.answer("p1", "www.b.test", &[[203, 0, 113, 50]], 3600);
    node.answer("p1", "www.a.test", &[ADDRESS], 3600);
    node.answer("p1", "api.a.test", &[OTHER], 3600);
    // Flows of its own.
    node.answer("p1", "bad.test", &[FRESH], 3600);
    assert_eq!(node.kernel.classes.len(), 1);
    let former = *node.kernel.classes.values().next().expect("a class");
    node.set_firewall(&edited);
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    let frame_of = |node: &Node, name: &str, address| {
        node.to_pod(ifindex, answer_frame(name, &[address], 3600))
    };
    let answer = frame_of(&node, "api.a.test", OTHER);
    let record = frame_of(&node, "cdn.a.test", FRESH);
    let step = Duration::from_micros(50);
    let before_turn = node.now;
    node.now = node.now + step;
    let until = node.now + Duration::from_secs(3660);
    node.marks
        .insert((ifindex, FRESH.into()), (former, until, None));
    for input in [
        Input::Nb(NbUpdate {
            acls: acls(&edited),
            ..NbUpdate::default()
        }),
        Input::Sb(SbUpdate {
            logical_flows: logical_flows(&edited),
            ..SbUpdate::default()
        }),
    ] {
        node.engine.handle(input, node.now);
    }
    node.now = node.now + step;
    node.engine
        .handle_frame(frame(ifindex, node.now, &answer), node.now);
    node.now = node.now + step;
    let captured_at = if is_in_turn { node.now } else { before_turn };
    assert!(
        node.kernel.classes.values().any(|mark| *mark == former),
        "no command was carried out"
    );
    let record = Frame {
        opened: true,
        ..frame(ifindex, captured_at, &record)
    };
    node.engine.handle_frame(record, node.now);
    node.obey();
    assert!(node.kernel.classes.values().all(|mark| *mark != former));
    node.marks.contains_key(&(ifindex, FRESH.into()))
}

/// A class counts from the time on at which the kernel has been told.
#[test]
fn the_kernels_mark_by_a_former_class_is_removed_though_the_class_is_back_in_the_same_turn() {
    for is_in_turn in [true, false] {
        assert!(!is_marked_by_the_former_class(is_in_turn), "{is_in_turn}");
    }
}
