//! The numbers of groups: how many there are, when one is free, and which a journal knows.

use std::{collections::VecDeque, num::NonZeroU32};

use super::{
    edits::{self, ONE_NUMBER, WAYS},
    limits::many,
    marks::ifindex,
    restart::{read_but_southbound, southbound, started, started_with},
    starts::{self, is_open, is_open_at_all},
    *,
};
use crate::values::{
    flow::{Ends, Tag},
    limits::{GROUP_RESTS, GROUP_STAYS},
};

/// Longer than a group without addresses has its number, and than the number rests.
const OVER: Duration = GROUP_STAYS
    .saturating_add(GROUP_RESTS)
    .saturating_add(COMPARE_INTERVAL.saturating_mul(3));

const THIRD: [u8; 4] = [203, 0, 113, 3];

/// The tag of packets to an address.
pub(super) fn tag(node: &Node, address: [u8; 4]) -> Option<Tag> {
    let tagged = node.tagged().into_iter();
    let mut of_address = tagged.filter(|(_, dst, _)| *dst == IpAddr::from(address));
    of_address.next().map(|(.., tag)| tag)
}

/// Whether a flow is of the group with this tag.
pub(super) fn is_of(key: &FlowKey, tag: Option<Tag>) -> bool {
    matches!(key.matches.ends, Ends::Tagged { tag: of_flow, .. } if Some(of_flow) == tag)
}

/// Rules for three names, and the same with a further one, for the name that was asked: its address gets another group.
fn edit() -> [Vec<Rule>; 2] {
    let former = || ["example.com", "a.test", "b.test"].map(allow);
    [
        [&former()[..], &[deny_all()]].concat(),
        [&former()[..], &[allow("www.example.com"), deny_all()]].concat(),
    ]
}

/// With this mask there are three numbers.
const THREE_NUMBERS: u32 = 0xc000_0000;

fn config_of_three() -> Config {
    Config {
        mark_mask: NonZeroU32::new(THREE_NUMBERS),
        ..Config::default()
    }
}

fn node_of_three(rules: &[Rule]) -> Node {
    let mut node = edits::node(Some(THREE_NUMBERS), rules);
    node.answer("p1", "www.example.com", &[ADDRESS], 600);
    node
}

/// A flow of the other group of the address after the edit. The switch does not take it.
fn refused_flow() -> FlowKey {
    let [former, moved] = edit();
    let mut node = node_of_three(&former);
    let before = node.switch.clone();
    starts::edit(&mut node, &moved);
    let mut keys = node.of_rules().cloned();
    let key = keys.find(|key| !before.contains_key(key));
    key.expect("a flow of the other group")
}

fn take_two_numbers(node: &mut Node) {
    node.answer("p1", "a.test", &[OTHER], 600);
    node.answer("p1", "b.test", &[THIRD], 600);
}

/// Groups are made of all numbers that are free. None of them opens the address of a former number.
fn take_all_numbers(node: &mut Node) {
    take_two_numbers(node);
    let destinations = [2, 3].map(|host| format!("203.0.113.{host}"));
    assert_eq!(node.destinations(), destinations.into());
}

/// A group whose number no mark stands for opens its addresses by flows.
#[test]
fn addresses_get_their_tags_by_flows_where_no_mark_stands_for_the_number() {
    let rules = ["a.test", "b.test", "c.test", "d.test"].map(allow);
    let mut node = edits::node(Some(THREE_NUMBERS), &rules);
    node.add_pod("p2", 6);
    for (name, host) in ["a.test", "b.test", "c.test", "d.test"].iter().zip(1..) {
        node.answer("p1", name, &[[203, 0, 113, host]], 600);
        let number = tag(&node, [203, 0, 113, host]).map(Tag::number);
        assert_eq!(number, Some(host.into()));
    }
    assert_eq!((node.marks.len(), node.own()), (3, 1));
    // Another pod for which the rules hold has the same groups.
    node.answer("p2", "a.test", &[THIRD], 600);
    node.answer("p2", "d.test", &[OTHER], 600);
    assert_eq!((node.marks.len(), node.own()), (4, 2));
    assert_eq!(node.of_rules().count(), 4);
}

/// Rules of another namespace hold for a pod: it has numbers of its own.
#[test]
fn groups_of_one_namespace_leave_another_one_its_numbers() {
    for way in WAYS {
        let names = (0..12).map(|bit| format!("n{bit}.test"));
        let names: Vec<String> = names.collect();
        let rules: Vec<Rule> = names.iter().map(|name| allow(name)).collect();
        let mut node = edits::node(way.map(|_| THREE_NUMBERS), &rules);
        for (set, address) in (1..64_u32).zip(addresses(0, 64)) {
            for (_, name) in (0..).zip(&names).filter(|(bit, _)| set & (1 << bit) != 0) {
                node.answer("p1", name, &[address], 600);
            }
        }
        let before = node.marks.len();
        let first = tag(&node, addresses(0, 1)[0]).expect("it is open").scope();
        follow::add_namespace(&mut node, &[allow("other.test"), deny_all()]);
        follow::answer_other(&mut node, "other.test", ADDRESS);
        let tag = tag(&node, ADDRESS).expect("it is open");
        assert_eq!(tag.number(), 1);
        assert_ne!(tag.scope(), first);
        assert_eq!(node.marks.len() - before, usize::from(way.is_some()));
    }
}

