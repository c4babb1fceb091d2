//! Watches the Services of the cluster's DNS. Their addresses are the resolvers whose answers
//! count.
//!
//! Only a Service's own addresses count (`spec.clusterIPs`), with each of its UDP and TCP ports: a
//! pod sends its question there, and the pod sees the answer come from there. A headless Service
//! has no such address. The watch must never forget a resolver because the API server is away.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dnsflow_core::values::resolver::Resolver;
use k8s_openapi::api::core::v1::Service;
use kube::{Api, Client, api::ListParams, runtime::watcher::Event};
use tokio::{sync::mpsc, task::JoinSet};

use super::{
    DnsService, Selection,
    client::ClientOptions,
    follow::{Follower, Subject, follow},
    slim::Slim,
};

/// At most this many selections are watched, each over its own connection.
pub const SELECTIONS_MAX: usize = 8;

/// At most this many resolvers are sent; the first ones in their order.
pub const RESOLVERS_MAX: usize = 256;

/// At most this many updates of single selections wait to be joined.
const UPDATES_MAX: usize = 16;

/// What the server selects.
pub(crate) fn selection(service: &DnsService) -> ListParams {
    match &service.selection {
        Selection::Name(name) => ListParams::default().fields(&format!("metadata.name={name}")),
        Selection::Label { key, value } => ListParams::default().labels(&format!("{key}={value}")),
    }
}

/// Watches these Services and sends all resolvers together at each change, until the receiver is
/// gone. Nothing is sent before one of the selections has been read.
pub async fn watch_dns_services(
    options: ClientOptions,
    services: Vec<DnsService>,
    resolvers: mpsc::Sender<BTreeSet<Resolver>>,
) {
    let (sender, mut updates) = mpsc::channel(UPDATES_MAX);
    let mut tasks = JoinSet::new();
    for (number, service) in services.into_iter().take(SELECTIONS_MAX).enumerate() {
        let (options, sender) = (options.clone(), sender.clone());
        tasks.spawn(async move {
            let watch = Watch {
                number,
                service,
                known: BTreeMap::new(),
                list: None,
                sent: None,
            };
            follow(&options, watch, sender).await;
        });
    }
    drop(sender);
    let mut known: BTreeMap<usize, BTreeSet<Resolver>> = BTreeMap::new();
    let mut told = None;
    loop {
        let (number, found) = tokio::select! {
            update = updates.recv() => match update {
                Some(update) => update,
                None => return,
            },
            () = resolvers.closed() => return,
        };
        known.insert(number, found);
        let all: BTreeSet<Resolver> = known.values().flatten().copied().collect();
        let count = all.len();
        let all: BTreeSet<Resolver> = all.into_iter().take(RESOLVERS_MAX).collect();
        if told.as_ref() == Some(&all) {
            continue;
        }
        if count > RESOLVERS_MAX {
            tracing::warn!(
                count,
                "more than {RESOLVERS_MAX} DNS servers: the others are not trusted; narrow --dns-service"
            );
        }
        told = Some(all.clone());
        if resolvers.send(all).await.is_err() {
            return;
        }
    }
}

/// The Services of one selection.
#[derive(Debug)]
struct Watch {
    number: usize,
    service: DnsService,
    known: BTreeMap<String, BTreeSet<Resolver>>,
    list: Option<BTreeMap<String, BTreeSet<Resolver>>>,
    /// What was told last.
    sent: Option<BTreeSet<Resolver>>,
}

impl Follower for Watch {
    type Object = Slim<Service>;
    type Update = (usize, BTreeSet<Resolver>);

    fn subject(&self) -> Subject {
        let service = &self.service;
        Subject {
            what: format!("the Services {service}"),
            missing: format!("has no Services ({service}): is it a whole cluster's API server?"),
            permission: format!(
                "get, list and watch of services in the namespace {} (--dns-service names others)",
                service.namespace
            ),
        }
    }

    fn api(&self, client: Client) -> Api<Slim<Service>> {
        Api::namespaced(client, &self.service.namespace)
    }

    fn selection(&self) -> ListParams {
        selection(&self.service)
    }

    fn handle(&mut self, event: Event<Slim<Service>>) -> Option<Self::Update> {
        let name = |service: &Service| service.metadata.name.clone().unwrap_or_default();
        match event {
            Event::Init => {
                self.list = Some(BTreeMap::new());
                return None;
            }
            Event::InitApply(Slim(service)) => {
                let list = self.list.get_or_insert_default();
                list.insert(name(&service), resolvers(&service));
                return None;
            }
            Event::InitDone => {
                self.known = self.list.take()?;
                if self.known.is_empty() {
                    tracing::info!(service = %self.service, "no such Service");
                }
            }
            Event::Apply(Slim(service)) => {
                self.known.insert(name(&service), resolvers(&service));
            }
            Event::Delete(Slim(service)) => {
                self.known.remove(&name(&service));
            }
        }
        let all: BTreeSet<Resolver> = self.known.values().flatten().copied().collect();
        if self.sent.as_ref() == Some(&all) {
            return None;
        }
        self.sent = Some(all.clone());
        Some((self.number, all))
    }
}

/// The addresses and ports at which pods reach this Service; one more than [`RESOLVERS_MAX`] of them at most.
pub fn resolvers(service: &Service) -> BTreeSet<Resolver> {
    let Some(spec) = &service.spec else {
        return BTreeSet::new();
    };
    // `clusterIP` is the first of `clusterIPs`; both say `None` for a headless Service (Kubernetes
    // API reference, ServiceSpec).
    let addresses = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip);
    let addresses: BTreeSet<IpAddr> = addresses.filter_map(|text| text.parse().ok()).collect();
    let ports = spec.ports.iter().flatten();
    let ports: BTreeSet<u16> = ports
        .filter(|port| matches!(port.protocol.as_deref(), None | Some("UDP" | "TCP")))
        .filter(|port| is_dns(port.name.as_deref(), port.port))
        .filter_map(|port| u16::try_from(port.port).ok())
        .collect();
    let resolvers = addresses.into_iter().flat_map(|address| {
        ports.iter().map(move |port| Resolver {
            address,
            port: *port,
        })
    });
    // In their order. So the first ones of all Services are among the first ones of each.
    resolvers.take(RESOLVERS_MAX + 1).collect()
}

/// Whether the port is for DNS: the Services of CoreDNS also have a port for metrics.
fn is_dns(name: Option<&str>, port: i32) -> bool {
    port == 53 || name.is_some_and(|name| name == "dns" || name.starts_with("dns-"))
}

#[cfg(test)]
mod tests;
