//! Why a pod may reach an address, or may not: the EgressFirewall's rules in their order, with the answers to the
//! pod.

use std::{
    borrow::Cow,
    cell::{OnceCell, RefCell},
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use dnsflow_common::question::question_hash;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{
    EntryView, PortView, View, action_text,
    attempt::is_on_link,
    destination_text,
    enforced::{AddressFlows, Extent, RuleFlows},
    pod_of,
    services::Frontend,
    target::Target,
    told_names::ToldNames,
    transport_text,
};
use crate::{
    Timestamp,
    ask::{
        attempts::{AskedServer, FailedAnswer, HeardAt},
        judge::{Bearing, Doubt, Unless, decide},
    },
    cache::End,
    dns::{Failure, FailureKind, Question, QuestionType, tcp::ServerEnd},
    io::report::Severity,
    ovn::hash::{Family, address_set_hashes},
    pods::ports::Port,
    policy::rules::{ActiveRule, NamePattern, Problem, RuleSet, is_dry_run},
    values::{
        connection::PendingQuery,
        firewall::{Destination, Firewall, Rule, RuleAction},
        flow::{Protocol, Transport},
        ids::PortId,
        limits::{Limit, NAMES_PER_ADDRESS_MAX, UNTRUSTED_ASKED_MAX},
        name::{DnsName, DomainName},
        resolver::Resolver,
        verdict::{Reason, Verdict},
    },
};

/// What follows from an answer that has no room in a datagram.
const TRUNCATED: &str = "truncated: the pod has to ask over TCP, and has no answer over TCP";

/// At most this many DNS servers are named in a hint.
const DNS_SERVERS_MAX: usize = 4;

/// How a rule bears on a connection.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepOutcome {
    /// It does not match.
    NoMatch,
    /// It matches and decides.
    Decides,
    /// It decides once the pod has asked for a name.
    OnceAsked,
    /// It would match, but is not in force for this address.
    NotInForce,
    /// It matches for some ports only.
    SomePorts,
    /// It matches for some addresses only.
    SomeAddresses,
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
    /// Of an address, the names that no rule mentioned when they led pods to it; of a name, the addresses, also of this
    /// name with a search domain. The newest first.
    pub heard: Vec<HeardAt>,
    /// Of a name, the errors that answered questions for it.
    pub failed: Vec<FailedAnswer>,
    /// The DNS servers that the pod has asked and that were not trusted, the newest first.
    pub servers: Vec<AskedServer>,
    /// The queries of the pod that no answer has followed.
    pub pending: Vec<PendingQuery>,
    /// By address, OVN's address sets that have it: the numbers in their names. `None` if OVN was not asked.
    pub sets: Option<BTreeMap<IpAddr, BTreeSet<u64>>>,
    /// The frontends of the Services at these addresses. `None` if OVN was not asked, or did not answer.
    pub frontends: Option<Vec<Frontend>>,
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
    /// The verdict over all addresses.
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
    /// Where the address is not known, whether it is one of IPv6.
    pub(super) is_ipv6: bool,
    /// The names by which the pod may connect, the newest first. The answers to the pod decide whether a rule matches.
    pub(super) names: &'a [&'a DomainName],
    /// Whether the pod would ask for the name first: there is one.
    pub(super) is_by_name: bool,
    pub(super) transport: Option<Transport>,
    pub(super) sets: Sets<'a>,
    /// The newest query for the name, if the pod has no address by it.
    pub(super) fruitless: Option<&'a Fruitless>,
    /// Whether the address is that of a Service without the port: no load balancer takes the connection.
    pub(super) is_not_taken: bool,
    /// Whether a load balancer leads there: the pod asks for no name that leads to the address.
    pub(super) is_behind_service: bool,
}

impl<'a> Asked<'a> {
    /// The name by which the pod most likely connects.
    fn name(&self) -> Option<&'a DomainName> {
        self.names.first().copied()
    }
}

/// A query for a name that no answer has followed, or an error, or an answer without an address.
#[derive(Debug)]
pub(super) struct Fruitless {
    at: Timestamp,
    reason: Reason,
    text: String,
    /// Whether the name is there, without an address of this IP version: most names have none of IPv6.
    is_no_data: bool,
}

/// OVN's address sets that have an address.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Sets<'a> {
    /// OVN was not asked. It has resolved no name to an address that the pod got for another name.
    #[default]
    Unlikely,
    /// OVN was not asked, or did not answer.
    Unknown,
    /// The numbers in their names.
    Known(&'a BTreeSet<u64>),
}

/// A destination of a port, with the facts by which rules match it.
struct Destined<'a> {
    view: &'a View<'a>,
    id: PortId,
    port: &'a Port,
    asked: Asked<'a>,
    /// The rules that OVN enforces at the port.
    sets: Vec<&'a RuleSet>,
    /// Of names that were looked at: these rules, by their index. Thousands of rules may have one name.
    enforced: RefCell<BTreeMap<DomainName, BTreeMap<u32, Enforcing<'a>>>>,
    /// Its flows, if the pod was told the address.
    flows: Option<AddressFlows<'a>>,
    /// The names that lead to it.
    names: ToldNames<'a>,
    /// The one of them that does not count yet.
    unknown: Option<&'a DomainName>,
    /// The rules that its flows may be of. Of an address without a name, thousands of others are not looked at.
    /// Why the pod does not know the address. Few questions need it.
    untold: OnceCell<Untold>,
    /// Why no answer opens the address, if none does.
    refusal: OnceCell<Option<String>>,
}

/// Why a pod does not know an address.
#[derive(Debug)]
struct Untold {
    reason: Reason,
    text: String,
    /// The limit that has left no room, if that is the reason.
    limit: Option<Limit>,
}

impl Untold {
    fn new(reason: Reason, text: impl Into<String>) -> Self {
        Self {
            reason,
            text: text.into(),
            limit: None,
        }
    }

    /// Whether the pod knows it once it has asked.
    fn ends_by_asking(&self) -> bool {
        matches!(
            self.reason,
            Reason::NotResolved
                | Reason::NotAnswered
                | Reason::AnsweredWithError
                | Reason::Expired
                | Reason::ToldToOtherPod
        )
    }
}

impl<'a> Destined<'a> {
    /// The rules that OVN enforces as this one of the EgressFirewall: none, or mostly one.
    fn enforced_as(&self, (index, rule): (u32, &Rule), name: &DnsName) -> Enforcing<'a> {
        #[cfg(test)]
        super::told_names::WORK.set(super::told_names::WORK.get() + 1);
        let mut by_name = self.enforced.borrow_mut();
        let of_name = by_name.entry(name.name().clone()).or_insert_with(|| {
            let mut by_index: BTreeMap<u32, Enforcing<'a>> = BTreeMap::new();
            for active in self.sets.iter().flat_map(|set| set.named(name.name())) {
                by_index.entry(active.index).or_default().push(active);
            }
            by_index
        });
        let at_index = of_name.get(&index).into_iter().flatten();
        at_index
            .filter(|active| active.is_enforced_as(rule, name))
            .copied()
            .collect()
    }

    /// The limit for which rules have not all of their flows, if some have not.
    fn limit(&self) -> Option<Limit> {
        self.flows.as_ref().and_then(AddressFlows::limit)
    }

    /// A name that leads to it and that a rule by name covers.
    fn told(&self, rule: &DnsName, pattern: NamePattern) -> Option<&'a DomainName> {
        self.names.covered_by(rule, pattern)
    }

    /// Why the pod does not know the address.
    fn untold(&self) -> &Untold {
        let why = || self.view.why_untold(self.id, self.port, self.asked);
        self.untold.get_or_init(why)
    }

    /// Why no answer opens the address, if none does.
    fn refusal(&self) -> Option<&str> {
        let refusal = self.refusal.get_or_init(|| {
            let address = self.asked.address?;
            self.view.refusal(address, &self.port.row)
        });
        refusal.as_deref()
    }

    /// Whether nobody knows a name that leads to it, and there may be one.
    fn is_nameless(&self) -> bool {
        self.names.is_empty() && self.asked.names.is_empty() && !self.asked.is_behind_service
    }

    /// Whether ovn-kubernetes has resolved the name of a rule to it; `None` where that is not known.
    fn is_in_set_of(&self, rule: &DnsName) -> Option<bool> {
        let address = self.asked.address?;
        let family = Family::of(address);
        match self.asked.sets {
            Sets::Unknown => None,
            Sets::Unlikely if self.is_nameless() => None,
            Sets::Unlikely => Some(false),
            Sets::Known(sets) => {
                let hashes = address_set_hashes(rule, family);
                Some(hashes.iter().any(|hash| sets.contains(hash)))
            }
        }
    }
}

/// The rules that OVN enforces as one of the EgressFirewall.
type Enforcing<'a> = SmallVec<[&'a ActiveRule; 1]>;

/// Why, in words. Of thousands of rules that may match, it is not written anew for each.
type Why = Cow<'static, str>;

/// Why a rule matches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum By {
    /// A network, or all there is.
    Network,
    /// A name that leads to the address.
    Name,
    /// OVN's address set of the rule's name.
    AddressSet,
}

/// A rule that matches an address, whatever the port.
enum Match {
    /// It does, or may.
    Yes {
        by: By,
        once_asked: bool,
        doubt: Option<Doubt>,
        why: Why,
    },
    /// It would, but is not in force.
    NotInForce {
        /// It may match all the same.
        doubt: Option<Doubt>,
        reason: Reason,
        why: String,
    },
}

impl Match {
    fn certain(by: By, why: String) -> Self {
        Self::Yes {
            by,
            once_asked: false,
            doubt: None,
            why: why.into(),
        }
    }

