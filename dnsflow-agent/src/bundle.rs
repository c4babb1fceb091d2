//! `dnsflow bundle`: what a bug report needs, in one archive.
//!
//! Each part has a limit. A part that cannot be had is named in `contents.json`, and the others are there
//! all the same: an agent that does not answer is worth a report.

use std::{
    io::{self, IsTerminal as _, Write},
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use flate2::{Compression, write::GzEncoder};
use serde::Serialize;
use tokio::{
    runtime::{self, Runtime},
    time::timeout,
};

use crate::{
    asking::{VERSION, client},
    check,
    exit::Exit,
    options::{AgentOptions, BundleOptions},
    output::new_file,
};

/// The folder in the archive.
const FOLDER: &str = "dnsflow-bundle";
/// The longest part, in bytes before compression. Of a longer one, the first lines are in the archive.
const PART_MAX: usize = 32 * 1024 * 1024;
/// The time that one part may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the agent is asked for: the file in the archive, and the path at the control socket.
const ASKED: [(&str, &str); 7] = [
    ("status.json", "/v1/status"),
    ("cache.jsonl", "/v1/cache"),
    ("events.jsonl", "/v1/events"),
    ("metrics.txt", "/v1/metrics"),
    ("log.txt", "/v1/log"),
    ("log-level.json", "/v1/log-level"),
    ("options.json", "/v1/options"),
];

/// `contents.json`.
#[derive(Debug, Serialize)]
struct Contents {
    /// The version of the `dnsflow` that has made the archive.
    version: &'static str,
    files: Vec<PartInfo>,
}

#[derive(Debug, Serialize)]
struct PartInfo {
    file: &'static str,
    bytes: usize,
    /// Whether there was more.
    is_cut: bool,
    /// Why it is empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Writes the archive, where no file is named to `output`, which is standard output. Names what is missing on standard error.
pub fn run(options: BundleOptions, output: &mut impl Write) -> anyhow::Result<Exit> {
    let BundleOptions { file, agent } = options;
    let is_standard_output = file == Path::new("-");
    if is_standard_output && io::stdout().is_terminal() {
        bail!("standard output is a terminal: name a file, or pipe the archive into one");
    }
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the runtime")?;
    let made = match is_standard_output {
        true => make(agent, runtime, output),
        false => new_file(&file).and_then(|mut file| make(agent, runtime, &mut file)),
    };
    made.with_context(|| format!("cannot write {}", file.display()))
}

fn make(agent: AgentOptions, runtime: Runtime, output: &mut impl Write) -> io::Result<Exit> {
    let mut archive = Archive::begin(output);
    for (file, path) in ASKED {
        let socket = &agent.control_socket.path;
        let asked = client::text(socket, path, PART_MAX);
        let part = match runtime.block_on(async { timeout(PATIENCE, asked).await }) {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
        };
        archive.add(file, part)?;
    }
    drop(runtime);
    let findings = check::json(agent).map(|findings| (findings, false));
    let findings = findings.map_err(|error| error.to_string());
    archive.add("check.json", findings)?;
    archive.end()
}

/// An archive that is being written.
struct Archive<W: Write> {
    tar: tar::Builder<GzEncoder<W>>,
    files: Vec<PartInfo>,
}

impl<W: Write> Archive<W> {
    fn begin(output: W) -> Self {
        Self {
            tar: tar::Builder::new(GzEncoder::new(output, Compression::default())),
            files: Vec::new(),
        }
    }

    /// Adds a part, and whether it was cut; or notes why there is none.
    fn add(&mut self, file: &'static str, part: Result<(Vec<u8>, bool), String>) -> io::Result<()> {
        let (bytes, is_cut, error) = match part {
            Ok((bytes, is_cut)) => (bytes, is_cut, None),
            Err(error) => (Vec::new(), false, Some(error)),
        };
        self.append(file, &bytes)?;
        self.files.push(PartInfo {
            file,
            bytes: bytes.len(),
            is_cut,
            error,
        });
        Ok(())
    }

    fn append(&mut self, file: &str, bytes: &[u8]) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        header.set_mtime(now.unwrap_or_default().as_secs());
        self.tar
            .append_data(&mut header, format!("{FOLDER}/{file}"), bytes)
    }

    /// Ends the archive, and says on standard error what is not whole.
    fn end(mut self) -> io::Result<Exit> {
        let mut exit = Exit::Done;
        for part in &self.files {
            let why = match (&part.error, part.is_cut) {
                (Some(error), _) => error.as_str(),
                (None, true) => "too long, only its start is there",
                (None, false) => continue,
            };
            exit = Exit::Incomplete;
            eprintln!("{}: {why}", part.file);
        }
        let contents = Contents {
            version: VERSION,
            files: std::mem::take(&mut self.files),
        };
        let contents = serde_json::to_vec_pretty(&contents)?;
        self.append("contents.json", &contents)?;
        self.tar.into_inner()?.finish()?.flush()?;
        Ok(exit)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, io::Read as _};

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn the_archive_names_what_is_missing() {
        let mut output = Vec::new();
        let mut archive = Archive::begin(&mut output);
        archive
            .add("whole", Ok((b"all of it".to_vec(), false)))
            .expect("memory has room");
        archive
            .add("cut", Ok((b"a start".to_vec(), true)))
            .expect("memory has room");
        archive
            .add("missing", Err("no agent".to_owned()))
            .expect("memory has room");
        assert_eq!(archive.end().expect("memory has room"), Exit::Incomplete);
        let mut tar = tar::Archive::new(GzDecoder::new(&output[..]));
        let mut files = BTreeMap::new();
        for entry in tar.entries().expect("an archive") {
            let mut entry = entry.expect("a file");
            assert_eq!(entry.header().mode().expect("a mode"), 0o600);
            let name = entry.path().expect("a name").display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).expect("text");
            files.insert(name, text);
        }
        let names: Vec<_> = files.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            ["contents.json", "cut", "missing", "whole"].map(|file| format!("{FOLDER}/{file}"))
        );
        assert_eq!(files[&format!("{FOLDER}/whole")], "all of it");
        let contents = &files[&format!("{FOLDER}/contents.json")];
        let contents: serde_json::Value = serde_json::from_str(contents).expect("an object");
        assert_eq!(
            contents["files"],
            serde_json::json!([
                {"file": "whole", "bytes": 9, "is_cut": false},
                {"file": "cut", "bytes": 7, "is_cut": true},
                {"file": "missing", "bytes": 0, "is_cut": false, "error": "no agent"},
            ])
        );
    }
}
