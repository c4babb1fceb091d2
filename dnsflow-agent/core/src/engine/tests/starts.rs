//! What an agent finds at its start, and what is edited meanwhile.

use std::collections::VecDeque;

use super::{
    edits::{ONE_NUMBER, WAYS, config, node},
    limits::many,
    restart::{after_restart_with, orders, read_but_southbound, read_rules, southbound, started},
    *,
};
use crate::values::{
    flow::Ends,
    limits::{CHANGES_UNDER_WAY_MAX, COMPARE_INTERVAL, UNKNOWN_MAX},
};

/// Whether the rule at this place lets a pod reach the address.
pub(super) fn is_open(node: &Node, address: [u8; 4], place: u16) -> bool {
    let address = Ipv4Addr::from(address).to_string();
    let mut open = node.open().into_iter();
    open.any(|(_, dst, priority)| dst == address && priority == 11_000 - place)
}

/// Whether any rule does.
pub(super) fn is_open_at_all(node: &Node, address: [u8; 4]) -> bool {
    let address = Ipv4Addr::from(address).to_string();
    node.destinations().contains(&address)
}

pub(super) fn is_dump(command: &Command) -> bool {
    matches!(command, Command::Ask(FlowQuestion::Dump { .. }))
}

/// Carries out what comes before the first dump.
pub(super) fn carry_out_until_dump(node: &mut Node) {
    while !node.waiting.iter().flatten().next().is_some_and(is_dump) {
        assert!(node.carry_out_next(), "a dump is asked for");
    }
}

/// Carries out what comes before the next dump, within a minute, and takes its command out. Returns its number.
pub(super) fn take_dump(node: &mut Node) -> u32 {
    let end = node.now + Duration::from_secs(60);
    while node.now < end && !node.waiting.iter().flatten().any(is_dump) {
        if !node.carry_out_next() {
            node.pass(Duration::from_secs(1));
        }
    }
    carry_out_until_dump(node);
    let waiting = node.waiting.as_mut().expect("commands wait");
    waiting.pop_front();
    node.dump
}

pub(super) fn edit(node: &mut Node, rules: &[Rule]) {
    node.set_firewall(rules);
    node.set_ovn(rules);
}

/// A pod that is gone has left so many flows of no rule. A dump shows them before the flows of rules, or behind.
pub(super) fn leave_flows(node: &mut Node, count: usize, come_first: bool) {
    let key = node.of_rules().next().cloned().expect("a flow");
    for other in 0..count as u32 {
        let mut key = key.clone();
        key.priority = if come_first { 1 } else { 20_000 };
        key.matches.registers = std::sync::Arc::default();
        key.matches.ends = Addresses::V4 {
            src: [10, 244, 0, 99].into(),
            dst: Ipv4Addr::from(0x0b00_0000 + other),
        }
        .into();
        node.switch.insert(key, (Cookie::new(0x1234), 0));
    }
}

/// The switch has as many flows that nobody knows as one comparison looks at, or one. The rule of an address is gone; the
/// kernel still marks its packets, and no snapshot has it. The plan of another address gets the number of the mark.
fn start_with_a_number_that_another_plan_gets(others: usize, come_first: bool) -> Node {
    let before = [
        many(allow("old.test"), 1),
        many(allow("new.test"), 2),
        deny_all(),
    ];
    let mut before = node(ONE_NUMBER, &before);
    before.answer("p1", "www.old.test", &[ADDRESS], 600);
    before.answer("p1", "www.new.test", &[OTHER], 600);
    before.pass(Duration::from_secs(30));
    assert_eq!(before.marks.len(), 1);
    leave_flows(&mut before, others, come_first);
    let mut saved = before.folded(&[]);
    saved
        .entries
        .retain(|saved| saved.address == IpAddr::from(OTHER));
    let rules = [deny_all(), many(allow("new.test"), 2)];
    let node = started(&mut before, &saved, config(ONE_NUMBER));
    let mut node = read_but_southbound(node, &before, &rules);
    node.waiting = Some(VecDeque::new());
    node.give(Input::Sb(southbound(&node, &rules)));
    node
}

