//! A connection that lasts: a slow download, which stands still when its packets are dropped.

use std::{
    fs,
    io::ErrorKind,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Stdio},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::{
    pod::Pod,
    process::{PATIENT, wait_until},
    web::LONG_PAGE,
};

/// A running download. Dropping it ends it.
#[derive(Debug)]
pub struct Download {
    child: Child,
    file: PathBuf,
}

impl Pod<'_> {
    /// Starts to read the long page of the web server `host`.
    pub fn download(&self, host: &str) -> Result<Download> {
        let file = self.lab().base().join("log").join(format!("{host}.page"));
        // curl writes over an earlier one only with the first bytes.
        match fs::remove_file(&file) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            Ok(()) | Err(_) => {}
        }
        let mut command = self.command("curl")?;
        command
            .args(["--silent", "--show-error", "--ipv4", "--noproxy", "*"])
            .args(["--no-buffer", "--output"])
            .arg(&file)
            .arg(format!("http://{host}{LONG_PAGE}"))
            .stdin(Stdio::null());
        // SAFETY: one system call; no allocation, no lock.
        unsafe {
            command.pre_exec(|| {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                Ok(())
            });
        }
        let child = command.spawn().context("cannot run curl")?;
        Ok(Download { child, file })
    }
}

impl Download {
    /// How many bytes have arrived.
    pub fn received(&self) -> u64 {
        fs::metadata(&self.file).map_or(0, |file| file.len())
    }

    /// Whether curl has ended: the connection is broken.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits until `bytes` more have arrived.
    pub fn goes_on(&mut self, bytes: u64) -> Result<()> {
        let before = self.received();
        wait_until("the download to go on", PATIENT, || {
            if let Some(status) = self.child.try_wait()? {
                bail!("the download has ended: {status}");
            }
            Ok(self.received() >= before + bytes)
        })
        .with_context(|| format!("after {before} bytes"))?;
        Ok(())
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        let killed = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = killed {
            eprintln!("cannot end the download: {error}");
        }
    }
}
