//! Of which connections the agent is told, and of which it is not.

use std::{net::SocketAddr, pin::pin, time::Duration};

use dnsflow_agent::capture::{Aside, AsideRecord, Drained, INGRESS, LeftOut, Options};
use dnsflow_common::{
    Reason,
    record::{ASIDE_BYTES, ASIDE_UNREAD_MAX, ATTEMPT_AGAIN_NS, ATTEMPT_BURST, RecordHeader},
    walk::{CLIENT_PORT_MIN, TCP_ACK, TCP_SYN},
};
use dnsflow_core::values::{connection::Attempt, flow::Protocol};
use dnsflow_tests::frames::{Fragment, Frame, Transport};
use futures::poll;
use tokio::time::timeout;

use crate::{
    Loaded, load,
    netns::ifindex,
    test_run::{answer, query_of},
    trust::age,
    unshared, with_veth,
};

/// What the pod sends to begin a connection to port 443.
fn syn() -> Frame {
    let mut frame = Frame::from_pod(Vec::new());
    frame.dst.set_port(443);
    frame.transport = Transport::Tcp {
        seq: 1,
        ack: 0,
        flags: TCP_SYN,
        options: 5,
    };
    frame
}

fn datagram() -> Frame {
    Frame {
        transport: Transport::Udp { len: None },
        payload: vec![7; 100],
        ..syn()
    }
}

fn watched() -> Option<Loaded> {
    let mut program = load(&Options::default())?;
    program.capture.watched.set(1, true);
    Some(program)
}

/// What the agent was told of attempts: interface, protocol and destination; and how many answers.
fn told(aside: &mut Aside) -> (Vec<(u32, Protocol, SocketAddr)>, usize) {
    let (mut attempts, mut answers) = (Vec::new(), 0);
    let drained = aside.drain(usize::MAX, |told| match told {
        AsideRecord::Attempt(Attempt {
            ifindex,
            protocol,
            address,
            port,
            at: _,
        }) => attempts.push((ifindex, protocol, (address, port).into())),
        AsideRecord::Answer(_) => answers += 1,
    });
    assert_eq!(drained, Drained::Empty);
    (attempts, answers)
}

#[test]
fn a_connection_is_told_of_once() {
    let Some(mut program) = watched() else {
        return;
    };
    for (frame, protocol) in [
        (syn(), Protocol::Tcp),
        (datagram(), Protocol::Udp),
        (syn().over_v6(), Protocol::Tcp),
        (datagram().over_v6(), Protocol::Udp),
    ] {
        assert_eq!(program.ask(&frame.build()), Reason::Attempt);
        let (attempts, _) = told(&mut program.capture.aside);
        assert_eq!(attempts, [(1, protocol, frame.dst)]);
        // A SYN that is sent again, and another connection to the same place.
        assert_eq!(program.ask(&frame.build()), Reason::AttemptKnown);
        let mut other = frame.clone();
        other.src.set_port(50_000);
        assert_eq!(program.ask(&other.build()), Reason::AttemptKnown);
        assert_eq!(told(&mut program.capture.aside).0, []);
    }
    let mut other_port = syn();
    other_port.dst.set_port(444);
    assert_eq!(program.ask(&other_port.build()), Reason::Attempt);
    age::<24, 8>(&mut program, "ATTEMPTS", ATTEMPT_AGAIN_NS);
    assert_eq!(program.ask(&syn().build()), Reason::Attempt, "later");
}

#[test]
fn what_begins_no_connection_is_not_told_of() {
    let Some(mut program) = watched() else {
        return;
    };
    let with_flags = |flags| Frame {
        transport: Transport::Tcp {
            seq: 1,
            ack: 1,
            flags,
            options: 0,
        },
        ..syn()
    };
    let mut from_server_port = datagram();
    from_server_port.src.set_port(CLIENT_PORT_MIN - 1);
    let fragment = Frame {
        fragment: Some(Fragment {
            id: 1,
            offset: 0,
            more: true,
        }),
        ..datagram()
    };
    let tagged = Frame {
        tags: vec![(0x8100, 5)],
        ..syn()
    };
    let mut foreign = syn();
    foreign.mac_src[5] ^= 1;
    for (reason, frame) in [
        (Reason::OtherPort, with_flags(TCP_ACK)),
        (Reason::OtherPort, with_flags(TCP_SYN | TCP_ACK)),
        (Reason::OtherPort, from_server_port),
        (Reason::FragmentedQuery, fragment),
        (Reason::Tagged, tagged),
        (Reason::ForeignAddress, foreign),
    ] {
        assert_eq!(program.ask(&frame.build()), reason);
    }
    // What the pod is sent begins nothing of its own.
    let mut answered = syn().turned();
    answered.src.set_port(443);
    program.run_once(&answered.build());
    assert_eq!(told(&mut program.capture.aside), (vec![], 0));
}

