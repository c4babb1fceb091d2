//! The problems of EgressFirewalls, and those that were reported.
//!
//! The rules of a namespace with pods here have its problems (`local.rs`). [`Problems`] has all others. It reports
//! only differences from the last report of a namespace.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    io::report::{NewProblems, PresentProblems, Report, Severity},
    policy::rules::{Problem, resource::ResourceProblems},
    tools::table::HashMap,
    values::{firewall::Rule, limits::PROBLEM_TEXTS_MAX},
};

/// The rules of a namespace whose problems may have changed since the last report.
#[derive(Debug)]
pub(super) enum Changed {
    /// All of them.
    All,
    /// Those at these indices.
    Of(BTreeSet<u32>),
}

/// The problems of a namespace's rules, as they were reported.
#[derive(Debug, Default)]
struct Reported {
    /// By effect and rule index.
    by_effect: BTreeMap<Severity, BTreeMap<u32, Arc<Problem>>>,
    /// How many rules have each.
    counts: HashMap<Arc<Problem>, usize>,
}

impl Reported {
    fn at(&self, index: u32) -> Option<&Problem> {
        let problems = self.by_effect.values();
        let mut problems = problems.filter_map(|problems| problems.get(&index));
        problems.next().map(Arc::as_ref)
    }

    /// Adds the problem of a rule that has none.
    fn insert(&mut self, index: u32, problem: Arc<Problem>) {
        *self.counts.entry(Arc::clone(&problem)).or_default() += 1;
        let of_effect = self.by_effect.entry(problem.severity()).or_default();
        of_effect.insert(index, problem);
    }

    fn remove(&mut self, index: u32) -> Option<Arc<Problem>> {
        let problems = self.by_effect.values_mut();
        let problem = problems
            .filter_map(|problems| problems.remove(&index))
            .next()?;
        self.by_effect.retain(|_, problems| !problems.is_empty());
        if let Some(count) = self.counts.get_mut(&problem) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&problem);
            }
        }
        Some(problem)
    }

    /// The first problems of each effect, and their number.
    fn present(&self) -> BTreeMap<Severity, PresentProblems> {
        let present = self.by_effect.iter().map(|(severity, problems)| {
            let first = problems.iter().take(PROBLEM_TEXTS_MAX);
            let first = first.map(|(index, problem)| (*index, problem.to_string()));
            let present = PresentProblems {
                first: first.collect(),
                count: problems.len(),
            };
            (*severity, present)
        });
        present.collect()
    }
}

/// The problems of namespaces without pods here, and reports.
#[derive(Debug, Default)]
pub(super) struct Problems {
    /// By namespace, the problems of the rules, by the resource alone.
    elsewhere: BTreeMap<String, ResourceProblems>,
    /// By namespace, the rules whose problems may have changed since the last report.
    changed: BTreeMap<String, Changed>,
    reported: BTreeMap<String, Reported>,
    /// How many rules were looked at.
    #[cfg(test)]
    pub(super) work: usize,
}

impl Problems {
    /// Those of a namespace without pods here.
    pub(super) fn elsewhere(&self, namespace: &str) -> impl Iterator<Item = (u32, &Problem)> {
        let elsewhere = self.elsewhere.get(namespace).into_iter();
        let problems = elsewhere.flat_map(ResourceProblems::problems);
        problems.map(|(index, problem)| (*index, &**problem))
    }

    /// The one of such a namespace's rule at an index.
    pub(super) fn elsewhere_at(&self, namespace: &str, index: u32) -> Option<&Arc<Problem>> {
        self.elsewhere.get(namespace)?.problems().get(&index)
    }

    /// Those of all such namespaces.
    pub(super) fn all_elsewhere(&self) -> impl Iterator<Item = &Problem> {
        let elsewhere = self.elsewhere.values();
        let problems = elsewhere.flat_map(|one| one.problems().values());
        problems.map(Arc::as_ref)
    }

