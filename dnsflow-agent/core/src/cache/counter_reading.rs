//! When the counters of all flows are to be read, because the use of many addresses is not known.

use std::collections::BTreeMap;

use crate::{
    Timestamp,
    values::{ids::PortId, limits::COUNTERS_DELAY_MAX},
};

/// The next reading of counters, and the addresses that wait for one.
#[derive(Debug, Default)]
pub(super) struct CounterReading {
    /// In a comparison that begins at this time or later, if in any.
    at: Option<Timestamp>,
    /// Whether the switch is to be told.
    is_news: bool,
    uncounted: BTreeMap<PortId, Uncounted>,
}

/// How many addresses of a port have come lately.
#[derive(Clone, Copy, Debug, Default)]
struct Uncounted {
    /// Upper bound for the number of addresses whose use is unknown: those that came after the last
    /// complete reading of counters had begun.
    all: usize,
    /// The number of those that came after the reading under way had begun.
    next: usize,
}

impl CounterReading {
    /// So many addresses of a port have come. Returns of how many the use is unknown, at most.
    pub(super) fn came(&mut self, port: PortId, addresses: usize) -> usize {
        let uncounted = self.uncounted.entry(port).or_default();
        uncounted.all += addresses;
        uncounted.next += addresses;
        uncounted.all
    }

    /// Plans a reading, unless one is planned already. It does not tell the use of addresses that come from now on.
    pub(super) fn plan(&mut self, now: Timestamp) {
        if self.at.is_none() {
            self.at = Some(now + COUNTERS_DELAY_MAX);
            self.is_news = true;
            for uncounted in self.uncounted.values_mut() {
                uncounted.next = 0;
            }
        }
    }

    /// From when on the counters are to be read, if that is news since the last call.
    pub(super) fn take_news(&mut self) -> Option<Timestamp> {
        let is_news = std::mem::take(&mut self.is_news);
        self.at.filter(|_| is_news)
    }

    /// Counters were read, from `since` on. If that is late enough, the use of all addresses is known that were there when
    /// the reading was planned.
    pub(super) fn read(&mut self, since: Timestamp) {
        if self.at.take_if(|at| *at <= since).is_some() {
            for uncounted in self.uncounted.values_mut() {
                uncounted.all = uncounted.next;
            }
        }
    }

    /// A port is gone.
    pub(super) fn closed(&mut self, port: PortId) {
        self.uncounted.remove(&port);
    }
}
