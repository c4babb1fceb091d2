//! Whether the kernel has TCX, asked without an interface.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use zerocopy::{FromBytes, IntoBytes};

use super::bpf::{self, Command};

/// Linux include/uapi/linux/bpf.h.
const BPF_TCX_EGRESS: u32 = 47;

/// What `BPF_LINK_CREATE` takes: the beginning of `struct link_create` in `union bpf_attr`.
#[repr(C)]
#[derive(FromBytes, IntoBytes)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// Asks for a link of this program to an interface that cannot be there. A kernel with TCX looks for
/// the interface (`tcx_link_attach` in kernel/bpf/tcx.c, Linux 6.6); one without does not know the
/// attach type (`link_create` in kernel/bpf/syscall.c) and answers EINVAL.
///
/// # Errors
///
/// Where the kernel answers something else, as where a filter of system calls (seccomp) forbids it.
pub(super) fn is_there(program: BorrowedFd<'_>) -> io::Result<bool> {
    let mut attributes = LinkCreate {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        target_ifindex: u32::MAX,
        attach_type: BPF_TCX_EGRESS,
        flags: 0,
    };
    // SAFETY: there is no address in the attributes.
    let Err(error) = (unsafe { bpf::call(Command::LinkCreate, &mut attributes) }) else {
        return Err(io::Error::other("an interface that cannot be there is"));
    };
    match error.raw_os_error() {
        Some(libc::ENODEV) => Ok(true),
        Some(libc::EINVAL) => Ok(false),
        _ => Err(error),
    }
}
