//! Why is this pod blocked? The situations in which people ask, one each.

use ipnet::IpNet;

use super::*;
use crate::{
    ask::{
        attempts::Heard,
        view::{Beside, ExplainedAddress, Explanation, Reason, StepOutcome, Target, Verdict},
    },
    ovn::hash::{Family, address_set_hashes},
    values::{limits::TAKEOVER_MAX, name::DnsName},
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
    explain_with(node, pod, target, &Beside::default())
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

fn cidr(action: RuleAction, network: &str) -> Rule {
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
    let [flow] = &entry.flows[..] else {
        panic!("{:?}", entry.flows)
    };
    assert!(flow.flow.contains("nw_src=10.244.0.5,nw_dst=203.0.113.1"));
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
    let explained = address(explain(&node, "p1", "example.net"));
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
    let blocked = |rule| (Verdict::Blocked, Reason::NotResolved, Some(rule));
    assert_eq!(reason(&node, TARGET), blocked(1));
    assert_eq!(reason(&node, "example.com:443"), blocked(0));
    let hints = explain(&node, "p1", TARGET).hints;
    assert!(hints[0].contains("10.96.0.10:53"), "{hints:?}");
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
    assert_eq!(reason(&node, "203.0.113.1"), blocked, "all ports are meant");
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
    let blocked = |rule| (Verdict::Blocked, Reason::Expired, Some(rule));
    assert_eq!(reason(&node, TARGET), blocked(1));
    assert_eq!(reason(&node, "example.com"), blocked(0));
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
    // The cluster's DNS has this address, too: it closes.
    let resolver = format!("{}:53", Ipv4Addr::from(ADDRESS));
    node.give(Input::Resolvers([resolver.parse().expect("one")].into()));
    let explained = address(explain(&node, "p1", TARGET));
    assert_eq!(explained.reason, Reason::AddressRefused);
    assert!(explained.text.contains("service"), "{}", explained.text);
}

#[test]
fn the_pod_was_told_only_what_is_never_opened() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.answer("p1", "local.example.com", &[[127, 0, 0, 1]], 60);
    let explained = address(explain(&node, "p1", "local.example.com"));
    assert_eq!(explained.reason, Reason::AddressRefused);
    let leads = "local.example.com leads to 127.0.0.1, which is never opened: loopback";
    assert!(explained.text.ends_with(leads), "{}", explained.text);
    let blocked = |rule| (Verdict::Blocked, Reason::AddressRefused, Some(rule));
    assert_eq!(reason(&node, "127.0.0.1:443"), blocked(1));
    assert_eq!(
        reason(&node, "169.254.169.254:80"),
        blocked(1),
        "never told"
    );
    let other = reason(&node, "other.example.com").1;
    assert_eq!(other, Reason::NotResolved);
}

#[test]
fn a_name_that_no_rule_mentions_is_the_remedy() {
    let mut node = node(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    let heard = |pod: &str, name: &str, at| {
        let heard = Heard {
            name: DomainName::from_presentation(name).expect("a name"),
            at,
            resolver: "10.96.0.10:53".parse().expect("a resolver"),
        };
        (ifindex_of(node.pods[&format!("ns1_{pod}")]), heard)
    };
    let beside = Beside {
        heard: vec![
            heard("p1", "www.example.com", node.now),
            heard("p1", "cdn.example.org", node.now),
            heard("p2", "other.example.org", node.now),
        ],
        sets: None,
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
        heard: vec![],
        sets: Some([(ADDRESS.into(), hashes.iter().copied().collect())].into()),
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
    // OVN has other addresses: nothing is left to guess.
    let not_there = explained(TARGET, &with_sets(&[7]));
    let guesses = |explained: &Explanation| {
        let mut hints = explained.hints.iter();
        hints.any(|hint| hint.contains("it may let pass"))
    };
    assert!(!guesses(&not_there), "{:?}", not_there.hints);
    assert_eq!(address(not_there).reason, Reason::NotResolved);
    assert!(guesses(&explained(TARGET, &Beside::default())));
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
    let blocked = |rule| (Verdict::Blocked, Reason::ToldToOtherPod, Some(rule));
    assert_eq!(reason(&node, TARGET), blocked(1));
    assert_eq!(reason(&node, "example.com"), blocked(0));
}

#[test]
fn the_agent_has_just_started() {
    let mut node = Node::bare();
    node.add_pod("p1", 5);
    let blocked = (Verdict::Blocked, Reason::AgentStarting, None);
    assert_eq!(reason(&node, TARGET), blocked);
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
    let explained = address(explain(&node(&[nodes, deny_all()]), "p1", TARGET));
    assert_eq!(explained.steps[0].outcome, StepOutcome::Unknown);
    assert_eq!(explained.verdict, Verdict::Blocked);
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

#[test]
fn targets_are_parsed() {
    let tcp = |port| {
        Some(Transport {
            protocol: Protocol::Tcp,
            port: Some(port),
        })
    };
    let v6 = "2001:db8::1".parse::<IpAddr>().expect("an address");
    let parse = |text: &str| text.parse::<Target>().ok();
    assert_eq!(parse("2001:db8::1"), Some(Target::Address(v6, None)));
    assert_eq!(
        parse("[2001:db8::1]:443"),
        Some(Target::Address(v6, tcp(443)))
    );
    assert_eq!(
        parse("Example.com:443/tcp"),
        Some(Target::Name(
            DomainName::from_presentation("example.com").expect("a name"),
            tcp(443)
        ))
    );
    for wrong in [
        "",
        "example.com:0",
        "example.com:443/icmp",
        "[x]:443",
        "a..b",
    ] {
        assert_eq!(parse(wrong), None, "{wrong}");
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
    assert_eq!((view.addresses, view.flows), (2, 2));
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

#[test]
fn the_flows_of_a_rule_do_not_fit() {
    let many = |rule| Rule {
        ports: tcp(1024),
        ..rule
    };
    let mut allowed = node(&[many(allow("example.com")), deny_all()]);
    allowed.answer("p1", "example.com", &[ADDRESS], 60);
    let explained = address(explain(&allowed, "p1", TARGET));
    assert_eq!(explained.reason, Reason::LimitReached);
    assert!(explained.text.contains("list fewer ports"), "{explained:?}");
    // Port 8443 is none of the rule's.
    let mut denied = node(&[many(deny("example.com")), allow("example.com")]);
    denied.answer("p1", "example.com", &[ADDRESS], 60);
    let explained = address(explain(&denied, "p1", "203.0.113.1:8443"));
    let blocked = (Verdict::Blocked, Reason::DeniedByEarlierRule, Some(0));
    let found = (explained.verdict, explained.reason, explained.rule);
    assert_eq!(found, blocked);
    let why = &explained.steps[0].why;
    assert!(why.contains("list fewer ports"), "{explained:?}");
}
