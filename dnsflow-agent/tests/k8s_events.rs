//! Events beside EgressFirewalls, against an API server that does exactly what each test says.

mod fake;

use std::{collections::BTreeMap, sync::atomic::Ordering::Relaxed, time::Duration};

use dnsflow_agent::k8s::{
    ClientOptions,
    events::{Reporter, channel, post},
};
use dnsflow_core::{
    io::report::{
        PresentProblems, Report,
        Severity::{self, Caveat, NotInForce, Waiting},
    },
    values::limits::Limit,
};
use fake::{Kubeconfig, PATIENCE, Server, status};
use serde_json::{Value, json};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

const FIREWALL: &str = "/apis/k8s.ovn.org/v1/namespaces/ns1/egressfirewalls/default";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/ns1/events";

fn start(server: &Server) -> (Reporter, Kubeconfig, JoinHandle<()>) {
    let kubeconfig = Kubeconfig::new();
    kubeconfig.write(server.address);
    let options = ClientOptions {
        kubeconfig: Some(kubeconfig.path().to_owned()),
    };
    let (reporter, notices) = channel();
    let task = tokio::spawn(post(options, notices, Duration::ZERO));
    (reporter, kubeconfig, task)
}

fn problems(problems: &[(u32, &str, Severity)]) -> Report {
    let mut present = BTreeMap::<Severity, PresentProblems>::new();
    for (rule, text, severity) in problems {
        let all = present.entry(*severity).or_default();
        all.first.insert(*rule, (*text).to_owned());
        all.count += 1;
    }
    Report::Problems {
        namespace: "ns1".into(),
        news: BTreeMap::new(),
        over: Vec::new(),
        present,
    }
}

fn firewall() -> Value {
    json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "metadata": {
            "namespace": "ns1", "name": "default", "resourceVersion": "7",
            "uid": "0c8c3b1e-0000-4000-8000-000000000001",
        },
        "spec": {"egress": []},
    })
}

/// The Event that comes next, which is accepted.
async fn created(server: &mut Server) -> Value {
    let request = server.request().await;
    assert_eq!((&*request.method, request.path()), ("GET", FIREWALL));
    request.json(200, firewall()).await;
    let request = server.request().await;
    assert_eq!((&*request.method, request.path()), ("POST", EVENTS));
    let event = request.object();
    request.json(201, event.clone()).await;
    event
}

#[tokio::test]
async fn a_refused_rule_becomes_an_event_of_its_firewall() {
    let mut server = Server::start("127.0.0.1:0").await;
    let (reporter, _kubeconfig, task) = start(&server);
    let waiting = (1, "waiting for OVN", Waiting);
    reporter.tell(&problems(&[
        (0, "Deny by dnsName `a.example`", NotInForce),
        waiting,
    ]));
    let event = created(&mut server).await;
    assert_eq!(event["note"], "rule 0: Deny by dnsName `a.example`");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["reason"], "RuleNotInForce");
    assert_eq!(event["metadata"]["namespace"], "ns1");
    assert_eq!(event["reportingController"], "dnsflow.io/agent");
    let regarding = json!({
        "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
        "namespace": "ns1", "name": "default", "resourceVersion": "7",
        "uid": "0c8c3b1e-0000-4000-8000-000000000001",
    });
    assert_eq!(event["regarding"], regarding);
    for field in ["reportingInstance", "action", "eventTime"] {
        assert!(
            event[field].as_str().is_some_and(|text| !text.is_empty()),
            "{field}"
        );
    }
    // What is told again is no news; only what is new becomes an Event.
    reporter.tell(&problems(&[
        (0, "Deny by dnsName `a.example`", NotInForce),
        waiting,
    ]));
    let long = "x".repeat(5000);
    reporter.tell(&problems(&[
        (0, "Deny by dnsName `a.example`", NotInForce),
        waiting,
        (2, &long, Caveat),
    ]));
    let second = created(&mut server).await;
    let note = second["note"].as_str().expect("a note");
    assert!(note.starts_with("rule 2: x") && note.len() < 1024, "{note}");
    assert_eq!(second["reason"], "RuleCaveat");
    assert_ne!(second["metadata"]["name"], event["metadata"]["name"]);
    drop(reporter);
    timeout(PATIENCE, task)
        .await
        .expect("an end")
        .expect("no panic");
}

#[tokio::test]
async fn another_nodes_event_is_enough_and_a_refusal_is_tried_again() {
    let mut server = Server::start("127.0.0.1:0").await;
    let (reporter, _kubeconfig, _task) = start(&server);
    reporter.tell(&problems(&[(0, "bad", NotInForce)]));
    let mut names = Vec::new();
    for code in [500, 409] {
        server.request().await.json(200, firewall()).await;
        let request = server.request().await;
        names.push(request.object()["metadata"]["name"].clone());
        request.status(code).await;
    }
    assert_eq!(names[0], names[1]);
    // The next one shows that the first is done with.
    reporter.tell(&problems(&[
        (0, "bad", NotInForce),
        (1, "worse", NotInForce),
    ]));
    assert_eq!(created(&mut server).await["note"], "rule 1: worse");
    let counters = reporter.counters();
    assert_eq!(counters.known.load(Relaxed), 1);
    assert_eq!(counters.failures.load(Relaxed), 1);
}

