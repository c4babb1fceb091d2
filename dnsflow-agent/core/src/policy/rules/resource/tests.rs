use proptest::prelude::*;

use super::*;
use crate::{
    testing::{allow, deny, deny_all},
    values::firewall::{Destination, RuleAction},
};

fn by_network(action: RuleAction, network: &str) -> Rule {
    Rule {
        action,
        destination: Destination::Cidr(network.parse().expect("a network")),
        ..deny_all()
    }
}

fn rule() -> impl Strategy<Value = Rule> {
    let invalid = Rule {
        destination: Destination::Invalid("bad".into()),
        ..deny_all()
    };
    prop_oneof![
        4 => (0..3u8).prop_map(|name| deny(&format!("n{name}.test"))),
        1 => Just(allow("n0.test")),
        1 => Just(invalid),
        1 => Just(deny_all()),
        1 => Just(by_network(RuleAction::Deny, "::/0")),
        1 => Just(by_network(RuleAction::Allow, "192.0.2.0/24")),
        1 => Just(by_network(RuleAction::Allow, "2001:db8::/32")),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever has changed before, the problems are those that the rules have now.
    #[test]
    fn edits_come_to_what_a_fresh_look_finds(edits in proptest::collection::vec(proptest::collection::vec(rule(), 0..6), 1..10)) {
        let mut kept = ResourceProblems::default();
        for rules in edits {
            let rules: Arc<[Rule]> = rules.into();
            let fresh = ResourceProblems::of(&rules);
            let before = kept.problems().clone();
            let changed = kept.set_rules(&rules);
            prop_assert_eq!(kept.problems(), fresh.problems());
            prop_assert_eq!(&kept.floor, &fresh.floor);
            let now = fresh.problems();
            let indices: BTreeSet<&u32> = before.keys().chain(now.keys()).collect();
            let others = indices.into_iter().filter(|index| before.get(index) != now.get(index));
            prop_assert_eq!(changed, others.copied().collect::<Vec<u32>>());
        }
    }
}

#[test]
fn an_edit_looks_at_the_rules_that_it_changes() {
    let mut kept = ResourceProblems::of(&Arc::default());
    let allow_some = |network| by_network(RuleAction::Allow, network);
    let denials = (0..100).map(|i| deny(&format!("n{i}.test")));
    let mut rules: Vec<Rule> = denials.chain([allow_some("192.0.2.0/24")]).collect();
    let mut looked_at = |rules: &[Rule]| {
        kept.set_rules(&rules.into());
        (std::mem::take(&mut kept.work), kept.problems().len())
    };
    assert_eq!(looked_at(&rules), (101, 100));
    rules[7] = deny("edit.test");
    assert_eq!(looked_at(&rules), (1, 100));
    // Another network of this family changes nothing for the names.
    rules[100] = allow_some("198.51.100.0/24");
    assert_eq!(looked_at(&rules), (1, 100));
    // A Deny of all addresses does.
    rules[100] = deny_all();
    assert_eq!(looked_at(&rules), (101, 0));
}
