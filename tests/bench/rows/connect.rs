//! What a program sees: resolve a fresh name, then connect at once.
//!
//! From sending the question to the established connection, by turns from a pod with a firewall whose
//! answers are held, and from a pod whose namespace has no firewall. The agent runs all the time; it
//! touches nothing of the second pod.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::bench::{
    distribution::Distribution,
    loader::{Asker, Connector},
    report::Measured,
    stage::{FREE, Mode, RULED, Stage, matching},
    wire,
};

const PAUSE: Duration = Duration::from_millis(2);

/// The row `connect_added_us`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let (figure, target) = (
        "resolve and connect: hold vs no firewall",
        "p99 within 1 ms",
    );
    let count = stage.scale(2000, 20);
    let agent = stage.agent(Mode::Hold, &[])?;
    let mut pods = [RULED, FREE].map(|pod| -> Result<_> {
        let asker = Asker::new(stage.lab, pod)?;
        Ok((asker, Connector::new(stage.lab, pod), Vec::new()))
    });
    // The first packets of a pod make connection tracking entries.
    for turn in 0..count + 10 {
        for pod in &mut pods {
            let Ok((asker, connector, took)) = pod else {
                continue;
            };
            let number = stage.fresh(1).start;
            connector.prepare()?;
            let start = Instant::now();
            asker.ask(&matching(number))?;
            connector.connect_patiently(wire::address(number))?;
            if turn >= 10 {
                took.push(start.elapsed());
            }
            std::thread::sleep(PAUSE);
        }
    }
    ensure!(agent.terminate()?.success(), "the agent has failed");
    let [ruled, free] = pods.map(|pod| pod.map(|(.., took)| Distribution::micros(&took)));
    let (ruled, free) = (
        ruled?.context("connections")?,
        free?.context("connections")?,
    );
    let added = ruled.above(&free);
    Ok(Measured::default()
        .field("connect_added_us", added)?
        .field("details.connect_us", ruled.latency())?
        .field("details.connect_us_no_firewall", free.latency())?
        .line(
            figure,
            format!("{:+.0} µs at p50, {:+.0} µs at p99", added.p50, added.p99),
            target,
            added.p99 <= 1000.0,
        )
        .panel(
            "Resolve a fresh name and connect at once",
            [("no firewall", free), ("dnsflow, hold", ruled)],
        ))
}
