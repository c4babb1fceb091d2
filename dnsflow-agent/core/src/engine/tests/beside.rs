//! What may share a batch with what opens for a neighbour.

use std::collections::VecDeque;

use super::{
    edits::{WAYS, node},
    limits::many,
    under_way::sizes,
    *,
};
use crate::values::limits::CHANGES_UNDER_WAY_MAX;

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

/// What ends goes in parts. An answer takes along all that waits at its addresses, in the batch of its turn.
#[test]
fn what_has_ended_does_not_stand_before_a_neighbour_because_its_addresses_open_again() {
    let rules = [
        allow("small.test"),
        allow("large.test"),
        allow("other.test"),
    ];
    let mut node = Node::with(&rules);
    node.add_pod("p2", 6);
    let told: Vec<_> = (0..4).map(|part| addresses(part * 256, 256)).collect();
    for (part, told) in told.iter().enumerate() {
        node.answer("p1", &format!("n{part}.large.test"), told, 1);
    }
    assert_eq!(node.own(), 1024);
    node.pass(MIN_TTL - Duration::from_secs(1));
    node.waiting = Some(VecDeque::new());
    while node.own() == 1024 {
        if !node.carry_out_next() {
            node.pass(Duration::from_secs(1));
        }
    }
    node.waiting = Some(VecDeque::new());
    let last = &told[3];
    answer_in_one_turn(
        &mut node,
        [("p2", "other.test", &[OTHER]), ("p1", "small.test", last)],
    );
    let most = 2 + CHANGES_UNDER_WAY_MAX;
    assert!(sizes(&node)[0] <= most, "{:?}", sizes(&node));
}

/// By marks, an answer that might change many flows changes none, in a turn in which another pod's changes some. An
/// agent that ends waits for what is on its way: nothing is.
#[test]
fn an_answer_without_a_change_of_flows_leaves_nothing_on_its_way() {
    let rules = [many(allow("large.test"), 60), deny("bad.test"), deny_all()];
    let mut node = node(WAYS[1], &rules);
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
