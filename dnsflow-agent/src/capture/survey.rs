//! The interfaces of this network namespace, their qdiscs and programs, for `dnsflow check`. Nothing is
//! changed.

use std::{collections::BTreeMap, io, path::Path};

use rustix::net::SocketFlags;

use super::{AttachKind, hooks, pins, program::PROGRAMS, qdisc};
use crate::netlink;

/// An interface.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Link {
    /// Its index.
    pub ifindex: u32,
    /// The kind of virtual interface, such as `veth`; `None` for a device.
    pub kind: Option<String>,
    /// Whether it represents a port of a switch in hardware.
    pub in_switch: bool,
}

// Linux include/uapi/linux/rtnetlink.h and if_link.h.
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const IFINFOMSG_LEN: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_PHYS_SWITCH_ID: u16 = 36;

/// Every interface, by name.
///
/// # Errors
///
/// If the kernel does not answer.
pub fn links() -> io::Result<BTreeMap<String, Link>> {
    let socket = netlink::open(None, SocketFlags::empty())?;
    let mut links = BTreeMap::new();
    // struct ifinfomsg of no interface: all of them.
    let body = [0; IFINFOMSG_LEN];
    netlink::dump(&socket, RTM_GETLINK, &body, "interfaces", |message| {
        links.extend(link(message));
    })?;
    Ok(links)
}

/// The qdisc at the interface's ingress, where clsact would have to stand.
///
/// # Errors
///
/// If the kernel does not answer.
pub fn ingress_qdisc(ifindex: u32) -> io::Result<Option<String>> {
    qdisc::at_ingress(ifindex)
}

/// The programs of others that run before dnsflow's at the interface's hooks. Filters of dnsflow are known by their
/// names; of links, the kernel tells ids alone, so they are known by their files in the directory of the pins.
///
/// # Errors
///
/// If the kernel does not answer.
pub fn in_front(ifindex: u32, pins: Option<&Path>) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for (program, hook) in PROGRAMS {
        let linked = pins.and_then(|dir| pins::linked_program(dir, ifindex, program));
        let links = hooks::programs(ifindex, hook, AttachKind::Tcx)?;
        let links = hooks::in_front(links, |it| linked.is_some() && it.program == linked);
        let filters = hooks::programs(ifindex, hook, AttachKind::Clsact)?;
        let filters = hooks::in_front(filters, |it| it.name.as_deref() == Some(program));
        for others in [links, filters].into_iter().flatten() {
            found.extend(hooks::texts(&others));
        }
    }
    Ok(found)
}

fn link(message: netlink::Message<'_>) -> Option<(String, Link)> {
    if message.kind != RTM_NEWLINK {
        return None;
    }
    let attributes = message.body.get(IFINFOMSG_LEN..)?;
    let name = netlink::text(netlink::attribute(attributes, IFLA_IFNAME)?)?;
    let kind = netlink::attribute(attributes, IFLA_LINKINFO)
        .and_then(|info| netlink::attribute(info, IFLA_INFO_KIND))
        .and_then(netlink::text);
    let link = Link {
        ifindex: netlink::u32_at(message.body, 4)?,
        kind,
        in_switch: netlink::attribute(attributes, IFLA_PHYS_SWITCH_ID).is_some(),
    };
    Some((name, link))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found() {
        let links = links().expect("the kernel answers");
        let loopback = links.get("lo").expect("lo");
        assert_eq!((loopback.ifindex, loopback.in_switch), (1, false));
    }

    #[test]
    fn the_kind_and_the_switch_are_read() {
        let attribute = |kind: u16, value: &[u8]| {
            let len = u16::try_from(4 + value.len()).expect("short");
            let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let body = |attributes: &[Vec<u8>]| {
            let mut body = vec![0; 4];
            body.extend(7u32.to_ne_bytes());
            body.resize(IFINFOMSG_LEN, 0);
            body.extend(attributes.concat());
            body
        };
        let read = |body: &[u8]| {
            link(netlink::Message {
                kind: RTM_NEWLINK,
                body,
            })
        };
        let veth = body(&[
            attribute(IFLA_IFNAME, b"0123\0"),
            attribute(IFLA_LINKINFO, &attribute(IFLA_INFO_KIND, b"veth\0")),
        ]);
        let link = Link {
            ifindex: 7,
            kind: Some("veth".into()),
            in_switch: false,
        };
        assert_eq!(read(&veth), Some(("0123".to_owned(), link)));
        let representor = body(&[
            attribute(IFLA_IFNAME, b"pf0vf1\0"),
            attribute(IFLA_PHYS_SWITCH_ID, &[1, 2, 3, 4]),
        ]);
        let link = Link {
            ifindex: 7,
            kind: None,
            in_switch: true,
        };
        assert_eq!(read(&representor), Some(("pf0vf1".to_owned(), link)));
        assert_eq!(read(&body(&[])), None);
        assert_eq!(read(&[0; 3]), None);
    }
}
