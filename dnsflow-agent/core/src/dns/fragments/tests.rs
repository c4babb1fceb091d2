use std::time::Duration;

use proptest::{collection::vec, prelude::*, sample::Index};

use super::*;
use crate::tools::counter_vec::Label;

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_nanos(seconds * 1_000_000_000)
}

fn key(ifindex: u32, id: u32) -> DatagramKey {
    DatagramKey {
        ifindex,
        source: "10.96.0.10".parse().expect("an address"),
        destination: "10.244.0.5".parse().expect("an address"),
        id,
    }
}

fn key_v6(id: u32) -> DatagramKey {
    DatagramKey {
        ifindex: 1,
        source: "fd00::a".parse().expect("an address"),
        destination: "fd00::5".parse().expect("an address"),
        id,
    }
}

/// A datagram from port 53 to port 40000.
fn udp_bytes(payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(UDP_LEN + payload.len()).expect("a datagram");
    let [high, low] = len.to_be_bytes();
    [&[0, 53, 0x9c, 0x40, high, low, 0, 0], payload].concat()
}

/// The part `from..to` of a datagram.
fn part(key: DatagramKey, bytes: &[u8], from: usize, to: usize) -> Fragment<'_> {
    Fragment {
        key,
        protocol: PROTOCOL_UDP,
        offset: from as u32,
        more: to < bytes.len(),
        payload: &bytes[from..to],
        payload_len: to - from,
    }
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 8) as u8 ^ at as u8).collect()
}

fn events(reassembly: &FragmentReassembly) -> Vec<(&'static str, u64)> {
    reassembly
        .events()
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(event, count)| (event.as_str(), count))
        .collect()
}

#[test]
fn a_datagram_comes_together_in_any_order() {
    let message = payload(4000);
    let bytes = udp_bytes(&message);
    let parts = [(0, 1480), (1480, 2960), (2960, bytes.len())];
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        for key in [key(1, 7), key_v6(7)] {
            let mut reassembly = FragmentReassembly::default();
            let found: Vec<_> = order
                .iter()
                .filter_map(|index| {
                    let (from, to) = parts[*index];
                    reassembly.feed(&part(key, &bytes, from, to), at(1))
                })
                .collect();
            let expected = Datagram {
                source: SocketAddr::new(key.source, 53),
                destination: SocketAddr::new(key.destination, 40000),
                payload: message.clone(),
            };
            assert_eq!(found, [expected]);
            assert_eq!(events(&reassembly), [("kept", 3), ("complete", 1)]);
            assert_eq!((reassembly.len(), reassembly.bytes_held()), (0, 0));
        }
    }
}

#[test]
fn datagrams_are_told_apart() {
    let bytes = udp_bytes(&payload(100));
    let first = key(1, 7);
    let mut other_source = first;
    other_source.source = "10.96.0.11".parse().expect("an address");
    let mut other_destination = first;
    other_destination.destination = "10.244.0.6".parse().expect("an address");
    for other in [key(1, 8), key(2, 7), other_source, other_destination] {
        let mut reassembly = FragmentReassembly::default();
        assert_eq!(reassembly.feed(&part(first, &bytes, 0, 80), at(1)), None);
        assert_eq!(
            reassembly.feed(&part(other, &bytes, 80, bytes.len()), at(1)),
            None
        );
        assert_eq!(reassembly.len(), 2, "{other:?}");
    }
}

#[test]
fn a_datagram_with_an_overlap_is_refused_with_all_that_follows() {
    let bytes = udp_bytes(&payload(400));
    let end = bytes.len();
    let mut longer = bytes.clone();
    longer.extend([0; 8]);
    let mut other = bytes.clone();
    other[100] ^= 1;
    let key = key(1, 7);
    let beyond = part(key, &longer, 400, longer.len());
    for overlapping in [
        [part(key, &bytes, 0, 104), part(key, &bytes, 96, 200)],
        [part(key, &bytes, 96, 200), part(key, &bytes, 0, 104)],
        [part(key, &bytes, 0, 200), part(key, &bytes, 80, 104)],
        [part(key, &bytes, 80, 104), part(key, &bytes, 0, 200)],
        [part(key, &bytes, 80, 160), part(key, &other, 80, 160)],
        [part(key, &bytes, 400, end), beyond],
        [beyond, part(key, &bytes, 400, end)],
        [part(key, &bytes, 400, end), part(key, &longer, 408, 416)],
        [
            part(key, &bytes, 200, 400),
            part(key, &bytes[..320], 240, 320),
        ],
        // The same bytes, once as the last ones and once not.
        [
            part(key, &bytes, 80, 160),
            part(key, &bytes[..160], 80, 160),
        ],
    ] {
        let mut reassembly = FragmentReassembly::default();
        for fragment in overlapping {
            assert_eq!(reassembly.feed(&fragment, at(1)), None);
        }
        assert_eq!(events(&reassembly), [("kept", 1), ("overlap", 1)]);
        for (from, to) in [(0, 200), (200, end)] {
            assert_eq!(reassembly.feed(&part(key, &bytes, from, to), at(2)), None);
        }
        assert_eq!(reassembly.events()[FragmentEvent::Refused], 2);
        assert_eq!((reassembly.len(), reassembly.bytes_held()), (1, 0));
    }
}

