//! The compiler of a program: this machine's, if it has the target's standard library, else Debian's `rustc-web`, which
//! also compiles the BPF object. Debian has the standard library for each of its architectures.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use dnsflow_tests::{
    process::run,
    root::{Contents, Root},
};

use super::program::Target;
use crate::{ebpf, ebpf_sources, unavailable::Unavailable};

/// The standard library of `rustc-web`, for the architecture of the package.
const LIBRARY: Contents<'_> = Contents {
    suite: ebpf::DEBIAN_SUITE,
    packages: &["libstd-rust-web-dev"],
};

/// A compiler that has the standard library of a target.
#[derive(Clone, Debug)]
pub(super) struct Compiler {
    rustc: PathBuf,
}

impl Compiler {
    /// The compiler for this target.
    ///
    /// # Errors
    ///
    /// [`Unavailable`] names the missing part.
    pub(super) fn of(workspace: &Path, target: &Target) -> Result<Self> {
        let own = env::var_os("RUSTC").unwrap_or("rustc".into());
        let own = Self { rustc: own.into() };
        if own.has_library(target)? {
            return Ok(own);
        }
        let target_dir = ebpf_sources::target_dir(workspace);
        Self::debian(&target_dir, target).map_err(|error| {
            Unavailable(format!(
                "a program for {} takes Rust's standard library for it: `rustup target add {0}`, or on x86-64 Debian \
                 apt-get, which fetches Debian's compiler ({error:#})",
                target.triple
            ))
            .into()
        })
    }

    fn has_library(&self, target: &Target) -> Result<bool> {
        let mut query = Command::new(&self.rustc);
        query.args(["--print", "target-libdir", "--target", &target.triple]);
        let libraries = PathBuf::from(run(&mut query)?.trim());
        let files = fs::read_dir(libraries).into_iter().flatten().flatten();
        let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
        Ok(names.any(|name| name.starts_with("libstd-") && name.ends_with(".rlib")))
    }

    /// Debian's compiler, in a sysroot with the libraries of both architectures: build scripts and macros run here.
    fn debian(target_dir: &Path, target: &Target) -> Result<Self> {
        let say = |text: &str| eprintln!("{text}");
        let here = ebpf::debian_root(target_dir, &say)?;
        let architecture = target.architecture;
        let path = target_dir
            .join("roots")
            .join(format!("rust-{architecture}"));
        let there = Root::ensure_for(architecture, &path, LIBRARY, say)?;

        let home = target_dir
            .join("tools")
            .join(format!("rust-{architecture}"));
        let libraries = home.join("sysroot/lib/rustlib");
        if home.exists() {
            fs::remove_dir_all(&home)?;
        }
        fs::create_dir_all(&libraries)
            .with_context(|| format!("cannot create {}", libraries.display()))?;
        for root in [&here, &there] {
            for library in fs::read_dir(root.path().join("usr/lib/rustlib"))? {
                let library = library?;
                std::os::unix::fs::symlink(library.path(), libraries.join(library.file_name()))
                    .or_else(|error| match error.kind() {
                        std::io::ErrorKind::AlreadyExists => Ok(()),
                        _ => Err(error),
                    })?;
            }
        }
        let rustc = home.join("rustc");
        ebpf::debian_rustc(&here, &home.join("sysroot"), &rustc)?;
        Ok(Self { rustc })
    }

    /// The program.
    pub(super) fn rustc(&self) -> &Path {
        &self.rustc
    }
}
