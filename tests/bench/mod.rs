//! The figures of `cargo xtask bench`, all measured side by side in one lab.
//!
//! Figures are ratios and distributions of one run on one machine: what is compared with each other
//! was measured in turns, request by request or in short rounds, so that whatever else the machine
//! does falls on both sides. Nothing here judges a product; nothing is sent outside the lab's
//! namespaces.
//!
//! Each row's module says how it is measured.

mod distribution;
mod dnstap;
mod loader;
mod openflow;
mod plot;
mod report;
mod rows;
mod server;
mod stage;
mod tap;
mod usage;
mod wire;

use std::{fs, path::PathBuf, time::Instant};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::lab::{Datapath, Lab};

pub(crate) use report::Report;
use rows::{Differs, Row};
use stage::{OpenBy, Stage};

/// What is to be measured, and where it goes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    /// As little as shows that every row can be filled.
    pub(crate) short: bool,
    /// On the userspace datapath, the agent's own work by marks, too.
    pub(crate) marks: bool,
    /// Only the rows whose names begin with one of these.
    pub(crate) only: Vec<String>,
    /// Where the values go as JSON.
    pub(crate) json: Option<PathBuf>,
    /// Where the plot goes.
    pub(crate) svg: Option<PathBuf>,
    /// Where the table goes as Markdown.
    pub(crate) markdown: Option<PathBuf>,
}

/// Measures. `say` is told what is under way.
pub(crate) fn run(lab: &Lab, options: &Options, say: &dyn Fn(&str)) -> Result<Report> {
    let wanted = |name: &str| {
        options.only.is_empty() || options.only.iter().any(|only| name.starts_with(only))
    };
    let rows: Vec<&'static Row> = rows::ALL.iter().filter(|row| wanted(row.name)).collect();
    ensure!(!rows.is_empty(), "no row has such a name");
    let mut report = Report::new(lab, options.short)?;
    let mut stage = Stage::set(lab, options.short)?;
    // Both ways are measured side by side, row by row.
    let ways = |row: &'static Row| {
        let by_marks = match (row.differs, lab.datapath()) {
            (Differs::Nowhere, _) | (Differs::InKernel, Datapath::Netdev) => false,
            (Differs::Everywhere, Datapath::Netdev) => options.marks,
            (_, Datapath::System) => true,
        };
        let by_marks = by_marks.then_some((row, OpenBy::Marks));
        [(row, OpenBy::Flows)].into_iter().chain(by_marks)
    };
    let rows: Vec<_> = rows.into_iter().flat_map(ways).collect();
    let mut failed = Vec::new();
    for (number, (row, open_by)) in (1..).zip(&rows) {
        let way = open_by.told();
        say(&format!(
            "{number}/{} {}{way}: {}",
            rows.len(),
            row.name,
            row.told
        ));
        stage.open_by = *open_by;
        let start = Instant::now();
        match (row.measure)(&stage) {
            Ok(measured) => {
                for line in measured.told() {
                    say(&format!("    {line}{way}"));
                }
                report.add(measured, *open_by);
            }
            // The others take minutes, and are worth having.
            Err(error) => {
                say(&format!("    FAILED: {error:#}"));
                failed.push(format!("{}{way}", row.name));
            }
        }
        say(&format!("    took {:.1} s", start.elapsed().as_secs_f64()));
        if let Err(error) = stage.clear() {
            say(&format!("    the lab is broken: {error:#}"));
            say(&lab.log_tail("ovs-vswitchd.log"));
            let rest = rows.iter().skip(number);
            failed.extend(rest.map(|(row, way)| format!("{}{}", row.name, way.told())));
            break;
        }
    }
    let struck = stage.strike();
    let files = [
        (&options.json, report.json()?),
        (&options.svg, plot::svg(report.panels())),
        (&options.markdown, report.markdown()),
    ];
    for (file, content) in files {
        if let Some(file) = file {
            fs::write(file, content).with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    struck?;
    ensure!(
        failed.is_empty(),
        "{}\nnot measured: {}",
        report.table(),
        failed.join(", ")
    );
    Ok(report)
}

/// Gives a UDP socket room for what comes while its thread does not run.
fn room(socket: &std::net::UdpSocket) -> Result<()> {
    const ROOM: usize = 8 << 20;
    rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, ROOM)?;
    Ok(())
}
