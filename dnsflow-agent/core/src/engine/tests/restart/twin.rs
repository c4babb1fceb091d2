//! A start from a journal, over the flows and marks of an earlier agent, beside a start over nothing.
//!
//! The earlier agent is killed behind any command of its last step, and so may be further starts. The records of all of
//! them are folded: they are the names of its cache. Both agents then start from the same records and the same rows. The
//! second one is the witness: it can open only the addresses of the rules and the names. From the start on, both have the
//! same open, but for a name whose time is over, which stays while it is used.

use std::cell::Cell;

use proptest::{
    collection::vec,
    option,
    prelude::*,
    test_runner::{Config as ProptestConfig, TestRunner},
};

use super::super::edits::{First, WAYS, config, edit, use_all};
use super::*;
use crate::{
    cache::journal::Record,
    io::input::MarkChange,
    values::limits::{ENDED_STAYS, TERM_SLOT_S},
};

const NAMES: [&str; 3] = ["a.test", "b.test", "www.a.test"];
const PODS: [(&str, u8); 2] = [("p1", 5), ("p2", 6)];
const TTLS: [u32; 2] = [60, 1200];
/// Longer than a name stays whose time is over and whose flow is not used, and behind that its established connections.
const FORGOTTEN: Duration = Duration::from_secs(300 + ENDED_STAYS.as_secs());
/// As many commands as no step has.
const ALL_COMMANDS: usize = 30;

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
    /// The pod goes, and another one comes under its name and address.
    Recreate(usize),
}

/// The end of the agent, the time without one, and the start.
#[derive(Clone, Debug)]
struct Restart {
    /// The agent is killed behind so many commands of its last step.
    killed_at: usize,
    /// Starts that are killed behind so many commands.
    early: Vec<usize>,
    /// In seconds.
    away: u64,
    edited: Option<Vec<Rule>>,
    recreated: Option<usize>,
    /// A flow or a mark is lost if its bit is set.
    lost: u16,
    is_used: bool,
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
        1 => (0..PODS.len()).prop_map(Step::Recreate),
    ]
}

