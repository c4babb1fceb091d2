//! Bounds that a verifier sees right where they are used.
//!
//! A compiler drops a mask that it knows to be useless, and with it what a verifier needs: that knows
//! less, and before Linux 6.8 forgets the bounds of a value that was spilled to the stack. So the
//! compiler is made to forget them too.

/// The lower bits of `value` that `MASK`, one less than a power of two, has.
#[inline(always)]
pub fn masked<const MASK: u32>(value: u32) -> u32 {
    const { assert!(MASK < u32::MAX && (MASK + 1).is_power_of_two()) };
    opaque(value) & MASK
}

/// `value` itself, which must be from 1 to `MASK` and 1.
#[inline(always)]
pub fn length<const MASK: u32>(value: u32) -> u32 {
    const { assert!(MASK < u32::MAX && (MASK + 1).is_power_of_two()) };
    (opaque(value).wrapping_sub(1) & MASK) + 1
}

/// `value` itself, of which the compiler knows nothing any more.
#[cfg(target_arch = "bpf")]
#[inline(always)]
fn opaque(value: u32) -> u32 {
    let mut value = u64::from(value);
    // An instruction, since the kernel refuses two source lines at one place.
    // SAFETY: leaves all as it is.
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) value, options(pure, nomem, nostack)) };
    value as u32
}

/// Only a verifier needs more.
#[cfg(not(target_arch = "bpf"))]
#[inline(always)]
fn opaque(value: u32) -> u32 {
    value
}
