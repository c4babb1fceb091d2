use super::*;
use crate::values::flow::Protocol;

fn rule(action: RuleAction, destination: Destination) -> Rule {
    Rule {
        action,
        destination,
        ports: Vec::new(),
    }
}

fn named(action: RuleAction, name: &str) -> Rule {
    rule(action, Destination::Name(name.parse().expect("a name")))
}

fn network(action: RuleAction, network: &str) -> Rule {
    rule(
        action,
        Destination::Cidr(network.parse().expect("a network")),
    )
}

fn for_port(rule: Rule, protocol: Protocol, port: Option<u16>) -> Rule {
    let ports = vec![Transport { protocol, port }];
    Rule { ports, ..rule }
}

fn trial(rules: Vec<Rule>) -> Trial {
    let firewall = Firewall {
        rules: rules.into(),
        ..Firewall::default()
    };
    Trial::new(&firewall, true)
}

/// A connection to port 443 of 203.0.113.1.
fn facts(names: &[DomainName]) -> Facts<'_> {
    Facts {
        address: [203, 0, 113, 1].into(),
        transport: Transport {
            protocol: Protocol::Tcp,
            port: Some(443),
        },
        names,
        is_refused: false,
        is_node: false,
    }
}

fn names(names: &[&str]) -> Vec<DomainName> {
    let names = names.iter();
    names.map(|name| name.parse().expect("a name")).collect()
}

fn outcome(verdict: Verdict, rule: Option<u32>, unless: Option<Unless>) -> Outcome {
    Outcome {
        verdict,
        rule,
        unless,
    }
}

const ALLOW: RuleAction = RuleAction::Allow;
const DENY: RuleAction = RuleAction::Deny;

#[test]
fn the_first_rule_that_matches_decides() {
    let trial = trial(vec![
        network(DENY, "203.0.113.1/32"),
        named(ALLOW, "example.com"),
        network(DENY, "0.0.0.0/0"),
    ]);
    let told = names(&["www.example.com"]);
    let blocked = outcome(Verdict::Blocked, Some(0), None);
    assert_eq!(trial.decide(&facts(&told)), blocked);
    let other = Facts {
        address: [203, 0, 113, 2].into(),
        ..facts(&told)
    };
    let allowed = outcome(Verdict::Allowed, Some(1), None);
    assert_eq!(trial.decide(&other), allowed);
    let v6 = Facts {
        address: [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into(),
        ..facts(&[])
    };
    assert_eq!(trial.decide(&v6).rule, None);
    assert_eq!(trial.decide(&v6).verdict, Verdict::Allowed);
}

#[test]
fn names_match_as_the_patterns_say() {
    let rules = vec![named(ALLOW, "*.example.com"), network(DENY, "0.0.0.0/0")];
    let one_label = trial(rules);
    for (name, rule) in [
        ("example.com", 1),
        ("a.example.com", 0),
        ("a.b.example.com", 1),
    ] {
        let told = names(&[name]);
        assert_eq!(one_label.decide(&facts(&told)).rule, Some(rule), "{name}");
    }
    let firewall = Firewall {
        rules: [named(ALLOW, "example.com"), network(DENY, "0.0.0.0/0")].into(),
        ..Firewall::default()
    };
    let told = names(&["a.example.com"]);
    for (subdomains, rule) in [(true, 0), (false, 1)] {
        let outcome = Trial::new(&firewall, subdomains).decide(&facts(&told));
        assert_eq!(outcome.rule, Some(rule));
    }
    let by_annotation = Firewall {
        subdomains: Some(false),
        ..firewall
    };
    let outcome = Trial::new(&by_annotation, true).decide(&facts(&told));
    assert_eq!(outcome.rule, Some(1));
}

#[test]
fn a_rule_is_for_its_ports() {
    let told = names(&["example.com"]);
    for (protocol, port, rule) in [
        (Protocol::Tcp, Some(443), 0),
        (Protocol::Tcp, None, 0),
        (Protocol::Tcp, Some(80), 1),
        (Protocol::Udp, Some(443), 1),
    ] {
        let trial = trial(vec![
            for_port(named(ALLOW, "example.com"), protocol, port),
            network(DENY, "0.0.0.0/0"),
        ]);
        let found = trial.decide(&facts(&told)).rule;
        assert_eq!(found, Some(rule), "{protocol:?} {port:?}");
    }
}

#[test]
fn what_ovn_kubernetes_may_have_resolved_is_said() {
    let trial = trial(vec![
        for_port(named(ALLOW, "other.test"), Protocol::Tcp, Some(80)),
        named(DENY, "bad.test"),
        named(ALLOW, "example.com"),
        network(DENY, "0.0.0.0/0"),
    ]);
    let unless = Some(Unless::IsResolved(2));
    let blocked = outcome(Verdict::Blocked, Some(3), unless);
    assert_eq!(trial.decide(&facts(&[])), blocked);
    // The pod was told another name.
    let told = names(&["example.org"]);
    let blocked = outcome(Verdict::Blocked, Some(3), None);
    assert_eq!(trial.decide(&facts(&told)), blocked);
    // A name that is told for an address that is never opened.
    let told = names(&["example.com"]);
    let refused = Facts {
        is_refused: true,
        ..facts(&told)
    };
    let blocked = outcome(Verdict::Blocked, Some(3), unless);
    assert_eq!(trial.decide(&refused), blocked);
    // A rule that denies holds for every address.
    let told = names(&["bad.test"]);
    let refused = Facts {
        is_refused: true,
        ..facts(&told)
    };
    let blocked = outcome(Verdict::Blocked, Some(1), None);
    assert_eq!(trial.decide(&refused), blocked);
}

#[test]
fn a_rule_by_node_may_match_a_node() {
    let nodes = rule(DENY, Destination::Nodes);
    let trial = trial(vec![nodes, network(ALLOW, "0.0.0.0/0")]);
    let allowed = outcome(Verdict::Allowed, Some(1), None);
    assert_eq!(trial.decide(&facts(&[])), allowed);
    let node = Facts {
        is_node: true,
        ..facts(&[])
    };
    let unless = Some(Unless::IsSelected(0));
    let allowed = outcome(Verdict::Allowed, Some(1), unless);
    assert_eq!(trial.decide(&node), allowed);
}

#[test]
fn a_rule_that_cannot_be_used_matches_nothing() {
    let unusable = rule(DENY, Destination::Invalid("misspelt".into()));
    let trial = trial(vec![unusable]);
    let allowed = outcome(Verdict::Allowed, None, None);
    assert_eq!(trial.decide(&facts(&[])), allowed);
}
