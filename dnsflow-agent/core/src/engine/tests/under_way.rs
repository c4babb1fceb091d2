//! What stands before the flows of an answer on their way to the switch.

use std::collections::VecDeque;

use super::{starts::is_dump, *};
use crate::{
    ovn::rows::Interface,
    values::{
        flow::{Ends, InstalledFlow},
        limits::CHANGES_UNDER_WAY_MAX,
    },
};

/// The addresses that `tell_many` opens.
const MANY: usize = 4096;

fn rules() -> [Rule; 3] {
    [allow("example.com"), allow("other.test"), deny_all()]
}

/// p1 is told so many names of 256 addresses each.
fn tell(node: &mut Node, names: u32, ttl: u32) {
    for name in 0..names {
        let told = addresses(name * 256, 256);
        node.answer("p1", &format!("n{name}.example.com"), &told, ttl);
    }
}

/// p1 is told many addresses: within its budget.
fn tell_many(node: &mut Node, ttl: u32) {
    tell(node, 16, ttl);
    let of_pod = node.open().into_iter();
    assert_eq!(of_pod.filter(|(src, ..)| src == "10.244.0.5").count(), MANY);
}

/// What p1 was told with a short term has ended, and the first part of its flows is removed. From now on, commands wait.
fn end_all(node: &mut Node) {
    node.pass(MIN_TTL - Duration::from_secs(1));
    let open = node.open().len();
    node.waiting = Some(VecDeque::new());
    while node.open().len() == open {
        if !node.carry_out_next() {
            node.pass(Duration::from_secs(1));
        }
    }
    assert_eq!(node.open().len(), open - CHANGES_UNDER_WAY_MAX);
    node.batches();
}

/// Of the addresses that wait to be closed, the one that comes last.
fn last_of(node: &Node) -> [u8; 4] {
    let open = node.destinations();
    let mut all = addresses(0, 4096).into_iter();
    let last = all.rfind(|address| open.contains(&Ipv4Addr::from(*address).to_string()));
    last.expect("most are open")
}

/// The sizes of the batches that wait, without the sentinel flows.
pub(super) fn sizes(node: &Node) -> Vec<usize> {
    let waiting = node.waiting.iter().flatten();
    let sizes = waiting.filter_map(|command| match command {
        Command::Apply { changes, .. } => {
            let of_pods = changes.iter().filter(|change| !is_for_sentinel(change));
            Some(of_pods.count())
        }
        _ => None,
    });
    sizes.collect()
}

/// How many changes are in the switch when p2 can reach an address that it asks for, beside those for that address and
/// for its rule.
fn changes_before_a_neighbour(node: &mut Node) -> usize {
    node.batches();
    node.engine.end_turn(node.now);
    node.answer("p2", "www.other.test", &[OTHER], 600);
    node.engine.end_turn(node.now);
    node.obey();
    let is_open = |node: &Node| {
        let mut open = node.open().into_iter();
        open.any(|(src, dst, _)| src == "10.244.0.6" && dst == "203.0.113.2")
    };
    while !is_open(node) {
        assert!(node.carry_out_next());
    }
    let is_of_p2 = |key: &FlowKey| match key.matches.ends {
        Ends::Tagged { .. } => key.priority == 10_999,
        ends => ends.dst() == Some(OTHER.into()),
    };
    let of_others = |change: &FlowChange| !change.key().is_some_and(is_of_p2);
    let batches = node.batches().into_iter();
    let changes = batches.flat_map(|(_, changes)| changes);
    changes.filter(of_others).count()
}

fn carry_out_all(node: &mut Node) {
    while node.carry_out_next() {}
    node.engine.end_turn(node.now);
    node.obey();
    assert_eq!(node.waiting.as_ref().map(VecDeque::len), Some(0));
    let [pending, queues, removals, ..] = node.engine.switch.sizes();
    assert_eq!((pending, queues, removals), (0, 0, 0));
}

/// A name server has given many addresses with short terms. They end together, with a comparison.
#[test]
fn what_ends_for_a_pod_does_not_stand_before_what_opens_for_another() {
    let mut node = Node::with(&rules());
    node.add_pod("p2", 6);
    tell_many(&mut node, 1);
    end_all(&mut node);
    assert_eq!(sizes(&node), [CHANGES_UNDER_WAY_MAX]);
    assert!(node.engine.is_writing());
    assert_eq!(changes_before_a_neighbour(&mut node), CHANGES_UNDER_WAY_MAX);
    // All of them end.
    node.batches();
    carry_out_all(&mut node);
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
    let parts = node.batches().into_iter();
    let sizes: Vec<usize> = parts.map(|(_, changes)| changes.len()).collect();
    let rest = (MANY - 2 * CHANGES_UNDER_WAY_MAX) / CHANGES_UNDER_WAY_MAX;
    assert_eq!(sizes, vec![CHANGES_UNDER_WAY_MAX; rest]);
}

