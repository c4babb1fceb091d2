//! Which qdisc stands at an interface's ingress, where clsact has to stand, and which filters it has.
//!
//! Both `ingress` and `clsact` have the handle ffff:, so that adding clsact where the other stands
//! fails as if clsact were there already, and a filter for egress is then taken and runs on
//! ingress.

use std::io;

use aya::programs::TcAttachType;
use rustix::{
    io::Errno,
    net::{RecvFlags, SocketFlags, recv},
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
/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)`
const CLSACT_INGRESS: u32 = 0xffff_fff2;
/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)`
const CLSACT_EGRESS: u32 = 0xffff_fff3;
/// The handle of clsact, ffff:0.
const CLSACT: u32 = 0xffff_0000;
const TCMSG_LEN: usize = 20;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_CHAIN: u16 = 11;
// Linux include/uapi/linux/pkt_cls.h.
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_ID: u16 = 11;

/// The kind of the qdisc at the interface's ingress; `None` where the kernel's answer names none.
pub(super) fn at_ingress(ifindex: u32) -> io::Result<Option<String>> {
    let socket = netlink::open(None, SocketFlags::empty())?;
    let body = tcmsg(ifindex, 0, TC_H_INGRESS);
    netlink::send(&socket, RTM_GETQDISC, NLM_F_REQUEST_ECHO, &body)?;
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

/// A filter of clsact.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Filter {
    /// Its kind, such as `bpf` or `flower`.
    pub(super) kind: String,
    /// The name of its program.
    pub(super) name: Option<String>,
    /// The id of its program.
    pub(super) program: Option<u32>,
}

/// The filters at a hook of an interface's clsact qdisc, in the order in which they run: by priority, and the newest
/// one first among filters of the kind `bpf` with the same priority (`cls_bpf_change` in Linux net/sched/cls_bpf.c).
pub(super) fn filters(ifindex: u32, hook: TcAttachType) -> io::Result<Vec<Filter>> {
    let parent = match hook {
        TcAttachType::Ingress => CLSACT_INGRESS,
        TcAttachType::Egress => CLSACT_EGRESS,
        TcAttachType::Custom(parent) => parent,
    };
    let socket = netlink::open(None, SocketFlags::empty())?;
    let mut found = Vec::new();
    let body = tcmsg(ifindex, 0, parent);
    netlink::dump(&socket, RTM_GETTFILTER, &body, "filters", |message| {
        found.extend(filter(message));
    })?;
    Ok(found)
}

/// The filter that a message of a dump is of. Messages without a handle are of the filter's priority
/// (`tcf_chain_dump` in Linux net/sched/cls_api.c). Only a filter of chain zero leads to other chains.
fn filter(message: netlink::Message<'_>) -> Option<Filter> {
    // struct tcmsg: family and padding, ifindex, handle.
    if message.kind != RTM_NEWTFILTER || netlink::u32_at(message.body, 8)? == 0 {
        return None;
    }
    let attributes = message.body.get(TCMSG_LEN..)?;
    let chain = netlink::attribute(attributes, TCA_CHAIN);
    if chain
        .and_then(|chain| netlink::u32_at(chain, 0))
        .unwrap_or(0)
        != 0
    {
        return None;
    }
    let options = netlink::attribute(attributes, TCA_OPTIONS);
    let option = |kind| options.and_then(|options| netlink::attribute(options, kind));
    Some(Filter {
        kind: netlink::text(netlink::attribute(attributes, TCA_KIND)?)?,
        name: option(TCA_BPF_NAME).and_then(netlink::text),
        program: option(TCA_BPF_ID).and_then(|id| netlink::u32_at(id, 0)),
    })
}

/// Removes an interface's clsact qdisc, with all of its filters.
pub(super) fn remove_clsact(ifindex: u32) -> io::Result<()> {
    let socket = netlink::open(None, SocketFlags::empty())?;
    netlink::change(&socket, RTM_DELQDISC, &tcmsg(ifindex, CLSACT, TC_H_INGRESS))
}

/// The body of a request about an interface's qdisc or filters (`struct tcmsg`).
fn tcmsg(ifindex: u32, handle: u32, parent: u32) -> Vec<u8> {
    // Family and padding, ifindex, handle, parent, info.
    let words = [0, ifindex, handle, parent, 0];
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}
