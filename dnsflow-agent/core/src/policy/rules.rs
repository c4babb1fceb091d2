//! The rules of one namespace as OVN enforces them now. Each logical flow for a DNS name is paired with the
//! EgressFirewall's rule behind it.
//!
//! The content of a logical flow decides which rule it belongs to, not the index. ovn-kubernetes edits ACL rows in
//! place: an index stands for another rule as soon as a rule is inserted, and ovn-northd follows a little later. The
//! logical flow itself has the name of the address set, and this name has the hash of the DNS name. While the
//! resource has changed and OVN has not, the flows of a DNS name stay where OVN still enforces the rule. They move
//! together with OVN's.

pub(crate) mod pairing;
pub(crate) mod resource;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::{
    io::report::Severity,
    ovn::{
        acl::AclMatchError,
        rows::Pipeline,
        template::{
            AclTemplate, AclTemplateError, ActionTemplate, ActionText, CachedActions,
            any_marks_as_blocked, first_to_copy,
        },
    },
    tools::table::HashMap,
    values::{
        firewall::{
            Destination, Firewall, Floor, IpVersions, PORTS_PER_RULE_MAX, Rule, RuleAction,
        },
        flow::Transport,
        name::{DnsName, DomainName},
    },
};

/// Which names a rule matches, seen from the rule's name.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NamePattern {
    /// The name itself.
    Exact,
    /// The name and everything below it.
    Subdomains,
    /// Names with exactly one more label (`*.example.com`).
    OneLabel,
}

impl NamePattern {
    /// The pattern of this name in the firewall; `subdomains` applies if the firewall does not say.
    pub fn of(name: &DnsName, firewall: &Firewall, subdomains: bool) -> Self {
        if name.is_wildcard() {
            Self::OneLabel
        } else if firewall.subdomains.unwrap_or(subdomains) {
            Self::Subdomains
        } else {
            Self::Exact
        }
    }

    /// Whether the pattern matches a name with `extra` labels in front of the rule's name.
    pub(crate) fn covers(self, extra: usize) -> bool {
        match self {
            Self::Exact => extra == 0,
            Self::Subdomains => true,
            Self::OneLabel => extra == 1,
        }
    }

    /// Whether a rule of this name and pattern matches a name.
    pub(crate) fn covers_name(self, rule: &DnsName, name: &DomainName) -> bool {
        let mut suffixes = name.suffixes().enumerate();
        suffixes.any(|(extra, suffix)| suffix == rule.name().wire() && self.covers(extra))
    }
}

/// A rule that OVN enforces for the ports of one port group.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ActiveRule {
    /// The namespace of the EgressFirewall.
    pub namespace: String,
    /// The rule's index, as OVN has it.
    pub index: u32,
    /// The rule's name.
    pub name: DnsName,
    /// Which names the rule matches.
    pub pattern: NamePattern,
    /// Whether OVN enforces it for IPv4.
    pub v4: bool,
    /// Whether OVN enforces it for IPv6.
    pub v6: bool,
    /// Protocols and ports; empty means all traffic.
    pub transports: Vec<Transport>,
    /// Whether the rule allows or denies.
    pub action: RuleAction,
    /// The logical flows that enforce it.
    pub templates: Vec<Arc<AclTemplate>>,
}

/// A rule without its place: its name without a wildcard, its pattern, and its action.
pub type RuleText = (DomainName, NamePattern, RuleAction);

impl ActiveRule {
    /// Whether it is this rule of the EgressFirewall, which has the same index.
    pub(crate) fn is_enforced_as(&self, rule: &Rule, name: &DnsName) -> bool {
        self.action == rule.action
            && self.name.is_wildcard() == name.is_wildcard()
            && ports(&self.transports) == ports(&rule.ports)
    }

    /// The priorities of its flows, each once.
    fn priorities(&self) -> BTreeSet<u16> {
        let templates = self.templates.iter();
        templates.map(|template| template.priority).collect()
    }

