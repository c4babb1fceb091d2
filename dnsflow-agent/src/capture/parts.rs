//! What an agent leaves beside its links: its ring buffer, and what the next agent needs to know whether the programs
//! may go on for a while.

use std::os::fd::AsFd as _;

use aya::{
    Ebpf, EbpfError,
    maps::{Map, MapData, ProgramArray},
};

use super::{
    CaptureError,
    pins::{Part, Pins, PinsError},
    program::{ANSWERS, OPEN, QUESTIONS, fd_of, program_of, take_map},
};

/// The maps `RECORDS`, `CAPTURE_UNTIL` and `OPENERS`, each once more.
pub(super) struct Parts {
    records: MapData,
    capture_until: MapData,
    /// Leads to the program that opens addresses without the agent. The kernel empties it when nobody has it open and it
    /// is not pinned.
    openers: MapData,
}

impl Parts {
    /// Lets addresses be opened by the program for that.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        let records = same(ebpf, "RECORDS")?;
        let capture_until = same(ebpf, "CAPTURE_UNTIL")?;
        let openers = same(ebpf, "OPENERS")?;
        let mut array: ProgramArray<MapData> = take_map(ebpf, "OPENERS")?;
        let set = array.set(0, fd_of(ebpf, OPEN)?, 0);
        set.map_err(|error| CaptureError::Load(EbpfError::from(error)))?;
        Ok(Self {
            records,
            capture_until,
            openers,
        })
    }

    /// Lets all of it stay when the agent ends.
    pub(super) fn pin(&self, ebpf: &mut Ebpf, pins: &Pins) -> Result<(), PinsError> {
        pins.keep_records(|path| self.records.pin(path))?;
        pins.keep_part(Part::Openers, |path| self.openers.pin(path))?;
        pins.keep_part(Part::CaptureUntil, |path| self.capture_until.pin(path))?;
        for ((name, _), part) in [(ANSWERS, Part::Answers), (QUESTIONS, Part::Questions)] {
            if let Some(program) = program_of(ebpf, name) {
                pins.keep_part(part, |path| program.pin(path))?;
            }
        }
        Ok(())
    }
}

/// A map, with a descriptor of its own: it stays in the object.
pub(super) fn same(ebpf: &Ebpf, name: &'static str) -> Result<MapData, CaptureError> {
    let broken = || CaptureError::Object { what: name };
    let (Map::RingBuf(data)
    | Map::Array(data)
    | Map::ProgramArray(data)
    | Map::HashMap(data)
    | Map::LruHashMap(data)) = ebpf.map(name).ok_or_else(broken)?
    else {
        return Err(broken());
    };
    let fd = data.fd().as_fd().try_clone_to_owned();
    MapData::from_fd(fd.map_err(|_| broken())?).map_err(|_| broken())
}
