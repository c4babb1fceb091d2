use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, Name, RData, Record, RecordType,
        rdata::{
            A, AAAA, CNAME, HTTPS,
            svcb::{Alpn, IpHint, SVCB, SvcParamKey, SvcParamValue},
        },
    },
    serialize::binary::BinDecodable,
};
use proptest::prelude::*;

use super::{
    opened::{self, Opened},
    *,
};

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
fn what_is_not_of_the_questions_type_does_not_count() {
    let v6 = Record::from_rdata(
        dns_name("a.test."),
        5,
        RData::AAAA(AAAA("2001:db8::1".parse().expect("an address"))),
    );
    let records = vec![
        a("a.test.", 5, [192, 0, 2, 1]),
        v6,
        https("a.test.", 5, service(1, ".", &[[192, 0, 2, 3]])),
    ];
    let mut answer = message("a.test.", records);
    assert_eq!(addresses_of(&answer), [("192.0.2.1".to_owned(), 5)]);
    answer.queries[0].query_type = RecordType::AAAA;
    assert_eq!(addresses_of(&answer), [("2001:db8::1".to_owned(), 5)]);
    answer.queries[0].query_type = RecordType::HTTPS;
    assert_eq!(addresses_of(&answer), [("192.0.2.3".to_owned(), 5)]);
    answer.queries[0].query_type = RecordType::SVCB;
    assert_eq!(addresses_of(&answer), []);
}

fn service(priority: u16, target: &str, hints: &[[u8; 4]]) -> SVCB {
    let mut parameters = vec![(
        SvcParamKey::Alpn,
        SvcParamValue::Alpn(Alpn(vec!["h2".to_owned()])),
    )];
    if !hints.is_empty() {
        let hints = hints.iter().map(|hint| A((*hint).into())).collect();
        parameters.push((
            SvcParamKey::Ipv4Hint,
            SvcParamValue::Ipv4Hint(IpHint(hints)),
        ));
    }
    SVCB::new(priority, dns_name(target), parameters)
}

fn https(owner: &str, ttl: u32, service: SVCB) -> Record {
    Record::from_rdata(dns_name(owner), ttl, RData::HTTPS(HTTPS(service)))
}

fn https_message(question: &str, answers: Vec<Record>) -> Message {
    let mut message = message(question, answers);
    message.queries[0].query_type = RecordType::HTTPS;
    message
}

#[test]
fn a_services_hints_are_read() {
    let mut second = service(2, ".", &[[192, 0, 2, 2], [192, 0, 2, 1]]);
    second.svc_params.push((
        SvcParamKey::Ipv6Hint,
        SvcParamValue::Ipv6Hint(IpHint(vec![AAAA(
            "2001:db8::1".parse().expect("an address"),
        )])),
    ));
    let answer = https_message(
        "www.example.com.",
        vec![
            https(
                "edge.example.com.",
                300,
                service(1, "CDN.test.", &[[192, 0, 2, 1]]),
            ),
            https("edge.example.com.", 60, second),
            https("www.example.com.", 300, service(1, ".", &[[192, 0, 2, 9]])),
            cname("www.example.com.", 200, "edge.example.com."),
        ],
    );
    assert_eq!(
        addresses_of(&answer),
        [
            ("192.0.2.1".to_owned(), 60),
            ("192.0.2.2".to_owned(), 60),
            ("2001:db8::1".to_owned(), 60)
        ]
    );
}

#[test]
fn an_alias_of_a_service_has_no_hints() {
    let answer = https_message(
        "example.com.",
        vec![
            https("example.com.", 60, service(1, ".", &[[192, 0, 2, 1]])),
            https(
                "example.com.",
                60,
                service(0, "svc.test.", &[[192, 0, 2, 2]]),
            ),
        ],
    );
    assert_eq!(addresses_of(&answer), []);
}

