//! Packets, followed through the kernel's marks and the switch's flows as they are behind each command.
//!
//! The model knows the names that the pods were told, the rules, and the port groups. It knows nothing of plans, tags or
//! batches. It has every state since the last moment at which nothing waited and the switch was compared: a packet that
//! passes is one that the rules of one of them let pass.

mod packet;

use std::{cell::RefCell, collections::VecDeque};

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config as ProptestConfig, TestRunner},
};

pub(super) use self::packet::Verdict;

use self::packet::Packet;
use super::{
    edits::{First, WAYS, config},
    *,
};
use crate::ovn::hash::default_port_group;

const NAMES: [&str; 3] = ["a.test", "b.test", "www.a.test"];
/// The last octets of the addresses.
const HOSTS: [u8; 3] = [1, 2, 3];
/// The ports of TCP that packets are for. Rules are for all, or for the first ones.
const PORTS: [u16; 2] = [1, 2];
/// The port groups of ns1. The rules hold for both, if OVN has ACLs for both.
const GROUPS: [&str; 2] = [GROUP, "a1111111111111111111"];
const TTL: Duration = Duration::from_secs(3600);

/// The port groups that a port is in, or those with ACLs: a bit for each.
type Membership = u8;

#[derive(Clone, Debug)]
enum Step {
    /// A pod is told an address of a name.
    Answer {
        pod: usize,
        name: usize,
        host: u8,
        is_short: bool,
        /// Whether the agent never hears of it.
        is_lost: bool,
    },
    /// The rules are edited, and OVN has ACLs for these port groups.
    Edit(First, Vec<Rule>, Membership),
    /// A port gets into other port groups.
    Join(usize, Membership),
    /// The pod goes, and another one comes whose interface has the index. `is_late`: the first goes behind.
    Replace {
        pod: usize,
        is_same_port: bool,
        is_late: bool,
    },
    /// The connection to the switch is lost for so many seconds.
    Disconnect(u64),
    /// The kernel lets nobody read its marks, or does so again.
    Hide(bool),
    /// The switch loses all flows, and says so.
    Wipe,
    /// Time passes, in seconds.
    Pass(u64),
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let rule = (0..NAMES.len(), any::<bool>(), 0..=PORTS.len());
    vec(rule, 0..4).prop_map(|choice| {
        let rules = choice.into_iter().map(|(name, is_allowed, ports)| {
            let rule = match is_allowed {
                true => allow(NAMES[name]),
                false => deny(NAMES[name]),
            };
            limits::many(rule, ports)
        });
        rules.chain([deny_all()]).collect()
    })
}

fn step() -> impl Strategy<Value = Step> {
    let time = || prop_oneof![4 => 1..5_u64, 2 => 25..70_u64, 1 => 100..300_u64];
    let pod = 0..2_usize;
    let with_acls = prop_oneof![4 => Just(3), 1 => Just(1), 1 => Just(2)];
    let what = (pod.clone(), 0..NAMES.len(), 0..HOSTS.len());
    let how = (any::<bool>(), proptest::bool::weighted(0.1));
    let answer = (what, how).prop_map(|((pod, name, host), (is_short, is_lost))| Step::Answer {
        pod,
        name,
        host: HOSTS[host],
        is_short,
        is_lost,
    });
    prop_oneof![
        8 => answer,
        4 => (prop_oneof![Just(First::Manifest), Just(First::Rows)], rules(), with_acls)
            .prop_map(|(first, rules, groups)| Step::Edit(first, rules, groups)),
        3 => (pod.clone(), 0..4_u8).prop_map(|(pod, membership)| Step::Join(pod, membership)),
        2 => (pod, any::<bool>(), any::<bool>())
            .prop_map(|(pod, is_same_port, is_late)| Step::Replace { pod, is_same_port, is_late }),
        1 => time().prop_map(Step::Disconnect),
        1 => any::<bool>().prop_map(Step::Hide),
        1 => Just(Step::Wipe),
        4 => time().prop_map(Step::Pass),
    ]
}

/// The steps, and how many commands are carried out before the next one: all, if there is no number.
fn story() -> impl Strategy<Value = Vec<(Step, Option<usize>)>> {
    let lag = prop_oneof![3 => Just(None), 1 => (0..4_usize).prop_map(Some)];
    vec((step(), lag), 1..16)
}

