//! One direction of a TCP connection: from segments to whole messages.
//!
//! This module reads only bytes that the receiver would accept. Both ignore repeated bytes. Bytes from before the
//! first one, and bytes that contradict kept ones, do not belong to this stream. Checksums are not looked at.

use std::collections::BTreeMap;

use super::{FIN, RST, SYN, Segment, TcpEvent};
use crate::{
    tools::counter_vec::CounterVec,
    values::limits::{DNS_MESSAGE_MIN, TCP_AHEAD_BYTES_MAX, TCP_AHEAD_PIECES_MAX},
};

/// The length in front of each message.
const PREFIX_LEN: usize = 2;

/// A message that is complete.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Message {
    /// Without its length.
    pub(super) bytes: Vec<u8>,
    /// The place behind its last byte.
    pub(super) end: u64,
}

/// Where complete messages go.
pub(super) struct Messages<'a> {
    pub(super) complete: Vec<Message>,
    pub(super) events: &'a mut CounterVec<TcpEvent>,
}

impl Messages<'_> {
    fn push(&mut self, message: &[u8], end: u64) {
        if message.len() < DNS_MESSAGE_MIN {
            self.events.count(TcpEvent::Runt);
        } else {
            self.complete.push(Message {
                bytes: message.to_vec(),
                end,
            });
        }
    }
}

/// Whether more can come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum State {
    /// More can come.
    Open,
    /// Everything up to the FIN was read.
    Ended,
    /// The sender has reset the connection.
    Reset,
}

/// One direction of a connection.
///
/// Sequence numbers are extended to 64 bits, so that they only grow: the lower half of each is the number in the
/// header (modulo 2^32; RFC 9293, section 3.4).
#[derive(Debug)]
pub(super) struct Stream {
    /// The sequence number of the SYN.
    initial: u32,
    /// The byte that comes next.
    next: u64,
    /// The length and as much of the message as is there.
    message: Vec<u8>,
    /// The pieces that came before their turn. None overlaps another, and all lie behind `next`.
    ahead: BTreeMap<u64, Box<[u8]>>,
    ahead_bytes: usize,
    /// The end of the stream, after its FIN was seen.
    end: Option<u64>,
}

impl Stream {
    /// The stream behind the SYN of this sequence number.
    pub(super) fn new(initial: u32) -> Self {
        Self {
            initial,
            next: first(initial),
            message: Vec::new(),
            ahead: BTreeMap::new(),
            ahead_bytes: 0,
            end: None,
        }
    }

    /// The sequence number of the SYN.
    pub(super) fn initial(&self) -> u32 {
        self.initial
    }

    /// The place of the first byte.
    pub(super) fn first(&self) -> u64 {
        first(self.initial)
    }

    /// The place behind all that was seen, including the FIN.
    pub(super) fn reached(&self) -> u64 {
        // The FIN takes a sequence number of its own.
        self.end.map_or_else(|| self.data_reached(), |end| end + 1)
    }

    /// The place behind all data that were seen.
    fn data_reached(&self) -> u64 {
        let last_ahead = self.ahead.last_key_value();
        last_ahead.map_or(self.next, |(place, piece)| place + piece.len() as u64)
    }

    /// How many bytes wait for more.
    pub(super) fn held(&self) -> usize {
        self.message.len() + self.ahead_bytes
    }

    /// How much was seen so far: every byte once, and the FIN.
    pub(super) fn taken(&self) -> u64 {
        self.next - self.first() + self.ahead_bytes as u64 + u64::from(self.end.is_some())
    }

    /// How a connection ends that ends now.
    pub(super) fn end_event(&self) -> TcpEvent {
        if self.held() == 0 {
            TcpEvent::Closed
        } else {
            TcpEvent::Unfinished
        }
    }

    /// The place of a sequence number. Of all possible places, the nearest to the next byte.
    pub(super) fn place(&self, sequence: u32) -> u64 {
        let distance = sequence.wrapping_sub(self.next as u32).cast_signed();
        self.next.saturating_add_signed(distance.into())
    }

