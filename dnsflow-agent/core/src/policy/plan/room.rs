//! The room for the flows of an address.
//!
//! Of the rules of an address, those have flows that fit into the usual room. Where the address gets flows of its own,
//! and its pod or the node has many, flows for traffic that it has flows for stay. Others have less room. So nothing
//! closes because others have many flows, and an edit adds few.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use crate::{
    policy::{
        plan::{MatchedRules, Patterns, Plan, Planner, PortFacts, in_order, place_of},
        rules::RuleSet,
    },
    values::{
        firewall::RuleAction,
        flow::{FlowTemplate, Traffic},
        limits::{FEW_FLOWS, FLOWS_OF_RULE, FLOWS_PER_ADDRESS_MAX, Limit},
        name::DomainName,
    },
};

/// How many flows of its own an address may have, beside those for traffic that it has flows for already.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum Room {
    /// Those of one rule ([`FLOWS_OF_RULE`]): the addresses of all ports have as many as they may have, or nearly as many
    /// and those of its port more than their share of the rest.
    Least,
    /// Few: the addresses of its port have many ([`FEW_FLOWS`]).
    Little,
    /// As many as any ([`FLOWS_PER_ADDRESS_MAX`]).
    #[default]
    Usual,
}

impl Room {
    fn flows(self) -> usize {
        match self {
            Self::Least => FLOWS_OF_RULE,
            Self::Little => FEW_FLOWS,
            Self::Usual => FLOWS_PER_ADDRESS_MAX,
        }
    }

    /// The limit behind it.
    pub(crate) fn limit(self) -> Limit {
        match self {
            Self::Least => Limit::FlowsOfNode,
            Self::Little => Limit::FlowsOfPod,
            Self::Usual => Limit::FlowsOfAddress,
        }
    }
}

/// The room for an address's own flows.
#[derive(Debug, Default)]
pub struct Space {
    /// How many it may have beside those for `has`.
    pub room: Room,
    /// The traffic of its flows, or of those of its mark, once for each flow, where the room is not the usual one.
    pub has: Vec<Traffic>,
    /// How many flows it may have so that ports stay open that are open without a flow for each.
    pub spare: usize,
}

/// The flows of an address that follow from its rules.
#[derive(Clone, Debug, Default)]
pub struct Planned {
    /// Those of its group, or of its own if there is room.
    pub plan: Plan,
    /// Whether some rules have not all of theirs in it.
    pub is_cut: bool,
    /// Those of its own, where the plan needs more than its room.
    pub own: Option<OwnPlan>,
    /// The patterns that the plan follows from; `None` if it follows from more, or from less: from some flows of an earlier
    /// run, from rules that deny alone, or from a part of many names.
    pub(crate) patterns: Option<Patterns>,
}

/// The flows of its own of an address with less room than usual.
#[derive(Clone, Debug)]
pub struct OwnPlan {
    /// The flows.
    pub plan: Plan,
    /// The room by which some rules have not all of theirs in it, if some have not.
    pub cut: Option<Room>,
}

impl Planned {
    /// The room by which some rules have not all of their flows, if the address has flows of its own.
    pub(crate) fn cut_of_own(&self) -> Option<Room> {
        match &self.own {
            Some(own) => own.cut,
            None => self.cut_of_group(),
        }
    }

    /// The same, if the address has a group.
    pub(crate) fn cut_of_group(&self) -> Option<Room> {
        self.is_cut.then_some(Room::Usual)
    }

    /// The same for a dry run.
    pub(crate) fn without_flows(self) -> Self {
        Self {
            is_cut: self.is_cut,
            ..Self::default()
        }
    }

    /// The flows that an address without a mark needs.
    pub(crate) fn into_own(self) -> Plan {
        let mut plan = self.own.map_or(self.plan, |own| own.plan);
        plan.retain(|template| !template.ends_marks());
        plan
    }
}

/// The rules of an address, of which not all flows fit.
#[derive(Debug, Default)]
pub(super) struct Fitting {
    /// Those with all of their flows, in their order.
    whole: MatchedRules,
    /// Those that allow and do not fit, before a rule that closes their set.
    partly: MatchedRules,
    /// From the first rule of a set on that denies and does not fit, those that deny. The first of them in force denies
    /// all traffic, and so stands for all rules behind it.
    closing: MatchedRules,
}

/// A flow and its rule, or a flow of an earlier run.
type FlowOfRule = (Option<(usize, usize)>, Arc<FlowTemplate>);

/// The rules that have flows for an address of this family, if the port has these addresses; `None` if all have. The
/// rules may be those of more names than there is room for flows (`is_crowded`): none has a part.
pub(super) fn fitting(
    facts: PortFacts<'_>,
    v6: bool,
    among: (&[(usize, usize)], bool),
) -> Option<Fitting> {
    let sources = facts.sources(v6);
    let count = |(set, rule): (usize, usize)| facts.sets[set].rules()[rule].flow_count(v6, sources);
    fitting_in(FLOWS_PER_ADDRESS_MAX, facts.sets, among, count)
}

