//! Stories about one node, told in inputs and checked in commands.

mod blocked;
mod denied;
mod hold;
mod hostile;
mod model;
mod refused;
mod restore;
mod sentinels;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query},
    rr::{Name, RData, Record, RecordType, rdata::A},
};

use dnsflow_common::walk::{self, Packet};

use super::*;
use crate::{
    blocked::BlockedConnection,
    dns::Answer,
    firewall::{Destination, Firewall, FirewallId, FirewallUpdate, Rule, RuleAction},
    flow::{Addresses, Cookie, FlowChange, FlowKey, InstalledFlow, Protocol, Sentinel, Transport},
    input::{
        BatchError, BatchId, CookieCount, FlowQuestion, FlowReply, FoundFlow, Frame,
        LOGICAL_FLOW_SAMPLE_MAX, NameSetId,
    },
    limits::{COMPARE_INTERVAL, COUNTERS_DELAY_MAX},
    name::DomainName,
    ovn::{
        hash::{Family, address_set_hashes},
        rows::{
            Acl, Datapath, Interface, InterfaceUpdate, LogicalFlow, LogicalSwitch, MacAddress,
            NbUpdate, Pipeline, PortBinding, PortGroup, RowId, SbUpdate,
        },
    },
    report::{Limit, Severity},
    revalidation::Path,
    rules::ACL_PRIORITY_OFFSET,
};

fn frame(ifindex: u32, captured_at: Timestamp, bytes: &[u8]) -> Frame<'_> {
    Frame {
        ifindex,
        captured_at,
        bytes,
        from_pod: false,
        held: false,
        gso_size: 0,
    }
}

const GROUP: &str = "a9633447981174624809";
const DATAPATH: RowId = RowId::new(0xd << 100);
const SB_GROUP: RowId = RowId::new(0xe << 100);
const BASE: u8 = 42;
/// The most rules that OVN has rows for here.
const ROWS: u32 = 20;

/// An engine with a node around it: a switch that obeys, and OVN rows as ovn-kubernetes writes
/// them for one namespace, `ns1`.
struct Node {
    engine: Engine,
    now: Timestamp,
    /// The switch's tables: what of ours is in there, and how many packets it has seen.
    switch: BTreeMap<FlowKey, (Cookie, u64)>,
    /// The sentinel flows in it, apart, with their cookies.
    sentinels: BTreeMap<Sentinel, Cookie>,
    /// Everything that was asked for, oldest first.
    log: Vec<Command>,
    reports: Vec<Report>,
    switch_answers: bool,
    pods: BTreeMap<String, RowId>,
    /// Whether ovn-controller has installed its flows.
    ovn_installed: bool,
    /// What ovn-controller made of logical flows, by cookie.
    ovn_actions: BTreeMap<u32, Vec<u8>>,
    /// How many packets OVN's flows have matched, by cookie.
    ovn_packets: BTreeMap<u32, u64>,
    kernel: Kernel,
    /// The connections that OVN has blocked.
    blocked: Vec<BlockedConnection>,
    /// The destinations of megaflows that drop; `None` where the datapath cannot be asked.
    dropping: Option<BTreeSet<IpAddr>>,
}

/// The name filter in the kernel, and what it deferred.
#[derive(Default)]
struct Kernel {
    name_sets: BTreeMap<u32, NameSetId>,
    names: BTreeMap<NameSetId, BTreeSet<DomainName>>,
    deferred: Vec<(u32, Timestamp, Vec<u8>)>,
    no_room: bool,
}

impl Kernel {
    /// Whether an answer at an interface leaves the kernel.
    fn passes(&self, ifindex: u32, bytes: &[u8]) -> bool {
        let Some(names) = self.name_sets.get(&ifindex).map(|id| &self.names[id]) else {
            return true;
        };
        if self.no_room {
            return true;
        }
        let Ok(Packet::UdpAnswer(message)) = walk::from_server(&bytes, &DnsPorts::DNS) else {
            return true;
        };
        let message = message.payload_of(bytes).expect("a whole message");
        let Ok(Answer { name, .. }) = Answer::decode(message) else {
            return true;
        };
        name.suffixes()
            .any(|suffix| names.iter().any(|name| name.wire() == suffix))
    }
}

impl Node {
    /// Nothing is known yet.
    fn bare() -> Self {
        Self {
            engine: Engine::new(Config::default()),
            now: Timestamp::from_nanos(1_000_000_000_000),
            switch: BTreeMap::new(),
            sentinels: BTreeMap::new(),
            log: vec![],
            reports: vec![],
            switch_answers: true,
            pods: BTreeMap::new(),
            ovn_installed: true,
            ovn_actions: BTreeMap::new(),
            ovn_packets: BTreeMap::new(),
            kernel: Kernel::default(),
            blocked: Vec::new(),
            dropping: None,
        }
    }

    /// Synced, with pod p1 (10.244.0.5) of ns1, and `rules` in force.
    fn with(rules: &[Rule]) -> Self {
        Self::bare().start(rules)
    }

    fn start(self, rules: &[Rule]) -> Self {
        let mut node = self;
        node.give(Input::SwitchUp);
        node.give(Input::Interfaces(InterfaceUpdate {
            reset: true,
            interfaces: vec![],
        }));
        node.give(Input::Firewalls(FirewallUpdate {
            reset: true,
            firewalls: vec![],
        }));
        node.give(Input::Nb(NbUpdate {
            reset: true,
            acls: vec![],
            ..NbUpdate::default()
        }));
        node.give(Input::Sb(SbUpdate {
            reset: true,
            datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
            ..SbUpdate::default()
        }));
        node.add_pod("p1", 5);
        node.set_firewall(rules);
        node.set_ovn(rules);
        // What is due at once.
        node.pass(Duration::ZERO);
        node.log.clear();
        node
    }

    fn give(&mut self, input: Input<'_>) {
        self.engine.handle(input, self.now);
        self.obey();
    }

