//! What only all nodes together can say: of a rule that nobody uses, or of a manifest that is tried.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use serde_json::Value;

use super::merge::table;
use crate::{
    print::{self, CHANGED, changed_row},
    trial::Trialled,
    unused::{FirewallUse, RuleUse, Used},
};

/// What the nodes have said of the rules, as one, with the nodes in words. A node with other rules than the
/// first one is named in `silent`. Where a node is silent, no rule is said to be unused.
pub(super) fn unused(
    answers: Vec<(String, FirewallUse)>,
    silent: &mut Vec<(String, String)>,
) -> io::Result<Option<(String, Value)>> {
    let mut answers = answers.into_iter();
    let Some((first, mut whole)) = answers.next() else {
        return Ok(None);
    };
    let mut nodes = vec![first];
    for (node, one) in answers {
        let rules = |of: &FirewallUse| -> Vec<String> {
            of.rules.iter().map(|rule| rule.text.clone()).collect()
        };
        if rules(&one) != rules(&whole) {
            let first = &nodes[0];
            silent.push((
                node,
                format!("has other rules than node {first}: ask again"),
            ));
            continue;
        }
        if one.known_s < whole.known_s {
            (whole.known_s, whole.known_since) = (one.known_s, one.known_since);
        }
        for (all, of_one) in whole.rules.iter_mut().zip(one.rules) {
            add(all, of_one);
        }
        let only = one.only_by_answer.into_iter().flatten();
        match &mut whole.only_by_answer {
            Some(all) => all.extend(only),
            None => {
                let only: Vec<_> = only.collect();
                whole.only_by_answer = (!only.is_empty()).then_some(only);
            }
        }
        nodes.push(node);
    }
    for rule in &mut whole.rules {
        if rule.used == Used::Never && !silent.is_empty() {
            rule.used = Used::NotKnown;
        }
    }
    let value = serde_json::to_value(whole).map_err(io::Error::other)?;
    Ok(Some((nodes.join(", "), value)))
}

/// Adds what one more node knows of a rule.
fn add(all: &mut RuleUse, one: RuleUse) {
    let sooner = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min();
    let strength = |used: Used| match used {
        Used::Never | Used::Closes => 0,
        Used::NotKnown => 1,
        Used::Told => 2,
        Used::Connected => 3,
    };
    if strength(one.used) > strength(all.used) {
        all.used = one.used;
    }
    all.places += one.places;
    all.last_s = sooner(all.last_s, one.last_s);
    for name in one.names {
        match all.names.iter_mut().find(|known| known.name == name.name) {
            Some(known) => known.last_s = sooner(known.last_s, name.last_s),
            None => all.names.push(name),
        }
    }
    all.names.sort_by(|one, other| one.name.cmp(&other.name));
    all.narrower.extend(one.narrower);
    all.narrower.sort_unstable();
    all.narrower.dedup();
}

/// What the nodes have said of manifests, a namespace after another: sums, and the connections of all nodes.
pub(super) fn trials(trials: Vec<(String, Trialled)>, output: &mut impl Write) -> io::Result<()> {
    let mut namespaces: BTreeMap<String, Vec<(String, Trialled)>> = BTreeMap::new();
    for (node, trial) in trials {
        let of_it = namespaces.entry(trial.namespace.clone()).or_default();
        of_it.push((node, trial));
    }
    for (namespace, trials) in namespaces {
        let mut whole: Option<Trialled> = None;
        let mut nodes = Vec::new();
        let mut rows = Vec::new();
        for (node, trial) in &trials {
            nodes.push(&**node);
            let changed = trial.changed.iter();
            rows.extend(changed.map(|changed| (changed.change, node, changed)));
            match &mut whole {
                None => whole = Some(trial.clone()),
                Some(whole) => whole.add(trial),
            }
        }
        let Some(whole) = whole else {
            continue;
        };
        print::trial_counts(&whole, &nodes.join(", "), output)?;
        rows.sort_by_key(|(change, node, _)| (*change, *node));
        if !rows.is_empty() {
            writeln!(output)?;
            let rows = rows.into_iter();
            let rows = rows.map(|(_, node, changed)| (node, changed_row(&namespace, changed)));
            table(CHANGED, rows, output)?;
        }
        print::trial_notes(&whole, output)?;
    }
    Ok(())
}

impl Trialled {
    /// Adds what one more node says of the same manifest.
    fn add(&mut self, one: &Self) {
        self.known_s = self.known_s.min(one.known_s);
        self.changed.extend(one.changed.iter().cloned());
        self.stay_allowed += one.stay_allowed;
        self.stay_denied += one.stay_denied;
        for (all, texts) in [
            (&mut self.problems, &one.problems),
            (&mut self.notes, &one.notes),
        ] {
            for text in texts {
                if !all.contains(text) {
                    all.push(text.clone());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn use_of(known_s: u64, rules: &[(&str, &str, usize)]) -> FirewallUse {
        let rules = (0..).zip(rules).map(|(index, (text, used, places))| {
            json!({
                "rule": index, "text": text, "used": used, "places": places,
                "last_s": (*used == "connected").then_some(known_s / 2),
                "names": [], "narrower": [],
            })
        });
        let rules: Vec<_> = rules.collect();
        let value = json!({
            "namespace": "ns1", "known_s": known_s, "known_since": "agent_start", "rules": rules,
            "only_by_answer": null,
        });
        serde_json::from_value(value).expect("what `unused` prints")
    }

    fn united(
        answers: &[(&str, FirewallUse)],
        silent: &mut Vec<(String, String)>,
    ) -> (String, FirewallUse) {
        let answers = answers.iter();
        let answers = answers.map(|(node, one)| ((*node).to_owned(), one.clone()));
        let united = unused(answers.collect(), silent).expect("it can be written");
        let (nodes, value) = united.expect("there are nodes");
        (nodes, serde_json::from_value(value).expect("it was one"))
    }

    #[test]
    fn a_rule_is_unused_if_no_node_has_used_it() {
        let one = use_of(
            60,
            &[("a", "never", 0), ("b", "never", 0), ("c", "connected", 1)],
        );
        let other = use_of(
            40,
            &[("a", "told", 0), ("b", "never", 0), ("c", "connected", 2)],
        );
        let both = [("n1", one), ("n2", other)];
        let mut silent = Vec::new();
        let (nodes, whole) = united(&both, &mut silent);
        assert_eq!((&*nodes, whole.known_s), ("n1, n2", 40));
        let used = |of: &FirewallUse| of.rules.iter().map(|rule| rule.used).collect::<Vec<_>>();
        assert_eq!(used(&whole), [Used::Told, Used::Never, Used::Connected]);
        assert_eq!(
            (whole.rules[2].places, whole.rules[2].last_s),
            (3, Some(20))
        );
        assert!(silent.is_empty());

        // Who has not answered may have used it.
        silent.push(("n3".to_owned(), "no route".to_owned()));
        let (_, whole) = united(&both, &mut silent);
        assert_eq!(used(&whole), [Used::Told, Used::NotKnown, Used::Connected]);
    }

    #[test]
    fn a_node_with_other_rules_is_named_and_left_out() {
        let one = use_of(60, &[("a", "never", 0)]);
        let other = use_of(40, &[("b", "connected", 1)]);
        let mut silent = Vec::new();
        let (nodes, whole) = united(&[("n1", one), ("n2", other)], &mut silent);
        assert_eq!((&*nodes, whole.known_s), ("n1", 60));
        assert_eq!(whole.rules[0].used, Used::NotKnown);
        assert_eq!(silent.len(), 1);
    }
}
