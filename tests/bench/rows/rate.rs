//! How many answers per second can each open an address.
//!
//! Pods ask in turns at a fixed rate, whether answers come or not; every name is fresh, so that each
//! answer opens an address and, once a pod has as many cache entries as it may, closes an old one. A rate is
//! sustained if the agent has opened every answer that the program captured, nothing was lost in the
//! ring buffer or refused by the switch or by a limit, at least 99 % of the questions were answered, and 99 % of the
//! addresses were open within [`LATE`]. One agent gets rates in rising steps of a few seconds, until one does not pass.
//! The highest that passed is then held for the full time by a new agent. If it is not sustained, the next attempt has a
//! rate below what this one opened. The agent has the options and the log of an installation; its own metrics say what
//! it has done.
//!
//! In this lab every question and every answer also passes ovs-vswitchd, which forwards packets in user
//! space: `details.path_per_s` is what the way itself carries without the agent.

use std::{
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{account::Account, agent::Agent, ovs::Daemon, pod::PodSpec};
use serde::Serialize;

use crate::bench::{
    distribution::rounded,
    loader::Asker,
    report::Measured,
    stage::{METRICS_AGE, Mode, RULED, Stage, matching, unrelated},
    usage::cpu,
};

/// An address that is open later than this is late.
const LATE: Duration = Duration::from_millis(100);
const FRAMES: &str = "dnsflow_frames_total";
/// The last question of a rate may leave so late.
const SLACK: Duration = Duration::from_millis(20);
/// Between two looks for answers and at the clock.
const TURN: Duration = Duration::from_micros(500);
const STEP: f64 = 1.4;
/// No lower rate is tried.
const RATE_MIN: f64 = 50.0;
/// The next attempt's part of the rate that was not sustained, or of what it opened per second.
const BACK: f64 = 0.9;
/// Attempts for the full time before the row gives up.
const ATTEMPTS: u32 = 6;

/// What came of a rate.
#[derive(Debug)]
struct Outcome {
    per_second: f64,
    /// Why it does not count.
    failed: Option<String>,
    /// Of those that the agent has opened.
    activation: Option<Activation>,
    /// Processor time per answer, in microseconds.
    agent: f64,
    vswitchd: f64,
}

/// How soon the addresses were open: the upper bounds of the agent's histogram below which half and nearly all are.
#[derive(Clone, Copy, Debug, Serialize)]
struct Activation {
    p50: f64,
    p99: f64,
    n: f64,
}

/// The row `answers_per_s`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let path = {
        let mut asker = Asker::new(stage.lab, RULED)?;
        let count = stage.scale(20_000, 500);
        let start = Instant::now();
        asker.ask_all(stage.fresh(count).map(unrelated), 100)?;
        f64::from(count) / start.elapsed().as_secs_f64()
    };
    with_pods(stage, |pods| measure_with(stage, pods, path))
}

/// Does `work` with [`RULED`] and further pods of its namespace.
pub(super) fn with_pods<T>(
    stage: &Stage<'_>,
    work: impl FnOnce(&[String]) -> Result<T>,
) -> Result<T> {
    let others: Vec<PodSpec> = (1..stage.scale(PODS, 2)).map(other).collect();
    for pod in &others {
        stage.lab.add_pod(pod)?;
    }
    let others: Vec<String> = others.iter().map(PodSpec::lsp).collect();
    let pods: Vec<String> = [RULED.to_owned()]
        .into_iter()
        .chain(others.iter().cloned())
        .collect();
    let result = work(&pods);
    for pod in &others {
        stage.lab.delete_pod(pod)?;
    }
    result
}

/// So many pods ask. One alone could open as many addresses as it may have in four seconds: so long
/// it takes at most until the agent knows that one of them is not in use.
const PODS: u8 = 16;

/// One of the pods beside [`RULED`].
fn other(number: u8) -> PodSpec {
    let address = Ipv4Addr::new(10, 244, 0, 100 + number);
    PodSpec::new("ns1", &format!("rate{number}"), address)
}

