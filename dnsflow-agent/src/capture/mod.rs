//! The capture edge: loads the TC programs and attaches them to the pods' veths. It gives them the trusted servers
//! and the names of rules, and hands captured frames to the core.
//!
//! It never interprets a frame: the core does. It never changes one either: a held answer goes back as captured.
//!
//! [`load`] gives parts for different threads: [`Records`], [`Resolvers`] and [`NameFilter`] for the hot thread,
//! [`Attacher`] for one of its own, [`ProgramCounters`] and [`ProgramLog`] for any thread.

mod aside;
mod attacher;
mod attachments;
mod bpf;
mod classes;
mod counters;
mod deferred;
mod earlier;
mod entries;
mod heartbeat;
mod holders;
mod hooks;
mod interfaces;
mod links;
mod names;
mod networks;
mod object_info;
mod parts;
mod pins;
mod program;
mod program_log;
mod qdisc;
mod queries;
mod records;
mod release;
mod resolvers;
mod room;
mod shares;
mod sources;
pub mod survey;
mod tcx;
mod unasked;

use std::{io, num::NonZeroU32, path::Path, time::Duration};

use aya::{EbpfError, maps::MapError};
use dnsflow_common::walk::Ports;
use dnsflow_core::values::limits::{CacheLimits, MARK_SLACK};
use tokio::runtime::Handle;

use pins::Pins;
use program::take_map;

pub use self::{
    aside::{Aside, AsideRecord},
    attacher::{Attacher, TakeOver},
    attachments::{Attach, AttachError, Attachments},
    classes::{Classes, class_key},
    counters::ProgramCounters,
    deferred::DeferredAnswers,
    entries::{Entries, Reading},
    heartbeat::{BEAT_INTERVAL, Heartbeat},
    interfaces::InterfaceSet,
    links::{LinkEvent, LinkEvents},
    names::{FilterState, KernelTables, NameFilter, PutNameSet, Tables},
    networks::Networks,
    pins::{Left, PinsError, remove_all as remove_pins},
    program::{
        AttachKind, EGRESS, HOLD, INGRESS, LeftFilters, OBJECT, OPEN, Program, TcLink, left_filters,
    },
    program_log::ProgramLog,
    queries::PendingQueries,
    records::{Drained, Records},
    release::{LostAnswers, ReleaseError, Releaser},
    resolvers::{ResolverError, Resolvers},
    shares::{LeftOut, RingShares},
    unasked::UNASKED_GRACE,
};

/// The result of a removal, if it does not matter whether the key was there. aya 0.14 hands on what the kernel says of
/// a key that is not in a hash map (`bpf_map_delete_elem`).
fn absent(removal: Result<(), MapError>) -> Result<(), MapError> {
    match removal {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error))
            if error.io_error.raw_os_error() == Some(libc::ENOENT) =>
        {
            Ok(())
        }
        result => result,
    }
}

/// What can be set before the programs are loaded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Options {
    /// The size of the ring buffer, in bytes: a power of two, from 256 KiB to 1 GiB.
    pub ring_bytes: u32,
    /// The ports that DNS servers answer from.
    pub ports: Ports,
    /// How to attach; `None` takes TCX where the kernel has it, else clsact.
    pub attach: Option<AttachKind>,
    /// The mark of frames that are put back. Whoever can send packets with it onto a pod's veth
    /// goes unseen: it should be hard to guess.
    pub release_mark: Option<NonZeroU32>,
    /// Whether each interface has a share of what is handed to the agent. Without, one pod can take
    /// what there is.
    pub shares: bool,
    /// The bits of a packet's mark that say the group of its destination; without them, no packet is marked.
    pub mark_mask: Option<NonZeroU32>,
    /// How long an entry lasts that the program makes.
    pub entry_times: EntryTimes,
    /// The most entries of an interface before the program leaves it to the agent to make one.
    pub entries_per_interface: u64,
}

/// How long an entry lasts that the program makes, in seconds.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct EntryTimes {
    /// At least for so long, whatever the TTL …
    pub least: u32,
    /// … and at most …
    pub most: u32,
    /// … and in addition to each for so long.
    pub more: u32,
}

impl EntryTimes {
    /// As long as entries of the agent.
    pub fn of(limits: &CacheLimits) -> Self {
        let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        Self {
            least: seconds(limits.min_ttl),
            most: seconds(limits.max_ttl.max(limits.min_ttl)),
            more: seconds(MARK_SLACK),
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ring_bytes: RING_BYTES,
            ports: Ports::DNS,
            attach: None,
            release_mark: None,
            shares: true,
            mark_mask: None,
            entry_times: EntryTimes::default(),
            entries_per_interface: CacheLimits::default().addresses_per_port_max as u64,
        }
    }
}

