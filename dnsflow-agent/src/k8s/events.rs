//! Reports problems of an EgressFirewall, or of a Pod of this node, as Kubernetes Events.
//!
//! The engine's reports go into [`Reporter::tell`], which never waits; [`post`] creates the Events. It must never
//! make the agent wait, flood the API server from many nodes, or write to the EgressFirewall, which belongs to
//! ovn-kubernetes.
//!
//! An Event's name is a hash of its content. So of all nodes with the same problem one creates the Event, and the
//! others learn that it exists. Each node waits for a random part of [`SPREAD`] first. It creates at most
//! [`ledger::BURST`] Events at once, and one per [`ledger::PAUSE`] after that; as many beside them about denied connections.
//! An Event that the API server refuses counts as one, and keeps no other namespace's away.

pub mod ledger;

use std::{
    collections::{BTreeMap, hash_map::RandomState},
    hash::BuildHasher as _,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use dnsflow_core::{
    ask::view,
    io::report::{Denied, PresentProblems, Report, Severity},
    ovn::rows::pod_of_port,
    values::limits::{Limit, PROBLEM_TEXTS_MAX},
};
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff,
};
use kube::{Api, Client, Resource as _, api::PostParams};
use tokio::{
    sync::mpsc::{self, error::TrySendError},
    time::{sleep, timeout},
};

use self::ledger::{About, Ledger, Outcome, Posting};
use super::{
    client::{ClientOptions, chain, connect},
    convert::{self, Stored},
    egress_firewall::{EgressFirewall, NAME},
};
use crate::{causes::Causes, clock::now, node};

/// The nodes spread their Events about one change over this time.
pub const SPREAD: Duration = Duration::from_secs(30);
/// How long the API server may take for one answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// At most this many reports wait.
const NOTICES_MAX: usize = 256;
/// The longest note, in bytes; the API server takes 1024 (Kubernetes, `NoteLengthLimit` in
/// `pkg/apis/core/validation/events.go`).
const NOTE_BYTES_MAX: usize = 1000;
/// At most this many characters of what the API server says are logged.
const REASON_MAX: usize = 240;
/// At most this many characters of an object's name are in the name of an Event about it.
const EVENT_NAME_MAX: usize = 200;
/// `reportingController` of the Events.
const CONTROLLER: &str = "dnsflow.io/agent";

/// A notice about an EgressFirewall.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Notice {
    /// All problems of the rules; problems that are no longer in the list are over.
    Rules {
        /// Its namespace.
        namespace: String,
        /// By rule index: the text, and whether the rule is in force all the same.
        problems: BTreeMap<u32, (String, bool)>,
    },
    /// Something else, which is told again when it happens again.
    One {
        /// The namespace.
        namespace: String,
        /// What it is about.
        about: About,
        /// `reason` of the Event.
        reason: &'static str,
        /// What happened and what to do.
        note: String,
    },
}

/// A Pod of this node.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID, as ovn-kubernetes has written it beside the interface. `kubectl describe` finds an Event by
    /// it.
    pub uid: Option<String>,
}

