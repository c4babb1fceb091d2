//! The kernel objects that outlive the agent, so that the next one misses no answer: the links of the programs on the
//! veths, their ring buffer, the pending queries, and the addresses that are open by a mark.
//!
//! All are pinned in a BPF file system. The next agent puts its own programs into the links, and reads the ring
//! buffer as soon as it knows the node. Its programs go on with the two maps. Nothing else is taken over, so few
//! layouts have to be the same (`docs/decisions/handover.md`).
//!
//! An agent pins its ring buffer before the first of its programs is on a veth, not at its start.

use std::{
    collections::BTreeSet,
    fs, io,
    num::NonZeroU32,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use aya::{
    maps::{Map, MapData, MapError, ProgramArray, RingBuf},
    pin::PinError,
    programs::{
        links::{FdLink, LinkError, PinnedLink},
        tc::SchedClassifierLink,
    },
};
use dnsflow_common::{
    key::{ENTRY_LAYOUT, PENDING_LAYOUT},
    record::{LAYOUT, LAYOUT_MIN, Record},
};
use dnsflow_core::{Timestamp, io::input::Frame};
use tracing::{debug, info, warn};

use super::{
    absent,
    earlier::EarlierPrograms,
    object_info,
    records::{self, Drained},
};

/// The magic number of the BPF file system (`BPF_FS_MAGIC` in Linux `include/uapi/linux/magic.h`).
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
/// Ring buffers of earlier agents that are read: several, if agents ended before they knew the node. Of more, those
/// behind the oldest are left out. Most programs write to the oldest: agents that end early have theirs at new pods
/// alone.
const LEFT_MAX: usize = 4;
/// For so long after its capture, an answer that an earlier agent held goes back. Its pod then still waits: resolvers
/// ask again after 5 s (glibc) or 2.5 s (musl). A killed agent's successor is ready within a second or so
/// (`the_agent_is_killed_and_comes_back`), which is longer than `--hold-max`. What is older nobody waits for, and it can
/// be as old as `--keep-flows`.
const GOES_BACK: Duration = Duration::from_secs(2);
/// How the names of pinned ring buffers begin. The layout and a number follow.
const RECORDS: &str = "records-";
/// The directory of the pinned links.
const LINKS: &str = "links";

/// Why nothing can be pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinsError {
    /// The directory cannot be used.
    #[error("cannot use the directory {path}")]
    Directory {
        /// The directory.
        path: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// It is on another file system.
    #[error(
        "{path} is not on a BPF file system: mount one (`mount -t bpf bpf /sys/fs/bpf`), and give the \
         agent's container the node's {path}"
    )]
    OtherFileSystem {
        /// The directory.
        path: String,
    },
    /// The kernel refuses.
    #[error("the kernel does not pin {path}")]
    Refused {
        /// The file.
        path: String,
        /// Why not.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn refused(path: &Path, error: impl std::error::Error + Send + Sync + 'static) -> PinsError {
    PinsError::Refused {
        path: path.display().to_string(),
        source: Box::new(error),
    }
}

/// What is pinned beside a ring buffer, and goes with it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Part {
    /// The array that leads to the program that opens.
    Openers,
    /// The array that says when the programs stop capturing.
    CaptureUntil,
    /// The program for answers.
    Answers,
    /// The program for questions.
    Questions,
}

impl Part {
    const ALL: [Self; 4] = [
        Self::Openers,
        Self::CaptureUntil,
        Self::Answers,
        Self::Questions,
    ];

    /// How the name of its file begins. The number of the ring buffer follows.
    const fn prefix(self) -> &'static str {
        match self {
            Self::Openers => "openers-",
            Self::CaptureUntil => "capture-until-",
            Self::Answers => "answers-",
            Self::Questions => "questions-",
        }
    }

    /// The file of the part that belongs to a ring buffer.
    fn of(self, records: &Path) -> PathBuf {
        let number = number(records).map_or(0, |(_, number)| number);
        records.with_file_name(format!("{}{number}", self.prefix()))
    }

    /// Whether this is the file of a part of some ring buffer.
    fn is_any(path: &Path) -> bool {
        let name = path.file_name().and_then(|name| name.to_str());
        let is_one = |part: Self| name.is_some_and(|name| name.starts_with(part.prefix()));
        Self::ALL.into_iter().any(is_one)
    }
}

/// The directory of what is pinned.
pub(super) struct Pins {
    dir: PathBuf,
    links: PathBuf,
    /// The links of earlier agents that this one has not taken over.
    untaken: BTreeSet<PathBuf>,
    /// The programs of earlier agents that may go on.
    earlier: Vec<EarlierPrograms>,
    /// The number of this agent's ring buffer.
    next: u64,
    /// Whether links are kept for the next agent. What an earlier agent has left is taken over in any case.
    keeps: bool,
}

