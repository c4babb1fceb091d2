//! A start with the flows and marks of an earlier agent, beside a start without any.
//!
//! Both agents read the same snapshot and the same rows at the same time. The second agent is the witness: it can
//! open only the addresses of the rules and the snapshot. The first one may have more open only for an address
//! without a name in the snapshot, at the place of a rule that allows, by a flow that is younger than the pod, and only
//! until nobody has used it for a while. Then both nodes are the same, and stay the same with any further input.

use std::cell::Cell;

use proptest::{
    collection::vec,
    option,
    prelude::*,
    test_runner::{Config as ProptestConfig, TestRunner},
};

use super::super::edits::{First, WAYS, aged, config, edit, use_all};
use super::*;

const NAMES: [&str; 3] = ["a.test", "b.test", "www.a.test"];
const PODS: [(&str, u8); 2] = [("p1", 5), ("p2", 6)];
const TTLS: [u32; 2] = [60, 600];
/// Longer than a flow without a name that allows stays when nobody uses it.
const FORGOTTEN: Duration = Duration::from_secs(300);
/// Longer than one that denies stays, and than a mark.
const DENIAL_FORGOTTEN: Duration = Duration::from_secs(2 * 3600);

#[derive(Clone, Debug)]
enum Step {
    /// A pod is told an address of a name.
    Answer {
        pod: usize,
        name: usize,
        host: u8,
        ttl: usize,
    },
    Edit(First, Vec<Rule>),
    /// Each flow and each mark sees a packet.
    Use,
    /// Time passes, in seconds.
    Pass(u64),
    /// The snapshot is written.
    Save,
    /// The pod goes, and another one comes under its name and address.
    Recreate(usize),
}

/// The time without an agent, and the start.
#[derive(Clone, Debug)]
struct Restart {
    snapshot: Left,
    /// In seconds.
    away: u64,
    /// By how much the clock of the snapshot was set forward meanwhile, in seconds; negative: back.
    clock_step: i64,
    edited: Option<Vec<Rule>>,
    recreated: Option<usize>,
    /// A flow or a mark is lost if its bit is set.
    lost: u16,
    is_used: bool,
}

/// The snapshot that the next agent reads.
#[derive(Clone, Copy, Debug)]
enum Left {
    /// As it is at the end.
    Now,
    /// As it was last written.
    Last,
    /// As it is at the end, beside flows and marks as they were when it was last written.
    Newer,
    Nothing,
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let rule = (0..NAMES.len(), any::<bool>());
    vec(rule, 0..4).prop_map(|choice| {
        let rule = |(name, is_allowed)| match is_allowed {
            true => allow(NAMES[name]),
            false => deny(NAMES[name]),
        };
        choice.into_iter().map(rule).chain([deny_all()]).collect()
    })
}

fn step() -> impl Strategy<Value = Step> {
    let first = prop_oneof![Just(First::Manifest), Just(First::Rows)];
    let answer = (0..PODS.len(), 0..NAMES.len(), 1..4_u8, 0..TTLS.len());
    prop_oneof![
        6 => answer.prop_map(|(pod, name, host, ttl)| Step::Answer { pod, name, host, ttl }),
        3 => (first, rules()).prop_map(|(first, rules)| Step::Edit(first, rules)),
        2 => Just(Step::Use),
        2 => prop_oneof![1..25_u64, 55..70_u64].prop_map(Step::Pass),
        2 => Just(Step::Save),
        1 => (0..PODS.len()).prop_map(Step::Recreate),
    ]
}

fn restart() -> impl Strategy<Value = Restart> {
    let left = prop_oneof![
        3 => Just(Left::Now),
        2 => Just(Left::Last),
        2 => Just(Left::Newer),
        1 => Just(Left::Nothing),
    ];
    let away = prop_oneof![Just(0), 1..20_u64, 55..70_u64];
    let clock_step = prop_oneof![3 => Just(0), 1 => -100..100_i64];
    let recreated = option::weighted(0.3, 0..PODS.len());
    let lost = prop_oneof![2 => Just(0), 1 => any::<u16>()];
    (
        (left, away, clock_step),
        option::of(rules()),
        recreated,
        lost,
        any::<bool>(),
    )
        .prop_map(
            |((snapshot, away, clock_step), edited, recreated, lost, is_used)| Restart {
                snapshot,
                away,
                clock_step,
                edited,
                recreated,
                lost,
                is_used,
            },
        )
}

