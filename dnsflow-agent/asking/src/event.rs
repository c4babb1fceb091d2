//! What an agent tells of as it happens.

use std::net::IpAddr;

use dnsflow_core::ask::view;
use serde::{Deserialize, Serialize};

/// Something that happened.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Event {
    /// When, as RFC 3339 writes it.
    pub time: String,
    /// What: a stable word.
    pub event: String,
    /// The namespace that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pod that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The name that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The addresses that it concerns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// The rules that it concerns, by their index in `spec.egress`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<u32>,
    /// From the capture of the answer to the flows in force, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation_us: Option<u64>,
    /// What the pod has tried to connect to, as `dnsflow explain` takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Why that is denied: the reason of `dnsflow explain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<view::Reason>,
    /// The same in words, as far as the rule does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What would allow it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// What else there is to say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}
