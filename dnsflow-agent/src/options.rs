//! The command line of `dnsflow`.
//!
//! Few options, each with a default where one makes sense, an environment variable and one line
//! of help.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

/// Where upstream's and OpenShift's ovn-kubernetes and plain OVN keep the northbound database.
pub const OVN_NB_REMOTES: [&str; 3] = [
    "unix:/var/run/ovn-ic/ovnnb_db.sock",
    "unix:/var/run/openvswitch/ovnnb_db.sock",
    "unix:/var/run/ovn/ovnnb_db.sock",
];

/// Where upstream's and OpenShift's ovn-kubernetes and plain OVN keep the southbound database.
pub const OVN_SB_REMOTES: [&str; 3] = [
    "unix:/var/run/ovn-ic/ovnsb_db.sock",
    "unix:/var/run/openvswitch/ovnsb_db.sock",
    "unix:/var/run/ovn/ovnsb_db.sock",
];

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

    /// The node's Open vSwitch database: unix:PATH or tcp:HOST:PORT
    #[arg(
        long,
        value_name = "REMOTE",
        env = "DNSFLOW_OVS_DB",
        default_value = "unix:/var/run/openvswitch/db.sock",
        value_parser = remote
    )]
    pub ovs_db: String,

    /// OVN's northbound database [default: the first that exists of the usual sockets]
    #[arg(long, value_name = "REMOTE", env = "DNSFLOW_OVN_NB", value_parser = remote)]
    pub ovn_nb: Option<String>,

    /// OVN's southbound database [default: the first that exists of the usual sockets]
    #[arg(long, value_name = "REMOTE", env = "DNSFLOW_OVN_SB", value_parser = remote)]
    pub ovn_sb: Option<String>,

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

    /// How to write the log
    #[arg(
        long,
        value_name = "FORMAT",
        env = "DNSFLOW_LOG_FORMAT",
        default_value = "text"
    )]
    pub log_format: LogFormat,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// A JSON object per line.
    Json,
}

/// Checks the form of an OVSDB remote (`ovsdb(7)`, "Connection Methods").
fn remote(text: &str) -> Result<String, String> {
    let usable = match text.split_once(':') {
        Some(("unix", path)) => path.starts_with('/'),
        Some(("tcp", address)) => address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
        }),
        _ => false,
    };
    if usable {
        Ok(text.to_owned())
    } else {
        Err("write unix:/PATH or tcp:HOST:PORT".to_owned())
    }
}

#[cfg(test)]
mod tests;
