//! The answers about a node: plain values, made from the owners' state when somebody asks.
//!
//! The agent writes them as JSON. A field that is added is no break; a field that changes its meaning
//! is one.

mod attempt;
mod enforced;
mod explain;
mod services;
mod target;
pub(crate) mod told_names;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};

use crate::{
    Timestamp,
    cache::{Cache, Entry, Term},
    dns::answers::Answers,
    installed::Usage,
    io::report::{NotTrusted, Severity},
    ovn::rows::{Interface, pod_of_port},
    pods::{
        budget::FlowBudget,
        ports::{Port, Ports},
        recording::{RecordedName, Recordings},
    },
    policy::{Policy, refused::RefusedAddresses},
    sources::Sources,
    switch::Switch,
    values::{
        connection::Attempt,
        firewall::{Destination, Firewall, IpVersions, Rule, RuleAction, open_beside},
        flow::{Protocol, Transport, text},
        ids::{PortId, RecordingId},
        name::DomainName,
        resolver::Resolver,
    },
};

pub use crate::{
    cache::Origin,
    values::verdict::{Reason, Verdict},
};
pub use attempt::Judged;
pub use explain::{Beside, ExplainedAddress, Explanation, HeardName, RuleStep, StepOutcome};
pub use services::{Backend, Frontend};
pub use target::{Target, TargetError};

/// A node.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct NodeView {
    /// Whether everything was read once, and the switch was compared.
    pub is_ready: bool,
    /// The sources, and whether each was read completely.
    pub sources: Vec<SourceView>,
    /// The tables of databases that are too large, in words.
    #[serde(default)]
    pub large_tables: Vec<String>,
    /// Whether the connection to the switch is up.
    pub switch_is_connected: bool,
    /// Whether the switch has agreed with the cache since it is connected.
    pub switch_is_compared: bool,
    /// The DNS servers that are trusted, as `address:port`.
    pub resolvers: Vec<String>,
    /// The logical ports of this node.
    pub ports: Vec<PortView>,
    /// The EgressFirewalls of the cluster, by namespace.
    pub firewalls: Vec<FirewallView>,
    /// How many addresses the cache has.
    pub addresses: usize,
    /// How many flows should be in the switch: those of addresses, groups, pods and logical switches, without sentinel
    /// flows.
    pub flows: usize,
}

/// Whether a source has been read.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SourceView {
    /// The name of the source.
    pub source: String,
    /// Whether all of it was read once.
    pub is_read: bool,
}

/// A logical port of the node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PortView {
    /// The logical port (`iface-id`).
    pub port: String,
    /// The namespace of the pod, as far as the port's name tells.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The host side of the veth.
    pub interface: String,
    /// The user-defined network, if the port is not on the default one.
    pub network: Option<String>,
    /// The addresses of the port.
    pub addresses: Vec<IpAddr>,
    /// Whether the programs are attached.
    pub attachment: Attachment,
    /// Why DNS answers at this port are ignored, if so.
    pub not_trusted: Option<String>,
    /// The namespace whose EgressFirewall OVN enforces at the port.
    pub firewall: Option<String>,
    /// How many addresses the pod was told at this port, or shares.
    pub told: usize,
    /// The limits that the pod has reached.
    pub limits: Vec<String>,
}

/// Whether the programs are attached to an interface.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Attachment {
    /// They are.
    Attached,
    /// That is under way.
    Pending,
    /// They are not, for this reason; the agent goes on trying.
    Failed(String),
}

/// An EgressFirewall.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct FirewallView {
    /// Its namespace.
    pub namespace: String,
    /// Whether the agent installs nothing for it.
    #[serde(default)]
    pub is_dry_run: bool,
    /// How many rules it has.
    pub rules: usize,
    /// How many of them are for a name.
    pub rules_by_name: usize,
    /// The IP versions over which all passes that no rule mentions, beside another one over which it is denied.
    #[serde(default)]
    pub open_beside: IpVersions,
    /// Problems and limitations.
    pub problems: Vec<ProblemView>,
}

/// Some rules of a namespace's EgressFirewall, with the facts about all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct RulesView {
    /// Rules from the one on that was asked for, as [`Firewall`] has them.
    pub part: Firewall,
    /// How many rules the EgressFirewall has.
    pub count: usize,
    /// When the rules came; zero if they were there at the agent's start.
    pub came_at: Timestamp,
    /// Whether OVN still enforces the EgressFirewall before this one.
    pub enforces_former: bool,
}

