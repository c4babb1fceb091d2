//! Time. The core never reads a clock: each call hands the time in.

use std::{
    num::NonZeroU64,
    ops::{Add, Sub},
    time::Duration,
};

/// Nanoseconds of `CLOCK_MONOTONIC`, the clock that `bpf_ktime_get_ns` stamps records with.
///
/// The latest one is one nanosecond before the end of the clock, so that an optional one takes eight bytes: a node has
/// many.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Timestamp(NonZeroU64);

const _: () = assert!(size_of::<Option<Timestamp>>() == 8);

impl Timestamp {
    /// A point in time, in nanoseconds of `CLOCK_MONOTONIC`.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(NonZeroU64::MIN.saturating_add(nanos))
    }

    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub const fn as_nanos(self) -> u64 {
        self.0.get() - 1
    }

    /// The time that has passed since `earlier`; zero when `earlier` lies in the future.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }

    /// The time that lies this far back; `None` before the start of the clock.
    pub fn checked_sub(self, duration: Duration) -> Option<Self> {
        let nanos = u64::try_from(duration.as_nanos()).ok()?;
        self.as_nanos().checked_sub(nanos).map(Self::from_nanos)
    }
}

impl Default for Timestamp {
    /// The start of the clock.
    fn default() -> Self {
        Self::from_nanos(0)
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl Sub for Timestamp {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.since(earlier)
    }
}
