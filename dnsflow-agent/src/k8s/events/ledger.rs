//! What is to be said, what has been said, and when the next word may be. No clock and no socket:
//! time is handed in.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use dnsflow_core::Timestamp;

use super::{Notice, PodRef};

/// At most this many things are remembered. Beyond, the namespace with most of them gives one up.
pub const ENTRIES_MAX: usize = 1024;
/// At most this many of one namespace are remembered.
pub const ENTRIES_PER_NAMESPACE_MAX: usize = 64;
/// What lasts is said again after this long: an API server forgets Events after an hour
/// (kube-apiserver, `--event-ttl`).
pub const REPEAT: Duration = Duration::from_secs(3600);
/// At most this many Events are created at once, and as many of denied connections ...
pub const BURST: u32 = 5;
/// ... and one more in each such time.
pub const PAUSE: Duration = Duration::from_secs(60);
/// The wait after an attempt that failed; it doubles from one to the next.
pub const RETRY_MIN: Duration = Duration::from_secs(5);
/// The longest wait after an attempt that failed or was refused.
pub const RETRY_MAX: Duration = Duration::from_secs(300);
/// So many refusals, the last of which says that there is no such namespace, end what was to be said of its Pods.
pub const REFUSALS_MAX: u32 = 3;

/// What an entry is about.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum About {
    /// A rule.
    Rule(u32),
    /// A name or a pod has reached a limit: not all of its addresses are open.
    Name(String),
    /// A connection is denied. Of all in a namespace, the first of an hour is told.
    Denials,
    /// The TC programs cannot be attached to the interface of a Pod.
    Pod(PodRef),
}

/// An Event to be created.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Posting {
    /// The namespace of what it is about.
    pub namespace: String,
    /// What it is about.
    about: About,
    /// What to say.
    pub note: String,
    /// `reason` of the Event.
    pub reason: &'static str,
}

impl Posting {
    /// The Pod that it is about; none where that is an EgressFirewall.
    pub fn pod(&self) -> Option<&PodRef> {
        match &self.about {
            About::Pod(pod) => Some(pod),
            About::Rule(_) | About::Name(_) | About::Denials => None,
        }
    }

    /// The same for the same words, on every node and in every release of Rust (FNV-1a). Of denied
    /// connections, the same whatever the words: while the API server has an Event about one of them, it
    /// takes no other.
    pub fn hash(&self) -> u64 {
        let about = match &self.about {
            About::Rule(_) | About::Name(_) => &self.note,
            About::Denials => self.reason,
            // Another Pod of the same name has another UID.
            About::Pod(pod) => pod.uid.as_ref().unwrap_or(&pod.name),
        };
        let text = format!("{}\n{about}", self.namespace);
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }
}

/// What became of a posting.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The Event was created.
    Created,
    /// There is such an Event already, or nothing to say it of.
    Known,
    /// The API server takes no Event in this namespace (403): it is terminating, or has a quota.
    Refused,
    /// There is no such namespace (404).
    NoNamespace,
    /// None of these, as without an answer: try again.
    Failed,
}

#[derive(Debug)]
struct Entry {
    note: String,
    reason: &'static str,
    due: Timestamp,
}

/// Everything that lasts, and when it is to be said (again).
#[derive(Debug, Default)]
pub struct Ledger {
    entries: BTreeMap<(String, About), Entry>,
    /// When denied connections were last told of, by namespace.
    denied: BTreeMap<String, Timestamp>,
    /// The turns of Events about denied connections, which are no fault: they never delay others.
    of_denials: Turns,
    of_others: Turns,
}

/// The turns of one namespace.
#[derive(Debug, Default)]
struct Turn {
    /// When the last attempt ended, whatever came of it.
    last: Timestamp,
    /// How many attempts were refused since an Event was created or known.
    refusals: u32,
    /// After a refusal, no attempt before this.
    not_before: Timestamp,
}

impl Turn {
    /// The API server has refused an Event.
    fn refused(&mut self, now: Timestamp) {
        let doubled = 1 << self.refusals.min(8);
        self.not_before = now + (PAUSE * doubled).min(RETRY_MAX);
        self.refusals = self.refusals.saturating_add(1);
    }
}

/// Which namespace is next, and when the next Event may be created.
#[derive(Debug)]
struct Turns {
    /// Those of the namespaces that have had one in the last [`REPEAT`], or have had one and have entries.
    of_namespaces: BTreeMap<String, Turn>,
    /// How many Events may be created at once, and since when one more is on its way.
    tokens: u32,
    refill_from: Timestamp,
    /// After a failure, no attempt before this.
    not_before: Timestamp,
    retry: Duration,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            of_namespaces: BTreeMap::new(),
            tokens: BURST,
            refill_from: Timestamp::default(),
            not_before: Timestamp::default(),
            retry: RETRY_MIN,
        }
    }
}

