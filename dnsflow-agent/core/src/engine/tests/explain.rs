//! Why is this pod blocked? The situations in which people ask, one each.

use std::{net::SocketAddr, ops::Range};

use dnsflow_common::{question::question_hash, walk::Ports as DnsPorts};
use ipnet::IpNet;

use super::{
    answers::truncated,
    limits::{many, node_with_many},
    starts::is_open,
    *,
};
use crate::{
    ask::{
        attempts::{AskedServer, Attempts, Heard, HeardAt},
        view::{
            Backend, Beside, ExplainedAddress, Explanation, Frontend, Judged, Reason, StepOutcome,
            Target, Verdict, told_names::WORK,
        },
    },
    dns::{
        QuestionType,
        tcp::{ACK, FIN, RST, SYN},
    },
    io::input::Frame,
    ovn::{
        acl::of_ports,
        hash::{Family, address_set_hashes},
        rows::{GatewayPort, Interface, LoadBalancer, LogicalSwitch},
    },
    testing::alias_frame,
    values::{
        connection::{Attempt, PendingQuery},
        limits::{ENDED_NAMES_MAX, GROUP_FLOWS_PER_SCOPE_MAX, TAKEOVER_MAX},
        name::DnsName,
    },
};

const TARGET: &str = "203.0.113.1:443";

/// A node whose DNS server is trusted.
fn node(rules: &[Rule]) -> Node {
    let mut node = Node::with(rules);
    let resolver = "10.96.0.10:53".parse().expect("a resolver");
    node.give(Input::Resolvers([resolver].into()));
    node
}

fn explain(node: &Node, pod: &str, target: &str) -> Explanation {
    let target = target.parse().expect("a target");
    explain_with(node, pod, target, &ovn_has_resolved_nothing())
}

fn ovn_has_resolved_nothing() -> Beside {
    Beside {
        sets: Some(BTreeMap::new()),
        ..Beside::default()
    }
}

fn explain_with(node: &Node, pod: &str, target: Target, beside: &Beside) -> Explanation {
    let view = node.engine.view();
    let explained = view.explain(&format!("ns1_{pod}"), &target, beside, node.now);
    explained.expect("the pod is there")
}

/// The only address of an explanation.
fn address(explained: Explanation) -> ExplainedAddress {
    let [address] = <[_; 1]>::try_from(explained.addresses).expect("one address");
    assert_eq!(address.verdict, explained.verdict);
    address
}

fn reason(node: &Node, target: &str) -> (Verdict, Reason, Option<u32>) {
    let explained = address(explain(node, "p1", target));
    (explained.verdict, explained.reason, explained.rule)
}

/// The verdict over the pod's attempt to connect to port 443 of the address.
pub(super) fn judged(node: &Node) -> Judged {
    let attempt = Attempt {
        ifindex: ifindex_of(node.pods["ns1_p1"]),
        protocol: Protocol::Tcp,
        address: ADDRESS.into(),
        port: 443,
        at: node.now,
    };
    node.engine.view().judge_attempt(&attempt, &[], node.now)
}

/// An answer for a name that no rule mentions has led a pod to the address.
fn heard(node: &Node, pod: &str, name: &str) -> HeardAt {
    HeardAt {
        ifindex: ifindex_of(node.pods[&format!("ns1_{pod}")]),
        address: ADDRESS.into(),
        heard: Heard {
            name: DomainName::from_presentation(name).expect("a name"),
            at: node.now,
            resolver: "10.96.0.10:53".parse().expect("a resolver"),
        },
    }
}

pub(super) fn cidr(action: RuleAction, network: &str) -> Rule {
    Rule {
        action,
        destination: Destination::Cidr(network.parse::<IpNet>().expect("a network")),
        ports: vec![],
    }
}

fn allow_port(name: &str, port: u16) -> Rule {
    Rule {
        ports: vec![Transport {
            protocol: Protocol::Tcp,
            port: Some(port),
        }],
        ..allow(name)
    }
}

#[test]
fn a_pod_that_was_told_the_address_may_reach_it() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS], 60);
    let allowed = (Verdict::Allowed, Reason::AllowedByName, Some(0));
    for target in [
        TARGET,
        "203.0.113.1",
        "www.example.com",
        "www.example.com:443",
    ] {
        assert_eq!(reason(&node, target), allowed, "{target}");
    }
    let explained = address(explain(&node, "p1", TARGET));
    let entry = explained.entry.expect("an entry");
    assert_eq!(entry.names[0].name, "www.example.com");
    assert_eq!(entry.names[0].rules, [0]);
    let [own, of_group] = &entry.flows[..] else {
        panic!("{:?}", entry.flows)
    };
    assert!(own.flow.contains("nw_src=10.244.0.5,nw_dst=203.0.113.1"));
    let (.., tag) = node.tagged()[0];
    assert!(of_group.flow.contains(&format!("tun_id={:#x}", tag.bits())));
    assert_eq!(explained.steps.len(), 2);
    assert_eq!(explained.steps[1].outcome, StepOutcome::TooLate);
}

#[test]
fn without_a_firewall_everything_passes() {
    let mut node = node(&[]);
    node.give(Input::Firewalls(FirewallUpdate {
        reset: true,
        firewalls: vec![],
    }));
    let passes = (Verdict::Allowed, Reason::NoFirewall, None);
    assert_eq!(reason(&node, TARGET), passes);
}

#[test]
fn without_a_rule_that_matches_everything_passes() {
    let node = node(&[allow("example.com")]);
    let passes = (Verdict::Allowed, Reason::NoRuleDenies, None);
    assert_eq!(reason(&node, TARGET), passes);
}

#[test]
fn no_rule_allows_the_name() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.net", &[ADDRESS], 60);
    let beside = Beside {
        heard: vec![heard(&node, "p1", "example.net")],
        ..ovn_has_resolved_nothing()
    };
    let target = "example.net".parse().expect("a target");
    let explained = address(explain_with(&node, "p1", target, &beside));
    assert_eq!(explained.verdict, Verdict::Blocked);
    assert_eq!(explained.reason, Reason::DeniedByRule);
    assert_eq!(explained.rule, Some(1));
    assert_eq!(
        explained.remedy.as_deref(),
        Some("allow it before rule 1 with `dnsName: example.net`")
    );
}

#[test]
fn the_pod_has_not_asked() {
    let node = node(&[allow("example.com"), deny_all()]);
    let not_yet = |rule| (Verdict::NotYet, Reason::NotResolved, Some(rule));
    assert_eq!(reason(&node, TARGET), not_yet(1));
    assert_eq!(reason(&node, "example.com:443"), not_yet(0));
    let hints = explain(&node, "p1", TARGET).hints;
    assert!(hints[0].contains("10.96.0.10:53"), "{hints:?}");
}

/// A node with a pod on the default network (`p1`), one on a user-defined network (`udn`), and the cluster's DNS.
fn with_udn(rules: &[Rule]) -> Node {
    let mut node = node(rules);
    let udn = Some("tenant.network".to_owned());
    let switch = |network: Option<&String>, pods: &str| LogicalSwitch {
        network: network.cloned(),
        is_primary: network.is_some(),
        networks: vec![pods.parse().expect("a network")],
    };
    node.give(Input::Nb(NbUpdate {
        switches: vec![
            (RowId::new(0x14), Some(switch(None, "10.244.0.0/16"))),
            (
                RowId::new(0x15),
                Some(switch(udn.as_ref(), "10.100.0.0/16")),
            ),
        ],
        load_balancers: vec![(
            RowId::new(0x1b),
            Some(LoadBalancer {
                service: Some("kube-system/kube-dns".into()),
                network: None,
                addresses: [[10, 96, 0, 10].into()].into(),
                backends: [[10, 244, 3, 4].into()].into(),
            }),
        )],
        ..NbUpdate::default()
    }));
    let row = RowId::new(0x107);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(
            row,
            Some(Interface {
                network: udn,
                ..interface("ns1_udn", 7, "uid-udn")
            }),
        )],
    }));
    node.add_logical_port("udn", 7, row);
    node
}

/// Kubelet's probes alone go by the default network.
#[test]
fn a_pod_with_a_primary_user_defined_network_sends_by_it_alone() {
    let mut node = with_udn(&[deny_all()]);
    let udn = Interface {
        network: Some("tenant.network".into()),
        ..interface("tenant.network_ns1_p1", 8, "uid-p1")
    };
    let ports = |node: &Node| node.engine.view().ports_of("ns1", "p1");
    assert_eq!(ports(&node), ["ns1_p1"]);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(RowId::new(0x108), Some(udn))],
    }));
    assert_eq!(ports(&node), ["tenant.network_ns1_p1"]);
}

/// ovn-kubernetes leaves the subnets of that network alone out of the rule.
#[test]
fn on_a_user_defined_network_a_rule_holds_for_pods_of_the_default_network() {
    let node = with_udn(&[deny_all()]);
    let in_cluster = (Verdict::Allowed, Reason::InCluster);
    let denied = (Verdict::Blocked, Reason::DeniedByRule);
    for (pod, target, expected) in [
        ("udn", "10.244.3.4:53", denied),
        ("udn", "10.96.0.10:53", denied),
        ("udn", "10.100.0.9:80", in_cluster),
        ("p1", "10.244.3.4:53", in_cluster),
        ("p1", "10.96.0.10:53", in_cluster),
        ("p1", "10.100.0.9:80", denied),
    ] {
        let explained = address(explain(&node, pod, target));
        let verdict = (explained.verdict, explained.reason);
        assert_eq!(verdict, expected, "{pod}, {target}");
    }
}

#[test]
fn a_deny_of_all_addresses_closes_the_dns_of_a_user_defined_network() {
    let mut node = with_udn(&[allow("example.com"), deny_all()]);
    let hint = "on the user-defined network tenant.network, rule 1 also denies the cluster's DNS: allow its address \
                before it by `cidrSelector` (10.96.0.10)";
    let has_hint = |node: &Node, pod| {
        let hints = explain(node, pod, "example.com:443").hints;
        hints.iter().any(|one| one == hint)
    };
    assert!(has_hint(&node, "udn"));
    assert!(!has_hint(&node, "p1"), "on the default network");
    let dns = |node: &Node, pod| explain(node, pod, "10.96.0.10:53/udp").verdict;
    assert_eq!(dns(&node, "udn"), Verdict::Blocked);
    assert_eq!(dns(&node, "p1"), Verdict::Allowed);
    for (network, hinted, found) in [
        ("10.244.0.0/16", true, Verdict::Blocked),
        ("10.96.0.10/32", false, Verdict::Allowed),
    ] {
        let allowed = [
            cidr(RuleAction::Allow, network),
            allow("example.com"),
            deny_all(),
        ];
        node.set_firewall(&allowed);
        node.set_ovn(&allowed);
        let hint = hint.replace("rule 1", "rule 2");
        let hints = explain(&node, "udn", "example.com:443").hints;
        assert_eq!(hints.contains(&hint), hinted, "{network}: {hints:?}");
        assert_eq!(dns(&node, "udn"), found, "{network}");
    }
}

/// A query of a pod, which no answer has followed.
fn pending(node: &Node, pod: &str, name: &str, kind: u16) -> PendingQuery {
    let name = DomainName::from_presentation(name).expect("a name");
    PendingQuery {
        ifindex: ifindex_of(node.pods[&format!("ns1_{pod}")]),
        resolver: "10.96.0.10:53".parse().expect("a resolver"),
        question: question_hash(name.wire(), kind),
        at: node.now,
    }
}

