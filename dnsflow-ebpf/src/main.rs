//! The program on TC egress of a pod's host veth: what Open vSwitch sends to the pod passes here.
//!
//! It copies DNS answers into a ring buffer and counts, by reason, every packet it does not copy.
//! It never changes, delays or drops a packet: the verdict is always "continue".

#![no_std]
#![no_main]

mod capture;
mod maps;
mod skb;

use aya_ebpf::{bindings::TC_ACT_UNSPEC, macros::classifier, programs::TcContext};
use dnsflow_common::walk;

/// Continue with the next program or filter: with TCX the value is called `TCX_NEXT` (Linux
/// `include/uapi/linux/bpf.h`), with clsact `TC_ACT_UNSPEC` (`include/uapi/linux/pkt_cls.h`).
const CONTINUE: i32 = TC_ACT_UNSPEC;

/// The classifier for the TC egress hook.
#[classifier]
pub fn dnsflow_egress(ctx: TcContext) -> i32 {
    let frame = skb::Frame::new(&ctx);
    let reason = match walk::dns_answer(&frame, &maps::DnsPorts) {
        Ok(_) => capture::capture(&ctx, &frame),
        Err(reason) => reason,
    };
    maps::count(reason);
    CONTINUE
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
