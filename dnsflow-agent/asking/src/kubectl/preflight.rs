//! `kubectl dnsflow preflight`: whether agents could work, before there are any.
//!
//! The manifests' DaemonSet is created with another name and pods that wait, with the rights, options and directories of
//! the agent. Each pod is asked what an agent is asked by `check`. In the end the cluster is as it was: what was there is
//! left alone, and what was created is deleted.

use std::{io, time::Instant};

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::api::apps::v1::DaemonSet;
use serde_json::Value;
use tokio::{select, signal::ctrl_c, time::sleep};

use super::{
    agents::{Answer, Kubectl},
    command_line::PreflightOptions,
    merge::{self, Question},
    objects::{Identity, items, list},
};
use crate::{
    exit::Exit,
    manifests,
    rollout::{DAEMON_SET, LABEL, PART_OF, POLL, PREFLIGHT, Progress, Wait, preflight},
};

/// The kinds of the objects that a pod of the DaemonSet needs.
const NEEDED: [&str; 7] = [
    "Namespace",
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ConfigMap",
];
/// Helm's manifests have it at objects that do not belong to the release.
const HOOK: &str = "helm.sh/hook";

/// The objects that these manifests need for a preflight, the DaemonSet last.
fn objects(documents: Vec<Value>) -> anyhow::Result<Vec<Value>> {
    let objects = documents.into_iter().flat_map(items);
    let objects = objects.filter(|object| object["metadata"]["annotations"].get(HOOK).is_none());
    let (mut needed, mut daemon_sets) = (Vec::new(), Vec::new());
    for object in objects {
        let kind = object["kind"].as_str().unwrap_or_default();
        if NEEDED.contains(&kind) {
            needed.push(object);
        } else if kind == "DaemonSet" && object["metadata"]["labels"][PART_OF] == DAEMON_SET {
            daemon_sets.push(object);
        }
    }
    needed.sort_by_key(|object| {
        let kind = object["kind"].as_str();
        NEEDED.iter().position(|needed| Some(*needed) == kind)
    });
    let [daemon_set] = &daemon_sets[..] else {
        bail!(
            "the manifests have {} DaemonSets with the label {PART_OF}: {DAEMON_SET}, not one: kubectl kustomize \
             DIRECTORY and helm template print them",
            daemon_sets.len()
        );
    };
    let waiting = preflight(daemon_set).context("the DaemonSet has no labels or no containers")?;
    needed.push(waiting);
    Ok(needed)
}

/// Checks every node, and writes the findings.
pub(super) async fn run(
    kubectl: &Kubectl,
    options: &PreflightOptions,
    output: &mut impl io::Write,
) -> anyhow::Result<Exit> {
    let text = manifests::texts(&options.file);
    let text = text.map_err(|reason| anyhow!("cannot read the manifests: {reason}"))?;
    let documents = serde_saphyr::from_multiple(&text).context("cannot read the manifests")?;
    let objects = objects(documents)?;
    let identities = objects.iter().map(Identity::of).collect::<Option<Vec<_>>>();
    let identities = identities.context("an object has no kind or no name")?;
    let waiting = identities.last().context("a DaemonSet")?;
    let kubectl = Kubectl {
        namespace: waiting.namespace.clone().unwrap_or_default(),
        ..kubectl.clone()
    };
    // One that was left by a preflight that was killed.
    kubectl.delete(std::slice::from_ref(waiting)).await?;
    let get = [
        "get",
        "--ignore-not-found",
        "--output",
        "json",
        "--filename",
        "-",
    ];
    let there: Option<Value> = kubectl.find(&get, Some(&list(&objects))).await?;
    let there: Vec<_> = items(there.unwrap_or_default())
        .iter()
        .filter_map(Identity::of)
        .collect();
    let (missing, mut created): (Vec<Value>, Vec<Identity>) = objects
        .into_iter()
        .zip(identities)
        .filter(|(_, identity)| !there.iter().any(|found| found.is(identity)))
        .unzip();
    let answers = select! {
        answers = ask(&kubectl, &missing) => answers,
        _ = ctrl_c() => Err(anyhow!("interrupted")),
    };
    // The Namespace last.
    created.reverse();
    let deleted = kubectl.delete(&created).await;
    let deleted = deleted.with_context(|| {
        let created: Vec<String> = created.iter().map(Identity::shown).collect();
        format!("these objects may be left: {}", created.join(", "))
    });
    let exit = merge::write(&Question::Check, options.output.format, answers?, output)?;
    deleted?;
    Ok(exit)
}

