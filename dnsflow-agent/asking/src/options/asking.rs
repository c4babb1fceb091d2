//! The options of the subcommands that ask a running agent.

use std::{net::IpAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::{ArgAction, Args, Subcommand, ValueEnum};
use dnsflow_core::{
    ask::view::{Target, TargetError},
    pods::recording,
    policy::refused::parse_network,
    values::{name::DomainName, resolver::Resolver},
};
use dnsflow_ovsdb::Remotes;
use ipnet::IpNet;

use crate::event::Kind;

/// Where the socket is, unless an option says something else.
pub const CONTROL_SOCKET: &str = "/run/dnsflow/dnsflow.sock";

/// What `dnsflow cache` can do.
#[derive(Clone, Debug, Eq, PartialEq, Subcommand)]
pub enum CacheCommand {
    /// List each name with its address, by pod
    List(FilterOptions),
}

/// What `dnsflow flows` can do.
#[derive(Clone, Debug, Eq, PartialEq, Subcommand)]
pub enum FlowsCommand {
    /// List each flow with its pod, names and rules
    List(FilterOptions),
}

/// Where a running agent answers.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct ControlSocket {
    /// The agent's control socket, for the commands that ask the agent; only root may connect
    #[arg(
        id = "control_socket",
        long = "control-socket",
        value_name = "PATH",
        env = "DNSFLOW_CONTROL_SOCKET",
        default_value = CONTROL_SOCKET
    )]
    pub path: PathBuf,
}

/// How to print an answer.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct OutputOptions {
    /// The format of the answer
    #[arg(
        id = "output",
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "table"
    )]
    pub format: OutputFormat,
}

/// Where a running agent answers, and how to print what it says.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct ControlOptions {
    /// Where to ask.
    #[command(flatten)]
    pub socket: ControlSocket,

    /// How to print.
    #[command(flatten)]
    pub output: OutputOptions,
}

/// How an answer is printed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum OutputFormat {
    /// A table for people.
    Table,
    /// JSON; of a list, one object a line.
    Json,
    /// YAML; of a list, one document each.
    Yaml,
}

/// Which cache entries are wanted.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct FilterOptions {
    /// Where to ask.
    #[command(flatten)]
    pub control: ControlOptions,

    /// Only pods of this namespace
    #[arg(short, long)]
    pub namespace: Option<String>,

    /// Only pods of this name
    #[arg(long)]
    pub pod: Option<String>,

    /// Only this name and the names below it
    #[arg(long)]
    pub name: Option<String>,

    /// Only this address
    #[arg(long)]
    pub address: Option<IpAddr>,
}

/// The options of `dnsflow explain`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct ExplainOptions {
    /// The pod, which has to be on this node
    #[arg(value_name = "NAMESPACE/POD")]
    pub pod: PodName,

    /// A name, an address or a URL, with a port where that matters: example.com:443, 203.0.113.1:53/udp
    #[arg(value_name = "TARGET", value_parser = target)]
    pub target: String,

    /// The port, where the target does not name it: 443, 53/udp, https
    #[arg(value_name = "PORT", value_parser = port)]
    pub port: Option<String>,

    /// Where to ask.
    #[command(flatten)]
    pub control: ControlOptions,
}

/// A text that the agent takes for a target.
fn target(text: &str) -> Result<String, TargetError> {
    text.parse::<Target>().map(|_| text.to_owned())
}

/// A text that the agent takes for the port of a target.
fn port(text: &str) -> Result<String, String> {
    let parsed = format!("a {text}").parse::<Target>();
    match parsed {
        Ok(_) => Ok(text.to_owned()),
        Err(_) => Err(
            "no port: use a number or a name, and /udp or /sctp behind one that is not for TCP"
                .to_owned(),
        ),
    }
}

impl ExplainOptions {
    /// The target with its port, as the agent takes it.
    pub(crate) fn whole_target(&self) -> String {
        match &self.port {
            Some(port) => format!("{} {port}", self.target),
            None => self.target.clone(),
        }
    }
}

/// The options of `dnsflow learn`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct LearnOptions {
    /// The namespace of the pods, on this node
    #[arg(short, long)]
    pub namespace: String,

    /// The time to record, 1h at most; ^C ends it earlier
    #[arg(long = "for", value_name = "TIME", default_value = "10m", value_parser = learn_time)]
    pub time: Duration,

    /// Allow *.SUFFIX for names one label below this suffix; may be given more than once
    #[arg(long, value_name = "SUFFIX", value_delimiter = ',')]
    pub wildcard: Vec<DomainName>,

    /// The format of the result
    #[arg(short, long, value_name = "FORMAT", default_value = "manifest")]
    pub output: LearnFormat,

    /// Where to ask.
    #[command(flatten)]
    pub socket: ControlSocket,
}

/// What `dnsflow learn` prints.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum LearnFormat {
    /// An EgressFirewall for kubectl apply.
    Manifest,
    /// The names with addresses, one object a line.
    Json,
    /// What is heard, as it comes, one object a line.
    Lines,
}

