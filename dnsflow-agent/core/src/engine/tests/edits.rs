//! Rules that are edited around a restart: what an edit closes stays closed.

mod model;
mod starts;

use std::{collections::VecDeque, num::NonZeroU32};

use super::{
    restart::{after_restart_with, read_but_southbound, southbound, started},
    starts::carry_out_until_dump,
    *,
};
use crate::values::limits::MARK_SLACK;

/// Flows of the address, and marks.
pub(super) const WAYS: [Option<u32>; 2] = [None, Some(0xffe0_0000)];

/// Which comes first at an edit.
#[derive(Clone, Copy, Debug)]
pub(super) enum First {
    Manifest,
    Rows,
}

const ORDERS: [First; 2] = [First::Manifest, First::Rows];

pub(super) fn config(mark_mask: Option<u32>) -> Config {
    Config {
        mark_mask: mark_mask.and_then(NonZeroU32::new),
        ..Config::default()
    }
}

pub(super) fn node(way: Option<u32>, rules: &[Rule]) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(config(way));
    node.start(rules)
}

/// The agent ends; after `away`, the next one starts with these rules.
fn restart(before: &mut Node, away: Duration, way: Option<u32>, rules: &[Rule]) -> Node {
    let saved = before.folded(&[]);
    before.now = before.now + away;
    after_restart_with(before, &aged(saved, away), rules, config(way))
}

/// A journal as it is read so much later.
pub(super) fn aged(mut saved: Saved, time: Duration) -> Saved {
    for saved in saved.entries.iter_mut().flat_map(|entry| &mut entry.names) {
        saved.rest = saved.rest.saturating_sub(time);
        saved.deny_rest = saved.deny_rest.saturating_sub(time);
    }
    saved
}

pub(super) fn edit(node: &mut Node, first: First, rules: &[Rule]) {
    match first {
        First::Manifest => {
            node.set_firewall(rules);
            node.set_ovn(rules);
        }
        First::Rows => {
            node.set_ovn(rules);
            node.set_firewall(rules);
        }
    }
}

/// Each flow and each mark sees a packet.
pub(super) fn use_all(node: &mut Node) {
    for (_, packets) in node.switch.values_mut() {
        *packets += 1;
    }
    let now = node.now;
    for (_, until, used_at) in node.marks.values_mut() {
        if *until > now {
            *used_at = Some(now);
        }
    }
}

/// Time passes; all that is open is used every five seconds, or nothing is. `check` holds at every moment.
fn pass(node: &mut Node, time: Duration, is_used: bool, check: impl Fn(&Node)) {
    let end = node.now + time;
    while node.now < end {
        if is_used {
            use_all(node);
        }
        node.pass(COMPARE_INTERVAL / 2);
        check(node);
    }
}

/// Whether rule 0 lets the pod reach the address.
fn is_open(node: &Node, address: [u8; 4]) -> bool {
    let address = Ipv4Addr::from(address).to_string();
    let mut open = node.open().into_iter();
    open.any(|(_, dst, priority)| dst == address && priority == 11_000)
}

#[test]
fn what_an_edit_closes_stays_closed_after_a_restart() {
    let before_edit = [allow("example.com"), deny_all()];
    let edited = [allow("other.test"), deny("example.com"), deny_all()];
    for way in WAYS {
        for first in ORDERS {
            for is_used in [false, true] {
                let case = format!("{way:?} {first:?} used: {is_used}");
                let mut before = node(way, &before_edit);
                before.answer("p1", "www.example.com", &[ADDRESS], 600);
                let mut after = restart(&mut before, Duration::ZERO, way, &before_edit);
                pass(&mut after, Duration::from_secs(20), is_used, |_| {});
                assert!(is_open(&after, ADDRESS), "{case}");
                edit(&mut after, first, &edited);
                assert!(!is_open(&after, ADDRESS), "{case}");
                pass(&mut after, Duration::from_secs(60), is_used, |node| {
                    assert!(!is_open(node, ADDRESS), "{case}: it opens again");
                });
            }
        }
    }
}

