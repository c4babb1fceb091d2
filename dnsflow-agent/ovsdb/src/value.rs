//! The values of database cells (RFC 7047, section 5.1), and typed access to them.
//!
//! A set of one element and the bare atom are the same value on the wire and here: every cell
//! is either a sorted set or a sorted map. Reals are not read.

use std::{
    hash::{BuildHasher as _, RandomState},
    net::{IpAddr, SocketAddr},
    sync::LazyLock,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    framing::PIECE_MAX_BYTES,
    quoted,
    schema::{Column, Kept, Kind, Table},
    uuid::Uuid,
};

/// A single value.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub enum Atom {
    /// An integer.
    Integer(i64),
    /// A boolean.
    Boolean(bool),
    /// A string.
    String(Box<str>),
    /// A reference to a row.
    Uuid(Uuid),
    /// What is kept of a list of backends ([`Kept::Backends`]).
    Backends {
        /// A digest of the text.
        digest: u64,
        /// The addresses in it, sorted, each once; in a packed row `None` for those of the pair before.
        addresses: Option<Box<[IpAddr]>>,
    },
}

impl From<i64> for Atom {
    fn from(value: i64) -> Self {
        Self::Integer(value)
    }
}

impl From<&str> for Atom {
    fn from(value: &str) -> Self {
        Self::String(value.into())
    }
}

impl Atom {
    fn from_json(json: Value) -> Option<Self> {
        match json {
            Value::Number(number) => number.as_i64().map(Self::Integer),
            Value::Bool(value) => Some(Self::Boolean(value)),
            Value::String(text) => Some(Self::String(text.into_boxed_str())),
            Value::Array(parts) => row_id(&parts).map(Self::Uuid),
            Value::Null | Value::Object(_) => None,
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Integer(value) => json!(value),
            Self::Boolean(value) => json!(value),
            Self::String(text) => json!(text),
            Self::Uuid(row) => json!(["uuid", row.to_string()]),
            Self::Backends { .. } => Value::Null,
        }
    }
}

/// Reads `["uuid", "…"]`.
pub(super) fn row_id(parts: &[Value]) -> Option<Uuid> {
    match parts {
        [Value::String(tag), Value::String(text)] if tag == "uuid" => Uuid::parse(text),
        _ => None,
    }
}

/// What a cell holds.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Datum(Repr);

#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
enum Repr {
    /// Sorted, without duplicates.
    Set(Vec<Atom>),
    /// Sorted by key, without duplicate keys.
    Map(Vec<(Atom, Atom)>),
    /// A value that cannot be read. The cell keeps this, so that an accessor can name the row and a
    /// later value can replace it.
    Unreadable,
    /// A value of a row that was left out because its text is longer than [`PIECE_MAX_BYTES`].
    TooLong,
}

impl Default for Datum {
    /// The empty value. A column that an update leaves out has its default (ovsdb-server(7),
    /// section 4.1.14), which the accessors of [`Row`] make of an empty value.
    fn default() -> Self {
        Self(Repr::Set(Vec::new()))
    }
}

impl Datum {
    /// A set of one element.
    pub fn scalar(value: impl Into<Atom>) -> Self {
        Self(Repr::Set(vec![value.into()]))
    }

    /// A map. Of pairs with the same key, the last one counts.
    pub fn map(pairs: impl IntoIterator<Item = (Atom, Atom)>) -> Self {
        let sorted: std::collections::BTreeMap<_, _> = pairs.into_iter().collect();
        Self(Repr::Map(sorted.into_iter().collect()))
    }

    /// A set.
    pub fn set(atoms: impl IntoIterator<Item = Atom>) -> Self {
        let mut atoms: Vec<Atom> = atoms.into_iter().collect();
        atoms.sort_unstable();
        atoms.dedup();
        Self(Repr::Set(atoms))
    }

    /// Reads the wire's form of a value.
    pub fn from_json(json: Value) -> Self {
        Self::parse(json).unwrap_or(Self(Repr::Unreadable))
    }

