//! Rates, and accounts of their use.

use std::time::Duration;

use crate::Timestamp;

/// A rate of spending: evenly over time, or saved up and spent at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    /// The time that gives back one.
    each: Duration,
    /// The time that gives back all that can be saved up.
    burst: Duration,
}

impl Rate {
    /// So many each second, and as many at once as `burst` gives back.
    pub(crate) fn per_second(count: u32, burst: Duration) -> Self {
        Self::every(Duration::from_secs(1) / count.max(1), burst)
    }

    /// One in each such time, and as many at once as `burst` gives back.
    pub(crate) const fn every(each: Duration, burst: Duration) -> Self {
        Self { each, burst }
    }

    /// The time that gives back so many.
    pub(crate) fn time_of(self, count: usize) -> Duration {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        self.each.saturating_mul(count)
    }
}

/// The spent part of a [`Rate`]: the time at which all of it is given back (the generic cell rate algorithm of ITU-T
/// I.371, annex A, in its form as a virtual schedule).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Account(Timestamp);

impl Account {
    /// Whether there is something left.
    pub(crate) fn has_left(self, rate: Rate, now: Timestamp) -> bool {
        self.0.since(now) < rate.burst
    }

    /// Whether at least half of a burst is left.
    pub(crate) fn has_half_left(self, rate: Rate, now: Timestamp) -> bool {
        self.0.since(now) <= rate.burst / 2
    }

    /// Whether all that was spent is given back.
    pub(crate) fn is_full(self, now: Timestamp) -> bool {
        self.0 <= now
    }

    /// Spends so many. More than was left is a debt, of one burst at most.
    pub(crate) fn spend(&mut self, count: usize, rate: Rate, now: Timestamp) {
        self.spend_time(rate.time_of(count), rate, now);
    }

    pub(crate) fn spend_time(&mut self, time: Duration, rate: Rate, now: Timestamp) {
        let most = now + rate.burst.saturating_mul(2);
        self.0 = (self.0.max(now) + time).min(most);
    }
}
