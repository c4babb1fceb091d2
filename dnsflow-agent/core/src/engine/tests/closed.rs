//! An address with more patterns than a group may have is closed if a rule denies one of them. People are told so.

use super::{explain::cidr, *};
use crate::{
    ask::view::{Beside, ExplainedAddress, Reason, StepOutcome, Verdict},
    values::limits::PATTERNS_MAX,
};

/// A name with more labels than a group may have patterns.
fn long_name() -> String {
    vec!["x"; PATTERNS_MAX + 2].join(".")
}

/// Rules for the name and for each one above it, of which one denies, for port 25. The first rule allows the network of
/// the address.
fn node_with_closed(labels: usize) -> Node {
    let above = |labels: usize| vec!["x"; labels].join(".");
    let mut rules = vec![cidr(RuleAction::Allow, "203.0.113.0/24")];
    rules.extend((2..=labels).map(|labels| allow(&above(labels))));
    rules[7] = Rule {
        ports: vec![Transport {
            protocol: Protocol::Tcp,
            port: Some(25),
        }],
        ..deny(&above(8))
    };
    let mut node = Node::with(&rules);
    node.trust_server();
    follow(&mut node, &rules);
    node.answer("p1", &long_name(), &[ADDRESS], 600);
    node
}

fn explained(node: &Node, target: &str) -> ExplainedAddress {
    let beside = Beside {
        sets: Some(BTreeMap::new()),
        ..Beside::default()
    };
    let target = target.parse().expect("a target");
    let view = node.engine.view();
    let explained = view.explain("ns1_p1", &target, &beside, node.now);
    let mut addresses = explained.expect("the pod is there").addresses;
    addresses.remove(0)
}

#[test]
fn an_address_without_room_that_a_rule_denies_is_said_to_be_closed() {
    let node = node_with_closed(PATTERNS_MAX + 2);
    for port in [25, 443] {
        let explained = explained(&node, &format!("203.0.113.1:{port}"));
        let found = (explained.verdict, explained.reason, explained.rule);
        let closed = (Verdict::Blocked, Reason::LimitReached, Some(7));
        assert_eq!(found, closed, "{port}: {explained:?}");
        let begin = "rule 7 denies it, and the address is closed for all ports: ";
        assert!(explained.text.starts_with(begin), "{}", explained.text);
        let [step] = &explained.steps[..] else {
            panic!("{:?}", explained.steps)
        };
        assert_eq!((step.rule, step.outcome), (7, StepOutcome::Decides));
        assert!(step.why.contains("fewer names"), "{step:?}");
    }
}

#[test]
fn an_address_with_room_is_judged_by_its_rules() {
    let node = node_with_closed(PATTERNS_MAX);
    for target in ["203.0.113.1:25", "203.0.113.1:443"] {
        let explained = explained(&node, target);
        let found = (explained.verdict, explained.reason, explained.rule);
        let allowed = (Verdict::Allowed, Reason::AllowedByNetwork, Some(0));
        assert_eq!(found, allowed, "{target}: {explained:?}");
    }
}

#[test]
fn packets_of_an_address_are_those_of_its_own_flow() {
    let rules = [allow("example.com"), deny_all()];
    let mut node = Node::with(&rules);
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 600);
    let to = |key: &FlowKey| key.matches.ends.dst();
    for (key, (_, packets)) in &mut node.switch {
        *packets = match to(key) {
            Some(dst) if dst == IpAddr::from(ADDRESS) => 3,
            Some(_) => 0,
            None => 7,
        };
    }
    node.pass(COMPARE_INTERVAL);
    let entries = [ADDRESS, OTHER].map(IpAddr::from);
    let entries = node.engine.view().entries("ns1_p1", &entries, node.now);
    assert_eq!(entries[0].packets, Some(3));
    assert_eq!((entries[1].packets, entries[1].used_s), (Some(0), None));
    for entry in entries {
        let [own, of_group] = &entry.flows[..] else {
            panic!("{:?}", entry.flows)
        };
        let dst = format!("nw_dst={}", entry.address);
        assert!(!own.is_of_group && own.flow.contains(&dst), "{own:?}");
        assert!(
            of_group.is_of_group && of_group.packets == 7,
            "{of_group:?}"
        );
    }
}
