//! Running commands to their end, and keeping track of daemons by their pid files.
//!
//! Never signals a process that is not the lab's: it runs in one of the lab's namespaces, or it
//! names the lab's directory on its command line (a pid file may be older than the process that
//! now has its number).

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, setsid, waitpid};

use crate::netns::NetNs;

/// How long a test waits for what must come in the end. A wait ends when it comes, so a long limit costs nothing while
/// all is well. Beside six labs and as many busy processes, or with emulated processors, a start of the agent or of Open
/// vSwitch takes some ten times as long as alone, which is under a minute; this is twice that.
pub const PATIENT: Duration = Duration::from_secs(120);

/// How long one try may take where a test tries again and again until [`PATIENT`] is over: longer than the second and the
/// two more after which a lost SYN is sent again (RFC 6298, section 2.1).
pub const ONE_TRY: Duration = Duration::from_secs(5);

/// How long a process may take to end before it is killed, which no test minds.
const ENDS_BY_ITSELF: Duration = Duration::from_secs(20);

/// The first pause before a condition is looked at again.
const POLL: Duration = Duration::from_millis(2);
/// The longest pause, unless a look itself takes longer.
const POLL_MAX: Duration = Duration::from_millis(50);

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

/// Waits until `condition` holds; `what` names it in the error. A look that starts a process costs what others wait for,
/// so a pause is as long as the look before it, and grows with the time that was waited.
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
        sleep(pause(start.elapsed(), start.elapsed() - looked_at));
    }
}

/// The pause after a look that took so long, when so much time was waited.
fn pause(waited: Duration, look: Duration) -> Duration {
    look.max((waited / 20).clamp(POLL, POLL_MAX))
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

/// Whether there is no such process any more, and none of its files is open. [`is_alive`] tells less: a process has no
/// command line while a program is only just being executed (`begin_new_exec` in Linux `fs/exec.c`), and while it ends
/// and its files are still open (`do_exit` in Linux `kernel/exit.c`).
fn has_ended(pid: Pid) -> bool {
    let _not_a_child = waitpid(Some(pid), WaitOptions::NOHANG);
    let process = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    // The state stands behind the name, which is in parentheses (proc_pid_stat(5)).
    let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
    let has_state = |(_, rest): (&str, &str)| !rest.starts_with('Z');
    let runs = stat.rsplit_once(") ").is_some_and(has_state);
    // The first thread may end before the others.
    let threads = || fs::read_dir(process.join("task")).map_or(0, Iterator::count);
    !runs && threads() <= 1
}

/// Ends the process in `pidfile`, if its command line has `marker`, and waits for the end. Kills a
/// process that ignores `signal`.
pub(crate) fn stop(pidfile: &Path, marker: &Path, signal: Signal) -> Result<()> {
    let Some(pid) = running(pidfile, marker) else {
        return Ok(());
    };
    let gone = || Ok(has_ended(pid));
    kill_process(pid, signal)?;
    if wait_until("the process to end", ENDS_BY_ITSELF, gone).is_err() {
        kill_process(pid, Signal::KILL)?;
        wait_until("the killed process to end", PATIENT, gone)?;
    }
    match fs::remove_file(pidfile) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Kills every process in these namespaces, and waits for their end.
pub(crate) fn kill_all(namespaces: &[NetNs]) -> Result<()> {
    wait_until("the processes of the lab to end", PATIENT, || {
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
    wait_until(&format!("a {table} socket on port {port}"), PATIENT, || {
        ensure!(!has_ended(pid), "it ended before it listened");
        Ok(fs::read_to_string(&file)?
            .lines()
            .filter_map(|line| line.split_whitespace().nth(1))
            .any(|address| address.ends_with(&local)))
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_grows_with_the_wait_and_with_the_look() {
        let ms = Duration::from_millis;
        let cases = [
            (ms(0), ms(0), POLL),
            (ms(200), ms(1), ms(10)),
            (ms(60_000), ms(1), POLL_MAX),
            (ms(200), ms(80), ms(80)),
        ];
        for (waited, look, expected) in cases {
            assert_eq!(pause(waited, look), expected, "{waited:?} {look:?}");
        }
    }
}
