//! The verdict over a connection, and the reason.

use serde::{Deserialize, Serialize};

/// The verdict over a connection.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It passes.
    Allowed,
    /// It is dropped.
    Blocked,
}

/// Why: a stable code.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
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
    /// A rule by name would allow it once the pod is told the address; it was not.
    NotResolved,
    /// The pod was told the address, and the time of the answer is over.
    Expired,
    /// The pod was told the address, and a limit has left no room for it.
    LimitReached,
    /// Another pod was told the address, and this one was not.
    ToldToOtherPod,
    /// A rule by name would allow it, but OVN has no ACL or no logical flow for the rule yet.
    AclMissing,
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
    /// A rule by name would allow it, but nothing counts that the pod is told at this port.
    PortNotTrusted,
    /// A rule by name would allow it, but the programs are not attached to the pod's interface.
    NotAttached,
    /// The agent has not read everything yet.
    AgentStarting,
}
