//! The driver of [`Session`]: sockets, reconnects, and their log lines.
//!
//! A [`Connection`] has no task of its own: its owner awaits [`Connection::next`], which can be cancelled and called
//! again at any time without loss. Between the calls, the connection reads nothing and answers no echo request.
//! ovsdb-server then waits, and drops the connection after its own probe interval.
//!
//! A [`Connection`] must never flood the log: each cause of failure is logged once, until a connection succeeds.

use std::{
    collections::BTreeSet,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    time::{sleep_until, timeout},
};

use super::{
    framing::{Framer, FramingError, Piece},
    remote::{Remote, Remotes},
    replica::{Replica, TooLarge},
    schema::{Clause, Condition, Database, TableLimits},
    session::{Conditions, Event, Session, SessionError},
};

/// The first delay before another attempt.
pub const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// The longest delay before another attempt.
pub const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// The wait behind a database with a table that is too large: for each attempt, ovsdb-server puts the whole content
/// together again, and does nothing else meanwhile.
pub const TOO_LARGE_WAIT: Duration = Duration::from_secs(60);
/// The causes of failures that are logged until a connection succeeds; further ones are not.
const CAUSES_MAX: usize = 16;
/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Buffer space for each read.
const READ_BYTES: usize = 64 << 10;

/// What happened to a connection, counted since the start.
#[derive(Debug, Default)]
pub struct OvsdbCounters {
    /// Connections that reached a complete replica.
    pub synced: AtomicU64,
    /// Failed attempts and lost connections.
    pub failures: AtomicU64,
    /// Updates and answers read.
    pub messages: AtomicU64,
    /// Rows left out because a cell has an unexpected value.
    pub rows_skipped: AtomicU64,
}

/// Why a socket can no longer be used.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("the server closed the connection")]
    Closed,
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    ConnectTimeout,
    #[error(transparent)]
    Framing(#[from] FramingError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

impl LinkError {
    fn too_large(&self) -> Option<TooLarge> {
        match self {
            Self::Session(error) => error.too_large(),
            _ => None,
        }
    }
}

/// A connection to one database, which reconnects by itself.
#[derive(Debug)]
pub struct Connection {
    database: &'static Database,
    conditions: Conditions,
    remotes: Vec<Remote>,
    option: &'static str,
    limits: TableLimits,
    /// The tables that can be left out.
    optional: &'static [&'static str],
    /// The tables that are too large, and whether they are others than when last asked.
    large: Vec<TooLarge>,
    large_changed: bool,
    /// The index in `remotes` of the next attempt, and why the earlier ones failed.
    candidate: usize,
    refusals: Vec<String>,
    backoff: Backoff,
    /// The causes that were logged since the last success.
    causes: BTreeSet<String>,
    state: State,
    counters: Arc<OvsdbCounters>,
}

#[derive(Debug)]
enum State {
    Waiting { until: Instant },
    Open(Box<Link>),
}

impl Connection {
    /// A connection to the first of `remotes` that answers. `option` is the option that names the
    /// remotes.
    pub fn new(
        database: &'static Database,
        conditions: Conditions,
        remotes: &Remotes,
        option: &'static str,
    ) -> Self {
        Self {
            database,
            conditions,
            remotes: remotes.iter().cloned().collect(),
            option,
            limits: TableLimits::default(),
            optional: &[],
            large: Vec::new(),
            large_changed: false,
            candidate: 0,
            refusals: Vec::new(),
            backoff: Backoff::default(),
            causes: BTreeSet::new(),
            state: State::Waiting { until: now() },
            counters: Arc::default(),
        }
    }

    /// The same with counters that somebody else reads, too.
    pub fn counted_by(self, counters: Arc<OvsdbCounters>) -> Self {
        Self { counters, ..self }
    }

    /// The same with other limits.
    pub fn limited_to(self, limits: TableLimits) -> Self {
        Self { limits, ..self }
    }

