//! The tables and pictures of docs/internals/performance.md. Each table is between two marks that name it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::support::workspace;

use super::build;
use crate::{commit, vm::Kernel};

/// The target that measures how the engine grows, and the name of its table.
const GROWTH: &str = "growth";

/// The tables of docs/internals/performance.md, for one run of one commit.
pub(super) struct Document {
    commit: String,
    day: String,
    vm: Option<Kernel>,
}

impl Document {
    /// Fails if files of the checkout were changed: then nobody could measure the same again.
    pub(super) fn of(vm: Option<Kernel>) -> Result<Self> {
        let commit = commit::hash()?;
        ensure!(
            !commit.ends_with('+'),
            "files differ from {commit}: commit them first, as --docs writes the commit beside its figures"
        );
        let day = commit::day()?;
        Ok(Self { commit, day, vm })
    }

    fn path(name: &str) -> Result<PathBuf> {
        Ok(workspace()?.join("docs/internals").join(name))
    }

    fn table_file() -> Result<PathBuf> {
        Ok(workspace()?.join("target/bench.md"))
    }

    /// Where the benchmark writes.
    pub(super) fn files(&self) -> Result<[(&'static str, Option<PathBuf>); 3]> {
        // The picture is of the machine that the first table is of.
        let svg = match self.vm {
            Some(_) => None,
            None => Some(Self::path("performance.svg")?),
        };
        let json = Some(workspace()?.join("target/bench.json"));
        let markdown = Some(Self::table_file()?);
        Ok([("--json", json), ("--svg", svg), ("--markdown", markdown)])
    }

    /// Writes the table of the benchmark, which took so long, and that of the growth of the engine.
    pub(super) fn write(self, took: Duration, say: &dyn Fn(&str)) -> Result<()> {
        let minutes = took.as_secs().div_ceil(60);
        let table = fs::read_to_string(Self::table_file()?)?;
        let Self { commit, day, vm } = self;
        let table = format!("Commit {commit} of {day}, one run of {minutes} minutes.\n{table}");
        let name = if vm.is_some() {
            "kernel-datapath"
        } else {
            "bench"
        };
        replace(&Self::path("performance.md")?, name, &table)?;
        if vm.is_some() {
            return Ok(());
        }
        say("the growth of the engine");
        let mut growth = Command::new(build(GROWTH)?);
        growth.arg("--svg").arg(Self::path("growth.svg")?);
        let output = growth.stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "{GROWTH} failed");
        let table = String::from_utf8(output.stdout)?;
        let table = format!("Commit {commit} of {day}.\n\n{table}");
        replace(&Self::path("performance.md")?, GROWTH, &table)
    }
}

/// Replaces the table with this name.
fn replace(document: &Path, name: &str, table: &str) -> Result<()> {
    let text = fs::read_to_string(document)
        .with_context(|| format!("cannot read {}", document.display()))?;
    let text = replaced(&text, name, table)
        .with_context(|| format!("{} has no table {name}", document.display()))?;
    fs::write(document, text).with_context(|| format!("cannot write {}", document.display()))
}

fn replaced(text: &str, name: &str, table: &str) -> Option<String> {
    let (begin, end) = (
        format!("<!-- table {name} -->\n"),
        format!("<!-- end of table {name} -->"),
    );
    let (before, rest) = text.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}{}\n{end}{after}", table.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::replaced;

    #[test]
    fn only_the_named_table_changes() {
        let text = "a\n<!-- table x -->\nold\n<!-- end of table x -->\nb\n<!-- table y -->\n<!-- end of table y -->\n";
        let expected = "a\n<!-- table x -->\n| new |\n<!-- end of table x -->\nb\n<!-- table y -->\n<!-- end of table y -->\n";
        assert_eq!(
            replaced(text, "x", "| new |\n\n").as_deref(),
            Some(expected)
        );
        assert_eq!(replaced(text, "z", "| new |"), None);
    }
}
