//! The record of `cargo xtask test --repeat`: a line for each run, so that runs of one commit can go on another day.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::summary::Summary;
use crate::commit;

/// One run of the tests.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Run {
    /// The commit, with a plus sign if files were changed.
    pub(super) commit: String,
    /// The arguments that choose the tests, and whether there was load beside.
    pub(super) what: String,
    pub(super) seed: u64,
    pub(super) seconds: u64,
    pub(super) passed: usize,
    /// Each test that failed, with the cause.
    pub(super) failed: Vec<(String, String)>,
    /// Scenes that ran once more because the machine had stood still.
    pub(super) run_again: Vec<String>,
}

/// The file with the runs.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    commit: String,
    what: String,
}

impl Record {
    /// The runs of this checkout's commit with these arguments.
    pub(super) fn open(path: &Path, what: String) -> Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            commit: commit::hash()?,
            what,
        })
    }

    /// The runs so far.
    pub(super) fn runs(&self) -> Result<Vec<Run>> {
        let text = match fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error.into()),
        };
        let mut runs = Vec::new();
        for line in text.lines() {
            let run: Run = serde_json::from_str(line)
                .with_context(|| format!("{}: {line}", self.path.display()))?;
            if run.commit == self.commit && run.what == self.what {
                runs.push(run);
            }
        }
        Ok(runs)
    }

    /// Appends a run with this seed, which took so long.
    pub(super) fn append(&self, seed: u64, took: Duration, summary: &Summary) -> Result<()> {
        let failed = summary.failures().into_iter();
        let run = Run {
            commit: self.commit.clone(),
            what: self.what.clone(),
            seed,
            seconds: took.as_secs(),
            passed: summary.passed(),
            failed: failed
                .map(|(test, why)| (test.to_owned(), why.to_owned()))
                .collect(),
            run_again: summary.run_again().to_vec(),
        };
        let mut file = File::options().create(true).append(true).open(&self.path)?;
        writeln!(file, "{}", serde_json::to_string(&run)?)?;
        Ok(())
    }

    /// Prints the runs.
    pub(super) fn print(&self) -> Result<()> {
        let runs = self.runs()?;
        println!("\n{} runs of {}, {}:", runs.len(), self.commit, self.what);
        for run in &runs {
            println!(
                "  {} passed, {} failed, {} scenes run again; {} s; DNSFLOW_SEED={}",
                run.passed,
                run.failed.len(),
                run.run_again.len(),
                run.seconds,
                run.seed
            );
            for (test, cause) in &run.failed {
                println!("    {test}: {cause}");
            }
        }
        println!("  in {}", self.path.display());
        Ok(())
    }
}

/// Runs `work` with a busy thread for each processor beside it.
pub(super) fn beside_load<T>(work: impl FnOnce() -> T) -> Result<T> {
    let stop = AtomicBool::new(false);
    let processors = thread::available_parallelism()?.get();
    Ok(thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let _stop = Stop(&stop);
        work()
    }))
}

/// Says to stop, also where the work panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn runs_of_another_commit_or_with_other_arguments_do_not_count() {
        let path = std::env::temp_dir().join(format!("dnsflow-runs-{}", std::process::id()));
        let record = |commit: &str, what: &str| Record {
            path: path.clone(),
            commit: commit.to_owned(),
            what: what.to_owned(),
        };
        let runs = |record: &Record| record.runs().expect("they can be read").len();
        let this = record("aaa", "--ovn sid");
        assert_eq!(runs(&this), 0);
        for record in [
            &this,
            &record("bbb", "--ovn sid"),
            &record("aaa", "--vm 6.1"),
            &this,
        ] {
            let summary = Summary::new(BTreeMap::new(), false);
            let written = record.append(7, Duration::from_secs(400), &summary);
            written.expect("it is written");
        }
        assert_eq!(runs(&this), 2);
        fs::remove_file(path).expect("removed");
    }
}
