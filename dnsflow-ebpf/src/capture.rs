//! Copying a frame into the ring buffer.

use core::ptr;

use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::{bpf_ktime_get_ns, bpf_ringbuf_output, bpf_skb_load_bytes},
    programs::TcContext,
};
use aya_log_ebpf::warn;
use dnsflow_common::{
    Reason,
    record::{KIND_ANSWER, MAX_CAPTURE, RecordHeader},
    walk::Reader as _,
};

use crate::{
    maps::{RECORDS, SCRATCH, Scratch},
    skb::Frame,
};

/// Hands the frame to the agent: a record that ends where the captured bytes end.
#[inline(always)]
pub fn capture(ctx: &TcContext, frame: &Frame<'_>) -> Reason {
    let Some(scratch) = SCRATCH.get_ptr_mut(0) else {
        return Reason::CopyFailed;
    };
    let captured_len = frame.len().min(MAX_CAPTURE as u32);
    // SAFETY: `scratch` is this CPU's map value, used by nothing else meanwhile; the context is
    // the kernel's.
    unsafe {
        let skb = ctx.skb.skb;
        (*scratch).header = RecordHeader {
            captured_at_ns: bpf_ktime_get_ns(),
            ifindex: (*skb).ifindex,
            frame_len: frame.len(),
            captured_len,
            kind: KIND_ANSWER,
            vlan_tci: if (*skb).vlan_present != 0 {
                (*skb).vlan_tci as u16
            } else {
                0
            },
        };
        let to = (&raw mut (*scratch).frame).cast();
        let error = bpf_skb_load_bytes(ctx.as_ptr(), 0, to, bounded_len(scratch));
        if error != 0 {
            warn!(
                ctx,
                "cannot copy {} bytes of a frame: error {}", captured_len, error
            );
            return Reason::CopyFailed;
        }
        let len = size_of::<RecordHeader>() as u64 + u64::from(bounded_len(scratch));
        // Zero flags: the agent is woken when it has read everything before, at once.
        match bpf_ringbuf_output(
            (&raw const RECORDS).cast_mut().cast(),
            scratch.cast(),
            len,
            0,
        ) {
            0 => Reason::Captured,
            _ => Reason::RingFull,
        }
    }
}

/// The captured length, with bounds that a verifier sees right where it is used.
///
/// Verifiers before Linux 6.8 forget the bounds of a value that was spilled to the stack, and the
/// compiler drops a mask that it knows to be useless. So the length is read back from memory,
/// where neither knows anything about it, and masked: 1 to `MAX_CAPTURE`.
#[inline(always)]
unsafe fn bounded_len(scratch: *const Scratch) -> u32 {
    // SAFETY: the caller's pointer is to a live map value.
    let len = unsafe { ptr::read_volatile(&raw const (*scratch).header.captured_len) };
    (len.wrapping_sub(1) & (MAX_CAPTURE as u32 - 1)) + 1
}
