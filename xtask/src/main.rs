//! `cargo xtask`: everything that a person or CI does with this workspace.

mod bench;
mod cluster;
mod commit;
mod demo;
mod ebpf;
mod ebpf_sources;
mod image;
mod interrupt;
mod kind;
mod labs;
mod lines;
mod paths;
mod prepare;
mod release;
mod soak;
mod tarball;
mod test;
mod unavailable;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use unavailable::Unavailable;

/// Builds, tests and shows dnsflow
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Xtask {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Build the BPF object that the agent embeds
    BuildEbpf,
    /// Bring up a lab, run the main job in it, and show and check every step
    Demo(demo::DemoCommand),
    /// Run every test, with the lab tests on the newest OVN or on each
    Test(test::TestCommand),
    /// Run a program, end what it leaves behind, and write down its processor time
    #[command(hide = true)]
    Contain(test::contain::ContainCommand),
    /// Measure what dnsflow costs and how fast it is, in a lab
    Bench(bench::BenchCommand),
    /// Let dnsflow work for long in a lab, and disturb it
    Soak(soak::SoakCommand),
    /// Build the agent's image
    Image(image::ImageCommand),
    /// Make the files of a release
    Release(release::ReleaseCommand),
    /// Bring up ovn-kubernetes' kind environment, run the main job in it, and take it down
    Kind(kind::KindCommand),
    /// Bring up a cluster of two nodes, run the main job and restart agents in it, and take it down
    Cluster(cluster::ClusterCommand),
    /// Bring up a lab to play in
    Lab(labs::LabCommand),
    /// Count the lines of product and tests
    Lines,
}

fn main() -> ExitCode {
    let error = match run(Xtask::parse().command) {
        Ok(code) => return code,
        Err(error) => error,
    };
    // Whatever has failed after a signal, it failed because of it.
    if let Err(interrupted) = interrupt::check() {
        eprintln!("{interrupted}; everything is cleaned up");
        return ExitCode::from(interrupted.exit_code());
    }
    if error.is::<Unavailable>() {
        eprintln!("{error:#}");
        return ExitCode::from(Unavailable::EXIT_CODE);
    }
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Contain(command) => {
            interrupt::install()?;
            return test::contain::run(&command).map(ExitCode::from);
        }
        Command::BuildEbpf => ebpf::build(&|text| eprintln!("{text}")),
        Command::Demo(command) => {
            prepare::require_root("demo")?;
            interrupt::install()?;
            demo::run(command)
        }
        Command::Test(command) => {
            prepare::require_root("test")?;
            interrupt::install()?;
            test::run(command)
        }
        Command::Bench(command) => {
            prepare::require_root("bench")?;
            interrupt::install()?;
            bench::run(command)
        }
        Command::Soak(command) => {
            prepare::require_root("soak")?;
            interrupt::install()?;
            soak::run(command)
        }
        Command::Image(command) => {
            interrupt::install()?;
            image::run(&command)
        }
        Command::Release(command) => {
            interrupt::install()?;
            release::run(&command)
        }
        Command::Kind(command) => {
            interrupt::install()?;
            kind::run(&command)
        }
        Command::Cluster(command) => {
            prepare::require_root("cluster")?;
            interrupt::install()?;
            cluster::run(&command)
        }
        Command::Lab(command) => {
            prepare::require_root("lab")?;
            interrupt::install()?;
            labs::run(command)
        }
        Command::Lines => lines::run(),
    }?;
    Ok(ExitCode::SUCCESS)
}
