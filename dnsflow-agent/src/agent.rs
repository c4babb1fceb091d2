//! The agent of one node: the engine and the edges around it.
//!
//! One thread, the hot one, owns the engine, the ring buffer and the OpenFlow socket, so that an
//! answer becomes a flow within one wake-up. Everything that may take its time (databases, the
//! Kubernetes API, files) runs on a thread of its own and talks to the hot one over a channel. What
//! blocks has threads of its own: attaching, and writing the snapshot.

mod reports;
mod saver;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    future::{self, Future},
    hash::{BuildHasher as _, RandomState},
    io,
    num::NonZeroU32,
    sync::Arc,
    thread,
    time::Duration,
};

use dnsflow_core::{
    Command, Input, Timestamp,
    attempts::Attempts,
    connection::Path,
    engine::{Config, Engine},
    input::{AttachCommand, FlowQuestion, Frame, HeldFrame, MarkChange, MarkFound, MarkRefused},
    limits::HOLD_LONGEST,
    report::Report,
    resolver::Resolver,
    snapshot::Snapshot,
};
use tokio::{
    runtime::{self, Runtime},
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot},
    task::{self, JoinSet},
};
use tracing::{debug, info, trace, warn};

use crate::{
    api::{self, Health},
    capture::{
        self, Aside, BEAT_INTERVAL, Capture, CaptureError, DeferredAnswers, Drained, Entries,
        EntryRead, Heartbeat, InterfaceSet, Left, LeftOut, NameFilter, ProgramCounters, Reading,
        Records, Releaser, Resolvers, Shares,
    },
    causes::Causes,
    clock::{Alarm, now},
    conntrack::{self, Conntrack},
    control::{Server, Slow},
    denials::{self, Connections, DenialCounts, Heard, Listeners},
    exit::Exit,
    inquiries::{self, Inquiries, Inquiry},
    journal::Journal,
    k8s::{
        self,
        events::{Notices, Reporter},
    },
    logging::{Log, LogView, LostLines},
    manifests, memory,
    metrics::{DatabaseCounters, Metrics, Observed, Packets},
    one_agent::{Answering, Claim, OneAgentError},
    openflow::{self, Event},
    options::{AgentOptions, OptionsError},
    ovn_db::{OvnCommand, OvnDb},
    rights::{self, WHILE_RUNNING, keep_only},
    state,
    verdict::{self, Switch, VerdictError, Way},
    vswitch_db::{VswitchDb, Whose},
    vswitchd::{self, Estimate},
};
use reports::tell;
use saver::Saver;

/// Inputs of the slow edges that wait for the hot thread. When it is full, those edges wait:
/// nothing they send may be lost.
const INPUTS_MAX: usize = 256;
/// Messages of a dump between the edges and the hot thread: each has hundreds of flows.
const FOUND_MAX: usize = 4;
/// Commands to the databases' edge that wait. The engine has few questions open at any time.
const OVN_COMMANDS_MAX: usize = 64;
/// Questions to the switch that wait. The engine has one dump and few others open at any time.
const QUESTIONS_MAX: usize = 64;
/// Questions to the datapath that wait. The engine has one open at a time.
const LOOKS_MAX: usize = 1;
/// Frames taken from the ring buffer before the other sources get their turn.
const FRAMES_PER_TURN: usize = 64;
/// No further frame is taken in a turn that has taken so long: what the turn has opened is on its way then. The cost of
/// a frame follows its length, and 64 short ones take less.
const TURN_MAX: Duration = Duration::from_millis(1);
/// Threads of a runtime for calls that block: files, names of hosts, the kernel's connection tracking. A call beyond
/// them waits.
const BLOCKING_MAX: usize = 8;
/// How long an agent that ends waits for the switch, at most. Answers that are still held leave then.
const SETTLE_MAX: Duration = HOLD_LONGEST;
/// Far longer than a program looks at a packet.
const PROGRAM_TIME_MAX: Duration = Duration::from_millis(2);
/// How often the snapshot is written, when there is something new.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(10);
/// How often the counters are logged.
const COUNTERS_INTERVAL: Duration = Duration::from_secs(60);

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
    Verdict(#[from] VerdictError),
    /// The agent has begun with flows because Open vSwitch did not answer.
    #[error(
        "Open vSwitch answers now, and packets can be marked: this agent began with flows, and ends so that the next \
         one takes marks (--verdict=auto)"
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

/// A runtime on the thread that calls it, with a few more threads for calls that block.
fn runtime_of_one_thread(operation: &'static str) -> Result<Runtime, AgentError> {
    runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_MAX)
        .build()
        .map_err(failed(operation))
}

