//! Interfaces at which answers count although their question was not seen: the program for
//! questions is not attached yet, or was attached just now.
//!
//! They count no longer than a question may have been under way. Such answers still have to come
//! from a trusted resolver.

use std::time::Duration;

use aya::{
    Ebpf,
    maps::{HashMap, MapData, MapError},
};
use dnsflow_core::Timestamp;
use tracing::warn;

use super::{CaptureError, absent, program::take_map};
use crate::clock::now;

/// How long answers may come to a question that was asked before the program was attached. The time
/// is longer than usual, and shorter than the 5 s after which resolvers ask again (`timeout` in
/// resolv.conf(5)).
pub const UNASKED_GRACE: Duration = Duration::from_secs(1);

/// The map `UNASKED_UNTIL`.
pub(super) struct Unasked(HashMap<MapData, u32, u64>);

impl Unasked {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        take_map(ebpf, "UNASKED_UNTIL").map(Self)
    }

    /// To be called before the program for answers is attached.
    pub(super) fn begin(&mut self, ifindex: u32) {
        self.set(ifindex, Timestamp::from_nanos(u64::MAX));
    }

    /// To be called when the program for questions is attached.
    pub(super) fn end_soon(&mut self, ifindex: u32) {
        self.set(ifindex, now() + UNASKED_GRACE);
    }

    /// To be called when the programs are off an interface.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub(super) fn forget(&mut self, ifindex: u32) -> Result<(), MapError> {
        absent(self.0.remove(&ifindex))
    }

    fn set(&mut self, ifindex: u32, until: Timestamp) {
        if let Err(error) = self.0.insert(ifindex, until.as_nanos(), 0) {
            warn!(
                ifindex, %error,
                "answers to queries from before the attachment are ignored"
            );
        }
    }
}