/// The names of one rule end, and those of another one at the same addresses do not.
#[test]
fn what_ends_at_addresses_that_stay_does_not_stand_before_what_opens_for_another() {
    let mut node = Node::with(&rules());
    node.add_pod("p2", 6);
    for name in 0..8 {
        let told = addresses(name * 256, 256);
        node.answer("p1", &format!("n{name}.example.com"), &told, 1);
        node.answer("p1", &format!("n{name}.other.test"), &told, 600);
    }
    assert_eq!(node.open().len(), 2 * 2048);
    end_all(&mut node);
    assert_eq!(changes_before_a_neighbour(&mut node), CHANGES_UNDER_WAY_MAX);
    carry_out_all(&mut node);
    assert_eq!(node.open().len(), 2048 + 1);
}

/// A pod with many addresses goes: its interface first, or its logical port.
#[test]
fn what_goes_with_a_pod_does_not_stand_before_what_opens_for_another() {
    for is_interface_first in [true, false] {
        let mut node = Node::with(&rules());
        node.add_pod("p2", 6);
        tell_many(&mut node, 600);
        node.waiting = Some(VecDeque::new());
        if is_interface_first {
            node.remove_interface("p1");
        } else {
            node.remove_logical_port("p1");
        }
        assert_eq!(
            changes_before_a_neighbour(&mut node),
            CHANGES_UNDER_WAY_MAX,
            "{is_interface_first}"
        );
        carry_out_all(&mut node);
        assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
    }
}

/// The pod goes while what it was told last still waits.
#[test]
fn what_waits_for_a_pod_that_goes_does_not_stand_before_what_opens_for_another() {
    let mut node = Node::with(&rules());
    node.add_pod("p2", 6);
    node.waiting = Some(VecDeque::new());
    tell(&mut node, 16, 600);
    node.remove_interface("p1");
    let before = changes_before_a_neighbour(&mut node);
    assert!(before <= 2 * CHANGES_UNDER_WAY_MAX, "{before}");
    carry_out_all(&mut node);
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
}

#[test]
fn an_address_that_opens_again_before_its_flow_was_removed_stays_open() {
    let mut node = Node::with(&rules());
    tell_many(&mut node, 1);
    end_all(&mut node);
    let last = last_of(&node);
    node.answer("p1", "example.com", &[last], 600);
    carry_out_all(&mut node);
    let last = Ipv4Addr::from(last).to_string();
    assert_eq!(node.destinations(), [last].into());
    let changes = node.batches().into_iter().flat_map(|(_, changes)| changes);
    let removed = changes.filter(|change| matches!(change, FlowChange::Delete(..)));
    assert_eq!(removed.count(), MANY - CHANGES_UNDER_WAY_MAX - 1);
}

/// Before its flow was removed, another rule comes to open the address.
#[test]
fn a_flow_that_has_ended_goes_before_another_one_opens_the_address() {
    let mut node = Node::with(&[deny("bad.test"), allow("other.test")]);
    node.engine.told.cache.limits_mut().deny_ttl = Duration::ZERO;
    for name in 0..16 {
        let told = addresses(name * 256, 256);
        node.answer("p1", &format!("n{name}.bad.test"), &told, 1);
    }
    assert_eq!(node.destinations().len(), MANY);
    end_all(&mut node);
    let last = last_of(&node);
    node.answer("p1", "www.other.test", &[last], 600);
    let dst = IpAddr::from(last).to_string();
    let priorities = |node: &Node| -> Vec<u16> {
        let open = node.open().into_iter().filter(|(_, to, _)| *to == dst);
        open.map(|(.., priority)| priority).collect()
    };
    while priorities(&node) == [11_000] {
        assert!(node.carry_out_next());
    }
    assert_eq!(priorities(&node), [10_999]);
}

