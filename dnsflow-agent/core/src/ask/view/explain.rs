//! Why a pod may reach an address, or may not: the EgressFirewall's rules in their order, with the answers to the
//! pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    str::FromStr,
};

use serde::{Deserialize, Serialize};

use super::{EntryView, PortView, View, action_text, destination_text, transport_text};
use crate::{
    Timestamp,
    ask::attempts::Heard,
    cache::End,
    io::report::Severity,
    ovn::hash::{Family, address_set_hashes},
    pods::ports::Port,
    policy::{
        Mention,
        plan::{fitting, matched_by_any},
        rules::{NamePattern, Problem, is_dry_run},
    },
    values::{
        firewall::{Destination, Firewall, Rule, RuleAction},
        flow::{Protocol, Transport},
        ids::PortId,
        limits::Limit,
        name::{DnsName, DomainName},
        verdict::{Reason, Verdict},
    },
};

/// The target of the question.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Target {
    /// A name, and every address that the pod was told for it.
    Name(DomainName, Option<Transport>),
    /// An address.
    Address(IpAddr, Option<Transport>),
}

/// A text that is no target.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "`{0}` is no target: use NAME, ADDRESS, NAME:PORT, ADDRESS:PORT or [IPV6]:PORT, and /udp or \
     /sctp behind a port that is not for TCP"
)]
pub struct TargetError(String);

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let error = || TargetError(text.to_owned());
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address, None));
        }
        let (host, transport) = match text.rsplit_once(':') {
            None => (text, None),
            Some((host, port)) => (host, Some(transport(port).ok_or_else(error)?)),
        };
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        match bare.unwrap_or(host).parse() {
            Ok(address) => Ok(Self::Address(address, transport)),
            Err(_) if bare.is_some() => Err(error()),
            Err(_) => {
                let name = DomainName::from_presentation(host).map_err(|_| error())?;
                Ok(Self::Name(name, transport))
            }
        }
    }
}

/// Parses `443`, `53/udp`.
fn transport(text: &str) -> Option<Transport> {
    let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = Protocol::of_name(protocol)?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    Some(Transport {
        protocol,
        port: Some(port),
    })
}

/// How a rule bears on a connection.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepOutcome {
    /// It does not match.
    NoMatch,
    /// It matches and decides.
    Decides,
    /// It would match, but is not in force for this address.
    NotInForce,
    /// It matches for some ports only.
    SomePorts,
    /// It matches, but an earlier rule has decided.
    TooLate,
    /// Whether it matches is not known to the agent.
    Unknown,
}

/// A rule, and how it bears on a connection.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RuleStep {
    /// Its index in `spec.egress`.
    pub rule: u32,
    /// `Allow` or `Deny`.
    pub action: String,
    /// Its destination, as the resource writes it.
    pub destination: String,
    /// Its ports, such as `tcp/443`; none for all traffic.
    pub ports: Vec<String>,
    /// The outcome for the connection.
    pub outcome: StepOutcome,
    /// Why, in words.
    pub why: String,
}

/// A name that led the pod to an address, although no rule mentions the name.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct HeardName {
    /// The name.
    pub name: String,
    /// The seconds since the answer.
    pub told_s: u64,
    /// Who has answered.
    pub resolver: String,
}

/// Facts about a target from outside the engine.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Beside {
    /// Names that no rule mentioned when they led pods to the address, with the interface index of the
    /// pod, the newest first.
    pub heard: Vec<(u32, Heard)>,
    /// By address, OVN's address sets that have it: the numbers in their names. `None` if OVN was not asked.
    pub sets: Option<BTreeMap<IpAddr, BTreeSet<u64>>>,
}

/// The decision over one address.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ExplainedAddress {
    /// The address; none where the pod was told none for the name.
    pub address: Option<IpAddr>,
    /// The verdict over a connection to it.
    pub verdict: Verdict,
    /// Why.
    pub reason: Reason,
    /// The rule that decides.
    pub rule: Option<u32>,
    /// The reason in words.
    pub text: String,
    /// The change that would open it.
    pub remedy: Option<String>,
    /// The rules that say something about it, in their order.
    pub steps: Vec<RuleStep>,
    /// The cache entry, with the flows.
    pub entry: Option<EntryView>,
    /// Names that led the pod to it, and that no rule mentions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub heard: Vec<HeardName>,
}

