//! The command line of `dnsflow`.
//!
//! Few options, each with a default where one makes sense, an environment variable and one line
//! of help.

mod asking;
mod environment;

use std::{net::SocketAddr, num::NonZeroU32, ops::RangeInclusive, path::PathBuf, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use dnsflow_common::walk::{PORTS_MAX, Ports};
use dnsflow_core::{
    policy::refused::{DeniedNetwork, Nat64Prefix, Refusals, TooManyNetworks, parse_network},
    values::{flow::Tag, limits::CacheLimits, resolver::Resolver},
};
use dnsflow_ovsdb::Remotes;
use ipnet::IpNet;

pub use asking::{
    CONTROL_SOCKET, CacheCommand, ControlOptions, ControlSocket, ExplainOptions, FilterOptions,
    FlowsCommand, LearnFormat, LearnOptions, LogLevelOptions, ObserveOptions, OutputFormat,
    OutputOptions, PodAddresses, PodAddressesError, PodName, ReplayOptions, ReportFormat,
    ReportOptions, TryOptions, UnusedOptions,
};
pub use environment::unknown_variables;

use crate::{VERSION, dns_service::DnsService, exit, rollout::DAEMON_SET};

/// Lets each pod reach the addresses that it was told for the names in its egress firewall.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "dnsflow",
    version = VERSION,
    after_help = exit::HELP
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `dnsflow` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Run the node's agent until SIGTERM or SIGINT
    Agent(Box<AgentOptions>),
    /// Show the agent's status: sources, switch, pods, resolvers, EgressFirewalls, limits, problems
    Status(ControlOptions),
    /// Show the addresses in the pods' DNS answers
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Show the flows that open these addresses
    #[command(subcommand)]
    Flows(FlowsCommand),
    /// Explain why a pod's connection to a name or an address is allowed or blocked
    Explain(ExplainOptions),
    /// Show recent events; --follow waits for more
    Observe(ObserveOptions),
    /// Record the DNS names that a namespace's pods resolve, and print an EgressFirewall that allows them
    Learn(LearnOptions),
    /// Try EgressFirewalls on the last hour's connections without applying them
    Try(TryOptions),
    /// List a namespace's rules with their last use, and the connections that ovn-kubernetes alone would deny
    #[command(alias = "prune")]
    Unused(UnusedOptions),
    /// Write an HTML page about this node: rules and their use, names, denied connections, latency
    Report(ReportOptions),
    /// Show the addresses opened and connections denied for a packet capture; needs no agent or privilege
    Replay(ReplayOptions),
    /// Show the agent's log level, or change it until the agent ends
    LogLevel(LogLevelOptions),
    /// Write an archive for a bug report: status, cache, events, metrics, log, options
    Bundle(Box<BundleOptions>),
    /// Remove dnsflow's flows, programs and files from this node; refused while the agent runs
    Cleanup(CleanupOptions),
    /// Have each node clean up in its agent's place, and wait, as the Helm chart's hook before an uninstallation
    #[command(hide = true)]
    CleanupNodes(CleanupNodesOptions),
    /// Check whether the agent can work on this node, with the remedy for each failure
    Check(Box<CheckOptions>),
    /// Print the completions of a shell
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, of a subcommand where one is named: man, man explain
    Man {
        /// The subcommand
        command: Option<String>,
    },
    /// Wait for SIGTERM or SIGINT, as a container of a DaemonSet whose init container did the work
    #[command(hide = true)]
    Wait,
    /// Print the EgressFirewall's definition as dnsflow reads it, for tests: ovn-kubernetes owns
    /// the one of a cluster
    #[command(hide = true)]
    Crd,
}

/// Where the switch is told of flows.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct OpenflowSocket {
    /// The OpenFlow management socket of the integration bridge
    #[arg(
        id = "openflow_socket",
        long = "openflow-socket",
        value_name = "PATH",
        env = "DNSFLOW_OPENFLOW_SOCKET",
        default_value = "/var/run/openvswitch/br-int.mgmt"
    )]
    pub path: PathBuf,
}