/// Creates the objects, and asks each pod.
async fn ask(kubectl: &Kubectl, objects: &[Value]) -> anyhow::Result<Vec<Answer>> {
    let create = ["create", "--filename", "-"];
    kubectl.printed(&create, Some(&list(objects))).await?;
    let namespace = &kubectl.namespace;
    let get = ["get", "daemonset", PREFLIGHT, "--namespace", namespace];
    let get = [&get[..], &["--ignore-not-found", "--output", "json"]].concat();
    let mut wait = Wait::new(kubectl.patience, Instant::now());
    loop {
        let found: Option<DaemonSet> = kubectl.find(&get, None).await?;
        let found = found.context("somebody else has deleted the DaemonSet")?;
        if !wait.goes_on(Progress::of(&found), Instant::now()) {
            break;
        }
        sleep(POLL).await;
    }
    // A node whose pod does not run is named with the answers.
    let pods = kubectl.agents(&format!("{LABEL}={PREFLIGHT}")).await?;
    if pods.is_empty() {
        bail!("no node has a pod of the DaemonSet {namespace}/{PREFLIGHT}");
    }
    let check = ["check", "--output", "json"].map(str::to_owned);
    Ok(kubectl.ask(pods, &check, None).await)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_manifests_a_preflight_takes_what_its_pods_need() {
        let of_dnsflow = |name: &str| json!({LABEL: name, PART_OF: "dnsflow"});
        let labels = of_dnsflow("dnsflow");
        let pod = json!({"metadata": {"labels": labels}, "spec": {"containers": [
            {"name": "agent", "args": ["agent"], "ports": [], "livenessProbe": {}},
        ]}});
        let daemon_set = json!({
            // Helm names it after its release.
            "kind": "DaemonSet", "metadata": {"name": "edge-dnsflow", "labels": labels},
            "spec": {"selector": {"matchLabels": labels}, "minReadySeconds": 10, "template": pod},
        });
        let named = |kind: &str, name: &str| json!({"kind": kind, "metadata": {"name": name}});
        let hook =
            json!({"kind": "Role", "metadata": {"name": "x", "annotations": {HOOK: "test"}}});
        let documents = vec![
            daemon_set,
            named("PodMonitor", "dnsflow"),
            hook,
            json!({"kind": "List", "items": [named("ConfigMap", "dnsflow-options")]}),
            named("Namespace", "dnsflow"),
        ];
        let objects = objects(documents).expect("a DaemonSet");
        let shown = objects.iter().map(|object| {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            format!("{} {name}", object["kind"].as_str().unwrap_or_default())
        });
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                "Namespace dnsflow",
                "ConfigMap dnsflow-options",
                "DaemonSet dnsflow-preflight",
            ]
        );
        let labels = of_dnsflow("dnsflow-preflight");
        assert_eq!(objects[2]["spec"]["selector"]["matchLabels"], labels);
        let pod = &objects[2]["spec"]["template"];
        assert_eq!(pod["metadata"]["labels"], labels);
        assert_eq!(
            pod["spec"]["containers"][0],
            json!({"name": "agent", "args": ["wait"]})
        );
    }

    #[test]
    fn manifests_without_the_daemon_set_are_refused() {
        let error = objects(vec![
            json!({"kind": "Namespace", "metadata": {"name": "dnsflow"}}),
        ]);
        let error = error.expect_err("there is none").to_string();
        assert!(
            error.starts_with("the manifests have 0 DaemonSets with the label"),
            "{error}"
        );
    }
}
