use std::time::Duration;

use super::*;

fn opened(port: &str) -> Report {
    Report::Opened {
        namespace: "ns1".into(),
        port: port.into(),
        name: "www.example.com".parse().expect("a name"),
        addresses: vec!["203.0.113.1".parse().expect("an address")],
        rules: vec![0],
        flows: 1,
        activation: Duration::from_micros(250),
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

#[tokio::test]
async fn the_last_events_are_kept_and_new_ones_are_handed_on() {
    let (pen, journal, reports) = journal();
    for count in 0..REPORTS_MAX + 3 {
        pen.note(opened(&format!("ns1_pod{count}")));
    }
    assert_eq!(journal.lost(), 3, "nobody has written yet");
    let (before, mut live) = journal.read(10);
    assert!(before.is_empty());
    drop(pen);
    journal.write(reports).await;
    let pod = |event: &Event| event.pod.clone().expect("a pod");
    let first = live.recv().await.expect("an event");
    assert_eq!(pod(&first), "pod0");
    let (last, _) = journal.read(2);
    let pods: Vec<_> = last.iter().map(|event| pod(event)).collect();
    assert_eq!(pods, ["pod1022", "pod1023"]);
    for _ in 0..EVENTS_MAX {
        journal.add(Event::default());
    }
    assert_eq!(journal.read(usize::MAX).0.len(), EVENTS_MAX);
}
