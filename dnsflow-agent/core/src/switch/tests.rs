use super::*;
use crate::{
    flow::FlowBody,
    limits::{COUNT_DELAY, HARD_TIMEOUT},
};

const NOW: Timestamp = Timestamp::from_nanos(1_000_000_000_000);

const HOLD_MAX: Duration = Duration::from_millis(100);

/// A switch that is connected, and one thing that changes.
struct Setup {
    switch: Switch,
    planner: Planner,
    out: Output,
}

impl Setup {
    fn connected() -> Self {
        let mut switch = Switch::new(HOLD_MAX, Duration::from_secs(60));
        switch.connected(NOW);
        Self {
            switch,
            planner: Planner::default(),
            out: Output::default(),
        }
    }

    fn compared() -> Self {
        let mut setup = Self::connected();
        setup.switch.compared = true;
        setup
    }

    /// The batches that were sent since the last call.
    fn sent(&mut self) -> Vec<(BatchId, usize)> {
        let sent = std::mem::take(&mut self.out.commands).into_iter();
        sent.filter_map(|command| match command {
            Command::Apply { batch, changes, .. } => Some((batch, changes.len())),
            _ => None,
        })
        .collect()
    }
}

/// The removal of a flow: it needs no sentinel flow.
fn change() -> FlowChange {
    let cookie = Cookie::new(2);
    let sentinel = Sentinel { table: 44, cookie };
    FlowChange::Delete(sentinel.key(), cookie)
}

fn planned_in(batch: &Batch) -> Installed {
    let mut installed = Installed::default();
    installed.written = batch.written();
    installed
}

#[test]
fn what_is_planned_into_a_batch_waits_for_that_batch() {
    let mut setup = Setup::compared();
    let pass = Duration::from_millis(1);
    setup.switch.revalidates_in(pass);
    let mut batch = setup.switch.begin(NOW);
    batch.extend([change()]);
    let installed = planned_in(&batch);
    let id = batch.id().expect("it is sent");
    let sent = setup
        .switch
        .commit(batch, true, &mut setup.planner, &mut setup.out);
    assert_eq!(sent, Some(id));
    assert_eq!(setup.sent(), [(id, 1)]);
    assert_eq!(setup.switch.wait_for(&installed), Wait::Batch(id));
    let is_over = setup.switch.applied(id, Ok(()), true, NOW, &mut setup.out);
    assert!(!is_over, "packets may have been denied");
    assert_eq!(setup.switch.wait_for(&installed), Wait::Batch(id));
    assert_eq!(setup.switch.revalidated(|_| true, NOW), []);
    assert_eq!(setup.switch.revalidated(|_| true, NOW + pass), [id]);
    assert_eq!(setup.switch.wait_for(&installed), Wait::Nothing);
}

#[test]
fn what_answers_of_one_turn_open_is_one_batch_before_any_other() {
    let mut setup = Setup::compared();
    let mut ids = Vec::new();
    for _ in 0..2 {
        let mut batch = setup.switch.begin_openings(NOW);
        batch.extend([change()]);
        ids.push(batch.id().expect("it is sent"));
        let installed = planned_in(&batch);
        setup.switch.open(batch, None);
        // It can be waited for before it is sent.
        assert_eq!(setup.switch.wait_for(&installed), Wait::Batch(ids[0]));
    }
    assert_eq!(ids[0], ids[1]);
    assert_eq!(setup.sent(), [], "the turn has not ended");
    setup
        .switch
        .flush_openings(&mut setup.planner, NOW, &mut setup.out);
    assert_eq!(setup.sent(), [(ids[0], 2)]);
    let next = setup.switch.begin(NOW).id();
    assert!(next > Some(ids[0]));
}

#[test]
fn an_answer_that_changes_nothing_opens_nothing() {
    let mut setup = Setup::compared();
    let batch = setup.switch.begin_openings(NOW);
    setup.switch.open(batch, None);
    setup
        .switch
        .flush_openings(&mut setup.planner, NOW, &mut setup.out);
    assert_eq!(setup.sent(), []);
}

#[test]
fn what_is_not_sent_waits_for_the_comparison_alone() {
    let mut setup = Setup::connected();
    // Not compared yet: only openings are sent.
    let mut batch = setup.switch.begin(NOW);
    batch.extend([change()]);
    let unsent = planned_in(&batch);
    assert_eq!(
        setup
            .switch
            .commit(batch, true, &mut setup.planner, &mut setup.out),
        None
    );
    assert_eq!(setup.switch.wait_for(&unsent), Wait::Longest);
    let mut batch = setup.switch.begin_openings(NOW);
    batch.extend([change()]);
    let opened = planned_in(&batch);
    setup.switch.open(batch, None);
    setup
        .switch
        .flush_openings(&mut setup.planner, NOW, &mut setup.out);
    assert_eq!(setup.sent().len(), 1);
    // The connection is lost before the answer.
    setup.switch.disconnected();
    assert_eq!(setup.switch.wait_for(&opened), Wait::Longest);
    setup.switch.comparison.ended += 1;
    setup.switch.unanswered.clear();
    for installed in [unsent, opened] {
        assert_eq!(setup.switch.wait_for(&installed), Wait::Nothing);
    }
}

#[test]
fn a_flow_brings_its_sentinel_flow_along_once() {
    let mut setup = Setup::compared();
    let cookie = Cookie::new(2);
    let body = FlowBody {
        cookie,
        hard_timeout_s: 0,
        actions: std::sync::Arc::new([]),
    };
    // Any key will do.
    let key = Sentinel { table: 44, cookie }.key();
    for changes in [2, 1] {
        let mut batch = setup.switch.begin(NOW);
        batch.extend([FlowChange::Add(key.clone(), body.clone())]);
        setup
            .switch
            .commit(batch, true, &mut setup.planner, &mut setup.out);
        assert_eq!(setup.sent()[0].1, changes);
    }
    assert_eq!(setup.out.counters.flows_added, 2, "of pods");
    // Renewed at a third of the hard timeout.
    assert!(RENEW_INTERVAL * 2 < HARD_TIMEOUT);
    let at = NOW + RENEW_INTERVAL;
    setup.switch.timeout(&mut setup.planner, at, &mut setup.out);
    assert_eq!(setup.sent().len(), 1);
}

#[test]
fn each_deadline_says_why() {
    let mut setup = Setup::connected();
    assert_eq!(setup.switch.deadline(true), Some((NOW, Why::Comparison)));
    let count = (NOW + COUNT_DELAY, Why::Count);
    assert_eq!(setup.switch.deadline(false), Some(count));
    setup.switch.start_comparison(true, NOW, &mut setup.out);
    assert_eq!(setup.out.commands, [Command::Ask(FlowQuestion::Dump)]);
    assert_eq!(setup.switch.deadline(true), Some(count));
    setup.switch.disconnected();
    assert_eq!(setup.switch.deadline(true), None);
}
