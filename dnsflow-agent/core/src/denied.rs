//! Whether packets were denied lately, by what the flows that deny have counted.
//!
//! A flow that the switch has confirmed decides over what no megaflow covers. A megaflow that drops,
//! made for the address or for a neighbour of it, would still stand in the way; but it is there only
//! if packets of the pod were denied lately. Open vSwitch credits the packet that makes a megaflow to
//! the flows that decided over it before the megaflow is there (`upcall_xlate` in its
//! ofproto/ofproto-dpif-upcall.c), and the packets that the megaflow drops later when its revalidators
//! come by, every half a second. A megaflow that drops nothing goes after ten seconds. So, where
//! the flows that deny say after the change what they have said for longer than both together, no such
//! megaflow can be there.
//!
//! It must never take a gap for quiet: counters of which one was lost are not known.
//!
//! What is left is the packet that is being decided over in the very moment in which the new flow is
//! written, the first one in all that time that is denied: some microseconds.

use std::collections::{BTreeMap, BTreeSet};

use super::{Timestamp, counter_vec::labels, input::CookieCount};

labels! {
    /// Why the answers that wait for new flows have to wait for the switch's megaflows too, or not.
    RevalidationWait {
        /// They do not: no packet was denied lately.
        Quiet = "quiet",
        /// Packets were denied lately, or nobody has looked for long enough.
        Lately = "denied_lately",
        /// It cannot be known: what denies is not counted.
        Unknown = "unknown",
        /// The switch did not say.
        Uncounted = "uncounted",
    }
}

/// What flows that deny have counted, and since when they have counted no more.
#[derive(Debug, Default)]
pub struct DenyCounters(BTreeMap<u32, Seen>);

#[derive(Debug)]
struct Seen {
    flows: u32,
    packets: u64,
    /// When they were first seen to be so.
    since: Timestamp,
}

impl DenyCounters {
    /// Takes in what the flows with one cookie said some time before `now`.
    pub fn note(&mut self, count: CookieCount, now: Timestamp) {
        let Self(counters) = self;
        let CookieCount {
            cookie,
            flows,
            packets,
        } = count;
        let since = match counters.get(&cookie) {
            // Another pod has flows of its own, which begin with zero; with fewer flows, it is not
            // known what those had counted that went.
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

    /// One of the flows with this cookie has gone, with what it had counted.
    pub fn forget(&mut self, cookie: u32) {
        let Self(counters) = self;
        counters.remove(&cookie);
    }

    /// Nothing is known any more.
    pub fn clear(&mut self) {
        let Self(counters) = self;
        counters.clear();
    }

    /// Keeps only what is known of these cookies.
    pub fn retain(&mut self, cookies: &BTreeSet<u32>) {
        let Self(counters) = self;
        counters.retain(|cookie, _| cookies.contains(cookie));
    }

    /// Since when none of these has counted a packet: since ever, where there are none. `None` where
    /// one is not known.
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
