//! First packets lost: a fresh name is resolved, and the pod connects at once.
//!
//! A packet socket on the pod's veth counts SYNs; a connection with more than one has lost its first.
//! A connection that is not there after 20 ms waits beside the following ones until the SYN that
//! repeats a lost one has been seen, a second later.
//!
//! Three ways to open the address: the agent that holds the answer, the agent that only observes, and
//! `ovs-ofctl add-flow` started as soon as a packet socket has seen the answer, which is kinder than
//! dnstap would be. By marks, a fourth one: the kernel, while the agent is stopped. `n` says how many of each: what
//! loses every first packet is counted less often.
//!
//! Beside neighbours, the pod also sends a stream of datagrams to denied addresses next to those that
//! it is about to resolve, so that drop megaflows which cover them are there when they are opened.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{Ipv4Addr, UdpSocket},
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::activation::add_by_ofctl;
use crate::bench::{
    distribution::Distribution,
    loader::{Asker, Connected, Connector},
    report::Measured,
    stage::{Mode, OpenBy, RULED, Stage, matching},
    tap::{Tap, dns_answer, syn},
    wire,
};

/// A lost SYN comes again after a second (RFC 6298, section 2.1).
const REPEATED: Duration = Duration::from_millis(1300);
/// Connections that wait for their second SYN at the same time.
const WAITING_MAX: usize = 400;
const PATIENCE: Duration = Duration::from_millis(50);
/// Every fourth address is resolved; those between are neighbours.
const STRIDE: u32 = 4;
/// How many of the addresses to come have neighbours that are kept busy.
const AHEAD: u32 = 16;
/// Between two datagrams to neighbours.
const NEIGHBOUR_PAUSE: Duration = Duration::from_millis(1);

/// The pod resolves and connects to more names within a minute than it may by default.
const ROOM: [&str; 2] = ["--max-addresses-per-pod=16384", "--max-flow-changes=65536"];

/// How the address is opened.
#[derive(Clone, Copy, Debug)]
enum Way {
    Agent(Mode),
    /// By the kernel alone: the agent is stopped (SIGSTOP).
    Kernel,
    Ofctl,
}

/// What became of the connections, and how long their DNS answers took.
#[derive(Debug)]
struct Lost {
    connections: usize,
    lost: usize,
    answers: Distribution,
    answers_lost: usize,
}

/// The rows `syn_lost.…`.
pub(crate) fn alone(stage: &Stage<'_>) -> Result<Measured> {
    let figure = "first SYN lost, hold";
    let hold = lost(stage, Way::Agent(Mode::Hold), stage.scale(10_000, 30), None)?;
    let measured = Measured::default()
        .field("syn_lost.hold", hold.lost)?
        .field("syn_lost.n.hold", hold.connections)?
        .line(figure, told(&hold), "0", hold.lost == 0);
    let observe = lost(
        stage,
        Way::Agent(Mode::Observe),
        stage.scale(1000, 10),
        None,
    )?;
    let ofctl = lost(stage, Way::Ofctl, stage.scale(300, 5), None)?;
    let measured = match stage.open_by {
        OpenBy::Flows => measured,
        OpenBy::Marks => {
            let kernel = lost(stage, Way::Kernel, stage.scale(3000, 10), None)?;
            measured
                .field("syn_lost.stopped", kernel.lost)?
                .field("syn_lost.n.stopped", kernel.connections)?
                .line(
                    "first SYN lost, the agent stopped",
                    told(&kernel),
                    "0",
                    kernel.lost == 0,
                )
        }
    };
    measured
        .field("syn_lost.observe", observe.lost)?
        .field("syn_lost.n.observe", observe.connections)?
        .field("syn_lost.ofctl", ofctl.lost)?
        .field("syn_lost.n.ofctl", ofctl.connections)
        .map(|measured| {
            measured
                .line(
                    "first SYN lost, observe",
                    told(&observe),
                    "to compare",
                    true,
                )
                .line(
                    "first SYN lost, ovs-ofctl",
                    told(&ofctl),
                    "to compare",
                    true,
                )
        })
}

/// The rows `syn_lost_neighbour.hold` and `details.answer_added_us_neighbour`.
pub(crate) fn beside_neighbours(stage: &Stage<'_>) -> Result<Measured> {
    let figure = "first SYN lost beside denied neighbours, hold";
    let current = AtomicU32::new(0);
    let count = stage.scale(1000, 20);
    // By flows, each answer waits for milliseconds.
    let of_hold = match stage.open_by {
        OpenBy::Flows => count,
        OpenBy::Marks => stage.scale(10_000, 20),
    };
    let hold = lost(stage, Way::Agent(Mode::Hold), of_hold, Some(&current))?;
    let measured = Measured::default()
        .field("syn_lost_neighbour.hold", hold.lost)?
        .field("syn_lost_neighbour.n.hold", hold.connections)?
        .field("details.neighbour_answers_lost", hold.answers_lost)?
        .line(figure, told(&hold), "0", hold.lost == 0);
    let observe = lost(stage, Way::Agent(Mode::Observe), count, Some(&current))?;
    let added = hold.answers.above(&observe.answers);
    Ok(measured
        .field("syn_lost_neighbour.observe", observe.lost)?
        .field("syn_lost_neighbour.n.observe", observe.connections)?
        .line(
            "first SYN lost beside denied neighbours, observe",
            told(&observe),
            "to compare",
            true,
        )
        .field("details.answer_added_us_neighbour", added)?
        .line(
            "DNS answer beside denied neighbours: hold vs observe",
            format!("{:+.0} µs at p50, {:+.0} µs at p99", added.p50, added.p99),
            "to compare",
            true,
        ))
}

