use serde_json::Value;

use super::*;

/// The objects of a text that comes in parts of so many bytes, and the rest.
fn cut(text: &str, size: usize) -> Result<(Vec<String>, String), Error> {
    let mut splitter = Splitter::default();
    let mut objects = Vec::new();
    for mut part in text.as_bytes().chunks(size) {
        while !part.is_empty() {
            let (taken, is_object) = splitter.take(part)?;
            part = &part[taken..];
            if is_object {
                let object = std::mem::take(&mut splitter.object);
                objects.push(String::from_utf8(object).expect("whole characters"));
            }
        }
    }
    let rest = String::from_utf8(splitter.rest).expect("whole characters");
    Ok((objects, rest))
}

#[test]
fn a_page_is_cut_into_its_objects_wherever_its_parts_end() {
    let items = [
        "null",
        "7",
        r#"{"a":[{"b":"],}\"{[\\"}],"é":[[],{}]}"#,
        r#""a,]\\""#,
        "[1,[2]]",
        "{}",
    ];
    for (before, behind) in [
        (
            r#"{"kind":"L","items":["#,
            r#"],"metadata":{"continue":"[,"}}"#,
        ),
        (r#"{"metadata":{"a":[1]}, "items" : [ "#, " ] }\n"),
    ] {
        let text = format!("{before}{}{behind}", items.join(","));
        for size in 1..=text.len() {
            let (found, rest) = cut(&text, size).expect("a page");
            let found = found.iter().map(|object| object.trim());
            assert!(found.eq(items), "{size}: {text}");
            let json = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
            assert_eq!(json(&rest), json(&format!("{before}{behind}")));
        }
    }
    assert_eq!(cut(r#"{"items":[]}"#, 1).expect("a page").0.len(), 0);
}

#[test]
fn neither_an_object_nor_the_rest_grows_beyond_its_limit() {
    let text = |length: usize| format!("\"{}\"", "x".repeat(length - 2));
    let page = |length: usize| format!("{{\"items\":[{}]}}", text(length));
    assert_eq!(
        cut(&page(OBJECT_BYTES_MAX), 4_096).expect("a page").0.len(),
        1
    );
    for text in [
        page(OBJECT_BYTES_MAX + 1),
        format!("{{\"a\":{},\"items\":[]}}", text(REST_BYTES_MAX)),
        text(REST_BYTES_MAX + 1),
    ] {
        let error = cut(&text, 4_096).expect_err("too large");
        assert!(matches!(error, Error::TooLarge(..)), "{error}");
    }
}

#[test]
fn what_has_no_items_is_no_list() {
    for text in [
        "",
        "{}",
        r#"{"metadata":{}}"#,
        r#"{"items":[]}"#,
        r#"{"items":[],"metadata":{}"#,
    ] {
        let (_, rest) = cut(text, 4_096).expect("within the limits");
        assert!(serde_json::from_str::<Rest>(&rest).is_err(), "{text}");
    }
    for text in [
        r#"{"items":null,"metadata":{}}"#,
        r#"{"items":[],"metadata":{"resourceVersion":"7"}}"#,
    ] {
        let (_, rest) = cut(text, 4_096).expect("within the limits");
        serde_json::from_str::<Rest>(&rest).expect(text);
    }
}
