//! Answers that were taken off the wire: when they go back.

use std::time::Duration;

use super::*;
use crate::{
    io::input::HeldFrame,
    switch::{hold::HoldEvent, revalidation::RevalidationEvent},
    values::limits::{HOLD_LONGEST, REVALIDATION_INTERVAL},
};

const HOLD_MAX: Duration = HOLD_LONGEST;

/// The rules of all these stories.
fn rules() -> [Rule; 2] {
    [allow("example.com"), deny_all()]
}

/// A node whose first flows, those of the logical switch, were written some time ago.
fn node() -> Node {
    let mut node = Node::with(&rules());
    node.pass(Duration::from_secs(1));
    node.log.clear();
    node
}

impl Node {
    /// An answer that was taken off the wire of pod p1.
    pub(super) fn held_answer(&mut self, name: &str, addresses: &[[u8; 4]]) -> Box<[u8]> {
        let bytes = answer_frame(name, addresses, 300);
        let ifindex = ifindex_of(self.pods["ns1_p1"]);
        let frame = Frame {
            from_pod: false,
            held: true,
            opened: false,
            ..frame(ifindex, self.now, &bytes)
        };
        self.give_frame(frame);
        bytes.into()
    }

    /// The frames that went back since the last call.
    pub(super) fn released(&mut self) -> Vec<Box<[u8]>> {
        self.log
            .extract_if(.., |command| matches!(command, Command::Release(_)))
            .filter_map(|command| match command {
                Command::Release(HeldFrame { bytes, .. }) => Some(bytes),
                _ => None,
            })
            .collect()
    }

    /// What the switch was told and has not answered.
    pub(super) fn batches_open(&self) -> Vec<BatchId> {
        self.log
            .iter()
            .filter_map(|command| match command {
                Command::Apply { batch, .. } => Some(*batch),
                _ => None,
            })
            .collect()
    }

    pub(super) fn reply(&mut self, batch: BatchId, result: Result<(), BatchError>) {
        self.give(Input::Applied { batch, result });
    }
}

#[test]
fn an_answer_waits_for_its_flows_and_no_longer() {
    let mut node = node();
    node.switch_answers = false;
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    let [batch] = node.batches_open()[..] else {
        panic!("one batch");
    };
    assert_eq!(node.released(), []);
    node.reply(batch, Ok(()));
    assert_eq!(node.released(), std::slice::from_ref(&bytes));
    node.pass(HOLD_MAX * 2);
    assert_eq!(node.released(), [], "once");
    // Known now.
    assert_eq!(node.held_answer("example.com", &[ADDRESS]), bytes);
    assert_eq!(node.released(), [bytes]);
}

#[test]
fn an_answer_waits_for_flows_that_another_one_asked_for() {
    let mut node = node();
    node.switch_answers = false;
    let first = node.held_answer("example.com", &[ADDRESS]);
    let batches = node.batches_open();
    let second = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.batches_open(), batches, "nothing is written twice");
    assert_eq!(node.released(), []);
    node.reply(batches[0], Ok(()));
    assert_eq!(node.released(), [first, second]);
}

#[test]
fn an_answer_whose_flows_are_all_somebody_elses_waits_for_nothing() {
    let mut before = node();
    before.answer("p1", "example.com", &[ADDRESS], 300);
    let mut node = node();
    let cookie = 0x77;
    let flows = before.switch.into_keys();
    for key in flows.filter(|key| key.table != before.tags_end) {
        node.give(Input::ForeignFlow { key, cookie });
    }
    let is_foreign = |report: &Report| matches!(report, Report::ForeignFlow { cookie: 0x77, .. });
    assert!(!node.reports.iter().any(is_foreign), "not in our way");
    node.switch_answers = false;
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    assert!(node.reports.iter().any(is_foreign), "{:?}", node.reports);
    assert_eq!(node.released(), [bytes]);
    assert_eq!(node.batches(), [], "nothing is overwritten");
    let is_opening = |report: &Report| matches!(report, Report::Opened { .. });
    assert!(!node.reports.iter().any(is_opening), "{:?}", node.reports);
}

#[test]
fn what_asks_for_nothing_goes_back_at_once() {
    let mut node = node();
    node.switch_answers = false;
    for (name, address) in [("example.org", ADDRESS), ("example.com", [127, 0, 0, 1])] {
        let bytes = node.held_answer(name, &[address]);
        assert_eq!(node.released(), [bytes], "{name}");
    }
    // Not DNS, and of an interface that nobody knows.
    let noise: Box<[u8]> = udp_frame(b"noise").into();
    for ifindex in [ifindex_of(node.pods["ns1_p1"]), 4711] {
        let frame = Frame {
            from_pod: false,
            held: true,
            opened: false,
            ..frame(ifindex, node.now, &noise)
        };
        node.give_frame(frame);
        assert_eq!(node.released(), std::slice::from_ref(&noise), "{ifindex}");
    }
}

