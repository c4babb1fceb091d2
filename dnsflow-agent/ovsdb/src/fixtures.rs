//! Recordings for tests: conversations with ovsdb-server, and rows as ovn-kubernetes and
//! ovn-northd wrote them. Their READMEs say where they come from.

#![allow(clippy::unwrap_used)]

use std::{collections::BTreeMap, error::Error, time::Instant};

use serde_json::{Map, Value, json};

use super::{
    framing::{Framer, Piece},
    replica::{Applied, Replica, RowChange},
    schema::Database,
    session::{Event, Session},
};

/// Whatever stands in the way of a message.
pub type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// A conversation about the southbound database.
pub const SOUTHBOUND: &str = include_str!("../../../tests/fixtures/ovsdb/southbound.txt");
/// A conversation about the database of Open vSwitch.
pub const VSWITCH: &str = include_str!("../../../tests/fixtures/ovsdb/vswitch.txt");
/// Requests that a server refuses.
pub const REFUSALS: &str = include_str!("../../../tests/fixtures/ovsdb/refusals.txt");

macro_rules! ovn_kubernetes {
    ($file:literal) => {
        include_str!(concat!("../../../tests/fixtures/ovn-kubernetes/", $file))
    };
}
/// The northbound database of a cluster with IPv4.
pub const V4_NB: &str = ovn_kubernetes!("26.03-v4-nb.jsonl");
/// Its southbound database.
pub const V4_SB: &str = ovn_kubernetes!("26.03-v4-sb.jsonl");
/// The northbound database of a cluster with user-defined networks.
pub const UDN_NB: &str = ovn_kubernetes!("26.03-udn-nb.jsonl");
/// Its southbound database.
pub const UDN_SB: &str = ovn_kubernetes!("26.03-udn-sb.jsonl");
/// The northbound database of a cluster with both families, where names are resolved in the cluster.
pub const DUAL_RESOLVER_NB: &str = ovn_kubernetes!("25.03-dual-resolver-nb.jsonl");

/// Gives the session whole messages.
///
/// # Errors
///
/// Those of the session.
pub fn receive(session: &mut Session, messages: &[u8]) -> Outcome<Vec<Event>> {
    let mut framer = Framer::default();
    framer.buffer().extend_from_slice(messages);
    let mut events = Vec::new();
    while let Some(piece) = framer.next_piece()? {
        events.extend(session.receive(piece)?);
    }
    Ok(events)
}

impl Replica {
    /// Applies a `<table-updates2>`.
    ///
    /// # Errors
    ///
    /// If it cannot be read or applied.
    pub fn apply_value(&mut self, updates: Value) -> Outcome<Vec<RowChange>> {
        let mut framer = Framer::default();
        let message = json!({"params": [updates]}).to_string();
        framer.buffer().extend_from_slice(message.as_bytes());
        let mut changes = Vec::new();
        while let Some(piece) = framer.next_piece()? {
            match piece {
                Piece::Row(row) => match self.apply(row.table, row.id, row.update)? {
                    Applied::Changed(change) => changes.push(change),
                    Applied::LeftOut(_, gone) => changes.extend(gone),
                    Applied::Nothing => {}
                },
                Piece::Message(rest) => {
                    let rest: Value = serde_json::from_slice(rest)?;
                    self.check(&rest["params"][0].to_string())?;
                }
            }
        }
        Ok(changes)
    }
}

/// Plays the server's side of a recording and checks the session's side against it.
#[derive(Debug)]
pub struct Transcript {
    lines: std::str::Lines<'static>,
}

impl Transcript {
    /// Of this recording.
    pub fn new(text: &'static str) -> Self {
        Self {
            lines: text.lines(),
        }
    }

    /// Plays up to the next remark or the end.
    ///
    /// # Errors
    ///
    /// Those of the session.
    ///
    /// # Panics
    ///
    /// If the session sends something else than the recording has.
    pub fn play(&mut self, session: &mut Session) -> Outcome<Vec<Event>> {
        let mut events = Vec::new();
        for line in self.lines.by_ref() {
            match line.split_at(2) {
                ("> ", expected) => {
                    let sent = session.output().split();
                    let mut sent = serde_json::Deserializer::from_slice(&sent).into_iter();
                    let sent: Value = sent.next().expect("nothing was sent").unwrap();
                    assert_eq!(sent, serde_json::from_str::<Value>(expected).unwrap());
                }
                ("< ", message) => {
                    session.heard(Instant::now());
                    events.extend(receive(session, message.as_bytes())?);
                }
                ("# ", _) => break,
                _ => panic!("unreadable line: {line}"),
            }
        }
        Ok(events)
    }
}

/// The rows of a recording that meet `wanted`, as a replica.
///
/// # Panics
///
/// If the recording cannot be read.
pub fn replica(
    database: &'static Database,
    text: &str,
    wanted: impl Fn(&str, &Value) -> bool,
) -> Replica {
    let mut table = "";
    let mut rows: Vec<(&str, Map<String, Value>)> = Vec::new();
    let mut datapaths = BTreeMap::new();
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            table = heading.split_once(' ').map_or(heading, |(name, _)| name);
            continue;
        }
        let row: Value = serde_json::from_str(line).unwrap();
        if table == "Datapath_Binding" {
            let name = row["external_ids"]["name"].as_str().unwrap();
            datapaths.insert(format!("<{name}>"), row["_uuid"].clone());
        }
        if database.table(table).is_some() && wanted(table, &row) {
            let Value::Object(row) = row else {
                panic!("not an object: {line}")
            };
            rows.push((table, row));
        }
    }
    let mut updates: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for (table, mut row) in rows {
        let id = row.remove("_uuid").unwrap();
        if let Some(datapath) = row.get_mut("datapath") {
            *datapath = json!(["uuid", datapaths[datapath.as_str().unwrap()]]);
        }
        let columns: Map<String, Value> = row
            .into_iter()
            .map(|(column, value)| (column, wire(value)))
            .collect();
        let updates = updates.entry(table).or_default();
        updates.insert(id.as_str().unwrap().to_owned(), json!({"initial": columns}));
    }
    let mut replica = Replica::new(database);
    replica.apply_value(json!(updates)).unwrap();
    replica
}

/// The recordings write maps as objects and sets as arrays.
fn wire(value: Value) -> Value {
    match value {
        Value::Object(map) => json!(["map", map.into_iter().collect::<Vec<_>>()]),
        Value::Array(parts) if parts.first() != Some(&json!("uuid")) => json!(["set", parts]),
        other => other,
    }
}
