//! The programs on a pod's host veth. TC egress sees the packets from Open vSwitch to the pod, TC ingress those from
//! the pod.
//!
//! The program on ingress remembers the pod's queries to trusted resolvers, if they come from the pod's own
//! addresses. It reports the destinations of new connections, for pods behind an EgressFirewall. If the agent has set
//! a mask, the program sets these bits of each packet's mark to the group of the destination.
//!
//! The program on egress copies the answers to these queries into a ring buffer, if some rule of the pod's namespace
//! mentions the name, or the pod's names are recorded. Both programs copy TCP segments between the pod and trusted
//! resolvers, if some rule mentions any name.
//!
//! Where the agent has said so, the program on egress opens the addresses of an answer itself, and the answer goes on
//! to the pod.
//!
//! Both count every packet by reason. They never change the bytes of a packet. Their action is "continue", with two
//! exceptions. The program on egress may hold an answer that is in the ring buffer. The agent puts it back after it
//! has opened the addresses. The agent sends a heartbeat several times a second. Without the heartbeat, no answer is
//! held. In place of a frame that the agent puts back, the program sends a copy, and counts the copy.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod attempt;
mod capture;
mod entry;
mod filter;
mod found;
mod fragments;
mod hold;
mod maps;
mod opening;
mod share;
mod skb;
mod trust;

use aya_ebpf::{bindings::TC_ACT_UNSPEC, macros::classifier, programs::TcContext};
use dnsflow_common::{
    Reason,
    record::{KIND_ANSWER, KIND_HELD, KIND_SENT},
    walk::{self, Reader as _},
};

use crate::{
    found::{Found, Kind},
    skb::Frame,
    trust::{Asked, now_ns},
};

/// Continue with the next program or filter: with TCX the value is called `TCX_NEXT` (Linux
/// `include/uapi/linux/bpf.h`), with clsact `TC_ACT_UNSPEC` (`include/uapi/linux/pkt_cls.h`).
const CONTINUE: i32 = TC_ACT_UNSPEC;

/// The classifier for the TC egress hook.
#[classifier]
pub fn dnsflow_egress(ctx: TcContext) -> i32 {
    let frame = Frame::new(&ctx);
    if let Some(action) = hold::send_copy(&frame) {
        return action;
    }
    let reason = match egress(&frame) {
        Ok(reason) | Err(reason) => reason,
    };
    leave_out(&frame, reason);
    maps::count(&maps::COUNTERS, reason);
    CONTINUE
}

/// The longest IP packet with Ethernet header and two tags. What is longer is cut by the kernel ("BIG TCP").
const FRAME_MAX: u32 = 65_535 + 14 + 8;

/// Lets the agent know by the next record that it may not have seen all segments. Long data that are no DNS pass all
/// the time where the cluster has "BIG TCP". As segments of DNS they could hide no reset, and no beginning.
#[inline(always)]
fn leave_out(frame: &Frame<'_>, reason: Reason) {
    if reason.leaves_segments_out() && frame.len() <= FRAME_MAX {
        share::leaves_out_segment(frame.ifindex());
    }
}

/// Segments are handed over only where a rule mentions any name.
#[inline(always)]
fn is_followed(frame: &Frame<'_>) -> Result<(), Reason> {
    let followed = filter::any_name(frame.ifindex());
    if followed.is_err() {
        share::leaves_out_segment(frame.ifindex());
    }
    followed
}

/// Takes an answer off the wire. The classifier for the TC egress hook goes on with this program where an answer is
/// to be held.
#[classifier]
pub fn dnsflow_hold(ctx: TcContext) -> i32 {
    let frame = Frame::new(&ctx);
    let reason = capture::capture(&frame, KIND_HELD, now_ns());
    leave_out(&frame, reason);
    maps::count(&maps::COUNTERS, reason);
    match reason {
        Reason::Held => hold::take_off(),
        _ => CONTINUE,
    }
}

/// Opens the addresses of an answer, if it is certain which they are and that their rules are in force. The classifier
/// for the TC egress hook goes on with this program. All else goes to the agent as without it.
#[classifier]
pub fn dnsflow_open(ctx: TcContext) -> i32 {
    let frame = Frame::new(&ctx);
    let reason = match opening::open(&frame) {
        Ok(reason) | Err(reason) => reason,
    };
    leave_out(&frame, reason);
    maps::count(&maps::COUNTERS, reason);
    CONTINUE
}

