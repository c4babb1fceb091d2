use std::time::Duration;

use super::*;
use crate::{
    testing::{answer_frame, frame},
    values::{flow::Protocol, verdict::Reason},
};

const IFINDEX: u32 = 7;

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_nanos((1_000_000 + seconds) * 1_000_000_000)
}

fn attempt(ifindex: u32, last: u8) -> Attempt {
    Attempt {
        ifindex,
        protocol: Protocol::Tcp,
        address: [203, 0, 113, last].into(),
        port: 443,
        at: at(0),
    }
}

/// The report that an attempt is denied, by this rule.
fn denied(attempt: Attempt, rule: u32) -> Denied {
    Denied {
        namespace: "ns1".into(),
        port: "ns1_p1".into(),
        attempt,
        names: vec![],
        names_left_out: 0,
        reason: Reason::DeniedByRule,
        rule: Some(rule),
        rule_text: "Deny cidrSelector: 0.0.0.0/0".into(),
        text: String::new(),
        remedy: None,
    }
}

fn hear(attempts: &mut Attempts, ifindex: u32, name: &str, address: [u8; 4], when: Timestamp) {
    let bytes = answer_frame(name, &[address], 60);
    attempts.hear(frame(ifindex, when, &bytes), when);
}

fn names(attempts: &mut Attempts, attempt: &Attempt) -> Vec<String> {
    let heard = attempts.heard(attempt);
    heard.iter().map(|heard| heard.name.to_string()).collect()
}

#[test]
fn an_address_has_the_names_that_this_pod_was_told_last() {
    let mut attempts = Attempts::new(Ports::DNS);
    let names_told = ["a.test", "b.test", "c.test", "d.test", "e.test", "c.test"];
    for (second, name) in (0..).zip(names_told) {
        hear(&mut attempts, IFINDEX, name, [203, 0, 113, 1], at(second));
    }
    let told = ["c.test", "e.test", "d.test", "b.test"];
    assert_eq!(names(&mut attempts, &attempt(IFINDEX, 1)), told);
    let [first, ..] = &attempts.heard(&attempt(IFINDEX, 1))[..] else {
        panic!("a name")
    };
    assert_eq!(first.at, at(5));
    assert_eq!(first.resolver.to_string(), "10.96.0.10:53");
    assert!(names(&mut attempts, &attempt(8, 1)).is_empty(), "other pod");
    assert!(names(&mut attempts, &attempt(IFINDEX, 2)).is_empty());
    attempts.forget_old(at(6) + HEARD_TIME);
    assert!(names(&mut attempts, &attempt(IFINDEX, 1)).is_empty());
}

#[test]
fn servers_of_dns_are_remembered() {
    let mut attempts = Attempts::new(Ports::DNS);
    let asked = |protocol, last, port, when| Attempt {
        protocol,
        port,
        at: at(when),
        ..attempt(IFINDEX, last)
    };
    for (when, one) in [
        asked(Protocol::Udp, 1, 53, 1),
        asked(Protocol::Tcp, 2, 53, 2),
        asked(Protocol::Udp, 3, 443, 3),
    ]
    .into_iter()
    .enumerate()
    {
        attempts.note_server(&one, at(when as u64 + 1));
    }
    let servers = |attempts: &Attempts, ifindex| -> Vec<String> {
        let asked = attempts.servers_asked(ifindex);
        asked.iter().map(|one| one.server.to_string()).collect()
    };
    let both = ["203.0.113.2:53", "203.0.113.1:53"];
    assert_eq!(servers(&attempts, IFINDEX), both);
    assert!(servers(&attempts, 8).is_empty(), "other pod");
    attempts.forget_old(at(3) + HEARD_TIME);
    assert!(servers(&attempts, IFINDEX).is_empty());
}

