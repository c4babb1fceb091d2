//! Which rules of an EgressFirewall nobody has used lately, and what keeps pods working
//! (`dnsflow unused`).
//!
//! A use counts for the rule that decides, not for all rules that cover a name of the address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use dnsflow_core::{
    ask::{
        history::ConnectionView,
        trial::{Facts, Trial},
        view::{self, EntryView, Verdict},
    },
    values::{
        firewall::{Destination, Firewall, Rule, RuleAction},
        limits::HISTORY_TIME,
        name::{DnsName, DomainName},
    },
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    client::{self, AskError},
    history::{Known, PresentFirewall},
    trial,
};

/// What is known of the rules of a namespace.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct FirewallUse {
    /// The namespace.
    pub namespace: String,
    /// The seconds that are known of.
    pub known_s: u64,
    /// What limits this time: `agent_start`, `firewall_change` or `an_hour`.
    pub known_since: Since,
    /// The rules, in their order.
    pub rules: Vec<RuleUse>,
    /// The connections that ovn-kubernetes alone would have denied; none where this could not be asked.
    pub only_by_answer: Option<Vec<OnlyByAnswer>>,
}

/// What limits the time that is known of.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Since {
    /// The agent has started then.
    AgentStart,
    /// The rules of the EgressFirewall came then.
    FirewallChange,
    /// Nothing older is remembered.
    AnHour,
}

/// What is known of a rule.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RuleUse {
    /// Its index in `spec.egress`.
    pub rule: u32,
    /// The rule, as the resource writes it.
    pub text: String,
    /// Whether anything has used it.
    pub used: Used,
    /// The places (pod, address, protocol, port) over which it decided.
    pub places: usize,
    /// The seconds since the last use, where there was one.
    pub last_s: Option<u64>,
    /// The names that it has matched, with the seconds since a connection to each, where there was one.
    pub names: Vec<NameUse>,
    /// The names that would replace the rule's wildcard; none where it has none.
    pub narrower: Vec<String>,
}

/// Whether anything has used a rule.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Used {
    /// It has decided over a connection.
    Connected,
    /// Pods were told addresses for it, and did not connect.
    Told,
    /// By nothing that is known.
    Never,
    /// By nothing that is known. It denies everything: without it, what no other rule denies would pass.
    Closes,
    /// The agent cannot know: the rule selects nodes, cannot be used, or shares the packets to an address with another
    /// rule.
    NotKnown,
}

/// A name that a rule has matched.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct NameUse {
    /// The name.
    pub name: String,
    /// The seconds since the last connection; none where pods were only told.
    pub last_s: Option<u64>,
}

/// A connection that the pod's own DNS answer has allowed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct OnlyByAnswer {
    /// The pod.
    pub pod: String,
    /// The destination, as `dnsflow explain` takes it.
    pub target: String,
    /// The names that the pod was told the address for.
    pub names: Vec<String>,
    /// The rule that allows it.
    pub rule: u32,
    /// The seconds since the last attempt.
    pub last_s: u64,
}

/// The names of a firewall's rules, by the rule's index.
pub(crate) fn names_of(firewall: &Firewall) -> Vec<(u32, DnsName)> {
    let rules = (0..).zip(firewall.rules.iter());
    let names = rules.filter_map(|(index, rule)| match &rule.destination {
        Destination::Name(name) => Some((index, name.clone())),
        Destination::Cidr(_) | Destination::Nodes | Destination::Invalid(_) => None,
    });
    names.collect()
}

/// What is known of one rule, while it is gathered.
#[derive(Default)]
struct Gathered {
    places: usize,
    last_s: Option<u64>,
    /// Whether packets may have been for this rule or for another one.
    may_be_used: bool,
    names: BTreeMap<String, Option<u64>>,
}

impl Gathered {
    fn use_at(&mut self, ago_s: u64) {
        self.last_s = self.last_s.into_iter().chain([ago_s]).min();
    }

