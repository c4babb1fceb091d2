//! `kubectl dnsflow bundle`: the archive of each node, as a file of its own.

use std::{
    fs::DirBuilder,
    io::{self, Write},
    os::unix::fs::DirBuilderExt as _,
    path::Path,
};

use anyhow::Context as _;
use futures::{StreamExt as _, stream};

use super::agents::{Agent, Archive, Kubectl};
use crate::{
    exit::Exit,
    output::{UNWRITTEN, new_file},
};

/// Archives that are read at the same time, each of some 32 MiB at most.
const AT_ONCE: usize = 4;

/// Asks these agents, and writes each archive when it is there.
pub(super) async fn run(
    kubectl: &Kubectl,
    agents: Vec<Agent>,
    directory: &Path,
    output: &mut impl Write,
) -> anyhow::Result<Exit> {
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(directory);
    made.with_context(|| format!("cannot make the directory {}", directory.display()))?;
    let archives = stream::iter(agents).map(async |agent| {
        let archive = kubectl.archive(&agent).await;
        (agent.node, archive)
    });
    let mut archives = archives.buffered(AT_ONCE);
    let mut exit = Exit::Done;
    while let Some((node, archive)) = archives.next().await {
        match save(&node, archive, directory, output).context(UNWRITTEN)? {
            None => {}
            Some(missing) => {
                exit = Exit::Incomplete;
                eprintln!("node {node}: {missing}");
            }
        }
    }
    Ok(exit)
}

/// Writes the archive of a node into a file that is not there yet, and names it. Returns what is missing.
fn save(
    node: &str,
    archive: Result<Archive, String>,
    directory: &Path,
    output: &mut impl Write,
) -> io::Result<Option<String>> {
    let Archive { bytes, missing } = match archive {
        Ok(archive) => archive,
        Err(reason) => return Ok(Some(reason)),
    };
    // The API server has no node with a slash in its name, and a file name has none.
    let file = directory.join(format!("{}.tar.gz", node.replace('/', "_")));
    let written = new_file(&file).and_then(|mut new| new.write_all(&bytes));
    if let Err(error) = written {
        return Ok(Some(format!("cannot write {}: {error}", file.display())));
    }
    writeln!(output, "{}", file.display())?;
    output.flush()?;
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_archive_has_a_file_that_was_not_there() {
        let directory =
            std::env::temp_dir().join(format!("dnsflow-bundles-{}", std::process::id()));
        fs::create_dir(&directory).expect("there is room");
        let mut output = Vec::new();
        let mut save = |node: &str, archive| {
            super::save(node, archive, &directory, &mut output).expect("memory has room")
        };
        let archive = |bytes: &[u8], missing: Option<&str>| {
            Ok(Archive {
                bytes: bytes.to_vec(),
                missing: missing.map(str::to_owned),
            })
        };
        assert_eq!(save("n1", archive(&[0x1f, 0x8b, 0xff], None)), None);
        let part = save("n2", archive(b"part", Some("the log is cut")));
        assert_eq!(part.as_deref(), Some("the log is cut"));
        let none = save("n3", Err("no route to host".to_owned()));
        assert_eq!(none.as_deref(), Some("no route to host"));
        // A file of somebody else stays.
        let again = save("n1", archive(b"other", None)).expect("it is there");
        assert!(again.contains("n1.tar.gz: File exists"), "{again}");
        let read = |node: &str| fs::read(directory.join(format!("{node}.tar.gz"))).ok();
        assert_eq!(read("n1").as_deref(), Some(&[0x1f, 0x8b, 0xff][..]));
        assert_eq!(read("n2").as_deref(), Some(&b"part"[..]));
        assert_eq!(read("n3"), None);
        let output = String::from_utf8(output).expect("text");
        assert_eq!(output.lines().count(), 2, "{output}");
        fs::remove_dir_all(&directory).expect("it is ours");
    }
}
