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
        convert::{self, Reading},
        dns_services::{self, SELECTIONS_MAX},
        egress_firewall::Stored,
        permissions::{self, Permission},
        service_cidrs,
    },
};

/// At most this many EgressFirewalls are read, and a page more.
const FIREWALLS_MAX: usize = 5_000;
/// How many are in a page.
const PAGE: u32 = 500;

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
    let mut firewalls = Firewalls::default();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = within(api.list(&page)).await?;
        for stored in &list.items {
            if let Reading::Firewall(id, firewall) = convert::firewall(&stored.object).reading {
                firewalls.read.insert(id.namespace, firewall);
            }
        }
        let next = list.metadata.continue_.filter(|token| !token.is_empty());
        let Some(next) = next else {
            return Ok(firewalls);
        };
        if firewalls.read.len() >= FIREWALLS_MAX {
            firewalls.are_more = true;
            return Ok(firewalls);
        }
        page = page.continue_token(&next);
    }
}

/// The networks of Services; `None` if the API server does not know the resource.
async fn service_networks(client: &Client) -> Result<Option<BTreeSet<IpNet>>, String> {
    let api = Api::<ServiceCIDR>::all(client.clone());
    let found = within(async {
        match api.list(&ListParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            found => found.map(Some),
        }
    });
    let found = found.await?;
    Ok(found.map(|found| found.iter().flat_map(service_cidrs::networks).collect()))
}

async fn within<T>(answer: impl Future<Output = Result<T, kube::Error>>) -> Result<T, String> {
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
    let config = dns_services::config(service);
    let parameters = ListParams {
        label_selector: config.label_selector,
        field_selector: config.field_selector,
        ..ListParams::default()
    };
    let api = Api::<Service>::namespaced(client.clone(), &service.namespace);
    let found = within(api.list(&parameters)).await?;
    Ok(found.iter().flat_map(dns_services::resolvers).collect())
}
