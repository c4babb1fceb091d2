//! What the tree promises about itself and a compiler does not check.

use std::{
    fs,
    path::{Path, PathBuf},
};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace")
        .to_owned()
}

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            files.push(path);
        }
    }
    files
}

/// Lines of these files, without those of comments, that hold one of `words`.
fn lines_with(files: &[PathBuf], words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(file).expect("a text");
        for (number, line) in text.lines().enumerate() {
            let code = line.trim_start();
            if !code.starts_with("//") && words.iter().any(|word| code.contains(word)) {
                found.push(format!("{}:{}: {code}", file.display(), number + 1));
            }
        }
    }
    found
}

#[test]
fn the_core_knows_no_edge_no_socket_no_clock_and_no_runtime() {
    let core = rust_files(&workspace().join("dnsflow-agent/src/core"));
    assert!(core.len() > 10, "{core:?}");
    let edges: Vec<String> = fs::read_to_string(workspace().join("dnsflow-agent/src/lib.rs"))
        .expect("lib.rs")
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'))
        .filter(|module| *module != "core")
        .map(|module| format!("crate::{module}"))
        .collect();
    assert!(edges.contains(&"crate::openflow".to_owned()), "{edges:?}");
    let mut words: Vec<&str> = edges.iter().map(String::as_str).collect();
    words.extend([
        "tokio",
        "kube::",
        "aya::",
        "rustix",
        "libc::",
        "std::fs",
        "std::process",
        "std::thread",
        "Instant",
        "SystemTime",
        "UnixStream",
        "TcpStream",
        "UdpSocket",
        "tracing",
    ]);
    let found = lines_with(&core, &words);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn the_agent_starts_no_process() {
    let agent = rust_files(&workspace().join("dnsflow-agent/src"));
    let found = lines_with(
        &agent,
        &[
            "process::Command",
            "Command::new(\"",
            "posix_spawn",
            "execv",
        ],
    );
    assert!(found.is_empty(), "{found:#?}");
}