fn told(lost: &Lost) -> String {
    format!("{} of {}", lost.lost, lost.connections)
}

/// Resolves and connects `count` times; with `current`, beside a stream to the neighbours of the
/// number that it holds.
fn lost(stage: &Stage<'_>, way: Way, count: u32, current: Option<&AtomicU32>) -> Result<Lost> {
    stage.clear()?;
    let agent = match way {
        Way::Agent(mode) => Some((stage.agent(mode, &ROOM)?, mode)),
        Way::Kernel => Some((stage.agent(Mode::Hold, &ROOM)?, Mode::Hold)),
        Way::Ofctl => None,
    };
    if let (Way::Kernel, Some((agent, _))) = (way, &agent) {
        agent.freeze()?;
    }
    let stop = AtomicBool::new(false);
    let mut answers = Tap::open(stage.lab, RULED, PATIENCE)?;
    let mut syns = Tap::open(stage.lab, RULED, PATIENCE)?;
    let result = thread::scope(|scope| {
        let seen = scope.spawn(|| -> Result<BTreeMap<_, usize>> {
            let mut seen = BTreeMap::new();
            while !stop.load(Ordering::Relaxed) {
                if let Some(frame) = syns.read()?
                    && let Some(connection) = syn(frame.frame)
                {
                    *seen.entry(connection).or_default() += 1;
                }
            }
            syns.complete()?;
            Ok(seen)
        });
        let opener = matches!(way, Way::Ofctl).then(|| {
            scope.spawn(|| -> Result<()> {
                while !stop.load(Ordering::Relaxed) {
                    if let Some(frame) = answers.read()?
                        && let Some((number, _)) = dns_answer(frame.frame).and_then(wire::told)
                    {
                        add_by_ofctl(stage.lab, &stage.flow, number)?;
                    }
                }
                Ok(())
            })
        });
        let neighbours = current.map(|current| {
            let lab = stage.lab;
            let stop = &stop;
            scope.spawn(move || visit_neighbours(lab, current, stop))
        });
        let connected = connect_all(stage, count, current);
        stop.store(true, Ordering::Relaxed);
        for thread in [opener, neighbours].into_iter().flatten() {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        let seen = seen
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        anyhow::Ok((seen, connected?))
    });
    let (seen, answers) = result?;
    if let Some((agent, mode)) = agent {
        if matches!(way, Way::Kernel) {
            agent.thaw()?;
        }
        stage.end(agent, mode, count)?;
    }
    ensure!(
        seen.len() == count as usize,
        "{count} connections, and SYNs of {}",
        seen.len()
    );
    Ok(Lost {
        connections: seen.len(),
        lost: seen.values().filter(|syns| **syns > 1).count(),
        answers: Distribution::micros(&answers).context("answers")?,
        answers_lost: count as usize - answers.len(),
    })
}

/// Returns how long the DNS answers took, without lost ones.
fn connect_all(
    stage: &Stage<'_>,
    count: u32,
    current: Option<&AtomicU32>,
) -> Result<Vec<Duration>> {
    let mut answers = Vec::new();
    let mut asker = Asker::new(stage.lab, RULED)?;
    let mut connector = Connector::new(stage.lab, RULED);
    let stride = if current.is_some() { STRIDE } else { 1 };
    let mut waiting: VecDeque<(Instant, OwnedFd)> = VecDeque::new();
    let first = stage
        .fresh((count + 1) * stride)
        .start
        .next_multiple_of(STRIDE);
    if let Some(current) = current {
        current.store(first, Ordering::Relaxed);
        // The neighbours' drop megaflows come first.
        thread::sleep(Duration::from_millis(300));
    }
    for turn in 0..count {
        let number = first + turn * stride;
        if let Some(current) = current {
            current.store(number, Ordering::Relaxed);
        }
        connector.prepare()?;
        answers.extend(asker.ask_until_answered(&matching(number))?);
        match connector.connect(wire::address(number))? {
            Connected::Established => {}
            Connected::Pending(socket) => waiting.push_back((Instant::now(), socket)),
        }
        while let Some((since, _)) = waiting.front()
            && (since.elapsed() > REPEATED || waiting.len() > WAITING_MAX)
        {
            thread::sleep(REPEATED.saturating_sub(since.elapsed()));
            waiting.pop_front();
        }
    }
    if let Some((since, _)) = waiting.back() {
        thread::sleep(REPEATED.saturating_sub(since.elapsed()));
    }
    // What was sent last is still on its way to the capture.
    thread::sleep(2 * PATIENCE);
    Ok(answers)
}

/// Sends datagrams to the addresses between those that are resolved, around `current` and ahead.
fn visit_neighbours(
    lab: &dnsflow_tests::lab::Lab,
    current: &AtomicU32,
    stop: &AtomicBool,
) -> Result<()> {
    let socket = lab
        .pod(RULED)
        .netns()
        .run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?))?;
    let mut turn = 0;
    while !stop.load(Ordering::Relaxed) {
        let base = current.load(Ordering::Relaxed) / STRIDE * STRIDE;
        for neighbour in 1..STRIDE {
            let number = base + turn % AHEAD * STRIDE + neighbour;
            socket
                .send_to(&[0], (wire::address(number), 9))
                .context("a datagram to a neighbour")?;
        }
        turn += 1;
        thread::sleep(NEIGHBOUR_PAUSE);
    }
    Ok(())
}
