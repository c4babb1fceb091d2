//! Ethernet frames with DNS messages in them, and with everything about them that can be wrong.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};

/// A UDP datagram or TCP segment in IP in Ethernet. Lengths and checksums are worked out unless
/// given.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Where it goes on the link.
    pub mac_dst: [u8; 6],
    /// Where it comes from on the link.
    pub mac_src: [u8; 6],
    /// VLAN tags: EtherType and control information of each, outermost first.
    pub tags: Vec<(u16, u16)>,
    /// EtherType, where it is not that of the addresses' family.
    pub ethertype: Option<u16>,
    /// IPv4 options, a multiple of four bytes, 40 at most.
    pub options: Vec<u8>,
    /// IPv6 extension headers, in their order.
    pub extensions: Vec<Extension>,
    /// The fragment fields of the IP header.
    pub fragment: Option<Fragment>,
    /// IP protocol, where it is not that of `transport`.
    pub protocol: Option<u8>,
    /// Where it comes from.
    pub src: SocketAddr,
    /// Where it goes, of the same family.
    pub dst: SocketAddr,
    /// UDP or TCP.
    pub transport: Transport,
    /// The DNS message, or the data of the segment.
    pub payload: Vec<u8>,
}

/// The Ethernet address of the pod that frames go to.
pub const POD_MAC: [u8; 6] = [0x0a, 0x58, 0x0a, 0xf4, 0, 5];

/// An IPv6 extension header (RFC 8200, section 4).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Extension {
    /// Hop-by-Hop, Routing or Destination Options by its protocol number, with what its length
    /// field says: units of 8 bytes behind the first.
    Options {
        /// 0, 43 or 60.
        protocol: u8,
        /// The length field.
        len: u8,
    },
    /// The fragment header, which takes its content from [`Frame::fragment`].
    Fragment,
}

/// Fragment fields.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Fragment {
    /// The identification, the same in all fragments.
    pub id: u32,
    /// Where the piece begins, in units of 8 bytes.
    pub offset: u16,
    /// Whether more follow.
    pub more: bool,
}

/// The header behind IP.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transport {
    /// UDP.
    Udp {
        /// The length in the header, if it is a wrong one.
        len: Option<u16>,
    },
    /// TCP.
    Tcp {
        /// The sequence number.
        seq: u32,
        /// The acknowledgment number.
        ack: u32,
        /// The control bits.
        flags: u8,
        /// Words of options.
        options: u8,
    },
    /// None: the payload is the middle of something.
    Nothing,
}

impl Frame {
    /// A UDP datagram from a cluster's DNS Service to a pod.
    pub fn to_pod(payload: Vec<u8>) -> Self {
        Self {
            mac_dst: POD_MAC,
            mac_src: [0x0a, 0x58, 0x0a, 0xf4, 0, 1],
            tags: Vec::new(),
            ethertype: None,
            options: Vec::new(),
            extensions: Vec::new(),
            fragment: None,
            protocol: None,
            src: (Ipv4Addr::new(10, 96, 0, 10), 53).into(),
            dst: (Ipv4Addr::new(10, 244, 0, 5), 40_000).into(),
            transport: Transport::Udp { len: None },
            payload,
        }
    }

    /// The same with IPv6 addresses.
    pub fn to_pod_v6(payload: Vec<u8>) -> Self {
        Self::to_pod(payload).over_v6()
    }

    /// A UDP datagram from that pod to that Service.
    pub fn from_pod(payload: Vec<u8>) -> Self {
        Self::to_pod(payload).turned()
    }

