//! Whose answers count, and to what.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Barrier,
    thread,
    time::Duration,
};

use aya::{TestRun as _, TestRunOptions, maps::HashMap, programs::SchedClassifier};
use dnsflow_agent::capture::{
    Attach as _, EGRESS, INGRESS, LeftOut, Options, RING_BYTES, ResolverError,
};
use dnsflow_common::{
    Reason,
    key::{
        FRAGMENT_AGE_MAX_NS, FragmentKey, PENDING_AGE_MAX_NS, PENDING_PER_INTERFACE, Pending,
        Query, SlotKey,
    },
    question::question_hash,
    walk::{self, Ports, Sent, TCP_ACK},
};
use dnsflow_core::{io::input::SourceAddresses, values::name::DomainName};
use dnsflow_tests::frames::{Answer, Fragment, Frame, Transport, query};

use crate::{
    Loaded, load,
    netns::ifindex,
    own_addresses, resolvers,
    test_run::{answer, query_of},
    unshared, with_veth,
};

/// Pairs of questions that are asked at the same moment.
const ROUNDS: u64 = 20_000;

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
            ack: 0,
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
        (Reason::OtherProtocol, changed(|it| it.protocol = Some(132))),
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

/// An answer without addresses: the name does not exist, the resolver has failed, or there are no records of this
/// type; the last is too long for UDP, so that the pod asks again by TCP.
fn empty_answers(answer: &Frame) -> Vec<(Reason, Frame)> {
    let changed = |flags: [u8; 2]| {
        let mut frame = answer.clone();
        frame.payload[2..4].copy_from_slice(&flags);
        frame.payload[7] = 0;
        frame
    };
    vec![
        (Reason::Rcode, changed([0x81, 0x83])),
        (Reason::Rcode, changed([0x81, 0x82])),
        (Reason::NoAnswers, changed([0x81, 0x80])),
        (Reason::NoAnswers, changed([0x83, 0x80])),
    ]
}

#[test]
fn an_answer_without_addresses_uses_its_query_up() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    for answer in [answer(), answer().over_v6()] {
        let asked = query_of(&answer).build();
        for (reason, empty) in empty_answers(&answer) {
            assert_eq!(program.ask(&asked), Reason::QueryRecorded);
            assert_eq!(program.run_once(&empty.build()).0, reason);
            let (later, _) = program.run_once(&answer.build());
            assert_eq!(later, Reason::NotAsked, "after {reason}");
        }
    }
}

#[test]
fn an_answer_without_addresses_is_judged_like_any_other() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let answer = answer();
    program.ask(&query_of(&answer).build());
    for (reason, empty) in empty_answers(&answer) {
        let mut other_question = empty.clone();
        other_question.payload[13] ^= 1;
        let mut other_id = empty.clone();
        other_id.payload[0] ^= 1;
        let mut other_resolver = empty.clone();
        other_resolver
            .src
            .set_ip(Ipv4Addr::new(10, 244, 0, 7).into());
        // Some servers leave out the question of a query that they do not understand.
        let mut no_question = empty.clone();
        no_question.payload[5] = 0;
        no_question.payload.truncate(12);
        for stranger in [other_question, other_id, other_resolver, no_question] {
            assert_eq!(program.run_once(&stranger.build()).0, reason);
        }
    }
    // It is neither captured nor held where the question may have been missed, nor kept for a rule that comes.
    assert_eq!(program.run_once(&answer.build()).0, Reason::Captured);
    program.filter(1, &["example.org"]);
    for (reason, empty) in empty_answers(&answer) {
        program.ask(&query_of(&answer).build());
        assert_eq!(program.run_once(&empty.build()).0, reason);
    }
    let deferred = &mut program.capture.deferred;
    let replayed = deferred.replay(|_| panic!("an answer without addresses is deferred"));
    replayed.expect("the kernel has a queue");
}

/// The first fragment says what the answer is: no other part of it is expected.
#[test]
fn a_fragment_of_an_answer_without_addresses_uses_its_query_up() {
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
    for (reason, empty) in empty_answers(&answer()) {
        let first = Frame {
            fragment: fragment(0),
            transport: Transport::Udp { len: Some(4000) },
            ..empty.clone()
        };
        let later = Frame {
            fragment: fragment(9),
            transport: Transport::Nothing,
            ..empty
        };
        program.ask(&query_of(&answer()).build());
        assert_eq!(program.run_once(&first.build()).0, reason);
        let (behind, _) = program.run_once(&later.build());
        assert_eq!(behind, Reason::UnexpectedFragment);
        assert_eq!(program.run_once(&answer().build()).0, Reason::NotAsked);
    }
}

