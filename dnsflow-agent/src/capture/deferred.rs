//! The answers that no rule mentioned, which the kernel keeps for a rule that may come.

use aya::{
    Ebpf, Pod,
    maps::{MapData, MapError, Queue},
};
use dnsflow_common::record::{self, DEFERRED_MAX};
use dnsflow_core::io::input::Frame;

use super::{CaptureError, program::take_map, records};

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Deferred(record::Deferred);

/// Of a queue without room, the oldest element goes (`BPF_EXIST` in linux/bpf.h; `queue_stack_map_push_elem`
/// in Linux' kernel/bpf/queue_stack_maps.c).
const BPF_EXIST: u64 = 2;

// SAFETY: integers without padding, and any bytes are some.
unsafe impl Pod for Deferred {}

/// The map `DEFERRED`.
pub struct DeferredAnswers(Queue<MapData, Deferred>);

impl DeferredAnswers {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        take_map(ebpf, "DEFERRED").map(Self)
    }

    /// Hands the deferred answers to `each`, oldest first. Defers those again for which `each`
    /// returns `true`. Answers that are deferred meanwhile may stay.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Answers that were handed over are no longer deferred then.
    pub fn replay(&mut self, mut each: impl FnMut(Frame<'_>) -> bool) -> Result<(), MapError> {
        let mut again = Vec::new();
        for _ in 0..DEFERRED_MAX {
            match self.0.pop(0) {
                Ok(deferred) => {
                    if let Some(frame) = deferred.0.record().and_then(records::frame)
                        && each(frame)
                    {
                        again.push(deferred);
                    }
                }
                Err(MapError::ElementNotFound) => break,
                Err(error) => return Err(error),
            }
        }
        again
            .into_iter()
            .try_for_each(|deferred| self.push(deferred))
    }

    /// Defers an answer that the program let through; one that is too long is left out.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn defer(&mut self, frame: Frame<'_>) -> Result<(), MapError> {
        match record::Deferred::of(frame.ifindex, frame.captured_at.as_nanos(), frame.bytes) {
            Some(deferred) => self.push(Deferred(deferred)),
            None => Ok(()),
        }
    }

    /// If there is no room, the oldest answer goes, as when the program defers one.
    fn push(&mut self, deferred: Deferred) -> Result<(), MapError> {
        self.0.push(deferred, BPF_EXIST)
    }
}