    fn parse(json: Value) -> Option<Self> {
        let Value::Array(mut parts) = json else {
            return Atom::from_json(json).map(Self::scalar);
        };
        let [Value::String(tag), _] = &parts[..] else {
            return None;
        };
        match tag.as_str() {
            "uuid" => row_id(&parts).map(|row| Self::scalar(Atom::Uuid(row))),
            "set" => {
                let Some(Value::Array(members)) = parts.pop() else {
                    return None;
                };
                let atoms: Option<Vec<Atom>> = members.into_iter().map(Atom::from_json).collect();
                Some(Self::set(atoms?))
            }
            "map" => {
                let Some(Value::Array(members)) = parts.pop() else {
                    return None;
                };
                let pairs: Option<Vec<(Atom, Atom)>> =
                    members.into_iter().map(pair_from_json).collect();
                Some(Self::map(pairs?))
            }
            _ => None,
        }
    }

    /// What is kept of this value, or of a difference.
    fn kept(mut self, kept: Kept) -> Self {
        match (kept, &mut self.0) {
            (Kept::Pairs(keys), Repr::Map(pairs)) => {
                let is_read =
                    |key: &Atom| matches!(key, Atom::String(key) if keys.contains(&&**key));
                pairs.retain(|(key, _)| is_read(key));
                pairs.shrink_to_fit();
            }
            (Kept::Backends, Repr::Map(pairs)) => {
                for (_, value) in pairs {
                    *value = backends(value, |_| true);
                }
            }
            (Kept::Addresses, Repr::Map(pairs)) => {
                for (_, value) in pairs {
                    *value = backends(value, |port| port.is_none());
                }
            }
            (Kept::All, _) | (_, Repr::Set(_) | Repr::Unreadable | Repr::TooLong) => {}
        }
        self
    }

    /// The lists of backends, if it has any.
    fn backends_mut(&mut self) -> impl Iterator<Item = &mut Option<Box<[IpAddr]>>> {
        let pairs = match &mut self.0 {
            Repr::Map(pairs) => &mut pairs[..],
            Repr::Set(_) | Repr::Unreadable | Repr::TooLong => &mut [],
        };
        pairs.iter_mut().filter_map(|(_, value)| match value {
            Atom::Backends { addresses, .. } => Some(addresses),
            _ => None,
        })
    }

    /// Leaves out lists of backends that are those of the pair before: all ports of a Service lead to the same pods.
    /// Leaves out pairs without an address of [`Kept::Addresses`]. A later difference may say that such a pair is gone,
    /// and so brings it back: without an address, it is left out again.
    fn fold(&mut self, kept: Kept) {
        if let (Kept::Addresses, Repr::Map(pairs)) = (kept, &mut self.0) {
            pairs.retain(|(_, value)| match value {
                Atom::Backends { addresses, .. } => addresses.as_deref() != Some(&[]),
                _ => true,
            });
        }
        let mut before: Option<&Box<[IpAddr]>> = None;
        for backends in self.backends_mut() {
            match (&before, &mut *backends) {
                (Some(before), Some(backends_now)) if *before == backends_now => *backends = None,
                _ => before = backends.as_ref(),
            }
        }
    }

    /// Puts them in again.
    fn unfold(&mut self) {
        let mut before: Option<&Box<[IpAddr]>> = None;
        for backends in self.backends_mut() {
            if backends.is_none() {
                *backends = before.cloned();
            }
            before = backends.as_ref();
        }
    }

    /// The wire's form.
    pub fn to_json(&self) -> Value {
        match &self.0 {
            Repr::Set(atoms) => match &atoms[..] {
                [atom] => atom.to_json(),
                _ => json!(["set", atoms.iter().map(Atom::to_json).collect::<Vec<_>>()]),
            },
            Repr::Map(pairs) => {
                let pairs = pairs
                    .iter()
                    .map(|(key, value)| [key, value].map(Atom::to_json));
                json!(["map", pairs.collect::<Vec<_>>()])
            }
            Repr::Unreadable | Repr::TooLong => Value::Null,
        }
    }

