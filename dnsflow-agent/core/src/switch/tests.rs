use proptest::{collection::vec, prelude::*};

use super::*;
use crate::{
    installed::Flows,
    io::input::FlowQuestion,
    values::{
        flow::{Addresses, Cookie, Ends, FlowBody},
        limits::{
            CHANGES_UNDER_WAY_MAX, COUNT_DELAY, KEEP_FLOWS_S, REFUSED_BATCHES_MAX,
            REMOVALS_WAITING_MAX,
        },
    },
};

const NOW: Timestamp = Timestamp::from_nanos(1_000_000_000_000);

const PORT: PortId = PortId(1);

const HOLD_MAX: Duration = Duration::from_millis(100);

fn expected(most: usize) -> Expected {
    Expected {
        most,
        denies: false,
    }
}

/// A switch that is connected, and one thing that changes.
struct Setup {
    switch: Switch,
    planner: Planner,
    out: Output,
    /// How many flows pods were told.
    told: u32,
}

impl Setup {
    fn connected() -> Self {
        let mut switch = Switch::new(HOLD_MAX, KEEP_FLOWS_S, Duration::from_secs(60));
        switch.connected(NOW);
        Self {
            switch,
            planner: Planner::default(),
            out: Output::at(NOW),
            told: 0,
        }
    }

    fn compared() -> Self {
        let mut setup = Self::connected();
        setup.switch.phase = Phase::Compared;
        setup
    }

    /// An answer to this pod changes these flows; returns what was planned.
    fn open(&mut self, port: PortId, changes: Vec<FlowChange>) -> Flows {
        let mut batch = self
            .switch
            .begin_openings(port, expected(changes.len()), NOW);
        batch.extend(changes);
        let planned = planned_in(&batch);
        self.switch.open(port, batch, None);
        planned
    }

    /// The turn ends.
    fn flush(&mut self) {
        self.switch.flush_openings(&mut self.planner, &mut self.out);
    }

    /// Something else than an answer changes these flows; returns the batch.
    fn commit(&mut self, changes: Vec<FlowChange>) -> Option<BatchId> {
        let mut batch = self.switch.begin(NOW);
        batch.extend(changes);
        self.send(batch)
    }

    fn send(&mut self, batch: Batch) -> Option<BatchId> {
        self.switch
            .commit(batch, true, &mut self.planner, &mut self.out)
    }

    /// The switch confirms the oldest batch; returns whether there is one.
    fn confirm_next(&mut self) -> bool {
        let batch = self.switch.pending.keys().next().copied();
        if let Some(batch) = batch {
            self.switch.answered(batch, Ok(()), true, &mut self.out);
            self.flush();
        }
        batch.is_some()
    }

