#![allow(clippy::unwrap_used)]

use std::time::Duration;

use dnsflow_core::values::flow::{Action, FlowBody, Masked};
use proptest::prelude::*;

use super::*;
use crate::openflow::{
    fixtures::{self, From},
    shards,
};

const HELLO: &[u8] = &[6, 0, 0, 8, 0, 0, 0, 1];
const START: Timestamp = Timestamp::from_nanos(1_000_000_000);

/// A session that has greeted the switch; its hello is sent.
fn up() -> Session {
    let mut session = Session::new(START);
    session.receive(HELLO, START).unwrap();
    assert_eq!(session.poll_event(), Some(Event::Up));
    sent(&mut session);
    session
}

/// What the session sends: type and xid of each message.
fn sent(session: &mut Session) -> Vec<(u8, u32)> {
    let mut output = BytesMut::new();
    session.transmit(&mut output);
    let mut messages = Vec::new();
    while let Some(message) = Message::split(&mut output).unwrap() {
        messages.push((message.kind, message.xid));
    }
    assert!(output.is_empty());
    messages
}

fn events(session: &mut Session) -> Vec<Event> {
    std::iter::from_fn(|| session.poll_event()).collect()
}

fn message(kind: u8, xid: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![6, kind, 0, 8 + u8::try_from(body.len()).unwrap()];
    bytes.extend(xid.to_be_bytes());
    bytes.extend(body);
    bytes
}

fn barrier_reply(session: &mut Session, xid: u32) {
    let reply = message(wire::OFPT_BARRIER_REPLY, xid, &[]);
    session.receive(&reply, START).unwrap();
}

fn table_full(session: &mut Session, xid: u32) {
    let error = message(wire::OFPT_ERROR, xid, &[0, 5, 0, 1]);
    session.receive(&error, START).unwrap();
}

const TABLE_FULL: &str = "OFPET_FLOW_MOD_FAILED (OFPFMFC_TABLE_FULL)";

fn adds(count: usize) -> Vec<FlowChange> {
    let add = |(key, body)| FlowChange::Add(key, body);
    fixtures::recorded_flows()
        .into_iter()
        .take(count)
        .map(add)
        .collect()
}

fn ok(batch: u64) -> Event {
    Event::Applied {
        batch: BatchId(batch),
        result: Ok(()),
    }
}

fn failed(batch: u64, index: usize, text: &str) -> Event {
    Event::Applied {
        batch: BatchId(batch),
        result: Err(BatchError::Refused(vec![(index, text.to_owned())])),
    }
}

/// A part of the dump with this number, without a flow.
fn no_flows(number: u32, more: bool) -> Event {
    Event::Reply(FlowReply::Flows {
        number,
        flows: Vec::new(),
        more,
    })
}

const PLAIN: FlowQuestion = FlowQuestion::Dump { number: 1 };
const MOD: u8 = wire::OFPT_FLOW_MOD;
const ADD: u8 = wire::OFPT_BUNDLE_ADD_MESSAGE;
const CONTROL: u8 = wire::OFPT_BUNDLE_CONTROL;
const BARRIER: u8 = wire::OFPT_BARRIER_REQUEST;

#[test]
fn it_greets_first_and_takes_nothing_before_the_answer() {
    let mut session = Session::new(START);
    session.apply(BatchId(1), false, adds(1), Vec::new());
    session.ask(PLAIN);
    let mut output = BytesMut::new();
    session.transmit(&mut output);
    assert_eq!(
        output,
        [6, 0, 0, 16, 0, 0, 0, 1, 0, 1, 0, 8, 0, 0, 0, 0x40][..]
    );
    let lost = Event::Applied {
        batch: BatchId(1),
        result: Err(BatchError::ConnectionLost),
    };
    assert_eq!(events(&mut session), [lost]);
    session.receive(HELLO, START).unwrap();
    assert_eq!(events(&mut session), [Event::Up]);
}

