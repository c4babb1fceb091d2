//! How long it takes to read a DNS answer. A measurement, no test:
//! `cargo test --release -p dnsflow-agent --test dns_cost -- --ignored --nocapture`

use std::{hint::black_box, net::Ipv4Addr, str::FromStr, time::Instant};

use dnsflow_core::dns::Answer;
use hickory_proto::{
    op::{Message, MessageType, OpCode, Query},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, CNAME},
    },
};

const ROUNDS: u32 = 20_000;

fn name(text: &str) -> Name {
    Name::from_str(text).expect("a name")
}

fn a(owner: &str, last: u8) -> Record {
    let address = Ipv4Addr::new(192, 0, 2, last);
    Record::from_rdata(name(owner), 20, RData::A(A(address)))
}

fn cname(owner: &str, target: &str) -> Record {
    Record::from_rdata(name(owner), 60, RData::CNAME(CNAME(name(target))))
}

fn message(question: &str, answers: Vec<Record>) -> Vec<u8> {
    let mut message = Message::new(7, MessageType::Response, OpCode::Query);
    message.queries = vec![Query::query(name(question), RecordType::A)];
    message.answers = answers;
    message.to_vec().expect("encodes")
}

#[test]
#[ignore = "a measurement"]
fn time_to_read_an_answer() {
    let cdn = vec![
        cname("www.example.com.", "www.example.com.edge.cdn.test."),
        cname("www.example.com.edge.cdn.test.", "e1.a.cdn.test."),
        a("e1.a.cdn.test.", 1),
        a("e1.a.cdn.test.", 2),
    ];
    let many = (0..240).map(|last| a("example.com.", last)).collect();
    for (what, bytes) in [
        (
            "one address",
            message("example.com.", vec![a("example.com.", 1)]),
        ),
        (
            "two CNAMEs, two addresses",
            message("www.example.com.", cdn),
        ),
        ("240 addresses", message("example.com.", many)),
    ] {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            black_box(Answer::decode(black_box(&bytes)).is_ok());
        }
        println!(
            "{what}, {} bytes: {:?}",
            bytes.len(),
            start.elapsed() / ROUNDS
        );
    }
}
