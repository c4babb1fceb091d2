//! How soon an answer is a flow.
//!
//! - **The agent**: from the time stamp that the TC program took (`bpf_ktime_get_ns`) to the barrier's
//!   reply, as the agent itself says in its event `opened`. Fresh names, one after the other, with a
//!   pause between them. By marks, answers of a shape that the kernel leaves to the agent.
//! - **ovs-ofctl**: the proof of concept starts `ovs-ofctl add-flow` for each answer. Here a
//!   packet socket on the veth of another pod sees the answer (the kernel's time stamp, as above), and
//!   `ovs-ofctl add-flow`, started at once, has ended: it waits for a barrier too. Answers go to the two
//!   pods in turns.
//! - **dnstap**: unbound answers, and says so by dnstap to a socket that is read at once; a flow of the
//!   same shape is written by the agent's own OpenFlow client and confirmed by a barrier. The start is
//!   the very answer on the pod's veth, by the kernel's time stamp. The agent handles the same
//!   answers. What is compared is thus the way that the news takes: the writing is the same.

use std::{
    collections::BTreeMap,
    process::Stdio,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::lab::Lab;

use crate::bench::{
    distribution::{Distribution, rounded},
    dnstap,
    loader::Asker,
    openflow::Client,
    report::Measured,
    server::Server,
    stage::{DNS_POD, FREE, FREE_ADDRESS, FlowTemplate, Mode, RULED, Stage, left, matching},
    tap::{Tap, dns_answer, wall},
    wire,
};

const PAUSE: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_millis(50);
/// unbound keeps what it has to tell for a second at most.
const TOLD_LIMIT: Duration = Duration::from_secs(10);
/// Where the server behind unbound listens.
const UPSTREAM: u16 = 5400;

/// The rows `activation_us` and `activation_vs_ofctl`.
pub(crate) fn agent_and_ofctl(stage: &Stage<'_>) -> Result<Measured> {
    let pairs = stage.scale(500, 5);
    let alone = stage.scale(2500, 50);
    let agent = stage.agent(Mode::Hold, &[])?;
    let mut ruled = Asker::new(stage.lab, RULED)?;
    let quiet = stage.fresh(alone);
    ruled.ask_paced(quiet.clone().map(left), PAUSE)?;
    let activation = stage.activations(&agent, &quiet.collect::<Vec<_>>())?;
    let activation = Distribution::of(activation.into_values().collect()).context("answers")?;

    let mut free = Asker::new(stage.lab, FREE)?;
    let mut tap = Tap::open(stage.lab, FREE, PATIENCE)?;
    let mut by_ofctl = Vec::new();
    let mut numbers = Vec::new();
    for _ in 0..pairs {
        let number = stage.fresh(1);
        ruled.ask(&left(number.start))?;
        numbers.push(number.start);
        thread::sleep(PAUSE);
        let number = stage.fresh(1).start;
        free.ask(&matching(number))?;
        let seen = loop {
            let seen = tap.read()?.context("the answer was not captured")?;
            if dns_answer(seen.frame)
                .and_then(wire::told)
                .is_some_and(|told| told.0 == number)
            {
                break seen.at;
            }
        };
        add_by_ofctl(stage.lab, &stage.flow, number)?;
        by_ofctl.push(wall().saturating_sub(seen));
        thread::sleep(PAUSE);
    }
    let in_turns = stage.activations(&agent, &numbers)?;
    let in_turns = Distribution::of(in_turns.into_values().collect()).context("answers")?;
    let by_ofctl = Distribution::micros(&by_ofctl).context("answers")?;
    stage.end(agent, Mode::Hold, alone + pairs)?;

    let latency = activation.latency();
    let ratio = by_ofctl.median() / in_turns.median();
    Ok(Measured::default()
        .field("activation_us", latency)?
        .field("activation_vs_ofctl", rounded(ratio))?
        .field("details.activation_beside_ofctl_us", in_turns.latency())?
        .field("details.ofctl_us", by_ofctl.latency())?
        .line(
            "activation",
            format!("p50 {:.0} µs, p99 {:.0} µs", latency.p50, latency.p99),
            "p50 ≤ 150 µs, p99 ≤ 1 ms",
            latency.p50 <= 150.0 && latency.p99 <= 1000.0,
        )
        .line(
            "activation vs ovs-ofctl",
            format!(
                "{ratio:.0} times faster ({:.1} ms)",
                by_ofctl.median() / 1e3
            ),
            "≥ 50 times at p50",
            ratio >= 50.0,
        )
        .panel(
            "From the answer on the wire to its flow in the switch",
            [("dnsflow", activation), ("ovs-ofctl add-flow", by_ofctl)],
        ))
}

/// What the proof of concept does with an answer.
pub(crate) fn add_by_ofctl(lab: &Lab, flow: &FlowTemplate, number: u32) -> Result<()> {
    let flow = flow.text(wire::address(number));
    let status = lab
        .node_command("ovs-ofctl")?
        .args(["--protocols=OpenFlow15", "add-flow", "br-int", &flow])
        .stdin(Stdio::null())
        .status()
        .context("cannot run ovs-ofctl")?;
    ensure!(status.success(), "ovs-ofctl has failed");
    Ok(())
}

/// The row `activation_vs_dnstap`.
pub(crate) fn dnstap(stage: &Stage<'_>) -> Result<Measured> {
    stage.without_server(|| behind_unbound(stage))
}

fn behind_unbound(stage: &Stage<'_>) -> Result<Measured> {
    let count = stage.scale(1000, 10);
    let lab = stage.lab;
    let _upstream = Server::start(lab, DNS_POD, UPSTREAM)?;
    let socket = lab.socket("dnstap.sock");
    let listener = dnstap::listen(&socket)?;
    lab.serve_dns_tapped(UPSTREAM, &socket)?;
    let mut stream = dnstap::Stream::accept(&listener)?;
    let agent = stage.agent(Mode::Hold, &[])?;

    let numbers: Vec<u32> = stage.fresh(count).collect();
    let mut client = Client::connect(lab.socket("br-int.mgmt"))?;
    // The agent was asked for others until it held answers.
    let is_of_row = |number: &u32| numbers.contains(number);
    let (stop, count_told) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (told, seen) = thread::scope(|scope| {
        let told = scope.spawn(|| -> Result<BTreeMap<u32, Duration>> {
            let mut told = BTreeMap::new();
            while let Some(answer) = stream.answer(&stop)? {
                if let Some((number, address)) =
                    wire::told(&answer).filter(|(number, _)| is_of_row(number))
                {
                    client.add(&stage.flow.key, FREE_ADDRESS, address)?;
                    told.insert(number, wall());
                    count_told.store(told.len(), Ordering::Relaxed);
                }
            }
            Ok(told)
        });
        let seen = ask_and_see(stage, &numbers);
        // Whatever has happened, the reader has to end.
        let limit = Instant::now() + TOLD_LIMIT;
        while count_told.load(Ordering::Relaxed) < numbers.len() && Instant::now() < limit {
            thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, Ordering::Relaxed);
        let told = told
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        anyhow::Ok((told?, seen?))
    })?;
    let ours = stage.activations(&agent, &numbers)?;
    stage.end(agent, Mode::Hold, count)?;
    let ours = Distribution::of(ours.into_values().collect()).context("answers")?;
    let tapped: Vec<Duration> = numbers
        .iter()
        // An answer that is held can be told before it is on the veth again.
        .filter_map(|number| Some(told.get(number)?.saturating_sub(*seen.get(number)?)))
        .collect();
    // unbound drops what its queue has no room for: a result.
    let untold = numbers.len() - tapped.len();
    let tapped = Distribution::micros(&tapped).context("dnstap has told no answer")?;
    let ratio = tapped.median() / ours.median();
    Ok(Measured::default()
        .field("details.dnstap_untold", untold)?
        .field("activation_vs_dnstap", rounded(ratio))?
        .field("details.activation_beside_dnstap_us", ours.latency())?
        .field("details.dnstap_us", tapped.latency())?
        .line(
            "activation vs dnstap",
            format!(
                "{ratio:.0} times faster ({:.1} ms); dnstap leaves out {untold} of {count} answers",
                tapped.median() / 1e3
            ),
            "≥ 10 times at p50",
            ratio >= 10.0,
        )
        .panel(
            "The same behind unbound: dnsflow, and a reader of dnstap",
            [("dnsflow", ours), ("unbound's dnstap", tapped)],
        ))
}

/// Asks for these names, one after the other; returns when each answer was on the pod's veth.
fn ask_and_see(stage: &Stage<'_>, numbers: &[u32]) -> Result<BTreeMap<u32, Duration>> {
    let mut tap = Tap::open(stage.lab, RULED, PATIENCE)?;
    let mut asker = Asker::new(stage.lab, RULED)?;
    let mut seen = BTreeMap::new();
    for number in numbers {
        asker.ask(&matching(*number))?;
        let start = Instant::now();
        while !seen.contains_key(number) {
            ensure!(start.elapsed() < TOLD_LIMIT, "the answer was not captured");
            if let Some(frame) = tap.read()?
                && let Some(answer) = dns_answer(frame.frame)
                && let Some((number, _)) = wire::told(answer)
            {
                seen.insert(number, frame.at);
            }
        }
        thread::sleep(PAUSE);
    }
    Ok(seen)
}
