use std::vec::Vec;

use super::*;

fn record(change: impl FnOnce(&mut RecordHeader), frame: &[u8]) -> Vec<u8> {
    let mut header = RecordHeader {
        captured_at_ns: 1,
        ifindex: 2,
        frame_len: frame.len() as u32,
        captured_len: frame.len() as u32,
        kind: KIND_ANSWER,
        vlan_tci: 0,
        gso_size: 0,
        left_out: 0,
    };
    change(&mut header);
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(frame);
    bytes
}

#[test]
fn header_has_no_padding() {
    assert_eq!(size_of::<RecordHeader>(), 32);
}

#[test]
fn a_whole_record_is_read() {
    let bytes = record(|_| (), b"frame");
    let read = Record::parse(&bytes).expect("a good record");
    assert_eq!(read.frame, b"frame");
    assert_eq!((read.header.captured_at_ns, read.header.ifindex), (1, 2));
}

#[test]
fn a_cut_frame_says_its_length_on_the_wire() {
    let bytes = record(|header| header.frame_len = 600_000, &[7; MAX_CAPTURE]);
    let read = Record::parse(&bytes).expect("a good record");
    assert_eq!(read.header.frame_len, 600_000);
}

#[test]
fn a_record_that_contradicts_itself_is_refused() {
    let good = record(|_| (), b"frame");
    for len in 0..good.len() {
        assert_eq!(Record::parse(&good[..len]), None, "cut to {len}");
    }
    let mut tail = good.clone();
    tail.push(0);
    assert_eq!(Record::parse(&tail), None, "stale tail");
    for change in [
        |header: &mut RecordHeader| header.captured_len = 4,
        |header: &mut RecordHeader| header.captured_len = 6,
        |header: &mut RecordHeader| header.frame_len = 4,
        |header: &mut RecordHeader| header.kind = 0,
        |header: &mut RecordHeader| (header.kind, header.frame_len) = (KIND_HELD, 6),
    ] {
        assert_eq!(Record::parse(&record(change, b"frame")), None);
    }
    let long = record(|_| (), &[0; MAX_CAPTURE + 1]);
    assert_eq!(
        Record::parse(&long),
        None,
        "longer than the program captures"
    );
}

#[test]
fn an_answer_that_is_kept_ends_where_it_was_captured() {
    let (header, _) = RecordHeader::read_from_prefix(&record(|_| (), b"frame")).expect("a header");
    let mut deferred = Deferred {
        header,
        frame: [0xee; DEFERRED_FRAME_MAX],
    };
    deferred.frame[..5].copy_from_slice(b"frame");
    assert_eq!(deferred.record().expect("a good one").frame, b"frame");
    deferred.header.captured_len = DEFERRED_FRAME_MAX as u32 + 1;
    assert_eq!(deferred.record(), None);
}

#[test]
fn what_is_told_aside_is_an_attempt_or_an_answer() {
    let key = [7; size_of::<AttemptKey>()];
    let attempt = record(|header| header.kind = KIND_ATTEMPT, &key);
    let Some(Aside::Attempt(read)) = Aside::parse(&attempt) else {
        panic!("an attempt");
    };
    assert_eq!(read.key.as_bytes(), key);
    let answer = record(|_| (), &key);
    assert!(matches!(Aside::parse(&answer), Some(Aside::Answer(_))));
    for kind in [KIND_HELD, KIND_SENT] {
        let other = record(|header| header.kind = kind, &key);
        assert_eq!(Aside::parse(&other), None, "{kind}");
    }
    for len in 0..attempt.len() {
        assert_eq!(Aside::parse(&attempt[..len]), None, "cut to {len}");
    }
    // The hot thread takes none of them.
    assert_eq!(Record::parse(&attempt), None);
}