/// A problem of a rule.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ProblemView {
    /// The rule's index in `spec.egress`.
    pub rule: u32,
    /// `waiting`, `not_in_force` or `caveat`.
    pub severity: String,
    /// The problem and the remedy.
    pub text: String,
}

/// An address that a pod was told.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EntryView {
    /// The logical port.
    pub port: String,
    /// The namespace of the pod.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The user-defined network, if the port is not on the default one.
    pub network: Option<String>,
    /// The address.
    pub address: IpAddr,
    /// The names that lead to the address.
    pub names: Vec<NameView>,
    /// Why the address is never opened, if so: the label of the counter.
    pub refused: Option<String>,
    /// The flows that give the packets to the address a tag, and the first 256 flows of the tag's group, which it
    /// shares with other addresses.
    pub flows: Vec<FlowView>,
    /// The packets to the address at the last comparison, whatever their port; none by a mark, where they are not
    /// counted.
    #[serde(default)]
    pub packets: Option<u64>,
    /// The seconds since a packet to the address was last seen; none if there was none.
    #[serde(default)]
    pub used_s: Option<u64>,
}

/// A name that leads to an address.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct NameView {
    /// The name.
    pub name: String,
    /// The source of the name's term.
    pub origin: Origin,
    /// The seconds for which it still counts.
    pub ttl_left_s: u64,
    /// The seconds since the last answer.
    pub told_s: u64,
    /// The server that has sent the last answer; none where an earlier run of the agent saw it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolver: Option<String>,
    /// The indices of the rules that match the name.
    pub rules: Vec<u32>,
}

/// A flow.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct FlowView {
    /// The flow as `ovs-ofctl dump-flows` writes it, without counters.
    pub flow: String,
    /// The packets that it had matched at the last comparison.
    pub packets: u64,
    /// The seconds since it was last seen to match a packet, or was written.
    pub idle_s: u64,
    /// Whether the flow is missing in the switch, and is being restored.
    pub is_missing: bool,
    /// Whether it is one of a group: its packets are those to all addresses of the group, from all pods with the same
    /// rules.
    #[serde(default)]
    pub is_of_group: bool,
}

/// So many flows of a group are shown with an address of it. A group may have thousands.
const GROUP_FLOWS_SHOWN_MAX: usize = 256;

/// A node in numbers.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Totals {
    /// Whether everything was read once, and the switch was compared.
    pub is_ready: bool,
    /// The tables of databases that are too large and left out.
    pub tables_left_out: usize,
    /// The tables of databases that are too large and cannot be done without.
    pub tables_unread: usize,
    /// Whether the connection to the switch is up.
    pub switch_is_connected: bool,
    /// The DNS servers that are trusted.
    pub resolvers: usize,
    /// The ports to whose interfaces the programs are attached.
    pub attached: usize,
    /// The ports for which attaching was not tried yet.
    pub pending: usize,
    /// The ports to whose interfaces the programs could not be attached.
    pub failed: usize,
    /// The ports whose DNS answers are ignored.
    pub not_trusted: usize,
    /// The EgressFirewalls.
    pub firewalls: usize,
    /// The rules that wait for OVN.
    pub waiting: usize,
    /// The rules that are not in force.
    pub not_in_force: usize,
    /// The rules of which there is something to know.
    pub caveats: usize,
    /// The addresses in the cache.
    pub addresses: usize,
    /// The names in the cache.
    pub names: usize,
    /// The flows that should be in the switch.
    pub flows: usize,
}

/// The state of a node, borrowed to answer a question.
#[derive(Debug)]
pub struct View<'a> {
    pub(crate) sources: &'a Sources,
    pub(crate) ports: &'a Ports,
    pub(crate) answers: &'a Answers,
    pub(crate) budget: &'a FlowBudget,
    pub(crate) refused: &'a RefusedAddresses,
    pub(crate) policy: &'a Policy,
    pub(crate) cache: &'a Cache,
    pub(crate) switch: &'a Switch,
    pub(crate) recordings: &'a Recordings,
}