#[test]
fn what_an_edit_closed_while_no_agent_ran_is_closed_at_the_start() {
    let before_edit = [allow("first.test"), allow("second.test"), deny_all()];
    let edited = [allow("second.test"), deny_all()];
    for way in WAYS {
        // Within the TTL, and behind its end.
        for away in [5, 66] {
            for is_used in [false, true] {
                let case = format!("{way:?} {away} s used: {is_used}");
                let mut before = node(way, &before_edit);
                before.answer("p1", "first.test", &[ADDRESS], 60);
                before.answer("p1", "second.test", &[OTHER], 60);
                let away = Duration::from_secs(away);
                let saved = aged(before.folded(&[]), away);
                before.now = before.now + away;
                if is_used {
                    use_all(&mut before);
                }
                let mut after = after_restart_with(&mut before, &saved, &edited, config(way));
                assert!(
                    is_open(&after, OTHER) || !is_used,
                    "{case}: it never closes"
                );
                assert!(!is_open(&after, ADDRESS), "{case}");
                pass(&mut after, Duration::from_secs(300), is_used, |node| {
                    assert!(!is_open(node, ADDRESS), "{case}");
                    assert!(is_open(node, OTHER) || !is_used, "{case}: it is in use");
                });
            }
        }
    }
}

/// The pod asks before its rules are known, and the dump comes a second later than what it is judged by.
#[test]
fn what_an_edit_closed_while_no_agent_ran_is_closed_after_a_slow_start() {
    let before_edit = [allow("first.test"), allow("second.test"), deny_all()];
    let edited = [allow("second.test"), deny_all()];
    for way in WAYS {
        let mut before = node(way, &before_edit);
        before.answer("p1", "first.test", &[ADDRESS], 60);
        before.answer("p1", "second.test", &[OTHER], 60);
        use_all(&mut before);
        let saved = aged(before.folded(&[]), Duration::from_secs(60));
        let after = started(&mut before, &saved, config(way));
        let mut after = read_but_southbound(after, &before, &edited);
        after.answer("p1", "second.test", &[[203, 0, 113, 3]], 600);
        after.waiting = Some(VecDeque::new());
        let sb = southbound(&after, &edited);
        after.give(Input::Sb(sb));
        carry_out_until_dump(&mut after);
        after.pass(Duration::from_secs(1));
        while after.carry_out_next() {}
        after.waiting = None;
        pass(&mut after, Duration::from_secs(60), true, |node| {
            assert!(!is_open(node, ADDRESS), "{way:?}");
            assert!(is_open(node, OTHER), "{way:?}");
        });
    }
}

#[test]
fn what_is_allowed_again_opens_with_the_next_answer() {
    let rules = [allow("example.com"), deny_all()];
    let other = [allow("other.test"), deny_all()];
    for way in WAYS {
        for first in ORDERS {
            let case = format!("{way:?} {first:?}");
            let mut before = node(way, &rules);
            before.answer("p1", "www.example.com", &[ADDRESS], 600);
            let mut after = restart(&mut before, Duration::ZERO, way, &rules);
            edit(&mut after, first, &other);
            assert!(!is_open(&after, ADDRESS), "{case}");
            edit(&mut after, first, &rules);
            after.log.clear();
            after.waiting = Some(VecDeque::new());
            let bytes = after.held_answer("www.example.com", &[ADDRESS]);
            let is_released = |next: &Command| matches!(next, Command::Release(_));
            while let Some(next) = after.waiting.iter().flatten().next() {
                assert!(!is_released(next) || is_open(&after, ADDRESS), "{case}");
                after.carry_out_next();
            }
            after.waiting = None;
            after.pass(Duration::from_millis(50));
            assert_eq!(after.released(), [bytes], "{case}");
            assert!(is_open(&after, ADDRESS), "{case}");
        }
    }
}

const MARKS: Option<u32> = WAYS[1];