    /// Lets time pass, with every deadline met on the way.
    fn pass(&mut self, time: Duration) {
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

    /// The paths of these on which a megaflow drops.
    fn dropping(&self, paths: &[Path]) -> Option<Vec<Path>> {
        let destinations = self.dropping.as_ref()?;
        let drops = |path: &&Path| destinations.contains(&path.addresses.dst());
        Some(paths.iter().filter(drops).cloned().collect())
    }

    /// Carries out the commands, as the edges would.
    fn obey(&mut self) {
        loop {
            self.engine.end_turn(self.now);
            self.reports.extend(self.engine.take_reports());
            let commands = self.engine.take_commands();
            if commands.is_empty() {
                return;
            }
            for command in commands {
                self.log.push(command.clone());
                let answer = match command {
                    Command::Attach { interface, .. } => {
                        let ifindex = ifindex_of(interface);
                        Some(Input::Attached { interface, ifindex })
                    }
                    Command::Apply {
                        batch,
                        changes,
                        count,
                        ..
                    } if self.switch_answers => {
                        for change in changes {
                            self.change_switch(change);
                        }
                        if !count.is_empty() {
                            let counted = self.counted(Some(batch), &count);
                            self.engine.handle(counted, self.now);
                        }
                        Some(Input::Applied {
                            batch,
                            result: Ok(()),
                        })
                    }
                    Command::Ask(FlowQuestion::Dump) if self.switch_answers => {
                        // As the switch does: some at a time, and the last may bring none.
                        for flows in self.dump().chunks(2) {
                            let (flows, more) = (flows.to_vec(), true);
                            let reply = FlowReply::Flows { flows, more };
                            self.engine.handle(Input::Reply(reply), self.now);
                        }
                        let (flows, more) = (Vec::new(), false);
                        Some(Input::Reply(FlowReply::Flows { flows, more }))
                    }
                    Command::WatchLogicalFlows { priorities } => {
                        Some(Input::LogicalFlowsWatched { priorities })
                    }
                    Command::SampleLogicalFlows { pipeline, table_id } => {
                        Some(Input::LogicalFlowSample {
                            pipeline,
                            table_id,
                            flows: vec![RowId::new(0x5eed << 96)],
                        })
                    }
                    Command::Ask(FlowQuestion::Count(cookies)) => {
                        Some(self.counted(None, &cookies))
                    }
                    Command::TrustSources { .. } => None,
                    Command::Ask(FlowQuestion::Find(cookies)) => {
                        Some(Input::Reply(FlowReply::Found(self.find(&cookies))))
                    }
                    Command::FilterNames { name_set, names } => {
                        self.kernel.names.insert(name_set, names);
                        None
                    }
                    Command::FilterInterface { ifindex, name_set } => {
                        self.kernel.name_sets.remove(&ifindex);
                        self.kernel
                            .name_sets
                            .extend(name_set.map(|id| (ifindex, id)));
                        None
                    }
                    Command::ForgetNames { name_set } => {
                        let in_use = self.kernel.name_sets.values().any(|used| *used == name_set);
                        assert!(!in_use, "an interface without its names");
                        self.kernel.names.remove(&name_set);
                        None
                    }
                    Command::FindBlocked => Some(Input::Blocked {
                        connections: self.blocked.clone(),
                        more: false,
                    }),
                    Command::Unblock(connections) => {
                        self.blocked
                            .retain(|blocked| !connections.contains(blocked));
                        Some(Input::Unblocked {
                            unblocked: connections.len(),
                            failed: 0,
                        })
                    }
                    Command::ReplayAnswers => {
                        for (ifindex, captured_at, bytes) in
                            std::mem::take(&mut self.kernel.deferred)
                        {
                            let frame = frame(ifindex, captured_at, &bytes);
                            if self.engine.replay(frame, self.now) {
                                self.kernel.deferred.push((ifindex, captured_at, bytes));
                            }
                        }
                        None
                    }
                    Command::FindDropping(paths) => Some(Input::Dropping(self.dropping(&paths))),
                    Command::Release(_)
                    | Command::Apply { .. }
                    | Command::Ask(FlowQuestion::Dump)
                    | Command::Detach { .. }
                    | Command::TrustResolvers(_)
                    | Command::MonitorTables(_) => None,
                };
                if let Some(answer) = answer {
                    self.engine.handle(answer, self.now);
                }
            }
        }
    }

    /// OVN's own flows: their actions are those that a test gave, else a drop.
    fn find(&self, cookies: &[u32]) -> Vec<FoundFlow> {
        let found = |&cookie: &u32| FoundFlow {
            cookie,
            table: BASE + 4,
            actions: self.ovn_actions.get(&cookie).cloned().unwrap_or_default(),
        };
        let cookies = cookies.iter().filter(|_| self.ovn_installed);
        cookies.map(found).collect()
    }

    /// What the switch says of OVN's flows with these cookies, one each.
    fn counted(&self, batch: Option<BatchId>, cookies: &[u32]) -> Input<'static> {
        let count = |&cookie: &u32| CookieCount {
            cookie,
            flows: 1,
            packets: self.ovn_packets.get(&cookie).copied().unwrap_or_default(),
        };
        let counts = cookies.iter().map(count).collect();
        Input::Reply(FlowReply::Counted { batch, counts })
    }

    fn change_switch(&mut self, change: FlowChange) {
        match change {
            FlowChange::Add(key, body) if let Some(sentinel) = Sentinel::of(&key) => {
                assert!(body.cookie.is_of_sentinel() && body.hard_timeout_s > 0);
                self.sentinels.insert(sentinel, body.cookie);
            }
            FlowChange::Delete(key, _) if let Some(sentinel) = Sentinel::of(&key) => {
                self.sentinels.remove(&sentinel);
                self.switch
                    .retain(|key, (cookie, _)| sentinel_of(key, *cookie) != sentinel);
            }
            FlowChange::Add(key, body) => {
                let sentinel = sentinel_of(&key, body.cookie);
                assert!(self.sentinels.contains_key(&sentinel), "it never goes");
                self.switch.insert(key, (body.cookie, 0));
            }
            FlowChange::Delete(key, cookie) => {
                if self
                    .switch
                    .get(&key)
                    .is_some_and(|(found, _)| *found == cookie)
                {
                    self.switch.remove(&key);
                }
            }
            FlowChange::Renew(_) => {}
        }
    }

    fn dump(&self) -> Vec<InstalledFlow> {
        let installed = |key: FlowKey, cookie: Cookie, packets: u64| InstalledFlow {
            key,
            cookie,
            packets,
        };
        let flows = self.switch.iter();
        let sentinels = self.sentinels.iter();
        flows
            .map(|(key, (cookie, packets))| installed(key.clone(), *cookie, *packets))
            .chain(sentinels.map(|(sentinel, cookie)| installed(sentinel.key(), *cookie, 0)))
            .collect()
    }

    fn add_pod(&mut self, name: &str, host: u8) {
        self.add_pod_as(
            name,
            host,
            &format!("uid-{name}"),
            RowId::new(0x100 + u128::from(host)),
        );
    }

    fn add_pod_as(&mut self, name: &str, host: u8, uid: &str, row: RowId) {
        self.add_interface(name, host, uid, row);
        self.add_logical_port(name, host, row);
    }

