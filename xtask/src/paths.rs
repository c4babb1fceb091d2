//! Paths of this machine, which must not be in what is built.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::ebpf_sources;

/// Directories, and what stands for them in programs. Where two of them fit, the later one counts
/// (rustc's `--remap-path-prefix`, gcc's `-ffile-prefix-map`).
pub(crate) fn prefixes(workspace: &Path) -> Result<[(PathBuf, &'static str); 3]> {
    Ok([
        (workspace.to_owned(), "/dnsflow"),
        (ebpf_sources::target_dir(workspace), "/target"),
        (cargo_home()?, "/cargo"),
    ])
}

/// Where cargo keeps what it downloads (The Cargo Book, "Cargo Home").
fn cargo_home() -> Result<PathBuf> {
    if let Some(home) = env::var_os("CARGO_HOME") {
        return Ok(home.into());
    }
    let home = env::home_dir().context("neither CARGO_HOME nor a home directory")?;
    Ok(home.join(".cargo"))
}
