//! How the files of a release were built: an in-toto statement with SLSA's provenance, version 1.
//!
//! It is not signed, and nobody but this program says it: at most SLSA Build L1. It has no time of the build and no
//! name of the machine, so that a second build gives the same bytes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use dnsflow_tests::process::run;
use serde_json::{Value, json};

use super::settings::Settings;
use crate::{image::Source, tarball::sha256};

/// The files that fix each crate of the build.
const LOCKS: [&str; 2] = ["Cargo.lock", "dnsflow-ebpf/Cargo.lock"];

/// A file of the release, or the image: name and SHA-256.
pub(super) type Subject = (String, String);

/// The statement (in-toto's `spec/v1/statement.md`, `https://slsa.dev/provenance/v1`).
pub(super) fn statement(
    workspace: &Path,
    settings: &Settings,
    source: &Source,
    architectures: &[&str],
    subjects: &[Subject],
) -> Result<Value> {
    let mut dependencies = vec![json!({
        "name": "dnsflow",
        "uri": settings.homepage,
        "digest": {"gitCommit": source.commit},
    })];
    for lock in LOCKS {
        let file: PathBuf = workspace.join(lock);
        let content = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        dependencies.push(json!({"name": lock, "digest": {"sha256": sha256(&content)}}));
    }
    let subject = |(name, sha256): &Subject| json!({"name": name, "digest": {"sha256": sha256}});
    Ok(json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects.iter().map(subject).collect::<Vec<_>>(),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": format!("{}/build-types/xtask-release/v1", settings.homepage),
                "externalParameters": {
                    "command": "cargo xtask release",
                    "version": source.version,
                    "architectures": architectures,
                },
                "internalParameters": {
                    "rustc": run(Command::new("rustc").arg("--version"))?.trim(),
                    "sourceDateEpoch": source.seconds(),
                },
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": format!("{}/builders/maintainers-machine", settings.homepage)},
            },
        },
    }))
}
