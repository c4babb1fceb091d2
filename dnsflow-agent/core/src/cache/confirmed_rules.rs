//! The rules by which the flows in the switch were written, for the snapshot.
//!
//! A flow does not say its name. So the next agent takes a flow without a known name for one of a rule that is in the
//! snapshot and in force ([`SavedRules`]). A rule in the place of another one may have the same flows. It counts only
//! once the switch has confirmed that the flows of the rule before it are gone: this run may end earlier.

use std::{collections::BTreeMap, sync::Arc};

use crate::{cache::snapshot::SavedRules, policy::plan::RuleInPlace};

/// Rules by namespace.
pub(crate) type RulesInPlace = BTreeMap<Arc<str>, Arc<[RuleInPlace]>>;

/// How far the switch has followed the changes of rules.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Followed {
    /// It has confirmed all changes of flows.
    All,
    /// It has confirmed all changes from before [`ConfirmedRules::expect`].
    Expected,
    /// It has not.
    Before,
}

/// The rules that the switch has followed.
#[derive(Debug, Default)]
pub(super) struct ConfirmedRules {
    /// They held when the switch had confirmed everything. First, those of the snapshot.
    confirmed: RulesInPlace,
    /// The rules of a later time, which the switch is to follow.
    expected: Option<RulesInPlace>,
    /// The changes of rules and ports whose rules the confirmed ones are, if those are in force.
    changes: Option<(u64, u32)>,
    /// How often the confirmed rules have changed.
    version: u64,
}

impl ConfirmedRules {
    /// Takes over the rules of a snapshot.
    pub(super) fn load(&mut self, rules: Vec<SavedRules>) {
        let rules = rules.into_iter();
        let rules = rules.map(|SavedRules { namespace, rules }| (namespace, sorted(rules)));
        self.confirmed = rules.collect();
    }

    /// The rules of a namespace, sorted, while flows of an earlier run may be adopted.
    pub(super) fn of(&self, namespace: &str) -> Option<&Arc<[RuleInPlace]>> {
        self.confirmed.get(namespace)
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.confirmed.is_empty()
    }

    /// A comparison has not looked at all flows of the earlier run, and these rules are in force: the next one knows no
    /// further rules.
    pub(super) fn complete(&mut self, in_force: RulesInPlace) {
        for (namespace, rules) in in_force {
            let rules = || sorted(rules.to_vec());
            self.confirmed.entry(namespace).or_insert_with(rules);
        }
    }

    /// Whether the confirmed rules are those in force, of these changes of rules and ports.
    pub(super) fn are_of(&self, changes: (u64, u32)) -> bool {
        self.changes == Some(changes)
    }

    /// The switch has followed so far, and these rules are in force, of these changes of rules and ports.
    pub(super) fn confirm(
        &mut self,
        followed: Followed,
        changes: (u64, u32),
        in_force: &RulesInPlace,
    ) {
        let confirmed = match followed {
            Followed::All => Some(in_force.clone()),
            Followed::Expected => self.expected.take(),
            Followed::Before => None,
        };
        if let Some(confirmed) = confirmed
            && confirmed != self.confirmed
        {
            self.confirmed = confirmed;
            self.version += 1;
        }
        self.changes = (followed == Followed::All).then_some(changes);
        if followed == Followed::All {
            self.expected = None;
        }
    }

    /// These rules are in force, and the switch is to follow.
    pub(super) fn expect(&mut self, in_force: RulesInPlace) {
        self.expected = Some(in_force);
    }

