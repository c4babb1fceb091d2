//! The manifests of tests/kind, which `cargo xtask kind` applies, and those of `deploy/` are taken by an API server.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use dnsflow_agent::k8s::convert::{self, Reading};
use dnsflow_tests::{
    go,
    process::run,
    support::{not_run, this_test},
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, Kind},
    manifests,
};

pub(crate) async fn of_kind(kind: Kind) {
    let Some(cluster) = Cluster::start(kind, "story").await else {
        return;
    };
    for mut object in manifests::kind_story().expect("the manifests") {
        let text = |object: &Value, pointer: &str| {
            let text = object.pointer(pointer).and_then(Value::as_str);
            text.unwrap_or_default().to_owned()
        };
        let (version, of) = (text(&object, "/apiVersion"), text(&object, "/kind"));
        let is_firewall = of == "EgressFirewall";
        if is_firewall {
            let converted = convert::firewall(&object);
            assert!(matches!(converted.reading, Reading::Firewall(..)));
            assert!(converted.reasons.is_empty(), "{converted:?}");
        } else if kind == Kind::CustomResources {
            continue;
        }
        let (group, version) = version.rsplit_once('/').unwrap_or(("", &version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &of));
        if text(&object, "/spec/egress/0/to/dnsName").starts_with('*') {
            // The second firewall of its namespace, here under another one's.
            object["metadata"]["namespace"] = "wildcard".into();
        }
        let namespace = text(&object, "/metadata/namespace");
        let api: Api<DynamicObject> = if namespace.is_empty() {
            Api::all_with(cluster.admin.clone(), &resource)
        } else {
            Api::namespaced_with(cluster.admin.clone(), &namespace, &resource)
        };
        let typed = serde_json::from_value(object.clone()).expect("an object");
        let name = text(&object, "/metadata/name");
        // The firewall of a namespace is edited in the course of the story.
        let known = api.get_opt(&name).await.expect("it can be read");
        let taken = match known {
            None => api.create(&PostParams::default(), &typed).await,
            Some(_) => {
                let edit = Patch::Merge(&object);
                api.patch(&name, &PatchParams::default(), &edit).await
            }
        };
        taken.unwrap_or_else(|error| panic!("{error}: {object}"));
    }
}

/// By a whole server, which refuses what its schemas do not know.
pub(crate) async fn of_deploy() {
    // A server judges pods by their namespace. Nothing else is there.
    let namespace = manifests::Objects {
        namespaces: manifests::Objects::base().expect("the base").namespaces,
        ..manifests::Objects::default()
    };
    let Some(cluster) = Cluster::start_with(Kind::Whole, "deploy", &namespace).await else {
        return;
    };
    let server = &cluster.server;
    let kubeconfig = server.kubeconfig("admin", server.port);
    let kubeconfig = kubeconfig.expect("it is written");
    let directories = ["base"].iter().chain(manifests::OVERLAYS);
    for name in directories {
        let built = manifests::built(&manifests::directory(name)).expect(name);
        let built = built.expect("kubectl is here");
        tokio::task::block_in_place(|| create(&kubeconfig, built)).expect(name);
    }
    let helm = tokio::task::block_in_place(|| go::HELM.ensure(&|text| eprintln!("{text}")));
    let helm = match helm {
        Ok(helm) => helm,
        Err(error) => return not_run(&this_test(), format!("{error:#}")),
    };
    // With its hooks, too.
    let mut template = Command::new(helm);
    template.args(["template", "dnsflow", go::KUBE_VERSION]);
    template.args(["--namespace", "dnsflow", "--set", "openshift=true"]);
    template.arg(manifests::directory("helm/dnsflow"));
    let rendered = run(&mut template).expect("it is rendered");
    let rendered = serde_saphyr::from_multiple(&rendered).expect("objects");
    tokio::task::block_in_place(|| create(&kubeconfig, rendered)).expect("the chart");
}

/// Has kubectl create these objects as a dry run on the server, but for the namespace, and those of the Prometheus
/// Operator.
fn create(kubeconfig: &Path, mut objects: Vec<Value>) -> Result<()> {
    objects.retain(|object| object["kind"] != "PodMonitor" && object["kind"] != "Namespace");
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    let mut kubectl = Command::new("kubectl");
    kubectl.env("KUBECONFIG", kubeconfig);
    kubectl.args(["create", "--dry-run=server", "--validate=strict"]);
    kubectl.args(["--filename", "-"]);
    let mut child = kubectl.stdin(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().context("standard input")?;
    input.write_all(list.to_string().as_bytes())?;
    drop(input);
    ensure!(child.wait()?.success(), "{kubectl:?}");
    Ok(())
}
