//! The OpenFlow 1.5 client: it writes our flows into OVN's bridge, and reports lost ones.
//!
//! It must never
//! - touch a flow without our cookie. Deletion is strict and by cookie (but for the last bit, which never tells two
//!   of ours apart). Modification is by exact cookie. No request empties a table;
//! - ask for the MASTER role, because ovn-controller may hold it;
//! - ask for asynchronous messages. Open vSwitch sends none to a client of the bridge's management socket without a
//!   `miss_send_len` (`ofconn_receives_async_msg` in its `ofproto/connmgr.c`). With one, it would also send OVN's
//!   packet-ins;
//! - wait until the socket accepts bytes, and not read meanwhile: Open vSwitch stops reading from a client that does
//!   not read its replies.
//!
//! [`Session`] is the protocol without IO: bytes, commands and the time go in; bytes, events and a deadline come out.
//! [`Connection`] is the thin driver around it: a socket, reconnection with back-off, and a session per connection.
//!
//! A flow monitor (`OFPMP_FLOW_MONITOR`) reports lost flows, not `OFPT_FLOW_REMOVED`. The monitor also shows a flow
//! that replaces ours, and leaves out our own changes. It needs no flag on the flow: with the flag, every other
//! controller would get `OFPT_FLOW_REMOVED`.

mod connection;
mod error;
#[cfg(test)]
mod fixtures;
mod oxm;
pub mod questions;
mod session;
mod shards;
pub mod unblock;
mod wire;

use std::time::Duration;

pub use connection::Connection;
pub use oxm::BLOCKED;
pub use session::Session;

use dnsflow_core::{
    io::input::{BatchError, BatchId, FlowReply},
    values::{
        flow::{Cookie, FlowKey},
        limits::CHANGES_PER_BATCH_MAX,
    },
};

/// After this long without a byte from the switch, the session sends an echo request; after as long
/// again, the session is dead. Open vSwitch itself probes no client of the management socket.
pub const IDLE_MAX: Duration = Duration::from_secs(5);
/// At most this many batches are in flight or wait behind an atomic one; further ones are refused.
/// Each answer that opens an address makes one batch at most: this is enough for a second in which
/// the switch stands still and 16,000 such answers come.
pub const BATCHES_MAX: usize = 1 << 14;
/// At most this many changes make a batch.
pub const CHANGES_MAX: usize = CHANGES_PER_BATCH_MAX;
/// At most this many questions (dumps, cookies, counts, monitors) are in flight.
pub const REQUESTS_MAX: usize = 1024;

/// An event of the client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    /// The switch speaks OpenFlow 1.5 and takes commands.
    Up,
    /// The connection is lost, or could not be made. The results of all outstanding batches came
    /// before. The event comes again only with another reason.
    Down {
        /// What happened, to which socket, and which option names the socket.
        reason: String,
    },
    /// The result of a batch of changes.
    Applied {
        /// As given with the changes.
        batch: BatchId,
        /// `Ok` once the switch has answered a barrier behind the changes.
        result: Result<(), BatchError>,
    },
    /// The reply to a question, or the counters for a batch.
    Reply(FlowReply),
    /// A flow with a counted cookie was removed from a monitored table, and its counter with it.
    /// The event comes once for each cookie until the next [`FlowQuestion::Count`](dnsflow_core::io::input::FlowQuestion::Count).
    CountLost {
        /// Its cookie.
        cookie: u32,
    },
    /// Somebody else removed or changed a flow of ours in a monitored table.
    FlowLost {
        /// Which flow.
        key: FlowKey,
        /// The cookie it had.
        cookie: Cookie,
        /// How it went.
        reason: LostReason,
    },
    /// Someone else wrote a flow of the shape of ours, with a cookie that is not ours, into a
    /// monitored table. If a flow of ours has the same key, our flow is gone: OVS replaces a flow
    /// of the same key, and reports only the new cookie. The session keeps no list of flows, so its
    /// owner has to check.
    ForeignFlow {
        /// What was written.
        key: FlowKey,
        /// Its cookie.
        cookie: u64,
    },
    /// A flow of the shape of ours, with a cookie that is not ours, is gone from a monitored table.
    ForeignFlowGone {
        /// What it was.
        key: FlowKey,
    },
    /// The monitor left out some changes because the client read too slowly; from here on it is
    /// complete again. Only a dump shows what was missed.
    MonitorGap,
    /// The switch refused a question. A flow dump or a look-up of cookies that was refused gets
    /// no other answer.
    Refused {
        /// What was asked.
        request: &'static str,
        /// The switch's words.
        reason: String,
    },
}

/// How a flow of ours was lost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LostReason {
    /// The idle timeout. Our flows have none.
    IdleTimeout,
    /// The hard timeout.
    HardTimeout,
    /// Someone else deleted it.
    Deleted,
    /// The table was full.
    Evicted,
    /// Someone else changed the actions and left the cookie.
    Modified,
    /// Another `enum ofp_flow_removed_reason` (OpenFlow 1.5.1, section 7.4.2).
    Other(u8),
}

/// Why a session ended.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ProtocolError {
    /// A message, or the named part of a message, has another length than it says, or an impossible
    /// value.
    #[error("the switch sent a malformed {0}")]
    Malformed(&'static str),
    /// A message of another OpenFlow version.
    #[error("the switch sent a message of OpenFlow version {0:#04x} instead of 0x06")]
    Version(u8),
    /// The bridge does not allow OpenFlow 1.5.
    #[error(
        "the switch does not speak OpenFlow 1.5 ({0}); \
         `ovs-vsctl add bridge BRIDGE protocols OpenFlow15` allows it"
    )]
    NoCommonVersion(String),
    /// Something other than a hello came first.
    #[error("the switch began with a message of type {0} instead of a hello")]
    NoHello(u8),
    /// No hello, or no answer to an echo request, for [`IDLE_MAX`].
    #[error("the switch does not answer")]
    Silent,
}

/// Totals of what a client has ignored.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct OpenFlowCounters {
    /// Messages that the client did not ask for, such as packet-ins.
    pub unexpected_messages: u64,
    /// Flows of ours, in dumps and updates, whose match holds a field that we never write.
    pub unreadable_flows: u64,
    /// Connections that ended, or could not be made.
    pub disconnects: u64,
}
