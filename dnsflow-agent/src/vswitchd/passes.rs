//! Estimates the duration of a pass of vswitchd's revalidators behind a change, from the latest passes.
//!
//! The revalidators check every megaflow twice a second to collect statistics, and behind a change of flows to
//! translate it again. Translation takes far longer, depending on the flow tables: 3 µs for a megaflow with one table
//! (Open vSwitch 3.1 and 3.5), 70 to 95 µs with those of OVN 26.03 (Open vSwitch 4.0). So the cost of a megaflow is
//! the one measured behind changes.

use std::{collections::VecDeque, time::Duration};

use super::Revalidation;
use dnsflow_core::Timestamp;

/// The estimate if vswitchd does not answer: a pass over some hundred megaflows.
pub(super) const UNKNOWN: Duration = Duration::from_millis(50);
/// The time for a megaflow in a pass behind a change, until such a pass was seen.
const PER_FLOW_UNKNOWN: Duration = Duration::from_micros(100);
/// The time of a pass without megaflows: threads have to wake up.
const BEGIN: Duration = Duration::from_micros(300);
/// vswitchd reports whole milliseconds, and 1 ms for every shorter pass (`udpif_revalidator` in
/// Open vSwitch's ofproto/ofproto-dpif-upcall.c).
const PASS_MIN: Duration = Duration::from_millis(1);
/// For how long a pass counts.
const LATE: Duration = Duration::from_secs(60);
/// How many readings are kept. There is one a second, and one behind each change that somebody
/// waits for, of which the latest count.
const READINGS_MAX: usize = 256;

/// What was read of late.
#[derive(Debug, Default)]
pub(super) struct Passes(VecDeque<Reading>);

#[derive(Debug)]
struct Reading {
    revalidation: Revalidation,
    /// Whether a change brought about the pass, as far as this can be known.
    is_behind_change: bool,
    at: Timestamp,
}

impl Passes {
    /// Records a reading at `now`.
    pub(super) fn note(
        &mut self,
        revalidation: Revalidation,
        is_behind_change: bool,
        now: Timestamp,
    ) {
        let Self(readings) = self;
        readings.retain(|reading| now.since(reading.at) <= LATE);
        if readings.len() == READINGS_MAX {
            readings.pop_front();
        }
        readings.push_back(Reading {
            revalidation,
            is_behind_change,
            at: now,
        });
    }

    /// The estimate: the longest of the latest passes, and at least the present megaflows at the
    /// highest of the latest costs.
    pub(super) fn estimate(&self) -> Duration {
        let Self(readings) = self;
        let passes = || readings.iter().map(|reading| reading.revalidation);
        let Some(flows) = readings.back().map(|reading| reading.revalidation.flows) else {
            return UNKNOWN;
        };
        let is_known = readings.iter().any(|reading| reading.is_behind_change);
        let per_flow = if is_known {
            passes().map(cost_per_flow).max().unwrap_or_default()
        } else {
            PER_FLOW_UNKNOWN
        };
        let longest = passes()
            .map(|revalidation| revalidation.pass)
            .filter(|pass| *pass > PASS_MIN)
            .max();
        let flows = u32::try_from(flows).unwrap_or(u32::MAX);
        let expected = BEGIN.saturating_add(per_flow.saturating_mul(flows));
        expected.max(longest.unwrap_or_default())
    }
}

/// What a megaflow cost in this pass, at most. With few megaflows, the time of a pass says more about
/// threads that came late than about megaflows.
fn cost_per_flow(revalidation: Revalidation) -> Duration {
    const FLOWS_MIN: u64 = 16;
    let Revalidation { flows, pass } = revalidation;
    let flows = u32::try_from(flows.max(FLOWS_MIN)).unwrap_or(u32::MAX);
    pass / flows
}

#[cfg(test)]
mod tests;
