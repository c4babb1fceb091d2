use dnsflow_core::{
    Timestamp,
    io::report::{Denied, ToldName},
    values::{connection::Attempt, flow::Protocol},
};

use super::*;

fn opened(port: &str) -> Report {
    Report::Opened {
        namespace: "ns1".into(),
        port: port.into(),
        name: "www.example.com".parse().expect("a name"),
        addresses: vec!["203.0.113.1".parse().expect("an address")],
        rules: vec![0],
        flows: 1,
        activation: Some(Duration::from_micros(250)),
        revalidation_wait: "none",
    }
}

#[test]
fn an_answer_becomes_an_event_of_its_pod() {
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1_500);
    let event = event(time, opened("ns1_pod1"));
    let json = serde_json::to_value(&event).expect("JSON");
    let expected = serde_json::json!({
        "time": "1970-01-01T00:00:01.500Z",
        "event": "opened",
        "namespace": "ns1",
        "pod": "pod1",
        "name": "www.example.com",
        "addresses": ["203.0.113.1"],
        "rules": [0],
        "activation_us": 250,
    });
    assert_eq!(json, expected);
}

#[test]
fn an_event_of_a_denied_connection_says_how_many_names_it_does_not_have() {
    let text = |names_left_out| {
        let told = ToldName {
            name: "www.example.com".parse().expect("a name"),
            ago: Duration::from_secs(2),
            resolver: None,
        };
        let denied = Denied {
            namespace: "ns1".into(),
            port: "ns1_pod1".into(),
            attempt: Attempt {
                ifindex: 7,
                protocol: Protocol::Tcp,
                address: [203, 0, 113, 1].into(),
                port: 443,
                at: Timestamp::default(),
            },
            names: vec![told],
            names_left_out,
            reason: view::Reason::DeniedByRule,
            rule: Some(0),
            rule_text: "Deny dnsName: example.com".into(),
            text: String::new(),
            remedy: None,
        };
        event(SystemTime::UNIX_EPOCH, Report::Denied(Box::new(denied))).text
    };
    let rule = "rule 0 Deny dnsName: example.com";
    let one = format!("www.example.com, told 2s ago; {rule}");
    assert_eq!(text(0), one);
    let many = format!("www.example.com, told 2s ago, 1992 older names; {rule}");
    assert_eq!(text(1992), many);
}

fn pods(unread: &Unread) -> Vec<&str> {
    let pods = unread.events.iter().map(|event| event.pod.as_deref());
    pods.map(|pod| pod.expect("a pod")).collect()
}

#[test]
fn a_reader_gets_each_event_once_and_in_order() {
    let journal = Journal::default();
    for count in 0..COPIED_AT_ONCE + 1 {
        journal.note(opened(&format!("ns1_pod{count}")));
    }
    let first = journal.read(0);
    assert_eq!(first.events.len(), COPIED_AT_ONCE);
    let second = journal.read(first.next);
    assert_eq!(pods(&second), ["pod64"]);
    assert_eq!(journal.next(), second.next);
    assert!(journal.read(second.next).events.is_empty());
}

#[test]
fn a_reader_is_told_what_it_has_missed() {
    let journal = Journal::default();
    for count in 0..EVENTS_MAX + 3 {
        journal.note(opened(&format!("ns1_pod{count}")));
    }
    let unread = journal.read(1);
    assert_eq!(unread.missed, 2);
    assert_eq!(pods(&unread)[0], "pod3");
    assert_eq!(journal.lost(), 0);
}

#[test]
fn a_pod_that_resolves_without_end_pushes_out_its_own_events() {
    let journal = Journal::default();
    let others = ["ns1_pod1", "ns1_pod2", "ns2_pod1"];
    for port in others {
        journal.note(opened(port));
    }
    for _ in 0..2 * EVENTS_MAX {
        journal.note(opened("ns3_pod1"));
    }
    let unread = journal.read(0);
    assert_eq!(pods(&unread)[..3], ["pod1", "pod2", "pod1"]);
    // Of those that one copy has, the pod's oldest are gone.
    let first = journal.kept.lock().expect("nobody has panicked");
    let first = first.reports.keys().nth(3).copied();
    assert_eq!(first, Some(EVENTS_MAX as u64 + 6));
}

/// A report about an answer for a name in so many rules.
fn of_rules(count: u32) -> Report {
    let Report::Opened {
        namespace,
        port,
        name,
        addresses,
        flows,
        activation,
        revalidation_wait,
        ..
    } = opened("ns1_pod1")
    else {
        panic!("another report");
    };
    Report::Opened {
        namespace,
        port,
        name,
        addresses,
        rules: (0..count).collect(),
        flows,
        activation,
        revalidation_wait,
    }
}

/// The journal behind as many of these reports as it has room for by their number.
fn full_of(report: &Report) -> Journal {
    let journal = Journal::default();
    for _ in 0..EVENTS_MAX {
        journal.note(report.clone());
    }
    journal
}

