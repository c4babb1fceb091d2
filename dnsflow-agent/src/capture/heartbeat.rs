//! The sign that the agent is well, without which the programs hold no answer, and after a while do not
//! capture one.

use std::{fmt, time::Duration};

use aya::maps::{Array, Map, MapData, MapError};
use dnsflow_core::Timestamp;

use super::CaptureError;

/// How often the agent says that it is well.
pub const BEAT_INTERVAL: Duration = Duration::from_millis(200);
/// How long the program trusts one sign: if the agent is stuck, nothing is held after a second.
const BEAT_LASTS: Duration = Duration::from_millis(800);

/// The maps `HOLD_UNTIL` and `CAPTURE_UNTIL`.
pub struct Heartbeat {
    hold: Array<MapData, u64>,
    capture: Array<MapData, u64>,
}

impl fmt::Debug for Heartbeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heartbeat").finish_non_exhaustive()
    }
}

impl Heartbeat {
    pub(super) fn new(hold: Map, capture: Map) -> Result<Self, CaptureError> {
        let array = |map, what| Array::try_from(map).map_err(|_| CaptureError::Object { what });
        Ok(Self {
            hold: array(hold, "HOLD_UNTIL")?,
            capture: array(capture, "CAPTURE_UNTIL")?,
        })
    }

    /// Lets answers be held for a while from `now`.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then nothing is held soon.
    pub fn beat(&mut self, now: Timestamp) -> Result<(), MapError> {
        self.hold.set(0, (now + BEAT_LASTS).as_nanos(), 0)
    }

    /// Lets frames be captured until then, also by programs that outlive the agent.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then nothing is captured after an earlier end.
    pub fn capture_until(&mut self, end: Timestamp) -> Result<(), MapError> {
        self.capture.set(0, end.as_nanos(), 0)
    }

    /// Lets no answer be held from now on.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then answers are held until the last sign is too old.
    pub fn stop(&mut self) -> Result<(), MapError> {
        self.hold.set(0, 0, 0)
    }
}
