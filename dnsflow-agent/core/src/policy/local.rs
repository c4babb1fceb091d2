//! The rules of a namespace with pods here: those that OVN enforces, and those of its EgressFirewalls that OVN does not
//! enforce yet.
//!
//! The latter are those of the last comparison ([`Local::compare`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    Timestamp,
    policy::rules::{NamePattern, NotTakenOver, Problem, differing, pairing::Pairing},
    values::{
        firewall::{Destination, Firewall, Floor, Rule, RuleAction},
        name::DomainName,
    },
};

/// A namespace with an EgressFirewall and with pods here.
#[derive(Debug, Default)]
pub(super) struct Local {
    /// The rules that OVN enforces.
    pub(super) pairing: Pairing,
    /// Another one, also than that of any other namespace, when the rules may be others.
    pub(super) version: u64,
    /// When that was.
    pub(super) changed_at: Timestamp,
    /// The EgressFirewalls that `differing` and `other_names` were found for: the one that OVN enforces, the latest,
    /// and those in between.
    compared: Vec<Arc<[Rule]>>,
    /// The indices at which the latest EgressFirewall has another rule than the one that OVN enforces.
    differing: Vec<u32>,
    /// Names without wildcards of rules that only an EgressFirewall has that OVN does not enforce, and which names at
    /// or below each of them these rules deny.
    other_names: BTreeMap<DomainName, Vec<NamePattern>>,
    /// Another one when the names may be others.
    pub(super) names_version: u64,
    /// The problems that are not those of the pairing, by rule index; `None` if there is none.
    other_problems: BTreeMap<u32, Option<Problem>>,
}

impl Local {
    pub(super) fn new(namespace: &str, subdomains: bool) -> Self {
        Self {
            pairing: Pairing::new(namespace, subdomains),
            ..Self::default()
        }
    }

    /// The problems, by rule index.
    pub(super) fn problems(&self) -> impl Iterator<Item = (u32, &Problem)> {
        let others = &self.other_problems;
        let problems = self.pairing.rules().problems.iter();
        let problems = problems.filter(|(index, _)| !others.contains_key(*index));
        let others = others
            .iter()
            .filter_map(|(index, problem)| Some((*index, problem.as_ref()?)));
        problems
            .map(|(index, problem)| (*index, problem))
            .chain(others)
    }

    /// The problem of the rule at an index.
    pub(super) fn problem_at(&self, index: u32) -> Option<&Problem> {
        match self.other_problems.get(&index) {
            Some(other) => other.as_ref(),
            None => self.pairing.rules().problems.get(&index),
        }
    }

    /// Whether a rule mentions this name, in wire form, or one above it.
    pub(super) fn mentions(&self, name: &DomainName) -> bool {
        let mut suffixes = name.suffixes();
        suffixes
            .any(|suffix| self.pairing.mentions(suffix) || self.other_names.contains_key(suffix))
    }

    /// Whether a rule has this name, in wire form, or an ACL of OVN.
    pub(super) fn knows(&self, name: &[u8]) -> bool {
        self.pairing.knows(name) || self.other_names.contains_key(name)
    }

    /// Whether a rule that OVN does not enforce yet denies this name.
    pub(super) fn is_to_deny(&self, name: &DomainName) -> bool {
        let mut suffixes = name.suffixes().enumerate();
        suffixes.any(|(extra, suffix)| {
            let patterns = self.other_names.get(suffix).into_iter().flatten();
            self.pairing.is_to_deny(suffix, extra)
                || patterns.into_iter().any(|pattern| pattern.covers(extra))
        })
    }