    fn add_interface(&mut self, name: &str, host: u8, uid: &str, row: RowId) {
        self.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, Some(interface(&format!("ns1_{name}"), host, uid)))],
        }));
    }

    fn add_logical_port(&mut self, name: &str, host: u8, row: RowId) {
        let port = format!("ns1_{name}");
        self.pods.insert(port.clone(), row);
        let update = SbUpdate {
            port_bindings: vec![(
                row,
                Some(PortBinding {
                    logical_port: port,
                    datapath: DATAPATH,
                    tunnel_key: u32::from(host),
                    namespace: Some("ns1".into()),
                }),
            )],
            port_groups: vec![(SB_GROUP, Some(self.group()))],
            ..SbUpdate::default()
        };
        self.give(Input::Sb(update));
    }

    fn remove_interface(&mut self, name: &str) {
        let row = self.pods[&format!("ns1_{name}")];
        self.give(Input::Interfaces(InterfaceUpdate {
            reset: false,
            interfaces: vec![(row, None)],
        }));
    }

    fn group(&self) -> PortGroup {
        PortGroup {
            name: GROUP.into(),
            ports: self.pods.keys().cloned().collect(),
        }
    }

    fn set_firewall(&mut self, rules: &[Rule]) {
        self.give(Input::Firewalls(FirewallUpdate {
            reset: false,
            firewalls: vec![(
                FirewallId {
                    namespace: "ns1".into(),
                    name: "default".into(),
                },
                Some(Firewall {
                    rules: rules.to_vec(),
                    subdomains: None,
                    refusal: None,
                }),
            )],
        }));
    }

    /// OVN's rows for `rules`, edited in place as ovn-kubernetes does: NB first, SB after.
    fn set_ovn(&mut self, rules: &[Rule]) {
        self.set_nb(rules);
        self.set_sb(rules);
    }

    fn set_nb(&mut self, rules: &[Rule]) {
        let acls = (0..ROWS).map(|i| (acl_row(i), acl(i, rules))).collect();
        self.give(Input::Nb(NbUpdate {
            acls,
            ..NbUpdate::default()
        }));
    }

    fn set_sb(&mut self, rules: &[Rule]) {
        let logical_flows = (0..ROWS)
            .map(|i| {
                (
                    RowId::new((0xf00 + u128::from(i)) << 96),
                    logical_flow(i, rules),
                )
            })
            .collect();
        self.give(Input::Sb(SbUpdate {
            logical_flows,
            ..SbUpdate::default()
        }));
    }

    /// The limits that were told to have been reached since the last look.
    fn limits_reported(&mut self) -> Vec<String> {
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

    fn answer(&mut self, pod: &str, name: &str, addresses: &[[u8; 4]], ttl: u32) {
        let ifindex = ifindex_of(self.pods[&format!("ns1_{pod}")]);
        self.frame(ifindex, &answer_frame(name, addresses, ttl));
    }

    fn frame(&mut self, ifindex: u32, bytes: &[u8]) {
        let captured_at = self.now;
        self.now = self.now + Duration::from_micros(50);
        if !self.kernel.passes(ifindex, bytes) {
            self.kernel
                .deferred
                .push((ifindex, captured_at, bytes.into()));
            return;
        }
        self.give(Input::Frame(frame(ifindex, captured_at, bytes)));
    }

    /// What the switch lets through: source, destination, priority, in order.
    fn open(&self) -> Vec<(String, String, u16)> {
        self.switch
            .keys()
            .map(|key| {
                let (src, dst): (IpAddr, IpAddr) = match key.matches.addresses {
                    Addresses::V4 { src, dst } => (src.into(), dst.into()),
                    Addresses::V6 { src, dst } => (src.into(), dst.into()),
                };
                (src.to_string(), dst.to_string(), key.priority)
            })
            .collect()
    }

    fn destinations(&self) -> BTreeSet<String> {
        self.open().into_iter().map(|(_, dst, _)| dst).collect()
    }

    /// Flow changes since the last call, batch by batch.
    fn batches(&mut self) -> Vec<(bool, Vec<FlowChange>)> {
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
}

fn ifindex_of(row: RowId) -> u32 {
    row.to_string()[30..].parse().unwrap_or(1)
}

fn interface(port: &str, host: u8, uid: &str) -> Interface {
    Interface {
        name: format!("veth-{port}").into(),
        iface_id: port.into(),
        iface_id_ver: Some(uid.into()),
        addresses: vec![Ipv4Addr::new(10, 244, 0, host).into()],
        mac: MacAddress::new([0x0a, 0x58, 10, 244, 0, host]),
        network: None,
        sandbox: Some(format!("sandbox-{uid}")),
        ofport: None,
        ifindex: None,
        policing_kbps: 0,
    }
}

/// What a flow depends on.
fn sentinel_of(key: &FlowKey, cookie: Cookie) -> Sentinel {
    Sentinel {
        table: key.table,
        cookie,
    }
}

fn is_for_sentinel(change: &FlowChange) -> bool {
    match change {
        FlowChange::Add(key, _) | FlowChange::Delete(key, _) => Sentinel::of(key).is_some(),
        FlowChange::Renew(body) => body.cookie.is_of_sentinel(),
    }
}

fn allow(name: &str) -> Rule {
    Rule {
        action: RuleAction::Allow,
        destination: Destination::Name(name.parse().expect("a name")),
        ports: vec![],
    }
}

fn deny_all() -> Rule {
    Rule {
        action: RuleAction::Deny,
        destination: Destination::Cidr("0.0.0.0/0".parse().expect("a network")),
        ports: vec![],
    }
}

fn acl_row(index: u32) -> RowId {
    RowId::new((0xac1_0000 + u128::from(index)) << 96)
}

fn acl(index: u32, rules: &[Rule]) -> Option<Acl> {
    let rule = rules.get(index as usize)?;
    let to = match &rule.destination {
        Destination::Name(name) => format!("$a{}", address_set_hashes(name, Family::V4)[0]),
        _ => "0.0.0.0/0".into(),
    };
    Some(Acl {
        namespace: "ns1".into(),
        rule_index: index,
        priority: 10_000 - index as u16,
        matches: format!("(ip4.dst == {to}) && inport == @{GROUP}{}", ports_of(rule)),
        action: match rule.action {
            RuleAction::Allow => "allow".into(),
            RuleAction::Deny => "drop".into(),
        },
    })
}

/// The end of an ACL's match for the ports of a rule.
fn ports_of(rule: &Rule) -> String {
    let ports = rule.ports.iter().map(|Transport { protocol, port }| {
        let protocol = match protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        };
        match port {
            Some(port) => format!("({protocol} && ( {protocol}.dst == {port} ))"),
            None => format!("({protocol})"),
        }
    });
    let ports: Vec<_> = ports.collect();
    if ports.is_empty() {
        return String::new();
    }
    format!(" && ({})", ports.join(" || "))
}

fn logical_flow(index: u32, rules: &[Rule]) -> Option<LogicalFlow> {
    let acl = acl(index, rules)?;
    Some(LogicalFlow {
        pipeline: Pipeline::Egress,
        table_id: 4,
        priority: acl.priority + ACL_PRIORITY_OFFSET,
        matches: format!("reg0[8] == 1 && ({})", acl.matches),
        actions: "next;".into(),
        stage_hint: Some(acl_row(index).prefix()),
    })
}

/// Ethernet, IPv4 and UDP around a DNS answer.
fn answer_frame(name: &str, addresses: &[[u8; 4]], ttl: u32) -> Vec<u8> {
    let name = Name::from_ascii(format!("{name}.")).expect("a name");
    let mut message = Message::new(7, MessageType::Response, OpCode::Query);
    message.queries = vec![Query::query(name.clone(), RecordType::A)];
    message.answers = addresses
        .iter()
        .map(|address| Record::from_rdata(name.clone(), ttl, RData::A(A((*address).into()))))
        .collect();
    udp_frame(&message.to_vec().expect("encodes"))
}

fn udp_frame(payload: &[u8]) -> Vec<u8> {
    let udp_len = (8 + payload.len()) as u16;
    let mut frame = vec![0; 12];
    frame.extend([0x08, 0x00, 0x45, 0]);
    frame.extend((20 + udp_len).to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 96, 0, 10, 10, 244, 0, 5]);
    frame.extend([0, 53, 0x90, 0]);
    frame.extend(udp_len.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    frame
}

/// [`CacheLimits`] as they are by default.
const MIN_TTL: Duration = Duration::from_secs(60);
const IDLE_GRACE: Duration = Duration::from_secs(60);

const ADDRESS: [u8; 4] = [203, 0, 113, 1];
const OTHER: [u8; 4] = [203, 0, 113, 2];

#[test]
fn an_answer_opens_its_addresses_for_the_pod_at_the_rules_place() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS], 300);
    assert_eq!(
        node.open(),
        [("10.244.0.5".into(), "203.0.113.1".into(), 11_000)]
    );
    let key = node.switch.keys().next().expect("a flow");
    assert_eq!(key.table, BASE + 4);
    assert_eq!(key.matches.metadata, Some(3));
    let registers: Vec<_> = key
        .matches
        .registers
        .iter()
        .map(|(register, bits)| (*register, bits.value(), bits.mask()))
        .collect();
    assert_eq!(registers, [(0, 0x100, 0x100), (14, 5, u32::MAX)]);
    let opened = node.reports.iter().find_map(|report| match report {
        Report::Opened {
            namespace,
            port,
            name,
            rules,
            activation,
            ..
        } => Some((
            namespace.as_str(),
            port.as_str(),
            name.to_string(),
            rules.clone(),
            *activation,
        )),
        _ => None,
    });
    assert_eq!(
        opened,
        Some((
            "ns1",
            "ns1_p1",
            "www.example.com".into(),
            vec![0],
            Duration::from_micros(50)
        ))
    );
}

#[test]
fn the_same_answer_again_changes_nothing() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS, OTHER], 300);
    assert_eq!(node.batches().len(), 1);
    node.answer("p1", "www.example.com", &[OTHER, ADDRESS], 300);
    assert_eq!(node.batches(), []);
    assert_eq!(node.engine.counters().answers_known, 1);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    assert_eq!(node.batches(), [], "another name, the same flow");
}

#[test]
fn a_name_that_no_rule_mentions_opens_nothing() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    for name in ["notexample.com", "example.com.evil.test", "com"] {
        node.answer("p1", name, &[ADDRESS], 300);
    }
    assert_eq!(node.batches(), []);
    assert_eq!(node.kernel.deferred.len(), 3, "no wake-up");
    // Where there is no room for the filter, the engine sees them.
    node.kernel.no_room = true;
    node.answer("p1", "notexample.com", &[ADDRESS], 300);
    assert_eq!(node.batches(), []);
    assert_eq!(node.engine.counters().answers_unmatched, 1);
    assert_eq!(node.engine.cache.entries_mut().count(), 0);
}

