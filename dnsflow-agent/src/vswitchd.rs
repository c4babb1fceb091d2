//! The edge that asks ovs-vswitchd about its datapath: megaflows that drop, and the duration of revalidator passes.
//!
//! A confirmed flow decides over packets that no megaflow covers. A megaflow that drops, for the address or for a
//! neighbour of it, goes on dropping until a revalidator has checked it again. The engine asks whether such a
//! megaflow exists (`revalidation.rs` of the core). This edge dumps the megaflows of the path and answers. It also
//! reads the report about revalidators (`upcall/show`), once a second, and behind changes that somebody waits for.
//! From the report it makes an estimate, for the case that the datapath cannot be asked.
//!
//! One dump serves the paths of all interfaces: for each dump, vswitchd looks at all megaflows. Where these are too
//! many for one answer, each interface is asked about by itself for some time, and one that has too many by itself is
//! not: a pod makes megaflows by its packets, and its own paths alone may remain unknown. Such a look ends after a while,
//! and the next one begins with the interface behind: otherwise answers would wait for dozens of dumps.
//!
//! Both go over vswitchd's control socket (ovs-appctl(8): JSON-RPC 1.0). The edge asks nothing else, and no thread of
//! the agent waits for it. If vswitchd does not answer, the engine uses the estimate. The estimate is a default then,
//! which is logged once.

pub mod megaflows;
mod passes;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use dnsflow_ovsdb::framing::{Framer, FramingError, Piece};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::mpsc,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use dnsflow_core::{Input, Timestamp, io::input::Looked, values::connection};

use crate::{
    causes::{Causes, with_causes},
    clock::now,
};
use passes::Passes;

/// How often vswitchd is asked.
const INTERVAL: Duration = Duration::from_secs(1);
/// The longest wait for an answer. vswitchd answers between two rounds of its other work.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer: some ten thousand megaflows.
const ANSWER_MAX_BYTES: usize = 4 << 20;
/// For so long, an answer that was too long is not asked for again.
const TOO_LONG_PAUSE: Duration = Duration::from_secs(10);
/// A look at one interface after the other begins no further dump after this time. An answer that comes during such a
/// look waits for the rest of it, for a pause as long, and for its own look: three times as long, and still shorter than
/// the longest wait (`Revalidation` of the core).
const LOOK_MAX: Duration = Duration::from_millis(100);

/// vswitchd's report about its revalidators: of several datapaths, the greatest numbers.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Revalidation {
    /// Megaflows in the datapath.
    pub flows: u64,
    /// How long a pass over all of them took, in whole milliseconds, at least one.
    pub pass: Duration,
}

