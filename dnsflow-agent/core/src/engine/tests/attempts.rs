//! Which connections are said to be denied, and why.

use super::*;
use crate::{
    ask::{
        attempts::Attempts,
        history::Tried,
        view::{Judged, Reason, Verdict},
    },
    io::report::Denied,
    values::{connection::Attempt, limits::NAMES_PER_CONNECTION_MAX},
};

/// A pod of ns1 tries to connect to port 443 over TCP.
fn attempt(node: &Node, pod: &str, address: &str) -> Attempt {
    Attempt {
        ifindex: ifindex_of(node.pods[&format!("ns1_{pod}")]),
        protocol: Protocol::Tcp,
        address: address.parse().expect("an address"),
        port: 443,
        at: node.now,
    }
}

fn judge(node: &Node, attempts: &mut Attempts, attempt: Attempt) -> Judged {
    let heard = attempts.heard(&attempt);
    let view = node.engine.view();
    view.judge_attempt(&attempt, &heard, node.now)
}

fn denied(node: &Node, attempts: &mut Attempts, address: &str) -> Denied {
    match judge(node, attempts, attempt(node, "p1", address)) {
        Judged::Denied(_, denied) => *denied,
        judged => panic!("{judged:?}"),
    }
}

fn allowed(node: &Node, attempts: &mut Attempts, attempt: Attempt) -> Tried {
    match judge(node, attempts, attempt) {
        Judged::Allowed(tried) => *tried,
        judged => panic!("{judged:?}"),
    }
}

fn node(rules: &[Rule]) -> (Node, Attempts) {
    let mut node = Node::with(rules);
    let resolver = "10.96.0.10:53".parse().expect("a resolver");
    node.give(Input::Resolvers([resolver].into()));
    (node, Attempts::new(DnsPorts::DNS))
}

/// A pod is told a name that no rule mentions: the kernel hands the answer aside.
fn overhears(node: &Node, attempts: &mut Attempts, name: &str, address: [u8; 4]) {
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    let bytes = answer_frame(name, &[address], 60);
    attempts.hear(frame(ifindex, node.now, &bytes), node.now);
}

#[test]
fn a_name_that_no_rule_mentions_is_said_with_what_would_allow_it() {
    let (mut node, mut attempts) = node(&[allow("example.com"), deny_all()]);
    overhears(&node, &mut attempts, "cdn.example.net", ADDRESS);
    node.pass(Duration::from_secs(4));
    let denied = denied(&node, &mut attempts, "203.0.113.1");
    assert_eq!((&*denied.namespace, &*denied.port), ("ns1", "ns1_p1"));
    assert_eq!(denied.reason, Reason::DeniedByRule);
    assert_eq!(denied.rule, Some(1));
    let told: Vec<_> = denied.names.iter().map(ToString::to_string).collect();
    assert_eq!(told, ["cdn.example.net, told 4s ago by 10.96.0.10:53"]);
    assert_eq!(
        denied.to_string(),
        "rule 1 Deny cidrSelector: 0.0.0.0/0; allow it before rule 1 with `dnsName: cdn.example.net`"
    );
}

#[test]
fn an_address_without_a_name_is_denied_unless_ovn_kubernetes_has_resolved_it() {
    let (node, mut attempts) = node(&[allow("example.com"), deny_all()]);
    let denied = denied(&node, &mut attempts, "203.0.113.1");
    assert_eq!(denied.reason, Reason::NotResolved);
    assert!(denied.names.is_empty());
    assert!(denied.text.contains("ovn-kubernetes may have resolved"));
}

#[test]
fn what_the_pod_was_told_for_a_rule_is_not_denied() {
    let (mut node, mut attempts) = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.add_pod("p2", 6);
    let at = |pod| attempt(&node, pod, "203.0.113.1");
    let tried = allowed(&node, &mut attempts, at("p1"));
    assert_eq!((&*tried.namespace, &*tried.port), ("ns1", "ns1_p1"));
    assert_eq!(tried.reason, Reason::AllowedByName);
    assert_eq!(tried.rule, Some(0));
    assert_eq!(tried.names, ["example.com".parse().expect("a name")]);
    assert!(!tried.is_refused && !tried.is_node);
    // The neighbour was not told.
    let other = judge(&node, &mut attempts, at("p2"));
    let Judged::Denied(tried, other) = other else {
        panic!("{other:?}")
    };
    assert_eq!(other.reason, Reason::ToldToOtherPod);
    assert_eq!(other.port, "ns1_p2");
    assert_eq!(tried.port, "ns1_p2");
    assert_eq!(tried.verdict, Verdict::Blocked);
    assert!(tried.names.is_empty());
}