/// The classifier for the TC ingress hook.
#[classifier]
pub fn dnsflow_ingress(ctx: TcContext) -> i32 {
    let frame = Frame::new(&ctx);
    entry::mark(&frame);
    let reason = match ingress(&frame) {
        Ok(reason) | Err(reason) => reason,
    };
    leave_out(&frame, reason);
    maps::count(&maps::QUERY_COUNTERS, reason);
    CONTINUE
}

#[inline(always)]
fn egress(frame: &Frame<'_>) -> Result<Reason, Reason> {
    if hold::is_released(frame) {
        return Ok(Reason::Released);
    }
    let found = Found::answer(&walk::from_server_or_empty(frame, &maps::DnsPorts)?).put_down()?;
    let asked = match found.kind() {
        Kind::Later => {
            fragments::expected(frame, &found)?;
            Some(Asked::Seen)
        }
        Kind::Segment => {
            trust::from_resolver(frame, &found)?;
            is_followed(frame)?;
            trust::to_own_address(frame, &found)?;
            // Whether the pod has made the connection, and asked on it, the agent looks at.
            Some(Asked::Perhaps)
        }
        // Only what pods send is one.
        Kind::Attempt => return Err(Reason::OtherPort),
        Kind::Message => {
            let judged =
                trust::from_resolver(frame, &found).and_then(|()| trust::answer(frame, &found));
            // An answer without a record has used up its query, if it answers one. Of a name that a rule mentions,
            // people ask about errors, and why there is no address. Most names have none of the other IP version.
            let empty = found.empty();
            let asked = match (judged, empty) {
                (Ok(asked), None) => Some(asked),
                (Ok(Asked::Seen), Some(Reason::NoAnswers))
                    if !trust::is_for_addresses(found.ip().version) =>
                {
                    return Err(Reason::NoAnswers);
                }
                (Ok(Asked::Seen), Some(_)) | (Err(Reason::NoRule), None) => {
                    let deferred = capture::defer(frame, empty.is_none());
                    match (empty, filter::is_recorded(frame.ifindex())) {
                        (Some(reason), _) => return Err(reason),
                        // Nothing is to be done before the pod has it.
                        (None, true) => None,
                        (None, false) => return Err(deferred),
                    }
                }
                (_, Some(reason)) | (Err(reason), None) => return Err(reason),
            };
            if found.is_first_fragment() {
                fragments::expect(frame, &found)?;
            }
            asked
        }
    };
    let now = now_ns();
    if let Some(asked) = asked {
        let holds = hold::holds(frame, &found, asked, now);
        if asked == Asked::Seen && opening::may_open(frame, &found) {
            opening::go_on(frame, holds)?;
        }
        if holds {
            hold::go_on(frame);
        }
    }
    Ok(capture::capture(frame, KIND_ANSWER, now))
}

#[inline(always)]
fn ingress(frame: &Frame<'_>) -> Result<Reason, Reason> {
    let found = Found::sent(&walk::from_pod(frame, &maps::DnsPorts)?).put_down()?;
    if found.kind() == Kind::Attempt && !attempt::is_watched(frame) {
        return Err(Reason::OtherPort);
    }
    // Logical VLANs are dropped (`build_lswitch_lflows_admission_control` in OVN's
    // northd/northd.c).
    if found.has_tag() || frame.has_tag_outside() {
        return Err(Reason::Tagged);
    }
    let to_resolver = match found.kind() {
        Kind::Attempt => Err(Reason::OtherPort),
        _ => trust::to_resolver(frame, &found),
    };
    if let Err(reason) = to_resolver {
        // A question to somebody else is an attempt like any other.
        return match found.begins() {
            Some(protocol) if attempt::is_watched(frame) => {
                trust::from_own_address(frame, &found)?;
                attempt::tell(frame, &found, protocol)
            }
            _ => Err(reason),
        };
    }
    trust::from_own_address(frame, &found)?;
    if found.kind() == Kind::Segment {
        is_followed(frame)?;
        return Ok(capture::capture(frame, KIND_SENT, now_ns()));
    }
    trust::remember(frame, &found)
}

/// Nothing here panics: where the compiler cannot see that, the verifier refuses the endless
/// loop.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Not a licence that the kernel takes as GPL-compatible, and it need not be: no helper in use is
/// reserved for those. The verifier would refuse one.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 11] = *b"Apache-2.0\0";
