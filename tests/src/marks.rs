//! The marks that the kernel gives to packets, as the kernel has them: read from the pinned map, not asked of the
//! agent.

use std::{fs, net::IpAddr, path::Path};

use anyhow::{Context, Result};
use aya::maps::{HashMap, Map, MapData};
use dnsflow_common::key::{Entry, EntryKey};
use rustix::time::{ClockId, clock_gettime};

/// Packets to an address get this mark.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    ifindex: u32,
    address: IpAddr,
    bits: u32,
}

/// The mark that the kernel gives to packets which come from this interface and go to this address.
pub(crate) fn of_packet(marks: &[Mark], from: u32, to: IpAddr) -> Option<u32> {
    let mut marks = marks.iter();
    let mark = marks.find(|mark| mark.ifindex == from && mark.address == to)?;
    Some(mark.bits)
}

/// The addresses for which packets that come from this interface get a mark, and the mark.
pub(crate) fn of_interface(marks: &[Mark], from: u32) -> impl Iterator<Item = (IpAddr, u32)> {
    let marks = marks.iter().filter(move |mark| mark.ifindex == from);
    marks.map(|mark| (mark.address, mark.bits))
}

/// The marks of all interfaces whose time is not over. There are none without a map.
pub(crate) fn read(pins: &Path) -> Result<Vec<Mark>> {
    let now = clock_gettime(ClockId::Monotonic);
    let now = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
    let Ok(files) = fs::read_dir(pins) else {
        return Ok(Vec::new());
    };
    let mut marks = Vec::new();
    for file in files {
        let file = file?;
        if !file.file_name().to_string_lossy().starts_with("entries-") {
            continue;
        }
        let map = MapData::from_pin(file.path()).context("the pinned map")?;
        let map: HashMap<_, [u8; size_of::<EntryKey>()], [u8; size_of::<Entry>()]> =
            Map::HashMap(map).try_into().context("a hash map")?;
        for entry in map.iter() {
            let (key, entry) = entry.context("an entry of the map")?;
            let key: EntryKey = zerocopy::transmute!(key);
            let entry: Entry = zerocopy::transmute!(entry);
            if entry.until_ns > now {
                marks.push(Mark {
                    ifindex: key.ifindex,
                    address: key.address(),
                    bits: entry.mark.mark(),
                });
            }
        }
    }
    Ok(marks)
}