/// A pod, as the model knows it.
#[derive(Clone, Debug)]
struct Pod {
    port: String,
    row: RowId,
    host: u8,
    membership: Membership,
    /// Until when a name counts for sure, by name and address. Zero: it may count, or not.
    told: BTreeMap<(usize, u8), Timestamp>,
}

/// All that decides over packets.
#[derive(Clone, Debug)]
struct State {
    rules: Vec<Rule>,
    /// The port groups with ACLs.
    groups: Membership,
    pods: [Pod; 2],
}

fn is_for(rule: &Rule, name: &str) -> bool {
    let Destination::Name(of_rule) = &rule.destination else {
        return false;
    };
    let of_rule = of_rule.written();
    name == of_rule || name.ends_with(&format!(".{of_rule}"))
}

impl State {
    /// The rules that hold for a pod's port.
    fn rules_of(&self, pod: &Pod) -> &[Rule] {
        match pod.membership & self.groups {
            0 => &[],
            _ => &self.rules,
        }
    }

    /// Whether the kernel lets answers for a name through to the agent: a pod without rules may get some.
    fn mentions(&self, pod: &Pod, name: usize) -> bool {
        let mut rules = self.rules_of(pod).iter();
        rules.any(|rule| is_for(rule, NAMES[name]))
    }

    /// The index of the rule that decides over packets to an address with these names, and what it says.
    fn verdict(&self, pod: &Pod, names: &[usize], port: u16) -> Option<(usize, RuleAction)> {
        let mut rules = self.rules_of(pod).iter().enumerate();
        let deciding = rules.find(|(_, rule)| {
            let mut ports = rule.ports.iter();
            let is_for_port = rule.ports.is_empty() || ports.any(|one| one.port == Some(port));
            is_for_port && names.iter().any(|name| is_for(rule, NAMES[*name]))
        });
        deciding.map(|(index, rule)| (index, rule.action))
    }

    /// The names of an address: those that count for sure, and those that may.
    fn names(&self, pod: usize, host: u8, now: Timestamp) -> (Vec<usize>, Vec<usize>) {
        let told = self.pods[pod].told.iter();
        let told = told.filter(|((_, other), _)| *other == host);
        let (sure, others): (Vec<_>, Vec<_>) = told.partition(|(_, until)| **until > now);
        let name = |((name, _), _): (&(usize, u8), &Timestamp)| *name;
        (
            sure.into_iter().map(name).collect(),
            others.into_iter().map(name).collect(),
        )
    }

    /// Whether the rule in this place may let a pod's packets to an address pass.
    fn may_pass(&self, (pod, host, port): (usize, u8, u16), index: usize, now: Timestamp) -> bool {
        let (sure, others) = self.names(pod, host, now);
        (0..1_usize << others.len()).any(|set| {
            let others = others.iter().enumerate();
            let chosen = others.filter(|(bit, _)| set & (1 << bit) != 0);
            let names: Vec<usize> = sure
                .iter()
                .copied()
                .chain(chosen.map(|(_, name)| *name))
                .collect();
            self.verdict(&self.pods[pod], &names, port) == Some((index, RuleAction::Allow))
        })
    }

    /// Names that no rule mentions are deferred, and may be forgotten.
    fn forget_unmentioned(&mut self) {
        for at in 0..self.pods.len() {
            let pod = &self.pods[at];
            let unsure: Vec<_> = pod.told.keys().copied().collect();
            for key in unsure {
                if !self.mentions(&self.pods[at], key.0) {
                    self.pods[at].told.insert(key, Timestamp::default());
                }
            }
        }
    }
}

struct World {
    node: Node,
    state: State,
    /// What may decide, until the switch has followed.
    before: Vec<State>,
    /// How many pods there have been.
    generation: u128,
    /// Whether the switch was gone, and has not been compared since.
    is_apart: bool,
    /// What packets have met.
    reached: BTreeSet<&'static str>,
}

/// The row of a port group.
fn group_row(group: usize) -> RowId {
    RowId::new((0xe << 100) + group as u128)
}