    fn doubtful(by: By, doubt: Doubt, why: impl Into<Why>) -> Self {
        Self::Yes {
            by,
            once_asked: false,
            doubt: Some(doubt),
            why: why.into(),
        }
    }

    fn once_asked(why: &'static str) -> Self {
        Self::Yes {
            by: By::Name,
            once_asked: true,
            doubt: None,
            why: why.into(),
        }
    }
}

/// How a rule that says something bears on a connection.
struct Step {
    rule: u32,
    outcome: StepOutcome,
    why: Why,
}

/// The result of the walk through the rules.
#[derive(Default)]
struct Walk<'a> {
    steps: Vec<Step>,
    bearings: Vec<Bearing>,
    /// The rules of the bearings, and why each matches.
    by: Vec<(u32, By)>,
    /// Whether one of them decides.
    is_decided: bool,
    /// The first rule by name that would allow it, and the reason why it does not.
    would: Option<(u32, Reason, String)>,
    /// Whether some rule by name before the decision allows anything.
    allows_names: bool,
    /// The rules of OVN whose flows were looked at.
    enforcing: Enforcing<'a>,
}

/// The decision over one address, or over a name without one.
pub(super) struct Decision<'a> {
    pub(super) ruling: Ruling,
    /// The EgressFirewall whose rules decide; none where no rule is asked.
    pub(super) firewall: Option<&'a Firewall>,
    /// The change that would open it.
    pub(super) remedy: Option<String>,
    steps: Vec<Step>,
}

impl Decision<'_> {
    /// One for which no rule was asked.
    pub(super) fn without_rules(ruling: Ruling) -> Self {
        Self {
            ruling,
            firewall: None,
            remedy: None,
            steps: Vec::new(),
        }
    }
}

/// A verdict with its reason.
pub(super) struct Ruling {
    pub(super) verdict: Verdict,
    pub(super) reason: Reason,
    pub(super) rule: Option<u32>,
    pub(super) text: String,
    /// If it is not certain, the heaviest doubt.
    pub(super) doubt: Option<Doubt>,
}

