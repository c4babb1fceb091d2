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

/// The addresses for which packets that come from this interface get a mark.
pub(crate) fn of_interface(marks: &[Mark], from: u32) -> impl Iterator<Item = IpAddr> {
    let marks = marks.iter().filter(move |mark| mark.ifindex == from);
    marks.map(|mark| mark.address)
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

/// The flow once for each address that gets its mark, with the address in the mark's place; nothing for a flow in which
/// marks end, as it opens nothing. Any other flow as it is.
pub(crate) fn by_address(flow: String, marks: &[Mark]) -> Vec<String> {
    let Some((before, rest)) = flow.split_once("pkt_mark=0x") else {
        return vec![flow];
    };
    if before.ends_with("priority=65535,") {
        return Vec::new();
    }
    let bits = rest.split_once('/').map(|(bits, _)| bits);
    let bits = bits.and_then(|bits| u32::from_str_radix(bits, 16).ok());
    let rest = rest
        .split_once(',')
        .map(|(_, rest)| rest)
        .and_then(|rest| rest.split_once(" actions="));
    let (Some(bits), Some((matches, actions))) = (bits, rest) else {
        return vec![flow];
    };
    // A flow to an address needs no such test.
    let matches = matches.strip_prefix("ct_state=-dnat,").unwrap_or(matches);
    // The first action takes the mark off.
    let actions = match actions.split_once("->pkt_mark") {
        Some((_, rest)) => rest.strip_prefix(',').unwrap_or("drop"),
        None => actions,
    };
    // The port comes behind the addresses.
    let (matches, port) = match matches.split_once(",tp_dst=") {
        Some((matches, port)) => (matches, format!(",tp_dst={port}")),
        None => (matches, String::new()),
    };
    let with = |address: IpAddr| {
        let field = if address.is_ipv6() {
            "ipv6_dst"
        } else {
            "nw_dst"
        };
        format!("{before}{matches},{field}={address}{port} actions={actions}")
    };
    let marks = marks.iter().filter(|mark| mark.bits == bits);
    marks.map(|mark| with(mark.address)).collect()
}

#[cfg(test)]
mod tests {
    use super::{Mark, by_address};

    #[test]
    fn a_flow_of_a_mark_becomes_flows_to_the_addresses_with_the_mark() {
        let mark = |bits, address: &str| Mark {
            ifindex: 7,
            address: address.parse().expect("an address"),
            bits,
        };
        let marks = [
            mark(0xa1a0_0000, "203.0.113.1"),
            mark(0x24a0_0000, "203.0.113.2"),
            mark(0xa1a0_0000, "203.0.113.3"),
        ];
        let flow = "cookie=0x1, table=46, priority=11000,pkt_mark=0xa1a00000/0xffe00000,ct_state=-dnat,tcp,reg14=0x3,\
                    nw_src=10.244.0.5,tp_dst=80 actions=set_field:0/0xffe00000->pkt_mark,resubmit(,47)";
        let flows = by_address(flow.to_owned(), &marks);
        let to = |last: u8| {
            format!(
                "cookie=0x1, table=46, priority=11000,tcp,reg14=0x3,nw_src=10.244.0.5,nw_dst=203.0.113.{last},tp_dst=80 \
                 actions=resubmit(,47)"
            )
        };
        assert_eq!(flows, [to(1), to(3)]);
        let end = "cookie=0x1, table=50, priority=65535,pkt_mark=0xa1a00000/0xffe00000,ip,reg14=0x3,nw_src=10.244.0.5 \
                   actions=set_field:0/0xffe00000->pkt_mark,resubmit(,50)";
        assert!(by_address(end.to_owned(), &marks).is_empty());
        let other = "cookie=0x1, table=46, priority=0,ip,nw_src=10.244.0.5 actions=drop".to_owned();
        assert_eq!(by_address(other.clone(), &marks), [other]);
    }
}
