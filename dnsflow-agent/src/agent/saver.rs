//! The thread that writes the snapshot. Nobody waits for a slow disk: only the end of the agent does, for a while.

use std::{
    convert::Infallible,
    io,
    path::PathBuf,
    sync::mpsc::{self as ends, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use dnsflow_core::snapshot::SavedEntry;
use tokio::sync::mpsc::{self, error::TrySendError};
use tracing::warn;

use crate::state;

/// The last snapshot is waited for so long. The kubelet kills a Pod some time after SIGTERM
/// (`terminationGracePeriodSeconds` in `deploy/base`).
const LAST_MAX: Duration = Duration::from_secs(3);
/// Between two looks whether the thread takes the last snapshot.
const POLL: Duration = Duration::from_millis(5);

/// The only writer of the snapshot.
#[derive(Debug)]
pub(super) struct Saver {
    /// One snapshot may wait while another one is written.
    snapshots: mpsc::Sender<Vec<SavedEntry>>,
    /// Closed when the thread ends.
    runs: ends::Receiver<Infallible>,
}

impl Saver {
    /// Starts the thread that writes into `dir`.
    pub(super) fn start(dir: PathBuf) -> io::Result<Self> {
        let (snapshots, mut to_save) = mpsc::channel::<Vec<SavedEntry>>(1);
        let (running, runs) = ends::channel();
        thread::Builder::new()
            .name("snapshot".into())
            .spawn(move || {
                let _while_it_runs = running;
                while let Some(entries) = to_save.blocking_recv() {
                    if let Err(error) = state::save(&dir, &entries) {
                        warn!(%error, "the snapshot is not written");
                    }
                }
            })?;
        Ok(Self { snapshots, runs })
    }

    /// Hands a snapshot over, if no other one waits; returns whether it was taken. Never waits, and makes none in vain.
    pub(super) fn offer(&self, make: impl FnOnce() -> Vec<SavedEntry>) -> bool {
        match self.snapshots.try_reserve() {
            Ok(place) => {
                place.send(make());
                true
            }
            Err(_) => false,
        }
    }

    /// Writes the last snapshot behind all others.
    pub(super) fn end(self, last: Vec<SavedEntry>) {
        let Self { snapshots, runs } = self;
        let end = Instant::now() + LAST_MAX;
        let mut rest = Some(last);
        while let Some(snapshot) = rest.take() {
            match snapshots.try_send(snapshot) {
                Ok(()) | Err(TrySendError::Closed(_)) => {}
                Err(TrySendError::Full(_)) if Instant::now() >= end => break,
                Err(TrySendError::Full(snapshot)) => {
                    rest = Some(snapshot);
                    thread::sleep(POLL);
                }
            }
        }
        drop(snapshots);
        let left = end.saturating_duration_since(Instant::now());
        if runs.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            warn!(
                waited_s = LAST_MAX.as_secs(),
                "the disk of --state-dir does not answer: the names behind the addresses of the last seconds may not \
                 be saved; the addresses stay open, and the pods ask again"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn entry(port: usize) -> SavedEntry {
        SavedEntry {
            port: format!("ns1_p{port}"),
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
            assert!(saver.offer(|| large.clone()));
            // Taken or not, the last one comes behind it.
            saver.offer(|| large);
            saver.end((0..last).map(entry).collect());
            assert_eq!(state::load(&dir).expect("it can be read").len(), last);
        }
        fs::remove_dir_all(dir).expect("it is there");
    }
}
