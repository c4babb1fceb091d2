//! The names that lead to an address, as rules by name look for them.
//!
//! A pod is asked about with each of its attempts to connect. An EgressFirewall may have thousands of rules, an address
//! dozens of names, and a name more than a hundred labels. So no rule goes through the names. An address may have
//! thousands of denied names: then only those count that decide.

use std::{cell::OnceCell, collections::HashMap};

use crate::{
    policy::rules::NamePattern,
    values::name::{DnsName, DomainName},
};

/// The names that lead to an address.
pub(super) struct ToldNames<'a> {
    names: Vec<&'a DomainName>,
    by_suffix: OnceCell<BySuffix<'a>>,
}

/// By the wire form of each name at or above one of the names: the place of the first of them with no label in front,
/// with one, and with more.
type BySuffix<'a> = HashMap<&'a [u8], [Option<usize>; 3]>;

impl<'a> ToldNames<'a> {
    pub(super) fn new(names: Vec<&'a DomainName>) -> Self {
        Self {
            names,
            by_suffix: OnceCell::new(),
        }
    }

    /// The same, with further names: each is one that a rule of this name covers, and is found by that rule alone.
    pub(super) fn with_covered(
        names: Vec<&'a DomainName>,
        covered: impl Iterator<Item = (&'a DnsName, &'a DomainName)>,
    ) -> Self {
        let mut all = Self::new(names);
        let mut by_suffix = by_suffix(&all.names);
        for (rule, name) in covered {
            let rule = rule.name().wire();
            if let Some(extra) = name.suffixes().position(|suffix| suffix == rule) {
                let in_front = by_suffix.entry(rule).or_default();
                in_front[extra.min(2)].get_or_insert(all.names.len());
                all.names.push(name);
            }
        }
        all.by_suffix = by_suffix.into();
        all
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The first one that a rule's name covers.
    pub(super) fn covered_by(
        &self,
        rule: &DnsName,
        pattern: NamePattern,
    ) -> Option<&'a DomainName> {
        let by_suffix = self.by_suffix.get_or_init(|| by_suffix(&self.names));
        let in_front = by_suffix.get(rule.name().wire())?;
        let covered = in_front.iter().enumerate();
        let covered = covered.filter(|(extra, _)| pattern.covers(*extra));
        let first = covered.filter_map(|(_, place)| *place).min()?;
        self.names.get(first).copied()
    }
}

#[cfg(test)]
thread_local! {
    /// How many suffixes of names, and how many rules in force, were looked at.
    pub(crate) static WORK: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn by_suffix<'a>(names: &[&'a DomainName]) -> BySuffix<'a> {
    let mut by_suffix = BySuffix::new();
    for (place, name) in names.iter().enumerate() {
        for (extra, suffix) in name.suffixes().enumerate() {
            #[cfg(test)]
            WORK.set(WORK.get() + 1);
            let in_front = by_suffix.entry(suffix).or_default();
            in_front[extra.min(2)].get_or_insert(place);
        }
    }
    by_suffix
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATTERNS: [NamePattern; 3] = [
        NamePattern::Exact,
        NamePattern::OneLabel,
        NamePattern::Subdomains,
    ];

    #[test]
    fn of_the_names_that_a_rule_covers_the_first_is_found() {
        let texts = [
            "z.y.example.com",
            "a.example.com",
            "b.example.com",
            "example.com",
            "x.w.v.example.org",
            "com",
        ];
        let names = texts.map(|text| text.parse().expect("a name"));
        let told = ToldNames::new(names.iter().collect());
        for rule in [
            "example.com",
            "a.example.com",
            "y.example.com",
            "v.example.org",
            "example.org",
            "com",
            "example.net",
        ] {
            let rule: DnsName = rule.parse().expect("a name");
            for pattern in PATTERNS {
                let one_by_one = names.iter().find(|name| pattern.covers_name(&rule, name));
                let found = told.covered_by(&rule, pattern);
                assert_eq!(found, one_by_one, "{rule:?}, {pattern:?}");
            }
        }
    }

    #[test]
    fn without_names_no_rule_covers_one() {
        let told = ToldNames::new(Vec::new());
        let rule = "example.com".parse().expect("a name");
        assert!(told.is_empty());
        assert_eq!(told.covered_by(&rule, NamePattern::Subdomains), None);
    }
}
