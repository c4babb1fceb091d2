//! One agent for each node: the second one refuses to start, and says whom it met.
//!
//! Two agents would take away each other's flows and programs. What both of them work on is the node's network
//! namespace, so the claim is an abstract Unix socket there (unix(7)): no directory has to be shared, and the kernel
//! lets go of the name however the agent ends. The weighed designs are in `docs/decisions/one-agent.md`.

use std::{
    fmt,
    io::{self, Read as _},
    mem,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use rustix::{
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
    },
    process::geteuid,
};
use serde::{Deserialize, Serialize};
use tokio::{io::AsyncWriteExt as _, time::sleep};
use tracing::{info, warn};

use crate::asking::{VERSION, moment::rfc3339};

/// The name that an agent holds in the network namespace of its node.
const NAME: &[u8] = b"dnsflow-agent";
/// How long a new agent waits for an earlier one to end. Longer than a Pod that is deleted has to end
/// (`terminationGracePeriodSeconds` in `deploy/base/daemonset.yaml`).
pub const PATIENCE: Duration = Duration::from_secs(15);
/// How often the new agent tries again.
const RETRY: Duration = Duration::from_millis(50);
/// After this time, the other agent is stuck.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// The longest answer that is read.
const ANSWER_BYTES_MAX: u64 = 4096;
/// Questions that may wait for an answer.
const BACKLOG: i32 = 16;
/// The pause after a question that could not be answered.
const PAUSE: Duration = Duration::from_secs(1);

/// Why this agent must not start.
#[derive(Debug, thiserror::Error)]
pub enum OneAgentError {
    /// Another agent runs.
    #[error(
        "another agent runs on this node: {0}. Two agents would remove each other's flows. End \
         that agent first; a DaemonSet must have maxSurge 0"
    )]
    Another(Met),
    /// The kernel refuses the socket.
    #[error("cannot find out whether another agent runs on this node")]
    Io(#[source] io::Error),
}

/// The agent that was met.
#[derive(Debug)]
pub struct Met {
    /// Its process; none if that is in another PID namespace, or unknown.
    pid: Option<libc::pid_t>,
    about: Option<About>,
}

/// What an agent says of itself.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct About {
    version: String,
    /// Seconds since its start.
    up_s: u64,
}

impl fmt::Display for Met {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}")?,
            None => write!(f, "a process of another PID namespace")?,
        }
        match &self.about {
            Some(About { version, up_s }) => {
                let since = SystemTime::now().checked_sub(Duration::from_secs(*up_s));
                let since = since.map_or_else(|| format!("{up_s} s ago"), rfc3339);
                write!(f, ", version {version}, started {since}")
            }
            None => write!(f, ", which does not answer: it may be stopped or stuck"),
        }
    }
}

/// The claim of a running agent, or of a cleanup. It ends with the value and with the process.
#[derive(Debug)]
pub struct Claim {
    listener: Option<UnixListener>,
    started: Instant,
}

impl Claim {
    /// Claims the node for this process, and waits [`PATIENCE`] for an earlier agent to end.
    ///
    /// # Errors
    ///
    /// If the other agent is still there.
    pub fn make() -> Result<Self, OneAgentError> {
        claim(NAME, PATIENCE)
    }

    /// Tells whoever asks which agent this is, for ever.
    pub async fn answer(listener: io::Result<Option<Answering>>) {
        match listener {
            Ok(Some(answering)) => answering.serve().await,
            Ok(None) => {}
            Err(error) => {
                warn!(%error, "cannot answer a second agent: its error will not name this agent")
            }
        }
        std::future::pending().await
    }

    /// The part that answers. The claim outlives it.
    pub fn answering(&self) -> io::Result<Option<Answering>> {
        let Some(listener) = &self.listener else {
            return Ok(None);
        };
        Ok(Some(Answering {
            listener: listener.try_clone()?,
            started: self.started,
        }))
    }
}

/// What answers the question who has the claim.
#[derive(Debug)]
pub struct Answering {
    listener: UnixListener,
    started: Instant,
}

impl Answering {
    async fn serve(self) {
        let Self { listener, started } = self;
        let listener = match tokio::net::UnixListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => {
                warn!(%error, "cannot answer a second agent: its error will not name this agent");
                return;
            }
        };
        loop {
            let Ok((mut stream, _)) = listener.accept().await else {
                sleep(PAUSE).await;
                continue;
            };
            let about = About {
                version: VERSION.to_owned(),
                up_s: started.elapsed().as_secs(),
            };
            let text = serde_json::to_vec(&about).unwrap_or_default();
            // Fits into the socket's buffer. Whoever has asked may have gone.
            let _gone = stream.write_all(&text).await;
        }
    }
}

fn claim(name: &[u8], patience: Duration) -> Result<Claim, OneAgentError> {
    let started = Instant::now();
    let mut waits = false;
    loop {
        match listen_at(name) {
            Ok(listener) => {
                if waits {
                    info!("the other agent has ended");
                }
                return Ok(Claim {
                    listener: Some(listener),
                    started,
                });
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(OneAgentError::Io(error)),
        }
        let is_over = started.elapsed() >= patience;
        if !waits || is_over {
            match meet(name).map_err(OneAgentError::Io)? {
                Holder::Agent(met) if is_over => return Err(OneAgentError::Another(met)),
                Holder::Agent(met) => warn!(
                    other = %met,
                    "another agent runs on this node; waiting up to {patience:?} for its end"
                ),
                Holder::Stranger(uid) => {
                    warn!(
                        uid,
                        "an unprivileged process holds the socket name of the agents; starting without it; a second \
                         agent on this node would not be noticed"
                    );
                    return Ok(Claim {
                        listener: None,
                        started,
                    });
                }
                Holder::Gone => continue,
            }
            waits = true;
        }
        thread::sleep(RETRY);
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

fn listen_at(name: &[u8]) -> io::Result<UnixListener> {
    let socket = new_socket()?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Who has a name.
enum Holder {
    Agent(Met),
    /// A process of this user, who is neither root nor the user of this agent. Everybody may take an abstract name.
    Stranger(libc::uid_t),
    Gone,
}

/// Asks who has the name.
fn meet(name: &[u8]) -> io::Result<Holder> {
    let socket = new_socket()?;
    match connect(&socket, &SocketAddrUnix::new_abstract_name(name)?) {
        Ok(()) => {}
        Err(error) => {
            return match io::Error::from(error).kind() {
                io::ErrorKind::ConnectionRefused => Ok(Holder::Gone),
                // More have asked than it has answered.
                io::ErrorKind::WouldBlock => Ok(Holder::Agent(Met {
                    pid: None,
                    about: None,
                })),
                _ => Err(error.into()),
            };
        }
    }
    let mut stream = UnixStream::from(socket);
    let peer = peer(&stream)?;
    if peer.uid != 0 && peer.uid != geteuid().as_raw() {
        return Ok(Holder::Stranger(peer.uid));
    }
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut text = Vec::new();
    // Without an answer, the process is all that is known.
    let _silent = (&mut stream).take(ANSWER_BYTES_MAX).read_to_end(&mut text);
    Ok(Holder::Agent(Met {
        // The kernel writes 0 where this process cannot see the other one (`from_pid` in Linux `net/core/sock.c`).
        pid: (peer.pid != 0).then_some(peer.pid),
        about: serde_json::from_slice(&text).ok(),
    }))
}

/// Who listens at the other end. The process is not read by rustix, whose type cannot be zero.
fn peer(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = mem::size_of_val(&peer) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `peer`, which takes any.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok(peer),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests;
