//! Any labels as a name: it survives being written and read, its case does not matter, and its suffixes
//! are those at its labels. Any text as a name: no panic.
#![no_main]

use dnsflow_common::question::NameHash;
use dnsflow_core::values::name::{DnsName, DomainName};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<Vec<u8>>, String)| {
    let (labels, text) = input;
    if let Ok(name) = text.parse::<DnsName>() {
        assert_eq!(name.written(), text);
    }
    if let Ok(name) = DomainName::from_presentation(&text) {
        assert_eq!(DomainName::from_presentation(&name.to_string()), Ok(name));
    }
    let Ok(name) = DomainName::from_labels(labels.iter().map(Vec::as_slice)) else {
        return;
    };
    // RFC 1035, section 3.1: 255 octets, of which the root label takes one.
    assert!(name.wire().len() < 255);
    assert_eq!(
        DomainName::from_presentation(&name.to_string()).as_ref(),
        Ok(&name)
    );
    let upper: Vec<_> = labels
        .iter()
        .map(|label| label.to_ascii_uppercase())
        .collect();
    let upper = DomainName::from_labels(upper.iter().map(Vec::as_slice));
    assert_eq!(upper.as_ref(), Ok(&name));
    assert_eq!(name.labels().count(), labels.len());
    let mut suffixes = name.suffixes();
    for first in 0..labels.len() {
        let suffix = DomainName::from_labels(labels[first..].iter().map(Vec::as_slice));
        let suffix = suffix.expect("it is shorter");
        assert_eq!(suffixes.next(), Some(suffix.wire()));
        assert_eq!(
            NameHash::of(suffix.wire()),
            NameHash::of(&suffix.wire().to_ascii_uppercase())
        );
    }
    assert_eq!(suffixes.next(), None);
});
