use std::time::Duration;

use super::*;
use crate::{tools::counter_vec::Label as _, values::limits::TCP_QUESTIONS_MAX};

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_nanos(seconds * 1_000_000_000)
}

fn connection(ifindex: u32, port: u16) -> ConnectionKey {
    ConnectionKey {
        ifindex,
        server: "10.96.0.10:53".parse().expect("an address"),
        client: SocketAddr::new("10.244.0.5".parse().expect("an address"), port),
    }
}

/// The sequence numbers of both SYNs.
const POD: u32 = u32::MAX - 20;
const SERVER: u32 = 1000;

/// A DNS message with a question of type A for a name of one label, behind its length.
fn message(id: u16, flags: u8, label: &str) -> Vec<u8> {
    let mut bytes = vec![0, 0];
    bytes.extend(id.to_be_bytes());
    bytes.extend([flags, 0, 0, 1, 0, 0, 0, 0, 0, 0, label.len() as u8]);
    bytes.extend(label.as_bytes());
    bytes.extend([0, 0, 1, 0, 1]);
    let len = bytes.len() as u16 - 2;
    bytes[..2].copy_from_slice(&len.to_be_bytes());
    bytes
}

fn query(id: u16, label: &str) -> Vec<u8> {
    message(id, 1, label)
}

fn answer(id: u16, label: &str) -> Vec<u8> {
    message(id, 0x81, label)
}

/// A connection between a pod and a server, of which the reassembly sees the segments that the test
/// lets pass.
struct Talk {
    tcp: TcpReassembly,
    key: ConnectionKey,
    /// How much each end has sent behind its SYN.
    pod: u32,
    server: u32,
}

impl Talk {
    fn new() -> Self {
        Self {
            tcp: TcpReassembly::default(),
            key: connection(1, 40000),
            pod: 0,
            server: 0,
        }
    }

    fn begun() -> Self {
        let mut talk = Self::new();
        talk.syn();
        talk.syn_ack(POD.wrapping_add(1));
        talk
    }

    fn of_pod<'a>(&self, flags: u8, payload: &'a [u8]) -> Segment<'a> {
        Segment {
            key: self.key,
            sender: Sender::Pod,
            sequence: POD.wrapping_add(1 + self.pod),
            acknowledgment: SERVER + 1 + self.server,
            flags: flags | ACK,
            payload,
            payload_len: payload.len(),
            left_out: 0,
        }
    }

    fn of_server<'a>(&self, flags: u8, payload: &'a [u8]) -> Segment<'a> {
        Segment {
            key: self.key,
            sender: Sender::Server,
            sequence: SERVER + 1 + self.server,
            acknowledgment: POD.wrapping_add(1 + self.pod),
            flags: flags | ACK,
            payload,
            payload_len: payload.len(),
            left_out: 0,
        }
    }

    fn feed(&mut self, segment: &Segment<'_>) -> Vec<Vec<u8>> {
        self.tcp.feed(segment, at(1)).answers
    }

    fn syn(&mut self) {
        let syn = Segment {
            sequence: POD,
            flags: SYN,
            ..self.of_pod(0, &[])
        };
        assert!(self.feed(&syn).is_empty());
    }

    fn syn_ack(&mut self, acknowledgment: u32) {
        let syn_ack = Segment {
            sequence: SERVER,
            acknowledgment,
            ..self.of_server(SYN, &[])
        };
        assert!(self.feed(&syn_ack).is_empty());
    }

    fn ask(&mut self, bytes: &[u8]) {
        let segment = self.of_pod(0, bytes);
        assert!(self.feed(&segment).is_empty());
        self.pod += bytes.len() as u32;
    }

    fn answer(&mut self, bytes: &[u8]) -> usize {
        let segment = self.of_server(0, bytes);
        let answers = self.feed(&segment);
        self.server += bytes.len() as u32;
        answers.len()
    }

    /// Everything that was counted, `opened` and `question` aside.
    fn events(&self) -> Vec<(&'static str, u64)> {
        let usual = [TcpEvent::Opened, TcpEvent::Question];
        let events = self.tcp.events().iter();
        events
            .filter(|(event, count)| !usual.contains(event) && *count > 0)
            .map(|(event, count)| (event.as_str(), count))
            .collect()
    }
}

