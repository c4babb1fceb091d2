#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::{
    fixtures::{self, REFUSALS, SOUTHBOUND, Transcript},
    framing::Framer,
    schema::{Column, Table, TableLimit},
    value::{Atom, CellError},
};
use southbound as sb;

mod southbound;

const ID: &str = "26f8710d-96ec-42d8-9b8f-8fa63f3c4605";

fn priorities(wanted: &[i64]) -> Condition {
    let clauses = wanted
        .iter()
        .map(|priority| Clause::equal("priority", *priority));
    Condition::AnyOf(clauses.collect())
}

fn southbound() -> Session {
    let mut conditions = sb::conditions();
    conditions.insert("Logical_Flow", priorities(&[11000]));
    Session::new(&sb::DATABASE, conditions, Instant::now())
}

fn count(session: &Session, table: &str) -> usize {
    session.replica().rows(table).count()
}

fn touched(events: &[Event]) -> BTreeMap<&'static str, usize> {
    let mut touched = BTreeMap::new();
    let [Event::Changed(changes)] = events else {
        panic!("not one update: {events:?}")
    };
    for change in changes {
        *touched.entry(change.table).or_default() += 1;
    }
    touched
}

#[test]
fn the_recorded_southbound_conversation() {
    let mut session = southbound();
    let mut transcript = Transcript::new(SOUTHBOUND);
    assert_eq!(transcript.play(&mut session).unwrap(), []);

    let events = transcript.play(&mut session).unwrap();
    assert_eq!(events, [Event::Synced], "once, with the deferred table");
    assert_eq!(count(&session, "Logical_Flow"), 3);
    assert_eq!(
        count(&session, "Port_Binding"),
        1,
        "the patch port is not told"
    );

    let events = transcript.play(&mut session).unwrap();
    assert_eq!(
        touched(&events),
        BTreeMap::from([("Logical_Flow", 3), ("Port_Binding", 2), ("Port_Group", 1)]),
        "one transaction, one event"
    );
    let groups: Vec<_> = session.replica().rows("Port_Group").collect();
    assert_eq!(groups[0].1.texts("ports").unwrap(), ["ns1_p1", "ns1_p2"]);

    let events = transcript.play(&mut session).unwrap();
    assert_eq!(
        touched(&events),
        BTreeMap::from([("Port_Binding", 1), ("Port_Group", 1)])
    );
    let groups: Vec<_> = session.replica().rows("Port_Group").collect();
    assert_eq!(groups[0].1.texts("ports"), Ok(vec![]));

    session.set_condition("Logical_Flow", priorities(&[10999, 11000]));
    transcript.play(&mut session).unwrap();
    assert_eq!(count(&session, "Logical_Flow"), 4);

    session.set_condition("Logical_Flow", priorities(&[]));
    transcript.play(&mut session).unwrap();
    assert_eq!(count(&session, "Logical_Flow"), 0);

    let stage = [
        Clause::equal("pipeline", "egress"),
        Clause::equal("table_id", 4),
    ];
    session.select(7, "Logical_Flow", &stage);
    let events = transcript.play(&mut session).unwrap();
    assert!(
        matches!(&events[..], [Event::Selected { tag: 7, rows: Ok(rows) }] if rows.len() == 4),
        "{events:?}"
    );

    session.select(8, "Nothing", &[]);
    let events = transcript.play(&mut session).unwrap();
    let [
        Event::Selected {
            tag: 8,
            rows: Err(error),
        },
    ] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!(
        error.to_string(),
        "syntax error: Parsing ovsdb operation 1 of 1 failed: No table named Nothing."
    );

    let idle = session.next_deadline();
    session.handle_timeout(idle).unwrap();
    assert_eq!(
        transcript.play(&mut session).unwrap(),
        [],
        "our echo is answered"
    );
    assert_eq!(
        transcript.play(&mut session).unwrap(),
        [],
        "the server's echo is answered"
    );
}

