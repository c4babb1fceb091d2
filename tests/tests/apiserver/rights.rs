//! Every call of the agent is judged by exactly the rights that `deploy/` grants: what is missing
//! there fails here.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    sync::atomic::Ordering::Relaxed,
};

use dnsflow_agent::k8s::{
    DnsService,
    events::{Reporter, channel, post},
    watch_dns_services,
};
use dnsflow_core::{
    io::report::{PresentProblems, Report, Severity},
    values::resolver::Resolver,
};
use dnsflow_tests::{agent, support::not_run};
use k8s_openapi::{
    api::{core::v1::Service, events::v1::Event},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Duration, sleep, timeout},
};

use crate::{
    PATIENCE, allow,
    cluster::{Cluster, Kind, resource},
    manifests::Objects,
};

fn is_refused<T>(result: Result<T, kube::Error>) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.code == 403)
}

/// The DNS Service of a cluster, beside one that is none.
async fn add_services(cluster: &Cluster, namespace: &str, name: &str, address: &str) {
    for (name, label, address) in [
        (name, "kube-dns", address),
        ("other", "other", "10.96.0.99"),
    ] {
        let service = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {
                "namespace": namespace, "name": name, "labels": {"k8s-app": label},
                "resourceVersion": "1",
            },
            "spec": {
                "clusterIP": address, "clusterIPs": [address],
                "ports": [{"name": "dns", "port": 53, "protocol": "UDP"}],
            },
        });
        let mut service: Value = service;
        if cluster.core.is_none() {
            // Not to be set on what is to be stored.
            let metadata = service["metadata"].as_object_mut().expect("metadata");
            metadata.remove("resourceVersion");
        }
        cluster.add_service(service).await;
    }
}

/// The agent's reporter under way.
fn report(cluster: &Cluster) -> (Reporter, JoinHandle<()>) {
    let (reporter, notices) = channel();
    let options = cluster.agent_options();
    let task = tokio::spawn(post(options, notices, Duration::ZERO));
    let problem = PresentProblems {
        first: [(0, "bad".to_owned())].into(),
        count: 1,
    };
    reporter.tell(&Report::Problems {
        namespace: "ns1".into(),
        news: BTreeMap::new(),
        over: Vec::new(),
        present: [(Severity::NotInForce, problem)].into(),
    });
    (reporter, task)
}

pub(crate) async fn reading(kind: Kind) {
    let Some(cluster) = Cluster::start(kind, "rights").await else {
        return;
    };
    let created = cluster.create("ns1", allow("one.example")).await;
    created.expect("it is stored");
    let agent = cluster.agent().await;
    let firewalls = Api::<DynamicObject>::namespaced_with(agent.clone(), "ns1", &resource());
    firewalls.get("default").await.expect("it may be read");
    let patch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
    let parameters = PatchParams::default();
    assert!(is_refused(
        firewalls.patch("default", &parameters, &patch).await
    ));
    assert!(is_refused(
        firewalls.patch_status("default", &parameters, &patch).await
    ));
    let deletion = DeleteParams::default();
    assert!(is_refused(firewalls.delete("default", &deletion).await));
    let definitions = Api::<CustomResourceDefinition>::all(agent);
    assert!(is_refused(definitions.list(&ListParams::default()).await));
}

