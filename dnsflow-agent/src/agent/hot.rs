//! The hot thread. It owns the engine, and all that an answer needs to become a flow within one wake-up.
//!
//! It waits for nothing but the next event, and no frame waits for more than a part of anything else. Its parts own
//! their state: [`kernel`], [`switch_link`], [`upkeep`], and [`peers`] for whatever takes its time elsewhere.

mod carrying_out;
mod kernel;
mod peers;
mod switch_link;
mod upkeep;

use std::{convert::Infallible, future, time::Duration};

use dnsflow_core::{Input, Timestamp, engine::Engine, values::limits::HOLD_LONGEST};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot},
    task,
};
use tracing::info;

use super::{AgentError, failed};
use crate::{
    capture::Drained,
    clock::{Alarm, now},
    inquiries::Inquiry,
    memory,
};
pub(super) use carrying_out::Listeners;
use kernel::TURN_MAX;
pub(super) use kernel::{Frames, Kernel, LeftFrames, Marks, Opening, Releasing};
pub(super) use peers::Peers;
pub(super) use switch_link::SwitchLink;
pub(super) use upkeep::{Accounts, Pulse, Recorder, Upkeep};

/// How long an agent that ends waits for the switch, at most. Answers that are still held leave then.
const SETTLE_MAX: Duration = HOLD_LONGEST;
/// Far longer than a program looks at a packet.
const PROGRAM_TIME_MAX: Duration = Duration::from_millis(2);

/// What the hot thread owns.
pub(super) struct Hot {
    pub(super) engine: Engine,
    pub(super) kernel: Kernel,
    pub(super) switch: SwitchLink,
    pub(super) peers: Peers,
    pub(super) listeners: Listeners,
    pub(super) upkeep: Upkeep,
    pub(super) alarm: Alarm,
}

/// What comes to the hot thread over channels.
pub(super) struct Incoming {
    /// From the edges that may take their time.
    pub(super) inputs: mpsc::Receiver<Input>,
    /// The switch's answers to questions: there is much of it, and a frame must not wait for more than one of them.
    pub(super) found: mpsc::Receiver<Input>,
    /// Changed EgressFirewalls. A large one takes long, and a frame must not wait for more than one of them.
    pub(super) edits: mpsc::Receiver<Input>,
    /// What people have asked.
    pub(super) asked: mpsc::Receiver<Inquiry>,
    /// Ends with the edges.
    pub(super) edges_end: oneshot::Receiver<Infallible>,
}

/// The signals that end the agent.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn watch() -> Result<Self, AgentError> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(failed("watch for SIGTERM"))?,
            interrupt: signal(SignalKind::interrupt()).map_err(failed("watch for SIGINT"))?,
        })
    }

    /// Waits for the next one, and gives its name. May be cancelled.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

impl Hot {
    /// Runs until a signal comes or an edge stops.
    pub(super) async fn run(&mut self, incoming: &mut Incoming) -> Result<(), AgentError> {
        let mut signals = Signals::watch()?;
        loop {
            self.listeners.health.turn(now());
            let deadline = self.next_deadline();
            let mut drained = Drained::Empty;
            tokio::select! {
                ready = self.kernel.frames.readable() => {
                    ready.map_err(failed("watch the ring buffer"))?;
                    drained = self.frames(&mut incoming.inputs);
                    self.beat(now());
                }
                event = self.switch.next() => self.switch.take(event, &mut self.engine),
                Some(input) = incoming.inputs.recv() => self.engine.handle(input, now()),
                Some(input) = incoming.found.recv() => self.engine.handle(input, now()),
                Some(input) = incoming.edits.recv() => self.engine.handle(input, now()),
                () = self.peers.taken_over() => {}
                Some(inquiry) = incoming.asked.recv() => inquiry(&self.engine, now()),
                // Some at a time, as with what is found: a frame must not wait for all of them.
                () = future::ready(()), if self.kernel.marks.is_reading() => {
                    self.take_inputs(&mut incoming.inputs);
                    let Kernel { marks, frames, .. } = &mut self.kernel;
                    marks.read(frames, &mut self.engine, &mut self.upkeep.recorder);
                }
                // Likewise what was captured without an agent.
                () = future::ready(()), if self.reads_left() => self.left_frames(&mut incoming.inputs),
                // Likewise a new file of the journal.
                () = future::ready(()), if self.upkeep.recorder.is_rewriting() => {
                    self.upkeep.recorder.go_on(&mut self.engine);
                }
                () = self.alarm.wait(Some(deadline)) => self.timeout(),
                // An edge has stopped: its thread's result says which.
                _ = &mut incoming.edges_end => break,
                signal = signals.next() => {
                    info!("{signal}: stopping; the flows stay until their sentinel flows time out");
                    break;
                }
            }
            self.carry_out();
            if self.has_more(drained, incoming) {
                // The runtime learns of what has become readable only while this task waits.
                task::yield_now().await;
            }
        }
        self.let_go(&mut incoming.inputs).await;
        self.tell_counters();
        Ok(())
    }

