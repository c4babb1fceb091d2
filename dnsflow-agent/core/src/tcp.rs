//! DNS over TCP: from the segments that a pod receives to whole DNS messages.
//!
//! A message follows its length of two octets (RFC 7766, section 8; RFC 1035, section 4.2.2), and
//! nothing else says where one begins. So a stream is read only from its beginning, the server's
//! SYN-ACK, without a gap: where segments are missing for good, or contradict each other, the
//! whole connection is given up and counted. A boundary is never guessed, because whoever can
//! choose what a server answers could place a forged message behind a wrong guess.
//!
//! Only one direction is looked at, and only what the pod itself would take: bytes that it has
//! already, it ignores, and so does this module. Checksums are not looked at.

use std::{collections::BTreeMap, net::SocketAddr};

use super::{
    Timestamp,
    counter_vec::{CounterVec, labels},
    limits::{
        DNS_MESSAGE_MIN, TCP_AHEAD_BYTES_MAX, TCP_AHEAD_PIECES_MAX, TCP_BYTES_MAX,
        TCP_CONNECTIONS_MAX, TCP_CONNECTIONS_PER_INTERFACE_MAX, TCP_IDLE_MAX,
    },
    recent::{Limits, OfInterface, Recent},
};

/// No more data from the sender (RFC 9293, section 3.1).
pub const FIN: u8 = 0x01;
/// The sequence number is the sender's first.
pub const SYN: u8 = 0x02;
/// The connection is gone.
pub const RST: u8 = 0x04;
/// The acknowledgment number counts.
pub const ACK: u8 = 0x10;

/// The length in front of each message.
const PREFIX_LEN: usize = 2;

/// A connection, as one interface sees it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ConnectionKey {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// Where the segments come from.
    pub server: SocketAddr,
    /// The pod's end.
    pub client: SocketAddr,
}

impl OfInterface for ConnectionKey {
    fn ifindex(&self) -> u32 {
        self.ifindex
    }
}

/// A segment from a server to a pod.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Its connection.
    pub key: ConnectionKey,
    /// The sequence number of the header, in host byte order.
    pub sequence: u32,
    /// The flags of the header: [`FIN`], [`SYN`], [`RST`], [`ACK`]; others are ignored.
    pub flags: u8,
    /// The payload, as far as it was captured.
    pub payload: &'a [u8],
    /// The payload's length in the packet; at least that of `payload`.
    pub payload_len: usize,
}

impl Segment<'_> {
    fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

labels! {
    /// What became of a segment or a connection.
    TcpEvent {
        /// A connection began: its SYN-ACK was seen.
        Opened = "opened",
        /// A message was complete.
        Message = "message",
        /// A message was too short for a DNS header, and skipped.
        Runt = "runt",
        /// A segment came again; it was ignored.
        Duplicate = "duplicate",
        /// A segment came before one that precedes it; it was kept.
        Ahead = "ahead",
        /// A segment lay too far ahead of what was read; it was ignored.
        OutOfWindow = "out_of_window",
        /// A segment of a connection whose beginning was not seen, or that was given up.
        NoBeginning = "no_beginning",
        /// A server's port opened a connection itself; it was ignored.
        NotAccepted = "not_accepted",
        /// The connection was closed between two messages.
        Closed = "closed",
        /// The connection was closed or replaced within a message.
        Unfinished = "unfinished",
        /// Given up: too much was waiting for a missing segment.
        Gap = "gap",
        /// Given up: two segments differed in the same bytes, or went on behind the end.
        Conflict = "conflict",
        /// Given up: a segment was not captured whole.
        Cut = "cut",
        /// Forgotten: there were too many connections, or they held too many bytes.
        Evicted = "evicted",
        /// Forgotten: nothing was heard of it for too long.
        Idle = "idle",
    }
}

/// The connections of all pods of a node.
#[derive(Debug)]
pub struct TcpReassembly {
    connections: Recent<ConnectionKey, Connection>,
    /// How many bytes they hold together.
    held: usize,
    events: CounterVec<TcpEvent>,
}

impl Default for TcpReassembly {
    fn default() -> Self {
        Self {
            connections: Recent::new(Limits {
                entries: TCP_CONNECTIONS_MAX,
                per_interface: TCP_CONNECTIONS_PER_INTERFACE_MAX,
            }),
            held: 0,
            events: CounterVec::default(),
        }
    }
}

impl TcpReassembly {
    /// Takes a segment; returns the messages that are complete now, without their lengths.
    pub fn feed(&mut self, segment: &Segment<'_>, now: Timestamp) -> Vec<Vec<u8>> {
        self.expire(now);
        if segment.has(SYN) && !segment.has(RST) {
            if !segment.has(ACK) {
                self.events.count(TcpEvent::NotAccepted);
                return Vec::new();
            }
            self.begin(segment, now);
        }
        let Some(connection) = self.connections.use_entry(&segment.key, now) else {
            if segment.payload_len > 0 {
                self.events.count(TcpEvent::NoBeginning);
            }
            return Vec::new();
        };
        let mut messages = Messages {
            complete: Vec::new(),
            events: &mut self.events,
        };
        let before = connection.held();
        let over = connection.take(segment, &mut messages).err();
        let complete = messages.complete;
        self.held = self.held - before + connection.held();
        if let Some(event) = over {
            self.forget(&segment.key, event);
        }
        while self.held > TCP_BYTES_MAX
            && let Some(connection) = self.connections.pop()
        {
            self.held -= connection.held();
            self.events.count(TcpEvent::Evicted);
        }
        complete
    }

