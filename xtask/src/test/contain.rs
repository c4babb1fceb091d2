//! `cargo xtask contain`: runs a program to its end, then ends what it has left running, and writes down how much
//! processor time all of them took. Daemons of a lab leave the process group of their test and change their parent; the
//! kernel makes them children of this process (`PR_SET_CHILD_SUBREAPER`, prctl(2)).

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;
use rustix::{
    io::Errno,
    param::clock_ticks_per_second,
    process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid},
};

/// Runs a program, and ends what it leaves behind.
#[derive(Debug, Args)]
pub(crate) struct ContainCommand {
    /// The file for the processor time, in milliseconds
    #[arg(long)]
    usage: PathBuf,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Returns the exit code of the program; 128 and the number of the signal that has ended it, as shells do.
pub(crate) fn run(command: &ContainCommand) -> Result<u8> {
    let ContainCommand { usage, command } = command;
    set_child_subreaper(Some(getpid()))?;
    let (program, arguments) = command.split_first().context("no program")?;
    let child = Command::new(program)
        .args(arguments)
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let child = Pid::from_child(&child);
    let status = wait_for(child)?;
    end_children()?;
    fs::write(usage, used()?.as_millis().to_string())?;
    let code = status.code().or_else(|| Some(128 + status.signal()?));
    Ok(u8::try_from(code.unwrap_or(1)).unwrap_or(1))
}

/// Waits for this child, and reaps every other one meanwhile.
fn wait_for(child: Pid) -> Result<ExitStatus> {
    loop {
        match waitpid(None, WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == child => {
                return Ok(ExitStatus::from_raw(status.as_raw()));
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the program"),
        }
    }
}

/// Kills all children, and theirs, which become children of this process then.
fn end_children() -> Result<()> {
    loop {
        for pid in children()? {
            // It may have ended in between.
            let _ended = kill_process(pid, Signal::KILL);
        }
        match waitpid(None, WaitOptions::empty()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::CHILD) => return Ok(()),
            Err(error) => return Err(error).context("cannot wait for what the program left"),
        }
    }
}

/// The fields of proc_pid_stat(5) behind the name of the program: `fields[0]` is the third, the state.
fn fields(stat: &str) -> Vec<&str> {
    let (_, fields) = stat.rsplit_once(") ").unwrap_or_default();
    fields.split(' ').collect()
}

fn children() -> Result<Vec<Pid>> {
    let own = getpid().as_raw_nonzero().to_string();
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let pid = path
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else {
            continue;
        };
        // One that has ended by now has no file.
        let stat = fs::read_to_string(path.join("stat")).unwrap_or_default();
        if fields(&stat).get(1) == Some(&own.as_str()) {
            children.push(pid);
        }
    }
    Ok(children)
}

/// The processor time of all that were waited for: `cutime` and `cstime` of proc_pid_stat(5).
fn used() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let fields = fields(&stat);
    let ticks = |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<u64>().ok());
    let ticks = ticks(13).zip(ticks(14)).map(|(user, system)| user + system);
    let ticks = ticks.context("/proc/self/stat has no times")?;
    Ok(Duration::from_millis(
        ticks * 1000 / clock_ticks_per_second(),
    ))
}

#[cfg(test)]
mod tests {
    use super::fields;

    #[test]
    fn a_name_with_a_parenthesis_is_one_field() {
        let stat = "7 (a) b) S 5 7 7 0";
        assert_eq!(fields(stat)[..2], ["S", "5"]);
    }
}
