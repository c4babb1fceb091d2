use dnsflow_core::{flow::Protocol, view::Reason};

use super::*;
use crate::control::history::Known;

fn connection(last: u8, names: &[&str]) -> ConnectionView {
    ConnectionView {
        namespace: "ns1".into(),
        pod: "pod1".into(),
        address: [203, 0, 113, last].into(),
        protocol: Protocol::Tcp,
        port: 443,
        names: names.iter().map(|&name| name.to_owned()).collect(),
        verdict: Verdict::Allowed,
        reason: Reason::AllowedByName,
        rule: Some(0),
        is_refused: false,
        is_node: false,
        first_s: 60,
        last_s: 5,
        count: 2,
    }
}

fn read(egress: &str) -> (FirewallId, Firewall, serde_json::Value) {
    let manifest = format!(
        "{{apiVersion: k8s.ovn.org/v1, kind: EgressFirewall, \
         metadata: {{name: default, namespace: ns1}}, spec: {{egress: [{egress}]}}}}"
    );
    let resource: serde_json::Value = serde_saphyr::from_str(&manifest).expect("YAML");
    match convert::firewall(&resource).reading {
        Reading::Firewall(id, firewall) => (id, firewall, resource),
        other => panic!("{other:?}"),
    }
}

fn tried(now: &str, then: &str, connections: Vec<ConnectionView>) -> Trialled {
    let (.., resource) = read(now);
    let (id, firewall, _) = read(then);
    let present = PresentFirewall {
        resource: Some(resource),
        subdomains: true,
        came_s: 7200,
        enforces_former: false,
    };
    let known = Known {
        connections,
        time: Duration::from_secs(3600),
        forgotten: 0,
    };
    Trialled::new(&id, &firewall, &present, &known, Vec::new())
}

const DENY_ALL: &str = "{type: Deny, to: {cidrSelector: 0.0.0.0/0}}";

fn changes(trialled: &Trialled) -> Vec<(Change, &str, &str, &str)> {
    let changed = trialled.changed.iter();
    changed
        .map(|one| (one.change, &*one.target, &*one.now.text, &*one.then.text))
        .collect()
}

#[test]
fn what_changes_is_listed_and_what_stays_is_counted() {
    let now = format!("{{type: Allow, to: {{dnsName: a.test}}}}, {DENY_ALL}");
    let then = format!("{{type: Allow, to: {{dnsName: b.test}}}}, {DENY_ALL}");
    let connections = vec![
        connection(1, &["www.b.test"]),
        connection(2, &["a.test"]),
        connection(3, &["a.test", "b.test"]),
        connection(4, &["c.test"]),
        connection(5, &[]),
    ];
    let trialled = tried(&now, &then, connections);
    assert_eq!(
        changes(&trialled),
        [
            (
                Change::WouldDeny,
                "203.0.113.2:443",
                "allowed by rule 0",
                "denied by rule 1"
            ),
            (
                Change::WouldAllow,
                "203.0.113.1:443",
                "denied by rule 1",
                "allowed by rule 0"
            ),
        ]
    );
    assert_eq!((trialled.stay_allowed, trialled.stay_denied), (1, 2));
    assert!(trialled.notes.is_empty(), "{:?}", trialled.notes);
}

#[test]
fn what_cannot_be_known_is_said() {
    let by_name = format!("{{type: Allow, to: {{dnsName: a.test}}}}, {DENY_ALL}");
    // ovn-kubernetes may have let the nameless one pass until now.
    let trialled = tried(&by_name, DENY_ALL, vec![connection(1, &[])]);
    assert_eq!(
        changes(&trialled),
        [(
            Change::NotKnown,
            "203.0.113.1:443",
            "denied by rule 1, unless ovn-kubernetes has resolved it for rule 0",
            "denied by rule 0"
        )]
    );
    let by_node = format!("{{type: Allow, to: {{nodeSelector: {{}}}}}}, {DENY_ALL}");
    let node = ConnectionView {
        is_node: true,
        ..connection(1, &[])
    };
    let trialled = tried(DENY_ALL, &by_node, vec![node, connection(2, &[])]);
    assert_eq!(trialled.count(Change::NotKnown), 1);
    assert_eq!(trialled.stay_denied, 1);
    let wildcard = format!("{{type: Allow, to: {{dnsName: \"*.test\"}}}}, {DENY_ALL}");
    let trialled = tried(DENY_ALL, &wildcard, Vec::new());
    assert!(
        trialled.notes[0].contains("--enable-dns-name-resolver"),
        "{:?}",
        trialled.notes
    );
}

#[test]
fn without_an_egress_firewall_nothing_is_known() {
    let (id, firewall, _) = read(DENY_ALL);
    let present = PresentFirewall {
        resource: None,
        subdomains: true,
        came_s: 0,
        enforces_former: false,
    };
    let known = Known::default();
    let trialled = Trialled::new(&id, &firewall, &present, &known, Vec::new());
    assert!(trialled.is_unwatched());
    assert!(
        trialled.notes[0].contains("nothing is known"),
        "{:?}",
        trialled.notes
    );
}
