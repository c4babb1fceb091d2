//! The ring buffer's end in user space.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use aya::maps::{Map, MapData, RingBuf};
use dnsflow_common::record::{KIND_HELD, KIND_OPENED, KIND_SENT, Record};
use dnsflow_core::{Timestamp, io::input::Frame};
use tokio::io::{Interest, unix::AsyncFd};

use super::{CaptureError, RING_BYTES};

/// What the program captured, oldest first.
pub struct Records {
    ring: AsyncFd<RingBuf<MapData>>,
    invalid: Arc<AtomicU64>,
}

/// Whether [`Records::drain`] left something behind.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Drained {
    /// The ring buffer is empty.
    Empty,
    /// The limit was reached; [`Records::readable`] will return at once.
    Limit,
}

impl Records {
    pub(super) fn new(map: Map) -> Result<Self, CaptureError> {
        let ring = RingBuf::try_from(map).map_err(|_| CaptureError::Object { what: "RECORDS" })?;
        // SAFETY: the ring buffer owns its map's descriptor, always gives this one, and keeps it
        // open as long as it lives.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
        Ok(Self {
            ring: ring.map_err(|error| CaptureError::Io {
                operation: "watch the ring buffer",
                source: error.into(),
            })?,
            invalid: Arc::default(),
        })
    }

    pub(super) fn invalid(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.invalid)
    }

    /// Waits until there is something to [`drain`](Self::drain). May be cancelled.
    ///
    /// # Errors
    ///
    /// When the runtime shuts down.
    pub async fn readable(&self) -> io::Result<()> {
        let mut ready = self.ring.readable().await?;
        // Only an empty ring buffer makes it unready.
        ready.retain_ready();
        Ok(())
    }

    /// Hands at most `limit` frames to `each`, borrowed from the ring buffer, as long as `each` returns `true`. Counts
    /// records that cannot be right.
    pub fn drain(&mut self, limit: usize, mut each: impl FnMut(Frame<'_>) -> bool) -> Drained {
        let invalid = &self.invalid;
        let drained = self.ring.try_io_mut(Interest::READABLE, |ring| {
            match take(ring, limit, invalid, &mut each) {
                Drained::Empty => Err(io::ErrorKind::WouldBlock.into()),
                Drained::Limit => Ok(()),
            }
        });
        match drained {
            Ok(()) => Drained::Limit,
            Err(_) => Drained::Empty,
        }
    }

    /// The same, whether or not the runtime has noticed that there is something.
    pub fn drain_now(&mut self, limit: usize, mut each: impl FnMut(Frame<'_>) -> bool) -> Drained {
        take(self.ring.get_mut(), limit, &self.invalid, &mut each)
    }

    /// Hands over what is there at the end of the agent. There is an end, although the programs may go on to capture.
    pub fn drain_rest(&mut self, mut each: impl FnMut(Frame<'_>)) {
        self.drain_now(REST_MAX, |frame| {
            each(frame);
            true
        });
    }
}

/// More records than the ring buffer has room for: a record has a header and a DNS answer.
const REST_MAX: usize = RING_BYTES as usize / 64;

fn take(
    ring: &mut RingBuf<MapData>,
    limit: usize,
    invalid: &AtomicU64,
    each: &mut impl FnMut(Frame<'_>) -> bool,
) -> Drained {
    for _ in 0..limit {
        let Some(item) = ring.next() else {
            return Drained::Empty;
        };
        if !hand_over(&item, invalid, each) {
            return Drained::Limit;
        }
    }
    Drained::Limit
}

/// Hands over the frame of a record. Returns whether to go on.
fn hand_over(item: &[u8], invalid: &AtomicU64, each: &mut impl FnMut(Frame<'_>) -> bool) -> bool {
    let frame = Record::parse(item).and_then(frame);
    invalid.fetch_add(u64::from(frame.is_none()), Ordering::Relaxed);
    frame.is_none_or(each)
}

/// The frame that a record is of.
pub(super) fn frame(record: Record<'_>) -> Option<Frame<'_>> {
    let Record { header, frame } = record;
    Some(Frame {
        ifindex: header.ifindex,
        captured_at: Timestamp::from_nanos(header.captured_at_ns),
        bytes: frame,
        from_pod: header.kind == KIND_SENT,
        held: header.kind == KIND_HELD,
        opened: header.kind == KIND_OPENED,
        gso_size: u16::try_from(header.gso_size).ok()?,
        left_out: header.left_out,
    })
}

#[cfg(test)]
mod tests;
