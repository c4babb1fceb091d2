//! An answer to an earlier dump: the switch answers over a connection of its own, whatever becomes of the one over which
//! flows are written.

use std::collections::VecDeque;

use super::{
    starts::{edit, is_open_at_all, take_dump},
    *,
};
use crate::testing::shown;

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
