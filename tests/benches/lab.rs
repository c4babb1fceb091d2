//! The benchmark: what `cargo xtask bench` builds and runs.
//!
//! `lab --root DIR [--short] [--marks] [--json FILE] [--svg FILE] [--markdown FILE] [--only ROW]...`

#[path = "../bench/mod.rs"]
mod bench;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use dnsflow_tests::{
    lab::{Cluster, Lab, LabOptions},
    root::Root,
    support,
};

/// Measures dnsflow in a lab
#[derive(Debug, Parser)]
struct Arguments {
    /// The unpacked Debian packages
    #[arg(long, value_name = "DIR")]
    root: PathBuf,
    /// As little as shows that every row can be filled
    #[arg(long)]
    short: bool,
    /// Write the values to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Plot the latencies' distributions to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the table to this file as Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// On the userspace datapath, measure the agent's own work by marks, too, although no packet is marked there
    #[arg(long)]
    marks: bool,
    /// Only the rows whose names begin so; may be given more than once
    #[arg(long, value_name = "ROW")]
    only: Vec<String>,
}

fn main() -> Result<()> {
    let Arguments {
        root,
        short,
        marks,
        json,
        svg,
        markdown,
        only,
    } = Arguments::parse();
    let lab = Lab::up(LabOptions {
        name: support::lab_name("bench"),
        root: Root::existing(&root)?,
        datapath: support::datapath()?,
        cluster: Cluster::default(),
        helper: support::helper()?,
    })?;
    let options = bench::Options {
        short,
        marks,
        only,
        json,
        svg,
        markdown,
    };
    let report = bench::run(&lab, &options, &|text| eprintln!("{text}"))?;
    println!("\n{}", report.table());
    Ok(())
}
