//! The `EgressFirewall` resource as ovn-kubernetes defines it, for reading only.
//!
//! Source: ovn-kubernetes, `go-controller/pkg/crd/egressfirewall/v1/types.go`. The types say
//! what the resource should look like. What an API server really stores may differ (the patterns
//! of its definition are not anchored as meant), so reading goes through [`convert`](super::convert),
//! which takes anything and judges rule by rule.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use serde::{Deserialize, Serialize};

/// The resource's definition with its validation, in YAML: what `dnsflow crd` prints, for tests.
/// ovn-kubernetes owns the one of a cluster.
pub const DEFINITION: &str = include_str!("egress_firewall/definition.yaml");

/// `metadata.name` of the one EgressFirewall that ovn-kubernetes uses in a namespace.
pub const NAME: &str = "default";

/// The annotation that says whether names without a wildcard also match their sub-domains:
/// `"true"` or `"false"`.
pub const SUBDOMAINS_ANNOTATION: &str = "dnsflow.io/subdomains";
/// Whether the agent decides over an EgressFirewall, and installs nothing: `"true"` or `"false"`.
pub const DRY_RUN_ANNOTATION: &str = "dnsflow.io/dry-run";
/// Whether answers to the pods of the namespace are held until their addresses are open: `"true"` or `"false"`.
pub const HOLD_ANNOTATION: &str = "dnsflow.io/hold";

/// The beginning of dnsflow's annotations.
pub const ANNOTATION_PREFIX: &str = "dnsflow.io/";
/// All of them.
pub const ANNOTATIONS: [&str; 3] = [SUBDOMAINS_ANNOTATION, DRY_RUN_ANNOTATION, HOLD_ANNOTATION];

/// `spec` of an EgressFirewall.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, PartialEq, Serialize)]
#[kube(
    group = "k8s.ovn.org",
    version = "v1",
    kind = "EgressFirewall",
    namespaced,
    status = "EgressFirewallStatus",
    schema = "disabled",
    derive = "PartialEq"
)]
pub struct EgressFirewallSpec {
    /// The rules in their order, of which the first match wins.
    pub egress: Vec<EgressRule>,
}

/// One entry of `spec.egress`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct EgressRule {
    /// `Allow` or `Deny`.
    #[serde(rename = "type")]
    pub action: String,
    /// Protocols and ports; empty means all traffic.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<EgressPort>,
    /// Where the traffic goes.
    pub to: EgressDestination,
}

/// One entry of a rule's `ports`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct EgressPort {
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// 1 to 65535; 0 stands for every port of the protocol.
    #[serde(default)]
    pub port: u16,
}

/// A rule's `to`: exactly one of its fields.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressDestination {
    /// A network, such as `192.0.2.0/24`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cidr_selector: Option<String>,
    /// A domain name, or `*.` and a domain name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_name: Option<String>,
    /// The nodes with these labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,
}

/// `status` of an EgressFirewall, which ovn-kubernetes writes.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct EgressFirewallStatus {
    /// A summary for people.
    #[serde(default)]
    pub status: String,
    /// One line per zone.
    #[serde(default)]
    pub messages: Vec<String>,
}

#[cfg(test)]
mod tests;
