//! The programs in the kernel, and their two ways onto an interface: TCX (a BPF link, Linux 6.6) and
//! a filter of the clsact qdisc.
//!
//! The agent tries which one the kernel has. The version would not tell, because distributions
//! backport.

use std::{
    fmt, io, mem,
    num::NonZeroU32,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfError, EbpfLoader,
    maps::{Map, MapError, MapType},
    programs::{
        LinkOrder, ProgramError, ProgramFd, SchedClassifier, TcAttachType, TcError,
        tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle},
    },
    sys::is_map_supported,
};
use dnsflow_core::io::input::SourceAddresses;
use tracing::{debug, info, warn};

use super::{
    Attach, AttachError, CaptureError, Options,
    attacher::GO_ON_MAX,
    holders::Holders,
    hooks,
    parts::Parts,
    pins::{self, Pins},
    qdisc::{self, Filter},
    queries::PendingQueries,
    shares::RingShares,
    sources::Sources,
    survey::{self, Link},
    tcx,
    unasked::Unasked,
};
use crate::clock::now;

/// The BPF object that `cargo xtask build-ebpf` made.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("DNSFLOW_EBPF_OBJECT_PATH"));

/// The program that sees what a pod is sent: its name in the object, and of its clsact filters.
pub const EGRESS: &str = "dnsflow_egress";
/// The program that sees what a pod sends: its name in the object, and of its clsact filters.
pub const INGRESS: &str = "dnsflow_ingress";

/// The program that [`EGRESS`] goes on with to hold an answer.
pub const HOLD: &str = "dnsflow_hold";

/// The program that [`EGRESS`] goes on with to open the addresses of an answer.
pub const OPEN: &str = "dnsflow_open";

/// The program for questions, and its hook.
pub(super) const QUESTIONS: (&str, TcAttachType) = (INGRESS, TcAttachType::Ingress);
/// The program for answers, and its hook.
pub(super) const ANSWERS: (&str, TcAttachType) = (EGRESS, TcAttachType::Egress);
pub(super) const PROGRAMS: [(&str, TcAttachType); 2] = [QUESTIONS, ANSWERS];

/// The priorities of the clsact filters, by preference. Filters of the first priority run before all others, and the
/// newest one first (`cls_bpf_change` in Linux net/sched/cls_bpf.c). The kernel refuses it where the priority has
/// filters of another kind or protocol (`tc_new_tfilter` in net/sched/cls_api.c): then the second one is taken. The
/// kernel gives filters without a priority 49,152 and downwards (`tcf_auto_prio`).
const PRIORITIES: [u16; 2] = [1, 49_000];
/// The handle of the clsact filters: by it and the priority, an agent finds the filter of an earlier one. The kernel
/// gives other filters handles from one upwards (`cls_bpf_change`).
const HANDLE: TcHandle = TcHandle::new(0x646e, 0x7366);

/// How the programs sit on an interface.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum AttachKind {
    /// A BPF link. It goes with the agent, however the agent ends, unless it is pinned: then the next
    /// agent puts its own program into the link.
    Tcx,
    /// A filter of the clsact qdisc. The next agent replaces the filter that an agent has left.
    Clsact,
}

