//! What the tree promises about itself and a compiler does not check.

use std::{
    fs,
    path::{Path, PathBuf},
};

use dnsflow_tests::support;

use crate::{keys, reference, snapshots};

fn workspace() -> PathBuf {
    support::workspace().expect("a workspace")
}

pub(crate) fn rust_files(dir: &Path) -> Vec<PathBuf> {
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

/// What the core may be built from. A dependency that opens a socket, reads a clock or brings a
/// runtime along has no place here.
const DEPENDENCIES_OF_THE_CORE: [&str; 8] = [
    // For tables that each answer looks into.
    "ahash",
    "dnsflow-common",
    "hickory-proto",
    // Entries in the order in which they came.
    "indexmap",
    "ipnet",
    // What people ask is given as values that the agent writes as JSON.
    "serde",
    "smallvec",
    "thiserror",
];

/// The names below `[section]` of a manifest.
fn entries(manifest: &str, section: &str) -> Vec<String> {
    manifest
        .lines()
        .skip_while(|line| *line != section)
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()))
        .collect()
}

#[test]
fn the_core_depends_on_no_edge_and_no_runtime() {
    let directory = workspace().join("dnsflow-agent/core");
    let manifest = fs::read_to_string(directory.join("Cargo.toml")).expect("Cargo.toml");
    assert_eq!(
        entries(&manifest, "[dependencies]"),
        DEPENDENCIES_OF_THE_CORE
    );
    assert_eq!(
        entries(&manifest, "[dev-dependencies]"),
        ["proptest", "strsim"]
    );
    let sections: Vec<&str> = manifest
        .lines()
        .filter(|line| line.starts_with('[') && line.contains("dependencies"))
        .collect();
    assert_eq!(sections, ["[dependencies]", "[dev-dependencies]"]);
    assert!(
        !directory.join("build.rs").exists(),
        "the core builds from its sources alone"
    );
}

#[test]
fn the_ovsdb_client_knows_nothing_of_dnsflow() {
    let manifest = workspace().join("dnsflow-agent/ovsdb/Cargo.toml");
    let manifest = fs::read_to_string(manifest).expect("Cargo.toml");
    for section in ["[dependencies]", "[dev-dependencies]"] {
        let entries = entries(&manifest, section);
        assert!(entries.contains(&"tokio".to_owned()), "{entries:?}");
        let ours = entries.iter().find(|name| name.starts_with("dnsflow"));
        assert_eq!(ours, None, "{section}");
    }
}

