//! What one node asks of the API server, counted; the bytes of a change in docs/sizing.md are what
//! this test prints with `--nocapture`.

mod fake;

use dnsflow_agent::k8s::{ClientOptions, Objects, watch};
use dnsflow_core::Input;
use fake::{Kubeconfig, PATIENCE, Server, list};
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::timeout};

/// Objects on one page of a list, as the agent asks for them.
const PAGE: usize = 500;
const FIREWALLS: usize = 2_000;
const RULES: usize = 10;

/// A firewall as a cluster stores it, with a status of one zone.
fn firewall(number: usize, version: usize) -> Value {
    let rules: Vec<Value> = (0..RULES)
        .map(|rule| {
            let name = format!("service-{rule}.example-{number}.com");
            json!({"type": "Allow", "to": {"dnsName": name},
                "ports": [{"port": 443, "protocol": "TCP"}]})
        })
        .collect();
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "metadata": {
            "name": "default", "namespace": format!("namespace-{number:05}"),
            "resourceVersion": version.to_string(), "generation": 1,
            "uid": format!("0c8c3b1e-0000-4000-8000-{number:012}"),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"egress": rules},
        "status": {"status": "EgressFirewall Rules applied",
            "messages": ["node-1: EgressFirewall Rules applied"]},
    })
}

/// How many firewalls the next update names.
async fn told(updates: &mut mpsc::Receiver<Input>) -> usize {
    let input = timeout(PATIENCE, updates.recv()).await.expect("in time");
    match input.expect("an update") {
        Input::Firewalls(update) => update.firewalls.len(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_node_asks_for_each_page_once_and_then_holds_one_watch() {
    let mut server = Server::start("127.0.0.1:0").await;
    let kubeconfig = Kubeconfig::new();
    kubeconfig.write(server.address);
    let options = ClientOptions {
        kubeconfig: Some(kubeconfig.path().to_owned()),
    };
    let (sender, mut updates) = mpsc::channel(16);
    let task = tokio::spawn(watch(options, sender, Objects::default()));
    let (mut requests, mut bytes) = (0, 0);
    for first in (0..FIREWALLS).step_by(PAGE) {
        let request = server.list().await;
        assert!(request.target.contains("limit=500"), "{}", request.target);
        let items: Vec<Value> = (first..first + PAGE)
            .map(|number| firewall(number, 5))
            .collect();
        let mut page = list("10", &items);
        if first + PAGE < FIREWALLS {
            page["metadata"]["continue"] = json!(first.to_string());
        }
        requests += 1;
        bytes += page.to_string().len();
        request.json(200, page).await;
    }
    let mut events = server.watch("10").await.events().await;
    requests += 1;
    assert_eq!(told(&mut updates).await, FIREWALLS);
    assert_eq!(requests, FIREWALLS / PAGE + 1);
    let mut change = firewall(7, 11);
    change["spec"]["egress"][0]["to"]["dnsName"] = json!("other.example");
    let event = json!({"type": "MODIFIED", "object": change})
        .to_string()
        .len();
    events.send("MODIFIED", change).await;
    assert_eq!(told(&mut updates).await, 1);
    println!(
        "{FIREWALLS} EgressFirewalls of {RULES} rules: {requests} requests and {bytes} bytes at \
         the start, {event} bytes and no request per change"
    );
    task.abort();
}