#[test]
fn a_name_of_a_rule_for_another_port_is_said_with_the_rule() {
    let rule = Rule {
        ports: vec![Transport {
            protocol: Protocol::Tcp,
            port: Some(80),
        }],
        ..allow("example.com")
    };
    let (mut node, mut attempts) = node(&[rule, deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    let denied = denied(&node, &mut attempts, "203.0.113.1");
    assert_eq!(denied.reason, Reason::WrongPort);
    assert_eq!(denied.names[0].name.to_string(), "example.com");
    assert_eq!(denied.text, "rule 0 allows it for tcp/80 only");
    let mut other = attempt(&node, "p1", "203.0.113.1");
    other.port = 80;
    allowed(&node, &mut attempts, other);
}

#[test]
fn a_name_that_a_rule_mentions_by_now_counts_only_where_the_cache_has_it() {
    let (mut node, mut attempts) = node(&[allow("example.com"), deny_all()]);
    overhears(&node, &mut attempts, "example.org", ADDRESS);
    let rules = [allow("example.com"), allow("example.org"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    let denied = denied(&node, &mut attempts, "203.0.113.1");
    assert_eq!(denied.reason, Reason::NotResolved);
    assert_eq!(denied.names[0].name.to_string(), "example.org");
    let remedy = denied.remedy.expect("one for an address");
    assert!(
        remedy.starts_with("if the pod connects without a name, "),
        "{remedy}"
    );
}

#[test]
fn what_is_in_the_cluster_or_on_the_link_is_not_judged() {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        refusals: Refusals::new(&[], &[], &[], &[]).expect("few networks"),
        ..Config::default()
    });
    let mut node = node.start(&[deny_all()]);
    let resolver = "10.96.0.10:53".parse().expect("a resolver");
    node.give(Input::Resolvers([resolver].into()));
    let mut attempts = Attempts::new(DnsPorts::DNS);
    for address in [
        // The cluster's DNS.
        "10.96.0.10",
        "127.0.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.251",
        "fe80::1",
        "ff02::fb",
        "::1",
    ] {
        let judged = judge(&node, &mut attempts, attempt(&node, "p1", address));
        assert_eq!(judged, Judged::NotJudged, "{address}");
    }
    // What is refused for other reasons can be denied all the same.
    for address in [
        "169.254.169.254",
        "100.64.0.2",
        "192.168.1.1",
        "203.0.113.1",
    ] {
        let denied = denied(&node, &mut attempts, address);
        assert_eq!(denied.rule, Some(0), "{address}");
    }
    let mut unknown = attempt(&node, "p1", "203.0.113.1");
    unknown.ifindex = 99;
    assert_eq!(judge(&node, &mut attempts, unknown), Judged::NotJudged);
}

/// Attempts come to the engine some time after their packets.
#[test]
fn an_attempt_from_before_an_edit_is_not_judged_by_the_new_rules() {
    let rules = [deny_all()];
    let (mut node, mut attempts) = node(&[allow("example.com")]);
    let before = attempt(&node, "p1", "203.0.113.1");
    assert!(!allowed(&node, &mut attempts, before).is_refused);
    node.pass(Duration::from_millis(50));
    // OVN enforces the former rules until it has the new ones.
    node.set_firewall(&rules);
    node.pass(Duration::from_millis(10));
    let between = attempt(&node, "p1", "203.0.113.1");
    node.pass(Duration::from_millis(10));
    node.set_ovn(&rules);
    for early in [before, between] {
        assert_eq!(judge(&node, &mut attempts, early), Judged::NotJudged);
    }
    assert_eq!(denied(&node, &mut attempts, "203.0.113.1").rule, Some(0));
    node.pass(COMPARE_INTERVAL);
    let later = attempt(&node, "p1", "203.0.113.1");
    node.pass(Duration::from_millis(100));
    let judged = judge(&node, &mut attempts, later);
    assert!(matches!(judged, Judged::Denied(..)), "{judged:?}");
}

#[test]
fn only_pods_behind_a_firewall_are_watched() {
    let mut node = Node::with(&[deny_all()]);
    let p1 = ifindex_of(node.pods["ns1_p1"]);
    assert_eq!(node.kernel.watched, [p1].into());
    node.add_pod("p2", 6);
    let p2 = ifindex_of(node.pods["ns1_p2"]);
    assert_eq!(node.kernel.watched, [p1, p2].into());
    node.remove_interface("p1");
    assert_eq!(node.kernel.watched, [p2].into());
    node.give(firewalls(false, None));
    node.pass(Duration::from_secs(60));
    assert_eq!(node.kernel.watched, [].into());
    node.set_firewall(&[deny_all()]);
    assert_eq!(node.kernel.watched, [p2].into());
}

#[test]
fn before_everything_is_read_nothing_is_judged() {
    let mut node = Node::bare();
    node.add_pod("p1", 5);
    let mut attempts = Attempts::new(DnsPorts::DNS);
    let judged = judge(&node, &mut attempts, attempt(&node, "p1", "203.0.113.1"));
    assert_eq!(judged, Judged::NotJudged);
}

/// The report of a denied connection to an address with so many names, of which a rule denies each. The last one was told
/// a second ago, and the one before it two.
fn denied_with_names(count: usize) -> Denied {
    let names: Vec<String> = (0..count).map(|i| format!("d{i:04}.test")).collect();
    let rules: Vec<Rule> = names.iter().map(|name| deny(name)).collect();
    let (mut node, mut attempts) = node(&rules);
    for (at, name) in names.iter().enumerate() {
        if at + 2 >= count {
            node.pass(Duration::from_secs(1));
        }
        node.answer("p1", &format!("www.{name}"), &[ADDRESS], 3600);
    }
    node.pass(Duration::from_secs(1));
    denied(&node, &mut attempts, "203.0.113.1")
}

#[test]
fn the_report_of_a_denied_connection_does_not_grow_with_the_names_of_the_address() {
    let counts = [NAMES_PER_CONNECTION_MAX + 1, 300];
    let [few, many] = counts.map(|count| {
        let denied = denied_with_names(count);
        assert_eq!(denied.names.len(), NAMES_PER_CONNECTION_MAX);
        assert_eq!(denied.names_left_out, count - denied.names.len());
        let newest = denied.names.iter().take(2);
        let newest = newest.map(|told| (told.name.to_string(), told.ago.as_secs()));
        let told = |back| format!("www.d{:04}.test", count - back);
        assert!(newest.eq([(told(1), 1), (told(2), 2)]), "{denied:?}");
        Report::Denied(Box::new(denied)).size()
    });
    assert_eq!(many, few);
}
