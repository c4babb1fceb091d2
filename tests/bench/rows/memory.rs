//! What the agent needs with 100,000 cache entries, and how long the flows of 50,000 take to come back.
//!
//! One pod asks for 100,000 names, each with an address of its own, with the limit per pod raised. When
//! it has 50,000, all flows are deleted behind the agent's back, as ovn-controller does when
//! it restarts; the time runs from the end of the deletion until the switch holds as many again, seen
//! by asking it every 200 ms. Memory is the agent's resident set at the end.

use std::{
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::bench::{
    distribution::{Distribution, rounded},
    loader::Asker,
    report::Measured,
    stage::{Mode, RULED, Stage, Verdict, matching},
    usage::resident_mib,
};

/// Questions that are open at the same time.
const IN_FLIGHT: usize = 64;
/// Counting 100,000 flows takes the switch tens of milliseconds, in which it does nothing else.
const POLL: Duration = Duration::from_millis(200);
/// So many names are asked for before the agent must know all of their addresses: what the burst of a pod's share of the
/// ring buffer holds (`SHARE_BURST_BYTES`).
const PORTION: u32 = 1000;
/// If the agent does not know all addresses by then, the names are asked for again.
const AGAIN: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(60);

/// Asks until so many addresses are in the cache, and gives up when asking brings no other. On a slow machine, one pod's
/// answers come faster than the pod's share of what is captured.
fn tell(stage: &Stage<'_>, asker: &mut Asker, numbers: Range<u32>, addresses: u64) -> Result<()> {
    let mut known = stage.addresses()?;
    loop {
        asker.ask_all(numbers.clone().map(matching), IN_FLIGHT)?;
        let asked = Instant::now();
        let mut found = stage.addresses()?;
        while found != addresses && asked.elapsed() < AGAIN {
            thread::sleep(POLL);
            found = stage.addresses()?;
        }
        if found == addresses {
            return Ok(());
        }
        ensure!(
            found > known,
            "the agent knows {found} addresses instead of {addresses}"
        );
        known = found;
    }
}

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
    let arguments = ["--max-addresses-per-pod=131072", "--min-ttl=1h"];
    let agent = stage.agent(Mode::Hold, &arguments)?;
    let mut asker = Asker::new(stage.lab, RULED)?;
    let asked = stage.fresh(0).start - 1;
    let at_first = stage.lab.dnsflow_flow_count()?;
    ensure!(at_first > 0, "an answer has opened nothing");
    // Addresses with a verdict have no flows of their own.
    let each = match stage.verdict {
        Verdict::Flows => at_first / usize::try_from(asked)?,
        Verdict::Kernel => 0,
    };
    let before = resident_mib(agent.pid())?;

    let mut told = asked;
    let mut fill = |upto: u32| -> Result<()> {
        while told < upto {
            let count = PORTION.min(upto - told);
            let numbers = stage.fresh(count);
            told += count;
            tell(stage, &mut asker, numbers, told.into())?;
        }
        wait_for(stage, at_first.max(each * usize::try_from(upto)?))?;
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
    ensure!(agent.terminate()?.success(), "the agent has failed");

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
