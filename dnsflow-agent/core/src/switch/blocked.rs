//! When to search for connections that OVN has blocked while a flow of ours was missing.
//!
//! If a packet of an established connection meets a Deny of OVN's, OVN marks the connection: bit 0 of the mark in the
//! pod's conntrack zone (`ct_mark.blocked`, `OVN_CT_BLOCKED_BIT` in OVN's include/ovn/logical-fields.h; ovn-northd's
//! `consider_acl` writes it). From then on OVN drops the replies of the connection (`build_acls` in northd/northd.c:
//! `ct.est && ct.rpl && ct_mark.blocked == 1`). Only an allowed packet of the pod clears the mark. A pod that only
//! receives sends no such packet, so its connection hangs even after our flows are restored.
//!
//! So the engine searches for marked connections each time that the switch has confirmed restored flows that open an
//! address. A new address never causes a search, so answers do not pay for it.
//!
//! There are at least two searches. A megaflow from the gap can mark connections until Open vSwitch's revalidators
//! have replaced it, and nothing reports that time.

use std::{collections::BTreeSet, time::Duration};

use crate::{Timestamp, io::input::BatchId};

/// Time between the switch's confirmation and the first search. After a change of flows, the
/// revalidators mostly take milliseconds; without a change they come by every half a second
/// (`max-revalidator` in ovs-vswitchd.conf.db(5)).
const FIRST_SEARCH_DELAY: Duration = Duration::from_millis(50);
/// Time between two searches: longer than that half second. Each search reads the whole conntrack table.
pub const SEARCH_INTERVAL: Duration = Duration::from_secs(1);
/// Searches for one gap, at least.
pub const SEARCHES_MIN: u8 = 2;
/// Searches for one gap, at most: further searches follow while each one finds a connection to unblock.
pub const SEARCHES_MAX: u8 = 8;

/// When to search for blocked connections.
#[derive(Debug, Default)]
pub struct BlockedSearches {
    /// Batches that restore flows, and that the switch has not confirmed.
    batches: BTreeSet<BatchId>,
    /// The next search.
    at: Option<Timestamp>,
    /// When the last search began.
    last: Option<Timestamp>,
    /// How many searches have begun since flows were last confirmed.
    searches: u8,
    /// Whether a search is under way.
    is_searching: bool,
    /// Whether the search under way has found a connection to unblock.
    found: bool,
}

impl BlockedSearches {
    /// Notes that a batch, which is sent, restores a flow that opens an address.
    pub fn restoring(&mut self, batch: BatchId) {
        self.batches.insert(batch);
    }

    /// The switch has confirmed or refused a batch. Its megaflows usually follow after
    /// `revalidation`.
    pub fn answered(&mut self, batch: BatchId, revalidation: Duration, now: Timestamp) {
        if self.batches.remove(&batch) {
            self.gap_ended(now + revalidation);
        }
    }

    /// The flows are back; the megaflows follow at `at`.
    pub fn gap_ended(&mut self, at: Timestamp) {
        self.searches = 0;
        self.plan(at + FIRST_SEARCH_DELAY);
    }

    /// The connection to the switch is lost. The next comparison writes the missing flows.
    pub fn disconnected(&mut self) {
        self.batches.clear();
    }

    /// The next search.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.at.filter(|_| !self.is_searching)
    }

    /// Whether to search now.
    pub fn begin(&mut self, now: Timestamp) -> bool {
        let is_due = self.deadline().is_some_and(|at| at <= now);
        if is_due {
            self.at = None;
            self.last = Some(now);
            self.is_searching = true;
            self.found = false;
            self.searches += 1;
        }
        is_due
    }

    /// The search under way has found `count` connections to unblock. It ends unless `more` follows.
    pub fn found(&mut self, count: usize, more: bool, now: Timestamp) {
        self.found |= count > 0;
        if more {
            return;
        }
        self.is_searching = false;
        if self.searches < SEARCHES_MIN || (self.found && self.searches < SEARCHES_MAX) {
            self.plan(now);
        }
    }

    /// Plans a search at this time, at least one interval after the last search.
    fn plan(&mut self, at: Timestamp) {
        let at = self.last.map_or(at, |last| at.max(last + SEARCH_INTERVAL));
        self.at = Some(self.at.map_or(at, |planned| planned.min(at)));
    }
}

#[cfg(test)]
mod tests;
