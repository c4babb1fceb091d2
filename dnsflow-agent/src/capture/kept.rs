//! The answers that no rule mentioned, which the kernel keeps for a rule that may come.

use std::fmt;

use aya::{
    Pod,
    maps::{Map, MapData, MapError, Queue},
};
use dnsflow_common::record::{self, KEPT_MAX};
use dnsflow_core::input::Frame;

use super::{CaptureError, records};

#[derive(Clone, Copy)]
#[repr(transparent)]
struct Kept(record::Kept);

// SAFETY: integers without padding, and any bytes are some.
unsafe impl Pod for Kept {}

/// The map `KEPT`.
pub struct KeptAnswers(Queue<MapData, Kept>);

impl fmt::Debug for KeptAnswers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptAnswers").finish_non_exhaustive()
    }
}

impl KeptAnswers {
    pub(super) fn new(map: Map) -> Result<Self, CaptureError> {
        let queue = Queue::try_from(map).map_err(|_| CaptureError::Object { what: "KEPT" })?;
        Ok(Self(queue))
    }

    /// Takes them out, oldest first; what is kept meanwhile may stay.
    ///
    /// # Errors
    ///
    /// Where the kernel refuses. Those that were handed over are no longer kept.
    pub fn drain(&mut self, mut each: impl FnMut(Frame<'_>)) -> Result<(), MapError> {
        for _ in 0..KEPT_MAX {
            match self.0.pop(0) {
                Ok(Kept(kept)) => {
                    if let Some(frame) = kept.record().and_then(records::frame) {
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