#[test]
fn flows_that_wait_to_be_removed_are_no_difference_to_a_comparison() {
    let mut node = Node::with(&rules());
    tell_many(&mut node, 1);
    end_all(&mut node);
    node.reports.clear();
    // A dump begins while a part is under way. It comes when two more are confirmed, and shows nothing of that.
    let flows = begin_dump(&mut node);
    let of_addresses = flows.iter().map(|flow| flow.key.matches.ends.dst());
    let of_addresses = of_addresses.flatten().count();
    assert_eq!(of_addresses, MANY - CHANGES_UNDER_WAY_MAX);
    for _ in 0..3 {
        assert!(node.carry_out_next());
    }
    assert_eq!(node.own(), MANY - 4 * CHANGES_UNDER_WAY_MAX);
    node.dump_shows(flows, false);
    carry_out_all(&mut node);
    assert_eq!(node.own(), 0);
    assert!(!node.reports.iter().any(is_difference));
    let changes = node.batches().into_iter().flat_map(|(_, changes)| changes);
    assert_eq!(changes.count(), MANY - CHANGES_UNDER_WAY_MAX);
}

#[test]
fn flows_that_wait_to_be_removed_keep_their_sentinel_flow() {
    let mut node = Node::with(&rules());
    tell_many(&mut node, 600);
    node.waiting = Some(VecDeque::new());
    node.remove_interface("p1");
    compare(&mut node);
    assert_eq!(node.own(), MANY);
    while node.own() > 0 {
        let before = node.own();
        assert!(node.carry_out_next());
        assert!(before - node.own() <= CHANGES_UNDER_WAY_MAX);
    }
    compare(&mut node);
    carry_out_all(&mut node);
    // The flow of the rule stays for a while.
    let flows = node.switch.iter();
    let needed: BTreeSet<Sentinel> = flows
        .map(|(key, (cookie, _))| sentinel_of(key, *cookie))
        .collect();
    assert!(node.sentinels.keys().eq(&needed), "{:?}", node.sentinels);
}

/// A dump begins, and shows these flows.
fn begin_dump(node: &mut Node) -> Vec<InstalledFlow> {
    node.engine.switch.read_counters(node.now);
    node.pass(Duration::ZERO);
    let waiting = node.waiting.as_mut().expect("commands wait");
    waiting.retain(|command| !is_dump(command));
    node.installed()
}

fn is_difference(report: &Report) -> bool {
    matches!(report, Report::Resynced { .. })
}

/// A dump comes before all that waits.
pub(super) fn compare(node: &mut Node) {
    node.engine.switch.read_counters(node.now);
    node.pass(Duration::ZERO);
    carry_out_first(node, is_dump);
}

/// A command of this kind overtakes all others.
fn carry_out_first(node: &mut Node, is_meant: impl FnMut(&Command) -> bool) {
    let waiting = node.waiting.as_mut().expect("commands wait");
    let at = waiting.iter().position(is_meant);
    let command = at.and_then(|at| waiting.remove(at)).expect("it waits");
    waiting.push_front(command);
    assert!(node.carry_out_next());
}

/// Some addresses have ended and wait; others are closed by an edit.
#[test]
fn what_an_edit_closes_does_not_wait_behind_what_has_ended() {
    let mut node = Node::with(&rules());
    node.add_pod("p2", 6);
    tell_many(&mut node, 1);
    node.answer("p2", "www.other.test", &[OTHER], 600);
    end_all(&mut node);
    assert_eq!(sizes(&node), [CHANGES_UNDER_WAY_MAX]);
    let edited = [allow("another.test"), deny_all()];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    node.batches();
    while node.destinations().contains("203.0.113.2") {
        assert!(node.carry_out_next());
    }
    // Nor is any flow of a former rule left, whatever has ended there before.
    assert_eq!(node.destinations(), BTreeSet::new());
    assert_eq!(node.batches().len(), 2, "the part under way, and the edit");
}

#[test]
fn what_waits_to_be_removed_when_the_connection_is_lost_goes_with_the_comparison() {
    let mut node = Node::with(&rules());
    tell_many(&mut node, 1);
    end_all(&mut node);
    node.waiting = None;
    node.give(Input::SwitchDown);
    assert_eq!(node.engine.switch.sizes()[..3], [0, 0, 0]);
    assert_ne!(node.own(), 0);
    node.batches();
    node.give(Input::SwitchUp);
    node.pass(Duration::from_secs(1));
    assert_eq!(node.own(), 0);
    let batches = node.batches().into_iter();
    let most = batches.map(|(_, changes)| changes.len()).max();
    assert_eq!(most, Some(CHANGES_UNDER_WAY_MAX));
}