#[test]
fn a_query_has_no_answer() {
    const A: u16 = 1;
    const AAAA: u16 = 28;
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    let of = |node: &Node, target: &str, pending: Vec<PendingQuery>| {
        let beside = Beside {
            pending,
            ..ovn_has_resolved_nothing()
        };
        explain_with(node, "p1", target.parse().expect("a target"), &beside)
    };
    let asked = pending(&node, "p1", "www.example.com", A);
    let searched = "www.example.com.ns1.svc.cluster.local";
    let searched = pending(&node, "p1", searched, A);
    node.pass(Duration::from_secs(6));
    let explained = of(&node, "www.example.com:443", vec![asked]);
    assert_eq!(explained.hints, [] as [&str; 0]);
    let found = address(explained);
    let decided = (found.verdict, found.reason, found.rule);
    assert_eq!(decided, (Verdict::Blocked, Reason::NotAnswered, Some(0)));
    assert_eq!(
        found.text,
        "rule 0 allows it once the answer comes: the pod asked 10.96.0.10:53 for it 6s ago, and has no answer"
    );
    // The pod has search domains.
    let found = address(of(&node, "www.example.com", vec![searched]));
    assert_eq!(found.reason, Reason::NotAnswered);
    let name = "for www.example.com.ns1.svc.cluster.local 6s ago";
    assert!(found.text.contains(name), "{}", found.text);
    // Another pod has asked, or this one for something else.
    for other in [
        pending(&node, "p2", "www.example.com", A),
        pending(&node, "p1", "example.com", A),
        pending(&node, "p1", "www.example.com", AAAA),
    ] {
        let found = address(of(&node, "www.example.com", vec![other]));
        assert_eq!(found.reason, Reason::NotResolved, "{other:?}");
    }
    // A rule decides by the address, which the answer would have.
    let network = cidr(RuleAction::Deny, "203.0.113.0/24");
    let rules = [network, allow("example.com"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    let explained = of(&node, "www.example.com", vec![asked]);
    assert_eq!(explained.verdict, Verdict::Depends);
    let hint = "the pod asked 10.96.0.10:53 for it 6s ago, and has no answer";
    assert_eq!(explained.hints, [hint]);
}

/// What the thread beside the engine knows of a name after this answer, with this response code.
fn heard_of(node: &Node, name: &str, answer: (&str, &[[u8; 4]], u8)) -> Beside {
    let (answered, addresses, code) = answer;
    let mut bytes = answer_frame(answered, addresses, 60);
    // The response code, behind Ethernet, IPv4 and UDP (RFC 1035, section 4.1.1).
    bytes[14 + 20 + 8 + 3] |= code;
    let mut attempts = Attempts::new(DnsPorts::DNS);
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    attempts.hear(frame(ifindex, node.now, &bytes), node.now);
    let name = DomainName::from_presentation(name).expect("a name");
    Beside {
        heard: attempts.heard_of(&name),
        failed: attempts.failed_for(&name),
        ..ovn_has_resolved_nothing()
    }
}

#[test]
fn an_error_in_place_of_an_address_decides() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    let of = |node: &Node, target: &str, beside: &Beside| {
        let target = target.parse().expect("a target");
        explain_with(node, "p1", target, beside)
    };
    let asked = node.now;
    let failures = [(2, "SERVFAIL"), (3, "NXDOMAIN"), (5, "REFUSED")];
    let failures = failures.map(|(code, text)| {
        let name = "www.example.com";
        (heard_of(&node, name, (name, &[], code)), text)
    });
    node.pass(Duration::from_secs(6));
    for (beside, text) in &failures {
        let explained = of(&node, "www.example.com:443", beside);
        assert_eq!(explained.hints, [] as [&str; 0]);
        let found = address(explained);
        let blocked = (Verdict::Blocked, Reason::AnsweredWithError, Some(0));
        assert_eq!((found.verdict, found.reason, found.rule), blocked);
        let text = format!(
            "rule 0 allows it once an answer has an address: the pod asked 10.96.0.10:53 for it 6s ago, and was told {text}"
        );
        assert_eq!(found.text, text);
    }
    // Of another name it says nothing, and an answer with an address comes after it.
    let other = heard_of(&node, "other.example.com", ("www.example.com", &[], 3));
    let found = of(&node, "other.example.com", &other).verdict;
    assert_eq!(found, Verdict::NotYet);
    let (beside, _) = &failures[1];
    node.answer("p1", "www.example.com", &[ADDRESS], 60);
    assert_eq!(
        of(&node, "www.example.com", beside).verdict,
        Verdict::Allowed
    );
    node.pass(MIN_TTL + IDLE_GRACE + 2 * COMPARE_INTERVAL);
    let expired = address(of(&node, "www.example.com", beside));
    assert_eq!(
        (expired.verdict, expired.reason),
        (Verdict::NotYet, Reason::Expired)
    );
    assert!(beside.failed.iter().all(|one| one.at == asked));
}

/// A wildcard in a zone that is a search domain of the pod: the pod does not ask for the name itself.
#[test]
fn a_name_that_was_told_with_a_search_domain_is_judged_as_such() {
    let rules = [allow("example.com"), deny_all()];
    let node = node(&rules);
    let told = "www.example.com.corp.example.net";
    let beside = heard_of(&node, "www.example.com", (told, &[ADDRESS], 0));
    let of = |node: &Node, target: &str, beside: &Beside| {
        let target = target.parse().expect("a target");
        explain_with(node, "p1", target, beside)
    };
    let explained = of(&node, "www.example.com:443", &beside);
    let hint = "the pod asks for www.example.com with a search domain first: written as `www.example.com.`, it asks for \
                the name itself";
    assert_eq!(explained.hints, [hint]);
    let found = address(explained);
    let blocked = (Verdict::Blocked, Reason::DeniedByRule, Some(1));
    assert_eq!((found.verdict, found.reason, found.rule), blocked);
    assert_eq!(
        found.text,
        format!("the pod was told {told} for it: rule 1 denies it")
    );
    let remedy = format!("allow it before rule 1 with `dnsName: {told}`");
    assert_eq!(found.remedy.as_deref(), Some(&*remedy));
    // As it is printed, and the pod asks again.
    let mut applied = self::node(&[allow("example.com"), allow(told), deny_all()]);
    applied.answer("p1", told, &[ADDRESS], 60);
    assert_eq!(
        of(&applied, "www.example.com:443", &beside).verdict,
        Verdict::Allowed
    );
    // The pod has asked for the name itself since, or was told another name that begins alike.
    let mut later = beside.clone();
    let name = "www.example.com";
    later.failed = heard_of(&applied, name, (name, &[], 3)).failed;
    later.failed[0].at = node.now + Duration::from_secs(1);
    let found = address(of(&node, "www.example.com:443", &later)).reason;
    assert_eq!(found, Reason::AnsweredWithError);
    let short = heard_of(&node, "www", ("www.example.org", &[ADDRESS], 0));
    let explained = of(&node, "www", &short);
    assert_eq!(explained.addresses[0].address, None);
    let hint = "www stands for a name with a search domain behind it; the pod was told www.example.org: ask for that name";
    assert!(
        explained.hints.iter().any(|one| one == hint),
        "{:?}",
        explained.hints
    );
    let without = of(&node, "ww", &short).hints;
    assert!(
        !without.iter().any(|one| one.contains("was told")),
        "{without:?}"
    );
    let service = heard_of(&node, "web", ("web.ns1.svc.cluster.local", &[ADDRESS], 0));
    assert_eq!(
        of(&node, "web", &service).addresses[0].address,
        Some(ADDRESS.into())
    );
}

/// The answers for names that rules mention are in the cache.
#[test]
fn a_mentioned_name_with_a_search_domain_is_found() {
    let mut node = node(&[allow("example.net"), deny_all()]);
    let told = "www.example.com.corp.example.net";
    node.answer("p1", told, &[ADDRESS], 60);
    let found = address(explain(&node, "p1", "www.example.com:443"));
    assert_eq!((found.verdict, found.rule), (Verdict::Allowed, Some(0)));
    assert!(
        found
            .text
            .starts_with(&format!("the pod was told {told} for it: ")),
        "{}",
        found.text
    );
    let short = explain(&node, "p1", "www:443").hints;
    assert!(
        short
            .iter()
            .any(|hint| hint.contains(&format!("was told {told}: "))),
        "{short:?}"
    );
}

/// NODATA: the name is there, and has no address of the pod's IP version.
#[test]
fn an_answer_without_an_address_decides() {
    let node = node(&[allow("example.com"), deny_all()]);
    let name = "www.example.com";
    let beside = heard_of(&node, name, (name, &[], 0));
    let target = || "www.example.com:443".parse().expect("a target");
    let found = address(explain_with(&node, "p1", target(), &beside));
    let blocked = (Verdict::Blocked, Reason::AnsweredWithError, Some(0));
    assert_eq!((found.verdict, found.reason, found.rule), blocked);
    assert!(
        found.text.ends_with("was told that it has no IPv4 address"),
        "{}",
        found.text
    );
    // Most names have no address of the other IP version: of a pod without it, that says nothing.
    let mut of_v6 = beside.clone();
    of_v6.failed[0].failure.question.kind = QuestionType::Aaaa;
    let explained = explain_with(&node, "p1", target(), &of_v6);
    assert_eq!(explained.addresses[0].reason, Reason::NotResolved);
    let mut denied = self::node(&[deny_all()]);
    denied.answer("p1", name, &[ADDRESS], 60);
    let hints = explain_with(&denied, "p1", target(), &of_v6).hints;
    assert!(!hints.iter().any(|hint| hint.contains("IPv6")), "{hints:?}");
}

/// The answer has a CNAME, and no address of the type that the pod asks for. It comes to the engine, like all answers
/// with records.
#[test]
fn an_alias_without_an_address_decides() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    let (name, target) = ("www.example.com", "www.cdn.example.net");
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    // Most names have no address of the other IP version: of a pod without it, that says nothing.
    node.frame(ifindex, &alias_frame(name, target, true));
    let of = |node: &Node| explain(node, "p1", "www.example.com:443");
    let not_yet = (Verdict::NotYet, Reason::NotResolved);
    let found = address(of(&node));
    assert_eq!((found.verdict, found.reason), not_yet);
    node.frame(ifindex, &alias_frame(name, target, false));
    node.pass(Duration::from_secs(6));
    let explained = of(&node);
    assert_eq!(explained.hints, [] as [&str; 0]);
    let found = address(explained);
    let blocked = (Verdict::Blocked, Reason::AnsweredWithError, Some(0));
    assert_eq!((found.verdict, found.reason, found.rule), blocked);
    let text = "rule 0 allows it once an answer has an address: the pod asked 10.96.0.10:53 for it 6s ago, and was told that \
                it is an alias (CNAME) of www.cdn.example.net, which has no IPv4 address";
    assert_eq!(found.text, text);
    // Of another pod, of another name and of the target it says nothing.
    node.add_pod("p2", 6);
    for (pod, name) in [("p2", name), ("p1", "api.example.com")] {
        let found = explain(&node, pod, name).verdict;
        assert_eq!(found, Verdict::NotYet, "{pod} {name}");
    }
    assert_ne!(reason(&node, target).1, Reason::AnsweredWithError);
    // The name gets an address, and it expires.
    node.answer("p1", name, &[ADDRESS], 60);
    assert_eq!(of(&node).verdict, Verdict::Allowed);
    node.pass(MIN_TTL + IDLE_GRACE + 2 * COMPARE_INTERVAL);
    assert_eq!(address(of(&node)).reason, Reason::Expired);
}

#[test]
fn the_questions_without_an_address_have_a_limit() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    let failed = |node: &Node| {
        let id = node.engine.ports.named("ns1_p1").expect("a port");
        let failed = &node.engine.told.cache.port(id).failed;
        let names = failed
            .iter()
            .map(|one| one.failure.question.name.to_string());
        names.collect::<Vec<_>>()
    };
    for _ in 0..3 {
        node.frame(ifindex, &alias_frame("example.com", "example.net", false));
    }
    assert_eq!(failed(&node), ["example.com"], "each question once");
    for at in 0..ENDED_NAMES_MAX {
        let name = format!("{at}.example.com");
        node.frame(ifindex, &alias_frame(&name, "example.net", false));
    }
    assert_eq!(failed(&node).len(), ENDED_NAMES_MAX);
    assert!(!failed(&node).iter().any(|name| name == "example.com"));
}

#[test]
fn a_query_after_the_end_of_an_answer_has_no_answer() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    let lost = pending(&node, "p1", "example.com", 1);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.pass(MIN_TTL + IDLE_GRACE + 2 * COMPARE_INTERVAL);
    let again = pending(&node, "p1", "example.com", 1);
    // The first query was repeated, and answered then.
    for (query, expected) in [(lost, Reason::Expired), (again, Reason::NotAnswered)] {
        let beside = Beside {
            pending: vec![query],
            ..ovn_has_resolved_nothing()
        };
        let target = "example.com".parse().expect("a target");
        let found = address(explain_with(&node, "p1", target, &beside));
        assert_eq!(found.reason, expected);
    }
}

#[test]
fn no_dns_server_is_trusted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.give(Input::Resolvers(BTreeSet::new()));
    assert_eq!(reason(&node, TARGET).1, Reason::NoResolverTrusted);
}

