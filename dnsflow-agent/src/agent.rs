//! The agent of one node: the engine and the edges around it.
//!
//! The hot thread (`hot`) owns the engine, the ring buffer and the OpenFlow socket, so an answer becomes a flow
//! within one wake-up. Slower work (databases, the Kubernetes API, files) runs on a thread of its own (`edges`), with
//! channels to the hot one. Attaching blocks, and has a thread of its own.

mod edges;
mod hot;
mod reports;
mod wiring;

use std::{io, panic::resume_unwind, sync::Arc, thread::JoinHandle};

use dnsflow_core::engine::Engine;
use tokio::runtime::Runtime;

use crate::{
    capture::{CaptureError, Releaser},
    exit::Exit,
    k8s,
    logging::Log,
    one_agent::{Claim, OneAgentError},
    open_by::{OpenByError, OpenVswitch, OpenedBy},
    openflow::Connection,
    options::{AgentOptions, OptionsError},
};
use edges::{Asking, Outside};
use hot::{Hot, Incoming, Recorder, SwitchLink};
use wiring::{Channels, EdgesThread, Programs, Runtimes, Settings, Shared};

/// Why the agent cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The TC program cannot be used.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// A runtime or a thread cannot be made, or the ring buffer not be watched.
    #[error("cannot {operation}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Another agent runs.
    #[error(transparent)]
    OneAgent(#[from] OneAgentError),
    /// The options contradict each other.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// Packets cannot be marked.
    #[error(transparent)]
    OpenBy(#[from] OpenByError),
    /// The agent has begun with flows because Open vSwitch did not answer.
    #[error(
        "Open vSwitch answers now, and packets can be marked: this agent ends, and the next one opens by marks \
         (--open-by=auto)"
    )]
    MarksArePossible,
    /// A task that should run for ever has ended.
    #[error("the edge to {0} has stopped")]
    EdgeStopped(&'static str),
}

impl AgentError {
    /// The exit code that says so.
    pub fn exit(&self) -> Exit {
        match self {
            Self::OneAgent(OneAgentError::Another(_)) => Exit::Another,
            _ => Exit::Failed,
        }
    }
}

fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> AgentError {
    move |source| AgentError::Io { operation, source }
}

/// Runs the agent until SIGTERM or SIGINT. Its flows stay in the switch, for the time of their
/// sentinel flows' hard timeout, so that a restart or an upgrade interrupts nobody. Logs now and then how
/// many lines of `log` were lost.
pub fn run(options: AgentOptions, log: &Log) -> Result<(), AgentError> {
    // First of all: what is pinned belongs to an agent that runs.
    let claim = Claim::make()?;
    let runtimes = Runtimes::new()?;
    let settings = Settings::of(&options)?;
    // Before the programs are loaded: of an agent that is killed, the kernel closes last what was opened first
    // (`task_work_run` in Linux kernel/task_work.c), and takes its time for this socket. Meanwhile nothing may be held.
    let releaser = Releaser::open(settings.release_mark.get())?;
    // Before the edges start: without the program there is nothing to do for them.
    let pins = options.pin_dir.as_deref();
    let programs = Programs::load(&settings.capture, pins, &runtimes, releaser)?;
    // Before any other thread starts, but that of the log, which has none.
    programs.give_up_rights()?;
    let packets = programs.read_packets();
    let alarm = runtimes.alarm()?;
    let channels = Channels::new();
    let attaching =
        wiring::start_attaching(runtimes.attaching, programs.attacher, channels.attaching)?;
    let mut engine = Engine::new(settings.engine);
    let recorder = Recorder::open(options.state_dir.as_deref(), &mut engine);
    let (reporter, notices) = k8s::events::channel();
    let shared = Shared::new(&options, reporter, log);
    let outside = Outside {
        claim: claim.answering(),
        awaited: (settings.opened_by == OpenedBy::FlowsForNow).then(|| OpenVswitch::of(&options)),
        ends: channels.edges,
        estimate: shared.estimate.clone(),
        databases: shared.databases.clone(),
        notices,
        denials: shared.denials(&options, settings.capture.ports, programs.aside),
        asking: Asking {
            metrics: shared.metrics(channels.inquiries.clone(), packets),
            inquiries: channels.inquiries,
            journal: Arc::clone(&shared.journal),
            queries: programs.queries,
            log: log.view(),
        },
        health: Arc::clone(&shared.health),
    };
    let accounts = (programs.counters, programs.shares);
    let hot = Hot {
        engine,
        kernel: programs.kernel,
        switch: SwitchLink {
            connection: Connection::new(options.openflow_socket.path.clone()),
            health: Arc::clone(&shared.health),
        },
        peers: channels.peers,
        listeners: shared.listeners(),
        upkeep: shared.upkeep(&options, programs.heartbeat, recorder, accounts),
        alarm,
    };
    let edges = EdgesThread::start(runtimes.slow, options, outside, channels.running)?;
    run_hot(&runtimes.hot, hot, channels.incoming, edges, attaching)
}

/// Runs the hot thread to its end, and ends the others.
fn run_hot(
    runtime: &Runtime,
    mut hot: Hot,
    mut incoming: Incoming,
    edges: EdgesThread,
    attaching: JoinHandle<()>,
) -> Result<(), AgentError> {
    let result = runtime.block_on(hot.run(&mut incoming));
    // Before the inputs' receiver goes, without which the edges stop by themselves.
    let edge_result = edges.stop();
    // Both ends of its channels go.
    drop((hot, incoming));
    attaching
        .join()
        .unwrap_or_else(|panic| resume_unwind(panic));
    result?;
    edge_result.unwrap_or_else(|panic| resume_unwind(panic))
}