/// The options of `dnsflow cleanup`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct CleanupOptions {
    /// The switch.
    #[command(flatten)]
    pub openflow_socket: OpenflowSocket,

    /// The agent's directory of that name: its journal is removed
    #[arg(long, value_name = "DIR", env = "DNSFLOW_STATE_DIR")]
    pub state_dir: Option<PathBuf>,

    /// The agent's directory of that name: its programs leave the veths
    #[arg(long, value_name = "DIR", env = "DNSFLOW_PIN_DIR")]
    pub pin_dir: Option<PathBuf>,

    /// Show what would be removed; the agent may be running
    #[arg(long)]
    pub dry_run: bool,

    /// Then wait for SIGTERM, and answer the kubelet at --listen, as the agent of a DaemonSet does
    #[arg(long, conflicts_with = "dry_run")]
    pub stay: bool,

    /// With --stay, answer every HTTP request with 200 here [default: nowhere]
    #[arg(long, value_name = "ADDRESS", env = "DNSFLOW_LISTEN")]
    pub listen: Option<SocketAddr>,
}

/// The options of `dnsflow cleanup-nodes`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct CleanupNodesOptions {
    /// The namespace of the agents
    #[arg(short, long, default_value = "dnsflow")]
    pub namespace: String,

    /// The name of their DaemonSet
    #[arg(long, value_name = "NAME", default_value = DAEMON_SET)]
    pub daemon_set: String,

    /// Reach the Kubernetes API by this file [default: $KUBECONFIG, ~/.kube/config or in-cluster]
    #[arg(long, value_name = "FILE", env = "DNSFLOW_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// The time without another clean node after which to give up
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = time)]
    pub timeout: Duration,
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

    /// The switch.
    #[command(flatten)]
    pub openflow_socket: OpenflowSocket,

    /// A dnsName without a wildcard also matches its sub-domains
    #[arg(
        long,
        value_name = "BOOL",
        env = "DNSFLOW_SUBDOMAINS",
        default_value_t = true,
        action = ArgAction::Set
    )]
    pub subdomains: bool,

    /// Hold a DNS answer on the node until its addresses are open
    #[arg(
        long,
        value_name = "BOOL",
        env = "DNSFLOW_HOLD",
        default_value_t = true,
        action = ArgAction::Set
    )]
    pub hold: bool,

    /// The longest time to hold an answer, 1s at most
    #[arg(
        long,
        value_name = "TIME",
        env = "DNSFLOW_HOLD_MAX",
        default_value = "500ms",
        value_parser = hold_time
    )]
    pub hold_max: Duration,

    /// The time for which flows stay without an agent (marks: at most), 30s to 18h
    #[arg(
        long = "keep-flows",
        value_name = "TIME",
        env = "DNSFLOW_KEEP_FLOWS",
        default_value = "5m",
        value_parser = keep_seconds
    )]
    pub keep_flows_s: u16,

    /// The time for which an address stays at least, however short its TTL
    #[arg(
        long,
        value_name = "TIME",
        env = "DNSFLOW_MIN_TTL",
        default_value = "60s",
        value_parser = time
    )]
    pub min_ttl: Duration,

    /// The time after which an address goes, unless asked for again or in use
    #[arg(
        long,
        value_name = "TIME",
        env = "DNSFLOW_MAX_TTL",
        default_value = "1h",
        value_parser = time
    )]
    pub max_ttl: Duration,

    /// The time without a packet after which an address past its TTL closes for new connections
    #[arg(
        long,
        value_name = "TIME",
        env = "DNSFLOW_IDLE_GRACE",
        default_value = "60s",
        value_parser = time
    )]
    pub idle_grace: Duration,

    /// Addresses kept for one name of a pod
    #[arg(
        long,
        value_name = "COUNT",
        env = "DNSFLOW_MAX_ADDRESSES_PER_NAME",
        default_value_t = 256
    )]
    pub max_addresses_per_name: u32,

    /// Addresses kept for a pod, on each of its networks
    #[arg(
        long,
        value_name = "COUNT",
        env = "DNSFLOW_MAX_ADDRESSES_PER_POD",
        default_value_t = 4096
    )]
    pub max_addresses_per_pod: u32,

    /// Flows that the answers to one pod may change each second; 32 s' worth of it at once
    #[arg(
        long,
        value_name = "COUNT",
        env = "DNSFLOW_MAX_FLOW_CHANGES",
        default_value_t = 256,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_flow_changes: u32,

    /// Keep a journal of what pods are told here, for the next agent: a directory on a tmpfs of the node
    #[arg(long, value_name = "DIR", env = "DNSFLOW_STATE_DIR")]
    pub state_dir: Option<PathBuf>,

    /// Keep the TC programs on this BPF file system between two agents, with the answers of that time
    #[arg(long, value_name = "DIR", env = "DNSFLOW_PIN_DIR")]
    pub pin_dir: Option<PathBuf>,

    /// Trust the answers of this DNS server, as pods know it; may be given more than once
    #[arg(
        long,
        value_name = "IP[:PORT]",
        env = "DNSFLOW_RESOLVER",
        value_delimiter = ','
    )]
    pub resolver: Vec<Resolver>,

    /// A port that DNS servers answer from; may be given more than once
    #[arg(
        long,
        value_name = "PORT",
        env = "DNSFLOW_DNS_PORT",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u16).range(1..),
        default_value = "53"
    )]
    pub dns_port: Vec<u16>,

    /// Never open further networks of the cluster, such as those of Services that `check` has not found
    #[arg(
        long,
        value_name = "CIDR",
        env = "DNSFLOW_CLUSTER_NETWORKS",
        value_delimiter = ',',
        value_parser = parse_network
    )]
    pub cluster_networks: Vec<IpNet>,

    /// Never open addresses in this network (`private`: in all private ones)
    #[arg(
        long,
        value_name = "CIDR",
        env = "DNSFLOW_DENY_ANSWERS",
        value_delimiter = ','
    )]
    pub deny_answers: Vec<DeniedNetwork>,

    /// Judge an address behind this NAT64 prefix by the IPv4 address in it
    #[arg(
        long,
        value_name = "CIDR",
        env = "DNSFLOW_NAT64_PREFIX",
        value_delimiter = ','
    )]
    pub nat64_prefix: Vec<Nat64Prefix>,

    /// Open addresses in this network even if they are refused otherwise
    #[arg(
        long,
        value_name = "CIDR",
        env = "DNSFLOW_ALLOW_ANSWERS",
        value_delimiter = ',',
        value_parser = parse_network
    )]
    pub allow_answers: Vec<IpNet>,

    /// Report the addresses to open, and open none
    #[arg(long, env = "DNSFLOW_DRY_RUN")]
    pub dry_run: bool,

    /// Open addresses by flows, by marks on packets, or by the node's best way [default: auto]
    #[arg(long, value_enum, value_name = "WAY", env = "DNSFLOW_OPEN_BY")]
    pub open_by: Option<OpenBy>,

    /// The former name of --open-by
    #[arg(
        long,
        value_enum,
        value_name = "WAY",
        env = "DNSFLOW_VERDICT",
        hide = true
    )]
    pub verdict: Option<OpenBy>,

    /// The bits of the packet mark that dnsflow uses, twelve at most; nobody else on the node may use them
    #[arg(
        long,
        value_name = "MASK",
        env = "DNSFLOW_MARK_MASK",
        default_value = "0xffe00000",
        value_parser = parse_mark_mask
    )]
    pub mark_mask: NonZeroU32,

    /// Report denied connections in an Event on the EgressFirewall, once an hour for each namespace
    #[arg(
        long,
        value_name = "BOOL",
        env = "DNSFLOW_DENIED_EVENTS",
        default_value_t = true,
        // The option had no value.
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        action = ArgAction::Set
    )]
    pub denied_events: bool,

    /// Answer /livez, /readyz and /metrics by HTTP here, such as 127.0.0.1:9473 [default: nowhere]
    #[arg(long, value_name = "ADDRESS", env = "DNSFLOW_LISTEN")]
    pub listen: Option<SocketAddr>,

    /// Where it answers.
    #[command(flatten)]
    pub control_socket: ControlSocket,

    /// The format of the log
    #[arg(
        long,
        value_name = "FORMAT",
        env = "DNSFLOW_LOG_FORMAT",
        default_value = "text"
    )]
    pub log_format: LogFormat,
}

