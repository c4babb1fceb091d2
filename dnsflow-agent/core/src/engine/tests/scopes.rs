//! The groups of a scope: how many there may be, and what becomes of them when rules and ports move.

use std::num::NonZeroU32;

use super::{limits::many, *};
use crate::values::{
    flow::Ends,
    limits::{GROUP_FLOWS_PER_SCOPE_MAX, GROUP_NAMES_PER_SCOPE_MAX, Limit, PATTERNS_MAX},
};

const MASK: u32 = 0xffe0_0000;
/// As many ports as a rule may have.
const PORTS: usize = 1024;
/// So many groups of such rules have the room of a scope.
const FULL: usize = GROUP_FLOWS_PER_SCOPE_MAX / PORTS;

fn by_marks(rules: &[Rule]) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        mark_mask: NonZeroU32::new(MASK),
        ..Config::default()
    });
    node.start(rules)
}

fn name(number: usize) -> String {
    format!("n{number}.test")
}

fn address(number: usize) -> [u8; 4] {
    [198, 18, 0, number.try_into().expect("few")]
}

/// A rule for each of so many names.
fn rules(names: usize, rule: impl Fn(&str) -> Rule, ports: usize) -> Vec<Rule> {
    (0..names).map(|at| many(rule(&name(at)), ports)).collect()
}

/// The pod is told an address of each of so many names, and never more than its budget allows.
fn told(node: &mut Node, names: usize) {
    for at in 0..names {
        node.pass(Duration::from_secs(5));
        node.answer("p1", &name(at), &[address(at)], 3600);
    }
}

/// All rules change, and OVN follows.
fn edit(node: &mut Node, rules: &[Rule]) {
    node.set_firewall(rules);
    follow(node, rules);
    node.pass(Duration::ZERO);
}

fn entry_flows(node: &Node) -> usize {
    let keys = node.switch.keys();
    keys.filter(|key| key.matches.ends == Ends::Untranslated)
        .count()
}

#[test]
fn an_edit_that_makes_groups_larger_than_their_room_closes_what_does_not_fit() {
    let more = FULL + 8;
    let small = rules(more, allow, 1);
    let mut node = Node::with(&[]);
    edit(&mut node, &small);
    told(&mut node, more);
    assert_eq!(node.destinations().len(), more);
    node.reports.clear();
    edit(&mut node, &rules(more, allow, PORTS));
    assert_eq!(node.of_rules().count(), GROUP_FLOWS_PER_SCOPE_MAX);
    assert_eq!(node.destinations().len(), FULL);
    let limit = Limit::FlowsOfNamespace;
    let reported = format!("ns1: {limit:?} of ns1_p1, {GROUP_FLOWS_PER_SCOPE_MAX}");
    assert_eq!(node.limits_reported(), [reported]);
    edit(&mut node, &small);
    assert_eq!(node.destinations().len(), more, "there is room again");
}

#[test]
fn denied_addresses_whose_groups_an_edit_leaves_no_room_are_closed_whatever_the_port() {
    let more = FULL + 8;
    let mut node = Node::with(&[]);
    edit(&mut node, &rules(more, deny, 1));
    told(&mut node, more);
    edit(&mut node, &rules(more, deny, PORTS));
    assert!(node.of_rules().count() <= GROUP_FLOWS_PER_SCOPE_MAX + 1);
    let open = node.open();
    let closed = (0..more).filter(|at| {
        let dst = Ipv4Addr::from(address(*at)).to_string();
        open.iter().any(|(_, of, _)| *of == dst)
    });
    assert_eq!(closed.count(), more, "each has a flow that denies");
    assert_eq!(node.own(), more);
}

#[test]
fn addresses_of_several_names_leave_room_to_those_of_one() {
    let mut node = Node::with(&[]);
    edit(&mut node, &rules(FULL, allow, PORTS));
    // Each has the flows of two names.
    let unions = FULL / 2 / 2;
    for at in 0..=unions {
        for name in [name(at), name(at + 1)] {
            node.pass(Duration::from_secs(60));
            node.answer("p1", &name, &[address(FULL + at)], 7200);
        }
    }
    let open = node.open();
    let flows = |at: usize| {
        let dst = Ipv4Addr::from(address(FULL + at)).to_string();
        open.iter().filter(|(_, of, _)| *of == dst).count()
    };
    assert!((0..unions).all(|at| flows(at) == 2 * PORTS));
    // It gets what its first rule allows.
    assert_eq!(flows(unions), PORTS);
    // Each name has its room.
    told(&mut node, FULL);
    assert_eq!(node.destinations().len(), unions + 1 + FULL);
}

