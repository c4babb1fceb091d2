//! The record that a BPF program puts into the ring buffer: a header, then the captured bytes,
//! and nothing after them.
//!
//! Both sides run on one machine: integers are in native byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::key::AttemptKey;

/// The layout of a record. It counts up with each change of [`RecordHeader`], of the kinds or of what follows. An agent
/// reads the records of an earlier agent's programs only from [`LAYOUT_MIN`] to this one.
pub const LAYOUT: u32 = 3;

/// The first layout whose records mean today what they meant then. It has no [`KIND_OPENED`].
pub const LAYOUT_MIN: u32 = 2;

/// At most this many bytes of a frame are captured: more than the longest IP packet with its link
/// header, as virtual devices without a wire in between pass them whole (generic segmentation
/// offload). What is longer still is a TCP segment whose length its IP header cannot say ("BIG
/// TCP"), which the walk refuses.
///
/// A power of two, so that the program can bound a length with one AND.
pub const MAX_CAPTURE: usize = 128 * 1024;

/// What stands in front of the captured bytes. No padding: the whole header is written.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct RecordHeader {
    /// When the program saw the packet, in nanoseconds of `CLOCK_MONOTONIC`
    /// (`bpf_ktime_get_ns`).
    pub captured_at_ns: u64,
    /// The index of the interface that the program is attached to.
    pub ifindex: u32,
    /// The length of the whole frame in bytes, from the Ethernet header on.
    pub frame_len: u32,
    /// How many bytes of the frame follow; at most [`MAX_CAPTURE`].
    pub captured_len: u32,
    /// What the record is: [`KIND_ANSWER`], [`KIND_HELD`], [`KIND_SENT`] or [`KIND_OPENED`].
    pub kind: u16,
    /// The VLAN tag that the kernel keeps outside the frame (`skb->vlan_tci`); zero when there
    /// is none.
    pub vlan_tci: u16,
    /// Into how much data each the kernel cuts a TCP segment that no wire takes whole
    /// (`skb_shared_info.gso_size`); zero for a packet that is not to be cut.
    pub gso_size: u32,
    /// The lower half of `Share::segments_left_out` when the record was made.
    pub left_out: u32,
}

/// [`RecordHeader::kind`]: what a DNS server sends to a pod.
pub const KIND_ANSWER: u16 = 1;
/// [`RecordHeader::kind`]: the same, and the pod has not got it: the agent has to put it back. It is
/// all there.
pub const KIND_HELD: u16 = 2;
/// [`RecordHeader::kind`]: what a pod sends to a DNS server over TCP.
pub const KIND_SENT: u16 = 3;

/// [`RecordHeader::kind`]: a pod may begin a connection; an [`AttemptKey`] follows. Only in the ring
/// buffer `ASIDE`.
pub const KIND_ATTEMPT: u16 = 4;

/// [`RecordHeader::kind`]: an answer from a DNS server, whole. The program opens its addresses
/// ([`opening`](crate::opening)).
pub const KIND_OPENED: u16 = 5;

/// The size of the ring buffer `ASIDE`, in bytes.
pub const ASIDE_BYTES: u32 = 512 << 10;
/// An attempt wakes the agent. Answers in `ASIDE` wait for the next attempt, or until there are more bytes
/// than this.
pub const ASIDE_UNREAD_MAX: u32 = ASIDE_BYTES / 4;
/// How often the agent is told of an interface's attempts, in nanoseconds: 32 times a second …
pub const ATTEMPT_INTERVAL_NS: u64 = 1_000_000_000 / 32;
/// … and how many times at once.
pub const ATTEMPT_BURST: u64 = 128;
/// For how long the agent is not told again of an attempt with the same key, in nanoseconds.
pub const ATTEMPT_AGAIN_NS: u64 = 10_000_000_000;
/// How many attempts are remembered, so that the agent is not told again.
pub const ATTEMPTS_MAX: u32 = 16_384;

/// What an interface pays for a byte of a record, in nanoseconds of its time: 512 are 1.9 MiB in a
/// second.
pub const SHARE_NS_PER_BYTE: u64 = 512;
/// What a record costs beside its frame, in bytes: its header, and what it is to the agent to take a
/// record at all. An answer of 200 bytes costs 456, so that a pod gets 4,280 of them in a second.
pub const SHARE_RECORD_BYTES: u64 = 256;
/// How much an interface may hand over at once, in bytes: a quarter of the ring buffer.
pub const SHARE_BURST_BYTES: u64 = 512 << 10;
/// How often an interface may have an answer deferred, in nanoseconds: 64 times a second …
pub const DEFER_INTERVAL_NS: u64 = 1_000_000_000 / 64;
/// … and how many at once: an eighth of them all.
pub const DEFER_BURST: u64 = DEFERRED_MAX as u64 / 8;

/// How many answers that no rule mentions are deferred, for a rule that comes later; the oldest go.
pub const DEFERRED_MAX: u32 = 1024;
/// The longest frame of such an answer; longer ones are not deferred. A power of two, as
/// [`MAX_CAPTURE`].
pub const DEFERRED_FRAME_MAX: usize = 2048;

/// A deferred answer. What stands behind the captured bytes means nothing.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Deferred {
    /// As of a record.
    pub header: RecordHeader,
    /// The frame, and more.
    pub frame: [u8; DEFERRED_FRAME_MAX],
}

impl Deferred {
    /// What a record of the same answer would be; `None` where the lengths are impossible.
    pub fn record(&self) -> Option<Record<'_>> {
        let captured_len = usize::try_from(self.header.captured_len).ok()?;
        let frame = self.frame.get(..captured_len)?;
        Some(Record {
            header: self.header,
            frame,
        })
    }
}

/// A record of [`KIND_ATTEMPT`]. [`RecordHeader::captured_len`] is the length of the key.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Attempt {
    /// The header.
    pub header: RecordHeader,
    /// Who, and where to.
    pub key: AttemptKey,
}

/// A record of the ring buffer `ASIDE`, checked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Aside<'a> {
    /// A pod may begin a connection.
    Attempt(Attempt),
    /// An answer that no rule mentions.
    Answer(Record<'a>),
}

impl<'a> Aside<'a> {
    /// Reads a record; `None` when it is none.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        if let Ok(attempt) = Attempt::read_from_bytes(bytes)
            && attempt.header.kind == KIND_ATTEMPT
        {
            return Some(Self::Attempt(attempt));
        }
        let record = Record::parse(bytes)?;
        (record.header.kind == KIND_ANSWER).then_some(Self::Answer(record))
    }
}

/// A record as found in the ring buffer, checked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Record<'a> {
    /// The header.
    pub header: RecordHeader,
    /// The captured bytes, Ethernet header first.
    pub frame: &'a [u8],
}

impl<'a> Record<'a> {
    /// Reads a record; `None` when the header is cut, of an unknown kind, or says other lengths
    /// than the record has.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, frame) = RecordHeader::read_from_prefix(bytes).ok()?;
        let captured_len = usize::try_from(header.captured_len).ok()?;
        let whole = header.captured_len == header.frame_len;
        let known = match header.kind {
            KIND_ANSWER | KIND_SENT => true,
            KIND_HELD | KIND_OPENED => whole,
            _ => false,
        };
        let consistent = known
            && captured_len == frame.len()
            && captured_len <= MAX_CAPTURE
            && header.captured_len <= header.frame_len;
        consistent.then_some(Self { header, frame })
    }
}

#[cfg(test)]
mod tests;
