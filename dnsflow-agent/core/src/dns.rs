//! Reads a DNS answer: the addresses to which the question's name leads, with their TTLs.
//!
//! hickory-proto decodes the message. This module decides which records count, and limits the cost of a message. Only
//! the Answer section counts (RFC 1035, section 4.1.3). A record counts if CNAMEs lead to it from the question's
//! name, and if it has the question's type. If a rule denies the name, every address in the section counts
//! ([`Response::every_address`]), because clients accept different records.
//!
//! # Cost of a message
//!
//! The sender of a message chooses its shape. The question is decoded first ([`Response::read`]). If no rule mentions
//! its name, no record is decoded. Otherwise only records that may count are decoded. The octets and pointers of a
//! name are counted before the name is decoded, because a few bytes can stand for a long name, or for thousands of
//! pointers to pointers. All names together have a limit. Reading ends at the limit of addresses.
//!
//! # Name for the rules
//!
//! For addresses, rules are asked about the name of the question. For SVCB and HTTPS, they are asked about the host's
//! name. A client puts labels for the port and the scheme in front of this name (`_8443._https.example.com`; RFC
//! 9460, sections 2.3 and 9.1). The user has entered `example.com`, and a firewall's `dnsName` cannot hold such
//! labels. With them, neither an exact rule nor `*.example.com` would ever cover a service on another port. Only the
//! labels of a port and a known scheme are left out. Any other name with an underscore
//! (`_acme-challenge.example.com`, RFC 8552) stands for itself: it may be delegated to somebody who has no say over
//! the host's addresses.
//!
//! Rules are not asked about the target of a service's record or of a CNAME. The record's hints count for the name of
//! the question. A client also asks for the target's own addresses (RFC 9460, section 3). That is another question,
//! with the target's name alone.

pub(crate) mod answers;
pub mod fragments;
pub(crate) mod opened;
pub mod tcp;

use std::{borrow::Cow, collections::hash_map::Entry, fmt, net::IpAddr, time::Duration};

use hickory_proto::{
    op::{Header, MessageType, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, Name, RData, Record, RecordType,
        rdata::svcb::{SVCB, SvcParamValue},
    },
    serialize::binary::{BinDecodable, BinDecoder},
};

use crate::{
    tools::table::HashMap,
    values::{
        limits::{DNS_MESSAGE_MIN, LEFT_OUT_NAMED_MAX},
        name::{DomainName, NameError},
    },
};

/// At most this many CNAMEs are followed from the question's name.
const CNAME_CHAIN_MAX: usize = 16;
/// At most this many records of the Answer section are read; those behind them are left out.
const ANSWER_RECORDS_MAX: u16 = 1024;
/// At most this many addresses of a message count; those behind them are left out. One record with
/// hints can hold thousands.
pub const ADDRESSES_MAX: usize = 1024;
/// At most this many octets of names are decoded in a message: as many as the longest message could
/// hold without pointers. With pointers, a message can stand for a hundred times as many.
const NAME_OCTETS_MAX: usize = u16::MAX as usize;
/// The octets of a pointer (RFC 1035, section 4.1.4).
const POINTER_LEN: usize = 2;
/// The octets between a record's owner and its data: type, class, TTL and length (RFC 1035, section
/// 4.1.3).
const RECORD_HEAD_LEN: usize = 10;
/// The octets of a service's priority, in front of its target (RFC 9460, section 2.2).
const PRIORITY_LEN: usize = 2;
/// The octets of a parameter's key and length, in front of its value (RFC 9460, section 2.2).
const PARAMETER_HEAD_LEN: usize = 4;
/// The key of a service's IPv4 hints (RFC 9460, section 14.3.2).
const IPV4_HINT: u16 = 4;
/// The key of a service's IPv6 hints (RFC 9460, section 14.3.2).
const IPV6_HINT: u16 = 6;

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
    /// Another type, whose answers are not read but for a name that a rule denies.
    Other(u16),
}

