//! Which answers are taken off the wire.

use std::{net::Ipv4Addr, num::NonZeroU32, time::Duration};

use dnsflow_agent::{
    capture::{AttachKind, Options, Releaser},
    clock::now,
};
use dnsflow_common::{
    Reason,
    walk::{TCP_ACK, TCP_FIN, TCP_SYN},
};
use dnsflow_core::{Timestamp, io::input::NameSetId};
use dnsflow_tests::{
    frames::{Answer, Extension, Fragment, Frame, Transport},
    raw_program::RawProgram,
    support::{not_run, this_test},
};

use crate::{
    Loaded, load,
    netns::{Wire, ifindex},
    test_run::query_of,
    with_veth,
};

/// The interface that programs under test run on.
const IFINDEX: u32 = 1;

fn answer(name: &str) -> Frame {
    Frame::to_pod(Answer::new(name, &[Ipv4Addr::new(192, 0, 2, 1)]).build())
}

fn segment(flags: u8) -> Frame {
    Frame {
        transport: Transport::Tcp {
            // Each a segment of its own.
            seq: 7 + u32::from(flags),
            ack: 0,
            flags,
            options: 0,
        },
        ..answer("example.org")
    }
}

impl Loaded {
    fn beat(&mut self, at: Timestamp) {
        self.capture
            .heartbeat
            .beat(at)
            .expect("the kernel has the map");
    }

    /// The agent is well for longer than any test takes, or not any more.
    pub(crate) fn heart_beats(&mut self, is_well: bool) {
        match is_well {
            true => self.beat_for_long(),
            false => self.beat(Timestamp::from_nanos(1)),
        }
    }

    /// The agent is well for longer than any test takes, also on an emulated machine.
    pub(crate) fn beat_for_long(&mut self) {
        self.beat(now() + Duration::from_secs(60));
    }

    /// Frames are captured until then, as every agent sets it.
    pub(crate) fn attend_for_long(&mut self) {
        let heartbeat = &mut self.capture.heartbeat;
        let until = now() + Duration::from_secs(3600);
        heartbeat.capture_until(until).expect("it can be set");
    }

    /// What becomes of an answer that was asked for.
    #[track_caller]
    fn asked(&mut self, answer: &Frame) -> Reason {
        self.ask(&query_of(answer).build());
        let (reason, captured) = self.run_once(&answer.build());
        if let Some(captured) = captured {
            assert_eq!(captured.bytes, answer.build());
            assert_eq!(captured.held, reason == Reason::Held);
        }
        reason
    }
}

/// With a scope that has a name, and an agent that is well.
fn holding() -> Option<Loaded> {
    let mut program = load(&Options::default())?;
    program.filter(IFINDEX, &["example.com"]);
    program.beat_for_long();
    Some(program)
}

#[test]
fn what_a_rule_mentions_is_held() {
    let Some(mut program) = holding() else {
        return;
    };
    for answer in [answer("www.example.com"), answer("EXAMPLE.com").over_v6()] {
        assert_eq!(program.asked(&answer), Reason::Held);
    }
    let deep = format!("{}example.org", "a.".repeat(17));
    assert_eq!(program.asked(&answer(&deep)), Reason::NoRule);
    assert_eq!(program.asked(&answer("example.org")), Reason::NoRule);
}

#[test]
fn what_is_recorded_comes_along_unheld() {
    let Some(mut program) = holding() else {
        return;
    };
    program.capture.recorded.set(IFINDEX, true);
    assert_eq!(program.asked(&answer("www.example.com")), Reason::Held);
    assert_eq!(program.asked(&answer("example.org")), Reason::Captured);
    let mut deferred = Vec::new();
    let replayed = program.capture.deferred.replay(|frame| {
        deferred.push(frame.bytes.to_vec());
        false
    });
    replayed.expect("the kernel has a queue");
    assert_eq!(deferred, [answer("example.org").build()]);
    let first = Frame {
        transport: Transport::Udp { len: Some(2408) },
        fragment: Some(Fragment {
            id: 77,
            offset: 0,
            more: true,
        }),
        ..answer("example.org")
    };
    assert_eq!(program.asked(&first), Reason::Captured);
    program.filter(IFINDEX, &[]);
    let (reason, _) = program.run_once(&segment(TCP_ACK).build());
    assert_eq!(reason, Reason::Captured);
    program.capture.recorded.set(IFINDEX, false);
    assert_eq!(program.asked(&answer("example.org")), Reason::NoRule);
    let (reason, _) = program.run_once(&segment(TCP_ACK).build());
    assert_eq!(reason, Reason::NoRule);
}

