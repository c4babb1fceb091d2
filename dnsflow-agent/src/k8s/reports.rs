//! Logs what is wrong with an object, once.
//!
//! The same object is read many times (each status update, each relist, each change of a
//! directory). A reason is logged when it is new, and forgotten when it is gone.

use std::collections::BTreeMap;

/// The reasons logged so far, by object.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    logged: BTreeMap<String, Vec<String>>,
}

impl Reports {
    /// Logs the new ones among the object's `reasons`.
    pub(crate) fn tell(&mut self, object: &str, reasons: Vec<String>) {
        for reason in self.news(object, reasons) {
            tracing::warn!(object, reason, "EgressFirewalls: not usable as written");
        }
    }

    /// Forgets objects that are gone.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.logged.retain(|object, _| keep(object));
    }

    /// Forgets one object.
    pub(crate) fn forget(&mut self, object: &str) {
        self.logged.remove(object);
    }

    fn news(&mut self, object: &str, reasons: Vec<String>) -> Vec<String> {
        if reasons.is_empty() {
            if self.logged.remove(object).is_some() {
                tracing::info!(object, "EgressFirewalls: in order again");
            }
            return Vec::new();
        }
        let logged = self.logged.entry(object.to_owned()).or_default();
        let news = reasons
            .iter()
            .filter(|reason| !logged.contains(reason))
            .cloned()
            .collect();
        *logged = reasons;
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_told_once_until_it_was_gone() {
        let mut reports = Reports::default();
        let reasons = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
        assert_eq!(reports.news("a", reasons(&["x"])), ["x"]);
        assert!(reports.news("a", reasons(&["x"])).is_empty());
        assert_eq!(reports.news("b", reasons(&["x"])), ["x"]);
        assert_eq!(reports.news("a", reasons(&["x", "y"])), ["y"]);
        assert!(reports.news("a", reasons(&["y"])).is_empty());
        assert_eq!(reports.news("a", reasons(&["x"])), ["x"]);
        assert!(reports.news("a", Vec::new()).is_empty());
        assert_eq!(reports.news("a", reasons(&["x"])), ["x"]);
        reports.retain(|object| object == "b");
        assert_eq!(reports.news("a", reasons(&["x"])), ["x"]);
        assert!(reports.news("b", reasons(&["x"])).is_empty());
    }
}