impl Ruling {
    pub(super) fn without_rule(verdict: Verdict, reason: Reason, text: String) -> Self {
        Self {
            verdict,
            reason,
            rule: None,
            text,
            doubt: None,
        }
    }
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
        let none = BTreeSet::new();
        let sets = |address| match &beside.sets {
            None => Sets::Unknown,
            Some(sets) => Sets::Known(sets.get(&address).unwrap_or(&none)),
        };
        let led_here: Vec<&HeardAt> = beside
            .heard
            .iter()
            .filter(|one| self.ports.at_veth(one.ifindex) == Some(id))
            .collect();
        let (name, transport) = match target {
            Target::Address(_, transport) => (None, *transport),
            Target::Name(name, transport) => (Some(name), *transport),
        };
        let fruitless = [false, true].map(|is_ipv6| {
            let asked = (name?, is_ipv6);
            let unanswered = self.unanswered((id, port), asked, beside, now);
            let failed = self.failed(id, asked, beside, now);
            let newest = unanswered
                .into_iter()
                .chain(failed)
                .max_by_key(|one| one.at)?;
            let told_at = self.told_at(id, asked, now);
            told_at
                .is_none_or(|told_at| told_at <= newest.at)
                .then_some(newest)
        });
        let addresses_of = |name: &DomainName| {
            let heard = led_here.iter().filter(|one| one.heard.name == *name);
            self.addresses_of(id, name, heard.map(|one| one.address))
        };
        let mut known = name.map(addresses_of).unwrap_or_default();
        // The search domains come first: if one has an answer, the pod does not ask for the name itself.
        let longer = match name.filter(|_| known.is_empty()) {
            Some(name) => self.told_with_more_labels(id, name, &led_here, now),
            None => BTreeMap::new(),
        };
        let searched = name.and_then(|name| {
            let mut told = longer
                .iter()
                .map(|(told, at)| (*told, *at))
                .collect::<Vec<_>>();
            told.retain(|(told, _)| is_with_search_domain(told, name));
            let (told, at) = told.into_iter().max_by_key(|(_, at)| *at)?;
            let mut fruitless = fruitless.iter().flatten();
            fruitless.all(|one| one.at <= at).then_some(told)
        });
        if let Some(told) = searched {
            known = addresses_of(told);
        }
        // Of an address that is not known, each IP version of the pod.
        let unknown = [false, true].map(|is_ipv6| {
            let mut own = port.row.addresses.iter();
            own.any(|own| own.is_ipv6() == is_ipv6)
                .then_some((None, is_ipv6))
        });
        let addresses: Vec<(Option<IpAddr>, bool)> = match target {
            Target::Address(address, _) => vec![(Some(*address), address.is_ipv6())],
            Target::Name(..) if known.is_empty() => unknown.into_iter().flatten().collect(),
            Target::Name(..) => known
                .into_iter()
                .map(|address| (Some(address), address.is_ipv6()))
                .collect(),
        };
        let trusted = self.answers.trusted();
        let is_trusted = |server| trusted.is_some_and(|trusted| trusted.contains(server));
        let mut servers = beside.servers.iter();
        let untrusted = servers.find(|asked| {
            self.ports.at_veth(asked.ifindex) == Some(id)
                && !is_trusted(&asked.server)
                && now.since(asked.at) <= UNTRUSTED_ASKED_MAX
        });
        let each = addresses.into_iter().map(|(address, is_ipv6)| {
            let heard: Vec<&HeardAt> = led_here
                .iter()
                .copied()
                .filter(|one| Some(one.address) == address)
                .filter(|one| self.is_unmentioned(port, &one.heard.name))
                .collect();
            let names = match (searched.or(name), address) {
                (Some(name), _) => vec![name],
                (None, None) => Vec::new(),
                (None, Some(address)) => {
                    let heard = heard.iter().map(|one| &one.heard);
                    self.newest(id, address, heard, now).names().collect()
                }
            };
            let asked = Asked {
                address,
                is_ipv6,
                names: &names,
                is_by_name: name.is_some(),
                transport,
                sets: address.map_or(Sets::Unknown, sets),
                fruitless: fruitless[usize::from(is_ipv6)].as_ref(),
                is_not_taken: false,
                is_behind_service: false,
            };
            let heard = heard.iter().map(|one| HeardName {
                name: one.heard.name.to_string(),
                told_s: now.since(one.heard.at).as_secs(),
                resolver: one.heard.resolver.to_string(),
            });
            ExplainedAddress {
                heard: heard.collect(),
                ..self.address(id, port, asked, (beside, now))
            }
        });
        let mut addresses: Vec<ExplainedAddress> = each.collect();
        addresses.dedup_by(|one, other| {
            let ruling = |one: &ExplainedAddress| (one.address, one.verdict, one.reason, one.rule);
            ruling(one) == ruling(other)
        });
        if let [v4, v6] = &mut addresses[..]
            && (v4.address, v6.address) == (None, None)
        {
            v4.text.insert_str(0, "over IPv4, ");
            v6.text.insert_str(0, "over IPv6, ");
        }
        if let Some(told) = searched {
            for one in &mut addresses {
                one.text = format!("the pod was told {told} for it: {}", one.text);
            }
        }
        // The pod uses the addresses of its own IP versions.
        let used = addresses
            .iter()
            .filter(|one| one.reason != Reason::NoAddressOfFamily);
        let verdict = Verdict::of_all(used.map(|one| one.verdict)).unwrap_or(Verdict::Blocked);
        let mut hints = Vec::new();
        if verdict != Verdict::Allowed {
            hints = self.hints(port, name, &addresses);
            let is_untold = |one: &ExplainedAddress| is_untold(one.reason);
            if let Some(asked) = untrusted.filter(|_| addresses.iter().any(is_untold)) {
                hints.push(self.untrusted((id, port), asked, now));
            }
            if searched.is_none() && !longer.is_empty() {
                hints.push(told_for_short_name(name, &longer));
            }
            if let Some((told, name)) = searched.zip(name)
                && !is_of_cluster(told)
            {
                hints.push(format!(
                    "the pod asks for {name} with a search domain first: written as `{name}.`, it asks for the name itself"
                ));
            }
            if addresses.iter().all(|one| !is_fruitless(one.reason)) && searched.is_none() {
                let fruitless = fruitless.into_iter().flatten();
                let fruitless = fruitless.filter(|one| !one.is_no_data);
                hints.extend(fruitless.map(|one| one.text));
                hints.dedup();
            }
        }
        Some(Explanation {
            port: self.port(id, port),
            verdict,
            addresses,
            hints,
        })
    }

    /// The addresses of a name, as far as they are known here: open ones, refused ones, those that have ended or for which
    /// a limit left no room, and `heard` ones.
    fn addresses_of(
        &self,
        id: PortId,
        name: &DomainName,
        heard: impl Iterator<Item = IpAddr>,
    ) -> BTreeSet<IpAddr> {
        if name.to_string() == "localhost" {
            return [Ipv4Addr::LOCALHOST.into()].into();
        }
        let refused = self.refused.reported(id);
        let refused = refused.filter(|(of, _)| of == name);
        let port = self.cache.port(id);
        let ended = port.ended.iter();
        let ended = ended.filter(|ended| ended.name == *name);
        let told = port.entries.of_name(name).iter().copied();
        told.chain(heard)
            .chain(refused.map(|(_, address)| *address))
            .chain(ended.map(|ended| ended.address))
            .collect()
    }

    /// The names that led the pod to an address and that begin with this one, with the time of the newest answer.
    fn told_with_more_labels<'b>(
        &'b self,
        id: PortId,
        name: &DomainName,
        led_here: &[&'b HeardAt],
        now: Timestamp,
    ) -> BTreeMap<&'b DomainName, Timestamp> {
        let has_more = |told: &DomainName| {
            told.wire().len() > name.wire().len() && told.wire().starts_with(name.wire())
        };
        let entries = self.cache.port(id).entries.iter();
        let cached = entries.flat_map(|(_, entry)| entry.names.iter());
        let cached = cached.map(|(told, term)| {
            let ago = self.cache.told_since(term, now);
            (told, now.checked_sub(ago).unwrap_or_default())
        });
        let heard = led_here.iter().map(|one| (&one.heard.name, one.heard.at));
        let mut longer = BTreeMap::new();
        for (told, at) in cached.chain(heard).filter(|(told, _)| has_more(told)) {
            let newest = longer.entry(told).or_insert(at);
            *newest = at.max(*newest);
        }
        longer
    }

    /// The newest query of a pod for the addresses of a name that no answer has followed. A pod asks for the name with
    /// its search domains first (`ndots:5` in the resolv.conf of pods), and for nothing else without an answer.
    fn unanswered(
        &self,
        (id, port): (PortId, &Port),
        (name, is_ipv6): (&DomainName, bool),
        beside: &Beside,
        now: Timestamp,
    ) -> Option<Fruitless> {
        let own = || {
            let pending = beside.pending.iter();
            pending.filter(|query| self.ports.at_veth(query.ifindex) == Some(id))
        };
        own().next()?;
        let namespace = pod_of(&port.row).0;
        let searched = ["", "svc."].map(|of| format!("{of}cluster.local"));
        let searched = searched
            .into_iter()
            .chain([format!("{namespace}.svc.cluster.local")]);
        let searched = searched
            .filter_map(|domain| DomainName::from_presentation(&format!("{name}.{domain}")).ok());
        let asked = searched.chain([name.clone()]).filter_map(|asked| {
            let hash = question_hash(asked.wire(), address_type(is_ipv6).code());
            let found = own().filter(|query| query.question == hash);
            Some((*found.max_by_key(|query| query.at)?, asked))
        });
        let (query, asked) = asked.max_by_key(|(query, _)| query.at)?;
        let for_it = match asked == *name {
            true => "for it".to_owned(),
            false => format!("for {asked}"),
        };
        Some(Fruitless {
            at: query.at,
            reason: Reason::NotAnswered,
            text: format!(
                "the pod asked {} {for_it} {}s ago, and has no answer",
                query.resolver,
                now.since(query.at).as_secs()
            ),
            is_no_data: false,
        })
    }

    /// When the pod was last told an address for a name.
    fn told_at(
        &self,
        id: PortId,
        (name, is_ipv6): (&DomainName, bool),
        now: Timestamp,
    ) -> Option<Timestamp> {
        let entries = &self.cache.port(id).entries;
        let told = entries.of_name(name).iter();
        let told = told.filter(|address| address.is_ipv6() == is_ipv6);
        let terms = told.filter_map(|address| self.cache.entry(id, *address)?.names.term(name));
        let told = terms.map(|term| now.checked_sub(self.cache.told_since(&term, now)));
        told.flatten().max()
    }

    /// The newest error that a pod was told for a name, or the end of a connection by which it has asked.
    fn failed(
        &self,
        id: PortId,
        (name, is_ipv6): (&DomainName, bool),
        beside: &Beside,
        now: Timestamp,
    ) -> Option<Fruitless> {
        let kind = address_type(is_ipv6);
        let is_it = |failure: &Failure| {
            let Question { name: of, kind: by } = &failure.question;
            of == name && (*by == kind || failure.is_for_all_types())
        };
        let failed = beside.failed.iter();
        let failed = failed.filter(|one| self.ports.at_veth(one.ifindex) == Some(id));
        let failed = failed.map(|one| (one.at, &one.failure, Some(one.resolver)));
        let read = self.cache.port(id).failed.iter();
        let resolver = |server| self.answers.server(server);
        let read = read.map(|one| (one.at, &one.failure, one.server.and_then(resolver)));
        let all = failed.chain(read).filter(|(_, failure, _)| is_it(failure));
        let failed = all.max_by_key(|(at, ..)| *at);
        let failed = failed.map(|(at, failure, server)| {
            let asked = asked_text(server, now.since(at));
            let (reason, text) = match failure.kind {
                FailureKind::Truncated => {
                    let refused = self.refused_over_tcp(id, at);
                    let text = format!("{asked}, and the answer was {TRUNCATED}{refused}");
                    (Reason::NotAnswered, text)
                }
                FailureKind::Error(_) | FailureKind::NoData { .. } => (
                    Reason::AnsweredWithError,
                    format!("{asked}, and was told {failure}"),
                ),
            };
            Fruitless {
                at,
                reason,
                text,
                is_no_data: failure.is_no_data(),
            }
        });
        let question = question_hash(name.wire(), kind.code());
        let is_it = |end: &ServerEnd| match end {
            ServerEnd::Refused => false,
            ServerEnd::Unanswered(open) => open.contains(&question),
        };
        let mut ends = self.cache.port(id).failed_connections.iter();
        let end = ends.find(|one| is_it(&one.end)).map(|one| {
            let server = one.server.and_then(resolver);
            let asked = asked_text(server, now.since(one.at));
            Fruitless {
                at: one.at,
                reason: Reason::NotAnswered,
                text: format!(
                    "{asked} over TCP, and the server closed the connection without an answer"
                ),
                is_no_data: false,
            }
        });
        failed.into_iter().chain(end).max_by_key(|one| one.at)
    }

    /// That a DNS server has refused the pod's connection, if one has since then.
    fn refused_over_tcp(&self, id: PortId, since: Timestamp) -> String {
        let mut ends = self.cache.port(id).failed_connections.iter();
        let refused = ends.find(|one| one.end == ServerEnd::Refused && one.at >= since);
        let server = refused.and_then(|one| self.answers.server(one.server?));
        let server = server.map(|server| format!(": {server} refused the connection"));
        server.unwrap_or_default()
    }

    /// The decision over one address, or over a name without one, by the answers to the pod and by the switch.
    fn address(
        &self,
        id: PortId,
        port: &Port,
        asked: Asked<'_>,
        (beside, now): (&Beside, Timestamp),
    ) -> ExplainedAddress {
        let address = asked.address;
        let mut decision = self.decide(id, port, asked);
        if decision.ruling.reason == Reason::InCluster {
            let by_backends = self.decide_by_backends((id, port), asked, beside);
            decision = by_backends.unwrap_or(decision);
        }
        let Decision {
            mut ruling,
            firewall,
            remedy,
            steps,
        } = decision;
        let is_by_rules = !steps.is_empty();
        if is_by_rules && self.sources.are_read() && !self.switch.is_compared() {
            ruling.verdict = Verdict::NotKnown;
            ruling.reason = Reason::SwitchAway;
            ruling.text = format!(
                "the switch cannot be asked (`dnsflow status`); by the agent's own account: {}",
                ruling.text
            );
        }
        let steps = steps.into_iter().filter_map(|Step { rule, outcome, why }| {
            let of_rule = rule_at(firewall?, rule)?;
            Some(RuleStep {
                rule,
                action: action_text(of_rule.action).to_owned(),
                destination: destination_text(&of_rule.destination),
                ports: of_rule.ports.iter().copied().map(transport_text).collect(),
                outcome,
                why: why.into_owned(),
            })
        });
        ExplainedAddress {
            address,
            verdict: ruling.verdict,
            reason: ruling.reason,
            rule: ruling.rule,
            text: ruling.text,
            remedy,
            steps: steps.collect(),
            entry: address.and_then(|address| self.entry(id, port, address, now)),
            heard: Vec::new(),
        }
    }

    /// The decision by the rules and by the answers to the pod. The thread that opens addresses asks for each attempt.
    pub(super) fn decide(&self, id: PortId, port: &Port, asked: Asked<'_>) -> Decision<'_> {
        let (address, name) = (asked.address, asked.name());
        let row = &port.row;
        let namespace = self.policy.namespace_of_names(row);
        let firewall = match self.firewall_over(port, asked) {
            Ok(firewall) => firewall,
            Err(ruling) => return Decision::without_rules(ruling),
        };
        // For a new connection, an address whose time is over is none.
        let entry = address.and_then(|address| self.cache.counting_entry(id, address));
        let flows = address.filter(|_| entry.is_some());
        let flows = flows.and_then(|address| self.address_flows(id, address));
        let is_told = |name| entry.is_some_and(|entry| entry.names.until(name).is_some());
        // The answer for it has led here, or will say where it leads.
        let unknown = name.filter(|name| asked.is_by_name && !is_told(name));
        let sets = self.policy.sets(row);
        if let Some(address) = address
            && let Some(limit) = flows.as_ref().and_then(AddressFlows::closed_for)
        {
            let (ruling, steps) = self.closed((id, address), &sets, asked.transport, &limit);
            return Decision {
                ruling,
                firewall: Some(firewall),
                remedy: None,
                steps,
            };
        }
        let mut names: Vec<&DomainName> = Vec::new();
        let names = match (address.zip(entry), &flows) {
            (Some((address, entry)), Some(flows)) if entry.names.len() > NAMES_PER_ADDRESS_MAX => {
                let allowed = entry.names.iter().filter(|(_, term)| !term.is_denied);
                names.extend(allowed.map(|(name, _)| name));
                names.extend(name.filter(|_| asked.is_by_name));
                let entries = &self.cache.port(id).entries;
                let rules = flows.rules(&sets, asked.transport);
                let covered = rules.filter_map(|rule| {
                    let name = entries.covered(address, &rule.name, rule.pattern)?;
                    Some((&rule.name, name))
                });
                ToldNames::with_covered(names, covered)
            }
            _ => {
                names.extend(entry.into_iter().flat_map(|entry| entry.names.keys()));
                names.extend(unknown);
                ToldNames::new(names)
            }
        };
        let destined = Destined {
            view: self,
            id,
            port,
            asked,
            sets,
            enforced: RefCell::default(),
            flows,
            names,
            unknown,
            untold: OnceCell::new(),
            refusal: OnceCell::new(),
        };
        let walk = self.walk(firewall, &destined);
        let mut ruling = outcome(&destined, firewall, &walk);
        if ruling.verdict == Verdict::Blocked
            && let Some(namespace) = namespace
            && self.policy.enforces_former(namespace)
            && let Some(present) = self.policy.present(namespace)
            && let Some((_, waits, why)) = self.walk(present, &destined).would
            && matches!(waits, Reason::AclMissing | Reason::FirewallNotTakenOver)
        {
            (ruling.reason, ruling.text) = (waits, why);
        }
        Decision {
            remedy: remedy(&ruling, &walk, &destined, firewall),
            ruling,
            firewall: Some(firewall),
            steps: walk.steps,
        }
    }

    /// The verdict over an address that this limit closes, whatever else the rules say. The rule that decides is the
    /// first one that denies a name of the address, for this traffic if one does.
    fn closed(
        &self,
        (id, address): (PortId, IpAddr),
        sets: &[&RuleSet],
        asked: Option<Transport>,
        limit: &Limit,
    ) -> (Ruling, Vec<Step>) {
        let entries = &self.cache.port(id).entries;
        let rules = sets.iter().flat_map(|set| set.rules());
        let mut denying: Vec<&ActiveRule> = rules
            .map(|rule| &**rule)
            .filter(|rule| rule.action == RuleAction::Deny)
            .collect();
        denying.sort_by_key(|rule| rule.index);
        let covers = |rule: &&ActiveRule| {
            let name = entries.covered(address, &rule.name, rule.pattern);
            name.is_some()
        };
        let is_for = |rule: &&ActiveRule| {
            let mut transports = rule.transports.iter();
            let is_for = |wanted| transports.any(|transport| transport.is_for(wanted));
            rule.transports.is_empty() || asked.is_none_or(is_for)
        };
        let mut of_traffic = denying.iter().copied().filter(is_for);
        let first = of_traffic.find(&covers);
        let first = first.or_else(|| denying.iter().copied().find(covers));
        let rule = first.map(|rule| rule.index);
        let denies = rule.map(|rule| format!("rule {rule} denies it, and "));
        let denies = denies.unwrap_or_default();
        let ruling = Ruling {
            verdict: Verdict::Blocked,
            reason: Reason::LimitReached,
            rule,
            text: format!("{denies}the address is closed for all ports: {limit}"),
            doubt: None,
        };
        let steps = rule.into_iter().map(|rule| Step {
            rule,
            outcome: StepOutcome::Decides,
            why: limit.to_string().into(),
        });
        (ruling, steps.collect())
    }

    /// The EgressFirewall whose rules decide over a connection, or the verdict where no rule is asked.
    fn firewall_over(&self, port: &Port, asked: Asked<'_>) -> Result<&Firewall, Ruling> {
        let row = &port.row;
        let namespace = self.policy.namespace_of_names(row);
        let is_own = |address: IpAddr| {
            address.is_loopback() || address.is_unspecified() || row.addresses.contains(&address)
        };
        let (verdict, reason, text) = if asked.address.is_some_and(is_own) {
            let text = match asked
                .address
                .is_some_and(|address| address.is_unspecified())
            {
                true => {
                    "the connection stays in the pod; a DNS server that filters names answers so for those that it blocks"
                }
                false => "the connection stays in the pod",
            };
            (Verdict::Allowed, Reason::InPod, text)
        } else if let Some(address) = asked.address
            && let mut own = row.addresses.iter()
            && !own.any(|own| own.is_ipv4() == address.is_ipv4())
        {
            let text = "the pod has no address of this IP version";
            (Verdict::Blocked, Reason::NoAddressOfFamily, text)
        } else if !self.sources.are_read() {
            let text = "the agent has not read everything yet (`dnsflow status`)";
            (Verdict::NotKnown, Reason::AgentStarting, text)
        } else if let Some(firewall) =
            namespace.and_then(|namespace| self.policy.enforced(namespace))
        {
            if let Some(address) = asked.address
                && !asked.is_not_taken
                && self.refused.is_inside(address, row, namespace)
            {
                let text =
                    "the destination is in the cluster, where an EgressFirewall does not hold";
                (Verdict::Allowed, Reason::InCluster, text)
            } else if asked.address.is_some_and(is_on_link) {
                let text = "packets to this address stay on the pod's link";
                (Verdict::NotKnown, Reason::OnLink, text)
            } else if asked.address.is_none() && asked.name().is_some_and(is_of_cluster) {
                let text = "the name is one of the cluster's DNS, and its address is not known here: ask by address";
                (Verdict::NotKnown, Reason::ClusterName, text)
            } else {
                return Ok(firewall);
            }
        } else if namespace.is_some_and(|namespace| self.policy.denies_beyond_rules(namespace)) {
            let text = "the namespace has no EgressFirewall, but OVN has an ACL of one that denies, which ovn-kubernetes has left behind";
            (Verdict::NotKnown, Reason::AclLeftBehind, text)
        } else {
            let text = "the namespace has no EgressFirewall: everything passes";
            (Verdict::Allowed, Reason::NoFirewall, text)
        };
        Err(Ruling::without_rule(verdict, reason, text.to_owned()))
    }

    /// Goes through the rules in their order.
    fn walk<'a>(&self, firewall: &Firewall, to: &Destined<'a>) -> Walk<'a> {
        let mut walk = Walk::default();
        for (index, rule) in (0..).zip(firewall.rules.iter()) {
            let (outcome, why) = self.step(to, firewall, (index, rule), &mut walk);
            // Of many rules that have nothing to do with it, nobody wants to read.
            if outcome != StepOutcome::NoMatch || !why.is_empty() {
                walk.steps.push(Step {
                    rule: index,
                    outcome,
                    why,
                });
            }
        }
        let namespace = self.policy.namespace_of_names(&to.port.row);
        if namespace.is_some_and(|namespace| self.policy.denies_beyond_rules(namespace)) {
            walk.bearings.push(Bearing {
                rule: u32::try_from(firewall.rules.len()).unwrap_or(u32::MAX),
                action: RuleAction::Deny,
                once_asked: false,
                doubt: Some(Doubt::LeftBehind),
            });
        }
        if self.has_other_flows(to, &walk) {
            // They decide, or a rule without a name does.
            let bearings = [RuleAction::Allow, RuleAction::Deny].map(|action| Bearing {
                rule: 0,
                action,
                once_asked: false,
                doubt: Some(Doubt::OtherFlows),
            });
            walk.bearings.splice(..0, bearings);
        }
        walk
    }

    /// Whether the switch may have flows to the address that are not those of the rules.
    fn has_other_flows(&self, to: &Destined<'_>, walk: &Walk<'_>) -> bool {
        let others = to.flows.as_ref();
        let are_others =
            others.is_some_and(|flows| flows.are_others(&walk.enforcing, to.asked.transport));
        let may_wait = |address: IpAddr| {
            let mut own = to.port.row.addresses.iter();
            own.any(|own| self.switch.waiting_between(*own, address) > 0)
        };
        are_others || to.asked.address.is_some_and(may_wait)
    }

    /// How one rule bears on a connection. Notes that in the walk.
    fn step<'a>(
        &self,
        to: &Destined<'a>,
        firewall: &Firewall,
        (index, rule): (u32, &Rule),
        walk: &mut Walk<'a>,
    ) -> (StepOutcome, Why) {
        if let Destination::Invalid(reason) = &rule.destination {
            return (StepOutcome::NotInForce, reason.clone().into());
        }
        let is_by_name = matches!(rule.destination, Destination::Name(_));
        let allows_name = is_by_name && rule.action == RuleAction::Allow;
        walk.allows_names |= allows_name && !walk.is_decided;
        let is_first = |walk: &Walk| allows_name && walk.would.is_none();
        // Thousands of rules may have the name, each with its port. None of their flows is for the traffic.
        if let Destination::Name(name) = &rule.destination
            && (walk.is_decided || !is_first(walk))
            && matches!(ports_match(rule, to.asked.transport), Ports::None)
        {
            let pattern = NamePattern::of(name, firewall, self.policy.subdomains());
            let is_told = to.told(name, pattern).is_some();
            let why = if is_told { "other ports" } else { "" };
            return (StepOutcome::NoMatch, why.into());
        }
        let Some(matches) = self.matches(to, firewall, (index, rule), walk) else {
            return (StepOutcome::NoMatch, "".into());
        };
        // Of an address of another name, an allowed name says nothing, and of an address without a known name.
        let is_meant = match &matches {
            Match::Yes { once_asked, .. } if *once_asked && to.is_nameless() => false,
            Match::Yes { by, doubt, .. } => *by != By::AddressSet || doubt.is_none(),
            Match::NotInForce { .. } => true,
        };
        let ports = ports_match(rule, to.asked.transport);
        if is_meant && !walk.is_decided && !matches!(ports, Ports::All) && is_first(walk) {
            let text = format!("rule {index} allows it for {} only", ports_text(rule));
            walk.would = Some((index, Reason::WrongPort, text));
        }
        if matches!(ports, Ports::None) {
            let is_told = !matches!(&matches, Match::Yes { once_asked, doubt, .. } if *once_asked || doubt.is_some());
            let why = if is_told { "other ports" } else { "" };
            return (StepOutcome::NoMatch, why.into());
        }
        if walk.is_decided && is_meant && is_first(walk) {
            let text = format!("rule {index} would allow it, but an earlier rule decides");
            walk.would = Some((index, Reason::DeniedByEarlierRule, text));
        }
        let (by, once_asked, doubt, why) = match matches {
            Match::Yes {
                by,
                once_asked,
                doubt,
                why,
                ..
            } => (by, once_asked, doubt, why),
            Match::NotInForce { doubt, reason, why } => {
                let but = match reason {
                    Reason::AclMissing | Reason::RuleNotUsable => "is not in force: ",
                    _ => "",
                };
                // A rule for other ports explains less.
                let explains_more = allows_name
                    && !walk.is_decided
                    && matches!(walk.would, Some((_, Reason::WrongPort, _)));
                if is_first(walk) || explains_more {
                    let text = format!("rule {index} would allow it, but {but}{why}");
                    walk.would = Some((index, reason, text));
                }
                let Some(doubt) = doubt else {
                    return (StepOutcome::NotInForce, why.into());
                };
                (By::AddressSet, false, Some(doubt), why.into())
            }
        };
        let of_port = matches!(ports, Ports::Some).then_some(Doubt::Port);
        let doubt = doubt.max(of_port);
        walk.bearings.push(Bearing {
            rule: index,
            action: rule.action,
            once_asked,
            doubt,
        });
        walk.by.push((index, by));
        let was_decided = walk.is_decided;
        walk.is_decided |= doubt.is_none() && (to.asked.is_by_name || !once_asked);
        if was_decided {
            return (StepOutcome::TooLate, "an earlier rule decides".into());
        }
        let outcome = match doubt {
            Some(Doubt::Port) => StepOutcome::SomePorts,
            Some(Doubt::Address | Doubt::OtherName) => StepOutcome::SomeAddresses,
            Some(
                Doubt::Resolved
                | Doubt::Node
                | Doubt::LeftBehind
                | Doubt::Unconfirmed
                | Doubt::Edit
                | Doubt::OtherFlows,
            ) => StepOutcome::Unknown,
            None if once_asked => StepOutcome::OnceAsked,
            None => StepOutcome::Decides,
        };
        (outcome, why)
    }

    /// Whether and how a rule matches, whatever the port.
    fn matches<'a>(
        &self,
        to: &Destined<'a>,
        firewall: &Firewall,
        (index, rule): (u32, &Rule),
        walk: &mut Walk<'a>,
    ) -> Option<Match> {
        let address = to.asked.address;
        let name = match &rule.destination {
            Destination::Invalid(_) => return None,
            Destination::Nodes => return self.matches_nodes(to, (index, rule)),
            Destination::Cidr(network) => {
                let is_possible = match address {
                    Some(address) => network.contains(&address),
                    None => network.addr().is_ipv6() == to.asked.is_ipv6,
                };
                let is_certain = address.is_some() || network.prefix_len() == 0;
                let namespace = self.policy.namespace_of_names(&to.port.row);
                let has_acl = |namespace| self.policy.has_acl_of(namespace, index, rule);
                return is_possible.then(|| {
                    if !namespace.is_some_and(has_acl) {
                        Match::doubtful(By::Network, Doubt::Edit, "OVN has no ACL of the rule yet")
                    } else if is_certain {
                        Match::certain(By::Network, matched_text(rule, None, to))
                    } else {
                        Match::doubtful(By::Network, Doubt::Address, "matches its addresses")
                    }
                });
            }
            Destination::Name(name) => name,
        };
        let pattern = NamePattern::of(name, firewall, self.policy.subdomains());
        let told = to.told(name, pattern);
        let in_set = to.is_in_set_of(name);
        let enforcing = match told.is_some() || in_set == Some(true) {
            true => to.enforced_as((index, rule), name),
            false => Enforcing::new(),
        };
        walk.enforcing.extend(enforcing.iter().copied());
        if in_set == Some(true) {
            // ovn-kubernetes resolves names before OVN enforces their rules.
            let waits = enforcing.is_empty().then(|| self.not_enforced(to, index));
            return Some(match waits {
                Some((Reason::AclMissing | Reason::FirewallNotTakenOver, why)) => {
                    Match::doubtful(By::AddressSet, Doubt::Edit, why)
                }
                Some(_) | None => Match::certain(By::AddressSet, matched_text(rule, None, to)),
            });
        }
        let by_set = in_set.is_none().then_some(Doubt::Resolved);
        let by_flows = told.and_then(|told| self.matches_told(to, (index, rule), told, &enforcing));
        if let Some(matches) = by_flows {
            return Some(matches);
        }
        Some(match (address, told) {
            (None, None) => {
                let doubt = match to.untold().ends_by_asking() {
                    true => Doubt::OtherName,
                    false => Doubt::Resolved,
                };
                Match::doubtful(By::AddressSet, doubt, "matches the addresses of its name")
            }
            (_, Some(_)) if rule.action == RuleAction::Deny || to.untold().ends_by_asking() => {
                Match::once_asked("its name covers this one")
            }
            (_, Some(_)) => Match::NotInForce {
                doubt: by_set,
                reason: to.untold().reason,
                why: to.untold().text.clone(),
            },
            (Some(_), None) => match by_set {
                Some(doubt) => Match::doubtful(
                    By::AddressSet,
                    doubt,
                    "ovn-kubernetes may have resolved its name to the address",
                ),
                None if rule.action == RuleAction::Allow
                    && to.is_nameless()
                    && to.untold().ends_by_asking() =>
                {
                    match is_dry_run(&to.sets) {
                        true => dry_run(None),
                        false => Match::once_asked("the pod has not asked for its name"),
                    }
                }
                None => return None,
            },
        })
    }

    /// Whether and how a rule by node matches: by the addresses in its ACL.
    fn matches_nodes(&self, to: &Destined<'_>, (index, rule): (u32, &Rule)) -> Option<Match> {
        let namespace = self.policy.namespace_of_names(&to.port.row);
        let nodes = namespace.and_then(|namespace| self.policy.nodes_of(namespace, index, rule));
        match (to.asked.address, nodes) {
            (Some(address), Some(nodes)) => nodes.binary_search(&address).is_ok().then(|| {
                let why = format!("{address} is in OVN's ACL of the rule");
                Match::certain(By::Network, why)
            }),
            (Some(address), None) => self.refused.is_node(address).then(|| {
                let why = "matches the addresses of nodes with these labels, which the agent does not know";
                Match::doubtful(By::Network, Doubt::Node, why)
            }),
            (None, nodes) => {
                let is_of_family = |node: &IpAddr| node.is_ipv6() == to.asked.is_ipv6;
                nodes.is_none_or(|nodes| nodes.iter().any(is_of_family)).then(|| {
                    let why = "matches the nodes' addresses";
                    Match::doubtful(By::Network, Doubt::Address, why)
                })
            }
        }
    }

    /// Whether and how a rule by name matches by the flows that the switch has. The rule covers a name of the destination
    /// (`told`). `None` if the flows do not tell: the pod has not asked for the name.
    fn matches_told(
        &self,
        to: &Destined<'_>,
        (index, rule): (u32, &Rule),
        told: &DomainName,
        enforcing: &[&ActiveRule],
    ) -> Option<Match> {
        let not_in_force =
            |doubt: Option<Doubt>, reason, why| Some(Match::NotInForce { doubt, reason, why });
        let may_be_resolved = match to.asked.sets {
            Sets::Known(_) => None,
            // ovn-kubernetes has resolved the same name.
            Sets::Unlikely | Sets::Unknown => Some(Doubt::Resolved),
        };
        if enforcing.is_empty() {
            let (reason, why) = self.not_enforced(to, index);
            let doubt = match reason {
                Reason::AclMissing | Reason::FirewallNotTakenOver => Some(Doubt::Edit),
                _ => may_be_resolved,
            };
            return not_in_force(doubt, reason, why);
        }
        if rule.action == RuleAction::Allow
            && let Some(refused) = to.refusal()
        {
            let why = format!("the address is never opened: {refused}");
            return not_in_force(may_be_resolved, Reason::AddressRefused, why);
        }
        if is_dry_run(&to.sets) {
            return Some(dry_run(may_be_resolved));
        }
        let flows = to.flows.as_ref()?;
        let RuleFlows { extent, are_wanted } = flows.of_rule(enforcing, to.asked.transport);
        let is_known = Some(told) != to.unknown;
        let by = By::Name;
        match extent {
            Extent::All => Some(Match::Yes {
                by,
                once_asked: false,
                doubt: None,
                why: match is_known {
                    true => matched_text(rule, Some(told), to).into(),
                    false => "another name of the rule leads to the address".into(),
                },
            }),
            Extent::Unknown => Some(Match::Yes {
                by,
                once_asked: false,
                doubt: Some(Doubt::Unconfirmed),
                why: "the switch has not confirmed all of its flows, or somebody else has one in its place".into(),
            }),
            // For other ports it may have some.
            Extent::None if !is_known || matches!(ports_match(rule, to.asked.transport), Ports::None) => {
                is_known.then(|| Match::certain(By::Name, matched_text(rule, Some(told), to)))
            }
            Extent::None => match to.limit().filter(|_| !are_wanted) {
                Some(limit) => {
                    not_in_force(may_be_resolved, Reason::LimitReached, limit.to_string())
                }
                None => {
                    let why = "its flow is not in the switch at the moment".to_owned();
                    not_in_force(may_be_resolved, Reason::FlowMissing, why)
                }
            },
        }
    }

    /// Why ovn-kubernetes has not taken over the EgressFirewall for a while, if it has not.
    fn not_taken_over(&self, port: &Port) -> Option<String> {
        let namespace = self.policy.namespace_of_names(&port.row)?;
        let mut problems = self.policy.problems(namespace);
        problems.find_map(|(_, problem)| {
            matches!(problem, Problem::NotTakenOver(_)).then(|| problem.to_string())
        })
    }

    /// Why OVN does not enforce a rule by name at the port.
    fn not_enforced(&self, to: &Destined<'_>, index: u32) -> (Reason, String) {
        let namespace = self.policy.namespace_of_names(&to.port.row);
        match namespace.and_then(|namespace| self.policy.problem_at(namespace, index)) {
            Some(problem @ Problem::NotTakenOver(_)) => {
                (Reason::FirewallNotTakenOver, problem.to_string())
            }
            Some(problem) if problem.severity() == Severity::NotInForce => {
                (Reason::RuleNotUsable, problem.to_string())
            }
            Some(problem) if problem.severity() == Severity::Waiting => {
                (Reason::AclMissing, problem.to_string())
            }
            Some(_) | None => (
                Reason::AclMissing,
                "OVN does not enforce the rule at this port yet".to_owned(),
            ),
        }
    }

    /// The option that raises a limit, and its value; `None` where no option does.
    fn option_of(&self, limit: &Limit) -> Option<(&'static str, usize)> {
        let limits = self.cache.limits();
        match limit {
            Limit::AddressesOfName(_) => {
                Some(("--max-addresses-per-name", limits.addresses_per_name_max))
            }
            Limit::AddressesOfPod | Limit::DeniedAddresses | Limit::NamesOfPod => {
                Some(("--max-addresses-per-pod", limits.addresses_per_port_max))
            }
            Limit::FlowChanges => Some(("--max-flow-changes", self.budget.per_second())),
            Limit::NamesOfAddress(_)
            | Limit::NamesOfNode
            | Limit::DeniedNamesOfNode
            | Limit::FlowsOfNamespace => None,
        }
    }

    /// Why a pod does not know an address.
    fn why_untold(&self, id: PortId, port: &Port, asked: Asked<'_>) -> Untold {
        let name = asked.name();
        let Asked {
            address: to_address,
            fruitless: asked_for,
            ..
        } = asked;
        let asked = name;
        match self.ports.attachment(port.interface) {
            Some(None) => {}
            None => {
                let text = "the programs are not attached to the pod's interface yet";
                return Untold::new(Reason::NotAttached, text);
            }
            Some(Some(reason)) => {
                let text = format!("the programs cannot be attached: {reason}");
                return Untold::new(Reason::NotAttached, text);
            }
        }
        if self.ports.not_trusted(port.interface).is_some() {
            let text = "DNS answers at this port are ignored (`dnsflow status`)";
            return Untold::new(Reason::PortNotTrusted, text);
        }
        if self
            .answers
            .trusted()
            .is_none_or(|trusted| trusted.is_empty())
        {
            let text = "no DNS server is trusted: see --resolver and --dns-service";
            return Untold::new(Reason::NoResolverTrusted, text);
        }
        let is_it = |address: IpAddr, name: &DomainName| match to_address {
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
        let never = to_address.and_then(|address| self.refusal(address, &port.row));
        let never = never.map(|why| format!("no answer opens the address: {why}"));
        if let Some(text) = told_refused.or(never) {
            return Untold::new(Reason::AddressRefused, text);
        }
        let of_name = asked.map_or(&[][..], |name| self.cache.port(id).entries.of_name(name));
        let told = to_address
            .iter()
            .chain(of_name.iter().filter(|_| to_address.is_none()));
        let mut told = told.filter_map(|address| self.cache.entry(id, *address));
        let of_connections = told.find(|entry| entry.has_ended());
        if asked_for.is_none()
            && let Some(name) = of_connections.and_then(|entry| entry.names.keys().next())
        {
            return Untold::new(
                Reason::Expired,
                format!(
                    "the answer for {name} has expired: established connections go on, and for a new one the pod has to \
                     ask again"
                ),
            );
        }
        let mut ended = self.cache.port(id).ended.iter();
        let ended = ended.find(|ended| is_it(ended.address, &ended.name));
        // A query from before may be of the answer that has ended: it was lost, and the pod asked again.
        let is_newer = |one: &&Fruitless| ended.is_none_or(|ended| one.at > ended.at);
        if let Some(fruitless) = asked_for.filter(is_newer) {
            return Untold::new(fruitless.reason, &*fruitless.text);
        }
        if let Some(ended) = ended {
            let name = &ended.name;
            return match &ended.why {
                End::Expired => Untold::new(
                    Reason::Expired,
                    format!("the answer for {name} has expired: the pod has to ask again"),
                ),
                End::Truncated => {
                    let refused = self.refused_over_tcp(id, ended.at);
                    Untold::new(
                        Reason::NotAnswered,
                        format!("the answer for {name} was {TRUNCATED}{refused}"),
                    )
                }
                End::Limit(limit) => Untold {
                    reason: Reason::LimitReached,
                    text: format!("a limit left no room for this address of {name} ({limit})"),
                    limit: Some(limit.clone()),
                },
            };
        }
        let is_told = |other: PortId| match (to_address, asked) {
            (Some(address), _) => self.cache.counting_entry(other, address).is_some(),
            (None, Some(name)) => !self.cache.port(other).entries.of_name(name).is_empty(),
            (None, None) => false,
        };
        // Tenants read this, and must not learn of the pods of other namespaces.
        let namespace = self.policy.namespace_of_names(&port.row);
        let mut others = self.ports.iter().filter(|(other, port)| {
            let of = self.policy.namespace_of_names(&port.row);
            *other != id && of.is_some() && of == namespace
        });
        if let Some((_, other)) = others.find(|(other, _)| is_told(*other)) {
            let other = &other.row.iface_id;
            let text = format!(
                "this pod has not asked; {other} was told, and each pod reaches what it was told itself"
            );
            return Untold::new(Reason::ToldToOtherPod, text);
        }
        let none = "no trusted DNS server has returned";
        let limits = &self.cache.port(id).limits_reported;
        let left_out = limits.iter().find_map(|limit| match limit {
            Limit::AddressesOfName(name) => Some(name),
            _ => None,
        });
        let text = match (to_address, left_out) {
            (Some(_), None) => format!("{none} this address to the pod"),
            (Some(_), Some(name)) => format!(
                "{none} this address to the pod, unless a limit has left it out of the addresses of {name}"
            ),
            (None, _) => format!("{none} an address of it to the pod"),
        };
        Untold::new(Reason::NotResolved, text)
    }

    /// Whether the EgressFirewall keeps a pod on a user-defined network from the cluster's DNS. ovn-kubernetes leaves the
    /// subnets of that network alone out of a rule by CIDR, and rewrites the address of the DNS Service behind the rules,
    /// on the default network.
    fn denied_dns(&self, port: &Port, firewall: &Firewall) -> Option<String> {
        let network = port.row.network.as_ref()?;
        let namespace = self.policy.namespace_of_names(&port.row);
        let trusted = self.answers.trusted().into_iter().flatten();
        let servers = trusted.map(|server| server.address);
        let is_inside = |one: &IpAddr| self.refused.is_inside(*one, &port.row, namespace);
        let servers: BTreeSet<IpAddr> = servers.filter(|one| !is_inside(one)).collect();
        let decides = |(index, rule): (u32, &Rule)| match &rule.destination {
            // A Deny of some ports may leave those of DNS open.
            _ if rule.action == RuleAction::Deny && !rule.ports.is_empty() => None,
            Destination::Cidr(network) if servers.iter().any(|one| network.contains(one)) => {
                Some((index, rule.action))
            }
            _ => None,
        };
        let (index, action) = (0..).zip(firewall.rules.iter()).find_map(decides)?;
        (action == RuleAction::Deny).then(|| {
            let servers = servers.iter().take(DNS_SERVERS_MAX).map(IpAddr::to_string);
            format!(
                "on the user-defined network {network}, rule {index} also denies the cluster's DNS: allow its address \
                 before it by `cidrSelector` ({})",
                servers.collect::<Vec<_>>().join(", ")
            )
        })
    }

    /// What to do about a DNS server that the pod asks, and that is not trusted. Trust holds for all pods: so this is
    /// never the remedy.
    fn untrusted(
        &self,
        (id, port): (PortId, &Port),
        AskedServer { server, at, .. }: &AskedServer,
        now: Timestamp,
    ) -> String {
        let to_server = Asked {
            address: Some(server.address),
            transport: Some(Transport {
                protocol: Protocol::Udp,
                port: Some(server.port),
            }),
            ..Asked::default()
        };
        let Decision {
            ruling, firewall, ..
        } = self.decide(id, port, to_server);
        let rule = ruling.rule.filter(|rule| {
            let rule = firewall.and_then(|firewall| rule_at(firewall, *rule));
            rule.is_some_and(|rule| rule.action == RuleAction::Deny)
        });
        let ago = now.since(*at).as_secs();
        let asked = format!("the pod asked {server} {ago}s ago, a DNS server that is not trusted");
        let trusting = format!("if all pods may trust it, --resolver {server}");
        match rule {
            Some(rule) => format!(
                "{asked}, and rule {rule} denies it: let the pod ask a trusted one; or {trusting}, and \
                 `cidrSelector: {}` before rule {rule}",
                IpNet::from(server.address)
            ),
            None => format!("{asked}: let the pod ask a trusted one; or {trusting}"),
        }
    }

    /// Other possible causes of a connection that does not pass.
    fn hints(
        &self,
        port: &Port,
        name: Option<&DomainName>,
        addresses: &[ExplainedAddress],
    ) -> Vec<String> {
        let mut hints = Vec::new();
        let namespace = self.policy.namespace_of_names(&port.row);
        if namespace.is_some_and(|namespace| self.policy.enforces_former(namespace)) {
            hints.push("OVN still enforces the EgressFirewall before the present one".to_owned());
        }
        let firewall = namespace.and_then(|namespace| self.policy.present(namespace));
        if let Some((firewall, name)) = firewall.zip(name) {
            hints.extend(near_misses(firewall, self.policy.subdomains(), name));
        }
        let has_answer = |address: &ExplainedAddress| {
            address.reason != Reason::NotResolved && !is_fruitless(address.reason)
        };
        if let Some(firewall) = firewall
            && !addresses.iter().any(has_answer)
        {
            hints.extend(self.denied_dns(port, firewall));
        }
        let is_by_name = |one: &ExplainedAddress| {
            let mut steps = one.steps.iter();
            one.address.is_none() && steps.any(|step| step.outcome == StepOutcome::OnceAsked)
        };
        if addresses
            .iter()
            .any(|one| one.reason == Reason::NotResolved && is_by_name(one))
        {
            hints.push(
                "a rule holds for the name that the pod asks for, and not for a name behind it (CNAME, ExternalName)"
                    .to_owned(),
            );
        }
        let mut reasons = addresses.iter().map(|address| address.reason);
        if reasons.any(|reason| is_untold(reason) && reason != Reason::NoResolverTrusted) {
            let trusted = self.answers.trusted().into_iter().flatten();
            let trusted: Vec<String> = trusted.map(ToString::to_string).collect();
            hints.push(format!(
                "only answers of {} count; a DNS cache on the node needs --resolver, unless its interface is nodelocaldns",
                trusted.join(", ")
            ));
            hints.push(
                "DNS over HTTPS or TLS, or a DNS cache in the pod, hides the answers from the agent"
                    .to_owned(),
            );
        }
        hints
    }
}

