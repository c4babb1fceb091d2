//! The capabilities of the agent (capabilities(7)), and how the agent gives up all others.
//!
//! Capabilities are each thread's own, and a new thread has those of the thread that made it. So they
//! are given up while there is no other thread, or none that has any.

use std::{fs, io, thread};

use rustix::{
    io::Errno,
    thread::{
        CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
    },
};

/// What the agent needs as long as it runs:
///
/// - `CAP_NET_ADMIN`: attaching to veths by clsact, listing their programs, and unblocking connections by netlink;
/// - `CAP_DAC_OVERRIDE`: connecting again to sockets of Open vSwitch and OVN that another user owns.
pub const WHILE_RUNNING: CapabilitySet =
    CapabilitySet::NET_ADMIN.union(CapabilitySet::DAC_OVERRIDE);

/// What the agent needs until the programs are loaded and the packet socket is open, beside
/// [`WHILE_RUNNING`]:
///
/// - `CAP_BPF`: loading the programs and making the maps; on some kernels for longer, see
///   [`bpf_while_running`];
/// - `CAP_PERFMON`: offsets into a packet of which the verifier knows the range only;
/// - `CAP_NET_RAW`: the packet socket that held answers go back through;
/// - `CAP_SYS_RESOURCE`: raising `RLIMIT_MEMLOCK`, which limits maps before Linux 5.11.
pub const TO_START: CapabilitySet = CapabilitySet::BPF
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SYS_RESOURCE);

/// Whether every use of `bpf(2)` takes a capability; `0` where none does (Linux
/// Documentation/admin-guide/sysctl/kernel.rst).
const UNPRIVILEGED_BPF_DISABLED: &str = "/proc/sys/kernel/unprivileged_bpf_disabled";

/// `CAP_BPF`, if this kernel asks for it whenever a map is used: Linux before 5.19 does
/// (`__sys_bpf` in kernel/bpf/syscall.c). `uses_map` tries, and says whether the kernel let it.
///
/// # Errors
///
/// Where capabilities can be neither read nor changed.
pub fn bpf_while_running(uses_map: impl FnOnce() -> bool) -> io::Result<CapabilitySet> {
    let disabled = fs::read_to_string(UNPRIVILEGED_BPF_DISABLED);
    if !disabled.is_ok_and(|text| text.trim() != "0") {
        // The trial would say nothing: an administrator may turn the switch later.
        return Ok(CapabilitySet::BPF);
    }
    let sets = capabilities(None)?;
    set_capabilities(
        None,
        CapabilitySets {
            // CAP_SYS_ADMIN includes CAP_BPF.
            effective: sets.effective - CapabilitySet::BPF - CapabilitySet::SYS_ADMIN,
            ..sets
        },
    )?;
    let used = uses_map();
    set_capabilities(None, sets)?;
    Ok(match used {
        true => CapabilitySet::empty(),
        false => CapabilitySet::BPF,
    })
}

/// Takes all capabilities but these from this thread, and from all threads and programs that this
/// thread starts from now on. Returns those that are left.
///
/// # Errors
///
/// Where the kernel refuses; the thread may then have more.
pub fn keep_only(wanted: CapabilitySet) -> io::Result<CapabilitySet> {
    let kept = capabilities(None)?.permitted & wanted;
    // A program that this process starts would have no capability at all; it starts none.
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    for capability in every_capability() {
        match remove_capability_from_bounding_set(capability) {
            // Without CAP_SETPCAP, as in a container that has few anyway. A kernel may know fewer
            // capabilities than this program.
            Ok(()) | Err(Errno::PERM | Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(kept)
}

/// Does `work` in a thread without any capability. So threads that the work starts have none.
///
/// # Errors
///
/// Where there is no thread to be had, or it cannot give up its capabilities.
pub fn without_any<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, || {
            keep_only(CapabilitySet::empty())?;
            Ok(work())
        })?;
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// The names of capabilities, separated by commas.
pub fn names(set: CapabilitySet) -> String {
    let names = set.iter_names().map(|(name, _)| format!("CAP_{name}"));
    names.collect::<Vec<_>>().join(",")
}

/// Every capability that this program has a name for.
fn every_capability() -> impl Iterator<Item = CapabilitySet> {
    let all = CapabilitySet::all();
    all.iter_names().map(|(_, capability)| capability)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gives_up_what_it_does_not_keep_and_so_do_its_threads() {
        let before = capabilities(None).expect("they can be read");
        let wanted = CapabilitySet::NET_ADMIN | CapabilitySet::BPF;
        let of_thread = || capabilities(None).expect("they can be read");
        let (kept, own, of_child) = thread::spawn(move || {
            let kept = keep_only(wanted).expect("it may");
            let of_child = thread::spawn(of_thread).join().expect("no panic");
            (kept, of_thread(), of_child)
        })
        .join()
        .expect("no panic");
        // Where the tests run without them, there is nothing to keep.
        assert_eq!(kept, before.permitted & wanted);
        for sets in [own, of_child] {
            assert_eq!((sets.permitted, sets.effective), (kept, kept));
            assert_eq!(sets.inheritable, CapabilitySet::empty());
        }
        assert_eq!(of_thread(), before, "other threads keep what they have");
    }

    #[test]
    fn what_is_done_without_any_is_done_without_any() {
        let sets = without_any(|| capabilities(None)).expect("a thread");
        assert_eq!(sets.expect("they can be read").permitted.bits(), 0);
    }

    #[test]
    fn cap_bpf_stays_only_where_the_kernel_asks_for_it() {
        thread::spawn(|| {
            let before = capabilities(None).expect("they can be read");
            let refused = bpf_while_running(|| false).expect("they can be changed");
            assert_eq!(refused, CapabilitySet::BPF);
            bpf_while_running(|| {
                let during = capabilities(None).expect("they can be read");
                !during.effective.contains(CapabilitySet::BPF)
            })
            .expect("they can be changed");
            assert_eq!(capabilities(None).expect("they can be read"), before);
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn capabilities_have_the_names_that_kubernetes_and_people_use() {
        assert_eq!(
            names(WHILE_RUNNING | CapabilitySet::BPF),
            "CAP_DAC_OVERRIDE,CAP_NET_ADMIN,CAP_BPF"
        );
        assert_eq!(every_capability().count(), 41);
    }
}
