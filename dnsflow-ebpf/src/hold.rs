//! Which answers are taken off the wire until the agent puts them back.

use aya_ebpf::helpers::generated::bpf_redirect;
use dnsflow_common::{
    key::{HELD_AGAIN_NS, HeldKey, NAME_SET_EMPTY, NAME_SET_UNHELD},
    record::MAX_CAPTURE,
    walk::Reader as _,
};

use crate::{
    found::{Found, Kind},
    maps, share,
    skb::Frame,
    trust::{Asked, id, now_ns},
};

/// Whether to hold this answer. The answer is trusted, and a rule mentions its name or may mention it.
///
/// Nothing is held unless the agent has said lately that it is well, nor in a namespace that has switched holding off.
/// A frame is not held if the agent could not put it back unchanged, or if it was held before.
#[inline(always)]
pub fn holds(frame: &Frame<'_>, found: &Found, asked: Asked) -> bool {
    // SAFETY: the context is the kernel's.
    let gso_size = unsafe { (*frame.ctx.skb.skb).gso_size };
    let fits = !frame.has_tag_outside() && !found.has_tag() && frame.len() <= MAX_CAPTURE as u32;
    let kind = match found.kind() {
        Kind::Message => !found.is_first_fragment() && gso_size == 0,
        // A segment that opens a connection carries no answer.
        Kind::Segment => !found.is_syn(),
        Kind::Later | Kind::Attempt => false,
    };
    // An interface without a name set has no filter. Answers come to here whether a rule mentions their
    // names or not.
    // SAFETY: the value is one word, of this key or of another one (`maps`).
    let may_hold = match unsafe { maps::NAME_SETS.get(&frame.ifindex()) } {
        Some(name_set) => *name_set & (NAME_SET_EMPTY | NAME_SET_UNHELD) == 0,
        None => false,
    };
    // What the pod's share does not pay for is not held, and need not be remembered.
    fits && kind
        && may_hold
        && is_agent_well()
        && share::is_left(frame.ifindex())
        && is_first_time(frame, found, asked)
}

/// Whether the agent has said lately that it is well.
#[inline(always)]
pub fn is_agent_well() -> bool {
    match maps::HOLD_UNTIL.get(0) {
        Some(until_ns) => now_ns() < *until_ns,
        None => false,
    }
}

/// Whether this frame was not held before. A frame that the agent puts back has the agent's mark. If
/// another program changes the mark, the frame would be held again and again.
#[inline(always)]
fn is_first_time(frame: &Frame<'_>, found: &Found, asked: Asked) -> bool {
    // The answer has used up its query, so it would not come to here a second time.
    if asked == Asked::Seen {
        return true;
    }
    let sequence = match found.kind() {
        Kind::Segment => found.sequence,
        // Two answers of one length can go to one port: glibc asks for A and AAAA from one socket.
        _ => match id(frame, found) {
            Ok(id) => id.into(),
            Err(_) => return false,
        },
    };
    let key = HeldKey {
        ifindex: frame.ifindex(),
        frame_len: frame.len(),
        sequence,
        ports: [found.src_port, found.dst_port],
    };
    let now = now_ns();
    // SAFETY: the value is one word, of this key or of another one (`maps`).
    match unsafe { maps::HELD.get(&key) } {
        Some(held_at) if now.wrapping_sub(*held_at) < HELD_AGAIN_NS => false,
        _ => maps::HELD.insert(&key, &now, 0).is_ok(),
    }
}

/// Goes on with the program that takes the answer off the wire, and does not return. Returns if the agent has
/// ended, however it did: the kernel then empties the array of programs.
#[inline(always)]
pub fn go_on(frame: &Frame<'_>) {
    // SAFETY: nothing here is to be dropped.
    unsafe { maps::HOLDERS.tail_call(frame.ctx, 0) }
}

/// The index of no interface.
const NOWHERE: u32 = 0;

/// The action that takes a packet off the wire: it is redirected to nowhere.
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