    /// Turns the old value of a column into the new one (ovsdb-server(7), section 4.1.14).
    pub fn apply(&mut self, kind: Kind, difference: Self) {
        let old = std::mem::take(self);
        self.0 = match (kind, old.0, difference.0) {
            (Kind::Scalar, _, new) => new,
            (Kind::Set | Kind::Map, Repr::TooLong, _) => Repr::TooLong,
            (Kind::Set, Repr::Set(old), Repr::Set(difference)) => {
                Repr::Set(symmetric_difference(old, difference))
            }
            (Kind::Map, Repr::Map(old), Repr::Map(difference)) => {
                Repr::Map(changed_pairs(old, difference))
            }
            // The default of a map column that the update left out.
            (Kind::Map, Repr::Set(old), new @ Repr::Map(_)) if old.is_empty() => new,
            (Kind::Set | Kind::Map, _, _) => Repr::Unreadable,
        };
    }
}

/// With keys of this process: who writes backends must not find two lists that have one digest.
static DIGESTS: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// What is kept of the backends of a VIP: addresses with ports, or without if the VIP has none, as far as `is_wanted`
/// says of their ports. Names of template variables are left out.
fn backends(value: &Atom, is_wanted: impl Fn(Option<u16>) -> bool) -> Atom {
    let text = match value {
        Atom::String(text) => text,
        _ => "",
    };
    let parts = text.split(',').map(str::trim);
    let endpoints = parts.filter_map(endpoint);
    let addresses = endpoints
        .filter(|(_, port)| is_wanted(*port))
        .map(|(address, _)| address);
    let addresses: std::collections::BTreeSet<IpAddr> = addresses.collect();
    Atom::Backends {
        digest: DIGESTS.hash_one(value),
        addresses: Some(addresses.into_iter().collect()),
    }
}

/// The address and the port in `ADDRESS:PORT`, `[ADDRESS]:PORT`, `ADDRESS` or `[ADDRESS]` (ovn-nb(5), `vips` of
/// `Load_Balancer`; `inet_parse_active` in Open vSwitch's lib/socket-util.c).
pub fn endpoint(text: &str) -> Option<(IpAddr, Option<u16>)> {
    let with_port = text.parse::<SocketAddr>();
    let with_port = with_port.map(|endpoint| (endpoint.ip(), Some(endpoint.port())));
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    with_port
        .or_else(|_| bare.unwrap_or(text).parse().map(|address| (address, None)))
        .ok()
}

fn pair_from_json(json: Value) -> Option<(Atom, Atom)> {
    let Value::Array(pair) = json else {
        return None;
    };
    let [key, value] = <[Value; 2]>::try_from(pair).ok()?;
    Some((Atom::from_json(key)?, Atom::from_json(value)?))
}

/// Both lists are sorted and without duplicates: an atom occurs at most twice.
fn symmetric_difference(mut old: Vec<Atom>, difference: Vec<Atom>) -> Vec<Atom> {
    old.extend(difference);
    old.sort();
    let mut result: Vec<Atom> = Vec::with_capacity(old.len());
    for atom in old {
        if result.last() == Some(&atom) {
            result.pop();
        } else {
            result.push(atom);
        }
    }
    result
}

fn changed_pairs(mut old: Vec<(Atom, Atom)>, difference: Vec<(Atom, Atom)>) -> Vec<(Atom, Atom)> {
    old.extend(difference);
    // The sort is stable: if a key occurs twice, the old pair comes first.
    old.sort_by(|(a, _), (b, _)| a.cmp(b));
    let mut result: Vec<(Atom, Atom)> = Vec::with_capacity(old.len());
    for (key, value) in old {
        match result.last_mut() {
            Some(last) if last.0 == key => {
                if last.1 == value {
                    result.pop();
                } else {
                    last.1 = value;
                }
            }
            _ => result.push((key, value)),
        }
    }
    result
}

/// A cell whose value does not fit the schema, or that its reader cannot use.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("column {column}: {problem}")]
pub struct CellError {
    /// The column.
    pub column: &'static str,
    /// What is wrong, as a text for people.
    pub problem: String,
}

impl CellError {
    /// An error about this column.
    pub fn new(column: &'static str, problem: impl AsRef<str>) -> Self {
        Self {
            column,
            problem: quoted(problem.as_ref()),
        }
    }
}

