//! The flows of OVN's that deny in each namespace, and their packet counters. The counters decide whether answers
//! that wait for new flows can go back without waiting for revalidation.
//!
//! Only the flows of the EgressFirewall's ACLs matter. A packet that another stage drops never
//! reached the stage of our flows. If a flow of ours drops, answers always wait for revalidation.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::Opening;
use crate::{
    Command, Timestamp,
    io::{
        input::{CookieCount, FlowQuestion},
        output::Output,
    },
    pods::ports::Ports,
    policy::Policy,
    switch::deny_counters::{DenyCounters, RevalidationWait},
    tools::counter_vec::CounterVec,
    values::limits::{
        COUNT_DELAY, COUNT_INTERVAL, COUNTED_COOKIES_MAX, COUNTED_PER_BATCH_MAX, MEGAFLOW_IDLE,
        MEGAFLOW_IDLE_MARGIN,
    },
};

/// The knowledge about denied packets.
#[derive(Debug)]
pub(crate) struct QuietTime {
    namespaces: BTreeMap<String, Namespace>,
    counters: DenyCounters,
    count_at: Option<Timestamp>,
    /// How long a megaflow can exist after its last packet.
    megaflow_idle: Duration,
    /// Whether anybody waits for revalidation.
    waits: bool,
    /// How long an unused address stays open.
    idle_grace: Duration,
    events: CounterVec<RevalidationWait>,
}

/// A namespace with rules for names and a port here.
#[derive(Debug)]
struct Namespace {
    /// The cookies of the flows that deny; `None` where they cannot be counted.
    cookies: Option<BTreeSet<u32>>,
    /// Whether rules have changed since the cookies were found.
    outdated: bool,
    /// When rules last changed: packets that the old rules denied are no longer counted.
    since: Timestamp,
}

/// The wait of a batch's answers, as far as it is known before the batch is sent.
#[derive(Debug, Eq, PartialEq)]
enum Outlook {
    /// The answers have to wait.
    Wait(RevalidationWait),
    /// The answers need not wait, if these cookies have counted nothing more when the batch is
    /// confirmed.
    Count(BTreeSet<u32>),
}

impl QuietTime {
    /// Nothing is known yet.
    pub(crate) fn new(waits: bool, idle_grace: Duration) -> Self {
        Self {
            namespaces: BTreeMap::new(),
            counters: DenyCounters::default(),
            count_at: None,
            megaflow_idle: MEGAFLOW_IDLE,
            waits,
            idle_grace,
            events: CounterVec::default(),
        }
    }

