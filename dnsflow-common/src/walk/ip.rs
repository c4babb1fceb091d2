//! IPv4 with options, IPv6 with extension headers, and what both say about fragments.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Reader;
use crate::Reason;

/// IP protocol 6 (RFC 9293).
pub const PROTOCOL_TCP: u8 = 6;
/// IP protocol 17 (RFC 768).
pub const PROTOCOL_UDP: u8 = 17;

/// The version of an IP header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u16)]
pub enum Version {
    /// IPv4.
    V4 = 4,
    /// IPv6.
    V6 = 6,
}

/// Where an IP header is. The addresses stay in it until somebody asks: the BPF programs' stack is
/// short, and most packets are not looked at that far.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct IpHeader {
    /// The version.
    pub version: Version,
    /// Where the header begins.
    pub l3: u32,
}

/// Source and destination address of a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Addresses {
    /// Where it comes from.
    pub src: IpAddr,
    /// Where it goes.
    pub dst: IpAddr,
}

impl IpHeader {
    /// The addresses, from the frame that was walked; `None` where it ends before.
    pub fn addresses<R: Reader>(&self, frame: &R) -> Option<Addresses> {
        Some(match self.version {
            Version::V4 => Addresses {
                src: Ipv4Addr::from(frame.read::<4>(self.src())?).into(),
                dst: Ipv4Addr::from(frame.read::<4>(self.dst())?).into(),
            },
            Version::V6 => Addresses {
                src: Ipv6Addr::from(frame.read::<16>(self.src())?).into(),
                dst: Ipv6Addr::from(frame.read::<16>(self.dst())?).into(),
            },
        })
    }

    /// Where the source address begins.
    #[inline(always)]
    pub(crate) const fn src(&self) -> u32 {
        self.l3
            + match self.version {
                Version::V4 => 12,
                Version::V6 => 8,
            }
    }

    /// Where the destination address begins.
    #[inline(always)]
    pub(crate) const fn dst(&self) -> u32 {
        self.l3
            + match self.version {
                Version::V4 => 16,
                Version::V6 => 24,
            }
    }
}

/// What the IP headers say about their payload.
pub(super) struct Ip {
    pub(super) header: IpHeader,
    /// What the payload is; of a later fragment, what the fragmented payload begins with.
    pub(super) protocol: u8,
    /// Where the payload begins, behind all options and extension headers.
    pub(super) payload: u32,
    pub(super) payload_len: u32,
    pub(super) part: Part,
}

/// Which part of a packet this is.
#[derive(Clone, Copy)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// The first fragment, which has the headers of the payload.
    First {
        id: u32,
        /// Where what was fragmented begins.
        payload: u32,
    },
    /// Another one, which has no header.
    Later {
        id: u32,
        /// In bytes.
        offset: u32,
        more: bool,
        /// Where the piece begins.
        payload: u32,
    },
}

impl Part {
    #[inline(always)]
    fn new(id: u32, offset: u32, more: bool, payload: u32) -> Self {
        match (offset, more) {
            (0, false) => Self::Whole,
            (0, true) => Self::First { id, payload },
            _ => Self::Later {
                id,
                offset,
                more,
                payload,
            },
        }
    }
}

/// The IPv4 header without options (RFC 791, section 3.1).
const IPV4_LEN: u32 = 20;
/// More Fragments (RFC 791, section 3.1).
const IPV4_MORE: u16 = 0x2000;
/// The fragment offset in units of 8 bytes (RFC 791, section 3.1).
const IPV4_OFFSET: u16 = 0x1fff;

/// Reads an IPv4 header that must carry UDP or TCP.
#[inline(always)]
pub(super) fn ipv4<R: Reader>(frame: &R, l3: u32) -> Result<Ip, Reason> {
    if frame.len() < l3 + IPV4_LEN {
        return Err(Reason::TruncatedIpv4);
    }
    // Up to the protocol: checksum and addresses are not needed here.
    let Some(header) = frame.read::<10>(l3) else {
        return Err(Reason::TruncatedIpv4);
    };
    let header_len = u32::from(header[0] & 0x0f) * 4;
    let total_len = u32::from(u16::from_be_bytes([header[2], header[3]]));
    if header[0] >> 4 != 4 || header_len < IPV4_LEN || total_len < header_len {
        return Err(Reason::InvalidIpv4);
    }
    let protocol = header[9];
    if !matches!(protocol, PROTOCOL_UDP | PROTOCOL_TCP) {
        return Err(Reason::OtherProtocol);
    }
    let payload = l3 + header_len;
    if frame.len() < payload {
        return Err(Reason::TruncatedIpv4);
    }
    let fragment = u16::from_be_bytes([header[6], header[7]]);
    Ok(Ip {
        header: IpHeader {
            version: Version::V4,
            l3,
        },
        protocol,
        payload,
        payload_len: total_len - header_len,
        part: Part::new(
            u16::from_be_bytes([header[4], header[5]]).into(),
            u32::from(fragment & IPV4_OFFSET) * 8,
            fragment & IPV4_MORE != 0,
            payload,
        ),
    })
}

