//! The life of a release: what docs/install.md says of Helm, done step by step. Behind each step, the objects and the
//! nodes' files and flows are looked at.

use std::{
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::process::run;
use serde_json::{Value, json};

use super::{
    nodes::{FIRST, NODES, Nodes, SECOND},
    restarts::{Restart, Restarts},
};
use crate::{
    interrupt,
    kind::{
        access::{Access, shown},
        deployment::{Deployment, NAMESPACE, ROLLOUT},
        step,
    },
};

/// What an uninstall leaves on a node (docs/install.md, Uninstalling), as find(1) prints it.
const LEFT: &str = "/sys/fs/bpf/dnsflow\n/run/dnsflow-state\n";
const DIRECTORIES: [&str; 2] = ["/sys/fs/bpf/dnsflow", "/run/dnsflow-state"];
/// The cookies of dnsflow's flows, in ovs-ofctl's form.
const COOKIES: &str = "cookie=0x444e534600000000/0xffffffff00000000";
/// Everything that a release may have made. Helm keeps releases in Secrets.
const KINDS: &str = "daemonsets,pods,jobs,configmaps,serviceaccounts,roles,rolebindings,clusterroles,\
                     clusterrolebindings,secrets";
/// Of the chart's objects, and of Helm's own.
const LABELS: [&str; 2] = ["app.kubernetes.io/instance=dnsflow", "owner=helm"];
/// The label of the agents' pods, and of the cleanups in their place.
const AGENTS: &str = "app.kubernetes.io/name=dnsflow";
/// An upgrade sets it.
const OPTION: &str = "--set=options.DNSFLOW_MIN_TTL=31s";
/// It keeps a namespace Terminating for as long as the test wants.
const HOLD: &str = "configmap/hold";
/// For whatever comes in the end.
const LIMIT: Duration = Duration::from_secs(900);
const POLL: Duration = Duration::from_secs(1);

/// A release of the chart, by one Helm.
#[derive(Debug)]
pub(super) struct Release<'a> {
    pub(super) nodes: &'a Nodes,
    pub(super) access: &'a Access,
    pub(super) deployment: &'a Deployment,
    /// Two pods of [`FIRST`].
    pub(super) pods: &'a Restarts<'a>,
    /// Options of `helm rollback` where somebody else has changed the DaemonSet.
    pub(super) force: &'static [&'static str],
}

/// One step: what is done and seen.
type Work<'a> = fn(&Release<'a>) -> Result<()>;