impl AttachKind {
    /// The kind's usual name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

impl fmt::Display for AttachKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The loaded programs, which are attached and detached together.
pub struct Program {
    ebpf: Ebpf,
    kind: Option<AttachKind>,
    unasked: Unasked,
    sources: Sources,
    shares: RingShares,
    queries: PendingQueries,
    #[expect(dead_code, reason = "answers are held as long as it is there")]
    holders: Holders,
    /// The id of the map by whose entries packets are marked, if they are. Only programs that use it can go on beside
    /// this agent.
    entries: Option<u32>,
    /// What stays beside the links when the agent ends.
    parts: Parts,
    /// Whether these are pinned, as far as they can be.
    are_parts_kept: bool,
    /// What earlier agents have left, and where links are kept for the next one.
    pins: Option<Pins>,
}

impl Program {
    /// Loads the embedded object. If there is a directory for what outlives the agent, the programs go on with the
    /// maps that those of an earlier agent have left there.
    pub(super) fn load(options: &Options, pins: Option<&Path>) -> Result<Self, CaptureError> {
        raise_memlock_limit();
        let mark_mask = options.mark_mask.map_or(0, NonZeroU32::get);
        let release_mark = options.release_mark.map_or(0, NonZeroU32::get);
        let shared = u32::from(options.shares);
        let times = options.entry_times;
        let times = [times.least, times.most, times.more];
        let mut loader = EbpfLoader::new();
        // Without marks, there are no entries to go on with.
        let entries = options.mark_mask.map(pins::entries);
        if let (Some(dir), None) = (pins, entries) {
            pins::forget_entries(dir);
        }
        for map in entries.into_iter().chain([pins::PENDING]) {
            if let Some(path) = pins.and_then(|dir| pins::shared(dir, map)) {
                loader.map_pin_path(map.name, path);
            }
        }
        let mut ebpf = loader
            .override_global("DNS_PORTS", options.ports.as_array(), true)
            .override_global("RELEASE_MARK", &release_mark, true)
            .override_global("SHARED", &shared, true)
            .override_global("MARK_MASK", &mark_mask, true)
            .override_global("ENTRY_TIMES", &times, true)
            .map_max_entries("RECORDS", options.ring_bytes)
            .map_max_entries("SCRATCH", possible_cpus()?)
            .load(OBJECT)
            .map_err(load_error)?;
        for name in [EGRESS, INGRESS, HOLD, OPEN] {
            program_of(&mut ebpf, name)
                .ok_or(CaptureError::Object { what: name })?
                .load()
                .map_err(|error| load_error(error.into()))?;
        }
        let holders = take_map(&mut ebpf, "HOLDERS")?;
        let holders = Holders::new(holders, fd_of(&mut ebpf, HOLD)?)?;
        let parts = Parts::new(&mut ebpf)?;
        let entries = entries.and_then(|entries| id_of(&ebpf, entries.name));
        let unasked = Unasked::new(&mut ebpf)?;
        let sources = Sources::new(&mut ebpf)?;
        let shares = RingShares::new(&ebpf)?;
        let queries = PendingQueries::new(&ebpf)?;
        Ok(Self {
            ebpf,
            kind: options.attach,
            unasked,
            sources,
            shares,
            queries,
            holders,
            entries,
            parts,
            are_parts_kept: false,
            pins: None,
        })
    }

    /// Takes over the links of an earlier agent from now on, and keeps links for the next one if that is possible.
    pub(super) fn keep_links(&mut self, pins: Pins) {
        self.pins = Some(pins);
    }

    /// Where links are kept for the next agent, if they are.
    fn keeping(&mut self) -> Option<&mut Pins> {
        self.pins.as_mut().filter(|pins| pins.keeps())
    }

    /// A program is about to be put onto an interface: what it needs stays when the agent ends. One that ends before
    /// leaves nothing to read.
    fn keep_parts(&mut self) {
        let pins = self.pins.as_mut().filter(|pins| pins.keeps());
        let Some(pins) = pins.filter(|_| !self.are_parts_kept) else {
            return;
        };
        self.are_parts_kept = true;
        if let Err(error) = self.parts.pin(&mut self.ebpf, pins) {
            pins.keep_nothing(&error);
        }
    }

    /// How the program attaches, once it is known.
    pub fn kind(&self) -> Option<AttachKind> {
        self.kind
    }

    /// Whether the kernel has TCX, without attaching anything.
    ///
    /// # Errors
    ///
    /// Where the kernel does not say.
    pub fn kernel_has_tcx(&mut self) -> io::Result<bool> {
        let program = program_of(&mut self.ebpf, EGRESS);
        let program = program.ok_or_else(|| io::Error::other("the program is gone"))?;
        let program = program.fd().map_err(io::Error::other)?;
        tcx::is_there(program.as_fd())
    }

    /// The aya object, for what only tests and diagnostics need.
    pub fn ebpf_mut(&mut self) -> &mut Ebpf {
        &mut self.ebpf
    }

