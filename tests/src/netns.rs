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

use anyhow::{Context, Result, anyhow};
use rustix::{
    mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount},
    process::Pid,
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

const DIR: &str = "/run/netns";

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
        match unmount(&path, UnmountFlags::DETACH) {
            // A plain file: whoever made it died before the mount.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error).with_context(|| format!("cannot unmount {self}")),
        }
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
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

    /// Runs `work` on a thread of its own in this namespace. Sockets that it makes stay in the
    /// namespace, whoever uses them later.
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
            // The host never sees the mounts below.
            mount_change(
                c"/",
                MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
            )?;
            for (from, to) in &mounts {
                mount_bind(from.as_c_str(), to.as_c_str())?;
            }
            Ok(())
        });
    }
    Ok(())
}
