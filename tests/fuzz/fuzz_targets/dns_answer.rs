//! Any bytes as a DNS message.
#![no_main]

use std::collections::BTreeSet;

use dnsflow_core::dns::{ADDRESSES_MAX, Answer, Response};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    let Ok(response) = Response::read(message) else {
        return;
    };
    let every = response.every_address(ADDRESSES_MAX);
    check(&every, message);
    let Ok(answer) = response.answer(ADDRESSES_MAX) else {
        return;
    };
    check(&answer, message);
    // Each address that is opened is closed if a rule denies the name.
    let every: BTreeSet<_> = every.addresses.iter().map(|(address, _)| address).collect();
    let is_full = every.len() == ADDRESSES_MAX;
    let mut addresses = answer.addresses.iter().map(|(address, _)| address);
    assert!(is_full || addresses.all(|address| every.contains(address)));
});

/// Checks that an answer is one to its question, and within the limits.
fn check(answer: &Answer, message: &[u8]) {
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
}
