//! The agent's ways to a real API server, with the rights that `deploy/` grants and the definition
//! of the EgressFirewall as ovn-kubernetes means it: to one for custom resources, over the etcd of
//! each Debian release (3.4 and 3.5), and to a whole one where there is one.

mod cluster;
mod core;
#[path = "../manifests/mod.rs"]
mod manifests;
mod proxy;
mod rights;
mod server;
mod story;

use std::{path::PathBuf, time::Duration};

use dnsflow_agent::k8s::{ClientOptions, Objects, watch};
use dnsflow_core::{Input, values::firewall::Destination};
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

use self::{
    cluster::{Cluster, Kind, firewall},
    proxy::Proxy,
};

/// Longer than any back-off that a test goes through: at most 60 s, after an attempt of up to 30 s.
const PATIENCE: Duration = Duration::from_secs(180);

/// Runs a test against both servers.
macro_rules! on_both {
    ($($name:ident => $test:path;)*) => {
        $(mod $name {
            use $crate::cluster::Kind;

            #[tokio::test(flavor = "multi_thread")]
            async fn on_a_server_for_custom_resources() {
                $test(Kind::CustomResources).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn on_a_whole_server() {
                $test(Kind::Whole).await;
            }
        })*
    };
}

on_both! {
    what_the_definition_lets_through_is_read_rule_by_rule => crate::validation;
    a_watch_outlives_cuts_a_restart_and_a_compaction => crate::outliving;
    the_rights_in_deploy_let_the_agent_read_and_not_write => crate::rights::reading;
    the_dns_services_are_read_with_the_rights_in_deploy => crate::rights::services;
    events_are_created_with_the_rights_in_deploy => crate::rights::events;
    without_a_right_of_deploy_what_it_is_for_does_not_work => crate::rights::missing;
    what_the_kind_environment_is_given_is_taken => crate::story::of_kind;
    the_preflight_finds_the_rights_in_deploy => crate::rights::preflight;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_manifests_in_deploy_are_taken_by_a_whole_server() {
    story::of_deploy().await;
}

fn allow(name: &str) -> Value {
    json!([{"type": "Allow", "to": {"dnsName": name}}])
}

/// The agent's watch under way, with the rights of `deploy/`.
struct Watch {
    updates: mpsc::Receiver<Input>,
    task: JoinHandle<()>,
}

impl Watch {
    fn start(kubeconfig: PathBuf) -> Self {
        let (sender, updates) = mpsc::channel(64);
        let options = ClientOptions {
            kubeconfig: Some(kubeconfig),
        };
        Self {
            updates,
            task: tokio::spawn(watch(options, sender, Objects::default())),
        }
    }

    /// The next update in words: `reset`, then `namespace(destinations)` or `-namespace`.
    async fn update(&mut self) -> String {
        let input = timeout(PATIENCE, self.updates.recv())
            .await
            .expect("an update in time")
            .expect("an update");
        let Input::Firewalls(update) = input else {
            panic!("not an update of firewalls: {input:?}");
        };
        let mut words: Vec<String> = update.reset.then(|| "reset".into()).into_iter().collect();
        words.extend(
            update
                .firewalls
                .iter()
                .map(|(id, firewall)| match firewall {
                    Some(firewall) => {
                        let rules = firewall.rules.iter().map(|rule| match &rule.destination {
                            Destination::Name(name) => name.written().into_owned(),
                            Destination::Invalid(_) => "invalid".to_owned(),
                            other => format!("{other:?}"),
                        });
                        format!("{}({})", id.namespace, rules.collect::<Vec<_>>().join(" "))
                    }
                    None => format!("-{}", id.namespace),
                }),
        );
        words.join(" ")
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn code(result: &Result<DynamicObject, kube::Error>) -> u16 {
    match result {
        Ok(_) => 201,
        Err(kube::Error::Api(status)) => status.code,
        Err(other) => panic!("{other}"),
    }
}

async fn validation(kind: Kind) {
    let Some(cluster) = Cluster::start(kind, "validation").await else {
        return;
    };
    let rule = |action: &str, to: Value| json!([{"type": action, "to": to}]);
    let name = |name: &str| json!({"dnsName": name});
    let long = "x".repeat(64) + ".example";
    for (namespace, egress, expected) in [
        ("plain", allow("a.example"), 201),
        ("wildcard", allow("*.a.example."), 201),
        // The patterns are not anchored as meant.
        ("allowx", rule("AllowX", name("a.example")), 201),
        ("xdeny", rule("xDeny", name("a.example")), 201),
        ("single", allow("example"), 201),
        ("long", allow(&long), 201),
        ("other", rule("Permit", name("a.example")), 422),
        ("dots", allow("a..example"), 422),
        ("stars", allow("*.*.example"), 422),
        ("nothing", rule("Allow", json!({})), 422),
        (
            "both",
            rule(
                "Allow",
                json!({"dnsName": "a.example", "cidrSelector": "0.0.0.0/0"}),
            ),
            422,
        ),
        ("no-list", json!("everything"), 422),
    ] {
        let created = cluster.create(namespace, egress).await;
        assert_eq!(code(&created), expected, "{namespace}: {created:?}");
    }
    let mut misnamed = firewall("misnamed", allow("a.example"));
    misnamed["metadata"]["name"] = json!("other");
    let misnamed = serde_json::from_value(misnamed).expect("an object");
    let created = cluster
        .firewalls("misnamed")
        .create(&PostParams::default(), &misnamed)
        .await;
    assert_eq!(code(&created), 422);

    let port = cluster.server.port;
    let mut watch = Watch::start(
        cluster
            .server
            .kubeconfig("agent", port)
            .expect("it is written"),
    );
    assert_eq!(
        watch.update().await,
        "reset allowx(invalid) long(invalid) plain(a.example) single(example) \
         wildcard(*.a.example.) xdeny(invalid)"
    );
}

async fn outliving(kind: Kind) {
    let Some(mut cluster) = Cluster::start(kind, "compaction").await else {
        return;
    };
    cluster
        .create("ns1", allow("one.example"))
        .await
        .expect("it is stored");
    cluster
        .create("ns2", allow("two.example"))
        .await
        .expect("it is stored");
    let proxy = Proxy::start(cluster.server.port).await;
    let kubeconfig = cluster.server.kubeconfig("agent", proxy.address.port());
    let mut watch = Watch::start(kubeconfig.expect("it is written"));
    assert_eq!(
        watch.update().await,
        "reset ns1(one.example) ns2(two.example)"
    );

    cluster
        .create("ns3", allow("three.example"))
        .await
        .expect("it is stored");
    assert_eq!(watch.update().await, "ns3(three.example)");
    // The status is no news: the next update is another's.
    let status = json!({"status": {"status": "applied", "messages": ["zone: applied"]}});
    cluster
        .firewalls("ns1")
        .patch_status("default", &PatchParams::default(), &Patch::Merge(status))
        .await
        .expect("it is stored");
    let delete = |namespace: &str| {
        let firewalls = cluster.firewalls(namespace);
        async move { firewalls.delete("default", &DeleteParams::default()).await }
    };
    delete("ns2").await.expect("it is deleted");
    assert_eq!(watch.update().await, "-ns2");

    // Cut, and on again: the watch goes on where it was.
    proxy.cut();
    cluster
        .create("ns4", allow("four.example"))
        .await
        .expect("it is stored");
    proxy.open();
    assert_eq!(watch.update().await, "ns4(four.example)");

    // Away for so long that nobody remembers what happened: a complete list makes up for it.
    proxy.cut();
    let change = json!({"spec": {"egress": allow("uno.example")}});
    cluster
        .firewalls("ns1")
        .patch("default", &PatchParams::default(), &Patch::Merge(change))
        .await
        .expect("it is stored");
    delete("ns3").await.expect("it is deleted");
    cluster.server.compact().expect("etcd forgets");
    tokio::task::block_in_place(|| cluster.server.restart()).expect("it starts");
    proxy.open();
    assert_eq!(
        watch.update().await,
        "reset ns1(uno.example) ns4(four.example)"
    );
    cluster
        .create("ns5", allow("five.example"))
        .await
        .expect("it is stored");
    assert_eq!(watch.update().await, "ns5(five.example)");

    cluster.assert_all_allowed();
}