    /// The rules for a snapshot: of those in force, the ones that the switch has followed. While flows of an earlier run
    /// may be adopted (`None`), those of that run.
    pub(super) fn to_save(
        &self,
        followed: Followed,
        in_force: Option<RulesInPlace>,
    ) -> Vec<SavedRules> {
        let confirmed = match followed {
            Followed::Expected => self.expected.as_ref().unwrap_or(&self.confirmed),
            Followed::All | Followed::Before => &self.confirmed,
        };
        let rules = match in_force {
            None => self.confirmed.clone(),
            Some(in_force) if followed == Followed::All => in_force,
            Some(in_force) => {
                let both = in_force.into_iter().filter_map(|(namespace, rules)| {
                    let both = in_both(rules, confirmed.get(&namespace)?);
                    Some((namespace, both))
                });
                both.collect()
            }
        };
        let rules = rules.into_iter();
        let rules = rules.map(|(namespace, rules)| SavedRules {
            namespace,
            rules: rules.to_vec(),
        });
        rules.collect()
    }

    /// A number that grows whenever more rules are confirmed.
    pub(super) fn version(&self) -> u64 {
        self.version
    }
}

fn sorted(mut rules: Vec<RuleInPlace>) -> Arc<[RuleInPlace]> {
    rules.sort_unstable();
    rules.into()
}

/// The rules that are in both of two lists, each as often as in both. Most often, both are the same.
fn in_both(one: Arc<[RuleInPlace]>, other: &Arc<[RuleInPlace]>) -> Arc<[RuleInPlace]> {
    if one == *other {
        return one;
    }
    let (one, other) = (sorted(one.to_vec()), sorted(other.to_vec()));
    let mut other = other.iter().peekable();
    let is_in_other = |rule: &&RuleInPlace| {
        while other.next_if(|known| known < rule).is_some() {}
        other.next_if(|known| known == rule).is_some()
    };
    one.iter().filter(is_in_other).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{policy::rules::NamePattern, values::firewall::RuleAction};

    fn rules(priorities: &[u16]) -> Arc<[RuleInPlace]> {
        let name = || "a.test".parse().expect("a name");
        let rule = |priority: &u16| ((name(), NamePattern::Exact, RuleAction::Allow), *priority);
        priorities.iter().map(rule).collect()
    }

    fn in_force(priorities: &[u16]) -> RulesInPlace {
        [("ns1".into(), rules(priorities))].into()
    }

    fn saved(rules: &[SavedRules]) -> Vec<u16> {
        let rules = rules.iter().flat_map(|saved| &saved.rules);
        rules.map(|(_, priority)| *priority).collect()
    }

    #[test]
    fn a_rule_counts_as_often_as_in_both() {
        let cases: [(&[u16], &[u16], &[u16]); 4] = [
            (&[3, 1, 2, 2], &[2, 4, 3, 2], &[2, 2, 3]),
            (&[2, 2], &[2], &[2]),
            (&[1, 3], &[2], &[]),
            (&[], &[1], &[]),
        ];
        for (one, other, both) in cases {
            assert_eq!(in_both(rules(one), &rules(other)), rules(both));
            assert_eq!(in_both(rules(other), &rules(one)), rules(both));
        }
    }

    #[test]
    fn a_rule_is_saved_once_the_switch_has_followed() {
        let mut confirmed = ConfirmedRules::default();
        confirmed.confirm(Followed::All, (1, 1), &in_force(&[1, 2]));
        assert!(confirmed.are_of((1, 1)) && !confirmed.are_of((2, 1)));
        let edited = || Some(in_force(&[2, 3]));
        let save =
            |confirmed: &ConfirmedRules, followed| saved(&confirmed.to_save(followed, edited()));
        assert_eq!(save(&confirmed, Followed::All), [2, 3]);
        assert_eq!(save(&confirmed, Followed::Before), [2]);
        confirmed.confirm(Followed::Before, (2, 1), &in_force(&[2, 3]));
        confirmed.expect(in_force(&[2, 3]));
        assert_eq!(save(&confirmed, Followed::Before), [2]);
        assert_eq!(save(&confirmed, Followed::Expected), [2, 3]);
        let version = confirmed.version();
        confirmed.confirm(Followed::Expected, (3, 1), &in_force(&[3]));
        assert!(confirmed.version() > version);
        assert_eq!(save(&confirmed, Followed::Before), [2, 3]);
    }
}
