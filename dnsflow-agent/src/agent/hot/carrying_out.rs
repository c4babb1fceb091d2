//! Carries out what the engine gives out: first the commands, for which pods wait, then the reports.

use std::sync::Arc;

use dnsflow_core::{
    Command, Input, Timestamp,
    engine::Engine,
    io::{input::FlowQuestion, report::Report},
};

use super::{Hot, Recorder};
use crate::{
    agent::reports::tell, api::Health, clock::now, conntrack::Request, journal::Journal,
    k8s::events::Reporter, memory, metrics::Observed, ovn_db::OvnCommand,
};

/// Where reports are told.
pub(crate) struct Listeners {
    pub(crate) health: Arc<Health>,
    pub(crate) observed: Observed,
    /// Kubernetes Events.
    pub(crate) reporter: Reporter,
    pub(crate) journal: Arc<Journal>,
}

impl Listeners {
    fn tell(&self, report: Report) {
        match &report {
            Report::Ready { .. } => self.health.synced(),
            Report::Opened {
                activation: Some(activation),
                ..
            } => self.observed.opened(*activation),
            Report::Trusting(resolvers) => self.health.trusting(!resolvers.is_empty()),
            Report::TableTooLarge(table) if !table.is_left_out => self.health.too_large(table),
            Report::TableReadAgain { database, table } => {
                self.health.read_again(database, table);
            }
            _ => {}
        }
        self.reporter.tell(&report);
        tell(&report);
        self.journal.try_note(report);
    }
}

/// Ends a turn, and writes its records. Returns the commands, which follow from them.
pub(super) fn end_turn(
    engine: &mut Engine,
    recorder: &mut Recorder,
    now: Timestamp,
) -> Vec<Command> {
    engine.end_turn(now);
    recorder.write(engine, now);
    engine.take_commands()
}

impl Hot {
    /// Carries out the engine's commands; what comes of them at once goes back into it. What there is to
    /// tell people comes last: pods wait for the commands.
    pub(super) fn carry_out(&mut self) {
        loop {
            let commands = end_turn(&mut self.engine, &mut self.upkeep.recorder, now());
            if commands.is_empty() {
                break;
            }
            for command in commands {
                self.command(command);
            }
            self.switch.connection.flush();
        }
        let mut is_known = false;
        for report in self.engine.take_reports() {
            is_known |= matches!(report, Report::Ready { .. });
            self.listeners.tell(report);
        }
        if is_known && !self.peers.know_node {
            self.peers.know_node = true;
            memory::give_back();
        }
        if self.knows_enough() {
            self.peers.take_over();
        }
    }

    fn command(&mut self, command: Command) {
        let Self {
            engine,
            kernel,
            switch,
            peers,
            listeners,
            ..
        } = self;
        match command {
            Command::Attachment(command) => peers.attach(command),
            Command::Apply {
                batch,
                atomic,
                changes,
                count,
            } => switch.apply(batch, atomic, changes, count),
            // What the monitor says of the flows that are counted comes over the same connection.
            Command::Ask(question @ FlowQuestion::Count(_)) => switch.ask(question),
            Command::Ask(question) => peers.ask_switch(question, engine),
            Command::MonitorTables(tables) => switch.connection.monitor_tables(tables),
            Command::TrustResolvers(resolvers) => kernel.trust(resolvers),
            Command::FilterNames { name_set, names } => kernel.names.set_names(name_set, &names),
            Command::HoldAnswers { name_set, held } => kernel.names.set_held(name_set, held),
            Command::ForgetNames { name_set } => kernel.names.remove_name_set(name_set),
            Command::FilterInterface { ifindex, name_set } => {
                kernel.names.set_name_set(ifindex, name_set);
                if name_set.is_none() {
                    // Without a name filter, the programs defer nothing more.
                    kernel.frames.forget_deferred(ifindex);
                }
                kernel.marks.share(ifindex, name_set.is_some());
            }
            Command::WatchAttempts { ifindex, watched } => kernel.watched.set(ifindex, watched),
            Command::RecordAnswers { ifindex, recorded } => kernel.recorded.set(ifindex, recorded),
            Command::ReplayAnswers => kernel.frames.replay(engine),
            Command::ConfirmFilter => engine.handle(Input::FilterConfirmed, now()),
            Command::Mark(changes) => kernel.marks.change(changes, engine),
            Command::ChangeClasses(changes) => kernel.opening.change(changes, engine),
            Command::LeaveNetworks(networks) => kernel.opening.leave(&networks, engine),
            Command::EndEarlierOpening => kernel.frames.end_earlier_opening(),
            Command::ReadMarks => kernel.marks.begin_reading(),
            Command::Release(frame) => {
                kernel.releasing.release(&frame, engine);
                listeners.observed.released(&frame, now());
            }
            Command::FindDropping(paths) => peers.find_dropping(paths, engine),
            Command::FindBlocked => peers.ask_conntrack(Request::Find, engine),
            Command::Unblock(connections) => {
                peers.ask_conntrack(Request::Unblock(connections), engine);
            }
            Command::WatchLogicalFlows { priorities } => {
                peers.ask_ovn(OvnCommand::WatchLogicalFlows { priorities });
            }
            Command::SampleLogicalFlows(stage) => {
                peers.ask_ovn(OvnCommand::SampleLogicalFlows(stage));
            }
        }
    }
}
