//! The source of an image: version, commit and the commit's time.

use std::{env, path::Path, process::Command};

use anyhow::{Context, Result};
use dnsflow_tests::process::run;
use jiff::Timestamp;

/// Where the time of an image comes from, by the convention of reproducible-builds.org.
const TIME: &str = "SOURCE_DATE_EPOCH";
/// Names the commit where the sources lie without git's directory, as in a build container.
const COMMIT: &str = "DNSFLOW_COMMIT";

/// The sources of an image.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Source {
    /// The version of the workspace.
    pub(crate) version: String,
    /// The commit, with `-modified` behind it where files differ from it; `None` without git.
    pub(crate) commit: Option<String>,
    /// When the commit was made. The only time that an image knows.
    pub(crate) time: Timestamp,
}

impl Source {
    /// The source in this directory.
    pub(crate) fn of(workspace: &Path) -> Result<Self> {
        let commit = match env::var(COMMIT) {
            Ok(commit) if !commit.is_empty() => Some(commit),
            _ => commit(workspace),
        };
        let time = match env::var(TIME) {
            Ok(seconds) => Some(seconds),
            Err(_) => git(workspace, &["log", "-1", "--format=%ct"]),
        };
        let time = time.filter(|seconds| !seconds.is_empty());
        let seconds: i64 = match time {
            Some(seconds) => seconds
                .parse()
                .with_context(|| format!("{TIME}={seconds}: not a number of seconds"))?,
            None => 0,
        };
        Ok(Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit,
            time: Timestamp::from_second(seconds)?,
        })
    }

    /// The variables by which another build, without git, learns the same.
    pub(super) fn variables(&self) -> [(&'static str, String); 2] {
        [
            (COMMIT, self.commit.clone().unwrap_or_default()),
            (TIME, self.seconds().to_string()),
        ]
    }

    /// Seconds since 1970, for the times of files.
    pub(crate) fn seconds(&self) -> u64 {
        u64::try_from(self.time.as_second()).unwrap_or(0)
    }
}

fn commit(workspace: &Path) -> Option<String> {
    let commit = git(workspace, &["rev-parse", "HEAD"]).filter(|commit| !commit.is_empty())?;
    // A new file that is not committed may be part of the program as well.
    match git(workspace, &["status", "--porcelain"]).as_deref() {
        Some("") => Some(commit),
        _ => Some(format!("{commit}-modified")),
    }
}

fn git(workspace: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    command.args(arguments).current_dir(workspace);
    run(&mut command).ok().map(|text| text.trim().to_owned())
}
