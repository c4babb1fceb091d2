//! A start knows by the snapshot's rules by which rule a flow was written. They are those that the switch has followed.

use std::collections::VecDeque;

use super::{
    super::{
        edits::{aged, node},
        starts::{edit, is_open_at_all, leave_flows, take_dump},
    },
    *,
};
use crate::{testing::shown, values::limits::UNKNOWN_MAX};

/// The rule of 600 open addresses is replaced by one of another name while no agent runs: its flows are the same. The time
/// of the names is over (or the last snapshot has not their names). The next agent begins to remove the flows, in parts, and
/// ends before the switch has confirmed all of them.
fn left_to_another_rule(with_names: bool, ends_early: bool) -> usize {
    let former = [allow("old.test"), deny_all()];
    let rules = [allow("new.test"), deny_all()];
    let mut before = Node::with(&former);
    for name in 0..3 {
        let text = format!("n{name}.old.test");
        before.answer("p1", &text, &addresses(name * 200, 200), 60);
    }
    before.pass(Duration::from_secs(30));
    assert_eq!(before.destinations().len(), 600);
    let mut saved = before.engine.saved(before.now);
    if !with_names {
        saved.entries.clear();
    }
    let away = Duration::from_secs(120);
    before.now = before.now + away;
    saved.entries = aged(saved.entries, away);
    if ends_early {
        let node = started_with(&mut before, saved, Config::default());
        let mut node = read_but_southbound(node, &before, &rules);
        node.waiting = Some(VecDeque::new());
        node.give(Input::Sb(southbound(&node, &rules)));
        carry_out_until_dump(&mut node);
        assert!(node.carry_out_next());
        assert!(node.engine.switch.is_compared());
        // One part is removed.
        assert!(node.carry_out_next());
        saved = node.engine.saved(node.now);
        node.waiting = None;
        before = node;
    }
    let mut node = next(&mut before, saved, None, &rules);
    use_for(&mut node, Duration::from_secs(600));
    node.destinations().len()
}

#[test]
fn what_a_start_has_not_removed_yet_is_not_left_to_the_rule_that_has_come_since() {
    let mut open = Vec::new();
    for with_names in [false, true] {
        for ends_early in [false, true] {
            let left = left_to_another_rule(with_names, ends_early);
            open.extend((left > 0).then_some((with_names, ends_early, left)));
        }
    }
    assert_eq!(open, []);
}

/// The agent ends with a snapshot of now. Whether the next one has the address open, which is in use.
fn is_open_behind_restart(
    mut before: Node,
    way: Option<u32>,
    rules: &[Rule],
    address: [u8; 4],
) -> bool {
    let saved = before.engine.saved(before.now);
    before.waiting = None;
    let mut node = next(&mut before, saved, way, rules);
    use_for(&mut node, Duration::from_secs(600));
    is_open_at_all(&node, address)
}

/// An edit while the switch is away, or does not answer. The time of the name ends meanwhile, and then the agent.
#[test]
fn what_an_edit_closes_is_not_left_to_the_rule_in_its_place_by_a_restart_before_the_switch_follows()
{
    let mut open = Vec::new();
    for way in WAYS {
        for is_away in [false, true] {
            let former = [allow("old.test"), deny_all()];
            let rules = [allow("new.test"), deny_all()];
            let mut before = node(way, &former);
            before.answer("p1", "www.old.test", &[ADDRESS], 60);
            before.pass(Duration::from_secs(30));
            assert!(is_open_at_all(&before, ADDRESS));
            before.waiting = Some(VecDeque::new());
            if is_away {
                before.give(Input::SwitchDown);
            }
            edit(&mut before, &rules);
            before.pass(Duration::from_secs(60));
            let is_open = is_open_behind_restart(before, way, &rules, ADDRESS);
            open.extend(is_open.then_some((way, is_away)));
        }
    }
    assert_eq!(open, []);
}

/// The connection is there again, and a dump has shown the flow of an address when an edit closes it: no change is sent
/// before the comparison has ended, and the agent ends then.
#[test]
fn what_an_edit_closes_while_a_dump_comes_is_not_left_to_the_rule_in_its_place() {
    let former = [allow("old.test"), deny_all()];
    let rules = [allow("new.test"), deny_all()];
    let mut before = Node::with(&former);
    before.answer("p1", "www.old.test", &[ADDRESS], 60);
    before.pass(Duration::from_secs(30));
    before.waiting = Some(VecDeque::new());
    before.give(Input::SwitchDown);
    before.give(Input::SwitchUp);
    before.pass(Duration::ZERO);
    carry_out_until_dump(&mut before);
    before.dump_shows(before.installed(), true);
    edit(&mut before, &rules);
    before.dump_shows(Vec::new(), false);
    assert!(before.engine.switch.is_compared());
    let mut saved = before.engine.saved(before.now);
    // The name is not known.
    saved.entries.clear();
    before.waiting = None;
    let mut node = next(&mut before, saved, None, &rules);
    use_for(&mut node, Duration::from_secs(600));
    assert!(!is_open_at_all(&node, ADDRESS));
}

