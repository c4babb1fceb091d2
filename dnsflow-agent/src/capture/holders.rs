//! The program that holds answers. It is there as long as the agent is: when the agent ends, however it
//! does, the kernel empties an array of programs that nobody has open any more.

use std::fmt;

use aya::{
    EbpfError,
    maps::{Map, MapData, ProgramArray},
    programs::ProgramFd,
};

use super::CaptureError;

/// The map `HOLDERS`.
pub(super) struct Holders(#[expect(dead_code, reason = "it has to be open")] ProgramArray<MapData>);

impl fmt::Debug for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holders").finish_non_exhaustive()
    }
}

impl Holders {
    /// Lets answers be held by this program until the value is dropped.
    pub(super) fn new(map: Map, program: &ProgramFd) -> Result<Self, CaptureError> {
        let map = ProgramArray::try_from(map);
        let mut map = map.map_err(|_| CaptureError::Object { what: "HOLDERS" })?;
        let set = map.set(0, program, 0);
        set.map_err(|error| CaptureError::Load(EbpfError::from(error)))?;
        Ok(Self(map))
    }
}
