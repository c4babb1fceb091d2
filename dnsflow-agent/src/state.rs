//! The snapshot on disk: the names behind the flows in the switch.
//!
//! One file of JSON lines in the directory of `--state-dir`, replaced atomically. The agent does not depend on the
//! file. Without a readable file, the agent adopts the flows that it finds, without their names.
//!
//! The snapshot is written in parts and read by lines, so its text is never in memory as a whole. Each name is
//! written once, before the first entry with this name:
//!
//! ```text
//! {"version":3,"saved_at_s":1795642049}
//! {"port":["ns1_p1","9f1a2f8e"]}
//! {"name":"www.example.com"}
//! {"address":["203.0.113.1",[[0,60,3600]]]}
//! {"end":1}
//! ```
//!
//! Whoever can write the file can have addresses opened. So directory and file belong to the agent alone.

mod directory;

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead as _, BufReader, BufWriter, Write as _},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use dnsflow_core::{
    cache::snapshot::{Saved, SavedEntry, SavedName, SavedPart, SavedRules},
    policy::rules::NamePattern,
    values::{firewall::RuleAction, name::DomainName},
};
use serde::{Deserialize, Serialize};

use directory::Directory;

/// The version of the file's form.
const VERSION: u32 = 3;
/// The form before, one JSON document in one line. It is still read, for the sake of an update.
const VERSION_BEFORE: u32 = 2;
/// The file's name.
const FILE: &str = "cache.json";
/// The name of a file that could not be used.
const UNUSABLE: &str = "cache.unusable";
/// What there is in the directory.
const FILES: &[&str] = &[FILE, UNUSABLE];
/// A larger file is not the agent's: the names of a node, each of the longest with octets that are not printed, take
/// about 140 MB.
const SIZE_MAX: u64 = 256 << 20;

/// What the first line of each form has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// The first line.
#[derive(Deserialize, Serialize)]
struct Head {
    version: u32,
    /// Seconds of the wall clock since 1970: the agent's own clock may begin anew.
    saved_at_s: u64,
}

/// Every further line.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// The rules in force in a namespace (name, pattern, action and priority), and whether there were others.
    Rules(
        String,
        Vec<(String, NamePattern, RuleAction, u16)>,
        #[serde(default, skip_serializing_if = "is_false")] bool,
    ),
    /// The next name in presentation format. Names have the numbers 0, 1, and so on.
    Name(String),
    /// The next name in wire format, as hexadecimal digits: one whose presentation format has escapes.
    Wire(String),
    /// The logical port and the pod's UID of the entries that follow.
    Port(String, Option<String>),
    /// An entry: address and names.
    Address(IpAddr, Vec<NumberedName>),
    /// The last line: the number of entries.
    End(u64),
}

/// The number of a name, the seconds left when it was saved, in any case and where a rule denies the name, and whether
/// a rule denies the name.
#[derive(Deserialize, Serialize)]
struct NumberedName(
    u32,
    u64,
    u64,
    #[serde(default, skip_serializing_if = "is_false")] bool,
);

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the form that serde asks for"
)]
fn is_false(value: &bool) -> bool {
    !value
}

/// The document of [`VERSION_BEFORE`].
#[derive(Deserialize)]
struct Before {
    saved_at_s: u64,
    entries: Vec<EntryBefore>,
}

#[derive(Deserialize)]
struct EntryBefore {
    port: String,
    pod: Option<String>,
    address: IpAddr,
    /// Presentation format, and the seconds as in a [`NumberedName`].
    names: Vec<(String, u64, u64)>,
}

/// Why the snapshot cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The file system refuses.
    #[error("cannot {operation} {}: {source}; --state-dir names the directory", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The content is not of the form that this version writes. The file was set aside.
    #[error("the snapshot is not usable ({reason}) and was set aside as {}", path.display())]
    Unusable {
        /// What is wrong.
        reason: String,
        /// Where it is now.
        path: PathBuf,
    },
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StateError {
    move |source| StateError::Io {
        operation,
        path: path.to_owned(),
        source,
    }
}