/// The rows that OVN has for rules: whose they are, for which port group, and the index of the first row. OVN drops what
/// a rule denies.
fn rows((namespace, group, first): (&str, &str, u32), rules: &[Rule]) -> (NbUpdate, SbUpdate) {
    const ROWS: u32 = 6;
    let acl_of = |index: u32| {
        let acl = acl(index, rules)?;
        Some(Acl {
            namespace: namespace.into(),
            matches: acl.matches.replace(GROUP, group),
            ..acl
        })
    };
    let flow_of = |index: u32| {
        let flow = logical_flow(index, rules)?;
        let rule = rules.get(index as usize)?;
        Some(LogicalFlow {
            matches: flow.matches.replace(GROUP, group),
            actions: match rule.action {
                RuleAction::Allow => flow.actions,
                RuleAction::Deny => "/* drop */".into(),
            },
            stage_hint: Some(acl_row(first + index).prefix()),
            ..flow
        })
    };
    let acls = (0..ROWS).map(|index| (acl_row(first + index), acl_of(index)));
    let flows = (0..ROWS).map(|index| (logical_flow_row(first + index), flow_of(index)));
    (
        NbUpdate {
            acls: acls.collect(),
            ..NbUpdate::default()
        },
        SbUpdate {
            logical_flows: flows.collect(),
            ..SbUpdate::default()
        },
    )
}

/// The row of the only pod of ns2, at 10.244.0.9.
const OTHER_POD: RowId = RowId::new(0x109);

/// The rules of ns2 come, and a pod of it.
pub(super) fn add_namespace(node: &mut Node, rules: &[Rule]) {
    let (namespace, port) = ("ns2", "ns2_p1");
    let group = default_port_group(namespace);
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: false,
        interfaces: vec![(OTHER_POD, Some(interface(port, 9, "uid-ns2_p1")))],
    }));
    let id = FirewallId {
        namespace: namespace.into(),
        name: "default".into(),
    };
    node.give(Input::Firewalls(FirewallUpdate {
        reset: false,
        firewalls: vec![(id, Some(firewall(rules)))],
    }));
    let (nb, sb) = rows((namespace, &group, 100), rules);
    node.give(Input::Nb(nb));
    let binding = PortBinding {
        namespace: Some(namespace.into()),
        ..port_binding(port, 9)
    };
    let ports = PortGroup {
        name: group,
        ports: [port.to_owned()].into(),
    };
    node.give(Input::Sb(SbUpdate {
        port_bindings: vec![(OTHER_POD, Some(binding))],
        port_groups: vec![(group_row(1), Some(ports))],
        ..sb
    }));
}

/// That pod is told an address.
pub(super) fn answer_other(node: &mut Node, name: &str, address: [u8; 4]) {
    let ifindex = ifindex_of(OTHER_POD);
    let bytes = node.to_pod(ifindex, answer_frame(name, &[address], 3600));
    node.frame(ifindex, &bytes);
}

/// What becomes of a packet of pod p1 to a port of TCP at an address: of the first one of a connection.
pub(super) fn packet_of_p1(node: &Node, address: [u8; 4], port: u16) -> Verdict {
    p1_to(node, address, port).follow(node)
}

/// The same of a packet of an established connection.
pub(super) fn established_of_p1(node: &Node, address: [u8; 4], port: u16) -> Verdict {
    let packet = Packet {
        is_established: true,
        ..p1_to(node, address, port)
    };
    packet.follow(node)
}

fn p1_to(node: &Node, address: [u8; 4], port: u16) -> Packet {
    Packet {
        ifindex: ifindex_of(node.pods["ns1_p1"]),
        port: 5,
        src: [10, 244, 0, 5].into(),
        dst: address.into(),
        transport: Transport {
            protocol: Protocol::Tcp,
            port: Some(port),
        },
        is_translated: false,
        is_established: false,
    }
}

