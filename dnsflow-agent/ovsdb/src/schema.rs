//! The tables, columns and rows of a database that are replicated.

use serde_json::{Value, json};

use super::value::{Atom, Datum};

/// A database and the tables of it that are replicated.
#[derive(Debug, Eq, PartialEq)]
pub struct Database {
    /// The name in the schema, such as `OVN_Southbound`.
    pub name: &'static str,
    /// The tables.
    pub tables: &'static [Table],
}

impl Database {
    /// The table of this name, when it is replicated.
    pub fn table(&self, name: &str) -> Option<&'static Table> {
        self.tables.iter().find(|table| table.name == name)
    }
}

/// A table and the columns of it that are replicated.
#[derive(Debug, Eq, PartialEq)]
pub struct Table {
    /// The name in the schema.
    pub name: &'static str,
    /// The columns.
    pub columns: &'static [Column],
    /// For what the table is read, in a message about a table that is too large.
    pub purpose: &'static str,
    /// How people bring a table below its limit, or do without it.
    pub remedy: &'static str,
    /// Read the first rows by a change of the condition instead of with the monitor request.
    ///
    /// For the initial content, ovsdb-server first copies every row of every monitored table
    /// (`ovsdb_monitor_get_initial` in `ovsdb/monitor.c`) and applies the condition to the copies.
    /// A change of the condition is evaluated on the table itself. For a few rows of a large table,
    /// this is many times cheaper.
    pub deferred: bool,
}

/// How much of each table is kept at most.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TableLimits {
    /// The rows.
    pub rows: usize,
    /// The bytes of their values, as they are kept.
    pub bytes: usize,
}

impl Default for TableLimits {
    fn default() -> Self {
        Self {
            rows: 1_000_000,
            bytes: 256 << 20,
        }
    }
}

/// A limit that a table has exceeded.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum TableLimit {
    /// [`TableLimits::rows`].
    #[error("{0} rows of interest")]
    Rows(usize),
    /// [`TableLimits::bytes`].
    #[error("{0} bytes in the columns that are read")]
    Bytes(usize),
}

/// A column, and how a change of it is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Column {
    /// The name in the schema.
    pub name: &'static str,
    /// The kind.
    pub kind: Kind,
    /// What the replica keeps of a value.
    pub kept: Kept,
}

/// What the replica keeps of the values of a column. A large cluster has much that nobody reads.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kept {
    /// All of it.
    All,
    /// Of a map, the pairs with these keys.
    Pairs(&'static [&'static str]),
    /// Of the `vips` of a load balancer, the keys and the addresses in each value (ovn-nb(5)), with a digest: the
    /// difference of two maps says "remove" by repeating the value (ovsdb-server(7), section 4.1.14).
    Backends,
    /// Of a map of template variables, the addresses without a port in each value, likewise. Variables without such an
    /// address are left out.
    Addresses,
}

impl Column {
    /// A column of at most one value.
    pub const fn scalar(name: &'static str) -> Self {
        Self {
            name,
            kind: Kind::Scalar,
            kept: Kept::All,
        }
    }

    /// A column of several values.
    pub const fn set(name: &'static str) -> Self {
        Self {
            name,
            kind: Kind::Set,
            kept: Kept::All,
        }
    }

    /// A column of key-value pairs.
    pub const fn map(name: &'static str) -> Self {
        Self {
            name,
            kind: Kind::Map,
            kept: Kept::All,
        }
    }

    /// A column of key-value pairs, of which those with these keys are read.
    pub const fn pairs(name: &'static str, keys: &'static [&'static str]) -> Self {
        Self {
            kept: Kept::Pairs(keys),
            ..Self::map(name)
        }
    }

    /// The `vips` of a load balancer, of which the addresses are read.
    pub const fn backends(name: &'static str) -> Self {
        Self {
            kept: Kept::Backends,
            ..Self::map(name)
        }
    }

    /// The `variables` of templates, of which the addresses without a port are read.
    pub const fn addresses(name: &'static str) -> Self {
        Self {
            kept: Kept::Addresses,
            ..Self::map(name)
        }
    }
}

/// The form in which an `update2` writes the difference of two values (ovsdb-server(7), section
/// 4.1.14; `ovsdb_datum_diff` in OVS's `lib/ovsdb-data.c`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// At most one value (`max` 1 in the schema, optional or not): the new value.
    Scalar,
    /// Several values: the values that are in only one of the two.
    Set,
    /// Key-value pairs: pairs to add or to change, and unchanged pairs to remove.
    Map,
}

/// How a clause compares (RFC 7047, section 5.1, `<function>`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Function {
    /// `==`
    Equal,
    /// `includes`
    Includes,
}

/// A comparison of one column with a constant (RFC 7047, section 5.1, `<condition>`).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Clause {
    /// The column; it need not be a replicated one.
    pub column: &'static str,
    /// The comparison.
    pub function: Function,
    /// The constant.
    pub value: Datum,
}

impl Clause {
    /// `column == value`.
    pub fn equal(column: &'static str, value: impl Into<Atom>) -> Self {
        Self {
            column,
            function: Function::Equal,
            value: Datum::scalar(value),
        }
    }

    /// Whether the map `column` has this pair.
    pub fn includes_pair(column: &'static str, key: &str, value: &str) -> Self {
        Self {
            column,
            function: Function::Includes,
            value: Datum::map([(Atom::from(key), Atom::from(value))]),
        }
    }

    /// The clause in the form of the protocol.
    pub fn to_json(&self) -> Value {
        let function = match self.function {
            Function::Equal => "==",
            Function::Includes => "includes",
        };
        json!([self.column, function, self.value.to_json()])
    }
}

/// Which rows of a table are replicated.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Condition {
    /// Every row.
    Every,
    /// No row.
    Nothing,
    /// The rows for which one of the clauses holds; without clauses, no row.
    ///
    /// Clauses that all are `==` are looked up in a hash table, whatever their number
    /// (`ovsdb_condition_match_any_clause_optimized` in `ovsdb/condition.c`).
    AnyOf(Vec<Clause>),
}

impl Condition {
    /// Whether no row can meet the condition.
    pub fn is_nothing(&self) -> bool {
        match self {
            Self::Every => false,
            Self::Nothing => true,
            Self::AnyOf(clauses) => clauses.is_empty(),
        }
    }

    /// The `where` of a monitor request (ovsdb-server(7), section 4.1.12). An empty array
    /// would mean every row, hence the explicit constants.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Every => json!([true]),
            Self::AnyOf(clauses) if !clauses.is_empty() => {
                clauses.iter().map(Clause::to_json).collect()
            }
            Self::Nothing | Self::AnyOf(_) => json!([false]),
        }
    }
}
