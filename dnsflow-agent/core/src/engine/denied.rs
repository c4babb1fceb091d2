//! Which namespaces deny with which flows of OVN's, what those have counted, and whether answers
//! that wait for new flows can therefore go back without the time to settle.
//!
//! Only the flows of the EgressFirewall's ACLs matter. What another stage drops never came to the
//! place of our flows, and a flow of ours that drops says itself that it must settle.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{Engine, switch::Opening};
use crate::{
    Command, Timestamp,
    denied::{DenyCounters, Settling},
    input::{BatchId, CookieCount},
    limits::{
        COUNT_DELAY, COUNT_INTERVAL, COUNTED_COOKIES_MAX, COUNTED_PER_BATCH_MAX, MEGAFLOW_IDLE,
        MEGAFLOW_IDLE_MARGIN,
    },
    tally::Tally,
};

/// What is known of packets that are denied.
#[derive(Debug)]
pub(super) struct Denied {
    namespaces: BTreeMap<String, Namespace>,
    counters: DenyCounters,
    count_at: Option<Timestamp>,
    /// How long after its last packet a megaflow can be there.
    megaflow_idle: Duration,
    events: Tally<Settling>,
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
    Settle(Settling),
    /// They need not, if these cookies have counted nothing more when it is done.
    Count(BTreeSet<u32>),
}

impl Default for Denied {
    fn default() -> Self {
        Self {
            namespaces: BTreeMap::new(),
            counters: DenyCounters::default(),
            count_at: None,
            megaflow_idle: MEGAFLOW_IDLE,
            events: Tally::default(),
        }
    }
}

impl Denied {
    /// When [`Engine::count_denied`] wants to be called.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.count_at
    }

    /// What became of batches of openings.
    pub(super) fn events(&self) -> &Tally<Settling> {
        &self.events
    }

    pub(super) fn count(&mut self, settling: Settling) {
        self.events.count(settling);
    }

    /// The connection to the switch is lost.
    pub(super) fn disconnected(&mut self) {
        self.counters.clear();
        self.count_at = None;
    }

    /// Flows may have come and gone unseen.
    pub(super) fn gap(&mut self) {
        self.counters.clear();
    }

    /// A flow that is counted was removed.
    pub(super) fn count_lost(&mut self, cookie: u32) {
        self.counters.forget(cookie);
    }

    /// How long after its last packet the switch keeps a megaflow, as its database says.
    pub(super) fn megaflows_idle_for(&mut self, idle: Duration) {
        self.megaflow_idle = idle;
    }

    /// The rules of a namespace have changed, or where OVN enforces them.
    pub(super) fn rules_changed(&mut self, namespace: &str, now: Timestamp) {
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
}

impl Engine {
    /// Whether anybody waits for megaflows to settle.
    fn settles(&self) -> bool {
        !self.config.hold_max.is_zero()
    }

    /// Begins to count, now that there is a connection to the switch.
    pub(super) fn count_from(&mut self, now: Timestamp) {
        self.denied.disconnected();
        self.denied.count_at = self.settles().then_some(now + COUNT_DELAY);
    }

    /// Has the flows that deny counted, when that is due.
    pub(super) fn count_denied(&mut self, now: Timestamp) {
        if self.denied.count_at.is_none_or(|at| at > now) {
            return;
        }
        self.denied.count_at = Some(now + COUNT_INTERVAL);
        let Self {
            denied,
            world,
            ports,
            commands,
            ..
        } = self;
        let namespaces = ports
            .values()
            .filter_map(|port| world.namespace_of(&port.row));
        let present: BTreeSet<&str> = namespaces.collect();
        denied
            .namespaces
            .retain(|namespace, _| present.contains(namespace.as_str()));
        let mut all = BTreeSet::new();
        for namespace in present {
            let known = denied
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
                known.cookies = world.denying(namespace, &before);
            }
            let cookies = known.cookies.iter().flatten();
            if all.len() + cookies.clone().count() <= COUNTED_COOKIES_MAX {
                all.extend(cookies);
            }
        }
        denied.counters.retain(&all);
        if !all.is_empty() {
            commands.push(Command::CountFlows(all.into_iter().collect()));
        }
    }

    /// Takes in what was counted; returns the batch behind whose changes.
    pub(super) fn counted(
        &mut self,
        batch: Option<BatchId>,
        counts: Vec<CookieCount>,
        now: Timestamp,
    ) {
        for count in counts {
            self.denied.counters.note(count, now);
        }
        if let Some(batch) = batch {
            self.switch.counted(batch);
        }
    }

    /// The cookies to count behind the changes of a batch: none where that would make no difference.
    pub(super) fn cookies_to_count(&self, openings: &[Opening], now: Timestamp) -> Vec<u32> {
        match self.outlook(openings, now) {
            Outlook::Settle(_) => Vec::new(),
            Outlook::Count(cookies) => cookies.into_iter().collect(),
        }
    }

    /// Whether the answers that wait for a batch have to wait for megaflows. The flows that deny were
    /// counted, if so, after `sent_at`.
    pub(super) fn settling(
        &self,
        openings: &[Opening],
        counted: bool,
        sent_at: Timestamp,
    ) -> Settling {
        match self.outlook(openings, sent_at) {
            Outlook::Settle(why) => why,
            Outlook::Count(cookies) if counted || cookies.is_empty() => Settling::Quiet,
            Outlook::Count(_) => Settling::Uncounted,
        }
    }

    /// By what is known, at `now`.
    fn outlook(&self, openings: &[Opening], now: Timestamp) -> Outlook {
        let denied = &self.denied;
        let idle_max = denied.megaflow_idle + MEGAFLOW_IDLE_MARGIN + self.revalidation * 2;
        // What is closed can be opened again only when no megaflow of before is there.
        if openings.is_empty() || !self.settles() || self.config.leases.idle_grace < idle_max {
            return Outlook::Settle(Settling::Unknown);
        }
        let mut all = BTreeSet::new();
        let mut lately = false;
        for opening in openings {
            let port = self.port_by_name.get(&opening.port);
            let port = port.and_then(|id| self.ports.get(id));
            let namespace = port.and_then(|port| self.world.namespace_of(&port.row));
            let known = namespace.and_then(|namespace| denied.namespaces.get(namespace));
            let Some(known) = known.filter(|known| !known.outdated) else {
                lately = true;
                continue;
            };
            let Some(cookies) = &known.cookies else {
                return Outlook::Settle(Settling::Unknown);
            };
            let since = denied.counters.quiet_since(cookies);
            lately |= since.is_none_or(|since| now.since(since.max(known.since)) < idle_max);
            all.extend(cookies);
            if all.len() > COUNTED_PER_BATCH_MAX {
                return Outlook::Settle(Settling::Unknown);
            }
        }
        if lately {
            Outlook::Settle(Settling::Lately)
        } else {
            Outlook::Count(all)
        }
    }
}
