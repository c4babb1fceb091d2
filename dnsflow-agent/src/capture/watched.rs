//! The interfaces whose attempts to connect somewhere the programs tell of.

use std::fmt;

use aya::maps::{HashMap, Map, MapData, MapError};
use tracing::warn;

use super::CaptureError;

/// The map `WATCHED`.
pub struct Watched(HashMap<MapData, u32, u8>);

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").finish_non_exhaustive()
    }
}

impl Watched {
    pub(super) fn new(map: Map) -> Result<Self, CaptureError> {
        let map = HashMap::try_from(map).map_err(|_| CaptureError::Object { what: "WATCHED" })?;
        Ok(Self(map))
    }

    /// Watches an interface, or no longer. Where the kernel refuses, that is logged.
    pub fn set(&mut self, ifindex: u32, watched: bool) {
        let set = match watched {
            true => self.0.insert(ifindex, 1, 0),
            false => self.0.remove(&ifindex),
        };
        match set {
            Ok(()) | Err(MapError::KeyNotFound) => {}
            Err(error) if watched => warn!(
                ifindex, %error,
                "of a pod's denied connections nothing is told"
            ),
            Err(error) => warn!(ifindex, %error, "a pod's attempts are still looked at"),
        }
    }
}
