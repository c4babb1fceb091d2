//! Which namespaces deny with which flows of OVN's, what those have counted, and whether answers
//! that wait for new flows can therefore go back without waiting for revalidation.
//!
//! Only the flows of the EgressFirewall's ACLs matter. What another stage drops never came to the
//! place of our flows, and a flow of ours that drops says itself that answers must wait for revalidation.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::Opening;
use crate::{
    Command, Timestamp,
    counter_vec::CounterVec,
    denied::{DenyCounters, RevalidationWait},
    input::CookieCount,
    limits::{
        COUNT_DELAY, COUNT_INTERVAL, COUNTED_COOKIES_MAX, COUNTED_PER_BATCH_MAX, MEGAFLOW_IDLE,
        MEGAFLOW_IDLE_MARGIN,
    },
    output::Output,
    policy::Policy,
    ports::Ports,
};

/// What is known of packets that are denied.
#[derive(Debug)]
pub(crate) struct Denials {
    namespaces: BTreeMap<String, Namespace>,
    counters: DenyCounters,
    count_at: Option<Timestamp>,
    /// How long after its last packet a megaflow can be there.
    megaflow_idle: Duration,
    /// Whether anybody waits for revalidation.
    waits: bool,
    /// How long an address stays open that is not used.
    idle_grace: Duration,
    events: CounterVec<RevalidationWait>,
}

/// A namespace with rules for names and a port here.
#[derive(Debug)]
struct Namespace {
    /// The cookies of the flows that deny; `None` where they cannot be counted.
    cookies: Option<BTreeSet<u32>>,
    /// Whether rules have changed since they were last looked for.
    outdated: bool,
    /// When rules last changed: what they denied before is not counted any more.
    since: Timestamp,
}

/// How the answers of a batch may be judged before it is sent.
#[derive(Debug, Eq, PartialEq)]
enum Outlook {
    /// They have to wait.
    Wait(RevalidationWait),
    /// They need not, if these cookies have counted nothing more when it is done.
    Count(BTreeSet<u32>),
}

impl Denials {
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

    /// When [`Denials::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Timestamp> {
        self.count_at
    }

    /// What became of batches of openings.
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

    /// How long after its last packet the switch keeps a megaflow, as its database says.
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

    /// Has the flows that deny counted, when that is due.
    pub(crate) fn timeout(
        &mut self,
        ports: &Ports,
        policy: &Policy,
        now: Timestamp,
        out: &mut Output,
    ) {
        if self.count_at.is_none_or(|at| at > now) {
            return;
        }
        self.count_at = Some(now + COUNT_INTERVAL);
        let namespaces = ports
            .iter()
            .filter_map(|(_, port)| policy.namespace_of(&port.row));
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
            let cookies = known.cookies.iter().flatten();
            if all.len() + cookies.clone().count() <= COUNTED_COOKIES_MAX {
                all.extend(cookies);
            }
        }
        self.counters.retain(&all);
        if !all.is_empty() {
            out.command(Command::CountFlows(all.into_iter().collect()));
        }
    }

    /// Notes what was counted.
    pub(crate) fn counted(&mut self, counts: Vec<CookieCount>, now: Timestamp) {
        for count in counts {
            self.counters.note(count, now);
        }
    }

    /// The cookies to count behind the changes of a batch: none where that would make no difference.
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

    /// Whether the answers that wait for a batch have to wait for megaflows. The flows that deny were
    /// counted, if so, after `sent_at`.
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

    /// By what is known, at `now`.
    fn outlook(&self, openings: &[Opening], revalidation: Duration, now: Timestamp) -> Outlook {
        let idle_max = self.megaflow_idle + MEGAFLOW_IDLE_MARGIN + revalidation * 2;
        // What is closed can be opened again only when no megaflow of before is there.
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