impl QuestionType {
    fn new(record_type: RecordType) -> Self {
        match record_type {
            RecordType::A => Self::A,
            RecordType::AAAA => Self::Aaaa,
            RecordType::SVCB => Self::Svcb,
            RecordType::HTTPS => Self::Https,
            other => Self::Other(other.into()),
        }
    }

    /// The number of the type (IANA, "Resource Record (RR) TYPEs").
    pub const fn code(self) -> u16 {
        match self {
            Self::A => 1,
            Self::Aaaa => 28,
            Self::Svcb => 64,
            Self::Https => 65,
            Self::Other(code) => code,
        }
    }

    /// Whether the question is for a service.
    const fn is_service(self) -> bool {
        matches!(self, Self::Svcb | Self::Https)
    }
}

/// The one question of a message; its class is IN.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Question {
    /// The name, lower case.
    pub name: DomainName,
    /// The type.
    pub kind: QuestionType,
}

impl Question {
    /// Whether it is for addresses. Of a name with addresses, many clients also ask for records that it does not have.
    pub fn is_for_addresses(&self) -> bool {
        matches!(self.kind, QuestionType::A | QuestionType::Aaaa)
    }
}

/// A response from which a client has no address.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Failure {
    /// The question, which the response repeats.
    pub question: Question,
    /// Why it has none.
    pub kind: FailureKind,
}

/// Why a client has no address from a response.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FailureKind {
    /// An error, with its response code (IANA, "DNS RCODEs").
    Error(u16),
    /// The name is there, without a record of the type (RFC 2308, section 2.2: NODATA).
    NoData {
        /// The name that has none, if CNAMEs lead to it from the question's name.
        alias: Option<DomainName>,
    },
    /// The answer is cut: the client asks again over TCP (RFC 2181, section 9).
    Truncated,
}

impl Failure {
    /// Reads one. `None`: the message is no response, or has records.
    pub fn read(message: &[u8]) -> Option<Self> {
        let response = match Response::or_failure(message.into()).ok()? {
            Ok(response) => response,
            Err(failure) => return Some(failure),
        };
        let kind = match response.is_truncated {
            true => FailureKind::Truncated,
            false => FailureKind::NoData { alias: None },
        };
        (response.records == 0).then_some(Self {
            question: response.question,
            kind,
        })
    }

    /// Whether the name is there, and has no record of the type.
    pub fn is_no_data(&self) -> bool {
        matches!(self.kind, FailureKind::NoData { .. })
    }

    /// Whether it holds for every type of question (RFC 8020).
    pub fn is_for_all_types(&self) -> bool {
        self.kind == FailureKind::Error(ResponseCode::NXDomain.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lacking = Lacking(self.question.kind);
        match &self.kind {
            FailureKind::NoData { alias: None } => write!(f, "that it has {lacking}"),
            FailureKind::NoData { alias: Some(alias) } => {
                write!(
                    f,
                    "that it is an alias (CNAME) of {alias}, which has {lacking}"
                )
            }
            FailureKind::Error(2) => f.write_str("SERVFAIL"),
            FailureKind::Error(3) => f.write_str("NXDOMAIN"),
            FailureKind::Error(5) => f.write_str("REFUSED"),
            FailureKind::Error(code) => write!(f, "response code {code}"),
            FailureKind::Truncated => f.write_str("to ask over TCP"),
        }
    }
}

/// What a name does not have: a record of this type.
struct Lacking(QuestionType);

impl fmt::Display for Lacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            QuestionType::A => f.write_str("no IPv4 address"),
            QuestionType::Aaaa => f.write_str("no IPv6 address"),
            other => write!(f, "no record of type {}", other.code()),
        }
    }
}

/// A response whose question is decoded, and no record.
#[derive(Clone, Debug)]
pub struct Response<'a> {
    message: Cow<'a, [u8]>,
    /// The message's id.
    pub id: u16,
    /// The question, which the response repeats.
    pub question: Question,
    /// The host's name, which rules are matched against: the question's name, for a service without
    /// the labels of its port and its scheme.
    pub name: DomainName,
    /// The question's name, as hickory-proto has it.
    asked: Name,
    /// How many records the Answer section says to have, and where the first one begins.
    records: u16,
    start: usize,
    /// How many octets of names may still be decoded.
    octets: usize,
    /// Whether TC is 1.
    is_truncated: bool,
}

