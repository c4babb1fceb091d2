//! The driver of a [`Session`]: a Unix socket, the clock, and reconnection with back-off.
//!
//! A [`Connection`] owns one socket and no task: reading, writing and reconnecting happen in
//! [`Connection::next`]. [`Connection::flush`] and the methods that ask write as much as the socket
//! takes at once, so that a flow_mod leaves in the wake-up that decided on it. `next` writes the
//! rest, and always reads as well.

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use dnsflow_core::{
    Timestamp,
    io::input::{BatchError, BatchId, FlowQuestion},
    values::flow::FlowChange,
};
use tokio::{
    io::Interest,
    net::UnixStream,
    time::{sleep, timeout},
};

use super::{Event, IDLE_MAX, OpenFlowCounters, Session};
use crate::{causes::Causes, clock::now};

/// The wait before the first new attempt to connect; it doubles with each failure.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// The longest wait between attempts. A connection that lasted longer resets the wait.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// The connection is closed when more bytes than this wait to be written. A bundle of a hundred
/// thousand flows takes about 21 MB.
const OUTPUT_MAX: usize = 64 << 20;
/// At most this many bytes in one read: about the longest message.
const READ_MAX: usize = 1 << 16;

/// At most this many reasons of one outage are reported: a socket that goes and comes gives two
/// reasons in turns.
const REASONS_MAX: usize = 4;

/// A connection to the bridge's management socket, which reconnects by itself.
#[derive(Debug)]
pub struct Connection {
    path: PathBuf,
    link: Link,
    backoff: Duration,
    events: VecDeque<Event>,
    monitored: BTreeSet<u8>,
    /// The counters of earlier sessions.
    counters: OpenFlowCounters,
    causes: Causes<String, REASONS_MAX>,
    buffer: Box<[u8]>,
}

#[derive(Debug)]
enum Link {
    Down { retry_at: Timestamp },
    Up(Box<Live>),
}

#[derive(Debug)]
struct Live {
    stream: UnixStream,
    session: Session,
    output: BytesMut,
    since: Timestamp,
}

