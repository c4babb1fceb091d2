//! UDP and TCP.

use super::{
    Reader,
    ip::{Ip, Part},
};
use crate::Reason;

/// The UDP header (RFC 768).
const UDP_LEN: u32 = 8;

/// What a UDP header says about its payload.
pub(super) struct Udp {
    pub(super) src_port: u16,
    pub(super) dst_port: u16,
    pub(super) payload: u32,
    pub(super) payload_len: u32,
    len: u32,
}

/// Reads a UDP header. What it says of its length is only looked at by [`Udp::check_len`].
#[inline(always)]
pub(super) fn udp<R: Reader>(frame: &R, ip: &Ip) -> Result<Udp, Reason> {
    let Some(header) = frame.read::<{ UDP_LEN as usize }>(ip.payload) else {
        return Err(Reason::TruncatedUdp);
    };
    let len = u32::from(u16::from_be_bytes([header[4], header[5]]));
    Ok(Udp {
        src_port: u16::from_be_bytes([header[0], header[1]]),
        dst_port: u16::from_be_bytes([header[2], header[3]]),
        payload: ip.payload + UDP_LEN,
        payload_len: len.wrapping_sub(UDP_LEN),
        len,
    })
}

impl Udp {
    /// Checks that the datagram fits into the packet, or that a first fragment is but a part of
    /// it.
    #[inline(always)]
    pub(super) fn check_len(&self, ip: &Ip) -> Result<(), Reason> {
        let fits = match ip.part {
            Part::First { .. } => self.len > ip.payload_len,
            _ => self.len <= ip.payload_len,
        };
        match self.len >= UDP_LEN && ip.payload_len >= UDP_LEN && fits {
            true => Ok(()),
            false => Err(Reason::InvalidUdp),
        }
    }
}

/// No more data from the sender (RFC 9293, section 3.1).
pub const TCP_FIN: u8 = 0x01;
/// The connection's beginning (RFC 9293, section 3.1).
pub const TCP_SYN: u8 = 0x02;
/// The connection is reset (RFC 9293, section 3.1).
pub const TCP_RST: u8 = 0x04;
/// The acknowledgment number counts (RFC 9293, section 3.1).
pub const TCP_ACK: u8 = 0x10;

/// The TCP header without options (RFC 9293, section 3.1).
const TCP_LEN: u32 = 20;

/// What a TCP header says about its data.
pub(super) struct Tcp {
    pub(super) src_port: u16,
    pub(super) dst_port: u16,
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
    pub(super) payload: u32,
    pub(super) payload_len: u32,
}

/// The TCP header as it stands in a frame.
pub(super) struct TcpHeader([u8; TCP_LEN as usize]);

/// Reads a TCP header. What it says of its length is only looked at by [`TcpHeader::check`].
#[inline(always)]
pub(super) fn tcp<R: Reader>(frame: &R, ip: &Ip) -> Result<TcpHeader, Reason> {
    match frame.read(ip.payload) {
        Some(header) => Ok(TcpHeader(header)),
        None => Err(Reason::TruncatedTcp),
    }
}

impl TcpHeader {
    #[inline(always)]
    pub(super) fn src_port(&self) -> u16 {
        u16::from_be_bytes([self.0[0], self.0[1]])
    }

    #[inline(always)]
    pub(super) fn dst_port(&self) -> u16 {
        u16::from_be_bytes([self.0[2], self.0[3]])
    }

    /// Whether this is the first segment of a connection, from the side that begins it.
    #[inline(always)]
    pub(super) fn begins(&self) -> bool {
        self.0[13] & (TCP_SYN | TCP_ACK) == TCP_SYN
    }

    /// Checks that the header fits into the packet and the frame.
    #[inline(always)]
    pub(super) fn check<R: Reader>(self, frame: &R, ip: &Ip) -> Result<Tcp, Reason> {
        let Self(header) = self;
        let header_len = u32::from(header[12] >> 4) * 4;
        if header_len < TCP_LEN || header_len > ip.payload_len {
            return Err(Reason::InvalidTcp);
        }
        if frame.len() < ip.payload + header_len {
            return Err(Reason::TruncatedTcp);
        }
        Ok(Tcp {
            src_port: u16::from_be_bytes([header[0], header[1]]),
            dst_port: u16::from_be_bytes([header[2], header[3]]),
            seq: u32::from_be_bytes([header[4], header[5], header[6], header[7]]),
            ack: u32::from_be_bytes([header[8], header[9], header[10], header[11]]),
            flags: header[13],
            payload: ip.payload + header_len,
            payload_len: ip.payload_len - header_len,
        })
    }
}