/// A group is sent before the marks of the former run are judged: a first comparison that has not looked at all flows
/// restores the flows of groups.
#[test]
fn no_group_is_sent_behind_a_first_comparison_that_has_not_looked_at_all_flows() {
    for others in [1, UNKNOWN_MAX] {
        let mut node = start_with_a_number_that_another_plan_gets(others, true);
        for step in 0..60 {
            if !node.carry_out_next() {
                node.pass(Duration::from_secs(1));
            }
            assert!(!is_open(&node, ADDRESS, 1), "{others} flows, step {step}");
        }
        assert!(is_open(&node, OTHER, 1), "{others} flows");
    }
}

/// And then the mark is adopted by the flows that this run has written: the address is open for `--max-ttl`.
#[test]
fn a_mark_is_not_adopted_by_flows_that_this_run_has_written() {
    for others in [1, UNKNOWN_MAX] {
        let mut node = start_with_a_number_that_another_plan_gets(others, false);
        while node.carry_out_next() {}
        node.waiting = None;
        node.pass(Duration::from_secs(60));
        assert!(!is_open(&node, ADDRESS, 1), "{others} flows");
    }
}

/// The connection is there again. A dump has shown a flow when an edit closes its address, or OVN denies it in the same
/// place: the batch of the edit is not sent, and the comparison does not find the flow.
#[test]
fn what_an_edit_closes_while_the_first_dump_comes_is_closed_behind_it() {
    let rules = [allow("example.com"), deny_all()];
    let denying = [deny("example.com"), deny_all()];
    let close = |node: &mut Node, is_denied: bool| {
        if !is_denied {
            return edit(node, &[deny_all()]);
        }
        edit(node, &denying);
        let mut flow = logical_flow(0, &denying).expect("a rule");
        flow.actions = "reg8[17] = 1; next;".into();
        node.give(Input::Sb(SbUpdate {
            logical_flows: vec![(logical_flow_row(0), Some(flow))],
            ..SbUpdate::default()
        }));
    };
    for (is_denied, is_shown) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut node = Node::with(&rules);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        let flows = node.installed();
        let of_rule = |key: &FlowKey| matches!(key.matches.ends, Ends::Tagged { .. });
        let allowing = flows.iter().find(|flow| of_rule(&flow.key));
        let allowing = allowing.expect("the flow of the rule").cookie;
        node.give(Input::SwitchDown);
        node.switch_answers = false;
        node.give(Input::SwitchUp);
        node.pass(Duration::ZERO);
        assert!(node.log.iter().any(is_dump));
        node.switch_answers = true;
        if is_shown {
            node.dump_shows(flows, true);
            close(&mut node, is_denied);
        } else {
            close(&mut node, is_denied);
            node.dump_shows(flows, true);
        }
        node.dump_shows(Vec::new(), false);
        node.pass(COMPARE_INTERVAL / 2);
        let of_rules = node.switch.iter().filter(|(key, _)| of_rule(key));
        let mut cookies = of_rules.map(|(_, (cookie, _))| *cookie);
        let way = (is_denied, is_shown);
        assert_eq!(node.open().len(), usize::from(is_denied), "{way:?}");
        let allows = cookies.any(|cookie| cookie == allowing);
        assert!(!is_denied || !allows, "{way:?}");
    }
}

/// Rules with many ports were taken away while no agent ran. By flows, the former ones are removed in parts. By marks,
/// those of all groups go in one batch.
#[test]
fn groups_of_rules_that_went_while_no_agent_ran_do_not_stand_before_what_opens_for_another() {
    for way in WAYS {
        let mut rules: Vec<Rule> = (0..18)
            .map(|name| many(allow(&format!("n{name}.test")), 200))
            .collect();
        rules.push(deny_all());
        let mut before = node(way, &rules);
        for name in 0..18 {
            before.answer("p1", &format!("n{name}.test"), &addresses(name, 1), 3600);
            before.pass(Duration::from_secs(1));
        }
        assert!(before.of_rules().count() >= 18 * 200);
        let saved = before.folded(&[]);
        let rules = [allow("other.test"), deny_all()];
        let mut node = after_restart_with(&mut before, &saved, &rules, config(way));
        node.pass(20 * COMPARE_INTERVAL);
        assert_eq!((node.own(), node.of_rules().count()), (0, 0));
        let largest = node.batches().into_iter().map(|(_, changes)| changes.len());
        let largest = largest.max();
        assert!(
            largest <= Some(2 * CHANGES_UNDER_WAY_MAX),
            "{way:?}: {largest:?}"
        );
    }
}

