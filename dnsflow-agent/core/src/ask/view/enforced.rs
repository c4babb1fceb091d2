//! How a rule by name is enforced for an address: by the flows that the agent has installed, whatever the rules say.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::View;
use crate::{
    cache::Entry,
    installed::{Fit, Flows, Presence},
    policy::rules::{ActiveRule, RuleSet},
    values::{
        firewall::RuleAction,
        flow::{FlowTemplate, Target, Transport},
        ids::PortId,
        limits::Limit,
    },
};

/// The flows that decide over a pod's packets to an address.
pub(super) struct AddressFlows<'a> {
    entry: &'a Entry,
    /// In the order of their priorities: a question looks at thousands of rules.
    flows: Vec<InstalledFlow<'a>>,
    /// Whether they close the address, whatever the rules say, because the flows of its patterns have no room.
    close: bool,
    /// Whether a name was remembered over the budget, without a plan since.
    is_unplanned: bool,
}

/// One of the flows, and whether the switch has it.
type InstalledFlow<'a> = (&'a FlowTemplate, Presence);

/// How many of the traffic's flows the switch has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Extent {
    /// All of them. If the question has no port: some.
    All,
    /// None.
    None,
    /// That is not known, or the switch has some of them.
    Unknown,
}

/// The flows of one rule to an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct RuleFlows {
    /// Those for the traffic of the question.
    pub(super) extent: Extent,
    /// Whether flows for this traffic are wanted in the switch.
    pub(super) are_wanted: bool,
}

impl<'a> View<'a> {
    /// The flows of a pod's address, if the pod was told the address.
    pub(super) fn address_flows(&'a self, id: PortId, address: IpAddr) -> Option<AddressFlows<'a>> {
        let entry = self.cache.entry(id, address)?;
        let mut flows = match self.cache.flows_of(entry) {
            Some((target, flows)) => self.presence((id, entry), target, flows),
            None => Vec::new(),
        };
        flows.sort_by_key(|(template, _)| template.priority);
        let groups = self.cache.groups();
        let tag = entry.installed.tag();
        Some(AddressFlows {
            entry,
            // Each group but the one that closes has patterns.
            close: tag.is_some_and(|tag| groups.contain(tag) && groups.patterns(tag).is_none()),
            flows,
            is_unplanned: self.cache.is_unplanned(id, address),
        })
    }

    /// Whether the switch has each of the flows of an entry.
    fn presence(
        &self,
        (port, entry): (PortId, &Entry),
        target: Target,
        flows: &'a Flows,
    ) -> Vec<InstalledFlow<'a>> {
        let written = entry.installed.written(port, self.cache.groups());
        let mut written = written.into_iter();
        let are_confirmed = written.all(|written| self.switch.has_confirmed(written));
        // The packets get their tag.
        let own = entry.installed.own();
        let is_tagged = own.is_some_and(|own| !own.is_lost()) || entry.installed.is_marked();
        let is_foreign = |template: &FlowTemplate| {
            let key = || template.key(target);
            self.switch.has_foreign() && key().is_some_and(|key| self.switch.is_foreign(&key))
        };
        let refused_at = self.switch.refused_at();
        let each = flows
            .presence(are_confirmed, refused_at)
            .map(|(template, presence)| {
                let presence = match presence {
                    Presence::There if !is_tagged => Presence::Lost,
                    Presence::There if is_foreign(template) => Presence::Unconfirmed,
                    other => other,
                };
                (template, presence)
            });
        each.collect()
    }
}

