use super::*;

const NONE: Duration = Duration::ZERO;

fn at(seconds: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(1_000_000 + seconds)
}

fn rules(namespace: &str, problems: &[(u32, &str)]) -> Notice {
    Notice::Rules {
        namespace: namespace.into(),
        problems: problems
            .iter()
            .map(|&(rule, problem)| (rule, (problem.to_owned(), false)))
            .collect(),
    }
}

/// What is said at this time, one after the other, all of it with success.
fn said(ledger: &mut Ledger, now: Timestamp) -> Vec<String> {
    std::iter::from_fn(|| {
        let posting = ledger.poll(now)?;
        ledger.done(&posting, Outcome::Created, now);
        Some(format!("{}: {}", posting.namespace, posting.note))
    })
    .collect()
}

#[test]
fn what_lasts_is_said_once_an_hour() {
    let mut ledger = Ledger::default();
    assert_eq!(ledger.next_due(), None);
    let notice = rules("ns1", &[(0, "bad"), (2, "worse")]);
    ledger.take(notice.clone(), at(0), Duration::from_secs(7));
    assert_eq!(ledger.next_due(), Some(at(7)));
    assert!(said(&mut ledger, at(6)).is_empty());
    assert_eq!(
        said(&mut ledger, at(7)),
        ["ns1: rule 0: bad", "ns1: rule 2: worse"]
    );
    // The same again is no news.
    ledger.take(notice, at(60), NONE);
    assert!(said(&mut ledger, at(3606)).is_empty());
    assert_eq!(said(&mut ledger, at(3607)).len(), 2);
}

#[test]
fn a_pod_is_told_of_once_until_its_interface_fails_again() {
    let notice = |uid: &str| Notice::One {
        namespace: "ns1".into(),
        about: About::Pod(PodRef {
            namespace: "ns1".into(),
            name: "web-0".into(),
            uid: Some(uid.into()),
        }),
        reason: "NotAttached",
        note: "no such device".into(),
    };
    let mut ledger = Ledger::default();
    ledger.take(notice("1"), at(0), NONE);
    ledger.take(notice("1"), at(0), NONE);
    // What is said of rules does not end it.
    ledger.take(rules("ns1", &[]), at(0), NONE);
    let first = ledger.poll(at(0)).expect("a posting");
    assert_eq!(first.pod().map(|pod| &*pod.name), Some("web-0"));
    ledger.done(&first, Outcome::Created, at(0));
    assert_eq!(ledger.poll(at(10_000)), None);
    ledger.take(notice("2"), at(10_000), NONE);
    let second = ledger.poll(at(10_000)).expect("a posting");
    assert_ne!(first.hash(), second.hash());
}

#[test]
fn what_changes_is_said_anew_and_what_is_over_no_more() {
    let mut ledger = Ledger::default();
    ledger.take(rules("ns1", &[(0, "bad"), (1, "bad")]), at(0), NONE);
    ledger.take(rules("ns2", &[(0, "bad")]), at(0), NONE);
    assert_eq!(said(&mut ledger, at(0)).len(), 3);
    ledger.take(rules("ns1", &[(0, "other")]), at(100), NONE);
    assert_eq!(said(&mut ledger, at(100)), ["ns1: rule 0: other"]);
    ledger.take(rules("ns1", &[]), at(200), NONE);
    assert_eq!(said(&mut ledger, at(10_000)), ["ns2: rule 0: bad"]);
}

/// The API server takes its time.
#[test]
fn what_changes_while_it_is_said_is_said_anew() {
    let mut ledger = Ledger::default();
    ledger.take(rules("a", &[(0, "bad")]), at(0), Duration::ZERO);
    let first = ledger.poll(at(0)).expect("an Event");
    ledger.take(rules("a", &[(0, "worse")]), at(1), Duration::ZERO);
    ledger.done(&first, Outcome::Created, at(2));
    let second = ledger.poll(at(2)).expect("another one");
    assert_eq!(second.note, "rule 0: worse");
    ledger.done(&second, Outcome::Created, at(3));
    assert_eq!(ledger.poll(at(3)), None);
}

#[test]
fn what_was_over_before_it_was_said_is_not_said() {
    let mut ledger = Ledger::default();
    ledger.take(rules("ns1", &[(0, "bad")]), at(0), Duration::from_secs(20));
    ledger.take(rules("ns1", &[]), at(10), NONE);
    assert_eq!(ledger.next_due(), None);
}

