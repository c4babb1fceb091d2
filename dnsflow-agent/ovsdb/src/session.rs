//! One session with an OVSDB server, without IO: pieces of messages and the time go in, messages and [`Event`]s come
//! out.
//!
//! ```text
//!   new ──monitor_cond──▶ Monitoring ──reply──▶ Conditioning ──reply──▶ Synced ─┐ update2:
//!                             │                      ▲                   ▲      │ Changed
//!                             └──reply, no table is deferred─────────────┘──────┘
//! ```
//!
//! `Synced` comes once, with the whole content. ovsdb-server sends the rows of a changed condition before it answers
//! the request (`ovsdb_jsonrpc_monitor_cond_change` in `ovsdb/jsonrpc-server.c`). So the deferred tables are there by
//! then.
//!
//! Every [`SessionError`] ends the session: the owner opens a new one and starts from an empty replica.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use bytes::BytesMut;
use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};

use super::{
    framing::{FramedRow, PIECE_MAX_BYTES, Piece, Place},
    quoted,
    replica::{Applied, Replica, RowChange, TooLarge, UpdateError},
    schema::{Clause, Condition, Database, TableLimits},
    uuid::Uuid,
    value::{PackedRow, row_id},
};

/// After this long without a message, the session sends an echo request; after as long again, the
/// connection is dead. ovsdb-server's default is the same.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a server may say nothing before the first content is there. ovsdb-server puts the whole answer together
/// before it sends the first byte, and does nothing else meanwhile.
pub const FIRST_CONTENT_WAIT: Duration = Duration::from_secs(60);

/// The most bytes that wait for the server: more than the longest of its requests, which is repeated to it.
const OUTPUT_MAX_BYTES: usize = 2 * PIECE_MAX_BYTES;

/// The name of our one monitor on a connection.
const MONITOR: &str = "dnsflow";
/// The notification that has rows.
const UPDATE: &str = "update2";
/// The problem of a message that has rows and is neither an update nor the first content.
const ROWS_ELSEWHERE: &str = "rows outside of an update";
/// The id of our echo requests, which need no bookkeeping.
const ECHO: &str = "echo";

/// The conditions of the monitored tables; [`Condition::Every`] for tables without an entry.
pub type Conditions = BTreeMap<&'static str, Condition>;

/// An error that the server reported (RFC 7047, section 3.1, `<error>`).
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{error}{}{details}", if .details.is_empty() { "" } else { ": " })]
pub struct ServerError {
    /// The short error string.
    pub error: String,
    /// More of it, or empty.
    pub details: String,
}

impl SessionError {
    /// The table that is too large, if that is the reason.
    pub fn too_large(&self) -> Option<TooLarge> {
        match self.reason {
            Reason::Update(UpdateError::TooLarge(too_large)) => Some(too_large),
            _ => None,
        }
    }
}

impl ServerError {
    fn from_json(json: &Value) -> Self {
        let text = |name: &str| json.get(name).and_then(Value::as_str);
        Self {
            error: match text("error") {
                Some(error) => quoted(error),
                None => quoted(&json.to_string()),
            },
            details: quoted(text("details").unwrap_or_default()),
        }
    }
}

/// Why the conversation with a database is over.
#[derive(Debug, thiserror::Error)]
#[error("database {database}: {reason}")]
pub struct SessionError {
    database: &'static str,
    reason: Reason,
}

