//! The result of the packet walk, written to a map and read back.
//!
//! The walk has hundreds of paths to its end. The verifier follows each path through all code behind the
//! walk, as long as the paths leave different values in the registers. The verifier knows nothing of a
//! value that is read back from a map. There, all paths become one.

use core::ptr;

use dnsflow_common::{
    Reason,
    walk::{
        Attempt, IpHeader, Message, PROTOCOL_TCP, PROTOCOL_UDP, Packet, Segment, Sent, TCP_ACK,
        TCP_SYN, Tags, Version,
    },
};

use crate::maps;

/// What a packet is.
#[derive(Clone, Copy, Eq, PartialEq)]
pub enum Kind {
    /// A query, an answer, or the first fragment of an answer.
    Message,
    /// A later fragment of an answer.
    Later,
    /// A TCP segment.
    Segment,
    /// What may begin a connection to something else than a DNS server.
    Attempt,
}

/// A packet that was walked. Offsets count from the frame's first byte.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Found {
    kind: u32,
    version: u32,
    l3: u32,
    /// The DNS message.
    pub message: u32,
    /// The length of the DNS message in bytes, as the headers say.
    pub message_len: u32,
    /// The source port.
    pub src_port: u16,
    /// The destination port.
    pub dst_port: u16,
    /// The identification that the fragments of a datagram have in common.
    pub fragment_id: u32,
    /// The TCP sequence number.
    pub sequence: u32,
    first: u32,
    /// The index of the reason for which there is nothing to read in an answer, else zero: that of a reason for
    /// which there is something.
    empty: u32,
    syn: u32,
    /// The IP protocol of what may begin a connection, else zero.
    begins: u32,
    tagged: u32,
    /// The name set.
    name_set: u32,
}

impl Found {
    /// A packet to a pod, and the reason for which there is nothing to read in it.
    #[inline(always)]
    pub fn answer((packet, empty): &(Packet, Option<Reason>)) -> Self {
        let found = match packet {
            Packet::UdpAnswer(message) => Self::message(message),
            Packet::TcpSegment(segment) => Self::segment(segment),
            Packet::Fragment(fragment) => match fragment.first {
                Some(first) => Self {
                    message: first.message,
                    message_len: first.message_len,
                    src_port: first.src_port,
                    dst_port: first.dst_port,
                    fragment_id: fragment.id,
                    first: 1,
                    ..Self::new(Kind::Message, fragment.ip, fragment.tags)
                },
                None => Self {
                    fragment_id: fragment.id,
                    ..Self::new(Kind::Later, fragment.ip, fragment.tags)
                },
            },
        };
        Self {
            empty: empty.map_or(0, Reason::index),
            ..found
        }
    }

    /// A packet from a pod.
    #[inline(always)]
    pub fn sent(packet: &Sent) -> Self {
        match packet {
            Sent::UdpQuery(message) => Self {
                begins: u32::from(PROTOCOL_UDP),
                ..Self::message(message)
            },
            Sent::TcpSegment(segment) => Self {
                begins: match segment.flags & (TCP_SYN | TCP_ACK) {
                    TCP_SYN => u32::from(PROTOCOL_TCP),
                    _ => 0,
                },
                ..Self::segment(segment)
            },
            Sent::Attempt(attempt) => Self::attempt(attempt),
        }
    }

    /// A message in one piece.
    #[inline(always)]
    fn message(message: &Message) -> Self {
        Self {
            message: message.payload,
            message_len: message.payload_len,
            src_port: message.src_port,
            dst_port: message.dst_port,
            ..Self::new(Kind::Message, message.ip, message.tags)
        }
    }

    #[inline(always)]
    fn segment(segment: &Segment) -> Self {
        Self {
            src_port: segment.src_port,
            dst_port: segment.dst_port,
            sequence: segment.seq,
            syn: u32::from(segment.flags & TCP_SYN),
            ..Self::new(Kind::Segment, segment.ip, segment.tags)
        }
    }

    #[inline(always)]
    fn attempt(attempt: &Attempt) -> Self {
        Self {
            dst_port: attempt.dst_port,
            begins: u32::from(attempt.protocol),
            ..Self::new(Kind::Attempt, attempt.ip, attempt.tags)
        }
    }

    #[inline(always)]
    fn new(kind: Kind, ip: IpHeader, tags: Tags) -> Self {
        Self {
            kind: kind as u32,
            version: ip.version as u32,
            l3: ip.l3,
            message: 0,
            message_len: 0,
            src_port: 0,
            dst_port: 0,
            fragment_id: 0,
            sequence: 0,
            first: 0,
            empty: 0,
            syn: 0,
            begins: 0,
            tagged: u32::from(!tags.is_empty()),
            name_set: 0,
        }
    }

    /// Writes the result to a map and reads it back.
    #[inline(always)]
    pub fn put_down(self) -> Result<Self, Reason> {
        let place = maps::FOUND.get_ptr_mut(0).ok_or(Reason::CopyFailed)?;
        // SAFETY: the map's value is one that no other CPU uses (`maps`).
        unsafe {
            ptr::write_volatile(place, self);
            Ok(ptr::read_volatile(place))
        }
    }

    /// What the packet is.
    #[inline(always)]
    pub fn kind(&self) -> Kind {
        match self.kind {
            kind if kind == Kind::Message as u32 => Kind::Message,
            kind if kind == Kind::Later as u32 => Kind::Later,
            kind if kind == Kind::Attempt as u32 => Kind::Attempt,
            _ => Kind::Segment,
        }
    }

    /// Whether this is the first fragment of a message.
    #[inline(always)]
    pub fn is_first_fragment(&self) -> bool {
        self.first != 0
    }

    /// The reason for which there is nothing to read in an answer, if there is nothing.
    #[inline(always)]
    pub fn empty(&self) -> Option<Reason> {
        match self.empty {
            0 => None,
            reason if reason == Reason::Rcode.index() => Some(Reason::Rcode),
            _ => Some(Reason::NoAnswers),
        }
    }

    /// Whether this is a segment that opens a connection.
    #[inline(always)]
    pub fn is_syn(&self) -> bool {
        self.syn != 0
    }

    /// The IP protocol of what may begin a connection.
    #[inline(always)]
    pub fn begins(&self) -> Option<u8> {
        match self.begins {
            0 => None,
            protocol => Some(protocol as u8),
        }
    }

    /// Whether there is a VLAN tag within the frame.
    #[inline(always)]
    pub fn has_tag(&self) -> bool {
        self.tagged != 0
    }

    /// The IP header.
    #[inline(always)]
    pub fn ip(&self) -> IpHeader {
        IpHeader {
            version: match self.version == Version::V4 as u32 {
                true => Version::V4,
                false => Version::V6,
            },
            l3: self.l3,
        }
    }
}

/// Writes the number of a name set to a map and reads it back.
#[inline(always)]
pub fn put_down_name_set(name_set: u32) -> u32 {
    match maps::FOUND.get_ptr_mut(0) {
        // SAFETY: as above.
        Some(place) => unsafe {
            ptr::write_volatile(&raw mut (*place).name_set, name_set);
            ptr::read_volatile(&raw const (*place).name_set)
        },
        None => name_set,
    }
}