impl View<'_> {
    /// The node as a whole. The time that this takes grows with ports, EgressFirewalls and cache entries.
    pub fn node(&self) -> NodeView {
        let resolvers = self.answers.trusted().into_iter().flatten();
        NodeView {
            is_ready: self.sources.is_ready(),
            sources: self.sources.states().map(source_view).collect(),
            large_tables: self
                .sources
                .all_large_tables()
                .map(ToString::to_string)
                .collect(),
            switch_is_connected: self.switch.is_up(),
            switch_is_compared: self.switch.is_compared(),
            resolvers: resolvers.map(ToString::to_string).collect(),
            ports: self
                .ports
                .iter()
                .map(|(id, port)| self.port(id, port))
                .collect(),
            firewalls: self
                .policy
                .firewalls()
                .map(|(namespace, firewall)| self.firewall(namespace, firewall))
                .collect(),
            addresses: self.ports.iter().map(|(id, _)| self.cache.count(id)).sum(),
            flows: self.cache.flow_count(),
        }
    }

    /// The node in numbers. The time that this takes grows with ports and problems.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals {
            is_ready: self.sources.is_ready(),
            switch_is_connected: self.switch.is_up(),
            resolvers: self.answers.trusted().map_or(0, BTreeSet::len),
            firewalls: self.policy.firewall_count(),
            names: self.cache.name_count(),
            flows: self.cache.flow_count(),
            ..Totals::default()
        };
        for table in self.sources.all_large_tables() {
            *match table.is_left_out {
                true => &mut totals.tables_left_out,
                false => &mut totals.tables_unread,
            } += 1;
        }
        for (id, port) in self.ports.iter() {
            *match self.ports.attachment(port.interface) {
                None => &mut totals.pending,
                Some(None) => &mut totals.attached,
                Some(Some(_)) => &mut totals.failed,
            } += 1;
            let not_trusted = self.ports.not_trusted(port.interface);
            totals.not_trusted += usize::from(not_trusted.is_some());
            totals.addresses += self.cache.count(id);
        }
        for problem in self.policy.all_problems() {
            *match problem.severity() {
                Severity::Waiting => &mut totals.waiting,
                Severity::NotInForce => &mut totals.not_in_force,
                Severity::Caveat => &mut totals.caveats,
            } += 1;
        }
        totals
    }

    /// Whether a name without a wildcard stands for its sub-domains as well, where the EgressFirewall does
    /// not say.
    pub fn subdomains(&self) -> bool {
        self.policy.subdomains()
    }

    /// At most `count` rules of a namespace's EgressFirewall from this one on. `None`: there is no such
    /// EgressFirewall.
    pub fn rules(&self, namespace: &str, from: usize, count: usize) -> Option<RulesView> {
        let firewall = self.policy.present(namespace)?;
        let Firewall {
            rules,
            subdomains,
            dry_run,
            hold_off,
            refusal,
        } = firewall;
        let part = rules.iter().skip(from).take(count);
        Some(RulesView {
            part: Firewall {
                rules: part.cloned().collect(),
                subdomains: *subdomains,
                dry_run: *dry_run,
                hold_off: *hold_off,
                refusal: refusal.clone(),
            },
            count: rules.len(),
            came_at: self.policy.came_at(namespace).unwrap_or_default(),
            enforces_former: self.policy.enforces_former(namespace),
        })
    }

    /// The logical ports of this node.
    pub fn ports(&self) -> Vec<String> {
        let ports = self.ports.iter();
        ports.map(|(_, port)| port.row.iface_id.clone()).collect()
    }

    /// The logical ports by which a pod sends: with a primary user-defined network, that of this network alone.
    pub fn ports_of(&self, namespace: &str, pod: &str) -> Vec<String> {
        let ports = self.ports.iter().map(|(_, port)| &port.row);
        let of_pod = ports.filter(|row| pod_of(row) == (namespace, pod));
        let (primary, others): (Vec<_>, Vec<_>) =
            of_pod.partition(|row| self.ports.is_on_primary_network(row));
        let sending = if primary.is_empty() { others } else { primary };
        let sending = sending.into_iter();
        sending.map(|row| row.iface_id.clone()).collect()
    }

    /// The interface indices of a pod's veths, as far as they were found: the host sides.
    pub fn veths_of(&self, namespace: &str, pod: &str) -> Vec<u32> {
        let ports = self.ports.iter().map(|(_, port)| port);
        let of_pod = ports.filter(|port| pod_of(&port.row) == (namespace, pod));
        of_pod.filter_map(|port| port.ifindex).collect()
    }

    /// At most `count` names of a recording from this one on, in the order in which they came, and how
    /// many answers for further names found no room. `None`: there is no such recording.
    pub fn recorded(
        &self,
        id: RecordingId,
        from: usize,
        count: usize,
    ) -> Option<(Vec<RecordedName>, u64)> {
        Some(self.recordings.get(id)?.read(from, count))
    }

    /// The addresses that a logical port was told, in order.
    pub fn addresses(&self, port: &str) -> Vec<IpAddr> {
        let id = self.ports.named(port);
        let mut addresses = id.map_or_else(Vec::new, |id| self.cache.addresses(id));
        addresses.sort_unstable();
        addresses
    }

    /// The entries of a logical port for these addresses, as far as they are there.
    pub fn entries(&self, port: &str, addresses: &[IpAddr], now: Timestamp) -> Vec<EntryView> {
        let found = self
            .ports
            .named(port)
            .and_then(|id| Some((id, self.ports.get(id)?)));
        let Some((id, port)) = found else {
            return Vec::new();
        };
        let addresses = addresses.iter();
        addresses
            .filter_map(|address| self.entry(id, port, *address, now))
            .collect()
    }

    fn entry(&self, id: PortId, port: &Port, address: IpAddr, now: Timestamp) -> Option<EntryView> {
        let row = &port.row;
        let entry = self.cache.entry(id, address)?;
        let (namespace, pod) = pod_of(row);
        let names = entry.names.iter();
        let Usage { packets, at } = entry.installed.usage();
        Some(EntryView {
            port: row.iface_id.clone(),
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            network: row.network.clone(),
            address,
            names: names
                .map(|(name, term)| self.name(row, name, term, now))
                .collect(),
            refused: self.refusal(address, row),
            flows: self.flows(address, entry, now),
            packets,
            used_s: at.map(|at| now.since(at).as_secs()),
        })
    }

    /// The flows that let a pod reach an address: its own, and those of its group.
    fn flows(&self, address: IpAddr, entry: &Entry, now: Timestamp) -> Vec<FlowView> {
        let own = entry.installed.own().into_iter();
        let own = own.flat_map(|flows| flows.states(address.into()));
        let of_group = self.cache.flows_of(entry).into_iter();
        let of_group = of_group.flat_map(|(target, flows)| flows.states(target));
        let of_group = of_group.take(GROUP_FLOWS_SHOWN_MAX);
        let states = own
            .map(|state| (state, false))
            .chain(of_group.map(|state| (state, true)));
        let views = states.map(|(state, is_of_group)| FlowView {
            flow: text::flow(&state.key, state.body),
            packets: state.packets,
            idle_s: now.since(state.used_at).as_secs(),
            is_missing: state.is_lost,
            is_of_group,
        });
        views.collect()
    }

    fn name(&self, row: &Interface, name: &DomainName, term: &Term, now: Timestamp) -> NameView {
        let sets = self.policy.sets(row);
        let rules = sets.iter().flat_map(|set| set.matching(name));
        let mut rules: Vec<u32> = rules.map(|rule| rule.index).collect();
        rules.sort_unstable();
        rules.dedup();
        let (origin, ttl_left_s) = match term.counts() {
            true => (term.origin, term.end().since(now).as_secs()),
            false => (Origin::Ended, 0),
        };
        NameView {
            name: name.to_string(),
            origin,
            ttl_left_s,
            told_s: self.cache.told_since(term, now).as_secs(),
            resolver: self.resolver(term).map(|resolver| resolver.to_string()),
            rules,
        }
    }

    /// Who has told a name last, where that is known.
    fn resolver(&self, term: &Term) -> Option<Resolver> {
        self.answers.server(term.server?)
    }

    fn refusal(&self, address: IpAddr, row: &Interface) -> Option<String> {
        use crate::tools::counter_vec::Label as _;
        let namespace = self.policy.namespace_of_rules(row);
        let refused = self.refused.check(address, row, namespace).err()?;
        Some(refused.as_str().to_owned())
    }

    fn port(&self, id: PortId, port: &Port) -> PortView {
        let row = &port.row;
        let (namespace, pod) = pod_of(row);
        PortView {
            port: row.iface_id.clone(),
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            interface: row.name.to_string(),
            network: row.network.clone(),
            addresses: row.addresses.clone(),
            attachment: match self.ports.attachment(port.interface) {
                None => Attachment::Pending,
                Some(None) => Attachment::Attached,
                Some(Some(reason)) => Attachment::Failed(reason.to_owned()),
            },
            not_trusted: self
                .ports
                .not_trusted(port.interface)
                .map(|reason| not_trusted_text(reason).to_owned()),
            firewall: self.policy.namespace_of_rules(row).map(str::to_owned),
            told: self.cache.count(id),
            limits: self
                .cache
                .port(id)
                .limits_reported
                .iter()
                .map(ToString::to_string)
                .collect(),
        }
    }

    fn firewall(&self, namespace: &str, firewall: &Firewall) -> FirewallView {
        let by_name = |rule: &&Rule| matches!(rule.destination, Destination::Name(_));
        FirewallView {
            namespace: namespace.to_owned(),
            is_dry_run: self.policy.is_dry_run(namespace),
            rules: firewall.rules.len(),
            rules_by_name: firewall.rules.iter().filter(by_name).count(),
            open_beside: open_beside(&firewall.rules),
            problems: self
                .policy
                .problems(namespace)
                .map(|(rule, problem)| ProblemView {
                    rule,
                    severity: severity(problem.severity()).to_owned(),
                    text: problem.to_string(),
                })
                .collect(),
        }
    }
}

