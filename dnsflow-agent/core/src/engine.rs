//! The state of one node, and every decision about it.
//!
//! One task owns the engine. It hands in each [`Input`] with the time, takes the [`Command`]s and
//! [`Report`]s that came of it, and calls [`Engine::handle_timeout`] when
//! [`Engine::next_deadline`] has passed.
//!
//! The flows that should be in the switch are those of the leases; what is in the switch is only
//! ever compared with them.

mod answers;
mod blocked;
mod denied;
mod filter;
mod hold;
mod switch;
mod world;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    time::Duration,
};

use dnsflow_common::walk::Ports;
use ipnet::IpNet;

use super::{
    Command, Input, Timestamp,
    blocked::Looks,
    counters::Counters,
    denied::Settling,
    firewall::FirewallUpdate,
    flow::FlowChange,
    fragments::{FragmentEvent, FragmentReassembly},
    hold::{HoldEvent, HoldLimits, HoldQueue},
    limits::{COPY_INTERVAL, LeaseLimits},
    name::DomainName,
    ovn::{
        rows::{Interface, InterfaceUpdate, RowId},
        view::{Changed, Table, Touched},
    },
    pipeline::Question,
    plan::{Plan, Planner, Spot, in_order},
    port::{LeasedFlow, Port, PortId},
    profile::StaticProfile,
    refused::{NETWORKS_MAX, Refusals, Refused},
    report::Report,
    resolver::Resolver,
    rules::Problem,
    snapshot::SavedLease,
    tally::Tally,
    tcp::{TcpEvent, TcpReassembly},
};
use denied::Denied;
use filter::Filter;
use switch::Switch;
pub use world::FIREWALL_NAME;
use world::World;

/// Who may use an address that a pod was told.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scope {
    /// The pod that was told.
    Pod,
    /// Every pod of its namespace on this node.
    Namespace,
}

/// What the agent's options decide.
#[derive(Clone, Debug)]
pub struct Config {
    /// Whether a rule's name also stands for its sub-domains, where its EgressFirewall does not
    /// say.
    pub subdomains: bool,
    /// Who may use an address that a pod was told.
    pub scope: Scope,
    /// How long leases last, and how many there may be.
    pub leases: LeaseLimits,
    /// How long an answer that was taken off the wire is held at most.
    pub hold_max: Duration,
    /// The ports that DNS servers answer from.
    pub dns_ports: Ports,
    /// Where rules go on a bridge without OVN.
    pub profile: Option<StaticProfile>,
    /// The addresses that are never opened.
    pub refusals: Refusals,
    /// DNS servers to believe beside those of the cluster.
    pub resolvers: BTreeSet<Resolver>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            subdomains: true,
            scope: Scope::Pod,
            leases: LeaseLimits::default(),
            hold_max: HoldLimits::default().longest,
            dns_ports: Ports::DNS,
            profile: None,
            refusals: Refusals::default(),
            resolvers: BTreeSet::new(),
        }
    }
}

/// Which sources have been read completely.
#[derive(Clone, Copy, Debug, Default)]
struct Synced {
    interfaces: bool,
    nb: bool,
    sb: bool,
    logical_flows: bool,
    firewalls: bool,
}

impl Synced {
    fn all(self, without_ovn: bool) -> bool {
        let ovn = self.nb && self.sb && self.logical_flows;
        self.interfaces && self.firewalls && (ovn || without_ovn)
    }
}

