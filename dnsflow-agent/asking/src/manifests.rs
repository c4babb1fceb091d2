//! Reads all manifests of a directory.
//!
//! All functions block on the file system; they run on a thread that may block.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs::OpenOptions,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use dnsflow_core::values::firewall::{Firewall, FirewallId};
use kube::Resource;
use serde::de::{
    Deserialize, DeserializeOwned, DeserializeSeed as _, Deserializer, MapAccess, SeqAccess,
};
use serde_json::Value;

use crate::{
    convert::{self, Converted, Object, Reading, Reasons},
    egress_firewall::EgressFirewall,
    lenient::{Any, Plain, Reader, Seen, key},
};

/// At most this many files are read, in the order of their names.
pub const MAX_FILES: usize = 1_024;
/// The largest file that is read.
pub const MAX_FILE_BYTES: u64 = 4 << 20;
/// All files together.
pub const MAX_TOTAL_BYTES: u64 = 64 << 20;

/// At most this many characters of a parser's message are reported.
const MAX_MESSAGE: usize = 300;

/// A directory, and what was last read from each of its files.
pub struct Directory {
    path: PathBuf,
    files: BTreeMap<OsString, Vec<(FirewallId, Firewall)>>,
    objects: BTreeSet<String>,
}

/// The firewalls of the directory, and what is wrong.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// The firewalls in force.
    pub firewalls: BTreeMap<FirewallId, Firewall>,
    /// By file or by object within a file: what is wrong with it; empty where nothing is.
    pub reasons: BTreeMap<String, Vec<String>>,
    /// Those of them of which nothing is in force, not even of an earlier reading.
    pub unusable: BTreeSet<String>,
    /// The files that were left out, if there are any.
    pub too_many: Option<String>,
}

impl Directory {
    /// The directory at this path, of which nothing was read yet.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            files: BTreeMap::new(),
            objects: BTreeSet::new(),
        }
    }

    /// Whether the last snapshot had this file or object.
    pub fn holds(&self, object: &str) -> bool {
        self.objects.contains(object)
    }

    /// Reads all files. An error says why the directory as a whole cannot be read.
    pub fn read(&mut self) -> Result<Snapshot, String> {
        let mut names = self
            .names()
            .map_err(|error| format!("the directory cannot be read: {error}"))?;
        let mut snapshot = Snapshot::default();
        if names.len() > MAX_FILES {
            let first_out = names.iter().nth(MAX_FILES).cloned().unwrap_or_default();
            snapshot.too_many = Some(format!(
                "it has {} manifests; those from {} on are ignored, keep to {MAX_FILES}",
                names.len(),
                first_out.display()
            ));
            names = names.into_iter().take(MAX_FILES).collect();
        }
        self.files.retain(|name, _| names.contains(name));
        let mut total = 0;
        for name in names {
            let path = self.path.join(&name);
            let file = path.display().to_string();
            let known = self.files.entry(name).or_default();
            let reasons = snapshot.reasons.entry(file.clone()).or_default();
            match text(&path, &mut total).and_then(|text| Content::of(&path, &text)) {
                Ok(content) => {
                    let content = content.settle(known);
                    *known = content.firewalls;
                    if !content.reasons.is_empty() {
                        snapshot.unusable.insert(file.clone());
                    }
                    reasons.extend(content.reasons);
                    let in_force = known.iter().map(|(id, _)| id.to_string());
                    let in_force: BTreeSet<String> = in_force.collect();
                    for (object, reasons) in content.objects {
                        let key = format!("{file}: {object}");
                        if !in_force.contains(&object) {
                            snapshot.unusable.insert(key.clone());
                        }
                        snapshot.reasons.entry(key).or_default().extend(reasons);
                    }
                }
                Err(reason) => reasons.push(match known.len() {
                    0 => {
                        snapshot.unusable.insert(file);
                        reason
                    }
                    count => format!(
                        "{reason}; the {count} firewalls last read from this file stay in force"
                    ),
                }),
            }
        }
        self.merge(&mut snapshot);
        self.objects = snapshot.reasons.keys().cloned().collect();
        Ok(snapshot)
    }

    /// The names of the manifests. Names with a leading dot are not manifests: a ConfigMap mount
    /// keeps its versions under such names.
    fn names(&self) -> io::Result<BTreeSet<OsString>> {
        let mut names = BTreeSet::new();
        for entry in self.path.read_dir()? {
            let name = entry?.file_name();
            let hidden = name.as_encoded_bytes().starts_with(b".");
            let ending = Path::new(&name).extension();
            if !hidden && ending.is_some_and(|e| e == "yaml" || e == "yml" || e == "json") {
                names.insert(name);
            }
        }
        Ok(names)
    }

    /// Joins the files' firewalls. For each namespace, the first file by name counts.
    fn merge(&self, snapshot: &mut Snapshot) {
        let mut from: BTreeMap<&FirewallId, &OsString> = BTreeMap::new();
        for (name, firewalls) in &self.files {
            for (id, firewall) in firewalls {
                if let Some(first) = from.get(id) {
                    let file = self.path.join(name).display().to_string();
                    let reason = format!(
                        "ignored: {} already defines this namespace's firewall; remove one",
                        self.path.join(first).display()
                    );
                    let key = format!("{file}: {id}");
                    snapshot.unusable.insert(key.clone());
                    snapshot.reasons.entry(key).or_default().push(reason);
                    continue;
                }
                from.insert(id, name);
                snapshot.firewalls.insert(id.clone(), firewall.clone());
            }
        }
    }
}

