//! How much each interface may hand to the agent. A pod that has used up its share loses its own
//! packets, and no other pod loses any.

use core::ptr;

use dnsflow_common::{
    key::Share,
    record::{
        ATTEMPT_BURST, ATTEMPT_INTERVAL_NS, DEFER_BURST, DEFER_INTERVAL_NS, SHARE_BURST_BYTES,
        SHARE_NS_PER_BYTE, SHARE_RECORD_BYTES,
    },
};

use crate::maps;

/// How much of its share of the ring buffer an interface may use at once.
const RING_BURST_NS: u64 = SHARE_BURST_BYTES * SHARE_NS_PER_BYTE;

/// The time by which shares of the ring buffer come back. It stands still while nobody reads the ring buffer: otherwise,
/// one pod would fill it.
#[inline(always)]
fn read_ns(now: u64) -> u64 {
    match maps::READ_UNTIL.get(0) {
        Some(until) => now.min(*until),
        None => 0,
    }
}

/// Whether an interface has something left of its share of the ring buffer.
#[inline(always)]
pub fn is_left(ifindex: u32, now: u64) -> bool {
    match maps::SHARES.get_ptr_mut(&ifindex) {
        // SAFETY: as in `pays`.
        Some(share) if maps::is_shared() => unsafe {
            let paid = ptr::read_volatile(&raw const (*share).ring_paid_at_ns);
            paid <= read_ns(now) + RING_BURST_NS
        },
        _ => true,
    }
}

/// Takes a record of a frame of this length from the interface's share of the ring buffer.
#[inline(always)]
pub fn pays_for_record(ifindex: u32, len: u32, now: u64) -> bool {
    let cost_ns = (u64::from(len) + SHARE_RECORD_BYTES) * SHARE_NS_PER_BYTE;
    pays(ifindex, read_ns(now), cost_ns, RING_BURST_NS, |share| {
        // SAFETY: `pays` gives the place of a share.
        unsafe {
            (
                &raw mut (*share).ring_paid_at_ns,
                &raw mut (*share).left_out,
            )
        }
    })
}

/// Takes one answer from the interface's share of those that are deferred.
#[inline(always)]
pub fn pays_for_deferring(ifindex: u32, now: u64) -> bool {
    pays(
        ifindex,
        now,
        DEFER_INTERVAL_NS,
        DEFER_BURST * DEFER_INTERVAL_NS,
        |share| {
            // SAFETY: `pays` gives the place of a share.
            unsafe {
                (
                    &raw mut (*share).deferred_paid_at_ns,
                    &raw mut (*share).left_out,
                )
            }
        },
    )
}

/// Takes one attempt from the interface's share of those that the agent is told of.
#[inline(always)]
pub fn pays_for_attempt(ifindex: u32, now: u64) -> bool {
    pays(
        ifindex,
        now,
        ATTEMPT_INTERVAL_NS,
        ATTEMPT_BURST * ATTEMPT_INTERVAL_NS,
        |share| {
            // SAFETY: as above.
            unsafe {
                (
                    &raw mut (*share).attempts_paid_at_ns,
                    &raw mut (*share).attempts_left_out,
                )
            }
        },
    )
}

/// Whether all that an interface has handed over before is paid for within `burst_ns`. If so, the
/// interface pays `cost_ns` more. If not, the packet is counted as left out. `account` gives the places of
/// both numbers.
#[inline(always)]
fn pays(
    ifindex: u32,
    now: u64,
    cost_ns: u64,
    burst_ns: u64,
    account: impl FnOnce(*mut Share) -> (*mut u64, *mut u64),
) -> bool {
    if !maps::is_shared() {
        return true;
    }
    // Without room for a share, nothing is handed over.
    let Some(share) = share_of(ifindex) else {
        return false;
    };
    let (paid_at, left_out) = account(share);
    // SAFETY: a value of the map stays readable and writable while the program runs. Another CPU may
    // write it meanwhile; then one of the two payments is lost.
    unsafe {
        let paid = ptr::read_volatile(paid_at).max(now);
        if paid - now > burst_ns {
            *left_out += 1;
            return false;
        }
        ptr::write_volatile(paid_at, paid + cost_ns);
    }
    true
}

/// The share of an interface, which is made if there is none.
#[inline(always)]
fn share_of(ifindex: u32) -> Option<*mut Share> {
    if let Some(share) = maps::SHARES.get_ptr_mut(&ifindex) {
        return Some(share);
    }
    // If another CPU was faster, the share that it made stays.
    let _ = maps::SHARES.insert(&ifindex, &Share::default(), BPF_NOEXIST);
    maps::SHARES.get_ptr_mut(&ifindex)
}

/// Counts a packet that the agent does not know of, and that could have been a segment of DNS over TCP.
#[inline(always)]
pub fn leaves_out_segment(ifindex: u32) {
    if let Some(share) = share_of(ifindex) {
        // SAFETY: as in `pays`. Of two CPUs that count at once, one may be lost: the number changes all the same.
        unsafe {
            let count = &raw mut (*share).segments_left_out;
            ptr::write_volatile(count, ptr::read_volatile(count) + 1);
        }
    }
}

/// How many packets of an interface were counted by [`leaves_out_segment`], modulo 2^32.
#[inline(always)]
pub fn segments_left_out(ifindex: u32) -> u32 {
    match maps::SHARES.get_ptr_mut(&ifindex) {
        // SAFETY: as in `pays`.
        Some(share) => unsafe { ptr::read_volatile(&raw const (*share).segments_left_out) as u32 },
        None => 0,
    }
}

/// Makes an entry, and never replaces one (`BPF_NOEXIST`, Linux include/uapi/linux/bpf.h).
const BPF_NOEXIST: u64 = 1;