    /// The rule without its place.
    pub(crate) fn text(&self) -> RuleText {
        (self.name.name().clone(), self.pattern, self.action)
    }

    /// The protocols and ports of its flows; empty means all traffic. A rule that denies more than are read denies all.
    pub(crate) fn ports_of_flows(&self) -> &[Transport] {
        match self.action == RuleAction::Deny && self.transports.len() > PORTS_PER_RULE_MAX {
            true => &[],
            false => &self.transports,
        }
    }

    /// How many flows to one address of a family the rule comes to at most, for a port with so many addresses of its own.
    pub(crate) fn flow_count(&self, v6: bool, sources: usize) -> usize {
        let is_for_family = if v6 { self.v6 } else { self.v4 };
        let each = self.templates.len() * sources * self.ports_of_flows().len().max(1);
        if is_for_family { each } else { 0 }
    }

    /// A rule by name for both families, as the EgressFirewall alone has it: without OVN's ACL and its
    /// logical flows.
    pub(crate) fn without_acl(
        namespace: &str,
        index: u32,
        rule: &Rule,
        name: &DnsName,
        pattern: NamePattern,
    ) -> Self {
        Self {
            namespace: namespace.to_owned(),
            index,
            name: name.clone(),
            pattern,
            v4: true,
            v6: true,
            transports: rule.ports.clone(),
            action: rule.action,
            templates: Vec::new(),
        }
    }

    /// Whether this is the same rule, whatever the templates.
    fn is_like(&self, other: &Self) -> bool {
        self.name == other.name
            && self.transports == other.transports
            && self.action == other.action
            && (self.v4, self.v6) == (other.v4, other.v6)
    }
}

/// The rules for the ports of one port group, found by name.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RuleSet {
    /// The name of the port group.
    group: Arc<str>,
    rules: Vec<Arc<ActiveRule>>,
    /// For the wire form of each rule's name: indices into `rules`.
    by_name: HashMap<Box<[u8]>, Vec<usize>>,
    /// For the priority of the flows of each rule: indices into `rules`.
    by_priority: HashMap<u16, Places>,
    /// How many of them deny.
    denials: usize,
    /// Where the rules are enforced, and by how many logical flows.
    places: BTreeMap<(Pipeline, u8), usize>,
    /// The actions that are to be copied, and for how many logical flows.
    sources: BTreeMap<ActionText, usize>,
    /// Whether the flows of the rules are planned, and not installed.
    is_dry_run: bool,
}

/// Where the rules with flows of one priority stand: mostly one.
type Places = SmallVec<[usize; 1]>;

/// How the rules of a port group have changed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum ChangedRules {
    /// All of them may be others.
    All,
    /// Only rules of these names, without wildcards: they matter to the names themselves and to names below them.
    Of(ChangedNames),
}

/// How the rules of each of these names have changed.
pub(crate) type ChangedNames = BTreeMap<DomainName, ChangedName>;

/// How the rules of a name have changed.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum ChangedName {
    /// In ports, place or logical flows: names have the same patterns, and are denied as before.
    InPlace,
    /// In patterns or actions.
    Otherwise,
}

impl ChangedRules {
    /// Adds further changes.
    pub(crate) fn add(&mut self, other: Self) {
        match (&mut *self, other) {
            (Self::Of(names), Self::Of(others)) => {
                for (name, change) in others {
                    let known = names.entry(name).or_insert(change);
                    *known = change.max(*known);
                }
            }
            _ => *self = Self::All,
        }
    }
}

/// Whether the flows of the rules of a port are planned, and not installed.
pub(crate) fn is_dry_run(sets: &[&RuleSet]) -> bool {
    sets.iter().any(|set| set.is_dry_run)
}

impl RuleSet {
    /// There is no rule for the ports of this group.
    pub(crate) fn of(group: &str) -> Self {
        Self {
            group: group.into(),
            ..Self::default()
        }
    }

    /// The name of the port group.
    pub(crate) fn group(&self) -> &Arc<str> {
        &self.group
    }