/// A ring buffer of an earlier agent. It waits for the next agent until it is read.
pub struct Left {
    path: PathBuf,
    ring: RingBuf<MapData>,
}

impl Left {
    /// Has the programs that write to this ring buffer open no address from now on. They go on to capture.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn end_opening(&self) -> Result<(), MapError> {
        let map = MapData::from_pin(Part::Openers.of(&self.path));
        let openers = map.and_then(|map| ProgramArray::try_from(Map::ProgramArray(map)));
        absent(openers.and_then(|mut openers| openers.clear_index(&0)))
    }

    /// Hands at most `limit` frames that nobody has read to `each`, oldest first, as long as `each` returns `true`. An
    /// agent that ends leaves the others to the next one.
    ///
    /// An answer that was held for longer than `GOES_BACK` is handed over as one that has passed: it opens its
    /// addresses, but does not go back.
    pub fn drain(
        &mut self,
        limit: usize,
        now: Timestamp,
        mut each: impl FnMut(Frame<'_>) -> bool,
    ) -> Drained {
        for _ in 0..limit {
            let Some(item) = self.ring.next() else {
                return Drained::Empty;
            };
            let frame = Record::parse(&item).and_then(records::frame);
            let frame = frame.map(|frame| Frame {
                held: frame.held && now < frame.captured_at + GOES_BACK,
                ..frame
            });
            if !frame.is_none_or(&mut each) {
                break;
            }
        }
        Drained::Limit
    }

    /// Removes the ring buffer, which is read.
    pub fn remove(self) {
        remove_records(&self.path);
    }
}

impl Pins {
    /// Finds what earlier agents have left, oldest first.
    pub(super) fn open(dir: &Path) -> Result<(Self, Vec<Left>), PinsError> {
        let failed = |source| PinsError::Directory {
            path: dir.display().to_string(),
            source,
        };
        let links = dir.join(LINKS);
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&links).map_err(failed)?;
        let file_system = rustix::fs::statfs(&links).map_err(|error| failed(error.into()))?;
        if u64::try_from(file_system.f_type) != Ok(BPF_FS_MAGIC) {
            return Err(PinsError::OtherFileSystem {
                path: dir.display().to_string(),
            });
        }
        close_to_others(dir).map_err(failed)?;
        let untaken = files(&links).map_err(failed)?;
        let (left, next) = left(files(dir).map_err(failed)?);
        let (left, earlier): (Vec<Left>, Vec<_>) = left.into_iter().unzip();
        let pins = Self {
            dir: dir.to_owned(),
            links,
            untaken,
            earlier: earlier.into_iter().flatten().collect(),
            next,
            keeps: true,
        };
        Ok((pins, left))
    }

    /// Pins this agent's ring buffer.
    pub(super) fn keep_records(
        &self,
        pin: impl FnOnce(&Path) -> Result<(), PinError>,
    ) -> Result<(), PinsError> {
        let path = self.records();
        pin(&path).map_err(|error| refused(&path, error))
    }

    /// Pins a part of what goes with it.
    pub(super) fn keep_part(
        &self,
        part: Part,
        pin: impl FnOnce(&Path) -> Result<(), PinError>,
    ) -> Result<(), PinsError> {
        let path = part.of(&self.records());
        pin(&path).map_err(|error| refused(&path, error))
    }

    /// The file of this agent's ring buffer.
    fn records(&self) -> PathBuf {
        self.dir.join(records_file(self.next))
    }

    /// The directory.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether links are kept for the next agent.
    pub(super) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Keeps no further links: nothing can be pinned. Goes on to take over those of earlier agents, or two programs
    /// would sit on a veth, and each query would count for the earlier one.
    pub(super) fn keep_nothing(&mut self, error: &PinsError) {
        self.keeps = false;
        not_kept(&self.dir, error);
    }

    /// Has programs of these names of an earlier agent, which mark by this map (its id), go on at this interface until
    /// then. Returns whether there are any.
    pub(super) fn let_go_on(
        &mut self,
        ifindex: u32,
        programs: [&str; 2],
        map: u32,
        (now, until): (Timestamp, Timestamp),
    ) -> bool {
        let links = programs.map(|program| {
            let path = self.path(ifindex, program);
            let path = Some(path).filter(|path| self.untaken.contains(path))?;
            let link = object_info::tcx_link(&path).ok()?;
            Some(link).filter(|link| link.ifindex == ifindex)
        });
        let [Some(first), Some(second)] = links else {
            return false;
        };
        // Another agent may have ended before it had replaced both.
        [first, second].iter().all(|link| {
            let mut earlier = self.earlier.iter_mut();
            let earlier = earlier.find(|earlier| earlier.are_at(link, map));
            earlier.is_some_and(|earlier| earlier.go_on(now, until))
        })
    }

    /// The link that a program of this name has on this interface from an earlier agent, and its file.
    pub(super) fn take(
        &mut self,
        ifindex: u32,
        program: &str,
    ) -> Option<(SchedClassifierLink, PathBuf)> {
        let path = self.path(ifindex, program);
        if !self.untaken.remove(&path) {
            return None;
        }
        let link = PinnedLink::from_pin(&path).and_then(|link| FdLink::from(link).try_into());
        match link {
            Ok(link) => Some((link, path)),
            Err(error) => {
                debug!(path = %path.display(), %error, "not a link");
                None
            }
        }
    }

    /// Pins the link of a program of this name to this interface. Returns the link and its file.
    pub(super) fn keep(
        &self,
        link: SchedClassifierLink,
        ifindex: u32,
        program: &str,
    ) -> Result<(SchedClassifierLink, PathBuf), PinsError> {
        let path = self.path(ifindex, program);
        // The link of an interface that is gone, or that could not be taken over.
        remove(&path);
        let link = FdLink::try_from(link).map_err(|error| refused(&path, error))?;
        let link = link.pin(&path).map_err(|error| refused(&path, error))?;
        let link = FdLink::from(link).try_into();
        Ok((
            link.map_err(|error: LinkError| refused(&path, error))?,
            path,
        ))
    }

    /// Removes a link that this agent has given up. If the link stays, the program is still on its interface, and the
    /// next try to attach there takes the link over.
    pub(super) fn remove(&mut self, path: PathBuf) {
        if !remove(&path) {
            self.untaken.insert(path);
        }
    }

    /// Removes the links of earlier agents that were not taken over: their interfaces are gone, or are
    /// none of a pod.
    pub(super) fn sweep(&mut self) {
        for path in std::mem::take(&mut self.untaken) {
            remove(&path);
        }
    }

    fn path(&self, ifindex: u32, program: &str) -> PathBuf {
        self.links.join(link_file(ifindex, program))
    }
}

