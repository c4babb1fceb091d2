use std::sync::Arc;

use super::*;
use crate::values::firewall::{Destination, Rule, RuleAction};

/// As many as ovn-kubernetes takes.
const RULES: usize = 8001;

/// An EgressFirewall whose rules are others in each version.
fn firewall(version: usize) -> Firewall {
    let rule = Rule {
        action: RuleAction::Allow,
        ports: Vec::new(),
        destination: Destination::Invalid(version.to_string()),
    };
    Firewall {
        rules: Arc::from(vec![rule; RULES]),
        ..Firewall::default()
    }
}

fn update(namespace: usize, version: usize, reset: bool) -> FirewallUpdate {
    let id = FirewallId {
        namespace: format!("ns{namespace}"),
        name: FIREWALL_NAME.into(),
    };
    FirewallUpdate {
        reset,
        firewalls: vec![(id, Some(firewall(version)))],
    }
}

/// How many rules the former ones have.
fn former_rules(firewalls: &Firewalls) -> usize {
    let former = firewalls.unfollowed.values();
    former.map(Unfollowed::former_rules).sum()
}

/// A tenant edits large EgressFirewalls in many namespaces again and again. Two of them have pods here.
#[test]
fn former_firewalls_of_all_namespaces_have_so_many_rules() {
    let mut firewalls = Firewalls::default();
    let now = Timestamp::from_nanos(0);
    let small = Firewall {
        rules: Arc::from(&firewall(0).rules[..3]),
        ..Firewall::default()
    };
    let of_other = |firewall: Firewall| {
        let id = FirewallId {
            namespace: "other".into(),
            name: FIREWALL_NAME.into(),
        };
        FirewallUpdate {
            reset: false,
            firewalls: vec![(id, Some(firewall))],
        }
    };
    let is_local = |namespace: &str| ["ns0", "ns1", "other"].contains(&namespace);
    firewalls.apply(update(0, 0, true), is_local, now);
    firewalls.apply(of_other(small.clone()), is_local, now);
    firewalls.apply(of_other(Firewall::default()), is_local, now);
    for version in 1..5 {
        for namespace in 0..12 {
            firewalls.apply(update(namespace, version, false), is_local, now);
            let count = former_rules(&firewalls);
            assert!(count <= FORMER_RULES_MAX, "{count}");
        }
    }
    let versions = |namespace: &str| firewalls.former(namespace).len();
    assert_eq!(["ns0", "ns1"].map(versions), [4, 3], "there are pods here");
    assert_eq!(firewalls.former("other"), [small], "who has few loses none");
    assert_eq!(firewalls.len(), 13);
}

/// All namespaces have pods here.
#[test]
fn of_former_firewalls_the_first_one_goes_last_because_ovn_may_enforce_it() {
    let mut firewalls = Firewalls::default();
    let mut at = 0;
    let mut edit = |firewalls: &mut Firewalls, namespace: usize, version: usize| {
        at += 1;
        let now = Timestamp::from_nanos(at);
        let update = update(namespace, version, at == 1);
        firewalls.apply(update, |_| true, now);
    };
    for version in 0..4 {
        for namespace in 0..8 {
            edit(&mut firewalls, namespace, version);
        }
    }
    let first = |firewalls: &Firewalls, namespace: usize| {
        let former = firewalls.former(&format!("ns{namespace}"));
        former.first().map(|one| one.rules[0].clone())
    };
    let of_first = firewall(0).rules.first().cloned();
    for namespace in 0..8 {
        assert_eq!(first(&firewalls, namespace), of_first);
    }
    // There is no room for the first one of a ninth. Of equally many rules, the newest go.
    edit(&mut firewalls, 8, 0);
    edit(&mut firewalls, 8, 1);
    assert_eq!(first(&firewalls, 8), None);
    assert_eq!(first(&firewalls, 0), of_first);
    assert!(former_rules(&firewalls) <= FORMER_RULES_MAX);
}
