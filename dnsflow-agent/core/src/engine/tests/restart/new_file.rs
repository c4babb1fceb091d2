//! A new file of the journal: what lives is given out in parts, while answers, ends and pods come between them.

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config as ProptestConfig, TestRunner},
};

use super::*;

/// What happens before a part, or before several.
#[derive(Clone, Copy, Debug)]
enum Step {
    Part,
    /// A pod is told a name with an address.
    Told(usize, u8, u8),
    /// Seconds pass.
    Pass(u64),
    /// The interface of a pod goes.
    Goes(usize),
    /// It comes, and OVN's row if there is none.
    Comes(usize),
}

const PODS: [(&str, u8); 3] = [("p2", 6), ("p3", 7), ("p4", 8)];

fn step() -> impl Strategy<Value = Step> {
    let pod = 0..PODS.len();
    prop_oneof![
        5 => Just(Step::Part),
        4 => (pod.clone(), 0..4_u8, 0..8_u8).prop_map(|(pod, name, host)| Step::Told(pod, name, host)),
        1 => (1..90_u64).prop_map(Step::Pass),
        1 => pod.clone().prop_map(Step::Goes),
        1 => pod.prop_map(Step::Comes),
    ]
}

fn take(node: &mut Node, step: Step) {
    let is_there = |node: &Node, (name, host): (&str, u8)| {
        let ifindex = ifindex_of(RowId::new(0x100 + u128::from(host)));
        node.engine.port_at(ifindex) == Some(format!("ns1_{name}").as_str())
    };
    match step {
        Step::Part => {}
        Step::Told(pod, name, host) => {
            let (pod, ip) = PODS[pod];
            if is_there(node, (pod, ip)) {
                node.answer(
                    pod,
                    &format!("n{name}.example.com"),
                    &[[203, 0, 113, host]],
                    60,
                );
            }
        }
        Step::Pass(seconds) => node.pass(Duration::from_secs(seconds)),
        Step::Goes(pod) if is_there(node, PODS[pod]) => node.remove_interface(PODS[pod].0),
        Step::Comes(pod) if !is_there(node, PODS[pod]) => {
            let (name, host) = PODS[pod];
            node.add_pod(name, host);
        }
        Step::Goes(_) | Step::Comes(_) => {}
    }
}

/// Port, address and name of all names.
fn names(saved: &Saved) -> BTreeSet<(String, IpAddr, String)> {
    let entries = saved.entries.iter();
    let names = entries.flat_map(|entry| {
        let names = entry.names.iter();
        names.map(|name| (entry.port.to_string(), entry.address, name.name.to_string()))
    });
    names.collect()
}

/// A new file is begun behind some steps, in a run or during its start. Returns how many names it has.
fn run(in_a_start: bool, before: &[Step], between: &[Step]) -> usize {
    let rules = [allow("example.com"), deny_all()];
    let mut node = Node::with(&rules);
    for (name, host) in PODS {
        node.add_pod(name, host);
    }
    for step in before {
        take(&mut node, *step);
    }
    if in_a_start {
        let saved = node.folded(&[]);
        let mut earlier = node;
        node = started_with(&mut earlier, Some(saved), Config::default());
        read_rules(&mut node, &rules);
    }
    let (mut parts, mut file, mut is_whole) = (Parts::default(), Vec::new(), false);
    let mut steps = between.iter();
    while !is_whole {
        let step = steps.next().copied().unwrap_or(Step::Part);
        node.journal.clear();
        take(&mut node, step);
        file.append(&mut node.journal);
        if let Step::Part = step {
            match node.engine.next_part(&mut parts) {
                Some(part) => file.extend(part),
                None => is_whole = true,
            }
        }
    }
    let expected = names(&node.engine.saved(node.now));
    assert_eq!(names(&fold(file, node.now)), expected);
    expected.len()
}

#[test]
fn a_new_file_has_what_lives_whatever_happens_between_its_parts() {
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 96,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let stories = (any::<bool>(), vec(step(), 0..60), vec(step(), 0..60));
    let told: Vec<Step> = (0..12)
        .map(|at| Step::Told(at % 3, at as u8 / 3, at as u8 % 8))
        .collect();
    for in_a_start in [false, true] {
        assert_eq!(run(in_a_start, &told, &[]), told.len());
    }
    let result = runner.run(&stories, |(in_a_start, before, between)| {
        run(in_a_start, &before, &between);
        Ok(())
    });
    result.expect("the file has all names and no others");
}
