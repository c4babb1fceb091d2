use proptest::{collection::vec, prelude::*, sample::Index};

use super::*;

/// A frame from a server to a pod.
#[derive(Clone, Debug)]
struct Parts {
    v6: bool,
    /// Words of IPv4 options; with IPv6, Destination Options headers of 8 bytes.
    options: u8,
    /// The control bits of a TCP segment; else it is UDP.
    tcp: Option<u8>,
    addresses: [[u8; 16]; 2],
    data: Vec<u8>,
}

impl Parts {
    fn answer() -> Self {
        Self {
            v6: false,
            options: 0,
            tcp: None,
            addresses: [[10; 16], [0xfd; 16]],
            data: vec![7; 33],
        }
    }

    fn segment() -> Self {
        Self {
            tcp: Some(0x18),
            ..Self::answer()
        }
    }

    fn address_len(&self) -> usize {
        if self.v6 { 16 } else { 4 }
    }

    fn protocol(&self) -> u8 {
        if self.tcp.is_some() { 6 } else { 17 }
    }

    fn l4(&self) -> usize {
        match self.v6 {
            true => 14 + 40 + 8 * usize::from(self.options),
            false => 14 + 20 + 4 * usize::from(self.options),
        }
    }

    fn checksum_at(&self) -> usize {
        self.l4() + if self.tcp.is_some() { 16 } else { 6 }
    }

    /// UDP or TCP with zero in the place of the checksum.
    fn transport(&self) -> Vec<u8> {
        // One question, one answer, no error.
        let dns = [0xab, 0xcd, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0];
        let mut bytes = vec![0, 53, 0x9c, 0x40];
        match self.tcp {
            Some(flags) => bytes.extend([
                0, 0, 0, 7, 0, 0, 0, 9, 0x60, flags, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1,
            ]),
            None => {
                let len = 8 + dns.len() + self.data.len();
                bytes.extend((len as u16).to_be_bytes());
                bytes.extend([0, 0]);
            }
        }
        bytes.extend(dns);
        bytes.extend(&self.data);
        bytes
    }

    fn pseudo_header(&self) -> Vec<u8> {
        let [src, dst] = &self.addresses;
        let mut bytes = src[..self.address_len()].to_vec();
        bytes.extend(&dst[..self.address_len()]);
        bytes.extend((self.transport().len() as u32).to_be_bytes());
        bytes.extend(u32::from(self.protocol()).to_be_bytes());
        bytes
    }

    /// As it leaves a sender that has all checksums made by a device.
    fn unfinished(&self) -> Vec<u8> {
        self.with_checksum(sum(&self.pseudo_header()))
    }

    /// As it leaves any other.
    fn complete(&self) -> Vec<u8> {
        let all = [self.pseudo_header(), self.transport()].concat();
        self.with_checksum(match (sum(&all), self.tcp) {
            (0xffff, None) => 0xffff,
            (sum, _) => !sum,
        })
    }

    fn with_checksum(&self, checksum: u16) -> Vec<u8> {
        let transport = self.transport();
        let [src, dst] = &self.addresses;
        let mut frame = vec![2; 12];
        if self.v6 {
            let options = usize::from(self.options);
            let len = 8 * options + transport.len();
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((len as u16).to_be_bytes());
            let nexts = [vec![60; options], vec![self.protocol()]].concat();
            frame.extend([nexts[0], 64]);
            frame.extend([*src, *dst].concat());
            for next in &nexts[1..] {
                frame.extend([*next, 0, 1, 4, 0, 0, 0, 0]);
            }
        } else {
            let header_len = 20 + 4 * usize::from(self.options);
            frame.extend([8, 0, 0x40 | (header_len / 4) as u8, 0]);
            frame.extend(((header_len + transport.len()) as u16).to_be_bytes());
            frame.extend([0, 1, 0x40, 0, 64, self.protocol(), 0, 0]);
            frame.extend(&src[..4]);
            frame.extend(&dst[..4]);
            frame.extend(vec![1; header_len - 20]);
        }
        assert_eq!(frame.len(), self.l4());
        frame.extend(transport);
        let at = self.checksum_at();
        frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
        frame
    }

