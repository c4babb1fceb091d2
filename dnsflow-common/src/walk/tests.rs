use std::vec::Vec;

use proptest::prelude::*;

use super::*;

/// What a test frame is made of.
#[derive(Clone, Debug)]
struct Parts {
    tags: Vec<u16>,
    v6: bool,
    /// Words of IPv4 options; with IPv6, the lengths of Destination Options headers.
    options: Vec<u8>,
    tcp: bool,
    payload: Vec<u8>,
}

impl Parts {
    fn answer() -> Self {
        Self {
            tags: Vec::new(),
            v6: false,
            options: Vec::from([0; 2]),
            tcp: false,
            payload: [
                &[0xab, 0xcd, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0][..],
                &[9; 8],
            ]
            .concat(),
        }
    }

    /// From port 53 to port 40000.
    fn build(&self) -> Vec<u8> {
        let mut transport = Vec::from([0, 53]);
        transport.extend(40_000u16.to_be_bytes());
        if self.tcp {
            transport.extend(7u32.to_be_bytes());
            transport.extend([0, 0, 0, 0, 0x60, TCP_ACK, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]);
        } else {
            transport.extend((8 + self.payload.len() as u16).to_be_bytes());
            transport.extend([0, 0]);
        }
        transport.extend(&self.payload);
        let protocol = if self.tcp { 6 } else { 17 };

        let mut frame = Vec::from([2; 12]);
        for tci in &self.tags {
            frame.extend([0x81, 0]);
            frame.extend(tci.to_be_bytes());
        }
        if self.v6 {
            let mut payload = Vec::new();
            for (at, len) in self.options.iter().enumerate() {
                let last = at + 1 == self.options.len();
                payload.extend([if last { protocol } else { 60 }, *len]);
                payload.extend(std::vec![0; 6 + usize::from(*len) * 8]);
            }
            payload.extend(transport);
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((payload.len() as u16).to_be_bytes());
            frame.extend([
                if self.options.is_empty() {
                    protocol
                } else {
                    60
                },
                64,
            ]);
            frame.extend([0xfd, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
            frame.extend([0xfd, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
            frame.extend(payload);
        } else {
            let header_len = 20 + 4 * self.options.len();
            frame.extend([8, 0, 0x40 + (header_len / 4) as u8, 0]);
            frame.extend(((header_len + transport.len()) as u16).to_be_bytes());
            frame.extend([0, 1, 0x40, 0, 64, protocol, 0, 0]);
            frame.extend([10, 96, 0, 10, 10, 244, 0, 5]);
            frame.extend(std::vec![1; header_len - 20]);
            frame.extend(transport);
        }
        frame
    }
}

const L3: usize = 14;
/// Behind two words of IPv4 options.
const L4: usize = L3 + 28;
const DNS: usize = L4 + 8;

fn walk(frame: &[u8]) -> Result<Packet, Reason> {
    from_server(&frame, &Ports::DNS)
}

#[track_caller]
fn message(frame: &[u8]) -> Message {
    match walk(frame) {
        Ok(Packet::UdpAnswer(message)) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_answer_is_found() {
    let frame = Parts::answer().build();
    let found = message(&frame);
    let ip = IpHeader {
        version: Version::V4,
        l3: L3 as u32,
    };
    assert_eq!(
        found,
        Message {
            ip,
            tags: Tags::default(),
            src_port: 53,
            dst_port: 40_000,
            l4: L4 as u32,
            payload: DNS as u32,
            payload_len: 20,
        }
    );
    assert_eq!(
        ip.addresses(&frame.as_slice()),
        Some(Addresses {
            src: "10.96.0.10".parse().expect("an address"),
            dst: "10.244.0.5".parse().expect("an address"),
        })
    );
    assert_eq!(found.payload_of(&frame), Some(&frame[DNS..]));
}

#[test]
fn an_answer_is_found_behind_tags_and_extension_headers() {
    let parts = Parts {
        tags: Vec::from([0x2005, 6]),
        v6: true,
        options: Vec::from([0, 3]),
        ..Parts::answer()
    };
    let frame = parts.build();
    let found = message(&frame);
    assert_eq!(found.tags.tcis(), [0x2005, 6]);
    assert_eq!(found.l4, 14 + 8 + 40 + 8 + 32);
    assert_eq!(found.payload_of(&frame), Some(&parts.payload[..]));
    assert_eq!(
        found.ip.addresses(&frame.as_slice()),
        Some(Addresses {
            src: "fd01::1".parse().expect("an address"),
            dst: "fd02::2".parse().expect("an address"),
        })
    );
}

#[test]
fn a_segment_is_found() {
    let parts = Parts {
        tcp: true,
        ..Parts::answer()
    };
    let frame = parts.build();
    let Ok(Packet::TcpSegment(found)) = walk(&frame) else {
        panic!("{:?}", walk(&frame));
    };
    assert_eq!((found.seq, found.flags), (7, TCP_ACK));
    assert_eq!(found.payload_of(&frame), Some(&parts.payload[..]));
}

#[test]
fn trailing_bytes_are_not_payload() {
    let mut frame = Parts::answer().build();
    let payload = frame[DNS..].to_vec();
    frame.extend([0; 6]);
    assert_eq!(message(&frame).payload_of(&frame), Some(&payload[..]));
}

#[test]
fn a_cut_frame_has_no_whole_payload() {
    let frame = Parts::answer().build();
    let cut = &frame[..frame.len() - 1];
    assert_eq!(message(cut).payload_of(cut), None);
}

#[test]
fn every_length_gives_the_header_it_ends_in() {
    let answer = |tags: &[u16], v6| Parts {
        tags: tags.to_vec(),
        v6,
        ..Parts::answer()
    };
    use Reason::*;
    // Where each header ends, from the outermost on.
    let v4 = answer(&[], false);
    let v6 = answer(&[], true);
    let tagged = answer(&[5, 6], false);
    let tcp = Parts {
        tcp: true,
        ..answer(&[], false)
    };
    for (parts, ends) in [
        (
            &v4,
            &[
                (TruncatedEthernet, 14),
                (TruncatedIpv4, 28),
                (TruncatedUdp, 8),
                (TruncatedDns, 12),
            ][..],
        ),
        (
            &tagged,
            &[
                (TruncatedEthernet, 14),
                (TruncatedVlan, 8),
                (TruncatedIpv4, 28),
                (TruncatedUdp, 8),
            ],
        ),
        (
            &v6,
            &[
                (TruncatedEthernet, 14),
                (TruncatedIpv6, 40),
                (TruncatedExtension, 16),
                (TruncatedUdp, 8),
                (TruncatedDns, 12),
            ],
        ),
        (
            &tcp,
            &[
                (TruncatedEthernet, 14),
                (TruncatedIpv4, 28),
                (TruncatedTcp, 24),
            ],
        ),
    ] {
        let frame = parts.build();
        let mut len = 0;
        for (reason, header_len) in ends {
            for _ in 0..*header_len {
                assert_eq!(
                    walk(&frame[..len]),
                    Err(*reason),
                    "length {len} of {parts:?}"
                );
                len += 1;
            }
        }
    }
}

#[test]
fn each_reason_to_skip() {
    for (reason, at, value) in [
        (Reason::NotIp, 12, 0x86),
        (Reason::InvalidIpv4, L3, 0x65),
        (Reason::InvalidIpv4, L3, 0x44),
        (Reason::InvalidIpv4, L3 + 3, 27),
        (Reason::OtherProtocol, L3 + 9, 1),
        (Reason::OtherPort, L4 + 1, 54),
        (Reason::OtherPort, L4, 1),
        (Reason::InvalidUdp, L4 + 5, 7),
        (Reason::InvalidUdp, L4 + 5, 29),
        (Reason::TruncatedDns, L4 + 5, 19),
        (Reason::NotResponse, DNS + 2, 0x01),
        (Reason::Opcode, DNS + 2, 0xa8),
        (Reason::Rcode, DNS + 3, 0x83),
        (Reason::Questions, DNS + 5, 0),
        (Reason::Questions, DNS + 4, 1),
        (Reason::NoAnswers, DNS + 7, 0),
    ] {
        let mut frame = Parts::answer().build();
        frame[at] = value;
        assert_eq!(walk(&frame), Err(reason), "byte {at} = {value:#04x}");
    }
}

#[test]
fn three_tags_are_too_many() {
    let parts = Parts {
        tags: Vec::from([1, 2, 3]),
        ..Parts::answer()
    };
    assert_eq!(walk(&parts.build()), Err(Reason::TooManyTags));
}

#[test]
fn a_later_fragment_is_no_header() {
    let mut frame = Parts::answer().build();
    // Its first bytes would be those of an answer's UDP header.
    frame[L3 + 6..L3 + 8].copy_from_slice(&[0x20, 3]);
    let Ok(Packet::Fragment(found)) = walk(&frame) else {
        panic!("{:?}", walk(&frame));
    };
    assert_eq!(found.first, None);
    assert_eq!((found.id, found.offset, found.more), (1, 24, true));
    assert_eq!(found.payload_of(&frame), Some(&frame[L4..]));
}

#[test]
fn a_first_fragment_is_but_a_part() {
    let mut frame = Parts::answer().build();
    frame[L3 + 6] = 0x20;
    assert_eq!(walk(&frame), Err(Reason::InvalidUdp), "all is there");
    frame[L4 + 4..L4 + 6].copy_from_slice(&4000u16.to_be_bytes());
    let Ok(Packet::Fragment(found)) = walk(&frame) else {
        panic!("{:?}", walk(&frame));
    };
    assert_eq!(
        found.first,
        Some(FirstFragment {
            src_port: 53,
            dst_port: 40_000,
            l4: L4 as u32,
            message: DNS as u32,
            message_len: 3992,
        })
    );
    assert_eq!(found.payload_of(&frame), Some(&frame[L4..]));
}

/// A fragment header in front of the first Destination Options header.
fn fragment_v6(offset_and_more: u16, udp_len: u16) -> Vec<u8> {
    let parts = Parts {
        v6: true,
        options: Vec::from([0]),
        ..Parts::answer()
    };
    let mut frame = parts.build();
    let at = L3 + 40;
    frame[L3 + 6] = 44;
    frame[L3 + 5] += 8;
    frame.splice(at..at, [60, 0, 0, 0, 0, 1, 0, 7]);
    frame[at + 2..at + 4].copy_from_slice(&offset_and_more.to_be_bytes());
    frame[at + 20..at + 22].copy_from_slice(&udp_len.to_be_bytes());
    frame
}

#[test]
fn fragments_of_ipv6() {
    let piece = L3 + 40 + 8;
    let frame = fragment_v6(1, 4000);
    let Ok(Packet::Fragment(first)) = walk(&frame) else {
        panic!("{:?}", walk(&frame));
    };
    assert_eq!((first.id, first.offset, first.more), (0x0001_0007, 0, true));
    // The piece begins with the options, before the UDP header.
    assert_eq!(first.payload_of(&frame), Some(&frame[piece..]));
    assert_eq!(first.first.map(|first| first.l4), Some(piece as u32 + 8));

    let frame = fragment_v6(48, 4000);
    let Ok(Packet::Fragment(later)) = walk(&frame) else {
        panic!("{:?}", walk(&frame));
    };
    assert_eq!((later.offset, later.more, later.first), (48, false, None));
    assert_eq!(later.payload_of(&frame), Some(&frame[piece..]));

    // An atomic fragment is a whole packet (RFC 6946).
    assert_eq!(message(&fragment_v6(0, 28)).payload_len, 20);
}

#[test]
fn ports_are_those_given() {
    let mut frame = Parts::answer().build();
    frame[L4..L4 + 2].copy_from_slice(&5353u16.to_be_bytes());
    let ports = Ports::new(&[53, 5353]).expect("two ports");
    assert!(from_server(&frame.as_slice(), &ports).is_ok());
    frame[L4..L4 + 2].copy_from_slice(&[0, 0]);
    assert_eq!(
        from_server(&frame.as_slice(), &ports),
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

#[test]
fn a_query_is_found_and_an_answer_is_none() {
    let mut frame = Parts::answer().build();
    let to = |frame: &[u8]| from_pod(&frame, &Ports::new(&[40_000]).expect("a port"));
    assert_eq!(to(&frame), Err(Reason::NotQuery));
    frame[DNS + 2] = 1;
    assert_eq!(to(&frame), Ok(Sent::UdpQuery(query_at(&frame))));
    assert_eq!(
        from_pod(&frame.as_slice(), &Ports::DNS),
        Err(Reason::OtherPort)
    );
    frame[DNS + 5] = 2;
    assert_eq!(to(&frame), Err(Reason::Questions));
    frame[DNS + 5] = 1;
    frame[DNS + 2] = 0x20;
    assert_eq!(to(&frame), Err(Reason::Opcode));
    frame[L3 + 6] = 0x20;
    assert_eq!(to(&frame), Err(Reason::FragmentedQuery));
}

/// The query is where the answer was.
fn query_at(query: &[u8]) -> Message {
    let mut answer = query.to_vec();
    answer[DNS + 2] = 0x81;
    message(&answer)
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

fn parts() -> impl Strategy<Value = Parts> {
    (
        prop::collection::vec(any::<u16>(), 0..=2),
        any::<bool>(),
        prop::collection::vec(0u8..4, 0..6),
        any::<bool>(),
    )
        .prop_map(|(tags, v6, options, tcp)| Parts {
            tags,
            v6,
            options,
            tcp,
            ..Parts::answer()
        })
}

/// Something valid with up to four bytes changed, cut or prolonged.
fn almost_valid() -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (
        parts(),
        changes,
        prop_oneof![Just(None), any::<prop::sample::Index>().prop_map(Some)],
    )
        .prop_map(|(parts, changes, len)| {
            let mut frame = parts.build();
            for (at, value) in changes {
                let at = at.index(frame.len());
                frame[at] = value;
            }
            if let Some(len) = len {
                frame.resize(len.index(frame.len() + 20), 0);
            }
            frame
        })
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        3 => almost_valid(),
        1 => prop::collection::vec(any::<u8>(), 0..128),
    ]
}

proptest! {
    #[test]
    fn what_is_built_is_found(parts in parts()) {
        let frame = parts.build();
        let (tags, payload) = match walk(&frame) {
            Ok(Packet::UdpAnswer(found)) => (found.tags, found.payload_of(&frame)),
            Ok(Packet::TcpSegment(found)) => (found.tags, found.payload_of(&frame)),
            other => panic!("{other:?}"),
        };
        prop_assert_eq!(payload, Some(&parts.payload[..]));
        prop_assert_eq!(tags.tcis(), &parts.tags[..]);
    }

    #[test]
    fn what_is_found_lies_in_the_frame(frame in any_frame()) {
        let len = frame.len() as u32;
        match walk(&frame) {
            Ok(Packet::UdpAnswer(found)) => {
                prop_assert!(found.ip.l3 < found.l4 && found.l4 < found.payload);
                prop_assert!(found.payload + DNS_LEN <= len);
                prop_assert!(found.payload_len >= DNS_LEN);
            }
            Ok(Packet::TcpSegment(found)) => {
                prop_assert!(found.ip.l3 < found.l4 && found.l4 < found.payload);
                prop_assert!(found.payload <= len);
            }
            Ok(Packet::Fragment(found)) => {
                prop_assert!(found.ip.l3 < found.payload && found.payload <= len);
                if let Some(first) = found.first {
                    prop_assert!(first.l4 >= found.payload && first.message > first.l4);
                    prop_assert!(first.message + DNS_LEN <= len);
                }
            }
            Err(_) => {}
        }
    }

    #[test]
    fn where_the_bytes_are_kept_makes_no_difference(frame in any_frame(), at in 0usize..200) {
        let (head, tail) = frame.split_at(at.min(frame.len()));
        prop_assert_eq!(from_server(&Split { head, tail }, &Ports::DNS), walk(&frame));
        prop_assert_eq!(
            from_pod(&Split { head, tail }, &Ports::DNS),
            from_pod(&frame.as_slice(), &Ports::DNS)
        );
    }

    #[test]
    fn bytes_behind_the_headers_change_nothing(frame in almost_valid(), tail in any::<[u8; 4]>()) {
        if let Ok(found) = walk(&frame) {
            let mut longer = frame.clone();
            longer.extend(tail);
            prop_assert_eq!(walk(&longer), Ok(found));
        }
    }
}

#[test]
fn what_may_begin_a_connection_is_found() {
    for (v6, tags) in [(false, Vec::new()), (true, Vec::from([5]))] {
        let udp = Parts {
            v6,
            tags: tags.clone(),
            ..Parts::answer()
        };
        let tcp = Parts {
            tcp: true,
            ..udp.clone()
        };
        let (mut udp, mut tcp) = (udp.build(), tcp.build());
        let l4 = match walk(&udp) {
            Ok(Packet::UdpAnswer(found)) => found.l4 as usize,
            other => panic!("{other:?}"),
        };
        let found = |frame: &Vec<u8>| match from_pod(&frame.as_slice(), &Ports::DNS) {
            Ok(Sent::Attempt(found)) => Ok((found.protocol, found.dst_port)),
            Ok(other) => panic!("{other:?}"),
            Err(reason) => Err(reason),
        };
        let mut source = |port: u16| {
            udp[l4..][..2].copy_from_slice(&port.to_be_bytes());
            found(&udp)
        };
        assert_eq!(source(CLIENT_PORT_MIN), Ok((PROTOCOL_UDP, 40_000)));
        assert_eq!(source(CLIENT_PORT_MIN - 1), Err(Reason::OtherPort));
        let mut flags = |flags| {
            tcp[l4 + 13] = flags;
            found(&tcp)
        };
        assert_eq!(flags(TCP_SYN), Ok((PROTOCOL_TCP, 40_000)));
        for other in [TCP_SYN | TCP_ACK, TCP_ACK, TCP_RST, 0] {
            assert_eq!(flags(other), Err(Reason::OtherPort), "{other:#x}");
        }
    }
}
