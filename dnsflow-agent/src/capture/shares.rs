//! Which interfaces have used up what they may hand to the agent.

use std::{collections::BTreeMap, fmt};

use aya::maps::{HashMap, Map, MapData, MapError};
use dnsflow_common::key::Share;

use super::CaptureError;

/// The map `SHARES`, which the programs write.
pub struct Shares(HashMap<MapData, u32, [u8; size_of::<Share>()]>);

impl fmt::Debug for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shares").finish_non_exhaustive()
    }
}

impl Shares {
    pub(super) fn new(map: Map) -> Result<Self, CaptureError> {
        let map = HashMap::try_from(map).map_err(|_| CaptureError::Object { what: "SHARES" })?;
        Ok(Self(map))
    }

    /// By interface, the packets that were left out because its share was used up. Interfaces
    /// without any are left out.
    ///
    /// # Errors
    ///
    /// If the kernel does not let the map be read.
    pub fn left_out(&self) -> Result<BTreeMap<u32, u64>, MapError> {
        let mut left_out = BTreeMap::new();
        for entry in self.0.iter() {
            let (ifindex, share) = entry?;
            let share: Share = zerocopy::transmute!(share);
            if share.left_out > 0 {
                left_out.insert(ifindex, share.left_out);
            }
        }
        Ok(left_out)
    }
}
