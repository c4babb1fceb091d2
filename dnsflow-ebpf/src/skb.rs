//! A packet buffer as the packet walk reads it.

use core::{mem::MaybeUninit, ptr};

use aya_ebpf::{EbpfContext as _, helpers::generated::bpf_skb_load_bytes, programs::TcContext};
use dnsflow_common::{bound::masked, walk::Reader};

/// A bound for offsets: larger than every sum that the packet walk makes, and smaller than the verifier's
/// own limit of 65,535.
const OFFSET: u32 = (1 << 15) - 1;

/// A frame in an skb.
///
/// Headers are usually in the linear part of the buffer, and are read directly there, because a helper
/// call costs several times as much. A helper reads the bytes outside of the linear part.
pub struct Frame<'a> {
    pub ctx: &'a TcContext,
    len: u32,
}

impl<'a> Frame<'a> {
    /// The frame that a program was called for; at both TC hooks it begins at the Ethernet
    /// header.
    #[inline(always)]
    pub fn new(ctx: &'a TcContext) -> Self {
        Self {
            ctx,
            len: ctx.len(),
        }
    }

    /// The index of the interface that the program is attached to.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        // SAFETY: the context is the kernel's.
        unsafe { (*self.ctx.skb.skb).ifindex }
    }

    /// Whether the kernel keeps a VLAN tag beside the frame.
    #[inline(always)]
    pub fn has_tag_outside(&self) -> bool {
        // SAFETY: the context is the kernel's.
        unsafe { (*self.ctx.skb.skb).vlan_present != 0 }
    }
}

impl Reader for Frame<'_> {
    #[inline(always)]
    fn len(&self) -> u32 {
        self.len
    }

    #[inline(always)]
    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let start = self.ctx.data() + masked::<OFFSET>(offset) as usize;
        if start + N <= self.ctx.data_end() {
            // SAFETY: the N bytes lie in the linear part.
            return Some(unsafe { ptr::read_unaligned(start as *const [u8; N]) });
        }
        let mut piece = MaybeUninit::<[u8; N]>::uninit();
        // SAFETY: `piece` has room for the N bytes that the helper writes; it writes them all, or
        // returns an error.
        unsafe {
            let to = piece.as_mut_ptr().cast();
            match bpf_skb_load_bytes(self.ctx.as_ptr(), offset, to, N as u32) {
                0 => Some(piece.assume_init()),
                _ => None,
            }
        }
    }
}
