//! Flows that someone else has removed: how they are restored.

use std::collections::VecDeque;

use super::{under_way::compare, *};
use crate::values::limits::{RESTORE_DELAY, RESTORE_MAX, RESTORING_MAX};

/// A node with so many addresses open, all of which the switch has lost.
fn wiped(addresses: usize) -> Node {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = addresses + 1;
    for n in 0..addresses {
        let [.., high, low] = n.to_be_bytes();
        let name = format!("n{n}.example.com");
        node.answer("p1", &name, &[[198, 18, high, low]], 300);
    }
    assert_eq!(node.own(), addresses);
    for (key, (cookie, _)) in std::mem::take(&mut node.switch) {
        node.give(Input::FlowLost { key, cookie });
    }
    node.log.clear();
    node
}

/// How many flows each batch adds.
fn sizes(node: &mut Node) -> Vec<usize> {
    let batches = node.batches();
    batches.iter().map(|(_, changes)| changes.len()).collect()
}

#[test]
fn lost_flows_are_restored_some_at_a_time() {
    let addresses = 3 * RESTORE_MAX - 2;
    let mut node = wiped(addresses);
    node.switch_answers = false;
    node.pass(RESTORE_DELAY);
    let under_way = node.batches_open();
    assert_eq!(sizes(&mut node), [RESTORE_MAX; RESTORING_MAX]);
    node.reply(under_way[0], Ok(()));
    assert_eq!(sizes(&mut node), [RESTORE_MAX], "one comes, one goes");
    // And of the group, and the end of tags.
    let flows = addresses + 2;
    assert_eq!(node.engine.counters().flows_restored, flows as u64);
    assert!(node.reports.iter().any(
        |report| matches!(report, Report::Restored { flows: restored } if *restored == flows)
    ));
}

/// The switch answers dumps, and confirms no batch.
#[test]
fn an_address_waits_once_however_often_its_flows_are_found_lost() {
    // The flow of the rule comes first, and that in which tags end comes last.
    let restored = RESTORING_MAX * RESTORE_MAX - 1;
    let left = 3;
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.engine.told.cache.limits_mut().addresses_per_port_max = restored + left + 1;
    node.engine.told.cache.limits_mut().addresses_per_name_max = restored + left + 1;
    let told = addresses(0, (restored + left) as u32);
    for address in told {
        node.answer("p1", "example.com", &[address], 3600);
    }
    assert_eq!(node.own(), restored + left);
    for (key, (cookie, _)) in std::mem::take(&mut node.switch) {
        node.give(Input::FlowLost { key, cookie });
    }
    node.waiting = Some(VecDeque::new());
    node.pass(RESTORE_DELAY);
    for _ in 0..4 {
        compare(&mut node);
        let [.., lost, _] = node.engine.switch.sizes();
        assert_eq!(lost, left + 1);
    }
    node.remove_interface("p1");
    compare(&mut node);
    let [.., lost, _] = node.engine.switch.sizes();
    assert_eq!(lost, 1, "the pod is gone");
}

#[test]
fn what_is_opened_does_not_wait_behind_what_is_restored() {
    let mut node = wiped(3 * RESTORE_MAX);
    node.switch_answers = false;
    node.pass(RESTORE_DELAY);
    node.batches();
    node.answer("p1", "new.example.com", &[[203, 0, 113, 1]], 300);
    assert_eq!(sizes(&mut node), [1]);
}

#[test]
fn an_answer_waits_for_a_flow_that_is_lost() {
    let mut node = wiped(3 * RESTORE_MAX);
    node.switch_answers = false;
    let bytes = node.held_answer("n5.example.com", &[[198, 18, 0, 5]]);
    let [batch] = node.batches_open()[..] else {
        panic!("it is restored before all others");
    };
    assert_eq!(node.released(), []);
    node.reply(batch, Ok(()));
    node.pass(Duration::from_millis(10));
    assert_eq!(node.released(), [bytes]);
}

#[test]
fn what_the_next_comparison_does_not_find_is_restored() {
    let mut node = wiped(2);
    // Whoever wiped it also cut the connection, and nothing was restored before.
    node.give(Input::SwitchDown);
    node.give(Input::SwitchUp);
    assert_eq!(node.own(), 2);
    node.switch.clear();
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.own(), 2);
}

