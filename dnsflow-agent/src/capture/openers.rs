//! The program that opens addresses without the agent. It stays when the agent ends, if links do: then the array that
//! leads to it is pinned.

use std::{fmt, os::fd::AsFd as _};

use aya::{
    EbpfError,
    maps::{Map, MapData, ProgramArray},
    programs::ProgramFd,
};

use super::{
    CaptureError,
    pins::{Pins, PinsError},
};

/// The map `OPENERS`. The kernel empties it when nobody has it open and it is not pinned.
pub(super) struct Openers(MapData);

impl fmt::Debug for Openers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Openers").finish_non_exhaustive()
    }
}

impl Openers {
    /// Lets addresses be opened by this program.
    pub(super) fn new(map: Map, program: &ProgramFd) -> Result<Self, CaptureError> {
        let broken = || CaptureError::Object { what: "OPENERS" };
        let Map::ProgramArray(data) = &map else {
            return Err(broken());
        };
        // The same map, to be pinned.
        let fd = data.fd().as_fd().try_clone_to_owned();
        let same = MapData::from_fd(fd.map_err(|_| broken())?).map_err(|_| broken())?;
        let mut map = ProgramArray::try_from(map).map_err(|_| broken())?;
        let set = map.set(0, program, 0);
        set.map_err(|error| CaptureError::Load(EbpfError::from(error)))?;
        Ok(Self(same))
    }

    /// Lets the program stay when the agent ends.
    pub(super) fn keep(&self, pins: &Pins) -> Result<(), PinsError> {
        pins.keep_openers(|path| self.0.pin(path))
    }
}