#[test]
fn large_reports_leave_no_more_bytes_than_the_limit() {
    let small = full_of(&of_rules(1));
    assert_eq!(small.read(0).missed, 0);
    let large = of_rules(8001);
    let journal = full_of(&large);
    let kept = BYTES_MAX / large.size();
    let missed = EVENTS_MAX - kept;
    assert_eq!(journal.read(0).missed, missed as u64);
    let lists = |(_, report): &(SystemTime, Report)| match report {
        Report::Opened { rules, .. } => size_of_val(&rules[..]),
        _ => 0,
    };
    let bytes = |journal: &Journal| -> usize {
        let kept = journal.kept.lock().expect("nobody has panicked");
        kept.reports.values().map(lists).sum()
    };
    assert!(bytes(&journal) <= BYTES_MAX, "{}", bytes(&journal));
    // One that has no room by itself takes the room of no later one.
    journal.note(of_rules(BYTES_MAX as u32));
    assert_eq!(bytes(&journal), 0);
    journal.note(of_rules(1));
    let unread = journal.read(journal.next() - 1);
    assert_eq!((unread.missed, unread.events.len()), (0, 1));
}

#[test]
fn of_large_reports_few_are_copied_at_once() {
    let large = of_rules(8001);
    let journal = full_of(&large);
    let unread = journal.read(journal.next() - 64);
    assert_eq!(unread.missed, 0);
    let copied = unread.events.len();
    assert_eq!(copied, COPIED_BYTES_AT_ONCE.div_ceil(large.size()));
    assert_eq!(unread.next, journal.next() - 64 + copied as u64);
    let small = full_of(&of_rules(1));
    assert_eq!(small.read(0).events.len(), COPIED_AT_ONCE);
}

#[test]
fn an_event_of_problems_has_the_new_ones_and_the_number_of_the_others() {
    let new = |first: &[u32], others: &[u32]| NewProblems {
        first: first.iter().map(|rule| (*rule, "bad".into())).collect(),
        others: others.to_vec(),
    };
    let event_of = |news: &[(Severity, NewProblems)], over: &[u32], all: usize| {
        let present = PresentProblems {
            first: BTreeMap::new(),
            count: all,
        };
        let report = Report::Problems {
            namespace: "ns1".into(),
            news: news.iter().cloned().collect(),
            over: over.to_vec(),
            present: (all > 0)
                .then_some((Severity::Caveat, present))
                .into_iter()
                .collect(),
        };
        let event = event(SystemTime::UNIX_EPOCH, report);
        (event.rules, event.text)
    };
    let both = [
        (Severity::Caveat, new(&[2, 5], &[])),
        (Severity::NotInForce, new(&[3], &[])),
    ];
    let text = "rule 2: bad; rule 3: bad; rule 5: bad";
    assert_eq!(event_of(&both, &[], 3), (vec![2, 3, 5], text.into()));
    let many = [(Severity::Caveat, new(&[2, 3], &[4, 7]))];
    let text = "rule 2: bad; rule 3: bad; rules 4,7 have problems of the same kind as rule 3; \
                8000 other problems stay";
    assert_eq!(event_of(&many, &[], 8004), (vec![2, 3, 4, 7], text.into()));
    let text = "the former problems of rules 1,9 are over; 5 other problems stay";
    assert_eq!(event_of(&[], &[1, 9], 5), (vec![], text.into()));
    let text = "all rules are in force";
    assert_eq!(event_of(&[], &[1, 9], 0), (vec![], text.into()));
}

#[test]
fn while_a_reader_copies_the_hot_thread_loses_its_report_and_others_wait() {
    let journal = Journal::default();
    std::thread::scope(|scope| {
        let reader = journal.kept.lock().expect("nobody has panicked");
        journal.try_note(opened("ns1_pod1"));
        let other = scope.spawn(|| journal.note(opened("ns1_pod2")));
        drop(reader);
        other.join().expect("no panic");
    });
    assert_eq!(journal.lost(), 1);
    assert_eq!(pods(&journal.read(0)), ["pod2"]);
}

#[test]
fn the_first_report_of_a_time_is_found() {
    let journal = Journal::default();
    let hour = Duration::from_secs(3600);
    assert_eq!(journal.first_within(hour), 0);
    for (hours, port) in [(3, "ns1_a"), (2, "ns1_b"), (0, "ns1_c")] {
        let mut kept = journal.kept.lock().expect("nobody has panicked");
        let time = SystemTime::now() - hours * hour;
        let number = kept.next;
        kept.reports.insert(number, (time, opened(port)));
        kept.next += 1;
    }
    assert_eq!(journal.first_within(hour), 2);
    assert_eq!(journal.first_within(5 * hour / 2), 1);
    assert_eq!(journal.first_within(Duration::MAX), 0);
}