/// The name of the file of the link of a program to an interface.
fn link_file(ifindex: u32, program: &str) -> String {
    format!("{ifindex}-{program}")
}

/// The id of the program that an agent's pinned link has on an interface.
pub(super) fn linked_program(dir: &Path, ifindex: u32, program: &str) -> Option<u32> {
    let path = dir.join(LINKS).join(link_file(ifindex, program));
    let link = object_info::tcx_link(&path).ok()?;
    Some(link.program).filter(|_| link.ifindex == ifindex)
}

/// Takes a directory that is not the agent's own work away from other users: the kubelet makes missing directories with
/// mode 0755 (`makeDir` in its `pkg/volume/hostpath`).
fn close_to_others(dir: &Path) -> io::Result<()> {
    if fs::metadata(dir)?.permissions().mode() & 0o077 == 0 {
        return Ok(());
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

/// A map that the programs of the next agent go on with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared {
    /// Its name in the BPF object.
    pub(super) name: &'static str,
    /// How the name of its file begins. Its layout follows.
    file: &'static str,
    layout: u32,
    /// The bits of the packet's mark that its values are made for, if they are not the default ones; they follow
    /// the layout.
    mask: Option<NonZeroU32>,
    /// What it means if a map of another layout or mask is found.
    lost: &'static str,
}

impl Shared {
    fn path(self, dir: &Path) -> PathBuf {
        let mask = self.mask.map(|mask| format!("-{mask:08x}"));
        let name = format!("{}{}{}", self.file, self.layout, mask.unwrap_or_default());
        dir.join(name)
    }
}

/// The default of `--mark-mask`. Its map has no mask in its name, as no map had in earlier versions.
const UNNAMED_MASK: NonZeroU32 = NonZeroU32::new(0xffe0_0000).unwrap();

/// The addresses that pods may reach by a group, whose number is in these bits of the packet's mark. To programs with
/// another mask, the values would be other numbers, and bits that are not theirs.
pub(super) fn entries(mask: NonZeroU32) -> Shared {
    Shared {
        name: "ENTRIES",
        file: "entries-",
        layout: ENTRY_LAYOUT,
        mask: Some(mask).filter(|mask| *mask != UNNAMED_MASK),
        lost: "ignoring the addresses left by an agent of another version or --mark-mask: without a journal, they \
               close until the pods ask again",
    }
}

/// The queries that wait for their answers.
pub(super) const PENDING: Shared = Shared {
    name: "PENDING",
    file: "pending-",
    layout: PENDING_LAYOUT,
    mask: None,
    lost: "ignoring the queries left by an agent of another version: late answers to them open nothing",
};

/// Says that answers will be missed, why, and what to do.
pub(super) fn not_kept(dir: &Path, error: &PinsError) {
    warn!(
        dir = %dir.display(),
        error = error as &dyn std::error::Error,
        "cannot pin to --pin-dir: DNS answers between this agent and the next one open nothing; mount a writable \
         directory of the node's BPF file system"
    );
}

/// Removes the marks of earlier agents. The programs of one without marks do not know them.
pub(super) fn forget_entries(dir: &Path) {
    let file = entries(UNNAMED_MASK).file;
    for path in files(dir).unwrap_or_default() {
        let name = path.file_name().and_then(|name| name.to_str());
        if name.is_some_and(|name| name.starts_with(file)) {
            remove(&path);
        }
    }
}

/// The file of this map, for programs that are about to be loaded. Maps of other layouts or masks are removed.
/// `None` if the map is neither there nor can be pinned.
pub(super) fn shared(dir: &Path, map: Shared) -> Option<PathBuf> {
    let path = map.path(dir);
    for other in files(dir).ok()? {
        let name = other.file_name().and_then(|name| name.to_str());
        if other != path && name.is_some_and(|name| name.starts_with(map.file)) {
            warn!(path = %other.display(), "{}", map.lost);
            remove(&other);
        }
    }
    let can_be_shared = MapData::from_pin(&path).is_ok()
        || rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok();
    can_be_shared.then_some(path)
}

/// Removes everything that is pinned in this directory, and the directory, unless a file system is mounted there.
///
/// # Errors
///
/// If a file or a directory is left.
pub fn remove_all(dir: &Path) -> io::Result<()> {
    for part in [dir.join(LINKS), dir.to_owned()] {
        let found = match files(&part) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found?,
        };
        for path in found {
            fs::remove_file(path)?;
        }
        match fs::remove_dir(&part) {
            // A container has its directories of the node by mounts, in a file system that it may not change.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::ResourceBusy | io::ErrorKind::ReadOnlyFilesystem
                ) => {}
            removed => removed?,
        }
    }
    Ok(())
}

