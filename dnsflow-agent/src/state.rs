//! The journal on disk: what pods were told, for the next agent.
//!
//! One file in the directory of `--state-dir`, to which the hot thread appends the records of a turn, before anything
//! follows from them. So no record is lost that the file system has taken, whatever becomes of the agent.
//! Nothing is synced: flows and marks do not outlive the node either, and the file counts for one boot.
//!
//! The file has a line with its form and the boot, then records: two octets with the length (little endian), and the
//! record as postcard has it. A record that is not whole is the end of the file: the agent was killed in it. From time to
//! time, a new file with what lives takes the place of the old one ([`Journal::go_on`]).
//!
//! Whoever can write the file can have addresses opened. So directory and file belong to the agent alone.

mod directory;
mod form;

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use dnsflow_core::{
    Timestamp,
    cache::journal::{Folding, Parts, Record, Saved},
};

use directory::Directory;

/// The file's name.
const FILE: &str = "journal";
/// The name of a file that could not be used.
const UNUSABLE: &str = "journal.unusable";
/// What there is in the directory.
const FILES: &[&str] = &[FILE, UNUSABLE];
/// The form of the file.
const FORM: &str = "dnsflow journal 3";
/// No file of the agent's is larger: what lives on a full node, with the longest names, takes 80 MB.
const SIZE_MAX: u64 = 256 << 20;
/// A file is written anew when it has twice the size of what lived when it was begun, and so much more.
const REWRITE_AT_LEAST: u64 = 1 << 20;
/// But at this size at the latest: an edit may add a record for each name, and so may another one before the new file is
/// whole.
const REWRITE_AT_MOST: u64 = SIZE_MAX / 2;
/// What could not be written is tried again, and told, so often.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// A file that was replaced gives back so much in a turn: tmpfs takes 0.2 ms for it, and 7 ms for 150 MB.
const CUT: u64 = 4 << 20;

/// Why the journal cannot be read or written.
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
    /// The file was removed.
    #[error("the journal had {len} bytes, more than the agent writes, and was removed")]
    TooLarge {
        /// Its length.
        len: u64,
    },
    /// The content is not of the form that this version writes. The file was set aside.
    #[error("the journal is not usable ({reason}) and was set aside as {}", path.display())]
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

/// The first line of the file.
fn head() -> Result<String, StateError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let boot = fs::read_to_string(path).map_err(io_error("read", path))?;
    Ok(format!("{FORM} {}\n", boot.trim_end()))
}

/// The file, to which records are appended.
#[derive(Debug)]
pub struct Journal {
    directory: Directory,
    /// What errors name.
    path: PathBuf,
    head: String,
    /// `None` if there is no file to which records could be appended.
    file: Option<Appended>,
    /// The size at which a new file is begun.
    rewrite_at: u64,
    /// The new file that is being written.
    rewriting: Option<Rewriting>,
    /// The file whose place a new one took, or a new one that was given up, as long as it has something to give back.
    replaced: Option<Appended>,
    /// Records are missing in the file: a new one is begun then.
    retry_at: Option<Timestamp>,
    /// How many records are in no file.
    lost: usize,
    buffer: Vec<u8>,
}

/// A file of the agent's own, and its length.
#[derive(Debug)]
struct Appended {
    file: File,
    len: u64,
}

impl Appended {
    /// Appends by one write, if all fits. The file is of no use otherwise.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let len = self.len + bytes.len() as u64;
        if len > SIZE_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if self.file.write(bytes)? < bytes.len() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.len = len;
        Ok(())
    }

    /// Gives back a piece of a file that nobody reads any more. Returns whether there is more.
    fn cut(&mut self) -> bool {
        self.len = self.len.saturating_sub(CUT);
        self.len > 0 && self.file.set_len(self.len).is_ok()
    }
}

/// A new file that is not whole yet.
#[derive(Debug)]
struct Rewriting {
    file: Appended,
    /// What it has of all that lives.
    parts: Parts,
    /// How many octets of it are parts. The others are records that have come meanwhile.
    live: u64,
    /// How many records it has that no other file has.
    alone: usize,
}

