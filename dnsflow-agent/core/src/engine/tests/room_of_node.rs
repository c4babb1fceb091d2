//! How many flows the pods of a node have together.

use std::collections::VecDeque;

use super::{
    backends::lead_to,
    edits::{ONE_NUMBER, WAYS, config, node},
    limits::many,
    restart::{read_but_southbound, read_rules, southbound, started, started_with},
    starts::{carry_out_until_dump, edit, is_open, is_open_at_all},
    *,
};
use crate::{cache::journal::Saved, values::limits::UNKNOWN_MAX};

/// Limits of the node in these tests: of names, and of flows that all addresses have of their own. Each further address
/// has two more, open ones a quarter of the first, and each denied name has one beyond.
const NAMES: usize = 1000;
const FLOWS_MAX: usize = 2 * 2 * NAMES + NAMES / 2 + NAMES / 4;

/// Five pods with their hosts.
fn five_pods() -> Vec<(u8, String)> {
    let hosts = 0x10..0x15;
    hosts.map(|host| (host, format!("pod{host}"))).collect()
}

/// Other pods fill the node.
fn fill(node: &mut Node) {
    for pod in ["p2", "p3", "p4"] {
        node.answer(pod, "bad.test", &addresses(200, 20), 600);
    }
}

/// A pod with 1,000 flows at ten addresses, if a rule denies `bad.test` with 100 ports, and three pods that have none
/// yet.
fn four_pods(way: Option<u32>, rules: &[Rule]) -> Node {
    let mut node = node(way, rules);
    node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
    for (host, pod) in [(6, "p2"), (7, "p3"), (8, "p4")] {
        node.add_pod(pod, host);
    }
    node.answer("p1", "bad.test", &addresses(100, 10), 600);
    node
}

/// Pods that were told addresses of `many.test`, too many for the node.
fn overfull(pods: &[(u8, String)], rules: &[Rule]) -> Node {
    let mut node = node(WAYS[0], rules);
    node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
    for (host, pod) in pods {
        node.add_pod(pod, *host);
        node.answer(pod, "many.test", &addresses(0, 40), 600);
    }
    node
}

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

/// The flows of all pods have a limit, beyond which an address gets few, also if it has two flows or a mark.
#[test]
fn flows_of_all_pods_have_a_limit_whichever_way_they_come() {
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
        let pods = five_pods();
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
        if flows > FLOWS_MAX {
            beyond.push(format!("{growth:?}: {before}, then {flows}"));
        }
    }
    assert_eq!(beyond, [] as [String; 0]);
}

/// All pods are there. One fills the node with few addresses, the others take their shares, and all get addresses with
/// two flows.
#[test]
fn flows_of_all_pods_have_a_limit_though_each_has_its_share_before_it_has_few() {
    const NAMES: usize = 2000;
    let rules = [
        many(allow("many.test"), 256),
        many(allow("few.test"), 2),
        deny_all(),
    ];
    let mut node = node(None, &rules);
    node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
    let pods = ["p1", "p2", "p3", "p4", "p5"];
    for (host, pod) in (6..).zip(&pods[1..]) {
        node.add_pod(pod, host);
    }
    node.answer("p1", "many.test", &addresses(0, 17), 3600);
    let alone = own(&node);
    for pod in &pods[1..] {
        node.answer(pod, "many.test", &addresses(0, 6), 3600);
    }
    let shares = own(&node);
    for pod in pods {
        for name in 0..3 {
            let told = addresses(1000 + 130 * name, 130);
            node.answer(pod, &format!("n{name}.few.test"), &told, 3600);
        }
    }
    node.pass(Duration::from_secs(5));
    let names = node.engine.told.cache.name_count();
    assert!(names <= NAMES);
    let (flows, max) = (own(&node), 2 * NAMES);
    assert!(
        flows <= 2 * max,
        "{alone}, then {shares}, then {flows}, of twice {max}"
    );
}

/// Pods with more than their shares are told further addresses, each of which has two flows.
#[test]
fn pods_with_more_than_their_shares_leave_the_last_quarter_to_others() {
    let rules = [
        many(allow("many.test"), 50),
        many(allow("few.test"), 2),
        deny_all(),
    ];
    for go_on in [true, false] {
        let mut node = node(None, &rules);
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        let pods = [(6, "p2"), (7, "p3"), (8, "p4")];
        for (host, pod) in pods {
            node.add_pod(pod, host);
            node.answer(pod, "many.test", &addresses(0, 12), 3600);
            node.pass(Duration::from_secs(5));
        }
        for (_, pod) in pods {
            for at in 0..if go_on { 2 } else { 0 } {
                let told = addresses(1000 + 100 * at, 100);
                node.answer(pod, &format!("n{at}.few.test"), &told, 3600);
            }
        }
        node.engine.told.cache.check();
        let of_few = own_of(&node, 6).into_values();
        let of_few = of_few.filter(|flows| *flows == 2).count();
        assert_eq!(of_few, if go_on { 200 } else { 0 });
        node.answer("p1", "many.test", &[ADDRESS], 3600);
        node.pass(Duration::from_secs(5));
        assert_eq!(open_addresses(&node), 1, "others go on: {go_on}");
    }
}