/// 2 MiB: at 200 bytes an answer, a second of 10,000 answers a second. An agent that stands still for
/// longer holds none any more. (Its memory counts twice in the agent's resident set: it is mapped
/// twice in a row, so that a record never ends at the ring's.)
pub const RING_BYTES: u32 = 2 << 20;

/// Why capturing cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The kernel refuses BPF to this process.
    #[error(
        "the kernel does not let this process load a BPF program: it needs root, or the \
         capabilities CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    )]
    Permission(#[source] EbpfError),
    /// The kernel has no ring buffer map.
    #[error("this kernel has no BPF ring buffer: dnsflow needs Linux 5.8 or newer")]
    NoRingBuffer(#[source] EbpfError),
    /// The kernel refuses the program.
    #[error("cannot load the BPF program")]
    Load(#[source] EbpfError),
    /// The object lacks something: it is not the one of this agent.
    #[error("the BPF object has no {what} of the name and type that the agent expects")]
    Object {
        /// What is missing.
        what: &'static str,
    },
    /// A file descriptor cannot be watched or read.
    #[error("cannot {operation}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// The loaded programs, attached to nothing yet.
pub struct Capture {
    /// Attaches and detaches.
    pub attacher: Attacher,
    /// What was captured.
    pub records: Records,
    /// Whose answers count: nobody's yet.
    pub resolvers: Resolvers,
    /// Which names matter: all so far.
    pub names: NameFilter,
    /// Answers for names that did not.
    pub deferred: DeferredAnswers,
    /// What programs of earlier agents have captured while there was no agent, oldest first.
    pub left: Vec<Left>,
    /// Lets answers be held; none is so far.
    pub heartbeat: Heartbeat,
    /// How many packets met which end.
    pub counters: ProgramCounters,
    /// Who has handed over more than its share.
    pub shares: RingShares,
    /// The queries that no answer has followed.
    pub queries: PendingQueries,
    /// Whose attempts to connect somewhere are told of: nobody's yet.
    pub watched: InterfaceSet,
    /// Whose answers leave the kernel whatever the rules mention: nobody's yet.
    pub recorded: InterfaceSet,
    /// The attempts.
    pub aside: Aside,
    /// The addresses whose packets are marked with a group: none, unless an earlier agent has left some.
    pub entries: Entries,
    /// The names whose addresses are opened without the agent: none so far.
    pub classes: Classes,
    /// The networks whose addresses are not.
    pub networks: Networks,
    /// What the program has to say.
    pub log: ProgramLog,
}

/// Loads the embedded programs. To be called within a tokio runtime, the one that will drive
/// [`Records`]; `attaching` is the one that will drive the [`Attacher`].
pub fn load(options: &Options, attaching: &Handle) -> Result<Capture, CaptureError> {
    take_over(options, attaching, None)
}

/// The same, with a directory of a BPF file system: the programs stay on the veths when the agent ends,
/// and go on to capture. Takes over what an earlier agent has left there.
pub fn take_over(
    options: &Options,
    attaching: &Handle,
    pins: Option<&Path>,
) -> Result<Capture, CaptureError> {
    // The programs share no map with earlier ones that they cannot take the place of: both would use up the queries.
    let pins = pins.and_then(|dir| {
        Pins::open(dir)
            .inspect_err(|error| pins::not_kept(dir, error))
            .ok()
    });
    let dir = pins.as_ref().map(|(pins, _)| pins.dir());
    let mut program = Program::load(options, dir)?;
    let ebpf = program.ebpf_mut();
    let entries = Entries::new(ebpf, options.entries_per_interface)?;
    let classes = Classes::new(ebpf)?;
    let networks = Networks::new(ebpf)?;
    let resolvers = Resolvers::new(ebpf, options.ports)?;
    let tables = KernelTables::new(ebpf)?;
    let deferred = DeferredAnswers::new(ebpf)?;
    let heartbeat = Heartbeat::new(ebpf)?;
    let shares = RingShares::new(ebpf)?;
    let queries = PendingQueries::new(ebpf)?;
    let watched = InterfaceSet::watched(ebpf)?;
    let recorded = InterfaceSet::recorded(ebpf)?;
    let aside = Aside::new(ebpf)?;
    let log = ProgramLog::new(ebpf)?;
    let records = take_map(ebpf, "RECORDS")?;
    let mut left = Vec::new();
    if let Some((pins, found)) = pins {
        program.keep_links(pins);
        left = found;
    }
    let records = Records::new(records)?;
    let counters = ProgramCounters::new(program.ebpf_mut(), &records)?;
    Ok(Capture {
        records,
        resolvers,
        names: NameFilter::new(tables),
        deferred,
        left,
        heartbeat,
        counters,
        shares,
        queries,
        watched,
        recorded,
        aside,
        entries,
        classes,
        networks,
        log,
        attacher: Attacher {
            attachments: Attachments::new(program),
            links: LinkEvents::new(attaching)?,
        },
    })
}
