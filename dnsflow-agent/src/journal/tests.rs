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
        kept.reports.push_back((time, opened(port)));
        kept.next += 1;
    }
    assert_eq!(journal.first_within(hour), 2);
    assert_eq!(journal.first_within(5 * hour / 2), 1);
    assert_eq!(journal.first_within(Duration::MAX), 0);
}
