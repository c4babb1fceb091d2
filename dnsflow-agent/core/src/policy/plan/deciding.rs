//! The rules that decide over the flows of an address with many names.
//!
//! An address keeps each of its denied names, however many there are, and its flows have a limit. So most of the rules
//! give it no flow, however many more match later. [`Deciding`] has the others, and a further name costs no more than
//! these.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{
    policy::plan::{
        MatchedRules, Planned, Planner, PortFacts, Space, matched_by_any, place_of, room::fitting,
    },
    values::{firewall::RuleAction, limits::FLOWS_PER_ADDRESS_MAX, name::DomainName},
};

/// The facts that determine the deciding rules, beside the names.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Basis {
    /// Another number when the rules of the port may be others.
    pub(crate) version: u64,
    /// Whether only rules that deny count.
    pub(crate) denials_only: bool,
    /// Whether a rule denies one of the names: the address has flows of its own.
    pub(crate) is_denied: bool,
}

/// Of the rules that match the names of an address, those that may decide over its flows.
#[derive(Debug)]
pub(crate) struct Deciding {
    basis: Basis,
    /// How many addresses of the address's family the port has.
    sources: usize,
    /// How many names the rules match.
    names: usize,
    /// In their order.
    rules: MatchedRules,
    /// Whether the rules have more names than there is room for flows. Then no name has a part of the room.
    is_crowded: bool,
}

/// The names of an address for a plan, and the known facts about their rules.
pub(crate) struct ManyNames<'a, N> {
    /// The names.
    pub(crate) names: N,
    /// The other facts that determine their deciding rules.
    pub(crate) basis: Basis,
    /// The room for flows.
    pub(crate) space: Space,
    /// The rules that decided over the last plan.
    pub(crate) known: Option<Deciding>,
    /// The rules of the name that has come since, if one has.
    pub(crate) further: Option<&'a [(usize, usize)]>,
    /// Whether the address needs no plan if the same rules decide.
    pub(crate) may_stay: bool,
}

impl Planner {
    /// The flows that open `to` for the port, because of many names, `None` if they stay; and the rules that decide.
    /// All names are looked at only if others than the further one have changed, or the basis has.
    pub(crate) fn for_many<'n, N: ExactSizeIterator<Item = &'n DomainName>>(
        &mut self,
        facts: PortFacts<'_>,
        to: IpAddr,
        many: ManyNames<'_, N>,
    ) -> (Option<Planned>, Deciding) {
        let ManyNames {
            names,
            basis,
            space,
            known,
            further,
            may_stay,
        } = many;
        let v6 = to.is_ipv6();
        let count = names.len();
        let before = count - usize::from(further.is_some());
        let sources = facts.sources(v6);
        let known = known
            .filter(|known| (known.basis, known.sources, known.names) == (basis, sources, before));
        let deciding = match known {
            Some(mut known) => {
                known.names = count;
                let further = further.unwrap_or_default();
                let is_changed = self.add_deciding(facts, v6, &mut known, further);
                if may_stay && !is_changed {
                    return (None, known);
                }
                known
            }
            None => {
                #[cfg(test)]
                {
                    self.looked_at += count;
                }
                let mut deciding = Deciding {
                    basis,
                    sources,
                    names: count,
                    rules: MatchedRules::new(),
                    is_crowded: false,
                };
                let all = matched_by_any(facts.sets, names);
                self.add_deciding(facts, v6, &mut deciding, &all);
                deciding
            }
        };
        let Deciding {
            rules, is_crowded, ..
        } = &deciding;
        let fitting = fitting(facts, v6, (&rules[..], *is_crowded));
        let planned = self.for_fitting(facts, to, (rules, fitting), &space);
        (Some(planned), deciding)
    }

    /// Adds the rules of further names to those that decide. Returns whether others decide than before.
    fn add_deciding(
        &mut self,
        facts: PortFacts<'_>,
        v6: bool,
        deciding: &mut Deciding,
        further: &[(usize, usize)],
    ) -> bool {
        let Deciding {
            basis,
            sources,
            rules,
            is_crowded,
            ..
        } = deciding;
        let rule = |(set, rule): (usize, usize)| &*facts.sets[set].rules()[rule];
        let denies = |place| rule(place).action == RuleAction::Deny;
        let in_order = |place: &(usize, usize)| place_of(facts.sets, *place);
        let size = |place| rule(place).flow_count(v6, *sources);
        let is_news = |place: &(usize, usize)| {
            size(*place) > 0
                && (!basis.denials_only || denies(*place))
                && rules
                    .binary_search_by_key(&in_order(place), in_order)
                    .is_err()
        };
        let news: MatchedRules = further.iter().copied().filter(is_news).collect();
        if news.is_empty() {
            return false;
        }
        let before = (rules.clone(), *is_crowded);
        rules.extend(news);
        #[cfg(test)]
        {
            self.looked_at += rules.len();
        }
        rules.sort_unstable_by_key(in_order);
        rules.dedup();
        let name = |place| rule(place).name.name();
        *is_crowded = *is_crowded || {
            let names = rules.iter().map(|place| name(*place));
            names.collect::<BTreeSet<&DomainName>>().len() > FLOWS_PER_ADDRESS_MAX
        };
        // Of the rules of one name with as many flows each, the first ones fit, if any. If no name has a part, that is true
        // of the rules of all names.
        let mut alike: BTreeMap<(Option<&DomainName>, usize), usize> = BTreeMap::new();
        let (mut ends, mut closes) = (BTreeSet::new(), BTreeSet::new());
        rules.retain(|place| {
            let place = *place;
            let of_name = (!*is_crowded).then(|| name(place));
            let first = alike.entry((of_name, size(place))).or_default();
            if *first * size(place) <= FLOWS_PER_ADDRESS_MAX {
                *first += 1;
                return true;
            }
            // It does not fit. The first one that denies ends the rules of its set, and the first one with flows closes.
            denies(place) && {
                let is_end = ends.insert(place.0);
                let is_closing = !closes.contains(&place.0)
                    && !self.templates_of(facts, place, v6, true).is_empty()
                    && closes.insert(place.0);
                is_end || is_closing
            }
        });
        (&before.0, before.1) != (&*rules, *is_crowded)
    }
}

#[cfg(test)]
mod tests;
