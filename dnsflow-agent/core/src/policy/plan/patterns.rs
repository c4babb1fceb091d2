//! The patterns of an address: of the rules that match one of its names.
//!
//! Rules with the same name and pattern match the same names, whatever their ports, action and place. So the rules of
//! an address, and with them the plan, follow from its patterns: an edit of rules that changes no pattern changes the
//! plans of whole groups, and no address.

use std::{net::IpAddr, sync::Arc};

use crate::{
    ovn::view::TunnelKeys,
    policy::{
        plan::{MatchedRules, PortFacts},
        rules::{ChangedName, ChangedNames, NamePattern, RuleSet},
    },
    values::name::DomainName,
};

/// The name of a rule without a wildcard, and which names the rule matches.
pub(crate) type Pattern = (DomainName, NamePattern);

/// The patterns of addresses of a port. Of one IP version, all addresses with the same have one plan.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Patterns {
    /// The port: one that comes again with the same addresses has the same flows.
    keys: TunnelKeys,
    /// Its own addresses of the IP version.
    sources: Arc<[IpAddr]>,
    /// In order, each once.
    patterns: Arc<[Pattern]>,
}

impl Patterns {
    /// The patterns of these rules.
    pub(crate) fn of(facts: PortFacts<'_>, v6: bool, matched: &[(usize, usize)]) -> Self {
        let rules = matched
            .iter()
            .map(|(set, rule)| &facts.sets[*set].rules()[*rule]);
        let patterns = rules.map(|rule| (rule.name.name().clone(), rule.pattern));
        let mut patterns: Vec<Pattern> = patterns.collect();
        patterns.sort_unstable();
        patterns.dedup();
        let sources = facts.addresses.iter().copied();
        Self {
            keys: facts.keys,
            sources: sources.filter(|src| src.is_ipv6() == v6).collect(),
            patterns: patterns.into(),
        }
    }

    /// Whether they are of the port as it is.
    pub(crate) fn are_of(&self, facts: PortFacts<'_>) -> bool {
        let sources = facts.addresses.iter();
        let sources = sources.filter(|src| src.is_ipv6() == self.is_v6());
        self.keys == facts.keys && self.sources.iter().eq(sources)
    }

    /// How the rules of their names have changed, if some have.
    pub(crate) fn change(&self, names: &ChangedNames) -> Option<ChangedName> {
        let changes = self.patterns.iter().filter_map(|(name, _)| names.get(name));
        changes.max().copied()
    }

    /// Whether the addresses are of IPv6.
    pub(crate) fn is_v6(&self) -> bool {
        self.sources.first().is_some_and(IpAddr::is_ipv6)
    }

    /// The rules with these patterns.
    pub(crate) fn rules(&self, sets: &[&RuleSet]) -> MatchedRules {
        let mut matched = MatchedRules::new();
        for (name, pattern) in &*self.patterns {
            for (at, set) in sets.iter().enumerate() {
                let places = set.with_pattern(name, *pattern);
                matched.extend(places.map(|place| (at, place)));
            }
        }
        matched
    }
}
