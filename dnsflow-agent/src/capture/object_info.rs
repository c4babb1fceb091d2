//! What the kernel says of pinned links and programs (bpf(2), `BPF_OBJ_GET_INFO_BY_FD`).
//!
//! aya does not give the interface of a link. It opens a program by its id to ask for its maps, which takes
//! CAP_SYS_ADMIN.

use std::{
    collections::BTreeSet,
    ffi::CString,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

// Linux include/uapi/linux/bpf.h.
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_LINK_TYPE_TCX: u32 = 11;

/// More maps than a program of dnsflow uses.
const MAPS_MAX: usize = 128;

/// A link on an interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct TcxLink {
    /// The index of the interface; zero if it is gone.
    pub(super) ifindex: u32,
    /// The id of its program.
    pub(super) program: u32,
}

/// A loaded program.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct LoadedProgram {
    /// Its id.
    pub(super) id: u32,
    /// The ids of the maps that it uses.
    pub(super) maps: BTreeSet<u32>,
}

/// What `BPF_OBJ_GET` takes: `union bpf_attr`.
#[repr(C)]
struct ObjGet {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// What `BPF_OBJ_GET_INFO_BY_FD` takes: `info` in `union bpf_attr`.
#[repr(C)]
struct GetInfo {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The beginning of `struct bpf_link_info`, with `tcx` of its union.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    prog_id: u32,
    padding: u32,
    ifindex: u32,
    attach_type: u32,
}

/// The beginning of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct ProgInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_prog_len: u32,
    xlated_prog_len: u32,
    jited_prog_insns: u64,
    xlated_prog_insns: u64,
    load_time: u64,
    created_by_uid: u32,
    nr_map_ids: u32,
    map_ids: u64,
}

/// The TCX link that is pinned in this file.
///
/// # Errors
///
/// If there is no such link, or the kernel refuses.
pub(super) fn tcx_link(path: &Path) -> io::Result<TcxLink> {
    let link = open(path)?;
    let mut info = LinkInfo::default();
    // SAFETY: the kernel writes numbers, and there is a place for each.
    unsafe { get_info(link.as_fd(), &mut info) }?;
    match info.kind {
        BPF_LINK_TYPE_TCX => Ok(TcxLink {
            ifindex: info.ifindex,
            program: info.prog_id,
        }),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// The program that is pinned in this file.
///
/// # Errors
///
/// If there is no such program, or the kernel refuses.
pub(super) fn program(path: &Path) -> io::Result<LoadedProgram> {
    let program = open(path)?;
    let mut maps = [0_u32; MAPS_MAX];
    let mut info = ProgInfo {
        nr_map_ids: MAPS_MAX as u32,
        map_ids: maps.as_mut_ptr().expose_provenance() as u64,
        ..ProgInfo::default()
    };
    // SAFETY: beside numbers, the kernel writes as many ids of maps as there is room for. It is told of no other places.
    unsafe { get_info(program.as_fd(), &mut info) }?;
    let count = usize::try_from(info.nr_map_ids).unwrap_or(usize::MAX);
    Ok(LoadedProgram {
        id: info.id,
        maps: maps.into_iter().take(count).collect(),
    })
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attributes = ObjGet {
        pathname: path.as_ptr().expose_provenance() as u64,
        bpf_fd: 0,
        file_flags: 0,
    };
    // SAFETY: bpf(2) reads the attributes and the path, which ends with a NUL, and keeps nothing of them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_OBJ_GET,
            &raw const attributes,
            size_of::<ObjGet>(),
        )
    };
    let fd = libc::c_int::try_from(result).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Asks for as much as `info` has room for. A kernel that knows less leaves the rest as it was.
///
/// # Safety
///
/// `info` is the beginning of the kernel's structure for this object, and each pointer in it leads to as much memory as
/// the length beside it says.
unsafe fn get_info<T>(object: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    let mut attributes = GetInfo {
        bpf_fd: object.as_raw_fd().cast_unsigned(),
        info_len: size_of::<T>() as u32,
        info: (&raw mut *info).expose_provenance() as u64,
    };
    // SAFETY: bpf(2) reads the attributes, writes the length back, and else to `info` alone and to where it leads, as the caller
    // says.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_OBJ_GET_INFO_BY_FD,
            &raw mut attributes,
            size_of::<GetInfo>(),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