#[test]
fn the_core_uses_no_socket_no_clock_no_file_and_no_thread() {
    let core = rust_files(&workspace().join("dnsflow-agent/core/src"));
    assert!(core.len() > 10, "{core:?}");
    let words = [
        "std::fs",
        "std::process",
        "std::thread",
        "Instant",
        "SystemTime",
        "UnixStream",
        "TcpStream",
        "UdpSocket",
    ];
    let found = lines_with(&core, &words);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn the_agent_starts_no_process() {
    let source = workspace().join("dnsflow-agent/src");
    let mut agent = rust_files(&source);
    agent.extend(rust_files(&workspace().join("dnsflow-agent/core/src")));
    agent.extend(rust_files(&workspace().join("dnsflow-agent/ovsdb/src")));
    let asking = workspace().join("dnsflow-agent/asking/src");
    agent.extend(rust_files(&asking));
    // The plugin, which runs kubectl for its user, is the same binary under another name. Nothing but `main`
    // knows it.
    agent.retain(|file| !file.starts_with(asking.join("kubectl")));
    let main = agent
        .iter()
        .position(|file| *file == source.join("main.rs"));
    let main = agent.swap_remove(main.expect("it is there"));
    assert!(lines_with(&agent, &["kubectl::"]).is_empty());
    agent.push(main);
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

/// A clock that is set changes nothing but times that people read.
#[test]
fn the_wall_clock_is_read_for_people_alone() {
    let source = workspace().join("dnsflow-agent");
    let mut files = rust_files(&source.join("src"));
    files.extend(rust_files(&source.join("asking/src")));
    let mut found = Vec::new();
    for file in files {
        let is_test = file.ends_with("tests.rs");
        let reads = lines_with(
            std::slice::from_ref(&file),
            &["SystemTime::now", "Realtime"],
        );
        if !is_test && !reads.is_empty() {
            let file = file.strip_prefix(&source).expect("it is below");
            found.push(file.display().to_string());
        }
    }
    found.sort();
    let expected = [
        "asking/src/report.rs",
        "src/bundle.rs",
        "src/journal.rs",
        "src/one_agent.rs",
    ];
    assert_eq!(found, expected);
}

/// A checkout that has moved works without being built anew.
#[test]
fn no_program_has_the_checkouts_path_compiled_in() {
    let mut files = rust_files(&workspace().join("tests"));
    files.extend(rust_files(&workspace().join("xtask")));
    files.extend(rust_files(&workspace().join("dnsflow-agent/tests")));
    let built_in = concat!("env!(\"CARGO_", "MANIFEST_DIR\")");
    let found = lines_with(&files, &[built_in]);
    assert!(found.is_empty(), "{found:#?}");
}

/// A claim about security stands beside the test that shows it.
#[test]
fn every_test_that_the_documents_on_security_and_reliability_name_is_there() {
    let workspace = workspace();
    let read = |name| fs::read_to_string(workspace.join("docs").join(name)).expect("a text");
    let text = read("security.md") + &read("internals/reliability.md");
    let is_name = |word: &&str| {
        let mut letters = word.chars();
        letters
            .all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_')
            && word.matches('_').count() > 2
    };
    let named: Vec<&str> = text.split('`').skip(1).step_by(2).filter(is_name).collect();
    assert!(named.len() > 10, "{named:?}");
    let mut files = rust_files(&workspace.join("tests/tests"));
    files.extend(rust_files(&workspace.join("dnsflow-common/src")));
    files.extend(rust_files(&workspace.join("dnsflow-agent/tests")));
    files.extend(rust_files(&workspace.join("dnsflow-agent/src")));
    files.extend(rust_files(&workspace.join("dnsflow-agent/core/src")));
    files.extend(rust_files(&workspace.join("dnsflow-agent/ovsdb/src")));
    files.extend(rust_files(&workspace.join("dnsflow-agent/asking/src")));
    files.extend(rust_files(&workspace.join("dnsflow-agent/asking/tests")));
    let texts = files
        .iter()
        .map(|file| fs::read_to_string(file).expect("a text"));
    let texts: Vec<String> = texts.collect();
    let missing = named.iter().filter(|name| {
        let function = format!("fn {name}(");
        !texts.iter().any(|text| text.contains(&function))
    });
    assert_eq!(missing.collect::<Vec<_>>(), Vec::<&&str>::new());
}

#[test]
fn the_reference_of_options_is_that_of_the_parser() {
    is_made("docs/reference.md", &reference::text());
}

#[test]
fn the_keys_of_what_is_printed_are_those_of_the_types() {
    let text = keys::text();
    let without: Vec<&str> = text.lines().filter(|line| line.ends_with("|  |")).collect();
    assert!(without.is_empty(), "no meaning: {without:#?}");
    is_made("docs/keys.md", &text);
}

/// That a document is what it is made of, or is written so.
fn is_made(document: &str, text: &str) {
    let file = workspace().join(document);
    if std::env::var_os(snapshots::BLESS).is_some() {
        fs::write(&file, text).expect("the file can be written");
    }
    let written = fs::read_to_string(&file).unwrap_or_default();
    let mut lines = written.lines().zip(text.lines());
    let differs = lines.find(|(written, made)| written != made);
    assert!(
        written == text,
        "{document} is out of date ({differs:?}): run this test with {}=1",
        snapshots::BLESS
    );
}

/// Commands with what they print, from a text with prompts.
fn outputs(text: &str) -> Vec<(&str, Vec<&str>)> {
    let mut outputs: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in text.lines() {
        match (line.strip_prefix("$ "), outputs.last_mut()) {
            (Some(command), _) => outputs.push((command, Vec::new())),
            (None, _) if line.starts_with("exit code ") => {}
            (None, Some((_, lines))) => lines.push(line),
            (None, None) => {}
        }
    }
    for (_, lines) in &mut outputs {
        while lines.last().is_some_and(|line| line.is_empty()) {
            lines.pop();
        }
    }
    outputs
}

/// Whether the document shows these lines. In it, `…` stands for any part of a line, and alone for any lines.
fn shows(document: &[&str], lines: &[&str]) -> bool {
    let Some((first, rest)) = document.split_first() else {
        return lines.is_empty();
    };
    if *first == "…" {
        return (0..=lines.len()).any(|skipped| shows(rest, &lines[skipped..]));
    }
    let Some((line, others)) = lines.split_first() else {
        return false;
    };
    let mut parts = first.split('…');
    let start = parts.next().unwrap_or_default();
    let mut left = line.strip_prefix(start);
    let mut parts: Vec<&str> = parts.collect();
    let end = parts.pop();
    for part in parts {
        left = left.and_then(|left| Some(left.split_once(part)?.1));
    }
    let is_line = match (left, end) {
        (Some(left), Some(end)) => left.ends_with(end),
        (Some(left), None) => left.is_empty(),
        (None, _) => false,
    };
    is_line && shows(rest, others)
}

/// People read an output in the documents as what they will see.
#[test]
fn every_output_in_the_document_on_asking_was_reviewed() {
    let workspace = workspace();
    let mut reviewed = String::new();
    for entry in fs::read_dir(workspace.join("tests/tests/snapshots")).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|ending| ending == "txt") {
            reviewed += &fs::read_to_string(path).expect("a text");
        }
    }
    let reviewed = outputs(&reviewed);
    let text = fs::read_to_string(workspace.join("docs/asking.md")).expect("a text");
    // A block is indented by four; between two blocks stands a line that is not.
    let blocks = text.lines().filter_map(|line| match line {
        "" => Some(""),
        line => line.strip_prefix("    ").or(Some("$ ")),
    });
    let blocks = snapshots::stated(&blocks.collect::<Vec<_>>().join("\n"));
    let mut shown = outputs(&blocks);
    shown.retain(|(command, _)| !command.is_empty());
    assert!(shown.len() > 10, "{shown:#?}");
    for (command, document) in shown {
        let of_it = |(other, _): &&(&str, Vec<&str>)| *other == command;
        let known: Vec<_> = reviewed.iter().filter(of_it).collect();
        assert!(
            known.iter().any(|(_, lines)| shows(&document, lines)),
            "docs/asking.md shows of `{command}`\n{}\nA lab test adds outputs to tests/tests/snapshots; \
             reviewed was {known:#?}",
            document.join("\n")
        );
    }
}