#[test]
fn no_more_than_a_burst_at_once_and_one_per_pause_after_it() {
    let mut ledger = Ledger::default();
    let problems: Vec<(u32, &str)> = (0..20).map(|rule| (rule, "bad")).collect();
    ledger.take(rules("ns1", &problems), at(0), NONE);
    assert_eq!(said(&mut ledger, at(0)).len(), 5);
    assert_eq!(ledger.next_due(), Some(at(60)));
    assert_eq!(said(&mut ledger, at(60)).len(), 1);
    assert_eq!(said(&mut ledger, at(119)).len(), 0);
    assert_eq!(said(&mut ledger, at(120)).len(), 1);
    assert_eq!(said(&mut ledger, at(10_000)).len(), 5);
}

#[test]
fn failures_are_tried_again_at_growing_distances() {
    let mut ledger = Ledger::default();
    ledger.take(rules("ns1", &[(0, "bad")]), at(0), NONE);
    let mut now = at(0);
    let mut waits = Vec::new();
    for _ in 0..9 {
        let posting = ledger.poll(now).expect("it is time");
        ledger.done(&posting, Outcome::Failed, now);
        let due = ledger.next_due().expect("it is still to be said");
        waits.push(due.since(now).as_secs());
        now = due;
    }
    assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
    assert_eq!(said(&mut ledger, now).len(), 1);
    ledger.take(rules("ns1", &[(0, "other")]), now, NONE);
    let posting = ledger.poll(now).expect("it is time");
    ledger.done(&posting, Outcome::Failed, now);
    assert_eq!(ledger.next_due(), Some(now + RETRY_MIN));
}

#[test]
fn a_limit_is_told_each_time_it_is_met_but_not_twice_while_it_waits() {
    let mut ledger = Ledger::default();
    let limit = || Notice::One {
        namespace: "ns1".into(),
        about: About::Name("a.example".into()),
        reason: "LimitReached",
        note: "too many".into(),
    };
    ledger.take(limit(), at(0), NONE);
    ledger.take(limit(), at(0), NONE);
    // The rules' notices leave it alone.
    ledger.take(rules("ns1", &[]), at(0), NONE);
    assert_eq!(said(&mut ledger, at(0)), ["ns1: too many"]);
    assert_eq!(ledger.next_due(), None);
    ledger.take(limit(), at(100), NONE);
    assert_eq!(said(&mut ledger, at(100)).len(), 1);
}

#[test]
fn what_does_not_fit_is_counted() {
    let mut ledger = Ledger::default();
    let rule = |rule: usize| (u32::try_from(rule).expect("small"), "bad");
    let problems: Vec<_> = (0..ENTRIES_PER_NAMESPACE_MAX + 2).map(rule).collect();
    assert_eq!(ledger.take(rules("ns0", &problems), at(0), NONE), 2);
    assert_eq!(ledger.take(rules("ns0", &problems[1..]), at(0), NONE), 1);
}

#[test]
fn no_namespace_fills_the_ledger_of_all() {
    let mut ledger = Ledger::default();
    let limit = |namespace: String, number: usize| Notice::One {
        namespace,
        about: About::Name(format!("n{number}.example")),
        reason: "LimitReached",
        note: format!("too many {number}"),
    };
    for namespace in 0..ENTRIES_MAX / ENTRIES_PER_NAMESPACE_MAX {
        for number in 0..2 * ENTRIES_PER_NAMESPACE_MAX {
            ledger.take(limit(format!("noisy{namespace}"), number), at(0), NONE);
        }
    }
    assert_eq!(ledger.entries.len(), ENTRIES_MAX);
    assert_eq!(
        ledger.take(rules("quiet", &[(0, "bad"), (1, "bad")]), at(1), NONE),
        2
    );
    assert_eq!(ledger.entries.len(), ENTRIES_MAX, "others gave way");
    let said = said(&mut ledger, at(3600));
    assert_eq!(said.len(), 5);
    // A namespace that has said nothing yet is before those that have.
    let mut namespaces: Vec<_> = said
        .iter()
        .filter_map(|one| one.split(':').next())
        .collect();
    namespaces.dedup();
    assert_eq!(namespaces.len(), 5, "{namespaces:?}");
    for hour in 2..20 {
        let now = at(hour * 3600);
        while let Some(posting) = ledger.poll(now) {
            ledger.done(&posting, Outcome::Created, now);
            if posting.namespace == "quiet" {
                return;
            }
        }
    }
    panic!("it never says anything");
}