#[test]
fn a_fragment_that_comes_again_is_no_overlap() {
    let message = payload(400);
    let bytes = udp_bytes(&message);
    let end = bytes.len();
    let mut reassembly = FragmentReassembly::default();
    let mut found = Vec::new();
    for (from, to) in [(200, end), (200, end), (0, 104), (0, 104), (104, 200)] {
        found.extend(reassembly.feed(&part(key(1, 7), &bytes, from, to), at(1)));
    }
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].payload, message);
    assert_eq!(reassembly.events()[FragmentEvent::Duplicate], 2);
}

#[test]
fn impossible_fragments_are_refused() {
    let bytes = udp_bytes(&payload(400));
    let whole = |offset, more, len| Fragment {
        key: key(1, 7),
        protocol: PROTOCOL_UDP,
        offset,
        more,
        payload: &bytes[..len],
        payload_len: len,
    };
    let check = |fragment: Fragment<'_>, event: FragmentEvent| {
        let mut reassembly = FragmentReassembly::default();
        assert_eq!(reassembly.feed(&fragment, at(1)), None);
        assert_eq!(events(&reassembly), [(event.as_str(), 1)], "{fragment:?}");
        let kept = [0, fragment.payload.len()][usize::from(event == FragmentEvent::Kept)];
        assert_eq!(reassembly.bytes_held(), kept);
    };
    check(whole(0, true, 100), FragmentEvent::Invalid);
    check(whole(8, true, 0), FragmentEvent::Invalid);
    check(whole(8, false, 0), FragmentEvent::Invalid);
    check(whole(4, false, 8), FragmentEvent::Invalid);
    check(whole(65528, true, 8), FragmentEvent::Invalid);
    check(whole(65528, false, 8), FragmentEvent::Invalid);
    check(whole(u32::MAX - 7, false, 8), FragmentEvent::Invalid);
    check(whole(0, false, 7), FragmentEvent::InvalidUdp);
    check(whole(0, false, 100), FragmentEvent::InvalidUdp);
    let mut cut = whole(8, true, 80);
    cut.payload_len = 88;
    check(cut, FragmentEvent::Cut);
    let mut other = whole(8, true, 80);
    other.protocol = 6;
    check(other, FragmentEvent::NotUdp);
    other.key = key_v6(7);
    other.offset = 0;
    check(other, FragmentEvent::NotUdp);
    // In IPv6, a later fragment's protocol says nothing.
    other.offset = 8;
    check(other, FragmentEvent::Kept);
}

#[test]
fn the_udp_length_is_trusted_within_the_datagram() {
    let feed = |bytes: &[u8]| {
        let mut reassembly = FragmentReassembly::default();
        reassembly.feed(&part(key(1, 7), bytes, 0, 16), at(1));
        reassembly.feed(&part(key(1, 7), bytes, 16, bytes.len()), at(1))
    };
    let message = payload(100);
    let mut padded = udp_bytes(&message);
    padded.extend([0; 5]);
    assert_eq!(feed(&padded).map(|found| found.payload), Some(message));
    for length in [0, 7, 109] {
        let mut bytes = udp_bytes(&payload(100));
        bytes[4..6].copy_from_slice(&u16::to_be_bytes(length));
        assert_eq!(feed(&bytes), None, "{length}");
    }
}

#[test]
fn a_fragment_that_is_a_whole_datagram_stands_alone() {
    let message = payload(100);
    let bytes = udp_bytes(&message);
    let mut reassembly = FragmentReassembly::default();
    reassembly.feed(&part(key_v6(7), &bytes, 0, 16), at(1));
    let found = reassembly.feed(&part(key_v6(7), &bytes, 0, bytes.len()), at(1));
    assert_eq!(found.map(|found| found.payload), Some(message));
    assert_eq!(reassembly.len(), 1);
}

#[test]
fn the_number_of_fragments_is_bounded() {
    let bytes = udp_bytes(&payload(8 * (FRAGMENTS_PER_DATAGRAM_MAX + 2)));
    let mut reassembly = FragmentReassembly::default();
    for from in (0..=8 * FRAGMENTS_PER_DATAGRAM_MAX).step_by(8) {
        reassembly.feed(&part(key(1, 7), &bytes, from, from + 8), at(1));
    }
    assert_eq!(reassembly.events()[FragmentEvent::TooMany], 1);
    assert_eq!((reassembly.len(), reassembly.bytes_held()), (1, 0));
}