    /// Puts one program onto an interface, in place of that of an earlier agent if that one's link is
    /// there.
    fn put(
        &mut self,
        (name_of_program, hook): (&'static str, TcAttachType),
        name: &str,
        ifindex: u32,
        kind: AttachKind,
    ) -> Result<Place, AttachError> {
        let refused = |source| AttachError::Refused {
            name: name.to_owned(),
            kind,
            source,
        };
        let program = program_of(&mut self.ebpf, name_of_program).ok_or(AttachError::Gone)?;
        let attached = match kind {
            AttachKind::Tcx => {
                let left = self.pins.as_mut();
                if let Some((link, pin)) = left.and_then(|pins| pins.take(ifindex, name_of_program))
                {
                    match program.attach_to_link(link) {
                        Ok(link) => {
                            let link = program.take_link(link).map_err(refused)?;
                            return Ok(Place::new(link, Kept::Pinned(pin)));
                        }
                        // The interface that had this index is gone.
                        Err(error) => {
                            debug!(name, %error, "cannot use the link of an earlier agent")
                        }
                    }
                }
                // In front of the other programs, which can keep packets from those behind them.
                let first = TcAttachOptions::TcxOrder(LinkOrder::first());
                program.attach_with_options(name, hook, first)
            }
            AttachKind::Clsact => {
                let [first, second] = PRIORITIES.map(|priority| {
                    TcAttachOptions::Netlink(NlOptions {
                        priority,
                        handle: HANDLE,
                        ..NlOptions::default()
                    })
                });
                let attached = program.attach_with_options(name, hook, first);
                attached.or_else(|_| program.attach_with_options(name, hook, second))
            }
        };
        let link = attached.and_then(|link| program.take_link(link));
        let link = link.map_err(refused)?;
        match (kind, self.keeping()) {
            (AttachKind::Clsact, _) => Ok(self.filter(link)),
            (AttachKind::Tcx, None) => Ok(Place::new(link, Kept::Nothing)),
            (AttachKind::Tcx, Some(pins)) => match pins.keep(link, ifindex, name_of_program) {
                Ok((link, pin)) => Ok(Place::new(link, Kept::Pinned(pin))),
                Err(source) => {
                    pins.keep_nothing(&source);
                    Err(AttachError::Pin {
                        name: name.to_owned(),
                        source,
                    })
                }
            },
        }
    }

    /// Puts one program into the clsact filter of an earlier agent, in one step. `None` if there is no such filter.
    fn replace_filter(
        &mut self,
        (name_of_program, hook): (&'static str, TcAttachType),
        name: &str,
    ) -> Option<Place> {
        let program = program_of(&mut self.ebpf, name_of_program)?;
        let link = PRIORITIES.into_iter().find_map(|priority| {
            let filter = SchedClassifierLink::attached(name, hook, priority, HANDLE, None).ok()?;
            let replaced = program.attach_to_link(filter).inspect_err(|error| {
                debug!(interface = name, program = name_of_program, priority, %error, "no filter of an earlier agent");
            });
            program.take_link(replaced.ok()?).ok()
        })?;
        Some(self.filter(link))
    }

    /// A clsact filter as a place.
    fn filter(&mut self, link: SchedClassifierLink) -> Place {
        Place::new(
            link,
            match self.keeping() {
                None => Kept::Nothing,
                Some(_) => Kept::Filter,
            },
        )
    }

    /// Puts the program for answers onto an interface, and finds out how.
    fn put_first(&mut self, name: &str, ifindex: u32) -> Result<(AttachKind, Place), AttachError> {
        if self.kind != Some(AttachKind::Clsact) {
            match self.put(ANSWERS, name, ifindex, AttachKind::Tcx) {
                Err(error) if self.kind.is_none() && error.means_no_tcx() => {
                    debug!(%error, "no TCX");
                }
                result => return Ok((AttachKind::Tcx, result?)),
            }
        }
        let place = match self.replace_filter(ANSWERS, name) {
            Some(place) => place,
            None => {
                prepare_clsact(name, ifindex)?;
                self.put(ANSWERS, name, ifindex, AttachKind::Clsact)?
            }
        };
        Ok((AttachKind::Clsact, place))
    }

    /// Takes the program off an interface.
    fn give_up(&mut self, place: Place) {
        let pin = place.give_up();
        if let (Some(pin), Some(pins)) = (pin, &mut self.pins) {
            pins.remove(pin);
        }
    }

    fn found_kind(&mut self, kind: AttachKind) {
        if self.kind.is_some() {
            return;
        }
        info!(%kind, "hook of the TC programs");
        if kind == AttachKind::Clsact {
            // Open vSwitch 3.1 and 3.5: `adding policing qdisc failed: File exists`.
            warn!(
                "on this kernel, an interface has either the TC programs or Open vSwitch's ingress policing \
                 (ingress_policing_rate, ovn-kubernetes' bandwidth annotation); Linux 6.6 with TCX has no such \
                 conflict"
            );
        }
        self.kind = Some(kind);
    }
}

/// The programs' places on an interface.
#[derive(Debug)]
pub struct TcLink {
    kind: AttachKind,
    answers: Place,
    questions: Option<Place>,
}

/// A program's place on an interface. When it is dropped, the program goes, unless the place is kept for
/// the next agent.
#[derive(Debug)]
struct Place {
    /// There until it is dropped.
    link: Option<SchedClassifierLink>,
    kept: Kept,
}

/// What is left of a place when the agent ends.
#[derive(Debug)]
enum Kept {
    /// Nothing.
    Nothing,
    /// The link, by this file.
    Pinned(PathBuf),
    /// The filter, which the kernel removes only when it is told to.
    Filter,
}

impl Place {
    fn new(link: SchedClassifierLink, kept: Kept) -> Self {
        Self {
            link: Some(link),
            kept,
        }
    }

    /// Takes the program off the interface, as soon as the link's file is removed, if there is one.
    fn give_up(mut self) -> Option<PathBuf> {
        match mem::replace(&mut self.kept, Kept::Nothing) {
            Kept::Pinned(pin) => Some(pin),
            Kept::Nothing | Kept::Filter => None,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Kept::Filter = self.kept {
            mem::forget(self.link.take());
        }
    }
}

impl Attach for Program {
    type Link = TcLink;

    fn ifindex(&self, name: &str) -> Option<u32> {
        let name = std::ffi::CString::new(name).ok()?;
        // SAFETY: the name ends with a NUL.
        match unsafe { libc::if_nametoindex(name.as_ptr()) } {
            0 => None,
            ifindex => Some(ifindex),
        }
    }

    fn trust_sources(&mut self, ifindex: u32, sources: &SourceAddresses) {
        self.sources.set(ifindex, sources);
    }

    fn forget(&mut self, ifindex: u32) {
        self.sources.set(ifindex, &SourceAddresses::default());
        let forgotten = [
            self.shares.forget(ifindex),
            self.unasked.forget(ifindex),
            self.queries.forget(ifindex),
        ];
        for error in forgotten.into_iter().filter_map(Result::err) {
            warn!(ifindex, %error, "cannot remove what is remembered of an interface that is gone");
        }
    }

    fn attach(&mut self, name: &str, ifindex: u32) -> Result<TcLink, AttachError> {
        self.keep_parts();
        self.unasked.begin(ifindex);
        let (kind, answers) = self.put_first(name, ifindex)?;
        self.found_kind(kind);
        // The program is attached by the interface's name. Is it still the same interface?
        if self.ifindex(name) != Some(ifindex) {
            self.give_up(answers);
            return Err(AttachError::NoInterface {
                name: name.to_owned(),
            });
        }
        Ok(TcLink {
            kind,
            answers,
            questions: None,
        })
    }

    fn let_go_on(&mut self, ifindex: u32) -> bool {
        let (Some(pins), Some(entries)) = (&mut self.pins, self.entries) else {
            return false;
        };
        let programs = PROGRAMS.map(|(name, _)| name);
        let now = now();
        pins.let_go_on(ifindex, programs, entries, (now, now + GO_ON_MAX))
    }

    fn complete(&mut self, name: &str, ifindex: u32, link: &mut TcLink) -> Result<(), AttachError> {
        let replaced = match link.kind {
            AttachKind::Tcx => None,
            AttachKind::Clsact => self.replace_filter(QUESTIONS, name),
        };
        link.questions = Some(match replaced {
            Some(place) => place,
            None => self.put(QUESTIONS, name, ifindex, link.kind)?,
        });
        self.unasked.end_soon(ifindex);
        if self.ifindex(name) != Some(ifindex) {
            return Err(AttachError::NoInterface {
                name: name.to_owned(),
            });
        }
        Ok(())
    }

    fn look(&mut self, name: &str, ifindex: u32, link: &TcLink) -> Result<(), AttachError> {
        let mut others = Vec::new();
        for (name_of_program, hook) in PROGRAMS {
            let program = program_of(&mut self.ebpf, name_of_program).ok_or(AttachError::Gone)?;
            let own = program.info().map_err(io::Error::other);
            let found = own.and_then(|own| {
                let programs = hooks::programs(ifindex, hook, link.kind)?;
                Ok(hooks::in_front(programs, |it| it.program == Some(own.id())))
            });
            match found {
                Ok(Some(found)) => others.extend(hooks::texts(&found)),
                Ok(None) => {
                    return Err(AttachError::Removed {
                        name: name.to_owned(),
                        program: name_of_program,
                    });
                }
                // An interface that is gone is told of by an event.
                Err(error) => {
                    debug!(name, %error, "cannot find out which programs are on an interface")
                }
            }
        }
        match others.is_empty() {
            true => Ok(()),
            false => Err(AttachError::Behind {
                name: name.to_owned(),
                others: others.join(", "),
            }),
        }
    }

    fn detach(&mut self, link: TcLink) {
        self.give_up(link.answers);
        if let Some(questions) = link.questions {
            self.give_up(questions);
        }
    }

    fn sweep(&mut self) {
        if let Some(pins) = &mut self.pins {
            pins.sweep();
        }
    }
}

impl AttachError {
    /// Whether a kernel without TCX answers like this: it does not know the attach type
    /// (`link_create` in Linux `kernel/bpf/syscall.c`). With TCX, none of our arguments is
    /// invalid.
    fn means_no_tcx(&self) -> bool {
        matches!(
            self,
            Self::Refused { source: ProgramError::SyscallError(error), .. }
                if error.io_error.raw_os_error() == Some(libc::EINVAL)
        )
    }
}

/// Takes a map out of the object, as the type that works with it.
pub(super) fn take_map<M: TryFrom<Map>>(
    ebpf: &mut Ebpf,
    name: &'static str,
) -> Result<M, CaptureError> {
    let map = ebpf.take_map(name).and_then(|map| M::try_from(map).ok());
    map.ok_or(CaptureError::Object { what: name })
}

pub(super) fn program_of<'a>(ebpf: &'a mut Ebpf, name: &str) -> Option<&'a mut SchedClassifier> {
    ebpf.program_mut(name)?.try_into().ok()
}

/// The id of a hash map, if the kernel says it.
fn id_of(ebpf: &Ebpf, name: &str) -> Option<u32> {
    let Map::HashMap(data) = ebpf.map(name)? else {
        return None;
    };
    Some(data.info().ok()?.id())
}

/// The descriptor of a loaded program.
pub(super) fn fd_of<'a>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a ProgramFd, CaptureError> {
    let program = program_of(ebpf, name).ok_or(CaptureError::Object { what: name })?;
    program.fd().map_err(|error| load_error(error.into()))
}

/// The number of possible CPUs: each has a place of its own in which it makes its records.
fn possible_cpus() -> Result<u32, CaptureError> {
    let failed = |source| CaptureError::Io {
        operation: "find out how many CPUs there can be",
        source,
    };
    let count = aya::util::nr_cpus().map_err(|(_, source)| failed(source))?;
    u32::try_from(count).map_err(|error| failed(io::Error::other(error)))
}

/// Makes sure that the interface has a clsact qdisc, and no filter that a killed agent has left.
fn prepare_clsact(name: &str, ifindex: u32) -> Result<(), AttachError> {
    match tc::qdisc_add_clsact(name) {
        Ok(()) => return Ok(()),
        Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {}
        Err(source) => {
            return Err(AttachError::Clsact {
                name: name.to_owned(),
                source,
            });
        }
    }
    let standing = qdisc::at_ingress(ifindex).map_err(|source| AttachError::Clsact {
        name: name.to_owned(),
        source: source.into(),
    })?;
    match standing.as_deref() {
        Some("clsact") => {}
        kind => {
            return Err(AttachError::OtherQdisc {
                name: name.to_owned(),
                kind: kind.unwrap_or("unknown").to_owned(),
            });
        }
    }
    for (program, hook) in PROGRAMS {
        match tc::qdisc_detach_program(name, hook, program) {
            Ok(()) => info!(
                interface = name,
                program, "removed the filter of an earlier agent"
            ),
            Err(error) => debug!(
                interface = name, program, %error,
                "no filter of an earlier agent"
            ),
        }
    }
    Ok(())
}

/// What agents have left on an interface with clsact.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LeftFilters {
    /// The interface's name.
    pub interface: String,
    ifindex: u32,
    /// Whether clsact has filters of others, too.
    others: bool,
}