/// The firewalls of some files, and what is wrong with them.
#[derive(Debug, Default)]
pub struct Files {
    /// Each firewall, with what is wrong with it.
    pub firewalls: Vec<(FirewallId, Firewall, Vec<String>)>,
    /// What is wrong with the files and with other objects.
    pub reasons: Vec<String>,
    /// The pods among the objects, where they were asked for.
    pub pods: Vec<Value>,
}

/// The manifests of a directory, in the order of their names.
pub fn names(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let names = Directory::new(directory.to_owned()).names()?;
    Ok(names.iter().map(|name| directory.join(name)).collect())
}

/// The documents of these files as one text of YAML; `-` is standard input. An error says which file cannot be
/// read, and why.
pub fn texts(paths: &[PathBuf]) -> Result<String, String> {
    let mut total = 0;
    let mut texts = Vec::new();
    for path in paths {
        let read = named(path, &mut total).and_then(|text| documents::<Value>(path, &text));
        let read = read.map_err(|reason| format!("{}: {reason}", path.display()))?;
        // What is JSON is YAML.
        texts.extend(read.iter().map(Value::to_string));
    }
    Ok(texts.join("\n---\n"))
}

/// A file that somebody names; `-` is standard input.
fn named(path: &Path, total: &mut u64) -> Result<String, String> {
    match path.as_os_str() == "-" {
        true => text_of(&io::stdin(), total),
        false => text(path, total),
    }
}

/// The pods of a document, which may be a list.
fn pods(document: &Value) -> Vec<Value> {
    match (document["kind"].as_str(), document["items"].as_array()) {
        (Some("Pod"), _) => vec![document.clone()],
        (Some("List"), Some(items)) => items.iter().flat_map(pods).collect(),
        _ => Vec::new(),
    }
}

impl Files {
    /// Reads these files; `-` is standard input. An error says which file cannot be read, and why.
    pub fn read(paths: &[PathBuf]) -> Result<Self, String> {
        Self::read_with(paths, |_, _| Ok(Vec::new()))
    }

    /// The same, with the pods.
    pub fn read_with_pods(paths: &[PathBuf]) -> Result<Self, String> {
        Self::read_with(paths, |path, text| {
            let documents: Vec<Value> = documents(path, text)?;
            Ok(documents.iter().flat_map(pods).collect())
        })
    }

    fn read_with(
        paths: &[PathBuf],
        pods: impl Fn(&Path, &str) -> Result<Vec<Value>, String>,
    ) -> Result<Self, String> {
        let mut files = Self::default();
        let mut total = 0;
        for path in paths {
            let name = path.display();
            let read = named(path, &mut total)
                .and_then(|text| Ok((Content::of(path, &text)?, pods(path, &text)?)));
            let (content, pods) = read.map_err(|reason| format!("{name}: {reason}"))?;
            let mut content = content.settle(&[]);
            files.pods.extend(pods);
            let reasons = content.reasons.into_iter();
            files
                .reasons
                .extend(reasons.map(|reason| format!("{name}: {reason}")));
            for (id, firewall) in content.firewalls {
                if files.firewalls.iter().any(|(known, ..)| *known == id) {
                    return Err(format!("{name}: a second EgressFirewall {id}; name one"));
                }
                let reasons = content.objects.remove(&id.to_string());
                let reasons = reasons.unwrap_or_default();
                files.firewalls.push((id, firewall, reasons));
            }
            for (object, reasons) in content.objects {
                let reasons = reasons.into_iter();
                let reasons = reasons.map(|reason| format!("{name}: {object}: {reason}"));
                files.reasons.extend(reasons);
            }
        }
        Ok(files)
    }
}