/// No snapshot has the names, and the three plans get their three numbers in another order: the number of a mark that
/// is adopted is free for another plan.
#[test]
fn no_mark_that_no_snapshot_knows_meets_the_flows_of_another_plan() {
    const THREE_NUMBERS: Option<u32> = Some(0xc000_0000);
    let names = ["a.test", "b.test", "c.test"];
    let open = |node: &Node| {
        let open = node.open().into_iter();
        let open = open.map(|(_, dst, priority)| (dst, priority));
        open.collect::<BTreeSet<_>>()
    };
    for further in 0..4 {
        let further = (0..further).map(|at| allow(&format!("new{at}.test")));
        let mut rules: Vec<Rule> = further.chain(names.map(allow)).collect();
        rules.push(deny_all());
        for order in orders(&[0_u8, 1, 2]) {
            let mut before = node(THREE_NUMBERS, &rules);
            for at in &order {
                let address = [203, 0, 113, 1 + at];
                before.answer("p1", names[usize::from(*at)], &[address], 600);
            }
            assert_eq!(before.marks.len(), 3);
            let rightly = open(&before);
            let node = started(&mut before, &Saved::default(), config(THREE_NUMBERS));
            let mut node = read_but_southbound(node, &before, &rules);
            node.waiting = Some(VecDeque::new());
            node.give(Input::Sb(southbound(&node, &rules)));
            while node.carry_out_next() {
                let open = open(&node);
                assert!(open.is_subset(&rightly), "{order:?}: {open:?}");
            }
        }
    }
}

/// A rule has moved while no agent ran. By flows, the address stays open. By marks, the flows of its former group go
/// before those of the next one come.
#[test]
fn an_address_stays_open_at_a_start_though_its_rule_has_moved() {
    let former = [allow("example.com"), deny_all()];
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    for way in WAYS {
        let mut before = node(way, &former);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        let saved = before.folded(&[]);
        let node = started(&mut before, &saved, config(way));
        let mut node = read_but_southbound(node, &before, &moved);
        node.waiting = Some(VecDeque::new());
        node.give(Input::Sb(southbound(&node, &moved)));
        for step in 0..60 {
            if !node.carry_out_next() {
                node.pass(Duration::from_secs(1));
            }
            assert!(is_open_at_all(&node, ADDRESS), "{way:?}, step {step}");
        }
        assert!(is_open(&node, ADDRESS, 1), "{way:?}");
    }
}

/// An address keeps the mark of the former run until its group is in force. An edit takes all rules away before.
#[test]
fn a_mark_of_the_former_run_goes_with_the_edit_that_takes_its_rule_away() {
    let former = [allow("a.test"), deny_all()];
    let moved = [allow("a.test"), many(allow("x.a.test"), 1), deny_all()];
    let mut before = node(WAYS[1], &former);
    before.answer("p1", "x.a.test", &[ADDRESS], 600);
    before.answer("p1", "y.a.test", &[OTHER], 600);
    before.pass(Duration::from_secs(30));
    let saved = before.folded(&[]);
    let node = started(&mut before, &saved, config(WAYS[1]));
    let mut node = read_but_southbound(node, &before, &moved);
    node.waiting = Some(VecDeque::new());
    node.give(Input::Sb(southbound(&node, &moved)));
    carry_out_until_dump(&mut node);
    assert!(node.carry_out_next());
    assert!(node.engine.switch.is_compared());
    edit(&mut node, &[deny_all()]);
    while node.carry_out_next() {}
    assert!(!is_open_at_all(&node, OTHER));
    assert!(!is_open_at_all(&node, ADDRESS));
}