/// An attempt as `dnsflow explain` takes it: `203.0.113.7:443`, `[2001:db8::1]:53/udp`.
pub fn target_text(attempt: &Attempt) -> String {
    target_text_of(attempt.address, attempt.protocol, attempt.port)
}

/// The same, of its parts.
pub fn target_text_of(address: IpAddr, protocol: Protocol, port: u16) -> String {
    let at = SocketAddr::new(address, port);
    match protocol {
        Protocol::Tcp => at.to_string(),
        other => format!("{at}/{}", other.name()),
    }
}

fn source_view((source, is_read): (&str, bool)) -> SourceView {
    SourceView {
        source: source.to_owned(),
        is_read,
    }
}

/// Namespace and name of the pod of an interface.
fn pod_of(row: &Interface) -> (&str, &str) {
    pod_of_port(&row.iface_id)
}

/// Why DNS answers at a port are ignored.
pub fn not_trusted_text(reason: &NotTrusted) -> &'static str {
    match reason {
        NotTrusted::SecondaryNetwork(_) => "on a secondary network",
        NotTrusted::NoAddresses => "no port security: OVN lets the pod send from any address",
    }
}

fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Waiting => "waiting",
        Severity::NotInForce => "not_in_force",
        Severity::Caveat => "caveat",
    }
}

