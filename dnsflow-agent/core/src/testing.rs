//! A node around an engine, for tests: a switch that obeys, a name filter, and OVN's rows as
//! ovn-kubernetes writes them for one namespace, `ns1`.
//!
//! The core's own tests use this module, and the tests and benchmarks of the workspace do with the feature
//! `test-util`. No program is built with that feature.

mod edges;
mod rows;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use crate::{
    Command, Input, Timestamp,
    cache::journal::{Folding, Record, Saved},
    engine::{Config, Engine},
    io::{input::Frame, report::Report},
    ovn::rows::{Datapath, InterfaceUpdate, NbUpdate, PortGroup, RowId, SbUpdate},
    policy::plan::scope_of_marks,
    values::{
        connection::BlockedConnection,
        firewall::{FirewallUpdate, Rule},
        flow::{Action, Cookie, Ends, FlowChange, FlowKey, Sentinel, Tag},
        limits::Limit,
        resolver::Resolver,
    },
};

#[cfg(test)]
pub(crate) use self::edges::{ClassElements, shown};
pub use self::{edges::Kernel, rows::*};

/// The OpenFlow table of the pipeline's first table, as an OVN of some version has it.
pub const BASE: u8 = 42;
/// The row of the logical switch of all pods, whose tunnel key is 3.
pub const DATAPATH: RowId = RowId::new(0xd << 100);

/// An engine with a node around it.
#[derive(Debug)]
pub struct Node {
    /// The engine.
    pub engine: Engine,
    /// The present.
    pub now: Timestamp,
    /// The switch's tables: the flows of dnsflow without the sentinel flows, their cookies, and how many
    /// packets each has matched.
    pub switch: BTreeMap<FlowKey, (Cookie, u64)>,
    /// The action lists that flows have been written with, by cookie.
    pub actions: BTreeMap<Cookie, Arc<[Action]>>,
    /// The sentinel flows in the switch, with their cookies.
    pub sentinels: BTreeMap<Sentinel, Cookie>,
    /// The hard timeout of the last one that was written.
    pub keep_flows_s: u16,
    /// All commands, oldest first, until a test takes them.
    pub log: Vec<Command>,
    /// All reports, oldest first, until a test takes them.
    pub reports: Vec<Report>,
    /// Whether the switch answers.
    pub switch_answers: bool,
    /// The number of the last dump that was asked for.
    pub dump: u32,
    /// The flows that the switch refuses.
    pub refused: BTreeSet<FlowKey>,
    /// The commands that wait to be carried out, where they do.
    pub waiting: Option<VecDeque<Command>>,
    /// The rows of the pods' logical ports, by the names of the ports.
    pub pods: BTreeMap<String, RowId>,
    /// The last octet of each pod's address, by the interface index.
    hosts: BTreeMap<u32, u8>,
    /// Whether ovn-controller has installed its flows.
    pub ovn_installed: bool,
    /// The OpenFlow table in which ovn-controller has installed them.
    pub ovn_table: u8,
    /// Whether OVN has a stage in which tags end.
    pub has_tags_end: bool,
    /// The OpenFlow table of that stage.
    pub tags_end: u8,
    /// What ovn-controller made of logical flows, by cookie: a drop where there is nothing.
    pub ovn_actions: BTreeMap<u32, Vec<u8>>,
    /// How many packets OVN's flows have matched, by cookie.
    pub ovn_packets: BTreeMap<u32, u64>,
    /// The name filter.
    pub kernel: Kernel,
    /// The connections that OVN has blocked.
    pub blocked: Vec<BlockedConnection>,
    /// The marks in the kernel, by interface and address: the bits, their end, and when a packet was last marked.
    pub marks: BTreeMap<(u32, IpAddr), (u32, Timestamp, Option<Timestamp>)>,
    /// Whether the kernel sets no marks.
    pub refuses_marks: bool,
    /// Whether the kernel lets nobody read its marks.
    pub hides_marks: bool,
    /// Whether programs of an earlier agent may open addresses, if there are any.
    pub earlier_open: bool,
    /// Whether there are, and their records wait.
    pub records_wait: bool,
    /// The destinations of megaflows that drop; `None` where the datapath cannot be asked.
    pub dropping: Option<BTreeSet<IpAddr>>,
    /// The records of its journal.
    pub journal: Vec<Record>,
}

