//! The one clock of the agent, read at its edges only.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::core::Timestamp;

/// The time now, by the clock that the kernel stamps records with.
pub fn now() -> Timestamp {
    let since_boot = Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default();
    Timestamp::default() + since_boot
}
