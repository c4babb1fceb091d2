//! The edge that asks ovs-vswitchd how long old megaflows can stand in the way of a new flow.
//!
//! A flow that the switch has confirmed decides over the packets that no megaflow covers. A
//! megaflow that drops, made for the address or for a neighbour of it, goes on dropping until
//! vswitchd's revalidators have come by; nothing says when they have. What they say of their
//! passes (`upcall/show`) is read once a second over vswitchd's control socket
//! (ovs-appctl(8): JSON-RPC 1.0), and [`settle`] makes a time of it. Whether there can be such a
//! megaflow at all is another question, which the engine answers (`denied.rs` of the core).
//!
//! `revalidator/wait` would be the other way, and is none: it is answered when a pass ends, even one
//! that began before the change (2 of 15 times, with 10,000 megaflows and a change before), and
//! after half a second where the pass that matters was over when vswitchd came to read it.
//!
//! It asks for this and for nothing else, and never makes anybody wait: whoever wants the time
//! takes the latest. Where vswitchd does not answer, that is a default, and said once.

use std::{
    collections::VecDeque,
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use serde::Deserialize;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use crate::ovsdb::framing::{Framer, FramingError};

/// How often vswitchd is asked.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long an answer is waited for. vswitchd answers between two rounds of everything else.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer: a few lines for each datapath, one more for each revalidator.
const ANSWER_MAX_BYTES: usize = 1 << 20;
/// How many answers count. Between changes, vswitchd only collects statistics, in passes that are
/// much shorter than those behind a change; of ten seconds, the longest says more than the last.
const ANSWERS: usize = 10;

/// What vswitchd says of its revalidators: of several datapaths, the most of each.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Revalidation {
    /// Megaflows in the datapath.
    pub flows: u64,
    /// How long a pass over all of them took, in whole milliseconds, at least one.
    pub pass: Duration,
}

/// Why vswitchd has nothing to say.
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
    /// The text is not as it was.
    #[error("`{COMMAND}` says nothing of \"flows : (current N)\" and \"dump duration : Nms\"")]
    Unreadable,
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

    /// The more of each.
    fn max(self, other: Self) -> Self {
        Self {
            flows: self.flows.max(other.flows),
            pass: self.pass.max(other.pass),
        }
    }
}

/// The number between these two.
fn number(text: &str, before: &str, after: &str) -> Option<u64> {
    let (_, text) = text.split_once(before)?;
    let (digits, _) = text.split_once(after)?;
    digits.parse().ok()
}

/// The shortest that vswitchd says, whatever it took.
const PASS_MIN: Duration = Duration::from_millis(1);
/// What such a pass takes without a megaflow: for threads to wake up.
const PASS_BEGIN: Duration = Duration::from_micros(300);
/// What a megaflow adds to a pass behind a change, where no such pass was seen: those between
/// changes only collect statistics, which takes a fraction of the time.
const PASS_PER_FLOW: Duration = Duration::from_micros(3);
/// What holds where vswitchd says nothing: as with some thousand megaflows.
pub const SETTLE_UNKNOWN: Duration = Duration::from_millis(30);

/// How long a pass takes that a change brings about. Until it is over, a megaflow from before can
/// still drop.
///
/// Measured with Open vSwitch 3.1 and 3.5, userspace datapath, one table, on two busy processors:
/// packets sent every 0.1 ms to an address whose neighbours were dropped, 25 times each; "busy"
/// has another change shortly before, so that the pass does not begin at once
/// (`REVALIDATION_INTERVAL` in `core/limits.rs`).
///
/// | megaflows | pass, median (longest) | first packet that passes, median (latest) | busy |
/// |---|---|---|---|
/// | 25 | 1 ms (2) | 0.0 ms (0.3) | 1.3 ms (8.2) |
/// | 125 | 1 ms (17) | 0.2 ms (14.6) | 0.5 ms (7.0) |
/// | 1,025 | 2 ms (12) | 0.0 ms (8.6) | 1.0 ms (6.1) |
/// | 10,025 | 35 ms (94) | 14.2 ms (83.2) | 19.1 ms (51.2) |
///
/// A pass that is under way when the change comes does not count, so that it can take two; it did
/// not, beyond the longest of a few passes.
pub fn settle(revalidation: Revalidation) -> Duration {
    let flows = u32::try_from(revalidation.flows).unwrap_or(u32::MAX);
    let estimated = PASS_BEGIN.saturating_add(PASS_PER_FLOW.saturating_mul(flows));
    if revalidation.pass <= PASS_MIN {
        estimated
    } else {
        revalidation.pass.max(estimated)
    }
}

