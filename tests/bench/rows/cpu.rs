//! What an answer costs in processor time.
//!
//! The pod asks for fresh names at a steady pace; each answer opens an address. Processor time is
//! the kernel's account of all threads of the agent (`schedstat`), with everything that it does
//! meanwhile: logging the event, reading the flow monitor, the comparison every ten seconds. Then
//! the same for names that no rule mentions. ovs-vswitchd forwards the same packets both times, so
//! that its share of an opened address is the difference.
//!
//! The TC programs' own time comes from the kernel's statistics (`BPF_ENABLE_STATS`), which cost
//! some nanoseconds themselves; it is per packet, whichever packet.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::sys::{Stats, enable_stats};
use dnsflow_tests::{agent::Agent, ovs::Daemon};

use crate::bench::{
    distribution::rounded,
    loader::Asker,
    report::Measured,
    stage::{Mode, RULED, Stage, matching, unrelated},
    usage::{Programs, cpu, programs},
};

const PAUSE: Duration = Duration::from_millis(1);

/// Per answer, in microseconds.
#[derive(Clone, Copy, Debug)]
struct Cost {
    agent: f64,
    vswitchd: f64,
    programs: Programs,
}

fn cost(stage: &Stage<'_>, agent: &Agent, name: fn(u32) -> String, count: u32) -> Result<Cost> {
    let vswitchd = stage.lab.daemon(Daemon::Vswitchd)?;
    let mut asker = Asker::new(stage.lab, RULED)?;
    let numbers = stage.fresh(count);
    let before = (cpu(agent.pid())?, cpu(vswitchd)?, programs(agent.pid())?);
    asker.ask_paced(numbers.map(name), PAUSE)?;
    let after = (cpu(agent.pid())?, cpu(vswitchd)?, programs(agent.pid())?);
    let per_answer = |one: Duration, other: Duration| {
        other.saturating_sub(one).as_secs_f64() * 1e6 / f64::from(count)
    };
    Ok(Cost {
        agent: per_answer(before.0, after.0),
        vswitchd: per_answer(before.1, after.1),
        programs: Programs {
            runs: after.2.runs - before.2.runs,
            nanos: after.2.nanos - before.2.nanos,
        },
    })
}

/// The row `cpu_us_per_match`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let _counted = enable_stats(Stats::RunTime).context("cannot count the programs' time")?;
    let agent = stage.installed_agent(Mode::Hold)?;
    // Within the pod's budget of changes.
    let count = stage.scale(3000, 100);
    let matched = cost(stage, &agent, matching, count)?;
    let other = cost(stage, &agent, unrelated, count)?;
    ensure!(other.programs.runs > 0, "the programs have seen no packet");
    stage.end(agent, Mode::Hold, count)?;
    let program = other.programs.nanos as f64 / other.programs.runs.max(1) as f64;
    let vswitchd = matched.vswitchd - other.vswitchd;
    Ok(Measured::default()
        .field("cpu_us_per_match", rounded(matched.agent))?
        .field("details.cpu_us_per_match_vswitchd", rounded(vswitchd))?
        .field("details.cpu_us_per_unrelated", rounded(other.agent))?
        .field(
            "details.cpu_us_per_unrelated_vswitchd",
            rounded(other.vswitchd),
        )?
        .field("details.program_ns_per_packet", rounded(program))?
        .line(
            "CPU per answer that opens an address",
            format!(
                "agent {:.0} µs, vswitchd {vswitchd:.0} µs more",
                matched.agent
            ),
            "agent ≤ 60 µs",
            matched.agent <= 60.0,
        )
        .line(
            "CPU per unrelated answer",
            format!(
                "agent {:.1} µs, programs {program:.0} ns per packet",
                other.agent
            ),
            "agent 0",
            // What its timers cost meanwhile is not an answer's doing.
            other.agent < 1.0,
        ))
}
