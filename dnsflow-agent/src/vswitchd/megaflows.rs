//! Reads the megaflows that `dpctl/dump-flows` prints (ovs-dpctl(8)): which of them drop, and on
//! which paths.
//!
//! A line is `recirc_id(0x2),in_port(veth1),…,eth_type(0x0800),ipv4(src=10.244.0.5,dst=203.0.112.0/255.255.254.0,…), packets:3, …, actions:drop`
//! (`dpif_flow_format` in Open vSwitch's lib/dpif.c, `odp_flow_format` and `format_odp_actions` in
//! its lib/odp-util.c). What a megaflow does not look at is left out; the port is always there.

use std::net::IpAddr;

use dnsflow_core::values::connection::Path;

/// Of `paths`, those on which one of these megaflows drops packets that conntrack takes as valid.
pub fn dropping(text: &str, paths: &[Path]) -> Vec<Path> {
    let drops: Vec<Megaflow> = text
        .lines()
        .filter_map(Megaflow::parse)
        .filter(|megaflow| megaflow.drops)
        .collect();
    let is_dropped = |path: &&Path| drops.iter().any(|megaflow| megaflow.covers(path));
    paths.iter().filter(is_dropped).cloned().collect()
}

/// The filter of `dpctl/dump-flows` that shows every megaflow which may cover one of `paths`.
///
/// A filter has exact values only (`parse_ofp_exact_flow` in Open vSwitch's lib/ofp-flow.c), and a
/// megaflow that does not look at a field passes the filter whatever the value. So the filter names
/// what all paths have in common. `None` without paths, and for paths of both families.
pub fn filter(paths: &[Path]) -> Option<String> {
    let (first, rest) = paths.split_first()?;
    let is_v6 = first.addresses.dst().is_ipv6();
    if rest
        .iter()
        .any(|path| path.addresses.dst().is_ipv6() != is_v6)
    {
        return None;
    }
    let (protocol, destination) = if is_v6 {
        ("ipv6", "ipv6_dst")
    } else {
        ("ip", "nw_dst")
    };
    let mut filter = protocol.to_owned();
    let interface = &first.interface;
    // A name with other characters, or of digits alone, would be read as something else.
    let is_plain = interface.chars().all(|c| c.is_ascii_alphanumeric())
        && interface.chars().any(|c| c.is_ascii_alphabetic());
    if is_plain && rest.iter().all(|path| path.interface == *interface) {
        filter += &format!(",in_port={interface}");
    }
    let address = first.addresses.dst();
    if rest.iter().all(|path| path.addresses.dst() == address) {
        filter += &format!(",{destination}={address}");
    }
    Some(filter)
}

/// What matters of one line.
#[derive(Debug)]
struct Megaflow<'a> {
    /// The name of the port.
    interface: &'a str,
    /// Its addresses: `ipv4(…)` or `ipv6(…)` without the name.
    addresses: &'a str,
    is_v6: bool,
    drops: bool,
}

impl<'a> Megaflow<'a> {
    /// `None` for a line that is not for IP.
    fn parse(line: &'a str) -> Option<Self> {
        let (key, actions) = line.split_once("actions:")?;
        let (_, port) = key.split_once("in_port(")?;
        let (is_v6, rest) = match key.split_once(",ipv4(") {
            Some((_, rest)) => (false, rest),
            None => (true, key.split_once(",ipv6(")?.1),
        };
        Some(Self {
            interface: port.split_once(')')?.0,
            addresses: rest.split_once(')')?.0,
            is_v6,
            drops: !forwards(actions) && !key.contains(INVALID),
        })
    }

    fn covers(&self, path: &Path) -> bool {
        let Path {
            interface,
            addresses,
        } = path;
        self.interface == &**interface
            && self.is_v6 == addresses.dst().is_ipv6()
            && self.field_covers("src", addresses.src())
            && self.field_covers("dst", addresses.dst())
    }

    /// Whether the megaflow is for this address: all that its mask leaves of the address is equal.
    /// What cannot be read covers everything: then the wait is longer than need be.
    fn field_covers(&self, name: &str, address: IpAddr) -> bool {
        let mut fields = self.addresses.split(',');
        let value = fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
        let Some(value) = value else {
            return true;
        };
        let (value, mask) = match value.split_once('/') {
            Some((value, mask)) => (value, Some(mask)),
            None => (value, None),
        };
        let Some(value) = value.parse().ok().map(bits) else {
            return true;
        };
        let mask = match mask {
            None => u128::MAX,
            Some(mask) => match (mask.parse::<IpAddr>(), mask.parse::<u32>()) {
                (Ok(mask), _) => bits(mask),
                (_, Ok(length)) => prefix_mask(length, address.is_ipv6()),
                _ => return true,
            },
        };
        bits(address) & mask == value & mask
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn prefix_mask(length: u32, is_v6: bool) -> u128 {
    let width = if is_v6 { 128 } else { 32 };
    let zeros = width - length.min(width);
    u128::MAX.checked_shl(zeros).unwrap_or_default()
}

/// Whether actions send the packet on: to a port, or back into the datapath (`recirc`), where
/// another megaflow decides. All other actions leave the packet where it is.
fn forwards(actions: &str) -> bool {
    let mut depth = 0usize;
    let mut top_level = actions.trim().split(|character| {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        character == ',' && depth == 0
    });
    top_level.any(|action| match action.split_once('(') {
        // A port's number, or its name.
        None => !STAYING.contains(&action),
        Some((name, _)) => ON_ITS_WAY.contains(&name),
    })
}

/// In a megaflow's key: the megaflow is for packets that belong to no connection, such as the last ones
/// of a connection that was closed. OVN drops these wherever they go (`ct_state` in ovs-fields(7)).
const INVALID: &str = "+inv";

/// Actions without arguments that send the packet nowhere.
const STAYING: [&str; 5] = ["drop", "ct", "ct_clear", "pop_vlan", "pop_eth"];
/// Actions with arguments that send the packet on.
const ON_ITS_WAY: [&str; 6] = [
    "recirc",
    "tnl_push",
    "tnl_pop",
    "clone",
    "check_pkt_len",
    "lb_output",
];

#[cfg(test)]
mod tests;