#[test]
fn an_answer_to_a_question_on_the_connection_counts_once() {
    let mut talk = Talk::begun();
    talk.ask(&query(7, "a"));
    let bytes = answer(7, "A");
    let segment = talk.of_server(0, &bytes);
    assert_eq!(talk.feed(&segment), [&bytes[2..]]);
    talk.server += bytes.len() as u32;
    assert_eq!(talk.answer(&bytes), 0, "again");
    assert_eq!(talk.events(), [("message", 1), ("not_asked", 1)]);
    assert_eq!(talk.tcp.events()[TcpEvent::Opened], 1);
}

#[test]
fn two_forged_segments_are_no_connection() {
    let mut talk = Talk::new();
    talk.syn_ack(POD.wrapping_add(1));
    assert_eq!(talk.answer(&answer(7, "a")), 0);
    assert_eq!(talk.events(), [("no_beginning", 2)]);
    assert!(talk.tcp.is_empty());
}

#[test]
fn a_syn_ack_to_another_syn_begins_nothing() {
    for distance in [0, 2, 1 << 31] {
        let mut talk = Talk::new();
        talk.syn();
        talk.syn_ack(POD.wrapping_add(distance));
        talk.ask(&query(7, "a"));
        assert_eq!(talk.answer(&answer(7, "a")), 0, "{distance}");
        assert_eq!(talk.events(), [("not_sent", 1), ("no_beginning", 1)]);
    }
}

#[test]
fn an_answer_to_what_was_not_asked_does_not_count() {
    let mut talk = Talk::begun();
    talk.ask(&query(7, "a"));
    for other in [
        answer(8, "a"),
        answer(7, "b"),
        query(7, "a"),
        message(7, 0xa9, "a"),
    ] {
        assert_eq!(talk.answer(&other), 0);
    }
    assert_eq!(talk.answer(&answer(7, "a")), 1);
    // Another pod's question.
    let mut other = Talk::begun();
    other.key = connection(2, 40000);
    other.syn();
    other.syn_ack(POD.wrapping_add(1));
    other.ask(&query(7, "a"));
    other.key = connection(1, 40000);
    assert_eq!(other.answer(&answer(7, "a")), 0);
}

#[test]
fn a_question_counts_when_the_server_has_acknowledged_it() {
    let bytes = query(7, "a");
    for (acknowledged, answers) in [(0, 0), (bytes.len() as u32 - 1, 0), (bytes.len() as u32, 1)] {
        let mut talk = Talk::begun();
        talk.ask(&bytes);
        talk.pod = acknowledged;
        assert_eq!(talk.answer(&answer(7, "a")), answers, "{acknowledged}");
    }
    // What the pod has not sent, nobody can acknowledge.
    let mut talk = Talk::begun();
    talk.ask(&bytes);
    talk.pod += 1;
    assert_eq!(talk.answer(&answer(7, "a")), 0);
    assert_eq!(talk.events(), [("not_sent", 1)]);
}

#[test]
fn questions_one_behind_the_other_are_answered_in_any_order() {
    // RFC 7766, section 6.2.1.1.
    let mut talk = Talk::begun();
    let stream = [query(1, "a"), query(2, "b"), query(3, "c")].concat();
    for piece in stream.chunks(7) {
        talk.ask(piece);
    }
    let answers = [answer(3, "c"), answer(1, "a"), answer(2, "b")].concat();
    assert_eq!(talk.answer(&answers), 3);
}

#[test]
fn a_question_that_came_out_of_order_is_put_together() {
    let mut talk = Talk::begun();
    let bytes = query(1, "name");
    let (one, two) = bytes.split_at(9);
    talk.pod = one.len() as u32;
    talk.ask(two);
    talk.pod = 0;
    talk.ask(one);
    talk.ask(two);
    assert_eq!(talk.answer(&answer(1, "name")), 1);
}

