//! The verdict over a connection, and the reason.

use serde::{Deserialize, Serialize};

use crate::tools::counter_vec::labels;

/// The verdict over a connection.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It passes.
    Allowed,
    /// It passes once the pod has asked for the name.
    NotYet,
    /// It depends on a port or an address that the question does not have, or on the endpoint of a Service.
    Depends,
    /// It is not known: a fact decides that the agent does not have.
    NotKnown,
    /// It is dropped.
    Blocked,
}

impl Verdict {
    /// The verdict over connections to several addresses of a name; `None` without one.
    pub fn of_all(verdicts: impl IntoIterator<Item = Self>) -> Option<Self> {
        verdicts
            .into_iter()
            .reduce(|one, other| match (one, other) {
                (one, other) if one == other => one,
                (Self::NotKnown, _) | (_, Self::NotKnown) => Self::NotKnown,
                // The question for the name comes first.
                (Self::Allowed, Self::NotYet) | (Self::NotYet, Self::Allowed) => Self::NotYet,
                _ => Self::Depends,
            })
    }
}

/// Why: a stable code.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The namespace has no EgressFirewall.
    NoFirewall,
    /// No rule matches, and without one OVN lets pass.
    NoRuleDenies,
    /// A rule by network allows it.
    AllowedByNetwork,
    /// A rule by name allows it, and the pod was told the address for such a name.
    AllowedByName,
    /// A rule by name allows it, and ovn-kubernetes has resolved the name to the address itself.
    AllowedByOvn,
    /// A rule denies it, and no rule by name would allow it.
    DeniedByRule,
    /// A rule by name would allow it, but a rule before that one denies it.
    DeniedByEarlierRule,
    /// A rule by name would allow it, but only for other ports.
    WrongPort,
    /// A rule by name allows it once a trusted DNS server has returned the address to the pod.
    NotResolved,
    /// The same, and the pod has asked a trusted DNS server, which has not answered.
    NotAnswered,
    /// The same, and the answer was an error: NXDOMAIN, SERVFAIL, REFUSED or another.
    AnsweredWithError,
    /// The pod was told the address, and the time of the answer is over.
    Expired,
    /// The pod was told the address, and a limit has left no room for it.
    LimitReached,
    /// Another pod was told the address, and this one was not.
    ToldToOtherPod,
    /// A rule by name would allow it, but OVN has no ACL or no logical flow for the rule yet.
    AclMissing,
    /// OVN has an ACL that denies, of which the EgressFirewall has no rule: ovn-kubernetes has left it behind.
    AclLeftBehind,
    /// A rule by name would allow it, but ovn-kubernetes has not taken over the EgressFirewall.
    FirewallNotTakenOver,
    /// A rule by name would allow it, but the rule cannot be used.
    RuleNotUsable,
    /// A rule by name would allow it, but the address is never opened.
    AddressRefused,
    /// A rule by name would allow it, but this is a dry run: no flow is installed.
    DryRun,
    /// A rule by name would allow it, but the flow is not in the switch.
    FlowMissing,
    /// A rule by name would allow it, but no DNS server is trusted.
    NoResolverTrusted,
    /// A rule by name would allow it, but DNS answers at this port are ignored.
    PortNotTrusted,
    /// A rule by name would allow it, but the programs are not attached to the pod's interface.
    NotAttached,
    /// The agent has not read everything yet.
    AgentStarting,
    /// The connection stays in the pod.
    InPod,
    /// The pod has no address of the destination's IP version.
    NoAddressOfFamily,
    /// The destination is in the cluster, where an EgressFirewall does not hold.
    InCluster,
    /// The destination is a Service that leads out of the pods' networks: its backends decide.
    LeadsOut,
    /// The name is one of the cluster's DNS, and its address is not known.
    ClusterName,
    /// Packets to the destination stay on the pod's link.
    OnLink,
    /// The rules decide by the port, and none was named.
    DependsOnPort,
    /// The rules decide by the address, and it is not known.
    DependsOnAddress,
    /// A rule selects nodes, and the agent does not know which.
    NodeSelector,
    /// The switch cannot be asked.
    SwitchAway,
}

labels! {
    /// Why a connection is denied, for those who are paged.
    DenialReason {
        /// The rules deny it: what they are for.
        ByRule = "denied_by_rule",
        /// The pod does not have the address from a trusted DNS server, or not any more.
        NotAsked = "not_asked",
        /// The address is never opened.
        Refused = "address_refused",
        /// A dry run.
        DryRun = "dry_run",
        /// A rule allows it, and the address is not open: a limit, a rule that is not in force, or a fault.
        NotOpen = "allowed_but_not_open",
    }
}

impl Reason {
    /// The reason of a denied connection, for the metric.
    pub fn of_denial(self) -> DenialReason {
        match self {
            Self::DeniedByRule | Self::DeniedByEarlierRule | Self::WrongPort => {
                DenialReason::ByRule
            }
            Self::NotResolved
            | Self::NotAnswered
            | Self::AnsweredWithError
            | Self::Expired
            | Self::ToldToOtherPod => DenialReason::NotAsked,
            Self::AddressRefused => DenialReason::Refused,
            Self::DryRun => DenialReason::DryRun,
            Self::NoFirewall
            | Self::NoRuleDenies
            | Self::AllowedByNetwork
            | Self::AllowedByName
            | Self::AllowedByOvn
            | Self::LimitReached
            | Self::AclMissing
            | Self::AclLeftBehind
            | Self::FirewallNotTakenOver
            | Self::RuleNotUsable
            | Self::FlowMissing
            | Self::NoResolverTrusted
            | Self::PortNotTrusted
            | Self::NotAttached
            | Self::AgentStarting
            | Self::InPod
            | Self::NoAddressOfFamily
            | Self::InCluster
            | Self::LeadsOut
            | Self::ClusterName
            | Self::OnLink
            | Self::DependsOnPort
            | Self::DependsOnAddress
            | Self::NodeSelector
            | Self::SwitchAway => DenialReason::NotOpen,
        }
    }
}