    fn has_more(&self, drained: Drained, incoming: &Incoming) -> bool {
        drained == Drained::Limit
            || self.kernel.marks.is_reading()
            || self.reads_left()
            || self.upkeep.recorder.is_rewriting()
            || !incoming.inputs.is_empty()
            || !incoming.found.is_empty()
            || !incoming.edits.is_empty()
            || self.next_deadline() <= now()
    }

    fn next_deadline(&self) -> Timestamp {
        let of_engine = self.engine.next_deadline().map(|(at, _)| at);
        let of_upkeep = self.upkeep.next_deadline();
        of_engine.map_or(of_upkeep, |at| at.min(of_upkeep))
    }

    fn timeout(&mut self) {
        let now = now();
        self.beat(now);
        if self.upkeep.accounts.are_due(now) {
            self.tell_counters();
        }
        self.upkeep.recorder.try_again(now);
        self.engine.handle_timeout(now);
    }

    /// Says that this thread is well, when it is time to.
    fn beat(&mut self, now: Timestamp) {
        if self.upkeep.pulse.beat(&mut self.engine, now) {
            self.kernel.frames.collect_deferred();
        }
    }

    fn tell_counters(&mut self) {
        self.kernel.releasing.forget_causes();
        self.kernel.opening.forget_refusal();
        self.upkeep.accounts.tell(&self.engine);
    }

    /// Before a frame of an interface comes the news that the interface is there.
    fn take_inputs(&mut self, inputs: &mut mpsc::Receiver<Input>) {
        take_waiting(self, inputs);
    }

    fn frames(&mut self, inputs: &mut mpsc::Receiver<Input>) -> Drained {
        self.take_inputs(inputs);
        self.kernel
            .frames
            .take(&mut self.engine, &mut self.upkeep.recorder)
    }

    /// Whether the node, and a DNS server, are known: whose an earlier agent's frames are, and which of them count.
    fn knows_enough(&self) -> bool {
        self.peers.know_node && self.engine.knows_servers()
    }

    /// Whether frames wait that were captured without an agent, and no more of them come.
    fn reads_left(&self) -> bool {
        self.knows_enough() && self.peers.have_taken_over() && self.kernel.frames.have_left()
    }

    fn left_frames(&mut self, inputs: &mut mpsc::Receiver<Input>) {
        self.take_inputs(inputs);
        self.kernel
            .frames
            .take_left(&mut self.engine, &mut self.upkeep.recorder);
        if !self.kernel.frames.have_left() {
            // What came of the last ones is still to be carried out.
            self.carry_out();
            memory::give_back();
        }
    }

    /// Holds no further answer, and puts back what is held: behind its flows, or at the end.
    async fn let_go(&mut self, inputs: &mut mpsc::Receiver<Input>) {
        self.upkeep.pulse.stop();
        // A program that has seen the heartbeat before may hold another answer until its end.
        for pause in [Duration::ZERO, PROGRAM_TIME_MAX] {
            tokio::time::sleep(pause).await;
            self.take_inputs(inputs);
            self.kernel
                .frames
                .take_rest(&mut self.engine, &mut self.upkeep.recorder);
            self.carry_out();
        }
        self.settle().await;
        self.engine.release_all();
        self.carry_out();
    }

    /// Waits a moment for the switch. Some changes are made only once the switch has confirmed others, and the next agent
    /// does not see the answers that ask for them.
    async fn settle(&mut self) {
        let end = now() + SETTLE_MAX;
        while self.engine.is_writing() && now() < end {
            let due = self.engine.next_deadline();
            let deadline = due.map_or(end, |(at, _)| at.min(end));
            tokio::select! {
                event = self.switch.next() => self.switch.take(event, &mut self.engine),
                () = self.alarm.wait(Some(deadline)) => self.engine.handle_timeout(now()),
            }
            self.carry_out();
        }
    }
}

/// Who takes inputs.
trait Taker {
    fn now(&self) -> Timestamp;

    fn take(&mut self, input: Input);

    /// Carries out what has come of the inputs, and says that this thread is well.
    fn end_turn(&mut self);
}

impl Taker for Hot {
    fn now(&self) -> Timestamp {
        now()
    }

    fn take(&mut self, input: Input) {
        self.engine.handle(input, now());
    }

    fn end_turn(&mut self) {
        self.carry_out();
        self.beat(now());
    }
}

/// Takes the inputs that wait. Those that come meanwhile wait for the next call. A turn ends behind an input that takes
/// long.
fn take_waiting(taker: &mut impl Taker, inputs: &mut mpsc::Receiver<Input>) {
    let mut turn_end = taker.now() + TURN_MAX;
    for _ in 0..inputs.len() {
        let Ok(input) = inputs.try_recv() else {
            return;
        };
        taker.take(input);
        if taker.now() >= turn_end {
            taker.end_turn();
            turn_end = taker.now() + TURN_MAX;
        }
    }
}

#[cfg(test)]
mod tests;
