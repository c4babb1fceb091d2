//! A record of the journal in octets.

use std::{
    collections::BTreeSet,
    io::{self, Read as _},
    net::IpAddr,
    sync::Arc,
};

use dnsflow_core::{
    Timestamp,
    cache::journal::{Patterns, Record, RecordedTerm, SavedGroup},
    policy::rules::NamePattern,
    values::{flow::Tag, ids::PortId, name::DomainName},
};
use serde::{Deserialize, Serialize};

/// A [`Record`] as the file has it. Names are in wire format, times are milliseconds of `CLOCK_MONOTONIC`.
#[derive(Deserialize, Serialize)]
enum Form<'a> {
    Port(u32, &'a str, Option<&'a str>),
    PortGone(&'a str),
    /// Port, address, name, end, end where a rule denies the name, and state.
    Name(u32, IpAddr, &'a [u8], u64, u64, StateForm),
    NameGone(u32, IpAddr, &'a [u8]),
    Rules(&'a str, Option<u64>),
    Denials(u64),
    /// The bits of the tag, and the group.
    Group(u32, #[serde(borrow)] Option<GroupForm<'a>>),
}

/// The state of a name as the file has it.
#[derive(Clone, Copy, Deserialize, Serialize)]
enum StateForm {
    Counts,
    Denied,
    Ended,
    EndedAndDenied,
}

/// A [`SavedGroup`] as the file has it.
#[derive(Deserialize, Serialize)]
struct GroupForm<'a> {
    datapath: u32,
    #[serde(borrow)]
    port_groups: Vec<&'a str>,
    is_ipv6: bool,
    are_denials: bool,
    #[serde(borrow)]
    patterns: Vec<(&'a [u8], PatternForm)>,
}

/// A [`NamePattern`] as the file has it.
#[derive(Clone, Copy, Deserialize, Serialize)]
enum PatternForm {
    Exact,
    Subdomains,
    OneLabel,
}

/// The next record of a file.
pub(super) enum Read {
    /// A record, and how many octets it takes.
    Record(Record, u64),
    /// There is none, or it is not whole.
    End,
    /// It is of another form, for this reason.
    Unusable(String),
}

/// The octets with the length of a record.
const LEN: usize = 2;

/// A part of many records has so many octets, and no more than one record beyond.
pub(super) const PIECE: usize = 1 << 16;

/// Makes pieces of these records the content of a buffer, and hands them out one after another.
pub(super) fn write_all(records: &[Record], buffer: &mut Vec<u8>, mut to: impl FnMut(&[u8])) {
    for record in records {
        write(record, buffer);
        if buffer.len() >= PIECE {
            to(buffer);
            buffer.clear();
        }
    }
    if !buffer.is_empty() {
        to(buffer);
        buffer.clear();
    }
}

/// Adds a record to a buffer.
fn write(record: &Record, to: &mut Vec<u8>) {
    let millis = |time: Timestamp| time.as_nanos() / 1_000_000;
    let form = match record {
        Record::Port { number, name, pod } => Form::Port(number.0, name, pod.as_deref()),
        Record::PortGone(name) => Form::PortGone(name),
        Record::Name {
            port,
            address,
            name,
            term,
        } => {
            let RecordedTerm {
                until,
                deny_until,
                is_denied,
                is_ended,
            } = term;
            let state = match (is_denied, is_ended) {
                (true, true) => StateForm::EndedAndDenied,
                (true, false) => StateForm::Denied,
                (false, true) => StateForm::Ended,
                (false, false) => StateForm::Counts,
            };
            let ends = (millis(*until), millis(*deny_until));
            Form::Name(port.0, *address, name.wire(), ends.0, ends.1, state)
        }
        Record::NameGone {
            port,
            address,
            name,
        } => Form::NameGone(port.0, *address, name.wire()),
        Record::Rules { namespace, hash } => Form::Rules(namespace, *hash),
        Record::Denials(until) => Form::Denials(millis(*until)),
        Record::Group { tag, group } => Form::Group(tag.bits(), group.as_ref().map(form_of)),
    };
    let at = to.len();
    to.extend([0; LEN]);
    // The vector grows, and each of the types can be written.
    let mut written = postcard::to_extend(&form, std::mem::take(to)).expect("a vector takes all");
    let len = written.len() - at - LEN;
    // Names of DNS have 255 octets at most, those of ports and namespaces are as short (RFC 1123). A group has
    // `PATTERNS_MAX` names at most.
    match u16::try_from(len) {
        Ok(len) => written[at..at + LEN].copy_from_slice(&len.to_le_bytes()),
        Err(_) => written.truncate(at),
    }
    *to = written;
}

/// Reads the next record.
pub(super) fn read(from: &mut impl io::Read) -> io::Result<Read> {
    let mut octets = Vec::new();
    from.take(LEN as u64).read_to_end(&mut octets)?;
    let Ok(len) = <[u8; LEN]>::try_from(&octets[..]) else {
        return Ok(Read::End);
    };
    let len = u16::from_le_bytes(len);
    octets.clear();
    from.take(len.into()).read_to_end(&mut octets)?;
    if octets.len() < len.into() {
        return Ok(Read::End);
    }
    Ok(match of_octets(&octets) {
        Ok(record) => Read::Record(record, LEN as u64 + u64::from(len)),
        Err(reason) => Read::Unusable(reason),
    })
}

fn form_of(group: &SavedGroup) -> GroupForm<'_> {
    let SavedGroup {
        datapath,
        port_groups,
        patterns:
            Patterns {
                is_ipv6,
                are_denials,
                patterns,
            },
    } = group;
    let patterns = patterns.iter().map(|(name, pattern)| {
        let pattern = match pattern {
            NamePattern::Exact => PatternForm::Exact,
            NamePattern::Subdomains => PatternForm::Subdomains,
            NamePattern::OneLabel => PatternForm::OneLabel,
        };
        (name.wire(), pattern)
    });
    GroupForm {
        datapath: *datapath,
        port_groups: port_groups.iter().map(|group| &**group).collect(),
        is_ipv6: *is_ipv6,
        are_denials: *are_denials,
        patterns: patterns.collect(),
    }
}

fn of_octets(octets: &[u8]) -> Result<Record, String> {
    let (form, rest) = postcard::take_from_bytes(octets).map_err(|error| error.to_string())?;
    if !rest.is_empty() {
        return Err(format!("{} octets are left of a record", rest.len()));
    }
    let name = |wire: &[u8]| of_wire(wire).ok_or_else(|| format!("{wire:02x?} is no name"));
    let time = |millis: u64| Timestamp::from_nanos(millis.saturating_mul(1_000_000));
    Ok(match form {
        Form::Port(number, name, pod) => Record::Port {
            number: PortId(number),
            name: name.into(),
            pod: pod.map(Into::into),
        },
        Form::PortGone(name) => Record::PortGone(name.into()),
        Form::Name(port, address, wire, until, deny_until, state) => Record::Name {
            port: PortId(port),
            address,
            name: name(wire)?,
            term: RecordedTerm {
                until: time(until),
                deny_until: time(deny_until),
                is_denied: matches!(state, StateForm::Denied | StateForm::EndedAndDenied),
                is_ended: matches!(state, StateForm::Ended | StateForm::EndedAndDenied),
            },
        },
        Form::NameGone(port, address, wire) => Record::NameGone {
            port: PortId(port),
            address,
            name: name(wire)?,
        },
        Form::Denials(until) => Record::Denials(time(until)),
        Form::Rules(namespace, hash) => Record::Rules {
            namespace: Arc::from(namespace),
            hash,
        },
        Form::Group(bits, form) => Record::Group {
            tag: Tag::of_bits(bits).ok_or_else(|| format!("{bits:#x} is no tag"))?,
            group: form.map(|form| group_of(form, name)).transpose()?,
        },
    })
}

fn group_of(
    form: GroupForm<'_>,
    name: impl Fn(&[u8]) -> Result<DomainName, String>,
) -> Result<SavedGroup, String> {
    let GroupForm {
        datapath,
        port_groups,
        is_ipv6,
        are_denials,
        patterns,
    } = form;
    let patterns = patterns.into_iter().map(|(wire, pattern)| {
        let pattern = match pattern {
            PatternForm::Exact => NamePattern::Exact,
            PatternForm::Subdomains => NamePattern::Subdomains,
            PatternForm::OneLabel => NamePattern::OneLabel,
        };
        Ok((name(wire)?, pattern))
    });
    let patterns: BTreeSet<_> = patterns.collect::<Result<_, String>>()?;
    Ok(SavedGroup {
        datapath,
        port_groups: port_groups.into_iter().map(Arc::from).collect(),
        patterns: Patterns {
            is_ipv6,
            are_denials,
            patterns: patterns.into_iter().collect(),
        },
    })
}

/// The name in wire format, without the label of the root.
fn of_wire(wire: &[u8]) -> Option<DomainName> {
    let mut labels = Vec::new();
    let mut rest = wire;
    while let Some((length, tail)) = rest.split_first() {
        let (label, tail) = tail.split_at_checked(usize::from(*length))?;
        labels.push(label);
        rest = tail;
    }
    DomainName::from_labels(labels).ok()
}
