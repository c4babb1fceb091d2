//! Puts the agent together: runtimes, programs, channels, threads. [`run`](super::run) has the order.

use std::{
    convert::Infallible,
    env,
    ffi::OsString,
    hash::{BuildHasher as _, RandomState},
    num::NonZeroU32,
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use dnsflow_common::walk::Ports;
use dnsflow_core::{Input, ask::attempts::Attempts, engine::Config, io::input::AttachCommand};
use tokio::{
    runtime::{self, Runtime},
    sync::{mpsc, oneshot},
};
use tracing::{info, warn};

use super::{
    AgentError,
    edges::{self, Denials, Ends, Outside},
    failed,
    hot::{
        self, Accounts, Frames, Incoming, Kernel, LeftFrames, Marks, Opening, Peers, Pulse,
        Recorder, Releasing, Upkeep,
    },
    reports::tell,
};
use crate::{
    api::Health,
    capture::{
        self, Aside, Attacher, Capture, EntryTimes, Heartbeat, LostAnswers, PendingQueries,
        ProgramCounters, Releaser, RingShares, TakeOver,
    },
    clock::Alarm,
    conntrack,
    denied_connections::{self, Connections, DenialCounts, Heard},
    inquiries::{self, Inquiries},
    journal::Journal,
    k8s::events::Reporter,
    logging::{Log, LostLines},
    metrics::{DatabaseCounters, Metrics, Observed, Packets, ReadPackets},
    open_by::{self, OpenedBy},
    options::{AgentOptions, unknown_variables},
    rights::{self, WHILE_RUNNING, keep_only},
    vswitchd::Estimate,
};

/// Inputs of the slow edges that wait for the hot thread. When it is full, those edges wait:
/// nothing they send may be lost.
const INPUTS_MAX: usize = 256;
/// Messages of a dump between the edges and the hot thread: each has hundreds of flows.
const FOUND_MAX: usize = 4;
/// Changed EgressFirewalls that wait, each of up to 8,001 rules. The watch keeps the newest of each namespace
/// meanwhile.
const EDITS_MAX: usize = 1;
/// Commands to the databases' edge that wait. The engine has few questions open at any time.
const OVN_COMMANDS_MAX: usize = 64;
/// Questions to the switch that wait. The engine has one dump and few others open at any time.
const QUESTIONS_MAX: usize = 64;
/// Questions to the datapath that wait. The engine has one open at a time.
const LOOKS_MAX: usize = 1;
/// Threads of a runtime for calls that block: files, names of hosts, the kernel's connection tracking. A call beyond
/// them waits.
const BLOCKING_MAX: usize = 8;

/// The runtimes, each of one thread.
pub(super) struct Runtimes {
    pub(super) hot: Runtime,
    /// That of the edges.
    pub(super) slow: Runtime,
    pub(super) attaching: Runtime,
}

impl Runtimes {
    pub(super) fn new() -> Result<Self, AgentError> {
        Ok(Self {
            hot: runtime_of_one_thread("start the runtime")?,
            slow: runtime_of_one_thread("start the edges' runtime")?,
            attaching: runtime_of_one_thread("start the runtime that attaches")?,
        })
    }

    /// The hot thread's timer.
    pub(super) fn alarm(&self) -> Result<Alarm, AgentError> {
        let _runtime = self.hot.enter();
        Alarm::new().map_err(failed("make a timer"))
    }
}

/// A runtime on the thread that calls it, with a few more threads for calls that block.
fn runtime_of_one_thread(operation: &'static str) -> Result<Runtime, AgentError> {
    runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_MAX)
        .build()
        .map_err(failed(operation))
}

/// The settings that the options come to on this node.
pub(super) struct Settings {
    pub(super) opened_by: OpenedBy,
    pub(super) release_mark: NonZeroU32,
    pub(super) capture: capture::Options,
    pub(super) engine: Config,
}

impl Settings {
    pub(super) fn of(options: &AgentOptions) -> Result<Self, AgentError> {
        let variables = env::vars_os();
        let texts = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        for unknown in unknown_variables(variables.filter_map(texts)) {
            warn!("{unknown}");
        }
        let release_mark = release_mark();
        let opened_by = {
            // Threads that read files for it end with this runtime: they have what the calling thread gives up later.
            let asking = runtime_of_one_thread("start the runtime")?;
            asking.block_on(open_by::choose(options))?
        };
        let cache_limits = options.cache_limits();
        let capture = capture::Options {
            ports: options.ports()?,
            release_mark: Some(release_mark),
            mark_mask: opened_by.mark_mask(),
            entry_times: EntryTimes::of(&cache_limits),
            entries_per_interface: cache_limits.addresses_per_port_max as u64,
            ..capture::Options::default()
        };
        let engine = Config {
            subdomains: options.subdomains,
            dry_run: options.dry_run,
            cache_limits,
            flow_changes_per_second: options.max_flow_changes,
            hold_max: options.held_for().unwrap_or_default(),
            keep_flows_s: options.keep_flows_s,
            refusals: options.refusals()?,
            resolvers: options.resolver.iter().copied().collect(),
            dns_ports: capture.ports,
            mark_mask: capture.mark_mask,
        };
        if engine.mark_mask.is_some() && options.pin_dir.is_none() {
            warn!(
                "--open-by=marks without --pin-dir: when the agent ends, all addresses close until the pods ask \
                 again; with --pin-dir, or by flows, they stay open for --keep-flows"
            );
        }
        Ok(Self {
            opened_by,
            release_mark,
            capture,
            engine,
        })
    }
}