    /// Forgets the connections of an interface that is gone.
    pub fn forget_interface(&mut self, ifindex: u32) {
        for connection in self.connections.remove_interface(ifindex) {
            self.held -= connection.held();
        }
    }

    /// How many connections are followed.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether none is followed.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// How many bytes wait for more.
    pub fn bytes_held(&self) -> usize {
        self.held
    }

    /// What happened so far.
    pub fn events(&self) -> &CounterVec<TcpEvent> {
        &self.events
    }

    fn begin(&mut self, segment: &Segment<'_>, now: Timestamp) {
        if let Some(known) = self.connections.get_mut(&segment.key) {
            if known.initial == segment.sequence {
                // The SYN-ACK again.
                return;
            }
            let event = known.end_event();
            self.forget(&segment.key, event);
        }
        let connection = Connection::new(segment.sequence);
        if let Some(gone) = self.connections.insert(segment.key, connection, now) {
            self.held -= gone.held();
            self.events.count(TcpEvent::Evicted);
        }
        self.events.count(TcpEvent::Opened);
    }

    fn forget(&mut self, key: &ConnectionKey, event: TcpEvent) {
        if let Some(connection) = self.connections.remove(key) {
            self.held -= connection.held();
            self.events.count(event);
        }
    }

    fn expire(&mut self, now: Timestamp) {
        let Some(limit) = now.checked_sub(TCP_IDLE_MAX) else {
            return;
        };
        while let Some(connection) = self.connections.pop_unused_since(limit) {
            self.held -= connection.held();
            self.events.count(TcpEvent::Idle);
        }
    }
}

/// Where complete messages go.
struct Messages<'a> {
    complete: Vec<Vec<u8>>,
    events: &'a mut CounterVec<TcpEvent>,
}

impl Messages<'_> {
    fn push(&mut self, message: &[u8]) {
        if message.len() < DNS_MESSAGE_MIN {
            self.events.count(TcpEvent::Runt);
        } else {
            self.events.count(TcpEvent::Message);
            self.complete.push(message.to_vec());
        }
    }
}

/// One direction of a connection.
///
/// Sequence numbers are extended to 64 bits, so that they only grow: the lower half of each is
/// what stands in the header (modulo 2^32; RFC 9293, section 3.4).
#[derive(Debug)]
struct Connection {
    /// The sequence number of the SYN.
    initial: u32,
    /// The byte that comes next.
    next: u64,
    /// The length and as much of the message as is there.
    message: Vec<u8>,
    /// What came before its turn: not overlapping, all behind `next`.
    ahead: BTreeMap<u64, Box<[u8]>>,
    ahead_bytes: usize,
    /// Where the stream ends, once its FIN was seen.
    end: Option<u64>,
}

impl Connection {
    fn new(initial: u32) -> Self {
        Self {
            initial,
            // Not at zero: a segment from before the beginning has a place, too.
            next: (1 << 32) + u64::from(initial) + 1,
            message: Vec::new(),
            ahead: BTreeMap::new(),
            ahead_bytes: 0,
            end: None,
        }
    }

    fn held(&self) -> usize {
        self.message.len() + self.ahead_bytes
    }

    /// How a connection ends that ends now.
    fn end_event(&self) -> TcpEvent {
        if self.held() == 0 {
            TcpEvent::Closed
        } else {
            TcpEvent::Unfinished
        }
    }

    /// Where the segment's payload begins. A sequence number is taken for the nearest place to
    /// the byte that comes next.
    fn place(&self, segment: &Segment<'_>) -> u64 {
        // The SYN takes a sequence number of its own.
        let first = segment.sequence.wrapping_add(segment.has(SYN).into());
        let distance = first.wrapping_sub(self.next as u32).cast_signed();
        self.next.saturating_add_signed(distance.into())
    }