    /// Adds a rule.
    pub fn push(&mut self, rule: impl Into<Arc<ActiveRule>>) {
        let rule = rule.into();
        let at = self.rules.len();
        self.by_name
            .entry(rule.name.name().wire().into())
            .or_default()
            .push(at);
        for priority in rule.priorities() {
            self.by_priority.entry(priority).or_default().push(at);
        }
        self.denials += usize::from(rule.action == RuleAction::Deny);
        for template in &rule.templates {
            let place = (template.pipeline, template.table_id);
            *self.places.entry(place).or_default() += 1;
            if let ActionTemplate::Copy { source, .. } = &template.actions {
                match self.sources.get_mut(source) {
                    Some(count) => *count += 1,
                    None => {
                        self.sources.insert(source.clone(), 1);
                    }
                }
            }
        }
        self.rules.push(rule);
    }

    /// Takes out the rule at this place. The last one takes the place.
    fn take_out(&mut self, place: usize) {
        let rule = self.rules.swap_remove(place);
        let from = self.rules.len();
        for priority in rule.priorities() {
            if let Some(places) = self.by_priority.get_mut(&priority) {
                places.retain(|known| *known != place);
                if places.is_empty() {
                    self.by_priority.remove(&priority);
                }
            }
        }
        self.denials -= usize::from(rule.action == RuleAction::Deny);
        if let Some(moved) = self.rules.get(place) {
            // It mostly stands at the end.
            let renumber = |places: &mut [usize]| {
                let known = places.iter_mut().rev().find(|known| **known == from);
                known.into_iter().for_each(|known| *known = place);
            };
            if let Some(places) = self.by_name.get_mut(moved.name.name().wire()) {
                renumber(places);
            }
            for priority in moved.priorities() {
                if let Some(places) = self.by_priority.get_mut(&priority) {
                    renumber(places);
                }
            }
        }
        for template in &rule.templates {
            release(&mut self.places, &(template.pipeline, template.table_id));
            if let ActionTemplate::Copy { source, .. } = &template.actions {
                release(&mut self.sources, source);
            }
        }
    }

    /// Makes these the rules with a name. Returns how they have changed, if they have.
    pub(crate) fn replace(
        &mut self,
        name: &DomainName,
        rules: Vec<Arc<ActiveRule>>,
    ) -> Option<ChangedName> {
        if self.named(name).eq(rules.iter().map(|rule| &**rule)) {
            return None;
        }
        let kind = |rule: &ActiveRule| (rule.pattern, rule.action);
        let before: BTreeSet<_> = self.named(name).map(kind).collect();
        let after: BTreeSet<_> = rules.iter().map(|rule| kind(rule)).collect();
        let mut places = self.by_name.remove(name.wire()).unwrap_or_default();
        // From behind, so that no other of them is moved.
        places.sort_unstable();
        for place in places.into_iter().rev() {
            self.take_out(place);
        }
        for rule in rules {
            self.push(rule);
        }
        Some(match before == after {
            true => ChangedName::InPlace,
            false => ChangedName::Otherwise,
        })
    }

    /// Whether a dry run is made of the rules: their flows are planned, and not installed.
    pub fn set_dry_run(&mut self, is_dry_run: bool) {
        self.is_dry_run = is_dry_run;
    }

    /// Whether some rule denies.
    pub(crate) fn any_denies(&self) -> bool {
        self.denials > 0
    }

    /// Pipeline and table of the logical flows that enforce the rules.
    pub(crate) fn places(&self) -> impl Iterator<Item = (Pipeline, u8)> {
        self.places.keys().copied()
    }

    /// The actions that the rules would copy.
    pub(crate) fn sources(&self) -> impl Iterator<Item = &ActionText> {
        self.sources.keys()
    }

    /// Whether the rules would copy these actions.
    pub(crate) fn has_source(&self, source: &ActionText) -> bool {
        self.sources.contains_key(source)
    }

