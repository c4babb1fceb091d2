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
    for rule in 0..=RULES_COUNTED_MAX as u32 {
        counts.count(&denied("ns1", Some(rule)));
    }
    counts.count(&denied("ns1", Some(0)));
    counts.count(&denied("ns2", Some(0)));
    counts.count(&denied("ns1", None));
    assert_eq!(counts.by_rule.len(), RULES_COUNTED_MAX);
    assert_eq!(counts.by_rule[&("ns1".into(), 0)], 2);
    assert_eq!(counts.others, 3);
}