/// The pod was told of the address, and has used it until its mark ended: 5 s ago.
fn over(rules: &[Rule]) -> Node {
    let mut node = node(MARKS, rules);
    node.answer("p1", "www.example.com", &[ADDRESS], 60);
    let (_, until, used_at) = node.marks.values_mut().next().expect("it is open");
    *used_at = until.checked_sub(Duration::from_secs(1));
    node
}

#[test]
fn a_mark_whose_time_is_over_stays_closed() {
    let rules = [allow("example.com"), deny_all()];
    let away = MIN_TTL + MARK_SLACK + Duration::from_secs(5);
    let mut after = restart(&mut over(&rules), away, MARKS, &rules);
    let adopts = |_: &Report| false;
    assert!(!after.reports.iter().any(adopts));
    assert_eq!(after.destinations(), BTreeSet::new());
    pass(&mut after, Duration::from_secs(60), true, |node| {
        assert_eq!(node.destinations(), BTreeSet::new());
    });
    assert!(after.marks.is_empty());
}

/// The flows that the mark stands for come into force before the comparison, with another address.
#[test]
fn a_mark_whose_time_is_over_stays_closed_while_the_pod_asks() {
    let rules = [allow("example.com"), deny_all()];
    let away = MIN_TTL + MARK_SLACK + Duration::from_secs(5);
    let mut before = over(&rules);
    let saved = aged(before.folded(&[]), away);
    before.now = before.now + away;
    let after = started(&mut before, &saved, config(MARKS));
    let mut after = read_but_southbound(after, &before, &rules);
    after.waiting = Some(VecDeque::new());
    let sb = southbound(&after, &rules);
    after.give(Input::Sb(sb));
    let is_reading = |next: &Command| matches!(next, Command::ReadMarks);
    while !after
        .waiting
        .iter()
        .flatten()
        .next()
        .is_some_and(is_reading)
    {
        assert!(after.carry_out_next(), "the marks are to be read");
    }
    after.answer("p1", "api.example.com", &[OTHER], 600);
    while after.carry_out_next() {
        assert!(!is_open(&after, ADDRESS));
    }
    assert!(is_open(&after, OTHER));
}

#[test]
fn starts_give_a_mark_no_new_term() {
    let rules = [allow("example.com"), deny_all()];
    let mut running = node(MARKS, &rules);
    let told_at = running.now;
    running.answer("p1", "www.example.com", &[ADDRESS], 60);
    for _ in 0..8 {
        running.pass(Duration::from_secs(10));
        let away = Duration::from_secs(10);
        running = restart(&mut running, away, MARKS, &rules);
        running.pass(Duration::from_secs(5));
    }
    let time = running.now.since(told_at);
    assert!(time > MIN_TTL + MARK_SLACK + 2 * COMPARE_INTERVAL);
    assert_eq!(running.destinations(), BTreeSet::new());
}

/// With this mask there is one number.
pub(super) const ONE_NUMBER: Option<u32> = Some(0x8000_0000);

/// The number of a mark is given to another plan before the dump says what it stood for.
#[test]
fn a_number_stands_for_what_the_dump_has_shown() {
    let on = |name: &str, port: u16| Rule {
        ports: vec![Transport {
            protocol: Protocol::Tcp,
            port: Some(port),
        }],
        ..allow(name)
    };
    let rules = [on("other.test", 499), deny_all()];
    let mut told = node(ONE_NUMBER, &rules);
    told.answer("p1", "other.test", &[OTHER], 600);
    let saved = told.folded(&[]);
    for is_wiped in [false, true] {
        let mut before = node(ONE_NUMBER, &[on("example.com", 443), deny_all()]);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        if is_wiped {
            before.switch.clear();
        }
        let mut after = after_restart_with(&mut before, &saved, &rules, config(ONE_NUMBER));
        assert!(is_open(&after, OTHER));
        pass(&mut after, Duration::from_secs(60), true, |node| {
            assert!(!is_open(node, ADDRESS), "wiped: {is_wiped}");
        });
    }
}