#[test]
fn refusals_name_database_and_tables() {
    static WRONG_COLUMN: Database = Database {
        name: "OVN_Southbound",
        tables: &[Table {
            name: "Port_Group",
            columns: &[Column::scalar("name"), Column::scalar("colour")],
            purpose: "tests",
            remedy: "remove rows",
            deferred: false,
        }],
    };
    static WRONG_TABLE: Database = Database {
        name: "OVN_Southbound",
        tables: &[Table {
            name: "Bridge",
            columns: &[Column::scalar("name")],
            purpose: "tests",
            remedy: "remove rows",
            deferred: false,
        }],
    };
    static WRONG_DATABASE: Database = Database {
        name: "Open_vSwitch",
        tables: sb::DATABASE.tables,
    };
    let mut transcript = Transcript::new(REFUSALS);
    transcript.play(&mut southbound()).unwrap();
    for (database, conditions, message) in [
        (
            &WRONG_DATABASE,
            sb::conditions(),
            "database Open_vSwitch: cannot monitor Datapath_Binding, Port_Binding, Port_Group, Encap, \
             Logical_Flow: unknown database: monitor_cond request specifies unknown database \
             Open_vSwitch",
        ),
        (
            &WRONG_COLUMN,
            Conditions::new(),
            "database OVN_Southbound: cannot monitor Port_Group: syntax error: colour is not a \
             valid column name",
        ),
        (
            &WRONG_TABLE,
            Conditions::new(),
            "database OVN_Southbound: cannot monitor Bridge: syntax error: no table named Bridge",
        ),
    ] {
        let mut session = Session::new(database, conditions, Instant::now());
        let error = transcript.play(&mut session).unwrap_err();
        assert_eq!(error.to_string(), message);
        transcript.play(&mut session).unwrap();
    }
}

fn sent(session: &mut Session) -> Vec<Value> {
    let output = session.output().split();
    let messages = serde_json::Deserializer::from_slice(&output).into_iter();
    messages.map(Result::unwrap).collect()
}

fn receive(session: &mut Session, message: Value) -> fixtures::Outcome<Option<Event>> {
    receive_text(session, &message.to_string())
}

fn receive_text(session: &mut Session, message: &str) -> fixtures::Outcome<Option<Event>> {
    let events = fixtures::receive(session, message.as_bytes())?;
    Ok(events.into_iter().next())
}

/// A session that is synced with an empty database.
fn synced() -> Session {
    let mut session = Session::new(&sb::DATABASE, sb::conditions(), Instant::now());
    session.output().clear();
    let event = receive(&mut session, json!({"id": 0, "result": {}, "error": null}));
    assert_eq!(event.unwrap(), Some(Event::Synced));
    session
}

#[test]
fn conditions_wait_for_each_other_and_only_the_last_is_asked_for() {
    let mut session = synced();
    for wanted in [1, 2, 3] {
        session.set_condition("Logical_Flow", priorities(&[wanted]));
    }
    let first = sent(&mut session);
    assert_eq!(first.len(), 1);
    assert_eq!(
        first[0]["params"][2],
        json!({"Logical_Flow": [{"where": [["priority", "==", 1]]}]})
    );
    let id = &first[0]["id"];
    let event = receive(&mut session, json!({"id": id, "result": {}, "error": null}));
    assert_eq!(event.unwrap(), None);
    let second = sent(&mut session);
    assert_eq!(second.len(), 1);
    assert_eq!(
        second[0]["params"][2],
        json!({"Logical_Flow": [{"where": [["priority", "==", 3]]}]})
    );
}

#[test]
fn a_condition_that_stays_the_same_is_not_asked_for() {
    let mut session = synced();
    session.set_condition("Logical_Flow", Condition::Nothing);
    assert_eq!(sent(&mut session), [] as [Value; 0]);
}