#[test]
fn a_pod_that_says_no_more_is_still_answered() {
    let mut talk = Talk::begun();
    let bytes = query(1, "a");
    let last = talk.of_pod(FIN, &bytes);
    talk.feed(&last);
    // The server acknowledges the FIN as well.
    talk.pod = bytes.len() as u32 + 1;
    assert_eq!(talk.answer(&answer(1, "a")), 1);
}

#[test]
fn a_pod_that_resets_ends_the_connection() {
    let mut talk = Talk::begun();
    talk.ask(&query(1, "a"));
    let reset = talk.of_pod(RST, &[]);
    talk.feed(&reset);
    assert!(talk.tcp.is_empty());
    assert_eq!(talk.answer(&answer(1, "a")), 0);
    assert_eq!(talk.events(), [("no_beginning", 1), ("closed", 1)]);
}

#[test]
fn a_connection_that_is_refused_is_over() {
    let mut talk = Talk::new();
    talk.syn();
    let mut reset = talk.of_server(RST, &[]);
    reset.sequence = 0;
    talk.feed(&reset);
    assert!(talk.tcp.is_empty());
    assert_eq!(talk.events(), [("closed", 1)]);
}

#[test]
fn syns_that_come_again_change_nothing() {
    let mut talk = Talk::begun();
    talk.syn();
    talk.syn_ack(POD.wrapping_add(1));
    talk.ask(&query(1, "a"));
    talk.syn_ack(POD.wrapping_add(1));
    assert_eq!(talk.answer(&answer(1, "a")), 1);
    assert_eq!(talk.tcp.events()[TcpEvent::Opened], 1);
    assert_eq!(talk.events(), [("message", 1)]);
}

/// Bytes that look like an answer to a question of the pod if one begins to read behind the first
/// `skipped`.
fn crafted(skipped: usize, id: u16, label: &str) -> Vec<u8> {
    [vec![0x2a; skipped], answer(id, label)].concat()
}

impl Talk {
    /// A segment of the server that begins so far from the first byte behind its SYN.
    fn at<'a>(&self, distance: i32, payload: &'a [u8]) -> Segment<'a> {
        Segment {
            sequence: (SERVER + 1).wrapping_add_signed(distance),
            ..self.of_server(0, payload)
        }
    }

    /// Nothing of the connection is read any more, up to a new SYN and SYN-ACK.
    fn assert_over(&mut self, case: &str) {
        assert!(self.tcp.is_empty(), "{case}");
        self.ask(&query(90, "z"));
        assert_eq!(self.answer(&answer(90, "z")), 0, "{case}");
        (self.pod, self.server) = (0, 0);
        self.syn();
        self.syn_ack(POD.wrapping_add(1));
        self.ask(&query(91, "z"));
        assert_eq!(self.answer(&answer(91, "z")), 1, "{case}: a new connection");
    }
}

#[test]
fn a_server_with_another_sequence_number_than_its_syn_acks_is_not_read() {
    // SYN cookies: the pod has acknowledged another number, and the server has believed it.
    for before in [1, 2, 3, 1000, 1_000_000] {
        let mut talk = Talk::begun();
        talk.ask(&query(7, "a"));
        let bytes = crafted(before, 7, "a");
        let segment = talk.at(-(before as i32), &bytes);
        assert!(talk.feed(&segment).is_empty(), "{before}");
        assert_eq!(talk.events(), [("conflict", 1)], "{before}");
        talk.assert_over("before");
    }
    // The number of a later SYN-ACK, and from there on the pod's next connection.
    for (before, flags) in [(9, 0), (9, FIN), (100_000, 0)] {
        let mut talk = Talk::begun();
        talk.ask(&query(7, "a"));
        let bytes = answer(7, "a");
        let (head, tail) = bytes.split_at(9);
        let behind = Segment {
            flags: flags | ACK,
            ..talk.at(before, tail)
        };
        assert!(talk.feed(&behind).is_empty());
        let first = talk.at(0, head);
        assert!(talk.feed(&first).is_empty(), "{before}");
        assert_eq!(talk.events(), [("no_beginning", 1), ("gap", 1)], "{before}");
        talk.assert_over("behind");
    }
}

