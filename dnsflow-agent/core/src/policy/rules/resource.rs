//! The problems of an EgressFirewall by the resource alone, kept from one edit to the next. An edit looks at the rules
//! that it changes; one that decides over unknown addresses, at all rules that deny by name.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{Problem, denials_by_name, differing, problem_of_resource, rule_at};
use crate::values::firewall::{Floor, Rule};

/// The problems of an EgressFirewall by the resource alone.
#[derive(Debug, Default)]
pub(crate) struct ResourceProblems {
    rules: Arc<[Rule]>,
    floor: Floor,
    problems: BTreeMap<u32, Arc<Problem>>,
    /// How many rules were looked at.
    #[cfg(test)]
    pub(crate) work: usize,
}

impl ResourceProblems {
    /// The problems, by rule index.
    pub(crate) fn problems(&self) -> &BTreeMap<u32, Arc<Problem>> {
        &self.problems
    }

    /// Those of an EgressFirewall with these rules.
    pub(crate) fn of(rules: &Arc<[Rule]>) -> Self {
        let floor = Floor::of(rules);
        let problems = (0..).zip(rules.iter()).filter_map(|(index, rule)| {
            let problem = problem_of_resource(index, rule, &floor, None)?;
            Some((index, Arc::new(problem)))
        });
        Self {
            problems: problems.collect(),
            rules: Arc::clone(rules),
            floor,
            #[cfg(test)]
            work: rules.len(),
        }
    }

    /// The EgressFirewall has these rules now. Returns the indices at which the problem is another one, in order.
    pub(crate) fn set_rules(&mut self, rules: &Arc<[Rule]>) -> Vec<u32> {
        let mut touched: BTreeSet<u32> = differing(&self.rules, rules).into_iter().collect();
        self.rules = Arc::clone(rules);
        let mut has_other_floor = false;
        for index in &touched {
            has_other_floor |= self.floor.set(*index, rule_at(rules, *index));
        }
        if has_other_floor {
            touched.extend(denials_by_name(rules));
        }
        #[cfg(test)]
        {
            self.work += touched.len();
        }
        let mut changed = Vec::new();
        for index in touched {
            let rule = rule_at(rules, index);
            let problem = rule.and_then(|rule| problem_of_resource(index, rule, &self.floor, None));
            if self.problems.get(&index).map(|known| &**known) != problem.as_ref() {
                changed.push(index);
                match problem {
                    Some(problem) => self.problems.insert(index, Arc::new(problem)),
                    None => self.problems.remove(&index),
                };
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests;
