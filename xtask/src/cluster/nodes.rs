//! The nodes, their control plane and what is outside of the cluster: up, and down again, by the scripts of
//! `tests/cluster`.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use dnsflow_tests::{process::run, support::workspace};

use super::programs::Programs;
use crate::{interrupt, kind::access::Access};

/// The node without a DNS server, where pods ask and agents are killed.
pub(super) const FIRST: &str = "n1";
const NODES: [&str; 2] = [FIRST, "n2"];
/// The directories of a run, of which only the logs stay.
const DIRECTORIES: [&str; 5] = ["images", "log", "pki", "run", "scripts"];
const LOG_LINES: usize = 20;

/// What the scripts bring up.
#[derive(Debug)]
pub(super) struct Nodes {
    /// The beginning of the names of namespaces and control groups.
    name: String,
    directory: PathBuf,
    programs: Programs,
    /// The lab's helper.
    helper: PathBuf,
}

impl Nodes {
    /// `directory` is for files of its own.
    pub(super) fn new(
        name: String,
        directory: PathBuf,
        programs: Programs,
        helper: PathBuf,
    ) -> Self {
        Self {
            name,
            directory,
            programs,
            helper,
        }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Two nodes that are ready, with the images and the cluster's DNS.
    pub(super) fn up(&self, image: &Path) -> Result<()> {
        match fs::remove_dir_all(self.directory.join("log")) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        for directory in DIRECTORIES {
            fs::create_dir_all(self.directory.join(directory))?;
        }
        for script in fs::read_dir(scripts()?)? {
            let script = script?.path();
            let name = script.file_name().context("a name")?;
            fs::copy(&script, self.directory.join("scripts").join(name))?;
        }
        fs::copy(image, self.directory.join("images/dnsflow.tar"))
            .with_context(|| format!("cannot copy {}", image.display()))?;
        self.script("control-plane.sh", &[])?;
        self.script("image.sh", &[])?;
        for node in NODES {
            self.script("node.sh", &[node])?;
        }
        self.script("ovn-kubernetes.sh", &[])
    }

    /// Ends whatever of it there is. A signal does not keep it from that.
    pub(super) fn down(&self) -> Result<()> {
        let mut down = self.command("down.sh")?;
        // In a group of its own, which Ctrl-C does not reach.
        let status = down.process_group(0).stdin(Stdio::null()).status()?;
        ensure!(status.success(), "left to be done: {down:?}");
        Ok(())
    }

    /// kubectl as the cluster's administrator. The API server is in a network namespace.
    pub(super) fn access(&self) -> Access {
        let space = format!("--net=/run/netns/{}-control", self.name);
        let kubectl = self.programs.directory().join("kubectl");
        Access {
            program: "nsenter".into(),
            words: vec![space.into(), kubectl.into()],
            kubeconfig: self.directory.join("pki/admin.conf"),
        }
    }

    /// Runs a program in a node; its output.
    pub(super) fn run_on(&self, node: &str, words: &[&str]) -> Result<String> {
        let init = fs::read_to_string(self.directory.join(format!("run/{node}.init")))?;
        let mut command = Command::new("nsenter");
        command
            .args(["--target", init.trim(), "--mount", "--pid", "--net"])
            .args(["--uts", "--ipc", "--root", "--wd", "--"])
            .args(words);
        run(&mut command)
    }

    fn command(&self, script: &str) -> Result<Command> {
        let mut command = Command::new("bash");
        command
            .arg(scripts()?.join(script))
            .env("NAME", &self.name)
            .env("WORK", &self.directory)
            .env("BIN", self.programs.directory())
            .env("HELPER", &self.helper);
        Ok(command)
    }

    /// Runs a script, with its output in a file.
    fn script(&self, script: &str, arguments: &[&str]) -> Result<()> {
        let path = self
            .directory
            .join("log")
            .join(script)
            .with_extension("log");
        let log = File::options().create(true).append(true).open(&path)?;
        let mut command = self.command(script)?;
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let status = interrupt::wait(interrupt::spawn(&mut command)?)?;
        if !status.success() {
            let text = fs::read_to_string(&path)?;
            let lines: Vec<&str> = text.lines().collect();
            let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
            bail!("{script} {arguments:?} failed ({status}):\n{last}");
        }
        Ok(())
    }
}

/// The directory of the scripts.
fn scripts() -> Result<PathBuf> {
    Ok(workspace()?.join("tests/cluster"))
}