/// The answer to "why can this pod not reach that?".
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Explanation {
    /// The pod's port.
    pub port: PortView,
    /// Whether every address is allowed.
    pub verdict: Verdict,
    /// Each address.
    pub addresses: Vec<ExplainedAddress>,
    /// Other possible causes.
    pub hints: Vec<String>,
}

/// A connection that is asked about.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked<'a> {
    pub(super) address: Option<IpAddr>,
    /// A name that leads to the address as far as people know. The answers to the pod decide whether a rule matches.
    pub(super) name: Option<&'a DomainName>,
    pub(super) transport: Option<Transport>,
    /// OVN's address sets that have the address.
    pub(super) sets: Option<&'a BTreeSet<u64>>,
}

/// A destination of a port, with the facts by which rules match it.
struct Destined<'a> {
    id: PortId,
    port: &'a Port,
    /// The name that people have asked about.
    asked: Option<&'a DomainName>,
    address: Option<IpAddr>,
    /// The names that lead to it.
    names: Vec<&'a DomainName>,
    transport: Option<Transport>,
    /// OVN's address sets that have the address.
    sets: Option<&'a BTreeSet<u64>>,
}

impl Destined<'_> {
    /// A name that leads to it and that a rule by name covers.
    fn told(&self, rule: &DnsName, pattern: NamePattern) -> Option<&DomainName> {
        let mut names = self.names.iter().copied();
        names.find(|told| covers(rule, pattern, told))
    }

    /// Whether ovn-kubernetes has resolved the name of a rule to it.
    fn is_in_set_of(&self, rule: &DnsName) -> bool {
        let Some((address, sets)) = self.address.zip(self.sets) else {
            return false;
        };
        let family = match address {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        };
        let hashes = address_set_hashes(rule, family);
        hashes.iter().any(|hash| sets.contains(hash))
    }
}

/// Why a rule matches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum By {
    /// A network, or all there is.
    Network,
    /// A name that leads to the address.
    Name,
    /// OVN's address set of the rule's name, and no answer to the pod.
    AddressSet,
}

/// The result of the walk through the rules.
#[derive(Default)]
struct Walk {
    steps: Vec<RuleStep>,
    /// The rule that decides.
    decided: Option<(u32, RuleAction, By)>,
    /// The first rule by name that would allow it, and the reason why it does not.
    would: Option<(u32, Reason, String)>,
    /// Whether some rule by name before the decision allows anything.
    allows_names: bool,
}