/// The time to settle, for whoever wants to know.
#[derive(Debug)]
pub struct Settle(AtomicU64);

impl Default for Settle {
    fn default() -> Self {
        Self(AtomicU64::new(nanos(SETTLE_UNKNOWN)))
    }
}

impl Settle {
    /// How long after the barrier's reply an old megaflow can still drop.
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

/// The last answers.
#[derive(Debug, Default)]
struct Answers(VecDeque<Revalidation>);

impl Answers {
    /// Takes another; gives the most of all.
    fn add(&mut self, answer: Revalidation) -> Revalidation {
        let Self(answers) = self;
        if answers.len() == ANSWERS {
            answers.pop_front();
        }
        answers.push_back(answer);
        answers.iter().copied().fold(answer, Revalidation::max)
    }
}

/// Keeps `settle_time` up to date, for ever. vswitchd has its control socket in the directory of
/// `openflow_socket`.
pub async fn watch(openflow_socket: &Path, settle_time: &Settle) {
    let directory = openflow_socket.parent().unwrap_or(Path::new("."));
    let mut vswitchd = Vswitchd::new(directory);
    let mut answers = Answers::default();
    // The last failure that was told, until there is an answer.
    let mut told = None;
    loop {
        match vswitchd.revalidation().await {
            Ok(answer) => {
                let most = answers.add(answer);
                let time = settle(most);
                settle_time.set(time);
                debug!(flows = most.flows, pass = ?most.pass, settle = ?time, "revalidation");
                if told.take().is_some() {
                    info!(settle = ?time, "ovs-vswitchd says how long it revalidates");
                }
            }
            Err(error) => {
                answers = Answers::default();
                settle_time.set(SETTLE_UNKNOWN);
                let error = with_causes(&error);
                if told.as_ref() != Some(&error) {
                    warn!(
                        error,
                        settle = ?SETTLE_UNKNOWN,
                        "ovs-vswitchd does not say how long it revalidates; a default holds"
                    );
                    told = Some(error);
                }
            }
        }
        sleep(INTERVAL).await;
    }
}

/// An error with its causes.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
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

const COMMAND: &str = "upcall/show";

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

    /// Asks. The connection is kept for the next time.
    ///
    /// # Errors
    ///
    /// Where there is no answer, or one that cannot be read; the next time, another connection is
    /// made.
    pub async fn revalidation(&mut self) -> Result<Revalidation, VswitchdError> {
        let answer = async {
            let mut connection = match self.connection.take() {
                Some(connection) => connection,
                None => self.open().await?,
            };
            let text = connection.ask(&[COMMAND]).await?;
            let found = Revalidation::parse(&text).ok_or(VswitchdError::Unreadable)?;
            self.connection = Some(connection);
            Ok(found)
        };
        timeout(PATIENCE, answer)
            .await
            .map_err(|_| VswitchdError::Silent)?
    }

    /// Gives a command with its arguments, and returns the text that it prints.
    ///
    /// # Errors
    ///
    /// As [`Vswitchd::revalidation`].
    pub async fn ask(&mut self, command: &[&str]) -> Result<String, VswitchdError> {
        let answer = async {
            // Of an ovs-vswitchd that has ended meanwhile, the connection says so only now.
            if let Some(mut connection) = self.connection.take()
                && let Ok(text) = connection.ask(command).await
            {
                self.connection = Some(connection);
                return Ok(text);
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
        let (method, params) = command.split_first().unwrap_or((&COMMAND, &[]));
        let failed = |source| VswitchdError::Socket {
            path: self.path.clone(),
            source,
        };
        let request = json!({"id": 0, "method": method, "params": params}).to_string();
        let sent = self.stream.write_all(request.as_bytes()).await;
        sent.map_err(failed)?;
        loop {
            if let Some(message) = self.framer.next_message()? {
                return match serde_json::from_slice(&message)? {
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