#[test]
fn another_version_is_refused_with_the_switchs_words() {
    let mut session = Session::new(START);
    let error = message(wire::OFPT_ERROR, 1, b"\0\0\0\0only 0x04");
    let text = session.receive(&error, START).unwrap_err().to_string();
    assert!(text.contains("only 0x04"), "{text}");
    assert!(text.contains("protocols OpenFlow15"), "{text}");

    let old = [4, 0, 0, 8, 0, 0, 0, 1];
    let error = Session::new(START).receive(&old, START).unwrap_err();
    assert!(matches!(error, ProtocolError::NoCommonVersion(_)));
    let early = message(wire::OFPT_ECHO_REQUEST, 1, &[]);
    let error = Session::new(START).receive(&early, START).unwrap_err();
    assert_eq!(error, ProtocolError::NoHello(2));
    let error = up().receive(&old, START).unwrap_err();
    assert_eq!(error, ProtocolError::Version(4));
}

#[test]
fn a_batch_without_changes_is_a_barrier() {
    let mut session = up();
    session.apply(BatchId(1), false, Vec::new(), Vec::new());
    let sent = sent(&mut session);
    let [(BARRIER, xid)] = sent[..] else {
        panic!("{sent:?}");
    };
    barrier_reply(&mut session, xid);
    assert_eq!(events(&mut session), [ok(1)]);
}

#[test]
fn batches_are_pipelined_and_errors_find_their_change() {
    let mut session = up();
    session.apply(BatchId(1), false, adds(2), Vec::new());
    session.apply(BatchId(2), false, adds(1), Vec::new());
    assert_eq!(
        sent(&mut session),
        [(MOD, 2), (MOD, 3), (BARRIER, 4), (MOD, 7), (BARRIER, 8)]
    );
    table_full(&mut session, 3);
    assert_eq!(events(&mut session), []);
    barrier_reply(&mut session, 4);
    barrier_reply(&mut session, 8);
    assert_eq!(events(&mut session), [failed(1, 1, TABLE_FULL), ok(2)]);
}

#[test]
fn a_bundle_is_committed_only_when_nothing_was_refused() {
    let mut session = up();
    session.apply(BatchId(1), true, adds(2), Vec::new());
    let open = [(CONTROL, 5), (ADD, 2), (ADD, 3), (BARRIER, 4)];
    assert_eq!(sent(&mut session), open);
    barrier_reply(&mut session, 4);
    let mut output = BytesMut::new();
    session.transmit(&mut output);
    assert_eq!(output[12..14], [0, BundleControl::Commit as u8]);
    session
        .receive(&message(CONTROL, 6, &[0; 8]), START)
        .unwrap();
    assert_eq!(events(&mut session), [ok(1)]);

    session.apply(BatchId(2), true, adds(2), Vec::new());
    sent(&mut session);
    table_full(&mut session, 8);
    barrier_reply(&mut session, 9);
    let mut output = BytesMut::new();
    session.transmit(&mut output);
    assert_eq!(output[12..14], [0, BundleControl::Discard as u8]);
    assert_eq!(events(&mut session), []);
    session
        .receive(&message(CONTROL, 11, &[0; 8]), START)
        .unwrap();
    assert_eq!(events(&mut session), [failed(2, 1, TABLE_FULL)]);
}

#[test]
fn a_failed_commit_is_the_result_even_without_a_change_to_blame() {
    let mut session = up();
    session.apply(BatchId(1), true, adds(2), Vec::new());
    barrier_reply(&mut session, 4);
    let error = message(wire::OFPT_ERROR, 6, &[0, 17, 0, 14]);
    session.receive(&error, START).unwrap();
    let text = "the bundle as a whole: OFPET_BUNDLE_FAILED (OFPBFC_TIMEOUT)";
    assert_eq!(events(&mut session), [failed(1, 0, text)]);
}

#[test]
fn what_follows_an_atomic_batch_waits_for_its_decision() {
    let mut session = up();
    session.apply(BatchId(1), true, adds(2), Vec::new());
    sent(&mut session);
    session.apply(BatchId(2), false, adds(1), Vec::new());
    session.apply(BatchId(3), true, adds(2), Vec::new());
    session.ask(PLAIN);
    assert_eq!(sent(&mut session), []);
    barrier_reply(&mut session, 4);
    assert_eq!(
        sent(&mut session),
        [
            (CONTROL, 6),
            (MOD, 7),
            (BARRIER, 8),
            (CONTROL, 14),
            (ADD, 11),
            (ADD, 12),
            (BARRIER, 13)
        ]
    );
    barrier_reply(&mut session, 13);
    let decision_and_dump = [(CONTROL, 15), (wire::OFPT_MULTIPART_REQUEST, 16)];
    assert_eq!(sent(&mut session), decision_and_dump);
}

