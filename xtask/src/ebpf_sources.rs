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

/// The directories and files that the object is made from. `dnsflow-common` takes its version,
/// which is in the names of symbols, from the workspace's manifest.
pub(crate) fn roots(workspace: &Path) -> [PathBuf; 3] {
    ["dnsflow-ebpf", "dnsflow-common", "Cargo.toml"].map(|path| workspace.join(path))
}

/// Every file below [`roots`], sorted; build output is left out.
fn files(workspace: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = roots(workspace).to_vec();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            // `dnsflow-ebpf/common` is a link to a root of its own.
            if !path.is_symlink() && path.file_name().is_none_or(|name| name != "target") {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A workspace with an object, in a directory that goes with it.
    struct Workspace(PathBuf);

    impl Workspace {
        fn new(test: &str) -> Self {
            let name = format!("dnsflow-ebpf-sources-{test}-{}", std::process::id());
            let workspace = Self(env::temp_dir().join(name));
            workspace.write("dnsflow-ebpf/Cargo.lock", "lock");
            workspace.write("dnsflow-ebpf/src/main.rs", "main");
            workspace.write("dnsflow-common/src/lib.rs", "lib");
            workspace.write("Cargo.toml", "manifest");
            workspace.write("object", "object");
            workspace
        }

        fn write(&self, path: &str, content: &str) {
            let file = self.0.join(path);
            fs::create_dir_all(file.parent().expect("a file")).expect("made");
            fs::write(file, content).expect("written");
        }

        fn stamp(&self) -> String {
            expected_stamp(&self.0, &self.0.join("object")).expect("read")
        }
    }

    impl Drop for Workspace {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn whatever_the_object_is_made_from_changes_the_stamp() {
        let workspace = Workspace::new("changes");
        let mut seen = vec![workspace.stamp()];
        for (path, content) in [
            ("dnsflow-ebpf/Cargo.lock", "other lock"),
            ("dnsflow-ebpf/src/main.rs", "other main"),
            ("dnsflow-ebpf/.cargo/config.toml", "flags"),
            ("dnsflow-common/src/lib.rs", "other lib"),
            ("dnsflow-common/src/walk/tests.rs", "new"),
            ("Cargo.toml", "other manifest"),
            ("object", "other object"),
        ] {
            workspace.write(path, content);
            let stamp = workspace.stamp();
            assert!(!seen.contains(&stamp), "{path}");
            seen.push(stamp);
        }
        fs::rename(
            workspace.0.join("dnsflow-ebpf/src/main.rs"),
            workspace.0.join("dnsflow-ebpf/src/mail.rs"),
        )
        .expect("renamed");
        assert!(!seen.contains(&workspace.stamp()), "a name");
    }

    #[test]
    fn nothing_else_changes_the_stamp() {
        let workspace = Workspace::new("same");
        let stamp = workspace.stamp();
        workspace.write("dnsflow-ebpf/target/release/build", "output");
        workspace.write("dnsflow-agent/src/main.rs", "agent");
        assert_eq!(workspace.stamp(), stamp);
    }
}
