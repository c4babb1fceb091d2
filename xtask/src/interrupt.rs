//! Ctrl-C: noted here. The waiting code acts on it, so that labs are cleaned up before the end.

use std::{
    io::Read as _,
    os::unix::process::CommandExt,
    process::{Child, Command, ExitStatus},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process_group},
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static SIGNAL: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

const POLL: Duration = Duration::from_millis(20);
/// How long a child may take to end after the signal.
const GRACE: Duration = Duration::from_secs(10);

/// A signal asked for the end.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted {
    /// Its number.
    signal: usize,
}

impl Interrupted {
    /// The exit status that shells expect: 128 and the signal's number.
    pub(crate) fn exit_code(&self) -> u8 {
        128 + u8::try_from(self.signal).unwrap_or(2)
    }
}

/// Notes SIGINT, SIGTERM and SIGHUP from now on.
pub(crate) fn install() -> Result<()> {
    let flag = SIGNAL.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let number = usize::try_from(signal)?;
        signal_hook::flag::register_usize(signal, Arc::clone(flag), number)?;
    }
    Ok(())
}

/// An error if a signal has asked for the end.
pub(crate) fn check() -> Result<(), Interrupted> {
    match SIGNAL.get().map_or(0, |flag| flag.load(Ordering::Relaxed)) {
        0 => Ok(()),
        signal => Err(Interrupted { signal }),
    }
}

/// Starts `command` in a process group of its own, so that its children end with it.
pub(crate) fn spawn(command: &mut Command) -> Result<Child> {
    command
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))
}

/// Waits for a child of [`spawn`]; on a signal, ends it and its children first.
pub(crate) fn wait(child: Child) -> Result<ExitStatus> {
    wait_at_most(child, Duration::MAX)?.context("it did not end")
}

/// Runs `command`, whose standard output is a pipe, to its end; returns that output, too.
pub(crate) fn output(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut child = spawn(command)?;
    let mut stdout = child
        .stdout
        .take()
        .context("its standard output is no pipe")?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let status = wait(child)?;
    let text = reader
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    Ok((status, text))
}

/// Waits for a child of [`spawn`]; on a signal or after `limit`, ends it and its children. `None`
/// means that it took too long.
pub(crate) fn wait_at_most(mut child: Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            check()?;
            return Ok(Some(status));
        }
        if let Err(interrupted) = check() {
            end(child)?;
            return Err(interrupted.into());
        }
        if start.elapsed() > limit {
            end(child)?;
            return Ok(None);
        }
        sleep(POLL);
    }
}

/// Ends a child of [`spawn`] and its children.
fn end(mut child: Child) -> Result<()> {
    let group = Pid::from_child(&child);
    kill_process_group(group, Signal::INT)?;
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() > GRACE {
            kill_process_group(group, Signal::KILL)?;
            child.wait()?;
        }
        sleep(POLL);
    }
    kill_rest(group)
}

/// Kills the processes that a child of [`spawn`] has left in its process group.
pub(crate) fn kill_rest(group: Pid) -> Result<()> {
    match kill_process_group(group, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(error).context("cannot kill a process group"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn what_takes_too_long_ends_with_its_children() {
        // A shell's child in the background ignores SIGINT.
        let mut child = spawn(
            Command::new("sh")
                .args(["-c", "(sleep 20; echo survived) & echo started; wait"])
                .stdout(Stdio::piped()),
        )
        .expect("sh runs");
        let mut stdout = child.stdout.take().expect("a pipe");
        let mut line = [0; 8];
        stdout.read_exact(&mut line).expect("it has started");
        let ended = wait_at_most(child, Duration::ZERO).expect("it can be waited for");
        assert_eq!(ended, None);
        // The pipe's end, and not what the child in the background has to say.
        assert_eq!(stdout.read(&mut line).expect("the end"), 0);
    }

    #[test]
    fn what_ends_in_time_gives_its_status() {
        let child = spawn(Command::new("sh").args(["-c", "exit 3"])).expect("sh runs");
        let status = wait_at_most(child, GRACE).expect("it can be waited for");
        assert_eq!(status.and_then(|status| status.code()), Some(3));
    }
}