/// Pods come one after another, or are there at once, and each takes the share of its time.
#[test]
fn flows_of_all_pods_have_a_limit_though_pods_come_one_by_one() {
    let rules = [many(allow("many.test"), 10), deny_all()];
    let flows = |at_once: bool| {
        let mut node = node(None, &rules);
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        let pods: Vec<(u8, String)> = (0x10..0x2e)
            .map(|host| (host, format!("q{host}")))
            .collect();
        if at_once {
            for (host, pod) in &pods {
                node.add_pod(pod, *host);
            }
        }
        for (host, pod) in &pods {
            if !at_once {
                node.add_pod(pod, *host);
            }
            let share = 2 * NAMES / node.pods.len();
            let told = addresses(0, share as u32 / 10 + 1);
            node.answer(pod, "many.test", &told, 3600);
            node.pass(Duration::from_secs(1));
        }
        assert!(node.engine.told.cache.name_count() <= NAMES);
        own(&node)
    };
    let (at_once, one_by_one, max) = (flows(true), flows(false), 2 * NAMES);
    assert!(at_once <= 2 * max, "{at_once}");
    assert!(
        one_by_one <= 2 * max,
        "at once {at_once}, one by one {one_by_one}, of twice {max}"
    );
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

/// Other pods fill the node. A rule denies 50 ports, behind which all others are allowed. An edit allows one of its ports
/// before it.
#[test]
fn a_denial_that_has_not_grown_closes_no_further_port_in_a_full_node() {
    for is_filled in [true, false] {
        let rules = |is_edited: bool| {
            let mut rules = vec![many(deny("bad.test"), 100)];
            rules.extend(is_edited.then(|| many(allow("example.com"), 1)));
            rules.push(many(deny("part.test"), 50));
            rules.push(allow("example.com"));
            rules.push(deny_all());
            rules
        };
        let mut node = four_pods(None, &rules(false));
        for name in ["part.test", "example.com"] {
            node.answer("p1", name, &[ADDRESS], 3600);
        }
        assert!(is_open(&node, ADDRESS, 2));
        if is_filled {
            fill(&mut node);
        }
        edit(&mut node, &rules(true));
        node.pass(Duration::from_secs(1));
        let closes_all = node.of_rules().any(|key| {
            key.priority == 11_000 - 2
                && key.matches.transport.is_none()
                && key.matches.ends.dst() == Some(ADDRESS.into())
        });
        let is_open = is_open(&node, ADDRESS, 3);
        assert!(is_open && !closes_all, "filled: {is_filled}");
    }
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

/// The agent reads everything, with the rows of these pods.
fn read_all(node: &mut Node, before: &Node, pods: &[(u8, String)], rules: &[Rule]) {
    read_interfaces(node, before, pods, rules);
    read_bindings(node, pods, rules);
}

fn read_interfaces(node: &mut Node, before: &Node, pods: &[(u8, String)], rules: &[Rule]) {
    read_rules(node, rules);
    node.pods = before.pods.clone();
    let row = |host: u8| RowId::new(0x100 + u128::from(host));
    let interfaces = pods.iter().map(|(host, pod)| {
        let interface = interface(&format!("ns1_{pod}"), *host, &format!("uid-{pod}"));
        (row(*host), Some(interface))
    });
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: interfaces.collect(),
    }));
}

fn read_bindings(node: &mut Node, pods: &[(u8, String)], rules: &[Rule]) {
    let row = |host: u8| RowId::new(0x100 + u128::from(host));
    let bindings = pods.iter().map(|(host, pod)| {
        let binding = port_binding(&format!("ns1_{pod}"), *host);
        (row(*host), Some(binding))
    });
    node.give(Input::Sb(SbUpdate {
        reset: true,
        datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
        port_bindings: bindings.collect(),
        port_groups: vec![node.group()],
        logical_flows: logical_flows(rules),
        ..SbUpdate::default()
    }));
}

/// A pod has addresses with many flows, and another pod has filled the node since then. The agent starts anew, with the
/// snapshot or without.
#[test]
fn a_start_closes_nothing_because_another_pod_has_filled_the_node() {
    for (is_filled, has_snapshot) in [(false, true), (true, true)] {
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
        let flows = own(&before);
        let saved = match has_snapshot {
            true => before.folded(&[]),
            false => Saved::default(),
        };
        let mut node = started(&mut before, &saved, config(WAYS[0]));
        node.engine.told.cache.limits_mut().names_per_node_max = 1000;
        let pods = [(4, "p0".to_owned()), (5, "p1".to_owned())];
        read_all(&mut node, &before, &pods, &rules);
        node.pass(2 * COMPARE_INTERVAL);
        let open = open(&node);
        assert_eq!(open, told.len(), "{is_filled}, {has_snapshot}");
        assert_eq!(own(&node), flows, "{is_filled}, {has_snapshot}");
    }
}

/// An edit denies a name of more addresses than names may be denied on the node.
#[test]
fn a_start_leaves_out_no_name_that_an_edit_has_denied_beyond_the_limit() {
    let denied = |node: &Node| {
        let entries = node.folded(&[]).entries.into_iter();
        let names = entries.flat_map(|entry| entry.names);
        names.filter(|name| name.is_denied).count()
    };
    for way in WAYS {
        let rules = |first| [first, allow("good.test"), deny_all()];
        let mut before = node(way, &rules(allow("bad.test")));
        before.engine.told.cache.limits_mut().names_per_node_max = 80;
        before.add_pod("p2", 6);
        let pods = [(5, "p1".to_owned()), (6, "p2".to_owned())];
        for name in ["bad.test", "good.test"] {
            before.answer("p1", name, &addresses(0, 8), 600);
            before.answer("p2", name, &addresses(100, 20), 600);
        }
        let denying = rules(deny("bad.test"));
        edit(&mut before, &denying);
        before.pass(COMPARE_INTERVAL);
        let expected = (28, before.open());
        assert_eq!(denied(&before), expected.0);
        let saved = before.folded(&[]);
        let mut node = started_with(&mut before, Some(saved), config(way));
        node.engine.told.cache.limits_mut().names_per_node_max = 80;
        read_all(&mut node, &before, &pods, &denying);
        node.pass(2 * COMPARE_INTERVAL);
        node.engine.told.cache.check();
        assert_eq!((denied(&node), node.open()), expected, "{way:?}");
    }
}

