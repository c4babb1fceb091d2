//! The EgressFirewalls, and since when each counts.
//!
//! OVN follows a changed EgressFirewall later, if at all. Until it does, [`Firewalls`] has the former ones of the
//! namespace as well: OVN may still enforce one of them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use crate::{
    Timestamp,
    policy::{FIREWALL_NAME, rules::pairing::Pairing},
    values::{
        firewall::{Firewall, FirewallId, FirewallUpdate},
        limits::{FORMER_FIREWALLS_MAX, FORMER_RULES_MAX, TAKEOVER_MAX},
    },
};

/// The EgressFirewalls of the cluster.
#[derive(Debug, Default)]
pub(super) struct Firewalls {
    latest: BTreeMap<FirewallId, Firewall>,
    /// By namespace, when the rules of its EgressFirewall came, if they were not there at the agent's start.
    came_at: BTreeMap<String, Timestamp>,
    are_read: bool,
    /// By namespace, the EgressFirewalls that OVN does not enforce yet. In a namespace without a pod here, nobody looks
    /// whether OVN does.
    unfollowed: BTreeMap<String, Unfollowed>,
}

/// An EgressFirewall that OVN does not enforce yet.
#[derive(Debug)]
struct Unfollowed {
    /// When it came.
    since: Timestamp,
    /// Whether it was looked at after it had become late.
    late: bool,
    /// The EgressFirewalls before it, the latest last. OVN may still enforce one of them.
    former: Vec<Firewall>,
    /// Whether OVN enforces the first of `former`.
    enforces_former: bool,
}

impl Unfollowed {
    fn new(since: Timestamp, former: Vec<Firewall>) -> Self {
        Self {
            since,
            late: false,
            former,
            enforces_former: false,
        }
    }

    /// How many rules the former ones have.
    fn former_rules(&self) -> usize {
        self.former.iter().map(|former| former.rules.len()).sum()
    }
}