/// Changes of two interfaces come at once, or one after the other.
fn change_interfaces(node: &mut Node, changes: [(RowId, Option<Interface>); 2], at_once: bool) {
    for interfaces in changes.chunks(if at_once { 2 } else { 1 }) {
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: interfaces.to_vec(),
        }));
    }
}

/// A pod has the address of one that has gone, and the logical port.
#[test]
fn nothing_of_a_pod_that_has_gone_is_left_to_one_that_comes_with_its_address() {
    for comes_at_once in [false, true] {
        let mut node = Node::with(&rules());
        tell_many(&mut node, 600);
        node.waiting = Some(VecDeque::new());
        let row = node.pods["ns1_p1"];
        let gone = (row, None);
        let come = (RowId::new(0x205), Some(interface("ns1_p1", 5, "uid-2")));
        change_interfaces(&mut node, [gone, come], comes_at_once);
        // What was sent by now is before all that the new pod's answers open.
        let waiting: Vec<Command> = node.waiting.iter().flatten().cloned().collect();
        for _ in waiting {
            node.carry_out_next();
        }
        assert_eq!(node.own(), 0, "{comes_at_once}");
    }
}

/// A pod that was told much goes. One with another logical port comes with its address, at once or later.
#[test]
fn what_a_pod_has_left_goes_in_parts_though_another_one_comes_with_its_address() {
    for comes_at_once in [false, true] {
        let mut node = Node::with(&rules());
        node.add_pod("p2", 6);
        tell_many(&mut node, 600);
        let row = RowId::new(0x209);
        let binding = PortBinding {
            tunnel_key: 99,
            ..port_binding("ns1_p9", 5)
        };
        node.give(Input::Sb(SbUpdate {
            port_bindings: vec![(row, Some(binding))],
            ..SbUpdate::default()
        }));
        node.waiting = Some(VecDeque::new());
        let gone = (node.pods["ns1_p1"], None);
        let come = (row, Some(interface("ns1_p9", 5, "uid-9")));
        change_interfaces(&mut node, [gone, come], comes_at_once);
        assert_eq!(sizes(&node), [CHANGES_UNDER_WAY_MAX], "{comes_at_once}");
        assert_eq!(changes_before_a_neighbour(&mut node), CHANGES_UNDER_WAY_MAX);
        carry_out_all(&mut node);
        let open = node.open().into_iter();
        assert_eq!(open.filter(|(src, ..)| src == "10.244.0.5").count(), 0);
    }
}

/// A pod has the address of one that has gone, and the logical port, while most of what the former was told waits.
#[test]
fn nothing_that_waits_for_a_pod_that_has_gone_opens_for_one_that_comes_with_its_address() {
    let mut node = Node::with(&rules());
    node.waiting = Some(VecDeque::new());
    tell(&mut node, 16, 600);
    node.remove_interface("p1");
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(RowId::new(0x205), Some(interface("ns1_p1", 5, "uid-2")))],
    }));
    // A part was under way before. One of its changes is of the rule.
    let of_former = CHANGES_UNDER_WAY_MAX - 1;
    let mut most = 0;
    while node.carry_out_next() {
        most = most.max(node.open().len());
    }
    assert_eq!(most, of_former);
    assert_eq!(node.open().len(), 0);
}