#[test]
fn a_change_that_cannot_be_encoded_stops_an_atomic_batch() {
    let impossible = || {
        let (key, mut body) = fixtures::recorded_flows().swap_remove(0);
        body.actions = Arc::new([Action::SetRegister {
            register: 16,
            bits: Masked::new(1, 1),
        }]);
        let mut changes = adds(2);
        changes.insert(1, FlowChange::Add(key, body));
        changes
    };
    let text = "there is no register 16; Open vSwitch has 16";
    let mut session = up();
    session.apply(BatchId(1), true, impossible(), Vec::new());
    assert_eq!(sent(&mut session), []);
    assert_eq!(events(&mut session), [failed(1, 1, text)]);

    session.apply(BatchId(2), false, impossible(), Vec::new());
    let sent = sent(&mut session);
    let kinds: Vec<_> = sent.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [MOD, MOD, BARRIER]);
    barrier_reply(&mut session, sent[2].1);
    assert_eq!(events(&mut session), [failed(2, 1, text)]);
}

#[test]
fn a_renewal_goes_to_every_table_that_may_hold_our_flows() {
    let body = |tag| FlowBody {
        cookie: Cookie::new(tag),
        hard_timeout_s: 300,
        actions: Arc::default(),
    };
    let mut session = up();
    session.monitor_tables(BTreeSet::from([51]));
    session.apply(BatchId(1), false, adds(1), Vec::new());
    sent(&mut session);
    session.apply(
        BatchId(2),
        false,
        vec![FlowChange::Renew(body(1))],
        Vec::new(),
    );
    let mut output = BytesMut::new();
    session.transmit(&mut output);
    let first = Message::split(&mut output).unwrap().unwrap();
    let second = Message::split(&mut output).unwrap().unwrap();
    assert_eq!([first.body[16], second.body[16]], [46, 51]);
    table_full(&mut session, second.xid);
    barrier_reply(&mut session, second.xid + 1);
    assert_eq!(events(&mut session), [failed(2, 0, TABLE_FULL)]);
}

#[test]
fn silence_is_probed_and_then_ends_the_session() {
    let mut session = up();
    let idle = START + IDLE_MAX;
    assert_eq!(session.next_deadline(), idle);
    session.handle_timeout(idle).unwrap();
    assert_eq!(sent(&mut session), [(wire::OFPT_ECHO_REQUEST, 2)]);
    let answered = idle + Duration::from_secs(1);
    let reply = message(wire::OFPT_ECHO_REPLY, 2, &[]);
    session.receive(&reply, answered).unwrap();
    assert_eq!(session.next_deadline(), answered + IDLE_MAX);

    let probed = answered + IDLE_MAX;
    session.handle_timeout(probed).unwrap();
    let almost = probed + (IDLE_MAX - Duration::from_nanos(1));
    assert_eq!(session.handle_timeout(almost), Ok(()));
    assert_eq!(
        session.handle_timeout(probed + IDLE_MAX),
        Err(ProtocolError::Silent)
    );
    let mut never_greeted = Session::new(START);
    assert_eq!(
        never_greeted.handle_timeout(idle),
        Err(ProtocolError::Silent)
    );
}

#[test]
fn echoes_of_the_switch_are_answered_with_their_data() {
    let mut session = up();
    let request = message(wire::OFPT_ECHO_REQUEST, 9, b"abc");
    session.receive(&request, START).unwrap();
    let mut output = BytesMut::new();
    session.transmit(&mut output);
    assert_eq!(output, message(wire::OFPT_ECHO_REPLY, 9, b"abc")[..]);
}

#[test]
fn closing_answers_every_batch() {
    let mut session = up();
    session.apply(BatchId(1), false, adds(1), Vec::new());
    session.apply(BatchId(2), true, adds(2), Vec::new());
    session.apply(BatchId(3), false, adds(1), Vec::new());
    session.close();
    let lost = |batch| Event::Applied {
        batch: BatchId(batch),
        result: Err(BatchError::ConnectionLost),
    };
    assert_eq!(events(&mut session), [lost(1), lost(2), lost(3)]);
}

