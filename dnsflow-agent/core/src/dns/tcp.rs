//! DNS over TCP: finds the answers that count in the segments between a pod and a server.
//!
//! Each message follows its length of two octets (RFC 7766, section 8; RFC 1035, section 4.2.2). Nothing else shows
//! where a message begins. So a stream is read only from its beginning and without a gap. If segments are missing for
//! good, or contradict each other, the connection is given up and counted. A boundary is never guessed: whoever
//! chooses a server's answers could place a forged message behind a wrong guess.
//!
//! An answer counts only if the pod has asked. The pod's SYN was seen, and the server's SYN-ACK acknowledges it. The
//! pod has sent the question on this connection, in bytes that the server has acknowledged. The pod's segments come
//! from an address of its own: the program in the kernel checks that.
//!
//! The bytes of two connections are never put together. A malicious pod closes and opens connections of the same
//! ports. It also chooses which of its segments the server accepts, because the agent does not verify checksums. So
//! the server's segments decide. The connection is given up if the server
//!
//! - sends data from before its first byte: the sequence number is not that of the SYN-ACK. A server with SYN cookies
//!   takes this number from the pod's acknowledgment (RFC 4987, section 3.6; `cookie_v4_check` in Linux'
//!   net/ipv4/syncookies.c), and it may differ.
//! - begins with data from behind its first byte, for the same reason. The missing bytes could come from the pod's
//!   next connection: with cookies, that needs no other SYN-ACK.
//! - sends a second SYN-ACK after data, or one with another sequence number: the connection is another one, or the
//!   pod may have accepted either.
//! - acknowledges bytes that the pod has not sent: the pod's end is another one.
//! - resets the connection. The same holds for a reset of the pod. Any sequence number counts: the receiver's state
//!   decides which numbers are valid (RFC 9293, section 3.5.3), and the agent does not know this state for certain.
//!
//! So whoever can send in a server's name can stop the agent from reading a connection. Such a sender can do more
//! anyway: pods that have asked believe it. Nothing is opened then, the frames go to the pod as before, and the next
//! connection is read again. If the agent ignored such segments, the pod could choose addresses to open.
//!
//! All of this needs every segment and every reset of the server. Some do not reach the agent: those beyond the pod's
//! share of the ring buffer, in IP fragments, or behind more extension headers than the program walks.
//!
//! An answer comes after its question. Their segments have this order in the ring buffer on whichever CPUs they pass:
//! the program writes the record of a packet before the packet goes on.

mod questions;
mod stream;

use std::net::SocketAddr;

use self::{
    questions::Questions,
    stream::{Message, Messages, State, Stream},
};
use crate::{
    Timestamp,
    tools::{
        counter_vec::{CounterVec, labels},
        recent::{Limits, OfInterface, Recent},
    },
    values::limits::{
        TCP_BYTES_MAX, TCP_BYTES_PER_INTERFACE_MAX, TCP_CONNECTIONS_MAX,
        TCP_CONNECTIONS_PER_INTERFACE_MAX, TCP_IDLE_MAX,
    },
};

/// No more data from the sender (RFC 9293, section 3.1).
pub const FIN: u8 = 0x01;
/// The sequence number is the sender's first.
pub const SYN: u8 = 0x02;
/// The connection is gone.
pub const RST: u8 = 0x04;
/// The acknowledgment number counts.
pub const ACK: u8 = 0x10;

/// A connection, as one interface sees it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ConnectionKey {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// The DNS server's end.
    pub server: SocketAddr,
    /// The pod's end.
    pub client: SocketAddr,
}

impl OfInterface for ConnectionKey {
    fn ifindex(&self) -> u32 {
        self.ifindex
    }
}

/// Which end of a connection has sent a segment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sender {
    /// The pod.
    Pod,
    /// The DNS server.
    Server,
}

/// A segment between a pod and a DNS server.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Its connection.
    pub key: ConnectionKey,
    /// Who has sent it.
    pub sender: Sender,
    /// The sequence number of the header, in host byte order.
    pub sequence: u32,
    /// The acknowledgment number of the header, in host byte order; it counts with [`ACK`].
    pub acknowledgment: u32,
    /// The flags of the header: [`FIN`], [`SYN`], [`RST`], [`ACK`]; others are ignored.
    pub flags: u8,
    /// The payload, as far as it was captured.
    pub payload: &'a [u8],
    /// The payload's length in the packet; at least that of `payload`.
    pub payload_len: usize,
    /// How many packets of the interface were left out before this one ([`Frame::left_out`]).
    ///
    /// [`Frame::left_out`]: crate::io::input::Frame::left_out
    pub left_out: u32,
}

