//! Names the denied connections of the pods, and remembers all, on the thread of the slow edges.
//!
//! The kernel tells of attempts to connect somewhere, and of answers that no rule mentions. The hot thread
//! is asked what becomes of a few attempts at a time; all else is done here. Nothing waits for it.

use std::{
    collections::BTreeMap,
    iter,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use dnsflow_core::{
    ask::{
        attempts::{AskedServer, Attempts, FailedAnswer, HeardAt},
        history::{ConnectionView, History, Place, Tried},
        view::Judged,
    },
    io::report::{Denied, Report},
    tools::counter_vec::CounterVec,
    values::{name::DomainName, verdict::DenialReason},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};
use tracing::warn;

use crate::{
    capture::{Aside, AsideRecord, Drained},
    clock::now,
    inquiries::Inquiries,
    journal::Journal,
    k8s::events::Reporter,
};

/// The wait from what has woken this thread until the ring buffer is read.
const TURN: Duration = Duration::from_millis(100);
/// How long an answer is unread at most that no connection and no question follows.
const UNREAD_MAX: Duration = Duration::from_secs(1);
/// Questions that wait for the next reading; others do without it.
const READINGS_MAX: usize = 16;
/// The longest wait for a reading.
pub const CATCH_UP_MAX: Duration = Duration::from_secs(1);
/// Records taken from the ring buffer in one turn: 5,120 a second, as 160 pods with nothing left of their
/// shares hand over.
const RECORDS_PER_TURN: usize = 512;
/// Attempts that the hot thread judges at a time: each takes some microseconds.
const JUDGED_AT_ONCE: usize = 4;
/// Pairs of namespace and rule that are counted by themselves; all further ones are counted together.
pub const RULES_COUNTED_MAX: usize = 256;
/// Of one namespace, so many: it leaves others room.
const RULES_OF_NAMESPACE_MAX: usize = RULES_COUNTED_MAX / 8;

/// Denied connections, counted.
#[derive(Clone, Debug, Default)]
pub struct DenialCounts(Arc<Mutex<Counts>>);

/// What is counted.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Counts {
    /// By the EgressFirewall's namespace, the index of the rule that denies, and why.
    pub by_rule: BTreeMap<(String, u32, DenialReason), u64>,
    /// Those for which there was no room in `by_rule`, or which no rule denies.
    pub others: CounterVec<DenialReason>,
    /// Those that were not reported because the pod has led to too many reports.
    pub reports_left_out: u64,
    /// Attempts that nobody has judged: the hot thread did not answer.
    pub not_judged: u64,
    /// Places that the history has forgotten within their hour: there was no room.
    pub places_forgotten: u64,
}

impl Counts {
    fn count(&mut self, denied: &Denied) {
        let counted = self.by_rule.keys();
        let of_this = counted.filter(|(namespace, ..)| *namespace == denied.namespace);
        let has_room =
            self.by_rule.len() < RULES_COUNTED_MAX && of_this.count() < RULES_OF_NAMESPACE_MAX;
        let reason = denied.reason.of_denial();
        let key = denied
            .rule
            .map(|rule| (denied.namespace.clone(), rule, reason));
        match key {
            Some(key) if has_room || self.by_rule.contains_key(&key) => {
                *self.by_rule.entry(key).or_default() += 1;
            }
            _ => self.others.count(reason),
        }
    }
}

