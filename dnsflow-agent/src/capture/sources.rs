//! The addresses from which a pod's questions count, and to which its answers go.
//!
//! Only addresses that were given count. At an interface without any, nothing counts.

use std::{collections::BTreeMap, net::IpAddr};

use aya::{
    Ebpf,
    maps::{HashMap, MapData},
};
use dnsflow_common::key::{SOURCES_PER_INTERFACE_MAX, SourceKey, SourceMac};
use dnsflow_core::io::input::SourceAddresses;
use tracing::warn;

use super::{CaptureError, absent, program::take_map};

type Key = [u8; size_of::<SourceKey>()];

/// The map `SOURCES`, and what is in it.
pub(super) struct Sources {
    map: HashMap<MapData, Key, SourceMac>,
    known: BTreeMap<u32, BTreeMap<IpAddr, SourceMac>>,
}

impl Sources {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        Ok(Self {
            map: take_map(ebpf, "SOURCES")?,
            known: BTreeMap::new(),
        })
    }

    /// Sets the addresses of an interface.
    pub(super) fn set(&mut self, ifindex: u32, sources: &SourceAddresses) {
        let left_out = sources.ips.len().saturating_sub(SOURCES_PER_INTERFACE_MAX);
        if left_out > 0 {
            warn!(
                ifindex,
                left_out, "a pod has too many addresses: DNS queries from the others are ignored"
            );
        }
        let mac = mac(sources);
        let ips = sources.ips.iter().take(SOURCES_PER_INTERFACE_MAX);
        let wanted: BTreeMap<IpAddr, SourceMac> = ips.map(|ip| (*ip, mac)).collect();
        let known = self.known.entry(ifindex).or_default();
        let gone: Vec<IpAddr> = known
            .keys()
            .copied()
            .filter(|ip| !wanted.contains_key(ip))
            .collect();
        for ip in gone {
            match absent(self.map.remove(&key(ifindex, ip))) {
                Ok(()) => {
                    known.remove(&ip);
                }
                Err(error) => warn!(
                    ifindex, %ip, %error,
                    "cannot remove a former address of a pod: DNS queries from it still count"
                ),
            }
        }
        for (ip, mac) in wanted {
            if known.get(&ip) == Some(&mac) {
                continue;
            }
            match self.map.insert(key(ifindex, ip), mac, 0) {
                Ok(()) => {
                    known.insert(ip, mac);
                }
                Err(error) => warn!(
                    ifindex, %ip, %error,
                    "cannot add an address of a pod: DNS queries from it are ignored"
                ),
            }
        }
        if known.is_empty() {
            self.known.remove(&ifindex);
        }
    }
}

fn mac(sources: &SourceAddresses) -> SourceMac {
    let [a, b, c, d, e, f] = sources.mac.map_or([0; 6], |mac| mac.octets());
    [a, b, c, d, e, f, 0, 0]
}

fn key(ifindex: u32, ip: IpAddr) -> Key {
    zerocopy::transmute!(SourceKey::new(ifindex, ip))
}