impl Segment<'_> {
    fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// How a server has ended a connection of a pod without an answer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ServerEnd {
    /// It has reset the connection in place of a SYN-ACK.
    Refused,
    /// It has closed or reset the connection, and left these questions open, by their hashes
    /// ([`question_hash`](dnsflow_common::question::question_hash)).
    Unanswered(Vec<u64>),
}

/// What a segment brings.
#[derive(Debug, Default)]
pub struct Fed {
    /// The answers that are complete now, without their lengths.
    pub answers: Vec<Vec<u8>>,
    /// The end of the connection, if the server has ended it without an answer.
    pub end: Option<ServerEnd>,
}

labels! {
    /// The outcome of a segment or a connection.
    TcpEvent {
        /// A connection began: the pod's SYN was seen, and the server's SYN-ACK to it.
        Opened = "opened",
        /// A question of the pod was complete.
        Question = "question",
        /// A message was complete, and answers a question that the server has acknowledged.
        Message = "message",
        /// A message of the server answers no question of the pod; it was ignored.
        NotAsked = "not_asked",
        /// A question was forgotten: too many of the connection had no answer.
        QuestionForgotten = "question_forgotten",
        /// A segment of the server acknowledges bytes that the pod has not sent. Before the SYN-ACK, it was ignored;
        /// after it, the connection was given up.
        NotSent = "not_sent",
        /// A message was too short for a DNS header, and skipped.
        Runt = "runt",
        /// A segment came again; it was ignored.
        Duplicate = "duplicate",
        /// A segment came before one that precedes it; it was kept.
        Ahead = "ahead",
        /// A segment lay too far ahead of the read bytes; it was ignored.
        OutOfWindow = "out_of_window",
        /// A segment of a connection that was given up, or whose beginning was not seen.
        NoBeginning = "no_beginning",
        /// A server's port opened a connection itself, or a pod accepted one; it was ignored.
        NotAccepted = "not_accepted",
        /// The connection was closed between two messages.
        Closed = "closed",
        /// The connection was closed or replaced within a message.
        Unfinished = "unfinished",
        /// Given up: too much was waiting for a missing segment, or the server's first bytes were
        /// missing.
        Gap = "gap",
        /// Given up: two segments differed in the same bytes, data came from before the beginning or
        /// behind the end, or the server accepted a second time.
        Conflict = "conflict",
        /// Given up: packets of the interface were left out meanwhile, and could have been segments of the connection.
        LeftOut = "left_out",
        /// Given up: a segment was not captured whole.
        Cut = "cut",
        /// Forgotten: there were too many connections, or they held too many bytes.
        Evicted = "evicted",
        /// Forgotten: the server said nothing new for too long.
        Idle = "idle",
    }
}

/// The connections of all pods of a node.
#[derive(Debug)]
pub struct TcpReassembly {
    connections: Recent<ConnectionKey, Connection>,
    events: CounterVec<TcpEvent>,
}

impl Default for TcpReassembly {
    fn default() -> Self {
        Self {
            connections: Recent::new(Limits {
                entries: TCP_CONNECTIONS_MAX,
                per_interface: TCP_CONNECTIONS_PER_INTERFACE_MAX,
                bytes: TCP_BYTES_MAX,
                bytes_per_interface: TCP_BYTES_PER_INTERFACE_MAX,
            }),
            events: CounterVec::default(),
        }
    }
}

impl TcpReassembly {
    /// Takes a segment.
    pub fn feed(&mut self, segment: &Segment<'_>, now: Timestamp) -> Fed {
        self.expire(now);
        let is_opening = segment.has(SYN) && !segment.has(RST);
        match (segment.sender, segment.has(ACK)) {
            (Sender::Pod, false) if is_opening => self.begin(segment, now),
            (Sender::Pod, true) | (Sender::Server, false) if is_opening => {
                self.events.count(TcpEvent::NotAccepted);
                return Fed::default();
            }
            _ => {}
        }
        let Some(connection) = self.connections.get_mut(&segment.key) else {
            if !segment.payload.is_empty() || is_opening {
                self.events.count(TcpEvent::NoBeginning);
            }
            return Fed::default();
        };
        if connection.left_out != segment.left_out {
            // A segment or a reset of this connection may be among them.
            self.forget(&segment.key, TcpEvent::LeftOut);
            return Fed::default();
        }
        let before = connection.heard();
        let taken = match segment.sender {
            Sender::Pod => connection
                .sent(segment, &mut self.events)
                .map(|()| Vec::new()),
            Sender::Server => connection.received(segment, &mut self.events),
        };
        let held = connection.held();
        let is_news = connection.heard() > before;
        let end = match &taken {
            Err(Over { event, .. }) if segment.sender == Sender::Server => {
                connection.server_end(*event)
            }
            _ => None,
        };
        let answers = match taken {
            Ok(answers) => {
                if is_news {
                    self.connections.use_entry(&segment.key, now);
                }
                for _ in self.connections.weigh(&segment.key, held) {
                    self.events.count(TcpEvent::Evicted);
                }
                answers
            }
            Err(Over { event, answers }) => {
                self.forget(&segment.key, event);
                answers
            }
        };
        Fed { answers, end }
    }

