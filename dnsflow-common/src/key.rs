//! The keys and values of the maps that the BPF programs and the agent share, and their limits.
//!
//! A map compares keys byte by byte: no layout here has padding, and each address stands in one
//! form. Integers are in native byte order.

use core::net::IpAddr;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    question::NameHash,
    walk::{IpHeader, Reader, Version},
};

/// How many resolvers can be trusted.
pub const RESOLVERS_MAX: u32 = 1024;
/// How many queries are remembered; beyond it, the ones that were not used for the longest time go.
///
/// At the 10 s that a query waits at most, 6,500 queries a second that nobody answers; answered
/// ones leave at once.
pub const PENDING_MAX: u32 = 65_536;
/// How long a query waits for its answer: twice the time after which resolvers usually ask again
/// (`timeout` in resolv.conf(5)).
pub const PENDING_AGE_MAX_NS: u64 = 10_000_000_000;
/// How many datagrams in fragments are remembered at a time.
pub const FRAGMENTS_MAX: u32 = 1024;
/// How long later fragments are waited for. They leave the server back to back.
pub const FRAGMENT_AGE_MAX_NS: u64 = 1_000_000_000;
/// How many interfaces have a name set.
pub const NAME_SETS_MAX: u32 = 4096;
/// Set in a name set that has no names.
pub const NAME_SET_EMPTY: u32 = 1 << 31;
/// How many names there are over all name sets.
pub const NAMES_MAX: u32 = 131_072;

/// An IP address: IPv4 ones in the first four octets, zeros behind them.
#[derive(
    Clone,
    Copy,
    Debug,
    Eq,
    FromBytes,
    Hash,
    Immutable,
    IntoBytes,
    KnownLayout,
    Ord,
    PartialEq,
    PartialOrd,
)]
#[repr(C)]
pub struct Address {
    octets: [u8; 16],
}

impl Address {
    /// The key form of an address. Those of different families can be equal.
    pub fn new(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self::v4(v4.octets()),
            IpAddr::V6(v6) => Self {
                octets: v6.octets(),
            },
        }
    }

    #[inline(always)]
    fn v4([a, b, c, d]: [u8; 4]) -> Self {
        Self {
            octets: [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// Where the packet of this header comes from.
    #[inline(always)]
    fn src<R: Reader>(frame: &R, ip: IpHeader) -> Option<Self> {
        Self::read(frame, ip.version, ip.src())
    }

    /// Where the packet of this header goes.
    #[inline(always)]
    fn dst<R: Reader>(frame: &R, ip: IpHeader) -> Option<Self> {
        Self::read(frame, ip.version, ip.dst())
    }

    #[inline(always)]
    fn read<R: Reader>(frame: &R, version: Version, offset: u32) -> Option<Self> {
        match version {
            Version::V4 => frame.read(offset).map(Self::v4),
            Version::V6 => frame.read(offset).map(|octets| Self { octets }),
        }
    }
}

/// A trusted resolver, as pods see it.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct ResolverKey {
    address: Address,
    version: u16,
    port: u16,
}

impl ResolverKey {
    /// The resolver at this address and port.
    pub fn new(address: IpAddr, port: u16) -> Self {
        Self {
            address: Address::new(address),
            version: if address.is_ipv4() { 4 } else { 6 },
            port,
        }
    }

    /// Where a packet comes from; `None` where the frame ends before.
    #[inline(always)]
    pub fn source<R: Reader>(frame: &R, ip: IpHeader, port: u16) -> Option<Self> {
        Some(Self {
            address: Address::src(frame, ip)?,
            version: ip.version as u16,
            port,
        })
    }

    /// Where a packet goes; `None` where the frame ends before.
    #[inline(always)]
    pub fn destination<R: Reader>(frame: &R, ip: IpHeader, port: u16) -> Option<Self> {
        Some(Self {
            address: Address::dst(frame, ip)?,
            version: ip.version as u16,
            port,
        })
    }
}

/// A query that a pod sent.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct PendingKey {
    /// The pod's interface, where both query and answer pass.
    pub ifindex: u32,
    /// The resolver's address.
    pub resolver: Address,
    /// The pod's address.
    pub pod: Address,
    /// The IP version of both.
    pub version: u16,
    /// The resolver's port.
    pub resolver_port: u16,
    /// The pod's port.
    pub pod_port: u16,
    /// The transaction id.
    pub id: u16,
}

impl PendingKey {
    /// The key of a query to `resolver_port`; `None` where the frame ends before.
    #[inline(always)]
    pub fn query<R: Reader>(
        frame: &R,
        ifindex: u32,
        ip: IpHeader,
        (pod_port, resolver_port): (u16, u16),
        id: u16,
    ) -> Option<Self> {
        Some(Self {
            ifindex,
            resolver: Address::dst(frame, ip)?,
            pod: Address::src(frame, ip)?,
            version: ip.version as u16,
            resolver_port,
            pod_port,
            id,
        })
    }

    /// The key of the query that an answer from `resolver_port` belongs to; `None` where the frame
    /// ends before.
    #[inline(always)]
    pub fn answer<R: Reader>(
        frame: &R,
        ifindex: u32,
        ip: IpHeader,
        (resolver_port, pod_port): (u16, u16),
        id: u16,
    ) -> Option<Self> {
        Some(Self {
            ifindex,
            resolver: Address::src(frame, ip)?,
            pod: Address::dst(frame, ip)?,
            version: ip.version as u16,
            resolver_port,
            pod_port,
            id,
        })
    }
}

/// What is remembered of a query.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Pending {
    /// The question's hash.
    pub question: u64,
    /// When it was asked, in nanoseconds of `CLOCK_MONOTONIC`.
    pub asked_at_ns: u64,
}

/// A UDP datagram in fragments (RFC 791, section 3.2; RFC 8200, section 4.5). What both say
/// belongs to the key and is not here is always the same: the protocol, UDP.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct FragmentKey {
    /// The interface that the fragments go out of.
    pub ifindex: u32,
    /// The identification.
    pub id: u32,
    /// Where it comes from.
    pub src: Address,
    /// Where it goes.
    pub dst: Address,
    /// The IP version of both.
    pub version: u32,
}

impl FragmentKey {
    /// The key of a fragment; `None` where the frame ends before.
    #[inline(always)]
    pub fn new<R: Reader>(frame: &R, ifindex: u32, ip: IpHeader, id: u32) -> Option<Self> {
        Some(Self {
            ifindex,
            id,
            src: Address::src(frame, ip)?,
            dst: Address::dst(frame, ip)?,
            version: ip.version as u32,
        })
    }
}

/// A name that the rules of a name set mention.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct NameKey {
    /// The name's hash.
    pub hash: u64,
    /// The name set.
    pub name_set: u32,
    reserved: u32,
}

impl NameKey {
    /// The name of this hash in a name set.
    #[inline(always)]
    pub const fn new(name_set: u32, hash: NameHash) -> Self {
        Self {
            hash: hash.0,
            name_set,
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn families_are_apart() {
        let v4 = Ipv4Addr::new(10, 96, 0, 10);
        let v6 = Ipv6Addr::from([10, 96, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_ne!(
            ResolverKey::new(v4.into(), 53),
            ResolverKey::new(v6.into(), 53)
        );
    }
}