/// The UID and the row of the pod that has a place in [`PODS`]: another one for each generation.
type Generations = [u128; PODS.len()];

fn uid(pod: usize, generation: u128) -> String {
    format!("uid-{pod}-{generation}")
}

fn row(pod: usize, generation: u128) -> RowId {
    RowId::new(0x100 * (generation + 1) + u128::from(PODS[pod].1))
}

fn recreate(node: &mut Node, generations: &mut Generations, pod: usize) {
    generations[pod] += 1;
    let (name, host) = PODS[pod];
    node.remove_interface(name);
    let generation = generations[pod];
    node.add_pod_as(name, host, &uid(pod, generation), row(pod, generation));
}

/// A new agent reads everything.
fn read_all(mut node: Node, generations: &Generations, rules: &[Rule]) -> Node {
    node.trust_server();
    read_rules(&mut node, rules);
    let pods = || PODS.iter().zip(generations).enumerate();
    let interfaces = pods().map(|(pod, ((name, host), generation))| {
        let uid = uid(pod, *generation);
        let interface = interface(&format!("ns1_{name}"), *host, &uid);
        (row(pod, *generation), Some(interface))
    });
    node.give(Input::Interfaces(InterfaceUpdate {
        reset: true,
        interfaces: interfaces.collect(),
    }));
    let mut port_bindings = Vec::new();
    for (pod, ((name, host), generation)) in pods() {
        let (port, row) = (format!("ns1_{name}"), row(pod, *generation));
        port_bindings.push((row, Some(port_binding(&port, *host))));
        node.pods.insert(port, row);
    }
    let sb = SbUpdate {
        reset: true,
        datapaths: vec![(DATAPATH, Some(Datapath { tunnel_key: 3 }))],
        port_bindings,
        port_groups: vec![node.group()],
        logical_flows: logical_flows(rules),
        ..SbUpdate::default()
    };
    node.give(Input::Sb(sb));
    node
}

/// A story's step; the same for both nodes behind the restart.
fn take(node: &mut Node, step: &Step) {
    match step {
        Step::Answer {
            pod,
            name,
            host,
            ttl,
        } => node.answer(
            PODS[*pod].0,
            NAMES[*name],
            &[[203, 0, 113, *host]],
            TTLS[*ttl],
        ),
        Step::Edit(first, rules) => edit(node, *first, rules),
        Step::Use => use_all(node),
        Step::Pass(seconds) => node.pass(Duration::from_secs(*seconds)),
        Step::Save | Step::Recreate(_) => {}
    }
}

/// Source, destination and priority.
type Flow = (String, String, u16);

/// All that the switch and the kernel do for single addresses.
fn flows(node: &Node) -> BTreeSet<Flow> {
    node.open().into_iter().collect()
}

fn is_of_rule(flow: &Flow, rules: &[Rule], action: RuleAction) -> bool {
    let rule = rules.get(usize::from(11_000 - flow.2));
    rule.is_some_and(|rule| {
        rule.action == action && matches!(rule.destination, Destination::Name(_))
    })
}

/// The time that a snapshot has seen go by.
fn age(saved: Vec<SavedEntry>, passed: Duration, clock_step: i64) -> Vec<SavedEntry> {
    let passed = i64::try_from(passed.as_secs()).expect("a story is short");
    // What reads the snapshot takes a clock that was set back for one that stood still.
    let passed = u64::try_from(passed + clock_step).unwrap_or_default();
    aged(saved, Duration::from_secs(passed))
}

/// How many flows there were at the start.
#[derive(Clone, Copy, Debug)]
struct Found {
    /// Of the witness.
    expected: usize,
    /// Only beside the witness.
    more: usize,
}