/// Groups end, and others come at once, and after a while.
#[test]
fn a_number_rests_before_another_group_has_it() {
    let name = |at: u8| format!("n{at}.test");
    let all: Vec<Rule> = (0..8).map(|at| allow(&name(at))).collect();
    for way in [None, Some(THREE_NUMBERS)] {
        let mut node = edits::node(way, &all);
        for at in 0..3 {
            node.answer("p1", &name(at), &[[203, 0, 113, 1 + at]], 600);
        }
        let number = |node: &Node, at: u8| tag(node, [203, 0, 113, 1 + at]).map(Tag::number);
        assert_eq!([0, 1, 2].map(|at| number(&node, at)), [1, 2, 3].map(Some));
        starts::edit(&mut node, &all[3..]);
        node.answer("p1", &name(3), &[[203, 0, 113, 4]], 3600);
        assert_eq!(number(&node, 3), Some(4), "their groups stay for a while");
        let first = Tag::new(tag(&node, [203, 0, 113, 4]).expect("open").scope(), 1);
        while node.engine.told.cache.groups().contain(first) {
            node.pass(Duration::from_secs(1));
        }
        node.answer("p1", &name(4), &[[203, 0, 113, 5]], 3600);
        assert_eq!(number(&node, 4), Some(5), "they rest");
        node.pass(GROUP_RESTS + 3 * COMPARE_INTERVAL);
        node.answer("p1", &name(5), &[[203, 0, 113, 6]], 3600);
        assert_eq!(number(&node, 5), Some(1));
    }
}

/// A scope ends with its ports, groups and rests. Another one gets its number.
#[test]
fn a_scope_rests_before_another_one_has_its_number() {
    for way in WAYS {
        let mut node = edits::node(way, &[allow("example.com"), deny_all()]);
        node.answer("p1", "example.com", &[ADDRESS], 600);
        let first = tag(&node, ADDRESS).expect("it is open").scope();
        node.remove_interface("p1");
        node.remove_logical_port("p1");
        follow::add_namespace(&mut node, &[allow("other.test"), deny_all()]);
        follow::answer_other(&mut node, "other.test", ADDRESS);
        let second = tag(&node, ADDRESS).expect("it is open").scope();
        assert_ne!(second, first);
        node.pass(OVER);
        node.pass(COMPARE_INTERVAL);
        node.add_pod_as("p3", 7, "uid-p3", RowId::new(0x307));
        node.answer("p3", "example.com", &[OTHER], 600);
        assert_eq!(tag(&node, OTHER).map(Tag::scope), Some(first));
        assert_eq!(tag(&node, ADDRESS).map(Tag::scope), Some(second));
    }
}

/// The group of the address does not come into force.
#[test]
fn a_number_is_not_free_while_the_kernel_marks_with_it() {
    let [former, moved] = edit();
    let mut node = node_of_three(&former);
    node.refused = [refused_flow()].into();
    starts::edit(&mut node, &moved);
    assert!(is_open(&node, ADDRESS, 0), "by its former mark");
    node.pass(OVER);
    take_all_numbers(&mut node);
    assert!(!node.marks.contains_key(&(ifindex(&node), ADDRESS.into())));
}

/// Starts an agent with what this run has left, whose rules have moved down behind these. It has not read the southbound
/// database, which is returned as well.
fn moved_meanwhile(before: &mut Node, new: impl IntoIterator<Item = Rule>) -> (Node, Input) {
    let [former, _] = edit();
    let moved: Vec<Rule> = new.into_iter().chain(former).collect();
    let saved = before.folded(&[]);
    let node = started(before, &saved, config_of_three());
    let node = read_but_southbound(node, before, &moved);
    let sb = southbound(&node, &moved);
    (node, Input::Sb(sb))
}

/// A further rule is for the name. The flows of the next group do not come.
#[test]
fn a_number_of_the_former_run_is_not_free_while_the_kernel_marks_with_it() {
    let [former, _] = edit();
    let further = [
        &["www.example.com"][..],
        &["com"],
        &["com", "www.example.com"],
    ];
    for further in further {
        let further = || further.iter().map(|name| allow(name));
        let mut before = node_of_three(&former);
        let flows = before.switch.clone();
        let place = (ifindex(&before), IpAddr::from(ADDRESS));
        let former_mark = before.marks[&place].0;
        let (mut twin, sb) = moved_meanwhile(&mut before, further());
        twin.give(sb);
        assert_ne!(twin.marks[&place].0, former_mark, "another number");
        let mut before = node_of_three(&former);
        let of_former = tag(&before, ADDRESS);
        let (mut node, sb) = moved_meanwhile(&mut before, further());
        // The flows of the former group come in their new places.
        let is_of_next = |key: &&FlowKey| !is_of(key, of_former);
        let refused = twin.of_rules().filter(|key| !flows.contains_key(*key));
        node.refused = refused.filter(is_of_next).cloned().collect();
        assert!(!node.refused.is_empty());
        node.give(sb);
        // The address is open by the flow of its former group alone.
        assert_eq!(node.marks[&place].0, former_mark);
        take_two_numbers(&mut node);
        let open = node.open().into_iter();
        let open = open.filter(|(_, dst, _)| *dst == Ipv4Addr::from(ADDRESS).to_string());
        assert_eq!(open.count(), 1);
        // That ends, although the next group does not come into force.
        node.pass(2 * COMPARE_INTERVAL);
        assert!(!node.marks.contains_key(&place));
        take_all_numbers(&mut node);
    }
}

