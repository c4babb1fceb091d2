use std::str::FromStr;

use hickory_proto::{
    op::{Message, Query},
    rr::rdata::{A, AAAA, CNAME},
};
use proptest::prelude::*;

use super::*;

fn dns_name(text: &str) -> Name {
    Name::from_str(text).expect("a name")
}

fn a(owner: &str, ttl: u32, address: [u8; 4]) -> Record {
    Record::from_rdata(dns_name(owner), ttl, RData::A(A(address.into())))
}

fn cname(owner: &str, ttl: u32, target: &str) -> Record {
    Record::from_rdata(dns_name(owner), ttl, RData::CNAME(CNAME(dns_name(target))))
}

fn message(question: &str, answers: Vec<Record>) -> Message {
    let mut message = Message::new(7, MessageType::Response, OpCode::Query);
    message.queries = vec![Query::query(dns_name(question), RecordType::A)];
    message.answers = answers;
    message
}

fn decode(message: &Message) -> Result<Answer, DnsError> {
    Answer::decode(&message.to_vec().expect("encodes"))
}

fn addresses_of(message: &Message) -> Vec<(String, u64)> {
    let answer = decode(message).expect("a usable answer");
    answer
        .addresses
        .iter()
        .map(|(address, ttl)| (address.to_string(), ttl.as_secs()))
        .collect()
}

#[test]
fn every_address_counts_once_with_its_shortest_ttl() {
    let answer = message(
        "Www.Example.com.",
        vec![
            a("www.example.com.", 300, [192, 0, 2, 1]),
            a("WWW.example.COM.", 60, [192, 0, 2, 2]),
            a("www.example.com.", 30, [192, 0, 2, 1]),
        ],
    );
    assert_eq!(
        addresses_of(&answer),
        [("192.0.2.1".to_owned(), 30), ("192.0.2.2".to_owned(), 60)]
    );
    assert_eq!(
        decode(&answer).expect("usable").name.to_string(),
        "www.example.com"
    );
}

#[test]
fn cnames_are_followed_in_any_order_and_shorten_the_ttl() {
    let answer = message(
        "www.example.com.",
        vec![
            a("edge.cdn.test.", 300, [192, 0, 2, 1]),
            cname("alias.example.com.", 20, "EDGE.cdn.test."),
            cname("www.example.com.", 60, "alias.example.com."),
        ],
    );
    assert_eq!(addresses_of(&answer), [("192.0.2.1".to_owned(), 20)]);
}

#[test]
fn records_beside_the_chain_do_not_count() {
    let answer = message(
        "www.example.com.",
        vec![
            cname("www.example.com.", 60, "edge.cdn.test."),
            a("www.example.com.", 60, [192, 0, 2, 9]),
            a("other.test.", 60, [192, 0, 2, 8]),
            a("edge.cdn.test.", 60, [192, 0, 2, 1]),
        ],
    );
    assert_eq!(addresses_of(&answer), [("192.0.2.1".to_owned(), 60)]);
    let mut other_sections = message("www.example.com.", vec![]);
    other_sections.additionals = vec![a("www.example.com.", 60, [192, 0, 2, 1])];
    other_sections.authorities = vec![a("www.example.com.", 60, [192, 0, 2, 1])];
    assert_eq!(addresses_of(&other_sections), []);
}

#[test]
fn a_loop_and_an_endless_chain_are_refused() {
    let looped = message(
        "a.test.",
        vec![
            cname("a.test.", 1, "b.test."),
            cname("b.test.", 1, "a.test."),
        ],
    );
    assert_eq!(decode(&looped), Err(DnsError::CnameChain));
    let chain = |length: usize| {
        let mut records: Vec<Record> = (0..length)
            .map(|i| cname(&format!("n{i}.test."), 9, &format!("n{}.test.", i + 1)))
            .collect();
        records.push(a(&format!("n{length}.test."), 9, [192, 0, 2, 1]));
        message("n0.test.", records)
    };
    assert_eq!(addresses_of(&chain(CNAME_CHAIN_MAX)).len(), 1);
    assert_eq!(
        decode(&chain(CNAME_CHAIN_MAX + 1)),
        Err(DnsError::CnameChain)
    );
}

#[test]
fn ipv6_addresses_are_read() {
    let mut answer = message(
        "www.example.com.",
        vec![Record::from_rdata(
            dns_name("www.example.com."),
            5,
            RData::AAAA(AAAA("2001:db8::1".parse().expect("an address"))),
        )],
    );
    answer.queries[0].query_type = RecordType::AAAA;
    assert_eq!(addresses_of(&answer), [("2001:db8::1".to_owned(), 5)]);
}

#[test]
fn a_negative_ttl_is_zero() {
    let answer = message("a.test.", vec![a("a.test.", 1 << 31, [192, 0, 2, 1])]);
    assert_eq!(addresses_of(&answer), [("192.0.2.1".to_owned(), 0)]);
}

#[test]
fn what_is_no_answer_is_refused() {
    let good = message("a.test.", vec![a("a.test.", 1, [192, 0, 2, 1])]);
    let check = |change: fn(&mut Message), error: DnsError| {
        let mut changed = good.clone();
        change(&mut changed);
        assert_eq!(decode(&changed), Err(error));
    };
    check(
        |m| m.metadata.message_type = MessageType::Query,
        DnsError::NotAResponse,
    );
    check(
        |m| m.metadata.op_code = OpCode::Notify,
        DnsError::NotAResponse,
    );
    check(
        |m| m.metadata.response_code = ResponseCode::NXDomain,
        DnsError::ErrorResponse,
    );
    check(|m| m.metadata.truncation = true, DnsError::Truncated);
    check(|m| m.queries.clear(), DnsError::Questions(0));
    check(
        |m| m.queries.push(m.queries[0].clone()),
        DnsError::Questions(2),
    );
    check(
        |m| m.queries[0].query_class = DNSClass::CH,
        DnsError::OtherQuestion,
    );
    check(
        |m| m.queries[0].query_type = RecordType::TXT,
        DnsError::OtherQuestion,
    );
    check(
        |m| m.answers = vec![m.answers[0].clone(); 1025],
        DnsError::TooManyRecords(1025),
    );
}

#[test]
fn a_compression_pointer_to_itself_is_malformed() {
    let mut bytes = message("a.test.", vec![]).to_vec().expect("encodes");
    bytes.truncate(12);
    bytes.extend([0xc0, 0x0c, 0, 1, 0, 1]);
    assert!(matches!(
        Answer::decode(&bytes),
        Err(DnsError::Malformed(_))
    ));
}

#[test]
fn a_message_cut_anywhere_in_its_answers_is_malformed() {
    let bytes = message("a.test.", vec![a("a.test.", 1, [192, 0, 2, 1])])
        .to_vec()
        .expect("encodes");
    for length in 0..bytes.len() {
        assert!(
            matches!(
                Answer::decode(&bytes[..length]),
                Err(DnsError::Malformed(_))
            ),
            "{length}"
        );
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..600),
        look_like_an_answer in any::<bool>(),
    ) {
        if look_like_an_answer && bytes.len() >= 12 {
            bytes[2..8].copy_from_slice(&[0x81, 0x80, 0, 1, 0, 3]);
        }
        let _ = Answer::decode(&bytes);
    }
}
