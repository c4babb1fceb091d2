//! A client for OVSDB servers: keeps a replica of some tables and reports what changed in it.
//!
//! The protocol is RFC 7047 with the extensions of ovsdb-server(7): `monitor_cond` (section
//! 4.1.12), `monitor_cond_change` (4.1.13) and `update2` (4.1.14). Framing, values, replica and
//! session are pure: bytes and the time go in, messages and events come out. Only `connection`
//! owns a socket.
//!
//! It never writes: no operation but `select` is ever sent.

pub mod connection;
#[cfg(any(test, feature = "test-util"))]
pub mod fixtures;
pub mod framing;
pub mod remote;
pub mod replica;
pub mod schema;
pub mod session;
pub mod uuid;
pub mod value;

pub use connection::{Connection, OvsdbCounters};
pub use remote::{Remote, Remotes};
pub use replica::{Replica, RowChange, TooLarge};
pub use schema::{
    Clause, Column, Condition, Database, Function, Kind, Table, TableLimit, TableLimits,
};
pub use session::Event;
pub use uuid::Uuid;
pub use value::{Atom, CellError, Datum, Row};

/// Of a text of the server, a message has so many bytes at most.
const QUOTED_MAX_BYTES: usize = 200;

/// The beginning of a text that the server has chosen, for a message: the whole may be as long as a piece.
fn quoted(text: &str) -> String {
    match text.floor_char_boundary(QUOTED_MAX_BYTES) {
        end if end < text.len() => format!("{}…", &text[..end]),
        _ => text.to_owned(),
    }
}
