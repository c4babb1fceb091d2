//! What a program sees: resolve a fresh name, then connect at once.
//!
//! From sending the question to the established connection, by turns from a pod with a firewall whose
//! answers are held, and from a pod whose namespace has no firewall. The agent runs all the time; it
//! touches nothing of the second pod.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::bench::{
    distribution::Distribution,
    loader::{Asker, Connector},
    report::Measured,
    stage::{FREE, Mode, RULED, Stage, matching},
    wire,
};

const PAUSE: Duration = Duration::from_millis(2);
/// The first packets of a pod make connection tracking entries; these rounds do not count.
const FIRST: u32 = 10;

/// What one pod has waited for.
struct Pod<'a> {
    asker: Asker,
    connector: Connector<'a>,
    answers: Vec<Duration>,
    connections: Vec<Duration>,
}

/// The rows `connect_added_us` and `details.answer_added_us`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let (figure, target) = (
        "resolve and connect: hold vs no firewall",
        "p99 within 1 ms",
    );
    let count: u32 = stage.scale(2000, 20);
    let agent = stage.agent(Mode::Hold, &[])?;
    let pod = |name| -> Result<_> {
        Ok(Pod {
            asker: Asker::new(stage.lab, name)?,
            connector: Connector::new(stage.lab, name),
            answers: Vec::new(),
            connections: Vec::new(),
        })
    };
    let mut pods = [pod(RULED)?, pod(FREE)?];
    for turn in 0..count + FIRST {
        for pod in &mut pods {
            let number = stage.fresh(1).start;
            pod.connector.prepare()?;
            let start = Instant::now();
            let answer = pod.asker.ask(&matching(number))?;
            pod.connector.connect_patiently(wire::address(number))?;
            if turn >= FIRST {
                pod.answers.push(answer);
                pod.connections.push(start.elapsed());
            }
            std::thread::sleep(PAUSE);
        }
    }
    stage.end(agent, Mode::Hold, count + FIRST)?;
    let of = |took: &[Duration]| Distribution::micros(took).context("connections");
    let [ruled, free] = pods;
    let answers = of(&ruled.answers)?.above(&of(&free.answers)?);
    let (ruled, free) = (of(&ruled.connections)?, of(&free.connections)?);
    let added = ruled.above(&free);
    Ok(Measured::default()
        .field("connect_added_us", added)?
        .field("details.answer_added_us", answers)?
        .field("details.connect_us", ruled.latency())?
        .field("details.connect_us_no_firewall", free.latency())?
        .line(
            figure,
            format!("{:+.0} µs at p50, {:+.0} µs at p99", added.p50, added.p99),
            target,
            added.p99 <= 1000.0,
        )
        .line(
            "… of which the DNS answer",
            format!(
                "{:+.0} µs at p50, {:+.0} µs at p99",
                answers.p50, answers.p99
            ),
            "to compare",
            true,
        )
        .panel(
            "Resolve a fresh name and connect at once",
            [("no firewall", free), ("dnsflow, hold", ruled)],
        ))
}
