//! Where OVN's pipeline is in the switch: its first table, and the table in which marks end.
//!
//! [`Tables`] keeps the tables that it has found until the switch reports others.

use crate::{
    Command, Timestamp,
    io::{input::FlowQuestion, output::Output, report::Report},
    ovn::rows::{RowId, Stage},
    policy::pipeline::{Locator, Question},
};

/// The tables that are looked for.
#[derive(Debug)]
pub(super) struct Tables {
    first: Locator,
    /// `None` if packets are not marked.
    marks_end: Option<MarksEnd>,
}

/// Where the marks of packets end: a mark is read by the flows of rules, and has no meaning behind them.
#[derive(Debug, Default)]
struct MarksEnd {
    locator: Locator,
    /// Whether OVN has no stage that is known to be behind all rules.
    is_nowhere: bool,
}

impl Tables {
    /// `marks`: whether packets are marked.
    pub(super) fn new(marks: bool) -> Self {
        Self {
            first: Locator::default(),
            marks_end: marks.then(MarksEnd::default),
        }
    }

    /// The pipeline's first table; `None` if it is not known yet.
    pub(super) fn first(&self) -> Option<u8> {
        self.first.base()
    }

    /// The OpenFlow table in which marks end, if they end in one; `None` if that is not known yet.
    pub(super) fn marks_end(&self) -> Option<Option<u8>> {
        match &self.marks_end {
            Some(end) => match end.locator.base() {
                None if end.is_nowhere => Some(None),
                table => table.map(Some),
            },
            None => Some(None),
        }
    }

    /// Looks for the tables, unless they are known or are being looked for. Rules are enforced in `stage`.
    pub(super) fn locate(&mut self, stage: Stage, out: &mut Output) {
        ask(self.first.locate(stage), out);
        if let Some(end) = self.marks_end.as_mut().filter(|end| !end.is_nowhere) {
            ask(end.locator.locate(Stage::OutPortSecurity), out);
        }
    }

    /// The switch has new flows: the tables may be others.
    pub(super) fn verify(&mut self, out: &mut Output) {
        ask(self.first.verify(), out);
        if let Some(end) = &mut self.marks_end {
            let question = match end.is_nowhere {
                true => end.locator.locate(Stage::OutPortSecurity),
                false => end.locator.verify(),
            };
            ask(question, out);
        }
    }

    /// Open questions will get no answer.
    pub(super) fn interrupted(&mut self) {
        for locator in self.locators() {
            locator.interrupted();
        }
    }

    fn locators(&mut self) -> impl Iterator<Item = &mut Locator> {
        let end = self.marks_end.as_mut().map(|end| &mut end.locator);
        std::iter::once(&mut self.first).chain(end)
    }

    /// When [`Tables::retry`] wants to be called.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        let end = self.marks_end.as_ref();
        let end = end.and_then(|end| end.locator.deadline());
        self.first.deadline().into_iter().chain(end).min()
    }

    /// Asks the switch the due questions again.
    pub(super) fn retry(&mut self, stage: Option<Stage>, out: &mut Output) {
        let now = out.now();
        let question = stage.and_then(|stage| self.first.retry(stage, now));
        ask(question, out);
        if let Some(end) = &mut self.marks_end {
            ask(end.locator.retry(Stage::OutPortSecurity, now), out);
        }
    }

    /// Takes in logical flows of a stage in which rules are enforced.
    pub(super) fn sampled(&mut self, stage: Stage, flows: &[RowId], out: &mut Output) {
        ask(self.first.sampled(stage, flows, out.now()), out);
    }

    /// Takes in some logical flows of the stage in which marks end. Where OVN has no such stage, they end nowhere. Returns
    /// whether that is news.
    pub(super) fn end_sampled(&mut self, flows: &[RowId], out: &mut Output) -> bool {
        let now = out.now();
        let Some(end) = &mut self.marks_end else {
            return false;
        };
        let has_stage = !flows.is_empty();
        if has_stage {
            let stage = Stage::OutPortSecurity;
            ask(end.locator.sampled(stage, flows, now), out);
        } else {
            end.locator.interrupted();
        }
        let was_nowhere = std::mem::replace(&mut end.is_nowhere, !has_stage);
        let is_news = end.is_nowhere && !was_nowhere;
        if is_news {
            out.report(Report::MarksEndNowhere);
        }
        is_news
    }

    /// Takes in cookies of flows with their tables. Returns whether a table is another one.
    pub(super) fn found(
        &mut self,
        flows: impl Iterator<Item = (u32, u8)> + Clone,
        now: Timestamp,
    ) -> bool {
        let moved = self.locators().map(|one| one.found(flows.clone(), now));
        moved.fold(false, |any, moved| any | moved)
    }
}

fn ask(question: Option<Question>, out: &mut Output) {
    match question {
        Some(Question::Sample(stage)) => out.command(Command::SampleLogicalFlows(stage)),
        Some(Question::Cookies(cookies)) => out.command(Command::Ask(FlowQuestion::Find(cookies))),
        None => {}
    }
}
