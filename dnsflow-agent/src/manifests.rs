//! EgressFirewalls from a directory of manifests, for use without a cluster.
//!
//! One task, which may be dropped at any time. It reads the directory's `*.yaml`, `*.yml` and `*.json` files at each
//! change that inotify reports, and sends the complete list when the list has changed. If a file cannot be read or
//! parsed, the firewalls of its last reading stay. If the directory is away, all stay. A firewall is removed only if
//! a readable file or directory no longer has it.
//!
//! Files are best replaced by renaming a complete one over them, as editors and ConfigMap mounts do. A file that is
//! written in place is read after 50 ms without a change. An empty file counts as still being written.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use dnsflow_core::{
    Input,
    values::firewall::{Firewall, FirewallId, FirewallUpdate},
};
use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode},
};
use tokio::{sync::mpsc, time::Instant};

use crate::k8s::reports::{Objects, Reports};
use dnsflow_asking::manifests::Directory;
pub use dnsflow_asking::manifests::{
    Files, MAX_FILE_BYTES, MAX_FILES, MAX_TOTAL_BYTES, names, texts,
};

/// Changes are read when there was none for this long.
const QUIET: Duration = Duration::from_millis(50);
/// Changes are read after this long even if they go on.
const QUIET_MAX: Duration = Duration::from_millis(500);
/// The directory is read this often without being told of a change: inotify says nothing about
/// network file systems and about the targets of symbolic links.
const RESCAN: Duration = Duration::from_secs(10);

/// Reads the manifests in `dir` and sends each change, until the receiver of `inputs` is gone.
///
/// Each update is a complete list with [`FirewallUpdate::reset`]; the first is sent as soon as
/// the directory can be read, also when it holds no firewall. `objects` has what is not usable.
pub async fn watch_manifests(dir: PathBuf, inputs: mpsc::Sender<Input>, objects: Objects) {
    let dir = std::path::absolute(&dir).unwrap_or(dir);
    let object = dir.display().to_string();
    // One token: whether something has changed since the last read.
    let (changed, mut changes) = mpsc::channel(1);
    let mut directory = Directory::new(dir.clone());
    let mut watches = Watches::new(dir, changed);
    let mut reports = Reports::new(objects);
    let mut sent: Option<BTreeMap<FirewallId, Firewall>> = None;
    loop {
        // The watch begins before the read, so that no change is missed.
        let look = tokio::task::spawn_blocking(move || {
            let armed = watches.arm();
            let snapshot = directory.read();
            (watches, directory, armed, snapshot)
        });
        let Ok((back, dir_back, armed, snapshot)) = look.await else {
            // The runtime is shutting down.
            return;
        };
        (watches, directory) = (back, dir_back);
        let mut reasons: Vec<String> = armed.err().into_iter().collect();
        match snapshot {
            Ok(snapshot) => {
                for (object, reasons) in snapshot.reasons {
                    let is_in_force = !snapshot.unusable.contains(&object);
                    reports.tell(&object, is_in_force, reasons);
                }
                reports.retain(|known| known == object || directory.holds(known));
                if sent.as_ref() != Some(&snapshot.firewalls) {
                    let update = FirewallUpdate {
                        reset: true,
                        firewalls: snapshot
                            .firewalls
                            .iter()
                            .map(|(id, firewall)| (id.clone(), Some(firewall.clone())))
                            .collect(),
                    };
                    if inputs.send(Input::Firewalls(update)).await.is_err() {
                        return;
                    }
                    sent = Some(snapshot.firewalls);
                }
                reasons.extend(snapshot.too_many);
            }
            Err(reason) if sent.is_some() => {
                reasons.push(format!(
                    "{reason}; waiting for it; the last valid manifests stay in force"
                ));
            }
            Err(reason) => reasons.push(format!(
                "{reason}; waiting for it (--manifests DIR names the directory)"
            )),
        }
        reports.tell(&object, sent.is_some(), reasons);
        let changed = tokio::select! {
            _ = changes.recv() => true,
            () = tokio::time::sleep(RESCAN) => false,
            () = inputs.closed() => return,
        };
        if changed {
            let latest = Instant::now() + QUIET_MAX;
            let quiet_until = || latest.min(Instant::now() + QUIET);
            while let Ok(Some(())) = tokio::time::timeout_at(quiet_until(), changes.recv()).await {}
        }
    }
}

/// The inotify watches: on the directory and on its nearest existing ancestor, which tells when
/// the directory appears or is replaced.
struct Watches {
    dir: PathBuf,
    changed: mpsc::Sender<()>,
    armed: Option<RecommendedWatcher>,
}

impl Watches {
    fn new(dir: PathBuf, changed: mpsc::Sender<()>) -> Self {
        Self {
            dir,
            changed,
            armed: None,
        }
    }

    /// Sets all watches anew. A watch ends with its directory, and a new directory can have the
    /// inode number of the old one.
    fn arm(&mut self) -> Result<(), String> {
        // The old watches end after the new ones are set.
        match self.watcher() {
            Ok(watcher) => {
                self.armed = Some(watcher);
                Ok(())
            }
            Err(error) => {
                self.armed = None;
                Err(format!(
                    "cannot be watched ({error}); it is read every {} s instead",
                    RESCAN.as_secs()
                ))
            }
        }
    }

    fn watcher(&self) -> notify::Result<RecommendedWatcher> {
        let (dir, changed) = (self.dir.clone(), self.changed.clone());
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if event.map_or(true, |event| concerns(&event, &dir)) {
                // A full channel already has the token.
                let _ = changed.try_send(());
            }
        })?;
        let mut above = self.dir.ancestors().skip(1);
        let above = above.find(|path| path.is_dir());
        let here = Some(self.dir.as_path()).filter(|path| path.is_dir());
        for path in above.into_iter().chain(here) {
            watcher.watch(path, RecursiveMode::NonRecursive)?;
        }
        Ok(watcher)
    }
}

/// Whether an event may change what is read below `dir`. Reading itself is no change.
fn concerns(event: &Event, dir: &Path) -> bool {
    let reading = match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => false,
        EventKind::Access(_) => true,
        _ => false,
    };
    let here = event.paths.is_empty()
        || event
            .paths
            .iter()
            .any(|path| path.starts_with(dir) || dir.starts_with(path));
    here && !reading
}

#[cfg(test)]
mod tests;
