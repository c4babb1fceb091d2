use std::time::Duration;

use proptest::{collection::vec, prelude::*, sample::Index};

use super::*;
use crate::counter_vec::Label;

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

const INITIAL: u32 = 1000;

/// A segment of the connection that most tests use; `place` counts from the stream's first byte.
fn segment(place: u32, flags: u8, payload: &[u8]) -> Segment<'_> {
    Segment {
        key: connection(1, 40000),
        sequence: (INITIAL + 1).wrapping_add(place),
        flags: flags | ACK,
        payload,
        payload_len: payload.len(),
    }
}

fn syn_ack(key: ConnectionKey, initial: u32) -> Segment<'static> {
    Segment {
        key,
        sequence: initial,
        flags: SYN | ACK,
        payload: &[],
        payload_len: 0,
    }
}

/// A message of this length that says which one it is.
fn message(number: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u8).wrapping_mul(31) ^ number)
        .collect()
}

fn framed(messages: &[Vec<u8>]) -> Vec<u8> {
    let mut stream = Vec::new();
    for message in messages {
        let len = u16::try_from(message.len()).expect("a DNS message");
        stream.extend(len.to_be_bytes());
        stream.extend(message);
    }
    stream
}

/// A connection that has begun.
fn begun() -> TcpReassembly {
    let mut tcp = TcpReassembly::default();
    assert!(
        tcp.feed(&syn_ack(connection(1, 40000), INITIAL), at(1))
            .is_empty()
    );
    tcp
}

/// Everything that was counted, `opened` aside.
fn events(tcp: &TcpReassembly) -> Vec<(&'static str, u64)> {
    tcp.events()
        .iter()
        .filter(|(event, count)| *event != TcpEvent::Opened && *count > 0)
        .map(|(event, count)| (event.as_str(), count))
        .collect()
}

#[test]
fn several_messages_in_one_segment() {
    let messages = [message(1, 40), message(2, 12), message(3, 500)];
    let mut tcp = begun();
    assert_eq!(
        tcp.feed(&segment(0, 0, &framed(&messages)), at(1)),
        messages
    );
    assert_eq!(events(&tcp), [("message", 3)]);
    assert_eq!(tcp.bytes_held(), 0);
}

#[test]
fn one_message_byte_by_byte() {
    let messages = [message(1, 40), message(2, 50)];
    let stream = framed(&messages);
    let mut tcp = begun();
    let mut found = Vec::new();
    for (place, byte) in stream.iter().enumerate() {
        found.extend(tcp.feed(&segment(place as u32, 0, &[*byte]), at(1)));
    }
    assert_eq!(found, messages);
}

#[test]
fn the_longest_message_over_many_segments() {
    let messages = [message(1, 65535)];
    let mut tcp = begun();
    let mut found = Vec::new();
    for (index, chunk) in framed(&messages).chunks(1460).enumerate() {
        found.extend(tcp.feed(&segment(index as u32 * 1460, 0, chunk), at(1)));
    }
    assert_eq!(found, messages);
    assert_eq!(tcp.bytes_held(), 0);
}

#[test]
fn the_longest_message_whose_first_segment_comes_last() {
    let messages = [message(1, 65535)];
    let stream = framed(&messages);
    let mut tcp = begun();
    for (index, chunk) in stream.chunks(536).enumerate().skip(1) {
        let found = tcp.feed(&segment(index as u32 * 536, 0, chunk), at(1));
        assert!(found.is_empty());
    }
    assert_eq!(tcp.feed(&segment(0, 0, &stream[..536]), at(1)), messages);
    assert_eq!(tcp.bytes_held(), 0);
}

