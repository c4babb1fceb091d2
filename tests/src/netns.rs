//! Named network namespaces, as `ip netns` keeps them: a bind mount below `/run/netns` each.
//!
//! Made and entered by system calls, so that a command in a namespace costs no extra process.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    net::{SocketAddr, TcpListener},
    os::{
        fd::AsFd,
        unix::{ffi::OsStrExt, fs::MetadataExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::{
    io::Errno,
    mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount},
    process::Pid,
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

const DIR: &str = "/run/netns";

/// How many mounts of one namespace may lie above each other.
const STACKED_MAX: usize = 16;

/// A named network namespace. It outlives this value.
#[derive(Clone, Debug)]
pub struct NetNs {
    name: String,
}

impl NetNs {
    /// The namespace of this name, which may or may not exist.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }

    /// Creates the namespace.
    pub fn create(name: impl Into<String>) -> Result<Self> {
        let namespace = Self::named(name);
        fs::create_dir_all(DIR)?;
        let path = namespace.path();
        File::create_new(&path).with_context(|| format!("cannot create {}", path.display()))?;
        // Only the thread moves into the new namespace, and it ends here; the mount keeps it.
        let mounted = std::thread::spawn(move || -> io::Result<()> {
            // SAFETY: a new network namespace leaves memory and file descriptors as they are.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Ok(mount_bind("/proc/thread-self/ns/net", &path)?)
        })
        .join()
        .map_err(|_| anyhow!("the thread that makes a network namespace panicked"))?;
        if let Err(error) = mounted {
            namespace.delete()?;
            return Err(error).with_context(|| format!("cannot make the namespace {namespace}"));
        }
        Ok(namespace)
    }

    /// Removes the namespace's name; it ends with the last process in it. No error if it does
    /// not exist.
    pub fn delete(&self) -> Result<()> {
        let path = self.path();
        if !path.exists() {
            return Ok(());
        }
        // The name may be a plain file: its creator may have died before the mount.
        unmount_one(&path).with_context(|| format!("cannot unmount {self}"))?;
        let removed = match fs::remove_file(&path) {
            // The name is mounted twice: once below a mount of the whole directory.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => remove_beneath(&path),
            removed => removed,
        };
        removed.with_context(|| format!("cannot remove {}", path.display()))
    }

    /// The processes in the namespace.
    pub fn processes(&self) -> Result<Vec<Pid>> {
        let identity = |path: &Path| {
            fs::metadata(path)
                .ok()
                .map(|found| (found.dev(), found.ino()))
        };
        let Some(wanted) = identity(&self.path()) else {
            return Ok(Vec::new());
        };
        let mut processes = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let pid = entry.file_name().to_str().and_then(|pid| pid.parse().ok());
            // One that has ended by now has no namespace.
            if let Some(pid) = pid.and_then(Pid::from_raw)
                && identity(&entry.path().join("ns/net")) == Some(wanted)
            {
                processes.push(pid);
            }
        }
        Ok(processes)
    }

    /// Whether the namespace exists.
    pub fn exists(&self) -> bool {
        self.path().exists()
    }

    /// Its name, as `ip netns` shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn path(&self) -> PathBuf {
        Path::new(DIR).join(&self.name)
    }

    /// Listens on an address of this namespace, from wherever the listener is used.
    pub fn listen(&self, address: SocketAddr) -> Result<TcpListener> {
        self.run(|| Ok(TcpListener::bind(address)?))
    }

    /// Runs `work` on its own thread in this namespace. Sockets that `work` opens stay in the
    /// namespace, also if another thread uses them later.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = File::open(self.path())
            .with_context(|| format!("there is no network namespace {self}"))?;
        std::thread::scope(|scope| {
            let inside = scope.spawn(move || {
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), kind)?;
                work()
            });
            inside
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Makes `command` run in this namespace.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        let namespace = File::open(self.path())
            .with_context(|| format!("there is no network namespace {self}"))?;
        // SAFETY: a system call on an open descriptor; no allocation, no lock.
        unsafe {
            command.pre_exec(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                Ok(())
            });
        }
        Ok(())
    }
}

/// Removes a name that is mounted below another mount of [`DIR`].
///
/// The first `ip netns add` of a machine binds the directory onto itself (`netns_add` in iproute2's
/// ip/ipnetns.c). Names that were mounted before are then mounted twice. Nothing leads to the lower
/// mount any more, and the kernel removes no file that is a mount point where the caller is
/// (`is_local_mountpoint` in Linux fs/namespace.c). Elsewhere it may be one: such mounts go with
/// the file (`detach_mounts`). So the file is removed from a mount namespace of its own, where
/// nothing is mounted there.
fn remove_beneath(path: &Path) -> io::Result<()> {
    std::thread::scope(|scope| {
        let elsewhere = scope.spawn(|| {
            // SAFETY: a new mount namespace leaves memory and file descriptors as they are. The
            // thread ends here.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
            private_mounts()?;
            for _ in 0..STACKED_MAX {
                // From above: the namespace, then the directory above the next mount of it.
                while unmount_one(path)? {}
                match fs::remove_file(path) {
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
                    removed => return removed,
                }
                unmount_one(Path::new(DIR))?;
            }
            Err(Errno::BUSY.into())
        });
        elsewhere
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Unmounts the uppermost mount there, and says whether there was one.
fn unmount_one(path: &Path) -> io::Result<bool> {
    match unmount(path, UnmountFlags::DETACH) {
        Ok(()) => Ok(true),
        // Not a mount point.
        Err(Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Takes care that no other mount namespace sees the mounts and unmounts of this one.
fn private_mounts() -> io::Result<()> {
    mount_change(
        c"/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .map_err(io::Error::from)
}

/// Fails where the root directory is no mount point, as in a plain chroot: its mounts can then not be
/// kept to a mount namespace (mount(2), `EINVAL`).
pub(crate) fn require_mount_at_root() -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")
        .context("cannot read /proc/self/mountinfo; is /proc mounted?")?;
    ensure!(
        is_mounted(&mounts, "/"),
        "the root directory is not a mount point, as in a plain chroot: leave the chroot, \
         `mount --bind DIRECTORY DIRECTORY` with its directory, and enter it again"
    );
    Ok(())
}

/// Whether something is mounted there, by the fifth field of proc_pid_mountinfo(5).
fn is_mounted(mounts: &str, directory: &str) -> bool {
    mounts
        .lines()
        .any(|line| line.split(' ').nth(4) == Some(directory))
}

impl std::fmt::Display for NetNs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

/// Makes `command` see the file or directory `from` in the place of `to`, for each pair whose
/// `to` exists, in a mount namespace of its own.
pub(crate) fn replace_files(command: &mut Command, pairs: &[(PathBuf, &Path)]) -> Result<()> {
    let mut mounts = Vec::new();
    for (from, to) in pairs.iter().filter(|(_, to)| to.exists()) {
        mounts.push((
            CString::new(from.as_os_str().as_bytes())?,
            CString::new(to.as_os_str().as_bytes())?,
        ));
    }
    // SAFETY: system calls on strings made before the fork; no allocation, no lock.
    unsafe {
        command.pre_exec(move || {
            unshare_unsafe(UnshareFlags::NEWNS)?;
            private_mounts()?;
            for (from, to) in &mounts {
                mount_bind(from.as_c_str(), to.as_c_str())?;
            }
            Ok(())
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