#[test]
fn the_same_words_have_the_same_hash_everywhere() {
    let posting = |namespace: &str, note: &str| Posting {
        namespace: namespace.into(),
        about: About::Rule(0),
        note: note.into(),
        reason: "RuleNotInForce",
    };
    assert_ne!(posting("a", "b").hash(), posting("a", "c").hash());
    assert_ne!(posting("a", "b").hash(), posting("c", "b").hash());
    // FNV-1a of "a\nb", as the function's authors define it.
    assert_eq!(posting("a", "b").hash(), 0xe5be_b119_0415_e670);
}

fn denied(namespace: &str, note: &str) -> Notice {
    Notice::One {
        namespace: namespace.into(),
        about: About::Denials,
        reason: "ConnectionDenied",
        note: note.into(),
    }
}

#[test]
fn of_denied_connections_one_an_hour_is_told() {
    let mut ledger = Ledger::default();
    ledger.take(denied("ns1", "first"), at(0), NONE);
    let hash = ledger.poll(at(0)).expect("it is due").hash();
    // Not before it is created, and not before an hour has passed.
    ledger.take(denied("ns1", "second"), at(0), NONE);
    ledger.take(denied("ns2", "other"), at(0), NONE);
    assert_eq!(said(&mut ledger, at(1)), ["ns1: first", "ns2: other"]);
    ledger.take(denied("ns1", "third"), at(3600), NONE);
    assert!(said(&mut ledger, at(3600)).is_empty());
    ledger.take(denied("ns1", "fourth"), at(3601), NONE);
    // The same name as before, on this node and on others: the API server takes one.
    assert_eq!(ledger.poll(at(3601)).expect("it is due").hash(), hash);
    assert_eq!(said(&mut ledger, at(3601)), ["ns1: fourth"]);
}

/// More namespaces have denied connections than Events about them can be created in an hour.
#[test]
fn denied_connections_delay_no_other_event() {
    let mut ledger = Ledger::default();
    for minute in 0..300 {
        let now = at(60 * minute);
        for namespace in 0..200 {
            ledger.take(denied(&format!("noisy{namespace}"), "denied"), now, NONE);
        }
        if minute == 200 {
            ledger.take(rules("noisy7", &[(0, "bad")]), now, NONE);
            ledger.take(rules("quiet", &[(0, "bad")]), now, NONE);
        }
        let said = said(&mut ledger, now);
        let (rules, denials): (Vec<_>, Vec<_>) = said.iter().partition(|one| one.contains("bad"));
        let is_due = [200, 260].contains(&minute);
        assert_eq!(
            rules.len(),
            if is_due { 2 } else { 0 },
            "{minute}: {said:?}"
        );
        assert!(denials.len() <= if minute == 0 { 5 } else { 1 }, "{said:?}");
    }
}

/// As in a namespace that is terminating, or has a quota of Events.
#[test]
fn a_denied_connection_that_cannot_be_told_delays_no_other_event() {
    let mut ledger = Ledger::default();
    ledger.take(denied("quota", "denied"), at(0), NONE);
    for second in 0..100 {
        if let Some(posting) = ledger.poll(at(second)) {
            ledger.done(&posting, Outcome::Failed, at(second));
        }
    }
    ledger.take(rules("quiet", &[(0, "bad")]), at(100), NONE);
    let posting = ledger.poll(at(100)).expect("it is due");
    assert_eq!(posting.namespace, "quiet");
}

