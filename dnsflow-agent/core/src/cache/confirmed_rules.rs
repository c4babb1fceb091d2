//! The rules by which the flows in the switch were written, for the snapshot.
//!
//! A flow does not say its name. So the next agent takes a flow without a known name for one of a rule that is in the
//! snapshot and in force ([`SavedRules`]). A rule in the place of another one may have the same flows. The snapshot has
//! the later rule only once the switch has confirmed that the flows of the earlier one are gone.

use std::{collections::BTreeMap, iter, sync::Arc};

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
pub(crate) struct ConfirmedRules {
    /// They held when the switch had confirmed everything. First, those of the snapshot.
    confirmed: RulesInPlace,
    /// The rules of a later time, which the switch is to follow.
    expected: Option<RulesInPlace>,
    /// Whether the rules of the snapshot are not all of its time.
    is_partial: bool,
    /// How often the confirmed rules have changed.
    version: u64,
}

impl ConfirmedRules {
    /// Takes over the rules of a snapshot.
    pub(crate) fn load(&mut self, rules: Vec<SavedRules>) {
        self.is_partial = rules.iter().any(|saved| saved.is_partial);
        let rules = rules.into_iter();
        let rules = rules.map(|saved| (saved.namespace, sorted(saved.rules)));
        self.confirmed = rules.collect();
    }

    /// The rules of a namespace, sorted, while flows of an earlier run may be adopted.
    pub(crate) fn of(&self, namespace: &str) -> Option<&Arc<[RuleInPlace]>> {
        self.confirmed.get(namespace)
    }

    /// Whether the rules of the snapshot are not all of its time.
    pub(crate) fn are_partial(&self) -> bool {
        self.is_partial
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.confirmed.is_empty()
    }

    /// A comparison has not looked at all flows of the earlier run, and these rules are in force: the next one knows no
    /// further rules.
    pub(crate) fn complete(&mut self, in_force: RulesInPlace) {
        for (namespace, rules) in in_force {
            let rules = || sorted(rules.to_vec());
            self.confirmed.entry(namespace).or_insert_with(rules);
        }
        self.version += 1;
    }

    /// These rules are in force, and the switch has not followed all of them. A rule that has gone since others were
    /// confirmed or expected is none of these: if it comes back, the switch is to follow anew.
    pub(crate) fn forget_gone(&mut self, in_force: &RulesInPlace) {
        let mut is_news = false;
        for rules in iter::once(&mut self.confirmed).chain(&mut self.expected) {
            for (namespace, known) in rules {
                let in_force = in_force.get(namespace);
                let left = in_force.map_or_else(Arc::default, |rules| in_both(known, rules));
                is_news |= *known != left;
                *known = left;
            }
        }
        self.version += u64::from(is_news);
    }

    /// The switch has followed these rules, which are in force.
    pub(crate) fn confirm(&mut self, in_force: RulesInPlace) {
        self.expected = None;
        if in_force != self.confirmed {
            self.confirmed = in_force;
            self.version += 1;
        }
    }

    /// The switch has followed the expected rules ([`Followed::Expected`]).
    pub(crate) fn confirm_expected(&mut self) {
        if let Some(expected) = self.expected.take() {
            self.confirm(expected);
        }
    }

    /// Whether the switch is to follow rules.
    pub(crate) fn expects(&self) -> bool {
        self.expected.is_some()
    }

    /// These rules are in force, and the switch is to follow.
    pub(crate) fn expect(&mut self, in_force: RulesInPlace) {
        self.expected = Some(in_force);
    }

    /// The rules for a snapshot: of those in force, the ones that the switch has followed. While flows of an earlier run
    /// may be adopted (`None`), those of that run.
    pub(crate) fn to_save(
        &self,
        followed: Followed,
        in_force: Option<RulesInPlace>,
    ) -> Vec<SavedRules> {
        let confirmed = match followed {
            Followed::Expected => self.expected.as_ref().unwrap_or(&self.confirmed),
            Followed::All | Followed::Before => &self.confirmed,
        };
        let save = |namespace: &Arc<str>, rules: &[RuleInPlace], is_partial| SavedRules {
            namespace: Arc::clone(namespace),
            rules: rules.to_vec(),
            is_partial,
        };
        let Some(in_force) = in_force else {
            let former = self.confirmed.iter();
            let former = former.map(|(namespace, rules)| save(namespace, rules, self.is_partial));
            return former.collect();
        };
        if followed == Followed::All {
            let in_force = in_force.iter();
            let in_force = in_force.map(|(namespace, rules)| save(namespace, rules, false));
            return in_force.collect();
        }
        // Of a namespace without rules, the next agent takes none; of one that is not there, all.
        let none: Arc<[RuleInPlace]> = Arc::from([]);
        let gone = confirmed.keys();
        let gone = gone.filter(|namespace| !in_force.contains_key(*namespace));
        let gone = gone.map(|namespace| save(namespace, &none, false));
        let there = in_force.iter().map(|(namespace, rules)| {
            let both = in_both(rules, confirmed.get(namespace).unwrap_or(&none));
            save(namespace, &both, both.len() < rules.len())
        });
        gone.chain(there).collect()
    }

    /// A number that grows whenever more rules are confirmed.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }
}

fn sorted(mut rules: Vec<RuleInPlace>) -> Arc<[RuleInPlace]> {
    rules.sort_unstable();
    rules.into()
}

/// The rules that are in both of two lists, each as often as in both. Most often, both are the same.
fn in_both(one: &Arc<[RuleInPlace]>, other: &Arc<[RuleInPlace]>) -> Arc<[RuleInPlace]> {
    if one == other {
        return Arc::clone(one);
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
            assert_eq!(in_both(&rules(one), &rules(other)), rules(both));
            assert_eq!(in_both(&rules(other), &rules(one)), rules(both));
        }
    }

    #[test]
    fn a_rule_is_saved_once_the_switch_has_followed() {
        let mut confirmed = ConfirmedRules::default();
        let edited = || Some(in_force(&[2, 3]));
        let save =
            |confirmed: &ConfirmedRules, followed| saved(&confirmed.to_save(followed, edited()));
        // The namespace is new: no rule counts, and not every rule of the next agent.
        assert_eq!(confirmed.to_save(Followed::Before, edited()).len(), 1);
        assert_eq!(save(&confirmed, Followed::Before), []);
        confirmed.confirm(in_force(&[1, 2]));
        assert_eq!(save(&confirmed, Followed::All), [2, 3]);
        assert_eq!(save(&confirmed, Followed::Before), [2]);
        confirmed.expect(in_force(&[2, 3]));
        assert_eq!(save(&confirmed, Followed::Before), [2]);
        assert_eq!(save(&confirmed, Followed::Expected), [2, 3]);
        let version = confirmed.version();
        confirmed.confirm_expected();
        assert!(confirmed.version() > version && !confirmed.expects());
        assert_eq!(save(&confirmed, Followed::Before), [2, 3]);
        // The firewall is gone: the rules of the next one do not count.
        let left = confirmed.to_save(Followed::Before, Some(RulesInPlace::new()));
        assert_eq!((left.len(), saved(&left)), (1, vec![]));
    }
}
