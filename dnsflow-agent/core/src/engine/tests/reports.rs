//! What people are told.

use super::*;
use crate::values::limits::{REPORT_BURST_TIME, REPORT_INTERVAL};

/// As many reports are given out at once.
const BURST: u64 = REPORT_BURST_TIME.as_secs() / REPORT_INTERVAL.as_secs();

#[test]
fn readiness_means_that_everything_was_read_and_compared() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let ready = |node: &Node| {
        node.reports
            .iter()
            .filter(|report| matches!(report, Report::Ready { .. }))
            .count()
    };
    assert_eq!(ready(&node), 1);
    node.give(Input::SwitchDown);
    node.give(Input::SwitchUp);
    assert_eq!(ready(&node), 2);
}

#[test]
fn problems_are_told_once_and_withdrawn() {
    let mut node = Node::with(&[deny_all()]);
    node.reports.clear();
    node.set_firewall(&[allow("example.com"), deny_all()]);
    node.set_firewall(&[allow("example.com"), deny_all()]);
    let problems: Vec<_> = node
        .reports
        .drain(..)
        .filter_map(|report| match report {
            Report::Problems { problems, .. } => Some(problems),
            _ => None,
        })
        .collect();
    assert_eq!(problems.len(), 1);
    assert_eq!(
        problems[0][&0],
        (
            "waiting for OVN's ACL for dnsName `example.com`".to_owned(),
            Severity::Waiting
        )
    );
    node.set_ovn(&[allow("example.com"), deny_all()]);
    let last = node.reports.iter().rev().find_map(|report| match report {
        Report::Problems { problems, .. } => Some(problems.clone()),
        _ => None,
    });
    assert_eq!(last, Some(BTreeMap::new()));
}

#[test]
fn what_was_told_is_no_news_at_another_index_either() {
    let mut node = Node::with(&[deny("a.test"), deny("b.test")]);
    let news = |node: &mut Node| {
        let reports = std::mem::take(&mut node.reports);
        let news = reports.into_iter().filter_map(|report| match report {
            Report::Problems { news, problems, .. } => Some((news, problems.len())),
            _ => None,
        });
        news.last()
    };
    assert_eq!(news(&mut node), Some(([0, 1].into(), 2)));
    let edited = [deny("c.test"), deny("a.test"), deny("b.test")];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    assert_eq!(news(&mut node), Some(([0].into(), 3)));
    let fewer = [deny("c.test"), deny("b.test")];
    node.set_firewall(&fewer);
    node.set_ovn(&fewer);
    assert_eq!(news(&mut node), Some((BTreeSet::new(), 2)));
}

#[test]
fn that_no_dns_server_is_trusted_is_told_once_the_cluster_was_asked() {
    let mut node = Node::bare();
    let told = |node: &mut Node| {
        let reports = std::mem::take(&mut node.reports);
        let told = reports.into_iter().filter_map(|report| match report {
            Report::Trusting(resolvers) => Some(resolvers.len()),
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    assert_eq!(told(&mut node), [] as [usize; 0]);
    for expected in [&[0][..], &[]] {
        node.give(Input::Resolvers(BTreeSet::new()));
        assert_eq!(told(&mut node), expected);
    }
    let one = Resolver {
        address: Ipv4Addr::new(10, 96, 0, 10).into(),
        port: 53,
    };
    for expected in [&[1][..], &[]] {
        node.give(Input::Resolvers([one].into()));
        assert_eq!(told(&mut node), expected);
    }
    node.give(Input::Resolvers(BTreeSet::new()));
    assert_eq!(told(&mut node), [0]);
}

#[test]
fn nothing_is_waited_for_in_a_namespace_without_a_pod_here() {
    let mut node = Node::with(&[deny_all()]);
    let id = FirewallId {
        namespace: "ns2".into(),
        name: FIREWALL_NAME.into(),
    };
    let invalid = Rule {
        destination: Destination::Invalid("bad".into()),
        ..deny_all()
    };
    let firewall = Firewall {
        rules: [allow("example.com"), invalid].into(),
        ..Firewall::default()
    };
    node.give(Input::Firewalls(FirewallUpdate {
        reset: false,
        firewalls: vec![(id, Some(firewall))],
    }));
    let told = |node: &mut Node| {
        let reports = std::mem::take(&mut node.reports);
        let of_ns2 = reports.into_iter().filter_map(|report| match report {
            Report::Problems {
                namespace,
                problems,
                ..
            } if namespace == "ns2" => Some(problems.into_keys().collect::<Vec<u32>>()),
            _ => None,
        });
        of_ns2.collect::<Vec<_>>()
    };
    assert_eq!(told(&mut node), [[1]]);
    let row = RowId::new(0x222);
    let bind = |node: &mut Node, namespace: Option<&str>| {
        let binding = namespace.map(|namespace| PortBinding {
            logical_port: "ns2_p1".into(),
            datapath: DATAPATH,
            tunnel_key: 22,
            namespace: Some(namespace.into()),
        });
        node.give(Input::Sb(SbUpdate {
            port_bindings: vec![(row, binding)],
            ..SbUpdate::default()
        }));
    };
    bind(&mut node, Some("ns2"));
    assert_eq!(told(&mut node), [[0, 1]]);
    bind(&mut node, None);
    assert_eq!(told(&mut node), [[1]]);
}

#[test]
fn a_refusal_is_told_and_counted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.switch_answers = false;
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let batch = node.log.iter().find_map(|command| match command {
        Command::Apply { batch, .. } => Some(*batch),
        _ => None,
    });
    node.give(Input::Applied {
        batch: batch.expect("a batch"),
        result: Err(BatchError::Refused(vec![(0, "OFPFMFC_TABLE_FULL".into())])),
    });
    assert_eq!(node.engine.counters().flows_refused, 1);
    assert!(node.reports.iter().any(|report| matches!(
        report,
        Report::FlowsRefused { reason } if reason.contains("OFPFMFC_TABLE_FULL")
    )));
    // A result that belongs to nothing is harmless.
    node.give(Input::Applied {
        batch: BatchId(999),
        result: Ok(()),
    });
}

/// The table of the switch is full: it refuses the flows of each answer.
#[test]
fn flows_that_the_switch_refuses_are_reported_some_times_and_counted() {
    let told = addresses(0, 200);
    let tell = |node: &mut Node| {
        for (at, address) in told.iter().enumerate() {
            node.answer("p1", &format!("n{at}.example.com"), &[*address], 600);
        }
    };
    let reported = |node: &mut Node| {
        let reports = std::mem::take(&mut node.reports).into_iter();
        let of_refusals = reports.filter(|report| matches!(report, Report::FlowsRefused { .. }));
        of_refusals.count() as u64
    };
    let rules = [allow("example.com"), deny_all()];
    let mut twin = Node::with(&rules);
    tell(&mut twin);
    let mut node = Node::with(&rules);
    node.refused = twin.switch.into_keys().collect();
    tell(&mut node);
    let at_once = reported(&mut node);
    // The answers take some time.
    assert!((BURST..=BURST + 1).contains(&at_once), "{at_once}");
    let counters = node.engine.counters();
    assert_eq!(counters.flows_refused, 200);
    assert_eq!(counters.reports_left_out, 200 - at_once);
    // A comparison tries them again, in one batch.
    node.pass(COMPARE_INTERVAL);
    assert_eq!(reported(&mut node), 1);
}
