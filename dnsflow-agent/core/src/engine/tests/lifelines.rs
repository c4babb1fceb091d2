//! The flows on which the life of all others depends.

use super::*;
use crate::limits::{HARD_TIMEOUT, RENEW_INTERVAL};

fn node() -> Node {
    Node::with(&[allow("example.com"), deny_all()])
}

/// All changes so far, those of lifelines too.
fn changes(node: &mut Node) -> Vec<FlowChange> {
    let commands = node.log.drain(..);
    let changes = commands.filter_map(|command| match command {
        Command::Apply { changes, .. } => Some(changes),
        _ => None,
    });
    changes.flatten().collect()
}

#[test]
fn the_first_flow_brings_its_lifeline_and_the_next_ones_do_not() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let first = changes(&mut node);
    let [FlowChange::Add(line, body), FlowChange::Add(key, flow)] = &first[..] else {
        panic!("a lifeline, then the flow: {first:?}");
    };
    assert_eq!(Lifeline::of(line), Some(lifeline_of(key, flow.cookie)));
    assert_eq!(u64::from(body.hard_timeout_s), HARD_TIMEOUT.as_secs());
    assert_eq!(flow.hard_timeout_s, 0);
    node.answer("p1", "example.com", &[OTHER], 300);
    let second = changes(&mut node);
    assert!(!second.iter().any(is_for_lifeline), "{second:?}");
    assert_eq!(second.len(), 1);
}

#[test]
fn only_lifelines_are_renewed() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 3600);
    node.log.clear();
    node.pass(RENEW_INTERVAL);
    let renewals = changes(&mut node);
    let [FlowChange::Renew(body)] = &renewals[..] else {
        panic!("one for all flows: {renewals:?}");
    };
    assert_eq!(
        node.lifelines.values().copied().collect::<Vec<_>>(),
        [body.cookie]
    );
}

#[test]
fn a_lifeline_comes_back_before_what_went_with_it() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    node.log.clear();
    let (lifeline, cookie) = node.lifelines.pop_first().expect("a lifeline");
    let (flow, (flow_cookie, _)) = node.switch.pop_first().expect("a flow");
    for (key, cookie) in [(lifeline.key(), cookie), (flow, flow_cookie)] {
        node.give(Input::FlowLost { key, cookie });
    }
    // The node's switch takes no flow without its lifeline.
    node.pass(Duration::from_secs(1));
    assert_eq!((node.lifelines.len(), node.switch.len()), (1, 1));
}

#[test]
fn a_comparison_puts_back_a_lifeline_that_nobody_reported() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    let lifelines = std::mem::take(&mut node.lifelines);
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.lifelines, lifelines);
}

#[test]
fn a_lifeline_goes_when_nothing_depends_on_it() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    node.remove_interface("p1");
    assert_eq!((node.lifelines.len(), node.switch.len()), (1, 0));
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.lifelines.len(), 0);
    // And comes when something does again.
    node.add_pod_as("p1", 5, "uid-2", RowId::new(0x999));
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    assert_eq!((node.lifelines.len(), node.switch.len()), (1, 1));
}