#[test]
fn the_rule_is_for_another_port() {
    let mut node = node(&[allow_port("example.com", 80), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    let blocked = (Verdict::Blocked, Reason::WrongPort, Some(1));
    assert_eq!(reason(&node, TARGET), blocked);
    let depends = (Verdict::Depends, Reason::DependsOnPort, Some(1));
    assert_eq!(reason(&node, "203.0.113.1"), depends);
    let allowed = (Verdict::Allowed, Reason::AllowedByName, Some(0));
    assert_eq!(reason(&node, "203.0.113.1:80"), allowed);
    assert_eq!(reason(&node, "203.0.113.1:80/udp"), blocked);
}

#[test]
fn an_earlier_rule_denies_the_network() {
    let rules = [
        cidr(RuleAction::Deny, "203.0.113.0/24"),
        allow("example.com"),
        deny_all(),
    ];
    let mut node = node(&rules);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    let blocked = (Verdict::Blocked, Reason::DeniedByEarlierRule, Some(0));
    assert_eq!(reason(&node, TARGET), blocked);
}

#[test]
fn an_earlier_rule_allows_the_network() {
    let rules = [cidr(RuleAction::Allow, "203.0.113.0/24"), deny_all()];
    let allowed = (Verdict::Allowed, Reason::AllowedByNetwork, Some(0));
    assert_eq!(reason(&node(&rules), TARGET), allowed);
}

#[test]
fn a_rule_by_name_denies() {
    let mut node = node(&[deny("example.com")]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    let blocked = (Verdict::Blocked, Reason::DeniedByRule, Some(0));
    assert_eq!(reason(&node, TARGET), blocked);
}

#[test]
fn a_limit_left_no_room() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_name_max = 1;
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.answer("p1", "example.com", &[OTHER], 60);
    let reasons = ["203.0.113.1", "203.0.113.2"].map(|target| reason(&node, target).1);
    assert!(reasons.contains(&Reason::LimitReached), "{reasons:?}");
    assert!(reasons.contains(&Reason::AllowedByName), "{reasons:?}");
}

#[test]
fn the_answer_has_expired() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.pass(MIN_TTL + IDLE_GRACE + 2 * COMPARE_INTERVAL);
    let not_yet = |rule| (Verdict::NotYet, Reason::Expired, Some(rule));
    assert_eq!(reason(&node, TARGET), not_yet(1));
    assert_eq!(reason(&node, "example.com"), not_yet(0));
}

#[test]
fn ovn_enforces_the_firewall_before() {
    let rules = [deny_all()];
    let mut node = node(&rules);
    node.set_firewall(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    // OVN enforces what was there before.
    let explained = explain(&node, "p1", TARGET);
    let is_told = |hint: &String| hint.contains("before the present one");
    assert!(explained.hints.iter().any(is_told), "{:?}", explained.hints);
    assert_eq!(address(explained).reason, Reason::AclMissing);
    // ovn-kubernetes has had the time to follow.
    node.pass(TAKEOVER_MAX + Duration::from_secs(1));
    assert_eq!(reason(&node, TARGET).1, Reason::FirewallNotTakenOver);
}

#[test]
fn the_address_is_never_opened() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    // A node has this address, too: it closes.
    let port = GatewayPort {
        addresses: [ADDRESS.into()].into(),
    };
    node.give(Input::Nb(NbUpdate {
        gateway_ports: vec![(RowId::new(0x9a7e), Some(port))],
        ..NbUpdate::default()
    }));
    for target in [TARGET, "example.com"] {
        let explained = address(explain(&node, "p1", target));
        assert_eq!(explained.verdict, Verdict::Blocked);
        assert_eq!(explained.reason, Reason::AddressRefused);
        assert!(explained.text.contains("node"), "{}", explained.text);
    }
}

#[test]
fn the_pod_was_told_only_what_is_never_opened() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "local.example.com", &[[169, 254, 169, 254]], 60);
    let explained = address(explain(&node, "p1", "local.example.com"));
    assert_eq!(explained.reason, Reason::AddressRefused);
    let why = "the address is never opened: metadata";
    assert!(explained.text.ends_with(why), "{}", explained.text);
    let blocked = |rule| (Verdict::Blocked, Reason::AddressRefused, Some(rule));
    assert_eq!(reason(&node, "169.254.169.254:443"), blocked(1));
    assert_eq!(reason(&node, "169.254.1.1:80"), blocked(1), "never told");
    let other = reason(&node, "other.example.com").1;
    assert_eq!(other, Reason::NotResolved);
}

#[test]
fn a_name_that_no_rule_mentions_is_the_remedy() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    let heard = |pod, name| heard(&node, pod, name);
    let beside = Beside {
        heard: vec![
            heard("p1", "www.example.com"),
            heard("p1", "cdn.example.org"),
            heard("p2", "other.example.org"),
        ],
        ..ovn_has_resolved_nothing()
    };
    let target = || TARGET.parse().expect("a target");
    let explained = address(explain_with(&node, "p1", target(), &beside));
    assert_eq!(explained.reason, Reason::DeniedByRule);
    let names = |explained: &ExplainedAddress| -> Vec<String> {
        let heard = explained.heard.iter();
        heard.map(|heard| heard.name.clone()).collect()
    };
    // A rule mentions the first one, and the last one was told to another pod.
    assert_eq!(names(&explained), ["cdn.example.org"]);
    let remedy = "allow it before rule 1 with `dnsName: cdn.example.org`";
    assert_eq!(explained.remedy.as_deref(), Some(remedy));
    let other = address(explain_with(&node, "p2", target(), &beside));
    assert_eq!(names(&other), ["other.example.org"]);
}

#[test]
fn what_ovn_has_resolved_itself_passes() {
    let node = node(&[allow_port("example.com", 443), deny_all()]);
    let name: DnsName = "example.com".parse().expect("a name");
    let with_sets = |hashes: &[u64]| Beside {
        sets: Some([(ADDRESS.into(), hashes.iter().copied().collect())].into()),
        ..Beside::default()
    };
    let explained = |target: &str, beside: &Beside| {
        let target = target.parse().expect("a target");
        explain_with(&node, "p1", target, beside)
    };
    for hash in address_set_hashes(&name, Family::V4) {
        let explained = address(explained(TARGET, &with_sets(&[hash, 7])));
        let decided = (explained.verdict, explained.reason, explained.rule);
        assert_eq!(decided, (Verdict::Allowed, Reason::AllowedByOvn, Some(0)));
        let why = "ovn-kubernetes has resolved example.com to 203.0.113.1";
        assert_eq!(explained.steps[0].why, why);
    }
    let [hash, _] = address_set_hashes(&name, Family::V4);
    let other_port = address(explained("203.0.113.1:80", &with_sets(&[hash])));
    assert_eq!(other_port.reason, Reason::WrongPort);
    let not_there = address(explained(TARGET, &with_sets(&[7])));
    let found = (not_there.verdict, not_there.reason);
    assert_eq!(found, (Verdict::NotYet, Reason::NotResolved));
    // OVN does not answer.
    let not_asked = address(explained(TARGET, &Beside::default()));
    let found = (not_asked.verdict, not_asked.reason);
    assert_eq!(found, (Verdict::NotKnown, Reason::NotResolved));
}

#[test]
fn an_explanation_names_the_dns_server() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    let explained = address(explain(&node, "p1", TARGET));
    let entry = explained.entry.expect("an entry");
    assert_eq!(entry.names[0].resolver.as_deref(), Some("10.96.0.10:53"));
}

#[test]
fn another_pod_was_told() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    node.answer("p2", "example.com", &[ADDRESS], 60);
    let not_yet = |rule| (Verdict::NotYet, Reason::ToldToOtherPod, Some(rule));
    assert_eq!(reason(&node, TARGET), not_yet(1));
    assert_eq!(reason(&node, "example.com"), not_yet(0));
}

/// The texts that a tenant reads, where a pod of this namespace was told the address, or was told nothing.
fn texts_beside_a_pod_of(namespace: &str, is_told: bool) -> [String; 3] {
    let mut node = node(&[allow("example.com"), deny_all()]);
    let id = FirewallId {
        namespace: namespace.to_owned(),
        name: "default".into(),
    };
    let rules = [allow("example.com"), deny_all()];
    node.give(Input::Firewalls(FirewallUpdate {
        reset: false,
        firewalls: vec![(id, Some(firewall(&rules)))],
    }));
    let row = RowId::new(0x109);
    let port = format!("{namespace}_payroll");
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(row, Some(interface(&port, 9, "uid-payroll")))],
    }));
    node.give(Input::Sb(SbUpdate {
        port_bindings: vec![(
            row,
            Some(PortBinding {
                namespace: Some(namespace.into()),
                ..port_binding(&port, 9)
            }),
        )],
        ..SbUpdate::default()
    }));
    if is_told {
        let ifindex = ifindex_of(row);
        let bytes = node.to_pod(ifindex, answer_frame("example.com", &[ADDRESS], 600));
        node.frame(ifindex, &bytes);
        assert_eq!(node.engine.view().addresses(&port).len(), 1);
    }
    let Judged::Denied(_, denied) = judged(&node) else {
        panic!("it is denied");
    };
    // The last is the note of an Event in the tenant's namespace.
    let explained = |target| address(explain(&node, "p1", target)).text;
    [
        explained(TARGET),
        explained("example.com:443"),
        denied.to_string(),
    ]
}

/// An Event on the EgressFirewall shows the same text to everybody who may read the namespace.
#[test]
fn what_a_pod_of_another_namespace_was_told_changes_no_text() {
    let [told, not_told] = [true, false].map(|is_told| texts_beside_a_pod_of("ns2", is_told));
    assert_eq!(told, not_told);
    for text in texts_beside_a_pod_of("ns1", true) {
        assert!(text.contains("ns1_payroll was told"), "{text}");
    }
}

/// An agent starts while ovn-kubernetes has not taken over an EgressFirewall with another network, or sees that edit.
#[test]
fn a_network_that_ovn_has_not_taken_over_decides_nothing() {
    let former = [allow("a.test"), cidr(RuleAction::Deny, "198.51.100.0/24")];
    for was_there in [true, false] {
        let mut node = Node::bare();
        node.read_sources();
        if was_there {
            node.set_firewall(&former);
        }
        node.set_ovn(&former);
        node.set_firewall(&[allow("*.b.test"), deny_all()]);
        node.pass(Duration::from_secs(60));
        node.trust_server();
        let verdict = verdict(&node, TARGET);
        let may_pass = matches!(verdict, Verdict::Allowed | Verdict::NotKnown);
        assert!(may_pass, "{verdict:?}, {was_there}");
    }
}

/// OVN balances no load there.
#[test]
fn an_address_of_the_service_network_that_no_service_has_is_denied_by_the_rules() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    let network = "10.96.0.0/16".parse().expect("a network");
    node.give(Input::ServiceNetworks([network].into()));
    assert_eq!(verdict(&node, "10.96.7.7:443"), Verdict::Blocked);
}

#[test]
fn the_agent_has_just_started() {
    let mut node = Node::bare();
    node.add_pod("p1", 5);
    let not_known = (Verdict::NotKnown, Reason::AgentStarting, None);
    assert_eq!(reason(&node, TARGET), not_known);
}

#[test]
fn the_programs_are_not_attached() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.give(Input::AttachFailed {
        interface: node.pods["ns1_p1"],
        reason: "no such device".into(),
    });
    let explained = address(explain(&node, "p1", TARGET));
    assert_eq!(explained.reason, Reason::NotAttached);
    assert!(explained.text.contains("no such device"));
}

#[test]
fn a_lost_flow_is_said_to_be_missing() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.switch_answers = false;
    let key = node.switch.keys().next().expect("a flow").clone();
    let (cookie, _) = node.switch[&key];
    node.engine
        .handle(Input::FlowLost { key, cookie }, node.now);
    let blocked = (Verdict::Blocked, Reason::FlowMissing, Some(1));
    assert_eq!(reason(&node, TARGET), blocked);
}

#[test]
fn rules_by_node_are_said_to_be_unknown() {
    let nodes = Rule {
        destination: Destination::Nodes,
        ..allow("example.com")
    };
    let mut node = node(&[nodes, deny_all()]);
    let blocked = (Verdict::Blocked, Reason::DeniedByRule, Some(1));
    assert_eq!(reason(&node, TARGET), blocked, "it is no node's");
    let port = GatewayPort {
        addresses: [ADDRESS.into()].into(),
    };
    node.give(Input::Nb(NbUpdate {
        gateway_ports: vec![(RowId::new(0x9a7e), Some(port))],
        ..NbUpdate::default()
    }));
    let explained = address(explain(&node, "p1", TARGET));
    assert_eq!(explained.steps[0].outcome, StepOutcome::Unknown);
    assert_eq!(explained.verdict, Verdict::NotKnown);
    assert_eq!(explained.reason, Reason::NodeSelector);
}

