//! The program that holds answers. It is there as long as the agent is: when the agent ends, however it
//! does, the kernel empties an array of programs that nobody has open any more.

use aya::{
    EbpfError,
    maps::{MapData, ProgramArray},
    programs::ProgramFd,
};

use super::CaptureError;

/// The map `HOLDERS`.
pub(super) struct Holders(#[expect(dead_code, reason = "it has to be open")] ProgramArray<MapData>);

impl Holders {
    /// Lets answers be held by this program until the value is dropped.
    pub(super) fn new(
        mut map: ProgramArray<MapData>,
        program: &ProgramFd,
    ) -> Result<Self, CaptureError> {
        let set = map.set(0, program, 0);
        set.map_err(|error| CaptureError::Load(EbpfError::from(error)))?;
        Ok(Self(map))
    }
}
