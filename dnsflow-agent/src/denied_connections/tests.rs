use dnsflow_common::walk::Ports;
use dnsflow_core::{
    Timestamp,
    ask::view::Reason,
    values::{connection::Attempt, flow::Protocol},
};

use super::*;

fn denied(namespace: &str, rule: Option<u32>) -> Denied {
    Denied {
        namespace: namespace.into(),
        port: format!("{namespace}_pod1"),
        attempt: Attempt {
            ifindex: 7,
            protocol: Protocol::Tcp,
            address: [203, 0, 113, 7].into(),
            port: 443,
            at: Timestamp::default(),
        },
        names: vec![],
        names_left_out: 0,
        reason: Reason::DeniedByRule,
        rule,
        rule_text: String::new(),
        text: String::new(),
        remedy: None,
    }
}

#[test]
fn the_rules_that_are_counted_have_a_limit() {
    let mut counts = Counts::default();
    let of_one = RULES_OF_NAMESPACE_MAX as u32;
    let namespaces = RULES_COUNTED_MAX / RULES_OF_NAMESPACE_MAX;
    let names: Vec<String> = (0..=namespaces).map(|at| format!("ns{at}")).collect();
    // One of each is beyond the limit of its namespace, and all of the last one beyond that of all.
    for namespace in &names {
        for rule in 0..=of_one {
            counts.count(&denied(namespace, Some(rule)));
        }
    }
    counts.count(&denied("ns1", Some(0)));
    counts.count(&denied("ns1", None));
    assert_eq!(counts.by_rule.len(), RULES_COUNTED_MAX);
    let by_rule = DenialReason::ByRule;
    assert_eq!(counts.by_rule[&("ns1".into(), 0, by_rule)], 2);
    let beyond = namespaces as u64 + u64::from(of_one) + 1;
    assert_eq!(counts.others[by_rule], beyond + 1);
    let last = (names[namespaces - 1].clone(), of_one - 1, by_rule);
    assert_eq!(counts.by_rule[&last], 1, "the others leave it room");
}

#[test]
fn what_is_allowed_and_not_open_is_told_apart_from_what_rules_deny() {
    let mut counts = Counts::default();
    for reason in [
        Reason::DeniedByRule,
        Reason::WrongPort,
        Reason::LimitReached,
        Reason::FlowMissing,
        Reason::NotResolved,
    ] {
        counts.count(&Denied {
            reason,
            ..denied("ns1", Some(3))
        });
    }
    let count = |reason| counts.by_rule[&("ns1".into(), 3, reason)];
    assert_eq!(count(DenialReason::ByRule), 2);
    assert_eq!(count(DenialReason::NotOpen), 2);
    assert_eq!(count(DenialReason::NotAsked), 1);
}

/// Whoever asks gets what the kernel has told before the question, and waits for no thread that is away.
#[tokio::test]
async fn a_question_waits_for_the_next_reading() {
    let (heard, mut readings) = Heard::new(Attempts::new(Ports::DNS));
    let asked = heard.clone();
    let question = tokio::spawn(async move { asked.catch_up().await });
    let waits = readings.0.recv().await;
    assert!(waits.is_some() && !question.is_finished());
    drop(waits);
    question.await.expect("it goes on after the reading");
    drop(readings);
    heard.catch_up().await;
}
