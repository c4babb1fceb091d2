//! Converts replicated rows to the values that the core reads.
//!
//! A row that cannot be converted is left out, counted and named in the log; it never stops
//! the others.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use dnsflow_core::ovn::rows::{Changes, RowId};

use super::{
    connection::OvsdbCounters,
    replica::{Replica, RowChange},
    value::{CellError, Row},
};

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
        let rows = replica.rows(table);
        rows.filter_map(|(id, row)| {
            let value = self.value(table, id, convert(&row))?;
            Some((id, Some(value)))
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
                (old != new).then_some((change.id, new))
            })
            .collect()
    }

    fn value<T>(&mut self, table: &str, row: RowId, converted: Conversion<T>) -> Option<T> {
        match converted {
            Ok(value) => value,
            Err(error) => {
                self.counters.rows_skipped.fetch_add(1, Relaxed);
                if self.warned < WARNINGS_MAX {
                    self.warned += 1;
                    let database = self.database;
                    tracing::warn!(database, table, %row, %error, "row left out");
                    if self.warned == WARNINGS_MAX {
                        tracing::warn!(database, "further rows left out are only counted");
                    }
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