    /// Forgets the connections of an interface that is gone.
    pub fn forget_interface(&mut self, ifindex: u32) {
        self.connections.remove_interface(ifindex);
    }

    /// How many connections are followed.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether none is followed.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// How many bytes wait for more.
    pub fn bytes_held(&self) -> usize {
        self.connections.bytes()
    }

    /// The counters.
    pub fn events(&self) -> &CounterVec<TcpEvent> {
        &self.events
    }

    /// The pod opens a connection.
    fn begin(&mut self, segment: &Segment<'_>, now: Timestamp) {
        if let Some(known) = self.connections.get_mut(&segment.key) {
            let is_whole = known.left_out == segment.left_out;
            if known.pod.initial() == segment.sequence && !known.is_in_use() && is_whole {
                // The SYN came again.
                return;
            }
            // Nobody opens a connection that is in use. The server has lost the old one, or the pod
            // wants it to look so.
            let event = known.end_event();
            self.forget(&segment.key, event);
        }
        let connection = Connection::new(segment.sequence, segment.left_out);
        if self
            .connections
            .insert(segment.key, connection, now)
            .is_some()
        {
            self.events.count(TcpEvent::Evicted);
        }
    }

    fn forget(&mut self, key: &ConnectionKey, event: TcpEvent) {
        if self.connections.remove(key).is_some() {
            self.events.count(event);
        }
    }

    fn expire(&mut self, now: Timestamp) {
        let Some(limit) = now.checked_sub(TCP_IDLE_MAX) else {
            return;
        };
        while self.connections.pop_unused_since(limit).is_some() {
            self.events.count(TcpEvent::Idle);
        }
    }
}

/// The end of a connection.
#[derive(Debug)]
struct Over {
    /// How.
    event: TcpEvent,
    /// The answers that came with the end.
    answers: Vec<Vec<u8>>,
}

impl From<TcpEvent> for Over {
    fn from(event: TcpEvent) -> Self {
        Self {
            event,
            answers: Vec::new(),
        }
    }
}

/// A connection that a pod has opened.
#[derive(Debug)]
struct Connection {
    /// How many packets of the interface had been left out when the connection began.
    left_out: u32,
    /// The pod's stream.
    pod: Stream,
    /// The server's stream, since its SYN-ACK.
    server: Option<Stream>,
    /// The place in the pod's stream up to which the server has acknowledged.
    acknowledged: u64,
    questions: Questions,
}

impl Connection {
    /// Begins with the sequence number of the pod's SYN.
    fn new(initial: u32, left_out: u32) -> Self {
        let pod = Stream::new(initial);
        Self {
            left_out,
            acknowledged: pod.first(),
            pod,
            server: None,
            questions: Questions::default(),
        }
    }

    fn held(&self) -> usize {
        self.pod.held() + self.server.as_ref().map_or(0, Stream::held)
    }

    /// How much of the server has come so far; `None` before its SYN-ACK.
    fn heard(&self) -> Option<u64> {
        self.server.as_ref().map(Stream::taken)
    }

    /// Whether one end has sent something behind the SYN-ACK. It has taken the other's SYN then.
    fn is_in_use(&self) -> bool {
        let server = self.server.as_ref();
        server.is_some_and(|server| server.taken() > 0 || self.pod.taken() > 0)
    }

    /// The event of a connection that ends now.
    fn end_event(&self) -> TcpEvent {
        let server = self.server.as_ref();
        server.map_or(TcpEvent::Closed, Stream::end_event)
    }

    /// How the server has ended it with this event, if questions have no answer.
    fn server_end(&self, event: TcpEvent) -> Option<ServerEnd> {
        let is_ended = matches!(event, TcpEvent::Closed | TcpEvent::Unfinished);
        let open = self.questions.open();
        match (is_ended, &self.server) {
            (true, None) => Some(ServerEnd::Refused),
            (true, Some(_)) if !open.is_empty() => Some(ServerEnd::Unanswered(open)),
            _ => None,
        }
    }