    /// The rules with this name, without wildcards.
    pub(crate) fn named(&self, name: &DomainName) -> impl Iterator<Item = &ActiveRule> {
        let places = self.by_name.get(name.wire()).into_iter().flatten();
        places.map(|&place| &*self.rules[place])
    }

    /// The indices in [`RuleSet::rules`] of the rules with this name, without wildcards, and this pattern.
    pub(crate) fn with_pattern(
        &self,
        name: &DomainName,
        pattern: NamePattern,
    ) -> impl Iterator<Item = usize> {
        let places = self.by_name.get(name.wire()).into_iter().flatten();
        let places = places.copied();
        places.filter(move |&place| self.rules[place].pattern == pattern)
    }

    /// Whether rules have this name, in wire form, without wildcards.
    pub(crate) fn has_rules(&self, name: &[u8]) -> bool {
        self.by_name.contains_key(name)
    }

    /// The indices in [`RuleSet::rules`] of the rules that have flows of this priority.
    pub(crate) fn at_priority(&self, priority: u16) -> &[usize] {
        let places = self.by_priority.get(&priority);
        places.map_or(&[], SmallVec::as_slice)
    }

    /// Every rule, in no particular order.
    pub fn rules(&self) -> &[Arc<ActiveRule>] {
        &self.rules
    }

    /// The rules that match `name`.
    pub fn matching(&self, name: &DomainName) -> impl Iterator<Item = &ActiveRule> {
        self.matching_indices(name).map(|place| &*self.rules[place])
    }

    /// Whether some rule denies `name`.
    pub fn denies(&self, name: &DomainName) -> bool {
        let denies = |rule: &ActiveRule| rule.action == RuleAction::Deny;
        self.any_denies() && self.matching(name).any(denies)
    }

    /// The indices in [`RuleSet::rules`] of the rules that match `name`.
    pub fn matching_indices(&self, name: &DomainName) -> impl Iterator<Item = usize> {
        self.by_suffix(name)
            .flat_map(|(rules, extra)| self.covering(rules, extra))
    }

    /// For each name that has rules, and that `name` is or stands below: its rules, and how many labels `name` has in
    /// front, of which 2 stands for more.
    pub(crate) fn by_suffix(
        &self,
        name: &DomainName,
    ) -> impl Iterator<Item = (&Vec<usize>, usize)> {
        let suffixes = name.suffixes().enumerate();
        suffixes.filter_map(|(extra, suffix)| Some((self.by_name.get(suffix)?, extra.min(2))))
    }

    /// Those of these rules that cover a name with so many labels in front of theirs.
    pub(crate) fn covering(&self, rules: &[usize], extra: usize) -> impl Iterator<Item = usize> {
        let rules = rules.iter().copied();
        rules.filter(move |&place| self.rules[place].pattern.covers(extra))
    }
}

/// The names that the same rules match as one name.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct AlikeNames {
    /// The longest name with rules that the name is or stands below.
    suffix: Box<[u8]>,
    /// How many labels the name has in front of it, of which 2 stands for more.
    in_front: usize,
}

impl AlikeNames {
    /// The names like this one; `None` if no rule matches it. `has_rules`: whether there are rules with a name, in wire
    /// form, without wildcards.
    pub(crate) fn of(name: &DomainName, has_rules: impl Fn(&[u8]) -> bool) -> Option<Self> {
        // Patterns tell no more of the names above: as many labels stand in front of those, or two at least.
        let mut suffixes = name.suffixes().enumerate();
        let (in_front, suffix) = suffixes.find(|(_, suffix)| has_rules(suffix))?;
        Some(Self {
            suffix: suffix.into(),
            in_front: in_front.min(2),
        })
    }
}