/// A mark that nobody knows and that is not zero, which is that of all other packets.
fn release_mark() -> NonZeroU32 {
    // Seeded by the system (`std::hash::RandomState`).
    let random = RandomState::new().hash_one(());
    let [.., a, b, c, d] = random.to_ne_bytes();
    NonZeroU32::new(u32::from_ne_bytes([a, b, c, d])).unwrap_or(NonZeroU32::MAX)
}

/// The TC programs, by the threads that drive them.
pub(super) struct Programs {
    pub(super) attacher: Attacher,
    pub(super) kernel: Kernel,
    pub(super) heartbeat: Heartbeat,
    pub(super) shares: RingShares,
    pub(super) counters: Arc<ProgramCounters>,
    pub(super) queries: Arc<PendingQueries>,
    lost: LostAnswers,
    pub(super) aside: Aside,
}

impl Programs {
    /// Loads the programs, and has the hot thread's runtime log for them.
    pub(super) fn load(
        options: &capture::Options,
        pins: Option<&Path>,
        runtimes: &Runtimes,
        releaser: Releaser,
    ) -> Result<Self, AgentError> {
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
            queries,
            watched,
            recorded,
            aside,
            entries,
            classes,
            networks,
        } = {
            let _runtime = runtimes.hot.enter();
            capture::take_over(options, runtimes.attaching.handle(), pins)?
        };
        runtimes.hot.spawn(log.run());
        let lost = releaser.lost();
        let frames = Frames {
            records,
            deferred,
            left: LeftFrames::of(left),
        };
        Ok(Self {
            attacher,
            kernel: Kernel {
                frames,
                marks: Marks::of(entries),
                opening: Opening::of(classes, networks),
                releasing: Releasing::by(releaser),
                resolvers,
                names,
                watched,
                recorded,
            },
            heartbeat,
            shares,
            counters: Arc::new(counters),
            queries: Arc::new(queries),
            lost,
            aside,
        })
    }

    /// Reads the counters. Where the kernel does not let the maps be read, the hot thread says so.
    pub(super) fn read_packets(&self) -> ReadPackets {
        let (counters, lost) = (Arc::clone(&self.counters), self.lost.clone());
        Box::new(move || Packets {
            to_pods: counters.read().unwrap_or_default(),
            from_pods: counters.read_queries().unwrap_or_default(),
            lost: lost.read(),
        })
    }

    /// Keeps the capabilities that the agent needs from now on, and no others.
    pub(super) fn give_up_rights(&self) -> Result<(), AgentError> {
        let kept = rights::bpf_while_running(|| self.counters.read().is_ok())
            .and_then(|bpf| keep_only(WHILE_RUNNING | bpf))
            .map_err(failed("give up capabilities"))?;
        info!(
            capabilities = rights::names(kept),
            "dropped all capabilities but these"
        );
        Ok(())
    }
}

/// The channels, by who has their ends.
pub(super) struct Channels {
    pub(super) incoming: Incoming,
    pub(super) peers: Peers,
    pub(super) edges: Ends,
    pub(super) attaching: AttachingEnds,
    pub(super) inquiries: Inquiries,
    /// Never sent: dropped when the edges end.
    pub(super) running: oneshot::Sender<Infallible>,
}

/// The ends that the thread which attaches has.
pub(super) struct AttachingEnds {
    commands: mpsc::UnboundedReceiver<AttachCommand>,
    inputs: mpsc::Sender<Input>,
    take_over: TakeOver,
}

