//! What the programs cost a pod's TCP connections where the kernel forwards by itself.
//!
//! Open vSwitch's userspace datapath takes packets by a socket, for which any hook at the veth makes the kernel clone
//! them (`throughput.rs`). The kernel's datapath has no such socket, but needs a module that this kernel may lack, and
//! an emulated machine takes long for each instruction of the programs. Here the node's kernel routes between the veth
//! of a pod and one of the "internet". The packets pass the programs in the same place as with the kernel's datapath.
//!
//! Rounds by turns with nothing at the veth, with an empty hook, with the programs, and with all that the programs can
//! have to do for a packet: marks are on, the destination has one, and attempts to connect are told of. Once with the
//! veths' segmentation offload, as in a cluster, and once without: then each packet is one segment.

use std::{fs, net::Ipv4Addr, num::NonZeroU32, process::Command, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use dnsflow_agent::{
    capture::{self, Capture},
    clock::now,
};
use dnsflow_core::{Input, io::input::SourceAddresses, ovn::rows::RowId};
use dnsflow_tests::{netns::NetNs, process::run};
use tokio::runtime::{Builder, Runtime};

use super::throughput::{Direction, connection};
use crate::bench::{
    distribution::{Distribution, rounded},
    report::Measured,
    stage::{FREE, Stage},
};

/// The host's side of the pod's veth, and of the other one.
const TO_POD: &str = "routed0";
const OUT: &str = "routed1";
/// The pods' side of both.
const INSIDE: &str = "eth9";
const POD: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 2);
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 201, 0, 2);
/// `--mark-mask`, by default.
const MARK_MASK: NonZeroU32 = NonZeroU32::new(0xffe0_0000).unwrap();
/// Longer than the row takes.
const LONG: Duration = Duration::from_secs(3600);

/// What is at the pod's veth.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Hook {
    Nothing,
    Empty,
    Programs,
    Marks,
}

const HOOKS: [Hook; 4] = [Hook::Nothing, Hook::Empty, Hook::Programs, Hook::Marks];
const DIRECTIONS: [Direction; 2] = [Direction::FromPod, Direction::ToPod];

/// The programs of this process, at the pod's veth.
struct Attached {
    capture: Capture,
    runtime: Runtime,
}

impl Attached {
    /// To be called in the node's namespace.
    fn attach(marks: bool) -> Result<Self> {
        const ROW: RowId = RowId::new(1);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let options = capture::Options {
            mark_mask: marks.then_some(MARK_MASK),
            ..capture::Options::default()
        };
        let mut capture = {
            let _runtime = runtime.enter();
            capture::load(&options, runtime.handle())?
        };
        let sources = SourceAddresses {
            mac: None,
            ips: vec![POD.into()],
        };
        let attachments = &mut capture.attacher.attachments;
        let mut told = vec![attachments.attach(ROW, TO_POD.into(), sources, now())];
        while attachments.has_work() {
            told.extend(attachments.work(now()));
        }
        let Some(Input::Attached { ifindex, .. }) = told.last() else {
            bail!("the programs are not attached: {told:?}");
        };
        if marks {
            let mark = 1 << MARK_MASK.trailing_zeros();
            capture.heartbeat.capture_until(now() + LONG)?;
            let end = now() + LONG;
            capture.entries.set(*ifindex, OUTSIDE.into(), mark, end)?;
            capture.watched.set(*ifindex, true);
        }
        Ok(Self { capture, runtime })
    }

    /// Takes the programs away. To be called in the node's namespace.
    fn detach(self) {
        let Self { capture, runtime } = self;
        drop(capture);
        drop(runtime);
    }
}

/// The two veths beside the lab's.
struct Wires<'a> {
    stage: &'a Stage<'a>,
    node: NetNs,
}

impl<'a> Wires<'a> {
    fn lay(stage: &'a Stage<'a>) -> Result<Self> {
        let wires = Self {
            stage,
            node: stage.lab.node(),
        };
        let (pod, internet) = wires.ends();
        for (host, inside, net) in [(TO_POD, &pod, "10.200.0"), (OUT, &internet, "10.201.0")] {
            wires.ip(
                &wires.node,
                &[
                    &format!("link add {host} type veth peer name {INSIDE} netns {inside}"),
                    &format!("address add {net}.1/24 dev {host}"),
                    &format!("link set {host} up"),
                ],
            )?;
            wires.ip(
                inside,
                &[
                    &format!("address add {net}.2/24 dev {INSIDE}"),
                    &format!("link set {INSIDE} up"),
                    &format!("route add 10.200.0.0/15 via {net}.1"),
                ],
            )?;
        }
        // In the namespace of the thread that writes.
        let forward = || Ok(fs::write("/proc/sys/net/ipv4/ip_forward", "1")?);
        wires.node.run(forward)?;
        Ok(wires)
    }

    fn ends(&self) -> (NetNs, NetNs) {
        let lab = self.stage.lab;
        (lab.pod(FREE).netns(), lab.pod("inet").netns())
    }

