//! The watch of ServiceCIDRs against an API server that does exactly what each test says.

mod fake;

use std::collections::BTreeSet;

use dnsflow_agent::k8s::{ClientOptions, watch_service_cidrs};
use fake::{Kubeconfig, PATIENCE, Server, list_of};
use ipnet::IpNet;
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

const SERVICE_CIDRS: &str = "/apis/networking.k8s.io/v1/servicecidrs";

/// A watch under way.
struct Watch {
    networks: mpsc::Receiver<BTreeSet<IpNet>>,
    _kubeconfig: Kubeconfig,
    task: JoinHandle<()>,
}

impl Watch {
    fn start(server: &Server) -> Self {
        let kubeconfig = Kubeconfig::new();
        kubeconfig.write(server.address);
        let options = ClientOptions {
            kubeconfig: Some(kubeconfig.path().to_owned()),
        };
        let (sender, networks) = mpsc::channel(1);
        Self {
            networks,
            _kubeconfig: kubeconfig,
            task: tokio::spawn(watch_service_cidrs(options, sender)),
        }
    }

    async fn told(&mut self) -> String {
        let networks = timeout(PATIENCE, self.networks.recv());
        let networks = networks
            .await
            .expect("an update in time")
            .expect("an update");
        let words: Vec<String> = networks.iter().map(IpNet::to_string).collect();
        words.join(", ")
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn service_cidr(name: &str, version: &str, cidrs: &[&str]) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": name, "resourceVersion": version},
        "spec": {"cidrs": cidrs},
    })
}

fn list(version: &str, items: &[Value]) -> Value {
    list_of("networking.k8s.io/v1", "ServiceCIDR", version, items)
}

#[tokio::test]
async fn the_networks_follow_the_service_cidrs() {
    let mut server = Server::start("127.0.0.1:0").await;
    server.path = SERVICE_CIDRS;
    let mut watch = Watch::start(&server);
    let request = server.list().await;
    let kubernetes = service_cidr("kubernetes", "5", &["10.96.0.0/16", "fd00:10:96::/112"]);
    request.json(200, list("10", &[kubernetes])).await;
    assert_eq!(watch.told().await, "10.96.0.0/16, fd00:10:96::/112");
    let mut events = server.watch("10").await.events().await;
    events
        .send("ADDED", service_cidr("more", "11", &["10.97.0.0/24"]))
        .await;
    assert_eq!(
        watch.told().await,
        "10.96.0.0/16, 10.97.0.0/24, fd00:10:96::/112"
    );
    events
        .send("DELETED", service_cidr("more", "12", &["10.97.0.0/24"]))
        .await;
    assert_eq!(watch.told().await, "10.96.0.0/16, fd00:10:96::/112");
}

#[tokio::test]
async fn an_api_server_without_the_resource_is_left_alone() {
    let mut server = Server::start("127.0.0.1:0").await;
    server.path = SERVICE_CIDRS;
    let mut watch = Watch::start(&server);
    server.list().await.status(404).await;
    // It does not end: the agent would end with it. It does not ask again at once, either.
    let ended = timeout(std::time::Duration::from_secs(2), &mut watch.task).await;
    assert!(ended.is_err(), "the watch has ended");
    assert!(watch.networks.try_recv().is_err());
    server.no_request();
}
