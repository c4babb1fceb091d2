//! Objects of a cluster, as kubectl takes and prints them.

use serde_json::{Value, json};

use super::agents::{Kubectl, KubectlError};

/// The identity of an object.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Identity {
    pub(super) api_version: String,
    pub(super) kind: String,
    pub(super) namespace: Option<String>,
    pub(super) name: String,
}

impl Identity {
    /// That of an object; `None` where it is none.
    pub(super) fn of(object: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let metadata = &object["metadata"];
        Some(Self {
            api_version: text(&object["apiVersion"])?,
            kind: text(&object["kind"])?,
            namespace: text(&metadata["namespace"]),
            name: text(&metadata["name"])?,
        })
    }

    /// Whether this object of a cluster is the one that a manifest has, perhaps without its namespace.
    pub(super) fn is(&self, written: &Self) -> bool {
        (&self.kind, &self.name) == (&written.kind, &written.name)
            && (written.namespace.is_none() || self.namespace == written.namespace)
    }

    /// An object with this identity and nothing else.
    pub(super) fn object(&self) -> Value {
        let mut metadata = json!({"name": self.name});
        if let Some(namespace) = &self.namespace {
            metadata["namespace"] = namespace.clone().into();
        }
        json!({"apiVersion": self.api_version, "kind": self.kind, "metadata": metadata})
    }

    /// For people.
    pub(super) fn shown(&self) -> String {
        let Self {
            kind,
            namespace,
            name,
            ..
        } = self;
        match namespace {
            Some(namespace) => format!("{kind} {namespace}/{name}"),
            None => format!("{kind} {name}"),
        }
    }
}

/// Objects, as kubectl reads them from a file.
pub(super) fn list(objects: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string()
}

/// The objects of a list, or one object.
pub(super) fn items(object: Value) -> Vec<Value> {
    match object {
        Value::Object(mut fields) if fields.contains_key("items") => match fields.remove("items") {
            Some(Value::Array(objects)) => objects.into_iter().flat_map(items).collect(),
            _ => Vec::new(),
        },
        Value::Null => Vec::new(),
        object => vec![object],
    }
}

impl Kubectl {
    /// Deletes these objects in this order, and waits until they are gone. Returns what kubectl says.
    pub(super) async fn delete(&self, objects: &[Identity]) -> Result<String, KubectlError> {
        if objects.is_empty() {
            return Ok(String::new());
        }
        let objects: Vec<Value> = objects.iter().map(Identity::object).collect();
        let delete = ["delete", "--ignore-not-found", "--filename", "-"];
        self.printed(&delete, Some(&list(&objects))).await
    }
}