    /// The same, but it goes on without those of these tables that are too large.
    pub fn without_large(self, optional: &'static [&'static str]) -> Self {
        Self { optional, ..self }
    }

    /// The tables that are too large, if they are others than when last asked: those that are left out, or one that
    /// cannot be. In the second case, the database is read again after [`TOO_LARGE_WAIT`].
    pub fn take_large_tables(&mut self) -> Option<&[TooLarge]> {
        std::mem::take(&mut self.large_changed).then_some(&*self.large)
    }

    /// The database.
    pub fn database(&self) -> &'static Database {
        self.database
    }

    /// The counters, which stay readable while the connection works.
    pub fn counters(&self) -> Arc<OvsdbCounters> {
        Arc::clone(&self.counters)
    }

    /// The rows, while connected.
    pub fn replica(&self) -> Option<&Replica> {
        match &self.state {
            State::Waiting { .. } => None,
            State::Open(link) => Some(link.session.replica()),
        }
    }

    /// Replicates the rows of this table that meet the condition, from now on and across
    /// reconnects. Returns whether [`Event::Conditioned`] or [`Event::Synced`] will follow; no
    /// event follows if the condition is in force already.
    pub fn set_condition(&mut self, table: &'static str, condition: Condition) -> bool {
        let pending = match &mut self.state {
            State::Open(link) => link.session.set_condition(table, condition.clone()),
            State::Waiting { .. } => true,
        };
        self.conditions.insert(table, condition);
        pending
    }

    /// Asks which rows meet all clauses. Without a connection nothing happens, and a lost
    /// connection loses the question: ask again on [`Event::Synced`].
    pub fn select(&mut self, tag: u64, table: &'static str, clauses: &[Clause]) {
        if let State::Open(link) = &mut self.state {
            link.session.select(tag, table, clauses);
        }
    }

    /// Waits for the next event, and reconnects as often as necessary. [`Event::TooLarge`] also comes for a table that
    /// cannot be left out; the connection is then lost. Cancel safe.
    pub async fn next(&mut self) -> Event {
        loop {
            match &mut self.state {
                State::Waiting { until } => {
                    sleep_until((*until).into()).await;
                    self.attempt().await;
                }
                State::Open(link) => match link.next(&self.counters).await {
                    Ok(event) => {
                        match event {
                            Event::Synced => self.is_synced(),
                            Event::TooLarge(large) => self.add_large(large),
                            _ => {}
                        }
                        return event;
                    }
                    Err(error) => match error.too_large() {
                        Some(too_large) => {
                            self.too_large(too_large);
                            return Event::TooLarge(too_large);
                        }
                        None => self.lost(&error),
                    },
                },
            }
        }
    }

    /// Waits for the first content.
    ///
    /// # Errors
    ///
    /// When a table is too large.
    pub async fn synced(&mut self) -> Result<(), TooLarge> {
        loop {
            match self.next().await {
                Event::Synced => return Ok(()),
                Event::TooLarge(large) => return Err(large),
                _ => {}
            }
        }
    }

    /// Another table is too large. Which tables are not any more is known when everything has been read.
    fn add_large(&mut self, too_large: TooLarge) {
        let others = self.large.iter().copied();
        let others = others.filter(|one| one.table != too_large.table);
        let mut large: Vec<_> = others.chain([too_large]).collect();
        large.sort_by_key(|one| one.table.name);
        self.set_large(large);
    }

    fn set_large(&mut self, large: Vec<TooLarge>) {
        self.large_changed |= self.large != large;
        self.large = large;
    }

    /// Ends a connection that has brought too much. Other addresses would bring as much.
    fn too_large(&mut self, too_large: TooLarge) {
        self.counters.failures.fetch_add(1, Relaxed);
        self.add_large(too_large);
        self.candidate = 0;
        self.refusals.clear();
        self.state = State::Waiting {
            until: now() + TOO_LARGE_WAIT,
        };
    }

    async fn attempt(&mut self) {
        let Some(remote) = self.remotes.get(self.candidate).cloned() else {
            self.all_failed();
            return;
        };
        match Link::open(&remote, self.database, self.conditions.clone()).await {
            Ok(mut link) => {
                link.session.limit(self.limits, self.optional);
                self.state = State::Open(Box::new(link));
            }
            Err(error) => self.refused(&remote, &error),
        }
    }

    fn refused(&mut self, remote: &Remote, error: &LinkError) {
        self.counters.failures.fetch_add(1, Relaxed);
        self.refusals.push(format!("{remote}: {error}"));
        self.candidate += 1;
        self.state = State::Waiting { until: now() };
    }

    fn all_failed(&mut self) {
        let causes = std::mem::take(&mut self.refusals).join("; ");
        if self.causes.len() < CAUSES_MAX && self.causes.insert(causes.clone()) {
            tracing::warn!(
                database = self.database.name,
                option = self.option,
                causes,
                "cannot reach the database, retrying; {} names another address",
                self.option,
            );
        }
        self.retry();
    }

    fn is_synced(&mut self) {
        self.counters.synced.fetch_add(1, Relaxed);
        if let (State::Open(link), Some(remote)) =
            (&mut self.state, self.remotes.get(self.candidate))
        {
            link.synced_at = Some(now());
            tracing::info!(database = self.database.name, %remote, "connected");
        }
        let large = self.replica().into_iter().flat_map(Replica::left_out);
        let large = large.collect();
        self.set_large(large);
        self.causes.clear();
        self.refusals.clear();
    }

    fn lost(&mut self, error: &LinkError) {
        let State::Open(link) = &self.state else {
            return;
        };
        let synced_at = link.synced_at;
        let Some(remote) = self.remotes.get(self.candidate).cloned() else {
            return;
        };
        let Some(synced_at) = synced_at else {
            self.refused(&remote, error);
            return;
        };
        self.counters.failures.fetch_add(1, Relaxed);
        tracing::warn!(
            database = self.database.name,
            %remote,
            %error,
            "connection lost, reconnecting",
        );
        if now().duration_since(synced_at) > BACKOFF_MAX {
            self.backoff = Backoff::default();
        }
        self.retry();
    }

    fn retry(&mut self) {
        self.candidate = 0;
        self.state = State::Waiting {
            until: now() + self.backoff.step(),
        };
    }
}