    /// Compares the EgressFirewall that OVN enforces with the latest one, and with those before it. Returns whether
    /// the names may be others.
    pub(super) fn compare(
        &mut self,
        latest: &Firewall,
        former: &[Firewall],
        subdomains: bool,
    ) -> bool {
        let others = || [latest].into_iter().chain(former);
        let enforced = Arc::clone(&self.pairing.firewall().rules);
        let all = || {
            [&enforced]
                .into_iter()
                .chain(others().map(|one| &one.rules))
        };
        let is_known = self.compared.len() == all().count()
            && all()
                .zip(&self.compared)
                .all(|(one, known)| Arc::ptr_eq(one, known));
        if is_known {
            return false;
        }
        self.compared = all().cloned().collect();
        self.other_names.clear();
        for firewall in others() {
            for index in differing(&enforced, &firewall.rules) {
                let rule = usize::try_from(index).ok();
                let Some(rule) = rule.and_then(|index| firewall.rules.get(index)) else {
                    continue;
                };
                if let Destination::Name(name) = &rule.destination {
                    let denied = self.other_names.entry(name.name().clone()).or_default();
                    if rule.action == RuleAction::Deny {
                        denied.push(NamePattern::of(name, firewall, subdomains));
                    }
                }
            }
        }
        self.differing = differing(&enforced, &latest.rules);
        true
    }

    /// Names without wildcards of rules that OVN enforces, or may enforce later.
    pub(super) fn names(&self) -> impl Iterator<Item = &DomainName> {
        self.pairing.mentioned().chain(self.other_names.keys())
    }

    /// Finds the problems of the rules that OVN does not enforce. Returns the rules whose problems may have changed.
    pub(super) fn judge_latest(
        &mut self,
        latest: &Firewall,
        has_older: bool,
        is_late: bool,
    ) -> BTreeSet<u32> {
        let problems = match has_older {
            true => self.problems_of_latest(latest),
            false => BTreeMap::new(),
        };
        let before = std::mem::replace(&mut self.other_problems, problems);
        if is_late && let Some((index, problem)) = self.if_late(latest, has_older) {
            self.other_problems.insert(index, Some(problem));
        }
        let rules = before.keys().chain(self.other_problems.keys());
        let changed = rules.filter(|index| before.get(index) != self.other_problems.get(index));
        changed.copied().collect()
    }

    /// The problems of the rules that OVN does not enforce.
    fn problems_of_latest(&self, latest: &Firewall) -> BTreeMap<u32, Option<Problem>> {
        let mut problems = BTreeMap::new();
        let floor = Floor::of(&latest.rules);
        for index in &self.differing {
            let rule = usize::try_from(*index).ok();
            let rule = rule.and_then(|index| latest.rules.get(index));
            let problem = rule.and_then(|rule| self.pairing.problem_of_other(*index, rule, &floor));
            problems.insert(*index, problem);
        }
        // OVN is about to follow: what it has beyond the rules is not left behind.
        let end = u32::try_from(self.pairing.firewall().rules.len()).unwrap_or(u32::MAX);
        let stale = self.pairing.rules().problems.range(end..);
        let stale = stale.filter(|(_, problem)| **problem == Problem::StaleAcl);
        problems.extend(stale.map(|(index, _)| (*index, None)));
        problems
    }

    /// The problem that ovn-kubernetes has not taken over an EgressFirewall in time, at the rule that is the likely
    /// cause.
    fn if_late(&self, latest: &Firewall, has_older: bool) -> Option<(u32, Problem)> {
        let waiting = || {
            self.problems()
                .filter_map(|(index, problem)| match problem {
                    Problem::NoAcl(name) => Some((index, name)),
                    _ => None,
                })
        };
        let first = waiting().map(|(index, _)| index).min();
        if !has_older && first.is_none() {
            return None;
        }
        let wildcards = waiting().filter(|(_, name)| name.is_wildcard());
        let wildcard = wildcards.min_by_key(|(index, _)| *index);
        let index = wildcard.map(|(index, _)| index).or(first);
        let problem = Problem::NotTakenOver(NotTakenOver {
            has_older,
            refusal: latest.refusal.clone(),
            wildcard: wildcard.map(|(_, name)| name.clone()),
        });
        Some((index.unwrap_or_default(), problem))
    }
}
