use std::{cell::RefCell, collections::BTreeMap, net::SocketAddr};

use proptest::{
    collection::vec,
    prelude::*,
    sample::Index,
    test_runner::{Config, TestRunner},
};

use super::*;
use crate::tools::counter_vec::Label;

const LIMITS: HoldLimits = HoldLimits {
    longest: Duration::from_micros(100),
    frames: 6,
    per_interface: 4,
    bytes: 60,
    bytes_per_interface: 40,
};

fn at(micros: u64) -> Timestamp {
    Timestamp::from_nanos(micros * 1000)
}

fn micros(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

fn connection(port: u16) -> ConnectionKey {
    ConnectionKey {
        ifindex: 1,
        server: "10.96.0.10:53".parse().expect("an address"),
        client: SocketAddr::new("10.244.0.5".parse().expect("an address"), port),
    }
}

/// A frame, and its TCP connection if it has one.
type Taken<'a> = (Frame<'a>, Option<ConnectionKey>);

fn udp(bytes: &[u8], captured_at: u64) -> Taken<'_> {
    let frame = Frame {
        ifindex: 1,
        captured_at: at(captured_at),
        bytes,
        from_pod: false,
        held: true,
        opened: false,
        gso_size: 0,
        left_out: 0,
    };
    (frame, None)
}

fn tcp(bytes: &[u8], captured_at: u64) -> Taken<'_> {
    (udp(bytes, captured_at).0, Some(connection(40_000)))
}