#[test]
fn rules_are_asked_about_the_host_of_a_service() {
    const HTTPS: RecordType = RecordType::HTTPS;
    const SVCB: RecordType = RecordType::SVCB;
    for (question, kind, host) in [
        ("_8443._https.Example.com.", HTTPS, "example.com"),
        ("_8443._HTTPS.example.com.", HTTPS, "example.com"),
        ("_1._https.a.test.", HTTPS, "a.test"),
        ("_65535._https.a.test.", HTTPS, "a.test"),
        ("example.com.", HTTPS, "example.com"),
        ("_853._dns.example.com.", SVCB, "example.com"),
        ("_dns.example.com.", SVCB, "example.com"),
        ("example.com.", SVCB, "example.com"),
    ] {
        let mut answer = message(question, vec![]);
        answer.queries[0].query_type = kind;
        let answer = decode(&answer).expect("usable");
        assert_eq!(answer.name.to_string(), host, "{question}");
        assert_eq!(
            format!("{}.", answer.question.name),
            question.to_ascii_lowercase()
        );
        assert_eq!(answer.question.kind.code(), u16::from(kind));
        assert_eq!(answer.id, 7);
    }
    assert_eq!(
        decode(&https_message("_8443._https.", vec![])),
        Err(DnsError::OtherQuestion)
    );
}

#[test]
fn whoever_is_delegated_another_name_below_the_host_does_not_answer_for_it() {
    const HTTPS: RecordType = RecordType::HTTPS;
    const SVCB: RecordType = RecordType::SVCB;
    for (question, kind) in [
        ("_acme-challenge.example.com.", HTTPS),
        ("_acme-challenge.example.com.", SVCB),
        ("_dmarc.example.com.", SVCB),
        ("_853._dmarc.example.com.", SVCB),
        ("_https.example.com.", HTTPS),
        ("_8443.example.com.", HTTPS),
        ("_https._8443.example.com.", HTTPS),
        ("_8443._http.example.com.", HTTPS),
        ("_8443._https.example.com.", SVCB),
        ("_853._dns.example.com.", HTTPS),
        ("_65536._https.example.com.", HTTPS),
        ("_08443._https.example.com.", HTTPS),
        ("_._https.example.com.", HTTPS),
        ("8443._https.example.com.", HTTPS),
        ("_8443._dns._acme-challenge.example.com.", HTTPS),
        ("a._tcp.example.com.", HTTPS),
        // A name of its own, where addresses are asked for.
        ("_8443._https.example.com.", RecordType::A),
        ("_dns.example.com.", RecordType::AAAA),
    ] {
        let mut answer = message(question, vec![]);
        answer.queries[0].query_type = kind;
        let name = decode(&answer).expect("usable").name;
        assert_eq!(format!("{name}."), question, "{kind}");
    }
    // Only the labels in front go.
    let answer = https_message("_8443._https._acme-challenge.example.com.", vec![]);
    let name = decode(&answer).expect("usable").name.to_string();
    assert_eq!(name, "_acme-challenge.example.com");
}

#[test]
fn addresses_are_bounded() {
    let hints = |count: u16| -> Vec<[u8; 4]> {
        (0..count)
            .map(|n| n.to_be_bytes())
            .map(|[high, low]| [192, 0, high, low])
            .collect()
    };
    let with_hints = |count| {
        https_message(
            "a.test.",
            vec![https("a.test.", 60, service(1, ".", &hints(count)))],
        )
    };
    assert_eq!(addresses_of(&with_hints(1024)).len(), ADDRESSES_MAX);
    let more = decode(&with_hints(1030)).expect("usable");
    assert_eq!((more.addresses.len(), more.left_out), (ADDRESSES_MAX, 6));
    // The same at a smaller limit, in records of their own.
    let records = |count: u8| (0..count).map(|last| a("a.test.", 60, [192, 0, 2, last]));
    let at_most = |most, count| {
        let bytes = message("a.test.", records(count).collect()).to_vec();
        let response = Response::read(bytes.expect("encodes")).expect("a response");
        let answer = response.answer(most).expect("usable");
        (answer.addresses.len(), answer.left_out)
    };
    assert_eq!(at_most(8, 8), (8, 0));
    assert_eq!(at_most(8, 11), (8, 3));
}

/// The addresses that are closed if a rule denies the name.
fn every_address(bytes: &[u8]) -> Vec<(IpAddr, Duration)> {
    let response = Response::read(bytes).expect("a response");
    response.every_address(ADDRESSES_MAX).addresses
}