#[test]
fn the_networks_that_ovn_knows_are_not_opened() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let switch = |networks: &[&str]| LogicalSwitch {
        network: None,
        is_primary: false,
        networks: networks
            .iter()
            .map(|network| network.parse().expect("a network"))
            .collect(),
    };
    let cidr = Acl {
        matches: format!(
            "(ip4.dst == 0.0.0.0/0 && ip4.dst != 198.51.0.0/16) && inport == @{GROUP}"
        ),
        ..acl(1, &[allow("example.com"), deny_all()]).expect("an ACL")
    };
    node.give(Input::Nb(NbUpdate {
        acls: vec![(acl_row(7), Some(cidr))],
        switches: vec![(
            RowId::new(9),
            Some(switch(&["203.0.112.0/24", "203.0.113.0/24"])),
        )],
        ..NbUpdate::default()
    }));
    let networks = ["198.51.0.0/16", "203.0.112.0/23"].map(|text| text.parse().expect("a network"));
    assert!(node.reports.contains(&Report::ClusterNetworks {
        networks: networks.to_vec(),
        left_out: 0,
    }));
    node.batches();
    node.answer("p1", "example.com", &[ADDRESS, [198, 51, 100, 1]], 300);
    assert_eq!(node.batches(), []);
    let refused: Vec<_> = node.engine.refused().iter().collect();
    assert!(refused.contains(&(Refused::Cluster, 2)), "{refused:?}");
    // The switch and the rule are gone.
    node.give(Input::Nb(NbUpdate {
        acls: vec![(acl_row(7), None)],
        switches: vec![(RowId::new(9), None)],
        ..NbUpdate::default()
    }));
    node.answer("p1", "example.com", &[ADDRESS, [198, 51, 100, 1]], 300);
    assert_eq!(node.destinations().len(), 2);
}

#[test]
fn only_the_pod_that_asked_gets_the_address() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    node.answer("p2", "example.com", &[ADDRESS], 300);
    assert_eq!(
        node.open(),
        [("10.244.0.6".into(), "203.0.113.1".into(), 11_000)]
    );
}

#[test]
fn both_networks_of_a_pod_get_the_address() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    // The second interface of the same sandbox: asked on one, connected on the other.
    node.add_pod_as("p1udn", 7, "uid-p1", RowId::new(0x107));
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let sources: Vec<_> = node.open().into_iter().map(|(src, ..)| src).collect();
    assert_eq!(sources, ["10.244.0.5", "10.244.0.7"]);
}

#[test]
fn a_rule_that_goes_takes_its_flows_with_it() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    node.set_firewall(&[deny_all()]);
    assert_eq!(node.destinations().len(), 1, "as long as OVN enforces it");
    node.set_nb(&[deny_all()]);
    assert_eq!(node.destinations(), BTreeSet::new());
}

#[test]
fn a_firewall_edited_after_the_lookup_applies_to_it() {
    let mut node = Node::with(&[deny_all()]);
    node.answer("p1", "www.example.com", &[ADDRESS], 300);
    assert_eq!(node.destinations(), BTreeSet::new());
    let rules = [allow("example.com"), deny_all()];
    node.set_firewall(&rules);
    assert_eq!(node.destinations(), BTreeSet::new(), "OVN has no ACL yet");
    node.set_ovn(&rules);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
}

#[test]
fn a_moved_rule_moves_its_flows_in_one_bundle() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let rules = [allow("new.test"), allow("example.com"), deny_all()];
    node.log.clear();
    node.set_firewall(&rules);
    assert_eq!(node.batches(), [], "OVN still has it where it was");
    node.set_nb(&rules);
    node.log.clear();
    node.set_sb(&rules);
    let batches = node.batches();
    let [(true, changes)] = &batches[..] else {
        panic!("one atomic batch: {batches:?}");
    };
    assert_eq!(changes.len(), 2);
    assert_eq!(
        node.open(),
        [("10.244.0.5".into(), "203.0.113.1".into(), 10_999)]
    );
}

#[test]
fn a_pod_that_goes_takes_its_flows_with_it() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    node.remove_interface("p1");
    assert_eq!(node.switch.len(), 0);
    assert!(node.log.contains(&Command::Detach {
        interface: RowId::new(0x105)
    }));
}

#[test]
fn a_recreated_pod_inherits_nothing() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    // The new pod's row comes before the old one goes, with the same port name and address.
    node.add_pod_as("p1", 5, "uid-new", RowId::new(0x205));
    assert_eq!(node.switch.len(), 0);
    node.answer("p1", "example.com", &[OTHER], 300);
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(RowId::new(0x105), None)],
    }));
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
}

#[test]
fn nothing_is_written_before_the_table_is_known() {
    let mut node = Node::bare();
    node.ovn_installed = false;
    let mut node = node.start(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    assert_eq!(node.batches(), []);
    node.ovn_installed = true;
    node.pass(Duration::from_secs(1));
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
}

#[test]
fn the_table_is_found_beside_many_rules_that_ovn_installs_nothing_for() {
    let mut node = Node::with(&[]);
    let names = (0..2 * LOGICAL_FLOW_SAMPLE_MAX).map(|n| allow(&format!("n{n}.test")));
    let rules: Vec<Rule> = names.chain([deny_all()]).collect();
    let flows = (0..rules.len() as u32).filter_map(|i| {
        let row = RowId::new((0xf00 + u128::from(i)) << 96);
        Some((row, Some(logical_flow(i, &rules)?)))
    });
    node.give(Input::Sb(SbUpdate {
        logical_flows: flows.collect(),
        ..SbUpdate::default()
    }));
    let mut out = Output::default();
    node.engine.policy.sampled(4, vec![], node.now, &mut out);
    let [Command::Ask(FlowQuestion::Find(cookies))] = &out.commands[..] else {
        panic!("nothing to look for");
    };
    // No address set is empty in the last rule.
    let last = 0xf00 + rules.len() as u32 - 1;
    assert!(cookies.contains(&last), "{cookies:x?}");
}

#[test]
fn without_ovn_the_static_flow_says_where() {
    let mut node = Node::bare();
    let profile = "table=44,priority=10000,reg0=0x100/0x100,actions=resubmit(,45)";
    node.engine = Engine::new(Config {
        profile: Some(profile.parse().expect("a profile")),
        ..Config::default()
    });
    node.give(Input::SwitchUp);
    node.give(Input::Firewalls(FirewallUpdate {
        reset: true,
        firewalls: vec![],
    }));
    node.set_firewall(&[allow("example.com"), deny("bad.test"), deny_all()]);
    let row = RowId::new(0x105);
    node.pods.insert("ns1_p1".into(), row);
    let mut pod = interface("ns1_p1", 5, "uid-p1");
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(row, Some(pod.clone()))],
    }));
    assert!(
        node.reports
            .iter()
            .any(|report| matches!(report, Report::Ready { .. }))
    );
    node.answer("p1", "www.example.com", &[ADDRESS], 300);
    assert_eq!(node.open(), [], "the port has no number yet");
    pod.ofport = Some(7);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(row, Some(pod))],
    }));
    node.answer("p1", "bad.test", &[OTHER], 300);
    assert_eq!(
        node.open(),
        [
            ("10.244.0.5".into(), "203.0.113.2".into(), 9_999),
            ("10.244.0.5".into(), "203.0.113.1".into(), 10_000)
        ]
    );
    for key in node.switch.keys() {
        assert_eq!((key.table, key.matches.in_port), (44, Some(7)));
        assert_eq!(key.matches.metadata, None);
    }
}

#[test]
fn a_switch_that_was_away_is_brought_up_to_date() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    node.give(Input::SwitchDown);
    node.switch.clear();
    node.log.clear();
    node.answer("p1", "example.com", &[OTHER], 300);
    assert_eq!(node.batches(), []);
    node.give(Input::SwitchUp);
    assert_eq!(node.destinations().len(), 2);
    assert!(node.reports.contains(&Report::Resynced {
        added: 2,
        removed: 0,
        adopted: 0
    }));
}

#[test]
fn a_wipe_is_restored_in_one_bundle() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 300);
    node.log.clear();
    let wiped = std::mem::take(&mut node.switch);
    for (key, (cookie, _)) in &wiped {
        node.give(Input::FlowLost {
            key: key.clone(),
            cookie: *cookie,
        });
    }
    assert_eq!(node.batches(), [], "the rest of the wipe is waited for");
    node.pass(Duration::from_millis(30));
    assert_eq!(node.switch.len(), 2);
    assert_eq!(node.batches().len(), 1);
    assert!(node.reports.contains(&Report::Restored { flows: 2 }));
}

