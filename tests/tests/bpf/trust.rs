//! Whose answers count, and to what.

use std::net::{Ipv4Addr, SocketAddr};

use aya::maps::HashMap;
use dnsflow_agent::capture::{INGRESS, Options, ResolverError};
use dnsflow_common::{
    Reason,
    key::{FRAGMENT_AGE_MAX_NS, FragmentKey, PENDING_AGE_MAX_NS, Pending, PendingKey},
    walk::TCP_ACK,
};
use dnsflow_tests::frames::{Answer, Fragment, Frame, Transport, query};

use crate::{
    Loaded, load, resolvers,
    test_run::{answer, query_of},
};

#[test]
fn an_answer_counts_once_and_only_if_asked_for() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    for answer in [answer(), answer().over_v6()] {
        let asked = query_of(&answer).build();
        let answer = answer.build();
        assert_eq!(program.run_once(&answer).0, Reason::NotAsked, "never asked");
        assert_eq!(program.ask(&asked), Reason::QueryRecorded);
        assert_eq!(program.run_once(&answer).0, Reason::Captured);
        assert_eq!(program.run_once(&answer).0, Reason::NotAsked, "again");
        assert_eq!(program.ask(&asked), Reason::QueryRecorded);
        assert_eq!(program.run_once(&answer).0, Reason::Captured, "asked again");
    }
}

#[test]
fn an_answer_to_another_question_leaves_the_query_pending() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let answer = answer();
    program.ask(&query_of(&answer).build());
    let named = |name| Frame {
        payload: Answer::new(name, &[Ipv4Addr::new(192, 0, 2, 1)]).build(),
        ..answer.clone()
    };
    let mut aaaa = answer.clone();
    let kind = 12 + "www.example.com".len() + 2;
    aaaa.payload[kind + 1] = 28;
    for other in [named("www.example.org"), named("example.com"), aaaa] {
        assert_eq!(program.run_once(&other.build()).0, Reason::OtherQuestion);
    }
    // Servers may give back a question in another case.
    let same = named("WWW.exAmple.com");
    assert_eq!(program.run_once(&same.build()).0, Reason::Captured);
}

#[test]
fn each_part_of_the_key_counts() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let answer = answer();
    program.ask(&query_of(&answer).build());
    let changed = |change: fn(&mut Frame)| {
        let mut frame = answer.clone();
        change(&mut frame);
        frame.build()
    };
    for (what, frame, reason) in [
        (
            "id",
            changed(|frame| frame.payload[0] ^= 1),
            Reason::NotAsked,
        ),
        (
            "pod's port",
            changed(|frame| frame.dst.set_port(40_001)),
            Reason::NotAsked,
        ),
        (
            "pod's address",
            changed(|frame| frame.dst.set_ip(Ipv4Addr::new(10, 244, 0, 6).into())),
            Reason::NotAsked,
        ),
        (
            "resolver",
            changed(|frame| frame.src.set_ip(Ipv4Addr::new(10, 244, 0, 7).into())),
            Reason::UntrustedResolver,
        ),
    ] {
        assert_eq!(program.run_once(&frame).0, reason, "{what}");
    }
    assert_eq!(program.run_once(&answer.build()).0, Reason::Captured);
}

#[test]
fn only_trusted_resolvers_count() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let segment = Frame {
        transport: Transport::Tcp {
            seq: 1,
            flags: TCP_ACK,
            options: 0,
        },
        ..answer()
    };
    for frame in [answer(), answer().over_v6()] {
        let asked = query_of(&frame).build();
        let segment = Frame {
            src: frame.src,
            dst: frame.dst,
            ..segment.clone()
        };
        program.ask(&asked);
        let all = resolvers(53);
        let others: Vec<_> = all
            .into_iter()
            .filter(|it| it.0 != frame.src.ip())
            .collect();
        assert!(program.capture.resolvers.set(&others).is_empty());
        assert_eq!(program.ask(&asked), Reason::UntrustedResolver);
        assert_eq!(
            program.run_once(&frame.build()).0,
            Reason::UntrustedResolver
        );
        assert_eq!(
            program.run_once(&segment.build()).0,
            Reason::UntrustedResolver
        );
        assert!(program.capture.resolvers.set(&all).is_empty());
        assert_eq!(program.run_once(&frame.build()).0, Reason::Captured);
        assert_eq!(program.run_once(&segment.build()).0, Reason::Captured);
    }
    assert!(program.capture.resolvers.set(&[]).is_empty());
    assert_eq!(
        program.run_once(&segment.build()).0,
        Reason::UntrustedResolver
    );
}

