//! The flows on which the life of all others depends.

use super::*;
use crate::values::limits::{GROUP_RESTS, GROUP_STAYS, KEEP_FLOWS_S};

fn node() -> Node {
    Node::with(&[allow("example.com"), deny_all()])
}

/// All changes so far, those of sentinel flows too.
fn changes(node: &mut Node) -> Vec<FlowChange> {
    let commands = node.log.drain(..);
    let changes = commands.filter_map(|command| match command {
        Command::Apply { changes, .. } => Some(changes),
        _ => None,
    });
    changes.flatten().collect()
}

#[test]
fn the_first_flow_brings_its_sentinel_and_the_next_ones_do_not() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let first = changes(&mut node);
    // Of the group and of the address.
    let [
        sentinels @ ..,
        FlowChange::Add(of_group, rule),
        FlowChange::Add(key, flow),
    ] = &first[..]
    else {
        panic!("sentinels, then the flows: {first:?}");
    };
    for (key, flow) in [(of_group, rule), (key, flow)] {
        let of_flow = sentinel_of(key, flow.cookie);
        let is_there = |change: &FlowChange| match change {
            FlowChange::Add(line, body) => {
                Sentinel::of(line) == Some(of_flow) && body.hard_timeout_s == KEEP_FLOWS_S
            }
            FlowChange::Delete(..) | FlowChange::Renew(_) => false,
        };
        assert!(sentinels.iter().any(is_there), "{first:?}");
        assert_eq!(flow.hard_timeout_s, 0);
    }
    node.answer("p1", "example.com", &[OTHER], 300);
    let second = changes(&mut node);
    assert!(!second.iter().any(is_for_sentinel), "{second:?}");
    assert_eq!(second.len(), 1);
}

#[test]
fn only_sentinels_are_renewed() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS, OTHER], 3600);
    node.log.clear();
    node.pass(Duration::from_secs(100));
    let renewals = changes(&mut node);
    let renewed: BTreeSet<Cookie> = renewals
        .iter()
        .map(|change| match change {
            FlowChange::Renew(body) => body.cookie,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(renewed.len(), renewals.len());
    assert_eq!(renewed.len(), 3, "of tags, of a group, of the end of tags");
    assert!(node.sentinels.values().copied().collect::<BTreeSet<_>>() == renewed);
}

#[test]
fn a_sentinel_comes_back_before_what_went_with_it() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    node.log.clear();
    let (flow, (flow_cookie, _)) = node.switch.pop_first().expect("a flow");
    let sentinel = sentinel_of(&flow, flow_cookie);
    let cookie = node.sentinels.remove(&sentinel).expect("a sentinel");
    for (key, cookie) in [(sentinel.key(), cookie), (flow, flow_cookie)] {
        node.give(Input::FlowLost { key, cookie });
    }
    // The node's switch takes no flow without its sentinel flow.
    node.pass(Duration::from_secs(1));
    assert_eq!((node.sentinels.len(), node.switch.len()), (3, 3));
}

#[test]
fn a_comparison_puts_back_a_sentinel_that_nobody_reported() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    let sentinels = std::mem::take(&mut node.sentinels);
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.sentinels, sentinels);
}

#[test]
fn a_sentinel_goes_when_nothing_depends_on_it() {
    let mut node = node();
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    node.remove_interface("p1");
    assert_eq!((node.sentinels.len(), node.own()), (3, 0));
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.sentinels.len(), 2);
    // The group stays for a while, and so does the end of its tags.
    node.pass(GROUP_STAYS + GROUP_RESTS + 3 * COMPARE_INTERVAL);
    assert_eq!(node.sentinels.len(), 0);
    // And comes when something does again.
    node.add_pod_as("p1", 5, "uid-2", RowId::new(0x999));
    node.answer("p1", "example.com", &[ADDRESS], 3600);
    assert_eq!((node.sentinels.len(), node.own()), (3, 1));
}

#[test]
fn after_a_restart_sentinels_have_the_time_that_flows_are_kept_now() {
    let mut before = node();
    before.answer("p1", "example.com", &[ADDRESS], 3600);
    let (sentinel, cookie) = before.sentinels.first_key_value().expect("a sentinel");
    let (key, cookie) = (sentinel.key(), *cookie);
    let rules = [allow("example.com"), deny_all()];
    let config = Config {
        keep_flows_s: 60,
        ..Config::default()
    };
    let mut after = {
        let saved = before.folded(&[]);
        restart::after_restart_with(&mut before, &saved, &rules, config)
    };
    let written = changes(&mut after);
    let is_added = |change: &FlowChange| match change {
        FlowChange::Add(added, body) => {
            *added == key && (body.cookie, body.hard_timeout_s) == (cookie, 60)
        }
        _ => false,
    };
    assert!(written.iter().any(is_added), "{written:?}");
    after.log.clear();
    // Renewed at once and after each third of a minute, and written no second time.
    let renewed = [(10, 3), (9, 0), (2, 3)];
    for (seconds, times) in renewed {
        after.pass(Duration::from_secs(seconds));
        let renewals = changes(&mut after);
        let is_renewal = |change: &FlowChange| matches!(change, FlowChange::Renew(_));
        assert!(renewals.iter().all(is_renewal), "{renewals:?}");
        assert_eq!(renewals.len(), times, "after {seconds} s");
    }
}

/// A start without a journal keeps flows that deny, whatever gave their packets the tag.
#[test]
fn the_sentinel_of_a_denial_that_nobody_knows_is_renewed() {
    let rules = [deny("bad.test"), allow("example.com")];
    let mut before = Node::with(&rules);
    before.answer("p1", "bad.test", &[ADDRESS], 3600);
    let mut after =
        restart::after_restart_with(&mut before, &Saved::default(), &rules, Config::default());
    let of_address = |key: &&FlowKey| key.matches.ends.dst() == Some(ADDRESS.into());
    let (key, cookie) = {
        let key = after.switch.keys().find(of_address).expect("it stays");
        (key.clone(), after.switch[key].0)
    };
    after.pass(COMPARE_INTERVAL);
    after.log.clear();
    after.pass(Duration::from_secs(KEEP_FLOWS_S.into()) / 3);
    let body = sentinel_of(&key, cookie);
    let renewals = changes(&mut after);
    let is_of_flow = |change: &FlowChange| matches!(change, FlowChange::Renew(renewed) if after.sentinels.get(&body) == Some(&renewed.cookie));
    assert!(renewals.iter().any(is_of_flow), "{renewals:?}");
}
