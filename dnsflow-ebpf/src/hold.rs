//! Which answers are taken off the wire until the agent puts them back.

use aya_ebpf::{
    bindings::TC_ACT_SHOT,
    helpers::generated::{bpf_redirect, bpf_sk_fullsock},
};
use dnsflow_common::{
    key::{HELD_AGAIN_NS, HeldKey, NAME_SET_EMPTY, NAME_SET_UNHELD},
    record::MAX_CAPTURE,
    walk::Reader as _,
};

use crate::{
    found::{Found, Kind},
    maps, share,
    skb::Frame,
    trust::{Asked, id},
};

/// Whether to hold this answer. The answer is trusted, and a rule mentions its name or may mention it.
///
/// Nothing is held unless the agent has said lately that it is well, nor in a namespace that has switched holding off.
/// A frame is not held if the agent could not put it back unchanged, or if it was held before.
#[inline(always)]
pub fn holds(frame: &Frame<'_>, found: &Found, asked: Asked, now: u64) -> bool {
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
        && is_agent_well(now)
        && share::is_left(frame.ifindex(), now)
        && is_first_time(frame, found, asked, now)
}

/// Whether the agent has said lately that it is well.
#[inline(always)]
pub fn is_agent_well(now: u64) -> bool {
    match maps::HOLD_UNTIL.get(0) {
        Some(until_ns) => now < *until_ns,
        None => false,
    }
}

/// Whether this frame was not held before. A frame that the agent puts back has the agent's mark. If
/// another program changes the mark, the frame would be held again and again.
#[inline(always)]
fn is_first_time(frame: &Frame<'_>, found: &Found, asked: Asked, now: u64) -> bool {
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

/// `NET_XMIT_DROP` (Linux include/linux/netdevice.h): the interface's queue is full, or a program behind this one
/// drops the frame.
const XMIT_DROP: i64 = 1;

/// Sends a copy in place of a frame that the agent puts back. Gives the action for the frame itself; `None` if it goes
/// on, because it is none of the agent's, or there is no copy.
///
/// The frame is charged to the agent's socket until the pod's stack has taken it. A slow queue on the interface, or in
/// the pod's own namespace, would fill the socket for all pods. A copy is charged to nobody (`__skb_clone` in Linux
/// net/core/skbuff.c). It takes the same way from the beginning, so it comes to this program once more.
#[inline(always)]
pub fn send_copy(frame: &Frame<'_>) -> Option<i32> {
    if !is_charged_to_an_agent(frame) {
        return None;
    }
    match frame.ctx.clone_redirect(frame.ifindex(), 0) {
        // The agent is told of it as of any drop: ENOBUFS (`packet_snd` in Linux net/packet/af_packet.c).
        Err(XMIT_DROP) => Some(TC_ACT_SHOT),
        // No memory, or the interface is down: the frame itself meets the same, or is sent.
        Err(error) if error < 0 => None,
        // Any other positive number says that the queue is long (`NET_XMIT_CN`).
        Ok(()) | Err(_) => Some(take_off()),
    }
}

/// The family of packet sockets (packet(7)).
const AF_PACKET: u32 = 17;

/// Whether the frame is charged to a packet socket that has a mark, as those of agents have: of this one, or of the
/// next one, whose programs are not here yet. To copy a frame of anybody else's harms nothing. The mark of the frame
/// itself does not say it, because another program may have changed it.
#[inline(always)]
fn is_charged_to_an_agent(frame: &Frame<'_>) -> bool {
    // SAFETY: the context is the kernel's. The verifier checks that a socket is read only where there is one.
    unsafe {
        let socket = (*frame.ctx.skb.skb).__bindgen_anon_2.sk;
        if socket.is_null() || (*socket).family != AF_PACKET {
            return false;
        }
        let socket = bpf_sk_fullsock(socket);
        !socket.is_null() && (*socket).mark != 0
    }
}
