use std::net::SocketAddr;

use proptest::{collection::vec, prelude::*, sample::Index};

use super::*;
use crate::{
    dns::tcp::{ACK, ConnectionKey, Sender},
    tools::counter_vec::Label as _,
};

const INITIAL: u32 = 1000;

/// A segment of the stream; `place` counts from its first byte.
fn segment(place: u32, flags: u8, payload: &[u8]) -> Segment<'_> {
    let address = SocketAddr::from(([10, 96, 0, 10], 53));
    Segment {
        key: ConnectionKey {
            ifindex: 1,
            server: address,
            client: address,
        },
        sender: Sender::Server,
        sequence: (INITIAL + 1).wrapping_add(place),
        acknowledgment: 0,
        flags: flags | ACK,
        payload,
        payload_len: payload.len(),
        left_out: 0,
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

/// A connection of one direction.
#[derive(Default)]
struct OneWay {
    stream: Option<Stream>,
    events: CounterVec<TcpEvent>,
}

fn begun() -> OneWay {
    let mut tcp = OneWay::default();
    tcp.begin(INITIAL);
    tcp
}

impl OneWay {
    fn begin(&mut self, initial: u32) {
        self.stream = Some(Stream::new(initial));
    }

    /// Takes a segment; gives the messages that are complete.
    fn feed(&mut self, segment: &Segment<'_>) -> Vec<Vec<u8>> {
        let Some(stream) = &mut self.stream else {
            return Vec::new();
        };
        let mut messages = Messages {
            complete: Vec::new(),
            events: &mut self.events,
        };
        let taken = stream.take(segment, &mut messages);
        let complete = messages.complete;
        for message in &complete {
            self.events.count(TcpEvent::Message);
            assert!(message.end <= stream.reached());
        }
        let over = match taken {
            Ok(State::Open) => None,
            Ok(State::Ended | State::Reset) => Some(stream.end_event()),
            Err(event) => Some(event),
        };
        if let Some(event) = over {
            self.events.count(event);
            self.stream = None;
        }
        complete.into_iter().map(|message| message.bytes).collect()
    }

    fn is_empty(&self) -> bool {
        self.stream.is_none()
    }

    fn len(&self) -> usize {
        self.stream.iter().count()
    }

    fn bytes_held(&self) -> usize {
        self.stream.as_ref().map_or(0, Stream::held)
    }
}

/// Everything that was counted.
fn events(tcp: &OneWay) -> Vec<(&'static str, u64)> {
    tcp.events
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(event, count)| (event.as_str(), count))
        .collect()
}

#[test]
fn a_message_ends_where_its_last_byte_was() {
    let stream = framed(&[message(1, 40), message(2, 12)]);
    for cut in [0, 1, 2, 30, 42, 43, 44, 50, stream.len()] {
        let mut one_way = Stream::new(INITIAL);
        let mut events = CounterVec::default();
        let mut messages = Messages {
            complete: Vec::new(),
            events: &mut events,
        };
        for (from, to) in [(0, cut), (cut, stream.len())] {
            let taken = one_way.take(&segment(from as u32, 0, &stream[from..to]), &mut messages);
            assert_eq!(taken, Ok(State::Open));
        }
        let ends = messages.complete.iter().map(|message| message.end);
        let first = one_way.first();
        assert_eq!(ends.collect::<Vec<_>>(), [first + 42, first + 56], "{cut}");
        assert_eq!(one_way.reached(), first + 56);
    }
}

#[test]
fn what_was_reached_counts_data_ahead_and_the_fin() {
    let mut tcp = begun();
    tcp.feed(&segment(0, 0, &[0]));
    let reached = |tcp: &OneWay| {
        let stream = tcp.stream.as_ref().expect("still there");
        stream.reached() - stream.first()
    };
    assert_eq!(reached(&tcp), 1);
    tcp.feed(&segment(5, 0, &[0; 5]));
    assert_eq!(reached(&tcp), 10);
    tcp.feed(&segment(10, FIN, &[]));
    assert_eq!(reached(&tcp), 11);
}

#[test]
fn several_messages_in_one_segment() {
    let messages = [message(1, 40), message(2, 12), message(3, 500)];
    let mut tcp = begun();
    assert_eq!(tcp.feed(&segment(0, 0, &framed(&messages))), messages);
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
        found.extend(tcp.feed(&segment(place as u32, 0, &[*byte])));
    }
    assert_eq!(found, messages);
}