impl Notice {
    /// The notice of a report, if people should read it beside the EgressFirewall.
    fn of(report: &Report) -> Option<Self> {
        match report {
            Report::Problems {
                namespace, present, ..
            } => Some(Self::Rules {
                namespace: namespace.clone(),
                problems: noted(present),
            }),
            Report::LimitReached {
                namespace,
                port,
                limit,
                max,
            } => {
                // The same words on every node, and the remedy first, because a note is cut at its end.
                let (name, note) = match limit {
                    Limit::AddressesOfName(name) => (
                        name.to_string(),
                        format!(
                            "a pod was told more than {max} addresses of a name, and not all are open; \
                             allow a cidrSelector, or raise --max-addresses-per-name: {name}"
                        ),
                    ),
                    Limit::AddressesOfPod => (
                        port.clone(),
                        format!(
                            "a pod was told more than {max} addresses, and not all are open; allow a \
                             cidrSelector, or raise --max-addresses-per-pod: {port}"
                        ),
                    ),
                    limit => (
                        format!("{port}: {limit}"),
                        format!("{limit} ({max}): {port}"),
                    ),
                };
                Some(Self::One {
                    namespace: namespace.clone(),
                    about: About::Name(name),
                    reason: "LimitReached",
                    note,
                })
            }
            Report::Denied(denied) => Some(Self::One {
                namespace: denied.namespace.clone(),
                about: About::Denials,
                reason: "ConnectionDenied",
                note: denied_note(denied),
            }),
            Report::NotAttached {
                port,
                pod_uid,
                interface: _,
                reason,
            } => {
                let (namespace, name) = pod_of_port(port);
                Some(Self::One {
                    namespace: namespace.to_owned(),
                    about: About::Pod(PodRef {
                        namespace: namespace.to_owned(),
                        name: name.to_owned(),
                        uid: pod_uid.clone(),
                    }),
                    reason: "NotAttached",
                    note: format!(
                        "names in the EgressFirewall may open nothing for this Pod: the TC programs \
                         cannot be attached to its interface (the agent tries again): {reason}"
                    ),
                })
            }
            Report::Ready { .. }
            | Report::Opened { .. }
            | Report::WouldOpen { .. }
            | Report::Closed { .. }
            | Report::AddressRefused { .. }
            | Report::ClusterNetworks { .. }
            | Report::PortNotTrusted { .. }
            | Report::AllowedAnyway(_)
            | Report::ResolverCovered { .. }
            | Report::MarksEndNowhere
            | Report::LoadBalancersUnread(_)
            | Report::TableTooLarge(_)
            | Report::TableReadAgain { .. }
            | Report::ForeignFlow { .. }
            | Report::Trusting(_)
            | Report::Restored { .. }
            | Report::Resynced { .. }
            | Report::FlowsRefused { .. }
            | Report::Unblocked { .. } => None,
        }
    }
}

/// The note of a denied connection: what is long stands at the end, which is cut.
fn denied_note(denied: &Denied) -> String {
    let (_, pod) = pod_of_port(&denied.port);
    let target = view::target_text(&denied.attempt);
    let name = denied.names.first();
    let name = name.map_or_else(String::new, |told| format!(" = {}", told.name));
    format!(
        "connections are denied (`dnsflow observe --event denied` lists them), such as {pod} to \
         {target}{name}: {denied}"
    )
}

/// The problems for Events: all, or the first of each kind if there are more than
/// [`ledger::BURST`].
fn noted(present: &BTreeMap<Severity, PresentProblems>) -> BTreeMap<u32, (String, bool)> {
    let mut noted = BTreeMap::new();
    // A waiting rule is no longer waiting before anybody could read the Event.
    for (severity, in_force) in [(Severity::NotInForce, false), (Severity::Caveat, true)] {
        let Some(PresentProblems { first, count }) = present.get(&severity) else {
            continue;
        };
        let mut first = first.iter();
        if *count <= ledger::BURST as usize {
            noted.extend(first.map(|(rule, problem)| (*rule, (problem.clone(), in_force))));
        } else if let Some((rule, problem)) = first.next() {
            let note = format!("(and others, which the agent's log names): {problem}");
            noted.insert(*rule, (note, in_force));
        }
    }
    noted
}

// A report has the texts of all problems that are told one by one.
const _: () = assert!(ledger::BURST as usize <= PROBLEM_TEXTS_MAX);

/// Counts of notices since the start.
#[derive(Debug, Default)]
pub struct EventCounters {
    /// Events that were created.
    pub created: AtomicU64,
    /// Events that another node had created.
    pub known: AtomicU64,
    /// Attempts that failed.
    pub failures: AtomicU64,
    /// Notices that were given up: too many waited, or a Pod's namespace is gone.
    pub dropped: AtomicU64,
}

/// Takes reports; cheap to clone.
#[derive(Clone, Debug)]
pub struct Reporter {
    notices: mpsc::Sender<Notice>,
    counters: Arc<EventCounters>,
}

/// The reports taken, for [`post`].
#[derive(Debug)]
pub struct Notices {
    notices: mpsc::Receiver<Notice>,
    counters: Arc<EventCounters>,
}

/// The two ends.
pub fn channel() -> (Reporter, Notices) {
    let (sender, notices) = mpsc::channel(NOTICES_MAX);
    let counters = Arc::<EventCounters>::default();
    let reporter = Reporter {
        notices: sender,
        counters: Arc::clone(&counters),
    };
    (reporter, Notices { notices, counters })
}