#[test]
fn a_second_syn_ack_ends_the_connection() {
    // Its sequence number, and what it acknowledges behind the pod's SYN.
    for (case, sequence, acknowledged, event) in [
        ("another one", SERVER + 7, 1, "conflict"),
        ("of one before", SERVER - 7, 1, "conflict"),
        ("the same one, as with SYN cookies", SERVER, 1, "conflict"),
        ("to another SYN", SERVER + 7, 0, "not_sent"),
        ("to a SYN far away", SERVER, 1 << 31, "not_sent"),
    ] {
        let mut talk = Talk::begun();
        talk.ask(&query(1, "a"));
        assert_eq!(talk.answer(&answer(1, "a")), 1);
        talk.ask(&query(2, "b"));
        let syn_ack = Segment {
            sequence,
            acknowledgment: POD.wrapping_add(acknowledged),
            ..talk.of_server(SYN, &[])
        };
        talk.feed(&syn_ack);
        let known = talk.server as usize;
        let bytes = crafted(known, 2, "b");
        let segment = talk.at(0, &bytes);
        assert!(talk.feed(&segment).is_empty(), "{case}");
        let expected = match event {
            "conflict" => [("message", 1), ("no_beginning", 1), ("conflict", 1)],
            _ => [("message", 1), ("not_sent", 1), ("no_beginning", 1)],
        };
        assert_eq!(talk.events(), expected, "{case}");
        talk.assert_over(case);
    }
    // Before data, the pod may have taken either.
    for (acknowledged, distance) in [(0, 0), (0, 5000), (1, 0), (1, 5000)] {
        let mut talk = Talk::begun();
        let other = Segment {
            sequence: SERVER + 5000,
            acknowledgment: POD.wrapping_add(acknowledged),
            ..talk.of_server(SYN, &[])
        };
        talk.feed(&other);
        talk.ask(&query(1, "a"));
        let bytes = answer(1, "a");
        let segment = talk.at(distance, &bytes);
        assert!(talk.feed(&segment).is_empty(), "{acknowledged} {distance}");
        talk.assert_over("before data");
    }
}

#[test]
fn a_syn_ends_a_connection_that_is_in_use() {
    for is_answered in [false, true] {
        for distance in [0, 9, 9000] {
            let case = format!("{is_answered} {distance}");
            let mut talk = Talk::begun();
            talk.ask(&query(1, "a"));
            if is_answered {
                assert_eq!(talk.answer(&answer(1, "a")), 1);
            }
            talk.ask(&query(2, "b"));
            let syn = Segment {
                sequence: POD.wrapping_add(distance),
                flags: SYN,
                ..talk.of_pod(0, &[])
            };
            talk.feed(&syn);
            let bytes = crafted(talk.server as usize, 2, "b");
            let segment = talk.at(0, &bytes);
            assert!(talk.feed(&segment).is_empty(), "{case}");
            assert_eq!(talk.tcp.events()[TcpEvent::Closed], 1, "{case}");
            // The server has taken the SYN.
            (talk.pod, talk.server) = (distance, 5000);
            let syn_ack = Segment {
                sequence: SERVER + 5000,
                ..talk.of_server(SYN, &[])
            };
            talk.feed(&syn_ack);
            talk.ask(&query(3, "c"));
            assert_eq!(talk.answer(&answer(2, "b")), 0, "{case}: asked before");
            assert_eq!(talk.answer(&answer(3, "c")), 1, "{case}");
        }
    }
}

#[test]
fn a_reset_ends_the_connection_whatever_its_numbers() {
    for sender in [Sender::Pod, Sender::Server] {
        for distance in [-1_000_000, -1, 0, 1, 1_000_000, i32::MIN] {
            for flags in [RST, RST | ACK, RST | ACK | SYN, RST | FIN] {
                let case = format!("{sender:?} {distance} {flags}");
                let mut talk = Talk::begun();
                talk.ask(&query(1, "a"));
                let usual = match sender {
                    Sender::Pod => talk.of_pod(0, &[]),
                    Sender::Server => talk.of_server(0, &[]),
                };
                let reset = Segment {
                    sequence: usual.sequence.wrapping_add_signed(distance),
                    acknowledgment: usual.acknowledgment.wrapping_add_signed(distance),
                    flags,
                    ..usual
                };
                talk.feed(&reset);
                assert_eq!(talk.answer(&answer(1, "a")), 0, "{case}");
                assert_eq!(
                    talk.events(),
                    [("no_beginning", 1), ("closed", 1)],
                    "{case}"
                );
                talk.assert_over(&case);
            }
        }
    }
}

