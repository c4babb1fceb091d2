//! Programs of earlier agents that go on to open addresses beside a started agent.

use super::{
    edits::{config, node},
    kernel_opens::own_networks,
    limits::many,
    restart::{self, read_but_southbound, southbound, started},
    starts::{edit, is_open_at_all},
    *,
};

const WAY: Option<u32> = Some(0xffe0_0000);
const THREE_NUMBERS: Option<u32> = Some(0xc000_0000);
/// An address that the agent was never told of.
const FRESH: [u8; 4] = [203, 0, 113, 77];

/// An agent that has started with these rules after one with `former` has ended. It knows its node, and no DNS server yet:
/// the programs of the earlier agent go on. Also gives the mark of the class for which they open addresses.
fn started_beside_earlier_programs(former: &[Rule], rules: &[Rule]) -> (Node, u32) {
    started_with(true, former, rules)
}

/// The same, with the snapshot of the earlier agent or without.
fn started_with(has_snapshot: bool, former: &[Rule], rules: &[Rule]) -> (Node, u32) {
    started_after(node(WAY, former), has_snapshot, rules)
}

fn started_after(before: Node, has_snapshot: bool, rules: &[Rule]) -> (Node, u32) {
    started_by(WAY, before, has_snapshot, rules, southbound_of(rules))
}

/// The southbound database with these rules.
fn southbound_of(rules: &[Rule]) -> impl FnOnce(&mut Node) {
    |node| node.give(Input::Sb(southbound(node, rules)))
}

/// `further` gives what comes without an agent, and the southbound database.
fn started_by(
    way: Option<u32>,
    mut before: Node,
    has_snapshot: bool,
    rules: &[Rule],
    further: impl FnOnce(&mut Node),
) -> (Node, u32) {
    before.answer("p1", "www.a.test", &[ADDRESS], 3600);
    before.answer("p1", "api.a.test", &[[203, 0, 113, 3]], 3600);
    before.answer("p1", "www.b.test", &[OTHER], 3600);
    before.pass(Duration::from_secs(30));
    let mut saved = before.folded(&[]);
    if !has_snapshot {
        saved = Saved::default();
    }
    let ifindex = ifindex_of(before.pods["ns1_p1"]);
    let mut classes = before.kernel.classes.iter();
    let ((at, _), mark) = classes.next().expect("a class");
    assert_eq!((*at, classes.next()), (ifindex, None));
    let mark = *mark;
    let mut node = started(&mut before, &saved, config(way));
    node.give(Input::Resolvers(BTreeSet::new()));
    node.records_wait = true;
    let mut node = read_but_southbound(node, &before, rules);
    further(&mut node);
    node.pass(Duration::from_secs(1));
    assert!(node.engine.sources.is_ready() && !node.engine.knows_servers());
    (node, mark)
}

/// The programs of the earlier agent open an address, if they may.
fn open_by_earlier_programs(node: &mut Node, address: [u8; 4], mark: u32) {
    if node.earlier_open {
        let place = (ifindex_of(node.pods["ns1_p1"]), address.into());
        let until = node.now + Duration::from_secs(3660);
        node.marks.insert(place, (mark, until, None));
    }
}

/// For how many of the next seconds it is open.
fn seconds_open(node: &mut Node, address: [u8; 4]) -> usize {
    let seconds = (0..30).filter(|_| {
        let is_open = is_open_at_all(node, address);
        node.pass(Duration::from_secs(1));
        is_open
    });
    seconds.count()
}

fn rules() -> [Rule; 3] {
    [allow("a.test"), allow("b.test"), deny_all()]
}

#[test]
fn what_earlier_programs_open_beside_a_started_agent_stays_open_until_it_takes_over() {
    let (mut node, mark) = started_beside_earlier_programs(&rules(), &rules());
    open_by_earlier_programs(&mut node, FRESH, mark);
    assert_eq!(seconds_open(&mut node, FRESH), 30);
    // The agent has read their records, and none is of this address.
    node.records_wait = false;
    node.pass(Duration::from_secs(20));
    assert_eq!(seconds_open(&mut node, FRESH), 0);
}

/// They have opened an address before the agent started, which has not read the record.
#[test]
fn earlier_programs_go_on_beside_an_address_without_a_name() {
    let rules = rules();
    let further = |node: &mut Node| {
        let ifindex = ifindex_of(node.pods["ns1_p1"]);
        let of_class = node.marks[&(ifindex, ADDRESS.into())];
        node.marks.insert((ifindex, FRESH.into()), of_class);
        southbound_of(&rules)(node);
    };
    let (mut node, mark) = started_by(WAY, node(WAY, &rules), true, &rules, further);
    let place = (ifindex_of(node.pods["ns1_p1"]), FRESH.into());
    assert!(node.earlier_open && node.marks[&place].0 == mark);
    assert_eq!(seconds_open(&mut node, FRESH), 30);
}

