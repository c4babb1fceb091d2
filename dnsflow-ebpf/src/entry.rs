//! The group of a packet's destination, written into the packet's mark.
//!
//! Flows match the mark in place of the destination. The bits of the mask are cleared if there is no entry: a
//! packet cannot bring a group along.

use aya_ebpf::EbpfContext as _;
use dnsflow_common::{
    key::{ENTRY_USED_EVERY_NS, EntryKey},
    walk,
};

use crate::{capture, maps, skb::Frame, trust::now_ns};

/// Sets the bits of the mask to the group of the packet's destination. All other bits stay. Without a mask,
/// nothing is looked up.
#[inline(always)]
pub fn mark(frame: &Frame<'_>) {
    let mask = maps::mark_mask();
    if mask == 0 {
        return;
    }
    let group = group(frame).unwrap_or(0) & mask;
    // SAFETY: the context is the kernel's, and a TC program may write this field (`tc_cls_act_is_valid_access`
    // in Linux net/core/filter.c).
    unsafe {
        let skb = frame.ctx.as_ptr().cast::<aya_ebpf::bindings::__sk_buff>();
        let mark = (*skb).mark;
        if mark & mask != group {
            (*skb).mark = mark & !mask | group;
        }
    }
}

/// The bits of the destination's group, if there is an entry that has not ended. Records the use.
///
/// If the agent removes or replaces the entry meanwhile, the program may read the entry of another address (`maps`). The
/// mark has a check of its key: the packet gets no mark then, and the other address does not count as used, unless the
/// kernel reuses the element between the check and the write.
#[inline(always)]
fn group(frame: &Frame<'_>) -> Option<u32> {
    let key = EntryKey::destination(frame, frame.ifindex(), walk::ip_header(frame)?)?;
    let entry = maps::ENTRIES.get_ptr_mut(&key)?;
    // SAFETY: the memory stays that of an element of this map. Its fields are words, and each is read and written at
    // once, in this order.
    unsafe {
        let until_ns = (&raw const (*entry).until_ns).read_volatile();
        let mark = (&raw const (*entry).mark).read_volatile().of(&key)?;
        let now = now_ns();
        if now >= until_ns || !capture::is_attended(now) {
            return None;
        }
        if now.wrapping_sub((*entry).used_ns) > ENTRY_USED_EVERY_NS {
            (*entry).used_ns = now;
        }
        Some(mark)
    }
}
