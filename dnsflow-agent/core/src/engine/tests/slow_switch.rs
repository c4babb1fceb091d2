//! Marks of former rules, beside a switch that takes its time or refuses flows.

use std::collections::VecDeque;

use super::{
    backends::lead_to,
    edits::{ONE_NUMBER, WAYS, config, node},
    former_marks::{is_apply, moved, new_flow_of_other, two_pods},
    limits::many,
    numbers::{is_of, tag},
    restart::after_restart_with,
    starts::{edit, is_open, is_open_at_all, take_dump},
    *,
};

/// Carries out what waits, but for batches of flows. Gives these back.
fn carry_out_all_but_batches(node: &mut Node) -> VecDeque<Command> {
    let mut held = VecDeque::new();
    loop {
        let waiting = node.waiting.take().into_iter().flatten();
        let (applies, others): (Vec<_>, Vec<_>) = waiting.partition(is_apply);
        held.extend(applies);
        node.waiting = Some(others.into());
        if !node.carry_out_next() {
            return held;
        }
    }
}

/// A group of two flows is in force. One of them is lost, and the switch takes it no more; the other one goes on to let
/// packets pass. An answer for the address comes, or none.
#[test]
fn an_answer_does_not_close_an_address_of_whose_flows_one_does_not_come_back() {
    for way in WAYS {
        for is_asked in [false, true] {
            let mut node = node(way, &[many(allow("example.com"), 2), deny_all()]);
            node.answer("p1", "example.com", &[ADDRESS], 600);
            node.pass(Duration::from_secs(60));
            let lost = node.of_rules().next().cloned().expect("a flow");
            let (cookie, _) = node.switch.remove(&lost).expect("it is there");
            node.refused = [lost.clone()].into();
            node.give(Input::FlowLost { key: lost, cookie });
            if is_asked {
                node.answer("p1", "example.com", &[ADDRESS], 600);
            }
            for step in 0..60 {
                node.pass(Duration::from_secs(1));
                let case = format!("{way:?}, asked: {is_asked}, step {step}");
                assert!(is_open(&node, ADDRESS, 0), "{case}");
            }
        }
    }
}

/// An edit leaves an address another plan, whose flow the switch refuses. The pod is told so many addresses that their
/// use is read again and again: a comparison comes every few seconds.
#[test]
fn a_former_mark_goes_however_often_the_pod_has_the_switch_compared() {
    let rules = [
        allow("example.com"),
        allow("www.example.com"),
        allow("other.test"),
        deny_all(),
    ];
    let edited = [
        allow("x.www.example.com"),
        allow("www.example.com"),
        allow("other.test"),
        deny_all(),
    ];
    let told = || {
        let mut node = node(WAYS[1], &rules);
        node.engine.told.cache.limits_mut().addresses_per_name_max = 8;
        node.answer("p1", "other.test", &addresses(1000, 8), 3600);
        node.answer("p1", "www.example.com", &[ADDRESS], 3600);
        // Another address keeps the former group.
        node.answer("p1", "x.www.example.com", &[OTHER], 3600);
        node.pass(Duration::from_secs(30));
        node
    };
    let mut twin = told();
    let before = twin.switch.clone();
    edit(&mut twin, &edited);
    let next = tag(&twin, ADDRESS);
    let mut of_rules = twin.of_rules().cloned();
    let refused = of_rules.find(|key| is_of(key, next) && !before.contains_key(key));
    let refused = refused.expect("a flow of the next group");
    for is_asking in [false, true] {
        let mut node = told();
        node.refused = [refused.clone()].into();
        edit(&mut node, &edited);
        assert!(is_open_at_all(&node, ADDRESS));
        for time in 0..100 {
            if is_asking {
                node.answer("p1", "other.test", &addresses(time, 1), 3600);
            }
            node.pass(Duration::from_secs(3));
        }
        assert!(!is_open_at_all(&node, ADDRESS), "asking: {is_asking}");
    }
}

