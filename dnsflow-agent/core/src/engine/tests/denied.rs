//! Whether answers that wait for new flows wait for the switch's megaflows too.

use super::*;
use crate::values::limits::{
    COUNT_DELAY, COUNT_INTERVAL, COUNTED_PER_NAMESPACE_MAX, MEGAFLOW_IDLE, MEGAFLOW_IDLE_MARGIN,
    REVALIDATION_INTERVAL,
};

/// As long as it is to be quiet.
const QUIET: Duration = MEGAFLOW_IDLE
    .saturating_add(MEGAFLOW_IDLE_MARGIN)
    .saturating_add(PASS.saturating_mul(2));
/// How long the switch takes to look at its megaflows.
const PASS: Duration = Duration::from_micros(700);
/// The cookie of the flow that denies everything, behind a rule for a name.
const DENY: u32 = 0xf01;

/// The rules of these stories, unless they say something else.
fn rules() -> [Rule; 2] {
    [allow("example.com"), deny_all()]
}

impl Node {
    /// A node on which nothing was denied for as long as it takes.
    fn quiet(rules: &[Rule]) -> Self {
        let mut node = Self::with(rules);
        node.give(Input::Revalidation(PASS));
        node.calm();
        node
    }

    /// Time in which nothing happens.
    fn calm(&mut self) {
        self.pass(COUNT_DELAY);
        self.pass(QUIET);
    }

    /// Whether a fresh address goes back to the pod as soon as the switch has confirmed its flows, and
    /// the reason that is told.
    fn opens(&mut self, last: u8) -> (bool, &'static str) {
        self.reports.clear();
        self.held_answer("example.com", &[[203, 0, 113, last]]);
        let at_once = !self.released().is_empty();
        self.pass(PASS + REVALIDATION_INTERVAL);
        assert_eq!(self.released().len(), usize::from(!at_once), "once");
        let told = self.reports.iter().find_map(|report| match report {
            Report::Opened {
                revalidation_wait, ..
            } => Some(*revalidation_wait),
            _ => None,
        });
        (at_once, told.expect("it was opened"))
    }

    /// OVN's flow with this cookie drops a packet.
    fn deny(&mut self, cookie: u32) {
        *self.ovn_packets.entry(cookie).or_default() += 1;
    }

    /// The cookies that were counted since the last call: beside batches, and behind them.
    fn counts(&mut self) -> Vec<(bool, Vec<u32>)> {
        let counts = self.log.drain(..).filter_map(|command| match command {
            Command::Ask(FlowQuestion::Count(cookies)) => Some((false, cookies)),
            Command::Apply { count, .. } => Some((true, count)),
            _ => None,
        });
        counts.collect()
    }
}

const QUIET_TOLD: (bool, &str) = (true, "quiet");
const LATELY: (bool, &str) = (false, "denied_lately");
const UNKNOWN: (bool, &str) = (false, "unknown");

#[test]
fn where_nothing_was_denied_lately_answers_go_back_at_the_barriers_reply() {
    let mut node = Node::quiet(&rules());
    assert_eq!(node.opens(1), QUIET_TOLD);
    assert_eq!(node.opens(2), QUIET_TOLD, "and the next one");
    let quiet =
        node.engine.revalidation_waits()[crate::switch::deny_counters::RevalidationWait::Quiet];
    assert_eq!(quiet, 2);
}

#[test]
fn nothing_is_known_before_it_has_been_looked_at_for_long_enough() {
    let mut node = Node::with(&rules());
    node.give(Input::Revalidation(PASS));
    assert_eq!(node.opens(1), LATELY, "at the start");
    node.pass(COUNT_DELAY);
    node.pass(QUIET - Duration::from_millis(100));
    assert_eq!(node.opens(2), LATELY);
    node.pass(Duration::from_millis(100));
    assert_eq!(node.opens(3), QUIET_TOLD);
}

#[test]
fn a_packet_that_was_denied_lately_makes_answers_wait() {
    let mut node = Node::quiet(&rules());
    node.deny(DENY);
    node.log.clear();
    assert_eq!(node.opens(1), LATELY, "the count behind the changes tells");
    // What that count told holds on, and is not asked again.
    node.pass(COUNT_INTERVAL);
    node.counts();
    assert_eq!(node.opens(2), LATELY);
    assert_eq!(node.counts(), [(true, vec![])]);
    node.pass(QUIET);
    node.counts();
    assert_eq!(node.opens(3), QUIET_TOLD);
    assert_eq!(node.counts(), [(true, vec![DENY])]);
}

