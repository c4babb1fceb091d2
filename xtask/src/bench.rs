//! `cargo xtask bench`: what dnsflow costs and how fast it is, measured in a lab.
//!
//! The agent and the benchmark (`tests/benches/lab.rs`) are built optimized, each by itself, so that
//! the agent is the one that is shipped.

use std::{path::PathBuf, process::Stdio};

use anyhow::{Context, Result, ensure};
use clap::Args;
use dnsflow_tests::support::root_directory;
use serde_json::Value;

use crate::{
    ebpf, interrupt, labs,
    prepare::{self, Ovn, cargo},
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
    #[arg(long)]
    short: bool,
    /// Only the rows whose names begin so; may be given more than once
    #[arg(long, value_name = "ROW")]
    only: Vec<String>,
    /// Whose OVN
    #[arg(long, value_enum, default_value = "bookworm")]
    ovn: Ovn,
}

/// Builds, measures and prints the table.
pub(crate) fn run(command: BenchCommand) -> Result<()> {
    let BenchCommand {
        json,
        svg,
        short,
        only,
        ovn,
    } = command;
    let say = |text: &str| eprintln!("{text}");
    prepare::ovn(ovn, &say)?;
    ebpf::build(&say)?;
    say("building the optimized agent and the benchmark (the first time takes some minutes)");
    let program = build(NAME)?;
    labs::sweep()?;
    let mut measure = std::process::Command::new(program);
    measure.arg("--root").arg(root_directory(ovn.suite())?);
    measure.args(short.then_some("--short"));
    for (option, file) in [("--json", json), ("--svg", svg)] {
        if let Some(file) = file {
            measure.arg(option).arg(file);
        }
    }
    for row in only {
        measure.arg("--only").arg(row);
    }
    let status = interrupt::spawn(&mut measure).and_then(interrupt::wait);
    labs::sweep()?;
    ensure!(status?.success(), "the benchmark failed");
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