/// An edit moves the rules of two pods while a dump comes, and the switch refuses the flow of one pod. The flow of the
/// other pod is there, and a dump that has begun before does not show it.
#[test]
fn a_dump_that_began_before_an_edit_ends_no_former_mark() {
    let moved = moved();
    let new = new_flow_of_other();
    for dump_takes in [4, 6] {
        let mut node = two_pods();
        node.waiting = Some(VecDeque::new());
        take_dump(&mut node);
        let flows = node.installed();
        node.refused = new.clone();
        edit(&mut node, &moved);
        while node.carry_out_next() {}
        for _ in 0..dump_takes {
            node.pass(Duration::from_secs(1));
            while node.carry_out_next() {}
            assert!(is_open_at_all(&node, ADDRESS));
        }
        node.dump_shows(flows, true);
        node.dump_shows(Vec::new(), false);
        for step in 0..30 {
            while node.carry_out_next() {}
            assert!(
                is_open_at_all(&node, ADDRESS),
                "dump of {dump_takes} s, step {step}"
            );
            node.pass(Duration::from_secs(1));
        }
    }
}

/// The batch of an edit stands behind that of another tenant, whose edit changes as many flows as one batch may have. A
/// comparison ends meanwhile. The agent knows that the switch has not answered the batch.
#[test]
fn a_former_mark_stays_while_the_batch_of_its_successor_is_under_way() {
    let rules = [allow("example.com"), deny_all()];
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    let mut closed = BTreeSet::new();
    for way in [WAYS[0], WAYS[1], ONE_NUMBER] {
        for takes in [4, 12] {
            let mut node = node(way, &rules);
            node.answer("p1", "example.com", &[ADDRESS], 3600);
            node.pass(Duration::from_secs(30));
            node.waiting = Some(VecDeque::new());
            edit(&mut node, &moved);
            let mut held = carry_out_all_but_batches(&mut node);
            for _ in 0..takes {
                node.pass(Duration::from_secs(1));
                held.extend(carry_out_all_but_batches(&mut node));
                if !is_open_at_all(&node, ADDRESS) {
                    closed.insert(format!("{way:x?}: {takes} s"));
                }
            }
            node.waiting = Some(held);
            while node.carry_out_next() {}
            assert!(is_open(&node, ADDRESS, 1), "{way:?}: {takes} s");
        }
    }
    assert_eq!(closed, BTreeSet::new());
}

/// One rule has opened some addresses, and their marks have one number. An edit while no agent runs leaves this plan to all
/// but one of them. That one has another plan, for which there is a number or none: most probably, as the plan of the
/// others comes first.
#[test]
fn a_mark_goes_at_a_start_when_its_address_gets_flows_of_its_own() {
    let edited = [allow("a.test"), many(allow("b.test"), 1), deny_all()];
    let told = addresses(0, 100);
    for way in [WAYS[1], ONE_NUMBER] {
        let mut before = node(way, &[allow("test"), deny_all()]);
        before.answer("p1", "x.a.test", &told, 600);
        before.answer("p1", "x.b.test", &[OTHER], 600);
        before.pass(Duration::from_secs(30));
        assert_eq!(before.marks.len(), told.len() + 1);
        let saved = before.folded(&[]);
        let mut node = after_restart_with(&mut before, &saved, &edited, config(way));
        node.pass(Duration::from_secs(5));
        assert!(told.iter().all(|address| is_open(&node, *address, 0)));
        assert!(is_open(&node, OTHER, 1));
        assert!(!is_open(&node, OTHER, 0), "{way:x?}");
    }
}

/// A load balancer has come to lead to an address with a mark. The flows beside it are under way when an edit takes one
/// of two rules away. No number is left for another plan.
#[test]
fn an_edit_that_only_closes_does_not_end_a_mark_before_its_flows_are_there() {
    let rules = [allow("a.test"), allow("b.a.test"), deny_all()];
    let edited = [allow("other.test"), allow("b.a.test"), deny_all()];
    for is_there in [true, false] {
        let mut node = node(ONE_NUMBER, &rules);
        node.answer("p1", "b.a.test", &[ADDRESS], 600);
        node.pass(Duration::from_secs(30));
        lead_to(&mut node, 1, &[ADDRESS]);
        node.waiting = Some(VecDeque::new());
        let mut held = VecDeque::new();
        while held.is_empty() {
            node.pass(Duration::from_millis(100));
            held.extend(carry_out_all_but_batches(&mut node));
        }
        if is_there {
            node.waiting = Some(std::mem::take(&mut held));
            while node.carry_out_next() {}
        }
        assert!(is_open(&node, ADDRESS, 1));
        edit(&mut node, &edited);
        held.extend(carry_out_all_but_batches(&mut node));
        assert!(is_open(&node, ADDRESS, 1), "there: {is_there}");
        node.waiting = Some(held);
        while node.carry_out_next() {}
        assert!(is_open(&node, ADDRESS, 1) && !is_open(&node, ADDRESS, 0));
    }
}