#[test]
fn a_question_to_somebody_else_is_an_attempt() {
    let Some(mut program) = watched() else {
        return;
    };
    let mut asked = query_of(&answer());
    assert_eq!(program.ask(&asked.build()), Reason::QueryRecorded);
    asked.dst.set_ip([192, 0, 2, 53].into());
    let mut over_tcp = syn();
    over_tcp.dst = asked.dst;
    assert_eq!(program.ask(&asked.build()), Reason::Attempt);
    assert_eq!(program.ask(&over_tcp.build()), Reason::Attempt);
    let (attempts, _) = told(&mut program.capture.aside);
    let expected = [(1, Protocol::Udp, asked.dst), (1, Protocol::Tcp, asked.dst)];
    assert_eq!(attempts, expected);
}

#[test]
fn an_answer_that_no_rule_mentions_is_told_of_where_attempts_are() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    program.filter(1, &["example.org"]);
    for (is_watched, expected) in [(false, 0), (true, 1), (false, 0)] {
        program.capture.watched.set(1, is_watched);
        program.ask(&query_of(&answer()).build());
        assert_eq!(program.run_once(&answer().build()).0, Reason::NoRule);
        let syn = match is_watched {
            true => Reason::Attempt,
            false => Reason::OtherPort,
        };
        assert_eq!(program.ask(&self::syn().build()), syn);
        let (attempts, answers) = told(&mut program.capture.aside);
        assert_eq!((attempts.len(), answers), (expected, expected));
    }
}

/// People ask why a name that a rule mentions has no address. No rule is waited for: nothing is deferred. Most names have
/// no address of the other IP version.
#[test]
fn an_answer_without_a_record_is_told_of_where_a_rule_mentions_its_name() {
    const A: u16 = 1;
    const AAAA: u16 = 28;
    let Some(mut program) = watched() else {
        return;
    };
    for (mentioned, code, kind, expected) in [
        ("example.com", 3, A, 1),
        ("example.com", 3, AAAA, 1),
        ("example.com", 0, A, 1),
        ("example.com", 0, AAAA, 0),
        ("example.net", 3, A, 0),
        ("example.net", 0, A, 0),
    ] {
        program.filter(1, &[mentioned]);
        let mut failed = answer();
        failed.payload[3] |= code;
        failed.payload[7] = 0;
        // Behind header and name (RFC 1035, section 4.1.2).
        let mut name = failed.payload[12..].iter();
        let at = 12 + name.position(|byte| *byte == 0).expect("a name") + 1;
        failed.payload[at..at + 2].copy_from_slice(&kind.to_be_bytes());
        let reason = match code {
            0 => Reason::NoAnswers,
            _ => Reason::Rcode,
        };
        program.ask(&query_of(&failed).build());
        assert_eq!(program.run_once(&failed.build()).0, reason);
        assert_eq!(
            told(&mut program.capture.aside),
            (vec![], expected),
            "{mentioned} {code} {kind}"
        );
    }
    let mut deferred = 0;
    let replayed = program.capture.deferred.replay(|_| {
        deferred += 1;
        false
    });
    replayed.expect("read");
    assert_eq!(deferred, 0);
}