impl Node {
    /// Nothing is known yet.
    pub fn bare() -> Self {
        Self {
            engine: Engine::new(Config::default()),
            now: Timestamp::from_nanos(1_000_000_000_000),
            switch: BTreeMap::new(),
            actions: BTreeMap::new(),
            sentinels: BTreeMap::new(),
            keep_flows_s: 0,
            log: vec![],
            reports: vec![],
            switch_answers: true,
            dump: 0,
            refused: BTreeSet::new(),
            waiting: None,
            pods: BTreeMap::new(),
            hosts: BTreeMap::new(),
            ovn_installed: true,
            ovn_table: BASE + 4,
            has_tags_end: true,
            tags_end: BASE + 12,
            ovn_actions: BTreeMap::new(),
            ovn_packets: BTreeMap::new(),
            kernel: Kernel::default(),
            blocked: Vec::new(),
            marks: BTreeMap::new(),
            refuses_marks: false,
            hides_marks: false,
            earlier_open: true,
            records_wait: false,
            dropping: None,
            journal: Vec::new(),
        }
    }

    /// All sources were read, pod p1 (10.244.0.5) of ns1 is there, and `rules` are in force.
    pub fn with(rules: &[Rule]) -> Self {
        Self::bare().start(rules)
    }

    /// The same for an engine that was changed before.
    pub fn start(mut self, rules: &[Rule]) -> Self {
        self.read_sources();
        self.set_firewall(rules);
        self.set_ovn(rules);
        // What is due at once.
        self.pass(Duration::ZERO);
        self.log.clear();
        self
    }

