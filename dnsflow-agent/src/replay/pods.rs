//! Which addresses are whose.

use std::{collections::BTreeSet, net::IpAddr};

use serde_json::Value;

use crate::options::PodAddresses;

/// A pod of a manifest, as `kubectl get pods -o yaml` writes it; `None` where it is no pod, has no
/// address, or has those of its node.
pub(super) fn of_manifest(object: &Value) -> Option<PodAddresses> {
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
    Some(PodAddresses {
        namespace: text(&object["metadata"]["namespace"])?,
        name: text(&object["metadata"]["name"])?,
        addresses: addresses.into_iter().collect(),
    })
}
