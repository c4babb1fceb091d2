//! What the API server has, and what it allows this process.

use std::{collections::BTreeSet, future::Future};

use dnsflow_core::values::resolver::Resolver;
use ipnet::IpNet;
use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
    core::v1::Service,
    networking::v1::ServiceCIDR,
};
use kube::{
    Api, Client,
    api::{ListParams, PostParams},
};
use tokio::time::timeout;

use super::PATIENCE;
use crate::{
    check::facts::{Cluster, Firewalls},
    k8s::{
        ClientOptions, DnsService, client,
        convert::{Reading, Stored},
        dns_services::{self, SELECTIONS_MAX},
        list::{self, List},
        permissions::{self, Permission},
        service_cidrs,
        slim::Slim,
    },
};

/// At most this many EgressFirewalls are read.
const FIREWALLS_MAX: usize = 5_000;

pub(super) async fn ask(
    options: ClientOptions,
    services: &[DnsService],
    cluster_networks: Vec<IpNet>,
) -> Result<(Cluster, Firewalls), String> {
    let (client, url) = client::connect(&options).await?;
    let (firewalls, read) = match firewalls(&client).await {
        Ok(read) => (Ok(()), read),
        Err(reason) => (Err(reason), Firewalls::default()),
    };
    let mut permissions = Vec::new();
    for permission in permissions::required(services) {
        let allowed = may(&client, &permission).await;
        permissions.push((permission, allowed));
    }
    let mut dns = Vec::new();
    for service in services.iter().take(SELECTIONS_MAX) {
        dns.push((service.clone(), resolvers(&client, service).await));
    }
    let cluster = Cluster {
        url,
        permissions,
        firewalls,
        dns,
        service_networks: service_networks(&client).await,
        cluster_networks,
    };
    Ok((cluster, read))
}

/// The EgressFirewalls that can be used.
async fn firewalls(client: &Client) -> Result<Firewalls, String> {
    let api = Api::<Stored>::all(client.clone());
    let mut list = List::new(&api, ListParams::default());
    let mut firewalls = Firewalls::default();
    while let Some(stored) = within(list.next()).await? {
        if firewalls.read.len() >= FIREWALLS_MAX {
            firewalls.are_more = true;
            break;
        }
        if let Reading::Firewall(id, firewall) = stored.converted.reading {
            firewalls.read.insert(id.namespace, firewall);
        }
    }
    Ok(firewalls)
}

/// The networks of Services; `None` if the API server does not know the resource.
async fn service_networks(client: &Client) -> Result<Option<BTreeSet<IpNet>>, String> {
    let api = Api::<Slim<ServiceCIDR>>::all(client.clone());
    let mut list = List::new(&api, ListParams::default());
    let found = within(async {
        let mut networks = BTreeSet::new();
        loop {
            match list.next().await {
                Ok(Some(Slim(cidr))) => networks.extend(service_cidrs::networks(&cidr)),
                Ok(None) => return Ok(Some(networks)),
                Err(list::Error::Request(kube::Error::Api(status))) if status.code == 404 => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
    });
    found.await
}

async fn within<T, E: std::error::Error>(
    answer: impl Future<Output = Result<T, E>>,
) -> Result<T, String> {
    match timeout(PATIENCE, answer).await {
        Ok(answer) => answer.map_err(|error| client::chain(&error)),
        Err(_) => Err(format!("no answer within {} s", PATIENCE.as_secs())),
    }
}

/// Asks whether we ourselves have this right; everybody may ask that (Kubernetes,
/// `system:basic-user`).
async fn may(client: &Client, permission: &Permission) -> Result<bool, String> {
    let Permission {
        verb,
        group,
        resource,
        namespace,
        name,
        purpose: _,
    } = permission;
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                verb: Some((*verb).to_owned()),
                group: Some((*group).to_owned()),
                resource: Some((*resource).to_owned()),
                namespace: namespace.clone(),
                name: name.clone(),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews = Api::<SelfSubjectAccessReview>::all(client.clone());
    let review = within(reviews.create(&PostParams::default(), &review)).await?;
    Ok(review.status.is_some_and(|status| status.allowed))
}

async fn resolvers(client: &Client, service: &DnsService) -> Result<BTreeSet<Resolver>, String> {
    let api = Api::<Slim<Service>>::namespaced(client.clone(), &service.namespace);
    let mut list = List::new(&api, dns_services::selection(service));
    let mut resolvers = BTreeSet::new();
    while let Some(Slim(service)) = within(list.next()).await? {
        resolvers.extend(dns_services::resolvers(&service));
    }
    Ok(resolvers)
}