/// Three groups have three numbers, and their rules move while no agent runs.
#[test]
fn no_mark_of_a_former_run_meets_the_flows_of_another_group() {
    let [former, _] = edit();
    for places in 1..8 {
        let mut before = node_of_three(&former);
        take_two_numbers(&mut before);
        let open = |node: &Node| {
            let open = node.open().into_iter();
            let open = open.map(|(_, dst, priority)| (dst, priority));
            open.collect::<BTreeSet<_>>()
        };
        let opened_before = open(&before);
        let destinations = before.destinations();
        let moved = opened_before.iter();
        let moved = moved.map(|(dst, priority)| (dst.clone(), priority - places));
        let moved: BTreeSet<_> = moved.collect();
        let rightly: BTreeSet<_> = opened_before.union(&moved).cloned().collect();
        let new = (0..places).map(|place| allow(&format!("new{place}.test")));
        let (mut node, sb) = moved_meanwhile(&mut before, new);
        node.waiting = Some(VecDeque::new());
        node.give(sb);
        while node.carry_out_next() {
            let open = open(&node);
            assert!(open.is_subset(&rightly), "{places}: {open:?}");
            assert_eq!(node.destinations(), destinations, "{places}: it closes");
        }
        assert_eq!(open(&node), moved);
    }
}

/// The rule of an address was taken away while no agent ran. An answer for another name comes before the marks are read,
/// or nobody can read them for a while.
#[test]
fn no_number_is_given_before_the_marks_of_the_former_run_are_read() {
    let rules = [
        deny_all(),
        many(allow("new.test"), 2),
        allow("further.test"),
    ];
    for has_journal in [false, true] {
        for hidden in [0, 100] {
            let case = format!("journal: {has_journal}, hidden: {hidden}");
            let mut before = edits::node(ONE_NUMBER, &[many(allow("old.test"), 1), deny_all()]);
            before.answer("p1", "www.old.test", &[ADDRESS], 600);
            before.pass(Duration::from_secs(30));
            assert_eq!((before.marks.len(), before.open().len()), (1, 1));
            let saved = has_journal.then(|| before.folded(&[]));
            let node = started_with(&mut before, saved, edits::config(ONE_NUMBER));
            let mut node = read_but_southbound(node, &before, &rules);
            node.waiting = Some(VecDeque::new());
            node.give(Input::Sb(southbound(&node, &rules)));
            for step in 0..300 {
                node.hides_marks = step < hidden;
                if step % 8 == 0 {
                    node.answer("p1", "www.new.test", &[OTHER], 600);
                }
                if !node.carry_out_next() {
                    node.pass(Duration::from_secs(1));
                }
                assert!(!is_open_at_all(&node, ADDRESS) || is_open(&node, ADDRESS, 0));
                assert!(!is_open(&node, ADDRESS, 1), "{case}, step {step}");
            }
            assert!(is_open(&node, OTHER, 1), "{case}");
            // From now on, the number is free.
            while node.carry_out_next() {}
            node.waiting = None;
            node.pass(OVER);
            node.answer("p1", "further.test", &[THIRD], 600);
            let number = if has_journal { 1 } else { 2 };
            assert_eq!(tag(&node, THIRD).map(Tag::number), Some(number), "{case}");
        }
    }
}

/// A group is in the journal before its flows and marks are on their way, and until its number rests.
#[test]
fn the_journal_has_each_group() {
    for way in WAYS {
        let mut node = edits::node(way, &[allow("example.com"), deny_all()]);
        node.journal.clear();
        node.waiting = Some(VecDeque::new());
        node.answer("p1", "example.com", &[ADDRESS], 60);
        let tags = |node: &Node| {
            let groups = node.folded(&[]).groups;
            groups.into_keys().collect::<Vec<_>>()
        };
        let known = tags(&node);
        assert_eq!(known.len(), 1, "nothing is carried out yet");
        while node.carry_out_next() {}
        node.waiting = None;
        assert_eq!(tag(&node, ADDRESS), Some(known[0]));
        while node.of_rules().next().is_some() {
            assert_eq!(tags(&node), known);
            node.pass(Duration::from_secs(1));
        }
        assert_eq!(tags(&node), []);
    }
}
