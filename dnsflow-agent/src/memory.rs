//! The memory that the allocator keeps.

/// Gives back to the kernel what is free. What an agent reads first, the whole content of databases, takes several
/// times the memory of what the agent keeps of it. glibc would keep the rest for later.
///
/// Takes milliseconds, and holds up other threads that allocate meanwhile.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the function may be called at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
