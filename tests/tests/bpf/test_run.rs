//! What the program on egress captures, and what it skips for what is in the frame alone.

use std::net::Ipv4Addr;

use dnsflow_agent::capture::{EGRESS, Options};
use dnsflow_common::{
    Reason,
    walk::{Ports, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
};
use dnsflow_tests::frames::{Answer, Extension, Fragment, Frame, Transport};

use crate::{CONTINUE, load, unshared};

/// An answer, and what the pod asked for it.
pub(crate) fn answer() -> Frame {
    let addresses = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
    Frame::to_pod(Answer::new("www.example.com", &addresses).build())
}

/// The query that a frame with an answer answers.
pub(crate) fn query_of(answer: &Frame) -> Frame {
    let mut query = answer.clone().turned();
    // Only the question is left.
    let question_end = 12
        + query.payload[12..]
            .iter()
            .position(|byte| *byte == 0)
            .expect("a name")
        + 5;
    query.payload.truncate(question_end);
    query.payload[2..4].copy_from_slice(&[1, 0]);
    query.payload[6..12].fill(0);
    Frame {
        tags: Vec::new(),
        options: Vec::new(),
        extensions: Vec::new(),
        fragment: None,
        transport: Transport::Udp { len: None },
        ..query
    }
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[test]
fn an_answer_is_captured_whole() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    // Short after long: a stale tail of the first would show.
    let mut long = answer();
    long.payload.extend([0xee; 1000]);
    for frame in [long, answer(), answer().over_v6()] {
        assert_eq!(
            program.ask(&query_of(&frame).build()),
            Reason::QueryRecorded
        );
        let frame = frame.build();
        let before = now_ns();
        let (reason, captured) = program.run_once(&frame);
        let captured = captured.expect("a record");
        assert_eq!(reason, Reason::Captured);
        assert_eq!(captured.bytes, frame);
        // The kernel runs it on this namespace's loopback interface.
        assert_eq!(captured.ifindex, 1);
        assert!((before..=now_ns()).contains(&captured.captured_at_ns));
    }
}

fn tcp(flags: u8, payload: Vec<u8>) -> Frame {
    Frame {
        transport: Transport::Tcp {
            seq: 7,
            ack: 0,
            flags,
            options: 3,
        },
        ..Frame::to_pod(payload)
    }
}

/// Each reason that a whole frame can have for itself, with frames that have it.
pub(crate) fn skipped() -> Vec<(Reason, Vec<u8>)> {
    let with = |change: fn(&mut Frame)| {
        let mut frame = answer();
        change(&mut frame);
        frame.build()
    };
    let with_v6 = |change: fn(&mut Frame)| {
        let mut frame = answer().over_v6();
        change(&mut frame);
        frame.build()
    };
    let byte = |at: usize, value: u8| {
        let mut frame = answer().build();
        frame[at] = value;
        frame
    };
    let byte_v6 = |at: usize, value: u8| {
        let mut frame = answer().over_v6().build();
        frame[at] = value;
        frame
    };
    let udp_len = |len: u16| {
        let mut frame = answer();
        frame.transport = Transport::Udp { len: Some(len) };
        frame.build()
    };
    let byte_tcp = |at: usize, value: u8| {
        let mut frame = tcp(TCP_ACK, vec![7; 30]).build();
        frame[at] = value;
        frame
    };
    let extensions = |extensions: &[Extension]| {
        let mut frame = answer().over_v6();
        frame.extensions = extensions.to_vec();
        frame.build()
    };
    const OPTIONS: Extension = Extension::Options {
        protocol: 60,
        len: 0,
    };
    vec![
        (Reason::NotIp, with(|frame| frame.ethertype = Some(0x0806))),
        (
            Reason::NotIp,
            with(|frame| {
                frame.tags = vec![(0x8100, 5)];
                frame.ethertype = Some(0x0806);
            }),
        ),
        (
            Reason::TooManyTags,
            with(|frame| frame.tags = vec![(0x88a8, 5), (0x8100, 6), (0x8100, 7)]),
        ),
        (Reason::InvalidIpv4, byte(14, 0x65)),
        (Reason::InvalidIpv4, byte(14, 0x44)),
        (Reason::InvalidIpv6, byte_v6(14, 0x45)),
        (
            Reason::InvalidIpv6,
            extensions(&[Extension::Fragment, OPTIONS, Extension::Fragment])
                .into_iter()
                .enumerate()
                // The first fragment header says More Fragments.
                .map(|(at, byte)| if at == 14 + 40 + 3 { 1 } else { byte })
                .collect(),
        ),
        // The extension header is longer than the packet.
        (
            Reason::InvalidIpv6,
            extensions(&[OPTIONS])
                .into_iter()
                .enumerate()
                .map(|(at, byte)| if at == 14 + 40 + 1 { 200 } else { byte })
                .collect(),
        ),
        (Reason::TooManyExtensions, extensions(&[OPTIONS; 7])),
        (
            Reason::OtherProtocol,
            with(|frame| frame.protocol = Some(132)),
        ),
        (
            Reason::OtherProtocol,
            with_v6(|frame| frame.protocol = Some(132)),
        ),
        (
            Reason::FragmentedTcp,
            with(|frame| {
                frame.protocol = Some(6);
                frame.fragment = Some(Fragment {
                    id: 1,
                    offset: 0,
                    more: true,
                });
            }),
        ),
        (Reason::OtherPort, with(|frame| frame.src.set_port(5353))),
        (Reason::OtherPort, with(|frame| frame.src.set_port(0))),
        (Reason::OtherPort, byte_tcp(35, 54)),
        (Reason::InvalidUdp, udp_len(7)),
        (Reason::InvalidUdp, udp_len(2000)),
        // A first fragment is not all of the datagram.
        (
            Reason::InvalidUdp,
            with(|frame| {
                frame.fragment = Some(Fragment {
                    id: 1,
                    offset: 0,
                    more: true,
                });
            }),
        ),
        (Reason::InvalidTcp, byte_tcp(46, 0x40)),
        (Reason::InvalidTcp, byte_tcp(17, 50)),
        (Reason::TcpWithoutData, tcp(TCP_ACK, Vec::new()).build()),
        (Reason::TruncatedDns, udp_len(19)),
        (Reason::NotResponse, with(|frame| frame.payload[2] = 0x01)),
        (Reason::Opcode, with(|frame| frame.payload[2] = 0xa8)),
        (Reason::Rcode, with(|frame| frame.payload[3] = 0x83)),
        (Reason::NoAnswers, with(|frame| frame.payload[7] = 0)),
        (Reason::Questions, with(|frame| frame.payload[5] = 2)),
        (Reason::Questions, with(|frame| frame.payload[5] = 0)),
    ]
}

/// Everything that may be in front of an answer, in one.
#[test]
fn tags_options_and_extension_headers_are_walked() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let options = |protocol, len| Extension::Options { protocol, len };
    for tags in [
        vec![],
        vec![(0x8100, 5)],
        vec![(0x88a8, 5), (0x8100, 0xf006)],
    ] {
        let mut v4 = answer();
        v4.tags = tags;
        v4.options = vec![1; 40];
        let mut v6 = answer().over_v6();
        v6.tags = v4.tags.clone();
        v6.extensions = vec![
            options(0, 1),
            options(60, 0),
            options(43, 3),
            Extension::Fragment,
            options(60, 255),
        ];
        for frame in [v4, v6] {
            program.ask(&query_of(&frame).build());
            let frame = frame.build();
            let (reason, captured) = program.run_once(&frame);
            assert_eq!(reason, Reason::Captured);
            assert_eq!(captured.expect("a record").bytes, frame);
        }
    }
}

