//! The answers that no rule mentioned, which the kernel keeps for a rule that may come.

use std::fmt;

use aya::{
    Pod,
    maps::{Map, MapData, MapError, Queue},
};
use dnsflow_common::record::{self, DEFERRED_MAX};
use dnsflow_core::input::Frame;

use super::{CaptureError, records};

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Deferred(record::Deferred);

// SAFETY: integers without padding, and any bytes are some.
unsafe impl Pod for Deferred {}

/// The map `DEFERRED`.
pub struct DeferredAnswers(Queue<MapData, Deferred>);

impl fmt::Debug for DeferredAnswers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredAnswers").finish_non_exhaustive()
    }
}

impl DeferredAnswers {
    pub(super) fn new(map: Map) -> Result<Self, CaptureError> {
        let queue = Queue::try_from(map).map_err(|_| CaptureError::Object { what: "DEFERRED" })?;
        Ok(Self(queue))
    }

    /// Takes them out, oldest first; what is deferred meanwhile may stay.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses. Those that were handed over are no longer deferred.
    pub fn drain(&mut self, mut each: impl FnMut(Frame<'_>)) -> Result<(), MapError> {
        for _ in 0..DEFERRED_MAX {
            match self.0.pop(0) {
                Ok(Deferred(deferred)) => {
                    if let Some(frame) = deferred.record().and_then(records::frame) {
                        each(frame);
                    }
                }
                Err(MapError::ElementNotFound) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
