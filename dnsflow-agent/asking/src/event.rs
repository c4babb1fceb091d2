//! What an agent tells of as it happens.

use std::{net::IpAddr, str::FromStr};

use clap::ValueEnum;
use dnsflow_core::ask::view;
use serde::{Deserialize, Serialize};

/// The kinds of events.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Kind {
    /// Addresses were opened for a pod.
    Opened,
    /// Addresses would have been opened for a pod, but for the dry run.
    WouldOpen,
    /// An EgressFirewall has denied a connection.
    Denied,
    /// An edit has closed addresses that a pod has used lately.
    Closed,
    /// An answer had an address that is never opened.
    AddressRefused,
    /// A pod has reached a limit.
    LimitReached,
    /// DNS answers at a port do not count.
    PortNotTrusted,
    /// The programs could not be attached to an interface.
    NotAttached,
    /// The problems of an EgressFirewall have changed.
    RuleProblems,
    /// The agent is ready.
    Ready,
    /// The trusted DNS servers have changed.
    Resolvers,
    /// Others may answer at the address of a trusted DNS server.
    ResolverCovered,
    /// The cluster's networks, which are never opened, have changed.
    ClusterNetworks,
    /// Networks that only --allow-answers opens have changed.
    AllowedAnyway,
    /// A table of a database is too large.
    TableTooLarge,
    /// A table of a database is no longer too large.
    TableReadAgain,
    /// OVN has no stage in which marks end.
    MarksEndNowhere,
    /// Some load balancers of OVN cannot be read, or all can again.
    LoadBalancersUnread,
    /// Another program's flow is in the place of a flow of dnsflow's.
    ForeignFlow,
    /// Lost flows were restored.
    FlowsRestored,
    /// A comparison with the switch has found differences.
    FlowsResynced,
    /// The switch has refused flows.
    FlowsRefused,
    /// Connections that OVN had blocked go on.
    ConnectionsUnblocked,
    /// Events came faster than a client has read them.
    #[value(hide = true)]
    EventsMissed,
}

/// A text that is no kind of event.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("no kind of event; there are {0}")]
pub struct KindError(String);

impl Kind {
    /// Its word in an event.
    pub fn word(self) -> String {
        let word = self.to_possible_value();
        word.map_or_else(String::new, |word| word.get_name().to_owned())
    }
}

impl FromStr for Kind {
    type Err = KindError;

    fn from_str(text: &str) -> Result<Self, KindError> {
        <Self as ValueEnum>::from_str(text, false).map_err(|_| {
            let kinds: Vec<String> = Self::value_variants()
                .iter()
                .map(|kind| kind.word())
                .collect();
            KindError(kinds.join(", "))
        })
    }
}

/// Something that happened.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Event {
    /// When, as RFC 3339 writes it.
    pub time: String,
    /// What: the word of a [`Kind`]. An agent of another version may know more of them.
    pub event: String,
    /// The namespace that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pod that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The name that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The addresses that it concerns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// The rules that it concerns, by their index in `spec.egress`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<u32>,
    /// From the capture of the answer to the flows in force, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation_us: Option<u64>,
    /// What the pod has tried to connect to, as `dnsflow explain` takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Why that is denied: the reason of `dnsflow explain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<view::Reason>,
    /// The same in words, as far as the rule does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What would allow it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// What else there is to say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}