    /// Takes a segment. An error says how the connection has ended.
    fn take(&mut self, segment: &Segment<'_>, messages: &mut Messages<'_>) -> Result<(), TcpEvent> {
        let start = self.place(segment);
        let end = start + segment.payload_len as u64;
        if start > self.next + TCP_AHEAD_BYTES_MAX as u64 {
            if !self.ahead.is_empty() {
                // The stream has gone on for too long without what is missing.
                return Err(TcpEvent::Gap);
            }
            messages.events.count(TcpEvent::OutOfWindow);
            return Ok(());
        }
        if segment.has(RST) {
            // A reset from before the next byte is not acceptable (RFC 9293, section 3.5.3).
            if start < self.next {
                messages.events.count(TcpEvent::OutOfWindow);
                return Ok(());
            }
            return Err(self.end_event());
        }
        if segment.has(FIN) {
            let last_ahead = self.ahead.last_key_value();
            let reached = last_ahead.map_or(self.next, |(place, piece)| place + piece.len() as u64);
            if self.end.is_some_and(|known| known != end) || reached > end {
                return Err(TcpEvent::Conflict);
            }
            self.end = Some(end);
        }
        if self.end.is_some_and(|last| end > last) {
            return Err(TcpEvent::Conflict);
        }
        if !segment.payload.is_empty() {
            self.payload(start, segment.payload, messages)?;
        }
        if segment.payload.len() < segment.payload_len && end > self.next {
            return Err(TcpEvent::Cut);
        }
        if self.end == Some(self.next) {
            return Err(self.end_event());
        }
        Ok(())
    }

    fn payload(
        &mut self,
        start: u64,
        bytes: &[u8],
        messages: &mut Messages<'_>,
    ) -> Result<(), TcpEvent> {
        let Some(known) = self.next.checked_sub(start) else {
            messages.events.count(TcpEvent::Ahead);
            return self.keep(start, bytes);
        };
        let fresh = usize::try_from(known)
            .ok()
            .and_then(|known| bytes.get(known..))
            .unwrap_or_default();
        if fresh.is_empty() {
            messages.events.count(TcpEvent::Duplicate);
            return Ok(());
        }
        self.agrees(self.next, fresh)?;
        self.append(fresh, messages);
        while let Some(entry) = self.ahead.first_entry()
            && *entry.key() <= self.next
        {
            let (place, piece) = entry.remove_entry();
            self.ahead_bytes -= piece.len();
            let known = usize::try_from(self.next - place).unwrap_or(usize::MAX);
            self.append(piece.get(known..).unwrap_or_default(), messages);
        }
        Ok(())
    }

    /// Adds the next bytes of the stream.
    fn append(&mut self, mut bytes: &[u8], messages: &mut Messages<'_>) {
        self.next += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.message.is_empty()
                && let Some(len) = message_len(bytes)
                && let Some((whole, rest)) = bytes.split_at_checked(PREFIX_LEN + len)
            {
                messages.push(&whole[PREFIX_LEN..]);
                bytes = rest;
                continue;
            }
            let wanted = PREFIX_LEN + message_len(&self.message).unwrap_or(0);
            let missing = wanted - self.message.len();
            let (part, rest) = bytes.split_at(missing.min(bytes.len()));
            self.message.extend_from_slice(part);
            bytes = rest;
            if message_len(&self.message).is_some_and(|len| self.message.len() == PREFIX_LEN + len)
            {
                messages.push(&self.message[PREFIX_LEN..]);
                // Gives the memory back, too.
                self.message = Vec::new();
            }
        }
    }

    /// Keeps what came before its turn, without what is there already.
    fn keep(&mut self, start: u64, bytes: &[u8]) -> Result<(), TcpEvent> {
        self.agrees(start, bytes)?;
        let end = start + bytes.len() as u64;
        let mut free = start;
        let mut pieces = Vec::new();
        for (place, piece) in self.overlapping(start, end) {
            if free < place {
                pieces.push((free, place));
            }
            free = place + piece.len() as u64;
        }
        if free < end {
            pieces.push((free, end));
        }
        for (from, to) in pieces {
            let piece = &bytes[(from - start) as usize..(to - start) as usize];
            self.ahead_bytes += piece.len();
            self.ahead.insert(from, piece.into());
        }
        if self.ahead_bytes > TCP_AHEAD_BYTES_MAX || self.ahead.len() > TCP_AHEAD_PIECES_MAX {
            return Err(TcpEvent::Gap);
        }
        Ok(())
    }

    /// Whether these bytes are the same as what came before its turn, where they overlap. What a
    /// receiver takes of two different segments depends on its implementation.
    fn agrees(&self, start: u64, bytes: &[u8]) -> Result<(), TcpEvent> {
        let end = start + bytes.len() as u64;
        let all_same = self.overlapping(start, end).all(|(place, piece)| {
            let from = place.max(start);
            let to = (place + piece.len() as u64).min(end);
            bytes[(from - start) as usize..(to - start) as usize]
                == piece[(from - place) as usize..(to - place) as usize]
        });
        if all_same {
            Ok(())
        } else {
            Err(TcpEvent::Conflict)
        }
    }

    /// The pieces ahead that share bytes with this range, in their order.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &[u8])> {
        let before = self.ahead.range(..start).next_back();
        let first = before
            .filter(|(place, piece)| *place + piece.len() as u64 > start)
            .map_or(start, |(place, _)| *place);
        self.ahead
            .range(first..end)
            .map(|(place, piece)| (*place, &**piece))
    }
}

/// The message's length, once it is there.
fn message_len(bytes: &[u8]) -> Option<usize> {
    let prefix = bytes.first_chunk::<PREFIX_LEN>()?;
    Some(u16::from_be_bytes(*prefix).into())
}

#[cfg(test)]
mod tests;
