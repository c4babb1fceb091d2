//! What the agent needs with 100,000 cache entries, and how long the flows of 50,000 take to come back.
//!
//! One pod asks for 100,000 names, each with an address of its own, with the limit per pod raised. When
//! it has 50,000, all flows are deleted behind the agent's back, as ovn-controller does when
//! it restarts; the time runs from the end of the deletion until the switch holds as many again, seen
//! by asking it every 200 ms. Memory is the agent's resident set at the end.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::bench::{
    distribution::{Distribution, rounded},
    loader::Asker,
    report::Measured,
    stage::{Mode, RULED, Stage, WARM_UP},
    usage::resident_mib,
};

/// Counting 100,000 flows takes the switch tens of milliseconds, in which it does nothing else.
const POLL: Duration = Duration::from_millis(200);
const LIMIT: Duration = Duration::from_secs(60);

/// Waits until the switch holds so many flows of dnsflow's.
fn wait_for(stage: &Stage<'_>, flows: usize) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let found = stage.lab.dnsflow_flow_count()?;
        if found == flows {
            return Ok(start.elapsed());
        }
        if start.elapsed() > LIMIT {
            bail!("the switch holds {found} flows instead of {flows}");
        }
        thread::sleep(POLL);
    }
}

/// The row `rss_mib_100k`, and the second half of `resync_ms_100k`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let entries = stage.scale(100_000, 1000);
    let wipes = stage.scale(5, 1);
    // A cache entry stays while this takes.
    let arguments = [
        "--max-addresses-per-pod=131072",
        "--max-flow-changes=262144",
        "--min-ttl=1h",
    ];
    let agent = stage.agent(Mode::Hold, &arguments)?;
    let mut asker = Asker::new(stage.lab, RULED)?;
    let at_first = stage.lab.dnsflow_flow_count()?;
    ensure!(at_first > 0, "an answer has opened nothing");
    let each = stage.flows_of_an_address();
    let before = resident_mib(agent.pid())?;

    let mut resolved = WARM_UP;
    let mut fill = |upto: u32| -> Result<()> {
        let count = upto - resolved;
        stage.resolve(&mut asker, stage.fresh(count), resolved)?;
        resolved = upto;
        wait_for(stage, at_first + each * usize::try_from(upto - WARM_UP)?)?;
        Ok(())
    };
    fill(entries / 2)?;
    let mut back = Vec::new();
    for _ in 0..wipes {
        let all = stage.lab.dnsflow_flow_count()?;
        stage.delete_flows()?;
        back.push(wait_for(stage, all)?.as_secs_f64() * 1e3);
    }
    fill(entries)?;
    let resident = resident_mib(agent.pid())?;
    stage.end(agent, Mode::Hold, entries - WARM_UP)?;

    let back = Distribution::of(back).context("wipes")?;
    let latency = back.latency();
    Ok(Measured::default()
        .field("rss_mib_100k", rounded(resident))?
        .field("details.rss_mib_empty", rounded(before))?
        .field("details.entries", entries)?
        .field(
            "details.flows",
            at_first.max(each * usize::try_from(entries)?),
        )?
        .field("resync_switch_ms_100k", latency)?
        .line(
            "agent's memory with 100,000 cache entries",
            format!("{resident:.1} MiB ({before:.1} MiB without)"),
            "≤ 64 MiB",
            resident <= 64.0,
        )
        .line(
            "flows of 50,000 addresses wiped, back in the switch",
            format!(
                "{:.0} ms at p50, {:.0} ms at most",
                latency.p50, latency.max
            ),
            "≤ 2 s",
            latency.max <= 2000.0,
        ))
}