#[test]
fn segments_are_held_but_for_the_first_of_a_connection() {
    let Some(mut program) = holding() else {
        return;
    };
    for (flags, reason) in [
        (TCP_ACK, Reason::Held),
        (TCP_ACK | TCP_FIN, Reason::Held),
        (TCP_SYN | TCP_ACK, Reason::Captured),
    ] {
        assert_eq!(program.run_once(&segment(flags).build()).0, reason);
    }
    program.filter(IFINDEX, &[]);
    let (reason, _) = program.run_once(&segment(TCP_ACK).build());
    assert_eq!(reason, Reason::NoRule, "no rule mentions any name");
    let (reason, _) = program.run_once(&segment(TCP_SYN | TCP_ACK).build());
    assert_eq!(reason, Reason::NoRule);
    let sent = segment(TCP_ACK).turned().build();
    assert_eq!(program.ask(&sent), Reason::NoRule, "nor what the pod sends");
    program.filter(IFINDEX, &["example.com"]);
    assert_eq!(program.ask(&sent), Reason::Captured);
    let records = program.drain();
    assert!(records.len() == 1 && records[0].from_pod && !records[0].held);
}

#[test]
fn a_tagged_answer_is_not_held() {
    let Some(mut program) = holding() else {
        return;
    };
    let answer = Frame {
        tags: vec![(0x8100, 5)],
        ..answer("example.com")
    };
    assert_eq!(program.asked(&answer), Reason::Captured);
    let segment = Frame {
        tags: vec![(0x8100, 5)],
        ..segment(TCP_ACK)
    };
    assert_eq!(program.run_once(&segment.build()).0, Reason::Captured);
}

#[test]
fn no_segment_is_held_twice() {
    let Some(mut program) = holding() else {
        return;
    };
    for (frame, reason) in [
        (segment(TCP_ACK), Reason::Held),
        (segment(TCP_ACK), Reason::Captured),
        // Longer than the first: there is something new in it.
        (
            Frame {
                payload: vec![7; 500],
                ..segment(TCP_ACK)
            },
            Reason::Held,
        ),
        (
            Frame {
                transport: Transport::Tcp {
                    seq: 8,
                    ack: 0,
                    flags: TCP_ACK,
                    options: 0,
                },
                ..segment(TCP_ACK)
            },
            Reason::Held,
        ),
        (segment(TCP_ACK), Reason::Captured),
    ] {
        assert_eq!(program.run_once(&frame.build()).0, reason);
    }
}

/// As those for A and AAAA of one name, which glibc asks from one socket: they differ in id and type alone.
#[test]
fn both_answers_to_questions_that_were_not_seen_are_held() {
    with_veth(&Options::default(), |mut program| {
        let host = ifindex("host");
        program.filter(host, &["example.com"]);
        // From now on, answers count without a question for a second.
        program.attached("host");
        program.beat_for_long();
        program.at = host;
        let answers = [7, 8].map(|id| {
            let answer = Answer {
                id,
                ..Answer::new("www.example.com", &[Ipv4Addr::new(192, 0, 2, 1)])
            };
            Frame::to_pod(answer.build()).build()
        });
        // The counters would also count what the kernel itself sends over the veth.
        let mut are_held = || {
            answers.each_ref().map(|answer| {
                program.run(crate::EGRESS, answer, 1).expect("runs");
                let captured = program.drain();
                assert_eq!(captured.len(), 1);
                captured[0].held
            })
        };
        assert_eq!(are_held(), [true; 2]);
        assert_eq!(are_held(), [false; 2], "again");
    });
}

#[test]
fn an_agent_that_is_not_well_holds_nothing() {
    let Some(mut program) = holding() else {
        return;
    };
    let answer = answer("example.com");
    let long_ago = now()
        .checked_sub(Duration::from_secs(1))
        .expect("after the start");
    program.beat(long_ago);
    assert_eq!(program.asked(&answer), Reason::Captured, "it is stuck");
    program.beat(now());
    assert_eq!(program.asked(&answer), Reason::Held);
    program
        .capture
        .heartbeat
        .stop()
        .expect("the kernel has the map");
    assert_eq!(program.asked(&answer), Reason::Captured, "it has stopped");
}

#[test]
fn what_nobody_comes_to_read_is_not_captured() {
    let Some(mut program) = holding() else {
        return;
    };
    let answer = answer("example.com");
    let heartbeat = &mut program.capture.heartbeat;
    heartbeat
        .capture_until(now())
        .expect("the kernel has the map");
    assert_eq!(program.asked(&answer), Reason::Unattended);
    let later = now() + Duration::from_secs(60);
    let heartbeat = &mut program.capture.heartbeat;
    heartbeat
        .capture_until(later)
        .expect("the kernel has the map");
    assert_eq!(program.asked(&answer), Reason::Held);
}

#[test]
fn an_interface_without_a_filter_holds_nothing() {
    let Some(mut program) = holding() else {
        return;
    };
    program.capture.names.set_name_set(IFINDEX, None);
    assert_eq!(program.asked(&answer("example.com")), Reason::Captured);
    let (reason, _) = program.run_once(&segment(TCP_ACK).build());
    assert_eq!(reason, Reason::Captured);
}