/// An agent that sets marks comes behind one that did not. An address with a flow goes on with it.
#[test]
fn flows_of_an_agent_without_marks_go_with_the_edit_that_takes_their_rule_away() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = node(None, &rules);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let saved = before.folded(&[]);
    let mut node = after_restart_with(&mut before, &saved, &rules, config(WAYS[1]));
    assert_eq!((node.marks.len(), node.own()), (0, 1));
    edit(&mut node, &[deny_all()]);
    node.pass(COMPARE_INTERVAL / 2);
    assert!(!is_open_at_all(&node, ADDRESS));
}

/// The programs cannot be attached at once when the agent starts. By flows, the addresses of the pod stay open.
#[test]
fn what_is_open_stays_open_at_a_start_though_the_programs_cannot_be_attached_at_once() {
    let rules = [allow("example.com"), deny_all()];
    for way in WAYS {
        let mut before = node(way, &rules);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        let saved = before.folded(&[]);
        let mut node = started(&mut before, &saved, config(way));
        node.pods = before.pods.clone();
        node.give(Input::SwitchUp);
        node.give(firewalls(true, Some(firewall(&rules))));
        node.give(Input::Nb(NbUpdate {
            reset: true,
            acls: acls(&rules),
            ..NbUpdate::default()
        }));
        node.waiting = Some(VecDeque::new());
        let row = RowId::new(0x105);
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![(row, Some(interface("ns1_p1", 5, "uid-p1")))],
        }));
        let waiting = node.waiting.as_mut().expect("commands wait");
        waiting.retain(|command| !matches!(command, Command::Attachment(_)));
        node.give(Input::Found {
            interface: row,
            ifindex: ifindex_of(row),
        });
        node.give(Input::AttachFailed {
            interface: row,
            reason: "busy".into(),
        });
        node.give(Input::Sb(southbound(&node, &rules)));
        for step in 0..40 {
            if !node.carry_out_next() {
                node.pass(Duration::from_millis(100));
            }
            assert!(is_open_at_all(&node, ADDRESS), "{way:?}, step {step}");
        }
    }
}

/// A pod that comes during a start: its logical port, and its UID.
type NewPod = (&'static str, &'static str);

/// One under the name of the former pod, as a StatefulSet makes it, and another one.
const NEW_PODS: [NewPod; 2] = [("ns1_p1", "uid-new"), ("ns1_q1", "uid-q1")];

const ROWS: [RowId; 2] = [RowId::new(0x105), RowId::new(0x106)];

/// The southbound database, which has this logical port in the second row.
fn southbound_with(node: &Node, rules: &[Rule], port: &str) -> SbUpdate {
    SbUpdate {
        port_bindings: vec![(ROWS[1], Some(port_binding(port, 5)))],
        ..southbound(node, rules)
    }
}

fn give_interfaces(node: &mut Node, reset: bool, row: RowId, pod: Option<NewPod>) {
    let interface = pod.map(|(name, uid)| interface(name, 5, uid));
    node.give(Input::Interfaces(InterfaceUpdate {
        reset,
        interfaces: vec![(row, interface)],
    }));
}

/// The snapshot has a pod, and it goes during the start, or has gone before (`is_there`). A new one comes at its address
/// before OVN's databases are read, or after so many starts more that end early. Returns the addresses that the new one
/// reaches.
fn open_behind_a_pod_that_goes(
    way: Option<u32>,
    is_there: bool,
    new: NewPod,
    early_ends: usize,
) -> BTreeSet<String> {
    let rules = [allow("example.com"), deny_all()];
    let mut before = node(way, &rules);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    before.pass(Duration::from_secs(30));
    let saved = before.folded(&[]);
    let mut node = started(&mut before, &saved, config(way));
    if is_there {
        give_interfaces(&mut node, true, ROWS[0], Some(("ns1_p1", "uid-p1")));
        give_interfaces(&mut node, false, ROWS[0], None);
    }
    give_interfaces(&mut node, !is_there, ROWS[1], Some(new));
    for _ in 0..early_ends {
        let saved = node.folded(&[]);
        node = started(&mut node, &saved, config(way));
        give_interfaces(&mut node, true, ROWS[1], Some(new));
    }
    node.pods = [(new.0.to_owned(), ROWS[1])].into();
    read_rules(&mut node, &rules);
    let sb = southbound_with(&node, &rules, new.0);
    node.give(Input::Sb(sb));
    node.pass(Duration::from_secs(30));
    node.destinations()
}

