//! A copy of some rows of a database, kept up to date by `update2` notifications.
//!
//! The copy must never differ silently from the database: a change of an unknown row is an error,
//! after which the whole copy is read again.

use std::collections::BTreeMap;

use dnsflow_core::ovn::rows::RowId;
use serde_json::{Map, Value};

use super::{
    schema::{Database, Table},
    value::{PackedRow, Row},
};

/// The most rows kept of one table.
pub const TABLE_ROWS_MAX: usize = 1_000_000;

/// Why an update cannot be applied. The copy has to be read again.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum UpdateError {
    /// The update does not have the form of ovsdb-server(7), section 4.1.14.
    #[error("table {table}: malformed update")]
    Malformed {
        /// The table as the update names it.
        table: String,
    },
    /// The update is for a table that is not replicated.
    #[error("table {table} was not asked for")]
    UnknownTable {
        /// The table as the update names it.
        table: String,
    },
    /// The update modifies a row that is not in the copy.
    #[error("table {table}: row {row} is modified but was never inserted")]
    UnknownRow {
        /// The table.
        table: &'static str,
        /// The row.
        row: RowId,
    },
    /// More rows than [`TABLE_ROWS_MAX`].
    #[error("table {table} has more than {limit} rows of interest")]
    TooManyRows {
        /// The table.
        table: &'static str,
        /// The limit.
        limit: usize,
    },
}

/// A row that an update changed; the [`Replica`] has its new value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RowChange {
    /// The table.
    pub table: &'static str,
    /// The row.
    pub id: RowId,
    /// The row before the update, if there was one.
    pub(super) old: Option<PackedRow>,
}

/// The rows of one table.
type Rows = BTreeMap<RowId, PackedRow>;

/// The copy.
#[derive(Debug)]
pub struct Replica {
    database: &'static Database,
    tables: BTreeMap<&'static str, Rows>,
    table_rows_max: usize,
}

impl Replica {
    /// An empty copy.
    pub fn new(database: &'static Database) -> Self {
        let tables = database.tables.iter();
        Self {
            database,
            tables: tables.map(|table| (table.name, Rows::new())).collect(),
            table_rows_max: TABLE_ROWS_MAX,
        }
    }

    /// The rows of a replicated table; none for any other.
    pub fn rows(&self, table: &str) -> impl Iterator<Item = (RowId, Row)> {
        let rows = self.database.table(table).zip(self.tables.get(table));
        let rows = rows.into_iter();
        rows.flat_map(|(table, rows)| rows.iter().map(|(id, row)| (*id, row.unpack(table))))
    }

    /// One row.
    pub fn row(&self, table: &str, id: RowId) -> Option<Row> {
        let row = self.tables.get(table)?.get(&id)?;
        Some(row.unpack(self.database.table(table)?))
    }

    /// A changed row before the update, if there was one.
    pub fn before(&self, change: &RowChange) -> Option<Row> {
        let table = self.database.table(change.table)?;
        Some(change.old.as_ref()?.unpack(table))
    }

    /// Applies a `<row-update2>`. Without its text, which was longer than [`PIECE_MAX_BYTES`], the row is kept as one
    /// that cannot be read.
    ///
    /// [`PIECE_MAX_BYTES`]: super::framing::PIECE_MAX_BYTES
    pub(super) fn apply(
        &mut self,
        table: &str,
        id: RowId,
        update: Option<&[u8]>,
    ) -> Result<RowChange, UpdateError> {
        let Some((table, kept)) = self.database.table(table).zip(self.tables.get_mut(table)) else {
            return Err(UpdateError::UnknownTable {
                table: table.to_owned(),
            });
        };
        let old = match update {
            Some(update) => {
                let Some((operation, columns)) = operation(update) else {
                    return Err(UpdateError::Malformed {
                        table: table.name.to_owned(),
                    });
                };
                apply_row(table, kept, id, operation, columns)?
            }
            None => kept.insert(id, Row::too_long(table).pack()),
        };
        if kept.len() > self.table_rows_max {
            return Err(UpdateError::TooManyRows {
                table: table.name,
                limit: self.table_rows_max,
            });
        }
        Ok(RowChange {
            table: table.name,
            id,
            old,
        })
    }

    /// Checks the rest of a `<table-updates2>`, whose rows were taken out.
    pub(super) fn check(&self, rest: &str) -> Result<(), UpdateError> {
        let Ok(tables) = serde_json::from_str::<BTreeMap<String, Value>>(rest) else {
            return Err(UpdateError::Malformed { table: "?".into() });
        };
        for (table, rows) in tables {
            if self.database.table(&table).is_none() {
                return Err(UpdateError::UnknownTable { table });
            }
            if !rows.as_object().is_some_and(Map::is_empty) {
                return Err(UpdateError::Malformed { table });
            }
        }
        Ok(())
    }
}

/// What happened to a row (ovsdb-server(7), section 4.1.14, `<row-update2>`).
#[derive(Clone, Copy)]
enum Operation {
    /// `initial` or `insert`: the columns that do not have their default.
    Insert,
    /// `modify`: the differences of the columns that changed.
    Modify,
    /// `delete`: nothing.
    Delete,
}

fn operation(update: &[u8]) -> Option<(Operation, Map<String, Value>)> {
    let update: Map<String, Value> = serde_json::from_slice(update).ok()?;
    let (name, value) = update.into_iter().next()?;
    match (name.as_str(), value) {
        ("initial" | "insert", Value::Object(columns)) => Some((Operation::Insert, columns)),
        ("modify", Value::Object(columns)) => Some((Operation::Modify, columns)),
        ("delete", _) => Some((Operation::Delete, Map::new())),
        _ => None,
    }
}

fn apply_row(
    table: &'static Table,
    rows: &mut Rows,
    id: RowId,
    operation: Operation,
    columns: Map<String, Value>,
) -> Result<Option<PackedRow>, UpdateError> {
    match operation {
        Operation::Insert => {
            let mut row = Row::new(table);
            for (column, value) in columns {
                row.set(&column, value);
            }
            Ok(rows.insert(id, row.pack()))
        }
        Operation::Modify => {
            let packed = rows.get_mut(&id).ok_or(UpdateError::UnknownRow {
                table: table.name,
                row: id,
            })?;
            let mut row = packed.unpack(table);
            for (column, value) in columns {
                row.modify(&column, value);
            }
            Ok(Some(std::mem::replace(packed, row.pack())))
        }
        Operation::Delete => Ok(rows.remove(&id)),
    }
}

#[cfg(test)]
mod tests;