impl World {
    fn new(way: Option<u32>) -> Self {
        let mut node = Node::bare();
        node.engine = Engine::new(config(way));
        node.read_sources();
        node.add_pod("p2", 6);
        let pod = |host: u8, membership| Pod {
            port: format!("ns1_p{}", host - 4),
            row: RowId::new(0x100 + u128::from(host)),
            host,
            membership,
            told: BTreeMap::new(),
        };
        let state = State {
            rules: vec![],
            groups: 0,
            pods: [pod(5, 1), pod(6, 2)],
        };
        let mut world = Self {
            node,
            before: Vec::new(),
            state,
            generation: 0,
            is_apart: false,
            reached: BTreeSet::new(),
        };
        world.give_bindings();
        let rules = vec![allow("a.test"), allow("b.test"), deny_all()];
        world.edit(First::Manifest, rules, 3);
        world.node.pass(Duration::from_secs(1));
        world.node.waiting = Some(VecDeque::new());
        world.before.clear();
        world
    }

    /// The logical ports and the port groups as they are now.
    fn give_bindings(&mut self) {
        let pods = &self.state.pods;
        let groups = GROUPS.iter().enumerate().map(|(at, name)| {
            let ports = pods.iter().filter(|pod| pod.membership & (1 << at) != 0);
            let group = PortGroup {
                name: (*name).to_owned(),
                ports: ports.map(|pod| pod.port.clone()).collect(),
            };
            (group_row(at), Some(group))
        });
        let bindings = pods.iter().map(|pod| {
            let binding = port_binding(&pod.port, pod.host);
            (pod.row, Some(binding))
        });
        let gone = self.node.pods.iter();
        let gone = gone.filter(|(_, row)| pods.iter().all(|pod| pod.row != **row));
        let gone = gone.map(|(_, row)| (*row, None));
        let update = SbUpdate {
            port_bindings: gone.chain(bindings).collect(),
            port_groups: groups.collect(),
            ..SbUpdate::default()
        };
        self.node.pods = pods.iter().map(|pod| (pod.port.clone(), pod.row)).collect();
        self.node.give(Input::Sb(update));
    }

    fn edit(&mut self, first: First, rules: Vec<Rule>, groups: Membership) {
        // The manifest and OVN's rows do not come at once: what one of them lacks is not enforced.
        for [shown, other] in [[&self.state.rules, &rules], [&rules, &self.state.rules]] {
            let is_in_both = |rule: &Rule| {
                let mut others = other.iter();
                others.any(|other| other.destination == rule.destination)
            };
            let shown = shown.iter().map(|rule| match is_in_both(rule) {
                true => rule.clone(),
                false => allow("none.test"),
            });
            for groups in [self.state.groups, groups] {
                self.before.push(State {
                    rules: shown.clone().collect(),
                    groups,
                    ..self.state.clone()
                });
            }
        }
        let manifest = firewalls(false, Some(firewall(&rules)));
        let (mut nb, mut sb) = (NbUpdate::default(), SbUpdate::default());
        for (at, name) in GROUPS.iter().enumerate() {
            let enforced = match groups & (1 << at) {
                0 => &[],
                _ => &rules[..],
            };
            let first = 100 * u32::try_from(at).expect("two");
            let (of_nb, of_sb) = rows(("ns1", name, first), enforced);
            nb.acls.extend(of_nb.acls);
            sb.logical_flows.extend(of_sb.logical_flows);
        }
        (self.state.rules, self.state.groups) = (rules, groups);
        self.state.forget_unmentioned();
        let inputs = match first {
            First::Manifest => [manifest, Input::Nb(nb), Input::Sb(sb)],
            First::Rows => [Input::Nb(nb), Input::Sb(sb), manifest],
        };
        for input in inputs {
            self.node.give(input);
        }
    }

    fn replace(&mut self, at: usize, is_same_port: bool, is_late: bool) {
        self.generation += 1;
        let before = self.state.pods[at].clone();
        let generation = self.generation;
        let row = RowId::new((generation << 64) | u128::from(ifindex_of(before.row) % 100) | 0x100);
        let mut next = Pod {
            row,
            told: BTreeMap::new(),
            ..before.clone()
        };
        if !is_same_port {
            next.port = format!("ns1_q{generation}");
            next.host = 20 + 2 * u8::try_from(generation).expect("few") + at as u8;
        }
        assert_eq!(ifindex_of(before.row), ifindex_of(row));
        self.state.pods[at] = next.clone();
        let interfaces = |row, interface| {
            Input::Interfaces(InterfaceUpdate {
                reset: false,
                interfaces: vec![(row, interface)],
            })
        };
        let comes = interface(&next.port, next.host, &format!("uid-{generation}"));
        let mut inputs = [
            interfaces(before.row, None),
            interfaces(next.row, Some(comes)),
        ];
        if is_late {
            inputs.reverse();
        }
        let ifindex = ifindex_of(row);
        let deferred = &mut self.node.kernel.deferred;
        deferred.retain(|(of_frame, ..)| *of_frame != ifindex);
        for input in inputs {
            self.node.give(input);
        }
        self.give_bindings();
    }