/// Denied names push out addresses whose flows wait to be written. An edit takes away the rule of these, and finds
/// nothing to close.
#[test]
fn nothing_opens_behind_the_edit_that_takes_its_rule_away() {
    let mut node = Node::with(&[deny("bad.test"), allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = 512;
    node.waiting = Some(VecDeque::new());
    tell(&mut node, 2, 600);
    node.answer("p1", "bad.test", &addresses(100_000, 512), 600);
    let edited = [deny("bad.test"), allow("another.test"), deny_all()];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    assert_eq!(
        sizes(&node)[0],
        CHANGES_UNDER_WAY_MAX,
        "it was under way before"
    );
    assert!(node.carry_out_next());
    let of_rule = |node: &Node| {
        let open = node.open().into_iter();
        open.filter(|(.., priority)| *priority == 10_999).count()
    };
    let mut before = of_rule(&node);
    while node.carry_out_next() {
        let now = of_rule(&node);
        assert!(now <= before, "flows of the rule that is gone");
        before = now;
    }
    assert_eq!(before, 0);
}

/// Most flows of p1 wait in its queue. An edit gives the same addresses a further flow each, and is confirmed; or the pod
/// has asked on another network for a name at one of the addresses. A comparison finds nothing lost.
#[test]
fn what_waits_is_not_lost_because_something_else_has_changed_the_same_address() {
    for is_edit in [true, false] {
        let rules = |further| [allow("example.com"), further, deny_all()];
        let before = rules(allow("other.test"));
        let mut node = Node::with(&before);
        node.add_pod_as("udn", 7, "uid-p1", RowId::new(0x107));
        node.waiting = Some(VecDeque::new());
        tell(&mut node, 16, 600);
        assert_eq!(sizes(&node), [CHANGES_UNDER_WAY_MAX]);
        if is_edit {
            let edited = rules(Rule {
                ports: tcp(1),
                ..allow("example.com")
            });
            node.set_firewall(&edited);
            node.set_ovn(&edited);
        } else {
            node.answer("udn", "www.other.test", &addresses(4095, 1), 600);
        }
        carry_out_sent(&mut node);
        node.reports.clear();
        compare(&mut node);
        assert!(!node.reports.iter().any(is_difference), "{is_edit}");
        let waiting = sizes(&node).into_iter().sum::<usize>();
        assert!(waiting <= CHANGES_UNDER_WAY_MAX, "{waiting}");
    }
}

/// What has ended for a pod is told again, waits, and ends with the pod. The flows are in the switch all the time.
#[test]
fn flows_that_were_told_again_before_they_were_removed_go_in_parts() {
    let mut node = Node::with(&rules());
    tell_many(&mut node, 1);
    end_all(&mut node);
    tell(&mut node, 16, 600);
    node.remove_interface("p1");
    for _ in 0..10 {
        assert!(node.carry_out_next());
    }
    compare(&mut node);
    while node.own() > 0 {
        let before = node.own();
        assert!(node.carry_out_next());
        let removed = before.saturating_sub(node.own());
        assert!(removed <= CHANGES_UNDER_WAY_MAX, "{removed} at once");
    }
}

/// p1 has many changes on their way. At an address, the flow of one name has ended and waits to be removed, and beside it
/// that of another one waits to be written. An edit takes the rule of the first away.
#[test]
fn what_waits_beside_what_is_still_allowed_goes_with_the_edit_that_takes_its_rule_away() {
    for is_beside in [false, true] {
        let before = [allow("old.test"), allow("example.com"), deny_all()];
        let mut node = Node::with(&before);
        node.answer("p1", "old.test", &[ADDRESS], 1);
        node.pass(MIN_TTL - Duration::from_secs(1));
        let is_open = |node: &Node| {
            let mut open = node.open().into_iter();
            open.any(|(_, dst, priority)| dst == "203.0.113.1" && priority == 11_000)
        };
        assert!(is_open(&node));
        node.waiting = Some(VecDeque::new());
        tell(&mut node, 15, 600);
        if is_beside {
            node.answer("p1", "www.example.com", &[ADDRESS], 600);
        }
        node.pass(Duration::from_secs(2));
        compare(&mut node);
        let after = [deny_all(), allow("example.com")];
        node.set_firewall(&after);
        node.set_ovn(&after);
        carry_out_sent(&mut node);
        assert!(!is_open(&node), "{is_beside}");
    }
}

/// Carries out what was sent by now, and nothing that comes of it.
fn carry_out_sent(node: &mut Node) {
    for _ in 0..node.waiting.as_ref().map_or(0, VecDeque::len) {
        assert!(node.carry_out_next());
    }
}

/// An edit closes an address of p2 and is not confirmed when the connection is lost. The comparison finds the flow with
/// all that has ended for p1.
#[test]
fn what_an_edit_closes_has_its_turn_soon_when_the_connection_was_lost() {
    let mut node = Node::with(&rules());
    node.add_pod("p2", 6);
    tell_many(&mut node, 600);
    node.answer("p2", "www.other.test", &[OTHER], 600);
    node.waiting = Some(VecDeque::new());
    node.remove_interface("p1");
    let edited = [allow("example.com"), deny_all()];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    node.waiting = Some(VecDeque::new());
    node.give(Input::SwitchDown);
    node.give(Input::SwitchUp);
    node.batches();
    while node.destinations().contains("203.0.113.2") {
        if !node.carry_out_next() {
            node.pass(Duration::from_secs(1));
        }
    }
    let batches = node.batches().into_iter();
    let before: usize = batches.map(|(_, changes)| changes.len()).sum();
    assert!(before <= 2 * CHANGES_UNDER_WAY_MAX, "{before} changes");
}
