//! Where the BPF object lies, and which sources it was built from.
//!
//! `cargo xtask build-ebpf` writes the object and a stamp beside it; the agent's build script
//! reads both and refuses an object that is not made from today's sources. The two include this
//! one file, so that they cannot disagree. Only std: a build script should not wait for more.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

/// The directory that holds what cargo builds: `CARGO_TARGET_DIR` (a relative one counts from the
/// workspace), else `target` in the workspace.
pub(crate) fn target_dir(workspace: &Path) -> PathBuf {
    workspace.join(env::var_os("CARGO_TARGET_DIR").map_or("target".into(), PathBuf::from))
}

/// The BPF object.
pub(crate) fn object(workspace: &Path) -> PathBuf {
    target_dir(workspace).join("bpf/dnsflow-ebpf.o")
}

/// The file beside `object` that says what it was built from: see [`expected_stamp`].
pub(crate) fn stamp(object: &Path) -> PathBuf {
    object.with_extension("o.stamp")
}

/// What the stamp of `object` must hold: a hash of the sources, and one of the object itself.
pub(crate) fn expected_stamp(workspace: &Path, object: &Path) -> io::Result<String> {
    let mut sources = Fnv::default();
    for file in files(workspace)? {
        let name = file.strip_prefix(workspace).unwrap_or(&file);
        sources.piece(name.as_os_str().as_encoded_bytes());
        sources.piece(&fs::read(&file)?);
    }
    let mut built = Fnv::default();
    built.piece(&fs::read(object)?);
    Ok(format!(
        "sources {:016x}\nobject {:016x}\n",
        sources.0, built.0
    ))
}

/// The directories and files that the object is made from.
pub(crate) fn roots(workspace: &Path) -> [PathBuf; 3] {
    [
        "dnsflow-ebpf",
        "dnsflow-common/src",
        "dnsflow-common/Cargo.toml",
    ]
    .map(|path| workspace.join(path))
}

/// Every file below [`roots`], sorted; build output is left out.
fn files(workspace: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = roots(workspace).to_vec();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            if path.file_name().is_none_or(|name| name != "target") {
                for entry in fs::read_dir(&path)? {
                    open.push(entry?.path());
                }
            }
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// FNV-1a, 64 bit: the same on every machine and in every compiler.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    /// Adds a piece and its length, so that pieces cannot run into each other.
    fn piece(&mut self, bytes: &[u8]) {
        for byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
