//! Which names leave the kernel.

use std::{net::Ipv4Addr, time::Instant};

use dnsflow_agent::capture::Options;
use dnsflow_common::{
    Reason,
    record::{DEFER_BURST, DEFER_INTERVAL_NS, DEFERRED_FRAME_MAX, DEFERRED_MAX},
};
use dnsflow_core::{io::input::NameSetId, values::name::DomainName};
use dnsflow_tests::frames::{Answer, Frame};
use proptest::{prelude::*, strategy::ValueTree as _, test_runner::TestRunner};

use crate::{EGRESS, INGRESS, Loaded, load, test_run::query_of, unshared};

/// The interface that programs under test run on.
const IFINDEX: u32 = 1;
const NAME_SET: NameSetId = NameSetId(7);

fn names(names: &[&str]) -> Vec<DomainName> {
    names
        .iter()
        .map(|name| name.parse().expect("a name"))
        .collect()
}

impl Loaded {
    /// What becomes of an answer for this name that was asked for.
    #[track_caller]
    fn asked_for(&mut self, name: &str) -> Reason {
        let answer = Frame::to_pod(Answer::new(name, &[Ipv4Addr::new(192, 0, 2, 1)]).build());
        self.ask(&query_of(&answer).build());
        self.run_once(&answer.build()).0
    }
}

#[test]
fn names_that_no_rule_mentions_stay_in_the_kernel() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    assert_eq!(
        program.asked_for("example.org"),
        Reason::Captured,
        "no filter"
    );
    let filter = &mut program.capture.names;
    filter.set_name_set(IFINDEX, Some(NAME_SET));
    assert_eq!(
        program.asked_for("example.org"),
        Reason::Captured,
        "no names yet"
    );

    let filter = &mut program.capture.names;
    filter.set_names(NameSetId(8), &names(&["example.org"]));
    filter.set_names(NAME_SET, &names(&["example.com", "sub.example.net"]));
    for name in [
        "example.com",
        "a.B.EXAMPLE.com",
        "sub.example.net",
        "x.sub.example.net",
    ] {
        assert_eq!(program.asked_for(name), Reason::Captured, "{name}");
    }
    for name in [
        "example.org",
        "example.net",
        "notexample.com",
        "com",
        "example.com.org",
    ] {
        assert_eq!(program.asked_for(name), Reason::NoRule, "{name}");
    }

    let filter = &mut program.capture.names;
    filter.set_names(NAME_SET, &names(&["example.org"]));
    assert_eq!(program.asked_for("example.org"), Reason::Captured);
    assert_eq!(program.asked_for("example.com"), Reason::NoRule);

    program.capture.names.set_names(NAME_SET, &[]);
    assert_eq!(program.asked_for("example.org"), Reason::NoRule);

    program.capture.names.set_name_set(IFINDEX, None);
    assert_eq!(program.asked_for("example.org"), Reason::Captured);
    assert_eq!(program.capture.names.state().failures, 0);
}

#[test]
fn what_no_rule_mentions_is_kept_for_one_that_comes() {
    let Some(mut program) = load(&unshared()) else {
        return;
    };
    program.capture.names.set_name_set(IFINDEX, Some(NAME_SET));
    program.capture.names.set_names(NAME_SET, &[]);
    let kept = |program: &mut Loaded| {
        let mut kept: Vec<Vec<u8>> = Vec::new();
        let replayed = program.capture.deferred.replay(|frame| {
            assert_eq!((frame.ifindex, frame.held), (IFINDEX, false));
            kept.push(frame.bytes.to_vec());
            false
        });
        replayed.expect("the kernel has a queue");
        kept
    };
    let answer = |name: &str, filler: usize| {
        let mut answer = Frame::to_pod(Answer::new(name, &[Ipv4Addr::new(192, 0, 2, 1)]).build());
        answer.payload.resize(answer.payload.len() + filler, 0);
        answer
    };
    let send = |program: &mut Loaded, answer: &Frame| {
        program.ask(&query_of(answer).build());
        let frame = answer.build();
        let expected = match frame.len() <= DEFERRED_FRAME_MAX {
            true => Reason::NoRule,
            false => Reason::NotDeferred,
        };
        assert_eq!(program.run_once(&frame).0, expected);
        frame
    };
    // The last one is longer than what is kept.
    let frames = [
        ("example.com", 0),
        ("a.example.net", 1200),
        ("a.test", 2000),
    ]
    .map(|(name, filler)| send(&mut program, &answer(name, filler)));
    assert!(frames[2].len() > DEFERRED_FRAME_MAX);
    assert_eq!(kept(&mut program), frames[..2]);
    assert_eq!(kept(&mut program), Vec::<Vec<u8>>::new(), "once");

    // Until a rule mentions their names, they are deferred again, in the same order.
    let frames = ["b.test", "c.test"].map(|name| send(&mut program, &answer(name, 0)));
    let mut seen = 0;
    let again = program.capture.deferred.replay(|_| {
        seen += 1;
        true
    });
    again.expect("the kernel has a queue");
    assert_eq!(seen, 2);
    assert_eq!(kept(&mut program), frames);

    // The oldest go.
    let frames: Vec<_> = (0..DEFERRED_MAX + 10)
        .map(|host| send(&mut program, &answer(&format!("h{host}.example.com"), 0)))
        .collect();
    assert!(kept(&mut program) == frames[10..]);
}

