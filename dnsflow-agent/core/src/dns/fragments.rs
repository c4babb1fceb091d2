//! Reassembles UDP datagrams from IP fragments (RFC 791, section 3.2; RFC 8200, section 4.5).
//!
//! A datagram is given out whole or not at all. If fragments of a datagram overlap, all its fragments are refused,
//! also later ones (RFC 5722, section 4). The same holds for IPv4, because hosts read overlapping fragments in
//! different ways. Only a first fragment is read as a header.
//!
//! The caller decides which senders may use memory. Each fragment has the addresses; only the first one has the
//! ports.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use crate::{
    Timestamp,
    tools::{
        counter_vec::{CounterVec, labels},
        recent::{Limits, OfInterface, Recent},
    },
    values::limits::{
        FRAGMENT_BYTES_MAX, FRAGMENT_BYTES_PER_INTERFACE_MAX, FRAGMENT_WAIT_MAX, FRAGMENTED_MAX,
        FRAGMENTED_PER_INTERFACE_MAX, FRAGMENTS_PER_DATAGRAM_MAX,
    },
};

/// IP protocol 17 (RFC 768).
const PROTOCOL_UDP: u8 = 17;
/// The UDP header (RFC 768).
const UDP_LEN: usize = 8;
/// The length of every fragment but the last is a multiple of this many bytes (RFC 791, section
/// 3.1).
const FRAGMENT_UNIT: u32 = 8;
/// The longest payload of an IP packet.
const PAYLOAD_MAX: u32 = u16::MAX as u32;

/// The fields that all fragments of one datagram share.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct DatagramKey {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// The source.
    pub source: IpAddr,
    /// The destination.
    pub destination: IpAddr,
    /// The identification: 16 bits in IPv4, 32 in IPv6; in host byte order.
    pub id: u32,
}

impl OfInterface for DatagramKey {
    fn ifindex(&self) -> u32 {
        self.ifindex
    }
}

/// A fragment.
#[derive(Clone, Copy, Debug)]
pub struct Fragment<'a> {
    /// The datagram that the fragment belongs to.
    pub key: DatagramKey,
    /// IPv4: the protocol; IPv6: the Next Header of the Fragment header.
    pub protocol: u8,
    /// The offset of the payload in the datagram's payload, in bytes (the header's value times 8).
    pub offset: u32,
    /// Whether more fragments follow.
    pub more: bool,
    /// The captured bytes behind the IP header, in IPv6 behind the Fragment header.
    pub payload: &'a [u8],
    /// The payload's length in the packet; at least the length of `payload`.
    pub payload_len: usize,
}

/// A complete datagram.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Datagram {
    /// The source.
    pub source: SocketAddr,
    /// The destination.
    pub destination: SocketAddr,
    /// The UDP payload.
    pub payload: Vec<u8>,
}

labels! {
    /// The outcome of a fragment or a datagram.
    FragmentEvent {
        /// A fragment was kept.
        Kept = "kept",
        /// A datagram was complete.
        Complete = "complete",
        /// A fragment came again and was ignored.
        Duplicate = "duplicate",
        /// A fragment of a datagram that was refused before.
        Refused = "refused",
        /// The datagram is refused: its fragments overlap, or a fragment lies behind the end.
        Overlap = "overlap",
        /// The datagram is refused: a fragment is empty, is not a multiple of 8 bytes long, or
        /// reaches beyond 64 KiB.
        Invalid = "invalid",
        /// The datagram is refused: a fragment was not captured whole.
        Cut = "cut",
        /// The datagram is refused: it comes in too many fragments.
        TooMany = "too_many",
        /// The datagram is not UDP.
        NotUdp = "not_udp",
        /// The datagram is complete, but the length in its UDP header is impossible.
        InvalidUdp = "invalid_udp",
        /// The datagram was forgotten: there were too many datagrams, or too many bytes.
        Evicted = "evicted",
        /// The datagram was forgotten: a fragment did not come in time.
        Incomplete = "incomplete",
    }
}