    fn take(&mut self, step: &Step) {
        self.before.push(self.state.clone());
        match step.clone() {
            Step::Answer {
                pod,
                name,
                host,
                is_short,
                is_lost,
            } => {
                let ttl = if is_short { 1 } else { 3600 };
                let asked = &self.state.pods[pod];
                let mut waiting = self.node.waiting.iter().flatten();
                let is_attached = !waiting.any(|next| matches!(next, Command::Attachment(_)));
                let is_known = is_attached && !is_lost && self.state.mentions(asked, name);
                let until = match is_known {
                    true if is_short => self.node.now + MIN_TTL,
                    true => self.node.now + TTL,
                    false => Timestamp::default(),
                };
                let ifindex = ifindex_of(asked.row);
                let known = self.state.pods[pod].told.entry((name, host)).or_default();
                *known = until.max(*known);
                let bytes = answer_frame(NAMES[name], &[[203, 0, 113, host]], ttl);
                let bytes = self.node.to_pod(ifindex, bytes);
                if is_lost {
                    self.node.captured(ifindex, &bytes);
                } else {
                    self.node.frame(ifindex, &bytes);
                }
            }
            Step::Edit(first, rules, groups) => self.edit(first, rules, groups),
            Step::Join(pod, membership) => {
                self.state.pods[pod].membership = membership;
                self.state.forget_unmentioned();
                self.give_bindings();
            }
            Step::Replace {
                pod,
                is_same_port,
                is_late,
            } => self.replace(pod, is_same_port, is_late && !is_same_port),
            Step::Disconnect(seconds) => {
                self.node.give(Input::SwitchDown);
                // What was sent does not arrive any more.
                let waiting = self.node.waiting.as_mut().expect("commands wait");
                waiting
                    .retain(|command| !matches!(command, Command::Apply { .. } | Command::Ask(_)));
                self.is_apart = true;
                self.pass(seconds);
                self.node.give(Input::SwitchUp);
            }
            Step::Hide(hides) => self.node.hides_marks = hides,
            Step::Wipe => {
                for (key, (cookie, _)) in std::mem::take(&mut self.node.switch) {
                    self.node.give(Input::FlowLost { key, cookie });
                }
            }
            Step::Pass(seconds) => self.pass(seconds),
        }
    }

