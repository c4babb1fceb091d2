//! How a rule by name is enforced for an address: by the flows that the agent has installed, whatever the rules say.

use std::net::IpAddr;

use super::View;
use crate::{
    cache::Entry,
    installed::{Flows, Presence},
    pods::ports::Port,
    policy::rules::ActiveRule,
    values::{
        firewall::RuleAction,
        flow::{FlowTemplate, Target, Transport},
        ids::PortId,
        limits::Limit,
    },
};

/// The flows that decide over a pod's packets to an address.
pub(super) struct AddressFlows<'a> {
    view: &'a View<'a>,
    /// How many addresses of the address's family the pod has.
    sources: usize,
    entry: &'a Entry,
    flows: Option<(Target, &'a Flows)>,
    /// Whether the switch has confirmed them.
    are_confirmed: bool,
    /// Whether they match: the kernel marks the packets, or need not.
    is_marked: bool,
    /// Whether a name was remembered over the budget, without a plan since.
    is_unplanned: bool,
}

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
    /// Whether the rule denies, and closes all ports, because its flows have no room.
    pub(super) closes_all: bool,
    /// Whether flows for this traffic are wanted in the switch.
    pub(super) are_wanted: bool,
}

impl<'a> View<'a> {
    /// The flows of a pod's address, if the pod was told the address.
    pub(super) fn address_flows(
        &'a self,
        (id, port): (PortId, &Port),
        address: IpAddr,
    ) -> Option<AddressFlows<'a>> {
        let own = port.row.addresses.iter();
        let entry = self.cache.entry(id, address)?;
        let written = entry.installed.written(self.cache.groups());
        Some(AddressFlows {
            view: self,
            sources: own.filter(|own| own.is_ipv6() == address.is_ipv6()).count(),
            entry,
            flows: self.cache.flows_of(address, entry),
            are_confirmed: self.switch.has_confirmed(written),
            is_marked: entry.installed.group().is_none() || entry.installed.is_marked(),
            is_unplanned: self.cache.is_unplanned(id, address),
        })
    }
}

impl AddressFlows<'_> {
    /// Whether flows of an earlier run were taken over, whose names are not known.
    pub(super) fn are_adopted(&self) -> bool {
        self.entry.adopted.is_some()
    }

    /// The limit for which rules have not all of their flows, if some have not.
    pub(super) fn limit(&self) -> Option<Limit> {
        let cut = self.entry.cut.map(|room| room.limit());
        cut.or(self.is_unplanned.then_some(Limit::FlowChanges))
    }

    /// Each flow, and whether the switch has it.
    fn each(&self) -> impl Iterator<Item = (&FlowTemplate, Presence)> {
        let flows = self.flows.into_iter();
        let each = flows.flat_map(|(target, flows)| {
            let each = flows.presence(self.are_confirmed);
            each.map(move |(template, presence)| (target, template, presence))
        });
        each.map(|(target, template, presence)| {
            let is_foreign = || {
                let switch = self.view.switch;
                let key = || template.key(target);
                switch.has_foreign() && key().is_some_and(|key| switch.is_foreign(&key))
            };
            let presence = match presence {
                Presence::There if !self.is_marked => Presence::Lost,
                Presence::There if is_foreign() => Presence::Unconfirmed,
                other => other,
            };
            (template, presence)
        })
    }

    /// Those of a rule, which OVN enforces like this.
    pub(super) fn of_rule(&self, rules: &[&ActiveRule], asked: Option<Transport>) -> RuleFlows {
        let has_ports = rules.iter().any(|rule| !rule.transports.is_empty());
        let (mut there, mut lost, mut unconfirmed) = (0, 0, 0);
        let mut closing = None;
        for (template, presence) in self.each() {
            if !rules.iter().any(|rule| is_of(template, rule)) {
                continue;
            }
            if template.denies && has_ports && template.transport.is_none() {
                closing = Some(presence);
            }
            if is_for(template.transport, asked) {
                *match presence {
                    Presence::There => &mut there,
                    Presence::Lost => &mut lost,
                    Presence::Unconfirmed => &mut unconfirmed,
                } += 1;
            }
        }
        let wanted = self.entry.cut.map_or(0, |_| self.wanted(rules, asked));
        let is_any_enough = asked.is_none() && has_ports;
        let is_all = lost == 0 && unconfirmed == 0 && there >= wanted;
        let extent = match closing {
            Some(Presence::There) => Extent::All,
            Some(Presence::Unconfirmed) => Extent::Unknown,
            Some(Presence::Lost) | None if there > 0 && (is_all || is_any_enough) => Extent::All,
            Some(Presence::Lost) | None if there == 0 && unconfirmed == 0 => Extent::None,
            Some(Presence::Lost) | None => Extent::Unknown,
        };
        RuleFlows {
            extent,
            closes_all: closing.is_some(),
            are_wanted: there + lost + unconfirmed > 0,
        }
    }

    /// How many flows for this traffic a rule has, if it has room.
    fn wanted(&self, rules: &[&ActiveRule], asked: Option<Transport>) -> usize {
        let wanted = rules.iter().map(|rule| {
            let transports = &rule.transports;
            let of_asked = transports.iter().map(|one| Some(*one));
            let of_asked = of_asked.filter(|one| is_for(*one, asked)).count();
            let each = rule.templates.len() * self.sources;
            each * if transports.is_empty() { 1 } else { of_asked }
        });
        wanted.max().unwrap_or_default()
    }

    /// Whether the switch may have flows for this traffic that are of none of these rules.
    pub(super) fn are_others(&self, rules: &[&ActiveRule], asked: Option<Transport>) -> bool {
        let is_other = |template: &FlowTemplate| {
            let mut rules = rules.iter();
            !rules.any(|rule| {
                let transports = &rule.transports;
                let may_have = |one| transports.contains(&one) || transports.is_empty();
                is_of(template, rule) && template.transport.is_none_or(may_have)
            })
        };
        let mut each = self.each();
        each.any(|(template, presence)| {
            presence != Presence::Lost && is_for(template.transport, asked) && is_other(template)
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
