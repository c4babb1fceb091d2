//! What an EgressFirewall that is not applied would have done with the last hour's connections
//! (`dnsflow try`).

use std::time::Duration;

use dnsflow_core::{
    ask::{
        history::ConnectionView,
        trial::{Facts, Outcome, Trial, Unless},
        view::{Verdict, target_text_of},
    },
    values::{
        firewall::{Destination, Firewall, FirewallId},
        name::DomainName,
    },
};
use serde::{Deserialize, Serialize};

use super::history::{Known, PresentFirewall};
use crate::convert::{self, Reading};

/// What a tried EgressFirewall comes to, beside the one that is there.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Trialled {
    /// The namespace.
    pub namespace: String,
    /// The rules of the EgressFirewall that is there; none where there is none.
    pub rules_now: Option<usize>,
    /// The rules of the one that is tried.
    pub rules_then: usize,
    /// The seconds that are known of, an hour at most.
    pub known_s: u64,
    /// The connections for which something changes, or may change.
    pub changed: Vec<Changed>,
    /// How many stay allowed.
    pub stay_allowed: usize,
    /// How many stay denied.
    pub stay_denied: usize,
    /// What is wrong with the manifest.
    pub problems: Vec<String>,
    /// What else there is to know.
    pub notes: Vec<String>,
}

/// A connection for which something changes.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Changed {
    /// What changes.
    pub change: Change,
    /// The pod.
    pub pod: String,
    /// The destination, as `dnsflow explain` takes it.
    pub target: String,
    /// The names that the pod was told the address for.
    pub names: Vec<String>,
    /// What the EgressFirewall that is there says.
    pub now: Side,
    /// What the tried one says.
    pub then: Side,
    /// The seconds since the last attempt.
    pub last_s: u64,
    /// The attempts that were told of.
    pub count: u64,
}

/// What changes for a connection.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It is allowed, and would be denied.
    WouldDeny,
    /// Whether something changes is not known.
    NotKnown,
    /// It is denied, and would be allowed.
    WouldAllow,
}

/// What an EgressFirewall says of a connection.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Side {
    /// The verdict of the rule that decides.
    pub verdict: Verdict,
    /// The rule that decides; none where no rule matches.
    pub rule: Option<u32>,
    /// The same in words, with what is not known.
    pub text: String,
}

impl Side {
    fn of(outcome: Outcome) -> Self {
        let Outcome {
            verdict,
            rule,
            unless,
        } = outcome;
        let mut text = match is_allowed(verdict) {
            true => "allowed",
            false => "denied",
        }
        .to_owned();
        text += &match rule {
            Some(rule) => format!(" by rule {rule}"),
            None => ": no rule matches".to_owned(),
        };
        match unless {
            None => {}
            Some(Unless::IsResolved(rule)) => {
                text += &format!(", unless ovn-kubernetes has resolved it for rule {rule}");
            }
            Some(Unless::IsSelected(rule)) => {
                text += &format!(", unless rule {rule} selects the node");
            }
        }
        Self {
            verdict,
            rule,
            text,
        }
    }
}

/// A connection that was tried is allowed or denied.
fn is_allowed(verdict: Verdict) -> bool {
    verdict == Verdict::Allowed
}

impl Change {
    fn between(now: Outcome, then: Outcome) -> Option<Self> {
        let by_node = |side: Outcome| matches!(side.unless, Some(Unless::IsSelected(_)));
        if by_node(now) || by_node(then) {
            return Some(Self::NotKnown);
        }
        match (is_allowed(now.verdict), is_allowed(then.verdict)) {
            (true, false) => Some(Self::WouldDeny),
            (false, true) => Some(Self::WouldAllow),
            _ if now.unless.is_some() != then.unless.is_some() => Some(Self::NotKnown),
            _ => None,
        }
    }

    /// What people read.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::WouldDeny => "would deny",
            Self::NotKnown => "not known",
            Self::WouldAllow => "would allow",
        }
    }
}

/// What the rules match by, of a connection that was seen.
pub(crate) fn names_of(connection: &ConnectionView) -> Vec<DomainName> {
    let names = connection.names.iter();
    names
        .filter_map(|name| DomainName::from_presentation(name).ok())
        .collect()
}

/// A connection that was seen, with what [`names_of`] gives.
pub(crate) fn facts<'a>(connection: &ConnectionView, names: &'a [DomainName]) -> Facts<'a> {
    Facts {
        address: connection.address,
        transport: connection.transport(),
        names,
        is_refused: connection.is_refused,
        is_node: connection.is_node,
    }
}

