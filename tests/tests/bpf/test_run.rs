//! What the program decides, frame by frame.

use std::net::Ipv4Addr;

use aya::{TestRun as _, TestRunOptions};
use dnsflow_agent::capture::{Options, RingSize};
use dnsflow_common::{
    Reason,
    walk::{self, Message, Ports},
};
use dnsflow_tests::frames::{Answer, UdpFrame};
use proptest::{prelude::*, strategy::ValueTree as _};

use crate::{CONTINUE, load};

fn answer() -> UdpFrame {
    let addresses = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
    UdpFrame::to_pod(Answer::new("www.example.com", &addresses).build())
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
    for frame in [long.build(), answer().build()] {
        let before = now_ns();
        let (reason, captured) = program.run_once(&frame);
        let captured = captured.expect("a record");
        assert_eq!(reason, Reason::Captured);
        assert_eq!(captured.bytes, frame);
        assert_eq!(captured.wire_len, frame.len());
        // The kernel runs it on this namespace's loopback interface.
        assert_eq!(captured.ifindex, 1);
        assert!((before..=now_ns()).contains(&captured.captured_at_ns));
    }
}

#[test]
fn the_interface_comes_from_the_context() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    // `struct __sk_buff` up to and with `ifindex`, its eleventh word (Linux
    // include/uapi/linux/bpf.h).
    let mut context = [0u8; 44];
    context[40..].copy_from_slice(&1u32.to_ne_bytes());
    let frame = answer().build();
    let options = TestRunOptions {
        data_in: Some(&frame),
        ctx_in: Some(&context),
        ..TestRunOptions::default()
    };
    let result = program.program().test_run(options).expect("runs");
    assert_eq!(result.return_value, CONTINUE);
    let captured = program.drain();
    assert_eq!(captured.len(), 1);
    assert_eq!(captured[0].ifindex, 1);
}

/// Each reason that a whole frame can have, with a frame that has it.
fn skipped() -> Vec<(Reason, Vec<u8>)> {
    let with = |change: fn(&mut UdpFrame)| {
        let mut frame = answer();
        change(&mut frame);
        frame.build()
    };
    let byte = |at: usize, value: u8| {
        let mut frame = answer().build();
        frame[at] = value;
        frame
    };
    vec![
        (Reason::NotIpv4, with(|frame| frame.ethertype = 0x86dd)),
        (Reason::NotIpv4, with(|frame| frame.ethertype = 0x0806)),
        (Reason::InvalidIpv4, byte(14, 0x65)),
        (Reason::InvalidIpv4, byte(14, 0x44)),
        (Reason::NotUdp, with(|frame| frame.protocol = 6)),
        (Reason::Fragment, with(|frame| frame.fragment = 0x2000)),
        (Reason::Fragment, with(|frame| frame.fragment = 185)),
        (Reason::OtherPort, with(|frame| frame.src.set_port(5353))),
        (Reason::OtherPort, with(|frame| frame.src.set_port(0))),
        (Reason::InvalidUdp, with(|frame| frame.udp_len = Some(7))),
        (Reason::InvalidUdp, with(|frame| frame.udp_len = Some(2000))),
        (Reason::TruncatedDns, with(|frame| frame.udp_len = Some(19))),
        (Reason::NotResponse, with(|frame| frame.payload[2] = 0x01)),
        (Reason::Opcode, with(|frame| frame.payload[2] = 0xa8)),
        (Reason::Rcode, with(|frame| frame.payload[3] = 0x83)),
        (Reason::NoAnswers, with(|frame| frame.payload[7] = 0)),
    ]
}

#[test]
fn each_reason_to_skip_is_counted() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    for (expected, frame) in skipped() {
        let (reason, captured) = program.run_once(&frame);
        assert_eq!(reason, expected, "{frame:02x?}");
        assert_eq!(captured, None, "{expected}");
    }
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
        assert_eq!(program.run_once(&frame.build()).0, expected, "port {port}");
    }
}

#[test]
fn a_full_ring_buffer_is_counted_and_packets_pass() {
    let options = Options {
        ring: RingSize::new(32 << 10).expect("the smallest"),
        ..Options::default()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    let frame = answer().build();
    let runs = 1000;
    let (verdict, _) = program.run(&frame, runs).expect("runs");
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

#[test]
fn no_record_was_found_invalid() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    program.run(&answer().build(), 500).expect("runs");
    assert_eq!(program.drain().len(), 500);
    assert_eq!(
        program
            .capture
            .counters
            .of(Reason::InvalidRecord)
            .expect("read"),
        0
    );
}

/// Newer kernels refuse to run a program on frames that end within their IPv4 or IPv6 header
/// (`bpf_prog_test_run_skb` in Linux net/bpf/test_run.c); [`crate::attach`] sends those.
const ALWAYS_RUNS: usize = 14 + 40;

/// Answers and what is nearly one: with options, cut, prolonged and with some bytes changed.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let options = prop::collection::vec(any::<u8>(), 0..=10);
    let changes = prop::collection::vec((0usize..80, any::<u8>()), 0..4);
    let len = prop_oneof![2 => Just(None), 1 => (ALWAYS_RUNS..200).prop_map(Some)];
    (options, changes, len).prop_map(|(options, changes, len)| {
        let mut frame = answer();
        frame.options = options.iter().flat_map(|byte| [*byte; 4]).collect();
        let mut frame = frame.build();
        for (at, value) in changes {
            frame[at] = value;
        }
        frame.resize(len.unwrap_or(frame.len()), 0);
        frame
    })
}

/// The same lines of code run in the kernel and here: the same reason, or the same message.
#[test]
fn kernel_and_host_agree() {
    let Some(mut program) = load(&Options::default()) else {
        return;
    };
    let mut agree = |frame: &[u8]| {
        let here: Result<Message, Reason> = walk::dns_answer(&frame, &Ports::DNS);
        let (reason, captured) = program.run_once(frame);
        match here {
            Err(expected) => assert_eq!((reason, captured), (expected, None)),
            Ok(message) => {
                assert_eq!(reason, Reason::Captured);
                let captured = captured.expect("a record").bytes;
                assert_eq!(captured, frame);
                assert_eq!(walk::dns_answer(&&captured[..], &Ports::DNS), Ok(message));
            }
        }
        reason
    };
    for (_, frame) in skipped() {
        agree(&frame);
    }
    let mut reached = std::collections::BTreeSet::new();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = frames();
    for _ in 0..2000 {
        let frame = strategy.new_tree(&mut runner).expect("a frame").current();
        reached.insert(agree(&frame));
    }
    for reason in [
        Reason::Captured,
        Reason::NotIpv4,
        Reason::TruncatedIpv4,
        Reason::InvalidIpv4,
        Reason::TruncatedUdp,
        Reason::InvalidUdp,
        Reason::TruncatedDns,
    ] {
        assert!(reached.contains(&reason), "{reason} was never reached");
    }
}