pub(crate) async fn services(kind: Kind) {
    let mut variants = vec![(
        "services-base",
        Objects::base().expect("the manifests"),
        ("kube-system", "kube-dns", "10.96.0.10"),
        "kube-system/k8s-app=kube-dns",
    )];
    match Objects::built("overlays/openshift").expect("the overlay") {
        Some(objects) => variants.push((
            "services-openshift",
            objects,
            ("openshift-dns", "dns-default", "10.96.0.11"),
            "openshift-dns/dns-default",
        )),
        None => not_run(
            "services-openshift",
            "neither kubectl nor kustomize is here",
        ),
    }
    for (test, objects, (namespace, name, address), selection) in variants {
        let Some(cluster) = Cluster::start_with(kind, test, &objects).await else {
            return;
        };
        add_services(&cluster, namespace, name, address).await;
        let (sender, mut resolvers) = mpsc::channel(1);
        let service: DnsService = selection.parse().expect("a Service");
        let watch = watch_dns_services(cluster.agent_options(), vec![service], sender);
        let watch = tokio::spawn(watch);
        let found = timeout(PATIENCE, resolvers.recv()).await;
        let expected = Resolver {
            address: address.parse().expect("an address"),
            port: 53,
        };
        assert_eq!(
            found.expect("in time"),
            Some(BTreeSet::from([expected])),
            "{test}"
        );
        if let Some(core) = &cluster.core {
            let watched = async {
                while !core.asked().iter().any(|(grant, _)| grant.verb == "watch") {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            timeout(PATIENCE, watched).await.expect("a watch follows");
            cluster.assert_all_allowed();
        }
        watch.abort();
        // Nor those of another namespace, nor by write.
        let agent = client_of(&cluster).await;
        let elsewhere = Api::<Service>::namespaced(agent.clone(), "default");
        assert!(is_refused(elsewhere.list(&ListParams::default()).await));
        let here = Api::<Service>::namespaced(agent, namespace);
        assert!(is_refused(
            here.delete(name, &DeleteParams::default()).await
        ));
    }
}

pub(crate) async fn events(kind: Kind) {
    let Some(cluster) = Cluster::start(kind, "events").await else {
        return;
    };
    let created = cluster.create("ns1", allow("one.example")).await;
    let uid = created.expect("it is stored").metadata.uid;
    let (reporter, task) = report(&cluster);
    let event = async {
        loop {
            if let Some(event) = cluster.events("ns1").await.pop() {
                return event;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let event = timeout(PATIENCE, event).await.expect("an Event in time");
    assert_eq!(event.note.as_deref(), Some("rule 0: bad"));
    let regarding = event.regarding.expect("what it is about");
    assert_eq!(regarding.uid, uid);
    assert_eq!(regarding.kind.as_deref(), Some("EgressFirewall"));
    assert_eq!(reporter.counters().failures.load(Relaxed), 0);
    cluster.assert_all_allowed();
    task.abort();
    let events = Api::<Event>::namespaced(client_of(&cluster).await, "ns1");
    assert!(is_refused(events.list(&ListParams::default()).await));
    let deletion = DeleteParams::default();
    assert!(is_refused(
        events
            .delete(
                event.metadata.name.as_deref().unwrap_or_default(),
                &deletion
            )
            .await
    ));
}

pub(crate) async fn missing(kind: Kind) {
    let mut objects = Objects::base().expect("the manifests");
    objects.revoke("events");
    objects.revoke("services");
    let Some(cluster) = Cluster::start_with(kind, "missing", &objects).await else {
        return;
    };
    let created = cluster.create("ns1", allow("one.example")).await;
    created.expect("it is stored");
    add_services(&cluster, "kube-system", "kube-dns", "10.96.0.10").await;
    let (reporter, task) = report(&cluster);
    let failed = async {
        while reporter.counters().failures.load(Relaxed) == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, failed).await.expect("it is refused");
    task.abort();
    assert!(cluster.events("ns1").await.is_empty());
    let services = Api::<Service>::namespaced(client_of(&cluster).await, "kube-system");
    assert!(is_refused(services.list(&ListParams::default()).await));
    let findings = findings(&cluster);
    assert!(
        findings.contains(&("rbac".into(), "failed".into())),
        "{findings:?}"
    );
}

pub(crate) async fn preflight(kind: Kind) {
    let Some(cluster) = Cluster::start(kind, "preflight").await else {
        return;
    };
    add_services(&cluster, "kube-system", "kube-dns", "10.96.0.10").await;
    let findings = findings(&cluster);
    for check in ["kubernetes", "rbac", "dns"] {
        let expected = (check.to_owned(), "ok".to_owned());
        assert!(findings.contains(&expected), "{check}: {findings:?}");
    }
    cluster.assert_all_allowed();
}

/// What `dnsflow check` says of the API server.
fn findings(cluster: &Cluster) -> Vec<(String, String)> {
    let kubeconfig = cluster.agent_options().kubeconfig.expect("a kubeconfig");
    let mut check = Command::new(agent::binary().expect("the agent is built"));
    check
        .args([
            "check",
            "--output=json",
            "--dns-service=kube-system/k8s-app=kube-dns",
        ])
        .arg("--kubeconfig")
        .arg(kubeconfig)
        // Nothing of this machine's is looked at.
        .args(["--ovs-db=unix:/nowhere", "--openflow-socket=/nowhere"])
        .args(["--ovn-nb=unix:/nowhere", "--ovn-sb=unix:/nowhere"]);
    let output = tokio::task::block_in_place(|| check.output()).expect("it runs");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let findings = printed["findings"].as_array().expect("findings");
    let text = |finding: &Value, field: &str| finding[field].as_str().unwrap_or("?").to_owned();
    findings
        .iter()
        .map(|finding| (text(finding, "check"), text(finding, "status")))
        .collect()
}

/// A client of the agent's.
async fn client_of(cluster: &Cluster) -> kube::Client {
    let kubeconfig = cluster.agent_options().kubeconfig.expect("a kubeconfig");
    crate::cluster::client(kubeconfig).await
}