#[test]
fn what_is_denied_between_answers_is_noticed_by_itself() {
    let mut node = Node::quiet(&rules());
    node.deny(DENY);
    // Without an answer, and long enough after.
    node.pass(COUNT_INTERVAL);
    node.pass(QUIET);
    assert_eq!(node.opens(1), QUIET_TOLD);
}

#[test]
fn a_counter_that_went_back_makes_answers_wait() {
    let mut node = Node::with(&rules());
    node.give(Input::Revalidation(PASS));
    node.deny(DENY);
    node.calm();
    assert_eq!(node.opens(1), QUIET_TOLD);
    node.ovn_packets.clear();
    assert_eq!(node.opens(2), LATELY);
}

#[test]
fn a_flow_that_was_written_anew_has_lost_what_it_counted() {
    let mut node = Node::quiet(&rules());
    node.give(Input::CountLost { cookie: DENY });
    assert_eq!(node.opens(1), LATELY);
    node.pass(COUNT_INTERVAL);
    node.pass(QUIET);
    assert_eq!(node.opens(2), QUIET_TOLD);
}

#[test]
fn what_may_have_gone_unseen_makes_answers_wait() {
    let mut node = Node::quiet(&rules());
    node.give(Input::MonitorGap);
    assert_eq!(node.opens(1), LATELY, "the flow monitor left something out");
    node.pass(COUNT_INTERVAL);
    node.pass(QUIET);
    assert_eq!(node.opens(2), QUIET_TOLD);
    node.give(Input::SwitchDown);
    node.give(Input::SwitchUp);
    assert_eq!(node.opens(3), LATELY, "the switch was away");
    node.calm();
    assert_eq!(node.opens(4), QUIET_TOLD);
}

#[test]
fn an_answer_that_opens_more_waits_for_what_was_restored_just_before() {
    let mut node = Node::quiet(&rules());
    assert_eq!(node.opens(1), QUIET_TOLD);
    for (key, (cookie, _)) in std::mem::take(&mut node.switch) {
        node.give(Input::FlowLost { key, cookie });
    }
    while node.own() == 0 {
        node.pass(PASS / 10);
    }
    node.held_answer("example.com", &[[203, 0, 113, 1], [203, 0, 113, 2]]);
    assert_eq!(node.own(), 2, "the second one is open");
    assert_eq!(node.released(), [], "the first one may still be dropped");
    node.pass(PASS);
    assert_eq!(node.released().len(), 1);
}

#[test]
fn changed_rules_make_answers_wait() {
    let mut node = Node::quiet(&rules());
    let [name, deny] = rules();
    let cidr = Rule {
        destination: Destination::Cidr("198.51.100.0/24".parse().expect("a network")),
        ..deny.clone()
    };
    node.set_firewall(&[name.clone(), deny.clone(), cidr.clone()]);
    node.set_ovn(&[name, deny, cidr]);
    assert_eq!(node.opens(1), LATELY);
    node.calm();
    node.counts();
    assert_eq!(node.opens(2), QUIET_TOLD);
    assert_eq!(node.counts(), [(true, vec![DENY, DENY + 1])]);
    // What the second one denied, the first denies now, without having counted it.
    node.set_firewall(&rules());
    node.set_ovn(&rules());
    node.pass(COUNT_DELAY);
    assert_eq!(node.opens(3), LATELY);
    node.calm();
    assert_eq!(node.opens(4), QUIET_TOLD);
}

#[test]
fn a_flow_that_ovn_may_still_deny_with_is_counted() {
    let mut node = Node::quiet(&rules());
    // The ACL has become another; ovn-northd has not followed.
    let [name, mut second] = rules();
    second.action = RuleAction::Allow;
    node.set_firewall(&[name.clone(), second.clone(), deny_all()]);
    node.set_nb(&[name, second, deny_all()]);
    node.calm();
    node.pass(COUNT_INTERVAL);
    node.counts();
    node.opens(1);
    assert_eq!(node.counts(), [(true, vec![DENY])]);
}

