//! Where pods behind an EgressFirewall begin connections to: the agent is told, and says which of them are
//! denied. Nothing waits for that.

use aya_ebpf::{bindings::BPF_RB_FORCE_WAKEUP, helpers::generated::bpf_ringbuf_output};
use dnsflow_common::{
    Reason,
    key::AttemptKey,
    record::{ATTEMPT_AGAIN_NS, Attempt, KIND_ATTEMPT, RecordHeader},
    walk::Reader as _,
};

use crate::{
    found::Found,
    maps::{ASIDE, ATTEMPTS, WATCHED},
    share,
    skb::Frame,
    trust::now_ns,
};

/// Whether the agent is told of this interface's attempts.
#[inline(always)]
pub fn is_watched(frame: &Frame<'_>) -> bool {
    WATCHED.get_ptr(frame.ifindex()).is_some()
}

/// Tells the agent of an attempt, unless it was told of the same lately.
#[inline(always)]
pub fn tell(frame: &Frame<'_>, found: &Found, protocol: u8) -> Result<Reason, Reason> {
    let ifindex = frame.ifindex();
    let key = AttemptKey::new(frame, ifindex, found.ip(), protocol, found.dst_port);
    let key = key.ok_or(Reason::CopyFailed)?;
    let now = now_ns();
    // SAFETY: the value is one word, of this key or of another one (`maps`).
    match unsafe { ATTEMPTS.get(&key) } {
        Some(told_at) if now.wrapping_sub(*told_at) < ATTEMPT_AGAIN_NS => {
            return Ok(Reason::AttemptKnown);
        }
        _ => {}
    }
    if !share::pays_for_attempt(ifindex, now) {
        return Err(Reason::AttemptOverShare);
    }
    let record = Attempt {
        header: RecordHeader {
            captured_at_ns: now,
            ifindex,
            frame_len: frame.len(),
            captured_len: size_of::<AttemptKey>() as u32,
            kind: KIND_ATTEMPT,
            vlan_tci: 0,
            gso_size: 0,
            left_out: 0,
        },
        key,
    };
    // SAFETY: the record is as long.
    let error = unsafe {
        bpf_ringbuf_output(
            (&raw const ASIDE).cast_mut().cast(),
            (&raw const record).cast_mut().cast(),
            size_of::<Attempt>() as u64,
            // Answers may wait in front of it.
            BPF_RB_FORCE_WAKEUP.into(),
        )
    };
    if error != 0 {
        return Err(Reason::AttemptLost);
    }
    // Where this fails, the agent is told once more.
    let _ = ATTEMPTS.insert(&key, &now, 0);
    Ok(Reason::Attempt)
}
