//! Which interfaces have used up what they may hand to the agent.

use std::collections::BTreeMap;

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData, MapError},
};
use dnsflow_common::key::Share;

use super::{CaptureError, absent, parts::same};

/// What an interface has lost.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LeftOut {
    /// Packets of DNS.
    pub packets: u64,
    /// Attempts to connect somewhere.
    pub attempts: u64,
}

const NAME: &str = "SHARES";

/// The map `SHARES`, which the programs write.
pub struct RingShares(HashMap<MapData, u32, [u8; size_of::<Share>()]>);

impl RingShares {
    pub(super) fn new(ebpf: &Ebpf) -> Result<Self, CaptureError> {
        let map = HashMap::try_from(Map::HashMap(same(ebpf, NAME)?));
        map.map(Self)
            .map_err(|_| CaptureError::Object { what: NAME })
    }

    /// Forgets the share of an interface that is gone, for one that comes.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub(super) fn forget(&mut self, ifindex: u32) -> Result<(), MapError> {
        absent(self.0.remove(&ifindex))
    }

    /// By interface, what was left out because its share was used up. Interfaces that have lost nothing
    /// are not among them.
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read.
    pub fn left_out(&self) -> Result<BTreeMap<u32, LeftOut>, MapError> {
        let mut left_out = BTreeMap::new();
        for entry in self.0.iter() {
            let (ifindex, share) = entry?;
            let share: Share = zerocopy::transmute!(share);
            let lost = LeftOut {
                packets: share.left_out,
                attempts: share.attempts_left_out,
            };
            if lost != LeftOut::default() {
                left_out.insert(ifindex, lost);
            }
        }
        Ok(left_out)
    }
}