/// The interfaces of this network namespace on which agents have left filters of clsact. TCX has none.
///
/// # Errors
///
/// If the kernel does not answer.
pub fn left_filters() -> io::Result<Vec<LeftFilters>> {
    let mut found = Vec::new();
    for (interface, Link { ifindex, .. }) in survey::links()? {
        let of_hooks = PROGRAMS.map(|(_, hook)| qdisc::filters(ifindex, hook));
        let of_hooks: io::Result<Vec<_>> = of_hooks.into_iter().collect();
        let filters = match of_hooks {
            // It went meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => continue,
            of_hooks => of_hooks?.concat(),
        };
        let is_ours = |filter: &Filter| {
            let name = filter.name.as_deref();
            PROGRAMS.iter().any(|(program, _)| name == Some(*program))
        };
        let ours = filters.iter().filter(|filter| is_ours(filter)).count();
        if ours > 0 {
            found.push(LeftFilters {
                interface,
                ifindex,
                others: filters.len() > ours,
            });
        }
    }
    Ok(found)
}

impl LeftFilters {
    /// Removes the filters, and clsact itself if it has no other ones: Open vSwitch's ingress policing needs its place.
    /// No agent may run.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn remove(&self) -> io::Result<()> {
        let removed =
            match self.others {
                false => qdisc::remove_clsact(self.ifindex),
                true => PROGRAMS.into_iter().try_for_each(|(program, hook)| {
                    match tc::qdisc_detach_program(&self.interface, hook, program) {
                        Err(TcError::IoError(error)) if error.kind() == io::ErrorKind::NotFound => {
                            Ok(())
                        }
                        removed => removed.map_err(io::Error::other),
                    }
                }),
            };
        match removed {
            // The interface has gone, and took them with it.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            removed => removed,
        }
    }
}