#[test]
fn a_flow_of_ours_that_nobody_wants_is_removed_by_the_comparison() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let (mut key, flow) = node.switch.pop_first().expect("a flow");
    node.switch.insert(key.clone(), flow);
    key.priority = 7;
    node.switch.insert(key, flow);
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.open().len(), 1);
    assert_eq!(node.open()[0].2, 11_000);
}

#[test]
fn a_flow_that_vanished_unseen_is_restored_by_the_comparison() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    node.switch.clear();
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.switch.len(), 1);
}

#[test]
fn a_comparison_does_not_rewrite_what_agrees() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    node.log.clear();
    node.pass(5 * COMPARE_INTERVAL);
    assert_eq!(node.batches(), []);
}

#[test]
fn an_address_out_of_use_goes_after_its_ttl() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 1);
    node.pass(MIN_TTL - Duration::from_secs(1));
    assert_eq!(node.switch.len(), 1, "the shortest cache entry");
    node.pass(COMPARE_INTERVAL + IDLE_GRACE);
    assert_eq!(node.switch.len(), 0);
    assert_eq!(node.engine.flow_count(), 0);
    assert!(node.engine.cache.is_idle());
    // It opens again as if for the first time.
    node.answer("p1", "example.com", &[ADDRESS], 1);
    assert_eq!(node.switch.len(), 1);
}

#[test]
fn an_address_in_use_stays() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 1);
    for _ in 0..20 {
        for (_, packets) in node.switch.values_mut() {
            *packets += 1;
        }
        node.pass(IDLE_GRACE / 2);
        assert_eq!(node.switch.len(), 1);
    }
    node.pass(2 * IDLE_GRACE + 2 * COMPARE_INTERVAL);
    assert_eq!(node.switch.len(), 0);
}

#[test]
fn a_new_answer_prolongs_the_entry() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    for _ in 0..10 {
        node.answer("p1", "example.com", &[ADDRESS], 60);
        node.pass(Duration::from_secs(50));
        assert_eq!(node.switch.len(), 1);
    }
    assert_eq!(node.engine.counters().flows_added, 1);
}

#[test]
fn flows_of_an_earlier_run_are_taken_over_without_a_snapshot() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    before.answer("p1", "example.com", &[ADDRESS], 300);
    let (mut stray, flow) = before.switch.clone().pop_first().expect("a flow");
    stray.priority = 7;
    before.switch.insert(stray, flow);
    let mut after = after_restart(&mut before, &[], &rules);
    assert_eq!(after.open().len(), 1);
    assert_eq!(after.open()[0].2, 11_000);
    let writes: Vec<_> = after
        .batches()
        .into_iter()
        .flat_map(|(_, changes)| changes)
        .collect();
    assert!(
        matches!(&writes[..], [FlowChange::Delete(key, _)] if key.priority == 7),
        "nothing is flushed: {writes:?}"
    );
    assert!(after.reports.contains(&Report::Resynced {
        added: 0,
        removed: 1,
        adopted: 1
    }));
    // Asked for again, it is an ordinary cache entry; else it ends when out of use.
    after.pass(MIN_TTL + IDLE_GRACE + 2 * COMPARE_INTERVAL);
    assert_eq!(after.switch.len(), 0);
}

#[test]
fn readiness_means_that_everything_was_read_and_compared() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let ready = |node: &Node| {
        node.reports
            .iter()
            .filter(|report| matches!(report, Report::Ready { .. }))
            .count()
    };
    assert_eq!(ready(&node), 1);
    node.give(Input::SwitchDown);
    node.give(Input::SwitchUp);
    assert_eq!(ready(&node), 2);
}

#[test]
fn problems_are_told_once_and_withdrawn() {
    let mut node = Node::with(&[deny_all()]);
    node.reports.clear();
    node.set_firewall(&[allow("example.com"), deny_all()]);
    node.set_firewall(&[allow("example.com"), deny_all()]);
    let problems: Vec<_> = node
        .reports
        .drain(..)
        .filter_map(|report| match report {
            Report::Problems { problems, .. } => Some(problems),
            _ => None,
        })
        .collect();
    assert_eq!(problems.len(), 1);
    assert_eq!(
        problems[0][&0],
        (
            "waiting for OVN's ACL for dnsName `example.com`".to_owned(),
            Severity::Waiting
        )
    );
    node.set_ovn(&[allow("example.com"), deny_all()]);
    let last = node.reports.iter().rev().find_map(|report| match report {
        Report::Problems { problems, .. } => Some(problems.clone()),
        _ => None,
    });
    assert_eq!(last, Some(BTreeMap::new()));
}

#[test]
fn what_was_told_is_no_news_at_another_index_either() {
    let mut node = Node::with(&[deny("a.test"), deny("b.test")]);
    let news = |node: &mut Node| {
        let reports = std::mem::take(&mut node.reports);
        let news = reports.into_iter().filter_map(|report| match report {
            Report::Problems { news, problems, .. } => Some((news, problems.len())),
            _ => None,
        });
        news.last()
    };
    assert_eq!(news(&mut node), Some(([0, 1].into(), 2)));
    let edited = [deny("c.test"), deny("a.test"), deny("b.test")];
    node.set_firewall(&edited);
    node.set_ovn(&edited);
    assert_eq!(news(&mut node), Some(([0].into(), 3)));
    let fewer = [deny("c.test"), deny("b.test")];
    node.set_firewall(&fewer);
    node.set_ovn(&fewer);
    assert_eq!(news(&mut node), Some((BTreeSet::new(), 2)));
}

#[test]
fn that_no_dns_server_is_trusted_is_told_once_the_cluster_was_asked() {
    let mut node = Node::with(&[]);
    let told = |node: &mut Node| {
        let reports = std::mem::take(&mut node.reports);
        let told = reports.into_iter().filter_map(|report| match report {
            Report::Trusting(resolvers) => Some(resolvers.len()),
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    assert_eq!(told(&mut node), [] as [usize; 0]);
    for expected in [&[0][..], &[]] {
        node.give(Input::Resolvers(BTreeSet::new()));
        assert_eq!(told(&mut node), expected);
    }
    let one = Resolver {
        address: Ipv4Addr::new(10, 96, 0, 10).into(),
        port: 53,
    };
    for expected in [&[1][..], &[]] {
        node.give(Input::Resolvers([one].into()));
        assert_eq!(told(&mut node), expected);
    }
    node.give(Input::Resolvers(BTreeSet::new()));
    assert_eq!(told(&mut node), [0]);
}

#[test]
fn nothing_is_waited_for_in_a_namespace_without_a_pod_here() {
    let mut node = Node::with(&[deny_all()]);
    let id = FirewallId {
        namespace: "ns2".into(),
        name: FIREWALL_NAME.into(),
    };
    let invalid = Rule {
        destination: Destination::Invalid("bad".into()),
        ..deny_all()
    };
    let firewall = Firewall {
        rules: vec![allow("example.com"), invalid],
        subdomains: None,
        refusal: None,
    };
    node.give(Input::Firewalls(FirewallUpdate {
        reset: false,
        firewalls: vec![(id, Some(firewall))],
    }));
    let told = |node: &mut Node| {
        let reports = std::mem::take(&mut node.reports);
        let of_ns2 = reports.into_iter().filter_map(|report| match report {
            Report::Problems {
                namespace,
                problems,
                ..
            } if namespace == "ns2" => Some(problems.into_keys().collect::<Vec<u32>>()),
            _ => None,
        });
        of_ns2.collect::<Vec<_>>()
    };
    assert_eq!(told(&mut node), [[1]]);
    let row = RowId::new(0x222);
    let bind = |node: &mut Node, namespace: Option<&str>| {
        let binding = namespace.map(|namespace| PortBinding {
            logical_port: "ns2_p1".into(),
            datapath: DATAPATH,
            tunnel_key: 22,
            namespace: Some(namespace.into()),
        });
        node.give(Input::Sb(SbUpdate {
            port_bindings: vec![(row, binding)],
            ..SbUpdate::default()
        }));
    };
    bind(&mut node, Some("ns2"));
    assert_eq!(told(&mut node), [[0, 1]]);
    bind(&mut node, None);
    assert_eq!(told(&mut node), [[1]]);
}

#[test]
fn what_is_no_usable_answer_is_counted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let ifindex = ifindex_of(RowId::new(0x105));
    let good = answer_frame("example.com", &[ADDRESS], 300);
    node.frame(ifindex, &good[..20]);
    assert_eq!(node.engine.counters().frames_not_dns, 1);
    node.frame(99, &good);
    assert_eq!(node.engine.counters().frames_unknown_interface, 1);
    let mut malformed = good.clone();
    malformed[42 + 12] = 0xff;
    node.frame(ifindex, &malformed);
    assert_eq!(node.engine.counters().answers_malformed, 1);
    let mut truncated = good;
    truncated[42 + 2] |= 0x02;
    node.frame(ifindex, &truncated);
    assert_eq!(node.engine.counters().answers_unusable, 1);
    assert_eq!(node.batches(), []);
}

#[test]
fn a_refusal_is_told_and_counted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.switch_answers = false;
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let batch = node.log.iter().find_map(|command| match command {
        Command::Apply { batch, .. } => Some(*batch),
        _ => None,
    });
    node.give(Input::Applied {
        batch: batch.expect("a batch"),
        result: Err(BatchError::Refused(vec![(0, "OFPFMFC_TABLE_FULL".into())])),
    });
    assert_eq!(node.engine.counters().flows_refused, 1);
    assert!(node.reports.iter().any(|report| matches!(
        report,
        Report::FlowsRefused { reason } if reason.contains("OFPFMFC_TABLE_FULL")
    )));
    // A result that belongs to nothing is harmless.
    node.give(Input::Applied {
        batch: BatchId(999),
        result: Ok(()),
    });
}

#[test]
fn a_pod_that_resolves_without_end_forgets_what_matters_least() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    let written = [allow("example.com"), deny_all(), allow("other.test")];
    node.set_firewall(&written);
    node.answer("p1", "example.com", &[[198, 51, 100, 1]], 60);
    // OVN does not enforce the rule for these yet.
    for i in 0..4096 + 10 {
        let address = Ipv4Addr::from(0x0b00_0000 + i).octets();
        node.answer("p1", &format!("n{}.other.test", i / 100), &[address], 3600);
    }
    assert_eq!(node.engine.counters().addresses_evicted, 11);
    assert_eq!(
        node.destinations(),
        ["198.51.100.1".to_owned()].into(),
        "what is open goes last"
    );
}