/// The state of one node.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    synced: Synced,
    ready: bool,
    interfaces: Table<Interface>,
    /// The index of each interface's veth, as far as it was found.
    found: BTreeMap<RowId, u32>,
    /// Interfaces whose first attempt to attach has ended, well or not.
    tried: BTreeSet<RowId>,
    ports: BTreeMap<PortId, Port>,
    next_port: u32,
    port_by_name: HashMap<String, PortId>,
    port_by_ifindex: HashMap<u32, PortId>,
    world: World,
    filter: Filter,
    /// Frames that were taken off the wire.
    held: HoldQueue,
    /// How long the switch takes to look at its megaflows after a change: until then, one that
    /// drops may stand in the way.
    revalidation: Duration,
    /// Whether there can be one.
    denied: Denied,
    /// When the last input came.
    turn_at: Timestamp,
    /// The DNS servers that were last said to be believed.
    trusted: Option<BTreeSet<Resolver>>,
    tcp: TcpReassembly,
    fragments: FragmentReassembly,
    /// What is wrong with each namespace's rules, as it was told.
    told: BTreeMap<String, BTreeMap<u32, Problem>>,
    watched_priorities: Option<BTreeSet<u16>>,
    /// Rules may be in other tables since the flow monitor was last told.
    rules_changed: bool,
    /// When to look again for actions to copy.
    copy_at: Option<Timestamp>,
    planner: Planner,
    /// The ports by where their packets are found, once somebody has asked and as long as it holds.
    spots: Option<HashMap<Spot, PortId>>,
    /// Leases of an earlier run, by port, until the port is there.
    saved: HashMap<String, Vec<SavedLease>>,
    /// Counts changes of what a snapshot would hold.
    leases_version: u64,
    /// When to look at a lease again. Entries may be out of date; looking tells.
    due: BTreeSet<(Timestamp, PortId, IpAddr)>,
    switch: Switch,
    /// When to look for connections that OVN has blocked in a gap of our flows.
    looks: Looks,
    changes: Vec<FlowChange>,
    commands: Vec<Command>,
    reports: Vec<Report>,
    counters: Counters,
    refused: Tally<Refused>,
    /// Refusals that were told, so that each is told once in a while only.
    refused_told: BTreeSet<(DomainName, IpAddr)>,
}

impl Engine {
    /// An engine that knows nothing yet.
    pub fn new(config: Config) -> Self {
        let mut engine = Self {
            world: World::new(config.subdomains, config.profile.clone()),
            synced: Synced::default(),
            ready: false,
            interfaces: Table::default(),
            found: BTreeMap::new(),
            tried: BTreeSet::new(),
            ports: BTreeMap::new(),
            next_port: 0,
            port_by_name: HashMap::new(),
            port_by_ifindex: HashMap::new(),
            filter: Filter::default(),
            held: HoldQueue::new(HoldLimits {
                longest: config.hold_max,
                ..HoldLimits::default()
            }),
            revalidation: Duration::ZERO,
            denied: Denied::default(),
            turn_at: Timestamp::default(),
            trusted: None,
            tcp: TcpReassembly::default(),
            fragments: FragmentReassembly::default(),
            told: BTreeMap::new(),
            watched_priorities: None,
            rules_changed: false,
            copy_at: None,
            planner: Planner::default(),
            spots: None,
            saved: HashMap::new(),
            leases_version: 0,
            due: BTreeSet::new(),
            switch: Switch::default(),
            looks: Looks::default(),
            changes: Vec::new(),
            commands: Vec::new(),
            reports: Vec::new(),
            counters: Counters::default(),
            refused: Tally::default(),
            refused_told: BTreeSet::new(),
            config,
        };
        engine.trust(&BTreeSet::new());
        engine
    }