fn at_interface(ifindex: u32, (frame, connection): Taken<'_>) -> Taken<'_> {
    (Frame { ifindex, ..frame }, connection)
}

fn queue() -> HoldQueue {
    HoldQueue::new(LIMITS)
}

impl HoldQueue {
    #[track_caller]
    fn holds(&mut self, taken: Taken<'_>, wait: Wait) {
        let now = taken.0.captured_at;
        assert_eq!(self.hold_at(taken, wait, now), Ok(()));
    }

    fn hold_at(
        &mut self,
        (frame, connection): Taken<'_>,
        wait: Wait,
        now: Timestamp,
    ) -> Result<(), Full> {
        self.hold(&frame, connection, wait, now)
    }

    /// What leaves: first byte, and why.
    fn due(&mut self, now: u64) -> Vec<(u8, HoldEvent)> {
        let due = self.take_due(at(now));
        due.map(|(frame, why)| (frame.bytes[0], why)).collect()
    }
}

use HoldEvent::{Applied, Free, Overrun};

fn nothing() -> Wait {
    Wait::default()
}

fn batch(number: u64) -> Wait {
    Wait::batch(BatchId(number))
}

#[test]
fn an_answer_leaves_when_its_batch_is_done() {
    let mut queue = queue();
    let (frame, _) = udp(&[1, 2, 3], 10);
    let gso_size = 1448;
    queue.holds((Frame { gso_size, ..frame }, None), batch(1));
    assert_eq!((queue.len(), queue.bytes_held()), (1, 3));
    queue.waits_over([BatchId(2)], at(20));
    assert_eq!(queue.due(20), []);
    assert!(queue.awaits(BatchId(1)) && !queue.awaits(BatchId(2)));
    queue.waits_over([BatchId(1)], at(25));
    assert!(!queue.awaits(BatchId(1)));
    assert_eq!(queue.next_deadline(), Some(at(25)));
    assert_eq!(queue.due(24), []);
    let released: Vec<_> = queue.take_due(at(25)).collect();
    let expected = HeldFrame {
        ifindex: 1,
        bytes: [1, 2, 3].into(),
        gso_size,
        captured_at: at(10),
        is_overrun: false,
    };
    assert_eq!(released, [(expected, Applied)]);
    assert!(queue.is_empty());
    assert_eq!((queue.bytes_held(), queue.next_deadline()), (0, None));
}

#[test]
fn an_answer_whose_batch_is_not_applied_in_time_leaves_all_the_same() {
    let mut queue = queue();
    queue.holds(udp(&[1], 10), batch(1));
    assert_eq!(queue.next_deadline(), Some(at(110)));
    assert_eq!(queue.due(109), []);
    assert_eq!(queue.due(110), [(1, Overrun)]);
    queue.waits_over([BatchId(1)], at(111));
    assert_eq!(queue.due(1000), []);
    assert_eq!(queue.events()[Overrun], 1);
}

#[test]
fn an_answer_that_waits_for_nothing_or_for_a_comparison_that_does_not_end() {
    let mut queue = queue();
    queue.holds(udp(&[1], 5), nothing());
    queue.holds(udp(&[2], 5), Wait::comparison());
    assert_eq!(queue.due(104), [(1, Free)]);
    assert_eq!(queue.due(105), [(2, Overrun)]);
}

#[test]
fn an_answer_waits_for_each_of_its_batches() {
    for [first, last] in [[1, 2], [2, 1]] {
        let mut queue = queue();
        queue.holds(udp(&[1], 0), batch(1).and(nothing()).and(batch(2)));
        queue.waits_over([BatchId(first)], at(5));
        assert_eq!(queue.due(5), []);
        assert!(!queue.awaits(BatchId(first)) && queue.awaits(BatchId(last)));
        queue.waits_over([BatchId(first), BatchId(last)], at(6));
        assert_eq!(queue.due(6), [(1, Applied)]);
    }
}

#[test]
fn behind_a_comparison_an_answer_waits_for_the_flows_that_were_missing() {
    let mut queue = queue();
    queue.holds(udp(&[1], 0), Wait::comparison().and(batch(1)));
    queue.waits_over([BatchId(1)], at(1));
    assert_eq!(queue.due(1), []);
    queue.compared(&[BatchId(2)].into(), at(2));
    assert!(queue.awaits(BatchId(2)));
    assert_eq!(queue.due(2), []);
    queue.waits_over([BatchId(2)], at(3));
    assert_eq!(queue.due(3), [(1, Applied)]);
    // A batch of its own may come into force later than the comparison ends.
    queue.holds(udp(&[3], 3), Wait::comparison().and(batch(3)));
    queue.compared(&BTreeSet::new(), at(4));
    assert_eq!(queue.due(4), []);
    queue.waits_over([BatchId(3)], at(4));
    assert_eq!(queue.due(4), [(3, Applied)]);
    queue.holds(udp(&[2], 4), Wait::comparison());
    queue.compared(&BTreeSet::new(), at(5));
    assert_eq!(queue.due(5), [(2, Applied)]);
}

#[test]
fn frames_of_a_connection_wait_for_those_before_them() {
    let mut queue = queue();
    queue.holds(tcp(&[1], 0), batch(1));
    assert!(queue.has_frames_of(&connection(40_000)));
    queue.holds(tcp(&[2], 1), nothing());
    queue.holds(tcp(&[3], 2), batch(2));
    queue.holds(tcp(&[4], 3), nothing());
    // Another connection's has nothing to do with it.
    let (other, _) = at_interface(2, udp(&[5], 3));
    queue.holds((other, Some(connection(40_001))), nothing());
    queue.waits_over([BatchId(2)], at(4));
    assert_eq!(queue.due(4), [(5, Free)]);
    queue.waits_over([BatchId(1)], at(6));
    let all = [(1, Applied), (2, Free), (3, Applied), (4, Free)];
    assert_eq!(queue.due(6), all);
    assert!(!queue.has_frames_of(&connection(40_000)));
}

#[test]
fn a_later_frame_does_not_leave_with_an_earlier_one_before_its_time() {
    let mut queue = queue();
    queue.holds(tcp(&[1], 0), batch(1));
    queue.holds(tcp(&[2], 1), batch(2));
    queue.waits_over([BatchId(1)], at(2));
    assert_eq!(queue.due(2), [(1, Applied)]);
    assert_eq!(queue.due(100), []);
    assert_eq!(queue.due(101), [(2, Overrun)]);
}

#[test]
fn an_earlier_frame_leaves_before_a_later_one_is_overdue() {
    let mut queue = queue();
    // Packets of one connection can be stamped on different processors.
    queue.holds(tcp(&[1], 20), batch(1));
    queue.holds(tcp(&[2], 10), batch(1));
    assert_eq!(queue.next_deadline(), Some(at(110)));
    assert_eq!(queue.due(110), [(1, Overrun), (2, Overrun)]);
}

#[test]
fn where_there_is_no_room_nothing_is_held() {
    let mut queue = queue();
    for number in 0..4 {
        queue.holds(udp(&[number], 0), batch(1));
    }
    assert_eq!(queue.hold_at(udp(&[9], 0), batch(1), at(0)), Err(Full));
    let of_other = |bytes| at_interface(2, udp(bytes, 0));
    queue.holds(of_other(&[4]), batch(1));
    assert_eq!(
        queue.hold_at(of_other(&[9; 40]), batch(1), at(0)),
        Err(Full)
    );
    queue.holds(of_other(&[5; 39]), batch(1));
    let of_third = at_interface(3, udp(&[9; 17], 0));
    assert_eq!(queue.hold_at(of_third, batch(1), at(0)), Err(Full));
    assert_eq!(queue.due(100).len(), 6);
    for number in 0..6 {
        queue.holds(at_interface(number, udp(&[9], 200)), batch(1));
    }
    assert_eq!(queue.hold_at(udp(&[9], 0), batch(1), at(0)), Err(Full));
    assert_eq!(queue.events()[HoldEvent::Full], 4);
}

#[test]
fn where_there_is_no_room_a_connection_keeps_its_order() {
    let mut queue = queue();
    for number in 0..4 {
        queue.holds(tcp(&[number], 0), batch(1));
    }
    assert_eq!(queue.hold_at(tcp(&[9], 1), nothing(), at(1)), Err(Full));
    let all = [0, 1, 2, 3].map(|number| (number, Overrun));
    assert_eq!(queue.due(1), all);
}

#[test]
fn all_leave_in_the_end() {
    let mut queue = queue();
    queue.holds(tcp(&[1], 0), batch(1));
    queue.holds(tcp(&[2], 0), Wait::comparison());
    queue.holds(udp(&[3], 0), batch(7));
    assert_eq!(queue.due(u64::MAX / 1000).len(), 3);
}

/// What can happen to a queue.
#[derive(Clone, Debug)]
enum Step {
    Hold {
        /// Interface and connection: three connections on one interface, else UDP.
        whose: u8,
        age: u64,
        wait: StepWait,
        len: usize,
    },
    Applied {
        batch: Index,
    },
    Lost {
        batch: Index,
    },
    /// Whether flows were missing.
    Compared(bool),
    Pass(u64),
    PassToDeadline,
}

#[derive(Clone, Copy, Debug)]
enum StepWait {
    Nothing,
    Comparison,
    NextBatch,
    Again,
    BothBatches,
    BatchAndComparison,
}

fn step() -> impl Strategy<Value = Step> {
    let wait = prop_oneof![
        Just(StepWait::Nothing),
        Just(StepWait::Comparison),
        Just(StepWait::NextBatch),
        Just(StepWait::Again),
        Just(StepWait::BothBatches),
        Just(StepWait::BatchAndComparison),
    ];
    prop_oneof![
        4 => (0u8..6, 0u64..30, wait, 9usize..20)
            .prop_map(|(whose, age, wait, len)| Step::Hold { whose, age, wait, len }),
        2 => any::<Index>().prop_map(|batch| Step::Applied { batch }),
        1 => any::<Index>().prop_map(|batch| Step::Lost { batch }),
        1 => any::<bool>().prop_map(Step::Compared),
        1 => (0u64..60).prop_map(Step::Pass),
        2 => Just(Step::PassToDeadline),
    ]
}

/// A frame of the model: it looks at all of them each time.
#[derive(Clone, Debug)]
struct Plain {
    number: u64,
    connection: Option<ConnectionKey>,
    ifindex: u32,
    len: usize,
    deadline: Timestamp,
    wait: Wait,
    has_waited: bool,
    ready: Option<Timestamp>,
}

#[derive(Default)]
struct Model {
    frames: Vec<Plain>,
}

impl Model {
    fn has_room(&self, ifindex: u32, len: usize) -> bool {
        let of_interface = || self.frames.iter().filter(|frame| frame.ifindex == ifindex);
        let bytes_of_interface: usize = of_interface().map(|frame| frame.len).sum();
        let bytes: usize = self.frames.iter().map(|frame| frame.len).sum();
        self.frames.len() < LIMITS.frames
            && of_interface().count() < LIMITS.per_interface
            && bytes + len <= LIMITS.bytes
            && bytes_of_interface + len <= LIMITS.bytes_per_interface
    }

    fn same_connection(&self, one: &Plain, other: &Plain) -> bool {
        one.connection.is_some() && one.connection == other.connection
    }

    fn deadline(&self, frame: &Plain) -> Timestamp {
        let behind = self
            .frames
            .iter()
            .filter(|other| self.same_connection(frame, other) && other.number > frame.number);
        behind.fold(frame.deadline, |deadline, other| {
            deadline.min(other.deadline)
        })
    }

    fn change_waits(&mut self, now: Timestamp, change: impl Fn(&mut Wait)) {
        for frame in &mut self.frames {
            change(&mut frame.wait);
            if frame.wait == nothing() {
                frame.ready.get_or_insert(now);
            }
        }
    }

    /// The first frame that may leave, and why.
    fn take(&mut self, now: Timestamp) -> Option<(u64, HoldEvent)> {
        let at = self.frames.iter().position(|frame| {
            let stands_before =
                |other: &Plain| self.same_connection(frame, other) && other.number < frame.number;
            let is_ready = frame.ready.is_some_and(|ready| ready <= now);
            !self.frames.iter().any(stands_before) && (is_ready || self.deadline(frame) <= now)
        })?;
        let deadline = self.deadline(&self.frames[at]);
        let frame = self.frames.remove(at);
        let why = match frame.ready {
            _ if !frame.has_waited => Free,
            Some(ready) if ready <= deadline => Applied,
            _ => Overrun,
        };
        Some((frame.number, why))
    }
}

/// Runs the queue beside the model; gives what happened.
fn run(steps: &[Step]) -> Result<CounterVec<HoldEvent>, TestCaseError> {
    let mut queue = queue();
    let mut model = Model::default();
    let mut now = at(1000);
    let mut next_batch = 1;
    let mut last: BTreeMap<u16, u64> = BTreeMap::new();
    for (number, step) in steps.iter().enumerate() {
        let number = number as u64;
        match *step {
            Step::Hold {
                whose,
                age,
                wait,
                len,
            } => {
                let connection = (whose < 3).then(|| connection(whose.into()));
                let wait = match wait {
                    StepWait::Nothing => nothing(),
                    StepWait::Comparison => Wait::comparison(),
                    StepWait::NextBatch => {
                        next_batch += 1;
                        batch(next_batch)
                    }
                    StepWait::Again => batch(next_batch),
                    StepWait::BothBatches => {
                        next_batch += 1;
                        batch(next_batch - 1).and(batch(next_batch))
                    }
                    StepWait::BatchAndComparison => batch(next_batch).and(Wait::comparison()),
                };
                let captured_at = now.checked_sub(micros(age)).expect("after the beginning");
                let mut bytes = vec![whose; len];
                bytes[..8].copy_from_slice(&number.to_be_bytes());
                let ifindex = u32::from(whose / 3);
                let frame = Frame {
                    ifindex,
                    captured_at,
                    ..udp(&bytes, 0).0
                };
                let held = queue.hold(&frame, connection, wait.clone(), now);
                prop_assert_eq!(held.is_ok(), model.has_room(ifindex, len));
                if held.is_ok() {
                    model.frames.push(Plain {
                        number,
                        connection,
                        ifindex,
                        len,
                        deadline: captured_at + LIMITS.longest,
                        has_waited: wait != nothing(),
                        ready: (wait == nothing()).then_some(captured_at),
                        wait,
                    });
                } else {
                    for frame in &mut model.frames {
                        if connection.is_some() && frame.connection == connection {
                            frame.deadline = frame.deadline.min(now);
                        }
                    }
                }
            }
            Step::Applied { batch } => {
                let batch = BatchId(1 + batch.index(next_batch as usize) as u64);
                queue.waits_over([batch], now);
                model.change_waits(now, |wait| {
                    wait.batches.remove(&batch);
                });
            }
            Step::Lost { batch } => {
                let batch = BatchId(1 + batch.index(next_batch as usize) as u64);
                queue.lost([batch], now);
                model.change_waits(now, |wait| wait.comparison |= wait.batches.remove(&batch));
            }
            Step::Compared(has_missing) => {
                let batches: BTreeSet<BatchId> = has_missing
                    .then_some(BatchId(next_batch))
                    .into_iter()
                    .collect();
                queue.compared(&batches, now);
                model.change_waits(now, |wait| {
                    if std::mem::take(&mut wait.comparison) {
                        wait.batches.extend(&batches);
                    }
                });
            }
            Step::Pass(time) => now = now + micros(time),
            Step::PassToDeadline => now = queue.next_deadline().map_or(now, |at| at.max(now)),
        }
        let mut left = Vec::new();
        for (frame, why) in queue.take_due(now) {
            let (number, rest) = frame.bytes.split_first_chunk().expect("9 bytes");
            let number = u64::from_be_bytes(*number);
            let whose = rest[0];
            if whose < 3 {
                let before = last.insert(whose.into(), number);
                prop_assert!(before < Some(number), "order of connection {}", whose);
            }
            left.push((number, why));
        }
        left.sort_unstable();
        let mut expected: Vec<_> = std::iter::from_fn(|| model.take(now)).collect();
        expected.sort_unstable();
        prop_assert_eq!(left, expected);
        prop_assert_eq!(queue.len(), model.frames.len());
        prop_assert!(queue.next_deadline().is_none_or(|at| at > now));
        prop_assert_eq!(queue.next_deadline().is_none(), queue.is_empty());
    }
    let rest = queue.len();
    prop_assert_eq!(
        queue.take_due(Timestamp::from_nanos(u64::MAX)).count(),
        rest
    );
    prop_assert_eq!((queue.len(), queue.bytes_held()), (0, 0));
    prop_assert!(queue.of_interface.is_empty() && queue.connections.is_empty());
    prop_assert!(queue.waiting.is_empty() && queue.due.is_empty());
    prop_assert!(queue.comparison.is_empty());
    Ok(queue.events().clone())
}

#[test]
fn it_does_what_the_plain_model_does() {
    let happened = RefCell::new(CounterVec::<HoldEvent>::default());
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::default()
    });
    let tested = runner.run(&vec(step(), 1..120), |steps| {
        let events = run(&steps)?;
        let mut happened = happened.borrow_mut();
        for (event, count) in events.iter() {
            (0..count).for_each(|_| happened.count(event));
        }
        Ok(())
    });
    if let Err(error) = tested {
        panic!("{error}");
    }
    for (event, count) in happened.borrow().iter() {
        // About a thousand times each.
        assert!(count > 100, "{} only {count} times", event.as_str());
    }
}