/// Opens the journal in `dir`, which is made if there is none. Returns what an earlier agent of this boot has left there,
/// if there is a file that can be used, or why it cannot. Then a new file takes its place, at once or later.
///
/// # Errors
///
/// Where the directory cannot be used.
pub fn open(
    dir: &Path,
    now: Timestamp,
) -> Result<(Journal, Option<Saved>, Option<StateError>), StateError> {
    let directory = Directory::make(dir, FILES).map_err(io_error("use", dir))?;
    let mut journal = Journal {
        directory,
        path: dir.join(FILE),
        head: head()?,
        file: None,
        rewrite_at: REWRITE_AT_LEAST,
        rewriting: None,
        replaced: None,
        retry_at: None,
        lost: 0,
        buffer: Vec::new(),
    };
    let (saved, mut refusal) = match journal.read(now) {
        Ok(saved) => (saved, None),
        Err(refusal) => (None, Some(refusal)),
    };
    if journal.file.is_none() {
        journal.end_file();
        if let Err(error) = journal.begin().and_then(|()| journal.end()) {
            journal.give_up(now);
            refusal = Some(io_error("write", &journal.path)(error));
        }
    }
    Ok((journal, saved, refusal))
}

/// The journal in `dir`, if there is one.
pub fn find(dir: &Path) -> Option<PathBuf> {
    let path = dir.join(FILE);
    path.is_file().then_some(path)
}

/// Removes the journal in `dir`, and one that was set aside.
pub fn remove(dir: &Path) -> Result<(), StateError> {
    let directory = match Directory::open(dir, FILES) {
        Ok(directory) => directory,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error("use", dir)(error)),
    };
    for file in FILES {
        let removed = directory
            .remove(file)
            .and_then(|()| directory.abandon(file));
        removed.map_err(io_error("remove", &dir.join(file)))?;
    }
    Ok(())
}

impl Journal {
    /// Reads the file of this boot, if there is one, and cuts off a record at its end that is not whole.
    fn read(&mut self, now: Timestamp) -> Result<Option<Saved>, StateError> {
        let failed = || io_error("read", &self.path);
        let file = match self.directory.file(FILE, SIZE_MAX) {
            Ok(Ok(file)) => file,
            Ok(Err(len)) => {
                let removed = self.directory.remove(FILE);
                removed.map_err(io_error("remove", &self.path))?;
                return Err(StateError::TooLarge { len });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed()(error)),
        };
        let mut reader = BufReader::new(&file);
        let mut first = Vec::new();
        let longest = self.head.len() as u64;
        let line = reader.by_ref().take(longest).read_until(b'\n', &mut first);
        line.map_err(failed())?;
        if first != self.head.as_bytes() {
            return match first.starts_with(format!("{FORM} ").as_bytes()) {
                // Of another boot: nothing of it is left.
                true => Ok(None),
                false => Err(self.set_aside("it has another form".into())?),
            };
        }
        let mut folding = Folding::default();
        let mut len = longest;
        loop {
            match form::read(&mut reader).map_err(failed())? {
                form::Read::Record(record, octets) => {
                    len += octets;
                    folding.take(record);
                }
                form::Read::End => break,
                form::Read::Unusable(reason) => {
                    let reason = format!("behind {len} bytes: {reason}");
                    return Err(self.set_aside(reason)?);
                }
            }
        }
        let file = self.directory.append(FILE).map_err(failed())?;
        file.set_len(len).map_err(failed())?;
        self.file = Some(Appended { file, len });
        Ok(Some(folding.end(now)))
    }

    fn set_aside(&self, reason: String) -> Result<StateError, StateError> {
        let renamed = self.directory.rename(FILE, UNUSABLE);
        renamed.map_err(io_error("set aside", &self.path))?;
        Ok(StateError::Unusable {
            reason,
            path: self.path.with_file_name(UNUSABLE),
        })
    }