/// The unfinished datagrams of all pods of a node.
#[derive(Debug)]
pub struct FragmentReassembly {
    datagrams: Recent<DatagramKey, Unfinished>,
    events: CounterVec<FragmentEvent>,
}

impl Default for FragmentReassembly {
    fn default() -> Self {
        Self {
            datagrams: Recent::new(Limits {
                entries: FRAGMENTED_MAX,
                per_interface: FRAGMENTED_PER_INTERFACE_MAX,
                bytes: FRAGMENT_BYTES_MAX,
                bytes_per_interface: FRAGMENT_BYTES_PER_INTERFACE_MAX,
            }),
            events: CounterVec::default(),
        }
    }
}

impl FragmentReassembly {
    /// Takes a fragment. Returns its datagram if the fragment has completed the datagram.
    pub fn feed(&mut self, fragment: &Fragment<'_>, now: Timestamp) -> Option<Datagram> {
        self.expire(now);
        let is_udp = fragment.protocol == PROTOCOL_UDP;
        // In IPv4, the protocol is part of a datagram's identity (RFC 791, section 3.2). In IPv6,
        // only the protocol in the first fragment counts (RFC 8200, section 4.5).
        if !is_udp && fragment.key.source.is_ipv4() {
            self.events.count(FragmentEvent::NotUdp);
            return None;
        }
        // A fragment that is a whole datagram stands alone (RFC 6946, section 4).
        if fragment.offset == 0 && !fragment.more {
            if let Err(event) = check(fragment) {
                self.events.count(event);
                return None;
            }
            return self.datagram(&fragment.key, fragment.payload);
        }
        if self.datagrams.get_mut(&fragment.key).is_none() {
            let gone = self
                .datagrams
                .insert(fragment.key, Unfinished::default(), now);
            if gone.is_some() {
                self.events.count(FragmentEvent::Evicted);
            }
        }
        let unfinished = self.datagrams.get_mut(&fragment.key)?;
        let event = unfinished.take(fragment).unwrap_or_else(|event| {
            unfinished.refuse();
            event
        });
        self.events.count(event);
        if unfinished.is_complete() {
            let unfinished = self.datagrams.remove(&fragment.key)?;
            return self.datagram(&fragment.key, &unfinished.joined());
        }
        let held = unfinished.held;
        for _ in self.datagrams.weigh(&fragment.key, held) {
            self.events.count(FragmentEvent::Evicted);
        }
        None
    }

    /// Forgets the datagrams of an interface that is gone.
    pub fn forget_interface(&mut self, ifindex: u32) {
        self.datagrams.remove_interface(ifindex);
    }

    /// How many datagrams are unfinished or refused.
    pub fn len(&self) -> usize {
        self.datagrams.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.datagrams.is_empty()
    }

    /// The bytes of unfinished datagrams.
    pub fn bytes_held(&self) -> usize {
        self.datagrams.bytes()
    }

    /// The counters.
    pub fn events(&self) -> &CounterVec<FragmentEvent> {
        &self.events
    }

    /// Reads the UDP header of a datagram that is complete.
    fn datagram(&mut self, key: &DatagramKey, bytes: &[u8]) -> Option<Datagram> {
        let datagram = udp(key, bytes);
        self.events.count(match datagram {
            Some(_) => FragmentEvent::Complete,
            None => FragmentEvent::InvalidUdp,
        });
        datagram
    }

    fn expire(&mut self, now: Timestamp) {
        let Some(limit) = now.checked_sub(FRAGMENT_WAIT_MAX) else {
            return;
        };
        while let Some(gone) = self.datagrams.pop_unused_since(limit) {
            if !gone.refused {
                self.events.count(FragmentEvent::Incomplete);
            }
        }
    }
}

