#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*, sample::Index};
use serde_json::{Value, json};

use super::*;

/// A piece with its own bytes.
#[derive(Debug, PartialEq)]
enum Owned {
    Row(Place, String, Uuid, Option<String>),
    Message(String),
}

fn message(text: &str) -> Owned {
    Owned::Message(text.to_owned())
}

fn row(place: Place, table: &str, id: u128, update: &str) -> Owned {
    let update = Some(update.to_owned());
    Owned::Row(place, table.to_owned(), Uuid::new(id), update)
}

fn feed(framer: &mut Framer, bytes: &[u8]) -> Result<Vec<Owned>, FramingError> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    framer.buffer().extend_from_slice(bytes);
    let mut found = Vec::new();
    while let Some(piece) = framer.next_piece()? {
        found.push(match piece {
            Piece::Row(FramedRow {
                place,
                table,
                id,
                update,
            }) => Owned::Row(place, table.to_owned(), id, update.map(text)),
            Piece::Message(bytes) => Owned::Message(text(bytes)),
        });
    }
    Ok(found)
}

fn pieces(text: &str) -> Result<Vec<Owned>, FramingError> {
    feed(&mut Framer::default(), text.as_bytes())
}

fn id(number: u128) -> String {
    Uuid::new(number).to_string()
}