fn unreadable(column: &'static str, repr: &Repr) -> CellError {
    let problem = match repr {
        Repr::TooLong => format!(
            "is in a row of more than {} MiB; make the Service, the rule or the namespace behind it smaller",
            PIECE_MAX_BYTES >> 20
        ),
        _ => "holds an unreadable value".to_owned(),
    };
    CellError::new(column, problem)
}

/// A replicated row: the replicated columns of its table.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Row {
    columns: &'static [Column],
    /// One for each of `columns`.
    cells: Box<[Datum]>,
}

impl Row {
    /// A row of this table with every column empty.
    pub fn new(table: &'static Table) -> Self {
        Self {
            columns: table.columns,
            cells: table.columns.iter().map(|_| Datum::default()).collect(),
        }
    }

    /// What is kept of a row that is longer than [`PIECE_MAX_BYTES`].
    pub(super) fn too_long(table: &'static Table) -> Self {
        let cells = table.columns.iter();
        Self {
            columns: table.columns,
            cells: cells.map(|_| Datum(Repr::TooLong)).collect(),
        }
    }

    /// Sets one cell to a value in the wire's form. Columns that are not replicated are left out.
    pub(super) fn set(&mut self, column: &str, value: Value) {
        self.update(column, value, |_, cell, value| *cell = value);
    }

    /// Changes one cell by a difference in the wire's form. Columns that are not replicated are left out.
    pub(super) fn modify(&mut self, column: &str, difference: Value) {
        self.update(column, difference, |kind, cell, difference| {
            cell.apply(kind, difference);
        });
    }

    /// The row as it is kept.
    pub(super) fn pack(mut self) -> PackedRow {
        for (column, cell) in self.columns.iter().zip(&mut self.cells) {
            cell.fold(column.kept);
        }
        // Without room the program ends; nothing else fails here.
        PackedRow(
            postcard::to_allocvec(&self.cells)
                .unwrap_or_default()
                .into(),
        )
    }

    fn update(&mut self, column: &str, json: Value, change: impl FnOnce(Kind, &mut Datum, Datum)) {
        let columns = self.columns.iter().zip(&mut self.cells);
        if let Some((column, cell)) = columns.into_iter().find(|(found, _)| found.name == column) {
            change(column.kind, cell, Datum::from_json(json).kept(column.kept));
        }
    }

    fn cell(&self, column: &'static str) -> Result<(&Datum, Kept), CellError> {
        let mut cells = self.columns.iter().zip(&self.cells);
        let found = cells.find(|(found, _)| found.name == column);
        let found = found.ok_or_else(|| CellError::new(column, "is not replicated"))?;
        Ok((found.1, found.0.kept))
    }

    fn atoms(&self, column: &'static str) -> Result<&[Atom], CellError> {
        let Datum(repr) = self.cell(column)?.0;
        match repr {
            Repr::Set(atoms) => Ok(atoms),
            Repr::Map(_) => Err(CellError::new(column, "holds a map")),
            Repr::Unreadable | Repr::TooLong => Err(unreadable(column, repr)),
        }
    }

    fn atom(&self, column: &'static str) -> Result<Option<&Atom>, CellError> {
        match self.atoms(column)? {
            [] => Ok(None),
            [atom] => Ok(Some(atom)),
            atoms => Err(CellError::new(
                column,
                format!("holds {} values", atoms.len()),
            )),
        }
    }

    /// A string; the empty one is the default (RFC 7047, section 5.2.1).
    pub fn text(&self, column: &'static str) -> Result<&str, CellError> {
        match self.atom(column)? {
            None => Ok(""),
            Some(Atom::String(text)) => Ok(text),
            Some(_) => Err(CellError::new(column, "is not a string")),
        }
    }

    /// An optional integer.
    pub fn optional_integer(&self, column: &'static str) -> Result<Option<i64>, CellError> {
        match self.atom(column)? {
            None => Ok(None),
            Some(Atom::Integer(value)) => Ok(Some(*value)),
            Some(_) => Err(CellError::new(column, "is not an integer")),
        }
    }