#[test]
fn a_switch_that_does_not_answer_costs_hold_max() {
    let mut node = node();
    node.switch_answers = false;
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    node.pass(HOLD_MAX - Duration::from_millis(1));
    assert_eq!(node.released(), []);
    node.pass(Duration::from_millis(1));
    assert_eq!(node.released(), [bytes]);
    let mut events = node.engine.hold_events().iter();
    assert!(events.any(|event| event == (HoldEvent::Overrun, 1)));
}

#[test]
fn a_switch_that_is_gone_costs_hold_max_and_only_for_what_is_new() {
    let mut node = node();
    node.held_answer("example.com", &[ADDRESS]);
    node.released();
    node.give(Input::SwitchDown);
    let known = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.released(), [known]);
    let fresh = node.held_answer("example.com", &[OTHER]);
    assert_eq!(node.released(), []);
    node.pass(HOLD_MAX);
    assert_eq!(node.released(), [fresh]);
    // The comparison after the reconnect has installed it.
    node.give(Input::SwitchUp);
    node.pass(COMPARE_INTERVAL);
    node.released();
    let known = node.held_answer("example.com", &[OTHER]);
    assert_eq!(node.released(), [known]);
}

#[test]
fn a_refused_batch_lets_its_answers_go() {
    let mut node = node();
    node.switch_answers = false;
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    let batch = node.batches_open()[0];
    node.reply(batch, Err(BatchError::Refused(vec![(0, "no".into())])));
    assert_eq!(node.released(), [bytes]);
}

#[test]
fn answers_wait_for_revalidation() {
    let mut node = node();
    let pass = Duration::from_micros(700);
    node.give(Input::Revalidation(pass));
    // A change a while ago: the pass begins at once.
    node.pass(REVALIDATION_INTERVAL);
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.released(), []);
    node.pass(pass);
    assert_eq!(node.released(), [bytes]);
    // And just now.
    let bytes = node.held_answer("example.com", &[OTHER]);
    node.pass(pass);
    assert_eq!(node.released(), []);
    node.pass(REVALIDATION_INTERVAL - pass);
    assert_eq!(node.released(), [bytes]);
}

/// Packets were denied just before, and a pass takes long.
fn beside_denied_packets(dropping: &[[u8; 4]]) -> Node {
    let mut node = node();
    node.give(Input::Revalidation(HOLD_MAX / 2));
    node.pass(REVALIDATION_INTERVAL);
    node.dropping = Some(
        dropping
            .iter()
            .map(|address| IpAddr::from(*address))
            .collect(),
    );
    node
}

#[test]
fn where_no_megaflow_drops_nobody_waits_for_a_pass() {
    let mut node = beside_denied_packets(&[OTHER]);
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.released(), [bytes]);
    let looks = node.log.iter().filter_map(|command| match command {
        Command::FindDropping(paths) => Some(paths.len()),
        _ => None,
    });
    assert_eq!(
        looks.collect::<Vec<_>>(),
        [1],
        "new and established: one path"
    );
}

#[test]
fn an_answer_waits_until_the_megaflow_that_drops_is_gone() {
    let mut node = beside_denied_packets(&[ADDRESS]);
    let first = node.held_answer("example.com", &[ADDRESS]);
    node.pass(Duration::from_millis(3));
    let second = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.released(), []);
    // Another address of the pod waits for its own megaflow alone.
    let third = node.held_answer("www.example.com", &[OTHER]);
    node.pass(Duration::from_millis(3));
    assert_eq!(node.released(), [third]);
    let fourth = node.held_answer("www.example.com", &[ADDRESS, OTHER]);
    node.pass(Duration::from_millis(3));
    assert_eq!(node.released(), []);
    node.dropping = Some(BTreeSet::new());
    node.pass(Duration::from_millis(3));
    assert_eq!(node.released(), [first, second, fourth]);
    let mut events = node.engine.revalidation_events().iter();
    assert!(events.any(|event| event == (RevalidationEvent::Clear, 2)));
}

#[test]
fn a_megaflow_that_drops_for_good_costs_less_than_hold_max() {
    let mut node = beside_denied_packets(&[ADDRESS]);
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    node.pass(HOLD_MAX / 10 * 9 - Duration::from_millis(1));
    assert_eq!(node.released(), []);
    node.pass(Duration::from_millis(1));
    assert_eq!(node.released(), [bytes]);
}