/// The time for people: seconds since 1970.
pub fn wall_clock_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// Logical port and pod of entries.
type Whose = (Arc<str>, Option<Arc<str>>);

/// A snapshot that is being written. Until its end, the last one stays.
#[derive(Debug)]
pub struct Writing {
    directory: Directory,
    /// What errors name.
    path: PathBuf,
    file: BufWriter<File>,
    /// The names that are written.
    numbers: HashMap<DomainName, u32>,
    /// Whose the last entry was.
    whose: Option<Whose>,
    entries: u64,
}

impl Writing {
    /// Begins a snapshot in `dir` of what is open at this time of the wall clock. The directory is made if there is none.
    pub fn begin(dir: &Path, saved_at_s: u64) -> Result<Self, StateError> {
        let path = dir.join(FILE);
        let directory = Directory::make(dir, FILES).map_err(io_error("use", dir))?;
        let file = directory.begin(FILE).map_err(io_error("write", &path))?;
        let mut writing = Self {
            directory,
            path,
            file: BufWriter::new(file),
            numbers: HashMap::new(),
            whose: None,
            entries: 0,
        };
        let version = VERSION;
        let head = Head {
            version,
            saved_at_s,
        };
        let written = writing.line(&head);
        written.map_err(io_error("write", &writing.path))?;
        Ok(writing)
    }

    /// Writes a part.
    pub fn add(&mut self, part: &SavedPart) -> Result<(), StateError> {
        let written = match part {
            SavedPart::Rules(rules) => rules.iter().try_for_each(|rules| self.rules(rules)),
            SavedPart::Entries(entries) => entries.iter().try_for_each(|entry| self.entry(entry)),
        };
        written.map_err(io_error("write", &self.path))
    }

    /// All entries are written: replaces the last snapshot.
    pub fn end(mut self) -> Result<(), StateError> {
        let written = self.line(&Line::End(self.entries));
        let file = written.and_then(|()| Ok(self.file.into_inner()?));
        let replaced = file.and_then(|file| self.directory.replace(FILE, &file));
        replaced.map_err(io_error("write", &self.path))
    }

    fn rules(&mut self, rules: &SavedRules) -> io::Result<()> {
        let SavedRules {
            namespace,
            rules,
            is_partial,
        } = rules;
        let rules = rules.iter().map(|((name, pattern, action), priority)| {
            (name.to_string(), *pattern, *action, *priority)
        });
        self.line(&Line::Rules(
            namespace.to_string(),
            rules.collect(),
            *is_partial,
        ))
    }

    fn entry(&mut self, entry: &SavedEntry) -> io::Result<()> {
        let SavedEntry {
            port,
            pod,
            address,
            names,
        } = entry;
        let whose = (Arc::clone(port), pod.clone());
        if self.whose.as_ref() != Some(&whose) {
            let pod = pod.as_deref().map(str::to_owned);
            self.line(&Line::Port(port.to_string(), pod))?;
            self.whose = Some(whose);
        }
        let mut numbered = Vec::with_capacity(names.len());
        for saved in names {
            let SavedName {
                name,
                rest,
                deny_rest,
                is_denied,
            } = saved;
            let number = self.number(name)?;
            let (rest, deny_rest) = (rest.as_secs(), deny_rest.as_secs());
            numbered.push(NumberedName(number, rest, deny_rest, *is_denied));
        }
        self.line(&Line::Address(*address, numbered))?;
        self.entries += 1;
        Ok(())
    }

    /// The number of a name, which is written before if it is new.
    fn number(&mut self, name: &DomainName) -> io::Result<u32> {
        if let Some(number) = self.numbers.get(name) {
            return Ok(*number);
        }
        let number = u32::try_from(self.numbers.len()).map_err(io::Error::other)?;
        self.line(&name_line(name))?;
        self.numbers.insert(name.clone(), number);
        Ok(number)
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.file, line)?;
        self.file.write_all(b"\n")
    }
}

