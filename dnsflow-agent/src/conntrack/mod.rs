//! The edge to connection tracking: it finds the connections that OVN has blocked, and unblocks those that the core
//! names (`blocked.rs` of the core has the reason).
//!
//! It clears OVN's mark and leaves the entry. Without the entry, the next packet would make a new one. If that packet
//! were the server's, the pod would be the responder, and no rule would hold for its packets any more. With the entry
//! and without the mark, OVN decides over the pod's next packet as over every other one, and marks the connection
//! again if the rules deny it. docs/decisions/blocked-connections.md weighs the designs.
//!
//! If the kernel tracks the connections of br-int ([`Datapath::Kernel`]), the agent sends netlink messages for both.
//! If ovs-vswitchd does ([`Datapath::Userspace`]), the agent asks for a dump over its control socket. It clears the
//! mark by packets that OpenFlow has ovs-vswitchd track.
//!
//! It must never
//! - touch an entry outside the conntrack zones of this node's logical ports: bit 0 of the mark has other meanings
//!   elsewhere;
//! - make the hot thread wait: it runs with the slow edges. The kernel's table is read on a thread of its own,
//!   because that blocks.

mod bridge;
mod kernel;
mod text;

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use dnsflow_core::{
    Input,
    values::{connection::BlockedConnection, flow::Protocol},
};
use dnsflow_ovsdb::{Connection, Remotes, session::Conditions};
use tokio::{
    sync::mpsc,
    task::{JoinError, spawn_blocking},
    time::timeout,
};
use tracing::{debug, info, warn};

use crate::{
    causes::{Causes, with_causes},
    databases::{Converter, log_large_tables},
    openflow::{
        BLOCKED,
        unblock::{UnblockError, unblock},
    },
    vswitch_db::{DEFAULT_SOCKET, OPTION},
    vswitchd::{Vswitchd, VswitchdError},
};
pub use bridge::Datapath;
use bridge::{Bridge, DATABASE};
pub use kernel::{blocked as blocked_in_kernel, clear as clear_in_kernel};

/// At most this many requests of the hot thread wait. The result of a look comes in up to 64
/// messages, and each message brings a request.
pub const REQUESTS_MAX: usize = 128;
/// At most this many blocked connections of one look are reported; further ones are counted, and
/// the next look reports them.
pub const FOUND_MAX: usize = 1 << 16;
/// Of one zone, at most so many. A pod has a zone of its own: it leaves the others' connections room.
const FOUND_PER_ZONE_MAX: usize = FOUND_MAX / 16;
/// The core judges this many blocked connections at a time: a frame does not wait longer.
const FOUND_PART: usize = 1024;
/// How long the switch may take to take off marks.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest dump that is read: about 300,000 connections.
const DUMP_MAX_BYTES: usize = 64 << 20;

/// The requests of the core to this edge.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Request {
    /// Look for blocked connections; [`Input::Blocked`] answers, always.
    Find,
    /// Take OVN's mark off these; [`Input::Unblocked`] answers, always.
    Unblock(Vec<BlockedConnection>),
}

/// A tracked connection with the mark, in any zone.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Tracked {
    /// The conntrack zone.
    pub zone: u16,
    /// The protocol.
    pub protocol: Protocol,
    /// Who began it.
    pub src: std::net::SocketAddr,
    /// Whom to.
    pub dst: std::net::SocketAddr,
}

/// The connections with the mark.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct Marked {
    /// At most [`FOUND_MAX`].
    pub connections: Vec<Tracked>,
    /// The number of further connections that were left out.
    pub left_out: usize,
    /// How many there are of each zone.
    of_zones: HashMap<u16, usize>,
}

impl Marked {
    /// Adds one, if there is room.
    fn push(&mut self, tracked: Tracked) {
        let of_zone = self.of_zones.entry(tracked.zone).or_default();
        if self.connections.len() < FOUND_MAX && *of_zone < FOUND_PER_ZONE_MAX {
            *of_zone += 1;
            self.connections.push(tracked);
        } else {
            self.left_out += 1;
        }
    }
}

