//! The way from a frame's first byte to its DNS message: Ethernet, IPv4, UDP, DNS header.
//!
//! The BPF program runs it to decide what to capture, the agent runs it on what was captured;
//! being one piece of code, the two cannot disagree. It looks at headers only, never allocates,
//! never panics, and reads nothing that lies outside the frame.

use core::net::Ipv4Addr;

use crate::Reason;

/// A frame that can be read piece by piece, wherever its bytes are kept.
pub trait Reader {
    /// The frame's length in bytes.
    fn len(&self) -> u32;

    /// The `N` bytes at `offset`, or `None` where the frame ends before.
    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;

    /// Whether the frame has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Reader for &[u8] {
    fn len(&self) -> u32 {
        u32::try_from((**self).len()).unwrap_or(u32::MAX)
    }

    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let offset = usize::try_from(offset).ok()?;
        self.get(offset..)?.first_chunk().copied()
    }
}

/// The UDP ports that DNS servers answer from.
pub trait ServerPorts {
    /// Whether `port` is one of them.
    fn contains(&self, port: u16) -> bool;
}

/// How many ports [`Ports`] holds.
pub const PORTS_MAX: usize = 8;

/// A list of ports that fits into a constant of the BPF program.
///
/// Unused places are zero, which is no port of a server (RFC 6335, section 6: reserved).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ports([u16; PORTS_MAX]);

impl Ports {
    /// Port 53 (RFC 1035, section 4.2.1).
    pub const DNS: Self = Self([53, 0, 0, 0, 0, 0, 0, 0]);

    /// These ports; `None` when there are more than [`PORTS_MAX`], none, or a zero among them.
    pub fn new(ports: &[u16]) -> Option<Self> {
        if ports.is_empty() || ports.contains(&0) {
            return None;
        }
        let mut all = [0; PORTS_MAX];
        all.get_mut(..ports.len())?.copy_from_slice(ports);
        Some(Self(all))
    }

    /// All places, the unused ones zero, in native byte order.
    pub const fn as_array(&self) -> &[u16; PORTS_MAX] {
        &self.0
    }

    /// The ports in these places, as [`Ports::as_array`] gave them.
    pub const fn from_array(ports: [u16; PORTS_MAX]) -> Self {
        Self(ports)
    }
}

impl ServerPorts for Ports {
    #[inline(always)]
    fn contains(&self, port: u16) -> bool {
        port != 0 && self.0.contains(&port)
    }
}

/// Source and destination address of one family.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Addresses {
    /// IPv4.
    V4 {
        /// Where the packet comes from.
        src: Ipv4Addr,
        /// Where the packet goes.
        dst: Ipv4Addr,
    },
}

/// A DNS message within a frame. Offsets count from the frame's first byte.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Message {
    /// The addresses of the IP header.
    pub addresses: Addresses,
    /// The UDP source port.
    pub src_port: u16,
    /// The UDP destination port.
    pub dst_port: u16,
    /// Where the IP header begins.
    pub l3: u32,
    /// Where the UDP header begins.
    pub l4: u32,
    /// Where the DNS message begins.
    pub payload: u32,
    /// The DNS message's length as the headers say; where a frame was cut, more than is there.
    pub payload_len: u32,
}

impl Message {
    /// The DNS message in `frame`, the frame that was walked; `None` where the frame was cut
    /// before the message's end.
    pub fn payload_of<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8]> {
        let start = usize::try_from(self.payload).ok()?;
        let len = usize::try_from(self.payload_len).ok()?;
        frame.get(start..)?.get(..len)
    }
}

/// Finds the DNS answer in a frame: a response to a standard query, without error, with at least
/// one record in its answer section, from one of `ports`.
///
/// Anything else gives the reason. Checksums are not looked at: with offloads, they are only
/// completed by the receiver.
#[inline(always)]
pub fn dns_answer<R: Reader, P: ServerPorts>(frame: &R, ports: &P) -> Result<Message, Reason> {
    let l3 = ethernet(frame)?;
    let ip = ipv4(frame, l3)?;
    let udp = udp(frame, &ip, ports)?;
    response(frame, &udp)?;
    Ok(Message {
        addresses: ip.addresses,
        src_port: udp.src_port,
        dst_port: udp.dst_port,
        l3,
        l4: ip.payload,
        payload: udp.payload,
        payload_len: udp.payload_len,
    })
}

/// What an IP header says about its payload.
struct Ip {
    addresses: Addresses,
    payload: u32,
    payload_len: u32,
}

/// What a UDP header says about its payload.
struct Udp {
    src_port: u16,
    dst_port: u16,
    payload: u32,
    payload_len: u32,
}