    /// The place of the first byte of a segment.
    fn start(&self, segment: &Segment<'_>) -> u64 {
        // The SYN takes a sequence number of its own.
        self.place(segment.sequence.wrapping_add(segment.has(SYN).into()))
    }

    /// Whether nothing was read yet, and this segment leaves out the first bytes.
    pub(super) fn begins_late(&self, segment: &Segment<'_>) -> bool {
        let takes_place = segment.payload_len > 0 || segment.has(FIN);
        self.next == self.first() && takes_place && self.start(segment) > self.next
    }

    /// Takes a segment of this direction. An error says why the connection has to be given up.
    pub(super) fn take(
        &mut self,
        segment: &Segment<'_>,
        messages: &mut Messages<'_>,
    ) -> Result<State, TcpEvent> {
        if segment.has(RST) {
            // Whatever its sequence number: the receiver may know better than this module whether it
            // is acceptable (RFC 9293, section 3.5.3), and to forget a connection opens nothing.
            return Ok(State::Reset);
        }
        let start = self.start(segment);
        let end = start + segment.payload_len as u64;
        if segment.payload_len > 0 && start < self.first() {
            // The sender's SYN had another sequence number. A keep-alive from one before the next
            // byte, with an octet of garbage (RFC 9293, section 3.8.4), looks the same as long as
            // there were no data. It ends the connection, too: the octet could as well be the first
            // of a stream that began earlier. Linux sends none (`tcp_xmit_probe_skb` in
            // net/ipv4/tcp_output.c), and DNS servers close a connection that is not used.
            return Err(TcpEvent::Conflict);
        }
        if start > self.next + TCP_AHEAD_BYTES_MAX as u64 {
            if !self.ahead.is_empty() {
                // The stream has gone on for too long without the missing segment.
                return Err(TcpEvent::Gap);
            }
            messages.events.count(TcpEvent::OutOfWindow);
            return Ok(State::Open);
        }
        if segment.has(FIN) {
            if self.end.is_some_and(|known| known != end) || self.data_reached() > end {
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
        match self.end == Some(self.next) {
            true => Ok(State::Ended),
            false => Ok(State::Open),
        }
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
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        let (old, fresh) = bytes.split_at(known.min(bytes.len()));
        // A keep-alive may have an octet of garbage before the next one (RFC 9293, section 3.8.4).
        let is_keep_alive = known == 1 && bytes.len() == 1;
        if !is_keep_alive {
            self.repeats(known, old)?;
        }
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
                messages.push(&whole[PREFIX_LEN..], self.next - rest.len() as u64);
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
                messages.push(&self.message[PREFIX_LEN..], self.next - bytes.len() as u64);
                // This frees the memory, too.
                self.message = Vec::new();
            }
        }
    }

    /// Keeps a piece that came before its turn, without the bytes that are there already.
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

    /// Whether these bytes agree with the pieces ahead, where they overlap. Which of two different
    /// segments a receiver takes depends on its implementation.
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

    /// Whether these bytes from `back` before the next one agree with the unfinished message. Messages
    /// that are complete are not kept.
    fn repeats(&self, back: usize, bytes: &[u8]) -> Result<(), TcpEvent> {
        let len = self.message.len();
        let bytes = bytes.get(back.saturating_sub(len)..).unwrap_or_default();
        let kept = &self.message[len.saturating_sub(back)..];
        match kept.starts_with(bytes) {
            true => Ok(()),
            false => Err(TcpEvent::Conflict),
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

/// The place of the first byte behind a SYN. It is not zero, so that a segment from before the SYN
/// has a place, too.
fn first(initial: u32) -> u64 {
    (1 << 32) + u64::from(initial) + 1
}

/// The message's length, once it is there.
fn message_len(bytes: &[u8]) -> Option<usize> {
    let prefix = bytes.first_chunk::<PREFIX_LEN>()?;
    Some(u16::from_be_bytes(*prefix).into())
}

#[cfg(test)]
mod tests;
