//! `cargo xtask test`: every test, with the lab tests on the newest OVN or on each.

pub(crate) mod contain;
mod in_vm;
mod programs;
mod repeat;
mod run;
mod summary;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use dnsflow_tests::{
    random::{PROPERTY_SEED_VARIABLE, SEED_VARIABLE},
    support::{LEFT_TO_OTHERS, ROOT_VARIABLE, root_directory},
};

use self::{programs::Program, repeat::Record, summary::Summary};
use crate::{
    cluster, ebpf, interrupt, kind, labs,
    prepare::{self, Ovn},
    vm::{Kernel, Machine, OpenBy},
};

/// The processor time that each suite may take, in seconds: `SUITE SECONDS`.
const BUDGETS: &str = include_str!("test/budgets.txt");

/// Runs every test.
#[derive(Debug, Args)]
pub(crate) struct TestCommand {
    /// Whose OVN the lab tests run on; may be given more than once [default: sid; with --vm bookworm]
    #[arg(long, value_enum)]
    ovn: Vec<Which>,
    /// Run the lab tests in a virtual machine with this kernel of Debian's and its openvswitch module
    #[arg(long, value_enum, value_name = "KERNEL")]
    vm: Option<Kernel>,
    /// With --vm: the BPF tests, the main job and the restarts, in a few minutes
    #[arg(long, requires = "vm")]
    short: bool,
    /// With --vm: how the agents open addresses, as their option of the same name
    #[arg(long, alias = "verdict", value_enum, requires = "vm")]
    open_by: Option<OpenBy>,
    /// Fail when a test could not run, too, unless it is left to another machine
    #[arg(long)]
    all_must_run: bool,
    /// Print the output of tests that pass, too
    #[arg(long)]
    show_output: bool,
    /// Run the tests until there are so many runs of this commit, and record each in target/test-runs.jsonl
    #[arg(long, value_name = "N")]
    repeat: Option<usize>,
    /// Keep as many processors busy as there are, beside the tests
    #[arg(long)]
    beside_load: bool,
    /// Run only tests whose full names (PROGRAM::MODULE::TEST) contain one of these
    filters: Vec<String>,
}

impl TestCommand {
    /// Whose OVN the lab tests run on.
    pub(crate) fn generations(&self) -> Vec<Ovn> {
        let mut ovn: Vec<Ovn> = Vec::new();
        for generation in self.ovn.iter().flat_map(|which| which.generations()) {
            if !ovn.contains(generation) {
                ovn.push(*generation);
            }
        }
        if ovn.is_empty() {
            ovn.push(match self.vm {
                Some(_) => Ovn::Bookworm,
                None => Ovn::Sid,
            });
        }
        ovn
    }

    /// The kernel of the virtual machine.
    pub(crate) fn kernel(&self) -> Option<Kernel> {
        self.vm
    }

    /// Whether every test runs.
    pub(crate) fn is_whole(&self) -> bool {
        !self.short && self.filters.is_empty()
    }
}

/// Which OVN to test with.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Which {
    /// Each of them
    All,
    /// OVN 23.03, Open vSwitch 3.1 (Debian 12)
    Bookworm,
    /// OVN 25.03, Open vSwitch 3.5 (Debian 13)
    Trixie,
    /// Whatever Debian's unstable distribution has: OVN 26.03, Open vSwitch 4.0 in November 2026
    Sid,
}

impl Which {
    fn generations(self) -> &'static [Ovn] {
        match self {
            Self::All => Ovn::value_variants(),
            Self::Bookworm => &[Ovn::Bookworm],
            Self::Trixie => &[Ovn::Trixie],
            Self::Sid => &[Ovn::Sid],
        }
    }
}

/// What one run needs.
struct Prepared {
    ovn: Vec<Ovn>,
    programs: Vec<Program>,
    machine: Option<Machine>,
    budgets: BTreeMap<&'static str, u64>,
    /// The arguments that choose the tests.
    arguments: String,
}

/// Runs the tests and prints the summary.
pub(crate) fn run(command: TestCommand) -> Result<()> {
    let prepared = prepare(&command)?;
    let Some(wanted) = command.repeat else {
        return once(&command, &prepared).and_then(|(summary, _)| verdict(&command, &summary));
    };
    let mut what = prepared.arguments.clone();
    if command.beside_load {
        what += " --beside-load";
    }
    let record = Record::open(&target_file("test-runs.jsonl")?, what)?;
    while record.runs()?.len() < wanted {
        let start = Instant::now();
        let (summary, seed) = once(&command, &prepared)?;
        record.append(seed, start.elapsed(), &summary)?;
    }
    record.print()?;
    if record.runs()?.iter().any(|run| !run.failed.is_empty()) {
        bail!("a run has failed");
    }
    Ok(())
}