fn run(way: Option<u32>, before: Vec<Step>, restart: Restart, behind: Vec<Step>) -> Found {
    let mut rules = vec![allow("a.test"), deny("b.test"), deny_all()];
    let mut generations = [0; PODS.len()];
    let mut node = Node::bare();
    node.engine = Engine::new(config(way));
    let mut node = read_all(node, &generations, &rules);
    let switch = |node: &Node| {
        (
            node.switch.clone(),
            node.written.clone(),
            node.marks.clone(),
        )
    };
    let mut last = (Vec::new(), node.now, switch(&node));
    for step in before {
        take(&mut node, &step);
        match step {
            Step::Edit(_, edited) => rules = edited,
            Step::Recreate(pod) => recreate(&mut node, &mut generations, pod),
            Step::Save => {
                last = (node.engine.snapshot(node.now), node.now, switch(&node));
            }
            _ => {}
        }
    }

    let Restart {
        snapshot,
        away,
        clock_step,
        edited,
        recreated,
        lost,
        is_used,
    } = restart.clone();
    let (saved, at) = match snapshot {
        Left::Now | Left::Newer => (node.engine.snapshot(node.now), node.now),
        Left::Last => (last.0, last.1),
        Left::Nothing => (Vec::new(), node.now),
    };
    if matches!(snapshot, Left::Newer) {
        (node.switch, node.written, node.marks) = last.2;
    }
    let mut bit = 0;
    let mut is_kept = || {
        bit += 1;
        lost >> (bit % 16) & 1 == 0
    };
    let before_losses = flows(&node);
    node.switch.retain(|_, _| is_kept());
    node.marks.retain(|_, _| is_kept());
    if is_used {
        use_all(&mut node);
    }
    let away = Duration::from_secs(away);
    let saved = age(saved, node.now.since(at) + away, clock_step);
    node.now = node.now + away;
    // A mark that is left brings back the flows of its number.
    let left = match way {
        None => flows(&node),
        Some(_) => before_losses,
    };
    if let Some(pod) = recreated {
        generations[pod] += 1;
    }
    rules = edited.unwrap_or(rules);

    let mut witness = Node::bare();
    witness.now = node.now;
    let witness = started(&mut witness, &saved, config(way));
    let mut witness = read_all(witness, &generations, &rules);
    let node = started(&mut node, &saved, config(way));
    let mut node = read_all(node, &generations, &rules);
    let pod_of = |flow: &Flow| {
        let mut pods = PODS.iter().enumerate();
        let pod = pods.find(|(_, (_, host))| flow.0 == format!("10.244.0.{host}"));
        pod.expect("flows are of the pods").0
    };
    // A name whose time is over may stay while the flow is used.
    let has_names = |flow: &Flow| {
        let pod = pod_of(flow);
        let uid = uid(pod, generations[pod]);
        saved.iter().any(|entry| {
            let mut names = entry.names.iter();
            entry.pod.as_deref() == Some(&uid)
                && entry.address.to_string() == flow.1
                && names.all(|name| !name.rest.is_zero())
        })
    };
    // The kernel forgets an interface with its marks.
    let is_of_another = |node: &Node, flow: &Flow| {
        let pod = pod_of(flow);
        let (.., since) = node.switch_ports[&row(pod, generations[pod])];
        let mut keys = node.switch.keys();
        let key = keys.find(|key| {
            let ends = key.matches.ends;
            ends.dst().is_some_and(|dst| dst.to_string() == flow.1)
                && ends.src().to_string() == flow.0
                && key.priority == flow.2
        });
        key.is_some_and(|key| node.written[key] <= since)
    };
    let case = format!("{restart:?}");
    let missing: Vec<_> = flows(&witness).difference(&flows(&node)).cloned().collect();
    assert!(missing.is_empty(), "{case}: missing {missing:?}");
    let at_start = Found {
        expected: flows(&witness).len(),
        more: flows(&node).difference(&flows(&witness)).count(),
    };
    for _ in 0..2 {
        let (found, expected) = (flows(&node), flows(&witness));
        for more in found.difference(&expected) {
            let is_ruled = [RuleAction::Allow, RuleAction::Deny]
                .into_iter()
                .any(|action| is_of_rule(more, &rules, action));
            // A flow takes the place of another one of the same address.
            let was_there = left
                .iter()
                .any(|left| (&left.0, &left.1) == (&more.0, &more.1));
            assert!(was_there, "{case}: {more:?} was not there");
            assert!(is_ruled, "{case}: no rule for {more:?}");
            assert!(!has_names(more), "{case}: the names of {more:?} are known");
            assert!(!is_of_another(&node, more), "{case}: {more:?} is another's");
        }
        node.pass(COMPARE_INTERVAL);
        witness.pass(COMPARE_INTERVAL);
    }
    node.pass(FORGOTTEN);
    witness.pass(FORGOTTEN);
    let found = flows(&node);
    // A flow that denies keeps all flows of its address.
    let is_denied = |flow: &Flow| {
        let mut of_address = found.iter().filter(|other| other.1 == flow.1);
        of_address.any(|other| other.0 == flow.0 && is_of_rule(other, &rules, RuleAction::Deny))
    };
    let allowed = |node: &Node| {
        let mut allowed = flows(node);
        allowed.retain(|flow| is_of_rule(flow, &rules, RuleAction::Allow) && !is_denied(flow));
        allowed
    };
    // A mark keeps the end that its answer gave it.
    if way.is_none() {
        assert_eq!(allowed(&node), allowed(&witness), "{case}");
    }
    if flows(&node) != flows(&witness) {
        node.pass(DENIAL_FORGOTTEN);
        witness.pass(DENIAL_FORGOTTEN);
    }
    assert_eq!(flows(&node), flows(&witness), "{case}");
    for step in behind {
        for node in [&mut node, &mut witness] {
            take(node, &step);
            // What is learned by counting takes a comparison.
            node.pass(COMPARE_INTERVAL);
        }
        assert_eq!(flows(&node), flows(&witness), "{case}, then {step:?}");
    }
    at_start
}

