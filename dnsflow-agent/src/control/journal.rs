//! What happened lately, for people who ask: the agent's reports as events.
//!
//! The hot thread never waits for the journal: a report that finds no room is counted instead.

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::SystemTime,
};

use dnsflow_core::{report::Report, view};
use serde::{Deserialize, Serialize};
use tokio::sync::{broadcast, mpsc};

use super::rfc3339;

/// Events that are kept. At 300 bytes each, which is usual, they take 1.2 MB.
pub const EVENTS_MAX: usize = 4096;
/// Reports that wait to become events.
const REPORTS_MAX: usize = 1024;
/// Events that wait for a slow client; then it misses some, and is told how many.
const BEHIND_MAX: usize = 1024;

/// Something that happened.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Event {
    /// When, as RFC 3339 writes it.
    pub time: String,
    /// What: a stable word.
    pub event: String,
    /// The namespace that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pod that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The name that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The addresses that it concerns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// The rules that it concerns, by their index in `spec.egress`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<u32>,
    /// From the capture of the answer to the flows in force, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation_us: Option<u64>,
    /// What else there is to say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

/// The hot thread's end.
#[derive(Debug)]
pub struct Pen {
    reports: mpsc::Sender<(SystemTime, Report)>,
    lost: Arc<AtomicU64>,
}

/// The last events, and those to come.
#[derive(Debug)]
pub struct Journal {
    kept: Mutex<VecDeque<Arc<Event>>>,
    live: broadcast::Sender<Arc<Event>>,
    lost: Arc<AtomicU64>,
}

/// The reports that are to be written into the journal.
pub type Reports = mpsc::Receiver<(SystemTime, Report)>;

/// An empty journal, with what writes into it.
pub fn journal() -> (Pen, Arc<Journal>, Reports) {
    let (reports, receiver) = mpsc::channel(REPORTS_MAX);
    let lost = Arc::<AtomicU64>::default();
    let journal = Journal {
        kept: Mutex::default(),
        live: broadcast::channel(BEHIND_MAX).0,
        lost: Arc::clone(&lost),
    };
    (Pen { reports, lost }, Arc::new(journal), receiver)
}

impl Pen {
    /// Hands over a report.
    pub fn note(&self, report: Report) {
        if self.reports.try_send((SystemTime::now(), report)).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }
}

impl Journal {
    /// Writes what comes, as long as the hot thread is there.
    pub async fn write(&self, mut reports: Reports) {
        while let Some((time, report)) = reports.recv().await {
            self.add(event(time, report));
        }
    }

    fn add(&self, event: Event) {
        let event = Arc::new(event);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == EVENTS_MAX {
            kept.pop_front();
        }
        kept.push_back(Arc::clone(&event));
        // Nobody may listen. Under the lock, so that no event is in both or in neither.
        let _listeners = self.live.send(event);
    }

    /// The last events, at most `last` of them, the oldest first; and those to come.
    pub fn read(&self, last: usize) -> (Vec<Arc<Event>>, broadcast::Receiver<Arc<Event>>) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let skipped = kept.len().saturating_sub(last);
        let events = kept.iter().skip(skipped).cloned().collect();
        (events, self.live.subscribe())
    }

    /// How many reports found no room.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

/// A report as an event.
fn event(time: SystemTime, report: Report) -> Event {
    let base = |event: &str| Event {
        time: rfc3339(time),
        event: event.to_owned(),
        ..Event::default()
    };
    let of_port = |event: &str, port: &str| {
        let (namespace, pod) = view::pod_of_port(port);
        Event {
            namespace: Some(namespace.to_owned()),
            pod: Some(pod.to_owned()),
            ..base(event)
        }
    };
    let telling = |event: &str, text: String| Event {
        text,
        ..base(event)
    };
    match report {
        Report::Opened {
            port,
            name,
            addresses,
            rules,
            activation,
            ..
        } => Event {
            name: Some(name.to_string()),
            addresses,
            rules,
            activation_us: u64::try_from(activation.as_micros()).ok(),
            ..of_port("opened", &port)
        },
        Report::AddressRefused {
            port,
            name,
            address,
            reason,
        } => Event {
            name: Some(name.to_string()),
            addresses: vec![address],
            text: format!("never opened: {reason}"),
            ..of_port("address_refused", &port)
        },
        Report::LimitReached {
            port, limit, max, ..
        } => Event {
            text: format!("{limit} (now {max})"),
            ..of_port("limit_reached", &port)
        },
        Report::PortNotTrusted { port, reason } => Event {
            text: view::not_trusted_text(&reason).to_owned(),
            ..of_port("port_not_trusted", &port)
        },
        Report::Problems {
            namespace,
            problems,
            news,
        } => {
            let texts = problems.iter().filter(|(rule, _)| news.contains(rule));
            let texts: Vec<_> = texts
                .map(|(rule, (text, _))| format!("rule {rule}: {text}"))
                .collect();
            Event {
                namespace: Some(namespace),
                rules: problems.keys().copied().collect(),
                text: match problems.is_empty() {
                    true => "all rules are in force".to_owned(),
                    false => texts.join("; "),
                },
                ..base("rule_problems")
            }
        }
        Report::Ready {
            attached,
            firewalls,
            flows,
        } => telling(
            "ready",
            format!("{attached} interfaces, {firewalls} EgressFirewalls, {flows} flows"),
        ),
        Report::ClusterNetworks { networks, left_out } => telling(
            "cluster_networks",
            format!(
                "{} networks are never opened, {left_out} have no room",
                networks.len()
            ),
        ),
        Report::AllowedAnyway(networks) => telling(
            "allowed_anyway",
            format!("--allow-answers opens {} networks", networks.len()),
        ),
        Report::ResolverCovered { resolver, by } => {
            let by: Vec<_> = by.into_iter().collect();
            let text = format!("{} may answer at the address of {resolver}", by.join(", "));
            telling("resolver_covered", text)
        }
        Report::ForeignFlow {
            table,
            priority,
            cookie,
        } => telling(
            "foreign_flow",
            format!("table {table}, priority {priority}, cookie {cookie:#x}"),
        ),
        Report::Trusting(resolvers) => {
            let resolvers: Vec<_> = resolvers.iter().map(ToString::to_string).collect();
            telling("resolvers", format!("trusted: {}", resolvers.join(", ")))
        }
        Report::Restored { flows } => telling("flows_restored", format!("{flows} flows")),
        Report::Unblocked {
            connections,
            failed,
        } => telling(
            "connections_unblocked",
            format!("{connections} connections, {failed} could not be"),
        ),
        Report::Resynced {
            added,
            removed,
            adopted,
        } => telling(
            "flows_resynced",
            format!("{added} were missing, {removed} too many, {adopted} adopted"),
        ),
        Report::FlowsRefused { reason } => telling("flows_refused", reason),
        Report::NotAttached { interface, reason } => {
            telling("not_attached", format!("{interface}: {reason}"))
        }
    }
}

#[cfg(test)]
mod tests;