/// What one file says.
struct Settled {
    firewalls: Vec<(FirewallId, Firewall)>,
    reasons: Vec<String>,
    objects: BTreeMap<String, Vec<String>>,
}

/// The EgressFirewalls of a file, of a document, or of the items of a list, as they are parsed.
#[derive(Debug, Default)]
struct Content {
    firewalls: Vec<Converted>,
    /// What is wrong with other objects.
    reasons: Reasons,
}

impl Content {
    /// Reads a file.
    fn of(path: &Path, text: &str) -> Result<Self, String> {
        let documents: Vec<Self> = documents(path, text)?;
        let mut content = Self::default();
        documents.into_iter().for_each(|one| content.extend(one));
        Ok(content)
    }

    fn extend(&mut self, other: Self) {
        self.firewalls.extend(other.firewalls);
        self.reasons.extend(other.reasons);
    }

    /// `known` is what the file said before.
    fn settle(self, known: &[(FirewallId, Firewall)]) -> Settled {
        let mut firewalls = Vec::new();
        let mut objects: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for converted in self.firewalls {
            let reasons = objects.entry(converted.object).or_default();
            reasons.extend(converted.reasons);
            match converted.reading {
                Reading::Firewall(id, firewall) => firewalls.push((id, firewall)),
                Reading::Unreadable(id) => {
                    if let Some(kept) = known.iter().find(|(known, _)| *known == id) {
                        reasons.push("the last valid version stays in force".into());
                        firewalls.push(kept.clone());
                    }
                }
                Reading::Ignored => {}
            }
        }
        Settled {
            firewalls,
            reasons: self.reasons.texts(),
            objects,
        }
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Any(DocumentReader).deserialize(deserializer)
    }
}

/// Takes a document, or an item of a list.
#[derive(Clone, Copy)]
struct DocumentReader;

impl Reader for DocumentReader {
    type Value = Content;

    fn other(self, _: Seen) -> Content {
        content(&Seen::Null, &Seen::Null, Object::default(), None)
    }

    fn mapping<'de, A: MapAccess<'de>>(self, mut fields: A) -> Result<Content, A::Error> {
        let (mut api_version, mut kind) = (Seen::Null, Seen::Null);
        let (mut object, mut items) = (Object::default(), None);
        while let Some(key) = key(&mut fields)? {
            match key.as_str() {
                "apiVersion" => api_version = fields.next_value_seed(Any(Plain))?,
                "kind" => kind = fields.next_value_seed(Any(Plain))?,
                "items" => items = fields.next_value_seed(Any(ItemsReader))?,
                // It may be that of another object: the kind may follow.
                _ => object.field(&key, &mut fields)?,
            }
        }
        Ok(content(&api_version, &kind, object, items))
    }
}

/// Takes the items of a list.
struct ItemsReader;

impl Reader for ItemsReader {
    type Value = Option<Content>;

    fn other(self, _: Seen) -> Option<Content> {
        None
    }

    fn list<'de, A: SeqAccess<'de>>(self, mut items: A) -> Result<Option<Content>, A::Error> {
        let mut content = Content::default();
        while let Some(item) = items.next_element_seed(Any(DocumentReader))? {
            content.extend(item);
        }
        Ok(Some(content))
    }
}

/// What a document or an item of a list comes to.
fn content(api_version: &Seen, kind: &Seen, object: Object, items: Option<Content>) -> Content {
    let mut content = Content::default();
    let version = api_version.text().unwrap_or_default();
    match kind.text() {
        Some("EgressFirewall") if version != EgressFirewall::api_version(&()) => {
            content.reasons.push(format!(
                "the apiVersion of an EgressFirewall is {:?}; write {}",
                convert::shorten(version, 80),
                EgressFirewall::api_version(&())
            ));
        }
        Some("EgressFirewall") => content.firewalls.push(object.convert()),
        Some("List" | "EgressFirewallList") => match items {
            Some(items) => return items,
            None => content
                .reasons
                .push("a List has no items; write a list of objects".into()),
        },
        // The directory may hold other objects as well.
        Some(_) => {}
        None => content.reasons.push(
            "an object has no kind; write apiVersion: k8s.ovn.org/v1 and kind: EgressFirewall"
                .into(),
        ),
    }
    content
}

