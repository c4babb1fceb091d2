//! What a pod waits for where the kernel opens the addresses of its DNS answers by itself.
//!
//! The pod resolves a fresh name, and connects to its address at once. Rounds by turns: with nothing at the veth, and
//! with the programs. Then the names have a class, and a routing rule lets packets to their addresses pass only with
//! its mark, as a flow would. Without programs, the same rule takes any mark: a first rule makes each look-up of a route
//! slower, which is no work of the programs. No agent reads the ring buffer: it would do so beside the pod's wait.

use std::{
    net::SocketAddrV4,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_common::Reason;

use super::wires::{Attached, MARK, MARK_MASK, OUTSIDE, TO_POD, Wires};
use crate::bench::{
    distribution::{Distribution, rounded},
    loader::{Asker, Connected, Connector},
    report::Measured,
    server::Server,
    stage::{FREE, RULE_NAME, Stage, matching},
    wire,
};

/// The "internet" answers questions there.
const SERVER: SocketAddrV4 = SocketAddrV4::new(OUTSIDE, 53);
/// All addresses of the names.
const ADDRESSES: &str = "198.18.0.0/15";
/// The first packets of a round find no neighbour; they do not count.
const FIRST: u32 = 10;

/// The rounds of one side.
#[derive(Debug, Default)]
struct Side {
    answers: Rounds,
    connections: Rounds,
    /// How many connections had not come about soon: their first packet was lost.
    lost: u32,
}

/// The samples of one figure.
#[derive(Debug, Default)]
struct Rounds {
    all: Vec<f64>,
    /// The 99th percentile of each round.
    p99s: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, round: &[Duration]) -> Result<()> {
        let round = Distribution::micros(round).context("a round")?;
        self.all.extend(round.ascending());
        self.p99s.push(round.quantile(0.99));
        Ok(())
    }

    /// The median of all samples, and that of the rounds' 99th percentiles.
    fn medians(self) -> Result<[f64; 2]> {
        let median = |samples| Distribution::of(samples).map(|found| found.median());
        let medians = median(self.all).zip(median(self.p99s));
        medians.map(<[f64; 2]>::from).context("rounds")
    }
}

impl Side {
    fn round(&mut self, stage: &Stage<'_>, count: u32) -> Result<()> {
        let mut asker = Asker::of_server(stage.lab, FREE, SERVER)?;
        let mut connector = Connector::new(stage.lab, FREE);
        let (mut answers, mut connections) = (Vec::new(), Vec::new());
        for (turn, number) in (0..).zip(stage.fresh(count + FIRST)) {
            connector.prepare()?;
            let start = Instant::now();
            let answer = asker.ask(&matching(number))?;
            let connected = connector.connect(wire::address(number))?;
            let took = start.elapsed();
            if turn < FIRST {
                continue;
            }
            answers.push(answer);
            match connected {
                Connected::Established => connections.push(took),
                Connected::Pending(_) => self.lost += 1,
            }
        }
        self.answers.add(&answers)?;
        self.connections.add(&connections)
    }
}

/// The rows `opened_answer_added_pct` and `opened_connect_added_pct`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let wires = Wires::lay(stage)?;
    let measured = by_turns(&wires);
    wires.remove().context("the veths stay")?;
    let [without, with] = measured?;
    let (lost_without, lost) = (without.lost, with.lost);
    let answers = Added::of(with.answers, without.answers)?;
    let connections = Added::of(with.connections, without.connections)?;
    let target = "≤ +5 % at p50, ≤ +10 % at p99";
    Ok(Measured::default()
        .field("opened_answer_added_pct", answers.percent.map(rounded))?
        .field("opened_connect_added_pct", connections.percent.map(rounded))?
        .field("details.opened_answer_us", answers.micros.map(rounded))?
        .field("details.opened_connect_us", connections.micros.map(rounded))?
        .field("details.opened_first_syn_lost", [lost, lost_without])?
        .line(
            "DNS answer that the kernel opens vs no firewall",
            answers.told(),
            target,
            answers.is_small(),
        )
        .line(
            "… and connect at once",
            format!(
                "{}; {lost} first SYNs lost, {lost_without} without",
                connections.told()
            ),
            target,
            connections.is_small() && lost <= lost_without,
        ))
}

/// What a firewall adds to the median, and to the median of the rounds' 99th percentiles.
struct Added {
    percent: [f64; 2],
    /// The medians with a firewall and without one.
    micros: [f64; 2],
}

impl Added {
    fn of(with: Rounds, without: Rounds) -> Result<Self> {
        let ([p50, p99], [p50_without, p99_without]) = (with.medians()?, without.medians()?);
        let percent = |with: f64, without: f64| (with / without - 1.0) * 100.0;
        Ok(Self {
            percent: [percent(p50, p50_without), percent(p99, p99_without)],
            micros: [p50, p50_without],
        })
    }

    fn told(&self) -> String {
        let ([p50, p99], [with, without]) = (self.percent, self.micros);
        format!("{p50:+.1} % at p50 ({with:.1} µs, {without:.1} without), {p99:+.1} % at p99")
    }

    fn is_small(&self) -> bool {
        self.percent[0] <= 5.0 && self.percent[1] <= 10.0
    }
}

/// The sides without a firewall and with one.
fn by_turns(wires: &Wires<'_>) -> Result<[Side; 2]> {
    let stage = wires.stage;
    let (rounds, count) = stage.scale((20, 300), (1, 20));
    let (pod, _) = wires.ends();
    let route = |to: &str| format!("route add {ADDRESSES} via {to}");
    wires.ip(&pod, &[&route("10.200.0.1")])?;
    wires.ip(&wires.node, &[&route(&OUTSIDE.to_string())])?;
    let _server = Server::start(stage.lab, "inet", SERVER.port())?;
    let rules = |what: &str, mark: &str| {
        let pods = format!("iif {TO_POD} to {ADDRESSES}");
        let commands = [
            format!("rule {what} priority 100 {pods}{mark} lookup main"),
            format!("rule {what} priority 101 {pods} blackhole"),
        ];
        wires.ip(&wires.node, &commands.each_ref().map(String::as_str))
    };
    let (mut without, mut with) = (Side::default(), Side::default());
    for _ in 0..rounds {
        rules("add", "")?;
        let round = without.round(stage, count);
        rules("delete", "")?;
        round?;
        let mark = format!(" fwmark {MARK:#x}/{MARK_MASK:#x}");
        rules("add", &mark)?;
        let attached = wires.node.run(|| {
            let mut attached = Attached::attach(true)?;
            attached.open_below(RULE_NAME, SERVER)?;
            Ok(attached)
        })?;
        let round = with.round(stage, count);
        let opened = attached.capture.counters.of(Reason::Opened);
        wires.node.run(|| {
            attached.detach();
            Ok(())
        })?;
        rules("delete", &mark)?;
        round?;
        let opened = opened?;
        let expected = u64::from(count + FIRST);
        ensure!(
            opened == expected,
            "the kernel has opened the addresses of {opened} of {expected} answers"
        );
    }
    Ok([without, with])
}
