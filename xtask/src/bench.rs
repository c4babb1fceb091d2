//! `cargo xtask bench`: what dnsflow costs and how fast it is, measured in a lab.
//!
//! The agent and the benchmark (`tests/benches/lab.rs`) are built optimized, each by itself, so that
//! the agent is the one that is shipped.

mod document;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dnsflow_tests::support::{DATAPATH_VARIABLE, root_directory, workspace};
use serde_json::Value;

use self::document::Document;
use crate::{
    ebpf, interrupt, labs,
    prepare::{self, Ovn, cargo},
    vm::{Event, Job, Kernel, Machine},
};

/// Measures dnsflow side by side with what it is compared with, in one run.
#[derive(Debug, Args)]
pub(crate) struct BenchCommand {
    /// Write the values to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Plot the latencies' distributions to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// As little as shows that every row can be filled
    #[arg(long, conflicts_with = "docs")]
    short: bool,
    /// On the userspace datapath, measure the agent's own work by marks, too, although no packet is marked there
    #[arg(long, conflicts_with = "vm")]
    marks: bool,
    /// Only the rows whose names begin so; may be given more than once
    #[arg(long, value_name = "ROW", conflicts_with = "docs")]
    only: Vec<String>,
    /// Measure all rows of a commit without changes, and write the tables and pictures of docs/internals/performance.md
    #[arg(long, conflicts_with_all = ["json", "svg"])]
    docs: bool,
    /// Whose OVN
    #[arg(long, value_enum, default_value = "bookworm")]
    ovn: Ovn,
    /// In a virtual machine with this kernel of Debian's and its openvswitch module: flows and marks side by side
    #[arg(long, value_enum, value_name = "KERNEL")]
    vm: Option<Kernel>,
}

/// An emulated machine takes about an hour for all rows.
const VM_LIMIT: Duration = Duration::from_secs(3 * 3600);

/// Builds, measures and prints the table.
pub(crate) fn run(command: BenchCommand) -> Result<()> {
    let BenchCommand {
        json,
        svg,
        short,
        marks,
        only,
        docs,
        ovn,
        vm,
    } = command;
    let document = docs.then(|| Document::of(vm)).transpose()?;
    let say = |text: &str| eprintln!("{text}");
    prepare::ovn(ovn, &say)?;
    ebpf::build(&say)?;
    say("building the optimized agent and the benchmark (the first time takes some minutes)");
    let program = build(NAME)?;
    let mut arguments = vec!["--root".to_owned(), text(&root_directory(ovn.suite())?)];
    arguments.extend(short.then(|| "--short".to_owned()));
    arguments.extend((marks || docs && vm.is_none()).then(|| "--marks".to_owned()));
    for row in only {
        arguments.extend(["--only".to_owned(), row]);
    }
    let files = match &document {
        Some(document) => document.files()?,
        None => [("--json", json), ("--svg", svg), ("--markdown", None)],
    };
    let files = files
        .into_iter()
        .filter_map(|(option, file)| Some((option, file?)));
    let start = Instant::now();
    match vm {
        Some(kernel) => in_vm(kernel, program, arguments, files)?,
        None => here(program, arguments, files)?,
    }
    match document {
        Some(document) => document.write(start.elapsed(), &say),
        None => Ok(()),
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Measures with this machine's kernel.
fn here(
    program: PathBuf,
    arguments: Vec<String>,
    files: impl Iterator<Item = (&'static str, PathBuf)>,
) -> Result<()> {
    labs::sweep()?;
    let mut measure = Command::new(program);
    measure.args(arguments);
    for (option, file) in files {
        measure.arg(option).arg(file);
    }
    let status = interrupt::spawn(&mut measure).and_then(interrupt::wait);
    labs::sweep()?;
    ensure!(status?.success(), "the benchmark failed");
    Ok(())
}

/// Measures in a virtual machine, which can write its results below `target/` only.
fn in_vm(
    kernel: Kernel,
    program: PathBuf,
    mut arguments: Vec<String>,
    files: impl Iterator<Item = (&'static str, PathBuf)>,
) -> Result<()> {
    let machine = Machine::prepare(kernel, &|text| eprintln!("{text}"))?;
    let mut results = Vec::new();
    for (option, file) in files {
        let inside = machine.result(option.trim_start_matches('-'));
        arguments.extend([option.to_owned(), text(&inside)]);
        results.push((inside, file));
    }
    let job = Job {
        name: "the benchmark".to_owned(),
        program,
        arguments,
        environment: vec![(DATAPATH_VARIABLE, "system".to_owned())],
        directory: workspace()?,
        stdout: None,
        limit: VM_LIMIT,
    };
    let failed = machine.run(&[job], |event| {
        if let Event::Line(line) = event {
            println!("{line}");
        }
    })?;
    for (inside, file) in results {
        fs::copy(&inside, &file).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if !failed.is_empty() {
        bail!("the benchmark failed");
    }
    Ok(())
}

/// A program of `tests/benches`, built, with the agent and the lab's helper beside it.
pub(crate) fn build(name: &str) -> Result<PathBuf> {
    let mut agent = cargo();
    agent.args(["build", "--quiet", "--release", "--bins"]);
    agent.args(["--package", "dnsflow-agent", "--package", "dnsflow-tests"]);
    let status = interrupt::wait(interrupt::spawn(&mut agent)?)?;
    ensure!(status.success(), "the build failed");

    let mut bench = cargo();
    bench.args(["bench", "--quiet", "--no-run", "--package", "dnsflow-tests"]);
    bench.args(["--bench", name, "--message-format=json-render-diagnostics"]);
    let output = bench
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    interrupt::check()?;
    ensure!(output.status.success(), "the build failed");
    // https://doc.rust-lang.org/cargo/reference/external-tools.html, "Artifact messages"
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| Some(message["executable"].as_str()?.into()))
        .with_context(|| format!("cargo does not say where {name} is"))
}

/// The benchmark's target.
const NAME: &str = "lab";