    fn run_in(&self, namespace: &NetNs, mut command: Command) -> Result<()> {
        namespace.enter(&mut command)?;
        run(&mut command)?;
        Ok(())
    }

    fn ip(&self, namespace: &NetNs, commands: &[&str]) -> Result<()> {
        for command in commands {
            let mut ip = self.stage.lab.node_command("ip")?;
            ip.args(command.split(' '));
            self.run_in(namespace, ip)?;
        }
        Ok(())
    }

    fn empty_hook(&self, what: &str) -> Result<()> {
        let mut tc = self.stage.lab.node_command("tc")?;
        tc.args(["qdisc", what, "dev", TO_POD, "clsact"]);
        self.run_in(&self.node, tc)
    }

    fn segmentation_offload(&self, state: &str) -> Result<()> {
        let (pod, internet) = self.ends();
        for end in [pod, internet] {
            let mut ethtool = self.stage.lab.node_command("ethtool")?;
            ethtool.args(["-K", INSIDE, "tso", state, "gso", state]);
            self.run_in(&end, ethtool)?;
        }
        Ok(())
    }

    /// Megabits per second in each direction.
    fn round(&self, hook: Hook) -> Result<[f64; 2]> {
        let rates = || {
            let [out, into] = DIRECTIONS.map(|way| connection(self.stage, FREE, OUTSIDE, way));
            anyhow::Ok([out?, into?])
        };
        match hook {
            Hook::Nothing => rates(),
            Hook::Empty => {
                self.empty_hook("add")?;
                let rates = rates()?;
                self.empty_hook("delete")?;
                Ok(rates)
            }
            Hook::Programs | Hook::Marks => {
                let marks = hook == Hook::Marks;
                let attached = self.node.run(|| Attached::attach(marks))?;
                let rates = rates()?;
                self.node.run(|| {
                    attached.detach();
                    Ok(())
                })?;
                Ok(rates)
            }
        }
    }

    /// Percent of what passes with nothing at the veth that passes with each other hook, in the direction that
    /// suffers more: the medians of all rounds. And the megabits per second with nothing.
    fn percent(&self, rounds: u32) -> Result<([f64; 3], f64)> {
        let mut samples = HOOKS.map(|_| [Vec::new(), Vec::new()]);
        for _ in 0..rounds {
            for (hook, into) in HOOKS.into_iter().zip(&mut samples) {
                for (rate, into) in self.round(hook)?.into_iter().zip(into) {
                    into.push(rate);
                }
            }
        }
        let median = |samples| Distribution::of(samples).map_or(f64::NAN, |found| found.median());
        let [nothing, hooks @ ..] = samples.map(|rates| rates.map(median));
        let percent = hooks.map(|with| {
            let parts = with.into_iter().zip(nothing);
            parts
                .map(|(with, nothing)| with / nothing * 100.0)
                .fold(f64::MAX, f64::min)
        });
        Ok((percent, nothing.into_iter().fold(f64::MAX, f64::min)))
    }

    fn remove(self) -> Result<()> {
        self.ip(
            &self.node,
            &[TO_POD, OUT]
                .map(|host| format!("link delete {host}"))
                .each_ref()
                .map(String::as_str),
        )
    }
}

/// The row `tcp_throughput_routed_pct`.
pub(crate) fn measure(stage: &Stage<'_>) -> Result<Measured> {
    let rounds = stage.scale(8, 1);
    let wires = Wires::lay(stage)?;
    let measured = (|| {
        let (with_offload, mbit) = wires.percent(rounds)?;
        wires.segmentation_offload("off")?;
        let (without, mbit_without) = wires.percent(rounds)?;
        anyhow::Ok((with_offload, mbit, without, mbit_without))
    })();
    wires.remove().context("the veths stay")?;
    let (with_offload, mbit, without, mbit_without) = measured?;
    let values = with_offload.into_iter().chain(without);
    ensure!(values.clone().all(f64::is_finite), "a round has no rate");
    let [hook, programs, marks] = with_offload;
    let [hook_each, programs_each, marks_each] = without;
    Ok(Measured::default()
        .field("tcp_throughput_routed_pct", rounded(programs.min(marks)))?
        .field("details.tcp_routed_pct", with_offload.map(rounded))?
        .field("details.tcp_routed_pct_each_segment", without.map(rounded))?
        .field(
            "details.tcp_routed_mbit_per_s",
            [mbit, mbit_without].map(rounded),
        )?
        .line(
            "TCP throughput, the kernel forwards",
            format!("{programs:.1} %, with marks {marks:.1} %; an empty hook {hook:.1} %"),
            "≥ 98 %",
            programs.min(marks) >= 98.0,
        )
        .line(
            "… each packet one segment",
            format!(
                "{programs_each:.1} %, with marks {marks_each:.1} %; an empty hook {hook_each:.1} %"
            ),
            "to compare",
            true,
        ))
}
