//! dnsflow as it is put into a cluster: the manifests of `deploy/`, with an image that is there.

use std::{
    env, fs,
    io::ErrorKind,
    os::unix::{fs::symlink, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{agent, go::KUBE_VERSION, process::run, support::workspace};

use super::access::{Access, shown};

/// For a DaemonSet to be rolled out.
pub(crate) const ROLLOUT: &str = "--timeout=900s";
/// For a node to be cleaned.
const CLEANUP: &str = "--timeout=300s";
pub(crate) const NAMESPACE: &str = "dnsflow";
/// The plugin, as kubectl looks it up.
const PLUGIN: &str = "kubectl-dnsflow";

/// Helm's release, and its namespace.
const RELEASE: [&str; 3] = ["dnsflow", "--namespace", NAMESPACE];

/// dnsflow in one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Deployment {
    access: Access,
    /// For the kustomization, and kubectl's plugin.
    home: PathBuf,
    /// The agent's program, which is the plugin as well.
    program: PathBuf,
    /// The kustomization that it is built on.
    base: PathBuf,
    /// Name and tag.
    image: String,
    /// Options of the agent's, by their variables.
    options: Vec<(&'static str, String)>,
    /// Helm, if the chart is installed and not the kustomization.
    helm: Option<PathBuf>,
}

impl Deployment {
    /// Of the directory `base` in `deploy/`, with files of its own in `home`.
    pub(crate) fn new(
        access: Access,
        home: PathBuf,
        base: &str,
        image: &str,
        options: Vec<(&'static str, String)>,
    ) -> Result<Self> {
        Ok(Self {
            access,
            home,
            program: agent::binary()?,
            base: kustomization(&workspace()?.join("deploy").join(base))?,
            image: image.to_owned(),
            options,
            helm: None,
        })
    }

    /// By the chart, which is for an image and values alone.
    pub(crate) fn by_chart(self, helm: PathBuf) -> Self {
        Self {
            helm: Some(helm),
            ..self
        }
    }

    /// That of another version, with its own `base` and image.
    pub(crate) fn of_version(&self, base: &Path, image: &str) -> Result<Self> {
        Ok(Self {
            base: kustomization(base)?,
            image: image.to_owned(),
            helm: None,
            ..self.clone()
        })
    }

    /// An error if something of dnsflow's is there, which would be taken away in the end.
    pub(super) fn ensure_absent(&self) -> Result<()> {
        for object in ["namespace/dnsflow", "clusterrole/dnsflow"] {
            ensure!(
                !self.access.has(&[object])?,
                "{object} is there already: dnsflow runs in this cluster, and is left alone"
            );
        }
        Ok(())
    }

    /// The kustomization; its directory. kustomize takes directories by relative paths only.
    fn kustomization(&self) -> Result<PathBuf> {
        let directory = self.home.join("agent");
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let depth = fs::canonicalize(&directory)?.components().count() - 1;
        let base = format!(
            "{}{}",
            "../".repeat(depth),
            self.base.strip_prefix("/")?.display()
        );
        let (name, tag) = self.name_and_tag();
        let options: String = self
            .options
            .iter()
            .map(|(variable, value)| format!("      - {variable}={value}\n"))
            .collect();
        let options = match options.is_empty() {
            true => options,
            false => format!(
                "configMapGenerator:\n  - name: dnsflow-options\n    namespace: {NAMESPACE}\n    \
                 behavior: merge\n    literals:\n{options}"
            ),
        };
        let head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n";
        fs::write(
            directory.join("kustomization.yaml"),
            format!(
                "{head}resources:\n  - {base}\n{options}images:\n  - name: dnsflow\n    \
                 newName: {name}\n    newTag: {tag:?}\n"
            ),
        )?;
        Ok(directory)
    }

    /// Those of the image.
    fn name_and_tag(&self) -> (&str, &str) {
        match self.image.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, tag),
            _ => (&self.image, "latest"),
        }
    }

    /// Helm, asked about the release.
    pub(crate) fn on_release(&self, words: &[&str]) -> Result<Command> {
        let helm = self.helm.as_ref().context("no Helm")?;
        let mut command = self.access.beside_kubectl(helm);
        command.args(words).args(RELEASE);
        Ok(command)
    }

    /// Helm, told of the chart and its values as well.
    pub(crate) fn on_chart(&self, words: &[&str]) -> Result<Command> {
        let mut command = self.on_release(words)?;
        let (name, tag) = self.name_and_tag();
        command
            .arg(workspace()?.join("deploy/helm/dnsflow"))
            .arg(format!("--set=image.repository={name},image.tag={tag}"));
        for (variable, value) in &self.options {
            let value = value.replace(',', "\\,");
            command.arg(format!("--set-string=options.{variable}={value}"));
        }
        Ok(command)
    }

    /// `kubectl dnsflow` with these arguments.
    pub(crate) fn plugin(&self, arguments: &[&str]) -> Result<Command> {
        let directory = self.home.join("bin");
        fs::create_dir_all(&directory)?;
        let link = directory.join(PLUGIN);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            Ok(()) | Err(_) => symlink(&self.program, link)?,
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths([directory].into_iter().chain(env::split_paths(&path)))?;
        let mut plugin = self.access.kubectl(&["dnsflow"]);
        plugin.args(arguments).env("PATH", path);
        Ok(plugin)
    }

    /// Checks every node, before anything is deployed. Returns the findings.
    pub(super) fn preflight(&self) -> Result<String> {
        let manifests = match &self.helm {
            Some(_) => {
                self.make_namespace()?;
                let mut template = self.on_chart(&["template", KUBE_VERSION])?;
                run(template.arg("--no-hooks"))?
            }
            None => run(self
                .access
                .kubectl(&["kustomize"])
                .arg(self.kustomization()?))?,
        };
        let file = self.home.join("manifests.yaml");
        fs::write(&file, manifests)?;
        let mut preflight = self.plugin(&["preflight", "--filename"])?;
        run(preflight.arg(file))
    }

    /// Makes the namespace, which the chart expects.
    pub(crate) fn make_namespace(&self) -> Result<()> {
        let mut apply = self.access.kubectl(&["apply", "--filename"]);
        run(apply.arg(workspace()?.join("deploy/base/namespace.yaml")))?;
        Ok(())
    }

    /// Applies the manifests, and waits until every node has an agent.
    pub(crate) fn roll_out(&self) -> Result<()> {
        if self.helm.is_none() {
            let directory = self.kustomization()?;
            let mut apply = self.access.kubectl(&["apply", "--kustomize"]);
            shown(apply.arg(directory))?;
            return self.rolled_out();
        }
        self.make_namespace()?;
        shown(&mut self.on_chart(&["upgrade", "--install", "--wait", ROLLOUT])?)?;
        self.rolled_out()?;
        shown(&mut self.on_release(&["test", ROLLOUT])?)
    }

    /// Waits until every node has an agent.
    pub(crate) fn rolled_out(&self) -> Result<()> {
        let status = ["--namespace", NAMESPACE, "rollout", "status"];
        let mut status = self.access.kubectl(&status);
        shown(status.args(["daemonset/dnsflow", ROLLOUT]))
    }

    /// Cleans up every node, and deletes the objects. Returns what was done.
    pub(super) fn uninstall(&self) -> Result<String> {
        match &self.helm {
            Some(_) => {
                let said = run(&mut self.on_release(&["uninstall", "--wait", CLEANUP])?)?;
                let mut delete = self.access.kubectl(&["delete", "namespace", NAMESPACE]);
                Ok(said + &run(&mut delete)?)
            }
            None => run(&mut self.plugin(&["uninstall", CLEANUP])?),
        }
    }

    /// Removes everything, also the flows of agents, and also after a signal.
    pub(super) fn remove(&self) -> Result<()> {
        let mut failed = Vec::new();
        let uninstall = self.plugin(&["uninstall", CLEANUP])?;
        // Without an agent that can be asked, too.
        let mut delete = self.access.kubectl(&["delete", "--ignore-not-found"]);
        delete.arg("--kustomize").arg(self.kustomization()?);
        let words = ["uninstall", "--ignore-not-found", "--no-hooks"];
        let release = self.helm.as_ref().map(|_| self.on_release(&words));
        let release = release.transpose()?;
        for mut command in [uninstall, delete].into_iter().chain(release) {
            // In a group of its own, which Ctrl-C does not reach.
            let status = command.process_group(0).stdin(Stdio::null()).status();
            if !status.is_ok_and(|status| status.success()) {
                failed.push(format!("{command:?}"));
            }
        }
        ensure!(failed.is_empty(), "left to be done: {}", failed.join(", "));
        Ok(())
    }
}

/// The canonical path of a directory with a kustomization.
fn kustomization(directory: &Path) -> Result<PathBuf> {
    ensure!(
        directory.join("kustomization.yaml").is_file(),
        "{} is no kustomization",
        directory.display()
    );
    Ok(fs::canonicalize(directory)?)
}