#[test]
fn nothing_is_held_where_holding_is_off_and_names_are_still_filtered() {
    let Some(mut program) = holding() else {
        return;
    };
    let name_set = NameSetId(IFINDEX);
    program.capture.names.set_held(name_set, false);
    assert_eq!(program.asked(&answer("www.example.com")), Reason::Captured);
    let (reason, _) = program.run_once(&segment(TCP_ACK).build());
    assert_eq!(reason, Reason::Captured);
    assert_eq!(program.asked(&answer("example.org")), Reason::NoRule);
    program.capture.names.set_held(name_set, true);
    assert_eq!(program.asked(&answer("www.example.com")), Reason::Held);
}

#[test]
fn fragments_are_not_held() {
    let Some(mut program) = holding() else {
        return;
    };
    let mut first = answer("example.com");
    first.payload.resize(1200 - 8, 0);
    let first = Frame {
        transport: Transport::Udp { len: Some(2408) },
        fragment: Some(Fragment {
            id: 9,
            offset: 0,
            more: true,
        }),
        extensions: vec![Extension::Fragment],
        ..first
    };
    program.ask(&query_of(&first).build());
    assert_eq!(program.run_once(&first.build()).0, Reason::Captured);
}

/// Taken off one veth, put back on it, and seen by nobody in between; to the sender, all is well.
fn there_and_back(attach: Option<AttachKind>) {
    let mark = NonZeroU32::new(0x00c0_ffee);
    let options = Options {
        attach,
        release_mark: mark,
        ..Options::default()
    };
    with_veth(&options, |mut program| {
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        program.filter(ifindex("host"), &["example.com"]);
        program.attached("host");
        program.beat_for_long();
        let answer = answer("www.example.com");
        let query = query_of(&answer).build();
        pod.send(&query);
        host.expect(&query);
        let (held, other) = (answer.build(), self::answer("example.org").turned().build());
        // A packet socket that is told of an error sends nothing more of a batch.
        host.send(&held);
        host.send(&other);
        pod.expect(&other);
        let records = program.drain();
        assert_eq!(records.len(), 1);
        assert!(records[0].held && records[0].bytes == held);
        let releaser = Releaser::open(mark.map_or(0, NonZeroU32::get)).expect("a packet socket");
        let released = releaser.release(ifindex("host"), &records[0].bytes, 0);
        released.expect("the veth takes it");
        pod.expect(&held);
        let count = |reason| program.capture.counters.of(reason).expect("read");
        assert_eq!((count(Reason::Held), count(Reason::Released)), (1, 1));
    });
}

/// A program that takes the mark off every packet.
pub(crate) fn mark_clearing() -> RawProgram {
    // r2 = 0; skb->mark = r2; r0 = TCX_NEXT; exit.
    let program = RawProgram::load(&[
        0x0000_0000_0000_02b7,
        0x0000_0000_0008_2163,
        0xffff_ffff_0000_00b7,
        0x95,
    ]);
    program.expect("the kernel takes it")
}

/// Another program takes the mark off what is put back.
#[test]
fn an_answer_whose_mark_is_cleared_does_not_go_round() {
    let mark = NonZeroU32::new(0x00c0_ffee);
    let options = Options {
        attach: Some(AttachKind::Tcx),
        release_mark: mark,
        ..Options::default()
    };
    with_veth(&options, |mut program| {
        let clearing = mark_clearing();
        if clearing.attach_first_to_egress(ifindex("host")).is_err() {
            not_run(&this_test(), "this kernel has no TCX");
            return;
        }
        let (host, pod) = (Wire::open("host"), Wire::open("pod"));
        program.filter(ifindex("host"), &["example.com"]);
        program.attached("host");
        let _link = clearing.attach_first_to_egress(ifindex("host"));
        program.beat_for_long();
        let releaser = Releaser::open(mark.map_or(0, NonZeroU32::get)).expect("a packet socket");
        // A segment, and an answer to a question that was asked before it could be seen.
        for frame in [segment(TCP_ACK), answer("www.example.com")] {
            let frame = frame.build();
            host.send(&frame);
            let records = program.drain();
            assert!(records.len() == 1 && records[0].held);
            let released = releaser.release(ifindex("host"), &frame, 0);
            released.expect("the veth takes it");
            pod.expect(&frame);
            // The agent sees it again, and that is all.
            let records = program.drain();
            assert!(records.len() == 1 && !records[0].held);
        }
        let count = |reason| program.capture.counters.of(reason).expect("read");
        assert_eq!((count(Reason::Held), count(Reason::Released)), (2, 0));
    });
}

#[test]
fn an_answer_goes_there_and_back() {
    there_and_back(None);
}

#[test]
fn an_answer_goes_there_and_back_with_clsact() {
    there_and_back(Some(AttachKind::Clsact));
}
