//! The programs on a pod's host veth. On TC egress passes what Open vSwitch sends to the pod, on
//! TC ingress what the pod sends.
//!
//! The one on ingress remembers the queries that the pod sends to trusted resolvers. The one on
//! egress copies the answers to them, where some rule of the pod's namespace mentions the name,
//! into a ring buffer. Both count, by reason, every packet. They never change one, and their verdict
//! is "continue" but for one case: an answer that is in the ring buffer may be taken off the wire,
//! for the agent to put it back when it has done what the answer asks for. It says that it is
//! well several times a second; once it does not, nothing is taken off.

#![no_std]
#![no_main]

mod capture;
mod filter;
mod found;
mod fragments;
mod hold;
mod maps;
mod skb;
mod trust;

use aya_ebpf::{bindings::TC_ACT_UNSPEC, macros::classifier, programs::TcContext};
use dnsflow_common::{Reason, walk};

use crate::{
    found::{Found, Kind},
    skb::Frame,
};

/// Continue with the next program or filter: with TCX the value is called `TCX_NEXT` (Linux
/// `include/uapi/linux/bpf.h`), with clsact `TC_ACT_UNSPEC` (`include/uapi/linux/pkt_cls.h`).
const CONTINUE: i32 = TC_ACT_UNSPEC;

/// The classifier for the TC egress hook.
#[classifier]
pub fn dnsflow_egress(ctx: TcContext) -> i32 {
    let reason = match egress(&Frame::new(&ctx)) {
        Ok(reason) | Err(reason) => reason,
    };
    maps::count(&maps::COUNTERS, reason);
    match reason {
        Reason::Held => hold::take_off(),
        _ => CONTINUE,
    }
}

/// The classifier for the TC ingress hook.
#[classifier]
pub fn dnsflow_ingress(ctx: TcContext) -> i32 {
    let reason = match trust::remember(&Frame::new(&ctx)) {
        Ok(reason) | Err(reason) => reason,
    };
    maps::count(&maps::QUERY_COUNTERS, reason);
    CONTINUE
}

#[inline(always)]
fn egress(frame: &Frame<'_>) -> Result<Reason, Reason> {
    if hold::is_released(frame) {
        return Ok(Reason::Released);
    }
    let found = Found::answer(&walk::from_server(frame, &maps::DnsPorts)?).put_down()?;
    match found.kind() {
        Kind::Later => fragments::expected(frame, &found)?,
        kind => {
            trust::resolver(frame, &found)?;
            // The pod made a TCP connection itself; what is said on it, the agent looks at.
            if kind != Kind::Segment
                && let Err(reason) = trust::answer(frame, &found)
            {
                if reason == Reason::NoRule {
                    capture::keep(frame);
                }
                return Err(reason);
            }
            if found.is_first_fragment() {
                fragments::expect(frame, &found)?;
            }
        }
    }
    let hold = hold::holds(frame, &found);
    Ok(capture::capture(frame, hold))
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