/// The runtime's clock, which tests can set.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Delays that double, with jitter.
#[derive(Debug)]
struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: BACKOFF_MIN }
    }
}

impl Backoff {
    /// The next delay: at random in the second half of the nominal delay, so that agents that lost
    /// the same server do not return at the same time.
    fn step(&mut self) -> Duration {
        let nominal = self.next;
        self.next = (nominal * 2).min(BACKOFF_MAX);
        // The standard library seeds each hasher at random.
        let random = RandomState::new().hash_one(()) % 1024;
        let fraction = u32::try_from(random).unwrap_or(0);
        (nominal / 2 + nominal / 2 * fraction / 1024).max(BACKOFF_MIN)
    }
}

/// An open socket and the session on it.
struct Link {
    reader: Box<dyn AsyncRead + Send + Sync + Unpin>,
    writer: Box<dyn AsyncWrite + Send + Sync + Unpin>,
    framer: Framer,
    session: Session,
    synced_at: Option<Instant>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}

impl Link {
    async fn open(
        remote: &Remote,
        database: &'static Database,
        conditions: Conditions,
    ) -> Result<Self, LinkError> {
        let connect = async {
            Ok::<_, std::io::Error>(match remote {
                Remote::Unix(path) => {
                    let (reader, writer) = UnixStream::connect(path).await?.into_split();
                    (Box::new(reader) as Box<_>, Box::new(writer) as Box<_>)
                }
                Remote::Tcp { host, port } => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    stream.set_nodelay(true)?;
                    let (reader, writer) = stream.into_split();
                    (Box::new(reader) as Box<_>, Box::new(writer) as Box<_>)
                }
            })
        };
        let (reader, writer) = timeout(CONNECT_TIMEOUT, connect)
            .await
            .map_err(|_| LinkError::ConnectTimeout)??;
        Ok(Self {
            reader,
            writer,
            framer: Framer::default(),
            session: Session::new(database, conditions, now()),
            synced_at: None,
        })
    }

    /// Cancel safe: every await is, and the framer keeps all received bytes.
    async fn next(&mut self, counters: &OvsdbCounters) -> Result<Event, LinkError> {
        loop {
            while let Some(piece) = self.framer.next_piece()? {
                if matches!(piece, Piece::Message(_)) {
                    counters.messages.fetch_add(1, Relaxed);
                }
                if let Some(event) = self.session.receive(piece)? {
                    return Ok(event);
                }
            }
            let deadline = self.session.next_deadline();
            let buffer = self.framer.buffer();
            buffer.reserve(READ_BYTES);
            let output = self.session.output();
            tokio::select! {
                read = self.reader.read_buf(buffer) => {
                    if read? == 0 {
                        return Err(LinkError::Closed);
                    }
                    self.session.heard(now());
                }
                written = self.writer.write_buf(output), if !output.is_empty() => {
                    written?;
                }
                () = sleep_until(deadline.into()) => {
                    self.session.handle_timeout(now())?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