    /// The EgressFirewall of a namespace without pods here has these rules.
    pub(super) fn set_elsewhere(&mut self, namespace: &str, rules: &Arc<[Rule]>) {
        let mut of_resource = self.elsewhere.remove(namespace);
        let changed = match &mut of_resource {
            Some(known) => known.set_rules(rules),
            None => {
                let new = of_resource.insert(ResourceProblems::of(rules));
                new.problems().keys().copied().collect()
            }
        };
        #[cfg(test)]
        {
            let work = of_resource
                .as_mut()
                .map(|one| std::mem::take(&mut one.work));
            self.work += work.unwrap_or_default();
        }
        self.note(namespace, changed);
        // Most have no problem. An edit of one of these looks at all of its rules.
        if let Some(one) = of_resource.filter(|one| !one.problems().is_empty()) {
            self.elsewhere.insert(namespace.to_owned(), one);
        }
    }

    /// The namespace has pods here.
    pub(super) fn entered(&mut self, namespace: &str) {
        self.elsewhere.remove(namespace);
    }

    /// The problems of these rules of a namespace may have changed.
    pub(super) fn note(&mut self, namespace: &str, rules: impl IntoIterator<Item = u32>) {
        let mut rules = rules.into_iter().peekable();
        if rules.peek().is_none() {
            return;
        }
        let changed = self.changed.entry(namespace.to_owned());
        match changed.or_insert_with(|| Changed::Of(BTreeSet::new())) {
            Changed::All => {}
            Changed::Of(known) => known.extend(rules),
        }
    }

    /// The problems of all rules of a namespace may have changed.
    pub(super) fn note_all(&mut self, namespace: &str) {
        self.changed.insert(namespace.to_owned(), Changed::All);
    }

    /// Takes the namespaces with problems that may have changed, and the rules.
    pub(super) fn take_changed(&mut self) -> BTreeMap<String, Changed> {
        std::mem::take(&mut self.changed)
    }

    /// The rules of a namespace for which a problem was reported.
    pub(super) fn reported_rules(&self, namespace: &str) -> impl Iterator<Item = u32> {
        let reported = self.reported.get(namespace).into_iter();
        let problems = reported.flat_map(|reported| reported.by_effect.values());
        problems.flat_map(BTreeMap::keys).copied()
    }

    /// The problem of a namespace's rule, as it was reported.
    pub(super) fn reported_at(&self, namespace: &str, index: u32) -> Option<&Problem> {
        self.reported.get(namespace)?.at(index)
    }

    /// The report of the problems of a namespace, of which these, in order, are others than reported.
    pub(super) fn report(
        &mut self,
        namespace: String,
        changed: Vec<(u32, Option<Arc<Problem>>)>,
    ) -> Option<Report> {
        if changed.is_empty() {
            return None;
        }
        let reported = self.reported.entry(namespace.clone()).or_default();
        let mut news: BTreeMap<Severity, NewProblems> = BTreeMap::new();
        let mut is_new = vec![false; changed.len()];
        for ((index, problem), is_new) in changed.iter().zip(&mut is_new) {
            let problem = problem.as_ref();
            let Some(problem) = problem.filter(|one| !reported.counts.contains_key(*one)) else {
                continue;
            };
            *is_new = true;
            let new = news.entry(problem.severity()).or_default();
            match new.first.len() < PROBLEM_TEXTS_MAX {
                true => drop(new.first.insert(*index, problem.to_string())),
                false => new.others.push(*index),
            }
        }
        let mut former = Vec::new();
        for ((index, problem), is_new) in changed.into_iter().zip(is_new) {
            let before = reported.remove(index);
            former.extend(before.filter(|_| !is_new).map(|before| (index, before)));
            if let Some(problem) = problem {
                reported.insert(index, problem);
            }
        }
        let over = former.iter();
        let over = over.filter(|(_, problem)| !reported.counts.contains_key(problem));
        let report = Report::Problems {
            namespace: namespace.clone(),
            news,
            over: over.map(|(index, _)| *index).collect(),
            present: reported.present(),
        };
        if reported.by_effect.is_empty() {
            self.reported.remove(&namespace);
        }
        Some(report)
    }
}

#[cfg(test)]
mod tests;
