//! What the program opens without the agent, beside an engine that decides over the same answers.
//!
//! The engine is the judge: an answer opens nothing that it would not have opened, and for no longer. Random rules,
//! edits, addresses that are never opened, and answers that are damaged on the way.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU32,
};

use dnsflow_agent::{
    capture::{EntryTimes, Options, class_key},
    clock::now,
};
use dnsflow_common::Reason;
use dnsflow_core::{
    Command, Input, Timestamp,
    engine::{Config, Engine},
    io::input::{ClassChange, Frame as Passed, MarkChange},
    ovn::rows::{GatewayPort, NbUpdate, RowId},
    testing::{Node, allow, deny, deny_all, frame, ifindex_of},
    values::{
        firewall::{Rule, RuleAction},
        limits::CacheLimits,
    },
};
use ipnet::IpNet;
use proptest::{prelude::*, strategy::ValueTree as _, test_runner::TestRunner};

use crate::{
    Loaded, load,
    marks::{MASK, marking},
    opens::{A, AAAA, Record, alias, answer, at, wire},
    test_run::query_of,
};

/// The priority of the flows of the first rule.
const FIRST_PRIORITY: u16 = 11_000;

/// The interface that the programs run on, and that of the pod at the engine.
const IFINDEX: u32 = 1;

const NAMES: [&str; 9] = [
    "test",
    "example.test",
    "www.example.test",
    "a.www.example.test",
    "b.a.www.example.test",
    "notexample.test",
    "example.org",
    "api.example.org",
    "example.com",
];

#[derive(Clone, Debug)]
enum Step {
    /// The pod is told addresses of a name.
    Answer(Told),
    /// The EgressFirewall is edited, and OVN follows.
    Edit(Vec<(usize, bool)>),
    /// An address is one of a gateway, which is never opened, or no longer.
    Gateway(u16),
}

#[derive(Clone, Debug)]
struct Told {
    /// The asked name, and the CNAMEs behind it.
    names: Vec<usize>,
    is_ipv6: bool,
    hosts: Vec<(u16, u32)>,
    /// Bytes that are damaged, and what they become.
    damage: Vec<(prop::sample::Index, u8)>,
    /// An edit, of which the program knows nothing, while the record is on its way.
    edit: Option<Vec<(usize, bool)>>,
}

fn edit() -> impl Strategy<Value = Vec<(usize, bool)>> {
    prop::collection::vec((0..NAMES.len(), prop::bool::weighted(0.8)), 0..5)
}

/// The addresses that many answers have in common.
const FEW: u16 = 20;

fn host() -> impl Strategy<Value = u16> {
    prop_oneof![1 => 1..FEW, 3 => FEW..5000]
}

fn told() -> impl Strategy<Value = Told> {
    let names = prop_oneof![
        4 => prop::collection::vec(0..NAMES.len(), 1..2),
        1 => prop::collection::vec(0..NAMES.len(), 2..4),
    ];
    let ttl = prop_oneof![1 => Just(0_u32), 4 => 1..90_u32, 1 => any::<u32>()];
    let hosts = prop_oneof![
        6 => prop::collection::vec((host(), ttl), 1..4),
        1 => prop::collection::vec((host(), Just(60)), 14..19),
    ];
    let damage = prop_oneof![
        5 => Just(Vec::new()),
        1 => prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..3),
    ];
    let edit = prop_oneof![25 => Just(None), 1 => edit().prop_map(Some)];
    (names, prop::bool::weighted(0.2), hosts, damage, edit).prop_map(
        |(names, is_ipv6, hosts, damage, edit)| Told {
            names,
            is_ipv6,
            hosts,
            damage,
            edit,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        60 => told().prop_map(Step::Answer),
        1 => edit().prop_map(Step::Edit),
        1 => (1..FEW).prop_map(Step::Gateway),
    ]
}

fn rules_of(edit: &[(usize, bool)]) -> Vec<Rule> {
    let rules = edit.iter().map(|&(name, is_allowed)| match is_allowed {
        true => allow(NAMES[name]),
        false => deny(NAMES[name]),
    });
    rules.chain([deny_all()]).collect()
}

fn address(host: u16, is_ipv6: bool) -> IpAddr {
    match is_ipv6 {
        false => {
            let [high, low] = host.to_be_bytes();
            Ipv4Addr::new(198, 18, high, low).into()
        }
        true => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host).into(),
    }
}