#[test]
fn a_pod_that_goes_during_a_start_leaves_nothing_to_another_one_at_its_address() {
    for way in WAYS {
        for is_there in [false, true] {
            for new in NEW_PODS {
                for early_ends in 0..3 {
                    let open = open_behind_a_pod_that_goes(way, is_there, new, early_ends);
                    let case = format!("{way:?} {is_there} {new:?} {early_ends}");
                    assert_eq!(open, BTreeSet::new(), "{case}");
                }
            }
        }
    }
}

/// The new pod is told another address before the agent ends, or before its interface is made anew.
#[test]
fn a_pod_that_comes_during_a_start_keeps_what_it_was_told_and_nothing_else() {
    let rules = [allow("example.com"), deny_all()];
    for way in WAYS {
        for new in NEW_PODS {
            for early_ends in 0..3 {
                let mut before = node(way, &rules);
                before.answer("p1", "www.example.com", &[ADDRESS], 600);
                before.pass(Duration::from_secs(30));
                let saved = before.folded(&[]);
                let mut node = started(&mut before, &saved, config(way));
                let begin = |node: &mut Node| {
                    node.give(Input::SwitchUp);
                    node.give(firewalls(true, Some(firewall(&rules))));
                    give_interfaces(node, true, ROWS[1], Some(new));
                    node.pods = [(new.0.to_owned(), ROWS[1])].into();
                };
                begin(&mut node);
                let ifindex = ifindex_of(ROWS[1]);
                let bytes = answer_frame("ftp.example.com", &[OTHER], 600);
                let bytes = node.to_pod(ifindex, bytes);
                node.frame(ifindex, &bytes);
                for _ in 0..early_ends {
                    let saved = node.folded(&[]);
                    node = started(&mut node, &saved, config(way));
                    begin(&mut node);
                }
                if early_ends == 0 {
                    give_interfaces(&mut node, false, ROWS[1], None);
                    give_interfaces(&mut node, false, ROWS[1], Some(new));
                }
                read_rules(&mut node, &rules);
                let sb = southbound_with(&node, &rules, new.0);
                node.give(Input::Sb(sb));
                node.pass(Duration::from_secs(1));
                let case = format!("{way:?} {new:?} {early_ends}");
                assert_eq!(
                    node.destinations(),
                    ["203.0.113.2".to_owned()].into(),
                    "{case}"
                );
                node.pass(COMPARE_INTERVAL);
                let left = node.folded(&[]);
                let mut pods = left.ports.values();
                assert!(pods.all(|pod| pod.as_deref() == Some(new.1)), "{case}");
            }
        }
    }
}

/// Its interface is made anew while OVN's databases are away.
#[test]
fn a_pod_that_comes_back_during_a_start_keeps_what_it_had() {
    let pod = ("ns1_p1", "uid-p1");
    for way in WAYS {
        for early_ends in 0..2 {
            let open = open_behind_a_pod_that_goes(way, true, pod, early_ends);
            assert_eq!(
                open,
                ["203.0.113.1".to_owned()].into(),
                "{way:?} {early_ends}"
            );
        }
    }
}