/// Why there is no answer of vswitchd.
#[derive(Debug, thiserror::Error)]
pub enum VswitchdError {
    /// The pid file, which names the socket, cannot be read.
    #[error("cannot read {path}")]
    PidFile {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The pid file holds no number.
    #[error("{path} holds no process id")]
    NoPid {
        /// The file.
        path: PathBuf,
    },
    /// The socket cannot be used.
    #[error("cannot talk to {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// No answer in time.
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Silent,
    /// The answer is no JSON object.
    #[error(transparent)]
    Framing(#[from] FramingError),
    /// The answer is no reply.
    #[error("the answer is no reply of JSON-RPC")]
    Json(#[from] serde_json::Error),
    /// vswitchd does not know the command, or cannot carry it out.
    #[error("`{command}` is refused: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// vswitchd's words.
        reason: String,
    },
    /// The text does not have the expected form.
    #[error("the reply to `{command}` lacks {expected}")]
    Unreadable {
        /// The command.
        command: &'static str,
        /// What its text should hold.
        expected: &'static str,
    },
}

impl VswitchdError {
    fn is_too_long(&self) -> bool {
        matches!(self, Self::Framing(FramingError::TooLong { .. }))
    }
}

impl Revalidation {
    /// Reads what `upcall/show` prints, the same in Open vSwitch 3.1, 3.5 and 4.0
    /// (`upcall_unixctl_show` in its ofproto/ofproto-dpif-upcall.c). `None` where it says nothing
    /// of flows or durations.
    pub fn parse(text: &str) -> Option<Self> {
        let mut found = (None, None);
        for line in text.lines() {
            let Some((key, value)) = line.split_once(':') else {
                continue;
            };
            match key.trim() {
                "flows" => found.0 = found.0.max(Some(number(value, "(current ", ")")?)),
                "dump duration" => found.1 = found.1.max(Some(number(value, " ", "ms")?)),
                _ => {}
            }
        }
        let (flows, pass_ms) = found;
        Some(Self {
            flows: flows?,
            pass: Duration::from_millis(pass_ms?),
        })
    }
}

/// The number between these two.
fn number(text: &str, before: &str, after: &str) -> Option<u64> {
    let (_, text) = text.split_once(before)?;
    let (digits, _) = text.split_once(after)?;
    digits.parse().ok()
}

/// An estimate of how long a pass of the revalidators takes behind a change; shared between
/// threads.
#[derive(Debug)]
pub struct Estimate(AtomicU64);

impl Default for Estimate {
    fn default() -> Self {
        Self(AtomicU64::new(nanos(passes::UNKNOWN)))
    }
}

impl Estimate {
    /// The latest.
    pub fn time(&self) -> Duration {
        let Self(nanos) = self;
        Duration::from_nanos(nanos.load(Relaxed))
    }

    fn set(&self, time: Duration) {
        let Self(nanos_now) = self;
        nanos_now.store(nanos(time), Relaxed);
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Keeps `estimate` up to date and answers `looks`, each with one [`Input::Dropping`], for ever.
/// vswitchd has its control socket in the directory of `openflow_socket`, whose name begins with
/// that of the bridge.
pub async fn watch(
    openflow_socket: &Path,
    estimate: &Estimate,
    mut looks: mpsc::Receiver<Vec<connection::Path>>,
    inputs: mpsc::Sender<Input>,
) {
    let directory = openflow_socket.parent().unwrap_or(Path::new("."));
    let bridge = openflow_socket.file_stem().unwrap_or_default();
    let mut watcher = Watcher::new(directory, &bridge.to_string_lossy());
    let mut read_at = now();
    // When a pass behind a change that answers wait for should be over.
    let mut changed_by: Option<Timestamp> = None;
    loop {
        let wake_at = changed_by.map_or(read_at, |at| at.min(read_at));
        tokio::select! {
            biased;
            look = looks.recv() => {
                let Some(paths) = look else { return };
                let looked = watcher.look(paths).await;
                if inputs.send(Input::Dropping(looked)).await.is_err() {
                    return;
                }
                changed_by.get_or_insert(now() + estimate.time());
            }
            () = sleep(wake_at.since(now())) => {
                let is_behind_change = changed_by.take_if(|at| *at <= now()).is_some();
                watcher.read(estimate, is_behind_change).await;
                read_at = now() + INTERVAL;
            }
        }
    }
}

/// The edge's state.
#[derive(Debug)]
struct Watcher {
    vswitchd: Vswitchd,
    bridge: String,
    /// The name of the bridge's datapath, once it was found: there can be others.
    datapath: Option<String>,
    passes: Passes,
    /// Until then, each interface is asked about by itself.
    alone_until: Timestamp,
    /// The interfaces that are not asked about until then.
    too_long_until: BTreeMap<Arc<str>, Timestamp>,
    /// The IP version and the interface that were asked about last by themselves.
    last_alone: Option<(bool, Arc<str>)>,
    /// How long a look takes that asks about each interface by itself.
    look_max: Duration,
    causes: Causes<String>,
}

impl Watcher {
    /// Nothing is known yet of the bridge of a vswitchd that has its sockets in this directory.
    fn new(directory: &Path, bridge: &str) -> Self {
        Self {
            vswitchd: Vswitchd::new(directory),
            bridge: bridge.to_owned(),
            datapath: None,
            passes: Passes::default(),
            alone_until: Timestamp::default(),
            too_long_until: BTreeMap::new(),
            last_alone: None,
            look_max: LOOK_MAX,
            causes: Causes::default(),
        }
    }

    /// Reads how long the revalidators take.
    async fn read(&mut self, estimate: &Estimate, is_behind_change: bool) {
        match self.vswitchd.revalidation().await {
            Ok(answer) => {
                self.passes.note(answer, is_behind_change, now());
                let time = self.passes.estimate();
                estimate.set(time);
                let Revalidation { flows, pass } = answer;
                debug!(flows, ?pass, is_behind_change, estimate = ?time, "revalidation");
                if self.causes.end() {
                    info!(estimate = ?time, "ovs-vswitchd reports its revalidation time");
                }
            }
            Err(error) => {
                self.passes = Passes::default();
                self.datapath = None;
                estimate.set(passes::UNKNOWN);
                let error = with_causes(&error);
                if self.causes.is_news(error.clone()) {
                    warn!(
                        error,
                        estimate = ?passes::UNKNOWN,
                        "ovs-vswitchd does not report its revalidation time; using a default"
                    );
                }
            }
        }
    }

    /// Looks for megaflows that drop on these paths.
    async fn look(&mut self, mut paths: Vec<connection::Path>) -> Looked {
        let mut looked = Looked::default();
        let began_at = now();
        self.too_long_until.retain(|_, until| *until > began_at);
        // A dump is for one IP version.
        paths.sort_by(|one, other| dump_of(one).cmp(&dump_of(other)));
        if began_at < self.alone_until
            && let Some((is_v6, interface)) = &self.last_alone
        {
            // In turns: the paths for which there is no time are those of other interfaces in each look.
            let was_before = |path: &connection::Path| dump_of(path) <= (*is_v6, interface);
            let next = paths.partition_point(was_before);
            paths.rotate_left(next);
        }
        let mut paths = &paths[..];
        let mut has_asked_alone = false;
        while let Some(first) = paths.first() {
            let is_alone = now() < self.alone_until;
            let (is_v6, interface) = dump_of(first);
            let fits = |path: &&connection::Path| {
                let of_path = dump_of(path);
                of_path.0 == is_v6 && (!is_alone || of_path.1 == interface)
            };
            let (part, rest) = paths.split_at(paths.iter().take_while(fits).count());
            if is_alone {
                let is_late = has_asked_alone && now().since(began_at) >= self.look_max;
                if is_late || self.too_long_until.contains_key(interface) {
                    looked.unknown.extend_from_slice(part);
                    paths = rest;
                    continue;
                }
                has_asked_alone = true;
                self.last_alone = Some((is_v6, Arc::clone(interface)));
            }
            match self.dropping(part).await {
                Ok(mut dropping) => looked.dropping.append(&mut dropping),
                // The port of an interface that is gone cannot be filtered for (`dpctl_dump_flows` in Open vSwitch's
                // lib/dpctl.c). The other interfaces are still there.
                Err(error @ VswitchdError::Refused { .. }) => {
                    debug!(error = with_causes(&error), "cannot read some megaflows");
                    self.datapath = None;
                    looked.unknown.extend_from_slice(part);
                }
                Err(error) if !error.is_too_long() => {
                    debug!(error = with_causes(&error), "cannot read the megaflows");
                    self.datapath = None;
                    looked.unknown.extend_from_slice(paths);
                    return looked;
                }
                Err(_) => {
                    let until = now() + TOO_LONG_PAUSE;
                    self.alone_until = until;
                    if is_alone {
                        debug!(interface = &**interface, "too many megaflows");
                        self.too_long_until.insert(Arc::clone(interface), until);
                    }
                    // Once more, with what is known now.
                    continue;
                }
            }
            paths = rest;
        }
        looked
    }

    /// The paths on which a megaflow drops. All are of one IP version.
    async fn dropping(
        &mut self,
        paths: &[connection::Path],
    ) -> Result<Vec<connection::Path>, VswitchdError> {
        let datapath = match &self.datapath {
            Some(datapath) => datapath,
            None => {
                let found = self.vswitchd.datapath_of(&self.bridge).await?;
                self.datapath.insert(found)
            }
        };
        let Some(filter) = megaflows::filter(paths) else {
            return Ok(Vec::new());
        };
        let text = self.vswitchd.megaflows(datapath, &filter).await?;
        Ok(megaflows::dropping(&text, paths))
    }
}

/// The dump that tells of a path: whether it is for IPv6, and the interface.
fn dump_of(path: &connection::Path) -> (bool, &Arc<str>) {
    (path.addresses.dst().is_ipv6(), &path.interface)
}

/// Whether packets of the bridge behind this OpenFlow socket pass the kernel's datapath.
///
/// # Errors
///
/// If ovs-vswitchd does not say.
pub async fn is_in_kernel(openflow_socket: &Path) -> Result<bool, VswitchdError> {
    let directory = openflow_socket.parent().unwrap_or(Path::new("."));
    let bridge = openflow_socket.file_stem().unwrap_or_default();
    let mut vswitchd = Vswitchd::new(directory);
    let datapath = vswitchd.datapath_of(&bridge.to_string_lossy()).await?;
    Ok(datapath.starts_with("system@"))
}

/// The control socket of a vswitchd.
#[derive(Debug)]
pub struct Vswitchd {
    directory: PathBuf,
    answer_max_bytes: usize,
    connection: Option<Connection>,
}

#[derive(Debug)]
struct Connection {
    path: PathBuf,
    stream: UnixStream,
    framer: Framer,
}

/// `ovs-appctl upcall/show`: what vswitchd says of its revalidators.
const SHOW_REVALIDATORS: &str = "upcall/show";
/// `ovs-appctl dpif/show`: each datapath, and below it its bridges.
const SHOW_DATAPATHS: &str = "dpif/show";
/// `ovs-appctl dpctl/dump-flows --names DATAPATH filter=…`: megaflows, one on each line, with the names
/// of ports in place of their numbers.
const DUMP_MEGAFLOWS: &str = "dpctl/dump-flows";
/// `ovs-appctl dpctl/dump-conntrack DATAPATH`: connections, one on each line.
const DUMP_CONNECTIONS: &str = "dpctl/dump-conntrack";

/// A reply; vswitchd has an error's text in `error`, or null.
#[derive(Deserialize)]
struct Reply {
    #[serde(default)]
    result: Option<String>,
    #[serde(default)]
    error: Option<String>,
}

impl Vswitchd {
    /// The vswitchd that has its sockets and its pid file in this directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            answer_max_bytes: ANSWER_MAX_BYTES,
            connection: None,
        }
    }

    /// Takes answers of up to so many bytes.
    pub fn with_answer_max(self, answer_max_bytes: usize) -> Self {
        Self {
            answer_max_bytes,
            ..self
        }
    }

    /// How long its revalidators take.
    ///
    /// # Errors
    ///
    /// If there is no answer, or the answer cannot be read.
    pub async fn revalidation(&mut self) -> Result<Revalidation, VswitchdError> {
        let text = self.ask(&[SHOW_REVALIDATORS]).await?;
        Revalidation::parse(&text).ok_or(VswitchdError::Unreadable {
            command: SHOW_REVALIDATORS,
            expected: "\"flows : (current N)\" and \"dump duration : Nms\"",
        })
    }

    /// The name of the datapath that a bridge is in (`netdev@ovs-netdev`).
    ///
    /// # Errors
    ///
    /// If there is no answer, or the answer does not name the bridge.
    pub async fn datapath_of(&mut self, bridge: &str) -> Result<String, VswitchdError> {
        let text = self.ask(&[SHOW_DATAPATHS]).await?;
        datapath_of(&text, bridge).ok_or(VswitchdError::Unreadable {
            command: SHOW_DATAPATHS,
            expected: "a datapath with the bridge",
        })
    }

    /// The connections that the datapath of a bridge tracks, one on each line. Only ovs-vswitchd's own
    /// datapath (`netdev`) can be asked so.
    ///
    /// # Errors
    ///
    /// If there is no answer, or the answer is too long.
    pub async fn connections(&mut self, bridge: &str) -> Result<String, VswitchdError> {
        let datapath = self.datapath_of(bridge).await?;
        self.ask(&[DUMP_CONNECTIONS, &datapath]).await
    }

    /// The megaflows of a datapath that pass a filter, one on each line.
    ///
    /// # Errors
    ///
    /// If there is no answer, or the answer is too long.
    pub async fn megaflows(
        &mut self,
        datapath: &str,
        filter: &str,
    ) -> Result<String, VswitchdError> {
        let filter = format!("filter={filter}");
        let command = [DUMP_MEGAFLOWS, "--names", datapath, &filter];
        self.ask(&command).await
    }

    /// Gives a command with its arguments, and returns the text that it prints.
    ///
    /// The connection is kept for the next command; after an error, the next command opens another
    /// one.
    ///
    /// # Errors
    ///
    /// If there is no answer.
    pub async fn ask(&mut self, command: &[&str]) -> Result<String, VswitchdError> {
        let answer = async {
            if let Some(mut connection) = self.connection.take() {
                match connection.ask(command).await {
                    // The ovs-vswitchd of this connection may have ended meanwhile.
                    Err(VswitchdError::Socket { .. }) => {}
                    answer => {
                        self.connection = answer.is_ok().then_some(connection);
                        return answer;
                    }
                }
            }
            let mut connection = self.open().await?;
            let text = connection.ask(command).await?;
            self.connection = Some(connection);
            Ok(text)
        };
        timeout(PATIENCE, answer)
            .await
            .map_err(|_| VswitchdError::Silent)?
    }

    async fn open(&self) -> Result<Connection, VswitchdError> {
        Connection::open(&self.directory, self.answer_max_bytes).await
    }
}

/// Reads what `dpif/show` prints: a line for each datapath, `netdev@ovs-netdev: hit:1 missed:2`, then
/// more deeply its bridges, `  br-int:`, and their ports (`dpif_show_backer` in Open vSwitch's
/// ofproto/ofproto-dpif.c).
fn datapath_of(text: &str, bridge: &str) -> Option<String> {
    let mut datapath = None;
    for line in text.lines() {
        if line.starts_with(' ') {
            if line.trim().strip_suffix(':') == Some(bridge) {
                return datapath.map(str::to_owned);
            }
        } else {
            datapath = line.split(": ").next();
        }
    }
    None
}

impl Connection {
    /// The socket is named after the process (`unixctl_server_create` in Open vSwitch's
    /// lib/unixctl.c).
    async fn open(directory: &Path, answer_max_bytes: usize) -> Result<Self, VswitchdError> {
        let pid_file = directory.join("ovs-vswitchd.pid");
        let pid = tokio::fs::read_to_string(&pid_file).await;
        let pid = match pid {
            Ok(text) => text.trim().parse::<u32>(),
            Err(source) => {
                return Err(VswitchdError::PidFile {
                    path: pid_file,
                    source,
                });
            }
        };
        let Ok(pid) = pid else {
            return Err(VswitchdError::NoPid { path: pid_file });
        };
        let path = directory.join(format!("ovs-vswitchd.{pid}.ctl"));
        match UnixStream::connect(&path).await {
            Ok(stream) => Ok(Self {
                path,
                stream,
                framer: Framer::with_limit(answer_max_bytes),
            }),
            Err(source) => Err(VswitchdError::Socket { path, source }),
        }
    }

    async fn ask(&mut self, command: &[&str]) -> Result<String, VswitchdError> {
        let (method, params) = command.split_first().unwrap_or((&"", &[]));
        let failed = |source| VswitchdError::Socket {
            path: self.path.clone(),
            source,
        };
        let request = json!({"id": 0, "method": method, "params": params}).to_string();
        let sent = self.stream.write_all(request.as_bytes()).await;
        sent.map_err(failed)?;
        loop {
            // A text has no rows: the rest of a message that has some is refused below.
            while let Some(piece) = self.framer.next_piece()? {
                let Piece::Message(message) = piece else {
                    continue;
                };
                return match serde_json::from_slice(message)? {
                    Reply {
                        error: Some(error), ..
                    } => Err(VswitchdError::Refused {
                        command: (*method).to_owned(),
                        reason: error.trim().to_owned(),
                    }),
                    Reply { result, .. } => Ok(result.unwrap_or_default()),
                };
            }
            if self
                .stream
                .read_buf(self.framer.buffer())
                .await
                .map_err(failed)?
                == 0
            {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
}

#[cfg(test)]
mod tests;
