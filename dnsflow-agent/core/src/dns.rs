//! Reads a DNS answer: which addresses the question's name leads to, and for how long.
//!
//! hickory-proto decodes the message; this module decides which records count. Only the Answer
//! section counts (RFC 1035, section 4.1.3). In that section, a record counts if the question's
//! name reaches it over CNAMEs and if it is of the question's type.
//!
//! # Which name the rules are asked about
//!
//! For addresses: the name of the question. For SVCB and HTTPS: the host's name, without the labels
//! that a client puts in front of it for the port and the scheme (`_8443._https.example.com`; RFC
//! 9460, sections 2.3 and 9.1). Its user wrote `example.com`, and a firewall's `dnsName` cannot hold
//! such labels. With them, neither an exact rule nor `*.example.com` would ever cover a service on
//! another port. Only the labels of a port and a known scheme are left out. Any other name with an
//! underscore (`_acme-challenge.example.com`, RFC 8552) may be delegated to somebody who has no say
//! over the host's addresses, and stands for itself.
//!
//! The target of a service's record is not matched against rules, and neither is the target of a
//! CNAME: the record's hints count for the name that was asked for. A client also asks for the
//! target's own addresses (RFC 9460, section 3). That is another question, which names only the
//! target.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    time::Duration,
};

use hickory_proto::{
    op::{Header, MessageType, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, Name, RData, Record, RecordType,
        rdata::svcb::{SVCB, SvcParamValue},
    },
    serialize::binary::{BinDecodable, BinDecoder},
};

use super::name::{DomainName, NameError};

/// At most this many CNAMEs are followed from the question's name.
const CNAME_CHAIN_MAX: usize = 16;
/// At most this many records of the Answer section are read; a message with more is refused.
const ANSWER_RECORDS_MAX: u16 = 1024;
/// At most this many addresses count; an answer with more is refused. One record with hints can
/// hold thousands.
pub const ADDRESSES_MAX: usize = 1024;

/// The type of a question that asks for addresses or services.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum QuestionType {
    /// IPv4 addresses (RFC 1035, section 3.4.1).
    A,
    /// IPv6 addresses (RFC 3596).
    Aaaa,
    /// A service (RFC 9460).
    Svcb,
    /// A service over HTTP (RFC 9460, section 9).
    Https,
}

impl QuestionType {
    fn new(record_type: RecordType) -> Option<Self> {
        match record_type {
            RecordType::A => Some(Self::A),
            RecordType::AAAA => Some(Self::Aaaa),
            RecordType::SVCB => Some(Self::Svcb),
            RecordType::HTTPS => Some(Self::Https),
            _ => None,
        }
    }

    /// The number of the type (IANA, "Resource Record (RR) TYPEs").
    pub const fn code(self) -> u16 {
        match self {
            Self::A => 1,
            Self::Aaaa => 28,
            Self::Svcb => 64,
            Self::Https => 65,
        }
    }

    /// Whether the question is for a service.
    const fn is_service(self) -> bool {
        matches!(self, Self::Svcb | Self::Https)
    }
}

/// The one question of a message; its class is IN.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Question {
    /// The name, lower case.
    pub name: DomainName,
    /// The type.
    pub kind: QuestionType,
}

/// What a DNS answer says about the name that was asked for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Answer {
    /// The message's id.
    pub id: u16,
    /// The question, which the answer repeats.
    pub question: Question,
    /// The host's name, which rules are matched against: the question's name, for a service without
    /// its leading labels with an underscore.
    pub name: DomainName,
    /// The addresses that the name leads to, each once, with the shortest TTL on the way to the
    /// address.
    pub addresses: Vec<(IpAddr, Duration)>,
}

/// Why a message is no usable answer.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DnsError {
    /// The message cannot be decoded.
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
    /// The question is not of class IN, or not for addresses or services.
    #[error("the question is not for addresses or services of class IN")]
    OtherQuestion,
    /// Too many records in the Answer section.
    #[error("{0} records in the Answer section")]
    TooManyRecords(u16),
    /// More addresses than [`ADDRESSES_MAX`].
    #[error("more than {ADDRESSES_MAX} addresses")]
    TooManyAddresses,
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
    /// Decodes a DNS response: the payload of a UDP datagram, or one message of a TCP stream
    /// without its length.
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
        let kind = QuestionType::new(question.query_type)
            .filter(|_| question.query_class == DNSClass::IN)
            .ok_or(DnsError::OtherQuestion)?;
        let mut records = Vec::with_capacity(usize::from(header.counts.answers).min(32));
        for _ in 0..header.counts.answers {
            let record = Record::read(&mut decoder)?;
            if record.dns_class == DNSClass::IN {
                records.push(record);
            }
        }
        let name = host_name(&question.name, kind)?;
        let (owner, chain_ttl) = end_of_chain(&question.name, &records)?;
        let mut found = Found::default();
        if kind.is_service() {
            found.services(owner, chain_ttl, kind, &records)?;
        } else {
            found.hosts(owner, chain_ttl, kind, &records)?;
        }
        Ok(Self {
            id: header.id,
            question: Question {
                name: domain_name(&question.name)?,
                kind,
            },
            name,
            addresses: found.addresses,
        })
    }
}

