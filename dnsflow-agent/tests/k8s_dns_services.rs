//! The watch of the cluster's DNS Services against an API server that does exactly what each test
//! says.

mod fake;

use std::collections::BTreeSet;

use dnsflow_agent::k8s::{ClientOptions, DnsService, watch_dns_services};
use dnsflow_core::values::resolver::Resolver;
use fake::{Kubeconfig, PATIENCE, Server, list_of, status};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

const KUBE_SYSTEM: &str = "/api/v1/namespaces/kube-system/services";
const OPENSHIFT: &str = "/api/v1/namespaces/openshift-dns/services";

/// A watch under way.
struct Watch {
    resolvers: mpsc::Receiver<BTreeSet<Resolver>>,
    _kubeconfig: Kubeconfig,
    task: JoinHandle<()>,
}

impl Watch {
    fn start(server: &Server, services: &str) -> Self {
        let kubeconfig = Kubeconfig::new();
        kubeconfig.write(server.address);
        let options = ClientOptions {
            kubeconfig: Some(kubeconfig.path().to_owned()),
        };
        let services: Vec<DnsService> = services
            .split(',')
            .map(|text| text.parse().expect("a Service"))
            .collect();
        let (sender, resolvers) = mpsc::channel(1);
        Self {
            resolvers,
            _kubeconfig: kubeconfig,
            task: tokio::spawn(watch_dns_services(options, services, sender)),
        }
    }

    /// The next complete set.
    async fn told(&mut self) -> String {
        let resolvers = timeout(PATIENCE, self.resolvers.recv())
            .await
            .expect("an update in time")
            .expect("an update");
        let words = resolvers
            .iter()
            .map(|resolver| format!("{} {}", resolver.address, resolver.port));
        words.collect::<Vec<_>>().join(", ")
    }

    /// That nothing was sent. The server's next request or the next update, awaited before or
    /// after, gives this its meaning.
    fn nothing_told(&mut self) {
        if let Ok(resolvers) = self.resolvers.try_recv() {
            panic!("an update: {resolvers:?}");
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn service(name: &str, version: &str, addresses: &[&str]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "kube-system", "name": name, "resourceVersion": version},
        "spec": {
            "clusterIP": addresses[0], "clusterIPs": addresses,
            "ports": [
                {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "metrics", "port": 9153, "protocol": "TCP"},
            ],
        },
    })
}

fn list(version: &str, items: &[Value]) -> Value {
    list_of("v1", "Service", version, items)
}

#[tokio::test]
async fn the_addresses_follow_the_service_and_survive_the_api_server() {
    let mut server = Server::start("127.0.0.1:0").await;
    server.path = KUBE_SYSTEM;
    let mut watch = Watch::start(&server, "kube-system/k8s-app=kube-dns");
    // First a server that is not well; nothing is told.
    server.list().await.status(500).await;
    let request = server.list().await;
    watch.nothing_told();
    assert!(
        request.target.contains("labelSelector=k8s-app%3Dkube-dns"),
        "{}",
        request.target
    );
    let both = service("kube-dns", "5", &["10.96.0.10", "fd00::a"]);
    request.json(200, list("10", &[both])).await;
    assert_eq!(watch.told().await, "10.96.0.10 53, fd00::a 53");

    let mut events = server.watch("10").await.events().await;
    // A second one, a change that is of no interest, another address, and an end.
    let second = service("more", "11", &["10.96.0.11"]);
    events.send("ADDED", second).await;
    assert_eq!(
        watch.told().await,
        "10.96.0.10 53, 10.96.0.11 53, fd00::a 53"
    );
    let mut labelled = service("more", "12", &["10.96.0.11"]);
    labelled["metadata"]["labels"] = json!({"k8s-app": "kube-dns", "new": "label"});
    events.send("MODIFIED", labelled).await;
    let moved = service("kube-dns", "13", &["10.96.0.12"]);
    events.send("MODIFIED", moved).await;
    assert_eq!(watch.told().await, "10.96.0.11 53, 10.96.0.12 53");
    let gone = service("more", "14", &["10.96.0.11"]);
    events.send("DELETED", gone).await;
    assert_eq!(watch.told().await, "10.96.0.12 53");

    // Too old, forbidden, cut: what is known stays, until a complete list says otherwise.
    events.send("ERROR", status(410)).await;
    server.list().await.status(403).await;
    let again = server.list().await;
    watch.nothing_told();
    again.json(200, list("90", &[])).await;
    assert_eq!(watch.told().await, "");
}

#[tokio::test]
async fn several_selections_are_one_set_and_one_that_is_refused_hinders_no_other() {
    let server = Server::start("127.0.0.1:0").await;
    let mut server = server;
    let mut watch = Watch::start(
        &server,
        "kube-system/k8s-app=kube-dns,openshift-dns/dns-default",
    );
    let (mut first, mut second) = (None, None);
    while first.is_none() || second.is_none() {
        let request = server.request().await;
        match request.path() {
            KUBE_SYSTEM => first = Some(request),
            OPENSHIFT => second = Some(request),
            other => panic!("{other}"),
        }
    }
    let second = second.expect("a request");
    assert!(
        second
            .target
            .contains("fieldSelector=metadata.name%3Ddns-default"),
        "{}",
        second.target
    );
    second.status(403).await;
    let items = [service("kube-dns", "5", &["10.96.0.10"])];
    let first = first.expect("a request");
    first.json(200, list("10", &items)).await;
    assert_eq!(watch.told().await, "10.96.0.10 53");
    loop {
        let request = server.request().await;
        if request.path() == OPENSHIFT {
            let items = [service("dns-default", "6", &["172.30.0.10"])];
            request.json(200, list("10", &items)).await;
            break;
        }
        request.status(500).await;
    }
    assert_eq!(watch.told().await, "10.96.0.10 53, 172.30.0.10 53");
}

#[tokio::test]
async fn the_watch_ends_when_nobody_listens() {
    let mut server = Server::start("127.0.0.1:0").await;
    server.path = KUBE_SYSTEM;
    let mut watch = Watch::start(&server, "kube-system/k8s-app=kube-dns");
    let items = [service("kube-dns", "5", &["10.96.0.10"])];
    server.list().await.json(200, list("10", &items)).await;
    assert_eq!(watch.told().await, "10.96.0.10 53");
    let _open = server.watch("10").await.events().await;
    watch.resolvers.close();
    timeout(PATIENCE, &mut watch.task)
        .await
        .expect("an end")
        .expect("no panic");
}
