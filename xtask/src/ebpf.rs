//! `cargo xtask build-ebpf`: compiles `dnsflow-ebpf` for the kernel.
//!
//! Stable Rust ships no `core` for the BPF target. Two compilers do:
//!
//! 1. Debian's `rustc-web` with its precompiled `core` for BPF, and bpf-linker built against
//!    Debian's LLVM. Packages are unpacked below `target/`, nothing is installed. Preferred
//!    wherever apt is: one known compiler, one known object.
//! 2. A nightly toolchain with `rust-src`, and a `bpf-linker` on `PATH` that fits its LLVM.
//!
//! [`TOOLCHAIN`] forces one of them. Nothing is written outside the target directory but cargo's
//! own download cache.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use dnsflow_tests::{
    root::{Contents, Root},
    support::workspace,
};

use crate::{ebpf_sources, paths};

/// The environment variable that forces a toolchain: `debian` or `nightly`.
const TOOLCHAIN: &str = "DNSFLOW_BPF_TOOLCHAIN";

/// The release of Debian whose compiler is used.
pub(crate) const DEBIAN_SUITE: &str = "bookworm";
/// Debian 12's security archive carries this compiler for Firefox and Chromium, Debian 13's too.
const DEBIAN: Contents<'_> = Contents {
    suite: DEBIAN_SUITE,
    packages: &["rustc-web", "libstd-rust-web-dev-bpf", "llvm-22-dev"],
};
/// The LLVM that `rustc-web` is built with; bpf-linker reads its bitcode.
const LLVM: &str = "llvm-22";
const BPF_LINKER_VERSION: &str = "0.13.0";
const TARGET: &str = "bpfel-unknown-none";

/// Builds the object, unless the present one is made from today's sources. Announces long steps by
/// `say`.
pub(crate) fn build(say: &dyn Fn(&str)) -> Result<()> {
    let workspace = workspace()?;
    let object = ebpf_sources::object(&workspace);
    let stamp = ebpf_sources::stamp(&object);
    let up_to_date = fs::read_to_string(&stamp).is_ok_and(|found| {
        ebpf_sources::expected_stamp(&workspace, &object).is_ok_and(|wanted| wanted == found)
    });
    if up_to_date {
        return Ok(());
    }

    let target_dir = ebpf_sources::target_dir(&workspace);
    let build_dir = target_dir.join("bpf/build");
    let (mut cargo, what) = match choose()? {
        Toolchain::Debian => (debian(&target_dir, say)?, "compile dnsflow-ebpf"),
        Toolchain::Nightly => (
            nightly(),
            "compile dnsflow-ebpf (where bpf-linker says `Invalid record`, it was built with an \
             older LLVM than nightly's)",
        ),
    };
    say("building the BPF object");
    // The crate's own `.cargo/config.toml` names target and flags; these would override it.
    for variable in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
    ] {
        cargo.env_remove(variable);
    }
    // Added to the flags of the crate's own `.cargo/config.toml`. The object has line tables.
    let prefixes = paths::prefixes(&workspace)?;
    let remap = prefixes
        .iter()
        .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()));
    let remap: Vec<String> = remap.collect();
    cargo
        .arg("--config")
        .arg(format!("target.{TARGET}.rustflags={remap:?}"))
        .args(["build", "--release", "--locked", "--quiet", "--target-dir"])
        .arg(&build_dir)
        .current_dir(workspace.join("dnsflow-ebpf"));
    run(&mut cargo, what)?;

    // Never a new stamp beside an old object.
    let _ = fs::remove_file(&stamp);
    let built = build_dir.join(TARGET).join("release/dnsflow-ebpf");
    fs::copy(&built, &object)
        .with_context(|| format!("cannot copy {} to {}", built.display(), object.display()))?;
    fs::write(&stamp, ebpf_sources::expected_stamp(&workspace, &object)?)
        .with_context(|| format!("cannot write {}", stamp.display()))
}

/// The compilers that this program knows to use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Toolchain {
    Debian,
    Nightly,
}

fn choose() -> Result<Toolchain> {
    match env::var(TOOLCHAIN).as_deref() {
        Ok("debian") => return Ok(Toolchain::Debian),
        Ok("nightly") => return Ok(Toolchain::Nightly),
        Ok(other) => bail!("{TOOLCHAIN}={other}: it may be `debian` or `nightly`"),
        Err(_) => {}
    }
    if cfg!(target_arch = "x86_64") && works("apt-get") && works("dpkg") {
        return Ok(Toolchain::Debian);
    }
    ensure!(
        nightly_has_sources() && works("bpf-linker"),
        "nothing here can compile for the BPF target. Either of these can:\n\
         - on x86-64 Debian or its kin, apt-get and dpkg: the rest is fetched into the target \
           directory\n\
         - elsewhere: rustup toolchain install nightly --component rust-src\n  \
           and bpf-linker of the same LLVM on PATH: cargo install bpf-linker"
    );
    Ok(Toolchain::Nightly)
}

