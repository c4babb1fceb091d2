use std::{vec, vec::Vec};

use proptest::prelude::*;

use super::*;

/// A name in wire format.
fn wire(name: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        wire.push(label.len() as u8);
        wire.extend(label.bytes());
    }
    wire.push(0);
    wire
}

/// A record: its owner as it is written, its type, TTL and data.
struct Record(Vec<u8>, u32, u32, Vec<u8>);

fn a(owner: Vec<u8>, ttl: u32, last: u8) -> Record {
    Record(owner, A, ttl, vec![192, 0, 2, last])
}

fn message(name: &str, kind: u32, records: &[Record]) -> Vec<u8> {
    let mut message = vec![
        0x12,
        0x34,
        0x81,
        0x80,
        0,
        1,
        0,
        records.len() as u8,
        0,
        0,
        0,
        0,
    ];
    message.extend(wire(name));
    message.extend([0, kind as u8, 0, 1]);
    for Record(owner, kind, ttl, data) in records {
        message.extend(owner);
        message.extend((*kind as u16).to_be_bytes());
        message.extend([0, 1]);
        message.extend(ttl.to_be_bytes());
        message.extend((data.len() as u16).to_be_bytes());
        message.extend(data);
    }
    message
}

/// The addresses that are read, and their TTL.
fn read(name: &str, bytes: &[u8]) -> Option<(Vec<Address>, u32)> {
    let mut message = Message::default();
    // Nothing of an earlier message counts.
    message.bytes_mut().fill(0xff);
    message
        .bytes_mut()
        .get_mut(..bytes.len())?
        .copy_from_slice(bytes);
    message.read(bytes.len() as u32, wire(name).len() as u32 - 1)?;
    let addresses = (0..message.count()).map(|number| message.address(number));
    Some((addresses.collect(), message.ttl()))
}

fn v4(last: u8) -> Address {
    Address::new([192, 0, 2, last].into())
}

const NAME: &str = "www.example.com";

/// A pointer to the question's name.
fn pointer() -> Vec<u8> {
    vec![0xc0, 12]
}

#[test]
fn addresses_are_read_with_owners_in_full_and_as_pointers() {
    for owner in [wire(NAME), pointer()] {
        let records = [a(owner.clone(), 300, 1), a(owner, 60, 2)];
        let read = read(NAME, &message(NAME, A, &records));
        assert_eq!(read, Some((vec![v4(1), v4(2)], 60)));
    }
    let aaaa = Record(pointer(), AAAA, 300, (1..=16).collect());
    let octets: [u8; 16] = core::array::from_fn(|at| at as u8 + 1);
    let read = read(NAME, &message(NAME, AAAA, &[aaaa]));
    assert_eq!(read, Some((vec![Address::new(octets.into())], 300)));
}

#[test]
fn cnames_are_followed_in_order() {
    let chain = |names: &[&str]| {
        let mut records = Vec::new();
        for pair in names.windows(2) {
            records.push(Record(wire(pair[0]), CNAME, 120, wire(pair[1])));
        }
        records.push(a(wire(names[names.len() - 1]), 300, 1));
        message(names[0], A, &records)
    };
    let read = |names: &[&str]| read(names[0], &chain(names));
    let found = Some((vec![v4(1)], 120));
    assert_eq!(read(&[NAME, "a.cdn.test"]), found);
    assert_eq!(read(&[NAME, "a.cdn.test", "b.test"]), found);
    assert_eq!(read(&["a", "b", "c", "d", "e", "f", "g", "h"]), found);
    assert_eq!(read(&["a", "b", "c", "d", "e", "f", "g", "h", "i"]), None);
    // In a circle, whatever the case.
    assert_eq!(read(&["a", "b", "a"]), None);
    assert_eq!(read(&["a", "b", "A"]), None);
    assert_eq!(read(&["a", "b", "c", "b", "d"]), None);
}

/// A change of a message.
type Change<'a> = &'a dyn Fn(&mut Vec<u8>);

#[test]
fn what_is_not_plain_is_left_to_the_agent() {
    let plain = || vec![a(pointer(), 300, 1), a(pointer(), 300, 2)];
    let changed = |change: Change<'_>| {
        let mut bytes = message(NAME, A, &plain());
        change(&mut bytes);
        read(NAME, &bytes)
    };
    assert!(changed(&|_| {}).is_some());
    let behind_question = 12 + wire(NAME).len() + 4;
    let cases: &[(&str, Change<'_>)] = &[
        ("truncated", &|bytes| bytes[2] |= 2),
        ("no record", &|bytes| bytes[7] = 0),
        ("a record more than there is", &|bytes| bytes[7] = 3),
        ("seventeen records", &|bytes| bytes[7] = 17),
        ("256 records", &|bytes| bytes[6] = 1),
        ("a byte is missing", &|bytes| {
            bytes.truncate(bytes.len() - 1)
        }),
        ("another class", &|bytes| bytes[behind_question + 5] = 3),
        ("another type", &|bytes| {
            bytes[behind_question + 3] = AAAA as u8
        }),
        ("asked for another type", &|bytes| {
            bytes[behind_question - 3] = 65
        }),
        ("asked in another class", &|bytes| {
            bytes[behind_question - 1] = 3
        }),
        ("data of another length", &|bytes| {
            bytes[behind_question + 11] = 5
        }),
        ("another owner", &|bytes| bytes[behind_question + 1] = 16),
        ("a message too long", &|bytes| {
            bytes.resize(MESSAGE_MAX as usize + 1, 0)
        }),
    ];
    for (case, change) in cases {
        assert_eq!(changed(change), None, "{case}");
    }
    let cname = |target: Vec<u8>| Record(pointer(), CNAME, 300, target);
    let to_target = |target: Vec<u8>, owner: Vec<u8>| {
        read(NAME, &message(NAME, A, &[cname(target), a(owner, 300, 1)]))
    };
    assert!(to_target(wire("a.test"), wire("a.test")).is_some());
    assert_eq!(to_target(wire("a.test"), wire("b.test")), None);
    assert_eq!(to_target(wire("a.test"), pointer()), None);
    // A name with more behind it, one that does not end, and one in two pieces.
    let more = [wire("a.test"), vec![0]].concat();
    assert_eq!(to_target(more.clone(), more), None);
    assert_eq!(to_target(vec![1, b'a'], vec![1, b'a']), None);
    let pieces = vec![1, b'a', 0xc0, 12];
    assert_eq!(to_target(pieces.clone(), pieces), None);
    let behind = [a(pointer(), 300, 1), cname(wire("a.test"))];
    assert_eq!(read(NAME, &message(NAME, A, &behind)), None);
}

#[test]
fn a_ttl_is_no_negative_number() {
    let ttl = |ttl| read(NAME, &message(NAME, A, &[a(pointer(), ttl, 1)])).map(|(_, ttl)| ttl);
    assert_eq!(ttl(0x7fff_ffff), Some(0x7fff_ffff));
    assert_eq!(ttl(0x8000_0000), Some(0));
}

proptest! {
    /// Nothing that is read lies outside of the buffer, whatever the message says.
    #[test]
    fn any_bytes_can_be_read(
        bytes in prop::collection::vec(any::<u8>(), 0..MESSAGE_MAX as usize),
        name_len in 0..255_u32,
    ) {
        let mut message = Message::default();
        message.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        if message.read(bytes.len() as u32, name_len).is_some() {
            prop_assert!((1..=RECORDS_MAX).contains(&message.count()));
        }
    }
}
