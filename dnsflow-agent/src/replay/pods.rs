//! Which addresses are whose.

use std::{collections::BTreeSet, net::IpAddr, str::FromStr};

use serde_json::Value;

/// A pod with its addresses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PodAddresses {
    /// The namespace.
    pub namespace: String,
    /// The pod.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// A text that names no pod with addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("use NAMESPACE/POD=ADDRESS or NAMESPACE/POD=ADDRESS,ADDRESS")]
pub struct PodAddressesError;

impl FromStr for PodAddresses {
    type Err = PodAddressesError;

    fn from_str(text: &str) -> Result<Self, PodAddressesError> {
        let (pod, addresses) = text.split_once('=').ok_or(PodAddressesError)?;
        let (namespace, name) = pod.split_once('/').ok_or(PodAddressesError)?;
        let addresses: Result<Vec<IpAddr>, _> = addresses.split(',').map(str::parse).collect();
        let addresses = addresses.map_err(|_| PodAddressesError)?;
        match namespace.is_empty() || name.is_empty() {
            true => Err(PodAddressesError),
            false => Ok(Self {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
                addresses,
            }),
        }
    }
}

impl PodAddresses {
    /// A pod of a manifest, as `kubectl get pods -o yaml` writes it; `None` where it is no pod, has no
    /// address, or has those of its node.
    pub fn of_manifest(object: &Value) -> Option<Self> {
        let status = &object["status"];
        if object["kind"] != "Pod" || object["spec"]["hostNetwork"] == true {
            return None;
        }
        let all = status["podIPs"].as_array().into_iter().flatten();
        let all = all.map(|one| &one["ip"]).chain([&status["podIP"]]);
        let addresses: BTreeSet<IpAddr> = all
            .filter_map(|address| address.as_str()?.parse().ok())
            .collect();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        (!addresses.is_empty()).then_some(())?;
        Some(Self {
            namespace: text(&object["metadata"]["namespace"])?,
            name: text(&object["metadata"]["name"])?,
            addresses: addresses.into_iter().collect(),
        })
    }
}
