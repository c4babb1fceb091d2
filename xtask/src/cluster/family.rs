//! The one family of a cluster's networks. `tests/cluster/networks.sh` has the other addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::ValueEnum;

/// The family of pods, Services, nodes and what is outside.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    /// As the scripts take it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
        }
    }

    /// Where the story's web servers are, in networks for documentation (RFC 5737, RFC 3849).
    pub(super) fn story_servers(self) -> [&'static str; 2] {
        match self {
            Self::Ipv4 => ["203.0.113.80", "203.0.113.81"],
            Self::Ipv6 => ["2001:db8::80", "2001:db8::81"],
        }
    }

    /// The socket of the cluster's DNS.
    pub(super) fn dns(self) -> &'static str {
        match self {
            Self::Ipv4 => "10.96.0.10:53",
            Self::Ipv6 => "[fd00:10:96::a]:53",
        }
    }

    /// `addressType` of an EndpointSlice.
    pub(super) fn address_type(self) -> &'static str {
        match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        }
    }

    /// Every address.
    pub(super) fn any(self) -> &'static str {
        match self {
            Self::Ipv4 => "0.0.0.0/0",
            Self::Ipv6 => "::/0",
        }
    }

    /// A web server in one of 256 networks for benchmarks (RFC 2544, appendix C.2.2; RFC 5180, section 8).
    pub(super) fn server(self, network: u8, host: u8) -> IpAddr {
        match self {
            Self::Ipv4 => Ipv4Addr::new(198, 18, network, host).into(),
            Self::Ipv6 => {
                let (network, host) = (network.into(), host.into());
                Ipv6Addr::new(0x2001, 2, 0, network, 0, 0, 0, host).into()
            }
        }
    }
}