    fn needs_checksum(&self) -> VnetHeader {
        VnetHeader {
            flags: NEEDS_CSUM,
            csum_start: self.l4() as u16,
            csum_offset: (self.checksum_at() - self.l4()) as u16,
            ..VnetHeader::default()
        }
    }
}

/// The sum of 16-bit words, folded (RFC 1071), one end-around carry at a time.
fn sum(bytes: &[u8]) -> u16 {
    bytes.chunks(2).fold(0, |sum, pair| {
        let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
        let (sum, carry) = word.overflowing_add(sum);
        sum + u16::from(carry)
    })
}

/// What the pod gets: the kernel or a device does what the header says (`skb_checksum_help` in
/// Linux net/core/dev.c).
fn delivered(frame: &[u8], header: VnetHeader) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if header.flags & NEEDS_CSUM != 0 {
        let start = usize::from(header.csum_start);
        let at = start + usize::from(header.csum_offset);
        let checksum = match !sum(&frame[start..]) {
            0 => 0xffff,
            checksum => checksum,
        };
        frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
    frame
}

fn of(frame: &[u8]) -> VnetHeader {
    VnetHeader::of(frame, 0).expect("no tag, no segments")
}

fn samples() -> Vec<Parts> {
    let mut samples = Vec::new();
    for v6 in [false, true] {
        for tcp in [None, Some(0x18)] {
            for options in [0, 2] {
                samples.push(Parts {
                    v6,
                    tcp,
                    options,
                    ..Parts::answer()
                });
            }
        }
    }
    samples
}

#[test]
fn an_unfinished_checksum_is_finished() {
    for parts in samples() {
        let header = of(&parts.unfinished());
        assert_eq!(header, parts.needs_checksum(), "{parts:?}");
        assert_eq!(delivered(&parts.unfinished(), header), parts.complete());
    }
}