/// How many flows addresses of a pod have of their own.
fn own_of(node: &Node, host: u8) -> BTreeMap<IpAddr, usize> {
    let mut own = BTreeMap::new();
    for key in node.of_rules() {
        if key.matches.ends.src() == IpAddr::from([10, 244, 0, host])
            && let Some(dst) = key.matches.ends.dst()
        {
            *own.entry(dst).or_default() += 1;
        }
    }
    own
}

/// The rule of many addresses has moved while no agent ran. Addresses that are planned before the node is full keep their
/// flows as well.
#[test]
fn a_start_behind_an_edit_closes_nothing_in_a_full_node() {
    for (is_edited, is_filled) in [(true, true), (false, true), (true, false), (false, false)] {
        let rules = [many(allow("many.test"), 50), deny_all()];
        let moved = [allow("new.test"), many(allow("many.test"), 50), deny_all()];
        let mut before = node(WAYS[0], &rules);
        // Its interface is the first one.
        before.add_pod("p0", 4);
        before.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        before.answer("p1", "many.test", &addresses(0, 30), 600);
        if is_filled {
            before.answer("p0", "many.test", &addresses(1000, 40), 600);
        }
        let whole = |node: &Node| {
            let own = own_of(node, 5).into_values();
            own.filter(|flows| *flows == 50).count()
        };
        assert_eq!(whole(&before), 30);
        let saved = before.folded(&[]);
        let mut node = started(&mut before, &saved, config(WAYS[0]));
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        let pods = [(4, "p0".to_owned()), (5, "p1".to_owned())];
        let rules = if is_edited { &moved[..] } else { &rules[..] };
        read_all(&mut node, &before, &pods, rules);
        node.pass(2 * COMPARE_INTERVAL);
        assert_eq!(whole(&node), 30, "edited: {is_edited}, filled: {is_filled}");
    }
}

/// The kernel takes no marks, and so an address has flows of its own. The agent starts anew.
#[test]
fn a_start_closes_nothing_in_a_full_node_though_marks_are_refused() {
    for is_filled in [true, false] {
        let rules = [
            many(deny("bad.test"), 100),
            many(allow("example.com"), 50),
            deny_all(),
        ];
        let mut before = four_pods(WAYS[1], &rules);
        before.refuses_marks = true;
        before.answer("p1", "example.com", &[ADDRESS], 3600);
        before.pass(Duration::from_secs(5));
        if is_filled {
            fill(&mut before);
        }
        assert!(is_open(&before, ADDRESS, 1) && before.marks.is_empty());
        let saved = before.folded(&[]);
        let mut node = started(&mut before, &saved, config(WAYS[1]));
        node.refuses_marks = true;
        let pods = [(6, "p2"), (7, "p3"), (8, "p4"), (5, "p1")];
        let pods = pods.map(|(host, pod)| (host, pod.to_owned()));
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        read_all(&mut node, &before, &pods, &rules);
        node.pass(2 * COMPARE_INTERVAL);
        assert!(is_open(&node, ADDRESS, 1), "filled: {is_filled}");
    }
}

/// Four pods that fill the node, with their hosts. A start plans them first.
const OTHERS: [(u8, &str); 4] = [(1, "p2"), (2, "p3"), (3, "p4"), (4, "p5")];

/// The kernel has no room for marks, and so 20 addresses of a pod have flows of their own. Other pods fill the node with
/// such addresses, or do not.
fn without_marks(is_filled: bool, rules: &[Rule]) -> Node {
    let mut node = node(WAYS[1], rules);
    node.refuses_marks = true;
    node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
    node.answer("p1", "many.test", &addresses(0, 20), 3600);
    node.pass(Duration::from_secs(5));
    for (host, pod) in OTHERS {
        node.add_pod(pod, host);
        if is_filled {
            node.answer(pod, "many.test", &addresses(0, 20), 3600);
        }
    }
    node.pass(Duration::from_secs(90));
    assert_eq!(open_addresses(&node), 20);
    node
}

/// How many addresses of the first pod have all of their 50 flows.
fn open_addresses(node: &Node) -> usize {
    let own = own_of(node, 5).into_values();
    own.filter(|flows| *flows == 50).count()
}

/// The next agent starts with the snapshot of the one before it.
fn next_agent(before: &mut Node, way: Option<u32>, pods: &[(u8, &str)], rules: &[Rule]) -> Node {
    let saved = before.folded(&[]);
    next_agent_with(before, saved, way, pods, rules)
}

fn next_agent_with(
    before: &mut Node,
    saved: Saved,
    way: Option<u32>,
    pods: &[(u8, &str)],
    rules: &[Rule],
) -> Node {
    let refuses_marks = before.refuses_marks;
    let mut node = started(before, &saved, config(way));
    node.refuses_marks = refuses_marks;
    node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
    let pods: Vec<(u8, String)> = pods
        .iter()
        .map(|(host, pod)| (*host, (*pod).to_owned()))
        .collect();
    read_all(&mut node, before, &pods, rules);
    node
}