/// Why the conversation is over.
#[derive(Debug, thiserror::Error)]
enum Reason {
    /// The message is not JSON, or nested too deeply.
    #[error("unreadable message: {0}")]
    Json(#[from] serde_json::Error),
    /// The message does not fit the conversation.
    #[error("unexpected message: {0}")]
    Unexpected(&'static str),
    /// The server refused to monitor these tables.
    #[error("cannot monitor {tables}: {error}")]
    Refused { tables: String, error: ServerError },
    /// An update cannot be applied to the replica.
    #[error("{0}")]
    Update(#[from] UpdateError),
    /// The server stopped the monitor: the database was removed or converted to a new schema
    /// (ovsdb-server(7), section 4.1.7, `monitor_canceled`).
    #[error("the server canceled the monitor")]
    Canceled,
    /// The server asks and does not read the answers.
    #[error("the server does not read: {OUTPUT_MAX_BYTES} bytes wait for it")]
    NotRead,
    /// No sign of life for so long.
    #[error("no answer for {} s", .0.as_secs())]
    TimedOut(Duration),
}

/// Something that the owner of the session should know.
#[derive(Debug, Eq, PartialEq)]
pub enum Event {
    /// The replica is complete; this event comes once.
    Synced,
    /// A table is left out from now on, because it is too large. If [`Event::Synced`] was before, [`Event::Changed`]
    /// follows, in which its rows are gone.
    TooLarge(TooLarge),
    /// One update of the server, after [`Event::Synced`]: usually one transaction.
    Changed(Vec<RowChange>),
    /// After [`Event::Synced`]: the last conditions set are in force, and the rows that they
    /// brought have been told.
    Conditioned,
    /// The answer to [`Session::select`].
    Selected {
        /// As given.
        tag: u64,
        /// The rows found.
        rows: Result<Vec<Uuid>, ServerError>,
    },
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    Monitoring,
    Conditioning,
    Synced,
}

#[derive(Clone, Debug)]
enum Request {
    Monitor,
    Condition(BTreeSet<&'static str>),
    Select { tag: u64 },
}

/// A message of the server (JSON-RPC 1.0): a request, a notification or an answer.
#[derive(Deserialize)]
struct Message<'a> {
    #[serde(default)]
    method: Option<String>,
    #[serde(default)]
    id: Value,
    #[serde(borrow, default)]
    params: Option<&'a RawValue>,
    #[serde(borrow, default)]
    result: Option<&'a RawValue>,
    #[serde(default)]
    error: Value,
}

/// The conversation.
#[derive(Debug)]
pub struct Session {
    database: &'static Database,
    conditions: Conditions,
    /// Tables whose condition the server does not know yet.
    changed_conditions: BTreeSet<&'static str>,
    replica: Replica,
    phase: Phase,
    /// Where the message that is arriving has rows, if it has some.
    rows_in: Option<Place>,
    /// The rows that it has changed, once the replica is complete, as they were before it. A row of which it says the
    /// same again and again is here once, and one that it inserts and deletes is not.
    changes: BTreeMap<(&'static str, Uuid), Option<PackedRow>>,
    next_id: u64,
    pending: BTreeMap<u64, Request>,
    output: BytesMut,
    last_heard: Instant,
    /// When the server was asked whether it is there, if it has not answered since.
    probed: Option<Instant>,
}

impl Session {
    /// Begins a conversation: the first request is in [`Session::output`].
    pub fn new(database: &'static Database, conditions: Conditions, now: Instant) -> Self {
        let mut session = Self {
            database,
            conditions,
            changed_conditions: BTreeSet::new(),
            replica: Replica::new(database),
            phase: Phase::Monitoring,
            rows_in: None,
            changes: BTreeMap::new(),
            next_id: 0,
            pending: BTreeMap::new(),
            output: BytesMut::new(),
            last_heard: now,
            probed: None,
        };
        let requests: Map<String, Value> = database
            .tables
            .iter()
            .map(|table| {
                let columns: Vec<&str> = table.columns.iter().map(|column| column.name).collect();
                let request = if table.deferred {
                    json!({"columns": columns, "where": [false], "select": {"initial": false}})
                } else {
                    json!({"columns": columns, "where": session.condition(table.name).to_json()})
                };
                (table.name.to_owned(), json!([request]))
            })
            .collect();
        let deferred = database.tables.iter().filter(|table| table.deferred);
        let deferred = deferred.map(|table| table.name);
        let wanted = deferred.filter(|table| !session.condition(table).is_nothing());
        session.changed_conditions = wanted.collect();
        session.request(
            "monitor_cond",
            json!([database.name, MONITOR, requests]),
            Request::Monitor,
        );
        session
    }

    /// The rows known so far; complete after [`Event::Synced`]. Between two events, some rows of the next update may be
    /// there.
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Keeps no more than this of each table, and goes on without those of the tables `optional` that have more. To be
    /// called before anything is received.
    pub fn limit(&mut self, limits: TableLimits, optional: &'static [&'static str]) {
        self.replica = Replica::limited(self.database, limits, optional);
    }

    /// Bytes to be sent; the owner removes what it has sent.
    pub fn output(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// When [`Session::handle_timeout`] wants to be called.
    pub fn next_deadline(&self) -> Instant {
        self.probed.unwrap_or(self.last_heard) + self.probe_interval()
    }

    fn probe_interval(&self) -> Duration {
        match self.phase {
            // An echo request is sent after half of it.
            Phase::Monitoring | Phase::Conditioning => FIRST_CONTENT_WAIT / 2,
            Phase::Synced => PROBE_INTERVAL,
        }
    }

    /// Notes that bytes were received, also part of a message.
    pub fn heard(&mut self, now: Instant) {
        self.last_heard = now;
        self.probed = None;
    }

    /// Sends an echo request, or ends the session, if that is due.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), SessionError> {
        if now < self.next_deadline() {
            return Ok(());
        }
        if self.probed.is_some() {
            return Err(self.over(Reason::TimedOut(2 * self.probe_interval())));
        }
        // A process that was stopped for long gives the server as much time as any other.
        self.probed = Some(now);
        self.send(&json!({"method": "echo", "params": [], "id": ECHO}));
        Ok(())
    }

    /// Replicates the rows of this table that meet the condition, from now on. Of several changes
    /// while a request is under way, only the last is sent, because the server goes through every
    /// row of the table for each. Returns whether [`Event::Conditioned`] or [`Event::Synced`] will
    /// follow.
    pub fn set_condition(&mut self, table: &'static str, condition: Condition) -> bool {
        if *self.condition(table) == condition {
            return self.phase != Phase::Synced || self.condition_in_flight();
        }
        self.conditions.insert(table, condition);
        self.changed_conditions.insert(table);
        if self.phase != Phase::Monitoring {
            self.request_conditions();
        }
        true
    }

    /// Asks which rows meet all clauses; [`Event::Selected`] brings the answer.
    pub fn select(&mut self, tag: u64, table: &'static str, clauses: &[Clause]) {
        let clauses: Value = clauses.iter().map(Clause::to_json).collect();
        let operation =
            json!({"op": "select", "table": table, "where": clauses, "columns": ["_uuid"]});
        self.request(
            "transact",
            json!([self.database.name, operation]),
            Request::Select { tag },
        );
    }

    /// Takes a piece of the server's message.
    pub fn receive(&mut self, piece: Piece<'_>) -> Result<Option<Event>, SessionError> {
        let event = match piece {
            Piece::Row(row) => self.row(row),
            Piece::Message(message) => self.message(message),
        };
        let event = event.map_err(|reason| self.over(reason))?;
        match self.output.len() > OUTPUT_MAX_BYTES {
            true => Err(self.over(Reason::NotRead)),
            false => Ok(event),
        }
    }

    fn over(&self, reason: Reason) -> SessionError {
        SessionError {
            database: self.database.name,
            reason,
        }
    }

    /// Applies a row at once, before it is known whether the message is what it seems to be: every error ends the
    /// session, and with it the replica.
    fn row(&mut self, row: FramedRow<'_>) -> Result<Option<Event>, Reason> {
        let mut pending = self.pending.values();
        let is_expected = match row.place {
            Place::Result => pending.any(|request| matches!(request, Request::Monitor)),
            Place::Params => true,
        };
        if !is_expected || self.rows_in.is_some_and(|place| place != row.place) {
            return Err(Reason::Unexpected(ROWS_ELSEWHERE));
        }
        self.rows_in = Some(row.place);
        match self.replica.apply(row.table, row.id, row.update)? {
            Applied::Changed(change) => {
                self.note(change);
                Ok(None)
            }
            Applied::LeftOut(too_large, gone) => {
                for change in gone {
                    self.note(change);
                }
                Ok(Some(Event::TooLarge(too_large)))
            }
            Applied::Nothing => Ok(None),
        }
    }

    /// Keeps a change until the end of the message.
    fn note(&mut self, change: RowChange) {
        if self.phase != Phase::Synced {
            return;
        }
        let RowChange { table, id, old } = change;
        let before = self.changes.entry((table, id)).or_insert(old);
        if before.is_none() && !self.replica.has(table, id) {
            self.changes.remove(&(table, id));
        }
    }

    /// Takes the rest of a message, behind its rows.
    fn message(&mut self, message: &[u8]) -> Result<Option<Event>, Reason> {
        let rows_in = self.rows_in.take();
        let Message {
            method,
            id,
            params,
            result,
            error,
        } = serde_json::from_slice(message)?;
        let may_have_rows = match (&method, &id) {
            (Some(method), Value::Null) if method == UPDATE => Some(Place::Params),
            (None, id) if self.is_monitor(id) => Some(Place::Result),
            _ => None,
        };
        if rows_in.is_some() && rows_in != may_have_rows {
            return Err(Reason::Unexpected(ROWS_ELSEWHERE));
        }
        match (method, id) {
            (Some(method), Value::Null) => self.notified(&method, params),
            (Some(method), id) if method == "echo" => {
                self.send(&json!({"id": id, "result": params, "error": null}));
                Ok(None)
            }
            (Some(method), id) => {
                let error = json!({"error": "unknown method", "details": method});
                self.send(&json!({"id": id, "result": null, "error": error}));
                Ok(None)
            }
            (_, Value::String(id)) if id == ECHO => Ok(None),
            (_, id) => {
                let request = id.as_u64().and_then(|id| self.pending.remove(&id));
                let Some(request) = request else {
                    return Err(Reason::Unexpected("an answer to nothing"));
                };
                self.answered(request, result.unwrap_or(RawValue::NULL), error)
            }
        }
    }

    fn notified(
        &mut self,
        method: &str,
        params: Option<&RawValue>,
    ) -> Result<Option<Event>, Reason> {
        match method {
            UPDATE => {
                let params = params.map(|params| serde_json::from_str(params.get()));
                let Some(Ok::<(&str, &RawValue), _>((MONITOR, rest))) = params else {
                    return Err(Reason::Unexpected(
                        "an update2 without our monitor and its updates",
                    ));
                };
                self.replica.check(rest.get())?;
                let changes = std::mem::take(&mut self.changes).into_iter();
                let changes = changes.map(|((table, id), old)| RowChange { table, id, old });
                let changes = changes.collect();
                Ok((self.phase == Phase::Synced).then_some(Event::Changed(changes)))
            }
            "monitor_canceled" => Err(Reason::Canceled),
            _ => Ok(None),
        }
    }

    fn answered(
        &mut self,
        request: Request,
        result: &RawValue,
        error: Value,
    ) -> Result<Option<Event>, Reason> {
        match request {
            Request::Monitor => {
                let tables = self.database.tables.iter().map(|table| table.name);
                self.refused(tables, &error)?;
                self.replica.check(result.get())?;
                self.phase = Phase::Conditioning;
                self.request_conditions();
                Ok(self.synced())
            }
            Request::Condition(tables) => {
                self.refused(tables.into_iter(), &error)?;
                self.request_conditions();
                if self.phase == Phase::Synced && !self.condition_in_flight() {
                    return Ok(Some(Event::Conditioned));
                }
                Ok(self.synced())
            }
            Request::Select { tag } => Ok(Some(Event::Selected {
                tag,
                rows: selected(result, &error),
            })),
        }
    }

    fn synced(&mut self) -> Option<Event> {
        if self.phase != Phase::Conditioning || self.condition_in_flight() {
            return None;
        }
        self.phase = Phase::Synced;
        Some(Event::Synced)
    }

    fn refused(
        &self,
        tables: impl Iterator<Item = &'static str>,
        error: &Value,
    ) -> Result<(), Reason> {
        if error.is_null() {
            return Ok(());
        }
        Err(Reason::Refused {
            tables: tables.collect::<Vec<_>>().join(", "),
            error: ServerError::from_json(error),
        })
    }

    fn is_monitor(&self, id: &Value) -> bool {
        let request = id.as_u64().and_then(|id| self.pending.get(&id));
        matches!(request, Some(Request::Monitor))
    }

    fn condition(&self, table: &str) -> &Condition {
        self.conditions.get(table).unwrap_or(&Condition::Every)
    }

    fn condition_in_flight(&self) -> bool {
        let mut pending = self.pending.values();
        pending.any(|request| matches!(request, Request::Condition(_)))
    }

    fn request_conditions(&mut self) {
        if self.changed_conditions.is_empty() || self.condition_in_flight() {
            return;
        }
        let tables = std::mem::take(&mut self.changed_conditions);
        let requests: Map<String, Value> = tables
            .iter()
            .map(|table| {
                let condition = self.condition(table).to_json();
                ((*table).to_owned(), json!([{"where": condition}]))
            })
            .collect();
        self.request(
            "monitor_cond_change",
            json!([MONITOR, MONITOR, requests]),
            Request::Condition(tables),
        );
    }

    fn request(&mut self, method: &str, params: Value, request: Request) {
        let id = self.next_id;
        self.next_id += 1;
        self.pending.insert(id, request);
        self.send(&json!({"method": method, "params": params, "id": id}));
    }

    fn send(&mut self, message: &Value) {
        self.output
            .extend_from_slice(message.to_string().as_bytes());
    }
}

/// Reads the answer to a transaction of one `select` (RFC 7047, sections 4.1.3 and 5.2.2).
fn selected(result: &RawValue, error: &Value) -> Result<Vec<Uuid>, ServerError> {
    if !error.is_null() {
        return Err(ServerError::from_json(error));
    }
    let result: Value = serde_json::from_str(result.get()).unwrap_or_default();
    let Some(rows) = result.pointer("/0/rows").and_then(Value::as_array) else {
        let outcome = result.get(0).unwrap_or(&result);
        return Err(ServerError::from_json(outcome));
    };
    let ids = rows
        .iter()
        .map(|row| row.get("_uuid")?.as_array().and_then(|id| row_id(id)));
    ids.collect::<Option<_>>().ok_or_else(|| ServerError {
        error: "a row without its id".into(),
        details: String::new(),
    })
}

#[cfg(test)]
mod tests;
