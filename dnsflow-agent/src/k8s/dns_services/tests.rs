use serde_json::{Value, json};

use super::*;

fn service(spec: Value) -> Service {
    let service = json!({
        "metadata": {"name": "kube-dns", "annotations": {"a": "b"}, "managedFields": [{"fieldsV1": {}}]},
        "spec": spec,
        "status": {"loadBalancer": {}},
    });
    let Slim::<Service>(service) = serde_json::from_value(service).expect("a Service");
    assert_eq!(service.metadata.name.as_deref(), Some("kube-dns"));
    assert_eq!(
        (&service.metadata.annotations, &service.status),
        (&None, &None)
    );
    service
}

fn told(spec: Value) -> Vec<String> {
    let found = resolvers(&service(spec)).into_iter();
    found
        .map(|Resolver { address, port }| format!("{address} {port}"))
        .collect()
}

#[test]
fn a_service_is_reached_at_each_of_its_addresses_and_dns_ports() {
    let spec = json!({
        "clusterIP": "10.96.0.10",
        "clusterIPs": ["10.96.0.10", "fd00:10:96::a"],
        "ports": [
            {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 5353},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
            {"name": "dns-node", "port": 5053},
            {"name": "metrics", "port": 9153, "protocol": "TCP"},
            {"name": "dns-sctp", "port": 54, "protocol": "SCTP"},
        ],
    });
    assert_eq!(
        told(spec),
        [
            "10.96.0.10 53",
            "10.96.0.10 5053",
            "fd00:10:96::a 53",
            "fd00:10:96::a 5053"
        ]
    );
}

#[test]
fn what_has_no_address_of_its_own_is_no_resolver() {
    let port = json!([{"port": 53, "protocol": "UDP"}]);
    let headless = json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": port});
    assert!(told(headless).is_empty());
    assert!(told(json!({"externalName": "dns.example", "ports": port})).is_empty());
    assert!(told(json!({"clusterIP": "10.96.0.10"})).is_empty());
    assert!(resolvers(&Service::default()).is_empty());
    let old = json!({"clusterIP": "10.96.0.10", "ports": port});
    assert_eq!(told(old), ["10.96.0.10 53"]);
}

#[test]
fn no_service_has_more_resolvers_than_are_told() {
    let ports = (1..2_000).map(|port| json!({"name": "dns-x", "port": port, "protocol": "UDP"}));
    let ports: Vec<Value> = ports.collect();
    let found = told(json!({"clusterIPs": ["10.96.0.11", "10.96.0.10"], "ports": ports}));
    assert_eq!(found.len(), RESOLVERS_MAX + 1);
    assert_eq!(found[RESOLVERS_MAX], "10.96.0.10 257");
}

#[test]
fn selections_are_written_as_they_are_read() {
    for text in [
        "kube-system/k8s-app=kube-dns",
        "openshift-dns/dns-default",
        "dns/app.kubernetes.io/name=coredns",
    ] {
        let service: DnsService = text.parse().expect(text);
        assert_eq!(service.to_string(), text);
    }
    for bad in [
        "", "a", "a/", "/b", "a/b=", "a/=c", "a/b=c,d", "a/b c", "a/b/c",
    ] {
        assert!(bad.parse::<DnsService>().is_err(), "{bad}");
    }
}

#[test]
fn both_kinds_of_selection_are_left_to_the_server() {
    let selection = |text: &str| super::selection(&text.parse().expect("a Service"));
    assert_eq!(
        selection("a/b").field_selector.as_deref(),
        Some("metadata.name=b")
    );
    assert_eq!(selection("a/b=c").label_selector.as_deref(), Some("b=c"));
}