#[test]
fn retransmission_and_overlap_count_once() {
    let messages = [message(1, 40), message(2, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    let mut found = tcp.feed(&segment(0, 0, &stream[..30]), at(1));
    found.extend(tcp.feed(&segment(0, 0, &stream[..30]), at(1)));
    found.extend(tcp.feed(&segment(10, 0, &stream[10..50]), at(1)));
    found.extend(tcp.feed(&segment(0, 0, &stream), at(1)));
    assert_eq!(found, messages);
    assert_eq!(events(&tcp), [("message", 2), ("duplicate", 1)]);
}

#[test]
fn a_keep_alive_with_an_octet_of_garbage_is_ignored() {
    let messages = [message(1, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    tcp.feed(&segment(0, 0, &stream[..20]), at(1));
    // RFC 9293, section 3.8.4: from one before the next byte.
    tcp.feed(&segment(19, 0, b"?"), at(1));
    assert_eq!(tcp.feed(&segment(20, 0, &stream[20..]), at(1)), messages);
}

#[test]
fn segments_that_contradict_each_other_end_it() {
    let stream = framed(&[message(1, 40)]);
    for (place, from) in [(10, 0), (10, 20), (30, 0)] {
        let mut tcp = begun();
        tcp.feed(&segment(20, 0, &stream[20..]), at(1));
        let mut other = stream[from..].to_vec();
        other[30 - from] ^= 1;
        let other = &other[usize::try_from(place).expect("small").saturating_sub(from)..];
        let found = tcp.feed(&segment(place.max(from as u32), 0, other), at(1));
        assert!(found.is_empty());
        assert_eq!(tcp.events()[TcpEvent::Conflict], 1, "{place} {from}");
        assert_eq!((tcp.len(), tcp.bytes_held()), (0, 0));
    }
}

#[test]
fn without_its_beginning_nothing_of_a_stream_is_read() {
    let stream = framed(&[message(1, 40)]);
    let mut tcp = TcpReassembly::default();
    assert!(tcp.feed(&segment(0, 0, &stream), at(1)).is_empty());
    // A pure acknowledgment is nothing lost.
    assert!(tcp.feed(&segment(0, 0, &[]), at(1)).is_empty());
    assert_eq!(events(&tcp), [("no_beginning", 1)]);
}

#[test]
fn a_server_that_opens_a_connection_itself_is_ignored() {
    let stream = framed(&[message(1, 40)]);
    let mut tcp = TcpReassembly::default();
    let mut syn = syn_ack(connection(1, 40000), INITIAL);
    syn.flags = SYN;
    tcp.feed(&syn, at(1));
    assert!(tcp.feed(&segment(0, 0, &stream), at(1)).is_empty());
    assert_eq!(events(&tcp), [("no_beginning", 1), ("not_accepted", 1)]);
}

#[test]
fn data_with_the_syn_ack_is_read() {
    // TCP Fast Open (RFC 7413).
    let messages = [message(1, 40)];
    let stream = framed(&messages);
    let mut syn = syn_ack(connection(1, 40000), INITIAL);
    syn.payload = &stream[..20];
    syn.payload_len = 20;
    let mut tcp = TcpReassembly::default();
    assert!(tcp.feed(&syn, at(1)).is_empty());
    // It comes again, without the data.
    tcp.feed(&syn_ack(connection(1, 40000), INITIAL), at(1));
    assert_eq!(tcp.feed(&segment(20, 0, &stream[20..]), at(1)), messages);
}

#[test]
fn sequence_numbers_wrap_around() {
    let messages = [message(1, 100), message(2, 100)];
    let stream = framed(&messages);
    for initial in [u32::MAX - 50, u32::MAX - 1, u32::MAX, 0, 1 << 31] {
        let key = connection(1, 40000);
        let mut tcp = TcpReassembly::default();
        tcp.feed(&syn_ack(key, initial), at(1));
        let mut found = Vec::new();
        let mut starts: Vec<usize> = (0..stream.len()).step_by(9).collect();
        starts.swap(3, 8);
        starts.swap(0, 5);
        for start in starts {
            let payload = &stream[start..(start + 9).min(stream.len())];
            let segment = Segment {
                key,
                sequence: initial.wrapping_add(1 + start as u32),
                flags: ACK,
                payload,
                payload_len: payload.len(),
            };
            found.extend(tcp.feed(&segment, at(1)));
        }
        assert_eq!(found, messages, "{initial}");
    }
}

#[test]
fn a_runt_is_skipped() {
    let messages = [Vec::new(), message(1, 11), message(2, 12)];
    let mut tcp = begun();
    let found = tcp.feed(&segment(0, 0, &framed(&messages)), at(1));
    assert_eq!(found, messages[2..]);
    assert_eq!(events(&tcp), [("message", 1), ("runt", 2)]);
}

#[test]
fn the_end_is_counted_by_what_it_cuts_off() {
    let stream = framed(&[message(1, 40)]);
    let check = |segments: &[Segment<'_>], expected: &[(&str, u64)]| {
        let mut tcp = begun();
        for segment in segments {
            tcp.feed(segment, at(1));
        }
        assert_eq!(events(&tcp), expected);
        assert_eq!((tcp.len(), tcp.bytes_held()), (0, 0));
    };
    check(
        &[segment(0, FIN, &stream)],
        &[("message", 1), ("closed", 1)],
    );
    check(
        &[
            segment(20, FIN, &stream[20..]),
            segment(0, 0, &stream[..20]),
        ],
        &[("message", 1), ("ahead", 1), ("closed", 1)],
    );
    check(&[segment(0, FIN, &stream[..20])], &[("unfinished", 1)]);
    check(&[segment(0, RST, &[])], &[("closed", 1)]);
    check(
        &[segment(0, 0, &stream[..20]), segment(20, RST, &[])],
        &[("unfinished", 1)],
    );
    check(
        &[segment(20, FIN, &stream[20..]), segment(42, 0, b"more")],
        &[("ahead", 1), ("conflict", 1)],
    );
    check(
        &[segment(20, 0, &stream[20..]), segment(30, FIN, &[])],
        &[("ahead", 1), ("conflict", 1)],
    );
}

#[test]
fn a_reset_of_other_sequence_numbers_is_ignored() {
    let messages = [message(1, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    tcp.feed(&segment(0, 0, &stream[..20]), at(1));
    for place in [19, 20 + TCP_AHEAD_BYTES_MAX as u32 + 1, 1 << 31] {
        tcp.feed(&segment(place, RST, &[]), at(1));
    }
    assert_eq!(tcp.feed(&segment(20, 0, &stream[20..]), at(1)), messages);
    assert_eq!(tcp.events()[TcpEvent::OutOfWindow], 3);
}

#[test]
fn a_new_connection_of_the_same_ports_begins_anew() {
    let messages = [message(1, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    tcp.feed(&segment(0, 0, &stream[..20]), at(1));
    tcp.feed(&syn_ack(connection(1, 40000), INITIAL + 5000), at(1));
    assert_eq!(tcp.feed(&segment(5000, 0, &stream), at(1)), messages);
    assert_eq!(events(&tcp), [("message", 1), ("unfinished", 1)]);
}

#[test]
fn a_segment_that_was_not_captured_whole_ends_it() {
    let messages = [message(1, 40), message(2, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    let mut cut = segment(0, 0, &stream[..60]);
    cut.payload_len = stream.len();
    assert_eq!(tcp.feed(&cut, at(1)), messages[..1]);
    assert_eq!(events(&tcp), [("message", 1), ("cut", 1)]);
    assert!(tcp.is_empty());
}

#[test]
fn a_gap_that_is_never_filled_ends_it() {
    let bytes = vec![0; 1460];
    let mut tcp = begun();
    let mut place = 1460;
    while !tcp.is_empty() {
        assert!(tcp.bytes_held() <= TCP_AHEAD_BYTES_MAX);
        assert!(place < 100 * 1460, "it has no end");
        tcp.feed(&segment(place, 0, &bytes), at(1));
        place += 1460;
    }
    assert_eq!(tcp.events()[TcpEvent::Gap], 1);
    assert_eq!(tcp.bytes_held(), 0);
    // And in very small pieces.
    let mut tcp = begun();
    for place in 0..=TCP_AHEAD_PIECES_MAX as u32 {
        assert!(!tcp.is_empty());
        tcp.feed(&segment(1 + 2 * place, 0, b"x"), at(1));
    }
    assert_eq!(tcp.events()[TcpEvent::Gap], 1);
}

#[test]
fn a_segment_far_ahead_does_no_harm() {
    let messages = [message(1, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    tcp.feed(&segment(TCP_AHEAD_BYTES_MAX as u32 + 1, 0, b"x"), at(1));
    tcp.feed(&segment(1 << 30, FIN, b"x"), at(1));
    assert_eq!(tcp.feed(&segment(0, 0, &stream), at(1)), messages);
    assert_eq!(events(&tcp), [("message", 1), ("out_of_window", 2)]);
}

#[test]
fn connections_are_bounded_and_a_pod_only_pushes_out_its_own() {
    let mut tcp = begun();
    for port in 1..=2 * TCP_CONNECTIONS_PER_INTERFACE_MAX as u16 {
        tcp.feed(&syn_ack(connection(2, port), 0), at(2));
    }
    assert_eq!(tcp.len(), 1 + TCP_CONNECTIONS_PER_INTERFACE_MAX);
    let messages = [message(1, 40)];
    let found = tcp.feed(&segment(0, 0, &framed(&messages)), at(2));
    assert_eq!(found, messages);
    for ifindex in 3..100 {
        for port in 1..=TCP_CONNECTIONS_PER_INTERFACE_MAX as u16 {
            tcp.feed(&syn_ack(connection(ifindex, port), 0), at(2));
        }
    }
    assert_eq!(tcp.len(), TCP_CONNECTIONS_MAX);
    let opened = tcp.events()[TcpEvent::Opened];
    let evicted = tcp.events()[TcpEvent::Evicted];
    assert_eq!(opened - evicted, TCP_CONNECTIONS_MAX as u64);
}

#[test]
fn bytes_are_bounded() {
    // Two bytes of length and nearly as many as they say.
    let bytes = [vec![0xff; 2], vec![0; 65534]].concat();
    let mut tcp = TcpReassembly::default();
    for ifindex in 1..=200 {
        let key = connection(ifindex, 40000);
        tcp.feed(&syn_ack(key, INITIAL), at(1));
        let data = Segment {
            key,
            ..segment(0, 0, &bytes)
        };
        tcp.feed(&data, at(1));
        assert!(tcp.bytes_held() <= TCP_BYTES_MAX);
    }
    assert_eq!(tcp.len(), TCP_BYTES_MAX / bytes.len());
    assert_eq!(tcp.events()[TcpEvent::Evicted], 200 - tcp.len() as u64);
    for ifindex in 1..=200 {
        tcp.forget_interface(ifindex);
    }
    assert_eq!((tcp.len(), tcp.bytes_held()), (0, 0));
}

#[test]
fn a_silent_connection_is_forgotten() {
    let stream = framed(&[message(1, 40)]);
    let mut tcp = begun();
    tcp.feed(&segment(0, 0, &stream[..20]), at(5));
    let last = at(5) + TCP_IDLE_MAX;
    tcp.feed(&syn_ack(connection(2, 1), 0), last);
    assert_eq!(tcp.len(), 2);
    tcp.feed(
        &syn_ack(connection(2, 2), 0),
        last + Duration::from_nanos(1),
    );
    assert_eq!((tcp.len(), tcp.bytes_held()), (2, 0));
    assert_eq!(events(&tcp), [("idle", 1)]);
}

proptest! {
    /// However a stream is cut up, mixed up and repeated, the same messages come out.
    #[test]
    fn messages_survive_the_network(
        lengths in vec(prop_oneof![Just(0_usize), 1..60_usize, 60..3000_usize], 1..8),
        cuts in vec(any::<Index>(), 0..30),
        swaps in vec((any::<Index>(), any::<Index>()), 0..20),
        repeats in vec((any::<Index>(), any::<Index>(), any::<Index>()), 0..10),
        initial: u32,
    ) {
        let messages: Vec<Vec<u8>> = lengths
            .iter()
            .enumerate()
            .map(|(number, len)| message(number as u8, *len))
            .collect();
        let stream = framed(&messages);
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len())).collect();
        places.extend([0, stream.len()]);
        places.sort_unstable();
        let mut ranges: Vec<(usize, usize)> =
            places.windows(2).map(|pair| (pair[0], pair[1])).collect();
        for (one, other) in swaps {
            let (one, other) = (one.index(ranges.len()), other.index(ranges.len()));
            ranges.swap(one, other);
        }
        for (place, from, to) in repeats {
            let (from, to) = (from.index(stream.len()), to.index(stream.len()));
            ranges.insert(place.index(ranges.len()), (from.min(to), from.max(to)));
        }
        let key = connection(1, 40000);
        let mut tcp = TcpReassembly::default();
        tcp.feed(&syn_ack(key, initial), at(1));
        let mut found = Vec::new();
        for (from, to) in ranges {
            let segment = Segment {
                key,
                sequence: initial.wrapping_add(1).wrapping_add(from as u32),
                flags: ACK,
                payload: &stream[from..to],
                payload_len: to - from,
            };
            found.extend(tcp.feed(&segment, at(1)));
        }
        let whole: Vec<_> = messages
            .into_iter()
            .filter(|message| message.len() >= DNS_MESSAGE_MIN)
            .collect();
        prop_assert_eq!(found, whole);
        prop_assert_eq!(tcp.bytes_held(), 0);
    }
}
