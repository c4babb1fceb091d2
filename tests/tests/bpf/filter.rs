//! Which names leave the kernel.
