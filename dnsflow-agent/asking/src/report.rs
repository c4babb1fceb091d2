//! What `dnsflow report` says of one node: values, put together from what the agent answers
//! (`docs/decisions/report.md`). A page is made of them by [`super::page`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    time::SystemTime,
};

use dnsflow_core::ask::view::{EntryView, NodeView};
use serde::{Deserialize, Serialize};

use super::{
    Status,
    client::{self, AskError},
    event::Event,
    print, unused,
};
use crate::{moment::rfc3339, node};

/// Namespaces in one report. A node with more pods than 250 is rare.
const NAMESPACES_MAX: usize = 256;
/// Names of one namespace in a report, those that were used last.
const NAMES_MAX: usize = 256;
/// Kinds of denials of one namespace in a report, the latest.
const DENIALS_MAX: usize = 128;
/// Addresses of one name, and pods of one denial, in a report.
const EACH_MAX: usize = 8;
/// The longest scrape that is read, in bytes.
const METRICS_MAX: usize = 4 * 1024 * 1024;
/// How a bucket of the histogram of activations begins in a scrape.
const BUCKET: &str = "dnsflow_activation_seconds_bucket{le=\"";

/// What there is to say of a node.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct NodeReport {
    /// The node.
    pub node: String,
    /// When this was said, as RFC 3339 writes it.
    pub time: String,
    /// The agent's status, with the EgressFirewalls of the namespaces below alone.
    pub status: Status,
    /// The time of the oldest event that is remembered; none without an event.
    pub events_since: Option<String>,
    /// How many answers took how long from their capture to their flows in force.
    pub activation: Vec<Bucket>,
    /// The namespaces that have an EgressFirewall, and pods on this node.
    pub namespaces: Vec<NamespaceReport>,
    /// What there was no room for.
    pub left_out: Vec<String>,
}

/// A bucket of a histogram.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Bucket {
    /// Its upper bound in seconds; none for the last one.
    pub le_s: Option<f64>,
    /// What lies between this bound and the one before.
    pub count: u64,
}

/// A namespace with an EgressFirewall.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct NamespaceReport {
    /// The rules with their use; `only_by_answer` is not asked for.
    pub rules: unused::FirewallUse,
    /// The names that pods were told, those first that were used last.
    pub names: Vec<NameReport>,
    /// What was denied, the latest first.
    pub denials: Vec<Denial>,
}

/// A name with what its addresses come to.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct NameReport {
    /// The name; empty for flows of an earlier run, whose names are not known.
    pub name: String,
    /// Some of its addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// How many addresses there are, each counted for each pod that was told.
    pub address_count: usize,
    /// The rules that match the name.
    pub rules: BTreeSet<u32>,
    /// The seconds for which the first and the last of the addresses still count.
    pub ttl_left_s: Option<(u64, u64)>,
    /// The packets to the addresses, as far as they are counted.
    pub packets: Option<u64>,
    /// The seconds since the last of them, where there was one.
    pub last_s: Option<u64>,
    /// Why an address is never opened, if one is.
    pub refused: Option<String>,
}

/// Denied connections for one reason.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Denial {
    /// The name that the pods were told the address for; the address without one.
    pub destination: String,
    /// One of the destinations, as `dnsflow explain` takes it.
    pub target: String,
    /// Some of the pods.
    pub pods: BTreeSet<String>,
    /// The reason, as `dnsflow explain` has it.
    pub reason: String,
    /// The rule that denies.
    pub rules: Vec<u32>,
    /// The reason in words, as far as the rule does not say it.
    pub why: Option<String>,
    /// What would allow it.
    pub remedy: Option<String>,
    /// How often this was told of.
    pub count: u64,
    /// When this was told of last.
    pub last: String,
}