impl<'a> Release<'a> {
    /// From the first installation to the last uninstall.
    pub(super) fn live(&self, helm: &str) -> Result<()> {
        let steps: [(&str, Work<'a>); 9] = [
            ("install and test", Self::install_and_test),
            ("upgrade and rollback", Self::upgrade_and_roll_back),
            ("uninstall", Self::uninstall),
            ("install right behind it", Self::install),
            ("install while the namespace goes", Self::install_too_early),
            ("uninstall with a dead node", Self::fail_to_uninstall),
            ("the agents back", Self::bring_back),
            ("the dead node given up", Self::give_up),
            ("uninstall again", Self::uninstall_again),
        ];
        for (name, work) in steps {
            step(&format!("{helm}: {name}"), || work(self))?;
        }
        Ok(())
    }

    fn install(&self) -> Result<()> {
        self.deployment.make_namespace()?;
        shown(&mut self.deployment.on_chart(&["install", "--wait", ROLLOUT])?)?;
        self.deployment.rolled_out()?;
        self.ensure_opened()?;
        println!("{}", run(&mut self.deployment.plugin(&["check"])?)?);
        Ok(())
    }

    /// A pod has connected by a name, so that the node of the pods has files and flows.
    fn ensure_opened(&self) -> Result<()> {
        self.pods.reached(Restart::Kill, 0)?;
        for node in NODES {
            self.ensure_used(node)?;
        }
        ensure!(self.flows(FIRST)? > 0, "{FIRST} has no flow of dnsflow's");
        Ok(())
    }

    fn install_and_test(&self) -> Result<()> {
        self.install()?;
        shown(&mut self.deployment.on_release(&["test", ROLLOUT])?)
    }

    fn upgrade_and_roll_back(&self) -> Result<()> {
        let first = self.agents()?;
        let mut upgrade = self.deployment.on_chart(&["upgrade", "--wait", ROLLOUT])?;
        shown(upgrade.arg(OPTION))?;
        self.deployment.rolled_out()?;
        let second = self.agents()?;
        let mut rollback = self
            .deployment
            .on_release(&["rollback", "--wait", ROLLOUT])?;
        shown(rollback.arg("1"))?;
        self.deployment.rolled_out()?;
        let third = self.agents()?;
        ensure!(
            first.len() == NODES.len() && first != second && first == third,
            "options: {first:?}, {second:?}, {third:?}"
        );
        self.ensure_opened()
    }

    fn uninstall(&self) -> Result<()> {
        shown(&mut self.deployment.on_release(&["uninstall"])?)?;
        for node in NODES {
            self.ensure_clean(node)?;
        }
        Ok(())
    }

    /// The API server refuses every object, and so does Helm, without a trace. Then the namespace is gone, and with it all
    /// that was left.
    fn install_too_early(&self) -> Result<()> {
        self.uninstall()?;
        let hold = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "hold", "namespace": NAMESPACE, "finalizers": ["dnsflow.io/hold"]},
        });
        self.access.apply(&hold.to_string())?;
        self.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"])?;
        let refusal = refused(&mut self.deployment.on_chart(&["install", "--wait"])?)?;
        ensure!(refusal.contains("being terminated"), "{refusal}");
        let release = refused(&mut self.deployment.on_release(&["status"])?)?;
        ensure!(release.contains("not found"), "{release}");
        let patch = r#"--patch={"metadata": {"finalizers": null}}"#;
        self.kubectl(&[
            "patch",
            HOLD,
            "--namespace",
            NAMESPACE,
            "--type=merge",
            patch,
        ])?;
        self.delete_namespace()?;
        self.install()
    }

    /// The node is named and no other one, whose cleanup is done. All objects stay.
    fn fail_to_uninstall(&self) -> Result<()> {
        self.signal_kubelet("STOP")?;
        let wait = ["wait", "node", FIRST, "--for=condition=Ready=Unknown"];
        self.kubectl(&[&wait[..], &[ROLLOUT]].concat())?;
        let refusal = refused(&mut self.deployment.on_release(&["uninstall"])?)?;
        println!("{refusal}");
        let names = |node: &str| refusal.contains(&format!("node {node}: "));
        ensure!(names(FIRST) && !names(SECOND), "the nodes that are named");
        self.ensure_clean(SECOND)?;
        self.ensure_used(FIRST)?;
        ensure!(self.history()?.1 == "uninstalling", "the release");
        let upgrade = refused(&mut self.deployment.on_chart(&["upgrade"])?)?;
        println!("{upgrade}");
        Ok(())
    }

    /// The agents come back, on the dead node as soon as it lives.
    fn bring_back(&self) -> Result<()> {
        let (revision, _) = self.history()?;
        let mut rollback = self.deployment.on_release(&["rollback"])?;
        shown(rollback.arg(revision).args(self.force))?;
        // The rollout waits for the dead node.
        let delete = ["delete", "pods", "--namespace", NAMESPACE, "--wait=false"];
        self.kubectl(&[&delete[..], &["--selector", AGENTS]].concat())?;
        eventually(|| self.ensure_used(SECOND))?;
        self.revive()?;
        self.deployment.rolled_out()?;
        ensure!(self.history()?.1 == "deployed", "the release");
        self.ensure_opened()
    }

    /// The objects go, and the node keeps what it has, until a next agent takes it over.
    fn give_up(&self) -> Result<()> {
        self.fail_to_uninstall()?;
        shown(&mut self.deployment.on_release(&["uninstall", "--no-hooks"])?)?;
        self.revive()?;
        self.delete_namespace()?;
        self.ensure_used(FIRST)?;
        self.install()
    }

    /// A node that comes back is cleaned by itself; then the objects are deleted.
    fn uninstall_again(&self) -> Result<()> {
        self.fail_to_uninstall()?;
        self.revive()?;
        eventually(|| self.ensure_clean(FIRST))?;
        self.uninstall()?;
        self.delete_namespace()
    }

    fn signal_kubelet(&self, signal: &str) -> Result<()> {
        let kill = ["pkill", "--signal", signal, "--exact", "kubelet"];
        self.nodes.run_on(FIRST, &kill).map(drop)
    }

    fn revive(&self) -> Result<()> {
        self.signal_kubelet("CONT")?;
        self.kubectl(&["wait", "node", FIRST, "--for=condition=Ready", ROLLOUT])
    }

    /// Nothing is left of the release in the cluster behind it.
    fn delete_namespace(&self) -> Result<()> {
        self.kubectl(&["delete", "namespace", NAMESPACE, "--ignore-not-found"])?;
        for label in LABELS {
            let get = [
                "get",
                KINDS,
                "--all-namespaces",
                "--output=name",
                "--selector",
            ];
            let left = run(self.access.kubectl(&get).arg(label))?;
            ensure!(left.is_empty(), "objects are left: {left}");
        }
        Ok(())
    }

    /// What the DaemonSet's pods say of their options, each.
    fn agents(&self) -> Result<Vec<String>> {
        let options =
            r#"jsonpath={range .items[*]}{.metadata.annotations.dnsflow\.io/options}{"\n"}{end}"#;
        let get = ["--namespace", NAMESPACE, "get", "pods", "--output", options];
        let mut get = self.access.kubectl(&get);
        let said = run(get.args(["--selector", AGENTS]))?;
        Ok(said.lines().map(str::to_owned).collect())
    }

    /// Number and status of the last revision.
    fn history(&self) -> Result<(String, String)> {
        let history = run(&mut self.deployment.on_release(&["history", "--output=json"])?)?;
        let history: Value = serde_json::from_str(&history)?;
        let last = history.as_array().and_then(|list| list.last());
        let last = last.context("a revision")?;
        let status = last["status"].as_str().context("a status")?;
        Ok((last["revision"].to_string(), status.to_owned()))
    }

    fn ensure_clean(&self, node: &str) -> Result<()> {
        let (files, flows) = (self.files(node)?, self.flows(node)?);
        ensure!(
            files == LEFT && flows == 0,
            "{node} has {flows} flows, and the files\n{files}"
        );
        Ok(())
    }

    /// In both directories, there is something.
    fn ensure_used(&self, node: &str) -> Result<()> {
        let files = self.files(node)?;
        let is_used = |directory: &str| files.contains(&format!("{directory}/"));
        ensure!(
            DIRECTORIES.into_iter().all(is_used),
            "{node} has only\n{files}"
        );
        Ok(())
    }

    fn files(&self, node: &str) -> Result<String> {
        self.nodes
            .run_on(node, &[&["find"], &DIRECTORIES[..]].concat())
    }

    fn flows(&self, node: &str) -> Result<usize> {
        let dump = [
            "ovs-ofctl",
            "--protocols=OpenFlow15",
            "dump-flows",
            "br-int",
        ];
        let flows = self.nodes.run_on(node, &[&dump[..], &[COOKIES]].concat())?;
        Ok(flows.matches("cookie=").count())
    }

    fn kubectl(&self, words: &[&str]) -> Result<()> {
        shown(&mut self.access.kubectl(words))
    }
}

/// Runs a command that has to fail; everything that it says.
fn refused(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    interrupt::check()?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said)?;
    ensure!(
        !output.status.success(),
        "{command:?} has not failed: {said}"
    );
    Ok(said)
}

fn eventually(look: impl Fn() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    loop {
        match look() {
            Err(_) if start.elapsed() < LIMIT => {
                interrupt::check()?;
                sleep(POLL);
            }
            looked => return looked,
        }
    }
}