#[test]
fn an_address_that_had_no_room_is_open_by_an_answer_once_there_is() {
    let more = FULL + 1;
    let mut node = Node::with(&[]);
    edit(&mut node, &rules(more, allow, PORTS));
    told(&mut node, more);
    assert_eq!(node.destinations().len(), FULL);
    let mut fewer = rules(more, allow, PORTS);
    fewer[0].ports.truncate(1);
    fewer[1].ports.truncate(1);
    edit(&mut node, &fewer);
    node.answer("p1", &name(FULL), &[address(FULL)], 3600);
    assert_eq!(node.destinations().len(), more);
}

#[test]
fn where_rules_move_to_another_table_tags_are_given_there() {
    for marks in [false, true] {
        let rules = [allow("a.test"), deny("b.test")];
        let mut node = match marks {
            true => by_marks(&rules),
            false => Node::with(&rules),
        };
        node.answer("p1", "a.test", &[ADDRESS], 600);
        node.answer("p1", "b.test", &[OTHER], 600);
        let of_rules = |node: &Node| -> BTreeSet<u8> {
            let keys = node.switch.keys();
            let keys = keys.filter(|key| key.table != node.tags_end);
            keys.map(|key| key.table).collect()
        };
        assert_eq!(of_rules(&node), [BASE + 4].into());
        let (_, mut moved) = rows_of(&rules);
        for (_, flow) in &mut moved {
            flow.as_mut().expect("a rule").table_id = 6;
        }
        node.ovn_table = BASE + 6;
        node.give(Input::Sb(SbUpdate {
            logical_flows: moved,
            ..SbUpdate::default()
        }));
        node.pass(Duration::ZERO);
        assert_eq!(of_rules(&node), [BASE + 6].into(), "by marks: {marks}");
        assert_eq!(node.destinations().len(), 2, "by marks: {marks}");
    }
}

#[test]
fn without_rules_no_flow_makes_tags_of_marks() {
    let rules = [allow("a.test")];
    let mut node = by_marks(&rules);
    node.answer("p1", "a.test", &[ADDRESS], 600);
    assert_eq!((entry_flows(&node), node.marks.len()), (1, 1));
    edit(&mut node, &[]);
    assert_eq!((entry_flows(&node), node.marks.len()), (0, 0));
    edit(&mut node, &rules);
    node.answer("p1", "a.test", &[ADDRESS], 600);
    assert_eq!((entry_flows(&node), node.marks.len()), (1, 1));
    // A dry run enforces nothing.
    node.give(firewalls(
        false,
        Some(Firewall {
            dry_run: true,
            ..firewall(&rules)
        }),
    ));
    node.pass(Duration::ZERO);
    assert_eq!((entry_flows(&node), node.marks.len()), (0, 0));
}

#[test]
fn a_group_of_many_names_takes_no_more_than_its_scope_has_for_names() {
    // Each address has a set of names of its own.
    let long = |at: usize| format!("{}.{}.{at:05}.test", "a".repeat(63), "b".repeat(63));
    let names: Vec<String> = (0..40).map(long).collect();
    let all: Vec<Rule> = names.iter().map(|name| allow(name)).collect();
    let mut node = Node::with(&[]);
    edit(&mut node, &all);
    for at in 1..200_usize {
        let told = names.iter().enumerate();
        let told = told.filter(|(number, _)| at >> (number % 10) & 1 == 1);
        for (_, name) in told {
            node.answer("p1", name, &[address(at)], 3600);
        }
        node.pass(Duration::from_millis(500));
    }
    let groups = node.engine.told.cache.groups().behind(None, usize::MAX);
    let octets = groups.iter().map(|(_, group)| group.patterns.octets());
    let octets: usize = octets.sum();
    assert!(octets <= GROUP_NAMES_PER_SCOPE_MAX);
    assert!(
        octets > GROUP_NAMES_PER_SCOPE_MAX - PATTERNS_MAX * 255,
        "{octets}"
    );
}
