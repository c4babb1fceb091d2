//! Marks of former groups and of former runs, and the flows that replace them.

use std::collections::VecDeque;

use super::{
    backends::lead_to,
    edits::{ONE_NUMBER, WAYS, config, node},
    limits::many,
    numbers::{is_of, tag},
    restart::{read_but_southbound, southbound, started},
    starts::{carry_out_until_dump, edit, is_open, is_open_at_all},
    *,
};
use crate::values::limits::{CHANGES_UNDER_WAY_MAX, GROUP_RESTS, GROUP_STAYS};

pub(super) fn is_apply(command: &Command) -> bool {
    matches!(command, Command::Apply { .. })
}

/// The flows of a pod's rules are planned some time before the first comparison ends: the dump of a large switch takes
/// seconds, and so do further interfaces. The former mark stays until a dump should have shown the flows of the next group.
#[test]
fn a_former_mark_stays_until_its_successor_has_had_the_time_to_come() {
    let former = [allow("example.com"), deny_all()];
    let moved = [allow("new.test"), allow("example.com"), deny_all()];
    for dump_takes in [0, 6] {
        let mut before = node(WAYS[1], &former);
        before.answer("p1", "www.example.com", &[ADDRESS], 600);
        let saved = before.folded(&[]);
        let node = started(&mut before, &saved, config(WAYS[1]));
        let mut node = read_but_southbound(node, &before, &moved);
        node.waiting = Some(VecDeque::new());
        node.give(Input::Sb(southbound(&node, &moved)));
        carry_out_until_dump(&mut node);
        node.pass(Duration::from_secs(dump_takes));
        assert!(node.carry_out_next());
        assert!(node.engine.switch.is_compared());
        // The switch answers the batch with the next group 1.5 seconds later.
        let mut held = VecDeque::new();
        for step in 0..15 {
            node.pass(Duration::from_millis(100));
            loop {
                let waiting = node.waiting.take().into_iter().flatten();
                let (applies, others): (Vec<_>, Vec<_>) = waiting.partition(is_apply);
                held.extend(applies);
                node.waiting = Some(others.into());
                if !node.carry_out_next() {
                    break;
                }
            }
            assert!(
                is_open_at_all(&node, ADDRESS),
                "dump of {dump_takes} s, step {step}"
            );
        }
        node.waiting = Some(held);
        while node.carry_out_next() {}
        assert!(is_open(&node, ADDRESS, 1), "dump of {dump_takes} s");
    }
}

/// Two pods with an address by a mark each.
pub(super) fn two_pods() -> Node {
    let rules = [allow("a.test"), allow("b.test"), deny_all()];
    let mut node = node(WAYS[1], &rules);
    node.add_pod("p2", 6);
    node.answer("p1", "a.test", &[ADDRESS], 3600);
    node.answer("p2", "b.test", &[OTHER], 3600);
    node.pass(Duration::from_secs(30));
    node
}

/// Their rules, in other places.
pub(super) fn moved() -> [Rule; 4] {
    [
        allow("new.test"),
        allow("a.test"),
        allow("b.test"),
        deny_all(),
    ]
}

/// The flow of the second pod behind the edit.
pub(super) fn new_flow_of_other() -> BTreeSet<FlowKey> {
    let mut twin = two_pods();
    let before = twin.switch.clone();
    edit(&mut twin, &moved());
    let of_other = |key: &&FlowKey| key.priority == 11_000 - 2;
    let new = twin.of_rules().filter(|key| !before.contains_key(*key));
    let new: BTreeSet<FlowKey> = new.filter(of_other).cloned().collect();
    assert_eq!(new.len(), 1);
    new
}

/// An edit moves the rules of two pods. The switch refuses the flow of one pod, so nothing confirms the batch, though the
/// flow of the other pod is there. The next reading of the marks comes before the dump that finds this flow.
#[test]
fn a_refused_flow_of_another_pod_closes_no_address_whose_flows_are_there() {
    let moved = moved();
    let new = new_flow_of_other();
    for refused in [BTreeSet::new(), new] {
        let mut node = two_pods();
        let is_refused = !refused.is_empty();
        node.refused = refused;
        node.waiting = Some(VecDeque::new());
        edit(&mut node, &moved);
        for step in 0..60 {
            if !node.carry_out_next() {
                node.pass(Duration::from_secs(1));
            }
            assert!(
                is_open_at_all(&node, ADDRESS),
                "refused: {is_refused}, step {step}: {:?}",
                node.log.last()
            );
        }
        assert!(is_open(&node, ADDRESS, 1));
    }
}