fn measure_with(stage: &Stage<'_>, pods: &[String], path: f64) -> Result<Measured> {
    let probe = stage.scale(Duration::from_secs(3), Duration::from_millis(500));
    let full = stage.scale(Duration::from_secs(15), Duration::from_secs(1));
    let limit = stage.scale(50_000.0, 150.0);
    let mut why = String::from("the highest rate that was tried");
    let mut rate = stage.scale(2000.0, 100.0);
    let mut sustained = None;
    stage.clear()?;
    let mut agent = stage.installed_agent(Mode::Hold)?;
    while rate < limit {
        let outcome = sustain(stage, &agent, pods, rate, probe)?;
        match outcome.failed {
            None => sustained = Some(rate),
            // An emulated machine carries less than the first rate.
            Some(_) if sustained.is_none() && rate > RATE_MIN => {
                rate /= STEP * STEP;
                ensure!(agent.terminate()?.success(), "the agent has failed");
                stage.clear()?;
                agent = stage.installed_agent(Mode::Hold)?;
            }
            Some(failed) => {
                why = format!("at {rate:.0}/s: {failed}");
                break;
            }
        }
        rate *= STEP;
    }
    ensure!(agent.terminate()?.success(), "the agent has failed");
    let mut rate = sustained.unwrap_or(RATE_MIN);
    let mut attempts = 0;
    let held = loop {
        stage.clear()?;
        let agent = stage.installed_agent(Mode::Hold)?;
        let outcome = sustain(stage, &agent, pods, rate, full)?;
        ensure!(agent.terminate()?.success(), "the agent has failed");
        attempts += 1;
        match &outcome.failed {
            None => break outcome,
            Some(failed) if attempts == ATTEMPTS => {
                why = format!("NOT sustained: {failed}");
                break outcome;
            }
            Some(failed) => {
                why = format!("at {rate:.0}/s: {failed}");
                rate = rate.min(outcome.per_second) * BACK;
            }
        }
    };
    Ok(Measured::default()
        .field("answers_per_s", rounded(held.per_second))?
        .field("details.answers_per_s_activation_us", held.activation)?
        .field("details.answers_per_s_bound", why.clone())?
        .field("details.answers_per_s_cpu_us_agent", rounded(held.agent))?
        .field(
            "details.answers_per_s_cpu_us_vswitchd",
            rounded(held.vswitchd),
        )?
        .field("details.path_per_s", rounded(path))?
        .line(
            "answers per second",
            format!("{:.0} ({why}; the way itself {path:.0}/s)", held.per_second),
            "≥ 10,000",
            held.failed.is_none() && held.per_second >= 10_000.0,
        ))
}