impl Told {
    fn frame(&self) -> dnsflow_tests::frames::Frame {
        let aliases = self.names.windows(2);
        let aliases = aliases.map(|pair| alias(NAMES[pair[0]], NAMES[pair[1]]));
        let last = NAMES[*self.names.last().expect("a name")];
        let addresses = self.hosts.iter().map(|&(host, ttl)| Record {
            owner: wire(last),
            ttl,
            ..at(address(host, self.is_ipv6))
        });
        let records: Vec<_> = aliases.chain(addresses).collect();
        let asked = wire(NAMES[self.names[0]]);
        let question_end = 12 + asked.len() + 4;
        let kind = if self.is_ipv6 { AAAA } else { A };
        let mut frame = answer(&asked, kind, &records);
        for (index, byte) in &self.damage {
            let place = index.index(frame.payload.len() - question_end);
            frame.payload[question_end + place] = *byte;
        }
        frame
    }
}

/// The programs, the engine that they belong to, and an engine whose kernel opens nothing.
struct Beside {
    program: Loaded,
    agent: Node,
    judge: Node,
    rules: Vec<Rule>,
    gateways: BTreeSet<u16>,
    left: BTreeMap<IpNet, bool>,
    opened: usize,
    late: usize,
}

/// The rule in force for each address, by the priority of its flows.
type InForce = BTreeMap<String, u16>;

fn in_force(node: &Node) -> InForce {
    let mut rules = InForce::new();
    for (_, destination, priority) in node.open() {
        let rule = rules.entry(destination).or_insert(priority);
        *rule = priority.max(*rule);
    }
    rules
}

fn bare() -> Node {
    let mut node = Node::bare();
    node.now = now();
    node.engine = Engine::new(Config {
        mark_mask: NonZeroU32::new(MASK),
        // The kernel leaves limits to the agent, which closes what is beyond.
        cache_limits: CacheLimits {
            addresses_per_name_max: usize::MAX,
            addresses_per_port_max: usize::MAX,
            ..CacheLimits::default()
        },
        ..Config::default()
    });
    node.read_sources();
    node
}

impl Beside {
    fn new() -> Option<Self> {
        let options = Options {
            entry_times: EntryTimes::of(&CacheLimits::default()),
            shares: false,
            // As at the engine.
            entries_per_interface: u64::MAX,
            ..marking()
        };
        Some(Self {
            program: load(&options)?,
            agent: bare(),
            judge: bare(),
            rules: Vec::new(),
            gateways: BTreeSet::new(),
            left: BTreeMap::new(),
            opened: 0,
            late: 0,
        })
    }

    /// Forgets all, for the next story.
    fn forget(&mut self) {
        let open = self.program.read();
        let capture = &mut self.program.capture;
        for found in open {
            let removed = capture.entries.remove(found.ifindex, found.address);
            removed.expect("it can be removed");
        }
        assert!(capture.classes.clear().1.is_empty());
        capture.names.set_name_set(IFINDEX, None);
        self.program.share_room();
        let capture = &mut self.program.capture;
        self.left.values_mut().for_each(|is_left| *is_left = false);
        let changed = capture.networks.change(&std::mem::take(&mut self.left));
        changed.expect("they can be removed");
        self.gateways.clear();
        self.rules.clear();
        (self.agent, self.judge) = (bare(), bare());
        self.carry_out();
    }

    fn pod(&self) -> u32 {
        ifindex_of(self.agent.pods["ns1_p1"])
    }

    /// Both engines get an input, and the programs what the agent's says.
    fn give(&mut self, input: &Input) {
        let at = now();
        for node in [&mut self.agent, &mut self.judge] {
            node.now = at.max(node.now);
            node.give(input.clone());
        }
        self.carry_out();
    }

    fn edit(&mut self, rules: Vec<Rule>) {
        for node in [&mut self.agent, &mut self.judge] {
            node.now = now().max(node.now);
            node.set_firewall(&rules);
            node.set_ovn(&rules);
        }
        self.rules = rules;
    }

    /// Carries the agent's commands out at the programs.
    fn carry_out(&mut self) {
        let pod = self.pod();
        let place = |ifindex: u32| if ifindex == pod { IFINDEX } else { ifindex };
        let capture = &mut self.program.capture;
        for command in self.agent.log.drain(..) {
            match command {
                Command::FilterNames { name_set, names } => {
                    capture.names.set_names(name_set, &names);
                }
                Command::ForgetNames { name_set } => capture.names.remove_name_set(name_set),
                Command::FilterInterface { ifindex, name_set } => {
                    capture.names.set_name_set(place(ifindex), name_set);
                }
                Command::ChangeClasses(changes) => {
                    for change in changes {
                        let (ClassChange::Set { ifindex, class, .. }
                        | ClassChange::Remove { ifindex, class }) = &change;
                        let key = class_key(place(*ifindex), class);
                        let changed = match &change {
                            ClassChange::Set { mark, element, .. } => {
                                capture.classes.set(*element, key, class.base.wire(), *mark)
                            }
                            ClassChange::Remove { .. } => capture.classes.remove(key),
                        };
                        changed.expect("there is room");
                    }
                }
                Command::LeaveNetworks(changes) => {
                    let changed = capture.networks.change(&changes);
                    changed.expect("there is room");
                    self.left.extend(changes);
                }
                Command::Mark(changes) => {
                    for change in changes {
                        let changed = match change {
                            MarkChange::Set {
                                ifindex,
                                address,
                                mark,
                                until,
                            } => capture.entries.set(place(ifindex), address, mark, until),
                            MarkChange::Remove { ifindex, address } => {
                                capture.entries.remove(place(ifindex), address)
                            }
                        };
                        changed.expect("there is room");
                    }
                }
                _ => {}
            }
        }
    }

