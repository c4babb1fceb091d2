//! Connections of pods, and the ways of their packets.

use std::{net::IpAddr, sync::Arc};

use crate::{
    Timestamp,
    values::{
        flow::{Addresses, Protocol, Transport},
        resolver::Resolver,
    },
};

/// A pod tries to connect somewhere.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Attempt {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// The destination.
    pub address: IpAddr,
    /// The destination port.
    pub port: u16,
    /// When the kernel saw the packet.
    pub at: Timestamp,
}

impl Attempt {
    /// Protocol and port.
    pub fn transport(&self) -> Transport {
        Transport {
            protocol: self.protocol,
            port: Some(self.port),
        }
    }
}

/// A query of a pod to a trusted DNS server over UDP, which no answer has followed.
///
/// The kernel remembers it by hashes. If another name has the same hash, a question about that name finds this query.
/// The oldest queries of a pod give way, and then those of the pods that have not asked for longest: of a forgotten
/// query it is not known that it had no answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PendingQuery {
    /// The interface index of the veth's host side.
    pub ifindex: u32,
    /// The DNS server.
    pub resolver: Resolver,
    /// The hash of its name, type and class ([`dnsflow_common::question::question_hash`]).
    pub question: u64,
    /// When the kernel saw the query.
    pub at: Timestamp,
}

/// A tracked connection that OVN has marked as blocked.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BlockedConnection {
    /// The logical port of the pod, whose conntrack zone holds the connection.
    pub port: String,
    /// The conntrack zone.
    pub zone: u16,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The address that began the connection: the pod's.
    pub src: IpAddr,
    /// The port that began the connection.
    pub src_port: u16,
    /// The destination address.
    pub dst: IpAddr,
    /// The destination port.
    pub dst_port: u16,
}

impl BlockedConnection {
    /// Whether a rule with these protocols and ports is for the connection; none means all.
    pub fn is_for(&self, mut transports: impl Iterator<Item = Transport>) -> bool {
        let own = Transport {
            protocol: self.protocol,
            port: Some(self.dst_port),
        };
        transports.any(|transport| transport.is_for(own))
    }
}

/// The packets from a pod to an address.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Path {
    /// The host side of the pod's veth, where the packets enter the switch.
    pub interface: Arc<str>,
    /// Their addresses.
    pub addresses: Addresses,
}