#[test]
fn of_a_denied_name_every_address_counts_that_a_client_may_use() {
    let v6 = Record::from_rdata(
        dns_name("a.test."),
        5,
        RData::AAAA(AAAA("2001:db8::1".parse().expect("an address"))),
    );
    let mut hints = service(1, "target.test.", &[[192, 0, 2, 3], [192, 0, 2, 4]]);
    hints.svc_params.push((
        SvcParamKey::Ipv6Hint,
        SvcParamValue::Ipv6Hint(IpHint(vec![AAAA(
            "2001:db8::2".parse().expect("an address"),
        )])),
    ));
    let mut answer = message(
        "a.test.",
        vec![
            // A loop.
            cname("a.test.", 9, "b.test."),
            cname("b.test.", 9, "a.test."),
            a("other.test.", 60, [192, 0, 2, 1]),
            a("a.test.", 1 << 31, [192, 0, 2, 2]),
            v6,
            https("a.test.", 7, hints),
            // An alias.
            https("b.test.", 7, service(0, ".", &[[192, 0, 2, 5]])),
        ],
    );
    answer.metadata.truncation = true;
    let mut bytes = answer.to_vec().expect("encodes");
    let all = [
        ("192.0.2.1", 60),
        ("192.0.2.2", 0),
        ("2001:db8::1", 5),
        ("192.0.2.3", 7),
        ("192.0.2.4", 7),
        ("2001:db8::2", 7),
        ("192.0.2.5", 7),
    ];
    let all = all.map(|(address, ttl)| {
        let address: IpAddr = address.parse().expect("an address");
        (address, Duration::from_secs(ttl))
    });
    assert_eq!(every_address(&bytes), all);
    // More records than there are, and the last one is cut.
    bytes[6..8].copy_from_slice(&[0xff, 0xff]);
    bytes.pop();
    assert_eq!(every_address(&bytes), all[..6]);
}

#[test]
fn a_denied_name_has_its_addresses_behind_any_names_and_records() {
    // The octets of all owners are four times the limit, and other records come first.
    let deep = [&b"\x01a".repeat(125)[..], &[0]].concat();
    let mut bytes = by_hand(&deep, 2048);
    for number in 0..2048_u16 {
        let [high, low] = number.to_be_bytes();
        let code = if number < 1024 { 16 } else { 1 };
        record(&mut bytes, &pointer(12), code, &[192, 0, high, low]);
    }
    assert_eq!(every_address(&bytes).len(), 1024);
    let response = Response::read(&bytes).expect("a response");
    let some = response.every_address(1000);
    assert_eq!((some.addresses.len(), some.left_out), (1000, 24));
}

#[test]
fn records_are_bounded() {
    let records = |count: usize| {
        let mut records = vec![a("other.test.", 60, [192, 0, 2, 9]); count - 1];
        records.push(a("a.test.", 60, [192, 0, 2, 1]));
        decode(&message("a.test.", records)).expect("usable")
    };
    let all = records(1024);
    assert_eq!((all.addresses.len(), all.left_out), (1, 0));
    let more = records(1026);
    assert_eq!((more.addresses.len(), more.left_out), (0, 2));
}