#[test]
fn an_address_in_use_is_never_evicted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.cache.limits_mut().addresses_per_port_max = 2;
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 60);
    for (_, packets) in node.switch.values_mut() {
        *packets += 1;
    }
    node.pass(COMPARE_INTERVAL);
    node.answer("p1", "example.com", &[[203, 0, 113, 3]], 60);
    assert_eq!(node.engine.counters().addresses_refused, 1);
    assert_eq!(node.destinations().len(), 2);
    // Out of use, the one that expires first makes room.
    node.pass(IDLE_GRACE);
    node.answer("p1", "example.com", &[OTHER], 600);
    node.answer("p1", "example.com", &[[203, 0, 113, 3]], 60);
    assert_eq!(
        node.destinations(),
        ["203.0.113.2".to_owned(), "203.0.113.3".to_owned()].into()
    );
}

#[test]
fn an_address_that_may_be_in_use_is_never_evicted() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.cache.limits_mut().addresses_per_name_max = 2;
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.pass(COUNTERS_DELAY_MAX * 2);
    node.answer("p1", "example.com", &[OTHER], 60);
    for (_, packets) in node.switch.values_mut() {
        *packets += 1;
    }
    let third = [203, 0, 113, 3];
    node.answer("p1", "example.com", &[third], 60);
    assert_eq!(node.engine.counters().addresses_refused, 1);
    assert_eq!(node.destinations().len(), 2, "nobody has counted yet");
    // The counters are read soon, and tell.
    node.pass(COUNTERS_DELAY_MAX);
    node.answer("p1", "example.com", &[third], 60);
    assert_eq!(node.engine.counters().addresses_refused, 2);
    node.pass(IDLE_GRACE);
    node.answer("p1", "example.com", &[third], 60);
    assert!(node.destinations().contains("203.0.113.3"));
    assert_eq!(node.destinations().len(), 2);
}

#[test]
fn where_room_gets_short_it_is_soon_known_what_may_go() {
    for (of_port, of_name) in [(8, 256), (4096, 8)] {
        let mut node = Node::with(&[allow("example.com"), deny_all()]);
        node.engine.cache.limits_mut().addresses_per_port_max = of_port;
        node.engine.cache.limits_mut().addresses_per_name_max = of_name;
        let told = |host: u8| match of_name {
            8 => "example.com".to_owned(),
            _ => format!("n{host}.example.com"),
        };
        for host in 1..=8 {
            node.answer("p1", &told(host), &[[203, 0, 113, host]], 600);
        }
        node.pass(COUNTERS_DELAY_MAX);
        node.answer("p1", &told(9), &[[203, 0, 113, 9]], 600);
        assert!(node.destinations().contains("203.0.113.9"));
        assert_eq!(node.engine.counters().addresses_refused, 0);
    }
}

#[test]
fn addresses_chosen_to_go_stay_once_they_are_in_use() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.cache.limits_mut().addresses_per_port_max = 32;
    for host in 1..=32 {
        node.answer(
            "p1",
            "example.com",
            &[[203, 0, 113, host]],
            60 * u32::from(host),
        );
    }
    // Somebody has counted their packets: none.
    node.pass(COMPARE_INTERVAL + COUNTERS_DELAY_MAX);
    // Two of 32 are chosen, and the first goes.
    node.answer("p1", "example.com", &[[203, 0, 113, 33]], 3600);
    assert!(!node.destinations().contains("203.0.113.1"));
    let second = node.switch.iter_mut().find(
        |(key, _)| matches!(key.matches.addresses, Addresses::V4 { dst, .. } if dst.octets()[3] == 2),
    );
    second.expect("it is open").1.1 += 1;
    node.pass(COMPARE_INTERVAL);
    node.answer("p1", "example.com", &[[203, 0, 113, 34]], 3600);
    let open = node.destinations();
    assert!(open.contains("203.0.113.2") && !open.contains("203.0.113.3"));
    assert_eq!(node.engine.counters().addresses_evicted, 2);
    assert_eq!(open.len(), 32);
}

#[test]
fn a_name_keeps_only_so_many_addresses() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.cache.limits_mut().addresses_per_name_max = 2;
    for host in 1..=4 {
        node.answer(
            "p1",
            "example.com",
            &[[203, 0, 113, host]],
            60 * u32::from(host),
        );
        node.pass(COMPARE_INTERVAL);
    }
    node.answer("p1", "www.example.com", &[[203, 0, 113, 9]], 60);
    let kept = ["203.0.113.3", "203.0.113.4", "203.0.113.9"];
    assert_eq!(node.destinations(), kept.map(str::to_owned).into());
    assert_eq!(node.engine.counters().addresses_evicted, 2);
    assert_eq!(node.limits_reported(), ["ns1: example.com of ns1_p1, 2"]);
    // As long as it is near the limit that is no news; after it was far below, it is.
    node.answer("p1", "example.com", &[[203, 0, 113, 10]], 240);
    assert_eq!(node.limits_reported(), [] as [&str; 0]);
    node.pass(Duration::from_secs(300));
    for host in 5..=7 {
        node.answer("p1", "example.com", &[[203, 0, 113, host]], 600);
    }
    assert_eq!(node.limits_reported(), ["ns1: example.com of ns1_p1, 2"]);
}