/// The flows of many addresses go for marks at a start, and the kernel refuses these. The switch has the flows until then,
/// and so they count.
#[test]
fn a_start_closes_nothing_in_a_full_node_though_many_marks_are_refused() {
    let rules = [many(allow("many.test"), 50), deny_all()];
    for is_filled in [true, false] {
        let mut before = without_marks(is_filled, &rules);
        let pods = [&OTHERS[..], &[(5, "p1")]].concat();
        let mut node = next_agent(&mut before, WAYS[1], &pods, &rules);
        node.pass(2 * COMPARE_INTERVAL);
        node.engine.told.cache.check();
        assert_eq!(open_addresses(&node), 20, "filled: {is_filled}");
    }
}

/// With a kernel that takes marks again, flows go for marks, and leave their room to others.
#[test]
fn flows_of_an_earlier_run_count_until_the_kernel_has_marks_in_their_place() {
    let rules = [many(allow("many.test"), 50), deny_all()];
    let mut before = without_marks(false, &rules);
    before.refuses_marks = false;
    let mut node = next_agent(&mut before, WAYS[1], &[(5, "p1")], &rules);
    node.pass(2 * COMPARE_INTERVAL);
    node.engine.told.cache.check();
    assert_eq!((node.marks.len(), open_addresses(&node)), (20, 0));
    let flows = node.engine.flow_count();
    assert!(flows < 2 * 50, "{flows}");
}

/// The logical port of the pod goes and comes back.
#[test]
fn a_logical_port_that_comes_back_has_its_ports_though_marks_are_refused() {
    let rules = [many(allow("many.test"), 50), deny_all()];
    for is_filled in [true, false] {
        let mut node = without_marks(is_filled, &rules);
        let row = node.remove_logical_port("p1");
        node.pass(Duration::from_secs(1));
        node.add_logical_port("p1", 5, row);
        node.pass(Duration::from_secs(25));
        node.engine.told.cache.check();
        assert_eq!(open_addresses(&node), 20, "filled: {is_filled}");
    }
}

/// What happens to an address with the only number, whose pod has no flows of its own.
#[derive(Clone, Copy, Debug)]
enum Happens {
    /// The agent starts anew, and another plan gets the number.
    Start,
    /// A name of another allowed rule leads to the address as well.
    FurtherName,
    /// An edit adds a port to the rule.
    Edit,
    /// A rule comes to deny a name of the address.
    Denial,
}

/// Other pods fill the node with flows, or do not.
#[test]
fn a_marked_address_of_a_full_node_does_not_close_though_no_number_is_left() {
    let rules = |ports| {
        [
            many(allow("many.test"), ports),
            many(allow("few.test"), 2),
            many(deny("bad.test"), 1),
            many(allow("wide.test"), 120),
            deny_all(),
        ]
    };
    let mut closed = Vec::new();
    for happens in [
        Happens::Start,
        Happens::FurtherName,
        Happens::Edit,
        Happens::Denial,
    ] {
        for is_filled in [true, false] {
            let mut node = node(ONE_NUMBER, &rules(50));
            node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
            node.answer("p1", "many.test", &[ADDRESS], 3600);
            node.pass(Duration::from_secs(5));
            assert_eq!((node.marks.len(), own(&node)), (1, 0));
            for (host, pod) in OTHERS {
                node.add_pod(pod, host);
                let told = if is_filled { 20 } else { 1 };
                node.answer(pod, "wide.test", &addresses(0, told), 3600);
            }
            node.pass(Duration::from_secs(5));
            match happens {
                Happens::Start => {
                    let saved = node.folded(&[]);
                    let pods = [&OTHERS[..], &[(5, "p1")]].concat();
                    node = next_agent_with(&mut node, saved, ONE_NUMBER, &pods, &rules(50));
                    node.pass(2 * COMPARE_INTERVAL);
                }
                Happens::FurtherName => node.answer("p1", "few.test", &[ADDRESS], 3600),
                Happens::Edit => edit(&mut node, &[&rules(50)[..], &[allow("test")]].concat()),
                Happens::Denial => node.answer("p1", "bad.test", &[ADDRESS], 3600),
            }
            node.pass(COMPARE_INTERVAL);
            node.engine.told.cache.check();
            let own = own_of(&node, 5);
            let own = own.get(&IpAddr::from(ADDRESS)).copied().unwrap_or_default();
            if own < 50 || !is_open(&node, ADDRESS, 0) {
                closed.push(format!("{happens:?}, filled: {is_filled}, flows: {own}"));
            }
        }
    }
    assert_eq!(closed, [] as [String; 0]);
}

/// A rule for all ports comes to be one for some.
#[test]
fn ports_of_a_rule_for_all_ports_stay_open_in_a_full_node_when_it_lists_them() {
    let rules = |ports| {
        let opens = match ports {
            0 => allow("example.com"),
            ports => many(allow("example.com"), ports),
        };
        [opens, many(allow("wide.test"), 120), deny_all()]
    };
    for is_filled in [true, false] {
        let mut node = node(None, &rules(0));
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        node.answer("p1", "example.com", &[ADDRESS], 3600);
        for (host, pod) in OTHERS {
            node.add_pod(pod, host);
            let told = if is_filled { 20 } else { 1 };
            node.answer(pod, "wide.test", &addresses(0, told), 3600);
        }
        edit(&mut node, &rules(40));
        node.pass(Duration::from_secs(1));
        node.engine.told.cache.check();
        let own = own_of(&node, 5);
        assert_eq!(own.get(&ADDRESS.into()), Some(&40), "filled: {is_filled}");
        // A further address has two at most.
        node.answer("p1", "example.com", &[OTHER], 3600);
        let own = own_of(&node, 5);
        assert_eq!(own.contains_key(&OTHER.into()), !is_filled);
    }
}

