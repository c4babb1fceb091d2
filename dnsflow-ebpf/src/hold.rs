//! Which answers are taken off the wire until the agent puts them back.

use aya_ebpf::helpers::generated::bpf_redirect;
use dnsflow_common::{key::NAME_SET_EMPTY, record::MAX_CAPTURE, walk::Reader as _};

use crate::{
    found::{Found, Kind},
    maps,
    skb::Frame,
    trust::now_ns,
};

/// Whether to hold this answer, which is trusted and which a rule mentions or may mention. Never
/// where the agent has not said lately that it is well, or could not put the frame back as it is.
#[inline(always)]
pub fn holds(frame: &Frame<'_>, found: &Found) -> bool {
    let Some(until_ns) = maps::HOLD_UNTIL.get(0) else {
        return false;
    };
    // SAFETY: the context is the kernel's.
    let (vlan, gso_size) = unsafe {
        let skb = frame.ctx.skb.skb;
        ((*skb).vlan_present, (*skb).gso_size)
    };
    let fits = vlan == 0 && frame.len() <= MAX_CAPTURE as u32;
    let kind = match found.kind() {
        Kind::Message => !found.is_first_fragment() && gso_size == 0,
        // What opens a connection carries no answer.
        Kind::Segment => !found.is_syn(),
        Kind::Later => false,
    };
    // An interface without a name set has no filter: all names, mentioned or not, come to here.
    // SAFETY: the value is a number that is only ever replaced.
    let has_names = match unsafe { maps::NAME_SETS.get(&frame.ifindex()) } {
        Some(name_set) => *name_set & NAME_SET_EMPTY == 0,
        None => false,
    };
    fits && kind && has_names && now_ns() < *until_ns
}

/// No interface.
const NOWHERE: u32 = 0;

/// The verdict that takes a packet off the wire: it is redirected to nowhere.
///
/// A drop (`TCX_DROP`, `TC_ACT_SHOT`) would be an error to the sender: ENOBUFS for the packet socket of
/// Open vSwitch's userspace datapath, whose `sendmmsg` then leaves out all packets behind this one. A
/// redirection is a success whatever becomes of it (`sch_handle_egress` in Linux `net/core/dev.c`,
/// `skb_do_redirect` in `net/core/filter.c`).
#[inline(always)]
pub fn take_off() -> i32 {
    // SAFETY: the helper takes numbers and notes where the packet is to go.
    unsafe { bpf_redirect(NOWHERE, 0) as i32 }
}

/// Whether the agent has put this frame back.
#[inline(always)]
pub fn is_released(frame: &Frame<'_>) -> bool {
    // SAFETY: the context is the kernel's.
    maps::is_release_mark(unsafe { (*frame.ctx.skb.skb).mark })
}
