//! EgressFirewalls and connections for the tests of what compares them.

use std::time::Duration;

use dnsflow_core::{
    ask::{
        history::ConnectionView,
        view::{Reason, Verdict},
    },
    values::{
        firewall::{Firewall, FirewallId},
        flow::Protocol,
    },
};
use serde_json::Value;

use super::history::Known;
use crate::convert::{self, Reading};

/// A connection to port 443 of 203.0.113.`last`, `last_s` seconds ago.
pub(crate) fn connection(last: u8, last_s: u64, names: &[&str]) -> ConnectionView {
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
        last_s,
        count: 2,
    }
}

/// What is known of so many seconds.
pub(crate) fn known(seconds: u64, connections: Vec<ConnectionView>) -> Known {
    Known {
        connections,
        time: Duration::from_secs(seconds),
        forgotten: 0,
    }
}

/// The EgressFirewall of ns1 with these rules, and its resource.
pub(crate) fn read(egress: &str) -> (FirewallId, Firewall, Value) {
    let manifest = format!(
        "{{apiVersion: k8s.ovn.org/v1, kind: EgressFirewall, \
         metadata: {{name: default, namespace: ns1}}, spec: {{egress: [{egress}]}}}}"
    );
    let resource: Value = serde_saphyr::from_str(&manifest).expect("YAML");
    match convert::firewall(&resource).reading {
        Reading::Firewall(id, firewall) => (id, firewall, resource),
        other => panic!("{other:?}"),
    }
}
