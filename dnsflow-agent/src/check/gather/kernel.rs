//! What the kernel can do and allows this process to do. Each feature is tried, because
//! distributions backport features.

use std::{fs, io, iter::successors, path::Path, thread};

use rustix::{
    io::Errno,
    thread::{UnshareFlags, unshare_unsafe},
};
use tokio::runtime;

use crate::{
    capture::{self, Attach, AttachKind},
    check::facts::{Kernel, NotAttached},
};

/// Where the kernel describes its types (Linux `Documentation/bpf/btf.rst`).
const BTF: &str = "/sys/kernel/btf/vmlinux";

/// What `uname -r` says (proc_sys_kernel(5)).
const RELEASE: &str = "/proc/sys/kernel/osrelease";

/// The results of loading and attaching.
type Trial = (Result<(), String>, Option<Result<AttachKind, NotAttached>>);

pub(super) fn ask() -> Kernel {
    // The network namespace ends with the thread.
    let trial = thread::Builder::new()
        .spawn(trial)
        .map(thread::JoinHandle::join);
    let (load, attach) = match trial {
        Ok(Ok(trial)) => trial,
        Ok(Err(_)) => (Err("the trial ended early".into()), None),
        Err(error) => (Err(format!("no thread can be made: {error}")), None),
    };
    Kernel {
        release: fs::read_to_string(RELEASE).map_or_else(
            |_| "(of unknown release)".into(),
            |text| text.trim().to_owned(),
        ),
        btf: Path::new(BTF).exists(),
        load,
        attach,
    }
}

/// Loads the program and attaches it to the loopback interface of a new network namespace.
fn trial() -> Trial {
    let runtime = match runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return (Err(error.to_string()), None),
    };
    let _entered = runtime.enter();
    let mut capture = match capture::load(&capture::Options::default(), runtime.handle()) {
        Ok(capture) => capture,
        Err(error) => return (Err(chain(&error)), None),
    };
    // SAFETY: a new network namespace leaves memory and file descriptors as they are, and only
    // this thread is in it.
    match unsafe { unshare_unsafe(UnshareFlags::NEWNET) } {
        Ok(()) => {}
        Err(Errno::PERM) => {
            let program = capture.attacher.attachments.program_mut();
            let tcx = program.kernel_has_tcx().unwrap_or(false);
            return (Ok(()), Some(Err(NotAttached::NotTried { tcx })));
        }
        Err(error) => {
            let reason = format!(
                "it cannot be tried without a network namespace of its own: {}",
                io::Error::from(error)
            );
            return (Ok(()), Some(Err(NotAttached::Failed(reason))));
        }
    }
    let program = capture.attacher.attachments.program_mut();
    let attached = program
        .ifindex("lo")
        .ok_or_else(|| "there is no lo".to_owned())
        .and_then(|ifindex| {
            let attached = program
                .attach("lo", ifindex)
                .and_then(|mut link| program.complete("lo", ifindex, &mut link));
            attached.map_err(|error| error.to_string())
        });
    let kind = program.kind();
    (
        Ok(()),
        Some(
            attached
                .and_then(|_| kind.ok_or_else(|| "it is not known how".into()))
                .map_err(NotAttached::Failed),
        ),
    )
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    // The verifier's log has many lines; the first one says what happened.
    for cause in successors(error.source(), |error| error.source()) {
        let cause = cause.to_string();
        text += &format!(": {}", cause.lines().next().unwrap_or_default());
    }
    text
}