/// Counts one less.
fn release<Key: Ord>(counts: &mut BTreeMap<Key, usize>, key: &Key) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// A problem or a limitation of a rule.
#[derive(Clone, Debug, Eq, Hash, PartialEq, thiserror::Error)]
pub enum Problem {
    /// The resource's rule cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// OVN has no ACL for the rule yet.
    #[error("waiting for OVN's ACL for dnsName `{}`", .0.written())]
    NoAcl(DnsName),
    /// OVN has the ACL, but no logical flow of it.
    #[error(
        "waiting for the logical flows of dnsName `{}`: OVN makes them once the namespace has a pod on this node",
        .0.written()
    )]
    NoLogicalFlows(DnsName),
    /// The ACL's index lies beyond the resource's rules: ovn-kubernetes left the ACL behind when
    /// the resource was shortened.
    #[error(
        "OVN still enforces an ACL with this index, which ovn-kubernetes has left behind: the EgressFirewall has no such rule any more. Delete the EgressFirewall and create it again; a restart of ovnkube does not help"
    )]
    StaleAcl,
    /// The ACL's match is not one that ovn-kubernetes writes.
    #[error("the match of OVN's ACL is not understood: {0}")]
    AclMatch(AclMatchError),
    /// A logical flow cannot be read as a template.
    #[error("a logical flow of dnsName `{name}` is not understood: {error}", name = .0.written(), error = .1)]
    Template(DnsName, AclTemplateError),
    /// ACL logging is on, but packets that our flows let pass are not logged.
    #[error(
        "ACL logging does not cover addresses of dnsName `{}` that only dnsflow knows, until ovn-kubernetes itself resolves the name",
        .0.written()
    )]
    LogsLeftOut(DnsName),
    /// Packets of established connections are dropped, but the connections are not marked as
    /// blocked.
    #[error(
        "packets to addresses of dnsName `{}` are dropped, but established connections are not marked as blocked: \
         replies still pass until OVN itself denies with the same actions on this node",
        .0.written()
    )]
    NotMarked(DnsName),
    /// The rule denies by name, and no rule behind it denies all addresses of these IP versions.
    #[error(
        "a Deny by name closes only the addresses in the pod's DNS answers: an address from elsewhere, or one older \
         than an hour, stays reachable, and without an agent each that ovn-kubernetes does not know; add a Deny of \
         cidrSelector {} as the last rule (dnsName `{}`)",
        .1, .0.written()
    )]
    DeniesByName(DnsName, IpVersions),
    /// ovn-kubernetes has not made ACLs of the EgressFirewall for a while.
    #[error("{0}")]
    NotTakenOver(NotTakenOver),
}

/// An EgressFirewall that ovn-kubernetes does not take over.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct NotTakenOver {
    /// Whether OVN enforces the EgressFirewall before this one; if not, OVN enforces none.
    pub has_older: bool,
    /// The message of ovn-kubernetes in the status.
    pub refusal: Option<String>,
    /// A name that ovn-kubernetes refuses without `--enable-dns-name-resolver`.
    pub wildcard: Option<DnsName>,
}

impl Problem {
    /// The effect of the problem on the rule.
    pub fn severity(&self) -> Severity {
        match self {
            Self::NoAcl(_) | Self::NoLogicalFlows(_) => Severity::Waiting,
            Self::Invalid(_) | Self::AclMatch(_) | Self::Template(..) | Self::NotTakenOver(_) => {
                Severity::NotInForce
            }
            Self::StaleAcl | Self::LogsLeftOut(_) | Self::NotMarked(_) | Self::DeniesByName(..) => {
                Severity::Caveat
            }
        }
    }
}

impl fmt::Display for NotTakenOver {
    /// The remedy comes before the quoted cause, because an Event's note is cut at its end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ovn-kubernetes has not taken over this EgressFirewall; OVN enforces ")?;
        f.write_str(match self.has_older {
            true => "the one before it",
            false => "no rule of it",
        })?;
        match (&self.wildcard, &self.refusal) {
            (Some(name), _) => write!(
                f,
                ". A wildcard needs --enable-dns-name-resolver: turn it on, or write names in place of dnsName `{}`",
                name.written()
            )?,
            (None, Some(_)) => f.write_str(". Correct the EgressFirewall by its status")?,
            (None, None) => {
                f.write_str(". The log of ovnkube-controller on this node has the reason")?
            }
        }
        match &self.refusal {
            Some(refusal) => write!(f, ". status.messages: {refusal}"),
            None => Ok(()),
        }
    }
}

