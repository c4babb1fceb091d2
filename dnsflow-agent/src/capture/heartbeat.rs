//! The sign that the agent is well, without which the programs hold no answer, and after a while do not
//! capture one.

use std::time::Duration;

use aya::{
    Ebpf,
    maps::{Array, MapData, MapError},
};
use dnsflow_core::Timestamp;

use super::{CaptureError, program::take_map};

/// How often the agent says that it is well.
pub const BEAT_INTERVAL: Duration = Duration::from_millis(200);
/// How long the program trusts one sign: if the agent is stuck, nothing is held after a second.
const BEAT_LASTS: Duration = Duration::from_millis(800);

/// The maps `HOLD_UNTIL`, `READ_UNTIL` and `CAPTURE_UNTIL`.
pub struct Heartbeat {
    hold: Array<MapData, u64>,
    read: Array<MapData, u64>,
    capture: Array<MapData, u64>,
}

impl Heartbeat {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        let mut read: Array<MapData, u64> = take_map(ebpf, "READ_UNTIL")?;
        // This agent is about to begin.
        let begins = read.set(0, u64::MAX, 0);
        begins.map_err(|error| CaptureError::Load(error.into()))?;
        Ok(Self {
            hold: take_map(ebpf, "HOLD_UNTIL")?,
            read,
            capture: take_map(ebpf, "CAPTURE_UNTIL")?,
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

    /// Lets the pods' shares of the ring buffer come back for a while from `now`.
    ///
    /// # Errors
    ///
    /// If the kernel refuses. Then none comes back soon.
    pub fn reads(&mut self, now: Timestamp) -> Result<(), MapError> {
        self.read.set(0, (now + BEAT_LASTS).as_nanos(), 0)
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