/// With `ndots:5`, most answers to a pod are that the name does not exist.
#[test]
fn names_that_do_not_exist_displace_no_question() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let pairs = PENDING_PER_INTERFACE as u16 + 88;
    for id in 0..pairs {
        let asked = Frame::from_pod(query(id, "www.example.com.svc.cluster.local"));
        let mut answer = asked.clone().turned();
        answer.payload[2..4].copy_from_slice(&[0x81, 0x83]);
        assert_eq!(program.ask(&asked.build()), Reason::QueryRecorded, "{id}");
        assert_eq!(program.run_once(&answer.build()).0, Reason::Rcode);
    }
    let map = program.ebpf().map_mut("PENDING").expect("the map");
    let map: HashMap<_, [u8; size_of::<SlotKey>()], [u8; size_of::<Pending>()]> =
        map.try_into().expect("its types");
    assert_eq!(map.keys().count(), 0);
}

#[test]
fn a_query_is_shown_to_people_until_it_is_answered() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let name = DomainName::from_presentation("www.example.com").expect("a name");
    for answer in [answer(), answer().over_v6()] {
        program.ask(&query_of(&answer).build());
        let queries = |program: &Loaded, at| program.capture.queries.of(at).expect("read");
        let [query] = queries(&program, program.at)[..] else {
            panic!("one query");
        };
        assert_eq!(query.resolver, answer.src.into());
        assert_eq!(query.question, question_hash(name.wire(), 1));
        assert!(queries(&program, program.at + 1).is_empty());
        assert_eq!(program.run_once(&answer.build()).0, Reason::Captured);
        assert!(queries(&program, program.at).is_empty());
    }
}

/// Makes everything that is remembered in a map older, by setting the times back. The time stands
/// in the last 8 bytes of each value.
pub(crate) fn age<const KEY: usize, const VALUE: usize>(
    program: &mut Loaded,
    map: &str,
    by_ns: u64,
) {
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
        age::<{ size_of::<SlotKey>() }, { size_of::<Pending>() }>(&mut program, "PENDING", age_ns);
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
fn only_what_comes_from_the_pods_own_addresses_counts_as_asked() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    for answer in [answer(), answer().over_v6()] {
        let asked = query_of(&answer);
        let changed = |change: fn(&mut Frame)| {
            let mut frame = asked.clone();
            change(&mut frame);
            frame.build()
        };
        for foreign in [
            changed(|it| it.mac_src[0] ^= 2),
            changed(|it| it.mac_src[5] ^= 1),
            changed(|it| {
                it.src = match it.src {
                    SocketAddr::V4(_) => "10.244.0.6:40000",
                    SocketAddr::V6(_) => "[fd00::6]:40000",
                }
                .parse()
                .expect("an address");
            }),
        ] {
            assert_eq!(program.ask(&foreign), Reason::ForeignAddress);
            assert_eq!(program.run_once(&answer.build()).0, Reason::NotAsked);
        }
        assert_eq!(program.ask(&asked.build()), Reason::QueryRecorded);
        assert_eq!(program.run_once(&answer.build()).0, Reason::Captured);
    }
}

#[test]
fn where_no_address_is_known_nothing_counts() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let trust = |program: &mut Loaded, sources: &SourceAddresses| {
        let attachments = &mut program.capture.attacher.attachments;
        attachments.program_mut().trust_sources(1, sources);
    };
    let (asked, answer) = (query_of(&answer()).build(), answer());
    let segment = Frame {
        transport: Transport::Tcp {
            seq: 1,
            ack: 0,
            flags: TCP_ACK,
            options: 0,
        },
        ..answer.clone()
    };
    for sources in [
        SourceAddresses::default(),
        SourceAddresses {
            mac: None,
            ..own_addresses()
        },
    ] {
        trust(&mut program, &sources);
        let counts = !sources.ips.is_empty();
        let expect = |counts, not| if counts { Reason::Captured } else { not };
        let recorded = match counts {
            true => Reason::QueryRecorded,
            false => Reason::ForeignAddress,
        };
        assert_eq!(program.ask(&asked), recorded);
        let reason = program.run_once(&answer.build()).0;
        assert_eq!(reason, expect(counts, Reason::NotAsked));
        let reason = program.run_once(&segment.build()).0;
        assert_eq!(reason, expect(counts, Reason::ForeignAddress));
        let reason = program.ask(&segment.clone().turned().build());
        assert_eq!(reason, expect(counts, Reason::ForeignAddress));
        program.drain();
    }
}

/// What a pod does with the interface's own slots, at two interfaces.
#[test]
fn a_pod_that_asks_without_end_displaces_only_its_own_questions() {
    with_veth(&Options::default(), |mut program| {
        let (flooding, other) = (1, ifindex("host"));
        program.trust_at(other);
        let (asked, answer) = (query_of(&answer()).build(), answer().build());
        program.at = other;
        assert_eq!(program.ask(&asked), Reason::QueryRecorded);
        program.at = flooding;
        // As many as the whole node had room for, once.
        for id in 0..=u16::MAX {
            let mut frame = Frame::from_pod(query(id, "www.example.com"));
            frame.src.set_port(1000 + id % 7);
            program.run(INGRESS, &frame.build(), 1).expect("runs");
        }
        let recorded = program.capture.counters.read_queries().expect("read");
        let of = |reason: Reason| recorded[reason.index() as usize].1;
        let kept = u64::from(PENDING_PER_INTERFACE);
        // The other pod's is one more.
        assert_eq!(of(Reason::QueryRecorded), kept + 1);
        assert_eq!(of(Reason::QueryDisplaced), 65_536 - kept);
        let mut last = Frame::to_pod(
            Answer {
                id: u16::MAX,
                ..Answer::new("www.example.com", &[Ipv4Addr::new(192, 0, 2, 1)])
            }
            .build(),
        );
        last.dst.set_port(1000 + u16::MAX % 7);
        assert_eq!(program.run_once(&last.build()).0, Reason::Captured);
        program.at = other;
        let (reason, _) = program.run_once(&answer);
        // On an emulated machine the flood takes longer than a question waits. The question is remembered all the
        // same: otherwise it would count as not asked.
        let is_known = matches!(reason, Reason::Captured | Reason::TooOld);
        assert!(is_known, "{reason:?}");
    });
}