#[test]
fn braces_and_quotes_inside_strings_do_not_count() {
    let found = pieces(r#"{"a":"}]\"}\\"}{"b":["{"]}"#).unwrap();
    assert_eq!(found, [r#"{"a":"}]\"}\\"}"#, r#"{"b":["{"]}"#].map(message));
}

#[test]
fn blanks_between_messages_are_skipped() {
    let found = pieces(" \n{} \t\r\n{}\n").unwrap();
    assert_eq!(found, ["{}", "{}"].map(message));
}

#[test]
fn anything_else_between_messages_is_an_error() {
    for (text, byte) in [("x", b'x'), ("{}]", b']'), ("[]", b'['), ("{}\"{}", b'"')] {
        assert_eq!(pieces(text), Err(FramingError::NotAnObject(byte)), "{text}");
    }
}

#[test]
fn rows_are_taken_out_of_answers_and_updates() {
    let (a, b) = (id(1), id(2));
    let text = format!(
        r#"{{"id":0,"result":{{"T":{{"{a}":{{"initial":{{"x":"}}"}}}} , "{b}" : {{}} }},"U":{{}}}},"error":null}}
           {{"id":null,"params":["m",{{"T":{{"{a}":{{"delete":null}}}}}}],"method":"update2"}}"#
    );
    let expected = [
        row(Place::Result, "T", 1, r#"{"initial":{"x":"}"}}"#),
        row(Place::Result, "T", 2, "{}"),
        message(r#"{"id":0,"result":{"T":{},"U":{}},"error":null}"#),
        row(Place::Params, "T", 1, r#"{"delete":null}"#),
        message(r#"{"id":null,"params":["m",{"T":{}}],"method":"update2"}"#),
    ];
    assert_eq!(pieces(&text).unwrap(), expected);
}

#[test]
fn what_only_looks_like_rows_stays_in_its_message() {
    for text in [
        r#"{"result":[{"rows":[{"a":{"b":{"c":{}}}}]}]}"#,
        r#"{"result":{"T":[{"b":{"c":{}}}]}}"#,
        r#"{"x":{"result":{"T":{"b":{"c":{}}}}}}"#,
        r#"{"x":["result",{"T":{"b":{"c":{}}}}]}"#,
        r#"{"params":[],"x":{"T":{"b":{"c":{}}}}}"#,
        r#"{"params":[[{"T":{"b":{"c":{}}}}]]}"#,
        r#"{"params":[["a"],"b"],"x":[{"T":{"b":{"c":{}}}}]}"#,
        r#"{"result":{},"x":{"T":{"b":{"c":{}}}}}"#,
        r#"{"\u0072esult":{"T":{"b":{"c":{}}}}}"#,
        r#"{"x":"result","y":{"T":{"b":{"c":{}}}}}"#,
    ] {
        assert_eq!(pieces(text).unwrap(), [message(text)]);
    }
}

#[test]
fn between_rows_is_nothing_else() {
    let a = id(1);
    for rows in [
        r#"{"short":{}}"#.to_owned(),
        format!(r#"{{"{a}0":{{}}}}"#),
        format!(r#"{{"{}":{{}}}}"#, a.replace('0', "x")),
        format!(r#"{{"{}":{{}}}}"#, a.replace('-', r"\u")),
        format!(r#"{{"{a}":{{}},}}"#),
        format!(r#"{{,"{a}":{{}}}}"#),
        format!(r#"{{"{a}":{{}} "{a}":{{}}}}"#),
        format!(r#"{{"{a}":{{}}:"{a}":{{}}}}"#),
        format!(r#"{{"{a}":{{}}]"#),
        format!(r#"{{"{a}",{{}}}}"#),
        format!(r#"{{"{a}"{{}}}}"#),
        format!(r#"{{"{a}":[]}}"#),
        format!(r#"{{"{a}":null}}"#),
        format!(r#"{{{a}:{{}}}}"#),
        "{]".to_owned(),
        "{{".to_owned(),
    ] {
        let error = pieces(&format!(r#"{{"result":{{"T":{rows}"#)).unwrap_err();
        assert_eq!(error.to_string(), "table T: malformed update", "{rows}");
    }
}

#[test]
fn a_truncated_stream_gives_what_is_whole() {
    let text = format!(
        r#"{{"result":{{"T":{{"{}":{{"initial":{{"a":"b"}}}}}}}}}}"#,
        id(1)
    );
    let row_ends = text.len() - "}}}".len();
    for end in 0..text.len() {
        let found = pieces(&text[..end]).unwrap();
        assert_eq!(found.len(), usize::from(end >= row_ends), "{end} bytes");
    }
    assert_eq!(pieces(&text).unwrap().len(), 2);
}

#[test]
fn the_room_of_a_long_piece_is_given_back() {
    let long = "x".repeat(4 * KEPT_MAX_BYTES);
    let mut framer = Framer::default();
    let text = format!(r#"{{"result":{{"T":{{"{}":{{"a":"{long}"}}"#, id(1));
    assert_eq!(feed(&mut framer, text.as_bytes()).unwrap().len(), 1);
    assert!(framer.row.capacity() < KEPT_MAX_BYTES);
    let text = format!(r#"}}}},"b":"{long}"}} {{"c"#);
    assert_eq!(feed(&mut framer, text.as_bytes()).unwrap().len(), 1);
    assert!(framer.message.capacity() < KEPT_MAX_BYTES);
    assert_eq!(
        feed(&mut framer, b"\":2}").unwrap(),
        [message(r#"{"c":2}"#)]
    );
}

#[test]
fn the_limit_of_a_message_is_exact_and_holds_before_its_end() {
    let mut framer = Framer::with_limit(6);
    assert_eq!(feed(&mut framer, b"{\"ab\"}{\"ab\"}").unwrap().len(), 2);
    assert_eq!(
        feed(&mut framer, b"{\"abc"),
        Ok(vec![]),
        "five bytes may still become six"
    );
    assert_eq!(
        feed(&mut framer, b"\"}"),
        Err(FramingError::TooLong { limit_bytes: 6 })
    );
}

#[test]
fn a_row_that_is_too_long_is_named_and_the_next_one_is_read() {
    let fits = format!(r#"{{"a":"{}"}}"#, "x".repeat(92));
    let long = format!(r#"{{"a":"{}"}}"#, "x".repeat(93));
    assert_eq!(fits.len(), 100);
    let rows = [&fits, &long, &fits].map(String::as_str);
    let rows = (1..).zip(rows);
    let rows: Vec<_> = rows
        .map(|(at, row)| format!("\"{}\":{row}", id(at)))
        .collect();
    let text = format!(r#"{{"result":{{"T":{{{}}}}}}}"#, rows.join(","));
    for chunk in [1, 7, 64, text.len()] {
        let mut framer = Framer::with_limit(100);
        let mut found = Vec::new();
        for bytes in text.as_bytes().chunks(chunk) {
            found.extend(feed(&mut framer, bytes).unwrap());
            assert!(framer.row.len() <= 100);
        }
        let expected = [
            row(Place::Result, "T", 1, &fits),
            Owned::Row(Place::Result, "T".to_owned(), Uuid::new(2), None),
            row(Place::Result, "T", 3, &fits),
            message(r#"{"result":{"T":{}}}"#),
        ];
        assert_eq!(found, expected, "{chunk} bytes at once");
    }
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        r#"[{}\[\]"\\ ]{0,8}"#.prop_map(Value::from),
    ];
    let value = leaf.prop_recursive(4, 32, 6, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(Value::from),
            vec((any::<String>(), inner), 0..6).prop_map(|members| members.into_iter().collect()),
        ]
    });
    vec(("[a-z{}\"]{0,5}", value), 0..5).prop_map(|members| members.into_iter().collect())
}

/// A `<table-updates>`.
fn updates() -> impl Strategy<Value = Value> {
    let rows = vec((any::<u128>(), json()), 0..6);
    let rows = rows.prop_map(|rows| {
        let rows = rows.into_iter();
        rows.map(|(number, update)| (id(number), update))
            .collect::<Value>()
    });
    vec(("[A-Z]{1,3}", rows), 0..4).prop_map(|tables| tables.into_iter().collect())
}

/// The text of a message with rows: an update or an answer, its members in any order.
fn with_rows() -> impl Strategy<Value = String> {
    let members = prop_oneof![
        updates().prop_map(|rows| vec![("id", json!(0)), ("result", rows), ("error", Value::Null)]),
        updates().prop_map(|rows| vec![
            ("id", Value::Null),
            ("method", json!("update2")),
            ("params", json!(["result", rows])),
        ]),
    ];
    (members.prop_shuffle(), any::<bool>()).prop_map(|(members, is_pretty)| {
        let member = |(name, value): (&str, Value)| {
            let value = if is_pretty {
                format!("{value:#}")
            } else {
                value.to_string()
            };
            format!("\"{name}\":{value}")
        };
        let members: Vec<String> = members.into_iter().map(member).collect();
        format!("{{{}}}", members.join(","))
    })
}

/// The rows of a message by place, table and id, and the message without them.
type Read = (BTreeMap<(bool, String, Uuid), Value>, Value);

/// Takes the rows out of a message that was parsed as a whole.
fn read_whole(text: &str) -> Read {
    let mut message: Value = serde_json::from_str(text).unwrap();
    let mut rows = BTreeMap::new();
    for (is_result, place) in [(true, "/result"), (false, "/params/1")] {
        let tables = message.pointer_mut(place).and_then(Value::as_object_mut);
        for (table, updates) in tables.into_iter().flatten() {
            for (id, update) in std::mem::replace(updates, json!({})).as_object().unwrap() {
                let key = (is_result, table.clone(), Uuid::parse(id).unwrap());
                rows.insert(key, update.clone());
            }
        }
    }
    (rows, message)
}

/// Puts the pieces of a stream together again.
fn read_pieces(pieces: Vec<Owned>) -> Vec<Read> {
    let mut messages = Vec::new();
    let mut rows = BTreeMap::new();
    for piece in pieces {
        match piece {
            Owned::Row(place, table, id, update) => {
                let update = serde_json::from_str(&update.unwrap()).unwrap();
                rows.insert((place == Place::Result, table, id), update);
            }
            Owned::Message(text) => {
                let message = serde_json::from_str(&text).unwrap();
                messages.push((std::mem::take(&mut rows), message));
            }
        }
    }
    assert_eq!(rows.len(), 0, "rows without a message");
    messages
}

/// What a framer gives of a stream in chunks of these lengths, again and again.
fn in_chunks(
    framer: &mut Framer,
    stream: &[u8],
    lengths: &[usize],
) -> Result<Vec<Owned>, FramingError> {
    let mut found = Vec::new();
    let mut rest = stream;
    for length in lengths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (head, tail) = rest.split_at((*length).min(rest.len()));
        found.extend(feed(framer, head)?);
        rest = tail;
    }
    Ok(found)
}

proptest! {
    #[test]
    fn any_split_gives_the_same_messages(
        sent in vec(json(), 0..6),
        lengths in vec(1usize..40, 1..60),
    ) {
        let stream: String = sent.iter().map(Value::to_string).collect();
        let found = in_chunks(&mut Framer::default(), stream.as_bytes(), &lengths).unwrap();
        let expected: Vec<Read> = sent.into_iter().map(|value| (BTreeMap::new(), value)).collect();
        prop_assert_eq!(read_pieces(found), expected);
    }

    #[test]
    fn any_split_gives_the_rows_of_the_whole(
        sent in vec(with_rows(), 0..4),
        lengths in vec(1usize..40, 1..60),
    ) {
        let stream = sent.concat();
        let found = in_chunks(&mut Framer::default(), stream.as_bytes(), &lengths).unwrap();
        let expected: Vec<Read> = sent.iter().map(|text| read_whole(text)).collect();
        prop_assert_eq!(read_pieces(found), expected);
    }

    #[test]
    fn a_damaged_byte_gives_the_same_however_the_stream_is_split(
        sent in vec(with_rows(), 1..3),
        lengths in vec(1usize..40, 1..60),
        at in any::<Index>(),
        byte in prop_oneof![any::<u8>(), prop::sample::select(&b"{}[]\",:\\"[..])],
    ) {
        let mut stream = sent.concat().into_bytes();
        let at = at.index(stream.len());
        stream[at] = byte;
        let whole = feed(&mut Framer::default(), &stream);
        prop_assert_eq!(in_chunks(&mut Framer::default(), &stream, &lengths), whole);
    }

    #[test]
    fn random_bytes_never_panic_and_stay_within_the_limit(
        chunks in vec(vec(any::<u8>(), 0..20), 0..20),
    ) {
        let mut framer = Framer::with_limit(64);
        for chunk in chunks {
            if feed(&mut framer, &chunk).is_err() {
                break;
            }
            prop_assert!(framer.buffer().is_empty());
            prop_assert!(framer.message.len() < 64 && framer.row.len() <= 64);
        }
    }

    #[test]
    fn random_brackets_never_panic(text in r#"[{}\[\]"\\a]{0,64}"#) {
        for start in ["", r#"{"result":{"T":"#, r#"{"params":[{"T":{""#] {
            let mut framer = Framer::default();
            for byte in start.bytes().chain(text.bytes()) {
                if feed(&mut framer, &[byte]).is_err() {
                    break;
                }
            }
        }
    }
}
