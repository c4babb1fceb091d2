//! Copying a frame into the ring buffer.

use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::{bpf_ktime_get_ns, bpf_ringbuf_output, bpf_skb_load_bytes},
};
use aya_log_ebpf::warn;
use dnsflow_common::{
    Reason, bound,
    record::{KIND_ANSWER, MAX_CAPTURE, RecordHeader},
    walk::Reader as _,
};

use crate::{
    maps::{self, RECORDS},
    skb::Frame,
};

/// Hands the frame to the agent: a record that ends where the captured bytes end.
#[inline(always)]
pub fn capture(frame: &Frame<'_>) -> Reason {
    let Some(scratch) = maps::scratch() else {
        return Reason::CopyFailed;
    };
    let captured_len = frame.len().min(MAX_CAPTURE as u32);
    // SAFETY: `scratch` is this CPU's map value, used by nothing else meanwhile; the context is
    // the kernel's.
    unsafe {
        let skb = frame.ctx.skb.skb;
        (*scratch).header = RecordHeader {
            captured_at_ns: bpf_ktime_get_ns(),
            ifindex: frame.ifindex(),
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
        let error = bpf_skb_load_bytes(
            frame.ctx.as_ptr(),
            0,
            to,
            bound::length::<{ MAX_CAPTURE as u32 - 1 }>(captured_len),
        );
        if error != 0 {
            warn!(
                frame.ctx,
                "cannot copy {} bytes of a frame: error {}", captured_len, error
            );
            return Reason::CopyFailed;
        }
        let len = size_of::<RecordHeader>() as u64
            + u64::from(bound::length::<{ MAX_CAPTURE as u32 - 1 }>(captured_len));
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
