//! The problems of EgressFirewalls, and those that were reported.
//!
//! The rules of a namespace with pods here have its problems (`local.rs`). [`Problems`] has all others. It reports
//! only differences from the last report of a namespace.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::{
    io::report::{NewProblems, PresentProblems, Report, Severity},
    policy::rules::Problem,
    values::limits::PROBLEM_TEXTS_MAX,
};

/// Problems by rule index.
type ByIndex = BTreeMap<u32, Problem>;

/// The problems of namespaces without pods here, and reports.
#[derive(Debug, Default)]
pub(super) struct Problems {
    /// By namespace, the problems of the rules, by the resource alone.
    elsewhere: BTreeMap<String, ByIndex>,
    /// The namespaces whose problems may have changed since the last report.
    changed: BTreeSet<String>,
    /// The problems of each namespace's rules, as they were reported.
    reported: BTreeMap<String, ByIndex>,
}

impl Problems {
    /// Those of a namespace without pods here.
    pub(super) fn elsewhere(&self, namespace: &str) -> impl Iterator<Item = (u32, &Problem)> {
        let problems = self.elsewhere.get(namespace).into_iter().flatten();
        problems.map(|(index, problem)| (*index, problem))
    }

    /// The one of such a namespace's rule at an index.
    pub(super) fn elsewhere_at(&self, namespace: &str, index: u32) -> Option<&Problem> {
        self.elsewhere.get(namespace)?.get(&index)
    }

    /// Those of all such namespaces.
    pub(super) fn all_elsewhere(&self) -> impl Iterator<Item = &Problem> {
        self.elsewhere.values().flat_map(BTreeMap::values)
    }

    /// The problems of a namespace without pods here are these.
    pub(super) fn set_elsewhere(&mut self, namespace: &str, problems: ByIndex) {
        if self.elsewhere.get(namespace) != Some(&problems).filter(|all| !all.is_empty()) {
            self.note(namespace);
        }
        match problems.is_empty() {
            true => self.elsewhere.remove(namespace),
            false => self.elsewhere.insert(namespace.to_owned(), problems),
        };
    }

    /// The namespace has pods here.
    pub(super) fn entered(&mut self, namespace: &str) {
        self.elsewhere.remove(namespace);
    }

    /// The problems of a namespace may have changed.
    pub(super) fn note(&mut self, namespace: &str) {
        self.changed.insert(namespace.to_owned());
    }

    /// Takes the namespaces whose problems may have changed.
    pub(super) fn take_changed(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.changed)
    }

    /// The report of the problems of a namespace, if they have changed.
    pub(super) fn report(&mut self, namespace: String, problems: ByIndex) -> Option<Report> {
        let reported = self.reported.get(&namespace);
        if reported == Some(&problems) || (reported.is_none() && problems.is_empty()) {
            return None;
        }
        let before = reported.into_iter().flatten();
        let known: HashSet<&Problem> = before.clone().map(|(_, problem)| problem).collect();
        let stays: HashSet<&Problem> = problems.values().collect();
        let mut news: BTreeMap<Severity, NewProblems> = BTreeMap::new();
        let mut present: BTreeMap<Severity, PresentProblems> = BTreeMap::new();
        for (index, problem) in &problems {
            let all = present.entry(problem.severity()).or_default();
            if all.count < PROBLEM_TEXTS_MAX {
                all.first.insert(*index, problem.to_string());
            }
            all.count += 1;
            if known.contains(problem) {
                continue;
            }
            let new = news.entry(problem.severity()).or_default();
            match new.first.len() < PROBLEM_TEXTS_MAX {
                true => drop(new.first.insert(*index, problem.to_string())),
                false => new.others.push(*index),
            }
        }
        let is_new = |index| problems.get(index).is_some_and(|one| !known.contains(one));
        let over = before.filter(|(index, one)| !stays.contains(one) && !is_new(index));
        let report = Report::Problems {
            namespace: namespace.clone(),
            news,
            over: over.map(|(index, _)| *index).collect(),
            present,
        };
        match problems.is_empty() {
            true => self.reported.remove(&namespace),
            false => self.reported.insert(namespace, problems),
        };
        Some(report)
    }
}