#[test]
fn a_condition_changed_before_the_first_answer_belongs_to_the_first_content() {
    let mut session = Session::new(&sb::DATABASE, sb::conditions(), Instant::now());
    session.output().clear();
    session.set_condition("Logical_Flow", priorities(&[1]));
    assert_eq!(sent(&mut session), [] as [Value; 0]);
    let answer = json!({"id": 0, "result": {}, "error": null});
    assert_eq!(receive(&mut session, answer).unwrap(), None);
    assert_eq!(sent(&mut session)[0]["method"], "monitor_cond_change");
    let answer = json!({"id": 1, "result": {}, "error": null});
    assert_eq!(receive(&mut session, answer).unwrap(), Some(Event::Synced));
}

#[test]
fn silence_is_probed_once_and_then_ends_the_session() {
    let mut session = synced();
    let idle = session.next_deadline();
    session
        .handle_timeout(idle - Duration::from_millis(1))
        .unwrap();
    assert_eq!(sent(&mut session), [] as [Value; 0]);
    session.handle_timeout(idle).unwrap();
    assert_eq!(sent(&mut session)[0]["method"], "echo");
    assert_eq!(session.next_deadline(), idle + PROBE_INTERVAL);
    session.handle_timeout(idle).unwrap();
    assert_eq!(sent(&mut session), [] as [Value; 0], "one probe is enough");
    let error = session.handle_timeout(idle + PROBE_INTERVAL).unwrap_err();
    assert_eq!(
        error.to_string(),
        "database OVN_Southbound: no answer for 10 s"
    );
}

#[test]
fn the_first_content_may_take_longer_than_any_later_answer() {
    let now = Instant::now();
    let mut session = Session::new(&sb::DATABASE, sb::conditions(), now);
    assert_eq!(session.next_deadline(), now + FIRST_CONTENT_WAIT / 2);
    receive(&mut session, json!({"id": 0, "result": {}})).unwrap();
    assert_eq!(session.next_deadline(), now + PROBE_INTERVAL);
}

#[test]
fn anything_heard_counts_as_a_sign_of_life() {
    let mut session = synced();
    let idle = session.next_deadline();
    session.handle_timeout(idle).unwrap();
    session.heard(idle);
    assert_eq!(session.next_deadline(), idle + PROBE_INTERVAL);
    session.handle_timeout(idle + PROBE_INTERVAL).unwrap();
}

#[test]
fn messages_that_do_not_fit_end_the_session() {
    for (message, problem) in [
        (json!({"id": 9, "result": {}}), "an answer to nothing"),
        (json!({"id": null, "result": {}}), "an answer to nothing"),
        (
            json!({"method": "update2", "params": [1], "id": null}),
            "an update2 without our monitor and its updates",
        ),
        (
            json!({"method": "update2", "id": null}),
            "an update2 without our monitor and its updates",
        ),
        (
            json!({"method": "update2", "params": ["other", {}], "id": null}),
            "an update2 without our monitor and its updates",
        ),
        (
            json!({"method": "update2", "params": ["dnsflow", {"Encap": {ID: {"insert": {}}}}, 1], "id": null}),
            "an update2 without our monitor and its updates",
        ),
        (
            json!({"method": "update2", "params": ["dnsflow", {"Encap": {ID: {"insert": {}}}}], "id": 3}),
            "rows outside of an update",
        ),
        (
            json!({"method": "dance", "params": [{"Encap": {ID: {"insert": {}}}}], "id": null}),
            "rows outside of an update",
        ),
        (
            json!({"id": 0, "result": {"Encap": {ID: {"initial": {}}}}}),
            "rows outside of an update",
        ),
        (
            json!({"method": "update2", "params": ["dnsflow", {"Encap": [ID]}], "id": null}),
            "table Encap: malformed update",
        ),
        (
            json!({"method": "monitor_canceled", "params": ["dnsflow"], "id": null}),
            "the server canceled the monitor",
        ),
        (
            json!({"method": "update2", "params": ["dnsflow", {"X": {}}], "id": null}),
            "table X was not asked for",
        ),
    ] {
        let error = receive(&mut synced(), message).unwrap_err().to_string();
        assert!(
            error.starts_with("database OVN_Southbound: ") && error.ends_with(problem),
            "{error}"
        );
    }
    let error = receive_text(&mut synced(), "{]").unwrap_err().to_string();
    assert!(error.contains("unreadable message"), "{error}");
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let message = format!("{{\"a\":{deep}}}");
    assert!(receive_text(&mut synced(), &message).is_err());
    let update = format!("{{\"Encap\":{{\"{ID}\":{{\"insert\":{{\"ip\":{deep}}}}}}}}}");
    let message = format!("{{\"method\":\"update2\",\"params\":[\"dnsflow\",{update}]}}");
    let error = receive_text(&mut synced(), &message).unwrap_err();
    assert!(
        error.to_string().ends_with("table Encap: malformed update"),
        "{error}"
    );
}

