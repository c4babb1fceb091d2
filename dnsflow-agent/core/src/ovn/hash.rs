//! The names that ovn-kubernetes gives to the address sets of DNS names.

use std::{fmt, net::IpAddr};

use crate::values::name::DnsName;

/// An address family: ovn-kubernetes has an address set for each.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of an address.
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
        })
    }
}

/// The hash of no bytes.
const FNV1A_64_START: u64 = 0xcbf2_9ce4_8422_2325;

/// Adds bytes to an FNV-1a hash with 64 bits (RFC 9923): ovn-kubernetes' hash of its ids (`HashForOVN` in
/// `go-controller/pkg/libovsdb/util`).
fn fnv1a_64(start: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(start, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The hashes of the address sets that can stand for `name` in `family`: of the name as written
/// (the DNSNameResolver feature is off), and in lower case with a final dot (the feature is on).
/// Each is the number behind the `a` in the name of the address set; in the name it is decimal.
///
/// The owner is always the default network's controller, also for a user-defined network.
pub fn address_set_hashes(name: &DnsName, family: Family) -> [u64; 2] {
    let owner = "default-network-controller:EgressFirewallDNS:";
    let start = fnv1a_64(FNV1A_64_START, owner.bytes());
    let written = name.written();
    let lower = written.bytes().map(|byte| byte.to_ascii_lowercase());
    let dot = (!written.ends_with('.')).then_some(b'.');
    let end = match family {
        Family::V4 => *b":v4",
        Family::V6 => *b":v6",
    };
    [
        fnv1a_64(fnv1a_64(start, written.bytes()), end),
        fnv1a_64(fnv1a_64(start, lower.chain(dot)), end),
    ]
}

/// The name of a namespace's port group on the cluster's default network, in the NB database
/// (`getNamespacePortGroupDbIDs` in ovn-kubernetes' go-controller/pkg/ovn/base_network_controller_namespace.go).
pub fn default_port_group(namespace: &str) -> String {
    let id = format!("default-network-controller:Namespace:{namespace}");
    format!("a{}", fnv1a_64(FNV1A_64_START, id.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_groups_are_those_that_ovn_kubernetes_wrote() {
        assert_eq!(default_port_group("ns1"), "a9633447981174624809");
    }

    #[test]
    fn hashes_equal_those_that_ovn_kubernetes_wrote() {
        let check = |name: &str, family, with: usize, hash: u64| {
            let name: DnsName = name.parse().expect("a name");
            assert_eq!(address_set_hashes(&name, family)[with], hash, "{name:?}");
        };
        check("example.com", Family::V4, 0, 18_346_816_605_274_050_565);
        check("example.com", Family::V6, 0, 18_346_814_406_250_794_143);
        check("Example.COM", Family::V4, 1, 4_932_485_612_109_564_913);
        check("example.com.", Family::V6, 1, 4_932_483_413_086_308_491);
        check("ports.test", Family::V4, 0, 12_164_270_707_472_427_916);
    }
}