/// The fragments of one datagram that have come.
#[derive(Debug, Default)]
struct Unfinished {
    /// By offset; they do not overlap.
    fragments: BTreeMap<u32, Box<[u8]>>,
    held: usize,
    /// The datagram's length, once its last fragment is there.
    end: Option<u32>,
    refused: bool,
}

impl Unfinished {
    fn take(&mut self, fragment: &Fragment<'_>) -> Result<FragmentEvent, FragmentEvent> {
        if self.refused {
            return Ok(FragmentEvent::Refused);
        }
        check(fragment)?;
        let (start, bytes) = (fragment.offset, fragment.payload);
        let end = start + bytes.len() as u32;
        // The same fragment again is no overlap (RFC 8200, section 4.5).
        let again = self
            .fragments
            .get(&start)
            .is_some_and(|known| **known == *bytes);
        if again && fragment.more == (self.end != Some(end)) {
            return Ok(FragmentEvent::Duplicate);
        }
        let before = self.fragments.range(..end).next_back();
        let overlaps = before.is_some_and(|(place, known)| place + known.len() as u32 > start);
        let last = self.fragments.last_key_value();
        let reached = last.map_or(0, |(place, known)| place + known.len() as u32);
        let beyond = match (fragment.more, self.end) {
            (_, Some(known)) => end > known || !fragment.more,
            (false, None) => reached > end,
            (true, None) => false,
        };
        if overlaps || beyond {
            return Err(FragmentEvent::Overlap);
        }
        if self.fragments.len() >= FRAGMENTS_PER_DATAGRAM_MAX {
            return Err(FragmentEvent::TooMany);
        }
        if !fragment.more {
            self.end = Some(end);
        }
        self.held += bytes.len();
        self.fragments.insert(start, bytes.into());
        Ok(FragmentEvent::Kept)
    }

    /// Keeps the entry of the datagram, so that its later fragments are refused as well.
    fn refuse(&mut self) {
        *self = Self {
            refused: true,
            ..Self::default()
        };
    }

    fn is_complete(&self) -> bool {
        self.end.is_some_and(|end| self.held == end as usize)
    }

    fn joined(&self) -> Vec<u8> {
        let pieces: Vec<&[u8]> = self.fragments.values().map(|piece| &**piece).collect();
        pieces.concat()
    }
}

/// Whether a fragment is possible at all.
fn check(fragment: &Fragment<'_>) -> Result<(), FragmentEvent> {
    if fragment.offset == 0 && fragment.protocol != PROTOCOL_UDP {
        return Err(FragmentEvent::NotUdp);
    }
    let len = u32::try_from(fragment.payload_len).unwrap_or(u32::MAX);
    let fits = fragment.offset <= PAYLOAD_MAX && len <= PAYLOAD_MAX - fragment.offset;
    let aligned = fragment.offset.is_multiple_of(FRAGMENT_UNIT)
        && (!fragment.more || len.is_multiple_of(FRAGMENT_UNIT));
    if len == 0 || !fits || !aligned {
        return Err(FragmentEvent::Invalid);
    }
    if fragment.payload.len() != fragment.payload_len {
        return Err(FragmentEvent::Cut);
    }
    Ok(())
}

/// Reads a UDP header (RFC 768) and returns the ports with the payload of the length in the header.
fn udp(key: &DatagramKey, bytes: &[u8]) -> Option<Datagram> {
    let (header, _) = bytes.split_first_chunk::<UDP_LEN>()?;
    let [s0, s1, d0, d1, l0, l1, _, _] = *header;
    // A length of zero is for jumbograms (RFC 2675, section 4), which are never fragmented.
    let payload = bytes.get(UDP_LEN..u16::from_be_bytes([l0, l1]).into())?;
    Some(Datagram {
        source: SocketAddr::new(key.source, u16::from_be_bytes([s0, s1])),
        destination: SocketAddr::new(key.destination, u16::from_be_bytes([d0, d1])),
        payload: payload.to_vec(),
    })
}

#[cfg(test)]
mod tests;
