//! What happened lately, for people who ask: the agent's reports, as events.
//!
//! The hot thread and the edge of denied connections write reports into a ring, and wake nobody. Whoever
//! reads turns them into events. The hot thread never waits: a report of it that comes while somebody else
//! reads or writes is counted instead.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Mutex, PoisonError, TryLockError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use dnsflow_core::{
    ask::view,
    io::report::{NewProblems, PresentProblems, Report, Severity},
    ovn::rows::pod_of_port,
};

use crate::asking::{
    event::{Event, Kind},
    moment::rfc3339,
    print::numbers,
};

/// Reports that are kept. At 300 bytes each, which is usual, they take 1.2 MB.
pub const EVENTS_MAX: usize = 4096;
/// The bytes of the reports that are kept. A pod or an EgressFirewall can have reports of some kilobytes.
pub const BYTES_MAX: usize = 8 << 20;
/// Reports that are copied at once: nobody can write meanwhile.
const COPIED_AT_ONCE: usize = 64;
/// The bytes of reports behind which no further one is copied at once.
const COPIED_BYTES_AT_ONCE: usize = 64 << 10;

/// The last reports.
#[derive(Debug, Default)]
pub struct Journal {
    kept: Mutex<Kept>,
    lost: AtomicU64,
}

#[derive(Debug, Default)]
struct Kept {
    /// By their numbers.
    reports: BTreeMap<u64, (SystemTime, Report)>,
    /// What there is of each pod, of the EgressFirewall of each namespace, and of the agent itself.
    owners: HashMap<Owner, OfOwner>,
    /// The bytes that all take.
    bytes: usize,
    /// The number of the report that comes next; the first one had number 0.
    next: u64,
}

/// Whose a report is: the name of a port, which has an underscore, or of a namespace, which has none; `None` for the
/// agent's own.
type Owner = Option<String>;

#[derive(Debug, Default)]
struct OfOwner {
    numbers: VecDeque<u64>,
    bytes: usize,
}

/// What a reader has not read.
#[derive(Debug, Default)]
pub struct Unread {
    /// Reports that were dropped before this reader came to them.
    pub missed: u64,
    /// The next events, the oldest first; none at the end of the journal.
    pub events: Vec<Event>,
    /// The number to go on with.
    pub next: u64,
}

impl Kept {
    /// Adds a report. If there is no room, the oldest ones go of whoever has most: a pod that resolves without end
    /// pushes out its own.
    fn push(&mut self, report: Report) {
        if self.reports.len() == EVENTS_MAX {
            self.drop_one(|of| of.numbers.len());
        }
        let size = report.size();
        let of_owner = self.owners.entry(owner(&report)).or_default();
        of_owner.numbers.push_back(self.next);
        of_owner.bytes += size;
        self.bytes += size;
        self.reports.insert(self.next, (SystemTime::now(), report));
        self.next += 1;
        while self.bytes > BYTES_MAX {
            self.drop_one(|of| of.bytes);
        }
    }

    /// Drops the oldest report of the one for whom `size` is largest; of several, of the one whose report is oldest.
    fn drop_one(&mut self, size: impl Fn(&OfOwner) -> usize) {
        let Some((_, of_owner)) = self
            .owners
            .iter_mut()
            .max_by_key(|(_, of)| (size(of), Reverse(of.numbers.front().copied())))
        else {
            return;
        };
        let oldest = of_owner.numbers.pop_front();
        let Some((_, report)) = oldest.and_then(|oldest| self.reports.remove(&oldest)) else {
            return;
        };
        let size = report.size();
        of_owner.bytes -= size;
        self.bytes -= size;
        if of_owner.numbers.is_empty() {
            self.owners.remove(&owner(&report));
        }
    }
}