#[test]
fn more_flows_that_deny_than_are_worth_counting_are_not_counted() {
    let most = COUNTED_PER_NAMESPACE_MAX;
    for (count, told) in [(most, QUIET_TOLD), (most + 1, UNKNOWN)] {
        let mut rules = vec![allow("example.com")];
        rules.extend((0..count).map(|_| deny_all()));
        let mut node = Node::with(&[]);
        node.give(Input::Revalidation(PASS));
        node.set_firewall(&rules);
        node.set_ovn(&rules);
        node.calm();
        assert_eq!(node.opens(1), told, "{count}");
    }
}

#[test]
fn flows_of_ours_that_drop_are_not_counted() {
    let mut node = Node::quiet(&[allow("example.com"), deny("bad.test"), deny_all()]);
    assert_eq!(node.opens(1), UNKNOWN);
}

#[test]
fn where_nothing_is_denied_nothing_is_counted() {
    let mut node = Node::quiet(&[allow("example.com")]);
    node.counts();
    assert_eq!(node.opens(1), QUIET_TOLD);
    assert_eq!(node.counts(), [(true, vec![])]);
}

#[test]
fn a_deny_that_is_not_found_in_ovn_is_not_known() {
    let mut node = Node::with(&[]);
    node.give(Input::Revalidation(PASS));
    node.set_firewall(&rules());
    node.set_ovn(&[allow("example.com")]);
    node.calm();
    assert_eq!(node.opens(1), UNKNOWN);
}

#[test]
fn a_switch_that_does_not_count_makes_answers_wait() {
    let mut node = Node::quiet(&rules());
    node.switch_answers = false;
    node.log.clear();
    node.held_answer("example.com", &[ADDRESS]);
    let batch = node.batches_open()[0];
    node.reply(batch, Ok(()));
    assert_eq!(node.released(), []);
    node.pass(PASS + REVALIDATION_INTERVAL);
    assert_eq!(node.released().len(), 1);
    let uncounted =
        node.engine.revalidation_waits()[crate::switch::deny_counters::RevalidationWait::Uncounted];
    assert_eq!(uncounted, 1);
}

#[test]
fn megaflows_that_are_kept_for_longer_count_for_longer() {
    let mut node = Node::quiet(&rules());
    let longer = MEGAFLOW_IDLE * 3;
    node.give(Input::MegaflowsIdle(longer));
    assert_eq!(node.opens(1), LATELY);
    node.pass(longer);
    assert_eq!(node.opens(2), QUIET_TOLD);
    // An address of ours that is closed could have one that is still there.
    node.give(Input::MegaflowsIdle(IDLE_GRACE));
    node.pass(IDLE_GRACE * 2);
    assert_eq!(node.opens(3), UNKNOWN);
}

#[test]
fn an_answer_waits_as_well_while_the_flows_of_another_one_wait_for_revalidation() {
    let mut node = Node::with(&rules());
    node.give(Input::Revalidation(PASS));
    node.pass(REVALIDATION_INTERVAL);
    let first = node.held_answer("example.com", &[ADDRESS]);
    let second = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.released(), []);
    node.pass(PASS);
    assert_eq!(node.released(), [first, second]);
    let third = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.released(), [third]);
}

#[test]
fn flows_that_wait_for_revalidation_and_flows_that_are_not_there_yet_are_both_waited_for() {
    let mut node = Node::with(&rules());
    node.give(Input::Revalidation(PASS));
    let first = node.held_answer("example.com", &[ADDRESS]);
    node.switch_answers = false;
    node.log.clear();
    let both = node.held_answer("example.com", &[ADDRESS, OTHER]);
    let batch = node.batches_open()[0];
    node.pass(PASS + REVALIDATION_INTERVAL);
    assert_eq!(node.released(), [first]);
    node.reply(batch, Ok(()));
    node.pass(PASS + REVALIDATION_INTERVAL);
    assert_eq!(node.released(), [both]);
}

#[test]
fn one_that_only_observes_counts_nothing() {
    let mut node = Node::bare();
    node.engine = Engine::new(Config {
        hold_max: Duration::ZERO,
        ..Config::default()
    });
    let mut node = node.start(&rules());
    node.pass(COUNT_INTERVAL * 2);
    assert_eq!(node.counts(), []);
}