    fn name(&mut self, name: &str, ago_s: Option<u64>) {
        let last = self.names.entry(name.to_owned()).or_default();
        *last = last.iter().copied().chain(ago_s).min();
    }
}

/// The EgressFirewall of a namespace, and what its rules were used for.
pub(crate) struct Evidence {
    /// The EgressFirewall.
    pub(crate) firewall: Firewall,
    /// Whether its names stand for their sub-domains where it does not say.
    pub(crate) subdomains: bool,
    /// The seconds since its rules came.
    pub(crate) came_s: u64,
    /// The connections of the pods.
    pub(crate) known: Known,
    /// What the pods were told.
    pub(crate) entries: Vec<EntryView>,
}

impl Evidence {
    /// Asks the agent; `None` where the namespace has no EgressFirewall.
    pub(crate) async fn ask(socket: &Path, namespace: &str) -> Result<Option<Self>, AskError> {
        let parameters = [("namespace", namespace.to_owned())];
        let present: PresentFirewall = client::get(socket, "/v1/firewall", &parameters).await?;
        let Some(firewall) = present.firewall() else {
            return Ok(None);
        };
        let mut entries = Vec::new();
        let take = |entry| {
            entries.push(entry);
            Ok(())
        };
        client::lines(socket, "/v1/cache", &parameters, take).await?;
        Ok(Some(Self {
            firewall,
            subdomains: present.subdomains,
            came_s: present.came_s,
            known: Known::ask(socket, Some(namespace)).await?,
            entries,
        }))
    }
}

impl FirewallUse {
    /// What connections and cache entries say of the rules. `resolved`: the addresses that ovn-kubernetes has for the
    /// name of each rule, where it could be asked.
    pub(crate) fn new(
        namespace: &str,
        evidence: &Evidence,
        resolved: Option<&BTreeMap<u32, BTreeSet<IpAddr>>>,
    ) -> Self {
        let Evidence {
            firewall,
            subdomains,
            came_s,
            known,
            entries,
        } = evidence;
        let known_s = known.time.as_secs().min(*came_s);
        let trial = Trial::new(firewall, *subdomains);
        let mut gathered: BTreeMap<u32, Gathered> = BTreeMap::new();
        let mut only_by_answer = Vec::new();
        // What came before the last edit was under other rules: it is no use of these.
        let connections = known.connections.iter();
        for connection in connections.filter(|connection| connection.last_s <= known_s) {
            let names = trial::names_of(connection);
            let facts = trial::facts(connection, &names);
            let Some(rule) = trial.decide(&facts).rule else {
                continue;
            };
            if resolved.is_some_and(|resolved| would_be_denied(&trial, rule, &facts, resolved)) {
                only_by_answer.push(OnlyByAnswer::new(connection, rule));
            }
            let of_rule = gathered.entry(rule).or_default();
            of_rule.places += 1;
            of_rule.use_at(connection.last_s);
            for name in &names {
                if trial.matching(name).any(|matching| matching == rule) {
                    of_rule.name(&name.to_string(), Some(connection.last_s));
                }
            }
        }
        for entry in entries {
            let mut decided = None;
            if let Some(used_s) = entry.used_s.filter(|used_s| *used_s <= known_s) {
                let rules = may_decide(&trial, entry);
                for rule in &rules {
                    gathered.entry(*rule).or_default().may_be_used = true;
                }
                if let [rule] = rules[..] {
                    gathered.entry(rule).or_default().use_at(used_s);
                    decided = Some((rule, used_s));
                }
            }
            for name in &entry.names {
                for rule in &name.rules {
                    let used = decided.filter(|(decided, _)| decided == rule);
                    let of_rule = gathered.entry(*rule).or_default();
                    of_rule.name(&name.name, used.map(|(_, used_s)| used_s));
                }
            }
        }
        let known_since = match *came_s < known.time.as_secs() {
            true => Since::FirewallChange,
            false if known.time >= HISTORY_TIME => Since::AnHour,
            false => Since::AgentStart,
        };
        let rules = (0..).zip(firewall.rules.iter()).map(|(index, rule)| {
            let Gathered {
                places,
                last_s,
                may_be_used,
                names,
            } = gathered.remove(&index).unwrap_or_default();
            let is_wildcard = match &rule.destination {
                Destination::Name(name) => name.is_wildcard(),
                Destination::Cidr(_) | Destination::Nodes | Destination::Invalid(_) => false,
            };
            RuleUse {
                rule: index,
                text: view::rule_text(rule),
                used: match (&rule.destination, last_s) {
                    (Destination::Nodes | Destination::Invalid(_), _) => Used::NotKnown,
                    (_, Some(_)) => Used::Connected,
                    (_, None) if may_be_used => Used::NotKnown,
                    (_, None) if !names.is_empty() => Used::Told,
                    (Destination::Cidr(network), None) if closes(rule, network) => Used::Closes,
                    (_, None) => Used::Never,
                },
                places,
                last_s,
                narrower: match is_wildcard {
                    true => names.keys().cloned().collect(),
                    false => Vec::new(),
                },
                names: names
                    .into_iter()
                    .map(|(name, last_s)| NameUse { name, last_s })
                    .collect(),
            }
        });
        Self {
            namespace: namespace.to_owned(),
            known_s,
            known_since,
            rules: rules.collect(),
            only_by_answer: resolved.map(|_| only_by_answer),
        }
    }

