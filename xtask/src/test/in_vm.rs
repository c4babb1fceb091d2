//! The lab tests in a virtual machine: built here, run there, on the kernel's datapath.

use std::{
    env,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{
    random::SEED_VARIABLE,
    support::{DATAPATH_VARIABLE, NOT_RUN_VARIABLE, ROOT_VARIABLE, root_directory, workspace},
};
use serde_json::Value;

use super::{Tally, counts};
use crate::{
    interrupt,
    prepare::{Ovn, cargo},
    vm::{Job, Kernel, Machine, Verdict},
};

/// A whole program of tests takes up to five minutes under emulation.
const LIMIT: Duration = Duration::from_secs(1200);

/// What `--short` runs: test programs, and the names of their tests, all if there are none.
const SHORT: [(&str, &[&str]); 7] = [
    ("bpf", &[]),
    ("handover", &[]),
    ("hold", &[]),
    (
        "story",
        &["a_pod_reaches_what_its_firewall_names_and_nothing_more"],
    ),
    ("restarts", &[]),
    ("rights", &[]),
    ("ways", &[]),
];

/// Programs whose tests neither kernel nor datapath make a difference to: they run outside. Those of
/// OpenFlow and OVSDB are about what goes over a socket.
const OUTSIDE: [&str; 10] = [
    "apiserver",
    "bench",
    "deploy",
    "large",
    "manifests",
    "openflow",
    "ovsdb",
    "recordings",
    "scale",
    "tidy",
];

/// The environment variables by which single tests take other numbers than usual.
const NUMBERS: [&str; 3] = [
    "DNSFLOW_FIRST_PACKETS",
    "DNSFLOW_HOSTILE_SECONDS",
    SEED_VARIABLE,
];

/// The tests of faults run one at a time, since each of them fills an emulated machine, and print what they cost.
const FAULTS: (&str, [&str; 2]) = ("faults", ["--test-threads=1", "--show-output"]);

/// Which tests run, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Which<'a> {
    pub(super) ovn: &'a [Ovn],
    pub(super) short: bool,
    pub(super) verdict: Option<Verdict>,
    /// The programs of tests; all if there are none.
    pub(super) only: &'a [String],
    pub(super) filters: &'a [String],
}

/// Runs the tests and adds to the tally.
pub(super) fn run(kernel: Kernel, which: &Which<'_>, tally: &mut Tally) -> Result<()> {
    let programs = build()?;
    for name in which.only {
        let is_there = programs.iter().any(|(program, _)| program == name);
        ensure!(
            is_there && !OUTSIDE.contains(&name.as_str()),
            "--program {name}: no program of tests that runs in a virtual machine"
        );
    }
    let machine = Machine::prepare(kernel, &|text| eprintln!("{text}"))?;
    let not_run = machine.result("not-run.txt");
    let mut jobs = Vec::new();
    for generation in which.ovn {
        let inside = programs.iter().filter(|(name, _)| {
            let is_wanted = which.only.is_empty() || which.only.contains(name);
            is_wanted && !OUTSIDE.contains(&name.as_str())
        });
        for (name, program) in inside {
            let mut arguments = which.filters.to_vec();
            if which.short {
                let Some((_, tests)) = SHORT.iter().find(|(short, _)| short == name) else {
                    continue;
                };
                arguments.extend(tests.iter().map(|&test| test.to_owned()));
            }
            if name == FAULTS.0 {
                arguments.extend(FAULTS.1.map(str::to_owned));
            }
            jobs.push(job(
                *generation,
                which.verdict,
                name,
                program,
                arguments,
                &not_run,
            )?);
        }
    }
    let failed = machine.run(&jobs, |line| {
        println!("{line}");
        if let Some((passed, failed)) = counts(line) {
            tally.passed += passed;
            tally.failed += failed;
        }
    })?;
    tally.broken.extend(failed);
    tally.read_not_run(&not_run, &format!("Linux {}", machine.kernel().name()))
}

fn job(
    ovn: Ovn,
    verdict: Option<Verdict>,
    name: &str,
    program: &Path,
    arguments: Vec<String>,
    not_run: &Path,
) -> Result<Job> {
    let suite = ovn.suite();
    let mut environment = vec![
        (ROOT_VARIABLE, root_directory(suite)?.display().to_string()),
        (DATAPATH_VARIABLE, "system".to_owned()),
        (NOT_RUN_VARIABLE, not_run.display().to_string()),
    ];
    environment.extend(verdict.map(Verdict::environment));
    environment.extend(
        NUMBERS
            .into_iter()
            .filter_map(|name| Some((name, env::var(name).ok()?))),
    );
    Ok(Job {
        name: format!("{name} with OVN of Debian's {suite}"),
        program: program.to_owned(),
        arguments,
        environment,
        // Where cargo runs tests: their package.
        directory: workspace()?.join("tests"),
        stdout: None,
        limit: LIMIT,
    })
}

/// Builds the test programs and returns them by name.
fn build() -> Result<Vec<(String, PathBuf)>> {
    eprintln!("building the lab tests");
    let mut command = cargo();
    command
        .args(["test", "--package", "dnsflow-tests", "--test", "*"])
        .args([
            "--no-run",
            "--quiet",
            "--message-format=json-render-diagnostics",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = interrupt::spawn(&mut command)?;
    let stdout = child.stdout.take().context("cargo's standard output")?;
    let reader = std::thread::spawn(move || {
        let lines = BufReader::new(stdout).lines().map_while(Result::ok);
        lines.filter_map(|line| program(&line)).collect::<Vec<_>>()
    });
    let status = interrupt::wait(child)?;
    ensure!(status.success(), "the build of the lab tests failed");
    let mut programs = reader.join().unwrap_or_default();
    programs.sort();
    ensure!(!programs.is_empty(), "cargo has built no test program");
    Ok(programs)
}

/// Name and path of a test program, if that is what a message of cargo's is about
/// (`compiler-artifact` in the Cargo book, "External tools").
fn program(message: &str) -> Option<(String, PathBuf)> {
    let message: Value = serde_json::from_str(message).ok()?;
    let is_program = message["reason"] == "compiler-artifact"
        && message["target"]["kind"] == serde_json::json!(["test"]);
    let name = message["target"]["name"].as_str()?;
    let path = message["executable"].as_str()?;
    is_program.then(|| (name.to_owned(), path.into()))
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn test_programs_are_found_among_the_messages_of_cargo() {
        let message = |kind: &str, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"kind":["{kind}"],"name":"story"}},"executable":{executable}}}"#
            )
        };
        let found = program(&message("test", r#""/target/debug/deps/story-1""#));
        assert_eq!(
            found,
            Some(("story".to_owned(), "/target/debug/deps/story-1".into()))
        );
        assert_eq!(
            program(&message("lib", r#""/target/debug/deps/x-1""#)),
            None
        );
        assert_eq!(program(&message("test", "null")), None);
        assert_eq!(
            program(r#"{"reason":"build-finished","success":true}"#),
            None
        );
    }
}