/// The rule with this index in `spec.egress`.
pub(super) fn rule_at(firewall: &Firewall, index: u32) -> Option<&Rule> {
    firewall.rules.get(usize::try_from(index).ok()?)
}

/// The ports of a rule, such as `tcp/80, tcp/443`.
fn ports_text(rule: &Rule) -> String {
    let ports = rule.ports.iter().copied().map(transport_text);
    ports.collect::<Vec<_>>().join(", ")
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
    // A rule that denies more ports than are read closes all.
    if rule.ports.is_empty() || rule.has_more_ports() {
        return Ports::All;
    }
    let Some(wanted) = transport else {
        return Ports::Some;
    };
    let mut ports = rule.ports.iter();
    match ports.any(|transport| transport.is_for(wanted)) {
        true => Ports::All,
        false => Ports::None,
    }
}

/// Whether a name is one of the cluster's DNS.
fn is_of_cluster(name: &DomainName) -> bool {
    let text = name.to_string();
    text.ends_with(".svc") || text.ends_with(".cluster.local")
}

/// That the pod has asked a DNS server.
fn asked_text(server: Option<Resolver>, ago: Duration) -> String {
    let server = server.map_or("a DNS server".to_owned(), |server| server.to_string());
    format!("the pod asked {server} for it {}s ago", ago.as_secs())
}