/// The rules of the new pod's namespace allow another name, at the same place.
#[test]
fn a_pod_that_goes_during_a_start_leaves_nothing_to_one_of_another_namespace() {
    for is_there in [false, true] {
        let rules = [allow("example.com"), deny_all()];
        let mut before = Node::with(&rules);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        before.pass(Duration::from_secs(30));
        let saved = before.folded(&[]);
        let mut node = started(&mut before, &saved, Config::default());
        if is_there {
            give_interfaces(&mut node, true, ROWS[0], Some(("ns1_p1", "uid-p1")));
            give_interfaces(&mut node, false, ROWS[0], None);
        }
        let new = ("ns2_payroll", "uid-payroll");
        give_interfaces(&mut node, !is_there, ROWS[1], Some(new));
        read_rules(&mut node, &rules);
        let of_ns2 = [allow("bank.test"), deny_all()];
        let id = FirewallId {
            namespace: "ns2".into(),
            name: "default".into(),
        };
        node.give(Input::Firewalls(FirewallUpdate {
            reset: false,
            firewalls: vec![(id, Some(firewall(&of_ns2)))],
        }));
        let group = "a1234567890123456789";
        let acl = acl(0, &of_ns2).expect("a rule");
        let acl = Acl {
            namespace: "ns2".into(),
            matches: acl.matches.replace(GROUP, group),
            ..acl
        };
        let flow = LogicalFlow {
            matches: format!("reg0[8] == 1 && ({})", acl.matches),
            stage_hint: Some(acl_row(18).prefix()),
            ..logical_flow(0, &of_ns2).expect("a rule")
        };
        node.give(Input::Nb(NbUpdate {
            acls: vec![(acl_row(18), Some(acl))],
            ..NbUpdate::default()
        }));
        let group = PortGroup {
            name: group.into(),
            ports: [new.0.into()].into(),
        };
        let binding = PortBinding {
            namespace: Some("ns2".into()),
            ..port_binding(new.0, 5)
        };
        let mut sb = southbound(&node, &rules);
        sb.logical_flows
            .retain(|(row, _)| *row != logical_flow_row(18));
        sb.logical_flows.push((logical_flow_row(18), Some(flow)));
        sb.port_groups.push((RowId::new(0xd << 100), Some(group)));
        sb.port_bindings = vec![(ROWS[1], Some(binding))];
        node.give(Input::Sb(sb));
        node.pass(Duration::from_secs(1));
        assert_eq!(node.destinations(), BTreeSet::new(), "{is_there}");
        // Its rules are in force.
        node.pods = [(new.0.to_owned(), ROWS[1])].into();
        let ifindex = ifindex_of(ROWS[1]);
        let bytes = node.to_pod(ifindex, answer_frame("bank.test", &[OTHER], 600));
        node.frame(ifindex, &bytes);
        assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
    }
}

/// A pod is told an address while the first dump is awaited, and goes. Another one comes at its address. The dump shows the
/// flow, whose removal is on the way.
#[test]
fn what_a_pod_has_opened_before_the_first_comparison_is_not_left_to_another_one_at_its_address() {
    let rules = [allow("example.com"), deny_all()];
    for new in NEW_PODS {
        let mut before = Node::with(&rules);
        before.answer("p1", "example.com", &[OTHER], 600);
        let saved = before.folded(&[]);
        let node = started(&mut before, &saved, Config::default());
        let mut node = read_but_southbound(node, &before, &rules);
        node.waiting = Some(VecDeque::new());
        node.give(Input::Sb(southbound(&node, &rules)));
        carry_out_until_dump(&mut node);
        let waiting = node.waiting.as_mut().expect("commands wait");
        let dump = waiting.pop_front().expect("a dump");
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        while node.carry_out_next() {}
        assert!(is_open_at_all(&node, ADDRESS));
        let waiting = node.waiting.as_mut().expect("commands wait");
        waiting.push_back(dump);
        give_interfaces(&mut node, false, ROWS[0], None);
        give_interfaces(&mut node, false, ROWS[1], Some(new));
        node.pods = [(new.0.to_owned(), ROWS[1])].into();
        node.give(Input::Sb(SbUpdate {
            port_bindings: vec![(ROWS[0], None), (ROWS[1], Some(port_binding(new.0, 5)))],
            port_groups: vec![node.group()],
            ..SbUpdate::default()
        }));
        while node.carry_out_next() {}
        node.waiting = None;
        node.pass(2 * COMPARE_INTERVAL);
        assert!(node.engine.switch.is_compared());
        assert!(!is_open_at_all(&node, ADDRESS), "{new:?}");
    }
}

/// What the switch does while the flows of a pod are removed.
#[derive(Clone, Copy, Debug)]
enum SwitchAtEnd {
    Answers,
    IsSlow,
    IsAway,
}

