use std::{collections::BTreeSet, vec::Vec};

use proptest::prelude::*;

use super::*;

/// The wire format of a name without the root label, its case kept.
fn wire(name: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        wire.push(label.len() as u8);
        wire.extend(label.bytes());
    }
    wire
}

/// The question for `name` of type A.
fn asked(name: &str) -> Vec<u8> {
    [&wire(name)[..], &[0, 0, 1, 0, 1]].concat()
}

impl Names for BTreeSet<NameHash> {
    fn all(&self) -> bool {
        false
    }

    fn mentions(&self, hash: NameHash) -> bool {
        self.contains(&hash)
    }
}

fn names(names: &[&str]) -> BTreeSet<NameHash> {
    names
        .iter()
        .map(|name| NameHash::of(&wire(&name.to_lowercase())))
        .collect()
}

fn read(bytes: &[u8], names: &impl Names) -> Result<Question, Reason> {
    let mut buffer = Buffer::default();
    // What was there before must not matter.
    buffer.bytes.fill(0x55);
    buffer.bytes[..bytes.len()].copy_from_slice(bytes);
    question(&mut buffer, bytes.len() as u32, names)
}

#[test]
fn the_hash_of_a_question_can_be_made_of_its_parts() {
    let question = read(&asked("www.Example.com"), &names(&[])).expect("a question");
    let [www, other] = ["www.example.com", "example.com"].map(|name| question_hash(&wire(name), 1));
    assert_eq!(question.hash, www);
    assert_ne!(question.hash, other);
    assert_ne!(question.hash, question_hash(&wire("www.example.com"), 28));
}

fn mentioned(name: &str, rules: &[&str]) -> bool {
    read(&asked(name), &names(rules))
        .expect("a question")
        .mentioned
}

#[test]
fn a_name_and_what_is_below_it_is_mentioned() {
    for name in [
        "example.com",
        "EXAMPLE.com",
        "www.example.com",
        "a.b.c.Example.Com",
    ] {
        assert!(mentioned(name, &["example.com"]), "{name}");
    }
    for name in ["com", "notexample.com", "example.com.org", "xample.com", ""] {
        assert!(!mentioned(name, &["example.com"]), "{name}");
    }
    assert!(mentioned("a.org", &["example.com", "org"]));
}

#[test]
fn deep_names_are_looked_up_to_their_last_suffix() {
    // The most labels there can be.
    let name = ["a"; 127].join(".");
    assert!(!mentioned(&name, &["example.com"]));
    for labels in [1, 16, 17, 127] {
        assert!(mentioned(&name, &[&name[..2 * labels - 1]]), "{labels}");
    }
}

#[test]
fn case_alone_makes_no_other_question() {
    let hash = |bytes: &[u8]| read(bytes, &names(&[])).expect("a question").hash;
    assert_eq!(
        hash(&asked("www.Example.COM")),
        hash(&asked("wWw.example.com"))
    );
    let mut others = BTreeSet::from([hash(&asked("www.example.com"))]);
    let mut aaaa = asked("www.example.com");
    aaaa[18] = 28;
    let mut chaos = asked("www.example.com");
    chaos[20] = 3;
    for other in [
        aaaa,
        chaos,
        asked("example.com"),
        asked("ww.wexample.com"),
        asked(""),
    ] {
        assert!(others.insert(hash(&other)), "{other:?}");
    }
}

/// Bytes beside the letters keep their values: `[` is not `{`.
#[test]
fn only_letters_have_case() {
    for byte in 0..=u8::MAX {
        assert_eq!(
            NameHash::ROOT.lower(byte),
            NameHash::ROOT.byte(byte.to_ascii_lowercase().into()),
            "{byte:#04x}"
        );
    }
}

#[test]
fn every_cut_question_is_refused() {
    let whole = asked("www.example.com");
    for len in 0..whole.len() {
        assert_eq!(
            read(&whole[..len], &names(&[])),
            Err(Reason::TruncatedQuestion),
            "length {len}"
        );
    }
}

#[test]
fn what_is_no_name_is_refused() {
    let long = [[&[63][..], &[b'a'; 63]].concat(), asked("")].concat();
    assert!(read(&long, &names(&[])).is_ok(), "the longest label");
    let mut pointer = asked("www.example.com");
    pointer[4] = 0xc0;
    let mut label_64 = long.clone();
    label_64[0] = 64;
    // 3 labels of 63 and one of 61: 255 bytes with the root.
    let name = |last: u8| {
        let mut name = [&[63][..], &[b'a'; 63]].concat().repeat(3);
        name.push(last);
        name.extend(std::vec![b'b'; last.into()]);
        name.extend([0, 0, 1, 0, 1]);
        name
    };
    assert!(read(&name(61), &names(&[])).is_ok(), "the longest name");
    for (what, bytes) in [
        ("pointer", pointer),
        ("label", label_64),
        ("name", name(62)),
    ] {
        assert_eq!(
            read(&bytes, &names(&[])),
            Err(Reason::InvalidQuestion),
            "{what}"
        );
    }
}

proptest! {
    /// A false negative would keep an answer from its rule.
    #[test]
    fn every_name_at_or_below_a_rule_is_mentioned(
        rule in prop::collection::vec("[a-cA-C]{1,3}", 1..6),
        below in prop::collection::vec("[a-zA-Z0-9_-]{1,20}", 0..8),
    ) {
        let name = [&below[..], &rule[..]].concat().join(".");
        prop_assert!(mentioned(&name.to_uppercase(), &[&rule.join(".")]));
    }

    /// Compared with the plain way to say the same.
    #[test]
    fn mentioned_is_at_or_below(
        rules in prop::collection::vec(prop::collection::vec("[ab]{1,2}", 1..4), 0..4),
        name in prop::collection::vec("[aAbB]{1,2}", 1..16),
    ) {
        let rules: Vec<_> = rules.iter().map(|rule| rule.join(".")).collect();
        let rules: Vec<_> = rules.iter().map(|rule| rule.as_str()).collect();
        let lower: Vec<_> = name.iter().map(|label| label.to_lowercase()).collect();
        let expected = (0..lower.len()).any(|at| rules.contains(&lower[at..].join(".").as_str()));
        prop_assert_eq!(mentioned(&name.join("."), &rules), expected);
    }

    #[test]
    fn anything_is_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        let _ = read(&bytes, &names(&["com"]));
    }
}
