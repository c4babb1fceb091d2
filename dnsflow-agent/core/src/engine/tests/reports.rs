//! What people are told.

use super::*;
use crate::{
    io::report::{NewProblems, PresentProblems},
    values::limits::{PROBLEM_TEXTS_MAX, REPORT_BURST_TIME, REPORT_INTERVAL, TAKEOVER_MAX},
};

/// The problems of a namespace's rules, by rule index.
pub(super) type Told = BTreeMap<u32, (String, Severity)>;

/// All problems of an EgressFirewall with few, as a report of them has them.
fn told_of(present: &BTreeMap<Severity, PresentProblems>) -> Told {
    let told = present.iter().flat_map(|(severity, present)| {
        assert_eq!(present.count, present.first.len());
        let first = present.first.iter();
        first.map(|(rule, text)| (*rule, (text.clone(), *severity)))
    });
    told.collect()
}

/// By namespace, the problems in the reports so far.
pub(super) fn problems_told(node: &Node) -> Vec<(&str, Told)> {
    let told = node.reports.iter().filter_map(|report| match report {
        Report::Problems {
            namespace, present, ..
        } => Some((namespace.as_str(), told_of(present))),
        _ => None,
    });
    told.collect()
}

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
    let problems = problems_told(&node);
    assert_eq!(problems.len(), 1);
    assert_eq!(
        problems[0].1[&0],
        (
            "waiting for OVN's ACL for dnsName `example.com`".to_owned(),
            Severity::Waiting
        )
    );
    node.set_ovn(&[allow("example.com"), deny_all()]);
    assert_eq!(problems_told(&node).pop(), Some(("ns1", Told::new())));
}

/// Its ACL comes a moment later, unless ovn-kubernetes runs without the feature for it.
#[test]
fn a_wildcard_is_said_to_need_an_option_only_once_its_acl_is_late() {
    let mut node = Node::with(&[deny_all()]);
    let rules = [allow("*.example.com"), deny_all()];
    let option = "--enable-dns-name-resolver";
    node.set_firewall(&rules);
    let told = |node: &Node| format!("{:?}", problems_told(node));
    assert!(told(&node).contains("waiting for OVN's ACL for dnsName `*.example.com`"));
    assert!(!told(&node).contains(option), "{}", told(&node));
    node.pass(TAKEOVER_MAX + Duration::from_secs(1));
    assert!(told(&node).contains(option), "{}", told(&node));
}

