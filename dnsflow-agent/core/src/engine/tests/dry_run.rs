//! A dry run decides as always, and installs nothing.

use super::{
    edits::{self, WAYS},
    explain::judged,
    *,
};
use crate::{
    ask::view::{Judged, Reason},
    values::limits::{GROUP_RESTS, GROUP_STAYS},
};

const RULES: fn() -> [Rule; 2] = || [allow("example.com"), deny_all()];

/// The EgressFirewall of ns1, with or without the annotation.
fn annotate(node: &mut Node, dry_run: bool) {
    let firewall = Firewall {
        dry_run,
        ..firewall(&RULES())
    };
    node.give(firewalls(false, Some(firewall)));
}

fn would_open(node: &Node) -> Vec<(String, Vec<u32>)> {
    let reports = node.reports.iter();
    let would_open = reports.filter_map(|report| match report {
        Report::WouldOpen {
            port,
            name,
            addresses,
            rules,
        } => Some((format!("{port} {name} {addresses:?}"), rules.clone())),
        _ => None,
    });
    would_open.collect()
}

#[test]
fn the_option_installs_nothing_and_says_what_it_would_open() {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        dry_run: true,
        ..Config::default()
    });
    let mut node = node.start(&RULES());
    for name in ["www.example.com", "www.example.com", "example.net"] {
        node.answer("p1", name, &[ADDRESS], 60);
    }
    assert!(node.switch.is_empty() && node.sentinels.is_empty());
    let said = [("ns1_p1 www.example.com [203.0.113.1]".to_owned(), vec![0])];
    assert_eq!(would_open(&node), said);
    let counters = node.engine.counters();
    assert_eq!((counters.answers_dry_run, counters.answers_opening), (1, 0));
    assert!(node.engine.view().node().firewalls[0].is_dry_run);
    node.pass(Duration::from_secs(600));
    assert!(node.switch.is_empty());
}

#[test]
fn the_annotation_closes_what_is_open_and_back() {
    let mut node = Node::with(&RULES());
    node.answer("p1", "example.com", &[ADDRESS], 600);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    annotate(&mut node, true);
    assert!(node.own() == 0);
    node.answer("p1", "www.example.com", &[OTHER], 600);
    assert!(node.own() == 0);
    assert_eq!(would_open(&node).len(), 1);
    annotate(&mut node, false);
    let both = ["203.0.113.1".to_owned(), "203.0.113.2".to_owned()];
    assert_eq!(node.destinations(), both.into());
    assert_eq!(would_open(&node).len(), 1);
}

#[test]
fn flows_of_an_earlier_run_are_taken_out() {
    let mut node = Node::with(&RULES());
    node.answer("p1", "example.com", &[ADDRESS], 600);
    let saved = node.folded(&[]);
    assert!(node.own() > 0);
    let config = Config {
        dry_run: true,
        ..Config::default()
    };
    let mut after = restart::after_restart_with(&mut node, &saved, &RULES(), config);
    after.pass(2 * COMPARE_INTERVAL);
    // The name is known, and its flow is not wanted.
    assert_eq!(after.engine.view().addresses("ns1_p1").len(), 1);
    assert!(after.switch.is_empty());
}

/// The flows of a rule stay for a while behind the last address. Those of ports and of their logical switch are for nothing
/// then.
#[test]
fn a_dry_run_and_a_deleted_firewall_leave_nothing_in_the_switch() {
    for way in WAYS {
        for is_deleted in [false, true] {
            let case = format!("{way:?}, deleted: {is_deleted}");
            let mut node = edits::node(way, &RULES());
            node.answer("p1", "example.com", &[ADDRESS], 3600);
            node.pass(COMPARE_INTERVAL);
            assert!(!node.switch.is_empty(), "{case}");
            match is_deleted {
                true => {
                    node.give(firewalls(false, None));
                    node.set_ovn(&[]);
                }
                false => annotate(&mut node, true),
            }
            assert_eq!(node.destinations(), BTreeSet::new(), "{case}");
            node.pass(GROUP_STAYS + GROUP_RESTS + 4 * COMPARE_INTERVAL);
            assert!(node.switch.is_empty(), "{case}: {:?}", node.switch);
            assert!(node.sentinels.is_empty() && node.marks.is_empty(), "{case}");
            node.set_firewall(&RULES());
            node.set_ovn(&RULES());
            node.answer("p1", "www.example.com", &[OTHER], 600);
            node.pass(COMPARE_INTERVAL);
            assert!(node.destinations().contains("203.0.113.2"), "{case}");
        }
    }
}

#[test]
fn a_dry_run_is_the_reason_why_a_connection_is_denied() {
    let mut node = Node::with(&RULES());
    annotate(&mut node, true);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    let judged = judged(&node);
    let Judged::Denied(_, denied) = judged else {
        panic!("{judged:?}")
    };
    assert_eq!((denied.reason, denied.rule), (Reason::DryRun, Some(1)));
    assert_eq!(
        denied.text,
        "rule 0 would allow it, but this is a dry run: no flow is installed; it may still be allowed: ovn-kubernetes may \
         have resolved dnsName: example.com (rule 0) to it"
    );
}
