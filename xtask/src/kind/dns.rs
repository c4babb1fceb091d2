//! The cluster's DNS: which Pods serve it, where they run, and whether anybody has changed it.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::access::{Access, items};

/// What its objects are called, in Kubernetes and in OpenShift.
const NAMES: &[&str] = &["coredns", "kube-dns", "dns-default"];

/// The Services of the cluster's DNS, as `--dns-service` of the agent's names them.
#[derive(Clone, Debug)]
pub(super) struct Dns {
    namespace: String,
    service: String,
}

impl Dns {
    /// NAMESPACE/SERVICE or NAMESPACE/LABEL=VALUE.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let parts = text.split_once('/');
        let (namespace, service) = parts
            .with_context(|| format!("{text}: not NAMESPACE/SERVICE or NAMESPACE/LABEL=VALUE"))?;
        Ok(Self {
            namespace: namespace.to_owned(),
            service: service.to_owned(),
        })
    }

    /// The Services.
    fn services(&self, access: &Access) -> Result<Value> {
        // A name or a label: a list both times.
        let which = match self.service.contains('=') {
            true => ["--selector".to_owned(), self.service.clone()],
            false => {
                let name = format!("metadata.name={}", self.service);
                ["--field-selector".to_owned(), name]
            }
        };
        let [option, value] = &which;
        access.json(&[
            "--namespace",
            &self.namespace,
            "get",
            "services",
            option,
            value,
        ])
    }

    /// The Pods behind the Services.
    fn pods(&self, access: &Access) -> Result<Vec<Value>> {
        let services = self.services(access)?;
        let mut pods = Vec::new();
        for service in items(&services) {
            let selector = service["spec"]["selector"]
                .as_object()
                .context("a selector")?;
            let labels: Vec<String> = selector
                .iter()
                .map(|(label, value)| format!("{label}={}", value.as_str().unwrap_or_default()))
                .collect();
            let labels = labels.join(",");
            let get = [
                "--namespace",
                &self.namespace,
                "get",
                "pods",
                "--selector",
                &labels,
            ];
            pods.extend(items(&access.json(&get)?).cloned());
        }
        ensure!(
            !pods.is_empty(),
            "there is no DNS server behind the Services {}/{}",
            self.namespace,
            self.service
        );
        Ok(pods)
    }

    /// A node that none of its Pods runs on.
    pub(super) fn node_without_it(&self, access: &Access) -> Result<String> {
        let pods = self.pods(access)?;
        let with_dns: BTreeSet<&str> = pods
            .iter()
            .filter_map(|pod| pod["spec"]["nodeName"].as_str())
            .collect();
        let nodes = access.json(&["get", "nodes"])?;
        let mut names = items(&nodes).filter_map(|node| node["metadata"]["name"].as_str());
        let free = names.find(|name| !with_dns.contains(name));
        let free = free.with_context(|| {
            format!("a DNS server runs on every node ({with_dns:?}): name one with --node")
        })?;
        Ok(free.to_owned())
    }

    /// What of it only people change.
    pub(super) fn state(&self, access: &Access) -> Result<Value> {
        const KINDS: &str = "deployments,daemonsets,configmaps,services";
        let objects = access.json(&["--namespace", &self.namespace, "get", KINDS])?;
        let is_its = |object: &&Value| {
            let name = object["metadata"]["name"].as_str();
            name.is_some_and(|name| NAMES.contains(&name))
        };
        let wanted = items(&objects)
            .filter(is_its)
            .map(|object| json!([object["metadata"]["name"], object["spec"], object["data"]]));
        let pods = self.pods(access)?;
        let running = pods.iter().map(|pod| {
            let restarts: Vec<&Value> = pod["status"]["containerStatuses"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|container| &container["restartCount"])
                .collect();
            json!([pod["metadata"]["uid"], restarts])
        });
        Ok(json!({
            "objects": wanted.collect::<Vec<_>>(),
            "pods": running.collect::<Vec<_>>(),
        }))
    }
}