/// Whether `program` is on `PATH` and runs.
fn works(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn nightly_has_sources() -> bool {
    let sysroot = Command::new("rustup")
        .args(["run", "nightly", "rustc", "--print", "sysroot"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    sysroot.is_ok_and(|output| {
        let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        output.status.success() && sysroot.join("lib/rustlib/src/rust/library/core").is_dir()
    })
}

/// cargo of the nightly toolchain, which compiles `core` for the BPF target itself.
fn nightly() -> Command {
    let mut cargo = Command::new("rustup");
    cargo
        .args(["run", "nightly", "cargo", "-Z", "build-std=core"])
        .env_remove("RUSTC");
    cargo
}

/// This cargo with Debian's compiler and a bpf-linker of its LLVM.
fn debian(target_dir: &Path, say: &dyn Fn(&str)) -> Result<Command> {
    let root = debian_root(target_dir, say)?;
    let linker = bpf_linker(&root, target_dir, say)?;

    let bin = target_dir.join("bpf/bin");
    fs::create_dir_all(&bin).with_context(|| format!("cannot create {}", bin.display()))?;
    let rustc = bin.join("rustc");
    debian_rustc(&root, &root.path().join("usr"), &rustc)?;
    // Under this machine's loader and libc, which it was linked with; LLVM from the root.
    script(
        &bin.join("bpf-linker"),
        &format!(
            "LD_LIBRARY_PATH='{}' exec '{}' \"$@\"",
            llvm_libraries(&root).display(),
            linker.display()
        ),
    )?;

    let mut cargo = this_cargo();
    cargo
        // aya-ebpf uses `asm_experimental_arch` on the BPF target.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTC", &rustc)
        .env("PATH", path_with(&bin)?);
    Ok(cargo)
}

/// The root with Debian's compiler.
pub(crate) fn debian_root(target_dir: &Path, say: &dyn Fn(&str)) -> Result<Root> {
    Root::ensure(&target_dir.join("roots/bpf-toolchain"), DEBIAN, say)
}

/// Writes a script that is the root's rustc with this sysroot. It runs under the root's own loader and libraries, as on
/// the Debian it comes from.
pub(crate) fn debian_rustc(root: &Root, sysroot: &Path, script_file: &Path) -> Result<()> {
    script(
        script_file,
        &format!(
            "exec '{}' --library-path '{}' '{}' --sysroot '{}' \"$@\"",
            root.loader()?.display(),
            root.library_path(),
            root.find("rustc")?.display(),
            sysroot.display(),
        ),
    )
}

/// The root's directory of LLVM and the libraries that it needs beside libc.
fn llvm_libraries(root: &Root) -> PathBuf {
    root.path().join("usr/lib/x86_64-linux-gnu")
}

/// bpf-linker, built against the root's LLVM unless it already is.
fn bpf_linker(root: &Root, target_dir: &Path, say: &dyn Fn(&str)) -> Result<PathBuf> {
    let install = target_dir.join("tools/bpf-linker");
    let program = install.join("bin/bpf-linker");
    let stamp = install.join(".complete");
    let wanted = format!("{BPF_LINKER_VERSION} {LLVM}\n");
    if program.is_file() && fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(program);
    }
    say(&format!(
        "building bpf-linker {BPF_LINKER_VERSION} in {} (about a minute, once)",
        install.display()
    ));
    let build_dir = install.join("build");
    let mut cargo = this_cargo();
    cargo
        .args(["install", "bpf-linker", "--version", BPF_LINKER_VERSION])
        .args(["--locked", "--quiet", "--force", "--no-default-features"])
        .args(["--features", LLVM, "--root"])
        .arg(&install)
        .arg("--target-dir")
        .arg(&build_dir)
        .env("LLVM_PREFIX", root.path().join("usr/lib").join(LLVM))
        .env("LD_LIBRARY_PATH", llvm_libraries(root))
        .env_remove("RUSTFLAGS")
        .current_dir(target_dir);
    run(&mut cargo, "build bpf-linker")?;
    fs::remove_dir_all(&build_dir)
        .with_context(|| format!("cannot remove {}", build_dir.display()))?;
    fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(program)
}

/// The cargo that runs this program.
fn this_cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or("cargo".into()))
}

/// `PATH` with this directory in front.
pub(crate) fn path_with(first: &Path) -> Result<std::ffi::OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(std::iter::once(first.to_owned()).chain(env::split_paths(&path)))
        .with_context(|| format!("{} cannot stand in PATH", first.display()))
}

/// Writes a shell script of one line.
pub(crate) fn script(path: &Path, line: &str) -> Result<()> {
    fs::write(path, format!("#!/bin/sh\n{line}\n"))
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn run(command: &mut Command, what: &str) -> Result<()> {
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot {what}: cannot start {:?}", command.get_program()))?;
    ensure!(status.success(), "cannot {what}: {status}");
    Ok(())
}