    /// The rules that nothing has used.
    pub fn unused(&self) -> impl Iterator<Item = &RuleUse> {
        self.rules.iter().filter(|rule| rule.used == Used::Never)
    }
}

/// The rules that may have decided over packets to the address of an entry, whatever their port.
fn may_decide(trial: &Trial, entry: &EntryView) -> Vec<u32> {
    let names = entry.names.iter();
    let names = names.filter_map(|name| DomainName::from_presentation(&name.name).ok());
    let told: BTreeSet<u32> = names
        .flat_map(|name| trial.matching(&name).collect::<Vec<u32>>())
        .collect();
    // Each packet to the address is seen, also one over which a rule by network decides.
    let mut rules = Vec::new();
    for (index, rule) in (0..).zip(trial.rules()) {
        let matches = match &rule.destination {
            Destination::Name(_) => told.contains(&index),
            Destination::Cidr(network) => network.contains(&entry.address),
            Destination::Nodes | Destination::Invalid(_) => false,
        };
        if matches {
            rules.push(index);
            if rule.ports.is_empty() {
                break;
            }
        }
    }
    rules
}

/// Whether a rule denies everything.
fn closes(rule: &Rule, network: &IpNet) -> bool {
    rule.action == RuleAction::Deny && rule.ports.is_empty() && network.prefix_len() == 0
}

/// Whether a rule by name allows a connection which the same rules would deny with the addresses alone that
/// ovn-kubernetes has resolved.
fn would_be_denied(
    trial: &Trial,
    rule: u32,
    facts: &Facts<'_>,
    resolved: &BTreeMap<u32, BTreeSet<IpAddr>>,
) -> bool {
    let rule = usize::try_from(rule).ok();
    let rule = rule.and_then(|rule| trial.rules().get(rule));
    let allows_by_name = rule.is_some_and(|rule| {
        rule.action == RuleAction::Allow && matches!(rule.destination, Destination::Name(_))
    });
    let is_resolved = |rule| {
        let addresses = resolved.get(&rule);
        addresses.is_some_and(|addresses| addresses.contains(&facts.address))
    };
    // ovn-kubernetes opens whatever address it is given.
    let facts = Facts {
        is_refused: false,
        ..*facts
    };
    allows_by_name && trial.decide_by(&facts, is_resolved).verdict == Verdict::Blocked
}

impl OnlyByAnswer {
    fn new(connection: &ConnectionView, rule: u32) -> Self {
        Self {
            pod: connection.pod.clone(),
            target: view::target_text_of(connection.address, connection.protocol, connection.port),
            names: connection.names.clone(),
            rule,
            last_s: connection.last_s,
        }
    }
}

#[cfg(test)]
mod tests;
