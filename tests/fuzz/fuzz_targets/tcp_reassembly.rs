//! Any segments of a few connections. Beside not panicking, the reassembly must stay within its
//! bounds, and bytes in their order must come out as they went in.
#![no_main]

use std::{net::SocketAddr, time::Duration};

use dnsflow_core::{
    Timestamp,
    limits::{TCP_AHEAD_BYTES_MAX, TCP_BYTES_MAX, TCP_CONNECTIONS_MAX},
    tcp::{ACK, ConnectionKey, SYN, Segment, TcpReassembly},
};
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};

#[derive(Arbitrary, Debug)]
struct Step {
    connection: u8,
    /// From the connection's initial sequence number, so that segments meet.
    place: i16,
    flags: u8,
    payload: Vec<u8>,
    not_captured: u8,
    seconds: u8,
}

#[derive(Arbitrary, Debug)]
struct Case {
    initial: u32,
    steps: Vec<Step>,
    stream: Vec<u8>,
    chunk: u8,
}

fn key(connection: u8) -> ConnectionKey {
    ConnectionKey {
        ifindex: (connection % 2).into(),
        server: SocketAddr::from(([10, 96, 0, 10], 53)),
        client: SocketAddr::from(([10, 244, 0, 5], (connection % 8).into())),
    }
}

fuzz_target!(|case: Case| {
    let mut tcp = TcpReassembly::default();
    let mut now = Timestamp::default();
    let mut fed = 0;
    for step in &case.steps {
        now = now + Duration::from_secs(step.seconds.into());
        let segment = Segment {
            key: key(step.connection),
            sequence: case.initial.wrapping_add_signed(step.place.into()),
            flags: step.flags,
            payload: &step.payload,
            payload_len: step.payload.len() + usize::from(step.not_captured % 2),
        };
        let messages = tcp.feed(&segment, now);
        fed += step.payload.len();
        assert!(messages.iter().all(|message| message.len() >= 12));
        assert!(tcp.len() <= TCP_CONNECTIONS_MAX);
        assert!(tcp.bytes_held() <= TCP_BYTES_MAX.min(fed));
        assert!(tcp.bytes_held() <= tcp.len() * (2 * TCP_AHEAD_BYTES_MAX));
    }
    // Whatever went before, a new connection is read from its beginning.
    let key = key(0);
    let syn = Segment {
        key,
        sequence: case.initial.wrapping_add(1 << 20),
        flags: SYN | ACK,
        payload: &[],
        payload_len: 0,
    };
    tcp.feed(&syn, now);
    let mut found = Vec::new();
    let mut sequence = syn.sequence.wrapping_add(1);
    for payload in case.stream.chunks(usize::from(case.chunk) + 1) {
        let segment = Segment {
            key,
            sequence,
            flags: ACK,
            payload,
            payload_len: payload.len(),
        };
        found.extend(tcp.feed(&segment, now));
        sequence = sequence.wrapping_add(payload.len() as u32);
    }
    assert_eq!(found, split(&case.stream));
    tcp.forget_interface(0);
    tcp.forget_interface(1);
    assert_eq!((tcp.len(), tcp.bytes_held()), (0, 0));
});

/// The messages of a stream, by the plainest means.
fn split(mut stream: &[u8]) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    while let [high, low, rest @ ..] = stream {
        let len = usize::from(u16::from_be_bytes([*high, *low]));
        let Some((message, rest)) = rest.split_at_checked(len) else {
            break;
        };
        if len >= 12 {
            messages.push(message.to_vec());
        }
        stream = rest;
    }
    messages
}
