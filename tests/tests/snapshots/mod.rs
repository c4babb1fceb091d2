//! What people read of dnsflow, kept as files that are reviewed: `NAME.txt` beside this one.
//!
//! A file has commands, each behind `$`, with what they print and their exit code if it is not zero. What
//! differs from run to run, or between releases of OVN, has a placeholder:
//!
//! | placeholder | for |
//! |---|---|
//! | `<time>` | a moment |
//! | `<age>` | a length of time |
//! | `<n>` | packets (none at all stay `0`), microseconds, the number of a table, the flows that a cleanup removes |
//! | `<cookie>`, `<registers>`, `<actions>` | what OVN's release and chance decide in a flow |
//! | `<version>` | the version of dnsflow or of Linux |
//! | `<hook>` | the kernel's hook for TC programs |

// Each test program uses another part of it.
#![allow(dead_code)]

use std::{collections::BTreeMap, env, fs, path::PathBuf};

use dnsflow_tests::support::workspace;
use regex::Regex;
use similar::TextDiff;

/// The environment variable that, whatever its value, has the files written anew. `git diff` then shows what
/// there is to review.
pub(crate) const BLESS: &str = "DNSFLOW_BLESS";

/// What commands have printed, by the name of the file where it was reviewed.
#[derive(Debug, Default)]
pub(crate) struct Snapshots(BTreeMap<&'static str, String>);

impl Snapshots {
    /// Adds what a command has printed, and its exit code.
    pub(crate) fn add(
        &mut self,
        name: &'static str,
        command: &str,
        output: &str,
        code: Option<i32>,
    ) {
        print!("$ {command}\n{output}");
        let text = self.0.entry(name).or_default();
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&stated(&format!("$ {command}\n{output}")));
        match code {
            Some(0) => {}
            Some(code) => text.push_str(&format!("exit code {code}\n")),
            None => text.push_str("killed\n"),
        }
    }

    /// Compares all with the files. Panics with the differences.
    pub(crate) fn check(self) {
        let mut differences = String::new();
        for (name, text) in self.0 {
            let reviewed = reviewed(name);
            if reviewed == text {
                continue;
            }
            if env::var_os(BLESS).is_some() {
                fs::write(file(name), text).expect("the file can be written");
                continue;
            }
            let diff = TextDiff::from_lines(&reviewed, &text);
            let mut diff = diff.unified_diff();
            let file = file(name).display().to_string();
            let diff = diff.header(&format!("{file}, reviewed"), "printed now");
            differences.push_str(&diff.to_string());
        }
        assert!(
            differences.is_empty(),
            "{differences}\nIf this is as it should be: run the test again with {BLESS}=1, and review `git diff`"
        );
    }
}

/// The file of a snapshot.
pub(crate) fn file(name: &str) -> PathBuf {
    let workspace = workspace().expect("a workspace");
    workspace.join(format!("tests/tests/snapshots/{name}.txt"))
}

/// A snapshot as it was reviewed; empty where there is none.
pub(crate) fn reviewed(name: &str) -> String {
    fs::read_to_string(file(name)).unwrap_or_default()
}

/// A text with placeholders.
pub(crate) fn stated(text: &str) -> String {
    let version = regex::escape(env!("CARGO_PKG_VERSION"));
    // In this order: what comes first leaves nothing to those behind it.
    let volatile = [
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", "<time>"),
        (r"cookie=0x444e5346[0-9a-f]+", "cookie=<cookie>"),
        (r"table=\d+", "table=<n>"),
        (r"(,(reg\d+|metadata)=[^,\s]+)+", ",<registers>"),
        (r"(?m)actions=\S+?(, |$)", "actions=<actions>$1"),
        (&format!(r"\b{version}( \([0-9a-f]+\))?"), "<version>"),
        (r"Linux \d\S+", "Linux <version>"),
        (r"take the program by .*", "take the program by <hook>"),
        (r"\b\d+ µs", "<n> µs"),
        (r"\b[1-9]\d* packets", "<n> packets"),
        (
            r"\b\d+ flows would be removed",
            "<n> flows would be removed",
        ),
        (r"n_packets=[1-9]\d*", "n_packets=<n>"),
        (r"\b(\d+d\d+h|\d+h\d+m|\d+m\d+s|\d+s)\b", "<age>"),
    ];
    let mut text = text.to_owned();
    for (pattern, placeholder) in volatile {
        let pattern = Regex::new(pattern).expect("a pattern");
        text = pattern.replace_all(&text, placeholder).into_owned();
    }
    realigned(&text)
}

/// The text with its tables laid out anew, for the placeholders' lengths. A table begins with a line of
/// heads in capital letters, and ends with an empty line or the text.
fn realigned(text: &str) -> String {
    use std::io::Write as _;
    let gap = Regex::new(" {3,}").expect("a pattern");
    let heads = Regex::new("^[A-Z]+( [A-Z]+)*( {3,}[A-Z]+( [A-Z]+)*)+$").expect("a pattern");
    let mut output = tabwriter::TabWriter::new(Vec::new()).padding(3);
    let mut columns: Option<Vec<&str>> = None;
    for line in text.lines() {
        if heads.is_match(line) {
            columns = Some(gap.split(line).collect());
        } else if line.is_empty() {
            columns = None;
        }
        let line = match &columns {
            None => line.to_owned(),
            Some(columns) => {
                let cells = gap.split(line).zip(columns);
                let cells = cells.map(|(cell, head)| match (*head, cell) {
                    ("PACKETS", "PACKETS" | "0" | "0 (group)") => cell,
                    ("PACKETS", cell) if cell.ends_with(" (group)") => "<n> (group)",
                    ("PACKETS", _) => "<n>",
                    _ => cell,
                });
                cells.collect::<Vec<_>>().join("\t")
            }
        };
        writeln!(output, "{line}").expect("memory has room");
    }
    let text = output.into_inner().expect("memory has room");
    String::from_utf8(text).expect("text")
}