#[test]
fn a_server_that_acknowledges_what_was_not_sent_is_not_read() {
    for distance in [-1, 1, 1_000_000, i32::MIN] {
        let mut talk = Talk::begun();
        let bytes = answer(1, "a");
        let other = Segment {
            acknowledgment: POD.wrapping_add(1).wrapping_add_signed(distance),
            ..talk.of_server(0, &bytes)
        };
        talk.feed(&other);
        talk.ask(&query(1, "a"));
        assert_eq!(talk.answer(&bytes), 0, "{distance}");
        assert_eq!(talk.events(), [("not_sent", 1), ("no_beginning", 2)]);
        talk.assert_over("not sent");
    }
}

#[test]
fn a_keep_alive_before_data_ends_the_connection_only_with_an_octet() {
    for (garbage, answers) in [(&b""[..], 1), (&b"?"[..], 0)] {
        let mut talk = Talk::begun();
        talk.ask(&query(1, "a"));
        let probe = talk.at(-1, garbage);
        talk.feed(&probe);
        assert_eq!(talk.answer(&answer(1, "a")), answers, "{garbage:?}");
    }
    let mut talk = Talk::begun();
    talk.ask(&query(1, "a"));
    assert_eq!(talk.answer(&answer(1, "a")), 1);
    for garbage in [&b""[..], &b"?"[..]] {
        let probe = talk.at(talk.server as i32 - 1, garbage);
        talk.feed(&probe);
    }
    talk.ask(&query(2, "b"));
    assert_eq!(talk.answer(&answer(2, "b")), 1);
    assert_eq!(talk.events(), [("message", 2), ("duplicate", 1)]);
}

#[test]
fn what_the_server_sends_again_is_ignored() {
    let mut talk = Talk::begun();
    talk.ask(&query(1, "a"));
    let bytes = [answer(1, "a"), answer(2, "b")].concat();
    let (head, _) = bytes.split_at(bytes.len() - 9);
    assert_eq!(talk.answer(head), 1);
    talk.ask(&query(2, "b"));
    for range in [0..head.len(), 0..9, 9..head.len()] {
        let again = talk.at(range.start as i32, &bytes[range]);
        assert!(talk.feed(&again).is_empty());
    }
    let all = talk.at(0, &bytes);
    assert_eq!(talk.feed(&all).len(), 1);
    assert_eq!(talk.events(), [("message", 2), ("duplicate", 3)]);
}

#[test]
fn data_with_the_syns_is_read() {
    // TCP Fast Open (RFC 7413).
    let (asked, answered) = (query(1, "a"), answer(1, "a"));
    for taken in [true, false] {
        let mut talk = Talk::new();
        let syn = Segment {
            sequence: POD,
            flags: SYN,
            ..talk.of_pod(0, &asked)
        };
        talk.feed(&syn);
        let (head, tail) = answered.split_at(9);
        if taken {
            talk.pod = asked.len() as u32;
        } else {
            talk.syn_ack(POD.wrapping_add(1));
            talk.ask(&asked);
        }
        let syn_ack = Segment {
            sequence: SERVER,
            ..talk.of_server(SYN, head)
        };
        talk.feed(&syn_ack);
        talk.server = head.len() as u32;
        assert_eq!(talk.answer(tail), 1, "{taken}");
    }
}

#[test]
fn without_its_beginning_nothing_of_a_stream_is_read() {
    let mut talk = Talk::new();
    talk.ask(&query(1, "a"));
    assert_eq!(talk.answer(&answer(1, "a")), 0);
    // A pure acknowledgment is nothing lost.
    talk.answer(&[]);
    assert_eq!(talk.events(), [("no_beginning", 2)]);
}

