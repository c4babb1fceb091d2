//! The kernel's connection tracking, over netlink (Linux net/netfilter/nf_conntrack_netlink.c; numbers
//! of include/uapi/linux/netfilter/nfnetlink.h and nfnetlink_conntrack.h).
//!
//! The kernel picks the marked connections out of its table itself, and changes the one bit of the
//! mark. ovs-vswitchd has no part in it: its dump would go through the whole table on the thread
//! that takes flows. These calls block; a table of a million connections takes some tenths of a
//! second.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use dnsflow_core::values::{connection::BlockedConnection, flow::Protocol};
use rustix::net::{SocketFlags, netlink::NETFILTER};

use super::{BLOCKED, Marked, Outcome, Tracked};
use crate::netlink;

// NFNL_SUBSYS_CTNETLINK in the upper byte.
const IPCTNL_MSG_CT_NEW: u16 = 1 << 8;
const IPCTNL_MSG_CT_GET: u16 = 1 << 8 | 1;
/// `struct nfgenmsg`: family, version, resource.
const NFGENMSG_LEN: usize = 4;
const AF_UNSPEC: u8 = 0;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

// enum ctattr_type
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_MARK: u16 = 8;
const CTA_ZONE: u16 = 18;
const CTA_MARK_MASK: u16 = 21;
// enum ctattr_tuple
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
// enum ctattr_ip
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
// enum ctattr_l4proto
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;

/// `ENOENT`: the connection has ended.
const ENOENT: i32 = 2;

/// The marked connections of this network namespace.
///
/// # Errors
///
/// If the kernel refuses (`EPERM` without `CAP_NET_ADMIN`) or does not answer.
pub fn blocked() -> io::Result<Marked> {
    let socket = netlink::open(Some(NETFILTER), SocketFlags::empty())?;
    let mut body = vec![AF_UNSPEC, 0, 0, 0];
    netlink::put(&mut body, CTA_MARK, &BLOCKED.to_be_bytes());
    netlink::put(&mut body, CTA_MARK_MASK, &BLOCKED.to_be_bytes());
    let mut marked = Marked::default();
    netlink::dump(
        &socket,
        IPCTNL_MSG_CT_GET,
        &body,
        "connections",
        |message| {
            if message.kind == IPCTNL_MSG_CT_NEW
                && let Some(connection) = tracked(message.body)
            {
                marked.push(connection);
            }
        },
    )?;
    Ok(marked)
}

/// Takes the mark off these connections, and changes nothing else.
///
/// # Errors
///
/// If the kernel refuses all of them (`EPERM` without `CAP_NET_ADMIN`) or does not answer.
pub fn clear(connections: &[BlockedConnection]) -> io::Result<Outcome> {
    let socket = netlink::open(Some(NETFILTER), SocketFlags::empty())?;
    let change = |connection: &_| netlink::change(&socket, IPCTNL_MSG_CT_NEW, &change(connection));
    outcome(connections.iter().map(change))
}

/// The outcome of these changes, or the first refusal if all are refused.
fn outcome(changes: impl ExactSizeIterator<Item = io::Result<()>>) -> io::Result<Outcome> {
    let count = changes.len();
    let mut outcome = Outcome::default();
    let mut refusal = None;
    for changed in changes {
        match changed {
            Ok(()) => outcome.unblocked += 1,
            Err(error) if error.raw_os_error() == Some(ENOENT) => {}
            Err(error) => {
                outcome.failed += 1;
                refusal.get_or_insert(error);
            }
        }
    }
    match refusal {
        Some(error) if outcome.failed == count => Err(error),
        _ => Ok(outcome),
    }
}

/// Reads a connection, if it is marked.
fn tracked(body: &[u8]) -> Option<Tracked> {
    let attributes = body.get(NFGENMSG_LEN..)?;
    let get = |attributes, kind| netlink::attribute(attributes, kind);
    let mark = u32::from_be_bytes(get(attributes, CTA_MARK)?.try_into().ok()?);
    if mark & BLOCKED == 0 {
        return None;
    }
    let u16_of = |value: &[u8]| Some(u16::from_be_bytes(value.try_into().ok()?));
    // A connection in zone 0 has no such attribute.
    let zone = get(attributes, CTA_ZONE).map_or(Some(0), u16_of)?;
    let tuple = get(attributes, CTA_TUPLE_ORIG)?;
    let (ip, l4) = (get(tuple, CTA_TUPLE_IP)?, get(tuple, CTA_TUPLE_PROTO)?);
    let socket = |v4, v6, port| {
        let address = match get(ip, v4) {
            Some(v4) => IpAddr::from(<[u8; 4]>::try_from(v4).ok()?),
            None => IpAddr::from(<[u8; 16]>::try_from(get(ip, v6)?).ok()?),
        };
        Some(SocketAddr::new(address, u16_of(get(l4, port)?)?))
    };
    Some(Tracked {
        zone,
        protocol: match get(l4, CTA_PROTO_NUM)? {
            [number] => Protocol::of_number(*number)?,
            _ => return None,
        },
        src: socket(CTA_IP_V4_SRC, CTA_IP_V6_SRC, CTA_PROTO_SRC_PORT)?,
        dst: socket(CTA_IP_V4_DST, CTA_IP_V6_DST, CTA_PROTO_DST_PORT)?,
    })
}