/// OVN's ACL of the rule has the addresses of the selected nodes.
#[test]
fn a_rule_by_node_matches_the_addresses_of_its_acl() {
    let port = |port| Transport {
        protocol: Protocol::Tcp,
        port: Some(port),
    };
    for (action, selected, rest) in [
        (
            RuleAction::Allow,
            Reason::AllowedByNetwork,
            Reason::DeniedByRule,
        ),
        (
            RuleAction::Deny,
            Reason::DeniedByRule,
            Reason::AllowedByNetwork,
        ),
    ] {
        let all = |network| match action {
            RuleAction::Allow => cidr(RuleAction::Deny, network),
            RuleAction::Deny => cidr(RuleAction::Allow, network),
        };
        let nodes = Rule {
            action,
            destination: Destination::Nodes,
            ports: vec![port(6443)],
        };
        let rules = [nodes, all("0.0.0.0/0"), all("::/0")];
        let mut node = node(&rules);
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(
                node.pods["ns1_p1"],
                Some(Interface {
                    addresses: vec![
                        [10, 244, 0, 5].into(),
                        "fd00::5".parse().expect("an address"),
                    ],
                    ..interface("ns1_p1", 5, "uid-p1")
                }),
            )],
        }));
        // Two nodes, of which the rule selects one.
        let gateway = GatewayPort {
            addresses: [ADDRESS.into(), OTHER.into()].into(),
        };
        let mut set = |port: Transport| {
            let row = Acl {
                matches: format!(
                    "(ip4.dst == 203.0.113.1 || ip6.dst == 2001:db8::1) && inport == @{GROUP}{}",
                    of_ports(&[port])
                ),
                ..acl(0, &rules).expect("a rule")
            };
            node.give(Input::Nb(NbUpdate {
                acls: vec![(acl_row(0), Some(row))],
                gateway_ports: vec![(RowId::new(0x9a7e), Some(gateway.clone()))],
                ..NbUpdate::default()
            }));
            [
                "203.0.113.1:6443",
                "[2001:db8::1]:6443",
                "203.0.113.1:443",
                "203.0.113.2:6443",
                "[2001:db8::2]:6443",
            ]
            .map(|target| reason(&node, target).1)
        };
        let found = set(port(6443));
        assert_eq!(found, [selected, selected, rest, rest, rest]);
        // OVN has the ACL of other ports: it is following an edit.
        assert_eq!(set(port(443))[0], Reason::NodeSelector);
    }
}

#[test]
fn a_port_of_another_node_cannot_be_explained() {
    let node = node(&[deny_all()]);
    let target = TARGET.parse().expect("a target");
    assert_eq!(
        node.engine
            .view()
            .explain("ns1_p9", &target, &Beside::default(), node.now),
        None
    );
}

/// The API server takes the A-label alone as `dnsName`, and pods ask for it.
#[test]
fn a_name_in_another_script_is_found() {
    let mut node = node(&[allow("xn--mnchen-3ya.example.com"), deny_all()]);
    node.answer("p1", "xn--mnchen-3ya.example.com", &[ADDRESS], 60);
    let allowed = (Verdict::Allowed, Reason::AllowedByName, Some(0));
    for target in ["münchen.example.com:443", "MÜNCHEN.example.com."] {
        assert_eq!(reason(&node, target), allowed, "{target}");
    }
}

#[test]
fn a_node_is_shown_with_its_ports_and_firewalls() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 60);
    let view = node.engine.view().node();
    assert!(view.is_ready && view.switch_is_compared);
    assert!(view.sources.iter().all(|source| source.is_read));
    assert_eq!(view.resolvers, ["10.96.0.10:53"]);
    // Those of the addresses, of their rule, and of their logical switch.
    assert_eq!((view.addresses, view.flows), (2, node.switch.len()));
    assert_eq!(node.switch.len(), 2 + 1 + 1);
    let [port] = &view.ports[..] else {
        panic!("{:?}", view.ports)
    };
    assert_eq!((&*port.namespace, &*port.pod, port.told), ("ns1", "p1", 2));
    assert_eq!(port.firewall.as_deref(), Some("ns1"));
    let [firewall] = &view.firewalls[..] else {
        panic!("{:?}", view.firewalls)
    };
    assert_eq!((firewall.rules, firewall.rules_by_name), (2, 1));
    let addresses = node.engine.view().addresses("ns1_p1");
    assert_eq!(addresses, [IpAddr::from(ADDRESS), IpAddr::from(OTHER)]);
    let entries = node.engine.view().entries("ns1_p1", &addresses, node.now);
    assert_eq!(entries.len(), 2);
    assert_eq!(node.engine.view().ports_of("ns1", "p1"), ["ns1_p1"]);
}

#[test]
fn rules_that_were_there_at_the_start_came_at_no_time() {
    let mut node = Node::bare();
    let came_at = |node: &Node| {
        let rules = node.engine.view().rules("ns1", 0, 8);
        rules.expect("there is a firewall").came_at
    };
    // The API server may answer seconds after the start of the agent.
    node.give(firewalls(true, Some(firewall(&[deny_all()]))));
    assert_eq!(came_at(&node), Timestamp::default());
    node.pass(Duration::from_secs(1));
    node.set_firewall(&[deny_all()]);
    assert_eq!(came_at(&node), Timestamp::default(), "nothing is new");
    node.set_firewall(&[allow("example.com"), deny_all()]);
    assert_eq!(came_at(&node), node.now);
}

/// An address has two names, with twelve rules each for 1,024 ports. The namespace has no room for the flows of both.
fn without_room(first: Rule, second: Rule, further: &[Rule]) -> Node {
    // Ports 2001 to 3024.
    let others = tcp(3024).split_off(2000);
    let of_second = Rule {
        ports: others,
        ..second
    };
    let rules = [
        vec![many(first, 1024); 12],
        vec![of_second; 12],
        further.to_vec(),
    ]
    .concat();
    let mut node = node_with_many(&rules);
    node.trust_server();
    for name in ["a.test", "b.test"] {
        limits::tell(&mut node, name, ADDRESS, 600);
    }
    assert_eq!(node.engine.counters().addresses_cut, 1);
    node
}

#[test]
fn the_flows_of_a_rule_have_no_room() {
    let allowed = without_room(allow("a.test"), allow("b.test"), &[deny_all()]);
    let of_first = (Verdict::Allowed, Reason::AllowedByName, Some(0));
    assert_eq!(reason(&allowed, TARGET), of_first);
    let explained = address(explain(&allowed, "p1", "203.0.113.1:2443"));
    assert_eq!(explained.verdict, Verdict::Blocked);
    assert_eq!(explained.reason, Reason::LimitReached);
    assert!(explained.text.contains("list fewer ports"), "{explained:?}");
    let remedy = "list fewer ports in rule 12, or none";
    assert_eq!(explained.remedy.as_deref(), Some(remedy));
    // The address is closed, also where no rule that denies has the port.
    let denied = without_room(deny("a.test"), allow("b.test"), &[allow("b.test")]);
    for port in [443, 2443, 8443] {
        let explained = address(explain(&denied, "p1", &format!("203.0.113.1:{port}")));
        let found = (explained.verdict, explained.reason, explained.rule);
        let blocked = (Verdict::Blocked, Reason::LimitReached, Some(0));
        assert_eq!(found, blocked, "{port}");
        let why = &explained.steps[0].why;
        assert!(why.contains("list fewer ports"), "{explained:?}");
    }
}

// The situations of a stranger.

fn verdict(node: &Node, target: &str) -> Verdict {
    explain(node, "p1", target).verdict
}

/// By name, without a known address: rules by network may match, or not.
#[test]
fn a_network_before_the_name_decides_by_the_address() {
    let denied = node(&[
        cidr(RuleAction::Deny, "203.0.113.0/24"),
        allow("example.com"),
        deny_all(),
    ]);
    let depends = (Verdict::Depends, Reason::DependsOnAddress, Some(1));
    assert_eq!(reason(&denied, "example.com:443"), depends);
    let allowed = node(&[cidr(RuleAction::Allow, "203.0.113.0/24"), deny_all()]);
    let depends = (Verdict::Depends, Reason::DependsOnAddress, Some(1));
    assert_eq!(reason(&allowed, "example.com:443"), depends);
    let text = address(explain(&allowed, "p1", "example.com:443")).text;
    assert_eq!(
        text,
        "rule 0 allows the addresses of cidrSelector: 203.0.113.0/24; for others, rule 1 denies it"
    );
    // What decides in any case, is certain.
    let both = node(&[
        cidr(RuleAction::Allow, "203.0.113.0/24"),
        allow("example.com"),
        deny_all(),
    ]);
    assert_eq!(verdict(&both, "example.com:443"), Verdict::NotYet);
    let none = node(&[cidr(RuleAction::Deny, "203.0.113.0/24"), deny_all()]);
    assert_eq!(verdict(&none, "example.com:443"), Verdict::Blocked);
}

/// Nobody knows whether a name that the pod has not asked for leads to an address of another name.
#[test]
fn another_name_may_have_the_address_of_a_name_that_was_not_asked_for() {
    let open = cidr(RuleAction::Allow, "0.0.0.0/0");
    let rules = [deny("bad.test"), allow("example.com"), open.clone()];
    let explained = address(explain(&node(&rules), "p1", "example.com:443"));
    assert_eq!(explained.verdict, Verdict::NotYet);
    assert!(
        explained
            .text
            .ends_with("rule 0 denies it if its name has the same address")
    );
    let depends = (Verdict::Depends, Reason::DependsOnAddress, Some(2));
    assert_eq!(reason(&node(&rules), "other.test:443"), depends);
    let passes = (Verdict::Allowed, Reason::AllowedByNetwork, Some(1));
    assert_eq!(reason(&node(&rules[1..]), "example.com:443"), passes);
}

/// The address of a name is open through another name.
#[test]
fn an_address_that_another_name_has_opened_passes() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    // The pod has not asked for this one: nobody knows where it leads.
    assert_eq!(verdict(&node, "alias.example.net:443"), Verdict::Depends);
    let beside = Beside {
        heard: vec![heard(&node, "p1", "alias.example.net")],
        ..ovn_has_resolved_nothing()
    };
    let target = "alias.example.net:443".parse().expect("a target");
    let explained = address(explain_with(&node, "p1", target, &beside));
    assert_eq!(explained.verdict, Verdict::Allowed);
    assert_eq!(explained.address, Some(ADDRESS.into()));
}

/// A rule mentions the name since the pod has asked for it: the address is known, and opens with the next answer.
#[test]
fn a_name_that_a_rule_has_come_to_mention_is_judged_by_its_address() {
    let denied = cidr(RuleAction::Deny, "198.51.100.0/24");
    let node = node(&[denied, allow("example.com"), deny_all()]);
    let beside = Beside {
        heard: vec![heard(&node, "p1", "www.example.com")],
        ..ovn_has_resolved_nothing()
    };
    let target = || "www.example.com:443".parse().expect("a target");
    let explained = address(explain_with(&node, "p1", target(), &beside));
    assert_eq!(explained.verdict, Verdict::NotYet);
    assert_eq!(explained.address, Some(ADDRESS.into()));
    let unheard = explain_with(&node, "p1", target(), &ovn_has_resolved_nothing());
    assert_eq!(unheard.verdict, Verdict::Depends);
}

/// The ACL of a rule for all addresses, as ovn-kubernetes writes it for a cluster, or a user-defined network, with several
/// networks of one IP version. A user-defined network can get further ones.
#[test]
fn a_pod_in_any_network_of_several_is_in_the_cluster() {
    for group in [GROUP, "a777"] {
        let rules = [allow("example.com"), deny_all()];
        let mut node = node(&rules);
        let mut excluded = vec!["ip4.dst != 10.244.0.0/16", "ip4.dst != 203.0.113.0/24"];
        let exclude = |node: &mut Node, excluded: &[&str]| {
            let excluded = excluded.join("&&");
            let all = format!("(ip4.dst == 0.0.0.0/0 && {excluded}) && inport == @{group}");
            let acl = acl(1, &rules).map(|acl| Acl {
                matches: all.clone(),
                ..acl
            });
            let flow = logical_flow(1, &rules).map(|flow| LogicalFlow {
                matches: format!("reg0[8] == 1 && ({all})"),
                ..flow
            });
            node.give(Input::Nb(NbUpdate {
                acls: vec![(acl_row(1), acl)],
                ..NbUpdate::default()
            }));
            node.give(Input::Sb(SbUpdate {
                logical_flows: vec![(logical_flow_row(1), flow)],
                ..SbUpdate::default()
            }));
        };
        exclude(&mut node, &excluded);
        let further = [198, 51, 100, 1];
        node.answer("p1", "example.com", &[ADDRESS, further], 600);
        assert_eq!(node.destinations(), ["198.51.100.1".to_owned()].into());
        let refused: Vec<_> = node.engine.refused().iter().collect();
        assert!(refused.contains(&(Refused::Cluster, 1)), "{refused:?}");
        let in_cluster = (Verdict::Allowed, Reason::InCluster, None);
        assert_eq!(reason(&node, TARGET), in_cluster, "{group}");
        assert_eq!(reason(&node, "10.244.1.7:443"), in_cluster, "{group}");
        assert!(matches!(judged(&node), Judged::NotJudged), "{group}");
        excluded.push("ip4.dst != 198.51.100.0/24");
        exclude(&mut node, &excluded);
        assert_eq!(node.destinations(), BTreeSet::new());
        assert_eq!(reason(&node, "198.51.100.1:443"), in_cluster, "{group}");
    }
}