/// A message by hand: header and question of type A, with this many records.
fn by_hand(question: &[u8], records: u16) -> Vec<u8> {
    let mut bytes = vec![0, 7, 0x81, 0x80, 0, 1];
    bytes.extend(records.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(question);
    bytes.extend([0, 1, 0, 1]);
    bytes
}

fn record(bytes: &mut Vec<u8>, owner: &[u8], code: u16, data: &[u8]) {
    bytes.extend(owner);
    bytes.extend(code.to_be_bytes());
    bytes.extend([0, 1, 0, 0, 0, 60]);
    bytes.extend(u16::try_from(data.len()).expect("short").to_be_bytes());
    bytes.extend(data);
}

fn pointer(place: usize) -> [u8; 2] {
    (0xc000 | u16::try_from(place).expect("a place")).to_be_bytes()
}

fn addresses_by_hand(bytes: &[u8]) -> Result<usize, DnsError> {
    Answer::decode(bytes).map(|answer| answer.addresses.len())
}

#[test]
fn octets_of_names_are_bounded() {
    // Each owner is another name: a label of its own, and 125 behind a pointer.
    let deep = [&b"\x01a".repeat(125)[..], &[0]].concat();
    let owners = |count: u16| {
        let mut bytes = by_hand(&deep, count);
        for number in 0..count {
            let [high, low] = number.to_be_bytes();
            let owner = [&[2, high | 0x80, low], &pointer(12)[..]].concat();
            record(&mut bytes, &owner, 1, &[192, 0, 2, 1]);
        }
        addresses_by_hand(&bytes)
    };
    // Of the label, the pointer and the labels behind it.
    let each = 3 + 2 + 250;
    // The question has 250, too.
    let most = u16::try_from((NAME_OCTETS_MAX - 250) / each).expect("few");
    assert_eq!(owners(most), Ok(0));
    assert_eq!(owners(most + 1), Err(DnsError::TooManyNameOctets));
}

#[test]
fn pointers_to_pointers_are_bounded() {
    // Each of 8,000 pointers leads to the one before it.
    let with_owners = |owner: fn(usize) -> usize| {
        let mut bytes = by_hand(b"\x01a\x04test\x00", 1001);
        let first = bytes.len() + 2 + 10;
        let place = |index: usize| {
            if index == 0 {
                12
            } else {
                first + 2 * (index - 1)
            }
        };
        let chain: Vec<u8> = (0..8000).flat_map(|index| pointer(place(index))).collect();
        record(&mut bytes, &pointer(12), 0xff00, &chain);
        for index in 0..1000 {
            let owner = pointer(place(owner(index)));
            let [.., high, low] = index.to_be_bytes();
            record(&mut bytes, &owner, 1, &[192, 0, high, low]);
        }
        addresses_by_hand(&bytes)
    };
    assert_eq!(with_owners(|_| 2), Ok(1000));
    assert_eq!(with_owners(|_| 8000), Err(DnsError::TooManyNameOctets));
}

#[test]
fn names_at_the_length_limits_are_read() {
    let longest = [63, 63, 63, 61].map(|length| "x".repeat(length)).join(".") + ".";
    let answer = message(&longest, vec![a(&longest, 9, [192, 0, 2, 1])]);
    assert_eq!(addresses_of(&answer).len(), 1);
    assert_eq!(decode(&answer).expect("usable").name.wire().len(), 254);
    // The root has no addresses.
    assert!(matches!(
        decode(&message(".", vec![])),
        Err(DnsError::Malformed(_))
    ));
    // 63 + 63 + 63 + 62 octets: one too many.
    let mut bytes = message("a.test.", vec![]).to_vec().expect("encodes");
    bytes.truncate(12);
    for length in [63_u8, 63, 63, 62] {
        bytes.push(length);
        bytes.extend(vec![b'x'; length.into()]);
    }
    bytes.extend([0, 0, 1, 0, 1]);
    assert!(matches!(
        Answer::decode(&bytes),
        Err(DnsError::Malformed(_))
    ));
}

#[test]
fn pointers_that_loop_or_point_forward_are_malformed() {
    let header = [0, 7, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0];
    let question = [&b"\x01a\x04test\x00"[..], &[0, 1, 0, 1]].concat();
    // The question takes bytes 12 to 22: the record begins at byte 23.
    let tail = [0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 192, 0, 2, 1];
    let decode = |owner: &[u8]| {
        Answer::decode(&[&header[..], &question, owner, &tail].concat())
            .map(|answer| answer.addresses.len())
    };
    assert_eq!(decode(&[0xc0, 12]), Ok(1));
    for owner in [
        // To itself, and to the byte behind it.
        &[0xc0, 23][..],
        &[0xc0, 25],
        // A label, then back to it.
        &[1, b'b', 0xc0, 23],
        // Behind the end of the message.
        &[0xff, 0xff],
        // A label type that does not exist.
        &[0x80, 12],
    ] {
        assert!(
            matches!(decode(owner), Err(DnsError::Malformed(_))),
            "{owner:x?}"
        );
    }
}

#[test]
fn counts_beyond_the_message_are_malformed_or_too_many() {
    let mut bytes = message("a.test.", vec![a("a.test.", 1, [192, 0, 2, 1])])
        .to_vec()
        .expect("encodes");
    bytes[6..8].copy_from_slice(&[0, 2]);
    assert!(matches!(
        Answer::decode(&bytes),
        Err(DnsError::Malformed(_))
    ));
    bytes[6..8].copy_from_slice(&[0xff, 0xff]);
    assert!(matches!(
        Answer::decode(&bytes),
        Err(DnsError::Malformed(_))
    ));
    // What follows the Answer section is not looked at.
    bytes[6..8].copy_from_slice(&[0, 1]);
    bytes[8..12].copy_from_slice(&[0xff; 4]);
    assert!(Answer::decode(&bytes).is_ok());
}

#[test]
fn the_largest_ttl_is_kept() {
    let answer = message("a.test.", vec![a("a.test.", (1 << 31) - 1, [192, 0, 2, 1])]);
    let ttl = (1 << 31) - 1;
    assert_eq!(addresses_of(&answer), [("192.0.2.1".to_owned(), ttl)]);
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

/// The addresses of a message that is decoded whole, without any limit.
fn of_whole(bytes: &[u8]) -> Option<Vec<(IpAddr, Duration)>> {
    let message = Message::from_bytes(bytes).ok()?;
    let [question] = &message.queries[..] else {
        return None;
    };
    let of_class_in = |record: &&Record| record.dns_class == DNSClass::IN;
    let records: Vec<&Record> = message.answers.iter().filter(of_class_in).collect();
    let (mut owner, mut least) = (&question.name, u32::MAX);
    for _ in 0..=CNAME_CHAIN_MAX {
        let alias = records.iter().find_map(|record| match &record.data {
            RData::CNAME(target) if record.name == *owner => Some((&target.0, ttl(record))),
            _ => None,
        });
        let Some((target, ttl)) = alias else {
            let at_end = records.iter().filter(|record| record.name == *owner);
            let services = at_end.clone().filter_map(|record| match &record.data {
                RData::HTTPS(service) => Some(service.0.svc_priority),
                _ => None,
            });
            let has_alias = services.into_iter().any(|priority| priority == 0);
            let mut found = Vec::new();
            for record in at_end {
                let ttl = Duration::from_secs(least.min(self::ttl(record)).into());
                match (&record.data, question.query_type) {
                    (RData::A(a), RecordType::A) => found.push((IpAddr::V4(a.0), ttl)),
                    (RData::AAAA(aaaa), RecordType::AAAA) => found.push((aaaa.0.into(), ttl)),
                    (RData::HTTPS(service), RecordType::HTTPS) if !has_alias => {
                        for (_, value) in &service.0.svc_params {
                            match value {
                                SvcParamValue::Ipv4Hint(hints) => {
                                    found.extend(hints.0.iter().map(|hint| (hint.0.into(), ttl)));
                                }
                                SvcParamValue::Ipv6Hint(hints) => {
                                    found.extend(hints.0.iter().map(|hint| (hint.0.into(), ttl)));
                                }
                                _ => {}
                            }
                        }
                    }
                    _ => {}
                }
            }
            let mut least = BTreeMap::new();
            for (address, ttl) in &found {
                let known = least.entry(*address).or_insert(*ttl);
                *known = (*known).min(*ttl);
            }
            return Some(least.into_iter().collect());
        };
        owner = target;
        least = least.min(ttl);
    }
    None
}

const POOL: [&str; 5] = [
    "a.test.",
    "A.TEST.",
    "b.a.test.",
    "c.b.a.test.",
    "www.example.com.",
];

/// A record with an owner and a target of few names.
fn any_record() -> impl Strategy<Value = Record> {
    let name = || proptest::sample::select(&POOL[..]);
    (name(), name(), any::<u32>(), 0..5_u8, 0..4_u8).prop_map(|(owner, target, ttl, kind, last)| {
        match kind {
            0 => cname(owner, ttl, target),
            1 => Record::from_rdata(
                dns_name(owner),
                ttl,
                RData::AAAA(AAAA([0, 0, 0, 0, 0, 0, 0, last.into()].into())),
            ),
            2 => https(
                owner,
                ttl,
                service(last.into(), target, &[[192, 0, 2, last], [192, 0, 2, 9]]),
            ),
            _ => a(owner, ttl, [192, 0, 2, last]),
        }
    })
}

/// A chain of aliases and the addresses at its end, with all names in full, as CoreDNS writes them.
fn chain(names: &[&str], kind: RecordType, ttls: &[u32]) -> Vec<u8> {
    let wire = |name: &str| name.parse::<DomainName>().expect("a name").wire().to_vec();
    let wire = |name: &str| [&wire(name.trim_end_matches('.'))[..], &[0]].concat();
    let mut bytes = vec![0, 7, 0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0];
    bytes.extend(wire(names[0]));
    bytes.extend([u16::from(kind), 1].map(u16::to_be_bytes).concat());
    let aliases = names.windows(2).map(|pair| (pair[0], 5, wire(pair[1])));
    let len = if kind == RecordType::A { 4 } else { 16 };
    let addresses = (1..=ttls.len().saturating_sub(names.len() - 1)).map(|last| {
        let address = [vec![0x20; len - 1], vec![last as u8]].concat();
        (names[names.len() - 1], u16::from(kind), address)
    });
    for ((owner, kind, data), ttl) in aliases.chain(addresses).zip(ttls) {
        bytes[7] += 1;
        bytes.extend(wire(owner));
        bytes.extend([kind, 1].map(u16::to_be_bytes).concat());
        bytes.extend(ttl.to_be_bytes());
        bytes.extend((data.len() as u16).to_be_bytes());
        bytes.extend(data);
    }
    bytes
}

/// Checks that the kernel opens no other addresses of a message than these, and for no longer.
fn check_opened(opened: &Opened, known: &BTreeMap<IpAddr, Duration>) -> Result<(), TestCaseError> {
    let opened_addresses: BTreeSet<IpAddr> = opened.addresses.iter().copied().collect();
    prop_assert_eq!(&opened_addresses, &known.keys().copied().collect());
    prop_assert!(known.values().all(|ttl| opened.ttl <= *ttl));
    Ok(())
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
        let _ = Response::read(&bytes).map(|response| response.every_address(ADDRESSES_MAX));
    }

    #[test]
    fn the_whole_message_says_the_same(
        records in proptest::collection::vec(any_record(), 0..12),
        name in proptest::sample::select(&POOL[..]),
        kind in proptest::sample::select(&[RecordType::A, RecordType::AAAA, RecordType::HTTPS][..]),
        changed in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
    ) {
        let mut message = message(name, records);
        message.queries[0].query_type = kind;
        let mut bytes = message.to_vec().expect("encodes");
        let start = DNS_MESSAGE_MIN + name.len() + 1 + 4;
        for (index, byte) in &changed {
            if bytes.len() > start {
                let place = start + index.index(bytes.len() - start);
                bytes[place] = *byte;
            }
        }
        let known = of_whole(&bytes);
        if let Some(opened) = opened::read_message(&bytes) {
            check_opened(&opened, &known.clone().unwrap_or_default().into_iter().collect())?;
        }
        // A client uses no other address of a denied name.
        let every = Response::read(&bytes).map(|response| response.every_address(ADDRESSES_MAX));
        if let (Ok(every), Some(known)) = (&every, &known) {
            let every: BTreeMap<IpAddr, Duration> = every.addresses.iter().copied().collect();
            prop_assert!(known.iter().all(|(address, _)| every.contains_key(address)));
        }
        let read = Answer::decode(&bytes).map(|answer| {
            let mut addresses = answer.addresses;
            addresses.sort();
            addresses
        });
        match (read, known) {
            (Ok(read), Some(known)) => prop_assert_eq!(read, known),
            // A record that does not count may be wrong, and no one reads it.
            (Ok(_), None) => prop_assert!(!changed.is_empty()),
            (Err(DnsError::CnameChain), None) => {}
            (Err(error), known) => prop_assert!(!changed.is_empty(), "{error}, {known:?}"),
        }
    }

    /// What the kernel reads is what the agent and hickory read.
    #[test]
    fn the_kernel_opens_what_the_whole_message_says(
        names in Just(["a.test", "b.a.test", "c.b.a.test", "www.example.com"]).prop_shuffle(),
        length in 1..=4_usize,
        kind in proptest::sample::select(&[RecordType::A, RecordType::AAAA][..]),
        ttls in proptest::collection::vec(any::<u32>(), 4..18),
        changed in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
    ) {
        let mut bytes = chain(&names[..length], kind, &ttls);
        for (index, byte) in &changed {
            let place = DNS_MESSAGE_MIN + index.index(bytes.len() - DNS_MESSAGE_MIN);
            bytes[place] = *byte;
        }
        let opened = opened::read_message(&bytes);
        let is_left = ttls.len() > 16;
        prop_assert!(!changed.is_empty() || opened.is_some() != is_left);
        if let Some(opened) = opened {
            let answer = Answer::decode(&bytes).expect("the agent reads it");
            check_opened(&opened, &answer.addresses.into_iter().collect())?;
            let known = of_whole(&bytes).unwrap_or_default();
            check_opened(&opened, &known.into_iter().collect())?;
        }
    }
}