/// The message that takes the mark off a connection. Without `NLM_F_CREATE`, the message can only
/// change an existing connection (`ctnetlink_new_conntrack`); with a mask, it changes only that bit
/// of the mark (`ctnetlink_change_mark`).
fn change(connection: &BlockedConnection) -> Vec<u8> {
    let BlockedConnection {
        port: _,
        zone,
        protocol,
        src,
        src_port,
        dst,
        dst_port,
    } = connection;
    let family = if src.is_ipv4() { AF_INET } else { AF_INET6 };
    let mut body = vec![family, 0, 0, 0];
    netlink::put_nested(&mut body, CTA_TUPLE_ORIG, |tuple| {
        netlink::put_nested(tuple, CTA_TUPLE_IP, |ip| {
            for (address, v4, v6) in [
                (src, CTA_IP_V4_SRC, CTA_IP_V6_SRC),
                (dst, CTA_IP_V4_DST, CTA_IP_V6_DST),
            ] {
                match address {
                    IpAddr::V4(address) => netlink::put(ip, v4, &address.octets()),
                    IpAddr::V6(address) => netlink::put(ip, v6, &address.octets()),
                }
            }
        });
        netlink::put_nested(tuple, CTA_TUPLE_PROTO, |l4| {
            netlink::put(l4, CTA_PROTO_NUM, &[protocol.number()]);
            netlink::put(l4, CTA_PROTO_SRC_PORT, &src_port.to_be_bytes());
            netlink::put(l4, CTA_PROTO_DST_PORT, &dst_port.to_be_bytes());
        });
    });
    netlink::put(&mut body, CTA_ZONE, &zone.to_be_bytes());
    netlink::put(&mut body, CTA_MARK, &0u32.to_be_bytes());
    netlink::put(&mut body, CTA_MARK_MASK, &BLOCKED.to_be_bytes());
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(src: &str, dst: &str, zone: u16, protocol: Protocol) -> BlockedConnection {
        let (src, dst): (SocketAddr, SocketAddr) = (
            src.parse().expect("a socket"),
            dst.parse().expect("a socket"),
        );
        BlockedConnection {
            port: "ns1_pod1".into(),
            zone,
            protocol,
            src: src.ip(),
            src_port: src.port(),
            dst: dst.ip(),
            dst_port: dst.port(),
        }
    }

    #[test]
    fn one_refusal_keeps_no_other_connection_blocked() {
        let refused = || Err(io::Error::from_raw_os_error(libc::EBUSY));
        let ended = || Err(io::Error::from_raw_os_error(ENOENT));
        let of = |unblocked, failed| Some(Outcome { unblocked, failed });
        for (changes, expected) in [
            (
                vec![refused(), Ok(()), ended(), Ok(()), refused()],
                of(2, 2),
            ),
            (vec![ended(), refused()], of(0, 1)),
            (vec![ended()], of(0, 0)),
            (vec![], of(0, 0)),
            (vec![refused(), refused()], None),
        ] {
            assert_eq!(outcome(changes.into_iter()).ok(), expected);
        }
    }

    #[test]
    fn what_is_written_of_a_connection_is_what_is_read_of_it() {
        for connection in [
            connection("10.244.0.5:4000", "203.0.113.2:443", 7, Protocol::Tcp),
            connection("[fd00::5]:1", "[2001:db8::1]:65535", 65_535, Protocol::Udp),
            connection("10.244.0.5:0", "203.0.113.2:1", 1, Protocol::Sctp),
        ] {
            let mut body = change(&connection);
            assert_eq!(tracked(&body), None, "the mark is zero");
            let at = body.len() - 12;
            body[at..at + 4].copy_from_slice(&0x8000_0001_u32.to_be_bytes());
            let BlockedConnection {
                zone,
                protocol,
                src,
                src_port,
                dst,
                dst_port,
                ..
            } = connection;
            let wanted = Tracked {
                zone,
                protocol,
                src: SocketAddr::new(src, src_port),
                dst: SocketAddr::new(dst, dst_port),
            };
            assert_eq!(tracked(&body), Some(wanted));
            for len in 0..body.len() - 12 {
                assert_eq!(tracked(&body[..len]), None, "{len}");
            }
        }
    }
}