impl Turns {
    /// When the next Event of a namespace may be created.
    fn next(&self, namespace: &str) -> Timestamp {
        let turn = self.of_namespaces.get(namespace);
        let not_before = turn.map_or(self.not_before, |turn| turn.not_before.max(self.not_before));
        match self.tokens {
            0 => not_before.max(self.refill_from + PAUSE),
            _ => not_before,
        }
    }

    /// The namespace that has had its turn longest ago comes first.
    fn last_of(&self, namespace: &str) -> Timestamp {
        let turn = self.of_namespaces.get(namespace);
        turn.map(|turn| turn.last).unwrap_or_default()
    }

    /// An Event is about to be created.
    fn spend(&mut self, now: Timestamp) {
        while self.tokens < BURST && now.since(self.refill_from) >= PAUSE {
            self.tokens += 1;
            self.refill_from = self.refill_from + PAUSE;
        }
        if self.tokens == BURST {
            self.refill_from = now;
        }
        self.tokens = self.tokens.saturating_sub(1);
    }

    /// The API server has not answered as it should: others wait, too.
    fn failed(&mut self, now: Timestamp) {
        self.tokens = (self.tokens + 1).min(BURST);
        self.not_before = now + self.retry;
        self.retry = (self.retry * 2).min(RETRY_MAX);
    }

    /// A namespace has had its turn. Those in `waiting` have entries.
    fn took(&mut self, namespace: &str, waiting: &BTreeSet<String>, now: Timestamp) -> &mut Turn {
        self.of_namespaces
            .retain(|one, turn| now.since(turn.last) < REPEAT || waiting.contains(one));
        let turn = self.of_namespaces.entry(namespace.to_owned()).or_default();
        turn.last = now;
        turn
    }
}

impl Ledger {
    /// Takes a notice; what is new in it is due after `delay`. Returns how much of it did not fit.
    pub fn take(&mut self, notice: Notice, now: Timestamp, delay: Duration) -> u64 {
        let due = now + delay;
        match notice {
            Notice::Rules {
                namespace,
                problems,
            } => {
                self.entries.retain(|(other, about), _| match about {
                    About::Rule(rule) => *other != namespace || problems.contains_key(rule),
                    About::Name(_) | About::Denials | About::Pod(_) => true,
                });
                let problems = problems.into_iter();
                problems
                    .map(|(rule, (problem, in_force))| {
                        let entry = Entry {
                            note: format!("rule {rule}: {problem}"),
                            reason: if in_force {
                                "RuleCaveat"
                            } else {
                                "RuleNotInForce"
                            },
                            due,
                        };
                        self.add((namespace.clone(), About::Rule(rule)), entry)
                    })
                    .sum()
            }
            Notice::One {
                namespace,
                about,
                reason,
                note,
            } => {
                let key = (namespace, about);
                if key.1 == About::Denials {
                    self.denied.retain(|_, told| now.since(*told) < REPEAT);
                    if self.denied.contains_key(&key.0) || self.entries.contains_key(&key) {
                        return 0;
                    }
                }
                self.add(key, Entry { note, reason, due })
            }
        }
    }

    fn add(&mut self, key: (String, About), new: Entry) -> u64 {
        let known = self.entries.get(&key);
        if known.is_some_and(|entry| entry.note == new.note) {
            return 0;
        }
        let mut left_out = 0;
        if known.is_none() {
            let of_this = self.count_of(&key.0);
            if of_this >= ENTRIES_PER_NAMESPACE_MAX {
                return 1;
            }
            if self.entries.len() >= ENTRIES_MAX {
                match self.namespace_with_most() {
                    Some(most) if self.count_of(&most) > of_this => self.give_up_last(&most),
                    _ => return 1,
                }
                left_out = 1;
            }
        }
        self.entries.insert(key, new);
        left_out
    }

    fn count_of(&self, namespace: &str) -> usize {
        let namespaces = self.entries.keys().map(|(namespace, _)| namespace);
        namespaces.filter(|one| *one == namespace).count()
    }

    fn namespace_with_most(&self) -> Option<String> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for (namespace, _) in self.entries.keys() {
            *counts.entry(namespace).or_default() += 1;
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        most.map(|(namespace, _)| namespace.to_owned())
    }