/// EtherType of IPv4 (IEEE 802 numbers, IANA).
const ETHERTYPE_IPV4: u16 = 0x0800;
/// Destination, source, EtherType (IEEE 802.3).
const ETHERNET_LEN: u32 = 14;

/// Reads the Ethernet header; returns where the IPv4 header begins.
#[inline(always)]
fn ethernet<R: Reader>(frame: &R) -> Result<u32, Reason> {
    let Some(header) = frame.read::<{ ETHERNET_LEN as usize }>(0) else {
        return Err(Reason::TruncatedEthernet);
    };
    match u16::from_be_bytes([header[12], header[13]]) {
        ETHERTYPE_IPV4 => Ok(ETHERNET_LEN),
        _ => Err(Reason::NotIpv4),
    }
}

/// The IPv4 header without options (RFC 791, section 3.1).
const IPV4_LEN: u32 = 20;
/// More Fragments, and the fragment offset (RFC 791, section 3.1).
const IPV4_FRAGMENT: u16 = 0x3fff;
/// IP protocol 17 (RFC 768).
const PROTOCOL_UDP: u8 = 17;

/// Reads an IPv4 header that must carry UDP.
#[inline(always)]
fn ipv4<R: Reader>(frame: &R, l3: u32) -> Result<Ip, Reason> {
    let Some(header) = frame.read::<{ IPV4_LEN as usize }>(l3) else {
        return Err(Reason::TruncatedIpv4);
    };
    let header_len = u32::from(header[0] & 0x0f) * 4;
    let total_len = u32::from(u16::from_be_bytes([header[2], header[3]]));
    if header[0] >> 4 != 4 || header_len < IPV4_LEN || total_len < header_len {
        return Err(Reason::InvalidIpv4);
    }
    if header[9] != PROTOCOL_UDP {
        return Err(Reason::NotUdp);
    }
    if u16::from_be_bytes([header[6], header[7]]) & IPV4_FRAGMENT != 0 {
        return Err(Reason::Fragment);
    }
    if frame.len() < l3 + header_len {
        return Err(Reason::TruncatedIpv4);
    }
    Ok(Ip {
        addresses: Addresses::V4 {
            src: Ipv4Addr::new(header[12], header[13], header[14], header[15]),
            dst: Ipv4Addr::new(header[16], header[17], header[18], header[19]),
        },
        payload: l3 + header_len,
        payload_len: total_len - header_len,
    })
}

/// The UDP header (RFC 768).
const UDP_LEN: u32 = 8;

/// Reads a UDP header that must come from one of `ports`.
#[inline(always)]
fn udp<R: Reader, P: ServerPorts>(frame: &R, ip: &Ip, ports: &P) -> Result<Udp, Reason> {
    let Some(header) = frame.read::<{ UDP_LEN as usize }>(ip.payload) else {
        return Err(Reason::TruncatedUdp);
    };
    let src_port = u16::from_be_bytes([header[0], header[1]]);
    if !ports.contains(src_port) {
        return Err(Reason::OtherPort);
    }
    let len = u32::from(u16::from_be_bytes([header[4], header[5]]));
    if len < UDP_LEN || len > ip.payload_len {
        return Err(Reason::InvalidUdp);
    }
    Ok(Udp {
        src_port,
        dst_port: u16::from_be_bytes([header[2], header[3]]),
        payload: ip.payload + UDP_LEN,
        payload_len: len - UDP_LEN,
    })
}

/// The DNS header (RFC 1035, section 4.1.1).
const DNS_LEN: u32 = 12;
/// QR in the third byte: a response.
const DNS_QR: u8 = 0x80;
/// The opcode in the third byte; QUERY is 0.
const DNS_OPCODE: u8 = 0x78;
/// The response code in the fourth byte; NOERROR is 0.
const DNS_RCODE: u8 = 0x0f;

/// Checks that a DNS header is that of an answer.
#[inline(always)]
fn response<R: Reader>(frame: &R, udp: &Udp) -> Result<(), Reason> {
    if udp.payload_len < DNS_LEN {
        return Err(Reason::TruncatedDns);
    }
    let Some(header) = frame.read::<{ DNS_LEN as usize }>(udp.payload) else {
        return Err(Reason::TruncatedDns);
    };
    if header[2] & DNS_QR == 0 {
        return Err(Reason::NotResponse);
    }
    if header[2] & DNS_OPCODE != 0 {
        return Err(Reason::Opcode);
    }
    if header[3] & DNS_RCODE != 0 {
        return Err(Reason::Rcode);
    }
    if u16::from_be_bytes([header[6], header[7]]) == 0 {
        return Err(Reason::NoAnswers);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
