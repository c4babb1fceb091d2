//! What the programs cost a pod's TCP connections.
//!
//! One connection at a time between a pod and the "internet", in each direction, for as long as a round
//! takes: with nothing at the veth, with an empty hook (a clsact qdisc without filters), and with the
//! agent's programs, in turns. The pod's namespace has no firewall, and the programs are attached to
//! its veth like to any other. Percent of the medians, of the direction that suffers more.
//!
//! On the kernel's datapath also from a pod with a firewall to an address that it was told: opened by a flow, and by
//! a group, in turns; the ratio of each turn.
//!
//! The empty hook tells the programs' cost from that of having a hook at all: where a packet socket
//! listens, as Open vSwitch's userspace datapath does, any hook on ingress makes the kernel clone each
//! packet for the socket, which otherwise gets it whole (`sch_handle_ingress` in Linux net/core/dev.c
//! delivers to the last taker before it runs what is hooked). The kernel's datapath has no such socket.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{lab::Datapath, process::run};

use crate::bench::{
    distribution::{Distribution, rounded},
    loader::Asker,
    report::Measured,
    stage::{FREE, OpenBy, RULED, Stage, matching},
    usage::cpu,
    wire,
};

const PORT: u16 = 9001;
const PIECE: usize = 128 << 10;
/// A write that takes longer is an error.
const LIMIT: Duration = Duration::from_secs(10);
/// What the start or the end of the agent makes the switch do is over after this.
const WARM_UP: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Direction {
    FromPod,
    ToPod,
}

/// Megabits per second of one connection of a pod with the "internet".
pub(super) fn connection(
    stage: &Stage<'_>,
    pod: &str,
    to: Ipv4Addr,
    direction: Direction,
) -> Result<f64> {
    let time = stage.scale(Duration::from_millis(500), Duration::from_millis(200));
    let internet = stage.lab.pod("inet").netns();
    let listener = internet.run(|| Ok(TcpListener::bind(("0.0.0.0", PORT))?))?;
    let pod = stage.lab.pod(pod).netns();
    let near = pod.run(|| TcpStream::connect((to, PORT)).context("cannot connect"))?;
    let (far, _) = listener.accept()?;
    let (mut sender, mut receiver) = match direction {
        Direction::FromPod => (near, far),
        Direction::ToPod => (far, near),
    };
    sender.set_write_timeout(Some(LIMIT))?;
    receiver.set_read_timeout(Some(LIMIT))?;
    thread::scope(|scope| {
        let received = scope.spawn(move || -> Result<f64> {
            let mut piece = vec![0; PIECE];
            let (mut bytes, start) = (0, Instant::now());
            loop {
                match receiver.read(&mut piece)? {
                    0 => break,
                    length => bytes += length,
                }
            }
            Ok(bytes as f64 * 8.0 / 1e6 / start.elapsed().as_secs_f64())
        });
        let (piece, start) = (vec![0; PIECE], Instant::now());
        while start.elapsed() < time {
            sender.write_all(&piece)?;
        }
        drop(sender);
        received
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Adds or deletes an empty hook at the pod's veth.
fn hook(stage: &Stage<'_>, what: &str) -> Result<()> {
    let veth = stage.lab.host_veth(FREE)?;
    let mut tc = stage.lab.node_command("tc")?;
    run(tc.args(["qdisc", what, "dev", &veth, "clsact"]))?;
    Ok(())
}

/// Megabits per second from the pod with the firewall to an address that it was told.
fn of_open_address(stage: &Stage<'_>, open_by: OpenBy) -> Result<f64> {
    let agent = stage.new_agent(open_by)?;
    let number = stage.fresh(1).start;
    Asker::new(stage.lab, RULED)?.ask(&matching(number))?;
    thread::sleep(WARM_UP);
    let result = connection(stage, RULED, wire::address(number), Direction::FromPod);
    ensure!(agent.terminate()?.success(), "the agent has failed");
    result
}

/// The row `tcp_throughput_pct`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let rounds = stage.scale(10, 1);
    let mut without = [Vec::new(), Vec::new()];
    let mut hooked = [Vec::new(), Vec::new()];
    let mut with = [Vec::new(), Vec::new()];
    let directions = [Direction::FromPod, Direction::ToPod];
    let round = |into: &mut [Vec<f64>; 2]| -> Result<()> {
        for (direction, into) in directions.into_iter().zip(into) {
            let to = wire::address(stage.fresh(1).start);
            into.push(connection(stage, FREE, to, direction)?);
        }
        Ok(())
    };
    let mut by_marks = Vec::new();
    let mut used = Vec::new();
    for _ in 0..rounds {
        thread::sleep(WARM_UP);
        round(&mut without)?;
        hook(stage, "add")?;
        round(&mut hooked)?;
        hook(stage, "delete")?;
        let agent = stage.new_agent(OpenBy::Flows)?;
        thread::sleep(WARM_UP);
        let (before, start) = (cpu(agent.pid())?, Instant::now());
        round(&mut with)?;
        let share = (cpu(agent.pid())? - before).div_duration_f64(start.elapsed());
        used.push(share * 100.0);
        ensure!(agent.terminate()?.success(), "the agent has failed");
        if stage.lab.datapath() == Datapath::System {
            let flows = of_open_address(stage, OpenBy::Flows)?;
            by_marks.push(of_open_address(stage, OpenBy::Marks)? / flows * 100.0);
        }
    }
    let by_marks = Distribution::of(by_marks).map(|found| found.latency());
    let used = Distribution::of(used).context("rounds")?;
    let median = |samples| Distribution::of(samples).map(|found| found.median());
    let [from_pod, to_pod] = without.map(median);
    let [from_pod_hooked, to_pod_hooked] = hooked.map(median);
    let [from_pod_with, to_pod_with] = with.map(median);
    let percent = |with: Option<f64>, without: Option<f64>| Some(with? / without? * 100.0);
    let out = percent(from_pod_with, from_pod).context("rounds")?;
    let into = percent(to_pod_with, to_pod).context("rounds")?;
    let worse = out.min(into);
    let of_hook = percent(from_pod_with, from_pod_hooked)
        .into_iter()
        .chain(percent(to_pod_with, to_pod_hooked))
        .fold(f64::MAX, f64::min);
    Ok(Measured::default()
        .field("tcp_throughput_pct", rounded(worse))?
        .field("details.tcp_throughput_pct_from_pod", rounded(out))?
        .field("details.tcp_throughput_pct_to_pod", rounded(into))?
        .field("details.tcp_throughput_pct_of_empty_hook", rounded(of_hook))?
        .field("details.tcp_agent_cpu_pct", rounded(used.median()))?
        .field("details.tcp_mbit_per_s_from_pod", from_pod)?
        .field("details.tcp_mbit_per_s_to_pod", to_pod)?
        .field("details.tcp_throughput_pct_verdict_of_flows", by_marks)?
        .line(
            "TCP throughput with the programs",
            format!(
                "{out:.1} % from the pod, {into:.1} % to it; {of_hook:.1} % of an empty hook{}",
                by_marks.map_or_else(String::new, |found| format!(
                    "; by marks {:.1} % of by flows",
                    found.p50
                ))
            ),
            "≥ 98 %",
            worse >= 98.0,
        ))
}