    /// All sources are read. They know of pod p1 (10.244.0.5) of ns1, and of no rules.
    pub fn read_sources(&mut self) {
        self.trust_server();
        self.give(Input::SwitchUp);
        self.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![],
        }));
        self.give(Input::Firewalls(FirewallUpdate {
            reset: true,
            firewalls: vec![],
        }));
        self.give(Input::Nb(NbUpdate {
            reset: true,
            acls: vec![],
            ..NbUpdate::default()
        }));
        self.give(Input::Sb(SbUpdate {
            reset: true,
            datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
            ..SbUpdate::default()
        }));
        self.add_pod("p1", 5);
    }

    /// The cluster's DNS server is known: the one that answers come from.
    pub fn trust_server(&mut self) {
        let server = Resolver {
            address: SERVER.into(),
            port: 53,
        };
        self.give(Input::Resolvers([server].into()));
    }

    /// Hands in an input, and carries out what comes of the input.
    pub fn give(&mut self, input: Input) {
        if let Input::Interfaces(update) = &input {
            self.learn_hosts(update);
        }
        self.engine.handle(input, self.now);
        self.obey();
    }

    /// The engine takes in a frame, and its commands are carried out.
    pub fn give_frame(&mut self, frame: Frame<'_>) {
        self.engine.handle_frame(frame, self.now);
        self.obey();
    }

    fn learn_hosts(&mut self, update: &InterfaceUpdate) {
        for (row, interface) in &update.interfaces {
            let mut addresses = interface.iter().flat_map(|interface| &interface.addresses);
            if let Some(IpAddr::V4(address)) = addresses.next() {
                self.hosts.insert(ifindex_of(*row), address.octets()[3]);
            }
        }
    }

    /// What the next run takes over, if these records were written before this run's.
    pub fn folded(&self, before: &[Record]) -> Saved {
        let mut folding = Folding::default();
        for record in before.iter().chain(&self.journal) {
            folding.take(record.clone());
        }
        folding.end(self.now)
    }

    /// Lets time pass, with every deadline met on the way.
    pub fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        let mut turns = 0;
        while let Some((at, why)) = self.engine.next_deadline().filter(|(at, _)| *at <= end) {
            self.now = at.max(self.now);
            self.engine.handle_timeout(self.now);
            self.obey();
            turns += 1;
            assert!(turns < 10_000, "deadlines without end: {why:?}");
        }
        self.now = end;
    }

    // Pods and rules.

    /// A pod of ns1 comes, at 10.244.0.`host`.
    pub fn add_pod(&mut self, name: &str, host: u8) {
        let row = RowId::new(0x100 + u128::from(host));
        self.add_pod_as(name, host, &format!("uid-{name}"), row);
    }

    /// The same, with this UID, and with this row for the interface and for the logical port.
    pub fn add_pod_as(&mut self, name: &str, host: u8, uid: &str, row: RowId) {
        self.add_interface(name, host, uid, row);
        self.add_logical_port(name, host, row);
    }

    /// The interface of a pod comes.
    pub fn add_interface(&mut self, name: &str, host: u8, uid: &str, row: RowId) {
        self.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, Some(interface(&format!("ns1_{name}"), host, uid)))],
        }));
    }

    /// The logical port of a pod comes.
    pub fn add_logical_port(&mut self, name: &str, host: u8, row: RowId) {
        let port = format!("ns1_{name}");
        self.pods.insert(port.clone(), row);
        let update = SbUpdate {
            port_bindings: vec![(row, Some(port_binding(&port, host)))],
            port_groups: vec![self.group()],
            ..SbUpdate::default()
        };
        self.give(Input::Sb(update));
    }

    /// The interface of a pod goes.
    pub fn remove_interface(&mut self, name: &str) {
        let row = self.pods[&format!("ns1_{name}")];
        self.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, None)],
        }));
    }

    /// The logical port of a pod goes, and leaves the port group. Returns its row.
    pub fn remove_logical_port(&mut self, name: &str) -> RowId {
        let row = self.pods.remove(&format!("ns1_{name}"));
        let row = row.expect("it is there");
        let group = self.group();
        self.give(Input::Sb(SbUpdate {
            port_bindings: vec![(row, None)],
            port_groups: vec![group],
            ..SbUpdate::default()
        }));
        row
    }

    /// The port group of ns1, and its row.
    pub fn group(&self) -> (RowId, Option<PortGroup>) {
        let group = PortGroup {
            name: GROUP.into(),
            ports: self.pods.keys().cloned().collect(),
        };
        (RowId::new(0xe << 100), Some(group))
    }

    /// The EgressFirewall of ns1 is edited.
    pub fn set_firewall(&mut self, rules: &[Rule]) {
        self.give(firewalls(false, Some(firewall(rules))));
    }

    /// OVN's rows for `rules`, edited in place as ovn-kubernetes does: NB first, SB after.
    pub fn set_ovn(&mut self, rules: &[Rule]) {
        self.set_nb(rules);
        self.set_sb(rules);
    }

    /// The ACLs of `rules`.
    pub fn set_nb(&mut self, rules: &[Rule]) {
        self.give(Input::Nb(NbUpdate {
            acls: acls(rules),
            ..NbUpdate::default()
        }));
    }

    /// The logical flows of `rules`.
    pub fn set_sb(&mut self, rules: &[Rule]) {
        self.give(Input::Sb(SbUpdate {
            logical_flows: logical_flows(rules),
            ..SbUpdate::default()
        }));
    }

    // Answers.

    /// A pod of ns1 is told that a name leads to these addresses.
    pub fn answer(&mut self, pod: &str, name: &str, addresses: &[[u8; 4]], ttl: u32) {
        let ifindex = ifindex_of(self.pods[&format!("ns1_{pod}")]);
        let bytes = self.to_pod(ifindex, answer_frame(name, addresses, ttl));
        self.frame(ifindex, &bytes);
    }

    /// A frame of IPv4, addressed to the pod at this interface.
    pub fn to_pod(&self, ifindex: u32, mut bytes: Vec<u8>) -> Vec<u8> {
        // The last octet of the destination, behind Ethernet (RFC 791, section 3.1).
        const AT: usize = 14 + 19;
        if let (Some(host), Some(octet)) = (self.hosts.get(&ifindex), bytes.get_mut(AT)) {
            *octet = *host;
        }
        bytes
    }

    /// A frame passes the kernel. The agent sees it 50 µs later.
    pub fn frame(&mut self, ifindex: u32, bytes: &[u8]) {
        if let Some(captured) = self.captured(ifindex, bytes) {
            self.hand_in(captured);
        }
    }

    /// A frame passes the kernel. Returns what the agent is to see 50 µs later, if it is to see the frame.
    pub fn captured<'b>(&mut self, ifindex: u32, bytes: &'b [u8]) -> Option<Frame<'b>> {
        let captured_at = self.now;
        self.now = self.now + Duration::from_micros(50);
        if !self.kernel.passes(ifindex, bytes) {
            self.kernel
                .deferred
                .push((ifindex, captured_at, bytes.into()));
            if !self.kernel.recorded.contains(&ifindex) {
                return None;
            }
        }
        let opened = self.open_in_kernel(ifindex, bytes);
        Some(Frame {
            opened,
            ..frame(ifindex, captured_at, bytes)
        })
    }

    /// A frame comes that the kernel has let through.
    pub fn passed(&mut self, ifindex: u32, captured_at: Timestamp, bytes: &[u8]) {
        self.hand_in(frame(ifindex, captured_at, bytes));
    }

    /// The agent sees a frame, and its commands are carried out.
    pub fn hand_in(&mut self, frame: Frame<'_>) {
        if self.engine.handle_frame(frame, self.now) {
            let Frame {
                ifindex,
                captured_at,
                bytes,
                ..
            } = frame;
            self.kernel
                .deferred
                .push((ifindex, captured_at, bytes.into()));
        }
        self.obey();
    }

    // What came of it.

    /// What the switch lets through, or denies, by rules: source, destination, priority, in order.
    pub fn open(&self) -> Vec<(String, String, u16)> {
        let mut of_groups: BTreeMap<Ends, Vec<u16>> = BTreeMap::new();
        for key in self.of_rules() {
            let of_group = of_groups.entry(key.matches.ends).or_default();
            of_group.push(key.priority);
        }
        let mut open: Vec<(IpAddr, IpAddr, u16)> = Vec::new();
        for (src, dst, tag) in self.tagged() {
            let is_ipv6 = dst.is_ipv6();
            let of_group = of_groups.get(&Ends::Tagged { tag, is_ipv6 });
            let priorities = of_group.into_iter().flatten();
            open.extend(priorities.map(|priority| (src, dst, *priority)));
        }
        open.sort_by_key(|(src, dst, priority)| (*priority, *src, *dst));
        let open = open.into_iter();
        open.map(|(src, dst, priority)| (src.to_string(), dst.to_string(), priority))
            .collect()
    }

    /// The tags that packets get in the table of the rules: source, destination, tag. A flow comes before a mark.
    pub fn tagged(&self) -> Vec<(IpAddr, IpAddr, Tag)> {
        let mut tagged = BTreeMap::new();
        let mask = self.engine.mark_mask().unwrap_or_default();
        for (host, scope) in self.scopes_of_marks(mask) {
            for ((ifindex, dst), (mark, until, _)) in &self.marks {
                if self.hosts.get(ifindex) == Some(&host) && *until > self.now {
                    let src = match dst {
                        IpAddr::V4(_) => IpAddr::from([10, 244, 0, host]),
                        IpAddr::V6(_) => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, host.into()]),
                    };
                    let number = (mark >> mask.trailing_zeros()) as u16;
                    tagged.insert((src, *dst), Tag::new(scope, number));
                }
            }
        }
        for (key, (cookie, _)) in &self.switch {
            if let (Ends::Addresses(addresses), Some(tag)) = (key.matches.ends, cookie.tag()) {
                tagged.insert((addresses.src(), addresses.dst()), tag);
            }
        }
        let tagged = tagged.into_iter();
        tagged.map(|((src, dst), tag)| (src, dst, tag)).collect()
    }

    /// The pods whose packets get tags by their marks: the last octets of their addresses, and the scopes of the tags.
    fn scopes_of_marks(&self, mask: u32) -> Vec<(u8, u16)> {
        let flows = self.switch.iter();
        let flows = flows.filter(|(key, _)| key.matches.ends == Ends::Untranslated);
        let scopes = flows.filter_map(|(key, (cookie, _))| {
            let port = key.matches.registers.get(&14)?.value();
            let host = u8::try_from(port).ok()?;
            Some((host, scope_of_marks(*cookie, key.table, mask)?))
        });
        scopes.collect()
    }

    /// The flows in the switch that do what rules say.
    pub fn of_rules(&self) -> impl Iterator<Item = &FlowKey> {
        let keys = self.switch.keys();
        keys.filter(|key| matches!(key.matches.ends, Ends::Tagged { .. }))
    }

    /// The flows in the switch that give tags to packets between two addresses.
    pub fn of_addresses(&self) -> impl Iterator<Item = &FlowKey> {
        let keys = self.switch.keys();
        keys.filter(|key| key.matches.ends.dst().is_some())
    }

    /// How many of them there are.
    pub fn own(&self) -> usize {
        self.of_addresses().count()
    }

    /// The flows in the switch in which tags and marks end.
    pub fn tags_ends(&self) -> impl Iterator<Item = &FlowKey> {
        let keys = self.switch.keys();
        keys.filter(|key| key.table == self.tags_end)
    }

    /// The destinations that the switch lets through.
    pub fn destinations(&self) -> BTreeSet<String> {
        self.open().into_iter().map(|(_, dst, _)| dst).collect()
    }

    /// Flow changes since the last call, batch by batch, without the sentinel flows; and whether each
    /// batch was atomic.
    pub fn batches(&mut self) -> Vec<(bool, Vec<FlowChange>)> {
        self.log
            .drain(..)
            .filter_map(|command| match command {
                Command::Apply {
                    atomic,
                    mut changes,
                    ..
                } => {
                    changes.retain(|change| !is_for_sentinel(change));
                    (!changes.is_empty()).then_some((atomic, changes))
                }
                _ => None,
            })
            .collect()
    }

    /// The limits that were reported since the last look at the reports.
    pub fn limits_reported(&mut self) -> Vec<String> {
        let reports = std::mem::take(&mut self.reports);
        let limits = reports.into_iter().filter_map(|report| match report {
            Report::LimitReached {
                namespace,
                port,
                limit,
                max,
            } => Some(match limit {
                Limit::AddressesOfName(name) => format!("{namespace}: {name} of {port}, {max}"),
                Limit::AddressesOfPod => format!("{namespace}: {port}, {max}"),
                limit => format!("{namespace}: {limit:?} of {port}, {max}"),
            }),
            _ => None,
        });
        limits.collect()
    }
}

/// The sentinel flow that a flow depends on.
pub fn sentinel_of(key: &FlowKey, cookie: Cookie) -> Sentinel {
    Sentinel {
        table: key.table,
        cookie,
    }
}

/// Whether a change is one of a sentinel flow.
pub fn is_for_sentinel(change: &FlowChange) -> bool {
    match change {
        FlowChange::Add(key, _) | FlowChange::Delete(key, _) => Sentinel::of(key).is_some(),
        FlowChange::Renew(body) => body.cookie.is_of_sentinel(),
    }
}
