//! The switch and the cache, compared.

use super::*;

/// Ports of a rule.
const MANY: usize = 256;

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
        // Of two addresses, of their group, and the end of tags.
        added: 4,
        removed: 0
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
    assert_eq!(node.own(), 2);
    assert_eq!(node.batches().len(), 1);
    assert!(node.reports.contains(&Report::Restored { flows: 4 }));
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
    assert_eq!(node.own(), 1);
}

#[test]
fn what_is_opened_again_while_the_dump_comes_stays() {
    let rules = [allow("example.com"), deny_all()];
    let mut node = Node::with(&rules);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let shown = node.installed();
    node.switch_answers = false;
    node.pass(COMPARE_INTERVAL);
    node.switch_answers = true;
    node.give(firewalls(false, None));
    node.give(Input::Firewalls(FirewallUpdate {
        reset: true,
        firewalls: vec![],
    }));
    assert_eq!(node.destinations().len(), 0);
    // The dump was faster than the removal.
    node.dump_shows(shown, true);
    node.set_firewall(&rules);
    assert_eq!(node.destinations().len(), 1);
    node.dump_shows(Vec::new(), false);
    assert_eq!(node.destinations().len(), 1);
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

#[test]
fn a_comparison_finds_each_flow_of_a_group_in_the_order_of_their_keys() {
    let rule = Rule {
        ports: tcp(MANY),
        ..allow("example.com")
    };
    let mut node = Node::with(&[rule]);
    node.answer("p1", "example.com", &[ADDRESS], 300);
    let count = node.of_rules().count();
    assert_eq!(count, MANY);
    let looked_at = |node: &mut Node| {
        let cache = &mut node.engine.told.cache;
        let (.., entry) = cache.entries_mut().next().expect("one address");
        let tag = entry.installed.tag().expect("a tag");
        cache.groups().flows(tag).expect("flows").take_looked_at()
    };
    looked_at(&mut node);
    let dumps = node.engine.switch.comparisons();
    node.pass(COMPARE_INTERVAL);
    assert_eq!(node.engine.switch.comparisons(), dumps + 1);
    // Half of the rest goes with each look.
    let each = count.ilog2() as usize + 1;
    let looks = looked_at(&mut node);
    assert!((count..=count * each).contains(&looks), "{looks}");
}