    /// The changes that were sent since the last call, in their order.
    fn changes(&mut self) -> Vec<FlowChange> {
        let commands = std::mem::take(&mut self.out.commands).into_iter();
        commands
            .flat_map(|command| match command {
                Command::Apply { changes, .. } => changes,
                _ => Vec::new(),
            })
            .collect()
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
    FlowChange::Delete(sentinel.key(), Some(cookie))
}

fn planned_in(batch: &Batch) -> Flows {
    let mut installed = Flows::default();
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
    assert_eq!(setup.switch.wait_for(installed.written), Wait::batch(id));
    let Answered { is_over, .. } = setup.switch.answered(id, Ok(()), true, &mut setup.out);
    assert!(!is_over, "packets may have been denied");
    assert_eq!(setup.switch.wait_for(installed.written), Wait::batch(id));
    assert_eq!(setup.switch.revalidated(|_| true, NOW), []);
    assert_eq!(setup.switch.revalidated(|_| true, NOW + pass), [id]);
    assert_eq!(setup.switch.wait_for(installed.written), Wait::default());
}

#[test]
fn what_answers_of_one_turn_open_is_one_batch_before_any_other() {
    let mut setup = Setup::compared();
    let mut ids = Vec::new();
    for _ in 0..2 {
        let Written::In(id) = setup.open(PORT, vec![change()]).written else {
            panic!("it is sent");
        };
        ids.push(id);
        // It can be waited for before it is sent.
        let wait = setup.switch.wait_for(Written::In(id));
        assert_eq!(wait, Wait::batch(ids[0]));
    }
    assert_eq!(ids[0], ids[1]);
    assert_eq!(setup.sent(), [], "the turn has not ended");
    setup.flush();
    assert_eq!(setup.sent(), [(ids[0], 2)]);
    let next = setup.switch.begin(NOW).id();
    assert!(next > Some(ids[0]));
}

#[test]
fn an_answer_that_changes_nothing_opens_nothing() {
    let mut setup = Setup::compared();
    setup.open(PORT, Vec::new());
    setup.flush();
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
    assert_eq!(setup.switch.wait_for(unsent.written), Wait::comparison());
    let opened = setup.open(PORT, vec![change()]);
    setup.flush();
    assert_eq!(setup.sent().len(), 1);
    // The connection is lost before the answer.
    setup.switch.disconnected();
    assert_eq!(setup.switch.wait_for(opened.written), Wait::comparison());
    setup.switch.comparison.ended += 1;
    setup.switch.unanswered.clear();
    for installed in [unsent, opened] {
        assert_eq!(setup.switch.wait_for(installed.written), Wait::default());
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
    let at = NOW + Duration::from_secs(100);
    setup.out.begin(at);
    setup.switch.timeout(&mut setup.planner, &mut setup.out);
    assert_eq!(setup.sent().len(), 1);
}

#[test]
fn each_deadline_says_why() {
    let mut setup = Setup::connected();
    assert_eq!(setup.switch.deadline(true), Some((NOW, Why::Comparison)));
    let count = (NOW + COUNT_DELAY, Why::Count);
    assert_eq!(setup.switch.deadline(false), Some(count));
    assert!(setup.switch.is_comparison_due(NOW));
    setup.switch.start_comparison(false, &mut setup.out);
    let dump = FlowQuestion::Dump { number: 1 };
    assert_eq!(setup.out.commands, [Command::Ask(dump)]);
    assert_eq!(setup.switch.deadline(true), Some(count));
    setup.switch.disconnected();
    assert_eq!(setup.switch.deadline(true), None);
}

/// An addition of a flow with this priority.
fn addition(priority: u16) -> FlowChange {
    let cookie = Cookie::new(2);
    let body = FlowBody {
        cookie,
        hard_timeout_s: 0,
        actions: std::sync::Arc::new([]),
    };
    let mut key = Sentinel { table: 44, cookie }.key();
    key.priority = priority;
    FlowChange::Add(key, body)
}

/// An answer to this pod changes so many flows of its own, each between ends of its own; returns what was planned.
fn told(setup: &mut Setup, port: u32, changes: usize) -> Flows {
    let changes = (0..changes).map(|_| {
        setup.told += 1;
        removal(setup.told)
    });
    let changes = changes.collect();
    setup.open(PortId(port), changes)
}

fn flush(setup: &mut Setup) -> Vec<usize> {
    setup.flush();
    setup
        .sent()
        .into_iter()
        .map(|(_, changes)| changes)
        .collect()
}

#[test]
fn what_opens_for_one_pod_goes_past_what_waits_for_another() {
    let mut setup = Setup::compared();
    told(&mut setup, 1, CHANGES_UNDER_WAY_MAX);
    let waiting = told(&mut setup, 1, CHANGES_UNDER_WAY_MAX + 10);
    let more = told(&mut setup, 1, 5);
    assert_eq!(flush(&mut setup), [CHANGES_UNDER_WAY_MAX]);
    let Written::In(first) = waiting.written else {
        panic!("{waiting:?}");
    };
    assert_eq!(setup.switch.wait_for(waiting.written), Wait::batch(first));
    // Another pod does not wait.
    told(&mut setup, 2, 3);
    assert_eq!(flush(&mut setup), [3]);
    // Each part goes when the one before it was confirmed; nobody waits for it but the next one.
    let mut parts = Vec::new();
    while let Some(batch) = setup.switch.pending.keys().next().copied() {
        assert_ne!(setup.switch.wait_for(more.written), Wait::default());
        setup.switch.answered(batch, Ok(()), true, &mut setup.out);
        parts.extend(flush(&mut setup));
    }
    assert_eq!(parts, [CHANGES_UNDER_WAY_MAX, 10, 5]);
    assert_eq!(setup.switch.sizes()[..3], [0, 0, 0]);
}

#[test]
fn a_flow_that_ends_while_it_waits_is_never_added() {
    let removals = ["an edit", "another pod", "the same pod", "its end"];
    for by in removals {
        let mut setup = Setup::compared();
        told(&mut setup, 1, CHANGES_UNDER_WAY_MAX);
        setup.open(PortId(1), vec![addition(9)]);
        assert_eq!(flush(&mut setup), [CHANGES_UNDER_WAY_MAX]);
        let FlowChange::Add(key, body) = addition(9) else {
            panic!("an addition");
        };
        let removal = FlowChange::Delete(key.clone(), Some(body.cookie));
        match by {
            "an edit" => drop(setup.commit(vec![removal])),
            "another pod" => drop(setup.open(PortId(2), vec![removal])),
            "the same pod" => drop(setup.open(PortId(1), vec![removal])),
            _ => {
                let mut batch = setup.switch.begin(NOW);
                batch.extend([removal]);
                setup.switch.put_off(&mut batch, |_| true);
                setup.send(batch);
            }
        }
        setup.flush();
        while setup.confirm_next() {}
        // The addition may have been to replace a flow with any cookie.
        assert_eq!(setup.changes(), [FlowChange::Delete(key, None)], "{by}");
        assert_eq!(setup.switch.sizes()[..3], [0, 0, 0]);
    }
}

#[test]
fn a_flow_that_waits_to_be_replaced_is_no_difference_to_a_comparison() {
    let mut setup = Setup::compared();
    told(&mut setup, 1, CHANGES_UNDER_WAY_MAX);
    let change = addition(9);
    let key = change.key().expect("of one flow").clone();
    setup.open(PortId(1), vec![change]);
    for cookie in [2, 4].map(Cookie::new) {
        assert!(setup.switch.waiting.explains(&key, cookie));
    }
    let another = addition(10);
    let key = another.key().expect("of one flow");
    assert!(!setup.switch.waiting.explains(key, Cookie::new(2)));
}

#[test]
fn a_removal_of_the_flow_that_an_addition_replaces_leaves_the_addition() {
    let mut setup = Setup::compared();
    told(&mut setup, 1, CHANGES_UNDER_WAY_MAX);
    setup.open(PortId(1), vec![addition(9)]);
    setup.flush();
    setup.changes();
    let FlowChange::Add(key, _) = addition(9) else {
        panic!("an addition");
    };
    setup.commit(vec![FlowChange::Delete(key, Some(Cookie::new(4)))]);
    let sent = setup.changes();
    assert!(sent.contains(&addition(9)), "{sent:?}");
}

#[test]
fn an_answer_takes_along_what_waits_between_the_ends_of_its_flows_and_nothing_else() {
    let mut setup = Setup::compared();
    told(&mut setup, 1, 10 * CHANGES_UNDER_WAY_MAX);
    setup.open(PortId(1), vec![addition(8), addition(9)]);
    assert_eq!(flush(&mut setup), [CHANGES_UNDER_WAY_MAX]);
    setup.open(PortId(2), vec![addition(10)]);
    setup.flush();
    let of_pods = setup
        .changes()
        .into_iter()
        .filter(|change| !is_of_sentinel(change));
    let of_pods: Vec<FlowChange> = of_pods.collect();
    assert_eq!(of_pods, [addition(8), addition(9), addition(10)]);
    while setup.confirm_next() {}
    assert_eq!(setup.changes().len(), 9 * CHANGES_UNDER_WAY_MAX);
}

fn is_of_sentinel(change: &FlowChange) -> bool {
    matches!(change, FlowChange::Add(_, body) if body.cookie.is_of_sentinel())
}

/// A pod that is told an address with more flows than may be under way.
#[test]
fn changes_between_the_same_ends_go_together() {
    let mut setup = Setup::compared();
    let many = CHANGES_UNDER_WAY_MAX as u16 + 1;
    setup.open(PortId(1), (0..many).map(addition).collect());
    told(&mut setup, 1, CHANGES_UNDER_WAY_MAX);
    let [first, second] = [0, 1].map(|_| {
        let sent = flush(&mut setup);
        setup.confirm_next();
        sent
    });
    // With a sentinel flow.
    assert_eq!(first, [usize::from(many) + 1]);
    assert_eq!(second, [CHANGES_UNDER_WAY_MAX]);
}

#[test]
fn what_waits_when_the_connection_is_lost_comes_with_the_comparison() {
    let mut setup = Setup::compared();
    told(&mut setup, 1, CHANGES_UNDER_WAY_MAX);
    let waiting = told(&mut setup, 1, 1);
    flush(&mut setup);
    setup.switch.disconnected();
    assert_eq!(setup.switch.wait_for(waiting.written), Wait::comparison());
    assert_eq!(setup.switch.sizes()[..3], [0, 0, 0]);
}

#[test]
fn a_dump_may_not_show_what_was_under_way_when_it_began() {
    let mut setup = Setup::compared();
    let mut batch = setup.switch.begin(NOW);
    batch.extend([change()]);
    let written = batch.id().expect("it is sent");
    setup
        .switch
        .commit(batch, true, &mut setup.planner, &mut setup.out);
    let Written::In(opened) = setup.open(PORT, vec![change()]).written else {
        panic!("it is sent");
    };
    let later = NOW + Duration::from_millis(1);
    setup.out.begin(later);
    setup.switch.comparison.at = Some(later);
    setup.switch.start_comparison(false, &mut setup.out);
    assert_eq!(setup.switch.comparison.unshown, [written, opened].into());
}

/// What can happen to flows that several pods share.
#[derive(Clone, Debug)]
enum Step {
    /// An answer to a pod changes so many of them, from this one on.
    Answer {
        port: u32,
        first: u16,
        flows: u16,
    },
    Commit {
        flow: u16,
    },
    EndOfTurn,
    Reply,
}

const SHARED_FLOWS: u16 = 200;

fn step() -> impl Strategy<Value = Step> {
    let flows = prop_oneof![1u16..4, 100u16..160];
    prop_oneof![
        6 => (1u32..4, 0..SHARED_FLOWS, flows)
            .prop_map(|(port, first, flows)| Step::Answer { port, first, flows }),
        1 => (0..SHARED_FLOWS).prop_map(|flow| Step::Commit { flow }),
        2 => Just(Step::EndOfTurn),
        2 => Just(Step::Reply),
    ]
}

/// Changes on their way: each has its number as the flow's hard timeout.
struct Way {
    setup: Setup,
    /// What each change was planned into.
    planned: Vec<Written>,
    /// The last change of each flow that was planned.
    newest: BTreeMap<FlowKey, u16>,
    /// The change of each flow that was sent last.
    last: BTreeMap<FlowKey, u16>,
    /// The numbers in each batch that was not answered.
    sent: BTreeMap<BatchId, Vec<u16>>,
    arrived: BTreeSet<u16>,
}

impl Way {
    fn change(&mut self, flow: u16, more: u16) -> FlowChange {
        let FlowChange::Add(key, mut body) = addition(1000 + flow % SHARED_FLOWS) else {
            panic!("an addition");
        };
        body.hard_timeout_s = self.planned.len() as u16 + more;
        self.newest.insert(key.clone(), body.hard_timeout_s);
        FlowChange::Add(key, body)
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Answer { port, first, flows } => {
                let changes = (0..flows)
                    .map(|more| self.change(first + more, more))
                    .collect();
                let Flows { written, .. } = self.setup.open(PortId(port), changes);
                let planned = self.planned.len() + usize::from(flows);
                self.planned.resize(planned, written);
            }
            Step::Commit { flow } => {
                self.setup.flush();
                let change = self.change(flow, 0);
                let batch = self.setup.commit(vec![change]);
                self.planned.push(Written::In(batch.expect("it is sent")));
            }
            Step::EndOfTurn => self.setup.flush(),
            Step::Reply => {
                let next = self.setup.switch.pending.keys().next().copied();
                if let Some((batch, changes)) = next.and_then(|next| self.sent.remove_entry(&next))
                {
                    let Setup { switch, out, .. } = &mut self.setup;
                    switch.answered(batch, Ok(()), true, out);
                    self.arrived.extend(changes);
                }
            }
        }
    }

    fn note_sent(&mut self) -> Result<(), TestCaseError> {
        for command in std::mem::take(&mut self.setup.out.commands) {
            let Command::Apply { batch, changes, .. } = command else {
                continue;
            };
            let mut numbers = Vec::new();
            for change in changes {
                if let FlowChange::Add(key, body) = change
                    && key.priority >= 1000
                {
                    let number = body.hard_timeout_s;
                    let before = self.last.insert(key, number);
                    prop_assert!(before < Some(number), "{} behind {:?}", number, before);
                    numbers.push(number);
                }
            }
            self.sent.insert(batch, numbers);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn changes_that_pods_share_arrive_in_their_order_and_are_waited_for(steps in vec(step(), 1..60)) {
        let mut way = Way {
            setup: Setup::compared(),
            planned: Vec::new(),
            newest: BTreeMap::new(),
            last: BTreeMap::new(),
            sent: BTreeMap::new(),
            arrived: BTreeSet::new(),
        };
        let end = [Step::EndOfTurn, Step::Reply];
        let steps = steps.iter().chain(std::iter::repeat_n(&end, 200).flatten());
        for step in steps {
            way.take(step);
            way.note_sent()?;
            // A change may have taken the place of those before it.
            for number in way.newest.values() {
                if !way.arrived.contains(number) {
                    let written = way.planned[usize::from(*number)];
                    prop_assert_ne!(way.setup.switch.wait_for(written), Wait::default());
                }
            }
        }
        prop_assert!(way.newest.values().all(|number| way.arrived.contains(number)));
        prop_assert_eq!(&way.setup.switch.sizes()[..3], &[0, 0, 0]);
    }
}

#[test]
fn what_one_answer_opens_does_not_stand_before_what_others_open() {
    for is_first in [true, false] {
        let mut setup = Setup::compared();
        let mut others = Vec::new();
        if !is_first {
            others.push(told(&mut setup, 1, 1).written);
        }
        told(&mut setup, 2, 10 * CHANGES_UNDER_WAY_MAX);
        others.push(told(&mut setup, 3, 1).written);
        let sent = {
            setup.flush();
            setup.sent()
        };
        let shared = (others[0], others.len());
        let sent: Vec<(Written, usize)> = sent
            .into_iter()
            .map(|(batch, changes)| (Written::In(batch), changes))
            .collect();
        assert_eq!(sent[0], shared, "{is_first}");
        assert_eq!(sent[1].1, CHANGES_UNDER_WAY_MAX);
        assert_eq!(sent.len(), 2);
        assert!(others.iter().all(|written| *written == others[0]));
    }
}

#[test]
fn a_batch_that_the_edge_would_refuse_goes_in_parts() {
    let mut setup = Setup::compared();
    setup.switch.changes_max = 4;
    let last = setup.commit(vec![change(); 9]).expect("it is sent");
    let sent = setup.sent();
    let sizes: Vec<usize> = sent.iter().map(|(_, changes)| *changes).collect();
    assert_eq!(sizes, [4, 4, 1]);
    assert_eq!(sent[2].0, last);
    assert_eq!(
        setup.switch.wait_for(Written::In(last)),
        Wait::batch(last),
        "the others come before it"
    );
}

/// What can happen to flows that come and go.
#[derive(Clone, Debug)]
enum Event {
    /// An answer to a pod adds so many of them, from this one on, or removes some to make room.
    Answer {
        port: u32,
        first: u16,
        flows: u16,
        removes: bool,
    },
    /// They end.
    End {
        first: u16,
        flows: u16,
    },
    /// An edit removes them, or every other one, and changes the others.
    Edit {
        first: u16,
        flows: u16,
        changes: bool,
    },
    /// A pod comes with one of the addresses.
    Come {
        host: u8,
    },
    EndOfTurn,
    Reply,
}

const FLOWS: u16 = 800;

fn event() -> impl Strategy<Value = Event> {
    let flows = || prop_oneof![1u16..4, 100u16..400];
    let answer = (1u32..4, 0..FLOWS, flows(), any::<bool>());
    let edit = (0..FLOWS, flows(), any::<bool>());
    prop_oneof![
        4 => answer.prop_map(|(port, first, flows, removes)| {
            Event::Answer { port, first, flows, removes }
        }),
        4 => (0..FLOWS, flows()).prop_map(|(first, flows)| Event::End { first, flows }),
        1 => edit.prop_map(|(first, flows, changes)| Event::Edit { first, flows, changes }),
        1 => (0u8..4).prop_map(|host| Event::Come { host }),
        2 => Just(Event::EndOfTurn),
        3 => Just(Event::Reply),
    ]
}

/// The flows that should be in a switch, and those that are.
struct Flowing {
    setup: Setup,
    wanted: BTreeMap<FlowKey, Cookie>,
    there: BTreeMap<FlowKey, Cookie>,
    /// The flows that answers of this turn have changed.
    of_turn: BTreeSet<FlowKey>,
    added: u32,
}

impl Flowing {
    /// Two flows between each pair of ends.
    fn key(flow: u16) -> FlowKey {
        let flow = flow % FLOWS;
        let [_, dst] = (flow / 2).to_be_bytes();
        let FlowChange::Add(mut key, _) = addition(1000 + flow % 2) else {
            panic!("an addition");
        };
        let src = IpAddr::from([10, 244, 0, (flow / 2 % 4) as u8]);
        let dst = IpAddr::from([192, 0, (flow / 512) as u8, dst]);
        key.matches.metadata = 0;
        key.matches.ends = Ends::Addresses(Addresses::between(src, dst).expect("of IPv4"));
        key
    }

    /// A flow with one of three bodies.
    fn add(&mut self, flow: u16) -> FlowChange {
        self.added += 1;
        let key = Self::key(flow);
        let body = FlowBody {
            cookie: Cookie::new(2 * (1 + self.added % 3)),
            // It needs no sentinel flow.
            hard_timeout_s: 1,
            actions: std::sync::Arc::new([]),
        };
        self.wanted.insert(key.clone(), body.cookie);
        FlowChange::Add(key, body)
    }

    fn remove(&mut self, flow: u16) -> Option<FlowChange> {
        let key = Self::key(flow);
        let cookie = self.wanted.remove(&key)?;
        Some(FlowChange::Delete(key, Some(cookie)))
    }

    fn take(&mut self, event: &Event) -> Result<(), TestCaseError> {
        if !matches!(event, Event::Answer { .. } | Event::Reply) {
            self.setup.flush();
            self.carry_out()?;
            self.of_turn.clear();
        }
        match *event {
            Event::Answer {
                port,
                first,
                flows,
                removes,
            } => {
                let flows = first..first + flows;
                let changes = flows.filter_map(|flow| match removes && flow % 3 > 0 {
                    true => self.remove(flow),
                    false => Some(self.add(flow)),
                });
                let changes: Vec<FlowChange> = changes.collect();
                let keys = changes.iter().filter_map(FlowChange::key);
                self.of_turn.extend(keys.cloned());
                self.setup.open(PortId(port), changes);
            }
            Event::End { first, flows } => {
                let flows = first..first + flows;
                let changes: Vec<_> = flows.filter_map(|flow| self.remove(flow)).collect();
                let mut batch = self.setup.switch.begin(NOW);
                batch.extend(changes);
                self.setup.switch.put_off(&mut batch, |_| true);
                self.setup.send(batch);
            }
            Event::Edit {
                first,
                flows,
                changes,
            } => {
                let flows = first..first + flows;
                let edited = flows.filter_map(|flow| {
                    let removal = self.remove(flow)?;
                    Some(match changes && flow % 2 == 0 {
                        true => self.add(flow),
                        false => removal,
                    })
                });
                let edited = edited.collect();
                self.setup.commit(edited);
            }
            Event::Come { host } => {
                let mut batch = self.setup.switch.begin(NOW);
                let address = IpAddr::from([10, 244, 0, host]);
                self.setup
                    .switch
                    .end(&mut batch, |key| key.matches.ends.src() == Some(address));
                self.setup.send(batch);
            }
            Event::EndOfTurn => {}
            Event::Reply => {
                let next = self.setup.switch.pending.keys().next().copied();
                if let Some(batch) = next {
                    let Setup { switch, out, .. } = &mut self.setup;
                    switch.answered(batch, Ok(()), true, out);
                }
            }
        }
        self.carry_out()
    }

    /// The switch takes what was sent.
    fn carry_out(&mut self) -> Result<(), TestCaseError> {
        for change in self.setup.changes() {
            match change {
                FlowChange::Add(key, body) => {
                    // What has waited is wanted when it is sent.
                    let is_wanted = self.wanted.get(&key) == Some(&body.cookie);
                    prop_assert!(is_wanted || self.of_turn.contains(&key), "{:?}", key);
                    self.there.insert(key, body.cookie);
                }
                FlowChange::Delete(key, cookie) => {
                    let found = self.there.get(&key);
                    if cookie.is_none_or(|cookie| found == Some(&cookie)) {
                        self.there.remove(&key);
                    }
                }
                FlowChange::Renew(_) => panic!("nothing is renewed"),
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn whatever_waits_the_switch_has_in_the_end_what_it_should_have(events in vec(event(), 1..40)) {
        let mut flowing = Flowing {
            setup: Setup::compared(),
            wanted: BTreeMap::new(),
            there: BTreeMap::new(),
            of_turn: BTreeSet::new(),
            added: 0,
        };
        let end = [Event::EndOfTurn, Event::Reply];
        let events = events.iter().chain(std::iter::repeat_n(&end, 200).flatten());
        for event in events {
            flowing.take(event)?;
            let [.., of_pods, removals, _, _] = flowing.setup.switch.sizes();
            if of_pods == 0 && removals == 0 {
                prop_assert!(flowing.there == flowing.wanted, "{:?}", event);
            }
        }
        prop_assert_eq!(&flowing.setup.switch.sizes()[..3], &[0, 0, 0]);
        prop_assert!(flowing.there == flowing.wanted);
    }
}

/// The removal of a flow to this address.
fn removal(dst: u32) -> FlowChange {
    let FlowChange::Add(mut key, body) = addition(1) else {
        panic!("an addition");
    };
    let dst = IpAddr::from(dst.to_be_bytes());
    let src = IpAddr::from([10, 244, 0, 5]);
    key.matches.ends = Ends::Addresses(Addresses::between(src, dst).expect("of IPv4"));
    FlowChange::Delete(key, Some(body.cookie))
}

#[test]
fn only_so_many_flows_wait_to_be_removed_and_the_others_go_at_once() {
    let mut setup = Setup::compared();
    let beyond = 7;
    let removals = 0..(REMOVALS_WAITING_MAX + beyond) as u32;
    let mut batch = setup.switch.begin(NOW);
    batch.extend(removals.map(removal));
    setup.switch.put_off(&mut batch, |_| true);
    setup.send(batch);
    let sent: Vec<usize> = setup
        .sent()
        .into_iter()
        .map(|(_, changes)| changes)
        .collect();
    assert_eq!(sent, [CHANGES_UNDER_WAY_MAX + beyond]);
    let waiting = REMOVALS_WAITING_MAX - CHANGES_UNDER_WAY_MAX;
    assert_eq!(setup.switch.sizes()[2], waiting);
    // An agent that ends waits for them.
    let sent = *setup.switch.pending.keys().next().expect("a batch");
    setup.switch.answered(sent, Ok(()), false, &mut setup.out);
    assert!(setup.switch.is_writing());
}

#[test]
fn a_batch_of_which_other_pods_have_written_all_is_over_with_its_parts() {
    let mut setup = Setup::compared();
    told(&mut setup, 1, CHANGES_UNDER_WAY_MAX);
    let mut batch = setup.switch.begin_openings(PORT, expected(1), NOW);
    batch.extend([addition(1000)]);
    let id = batch.id().expect("it is sent");
    let opening = Opening {
        namespace: Some("ns1".into()),
        port: "ns1_p1".into(),
        name: "example.com".parse().expect("a name"),
        addresses: Vec::new(),
        rules: Vec::new(),
        changes: 1,
        waits_since: Some(NOW),
    };
    setup.switch.open(PORT, batch, Some(opening));
    setup.flush();
    setup.open(PortId(2), vec![addition(1000)]);
    setup.flush();
    assert_eq!(setup.sent().len(), 2);
    assert_eq!(setup.switch.wait_for(Written::In(id)), Wait::batch(id));
    setup.confirm_next();
    assert_eq!(setup.sent(), [(id, 0)], "the switch confirms that, too");
    assert_eq!(setup.switch.wait_for(Written::In(id)), Wait::batch(id));
    let opened = |setup: &Setup| {
        let mut reports = setup.out.reports.iter();
        reports.any(|report| matches!(report, Report::Opened { .. }))
    };
    assert!(!opened(&setup));
    while setup.confirm_next() {}
    assert!(opened(&setup));
    assert_eq!(setup.switch.sizes()[..3], [0, 0, 0]);
}

/// At the limit, one of the flows between two addresses waits, and the other goes at once: where this one denies, what
/// the other allows is open meanwhile.
#[test]
fn removals_between_two_addresses_stay_together_beyond_the_limit() {
    let mut setup = Setup::compared();
    let mut batch = setup.switch.begin(NOW);
    batch.extend((0..REMOVALS_WAITING_MAX as u32 - 1).map(removal));
    let last = REMOVALS_WAITING_MAX as u32;
    let of_two = [10, 20].map(|priority| match removal(last) {
        FlowChange::Delete(key, cookie) => FlowChange::Delete(FlowKey { priority, ..key }, cookie),
        other => other,
    });
    batch.extend(of_two.clone());
    setup.switch.put_off(&mut batch, |_| true);
    setup.send(batch);
    let sent = setup.changes();
    let together = of_two.iter().filter(|removal| sent.contains(removal));
    assert_ne!(together.count(), 1);
}

/// The switch refuses batches, and no comparison ends. All of them count as refused until one does that has begun later.
#[test]
fn refused_batches_have_a_limit_and_none_is_forgotten() {
    let mut refused = RefusedBatches::default();
    let many = 3 * REFUSED_BATCHES_MAX as u64;
    let contains_all = |refused: &RefusedBatches, ids: std::ops::Range<u64>| {
        ids.map(BatchId).all(|id| refused.contain(id))
    };
    for id in 0..many {
        if id % 1000 == 999 {
            refused.dump_begins();
        }
        refused.note(BatchId(id), Timestamp::default());
        assert!(refused.len() <= 2 * REFUSED_BATCHES_MAX);
    }
    assert!(contains_all(&refused, 0..many));
    assert!(!refused.contain(BatchId(many)));
    refused.dump_begins();
    assert!(contains_all(&refused, 0..many));
    refused.note(BatchId(many), Timestamp::default());
    refused.compared();
    assert!((0..many).all(|id| !refused.contain(BatchId(id))));
    assert!(refused.contain(BatchId(many)));
}

/// What pods are told of groups, and the flows that the switch has.
struct Groups {
    setup: Setup,
    /// The numbers of the groups whose flows somebody has written.
    written: BTreeSet<u16>,
    there: BTreeSet<FlowKey>,
}

#[derive(Clone, Debug)]
enum OfGroups {
    /// A pod is told an address, which gets the tag of this group.
    Answer {
        port: u32,
        dst: u32,
        group: u16,
    },
    /// The pod has more under way than it may.
    Fill {
        port: u32,
    },
    /// An edit gives an address this tag.
    Edit {
        dst: u32,
        group: u16,
    },
    EndOfTurn,
    Reply,
}

fn of_groups() -> impl Strategy<Value = OfGroups> {
    let (port, dst, group) = (0..3_u32, 0..3_u32, 1..6_u16);
    prop_oneof![
        8 => (port.clone(), dst.clone(), group.clone())
            .prop_map(|(port, dst, group)| OfGroups::Answer { port, dst, group }),
        1 => port.prop_map(|port| OfGroups::Fill { port }),
        1 => (dst, group).prop_map(|(dst, group)| OfGroups::Edit { dst, group }),
        3 => Just(OfGroups::EndOfTurn),
        3 => Just(OfGroups::Reply),
    ]
}

impl Groups {
    fn tag(group: u16) -> Tag {
        Tag::new(1, group)
    }

    /// The flows of a group: 1, or many.
    fn keys(group: u16) -> impl Iterator<Item = FlowKey> {
        let flows = [1, 3, 100, 200, 300][usize::from(group - 1)];
        (0..flows).map(move |priority| {
            let cookie = Cookie::new(2);
            let mut key = Sentinel { table: 44, cookie }.key();
            key.priority = priority;
            key.matches.ends = Ends::Tagged {
                tag: Self::tag(group),
                is_ipv6: false,
            };
            key
        })
    }

    fn add(key: FlowKey, cookie: Cookie) -> FlowChange {
        let body = FlowBody {
            cookie,
            hard_timeout_s: 0,
            actions: std::sync::Arc::new([]),
        };
        FlowChange::Add(key, body)
    }

    /// The address gets the tag, by the flows of the group, if nobody has written them, and one more.
    fn lead(&mut self, dst: u32, group: u16) -> Vec<FlowChange> {
        let is_new = self.written.insert(group);
        let of_group = Self::keys(group).filter(|_| is_new);
        let of_group = of_group.map(|key| Self::add(key, Cookie::new(2)));
        let FlowChange::Delete(key, _) = removal(dst) else {
            unreachable!("it is a removal");
        };
        let of_address = Self::add(key, Cookie::of_tag(Self::tag(group), None));
        of_group.chain([of_address]).collect()
    }

    fn take(&mut self, event: &OfGroups) -> Result<(), TestCaseError> {
        match *event {
            OfGroups::Answer { port, dst, group } => {
                let changes = self.lead(dst, group);
                let ends = Ends::Tagged {
                    tag: Self::tag(group),
                    is_ipv6: false,
                };
                let switch = &mut self.setup.switch;
                let most = changes.len() + switch.waiting_at(ends);
                let mut batch = switch.begin_openings(PortId(port), expected(most), NOW);
                batch.extend(changes);
                switch.open(PortId(port), batch, None);
            }
            OfGroups::Fill { port } => {
                told(&mut self.setup, port, CHANGES_UNDER_WAY_MAX);
            }
            OfGroups::Edit { dst, group } => {
                self.setup.flush();
                let changes = self.lead(dst, group);
                self.setup.commit(changes);
            }
            OfGroups::EndOfTurn => self.setup.flush(),
            OfGroups::Reply => {
                self.setup.confirm_next();
            }
        }
        for change in self.setup.changes() {
            let FlowChange::Add(key, body) = change else {
                continue;
            };
            if let Some(tag) = body.cookie.tag() {
                let missing = Self::keys(tag.number()).find(|key| !self.there.contains(key));
                prop_assert!(missing.is_none(), "{:?} leads to {:?}", key, tag);
            }
            self.there.insert(key);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever waits, and for whom.
    #[test]
    fn a_tag_leads_to_all_flows_of_its_group(events in vec(of_groups(), 1..60)) {
        let mut groups = Groups {
            setup: Setup::compared(),
            written: BTreeSet::new(),
            there: BTreeSet::new(),
        };
        let end = [OfGroups::EndOfTurn, OfGroups::Reply];
        let events = events.iter().chain(std::iter::repeat_n(&end, 200).flatten());
        for event in events {
            groups.take(event)?;
        }
        prop_assert_eq!(&groups.setup.switch.sizes()[..3], &[0, 0, 0]);
    }
}
