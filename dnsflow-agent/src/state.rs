//! The snapshot on disk: which names the flows in the switch were opened for.
//!
//! One JSON file in the directory of `--state-dir`, replaced atomically. It is a help, never a
//! condition: without it, or with one that cannot be read, the agent starts all the same and takes
//! over the flows that it finds, whose names it then does not know.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use dnsflow_core::{
    name::DomainName,
    snapshot::{SavedEntry, SavedName},
};
use serde::{Deserialize, Serialize};

/// The form of the file. Another one is not read.
const VERSION: u32 = 2;
/// The file's name.
const FILE: &str = "cache.json";
/// A larger file is none of ours: 100,000 entries take about 15 MB.
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
    /// The content is not what this version writes. The file has been set aside.
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

/// Writes the snapshot into `dir`, which is made if need be.
pub fn save(dir: &Path, entries: &[SavedEntry]) -> Result<(), StateError> {
    let stored = Stored {
        version: VERSION,
        saved_at_s: wall_clock_s(),
        entries: entries.iter().map(stored_entry).collect(),
    };
    fs::create_dir_all(dir).map_err(io_error("make", dir))?;
    let path = dir.join(FILE);
    let new = dir.join(format!("{FILE}.new"));
    let write = || -> io::Result<()> {
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(&stored)?)?;
        // Before the rename, which would else survive a crash without the content.
        file.sync_all()?;
        fs::rename(&new, &path)
    };
    write().map_err(io_error("write", &path))
}

/// Reads the snapshot in `dir`; nothing where there is none.
pub fn load(dir: &Path) -> Result<Vec<SavedEntry>, StateError> {
    let path = dir.join(FILE);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.len() > SIZE_MAX => {
            return Err(set_aside(&path, format!("{} bytes", metadata.len()))?);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Ok(_) | Err(_) => {}
    }
    let bytes = fs::read(&path).map_err(io_error("read", &path))?;
    let stored: Stored = match serde_json::from_slice(&bytes) {
        Ok(stored) => stored,
        Err(error) => return Err(set_aside(&path, error.to_string())?),
    };
    if stored.version != VERSION {
        let reason = format!("version {} instead of {VERSION}", stored.version);
        return Err(set_aside(&path, reason)?);
    }
    let age_s = wall_clock_s().saturating_sub(stored.saved_at_s);
    let entries: Result<Vec<_>, _> = stored
        .entries
        .into_iter()
        .map(|entry| saved_entry(entry, age_s))
        .collect();
    match entries {
        Ok(entries) => Ok(entries),
        Err(reason) => Err(set_aside(&path, reason)?),
    }
}

/// Removes the snapshot in `dir`.
pub fn remove(dir: &Path) -> Result<(), StateError> {
    let path = dir.join(FILE);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(io_error("remove", &path)(error))
        }
        _ => Ok(()),
    }
}

fn set_aside(path: &Path, reason: String) -> Result<StateError, StateError> {
    let aside = path.with_extension("unusable");
    fs::rename(path, &aside).map_err(io_error("set aside", path))?;
    Ok(StateError::Unusable {
        reason,
        path: aside,
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
mod tests {
    use super::*;

    /// A directory of its own, removed at the end.
    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let name = format!("dnsflow-state-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("the directory is there");
        }
    }

    fn entries() -> Vec<SavedEntry> {
        let odd = DomainName::from_labels([&b"a.b"[..], b"\xff"]).expect("labels");
        let saved = |name: DomainName| SavedName {
            name,
            rest: Duration::from_secs(3000),
            deny_rest: Duration::from_secs(3500),
        };
        vec![SavedEntry {
            port: "ns1_p1".into(),
            pod: Some("uid".into()),
            address: "203.0.113.1".parse().expect("an address"),
            names: vec![
                saved("www.example.com".parse().expect("a name")),
                saved(odd),
            ],
        }]
    }

    #[test]
    fn what_is_saved_comes_back() {
        let dir = Dir::new("back");
        assert_eq!(load(&dir.0).expect("nothing"), []);
        save(&dir.0, &entries()).expect("saved");
        let mut back = load(&dir.0).expect("loaded");
        for name in &mut back[0].names {
            // A second may have passed.
            for (rest, saved_s) in [(&mut name.rest, 3000), (&mut name.deny_rest, 3500)] {
                assert!(*rest >= Duration::from_secs(saved_s - 2), "{rest:?}");
                *rest = Duration::from_secs(saved_s);
            }
        }
        assert_eq!(back, entries());
        remove(&dir.0).expect("removed");
        assert_eq!(load(&dir.0).expect("nothing"), []);
    }

    #[test]
    fn what_cannot_be_used_is_set_aside_with_the_reason() {
        let dir = Dir::new("aside");
        fs::create_dir_all(&dir.0).expect("made");
        for (content, reason) in [
            ("{\"version\":2", "EOF"),
            (
                "{\"version\":1,\"saved_at_s\":1,\"entries\":[]}",
                "version 1",
            ),
            (
                "{\"version\":2,\"saved_at_s\":1,\"entries\":[{\"port\":\"p\",\"pod\":null,\"address\":\"192.0.2.1\",\"names\":[[\"a..b\",1,1]]}]}",
                "`a..b`: the name has an empty label",
            ),
        ] {
            fs::write(dir.0.join(FILE), content).expect("written");
            let error = load(&dir.0).expect_err("unusable").to_string();
            assert!(error.contains(reason), "{error}");
            assert!(!dir.0.join(FILE).exists());
            assert_eq!(load(&dir.0).expect("nothing"), []);
        }
    }

    #[test]
    fn time_passes_between_runs() {
        let dir = Dir::new("age");
        save(&dir.0, &entries()).expect("saved");
        let path = dir.0.join(FILE);
        let text = fs::read_to_string(&path).expect("read");
        let now = wall_clock_s();
        let older = text.replace(
            &format!("\"saved_at_s\":{now}"),
            &format!("\"saved_at_s\":{}", now - 1000),
        );
        fs::write(&path, older).expect("written");
        let name = load(&dir.0).expect("loaded")[0].names[0].clone();
        assert!(name.rest <= Duration::from_secs(2000), "{name:?}");
        assert!(name.deny_rest <= Duration::from_secs(2500), "{name:?}");
    }
}
