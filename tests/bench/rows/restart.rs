//! What a restart of ovn-controller costs with 10,000 addresses in use.
//!
//! A pod was told 10,000 addresses, and sends datagrams to all of them in turns. So does a pod whose
//! namespace has no firewall: what that pod loses is not dnsflow's doing. Each datagram has a number, and a
//! socket in the "internet" notes the numbers that get there. ovn-controller ends and starts again, and takes
//! all flows of the bridge away, also ours, before it writes its own. Measured are the datagrams that did not
//! get there, and how long the switch does not have all of our flows.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use dnsflow_tests::{
    ovs::{Daemon, Stop},
    process::wait_until,
};

use crate::bench::{
    loader::Asker,
    report::Measured,
    room,
    stage::{FREE, Mode, RULED, Stage, WARM_UP},
    wire,
};

const PORT: u16 = 9002;
/// Between two datagrams of a pod.
const PACE: Duration = Duration::from_millis(1);
/// Datagrams flow before the restart, and after the switch has all flows again.
const QUIET: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);
/// The switch has all flows again if it had them for so long.
const SETTLED: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(60);
/// The pods, as a datagram names its sender.
const PODS: [&str; 2] = [RULED, FREE];

/// The row `restart_lost`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let addresses = stage.scale(10_000, 100);
    let limits = ["--max-addresses-per-pod=16384", "--max-flow-changes=65536"];
    let agent = stage.agent(Mode::Hold, &limits)?;
    let numbers = stage.fresh(addresses);
    let of_warm_up = stage.lab.dnsflow_flow_count()?;
    stage.resolve(&mut Asker::new(stage.lab, RULED)?, numbers.clone(), WARM_UP)?;
    let flows = of_warm_up + stage.flows_of_an_address() * usize::try_from(addresses)?;
    wait_until("the flows of all addresses", LIMIT, || {
        Ok(stage.lab.dnsflow_flow_count()? == flows)
    })?;
    let internet = stage.lab.pod("inet").netns();
    let receiver = internet.run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?))?;
    room(&receiver)?;
    receiver.set_read_timeout(Some(POLL))?;
    let sockets = PODS.map(|pod| {
        let pod = stage.lab.pod(pod).netns();
        pod.run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?))
    });
    let [ruled, free] = sockets;
    let sockets = [ruled?, free?];

    let is_sending = AtomicBool::new(true);
    let is_receiving = AtomicBool::new(true);
    let (sent, received, away) = thread::scope(|scope| {
        let sender = scope.spawn(|| -> Result<u32> {
            let mut sent = 0;
            for number in numbers.clone().cycle() {
                if !is_sending.load(Ordering::Relaxed) {
                    break;
                }
                for (pod, socket) in (0u8..).zip(&sockets) {
                    let [a, b, c, d] = u32::to_be_bytes(sent);
                    socket
                        .send_to(&[pod, a, b, c, d], (wire::address(number), PORT))
                        .context("a datagram")?;
                }
                sent += 1;
                thread::sleep(PACE);
            }
            Ok(sent)
        });
        let received = scope.spawn(|| {
            let mut received = [BTreeSet::new(), BTreeSet::new()];
            let mut datagram = [0; 5];
            while is_receiving.load(Ordering::Relaxed) {
                if let Ok(5) = receiver.recv(&mut datagram)
                    && let [pod, a, b, c, d] = datagram
                    && let Some(received) = received.get_mut(usize::from(pod))
                {
                    received.insert(u32::from_be_bytes([a, b, c, d]));
                }
            }
            received
        });
        let away = restart(stage, flows);
        is_sending.store(false, Ordering::Relaxed);
        let sent = sender
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        thread::sleep(QUIET);
        is_receiving.store(false, Ordering::Relaxed);
        let received = received
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        anyhow::Ok((sent?, received, away?))
    })?;
    stage.end(agent, Mode::Hold, addresses)?;

    let [ruled, free] = received.map(|received| sent as usize - received.len());
    let away_ms = away.as_secs_f64() * 1e3;
    Ok(Measured::default()
        .field("restart_lost", ruled)?
        .field("details.restart_lost_without_firewall", free)?
        .field("details.restart_sent", sent)?
        .field("details.restart_flows", flows)?
        .field("restart_right_again_ms", away_ms.round())?
        .line(
            "restart of ovn-controller, 10,000 addresses in use",
            format!(
                "{ruled} of {sent} datagrams lost, {free} without a firewall; {flows} flows right after {away_ms:.0} ms"
            ),
            "to compare",
            true,
        ))
}

/// Restarts ovn-controller. Returns the time from its end to the moment from which on the switch has all
/// flows.
fn restart(stage: &Stage<'_>, flows: usize) -> Result<Duration> {
    thread::sleep(QUIET);
    let start = Instant::now();
    stage.lab.restart(Daemon::OvnController, Stop::Terminate)?;
    let mut right_since = None;
    while start.elapsed() < LIMIT {
        let is_right = stage.lab.dnsflow_flow_count()? == flows;
        right_since = match (is_right, right_since) {
            (false, _) => None,
            (true, None) => Some(start.elapsed()),
            (true, since) => since,
        };
        if let Some(since) = right_since
            && start.elapsed() > since + SETTLED
        {
            return Ok(since);
        }
        thread::sleep(POLL);
    }
    anyhow::bail!("the switch does not have {flows} flows again after {LIMIT:?}")
}