/// The addresses of a DNS answer for the question's name.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Answer {
    /// As of the [`Response`].
    pub id: u16,
    /// As of the [`Response`].
    pub question: Question,
    /// As of the [`Response`].
    pub name: DomainName,
    /// The addresses that the name leads to, each once, with the shortest TTL on the way to the
    /// address.
    pub addresses: Vec<(IpAddr, Duration)>,
    /// Upper bound for the number of addresses behind the limit: they are counted, and not compared.
    pub left_out: usize,
    /// The first of these, for people who ask: at most [`LEFT_OUT_NAMED_MAX`].
    pub beyond: Vec<IpAddr>,
    /// Of an answer without an address: where CNAMEs lead from the question's name.
    pub alias: Option<DomainName>,
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
    /// More octets of names than a message may have.
    #[error("more than {NAME_OCTETS_MAX} octets of names")]
    TooManyNameOctets,
    /// The chain of CNAMEs is a loop, or too long.
    #[error("the chain of CNAMEs has no end within {CNAME_CHAIN_MAX} steps")]
    CnameChain,
}

impl DnsError {
    fn too_short() -> Self {
        Self::Malformed("the message ends too early".to_owned())
    }
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

impl<'a> Response<'a> {
    /// Decodes header and question of a DNS response: the payload of a UDP datagram, or one message of
    /// a TCP stream without its length.
    pub fn read(message: impl Into<Cow<'a, [u8]>>) -> Result<Self, DnsError> {
        Self::or_failure(message.into())?.map_err(|_| DnsError::ErrorResponse)
    }

    /// The same, or what a response with an error says.
    pub fn or_failure(message: Cow<'a, [u8]>) -> Result<Result<Self, Failure>, DnsError> {
        let mut decoder = BinDecoder::new(&message);
        let header = Header::read(&mut decoder)?;
        if header.message_type != MessageType::Response || header.op_code != OpCode::Query {
            return Err(DnsError::NotAResponse);
        }
        if header.counts.queries != 1 {
            return Err(DnsError::Questions(header.counts.queries));
        }
        let mut octets = NAME_OCTETS_MAX;
        count_name(&message, DNS_MESSAGE_MIN, &mut octets)?;
        let question = Query::read(&mut decoder)?;
        if question.query_class != DNSClass::IN {
            return Err(DnsError::OtherQuestion);
        }
        let kind = QuestionType::new(question.query_type);
        let asked = domain_name(&question.name)?;
        if header.response_code != ResponseCode::NoError {
            return Ok(Err(Failure {
                question: Question { name: asked, kind },
                kind: FailureKind::Error(header.response_code.into()),
            }));
        }
        let name = host_name(&question.name, &asked, kind)?;
        let start = decoder.index();
        let response = Self {
            message,
            id: header.id,
            question: Question { name: asked, kind },
            name,
            asked: question.name,
            records: header.counts.answers,
            start,
            octets,
            is_truncated: header.truncation,
        };
        Ok(Ok(response))
    }

    /// Whether the message is cut: the client asks again over TCP.
    pub fn is_truncated(&self) -> bool {
        self.is_truncated
    }

    /// Every address in the Answer section, for a name that a rule denies: a client may use the address whatever the
    /// owner of its record, also of a truncated message, and in front of a malformed record. At most `most` count, and
    /// never more than [`ADDRESSES_MAX`]. No name is decoded.
    pub fn every_address(&self, most: usize) -> Answer {
        let mut found = Found::new(most.min(ADDRESSES_MAX));
        let mut place = self.start;
        for _ in 0..self.records {
            let Ok(head) = Head::read(&self.message, place) else {
                break;
            };
            found.every(&self.message[..head.end], head);
            place = head.end;
        }
        Answer {
            id: self.id,
            question: self.question.clone(),
            name: self.name.clone(),
            addresses: found.addresses,
            left_out: found.left_out,
            beyond: found.beyond,
            alias: None,
        }
    }