#[test]
fn an_answer_without_room_beside_the_attempts_is_counted() {
    let Some(mut program) = load(&unshared()) else {
        return;
    };
    program.capture.watched.set(1, true);
    program.filter(1, &["example.org"]);
    let mut long = answer();
    long.payload.resize(1400, 0);
    let (asked, long) = (query_of(&long).build(), long.build());
    let room = ASIDE_BYTES as usize / long.len();
    let mut lost = 0;
    for _ in 0..2 * room {
        program.ask(&asked);
        match program.run_once(&long).0 {
            Reason::NoRule => {}
            Reason::AttemptLost => lost += 1,
            reason => panic!("{reason}"),
        }
    }
    let (_, answers) = told(&mut program.capture.aside);
    assert_eq!(answers + lost, 2 * room);
    assert!(lost >= room, "{lost}");
}

#[test]
fn an_answer_waits_for_the_next_attempt_or_for_many_others() {
    let (Some(mut program), Some(mut other)) = (load(&unshared()), watched()) else {
        return;
    };
    program.capture.watched.set(1, true);
    program.filter(1, &["example.org"]);
    // Its ring buffer is watched while it runs.
    std::mem::swap(&mut program.capture.aside, &mut other.capture.aside);
    let Loaded {
        capture, runtime, ..
    } = &mut other;
    let bytes = answer().build();
    let hear = |program: &mut Loaded| {
        program.ask(&query_of(&answer()).build());
        assert_eq!(program.run_once(&bytes).0, Reason::NoRule);
    };
    let soon = Duration::from_millis(50);
    let late = Duration::from_secs(5);
    // The kernel puts eight bytes in front of each record (Linux kernel/bpf/ringbuf.c).
    let record = (8 + size_of::<RecordHeader>() + bytes.len()).next_multiple_of(8);
    let unread_max = ASIDE_UNREAD_MAX as usize / record;
    runtime.block_on(async {
        let mut readable = pin!(capture.aside.readable());
        assert!(poll!(&mut readable).is_pending());
        for _ in 0..unread_max {
            hear(&mut program);
        }
        let woken = timeout(soon, &mut readable).await;
        assert!(woken.is_err(), "answers have woken the agent");
        // The kernel looks at what is unread before it adds a record.
        hear(&mut program);
        hear(&mut program);
        let woken = timeout(late, readable).await.expect("many answers");
        woken.expect("the runtime runs");
    });
    let (attempts, answers) = told(&mut capture.aside);
    assert_eq!((attempts.len(), answers), (0, unread_max + 2));
    runtime.block_on(async {
        let mut readable = pin!(capture.aside.readable());
        assert!(poll!(&mut readable).is_pending());
        hear(&mut program);
        assert!(timeout(soon, &mut readable).await.is_err());
        assert_eq!(program.ask(&syn().build()), Reason::Attempt);
        let woken = timeout(late, readable).await.expect("an attempt");
        woken.expect("the runtime runs");
    });
    let (attempts, answers) = told(&mut capture.aside);
    assert_eq!((attempts.len(), answers), (1, 1));
}

#[test]
fn a_pod_that_tries_many_places_loses_only_its_own() {
    with_veth(&Options::default(), |mut program| {
        let (flooding, other) = (1, ifindex("host"));
        program.trust_at(other);
        for at in [flooding, other] {
            program.capture.watched.set(at, true);
        }
        let tries = 4 * u16::try_from(ATTEMPT_BURST).expect("few");
        for port in 1..=tries {
            let mut frame = syn();
            frame.dst.set_port(1000 + port);
            program.run(INGRESS, &frame.build(), 1).expect("runs");
        }
        let [_, from_pod] = program.counters();
        let count = |reason: Reason| from_pod[reason.index() as usize].1;
        let lost = count(Reason::AttemptOverShare);
        assert_eq!(count(Reason::Attempt) + lost, u64::from(tries));
        assert!(lost > u64::from(tries) / 2, "{lost}");
        let left_out = program.capture.shares.left_out().expect("read");
        let expected = LeftOut {
            packets: 0,
            attempts: lost,
        };
        assert_eq!(left_out, [(flooding, expected)].into());
        program.at = other;
        assert_eq!(program.ask(&syn().build()), Reason::Attempt);
        let (attempts, _) = told(&mut program.capture.aside);
        let of_other = attempts.iter().filter(|(at, ..)| *at == other);
        assert_eq!(of_other.count(), 1);
        program.at = flooding;
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(program.ask(&syn().build()), Reason::Attempt, "with time");
    });
}