/// The first comparison does not look at all flows, so that the second one adopts, too. An edit closes an adopted address
/// while the second dump is on its way: the dump has shown the flow before the switch has removed it.
#[test]
fn a_flow_that_an_edit_removes_while_a_further_dump_comes_is_not_adopted_again() {
    for others in [1, UNKNOWN_MAX] {
        let former = [allow("old.test"), deny_all()];
        let rules = [allow("new.test"), deny_all()];
        let mut before = Node::with(&former);
        before.answer("p1", "www.old.test", &[ADDRESS], 600);
        before.pass(Duration::from_secs(30));
        leave_flows(&mut before, others, false);
        let node = started_with(&mut before, Saved::default(), Config::default());
        let mut node = read_but_southbound(node, &before, &former);
        node.waiting = Some(VecDeque::new());
        node.give(Input::Sb(southbound(&node, &former)));
        carry_out_until_dump(&mut node);
        assert!(node.carry_out_next());
        assert!(node.engine.switch.is_compared());
        assert!(is_open_at_all(&node, ADDRESS));
        let dump = take_dump(&mut node);
        let flows = node.installed();
        edit(&mut node, &rules);
        while node.carry_out_next() {}
        assert!(!is_open_at_all(&node, ADDRESS), "closed by the edit");
        node.waiting = None;
        node.give(shown(dump, flows, false));
        use_for(&mut node, Duration::from_secs(60));
        assert!(!is_open_at_all(&node, ADDRESS), "{others}");
    }
}

/// A rule gives way to another one for a whole comparison. This opens an address, which an edit back closes, but the switch
/// does not answer any more.
#[test]
fn a_rule_that_comes_back_does_not_get_what_the_rule_between_has_opened_behind_a_comparison() {
    let back = [allow("back.test"), deny_all()];
    let between = [allow("between.test"), deny_all()];
    let mut open = Vec::new();
    for (is_busy, is_away) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut before = Node::with(&back);
        before.pass(Duration::from_secs(30));
        before.waiting = Some(VecDeque::new());
        edit(&mut before, &between);
        while before.carry_out_next() {}
        take_dump(&mut before);
        let flows = before.installed();
        if is_busy {
            before.answer("p1", "busy.between.test", &[OTHER], 600);
        }
        before.dump_shows(flows, false);
        before.answer("p1", "www.between.test", &[ADDRESS], 60);
        while before.carry_out_next() {}
        assert!(is_open_at_all(&before, ADDRESS));
        if is_away {
            before.give(Input::SwitchDown);
        }
        edit(&mut before, &back);
        before.pass(Duration::from_secs(90));
        let is_open = is_open_behind_restart(before, None, &back, ADDRESS);
        open.extend(is_open.then_some((is_busy, is_away)));
    }
    assert_eq!(open, []);
}

/// A node whose switch always refuses the flows of `a.test`.
fn refusing(rules: &[Rule]) -> Node {
    let mut twin = Node::with(rules);
    twin.answer("p1", "www.a.test", &addresses(0, 128), 3600);
    let mut node = Node::with(rules);
    node.pass(Duration::from_secs(30));
    node.refused = twin.of_rules().cloned().collect();
    node
}

/// The pod is told a further address of `a.test` every five seconds.
fn refuse(node: &mut Node, first: u32, count: u32) {
    for address in first..first + count {
        node.answer("p1", "www.a.test", &addresses(address, 1), 3600);
        node.pass(Duration::from_secs(5));
    }
}

#[test]
fn a_flow_that_is_always_refused_leaves_no_rule_out_of_the_snapshot() {
    let rules = [allow("a.test"), allow("b.test"), deny_all()];
    let mut before = refusing(&[allow("a.test"), deny_all()]);
    refuse(&mut before, 0, 6);
    edit(&mut before, &rules);
    refuse(&mut before, 6, 60);
    assert_eq!(before.of_rules().count(), 0);
    let saved = before.engine.saved(before.now);
    assert!(saved.rules.iter().all(|saved| !saved.is_partial));
    // The snapshot has the rule, and not the name.
    before.answer("p1", "www.b.test", &[OTHER], 600);
    before.pass(Duration::from_secs(5));
    let mut node = next(&mut before, saved, None, &rules);
    use_for(&mut node, Duration::from_secs(30));
    assert!(is_open_at_all(&node, OTHER));
}

#[test]
fn beside_a_flow_that_is_always_refused_a_rule_that_comes_back_gets_nothing_of_the_rule_between() {
    let rules = |name| [allow("a.test"), allow(name), deny_all()];
    let back = rules("back.test");
    let mut before = refusing(&back);
    refuse(&mut before, 0, 6);
    edit(&mut before, &rules("between.test"));
    refuse(&mut before, 6, 120);
    before.answer("p1", "www.between.test", &[OTHER], 60);
    before.pass(Duration::from_secs(30));
    assert!(is_open_at_all(&before, OTHER));
    before.waiting = Some(VecDeque::new());
    edit(&mut before, &back);
    before.pass(Duration::from_secs(90));
    assert!(!is_open_behind_restart(before, None, &back, OTHER));
}
