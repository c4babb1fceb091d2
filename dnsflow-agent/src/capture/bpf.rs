//! The system call bpf(2), for the commands that aya does not offer.

use std::io;

use zerocopy::{FromBytes, IntoBytes};

/// A command (`enum bpf_cmd` in Linux include/uapi/linux/bpf.h).
pub(super) enum Command {
    ObjGet = 7,
    ObjGetInfoByFd = 15,
    ProgQuery = 16,
    MapLookupBatch = 24,
    LinkCreate = 28,
}

/// Runs a command. Returns the new file descriptor, zero if the command makes none, or why the kernel refuses.
///
/// The attributes have no padding (`IntoBytes`), and the kernel may write any number into them (`FromBytes`). It takes
/// bytes beyond them for zero.
///
/// # Safety
///
/// `T` is the beginning of the command's structure in `union bpf_attr`. Each address in it is zero, or leads to memory
/// that lives until the call returns. The memory is as long as the command needs, by the numbers beside the address and
/// by the object. Where the kernel writes, any bytes are valid, and nobody else reads or writes during the call.
pub(super) unsafe fn call<T: FromBytes + IntoBytes>(
    command: Command,
    attributes: &mut T,
) -> io::Result<libc::c_int> {
    let command = command as libc::c_int;
    // SAFETY: bpf(2) reads and writes the attributes, which are as long as it is told. The caller answers for the
    // memory that they lead to. The kernel keeps no pointer.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size_of::<T>()) };
    match libc::c_int::try_from(result) {
        Ok(result) if result >= 0 => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}