fn restart() -> impl Strategy<Value = Restart> {
    let killed_at = prop_oneof![0..6_usize, Just(ALL_COMMANDS)];
    let early = prop_oneof![Just(Vec::new()), vec(0..14_usize, 1..3)];
    let away = prop_oneof![Just(0), 1..20_u64, 55..70_u64];
    let recreated = option::weighted(0.3, 0..PODS.len());
    let lost = prop_oneof![2 => Just(0), 1 => any::<u16>()];
    let all = (
        (killed_at, early, away),
        option::of(rules()),
        recreated,
        lost,
        any::<bool>(),
    );
    all.prop_map(
        |((killed_at, early, away), edited, recreated, lost, is_used)| Restart {
            killed_at,
            early,
            away,
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
        Step::Recreate(_) => {}
    }
}

/// Source, destination and priority.
type Flow = (String, String, u16);

/// All that the switch and the kernel do for single addresses.
fn flows(node: &Node) -> BTreeSet<Flow> {
    node.open().into_iter().collect()
}

/// The records of `before` and of `node` are the names of `node`'s cache.
fn check_records(node: &Node, before: &[Record], case: &str) {
    let (folded, known) = (node.folded(before), node.engine.saved(node.now));
    assert_eq!(in_slots(node, &folded), in_slots(node, &known), "{case}");
}

/// Each name of each address, with its term as exactly as records have it.
fn in_slots(node: &Node, saved: &Saved) -> BTreeSet<String> {
    let slot = |rest: Duration| (node.now + rest).as_nanos() / 1_000_000_000 / TERM_SLOT_S;
    let names = saved.entries.iter().flat_map(|entry| {
        entry.names.iter().map(move |name| {
            let state = (name.is_denied, name.is_ended);
            let ends = (slot(name.rest), slot(name.deny_rest), state);
            let SavedEntry { port, address, .. } = entry;
            let pod = &saved.ports[port];
            format!("{port} {pod:?} {address} {} {ends:?}", name.name)
        })
    });
    names.collect()
}

/// The changes that the log of a node has, but for the end of flows.
fn changes(node: &Node, marks_before: &BTreeMap<(u32, IpAddr), u32>) -> Vec<String> {
    let of_command = |command: &Command| match command {
        Command::Apply { changes, .. } => {
            let adds = |change: &&FlowChange| matches!(change, FlowChange::Add(key, _) if Sentinel::of(key).is_none());
            let added = changes.iter().filter(adds);
            added.map(|change| format!("{change:?}")).collect()
        }
        Command::Mark(changes) => {
            let is_news = |change: &&MarkChange| match change {
                MarkChange::Set {
                    ifindex,
                    address,
                    mark,
                    ..
                } => marks_before.get(&(*ifindex, *address)) != Some(mark),
                MarkChange::Remove { .. } => true,
            };
            let news = changes.iter().filter(is_news);
            news.map(|change| format!("{change:?}")).collect()
        }
        _ => Vec::new(),
    };
    node.log.iter().flat_map(of_command).collect()
}

/// Returns how many flows the witness had, and whether a restart in which nothing happened had some.
fn run(way: Option<u32>, before: &[Step], restart: &Restart, behind: &[Step]) -> (usize, bool) {
    let case = format!("{way:?} {before:?} {restart:?}");
    let mut rules = vec![allow("a.test"), deny("b.test"), deny_all()];
    let mut generations = [0; PODS.len()];
    let mut node = Node::bare();
    node.engine = Engine::new(config(way));
    let mut node = read_all(node, &generations, &rules);
    for (at, step) in before.iter().enumerate() {
        let is_last = at + 1 == before.len();
        if is_last {
            node.waiting = Some(VecDeque::new());
        }
        take(&mut node, step);
        match step {
            Step::Edit(_, edited) => rules.clone_from(edited),
            Step::Recreate(pod) => recreate(&mut node, &mut generations, *pod),
            _ => {}
        }
        if is_last {
            for _ in 0..restart.killed_at {
                node.carry_out_next();
            }
            node.waiting = None;
        }
        check_records(&node, &[], &case);
    }
    let mut bit = 0;
    let mut is_kept = || {
        bit += 1;
        restart.lost >> (bit % 16) & 1 == 0
    };
    node.switch.retain(|_, _| is_kept());
    node.marks.retain(|_, _| is_kept());
    if restart.is_used {
        use_all(&mut node);
    }
    node.now = node.now + Duration::from_secs(restart.away);
    if let Some(pod) = restart.recreated {
        generations[pod] += 1;
    }
    rules = restart.edited.clone().unwrap_or(rules);
    let mut records = std::mem::take(&mut node.journal);
    for carried_out in &restart.early {
        let saved = node.folded(&records);
        let mut next = started_with(&mut node, Some(saved), config(way));
        next.waiting = Some(VecDeque::new());
        let mut next = read_all(next, &generations, &rules);
        for _ in 0..*carried_out {
            next.carry_out_next();
        }
        next.waiting = None;
        check_records(&next, &records, &case);
        records.append(&mut next.journal);
        node = next;
    }
    let saved = node.folded(&records);
    let marks = node.marks.iter();
    let marks_before = marks.map(|(place, (mark, ..))| (*place, *mark)).collect();
    let mut witness = Node::bare();
    witness.now = node.now;
    let witness = started_with(&mut witness, Some(saved.clone()), config(way));
    let mut witness = read_all(witness, &generations, &rules);
    let node = started_with(&mut node, Some(saved.clone()), config(way));
    let mut node = read_all(node, &generations, &rules);
    let names = || saved.entries.iter().flat_map(|entry| &entry.names);
    let is_plain = restart.edited.is_none()
        && restart.recreated.is_none()
        && restart.lost == 0
        && restart.early.is_empty()
        && restart.killed_at == ALL_COMMANDS
        && names().all(|name| !name.rest.is_zero());
    // By marks, the agent may not have come to the marks yet.
    if is_plain && way.is_none() {
        let changes = changes(&node, &marks_before);
        assert!(
            changes.is_empty(),
            "nothing has happened: {case}: {changes:?}"
        );
    }
    // A name whose time is over stays while the flow is used, and the witness knows of no use before the start.
    let may_be_over = |flow: &Flow, within: Duration| {
        saved.entries.iter().any(|entry| {
            let mut names = entry.names.iter();
            entry.address.to_string() == flow.1 && names.any(|name| name.rest <= within)
        })
    };
    let check = |node: &Node, witness: &Node, passed: Duration| {
        let (found, expected) = (flows(node), flows(witness));
        let is_to_be = |flow: &&Flow| !may_be_over(flow, passed);
        let missing = expected.difference(&found);
        let missing: Vec<_> = missing
            .filter(|flow| passed.is_zero() || is_to_be(flow))
            .collect();
        let more: Vec<_> = found.difference(&expected).filter(is_to_be).collect();
        let is_same = missing.is_empty() && more.is_empty();
        assert!(
            is_same,
            "{passed:?}: {case}: missing {missing:?}, more {more:?}"
        );
    };
    check(&node, &witness, Duration::ZERO);
    check_records(&node, &records, &case);
    let expected = flows(&witness).len();
    for node in [&mut node, &mut witness] {
        node.pass(COMPARE_INTERVAL);
    }
    check(&node, &witness, COMPARE_INTERVAL);
    for node in [&mut node, &mut witness] {
        node.pass(FORGOTTEN);
    }
    assert_eq!(flows(&node), flows(&witness), "{case}");
    for step in behind {
        for node in [&mut node, &mut witness] {
            take(node, step);
            // What is learned by counting takes a comparison.
            node.pass(COMPARE_INTERVAL);
        }
        assert_eq!(flows(&node), flows(&witness), "{case}, then {step:?}");
    }
    check_records(&node, &records, &case);
    (expected, is_plain && expected > 0)
}

#[test]
fn a_start_over_what_was_left_is_a_start_with_nothing_left() {
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 192,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let stories = (vec(step(), 1..12), restart(), vec(step(), 0..6));
    let (expected, plain) = (Cell::new(0), Cell::new(0));
    let result = runner.run(&stories, |(before, restart, behind)| {
        for way in WAYS {
            let (flows, is_plain) = run(way, &before, &restart, &behind);
            expected.set(expected.get() + flows);
            plain.set(plain.get() + usize::from(is_plain));
        }
        Ok(())
    });
    result.expect("both starts come to the same");
    assert!(expected.get() > 0 && plain.get() > 0, "no story had flows");
}