/// Raises `RLIMIT_MEMLOCK`: before Linux 5.11, maps count against it, and its default is too low
/// for the ring buffer. If raising it is not allowed, loading fails and says so.
fn raise_memlock_limit() {
    let unlimited = rustix::process::Rlimit {
        current: None,
        maximum: None,
    };
    if let Err(error) = rustix::process::setrlimit(rustix::process::Resource::Memlock, unlimited) {
        debug!(%error, "cannot raise RLIMIT_MEMLOCK");
    }
}

fn load_error(error: EbpfError) -> CaptureError {
    match io_error(&error).and_then(io::Error::raw_os_error) {
        Some(libc::EPERM | libc::EACCES) if !is_verifiers_own(&error) => {
            CaptureError::Permission(error)
        }
        Some(libc::EINVAL) if !is_map_supported(MapType::RingBuf).unwrap_or(true) => {
            CaptureError::NoRingBuffer(error)
        }
        _ => CaptureError::Load(error),
    }
}

/// Whether the verifier refused the program. The verifier answers EACCES, too, but gives a reason.
/// One of its reasons is about rights again: without CAP_PERFMON, variable offsets into a packet
/// are "prohibited for !root" (`sanitize_err` in Linux kernel/bpf/verifier.c).
fn is_verifiers_own(error: &EbpfError) -> bool {
    let EbpfError::ProgramError(ProgramError::LoadError { verifier_log, .. }) = error else {
        return false;
    };
    let log = verifier_log.to_string();
    !log.is_empty() && !log.contains("prohibited for !root")
}

fn io_error(error: &EbpfError) -> Option<&io::Error> {
    match error {
        EbpfError::MapError(MapError::CreateError { io_error, .. })
        | EbpfError::ProgramError(ProgramError::LoadError { io_error, .. }) => Some(io_error),
        EbpfError::MapError(MapError::SyscallError(error))
        | EbpfError::ProgramError(ProgramError::SyscallError(error)) => Some(&error.io_error),
        _ => None,
    }
}
