//! Starts: what is over opens nothing, and an answer goes back when its address is open.

use super::*;

const MARKS: Option<u32> = WAYS[1];

fn is_open(node: &Node, address: [u8; 4]) -> bool {
    let address = Ipv4Addr::from(address).to_string();
    node.destinations().contains(&address)
}

/// Whether the edge is to do this next.
fn next_is(node: &Node, what: impl Fn(&Command) -> bool) -> bool {
    node.waiting.iter().flatten().next().is_some_and(what)
}

fn take_next(node: &mut Node) -> Command {
    let waiting = node.waiting.as_mut().expect("commands wait");
    waiting.pop_front().expect("there is one")
}

/// The agent was away until the name of an address was over. Before the first comparison has ended, another address with
/// the same rules is opened, and the name is answered again.
fn answered_during_the_first_comparison(behind_the_reading: bool) {
    let rules = [allow("example.com"), deny_all()];
    let mut before = node(MARKS, &rules);
    before.answer("p1", "www.example.com", &[ADDRESS], 60);
    let away = MIN_TTL + MARK_SLACK + Duration::from_secs(5);
    let saved = aged(before.folded(&[]), away);
    before.now = before.now + away;
    let after = started(&mut before, &saved, config(MARKS));
    let mut after = read_but_southbound(after, &before, &rules);
    after.waiting = Some(VecDeque::new());
    let rows = southbound(&after, &rules);
    after.give(Input::Sb(rows));
    while !next_is(&after, |command| matches!(command, Command::ReadMarks)) {
        assert!(after.carry_out_next());
    }
    let mut next = take_next(&mut after);
    after.answer("p1", "api.example.com", &[OTHER], 600);
    while after.carry_out_next() {}
    assert!(is_open(&after, OTHER));
    if behind_the_reading {
        after.waiting.as_mut().expect("set").push_back(next);
        while !next_is(&after, |command| {
            matches!(command, Command::Ask(FlowQuestion::Dump { .. }))
        }) {
            assert!(after.carry_out_next());
        }
        next = take_next(&mut after);
    }
    after.log.clear();
    after.held_answer("www.example.com", &[ADDRESS]);
    after.waiting.as_mut().expect("set").push_back(next);
    while after.carry_out_next() {}
    let is_released = after
        .log
        .iter()
        .any(|command| matches!(command, Command::Release(_)));
    assert!(is_released && is_open(&after, ADDRESS));
}

#[test]
fn an_answer_before_the_marks_are_read_sets_its_mark() {
    answered_during_the_first_comparison(false);
}

#[test]
fn an_answer_behind_the_reading_of_the_marks_sets_its_mark() {
    answered_during_the_first_comparison(true);
}

#[test]
fn a_start_opens_nothing_whose_time_is_over() {
    let rules = [allow("example.com"), deny_all()];
    for way in WAYS {
        let mut before = node(way, &rules);
        before.answer("p1", "www.example.com", &[ADDRESS], 60);
        let mut saved = before.folded(&[]);
        let away = Duration::from_secs(20_000);
        for _ in 0..3 {
            saved = aged(saved, away);
            before.now = before.now + away;
            // All of it has timed out.
            before.switch.clear();
            before.sentinels.clear();
            before.marks.clear();
            let mut after = after_restart_with(&mut before, &saved, &rules, config(way));
            let time = Duration::from_secs(120);
            pass(&mut after, time, false, |node| {
                assert!(!is_open(node, ADDRESS), "{way:?}");
            });
            before = after;
        }
    }
}

#[test]
fn names_that_are_over_open_nothing_when_the_pipeline_is_found() {
    let rules = [allow("example.com"), deny_all()];
    for way in WAYS {
        let before = node(way, &rules);
        let mut node = Node::bare();
        node.engine = Engine::new(config(way));
        node.ovn_installed = false;
        let mut node = read_but_southbound(node, &before, &rules);
        let rows = southbound(&node, &rules);
        node.give(Input::Sb(rows));
        node.answer("p1", "www.example.com", &[ADDRESS], 60);
        for _ in 0..40 {
            node.pass(Duration::from_secs(500));
        }
        node.ovn_installed = true;
        pass(&mut node, Duration::from_secs(120), false, |node| {
            assert!(!is_open(node, ADDRESS), "{way:?}");
        });
    }
}

#[test]
fn names_stay_until_all_flows_are_adopted() {
    let rules = [allow("first.test"), allow("second.test"), deny_all()];
    let edited = [allow("second.test"), deny_all()];
    let mut before = node(None, &rules);
    before.answer("p1", "first.test", &[ADDRESS], 60);
    before.answer("p1", "second.test", &[OTHER], 600);
    let away = Duration::from_secs(66);
    let saved = aged(before.folded(&[]), away);
    before.now = before.now + away;
    use_all(&mut before);
    // More flows of nobody than one comparison takes in.
    let (key, flow) = before.switch.first_key_value().expect("flows");
    let (key, flow) = (key.clone(), *flow);
    for at in 0..(1_u32 << 17) + 10 {
        let mut other = key.clone();
        other.table = (at >> 16) as u8;
        other.priority = at as u16;
        before.switch.insert(other, flow);
    }
    let mut after = after_restart_with(&mut before, &saved, &edited, config(None));
    pass(&mut after, Duration::from_secs(60), true, |_| ());
    assert!(!is_open(&after, ADDRESS));
}