/// The rules that have flows in a room for so many, if each needs `count`; `None` if all have.
///
/// The owner of one rule's name can let the name lead to the address of another. So the names of the rules share the
/// room in equal parts. A name that needs less leaves the rest to the others. A rule that fits into the part of its
/// name has its flows. The other rules have theirs in the remaining room, in their order.
fn fitting_in(
    room: usize,
    sets: &[&RuleSet],
    (matched, is_crowded): (&[(usize, usize)], bool),
    count: impl Fn((usize, usize)) -> usize,
) -> Option<Fitting> {
    let rule = |(set, rule): (usize, usize)| &sets[set].rules()[rule];
    if matched.iter().map(|place| count(*place)).sum::<usize>() <= room {
        return None;
    }
    let mut all: Vec<(usize, usize)> = matched.to_vec();
    all.sort_unstable_by_key(|place| place_of(sets, *place));
    all.dedup();
    let name = |place| rule(place).name.name();
    let mut wanted: BTreeMap<&DomainName, usize> = BTreeMap::new();
    for place in &all {
        *wanted.entry(name(*place)).or_default() += count(*place);
    }
    let part = match is_crowded {
        true => 0,
        false => fair_part(wanted.into_values().collect(), room),
    };
    let mut of_names: BTreeMap<&DomainName, usize> = BTreeMap::new();
    let mut used = 0;
    let mut fit = HashSet::new();
    for place in &all {
        let of_name = of_names.entry(name(*place)).or_default();
        if *of_name + count(*place) <= part {
            *of_name += count(*place);
            used += count(*place);
            fit.insert(*place);
        }
    }
    for place in &all {
        if !fit.contains(place) && used + count(*place) <= room {
            used += count(*place);
            fit.insert(*place);
        }
    }
    let mut fitting = Fitting::default();
    let mut closed = None;
    let mut is_cut = false;
    for place in all {
        if fit.contains(&place) && closed != Some(place.0) {
            fitting.whole.push(place);
            continue;
        }
        is_cut = true;
        if rule(place).action == RuleAction::Deny {
            closed = Some(place.0);
            fitting.closing.push(place);
        } else if closed != Some(place.0) {
            fitting.partly.push(place);
        }
    }
    is_cut.then_some(fitting)
}

/// The equal part of a room that each of those has who want so much. Whoever wants less leaves the rest to the others.
fn fair_part(mut wanted: Vec<usize>, room: usize) -> usize {
    wanted.sort_unstable();
    let (mut left, mut others) = (room, wanted.len());
    for wanted in wanted {
        if wanted > left / others {
            return left / others;
        }
        left -= wanted;
        others -= 1;
    }
    room
}

impl Planner {
    /// The flows that open `to` for the port, because of these rules.
    pub fn for_rules(
        &mut self,
        facts: PortFacts<'_>,
        to: IpAddr,
        matched: &[(usize, usize)],
        space: &Space,
    ) -> Planned {
        let fitting = fitting(facts, to.is_ipv6(), (matched, false));
        self.for_fitting(facts, to, (matched, fitting), space)
    }

    /// The same, where these are all rules of the address, and it has no flows of an earlier run: the plan follows from
    /// the patterns of the rules. So their order is theirs, and not that of the names.
    pub(crate) fn for_patterns(
        &mut self,
        facts: PortFacts<'_>,
        to: IpAddr,
        matched: &[(usize, usize)],
        space: &Space,
    ) -> Planned {
        let mut matched = MatchedRules::from(matched);
        matched.sort_unstable_by_key(|place| place_of(facts.sets, *place));
        let patterns = || Patterns::of(facts, to.is_ipv6(), &matched);
        Planned {
            patterns: facts.mark_mask.map(|_| patterns()),
            ..self.for_rules(facts, to, &matched, space)
        }
    }

    /// The same, where it is known which of these rules fit.
    pub(super) fn for_fitting(
        &mut self,
        facts: PortFacts<'_>,
        to: IpAddr,
        (matched, fitting): (&[(usize, usize)], Option<Fitting>),
        space: &Space,
    ) -> Planned {
        #[cfg(test)]
        {
            self.planned += 1;
            self.looked_at += matched.len();
        }
        let is_cut = fitting.is_some();
        let fitting = fitting.unwrap_or_else(|| Fitting {
            whole: matched.into(),
            ..Fitting::default()
        });
        let mut plan = self.of_fitting(facts, to, &fitting);
        let is_larger = plan.len() > space.room.flows();
        let own = is_larger.then(|| self.in_space(facts, to, (fitting, is_cut), space));
        self.end_marks(facts, to, &mut plan);
        in_order(&mut plan);
        Planned {
            plan,
            is_cut,
            own,
            patterns: None,
        }
    }