#[test]
fn every_single_bit_that_is_wrong_stays_wrong() {
    for parts in samples() {
        let frame = parts.complete();
        assert_eq!(of(&frame), VnetHeader::default(), "{parts:?}");
        for bit in 0..frame.len() * 8 {
            let mut frame = frame.clone();
            frame[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(of(&frame), VnetHeader::default(), "bit {bit} of {parts:?}");
        }
    }
}

#[test]
fn no_checksum_is_no_unfinished_one() {
    for parts in samples() {
        assert_eq!(of(&parts.with_checksum(0)), VnetHeader::default());
    }
}

#[test]
fn a_fragment_goes_back_as_it_is() {
    let mut frame = Parts::answer().unfinished();
    // More Fragments, and a length that says so.
    frame[20] = 0x20;
    let at = Parts::answer().l4() + 4;
    frame[at..at + 2].copy_from_slice(&4000u16.to_be_bytes());
    assert!(matches!(
        walk::from_server(&frame.as_slice(), &AnyPort),
        Ok(Packet::Fragment(_))
    ));
    assert_eq!(of(&frame), VnetHeader::default());
    assert_eq!(VnetHeader::of(&frame, 1000), Err(OffloadError::NotTcp));
}

#[test]
fn what_is_no_answer_goes_back_as_it_is() {
    for frame in [&[][..], &[0; 13], &[2; 60]] {
        assert_eq!(of(frame), VnetHeader::default());
    }
}

#[test]
fn a_long_segment_is_to_be_cut() {
    for v6 in [false, true] {
        for (flags, ecn) in [(0x18, 0), (0x98, GSO_ECN)] {
            let parts = Parts {
                v6,
                tcp: Some(flags),
                data: vec![7; 5000],
                ..Parts::segment()
            };
            let expected = VnetHeader {
                gso_type: if v6 { 4 } else { 1 } | ecn,
                gso_size: 1448,
                hdr_len: parts.l4() as u16 + 24,
                ..parts.needs_checksum()
            };
            let found = VnetHeader::of(&parts.unfinished(), 1448);
            assert_eq!(found, Ok(expected));
        }
    }
}

#[test]
fn what_is_not_tcp_is_not_cut() {
    let frame = Parts::answer().unfinished();
    assert_eq!(VnetHeader::of(&frame, 500), Err(OffloadError::NotTcp));
    assert_eq!(VnetHeader::of(&[2; 60], 500), Err(OffloadError::NotTcp));
}

#[test]
fn a_tag_is_refused() {
    let frame = Parts::answer().complete();
    for tag in TAGS {
        let tagged = [&frame[..12], &tag, &[0, 5], &frame[12..]].concat();
        assert_eq!(VnetHeader::of(&tagged, 0), Err(OffloadError::Tagged));
    }
}

#[test]
fn the_header_is_as_the_kernel_reads_it() {
    let header = VnetHeader {
        flags: 1,
        gso_type: 4,
        hdr_len: 0x0102,
        gso_size: 0x0304,
        csum_start: 0x0506,
        csum_offset: 0x0708,
    };
    let words = [0x0102u16, 0x0304, 0x0506, 0x0708].map(u16::to_ne_bytes);
    assert_eq!(header.as_bytes(), [&[1, 4][..], &words.concat()].concat());
}

fn parts() -> impl Strategy<Value = Parts> {
    (
        any::<bool>(),
        0u8..=6,
        any::<Option<u8>>(),
        any::<[[u8; 16]; 2]>(),
        vec(any::<u8>(), 0..200),
    )
        .prop_map(|(v6, options, tcp, addresses, data)| Parts {
            v6,
            options,
            tcp,
            addresses,
            data,
        })
}

proptest! {
    #[test]
    fn what_was_unfinished_arrives_complete(parts in parts()) {
        let frame = parts.unfinished();
        let header = of(&frame);
        prop_assert_eq!(header, parts.needs_checksum());
        // Neither is more right than the other for a receiver, which sums it all up.
        let mut expected = parts.complete();
        let at = parts.checksum_at();
        if expected[at..at + 2] == [0, 0] {
            expected[at..at + 2].copy_from_slice(&[0xff, 0xff]);
        }
        prop_assert_eq!(delivered(&frame, header), expected);
    }

    #[test]
    fn what_was_complete_arrives_the_same(parts in parts()) {
        let frame = parts.complete();
        prop_assert_eq!(delivered(&frame, of(&frame)), frame);
    }

    #[test]
    fn only_the_pseudo_headers_sum_is_unfinished(parts in parts(), beside in 0u16..4) {
        let checksum = sum(&parts.pseudo_header()).wrapping_add(beside);
        let unfinished = beside == 0;
        let expected = if unfinished { parts.needs_checksum() } else { VnetHeader::default() };
        prop_assert_eq!(of(&parts.with_checksum(checksum)), expected);
    }

    #[test]
    fn a_header_never_points_outside_the_frame(
        frame in parts().prop_map(|parts| parts.unfinished()),
        changes in vec((any::<Index>(), any::<u8>()), 0..4),
        len: Index,
        gso_size: u16,
    ) {
        let mut frame = frame;
        for (at, value) in changes {
            let at = at.index(frame.len());
            frame[at] = value;
        }
        frame.truncate(len.index(frame.len() + 1));
        if let Ok(header) = VnetHeader::of(&frame, gso_size) {
            let checksum_end = match header.flags {
                0 => 0,
                _ => usize::from(header.csum_start) + usize::from(header.csum_offset) + 2,
            };
            prop_assert!(checksum_end <= frame.len());
            prop_assert!(usize::from(header.hdr_len) <= frame.len());
        }
    }
}