/// Reads the snapshot in `dir`. Returns nothing if there is none.
pub fn load(dir: &Path) -> Result<Saved, StateError> {
    let Some(directory) = open(dir)? else {
        return Ok(Saved::default());
    };
    let set_aside = |reason| set_aside(&directory, dir, reason);
    let file = match directory.file(FILE, SIZE_MAX) {
        Ok(Ok(file)) => file,
        Ok(Err(len)) => return Err(set_aside(format!("{len} bytes"))?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Saved::default()),
        Err(error) => return Err(io_error("read", &dir.join(FILE))(error)),
    };
    let mut failed = None;
    let lines = BufReader::new(file).split(b'\n');
    let lines = lines.map_while(|line| line.map_err(|error| failed = Some(error)).ok());
    let saved = parse(lines, wall_clock_s());
    if let Some(error) = failed {
        return Err(io_error("read", &dir.join(FILE))(error));
    }
    match saved {
        Ok(saved) => Ok(saved),
        Err(reason) => Err(set_aside(reason)?),
    }
}

/// The snapshot in `dir`, if there is one.
pub fn find(dir: &Path) -> Option<PathBuf> {
    let path = dir.join(FILE);
    path.is_file().then_some(path)
}

/// Removes the snapshot in `dir`, and one that was set aside.
pub fn remove(dir: &Path) -> Result<(), StateError> {
    let Some(directory) = open(dir)? else {
        return Ok(());
    };
    for file in FILES {
        let removed = directory.remove(file);
        removed.map_err(io_error("remove", &dir.join(file)))?;
    }
    Ok(())
}

fn open(dir: &Path) -> Result<Option<Directory>, StateError> {
    match Directory::open(dir, FILES) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("use", dir)(error)),
    }
}

fn set_aside(directory: &Directory, dir: &Path, reason: String) -> Result<StateError, StateError> {
    let renamed = directory.rename(FILE, UNUSABLE);
    renamed.map_err(io_error("set aside", &dir.join(FILE)))?;
    Ok(StateError::Unusable {
        reason,
        path: dir.join(UNUSABLE),
    })
}

/// The snapshot in these lines at this time of the wall clock, or why they are not usable.
fn parse(mut lines: impl Iterator<Item = Vec<u8>>, now_s: u64) -> Result<Saved, String> {
    let first = lines.next().unwrap_or_default();
    let Version { version } = of_json(&first)?;
    match version {
        VERSION => {
            let Head { saved_at_s, .. } = of_json(&first)?;
            let mut reading = Reading::new(now_s.saturating_sub(saved_at_s));
            for line in lines {
                reading.take(of_json(&line)?)?;
            }
            reading.end()
        }
        VERSION_BEFORE => {
            let Before {
                saved_at_s,
                entries,
            } = of_json(&first)?;
            let age_s = now_s.saturating_sub(saved_at_s);
            let entries = entries.into_iter();
            let entries = entries.map(|entry| entry_before(entry, age_s));
            Ok(Saved {
                entries: entries.collect::<Result<_, _>>()?,
                ..Saved::default()
            })
        }
        other => Err(format!("version {other} instead of {VERSION}")),
    }
}

fn of_json<'a, T: Deserialize<'a>>(line: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(line).map_err(|error| error.to_string())
}

/// What was read of the lines so far.
struct Reading {
    /// How long ago they were written.
    age_s: u64,
    names: Vec<DomainName>,
    whose: Option<Whose>,
    rules: Vec<SavedRules>,
    entries: Vec<SavedEntry>,
    is_whole: bool,
}

impl Reading {
    fn new(age_s: u64) -> Self {
        Self {
            age_s,
            names: Vec::new(),
            whose: None,
            rules: Vec::new(),
            entries: Vec::new(),
            is_whole: false,
        }
    }

