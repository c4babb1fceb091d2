//! BPF programs of a few instructions, as others put them onto interfaces.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

/// A classifier of a few instructions.
pub struct RawProgram(OwnedFd);

// Linux include/uapi/linux/bpf.h.
const BPF_PROG_LOAD: i32 = 5;
const BPF_PROG_TEST_RUN: i32 = 10;
const BPF_OBJ_GET_INFO_BY_FD: i32 = 15;
const BPF_LINK_CREATE: i32 = 28;
const BPF_ENABLE_STATS: i32 = 32;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
const BPF_F_BEFORE: u32 = 1 << 3;
/// `id` and `run_cnt` in `struct bpf_prog_info`.
const ID: usize = 4;
const RUN_COUNT: usize = 200;

impl RawProgram {
    /// Loads these instructions.
    pub fn load(code: &[u64]) -> io::Result<Self> {
        let mut attributes = [0u64; 16];
        attributes[0] = u64::from(BPF_PROG_TYPE_SCHED_CLS) | (code.len() as u64) << 32;
        attributes[1] = code.as_ptr() as u64;
        attributes[2] = c"GPL".as_ptr() as u64;
        let fd = bpf(BPF_PROG_LOAD, &mut attributes)?;
        // SAFETY: the descriptor is new and ours.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// One that returns this.
    ///
    /// # Panics
    ///
    /// Where the kernel does not take it.
    pub fn returning(verdict: i32) -> Self {
        // r0 = verdict; exit.
        let verdict = u64::from(verdict.cast_unsigned());
        Self::load(&[verdict << 32 | 0xb7, 0x95]).expect("the kernel takes it")
    }

    /// Attaches it to an interface's egress by TCX, behind the others, until what is returned is dropped.
    pub fn attach_to_egress(&self, ifindex: u32) -> io::Result<OwnedFd> {
        self.attach(ifindex, BPF_TCX_EGRESS, 0)
    }

    /// The same in front of the others.
    pub fn attach_first_to_egress(&self, ifindex: u32) -> io::Result<OwnedFd> {
        self.attach(ifindex, BPF_TCX_EGRESS, BPF_F_BEFORE)
    }

    /// The same at ingress, behind the others.
    pub fn attach_to_ingress(&self, ifindex: u32) -> io::Result<OwnedFd> {
        self.attach(ifindex, BPF_TCX_INGRESS, 0)
    }

    /// The same at both hooks, in front of the others.
    pub fn attach_first(&self, ifindex: u32) -> io::Result<[OwnedFd; 2]> {
        let ingress = self.attach(ifindex, BPF_TCX_INGRESS, BPF_F_BEFORE)?;
        Ok([ingress, self.attach_first_to_egress(ifindex)?])
    }

    fn attach(&self, ifindex: u32, hook: u32, flags: u32) -> io::Result<OwnedFd> {
        let mut attributes = [0u64; 16];
        attributes[0] = self.0.as_raw_fd() as u64 | u64::from(ifindex) << 32;
        attributes[1] = u64::from(hook) | u64::from(flags) << 32;
        let fd = bpf(BPF_LINK_CREATE, &mut attributes)?;
        // SAFETY: the descriptor is new and ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The descriptor of the program.
    pub fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// The id of the program.
    ///
    /// # Panics
    ///
    /// Where the kernel does not describe it.
    pub fn id(&self) -> u32 {
        let info = self.info();
        u32::from_ne_bytes(*info[ID..].first_chunk().expect("long enough"))
    }

    /// How often it has run while runs were counted.
    ///
    /// # Panics
    ///
    /// Where the kernel does not describe it.
    pub fn runs(&self) -> u64 {
        let info = self.info();
        u64::from_ne_bytes(*info[RUN_COUNT..].first_chunk().expect("long enough"))
    }

    fn info(&self) -> [u8; 208] {
        let mut info = [0; 208];
        let mut attributes = [0u64; 16];
        attributes[0] = self.0.as_raw_fd() as u64 | (info.len() as u64) << 32;
        attributes[1] = info.as_mut_ptr() as u64;
        bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attributes).expect("the kernel describes it");
        info
    }

    /// Runs it on a frame, as many times as said; gives the time per run in nanoseconds.
    pub fn run(&self, frame: &[u8], repeat: u32) -> io::Result<u128> {
        let mut attributes = [0u64; 16];
        attributes[0] = self.0.as_raw_fd() as u64;
        attributes[1] = frame.len() as u64;
        attributes[2] = frame.as_ptr() as u64;
        attributes[4] = repeat.into();
        bpf(BPF_PROG_TEST_RUN, &mut attributes)?;
        Ok(u128::from(attributes[4] >> 32))
    }
}

/// Has the kernel count the runs of programs until what is returned is dropped.
///
/// # Panics
///
/// Where this process may not.
pub fn count_runs() -> OwnedFd {
    // The type BPF_STATS_RUN_TIME is zero.
    let fd = bpf(BPF_ENABLE_STATS, &mut [0u64; 16]).expect("root may");
    // SAFETY: the descriptor is new and ours.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn bpf(command: i32, attributes: &mut [u64; 16]) -> io::Result<i32> {
    let size = size_of_val(attributes);
    // SAFETY: the attributes are as long as said, and what they point to lives on.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_mut_ptr(), size) };
    match i32::try_from(result) {
        Ok(fd) if fd >= 0 => Ok(fd),
        _ => Err(io::Error::last_os_error()),
    }
}