#[test]
fn a_limit_is_told_only_where_it_costs_access() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.cache.limits_mut().addresses_per_port_max = 2;
    node.engine.cache.limits_mut().addresses_per_name_max = 2;
    node.set_firewall(&[allow("example.com"), deny_all(), allow("other.test")]);
    for host in 1..=4 {
        node.answer("p1", "other.test", &[[198, 51, 100, host]], 60);
    }
    assert_eq!(node.limits_reported(), [] as [&str; 0]);
    node.answer("p1", "example.com", &[ADDRESS], 60);
    node.answer("p1", "www.example.com", &[OTHER], 60);
    assert_eq!(node.limits_reported(), [] as [&str; 0]);
    node.answer("p1", "ftp.example.com", &[[203, 0, 113, 3]], 60);
    node.answer("p1", "nfs.example.com", &[[203, 0, 113, 4]], 60);
    assert_eq!(node.limits_reported(), ["ns1: ns1_p1, 2"]);
}

fn deny(name: &str) -> Rule {
    Rule {
        action: RuleAction::Deny,
        ..allow(name)
    }
}

#[test]
fn a_denied_name_gets_flows_that_do_what_ovn_does() {
    let mut node = Node::with(&[deny("bad.test")]);
    node.answer("p1", "www.bad.test", &[ADDRESS], 1);
    assert_eq!(node.open()[0].2, 11_000);
    // Expiry would open: the cache entry is held for longer than one that allows.
    node.pass(Duration::from_secs(3000));
    assert_eq!(node.open().len(), 1);
    node.pass(Duration::from_secs(1000));
    assert_eq!(node.open().len(), 0);
}

/// The longest that a test waits for an entry that denies to go, behind its end.
const SLACK: Duration = Duration::from_secs(100);

/// What rule 0 denies stays denied until an hour after the pod was told, and no longer.
fn assert_denied_for_an_hour(node: &mut Node, told_at: Timestamp) {
    let denied = |node: &Node| node.open().iter().any(|(.., priority)| *priority == 11_000);
    node.pass(Duration::from_secs(200));
    assert!(denied(node), "behind the end of its TTL");
    let deny_ttl = node.engine.cache.limits().deny_ttl;
    node.pass((told_at + deny_ttl).since(node.now) - Duration::from_secs(1));
    assert!(denied(node), "for an hour");
    node.pass(SLACK);
    assert_eq!(node.open(), [], "and no longer");
}

#[test]
fn what_was_allowed_when_the_pod_was_told_stays_denied_once_it_is() {
    for denying in [
        vec![deny("example.com")],
        vec![deny("www.example.com"), allow("example.com"), deny_all()],
        vec![deny("*.example.com"), deny_all()],
    ] {
        let mut node = Node::with(&[allow("example.com"), deny_all()]);
        let told_at = node.now;
        node.answer("p1", "www.example.com", &[ADDRESS], 1);
        node.pass(Duration::from_secs(30));
        node.set_firewall(&denying);
        node.set_ovn(&denying);
        assert_denied_for_an_hour(&mut node, told_at);
    }
}