    /// When [`QuietTime::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Timestamp> {
        self.count_at
    }

    /// For each batch of openings: whether its answers had to wait, and why.
    pub(crate) fn events(&self) -> &CounterVec<RevalidationWait> {
        &self.events
    }

    pub(crate) fn count(&mut self, revalidation_wait: RevalidationWait) {
        self.events.count(revalidation_wait);
    }

    /// Begins to count, now that there is a connection to the switch.
    pub(crate) fn connected(&mut self, now: Timestamp) {
        self.disconnected();
        self.count_at = self.waits.then_some(now + COUNT_DELAY);
    }

    /// The connection to the switch is lost.
    pub(crate) fn disconnected(&mut self) {
        self.counters.clear();
        self.count_at = None;
    }

    /// Flows may have come and gone unseen.
    pub(crate) fn gap(&mut self) {
        self.counters.clear();
    }

    /// A flow that is counted was removed.
    pub(crate) fn count_lost(&mut self, cookie: u32) {
        self.counters.forget(cookie);
    }

    /// Sets how long the switch keeps a megaflow after its last packet, as its database says.
    pub(crate) fn megaflows_idle_for(&mut self, idle: Duration) {
        self.megaflow_idle = idle;
    }

    /// The rules of a namespace have changed, or where OVN enforces them.
    pub(crate) fn rules_changed(&mut self, namespace: &str, now: Timestamp) {
        if let Some(known) = self.namespaces.get_mut(namespace) {
            known.outdated = true;
            known.since = now;
        }
        self.count_soon(now);
    }

    fn count_soon(&mut self, now: Timestamp) {
        let soon = now + COUNT_DELAY;
        self.count_at = self.count_at.map(|at| at.min(soon));
    }

    /// Asks for the counters of the flows that deny, if that is due.
    pub(crate) fn timeout(&mut self, ports: &Ports, policy: &Policy, out: &mut Output) {
        let now = out.now();
        if self.count_at.is_none_or(|at| at > now) {
            return;
        }
        self.count_at = Some(now + COUNT_INTERVAL);
        let namespaces = ports
            .iter()
            .filter_map(|(_, port)| policy.namespace_of_rules(&port.row));
        let present: BTreeSet<&str> = namespaces.collect();
        self.namespaces
            .retain(|namespace, _| present.contains(namespace.as_str()));
        let mut all = BTreeSet::new();
        for namespace in present {
            let known = self
                .namespaces
                .entry(namespace.to_owned())
                .or_insert_with(|| Namespace {
                    cookies: None,
                    outdated: true,
                    since: now,
                });
            if known.outdated {
                known.outdated = false;
                let before = known.cookies.take().unwrap_or_default();
                known.cookies = policy.denying(namespace, &before);
            }
            if let Some(cookies) = &known.cookies {
                count_with(&mut all, cookies);
            }
        }
        self.counters.retain(&all);
        if !all.is_empty() {
            let question = FlowQuestion::Count(all.into_iter().collect());
            out.command(Command::Ask(question));
        }
    }

    /// Records counters.
    pub(crate) fn counted(&mut self, counts: Vec<CookieCount>, now: Timestamp) {
        for count in counts {
            self.counters.note(count, now);
        }
    }

    /// The cookies to count behind the changes of a batch: none if the counters would make no
    /// difference.
    pub(crate) fn to_count(
        &self,
        openings: &[Opening],
        revalidation: Duration,
        now: Timestamp,
    ) -> Vec<u32> {
        match self.outlook(openings, revalidation, now) {
            Outlook::Wait(_) => Vec::new(),
            Outlook::Count(cookies) => cookies.into_iter().collect(),
        }
    }

    /// Whether the answers that wait for a batch have to wait for revalidation. `counted`: the
    /// flows that deny were counted after `sent_at`.
    pub(crate) fn revalidation_wait(
        &self,
        openings: &[Opening],
        counted: bool,
        revalidation: Duration,
        sent_at: Timestamp,
    ) -> RevalidationWait {
        match self.outlook(openings, revalidation, sent_at) {
            Outlook::Wait(why) => why,
            Outlook::Count(cookies) if counted || cookies.is_empty() => RevalidationWait::Quiet,
            Outlook::Count(_) => RevalidationWait::Uncounted,
        }
    }

    /// The judgement at `now`.
    fn outlook(&self, openings: &[Opening], revalidation: Duration, now: Timestamp) -> Outlook {
        let idle_max = self.megaflow_idle + MEGAFLOW_IDLE_MARGIN + revalidation * 2;
        // A closed address must not be opened again while a megaflow from before can exist.
        if openings.is_empty() || !self.waits || self.idle_grace < idle_max {
            return Outlook::Wait(RevalidationWait::Unknown);
        }
        let mut all = BTreeSet::new();
        let mut lately = false;
        for opening in openings {
            let namespace = opening.namespace.as_ref();
            let known = namespace.and_then(|namespace| self.namespaces.get(namespace));
            let Some(known) = known.filter(|known| !known.outdated) else {
                lately = true;
                continue;
            };
            let Some(cookies) = &known.cookies else {
                return Outlook::Wait(RevalidationWait::Unknown);
            };
            let since = self.counters.quiet_since(cookies);
            lately |= since.is_none_or(|since| now.since(since.max(known.since)) < idle_max);
            all.extend(cookies);
            if all.len() > COUNTED_PER_BATCH_MAX {
                return Outlook::Wait(RevalidationWait::Unknown);
            }
        }
        if lately {
            Outlook::Wait(RevalidationWait::Lately)
        } else {
            Outlook::Count(all)
        }
    }
}

/// Counts the cookies of a namespace with those of others, if there is room for all of them.
fn count_with(others: &mut BTreeSet<u32>, cookies: &BTreeSet<u32>) {
    if others.len() + cookies.len() <= COUNTED_COOKIES_MAX {
        others.extend(cookies);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a count, every answer of the namespace waits.
    #[test]
    fn a_namespace_beyond_the_cookies_of_all_is_not_counted() {
        let of = |first: usize, count: usize| -> BTreeSet<u32> {
            (first as u32..).take(count).collect()
        };
        let mut all = of(0, COUNTED_COOKIES_MAX - 3);
        count_with(&mut all, &of(1000, 4));
        assert_eq!(all.len(), COUNTED_COOKIES_MAX - 3, "four have no room");
        count_with(&mut all, &of(2000, 3));
        assert_eq!(all.len(), COUNTED_COOKIES_MAX);
    }
}
