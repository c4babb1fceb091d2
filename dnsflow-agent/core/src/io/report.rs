//! Reports to people: each one becomes one log event.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    time::Duration,
};

use ipnet::IpNet;

use crate::{
    io::input::LargeTable,
    values::{
        connection::Attempt, limits::Limit, name::DomainName, resolver::Resolver, verdict::Reason,
    },
};

/// A connection of a pod that its EgressFirewall denies.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Denied {
    /// The namespace of the EgressFirewall.
    pub namespace: String,
    /// The logical port of the pod.
    pub port: String,
    /// The attempt.
    pub attempt: Attempt,
    /// The names that the pod was told the address for, the newest first: [`NAMES_PER_CONNECTION_MAX`] at most.
    ///
    /// [`NAMES_PER_CONNECTION_MAX`]: crate::values::limits::NAMES_PER_CONNECTION_MAX
    pub names: Vec<ToldName>,
    /// The number of older ones.
    pub names_left_out: usize,
    /// Why: the same as [`crate::ask::view::Explanation`] says.
    pub reason: Reason,
    /// The rule that decides, by its index in `spec.egress`.
    pub rule: Option<u32>,
    /// That rule as the resource writes it, such as `Deny cidrSelector: 0.0.0.0/0`.
    pub rule_text: String,
    /// The reason in words, as far as the rule does not say it.
    pub text: String,
    /// The change that would allow it.
    pub remedy: Option<String>,
}

impl Denied {
    /// The bytes of its texts and lists.
    fn rest_size(&self) -> usize {
        let Self {
            namespace,
            port,
            attempt: _,
            names,
            names_left_out: _,
            reason: _,
            rule: _,
            rule_text,
            text,
            remedy,
        } = self;
        let names = names
            .iter()
            .map(|told| size_of_val(told) + told.name.wire().len());
        let remedy = remedy.as_ref().map_or(0, String::len);
        let texts = namespace.len() + port.len() + rule_text.len() + text.len();
        names.sum::<usize>() + texts + remedy
    }
}

/// A name that a pod was told an address for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ToldName {
    /// The name.
    pub name: DomainName,
    /// How long ago the last answer was.
    pub ago: Duration,
    /// Who has answered, where that is known.
    pub resolver: Option<Resolver>,
}

impl fmt::Display for ToldName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            ago,
            resolver,
        } = self;
        write!(f, "{name}, told {}s ago", ago.as_secs())?;
        match resolver {
            Some(resolver) => write!(f, " by {resolver}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Denied {
    /// The rule, the reason and the remedy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rule {
            Some(rule) => write!(f, "rule {rule} {}", self.rule_text)?,
            None => f.write_str("no rule")?,
        }
        if !self.text.is_empty() {
            write!(f, ": {}", self.text)?;
        }
        if let Some(remedy) = &self.remedy {
            write!(f, "; {remedy}")?;
        }
        Ok(())
    }
}

/// The effect of a problem on its rule.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Severity {
    /// The usual short wait for OVN.
    Waiting,
    /// The rule is not in force, or not as written.
    NotInForce,
    /// The rule is in force, but does less than people may expect.
    Caveat,
}

/// The new problems of an EgressFirewall with the same effect.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NewProblems {
    /// The texts of the first ones by rule index, [`PROBLEM_TEXTS_MAX`] at most.
    ///
    /// [`PROBLEM_TEXTS_MAX`]: crate::values::limits::PROBLEM_TEXTS_MAX
    pub first: BTreeMap<u32, String>,
    /// The rules with the others, in order.
    pub others: Vec<u32>,
}

/// All problems of an EgressFirewall with the same effect.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PresentProblems {
    /// The texts of the first ones by rule index, [`PROBLEM_TEXTS_MAX`] at most.
    ///
    /// [`PROBLEM_TEXTS_MAX`]: crate::values::limits::PROBLEM_TEXTS_MAX
    pub first: BTreeMap<u32, String>,
    /// How many there are.
    pub count: usize,
}

impl NewProblems {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.first.len() + self.others.len()
    }

    /// The rules that have them, in order.
    pub fn rules(&self) -> impl Iterator<Item = u32> {
        self.first.keys().chain(&self.others).copied()
    }
}

/// Why DNS answers at a port are ignored.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum NotTrusted {
    /// It is on a user-defined network that is not the pod's primary one. The cluster's DNS is not
    /// there, and a neighbour may be able to send in its name.
    SecondaryNetwork(String),
    /// Its Interface row does not name both a MAC and an IP address: OVN lets the pod send from any.
    NoAddresses,
}