    /// Decodes the records. At most `most` addresses count, and never more than [`ADDRESSES_MAX`].
    pub fn answer(self, most: usize) -> Result<Answer, DnsError> {
        if self.is_truncated {
            return Err(DnsError::Truncated);
        }
        if matches!(self.question.kind, QuestionType::Other(_)) {
            return Err(DnsError::OtherQuestion);
        }
        let records = self.records()?;
        let mut found = Found::new(most.min(ADDRESSES_MAX));
        found.left_out = self.records.saturating_sub(ANSWER_RECORDS_MAX).into();
        let (owner, chain_ttl) = end_of_chain(&self.asked, &records)?;
        let kind = self.question.kind;
        if kind.is_service() {
            found.services(owner, chain_ttl, kind, &records);
        } else {
            found.hosts(owner, chain_ttl, kind, &records);
        }
        let Found {
            addresses,
            left_out,
            beyond,
            ..
        } = found;
        let is_alias = addresses.is_empty() && *owner != self.asked;
        let alias = is_alias.then(|| domain_name(owner)).transpose()?;
        Ok(Answer {
            id: self.id,
            question: self.question,
            name: self.name,
            addresses,
            left_out,
            beyond,
            alias,
        })
    }

    /// The records that may count: those of the question's type, and CNAMEs.
    fn records(&self) -> Result<Vec<Record>, DnsError> {
        let message = &self.message[..];
        let mut octets = self.octets;
        let mut records = Vec::with_capacity(usize::from(self.records).min(32));
        let mut place = self.start;
        for _ in 0..self.records.min(ANSWER_RECORDS_MAX) {
            let Head {
                code,
                class,
                data,
                end,
                ..
            } = Head::read(message, place)?;
            let names_data = match RecordType::from(code) {
                RecordType::CNAME => Some(data),
                kind if code == self.question.kind.code() => {
                    let is_service = matches!(kind, RecordType::SVCB | RecordType::HTTPS);
                    is_service.then_some(data + PRIORITY_LEN)
                }
                _ => {
                    place = end;
                    continue;
                }
            };
            if DNSClass::from(class) == DNSClass::IN {
                for name in [Some(place), names_data].into_iter().flatten() {
                    count_name(message, name, &mut octets)?;
                }
                let at = u16::try_from(place).map_err(|_| DnsError::too_short())?;
                records.push(Record::read(&mut BinDecoder::new(message).clone(at))?);
            }
            place = end;
        }
        Ok(records)
    }
}

impl Answer {
    /// Decodes a DNS response with all its addresses, up to [`ADDRESSES_MAX`].
    pub fn decode(message: &[u8]) -> Result<Self, DnsError> {
        Response::read(message)?.answer(ADDRESSES_MAX)
    }