#[test]
fn there_are_limits() {
    let mut session = up();
    for batch in 0..BATCHES_MAX {
        session.apply(BatchId(batch as u64), false, Vec::new(), Vec::new());
    }
    assert_eq!(events(&mut session), []);
    session.apply(BatchId(9999), false, Vec::new(), Vec::new());
    let text = format!("{BATCHES_MAX} batches are outstanding");
    assert_eq!(events(&mut session), [failed(9999, 0, &text)]);

    let mut session = up();
    session.ask(FlowQuestion::Find((0..=REQUESTS_MAX as u32).collect()));
    assert_eq!(sent(&mut session), []);
    assert!(matches!(
        events(&mut session)[..],
        [Event::Refused { request: FIND, .. }]
    ));
}

#[test]
fn a_dump_asked_for_during_a_dump_is_made_after_it() {
    let mut session = up();
    for _ in 0..3 {
        session.ask(PLAIN);
    }
    let request = wire::OFPT_MULTIPART_REQUEST;
    assert_eq!(sent(&mut session), [(request, 2)]);
    let part = message(wire::OFPT_MULTIPART_REPLY, 2, &[0, 1, 0, 1, 0, 0, 0, 0]);
    let last = message(wire::OFPT_MULTIPART_REPLY, 2, &[0, 1, 0, 0, 0, 0, 0, 0]);
    session.receive(&part, START).unwrap();
    assert_eq!(events(&mut session), [no_flows(1, true)]);
    session.receive(&last, START).unwrap();
    assert_eq!(events(&mut session), [no_flows(1, false)]);
    assert_eq!(sent(&mut session), [(request, 3)]);
}

#[test]
fn where_many_flows_were_shown_the_next_dump_comes_in_shards() {
    let mut session = up();
    session.shown = Shown {
        v4: shards::SHARD_FLOWS,
        v6: 1,
        groups: 0,
    };
    session.ask(PLAIN);
    let request = wire::OFPT_MULTIPART_REQUEST;
    // For each family, for groups in two parts, and for packets without a tag.
    for (xid, more) in [(2, true), (3, true), (4, true), (5, true), (6, false)] {
        assert_eq!(sent(&mut session), [(request, xid)]);
        let last = message(wire::OFPT_MULTIPART_REPLY, xid, &[0, 1, 0, 0, 0, 0, 0, 0]);
        session.receive(&last, START).unwrap();
        assert_eq!(events(&mut session), [no_flows(1, more)]);
        assert_eq!(sent(&mut session), [], "the switch has other things to do");
        session.handle_timeout(START + SHARD_PAUSE).unwrap();
    }
    session.ask(PLAIN);
    assert_eq!(sent(&mut session), [(request, 7)]);
    let last = message(wire::OFPT_MULTIPART_REPLY, 7, &[0, 1, 0, 0, 0, 0, 0, 0]);
    session.receive(&last, START).unwrap();
    assert_eq!(sent(&mut session), [], "there are few now");
}

#[test]
fn a_dump_of_which_a_part_is_refused_is_over() {
    let mut session = up();
    session.shown.v4 = 4 * shards::SHARD_FLOWS;
    session.ask(PLAIN);
    let error = message(wire::OFPT_ERROR, 2, &[0, 1, 0, 2]);
    session.receive(&error, START).unwrap();
    assert!(matches!(
        events(&mut session)[..],
        [Event::Refused { request: DUMP, .. }]
    ));
    sent(&mut session);
    session.ask(PLAIN);
    assert_eq!(sent(&mut session), [(wire::OFPT_MULTIPART_REQUEST, 3)]);
}

#[test]
fn a_question_that_is_refused_says_so() {
    let mut session = up();
    session.ask(PLAIN);
    let error = message(wire::OFPT_ERROR, 2, &[0, 1, 0, 2]);
    session.receive(&error, START).unwrap();
    let refused = Event::Refused {
        request: DUMP,
        reason: "OFPET_BAD_REQUEST (OFPBRC_BAD_MULTIPART)".to_owned(),
    };
    assert_eq!(events(&mut session), [refused]);
}