    /// Takes a segment of the pod. Data with its SYN are questions like others (TCP Fast Open, RFC
    /// 7413): the server's acknowledgment shows whether the server has taken them.
    fn sent(
        &mut self,
        segment: &Segment<'_>,
        events: &mut CounterVec<TcpEvent>,
    ) -> Result<(), Over> {
        let mut messages = Messages {
            complete: Vec::new(),
            events,
        };
        let state = self.pod.take(segment, &mut messages);
        let Messages { complete, events } = messages;
        for Message { bytes, end } in complete {
            self.questions.ask(&bytes, end, events);
        }
        match state? {
            // The pod sends no more, and may still receive.
            State::Open | State::Ended => Ok(()),
            State::Reset => Err(self.end_event().into()),
        }
    }

    /// Takes a segment of the server; returns the answers that are complete now.
    fn received(
        &mut self,
        segment: &Segment<'_>,
        events: &mut CounterVec<TcpEvent>,
    ) -> Result<Vec<Vec<u8>>, Over> {
        if segment.has(RST) && self.server.is_some() {
            return Err(self.end_event().into());
        }
        if segment.has(ACK) {
            // A SYN-ACK acknowledges the SYN and nothing else, but for data that came with it.
            let acknowledged = self.pod.place(segment.acknowledgment);
            if !(self.pod.first()..=self.pod.reached()).contains(&acknowledged) {
                return self.not_sent(events);
            }
            self.acknowledged = self.acknowledged.max(acknowledged);
        } else if !segment.has(RST) {
            // Every segment of a connection but the first, and a reset, acknowledges (RFC 9293,
            // section 3.10.7.4).
            return self.not_sent(events);
        }
        if segment.has(SYN) && !segment.has(RST) {
            self.accept(segment.sequence, events)?;
        }
        let Some(server) = &mut self.server else {
            return match segment.has(RST) && segment.has(ACK) {
                true => Err(TcpEvent::Closed.into()),
                false => {
                    events.count(TcpEvent::NoBeginning);
                    Ok(Vec::new())
                }
            };
        };
        if server.begins_late(segment) {
            return Err(TcpEvent::Gap.into());
        }
        let mut messages = Messages {
            complete: Vec::new(),
            events,
        };
        let state = server.take(segment, &mut messages);
        let end_event = server.end_event();
        let Messages { complete, events } = messages;
        let mut answers = Vec::new();
        for Message { bytes, .. } in complete {
            if self.questions.is_answered(&bytes, self.acknowledged) {
                events.count(TcpEvent::Message);
                answers.push(bytes);
            } else {
                events.count(TcpEvent::NotAsked);
            }
        }
        match state {
            Ok(State::Open) => Ok(answers),
            Ok(State::Ended | State::Reset) => Err(Over {
                event: end_event,
                answers,
            }),
            Err(event) => Err(Over { event, answers }),
        }
    }

    /// A segment of the server acknowledges bytes that the pod has not sent. Before the SYN-ACK it may belong to an
    /// earlier connection of the same ports, and nothing of it is kept.
    fn not_sent(&self, events: &mut CounterVec<TcpEvent>) -> Result<Vec<Vec<u8>>, Over> {
        if self.server.is_some() {
            return Err(TcpEvent::NotSent.into());
        }
        events.count(TcpEvent::NotSent);
        Ok(Vec::new())
    }

    /// Takes the server's SYN-ACK. A repeated SYN-ACK has the same number, and comes before data: the server repeats
    /// it until the pod has accepted it (RFC 9293, section 3.10.7.4). After data, even one with the same number
    /// belongs to another connection: a server with SYN cookies gives the same SYN the same sequence number for a
    /// minute (`tcp_cookie_time` in Linux' include/net/tcp.h).
    ///
    /// A server with cookies may also answer a repeated SYN with another sequence number. The pod may have accepted
    /// either, and the agent cannot know which. Such a connection is not read.
    fn accept(&mut self, initial: u32, events: &mut CounterVec<TcpEvent>) -> Result<(), TcpEvent> {
        match &self.server {
            None => {
                events.count(TcpEvent::Opened);
                self.server = Some(Stream::new(initial));
                Ok(())
            }
            Some(known) if known.initial() == initial && known.taken() == 0 => Ok(()),
            Some(_) => Err(TcpEvent::Conflict),
        }
    }
}

#[cfg(test)]
mod tests;