    /// Takes in what happened at `now`.
    pub fn handle(&mut self, input: Input<'_>, now: Timestamp) {
        self.turn_at = now;
        self.switch.forget_settled(now);
        if !matches!(input, Input::Frame(_)) {
            self.flush_opened();
        }
        if may_change_plans(&input) {
            self.planner.forget();
            self.spots = None;
        }
        match input {
            Input::Frame(frame) => self.frame(frame, now),
            Input::Interfaces(update) => self.interfaces_changed(update, now),
            Input::Nb(update) => {
                self.synced.nb |= update.reset;
                let touched = self.world.apply_nb(update);
                self.learn_networks();
                self.watch_logical_flows();
                self.world_touched(touched, now);
            }
            Input::Sb(update) => {
                self.synced.sb |= update.reset;
                let touched = self.world.apply_sb(update);
                self.world_touched(touched, now);
            }
            Input::Firewalls(update) => self.firewalls_changed(update, now),
            Input::Found { interface, ifindex } => self.found(interface, ifindex),
            Input::Attached { interface, ifindex } => {
                self.found(interface, ifindex);
                self.tried.insert(interface);
            }
            Input::AttachFailed { interface, reason } => {
                if let Some(row) = self.interfaces.find(interface) {
                    self.tried.insert(interface);
                    self.reports.push(Report::NotAttached {
                        interface: row.name.clone(),
                        reason,
                    });
                }
            }
            Input::LogicalFlowsWatched { priorities } => {
                self.synced.logical_flows = self.watched_priorities.as_ref() == Some(&priorities);
            }
            Input::SwitchUp => self.switch_up(now),
            Input::SwitchDown => self.switch_down(),
            Input::Applied { batch, result } => self.applied(batch, result, now),
            Input::Flows { flows, more } => self.found_in_switch(flows, more, now),
            Input::FlowLost { key, cookie } => self.flow_lost(&key, cookie, now),
            Input::Counted { batch, counts } => self.counted(batch, counts, now),
            Input::CountLost { cookie } => self.denied.count_lost(cookie),
            Input::ForeignFlow { key, cookie } => self.foreign_flow(key, cookie),
            Input::ForeignFlowGone { key } => self.foreign_flow_gone(&key, now),
            Input::Resolvers(resolvers) => self.trust(&resolvers),
            Input::Revalidation(time) => self.revalidation = time,
            Input::MegaflowsIdle(time) => self.denied.megaflows_idle_for(time),
            Input::MonitorGap => {
                self.switch.compare_soon(now);
                self.denied.gap();
            }
            Input::QuestionRefused => {
                self.switch.forget_questions(now);
                self.world.interrupted();
            }
            Input::LogicalFlowSample {
                table_id, flows, ..
            } => {
                let question = self.world.sampled(table_id, flows, now);
                self.ask(question);
            }
            Input::Blocked { connections, more } => self.blocked_found(connections, more, now),
            Input::Unblocked { unblocked, failed } => self.unblocked(unblocked, failed),
            Input::CookiesFound(found) => {
                if self.world.learn(&found, now) {
                    self.rules_changed = true;
                    self.replan_all(now);
                }
            }
        }
        self.settle(now);
    }

