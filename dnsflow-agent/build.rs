//! Hands the BPF object to the agent, which embeds it. Never an old one: where the object is
//! missing or was not built from today's sources, the build fails and says the remedy.

#[path = "../xtask/src/ebpf_sources.rs"]
mod ebpf_sources;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Names another object, which is taken as it is.
const OVERRIDE: &str = "DNSFLOW_EBPF_OBJECT";

fn main() {
    println!("cargo::rerun-if-env-changed={OVERRIDE}");
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
    let object = match env::var_os(OVERRIDE).map(PathBuf::from) {
        Some(object) if object.is_file() => Ok(object),
        Some(object) => Err(format!(
            "{OVERRIDE} names {}, which is not a file",
            object.display()
        )),
        None => built_object(),
    };
    match object {
        Ok(object) => {
            println!("cargo::rerun-if-changed={}", object.display());
            println!(
                "cargo::rustc-env=DNSFLOW_EBPF_OBJECT_PATH={}",
                object.display()
            );
        }
        // Cargo fails the build and shows the message.
        Err(message) => println!("cargo::error={message}"),
    }
}

fn built_object() -> Result<PathBuf, String> {
    const REMEDY: &str = "run `cargo xtask build-ebpf`";
    let agent = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("not started by cargo")?);
    let workspace = agent.parent().unwrap_or(Path::new("/"));
    let object = ebpf_sources::object(workspace);
    let stamp = ebpf_sources::stamp(&object);
    for path in ebpf_sources::roots(workspace).iter().chain([&stamp]) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let found = fs::read_to_string(&stamp)
        .map_err(|_| format!("there is no BPF object at {}: {REMEDY}", object.display()))?;
    let wanted = ebpf_sources::expected_stamp(workspace, &object)
        .map_err(|error| format!("cannot check {}: {error}: {REMEDY}", object.display()))?;
    if found != wanted {
        return Err(format!(
            "the BPF object {} was not built from the sources as they are now: {REMEDY}",
            object.display()
        ));
    }
    Ok(object)
}