    /// The agent's node has the marks that the programs have.
    fn read_marks(&mut self) {
        let pod = self.pod();
        let read = self.program.read().into_iter();
        self.agent.marks = read
            .map(|found| ((pod, found.address), (found.mark, found.until, None)))
            .collect();
    }

    /// Whether the agent's node opens no address that the judge's does not.
    fn check(&self, step: &Step) {
        let judged = in_force(&self.judge);
        for (address, priority) in in_force(&self.agent) {
            let index = usize::from(FIRST_PRIORITY - priority);
            let is_open = self.rules[index].action == RuleAction::Allow;
            let is_judged = judged.get(&address) == Some(&priority);
            assert!(
                !is_open || is_judged,
                "{address}: {priority}, not {:?}: {step:?}, {:?}",
                judged.get(&address),
                self.rules
            );
        }
    }

    /// For each address: until when its mark counts.
    fn ends(node: &Node) -> BTreeMap<IpAddr, Timestamp> {
        let marks = node.marks.iter();
        marks
            .map(|((_, address), (_, until, _))| (*address, *until))
            .collect()
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Edit(edit) => {
                self.edit(rules_of(edit));
                self.carry_out();
            }
            Step::Gateway(host) => {
                let is_there = self.gateways.insert(*host) || !self.gateways.remove(host);
                let addresses = [false, true].map(|is_ipv6| address(*host, is_ipv6));
                let port = GatewayPort {
                    addresses: addresses.into_iter().collect(),
                };
                let row = RowId::new(0x9a7e_0000 + u128::from(*host));
                self.give(&Input::Nb(NbUpdate {
                    gateway_ports: vec![(row, is_there.then_some(port))],
                    ..NbUpdate::default()
                }));
            }
            Step::Answer(told) => self.answer(told, step),
        }
        self.read_marks();
        self.check(step);
    }

    fn answer(&mut self, told: &Told, step: &Step) {
        let frame_to_pod = told.frame();
        let bytes = frame_to_pod.build();
        self.program.ask(&query_of(&frame_to_pod).build());
        let (reason, captured) = self.program.run_once(&bytes);
        let captured_at = now();
        self.read_marks();
        let opened = reason == Reason::Opened;
        if captured.is_none() {
            // No agent is told: no rule mentions the name.
            return;
        }
        match &told.edit {
            Some(edit) => {
                self.late += usize::from(opened);
                self.edit(rules_of(edit));
            }
            None => self.opened += usize::from(opened),
        }
        let pod = self.pod();
        let at = now();
        let passed = |opened| Passed {
            opened,
            ..frame(pod, captured_at, &bytes)
        };
        self.judge.now = at.max(self.judge.now);
        self.judge.give_frame(passed(false));
        if opened && told.edit.is_none() {
            self.check(step);
            let judged = Self::ends(&self.judge);
            for (address, until) in Self::ends(&self.agent) {
                let judged = judged.get(&address);
                let is_judged = judged.is_none_or(|judged| until <= *judged);
                assert!(
                    is_judged,
                    "{address}: {until:?}, not {judged:?}, at {captured_at:?}: {step:?}"
                );
            }
        }
        self.agent.now = at.max(self.agent.now);
        self.agent.give_frame(passed(opened));
        self.carry_out();
    }
}

#[test]
fn the_kernel_opens_nothing_that_the_engine_would_not() {
    let stories = (edit(), prop::collection::vec(step(), 1..100));
    let mut runner = TestRunner::deterministic();
    let Some(mut beside) = Beside::new() else {
        return;
    };
    for _ in 0..80 {
        let (first, steps) = stories.new_tree(&mut runner).expect("a value").current();
        beside.forget();
        beside.program.beat_for_long();
        beside.take(&Step::Edit(first));
        for step in &steps {
            beside.take(step);
        }
    }
    println!("{} opened, {} beside an edit", beside.opened, beside.late);
    assert!(beside.opened > 100 && beside.late > 5);
}
