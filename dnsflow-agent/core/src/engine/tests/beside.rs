//! What may share a batch with what opens for a neighbour.

use std::collections::VecDeque;

use super::{
    edits::{ONE_NUMBER, config},
    limits::many,
    under_way::sizes,
    *,
};
use crate::values::{
    flow::Ends,
    limits::{CHANGES_UNDER_WAY_MAX, COMPARE_INTERVAL, GROUP_RESTS},
};

/// Answers of one turn: the pod, the name and the addresses of each.
fn answer_in_one_turn(node: &mut Node, answers: [(&str, &str, &[[u8; 4]]); 2]) {
    for (pod, name, told) in answers {
        let ifindex = ifindex_of(node.pods[&format!("ns1_{pod}")]);
        let bytes = node.to_pod(ifindex, answer_frame(name, told, 600));
        let frame = frame(ifindex, node.now, &bytes);
        node.engine.handle_frame(frame, node.now);
    }
    node.obey();
}

/// p1 asks for a name whose rule has one flow, in the turn in which a neighbour is told an address. The name leads to
/// addresses with 256 flows of another name: these make room, or come back where the address had a mark.
fn changes_beside_a_neighbour(mut node: Node) -> usize {
    node.add_pod("p2", 6);
    let told = addresses(0, 120);
    for part in told.chunks(30) {
        node.answer("p1", "large.test", part, 600);
        node.pass(Duration::from_secs(40));
    }
    node.batches();
    node.waiting = Some(VecDeque::new());
    answer_in_one_turn(
        &mut node,
        [("p2", "other.test", &[OTHER]), ("p1", "small.test", &told)],
    );
    sizes(&node)[0]
}

#[test]
fn flows_of_another_name_that_make_room_do_not_stand_before_those_of_a_neighbour() {
    let of_small = [allow("small.test"), deny("small.test")];
    let changes = of_small.map(|small| {
        changes_beside_a_neighbour(Node::with(&[
            many(small, 1),
            many(allow("large.test"), 256),
            allow("other.test"),
        ]))
    });
    let most = changes.into_iter().max();
    assert!(most <= Some(1 + CHANGES_UNDER_WAY_MAX), "{changes:?}");
}

#[test]
fn flows_of_another_name_that_come_in_place_of_a_mark_do_not_stand_before_those_of_a_neighbour() {
    let mut node = Node::bare();
    node.engine = Engine::new(config(Some(0xffe0_0000)));
    let node = node.start(&[
        many(deny("small.test"), 1),
        many(allow("large.test"), 200),
        allow("other.test"),
    ]);
    let changes = changes_beside_a_neighbour(node);
    assert!(changes <= 8 + CHANGES_UNDER_WAY_MAX, "{changes}");
}

/// The number of a group rests until the switch has forgotten its megaflows. The removal of its flows waits behind what
/// ends for another pod, and the number rests meanwhile.
#[test]
fn a_number_rests_until_its_flows_have_gone() {
    let mut node = Node::bare();
    node.engine = Engine::new(config(ONE_NUMBER));
    let mut node = node.start(&[
        many(allow("example.com"), 1),
        allow("other.test"),
        deny_all(),
    ]);
    node.add_pod("p2", 6);
    node.answer("p2", "www.example.com", &[ADDRESS], 1);
    assert_eq!(node.marks.len(), 1);
    // No number is left for p1: it has flows.
    let told: Vec<_> = (0..16).map(|name| addresses(name * 256, 256)).collect();
    for (name, told) in told.iter().enumerate() {
        node.answer("p1", &format!("n{name}.example.com"), told, 600);
    }
    let of_group = |node: &Node| {
        let mut keys = node.switch.keys();
        keys.any(|key| matches!(key.matches.ends, Ends::Group { .. }))
    };
    node.pass(Duration::from_secs(115));
    assert!(of_group(&node));
    node.waiting = Some(VecDeque::new());
    node.remove_interface("p1");
    let mut has_waited = false;
    while of_group(&node) {
        node.carry_out_next();
        // Dumps come as often as parts do.
        node.pass(Duration::from_secs(2));
        has_waited |= node.engine.told.cache.groups().ids().is_empty();
        node.answer("p2", "www.other.test", &[OTHER], 600);
        assert!(node.marks.is_empty());
    }
    assert!(has_waited);
    node.waiting = None;
    node.pass(GROUP_RESTS + COMPARE_INTERVAL);
    node.answer("p2", "www.example.com", &[ADDRESS], 600);
    assert_eq!(node.marks.len(), 1);
}

/// What ends goes in parts. An answer for a name of one flow takes along all that waits at its addresses, in the batch
/// of its turn.
#[test]
fn what_has_ended_does_not_stand_before_a_neighbour_because_its_addresses_open_again() {
    let mut node = Node::with(&[
        many(allow("small.test"), 1),
        many(allow("large.test"), 200),
        allow("other.test"),
    ]);
    node.add_pod("p2", 6);
    let told = addresses(0, 40);
    node.answer("p1", "large.test", &told, 1);
    assert_eq!(node.switch.len(), 40 * 200);
    node.pass(MIN_TTL - Duration::from_secs(1));
    node.waiting = Some(VecDeque::new());
    while node.switch.len() == 40 * 200 {
        if !node.carry_out_next() {
            node.pass(Duration::from_secs(1));
        }
    }
    // The next part is under way, and all else waits.
    assert_eq!(node.engine.switch.sizes()[2], 38 * 200);
    node.waiting = Some(VecDeque::new());
    answer_in_one_turn(
        &mut node,
        [("p2", "other.test", &[OTHER]), ("p1", "small.test", &told)],
    );
    let most = 1 + CHANGES_UNDER_WAY_MAX;
    assert!(sizes(&node)[0] <= most, "{:?}", sizes(&node));
}

/// By marks, an answer that might change many flows changes none, in a turn in which another pod's changes some. An
/// agent that ends waits for what is on its way: nothing is.
#[test]
fn an_answer_without_a_change_of_flows_leaves_nothing_on_its_way() {
    let mut node = Node::bare();
    node.engine = Engine::new(config(Some(0xffe0_0000)));
    let rules = [many(allow("large.test"), 60), deny("bad.test"), deny_all()];
    let mut node = node.start(&rules);
    node.add_pod("p2", 6);
    node.answer("p1", "large.test", &[ADDRESS], 600);
    node.pass(Duration::from_secs(11));
    assert!(!node.engine.is_writing());
    answer_in_one_turn(
        &mut node,
        [
            ("p2", "bad.test", &[OTHER]),
            ("p1", "large.test", &addresses(0, 3)),
        ],
    );
    node.pass(Duration::from_secs(60));
    assert_eq!(node.marks.len(), 4);
    assert!(!node.engine.is_writing());
}
