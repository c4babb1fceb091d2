//! dnsflow as it is put into a cluster: the manifests of `deploy/`, with an image that is there.

use std::{fs, os::unix::process::CommandExt as _, path::PathBuf, process::Stdio};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{process::run, support::workspace};

use super::access::{Access, shown};

/// For a DaemonSet to be rolled out.
pub(super) const ROLLOUT: &str = "--timeout=300s";
/// For the nodes to be cleaned after a failure.
const RESCUE: &str = "--timeout=60s";
const NAMESPACE: &str = "dnsflow";

/// What runs on the nodes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Work {
    /// `dnsflow check`, beside whatever runs.
    Preflight,
    /// The agent.
    Agent,
    /// `dnsflow cleanup`, in place of the agents.
    Cleanup,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::Preflight => "preflight",
            Self::Agent => "agent",
            Self::Cleanup => "cleanup",
        }
    }

    /// The container that does it.
    fn container(self) -> &'static str {
        match self {
            Self::Preflight => "check",
            Self::Agent => "agent",
            Self::Cleanup => "cleanup",
        }
    }

    /// The DaemonSet's name, and the value of the label that its Pods have.
    fn daemon_set(self) -> &'static str {
        match self {
            Self::Preflight => "dnsflow-preflight",
            Self::Agent | Self::Cleanup => "dnsflow",
        }
    }
}

/// dnsflow in one cluster.
#[derive(Debug)]
pub(crate) struct Deployment {
    access: Access,
    /// For the kustomizations.
    home: PathBuf,
    /// What they are built on: a directory in `deploy/`.
    base: String,
    /// Name and tag.
    image: String,
    /// Options of the agent's, by their variables.
    options: Vec<(&'static str, String)>,
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
        let directory = workspace()?.join("deploy").join(base);
        ensure!(
            directory.join("kustomization.yaml").is_file(),
            "{} is no kustomization",
            directory.display()
        );
        Ok(Self {
            access,
            home,
            base: base.to_owned(),
            image: image.to_owned(),
            options,
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

    /// A kustomization of this work; its directory. kustomize takes directories by relative paths
    /// only.
    fn kustomization(&self, work: Work) -> Result<PathBuf> {
        let directory = self.home.join(work.name());
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let deploy = fs::canonicalize(workspace()?)?.join("deploy");
        let depth = fs::canonicalize(&directory)?.components().count() - 1;
        let deploy = format!(
            "{}{}",
            "../".repeat(depth),
            deploy.strip_prefix("/")?.display()
        );
        let components = match work {
            Work::Agent => String::new(),
            Work::Preflight | Work::Cleanup => {
                format!("components:\n  - {deploy}/components/{}\n", work.name())
            }
        };
        let (name, tag) = match self.image.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, tag),
            _ => (&*self.image, "latest"),
        };
        let options: String = self
            .options
            .iter()
            .map(|(variable, value)| {
                format!(
                    "                  - name: {variable}\n                    value: {value:?}\n"
                )
            })
            .collect();
        let patch = if options.is_empty() {
            String::new()
        } else {
            format!(
                "patches:\n  - patch: |-\n      apiVersion: apps/v1\n      kind: DaemonSet\n      \
                 metadata:\n        name: dnsflow\n        namespace: dnsflow\n      spec:\n        \
                 template:\n          spec:\n            containers:\n              - name: agent\n                \
                 env:\n{options}"
            )
        };
        // Options first: a component copies the agent's container.
        let options = directory.join("options");
        fs::create_dir_all(&options)?;
        let head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n";
        fs::write(
            options.join("kustomization.yaml"),
            format!("{head}resources:\n  - ../{deploy}/{}\n{patch}", self.base),
        )?;
        fs::write(
            directory.join("kustomization.yaml"),
            format!(
                "{head}resources:\n  - options\n{components}images:\n  - name: dnsflow\n    \
                 newName: {name}\n    newTag: {tag:?}\n"
            ),
        )?;
        Ok(directory)
    }

    /// Applies it, and waits until every node has it.
    pub(crate) fn roll_out(&self, work: Work) -> Result<()> {
        let directory = self.kustomization(work)?;
        let mut apply = self.access.kubectl(&["apply", "--kustomize"]);
        shown(apply.arg(directory))?;
        self.rolled_out(work)
    }

    /// Waits until every node has it.
    pub(crate) fn rolled_out(&self, work: Work) -> Result<()> {
        let daemon_set = format!("daemonset/{}", work.daemon_set());
        let status = ["--namespace", NAMESPACE, "rollout", "status", &daemon_set];
        shown(self.access.kubectl(&status).arg(ROLLOUT))
    }

    /// The output of the work on every node.
    pub(super) fn printed(&self, work: Work) -> Result<String> {
        let label = format!("app.kubernetes.io/name={}", work.daemon_set());
        let mut logs = self.access.kubectl(&["--namespace", NAMESPACE, "logs"]);
        logs.args(["--selector", &label, "--container", work.container()]);
        run(logs.args(["--prefix", "--tail", "-1"]))
    }

    /// Takes the preflight away; its namespace and its rights stay for the agent.
    pub(super) fn end_preflight(&self) -> Result<()> {
        let name = Work::Preflight.daemon_set();
        let delete = ["--namespace", NAMESPACE, "delete", "daemonset", name];
        shown(&mut self.access.kubectl(&delete))
    }

    /// Removes everything, also the flows of agents, and also after a signal.
    pub(super) fn remove(&self) -> Result<()> {
        let mut failed = Vec::new();
        let cleanup = self.kustomization(Work::Cleanup)?;
        let mut commands = Vec::new();
        if self
            .access
            .has(&["--namespace", NAMESPACE, "daemonset/dnsflow"])?
        {
            let mut apply = self.access.kubectl(&["apply", "--kustomize"]);
            apply.arg(&cleanup);
            let status = ["--namespace", NAMESPACE, "rollout", "status"];
            let mut wait = self.access.kubectl(&status);
            wait.args(["daemonset/dnsflow", RESCUE]);
            commands.extend([apply, wait]);
        }
        let mut delete = self.access.kubectl(&["delete", "--ignore-not-found"]);
        delete.arg("--kustomize").arg(&cleanup);
        commands.push(delete);
        for command in &mut commands {
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
