//! Copying a frame out of the packet buffer: into the ring buffer, or into the queue of answers that are
//! deferred for a rule that may come.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP},
    helpers::generated::{
        bpf_map_push_elem, bpf_ringbuf_output, bpf_ringbuf_query, bpf_skb_load_bytes,
    },
};
use aya_log_ebpf::warn;
use dnsflow_common::{
    Reason, bound,
    record::{
        ASIDE_UNREAD_MAX, DEFERRED_FRAME_MAX, KIND_ANSWER, KIND_HELD, KIND_OPENED, MAX_CAPTURE,
        RecordHeader,
    },
    walk::Reader as _,
};

use crate::{
    attempt,
    maps::{self, ASIDE, CAPTURE_UNTIL, DEFERRED, RECORDS, Scratch},
    share,
    skb::Frame,
    trust::now_ns,
};

/// The flag with which a full queue drops its oldest entry (`BPF_EXIST`, Linux
/// `kernel/bpf/queue_stack_maps.c`).
const OLDEST_GOES: u64 = 2;

/// Hands the frame to the agent as a record of this kind. The record ends where the captured bytes end. `now` is the
/// time of the capture.
#[inline(always)]
pub fn capture(frame: &Frame<'_>, kind: u16, now: u64) -> Reason {
    if !is_attended(now) {
        return Reason::Unattended;
    }
    let len = frame.len().min(MAX_CAPTURE as u32);
    if !share::pays_for_record(frame.ifindex(), len, now) {
        return Reason::OverShare;
    }
    let Some(scratch) = copy::<{ MAX_CAPTURE as u32 - 1 }>(frame, len, kind, now) else {
        warn!(frame.ctx, "cannot copy {} bytes of a frame", len);
        return Reason::CopyFailed;
    };
    let len = size_of::<RecordHeader>() as u64
        + u64::from(bound::length::<{ MAX_CAPTURE as u32 - 1 }>(len));
    // With zero as flags, the kernel wakes the agent at once if the agent had read all records.
    // SAFETY: the scratch space is at least `len` bytes long.
    let error = unsafe {
        bpf_ringbuf_output(
            (&raw const RECORDS).cast_mut().cast(),
            scratch.cast(),
            len,
            0,
        )
    };
    match (error, kind) {
        (0, KIND_HELD) => Reason::Held,
        (0, KIND_OPENED) => Reason::Opened,
        (0, _) => Reason::Captured,
        _ => Reason::RingFull,
    }
}

/// Defers an answer that no rule mentions, and says what became of it. An answer that is too long, or of a
/// pod that has used up its share, is left out. Of a pod behind an EgressFirewall, a copy goes into the ring
/// buffer of attempts: the agent takes the names of the pod's attempts from it. There alone goes an answer without a
/// record, for which no rule is waited (`has_records`).
#[inline(always)]
pub fn defer(frame: &Frame<'_>, has_records: bool) -> Reason {
    let (len, now) = (frame.len(), now_ns());
    if len > DEFERRED_FRAME_MAX as u32 || !share::pays_for_deferring(frame.ifindex(), now) {
        return Reason::NotDeferred;
    }
    let Some(scratch) = copy::<{ DEFERRED_FRAME_MAX as u32 - 1 }>(frame, len, KIND_ANSWER, now)
    else {
        return Reason::CopyFailed;
    };
    // SAFETY: a record begins like a deferred answer, and is longer.
    let error = has_records
        && unsafe {
            bpf_map_push_elem(
                (&raw const DEFERRED).cast_mut().cast(),
                scratch.cast(),
                OLDEST_GOES,
            ) != 0
        };
    if error {
        return Reason::NotDeferred;
    }
    if !attempt::is_watched(frame) {
        return Reason::NoRule;
    }
    let len = size_of::<RecordHeader>() as u64
        + u64::from(bound::length::<{ DEFERRED_FRAME_MAX as u32 - 1 }>(len));
    // SAFETY: the scratch space is at least `len` bytes long.
    let error = unsafe {
        let ring = (&raw const ASIDE).cast_mut().cast();
        let unread = bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA.into());
        let wake = match unread > ASIDE_UNREAD_MAX.into() {
            true => BPF_RB_FORCE_WAKEUP,
            false => BPF_RB_NO_WAKEUP,
        };
        bpf_ringbuf_output(ring, scratch.cast(), len, wake.into())
    };
    match error {
        0 => Reason::NoRule,
        // An attempt has no name then, or an older one.
        _ => Reason::AttemptLost,
    }
}

/// Whether somebody may come to read what is captured.
#[inline(always)]
pub fn is_attended(now: u64) -> bool {
    match CAPTURE_UNTIL.get(0) {
        Some(until) => *until == 0 || now < *until,
        None => false,
    }
}

/// Makes a record of the first `len` bytes of the frame. `len` is from 1 to `MASK + 1`.
#[inline(always)]
fn copy<const MASK: u32>(frame: &Frame<'_>, len: u32, kind: u16, now: u64) -> Option<*mut Scratch> {
    let scratch = maps::scratch()?;
    // SAFETY: `scratch` is this CPU's map value, which no other CPU uses (`maps`); the context is the kernel's.
    unsafe {
        let skb = frame.ctx.skb.skb;
        (*scratch).header = RecordHeader {
            captured_at_ns: now,
            ifindex: frame.ifindex(),
            frame_len: frame.len(),
            captured_len: len,
            kind,
            vlan_tci: if (*skb).vlan_present != 0 {
                (*skb).vlan_tci as u16
            } else {
                0
            },
            gso_size: (*skb).gso_size,
            left_out: share::segments_left_out(frame.ifindex()),
        };
        let to = (&raw mut (*scratch).frame).cast();
        let error = bpf_skb_load_bytes(frame.ctx.as_ptr(), 0, to, bound::length::<MASK>(len));
        (error == 0).then_some(scratch)
    }
}