#[test]
fn rows_may_come_before_what_their_message_is() {
    let mut session = Session::new(&sb::DATABASE, sb::conditions(), Instant::now());
    let rows = |operation: &str| json!({"Encap": {ID: {operation: {"ip": "192.0.2.1"}}}});
    let message = format!(r#"{{"result":{},"error":null,"id":0}}"#, rows("initial"));
    let event = receive_text(&mut session, &message).unwrap();
    assert_eq!(event, Some(Event::Synced));
    assert_eq!(count(&session, "Encap"), 1);
    let rows = rows("modify");
    let message = format!(r#"{{"params":["dnsflow",{rows}],"method":"update2","id":null}}"#);
    let event = receive_text(&mut session, &message).unwrap();
    assert_eq!(touched(&[event.unwrap()]), BTreeMap::from([("Encap", 1)]));
}

#[test]
fn an_answer_with_rows_is_the_monitors_or_none() {
    let rows = json!({"Encap": {ID: {"initial": {}}}});
    // Another answer, while the monitor's is waited for.
    let mut session = Session::new(&sb::DATABASE, sb::conditions(), Instant::now());
    session.select(7, "Logical_Flow", &[]);
    let error = receive(&mut session, json!({"id": 1, "result": rows})).unwrap_err();
    assert!(
        error.to_string().ends_with("rows outside of an update"),
        "{error}"
    );
    // Rows in two places.
    let mut session = Session::new(&sb::DATABASE, sb::conditions(), Instant::now());
    let error = receive(
        &mut session,
        json!({"id": 0, "result": rows, "params": [rows]}),
    );
    let error = error.unwrap_err().to_string();
    assert!(error.ends_with("rows outside of an update"), "{error}");
}

#[test]
fn an_update_in_pieces_is_one_event() {
    let mut session = synced();
    let updates: Map<String, Value> = (0..9)
        .map(|row| {
            (
                Uuid::new(9 - row).to_string(),
                json!({"insert": {"ip": "192.0.2.1"}}),
            )
        })
        .collect();
    let message =
        json!({"method": "update2", "params": ["dnsflow", {"Encap": updates}], "id": null});
    let message = message.to_string();
    let mut framer = Framer::default();
    for byte in &message.as_bytes()[..message.len() - 1] {
        framer.buffer().extend_from_slice(&[*byte]);
        while let Some(piece) = framer.next_piece().unwrap() {
            assert_eq!(session.receive(piece).unwrap(), None);
        }
    }
    framer.buffer().extend_from_slice(b"}");
    let piece = framer.next_piece().unwrap().unwrap();
    let Some(Event::Changed(changes)) = session.receive(piece).unwrap() else {
        panic!("no change");
    };
    let rows: Vec<Uuid> = changes.iter().map(|change| change.id).collect();
    assert_eq!(
        rows,
        (1..=9).map(Uuid::new).collect::<Vec<_>>(),
        "in their order"
    );
}

/// An update of `Encap` rows: their numbers, the operations and the addresses.
fn encaps(rows: &[(u8, &str, &str)]) -> String {
    // A map of JSON would have each row once.
    let rows = rows.iter().map(|(number, operation, ip)| {
        let id = Uuid::new((*number).into());
        format!(r#""{id}":{{"{operation}":{{"ip":"{ip}"}}}}"#)
    });
    let rows = rows.collect::<Vec<_>>().join(",");
    format!(r#"{{"Encap":{{{rows}}},"Port_Group":{{"{ID}":{{"insert":{{"name":"3_a5"}}}}}}}}"#)
}

fn update(rows: &[(u8, &str, &str)]) -> String {
    let rows = encaps(rows);
    format!(r#"{{"method":"update2","params":["dnsflow",{rows}],"id":null}}"#)
}

const TWO_ROWS: TableLimits = TableLimits {
    rows: 2,
    bytes: 1000,
};

fn told(session: &mut Session, message: &str) -> Vec<Event> {
    fixtures::receive(session, message.as_bytes()).unwrap()
}

#[test]
fn a_table_left_out_of_the_first_content_keeps_nothing_else_away() {
    let mut session = Session::new(&sb::DATABASE, sb::conditions(), Instant::now());
    session.limit(TWO_ROWS, &["Encap"]);
    let rows = encaps(&[
        (1, "initial", "192.0.2.1"),
        (2, "initial", ""),
        (3, "initial", ""),
    ]);
    let events = told(
        &mut session,
        &format!(r#"{{"id":0,"result":{rows},"error":null}}"#),
    );
    let [Event::TooLarge(large), Event::Synced] = events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (large.table.name, large.limit),
        ("Encap", TableLimit::Rows(2))
    );
    assert!(large.is_left_out);
    assert_eq!(
        (count(&session, "Encap"), count(&session, "Port_Group")),
        (0, 1)
    );
    let events = told(
        &mut session,
        &update(&[(1, "modify", "192.0.2.9"), (4, "insert", "")]),
    );
    assert_eq!(touched(&events), BTreeMap::from([("Port_Group", 1)]));
}

#[test]
fn the_rows_of_a_table_that_grows_too_large_are_told_as_gone() {
    let mut session = synced();
    session.limit(TWO_ROWS, &["Encap"]);
    told(
        &mut session,
        &update(&[(1, "insert", "192.0.2.1"), (2, "insert", "192.0.2.2")]),
    );
    let more = [
        (1, "modify", "192.0.2.3"),
        (3, "insert", ""),
        (4, "insert", ""),
    ];
    let events = told(&mut session, &update(&more));
    let [Event::TooLarge(_), Event::Changed(changes)] = &events[..] else {
        panic!("{events:?}")
    };
    let gone: Vec<_> = changes
        .iter()
        .filter(|change| change.table == "Encap")
        .map(|change| {
            let before = session.replica().before(change).unwrap();
            assert_eq!(session.replica().row("Encap", change.id), None);
            (change.id, before.text("ip").unwrap().to_owned())
        })
        .collect();
    let were = [(1, "192.0.2.1"), (2, "192.0.2.2")];
    assert_eq!(gone, were.map(|(row, ip)| (Uuid::new(row), ip.to_owned())));
}

#[test]
fn a_table_that_is_needed_ends_the_session_when_it_is_too_large() {
    let mut session = synced();
    session.limit(TWO_ROWS, &["Port_Group"]);
    let rows = update(&[(1, "insert", ""), (2, "insert", ""), (3, "insert", "")]);
    let error = fixtures::receive(&mut session, rows.as_bytes()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "database OVN_Southbound: table Encap has more than 2 rows of interest"
    );
    let error: Box<SessionError> = error.downcast().unwrap();
    assert!(error.too_large().is_some_and(|large| !large.is_left_out));
}

#[test]
fn what_a_message_keeps_saying_of_a_row_is_kept_once() {
    let mut session = synced();
    told(&mut session, &update(&[(1, "insert", "192.0.2.1")]));
    let mut rows = vec![(1, "modify", "192.0.2.2"); 100];
    for number in 2..100 {
        rows.extend([
            (number, "insert", ""),
            (number, "delete", ""),
            (number, "delete", ""),
        ]);
    }
    let message = update(&rows);
    let mut framer = Framer::default();
    framer.buffer().extend_from_slice(message.as_bytes());
    let mut events = Vec::new();
    while let Some(piece) = framer.next_piece().unwrap() {
        events.extend(session.receive(piece).unwrap());
        assert!(session.changes.len() <= 3, "{:?}", session.changes.len());
    }
    let [Event::Changed(changes)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(changes.len(), 2);
    let before = session.replica().before(&changes[0]).unwrap();
    assert_eq!(
        before.text("ip"),
        Ok("192.0.2.1"),
        "not what it was in between"
    );
}

#[test]
fn a_server_that_asks_and_does_not_read_is_given_up() {
    let mut session = synced();
    let long = "a".repeat(PIECE_MAX_BYTES - 100);
    let request = json!({"method": "echo", "params": [long], "id": 1}).to_string();
    let mut answers = (0..3).map(|_| fixtures::receive(&mut session, request.as_bytes()));
    assert!(answers.next().unwrap().is_ok());
    let error = answers.find_map(Result::err).unwrap();
    assert_eq!(
        error.to_string(),
        "database OVN_Southbound: the server does not read: 33554432 bytes wait for it"
    );
}

#[test]
fn messages_have_the_beginning_of_a_text_of_the_server() {
    let long = "ä".repeat(1 << 20);
    let quote = "ä".repeat(100);
    let error = json!({"error": long, "details": long});
    let mut session = Session::new(&sb::DATABASE, sb::conditions(), Instant::now());
    let refused = receive(
        &mut session,
        json!({"id": 0, "result": null, "error": error}),
    );
    let mut elsewhere = synced();
    let updates =
        |updates: Value| json!({"method": "update2", "params": ["dnsflow", updates], "id": null});
    for (error, message) in [
        (refused, format!("{quote}…: {quote}…")),
        (
            receive(
                &mut elsewhere,
                updates(json!({&long: {ID: {"insert": {}}}})),
            ),
            format!("table {quote}… was not asked for"),
        ),
        (
            receive(&mut elsewhere, updates(json!({&long: {}}))),
            format!("table {quote}… was not asked for"),
        ),
        (
            receive(&mut elsewhere, updates(json!({&long: {"row": 1}}))),
            format!("table {quote}…: malformed update"),
        ),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(error.ends_with(&message), "{error:.500}");
    }
    let error = CellError::new("name", format!("`{long}` is no name"));
    assert!(error.to_string().len() < 300);
}

#[test]
fn unknown_requests_are_refused_and_unknown_notifications_ignored() {
    let mut session = synced();
    let request = json!({"method": "dance", "params": [], "id": 3});
    assert_eq!(receive(&mut session, request).unwrap(), None);
    assert_eq!(
        sent(&mut session),
        [
            json!({"id": 3, "result": null, "error": {"error": "unknown method", "details": "dance"}})
        ]
    );
    let notification = json!({"method": "dance", "params": [], "id": null});
    assert_eq!(receive(&mut session, notification).unwrap(), None);
    assert_eq!(sent(&mut session), [] as [Value; 0]);
}

#[test]
fn clauses_as_the_protocol_writes_them() {
    let pair = Clause::includes_pair("external_ids", "k", "v");
    assert_eq!(
        Condition::AnyOf(vec![pair]).to_json(),
        json!([["external_ids", "includes", ["map", [["k", "v"]]]]])
    );
    let row = Uuid::new(1);
    assert_eq!(
        Clause::equal("datapath", Atom::Uuid(row)).to_json(),
        json!([
            "datapath",
            "==",
            ["uuid", "00000000-0000-0000-0000-000000000001"]
        ])
    );
    assert_eq!(Condition::Every.to_json(), json!([true]));
    assert_eq!(Condition::Nothing.to_json(), json!([false]));
    assert_eq!(Condition::AnyOf(vec![]).to_json(), json!([false]));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = fixtures::receive(&mut synced(), &bytes);
    }

    #[test]
    fn a_damaged_conversation_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let messages: Vec<&str> =
            SOUTHBOUND.lines().filter_map(|line| line.strip_prefix("< ")).collect();
        let mut bytes = messages.join("\n").into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let mut session = southbound();
        for message in bytes.split(|byte| *byte == b'\n') {
            if fixtures::receive(&mut session, message).is_err() {
                break;
            }
        }
    }
}
