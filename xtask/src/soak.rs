//! `cargo xtask soak`: dnsflow for long, with random firewalls and restarts, in a lab.
//!
//! The program is `tests/benches/soak.rs`. The agent is built optimized, as it is shipped.

use std::{path::PathBuf, process::Command, time::Duration};

use anyhow::{Result, ensure};
use clap::Args;
use dnsflow_tests::{
    random::SEED_VARIABLE,
    support::{DATAPATH_VARIABLE, root_directory, workspace},
};

use crate::{
    bench, ebpf, interrupt, labs,
    prepare::{self, Ovn},
    vm::{Event, Job, Kernel, Machine, OpenBy},
};

/// The name of the program.
const NAME: &str = "soak";
/// How long it may take beside its time: for the lab, and until all addresses have closed.
const MARGIN: Duration = Duration::from_secs(900);

/// Lets dnsflow work for long, and disturbs it.
#[derive(Debug, Args)]
pub(crate) struct SoakCommand {
    /// How long
    #[arg(long, value_name = "N", default_value_t = 60)]
    minutes: u64,
    /// How many of them one process of the agent serves at the end; half of them, when left out. The agent
    /// remembers connections for an hour: a longer time shows whether its memory stays as it is
    #[arg(long, value_name = "M")]
    one_process: Option<u64>,
    /// Repeat the run with this seed, as far as time allows
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Whose OVN. The userspace datapath of bookworm's Open vSwitch 3.1 ends sooner or later by itself, at an
    /// assertion about a connection that comes again (docs/internals/kernels.md)
    #[arg(long, value_enum, default_value = "sid")]
    ovn: Ovn,
    /// In a virtual machine with this kernel, on its datapath
    #[arg(long, value_name = "KERNEL", value_enum)]
    vm: Option<Kernel>,
    /// With --vm: how the agents open addresses, as their option of the same name
    #[arg(
        long,
        alias = "verdict",
        value_enum,
        requires = "vm",
        default_value = "marks"
    )]
    open_by: OpenBy,
}

/// Builds the program and lets it run.
pub(crate) fn run(command: SoakCommand) -> Result<()> {
    let SoakCommand {
        minutes,
        one_process,
        seed,
        ovn,
        vm,
        open_by,
    } = command;
    let say = |text: &str| eprintln!("{text}");
    prepare::ovn(ovn, &say)?;
    ebpf::build(&say)?;
    say("building the optimized agent and the soak (the first time takes some minutes)");
    let program = bench::build(NAME)?;
    let root = root_directory(ovn.suite())?.display().to_string();
    let arguments = ["--root", &root, "--minutes", &minutes.to_string()].map(str::to_owned);
    let one_process = one_process.map(|minutes| ["--one-process".to_owned(), minutes.to_string()]);
    let arguments: Vec<_> = arguments
        .into_iter()
        .chain(one_process.into_iter().flatten())
        .collect();
    let seed = seed.map(|seed| (SEED_VARIABLE, seed.to_string()));
    if let Some(kernel) = vm {
        let time = Duration::from_secs(60 * minutes) + MARGIN;
        let environment = seed.into_iter().chain([open_by.environment()]);
        let environment = environment.collect();
        return run_in_vm(kernel, program, arguments, environment, time);
    }
    labs::sweep()?;
    let mut soak = Command::new(program);
    soak.args(arguments).envs(seed);
    let status = interrupt::spawn(&mut soak).and_then(interrupt::wait);
    labs::sweep()?;
    ensure!(status?.success(), "the soak failed");
    Ok(())
}

fn run_in_vm(
    kernel: Kernel,
    program: PathBuf,
    arguments: Vec<String>,
    mut environment: Vec<(&'static str, String)>,
    limit: Duration,
) -> Result<()> {
    let machine = Machine::prepare(kernel, &|text| eprintln!("{text}"))?;
    environment.push((DATAPATH_VARIABLE, "system".to_owned()));
    let job = Job {
        name: NAME.to_owned(),
        program,
        arguments,
        environment,
        directory: workspace()?.join("tests"),
        stdout: None,
        limit,
    };
    let failed = machine.run(&[job], |event| {
        if let Event::Line(line) = event {
            println!("{line}");
        }
    })?;
    ensure!(failed.is_empty(), "the soak failed");
    Ok(())
}