#[test]
fn an_answer_beyond_the_pods_share_of_deferred_ones_is_counted() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    program.filter(IFINDEX, &[]);
    let answers = 4 * DEFER_BURST;
    let answer = Frame::to_pod(Answer::new("example.com", &[Ipv4Addr::new(192, 0, 2, 1)]).build());
    let (query, answer) = (query_of(&answer).build(), answer.build());
    let start = Instant::now();
    for _ in 0..answers {
        program.run(INGRESS, &query, 1).expect("runs");
        program.run(EGRESS, &answer, 1).expect("runs");
    }
    let lost = program.capture.counters.of(Reason::NotDeferred);
    let lost = lost.expect("read");
    // Some of the share comes back meanwhile: all of it within two seconds, which an emulated machine may need.
    let back = start.elapsed().as_nanos() as u64 / DEFER_INTERVAL_NS + 1;
    let deferred = answers - lost;
    assert!(
        deferred >= DEFER_BURST && deferred <= DEFER_BURST + back,
        "{deferred} of {answers}, {back} came back"
    );
    let left_out = program.capture.shares.left_out().expect("read");
    assert_eq!(left_out[&IFINDEX].packets, lost);
}

/// An answer that is not wanted is used up all the same.
#[test]
fn a_filtered_answer_uses_its_query_up() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    program.capture.names.set_name_set(IFINDEX, Some(NAME_SET));
    program.capture.names.set_names(NAME_SET, &[]);
    assert_eq!(program.asked_for("example.com"), Reason::NoRule);
    program
        .capture
        .names
        .set_names(NAME_SET, &names(&["example.com"]));
    let answer = Answer::new("example.com", &[Ipv4Addr::new(192, 0, 2, 1)]);
    let answer = Frame::to_pod(answer.build()).build();
    assert_eq!(program.run_once(&answer).0, Reason::NotAsked);
}

/// Whatever a rule could match, the kernel passes.
#[test]
fn no_answer_that_a_rule_could_match_is_kept_back() {
    let Some(mut program) = load(&unshared()) else {
        return;
    };
    let label = "[a-cA-C]";
    let rules = prop::collection::vec(prop::collection::vec(label, 1..4), 0..6);
    let asked = prop::collection::vec(label, 1..20);
    let mut runner = TestRunner::deterministic();
    let (mut passed, mut kept) = (0, 0);
    program.capture.names.set_name_set(IFINDEX, Some(NAME_SET));
    for _ in 0..1000 {
        let (rules, asked) = (&rules, &asked)
            .new_tree(&mut runner)
            .expect("values")
            .current();
        let rules: Vec<_> = rules.iter().map(|rule| rule.join(".")).collect();
        let rules: Vec<_> = rules.iter().map(String::as_str).collect();
        let rules = names(&rules);
        program.capture.names.set_names(NAME_SET, &rules);
        let name: DomainName = asked.join(".").parse().expect("a name");
        let matches = name
            .suffixes()
            .any(|suffix| rules.iter().any(|rule| rule.wire() == suffix));
        match program.asked_for(&asked.join(".")) {
            Reason::Captured => {
                assert!(matches, "{name} for {rules:?}");
                passed += 1;
            }
            reason => {
                assert_eq!(reason, Reason::NoRule);
                assert!(!matches, "{name} for {rules:?}");
                kept += 1;
            }
        }
    }
    assert!(
        passed > 100 && kept > 100,
        "{passed} passed, {kept} kept back"
    );
}

/// More names than there is room for: everything passes, and it is counted.
#[test]
fn names_that_do_not_fit_filter_nothing() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let filter = &mut program.capture.names;
    let many: Vec<DomainName> = (0..131_073)
        .map(|at| format!("n{at}.example").parse().expect("a name"))
        .collect();
    filter.set_name_set(IFINDEX, Some(NAME_SET));
    filter.set_names(NAME_SET, &many);
    assert_eq!(filter.state().unfiltered_interfaces, 1);
    assert_eq!(program.asked_for("example.org"), Reason::Captured);
    let filter = &mut program.capture.names;
    filter.set_names(NAME_SET, &many[1..]);
    assert_eq!(filter.state().unfiltered_interfaces, 0);
    assert_eq!(program.asked_for("example.org"), Reason::NoRule);
    assert_eq!(program.asked_for("www.n131072.example"), Reason::Captured);
}
