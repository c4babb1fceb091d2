//! The few DNS messages of the bench, made and read byte by byte, so that load costs little.
//!
//! A name's first label ends in a number, and the number says the address: `n7.example.com` leads to
//! the eighth address of 198.18.0.0/15, the network for benchmarks (RFC 2544, appendix C.2.2).

use std::net::Ipv4Addr;

/// How many addresses there are: those of a /15.
pub(crate) const ADDRESSES: u32 = 1 << 17;

const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 0]);

/// The DNS header (RFC 1035, section 4.1.1).
const HEADER: usize = 12;

const TTL: u32 = 60;

/// How the names begin whose answers have a TXT record as well.
pub(crate) const LEFT: char = 'l';

/// The address that names with this number lead to.
pub(crate) fn address(number: u32) -> Ipv4Addr {
    (FIRST + number % ADDRESSES).into()
}

/// A query for the A records of a name, given without its final dot.
pub(crate) fn query(id: u16, name: &str) -> Vec<u8> {
    let mut query = Vec::with_capacity(HEADER + name.len() + 6);
    query.extend(id.to_be_bytes());
    // RD, and one question.
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        query.push(label.len() as u8);
        query.extend(label.as_bytes());
    }
    // The root, QTYPE A and QCLASS IN.
    query.extend([0, 0, 1, 0, 1]);
    query
}

/// The answer to a query: one A record, behind which names with [`LEFT`] have another record. `None` for what is no
/// query with one question.
pub(crate) fn answer(query: &[u8]) -> Option<Vec<u8>> {
    let mut end = HEADER;
    while let length @ 1.. = *query.get(end)? {
        end += 1 + usize::from(length);
    }
    let question = query.get(HEADER..end + 5)?;
    let address = address(number(question)?);
    let mut answer = Vec::with_capacity(HEADER + question.len() + 16);
    answer.extend(query.get(..2)?);
    // QR, RD, RA; one question, one answer.
    answer.extend([0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    answer.extend(question);
    // A pointer to the question's name (RFC 1035, section 4.1.4), A, IN.
    answer.extend([0xc0, HEADER as u8, 0, 1, 0, 1]);
    answer.extend(TTL.to_be_bytes());
    answer.extend([0, 4]);
    answer.extend(address.octets());
    if question.get(1) == Some(&(LEFT as u8)) {
        answer[7] = 2;
        // TXT, with an empty string.
        answer.extend([0xc0, HEADER as u8, 0, 16, 0, 1]);
        answer.extend(TTL.to_be_bytes());
        answer.extend([0, 1, 0]);
    }
    Some(answer)
}

/// The id of a message.
pub(crate) fn id(message: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes([*message.first()?, *message.get(1)?]))
}

/// Of an answer: the number of its question's name, and its last address.
pub(crate) fn told(message: &[u8]) -> Option<(u32, Ipv4Addr)> {
    let message = hickory_proto::op::Message::from_vec(message).ok()?;
    let name = message.queries.first()?.name.iter().next()?.to_vec();
    let address = message.answers.iter().rev().find_map(|record| {
        let hickory_proto::rr::RData::A(address) = &record.data else {
            return None;
        };
        Some(address.0)
    })?;
    Some((digits(&name)?, address))
}

/// The number in the first label of a question.
fn number(question: &[u8]) -> Option<u32> {
    let length = usize::from(*question.first()?);
    digits(question.get(1..=length)?)
}

/// The number that a label ends in.
pub(crate) fn digits(label: &[u8]) -> Option<u32> {
    let start = label.iter().rposition(|byte| !byte.is_ascii_digit())? + 1;
    str::from_utf8(&label[start..]).ok()?.parse().ok()
}