/// Asks at this rate for so long.
fn sustain(
    stage: &Stage<'_>,
    agent: &Agent,
    pods: &[String],
    rate: f64,
    time: Duration,
) -> Result<Outcome> {
    let askers = pods.iter().map(|pod| Asker::new(stage.lab, pod));
    let mut askers = askers.collect::<Result<Vec<_>>>()?;
    let count = (rate * time.as_secs_f64()) as u32;
    let numbers = stage.fresh(count);
    let first = numbers.start;
    let vswitchd = stage.lab.daemon(Daemon::Vswitchd)?;
    let earlier = Answered::of(stage)?;
    let before = (cpu(agent.pid())?, cpu(vswitchd)?);
    let start = Instant::now();
    let (mut sent, mut answered) = (0, 0);
    while answered < count && start.elapsed() < time + LATE + LATE {
        if start.elapsed() < time + SLACK {
            let due = (start.elapsed().as_secs_f64() * rate) as u32;
            for number in sent..due.min(count) {
                askers[number as usize % pods.len()].send(&matching(first + number))?;
            }
            sent = due.min(count).max(sent);
        }
        for asker in &mut askers {
            answered += asker.receive_all()?;
        }
        thread::sleep(TURN);
    }
    // The last barriers.
    thread::sleep(2 * LATE);
    let after = (cpu(agent.pid())?, cpu(vswitchd)?);
    let Answered {
        account,
        frames,
        activations,
    } = Answered::of(stage)?.since(&earlier);
    let activation = activations.activation();
    ensure!(
        activation.is_some() || account.by_kernel > 0,
        "no answer was opened"
    );
    let lost = account.losses();
    let failed = if !lost.is_empty() {
        Some(lost.join(", "))
    } else if account.overrun > 0 {
        Some(format!(
            "{} answers were held for too long",
            account.overrun
        ))
    } else if f64::from(sent) < 0.99 * f64::from(count) {
        Some(format!("only {sent} of {count} questions could be sent"))
    } else if f64::from(answered) < 0.99 * f64::from(count) {
        Some(format!("{answered} of {count} questions were answered"))
    } else if account.opening < frames {
        Some(format!(
            "{} of {frames} answers opened an address",
            account.opening
        ))
    } else {
        // What the kernel opens is not late.
        let p99 = activation.map_or(0.0, |activation| activation.p99);
        (p99 > LATE.as_secs_f64() * 1e6)
            .then(|| format!("p99 of the activation was up to {:.0} ms", p99 / 1e3))
    };
    let each = |before: Duration, after: Duration| {
        (after - before).as_secs_f64() * 1e6 / f64::from(answered.max(1))
    };
    Ok(Outcome {
        per_second: account.opening as f64 / time.as_secs_f64(),
        failed,
        activation,
        agent: each(before.0, after.0),
        vswitchd: each(before.1, after.1),
    })
}

/// What the agent's metrics say. They only grow.
#[derive(Debug)]
struct Answered {
    account: Account,
    frames: u64,
    activations: Histogram,
}

impl Answered {
    /// All that has happened by now.
    fn of(stage: &Stage<'_>) -> Result<Self> {
        thread::sleep(METRICS_AGE);
        let metrics = stage.lab.agent_metrics()?;
        let frames = metrics
            .lines()
            .find_map(|line| line.strip_prefix(FRAMES)?.strip_prefix(' '))
            .context("no number of frames")?;
        Ok(Self {
            account: stage.lab.account()?,
            frames: frames.parse()?,
            activations: Histogram::parse(&metrics),
        })
    }

    /// What has come since `earlier`.
    fn since(self, earlier: &Self) -> Self {
        Self {
            account: self.account.since(earlier.account),
            frames: self.frames - earlier.frames,
            activations: self.activations.since(&earlier.activations),
        }
    }
}

/// How many activations took no longer than each bound, in microseconds; the last bound is infinite.
#[derive(Debug)]
struct Histogram(Vec<(f64, f64)>);

impl Histogram {
    fn parse(metrics: &str) -> Self {
        let buckets = metrics
            .lines()
            .filter_map(|line| line.strip_prefix("dnsflow_activation_seconds_bucket{le=\""))
            .filter_map(|bucket| bucket.split_once("\"} "))
            .filter_map(|(bound, count)| {
                let bound = bound.parse().unwrap_or(f64::INFINITY);
                Some((bound * 1e6, count.parse().ok()?))
            });
        Self(buckets.collect())
    }

    fn since(mut self, earlier: &Self) -> Self {
        for ((_, count), (_, before)) in self.0.iter_mut().zip(&earlier.0) {
            *count -= before;
        }
        self
    }

    /// `None` where nothing was opened.
    fn activation(&self) -> Option<Activation> {
        let n = self.0.last().map(|(_, n)| *n).filter(|n| *n > 0.0)?;
        let below = |part: f64| {
            let bucket = self.0.iter().find(|(_, count)| *count >= part * n);
            bucket.map(|(bound, _)| *bound)
        };
        Some(Activation {
            p50: below(0.5)?,
            p99: below(0.99)?,
            n,
        })
    }
}
