//! What the kernel says of TCX: whether it is there, and which programs an interface has.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use aya::programs::TcAttachType;
use zerocopy::{FromBytes, IntoBytes};

use super::bpf::{self, Command};

// Linux include/uapi/linux/bpf.h.
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
/// The most programs at a hook (`BPF_MPROG_MAX` in Linux include/linux/bpf_mprog.h).
const PROGRAMS_MAX: usize = 64;

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

/// What `BPF_PROG_QUERY` takes: `query` in `union bpf_attr`, whole. The kernel writes to its last fields, however short
/// the attributes are said to be (`bpf_mprog_query` in Linux kernel/bpf/mprog.c).
#[repr(C)]
#[derive(FromBytes, IntoBytes)]
struct ProgQuery {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    padding: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// The ids of the programs at an interface's hook, in the order in which they run. None on a kernel without TCX.
///
/// aya's `query_tcx` opens each program by its id, which takes CAP_SYS_ADMIN.
///
/// # Errors
///
/// If the interface is gone, or the kernel refuses.
pub(super) fn programs(ifindex: u32, hook: TcAttachType) -> io::Result<Vec<u32>> {
    let attach_type = match hook {
        TcAttachType::Ingress => BPF_TCX_INGRESS,
        TcAttachType::Egress => BPF_TCX_EGRESS,
        TcAttachType::Custom(_) => return Ok(Vec::new()),
    };
    let mut ids = [0_u32; PROGRAMS_MAX];
    let mut attributes = ProgQuery {
        target_ifindex: ifindex,
        attach_type,
        query_flags: 0,
        attach_flags: 0,
        prog_ids: ids.as_mut_ptr().expose_provenance() as u64,
        count: PROGRAMS_MAX as u32,
        padding: 0,
        prog_attach_flags: 0,
        link_ids: 0,
        link_attach_flags: 0,
        revision: 0,
    };
    // SAFETY: the kernel writes to `ids`, as many as there is room for. All other addresses are zero.
    match unsafe { bpf::call(Command::ProgQuery, &mut attributes) } {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    }
    let count = attributes.count as usize;
    Ok(ids.into_iter().take(count).collect())
}
