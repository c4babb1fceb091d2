//! What the program costs: instructions that the verifier looks at, time per packet.

use std::net::Ipv4Addr;

use dnsflow_agent::capture::{Options, RingSize};
use dnsflow_common::Reason;
use dnsflow_tests::frames::{Answer, UdpFrame};

use crate::load;

#[test]
fn packets_that_are_not_captured_cost_less() {
    let options = Options {
        ring: RingSize::new(128 << 20).expect("a power of two"),
        ..Options::default()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    let info = program.program().info().expect("the kernel describes it");
    println!(
        "{} instructions, {} bytes of machine code, the verifier walked {} instructions",
        info.size_translated().unwrap_or(0) / 8,
        info.size_jitted(),
        info.verified_instruction_count().unwrap_or(0),
    );

    let addresses = [Ipv4Addr::new(192, 0, 2, 1); 4];
    let answer = UdpFrame::to_pod(Answer::new("www.example.com", &addresses).build());
    let non_ip = UdpFrame {
        ethertype: 0x0806,
        ..answer.clone()
    };
    let tcp = UdpFrame {
        protocol: 6,
        payload: vec![0; 1400],
        ..answer.clone()
    };
    let mut other_udp = answer.clone();
    other_udp.src.set_port(443);
    let mut no_answers = answer.clone();
    no_answers.payload[7] = 0;

    let mut measure = |frame: &UdpFrame, reason: Reason| {
        let runs = 200_000;
        let before = program.capture.counters.of(reason).expect("read");
        let (_, nanos) = program.run(&frame.build(), runs).expect("runs");
        let counted = program.capture.counters.of(reason).expect("read") - before;
        assert_eq!(counted, u64::from(runs), "{reason}");
        println!("{reason:<12} {nanos:>4} ns");
        nanos
    };
    let skipped = [
        measure(&non_ip, Reason::NotIpv4),
        measure(&tcp, Reason::NotUdp),
        measure(&other_udp, Reason::OtherPort),
        measure(&no_answers, Reason::NoAnswers),
    ];
    let captured = measure(&answer, Reason::Captured);
    assert!(
        skipped.iter().all(|nanos| *nanos < captured),
        "{skipped:?} {captured}"
    );
}