/// Runs the agent until SIGTERM or SIGINT. Its flows stay in the switch, for the time of their
/// sentinel flows' hard timeout, so that a restart or an upgrade interrupts nobody. Logs now and then how
/// many lines of `log` were lost.
pub fn run(options: AgentOptions, log: &Log) -> Result<(), AgentError> {
    // First of all: what is pinned belongs to an agent that runs.
    let claim = Claim::make()?;
    let lost_lines = log.lost_lines();
    let log_view = log.view();
    let hot = runtime_of_one_thread("start the runtime")?;
    let slow = runtime_of_one_thread("start the edges' runtime")?;
    let attaching = runtime_of_one_thread("start the runtime that attaches")?;
    let (input_sender, mut inputs) = mpsc::channel(INPUTS_MAX);
    let (found_sender, mut found) = mpsc::channel(FOUND_MAX);
    let (ovn, ovn_commands) = mpsc::channel(OVN_COMMANDS_MAX);
    let (questions, questions_to_ask) = mpsc::channel(QUESTIONS_MAX);
    let (conntrack, conntrack_requests) = mpsc::channel(conntrack::REQUESTS_MAX);
    let (datapath, looks) = mpsc::channel(LOOKS_MAX);
    let (stop, stopped) = oneshot::channel::<()>();
    // Never sent: dropped when the edges end.
    let (running, mut edges_end) = oneshot::channel::<Infallible>();
    let hold = options.held_for();
    let release_mark = release_mark();
    let way = {
        // Threads that read files for it end with this runtime: they have what this thread gives up below.
        let asking = runtime_of_one_thread("start the runtime")?;
        asking.block_on(verdict::choose(&options))?
    };
    let capture_options = capture::Options {
        ports: options.ports()?,
        release_mark: Some(release_mark),
        mark_mask: way.mark_mask(),
        ..capture::Options::default()
    };
    let config = Config {
        subdomains: options.subdomains,
        dry_run: options.dry_run,
        scope: options.scope.into(),
        cache_limits: options.cache_limits(),
        flow_changes_per_second: options.max_flow_changes,
        hold_max: hold.unwrap_or_default(),
        keep_flows_s: options.keep_flows_s,
        profile: options.static_flow.clone(),
        refusals: options.refusals()?,
        resolvers: options.resolver.iter().copied().collect(),
        dns_ports: capture_options.ports,
        mark_mask: capture_options.mark_mask,
    };
    if config.mark_mask.is_some() && options.pin_dir.is_none() {
        warn!(
            "--verdict=kernel without --pin-dir: when the agent ends, its programs go, and with them the access to \
             all addresses until the pods ask again; give --pin-dir to keep it for --keep-flows"
        );
    }
    // Before the programs are loaded: of an agent that is killed, the kernel closes last what was opened first
    // (`task_work_run` in Linux kernel/task_work.c), and takes its time for these sockets. Meanwhile nothing may be held.
    let releaser = Releaser::open(release_mark.get())?;
    let socket = options.openflow_socket.path.clone();
    let keep_flows_s = options.keep_flows_s;
    // Before the edges start: without the program there is nothing to do for them.
    let Capture {
        attacher,
        records,
        resolvers,
        names,
        deferred,
        left,
        heartbeat,
        counters,
        log,
        shares,
        watched,
        recorded,
        aside,
        entries,
    } = {
        let _runtime = hot.enter();
        let pins = options.pin_dir.as_deref();
        capture::take_over(&capture_options, attaching.handle(), pins)?
    };
    hot.spawn(log.run());
    // Before any other thread starts, but that of the log, which has none.
    let kept = rights::bpf_while_running(|| counters.read().is_ok())
        .and_then(|bpf| keep_only(WHILE_RUNNING | bpf))
        .map_err(failed("give up capabilities"))?;
    info!(
        capabilities = rights::names(kept),
        "keeping these capabilities and no others"
    );
    let counters = Arc::new(counters);
    let alarm = {
        let _runtime = hot.enter();
        Alarm::new().map_err(failed("make a timer"))?
    };
    let (attach, attach_commands) = mpsc::unbounded_channel();
    let (ready, is_ready) = oneshot::channel();
    let attach_inputs = input_sender.clone();
    let attaching = thread::Builder::new()
        .name("attach".into())
        .spawn(move || attaching.block_on(attacher.run(attach_commands, attach_inputs, is_ready)))
        .map_err(failed("start the thread that attaches"))?;
    let state_dir = options.state_dir.clone();
    let mut engine = Engine::new(config);
    if let Some(dir) = &state_dir {
        match state::load(dir) {
            Ok(entries) => engine.load_snapshot(entries, now()),
            Err(error) => warn!(%error, "the snapshot is not used"),
        }
    }
    let saver = state_dir.map(Saver::start).transpose();
    let saver = saver.map_err(failed("start the thread that writes the snapshot"))?;
    let (reporter, notices) = k8s::events::channel();
    let (inquiries, mut asked) = inquiries::channel();
    let journal = Arc::<Journal>::default();
    let observed = Observed::default();
    let denial_counts = DenialCounts::default();
    let denials = Denials {
        aside,
        heard: Heard::new(Attempts::new(capture_options.ports)),
        listeners: Listeners {
            log: tell,
            journal: Arc::clone(&journal),
            events: options.denied_events.then(|| reporter.clone()),
            counts: denial_counts.clone(),
            connections: Connections::new(),
        },
    };
    let packets = Arc::clone(&counters);
    let lost = releaser.lost();
    let databases = DatabaseCounters::default();
    let metrics = Metrics::new(
        inquiries.clone(),
        // Where the kernel does not let the maps be read, the hot thread says so.
        Box::new(move || Packets {
            to_pods: packets.read().unwrap_or_default(),
            from_pods: packets.read_queries().unwrap_or_default(),
            lost: lost.read(),
        }),
        Arc::clone(&journal),
        lost_lines.clone(),
        observed.clone(),
        denial_counts,
        reporter.counters(),
    );
    let metrics = Arc::new(metrics.of_databases(databases.clone()));
    let health = Arc::<Health>::default();
    let estimate = Arc::<Estimate>::default();
    let outside = Outside {
        claim: claim.answering(),
        awaited: (way == Way::FlowsForNow).then(|| Switch::of(&options)),
        inputs: input_sender,
        found: found_sender,
        questions: questions_to_ask,
        conntrack_requests,
        looks,
        ovn_commands,
        denials,
        notices,
        inquiries,
        journal: Arc::clone(&journal),
        metrics,
        databases,
        log: log_view,
        health: Arc::clone(&health),
        estimate: hold.map(|_| Arc::clone(&estimate)),
    };
    let edges = thread::Builder::new()
        .name("edges".into())
        .spawn(move || {
            let _while_they_run = running;
            slow.block_on(edges(options, outside, stopped))
        })
        .map_err(failed("start the edges' thread"))?;
    let mut node = Hot {
        engine,
        records,
        resolvers,
        names,
        deferred,
        releaser,
        lost: Causes::default(),
        left,
        ready: Some(ready),
        heartbeat,
        holds: hold.is_some(),
        keep: Duration::from_secs(keep_flows_s.into()),
        beat_at: now(),
        estimate,
        counters,
        shares,
        watched,
        recorded,
        entries,
        reading: None,
        over_share: BTreeMap::new(),
        attach,
        openflow: openflow::Connection::new(socket),
        questions,
        conntrack,
        datapath,
        ovn,
        health,
        reporter,
        journal,
        observed,
        saver,
        alarm,
        saving: None,
        saved_version: 0,
        snapshot_at: now() + SNAPSHOT_INTERVAL,
        counters_at: now() + COUNTERS_INTERVAL,
        lost_lines,
    };
    let result = hot.block_on(node.run(&mut inputs, &mut found, &mut asked, &mut edges_end));
    if let Some(saver) = node.saver.take() {
        let mut last = Snapshot::begin(now());
        saver.end(|| node.engine.next_part(&mut last));
    }
    // Before the inputs' receiver goes, without which the edges stop by themselves.
    drop(stop);
    let edge_result = edges.join();
    // Both ends of its channels go.
    drop((node, inputs));
    if let Err(panic) = attaching.join() {
        std::panic::resume_unwind(panic);
    }
    result?;
    match edge_result {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Waits until another part of a snapshot can be handed over.
async fn takes_part(saver: Option<&Saver>) {
    if let Some(saver) = saver {
        saver.ready().await;
    }
}

/// Has the engine look at a frame, and defers an answer that no rule mentions.
fn hand_in(frame: Frame<'_>, engine: &mut Engine, deferred: &mut DeferredAnswers) {
    let defer = engine.handle_frame(frame, now());
    if defer && let Err(error) = deferred.defer(frame) {
        warn!(%error, "an answer that came before its rule is not looked at");
    }
}

/// A mark that nobody knows and that is not zero, which is that of all other packets.
fn release_mark() -> NonZeroU32 {
    // Seeded by the system (`std::hash::RandomState`).
    let random = RandomState::new().hash_one(());
    let [.., a, b, c, d] = random.to_ne_bytes();
    NonZeroU32::new(u32::from_ne_bytes([a, b, c, d])).unwrap_or(NonZeroU32::MAX)
}

/// The edges' ends of the channels.
struct Outside {
    claim: io::Result<Option<Answering>>,
    /// Open vSwitch, if it has not said yet whether packets can be marked.
    awaited: Option<Switch>,
    inputs: mpsc::Sender<Input<'static>>,
    found: mpsc::Sender<Input<'static>>,
    questions: mpsc::Receiver<FlowQuestion>,
    conntrack_requests: mpsc::Receiver<conntrack::Request>,
    looks: mpsc::Receiver<Vec<Path>>,
    ovn_commands: mpsc::Receiver<OvnCommand>,
    denials: Denials,
    notices: Notices,
    inquiries: Inquiries,
    journal: Arc<Journal>,
    metrics: Arc<Metrics>,
    databases: DatabaseCounters,
    log: LogView,
    health: Arc<Health>,
    /// Where answers are held.
    estimate: Option<Arc<Estimate>>,
}

/// What the edge of denied connections is made of.
struct Denials {
    aside: Aside,
    heard: Heard,
    listeners: Listeners,
}

/// The edges that may take their time. Each owns its connections and ends with this future.
async fn edges(
    options: AgentOptions,
    outside: Outside,
    stopped: oneshot::Receiver<()>,
) -> Result<(), AgentError> {
    let Outside {
        claim,
        awaited,
        inputs,
        found,
        questions,
        conntrack_requests,
        looks,
        ovn_commands,
        denials,
        notices,
        inquiries,
        journal,
        metrics,
        databases,
        log,
        health,
        estimate,
    } = outside;
    let mut tasks = JoinSet::new();
    let mut edge = |name: &'static str,
                    task: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>| {
        tasks.spawn(async move {
            task.await;
            name
        });
    };
    edge("who asks for this agent", Box::pin(Claim::answer(claim)));
    if let Some(estimate) = estimate {
        let socket = options.openflow_socket.path.clone();
        let inputs = inputs.clone();
        let watch = async move { vswitchd::watch(&socket, &estimate, looks, inputs).await };
        edge("ovs-vswitchd's datapath", Box::pin(watch));
    }
    if options.static_flow.is_none() {
        let remotes = options.ovs_db.clone();
        let socket = options.openflow_socket.path.clone();
        let conntrack = Conntrack::new(remotes, socket);
        let serving = conntrack.run(conntrack_requests, inputs.clone());
        edge("connection tracking", Box::pin(serving));
    }
    let asking = openflow::questions::ask(options.openflow_socket.path, questions, found);
    edge("the switch, for questions", Box::pin(asking));
    let whose = match options.static_flow {
        Some(_) => Whose::Anybody,
        None => Whose::Pods,
    };
    let vswitch = VswitchDb::new(options.ovs_db, whose).counted_by(databases.vswitch);
    edge(
        "Open vSwitch's database",
        Box::pin(vswitch.run(inputs.clone())),
    );
    let has_ovn = options.static_flow.is_none();
    let northbound = has_ovn.then(|| options.ovn_nb.clone());
    if has_ovn {
        let ovn = OvnDb::new(options.ovn_nb, options.ovn_sb)
            .counted_by(databases.northbound, databases.southbound)
            .beside(&options.cluster_networks);
        edge(
            "OVN's databases",
            Box::pin(ovn.run(inputs.clone(), ovn_commands)),
        );
    }
    let control_inputs = inputs.clone();
    match options.manifests {
        Some(dir) => {
            let watch = async move {
                // There is no cluster whose DNS Services could be asked for.
                if inputs.send(Input::Resolvers(BTreeSet::new())).await.is_ok() {
                    manifests::watch_manifests(dir, inputs).await;
                }
            };
            edge("the manifests", Box::pin(watch));
        }
        None => {
            let client = k8s::ClientOptions {
                kubeconfig: options.kubeconfig,
            };
            let events = k8s::events::post(client.clone(), notices, k8s::events::SPREAD);
            edge("Kubernetes Events", Box::pin(events));
            let resolvers = watch_resolvers(client.clone(), options.dns_service, inputs.clone());
            edge("the cluster's DNS Services", Box::pin(resolvers));
            edge("Kubernetes", Box::pin(k8s::watch(client, inputs)));
        }
    }
    let Denials {
        aside,
        heard,
        listeners,
    } = denials;
    let connections = listeners.connections.clone();
    let watch = denials::watch(aside, heard.clone(), inquiries.clone(), listeners);
    edge("denied connections", Box::pin(watch));
    let control = Server::new(
        inquiries,
        control_inputs,
        journal,
        Arc::clone(&metrics),
        Slow {
            connections,
            heard,
            northbound,
        },
        log,
    )
    .serve(options.control_socket.path);
    edge("the control socket", Box::pin(control));
    if let Some(address) = options.listen {
        edge(
            "HTTP clients",
            Box::pin(api::serve(address, health, metrics)),
        );
    }
    let marks_are_possible = async {
        match awaited {
            Some(switch) => switch.takes_marks().await,
            None => future::pending().await,
        }
    };
    tokio::select! {
        // Dropped, not sent.
        _ = stopped => Ok(()),
        () = marks_are_possible => Err(AgentError::MarksArePossible),
        ended = tasks.join_next() => match ended {
            Some(Ok(name)) => Err(AgentError::EdgeStopped(name)),
            Some(Err(panic)) if panic.is_panic() => std::panic::resume_unwind(panic.into_panic()),
            Some(Err(_)) | None => Ok(()),
        },
    }
}

/// Tells the core of the cluster's DNS servers, as long as it listens.
async fn watch_resolvers(
    client: k8s::ClientOptions,
    services: Vec<k8s::DnsService>,
    inputs: mpsc::Sender<Input<'static>>,
) {
    let (sender, mut resolvers) = mpsc::channel(1);
    let forward = async {
        while let Some(resolvers) = resolvers.recv().await {
            if inputs.send(Input::Resolvers(resolvers)).await.is_err() {
                return;
            }
        }
    };
    tokio::join!(k8s::watch_dns_services(client, services, sender), forward);
}

/// What the hot thread owns.
struct Hot {
    engine: Engine,
    records: Records,
    resolvers: Resolvers,
    names: NameFilter,
    deferred: DeferredAnswers,
    releaser: Releaser,
    /// The interfaces to which answers were lost since the counters were last logged, and why.
    lost: Causes<(u32, &'static str)>,
    /// What was captured while there was no agent.
    left: Vec<Left>,
    /// Tells the thread that attaches that the node is known.
    ready: Option<oneshot::Sender<()>>,
    heartbeat: Heartbeat,
    /// Whether answers are held.
    holds: bool,
    /// How long flows stay without an agent, and frames are captured.
    keep: Duration,
    beat_at: Timestamp,
    estimate: Arc<Estimate>,
    counters: Arc<ProgramCounters>,
    shares: Shares,
    watched: InterfaceSet,
    recorded: InterfaceSet,
    entries: Entries,
    /// The reading of the entries that is under way.
    reading: Option<Reading>,
    /// What each interface had lost of its own when the counters were last logged.
    over_share: BTreeMap<u32, LeftOut>,
    /// To the thread that attaches. It holds little: one command for each interface that comes or
    /// goes.
    attach: mpsc::UnboundedSender<AttachCommand>,
    openflow: openflow::Connection,
    questions: mpsc::Sender<FlowQuestion>,
    conntrack: mpsc::Sender<conntrack::Request>,
    /// Questions for the megaflows that drop.
    datapath: mpsc::Sender<Vec<Path>>,
    ovn: mpsc::Sender<OvnCommand>,
    health: Arc<Health>,
    reporter: Reporter,
    journal: Arc<Journal>,
    observed: Observed,
    /// Where snapshots go, if anywhere.
    saver: Option<Saver>,
    /// The one that is being handed over.
    saving: Option<Snapshot>,
    /// [`Engine::cache_version`] of the last one.
    saved_version: u64,
    snapshot_at: Timestamp,
    counters_at: Timestamp,
    lost_lines: LostLines,
    alarm: Alarm,
}

impl Hot {
    /// Takes from `found` what the switch answers to questions: there is much of it, and a frame must
    /// not wait for more than one of them. Answers what people have `asked`.
    async fn run(
        &mut self,
        inputs: &mut mpsc::Receiver<Input<'static>>,
        found: &mut mpsc::Receiver<Input<'static>>,
        asked: &mut mpsc::Receiver<Inquiry>,
        edges_end: &mut oneshot::Receiver<Infallible>,
    ) -> Result<(), AgentError> {
        let mut terminate = signal(SignalKind::terminate()).map_err(failed("watch for SIGTERM"))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed("watch for SIGINT"))?;
        loop {
            self.health.turn(now());
            let deadline = self.next_deadline();
            let mut drained = Drained::Empty;
            tokio::select! {
                ready = self.records.readable() => {
                    ready.map_err(failed("watch the ring buffer"))?;
                    drained = self.frames(inputs);
                    self.beat(now());
                }
                event = self.openflow.next() => self.switch_events(event),
                Some(input) = inputs.recv() => self.engine.handle(input, now()),
                Some(input) = found.recv() => self.engine.handle(input, now()),
                Some(inquiry) = asked.recv() => inquiry(&self.engine, now()),
                // Some at a time, as with what is found: a frame must not wait for all of them.
                () = std::future::ready(()), if self.reading.is_some() => self.read_marks(),
                // Likewise a part at a time.
                () = takes_part(self.saver.as_ref()), if self.saving.is_some() => self.save_part(),
                () = self.alarm.wait(Some(deadline)) => self.timeout(),
                // An edge has stopped: its thread's result says which.
                _ = &mut *edges_end => break,
                _ = terminate.recv() => {
                    info!("SIGTERM: stopping; the flows stay until the hard timeout of their sentinel flows");
                    break;
                }
                _ = interrupt.recv() => {
                    info!("SIGINT: stopping; the flows stay until the hard timeout of their sentinel flows");
                    break;
                }
            }
            self.carry_out();
            let has_more = drained == Drained::Limit
                || self.reading.is_some()
                || self.saving.is_some()
                || !inputs.is_empty()
                || !found.is_empty();
            if has_more {
                // The runtime learns of what has become readable only while this task waits.
                task::yield_now().await;
            }
        }
        self.let_go(inputs).await;
        self.tell_counters();
        Ok(())
    }

    fn next_deadline(&self) -> Timestamp {
        [
            self.engine.next_deadline().map(|(at, _)| at),
            self.saver.is_some().then_some(self.snapshot_at),
            Some(self.beat_at),
        ]
        .into_iter()
        .flatten()
        .fold(self.counters_at, Timestamp::min)
    }

    fn timeout(&mut self) {
        let now = now();
        self.beat(now);
        if self.counters_at <= now {
            self.counters_at = now + COUNTERS_INTERVAL;
            self.tell_counters();
        }
        if self.snapshot_at <= now {
            self.snapshot_at = now + SNAPSHOT_INTERVAL;
            self.offer_snapshot(now);
        }
        self.engine.handle_timeout(now);
    }

    /// Says that this thread is well, when it is time to.
    fn beat(&mut self, now: Timestamp) {
        if self.beat_at > now {
            return;
        }
        self.beat_at = now + BEAT_INTERVAL;
        if let Err(error) = self.heartbeat.capture_until(now + self.keep) {
            warn!(%error, "answers will not be captured");
        }
        if self.holds {
            let estimate = self.estimate.time();
            self.engine.handle(Input::Revalidation(estimate), now);
            if let Err(error) = self.heartbeat.beat(now) {
                warn!(%error, "answers are not held");
            }
        }
    }

    /// Holds no further answer, and puts back what is held: behind its flows, or at the end.
    async fn let_go(&mut self, inputs: &mut mpsc::Receiver<Input<'static>>) {
        if let Err(error) = self.heartbeat.stop() {
            warn!(%error, "answers may be held for another moment, and be lost");
        }
        // A program that has seen the heartbeat before may hold another answer until its end.
        for pause in [Duration::ZERO, PROGRAM_TIME_MAX] {
            tokio::time::sleep(pause).await;
            self.take_inputs(inputs);
            let Self {
                engine,
                records,
                deferred,
                ..
            } = self;
            records.drain_rest(|frame| hand_in(frame, engine, deferred));
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
                event = self.openflow.next() => self.switch_events(event),
                () = self.alarm.wait(Some(deadline)) => self.engine.handle_timeout(now()),
            }
            self.carry_out();
        }
    }

    /// Begins to hand over a snapshot to be written, if there is something new and no other one is under way.
    fn offer_snapshot(&mut self, now: Timestamp) {
        let version = self.engine.cache_version();
        if let Some(saver) = &self.saver
            && self.saving.is_none()
            && version != self.saved_version
            && saver.begin()
        {
            self.saving = Some(Snapshot::begin(now));
            self.saved_version = version;
        }
    }

    /// Hands over the next part of the snapshot.
    fn save_part(&mut self) {
        let Self {
            saver,
            saving,
            engine,
            ..
        } = self;
        if let (Some(saver), Some(snapshot)) = (saver, saving.as_mut())
            && !saver.go_on(|| engine.next_part(snapshot))
        {
            *saving = None;
        }
    }

    /// Before a frame of an interface comes the news that the interface is there.
    fn take_inputs(&mut self, inputs: &mut mpsc::Receiver<Input<'static>>) {
        while let Ok(input) = inputs.try_recv() {
            self.engine.handle(input, now());
        }
    }

    fn frames(&mut self, inputs: &mut mpsc::Receiver<Input<'static>>) -> Drained {
        self.take_inputs(inputs);
        let Self {
            engine,
            records,
            deferred,
            ..
        } = self;
        let end = now() + TURN_MAX;
        records.drain(FRAMES_PER_TURN, |frame| {
            hand_in(frame, engine, deferred);
            now() < end
        })
    }

    /// Takes in what was captured while there was no agent. The node is known: whose frames they are, which rules there
    /// are, and which DNS servers are trusted.
    fn take_over(&mut self) {
        let Self {
            engine,
            left,
            deferred,
            ..
        } = self;
        let mut frames = 0_u64;
        for left in left.drain(..) {
            left.drain(now(), |frame| {
                frames += 1;
                hand_in(frame, engine, deferred);
            });
        }
        if frames > 0 {
            info!(frames, "taken over what was captured while no agent ran");
        }
    }

    fn release(&mut self, frame: &HeldFrame) {
        let HeldFrame {
            ifindex,
            bytes,
            gso_size,
        } = frame;
        if let Err(error) = self.releaser.release(*ifindex, bytes, *gso_size)
            && self.lost.is_news((*ifindex, error.reason()))
        {
            let port = self.engine.port_at(*ifindex).unwrap_or("unknown");
            warn!(
                ifindex,
                port,
                %error,
                "an answer that was held is lost; further ones of the same minute are only counted \
                 (dnsflow_held_answers_lost_total)"
            );
        }
    }

    /// Has the engine look at the answers that no rule mentioned.
    fn replay(&mut self) {
        let Self {
            engine, deferred, ..
        } = self;
        let drained = deferred.replay(|frame| engine.replay(frame, now()));
        if let Err(error) = drained {
            warn!(%error, "answers that came before their rules are not looked at");
        }
    }

    /// One read may bring the replies to many batches; frames make many more at a time.
    fn switch_events(&mut self, event: Event) {
        self.switch_event(event);
        while let Some(event) = self.openflow.ready() {
            self.switch_event(event);
        }
    }

    fn switch_event(&mut self, event: Event) {
        let input = match event {
            Event::Up => {
                info!(socket = %self.openflow.path().display(), "connected to the switch");
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
        };
        self.engine.handle(input, now());
    }

    /// Carries out the engine's commands; what comes of them at once goes back into it. What there is to
    /// tell people comes last: pods wait for the commands.
    fn carry_out(&mut self) {
        loop {
            self.engine.end_turn(now());
            let commands = self.engine.take_commands();
            if commands.is_empty() {
                break;
            }
            for command in commands {
                self.command(command);
            }
            self.openflow.flush();
        }
        let mut is_known = false;
        for report in self.engine.take_reports() {
            match &report {
                Report::Ready { .. } => {
                    self.health.synced();
                    is_known = true;
                }
                Report::Opened { activation, .. } => self.observed.opened(*activation),
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
        if is_known && let Some(ready) = self.ready.take() {
            // Without a receiver, that thread has ended, and with it this agent does.
            let _ = ready.send(());
            memory::give_back();
        }
        if self.ready.is_none() && !self.left.is_empty() && self.engine.knows_servers() {
            self.take_over();
            self.carry_out();
            memory::give_back();
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Attachment(command) => self.attach(command),
            Command::Apply {
                batch,
                atomic,
                changes,
                count,
            } if count.is_empty() => self.openflow.apply(batch, atomic, changes),
            Command::Apply {
                batch,
                changes,
                count,
                ..
            } => self.openflow.apply_and_count(batch, changes, count),
            // What the monitor says of the flows that are counted comes over the same connection.
            Command::Ask(question @ FlowQuestion::Count(_)) => self.openflow.ask(question),
            Command::Ask(question) => self.ask_switch(question),
            Command::TrustResolvers(resolvers) => {
                let resolvers: Vec<_> = resolvers
                    .into_iter()
                    .map(|Resolver { address, port }| (address, port))
                    .collect();
                for error in self.resolvers.set(&resolvers) {
                    warn!(%error, "a DNS server is not trusted");
                }
            }
            Command::FilterNames { name_set, names } => self.names.set_names(name_set, &names),
            Command::ForgetNames { name_set } => self.names.remove_name_set(name_set),
            Command::FilterInterface { ifindex, name_set } => {
                self.names.set_name_set(ifindex, name_set)
            }
            Command::WatchAttempts { ifindex, watched } => self.watched.set(ifindex, watched),
            Command::RecordAnswers { ifindex, recorded } => self.recorded.set(ifindex, recorded),
            Command::ReplayAnswers => self.replay(),
            Command::ConfirmFilter => self.engine.handle(Input::FilterConfirmed, now()),
            Command::Mark(changes) => self.mark(changes),
            Command::ReadMarks => self.reading = Some(Reading::default()),
            Command::Release(frame) => self.release(&frame),
            Command::FindDropping(paths) => {
                if self.datapath.try_send(paths).is_err() {
                    self.engine.handle(Input::Dropping(None), now());
                }
            }
            Command::MonitorTables(tables) => self.openflow.monitor_tables(tables),
            Command::FindBlocked => self.ask_conntrack(conntrack::Request::Find),
            Command::Unblock(connections) => {
                self.ask_conntrack(conntrack::Request::Unblock(connections));
            }
            Command::WatchLogicalFlows { priorities } => {
                self.ask_ovn(OvnCommand::WatchLogicalFlows { priorities });
            }
            Command::SampleLogicalFlows(stage) => {
                self.ask_ovn(OvnCommand::SampleLogicalFlows(stage));
            }
        }
    }

    fn mark(&mut self, changes: Vec<MarkChange>) {
        let mut refused = Vec::new();
        let mut first = None;
        for change in changes {
            match change {
                MarkChange::Set {
                    ifindex,
                    address,
                    mark,
                    until,
                } => {
                    if let Err(error) = self.entries.set(ifindex, address, mark, until) {
                        refused.push(MarkRefused { ifindex, address });
                        first.get_or_insert(error);
                    }
                }
                MarkChange::Remove { ifindex, address } => {
                    if let Err(error) = self.entries.remove(ifindex, address) {
                        warn!(ifindex, %address, %error, "packets to an address stay marked until its end");
                    }
                }
            }
        }
        if let Some(error) = first {
            let addresses = refused.len();
            warn!(addresses, %error, "the kernel takes no more marks: addresses get flows");
            self.engine.handle(Input::MarksRefused(refused), now());
        }
    }

    /// Hands the next marks of the reading that is under way to the engine.
    fn read_marks(&mut self) {
        let Some(reading) = &mut self.reading else {
            return;
        };
        let found = match self.entries.read(reading) {
            Ok(entries) => {
                let found = |entry: EntryRead| MarkFound {
                    ifindex: entry.ifindex,
                    address: entry.address,
                    mark: entry.mark,
                    until: entry.until,
                    used_at: entry.used_at,
                };
                Some(entries.into_iter().map(found).collect())
            }
            Err(error) => {
                warn!(%error, "cannot read which addresses are in use");
                None
            }
        };
        let more = !reading.is_over();
        if !more {
            self.reading = None;
        }
        self.engine.handle(Input::Marks { found, more }, now());
    }

    fn attach(&mut self, command: AttachCommand) {
        if let Err(error) = self.attach.send(command) {
            warn!(%error, "the thread that attaches has stopped");
        }
    }

    fn ask_switch(&mut self, question: FlowQuestion) {
        if let Err(error) = self.questions.try_send(question) {
            warn!(%error, "a question to the switch was dropped");
            self.engine.handle(Input::QuestionRefused, now());
        }
    }

    fn ask_conntrack(&mut self, request: conntrack::Request) {
        let Err(error) = self.conntrack.try_send(request) else {
            return;
        };
        warn!(%error, "blocked connections are not looked for, or not unblocked");
        let input = match error.into_inner() {
            conntrack::Request::Find => Input::Blocked {
                connections: Vec::new(),
                more: false,
            },
            conntrack::Request::Unblock(connections) => Input::Unblocked {
                unblocked: 0,
                failed: connections.len(),
            },
        };
        self.engine.handle(input, now());
    }

    fn ask_ovn(&mut self, command: OvnCommand) {
        if let Err(error) = self.ovn.try_send(command) {
            warn!(%error, "a question to OVN's databases was dropped");
        }
    }

    fn tell_counters(&mut self) {
        self.lost_lines.report();
        self.lost.end();
        debug!(counters = ?self.engine.counters(), flows = self.engine.flow_count(), "decided");
        let held: Vec<_> = self.engine.hold_events().iter().collect();
        let revalidation_wait: Vec<_> = self.engine.revalidation_waits().iter().collect();
        let revalidation: Vec<_> = self.engine.revalidation_events().iter().collect();
        debug!(?held, ?revalidation_wait, ?revalidation, "held");
        match self.counters.read() {
            Ok(counters) => {
                let seen: Vec<_> = counters
                    .into_iter()
                    .filter(|(_, count)| *count > 0)
                    .collect();
                debug!(?seen, "packets");
            }
            Err(error) => warn!(%error, "cannot read the program's counters"),
        }
        self.report_over_share();
    }

    /// Names the pods that have begun to lose packets of their own.
    fn report_over_share(&mut self) {
        let left_out = match self.shares.left_out() {
            Ok(left_out) => left_out,
            Err(error) => {
                warn!(%error, "cannot read which pods are over their share");
                return;
            }
        };
        for (ifindex, LeftOut { packets, attempts }) in &left_out {
            let before = self.over_share.get(ifindex).copied().unwrap_or_default();
            let port = self.engine.port_at(*ifindex).unwrap_or("unknown");
            if before.packets == 0 && *packets > 0 {
                warn!(
                    port,
                    packets,
                    "a pod hands over more DNS than its share: what is beyond opens nothing for it; \
                     other pods lose nothing"
                );
            }
            if before.attempts == 0 && *attempts > 0 {
                info!(
                    port,
                    attempts,
                    "a pod tries to connect to more places than its share: not each connection that \
                     is denied is told of; other pods lose nothing"
                );
            }
        }
        self.over_share = left_out;
    }
}
