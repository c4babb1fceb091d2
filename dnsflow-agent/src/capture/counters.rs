//! How many packets met which end.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use aya::maps::{Map, MapData, MapError, PerCpuArray};
use dnsflow_common::Reason;

use super::{CaptureError, Records};

/// The program's counters and the edge's own. They only grow while the program is loaded.
pub struct Counters {
    by_reason: PerCpuArray<MapData, u64>,
    invalid_records: Arc<AtomicU64>,
}

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counters").finish_non_exhaustive()
    }
}

impl Counters {
    pub(super) fn new(map: Map, records: &Records) -> Result<Self, CaptureError> {
        let by_reason =
            PerCpuArray::try_from(map).map_err(|_| CaptureError::Object { what: "COUNTERS" })?;
        Ok(Self {
            by_reason,
            invalid_records: records.invalid(),
        })
    }

    /// Packets of each reason, over all CPUs, in the order of [`Reason::ALL`].
    ///
    /// # Errors
    ///
    /// Where the kernel does not let the map be read.
    pub fn read(&self) -> Result<Vec<(Reason, u64)>, MapError> {
        Reason::ALL
            .iter()
            .map(|&reason| Ok((reason, self.of(reason)?)))
            .collect()
    }

    /// Packets of one reason, over all CPUs.
    ///
    /// # Errors
    ///
    /// Where the kernel does not let the map be read.
    pub fn of(&self, reason: Reason) -> Result<u64, MapError> {
        match reason {
            Reason::InvalidRecord => Ok(self.invalid_records.load(Ordering::Relaxed)),
            _ => Ok(self.by_reason.get(&reason.index(), 0)?.iter().sum()),
        }
    }
}