/// The rule behind has the place of the deleted one, with the same ports, or with others.
#[test]
fn earlier_programs_open_nothing_by_a_rule_that_was_deleted_without_an_agent() {
    for ports in [1, 2] {
        let b = many(allow("b.test"), ports);
        let former = [many(allow("a.test"), 1), b.clone(), deny_all()];
        let (mut node, mark) = started_beside_earlier_programs(&former, &[b, deny_all()]);
        assert!(is_open_at_all(&node, OTHER) && !is_open_at_all(&node, ADDRESS));
        open_by_earlier_programs(&mut node, FRESH, mark);
        assert_eq!(seconds_open(&mut node, FRESH), 0, "{ports} ports");
    }
}

/// A rule was deleted without an agent. There are three numbers, and none of the other rules gets that of its class.
#[test]
fn earlier_programs_open_nothing_by_the_number_of_a_rule_that_is_gone() {
    let number_of = |node: &Node, address: [u8; 4]| {
        let place = (ifindex_of(node.pods["ns1_p1"]), address.into());
        node.marks.get(&place).map(|(mark, ..)| *mark)
    };
    let of_a = [&["a.test"][..], &["*.a.test"], &["a.test", "*.a.test"]];
    let of_b = [&["b.test"][..], &["*.b.test"], &["b.test", "*.b.test"]];
    for (deleted, others) in of_a.into_iter().flat_map(|a| of_b.map(|b| (a, b))) {
        let allow_all = |names: &[&str]| names.iter().map(|name| allow(name)).collect::<Vec<_>>();
        let further = vec![allow("c.test"), deny_all()];
        let rules = [allow_all(others), further].concat();
        let former = [allow_all(deleted), rules.clone()].concat();
        let before = node(THREE_NUMBERS, &former);
        let southbound = southbound_of(&rules);
        let (mut node, mark) = started_by(THREE_NUMBERS, before, true, &rules, southbound);
        open_by_earlier_programs(&mut node, FRESH, mark);
        assert_eq!(seconds_open(&mut node, FRESH), 0, "{rules:?}");
        // The group of another rule is new.
        let further = [203, 0, 113, 79];
        node.trust_server();
        node.answer("p1", "www.c.test", &[further], 3600);
        assert!(is_open_at_all(&node, OTHER) && is_open_at_all(&node, further));
        for address in [OTHER, further] {
            assert_ne!(number_of(&node, address), Some(mark), "{rules:?}");
        }
    }
}

#[test]
fn earlier_programs_open_nothing_behind_an_edit() {
    let (mut node, mark) = started_beside_earlier_programs(&rules(), &rules());
    open_by_earlier_programs(&mut node, FRESH, mark);
    edit(&mut node, &[allow("b.test"), deny_all()]);
    node.pass(Duration::from_secs(1));
    assert!(is_open_at_all(&node, OTHER));
    open_by_earlier_programs(&mut node, [203, 0, 113, 78], mark);
    for address in [FRESH, [203, 0, 113, 78]] {
        assert_eq!(seconds_open(&mut node, address), 0, "{address:?}");
    }
}

#[test]
fn earlier_programs_go_on_though_a_rule_was_added_behind_the_others_long_ago() {
    let [first, second, third] = ["b.test", "c.test", "a.test"].map(allow);
    let mut before = node(WAY, &[first.clone(), second.clone(), deny_all()]);
    let rules = [first, second, third, deny_all()];
    edit(&mut before, &rules);
    before.pass(Duration::from_secs(60));
    let (mut node, mark) = started_after(before, true, &rules);
    open_by_earlier_programs(&mut node, FRESH, mark);
    assert_eq!(seconds_open(&mut node, FRESH), 30);
}

/// Without a journal, nobody knows by which rules they do.
#[test]
fn earlier_programs_open_nothing_without_a_journal() {
    let (node, _) = started_with(false, &rules(), &rules());
    assert!(!node.earlier_open);
}

/// An agent without a journal has begun one, and was killed before it knew its ports.
#[test]
fn earlier_programs_open_nothing_by_a_journal_without_ports() {
    let rules = rules();
    let mut before = node(WAY, &rules);
    let mut killed = started(&mut before, &Saved::default(), config(WAY));
    let saved = killed.folded(&[]);
    assert!(saved.denials.is_some() && saved.ports.is_empty());
    let node = restart::started_with(&mut killed, Some(saved), config(WAY));
    let mut node = read_but_southbound(node, &before, &rules);
    southbound_of(&rules)(&mut node);
    node.pass(Duration::from_secs(1));
    assert!(!node.earlier_open);
}

