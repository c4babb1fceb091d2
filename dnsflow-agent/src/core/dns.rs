//! Reads a DNS answer: which addresses the question's name leads to, and for how long.
//!
//! hickory-proto decodes; this module decides what counts. Only the Answer section does
//! (RFC 1035, section 4.1.3), and in it only what the question's name reaches over CNAMEs.

use std::{net::IpAddr, time::Duration};

use hickory_proto::{
    op::{Header, MessageType, OpCode, Query, ResponseCode},
    rr::{DNSClass, Name, RData, Record, RecordType},
    serialize::binary::{BinDecodable, BinDecoder},
};

use super::name::{DomainName, NameError};

/// How many CNAMEs are followed from the question's name.
pub const CNAME_CHAIN_MAX: usize = 16;
/// How many records of the Answer section are looked at; a message with more is refused.
pub const ANSWER_RECORDS_MAX: u16 = 1024;

/// What a DNS answer says about the name that was asked for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Answer {
    /// The name of the question, lower case.
    pub name: DomainName,
    /// The addresses that it leads to, each once, with the shortest TTL on the way to it.
    pub addresses: Vec<(IpAddr, Duration)>,
}

/// Why a message is no usable answer.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DnsError {
    /// It cannot be decoded.
    #[error("malformed DNS message: {0}")]
    Malformed(String),
    /// QR is 0 or OPCODE is not QUERY.
    #[error("not the response to a standard query")]
    NotAResponse,
    /// RCODE is not 0.
    #[error("the response is an error")]
    ErrorResponse,
    /// TC is 1: the client asks again over TCP.
    #[error("the response is truncated")]
    Truncated,
    /// Not exactly one question.
    #[error("{0} questions instead of one")]
    Questions(u16),
    /// The question is not of class IN, or not for addresses.
    #[error("the question is not for addresses of class IN")]
    OtherQuestion,
    /// More records than are looked at.
    #[error("{0} records in the Answer section")]
    TooManyRecords(u16),
    /// The chain of CNAMEs is a loop, or too long.
    #[error("the chain of CNAMEs has no end within {CNAME_CHAIN_MAX} steps")]
    CnameChain,
}

impl From<NameError> for DnsError {
    fn from(error: NameError) -> Self {
        Self::Malformed(error.to_string())
    }
}

impl From<hickory_proto::serialize::binary::DecodeError> for DnsError {
    fn from(error: hickory_proto::serialize::binary::DecodeError) -> Self {
        Self::Malformed(error.to_string())
    }
}

impl Answer {
    /// Decodes the payload of a DNS response over UDP.
    pub fn decode(message: &[u8]) -> Result<Self, DnsError> {
        let mut decoder = BinDecoder::new(message);
        let header = Header::read(&mut decoder)?;
        if header.message_type != MessageType::Response || header.op_code != OpCode::Query {
            return Err(DnsError::NotAResponse);
        }
        if header.response_code != ResponseCode::NoError {
            return Err(DnsError::ErrorResponse);
        }
        if header.truncation {
            return Err(DnsError::Truncated);
        }
        if header.counts.queries != 1 {
            return Err(DnsError::Questions(header.counts.queries));
        }
        if header.counts.answers > ANSWER_RECORDS_MAX {
            return Err(DnsError::TooManyRecords(header.counts.answers));
        }
        let question = Query::read(&mut decoder)?;
        let wanted = question.query_type;
        if question.query_class != DNSClass::IN
            || !matches!(wanted, RecordType::A | RecordType::AAAA)
        {
            return Err(DnsError::OtherQuestion);
        }
        let mut records = Vec::with_capacity(usize::from(header.counts.answers).min(32));
        for _ in 0..header.counts.answers {
            let record = Record::read(&mut decoder)?;
            if record.dns_class == DNSClass::IN {
                records.push(record);
            }
        }
        Ok(Self {
            name: domain_name(&question.name)?,
            addresses: addresses(&question.name, &records)?,
        })
    }
}

/// Follows the CNAMEs from `question`, whatever the order of the records, and collects the
/// addresses at the end of the chain.
fn addresses(question: &Name, records: &[Record]) -> Result<Vec<(IpAddr, Duration)>, DnsError> {
    let mut owner = question;
    let mut chain_ttl = u32::MAX;
    for _ in 0..=CNAME_CHAIN_MAX {
        // Name compares without regard to case (RFC 4343).
        let alias = records.iter().find_map(|record| match &record.data {
            RData::CNAME(target) if record.name == *owner => Some((&target.0, ttl(record))),
            _ => None,
        });
        if let Some((target, ttl)) = alias {
            owner = target;
            chain_ttl = chain_ttl.min(ttl);
            continue;
        }
        let mut found: Vec<(IpAddr, Duration)> = Vec::new();
        for record in records.iter().filter(|record| record.name == *owner) {
            let address = match record.data {
                RData::A(a) => IpAddr::V4(a.0),
                RData::AAAA(aaaa) => IpAddr::V6(aaaa.0),
                _ => continue,
            };
            let ttl = Duration::from_secs(chain_ttl.min(ttl(record)).into());
            match found.iter_mut().find(|(known, _)| *known == address) {
                Some((_, known)) => *known = ttl.min(*known),
                None => found.push((address, ttl)),
            }
        }
        return Ok(found);
    }
    Err(DnsError::CnameChain)
}

/// The record's TTL in seconds; one with the top bit set counts as zero (RFC 2181, section 8).
fn ttl(record: &Record) -> u32 {
    if record.ttl > i32::MAX as u32 {
        0
    } else {
        record.ttl
    }
}

fn domain_name(name: &Name) -> Result<DomainName, NameError> {
    DomainName::from_labels(name.iter())
}

#[cfg(test)]
mod tests;
