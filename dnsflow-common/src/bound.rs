//! Bounds that the verifier sees where they are used.
//!
//! The compiler removes a mask if it knows that the value is small enough. The verifier knows less than the
//! compiler: before Linux 6.8, it forgets the bounds of a value that was spilled to the stack. Then the
//! verifier needs the mask. So the value is hidden from the compiler.

use core::ptr;

/// The bits of `value` that are set in `MASK`, which is a power of two less one.
#[inline(always)]
pub fn masked<const MASK: u32>(value: u32) -> u32 {
    const { assert!(MASK < u32::MAX && (MASK + 1).is_power_of_two()) };
    opaque(value) & MASK
}

/// `value` itself, which must be from 1 to `MASK + 1`.
#[inline(always)]
pub fn length<const MASK: u32>(value: u32) -> u32 {
    const { assert!(MASK < u32::MAX && (MASK + 1).is_power_of_two()) };
    (opaque(value).wrapping_sub(1) & MASK) + 1
}

/// A number in memory. Neither the compiler nor the verifier knows anything of the value that is read: else each value
/// that the verifier knows to be possible would be a case of its own in all code that follows.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Word(u32);

impl Word {
    /// The number.
    #[inline(always)]
    pub fn get(&self) -> u32 {
        // SAFETY: the place is borrowed.
        unsafe { ptr::read_volatile(&raw const self.0) }
    }

    /// Makes it this number.
    #[inline(always)]
    pub fn set(&mut self, value: u32) {
        // SAFETY: the place is borrowed.
        unsafe { ptr::write_volatile(&raw mut self.0, value) }
    }
}

/// `value` itself; the compiler knows nothing of the result.
#[cfg(target_arch = "bpf")]
#[inline(always)]
fn opaque(value: u32) -> u32 {
    let mut value = u64::from(value);
    // The kernel refuses two source lines at one instruction, so this is an instruction, and not empty.
    // SAFETY: the instruction changes nothing.
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) value, options(pure, nomem, nostack)) };
    value as u32
}

/// `value` itself: no verifier reads code of user space.
#[cfg(not(target_arch = "bpf"))]
#[inline(always)]
fn opaque(value: u32) -> u32 {
    value
}
