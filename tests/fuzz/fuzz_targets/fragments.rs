//! Any fragments of a few datagrams. Beside not panicking, the reassembly must stay within its
//! bounds, and what it hands out must consist of bytes that were fed at their places.
#![no_main]

use std::{net::IpAddr, time::Duration};

use dnsflow_core::{
    Timestamp,
    dns::fragments::{DatagramKey, Fragment, FragmentReassembly},
    values::limits::{FRAGMENT_BYTES_MAX, FRAGMENTED_MAX},
};
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};

#[derive(Arbitrary, Debug)]
struct Step {
    datagram: u8,
    unit: u8,
    unaligned: u8,
    more: bool,
    payload: Vec<u8>,
    not_captured: u8,
    not_udp: u8,
    seconds: u8,
}

fn key(datagram: u8) -> DatagramKey {
    let (source, destination): (IpAddr, IpAddr) = if datagram & 4 == 0 {
        ([10, 96, 0, 10].into(), [10, 244, 0, 5].into())
    } else {
        (
            [0xfd00, 0, 0, 0, 0, 0, 0, 10].into(),
            [0xfd00, 0, 0, 0, 0, 0, 0, 5].into(),
        )
    };
    DatagramKey {
        ifindex: (datagram & 1).into(),
        source,
        destination,
        id: (datagram & 2).into(),
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let mut fragments = FragmentReassembly::default();
    let mut now = Timestamp::default();
    let mut fed: Vec<(DatagramKey, u32, &[u8])> = Vec::new();
    for step in &steps {
        now = now + Duration::from_secs((step.seconds % 16).into());
        let key = key(step.datagram);
        let rare = |value: u8| u32::from(value >= 0xf0);
        let offset = u32::from(step.unit) * 8 + rare(step.unaligned);
        let fragment = Fragment {
            key,
            protocol: if rare(step.not_udp) == 0 { 17 } else { 6 },
            offset,
            more: step.more,
            payload: &step.payload,
            payload_len: step.payload.len() + rare(step.not_captured) as usize,
        };
        let found = fragments.feed(&fragment, now);
        fed.push((key, offset, &step.payload));
        assert!(fragments.len() <= FRAGMENTED_MAX);
        assert!(fragments.bytes_held() <= FRAGMENT_BYTES_MAX);
        let Some(datagram) = found else {
            continue;
        };
        assert_eq!(datagram.source.ip(), key.source);
        assert_eq!(datagram.destination.ip(), key.destination);
        // Each byte was in some fragment of this datagram, at its place.
        for (place, byte) in datagram.payload.iter().enumerate() {
            let place = place + 8;
            let known = fed.iter().any(|(of, offset, bytes)| {
                let inside = place.checked_sub(*offset as usize);
                *of == key && inside.and_then(|inside| bytes.get(inside)) == Some(byte)
            });
            assert!(known, "byte {place}");
        }
    }
    fragments.forget_interface(0);
    fragments.forget_interface(1);
    assert_eq!((fragments.len(), fragments.bytes_held()), (0, 0));
});