#[test]
fn a_start_over_what_was_left_is_a_start_with_nothing_left() {
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 192,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let stories = (vec(step(), 1..12), restart(), vec(step(), 0..6));
    let (expected, more) = (Cell::new(0), Cell::new(0));
    let result = runner.run(&stories, |(before, restart, behind)| {
        for way in WAYS {
            let found = run(way, before.clone(), restart.clone(), behind.clone());
            expected.set(expected.get() + found.expected);
            more.set(more.get() + found.more);
        }
        Ok(())
    });
    result.expect("both starts come to the same");
    assert!(expected.get() > 0 && more.get() > 0, "no story had flows");
}

/// Found by the test above: at the first comparison, a sentinel flow was not needed any more and was removed behind the
/// flows for which it was added again.
#[test]
fn a_start_leaves_no_flow_without_its_sentinel_flow() {
    let rules = vec![allow("a.test"), deny("a.test"), deny_all()];
    let told = Step::Answer {
        pod: 0,
        name: 2,
        host: 1,
        ttl: 0,
    };
    let before = vec![
        Step::Edit(First::Manifest, vec![deny_all()]),
        Step::Edit(First::Manifest, rules),
        told,
    ];
    let restart = Restart {
        snapshot: Left::Last,
        away: 0,
        clock_step: 0,
        edited: None,
        recreated: None,
        lost: 48802,
        is_used: false,
    };
    for way in WAYS {
        run(way, before.clone(), restart.clone(), Vec::new());
    }
}

/// Found by the test above: a mark that no snapshot knows stayed with its flows, although a rule denies the name of one
/// of them now.
#[test]
fn a_start_leaves_no_mark_where_a_rule_has_come_to_deny() {
    let rules = vec![allow("a.test"), allow("a.test"), deny_all()];
    let before = vec![
        Step::Edit(First::Manifest, rules),
        Step::Answer {
            pod: 0,
            name: 2,
            host: 1,
            ttl: 0,
        },
    ];
    let restart = Restart {
        snapshot: Left::Nothing,
        away: 0,
        clock_step: 0,
        edited: Some(vec![deny("a.test"), deny_all()]),
        recreated: None,
        lost: 0,
        is_used: false,
    };
    for way in WAYS {
        run(way, before.clone(), restart.clone(), Vec::new());
    }
}