/// The type of a question for an address.
fn address_type(is_ipv6: bool) -> QuestionType {
    match is_ipv6 {
        true => QuestionType::Aaaa,
        false => QuestionType::A,
    }
}

/// Whether a name is another one with a search domain behind it. A name of one label is the first label of many others:
/// of these, the cluster's alone count.
fn is_with_search_domain(told: &DomainName, name: &DomainName) -> bool {
    let [told_wire, wire] = [told, name].map(DomainName::wire);
    let is_longer = told_wire.len() > wire.len() && told_wire.starts_with(wire);
    is_longer && (name.labels().count() > 1 || is_of_cluster(told))
}

/// What the pod was told for names that begin with a name of one label. Which of them its search domains make of it, the
/// agent does not know.
fn told_for_short_name(
    name: Option<&DomainName>,
    longer: &BTreeMap<&DomainName, Timestamp>,
) -> String {
    let mut newest: Vec<_> = longer
        .iter()
        .map(|(told, at)| (Reverse(at), told))
        .collect();
    newest.sort();
    let told = newest
        .iter()
        .take(HINTS_MAX)
        .map(|(_, told)| told.to_string());
    let told = told.collect::<Vec<_>>().join(", ");
    let name = name.map(ToString::to_string).unwrap_or_default();
    format!(
        "{name} stands for a name with a search domain behind it; the pod was told {told}: ask for that name"
    )
}

