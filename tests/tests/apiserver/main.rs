//! The agent's watch against a real API server for custom resources, with the definition of the
//! EgressFirewall as ovn-kubernetes means it, over the etcd of each Debian release: 3.4, which
//! cannot tell the progress of a watch, and 3.5, which can.

mod authorizer;
#[path = "../manifests/mod.rs"]
mod manifests;
mod proxy;
mod server;

use std::{path::PathBuf, time::Duration};

use dnsflow_agent::{
    core::{Input, firewall::Destination},
    k8s::{
        ClientOptions,
        egress_firewall::{DEFINITION, EgressFirewall},
        watch,
    },
};
use dnsflow_tests::support::not_run;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, Config,
    api::{
        DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, WatchEvent,
        WatchParams,
    },
    config::{KubeConfigOptions, Kubeconfig},
    discovery::ApiResource,
};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

use self::{
    authorizer::Authorizer,
    manifests::Objects,
    proxy::Proxy,
    server::{ApiServer, Programs},
};

/// Longer than any back-off that a test goes through: at most 60 s, after an attempt of up to 30 s.
const PATIENCE: Duration = Duration::from_secs(180);

/// The annotation of the bookmark that ends a streamed list (Kubernetes,
/// `InitialEventsAnnotationKey`).
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// A server that knows EgressFirewalls.
struct Cluster {
    authorizer: Authorizer,
    server: ApiServer,
    admin: Client,
    suite: String,
}

impl Cluster {
    /// `None` after saying why there is none.
    async fn start(test: &'static str) -> Option<Self> {
        let programs = match tokio::task::spawn_blocking(Programs::ensure)
            .await
            .expect("no panic")
        {
            Ok(programs) => programs,
            Err(why) => {
                not_run(test, format!("{why:#}"));
                return None;
            }
        };
        let grants = Objects::base()
            .and_then(|objects| objects.grants())
            .expect("the manifests");
        let authorizer = Authorizer::start(grants).await;
        let address = authorizer.address;
        let suite = programs.suite.clone();
        // On the test's own thread: the processes end with the thread that started them.
        let server = tokio::task::block_in_place(|| ApiServer::start(&programs, test, address));
        let server = server.expect("the server starts");
        let kubeconfig = server
            .kubeconfig("admin", server.port)
            .expect("it is written");
        let admin = client(kubeconfig).await;
        define(&admin).await;
        Some(Self {
            authorizer,
            server,
            admin,
            suite,
        })
    }

    fn firewalls(&self, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.admin.clone(), namespace, &resource())
    }

    /// Creates one as written; the server's answer.
    async fn create(&self, namespace: &str, egress: Value) -> Result<DynamicObject, kube::Error> {
        let object = serde_json::from_value(firewall(namespace, egress)).expect("an object");
        self.firewalls(namespace)
            .create(&PostParams::default(), &object)
            .await
    }
}

fn resource() -> ApiResource {
    ApiResource::erase::<EgressFirewall>(&())
}

fn firewall(namespace: &str, egress: Value) -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "metadata": {"name": "default", "namespace": namespace},
        "spec": {"egress": egress},
    })
}

fn allow(name: &str) -> Value {
    json!([{"type": "Allow", "to": {"dnsName": name}}])
}

async fn client(kubeconfig: PathBuf) -> Client {
    let file = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .expect("a configuration");
    Client::try_from(config).expect("a client")
}

/// Defines the EgressFirewall as `dnsflow crd` prints it.
async fn define(admin: &Client) {
    let definition: Value = serde_saphyr::from_str(DEFINITION).expect("YAML");
    let definition: CustomResourceDefinition =
        serde_json::from_value(definition).expect("a definition");
    let definitions = Api::<CustomResourceDefinition>::all(admin.clone());
    let created = async {
        // It listens before it is ready for writes.
        while let Err(error) = definitions
            .create(&PostParams::default(), &definition)
            .await
        {
            if matches!(&error, kube::Error::Api(status) if status.code == 409) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let firewalls = Api::<DynamicObject>::all_with(admin.clone(), &resource());
        while firewalls.list(&ListParams::default()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(PATIENCE, created)
        .await
        .expect("the definition is taken");
}

/// The agent's watch under way, with the rights of `deploy/`.
struct Watch {
    updates: mpsc::Receiver<Input<'static>>,
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
            task: tokio::spawn(watch(options, sender)),
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
                            Destination::Name(name) => name.written().to_owned(),
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

#[tokio::test(flavor = "multi_thread")]
async fn what_the_definition_lets_through_is_read_rule_by_rule() {
    let Some(cluster) = Cluster::start("validation").await else {
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

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_outlives_cuts_a_restart_and_a_compaction() {
    let Some(mut cluster) = Cluster::start("compaction").await else {
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

    let asked = cluster.authorizer.asked();
    assert!(!asked.is_empty(), "the server asks about the agent");
    let denied: Vec<_> = asked.iter().filter(|(_, allowed)| !allowed).collect();
    assert!(denied.is_empty(), "{denied:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_in_deploy_let_the_agent_read_and_not_write() {
    let Some(cluster) = Cluster::start("rights").await else {
        return;
    };
    cluster
        .create("ns1", allow("one.example"))
        .await
        .expect("it is stored");
    let port = cluster.server.port;
    let agent = client(
        cluster
            .server
            .kubeconfig("agent", port)
            .expect("it is written"),
    )
    .await;
    let firewalls = Api::<DynamicObject>::namespaced_with(agent.clone(), "ns1", &resource());
    firewalls.get("default").await.expect("it may be read");
    let change = json!({"metadata": {"annotations": {"a": "b"}}});
    let patch = Patch::Merge(change);
    let parameters = PatchParams::default();
    for refused in [
        firewalls.patch("default", &parameters, &patch).await,
        firewalls.patch_status("default", &parameters, &patch).await,
    ] {
        assert_eq!(code(&refused), 403);
    }
    let deleted = firewalls.delete("default", &DeleteParams::default()).await;
    assert!(matches!(deleted, Err(kube::Error::Api(status)) if status.code == 403));
    let definitions = Api::<CustomResourceDefinition>::all(agent);
    assert!(definitions.list(&ListParams::default()).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_can_be_streamed_where_etcd_tells_its_progress() {
    let Some(cluster) = Cluster::start("streamed").await else {
        return;
    };
    cluster
        .create("ns1", allow("one.example"))
        .await
        .expect("it is stored");
    let firewalls = Api::<DynamicObject>::all_with(cluster.admin.clone(), &resource());
    let parameters = WatchParams::default().initial_events();
    let streamed = async {
        let mut events = firewalls.watch(&parameters, "0").await?.boxed();
        let mut names = Vec::new();
        while let Some(event) = events.try_next().await? {
            match event {
                WatchEvent::Added(object) => names.extend(object.metadata.namespace),
                WatchEvent::Bookmark(bookmark)
                    if bookmark
                        .metadata
                        .annotations
                        .contains_key(INITIAL_EVENTS_END) =>
                {
                    return Ok(names);
                }
                WatchEvent::Error(status) => return Err(kube::Error::Api(status)),
                _ => {}
            }
        }
        Ok(Vec::new())
    };
    let streamed = timeout(PATIENCE, streamed)
        .await
        .expect("an answer in time");
    match cluster.suite.as_str() {
        "bookworm" => {
            let error = streamed.expect_err("etcd 3.4 cannot");
            assert!(
                error.to_string().contains("RequestWatchProgress"),
                "{error}"
            );
        }
        _ => assert_eq!(streamed.expect("etcd 3.5 can"), ["ns1"]),
    }
}
