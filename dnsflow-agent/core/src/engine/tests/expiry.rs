//! How long an address stays open, and a denied one closed.

use super::*;
use crate::values::limits::GROUP_STAYS;

#[test]
fn an_address_out_of_use_goes_after_its_ttl() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 1);
    node.pass(MIN_TTL - Duration::from_secs(1));
    assert_eq!(node.own(), 1, "the shortest cache entry");
    node.pass(COMPARE_INTERVAL + IDLE_GRACE);
    assert_eq!(node.own(), 0);
    node.pass(GROUP_STAYS + 2 * COMPARE_INTERVAL);
    assert_eq!(node.engine.flow_count(), 1, "where tags end");
    assert!(node.engine.told.cache.is_idle());
    // It opens again as if for the first time.
    node.answer("p1", "example.com", &[ADDRESS], 1);
    assert_eq!(node.own(), 1);
}

#[test]
fn an_address_in_use_stays() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 1);
    for _ in 0..20 {
        for (_, packets) in node.switch.values_mut() {
            *packets += 1;
        }
        node.pass(IDLE_GRACE / 2);
        assert_eq!(node.own(), 1);
    }
    node.pass(2 * IDLE_GRACE + 2 * COMPARE_INTERVAL);
    assert_eq!(node.open(), []);
}

#[test]
fn a_new_answer_prolongs_the_entry() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    for _ in 0..10 {
        node.answer("p1", "example.com", &[ADDRESS], 60);
        node.pass(Duration::from_secs(50));
        assert_eq!(node.own(), 1);
    }
    assert_eq!(node.engine.counters().flows_added, 3);
}

/// The longest that a test waits for an entry that denies to go, behind its end.
const SLACK: Duration = Duration::from_secs(100);

/// What rule 0 denies stays denied until an hour after the pod was told, and no longer.
pub(super) fn assert_denied_for_an_hour(node: &mut Node, told_at: Timestamp) {
    let denied = |node: &Node| node.open().iter().any(|(.., priority)| *priority == 11_000);
    node.pass(Duration::from_secs(200));
    assert!(denied(node), "behind the end of its TTL");
    let deny_ttl = node.engine.told.cache.limits().deny_ttl;
    node.pass((told_at + deny_ttl).since(node.now) - Duration::from_secs(1));
    assert!(denied(node), "for an hour");
    node.pass(SLACK);
    assert_eq!(node.open(), [], "and no longer");
}

#[test]
fn what_was_allowed_when_the_pod_was_told_stays_denied_once_it_is() {
    for denying in [
        vec![deny("example.com")],
        vec![deny("www.example.com"), allow("example.com"), deny_all()],
        vec![deny("*.example.com"), deny_all()],
    ] {
        let mut node = Node::with(&[allow("example.com"), deny_all()]);
        let told_at = node.now;
        node.answer("p1", "www.example.com", &[ADDRESS], 1);
        node.pass(Duration::from_secs(30));
        node.set_firewall(&denying);
        node.set_ovn(&denying);
        assert_denied_for_an_hour(&mut node, told_at);
    }
}

/// Each spelling is a rule of its own, and all of them hold for the name.
#[test]
fn a_name_in_two_spellings_is_allowed_and_denied_by_each() {
    let rules = [
        Rule {
            ports: tcp(1),
            ..deny("Example.COM")
        },
        allow("example.com"),
        Rule {
            ports: tcp(2),
            ..allow("example.com.")
        },
        deny_all(),
    ];
    let mut node = Node::with(&rules);
    let told_at = node.now;
    node.answer("p1", "www.example.com", &[ADDRESS], 1);
    let priorities: BTreeSet<u16> = node.open().iter().map(|(.., at)| *at).collect();
    assert_eq!(priorities, [11_000, 10_999, 10_998].into());
    assert_denied_for_an_hour(&mut node, told_at);
}

#[test]
fn what_no_rule_mentioned_when_the_pod_was_told_stays_denied_once_one_does() {
    let mut node = Node::with(&[deny_all()]);
    let told_at = node.now;
    node.answer("p1", "example.com", &[ADDRESS], 1);
    node.pass(Duration::from_secs(30));
    let rules = [deny("example.com"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    assert_denied_for_an_hour(&mut node, told_at);
}

/// Nobody is told the address again: it stays open for as long as one that was never denied.
#[test]
fn what_is_allowed_again_is_open_no_longer_than_its_answer_counts() {
    for rest in [10, 200] {
        let mut node = Node::with(&[deny("example.com"), deny_all()]);
        node.answer("p1", "example.com", &[ADDRESS], 1);
        node.pass(Duration::from_secs(rest));
        let rules = [allow("example.com"), deny_all()];
        node.set_firewall(&rules);
        node.set_ovn(&rules);
        assert_eq!(node.open().len(), 1, "it is known");
        node.pass(IDLE_GRACE - COMPARE_INTERVAL);
        assert_eq!(
            node.open().len(),
            1,
            "a rule that comes and goes takes nothing away"
        );
        node.pass(MIN_TTL + 2 * COMPARE_INTERVAL);
        assert_eq!(node.open(), [], "{rest}");
    }
}

#[test]
fn what_is_denied_again_at_once_stays_denied_for_its_hour() {
    let mut node = Node::with(&[deny("example.com")]);
    let told_at = node.now;
    node.answer("p1", "example.com", &[ADDRESS], 1);
    node.pass(Duration::from_secs(200));
    for rules in [vec![deny_all()], vec![deny("example.com")]] {
        node.set_firewall(&rules);
        node.set_ovn(&rules);
        node.pass(IDLE_GRACE / 2);
    }
    assert_denied_for_an_hour(&mut node, told_at);
}
