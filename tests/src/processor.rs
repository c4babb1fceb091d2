//! The processor time of a process, and the time for which it waited for a processor.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use rustix::process::Pid;

/// The times of all threads of a process (`schedstat` in Linux Documentation/scheduler/sched-stats.rst).
#[derive(Clone, Copy, Debug)]
pub struct Processor {
    /// On a processor.
    pub had: Duration,
    /// Ready to run, without a processor.
    pub waited: Duration,
}

impl Processor {
    /// Since the start of the process.
    pub fn of(pid: Pid) -> Result<Self> {
        let (mut had, mut waited) = (0, 0);
        for thread in fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()))? {
            // A thread may have ended by now.
            let Ok(times) = fs::read_to_string(thread?.path().join("schedstat")) else {
                continue;
            };
            let times: Vec<u64> = times
                .split(' ')
                .filter_map(|time| time.parse().ok())
                .collect();
            had += times.first().context("the time on a processor")?;
            waited += times.get(1).context("the time before it")?;
        }
        Ok(Self {
            had: Duration::from_nanos(had),
            waited: Duration::from_nanos(waited),
        })
    }

    /// Since this earlier reading.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            had: self.had.saturating_sub(earlier.had),
            waited: self.waited.saturating_sub(earlier.waited),
        }
    }
}
