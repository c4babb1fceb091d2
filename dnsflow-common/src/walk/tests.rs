use std::vec::Vec;

use proptest::prelude::*;

use super::*;

const OPTIONS: usize = 8;

/// An answer from 10.96.0.10:53 to 10.244.0.5:40000 with IPv4 options and a payload of 20 bytes.
fn answer() -> Vec<u8> {
    let mut frame = Vec::from([2; 12]);
    frame.extend([0x08, 0x00]);
    let udp_len = 8 + 20u16;
    let total_len = (20 + OPTIONS) as u16 + udp_len;
    frame.extend([0x45 + (OPTIONS / 4) as u8, 0]);
    frame.extend(total_len.to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, PROTOCOL_UDP, 0, 0]);
    frame.extend([10, 96, 0, 10, 10, 244, 0, 5]);
    frame.extend([1; OPTIONS]);
    frame.extend([0, 53]);
    frame.extend(40_000u16.to_be_bytes());
    frame.extend(udp_len.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend([0xab, 0xcd, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    frame.extend([9; 8]);
    frame
}

const L3: usize = 14;
const L4: usize = L3 + 20 + OPTIONS;
const DNS: usize = L4 + 8;

fn walk(frame: &[u8]) -> Result<Message, Reason> {
    dns_answer(&frame, &Ports::DNS)
}

#[test]
fn an_answer_is_found() {
    let frame = answer();
    let found = walk(&frame).expect("an answer");
    assert_eq!(
        found,
        Message {
            addresses: Addresses::V4 {
                src: Ipv4Addr::new(10, 96, 0, 10),
                dst: Ipv4Addr::new(10, 244, 0, 5),
            },
            src_port: 53,
            dst_port: 40_000,
            l3: L3 as u32,
            l4: L4 as u32,
            payload: DNS as u32,
            payload_len: 20,
        }
    );
    assert_eq!(found.payload_of(&frame), Some(&frame[DNS..]));
}

#[test]
fn trailing_bytes_are_not_payload() {
    let mut frame = answer();
    let payload = frame[DNS..].to_vec();
    frame.extend([0; 6]);
    let found = walk(&frame).expect("an answer");
    assert_eq!(found.payload_of(&frame), Some(&payload[..]));
}

#[test]
fn a_cut_frame_has_no_whole_payload() {
    let frame = answer();
    let cut = &frame[..frame.len() - 1];
    let found = walk(cut).expect("the headers are there");
    assert_eq!(found.payload_of(cut), None);
}

#[test]
fn every_length_gives_the_header_it_ends_in() {
    let frame = answer();
    for len in 0..frame.len() {
        let expected = match len {
            _ if len < L3 => Err(Reason::TruncatedEthernet),
            _ if len < L4 => Err(Reason::TruncatedIpv4),
            _ if len < DNS => Err(Reason::TruncatedUdp),
            _ if len < DNS + 12 => Err(Reason::TruncatedDns),
            _ => Ok(()),
        };
        assert_eq!(walk(&frame[..len]).map(|_| ()), expected, "length {len}");
    }
}

#[test]
fn each_reason_to_skip() {
    for (reason, at, value) in [
        (Reason::NotIpv4, 12, 0x86),
        (Reason::InvalidIpv4, L3, 0x65),
        (Reason::InvalidIpv4, L3, 0x44),
        (Reason::InvalidIpv4, L3 + 3, 27),
        (Reason::NotUdp, L3 + 9, 6),
        (Reason::Fragment, L3 + 6, 0x20),
        (Reason::Fragment, L3 + 6, 0x1f),
        (Reason::Fragment, L3 + 7, 0x01),
        (Reason::OtherPort, L4 + 1, 54),
        (Reason::OtherPort, L4, 1),
        (Reason::InvalidUdp, L4 + 5, 7),
        (Reason::InvalidUdp, L4 + 5, 29),
        (Reason::TruncatedDns, L4 + 5, 19),
        (Reason::NotResponse, DNS + 2, 0x01),
        (Reason::Opcode, DNS + 2, 0xa8),
        (Reason::Rcode, DNS + 3, 0x83),
        (Reason::NoAnswers, DNS + 7, 0),
    ] {
        let mut frame = answer();
        frame[at] = value;
        assert_eq!(walk(&frame), Err(reason), "byte {at} = {value:#04x}");
    }
}

#[test]
fn ports_are_those_given() {
    let mut frame = answer();
    frame[L4..L4 + 2].copy_from_slice(&5353u16.to_be_bytes());
    let ports = Ports::new(&[53, 5353]).expect("two ports");
    assert!(dns_answer(&frame.as_slice(), &ports).is_ok());
    frame[L4..L4 + 2].copy_from_slice(&[0, 0]);
    assert_eq!(
        dns_answer(&frame.as_slice(), &ports),
        Err(Reason::OtherPort),
        "an unused place is no port"
    );
}

#[test]
fn impossible_port_lists_are_refused() {
    assert_eq!(Ports::new(&[]), None);
    assert_eq!(Ports::new(&[53, 0]), None);
    assert_eq!(Ports::new(&[1; PORTS_MAX + 1]), None);
    assert!(Ports::new(&[1; PORTS_MAX]).is_some());
}

/// A frame kept in two places, as a packet buffer with a page fragment is.
struct Split<'a> {
    head: &'a [u8],
    tail: &'a [u8],
}

impl Reader for Split<'_> {
    fn len(&self) -> u32 {
        (self.head.len() + self.tail.len()) as u32
    }

    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut piece = [0; N];
        let all = self.head.iter().chain(self.tail);
        let mut read = 0;
        for (to, from) in piece.iter_mut().zip(all.skip(offset as usize)) {
            *to = *from;
            read += 1;
        }
        (read == N).then_some(piece)
    }
}

/// A valid answer with up to four bytes changed, cut or prolonged.
fn almost_an_answer() -> impl Strategy<Value = Vec<u8>> {
    let len = answer().len();
    (
        prop::collection::vec((0..len, any::<u8>()), 0..4),
        0..len + 20,
    )
        .prop_map(|(changes, len)| {
            let mut frame = answer();
            for (at, value) in changes {
                frame[at] = value;
            }
            frame.resize(len, 0);
            frame
        })
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        3 => almost_an_answer(),
        1 => prop::collection::vec(any::<u8>(), 0..128),
    ]
}

proptest! {
    #[test]
    fn what_is_found_lies_in_the_frame(frame in any_frame()) {
        if let Ok(found) = walk(&frame) {
            prop_assert!(found.l3 < found.l4 && found.l4 < found.payload);
            prop_assert!(found.payload + DNS_LEN <= frame.len() as u32);
            prop_assert!(found.payload_len >= DNS_LEN);
            if let Some(payload) = found.payload_of(&frame) {
                prop_assert_eq!(payload.len() as u32, found.payload_len);
            }
        }
    }

    #[test]
    fn where_the_bytes_are_kept_makes_no_difference(frame in any_frame(), at in 0usize..200) {
        let (head, tail) = frame.split_at(at.min(frame.len()));
        prop_assert_eq!(dns_answer(&Split { head, tail }, &Ports::DNS), walk(&frame));
    }

    #[test]
    fn bytes_behind_the_headers_change_nothing(frame in almost_an_answer(), tail in any::<[u8; 4]>()) {
        if let Ok(found) = walk(&frame) {
            let mut longer = frame.clone();
            longer.extend(tail);
            prop_assert_eq!(walk(&longer), Ok(found));
        }
    }
}