/// In a run, pod p1 has many open addresses, and goes. The agent ends, and another pod comes at the address without an
/// agent, or before the end (`is_there`), and is told something. Returns how many addresses are open for it.
fn open_behind_a_pod_that_went_in_a_run(end: SwitchAtEnd, is_there: bool, new: NewPod) -> usize {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    for name in 0..3 {
        let text = format!("n{name}.example.com");
        before.answer("p1", &text, &addresses(name * 200, 200), 3600);
    }
    before.pass(Duration::from_secs(60));
    assert_eq!(before.destinations().len(), 600);
    match end {
        SwitchAtEnd::Answers => {}
        SwitchAtEnd::IsSlow => before.switch_answers = false,
        SwitchAtEnd::IsAway => {
            before.switch_answers = false;
            before.give(Input::SwitchDown);
        }
    }
    before.remove_interface("p1");
    before.remove_logical_port("p1");
    if is_there {
        let name = new.0.trim_start_matches("ns1_");
        before.add_pod_as(name, 5, new.1, ROWS[1]);
        before.answer(name, "other.example.com", &addresses(1000, 1), 3600);
    }
    before.pass(Duration::from_millis(500));
    let saved = before.folded(&[]);
    let mut node = started(&mut before, &saved, Config::default());
    node.pods = [(new.0.to_owned(), ROWS[1])].into();
    give_interfaces(&mut node, true, ROWS[1], Some(new));
    read_rules(&mut node, &rules);
    let sb = southbound_with(&node, &rules, new.0);
    node.give(Input::Sb(sb));
    node.pass(Duration::from_secs(30));
    node.destinations().len()
}

#[test]
fn a_pod_that_went_just_before_the_end_leaves_nothing_to_another_one_at_its_address() {
    use SwitchAtEnd::{Answers, IsAway, IsSlow};
    for end in [Answers, IsSlow, IsAway] {
        for is_there in [false, true] {
            for new in NEW_PODS {
                let open = open_behind_a_pod_that_went_in_a_run(end, is_there, new);
                let case = format!("{end:?} {is_there} {new:?}");
                assert_eq!(open, usize::from(is_there), "{case}");
            }
        }
    }
}

/// p1 has gone while no agent ran, and q1 has come at its address. The agent compares, and ends before the switch has
/// answered, or behind that. Returns how many addresses the next one leaves open for q1, which was told nothing.
fn inherited_behind_a_first_comparison(are_removed: bool) -> usize {
    let rules = [allow("example.com"), deny_all()];
    let new = ("ns1_q1", "uid-q1");
    let mut before = Node::with(&rules);
    for name in 0..3 {
        let text = format!("n{name}.example.com");
        before.answer("p1", &text, &addresses(name * 200, 200), 3600);
    }
    before.pass(Duration::from_secs(60));
    assert_eq!(before.destinations().len(), 600);
    let begin = |before: &mut Node| {
        let saved = before.folded(&[]);
        let mut node = started(before, &saved, Config::default());
        node.pods = [(new.0.to_owned(), ROWS[1])].into();
        give_interfaces(&mut node, true, ROWS[1], Some(new));
        read_rules(&mut node, &rules);
        let southbound = southbound_with(&node, &rules, new.0);
        (node, southbound)
    };
    let (mut node, southbound) = begin(&mut before);
    node.waiting = Some(VecDeque::new());
    node.give(Input::Sb(southbound));
    carry_out_until_dump(&mut node);
    assert!(node.carry_out_next());
    assert!(node.engine.switch.is_compared());
    while are_removed && node.carry_out_next() {}
    let (mut node, southbound) = begin(&mut node);
    node.give(Input::Sb(southbound));
    node.pass(Duration::from_secs(30));
    node.destinations().len()
}

#[test]
fn what_a_first_comparison_removes_is_left_to_no_new_pod_before_the_switch_has_removed_it() {
    for are_removed in [false, true] {
        let left = inherited_behind_a_first_comparison(are_removed);
        assert_eq!(left, 0, "removed: {are_removed}");
    }
}
