//! Whether packets were denied lately, by the packet counters of the flows that deny.
//!
//! A confirmed flow decides over packets that no megaflow covers. A megaflow that drops, for the address or for a
//! neighbour of it, can still drop the packet. Such a megaflow exists only if packets of the pod were denied lately.
//! Open vSwitch credits the packet that makes a megaflow to the deciding flows before the megaflow exists
//! (`upcall_xlate` in its ofproto/ofproto-dpif-upcall.c). Its revalidators credit later dropped packets every half a
//! second. A megaflow that drops nothing is removed after ten seconds. If the counters, read after the change, have
//! not moved for longer than both times together, no such megaflow can exist.
//!
//! A lost reading is never taken for quiet: the counter is unknown then.
//!
//! One case is left: the first packet in all that time is denied in the same microseconds in which the new flow is
//! written.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Timestamp, io::input::CookieCount, tools::counter_vec::labels};

labels! {
    /// Whether the answers that wait for new flows also have to wait for revalidation, and why.
    RevalidationWait {
        /// No wait: no packet was denied lately.
        Quiet = "quiet",
        /// No wait: the addresses have groups whose flows are in force.
        Group = "group",
        /// Wait: packets were denied lately, or the counters were not read for long enough.
        Lately = "denied_lately",
        /// Wait: the flows that deny are not counted.
        Unknown = "unknown",
        /// Wait: the switch did not answer the count.
        Uncounted = "uncounted",
    }
}

/// The packet counters of the flows that deny, and since when each has stood still.
#[derive(Debug, Default)]
pub struct DenyCounters(BTreeMap<u32, Seen>);

#[derive(Debug)]
struct Seen {
    flows: u32,
    packets: u64,
    /// When these values were first read.
    since: Timestamp,
}

impl DenyCounters {
    /// Records the counters of the flows with one cookie, read some time before `now`.
    pub fn note(&mut self, count: CookieCount, now: Timestamp) {
        let Self(counters) = self;
        let CookieCount {
            cookie,
            flows,
            packets,
        } = count;
        let since = match counters.get(&cookie) {
            // More flows with the same packets are no news: the flows of a new pod begin with zero.
            // If there are fewer flows, the last packets of the flows that went are unknown.
            Some(seen) if seen.packets == packets && seen.flows <= flows => seen.since,
            _ => now,
        };
        let seen = Seen {
            flows,
            packets,
            since,
        };
        counters.insert(cookie, seen);
    }

    /// Forgets a cookie: one of its flows has gone, and its counter with it.
    pub fn forget(&mut self, cookie: u32) {
        let Self(counters) = self;
        counters.remove(&cookie);
    }

    /// Forgets all counters.
    pub fn clear(&mut self) {
        let Self(counters) = self;
        counters.clear();
    }

    /// Keeps only the counters of these cookies.
    pub fn retain(&mut self, cookies: &BTreeSet<u32>) {
        let Self(counters) = self;
        counters.retain(|cookie, _| cookies.contains(cookie));
    }

    /// Since when the counters of all these cookies have stood still; zero if there are no cookies.
    /// `None` if one counter is unknown.
    pub fn quiet_since(&self, cookies: &BTreeSet<u32>) -> Option<Timestamp> {
        let Self(counters) = self;
        cookies
            .iter()
            .try_fold(Timestamp::default(), |since, cookie| {
                Some(since.max(counters.get(cookie)?.since))
            })
    }
}

#[cfg(test)]
mod tests;
