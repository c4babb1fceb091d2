//! How many more entries the programs may make at each interface without the agent.
//!
//! An interface has as many entries as the agent remembers addresses of its pod, at most. All interfaces have equal
//! shares of the map's free room: however many pods fill theirs while no agent runs, another one finds its own.
//!
//! The programs count what they have made, and the agent says up to which number they may go on. Each map has one
//! writer, so that no count is lost.

use std::collections::{BTreeMap, BTreeSet};

use aya::{
    Ebpf,
    maps::{HashMap, MapData, MapError},
};
use dnsflow_common::key::ENTRIES_MAX;

use super::{CaptureError, absent, program::take_map};

/// The maps `ENTRIES_MADE` and `ENTRIES_ALLOWED`.
pub(super) struct Room {
    made: HashMap<MapData, u32, u64>,
    allowed: HashMap<MapData, u32, u64>,
    /// The most entries of an interface.
    of_interface_max: u64,
    /// The interfaces where programs may make entries.
    interfaces: BTreeMap<u32, Interface>,
    /// The entries of each interface at the last count, with the agent's changes since: less than zero if the agent has
    /// removed what the programs have made since.
    entries: BTreeMap<u32, i64>,
    /// The count that is under way.
    next: Option<Count>,
    /// The share of an interface of the room that the last count has found; none before the first one.
    share: u64,
    /// The interfaces whose room the programs are still to be told.
    untold: BTreeSet<u32>,
    /// The interfaces at which the programs cannot count yet.
    uncounted: BTreeSet<u32>,
}

/// An interface where programs may make entries.
#[derive(Clone, Copy, Default)]
struct Interface {
    /// How many the programs had made when the last count began.
    made: u64,
    /// How many it may have.
    quota: u64,
}

/// A count of all entries. What comes meanwhile may count twice, and what goes stays counted: the room is rather too
/// small until the next count.
struct Count {
    /// What the programs had made at its beginning.
    made: BTreeMap<u32, u64>,
    entries: BTreeMap<u32, i64>,
}

impl Room {
    pub(super) fn new(ebpf: &mut Ebpf, of_interface_max: u64) -> Result<Self, CaptureError> {
        Ok(Self {
            made: take_map(ebpf, "ENTRIES_MADE")?,
            allowed: take_map(ebpf, "ENTRIES_ALLOWED")?,
            of_interface_max,
            interfaces: BTreeMap::new(),
            entries: BTreeMap::new(),
            next: None,
            share: 0,
            untold: BTreeSet::new(),
            uncounted: BTreeSet::new(),
        })
    }

    /// Lets programs make entries at an interface.
    pub(super) fn open(&mut self, ifindex: u32) -> Result<(), MapError> {
        if !self.interfaces.contains_key(&ifindex) {
            self.uncounted.insert(ifindex);
            self.interfaces.insert(ifindex, Interface::default());
            self.share_out([ifindex]);
        }
        self.tell()
    }

    /// Lets them make none there any more.
    pub(super) fn close(&mut self, ifindex: u32) -> Result<(), MapError> {
        self.interfaces.remove(&ifindex);
        self.uncounted.remove(&ifindex);
        // Another interface may come with the index before the count ends.
        if let Some(count) = &mut self.next {
            count.made.remove(&ifindex);
        }
        absent(self.allowed.remove(&ifindex))?;
        absent(self.made.remove(&ifindex))
    }

    /// The agent has added an entry.
    pub(super) fn added(&mut self, ifindex: u32) {
        *self.entries.entry(ifindex).or_default() += 1;
        self.count(ifindex);
        self.untold.insert(ifindex);
    }

    /// The agent has removed an entry.
    pub(super) fn removed(&mut self, ifindex: u32) {
        *self.entries.entry(ifindex).or_default() -= 1;
        self.untold.insert(ifindex);
    }

    /// Begins to count all entries.
    pub(super) fn begin_count(&mut self) {
        let made = self.interfaces.keys();
        let made = made.filter_map(|ifindex| Some((*ifindex, self.made.get(ifindex, 0).ok()?)));
        self.next = Some(Count {
            made: made.collect(),
            entries: BTreeMap::new(),
        });
    }

    /// There is an entry.
    pub(super) fn count(&mut self, ifindex: u32) {
        if let Some(count) = &mut self.next {
            *count.entries.entry(ifindex).or_default() += 1;
        }
    }

    /// All entries are counted.
    pub(super) fn end_count(&mut self) {
        let Some(Count { made, entries }) = self.next.take() else {
            return;
        };
        for (ifindex, interface) in &mut self.interfaces {
            interface.made = made.get(ifindex).copied().unwrap_or(interface.made);
        }
        self.entries = entries;
        let taken: i64 = self.entries.values().sum();
        let free = u64::from(ENTRIES_MAX).saturating_add_signed(-taken);
        self.share = free / self.interfaces.len().max(1) as u64;
        self.share_out(self.ifindices());
    }

    /// There is no room until the next count.
    pub(super) fn end(&mut self) {
        self.share = 0;
        self.share_out(self.ifindices());
    }

    fn ifindices(&self) -> Vec<u32> {
        self.interfaces.keys().copied().collect()
    }

    /// Gives interfaces their share, beside what they have.
    fn share_out(&mut self, ifindices: impl IntoIterator<Item = u32>) {
        for ifindex in ifindices {
            if let Some(interface) = self.interfaces.get_mut(&ifindex) {
                let entries = self.entries.get(&ifindex).copied().unwrap_or_default();
                let quota = self.share.saturating_add_signed(entries);
                interface.quota = quota.min(self.of_interface_max);
                self.untold.insert(ifindex);
            }
        }
    }

    /// Tells the programs of the room that has changed. If the kernel refuses an interface, that one is told the next
    /// time, and the others now. Returns the first refusal.
    pub(super) fn tell(&mut self) -> Result<(), MapError> {
        let mut result = Ok(());
        let mut is_refused = |told: Result<(), MapError>| {
            let is_refused = told.is_err();
            if result.is_ok() {
                result = told;
            }
            is_refused
        };
        self.uncounted
            .retain(|ifindex| is_refused(self.made.insert(ifindex, 0, 0)));
        self.untold.retain(|ifindex| {
            let Some(Interface { made, quota }) = self.interfaces.get(ifindex) else {
                return false;
            };
            let entries = self.entries.get(ifindex).copied().unwrap_or_default();
            let room = quota.saturating_add_signed(-entries);
            // Without its count, the programs make no entry there.
            self.uncounted.contains(ifindex)
                || is_refused(self.allowed.insert(ifindex, made + room, 0))
        });
        result
    }
}