    /// Its failure, if the question is for addresses and it has none: CNAMEs alone, or nothing.
    pub fn failure(&self) -> Option<Failure> {
        let has_none = self.addresses.is_empty() && self.left_out == 0;
        (has_none && self.question.is_for_addresses()).then(|| Failure {
            question: self.question.clone(),
            kind: FailureKind::NoData {
                alias: self.alias.clone(),
            },
        })
    }
}

/// The fields in front of a record's data.
#[derive(Clone, Copy, Debug)]
struct Head {
    code: u16,
    class: u16,
    ttl: u32,
    /// Where its data begin, and where they end.
    data: usize,
    end: usize,
}

impl Head {
    /// Reads it at this place, and follows no pointer.
    fn read(message: &[u8], place: usize) -> Result<Self, DnsError> {
        let at = end_of_name(message, place)?;
        let data = at + RECORD_HEAD_LEN;
        let length = u16_at(message, data - 2)?;
        let end = data + usize::from(length);
        if end > message.len() {
            return Err(DnsError::too_short());
        }
        Ok(Self {
            code: u16_at(message, at)?,
            class: u16_at(message, at + 2)?,
            ttl: u32_at(message, at + 4)?,
            data,
            end,
        })
    }
}

/// Where the name at this place ends. No pointer is followed.
fn end_of_name(message: &[u8], place: usize) -> Result<usize, DnsError> {
    let mut at = place;
    loop {
        match Piece::at(message, at)? {
            Piece::Label(octets) => at += octets,
            Piece::Root => return Ok(at + 1),
            Piece::Pointer(_) => return Ok(at + POINTER_LEN),
        }
    }
}

fn u16_at(message: &[u8], at: usize) -> Result<u16, DnsError> {
    octets_at(message, at).map(u16::from_be_bytes)
}

fn u32_at(message: &[u8], at: usize) -> Result<u32, DnsError> {
    octets_at(message, at).map(u32::from_be_bytes)
}

fn octets_at<const N: usize>(message: &[u8], at: usize) -> Result<[u8; N], DnsError> {
    let octets = message.get(at..).and_then(<[u8]>::first_chunk);
    octets.copied().ok_or_else(DnsError::too_short)
}

/// The element at a place of a name (RFC 1035, section 4.1.4).
enum Piece {
    Root,
    /// So many octets, with the length.
    Label(usize),
    /// To this place.
    Pointer(usize),
}

impl Piece {
    fn at(message: &[u8], at: usize) -> Result<Self, DnsError> {
        let first = *message.get(at).ok_or_else(DnsError::too_short)?;
        match first >> 6 {
            0b00 if first == 0 => Ok(Self::Root),
            0b00 => Ok(Self::Label(1 + usize::from(first))),
            0b11 => Ok(Self::Pointer(usize::from(u16_at(message, at)? & 0x3fff))),
            _ => Err(DnsError::Malformed("a label of an unknown type".to_owned())),
        }
    }
}

/// Takes the cost of decoding the name at this place from `octets`: its labels, and the pointers on the way.
fn count_name(message: &[u8], place: usize, octets: &mut usize) -> Result<(), DnsError> {
    // Where the labels begin that are read now: each pointer leads before them, so that there is an end.
    let (mut begin, mut at) = (place, place);
    loop {
        let read = match Piece::at(message, at)? {
            Piece::Root => return Ok(()),
            Piece::Label(octets) => {
                at += octets;
                octets
            }
            Piece::Pointer(to) if to < begin => {
                (begin, at) = (to, to);
                POINTER_LEN
            }
            Piece::Pointer(_) => {
                let reason = "a pointer leads to no earlier place";
                return Err(DnsError::Malformed(reason.to_owned()));
            }
        };
        *octets = octets
            .checked_sub(read)
            .ok_or(DnsError::TooManyNameOctets)?;
    }
}

/// The name that rules are matched against, of this question for a name.
fn host_name(
    question: &Name,
    asked: &DomainName,
    kind: QuestionType,
) -> Result<DomainName, DnsError> {
    let scheme: &[u8] = match kind {
        QuestionType::A | QuestionType::Aaaa | QuestionType::Other(_) => {
            return Ok(asked.clone());
        }
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
    let mut aliases = HashMap::default();
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
    most: usize,
    left_out: usize,
    beyond: Vec<IpAddr>,
}

impl Found {
    fn new(most: usize) -> Self {
        Self {
            addresses: Vec::new(),
            places: HashMap::default(),
            most,
            left_out: 0,
            beyond: Vec::new(),
        }
    }

    fn hosts(&mut self, owner: &Name, chain_ttl: u32, kind: QuestionType, records: &[Record]) {
        for record in records.iter().filter(|record| record.name == *owner) {
            let address = match (&record.data, kind) {
                (RData::A(a), QuestionType::A) => IpAddr::V4(a.0),
                (RData::AAAA(aaaa), QuestionType::Aaaa) => IpAddr::V6(aaaa.0),
                _ => continue,
            };
            self.address(address, chain_ttl.min(ttl(record)));
        }
    }

    fn services(&mut self, owner: &Name, chain_ttl: u32, kind: QuestionType, records: &[Record]) {
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
            return;
        }
        for (service, ttl) in services {
            self.hints(service, ttl);
        }
    }

    /// The addresses of a record, whatever its owner and its class. The message ends with the record.
    fn every(&mut self, message: &[u8], head: Head) {
        let data = &message[head.data..];
        let ttl = usable_ttl(head.ttl);
        match RecordType::from(head.code) {
            RecordType::A => self.addresses::<4>(data, ttl),
            RecordType::AAAA => self.addresses::<16>(data, ttl),
            RecordType::SVCB | RecordType::HTTPS => {
                let mut at = end_of_name(message, head.data + PRIORITY_LEN);
                while let Ok(place) = at {
                    at = self.parameter(message, place, ttl);
                }
            }
            _ => {}
        }
    }

    /// The addresses in a parameter of a service. Returns where the parameter ends.
    fn parameter(&mut self, message: &[u8], at: usize, ttl: u32) -> Result<usize, DnsError> {
        let (key, length) = (u16_at(message, at)?, u16_at(message, at + 2)?);
        let value = at + PARAMETER_HEAD_LEN;
        let end = value + usize::from(length);
        let value = message.get(value..end).ok_or_else(DnsError::too_short)?;
        match key {
            IPV4_HINT => self.addresses::<4>(value, ttl),
            IPV6_HINT => self.addresses::<16>(value, ttl),
            _ => {}
        }
        Ok(end)
    }

    /// Addresses of `N` octets, one behind the other.
    fn addresses<const N: usize>(&mut self, octets: &[u8], ttl: u32)
    where
        IpAddr: From<[u8; N]>,
    {
        for address in octets.as_chunks::<N>().0 {
            self.address((*address).into(), ttl);
        }
    }

    /// The address hints of a service (RFC 9460, section 7.3).
    fn hints(&mut self, service: &SVCB, ttl: u32) {
        for (_, value) in &service.svc_params {
            match value {
                SvcParamValue::Ipv4Hint(hints) => {
                    for hint in &hints.0 {
                        self.address(IpAddr::V4(hint.0), ttl);
                    }
                }
                SvcParamValue::Ipv6Hint(hints) => {
                    for hint in &hints.0 {
                        self.address(IpAddr::V6(hint.0), ttl);
                    }
                }
                _ => {}
            }
        }
    }

    /// Adds an address, or keeps the shorter TTL of one that is there. Behind the limit, others are only counted.
    fn address(&mut self, address: IpAddr, ttl: u32) {
        let ttl = Duration::from_secs(ttl.into());
        let next = self.addresses.len();
        match self.places.entry(address) {
            Entry::Occupied(place) => {
                let known = self.addresses.get_mut(*place.get());
                known
                    .into_iter()
                    .for_each(|(_, known)| *known = ttl.min(*known));
            }
            Entry::Vacant(_) if next >= self.most => {
                self.left_out += 1;
                if self.beyond.len() < LEFT_OUT_NAMED_MAX {
                    self.beyond.push(address);
                }
            }
            Entry::Vacant(new) => {
                new.insert(next);
                self.addresses.push((address, ttl));
            }
        }
    }
}

/// SvcPriority 0 is AliasMode (RFC 9460, section 2.4.1).
fn is_alias(service: &SVCB) -> bool {
    service.svc_priority == 0
}

/// The record's TTL in seconds.
fn ttl(record: &Record) -> u32 {
    usable_ttl(record.ttl)
}

/// A TTL with the top bit set counts as zero (RFC 2181, section 8).
fn usable_ttl(ttl: u32) -> u32 {
    if ttl > i32::MAX as u32 { 0 } else { ttl }
}

fn domain_name(name: &Name) -> Result<DomainName, NameError> {
    DomainName::from_labels(name.iter())
}

#[cfg(test)]
mod tests;
