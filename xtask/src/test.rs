//! `cargo xtask test`: every test, with the lab tests on each OVN generation.

mod in_vm;

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum as _};
use dnsflow_tests::support::{
    LEFT_TO_LONGER, LEFT_TO_OTHERS, LEFT_TO_VM, NOT_RUN_VARIABLE, ROOT_VARIABLE, root_directory,
};

use crate::{
    interrupt, kind, labs,
    prepare::{self, Ovn, cargo},
    vm::{Kernel, Verdict},
};

/// Runs every test.
#[derive(Debug, Args)]
pub(crate) struct TestCommand {
    /// Whose OVN the lab tests run on; may be given more than once [default: all of them; with
    /// --vm bookworm]
    #[arg(long, value_enum)]
    ovn: Vec<Ovn>,
    /// Run the lab tests in a virtual machine with this kernel of Debian's and its openvswitch module
    #[arg(long, value_enum, value_name = "KERNEL")]
    vm: Option<Kernel>,
    /// With --vm: the BPF tests, the main job and the restarts, in a few minutes
    #[arg(long, requires = "vm")]
    short: bool,
    /// With --vm: how the agents open addresses, as their option of the same name
    #[arg(long, value_enum, requires = "vm")]
    verdict: Option<Verdict>,
    /// With --vm: only this program of tests (a file or directory of tests/tests); may be given more than once
    #[arg(long, value_name = "NAME", requires = "vm", conflicts_with = "short")]
    program: Vec<String>,
    /// Fail when a test could not run, too, unless it is left to another machine
    #[arg(long)]
    all_must_run: bool,
    /// Run only tests whose name contains one of these
    filters: Vec<String>,
}

/// The results of the test programs.
#[derive(Debug, Default)]
struct Tally {
    passed: usize,
    failed: usize,
    /// `not run: TEST: WHY`, and what no test program stands for.
    not_run: Vec<String>,
    /// Runs of cargo that failed, by what they were to test.
    broken: Vec<String>,
}

/// Runs the tests and prints the summary.
pub(crate) fn run(command: TestCommand) -> Result<()> {
    let TestCommand {
        ovn,
        vm,
        short,
        verdict,
        program,
        all_must_run,
        filters,
    } = command;
    let ovn = match (ovn.is_empty(), vm) {
        (false, _) => ovn,
        (true, None) => Ovn::value_variants().to_vec(),
        (true, Some(_)) => vec![Ovn::Bookworm],
    };
    let say = |text: &str| eprintln!("{text}");
    for generation in &ovn {
        prepare::ovn(*generation, &say)?;
    }
    prepare::skopeo(&say)?;
    prepare::build(&say)?;
    let mut tally = Tally::default();
    match vm {
        Some(kernel) => {
            let which = in_vm::Which {
                ovn: &ovn,
                short,
                verdict,
                only: &program,
                filters: &filters,
            };
            in_vm::run(kernel, &which, &mut tally)?;
        }
        None => {
            here(&ovn, &filters, &mut tally)?;
            let why = kind::why_not_run();
            let line = format!("not run: `cargo xtask kind`: {why}; {LEFT_TO_OTHERS}");
            tally.not_run.push(line);
        }
    }
    tally.print();
    if !tally.broken.is_empty() {
        bail!("failed: {}", tally.broken.join(", "));
    }
    let is_left = |line: &String| {
        [LEFT_TO_VM, LEFT_TO_OTHERS, LEFT_TO_LONGER]
            .iter()
            .any(|left| line.contains(left))
    };
    if all_must_run && !tally.not_run.iter().all(is_left) {
        bail!("not every test could run");
    }
    Ok(())
}

/// Runs the tests with this machine's kernel.
fn here(ovn: &[Ovn], filters: &[String], tally: &mut Tally) -> Result<()> {
    labs::sweep()?;
    eprintln!("\n== unit tests");
    let mut units = cargo();
    units.args(["test", "--workspace", "--exclude", "dnsflow-tests"]);
    let result = tally.run(units, "the unit tests", filters).and_then(|()| {
        for generation in ovn {
            let suite = generation.suite();
            eprintln!("\n== lab tests with OVN of Debian's {suite}");
            let mut labs = cargo();
            labs.args(["test", "--package", "dnsflow-tests"])
                .env(ROOT_VARIABLE, root_directory(suite)?);
            tally.run(labs, &format!("the lab tests on {suite}"), filters)?;
        }
        Ok(())
    });
    labs::sweep()?;
    result
}

impl Tally {
    /// Runs `cargo test`, passing its output on.
    fn run(&mut self, mut command: Command, what: &str, filters: &[String]) -> Result<()> {
        let file = not_run_file()?;
        command
            .arg("--no-fail-fast")
            .arg("--")
            .args(filters)
            .env(NOT_RUN_VARIABLE, &file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = interrupt::spawn(&mut command)?;
        let stdout = child.stdout.take().context("cargo's standard output")?;
        let reader = std::thread::spawn(move || {
            let (mut passed, mut failed) = (0, 0);
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                println!("{line}");
                if let Some(counts) = counts(&line) {
                    passed += counts.0;
                    failed += counts.1;
                }
            }
            (passed, failed)
        });
        let status = interrupt::wait(child)?;
        let (passed, failed) = reader.join().unwrap_or_default();
        self.passed += passed;
        self.failed += failed;
        if !status.success() {
            self.broken.push(what.to_owned());
        }
        self.read_not_run(&file, what)
    }

    /// Adds the tests in this file, which could not run.
    fn read_not_run(&mut self, file: &Path, what: &str) -> Result<()> {
        match fs::read_to_string(file) {
            Ok(text) => {
                let lines = text.lines().map(|line| format!("{line} ({what})"));
                let before = self.not_run.len();
                self.not_run.extend(lines);
                // They end without a failure.
                let added = self.not_run.len() - before;
                self.passed = self.passed.saturating_sub(added);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn print(&self) {
        println!(
            "\n{} passed, {} failed, {} not run",
            self.passed,
            self.failed,
            self.not_run.len()
        );
        for line in &self.not_run {
            println!("  {line}");
        }
    }
}

/// A file that does not exist yet, for tests that cannot run.
fn not_run_file() -> Result<PathBuf> {
    let file = root_directory("")?.with_file_name("not-run.txt");
    match fs::remove_file(&file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(file),
    }
}

/// Passed and failed of libtest's line `test result: ok. 5 passed; 0 failed; 0 ignored; …`.
fn counts(line: &str) -> Option<(usize, usize)> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut counts = counts.split("; ").map(|part| part.split_once(' '));
    let passed = counts.next()??.0.parse().ok()?;
    let failed = counts.next()??.0.parse().ok()?;
    Some((passed, failed))
}

#[cfg(test)]
mod tests {
    use super::counts;

    #[test]
    fn counts_are_read_from_the_lines_of_libtest() {
        let passed = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.00s";
        assert_eq!(counts(passed), Some((12, 0)));
        let failed = "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 5.24s";
        assert_eq!(counts(failed), Some((3, 2)));
        assert_eq!(counts("test core::name ... ok"), None);
        assert_eq!(counts("running 3 tests"), None);
    }
}