/// The number of a ring buffer, and its file.
type Numbered = (u64, PathBuf);

/// The ring buffers among these files, oldest first, with the programs that write to them, and the number of the next
/// one. Those of another layout are removed, and of too many those behind the oldest.
fn left(files: BTreeSet<PathBuf>) -> (Vec<(Left, Option<EarlierPrograms>)>, u64) {
    let mut known: Vec<Numbered> = Vec::new();
    let mut others = Vec::new();
    for path in files {
        match number(&path) {
            Some((LAYOUT_MIN..=LAYOUT, number)) => known.push((number, path)),
            Some(_) => {
                warn!(
                    path = %path.display(),
                    "ignoring the answers left by an agent of another version: the pods ask again after the TTL"
                );
                remove_records(&path);
            }
            None => others.push(path),
        }
    }
    // Without its ring buffer, a program opens addresses that no agent hears of.
    for path in others.iter().filter(|path| Part::is_any(path)) {
        let is_part = |records: &Path| Part::ALL.iter().any(|part| part.of(records) == *path);
        if !known.iter().any(|(_, records)| is_part(records)) {
            remove(path);
        }
    }
    let next = known
        .iter()
        .map(|(number, _)| number + 1)
        .max()
        .unwrap_or(0);
    let (kept, too_many) = choose(known);
    for (_, path) in too_many {
        warn!(path = %path.display(), "too many agents have left answers; ignoring those of one that ended early");
        remove_records(&path);
    }
    let open = |(_, path): Numbered| {
        let records = MapData::from_pin(&path);
        let earlier = records.as_ref().ok().and_then(|records| {
            let part = |part: Part| part.of(&path);
            EarlierPrograms::of(records, part)
        });
        let ring = records.and_then(|records| RingBuf::try_from(Map::RingBuf(records)));
        match ring {
            Ok(ring) => Some((Left { path, ring }, earlier)),
            Err(error) => {
                warn!(path = %path.display(), %error, "cannot read the answers left by an earlier agent");
                remove_records(&path);
                None
            }
        }
    };
    (kept.into_iter().filter_map(open).collect(), next)
}