/// Why blocked connections stay as they are.
#[derive(Debug, thiserror::Error)]
enum ConntrackError {
    #[error("br-int is not known: no connection to Open vSwitch's database, or no such bridge")]
    NoBridge,
    #[error(
        "the kernel's connection tracking cannot be read or changed: dnsflow needs CAP_NET_ADMIN in \
         the host's network namespace, and the kernel nf_conntrack_netlink"
    )]
    Kernel(#[source] io::Error),
    #[error("ovs-vswitchd does not list its connections")]
    Vswitchd(#[source] VswitchdError),
    #[error("the switch did not remove the mark")]
    Switch(#[source] UnblockError),
    #[error("the switch took longer than {} s", PATIENCE.as_secs())]
    Slow,
    #[error("reading connections has failed")]
    Panicked(#[source] JoinError),
}

/// The edge.
#[derive(Debug)]
pub struct Conntrack {
    openflow_socket: PathBuf,
    /// The bridge of the OpenFlow socket.
    bridge_name: String,
    database: Connection,
    converter: Converter,
    bridge: Option<Bridge>,
    vswitchd: Vswitchd,
    causes: Causes<String>,
}

impl Conntrack {
    /// The edge for the bridge with this management socket. `remotes`: the Open_vSwitch database
    /// that describes the bridge, if not at its usual socket.
    pub fn new(remotes: Option<Remotes>, openflow_socket: PathBuf) -> Self {
        let remotes = remotes.unwrap_or_else(|| Remotes::unix(&[DEFAULT_SOCKET]));
        // Open vSwitch names it `<bridge>.mgmt` (`bridge_configure_remotes` in its vswitchd/bridge.c).
        let bridge_name = openflow_socket.file_stem().unwrap_or_default();
        let database = Connection::new(&DATABASE, Conditions::new(), &remotes, OPTION);
        Self {
            bridge_name: bridge_name.to_string_lossy().into_owned(),
            converter: Converter::new(DATABASE.name, database.counters()),
            database,
            bridge: None,
            vswitchd: Vswitchd::new(openflow_socket.parent().unwrap_or(Path::new(".")))
                .with_answer_max(DUMP_MAX_BYTES),
            openflow_socket,
            causes: Causes::default(),
        }
    }

    /// Serves `requests` until one of the two channels is closed.
    pub async fn run(mut self, mut requests: mpsc::Receiver<Request>, inputs: mpsc::Sender<Input>) {
        loop {
            let request = tokio::select! {
                _ = self.database.next() => {
                    log_large_tables(&mut self.database);
                    self.read_bridge();
                    continue;
                }
                request = requests.recv() => request,
            };
            let sent = match request {
                None => return,
                Some(Request::Find) => {
                    let found = self.find().await;
                    let found = self.log_unless_ok(found).unwrap_or_default();
                    send(found, &inputs).await
                }
                Some(Request::Unblock(connections)) => {
                    let count = connections.len();
                    let result = self.unblock(connections).await;
                    let result = self.log_unless_ok(result);
                    let Outcome { unblocked, failed } = result.unwrap_or(Outcome {
                        unblocked: 0,
                        failed: count,
                    });
                    inputs.send(Input::Unblocked { unblocked, failed }).await
                }
            };
            if sent.is_err() {
                return;
            }
        }
    }

    fn read_bridge(&mut self) {
        let Some(replica) = self.database.replica() else {
            return;
        };
        let name = &self.bridge_name;
        let bridges = self
            .converter
            .every(replica, bridge::BRIDGE, |row| bridge::bridge(row, name));
        self.bridge = bridges.into_iter().find_map(|(_, bridge)| bridge);
    }

    /// Logs each cause of failure once, until a success.
    fn log_unless_ok<T>(&mut self, result: Result<T, ConntrackError>) -> Option<T> {
        match result {
            Ok(value) => {
                self.causes.end();
                Some(value)
            }
            Err(error) => {
                let error = with_causes(&error);
                if self.causes.is_news(error.clone()) {
                    warn!(
                        error,
                        "cannot unblock connections after a gap in the flows: they stay blocked until their pods \
                         send a packet"
                    );
                }
                None
            }
        }
    }

    /// The marked connections in the zones of logical ports.
    async fn find(&mut self) -> Result<Vec<BlockedConnection>, ConntrackError> {
        let bridge = self.bridge.as_ref().ok_or(ConntrackError::NoBridge)?;
        let Marked {
            connections,
            left_out,
            of_zones: _,
        } = match bridge.datapath {
            Datapath::Kernel => spawn_blocking(kernel::blocked)
                .await
                .map_err(ConntrackError::Panicked)?
                .map_err(ConntrackError::Kernel)?,
            Datapath::Userspace => {
                let dump = self.vswitchd.connections(&self.bridge_name).await;
                text::blocked(&dump.map_err(ConntrackError::Vswitchd)?)
            }
        };
        if left_out > 0 {
            warn!(
                left_out,
                max = FOUND_MAX,
                "too many blocked connections for one search; the next search may find the others"
            );
        }
        let found = bridge.at_ports(connections);
        if found.is_empty() {
            debug!("no connection is blocked");
        } else {
            info!(blocked = found.len(), "searched for blocked connections");
        }
        Ok(found)
    }

    async fn unblock(
        &self,
        connections: Vec<BlockedConnection>,
    ) -> Result<Outcome, ConntrackError> {
        let bridge = self.bridge.as_ref().ok_or(ConntrackError::NoBridge)?;
        match bridge.datapath {
            Datapath::Kernel => spawn_blocking(move || kernel::clear(&connections))
                .await
                .map_err(ConntrackError::Panicked)?
                .map_err(ConntrackError::Kernel),
            Datapath::Userspace => {
                let unblocked = unblock(&self.openflow_socket, &connections);
                let failed = timeout(PATIENCE, unblocked)
                    .await
                    .map_err(|_| ConntrackError::Slow)?
                    .map_err(ConntrackError::Switch)?;
                Ok(Outcome {
                    unblocked: connections.len() - failed,
                    failed,
                })
            }
        }
    }
}

/// The result of a [`Request::Unblock`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Outcome {
    /// Connections without the mark now.
    pub unblocked: usize,
    /// Connections that could not be changed. Ended connections are in neither number.
    pub failed: usize,
}

async fn send(
    found: Vec<BlockedConnection>,
    inputs: &mpsc::Sender<Input>,
) -> Result<(), mpsc::error::SendError<Input>> {
    let mut found = found.into_iter();
    loop {
        let connections: Vec<_> = found.by_ref().take(FOUND_PART).collect();
        let more = found.len() > 0;
        inputs.send(Input::Blocked { connections, more }).await?;
        if !more {
            return Ok(());
        }
    }
}

/// The logical port of each zone.
type Zones = HashMap<u16, String>;
