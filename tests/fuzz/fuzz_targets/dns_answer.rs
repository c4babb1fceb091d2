//! Any bytes as a DNS message.
#![no_main]

use std::collections::BTreeSet;

use dnsflow_core::dns::{ADDRESSES_MAX, Answer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    let Ok(answer) = Answer::decode(message) else {
        return;
    };
    // What is trusted has a question that ends in the name that rules are matched against.
    assert!(answer.question.name.wire().ends_with(answer.name.wire()));
    assert_eq!(answer.id.to_be_bytes(), message[..2]);
    assert!(answer.addresses.len() <= ADDRESSES_MAX);
    let distinct: BTreeSet<_> = answer
        .addresses
        .iter()
        .map(|(address, _)| address)
        .collect();
    assert_eq!(distinct.len(), answer.addresses.len());
    let longest = u64::from(u32::MAX >> 1);
    assert!(
        answer
            .addresses
            .iter()
            .all(|(_, ttl)| ttl.as_secs() <= longest)
    );
});
