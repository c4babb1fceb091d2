//! A small blocking OVSDB client (RFC 7047) for the lab: exact rows in, exact rows out, in one
//! transaction each, without a process per command.

use std::{
    io::{BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use crate::process::PATIENT;

/// A connection to one database.
#[derive(Debug)]
pub struct Database {
    stream: UnixStream,
    name: &'static str,
}

/// A row: column name to value, in OVSDB's JSON notation.
pub type Row = Map<String, Value>;

impl Database {
    /// Connects to the database `name` at a server's socket.
    pub fn connect(socket: &Path, name: &'static str) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("cannot connect to {}", socket.display()))?;
        stream.set_read_timeout(Some(PATIENT))?;
        Ok(Self { stream, name })
    }

    /// Runs the operations as one transaction and returns their results, one for each.
    pub fn transact(&mut self, operations: &[Value]) -> Result<Vec<Value>> {
        let mut params = vec![json!(self.name)];
        params.extend_from_slice(operations);
        let request = json!({"method": "transact", "params": params, "id": 1});
        self.stream.write_all(request.to_string().as_bytes())?;
        let replies = serde_json::Deserializer::from_reader(BufReader::new(&self.stream))
            .into_iter::<Value>();
        for reply in replies {
            let mut reply = reply?;
            // The server's own echo requests are not answered: no connection lives that long.
            if reply["id"] != 1 {
                continue;
            }
            let Value::Array(results) = reply["result"].take() else {
                bail!("{} refused the transaction: {reply}", self.name);
            };
            // A failed operation, or a failed commit in one more element (RFC 7047, 4.1.3).
            for (at, result) in results.iter().enumerate() {
                ensure!(
                    result.get("error").is_none(),
                    "{}: {result} for {}",
                    self.name,
                    operations.get(at).unwrap_or(&Value::Null)
                );
            }
            return Ok(results);
        }
        bail!("{} closed the connection", self.name)
    }

    /// The rows of `table` that meet every condition (`[column, function, value]`).
    pub fn select(&mut self, table: &str, conditions: Value) -> Result<Vec<Row>> {
        let select = json!({"op": "select", "table": table, "where": conditions});
        let results = self.transact(&[select])?;
        let rows = results.into_iter().next().map(|mut r| r["rows"].take());
        serde_json::from_value(rows.unwrap_or_default()).context("not the reply to a select")
    }
}

/// An OVSDB map of strings.
pub fn map<K: AsRef<str>, V: AsRef<str>>(pairs: impl IntoIterator<Item = (K, V)>) -> Value {
    let pairs: Vec<_> = pairs
        .into_iter()
        .map(|(key, value)| json!([key.as_ref(), value.as_ref()]))
        .collect();
    json!(["map", pairs])
}

/// An OVSDB set.
pub fn set<T: serde::Serialize>(elements: impl IntoIterator<Item = T>) -> Value {
    json!(["set", elements.into_iter().collect::<Vec<_>>()])
}

/// The elements of a column that holds a set; OVSDB writes a set of one as its element.
pub fn elements(value: &Value) -> Vec<Value> {
    match value.as_array().map(Vec::as_slice) {
        Some([tag, Value::Array(elements)]) if tag == "set" => elements.clone(),
        _ => vec![value.clone()],
    }
}

/// The value of `key` in a column that holds a map.
pub fn map_value<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value[1]
        .as_array()?
        .iter()
        .find(|pair| pair[0] == key)?
        .get(1)?
        .as_str()
}