#[test]
fn the_longest_message_over_many_segments() {
    let messages = [message(1, 65535)];
    let mut tcp = begun();
    let mut found = Vec::new();
    for (index, chunk) in framed(&messages).chunks(1460).enumerate() {
        found.extend(tcp.feed(&segment(index as u32 * 1460, 0, chunk)));
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
        let found = tcp.feed(&segment(index as u32 * 536, 0, chunk));
        assert!(found.is_empty());
    }
    assert_eq!(tcp.feed(&segment(0, 0, &stream[..536])), messages);
    assert_eq!(tcp.bytes_held(), 0);
}

#[test]
fn retransmission_and_overlap_count_once() {
    let messages = [message(1, 40), message(2, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    let mut found = tcp.feed(&segment(0, 0, &stream[..30]));
    found.extend(tcp.feed(&segment(0, 0, &stream[..30])));
    found.extend(tcp.feed(&segment(10, 0, &stream[10..50])));
    found.extend(tcp.feed(&segment(0, 0, &stream)));
    assert_eq!(found, messages);
    assert_eq!(events(&tcp), [("message", 2), ("duplicate", 1)]);
}

#[test]
fn a_keep_alive_with_an_octet_of_garbage_is_ignored() {
    let messages = [message(1, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    tcp.feed(&segment(0, 0, &stream[..20]));
    // RFC 9293, section 3.8.4: from one before the next byte.
    tcp.feed(&segment(19, 0, b"?"));
    assert_eq!(tcp.feed(&segment(20, 0, &stream[20..])), messages);
}

#[test]
fn segments_that_contradict_each_other_end_it() {
    let stream = framed(&[message(1, 40)]);
    for (place, from) in [(10, 0), (10, 20), (30, 0)] {
        let mut tcp = begun();
        tcp.feed(&segment(20, 0, &stream[20..]));
        let mut other = stream[from..].to_vec();
        other[30 - from] ^= 1;
        let other = &other[usize::try_from(place).expect("small").saturating_sub(from)..];
        let found = tcp.feed(&segment(place.max(from as u32), 0, other));
        assert!(found.is_empty());
        assert_eq!(tcp.events[TcpEvent::Conflict], 1, "{place} {from}");
        assert_eq!((tcp.len(), tcp.bytes_held()), (0, 0));
    }
}

#[test]
fn sequence_numbers_wrap_around() {
    let messages = [message(1, 100), message(2, 100)];
    let stream = framed(&messages);
    for initial in [u32::MAX - 50, u32::MAX - 1, u32::MAX, 0, 1 << 31] {
        let mut tcp = OneWay::default();
        tcp.begin(initial);
        let mut found = Vec::new();
        let mut starts: Vec<usize> = (0..stream.len()).step_by(9).collect();
        starts.swap(3, 8);
        starts.swap(0, 5);
        for start in starts {
            let payload = &stream[start..(start + 9).min(stream.len())];
            let segment = Segment {
                sequence: initial.wrapping_add(1 + start as u32),
                ..segment(0, 0, payload)
            };
            found.extend(tcp.feed(&segment));
        }
        assert_eq!(found, messages, "{initial}");
    }
}

#[test]
fn a_runt_is_skipped() {
    let messages = [Vec::new(), message(1, 11), message(2, 12)];
    let mut tcp = begun();
    let found = tcp.feed(&segment(0, 0, &framed(&messages)));
    assert_eq!(found, messages[2..]);
    assert_eq!(events(&tcp), [("message", 1), ("runt", 2)]);
}

#[test]
fn the_end_is_counted_by_what_it_cuts_off() {
    let stream = framed(&[message(1, 40)]);
    let check = |segments: &[Segment<'_>], expected: &[(&str, u64)]| {
        let mut tcp = begun();
        for segment in segments {
            tcp.feed(segment);
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
fn a_reset_ends_it_whatever_its_sequence_number() {
    let stream = framed(&[message(1, 40)]);
    for place in [
        0,
        19,
        20,
        21,
        20 + TCP_AHEAD_BYTES_MAX as u32 + 1,
        1 << 31,
        u32::MAX,
    ] {
        let mut tcp = begun();
        tcp.feed(&segment(0, 0, &stream[..20]));
        tcp.feed(&segment(place, RST, &[]));
        assert_eq!(events(&tcp), [("unfinished", 1)], "{place}");
        assert!(tcp.feed(&segment(20, 0, &stream[20..])).is_empty());
    }
}

#[test]
fn what_begins_before_the_first_byte_ends_it() {
    let stream = framed(&[message(1, 40)]);
    for initial in [0, INITIAL, u32::MAX - 1, u32::MAX] {
        for (read, back, len) in [
            (0, 1, 1),
            (0, 1, 43),
            (20, 1, 1),
            (20, 4, 30),
            (42, 1 << 30, 9),
        ] {
            let mut tcp = OneWay::default();
            tcp.begin(initial);
            let at = |place: u32, payload| Segment {
                sequence: initial.wrapping_add(1).wrapping_add(place),
                ..segment(0, 0, payload)
            };
            tcp.feed(&at(0, &stream[..read]));
            tcp.feed(&at(u32::wrapping_neg(back), &[0; 50][..len]));
            assert_eq!(tcp.events[TcpEvent::Conflict], 1, "{initial} {read} {back}");
            assert!(tcp.is_empty());
        }
    }
}

#[test]
fn what_contradicts_an_unfinished_message_ends_it() {
    let messages = [message(1, 40), message(2, 40)];
    let stream = framed(&messages);
    // Where the other segment begins and ends, and where it differs.
    for (from, to, wrong) in [
        (42, 60, 42),
        (0, 60, 59),
        (50, 84, 55),
        (58, 60, 58),
        (59, 84, 59),
    ] {
        let mut tcp = begun();
        tcp.feed(&segment(0, 0, &stream[..60]));
        let mut other = stream[from..to].to_vec();
        tcp.feed(&segment(from as u32, 0, &other[..to.min(60) - from]));
        assert_eq!(tcp.events[TcpEvent::Duplicate], 1, "{from}");
        other[wrong - from] ^= 1;
        assert!(tcp.feed(&segment(from as u32, 0, &other)).is_empty());
        assert_eq!(tcp.events[TcpEvent::Conflict], 1, "{from}");
        assert!(tcp.is_empty());
    }
}

#[test]
fn a_segment_that_was_not_captured_whole_ends_it() {
    let messages = [message(1, 40), message(2, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    let mut cut = segment(0, 0, &stream[..60]);
    cut.payload_len = stream.len();
    assert_eq!(tcp.feed(&cut), messages[..1]);
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
        tcp.feed(&segment(place, 0, &bytes));
        place += 1460;
    }
    assert_eq!(tcp.events[TcpEvent::Gap], 1);
    assert_eq!(tcp.bytes_held(), 0);
    // And in very small pieces.
    let mut tcp = begun();
    for place in 0..=TCP_AHEAD_PIECES_MAX as u32 {
        assert!(!tcp.is_empty());
        tcp.feed(&segment(1 + 2 * place, 0, b"x"));
    }
    assert_eq!(tcp.events[TcpEvent::Gap], 1);
}

#[test]
fn a_segment_far_ahead_does_no_harm() {
    let messages = [message(1, 40)];
    let stream = framed(&messages);
    let mut tcp = begun();
    tcp.feed(&segment(TCP_AHEAD_BYTES_MAX as u32 + 1, 0, b"x"));
    tcp.feed(&segment(1 << 30, FIN, b"x"));
    assert_eq!(tcp.feed(&segment(0, 0, &stream)), messages);
    assert_eq!(events(&tcp), [("message", 1), ("out_of_window", 2)]);
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
        let mut tcp = OneWay::default();
        tcp.begin(initial);
        let mut found = Vec::new();
        for (from, to) in ranges {
            let segment = Segment {
                sequence: initial.wrapping_add(1).wrapping_add(from as u32),
                ..segment(0, 0, &stream[from..to])
            };
            found.extend(tcp.feed(&segment));
        }
        let whole: Vec<_> = messages
            .into_iter()
            .filter(|message| message.len() >= DNS_MESSAGE_MIN)
            .collect();
        prop_assert_eq!(found, whole);
        prop_assert_eq!(tcp.bytes_held(), 0);
    }
}