#[test]
fn during_a_gap_the_monitor_is_not_trusted() {
    let removed = fixtures::sent_by(From::Switch, fixtures::MONITOR)
        .into_iter()
        .find(|message| {
            message[1] == wire::OFPT_MULTIPART_REPLY && message.get(18..21) == Some(&[0, 2, 46])
        })
        .unwrap();
    let gap = fixtures::sent_by(From::Switch, fixtures::MONITOR_GAP);
    let mut session = up();
    session.receive(&gap[0], START).unwrap();
    session.receive(&removed, START).unwrap();
    assert_eq!(events(&mut session), []);
    session.receive(&gap[1], START).unwrap();
    assert_eq!(events(&mut session), [Event::MonitorGap]);
    session.receive(&removed, START).unwrap();
    assert!(matches!(events(&mut session)[..], [Event::FlowLost { .. }]));
}

/// A recorded conversation with a real switch, in which this session plays the client's part
/// again: `act` gives it its commands whenever the recording says that it sends more than it has
/// been told to. The switch's bytes come in chunks of `chunk`.
fn replay(recording: &str, chunk: usize, mut act: impl FnMut(&mut Session, usize)) -> Vec<Event> {
    let mut session = Session::new(START);
    let mut output = BytesMut::new();
    let mut acts = 0;
    let mut seen = Vec::new();
    for (from, message) in fixtures::messages(recording) {
        match from {
            From::Switch => {
                for bytes in message.chunks(chunk) {
                    session.receive(bytes, START).unwrap();
                    seen.extend(events(&mut session));
                }
            }
            From::Client => {
                session.transmit(&mut output);
                if output.is_empty() {
                    act(&mut session, acts);
                    acts += 1;
                    session.transmit(&mut output);
                }
                let sent = Message::split(&mut output).unwrap().unwrap();
                let length = 8 + sent.body.len();
                assert_eq!((sent.kind, length), (message[1], message.len()));
                assert_eq!(sent.xid.to_be_bytes(), message[4..8]);
                assert_eq!(sent.body, message[8..]);
            }
        }
    }
    assert!(output.is_empty());
    seen
}

mod recorded;

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut session = up();
        session.ask(PLAIN);
        session.ask(FlowQuestion::Find(vec![1]));
        let _ = session.receive(&bytes, START);
    }

    #[test]
    fn damaged_messages_never_panic(
        which in any::<prop::sample::Index>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let all = [
            fixtures::MONITOR,
            fixtures::DUMP_3_5,
            fixtures::BUNDLE_REFUSED,
            fixtures::BUNDLE_COMMIT_FAILS,
        ];
        let messages: Vec<_> = all
            .iter()
            .flat_map(|recording| fixtures::sent_by(From::Switch, recording))
            .collect();
        let mut message = which.get(&messages).clone();
        for (at, byte) in damage {
            // The version and the length stay, so that the damage gets past the framing.
            let at = 1 + at.index(message.len() - 1);
            if !(2..4).contains(&at) {
                message[at] = byte;
            }
        }
        let mut session = up();
        session.ask(PLAIN);
        session.apply(BatchId(1), true, adds(2), Vec::new());
        // Whatever xid the recording has, something is waiting for it.
        session.ask(FlowQuestion::Find((0..40).collect()));
        barrier_reply(&mut session, 6);
        let _ = session.receive(&message, START);
        session.close();
    }
}

const MULTIPART: u8 = wire::OFPT_MULTIPART_REQUEST;

/// The reply of the recording to a count, under this xid.
fn count_reply(session: &mut Session, xid: u32) {
    let mut reply = fixtures::sent_by(From::Switch, fixtures::AGGREGATE_3_1).swap_remove(0);
    reply[4..8].copy_from_slice(&xid.to_be_bytes());
    session.receive(&reply, START).unwrap();
}

fn counted(batch: Option<u64>, cookies: &[u32]) -> Event {
    let count = |&cookie: &u32| CookieCount {
        cookie,
        flows: 2,
        packets: 3,
    };
    Event::Reply(FlowReply::Counted {
        batch: batch.map(BatchId),
        counts: cookies.iter().map(count).collect(),
    })
}

