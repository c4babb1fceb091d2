//! An answer to an earlier dump: the switch answers over a connection of its own, whatever becomes of the one over which
//! flows are written.

use std::collections::VecDeque;

use super::{
    restart::{read_but_southbound, southbound, started, use_for},
    starts::{carry_out_until_dump, edit, is_open_at_all, take_dump},
    *,
};
use crate::testing::shown;

/// The connection by which flows are written is lost while the first dump comes, by another connection. The rest of this
/// dump arrives when the next comparison has begun.
#[test]
fn what_is_left_of_a_dump_of_before_a_lost_connection_ends_no_comparison() {
    let rules = [allow("example.com"), deny_all()];
    let mut closed = Vec::new();
    // How many flows come before the connection is lost, of two; `None`: it is not lost.
    for shown_before in [None, Some(0), Some(1), Some(2)] {
        let mut before = Node::with(&rules);
        before.pass(Duration::from_secs(30));
        before.answer("p1", "www.example.com", &[ADDRESS, OTHER], 60);
        use_for(&mut before, Duration::from_secs(60));
        let node = started(&mut before, &[], Config::default());
        let mut node = read_but_southbound(node, &before, &rules);
        node.waiting = Some(VecDeque::new());
        node.give(Input::Sb(southbound(&node, &rules)));
        carry_out_until_dump(&mut node);
        if let Some(count) = shown_before {
            let dump = take_dump(&mut node);
            let mut head = node.installed();
            let tail = head.split_off(count);
            node.give(shown(dump, head, true));
            node.give(Input::SwitchDown);
            node.give(Input::SwitchUp);
            node.pass(Duration::ZERO);
            node.give(shown(dump, tail, false));
        }
        while node.carry_out_next() {}
        node.waiting = None;
        use_for(&mut node, Duration::from_secs(30));
        for address in [ADDRESS, OTHER] {
            let is_open = is_open_at_all(&node, address);
            closed.extend((!is_open).then_some((shown_before, address)));
        }
    }
    assert_eq!(closed, []);
}

/// The same with flows that deny: their addresses open.
#[test]
fn what_is_left_of_a_dump_of_before_a_lost_connection_ends_no_denial() {
    let rules = [deny("bad.test"), allow("example.com")];
    for is_lost in [false, true] {
        let mut before = Node::with(&rules);
        before.pass(Duration::from_secs(30));
        before.answer("p1", "www.bad.test", &[ADDRESS], 600);
        before.pass(Duration::from_secs(30));
        assert_eq!(before.of_rules().count(), 1);
        let node = started(&mut before, &[], Config::default());
        let mut node = read_but_southbound(node, &before, &rules);
        node.waiting = Some(VecDeque::new());
        node.give(Input::Sb(southbound(&node, &rules)));
        carry_out_until_dump(&mut node);
        if is_lost {
            let dump = take_dump(&mut node);
            let flows = node.installed();
            node.give(Input::SwitchDown);
            node.give(Input::SwitchUp);
            node.pass(Duration::ZERO);
            node.give(shown(dump, flows, false));
        }
        while node.carry_out_next() {}
        node.waiting = None;
        use_for(&mut node, Duration::from_secs(30));
        assert_eq!(node.of_rules().count(), 1, "lost: {is_lost}");
    }
}

/// Behind a reconnection in a run, an edit of the meantime is not put off by what is left of an earlier dump.
#[test]
fn what_an_edit_has_closed_while_the_switch_was_away_closes_though_an_earlier_dump_ends_behind_it()
{
    for is_late in [false, true] {
        let rules = [allow("example.com"), deny_all()];
        let mut node = Node::with(&rules);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        node.pass(Duration::from_secs(5));
        node.waiting = Some(VecDeque::new());
        let dump = take_dump(&mut node);
        let flows = node.installed();
        node.give(shown(dump, flows, true));
        node.give(Input::SwitchDown);
        edit(&mut node, &[deny_all()]);
        node.give(Input::SwitchUp);
        node.pass(Duration::ZERO);
        if is_late {
            node.give(shown(dump, Vec::new(), false));
        }
        while node.carry_out_next() {}
        node.waiting = None;
        node.pass(COMPARE_INTERVAL / 2);
        assert!(!is_open_at_all(&node, ADDRESS), "late: {is_late}");
    }
}

/// Open vSwitch restarts, and its flows are gone. The last answers of before have waited for the agent to take them.
#[test]
fn flows_that_a_restart_of_the_switch_has_taken_come_back_though_a_dump_of_before_ends_behind_it() {
    for is_late in [false, true] {
        let rules = [allow("example.com"), deny_all()];
        let mut node = Node::with(&rules);
        node.answer("p1", "www.example.com", &[ADDRESS], 600);
        node.pass(Duration::from_secs(5));
        node.waiting = Some(VecDeque::new());
        let dump = take_dump(&mut node);
        let flows = node.installed();
        node.give(Input::SwitchDown);
        node.switch.clear();
        node.sentinels.clear();
        node.give(Input::SwitchUp);
        node.pass(Duration::ZERO);
        if is_late {
            node.give(shown(dump, flows, false));
        }
        while node.carry_out_next() {}
        node.waiting = None;
        node.pass(COMPARE_INTERVAL / 2);
        assert!(is_open_at_all(&node, ADDRESS), "late: {is_late}");
    }
}