/// Something worth telling.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Report {
    /// Every source has been read, the programs are attached, the switch agrees.
    Ready {
        /// Interfaces that the program is attached to.
        attached: usize,
        /// EgressFirewalls known.
        firewalls: usize,
        /// Flows of ours in the switch.
        flows: usize,
    },
    /// A pod was given access to an address: the barrier has been answered.
    Opened {
        /// The namespace of the rule.
        namespace: String,
        /// The logical port.
        port: String,
        /// The name that was asked for.
        name: DomainName,
        /// Addresses that were not open before.
        addresses: Vec<IpAddr>,
        /// Rules that the name matched.
        rules: Vec<u32>,
        /// Flows written.
        flows: usize,
        /// From the packet's capture in the kernel to the answered barrier. `None`: the kernel has opened the
        /// addresses, or a rule that came after the answer opens them.
        activation: Option<Duration>,
        /// Whether the answers had to wait for revalidation as well: the label of the counter.
        revalidation_wait: &'static str,
    },
    /// A pod would have been given access to an address: this is a dry run.
    WouldOpen {
        /// The logical port.
        port: String,
        /// The name that was asked for.
        name: DomainName,
        /// The addresses.
        addresses: Vec<IpAddr>,
        /// Rules that the name matched.
        rules: Vec<u32>,
    },
    /// OVN has no stage that is known to be behind all rules: where a rule of OVN's decides over a packet, the packet
    /// keeps its mark.
    MarksEndNowhere,
    /// Nothing that a pod is told at this port counts.
    PortNotTrusted {
        /// The logical port.
        port: String,
        /// Why.
        reason: NotTrusted,
    },
    /// The networks of the cluster, as OVN knows them: none of their addresses is opened.
    ClusterNetworks {
        /// The networks; neighbouring ones are joined.
        networks: Vec<IpNet>,
        /// The number of networks without room.
        left_out: usize,
    },
    /// Addresses in these networks may be opened because an option allows them, although they are refused
    /// otherwise: the labels of the counters.
    AllowedAnyway(BTreeMap<IpNet, BTreeSet<&'static str>>),
    /// By marks: whether some load balancers cannot be read. Then any address may be in front of one, and gets flows of
    /// its own.
    LoadBalancersUnread(bool),
    /// Others than a DNS server that is trusted may answer at its address.
    ResolverCovered {
        /// The DNS server.
        resolver: Resolver,
        /// Who.
        by: BTreeSet<String>,
    },
    /// A table of a database is too large.
    TableTooLarge(LargeTable),
    /// A table of a database is not too large any more.
    TableReadAgain {
        /// The database.
        database: &'static str,
        /// The table.
        table: &'static str,
    },
    /// Someone else has a flow with the key of one of ours. Our flow is left out while the other
    /// one is there.
    ForeignFlow {
        /// The OpenFlow table.
        table: u8,
        /// The priority.
        priority: u16,
        /// The cookie of the foreign flow.
        cookie: u64,
    },
    /// An edit has closed addresses that a pod has used lately.
    Closed {
        /// The namespace whose rules hold for the pod.
        namespace: String,
        /// The logical port of the pod.
        port: String,
        /// A name that leads to the addresses; without one, these are the rest of a large edit.
        name: Option<DomainName>,
        /// The addresses.
        addresses: Vec<IpAddr>,
        /// Further ones, which are not named.
        left_out: usize,
        /// The rule that denies them now; without one, no rule allows them any more.
        rule: Option<u32>,
    },
    /// An answer named an address that is never opened.
    AddressRefused {
        /// The logical port of the pod that was told.
        port: String,
        /// The name that was asked for.
        name: DomainName,
        /// The address.
        address: IpAddr,
        /// The reason: the label of the counter.
        reason: &'static str,
    },
    /// These DNS servers are trusted from now on.
    Trusting(BTreeSet<Resolver>),
    /// Lost flows of ours were restored.
    Restored {
        /// How many.
        flows: usize,
    },
    /// Connections that OVN had blocked while flows of ours were missing go on.
    Unblocked {
        /// How many.
        connections: usize,
        /// How many could not be unblocked.
        failed: usize,
    },
    /// A comparison has found differences in the switch, and has corrected them.
    Resynced {
        /// Flows that were missing.
        added: usize,
        /// Flows of ours that should not have been there.
        removed: usize,
    },
    /// The switch refused flows.
    FlowsRefused {
        /// Why.
        reason: String,
    },
    /// The problems of an EgressFirewall have changed.
    Problems {
        /// Its namespace.
        namespace: String,
        /// The problems that were not reported before, also not for another index, by their effect.
        news: BTreeMap<Severity, NewProblems>,
        /// The former indices, in order, of rules without a new problem whose former one no rule has any more.
        over: Vec<u32>,
        /// All problems, by their effect. None: every rule is in force.
        present: BTreeMap<Severity, PresentProblems>,
    },
    /// A pod was told more than a limit allows: an address that was open is closed, or a new one not
    /// opened, or one that a rule denies not closed.
    LimitReached {
        /// The namespace whose rules hold for the pod.
        namespace: String,
        /// The logical port of the pod.
        port: String,
        /// Which limit.
        limit: Limit,
        /// The limit.
        max: usize,
    },
    /// A pod tries to connect to where its EgressFirewall denies it.
    Denied(Box<Denied>),
    /// For some seconds the programs could not be attached to an interface; the agent keeps trying.
    NotAttached {
        /// The logical port of the pod.
        port: String,
        /// The pod's UID, where it is known.
        pod_uid: Option<String>,
        /// The interface.
        interface: String,
        /// Why.
        reason: String,
    },
}

