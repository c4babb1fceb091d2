//! What is wrong with objects: logged once, and kept for people who ask.
//!
//! The same object is read many times (each status update, each relist, each change of a
//! directory). A reason is logged when it is new, and forgotten when it is gone.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use dnsflow_asking::ObjectProblem;

/// Objects that are listed for people.
const OBJECTS_MAX: usize = 64;
/// Reasons of one object that are listed for people.
const REASONS_MAX: usize = 16;

/// The objects that are not usable as written. The edge that reads them writes here, and the control socket reads.
#[derive(Clone, Debug, Default)]
pub struct Objects(Arc<Mutex<BTreeMap<String, Reasons>>>);

/// What is wrong with an object.
#[derive(Debug)]
struct Reasons {
    is_in_force: bool,
    reasons: Vec<String>,
}

impl Objects {
    /// At most [`OBJECTS_MAX`] of them by name, those that are not in force first, and the number of the others.
    pub(crate) fn list(&self) -> (Vec<ObjectProblem>, usize) {
        let known = self.lock();
        let mut objects: Vec<(&String, &Reasons)> = known.iter().collect();
        objects.sort_by_key(|(_, object)| object.is_in_force);
        let left_out = objects.len().saturating_sub(OBJECTS_MAX);
        let objects = objects.into_iter().take(OBJECTS_MAX);
        let listed = objects.map(|(object, known)| ObjectProblem {
            object: object.clone(),
            is_in_force: known.is_in_force,
            reasons: known.reasons.iter().take(REASONS_MAX).cloned().collect(),
        });
        (listed.collect(), left_out)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Reasons>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reasons logged so far, by object.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    logged: Objects,
}

impl Reports {
    /// Keeps what is wrong there.
    pub(crate) fn new(objects: Objects) -> Self {
        Self { logged: objects }
    }

    /// Logs the new ones among the object's `reasons`. `is_in_force`: the rest of it, or an earlier reading of it, counts.
    pub(crate) fn tell(&mut self, object: &str, is_in_force: bool, reasons: Vec<String>) {
        for reason in self.news(object, is_in_force, reasons) {
            tracing::warn!(object, reason, "cannot use an EgressFirewall as written");
        }
    }

    /// Forgets objects that are gone.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.logged.lock().retain(|object, _| keep(object));
    }

    /// Forgets one object.
    pub(crate) fn forget(&mut self, object: &str) {
        self.logged.lock().remove(object);
    }

    fn news(&mut self, object: &str, is_in_force: bool, reasons: Vec<String>) -> Vec<String> {
        let mut logged = self.logged.lock();
        if reasons.is_empty() {
            if logged.remove(object).is_some() {
                tracing::info!(object, "can use the EgressFirewall again");
            }
            return Vec::new();
        }
        let known = logged.get(object).map(|known| &known.reasons);
        let is_new = |reason: &&String| known.is_none_or(|known| !known.contains(reason));
        let news = reasons.iter().filter(is_new).cloned().collect();
        let object = object.to_owned();
        let reasons = Reasons {
            is_in_force,
            reasons,
        };
        logged.insert(object, reasons);
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_told_once_until_it_was_gone() {
        let mut reports = Reports::default();
        let mut news = |object: &str, texts: &[&str]| {
            let reasons = texts.iter().map(|&text| text.to_owned()).collect();
            reports.news(object, true, reasons)
        };
        assert_eq!(news("a", &["x"]), ["x"]);
        assert!(news("a", &["x"]).is_empty());
        assert_eq!(news("b", &["x"]), ["x"]);
        assert_eq!(news("a", &["x", "y"]), ["y"]);
        assert!(news("a", &["y"]).is_empty());
        assert_eq!(news("a", &["x"]), ["x"]);
        assert!(news("a", &[]).is_empty());
        assert_eq!(news("a", &["x"]), ["x"]);
        reports.retain(|object| object == "b");
        let reasons = || vec!["x".to_owned()];
        assert_eq!(reports.news("a", true, reasons()), ["x"]);
        assert!(reports.news("b", true, reasons()).is_empty());
    }

    #[test]
    fn the_list_is_short_and_begins_with_what_is_not_in_force() {
        let objects = Objects::default();
        let mut reports = Reports::new(objects.clone());
        let reasons = vec!["x".to_owned(); REASONS_MAX + 1];
        for number in 0..=OBJECTS_MAX {
            reports.tell(
                &format!("o{number:03}"),
                number < OBJECTS_MAX,
                reasons.clone(),
            );
        }
        let (listed, left_out) = objects.list();
        assert_eq!((listed.len(), left_out), (OBJECTS_MAX, 1));
        let first = &listed[0];
        assert_eq!((&*first.object, first.is_in_force), ("o064", false));
        assert_eq!(first.reasons.len(), REASONS_MAX);
        reports.forget("o064");
        let (listed, left_out) = objects.list();
        assert_eq!((listed.len(), left_out), (OBJECTS_MAX, 0));
        assert!(listed.iter().all(|object| object.is_in_force));
    }
}