/// An EgressFirewall does not hold in the pod, and not in the cluster.
#[test]
fn destinations_in_pod_and_cluster_pass() {
    let mut node = node(&[deny_all()]);
    let network = "10.244.0.0/16".parse().expect("a network");
    let pods = LogicalSwitch {
        networks: vec![network],
        ..LogicalSwitch::default()
    };
    let service = |address: &str, backend: &str| LoadBalancer {
        service: Some("ns1/web".to_owned()),
        network: None,
        addresses: [address.parse().expect("an address")].into(),
        backends: [backend.parse().expect("an address")].into(),
    };
    node.give(Input::Nb(NbUpdate {
        switches: vec![(RowId::new(0x5175), Some(pods))],
        load_balancers: vec![
            (RowId::new(0x1b1), Some(service("10.96.0.80", "10.244.1.7"))),
            (RowId::new(0x1b2), Some(service("10.96.0.1", "203.0.113.7"))),
        ],
        ..NbUpdate::default()
    }));
    for (target, found, why) in [
        ("127.0.0.1:80", Verdict::Allowed, Reason::InPod),
        ("localhost", Verdict::Allowed, Reason::InPod),
        ("10.244.0.5:80", Verdict::Allowed, Reason::InPod),
        ("10.244.1.7:80", Verdict::Allowed, Reason::InCluster),
        ("10.96.0.80:80", Verdict::Allowed, Reason::InCluster),
        ("10.96.0.1:443", Verdict::NotKnown, Reason::LeadsOut),
        ("224.0.0.1:80", Verdict::NotKnown, Reason::OnLink),
        (
            "kubernetes.default.svc",
            Verdict::NotKnown,
            Reason::ClusterName,
        ),
        ("203.0.113.1:80", Verdict::Blocked, Reason::DeniedByRule),
    ] {
        let explained = address(explain(&node, "p1", target));
        assert_eq!(
            (explained.verdict, explained.reason),
            (found, why),
            "{target}"
        );
        assert!(found == Verdict::Blocked || explained.remedy.is_none());
    }
}

/// A node with a Service that leads to these endpoints, and OVN's account of it.
fn with_service(rules: &[Rule], backends: &[&str]) -> (Node, Beside) {
    let mut node = node(rules);
    let network = "10.244.0.0/16".parse().expect("a network");
    let pods = LogicalSwitch {
        networks: vec![network],
        ..LogicalSwitch::default()
    };
    let frontend = [10, 96, 0, 80].into();
    let backends: Vec<Backend> = backends
        .iter()
        .map(|text| {
            let endpoint: SocketAddr = text.parse().expect("an endpoint");
            Backend {
                address: endpoint.ip(),
                port: Some(endpoint.port()),
            }
        })
        .collect();
    let balancer = LoadBalancer {
        service: Some("ns1/web".to_owned()),
        network: None,
        addresses: [frontend].into(),
        backends: backends.iter().map(|one| one.address).collect(),
    };
    node.give(Input::Nb(NbUpdate {
        switches: vec![(RowId::new(0x5175), Some(pods))],
        load_balancers: vec![(RowId::new(0x1b1), Some(balancer))],
        ..NbUpdate::default()
    }));
    let addresses = backends.iter().map(|one| one.address);
    let sets = addresses.map(|address| (address, BTreeSet::new()));
    let beside = Beside {
        sets: Some(sets.collect()),
        frontends: Some(vec![Frontend {
            service: "ns1/web".to_owned(),
            network: None,
            address: frontend,
            protocol: Protocol::Tcp,
            port: Some(80),
            backends: Some(backends),
        }]),
        ..Beside::default()
    };
    (node, beside)
}

fn decision(
    node: &Node,
    target: &str,
    beside: &Beside,
) -> (Verdict, Reason, Option<u32>, Option<String>) {
    let target = target.parse().expect("a target");
    let explained = address(explain_with(node, "p1", target, beside));
    let remedy = explained.remedy;
    (explained.verdict, explained.reason, explained.rule, remedy)
}

/// OVN looks at ACLs behind its load balancers.
#[test]
fn a_connection_to_a_service_is_judged_by_its_endpoints() {
    let outside = || cidr(RuleAction::Allow, "203.0.113.0/30");
    let on_8443 = Rule {
        ports: vec![Transport {
            protocol: Protocol::Tcp,
            port: Some(8443),
        }],
        ..cidr(RuleAction::Allow, "203.0.113.4/32")
    };
    let rules = [outside(), on_8443, allow("example.com"), deny_all()];
    let allowed = |rule| (Verdict::Allowed, Reason::AllowedByNetwork, Some(rule));
    let leads_out = |verdict| (verdict, Reason::LeadsOut, None);
    let many: Vec<String> = (0..17).map(|last| format!("203.0.113.{last}:80")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    for (backends, found) in [
        (&["203.0.113.1:8080"][..], allowed(0)),
        (&["203.0.113.1:8080", "203.0.113.2:8080"], allowed(0)),
        (&["10.244.1.7:8080", "203.0.113.1:8080"], allowed(0)),
        (&["203.0.113.4:8443"], allowed(1)),
        (
            &["198.51.100.9:8443", "198.51.100.8:443"],
            (Verdict::Blocked, Reason::DeniedByRule, Some(3)),
        ),
        (
            &["203.0.113.1:80", "203.0.113.4:80"],
            leads_out(Verdict::Depends),
        ),
        (&many, leads_out(Verdict::NotKnown)),
        (&[], (Verdict::Allowed, Reason::InCluster, None)),
    ] {
        let (node, beside) = with_service(&rules, backends);
        let (verdict, reason, rule, _) = decision(&node, "10.96.0.80:80", &beside);
        assert_eq!((verdict, reason, rule), found, "{backends:?}");
    }
}

/// No load balancer takes such a connection, and no rule leaves the networks of Services out.
#[test]
fn a_port_that_a_service_does_not_have_is_judged_by_the_rules() {
    let (node, beside) = with_service(&[deny_all()], &["10.244.1.7:8080"]);
    let in_cluster = (Verdict::Allowed, Reason::InCluster, None, None);
    assert_eq!(decision(&node, "10.96.0.80:80", &beside), in_cluster);
    let depends = (Verdict::Depends, Reason::DependsOnPort, None, None);
    assert_eq!(decision(&node, "10.96.0.80", &beside), depends);
    for target in ["10.96.0.80:81", "10.96.0.80:80/udp"] {
        let remedy = Some("connect to a port of the Service: tcp/80".to_owned());
        let denied = (Verdict::Blocked, Reason::DeniedByRule, Some(0), remedy);
        assert_eq!(decision(&node, target, &beside), denied, "{target}");
    }
}

/// The rules hold for what stands behind a Service, and no answer leads a pod there.
#[test]
fn the_remedy_for_a_service_that_leads_outside_is_a_rule_for_its_endpoints() {
    let rules = [allow("example.com"), deny_all()];
    let backends = ["198.51.100.8:443", "198.51.100.9:443"];
    let (mut node, mut beside) = with_service(&rules, &backends);
    let name = "web.ns1.svc.cluster.local";
    node.answer("p1", name, &[[10, 96, 0, 80]], 60);
    beside.heard = vec![HeardAt {
        address: [10, 96, 0, 80].into(),
        ..heard(&node, "p1", name)
    }];
    let remedy = backends.map(|backend| {
        let address = backend.trim_end_matches(":443");
        format!("allow it before rule 1 with `cidrSelector: {address}/32`")
    });
    let remedy = Some(remedy.join("; and "));
    for target in ["10.96.0.80:80", "web.ns1.svc.cluster.local:80"] {
        let blocked = (
            Verdict::Blocked,
            Reason::DeniedByRule,
            Some(1),
            remedy.clone(),
        );
        assert_eq!(decision(&node, target, &beside), blocked, "{target}");
    }
    // As it is printed.
    let outside = |last| cidr(RuleAction::Allow, &format!("198.51.100.{last}/32"));
    let applied = [rules[0].clone(), outside(8), outside(9), deny_all()];
    node.set_firewall(&applied);
    node.set_ovn(&applied);
    let (verdict, ..) = decision(&node, "web.ns1.svc.cluster.local:80", &beside);
    assert_eq!(verdict, Verdict::Allowed);
}

/// The verdict over the pod's attempt to connect to the Service of [`with_service`].
fn judged_at_service(node: &Node) -> Judged {
    let attempt = Attempt {
        ifindex: ifindex_of(node.pods["ns1_p1"]),
        protocol: Protocol::Tcp,
        address: [10, 96, 0, 80].into(),
        port: 80,
        at: node.now,
    };
    node.engine.view().judge_attempt(&attempt, &[], node.now)
}

/// An attempt is told of only if it is denied at each endpoint, and also if the Service does not have the port.
#[test]
fn an_attempt_at_a_service_that_leads_outside_is_denied_behind_it() {
    let outside = |last| cidr(RuleAction::Allow, &format!("198.51.100.{last}/32"));
    let backends = ["198.51.100.8:443", "198.51.100.9:443"];
    let (node, _) = with_service(&[allow("example.com"), deny_all()], &backends);
    let Judged::DeniedBehind(denied) = judged_at_service(&node) else {
        panic!("it is denied");
    };
    assert_eq!(
        (denied.reason, denied.rule),
        (Reason::DeniedByRule, Some(1))
    );
    assert!(
        denied
            .text
            .starts_with("the Service ns1/web leads to 198.51.100.8, where the rules hold: "),
        "{}",
        denied.text
    );
    let remedy = "allow it before rule 1 with `cidrSelector: 198.51.100.8/32`; and allow it before rule 1 with \
                  `cidrSelector: 198.51.100.9/32`";
    assert_eq!(denied.remedy.as_deref(), Some(remedy));
    let on_443 = Rule {
        ports: vec![Transport {
            protocol: Protocol::Tcp,
            port: Some(443),
        }],
        ..outside(8)
    };
    let service = cidr(RuleAction::Allow, "10.96.0.80/32");
    let five: Vec<String> = (1..=5)
        .map(|last| format!("198.51.100.{last}:443"))
        .collect();
    let five: Vec<&str> = five.iter().map(String::as_str).collect();
    for (rules, backends) in [
        (vec![deny_all()], &["10.244.1.7:8080"][..]),
        (vec![deny_all()], &["10.244.1.7:8080", "198.51.100.8:443"]),
        (vec![outside(8), deny_all()], &backends),
        (vec![outside(9), deny_all()], &backends),
        (vec![on_443, deny_all()], &backends),
        (vec![service, deny_all()], &backends),
        (vec![allow("example.com")], &backends),
        (vec![deny_all()], &five),
        (vec![deny_all()], &[]),
    ] {
        let (node, _) = with_service(&rules, backends);
        assert_eq!(
            judged_at_service(&node),
            Judged::NotJudged,
            "{rules:?} {backends:?}"
        );
    }
}

/// Rules that deny a name each.
fn denials(rules: Range<usize>, port: Option<u16>) -> impl Iterator<Item = Rule> {
    let transport = port.map(|port| Transport {
        protocol: Protocol::Tcp,
        port: Some(port),
    });
    rules.map(move |index| Rule {
        ports: transport.into_iter().collect(),
        ..deny(&format!("d{index}.test"))
    })
}

/// A node behind these rules, which OVN enforces. The pod was told so many long names below their names.
fn told_denied_names(rules: &[Rule], told: usize) -> Node {
    let rules: Vec<Rule> = rules.iter().cloned().chain([deny_all()]).collect();
    let mut node = Node::with(&rules);
    follow(&mut node, &rules);
    node.pass(Duration::from_secs(1));
    let in_front = "a.".repeat(110);
    for index in 0..told {
        let name = format!("{in_front}d{index}.test");
        node.answer("p1", &name, &[ADDRESS], 3600);
    }
    node.pass(Duration::from_secs(30));
    node
}

/// The rule over an attempt to connect, whether it is denied, and how many suffixes of names were noted for that.
fn work_of_attempt(node: &Node) -> (Option<u32>, bool, usize) {
    let before = WORK.get();
    let judged = judged(node);
    let work = WORK.get() - before;
    match judged {
        Judged::Denied(tried, _) => (tried.rule, true, work),
        Judged::Allowed(tried) => (tried.rule, false, work),
        Judged::NotJudged | Judged::DeniedBehind(_) => panic!("it is not judged"),
    }
}

/// An address keeps each denied name.
#[test]
fn an_attempt_costs_no_more_where_hundreds_of_denied_names_lead_to_the_address() {
    let rules: Vec<Rule> = denials(0..400, None).collect();
    let [few, many] = [60, 400].map(|told| work_of_attempt(&told_denied_names(&rules, told)));
    assert_eq!((few.0, few.1), (Some(0), true));
    assert_eq!((many.0, many.1), (few.0, few.1));
    assert!(many.2 <= few.2, "{many:?} {few:?}");
}

#[test]
fn of_hundreds_of_denied_names_those_count_that_are_denied_for_the_port() {
    let rules = denials(0..100, Some(80)).chain(denials(100..400, Some(443)));
    let rules: Vec<Rule> = rules.collect();
    for told in [120, 400] {
        let node = told_denied_names(&rules, told);
        let (rule, is_denied, _) = work_of_attempt(&node);
        assert_eq!((rule, is_denied), (Some(100), true), "{told} names");
        for (target, rule) in [("203.0.113.1:80", 0), ("203.0.113.1:443", 100)] {
            let explained = address(explain(&node, "p1", target));
            let found = (explained.verdict, explained.rule);
            assert_eq!(
                found,
                (Verdict::Blocked, Some(rule)),
                "{target}, {told} names"
            );
        }
    }
}

/// A limit has left some addresses of an answer out.
#[test]
fn every_address_of_a_name_is_judged() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_name_max = 1;
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.answer("p1", "example.com", &[OTHER], 60);
    node.answer("p1", "example.com", &[[169, 254, 169, 254]], 60);
    let explained = explain(&node, "p1", "example.com:443");
    let found = explained.addresses.iter().map(|one| one.reason);
    let found: Vec<Reason> = found.collect();
    for reason in [
        Reason::AddressRefused,
        Reason::AllowedByName,
        Reason::LimitReached,
    ] {
        assert!(found.contains(&reason), "{found:?}");
    }
    assert_eq!(explained.verdict, Verdict::Depends);
}

