//! The programs of an earlier agent that may go on beside this one, until it knows the node.
//!
//! They may if nothing is lost by it: they mark packets by the map of this agent, somebody reads what they capture, and
//! they have not stopped. All of this is asked of the kernel: files tell of agents that have ended before their programs
//! were anywhere.

use std::{collections::BTreeSet, path::PathBuf};

use aya::maps::{Array, Map, MapData, MapError};
use dnsflow_core::Timestamp;
use tracing::warn;

use super::{
    object_info::{self, TcxLink},
    pins::Part,
};

/// The programs of an earlier agent, by the parts of what it has left.
pub(super) struct EarlierPrograms {
    ids: BTreeSet<u32>,
    /// The maps that they use.
    maps: BTreeSet<u32>,
    /// When they stop capturing, in nanoseconds; zero: never.
    capture_until: Array<MapData, u64>,
}

impl EarlierPrograms {
    /// Those whose agent has left these parts beside this ring buffer. `None` if they do not write to it, or a part is
    /// missing: earlier versions have left none.
    pub(super) fn of(records: &MapData, part: impl Fn(Part) -> PathBuf) -> Option<Self> {
        let program = |kind| object_info::program(&part(kind)).ok();
        let [answers, questions] = [program(Part::Answers)?, program(Part::Questions)?];
        let capture_until = MapData::from_pin(part(Part::CaptureUntil)).ok()?;
        let maps = &answers.maps | &questions.maps;
        let use_it = |map: &MapData| map.info().is_ok_and(|info| maps.contains(&info.id()));
        if !use_it(records) || !use_it(&capture_until) {
            return None;
        }
        Some(Self {
            ids: [answers.id, questions.id].into(),
            maps,
            capture_until: Array::try_from(Map::Array(capture_until)).ok()?,
        })
    }

    /// Whether the program of this link is one, and uses this map.
    pub(super) fn are_at(&self, link: &TcxLink, map: u32) -> bool {
        self.ids.contains(&link.program) && self.maps.contains(&map)
    }

    /// Has them capture until then at least, if they still do. Returns whether they do.
    pub(super) fn go_on(&mut self, now: Timestamp, until: Timestamp) -> bool {
        let end = match self.capture_until.get(&0, 0) {
            Ok(0) => return true,
            Ok(end) => Timestamp::from_nanos(end),
            Err(_) => return false,
        };
        if now < end && end < until {
            let set = self.capture_until.set(0, until.as_nanos(), 0);
            set.unwrap_or_else(|error: MapError| {
                warn!(%error, "cannot extend the capture by the programs of an earlier agent");
            });
        }
        now < end
    }
}