    fn of_fitting(&mut self, facts: PortFacts<'_>, to: IpAddr, fitting: &Fitting) -> Plan {
        let v6 = to.is_ipv6();
        let mut plan = Plan::new();
        for place in &fitting.whole {
            plan.extend_from_slice(self.templates_of(facts, *place, v6, false));
        }
        let mut closed = None;
        for place in &fitting.closing {
            let templates = self.templates_of(facts, *place, v6, true);
            if closed != Some(place.0) && !templates.is_empty() {
                closed = Some(place.0);
                plan.extend_from_slice(templates);
            }
        }
        in_order(&mut plan);
        plan
    }

    /// Of the rules that fit into the usual room, the flows in less room. Those for traffic that the address has flows
    /// for stay, at whatever place. A flow for all traffic stands for flows for some of it. The others share the
    /// rest. A rule that allows and does not fit has the former alone. Flows of an earlier run take no room of the rules:
    /// those that deny stay, too, and the others are left out.
    fn in_space(
        &mut self,
        facts: PortFacts<'_>,
        to: IpAddr,
        (fitting, is_cut): (Fitting, bool),
        space: &Space,
    ) -> OwnPlan {
        let mut whole = fitting.whole.clone();
        whole.sort_unstable();
        whole.dedup();
        let mut all: Vec<FlowOfRule> = Vec::new();
        for place in &whole {
            let templates = self.templates_of(facts, *place, to.is_ipv6(), false);
            all.extend(
                templates
                    .iter()
                    .map(|flow| (Some(*place), Arc::clone(flow))),
            );
        }
        // The flow with the highest priority decides.
        all.sort_by_key(|(_, flow)| Reverse(flow.priority));
        let mut has: HashMap<Traffic, usize> = HashMap::new();
        for traffic in &space.has {
            *has.entry(*traffic).or_default() += 1;
        }
        let mut kept: Vec<FlowOfRule> = Vec::new();
        let mut missing = Vec::new();
        let (mut decided, mut undecided) = (HashMap::new(), HashSet::new());
        for (place, flow) in all {
            let (table, registers, (src, transport)) = flow.packets();
            let of_same = |transport| (table, Arc::clone(&registers), (src, transport));
            let by_same = decided.get(&of_same(transport));
            let first = by_same.or_else(|| decided.get(&of_same(None)));
            match (has.get_mut(&flow.traffic()), first) {
                (Some(left), _) if *left > 0 => {
                    *left -= 1;
                    decided.entry(flow.packets()).or_insert(Arc::clone(&flow));
                    kept.push((place, flow));
                }
                (_, None) if place.is_none() && flow.denies => {
                    decided.insert(flow.packets(), Arc::clone(&flow));
                    kept.push((place, flow));
                }
                (_, None) => missing.push((place, flow)),
                (_, Some(first)) if *first == flow => {}
                // It decides over no packet, and stays away.
                (_, Some(_)) => {
                    undecided.insert(flow);
                }
            }
        }
        let for_all = space
            .has
            .iter()
            .filter(|(_, transport)| transport.is_none());
        let for_all: HashSet<IpAddr> = for_all.map(|(src, _)| *src).collect();
        let (stay, missing): (Vec<_>, Vec<_>) = missing
            .into_iter()
            .partition(|(_, flow)| for_all.contains(&flow.src));
        let (stay, missing) = match kept.len() + stay.len() <= space.spare {
            true => (stay, missing),
            false => (Vec::new(), [stay, missing].concat()),
        };
        kept.extend(stay);
        let of_rules = kept.iter().filter(|(place, _)| place.is_some()).count();
        let room = space.room.flows().saturating_sub(of_rules);
        let is_left_out = missing.iter().any(|(place, _)| place.is_none());
        let mut counts: HashMap<(usize, usize), usize> = HashMap::new();
        for place in missing.into_iter().filter_map(|(place, _)| place) {
            *counts.entry(place).or_default() += 1;
        }
        let count = |place| counts.get(&place).copied().unwrap_or_default();
        let less = fitting_in(room, facts.sets, (&whole, false), count);
        let cut = match less.is_some() || is_left_out {
            true => Some(space.room),
            false => is_cut.then_some(Room::Usual),
        };
        let fitting = match less {
            Some(mut less) => {
                less.closing.extend(fitting.closing);
                less.closing
                    .sort_unstable_by_key(|place| place_of(facts.sets, *place));
                less
            }
            None => fitting,
        };
        let mut plan = self.of_fitting(facts, to, &fitting);
        kept.retain(|(place, _)| place.is_none_or(|place| fitting.partly.contains(&place)));
        plan.extend(kept.into_iter().map(|(_, flow)| flow));
        plan.retain(|flow| !undecided.contains(flow));
        in_order(&mut plan);
        OwnPlan { plan, cut }
    }
}

#[cfg(test)]
mod tests;
