//! The agent as an image holds it: one static program, and its line tables in a file beside it.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use dnsflow_tests::process::run;

use super::{compiler::Compiler, source::Source};
use crate::{ebpf, ebpf_sources, interrupt, paths, unavailable::Unavailable};

/// The target of a program.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Target {
    /// As rustc calls it.
    pub(crate) triple: String,
    /// As OCI calls it.
    pub(crate) architecture: &'static str,
}

impl Target {
    /// The target of this name; without a name, that of this machine.
    pub(crate) fn named(name: Option<&str>) -> Result<Self> {
        let triple = match name {
            Some(name) => name.to_owned(),
            None => host()?,
        };
        let architecture = match triple.split('-').next() {
            Some("x86_64") => "amd64",
            Some("aarch64") => "arm64",
            _ => bail!("{triple}: an image is made for x86_64 or aarch64"),
        };
        Ok(Self {
            triple,
            architecture,
        })
    }

    /// An error if the GNU tools for this target are missing.
    pub(super) fn ensure_tools(&self) -> Result<()> {
        for name in ["gcc", "objcopy"] {
            let tool = self.tool(name)?;
            if run(Command::new(&tool).arg("--version")).is_err() {
                let missing = format!(
                    "a program for {} takes {tool} (Debian: gcc-aarch64-linux-gnu and libc6-dev-arm64-cross, or gcc and \
                     libc6-dev of this machine)",
                    self.triple
                );
                return Err(Unavailable(missing).into());
            }
        }
        Ok(())
    }

    /// A program of the GNU tools for this target: the machine's own has no prefix.
    fn tool(&self, name: &str) -> Result<String> {
        if self.triple == host()? {
            return Ok(name.to_owned());
        }
        // Debian's names: x86_64-linux-gnu-gcc, aarch64-linux-gnu-objcopy.
        Ok(format!("{}-{name}", self.triple.replace("-unknown", "")))
    }
}

/// A program that was built.
#[derive(Clone, Debug)]
pub(super) struct Built {
    /// The program for the image.
    pub(super) program: PathBuf,
    /// Line tables and symbols, for debuggers.
    pub(super) debug: PathBuf,
}

/// Compiles the agent for an image.
pub(super) fn build(
    workspace: &Path,
    target: &Target,
    compiler: &Compiler,
    source: &Source,
) -> Result<Built> {
    ebpf::build(&|text| eprintln!("{text}"))?;
    eprintln!(
        "building the agent for {}; the first time takes many minutes",
        target.triple
    );
    let prefixes = paths::prefixes(workspace)?;
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo
        .args(["build", "--locked", "--release"])
        .args(["--package", "dnsflow-agent", "--target", &target.triple])
        .current_dir(workspace)
        .env("RUSTC", compiler.rustc())
        .env("CARGO_ENCODED_RUSTFLAGS", rustc_flags(&prefixes))
        // For the C and assembler files of crates.
        .env("CFLAGS", c_flags(&prefixes))
        .env("DNSFLOW_COMMIT", source.commit.as_deref().unwrap_or(""));
    if target.triple != host()? {
        let name = target.triple.replace('-', "_");
        let linker = format!("CARGO_TARGET_{}_LINKER", name.to_uppercase());
        let compiler = target.tool("gcc")?;
        cargo.env(linker, &compiler);
        cargo.env(format!("CC_{name}"), &compiler);
    }
    let status = interrupt::wait(interrupt::spawn(&mut cargo)?)?;
    ensure!(status.success(), "cargo build failed ({status})");

    let directory = ebpf_sources::target_dir(workspace)
        .join(&target.triple)
        .join("release");
    split(target, &directory)
}

/// Takes the line tables out of the program.
fn split(target: &Target, directory: &Path) -> Result<Built> {
    let whole = directory.join("dnsflow");
    let built = Built {
        program: directory.join("dnsflow.stripped"),
        debug: directory.join("dnsflow.debug"),
    };
    let objcopy = target.tool("objcopy")?;
    for (option, result) in [
        ("--only-keep-debug", &built.debug),
        // The names of functions stay: a panic's backtrace is read without the other file.
        ("--strip-debug", &built.program),
    ] {
        let mut command = Command::new(&objcopy);
        command.arg(option).args([&whole, result]);
        run(&mut command).with_context(|| format!("taking a program apart takes {objcopy}"))?;
    }
    Ok(built)
}

/// glibc linked into the program: it needs no file of an image. Its only use of files that a static
/// glibc looks for is to look up host names, and the API server is reached by its address.
fn rustc_flags(prefixes: &[(PathBuf, &str)]) -> OsString {
    let mut flags = OsString::from("-Ctarget-feature=+crt-static");
    for (from, to) in prefixes {
        flags.push("\x1f--remap-path-prefix=");
        flags.push(from);
        flags.push(format!("={to}"));
    }
    flags
}

fn c_flags(prefixes: &[(PathBuf, &str)]) -> OsString {
    let mut flags = OsString::new();
    for (from, to) in prefixes {
        flags.push(" -ffile-prefix-map=");
        flags.push(from);
        flags.push(format!("={to}"));
    }
    flags
}

/// This machine's target.
fn host() -> Result<String> {
    let version = run(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

/// Copies a file to where people asked for it.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}
