use dnsflow_core::values::firewall::FirewallUpdate;

use super::*;
use crate::agent::wiring::Channels;

/// Takes each input in so much time, by a clock of its own.
struct Slow {
    time: Duration,
    now: Timestamp,
    /// How many inputs each turn had.
    turns: Vec<usize>,
}

impl Taker for Slow {
    fn now(&self) -> Timestamp {
        self.now
    }

    fn take(&mut self, _: Input) {
        self.now = self.now + self.time;
        *self.turns.last_mut().expect("one has begun") += 1;
    }

    fn end_turn(&mut self) {
        self.turns.push(0);
    }
}

/// Between two of them, frames and their flows go on their way, and the programs are told that the agent is well.
#[test]
fn inputs_that_take_long_are_carried_out_one_by_one() {
    let turns_of = |time| {
        let (sender, mut inputs) = mpsc::channel(8);
        for _ in 0..8 {
            sender.try_send(Input::MonitorGap).expect("room");
        }
        let mut slow = Slow {
            time,
            now: Timestamp::from_nanos(0),
            turns: vec![0],
        };
        take_waiting(&mut slow, &mut inputs);
        assert!(inputs.is_empty());
        slow.turns
    };
    assert_eq!(turns_of(TURN_MAX), [1, 1, 1, 1, 1, 1, 1, 1, 0]);
    assert_eq!(turns_of(TURN_MAX / 4), [4, 4, 0]);
    assert_eq!(turns_of(Duration::ZERO), [8]);
}

/// The hot thread takes one of them between two looks at everything else.
#[test]
fn changed_firewalls_wait_one_at_a_time() {
    let Channels {
        edges,
        mut incoming,
        ..
    } = Channels::new();
    let edit = || Input::Firewalls(FirewallUpdate::default());
    for _ in 0..3 {
        edges.edits.try_send(edit()).expect("room for one");
        edges
            .edits
            .try_send(edit())
            .expect_err("no room for a second one");
        let taken = incoming.edits.try_recv();
        taken.expect("the one that was sent");
    }
}
