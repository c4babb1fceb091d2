use dnsflow_common::record::{KIND_ANSWER, RecordHeader};
use zerocopy::IntoBytes as _;

use super::*;

fn record() -> Vec<u8> {
    let header = RecordHeader {
        captured_at_ns: 5_000_000_000,
        ifindex: 7,
        frame_len: 9000,
        captured_len: 3,
        kind: KIND_ANSWER,
        vlan_tci: 0,
        gso_size: 0,
        left_out: 0,
    };
    [header.as_bytes(), b"abc"].concat()
}

#[test]
fn a_turn_ends_when_whoever_takes_the_frames_says_so() {
    let invalid = AtomicU64::default();
    assert!(hand_over(&record(), &invalid, &mut |_| true));
    assert!(!hand_over(&record(), &invalid, &mut |_| false));
    assert_eq!(invalid.load(Ordering::Relaxed), 0);
    // What is no record does not end it.
    assert!(hand_over(&[0xff; 100], &invalid, &mut |_| false));
    assert_eq!(invalid.load(Ordering::Relaxed), 1);
}

#[test]
fn a_record_becomes_a_frame() {
    let bytes = record();
    let read = Record::parse(&bytes)
        .and_then(frame)
        .expect("a good record");
    assert_eq!(read.ifindex, 7);
    assert_eq!(read.captured_at, Timestamp::from_nanos(5_000_000_000));
    assert_eq!(read.bytes, b"abc");
}

#[test]
fn a_record_that_contradicts_itself_is_no_frame() {
    assert!(Record::parse(&[]).is_none());
    assert!(Record::parse(&[0xff; 100]).is_none());
}