    /// An integer that fits `T`; zero is the default (RFC 7047, section 5.2.1).
    pub fn integer<T: TryFrom<i64>>(&self, column: &'static str) -> Result<T, CellError> {
        let value = self.optional_integer(column)?.unwrap_or(0);
        T::try_from(value).map_err(|_| CellError::new(column, format!("{value} is out of range")))
    }

    /// A reference that is never empty.
    pub fn reference(&self, column: &'static str) -> Result<Uuid, CellError> {
        match self.atom(column)? {
            Some(Atom::Uuid(row)) => Ok(*row),
            _ => Err(CellError::new(column, "is not a reference")),
        }
    }

    /// A set of strings, in their order.
    pub fn texts(&self, column: &'static str) -> Result<Vec<&str>, CellError> {
        let texts = self.atoms(column)?.iter().map(|atom| match atom {
            Atom::String(text) => Ok(&**text),
            _ => Err(CellError::new(column, "holds something else than strings")),
        });
        texts.collect()
    }

    /// The keys of the `vips` of a load balancer, each with the addresses that it leads to; likewise template variables.
    pub fn backends(&self, column: &'static str) -> Result<Vec<(&str, &[IpAddr])>, CellError> {
        let pairs = self.map(column)?.pairs.iter().map(|pair| match pair {
            (Atom::String(vip), Atom::Backends { addresses, .. }) => {
                Ok((&**vip, addresses.as_deref().unwrap_or_default()))
            }
            _ => Err(CellError::new(column, "holds something else than strings")),
        });
        pairs.collect()
    }

    fn map(&self, column: &'static str) -> Result<Pairs<'_>, CellError> {
        let (Datum(repr), kept) = self.cell(column)?;
        let pairs = match repr {
            Repr::Map(pairs) => &pairs[..],
            Repr::Set(atoms) if atoms.is_empty() => &[],
            Repr::Set(_) => return Err(CellError::new(column, "is not a map")),
            Repr::Unreadable | Repr::TooLong => return Err(unreadable(column, repr)),
        };
        Ok(Pairs { pairs, kept })
    }

    /// A map of strings.
    pub fn pairs(&self, column: &'static str) -> Result<Pairs<'_>, CellError> {
        let map = self.map(column)?;
        let strings = map
            .pairs
            .iter()
            .all(|pair| matches!(pair, (Atom::String(_), Atom::String(_))));
        if strings {
            Ok(map)
        } else {
            Err(CellError::new(column, "holds something else than strings"))
        }
    }
}

/// A row in one piece of memory. A zone has tens of thousands of rows, which are read once: as a [`Row`], an ACL
/// takes four times as much.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct PackedRow(Box<[u8]>);

impl PackedRow {
    /// The bytes that it takes.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The row, which is one of this table.
    pub(super) fn unpack(&self, table: &'static Table) -> Row {
        let unreadable = |_| {
            let cells = table.columns.iter();
            cells.map(|_| Datum(Repr::Unreadable)).collect()
        };
        let mut cells: Box<[Datum]> = postcard::from_bytes(&self.0).unwrap_or_else(unreadable);
        cells.iter_mut().for_each(Datum::unfold);
        Row {
            columns: table.columns,
            cells,
        }
    }
}

/// A map of strings.
#[derive(Clone, Copy, Debug)]
pub struct Pairs<'a> {
    pairs: &'a [(Atom, Atom)],
    kept: Kept,
}

impl<'a> Pairs<'a> {
    /// The value of this key, which the column has to keep.
    pub fn value(&self, key: &str) -> Option<&'a str> {
        debug_assert!(
            match self.kept {
                Kept::All => true,
                Kept::Pairs(keys) => keys.contains(&key),
                Kept::Backends | Kept::Addresses => false,
            },
            "`{key}` is read and not kept"
        );
        self.iter()
            .find(|(found, _)| *found == key)
            .map(|(_, value)| value)
    }

    /// Every pair, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        self.pairs.iter().filter_map(|pair| match pair {
            (Atom::String(key), Atom::String(value)) => Some((&**key, &**value)),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests;
