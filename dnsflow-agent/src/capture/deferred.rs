//! The answers that no rule mentioned, which are kept for a rule that may come.
//!
//! The kernel puts them into a queue, whose oldest go, whosever they are. So the agent takes them out before one pod can
//! fill the queue, and keeps them in a table in which a pod only pushes out its own.

use aya::{
    Ebpf, Pod,
    maps::{MapData, MapError, Queue},
};
use dnsflow_common::record::{self, DEFER_BURST, DEFERRED_FRAME_MAX, DEFERRED_MAX};
use dnsflow_core::{
    Timestamp,
    io::input::Frame,
    tools::recent::{Limits, OfInterface, Recent},
};

use super::{CaptureError, program::take_map, records};

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Deferred(record::Deferred);

// SAFETY: integers without padding, and any bytes are some.
unsafe impl Pod for Deferred {}

/// At most this many are taken out of the queue at a time: twice as many as one pod puts there at once.
const TAKEN_MAX: usize = 2 * DEFER_BURST as usize;

/// As many as the queue has room for. Of more, the interface that has most loses one.
const LIMITS: Limits = Limits {
    entries: DEFERRED_MAX as usize,
    per_interface: DEFERRED_MAX as usize,
    bytes: DEFERRED_MAX as usize * DEFERRED_FRAME_MAX,
    bytes_per_interface: DEFERRED_MAX as usize * DEFERRED_FRAME_MAX,
};

/// The order in which answers were deferred, and whose they are.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
struct Key {
    number: u64,
    ifindex: u32,
}

impl OfInterface for Key {
    fn ifindex(&self) -> u32 {
        self.ifindex
    }
}

struct Kept {
    captured_at: Timestamp,
    bytes: Box<[u8]>,
}

/// The map `DEFERRED`, and the answers that were taken out of it.
pub struct DeferredAnswers {
    queue: Queue<MapData, Deferred>,
    kept: Recent<Key, Kept>,
    next: u64,
}

impl DeferredAnswers {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        Ok(Self {
            queue: take_map(ebpf, "DEFERRED")?,
            kept: Recent::new(LIMITS),
            next: 0,
        })
    }

    /// Takes some answers out of the queue, oldest first.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn collect(&mut self) -> Result<(), MapError> {
        self.take(TAKEN_MAX)
    }

    fn take(&mut self, max: usize) -> Result<(), MapError> {
        for _ in 0..max {
            match self.queue.pop(0) {
                Ok(deferred) => {
                    if let Some(frame) = deferred.0.record().and_then(records::frame) {
                        self.defer(frame);
                    }
                }
                Err(MapError::ElementNotFound) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Hands the deferred answers to `each`, oldest first. Defers those again for which `each`
    /// returns `true`. Answers that are deferred meanwhile may stay.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then some of its queue were not handed over.
    pub fn replay(&mut self, mut each: impl FnMut(Frame<'_>) -> bool) -> Result<(), MapError> {
        let taken = self.take(DEFERRED_MAX as usize);
        let mut keys: Vec<Key> = self.kept.iter().map(|(key, _)| *key).collect();
        keys.sort_unstable();
        for key in keys {
            let again = self.kept.get_mut(&key).is_some_and(|kept| {
                each(Frame {
                    ifindex: key.ifindex,
                    captured_at: kept.captured_at,
                    bytes: &kept.bytes,
                    from_pod: false,
                    held: false,
                    opened: false,
                    gso_size: 0,
                    left_out: 0,
                })
            });
            if !again {
                self.kept.remove(&key);
            }
        }
        taken
    }

    /// Defers an answer; one that is too long is left out.
    pub fn defer(&mut self, frame: Frame<'_>) {
        if frame.bytes.len() > DEFERRED_FRAME_MAX {
            return;
        }
        self.next += 1;
        let key = Key {
            number: self.next,
            ifindex: frame.ifindex,
        };
        let kept = Kept {
            captured_at: frame.captured_at,
            bytes: frame.bytes.into(),
        };
        self.kept.insert(key, kept, frame.captured_at);
        self.kept.weigh(&key, frame.bytes.len());
    }

    /// Forgets the answers of an interface that is gone, also those in the queue.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then some may be in its queue.
    pub fn forget_interface(&mut self, ifindex: u32) -> Result<(), MapError> {
        let taken = self.take(DEFERRED_MAX as usize);
        self.kept.remove_interface(ifindex);
        taken
    }
}