impl NodeReport {
    /// Asks the agent, about one namespace or about all. `None` where this namespace has neither an EgressFirewall nor a
    /// pod on the node.
    pub async fn ask(socket: &Path, namespace: Option<&str>) -> Result<Option<Self>, AskError> {
        let mut status: Status = client::get(socket, "/v1/status", &[]).await?;
        if namespace.is_some_and(|namespace| !is_known(&status.node, namespace)) {
            return Ok(None);
        }
        let is_wanted = |other: &str| namespace.is_none_or(|namespace| namespace == other);
        if let Some(namespace) = namespace {
            // An object's name stands behind that of its manifest.
            let start = format!("{namespace}/");
            let is_of_it = |object: &str| {
                object
                    .rsplit(": ")
                    .next()
                    .is_some_and(|one| one.starts_with(&start))
            };
            status.object_problems.retain(|one| is_of_it(&one.object));
            status.object_problems_left_out = 0;
        }
        let node = &mut status.node;
        node.ports.retain(|port| is_wanted(&port.namespace));
        let here: BTreeSet<&str> = node.ports.iter().map(|port| &*port.namespace).collect();
        node.firewalls
            .retain(|firewall| here.contains(&*firewall.namespace));
        let (metrics, _) = client::text(socket, "/v1/metrics", METRICS_MAX).await?;
        let mut left_out = Vec::new();
        let further = node.firewalls.len().saturating_sub(NAMESPACES_MAX);
        if further > 0 {
            left_out.push(format!("{further} further namespaces"));
        }
        let mut denials = Denials::default();
        let mut events_since = None;
        let take = |event: Event| {
            events_since.get_or_insert_with(|| event.time.clone());
            denials.take(event);
            Ok(())
        };
        client::lines(socket, "/v1/events", &[], take).await?;
        let mut namespaces = Vec::new();
        for firewall in node.firewalls.iter().take(NAMESPACES_MAX) {
            let namespace = &firewall.namespace;
            let asked = NamespaceReport::ask(socket, namespace, &mut denials, &mut left_out);
            namespaces.extend(asked.await?);
        }
        Ok(Some(Self {
            node: node::name(),
            time: rfc3339(SystemTime::now()),
            status,
            events_since,
            activation: buckets(&String::from_utf8_lossy(&metrics)),
            namespaces,
            left_out,
        }))
    }
}

/// Whether a namespace has an EgressFirewall, or a pod on the node.
fn is_known(node: &NodeView, namespace: &str) -> bool {
    let mut firewalls = node.firewalls.iter();
    let mut ports = node.ports.iter();
    firewalls.any(|firewall| firewall.namespace == namespace)
        || ports.any(|port| port.namespace == namespace)
}

impl NamespaceReport {
    /// Asks about a namespace; `None` where its EgressFirewall has gone meanwhile.
    async fn ask(
        socket: &Path,
        namespace: &str,
        denials: &mut Denials,
        left_out: &mut Vec<String>,
    ) -> Result<Option<Self>, AskError> {
        let Some(evidence) = unused::Evidence::ask(socket, namespace).await? else {
            return Ok(None);
        };
        let rules = unused::FirewallUse::new(namespace, &evidence, None);
        let mut names = names(&evidence.entries);
        let mut denials = denials.of(namespace);
        for (what, count, max) in [
            ("names", names.len(), NAMES_MAX),
            ("denials", denials.len(), DENIALS_MAX),
        ] {
            if count > max {
                let further = count - max;
                left_out.push(format!("{further} further {what} of namespace {namespace}"));
            }
        }
        names.truncate(NAMES_MAX);
        denials.truncate(DENIALS_MAX);
        Ok(Some(Self {
            rules,
            names,
            denials,
        }))
    }
}

/// The names of cache entries, those first that were used last.
fn names(entries: &[EntryView]) -> Vec<NameReport> {
    let mut names: BTreeMap<String, NameReport> = BTreeMap::new();
    for entry in entries {
        let mut add = |name: &str, ttl_left_s: Option<u64>, rules: &[u32]| {
            let of_name = names.entry(name.to_owned()).or_default();
            of_name.address_count += 1;
            if of_name.addresses.len() < EACH_MAX {
                of_name.addresses.insert(entry.address);
            }
            of_name.rules.extend(rules);
            if let Some(left_s) = ttl_left_s {
                let (first, last) = of_name.ttl_left_s.unwrap_or((left_s, left_s));
                of_name.ttl_left_s = Some((first.min(left_s), last.max(left_s)));
            }
            if let Some(packets) = entry.packets {
                *of_name.packets.get_or_insert(0) += packets;
            }
            of_name.last_s = of_name.last_s.into_iter().chain(entry.used_s).min();
            if of_name.refused.is_none() {
                of_name.refused = entry.refused.clone();
            }
        };
        for name in &entry.names {
            add(&name.name, Some(name.ttl_left_s), &name.rules);
        }
        if entry.names.is_empty() {
            add("", None, &[]);
        }
    }
    let names = names.into_iter();
    let mut names: Vec<NameReport> = names
        .map(|(name, of_name)| NameReport { name, ..of_name })
        .collect();
    names.sort_by_key(|name| (name.last_s.is_none(), name.last_s));
    names
}

