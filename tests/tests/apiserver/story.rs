//! The manifests of tests/kind, which `cargo xtask kind` applies, are taken by an API server.

use dnsflow_agent::k8s::convert::{self, Reading};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::Value;

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