#[test]
fn what_was_told_is_no_news_at_another_index_either() {
    let mut node = Node::with(&[deny("a.test"), deny("b.test")]);
    // By report, the new problems, those that are over, and the number of all.
    let told = |node: &mut Node| {
        let reports = std::mem::take(&mut node.reports);
        let told = reports.into_iter().filter_map(|report| match report {
            Report::Problems {
                news,
                over,
                present,
                ..
            } => {
                let news = news.values().flat_map(NewProblems::rules);
                let news: Vec<u32> = news.collect();
                Some((news, over, told_of(&present).len()))
            }
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    assert_eq!(told(&mut node).pop(), Some((vec![0, 1], vec![], 2)));
    let edited = [deny("c.test"), deny("a.test"), deny("b.test")];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    assert_eq!(told(&mut node).pop(), Some((vec![0], vec![], 3)));
    let fewer = [deny("c.test"), deny("b.test")];
    node.set_firewall(&fewer);
    assert_eq!(told(&mut node), [(vec![], vec![1], 2)]);
    node.set_ovn(&fewer);
    let last = told(&mut node).pop().expect("a report");
    assert_eq!((last.0, last.2), (vec![], 2));
}

/// Gives an EgressFirewall to ns2, which has no pod here.
pub(super) fn set_firewall_of_ns2(node: &mut Node, rules: &[Rule]) {
    let id = FirewallId {
        namespace: "ns2".into(),
        name: FIREWALL_NAME.into(),
    };
    node.give(Input::Firewalls(FirewallUpdate {
        reset: false,
        firewalls: vec![(id, Some(firewall(rules)))],
    }));
}

/// So many rules that deny by name, with a caveat each.
fn denials(count: usize) -> Vec<Rule> {
    (0..count).map(|i| deny(&format!("n{i:04}.test"))).collect()
}

/// The reports about so many rules with a problem each: that of all, and that of an edit of one of them. With how many
/// rules were looked at for them. The namespace has a pod here, or none.
fn reports_of_edit(rules: usize, is_local: bool) -> [(Report, usize); 2] {
    let mut node = Node::with(&[]);
    let mut set = |rules: &[Rule]| {
        node.reports.clear();
        let before = node.engine.policy.problem_work();
        match is_local {
            true => node.set_firewall(rules),
            false => set_firewall_of_ns2(&mut node, rules),
        }
        let of_problems = |report: &Report| matches!(report, Report::Problems { .. });
        node.reports.retain(of_problems);
        let work = node.engine.policy.problem_work() - before;
        (node.reports.pop().expect("a report"), work)
    };
    let mut rules = denials(rules);
    let of_all = set(&rules);
    rules[7] = deny("edit.test");
    [of_all, set(&rules)]
}

#[test]
fn the_report_of_an_edit_does_not_grow_with_the_problems_of_the_other_rules() {
    for is_local in [false, true] {
        let [few, many] = [20, 8001].map(|rules| {
            let [_, (of_edit, _)] = reports_of_edit(rules, is_local);
            let Report::Problems {
                news,
                over,
                present,
                ..
            } = &of_edit
            else {
                panic!("{of_edit:?}");
            };
            let counts: Vec<usize> = present.values().map(|present| present.count).collect();
            assert_eq!(counts, [rules]);
            let news: Vec<u32> = news.values().flat_map(NewProblems::rules).collect();
            assert_eq!((news, &over[..]), (vec![7], &[][..]));
            of_edit.size()
        });
        assert_eq!(many, few);
    }
}

#[test]
fn an_edit_costs_by_itself_and_not_by_the_problems_of_the_other_rules() {
    for is_local in [false, true] {
        let [few, many] = [20, 8001].map(|rules| {
            let [(_, of_all), (_, of_edit)] = reports_of_edit(rules, is_local);
            assert!(of_all >= rules, "{of_all} of {rules}");
            of_edit
        });
        assert_eq!(many, few);
    }
}

#[test]
fn a_report_of_many_new_problems_has_the_texts_of_the_first_and_the_rules_of_the_others() {
    let [(of_all, _), _] = reports_of_edit(8001, false);
    let Report::Problems { news, present, .. } = &of_all else {
        panic!("{of_all:?}");
    };
    let (new, all) = (&news[&Severity::Caveat], &present[&Severity::Caveat]);
    assert!(new.rules().eq(0..8001));
    assert_eq!((new.first.len(), all.count), (PROBLEM_TEXTS_MAX, 8001));
    assert_eq!(new.first, all.first);
    assert!(new.first[&7].contains("`n0007.test`"));
    let [(of_few, _), _] = reports_of_edit(PROBLEM_TEXTS_MAX, false);
    // A rule beyond the texts costs its index.
    let others = 8001 - PROBLEM_TEXTS_MAX;
    assert_eq!(of_all.size() - of_few.size(), others * size_of::<u32>());
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
    let invalid = Rule {
        destination: Destination::Invalid("bad".into()),
        ..deny_all()
    };
    set_firewall_of_ns2(&mut node, &[allow("example.com"), invalid]);
    let told = |node: &mut Node| {
        let told = problems_told(node).into_iter();
        let of_ns2 = told.filter(|(namespace, _)| *namespace == "ns2");
        let told: Vec<Vec<u32>> = of_ns2.map(|(_, told)| told.into_keys().collect()).collect();
        node.reports.clear();
        told
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
    node.refused = twin.of_addresses().cloned().collect();
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