/// Each of a few namespaces has something new to say as soon as it has said the last.
#[test]
fn namespaces_with_news_at_all_times_delay_no_other_without_end() {
    let mut ledger = Ledger::default();
    ledger.take(rules("quiet", &[(0, "bad")]), at(0), NONE);
    assert_eq!(said(&mut ledger, at(0)).len(), 1);
    let mut told = Vec::new();
    for minute in 0..90 {
        let now = at(60 * minute);
        for namespace in 0..10 {
            let notice = Notice::One {
                namespace: format!("noisy{namespace}"),
                about: About::Name("a.example".into()),
                reason: "LimitReached",
                note: format!("too many {namespace}"),
            };
            ledger.take(notice, now, NONE);
        }
        let said = said(&mut ledger, now);
        told.extend(said.iter().any(|one| one.contains("bad")).then_some(minute));
    }
    assert!(matches!(told[..], [60..=70]), "{told:?}");
}

fn not_attached(namespace: &str, pod: &str) -> Notice {
    Notice::One {
        namespace: namespace.into(),
        about: About::Pod(PodRef {
            namespace: namespace.into(),
            name: pod.into(),
            uid: Some(pod.into()),
        }),
        reason: "NotAttached",
        note: "no such device".into(),
    }
}

/// The API server gives this answer to each Event of `first`. Returns after how many seconds a rule of another namespace
/// is told, within a day.
fn rule_is_told_behind(first: &[Notice], outcome: Outcome) -> Option<u64> {
    let mut ledger = Ledger::default();
    for notice in first {
        ledger.take(notice.clone(), at(0), NONE);
    }
    ledger.take(rules("quiet", &[(0, "bad")]), at(1), NONE);
    (0..86_400).find(|second| {
        let posting = ledger.poll(at(*second));
        posting.is_some_and(|posting| {
            let is_quiet = posting.namespace == "quiet";
            let outcome = if is_quiet { Outcome::Created } else { outcome };
            ledger.done(&posting, outcome, at(*second));
            is_quiet
        })
    })
}

/// The namespace of a Pod is deleted before the Event is created, or a finalizer keeps one terminating.
#[test]
fn an_event_that_cannot_be_created_keeps_no_other_away() {
    let of_pods: Vec<Notice> = (0..ENTRIES_PER_NAMESPACE_MAX)
        .map(|pod| not_attached("gone", &format!("web-{pod}")))
        .collect();
    let of_rules = [rules("terminating", &[(0, "bad"), (1, "bad")])];
    for first in [&of_pods[..1], &of_pods, &of_rules] {
        for outcome in [Outcome::Refused, Outcome::NoNamespace, Outcome::Created] {
            assert_eq!(rule_is_told_behind(first, outcome), Some(1), "{outcome:?}");
        }
        // It waits with all others until the API server is back.
        let told = rule_is_told_behind(first, Outcome::Failed);
        assert_eq!(told, Some(RETRY_MIN.as_secs()));
    }
}

#[test]
fn refusals_are_tried_again_at_growing_distances_whatever_is_new_in_the_namespace() {
    let mut ledger = Ledger::default();
    let mut now = at(0);
    let mut waits = Vec::new();
    for text in ["a", "b", "c", "d", "e"] {
        ledger.take(rules("terminating", &[(0, text)]), now, NONE);
        let posting = ledger.poll(now).expect("it is time");
        assert_eq!(ledger.done(&posting, Outcome::Refused, now), 0);
        ledger.take(rules("terminating", &[(0, text), (1, text)]), now, NONE);
        let due = ledger.next_due().expect("it is still to be said");
        waits.push(due.since(now).as_secs());
        now = due;
    }
    assert_eq!(waits, [60, 120, 240, 300, 300]);
    // The namespace has its quota again.
    assert_eq!(said(&mut ledger, now).len(), 2);
    ledger.take(rules("terminating", &[(0, "other")]), now, NONE);
    assert_eq!(said(&mut ledger, now).len(), 1);
}

#[test]
fn what_is_to_be_said_of_pods_is_given_up_with_their_namespace() {
    let mut ledger = Ledger::default();
    let mut attempts = 0;
    let mut given_up = 0;
    for pod in ["web-0", "web-1"] {
        ledger.take(not_attached("gone", pod), at(0), NONE);
    }
    ledger.take(not_attached("other", "web-0"), at(0), Duration::MAX / 2);
    for second in 0..86_400 {
        if let Some(posting) = ledger.poll(at(second)) {
            attempts += 1;
            given_up += ledger.done(&posting, Outcome::NoNamespace, at(second));
        }
    }
    assert_eq!((attempts, given_up), (REFUSALS_MAX, 2));
    assert_eq!(ledger.entries.len(), 1);
}
