//! The hot thread's own connection to the switch: flows, and what becomes of them.

use std::sync::Arc;

use dnsflow_core::{
    Input,
    engine::Engine,
    io::input::{BatchId, FlowQuestion},
    values::flow::FlowChange,
};
use tracing::{info, trace, warn};

use crate::{
    api::Health,
    clock::now,
    openflow::{Connection, Event},
};

/// The connection, with whom its state concerns.
pub(crate) struct SwitchLink {
    pub(crate) connection: Connection,
    pub(crate) health: Arc<Health>,
}

impl SwitchLink {
    /// Waits for an event. May be cancelled.
    pub(super) async fn next(&mut self) -> Event {
        self.connection.next().await
    }

    /// Hands an event to the engine, and those that have come with it: one read may bring the replies to many batches, and
    /// frames make many more at a time.
    pub(super) fn take(&mut self, event: Event, engine: &mut Engine) {
        let mut next = Some(event);
        while let Some(event) = next {
            engine.handle(self.input(event), now());
            next = self.connection.ready();
        }
    }

    fn input(&self, event: Event) -> Input {
        match event {
            Event::Up => {
                info!(socket = %self.connection.path().display(), "connected to the switch");
                self.health.connected(true);
                Input::SwitchUp
            }
            Event::Down { reason } => {
                warn!(reason, "no connection to the switch");
                self.health.connected(false);
                Input::SwitchDown
            }
            Event::Applied { batch, result } => Input::Applied { batch, result },
            Event::Reply(reply) => Input::Reply(reply),
            Event::CountLost { cookie } => Input::CountLost { cookie },
            Event::FlowLost {
                key,
                cookie,
                reason,
            } => {
                trace!(?key, ?reason, "a flow was lost");
                Input::FlowLost { key, cookie }
            }
            Event::ForeignFlow { key, cookie } => Input::ForeignFlow { key, cookie },
            Event::ForeignFlowGone { key } => Input::ForeignFlowGone { key },
            Event::MonitorGap => Input::MonitorGap,
            Event::Refused { request, reason } => {
                warn!(request, reason, "the switch refused a question");
                Input::QuestionRefused
            }
        }
    }

    /// Sends changes, and a question for the counters of these cookies where there are any.
    pub(super) fn apply(
        &mut self,
        batch: BatchId,
        atomic: bool,
        changes: Vec<FlowChange>,
        count: Vec<u32>,
    ) {
        self.connection.apply(batch, atomic, changes, count);
    }

    /// Asks over this connection.
    pub(super) fn ask(&mut self, question: FlowQuestion) {
        self.connection.ask(question);
    }
}