#[test]
fn what_ended_the_wait_of_an_answer_is_counted_once() {
    let ended = |node: &Node| {
        let overrun = node.engine.hold_events()[HoldEvent::Overrun];
        let dropping = node.engine.revalidation_events()[RevalidationEvent::Dropping];
        (overrun, dropping)
    };
    // The switch confirms so late that the answer has to leave first.
    let mut node = beside_denied_packets(&[ADDRESS]);
    node.switch_answers = false;
    node.held_answer("example.com", &[ADDRESS]);
    let batch = node.batches_open()[0];
    node.pass(HOLD_MAX / 2);
    node.reply(batch, Ok(()));
    node.pass(HOLD_MAX);
    assert_eq!((node.released().len(), ended(&node)), (1, (1, 0)));
    // Both times are over before anybody looks.
    let mut node = beside_denied_packets(&[ADDRESS]);
    node.held_answer("example.com", &[ADDRESS]);
    node.now = node.now + HOLD_MAX;
    node.pass(Duration::ZERO);
    assert_eq!((node.released().len(), ended(&node)), (1, (1, 0)));
    let mut node = beside_denied_packets(&[ADDRESS]);
    node.held_answer("example.com", &[ADDRESS]);
    node.pass(HOLD_MAX);
    assert_eq!((node.released().len(), ended(&node)), (1, (0, 1)));
}

#[test]
fn a_switch_that_goes_away_keeps_no_answer_that_it_has_confirmed() {
    let mut node = beside_denied_packets(&[ADDRESS]);
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.released(), []);
    node.give(Input::SwitchDown);
    assert_eq!(node.released(), [bytes]);
}

#[test]
fn what_the_switch_had_not_confirmed_when_it_went_is_waited_for_until_the_comparison() {
    let mut node = node();
    node.switch_answers = false;
    let mut held = vec![node.held_answer("example.com", &[ADDRESS])];
    let batch = node.batches_open()[0];
    node.reply(batch, Err(BatchError::ConnectionLost));
    held.push(node.held_answer("example.com", &[ADDRESS]));
    // Sent before the loss is known.
    held.push(node.held_answer("example.com", &[OTHER]));
    node.give(Input::SwitchDown);
    held.push(node.held_answer("example.com", &[ADDRESS, OTHER]));
    assert_eq!(node.released(), []);
    node.pass(Duration::from_millis(1));
    node.switch_answers = true;
    node.give(Input::SwitchUp);
    node.pass(HOLD_MAX / 10);
    assert_eq!(node.released(), held);
    assert_eq!(node.destinations().len(), 2);
}

#[test]
fn nothing_stays_behind_when_the_agent_stops() {
    let mut node = node();
    node.switch_answers = false;
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    node.engine.release_all();
    node.obey();
    assert_eq!(node.released(), [bytes]);
}

#[test]
fn what_answers_open_together_is_written_together() {
    let mut node = node();
    node.log.clear();
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    for address in [ADDRESS, OTHER] {
        let bytes = answer_frame("example.com", &[address], 300);
        let frame = frame(ifindex, node.now, &bytes);
        node.engine.handle_frame(frame, node.now);
    }
    node.obey();
    let batches = node.batches();
    assert_eq!(batches.len(), 1);
    assert_eq!(node.destinations().len(), 2);
}

/// The EgressFirewall switches holding off. An answer that the kernel has taken off the wire before is not held either,
/// and its addresses are opened all the same.
#[test]
fn nothing_is_held_where_the_annotation_says_so() {
    let mut node = node();
    let ifindex = ifindex_of(node.pods["ns1_p1"]);
    let annotate = |node: &mut Node, hold_off| {
        let firewall = Firewall {
            hold_off,
            ..firewall(&rules())
        };
        node.give(firewalls(false, Some(firewall)));
    };
    assert!(node.kernel.holds(ifindex));
    annotate(&mut node, true);
    assert!(!node.kernel.holds(ifindex));
    node.switch_answers = false;
    let bytes = node.held_answer("example.com", &[ADDRESS]);
    assert_eq!(node.released(), [bytes]);
    let [batch] = node.batches_open()[..] else {
        panic!("one batch");
    };
    node.reply(batch, Ok(()));
    annotate(&mut node, false);
    assert!(node.kernel.holds(ifindex));
    node.held_answer("example.com", &[OTHER]);
    assert_eq!(node.released(), []);
}