#[test]
fn errors_are_remembered() {
    let mut attempts = Attempts::new(Ports::DNS);
    let name: DomainName = "a.test".parse().expect("a name");
    let hear = |attempts: &mut Attempts, ifindex, name: &str, code: u8, when| {
        let mut bytes = answer_frame(name, &[], 60);
        bytes[45] |= code;
        attempts.hear(frame(ifindex, at(when), &bytes), at(when));
    };
    // An answer without a record is one if the question was for addresses.
    let mut bytes = answer_frame("a.test", &[], 60);
    let (flags, kind) = (44, 42 + 12 + 8 + 1);
    bytes[kind] = 65;
    for is_truncated in [false, true] {
        bytes[flags] |= u8::from(is_truncated) << 1;
        attempts.hear(frame(IFINDEX, at(0), &bytes), at(0));
        assert_eq!(attempts.failed_for(&name), []);
    }
    bytes[kind] = 1;
    attempts.hear(frame(IFINDEX, at(0), &bytes), at(0));
    let truncated = &attempts.failed_for(&name)[0].failure.kind;
    assert_eq!(*truncated, FailureKind::Truncated);
    hear(&mut attempts, IFINDEX, "a.test", 0, 0);
    assert!(attempts.failed_for(&name)[0].failure.is_no_data());
    hear(&mut attempts, IFINDEX, "a.test", 3, 1);
    hear(&mut attempts, IFINDEX, "a.test", 2, 2);
    hear(&mut attempts, 8, "b.test", 3, 3);
    let failed = attempts.failed_for(&name);
    let [failed] = &failed[..] else {
        panic!("{failed:?}")
    };
    assert_eq!((failed.ifindex, failed.at), (IFINDEX, at(2)));
    assert_eq!(failed.failure.to_string(), "SERVFAIL");
    assert_eq!(failed.resolver.to_string(), "10.96.0.10:53");
    for many in 0..2 * FAILED_ANSWERS_PER_INTERFACE {
        hear(&mut attempts, 8, &format!("c{many}.test"), 3, 4);
    }
    assert_eq!(attempts.failed.len(), FAILED_ANSWERS_PER_INTERFACE + 1);
    attempts.forget_old(at(3) + HEARD_TIME);
    assert_eq!(attempts.failed_for(&name), []);
}

#[test]
fn what_a_pod_is_told_pushes_out_only_its_own() {
    let mut attempts = Attempts::new(Ports::DNS);
    hear(&mut attempts, 8, "other.test", [203, 0, 113, 1], at(0));
    for many in 0..2 * PLACES_PER_INTERFACE {
        let [.., high, low] = many.to_be_bytes();
        hear(
            &mut attempts,
            IFINDEX,
            "a.test",
            [198, 51, high, low],
            at(1),
        );
    }
    assert_eq!(attempts.heard.len(), PLACES_PER_INTERFACE + 1);
    assert_eq!(names(&mut attempts, &attempt(8, 1)), ["other.test"]);
}

#[test]
fn bytes_that_are_no_answer_tell_nothing() {
    let mut attempts = Attempts::new(Ports::DNS);
    let mut bytes = answer_frame("a.test", &[[203, 0, 113, 1]], 60);
    for len in 0..bytes.len() {
        attempts.hear(frame(IFINDEX, at(0), &bytes[..len]), at(0));
    }
    // Another source port.
    bytes[34..36].copy_from_slice(&[0, 54]);
    attempts.hear(frame(IFINDEX, at(0), &bytes), at(0));
    assert!(attempts.heard.is_empty());
}

#[test]
fn a_place_is_news_once_a_minute() {
    let mut attempts = Attempts::new(Ports::DNS);
    let one = attempt(IFINDEX, 1);
    let udp = Attempt {
        protocol: Protocol::Udp,
        ..one
    };
    let [one, other, udp] = [one, attempt(8, 1), udp].map(|attempt| denied(attempt, 0));
    assert!(
        [&one, &other, &udp]
            .into_iter()
            .all(|it| attempts.is_news(it, at(0)))
    );
    assert!(!attempts.is_news(&one, at(59)));
    attempts.forget_old(at(59));
    assert!(!attempts.is_news(&one, at(59)));
    assert!(attempts.is_news(&one, at(60)));
    // An edit has another rule deny it.
    let edited = denied(one.attempt, 1);
    assert!(attempts.is_news(&edited, at(61)) && !attempts.is_news(&edited, at(62)));
    assert_eq!(attempts.left_out(), 0);
}

#[test]
fn a_pod_that_is_denied_much_is_not_all_that_is_reported() {
    let mut attempts = Attempts::new(Ports::DNS);
    let news =
        (0..=255).filter(|last| attempts.is_news(&denied(attempt(IFINDEX, *last), 0), at(0)));
    assert_eq!(news.count(), 32);
    assert_eq!(attempts.left_out(), 256 - 32);
    assert!(
        attempts.is_news(&denied(attempt(8, 0), 0), at(0)),
        "another pod"
    );
    let later = at(0) + Duration::from_secs(2);
    assert!(attempts.is_news(&denied(attempt(IFINDEX, 255), 0), later));
    assert!(!attempts.is_news(&denied(attempt(IFINDEX, 254), 0), later));
    // Accounts go when they are full again.
    attempts.forget_old(later);
    assert_eq!(attempts.accounts.len(), 1);
    attempts.forget_old(at(100));
    assert!(attempts.accounts.is_empty());
}