/// The ring buffers that are read, oldest first, and those that are too many ([`LEFT_MAX`]).
fn choose(mut known: Vec<Numbered>) -> (Vec<Numbered>, Vec<Numbered>) {
    known.sort();
    let too_many = match known.len().checked_sub(LEFT_MAX) {
        Some(too_many) => known.drain(1..=too_many).collect(),
        None => Vec::new(),
    };
    (known, too_many)
}

/// The name of the file of the ring buffer with this number.
fn records_file(number: u64) -> String {
    format!("{RECORDS}{LAYOUT}-{number}")
}

/// Removes a ring buffer, and what goes with it.
fn remove_records(path: &Path) {
    for part in Part::ALL {
        remove(&part.of(path));
    }
    remove(path);
}

/// The layout and the number in the name of a ring buffer's file.
fn number(path: &Path) -> Option<(u32, u64)> {
    let (layout, number) = path
        .file_name()?
        .to_str()?
        .strip_prefix(RECORDS)?
        .split_once('-')?;
    Some((layout.parse().ok()?, number.parse().ok()?))
}

fn files(dir: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            files.insert(entry.path());
        }
    }
    Ok(files)
}

/// Removes a file that may be gone. Whether it is gone now.
fn remove(path: &Path) -> bool {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            info!(path = %path.display(), %error, "cannot remove pinned objects");
            false
        }
        Ok(()) | Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_buffers_file_says_layout_and_number() {
        let of = |name: &str| number(&Path::new("/sys/fs/bpf/dnsflow").join(name));
        assert_eq!(of("records-1-0"), Some((1, 0)));
        assert_eq!(of("records-12-345"), Some((12, 345)));
        for other in [
            "links",
            "records-1",
            "records--1",
            "records-1-x",
            "maps-1-0",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn of_too_many_ring_buffers_the_oldest_and_the_newest_are_read() {
        let files = |numbers: &[u64]| -> Vec<_> {
            let file = |number: &u64| (*number, records_file(*number).into());
            numbers.iter().map(file).collect()
        };
        let cases: [(&[u64], &[u64], &[u64]); 4] = [
            (&[], &[], &[]),
            (&[9, 10, 8, 7], &[7, 8, 9, 10], &[]),
            (&[10, 11, 7, 8, 9], &[7, 9, 10, 11], &[8]),
            (&[10, 100, 11, 7, 8, 9], &[7, 10, 11, 100], &[8, 9]),
        ];
        for (found, read, too_many) in cases {
            let expected = (files(read), files(too_many));
            assert_eq!(choose(files(found)), expected, "{found:?}");
        }
    }

    #[test]
    fn entries_with_another_mask_or_layout_are_left_behind() {
        let dir = std::env::temp_dir().join(format!("dnsflow-masks-{}", std::process::id()));
        fs::create_dir(&dir).expect("it is new");
        let file = |mask: u32| {
            let mask = NonZeroU32::new(mask).expect("bits");
            shared(&dir, entries(mask)).expect("the directory can be written to")
        };
        let masks = [UNNAMED_MASK.get(), 0x00f0_0000, 0x000f_0000];
        for mask in masks {
            let former = file(mask);
            fs::write(&former, "pinned").expect("it can be written");
            assert_eq!(file(mask), former);
            assert_eq!(files(&dir).expect("a list"), [former].into());
        }
        fs::write(dir.join("entries-1"), "of another layout").expect("it can be written");
        let layout_alone = dir.join(format!("entries-{ENTRY_LAYOUT}"));
        assert_eq!(file(UNNAMED_MASK.get()), layout_alone);
        assert!(files(&dir).expect("a list").is_empty());
        fs::remove_dir_all(&dir).expect("it is ours");
    }

    #[test]
    fn what_cannot_be_read_is_removed_and_the_numbers_go_on() {
        let dir = std::env::temp_dir().join(format!("dnsflow-pins-{}", std::process::id()));
        fs::create_dir(&dir).expect("it is new");
        let other = LAYOUT + 1;
        let names = [
            format!("records-{LAYOUT}-7"),
            format!("records-{other}-9"),
            "openers-7".into(),
            "answers-9".into(),
            "questions-3".into(),
            "else".into(),
        ];
        for name in &names {
            fs::write(dir.join(name), "not pinned").expect("it can be written");
        }
        let (left, next) = left(files(&dir).expect("it can be listed"));
        assert_eq!((left.len(), next), (0, 8));
        assert_eq!(
            files(&dir).expect("it can be listed"),
            [dir.join("else")].into()
        );
        fs::remove_dir_all(&dir).expect("it is ours");
    }
}