impl AgentOptions {
    /// How long cache entries last, and how many there may be.
    pub fn cache_limits(&self) -> CacheLimits {
        let count = |count: u32| usize::try_from(count).unwrap_or(usize::MAX).max(1);
        CacheLimits {
            min_ttl: self.min_ttl,
            max_ttl: self.max_ttl,
            idle_grace: self.idle_grace,
            addresses_per_port_max: count(self.max_addresses_per_pod),
            addresses_per_name_max: count(self.max_addresses_per_name),
            ..CacheLimits::default()
        }
    }
}

impl AgentOptions {
    /// How an address is opened.
    pub fn open_by(&self) -> OpenBy {
        self.open_by.or(self.verdict).unwrap_or(OpenBy::Auto)
    }

    /// How long an answer may wait for its flows; `None` where none does. In a dry run, there are none.
    pub fn held_for(&self) -> Option<Duration> {
        (self.hold && !self.dry_run).then_some(self.hold_max)
    }
}

/// How an address is opened.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum OpenBy {
    /// By a mark where packets can be marked and marks outlive the agent, else by flows.
    Auto,
    /// By flows of its own, on every datapath.
    Flows,
    /// By a mark, on the kernel's datapath.
    #[value(alias = "kernel")]
    Marks,
}

/// Reads a mask whose bits are set without a gap, in the form of `iptables -m mark`.
fn parse_mark_mask(text: &str) -> Result<NonZeroU32, String> {
    let digits = text.strip_prefix("0x").ok_or("a mask begins with 0x")?;
    let mask = u32::from_str_radix(digits, 16).map_err(|error| error.to_string())?;
    let mask = NonZeroU32::new(mask).ok_or("a mask has at least one bit")?;
    let number = mask.get() >> mask.trailing_zeros();
    if number & number.wrapping_add(1) != 0 {
        return Err("the bits of the mask are not all in one piece".to_owned());
    }
    // A flow moves all bits of the mask into the number of the tag.
    if number > Tag::NUMBER_MAX.into() {
        let bits = mask.get().count_ones();
        return Err(format!(
            "a mask has at most 12 bits, as 0xfff00000 has, and this one has {bits}"
        ));
    }
    Ok(mask)
}