/// The name that rules are matched against.
fn host_name(question: &Name, kind: QuestionType) -> Result<DomainName, DnsError> {
    let scheme: &[u8] = match kind {
        QuestionType::A | QuestionType::Aaaa => return Ok(domain_name(question)?),
        // The only mapping of SVCB but HTTPS (RFC 9461).
        QuestionType::Svcb => b"_dns",
        QuestionType::Https => b"_https",
    };
    let is_scheme = |label: Option<&[u8]>| label.is_some_and(|l| l.eq_ignore_ascii_case(scheme));
    let mut labels = question.iter();
    let [first, second] = [labels.next(), labels.next()];
    let in_front = match kind {
        _ if first.is_some_and(is_port) && is_scheme(second) => 2,
        QuestionType::Svcb if is_scheme(first) => 1,
        _ => 0,
    };
    // A name that has only such labels is not the name of a host.
    DomainName::from_labels(question.iter().skip(in_front)).map_err(|_| DnsError::OtherQuestion)
}

/// Whether a label stands for a port (RFC 9460, section 2.3), as a client writes it: without a sign and without zeros
/// in front.
fn is_port(label: &[u8]) -> bool {
    let digits = label.strip_prefix(b"_").map(str::from_utf8);
    let Some(Ok(digits)) = digits else {
        return false;
    };
    let number = digits.parse::<u16>();
    number.is_ok_and(|number| number.to_string() == digits)
}

/// Follows the CNAMEs from `question` to the name that has none, and returns the shortest TTL on
/// the way. The records may have any order.
fn end_of_chain<'a>(
    question: &'a Name,
    records: &'a [Record],
) -> Result<(&'a Name, u32), DnsError> {
    // The first of each owner counts. Name compares without regard to case (RFC 4343).
    let mut aliases = HashMap::new();
    for record in records {
        if let RData::CNAME(target) = &record.data {
            let alias = (&target.0, ttl(record));
            aliases.entry(&record.name).or_insert(alias);
        }
    }
    let mut owner = question;
    let mut chain_ttl = u32::MAX;
    for _ in 0..=CNAME_CHAIN_MAX {
        let Some((target, ttl)) = aliases.get(owner) else {
            return Ok((owner, chain_ttl));
        };
        owner = target;
        chain_ttl = chain_ttl.min(*ttl);
    }
    Err(DnsError::CnameChain)
}

/// The addresses in the records at the end of the chain.
#[derive(Debug, Default)]
struct Found {
    addresses: Vec<(IpAddr, Duration)>,
    /// The place of each address.
    places: HashMap<IpAddr, usize>,
}

impl Found {
    fn hosts(
        &mut self,
        owner: &Name,
        chain_ttl: u32,
        kind: QuestionType,
        records: &[Record],
    ) -> Result<(), DnsError> {
        for record in records.iter().filter(|record| record.name == *owner) {
            let address = match (&record.data, kind) {
                (RData::A(a), QuestionType::A) => IpAddr::V4(a.0),
                (RData::AAAA(aaaa), QuestionType::Aaaa) => IpAddr::V6(aaaa.0),
                _ => continue,
            };
            self.address(address, chain_ttl.min(ttl(record)))?;
        }
        Ok(())
    }

    fn services(
        &mut self,
        owner: &Name,
        chain_ttl: u32,
        kind: QuestionType,
        records: &[Record],
    ) -> Result<(), DnsError> {
        let services: Vec<(&SVCB, u32)> = records
            .iter()
            .filter(|record| record.name == *owner)
            .filter_map(|record| {
                let service = match (&record.data, kind) {
                    (RData::SVCB(service), QuestionType::Svcb) => service,
                    (RData::HTTPS(service), QuestionType::Https) => &service.0,
                    _ => return None,
                };
                Some((service, chain_ttl.min(ttl(record))))
            })
            .collect();
        // If one record is an alias, the other records are ignored (RFC 9460, section 2.4.1), and
        // so are the parameters of the alias (section 2.4.2).
        if services.iter().any(|(service, _)| is_alias(service)) {
            return Ok(());
        }
        for (service, ttl) in services {
            self.hints(service, ttl)?;
        }
        Ok(())
    }

    /// The address hints of a service (RFC 9460, section 7.3).
    fn hints(&mut self, service: &SVCB, ttl: u32) -> Result<(), DnsError> {
        for (_, value) in &service.svc_params {
            match value {
                SvcParamValue::Ipv4Hint(hints) => {
                    for hint in &hints.0 {
                        self.address(IpAddr::V4(hint.0), ttl)?;
                    }
                }
                SvcParamValue::Ipv6Hint(hints) => {
                    for hint in &hints.0 {
                        self.address(IpAddr::V6(hint.0), ttl)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds an address, or keeps the shorter TTL of one that is there.
    fn address(&mut self, address: IpAddr, ttl: u32) -> Result<(), DnsError> {
        let ttl = Duration::from_secs(ttl.into());
        let next = self.addresses.len();
        let place = match self.places.entry(address) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(_) if next >= ADDRESSES_MAX => return Err(DnsError::TooManyAddresses),
            Entry::Vacant(new) => *new.insert(next),
        };
        match self.addresses.get_mut(place) {
            Some((_, known)) => *known = ttl.min(*known),
            None => self.addresses.push((address, ttl)),
        }
        Ok(())
    }
}

/// SvcPriority 0 is AliasMode (RFC 9460, section 2.4.1).
fn is_alias(service: &SVCB) -> bool {
    service.svc_priority == 0
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
