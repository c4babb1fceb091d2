//! What the programs cost: instructions that the verifier looks at, time per packet.
//!
//! `docs/internals/packets.md` shows what this prints; only what holds on every machine is asserted.

use std::net::Ipv4Addr;

use dnsflow_agent::capture::{EGRESS, HOLD, INGRESS, OPEN, Options};
use dnsflow_common::{
    Reason,
    walk::{TCP_ACK, TCP_SYN},
};
use dnsflow_tests::{
    frames::{Answer, Frame, Transport},
    raw_program::RawProgram,
};

use crate::{Loaded, load, marks::marking, test_run::query_of, unshared};

/// At most this many instructions of a program are walked by the verifier (`BPF_COMPLEXITY_LIMIT_INSNS`,
/// Linux include/linux/bpf.h). Half of it stays free for kernels that were not tried.
const VERIFIED_MAX: u32 = 1_000_000 / 2;

/// How often a frame is timed.
const RUNS: u32 = 200_000;

#[test]
fn the_verifier_has_room_left() {
    // The verifier leaves out what is for marks alone if there are none.
    for options in [Options::default(), marking()] {
        let Some(mut program) = load(&options) else {
            return;
        };
        let by = options.mark_mask.map_or("by flows", |_| "by marks");
        for name in [INGRESS, EGRESS, HOLD, OPEN] {
            let info = program.program(name).info();
            let info = info.expect("the kernel describes it");
            // Since Linux 5.16.
            let verified = info.verified_instruction_count().unwrap_or(0);
            println!(
                "{name}, {by}: {} instructions, {} bytes of machine code, the verifier walked {verified} \
                 instructions",
                info.size_translated().unwrap_or(0) / 8,
                info.size_jitted(),
            );
            assert!(verified < VERIFIED_MAX, "{name}, {by}: {verified}");
        }
    }
}

impl Loaded {
    /// Runs a program often on one frame that always meets `reason`.
    fn measure(&mut self, program: &str, what: &str, frame: &Frame, reason: Reason) {
        let frame = frame.build();
        let count = |counters: [Vec<(Reason, u64)>; 2]| {
            let [to_pod, from_pod] = counters;
            let of = if program == EGRESS { to_pod } else { from_pod };
            of[reason.index() as usize].1
        };
        let before = count(self.counters());
        // The least of some: whatever else runs here only adds.
        let nanos = (0..5)
            .map(|_| self.run(program, &frame, RUNS).expect("runs").1)
            .min()
            .unwrap_or_default();
        assert_eq!(
            count(self.counters()) - before,
            5 * u64::from(RUNS),
            "{what}"
        );
        println!("{program:<16} {what:<44} {reason:<18} {nanos:>5} ns");
    }

    /// Has the pod ask and answers it, many times.
    fn measure_pairs(&mut self, what: &str, answer: &Frame, reason: Reason) {
        let (asked, answer) = (query_of(answer).build(), answer.build());
        let before = self.capture.counters.of(reason).expect("read");
        let mut times: Vec<_> = (0..PAIRS)
            .map(|_| {
                self.run(INGRESS, &asked, 1).expect("runs");
                self.run(EGRESS, &answer, 1).expect("runs").1
            })
            .collect();
        let counted = self.capture.counters.of(reason).expect("read") - before;
        assert_eq!(counted, PAIRS, "{reason}");
        println!(
            "{EGRESS:<16} {what:<44} {reason:<18} {:>5} ns, alone",
            median(&mut times)
        );
    }
}

const PAIRS: u64 = 20_000;

