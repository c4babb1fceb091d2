//! The commit of this checkout, as git says.

use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Its hash, with a plus sign if files were changed.
pub(crate) fn hash() -> Result<String> {
    let hash = git(&["rev-parse", "--short=12", "HEAD"])?;
    let is_changed = !git(&["status", "--porcelain"])?.is_empty();
    Ok(hash + if is_changed { "+" } else { "" })
}

/// Its day, as `25 November 2026`.
pub(crate) fn day() -> Result<String> {
    git(&[
        "show",
        "--no-patch",
        "--date=format:%-d %B %Y",
        "--format=%cd",
        "HEAD",
    ])
}

/// The output of one command of git.
pub(crate) fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").args(arguments).output();
    let output = output.context("cannot ask git for the commit")?;
    ensure!(
        output.status.success(),
        "git {} failed",
        arguments.join(" ")
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