/// The IPv6 header (RFC 8200, section 3).
const IPV6_LEN: u32 = 40;
/// The shortest extension header, and the unit of their lengths (RFC 8200, section 4.2).
const EXTENSION_LEN: u32 = 8;
/// Hop-by-Hop Options (RFC 8200, section 4.3).
const NEXT_HOP_BY_HOP: u8 = 0;
/// Routing (RFC 8200, section 4.4).
const NEXT_ROUTING: u8 = 43;
/// Fragment (RFC 8200, section 4.5).
const NEXT_FRAGMENT: u8 = 44;
/// Destination Options (RFC 8200, section 4.6).
const NEXT_DESTINATION: u8 = 60;

/// How many extension headers are walked. RFC 8200, section 4.1, recommends an order with five of
/// those that are known here.
pub const EXTENSIONS_MAX: u32 = 6;

/// Reads an IPv6 header and the extension headers behind it, which must lead to UDP or TCP.
#[inline(always)]
pub(super) fn ipv6<R: Reader>(frame: &R, l3: u32) -> Result<Ip, Reason> {
    if frame.len() < l3 + IPV6_LEN {
        return Err(Reason::TruncatedIpv6);
    }
    // Up to the next header: hop limit and addresses are not needed here.
    let Some(header) = frame.read::<7>(l3) else {
        return Err(Reason::TruncatedIpv6);
    };
    if header[0] >> 4 != 6 {
        return Err(Reason::InvalidIpv6);
    }
    let mut ip = Ip {
        header: IpHeader {
            version: Version::V6,
            l3,
        },
        protocol: header[6],
        payload: l3 + IPV6_LEN,
        payload_len: u16::from_be_bytes([header[4], header[5]]).into(),
        part: Part::Whole,
    };
    for _ in 0..EXTENSIONS_MAX {
        if !is_extension(ip.protocol) {
            break;
        }
        extension(frame, &mut ip)?;
        if matches!(ip.part, Part::Later { .. }) {
            // What follows is the middle of something. Of UDP, it can be, behind options.
            return match ip.protocol {
                PROTOCOL_UDP | PROTOCOL_TCP | NEXT_DESTINATION => Ok(ip),
                _ => Err(Reason::OtherProtocol),
            };
        }
    }
    match ip.protocol {
        PROTOCOL_UDP | PROTOCOL_TCP => Ok(ip),
        protocol if is_extension(protocol) => Err(Reason::TooManyExtensions),
        _ => Err(Reason::OtherProtocol),
    }
}

#[inline(always)]
fn is_extension(protocol: u8) -> bool {
    matches!(
        protocol,
        NEXT_HOP_BY_HOP | NEXT_ROUTING | NEXT_FRAGMENT | NEXT_DESTINATION
    )
}

/// Reads one extension header.
#[inline(always)]
fn extension<R: Reader>(frame: &R, ip: &mut Ip) -> Result<(), Reason> {
    let Some(header) = frame.read::<{ EXTENSION_LEN as usize }>(ip.payload) else {
        return Err(Reason::TruncatedExtension);
    };
    let is_fragment = ip.protocol == NEXT_FRAGMENT;
    // The length does not count the first 8 bytes; the fragment header has none.
    let len = match is_fragment {
        true => EXTENSION_LEN,
        false => EXTENSION_LEN + u32::from(header[1]) * 8,
    };
    if len > ip.payload_len {
        return Err(Reason::InvalidIpv6);
    }
    ip.protocol = header[0];
    ip.payload += len;
    ip.payload_len -= len;
    if frame.len() < ip.payload {
        return Err(Reason::TruncatedExtension);
    }
    if is_fragment {
        // A second fragment header would make a fragment of a fragment, which nothing sends.
        if !matches!(ip.part, Part::Whole) {
            return Err(Reason::InvalidIpv6);
        }
        let offset = u16::from_be_bytes([header[2], header[3]]);
        ip.part = Part::new(
            u32::from_be_bytes([header[4], header[5], header[6], header[7]]),
            // The upper 13 bits, in units of 8 bytes: in place, they are the bytes.
            u32::from(offset & !7),
            offset & 1 != 0,
            ip.payload,
        );
    }
    Ok(())
}