#[test]
fn flows_with_something_in_common_share_it() {
    let node = {
        let mut node = Node::with(&[allow("example.com"), deny_all()]);
        for n in 0..9 {
            node.answer("p1", "example.com", &[[198, 18, 0, n]], 300);
            // Nothing of it changes what is planned.
            node.add_pod(&format!("p{}", n + 2), 100 + n);
        }
        node
    };
    let mut node = node;
    let port = node.engine.ports.named("ns1_p1");
    let mut templates: Vec<_> = node
        .engine
        .told
        .cache
        .entries_mut()
        .filter(|(of, ..)| Some(*of) == port)
        .flat_map(|(.., entry)| entry.installed.own().expect("flows").templates())
        .map(std::sync::Arc::as_ptr)
        .collect();
    assert_eq!(templates.len(), 9);
    templates.dedup();
    assert_eq!(templates.len(), 1);
}

/// The flows of a pod.
fn flows_of(node: &Node, host: u8) -> Vec<FlowKey> {
    let keys = node.switch.keys();
    keys.filter(|key| key.matches.ends.src() == Some(IpAddr::from([10, 244, 0, host])))
        .cloned()
        .collect()
}

/// The refusals that were reported since the last call.
fn refusals(node: &mut Node) -> usize {
    let reports = std::mem::take(&mut node.reports).into_iter();
    reports
        .filter(|report| matches!(report, Report::FlowsRefused { .. }))
        .count()
}

#[test]
fn a_flow_that_the_switch_refuses_keeps_no_lost_flow_of_another_pod_away() {
    let mut node = Node::with(&[allow("example.com"), deny_all()]);
    node.add_pod("p2", 6);
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    node.answer("p2", "example.com", &[OTHER], 3600);
    node.refused.extend(flows_of(&node, 5));
    for (key, (cookie, _)) in std::mem::take(&mut node.switch) {
        node.give(Input::FlowLost { key, cookie });
    }
    node.log.clear();
    node.reports.clear();
    node.pass(RESTORE_DELAY);
    assert_eq!(flows_of(&node, 6).len(), 1);
    let batches = node.batches();
    let sent: Vec<(bool, usize)> = batches
        .iter()
        .map(|(atomic, changes)| (*atomic, changes.len()))
        .collect();
    // Those of two addresses, of their group, and the end of tags.
    assert_eq!(sent, [(true, 4), (false, 4)]);
    assert_eq!(node.engine.counters().flows_refused, 1);
    assert_eq!(refusals(&mut node), 1);
    // The refused flow is tried with each comparison.
    node.pass(COMPARE_INTERVAL);
    assert_eq!(flows_of(&node, 6).len(), 1);
    assert_eq!(node.engine.counters().flows_refused, 2);
    node.refused.clear();
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.own(), 2);
    assert_eq!(refusals(&mut node), 1);
}

#[test]
fn an_edit_closes_what_it_closes_though_the_switch_refuses_a_flow_of_it() {
    let transport = |port| Transport {
        protocol: Protocol::Tcp,
        port: Some(port),
    };
    let rules = |port| {
        let allowed = Rule {
            ports: vec![transport(port)],
            ..allow("example.com")
        };
        [allowed, deny_all()]
    };
    let mut node = Node::with(&rules(80));
    node.add_pod("p2", 6);
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    node.answer("p2", "example.com", &[OTHER], 3600);
    let mut refused = flows_of(&node, 5).remove(0);
    refused.matches.transport = Some(transport(443));
    node.refused.insert(refused);
    node.set_firewall(&rules(443));
    node.set_ovn(&rules(443));
    let left: Vec<_> = node.of_rules().map(|key| key.matches.transport).collect();
    assert_eq!(left, [Some(transport(443))], "of p2");
}

#[test]
fn what_was_taken_back_before_a_refusal_is_not_sent_again() {
    let rules = [allow("example.com"), allow("other.test"), deny_all()];
    let mut node = Node::with(&rules);
    node.add_pod("p2", 6);
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    node.answer("p2", "other.test", &[OTHER], 3600);
    node.refused.extend(flows_of(&node, 5));
    for (key, (cookie, _)) in std::mem::take(&mut node.switch) {
        node.give(Input::FlowLost { key, cookie });
    }
    node.waiting = Some(std::collections::VecDeque::new());
    node.pass(RESTORE_DELAY);
    // Sent behind the batch that restores, and before its answer has come.
    let rules = [allow("example.com"), deny_all()];
    node.set_firewall(&rules);
    node.set_ovn(&rules);
    while node.carry_out_next() {}
    assert_eq!(node.own(), 0);
}
