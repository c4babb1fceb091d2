use proptest::prelude::*;

use super::*;

const ALLOW: RuleAction = RuleAction::Allow;
const DENY: RuleAction = RuleAction::Deny;

fn bearing(rule: u32, action: RuleAction, doubt: Option<Doubt>) -> Bearing {
    Bearing {
        rule,
        action,
        once_asked: false,
        doubt,
    }
}

#[test]
fn the_first_rule_that_matches_decides() {
    let rules = [bearing(1, DENY, None), bearing(2, ALLOW, None)];
    let decided = |rules: &[Bearing]| {
        let decided = decide(rules, false);
        (decided.action, decided.rule, decided.unless)
    };
    assert_eq!(decided(&rules), (DENY, Some(1), None));
    assert_eq!(decided(&rules[1..]), (ALLOW, Some(2), None));
    assert_eq!(decided(&[]), (ALLOW, None, None));
}

#[test]
fn a_doubtful_rule_matters_if_it_would_decide_otherwise() {
    let same = [
        bearing(0, DENY, Some(Doubt::Port)),
        bearing(1, DENY, None),
        bearing(2, ALLOW, Some(Doubt::Node)),
    ];
    assert_eq!(decide(&same, false).unless, None);
    let other = [
        bearing(0, DENY, Some(Doubt::Node)),
        bearing(1, ALLOW, Some(Doubt::Port)),
        bearing(2, DENY, Some(Doubt::Edit)),
        bearing(3, DENY, None),
    ];
    let unless = decide(&other, false).unless.expect("rule 1 may match");
    assert_eq!((unless.rule, unless.doubt), (1, Doubt::Port));
    assert_eq!(unless.heaviest, Doubt::Node, "rule 2 changes nothing");
}

#[test]
fn a_rule_that_waits_for_the_question_counts_behind_it() {
    let waiting = Bearing {
        once_asked: true,
        ..bearing(0, ALLOW, None)
    };
    let rules = [waiting, bearing(1, DENY, None)];
    assert_eq!(decide(&rules, false).rule, Some(1));
    assert_eq!(decide(&rules, true).rule, Some(0));
}

proptest! {
    /// Each doubtful rule matches or does not: the decision is certain exactly if all of these worlds agree.
    #[test]
    fn a_decision_is_certain_if_all_worlds_agree(
        rules in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>()), 0..7),
        is_asked in any::<bool>(),
    ) {
        let rules: Vec<Bearing> = (0..)
            .zip(rules)
            .map(|(rule, (allows, is_doubtful, once_asked))| Bearing {
                once_asked,
                ..bearing(
                    rule,
                    if allows { ALLOW } else { DENY },
                    is_doubtful.then_some(Doubt::Port),
                )
            })
            .collect();
        let worlds = 0_u32..1 << rules.len();
        let outcomes = worlds.map(|world| {
            let first = rules.iter().find(|rule| {
                let is_there = is_asked || !rule.once_asked;
                is_there && (rule.doubt.is_none() || world >> rule.rule & 1 == 1)
            });
            first.map_or(ALLOW, |rule| rule.action)
        });
        let outcomes: Vec<RuleAction> = outcomes.collect();
        let decided = decide(&rules, is_asked);
        prop_assert_eq!(decided.action, outcomes[0], "no doubtful rule matches");
        let agree = outcomes.iter().all(|action| *action == outcomes[0]);
        prop_assert_eq!(decided.unless.is_none(), agree);
    }
}