#[test]
fn nothing_is_said_of_earlier_programs_that_are_gone() {
    let (mut node, _) = started_beside_earlier_programs(&rules(), &rules());
    node.records_wait = false;
    node.pass(Duration::from_secs(20));
    edit(&mut node, &[allow("b.test"), deny_all()]);
    assert!(node.earlier_open);
}

#[test]
fn earlier_programs_open_nothing_behind_a_further_refused_network() {
    let (mut node, _) = started_beside_earlier_programs(&rules(), &rules());
    assert!(node.earlier_open);
    node.give(Input::NodeAddresses(BTreeSet::from([FRESH.into()])));
    assert!(!node.earlier_open);
}

/// They leave no public network of a tenant to the agent.
#[test]
fn earlier_programs_open_nothing_behind_a_further_network_of_the_tenant() {
    let (mut node, _) = started_beside_earlier_programs(&rules(), &rules());
    own_networks(&mut node, &["198.51.100.0/24"]);
    assert!(!node.earlier_open);
}

#[test]
fn earlier_programs_go_on_beside_a_further_pod() {
    let (mut node, mark) = started_beside_earlier_programs(&rules(), &rules());
    open_by_earlier_programs(&mut node, FRESH, mark);
    node.add_pod("p2", 6);
    node.pass(Duration::from_secs(12));
    assert!(node.earlier_open && is_open_at_all(&node, FRESH));
}

/// The port group of ns2.
pub(super) const GROUP_OF_NS2: &str = "a1234567890123456789";

/// Namespace ns2 has one rule. Its logical flow is still to come.
pub(super) fn set_rule_of_ns2(node: &mut Node, rule: Rule) -> LogicalFlow {
    let of_it = [rule];
    let id = FirewallId {
        namespace: "ns2".into(),
        name: "default".into(),
    };
    node.give(Input::Firewalls(FirewallUpdate {
        reset: false,
        firewalls: vec![(id, Some(firewall(&of_it)))],
    }));
    let acl = acl(0, &of_it).expect("a rule");
    let acl = Acl {
        namespace: "ns2".into(),
        matches: acl.matches.replace(GROUP, GROUP_OF_NS2),
        ..acl
    };
    let flow = LogicalFlow {
        matches: format!("reg0[8] == 1 && ({})", acl.matches),
        stage_hint: Some(acl_row(18).prefix()),
        ..logical_flow(0, &of_it).expect("a rule")
    };
    node.give(Input::Nb(NbUpdate {
        acls: vec![(acl_row(18), Some(acl))],
        ..NbUpdate::default()
    }));
    flow
}

/// An agent that has started beside programs of an earlier one, which are not at the interface of a pod of ns2 that has
/// come meanwhile. No class of theirs is of its rules.
fn started_beside_a_pod_of_ns2() -> (Node, u32) {
    started_by(WAY, node(WAY, &rules()), true, &rules(), |node| {
        let flow = set_rule_of_ns2(node, allow("bank.test"));
        let row = RowId::new(0x109);
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, Some(interface("ns2_payroll", 9, "uid-payroll")))],
        }));
        let group = PortGroup {
            name: GROUP_OF_NS2.into(),
            ports: ["ns2_payroll".into()].into(),
        };
        let mut sb = southbound(node, &rules());
        sb.logical_flows
            .retain(|(row, _)| *row != logical_flow_row(18));
        sb.logical_flows.push((logical_flow_row(18), Some(flow)));
        sb.port_groups.push((RowId::new(0xd << 100), Some(group)));
        let binding = PortBinding {
            namespace: Some("ns2".into()),
            ..port_binding("ns2_payroll", 9)
        };
        sb.port_bindings.push((row, Some(binding)));
        node.give(Input::Sb(sb));
    })
}

#[test]
fn earlier_programs_go_on_beside_a_pod_that_has_come_in_another_namespace() {
    let (mut node, mark) = started_beside_a_pod_of_ns2();
    open_by_earlier_programs(&mut node, FRESH, mark);
    assert_eq!(seconds_open(&mut node, FRESH), 30);
}

#[test]
fn earlier_programs_go_on_behind_an_edit_for_pods_that_have_come_since() {
    for is_theirs in [false, true] {
        let (mut node, mark) = started_beside_a_pod_of_ns2();
        open_by_earlier_programs(&mut node, FRESH, mark);
        if is_theirs {
            edit(&mut node, &[allow("b.test"), deny_all()]);
        } else {
            let flow = set_rule_of_ns2(&mut node, allow("other.test"));
            node.give(Input::Sb(SbUpdate {
                logical_flows: vec![(logical_flow_row(18), Some(flow))],
                ..SbUpdate::default()
            }));
        }
        let seconds = if is_theirs { 0 } else { 30 };
        assert_eq!(seconds_open(&mut node, FRESH), seconds, "{is_theirs}");
        assert_eq!(node.earlier_open, !is_theirs);
    }
}
