//! The facts that were gathered, before they are judged. Reasons are texts of the edges, which name
//! the object.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dnsflow_core::{
    ovn::{
        acl::{self, AclMatch},
        rows::{Acl, LogicalFlow, Pipeline, RowId},
    },
    values::{
        firewall::{Firewall, IpVersions},
        resolver::Resolver,
    },
};
use ipnet::IpNet;

use crate::{
    capture::{AttachKind, survey::Link},
    k8s::{DnsService, permissions::Permission},
    node_addresses::NodeAddresses,
    open_by::{Decision, OpenByError},
};

/// Everything.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The kernel.
    pub kernel: Kernel,
    /// The node's Open_vSwitch database.
    pub vswitch: Result<Vswitch, String>,
    /// Whether the bridge speaks OpenFlow 1.5.
    pub openflow: Result<(), String>,
    /// How the agent would open addresses.
    pub open_by: Result<Decision, OpenByError>,
    /// The addresses of this node's interfaces.
    pub node: Result<NodeAddresses, String>,
    /// The northbound database.
    pub nb: Result<Northbound, String>,
    /// The southbound database.
    pub sb: Result<Southbound, String>,
    /// Where the EgressFirewalls come from.
    pub source: Source,
    /// The EgressFirewalls, as far as they can be read.
    pub firewalls: Firewalls,
    /// Whether names without a wildcard also stand for their sub-domains, where the EgressFirewall does not say.
    pub subdomains: bool,
}

/// The EgressFirewalls that were read.
#[derive(Clone, Debug, Default)]
pub struct Firewalls {
    /// By namespace.
    pub read: BTreeMap<String, Firewall>,
    /// Whether there are more.
    pub are_more: bool,
}

/// The kernel, and what this process may do.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// As `uname -r` says.
    pub release: String,
    /// Whether the kernel describes its types.
    pub btf: bool,
    /// Whether the kernel loads the program and its ring buffer.
    pub load: Result<(), String>,
    /// How the program was attached to an interface; `None` if it was not loaded.
    pub attach: Option<Result<AttachKind, NotAttached>>,
}

/// Why a loaded program could not be attached.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum NotAttached {
    /// This process may not make a network namespace for the trial.
    NotTried {
        /// Whether the kernel has TCX, which needs no trial.
        tcx: bool,
    },
    /// The trial failed.
    Failed(String),
}

/// The node's switch.
#[derive(Clone, Debug, Default)]
pub struct Vswitch {
    /// Interfaces of pods.
    pub interfaces: Vec<PodInterface>,
    /// Whether flows may be offloaded to hardware (`other_config:hw-offload`).
    pub hw_offload: bool,
}

/// An interface with an `iface-id`.
#[derive(Clone, Debug)]
pub struct PodInterface {
    /// Its name.
    pub name: String,
    /// The logical port.
    pub port: String,
    /// Whether Open vSwitch polices what comes in there (`ingress_policing_*`).
    pub policed: bool,
    /// The interface in the kernel, if it is in this network namespace.
    pub link: Option<Link>,
    /// The qdisc at its ingress.
    pub ingress_qdisc: Option<String>,
    /// The programs of others in front of dnsflow's; or why they are not known.
    pub in_front: Result<Vec<String>, String>,
}

/// The facts of the northbound database.
#[derive(Clone, Debug, Default)]
pub struct Northbound {
    /// The ACLs of EgressFirewalls.
    pub acls: BTreeMap<RowId, Acl>,
    /// The addresses of gateway routers.
    pub gateways: BTreeSet<IpAddr>,
    /// The addresses in ovn-kubernetes' address set of all nodes; empty if there is none.
    pub node_set: BTreeSet<IpAddr>,
    /// The addresses of API servers, by the load balancers of their Service.
    pub api_servers: BTreeSet<IpAddr>,
}

impl Northbound {
    /// The IP versions of the cluster; `None` if no ACL for a name tells them.
    pub fn ip_versions(&self) -> Option<IpVersions> {
        self.acls
            .values()
            .find_map(|acl| match acl::parse(&acl.matches) {
                Ok(AclMatch::Name(matches)) => Some(IpVersions {
                    v4: matches.v4.is_some(),
                    v6: matches.v6.is_some(),
                }),
                _ => None,
            })
    }
}

/// The facts of the southbound database.
#[derive(Clone, Debug, Default)]
pub struct Southbound {
    /// Logical flows with the priorities of the ACLs.
    pub flows: Vec<LogicalFlow>,
    /// The first OpenFlow table of each pipeline that could be found.
    pub bases: BTreeMap<Pipeline, u8>,
    /// The addresses of the nodes' tunnels.
    pub tunnels: BTreeSet<IpAddr>,
}

/// Where the EgressFirewalls come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory: the number of files in it that are read, or why it cannot be.
    Manifests(String, Result<usize, String>),
    /// The Kubernetes API.
    Cluster(Result<Cluster, String>),
}

/// The facts of the API server.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Its URL.
    pub url: String,
    /// The rights that the agent uses, and whether it has them.
    pub permissions: Vec<(Permission, Result<bool, String>)>,
    /// Whether EgressFirewalls can be read.
    pub firewalls: Result<(), String>,
    /// The Services of the cluster's DNS.
    pub dns: Vec<(DnsService, Result<BTreeSet<Resolver>, String>)>,
    /// The networks of Services, as the API server has them; `None` if it does not say.
    pub service_networks: Result<Option<BTreeSet<IpNet>>, String>,
    /// Those that `--cluster-networks` names.
    pub cluster_networks: Vec<IpNet>,
}
