//! The offloads of a frame: its sender left the checksum, or the cutting of a long segment, to devices on the way.
//!
//! A sender that leaves the checksum of UDP or TCP to a device writes the sum of the pseudo header into its field,
//! folded but not complemented (`udp4_hwcsum` in Linux net/ipv4/udp.c, `__tcp_v4_send_check` in net/ipv4/tcp_ipv4.c,
//! and their IPv6 counterparts). The device adds the rest when the packet leaves the machine, if it does. A copy of
//! such a frame is valid only with this offload in its header.
//!
//! Any other frame goes back unchanged. A wrong checksum stays wrong: the agent does not repair damage of the
//! network. One wrong checksum in 65,536 looks like such a sum, as many as its receiver would accept as right. A
//! right checksum that looks so stays right: if it is completed, the result is the same.

use std::net::IpAddr;

use dnsflow_common::walk::{self, Addresses, IpHeader, Packet, ServerPorts, Version};
use zerocopy::{Immutable, IntoBytes};

/// EtherTypes of VLAN tags (IEEE 802.1Q, table 9-1).
const TAGS: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];
/// IP protocol 6 (RFC 9293).
const PROTOCOL_TCP: u8 = 6;
/// IP protocol 17 (RFC 768).
const PROTOCOL_UDP: u8 = 17;
/// The UDP header, whose length counts the DNS message's (RFC 768).
const UDP_LEN: u32 = 8;
/// Where the UDP header has its checksum (RFC 768).
const UDP_CHECKSUM_AT: u16 = 6;
/// Where the TCP header has its checksum (RFC 9293, section 3.1).
const TCP_CHECKSUM_AT: u16 = 16;
/// Congestion Window Reduced (RFC 3168, section 6.1).
const TCP_CWR: u8 = 0x80;

// Linux include/uapi/linux/virtio_net.h.
const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
/// Of the smaller segments, only the first has the CWR bit.
const GSO_ECN: u8 = 0x80;

/// `struct virtio_net_hdr` (Linux include/uapi/linux/virtio_net.h), as a packet socket takes it in
/// front of a frame: in native byte order (`vio_le` in Linux net/packet/af_packet.c), offsets
/// from the frame's first byte.
#[derive(Clone, Copy, Debug, Default, Eq, Immutable, IntoBytes, PartialEq)]
#[repr(C)]
pub(super) struct VnetHeader {
    flags: u8,
    gso_type: u8,
    /// The length of all headers.
    hdr_len: u16,
    /// How many bytes of data each smaller segment gets.
    gso_size: u16,
    /// From where on the checksum counts.
    csum_start: u16,
    /// Where behind that it stands.
    csum_offset: u16,
}

/// Why a frame cannot be described.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum OffloadError {
    /// It has a VLAN tag.
    Tagged,
    /// It is to be cut, but is not TCP.
    NotTcp,
}

/// Whatever was held came from a DNS server; which port that is was looked at then.
struct AnyPort;

impl ServerPorts for AnyPort {
    fn contains(&self, _port: u16) -> bool {
        true
    }
}

/// A UDP datagram or TCP segment, and what the pseudo header says of it.
struct Transport {
    ip: IpHeader,
    protocol: u8,
    /// Where it begins.
    l4: u32,
    len: u32,
    checksum_at: u16,
}

impl VnetHeader {
    /// Describes a frame. `gso_size` is not zero for a segment that is to be cut.
    pub(super) fn of(frame: &[u8], gso_size: u16) -> Result<Self, OffloadError> {
        if TAGS.iter().any(|tag| frame.get(12..14) == Some(tag)) {
            return Err(OffloadError::Tagged);
        }
        let (transport, mut header) = match walk::from_server(&frame, &AnyPort) {
            Ok(Packet::TcpSegment(segment)) => {
                let transport = Transport {
                    ip: segment.ip,
                    protocol: PROTOCOL_TCP,
                    l4: segment.l4,
                    len: segment.payload - segment.l4 + segment.payload_len,
                    checksum_at: TCP_CHECKSUM_AT,
                };
                (transport, Self::segmented(&segment, gso_size))
            }
            _ if gso_size > 0 => return Err(OffloadError::NotTcp),
            Ok(Packet::UdpAnswer(message)) => {
                let transport = Transport {
                    ip: message.ip,
                    protocol: PROTOCOL_UDP,
                    l4: message.l4,
                    len: UDP_LEN + message.payload_len,
                    checksum_at: UDP_CHECKSUM_AT,
                };
                (transport, Self::default())
            }
            // A checksum covers all fragments: it is complete before there are any.
            Ok(Packet::Fragment(_)) | Err(_) => return Ok(Self::default()),
        };
        if transport.is_unfinished(frame)
            && let Ok(l4) = u16::try_from(transport.l4)
        {
            header.flags = NEEDS_CSUM;
            header.csum_start = l4;
            header.csum_offset = transport.checksum_at;
        }
        Ok(header)
    }

    fn segmented(segment: &walk::Segment, gso_size: u16) -> Self {
        let Some(hdr_len) = u16::try_from(segment.payload).ok().filter(|_| gso_size > 0) else {
            return Self::default();
        };
        let version = match segment.ip.version {
            Version::V4 => GSO_TCPV4,
            Version::V6 => GSO_TCPV6,
        };
        let ecn = match segment.flags & TCP_CWR {
            0 => 0,
            _ => GSO_ECN,
        };
        Self {
            gso_type: version | ecn,
            hdr_len,
            gso_size,
            ..Self::default()
        }
    }
}

impl Transport {
    /// Whether the checksum is but the pseudo header's sum.
    fn is_unfinished(&self, frame: &[u8]) -> bool {
        let field = usize::try_from(self.l4)
            .ok()
            .and_then(|l4| frame.get(l4 + usize::from(self.checksum_at)..))
            .and_then(<[u8]>::first_chunk)
            .map(|field| u16::from_be_bytes(*field));
        field.is_some() && field == self.pseudo_header_sum(frame)
    }

    /// The sum of the pseudo header (RFC 768; RFC 9293, section 3.1; RFC 8200, section 8.1), folded
    /// to 16 bits (RFC 1071). Never zero, as the protocol is not.
    fn pseudo_header_sum(&self, frame: &[u8]) -> Option<u16> {
        let Addresses { src, dst } = self.ip.addresses(&frame)?;
        let mut sum = sum_of(src) + sum_of(dst) + u32::from(self.protocol) + self.len;
        while let high @ 1.. = sum >> 16 {
            sum = (sum & 0xffff) + high;
        }
        u16::try_from(sum).ok()
    }
}

/// The sum of an address's 16-bit words.
fn sum_of(address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(v4) => {
            let bits = v4.to_bits();
            (bits >> 16) + (bits & 0xffff)
        }
        IpAddr::V6(v6) => v6.segments().into_iter().map(u32::from).sum(),
    }
}

#[cfg(test)]
mod tests;