/// The set of slots that a question belongs to.
fn set_of(question: &Frame) -> u32 {
    let frame = question.build();
    let Ok(Sent::UdpQuery(found)) = walk::from_pod(&frame.as_slice(), &Ports::DNS) else {
        panic!("it is one");
    };
    let id = u16::from_be_bytes([question.payload[0], question.payload[1]]);
    let ports = (found.src_port, found.dst_port);
    let query = Query::sent(&frame.as_slice(), found.ip, ports, id);
    query.expect("it is whole").set()
}

/// As those for A and AAAA of one name: two processors see them.
#[test]
fn two_questions_at_the_same_moment_are_both_remembered() {
    let Some(mut program) = load(&unshared()) else {
        return;
    };
    let question = |id| Frame::from_pod(query(id, "www.example.com"));
    let of_first = set_of(&question(0));
    let second = (1..).find(|id| set_of(&question(*id)) == of_first);
    let second = second.expect("there are more than sets");
    let answer = |id| {
        let answer = Answer {
            id,
            ..Answer::new("www.example.com", &[Ipv4Addr::new(192, 0, 2, 1)])
        };
        Frame::to_pod(answer.build()).build()
    };
    let questions = [question(0), question(second)].map(|one| one.build());
    let answers = [answer(0), answer(second)];
    let ebpf: &aya::Ebpf = program.ebpf();
    let run = |name: &str, frame: &[u8]| {
        let program = ebpf.program(name).expect("the program");
        let program: &SchedClassifier = program.try_into().expect("a classifier");
        let options = TestRunOptions {
            data_in: Some(frame),
            ..TestRunOptions::default()
        };
        program.test_run(options).expect("it runs");
    };
    let together = Barrier::new(2);
    thread::scope(|scope| {
        let asking = questions.iter().zip(&answers).map(|(question, answer)| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    together.wait();
                    run(INGRESS, question);
                    together.wait();
                    run(EGRESS, answer);
                }
            })
        });
        for thread in asking.collect::<Vec<_>>() {
            thread.join().expect("no panic");
        }
    });
    let [to_pod, _] = program.counters();
    let unasked = to_pod[Reason::NotAsked.index() as usize].1;
    assert_eq!(unasked, 0, "of {} answers", 2 * ROUNDS);
}

/// The same for the ring buffer: a flood over TCP, in both directions.
#[test]
fn a_pod_over_its_share_loses_only_its_own_records() {
    with_veth(&Options::default(), |mut program| {
        let (flooding, other) = (1, ifindex("host"));
        program.trust_at(other);
        let segment = Frame {
            transport: Transport::Tcp {
                seq: 1,
                ack: 0,
                flags: TCP_ACK,
                options: 0,
            },
            payload: vec![7; 1400],
            ..answer()
        };
        // Four times the ring buffer.
        let frame = segment.build();
        let runs = (4 * RING_BYTES) / frame.len() as u32;
        program.run(EGRESS, &frame, runs).expect("runs");
        let sent = segment.turned().build();
        program.run(INGRESS, &sent, runs).expect("runs");
        let [to_pod, from_pod] = program.counters();
        let lost = |counters: &[(Reason, u64)], reason: Reason| counters[reason.index() as usize].1;
        for counters in [&to_pod, &from_pod] {
            assert!(lost(counters, Reason::OverShare) > u64::from(runs) / 2);
            assert_eq!(lost(counters, Reason::RingFull), 0, "there is room");
        }
        let left_out = program.capture.shares.left_out().expect("read");
        let both = lost(&to_pod, Reason::OverShare) + lost(&from_pod, Reason::OverShare);
        let lost = LeftOut {
            packets: both,
            attempts: 0,
        };
        assert_eq!(left_out, [(flooding, lost)].into());
        program.at = other;
        assert_eq!(
            program.ask(&query_of(&answer()).build()),
            Reason::QueryRecorded
        );
        let reason = program.reason(EGRESS, &answer().build());
        assert_eq!(reason, Reason::Captured);
        // A share comes back with time.
        program.drain();
        program.at = flooding;
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(program.run_once(&frame).0, Reason::Captured);
    });
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
