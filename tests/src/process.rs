//! Running commands to their end, and keeping track of daemons by their pid files.
//!
//! Never signals a process that is not the lab's: it runs in one of the lab's namespaces, or it
//! names the lab's directory on its command line (a pid file may be older than the process that
//! now has its number).

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, setsid, waitpid};

use crate::netns::NetNs;

/// How often a condition is looked at again.
const POLL: Duration = Duration::from_millis(2);

/// Runs a command to its end and returns its standard output; its standard error is in the
/// error when it fails.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed ({}): {}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr),
        String::from_utf8_lossy(&output.stdout),
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Waits until `condition` holds; `what` names it in the error.
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<Duration> {
    let start = Instant::now();
    loop {
        // The last look begins after the limit: an earlier one may end long after its beginning, on a machine that stands
        // still.
        let looked_at = start.elapsed();
        if condition()? {
            return Ok(start.elapsed());
        }
        if looked_at > limit {
            bail!("after {limit:?} still waiting for: {what}");
        }
        sleep(POLL);
    }
}

/// Starts a process that outlives this one, writes its pid file and returns its pid.
pub(crate) fn spawn_detached(command: &mut Command, log: &Path, pidfile: &Path) -> Result<Pid> {
    let output = File::options().create(true).append(true).open(log)?;
    // SAFETY: one system call; no allocation, no lock.
    unsafe {
        command.pre_exec(|| {
            setsid()?;
            Ok(())
        });
    }
    let child = command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    fs::write(pidfile, child.id().to_string())?;
    Ok(Pid::from_child(&child))
}

/// The process that `pidfile` names, if it runs and has `marker` on its command line.
pub(crate) fn running(pidfile: &Path, marker: &Path) -> Option<Pid> {
    let pid: i32 = fs::read_to_string(pidfile).ok()?.trim().parse().ok()?;
    let pid = Pid::from_raw(pid)?;
    is_alive(pid, marker).then_some(pid)
}

fn is_alive(pid: Pid, marker: &Path) -> bool {
    // Reaps it if it is a child that has ended; any other process is left alone.
    let _not_a_child = waitpid(Some(pid), WaitOptions::NOHANG);
    // Empty for a process that has ended and was not reaped.
    fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()))
        .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&*marker.to_string_lossy()))
}

/// Whether there is no such process any more. Unlike [`is_alive`], it may be asked while a program is
/// only just being executed, when a process has no command line yet (`begin_new_exec` in Linux
/// `fs/exec.c`).
fn has_ended(pid: Pid) -> bool {
    let _not_a_child = waitpid(Some(pid), WaitOptions::NOHANG);
    // The state stands behind the name, which is in parentheses (proc_pid_stat(5)).
    fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).map_or(true, |stat| {
        stat.rsplit_once(") ")
            .is_none_or(|(_, rest)| rest.starts_with('Z'))
    })
}

/// Ends the process in `pidfile`, if its command line has `marker`, and waits for the end. Kills a
/// process that ignores `signal`.
pub(crate) fn stop(pidfile: &Path, marker: &Path, signal: Signal) -> Result<()> {
    let Some(pid) = running(pidfile, marker) else {
        return Ok(());
    };
    let gone = || Ok(!is_alive(pid, marker));
    kill_process(pid, signal)?;
    if wait_until("the process to end", Duration::from_secs(5), gone).is_err() {
        kill_process(pid, Signal::KILL)?;
        wait_until("the killed process to end", Duration::from_secs(5), gone)?;
    }
    match fs::remove_file(pidfile) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Kills every process in these namespaces, and waits for their end.
pub(crate) fn kill_all(namespaces: &[NetNs]) -> Result<()> {
    let limit = Duration::from_secs(5);
    wait_until("the processes of the lab to end", limit, || {
        let mut none_left = true;
        for namespace in namespaces {
            for pid in namespace.processes()? {
                none_left = false;
                // The process may have ended in between. If it is a child, it is reaped.
                let _ended = kill_process(pid, Signal::KILL);
                let _not_a_child = waitpid(Some(pid), WaitOptions::NOHANG);
            }
        }
        Ok(none_left)
    })?;
    Ok(())
}

/// Waits until the process `pid` has a socket on this local port: `table` is `udp` or `tcp`, as
/// in `/proc/PID/net`.
pub(crate) fn wait_listening(pid: Pid, table: &str, port: u16) -> Result<()> {
    let file = format!("/proc/{}/net/{table}", pid.as_raw_nonzero());
    let local = format!(":{port:04X}");
    wait_until(
        &format!("a {table} socket on port {port}"),
        Duration::from_secs(10),
        || {
            ensure!(!has_ended(pid), "it ended before it listened");
            Ok(fs::read_to_string(&file)?
                .lines()
                .filter_map(|line| line.split_whitespace().nth(1))
                .any(|address| address.ends_with(&local)))
        },
    )?;
    Ok(())
}