/// A rule that would match, if this were no dry run.
fn dry_run(doubt: Option<Doubt>) -> Match {
    Match::NotInForce {
        doubt,
        reason: Reason::DryRun,
        why: "this is a dry run: no flow is installed".to_owned(),
    }
}

/// Why a rule matches: by this name, or by itself.
fn matched_text(rule: &Rule, told: Option<&DomainName>, to: &Destined<'_>) -> String {
    match (&rule.destination, told, to.asked.address) {
        (Destination::Cidr(network), _, Some(address)) => format!("{address} is in {network}"),
        (Destination::Cidr(network), _, None) => format!("every address is in {network}"),
        (Destination::Name(name), None, Some(address)) => {
            format!(
                "ovn-kubernetes has resolved {} to {address}",
                name.written()
            )
        }
        (_, Some(told), Some(address)) => {
            format!("the pod was told {address} for {told}")
        }
        _ => "its name covers this one".to_owned(),
    }
}

/// The verdict of the walk.
fn outcome(to: &Destined<'_>, firewall: &Firewall, walk: &Walk<'_>) -> Ruling {
    let [now, once_asked] = [false, true].map(|is_asked| decide(&walk.bearings, is_asked));
    let passes_now = now.action == RuleAction::Allow && now.unless.is_none();
    let passes_later = once_asked.action == RuleAction::Allow && once_asked.unless.is_none();
    let decided = match to.asked.is_by_name {
        true if !(passes_now && passes_later) => once_asked,
        _ => now,
    };
    let certain = without_doubt(to, walk, decided.rule, decided.action);
    // Another name may lead to the address as well: until the pod asks, nobody knows.
    let other_name = decided
        .unless
        .filter(|unless| unless.heaviest == Doubt::OtherName);
    let waits = match decided.action {
        RuleAction::Allow => decided.rule != now.rule && decided.unless == other_name,
        RuleAction::Deny => {
            !to.asked.is_by_name && decided.unless.is_none() && once_asked.may_be_allowed()
        }
    };
    if waits {
        let Untold { reason, text, .. } = to.untold();
        let mut text = match (decided.action, decided.rule) {
            (RuleAction::Allow, Some(rule)) if *reason == Reason::NotAnswered => {
                format!("rule {rule} allows it once the answer comes: {text}")
            }
            (RuleAction::Allow, Some(rule)) if *reason == Reason::AnsweredWithError => {
                format!("rule {rule} allows it once an answer has an address: {text}")
            }
            (RuleAction::Allow, Some(rule)) => {
                format!("rule {rule} allows it once the pod asks: {text}")
            }
            _ => format!("{}, and {text}", decided_text(decided.action, decided.rule)),
        };
        if let Some(Unless { rule, .. }) = other_name {
            text += &format!("; rule {rule} denies it if its name has the same address");
        }
        return Ruling {
            // The pod has asked.
            verdict: match is_fruitless(*reason) {
                true => Verdict::Blocked,
                false => Verdict::NotYet,
            },
            reason: *reason,
            rule: decided.rule,
            text,
            doubt: None,
        };
    }
    let Some(unless) = decided.unless else {
        return certain;
    };
    let Unless {
        rule,
        doubt,
        heaviest,
    } = unless;
    let of_rule = rule_at(firewall, rule);
    let ports = of_rule.map(ports_text).unwrap_or_default();
    let destination = of_rule.map(|rule| destination_text(&rule.destination));
    let destination = destination.unwrap_or_default();
    let otherwise = decided_text(decided.action, decided.rule);
    let not_taken_over = match heaviest {
        Doubt::Edit => to.view.not_taken_over(to.port),
        _ => None,
    };
    let other = match decided.action {
        RuleAction::Allow => "denies",
        RuleAction::Deny => "allows",
    };
    let text = match doubt {
        Doubt::Port => format!("rule {rule} {other} {ports}; for other ports, {otherwise}"),
        Doubt::Address | Doubt::OtherName => {
            format!("rule {rule} {other} the addresses of {destination}; for others, {otherwise}")
        }
        Doubt::Resolved => {
            let other = match decided.action {
                RuleAction::Allow => "denied",
                RuleAction::Deny => "allowed",
            };
            format!(
                "{}; it may still be {other}: ovn-kubernetes may have resolved {destination} (rule {rule}) to it",
                certain.text
            )
        }
        Doubt::Node => format!("{otherwise}, unless rule {rule} selects the node"),
        Doubt::Edit => {
            let not_taken_over = not_taken_over.as_deref().map(|why| format!("; {why}"));
            let why = not_taken_over.unwrap_or_default();
            format!("{otherwise}, unless OVN enforces rule {rule} already{why}")
        }
        Doubt::LeftBehind => format!(
            "{otherwise}, unless an ACL of OVN denies it, of which the EgressFirewall has no rule: ovn-kubernetes has left it behind"
        ),
        Doubt::Unconfirmed => {
            let mut steps = walk.steps.iter();
            let step = steps.find(|step| step.rule == rule);
            let why = step.map(|step| &*step.why).unwrap_or_default();
            format!("{otherwise}, unless rule {rule} decides: {why}")
        }
        Doubt::OtherFlows => {
            format!("{otherwise}, unless a flow of earlier rules or names is still there")
        }
    };
    let (verdict, reason) = match heaviest {
        Doubt::Port => (Verdict::Depends, Reason::DependsOnPort),
        Doubt::Address | Doubt::OtherName => (Verdict::Depends, Reason::DependsOnAddress),
        Doubt::Resolved => (Verdict::NotKnown, certain.reason),
        Doubt::Node => (Verdict::NotKnown, Reason::NodeSelector),
        Doubt::LeftBehind => (Verdict::NotKnown, Reason::AclLeftBehind),
        Doubt::Edit => match not_taken_over {
            Some(_) => (Verdict::NotKnown, Reason::FirewallNotTakenOver),
            None => (Verdict::NotKnown, Reason::AclMissing),
        },
        Doubt::Unconfirmed | Doubt::OtherFlows => (Verdict::NotKnown, Reason::FlowMissing),
    };
    Ruling {
        verdict,
        reason,
        rule: decided.rule,
        text,
        doubt: Some(heaviest),
    }
}

