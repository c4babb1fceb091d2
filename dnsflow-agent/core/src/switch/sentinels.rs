//! The sentinel flows: without an agent that renews them, they take all other flows along.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
    time::Duration,
};

use crate::{
    Timestamp,
    installed::Batch,
    policy::plan::Planner,
    values::{
        flow::{Cookie, FlowChange, Sentinel},
        limits::{CHANGES_UNDER_WAY_MAX, RENEW_PAUSE},
    },
};

/// The sentinel flows in the switch.
#[derive(Debug)]
pub(super) struct Sentinels {
    /// Those that should be there now.
    there: BTreeSet<Sentinel>,
    /// Those that the current dump has shown, with their cookies and hard timeouts.
    found: BTreeMap<Sentinel, (Cookie, u16)>,
    /// Their hard timeout, in seconds.
    keep_flows_s: u16,
    /// When they are renewed next.
    renew_at: Option<Timestamp>,
    /// When the present round of renewals began, and the last one that was renewed.
    round: Option<(Timestamp, Sentinel)>,
}

impl Sentinels {
    pub(super) fn new(keep_flows_s: u16) -> Self {
        Self {
            there: BTreeSet::new(),
            found: BTreeMap::new(),
            keep_flows_s,
            renew_at: None,
            round: None,
        }
    }

    /// Two renewals may be lost.
    fn interval(&self) -> Duration {
        Duration::from_secs(self.keep_flows_s.into()) / 3
    }

    /// There is a connection.
    pub(super) fn connected(&mut self, now: Timestamp) {
        self.renew_at = Some(now + self.interval());
    }

    /// The connection is lost: nothing is known of the switch.
    pub(super) fn disconnected(&mut self) {
        *self = Self::new(self.keep_flows_s);
    }

    /// When they are renewed next.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.renew_at
    }

    /// Whether this one should be there.
    pub(super) fn contain(&self, sentinel: &Sentinel) -> bool {
        self.there.contains(sentinel)
    }

    /// One has gone, and the flows of its cookie with it. Restoring these restores the sentinel flow.
    pub(super) fn lost(&mut self, sentinel: &Sentinel) {
        self.there.remove(sentinel);
    }

    /// Those of an earlier run may be about to time out.
    pub(super) fn renew_at(&mut self, at: Timestamp) {
        self.renew_at = Some(at);
        self.round = None;
    }

    /// Restarts the hard timeouts, if that is due: of some at a time, as openings would wait behind all of them.
    pub(super) fn renew(
        &mut self,
        planner: &mut Planner,
        now: Timestamp,
    ) -> Option<Vec<FlowChange>> {
        self.renew_at.take_if(|at| *at <= now)?;
        let (began, behind) = match self.round {
            Some((began, last)) => (began, Excluded(last)),
            None => (now, Unbounded),
        };
        let rest = self.there.range((behind, Unbounded));
        let part: Vec<&Sentinel> = rest.take(CHANGES_UNDER_WAY_MAX).collect();
        let last = part.last().map(|last| **last);
        let last = last.filter(|_| part.len() == CHANGES_UNDER_WAY_MAX);
        self.round = last.map(|last| (began, last));
        self.renew_at = Some(match self.round {
            Some(_) => now + RENEW_PAUSE,
            None => began + self.interval(),
        });
        let bodies = part.into_iter();
        let bodies = bodies.map(|sentinel| planner.sentinel_body(*sentinel, self.keep_flows_s));
        Some(bodies.map(FlowChange::Renew).collect())
    }

    /// Adds, in front of the changes, the missing sentinel flows that the changes need.
    pub(super) fn tie(&mut self, changes: &mut Vec<FlowChange>, planner: &mut Planner) {
        let mut missing = Vec::new();
        for change in &*changes {
            if let FlowChange::Add(key, body) = change
                && body.hard_timeout_s == 0
            {
                let sentinel = Sentinel {
                    table: key.table,
                    cookie: body.cookie,
                };
                if self.there.insert(sentinel) {
                    missing.push(sentinel);
                }
            }
        }
        if !missing.is_empty() {
            let add = |sentinel: Sentinel| {
                let body = planner.sentinel_body(sentinel, self.keep_flows_s);
                FlowChange::Add(sentinel.key(), body)
            };
            changes.splice(..0, missing.into_iter().map(add));
        }
    }

    /// A dump begins.
    pub(super) fn dump_begins(&mut self) {
        self.found.clear();
    }

    /// The dump has shown one, with this cookie and this hard timeout.
    pub(super) fn found(&mut self, sentinel: Sentinel, cookie: Cookie, hard_timeout_s: u16) {
        self.found.insert(sentinel, (cookie, hard_timeout_s));
    }

    /// Those that the dump has shown.
    pub(super) fn all_found(&self) -> impl Iterator<Item = Sentinel> {
        self.found.keys().copied()
    }

    /// Compares the dump with the sentinel flows that there should be: restores missing ones, and removes those that no
    /// flow needs any more, but for those in `stay`. Those of an earlier run may have another timeout, which a renewal
    /// would keep.
    pub(super) fn compare(
        &mut self,
        planner: &mut Planner,
        stay: &BTreeSet<Sentinel>,
        batch: &mut Batch,
    ) {
        let found = std::mem::take(&mut self.found);
        let needed = planner.sentinels();
        for (sentinel, (cookie, _)) in &found {
            if stay.contains(sentinel) {
                // It is renewed like the others.
                self.there.insert(*sentinel);
            } else if !needed.contains(sentinel) {
                self.there.remove(sentinel);
                batch.extend([FlowChange::Delete(sentinel.key(), Some(*cookie))]);
            }
        }
        let mut missing = Vec::new();
        for sentinel in needed {
            let body = planner.sentinel_body(sentinel, self.keep_flows_s);
            self.there.insert(sentinel);
            if found.get(&sentinel) != Some(&(body.cookie, body.hard_timeout_s)) {
                missing.push(FlowChange::Add(sentinel.key(), body));
            }
        }
        // Before the flows that need them.
        batch.changes.splice(..0, missing);
    }
}
