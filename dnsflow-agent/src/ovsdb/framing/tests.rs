#![allow(clippy::unwrap_used)]

use proptest::{collection::vec, prelude::*};
use serde_json::Value;

use super::*;

fn messages(framer: &mut Framer) -> Result<Vec<Bytes>, FramingError> {
    let mut found = Vec::new();
    while let Some(message) = framer.next_message()? {
        found.push(message);
    }
    Ok(found)
}

fn feed(framer: &mut Framer, bytes: &[u8]) -> Result<Vec<Bytes>, FramingError> {
    framer.buffer().extend_from_slice(bytes);
    messages(framer)
}

#[test]
fn braces_and_quotes_inside_strings_do_not_count() {
    let text = br#"{"a":"}]\"}\\"}{"b":["{"]}"#;
    let found = feed(&mut Framer::default(), text).unwrap();
    assert_eq!(found, [&text[..15], &text[15..]]);
}

#[test]
fn blanks_between_messages_are_skipped() {
    let found = feed(&mut Framer::default(), b" \n{} \t\r\n{}\n").unwrap();
    assert_eq!(found, ["{}", "{}"]);
}

#[test]
fn anything_else_between_messages_is_an_error() {
    for (text, byte) in [("x", b'x'), ("{}]", b']'), ("[]", b'['), ("{}\"{}", b'"')] {
        let error = feed(&mut Framer::default(), text.as_bytes()).unwrap_err();
        assert_eq!(error, FramingError::NotAnObject(byte), "{text}");
    }
}

#[test]
fn the_room_of_a_long_message_is_given_back() {
    let mut framer = Framer::default();
    let long = format!("{{\"a\":\"{}\"}}", "x".repeat(4 * KEPT_MAX_BYTES));
    let stream = format!("{long} {{\"b\":1}}{{\"c");
    let read = feed(&mut framer, stream.as_bytes()).expect("messages");
    assert_eq!(read, [long.as_bytes(), b"{\"b\":1}"]);
    drop(read);
    // What reads from a socket asks for room like this.
    framer.buffer().reserve(4096);
    assert!(framer.buffer().capacity() < KEPT_MAX_BYTES);
    let rest = feed(&mut framer, b"\":2}").expect("a message");
    assert_eq!(rest, [&b"{\"c\":2}"[..]]);
}

#[test]
fn the_limit_is_exact_and_holds_for_unfinished_messages() {
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

proptest! {
    #[test]
    fn any_split_gives_the_same_messages(
        sent in vec(json(), 0..6),
        cuts in vec(1usize..40, 1..60),
    ) {
        let stream: Vec<u8> = sent.iter().flat_map(|value| value.to_string().into_bytes()).collect();
        let mut framer = Framer::default();
        let mut received = Vec::new();
        let mut rest = &stream[..];
        for cut in cuts.iter().cycle() {
            let (head, tail) = rest.split_at((*cut).min(rest.len()));
            received.extend(feed(&mut framer, head).unwrap());
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
        let received: Vec<Value> =
            received.iter().map(|bytes| serde_json::from_slice(bytes).unwrap()).collect();
        prop_assert_eq!(received, sent);
    }

    #[test]
    fn random_bytes_never_panic_and_lose_nothing(chunks in vec(vec(any::<u8>(), 0..20), 0..20)) {
        let mut framer = Framer::with_limit(64);
        for chunk in chunks {
            if feed(&mut framer, &chunk).is_err() {
                break;
            }
            prop_assert!(framer.buffer().len() < 64);
        }
    }

    #[test]
    fn random_brackets_never_panic(text in r#"[{}\[\]"\\a]{0,64}"#) {
        let mut framer = Framer::default();
        for byte in text.bytes() {
            if feed(&mut framer, &[byte]).is_err() {
                break;
            }
        }
    }
}
