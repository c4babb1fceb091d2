//! The snapshot on disk: the names for which the flows in the switch were written.
//!
//! One JSON file in the directory of `--state-dir`, replaced atomically. The agent does not depend
//! on the file. Without a readable file, the agent adopts the flows that it finds, and does not
//! know their names.
//!
//! Whoever can write the file can have addresses opened. Directory and file therefore belong to the
//! agent alone.

mod directory;

use std::{
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use dnsflow_core::{
    name::DomainName,
    snapshot::{SavedEntry, SavedName},
};
use serde::{Deserialize, Serialize};

use directory::Directory;

/// The version of the file's form. No other version is read.
const VERSION: u32 = 2;
/// The file's name.
const FILE: &str = "cache.json";
/// The name of a file that could not be used.
const UNUSABLE: &str = "cache.unusable";
/// What there is in the directory.
const FILES: &[&str] = &[FILE, UNUSABLE];
/// A larger file is not the agent's: 100,000 entries take about 15 MB.
const SIZE_MAX: u64 = 256 << 20;

#[derive(Deserialize, Serialize)]
struct Stored {
    version: u32,
    /// Seconds of the wall clock since 1970: the agent's own clock may begin anew.
    saved_at_s: u64,
    entries: Vec<StoredEntry>,
}

#[derive(Deserialize, Serialize)]
struct StoredEntry {
    port: String,
    pod: Option<String>,
    address: IpAddr,
    names: Vec<StoredName>,
}

/// Presentation format, and the seconds left when it was saved: in any case, and where a rule denies
/// the name.
type StoredName = (String, u64, u64);

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

fn wall_clock_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// Writes the snapshot into `dir`. The directory is made if there is none.
pub fn save(dir: &Path, entries: &[SavedEntry]) -> Result<(), StateError> {
    let stored = Stored {
        version: VERSION,
        saved_at_s: wall_clock_s(),
        entries: entries.iter().map(stored_entry).collect(),
    };
    let directory = Directory::make(dir, FILES).map_err(io_error("use", dir))?;
    let content = serde_json::to_vec(&stored).map_err(io::Error::from);
    content
        .and_then(|content| directory.replace(FILE, &content))
        .map_err(io_error("write", &dir.join(FILE)))
}

/// Reads the snapshot in `dir`. Returns nothing if there is none.
pub fn load(dir: &Path) -> Result<Vec<SavedEntry>, StateError> {
    let Some(directory) = open(dir)? else {
        return Ok(Vec::new());
    };
    let set_aside = |reason| set_aside(&directory, dir, reason);
    let content = match directory.read(FILE, SIZE_MAX) {
        Ok(Ok(content)) => content,
        Ok(Err(len)) => return Err(set_aside(format!("{len} bytes"))?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error("read", &dir.join(FILE))(error)),
    };
    let stored: Stored = match serde_json::from_slice(&content) {
        Ok(stored) => stored,
        Err(error) => return Err(set_aside(error.to_string())?),
    };
    if stored.version != VERSION {
        let reason = format!("version {} instead of {VERSION}", stored.version);
        return Err(set_aside(reason)?);
    }
    let age_s = wall_clock_s().saturating_sub(stored.saved_at_s);
    let entries: Result<Vec<_>, _> = stored
        .entries
        .into_iter()
        .map(|entry| saved_entry(entry, age_s))
        .collect();
    match entries {
        Ok(entries) => Ok(entries),
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

fn stored_entry(entry: &SavedEntry) -> StoredEntry {
    let names = entry.names.iter();
    StoredEntry {
        port: entry.port.clone(),
        pod: entry.pod.clone(),
        address: entry.address,
        names: names
            .map(|saved| {
                let SavedName {
                    name,
                    rest,
                    deny_rest,
                } = saved;
                (name.to_string(), rest.as_secs(), deny_rest.as_secs())
            })
            .collect(),
    }
}

fn saved_entry(entry: StoredEntry, age_s: u64) -> Result<SavedEntry, String> {
    let rest = |rest_s: u64| Duration::from_secs(rest_s.saturating_sub(age_s));
    let name = |(text, rest_s, deny_rest_s): StoredName| {
        let name = DomainName::from_presentation(&text);
        Ok(SavedName {
            name: name.map_err(|error| format!("`{text}`: {error}"))?,
            rest: rest(rest_s),
            deny_rest: rest(deny_rest_s),
        })
    };
    Ok(SavedEntry {
        port: entry.port,
        pod: entry.pod,
        address: entry.address,
        names: entry
            .names
            .into_iter()
            .map(name)
            .collect::<Result<_, String>>()?,
    })
}

#[cfg(test)]
mod tests;
