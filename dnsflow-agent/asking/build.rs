//! Hands on the version, with the commit where that is known.

use std::env;

/// The commit that an image is built from; `cargo xtask image` sets it.
const COMMIT: &str = "DNSFLOW_COMMIT";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={COMMIT}");
    let version = env!("CARGO_PKG_VERSION");
    match env::var(COMMIT) {
        Ok(commit) if !commit.is_empty() => {
            println!("cargo::rustc-env=DNSFLOW_VERSION={version} ({commit})");
        }
        _ => println!("cargo::rustc-env=DNSFLOW_VERSION={version}"),
    }
}