/// An answer with more addresses than a name may have: also the others are known, and with the next answer, too.
#[test]
fn an_address_that_a_limit_has_left_out_of_an_answer_is_told() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_name_max = 10;
    node.answer("p1", "old.example.com", &[[198, 51, 100, 1]], 60);
    node.pass(MIN_TTL + IDLE_GRACE + 2 * COMPARE_INTERVAL);
    let told = addresses(0, 30);
    let limited = (Verdict::Blocked, Reason::LimitReached, Some(1));
    for _ in 0..5 {
        node.answer("p1", "example.com", &told, 60);
        for (at, address) in told.iter().map(|one| IpAddr::from(*one)).enumerate() {
            let found = reason(&node, &format!("{address}:443"));
            match at {
                ..10 => assert_eq!(found.0, Verdict::Allowed, "{at}"),
                _ => assert_eq!(found, limited, "{at}"),
            }
        }
    }
    // They push out nothing else that the pod was told.
    let expired = (Verdict::NotYet, Reason::Expired, Some(1));
    assert_eq!(reason(&node, "198.51.100.1:443"), expired);
    let explained = explain(&node, "p1", "example.com:443");
    assert_eq!(explained.verdict, Verdict::Depends);
    let left_out = explained.addresses.iter();
    let left_out = left_out.filter(|one| one.reason == Reason::LimitReached);
    let remedies = left_out.map(|one| one.remedy.as_deref());
    let remedies: Vec<_> = remedies.collect();
    assert_eq!(
        remedies,
        [Some("raise --max-addresses-per-name, now 10"); 20]
    );
    // As it is printed.
    node.engine.told.cache.limits_mut().addresses_per_name_max = 30;
    node.answer("p1", "example.com", &told, 60);
    assert_eq!(verdict(&node, "example.com:443"), Verdict::Allowed);
    // Of very many, not all are remembered.
    let many = addresses(0, 200);
    node.answer("p1", "example.com", &many, 60);
    let last = many
        .last()
        .map(|one| IpAddr::from(*one))
        .expect("an address");
    let text = address(explain(&node, "p1", &last.to_string())).text;
    let unless = "unless a limit has left it out of the addresses of example.com";
    assert!(text.ends_with(unless), "{text}");
}

#[test]
fn a_pod_without_the_ip_version_uses_the_other_addresses() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    let v6 = (Verdict::Blocked, Reason::NoAddressOfFamily, None);
    assert_eq!(reason(&node, "[2001:db8::1]:443"), v6);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    assert_eq!(verdict(&node, "example.com:443"), Verdict::Allowed);
}

#[test]
fn nothing_is_certain_without_the_switch() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    node.give(Input::SwitchDown);
    for target in [TARGET, "example.com", "203.0.113.2:80"] {
        let explained = address(explain(&node, "p1", target));
        assert_eq!(explained.verdict, Verdict::NotKnown, "{target}");
        assert_eq!(explained.reason, Reason::SwitchAway, "{target}");
    }
    assert_eq!(verdict(&node, "127.0.0.1:80"), Verdict::Allowed);
}

#[test]
fn a_rule_names_only_the_names_that_it_covers() {
    let mut node = node(&[deny("other.org"), allow("example.com"), deny_all()]);
    node.answer("p1", "real.other.org", &[ADDRESS], 60);
    node.answer("p1", "www.example.com", &[ADDRESS], 60);
    let explained = address(explain(&node, "p1", TARGET));
    assert_eq!(
        explained.steps[0].why,
        "the pod was told 203.0.113.1 for real.other.org"
    );
}

#[test]
fn a_remedy_is_the_smallest_change() {
    let told = |rules: &[Rule], name: &str| {
        let mut node = node(rules);
        node.answer("p1", name, &[ADDRESS], 60);
        address(explain(&node, "p1", TARGET)).remedy
    };
    let earlier = [
        cidr(RuleAction::Deny, "203.0.113.0/24"),
        allow("example.com"),
    ];
    let move_it = "move rule 1 before rule 0; rule 0 (Deny cidrSelector: 203.0.113.0/24) does not deny it then";
    assert_eq!(told(&earlier, "example.com").as_deref(), Some(move_it));
    let other_port = [allow_port("example.com", 80), deny_all()];
    let add = "add tcp/443 to the ports of rule 0";
    assert_eq!(told(&other_port, "example.com").as_deref(), Some(add));
    let denied = [deny("bad.test"), deny_all()];
    let allow_it = "allow it before rule 0 with `dnsName: www.bad.test`; rule 0 (Deny dnsName: bad.test) does not deny it then";
    assert_eq!(told(&denied, "www.bad.test").as_deref(), Some(allow_it));
    // The API would refuse this name.
    let by_address = "allow it before rule 0 with `cidrSelector: 203.0.113.1/32`, or with the dnsName that leads to the address; rule 0 (Deny dnsName: bad.test) does not deny it then";
    assert_eq!(told(&denied, "_srv.bad.test").as_deref(), Some(by_address));
}

/// A rule for another name of the address opens nothing to a pod that asks for this name alone.
#[test]
fn a_remedy_is_for_the_name_by_which_the_pod_connects() {
    let rules = [deny("example.org"), deny_all()];
    let told = |names: &[&str]| {
        let mut node = node(&rules);
        for name in names {
            node.answer("p1", name, &[ADDRESS], 60);
            node.pass(Duration::from_secs(1));
        }
        node
    };
    let both = told(&["aa.example.org", "zz.example.org"]);
    let remedy =
        |node: &Node, target: &str| address(explain(node, "p1", target)).remedy.expect("one");
    for name in ["aa.example.org", "zz.example.org"] {
        let target = format!("{name}:443");
        let remedy = remedy(&both, &target);
        let allowed = remedy.strip_prefix("allow it before rule 0 with `dnsName: ");
        let (allowed, _) = allowed
            .and_then(|rest| rest.split_once('`'))
            .expect("a name");
        // As it is printed, and the pod asks again.
        let rules = [allow(allowed), rules[0].clone(), rules[1].clone()];
        let mut node = node(&rules);
        node.answer("p1", name, &[ADDRESS], 60);
        assert_eq!(verdict(&node, &target), Verdict::Allowed, "{remedy}");
    }
    // By address nobody knows: the newest is the first.
    for (names, first) in [
        (
            ["aa.example.org", "zz.example.org"],
            "`dnsName: zz.example.org`, or with aa.example.org",
        ),
        (
            ["zz.example.org", "aa.example.org"],
            "`dnsName: aa.example.org`, or with zz.example.org",
        ),
    ] {
        let node = told(&names);
        let Judged::Denied(_, denied) = judged(&node) else {
            panic!("it is denied");
        };
        for remedy in [remedy(&node, TARGET), denied.remedy.expect("one")] {
            assert!(remedy.contains(first), "{remedy}");
        }
    }
}

/// Nobody knows that a name leads to the address: a change of the rule of that name may cure nothing.
#[test]
fn a_rule_by_name_is_no_remedy_for_an_address_without_a_name() {
    let denied = cidr(RuleAction::Deny, "203.0.113.1/32");
    let rules = [
        allow_port("mail.example.net", 25),
        denied,
        allow("example.com"),
    ];
    let explained = address(explain(&node(&rules), "p1", TARGET));
    let found = (explained.verdict, explained.reason, explained.rule);
    assert_eq!(found.0, Verdict::Blocked, "{explained:?}");
    assert_ne!(found.1, Reason::WrongPort, "{explained:?}");
    let remedy = explained.remedy.unwrap_or_default();
    assert!(!remedy.contains("rule 0"), "{remedy}");
}

/// A pod that was told no name for the address may have it from elsewhere.
#[test]
fn for_an_address_without_a_name_the_remedy_is_the_address() {
    let rules = [allow("example.com"), deny_all()];
    let node = node(&rules);
    let remedy = "if the pod connects without a name, allow it before rule 1 with `cidrSelector: 203.0.113.1/32`";
    let found = address(explain(&node, "p1", TARGET));
    assert_eq!(found.reason, Reason::NotResolved);
    assert_eq!(found.remedy.as_deref(), Some(remedy));
    let Judged::Denied(_, denied) = judged(&node) else {
        panic!("it is denied");
    };
    assert_eq!(denied.remedy.as_deref(), Some(remedy));
    // As it is printed.
    let [by_name, all] = rules;
    let applied = self::node(&[by_name, cidr(RuleAction::Allow, "203.0.113.1/32"), all]);
    assert_eq!(verdict(&applied, TARGET), Verdict::Allowed);
    // By name, the pod has to ask.
    let by_name = address(explain(&node, "p1", "www.example.com:443"));
    assert_eq!(by_name.remedy, None);
}

#[test]
fn an_address_of_a_dns_filter_is_said_to_be_one() {
    let node = node(&[allow("example.com"), deny_all()]);
    let blocked = heard_of(&node, "ads.test", ("ads.test", &[[0, 0, 0, 0]], 0));
    let target = "ads.test:443".parse().expect("a target");
    let found = address(explain_with(&node, "p1", target, &blocked));
    assert_eq!(
        (found.verdict, found.reason),
        (Verdict::Allowed, Reason::InPod)
    );
    assert!(
        found.text.contains("a DNS server that filters names"),
        "{}",
        found.text
    );
    let own = address(explain(&node, "p1", "127.0.0.1:443"));
    assert!(!own.text.contains("filters"), "{}", own.text);
}

#[test]
fn a_name_behind_that_of_the_question_does_not_count() {
    let mut node = node(&[allow("cdn.example.net"), deny_all()]);
    let hint = "a rule holds for the name that the pod asks for, and not for a name behind it (CNAME, ExternalName)";
    let has_hint = |node: &Node, target| {
        let explained = explain(node, "p1", target);
        explained.hints.iter().any(|one| one == hint)
    };
    assert!(has_hint(&node, "cdn.example.net:443"));
    assert!(
        !has_hint(&node, "www.example.org:443"),
        "no rule has the name"
    );
    assert!(!has_hint(&node, TARGET), "there is no name");
    node.answer("p1", "cdn.example.net", &[ADDRESS], 60);
    assert!(!has_hint(&node, "cdn.example.net:443"), "it has asked");
}

/// The pod asks again over TCP. Until then it has no address that counts, and has been told one.
#[test]
fn a_truncated_answer_is_told() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    node.frame(ifindex, &truncated("www.example.com", &[ADDRESS]));
    let blocked = |rule| (Verdict::Blocked, Reason::NotAnswered, Some(rule));
    let text = "the answer for www.example.com was truncated: the pod has to ask over TCP, and has no answer over TCP";
    for (target, rule) in [("www.example.com:443", 0), (TARGET, 1)] {
        assert_eq!(reason(&node, target), blocked(rule), "{target}");
        let found = address(explain(&node, "p1", target));
        assert!(found.text.ends_with(text), "{}", found.text);
    }
    node.answer("p1", "www.example.com", &[ADDRESS], 60);
    for target in ["www.example.com:443", TARGET] {
        assert_eq!(verdict(&node, target), Verdict::Allowed, "{target}");
    }
    // What an earlier answer has opened stays as it is.
    node.frame(ifindex, &truncated("www.example.com", &[ADDRESS]));
    assert_eq!(verdict(&node, TARGET), Verdict::Allowed);
}

/// The message in a datagram, for a stream of TCP.
fn framed(datagram: &[u8]) -> Vec<u8> {
    // Behind Ethernet, IPv4 and UDP.
    let message = &datagram[14 + 20 + 8..];
    [&(message.len() as u16).to_be_bytes(), message].concat()
}

/// A pod's connection to its DNS server over TCP, from this port.
struct Connection<'a> {
    node: &'a mut Node,
    port: u16,
    /// How many bytes pod and server have sent.
    sent: [u32; 2],
}

