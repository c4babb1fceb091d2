//! The counters of packets, by reason.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use aya::{
    Ebpf,
    maps::{MapData, MapError, PerCpuArray},
};
use dnsflow_common::Reason;

use super::{CaptureError, Records, program::take_map};

/// The programs' counters and the edge's own. They only grow while the programs are loaded.
pub struct ProgramCounters {
    to_pods: PerCpuArray<MapData, u64>,
    from_pods: PerCpuArray<MapData, u64>,
    invalid_records: Arc<AtomicU64>,
}

impl ProgramCounters {
    pub(super) fn new(ebpf: &mut Ebpf, records: &Records) -> Result<Self, CaptureError> {
        Ok(Self {
            to_pods: take_map(ebpf, "COUNTERS")?,
            from_pods: take_map(ebpf, "QUERY_COUNTERS")?,
            invalid_records: records.invalid(),
        })
    }

    /// Packets to the pods of each reason, over all CPUs, in the order of [`Reason::ALL`].
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read.
    pub fn read(&self) -> Result<Vec<(Reason, u64)>, MapError> {
        Reason::ALL
            .iter()
            .map(|&reason| Ok((reason, self.of(reason)?)))
            .collect()
    }

    /// Packets from the pods of each reason, over all CPUs, in the order of [`Reason::ALL`].
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read.
    pub fn read_queries(&self) -> Result<Vec<(Reason, u64)>, MapError> {
        Reason::ALL
            .iter()
            .map(|&reason| Ok((reason, sum(&self.from_pods, reason)?)))
            .collect()
    }

    /// Packets to the pods of one reason, over all CPUs.
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read.
    pub fn of(&self, reason: Reason) -> Result<u64, MapError> {
        match reason {
            Reason::InvalidRecord => Ok(self.invalid_records.load(Ordering::Relaxed)),
            _ => sum(&self.to_pods, reason),
        }
    }
}

fn sum(counters: &PerCpuArray<MapData, u64>, reason: Reason) -> Result<u64, MapError> {
    Ok(counters.get(&reason.index(), 0)?.iter().sum())
}