impl Reporter {
    /// Takes a report of the engine. Never waits: a report without room is dropped and counted.
    pub fn tell(&self, report: &Report) {
        if let Some(notice) = Notice::of(report) {
            self.notice(notice);
        }
    }

    /// Takes a notice, like [`tell`](Self::tell).
    pub fn notice(&self, notice: Notice) {
        match self.notices.try_send(notice) {
            // Closed if there is no cluster.
            Ok(()) | Err(TrySendError::Closed(_)) => {}
            Err(TrySendError::Full(_)) => {
                self.counters.dropped.fetch_add(1, Relaxed);
            }
        }
    }

    /// The counters.
    pub fn counters(&self) -> Arc<EventCounters> {
        Arc::clone(&self.counters)
    }
}

/// Creates Events until the channel of reports is closed. Each cause of failure is logged once; a
/// notice is tried again until it is over.
pub async fn post(options: ClientOptions, mut notices: Notices, spread: Duration) {
    let mut poster = Poster {
        options,
        client: None,
        instance: convert::shorten(&node::name(), 100),
        causes: Causes::default(),
    };
    let mut ledger = Ledger::default();
    loop {
        let due = ledger.next_due();
        let wait = async {
            match due {
                Some(due) => sleep(due.since(now())).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            notice = notices.notices.recv() => {
                let Some(notice) = notice else {
                    return;
                };
                let dropped = ledger.take(notice, now(), part_of(spread));
                notices.counters.dropped.fetch_add(dropped, Relaxed);
            }
            () = wait => {
                let Some(posting) = ledger.poll(now()) else {
                    continue;
                };
                let outcome = {
                    let mut posted = pin!(poster.post(&posting));
                    // Notices have a limit for each namespace only once they are taken. The API server may be slow.
                    loop {
                        tokio::select! {
                            outcome = &mut posted => break outcome,
                            Some(notice) = notices.notices.recv() => {
                                let dropped = ledger.take(notice, now(), part_of(spread));
                                notices.counters.dropped.fetch_add(dropped, Relaxed);
                            }
                        }
                    }
                };
                let counter = match outcome {
                    Outcome::Created => &notices.counters.created,
                    Outcome::Known => &notices.counters.known,
                    Outcome::Refused | Outcome::NoNamespace | Outcome::Failed => {
                        &notices.counters.failures
                    }
                };
                counter.fetch_add(1, Relaxed);
                let dropped = ledger.done(&posting, outcome, now());
                notices.counters.dropped.fetch_add(dropped, Relaxed);
            }
        }
    }
}

/// A random part of a time.
fn part_of(time: Duration) -> Duration {
    // The standard library seeds each hasher at random.
    let random = RandomState::new().hash_one(()) % 1024;
    time * u32::try_from(random).unwrap_or(0) / 1024
}

struct Poster {
    options: ClientOptions,
    client: Option<Client>,
    instance: String,
    causes: Causes<u16>,
}

impl Poster {
    async fn post(&mut self, posting: &Posting) -> Outcome {
        let posted = match timeout(PATIENCE, self.try_post(posting)).await {
            Ok(posted) => posted,
            Err(_) => {
                let cause = format!("no answer within {} s", PATIENCE.as_secs());
                Err((NO_ANSWER, cause))
            }
        };
        match posted {
            Ok(outcome) => {
                self.causes.end();
                outcome
            }
            Err((kind, cause)) => {
                // The credentials may be wrong: they are read again.
                self.client = None;
                if self.causes.is_news(kind) {
                    tracing::warn!(cause, "cannot create an Event; trying again");
                }
                match kind {
                    403 => Outcome::Refused,
                    404 => Outcome::NoNamespace,
                    _ => Outcome::Failed,
                }
            }
        }
    }

    /// Creates an Event. An error has the status code of the answer, or [`NO_ANSWER`].
    async fn try_post(&mut self, posting: &Posting) -> Result<Outcome, (u16, String)> {
        let failed = |error: &kube::Error| (kind(error), chain(error));
        let client = match &self.client {
            Some(client) => client.clone(),
            None => {
                let connected = connect(&self.options).await;
                let (client, _) = connected.map_err(|cause| (NO_ANSWER, cause))?;
                self.client.insert(client).clone()
            }
        };
        let namespace = &posting.namespace;
        let regarding = match posting.pod() {
            Some(pod) => of_pod(pod),
            None => {
                let firewalls = Api::<Stored>::namespaced(client.clone(), namespace);
                match firewalls.get(NAME).await {
                    Ok(firewall) => of_firewall(namespace, &firewall),
                    // The EgressFirewall is gone, or its whole kind.
                    Err(kube::Error::Api(status)) if status.code == 404 => {
                        return Ok(Outcome::Known);
                    }
                    Err(error) => return Err(failed(&error)),
                }
            }
        };
        let events = Api::<Event>::namespaced(client, namespace);
        let event = event(posting, regarding, &self.instance);
        match events.create(&PostParams::default(), &event).await {
            Ok(_) => Ok(Outcome::Created),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Outcome::Known),
            Err(kube::Error::Api(status)) if status.code == 403 => {
                let cause = format!(
                    "the Kubernetes API does not let dnsflow create events in events.k8s.io, as \
                     in deploy/base/rbac.yaml: {}",
                    convert::shorten(&status.message, REASON_MAX)
                );
                Err((status.code, cause))
            }
            Err(error) => Err(failed(&error)),
        }
    }
}

