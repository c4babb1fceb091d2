//! What a process has used, as the kernel accounts for it.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use rustix::process::Pid;

fn directory(pid: Pid) -> PathBuf {
    format!("/proc/{}", pid.as_raw_nonzero()).into()
}

/// Processor time of all threads, user and system, to the nanosecond (`schedstat`, in Linux
/// Documentation/scheduler/sched-stats.rst).
pub(crate) fn cpu(pid: Pid) -> Result<Duration> {
    let mut nanos = 0;
    for thread in fs::read_dir(directory(pid).join("task"))? {
        let text = fs::read_to_string(thread?.path().join("schedstat"))?;
        let first = text.split(' ').next().and_then(|word| word.parse().ok());
        nanos += first.unwrap_or(0u64);
    }
    Ok(Duration::from_nanos(nanos))
}

/// Memory in use, in MiB (`VmRSS`, proc_pid_status(5)).
pub(crate) fn resident_mib(pid: Pid) -> Result<f64> {
    let text = fs::read_to_string(directory(pid).join("status"))?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.trim().parse::<f64>().ok());
    Ok(kib.context("a process without VmRSS")? / 1024.0)
}

/// What the BPF programs of a process have done since they were counted (`fdinfo`).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Programs {
    /// Runs.
    pub(crate) runs: u64,
    /// Their time, in nanoseconds.
    pub(crate) nanos: u64,
}

/// Reads the descriptors of a process for what its BPF programs have done: `run_cnt` and
/// `run_time_ns` (`bpf_prog_show_fdinfo` in Linux kernel/bpf/syscall.c). A program that is held by
/// more than one descriptor counts once.
pub(crate) fn programs(pid: Pid) -> Result<Programs> {
    let mut seen = Vec::new();
    let mut sum = Programs::default();
    for entry in fs::read_dir(directory(pid).join("fdinfo"))? {
        // A descriptor may have been closed by now.
        let Ok(text) = fs::read_to_string(entry?.path()) else {
            continue;
        };
        let value = |key: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok())
        };
        let (Some(runs), Some(nanos)) = (value("run_cnt:"), value("run_time_ns:")) else {
            continue;
        };
        let id = value("prog_id:");
        if !seen.contains(&id) {
            seen.push(id);
            sum.runs += runs;
            sum.nanos += nanos;
        }
    }
    Ok(sum)
}