#[test]
fn a_server_that_opens_a_connection_itself_is_ignored() {
    let mut talk = Talk::new();
    let mut syn = talk.of_server(SYN, &[]);
    (syn.sequence, syn.flags) = (SERVER, SYN);
    talk.feed(&syn);
    let mut syn_ack = talk.of_pod(SYN, &[]);
    syn_ack.sequence = POD;
    talk.feed(&syn_ack);
    talk.ask(&query(1, "a"));
    assert_eq!(talk.answer(&answer(1, "a")), 0);
    assert_eq!(talk.events(), [("no_beginning", 2), ("not_accepted", 2)]);
}

#[test]
fn a_new_connection_of_the_same_ports_begins_anew() {
    let mut talk = Talk::begun();
    talk.ask(&query(1, "a"));
    talk.answer(&answer(1, "a")[..9]);
    let syn = Segment {
        sequence: POD.wrapping_add(9000),
        flags: SYN,
        ..talk.of_pod(0, &[])
    };
    talk.feed(&syn);
    assert_eq!(talk.answer(&answer(1, "a")[9..]), 0);
    assert_eq!(talk.events(), [("not_sent", 1), ("unfinished", 1)]);
}

#[test]
fn questions_are_bounded() {
    let mut talk = Talk::begun();
    for id in 0..=TCP_QUESTIONS_MAX as u16 {
        talk.ask(&query(id, "a"));
    }
    assert_eq!(talk.answer(&answer(0, "a")), 0, "forgotten");
    assert_eq!(talk.answer(&answer(1, "a")), 1);
    assert_eq!(talk.answer(&answer(TCP_QUESTIONS_MAX as u16, "a")), 1);
    assert_eq!(talk.tcp.events()[TcpEvent::QuestionForgotten], 1);
}

/// A pod opens this connection.
fn syn(key: ConnectionKey) -> Segment<'static> {
    Segment {
        key,
        sequence: POD,
        flags: SYN,
        ..Talk::new().of_pod(0, &[])
    }
}

#[test]
fn connections_are_bounded_and_a_pod_only_pushes_out_its_own() {
    let mut talk = Talk::begun();
    for port in 1..=2 * TCP_CONNECTIONS_PER_INTERFACE_MAX as u16 {
        talk.feed(&syn(connection(2, port)));
    }
    assert_eq!(talk.tcp.len(), 1 + TCP_CONNECTIONS_PER_INTERFACE_MAX);
    for ifindex in 3..100 {
        for port in 1..=TCP_CONNECTIONS_PER_INTERFACE_MAX as u16 {
            talk.feed(&syn(connection(ifindex, port)));
        }
    }
    assert_eq!(talk.tcp.len(), TCP_CONNECTIONS_MAX);
    // Those of an interface that has one only stay, however many others have.
    talk.ask(&query(1, "a"));
    assert_eq!(talk.answer(&answer(1, "a")), 1);
}

#[test]
fn bytes_are_bounded_and_a_pod_only_pushes_out_its_own() {
    // Two bytes of length and nearly as many as they say.
    let bytes = [vec![0xff; 2], vec![0; 65534]].concat();
    let mut talk = Talk::begun();
    let asked = query(1, "a");
    talk.ask(&asked[..9]);
    let own = TCP_BYTES_PER_INTERFACE_MAX / bytes.len();
    for ifindex in 2..=200 {
        let before = talk.tcp.events()[TcpEvent::Evicted];
        for port in 1..=own as u16 + 1 {
            let key = connection(ifindex, port);
            talk.feed(&syn(key));
            let data = Segment {
                key,
                sequence: POD.wrapping_add(1),
                ..Talk::new().of_pod(0, &bytes)
            };
            talk.feed(&data);
            assert!(talk.tcp.bytes_held() <= TCP_BYTES_MAX);
        }
        assert!(talk.tcp.events()[TcpEvent::Evicted] > before);
    }
    talk.ask(&asked[9..]);
    assert_eq!(talk.answer(&answer(1, "a")), 1);
    for ifindex in 1..=200 {
        talk.tcp.forget_interface(ifindex);
    }
    assert_eq!((talk.tcp.len(), talk.tcp.bytes_held()), (0, 0));
}

