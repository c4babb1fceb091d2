//! A relay in front of a Unix socket that can become silent, like a switch that does not respond.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

/// How often a silent relay looks whether it may speak again.
const PAUSE: Duration = Duration::from_millis(5);

/// A relay. Its threads end with their connections.
#[derive(Debug)]
pub struct Relay {
    path: PathBuf,
    silent: Arc<AtomicBool>,
}

impl Relay {
    /// Listens at `path` and relays to the socket at `target`.
    pub fn start(path: PathBuf, target: PathBuf) -> Result<Self> {
        let listener = UnixListener::bind(&path)
            .with_context(|| format!("cannot listen at {}", path.display()))?;
        let silent = Arc::<AtomicBool>::default();
        let relay = Self {
            path,
            silent: Arc::clone(&silent),
        };
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = UnixStream::connect(&target) else {
                    continue;
                };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else {
                        continue;
                    };
                    let silent = Arc::clone(&silent);
                    thread::spawn(move || pass_on(from, to, &silent));
                }
            }
        });
        Ok(relay)
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// With `silent`, relays nothing in either direction; nothing is lost.
    pub fn be_silent(&self, silent: bool) {
        self.silent.store(silent, Ordering::SeqCst);
    }
}

fn pass_on(mut from: UnixStream, mut to: UnixStream, silent: &AtomicBool) {
    let mut buffer = [0; 1 << 16];
    let mut turn = || -> io::Result<usize> {
        let length = from.read(&mut buffer)?;
        while silent.load(Ordering::SeqCst) {
            thread::sleep(PAUSE);
        }
        to.write_all(&buffer[..length])?;
        Ok(length)
    };
    while turn().is_ok_and(|length| length > 0) {}
    for stream in [&from, &to] {
        // Closed already, perhaps.
        let _ = stream.shutdown(Shutdown::Both);
    }
}
