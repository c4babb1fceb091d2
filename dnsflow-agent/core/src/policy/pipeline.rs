//! Finds the OpenFlow table at which a logical pipeline begins, or that of one stage.
//!
//! The first table differs between OVN releases, even point releases, and no database has it. The
//! OpenFlow flows of a logical flow carry the first 32 bits of its row id as cookie
//! (`ofctrl_add_flow` in OVN's `controller/ofctrl.c`). A few such flows therefore show the first
//! table.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    Timestamp,
    ovn::rows::{RowId, Stage},
};

/// The wait before asking again, when nothing was found.
const RETRY: Duration = Duration::from_millis(200);

/// The next step to find the base.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Question {
    /// Read some logical flows of this stage.
    Sample(Stage),
    /// Look for OpenFlow flows with these cookies.
    Cookies(Vec<u32>),
}

/// Finds and remembers the base of the pipeline that stages belong to; of a stage without a number, its table.
#[derive(Debug, Default)]
pub struct Locator {
    base: Option<u8>,
    /// Cookie of a logical flow, to the table within the pipeline that it is in.
    sample: BTreeMap<u32, u8>,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum State {
    #[default]
    Idle,
    Asked,
    RetryAt(Timestamp),
}

impl Locator {
    /// The OpenFlow table of the pipeline's table 0, or of the stage that has no number.
    pub fn base(&self) -> Option<u8> {
        self.base
    }

    /// Begins to sample the logical flows of a stage, unless the base is known or a
    /// question is open.
    pub fn locate(&mut self, stage: Stage) -> Option<Question> {
        if self.base.is_some() || self.state != State::Idle {
            return None;
        }
        self.state = State::Asked;
        Some(Question::Sample(stage))
    }

    /// Looks up the sample's cookies again, because the switch has new flows. The base stays in
    /// force until the answer differs.
    pub fn verify(&mut self) -> Option<Question> {
        if self.sample.is_empty() {
            return None;
        }
        self.state = State::Asked;
        Some(Question::Cookies(self.sample.keys().copied().collect()))
    }

    /// Forgets open questions: their connection is gone.
    pub fn interrupted(&mut self) {
        self.state = State::Idle;
    }

    /// Rows of a stage have been read.
    pub fn sampled(&mut self, stage: Stage, flows: &[RowId], now: Timestamp) -> Option<Question> {
        let table_id = match stage {
            Stage::Table(_, table_id) => table_id,
            Stage::OutPortSecurity => 0,
        };
        self.sample = flows.iter().map(|flow| (flow.prefix(), table_id)).collect();
        let question = self.verify();
        if question.is_none() {
            self.state = State::RetryAt(now + RETRY);
        }
        question
    }

    /// OpenFlow flows have been found: cookie and table. Returns whether the base changed.
    pub fn found(&mut self, cookies: impl IntoIterator<Item = (u32, u8)>, now: Timestamp) -> bool {
        let mut votes: BTreeMap<u8, usize> = BTreeMap::new();
        for (cookie, table) in cookies {
            let base = self
                .sample
                .get(&cookie)
                .and_then(|id| table.checked_sub(*id));
            if let Some(base) = base {
                *votes.entry(base).or_default() += 1;
            }
        }
        // Two row ids can begin with the same 32 bits: the most frequent base counts.
        match votes.into_iter().max_by_key(|&(_, count)| count) {
            Some((base, _)) => {
                self.state = State::Idle;
                self.base.replace(base) != Some(base)
            }
            // ovn-controller has not installed the flows yet, or not again. A known base stays.
            None => {
                if self.state == State::Asked {
                    self.state = State::RetryAt(now + RETRY);
                }
                false
            }
        }
    }

    /// When [`Locator::retry`] wants to be called.
    pub fn deadline(&self) -> Option<Timestamp> {
        match self.state {
            State::RetryAt(at) => Some(at),
            State::Idle | State::Asked => None,
        }
    }

    /// Asks again, once the deadline has passed.
    pub fn retry(&mut self, stage: Stage, now: Timestamp) -> Option<Question> {
        if self.deadline().is_none_or(|at| at > now) {
            return None;
        }
        self.state = State::Idle;
        match self.base {
            None => self.locate(stage),
            Some(_) => self.verify(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ovn::rows::Pipeline;

    const STAGE: Stage = Stage::Table(Pipeline::Egress, 6);

    const fn row(prefix: u32) -> RowId {
        RowId::new((prefix as u128) << 96 | 7)
    }

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn the_base_is_the_table_less_the_stage() {
        let mut locator = Locator::default();
        assert_eq!(locator.locate(STAGE), Some(Question::Sample(STAGE)));
        assert_eq!(locator.locate(STAGE), None, "asked already");
        let cookies = locator.sampled(STAGE, &[row(0xa), row(0xb), row(0xc)], at(0));
        assert_eq!(cookies, Some(Question::Cookies(vec![0xa, 0xb, 0xc])));
        assert!(locator.found([(0xa, 51), (0xa, 51), (0xb, 51), (0xc, 9)], at(0)));
        assert_eq!(locator.base(), Some(45));
    }

    #[test]
    fn a_stage_without_a_number_is_found_where_its_flows_are() {
        let mut locator = Locator::default();
        let stage = Stage::OutPortSecurity;
        assert_eq!(locator.locate(stage), Some(Question::Sample(stage)));
        locator.sampled(stage, &[row(0xa), row(0xb)], at(0));
        assert!(locator.found([(0xa, 62), (0xb, 62), (0xc, 9)], at(0)));
        assert_eq!(locator.base(), Some(62));
    }

    #[test]
    fn nothing_found_is_asked_again_later() {
        let mut locator = Locator::default();
        locator.locate(STAGE);
        assert_eq!(locator.sampled(STAGE, &[], at(0)), None);
        assert_eq!(locator.retry(STAGE, at(199)), None);
        assert!(matches!(
            locator.retry(STAGE, at(200)),
            Some(Question::Sample(_))
        ));
        locator.sampled(STAGE, &[row(1)], at(200));
        assert!(!locator.found([], at(200)));
        assert_eq!(locator.base(), None);
        assert_eq!(locator.deadline(), Some(at(400)));
    }

    #[test]
    fn a_new_base_is_noticed_and_an_unanswered_check_keeps_the_old() {
        let mut locator = Locator::default();
        locator.locate(STAGE);
        locator.sampled(STAGE, &[row(1)], at(0));
        locator.found([(1, 51)], at(0));
        assert_eq!(locator.verify(), Some(Question::Cookies(vec![1])));
        assert!(!locator.found([], at(0)), "wiped, not back yet");
        assert_eq!(locator.base(), Some(45));
        assert_eq!(
            locator.retry(STAGE, at(200)),
            Some(Question::Cookies(vec![1]))
        );
        assert!(!locator.found([(1, 51)], at(200)), "as before");
        locator.verify();
        assert!(locator.found([(1, 52)], at(300)));
        assert_eq!(locator.base(), Some(46));
    }
}