    /// The frame with the addresses of `fd00::/16` that end as its own do.
    pub fn over_v6(mut self) -> Self {
        for address in [&mut self.src, &mut self.dst] {
            if let SocketAddr::V4(v4) = *address {
                let [a, b, c, d] = v4.ip().octets();
                let v6 = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d].into();
                *address = SocketAddrV6::new(v6, v4.port(), 0, 0).into();
            }
        }
        self
    }

    /// The frame in the other direction.
    pub fn turned(mut self) -> Self {
        std::mem::swap(&mut self.src, &mut self.dst);
        std::mem::swap(&mut self.mac_src, &mut self.mac_dst);
        self
    }

    /// The bytes of the frame, without FCS.
    ///
    /// # Panics
    ///
    /// Where the families differ, the options are no multiple of four bytes, or something does not
    /// fit its length field.
    pub fn build(&self) -> Vec<u8> {
        let mut frame = [self.mac_dst, self.mac_src].concat();
        for (ethertype, tci) in &self.tags {
            frame.extend(ethertype.to_be_bytes());
            frame.extend(tci.to_be_bytes());
        }
        let (ethertype, ip) = match (self.src.ip(), self.dst.ip()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => (0x0800, self.ipv4(src.octets(), dst.octets())),
            (IpAddr::V6(src), IpAddr::V6(dst)) => (0x86dd, self.ipv6(src.octets(), dst.octets())),
            (src, dst) => panic!("{src} and {dst} are of different families"),
        };
        frame.extend(self.ethertype.unwrap_or(ethertype).to_be_bytes());
        frame.extend(ip);
        frame
    }

    fn ipv4(&self, src: [u8; 4], dst: [u8; 4]) -> Vec<u8> {
        assert!(self.options.len() <= 40 && self.options.len().is_multiple_of(4));
        let transport = self.transport([src, dst].concat());
        let header_len = 20 + self.options.len();
        let total_len = u16::try_from(header_len + transport.len()).expect("fits the total length");
        let mut ip = vec![0x40 | (header_len / 4) as u8, 0];
        ip.extend(total_len.to_be_bytes());
        let fragment = self.fragment.unwrap_or(Fragment {
            id: 1,
            offset: 0,
            more: false,
        });
        ip.extend((fragment.id as u16).to_be_bytes());
        let more = if fragment.more { 0x2000 } else { 0 };
        ip.extend((fragment.offset | more).to_be_bytes());
        ip.extend([64, self.protocol(), 0, 0]);
        ip.extend(src);
        ip.extend(dst);
        ip.extend(&self.options);
        let sum = checksum(&ip, 0);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        ip.extend(transport);
        ip
    }

    fn ipv6(&self, src: [u8; 16], dst: [u8; 16]) -> Vec<u8> {
        let mut payload = Vec::new();
        let protocols = self.extensions.iter().map(|extension| match extension {
            Extension::Options { protocol, .. } => *protocol,
            Extension::Fragment => 44,
        });
        let mut nexts = protocols.chain([self.protocol()]);
        let first = nexts.next().expect("the transport at least");
        for (extension, next) in self.extensions.iter().zip(nexts) {
            match extension {
                Extension::Options { len, .. } => {
                    // PadN over all of it (RFC 8200, section 4.2).
                    payload.extend([next, *len, 1, 4, 0, 0, 0, 0]);
                    payload.resize(payload.len() + usize::from(*len) * 8, 0);
                }
                Extension::Fragment => {
                    let fragment = self.fragment.unwrap_or(Fragment {
                        id: 1,
                        offset: 0,
                        more: false,
                    });
                    payload.extend([next, 0]);
                    let offset = fragment.offset << 3 | u16::from(fragment.more);
                    payload.extend(offset.to_be_bytes());
                    payload.extend(fragment.id.to_be_bytes());
                }
            }
        }
        payload.extend(self.transport([src, dst].concat()));
        let len = u16::try_from(payload.len()).expect("fits the payload length");
        let mut ip = vec![0x60, 0, 0, 0];
        ip.extend(len.to_be_bytes());
        ip.extend([first, 64]);
        ip.extend(src);
        ip.extend(dst);
        ip.extend(payload);
        ip
    }

    fn protocol(&self) -> u8 {
        self.protocol.unwrap_or(match self.transport {
            Transport::Udp { .. } | Transport::Nothing => 17,
            Transport::Tcp { .. } => 6,
        })
    }

    fn transport(&self, addresses: Vec<u8>) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.src.port().to_be_bytes());
        bytes.extend(self.dst.port().to_be_bytes());
        let checksum_at = match self.transport {
            Transport::Nothing => return self.payload.clone(),
            Transport::Udp { len } => {
                let whole = u16::try_from(8 + self.payload.len()).expect("fits UDP's length");
                bytes.extend(len.unwrap_or(whole).to_be_bytes());
                bytes.extend([0, 0]);
                6
            }
            Transport::Tcp {
                seq,
                ack,
                flags,
                options,
            } => {
                bytes.extend(seq.to_be_bytes());
                bytes.extend(ack.to_be_bytes());
                bytes.extend([(5 + options) << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
                // No-Operation (RFC 9293, section 3.2).
                bytes.resize(bytes.len() + usize::from(options) * 4, 1);
                16
            }
        };
        bytes.extend(&self.payload);
        // The pseudo header: addresses, protocol, length (RFC 768; RFC 8200, section 8.1).
        let pseudo = sum_words(&addresses) + u32::from(self.protocol()) + bytes.len() as u32;
        let sum = match checksum(&bytes, pseudo) {
            0 => 0xffff,
            sum => sum,
        };
        bytes[checksum_at..checksum_at + 2].copy_from_slice(&sum.to_be_bytes());
        bytes
    }
}

fn sum_words(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
        .sum()
}

/// The internet checksum (RFC 1071).
fn checksum(bytes: &[u8], start: u32) -> u16 {
    let mut sum = start + sum_words(bytes);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// A DNS message that answers one question of type A.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The transaction id.
    pub id: u16,
    /// The third and fourth byte; 0x8180 is a response without error, recursion available.
    pub flags: u16,
    /// The name asked for, without its final dot.
    pub name: String,
    /// The time to live of each record, in seconds.
    pub ttl_s: u32,
    /// The addresses that the answer gives.
    pub addresses: Vec<Ipv4Addr>,
}

/// A query of type A, as it is asked before an [`Answer`].
pub fn query(id: u16, name: &str) -> Vec<u8> {
    let answer = Answer {
        id,
        flags: 0x0100,
        ..Answer::new(name, &[])
    };
    answer.build()
}

impl Answer {
    /// `name` is at `addresses`, for a minute.
    pub fn new(name: &str, addresses: &[Ipv4Addr]) -> Self {
        Self {
            id: 0x1234,
            flags: 0x8180,
            name: name.to_owned(),
            ttl_s: 60,
            addresses: addresses.to_vec(),
        }
    }

    /// The message's bytes (RFC 1035, section 4).
    ///
    /// # Panics
    ///
    /// Where a label has more than 63 bytes.
    pub fn build(&self) -> Vec<u8> {
        let mut message = Vec::new();
        for word in [self.id, self.flags, 1, self.addresses.len() as u16, 0, 0] {
            message.extend(word.to_be_bytes());
        }
        for label in self.name.split('.') {
            assert!(label.len() < 64, "{label}");
            message.push(label.len() as u8);
            message.extend(label.as_bytes());
        }
        message.extend([0, 0, 1, 0, 1]);
        for address in &self.addresses {
            // The name is a pointer to the question's, at offset 12; type A, class IN.
            message.extend([0xc0, 12, 0, 1, 0, 1]);
            message.extend(self.ttl_s.to_be_bytes());
            message.extend([0, 4]);
            message.extend(address.octets());
        }
        message
    }
}