impl<'a> Connection<'a> {
    fn new(node: &'a mut Node, port: u16) -> Self {
        let sent = [0; 2];
        Self { node, port, sent }
    }

    fn open(node: &'a mut Node, port: u16) -> Self {
        let mut connection = Self::new(node, port);
        connection.pass(true, SYN, &[]);
        connection.pass(false, SYN | ACK, &[]);
        connection
    }

    /// Sends the question of an answer, and says that the server has it.
    fn ask(&mut self, answer: &[u8]) {
        let mut question = framed(answer);
        // QR, behind length and id (RFC 1035, section 4.1.1).
        question[2 + 2] &= 0x7f;
        self.pass(true, ACK, &question);
        self.pass(false, ACK, &[]);
    }

    fn pass(&mut self, from_pod: bool, flags: u8, payload: &[u8]) {
        let (server, pod) = (([10, 96, 0, 10], 53), ([10, 244, 0, 5], self.port));
        let (from, to) = if from_pod {
            (pod, server)
        } else {
            (server, pod)
        };
        let own = usize::from(!from_pod);
        let mut bytes = vec![0; 12];
        bytes.extend([0x08, 0x00, 0x45, 0]);
        bytes.extend((20 + 20 + payload.len() as u16).to_be_bytes());
        bytes.extend([0, 0, 0, 0, 64, 6, 0, 0]);
        bytes.extend(from.0);
        bytes.extend(to.0);
        bytes.extend(from.1.to_be_bytes());
        bytes.extend(to.1.to_be_bytes());
        bytes.extend(self.sent[own].to_be_bytes());
        bytes.extend(self.sent[1 - own].to_be_bytes());
        bytes.extend([0x50, flags, 1, 0, 0, 0, 0, 0]);
        bytes.extend(payload);
        self.sent[own] += payload.len() as u32 + u32::from(flags & SYN != 0);
        self.node.now = self.node.now + Duration::from_micros(50);
        let ifindex = ifindex_of(self.node.pods["ns1_p1"]);
        let captured = Frame {
            from_pod,
            ..frame(ifindex, self.node.now, &bytes)
        };
        self.node.hand_in(captured);
    }
}

/// The answer of a name is truncated, and the pod asks again over TCP.
#[test]
fn what_became_of_a_question_over_tcp_is_told() {
    let rules = [allow_port("example.com", 443), deny_all()];
    let mut node = node(&rules);
    let name = "www.example.com";
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    let told = |node: &Node, target: &str, reason: Reason, text: &str| {
        let found = address(explain(node, "p1", target));
        assert_eq!((found.verdict, found.reason), (Verdict::Blocked, reason));
        assert!(found.text.ends_with(text), "{target}: {}", found.text);
    };
    let by_name = "www.example.com:443";
    let truncated = truncated(name, &[ADDRESS]);
    node.frame(ifindex, &truncated);
    for target in [by_name, TARGET] {
        told(
            &node,
            target,
            Reason::NotAnswered,
            "and has no answer over TCP",
        );
    }
    let mut refused = Connection::new(&mut node, 40_000);
    refused.pass(true, SYN, &[]);
    refused.sent[1] = 0;
    refused.pass(false, RST | ACK, &[]);
    for target in [by_name, TARGET] {
        let text = "has no answer over TCP: 10.96.0.10:53 refused the connection";
        told(&node, target, Reason::NotAnswered, text);
    }
    // It says nothing about a name that was truncated later.
    node.pass(Duration::from_secs(1));
    node.frame(ifindex, &self::truncated("api.example.com", &[OTHER]));
    told(
        &node,
        "api.example.com:443",
        Reason::NotAnswered,
        "and has no answer over TCP",
    );

    let answer = answer_frame(name, &[ADDRESS], 60);
    for (port, end) in [(40_001, FIN | ACK), (40_002, RST | ACK)] {
        let mut closed = Connection::open(&mut node, port);
        closed.ask(&answer);
        closed.pass(false, end, &[]);
        let text = "the pod asked 10.96.0.10:53 for it 0s ago over TCP, and the server closed the connection without \
                    an answer";
        told(&node, by_name, Reason::NotAnswered, text);
    }
    told(
        &node,
        "api.example.com:443",
        Reason::NotAnswered,
        "and has no answer over TCP",
    );

    for (port, code, text) in [
        (40_003, 2, "was told SERVFAIL"),
        (40_004, 5, "was told REFUSED"),
    ] {
        let mut failed = answer_frame(name, &[], 60);
        failed[14 + 20 + 8 + 3] |= code;
        let mut connection = Connection::open(&mut node, port);
        connection.ask(&answer);
        connection.pass(false, ACK, &framed(&failed));
        told(&node, by_name, Reason::AnsweredWithError, text);
    }
    // NODATA over TCP.
    let mut connection = Connection::open(&mut node, 40_005);
    connection.ask(&answer);
    connection.pass(false, ACK, &framed(&answer_frame(name, &[], 60)));
    told(
        &node,
        by_name,
        Reason::AnsweredWithError,
        "was told that it has no IPv4 address",
    );

    let mut connection = Connection::open(&mut node, 40_006);
    connection.ask(&answer);
    connection.pass(false, ACK, &framed(&answer));
    // An end behind the answer leaves nothing open.
    connection.pass(false, FIN | ACK, &[]);
    assert_eq!(verdict(&node, by_name), Verdict::Allowed);
    // What came before the answer is no hint where something else denies.
    let explained = explain(&node, "p1", "www.example.com:80");
    assert_eq!(explained.hints, [] as [&str; 0]);
    assert_eq!(address(explained).reason, Reason::WrongPort);
}

/// An answer that has no room for a single record does not come to the engine.
#[test]
fn a_truncated_answer_without_a_record_is_told() {
    let node = node(&[allow("example.com"), deny_all()]);
    let name = "www.example.com";
    let bytes = truncated(name, &[]);
    let mut attempts = Attempts::new(DnsPorts::DNS);
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    attempts.hear(frame(ifindex, node.now, &bytes), node.now);
    let asked = DomainName::from_presentation(name).expect("a name");
    let beside = Beside {
        failed: attempts.failed_for(&asked),
        ..ovn_has_resolved_nothing()
    };
    let target = "www.example.com:443".parse().expect("a target");
    let found = address(explain_with(&node, "p1", target, &beside));
    let blocked = (Verdict::Blocked, Reason::NotAnswered);
    assert_eq!((found.verdict, found.reason), blocked);
    let text = "rule 0 allows it once the answer comes: the pod asked 10.96.0.10:53 for it 0s ago, and the answer was \
                truncated: the pod has to ask over TCP, and has no answer over TCP";
    assert_eq!(found.text, text);
}

/// Trust in a DNS server holds for all pods: it is a hint, as long as the pod has just asked there.
#[test]
fn a_dns_server_that_is_not_trusted_is_a_hint_for_a_while() {
    let rules = [
        allow("example.com"),
        cidr(RuleAction::Deny, "203.0.113.0/24"),
    ];
    let mut node = node(&rules);
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    let asked = |ifindex, server: &str, at| AskedServer {
        ifindex,
        server: server.parse().expect("a resolver"),
        at,
    };
    let hints = |node: &Node, server, asked_at| {
        let beside = Beside {
            servers: vec![
                asked(ifindex + 1, "198.51.100.7", asked_at),
                asked(ifindex, "10.96.0.10", asked_at),
                asked(ifindex, server, asked_at),
            ],
            ..ovn_has_resolved_nothing()
        };
        let target = TARGET.parse().expect("a target");
        let explained = explain_with(node, "p1", target, &beside);
        // It is never a remedy.
        let remedy = address(explained.clone()).remedy.unwrap_or_default();
        assert!(!remedy.contains("resolver"), "{server}: {remedy}");
        explained.hints
    };
    let asked_at = node.now;
    let without = hints(&node, "10.96.0.10", asked_at);
    assert_eq!(without.len(), 2, "{without:?}");
    node.pass(Duration::from_secs(5));
    let asked = |server: &str| {
        format!("the pod asked {server}:53 5s ago, a DNS server that is not trusted")
    };
    for (server, hint) in [
        (
            "169.254.20.10",
            ": let the pod ask a trusted one; or if all pods may trust it, --resolver 169.254.20.10:53",
        ),
        (
            "203.0.113.53",
            ", and rule 1 denies it: let the pod ask a trusted one; or if all pods may trust it, --resolver \
             203.0.113.53:53, and `cidrSelector: 203.0.113.53/32` before rule 1",
        ),
    ] {
        let hint = format!("{}{hint}", asked(server));
        let hints = hints(&node, server, asked_at);
        assert_eq!(hints, [&without[..], &[hint]].concat());
    }
    node.pass(Duration::from_secs(70));
    assert_eq!(hints(&node, "203.0.113.53", asked_at), without);
}

#[test]
fn a_remedy_names_the_option() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_name_max = 1;
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.answer("p1", "example.com", &[OTHER], 60);
    for target in ["203.0.113.1:443", "203.0.113.2:443"] {
        let explained = address(explain(&node, "p1", target));
        let expected = match explained.verdict {
            Verdict::Allowed => None,
            _ => Some("raise --max-addresses-per-name, now 1"),
        };
        assert_eq!(explained.remedy.as_deref(), expected, "{target}");
    }
    let explained = explain(&node, "p1", "example.com:443");
    let mut remedies = explained.addresses.iter().map(|one| &one.remedy);
    assert!(remedies.any(Option::is_some), "{explained:?}");
}

#[test]
fn a_name_that_a_rule_nearly_covers_is_a_hint() {
    let wildcard = allow("*.example.org");
    let node = node(&[allow("exmaple.com"), wildcard, deny_all()]);
    let hints = |target| explain(&node, "p1", target).hints;
    assert_eq!(
        hints("example.com"),
        ["rule 0 is for exmaple.com: is one of both names a misprint?"]
    );
    assert_eq!(
        hints("a.b.example.org"),
        ["rule 1 (*.example.org) covers names with exactly one more label"]
    );
    assert_eq!(hints("example.net"), [] as [&str; 0]);
}

/// A rule for all addresses of one IP version says nothing of the other.
#[test]
fn a_name_without_an_address_may_lead_to_both_ip_versions() {
    let denied = |both: bool| {
        let v6 = cidr(RuleAction::Deny, "::/0");
        let rules = [deny_all()].into_iter().chain(both.then_some(v6));
        let mut node = node(&rules.collect::<Vec<_>>());
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(
                RowId::new(0x2000),
                Some(Interface {
                    addresses: vec![[10, 244, 0, 9].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 9].into()],
                    ..interface("ns1_p9", 9, "uid-p9")
                }),
            )],
        }));
        node.give(Input::Sb(SbUpdate {
            port_bindings: vec![(RowId::new(0x2009), Some(port_binding("ns1_p9", 9)))],
            ..SbUpdate::default()
        }));
        explain(&node, "p9", "example.com:443")
    };
    assert_eq!(denied(true).verdict, Verdict::Blocked);
    let of_v4_alone = denied(false);
    assert_eq!(of_v4_alone.verdict, Verdict::Depends);
    let texts = of_v4_alone.addresses.iter().map(|one| &*one.text);
    let texts: Vec<&str> = texts.collect();
    assert_eq!(
        texts,
        [
            "over IPv4, rule 0 denies it",
            "over IPv6, no rule matches: OVN lets pass"
        ]
    );
}
/// The groups with several patterns have as many flows as they may, and an address has two names. An edit adds a port to one
/// of them.
#[test]
fn a_further_port_of_a_name_has_no_room_at_an_address_with_another_name() {
    // Ports 2001 to 3024.
    let others = Rule {
        ports: tcp(3024).split_off(2000),
        ..allow("b.test")
    };
    let rules = [
        vec![many(allow("a.test"), 1024); 8],
        vec![others; 8],
        vec![deny_all()],
    ]
    .concat();
    let mut node = node_with_many(&rules);
    node.trust_server();
    for name in ["a.test", "b.test"] {
        limits::tell(&mut node, name, ADDRESS, 3600);
    }
    let of_both = GROUP_FLOWS_PER_SCOPE_MAX / 2;
    assert_eq!(node.of_rules().count(), of_both + 8 * 1024);
    assert_eq!(node.engine.counters().addresses_cut, 0);
    let mut edited = rules;
    edited.insert(16, allow_port("b.test", 4000));
    node.set_firewall(&edited);
    follow(&mut node, &edited);
    let allowed = (Verdict::Allowed, Reason::AllowedByName, Some(0));
    assert_eq!(reason(&node, TARGET), allowed);
    let limited = (Verdict::Blocked, Reason::LimitReached);
    for port in [2443, 4000] {
        let explained = address(explain(&node, "p1", &format!("203.0.113.1:{port}")));
        let found = (explained.verdict, explained.reason);
        assert_eq!(found, limited, "{explained:?}");
    }
}

