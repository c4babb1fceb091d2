//! Where OVN's pipeline is in the switch: its first table, and the table in which tags end.
//!
//! [`Tables`] keeps the tables that it has found until the switch reports others.

use crate::{
    Command, Timestamp,
    io::{input::FlowQuestion, output::Output, report::Report},
    ovn::rows::{RowId, Stage},
    policy::pipeline::{Locator, Question},
};

/// The tables that are looked for.
#[derive(Debug, Default)]
pub(super) struct Tables {
    first: Locator,
    /// Where tags end: the flows of rules read them, and they have no meaning behind.
    end: Locator,
    /// Whether OVN has no stage that is known to be behind all rules.
    ends_nowhere: bool,
}

impl Tables {
    /// The pipeline's first table; `None` if it is not known yet.
    pub(super) fn first(&self) -> Option<u8> {
        self.first.base()
    }

    /// The OpenFlow table in which tags end, if they end in one; `None` if that is not known yet.
    pub(super) fn tags_end(&self) -> Option<Option<u8>> {
        match self.end.base() {
            None if self.ends_nowhere => Some(None),
            table => table.map(Some),
        }
    }

    /// Looks for the tables, unless they are known or are being looked for. Rules are enforced in `stage`.
    pub(super) fn locate(&mut self, stage: Stage, out: &mut Output) {
        ask(self.first.locate(stage), out);
        if !self.ends_nowhere {
            ask(self.end.locate(Stage::OutPortSecurity), out);
        }
    }

    /// The switch has new flows: the tables may be others.
    pub(super) fn verify(&mut self, out: &mut Output) {
        ask(self.first.verify(), out);
        let question = match self.ends_nowhere {
            true => self.end.locate(Stage::OutPortSecurity),
            false => self.end.verify(),
        };
        ask(question, out);
    }

    /// Open questions will get no answer.
    pub(super) fn interrupted(&mut self) {
        self.first.interrupted();
        self.end.interrupted();
    }

    /// When [`Tables::retry`] wants to be called.
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        let end = self.end.deadline();
        self.first.deadline().into_iter().chain(end).min()
    }

    /// Asks the switch the due questions again.
    pub(super) fn retry(&mut self, stage: Option<Stage>, out: &mut Output) {
        let now = out.now();
        let question = stage.and_then(|stage| self.first.retry(stage, now));
        ask(question, out);
        ask(self.end.retry(Stage::OutPortSecurity, now), out);
    }

    /// Takes in logical flows of a stage in which rules are enforced.
    pub(super) fn sampled(&mut self, stage: Stage, flows: &[RowId], out: &mut Output) {
        ask(self.first.sampled(stage, flows, out.now()), out);
    }

    /// Takes in some logical flows of the stage in which tags end. Where OVN has no such stage, they end nowhere. Returns
    /// whether that is news.
    pub(super) fn end_sampled(&mut self, flows: &[RowId], out: &mut Output) -> bool {
        let now = out.now();
        let has_stage = !flows.is_empty();
        if has_stage {
            let stage = Stage::OutPortSecurity;
            ask(self.end.sampled(stage, flows, now), out);
        } else {
            self.end.interrupted();
        }
        let was_nowhere = std::mem::replace(&mut self.ends_nowhere, !has_stage);
        let is_news = self.ends_nowhere && !was_nowhere;
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
        let is_first_moved = self.first.found(flows.clone(), now);
        let is_end_moved = self.end.found(flows, now);
        is_first_moved || is_end_moved
    }
}

fn ask(question: Option<Question>, out: &mut Output) {
    match question {
        Some(Question::Sample(stage)) => out.command(Command::SampleLogicalFlows(stage)),
        Some(Question::Cookies(cookies)) => out.command(Command::Ask(FlowQuestion::Find(cookies))),
        None => {}
    }
}
