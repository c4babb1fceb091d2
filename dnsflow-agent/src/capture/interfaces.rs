//! The sets of interfaces that the programs treat in another way than the others.

use std::fmt;

use aya::maps::{HashMap, Map, MapData};
use tracing::warn;

use super::{CaptureError, absent, program::Program};

/// A map whose keys are interfaces.
pub struct InterfaceSet {
    map: HashMap<MapData, u32, u8>,
    name: &'static str,
    /// What comes of an interface that is not put in.
    without: &'static str,
}

impl fmt::Debug for InterfaceSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InterfaceSet").field(&self.name).finish()
    }
}

impl InterfaceSet {
    /// The interfaces whose attempts to connect somewhere are told of.
    pub(super) fn watched(program: &mut Program) -> Result<Self, CaptureError> {
        let without = "of a pod's denied connections nothing is told";
        Self::new(program, "WATCHED", without)
    }

    /// The interfaces whose answers all leave the kernel.
    pub(super) fn recorded(program: &mut Program) -> Result<Self, CaptureError> {
        Self::new(program, "RECORDED", "a pod's names are not recorded")
    }

    fn new(
        program: &mut Program,
        name: &'static str,
        without: &'static str,
    ) -> Result<Self, CaptureError> {
        let map: Map = program.take_map(name)?;
        let map = HashMap::try_from(map).map_err(|_| CaptureError::Object { what: name })?;
        Ok(Self { map, name, without })
    }

    /// Puts an interface in, or takes it out. Where the kernel refuses, that is logged.
    pub fn set(&mut self, ifindex: u32, is_in: bool) {
        let set = match is_in {
            true => self.map.insert(ifindex, 1, 0),
            false => absent(self.map.remove(&ifindex)),
        };
        match set {
            Ok(()) => {}
            Err(error) if is_in => warn!(ifindex, %error, "{}", self.without),
            Err(error) => warn!(ifindex, %error, map = self.name, "an interface stays in a map"),
        }
    }
}
