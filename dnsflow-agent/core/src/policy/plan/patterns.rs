//! The patterns of an address: of the rules that match one of its names.
//!
//! Rules with the same name and pattern match the same names, whatever their ports, action and place. So the rules of
//! an address follow from its patterns, and an edit of rules that changes no pattern changes the flows of groups alone.

use std::{collections::BTreeSet, sync::Arc};

use crate::{
    policy::{
        plan::{MatchedRules, place_of},
        rules::{ChangedName, ChangedNames, NamePattern, RuleSet},
    },
    values::{firewall::RuleAction, limits::PATTERNS_MAX, name::DomainName},
};

/// The name of a rule without a wildcard, and which names the rule matches.
pub type Pattern = (DomainName, NamePattern);

/// The patterns of addresses of one IP version: all with the same have one group.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Patterns {
    /// Whether the addresses are of IPv6.
    pub is_ipv6: bool,
    /// Whether only rules that deny count: the addresses are never opened.
    pub are_denials: bool,
    /// In order, each once.
    pub patterns: Arc<[Pattern]>,
}

impl Patterns {
    /// The patterns of these rules; `None` if there are none. `are_denials`: whether only those that deny count.
    pub(crate) fn of(
        sets: &[&RuleSet],
        (is_ipv6, are_denials): (bool, bool),
        matched: &[(usize, usize)],
    ) -> Option<Self> {
        let rules = matched.iter().map(|(set, rule)| &sets[*set].rules()[*rule]);
        let rules = rules.filter(|rule| !are_denials || rule.action == RuleAction::Deny);
        let patterns = rules.map(|rule| (rule.name.name().clone(), rule.pattern));
        let patterns: BTreeSet<Pattern> = patterns.collect();
        (!patterns.is_empty()).then(|| Self {
            is_ipv6,
            are_denials,
            patterns: patterns.into_iter().collect(),
        })
    }

    /// Whether there are so many that no group has them.
    pub(crate) fn are_too_many(&self) -> bool {
        self.patterns.len() > PATTERNS_MAX
    }

    /// Whether there is more than one.
    pub(crate) fn are_several(&self) -> bool {
        self.patterns.len() > 1
    }

    /// The octets of their names where there are several: those of one rule are no more than its own.
    pub(crate) fn octets(&self) -> usize {
        let names = self.patterns.iter().filter(|_| self.are_several());
        names.map(|(name, _)| name.wire().len()).sum()
    }

    /// Whether the patterns of these rules are among them.
    pub(crate) fn have(&self, sets: &[&RuleSet], matched: &[(usize, usize)]) -> bool {
        let mut rules = matched.iter().map(|(set, rule)| &sets[*set].rules()[*rule]);
        rules.all(|rule| {
            let is_none = self.are_denials && rule.action != RuleAction::Deny;
            let compare = |(name, pattern): &Pattern| {
                name.cmp(rule.name.name()).then(pattern.cmp(&rule.pattern))
            };
            is_none || self.patterns.binary_search_by(compare).is_ok()
        })
    }

    /// How the rules of their names have changed, if some have.
    pub(crate) fn change(&self, names: &ChangedNames) -> Option<ChangedName> {
        let changes = self.patterns.iter().filter_map(|(name, _)| names.get(name));
        changes.max().copied()
    }

    /// The rules with these patterns, in their order.
    pub(crate) fn rules(&self, sets: &[&RuleSet]) -> MatchedRules {
        let mut matched = MatchedRules::new();
        for (name, pattern) in &*self.patterns {
            for (at, set) in sets.iter().enumerate() {
                let places = set.with_pattern(name, *pattern);
                matched.extend(places.map(|place| (at, place)));
            }
        }
        if self.are_denials {
            matched.retain(|(set, rule)| sets[*set].rules()[*rule].action == RuleAction::Deny);
        }
        matched.sort_unstable_by_key(|place| place_of(sets, *place));
        matched
    }

    /// The pattern of the first rule with one of them, alone.
    pub(crate) fn of_first(&self, sets: &[&RuleSet]) -> Option<Self> {
        let first = *self.rules(sets).first()?;
        Self::of(sets, (self.is_ipv6, self.are_denials), &[first])
    }

    /// Those of them with a rule that denies, if there are some.
    pub(crate) fn denying(&self, sets: &[&RuleSet]) -> Option<Self> {
        let rules = self.rules(sets);
        let denials = rules.iter().copied();
        let denials: MatchedRules = denials
            .filter(|(set, rule)| sets[*set].rules()[*rule].action == RuleAction::Deny)
            .collect();
        Self::of(sets, (self.is_ipv6, self.are_denials), &denials)
    }
}

/// A group of an earlier run: its tag tells its scope and its number.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SavedGroup {
    /// The key of its logical switch.
    pub datapath: u32,
    /// The port groups whose rules hold.
    pub port_groups: Arc<[Arc<str>]>,
    /// Its patterns.
    pub patterns: Patterns,
}