impl PresentFirewall {
    /// The rules that are there.
    pub(crate) fn firewall(&self) -> Option<Firewall> {
        match convert::firewall(self.resource.as_ref()?).reading {
            Reading::Firewall(_, firewall) => Some(firewall),
            Reading::Unreadable(_) | Reading::Ignored => None,
        }
    }
}

impl Trialled {
    /// Tries an EgressFirewall.
    pub fn new(
        id: &FirewallId,
        firewall: &Firewall,
        present: &PresentFirewall,
        known: &Known,
        mut problems: Vec<String>,
    ) -> Self {
        problems.extend(refused_by_api(firewall));
        let then = Trial::new(firewall, present.subdomains);
        let now = present.firewall();
        let now = now.map(|now| Trial::new(&now, present.subdomains));
        let mut trialled = Self {
            namespace: id.namespace.clone(),
            rules_now: now.as_ref().map(|now| now.rules().len()),
            rules_then: firewall.rules.len(),
            known_s: known.time.as_secs(),
            changed: Vec::new(),
            stay_allowed: 0,
            stay_denied: 0,
            problems,
            notes: notes(firewall, present, known),
        };
        // Without an EgressFirewall, all passes.
        let now = now.unwrap_or_else(|| Trial::new(&Firewall::default(), present.subdomains));
        for connection in &known.connections {
            let names = names_of(connection);
            let facts = facts(connection, &names);
            let (before, after) = (now.decide(&facts), then.decide(&facts));
            match (Change::between(before, after), is_allowed(after.verdict)) {
                (None, true) => trialled.stay_allowed += 1,
                (None, false) => trialled.stay_denied += 1,
                (Some(change), _) => trialled.changed.push(Changed {
                    change,
                    pod: connection.pod.clone(),
                    target: target_text_of(
                        connection.address,
                        connection.protocol,
                        connection.port,
                    ),
                    names: connection.names.clone(),
                    now: Side::of(before),
                    then: Side::of(after),
                    last_s: connection.last_s,
                    count: connection.count,
                }),
            }
        }
        trialled.changed.sort_by_key(|changed| changed.change);
        trialled
    }

    /// How many connections change in this way.
    pub fn count(&self, change: Change) -> usize {
        let changed = self.changed.iter();
        changed.filter(|changed| changed.change == change).count()
    }

    /// Whether nothing is known, because nobody watches pods without an EgressFirewall.
    pub fn is_unwatched(&self) -> bool {
        self.rules_now.is_none()
    }
}

/// The rules that dnsflow reads, and whose `dnsName` an API server refuses: the pattern in the definition of
/// EgressFirewalls has no underscore (`dnsName` in [`DEFINITION`](crate::egress_firewall::DEFINITION), from
/// ovn-kubernetes' go-controller/pkg/crd/egressfirewall/v1/types.go).
fn refused_by_api(firewall: &Firewall) -> impl Iterator<Item = String> {
    let rules = firewall.rules.iter().enumerate();
    rules.filter_map(|(index, rule)| match &rule.destination {
        Destination::Name(name) if name.written().contains('_') => Some(format!(
            "rule {index}: the API server refuses the EgressFirewall because of dnsName {}: it takes letters, digits, \
             hyphens and dots",
            name.written()
        )),
        _ => None,
    })
}

/// What the answer leaves open.
fn notes(firewall: &Firewall, present: &PresentFirewall, known: &Known) -> Vec<String> {
    let mut notes = Vec::new();
    match present.resource {
        None => notes.push(
            "the namespace has no EgressFirewall, and only pods behind one are watched: nothing is known. \
             Apply one that allows all, and ask again later"
                .to_owned(),
        ),
        Some(_) if present.came_s < known.time.as_secs() => {
            let came = Duration::from_secs(present.came_s);
            notes.push(format!(
                "the present EgressFirewall came {} ago; `now` is what it says of older connections as \
                 well",
                humantime::format_duration(came)
            ));
        }
        Some(_) => {}
    }
    if present.enforces_former {
        notes.push(
            "OVN still enforces the EgressFirewall before the present one; `now` is the present one"
                .to_owned(),
        );
    }
    for (index, rule) in firewall.rules.iter().enumerate() {
        match &rule.destination {
            Destination::Name(name) if name.is_wildcard() => {
                notes.push(format!(
                    "rule {index} has a wildcard: without --enable-dns-name-resolver, ovn-kubernetes \
                     refuses the whole EgressFirewall"
                ));
                break;
            }
            _ => {}
        }
    }
    if known.forgotten > 0 {
        notes.push(format!(
            "{} places were forgotten because there was no room",
            known.forgotten
        ));
    }
    notes
}

#[cfg(test)]
mod tests;