#[test]
fn datagrams_are_bounded_and_a_pod_only_pushes_out_its_own() {
    let message = payload(100);
    let bytes = udp_bytes(&message);
    let mut reassembly = FragmentReassembly::default();
    reassembly.feed(&part(key(1, 7), &bytes, 0, 80), at(1));
    for id in 0..2 * FRAGMENTED_PER_INTERFACE_MAX as u32 {
        reassembly.feed(&part(key(2, id), &bytes, 0, 80), at(1));
    }
    assert_eq!(reassembly.len(), 1 + FRAGMENTED_PER_INTERFACE_MAX);
    let found = reassembly.feed(&part(key(1, 7), &bytes, 80, bytes.len()), at(1));
    assert_eq!(found.map(|found| found.payload), Some(message));
    for ifindex in 3..30 {
        for id in 0..FRAGMENTED_PER_INTERFACE_MAX as u32 {
            reassembly.feed(&part(key(ifindex, id), &bytes, 0, 80), at(1));
        }
    }
    assert_eq!(reassembly.len(), FRAGMENTED_MAX);
    assert_eq!(reassembly.bytes_held(), FRAGMENTED_MAX * 80);
    for ifindex in 1..30 {
        reassembly.forget_interface(ifindex);
    }
    assert_eq!((reassembly.len(), reassembly.bytes_held()), (0, 0));
}

#[test]
fn bytes_are_bounded() {
    let bytes = udp_bytes(&payload(65000));
    let mut reassembly = FragmentReassembly::default();
    for ifindex in 1..=100 {
        reassembly.feed(&part(key(ifindex, 7), &bytes, 0, 64000), at(1));
        assert!(reassembly.bytes_held() <= FRAGMENT_BYTES_MAX);
    }
    assert_eq!(reassembly.len(), FRAGMENT_BYTES_MAX / 64000);
    let gone = reassembly.events()[FragmentEvent::Evicted];
    assert_eq!(gone, 100 - reassembly.len() as u64);
    // Those of one interface have a limit of their own.
    let mut reassembly = FragmentReassembly::default();
    for id in 0..FRAGMENTED_PER_INTERFACE_MAX as u32 {
        reassembly.feed(&part(key(1, id), &bytes, 0, 64000), at(1));
    }
    assert_eq!(reassembly.len(), FRAGMENT_BYTES_PER_INTERFACE_MAX / 64000);
}

#[test]
fn a_datagram_is_waited_for_since_its_first_fragment() {
    let bytes = udp_bytes(&payload(400));
    let mut reassembly = FragmentReassembly::default();
    reassembly.feed(&part(key(1, 7), &bytes, 0, 80), at(1));
    reassembly.feed(&part(key(1, 7), &bytes, 80, 160), at(20));
    let last = at(1) + FRAGMENT_WAIT_MAX;
    assert_eq!(
        reassembly.feed(&part(key(1, 7), &bytes, 160, 240), last),
        None
    );
    assert_eq!(reassembly.len(), 1);
    let late = last + Duration::from_nanos(1);
    let found = reassembly.feed(&part(key(1, 7), &bytes, 240, bytes.len()), late);
    assert_eq!(found, None);
    assert_eq!(events(&reassembly), [("kept", 4), ("incomplete", 1)]);
    assert_eq!(reassembly.bytes_held(), bytes.len() - 240);
}

proptest! {
    /// However a datagram is cut up, mixed up and repeated, it comes out once and whole.
    #[test]
    fn a_datagram_survives_the_network(
        len in 0..60_000_usize,
        cuts in vec(any::<Index>(), 1..20),
        swaps in vec((any::<Index>(), any::<Index>()), 0..20),
        repeats in vec((any::<Index>(), any::<Index>()), 0..5),
    ) {
        let message = payload(len);
        let bytes = udp_bytes(&message);
        let mut places: Vec<usize> =
            cuts.iter().map(|cut| cut.index(bytes.len()) / 8 * 8).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        places.dedup();
        let mut ranges: Vec<(usize, usize)> =
            places.windows(2).map(|pair| (pair[0], pair[1])).collect();
        for (one, other) in swaps {
            let (one, other) = (one.index(ranges.len()), other.index(ranges.len()));
            ranges.swap(one, other);
        }
        // Before the datagram's last fragment, a repeated one belongs to it.
        if let [first @ .., _] = ranges.clone().as_slice() && !first.is_empty() {
            for (what, place) in repeats {
                let place = place.index(first.len());
                ranges.insert(place, first[what.index(first.len())]);
            }
        }
        let mut reassembly = FragmentReassembly::default();
        let mut found = Vec::new();
        for (from, to) in ranges {
            found.extend(reassembly.feed(&part(key(1, 7), &bytes, from, to), at(1)));
        }
        prop_assert_eq!(found.len(), 1);
        prop_assert_eq!(&found[0].payload, &message);
        prop_assert_eq!((reassembly.len(), reassembly.bytes_held()), (0, 0));
    }
}