#[test]
fn queries_that_are_none_are_not_remembered() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let asked = query_of(&answer());
    let changed = |change: fn(&mut Frame)| {
        let mut frame = asked.clone();
        change(&mut frame);
        frame.build()
    };
    for (reason, frame) in [
        (Reason::NotIp, changed(|it| it.ethertype = Some(0x0806))),
        (Reason::OtherProtocol, changed(|it| it.protocol = Some(6))),
        (Reason::OtherPort, changed(|it| it.dst.set_port(443))),
        (Reason::NotQuery, changed(|it| it.payload[2] = 0x81)),
        (Reason::Opcode, changed(|it| it.payload[2] = 0x28)),
        (Reason::Questions, changed(|it| it.payload[5] = 0)),
        (Reason::InvalidQuestion, changed(|it| it.payload[12] = 0xc0)),
        (
            Reason::TruncatedQuestion,
            changed(|it| it.payload.truncate(30)),
        ),
        (Reason::TruncatedDns, changed(|it| it.payload.truncate(11))),
    ] {
        assert_eq!(program.ask(&frame), reason);
    }
    assert_eq!(program.run_once(&answer().build()).0, Reason::NotAsked);
}

/// Makes everything that is remembered in a map older, by setting the times back. The time stands
/// in the last 8 bytes of each value.
fn age<const KEY: usize, const VALUE: usize>(program: &mut Loaded, map: &str, by_ns: u64) {
    let map = program.ebpf().map_mut(map).expect("the map");
    let mut map: HashMap<_, [u8; KEY], [u8; VALUE]> = map.try_into().expect("its types");
    let entries: Vec<_> = map.iter().collect::<Result<_, _>>().expect("read");
    assert!(!entries.is_empty());
    for (key, mut value) in entries {
        let (_, time) = value.split_last_chunk_mut().expect("8 bytes");
        *time = u64::from_ne_bytes(*time).wrapping_sub(by_ns).to_ne_bytes();
        map.insert(key, value, 0).expect("written");
    }
}

#[test]
fn an_old_query_has_no_answer_any_more() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let (asked, answer) = (query_of(&answer()).build(), answer().build());
    for (age_ns, expected) in [
        (PENDING_AGE_MAX_NS / 2, Reason::Captured),
        (PENDING_AGE_MAX_NS, Reason::TooOld),
    ] {
        program.ask(&asked);
        age::<{ size_of::<PendingKey>() }, { size_of::<Pending>() }>(
            &mut program,
            "PENDING",
            age_ns,
        );
        assert_eq!(program.run_once(&answer).0, expected);
        assert_eq!(program.run_once(&answer).0, Reason::NotAsked, "used up");
    }
}

#[test]
fn fragments_long_after_their_first_are_not_expected() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let fragment = |offset| {
        Some(Fragment {
            id: 1,
            offset,
            more: offset == 0,
        })
    };
    let first = Frame {
        fragment: fragment(0),
        transport: Transport::Udp { len: Some(4000) },
        ..answer()
    };
    let later = Frame {
        fragment: fragment(9),
        transport: Transport::Nothing,
        ..answer()
    };
    program.ask(&query_of(&first).build());
    assert_eq!(program.run_once(&first.build()).0, Reason::Captured);
    age::<{ size_of::<FragmentKey>() }, 8>(&mut program, "FRAGMENTS", FRAGMENT_AGE_MAX_NS);
    assert_eq!(
        program.run_once(&later.build()).0,
        Reason::UnexpectedFragment
    );
}

#[test]
fn queries_beyond_the_limit_drive_out_old_ones() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let ask = |port: u16, id: u16| {
        let mut frame = Frame::from_pod(query(id, "www.example.com"));
        frame.src.set_port(port);
        frame.build()
    };
    // Twice as many as there is room for.
    for port in [1, 2] {
        for id in 0..=u16::MAX {
            program.run(INGRESS, &ask(port, id), 1).expect("runs");
        }
    }
    let recorded = program.capture.counters.read_queries().expect("read");
    let recorded = recorded
        .iter()
        .find(|(reason, _)| *reason == Reason::QueryRecorded);
    assert_eq!(recorded.map(|it| it.1), Some(2 * 65_536), "none is refused");
    let mut last = Frame::to_pod(
        Answer {
            id: u16::MAX,
            ..Answer::new("www.example.com", &[Ipv4Addr::new(192, 0, 2, 1)])
        }
        .build(),
    );
    last.dst.set_port(2);
    assert_eq!(program.run_once(&last.build()).0, Reason::Captured);
}

#[test]
fn resolvers_that_cannot_be_trusted_are_named() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let address = Ipv4Addr::new(10, 96, 0, 10);
    let errors = program
        .capture
        .resolvers
        .set(&[(address.into(), 5353), (address.into(), 53)]);
    let wanted = SocketAddr::from((address, 5353));
    assert!(
        matches!(errors[..], [ResolverError::Port { resolver }] if resolver == wanted),
        "{errors:?}"
    );
    // The other one is.
    program.ask(&query_of(&answer()).build());
    assert_eq!(program.run_once(&answer().build()).0, Reason::Captured);

    let many: Vec<_> = (0..2000u32)
        .map(|at| (Ipv4Addr::from(0x0a00_0000 + at).into(), 53))
        .collect();
    let errors = program.capture.resolvers.set(&many);
    assert_eq!(errors.len(), 2000 - 1024);
    assert!(matches!(errors[0], ResolverError::TooMany { .. }));
}
