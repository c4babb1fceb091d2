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

/// A tenant edits large EgressFirewalls in many namespaces again and again.
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
    firewalls.apply(update(0, 0, true), |_| false, now);
    firewalls.apply(of_other(small.clone()), |_| true, now);
    firewalls.apply(of_other(Firewall::default()), |_| true, now);
    for version in 1..4 {
        for namespace in 0..12 {
            firewalls.apply(update(namespace, version, false), |_| namespace < 2, now);
            let former = firewalls.unfollowed.values();
            let count: usize = former.map(Unfollowed::former_rules).sum();
            assert!(count <= FORMER_RULES_MAX, "{count}");
        }
    }
    let kept = firewalls.former("ns0");
    assert_eq!(kept.first(), Some(&firewall(0)), "OVN may enforce it");
    assert_eq!(firewalls.former("other"), [small], "who has few loses none");
    assert_eq!(firewalls.len(), 13);
}