impl Report {
    /// The bytes that the report takes in memory, with its texts and lists.
    pub fn size(&self) -> usize {
        let texts = |problems: &BTreeMap<u32, String>| {
            let texts: usize = problems.values().map(String::len).sum();
            problems.len() * size_of::<(u32, String)>() + texts
        };
        let rest = match self {
            Self::Ready { .. }
            | Self::MarksEndNowhere
            | Self::LoadBalancersUnread(_)
            | Self::TableTooLarge(_)
            | Self::TableReadAgain { .. }
            | Self::ForeignFlow { .. }
            | Self::Restored { .. }
            | Self::Unblocked { .. }
            | Self::Resynced { .. } => 0,
            Self::Opened {
                namespace,
                port,
                name,
                addresses,
                rules,
                ..
            } => {
                let texts = namespace.len() + port.len() + name.wire().len();
                texts + size_of_val(&addresses[..]) + size_of_val(&rules[..])
            }
            Self::WouldOpen {
                port,
                name,
                addresses,
                rules,
            } => {
                let texts = port.len() + name.wire().len();
                texts + size_of_val(&addresses[..]) + size_of_val(&rules[..])
            }
            Self::PortNotTrusted { port, reason } => {
                let network = match reason {
                    NotTrusted::SecondaryNetwork(network) => network.len(),
                    NotTrusted::NoAddresses => 0,
                };
                port.len() + network
            }
            Self::ClusterNetworks { networks, .. } => size_of_val(&networks[..]),
            Self::AllowedAnyway(networks) => {
                let reasons: usize = networks.values().map(BTreeSet::len).sum();
                networks.len() * size_of::<(IpNet, BTreeSet<&str>)>() + reasons * size_of::<&str>()
            }
            Self::ResolverCovered { by, .. } => {
                by.iter().map(|one| size_of_val(one) + one.len()).sum()
            }
            Self::Closed {
                namespace,
                port,
                name,
                addresses,
                ..
            } => {
                let name = name.as_ref().map_or(0, |name| name.wire().len());
                namespace.len() + port.len() + name + size_of_val(&addresses[..])
            }
            Self::AddressRefused { port, name, .. } => port.len() + name.wire().len(),
            Self::Trusting(resolvers) => resolvers.len() * size_of::<Resolver>(),
            Self::FlowsRefused { reason } => reason.len(),
            Self::Problems {
                namespace,
                news,
                over,
                present,
            } => {
                let new = news
                    .values()
                    .map(|new| size_of_val(new) + texts(&new.first) + size_of_val(&new.others[..]));
                let present = present
                    .values()
                    .map(|present| size_of_val(present) + texts(&present.first));
                namespace.len()
                    + size_of_val(&over[..])
                    + new.sum::<usize>()
                    + present.sum::<usize>()
            }
            Self::LimitReached {
                namespace,
                port,
                limit,
                ..
            } => {
                let name = if let Limit::AddressesOfName(name) = limit {
                    name.wire().len()
                } else {
                    0
                };
                namespace.len() + port.len() + name
            }
            Self::Denied(denied) => size_of_val(&**denied) + denied.rest_size(),
            Self::NotAttached {
                port,
                pod_uid,
                interface,
                reason,
            } => {
                let uid = pod_uid.as_ref().map_or(0, String::len);
                port.len() + uid + interface.len() + reason.len()
            }
        };
        size_of_val(self) + rest
    }
}
