//! Failures of an edge: each cause is reported once, until something succeeds.

use std::{collections::BTreeSet, iter::successors};

/// An error and its causes on one line, without those that the text before already quotes.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    for cause in successors(error.source(), |error| error.source()) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

/// The causes that were reported since the last success, at most `MAX`. Further causes are not
/// reported.
#[derive(Debug)]
pub(crate) struct Causes<C, const MAX: usize = 16>(BTreeSet<C>);

impl<C, const MAX: usize> Default for Causes<C, MAX> {
    fn default() -> Self {
        Self(BTreeSet::new())
    }
}

impl<C: Ord, const MAX: usize> Causes<C, MAX> {
    /// Notes a failure; returns whether to report its cause.
    pub(crate) fn is_news(&mut self, cause: C) -> bool {
        let Self(reported) = self;
        reported.len() < MAX && reported.insert(cause)
    }

    /// Notes a success; returns whether a failure was reported before.
    pub(crate) fn end(&mut self) -> bool {
        let Self(reported) = self;
        let was_reported = !reported.is_empty();
        reported.clear();
        was_reported
    }

    /// The reported causes.
    #[cfg(test)]
    pub(crate) fn reported(&self) -> Vec<&C> {
        let Self(reported) = self;
        reported.iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_news_once_until_a_success() {
        let mut causes = Causes::<u8, 2>::default();
        assert!(!causes.end(), "nothing was reported");
        assert!(causes.is_news(1) && !causes.is_news(1));
        assert!(causes.is_news(2) && !causes.is_news(3), "the limit");
        assert_eq!(causes.reported(), [&1, &2]);
        assert!(causes.end());
        assert!(causes.is_news(1));
    }
}