impl DenialCounts {
    /// The counts of this moment.
    pub fn read(&self) -> Counts {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers that no rule mentions, and what was reported: for the thread that sees them and for those that
/// ask.
#[derive(Clone, Debug)]
pub struct Heard {
    attempts: Arc<Mutex<Attempts>>,
    readings: mpsc::Sender<oneshot::Sender<()>>,
}

/// Who waits until the thread has read what the kernel has told so far.
#[derive(Debug)]
pub struct Readings(mpsc::Receiver<oneshot::Sender<()>>);

impl Heard {
    /// With what was heard so far.
    pub fn new(attempts: Attempts) -> (Self, Readings) {
        let (sender, readings) = mpsc::channel(READINGS_MAX);
        let heard = Self {
            attempts: Arc::new(Mutex::new(attempts)),
            readings: sender,
        };
        (heard, Readings(readings))
    }

    /// Waits until the thread has read what the kernel has told so far. Otherwise the last answers and attempts are
    /// missing. A thread that is away, or has too much to do, keeps nobody waiting.
    pub async fn catch_up(&self) {
        let (sender, read) = oneshot::channel();
        if self.readings.try_send(sender).is_ok() {
            // An error says that the thread has read, or ends.
            let _: Result<Result<(), _>, _> = timeout(CATCH_UP_MAX, read).await;
        }
    }

    /// The names that led pods to an address, the newest first.
    pub fn at(&self, address: IpAddr) -> Vec<HeardAt> {
        self.lock().heard_at(address)
    }

    /// The addresses to which a name led pods, or the name with a search domain behind it, the newest first.
    pub fn of(&self, name: &DomainName) -> Vec<HeardAt> {
        self.lock().heard_of(name)
    }

    /// The errors that answered questions for a name.
    pub fn failed_for(&self, name: &DomainName) -> Vec<FailedAnswer> {
        self.lock().failed_for(name)
    }

    /// The DNS servers that a pod has asked and that were not trusted, the newest first.
    pub fn servers_asked(&self, ifindex: u32) -> Vec<AskedServer> {
        self.lock().servers_asked(ifindex)
    }

    fn lock(&self) -> MutexGuard<'_, Attempts> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Readings {
    /// Who waits by now.
    fn waiting(&mut self) -> impl Iterator<Item = oneshot::Sender<()>> {
        iter::from_fn(|| self.0.try_recv().ok())
    }
}

/// The connections of the last hour, for the thread that sees them and for those that ask.
#[derive(Clone, Debug)]
pub struct Connections(Arc<Mutex<History>>);

impl Connections {
    /// None is known yet.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(History::new(now()))))
    }

    /// The places where the pods of a namespace have connected to, or those of all namespaces.
    pub fn places(&self, namespace: Option<&str>) -> Vec<Place> {
        self.lock().places(namespace, now())
    }

    /// What was seen of some places.
    pub fn of(&self, places: &[Place]) -> Vec<ConnectionView> {
        self.lock().connections(places, now())
    }

    /// The time that is known of, and how many places were forgotten within it.
    pub fn extent(&self) -> (Duration, u64) {
        let history = self.lock();
        (history.known_for(now()), history.forgotten())
    }

    /// Remembers an attempt.
    pub(crate) fn note(&self, tried: Tried) {
        self.lock().note(tried, now());
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Connections {
    fn default() -> Self {
        Self::new()
    }
}

/// Where connections are told.
#[derive(Debug)]
pub(crate) struct Listeners {
    /// Writes a report into the log.
    pub(crate) log: fn(&Report),
    pub(crate) journal: Arc<Journal>,
    /// Kubernetes Events, where they are wanted.
    pub(crate) events: Option<Reporter>,
    pub(crate) counts: DenialCounts,
    pub(crate) connections: Connections,
}

/// Tells of denied connections, and remembers all, as long as the hot thread is there.
pub(crate) async fn watch(
    mut aside: Aside,
    (heard, mut readings): (Heard, Readings),
    inquiries: Inquiries,
    listeners: Listeners,
) {
    let mut waiting = Vec::new();
    loop {
        // An answer wakes nobody: one that no connection follows is read after a while, or when somebody asks. More
        // comes meanwhile. A wait behind the reading would end at once for each answer of that time.
        let turn = async {
            let read = timeout(UNREAD_MAX, aside.readable()).await;
            sleep(TURN).await;
            read
        };
        tokio::select! {
            read = turn => if let Ok(Err(error)) = read {
                warn!(%error, "denied connections are no longer reported");
                return;
            },
            Some(one) = readings.0.recv() => waiting.push(one),
        }
        waiting.extend(readings.waiting());
        let mut tried = Vec::new();
        let mut denied = Vec::new();
        let mut not_judged = 0;
        {
            let mut attempts = heard.lock();
            let drained = aside.drain(RECORDS_PER_TURN, |told| match told {
                AsideRecord::Answer(frame) => attempts.hear(frame, now()),
                AsideRecord::Attempt(attempt) => {
                    attempts.note_server(&attempt, now());
                    tried.push((attempt, attempts.heard(&attempt)));
                }
            });
            if drained == Drained::Empty {
                // The end of each is its message.
                waiting.clear();
            }
        }
        for some in tried.chunks(JUDGED_AT_ONCE) {
            let some = some.to_vec();
            let count = some.len();
            let judged = inquiries.ask(move |engine, now| {
                let view = engine.view();
                let judged = some
                    .iter()
                    .map(|(attempt, heard)| view.judge_attempt(attempt, heard, now));
                judged.collect::<Vec<_>>()
            });
            match judged.await {
                Some(judged) => judged.into_iter().for_each(|one| match one {
                    Judged::Denied(tried, told) => {
                        listeners.connections.note(*tried);
                        denied.push(told);
                    }
                    Judged::DeniedBehind(told) => denied.push(told),
                    Judged::Allowed(tried) => listeners.connections.note(*tried),
                    Judged::NotJudged => {}
                }),
                None => not_judged += count as u64,
            }
        }
        let (_, forgotten) = listeners.connections.extent();
        let mut attempts = heard.lock();
        let mut counts = listeners.counts.lock();
        for denied in denied {
            counts.count(&denied);
            if attempts.is_news(&denied, now()) {
                listeners.tell(Report::Denied(denied));
            }
        }
        attempts.forget_old(now());
        counts.not_judged += not_judged;
        counts.reports_left_out = attempts.left_out();
        counts.places_forgotten = forgotten;
    }
}

impl Listeners {
    fn tell(&self, report: Report) {
        if let Some(events) = &self.events {
            events.tell(&report);
        }
        (self.log)(&report);
        self.journal.note(report);
    }
}

#[cfg(test)]
mod tests;
