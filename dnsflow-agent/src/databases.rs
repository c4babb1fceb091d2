//! What the edges to databases have in common: rows become values of the core, and tables that are too large are told.
//!
//! A row that cannot be converted is left out, counted and named in the log; it never stops
//! the others.

use std::{
    fmt::Display,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use dnsflow_core::{
    Input,
    ovn::rows::{Changes, RowId},
};
use dnsflow_ovsdb::{CellError, Connection, OvsdbCounters, Replica, Row, RowChange, Uuid};

use crate::asking::large_table::large_table;

/// At most this many rows are named in the log between two resets; further ones are only counted.
const WARNINGS_MAX: u32 = 20;

/// The result for a row: a value, or nothing if the row is not of interest.
pub type Conversion<T> = Result<Option<T>, CellError>;

/// Converts rows, and logs those that cannot be converted.
#[derive(Debug)]
pub struct Converter {
    database: &'static str,
    counters: Arc<OvsdbCounters>,
    warned: u32,
}

impl Converter {
    /// A converter of rows of this database.
    pub fn new(database: &'static str, counters: Arc<OvsdbCounters>) -> Self {
        Self {
            database,
            counters,
            warned: 0,
        }
    }

    /// Logs warnings again from here on.
    pub fn reset(&mut self) {
        self.warned = 0;
    }

    /// Every row of a table.
    pub fn every<T>(
        &mut self,
        replica: &Replica,
        table: &'static str,
        convert: impl Fn(&Row) -> Conversion<T>,
    ) -> Changes<T> {
        self.every_wanted(replica, table, |_| true, convert)
    }

    /// Every row of a table that is wanted.
    pub fn every_wanted<T>(
        &mut self,
        replica: &Replica,
        table: &'static str,
        is_wanted: impl Fn(RowId) -> bool,
        convert: impl Fn(&Row) -> Conversion<T>,
    ) -> Changes<T> {
        let rows = replica.rows(table);
        let rows = rows.filter(|(id, _)| is_wanted(row_id(*id)));
        rows.filter_map(|(id, row)| {
            let value = self.value(table, id, convert(&row))?;
            Some((row_id(id), Some(value)))
        })
        .collect()
    }

    /// The rows of a table whose value has changed.
    pub fn changed<T: PartialEq>(
        &mut self,
        replica: &Replica,
        changes: &[RowChange],
        table: &'static str,
        convert: impl Fn(&Row) -> Conversion<T>,
    ) -> Changes<T> {
        let changes = changes.iter().filter(|change| change.table == table);
        changes
            .filter_map(|change| {
                let old = replica.before(change);
                let old = old.and_then(|row| convert(&row).ok().flatten());
                let new = replica
                    .row(table, change.id)
                    .and_then(|row| self.value(table, change.id, convert(&row)));
                (old != new).then_some((row_id(change.id), new))
            })
            .collect()
    }

    fn value<T>(&mut self, table: &str, row: Uuid, converted: Conversion<T>) -> Option<T> {
        converted.unwrap_or_else(|error| {
            self.skipped(table, row, &error);
            None
        })
    }

    /// Counts a row that is left out, and logs why.
    pub fn skipped(&mut self, table: &str, row: Uuid, error: &dyn Display) {
        self.counters.rows_skipped.fetch_add(1, Relaxed);
        if self.warned < WARNINGS_MAX {
            self.warned += 1;
            let database = self.database;
            tracing::warn!(database, table, %row, %error, "row skipped");
            if self.warned == WARNINGS_MAX {
                tracing::warn!(database, "further skipped rows are only counted");
            }
        }
    }
}

/// The core's identity of a row.
pub fn row_id(id: Uuid) -> RowId {
    RowId::new(id.bits())
}

/// The tables that are too large, if they are others than when last asked ([`Connection::take_large_tables`]).
pub fn take_large_tables(connection: &mut Connection) -> Option<Input> {
    let database = connection.database().name;
    let tables = connection.take_large_tables()?.iter();
    Some(Input::LargeTables {
        database,
        tables: tables.map(|large| large_table(database, large)).collect(),
    })
}

/// Logs them: for an owner that gives the core no inputs.
pub fn log_large_tables(connection: &mut Connection) {
    let database = connection.database().name;
    for large in connection.take_large_tables().into_iter().flatten() {
        tracing::warn!("{}", large_table(database, large));
    }
}

#[cfg(test)]
mod tests;
