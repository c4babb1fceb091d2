//! How many answers the pods get for addresses that are open already, as most answers are.
//!
//! Sixteen pods ask for their names again and again, each with some questions open, as fast as the answers come. By
//! turns for names of their rule, and for names that no rule mentions: the kernel lets these pass by itself.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::rate::with_pods;
use crate::bench::{
    distribution::{Distribution, rounded},
    loader::Asker,
    report::Measured,
    stage::{METRICS_AGE, Mode, Stage, matching, unrelated},
    usage::cpu,
};

/// Names of each pod.
const NAMES: u32 = 100;
/// Questions of a pod that are open at the same time.
const OPEN: u32 = 4;
/// Between two looks for answers when there is none.
const TURN: Duration = Duration::from_micros(50);
/// An answer that takes longer is lost.
const LOST: Duration = Duration::from_millis(100);

/// A pod that asks for its names in turn.
struct Pod {
    asker: Asker,
    names: Vec<String>,
    others: Vec<String>,
    next: usize,
    open: u32,
    last: Instant,
}

impl Pod {
    /// Takes answers, and asks further questions. Returns how many answers there were.
    fn turn(&mut self, of_rule: bool) -> Result<u32> {
        let answered = self.asker.receive_all()?;
        self.open = self.open.saturating_sub(answered);
        if answered > 0 {
            self.last = Instant::now();
        } else if self.last.elapsed() > LOST {
            self.open = 0;
        }
        let names = if of_rule { &self.names } else { &self.others };
        while self.open < OPEN {
            self.asker.send(&names[self.next % names.len()])?;
            self.next += 1;
            self.open += 1;
        }
        Ok(answered)
    }
}

/// The row `known_answers_pct`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    with_pods(stage, |pods| {
        let agent = stage.installed_agent(Mode::Hold)?;
        let pods = pods.iter().map(|pod| {
            let mut asker = Asker::new(stage.lab, pod)?;
            let numbers = stage.fresh(NAMES);
            asker.ask_all(numbers.clone().map(matching), 1)?;
            Ok(Pod {
                asker,
                names: numbers.clone().map(matching).collect(),
                others: numbers.map(unrelated).collect(),
                next: 0,
                open: 0,
                last: Instant::now(),
            })
        });
        let mut pods: Vec<Pod> = pods.collect::<Result<_>>()?;
        let mut sides = [Vec::new(), Vec::new()];
        let mut each = Vec::new();
        for _ in 0..stage.scale(10, 1) {
            for (of_rule, rates) in [false, true].into_iter().zip(&mut sides) {
                let (before, start) = (cpu(agent.pid())?, Instant::now());
                let answered = ask(
                    &mut pods,
                    of_rule,
                    stage.scale(Duration::from_secs(2), LOST),
                )?;
                rates.push(f64::from(answered) / start.elapsed().as_secs_f64());
                // What is open belongs to this round, also for the agent.
                thread::sleep(LOST);
                if of_rule {
                    let used = (cpu(agent.pid())? - before).as_secs_f64() * 1e6;
                    each.push(used / f64::from(answered.max(1)));
                }
            }
        }
        thread::sleep(METRICS_AGE);
        let losses = stage.lab.account()?.losses();
        ensure!(agent.terminate()?.success(), "the agent has failed");
        ensure!(
            stage.short || losses.is_empty(),
            "a limit took part: {}",
            losses.join(", ")
        );
        let median = |samples| {
            Distribution::of(samples)
                .map(|found| found.median())
                .context("rounds")
        };
        let [without, with] = sides;
        let (without, with, each) = (median(without)?, median(with)?, median(each)?);
        let percent = with / without * 100.0;
        Ok(Measured::default()
            .field("known_answers_pct", rounded(percent))?
            .field("details.known_answers_per_s", [with, without].map(rounded))?
            .field("details.known_answers_cpu_us_agent", rounded(each))?
            .line(
                "answers per second, addresses open already",
                format!(
                    "{with:.0}, {percent:.1} % of names without a rule; agent {each:.1} µs each"
                ),
                "≥ 90 %, agent ≤ 10 µs",
                percent >= 90.0 && each <= 10.0,
            ))
    })
}

/// All pods ask for so long. Returns how many answers they got.
fn ask(pods: &mut [Pod], of_rule: bool, time: Duration) -> Result<u32> {
    let start = Instant::now();
    for pod in &mut *pods {
        pod.last = start;
        pod.open = 0;
    }
    let mut answered = 0;
    while start.elapsed() < time {
        let mut now = 0;
        for pod in &mut *pods {
            now += pod.turn(of_rule)?;
        }
        if now == 0 {
            thread::sleep(TURN);
        }
        answered += now;
    }
    Ok(answered)
}
