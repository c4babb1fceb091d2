//! Which name gives way at an address with as many names as are kept. The rules that match decide
//! (`docs/decisions/budgets.md`, "Room in the cache").

use std::collections::BTreeMap;

use crate::{Timestamp, policy::rules::AlikeNames, values::name::DomainName};

/// The rules of a name, those in force and those to come.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Standing {
    /// Their effect.
    pub(crate) claim: Claim,
    /// The names that the same rules match; `None` if no name stands for the name.
    pub(crate) alike: Option<AlikeNames>,
}

/// The effect of a name's rules, in the order in which names give way.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Claim {
    /// No rule mentions the name any more.
    None,
    /// A rule mentions the name. No rule in force matches, and none is to deny it.
    Mentioned,
    /// A rule in force allows the name, or the rules are not known yet.
    Allowed,
    /// A rule is to deny the name, which OVN does not enforce yet.
    ToBeDenied,
    /// A rule in force denies the name.
    Denied,
}

impl Claim {
    /// Whether a name with this claim goes before names that are united, for a name with the further claim.
    fn goes_first(self, further: Self) -> bool {
        self < further.min(Self::Allowed)
    }

    /// Whether a name with this claim goes at last, for a name with the further claim.
    fn goes_last(self, further: Self) -> bool {
        self < further.min(Self::ToBeDenied)
    }
}

/// How an address takes a further name.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(in crate::cache) enum AtAddress {
    /// There is room.
    Room,
    /// This name of the address stands for the further one.
    Alike(DomainName),
    /// A name of the address gives way.
    GivesWay,
    /// All names stay.
    Full,
}

/// The names of an address by their rules, until the rules change.
#[derive(Debug)]
pub(super) struct ByRules {
    /// The version of the rules.
    version: Option<u64>,
    names: BTreeMap<Standing, Vec<DomainName>>,
    /// Whether one of the names stands for another one.
    any_alike: bool,
}

impl ByRules {
    pub(super) fn new(
        version: Option<u64>,
        names: impl Iterator<Item = (DomainName, Standing)>,
    ) -> Self {
        let mut by_rules: BTreeMap<Standing, Vec<DomainName>> = BTreeMap::new();
        for (name, standing) in names {
            by_rules.entry(standing).or_default().push(name);
        }
        let any_alike = by_rules.iter().any(|of_rules| are_alike(&of_rules));
        Self {
            version,
            names: by_rules,
            any_alike,
        }
    }

    /// Adds a name.
    pub(super) fn add(&mut self, name: DomainName, standing: Standing) {
        let has_alike = standing.alike.is_some();
        let of_rules = self.names.entry(standing).or_default();
        of_rules.push(name);
        self.any_alike |= has_alike && of_rules.len() > 1;
    }

    /// Removes a name.
    pub(super) fn remove(&mut self, name: &DomainName) {
        self.names.retain(|_, names| {
            names.retain(|other| other != name);
            !names.is_empty()
        });
        self.any_alike = self.names.iter().any(|of_rules| are_alike(&of_rules));
    }

    /// Whether these are the rules of this version.
    pub(super) fn is_of(&self, version: Option<u64>) -> bool {
        self.version == version
    }

    /// How the address takes a further name. No name of it is looked at.
    pub(super) fn at_address(&self, further: &Standing) -> AtAddress {
        let alike = self.names.get(further).filter(|_| further.alike.is_some());
        if let Some(alike) = alike.and_then(|names| names.first()) {
            return AtAddress::Alike(alike.clone());
        }
        let least = self.names.keys().next();
        let goes = least.is_some_and(|least| least.claim.goes_last(further.claim));
        match goes || self.any_alike {
            true => AtAddress::GivesWay,
            // As many denied names as the rules tell apart.
            false if further.claim >= Claim::ToBeDenied => AtAddress::Room,
            false => AtAddress::Full,
        }
    }

    /// The name that gives way, and the name that stands for it from then on, if there is one. If the further name
    /// claims more, a name goes first that no rule in force matches and none is to deny. Then goes one of two names
    /// that the same rules match, among the rules with most names. Last goes an allowed name, if the further one is
    /// denied or to be denied. Among several, the name that ends first goes. So a denied name gives way only to
    /// another one that the same rules deny.
    pub(super) fn first_to_go(
        &self,
        further: &Standing,
        end: impl Fn(&DomainName) -> Option<Timestamp>,
    ) -> Option<(DomainName, Option<DomainName>)> {
        let first_of = |goes: fn(Claim, Claim) -> bool| {
            let names = self.names.iter();
            let names = names.flat_map(|(of, names)| names.iter().map(|name| (of.claim, name)));
            let names = names.filter(|(claim, _)| goes(*claim, further.claim));
            let first = names.min_by_key(|(claim, name)| (*claim, end(name), *name));
            first.map(|(_, name)| (name.clone(), None))
        };
        let of_alike = || {
            let alike = self.names.iter().filter(are_alike);
            let (_, names) = alike.max_by_key(|(_, names)| names.len())?;
            let first = names.iter().min_by_key(|name| (end(name), *name))?;
            let last = names.iter().max_by_key(|name| (end(name), *name))?;
            Some((first.clone(), Some(last.clone())))
        };
        first_of(Claim::goes_first)
            .or_else(of_alike)
            .or_else(|| first_of(Claim::goes_last))
    }
}

/// Whether these names stand for each other, and are several.
fn are_alike((standing, names): &(&Standing, &Vec<DomainName>)) -> bool {
    standing.alike.is_some() && names.len() > 1
}

#[cfg(test)]
mod tests;
