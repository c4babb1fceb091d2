//! Every right that the agent uses at the API server. `dnsflow check` asks for each of them. The
//! manifests in `deploy/` grant exactly these rights, and a test checks that.

use std::fmt;

use super::{DnsService, Selection};

/// One right.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Permission {
    /// `get`, `list`, `watch`, `create`.
    pub verb: &'static str,
    /// The API group; empty for the core one.
    pub group: &'static str,
    /// The resource, in the plural.
    pub resource: &'static str,
    /// The namespace, or every one.
    pub namespace: Option<String>,
    /// The object's name, or every one.
    pub name: Option<String>,
    /// What does not work without the right.
    pub purpose: Purpose,
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => write!(f, " {namespace}/{name}"),
            (Some(namespace), None) => write!(f, " in {namespace}"),
            (None, _) => Ok(()),
        }
    }
}

/// What a right is for.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Purpose {
    /// To read the rules.
    Firewalls,
    /// To know the resolvers.
    Resolvers,
    /// To know the networks of Services.
    ServiceNetworks,
    /// Events about EgressFirewalls.
    Events,
}

/// The rights that an agent with these DNS Services uses.
pub fn required(services: &[DnsService]) -> Vec<Permission> {
    let firewalls = ["get", "list", "watch"].map(|verb| Permission {
        verb,
        group: "k8s.ovn.org",
        resource: "egressfirewalls",
        namespace: None,
        name: None,
        purpose: Purpose::Firewalls,
    });
    let services = services.iter().flat_map(|service| {
        ["list", "watch"].map(|verb| Permission {
            verb,
            group: "",
            resource: "services",
            namespace: Some(service.namespace.clone()),
            // A list restricted to one name by a field selector is judged by that name
            // (Kubernetes, "Using RBAC Authorization", "Referring to resources").
            name: match &service.selection {
                Selection::Name(name) => Some(name.clone()),
                Selection::Label { .. } => None,
            },
            purpose: Purpose::Resolvers,
        })
    });
    let service_cidrs = ["list", "watch"].map(|verb| Permission {
        verb,
        group: "networking.k8s.io",
        resource: "servicecidrs",
        namespace: None,
        name: None,
        purpose: Purpose::ServiceNetworks,
    });
    let events = Permission {
        verb: "create",
        group: "events.k8s.io",
        resource: "events",
        namespace: None,
        name: None,
        purpose: Purpose::Events,
    };
    firewalls
        .into_iter()
        .chain(services)
        .chain(service_cidrs)
        .chain([events])
        .collect()
}
