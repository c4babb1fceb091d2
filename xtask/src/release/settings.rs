//! Where a release is published: `[workspace.metadata.release]` of `Cargo.toml`.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use dnsflow_tests::process::run;
use serde::Deserialize;
use serde_json::Value;

/// The places of a release. Before the project has them, they are names below `.invalid`, which nobody can have
/// (RFC 2606, section 2).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Settings {
    /// The image, without a tag.
    pub(super) image: String,
    /// The directory of all files of a release, at its version, without the last slash.
    pub(super) downloads: String,
    /// The project's page.
    pub(super) homepage: String,
}

impl Settings {
    /// The settings of this checkout.
    pub(super) fn of(workspace: &Path) -> Result<Self> {
        let mut metadata = Command::new("cargo");
        metadata
            .args(["metadata", "--format-version", "1", "--no-deps", "--locked"])
            .current_dir(workspace);
        let mut metadata: Value = serde_json::from_str(&run(&mut metadata)?)?;
        serde_json::from_value(metadata["metadata"]["release"].take())
            .context("[workspace.metadata.release] of Cargo.toml")
    }

    /// The address of a file of this version.
    pub(super) fn download(&self, version: &str, file: &str) -> String {
        format!("{}/v{version}/{file}", self.downloads)
    }
}