/// Fetches and builds.
fn prepare(command: &TestCommand) -> Result<Prepared> {
    let say = |text: &str| eprintln!("{text}");
    let start = Instant::now();
    let ovn = command.generations();
    for generation in &ovn {
        prepare::ovn(*generation, &say)?;
    }
    prepare::askers(&say)?;
    let machine = command.vm.map(|kernel| Machine::prepare(kernel, &say));
    let machine = machine.transpose()?;
    let fetched = start.elapsed();
    ebpf::build(&say)?;
    interrupt::check()?;
    // The tests of the API server run outside of virtual machines.
    let suites = ovn.iter().filter(|_| command.vm.is_none());
    let suites: Vec<&str> = suites.map(|generation| generation.suite()).collect();
    let programs = programs::build(&command.filters, &suites)?;
    eprintln!(
        "fetched in {:.0} s, built in {:.0} s",
        fetched.as_secs_f64(),
        (start.elapsed() - fetched).as_secs_f64()
    );
    let mut arguments = Vec::new();
    for generation in &ovn {
        arguments.push(format!("--ovn {}", generation.suite()));
    }
    arguments.extend(command.vm.map(|kernel| format!("--vm {}", kernel.name())));
    arguments.extend(
        command
            .open_by
            .map(|open_by| format!("--open-by {}", open_by.environment().1)),
    );
    arguments.extend(command.short.then(|| "--short".to_owned()));
    arguments.extend(command.filters.iter().cloned());
    Ok(Prepared {
        ovn,
        programs,
        machine,
        budgets: budgets()?,
        arguments: arguments.join(" "),
    })
}

/// Runs the tests once. Returns their seed, too.
fn once(command: &TestCommand, prepared: &Prepared) -> Result<(Summary, u64)> {
    let seed = match std::env::var(SEED_VARIABLE) {
        Ok(seed) => seed.parse().context(SEED_VARIABLE)?,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
    };
    let mut summary = Summary::new(prepared.budgets.clone(), command.show_output);
    labs::sweep()?;
    let start = Instant::now();
    let mut work = || match &prepared.machine {
        Some(machine) => in_vm::run(machine, command, prepared, seed, &mut summary),
        None => here(command, prepared, seed, &mut summary),
    };
    let result = if command.beside_load {
        repeat::beside_load(work)?
    } else {
        work()
    };
    labs::sweep()?;
    result?;
    if prepared.machine.is_none() && command.filters.is_empty() {
        for (name, why) in [
            ("kind", kind::why_not_run()),
            ("cluster", cluster::why_not_run()),
        ] {
            summary.add_not_run(&format!(
                "not run: `cargo xtask {name}`: {why}; {LEFT_TO_OTHERS}"
            ));
        }
    }
    summary.print();
    println!("  tests ran for {:.0} s", start.elapsed().as_secs_f64());
    Ok((summary, seed))
}

/// Whether all is well.
fn verdict(command: &TestCommand, summary: &Summary) -> Result<()> {
    let failed = summary.failures().len();
    if failed > 0 {
        bail!("{failed} tests failed");
    }
    if command.all_must_run && !summary.all_ran() {
        bail!("not every test could run");
    }
    if summary.passed() == 0 {
        bail!("no test ran");
    }
    Ok(())
}

/// Runs the tests with this machine's kernel.
fn here(
    command: &TestCommand,
    prepared: &Prepared,
    seed: u64,
    summary: &mut Summary,
) -> Result<()> {
    let scratch = target_file("test-run")?;
    for (number, generation) in prepared.ovn.iter().enumerate() {
        let suite = generation.suite();
        eprintln!("\n== with OVN of Debian's {suite}, {SEED_VARIABLE}={seed}");
        summary.begin(format!(
            "{SEED_VARIABLE}={seed} cargo xtask test --ovn {suite}"
        ));
        let environment = [
            (ROOT_VARIABLE, root_directory(suite)?.display().to_string()),
            (SEED_VARIABLE, seed.to_string()),
            (PROPERTY_SEED_VARIABLE, seed.to_string()),
        ];
        let runner = run::Runner {
            environment: &environment,
            budgets: &prepared.budgets,
            scratch: &scratch,
        };
        // The other programs have nothing to do with Debian's release.
        let programs = prepared.programs.iter();
        let programs = programs.filter(|program| number == 0 || program.runs_debian());
        runner.run(run::jobs(programs, &command.filters), summary)?;
    }
    Ok(())
}

/// A file or directory beside the unpacked packages, in cargo's target directory.
fn target_file(name: &str) -> Result<PathBuf> {
    Ok(root_directory("")?.with_file_name(name))
}

fn budgets() -> Result<BTreeMap<&'static str, u64>> {
    let lines = BUDGETS.lines().filter(|line| !line.starts_with('#'));
    let budget = |line: &'static str| -> Result<(&'static str, u64)> {
        let (suite, seconds) = line.split_once(' ').context("SUITE SECONDS")?;
        Ok((suite, seconds.trim().parse()?))
    };
    lines
        .map(|line| budget(line).with_context(|| format!("budgets.txt: {line}")))
        .collect()
}
