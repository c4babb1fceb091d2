//! Watches the ServiceCIDRs: the networks that the API server takes the addresses of Services from.
//!
//! An API server has them since Kubernetes 1.33 (KEP-1880). An older one does not know the resource. Then nothing is
//! told: the routes of the node have the networks ([`node_addresses`](crate::node_addresses)), or `--cluster-networks`.

use std::collections::{BTreeMap, BTreeSet};

use dnsflow_core::policy::refused::parse_network;
use ipnet::IpNet;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::{Api, Client, runtime::watcher::Event};
use tokio::sync::mpsc;

use super::{
    client::ClientOptions,
    follow::{Follower, Subject, follow},
    slim::Slim,
};

/// At most this many networks are sent; the first ones in their order.
pub const SERVICE_NETWORKS_MAX: usize = 256;

/// Watches the ServiceCIDRs and sends all networks together at each change, until the receiver is gone.
pub async fn watch_service_cidrs(options: ClientOptions, networks: mpsc::Sender<BTreeSet<IpNet>>) {
    follow(&options, Watch::default(), networks).await;
}

/// The networks of each ServiceCIDR.
#[derive(Debug, Default)]
struct Watch {
    known: BTreeMap<String, BTreeSet<IpNet>>,
    list: BTreeMap<String, BTreeSet<IpNet>>,
    /// What was told last.
    sent: Option<BTreeSet<IpNet>>,
}

impl Follower for Watch {
    type Object = Slim<ServiceCIDR>;
    type Update = BTreeSet<IpNet>;

    fn subject(&self) -> Subject {
        Subject {
            what: "ServiceCIDRs".to_owned(),
            missing: "has no ServiceCIDRs (Kubernetes 1.33 and later have them): the networks of Services come from the \
                      routes of ovn-kubernetes on this node, or --cluster-networks."
                .to_owned(),
            permission: "list and watch of servicecidrs.networking.k8s.io".to_owned(),
        }
    }

    fn api(&self, client: Client) -> Api<Slim<ServiceCIDR>> {
        Api::all(client)
    }

    fn is_optional(&self) -> bool {
        true
    }

    fn handle(&mut self, event: Event<Slim<ServiceCIDR>>) -> Option<Self::Update> {
        let name = |cidr: &ServiceCIDR| cidr.metadata.name.clone().unwrap_or_default();
        match event {
            Event::Init => {
                self.list.clear();
                return None;
            }
            Event::InitApply(Slim(cidr)) => {
                self.list.insert(name(&cidr), networks(&cidr));
                return None;
            }
            Event::InitDone => self.known = std::mem::take(&mut self.list),
            Event::Apply(Slim(cidr)) => drop(self.known.insert(name(&cidr), networks(&cidr))),
            Event::Delete(Slim(cidr)) => drop(self.known.remove(&name(&cidr))),
        }
        let all: BTreeSet<IpNet> = self.known.values().flatten().copied().collect();
        let count = all.len();
        let all: BTreeSet<IpNet> = all.into_iter().take(SERVICE_NETWORKS_MAX).collect();
        if self.sent.as_ref() == Some(&all) {
            return None;
        }
        if count > SERVICE_NETWORKS_MAX {
            tracing::warn!(
                count,
                "more than {SERVICE_NETWORKS_MAX} networks of Services: the others are left out; --cluster-networks \
                 names larger ones"
            );
        }
        let told: Vec<String> = all.iter().map(IpNet::to_string).collect();
        tracing::info!(networks = %told.join(", "), "DNS answers open no address of the Service networks");
        self.sent = Some(all.clone());
        Some(all)
    }
}

/// Its networks: one of each family at most. The API server lets nothing else in.
pub fn networks(cidr: &ServiceCIDR) -> BTreeSet<IpNet> {
    let spec = cidr.spec.iter();
    let texts = spec.flat_map(|spec| spec.cidrs.iter().flatten());
    texts.filter_map(|text| parse_network(text).ok()).collect()
}
