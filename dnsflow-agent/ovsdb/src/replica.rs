//! A copy of some rows of a database, kept up to date by `update2` notifications.
//!
//! The copy must never differ silently from the database: a change of an unknown row is an error,
//! after which the whole copy is read again.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{
    quoted,
    schema::{Database, Table, TableLimit, TableLimits},
    uuid::Uuid,
    value::{PackedRow, Row},
};

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
        row: Uuid,
    },
    /// The table exceeds its limits, and cannot be done without.
    #[error("table {} has more than {}", .0.table.name, .0.limit)]
    TooLarge(TooLarge),
}

/// A table that exceeds its limits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TooLarge {
    /// The table.
    pub table: &'static Table,
    /// The limit.
    pub limit: TableLimit,
    /// Whether the copy goes on without the table.
    pub is_left_out: bool,
}

/// A row that an update changed; the [`Replica`] has its new value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RowChange {
    /// The table.
    pub table: &'static str,
    /// The row.
    pub id: Uuid,
    /// The row before the update, if there was one.
    pub(super) old: Option<PackedRow>,
}

/// What an update of a row has done.
#[derive(Debug)]
pub(super) enum Applied {
    /// It has changed the row.
    Changed(RowChange),
    /// With it, the table has become too large. These rows were there before, and none of them is any more.
    LeftOut(TooLarge, Vec<RowChange>),
    /// Nothing: the table is left out.
    Nothing,
}

/// The rows of one table.
#[derive(Debug, Default)]
struct Rows {
    rows: BTreeMap<Uuid, PackedRow>,
    /// The bytes of all rows.
    bytes: usize,
}

impl Rows {
    /// Puts a row in place of the one before, or removes that. Returns the one before.
    fn put(&mut self, id: Uuid, row: Option<PackedRow>) -> Option<PackedRow> {
        self.bytes += row.as_ref().map_or(0, PackedRow::len);
        let old = match row {
            Some(row) => self.rows.insert(id, row),
            None => self.rows.remove(&id),
        };
        self.bytes -= old.as_ref().map_or(0, PackedRow::len);
        old
    }

    fn exceeded(&self, limits: TableLimits) -> Option<TableLimit> {
        let TableLimits { rows, bytes } = limits;
        let rows = (self.rows.len() > rows).then_some(TableLimit::Rows(rows));
        rows.or_else(|| (self.bytes > bytes).then_some(TableLimit::Bytes(bytes)))
    }
}

/// The copy.
#[derive(Debug)]
pub struct Replica {
    database: &'static Database,
    tables: BTreeMap<&'static str, Rows>,
    limits: TableLimits,
    /// The tables that can be left out.
    optional: &'static [&'static str],
    left_out: BTreeMap<&'static str, TooLarge>,
}

impl Replica {
    /// An empty copy.
    pub fn new(database: &'static Database) -> Self {
        Self::limited(database, TableLimits::default(), &[])
    }

    /// An empty copy with these limits, which goes on without those of the tables `optional` that exceed them.
    pub(super) fn limited(
        database: &'static Database,
        limits: TableLimits,
        optional: &'static [&'static str],
    ) -> Self {
        let tables = database.tables.iter();
        Self {
            database,
            tables: tables.map(|table| (table.name, Rows::default())).collect(),
            limits,
            optional,
            left_out: BTreeMap::new(),
        }
    }

    /// The tables that are left out because they are too large.
    pub fn left_out(&self) -> impl Iterator<Item = TooLarge> {
        self.left_out.values().copied()
    }

    /// Whether there is such a row.
    pub(super) fn has(&self, table: &str, id: Uuid) -> bool {
        let rows = self.tables.get(table);
        rows.is_some_and(|rows| rows.rows.contains_key(&id))
    }

    /// The rows of a replicated table; none for any other.
    pub fn rows(&self, table: &str) -> impl Iterator<Item = (Uuid, Row)> {
        let rows = self.database.table(table).zip(self.tables.get(table));
        let rows = rows.into_iter();
        rows.flat_map(|(table, rows)| {
            let rows = rows.rows.iter();
            rows.map(|(id, row)| (*id, row.unpack(table)))
        })
    }

    /// One row.
    pub fn row(&self, table: &str, id: Uuid) -> Option<Row> {
        let row = self.tables.get(table)?.rows.get(&id)?;
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
        id: Uuid,
        update: Option<&[u8]>,
    ) -> Result<Applied, UpdateError> {
        let Some((table, kept)) = self.database.table(table).zip(self.tables.get_mut(table)) else {
            return Err(UpdateError::UnknownTable {
                table: quoted(table),
            });
        };
        if self.left_out.contains_key(table.name) {
            return Ok(Applied::Nothing);
        }
        let row = match update {
            Some(update) => {
                let Some((operation, columns)) = operation(update) else {
                    return Err(UpdateError::Malformed {
                        table: table.name.to_owned(),
                    });
                };
                updated(table, kept, id, operation, columns)?
            }
            None => Some(Row::too_long(table)),
        };
        let old = kept.put(id, row.map(|row| row.pack()));
        let change = |(id, old)| RowChange {
            table: table.name,
            id,
            old,
        };
        let Some(limit) = kept.exceeded(self.limits) else {
            return Ok(Applied::Changed(change((id, old))));
        };
        let too_large = TooLarge {
            table,
            limit,
            is_left_out: self.optional.contains(&table.name),
        };
        if !too_large.is_left_out {
            return Err(UpdateError::TooLarge(too_large));
        }
        self.left_out.insert(table.name, too_large);
        kept.put(id, old);
        let gone = std::mem::take(kept).rows.into_iter();
        let gone = gone.map(|(id, old)| change((id, Some(old))));
        Ok(Applied::LeftOut(too_large, gone.collect()))
    }

    /// Checks the rest of a `<table-updates2>`, whose rows were taken out.
    pub(super) fn check(&self, rest: &str) -> Result<(), UpdateError> {
        let Ok(tables) = serde_json::from_str::<BTreeMap<String, Value>>(rest) else {
            return Err(UpdateError::Malformed { table: "?".into() });
        };
        for (table, rows) in tables {
            if self.database.table(&table).is_none() {
                return Err(UpdateError::UnknownTable {
                    table: quoted(&table),
                });
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

/// The row behind an update.
fn updated(
    table: &'static Table,
    rows: &Rows,
    id: Uuid,
    operation: Operation,
    columns: Map<String, Value>,
) -> Result<Option<Row>, UpdateError> {
    match operation {
        Operation::Insert => {
            let mut row = Row::new(table);
            for (column, value) in columns {
                row.set(&column, value);
            }
            Ok(Some(row))
        }
        Operation::Modify => {
            let packed = rows.rows.get(&id).ok_or(UpdateError::UnknownRow {
                table: table.name,
                row: id,
            })?;
            let mut row = packed.unpack(table);
            for (column, value) in columns {
                row.modify(&column, value);
            }
            Ok(Some(row))
        }
        Operation::Delete => Ok(None),
    }
}

#[cfg(test)]
mod tests;