#[test]
fn tcp_segments_with_data_or_an_end_are_captured() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    for (flags, payload) in [
        (TCP_SYN | TCP_ACK, 0),
        (TCP_ACK, 1),
        (TCP_ACK | TCP_FIN, 0),
        (TCP_RST, 0),
    ] {
        for frame in [
            tcp(flags, vec![7; payload]),
            tcp(flags, vec![7; payload]).over_v6(),
        ] {
            let frame = frame.build();
            let (reason, captured) = program.run_once(&frame);
            assert_eq!(reason, Reason::Captured, "{flags:#x}");
            assert_eq!(captured.expect("a record").bytes, frame);
        }
    }
}

/// A pod could hide the end of a connection from the agent, and begin another one with the numbers of the first.
#[test]
fn a_record_says_that_segments_may_be_missing() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let segment = tcp(TCP_ACK, vec![7; 100]);
    let left_out = |program: &mut crate::Loaded| {
        let (_, captured) = program.run_once(&segment.build());
        captured.expect("a record").left_out
    };
    let mut expected = left_out(&mut program);
    let hiding = skipped().into_iter();
    for (reason, frame) in hiding.filter(|(reason, _)| reason.leaves_segments_out()) {
        program.run_once(&frame);
        expected += 1;
        assert_eq!(left_out(&mut program), expected, "{reason}");
        // The same of the pod.
        program.run(crate::INGRESS, &frame, 1).expect("runs");
        expected = left_out(&mut program);
    }
    assert!(expected > 2, "some were hidden");
    // Beyond the share.
    let long = tcp(TCP_ACK, vec![7; 1400]).build();
    let runs = 4 * 512 * 1024 / long.len() as u32;
    program.run(crate::EGRESS, &long, runs).expect("runs");
    program.drain();
    std::thread::sleep(std::time::Duration::from_millis(50));
    let over = left_out(&mut program);
    assert!(over > expected + runs / 2, "{over}");
    // What is no segment hides none.
    let mut sctp = tcp(TCP_ACK, vec![7; 100]);
    sctp.protocol = Some(132);
    let (reason, _) = program.run_once(&sctp.build());
    assert_eq!(reason, Reason::OtherProtocol);
    assert_eq!(left_out(&mut program), over);
}

#[test]
fn the_ports_are_those_given() {
    let ports = Ports::new(&[5353, 1053]).expect("two ports");
    let options = Options {
        ports,
        ..Options::default()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    for (port, expected) in [
        (5353, Reason::Captured),
        (1053, Reason::Captured),
        (53, Reason::OtherPort),
        (0, Reason::OtherPort),
    ] {
        let mut frame = answer();
        frame.src.set_port(port);
        program.ask(&query_of(&frame).build());
        assert_eq!(program.run_once(&frame.build()).0, expected, "port {port}");
    }
}

#[test]
fn a_full_ring_buffer_is_counted_and_packets_pass() {
    let options = Options {
        ring_bytes: 256 << 10,
        ..unshared()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    // Each of them is trusted, unlike an answer that comes again.
    let frame = tcp(TCP_ACK, vec![7; 1400]).build();
    let runs = 1000;
    let (verdict, _) = program.run(EGRESS, &frame, runs).expect("runs");
    assert_eq!(verdict, CONTINUE);
    let captured = program.capture.counters.of(Reason::Captured).expect("read");
    let lost = program.capture.counters.of(Reason::RingFull).expect("read");
    assert!(
        captured > 100 && lost > 100,
        "{captured} captured, {lost} lost"
    );
    assert_eq!(captured + lost, u64::from(runs));
    let records = program.drain();
    assert_eq!(records.len() as u64, captured);
    assert!(records.iter().all(|record| record.bytes == frame));
    // Once read, there is room again.
    assert_eq!(program.run_once(&frame).0, Reason::Captured);
}