    /// Appends the records of a turn. If the agent is killed between two pieces of many records, nothing has followed from
    /// any of them.
    ///
    /// # Errors
    ///
    /// Where the file system refuses. The file goes then, until a new one takes its place: what follows would be believed
    /// without these records. A start without a file is safe, and has room for a new one.
    pub fn append(&mut self, records: &[Record], now: Timestamp) -> Result<(), StateError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut result = Ok(());
        form::write_all(records, &mut buffer, |piece| {
            let appended = self.append_piece(piece, now);
            if result.is_ok() {
                result = appended;
            }
        });
        self.buffer = buffer;
        if self.file.is_none() {
            let alone = self.rewriting.as_mut().map(|new| &mut new.alone);
            *alone.unwrap_or(&mut self.lost) += records.len();
        }
        result.map_err(io_error("write", &self.path))
    }

    fn append_piece(&mut self, piece: &[u8], now: Timestamp) -> io::Result<()> {
        let mut result = Ok(());
        if let Some(file) = &mut self.file
            && let Err(error) = file.append(piece)
        {
            self.end_file();
            self.retry_at.get_or_insert(now + RETRY_INTERVAL);
            result = Err(error);
        }
        if let Some(Rewriting { file, .. }) = &mut self.rewriting
            && let Err(error) = file.append(piece)
        {
            self.give_up(now);
            result = Err(error);
        }
        result
    }

    /// How many records are in no file, which were not counted by an earlier call.
    pub fn take_lost(&mut self) -> usize {
        std::mem::take(&mut self.lost)
    }

    /// When a new file is due because records are missing.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.retry_at.filter(|_| self.rewriting.is_none())
    }

    /// Begins a new file, if one is due.
    ///
    /// # Errors
    ///
    /// Where the file system refuses.
    pub fn begin_if_due(&mut self, now: Timestamp) -> Result<(), StateError> {
        let len = self.file.as_ref().map_or(0, |file| file.len);
        let is_due = len >= self.rewrite_at || self.retry_at.is_some_and(|at| at <= now);
        if !is_due || self.rewriting.is_some() {
            return Ok(());
        }
        self.begin().map_err(|error| {
            self.give_up(now);
            io_error("write", &self.path)(error)
        })
    }

    /// Whether a new file is being written, or the one that it has replaced is given back.
    pub fn is_rewriting(&self) -> bool {
        self.rewriting.is_some() || self.replaced.is_some()
    }

    /// Writes a further part into the new file. Behind the last one, it takes the place of the other, which is given back
    /// piece by piece.
    ///
    /// # Errors
    ///
    /// Where the file system refuses. A new file is tried again later.
    pub fn go_on(
        &mut self,
        next_part: impl FnOnce(&mut Parts) -> Option<Vec<Record>>,
        now: Timestamp,
    ) -> Result<(), StateError> {
        if let Some(replaced) = &mut self.replaced {
            if !replaced.cut() {
                self.replaced = None;
            }
            return Ok(());
        }
        let Some(Rewriting {
            file, parts, live, ..
        }) = &mut self.rewriting
        else {
            return Ok(());
        };
        let written = match next_part(parts) {
            None => self.end(),
            Some(records) => {
                let mut written = Ok(());
                form::write_all(&records, &mut self.buffer, |piece| {
                    if written.is_ok() {
                        written = file.append(piece);
                        *live += piece.len() as u64;
                    }
                });
                written
            }
        };
        written.map_err(|error| {
            self.give_up(now);
            io_error("write", &self.path)(error)
        })
    }

    /// Begins a new file.
    fn begin(&mut self) -> io::Result<()> {
        let file = self.directory.begin(FILE)?;
        let mut file = Appended { file, len: 0 };
        file.append(self.head.as_bytes())?;
        self.rewriting = Some(Rewriting {
            file,
            parts: Parts::default(),
            live: 0,
            alone: 0,
        });
        Ok(())
    }

    /// The new file has all that lives.
    fn end(&mut self) -> io::Result<()> {
        self.directory.replace(FILE)?;
        if let Some(Rewriting { file, live, .. }) = self.rewriting.take() {
            self.rewrite_at = (2 * live + REWRITE_AT_LEAST).min(REWRITE_AT_MOST);
            self.replaced = self.file.replace(file);
            self.retry_at = None;
        }
        Ok(())
    }

    /// The file misses records, or may not be believed. If it cannot be removed, a new one takes its place later.
    fn end_file(&mut self) {
        self.file = None;
        let _removed = self.directory.remove(FILE);
    }

    /// A new file could not be written: the old one goes on, and another new one is tried later.
    fn give_up(&mut self, now: Timestamp) {
        if let Some(new) = self.rewriting.take() {
            self.lost += new.alone;
            self.replaced = Some(new.file);
        }
        // It takes the space of others. If it cannot be removed, the next one does so.
        let _removed = self.directory.abandon(FILE);
        self.retry_at = Some(now + RETRY_INTERVAL);
        self.rewrite_at = u64::MAX;
    }
}

#[cfg(test)]
mod tests;
