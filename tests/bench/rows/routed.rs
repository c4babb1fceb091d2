//! What the programs cost a pod's TCP connections where the kernel forwards by itself.
//!
//! Rounds by turns with nothing at the veth, with an empty hook, with the programs, and with all that the programs can
//! have to do for a packet: marks are on, the destination has one, and attempts to connect are told of. Once with the
//! veths' segmentation offload, as in a cluster, and once without: then each packet is one segment.

use anyhow::{Context, Result, ensure};

use super::{
    throughput::{Direction, connection},
    wires::{Attached, INSIDE, OUTSIDE, TO_POD, Wires},
};
use crate::bench::{
    distribution::{Distribution, rounded},
    report::Measured,
    stage::{FREE, Stage},
};

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

impl Wires<'_> {
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
                let attached = self.node.run(|| {
                    let mut attached = Attached::attach(marks)?;
                    if marks {
                        attached.mark(OUTSIDE)?;
                    }
                    Ok(attached)
                })?;
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
