//! `kubectl dnsflow uninstall`: dnsflow leaves a cluster.
//!
//! The DaemonSet stays until every node is clean, and its pods clean up in the agents' place. So image, options and
//! directories are those of the agents, no node has an agent that would bring its flows back, and a node that comes back
//! later is still cleaned.

use std::{io, time::Instant};

use anyhow::{Context as _, anyhow};
use k8s_openapi::{api::apps::v1::DaemonSet, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde_json::Value;
use tokio::time::sleep;

use super::{
    agents::{Kubectl, KubectlError},
    command_line::UninstallOptions,
    objects::{Identity, items},
};
use crate::{
    exit::Exit,
    output::UNWRITTEN,
    rollout::{CONTAINER, DAEMON_SET, POLL, Progress, Wait, cleanup_patch, not_cleaned},
};

/// The labels of all objects of dnsflow.
const LABELS: &str = "app.kubernetes.io/name=dnsflow,app.kubernetes.io/part-of=dnsflow";
/// The kinds of these objects, in the order in which they are deleted.
const KINDS: [(&str, &str); 8] = [
    ("DaemonSet", "daemonsets.apps"),
    ("RoleBinding", "rolebindings.rbac.authorization.k8s.io"),
    ("Role", "roles.rbac.authorization.k8s.io"),
    (
        "ClusterRoleBinding",
        "clusterrolebindings.rbac.authorization.k8s.io",
    ),
    ("ClusterRole", "clusterroles.rbac.authorization.k8s.io"),
    ("ConfigMap", "configmaps"),
    ("ServiceAccount", "serviceaccounts"),
    ("Namespace", "namespaces"),
];
/// Kinds of the Prometheus Operator, which a cluster may not know.
const MONITORING: [&str; 2] = [
    "podmonitors.monitoring.coreos.com",
    "prometheusrules.monitoring.coreos.com",
];
/// What kubectl says of a kind that the cluster does not know.
const UNKNOWN_KIND: &str = "doesn't have a resource type";
/// How the lines of `dnsflow cleanup --dry-run` begin that show a flow.
const FLOW: &str = "cookie=";

/// Cleans up every node and deletes the objects, or says what that would do.
pub(super) async fn run(
    kubectl: &Kubectl,
    selector: &str,
    options: &UninstallOptions,
    output: &mut impl io::Write,
) -> anyhow::Result<Exit> {
    let daemon_set = daemon_set(kubectl).await?;
    if let Some(release) = daemon_set
        .as_ref()
        .and_then(|found| release(&found.metadata))
    {
        return Err(of_helm(&release));
    }
    let objects = objects(kubectl).await?;
    if options.dry_run {
        return dry_run(kubectl, selector, daemon_set.as_ref(), &objects, output).await;
    }
    if daemon_set.is_some() {
        let exit = clean_up(kubectl, selector, output).await?;
        if exit != Exit::Done {
            eprintln!(
                "no object was deleted: the DaemonSet {}/{DAEMON_SET} goes on cleaning up nodes that come back; run \
                 this command again, or give these nodes up: kubectl delete daemonset {DAEMON_SET} --namespace {}",
                kubectl.namespace, kubectl.namespace
            );
            return Ok(exit);
        }
    }
    let deleted = kubectl.delete(&objects).await?;
    output.write_all(deleted.as_bytes()).context(UNWRITTEN)?;
    output.flush().context(UNWRITTEN)?;
    Ok(Exit::Done)
}

async fn daemon_set(kubectl: &Kubectl) -> Result<Option<DaemonSet>, KubectlError> {
    let get = ["get", "daemonset", DAEMON_SET, "--ignore-not-found"];
    let of = ["--namespace", &kubectl.namespace, "--output", "json"];
    kubectl.find(&[&get[..], &of[..]].concat(), None).await
}

fn of_helm(release: &str) -> anyhow::Error {
    anyhow!("Helm has installed dnsflow here, and removes it: {release}")
}

/// The command that removes the release to which an object belongs, if one does.
fn release(metadata: &ObjectMeta) -> Option<String> {
    let labels = metadata.labels.as_ref()?;
    if labels.get("app.kubernetes.io/managed-by")? != "Helm" {
        return None;
    }
    let annotation = |name: &str| metadata.annotations.as_ref()?.get(name);
    let name = annotation("meta.helm.sh/release-name")?;
    let namespace = annotation("meta.helm.sh/release-namespace")?;
    Some(format!("helm uninstall {name} --namespace {namespace}"))
}

/// All objects of dnsflow, in the order in which they are deleted.
///
/// # Errors
///
/// If one of them belongs to a release of Helm's, in whatever namespace.
async fn objects(kubectl: &Kubectl) -> anyhow::Result<Vec<Identity>> {
    let kinds = KINDS.map(|(_, kinds)| kinds).join(",");
    let get = ["get", &kinds, "--all-namespaces", "--selector", LABELS];
    let get = [&get[..], &["--output", "json"]].concat();
    let found: Option<Value> = kubectl.find(&get, None).await?;
    let found = items(found.unwrap_or_default());
    let releases = found.iter().filter_map(|object| {
        let metadata = serde_json::from_value(object["metadata"].clone()).ok()?;
        release(&metadata)
    });
    if let Some(release) = releases.into_iter().next() {
        return Err(of_helm(&release));
    }
    let mut objects = ours(found, &kubectl.namespace);
    for kinds in MONITORING {
        let get = ["get", kinds, "--namespace", &kubectl.namespace];
        let get = [&get[..], &["--selector", LABELS, "--output", "json"]].concat();
        match kubectl.find::<Value>(&get, None).await {
            Ok(found) => {
                let found = items(found.unwrap_or_default());
                let found = found.iter().filter_map(Identity::of);
                objects = found.chain(objects).collect();
            }
            Err(error) if error.to_string().contains(UNKNOWN_KIND) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(objects)
}

/// Those of these objects that dnsflow has in this namespace and beside it.
fn ours(objects: Vec<Value>, namespace: &str) -> Vec<Identity> {
    let place = |object: &Identity| KINDS.iter().position(|(kind, _)| *kind == object.kind);
    let mut ours: Vec<Identity> = objects
        .iter()
        .filter_map(Identity::of)
        .filter(|object| match (&*object.kind, &object.namespace) {
            ("Namespace", _) => object.name == namespace,
            // Those for the Services of the cluster's DNS are beside these.
            ("Role" | "RoleBinding", _) | (_, None) => true,
            (_, Some(of)) => of == namespace,
        })
        .collect();
    ours.sort_by_key(place);
    ours
}

async fn dry_run(
    kubectl: &Kubectl,
    selector: &str,
    daemon_set: Option<&DaemonSet>,
    objects: &[Identity],
    output: &mut impl io::Write,
) -> anyhow::Result<Exit> {
    let agents = kubectl.agents(selector).await?;
    let cleanup = ["cleanup", "--dry-run"].map(str::to_owned);
    let said = kubectl.texts(agents, |agent| kubectl.exec(agent, &cleanup, false));
    let directories = daemon_set.map(directories).unwrap_or_default();
    let exit = write_nodes(said.await, |line| on_node(line, &directories), output)?;
    for object in objects {
        writeln!(output, "{} would be deleted", object.shown()).context(UNWRITTEN)?;
    }
    output.flush().context(UNWRITTEN)?;
    Ok(exit)
}

/// The directories of the agent's container that are the node's, with their paths there.
fn directories(daemon_set: &DaemonSet) -> Vec<(String, String)> {
    let Some(pod) = &daemon_set.spec.template.spec else {
        return Vec::new();
    };
    let agent = pod.containers.iter().find(|one| one.name == CONTAINER);
    let mounts = agent.into_iter().flat_map(|one| one.volume_mounts.iter());
    let directories = mounts.flatten().filter_map(|mount| {
        let mut volumes = pod.volumes.iter().flatten();
        let volume = volumes.find(|volume| volume.name == mount.name)?;
        let path = volume.host_path.as_ref()?.path.clone();
        Some((mount.mount_path.clone(), path))
    });
    directories.collect()
}

/// A line of a cleanup, which knows the paths of its container, with that of the node where it begins with one.
fn on_node(line: &str, directories: &[(String, String)]) -> String {
    let rests = directories.iter().filter_map(|(mounted, path)| {
        let rest = line.strip_prefix(&**mounted)?;
        rest.starts_with(['/', ' '])
            .then(|| format!("{path}{rest}"))
    });
    rests.into_iter().next().unwrap_or_else(|| line.to_owned())
}

/// What the nodes have said, without flows. Names those that have said nothing.
fn write_nodes(
    said: Vec<(String, Result<String, String>)>,
    shown: impl Fn(&str) -> String,
    output: &mut impl io::Write,
) -> anyhow::Result<Exit> {
    let mut exit = Exit::Done;
    for (node, said) in said {
        match said {
            Ok(text) => {
                for line in text.lines().filter(|line| !line.starts_with(FLOW)) {
                    writeln!(output, "node {node}: {}", shown(line)).context(UNWRITTEN)?;
                }
            }
            Err(reason) => {
                eprintln!("node {node}: {reason}");
                exit = Exit::Incomplete;
            }
        }
    }
    Ok(exit)
}

/// Has every node cleaned up in the agents' place.
async fn clean_up(
    kubectl: &Kubectl,
    selector: &str,
    output: &mut impl io::Write,
) -> anyhow::Result<Exit> {
    let patch = cleanup_patch().to_string();
    let command = ["patch", "daemonset", DAEMON_SET];
    let with = ["--namespace", &kubectl.namespace, "--patch", &patch];
    kubectl
        .printed(&[&command[..], &with[..]].concat(), None)
        .await?;
    let mut wait = Wait::new(kubectl.patience, Instant::now());
    loop {
        let found = daemon_set(kubectl).await?;
        let found = found.context("somebody else has deleted the DaemonSet: nodes may be left")?;
        let progress = Progress::of(&found);
        if wait.goes_on(progress, Instant::now()) {
            sleep(POLL).await;
            continue;
        }
        if progress.is_whole() {
            break;
        }
        eprintln!("{} of {} nodes are clean", progress.done, progress.nodes);
        for (node, reason) in not_cleaned(&kubectl.pods(selector).await?) {
            eprintln!("node {node}: {reason}");
        }
        return Ok(Exit::Incomplete);
    }
    let agents = kubectl.agents(selector).await?;
    let said = kubectl.texts(agents, |agent| {
        let pod = agent.pod.as_deref().unwrap_or_default();
        let logs = ["logs", pod, "--namespace", &kubectl.namespace];
        let logs = logs.into_iter().chain(["--container", CONTAINER]);
        Ok(logs.map(str::to_owned).collect())
    });
    // Every node is clean, whether or not it can be asked for its log.
    write_nodes(said.await, str::to_owned, output)?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_helm_has_installed_helm_removes() {
        let metadata = json!({
            "labels": {"app.kubernetes.io/managed-by": "Helm"},
            "annotations": {
                "meta.helm.sh/release-name": "firewall",
                "meta.helm.sh/release-namespace": "kube-system",
            },
        });
        let of = |metadata: Value| release(&serde_json::from_value(metadata).expect("metadata"));
        assert_eq!(
            of(metadata).as_deref(),
            Some("helm uninstall firewall --namespace kube-system")
        );
        assert_eq!(of(json!({"labels": {}})), None);
    }

    #[test]
    fn the_namespace_goes_last_and_what_is_of_others_stays() {
        let object = |kind: &str, namespace: Option<&str>, name: &str| {
            json!({
                "apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": namespace},
            })
        };
        let objects = vec![
            object("Namespace", None, "dnsflow"),
            object("Namespace", None, "elsewhere"),
            object("ConfigMap", Some("dnsflow"), "dnsflow-options-x"),
            object("ConfigMap", Some("elsewhere"), "theirs"),
            object("Role", Some("kube-system"), "dnsflow-dns"),
            object("ClusterRole", None, "dnsflow"),
            object("DaemonSet", Some("dnsflow"), "dnsflow"),
        ];
        let shown: Vec<String> = ours(objects, "dnsflow")
            .iter()
            .map(Identity::shown)
            .collect();
        assert_eq!(
            shown,
            [
                "DaemonSet dnsflow/dnsflow",
                "Role kube-system/dnsflow-dns",
                "ClusterRole dnsflow",
                "ConfigMap dnsflow/dnsflow-options-x",
                "Namespace dnsflow",
            ]
        );
    }
}
