use std::{
    fs,
    path::{Path, PathBuf},
};

use dnsflow_core::{
    Command,
    cache::journal::{Parts, Record, RecordedTerm},
    engine::Config,
    io::input::Frame,
    testing::{Node, allow, answer_frame, deny_all, frame, ifindex_of},
    values::{firewall::FirewallUpdate, ids::PortId},
};

use super::*;
use crate::{agent::wiring::Channels, state};

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

/// A directory of its own for a journal, removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let name = format!("dnsflow-hot-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    /// Whether the journal has this label of a name.
    fn has(&self, label: &str) -> bool {
        let file = state::find(&self.0).expect("a journal");
        let content = fs::read(file).expect("it can be read");
        let mut parts = content.windows(label.len());
        parts.any(|part| part == label.as_bytes())
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("the directory is there");
    }
}

/// An engine with a pod whose rules allow example.com, and its journal.
fn recorded(dir: &Path) -> (Node, Recorder) {
    let mut node = Node::bare();
    node.now = now();
    let mut node = node.start(&[allow("example.com"), deny_all()]);
    let recorder = Recorder::open(Some(dir), &mut node.engine);
    (node, recorder)
}

/// The agent may be killed behind any of them.
#[test]
fn commands_come_behind_the_records_that_they_follow_from() {
    let dir = Dir::new("turn");
    let (mut node, mut recorder) = recorded(&dir.0);
    let bytes = answer_frame("told.example.com", &[[203, 0, 113, 1]], 300);
    let told = frame(ifindex_of(node.pods["ns1_p1"]), now(), &bytes);
    node.engine.handle_frame(told, now());
    let commands = carrying_out::end_turn(&mut node.engine, &mut recorder, now());
    let opens = |command: &Command| matches!(command, Command::Apply { .. });
    assert!(commands.iter().any(opens));
    assert!(dir.has("told"));
}

/// Its record in the ring buffer is gone then.
#[test]
fn a_frame_whose_addresses_the_kernel_has_opened_is_given_back_behind_its_records() {
    let dir = Dir::new("opened");
    let (mut node, mut recorder) = recorded(&dir.0);
    for (label, opened) in [("left", false), ("opened", true)] {
        let name = format!("{label}.example.com");
        let bytes = answer_frame(&name, &[[203, 0, 113, 1]], 300);
        let told = frame(ifindex_of(node.pods["ns1_p1"]), now(), &bytes);
        let told = Frame { opened, ..told };
        kernel::look_at(told, &mut node.engine, &mut recorder, now());
        assert_eq!(dir.has(label), opened);
    }
}

/// However long the journal takes to be read.
#[test]
fn a_name_of_the_journal_ends_when_its_record_says() {
    let dir = Dir::new("ends");
    let (mut journal, _, refusal) = state::open(&dir.0, now()).expect("it can be used");
    assert!(refusal.is_none());
    // The file has milliseconds.
    let end = Timestamp::from_nanos((now().as_nanos() / 1_000_000 + 60_000) * 1_000_000);
    let term = RecordedTerm {
        is_ended: false,
        until: end,
        deny_until: end,
        is_denied: false,
    };
    let records = [
        Record::Port {
            number: PortId(7),
            name: "ns1_p1".into(),
            pod: None,
        },
        Record::Name {
            port: PortId(7),
            address: [203, 0, 113, 1].into(),
            name: "www.example.com".parse().expect("a name"),
            term,
        },
    ];
    journal.append(&records, now()).expect("there is space");
    let mut engine = Engine::new(Config::default());
    let _recorder = Recorder::open(Some(&dir.0), &mut engine);
    let mut parts = Parts::default();
    let all = std::iter::from_fn(|| engine.next_part(&mut parts)).flatten();
    let terms = all.filter_map(|record| match record {
        Record::Name { term, .. } => Some(term),
        _ => None,
    });
    assert_eq!(terms.collect::<Vec<_>>(), [term]);
}
