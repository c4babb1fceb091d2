//! `cargo xtask`: everything that a person or CI does with this workspace.

mod ebpf;
mod ebpf_sources;

use clap::Parser;

/// Builds, tests and shows dnsflow.
#[derive(Parser)]
enum Args {
    /// Compile the BPF program that the agent embeds.
    BuildEbpf,
}

fn main() -> anyhow::Result<()> {
    match Args::parse() {
        Args::BuildEbpf => ebpf::build(&|step| eprintln!("{step}")),
    }
}
