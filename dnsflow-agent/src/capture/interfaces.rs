//! The sets of interfaces that the programs treat in another way than the others.

use aya::{
    Ebpf,
    maps::{HashMap, MapData},
};
use tracing::warn;

use super::{CaptureError, absent, program::take_map};

/// A map whose keys are interfaces.
pub struct InterfaceSet {
    map: HashMap<MapData, u32, u8>,
    name: &'static str,
    /// What comes of an interface that is not put in.
    without: &'static str,
}

impl InterfaceSet {
    /// The interfaces whose attempts to connect somewhere are told of.
    pub(super) fn watched(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        let without =
            "cannot watch the connections of a pod: its denied connections are not reported";
        Self::new(ebpf, "WATCHED", without)
    }

    /// The interfaces whose answers all leave the kernel.
    pub(super) fn recorded(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        Self::new(ebpf, "RECORDED", "cannot record the names of a pod")
    }

    fn new(
        ebpf: &mut Ebpf,
        name: &'static str,
        without: &'static str,
    ) -> Result<Self, CaptureError> {
        let map = take_map(ebpf, name)?;
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
            Err(error) => {
                warn!(ifindex, %error, map = self.name, "cannot remove an interface from a map")
            }
        }
    }
}
