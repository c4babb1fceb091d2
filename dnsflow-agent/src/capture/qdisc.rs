//! Which qdisc stands at an interface's ingress, where clsact has to stand, and which filters it has.
//!
//! Both `ingress` and `clsact` have the handle ffff:, so that adding clsact where the other stands
//! fails as if clsact were there already, and a filter for egress is then taken and runs on
//! ingress.

use std::{io, os::fd::OwnedFd};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink::SocketAddrNetlink,
        recv, sendto, socket_with,
    },
};

use crate::netlink;

// Linux include/uapi/linux/rtnetlink.h and pkt_sched.h.
const RTM_NEWQDISC: u16 = 36;
const RTM_GETQDISC: u16 = 38;
/// `NLM_F_REQUEST | NLM_F_ECHO`: without the second, older kernels tell the listeners of the
/// multicast group alone (`rtnetlink_send` in Linux net/core/rtnetlink.c).
const NLM_F_REQUEST_ECHO: u16 = 1 | 8;
const RTM_DELQDISC: u16 = 37;
const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;
const TC_H_INGRESS: u32 = 0xffff_fff1;
/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)`, and the same for egress.
const CLSACT_HOOKS: [u32; 2] = [0xffff_fff2, 0xffff_fff3];
/// The handle of clsact, ffff:0.
const CLSACT: u32 = 0xffff_0000;
const TCMSG_LEN: usize = 20;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
/// Linux include/uapi/linux/pkt_cls.h.
const TCA_BPF_NAME: u16 = 7;
/// The kernel makes no longer datagrams for a dump (`netlink_dump` in Linux net/netlink/af_netlink.c).
const DATAGRAM_LEN: usize = 32 * 1024;
/// The most datagrams of one dump.
const DATAGRAMS_MAX: usize = 1000;

/// The kind of the qdisc at the interface's ingress; `None` where the kernel's answer names none.
pub(super) fn at_ingress(ifindex: u32) -> io::Result<Option<String>> {
    let socket = ask(RTM_GETQDISC, NLM_F_REQUEST_ECHO, (ifindex, 0, TC_H_INGRESS))?;
    // The kernel answers within the call before; a request that it refuses gets an error message.
    let mut reply = [0; 8192];
    let len = match recv(&socket, &mut reply[..], RecvFlags::DONTWAIT) {
        Ok((_, len)) => len,
        // Where a qdisc was removed, one stands that the kernel does not tell of (`tc_qdisc_dump_ignore` in Linux
        // net/sched/sch_api.c).
        Err(Errno::AGAIN) => 0,
        Err(error) => return Err(error.into()),
    };
    Ok(netlink::messages(reply.get(..len).unwrap_or_default())
        .filter(|message| message.kind == RTM_NEWQDISC)
        .find_map(|message| {
            netlink::text(netlink::attribute(
                message.body.get(TCMSG_LEN..)?,
                TCA_KIND,
            )?)
        }))
}

/// The filters of an interface's clsact qdisc, by the names of their programs. `None`: a filter without one.
pub(super) fn filters(ifindex: u32) -> io::Result<Vec<Option<String>>> {
    let mut found = Vec::new();
    for hook in CLSACT_HOOKS {
        let socket = ask(
            RTM_GETTFILTER,
            netlink::NLM_F_REQUEST_DUMP,
            (ifindex, 0, hook),
        )?;
        dump(&socket, |message| found.extend(filter(message)))?;
    }
    Ok(found)
}

/// The filter that a message of a dump is of. Messages without a handle are of the filter's priority
/// (`tcf_chain_dump` in Linux net/sched/cls_api.c).
fn filter(message: netlink::Message<'_>) -> Option<Option<String>> {
    // struct tcmsg: family and padding, ifindex, handle.
    if message.kind != RTM_NEWTFILTER || netlink::u32_at(message.body, 8)? == 0 {
        return None;
    }
    let attributes = message.body.get(TCMSG_LEN..)?;
    let name = netlink::attribute(attributes, TCA_OPTIONS)
        .and_then(|options| netlink::attribute(options, TCA_BPF_NAME))
        .and_then(netlink::text);
    Some(name)
}

/// Removes an interface's clsact qdisc, with all of its filters.
pub(super) fn remove_clsact(ifindex: u32) -> io::Result<()> {
    let socket = ask(
        RTM_DELQDISC,
        netlink::NLM_F_REQUEST_ACK,
        (ifindex, CLSACT, TC_H_INGRESS),
    )?;
    let mut reply = [0; 8192];
    let (_, len) = recv(&socket, &mut reply[..], RecvFlags::DONTWAIT)?;
    let mut messages = netlink::messages(reply.get(..len).unwrap_or_default());
    let reply = messages.find(|message| message.kind == netlink::NLMSG_ERROR);
    netlink::result(reply.map_or(&[], |message| message.body))
}

/// Sends a request about an interface's qdisc or filters: interface, handle and parent.
fn ask(kind: u16, flags: u16, (ifindex, handle, parent): (u32, u32, u32)) -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        // NETLINK_ROUTE
        None,
    )?;
    // struct tcmsg: family and padding, ifindex, handle, parent, info.
    let words = [0, ifindex, handle, parent, 0];
    let body: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    sendto(
        &socket,
        &netlink::request(kind, flags, &body),
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    Ok(socket)
}

/// Hands the messages of a dump to `each`.
fn dump(socket: &OwnedFd, mut each: impl FnMut(netlink::Message<'_>)) -> io::Result<()> {
    let mut datagram = vec![0; DATAGRAM_LEN];
    for _ in 0..DATAGRAMS_MAX {
        let (_, len) = recv(socket, &mut datagram[..], RecvFlags::empty())?;
        for message in netlink::messages(datagram.get(..len).unwrap_or_default()) {
            match message.kind {
                netlink::NLMSG_DONE => return Ok(()),
                netlink::NLMSG_ERROR => return netlink::result(message.body),
                _ => each(message),
            }
        }
    }
    Err(io::Error::other("the kernel's list of filters has no end"))
}