/// Denied connections, by namespace, destination, reason and rule.
#[derive(Debug, Default)]
struct Denials(BTreeMap<(String, String, String, Vec<u32>), Denial>);

impl Denials {
    fn take(&mut self, event: Event) {
        let (Some(namespace), Some(target), Some(reason)) =
            (event.namespace, event.target, event.reason)
        else {
            return;
        };
        let destination = event.name.unwrap_or_else(|| target.clone());
        let reason = print::text(&reason);
        let key = (namespace, destination.clone(), reason, event.rules);
        let denial = self.0.entry(key).or_default();
        denial.count += 1;
        if denial.pods.len() < EACH_MAX {
            denial.pods.extend(event.pod);
        }
        // The events come in the order of their times.
        (denial.destination, denial.target) = (destination, target);
        (denial.why, denial.remedy, denial.last) = (event.why, event.remedy, event.time);
    }

    /// Those of a namespace, the latest first.
    fn of(&mut self, namespace: &str) -> Vec<Denial> {
        let of_it = self.0.iter().filter(|((of, ..), _)| of == namespace);
        let mut denials: Vec<Denial> = of_it
            .map(|((_, _, reason, rules), denial)| Denial {
                reason: reason.clone(),
                rules: rules.clone(),
                ..denial.clone()
            })
            .collect();
        denials.sort_by(|one, other| other.last.cmp(&one.last));
        denials
    }
}

/// The buckets of the histogram of activations in a scrape, which counts all below a bound.
fn buckets(metrics: &str) -> Vec<Bucket> {
    let mut below = 0;
    let lines = metrics.lines().filter_map(|line| {
        let (bound, count) = line.strip_prefix(BUCKET)?.split_once("\"} ")?;
        let all: u64 = count.parse().ok()?;
        let count = all.saturating_sub(below);
        below = all;
        let le_s = bound.parse().ok().filter(|bound: &f64| bound.is_finite());
        Some(Bucket { le_s, count })
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_what_lies_between_their_bounds() {
        let scrape = "\
# TYPE dnsflow_activation_seconds histogram
dnsflow_activation_seconds_sum 0.1
dnsflow_activation_seconds_count 7
dnsflow_activation_seconds_bucket{le=\"0.0001\"} 1
dnsflow_activation_seconds_bucket{le=\"0.5\"} 6
dnsflow_activation_seconds_bucket{le=\"+Inf\"} 7
dnsflow_ready 1
";
        let read = buckets(scrape).into_iter();
        let read: Vec<_> = read.map(|bucket| (bucket.le_s, bucket.count)).collect();
        assert_eq!(read, [(Some(0.0001), 1), (Some(0.5), 5), (None, 1)]);
    }

    #[test]
    fn denials_for_one_reason_are_one() {
        let mut denials = Denials::default();
        let denied = |time: &str, pod: &str, name: Option<&str>, target: &str| Event {
            time: time.to_owned(),
            namespace: Some("ns1".to_owned()),
            pod: Some(pod.to_owned()),
            name: name.map(str::to_owned),
            target: Some(target.to_owned()),
            reason: Some(dnsflow_core::ask::view::Reason::DeniedByRule),
            rules: vec![4],
            ..Event::default()
        };
        for event in [
            denied("1", "a", Some("www.example.org"), "203.0.113.1:80"),
            denied("2", "a", None, "203.0.113.9:80"),
            denied("3", "b", Some("www.example.org"), "203.0.113.2:80"),
            Event::default(),
        ] {
            denials.take(event);
        }
        let of_it = denials.of("ns1").into_iter();
        let of_it: Vec<_> = of_it
            .map(|one| (one.destination, one.target, one.count, one.pods.len()))
            .collect();
        let one = |destination: &str, target: &str, count, pods| {
            (destination.to_owned(), target.to_owned(), count, pods)
        };
        assert_eq!(
            of_it,
            [
                one("www.example.org", "203.0.113.2:80", 2, 2),
                one("203.0.113.9:80", "203.0.113.9:80", 1, 1)
            ]
        );
        assert!(denials.of("ns2").is_empty());
    }
}