#[tokio::test]
async fn a_limit_becomes_an_event_that_is_the_same_for_every_pod() {
    let mut server = Server::start("127.0.0.1:0").await;
    let (reporter, _kubeconfig, _task) = start(&server);
    // What is met again while it is told is not told again.
    let is_told = async |events: u64| {
        let counters = reporter.counters();
        let told = async {
            while counters.created.load(Relaxed) < events {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, told).await.expect("it is told");
    };
    let reached = |port: &str, limit: Limit| Report::LimitReached {
        namespace: "ns1".into(),
        port: port.into(),
        limit,
        max: 256,
    };
    let of_name = || Limit::AddressesOfName("a.example".parse().expect("a name"));
    reporter.tell(&reached("ns1_pod1", of_name()));
    let event = created(&mut server).await;
    assert_eq!(event["reason"], "LimitReached");
    let note = event["note"].as_str().expect("a note");
    assert!(note.contains("256") && note.contains("--max-addresses-per-name"));
    is_told(1).await;
    reporter.tell(&reached("ns1_pod2", of_name()));
    let again = created(&mut server).await;
    assert_eq!(again["metadata"]["name"], event["metadata"]["name"]);
    reporter.tell(&reached("ns1_pod2", Limit::AddressesOfPod));
    let of_pod = created(&mut server).await;
    assert_eq!(of_pod["reason"], "LimitReached");
    let note = of_pod["note"].as_str().expect("a note");
    assert!(note.contains("--max-addresses-per-pod: ns1_pod2"), "{note}");
    reporter.tell(&reached("ns1_pod2", Limit::FlowChanges));
    let of_changes = created(&mut server).await;
    let note = of_changes["note"].as_str().expect("a note");
    assert!(
        note.ends_with("--max-flow-changes (256): ns1_pod2"),
        "{note}"
    );
}

#[tokio::test]
async fn an_interface_without_the_programs_becomes_an_event_of_its_pod() {
    let mut server = Server::start("127.0.0.1:0").await;
    let (reporter, _kubeconfig, _task) = start(&server);
    let uid = "0c8c3b1e-0000-4000-8000-000000000002";
    let long = "p".repeat(253);
    for pod in ["web-0", &long] {
        reporter.tell(&Report::NotAttached {
            port: format!("ns1_{pod}"),
            pod_uid: Some(uid.into()),
            interface: "veth1".into(),
            reason: "no such device".into(),
        });
        // The Pod is not read.
        let request = server.request().await;
        assert_eq!((&*request.method, request.path()), ("POST", EVENTS));
        let event = request.object();
        request.json(201, event.clone()).await;
        assert_eq!(event["reason"], "NotAttached");
        let regarding = json!({
            "apiVersion": "v1", "kind": "Pod", "namespace": "ns1", "name": pod, "uid": uid,
        });
        assert_eq!(event["regarding"], regarding);
        let note = event["note"].as_str().expect("a note");
        assert!(note.ends_with("no such device"), "{note}");
        let name = event["metadata"]["name"].as_str().expect("a name");
        assert!(name.starts_with(&pod[..5]) && name.len() <= 253, "{name}");
    }
}

#[tokio::test]
async fn an_event_that_the_api_server_refuses_delays_no_other() {
    let mut server = Server::start("127.0.0.1:0").await;
    let (reporter, _kubeconfig, _task) = start(&server);
    for (namespace, code) in [("gone", 404), ("terminating", 403)] {
        reporter.tell(&Report::NotAttached {
            port: format!("{namespace}_web-0"),
            pod_uid: None,
            interface: "veth1".into(),
            reason: "no such device".into(),
        });
        let request = server.request().await;
        assert!(request.path().contains(namespace), "{}", request.path());
        request.json(code, status(code)).await;
    }
    reporter.tell(&problems(&[(0, "bad", NotInForce)]));
    assert_eq!(created(&mut server).await["note"], "rule 0: bad");
    assert_eq!(reporter.counters().failures.load(Relaxed), 2);
}

/// Of each namespace, so many are remembered, however long the API server takes.
#[tokio::test]
async fn a_tenant_with_many_problems_keeps_no_event_of_another_away() {
    let mut server = Server::start("127.0.0.1:0").await;
    let (reporter, _kubeconfig, _task) = start(&server);
    let reached = |namespace: &str, name: u32| Report::LimitReached {
        namespace: namespace.into(),
        port: format!("{namespace}_pod1"),
        limit: Limit::AddressesOfName(format!("a{name}.example").parse().expect("a name")),
        max: 256,
    };
    reporter.tell(&reached("ns1", 0));
    let slow = server.request().await;
    for name in 1..1000 {
        reporter.tell(&reached("ns1", name));
        tokio::task::yield_now().await;
    }
    reporter.tell(&reached("ns2", 0));
    slow.json(404, status(404)).await;
    let next = server.request().await;
    assert!(next.path().contains("/ns2/"), "{}", next.path());
}

#[tokio::test]
async fn a_firewall_that_is_gone_gets_no_event() {
    let mut server = Server::start("127.0.0.1:0").await;
    let (reporter, _kubeconfig, _task) = start(&server);
    reporter.tell(&problems(&[(0, "bad", NotInForce)]));
    server.request().await.json(404, status(404)).await;
    reporter.tell(&problems(&[(1, "worse", NotInForce)]));
    assert_eq!(created(&mut server).await["note"], "rule 1: worse");
}

#[tokio::test]
async fn reports_are_taken_without_waiting_and_losses_counted() {
    // Nobody takes them over.
    let (reporter, _notices) = channel();
    for number in 0..300 {
        reporter.tell(&problems(&[(number, "bad", NotInForce)]));
    }
    assert_eq!(reporter.counters().dropped.load(Relaxed), 300 - 256);
}