fn decided_text(action: RuleAction, rule: Option<u32>) -> String {
    match (action, rule) {
        (RuleAction::Allow, Some(rule)) => format!("rule {rule} allows it"),
        (RuleAction::Deny, Some(rule)) => format!("rule {rule} denies it"),
        (_, None) => "no rule matches: OVN lets pass".to_owned(),
    }
}

/// The verdict of the rule that decides.
fn without_doubt(
    to: &Destined<'_>,
    walk: &Walk<'_>,
    rule: Option<u32>,
    action: RuleAction,
) -> Ruling {
    let by = walk.by.iter().find(|(of, _)| Some(*of) == rule);
    let by = by.map(|(_, by)| *by);
    let decided = decided_text(action, rule);
    let (verdict, reason, text) = match (action, by) {
        (RuleAction::Allow, None) => (Verdict::Allowed, Reason::NoRuleDenies, decided),
        (RuleAction::Allow, Some(By::Network)) => {
            (Verdict::Allowed, Reason::AllowedByNetwork, decided)
        }
        (RuleAction::Allow, Some(By::AddressSet)) => {
            let text = format!(
                "{decided}, and ovn-kubernetes has resolved its name to the address itself"
            );
            (Verdict::Allowed, Reason::AllowedByOvn, text)
        }
        (RuleAction::Allow, Some(By::Name)) => {
            let text = format!("{decided}, and the pod was told the address");
            (Verdict::Allowed, Reason::AllowedByName, text)
        }
        (RuleAction::Deny, by) => {
            let (reason, text) = match &walk.would {
                Some((_, reason, text)) => (*reason, text.clone()),
                None if walk.allows_names && by == Some(By::Network) && to.is_nameless() => {
                    let Untold { reason, text, .. } = to.untold();
                    (*reason, format!("{decided}, and {text}"))
                }
                None => (Reason::DeniedByRule, decided),
            };
            (Verdict::Blocked, reason, text)
        }
    };
    Ruling {
        verdict,
        reason,
        rule,
        text,
        doubt: None,
    }
}

