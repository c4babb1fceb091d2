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
use dnsflow_tests::support::workspace;

use super::{family::Family, programs::Programs, virtual_node::VirtualNode};
use crate::{interrupt, kind::access::Access};

/// The node without a DNS server, where pods ask and agents are killed. In a virtual machine, if one is wanted.
pub(super) const FIRST: &str = "n1";
pub(super) const SECOND: &str = "n2";
pub(super) const NODES: [&str; 2] = [FIRST, SECOND];
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
    family: Family,
    /// [`FIRST`], if it is not in namespaces.
    virtual_node: Option<VirtualNode>,
}

impl Nodes {
    /// `directory` is for files of its own.
    pub(super) fn new(
        name: String,
        directory: PathBuf,
        programs: Programs,
        helper: PathBuf,
        family: Family,
        virtual_node: Option<VirtualNode>,
    ) -> Self {
        Self {
            name,
            directory,
            programs,
            helper,
            family,
            virtual_node,
        }
    }

    /// Whether the first node is a virtual machine.
    pub(super) fn is_virtual(&self) -> bool {
        self.virtual_node.is_some()
    }

    pub(super) fn family(&self) -> Family {
        self.family
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Two nodes that are ready, with the images and the cluster's DNS.
    pub(super) fn up(&mut self, images: &[PathBuf]) -> Result<()> {
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
        for (number, image) in images.iter().enumerate() {
            let copy = self.directory.join(format!("images/dnsflow-{number}.tar"));
            fs::copy(image, copy).with_context(|| format!("cannot copy {}", image.display()))?;
        }
        self.script("control-plane.sh", &[])?;
        self.script("image.sh", &[])?;
        let variables = self.variables();
        if let Some(node) = &mut self.virtual_node {
            node.boot(FIRST, &self.directory, &self.programs, &variables)?;
        }
        for node in NODES {
            if !(self.is_virtual() && node == FIRST) {
                self.script("node.sh", &[node])?;
            }
        }
        // A virtual machine has brought up its node when it runs something there.
        self.script("on.sh", &[FIRST, "true"])?;
        self.script("ovn-kubernetes.sh", &[])
    }

    /// Ends whatever of it there is. A signal does not keep it from that.
    pub(super) fn down(&mut self) -> Result<()> {
        if let Some(node) = &mut self.virtual_node {
            node.will_end();
        }
        let mut down = self.command("down.sh")?;
        // In a group of its own, which Ctrl-C does not reach.
        let status = down.process_group(0).stdin(Stdio::null()).status()?;
        if let Some(node) = &mut self.virtual_node {
            node.ended();
        }
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
        let mut command = self.command("on.sh")?;
        command
            .arg(node)
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let (status, text) = interrupt::output(&mut command)?;
        ensure!(status.success(), "{node}: {words:?} failed ({status})");
        Ok(text)
    }

    fn command(&self, script: &str) -> Result<Command> {
        let (machine, gateway) = match &self.virtual_node {
            Some(node) => (FIRST, node.gateway()),
            None => ("", ""),
        };
        let mut command = Command::new("bash");
        command
            .arg(scripts()?.join(script))
            .envs(self.variables())
            .env("MACHINE", machine)
            .env("GATEWAY_MODE", gateway);
        Ok(command)
    }

    /// The variables that `lib.sh` names.
    fn variables(&self) -> Vec<(&'static str, String)> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        vec![
            ("NAME", self.name.clone()),
            ("WORK", text(&self.directory)),
            ("BIN", text(self.programs.directory())),
            ("HELPER", text(&self.helper)),
            ("FAMILY", self.family.name().to_owned()),
        ]
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