    /// Gives up what of a namespace is due last.
    fn give_up_last(&mut self, namespace: &str) {
        let of_this = self.entries.iter().filter(|((one, _), _)| one == namespace);
        let last = of_this.max_by_key(|(_, entry)| entry.due);
        if let Some(key) = last.map(|(key, _)| key.clone()) {
            self.entries.remove(&key);
        }
    }

    fn turns(&self, about: &About) -> &Turns {
        match about {
            About::Denials => &self.of_denials,
            About::Rule(_) | About::Name(_) | About::Pod(_) => &self.of_others,
        }
    }

    fn turns_mut(&mut self, about: &About) -> &mut Turns {
        match about {
            About::Denials => &mut self.of_denials,
            About::Rule(_) | About::Name(_) | About::Pod(_) => &mut self.of_others,
        }
    }

    /// When an entry may be said.
    fn may_be_said(&self, namespace: &str, about: &About, entry: &Entry) -> Timestamp {
        let turn = self.turns(about).next(namespace);
        entry.due.max(turn)
    }

    /// When [`poll`](Self::poll) has something.
    pub fn next_due(&self) -> Option<Timestamp> {
        let entries = self.entries.iter();
        let due =
            entries.map(|((namespace, about), entry)| self.may_be_said(namespace, about, entry));
        due.min()
    }

    /// The next Event to be created, if it is time for one. [`done`](Self::done) must follow.
    pub fn poll(&mut self, now: Timestamp) -> Option<Posting> {
        let due = self.entries.iter();
        let due = due
            .filter(|((namespace, about), entry)| self.may_be_said(namespace, about, entry) <= now);
        // Namespaces take turns: what many rules or pods of one have to say is not before the others.
        let next = due.min_by_key(|((namespace, about), entry)| {
            let last = self.turns(about).last_of(namespace);
            (*about == About::Denials, last, entry.due)
        });
        let ((namespace, about), entry) = next?;
        let posting = Posting {
            namespace: namespace.clone(),
            about: about.clone(),
            note: entry.note.clone(),
            reason: entry.reason,
        };
        self.turns_mut(&posting.about).spend(now);
        Some(posting)
    }

    /// What became of it. Returns how much is given up.
    pub fn done(&mut self, posting: &Posting, outcome: Outcome, now: Timestamp) -> u64 {
        let Posting {
            namespace, about, ..
        } = posting;
        let waiting = self.entries.keys().map(|(namespace, _)| namespace.clone());
        let waiting: BTreeSet<String> = waiting.collect();
        let turns = self.turns_mut(about);
        match outcome {
            Outcome::Failed => turns.failed(now),
            Outcome::Created | Outcome::Known | Outcome::Refused | Outcome::NoNamespace => {
                turns.retry = RETRY_MIN;
            }
        }
        // Also a turn without success is one: what cannot be said keeps nothing else away.
        let turn = turns.took(namespace, &waiting, now);
        match outcome {
            Outcome::Failed => {}
            Outcome::Refused => turn.refused(now),
            Outcome::NoNamespace => {
                turn.refused(now);
                if turn.refusals >= REFUSALS_MAX {
                    return self.give_up_pods(namespace);
                }
            }
            Outcome::Created | Outcome::Known => {
                (turn.refusals, turn.not_before) = Default::default();
                self.said(posting, now);
            }
        }
        0
    }

    /// It was said, by this node or another one.
    fn said(&mut self, posting: &Posting, now: Timestamp) {
        let key = (posting.namespace.clone(), posting.about.clone());
        let known = self.entries.get(&key);
        let is_news = known.is_some_and(|entry| entry.note != posting.note);
        match &posting.about {
            // Meanwhile there is something else to say.
            About::Name(_) | About::Pod(_) | About::Rule(_) if is_news => {}
            // A limit is told again when it is met again, and so is an interface that fails again.
            About::Name(_) | About::Pod(_) => drop(self.entries.remove(&key)),
            About::Denials => {
                self.entries.remove(&key);
                self.denied.insert(key.0, now);
            }
            About::Rule(_) => {
                if let Some(entry) = self.entries.get_mut(&key) {
                    entry.due = now + REPEAT;
                }
            }
        }
    }

    /// Gives up what was to be said of the Pods of a namespace. Returns how much it is.
    fn give_up_pods(&mut self, namespace: &str) -> u64 {
        let before = self.entries.len();
        self.entries.retain(|(one, about), _| match about {
            About::Pod(_) => one != namespace,
            About::Rule(_) | About::Name(_) | About::Denials => true,
        });
        (before - self.entries.len()) as u64
    }
}

#[cfg(test)]
mod tests;