/// A rule as the resource writes it, such as `Allow dnsName: example.com tcp/443`.
pub fn rule_text(rule: &Rule) -> String {
    let ports = rule.ports.iter().copied().map(transport_text);
    let ports: String = ports.map(|ports| format!(" {ports}")).collect();
    let (action, destination) = (
        action_text(rule.action),
        destination_text(&rule.destination),
    );
    format!("{action} {destination}{ports}")
}

/// The action of a rule, as the resource writes it.
fn action_text(action: RuleAction) -> &'static str {
    match action {
        RuleAction::Allow => "Allow",
        RuleAction::Deny => "Deny",
    }
}

/// The destination of a rule, as the resource writes it.
fn destination_text(destination: &Destination) -> String {
    match destination {
        Destination::Name(name) => format!("dnsName: {}", name.written()),
        Destination::Cidr(network) => format!("cidrSelector: {network}"),
        Destination::Nodes => "nodeSelector".to_owned(),
        Destination::Invalid(reason) => format!("invalid: {reason}"),
    }
}

/// Protocol and port of a rule or a connection, such as `tcp/443`.
pub fn transport_text(transport: Transport) -> String {
    let protocol = transport.protocol.name();
    match transport.port {
        Some(port) => format!("{protocol}/{port}"),
        None => protocol.to_owned(),
    }
}