impl AddressFlows<'_> {
    /// The limit for which rules have not all of their flows, if some have not.
    pub(super) fn limit(&self) -> Option<Limit> {
        let cut = (self.entry.fit == Fit::Cut).then_some(Limit::FlowsOfNamespace);
        cut.or(self.is_unplanned.then_some(Limit::FlowChanges))
    }

    /// The rules that they may be of, of those for this traffic.
    pub(super) fn rules<'r>(
        &self,
        sets: &[&'r RuleSet],
        asked: Option<Transport>,
    ) -> impl Iterator<Item = &'r ActiveRule> {
        let flows = self.flows.iter();
        let flows = flows.filter(|(flow, _)| is_for(flow.transport, asked));
        let priorities: BTreeSet<u16> = flows.map(|(flow, _)| flow.priority).collect();
        sets.iter().flat_map(move |set| {
            let places = priorities.iter().flat_map(|one| set.at_priority(*one));
            let places: BTreeSet<usize> = places.copied().collect();
            places.into_iter().map(|place| &*set.rules()[place])
        })
    }

    /// The limit for which the address is closed, whatever the rules say, if it is.
    pub(super) fn closed_for(&self) -> Option<Limit> {
        let mut flows = self.flows.iter();
        let is_closed = self.close && flows.any(|(_, presence)| *presence == Presence::There);
        is_closed.then_some(Limit::FlowsOfNamespace)
    }

    /// The flows with this priority.
    fn at(&self, priority: u16) -> &[InstalledFlow<'_>] {
        let begin = self
            .flows
            .partition_point(|(flow, _)| flow.priority < priority);
        let rest = &self.flows[begin..];
        &rest[..rest.partition_point(|(flow, _)| flow.priority == priority)]
    }

    /// The flows of a rule, each once.
    fn of<'r>(&'r self, rules: &'r [&ActiveRule]) -> impl Iterator<Item = &'r InstalledFlow<'r>> {
        let templates = rules.iter().flat_map(|rule| &rule.templates);
        let priorities: BTreeSet<u16> = templates.map(|template| template.priority).collect();
        let flows = priorities
            .into_iter()
            .flat_map(|priority| self.at(priority));
        flows.filter(|(flow, _)| rules.iter().any(|rule| is_of(flow, rule)))
    }

    /// Those of a rule, which OVN enforces like this.
    pub(super) fn of_rule(&self, rules: &[&ActiveRule], asked: Option<Transport>) -> RuleFlows {
        let has_ports = rules.iter().any(|rule| !rule.transports.is_empty());
        let (mut there, mut lost, mut unconfirmed) = (0, 0, 0);
        for &(template, presence) in self.of(rules) {
            if is_for(template.transport, asked) {
                *match presence {
                    Presence::There => &mut there,
                    Presence::Lost => &mut lost,
                    Presence::Unconfirmed => &mut unconfirmed,
                } += 1;
            }
        }
        let is_any_enough = asked.is_none() && has_ports;
        let is_all = lost == 0 && unconfirmed == 0;
        let extent = match there {
            1.. if is_all || is_any_enough => Extent::All,
            0 if unconfirmed == 0 => Extent::None,
            _ => Extent::Unknown,
        };
        RuleFlows {
            extent,
            are_wanted: there + lost + unconfirmed > 0,
        }
    }

    /// Whether the switch may have flows for this traffic that are of none of these rules.
    pub(super) fn are_others(&self, rules: &[&ActiveRule], asked: Option<Transport>) -> bool {
        let mut by_priority: BTreeMap<u16, Vec<&ActiveRule>> = BTreeMap::new();
        for rule in rules {
            for template in &rule.templates {
                if !self.at(template.priority).is_empty() {
                    by_priority.entry(template.priority).or_default().push(rule);
                }
            }
        }
        let is_other = |template: &FlowTemplate| {
            let rules = by_priority.get(&template.priority);
            !rules.into_iter().flatten().any(|rule| {
                let transports = &rule.transports;
                let may_have = |one| transports.contains(&one) || transports.is_empty();
                is_of(template, rule) && template.transport.is_none_or(may_have)
            })
        };
        let mut each = self.flows.iter();
        each.any(|(template, presence)| {
            *presence != Presence::Lost && is_for(template.transport, asked) && is_other(template)
        })
    }
}

/// Whether a flow is one of a rule.
fn is_of(template: &FlowTemplate, rule: &ActiveRule) -> bool {
    let mut templates = rule.templates.iter();
    template.denies == (rule.action == RuleAction::Deny)
        && templates.any(|one| one.priority == template.priority)
}

/// Whether a flow matches traffic that is asked about.
fn is_for(transport: Option<Transport>, asked: Option<Transport>) -> bool {
    match (transport, asked) {
        (Some(transport), Some(asked)) => transport.is_for(asked),
        (None, _) | (_, None) => true,
    }
}
