//! Any segments of a few connections, in both directions. Beside not panicking, the reassembly must stay
//! within its bounds, give out nothing that was not asked, and read a connection from its beginning
//! whatever went before.
#![no_main]

use std::{net::SocketAddr, time::Duration};

use dnsflow_core::{
    Timestamp,
    dns::tcp::{ACK, ConnectionKey, SYN, Segment, Sender, TcpReassembly},
    values::limits::{TCP_AHEAD_BYTES_MAX, TCP_BYTES_MAX, TCP_CONNECTIONS_MAX},
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
    from_pod: bool,
    acknowledged: i16,
    flags: u8,
    payload: Vec<u8>,
    not_captured: u8,
    seconds: u8,
}

#[derive(Arbitrary, Debug)]
struct Case {
    initial: u32,
    steps: Vec<Step>,
    /// A question, as the pod and the server write it.
    question: Vec<u8>,
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
            sender: if step.from_pod {
                Sender::Pod
            } else {
                Sender::Server
            },
            sequence: case.initial.wrapping_add_signed(step.place.into()),
            acknowledgment: case.initial.wrapping_add_signed(step.acknowledged.into()),
            flags: step.flags,
            payload: &step.payload,
            payload_len: step.payload.len() + usize::from(step.not_captured % 2),
            left_out: 0,
        };
        let messages = tcp.feed(&segment, now).answers;
        fed += step.payload.len();
        assert!(messages.iter().all(|message| message.len() >= 12));
        assert!(!step.from_pod || messages.is_empty());
        assert!(tcp.len() <= TCP_CONNECTIONS_MAX);
        assert!(tcp.bytes_held() <= TCP_BYTES_MAX.min(fed));
        assert!(tcp.bytes_held() <= tcp.len() * (4 * TCP_AHEAD_BYTES_MAX));
    }
    // A new connection: the pod asks, and is answered once.
    let mut talk = Talk {
        tcp: &mut tcp,
        now,
        pod: case.initial.wrapping_add(1 << 20),
        server: case.initial,
        chunk: usize::from(case.chunk) + 1,
    };
    talk.say(Sender::Pod, SYN, &[0; 0]);
    talk.pod = talk.pod.wrapping_add(1);
    talk.say(Sender::Server, SYN | ACK, &[0; 0]);
    talk.server = talk.server.wrapping_add(1);
    let question = &case.question[..case.question.len().min(300)];
    let (query, answer) = (message(1, question), message(0x81, question));
    assert!(talk.say(Sender::Server, ACK, &answer).is_empty());
    assert!(talk.say(Sender::Pod, ACK, &query).is_empty());
    let first = talk.say(Sender::Server, ACK, &answer);
    let again = talk.say(Sender::Server, ACK, &answer);
    assert!(first.len() <= 1 && again.is_empty());
    assert!(first.iter().all(|found| found == &answer[2..]));
    tcp.forget_interface(0);
    tcp.forget_interface(1);
    assert_eq!((tcp.len(), tcp.bytes_held()), (0, 0));
});

/// A DNS message behind its length: id 7, these flags, one question.
fn message(flags: u8, question: &[u8]) -> Vec<u8> {
    let header = [0, 7, flags, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let len = (header.len() + question.len()) as u16;
    [&len.to_be_bytes(), &header[..], question].concat()
}

/// Both ends of the connection [`key`] of zero.
struct Talk<'a> {
    tcp: &'a mut TcpReassembly,
    now: Timestamp,
    pod: u32,
    server: u32,
    chunk: usize,
}

impl Talk<'_> {
    /// One end sends this in pieces; gives the answers.
    fn say(&mut self, sender: Sender, flags: u8, payload: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let pieces: Vec<&[u8]> = match payload.is_empty() {
            true => vec![payload],
            false => payload.chunks(self.chunk).collect(),
        };
        for payload in pieces {
            let (sequence, acknowledgment) = match sender {
                Sender::Pod => (self.pod, self.server),
                Sender::Server => (self.server, self.pod),
            };
            let segment = Segment {
                key: key(0),
                sender,
                sequence,
                acknowledgment,
                flags,
                payload,
                payload_len: payload.len(),
                left_out: 0,
            };
            found.extend(self.tcp.feed(&segment, self.now).answers);
            let own = match sender {
                Sender::Pod => &mut self.pod,
                Sender::Server => &mut self.server,
            };
            *own = own.wrapping_add(payload.len() as u32);
        }
        found
    }
}
