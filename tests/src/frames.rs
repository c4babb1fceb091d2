//! Ethernet frames with DNS answers in them, and with everything about them that can be wrong.

use std::net::{Ipv4Addr, SocketAddrV4};

/// A UDP packet in IPv4 in Ethernet. Lengths and checksums are worked out unless given.
#[derive(Clone, Debug)]
pub struct UdpFrame {
    /// EtherType; 0x0800 is IPv4.
    pub ethertype: u16,
    /// IPv4 options, a multiple of four bytes, 40 at most.
    pub options: Vec<u8>,
    /// IPv4 flags and fragment offset; 0x2000 is More Fragments.
    pub fragment: u16,
    /// IP protocol; 17 is UDP.
    pub protocol: u8,
    /// Where it comes from.
    pub src: SocketAddrV4,
    /// Where it goes.
    pub dst: SocketAddrV4,
    /// What the UDP header says of its length, where that is not the truth.
    pub udp_len: Option<u16>,
    /// The DNS message.
    pub payload: Vec<u8>,
}

impl UdpFrame {
    /// From a cluster's DNS Service to a pod.
    pub fn to_pod(payload: Vec<u8>) -> Self {
        Self {
            ethertype: 0x0800,
            options: Vec::new(),
            fragment: 0,
            protocol: 17,
            src: SocketAddrV4::new(Ipv4Addr::new(10, 96, 0, 10), 53),
            dst: SocketAddrV4::new(Ipv4Addr::new(10, 244, 0, 5), 40_000),
            udp_len: None,
            payload,
        }
    }

    /// The bytes of the frame, without FCS.
    ///
    /// # Panics
    ///
    /// Where the options are no multiple of four bytes, or something does not fit its length
    /// field.
    pub fn build(&self) -> Vec<u8> {
        assert!(self.options.len() <= 40 && self.options.len().is_multiple_of(4));
        let udp_len = 8 + self.payload.len();
        let ip_len = 20 + self.options.len();
        let total_len = u16::try_from(ip_len + udp_len).expect("fits IPv4's total length");

        let mut ip = vec![0x40 | (ip_len / 4) as u8, 0];
        ip.extend(total_len.to_be_bytes());
        ip.extend([0, 1]);
        ip.extend(self.fragment.to_be_bytes());
        ip.extend([64, self.protocol, 0, 0]);
        ip.extend(self.src.ip().octets());
        ip.extend(self.dst.ip().octets());
        ip.extend(&self.options);
        let sum = checksum(&ip, 0);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());

        let mut udp = Vec::with_capacity(udp_len);
        udp.extend(self.src.port().to_be_bytes());
        udp.extend(self.dst.port().to_be_bytes());
        udp.extend(self.udp_len.unwrap_or(udp_len as u16).to_be_bytes());
        udp.extend([0, 0]);
        udp.extend(&self.payload);
        // The pseudo header of RFC 768: addresses, protocol, length.
        let pseudo = sum_words(&ip[12..20]) + u32::from(self.protocol) + udp_len as u32;
        let sum = match checksum(&udp, pseudo) {
            0 => 0xffff,
            sum => sum,
        };
        udp[6..8].copy_from_slice(&sum.to_be_bytes());

        let mut frame = vec![0x0a, 0x58, 0x0a, 0xf4, 0, 5, 0x0a, 0x58, 0x0a, 0xf4, 0, 1];
        frame.extend(self.ethertype.to_be_bytes());
        frame.extend(ip);
        frame.extend(udp);
        frame
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