/// The rules of a namespace that OVN enforces, and the problems.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NamespaceRules {
    /// The usable rules, by the NB name of their port group.
    pub sets: BTreeMap<String, RuleSet>,
    /// The problems, by rule index.
    pub problems: BTreeMap<u32, Problem>,
}

/// The priority of the logical flow and of the OpenFlow flow is the ACL's priority plus this
/// (`OVN_ACL_PRI_OFFSET` in OVN's `northd/northd.h`).
pub const ACL_PRIORITY_OFFSET: u16 = 1000;

/// The problem or limitation of a rule, by the resource and the IP versions of the cluster, if these are known.
pub(crate) fn problem_of_resource(
    index: u32,
    rule: &Rule,
    floor: &Floor,
    cluster: Option<IpVersions>,
) -> Option<Problem> {
    if let Destination::Invalid(reason) = &rule.destination {
        return Some(Problem::Invalid(reason.clone()));
    }
    let name = rule.denied_name()?;
    let open = floor.open_behind(index, cluster);
    (!open.is_empty()).then(|| Problem::DeniesByName(name.clone(), open))
}

fn rule_at(rules: &[Rule], index: u32) -> Option<&Rule> {
    rules.get(usize::try_from(index).ok()?)
}

/// The number of rules, as an index.
fn end_of(rules: &[Rule]) -> u32 {
    u32::try_from(rules.len()).unwrap_or(u32::MAX)
}

/// The indices at which two EgressFirewalls do not have the same rule.
pub(crate) fn differing(one: &[Rule], other: &[Rule]) -> Vec<u32> {
    if std::ptr::eq(one, other) {
        return Vec::new();
    }
    let all = 0..end_of(one).max(end_of(other));
    all.filter(|&index| rule_at(one, index) != rule_at(other, index))
        .collect()
}

/// The indices of the rules that deny by name.
fn denials_by_name(rules: &[Rule]) -> impl Iterator<Item = u32> {
    let denials = (0..).zip(rules);
    let denials = denials.filter(|(_, rule)| rule.denied_name().is_some());
    denials.map(|(index, _)| index)
}

/// The problem of a rule whose template needs copied actions, while no flow with these actions is known.
fn to_copy(
    template: &AclTemplate,
    name: &DnsName,
    cached_actions: &CachedActions,
) -> Option<Problem> {
    match &template.actions {
        ActionTemplate::Copy { source, .. } if cached_actions.contains_key(source) => None,
        ActionTemplate::Copy {
            source,
            meanwhile: Some(_),
        } if any_marks_as_blocked(&source.actions) => Some(Problem::NotMarked(name.clone())),
        ActionTemplate::Copy {
            meanwhile: Some(_), ..
        } => Some(Problem::LogsLeftOut(name.clone())),
        ActionTemplate::Copy {
            source,
            meanwhile: None,
        } => {
            let action = first_to_copy(&source.actions).unwrap_or(&source.actions);
            let error = AclTemplateError::NoCopy(action.to_owned());
            Some(Problem::Template(name.clone(), error))
        }
        ActionTemplate::Build(_) => None,
    }
}

/// The ports as a set. If the list has all ports of a protocol, single ports of the protocol are
/// left out.
fn ports(list: &[Transport]) -> BTreeSet<Transport> {
    let whole = list.iter().filter(|transport| transport.port.is_none());
    let whole: BTreeSet<Transport> = whole.copied().collect();
    let is_covered = |transport: &Transport| {
        let all = Transport {
            port: None,
            ..*transport
        };
        transport.port.is_some() && whole.contains(&all)
    };
    let ports = list.iter().filter(|transport| !is_covered(transport));
    ports.copied().collect()
}

#[cfg(test)]
mod tests;
