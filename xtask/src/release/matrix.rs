//! The versions that the project says it supports are those that CI runs.
//!
//! `docs/support.md` has a table of OVN with Open vSwitch, and one of kernels. The last column says how much of the
//! tests `.ci/run` runs with a version.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use clap::{Parser as _, ValueEnum as _};

use crate::{Command, Xtask, prepare::Ovn, test::TestCommand, vm::Kernel};

/// How much of the tests runs in CI, as the tables say it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Extent {
    No,
    Selection,
    All,
}

impl Extent {
    fn word(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Selection => "selection",
            Self::All => "all",
        }
    }
}

/// The rows of both tables, without their middle columns: the versions, and the extent.
type Rows = BTreeMap<Vec<String>, String>;

/// What is wrong with the tables of this checkout.
pub(super) fn faults(workspace: &Path) -> Result<Vec<String>> {
    let read = |name: &str| {
        fs::read_to_string(workspace.join(name)).with_context(|| format!("cannot read {name}"))
    };
    differences(&read("docs/support.md")?, &read(".ci/run")?)
}

/// The differences between the tables of a document and the commands of a CI script.
fn differences(document: &str, script: &str) -> Result<Vec<String>> {
    let said = said(document);
    let run = run_by(script)?;
    let mut faults = Vec::new();
    for (versions, extent) in &run {
        let found = said.get(versions);
        let versions = versions.join(" | ");
        match found {
            Some(said) if said == extent => {}
            Some(said) => faults.push(format!(
                "docs/support.md says `{said}` of {versions}, and .ci/run runs `{extent}`"
            )),
            None => faults.push(format!(
                "docs/support.md has no row for {versions}, of which .ci/run runs `{extent}`"
            )),
        }
    }
    let unknown = said.keys().filter(|versions| !run.contains_key(*versions));
    faults.extend(unknown.map(|versions| {
        let versions = versions.join(" | ");
        format!("docs/support.md has a row for {versions}, which no test knows")
    }));
    Ok(faults)
}

/// The tables whose last column is `CI`.
fn said(document: &str) -> Rows {
    let mut rows = Rows::new();
    let mut versions = None;
    // The line below a head has no cells.
    let lines = document.lines().filter(|line| !line.starts_with("|--"));
    for line in lines {
        let Some(cells) = line
            .strip_prefix("| ")
            .and_then(|line| line.strip_suffix(" |"))
        else {
            versions = None;
            continue;
        };
        let cells: Vec<&str> = cells.split(" | ").map(str::trim).collect();
        match (versions, cells.split_last()) {
            (_, Some((&"CI", [first, ..]))) => versions = Some(if *first == "OVN" { 2 } else { 1 }),
            (Some(columns), Some((extent, others))) => {
                let versions = others.iter().take(columns);
                let versions = versions.map(|&cell| cell.to_owned()).collect();
                rows.insert(versions, (*extent).to_owned());
            }
            _ => {}
        }
    }
    rows
}

/// Each version that tests know, with the extent to which the script runs them.
fn run_by(script: &str) -> Result<Rows> {
    let mut of_ovn: BTreeMap<&str, Extent> = BTreeMap::new();
    let mut of_kernels: BTreeMap<&str, Extent> = BTreeMap::new();
    for command in commands(script)? {
        let extent = match command.is_whole() {
            true => Extent::All,
            false => Extent::Selection,
        };
        let note = |of: &mut BTreeMap<_, _>, name| {
            let known = of.entry(name).or_insert(extent);
            *known = extent.max(*known);
        };
        match command.kernel() {
            Some(kernel) => note(&mut of_kernels, kernel.name()),
            None => {
                for ovn in command.generations() {
                    note(&mut of_ovn, ovn.suite());
                }
            }
        }
    }
    let extent = |of: &BTreeMap<&str, Extent>, name| {
        let known = of.get(name).copied();
        known.unwrap_or(Extent::No).word().to_owned()
    };
    let mut rows = Rows::new();
    for ovn in Ovn::value_variants() {
        let versions = ovn.versions().map(str::to_owned).to_vec();
        rows.insert(versions, extent(&of_ovn, ovn.suite()));
    }
    for kernel in Kernel::value_variants() {
        let name = kernel.name();
        rows.insert(vec![name.to_owned()], extent(&of_kernels, name));
    }
    Ok(rows)
}

/// The script's commands that run tests.
fn commands(script: &str) -> Result<Vec<TestCommand>> {
    let mut commands = Vec::new();
    for line in script.replace("\\\n", " ").lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let arguments = match &words[..] {
            ["cargo", "xtask", "test", rest @ ..] | ["xtask/run", "test", rest @ ..] => rest,
            _ => continue,
        };
        let words = ["xtask", "test"].iter().chain(arguments);
        let parsed = Xtask::try_parse_from(words).with_context(|| line.to_owned())?;
        if let Command::Test(command) = parsed.command {
            commands.push(command);
        }
    }
    Ok(commands)
}

#[cfg(test)]
mod tests {
    use dnsflow_tests::support::workspace;

    use super::*;

    #[test]
    fn the_support_matrix_is_what_ci_runs() {
        let workspace = workspace().expect("a workspace");
        assert_eq!(faults(&workspace).expect("both files"), [""; 0]);
    }

    #[test]
    fn a_difference_is_named() {
        let script = "xtask/run test --all-must-run\ncargo xtask test \\\n    --ovn trixie hold\n\
                      cargo xtask test --vm 6.1\n";
        let document = "| OVN | Open vSwitch | of | CI |\n|---|---|---|---|\n\
                        | 23.03 | 3.1 | Debian 12 | no |\n| 25.03 | 3.5 | Debian 13 | selection |\n\
                        | 26.03 | 4.0 | Debian sid | all |\n\n\
                        | Linux | of | CI |\n|---|---|---|\n| 5.10 | Debian 11 | no |\n\
                        | 6.1 | Debian 12 | all |\n| 6.12 | Debian 13 | no |\n";
        assert_eq!(differences(document, script).expect("both"), [""; 0]);
        for (from, to, expected) in [
            (
                "| 6.12 | Debian 13 | no |",
                "| 6.12 | Debian 13 | all |",
                "says `all` of 6.12",
            ),
            ("| 5.10 | Debian 11 | no |\n", "", "has no row for 5.10"),
            (
                "| 6.12 |",
                "| 6.13 |",
                "has a row for 6.13, which no test knows",
            ),
            ("| 3.5 |", "| 3.6 |", "has no row for 25.03 | 3.5"),
            (
                "| 26.03 | 4.0 | Debian sid | all",
                "| 26.03 | 4.0 | Debian sid | no",
                "runs `all`",
            ),
        ] {
            let changed = document.replace(from, to);
            let faults = differences(&changed, script).expect("both").join("\n");
            assert!(faults.contains(expected), "{expected}: {faults}");
        }
    }
}