#[test]
fn what_no_rule_mentioned_when_the_pod_was_told_stays_denied_once_one_does() {
    let mut node = Node::with(&[deny_all()]);
    let told_at = node.now;
    node.answer("p1", "example.com", &[ADDRESS], 1);
    node.pass(Duration::from_secs(30));
    let rules = [deny("example.com"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    assert_denied_for_an_hour(&mut node, told_at);
}

#[test]
fn what_comes_to_be_denied_while_the_agent_is_away_stays_denied() {
    let mut before = Node::with(&[allow("example.com"), deny_all()]);
    let told_at = before.now;
    before.answer("p1", "example.com", &[ADDRESS], 1);
    let mut snapshot = before.engine.snapshot(before.now);
    // As it is read 80 s later, behind the end of its TTL.
    let away = Duration::from_secs(80);
    for saved in snapshot.iter_mut().flat_map(|entry| &mut entry.names) {
        saved.rest = saved.rest.saturating_sub(away);
        saved.deny_rest = saved.deny_rest.saturating_sub(away);
    }
    before.now = before.now + away;
    let mut after = after_restart(&mut before, &snapshot, &[deny("example.com"), deny_all()]);
    assert_denied_for_an_hour(&mut after, told_at);
}

#[test]
fn flows_of_an_earlier_run_that_deny_stay_for_an_hour() {
    let rules = [deny("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    before.answer("p1", "example.com", &[ADDRESS], 1);
    let mut after = after_restart(&mut before, &[], &rules);
    let found_at = after.now;
    assert_denied_for_an_hour(&mut after, found_at);
}

/// What is wrong, as it was told last.
fn problems_told(node: &Node) -> BTreeMap<u32, (String, Severity)> {
    let told = node.reports.iter().rev().find_map(|report| match report {
        Report::Problems { problems, .. } => Some(problems.clone()),
        _ => None,
    });
    told.unwrap_or_default()
}

#[test]
fn a_firewall_that_ovn_does_not_enforce_closes_and_opens_nothing() {
    let old = [allow("example.com"), deny_all()];
    let mut node = Node::with(&old);
    node.answer("p1", "example.com", &[ADDRESS], 600);
    // ovn-kubernetes refuses it.
    let refused = [allow("other.test"), allow("*.test"), deny_all()];
    node.set_firewall(&refused);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    // Answers are still taken from the kernel, and the old rules hold for them.
    node.answer("p1", "www.example.com", &[OTHER], 600);
    node.answer("p1", "other.test", &[[203, 0, 113, 3]], 600);
    let open: BTreeSet<String> = ["203.0.113.1", "203.0.113.2"].map(Into::into).into();
    assert_eq!(node.destinations(), open);
    node.pass(Duration::from_secs(29));
    let waits = problems_told(&node);
    let severities: Vec<_> = waits.values().map(|(_, severity)| *severity).collect();
    assert_eq!(severities, [Severity::Waiting; 2], "{waits:?}");
    node.pass(Duration::from_secs(2));
    let (problem, severity) = &problems_told(&node)[&1];
    assert_eq!(*severity, Severity::NotInForce);
    for part in [
        "the one before it",
        "`*.test`",
        "--enable-dns-name-resolver",
    ] {
        assert!(problem.contains(part), "{problem}");
    }
    assert_eq!(node.destinations(), open);
    // It is mended, and ovn-kubernetes follows.
    let mended = [allow("other.test"), deny_all()];
    node.set_firewall(&mended);
    assert_eq!(node.destinations(), open);
    node.set_ovn(&mended);
    assert_eq!(node.destinations(), ["203.0.113.3".to_owned()].into());
    assert_eq!(problems_told(&node), BTreeMap::new());
    node.pass(Duration::from_secs(60));
    assert_eq!(problems_told(&node), BTreeMap::new());
}

#[test]
fn a_new_firewall_that_ovn_does_not_enforce_is_told_with_what_its_status_says() {
    let mut node = Node::with(&[]);
    let set = |node: &mut Node, firewall: Option<Firewall>| {
        let id = FirewallId {
            namespace: "ns1".into(),
            name: "default".into(),
        };
        node.give(Input::Firewalls(FirewallUpdate {
            reset: false,
            firewalls: vec![(id, firewall)],
        }));
    };
    set(&mut node, None);
    node.set_firewall(&[allow("example.com"), deny_all()]);
    let refused = Firewall {
        rules: vec![allow("example.com"), deny_all()],
        subdomains: None,
        refusal: Some("failed to frobnicate".into()),
    };
    set(&mut node, Some(refused));
    node.pass(Duration::from_secs(31));
    let (problem, severity) = &problems_told(&node)[&0];
    assert_eq!(*severity, Severity::NotInForce);
    for part in ["no rule of it", "failed to frobnicate"] {
        assert!(problem.contains(part), "{problem}");
    }
}

#[test]
fn of_edits_in_quick_succession_the_one_that_ovn_enforces_counts() {
    let rules = |name: &str| [allow(name), deny_all()];
    let mut node = Node::with(&rules("a.test"));
    node.answer("p1", "a.test", &[ADDRESS], 600);
    for n in 0..20 {
        node.set_firewall(&rules(&format!("n{n}.test")));
    }
    let refused = [allow("*.test"), deny_all()];
    node.set_firewall(&refused);
    node.answer("p1", "n19.test", &[OTHER], 600);
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    // The last but one is taken over.
    node.set_ovn(&rules("n19.test"));
    assert_eq!(node.destinations(), ["203.0.113.2".to_owned()].into());
    let former = |node: &Node| node.engine.policy.former_count("ns1");
    assert_eq!(former(&node), 1);
    // One with the same ACLs as before needs none.
    node.set_firewall(&rules("n19.test"));
    assert_eq!((former(&node), problems_told(&node)), (0, BTreeMap::new()));
    // Gone is gone.
    node.set_firewall(&refused);
    node.give(Input::Firewalls(FirewallUpdate {
        reset: true,
        firewalls: vec![],
    }));
    assert_eq!((former(&node), node.destinations()), (0, BTreeSet::new()));
}

#[test]
fn actions_that_only_ovn_can_make_are_copied() {
    let rules = [deny("bad.test"), deny_all()];
    let mut node = Node::with(&rules);
    let text = "ct_commit { ct_mark.blocked = 1; }; /* drop */";
    let with_text = |index: u32| {
        let mut flow = logical_flow(index, &rules).expect("a rule");
        flow.actions = text.into();
        (RowId::new((0xf00 + u128::from(index)) << 96), Some(flow))
    };
    // The other rule's logical flow has the same text, and OVN has made a flow of it.
    node.ovn_actions.insert(0xf01, vec![7; 8]);
    node.ovn_actions.insert(0xf00, vec![7; 8]);
    node.give(Input::Sb(SbUpdate {
        logical_flows: vec![with_text(0), with_text(1)],
        ..SbUpdate::default()
    }));
    node.pass(Duration::from_secs(1));
    node.log.clear();
    node.answer("p1", "bad.test", &[ADDRESS], 60);
    let batches = node.batches();
    let [(_, changes)] = &batches[..] else {
        panic!("one batch: {batches:?}");
    };
    let [FlowChange::Add(_, body)] = &changes[..] else {
        panic!("one flow: {changes:?}");
    };
    assert_eq!(*body.actions, [crate::flow::Action::Copied(vec![7; 8])]);
}

#[test]
fn with_the_namespace_as_scope_its_pods_share_what_one_was_told() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.ports.set_scope(Scope::Namespace);
    node.add_pod("p2", 6);
    node.answer("p2", "example.com", &[ADDRESS], 300);
    let sources =
        |node: &Node| -> Vec<String> { node.open().into_iter().map(|(src, ..)| src).collect() };
    assert_eq!(sources(&node), ["10.244.0.5", "10.244.0.6"]);
    // Also a pod that comes later.
    node.add_pod("p3", 7);
    assert_eq!(sources(&node), ["10.244.0.5", "10.244.0.6", "10.244.0.7"]);
    // And one that OVN knows before it has an interface.
    let row = RowId::new(0x108);
    node.add_logical_port("p4", 8, row);
    node.add_interface("p4", 8, "uid-p4", row);
    assert_eq!(sources(&node).len(), 4);
}

/// A node as [`Node::with`] makes it, but with what an earlier run has left: a snapshot, and its
/// flows in the switch. The switch is there first, OVN's southbound database last.
fn after_restart(before: &mut Node, snapshot: &[SavedEntry], rules: &[Rule]) -> Node {
    after_restart_with(before, snapshot, rules, Config::default())
}

/// The same, with other options.
fn after_restart_with(
    before: &mut Node,
    snapshot: &[SavedEntry],
    rules: &[Rule],
    config: Config,
) -> Node {
    let mut node = Node::bare();
    node.engine = Engine::new(config);
    node.now = before.now;
    node.engine.load_snapshot(snapshot.to_vec());
    node.switch = std::mem::take(&mut before.switch);
    node.give(Input::SwitchUp);
    node.give(Input::Firewalls(FirewallUpdate {
        reset: true,
        firewalls: vec![(
            FirewallId {
                namespace: "ns1".into(),
                name: "default".into(),
            },
            Some(Firewall {
                rules: rules.to_vec(),
                subdomains: None,
                refusal: None,
            }),
        )],
    }));
    node.give(Input::Nb(NbUpdate {
        reset: true,
        acls: (0..8)
            .filter_map(|i| Some((acl_row(i), Some(acl(i, rules)?))))
            .collect(),
        ..NbUpdate::default()
    }));
    node.pods = before.pods.clone();
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(RowId::new(0x105), Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    assert_eq!(node.batches(), [], "untouched until everything is known");
    let group = node.group();
    node.give(Input::Sb(SbUpdate {
        reset: true,
        datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
        port_bindings: vec![(
            RowId::new(0x105),
            Some(PortBinding {
                logical_port: "ns1_p1".into(),
                datapath: DATAPATH,
                tunnel_key: 5,
                namespace: None,
            }),
        )],
        port_groups: vec![(SB_GROUP, Some(group))],
        logical_flows: (0..8)
            .filter_map(|i| {
                let row = RowId::new((0xf00 + u128::from(i)) << 96);
                Some((row, Some(logical_flow(i, rules)?)))
            })
            .collect(),
        ..SbUpdate::default()
    }));
    node
}

#[test]
fn a_restart_writes_nothing_and_goes_on_where_it_was() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let snapshot = before.engine.snapshot(before.now);
    let mut after = after_restart(&mut before, &snapshot, &rules);
    assert_eq!(after.batches(), []);
    assert_eq!(after.engine.flow_count(), 1);
    assert!(after.reports.contains(&Report::Ready {
        attached: 1,
        firewalls: 1,
        flows: 1
    }));
    // Names are remembered: the rule moves, and its flows with it.
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    after.set_firewall(&moved);
    after.set_ovn(&moved);
    assert_eq!(after.open()[0].2, 10_999);
    // And until when.
    after.pass(Duration::from_secs(500));
    assert_eq!(after.open().len(), 1);
    after.pass(Duration::from_secs(200));
    assert_eq!(after.open().len(), 0);
}

#[test]
fn a_rule_that_went_while_nobody_looked_takes_its_flows_with_it() {
    let mut before = Node::with(&[allow("example.com"), deny_all()]);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let snapshot = before.engine.snapshot(before.now);
    let after = after_restart(&mut before, &snapshot, &[deny_all()]);
    assert_eq!(after.open().len(), 0);
}

#[test]
fn another_pod_under_the_same_name_inherits_no_snapshot() {
    let rules = [allow("example.com"), deny_all()];
    let mut before = Node::with(&rules);
    before.answer("p1", "www.example.com", &[ADDRESS], 600);
    let mut saved = before.engine.snapshot(before.now);
    assert_eq!(saved.len(), 1);
    saved[0].pod = Some("another".into());
    let mut node = Node::bare();
    node.engine.load_snapshot(saved);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: vec![(RowId::new(0x105), Some(interface("ns1_p1", 5, "uid-p1")))],
    }));
    assert_eq!(node.engine.cache.entries_mut().count(), 0);
    assert_eq!(node.engine.snapshot(node.now), []);
}

#[test]
fn an_address_that_is_never_opened_is_counted_and_told_once() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    for _ in 0..3 {
        node.answer("p1", "example.com", &[[127, 0, 0, 1], ADDRESS], 60);
    }
    assert_eq!(node.destinations(), ["203.0.113.1".to_owned()].into());
    assert_eq!(
        node.engine
            .refused()
            .iter()
            .map(|(_, count)| count)
            .sum::<u64>(),
        3
    );
    let told = node
        .reports
        .iter()
        .filter(|report| matches!(report, Report::AddressRefused { .. }));
    assert_eq!(told.count(), 1);
}

#[test]
fn a_flow_of_someone_else_is_left_alone() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let (key, (_, packets)) = node.switch.pop_first().expect("a flow of ours");
    // Someone else has overwritten it.
    let foreign = Cookie::from_switch(0x77);
    assert_eq!(foreign, None, "not ours");
    node.give(Input::ForeignFlow {
        key: key.clone(),
        cookie: 0x77,
    });
    assert!(
        node.reports
            .iter()
            .any(|report| matches!(report, Report::ForeignFlow { cookie: 0x77, .. }))
    );
    node.log.clear();
    node.pass(COMPARE_INTERVAL * 2);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    assert_eq!(node.batches(), [], "neither restored nor overwritten");
    node.give(Input::ForeignFlowGone { key: key.clone() });
    node.pass(COMPARE_INTERVAL);
    assert!(node.switch.contains_key(&key), "{packets} packets before");
}