    fn take(&mut self, line: Line) -> Result<(), String> {
        if self.is_whole {
            return Err("there is something behind the end".into());
        }
        match line {
            Line::Rules(namespace, rules, is_partial) => {
                let rules = rules.into_iter().map(|(name, pattern, action, priority)| {
                    Ok(((name_of(&name)?, pattern, action), priority))
                });
                self.rules.push(SavedRules {
                    namespace: namespace.into(),
                    rules: rules.collect::<Result<_, String>>()?,
                    is_partial,
                });
            }
            Line::Name(text) => self.names.push(name_of(&text)?),
            Line::Wire(digits) => {
                let name = of_wire(&digits);
                let name = name.ok_or_else(|| format!("`{digits}` is no name in wire format"))?;
                self.names.push(name);
            }
            Line::Port(port, pod) => self.whose = Some((port.into(), pod.map(Into::into))),
            Line::Address(address, numbered) => {
                let whose = self.whose.clone();
                let (port, pod) = whose.ok_or("an entry has no port")?;
                let names = numbered.into_iter();
                let names = names.map(|numbered| self.saved_name(numbered));
                let names = names.collect::<Option<_>>().ok_or("a name is missing")?;
                self.entries.push(SavedEntry {
                    port,
                    pod,
                    address,
                    names,
                });
            }
            Line::End(count) => {
                self.is_whole = usize::try_from(count) == Ok(self.entries.len());
            }
        }
        Ok(())
    }

    fn saved_name(&self, numbered: NumberedName) -> Option<SavedName> {
        let NumberedName(number, rest_s, deny_rest_s, is_denied) = numbered;
        let name = self.names.get(usize::try_from(number).ok()?)?;
        Some(SavedName {
            is_denied,
            ..saved_name(name.clone(), rest_s, deny_rest_s, self.age_s)
        })
    }

    fn end(self) -> Result<Saved, String> {
        match self.is_whole {
            true => Ok(Saved {
                rules: self.rules,
                entries: self.entries,
            }),
            false => Err("entries are missing".into()),
        }
    }
}

fn entry_before(entry: EntryBefore, age_s: u64) -> Result<SavedEntry, String> {
    let names = entry.names.into_iter();
    let names = names.map(|(text, rest_s, deny_rest_s)| {
        let name = name_of(&text)?;
        Ok(saved_name(name, rest_s, deny_rest_s, age_s))
    });
    Ok(SavedEntry {
        port: entry.port.into(),
        pod: entry.pod.map(Into::into),
        address: entry.address,
        names: names.collect::<Result<_, String>>()?,
    })
}

fn saved_name(name: DomainName, rest_s: u64, deny_rest_s: u64, age_s: u64) -> SavedName {
    let left = |rest_s: u64| Duration::from_secs(rest_s.saturating_sub(age_s));
    SavedName {
        name,
        rest: left(rest_s),
        deny_rest: left(deny_rest_s),
        is_denied: false,
    }
}

fn name_of(text: &str) -> Result<DomainName, String> {
    DomainName::from_presentation(text).map_err(|error| format!("`{text}`: {error}"))
}

/// The line of a name. An escaped octet would take five characters, as hexadecimal digits it takes two.
fn name_line(name: &DomainName) -> Line {
    let text = name.to_string();
    // A dot for each length octet but the first.
    match text.len() + 1 == name.wire().len() {
        true => Line::Name(text),
        false => Line::Wire(
            name.wire()
                .iter()
                .map(|octet| format!("{octet:02x}"))
                .collect(),
        ),
    }
}

fn of_wire(digits: &str) -> Option<DomainName> {
    let pairs = digits.as_bytes().chunks(2);
    let octet = |pair: &[u8]| match pair {
        [high, low] => {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()
        }
        _ => None,
    };
    let wire: Vec<u8> = pairs.map(octet).collect::<Option<_>>()?;
    let mut labels = Vec::new();
    let mut rest = wire.as_slice();
    while let Some((length, tail)) = rest.split_first() {
        let (label, tail) = tail.split_at_checked(usize::from(*length))?;
        labels.push(label);
        rest = tail;
    }
    DomainName::from_labels(labels).ok()
}

#[cfg(test)]
mod tests;