impl View<'_> {
    /// Explains the verdict over a pod's connections to a target, at this logical port. `None` where the port is not
    /// on this node.
    pub fn explain(
        &self,
        port: &str,
        target: &Target,
        beside: &Beside,
        now: Timestamp,
    ) -> Option<Explanation> {
        let id = self.ports.named(port)?;
        let port = self.ports.get(id)?;
        let sets = |address| beside.sets.as_ref()?.get(&address);
        let addresses = match target {
            Target::Address(address, transport) => {
                let heard = beside.heard.iter();
                let heard = heard.filter(|(ifindex, _)| self.ports.at_veth(*ifindex) == Some(id));
                // Of a name that a rule mentions by now, only the cache counts.
                let heard = heard
                    .map(|(_, heard)| heard)
                    .filter(|heard| self.policy.mention(&port.row, &heard.name) == Mention::None);
                let heard: Vec<&Heard> = heard.collect();
                let asked = Asked {
                    address: Some(*address),
                    name: heard.first().map(|heard| &heard.name),
                    transport: *transport,
                    sets: sets(*address),
                };
                let heard = heard.iter().map(|heard| HeardName {
                    name: heard.name.to_string(),
                    told_s: now.since(heard.at).as_secs(),
                    resolver: heard.resolver.to_string(),
                });
                vec![ExplainedAddress {
                    heard: heard.collect(),
                    ..self.address(id, port, asked, now)
                }]
            }
            Target::Name(name, transport) => {
                let mut told = self.cache.port(id).entries.of_name(name).to_vec();
                told.sort_unstable();
                let none = Asked {
                    name: Some(name),
                    transport: *transport,
                    ..Asked::default()
                };
                let each = told.iter().map(|address| {
                    let asked = Asked {
                        address: Some(*address),
                        sets: sets(*address),
                        ..none
                    };
                    self.address(id, port, asked, now)
                });
                let mut each: Vec<_> = each.collect();
                if each.is_empty() {
                    each.push(self.address(id, port, none, now));
                }
                each
            }
        };
        let verdicts = addresses.iter().map(|address| address.verdict);
        let verdict = verdicts.max().unwrap_or(Verdict::Allowed);
        let hints = match verdict {
            Verdict::Allowed => Vec::new(),
            Verdict::Blocked => self.hints(port, &addresses, beside.sets.is_some()),
        };
        Some(Explanation {
            port: self.port(id, port),
            verdict,
            addresses,
            hints,
        })
    }

    /// The decision over one address, or over a name without one, by the answers to the pod.
    fn address(
        &self,
        id: PortId,
        port: &Port,
        asked: Asked<'_>,
        now: Timestamp,
    ) -> ExplainedAddress {
        let told = |address| self.entry(id, port, address, now);
        ExplainedAddress {
            entry: asked.address.and_then(told),
            ..self.decide(id, port, asked)
        }
    }

    /// The decision alone.
    pub(super) fn decide(&self, id: PortId, port: &Port, asked: Asked<'_>) -> ExplainedAddress {
        let Asked {
            address,
            name: asked,
            transport,
            sets,
        } = asked;
        let row = &port.row;
        let entry = address.and_then(|address| self.cache.entry(id, address));
        let told = entry.into_iter().flat_map(|entry| entry.names.keys());
        // Of a name that was never told, the rules say what would happen.
        let names: Vec<&DomainName> = match address {
            Some(_) => told.collect(),
            None => asked.into_iter().collect(),
        };
        let destined = Destined {
            id,
            port,
            asked,
            address,
            names,
            transport,
            sets,
        };
        let namespace = self.policy.namespace_of_names(row);
        let firewall = namespace.and_then(|namespace| self.policy.enforced(namespace));
        let walk = firewall.map(|firewall| self.walk(firewall, &destined));
        let (verdict, mut reason, rule, mut text) = match &walk {
            None => self.without_firewall(),
            Some(walk) => self.outcome(&destined, walk),
        };
        if verdict == Verdict::Blocked
            && let Some(namespace) = namespace
            && self.policy.enforces_former(namespace)
            && let Some(present) = self.policy.present(namespace)
            && let Some((_, waits, why)) = self.walk(present, &destined).would
            && matches!(waits, Reason::AclMissing | Reason::FirewallNotTakenOver)
        {
            (reason, text) = (waits, why);
        }
        let name = destined.names.first().copied().or(asked);
        let remedy = match (reason, name, address) {
            (Reason::DeniedByRule | Reason::DeniedByEarlierRule, Some(name), _) => Some(format!(
                "allow it before rule {} with `dnsName: {name}`",
                rule.unwrap_or_default()
            )),
            (Reason::DeniedByRule, None, Some(address)) => Some(format!(
                "allow it before rule {} with `cidrSelector: {address}/{}`, or with the dnsName that \
                 leads to the address",
                rule.unwrap_or_default(),
                if address.is_ipv4() { 32 } else { 128 }
            )),
            _ => None,
        };
        ExplainedAddress {
            address,
            verdict,
            reason,
            rule,
            text,
            remedy,
            steps: walk.map(|walk| walk.steps).unwrap_or_default(),
            entry: None,
            heard: Vec::new(),
        }
    }

    fn without_firewall(&self) -> (Verdict, Reason, Option<u32>, String) {
        if self.sources.are_read() {
            let text = "the namespace has no EgressFirewall: everything passes";
            (Verdict::Allowed, Reason::NoFirewall, None, text.to_owned())
        } else {
            let text = "the agent has not read everything yet (`dnsflow status`)";
            (
                Verdict::Blocked,
                Reason::AgentStarting,
                None,
                text.to_owned(),
            )
        }
    }

    /// Goes through the rules in their order; the first that matches decides.
    fn walk(&self, firewall: &Firewall, to: &Destined<'_>) -> Walk {
        let mut walk = Walk::default();
        for (index, rule) in (0..).zip(firewall.rules.iter()) {
            let (outcome, why) = self.step(to, firewall, (index, rule), &mut walk);
            if outcome == StepOutcome::Decides {
                let by = match &rule.destination {
                    Destination::Name(name) => {
                        let pattern = NamePattern::of(name, firewall, self.policy.subdomains());
                        match to.told(name, pattern) {
                            Some(_) => By::Name,
                            None => By::AddressSet,
                        }
                    }
                    Destination::Cidr(_) | Destination::Nodes | Destination::Invalid(_) => {
                        By::Network
                    }
                };
                walk.decided = Some((index, rule.action, by));
            }
            // Of many rules that have nothing to do with it, nobody wants to read.
            if outcome != StepOutcome::NoMatch || !why.is_empty() {
                walk.steps.push(RuleStep {
                    rule: index,
                    action: action_text(rule.action).to_owned(),
                    destination: destination_text(&rule.destination),
                    ports: rule.ports.iter().copied().map(transport_text).collect(),
                    outcome,
                    why,
                });
            }
        }
        walk
    }

    fn step(
        &self,
        to: &Destined<'_>,
        firewall: &Firewall,
        (index, rule): (u32, &Rule),
        walk: &mut Walk,
    ) -> (StepOutcome, String) {
        let is_decided = walk.decided.is_some();
        let no_match = || (StepOutcome::NoMatch, String::new());
        let mut blocked_by = None;
        let matches = match &rule.destination {
            Destination::Invalid(reason) => return (StepOutcome::NotInForce, reason.clone()),
            Destination::Nodes if is_decided => return no_match(),
            Destination::Nodes => {
                let why = "matches the nodes' addresses, which the agent does not look up";
                return (StepOutcome::Unknown, why.to_owned());
            }
            Destination::Cidr(network) => match to.address {
                Some(address) => network.contains(&address),
                // Only a rule for all addresses says something of an address that is not known.
                None => network.prefix_len() == 0,
            },
            Destination::Name(name) => {
                let pattern = NamePattern::of(name, firewall, self.policy.subdomains());
                if rule.action == RuleAction::Allow && !is_decided {
                    walk.allows_names = true;
                }
                let is_told = to.told(name, pattern).is_some();
                // What OVN has in its own set, OVN lets pass, whatever the agent does.
                let is_in_set = to.is_in_set_of(name);
                if is_told && !is_in_set {
                    blocked_by = self.not_in_force(to, (index, rule), name);
                }
                is_told || is_in_set
            }
        };
        if !matches {
            return no_match();
        }
        let is_by_name = matches!(rule.destination, Destination::Name(_));
        let would_allow = rule.action == RuleAction::Allow && is_by_name && walk.would.is_none();
        let closes_all = match rule.action {
            RuleAction::Deny if is_by_name => self.cut(to, (index, rule)),
            RuleAction::Deny | RuleAction::Allow => None,
        };
        let ports = match closes_all {
            Some(_) => Ports::All,
            None => ports_match(rule, to.transport),
        };
        if would_allow && !is_decided && !matches!(ports, Ports::All) {
            let ports: Vec<_> = rule.ports.iter().copied().map(transport_text).collect();
            let text = format!("rule {index} allows it for {} only", ports.join(", "));
            walk.would = Some((index, Reason::WrongPort, text));
        }
        if matches!(ports, Ports::None) {
            return (StepOutcome::NoMatch, "other ports".to_owned());
        }
        if is_decided {
            if would_allow {
                let text = format!("rule {index} would allow it, but an earlier rule decides");
                walk.would = Some((index, Reason::DeniedByEarlierRule, text));
            }
            return (StepOutcome::TooLate, "an earlier rule decides".to_owned());
        }
        match (blocked_by, ports) {
            (Some((reason, text)), _) => {
                if would_allow {
                    let but = match reason {
                        Reason::AclMissing | Reason::RuleNotUsable => "is not in force: ",
                        _ => "",
                    };
                    let would = format!("rule {index} would allow it, but {but}{text}");
                    walk.would = Some((index, reason, would));
                }
                (StepOutcome::NotInForce, text)
            }
            (None, Ports::All) if let Some(limit) = closes_all => {
                (StepOutcome::Decides, limit.to_string())
            }
            (None, Ports::All) => (StepOutcome::Decides, matched_text(rule, to)),
            (None, _) => (StepOutcome::SomePorts, matched_text(rule, to)),
        }
    }

    /// Why a rule by name is not in force for an address that the pod got from DNS.
    fn not_in_force(
        &self,
        to: &Destined<'_>,
        (index, rule): (u32, &Rule),
        name: &DnsName,
    ) -> Option<(Reason, String)> {
        let row = &to.port.row;
        let sets = self.policy.sets(row);
        let is_it = |active: &crate::policy::rules::ActiveRule| {
            active.name.meaning() == name.meaning() && active.action == rule.action
        };
        let is_active = sets
            .iter()
            .flat_map(|set| set.rules())
            .any(|active| is_it(active));
        if !is_active {
            let namespace = self.policy.namespace_of_names(row).unwrap_or_default();
            let mut problems = self.policy.problems(namespace);
            let problem = problems.find(|(at, _)| *at == index);
            return Some(match problem.map(|(_, problem)| problem) {
                Some(problem @ Problem::NotTakenOver(_)) => {
                    (Reason::FirewallNotTakenOver, problem.to_string())
                }
                Some(problem) if problem.severity() == Severity::NotInForce => {
                    (Reason::RuleNotUsable, problem.to_string())
                }
                Some(problem) => (Reason::AclMissing, problem.to_string()),
                None => (
                    Reason::AclMissing,
                    "OVN does not enforce the rule at this port yet".to_owned(),
                ),
            });
        }
        let address = to.address?;
        if rule.action == RuleAction::Allow
            && let Some(refused) = self.refusal(address, row)
        {
            let text = format!("the address is never opened: {refused}");
            return Some((Reason::AddressRefused, text));
        }
        let entry = self.cache.entry(to.id, address)?;
        if is_dry_run(&sets) {
            let text = "this is a dry run: no flow is installed".to_owned();
            return Some((Reason::DryRun, text));
        }
        if rule.action == RuleAction::Allow
            && let Some(limit) = self.cut(to, (index, rule))
        {
            return Some((Reason::LimitReached, limit.to_string()));
        }
        let flows = self.cache.flows_of(address, entry);
        let are_there = flows.is_some_and(|(_, flows)| !flows.is_empty() && !flows.is_lost());
        let is_marked = entry.installed.group().is_none() || entry.installed.is_marked();
        (!are_there || !is_marked).then(|| {
            let text = "its flow is not in the switch at the moment".to_owned();
            (Reason::FlowMissing, text)
        })
    }

    /// The limit for which a rule by name has not all of its flows to an address.
    fn cut(&self, to: &Destined<'_>, (index, rule): (u32, &Rule)) -> Option<Limit> {
        let address = to.address?;
        let entry = self.cache.entry(to.id, address)?;
        let room = entry.cut?;
        let sets = self.policy.sets(&to.port.row);
        let active = |place: &(usize, usize)| &sets[place.0].rules()[place.1];
        let is_it = |place: &(usize, usize)| {
            let active = active(place);
            active.index == index && active.action == rule.action
        };
        let mut matched = matched_by_any(&sets, entry.names.keys());
        matched.retain(|place| !entry.is_refused || active(place).action == RuleAction::Deny);
        let addresses = &to.port.row.addresses;
        let fitting = fitting(&sets, addresses, address.is_ipv6(), &matched, room)?;
        let is_cut = matched.iter().any(is_it) && !fitting.whole.iter().any(is_it);
        is_cut.then(|| room.limit())
    }

    /// The verdict of the walk.
    fn outcome(&self, to: &Destined<'_>, walk: &Walk) -> (Verdict, Reason, Option<u32>, String) {
        let is_told = to.address.is_some();
        match walk.decided {
            None => {
                let text = "no rule matches: OVN lets pass".to_owned();
                (Verdict::Allowed, Reason::NoRuleDenies, None, text)
            }
            Some((rule, RuleAction::Allow, By::Network)) => {
                let text = format!("rule {rule} allows it");
                (Verdict::Allowed, Reason::AllowedByNetwork, Some(rule), text)
            }
            Some((rule, RuleAction::Allow, By::AddressSet)) => {
                let text = format!(
                    "rule {rule} allows it, and ovn-kubernetes has resolved its name to the address itself"
                );
                (Verdict::Allowed, Reason::AllowedByOvn, Some(rule), text)
            }
            Some((rule, RuleAction::Allow, By::Name)) if is_told => {
                let text = format!("rule {rule} allows it, and the pod was told the address");
                (Verdict::Allowed, Reason::AllowedByName, Some(rule), text)
            }
            Some((rule, RuleAction::Allow, By::Name)) => {
                let (reason, text) = self.not_told(to);
                let text = format!("rule {rule} would allow it, but {text}");
                (Verdict::Blocked, reason, Some(rule), text)
            }
            Some((rule, RuleAction::Deny, by)) => {
                let (reason, text) = match &walk.would {
                    Some((_, reason, text)) => (*reason, text.clone()),
                    None if walk.allows_names
                        && by == By::Network
                        && to.names.is_empty()
                        && to.asked.is_none() =>
                    {
                        let (reason, text) = self.not_told(to);
                        (reason, format!("rule {rule} denies it, and {text}"))
                    }
                    None => (Reason::DeniedByRule, format!("rule {rule} denies it")),
                };
                (Verdict::Blocked, reason, Some(rule), text)
            }
        }
    }

    /// Why a pod does not know an address.
    fn not_told(&self, to: &Destined<'_>) -> (Reason, String) {
        let Destined {
            id, port, asked, ..
        } = *to;
        match self.ports.attachment(port.interface) {
            Some(None) => {}
            None => {
                let text = "the programs are not attached to the pod's interface yet";
                return (Reason::NotAttached, text.to_owned());
            }
            Some(Some(reason)) => {
                let text = format!("the programs cannot be attached: {reason}");
                return (Reason::NotAttached, text);
            }
        }
        if self.ports.not_trusted(port.interface).is_some() {
            let text = "nothing counts that the pod is told at this port (`dnsflow status`)";
            return (Reason::PortNotTrusted, text.to_owned());
        }
        if self
            .answers
            .trusted()
            .is_none_or(|trusted| trusted.is_empty())
        {
            let text = "no DNS server is trusted: see --resolver and --dns-service";
            return (Reason::NoResolverTrusted, text.to_owned());
        }
        if !self.sources.are_read() {
            let text = "the agent has not read everything yet (`dnsflow status`)";
            return (Reason::AgentStarting, text.to_owned());
        }
        let is_it = |address: IpAddr, name: &DomainName| match to.address {
            Some(wanted) => wanted == address,
            None => asked == Some(name),
        };
        let refused = self.refused.reported(id);
        let mut refused = refused.filter(|(name, address)| is_it(*address, name));
        let told_refused = refused.find_map(|(name, address)| {
            let why = self.refusal(*address, &port.row)?;
            Some(format!(
                "{name} leads to {address}, which is never opened: {why}"
            ))
        });
        let never = to
            .address
            .and_then(|address| self.refusal(address, &port.row));
        let never = never.map(|why| format!("no answer opens the address: {why}"));
        if let Some(text) = told_refused.or(never) {
            return (Reason::AddressRefused, text);
        }
        let mut ended = self.cache.port(id).ended.latest();
        if let Some(ended) = ended.find(|ended| is_it(ended.address, &ended.name)) {
            return match &ended.why {
                End::Expired => (
                    Reason::Expired,
                    format!(
                        "the answer for {} has expired: the pod has to ask again",
                        ended.name
                    ),
                ),
                End::Limit(limit) => (
                    Reason::LimitReached,
                    format!(
                        "a limit left no room for this address of {} ({limit})",
                        ended.name
                    ),
                ),
            };
        }
        let is_told = |other: PortId| match (to.address, asked) {
            (Some(address), _) => self.cache.entry(other, address).is_some(),
            (None, Some(name)) => !self.cache.port(other).entries.of_name(name).is_empty(),
            (None, None) => false,
        };
        let mut others = self.ports.iter().filter(|(other, _)| *other != id);
        match others.find(|(other, _)| is_told(*other)) {
            Some((_, other)) => (
                Reason::ToldToOtherPod,
                format!(
                    "this pod has not asked; {} was told, and each pod reaches what it was told itself",
                    other.row.iface_id
                ),
            ),
            None => (
                Reason::NotResolved,
                "the pod was told no such answer by a DNS server that is trusted".to_owned(),
            ),
        }
    }

    /// Other possible causes of a blocked connection.
    fn hints(
        &self,
        port: &Port,
        addresses: &[ExplainedAddress],
        ovn_was_asked: bool,
    ) -> Vec<String> {
        let mut hints = Vec::new();
        let namespace = self.policy.namespace_of_names(&port.row);
        if namespace.is_some_and(|namespace| self.policy.enforces_former(namespace)) {
            hints.push("OVN still enforces the EgressFirewall before the present one".to_owned());
        }
        let mut reasons = addresses.iter().map(|address| address.reason);
        let is_untold = |reason| matches!(reason, Reason::NotResolved | Reason::ToldToOtherPod);
        if reasons.any(is_untold) {
            let trusted = self.answers.trusted().into_iter().flatten();
            let trusted: Vec<String> = trusted.map(ToString::to_string).collect();
            hints.push(format!(
                "only answers of {} count; a node-local cache (169.254.20.10) needs --resolver",
                trusted.join(", ")
            ));
            hints.push(
                "a pod that uses DNS over HTTPS or TLS, or a cache of its own, asks where nobody sees it"
                    .to_owned(),
            );
            if !ovn_was_asked {
                hints.push(
                    "ovn-kubernetes resolves the names of rules as well: it may let pass what this agent \
                     does not know"
                        .to_owned(),
                );
            }
        }
        hints
    }
}

