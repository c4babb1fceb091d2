//! The command line of `dnsflow`.
//!
//! Few options, each with a default where one makes sense, an environment variable and one line
//! of help.

use std::{net::SocketAddr, path::PathBuf};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use crate::{k8s::DnsService, ovsdb::Remotes};

/// Lets each pod reach the addresses that it was told for the names in its egress firewall.
#[derive(Clone, Debug, Parser)]
#[command(name = "dnsflow", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `dnsflow` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Run the node's agent until SIGTERM or SIGINT
    Agent(AgentOptions),
    /// Say whether the agent could work on this node, and what to do where it could not
    Check(CheckOptions),
}

/// The options of `dnsflow agent`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct AgentOptions {
    /// Read EgressFirewalls from the *.yaml, *.yml and *.json files here, not from Kubernetes
    #[arg(
        long,
        value_name = "DIR",
        env = "DNSFLOW_MANIFESTS",
        conflicts_with = "kubeconfig"
    )]
    pub manifests: Option<PathBuf>,

    /// Reach the Kubernetes API by this file [default: $KUBECONFIG, ~/.kube/config or in-cluster]
    #[arg(long, value_name = "FILE", env = "DNSFLOW_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// The cluster's DNS: NAMESPACE/SERVICE or NAMESPACE/LABEL=VALUE, more than one with commas
    #[arg(
        long,
        value_name = "SERVICE",
        env = "DNSFLOW_DNS_SERVICE",
        value_delimiter = ',',
        default_value = "kube-system/k8s-app=kube-dns,openshift-dns/dns-default"
    )]
    pub dns_service: Vec<DnsService>,

    /// The node's Open vSwitch database [default: unix:/var/run/openvswitch/db.sock]
    #[arg(long, value_name = "REMOTE", env = "DNSFLOW_OVS_DB")]
    pub ovs_db: Option<Remotes>,

    /// OVN's northbound database [default: the first that exists of the usual sockets]
    #[arg(long, value_name = "REMOTE", env = "DNSFLOW_OVN_NB")]
    pub ovn_nb: Option<Remotes>,

    /// OVN's southbound database [default: the first that exists of the usual sockets]
    #[arg(long, value_name = "REMOTE", env = "DNSFLOW_OVN_SB")]
    pub ovn_sb: Option<Remotes>,

    /// The OpenFlow management socket of the integration bridge
    #[arg(
        long,
        value_name = "PATH",
        env = "DNSFLOW_OPENFLOW_SOCKET",
        default_value = "/var/run/openvswitch/br-int.mgmt"
    )]
    pub openflow_socket: PathBuf,

    /// Whether a dnsName without a wildcard also matches its sub-domains
    #[arg(
        long,
        value_name = "BOOL",
        env = "DNSFLOW_SUBDOMAINS",
        default_value_t = true,
        action = ArgAction::Set
    )]
    pub subdomains: bool,

    /// Answer /livez and /readyz by HTTP here, such as 127.0.0.1:9473 [default: nowhere]
    #[arg(long, value_name = "ADDRESS", env = "DNSFLOW_LISTEN")]
    pub listen: Option<SocketAddr>,

    /// How to write the log
    #[arg(
        long,
        value_name = "FORMAT",
        env = "DNSFLOW_LOG_FORMAT",
        default_value = "text"
    )]
    pub log_format: LogFormat,
}

/// The options of `dnsflow check`: those of the agent that is to work here, and how to print.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct CheckOptions {
    /// The agent's.
    #[command(flatten)]
    pub agent: AgentOptions,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// A JSON object per line.
    Json,
}

#[cfg(test)]
mod tests;