impl Connection {
    /// A connection to `path`. [`Connection::next`] makes the first attempt.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            link: Link::Down {
                retry_at: Timestamp::default(),
            },
            backoff: BACKOFF_MIN,
            events: VecDeque::new(),
            monitored: BTreeSet::new(),
            counters: OpenFlowCounters::default(),
            causes: Causes::default(),
            buffer: vec![0; READ_MAX].into_boxed_slice(),
        }
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the next event, writes output and keeps the connection alive: the owner has to
    /// await this all the time. The call can be cancelled and repeated without loss.
    pub async fn next(&mut self) -> Event {
        self.flush();
        loop {
            if let Some(event) = self.poll_event() {
                return event;
            }
            match &self.link {
                Link::Down { retry_at } => {
                    sleep(retry_at.since(now())).await;
                    self.connect().await;
                }
                Link::Up(live) => {
                    let interest = if live.output.is_empty() {
                        Interest::READABLE
                    } else {
                        Interest::READABLE | Interest::WRITABLE
                    };
                    let patience = live.session.next_deadline().since(now());
                    let ready = timeout(patience, live.stream.ready(interest)).await;
                    let done = match ready {
                        Ok(Ok(_)) => self.read(),
                        Ok(Err(error)) => Err(error.to_string()),
                        Err(_) => self.expire(),
                    };
                    match done {
                        Ok(()) => self.flush(),
                        Err(reason) => self.fail(&reason),
                    }
                }
            }
        }
    }

    /// The next event, if there is one already.
    pub fn ready(&mut self) -> Option<Event> {
        self.poll_event()
    }

    /// Changes flows; see [`Session::apply`]. [`Event::Applied`] answers, also without a
    /// connection. The bytes wait for [`Connection::flush`] or `next`, so that batches that come
    /// together leave together.
    pub fn apply(
        &mut self,
        batch: BatchId,
        atomic: bool,
        changes: Vec<FlowChange>,
        count: Vec<u32>,
    ) {
        match &mut self.link {
            Link::Up(live) => live.session.apply(batch, atomic, changes, count),
            Link::Down { .. } => self.events.push_back(Event::Applied {
                batch,
                result: Err(BatchError::ConnectionLost),
            }),
        }
    }

    /// Asks a question; see [`Session::ask`]. Without a connection nothing happens: ask again after
    /// [`Event::Up`].
    pub fn ask(&mut self, question: FlowQuestion) {
        if let Link::Up(live) = &mut self.link {
            live.session.ask(question);
        }
        self.flush();
    }

    /// Reports lost flows of exactly these tables from now on, on this and on later connections.
    pub fn monitor_tables(&mut self, tables: BTreeSet<u8>) {
        self.monitored = tables;
        if let Link::Up(live) = &mut self.link {
            live.session.monitor_tables(self.monitored.clone());
        }
        self.flush();
    }

    /// Totals of what was ignored since the start.
    pub fn counters(&self) -> OpenFlowCounters {
        match &self.link {
            Link::Up(live) => sum(self.counters, live.session.counters()),
            Link::Down { .. } => self.counters,
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        let Link::Up(live) = &mut self.link else {
            return None;
        };
        let event = live.session.poll_event()?;
        if event == Event::Up {
            self.causes.end();
            // Before the event, so that no loss is missed.
            live.session.monitor_tables(self.monitored.clone());
            self.flush();
        }
        Some(event)
    }

    async fn connect(&mut self) {
        match timeout(IDLE_MAX, UnixStream::connect(&self.path)).await {
            Ok(Ok(stream)) => {
                let since = now();
                self.link = Link::Up(Box::new(Live {
                    stream,
                    session: Session::new(since),
                    output: BytesMut::new(),
                    since,
                }));
                self.flush();
            }
            Ok(Err(error)) => self.fail(&error.to_string()),
            Err(_) => self.fail("no program accepts the connection"),
        }
    }

    /// Reads once, so that the events of this read come before more bytes.
    fn read(&mut self) -> Result<(), String> {
        let Link::Up(live) = &mut self.link else {
            return Ok(());
        };
        let mut short = None;
        let read = live.stream.try_io(Interest::READABLE, || {
            let length = rustix::io::read(&live.stream, &mut self.buffer[..])?;
            if (1..self.buffer.len()).contains(&length) {
                // There is no more. Epoll reports the next bytes as a new edge, and no second read has to find out
                // (epoll(7), question 9).
                short = Some(length);
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(length)
        });
        match short.map_or(read, Ok) {
            Ok(0) => Err("the switch closed the connection".to_owned()),
            Ok(length) => live
                .session
                .receive(&self.buffer[..length], now())
                .map_err(|error| error.to_string()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn expire(&mut self) -> Result<(), String> {
        let Link::Up(live) = &mut self.link else {
            return Ok(());
        };
        live.session
            .handle_timeout(now())
            .map_err(|error| error.to_string())
    }

    /// Writes what the socket takes now.
    pub fn flush(&mut self) {
        let Link::Up(live) = &mut self.link else {
            return;
        };
        live.session.transmit(&mut live.output);
        while !live.output.is_empty() {
            match live.stream.try_write(&live.output) {
                Ok(written) => live.output.advance(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return self.fail(&error.to_string()),
            }
        }
        if live.output.len() > OUTPUT_MAX {
            self.fail("the switch does not read: more than 64 MiB wait to be written");
        }
    }

    /// Ends the connection and plans the next attempt.
    fn fail(&mut self, reason: &str) {
        let now = now();
        if let Link::Up(live) = &mut self.link {
            live.session.close();
            while let Some(event) = live.session.poll_event() {
                self.events.push_back(event);
            }
            self.counters = sum(self.counters, live.session.counters());
            if now.since(live.since) > BACKOFF_MAX {
                self.backoff = BACKOFF_MIN;
            }
        }
        self.counters.disconnects += 1;
        self.link = Link::Down {
            retry_at: now + self.backoff,
        };
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
        let reason = format!(
            "OpenFlow connection to {} (--openflow-socket): {reason}",
            self.path.display()
        );
        if self.causes.is_news(reason.clone()) {
            self.events.push_back(Event::Down { reason });
        }
    }
}

fn sum(one: OpenFlowCounters, other: OpenFlowCounters) -> OpenFlowCounters {
    OpenFlowCounters {
        unexpected_messages: one.unexpected_messages + other.unexpected_messages,
        unreadable_flows: one.unreadable_flows + other.unreadable_flows,
        disconnects: one.disconnects + other.disconnects,
    }
}

#[cfg(test)]
mod tests;