/// The longest time that an option can name: a year.
const TIME_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// The longest time for which an answer can be held. A resolver asks again after some seconds.
const HOLD_MAX: Duration = Duration::from_secs(1);
/// How many seconds flows can stay without an agent. The sentinel flows are renewed after a third of them.
const KEEP_FLOWS: RangeInclusive<u16> = 30..=18 * 3600;

/// Parses a time with its unit, such as `500ms`, `60s` or `5m`.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!(
            "a unit is missing, as in {text}s, {text}ms or {text}m"
        ));
    }
    match humantime::parse_duration(text) {
        Ok(time) if time <= TIME_MAX => Ok(time),
        Ok(_) => Err("longer than a year".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The same, within the limits of `--hold-max`.
fn hold_time(text: &str) -> Result<Duration, String> {
    let time = time(text)?;
    match (Duration::from_millis(1)..=HOLD_MAX).contains(&time) {
        true => Ok(time),
        false => Err("not between 1ms and 1s".to_owned()),
    }
}

/// A time within the limits of `--keep-flows`, in seconds. OpenFlow's timeouts have 16 bits for them.
fn keep_seconds(text: &str) -> Result<u16, String> {
    let seconds = u16::try_from(time(text)?.as_secs()).ok();
    let within = seconds.filter(|seconds| KEEP_FLOWS.contains(seconds));
    within.ok_or_else(|| "not between 30s and 18h".to_owned())
}

/// Options that are right one by one, but not together.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum OptionsError {
    /// More ports than the program has room for.
    #[error("--dns-port: {0} ports given, {PORTS_MAX} are possible")]
    TooManyPorts(usize),
    /// More networks than are looked at.
    #[error("--cluster-networks, --deny-answers, --allow-answers or --nat64-prefix: {0}")]
    TooManyNetworks(#[from] TooManyNetworks),
}

impl AgentOptions {
    /// The ports that DNS servers answer from.
    pub fn ports(&self) -> Result<Ports, OptionsError> {
        Ports::new(&self.dns_port).ok_or(OptionsError::TooManyPorts(self.dns_port.len()))
    }

    /// The addresses that are never opened.
    pub fn refusals(&self) -> Result<Refusals, OptionsError> {
        Ok(Refusals::new(
            &self.cluster_networks,
            &self.deny_answers,
            &self.allow_answers,
            &self.nat64_prefix,
        )?)
    }
}

/// The options of `dnsflow check`: those of the agent that is to work here, and how to print.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct CheckOptions {
    /// The agent's.
    #[command(flatten)]
    pub agent: AgentOptions,

    /// How to print.
    #[command(flatten)]
    pub output: OutputOptions,

    /// A warning counts as a failure: exit code 3
    #[arg(long)]
    pub strict: bool,
}

/// The options of `dnsflow bundle`: where the archive goes, and those of the agent, for `check`.
#[derive(Args, Clone, Debug, Eq, PartialEq)]
pub struct BundleOptions {
    /// The archive (.tar.gz), a new file; - is standard output
    #[arg(value_name = "FILE|-", default_value = "-")]
    pub file: PathBuf,

    /// The agent's.
    #[command(flatten)]
    pub agent: AgentOptions,
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
