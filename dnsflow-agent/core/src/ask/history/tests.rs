use std::time::Duration;

use super::*;

fn at(seconds: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(seconds)
}

fn tried(pod: &str, ifindex: u32, port: u16, names: &[&str]) -> Tried {
    Tried {
        namespace: "ns1".into(),
        port: format!("ns1_{pod}"),
        attempt: Attempt {
            ifindex,
            protocol: Protocol::Tcp,
            address: [203, 0, 113, 1].into(),
            port,
            at: Timestamp::default(),
        },
        names: names
            .iter()
            .map(|name| name.parse().expect("a name"))
            .collect(),
        verdict: Verdict::Allowed,
        reason: Reason::AllowedByName,
        rule: Some(0),
        is_refused: false,
        is_node: false,
    }
}

fn all(history: &mut History, now: Timestamp) -> Vec<ConnectionView> {
    let places = history.places(None, now);
    history.connections(&places, now)
}

#[test]
fn attempts_to_one_place_are_one_connection_with_all_names_and_the_last_verdict() {
    let mut history = History::new(at(0));
    history.note(tried("p1", 1, 443, &["a.test", "b.test"]), at(10));
    let last = Tried {
        verdict: Verdict::Blocked,
        reason: Reason::DeniedByRule,
        rule: Some(3),
        ..tried("p1", 1, 443, &["c.test", "a.test"])
    };
    history.note(last, at(30));
    history.note(tried("p1", 1, 80, &[]), at(31));
    let seen = all(&mut history, at(40));
    assert_eq!(seen.len(), 2);
    let one = &seen[1];
    assert_eq!((one.port, one.count), (443, 2));
    assert_eq!((one.first_s, one.last_s), (30, 10));
    assert_eq!(one.names, ["c.test", "a.test", "b.test"]);
    assert_eq!((one.verdict, one.rule), (Verdict::Blocked, Some(3)));
    assert_eq!((&*one.namespace, &*one.pod), ("ns1", "p1"));
}

#[test]
fn a_connection_is_forgotten_an_hour_after_its_last_attempt() {
    let mut history = History::new(at(0));
    history.note(tried("p1", 1, 443, &[]), at(0));
    history.note(tried("p1", 1, 80, &[]), at(0));
    history.note(tried("p1", 1, 443, &[]), at(1800));
    assert_eq!(history.known_for(at(1800)), Duration::from_secs(1800));
    assert_eq!(all(&mut history, at(3601)).len(), 1);
    assert_eq!(history.known_for(at(3601)), HISTORY_TIME);
    assert!(all(&mut history, at(5401)).is_empty());
    for port in [1, 2] {
        history.note(tried("p1", 1, port, &[]), at(6000));
    }
    assert!(all(&mut history, at(9601)).is_empty());
    assert_eq!(history.forgotten(), 0);
}

#[test]
fn a_pod_that_tries_everything_pushes_out_its_own_places() {
    let mut history = History::new(at(0));
    history.note(tried("p2", 2, 443, &[]), at(0));
    for port in 0..HISTORY_PER_INTERFACE as u16 + 3 {
        history.note(tried("p1", 1, port, &[]), at(1));
    }
    let seen = all(&mut history, at(1));
    assert_eq!(seen.len(), HISTORY_PER_INTERFACE + 1);
    assert_eq!(seen.last().map(|one| &*one.pod), Some("p2"));
    assert_eq!(history.forgotten(), 3);
}

#[test]
fn of_many_pods_the_one_with_most_places_loses_some() {
    let mut history = History::new(at(0));
    let pods = (HISTORY_CONNECTIONS / HISTORY_PER_INTERFACE) as u32;
    let all_of = |ifindex: u32, count: usize, history: &mut History| {
        for port in 0..count as u16 {
            history.note(tried("p", ifindex, port, &[]), at(1));
        }
    };
    for ifindex in 1..pods {
        all_of(ifindex, HISTORY_PER_INTERFACE, &mut history);
    }
    all_of(pods, HISTORY_PER_INTERFACE - 1, &mut history);
    all_of(pods + 1, 3, &mut history);
    assert_eq!(history.places(None, at(1)).len(), HISTORY_CONNECTIONS);
    assert_eq!(history.forgotten(), 2);
    let last = history.places(None, at(1));
    let last = last.iter().filter(|place| place.ifindex() == pods + 1);
    assert_eq!(last.count(), 3);
}

#[test]
fn the_index_of_an_interface_that_is_gone_may_come_again() {
    let mut history = History::new(at(0));
    history.note(tried("p1", 1, 443, &["a.test"]), at(0));
    history.note(tried("p2", 1, 443, &[]), at(5));
    let seen = all(&mut history, at(5));
    assert_eq!(seen.len(), 1);
    assert_eq!((&*seen[0].pod, seen[0].count), ("p2", 1));
    assert!(seen[0].names.is_empty());
}

#[test]
fn names_of_one_place_have_a_limit_and_namespaces_are_apart() {
    let mut history = History::new(at(0));
    let names: Vec<String> = (0..20).map(|number| format!("n{number}.test")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    history.note(tried("p1", 1, 443, &names[..10]), at(0));
    history.note(tried("p1", 1, 443, &names[10..]), at(1));
    let seen = all(&mut history, at(1));
    assert_eq!(seen[0].names.len(), NAMES_PER_CONNECTION_MAX);
    assert_eq!(seen[0].names[0], "n10.test");
    history.note(tried("p1", 1, 80, &names[..10]), at(1));
    let seen = all(&mut history, at(1));
    assert_eq!(seen[0].names.len(), NAMES_PER_CONNECTION_MAX);
    assert!(history.places(Some("ns2"), at(1)).is_empty());
    assert_eq!(history.places(Some("ns1"), at(1)).len(), 2);
}