impl Channels {
    pub(super) fn new() -> Self {
        let (input_sender, inputs) = mpsc::channel(INPUTS_MAX);
        let (found_sender, found) = mpsc::channel(FOUND_MAX);
        let (edit_sender, edits) = mpsc::channel(EDITS_MAX);
        let (ovn, ovn_commands) = mpsc::channel(OVN_COMMANDS_MAX);
        let (questions, questions_to_ask) = mpsc::channel(QUESTIONS_MAX);
        let (conntrack, conntrack_requests) = mpsc::channel(conntrack::REQUESTS_MAX);
        let (datapath, looks) = mpsc::channel(LOOKS_MAX);
        let (attach, commands) = mpsc::unbounded_channel();
        let (take_over, begin) = oneshot::channel();
        let (done, taken_over) = oneshot::channel();
        let (running, edges_end) = oneshot::channel();
        let (inquiries, asked) = inquiries::channel();
        Self {
            incoming: Incoming {
                inputs,
                found,
                edits,
                asked,
                edges_end,
            },
            peers: Peers {
                attach,
                know_node: false,
                take_over: Some(take_over),
                taken_over: Some(taken_over),
                questions,
                conntrack,
                datapath,
                ovn,
            },
            attaching: AttachingEnds {
                commands,
                inputs: input_sender.clone(),
                take_over: TakeOver { begin, done },
            },
            edges: Ends {
                inputs: input_sender,
                found: found_sender,
                edits: edit_sender,
                questions: questions_to_ask,
                conntrack_requests,
                looks,
                ovn_commands,
            },
            inquiries,
            running,
        }
    }
}

/// Counters and records that some threads write, and others read.
pub(super) struct Shared {
    pub(super) journal: Arc<Journal>,
    observed: Observed,
    denials: DenialCounts,
    pub(super) databases: DatabaseCounters,
    pub(super) health: Arc<Health>,
    /// Where answers are held.
    pub(super) estimate: Option<Arc<Estimate>>,
    reporter: Reporter,
    lost_lines: LostLines,
}

impl Shared {
    pub(super) fn new(options: &AgentOptions, reporter: Reporter, log: &Log) -> Self {
        Self {
            journal: Arc::default(),
            observed: Observed::default(),
            denials: DenialCounts::default(),
            databases: DatabaseCounters::default(),
            health: Arc::default(),
            estimate: options.held_for().map(|_| Arc::default()),
            reporter,
            lost_lines: log.lost_lines(),
        }
    }

    pub(super) fn metrics(&self, inquiries: Inquiries, packets: ReadPackets) -> Arc<Metrics> {
        let metrics = Metrics::new(
            inquiries,
            packets,
            Arc::clone(&self.journal),
            self.lost_lines.clone(),
            self.observed.clone(),
            self.denials.clone(),
            self.reporter.counters(),
        );
        Arc::new(metrics.of_databases(self.databases.clone()))
    }

    /// The hot thread's listeners.
    pub(super) fn listeners(&self) -> hot::Listeners {
        hot::Listeners {
            health: Arc::clone(&self.health),
            observed: self.observed.clone(),
            reporter: self.reporter.clone(),
            journal: Arc::clone(&self.journal),
        }
    }

    /// The edge that names denied connections.
    pub(super) fn denials(
        &self,
        options: &AgentOptions,
        dns_ports: Ports,
        aside: Aside,
    ) -> Denials {
        Denials {
            aside,
            heard: Heard::new(Attempts::new(dns_ports)),
            listeners: denied_connections::Listeners {
                log: tell,
                journal: Arc::clone(&self.journal),
                events: options.denied_events.then(|| self.reporter.clone()),
                counts: self.denials.clone(),
                connections: Connections::new(),
            },
        }
    }

    /// The hot thread's upkeep.
    pub(super) fn upkeep(
        &self,
        options: &AgentOptions,
        heartbeat: Heartbeat,
        recorder: Recorder,
        accounts: (Arc<ProgramCounters>, RingShares),
    ) -> Upkeep {
        let (counters, shares) = accounts;
        let keep = Duration::from_secs(options.keep_flows_s.into());
        Upkeep {
            pulse: Pulse::new(heartbeat, keep, self.estimate.clone()),
            recorder,
            accounts: Accounts::new(counters, shares, self.lost_lines.clone()),
        }
    }
}

/// Starts the thread that attaches. It ends when the hot thread has gone.
pub(super) fn start_attaching(
    runtime: Runtime,
    attacher: Attacher,
    ends: AttachingEnds,
) -> Result<JoinHandle<()>, AgentError> {
    let AttachingEnds {
        commands,
        inputs,
        take_over,
    } = ends;
    thread::Builder::new()
        .name("attach".into())
        .spawn(move || runtime.block_on(attacher.run(commands, inputs, take_over)))
        .map_err(failed("start the thread that attaches"))
}

/// The thread of the edges.
pub(super) struct EdgesThread {
    thread: JoinHandle<Result<(), AgentError>>,
    stop: oneshot::Sender<()>,
}

impl EdgesThread {
    /// Starts it. `running` is dropped when it ends.
    pub(super) fn start(
        runtime: Runtime,
        options: AgentOptions,
        outside: Outside,
        running: oneshot::Sender<Infallible>,
    ) -> Result<Self, AgentError> {
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("edges".into())
            .spawn(move || {
                let _while_they_run = running;
                runtime.block_on(edges::run(options, outside, stopped))
            })
            .map_err(failed("start the edges' thread"))?;
        Ok(Self { thread, stop })
    }

    /// Ends it.
    pub(super) fn stop(self) -> thread::Result<Result<(), AgentError>> {
        drop(self.stop);
        self.thread.join()
    }
}
