//! A cluster by its kubeconfig: everything that is said to it is said by kubectl.

use std::{
    ffi::OsString,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::process::run;
use serde_json::Value;

use crate::interrupt;

/// A cluster that runs.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    /// kubectl, or what starts it.
    pub(crate) program: PathBuf,
    /// The words before kubectl's own arguments.
    pub(crate) words: Vec<OsString>,
    pub(crate) kubeconfig: PathBuf,
}

impl Access {
    /// By the kubectl on the path.
    pub(super) fn by_kubeconfig(kubeconfig: PathBuf) -> Self {
        Self {
            program: "kubectl".into(),
            words: Vec::new(),
            kubeconfig,
        }
    }

    /// A kubectl of this cluster.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Command {
        let mut kubectl = Command::new(&self.program);
        kubectl
            .args(&self.words)
            .args(arguments)
            .env("KUBECONFIG", &self.kubeconfig);
        kubectl
    }

    /// Another program, where kubectl runs.
    pub(crate) fn beside_kubectl(&self, program: &Path) -> Command {
        let mut words = self.words.clone();
        let mut command = match words.pop() {
            Some(_) => {
                let mut command = Command::new(&self.program);
                command.args(words).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.env("KUBECONFIG", &self.kubeconfig);
        command
    }

    /// Applies manifests.
    pub(crate) fn apply(&self, manifests: &str) -> Result<()> {
        let mut apply = self.kubectl(&["apply", "--filename", "-"]);
        let mut child = interrupt::spawn(apply.stdin(Stdio::piped()))?;
        child
            .stdin
            .take()
            .context("kubectl's standard input")?
            .write_all(manifests.as_bytes())?;
        let status = interrupt::wait(child)?;
        ensure!(status.success(), "{apply:?} failed ({status})");
        Ok(())
    }

    /// What kubectl says in JSON.
    pub(super) fn json(&self, arguments: &[&str]) -> Result<Value> {
        let text = run(self.kubectl(arguments).args(["--output", "json"]))?;
        serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
    }

    /// Whether there is this object.
    pub(super) fn has(&self, arguments: &[&str]) -> Result<bool> {
        let mut get = self.kubectl(&["get", "--ignore-not-found", "--output", "name"]);
        Ok(!run(get.args(arguments))?.trim().is_empty())
    }
}

/// The items of a list.
pub(super) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

/// Runs a command whose output people may want to see.
pub(crate) fn shown(command: &mut Command) -> Result<()> {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect();
    println!("$ {}", words.join(" "));
    let status = interrupt::wait(interrupt::spawn(command.stdin(Stdio::null()))?)?;
    ensure!(status.success(), "it failed ({status})");
    Ok(())
}
