use super::*;

fn name(text: &str) -> DomainName {
    text.parse().expect("a domain name")
}

#[test]
fn case_and_final_dot_do_not_matter() {
    assert_eq!(name("WWW.Example.COM."), name("www.example.com"));
    assert_eq!(name("Example.com").wire(), b"\x07example\x03com");
}

#[test]
fn suffixes_go_label_by_label() {
    let all: Vec<Vec<u8>> = name("a.bc.d").suffixes().map(<[u8]>::to_vec).collect();
    assert_eq!(all, [&b"\x01a\x02bc\x01d"[..], b"\x02bc\x01d", b"\x01d"]);
}

#[test]
fn impossible_names_are_refused_with_the_reason() {
    let check = |text: &str, error: NameError| {
        assert_eq!(text.parse::<DomainName>().expect_err(text), error);
    };
    check("", NameError::Empty);
    check(".", NameError::Empty);
    check("a..b", NameError::EmptyLabel);
    check(".a", NameError::EmptyLabel);
    check("a b", NameError::BadCharacter(' '));
    check("a.*.b", NameError::Wildcard);
    check(&"x".repeat(64), NameError::LabelTooLong("x".repeat(64)));
    check(&vec!["abcdefg"; 32].join("."), NameError::TooLong);
    assert!(vec!["abcdefg"; 31].join(".").parse::<DomainName>().is_ok());
}

#[test]
fn the_longest_name_has_253_characters() {
    // 63 + 63 + 63 + 61 octets in four labels, three dots between them: 253 characters.
    let labels = [63, 63, 63, 61].map(|length| "x".repeat(length));
    assert_eq!(labels.join(".").len(), 253);
    assert_eq!(name(&labels.join(".")).wire().len(), 254);
    let labels = [63, 63, 63, 62].map(|length| "x".repeat(length));
    assert_eq!(
        labels.join(".").parse::<DomainName>(),
        Err(NameError::TooLong)
    );
}

#[test]
fn odd_octets_are_shown_escaped() {
    let name = DomainName::from_labels([&b"a.b"[..], b"\x00\xff", b"c\\"]).expect("labels");
    assert_eq!(name.to_string(), r"a\.b.\000\255.c\\");
    let read = |text: &str| DomainName::from_presentation(text);
    assert_eq!(read(&format!("{name}.")), Ok(name.clone()));
    assert_eq!(read(&name.to_string()), Ok(name));
    for bad in [r"a\", r"a\2", r"a\256", "", ".", "a..b", "a.."] {
        assert!(read(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_wildcard_is_one_leading_star() {
    let wild: DnsName = "*.Example.com.".parse().expect("a wildcard");
    assert!(wild.is_wildcard());
    assert_eq!(wild.name(), &name("example.com"));
    assert_eq!(wild.written(), "*.Example.com.");
    assert_eq!("*".parse::<DnsName>(), Err(NameError::Wildcard));
    assert_eq!("*.*.com".parse::<DnsName>(), Err(NameError::Wildcard));
    assert_eq!("*.".parse::<DnsName>(), Err(NameError::Empty));
}

#[test]
fn the_names_below_a_name_follow_it_in_the_order_from_the_end() {
    let names = [
        "a.test",
        "b.a.test",
        "c.b.a.test",
        "ba.test",
        "test",
        "b.test",
        "a.test2",
    ];
    let ordered: std::collections::BTreeSet<FromEnd> = names
        .map(|text| FromEnd(text.parse().expect("a name")))
        .into();
    let place = |text: &str| text.parse::<DomainName>().expect("a name");
    for (above, wanted) in [
        ("a.test", vec!["a.test", "b.a.test", "c.b.a.test"]),
        ("b.a.test", vec!["b.a.test", "c.b.a.test"]),
        (
            "test",
            vec![
                "a.test",
                "b.a.test",
                "b.test",
                "ba.test",
                "c.b.a.test",
                "test",
            ],
        ),
        ("c.test", vec![]),
    ] {
        let above = place(above);
        let found = ordered.range(FromEnd(above.clone())..);
        let found = found.take_while(|name| name.may_be_below(&above));
        let mut found: Vec<_> = found.map(|name| name.0.to_string()).collect();
        found.sort();
        assert_eq!(found, wanted, "{above}");
    }
}