/// The kind of a failure without an answer of the API server.
const NO_ANSWER: u16 = 0;

/// The kind of a failure: two texts of one kind are one failure.
fn kind(error: &kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        _ => NO_ANSWER,
    }
}

/// The EgressFirewall of a namespace, for an Event about it.
fn of_firewall(namespace: &str, firewall: &Stored) -> ObjectReference {
    let metadata = firewall.meta();
    ObjectReference {
        api_version: Some(EgressFirewall::api_version(&()).into_owned()),
        kind: Some(EgressFirewall::kind(&()).into_owned()),
        namespace: Some(namespace.to_owned()),
        name: Some(NAME.into()),
        // `kubectl describe` finds the Event by this.
        uid: metadata.uid.clone(),
        resource_version: metadata.resource_version.clone(),
        ..ObjectReference::default()
    }
}

/// A Pod, for an Event about it. The Pod is not read: the agent has no right to, and needs none.
fn of_pod(pod: &PodRef) -> ObjectReference {
    let PodRef {
        namespace,
        name,
        uid,
    } = pod.clone();
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(namespace),
        name: Some(name),
        uid,
        ..ObjectReference::default()
    }
}

fn event(posting: &Posting, regarding: ObjectReference, instance: &str) -> Event {
    let name = regarding.name.as_deref().unwrap_or(NAME);
    // Names of objects have 253 characters at most. An Event's name begins with that of what it is about.
    let name: String = name.chars().take(EVENT_NAME_MAX).collect();
    let name = name.trim_end_matches(['.', '-']);
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{name}.dnsflow-{:016x}", posting.hash())),
            namespace: Some(posting.namespace.clone()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(jiff::Timestamp::now())),
        type_: Some("Warning".into()),
        reason: Some(posting.reason.into()),
        action: Some("Enforce".into()),
        note: Some(convert::shorten_to_bytes(&posting.note, NOTE_BYTES_MAX)),
        regarding: Some(regarding),
        reporting_controller: Some(CONTROLLER.into()),
        reporting_instance: Some(instance.into()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_problems_of_one_kind_the_first_is_noted() {
        let present = |rules: std::ops::RangeInclusive<u32>| PresentProblems {
            count: rules.clone().count(),
            first: rules.map(|rule| (rule, "bad".into())).collect(),
        };
        let problems = |caveats| {
            let by_effect = [
                (Severity::Waiting, present(0..=0)),
                (Severity::NotInForce, present(1..=1)),
                (Severity::Caveat, present(caveats)),
            ];
            noted(&by_effect.into())
        };
        let rules: Vec<u32> = problems(3..=7).into_keys().collect();
        assert_eq!(rules, [1, 3, 4, 5, 6, 7]);
        let many = problems(3..=8);
        let rules: Vec<u32> = many.keys().copied().collect();
        assert_eq!(rules, [1, 3]);
        let (note, in_force) = &many[&3];
        assert!(note.contains("others") && *in_force, "{note}");
    }
}