    /// Time passes, and the commands are carried out.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.node.pass(Duration::from_secs(1));
            self.carry_out(None, &Step::Pass(seconds));
        }
    }

    /// Carries out so many of the commands that wait, or all. A packet of each kind comes behind each.
    fn carry_out(&mut self, most: Option<usize>, step: &Step) {
        let mut done = 0;
        while most != Some(done) && self.node.carry_out_next() {
            done += 1;
            self.check(step);
        }
        let waiting = self.node.waiting.as_ref();
        let is_idle = waiting.is_some_and(VecDeque::is_empty) && !self.node.engine.is_writing();
        self.is_apart &= !self.node.engine.switch.is_compared();
        if is_idle && !self.is_apart {
            self.before.clear();
        }
    }

    fn packet(&self, pod: usize, host: u8, (port, is_translated): (u16, bool)) -> Packet {
        let pod = &self.state.pods[pod];
        Packet {
            ifindex: ifindex_of(pod.row),
            port: pod.host.into(),
            src: [10, 244, 0, pod.host].into(),
            dst: [203, 0, 113, host].into(),
            transport: Transport {
                protocol: Protocol::Tcp,
                port: Some(port),
            },
            is_translated,
            is_established: false,
        }
    }

    /// The packets of each kind: pod, host and port, and where they come to.
    fn packets(&self) -> impl Iterator<Item = ((usize, u8, u16), Packet)> {
        let kinds = (0..2).flat_map(|pod| {
            HOSTS.into_iter().flat_map(move |host| {
                let ports = PORTS.into_iter().chain([9]);
                ports.map(move |port| (pod, host, port))
            })
        });
        kinds.flat_map(move |(pod, host, port)| {
            let both = [false, true].into_iter();
            both.map(move |is_translated| {
                let packet = self.packet(pod, host, (port, is_translated));
                ((pod, host, port), packet)
            })
        })
    }

    /// No packet passes that neither the rules now nor those before let pass.
    fn check(&mut self, step: &Step) {
        let now = self.node.now;
        let mut reached = BTreeSet::new();
        for (kind, packet) in self.packets() {
            match packet.follow(&self.node) {
                Verdict::Passes(priority) => {
                    reached.insert("a packet passed");
                    let index = usize::from(11_000_u16.saturating_sub(priority));
                    let mut states = self.before.iter().chain([&self.state]);
                    let may_pass = |state: &State| {
                        // A pod that has gone leaves its flows until the switch has followed.
                        let pod = &state.pods[kind.0];
                        ifindex_of(pod.row) == packet.ifindex && state.may_pass(kind, index, now)
                    };
                    assert!(
                        states.any(may_pass),
                        "{step:?}: {packet:?} passes by {priority}: {:#?}",
                        (&self.state, self.node.log.last())
                    );
                }
                Verdict::Dropped(_) => {
                    reached.insert("a packet was dropped");
                }
                Verdict::Left => {}
            }
        }
        self.reached.extend(reached);
    }

    /// Everything has calmed down: what is told and still counts is what the rules say.
    fn check_at_rest(&mut self) {
        self.node.hides_marks = false;
        self.pass(3 * COMPARE_INTERVAL.as_secs());
        assert!(self.before.is_empty(), "the switch has followed");
        let now = self.node.now;
        let has_ends = self.node.tags_ends().next().is_some();
        for ((pod, host, port), packet) in self.packets() {
            let (sure, others) = self.state.names(pod, host, now);
            let verdict = packet.follow(&self.node);
            if has_ends {
                assert_eq!(packet.leaves_with(&self.node), (0, 0), "{packet:?}");
            }
            if !others.is_empty() || packet.is_translated {
                continue;
            }
            let expected = self.state.verdict(&self.state.pods[pod], &sure, port);
            let expected = expected.map_or(Verdict::Left, |(index, action)| {
                let priority = 11_000 - u16::try_from(index).expect("few");
                match action {
                    RuleAction::Allow => Verdict::Passes(priority),
                    RuleAction::Deny => Verdict::Dropped(priority),
                }
            });
            assert_eq!(verdict, expected, "{packet:?}: {:#?}", self.state);
        }
    }
}

thread_local! {
    static REACHED: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

fn run(way: Option<u32>, story: Vec<(Step, Option<usize>)>) {
    let mut world = World::new(way);
    for (step, lag) in &story {
        world.take(step);
        world.check(step);
        world.carry_out(*lag, step);
    }
    world.check_at_rest();
    REACHED.with_borrow_mut(|reached| reached.extend(world.reached));
}

/// Whatever happens, no packet passes that the rules do not let pass.
fn follow_packets(way: Option<u32>) {
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&story(), |story| {
        run(way, story);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    let reached = REACHED.with_borrow(BTreeSet::len);
    assert_eq!(reached, 2, "packets pass, and others are dropped");
}

#[test]
fn a_packet_passes_by_the_rules_before_or_after_each_command() {
    follow_packets(None);
}

/// The second port group of a port gets its first rule.
#[test]
fn a_port_group_that_gets_its_first_rule_opens_nothing_by_former_marks() {
    let rules = || vec![allow("a.test"), allow("b.test"), deny_all()];
    let answer = |pod, name| Step::Answer {
        pod,
        name,
        host: HOSTS[0],
        is_short: false,
        is_lost: false,
    };
    let story = [
        Step::Edit(First::Manifest, rules(), 2),
        Step::Join(0, 3),
        answer(1, 1),
        answer(1, 0),
        Step::Edit(First::Manifest, rules(), 1),
        answer(0, 0),
        Step::Edit(First::Manifest, rules(), 3),
    ];
    let story = story.into_iter().map(|step| (step, None));
    run(WAYS[1], story.collect());
}