impl Firewalls {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.latest.len()
    }

    /// Those that count, by namespace.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Firewall)> {
        let latest = self.latest.iter();
        let named = latest.filter(|(id, _)| id.name == FIREWALL_NAME);
        named.map(|(id, firewall)| (id.namespace.as_str(), firewall))
    }

    /// The one of a namespace, whether or not OVN enforces it.
    pub(super) fn latest(&self, namespace: &str) -> Option<&Firewall> {
        self.latest.get(&FirewallId {
            namespace: namespace.to_owned(),
            name: FIREWALL_NAME.to_owned(),
        })
    }

    /// Those of a namespace before it, the latest last, of which OVN may enforce one.
    pub(super) fn former(&self, namespace: &str) -> &[Firewall] {
        let unfollowed = self.unfollowed.get(namespace);
        unfollowed.map_or(&[], |one| &one.former)
    }

    /// The one before it that OVN enforces, as far as that is known.
    pub(super) fn enforced_former(&self, namespace: &str) -> Option<&Firewall> {
        let unfollowed = self.unfollowed.get(namespace);
        let enforced = unfollowed.filter(|one| one.enforces_former);
        enforced.and_then(|one| one.former.first())
    }

    /// When the rules of a namespace came.
    pub(super) fn came_at(&self, namespace: &str) -> Option<Timestamp> {
        self.came_at.get(namespace).copied()
    }

    /// Whether they were read.
    pub(super) fn are_read(&self) -> bool {
        self.are_read
    }

    /// Takes in changes. `is_local` says whether a namespace has pods here. Returns the namespaces whose present or
    /// former EgressFirewalls may have changed.
    pub(super) fn apply(
        &mut self,
        update: FirewallUpdate,
        is_local: impl Fn(&str) -> bool,
        now: Timestamp,
    ) -> BTreeSet<String> {
        let mut namespaces = BTreeSet::new();
        let is_start = !self.are_read;
        self.are_read |= update.reset;
        let kept: BTreeSet<&FirewallId> = update.firewalls.iter().map(|(id, _)| id).collect();
        let gone = self.latest.keys();
        let gone = gone.filter(|id| update.reset && !kept.contains(id));
        let gone: Vec<_> = gone.map(|id| (id.clone(), None)).collect();
        for (id, firewall) in gone.into_iter().chain(update.firewalls) {
            let namespace = id.namespace.clone();
            namespaces.insert(namespace.clone());
            let Some(firewall) = firewall else {
                self.unfollowed.remove(&namespace);
                self.came_at.remove(&namespace);
                self.latest.remove(&id);
                continue;
            };
            match self.latest.insert(id.clone(), firewall.clone()) {
                Some(before) if before.is_like(&firewall) => {
                    // All copies share the rules.
                    let rules = before.rules;
                    self.latest.insert(id, Firewall { rules, ..firewall });
                }
                before => {
                    if !is_start {
                        self.came_at.insert(namespace.clone(), now);
                    }
                    // Without a pod here, nobody has to know whether OVN enforces the first one.
                    if before.is_some() || is_local(&namespace) {
                        self.expect_takeover(namespace, before, now);
                    }
                }
            }
        }
        namespaces.append(&mut self.limit_former(is_local));
        namespaces
    }

    /// Notes a changed EgressFirewall, which OVN may not enforce yet.
    fn expect_takeover(&mut self, namespace: String, before: Option<Firewall>, now: Timestamp) {
        let known = self.unfollowed.remove(&namespace);
        let mut former = known.map(|known| known.former).unwrap_or_default();
        former.extend(before);
        if former.len() > FORMER_FIREWALLS_MAX {
            // OVN may enforce the first one. The first one is therefore forgotten last.
            former.remove(1);
        }
        let unfollowed = Unfollowed::new(now, former);
        self.unfollowed.insert(namespace, unfollowed);
    }

    /// Forgets former EgressFirewalls beyond the limit of the node. Returns the namespaces with pods here that have
    /// lost some.
    ///
    /// Where no pod is, nobody asks which one OVN enforces: those go first. Of a namespace, the first one goes last,
    /// because OVN may enforce it. Then OVN's rows are judged by the latest.
    fn limit_former(&mut self, is_local: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let mut cut = BTreeSet::new();
        let counts = self.unfollowed.values().map(Unfollowed::former_rules);
        let mut count: usize = counts.sum();
        for (is_here, kept) in [(false, 1), (false, 0), (true, 1), (true, 0)] {
            if count <= FORMER_RULES_MAX {
                break;
            }
            let mut all: Vec<_> = self.unfollowed.iter_mut().collect();
            all.retain(|(name, one)| one.former.len() > kept && is_local(name) == is_here);
            // Of equally many, the newest goes: a tenant's further edits take nothing from others.
            all.sort_by_key(|(_, one)| Reverse((one.former_rules(), one.since)));
            for (namespace, most) in all {
                if count <= FORMER_RULES_MAX {
                    break;
                }
                count -= most.former_rules();
                most.former.truncate(kept);
                count += most.former_rules();
                cut.extend(is_here.then(|| namespace.clone()));
            }
        }
        cut
    }

    /// The namespace has its first pod here: its EgressFirewall may be one that OVN does not enforce.
    pub(super) fn entered(&mut self, namespace: &str, now: Timestamp) {
        let unfollowed = self.unfollowed.entry(namespace.to_owned());
        unfollowed.or_insert_with(|| Unfollowed::new(now, Vec::new()));
    }

    /// The namespace has no pod here. If one comes, OVN's rows tell whether the latest EgressFirewall is enforced.
    pub(super) fn left(&mut self, namespace: &str) {
        let unfollowed = self.unfollowed.get(namespace);
        let is_over =
            |one: &Unfollowed| !one.enforces_former && (one.late || one.former.is_empty());
        if unfollowed.is_some_and(is_over) {
            self.unfollowed.remove(namespace);
        }
    }

    /// Finds the EgressFirewall of a namespace that OVN enforces, the latest first. Returns it if
    /// it is not the latest. If none is found, OVN's rows are judged by the latest.
    pub(super) fn follow(
        &mut self,
        namespace: &str,
        latest: &Firewall,
        pairing: &mut Pairing,
    ) -> Option<Firewall> {
        let unfollowed = self.unfollowed.get_mut(namespace)?;
        if pairing.is_enforced(latest) {
            self.unfollowed.remove(namespace);
            return None;
        }
        let former = &mut unfollowed.former;
        let enforced = former.iter().rposition(|one| pairing.is_enforced(one));
        unfollowed.enforces_former = enforced.is_some();
        former.drain(..enforced?);
        former.first().cloned()
    }

    /// When the next EgressFirewall becomes late.
    pub(super) fn late_at(&self) -> Option<Timestamp> {
        let waiting = self.unfollowed.values().filter(|one| !one.late);
        waiting.map(|one| one.since + TAKEOVER_MAX).min()
    }

    /// Takes the namespaces whose EgressFirewall has become late.
    pub(super) fn take_late(&mut self, now: Timestamp) -> Vec<String> {
        let is_late = |one: &Unfollowed| !one.late && one.since + TAKEOVER_MAX <= now;
        let late = self.unfollowed.iter_mut().filter(|(_, one)| is_late(one));
        let late = late.map(|(namespace, one)| {
            one.late = true;
            namespace.clone()
        });
        late.collect()
    }

    /// Whether the EgressFirewall of a namespace was late when it was last looked at.
    pub(super) fn is_late(&self, namespace: &str) -> bool {
        self.unfollowed.get(namespace).is_some_and(|one| one.late)
    }
}

#[cfg(test)]
mod tests;
