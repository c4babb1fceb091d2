//! Which qdisc stands at an interface's ingress, where clsact has to stand.
//!
//! Both `ingress` and `clsact` have the handle ffff:, so that adding clsact where the other stands
//! fails as if clsact were there already, and a filter for egress is then taken and runs on
//! ingress.

use std::io;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink::SocketAddrNetlink, recv,
    sendto, socket_with,
};

use crate::netlink;

// Linux include/uapi/linux/rtnetlink.h and pkt_sched.h.
const RTM_NEWQDISC: u16 = 36;
const RTM_GETQDISC: u16 = 38;
/// `NLM_F_REQUEST | NLM_F_ECHO`: without the second, older kernels tell the listeners of the
/// multicast group alone (`rtnetlink_send` in Linux net/core/rtnetlink.c).
const NLM_F_REQUEST_ECHO: u16 = 1 | 8;
const TC_H_INGRESS: u32 = 0xffff_fff1;
const TCMSG_LEN: usize = 20;
const TCA_KIND: u16 = 1;

/// The kind of the qdisc at the interface's ingress; `None` where the kernel's answer names none.
pub(super) fn at_ingress(ifindex: u32) -> io::Result<Option<String>> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        // NETLINK_ROUTE
        None,
    )?;
    let len = u32::try_from(netlink::HEADER_LEN + TCMSG_LEN).unwrap_or_default();
    let mut request = len.to_ne_bytes().to_vec();
    request.extend(RTM_GETQDISC.to_ne_bytes());
    request.extend(NLM_F_REQUEST_ECHO.to_ne_bytes());
    // Sequence and port; then struct tcmsg: family and padding, ifindex, handle, parent, info.
    for word in [0, 0, 0, ifindex, 0, TC_H_INGRESS, 0] {
        request.extend(word.to_ne_bytes());
    }
    sendto(
        &socket,
        &request,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    // The kernel answers within the call before; a request that it refuses gets an error message.
    let mut reply = [0; 8192];
    let (_, len) = recv(&socket, &mut reply[..], RecvFlags::DONTWAIT)?;
    Ok(netlink::messages(reply.get(..len).unwrap_or_default())
        .filter(|message| message.kind == RTM_NEWQDISC)
        .find_map(|message| {
            netlink::text(netlink::attribute(
                message.body.get(TCMSG_LEN..)?,
                TCA_KIND,
            )?)
        }))
}