// What is installed decides.

/// The verdict over port 443 of the address, and whether an attempt there is reported as denied.
fn verdicts(node: &Node) -> (Verdict, bool) {
    let is_denied = matches!(judged(node), Judged::Denied(..));
    (verdict(node, TARGET), is_denied)
}

/// Two rules have one name, and OVN has a logical flow for the first, or for both.
#[test]
fn a_rule_is_not_in_force_because_another_has_its_name() {
    for (has_logical_flow, expected) in [
        (true, (Verdict::Allowed, false)),
        (false, (Verdict::NotKnown, true)),
    ] {
        let rules = [
            allow_port("example.com", 80),
            allow_port("example.com", 443),
            deny_all(),
        ];
        let mut node = node(&rules);
        if !has_logical_flow {
            node.give(Input::Sb(SbUpdate {
                logical_flows: vec![(logical_flow_row(1), None)],
                ..SbUpdate::default()
            }));
        }
        node.answer("p1", "example.com", &[ADDRESS], 600);
        assert_eq!(is_open(&node, ADDRESS, 1), has_logical_flow);
        assert_eq!(verdicts(&node), expected);
    }
}

/// The port of a rule is edited, and its ACL has followed. The logical flow has, or has not.
#[test]
fn an_edited_port_counts_with_its_logical_flow() {
    let before = [allow_port("example.com", 80), deny_all()];
    let edited = [allow_port("example.com", 443), deny_all()];
    let mut node = node(&before);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    node.set_firewall(&edited);
    node.set_nb(&edited);
    assert_eq!(verdicts(&node), (Verdict::NotKnown, true));
    let former = (Verdict::NotKnown, Reason::FlowMissing, Some(1));
    assert_eq!(reason(&node, "203.0.113.1:80"), former, "it is open");
    node.set_sb(&edited);
    assert_eq!(verdicts(&node), (Verdict::Allowed, false));
    assert_eq!(verdict(&node, "203.0.113.1:80"), Verdict::Blocked);
}

/// The flow of the rule for an address that `example.com` leads to.
fn flow_of_the_address(rules: &[Rule]) -> FlowKey {
    let mut node = Node::with(rules);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    node.of_rules().next().expect("a flow").clone()
}

/// The switch refuses the flow of an address, and the agent tries again after each comparison.
#[test]
fn a_refused_flow_is_never_said_to_allow() {
    let rules = [allow("example.com"), deny_all()];
    let key = flow_of_the_address(&rules);
    for is_refused in [false, true] {
        let mut node = node(&rules);
        node.refused.extend(is_refused.then(|| key.clone()));
        node.answer("p1", "example.com", &[ADDRESS], 600);
        for second in 0..50 {
            assert_eq!(is_open(&node, ADDRESS, 0), !is_refused);
            let (verdict, is_denied) = verdicts(&node);
            match is_refused {
                true => assert_ne!(verdict, Verdict::Allowed, "{second} s"),
                false => assert_eq!((verdict, is_denied), (Verdict::Allowed, false)),
            }
            node.pass(Duration::from_secs(1));
        }
    }
}

/// The next batch of the address, for another name, is confirmed. The switch refuses the flows of the rule, or the one
/// that gives the tag.
#[test]
fn a_refused_flow_is_not_said_to_allow_because_another_batch_follows() {
    let rules = [
        allow_port("example.com", 443),
        allow_port("b.test", 80),
        deny_all(),
    ];
    let is_of_rule = |key: &FlowKey| key.priority == 11_000;
    let is_of_address = |key: &FlowKey| key.matches.ends.dst().is_some();
    let none = |_: &FlowKey| false;
    let refused: [&dyn Fn(&FlowKey) -> bool; 3] = [&none, &is_of_rule, &is_of_address];
    for (at, is_refused) in refused.into_iter().enumerate() {
        let tell = |node: &mut Node, name: &str| node.answer("p1", name, &[ADDRESS], 600);
        let mut twin = Node::with(&rules);
        let mut node = node(&rules);
        for name in ["example.com", "b.test"] {
            tell(&mut twin, name);
            let keys = twin.switch.keys().filter(|key| is_refused(key));
            node.refused.extend(keys.cloned());
        }
        for name in ["example.com", "b.test"] {
            tell(&mut node, name);
        }
        for second in 0..50 {
            let (verdict, _) = verdicts(&node);
            assert_eq!(verdict != Verdict::Allowed, at > 0, "{at}, {second} s");
            node.pass(Duration::from_secs(1));
        }
    }
}

/// Somebody else has a flow with the key of ours. Nobody knows what the flow does.
#[test]
fn a_flow_of_somebody_else_in_place_of_ours_is_not_said_to_allow() {
    let rules = [allow("example.com"), deny_all()];
    let mut node = node(&rules);
    node.give(Input::ForeignFlow {
        key: flow_of_the_address(&rules),
        cookie: 0x0bad_cafe,
    });
    node.answer("p1", "example.com", &[ADDRESS], 600);
    node.pass(2 * COMPARE_INTERVAL);
    assert!(!is_open(&node, ADDRESS, 0));
    assert_eq!(verdicts(&node), (Verdict::NotKnown, false));
    let text = address(explain(&node, "p1", TARGET)).text;
    assert!(text.contains("somebody else"), "{text}");
}

/// A rule of three ports gets a fourth, or an address has no room for the flows of all its rules. The question has no
/// port.
#[test]
fn an_address_with_some_of_its_ports_open_depends_on_the_port() {
    let rules = |ports| [many(allow("example.com"), ports), deny_all()];
    let mut edited = node(&rules(3));
    edited.answer("p1", "example.com", &[ADDRESS], 600);
    edited.set_firewall(&rules(4));
    edited.set_ovn(&rules(4));
    let cut = without_room(allow("a.test"), allow("b.test"), &[deny_all()]);
    for (node, denying) in [(edited, 1), (cut, 24)] {
        assert!(is_open(&node, ADDRESS, 0));
        let depends = (Verdict::Depends, Reason::DependsOnPort, Some(denying));
        assert_eq!(reason(&node, "203.0.113.1"), depends);
    }
}

/// One name has opened an address. A second one leads there, behind the pod's budget of changes.
#[test]
fn a_name_over_the_budget_opens_nothing() {
    for is_over_budget in [false, true] {
        let [a, b, all] = [
            allow_port("a.test", 80),
            allow_port("b.test", 443),
            deny_all(),
        ];
        let mut node = Node::bare();
        node.engine = Engine::new(Config {
            flow_changes_per_second: 1,
            ..Config::default()
        });
        let mut node = node.start(&[a.clone(), b, all.clone()]);
        node.answer("p1", "a.test", &[ADDRESS], 600);
        if is_over_budget {
            node.answer("p1", "a.test", &addresses(0, 60), 600);
        }
        // The name is kept, as a rule is to deny it.
        node.set_firewall(&[a, deny("b.test"), all]);
        node.answer("p1", "b.test", &[ADDRESS], 600);
        assert_eq!(is_open(&node, ADDRESS, 1), !is_over_budget);
        let (is_denied, expected) = match is_over_budget {
            false => (false, (Verdict::Allowed, Reason::AllowedByName, Some(1))),
            true => (true, (Verdict::Blocked, Reason::LimitReached, Some(2))),
        };
        assert_eq!(verdicts(&node).1, is_denied);
        assert_eq!(reason(&node, TARGET), expected);
    }
}

/// Of a name without an address, OVN may know one: it enforces the rules itself.
#[test]
fn in_a_dry_run_no_question_opens() {
    for dry_run in [false, true] {
        let mut node = Node::bare();
        node.engine = Engine::new(Config {
            dry_run,
            ..Config::default()
        });
        let mut node = node.start(&[allow("example.com"), deny_all()]);
        let resolver = "10.96.0.10:53".parse().expect("a resolver");
        node.give(Input::Resolvers([resolver].into()));
        let reasons = |node: &Node| {
            ["example.com:443", TARGET].map(|target| {
                let (verdict, reason, _) = reason(node, target);
                (verdict, reason)
            })
        };
        let before = reasons(&node);
        node.answer("p1", "example.com", &[ADDRESS], 600);
        let behind = reasons(&node);
        let (not_asked, asked) = match dry_run {
            false => (
                [(Verdict::NotYet, Reason::NotResolved); 2],
                (Verdict::Allowed, Reason::AllowedByName),
            ),
            true => (
                [Verdict::NotKnown, Verdict::Blocked].map(|verdict| (verdict, Reason::DryRun)),
                (Verdict::Blocked, Reason::DryRun),
            ),
        };
        assert_eq!((before, behind), (not_asked, [asked; 2]));
    }
}

/// OVN has an ACL that denies, of which no EgressFirewall has a rule. ovn-kubernetes has left it behind when the
/// resource became shorter, or has not followed the deletion.
#[test]
fn an_acl_that_was_left_behind_may_deny() {
    let shorter = [allow("example.com")];
    for rules in [Some(&shorter[..]), None] {
        let mut node = node(&[allow("example.com"), deny_all()]);
        match rules {
            Some(rules) => node.set_firewall(rules),
            None => node.give(firewalls(false, None)),
        }
        node.pass(Duration::from_secs(60));
        assert_eq!(verdicts(&node), (Verdict::NotKnown, false));
        assert_eq!(reason(&node, TARGET).1, Reason::AclLeftBehind);
        node.set_ovn(rules.unwrap_or_default());
        assert_eq!(verdicts(&node), (Verdict::Allowed, false));
    }
}

/// ovn-kubernetes refuses the whole EgressFirewall: without ACLs, OVN denies nothing.
#[test]
fn a_rule_by_network_denies_with_its_acl() {
    let rules = [allow("*.example.com"), deny_all()];
    let mut node = node(&rules);
    node.give(firewalls(false, None));
    node.set_ovn(&[]);
    node.set_firewall(&rules);
    assert_eq!(verdicts(&node), (Verdict::NotKnown, false));
    node.pass(TAKEOVER_MAX + Duration::from_secs(1));
    for target in [TARGET, "www.example.com"] {
        let explained = address(explain(&node, "p1", target));
        assert_eq!(explained.verdict, Verdict::NotKnown);
        assert_eq!(explained.reason, Reason::FirewallNotTakenOver);
        let text = explained.text;
        assert!(text.contains("--enable-dns-name-resolver"), "{text}");
    }
    node.set_ovn(&rules);
    assert_eq!(verdicts(&node), (Verdict::NotYet, true));
}

/// ovn-kubernetes leaves the subnets of pods out of a rule, and no other network of its own.
#[test]
fn the_join_and_masquerade_networks_are_denied_where_a_rule_denies_them() {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        refusals: Refusals::new(&[], &[], &[], &[]).expect("few networks"),
        ..Config::default()
    });
    let mut node = node.start(&[allow("example.com"), deny_all()]);
    node.trust_server();
    let pods = LogicalSwitch {
        networks: vec!["10.244.0.0/16".parse().expect("a network")],
        ..LogicalSwitch::default()
    };
    node.give(Input::Nb(NbUpdate {
        switches: vec![(RowId::new(0x5175), Some(pods))],
        ..NbUpdate::default()
    }));
    let in_cluster = (Verdict::Allowed, Reason::InCluster, None);
    assert_eq!(reason(&node, "10.244.3.4:80"), in_cluster);
    for target in ["100.64.0.1:80", "100.88.0.2:80", "169.254.0.1:80"] {
        let denied = (Verdict::Blocked, Reason::AddressRefused, Some(1));
        assert_eq!(reason(&node, target), denied, "{target}");
    }
}

/// No Service has the address of the DNS cache, unless the cache has a Service's as well. OVN has the ACL of the rule
/// that denies all addresses.
#[test]
fn the_dns_cache_of_the_node_is_denied_where_a_rule_denies_it() {
    let server = |text: &str| BTreeSet::from([text.parse().expect("a server")]);
    for cache in [
        ["169.254.20.10:53", "10.96.0.10:53"],
        ["169.254.20.10:53"; 2],
    ] {
        let mut node = Node::bare();
        node.engine = Engine::new(Config {
            refusals: Refusals::new(&[], &[], &[], &[]).expect("few networks"),
            ..Config::default()
        });
        let mut node = node.start(&[allow("a.test"), deny_all()]);
        node.give(Input::Resolvers(server("10.96.0.10:53")));
        let addresses = cache.iter().flat_map(|text| server(text));
        node.give(Input::DnsCache(addresses.collect()));
        let of_service = reason(&node, "10.96.0.10:53/udp");
        let in_cluster = (Verdict::Allowed, Reason::InCluster, None);
        assert_eq!(of_service, in_cluster, "{cache:?}");
        let (verdict, _, rule) = reason(&node, "169.254.20.10:53/udp");
        assert_eq!((verdict, rule), (Verdict::Blocked, Some(1)), "{cache:?}");
    }
}