fn median(times: &mut [u128]) -> u128 {
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
#[ignore = "a measurement"]
fn what_a_packet_costs() {
    let options = Options {
        ring_bytes: 1 << 30,
        ..unshared()
    };
    let Some(mut program) = load(&options) else {
        return;
    };
    let named = |name: &str| {
        let addresses = [Ipv4Addr::new(192, 0, 2, 1); 4];
        Frame::to_pod(Answer::new(name, &addresses).build())
    };
    let answer = named("www.example.com");
    let non_ip = Frame {
        ethertype: Some(0x0806),
        ..answer.clone()
    };
    let tcp = Frame {
        transport: Transport::Tcp {
            seq: 1,
            ack: 0,
            flags: TCP_ACK,
            options: 3,
        },
        payload: vec![0; 1400],
        ..answer.clone()
    };
    let port = |mut frame: Frame, port| {
        frame.src.set_port(port);
        frame
    };
    let mut no_answers = answer.clone();
    no_answers.payload[7] = 0;

    program.attend_for_long();
    // No rule mentions this name, and its query stays pending: only the first counts. So it is
    // measured in pairs below.
    program.filter(1, &["example.com"]);

    // r0 = -1; exit: what a run costs by itself.
    let empty = RawProgram::load(&[0xffff_ffff_0000_00b7, 0x95]).expect("an empty program");
    let bytes = answer.build();
    let nanos = (0..5).map(|_| empty.run(&bytes, RUNS).expect("runs")).min();
    println!("an empty program: {} ns", nanos.unwrap_or_default());
    let mut alone: Vec<_> = (0..PAIRS)
        .map(|_| empty.run(&bytes, 1).expect("runs"))
        .collect();
    println!("an empty program: {} ns, alone", median(&mut alone));

    let tcp_443 = port(tcp, 443);
    let tcp_443_v6 = tcp_443.clone().over_v6();
    let udp_443 = port(answer.clone(), 443);
    let v6 = answer.clone().over_v6();
    for (what, frame, reason) in [
        ("not IP", &non_ip, Reason::NotIp),
        ("TCP data", &tcp_443, Reason::OtherPort),
        ("TCP data, IPv6", &tcp_443_v6, Reason::OtherPort),
        ("other UDP", &udp_443, Reason::OtherPort),
        ("an answer without records", &no_answers, Reason::NoAnswers),
        ("an answer never asked for", &answer, Reason::NotAsked),
        ("an answer never asked for, IPv6", &v6, Reason::NotAsked),
    ] {
        program.measure(EGRESS, what, frame, reason);
    }
    let (tcp_443, udp_443) = (tcp_443.turned(), udp_443.turned());
    let syn = Frame {
        transport: Transport::Tcp {
            seq: 1,
            ack: 0,
            flags: TCP_SYN,
            options: 5,
        },
        payload: vec![],
        ..tcp_443.clone()
    };
    for (what, frame, reason) in [
        ("not IP", &non_ip, Reason::NotIp),
        ("TCP data", &tcp_443, Reason::OtherPort),
        ("TCP SYN, not watched", &syn, Reason::OtherPort),
        ("other UDP, not watched", &udp_443, Reason::OtherPort),
        ("a query", &query_of(&answer), Reason::QueryRecorded),
    ] {
        program.measure(INGRESS, what, frame, reason);
    }
    program.capture.watched.set(1, true);
    // The agent knows of the place from the first packet.
    for frame in [&tcp_443, &syn, &udp_443] {
        program.run(INGRESS, &frame.build(), 1).expect("runs");
    }
    for (what, frame, reason) in [
        ("TCP data, watched", &tcp_443, Reason::OtherPort),
        ("TCP SYN, watched", &syn, Reason::AttemptKnown),
        ("other UDP, watched", &udp_443, Reason::AttemptKnown),
    ] {
        program.measure(INGRESS, what, frame, reason);
    }
    program.capture.watched.set(1, false);
    // An answer counts once: these are timed one by one, with what it takes to time a run.
    let unrelated = named("api.shop.svc.cluster.local");
    program.measure_pairs(
        "an answer without records, asked for",
        &no_answers,
        Reason::NoAnswers,
    );
    program.measure_pairs("an answer for another name", &unrelated, Reason::NoRule);
    program.measure_pairs("a matching answer", &answer, Reason::Captured);
}
