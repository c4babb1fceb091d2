use proptest::prelude::*;

use super::*;

/// The problems of a namespace's rules, by rule index.
type ByIndex = BTreeMap<u32, Arc<Problem>>;

/// A report by all problems before and behind a change.
fn whole_report(before: &ByIndex, now: &ByIndex) -> Option<Report> {
    let known: BTreeSet<String> = before.values().map(ToString::to_string).collect();
    let stays: BTreeSet<String> = now.values().map(ToString::to_string).collect();
    let mut news: BTreeMap<Severity, NewProblems> = BTreeMap::new();
    let mut present: BTreeMap<Severity, PresentProblems> = BTreeMap::new();
    let mut new_rules = BTreeSet::new();
    for (index, problem) in now {
        let text = problem.to_string();
        let all = present.entry(problem.severity()).or_default();
        all.count += 1;
        if all.count <= PROBLEM_TEXTS_MAX {
            all.first.insert(*index, text.clone());
        }
        if !known.contains(&text) {
            new_rules.insert(*index);
            let new = news.entry(problem.severity()).or_default();
            if new.first.len() < PROBLEM_TEXTS_MAX {
                new.first.insert(*index, text);
            } else {
                new.others.push(*index);
            }
        }
    }
    let over = before.iter().filter(|(index, problem)| {
        !stays.contains(&problem.to_string()) && !new_rules.contains(index)
    });
    let over = over.map(|(index, _)| *index).collect();
    (before != now).then(|| Report::Problems {
        namespace: "ns1".into(),
        news,
        over,
        present,
    })
}

fn problem() -> impl Strategy<Value = Arc<Problem>> {
    let name = |number: u8| format!("n{number}.test").parse().expect("a name");
    let problem = prop_oneof![
        2 => (0..20u8).prop_map(|number| Problem::Invalid(format!("bad {number}"))),
        2 => (0..20u8).prop_map(move |number| Problem::NoAcl(name(number))),
        1 => Just(Problem::StaleAcl),
    ];
    problem.prop_map(Arc::new)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever was reported before, a report by the rules that have changed says the same as one by all of them.
    #[test]
    fn a_report_by_what_has_changed_says_what_one_by_all_rules_does(states in proptest::collection::vec(proptest::collection::btree_map(0..30u32, problem(), 0..30), 1..8)) {
        let mut problems = Problems::default();
        let mut before = ByIndex::new();
        for now in states {
            let rules: BTreeSet<u32> = before.keys().chain(now.keys()).copied().collect();
            let others = rules.into_iter().filter(|index| {
                problems.reported_at("ns1", *index) != now.get(index).map(Arc::as_ref)
            });
            let changed = others.map(|index| (index, now.get(&index).cloned())).collect();
            prop_assert_eq!(problems.report("ns1".into(), changed), whole_report(&before, &now));
            prop_assert!(problems.reported_rules("ns1").count() == now.len());
            prop_assert_eq!(problems.reported.is_empty(), now.is_empty());
            before = now;
        }
    }
}