#[test]
fn a_batch_counts_behind_its_changes_and_before_its_barrier() {
    let mut session = up();
    session.apply(BatchId(1), false, adds(1), vec![7, 8]);
    assert_eq!(
        sent(&mut session),
        [(MOD, 2), (MULTIPART, 7), (MULTIPART, 8), (BARRIER, 3)]
    );
    count_reply(&mut session, 7);
    assert_eq!(events(&mut session), [], "not all of it yet");
    count_reply(&mut session, 8);
    barrier_reply(&mut session, 3);
    assert_eq!(events(&mut session), [counted(Some(1), &[7, 8]), ok(1)]);
    assert_eq!(session.counters().unexpected_messages, 0);
}

#[test]
fn a_count_that_is_refused_is_not_told() {
    let mut session = up();
    session.apply(BatchId(1), false, adds(1), vec![7, 8]);
    table_full(&mut session, 7);
    count_reply(&mut session, 8);
    barrier_reply(&mut session, 3);
    assert_eq!(events(&mut session), [ok(1)]);
}

#[test]
fn with_too_many_questions_a_batch_goes_without_its_count() {
    let mut session = up();
    session.ask(FlowQuestion::Count((0..REQUESTS_MAX as u32).collect()));
    assert_eq!(sent(&mut session).len(), REQUESTS_MAX);
    session.apply(BatchId(1), false, adds(1), vec![7]);
    let kinds: Vec<_> = sent(&mut session).iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [MOD, BARRIER]);
}

/// A monitor's update of table 46: `event` of a flow with this cookie that matches everything.
fn update(event: u8, cookie: u64) -> Vec<u8> {
    let mut entry = vec![0, 40, 0, event, 46, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];
    entry.extend(cookie.to_be_bytes());
    entry.extend([0, 1, 0, 4, 0, 0, 0, 0]);
    entry.resize(32, 0);
    entry[1] = 32;
    monitored(&entry)
}

fn monitored(entry: &[u8]) -> Vec<u8> {
    let mut body = vec![0, 0x10, 0, 0, 0, 0, 0, 0];
    body.extend(entry);
    message(wire::OFPT_MULTIPART_REPLY, 0, &body)
}

#[test]
fn the_end_of_a_flow_that_is_counted_is_told_once() {
    const ADDED: u8 = 1;
    const REMOVED: u8 = 2;
    const MODIFIED: u8 = 3;
    let mut session = up();
    session.ask(FlowQuestion::Count(vec![7]));
    count_reply(&mut session, 3);
    assert_eq!(events(&mut session), [counted(None, &[7])]);
    for (event, cookie) in [(ADDED, 7), (MODIFIED, 7), (REMOVED, 8)] {
        session.receive(&update(event, cookie), START).unwrap();
        assert_eq!(events(&mut session), [], "{event} {cookie}");
    }
    for expected in [vec![Event::CountLost { cookie: 7 }], vec![]] {
        session.receive(&update(REMOVED, 7), START).unwrap();
        assert_eq!(events(&mut session), expected);
    }
    session.ask(FlowQuestion::Count(vec![7]));
    session.receive(&update(REMOVED, 7), START).unwrap();
    assert_eq!(events(&mut session), [Event::CountLost { cookie: 7 }]);
}

#[test]
fn nothing_is_counted_while_the_monitor_leaves_something_out() {
    const PAUSED: [u8; 8] = [0, 8, 0, 5, 0, 0, 0, 0];
    const RESUMED: [u8; 8] = [0, 8, 0, 6, 0, 0, 0, 0];
    let mut session = up();
    session.ask(FlowQuestion::Count(vec![7]));
    session.receive(&monitored(&PAUSED), START).unwrap();
    count_reply(&mut session, 3);
    assert_eq!(events(&mut session), []);
    session.receive(&monitored(&RESUMED), START).unwrap();
    assert_eq!(events(&mut session), [Event::MonitorGap]);
    session.ask(FlowQuestion::Count(vec![7]));
    count_reply(&mut session, 5);
    assert_eq!(events(&mut session), [counted(None, &[7])]);
}