/// The change that would let the connection pass.
fn remedy(
    ruling: &Ruling,
    walk: &Walk<'_>,
    to: &Destined<'_>,
    firewall: &Firewall,
) -> Option<String> {
    let would = walk.would.as_ref().map(|(rule, ..)| *rule);
    let limit = limit(ruling, walk, to);
    match (limit.as_ref(), would) {
        (Some(Limit::FlowsOfNamespace), Some(rule)) => {
            return Some(format!("list fewer ports in rule {rule}, or none"));
        }
        (Some(limit), _) if let Some((option, now)) = to.view.option_of(limit) => {
            return Some(format!("raise {option}, now {now}"));
        }
        _ => {}
    }
    let denying = ruling.rule?;
    let names = to.asked.names.iter().map(ToString::to_string);
    let mut names = names.filter(|name| is_usable(name));
    let change = match (ruling.reason, would, to.asked.transport) {
        (Reason::WrongPort, Some(allowing), Some(transport)) => {
            let transport = transport_text(transport);
            return Some(format!("add {transport} to the ports of rule {allowing}"));
        }
        (Reason::DeniedByEarlierRule, Some(allowing), _) => {
            format!("move rule {allowing} before rule {denying}")
        }
        (Reason::DeniedByRule, ..) if let Some(name) = names.next() => {
            let others: String = names.map(|name| format!(", or with {name}")).collect();
            let by_which = if others.is_empty() {
                ""
            } else {
                ": by which name the pod connects, nobody knows"
            };
            format!("allow it before rule {denying} with `dnsName: {name}`{others}{by_which}")
        }
        (Reason::DeniedByRule, ..) if let Some(address) = to.asked.address => {
            let by_name = match to.asked.is_behind_service {
                true => "",
                false => ", or with the dnsName that leads to the address",
            };
            format!(
                "allow it before rule {denying} with `cidrSelector: {}`{by_name}",
                IpNet::from(address)
            )
        }
        (Reason::NotResolved, ..) if let Some(address) = to.asked.address => format!(
            "if the pod connects without a name, allow it before rule {denying} with `cidrSelector: {}`",
            IpNet::from(address)
        ),
        (Reason::LimitReached, ..) if let Some(address) = to.asked.address => format!(
            "allow it before rule {denying} with `cidrSelector: {}`",
            IpNet::from(address)
        ),
        _ => return None,
    };
    Some(match &rule_at(firewall, denying)?.destination {
        // A rule that closes everything else is there to be passed by.
        Destination::Cidr(network) if network.prefix_len() == 0 => change,
        destination => {
            let destination = destination_text(destination);
            format!("{change}; rule {denying} (Deny {destination}) does not deny it then")
        }
    })
}

/// Whether the pod has asked for the name, and has no address by it.
fn is_fruitless(reason: Reason) -> bool {
    matches!(reason, Reason::NotAnswered | Reason::AnsweredWithError)
}

/// Whether the pod may have asked nobody but a DNS server that is not trusted.
fn is_untold(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::NotResolved | Reason::ToldToOtherPod | Reason::NoResolverTrusted
    )
}

/// The limit that has left no room.
fn limit(ruling: &Ruling, walk: &Walk<'_>, to: &Destined<'_>) -> Option<Limit> {
    if ruling.reason != Reason::LimitReached {
        return None;
    }
    let of_flows = walk.would.as_ref().and_then(|_| to.limit());
    of_flows.or_else(|| to.untold().limit.clone())
}

/// Whether the API server takes a name as `dnsName` (the pattern in the definition of EgressFirewall).
fn is_usable(name: &str) -> bool {
    let is_usable = |letter: char| letter.is_ascii_alphanumeric() || "-.".contains(letter);
    name.chars().all(is_usable)
}

/// Rules whose name nearly covers this one.
fn near_misses(firewall: &Firewall, subdomains: bool, name: &DomainName) -> Vec<String> {
    let rules = (0_u32..).zip(firewall.rules.iter());
    let by_name = rules.filter_map(|(index, rule)| match &rule.destination {
        Destination::Name(of_rule) if rule.action == RuleAction::Allow => Some((index, of_rule)),
        _ => None,
    });
    let by_name: Vec<(u32, &DnsName)> = by_name.collect();
    let pattern = |of_rule| NamePattern::of(of_rule, firewall, subdomains);
    if by_name
        .iter()
        .any(|(_, of_rule)| pattern(of_rule).covers_name(of_rule, name))
    {
        return Vec::new();
    }
    let text = name.to_string();
    let misses = by_name.into_iter().filter_map(|(index, of_rule)| {
        let written = of_rule.written();
        if NamePattern::Subdomains.covers_name(of_rule, name) {
            let what = match pattern(of_rule) {
                NamePattern::OneLabel => "covers names with exactly one more label",
                NamePattern::Exact | NamePattern::Subdomains => {
                    "covers no name below it (annotation dnsflow.io/subdomains)"
                }
            };
            return Some(format!("rule {index} ({written}) {what}"));
        }
        let lengths = [name, of_rule.name()].map(|name| name.wire().len());
        let may_be_misprint = lengths[0].abs_diff(lengths[1]) <= usize::from(EDITS_MAX);
        (may_be_misprint
            && are_within(
                text.as_bytes(),
                of_rule.name().to_string().as_bytes(),
                EDITS_MAX,
            ))
        .then(|| format!("rule {index} is for {written}: is one of both names a misprint?"))
    });
    misses.take(HINTS_MAX).collect()
}

/// Whether one text becomes the other by so many edits at most: an octet inserted, removed or replaced, or two that are
/// exchanged. It takes time by the length of the texts: whoever writes rules chooses thousands of long names.
fn are_within(one: &[u8], other: &[u8], edits: u8) -> bool {
    let same = one
        .iter()
        .zip(other)
        .take_while(|(one, other)| one == other);
    let same = same.count();
    let (one, other) = (&one[same..], &other[same..]);
    if one.len().abs_diff(other.len()) > usize::from(edits) {
        return false;
    }
    let (Some(rest), Some(other_rest), Some(left)) =
        (one.get(1..), other.get(1..), edits.checked_sub(1))
    else {
        return one.len().max(other.len()) <= usize::from(edits);
    };
    let are_exchanged = || match (one, other) {
        ([a, b, one @ ..], [c, d, other @ ..]) => (a, b) == (d, c) && are_within(one, other, left),
        _ => false,
    };
    are_within(rest, other_rest, left)
        || are_within(rest, other, left)
        || are_within(one, other_rest, left)
        || are_exchanged()
}

/// With so many characters inserted, removed, replaced or exchanged, one name may be a misprint of another.
const EDITS_MAX: u8 = 2;

/// Near misses that are told.
const HINTS_MAX: usize = 3;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::are_within;

    proptest! {
        /// `strsim` computes the distance by the whole table.
        #[test]
        fn texts_are_as_near_as_the_distance_says(
            one in "[abc.]{0,9}",
            other in "[abc.]{0,9}",
            edits in 0_u8..4,
        ) {
            let distance = strsim::osa_distance(&one, &other);
            let are_near = distance <= usize::from(edits);
            prop_assert_eq!(are_within(one.as_bytes(), other.as_bytes(), edits), are_near);
        }
    }
}