#[test]
fn a_silent_connection_is_forgotten() {
    let mut talk = Talk::begun();
    talk.ask(&query(1, "a"));
    let part = &answer(1, "a")[..9];
    let segment = talk.of_server(0, part);
    talk.tcp.feed(&segment, at(5));
    let last = at(5) + TCP_IDLE_MAX;
    talk.tcp.feed(&syn(connection(2, 1)), last);
    assert_eq!(talk.tcp.len(), 2);
    let later = last + Duration::from_nanos(1);
    talk.tcp.feed(&syn(connection(2, 2)), later);
    assert_eq!((talk.tcp.len(), talk.tcp.bytes_held()), (2, 0));
    assert_eq!(talk.events(), [("idle", 1)]);
}

#[test]
fn only_news_of_the_server_keep_a_connection() {
    let mut talk = Talk::begun();
    let bytes = [answer(0, "a"), answer(1, "a")].concat();
    let (one, two) = bytes.split_at(bytes.len() / 2);
    let last = at(1) + TCP_IDLE_MAX;
    talk.ask(&query(0, "a"));
    let answered = talk.at(0, one);
    assert_eq!(talk.tcp.feed(&answered, last).answers.len(), 1);
    // The pod goes on, and the server repeats itself.
    talk.server = one.len() as u32;
    let limit = last + TCP_IDLE_MAX;
    let half = last + TCP_IDLE_MAX / 2;
    for now in [half, limit] {
        let asked = query(1, "a");
        let segment = talk.of_pod(0, &asked);
        talk.tcp.feed(&segment, now);
        talk.pod += asked.len() as u32;
        let again = talk.at(0, one);
        talk.tcp.feed(&again, now);
        assert_eq!(talk.tcp.len(), 1);
    }
    let late = talk.of_server(0, two);
    let Fed { answers, .. } = talk.tcp.feed(&late, limit + Duration::from_nanos(1));
    assert!(answers.is_empty());
    assert_eq!(talk.tcp.events()[TcpEvent::Idle], 1);
    talk.assert_over("idle");
}

#[test]
fn a_connection_is_forgotten_before_its_numbers_come_again() {
    // Linux: a clock of 64 ns in 32 bits (`seq_scale` in net/core/secure_seq.c).
    let period = Duration::from_nanos(64 << 32);
    assert_eq!(period.as_secs(), 274);
    assert!(TCP_IDLE_MAX < period);
    // Linux: orphans go after more than 100 s (`tcp_orphan_retries` in net/ipv4/tcp_timer.c).
    assert!(TCP_IDLE_MAX < Duration::from_secs(100));
}

/// One that was left out may be the reset after which the server begins anew, or the server's first bytes.
#[test]
fn a_connection_is_given_up_if_packets_were_left_out() {
    let whole = answer(7, "a");
    for begins in [true, false] {
        let mut talk = Talk::begun();
        talk.ask(&query(7, "a"));
        let bytes = talk.of_server(0, &whole);
        let left_out = Segment {
            left_out: 1,
            ..bytes
        };
        assert!(talk.tcp.feed(&left_out, at(1)).answers.is_empty());
        assert_eq!(talk.events(), [("left_out", 1)]);
        assert!(talk.tcp.is_empty());
        let again = Segment {
            left_out: 1,
            ..talk.of_server(0, &whole)
        };
        assert!(
            talk.tcp.feed(&again, at(1)).answers.is_empty(),
            "it stays unread"
        );
        // A new connection counts from there.
        let syn = Segment {
            sequence: POD,
            flags: SYN,
            left_out: u32::from(begins),
            ..talk.of_pod(0, &[])
        };
        talk.tcp.feed(&syn, at(1));
        let syn_ack = Segment {
            sequence: SERVER,
            acknowledgment: POD.wrapping_add(1),
            left_out: 1,
            ..talk.of_server(SYN, &[])
        };
        talk.tcp.feed(&syn_ack, at(1));
        assert_eq!(talk.tcp.is_empty(), !begins);
    }
}
