//! The thread that writes the snapshot. Nobody waits for a slow disk: only the end of the agent does, for a while.
//!
//! A snapshot comes in parts, one for each port, and the next part is made when the last one is taken: there is never
//! more of it in memory than that.

use std::{
    convert::Infallible,
    io, iter,
    path::{Path, PathBuf},
    sync::mpsc::{self as ends, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use dnsflow_core::cache::snapshot::SavedPart;
use tokio::sync::mpsc::{self, error::TrySendError};
use tracing::warn;

use crate::state::{StateError, Writing, wall_clock_s};

/// The last snapshot is waited for so long. The kubelet kills a Pod some time after SIGTERM
/// (`terminationGracePeriodSeconds` in `deploy/base`).
const LAST_MAX: Duration = Duration::from_secs(3);
/// Between two looks whether the thread takes the next part of the last snapshot.
const POLL: Duration = Duration::from_millis(1);
/// One part may wait while another one is written.
const PARTS_MAX: usize = 1;

/// A part of a snapshot.
#[derive(Debug)]
enum Part {
    /// A snapshot begins, of this time of the wall clock. One that has not ended is given up.
    Begin(u64),
    /// A part of it.
    Saved(SavedPart),
    /// It has all of its entries.
    End,
}

/// The only writer of the snapshot.
#[derive(Debug)]
pub(super) struct Saver {
    parts: mpsc::Sender<Part>,
    /// Closed when the thread ends.
    runs: ends::Receiver<Infallible>,
}

impl Saver {
    /// Starts the thread that writes into `dir`.
    pub(super) fn start(dir: PathBuf) -> io::Result<Self> {
        let (parts, mut to_save) = mpsc::channel(PARTS_MAX);
        let (running, runs) = ends::channel();
        thread::Builder::new()
            .name("snapshot".into())
            .spawn(move || {
                let _while_it_runs = running;
                let mut writing = None;
                while let Some(part) = to_save.blocking_recv() {
                    writing = write(writing, part, &dir).unwrap_or_else(|error| {
                        warn!(%error, "cannot write the snapshot");
                        None
                    });
                }
            })?;
        Ok(Self { parts, runs })
    }

    /// Begins a snapshot, if no part of another one waits; returns whether it was begun. Never waits.
    pub(super) fn begin(&self) -> bool {
        self.parts.try_send(Part::Begin(wall_clock_s())).is_ok()
    }

    /// Waits until the thread takes another part, or has ended.
    pub(super) async fn ready(&self) {
        // An error says that it has ended.
        drop(self.parts.reserve().await);
    }

    /// Hands over the next part that `make` has, or the end of the snapshot, if the thread takes another part. Returns
    /// whether the snapshot goes on. Never waits, and makes nothing in vain.
    pub(super) fn go_on(&self, make: impl FnOnce() -> Option<SavedPart>) -> bool {
        match self.parts.try_reserve() {
            Ok(place) => {
                let saved = make();
                let goes_on = saved.is_some();
                place.send(saved.map_or(Part::End, Part::Saved));
                goes_on
            }
            Err(TrySendError::Full(())) => true,
            Err(TrySendError::Closed(())) => false,
        }
    }

    /// Writes the last snapshot, whose parts `next` gives out, behind all others.
    pub(super) fn end(self, next: impl FnMut() -> Option<SavedPart>) {
        let Self { parts, runs } = self;
        let end = Instant::now() + LAST_MAX;
        let mut last = iter::once(Part::Begin(wall_clock_s()))
            .chain(iter::from_fn(next).map(Part::Saved))
            .chain(iter::once(Part::End));
        let _in_time = last.all(|part| send_by(end, &parts, part));
        drop(parts);
        let left = end.saturating_duration_since(Instant::now());
        if runs.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            warn!(
                waited_s = LAST_MAX.as_secs(),
                "the disk of --state-dir does not answer: the snapshot may lack the names of the last seconds; their \
                 addresses stay open"
            );
        }
    }
}

/// Writes a part. Returns what goes on.
fn write(writing: Option<Writing>, part: Part, dir: &Path) -> Result<Option<Writing>, StateError> {
    match (part, writing) {
        (Part::Begin(saved_at_s), _) => Writing::begin(dir, saved_at_s).map(Some),
        (Part::Saved(saved), Some(mut writing)) => {
            writing.add(&saved)?;
            Ok(Some(writing))
        }
        (Part::End, Some(writing)) => writing.end().map(|()| None),
        // It has failed.
        (Part::Saved(_) | Part::End, None) => Ok(None),
    }
}

/// Hands over a part, and waits until then for the thread to take it. Returns whether it did.
fn send_by(end: Instant, parts: &mpsc::Sender<Part>, mut part: Part) -> bool {
    loop {
        match parts.try_send(part) {
            Ok(()) => return true,
            Err(TrySendError::Closed(_)) => return false,
            Err(TrySendError::Full(_)) if Instant::now() >= end => return false,
            Err(TrySendError::Full(full)) => {
                part = full;
                thread::sleep(POLL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use dnsflow_core::cache::snapshot::SavedEntry;

    use super::*;
    use crate::state;

    fn entry(port: usize) -> SavedEntry {
        SavedEntry {
            port: format!("ns1_p{port}").into(),
            pod: None,
            address: [203, 0, 113, 1].into(),
            names: Vec::new(),
        }
    }

    #[test]
    fn the_last_snapshot_is_the_one_that_stays() {
        let dir = std::env::temp_dir().join(format!("dnsflow-saver-{}", std::process::id()));
        for last in 1..20 {
            let saver = Saver::start(dir.clone()).expect("a thread");
            let large: Vec<_> = (0..5000).map(entry).collect();
            assert!(saver.begin());
            // Taken or not, whole or not, the last one comes behind it.
            saver.go_on(|| Some(SavedPart::Entries(large)));
            saver.go_on(|| None);
            let mut rest = (0..last).map(|port| SavedPart::Entries(vec![entry(port)]));
            saver.end(|| rest.next());
            let saved = state::load(&dir).expect("it can be read");
            assert_eq!(saved.entries.len(), last);
        }
        fs::remove_dir_all(dir).expect("it is there");
    }
}
