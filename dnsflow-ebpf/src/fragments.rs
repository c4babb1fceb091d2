//! Fragments of answers. The first fragment has the ports and the question. A later fragment is judged
//! by the first one alone.

use dnsflow_common::{
    Reason,
    key::{FRAGMENT_AGE_MAX_NS, FragmentKey},
};

use crate::{found::Found, maps, share, skb::Frame, trust::now_ns};

#[inline(always)]
fn key(frame: &Frame<'_>, found: &Found) -> Result<FragmentKey, Reason> {
    FragmentKey::new(frame, frame.ifindex(), found.ip(), found.fragment_id)
        .ok_or(Reason::CopyFailed)
}

/// Lets the fragments behind this first one be captured, if it will be.
#[inline(always)]
pub fn expect(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    let now = now_ns();
    if !share::is_left(frame.ifindex(), now) {
        return Ok(());
    }
    // If there is no room, the later fragments are left out and counted.
    let _ = maps::FRAGMENTS.insert(key(frame, found)?, now, 0);
    Ok(())
}

/// Checks that the first fragment was captured just before.
#[inline(always)]
pub fn expected(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    // SAFETY: the value is one word, of this key or of another one (`maps`).
    match unsafe { maps::FRAGMENTS.get(key(frame, found)?) } {
        Some(first) if now_ns().wrapping_sub(*first) <= FRAGMENT_AGE_MAX_NS => Ok(()),
        _ => Err(Reason::UnexpectedFragment),
    }
}