fn owner(report: &Report) -> Owner {
    match report {
        Report::Opened { port, .. }
        | Report::WouldOpen { port, .. }
        | Report::Closed { port, .. }
        | Report::AddressRefused { port, .. }
        | Report::LimitReached { port, .. }
        | Report::PortNotTrusted { port, .. }
        | Report::NotAttached { port, .. } => Some(port.clone()),
        Report::Denied(denied) => Some(denied.port.clone()),
        Report::Problems { namespace, .. } => Some(namespace.clone()),
        Report::Ready { .. }
        | Report::ClusterNetworks { .. }
        | Report::AllowedAnyway(_)
        | Report::ResolverCovered { .. }
        | Report::LoadBalancersUnread(_)
        | Report::MarksEndNowhere
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

impl Journal {
    /// Takes a report, once nobody else reads or writes.
    pub fn note(&self, report: Report) {
        let kept = self.kept.lock();
        kept.unwrap_or_else(PoisonError::into_inner).push(report);
    }

    /// Takes a report of the hot thread, which waits for nobody.
    pub fn try_note(&self, report: Report) {
        match self.kept.try_lock() {
            Ok(mut kept) => kept.push(report),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().push(report),
            Err(TryLockError::WouldBlock) => {
                self.lost.fetch_add(1, Relaxed);
            }
        }
    }

    /// The number of the report that comes next.
    pub fn next(&self) -> u64 {
        let kept = self.kept.lock();
        kept.unwrap_or_else(PoisonError::into_inner).next
    }

    /// The number of the first report that is no older than this.
    pub fn first_within(&self, age: Duration) -> u64 {
        // Before the clock's first moment, nothing was reported.
        let from = SystemTime::now().checked_sub(age);
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let younger = kept.reports.iter().rev();
        let younger = younger.take_while(|(_, (time, _))| from.is_none_or(|from| *time >= from));
        younger.last().map_or(kept.next, |(number, _)| *number)
    }

    /// Some events from the report with this number on.
    pub fn read(&self, from: u64) -> Unread {
        let (next, reports) = {
            let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let mut bytes = 0;
            let mut next = kept.next.max(from);
            let mut reports = Vec::new();
            for (number, (time, report)) in kept.reports.range(from..) {
                if reports.len() == COPIED_AT_ONCE || bytes >= COPIED_BYTES_AT_ONCE {
                    next = *number;
                    break;
                }
                bytes += report.size();
                reports.push((*time, report.clone()));
            }
            (next, reports)
        };
        Unread {
            missed: next - from - reports.len() as u64,
            next,
            events: reports
                .into_iter()
                .map(|(time, report)| event(time, report))
                .collect(),
        }
    }

    /// How many reports of the hot thread came while somebody else read or wrote.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

/// A report as an event.
pub(crate) fn event(time: SystemTime, report: Report) -> Event {
    let base = |kind: Kind| Event {
        time: rfc3339(time),
        event: kind.word(),
        ..Event::default()
    };
    let of_port = |kind: Kind, port: &str| {
        let (namespace, pod) = pod_of_port(port);
        Event {
            namespace: Some(namespace.to_owned()),
            pod: Some(pod.to_owned()),
            ..base(kind)
        }
    };
    let telling = |kind: Kind, text: String| Event { text, ..base(kind) };
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
            activation_us: activation.and_then(|time| u64::try_from(time.as_micros()).ok()),
            ..of_port(Kind::Opened, &port)
        },
        Report::WouldOpen {
            port,
            name,
            addresses,
            rules,
        } => Event {
            name: Some(name.to_string()),
            addresses,
            rules,
            ..of_port(Kind::WouldOpen, &port)
        },
        Report::Denied(denied) => {
            let mut told: Vec<_> = denied.names.iter().map(ToString::to_string).collect();
            if denied.names_left_out > 0 {
                told.push(format!("{} older names", denied.names_left_out));
            }
            Event {
                name: denied.names.first().map(|told| told.name.to_string()),
                addresses: vec![denied.attempt.address],
                target: Some(view::target_text(&denied.attempt)),
                reason: Some(denied.reason),
                why: Some(denied.text.clone()).filter(|text| !text.is_empty()),
                remedy: denied.remedy.clone(),
                rules: denied.rule.into_iter().collect(),
                text: match told.is_empty() {
                    true => denied.to_string(),
                    false => format!("{}; {denied}", told.join(", ")),
                },
                ..of_port(Kind::Denied, &denied.port)
            }
        }
        Report::Closed {
            namespace: _,
            port,
            name,
            addresses,
            left_out,
            rule,
        } => Event {
            name: name.map(|name| name.to_string()),
            addresses,
            rules: rule.into_iter().collect(),
            text: closed_text(rule, left_out),
            ..of_port(Kind::Closed, &port)
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
            ..of_port(Kind::AddressRefused, &port)
        },
        Report::LimitReached {
            port, limit, max, ..
        } => Event {
            text: format!("{limit} (now {max})"),
            ..of_port(Kind::LimitReached, &port)
        },
        Report::PortNotTrusted { port, reason } => Event {
            text: view::not_trusted_text(&reason).to_owned(),
            ..of_port(Kind::PortNotTrusted, &port)
        },
        Report::Problems {
            namespace,
            news,
            over,
            present,
        } => {
            let text = problems_text(&news, &over, &present);
            let mut rules: Vec<u32> = news.values().flat_map(NewProblems::rules).collect();
            rules.sort_unstable();
            Event {
                namespace: Some(namespace),
                rules,
                text,
                ..base(Kind::RuleProblems)
            }
        }
        Report::Ready {
            attached,
            firewalls,
            flows,
        } => telling(
            Kind::Ready,
            format!("{attached} interfaces, {firewalls} EgressFirewalls, {flows} flows"),
        ),
        Report::ClusterNetworks { networks, left_out } => telling(
            Kind::ClusterNetworks,
            format!(
                "{} networks are never opened, {left_out} have no room",
                networks.len()
            ),
        ),
        Report::AllowedAnyway(networks) => telling(
            Kind::AllowedAnyway,
            format!("--allow-answers opens {} networks", networks.len()),
        ),
        Report::ResolverCovered { resolver, by } => {
            let by: Vec<_> = by.into_iter().collect();
            let text = format!("{} may answer at the address of {resolver}", by.join(", "));
            telling(Kind::ResolverCovered, text)
        }
        Report::TableTooLarge(table) => telling(Kind::TableTooLarge, table.to_string()),
        Report::TableReadAgain { database, table } => {
            telling(Kind::TableReadAgain, format!("{table} of {database}"))
        }
        Report::LoadBalancersUnread(are_unread) => telling(
            Kind::LoadBalancersUnread,
            match are_unread {
                true => "some load balancers cannot be read: addresses are opened by flows",
                false => "all load balancers are read: addresses are opened by marks again",
            }
            .to_owned(),
        ),
        Report::MarksEndNowhere => telling(
            Kind::MarksEndNowhere,
            "OVN has no stage ls_out_check_port_sec".to_owned(),
        ),
        Report::ForeignFlow {
            table,
            priority,
            cookie,
        } => telling(
            Kind::ForeignFlow,
            format!("table {table}, priority {priority}, cookie {cookie:#x}"),
        ),
        Report::Trusting(resolvers) => {
            let resolvers: Vec<_> = resolvers.iter().map(ToString::to_string).collect();
            telling(
                Kind::Resolvers,
                format!("trusted: {}", resolvers.join(", ")),
            )
        }
        Report::Restored { flows } => telling(Kind::FlowsRestored, format!("{flows} flows")),
        Report::Unblocked {
            connections,
            failed,
        } => telling(
            Kind::ConnectionsUnblocked,
            format!("{connections} connections, {failed} could not be"),
        ),
        Report::Resynced { added, removed } => telling(
            Kind::FlowsResynced,
            format!("{added} were missing, {removed} too many"),
        ),
        Report::FlowsRefused { reason } => telling(Kind::FlowsRefused, reason),
        Report::NotAttached {
            port,
            pod_uid: _,
            interface,
            reason,
        } => Event {
            text: format!("{interface}: {reason}"),
            ..of_port(Kind::NotAttached, &port)
        },
    }
}

/// Why an edit has closed addresses.
fn closed_text(rule: Option<u32>, left_out: usize) -> String {
    match (rule, left_out) {
        (None, left_out @ 1..) => format!("{left_out} more addresses in use, by the same edit"),
        (Some(rule), _) => format!("in use, and rule {rule} denies it now"),
        (None, 0) => "in use, and no rule allows it any more".to_owned(),
    }
}

/// The new problems with their rules, the rules whose problems are over, and the number of the problems that stay.
fn problems_text(
    news: &BTreeMap<Severity, NewProblems>,
    over: &[u32],
    present: &BTreeMap<Severity, PresentProblems>,
) -> String {
    if present.is_empty() {
        return "all rules are in force".to_owned();
    }
    let first: BTreeMap<&u32, &String> = news.values().flat_map(|new| &new.first).collect();
    let first = first
        .iter()
        .map(|(rule, text)| format!("rule {rule}: {text}"));
    let mut parts: Vec<String> = first.collect();
    let others = news.values().filter(|new| !new.others.is_empty());
    parts.extend(others.map(|new| {
        let like = new.first.keys().copied().last().unwrap_or_default();
        let others = numbers(&new.others);
        format!("rules {others} have problems of the same kind as rule {like}")
    }));
    if !over.is_empty() {
        let over = numbers(over);
        parts.push(format!("the former problems of rules {over} are over"));
    }
    let new: usize = news.values().map(NewProblems::count).sum();
    let all: usize = present.values().map(|present| present.count).sum();
    match all.saturating_sub(new) {
        0 => {}
        others => parts.push(format!("{others} other problems stay")),
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests;