/// A load balancer has come to lead to an address with a mark, which has flows beside it until the next comparison. No
/// number is left for another plan. An edit takes one of two rules away: nothing is added, so that no batch confirms
/// the flows, and the former mark stays.
#[test]
fn an_edit_that_only_closes_ends_the_mark_beside_the_flows() {
    let rules = [allow("a.test"), allow("b.a.test"), deny_all()];
    let edited = [allow("other.test"), allow("b.a.test"), deny_all()];
    for is_backend in [false, true] {
        let mut node = node(ONE_NUMBER, &rules);
        node.answer("p1", "b.a.test", &[ADDRESS], 600);
        node.pass(Duration::from_secs(30));
        assert_eq!(node.marks.len(), 1);
        assert!(is_open(&node, ADDRESS, 0) && is_open(&node, ADDRESS, 1));
        if is_backend {
            lead_to(&mut node, 1, &[ADDRESS]);
            let has_own = |node: &Node| {
                let mut keys = node.switch.keys();
                keys.any(|key| key.matches.ends.dst() == Some(ADDRESS.into()))
            };
            while !has_own(&node) {
                node.pass(Duration::from_millis(100));
            }
            assert_eq!(node.marks.len(), 1);
        }
        edit(&mut node, &edited);
        node.pass(Duration::from_secs(5));
        assert!(is_open(&node, ADDRESS, 1), "backend: {is_backend}");
        assert!(!is_open(&node, ADDRESS, 0), "backend: {is_backend}");
    }
}

/// Pods of a tenant go together, and with them many groups of many ports.
#[test]
fn groups_of_pods_that_have_gone_do_not_go_in_one_batch() {
    for pods in [1, 3] {
        let further = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|label| format!("{label}.test"));
        let mut rules = vec![many(allow("many.test"), 40)];
        rules.extend(further.iter().map(|name| many(allow(name), 1)));
        rules.push(deny_all());
        let mut node = Node::bare();
        node.engine = Engine::new(Config {
            flow_changes_per_second: 10_000_000,
            ..config(WAYS[1])
        });
        let mut node = node.start(&rules);
        for host in 0x10..0x10 + pods {
            let name = format!("pod{host}");
            node.add_pod(&name, host);
            for (set, address) in (1..256_u32).zip(addresses(0, 255)) {
                node.answer(&name, "many.test", &[address], 3600);
                for (_, other) in (0..).zip(&further).filter(|(bit, _)| set & (1 << bit) != 0) {
                    node.answer(&name, other, &[address], 3600);
                }
            }
        }
        let had = node.of_rules().count();
        assert!(had > 255 * 40);
        node.log.clear();
        for host in 0x10..0x10 + pods {
            node.remove_interface(&format!("pod{host}"));
        }
        for _ in 0..20 {
            node.pass(COMPARE_INTERVAL);
        }
        assert_eq!(node.of_rules().count(), 0);
        let largest = node.batches().into_iter().map(|(_, changes)| changes.len());
        let largest = largest.max().unwrap_or_default();
        assert!(
            largest <= 4 * CHANGES_UNDER_WAY_MAX,
            "{pods} pods with {had} flows: {largest}"
        );
    }
}

/// An edit leaves one of two addresses of a group another plan, whose flow the switch refuses. The former mark stays
/// for as long as the other address has the group.
#[test]
fn a_former_mark_goes_though_another_address_has_its_group() {
    let rules = [allow("example.com"), allow("www.example.com"), deny_all()];
    let edited = [
        allow("x.www.example.com"),
        allow("www.example.com"),
        deny_all(),
    ];
    let told = |is_shared: bool| {
        let mut node = node(WAYS[1], &rules);
        node.answer("p1", "www.example.com", &[ADDRESS], 3600);
        if is_shared {
            node.answer("p1", "x.www.example.com", &[OTHER], 3600);
        }
        node.pass(Duration::from_secs(30));
        node
    };
    for is_shared in [false, true] {
        let mut twin = told(false);
        let before = twin.switch.clone();
        edit(&mut twin, &edited);
        let next = tag(&twin, ADDRESS);
        let mut of_rules = twin.of_rules().cloned();
        let refused = of_rules.find(|key| is_of(key, next) && !before.contains_key(key));
        let refused = refused.expect("a flow of the next group");
        let mut node = told(is_shared);
        node.refused = [refused].into();
        edit(&mut node, &edited);
        assert!(is_open_at_all(&node, ADDRESS), "shared: {is_shared}");
        node.pass(GROUP_STAYS + GROUP_RESTS + 10 * COMPARE_INTERVAL);
        assert!(!is_open_at_all(&node, ADDRESS), "shared: {is_shared}");
    }
}