/// Parses a time between a second and an hour.
fn learn_time(text: &str) -> Result<Duration, String> {
    let time = super::time(text)?;
    match (Duration::from_secs(1)..=recording::TIME_MAX).contains(&time) {
        true => Ok(time),
        false => Err("not between 1s and 1h".to_owned()),
    }
}

/// The options of `dnsflow try`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct TryOptions {
    /// A manifest of EgressFirewalls, YAML or *.json; - is standard input; may be given more than once
    #[arg(short, long = "filename", value_name = "FILE|-", required = true)]
    pub file: Vec<PathBuf>,

    /// Where to ask.
    #[command(flatten)]
    pub control: ControlOptions,
}

/// The options of `dnsflow unused`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct UnusedOptions {
    /// The namespace of the EgressFirewall
    #[arg(short, long)]
    pub namespace: String,

    /// OVN's northbound database [default: the first that exists of the usual sockets]
    #[arg(long, value_name = "REMOTE", env = "DNSFLOW_OVN_NB")]
    pub ovn_nb: Option<Remotes>,

    /// Where to ask.
    #[command(flatten)]
    pub control: ControlOptions,
}

/// The options of `dnsflow report`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct ReportOptions {
    /// Write one self-contained HTML page to this new file; - is standard output
    #[arg(
        long,
        value_name = "FILE|-",
        required_unless_present = "format",
        conflicts_with = "format"
    )]
    pub html: Option<PathBuf>,

    /// Print the data of the page
    #[arg(id = "format", short = 'o', long = "output", value_name = "FORMAT")]
    pub format: Option<ReportFormat>,

    /// Only this namespace
    #[arg(short, long)]
    pub namespace: Option<String>,

    /// Where to ask.
    #[command(flatten)]
    pub socket: ControlSocket,
}

/// How programs get a report.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum ReportFormat {
    /// JSON: one object for each node.
    Json,
}

/// The options of `dnsflow replay`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct ReplayOptions {
    /// The capture: pcap or pcapng, of a pod's interface or of tcpdump -i any
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Read EgressFirewalls, and pods with their addresses, from the manifests here
    #[arg(long, value_name = "DIR")]
    pub manifests: Option<PathBuf>,

    /// A pod with its addresses, as ns1/web=10.244.0.5,fd00::5; may be given more than once
    #[arg(long, value_name = "POD=ADDRESS")]
    pub pod: Vec<PodAddresses>,

    /// A DNS server that is trusted, as pods know it; more than one with commas
    #[arg(long, value_name = "IP[:PORT]", value_delimiter = ',', required = true)]
    pub resolver: Vec<Resolver>,

    /// The cluster's own networks, which are never opened, and where connections are not judged
    #[arg(long, value_name = "CIDR", value_delimiter = ',', value_parser = parse_network)]
    pub cluster_networks: Vec<IpNet>,

    /// A dnsName without a wildcard also matches its sub-domains
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub subdomains: bool,

    /// How to print.
    #[command(flatten)]
    pub output: OutputOptions,
}

/// The options of `dnsflow log-level`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct LogLevelOptions {
    /// A level (off, error, warn, info, debug, trace), or directives as RUST_LOG takes them:
    /// info,dnsflow_agent::agent=debug
    #[arg(value_name = "LEVEL|DIRECTIVES")]
    pub level: Option<String>,

    /// Where to ask.
    #[command(flatten)]
    pub control: ControlOptions,
}

/// A pod of a namespace.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PodName {
    /// The namespace.
    pub namespace: String,
    /// The pod.
    pub name: String,
}

impl FromStr for PodName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(Self {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err("use NAMESPACE/POD"),
        }
    }
}

/// A pod with its addresses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PodAddresses {
    /// The namespace.
    pub namespace: String,
    /// The pod.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// A text that names no pod with addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("use NAMESPACE/POD=ADDRESS or NAMESPACE/POD=ADDRESS,ADDRESS")]
pub struct PodAddressesError;

impl FromStr for PodAddresses {
    type Err = PodAddressesError;

    fn from_str(text: &str) -> Result<Self, PodAddressesError> {
        let (pod, addresses) = text.split_once('=').ok_or(PodAddressesError)?;
        let PodName { namespace, name } = pod.parse().map_err(|_| PodAddressesError)?;
        let addresses: Result<_, _> = addresses.split(',').map(str::parse).collect();
        Ok(Self {
            namespace,
            name,
            addresses: addresses.map_err(|_| PodAddressesError)?,
        })
    }
}

/// The options of `dnsflow observe`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct ObserveOptions {
    /// Where to ask.
    #[command(flatten)]
    pub control: ControlOptions,

    /// Show the last COUNT of these events [default: all that are kept; with --follow alone: none]
    #[arg(long, value_name = "COUNT")]
    pub last: Option<usize>,

    /// Only events of this last time, such as 10m
    #[arg(long, value_name = "TIME", value_parser = super::time)]
    pub since: Option<Duration>,

    /// Show new events until interrupted
    #[arg(short, long)]
    pub follow: bool,

    /// Only events of this namespace
    #[arg(short, long)]
    pub namespace: Option<String>,

    /// Only events of pods of this name
    #[arg(long)]
    pub pod: Option<String>,

    /// Only events of this kind
    #[arg(long, value_name = "KIND")]
    pub event: Option<Kind>,
}