/// Whether a rule's ports are those of a connection.
enum Ports {
    /// All that was asked for.
    All,
    /// Some of it: the rule has ports, and none was named.
    Some,
    /// Others.
    None,
}

fn ports_match(rule: &Rule, transport: Option<Transport>) -> Ports {
    if rule.ports.is_empty() {
        return Ports::All;
    }
    let Some(wanted) = transport else {
        return Ports::Some;
    };
    let is_it = |transport: &Transport| {
        transport.protocol == wanted.protocol
            && (transport.port.is_none() || transport.port == wanted.port)
    };
    match rule.ports.iter().any(is_it) {
        true => Ports::All,
        false => Ports::None,
    }
}

/// Whether a rule's name covers a name.
fn covers(rule: &DnsName, pattern: NamePattern, name: &DomainName) -> bool {
    let mut suffixes = name.suffixes().enumerate();
    suffixes.any(|(extra, suffix)| suffix == rule.name().wire() && pattern.covers(extra))
}

/// Why a rule matches.
fn matched_text(rule: &Rule, to: &Destined<'_>) -> String {
    match (&rule.destination, to.address) {
        (Destination::Cidr(network), Some(address)) => format!("{address} is in {network}"),
        (Destination::Cidr(network), None) => format!("every address is in {network}"),
        (Destination::Name(name), Some(address)) if to.names.is_empty() => {
            format!(
                "ovn-kubernetes has resolved {} to {address}",
                name.written()
            )
        }
        (_, Some(address)) => {
            let names: Vec<String> = to.names.iter().map(ToString::to_string).collect();
            format!("the pod was told {address} for {}", names.join(", "))
        }
        (_, None) => "its name covers this one".to_owned(),
    }
}