/// A file's text. Adds its length to `total`.
fn text(path: &Path, total: &mut u64) -> Result<String, String> {
    // Opening a FIFO must not block.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| format!("cannot be opened: {error}"))?;
    if !file.metadata().is_ok_and(|found| found.is_file()) {
        return Err("cannot be read: it is not a regular file".into());
    }
    text_of(&file, total)
}

/// What can be read, as text. Adds its length to `total`.
fn text_of(source: impl Read, total: &mut u64) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = source.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| format!("cannot be read: {error}"))?;
    let length = bytes.len() as u64;
    if length == 0 {
        return Err("is empty and taken for half written; delete it if it is not needed".into());
    }
    if length > MAX_FILE_BYTES {
        return Err(format!(
            "is larger than {} MiB; split it",
            MAX_FILE_BYTES >> 20
        ));
    }
    if *total + length > MAX_TOTAL_BYTES {
        return Err(format!(
            "is not read: the files before it already hold {} MiB",
            *total >> 20
        ));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        format!(
            "is not UTF-8 text at byte {}",
            error.utf8_error().valid_up_to()
        )
    })?;
    *total += length;
    Ok(text)
}

fn documents<T: DeserializeOwned>(path: &Path, text: &str) -> Result<Vec<T>, String> {
    if path.extension().is_some_and(|ending| ending == "json") {
        serde_json::Deserializer::from_str(text)
            .into_iter::<T>()
            .enumerate()
            .map(|(index, document)| document.map_err(|error| json_reason(index + 1, &error)))
            .collect()
    } else {
        serde_saphyr::from_multiple_with_options(text, yaml_options())
            .map_err(|error| yaml_reason(text, error.without_snippet()))
    }
}

fn json_reason(document: usize, error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    let message = error.to_string();
    let place = format!(" at line {line} column {column}");
    let message = message.strip_suffix(&place).unwrap_or(&message);
    format!("document {document}, line {line}, column {column}: {message}")
}

fn yaml_reason(text: &str, error: &serde_saphyr::Error) -> String {
    let message = error.to_string().replace('\n', " ");
    let remedy = match error {
        // `dnsName: *.example.com`
        serde_saphyr::Error::UnknownAnchor { .. } => "; a text that begins with `*` must be quoted",
        _ => "",
    };
    let Some(at) = error.location() else {
        return convert::shorten(&message, MAX_MESSAGE) + remedy;
    };
    let (line, column) = (at.line(), at.column());
    let place = format!(" at line {line}, column {column}");
    let message = message.strip_suffix(&place).unwrap_or(&message);
    format!(
        "document {}, line {line}, column {column}: {}{remedy}",
        document_at(text, line),
        convert::shorten(message, MAX_MESSAGE)
    )
}

/// Limits of the parser, for files from any source. One EgressFirewall at its limit of rules has
/// about 70,000 nodes.
fn yaml_options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        with_snippet: false,
        // As in YAML 1.2: `no` and `y` are texts.
        strict_booleans: true,
        budget: serde_saphyr::budget! {
            max_depth: 32,
            max_documents: 1_024,
            max_nodes: 500_000,
            max_events: 1_500_000,
            // Including repeated aliases: twice the largest file.
            max_total_scalar_bytes: 8 << 20,
            max_aliases: 1_000,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 100_000,
        },
    }
}

/// The number of the YAML document that holds a line; both are counted from 1. A line that
/// begins with `---` always begins a document (YAML 1.2, section 9.1.2).
fn document_at(text: &str, line: u64) -> usize {
    let lines = text
        .lines()
        .take(usize::try_from(line).unwrap_or(usize::MAX));
    let mut number = 1;
    let mut begun = false;
    for line in lines {
        if line.starts_with("---") {
            number += usize::from(begun);
            begun = true;
        } else if !line.trim_start().is_empty() && !line.trim_start().starts_with('#') {
            begun = true;
        }
    }
    number
}

#[cfg(test)]
mod tests;