    /// Does what is due at `now`.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.turn_at = now;
        self.switch.forget_settled(now);
        self.flush_opened();
        self.expire(now);
        self.switch_timeout(now);
        self.recall(now);
        self.count_denied(now);
        self.look_for_blocked(now);
        if self.copy_at.is_some_and(|at| at <= now) {
            self.look_for_copies(now);
        }
        let question = self.world.retry(now);
        self.ask(question);
        self.settle(now);
    }

    /// When [`Engine::handle_timeout`] wants to be called.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let due = self.due.first().map(|(at, ..)| *at);
        let switch = self.switch.deadline(self.can_judge());
        let recall = self.filter.deadline();
        let held = self.held.next_deadline();
        [
            due,
            switch,
            recall,
            held,
            self.looks.deadline(),
            self.denied.deadline(),
            self.world.deadline(),
            self.copy_at,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// What is to be done, in this order. What several answers open goes together.
    pub fn take_commands(&mut self) -> Vec<Command> {
        self.flush_opened();
        std::mem::take(&mut self.commands)
    }

    /// What is to be told.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What became of TCP segments.
    pub fn tcp_events(&self) -> &Tally<TcpEvent> {
        self.tcp.events()
    }

    /// What became of IP fragments.
    pub fn fragment_events(&self) -> &Tally<FragmentEvent> {
        self.fragments.events()
    }

    /// What became of frames that were taken off the wire and had to wait.
    pub fn hold_events(&self) -> &Tally<HoldEvent> {
        self.held.events()
    }

    /// Whether new flows had to settle, for each batch that answers opened.
    pub fn settling_events(&self) -> &Tally<Settling> {
        self.denied.events()
    }

    /// Addresses that were not opened, by reason.
    pub fn refused(&self) -> &Tally<Refused> {
        &self.refused
    }

    /// Takes over what an earlier run has left, before anything else is handed in.
    pub fn restore(&mut self, saved: Vec<SavedLease>) {
        for lease in saved {
            self.saved
                .entry(lease.port.clone())
                .or_default()
                .push(lease);
        }
    }

    /// Grows whenever [`Engine::snapshot`] has something new to say.
    pub fn leases_version(&self) -> u64 {
        self.leases_version
    }

    /// The names behind every open address.
    pub fn snapshot(&self, now: Timestamp) -> Vec<SavedLease> {
        let mut snapshot = Vec::new();
        for port in self.ports.values() {
            let open = port
                .leases
                .iter()
                .filter(|(_, lease)| !lease.flows.is_empty());
            for (address, lease) in open {
                let names = lease.names.iter();
                snapshot.push(SavedLease {
                    port: port.row.iface_id.clone(),
                    pod: port.row.iface_id_ver.clone(),
                    address: *address,
                    names: names
                        .map(|(name, until)| (name.clone(), until.since(now)))
                        .collect(),
                });
            }
        }
        // Ports that have not come back yet.
        snapshot.extend(self.saved.values().flatten().cloned());
        snapshot
    }

    /// How many flows should be in the switch.
    pub fn flow_count(&self) -> usize {
        self.ports
            .values()
            .flat_map(|port| port.leases.values())
            .map(|lease| lease.flows.len())
            .sum()
    }

    /// The end of every turn: what all changes together ask for.
    fn settle(&mut self, now: Timestamp) {
        self.release_due(now);
        if self.switch.is_up() {
            let question = self.world.locate();
            self.ask(question);
        }
        self.update_filter(now);
        self.flush(true);
        self.put_back_lost(now);
        if std::mem::take(&mut self.rules_changed) {
            self.monitor_tables();
        }
        self.start_comparison(now);
        self.tell_problems();
        self.become_ready();
    }

    /// Believes these DNS servers, and those of the options.
    fn trust(&mut self, cluster: &BTreeSet<Resolver>) {
        let all: BTreeSet<Resolver> = cluster.union(&self.config.resolvers).copied().collect();
        if self.trusted.as_ref() != Some(&all) {
            self.trusted = Some(all.clone());
            self.reports.push(Report::Trusting(all.clone()));
            self.commands.push(Command::TrustResolvers(all));
        }
    }

    /// Opens no address of the networks that OVN knows to be the cluster's own.
    fn learn_networks(&mut self) {
        let Some(mut networks) = self.world.take_changed_networks() else {
            return;
        };
        let left_out = networks.len().saturating_sub(NETWORKS_MAX);
        // The largest first.
        networks.sort_by_key(IpNet::prefix_len);
        networks.truncate(NETWORKS_MAX);
        networks.sort_unstable();
        if let Ok(true) = self.config.refusals.learn(&networks) {
            self.reports
                .push(Report::ClusterNetworks { networks, left_out });
        }
    }

    fn ask(&mut self, question: Option<Question>) {
        match question {
            Some(Question::Sample { pipeline, table_id }) => self
                .commands
                .push(Command::SampleLogicalFlows { pipeline, table_id }),
            Some(Question::Cookies(cookies)) => self.commands.push(Command::FindCookies(cookies)),
            None => {}
        }
    }

    fn become_ready(&mut self) {
        let tried = || {
            self.interfaces
                .iter()
                .all(|(id, _)| self.tried.contains(&id))
        };
        if !self.ready
            && self.synced.all(self.world.is_static())
            && self.switch.is_compared()
            && tried()
        {
            self.ready = true;
            self.reports.push(Report::Ready {
                attached: self.port_by_ifindex.len(),
                firewalls: self.world.firewall_count(),
                flows: self.flow_count(),
            });
        }
    }

    // Interfaces and ports.

    fn interfaces_changed(&mut self, update: InterfaceUpdate, now: Timestamp) {
        let reset = update.reset;
        self.synced.interfaces |= reset;
        let changed = self.interfaces.apply(update.reset, update.interfaces);
        // Rows that went first: a recreated pod's new row may come in the same transaction.
        let (gone, rest): (Vec<_>, Vec<_>) = changed.into_iter().partition(|c| c.new.is_none());
        for Changed { id, old, .. } in gone {
            self.found.remove(&id);
            self.tried.remove(&id);
            self.commands.push(Command::Detach { interface: id });
            if let Some(old) = old {
                self.interface_gone(id, &old, now);
            }
        }
        for Changed { id, old, new } in rest {
            let Some(row) = new else { continue };
            // The veth's name stays when it is replaced; its index does not.
            let policed = row.policing_kbps > 0;
            let replaced = |old: &Interface| {
                (&old.name, old.ifindex) != (&row.name, row.ifindex)
                    || (old.policing_kbps > 0) != policed
            };
            if old.as_ref().is_none_or(replaced) {
                self.commands.push(Command::Attach {
                    interface: id,
                    name: row.name.clone(),
                    policed,
                });
            }
            if let Some(old) = old.filter(|old| old.iface_id != row.iface_id) {
                self.interface_gone(id, &old, now);
            }
            self.interface_present(id, row, now);
        }
        if reset {
            // Pods that went while nobody looked.
            self.saved.clear();
        }
    }

    fn interface_present(&mut self, id: RowId, row: Interface, now: Timestamp) {
        if let Some(&port_id) = self.port_by_name.get(&row.iface_id)
            && let Some(port) = self.ports.get_mut(&port_id)
        {
            let same_pod = port.row.iface_id_ver == row.iface_id_ver;
            if port.interface == id && same_pod {
                let moved = port.row.addresses != row.addresses || port.row.ofport != row.ofport;
                port.row = row;
                if moved {
                    self.replan(port_id, now);
                }
                return;
            }
            // Another pod under the same name.
            self.close_port(port_id);
        }
        self.open_port(id, row, now);
    }

    fn open_port(&mut self, interface: RowId, row: Interface, now: Timestamp) {
        let id = PortId(self.next_port);
        self.next_port += 1;
        self.filter.dirty = true;
        self.port_by_name.insert(row.iface_id.clone(), id);
        let mut port = Port::new(interface, row);
        port.ifindex = self.found.get(&interface).copied();
        if let Some(ifindex) = port.ifindex {
            self.port_by_ifindex.insert(ifindex, id);
        }
        let saved = self.saved.remove(&port.row.iface_id).unwrap_or_default();
        let pod = port.row.iface_id_ver.clone();
        self.ports.insert(id, port);
        for lease in saved.into_iter().filter(|lease| lease.pod == pod) {
            for (name, rest) in lease.names {
                self.remember(id, lease.address, &name, now + rest, now);
            }
        }
        // OVN's rows may have been there before the interface.
        self.share_within_namespace(id, now);
        self.replan(id, now);
    }

    fn close_port(&mut self, id: PortId) {
        let Some(port) = self.ports.remove(&id) else {
            return;
        };
        self.filter.dirty = true;
        self.port_by_name.remove(&port.row.iface_id);
        if let Some(ifindex) = port.ifindex {
            self.port_by_ifindex.remove(&ifindex);
            self.tcp.forget_interface(ifindex);
            self.fragments.forget_interface(ifindex);
        }
        for (address, lease) in port.leases {
            self.changes.extend(lease.deletions(address));
        }
    }

    fn interface_gone(&mut self, id: RowId, row: &Interface, now: Timestamp) {
        let Some(&port_id) = self.port_by_name.get(&row.iface_id) else {
            return;
        };
        if self
            .ports
            .get(&port_id)
            .is_none_or(|port| port.interface != id)
        {
            return;
        }
        self.close_port(port_id);
        let heir = self
            .interfaces
            .iter()
            .find(|(_, other)| other.iface_id == row.iface_id)
            .map(|(id, other)| (id, other.clone()));
        if let Some((id, row)) = heir {
            self.open_port(id, row, now);
        }
    }

    fn found(&mut self, interface: RowId, ifindex: u32) {
        let Some(row) = self.interfaces.find(interface) else {
            return;
        };
        self.filter.dirty = true;
        self.found.insert(interface, ifindex);
        let Some(&port_id) = self.port_by_name.get(&row.iface_id) else {
            return;
        };
        let Some(port) = self.ports.get_mut(&port_id) else {
            return;
        };
        if port.interface != interface {
            return;
        }
        if let Some(old) = port.ifindex.replace(ifindex) {
            self.port_by_ifindex.remove(&old);
        }
        self.port_by_ifindex.insert(ifindex, port_id);
    }

    // Rules.

    fn firewalls_changed(&mut self, update: FirewallUpdate, now: Timestamp) {
        self.synced.firewalls |= update.reset;
        self.filter.dirty |= update.reset;
        let touched = Touched {
            namespaces: self.world.apply_firewalls(update),
            ports: BTreeSet::new(),
        };
        self.world_touched(touched, now);
    }

    /// Asks for the logical flows of every ACL.
    fn watch_logical_flows(&mut self) {
        let priorities = self.world.priorities();
        if self.watched_priorities.as_ref() != Some(&priorities) {
            self.watched_priorities = Some(priorities.clone());
            self.commands
                .push(Command::WatchLogicalFlows { priorities });
        }
    }

    fn world_touched(&mut self, touched: Touched, now: Timestamp) {
        let Touched { namespaces, ports } = touched;
        self.filter.dirty |= !(namespaces.is_empty() && ports.is_empty());
        let mut ports: BTreeSet<PortId> = ports
            .iter()
            .filter_map(|name| self.port_by_name.get(name).copied())
            .collect();
        let mut groups = BTreeSet::new();
        for namespace in &namespaces {
            groups.append(&mut self.world.pair_namespace(namespace));
            self.denied.rules_changed(namespace, now);
        }
        if !groups.is_empty() {
            let concerned = self.ports.iter();
            let concerned = concerned.filter(|(_, port)| self.world.is_in(&port.row, &groups));
            ports.extend(concerned.map(|(id, _)| *id));
            self.rules_changed = true;
        }
        for port in ports {
            self.share_within_namespace(port, now);
            self.replan(port, now);
        }
        if !namespaces.is_empty() {
            self.copy_at.get_or_insert(now);
        }
    }

    /// Tells what is wrong with EgressFirewalls, once enough has been read to know.
    fn tell_problems(&mut self) {
        if !self.synced.all(self.world.is_static()) {
            return;
        }
        for (namespace, problems) in self.world.take_changed_problems() {
            let told = self.told.get(&namespace);
            if told == Some(&problems) || (told.is_none() && problems.is_empty()) {
                continue;
            }
            self.reports.push(Report::Problems {
                namespace: namespace.clone(),
                problems: problems
                    .iter()
                    .map(|(index, problem)| (*index, (problem.to_string(), problem.standing())))
                    .collect(),
            });
            if problems.is_empty() {
                self.told.remove(&namespace);
            } else {
                self.told.insert(namespace, problems);
            }
        }
    }

    /// Looks for OVN's own flows that have the actions which rules would copy.
    fn look_for_copies(&mut self, now: Timestamp) {
        self.copy_at = None;
        if !self.switch.is_up() {
            return;
        }
        let (cookies, incomplete) = self.world.cookies_to_copy();
        if !cookies.is_empty() {
            self.commands.push(Command::FindCookies(cookies));
        }
        if incomplete {
            self.copy_at = Some(now + COPY_INTERVAL);
        }
    }

    // Planning.

    fn replan_all(&mut self, now: Timestamp) {
        let ports: Vec<PortId> = self.ports.keys().copied().collect();
        for port in ports {
            self.replan(port, now);
        }
    }

    fn replan(&mut self, port_id: PortId, now: Timestamp) {
        let Some(port) = self.ports.get(&port_id) else {
            return;
        };
        let addresses: Vec<IpAddr> = port.leases.keys().copied().collect();
        let before = self.changes.len();
        for address in addresses {
            self.replan_lease(port_id, address, now);
        }
        let is_addition = |change: &FlowChange| matches!(change, FlowChange::Add(..));
        if self.changes[before..].iter().any(is_addition) {
            self.looks.written_anew();
        }
    }

    /// Brings the flows of one lease in line with its names and the rules, and puts back those that
    /// are lost. Returns how many flows are new.
    fn replan_lease(&mut self, port_id: PortId, address: IpAddr, now: Timestamp) -> usize {
        let Self {
            ports,
            world,
            planner,
            changes,
            switch,
            looks,
            ..
        } = self;
        let written_at = if switch.is_compared() {
            now
        } else {
            Timestamp::default()
        };
        let Some(port) = ports.get_mut(&port_id) else {
            return 0;
        };
        let Some(lease) = port.leases.get_mut(&address) else {
            return 0;
        };
        let sets = world.sets(&port.row);
        let mut wanted = Plan::new();
        if let Some(facts) = world.facts(port_id, &port.row, &sets) {
            wanted = planner.for_names(facts, address, lease.names.keys());
            if let Some(adopted) = &lease.adopted {
                wanted.extend(planner.still_ruled(facts, address, &adopted.flows));
                in_order(&mut wanted);
            }
        }
        let changes_before = changes.len();
        let before = lease.flows.len();
        let mut added = 0;
        let mut flows = Vec::with_capacity(wanted.len());
        let mut old = std::mem::take(&mut lease.flows).into_iter().peekable();
        for pattern in wanted {
            while let Some(gone) = old.next_if(|flow| flow.pattern.cmp_place(&pattern).is_lt()) {
                changes.extend(gone.pattern.deletion(address));
            }
            let flow = match old.next_if(|flow| flow.pattern.cmp_place(&pattern).is_eq()) {
                Some(flow) if flow.pattern == pattern && !flow.lost => flow,
                Some(flow) => {
                    if flow.lost {
                        looks.written_anew();
                    }
                    changes.extend(pattern.addition(address));
                    LeasedFlow {
                        pattern,
                        written_at,
                        counted: false,
                        lost: false,
                        ..flow
                    }
                }
                None => {
                    added += 1;
                    let adopted = || lease.adopted.as_ref()?.flows.get(&pattern.key(address)?);
                    // An adopted flow is in the switch already, with this very body.
                    if adopted() != Some(&pattern.body.cookie) {
                        changes.extend(pattern.addition(address));
                    }
                    LeasedFlow {
                        pattern,
                        written_at,
                        packets: 0,
                        used_at: now,
                        seen_in: 0,
                        counted: false,
                        lost: false,
                    }
                }
            };
            flows.push(flow);
        }
        lease.flows = flows.into_boxed_slice();
        changes.extend(old.filter_map(|gone| gone.pattern.deletion(address)));
        if added > 0 || lease.flows.len() != before {
            self.leases_version += 1;
        }
        if changes.len() > changes_before {
            lease.written_in = Some(switch.next_batch());
        }
        added
    }
}

/// Whether rules, ports or the pipeline may be others behind this input.
fn may_change_plans(input: &Input<'_>) -> bool {
    !matches!(
        input,
        Input::Frame(_)
            | Input::Applied { .. }
            | Input::Counted { .. }
            | Input::CountLost { .. }
            | Input::Flows { .. }
            | Input::FlowLost { .. }
            | Input::ForeignFlow { .. }
            | Input::ForeignFlowGone { .. }
            | Input::Revalidation(_)
            | Input::MegaflowsIdle(_)
            | Input::Blocked { .. }
            | Input::Unblocked { .. }
    )
}

#[cfg(test)]
mod tests;
