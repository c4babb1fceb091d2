//! What the kernel says of pinned links and programs (bpf(2), `BPF_OBJ_GET_INFO_BY_FD`).
//!
//! aya does not give the interface of a link. It opens a program by its id to ask for its maps, which takes
//! CAP_SYS_ADMIN.

use std::{
    collections::BTreeSet,
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use zerocopy::{FromBytes, IntoBytes};

use super::bpf::{self, Command};

/// Linux include/uapi/linux/bpf.h.
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
#[derive(FromBytes, IntoBytes)]
struct ObjGet {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// What `BPF_OBJ_GET_INFO_BY_FD` takes: `info` in `union bpf_attr`.
#[repr(C)]
#[derive(FromBytes, IntoBytes)]
struct GetInfo {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

impl GetInfo {
    /// Asks for as much as `info` has room for. A kernel that knows less leaves the rest as it was.
    fn new<T: FromBytes + IntoBytes>(object: &OwnedFd, info: &mut T) -> Self {
        Self {
            bpf_fd: object.as_raw_fd().cast_unsigned(),
            info_len: size_of::<T>() as u32,
            info: (&raw mut *info).expose_provenance() as u64,
        }
    }
}

/// The beginning of `struct bpf_link_info`, with `tcx` of its union.
#[repr(C)]
#[derive(Default, FromBytes, IntoBytes)]
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
#[derive(Default, FromBytes, IntoBytes)]
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
    let mut attributes = GetInfo::new(&link, &mut info);
    // SAFETY: the kernel writes to `info` alone, as much as there is room for.
    unsafe { bpf::call(Command::ObjGetInfoByFd, &mut attributes) }?;
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
    let mut attributes = GetInfo::new(&program, &mut info);
    // SAFETY: the kernel writes to `info`, and to `maps`, as much as there is room for. All other addresses are zero.
    unsafe { bpf::call(Command::ObjGetInfoByFd, &mut attributes) }?;
    Ok(LoadedProgram {
        id: info.id,
        maps: maps.into_iter().take(info.nr_map_ids as usize).collect(),
    })
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attributes = ObjGet {
        pathname: path.as_ptr().expose_provenance() as u64,
        bpf_fd: 0,
        file_flags: 0,
    };
    // SAFETY: the path ends with a NUL. The descriptor is new, and nobody else has it.
    unsafe { bpf::call(Command::ObjGet, &mut attributes).map(|fd| OwnedFd::from_raw_fd(fd)) }
}