/// Without numbers, marks come to be flows: of no more than a quarter beyond the limit of the node. Each edit adds a
/// pattern, so that the addresses have another group.
#[test]
fn flows_of_all_pods_have_a_limit_though_marks_come_to_be_flows() {
    let rules = |further: &[&str]| {
        let further = further.iter().map(|name| allow(name));
        let own = [many(allow("many.test"), 100)];
        further.chain(own).chain([deny_all()]).collect::<Vec<_>>()
    };
    let mut node = node(Some(0xe000_0000), &rules(&[]));
    node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
    for (host, pod) in five_pods() {
        node.add_pod(&pod, host);
        node.answer(&pod, "many.test", &addresses(0, 40), 600);
    }
    node.pass(Duration::from_secs(5));
    assert_eq!((node.marks.len(), own(&node)), (200, 0));
    for further in [&["test"][..], &["*.test"], &["test", "*.test"]] {
        edit(&mut node, &rules(further));
        node.pass(Duration::from_secs(5));
        node.engine.told.cache.check();
        let flows = own(&node);
        assert!(flows > 0 && flows <= FLOWS_MAX, "{flows}");
    }
}

/// A rule has moved while no agent ran. With room for all flows or not, the first comparison removes and adds them in
/// parts.
#[test]
fn the_first_comparison_of_a_full_node_removes_no_more_flows_than_it_looks_at() {
    let rules = [many(deny("many.test"), 256), deny_all()];
    let moved = [allow("new.test"), many(deny("many.test"), 256), deny_all()];
    for names in [40_000, 1_000_000] {
        let mut before = node(WAYS[0], &rules);
        before.engine.told.cache.limits_mut().addresses_per_port_max = 100_000;
        for part in 0..4 {
            let told = addresses(1000 * part, 228);
            before.answer("p1", "many.test", &told, 3600);
            before.pass(Duration::from_secs(1));
        }
        let all = own(&before);
        let saved = before.folded(&[]);
        let mut node = started(&mut before, &saved, config(WAYS[0]));
        let limits = node.engine.told.cache.limits_mut();
        (limits.addresses_per_port_max, limits.names_per_node_max) = (100_000, names);
        let pods = [(5, "p1".to_owned())];
        read_interfaces(&mut node, &before, &pods, &moved);
        node.waiting = Some(VecDeque::new());
        read_bindings(&mut node, &pods, &moved);
        carry_out_until_dump(&mut node);
        node.log.clear();
        assert!(node.carry_out_next());
        let waiting = node.waiting.take().expect("commands wait");
        let mut changes = waiting.iter().flat_map(|command| match command {
            Command::Apply { changes, .. } => &changes[..],
            _ => &[],
        });
        let is_removal = |change: &&FlowChange| {
            matches!(change, FlowChange::Delete(..)) && !is_for_sentinel(change)
        };
        let removed = changes.by_ref().filter(is_removal).count();
        assert!(removed > 0 && removed <= UNKNOWN_MAX, "{removed} of {all}");
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

/// A pod with many flows has room for eight at a further address, and for no more where the node is full.
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

/// Addresses of a rule with many ports have marks, which are no flows. Then a denied name leads to them, or an edit
/// denies their name.
#[test]
fn flows_of_all_pods_have_a_limit_though_they_were_marks() {
    let mut beyond = Vec::new();
    for way in WAYS {
        for is_edited in [false, true] {
            let mut node = node(way, &[deny("bad.test"), many(allow("many.test"), 100)]);
            node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
            let told = addresses(0, 40);
            for (host, pod) in five_pods() {
                node.add_pod(&pod, host);
                node.answer(&pod, "many.test", &told, 600);
            }
            node.pass(Duration::from_secs(1));
            let before = own(&node);
            if is_edited {
                let rules = [many(deny("many.test"), 1), many(allow("many.test"), 100)];
                edit(&mut node, &rules);
            } else {
                for (_, pod) in five_pods() {
                    node.answer(&pod, "bad.test", &told, 600);
                }
            }
            node.pass(Duration::from_secs(1));
            node.engine.told.cache.check();
            let flows = own(&node);
            if flows > FLOWS_MAX {
                beyond.push(format!(
                    "{way:?}, edited: {is_edited}: {before}, then {flows}"
                ));
            }
        }
    }
    assert_eq!(beyond, [] as [String; 0]);
}

/// A mark is no flow of the address, and its group has room for all of its flows, however full the node is.
#[test]
fn a_further_address_has_all_of_its_ports_by_a_mark_in_a_full_node() {
    let rules = [
        many(deny("bad.test"), 100),
        many(allow("many.test"), 50),
        deny_all(),
    ];
    let mut node = four_pods(WAYS[1], &rules);
    fill(&mut node);
    node.answer("p1", "many.test", &addresses(0, 40), 600);
    node.pass(Duration::from_secs(1));
    let open = addresses(0, 40).into_iter();
    let open = open.filter(|address| is_open(&node, *address, 1));
    assert_eq!(open.count(), 40);
}

/// A Service of another tenant leads to the address. Flows would hold also behind the load balancer, but have no room.
#[test]
fn a_service_of_another_tenant_closes_no_new_address_in_a_full_node() {
    let rules = [
        many(deny("bad.test"), 100),
        many(allow("example.com"), 50),
        deny_all(),
    ];
    for (is_filled, has_service) in [(true, true), (true, false), (false, true)] {
        let mut node = four_pods(WAYS[1], &rules);
        if is_filled {
            fill(&mut node);
        }
        if has_service {
            lead_to(&mut node, 1, &[ADDRESS]);
        }
        node.answer("p1", "example.com", &[ADDRESS], 3600);
        node.pass(2 * COMPARE_INTERVAL);
        assert!(is_open(&node, ADDRESS, 1), "{is_filled} {has_service}");
    }
}

/// Pods with addresses of many flows, most of which had no room on the node. The agent starts anew.
#[test]
fn a_start_brings_no_more_flows_than_the_node_may_have() {
    let rules = [many(deny("many.test"), 100)];
    let pods = five_pods();
    let mut before = overfull(&pods, &rules);
    before.pass(Duration::from_secs(1));
    let closed = |node: &Node| {
        let all_ports = node
            .of_rules()
            .filter(|key| key.matches.transport.is_none());
        all_ports.count()
    };
    let (flows, closed_before) = (own(&before), closed(&before));
    assert!(flows <= FLOWS_MAX, "{flows}");
    for _ in 0..3 {
        let saved = before.folded(&[]);
        let mut node = started(&mut before, &saved, config(WAYS[0]));
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        read_all(&mut node, &before, &pods, &rules);
        node.pass(2 * COMPARE_INTERVAL);
        node.engine.told.cache.check();
        assert!(own(&node) <= FLOWS_MAX, "{}", own(&node));
        // An address with all of its flows keeps them.
        assert!(closed(&node) <= closed_before, "{}", closed(&node));
        before = node;
    }
}

/// Until the first comparison has ended, the agent does not plan flows without end for the names of the snapshot.
#[test]
fn a_start_plans_no_more_flows_than_the_node_may_have() {
    let rules = [many(deny("many.test"), 100)];
    let pods = five_pods();
    let mut before = overfull(&pods, &rules);
    let saved = before.folded(&[]);
    let mut node = started(&mut before, &saved, config(WAYS[0]));
    node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
    node.switch_answers = false;
    read_all(&mut node, &before, &pods, &rules);
    let planned = node.engine.flow_count();
    assert!(planned > 0 && planned <= FLOWS_MAX, "{planned}");
}

/// A pod has more flows than it has room for. The agent starts anew, and plans its addresses in another order.
#[test]
fn a_start_closes_nothing_because_the_pod_has_many_flows() {
    const ADDRESSES: u32 = 64;
    let rules = [many(allow("many.test"), 50), deny_all()];
    let mut before = node(WAYS[0], &rules);
    before.engine.told.cache.limits_mut().addresses_per_port_max = ADDRESSES as usize;
    before.answer("p1", "many.test", &addresses(0, ADDRESSES), 600);
    let open = before.destinations();
    assert!(!open.is_empty() && open.len() < ADDRESSES as usize);
    let saved = before.folded(&[]);
    let mut node = started(&mut before, &saved, config(WAYS[0]));
    let limits = node.engine.told.cache.limits_mut();
    limits.addresses_per_port_max = ADDRESSES as usize;
    let mut node = read_but_southbound(node, &before, &rules);
    node.give(Input::Sb(southbound(&node, &rules)));
    node.pass(2 * COMPARE_INTERVAL);
    assert_eq!(node.destinations(), open);
}

/// A flow in which a rule closes all ports is there without room, and keeps no flow of another rule for all ports.
#[test]
fn edits_of_a_closed_address_bring_no_flows_without_end() {
    let rules = |allowed| {
        let mut rules = vec![many(deny("bad.test"), 100)];
        rules.extend(vec![allow("example.com"); allowed]);
        rules.push(many(deny("example.com"), 3));
        rules
    };
    let mut node = four_pods(WAYS[0], &rules(0));
    fill(&mut node);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    for allowed in 1..8 {
        edit(&mut node, &rules(allowed));
        node.pass(Duration::from_secs(1));
        let keys = node.of_rules();
        let flows = keys.filter(|key| key.matches.ends.dst() == Some(ADDRESS.into()));
        let (flows, most) = (flows.count(), 2 + 1);
        assert!(flows <= most, "{allowed} rules: {flows} of {most}");
    }
}

/// Three rules open an address, and the flows of the first do not fit. Other pods fill the node, and an edit moves the
/// rules.
#[test]
fn open_ports_do_not_close_because_other_pods_have_filled_the_node() {
    for is_filled in [false, true] {
        let denied = || many(deny("bad.test"), 100);
        let of_names = || {
            [
                many(allow("a.test"), 100),
                many(allow("b.test"), 80),
                many(allow("c.test"), 80),
            ]
        };
        let [a, b, c] = of_names();
        let rules = [denied(), allow("former.test"), a, b, c, deny_all()];
        let mut node = four_pods(None, &rules);
        for name in ["a.test", "b.test", "c.test"] {
            node.answer("p1", name, &[ADDRESS], 600);
        }
        let open =
            |node: &Node, from: u16| [0, 1, 2].map(|place| is_open(node, ADDRESS, from + place));
        assert_eq!(open(&node, 2), [false, true, true]);
        if is_filled {
            fill(&mut node);
        }
        // The flows of the others stay where they are.
        let mut moved = rules.to_vec();
        moved.insert(1, allow("new.test"));
        edit(&mut node, &moved);
        node.pass(Duration::from_secs(1));
        assert_eq!(open(&node, 3), [false, true, true], "filled: {is_filled}");
    }
}

/// Other pods fill the node. An edit adds a port to a rule, or a name of another rule comes to lead to the address.
#[test]
fn an_open_address_of_a_full_node_does_not_close_because_it_would_have_one_flow_more() {
    let mut closed = Vec::new();
    for way in WAYS {
        for is_edited in [true, false] {
            for (ports, is_filled) in [1, 2, 50]
                .map(|ports| [(ports, false), (ports, true)])
                .concat()
            {
                let rules = |ports| {
                    [
                        many(deny("bad.test"), 100),
                        many(allow("example.com"), ports),
                        many(allow("other.test"), 1),
                        deny_all(),
                    ]
                };
                let mut node = four_pods(way, &rules(ports));
                node.answer("p1", "example.com", &[ADDRESS], 600);
                node.pass(Duration::from_secs(1));
                assert!(is_open(&node, ADDRESS, 1));
                if is_filled {
                    fill(&mut node);
                }
                match is_edited {
                    true => edit(&mut node, &rules(ports + 1)),
                    false => node.answer("p1", "other.test", &[ADDRESS], 600),
                }
                node.pass(Duration::from_secs(1));
                if !is_open(&node, ADDRESS, 1) {
                    let marks = way.is_some();
                    let by = format!("marks: {marks}, edited: {is_edited}, {ports} ports");
                    closed.push(format!("{by}, filled: {is_filled}"));
                }
            }
        }
    }
    assert_eq!(closed, [] as [String; 0]);
}

/// The kernel has refused the mark of an address a while ago, which has flows of its own since. When its group is in
/// force, a further name has its mark tried again, and the kernel refuses it again. Other pods have filled the node.
#[test]
fn a_mark_that_is_refused_again_does_not_close_an_open_address_of_a_full_node() {
    for is_filled in [false, true] {
        let rules = [
            many(deny("bad.test"), 100),
            many(allow("example.com"), 50),
            deny_all(),
        ];
        let mut node = four_pods(WAYS[1], &rules);
        node.refuses_marks = true;
        node.answer("p1", "example.com", &[ADDRESS], 3600);
        node.pass(Duration::from_secs(70));
        if is_filled {
            fill(&mut node);
        }
        assert!(is_open(&node, ADDRESS, 1));
        for name in ["a", "b", "c"] {
            node.answer("p1", &format!("{name}.example.com"), &[ADDRESS], 3600);
            node.pass(Duration::from_secs(5));
            assert!(is_open(&node, ADDRESS, 1), "{name}, filled: {is_filled}");
        }
    }
}

/// An address has flows of its own because the kernel has refused its mark. Other pods fill the node, and an edit adds a
/// port.
#[test]
fn an_address_that_is_cut_keeps_its_ports_when_its_mark_is_refused_again() {
    for is_filled in [true, false] {
        let rules = |ports| {
            [
                many(deny("bad.test"), 100),
                many(allow("example.com"), ports),
                deny_all(),
            ]
        };
        let mut node = four_pods(WAYS[1], &rules(50));
        node.refuses_marks = true;
        node.answer("p1", "example.com", &[ADDRESS], 3600);
        node.pass(Duration::from_secs(70));
        assert!(is_open(&node, ADDRESS, 1) && node.marks.is_empty());
        if is_filled {
            fill(&mut node);
        }
        edit(&mut node, &rules(51));
        node.pass(Duration::from_secs(1));
        assert!(is_open(&node, ADDRESS, 1), "filled: {is_filled}");
        for _ in 0..2 {
            node.answer("p1", "example.com", &[ADDRESS], 3600);
            node.pass(Duration::from_secs(5));
        }
        assert!(is_open(&node, ADDRESS, 1), "filled: {is_filled}");
    }
}

/// The logical port of a pod goes and comes back, with another pod's flows in the node.
#[test]
fn an_address_has_its_ports_again_when_its_logical_port_comes_back_in_a_full_node() {
    for is_filled in [true, false] {
        let rules = [many(allow("many.test"), 50), deny_all()];
        let mut node = node(WAYS[0], &rules);
        node.add_pod("p0", 4);
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        node.answer("p1", "many.test", &addresses(0, 30), 3600);
        let fill = |node: &mut Node| {
            if is_filled {
                node.answer("p0", "many.test", &addresses(1000, 40), 3600);
            }
        };
        fill(&mut node);
        let before = own(&node);
        let whole = |node: &Node| {
            let own = own_of(node, 5).into_values();
            own.filter(|flows| *flows == 50).count()
        };
        assert_eq!(whole(&node), 30);
        let row = node.remove_logical_port("p1");
        node.pass(Duration::from_secs(1));
        assert_eq!(whole(&node), 0);
        // Nobody gets the room meanwhile.
        fill(&mut node);
        node.add_logical_port("p1", 5, row);
        node.pass(Duration::from_secs(5));
        node.engine.told.cache.check();
        assert_eq!((whole(&node), own(&node)), (30, before), "{is_filled}");
    }
}

/// The same with addresses by marks, where the kernel has no room for further marks.
#[test]
fn marked_addresses_have_their_ports_again_when_their_logical_port_comes_back_in_a_full_node() {
    for is_filled in [true, false] {
        let rules = [many(allow("many.test"), 50), deny_all()];
        let mut node = node(WAYS[1], &rules);
        for host in 6..10 {
            node.add_pod(&format!("p{host}"), host);
        }
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        node.answer("p1", "many.test", &addresses(0, 10), 3600);
        node.pass(Duration::from_secs(30));
        assert_eq!((node.marks.len(), own(&node)), (10, 0));
        node.refuses_marks = true;
        for host in (6..10).filter(|_| is_filled) {
            node.answer(&format!("p{host}"), "many.test", &addresses(1000, 40), 3600);
            node.pass(Duration::from_secs(5));
        }
        let row = node.remove_logical_port("p1");
        node.pass(Duration::from_secs(1));
        node.add_logical_port("p1", 5, row);
        node.pass(Duration::from_secs(25));
        node.engine.told.cache.check();
        let own = own_of(&node, 5).into_values();
        let whole = own.filter(|flows| *flows == 50).count();
        assert_eq!(whole, 10, "filled: {is_filled}");
    }
}

/// A pod has more flows than usual, and the only number is another address's. Its addresses, of which some have no room,
/// have no mark to come.
#[test]
fn a_repeated_answer_plans_nothing_for_addresses_that_get_no_mark() {
    for way in [ONE_NUMBER, WAYS[0]] {
        let rules = [
            many(allow("a.test"), 1),
            many(allow("few.test"), 2),
            many(allow("many.test"), 200),
            deny_all(),
        ];
        let mut node = node(way, &rules);
        node.engine.told.cache.limits_mut().addresses_per_port_max = 250;
        node.answer("p1", "a.test", &[OTHER], 3600);
        let told = addresses(0, 100);
        for name in ["few.test", "many.test", "many.test", "many.test"] {
            node.answer("p1", name, &told, 3600);
            node.pass(Duration::from_secs(40));
        }
        node.engine.told.plans.planner().take_planned();
        node.answer("p1", "many.test", &told, 3600);
        let planned = node.engine.told.plans.planner().take_planned();
        assert_eq!(planned, 0, "{way:?}");
    }
}

/// A pod has all groups that it may have, and further addresses without a mark, which are cut. Another pod may get a
/// group. Returns how many plans a repeated answer of 50 addresses makes.
fn plans_of_a_repeated_answer(another_gets_a_group: bool) -> usize {
    const OF_PORT: u32 = 8;
    let mut rules: Vec<Rule> = (0..OF_PORT)
        .map(|at| many(allow(&format!("n{at}.test")), 2))
        .collect();
    rules.push(many(allow("many.test"), 200));
    rules.push(many(allow("other.test"), 5));
    rules.push(deny_all());
    let mut node = node(WAYS[1], &rules);
    node.add_pod("p2", 6);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 700;
    let all = addresses(0, 1 << OF_PORT);
    for _ in 0..6 {
        for at in 0..OF_PORT {
            let told = (1_u32..).zip(&all[1..]);
            let told = told.filter(|(number, _)| number >> at & 1 == 1);
            let told: Vec<[u8; 4]> = told.map(|(_, address)| *address).collect();
            node.answer("p1", &format!("n{at}.test"), &told, 36_000);
        }
        node.pass(Duration::from_secs(100));
    }
    node.answer("p1", "other.test", &[ADDRESS], 36_000);
    let fresh = addresses(10_000, 50);
    for name in ["n0.test", "many.test", "many.test"] {
        node.answer("p1", name, &fresh, 36_000);
        node.pass(Duration::from_secs(1));
    }
    if another_gets_a_group {
        node.answer("p2", "other.test", &[OTHER], 3600);
    }
    node.engine.told.plans.planner().take_planned();
    node.answer("p1", "many.test", &fresh, 36_000);
    node.engine.told.plans.planner().take_planned()
}

/// The number of changes of all groups decides, although the pod has no more groups.
#[test]
fn a_repeated_answer_plans_nothing_because_another_pod_gets_a_group() {
    for another_gets_a_group in [true, false] {
        let planned = plans_of_a_repeated_answer(another_gets_a_group);
        assert_eq!(planned, 0, "another gets a group: {another_gets_a_group}");
    }
}

/// An address that a rule denies has few flows of its own in a full node. The denial ends, and with the next answer the
/// mark brings the others back.
#[test]
fn an_address_that_is_not_denied_any_more_has_all_ports_by_its_mark() {
    let rules = |is_denied| {
        let other = if is_denied { deny } else { allow };
        [
            many(deny("bad.test"), 100),
            many(other("other.test"), 1),
            many(allow("example.com"), 50),
            deny_all(),
        ]
    };
    let mut node = four_pods(WAYS[1], &rules(true));
    fill(&mut node);
    for name in ["other.test", "example.com"] {
        node.answer("p1", name, &[ADDRESS], 600);
        node.pass(Duration::from_secs(1));
    }
    assert!(!is_open(&node, ADDRESS, 2) && is_open_at_all(&node, ADDRESS));
    edit(&mut node, &rules(false));
    node.pass(Duration::from_secs(1));
    node.answer("p1", "example.com", &[ADDRESS], 600);
    assert!(is_open(&node, ADDRESS, 2));
}

/// An edit gives one rule more ports, and the one that fills the node fewer. The pod whose rule grows is planned before
/// the others, or behind them.
#[test]
fn an_edit_that_makes_room_opens_all_ports_whoever_is_planned_first() {
    let rules = |ports, others| {
        [
            many(allow("grows.test"), ports),
            many(allow("shrinks.test"), others),
            deny_all(),
        ]
    };
    for (host, pod, others) in [(5, "p1", ["p2", "p3", "p4"]), (8, "p4", ["p1", "p2", "p3"])] {
        let mut node = node(None, &rules(1, 50));
        node.engine.told.cache.limits_mut().names_per_node_max = NAMES;
        for (host, pod) in [(6, "p2"), (7, "p3"), (8, "p4")] {
            node.add_pod(pod, host);
        }
        node.answer(pod, "grows.test", &addresses(0, 10), 3600);
        for other in others {
            node.answer(other, "shrinks.test", &addresses(1000, 40), 3600);
            node.pass(Duration::from_secs(5));
        }
        edit(&mut node, &rules(50, 1));
        node.pass(2 * COMPARE_INTERVAL);
        let own = own_of(&node, host);
        let whole = own.values().filter(|own| **own == 50).count();
        assert_eq!(whole, 10, "{pod}: {own:?}");
    }
}
