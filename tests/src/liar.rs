//! A DNS server that misbehaves on request, to test the agent.
//!
//! The first label of the question's name says how ([`Behaviour`]), the second one which address
//! the name truly leads to: `chain.3.example.com` is a chain of CNAMEs to 203.0.113.3. Nothing
//! that it says leads to [`LIE`] truly.
//!
//! It runs as a process of its own in a pod (`dnsflow-lab-helper liar`).

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    str::FromStr,
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, CNAME},
    },
};

use crate::{
    dns::stop_dns,
    lab::Lab,
    process::{spawn_detached, wait_listening},
};

/// The address that only lies lead to.
pub const LIE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);

/// How many CNAMEs [`Behaviour::Chain`] has.
pub const CHAIN_LEN: usize = 8;

/// How many addresses [`Behaviour::Large`] has.
const LARGE_RECORDS: u8 = 178;

const TTL: u32 = 30;
const QUERY_BYTES_MAX: usize = 4096;
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);

/// The server's behaviour for a question.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Behaviour {
    /// Answers.
    Honest,
    /// Answers, then once more with another address.
    TwoAnswers,
    /// Answers between two messages with another id.
    WrongId,
    /// Answers between two messages whose question is another one.
    OtherQuestion,
    /// Answers, then a question that nobody asked.
    Unsolicited,
    /// Answers with records of another name beside those of the question.
    OtherOwner,
    /// Answers with a further address in the Authority and Additional sections.
    OtherSections,
    /// Answers with 178 addresses, 4,000 bytes: over UDP in fragments.
    Large,
    /// Answers with a chain of eight CNAMEs, last one first.
    Chain,
    /// CNAMEs that lead to each other, and an address for each.
    Loop,
    /// Over UDP, TC=1 and a wrong address; over TCP, the answer.
    Truncated,
    /// As `Truncated`; over TCP in segments of one byte.
    Slow,
    /// As `Truncated`; over TCP followed by another message in the same segment.
    Several,
    /// The record's name is a compression pointer to itself.
    PointerLoop,
    /// 65,535 records are announced, and one is there.
    HugeCount,
    /// Answers with addresses that must never be opened beside the true one.
    Forbidden,
    /// Says SERVFAIL.
    ServFail,
    /// Says REFUSED.
    Refused,
    /// Says nothing.
    Silent,
    /// Says that the name has no address.
    NoData,
    /// Says that the name is an alias, and no more.
    Alias,
    /// Over UDP, TC=1 and no record; over TCP, SERVFAIL.
    TcpServFail,
    /// Over UDP, TC=1 and the true address; over TCP, it closes the connection in place of an answer.
    TcpClosed,
}

impl Behaviour {
    /// Those that give an address, in some way.
    pub const ALL: [Self; 16] = [
        Self::Honest,
        Self::TwoAnswers,
        Self::WrongId,
        Self::OtherQuestion,
        Self::Unsolicited,
        Self::OtherOwner,
        Self::OtherSections,
        Self::Large,
        Self::Chain,
        Self::Loop,
        Self::Truncated,
        Self::Slow,
        Self::Several,
        Self::PointerLoop,
        Self::HugeCount,
        Self::Forbidden,
    ];

    /// Those by which a client has no address.
    pub const FAILURES: [Self; 7] = [
        Self::ServFail,
        Self::Refused,
        Self::Silent,
        Self::NoData,
        Self::Alias,
        Self::TcpServFail,
        Self::TcpClosed,
    ];

    /// The first label of the names that it is for.
    pub fn label(self) -> &'static str {
        match self {
            Self::Honest => "honest",
            Self::TwoAnswers => "two-answers",
            Self::WrongId => "wrong-id",
            Self::OtherQuestion => "other-question",
            Self::Unsolicited => "unsolicited",
            Self::OtherOwner => "other-owner",
            Self::OtherSections => "other-sections",
            Self::Large => "large",
            Self::Chain => "chain",
            Self::Loop => "loop",
            Self::Truncated => "truncated",
            Self::Slow => "slow",
            Self::Several => "several",
            Self::PointerLoop => "pointer-loop",
            Self::HugeCount => "huge-count",
            Self::Forbidden => "forbidden",
            Self::ServFail => "servfail",
            Self::Refused => "refused",
            Self::Silent => "silent",
            Self::NoData => "nodata",
            Self::Alias => "alias",
            Self::TcpServFail => "tcp-servfail",
            Self::TcpClosed => "tcp-closed",
        }
    }

    /// A name below `domain` for this behaviour, which truly leads to 203.0.113.`last`.
    pub fn name(self, last: u8, domain: &str) -> String {
        format!("{}.{last}.{domain}", self.label())
    }

    fn of(name: &Name) -> Self {
        let first = name.iter().next().unwrap_or_default();
        Self::ALL
            .into_iter()
            .chain(Self::FAILURES)
            .find(|behaviour| behaviour.label().as_bytes().eq_ignore_ascii_case(first))
            .unwrap_or(Self::Honest)
    }
}

/// Addresses that must never be opened: loopback, metadata, multicast, a pod.
pub const FORBIDDEN: [Ipv4Addr; 4] = [
    Ipv4Addr::LOCALHOST,
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(224, 0, 0, 1),
    Ipv4Addr::new(10, 244, 0, 7),
];

impl Lab {
    /// Runs the server in a pod on this port; in the DNS pod in place of its DNS server, which
    /// [`Lab::serve_dns`] brings back. Returns when it listens.
    pub fn serve_liar(&self, pod: &str, port: u16) -> Result<()> {
        if pod == "dns" {
            stop_dns(self)?;
        }
        let mut command = Command::new(self.helper());
        // The directory marks the process as this lab's.
        command
            .args(["liar", &port.to_string()])
            .arg(self.base())
            .current_dir("/");
        self.pod(pod).netns().enter(&mut command)?;
        let log = self.base().join("log/liar.log");
        let pidfile = self.socket(&format!("liar-{pod}.pid"));
        let pid = spawn_detached(&mut command, &log, &pidfile)?;
        wait_listening(pid, "udp", port)?;
        wait_listening(pid, "tcp", port)
    }
}

/// Serves every address of this namespace, until it is killed.
pub fn serve(port: u16) -> Result<()> {
    let udp = UdpSocket::bind(("0.0.0.0", port))?;
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || {
                if let Err(error) = stream.map_err(Into::into).and_then(connection) {
                    eprintln!("{error:#}");
                }
            });
        }
    });
    let mut buffer = [0; QUERY_BYTES_MAX];
    loop {
        let (len, client) = udp.recv_from(&mut buffer)?;
        if let Err(error) = datagram(&udp, client, &buffer[..len]) {
            eprintln!("{error:#}");
        }
    }
}

fn datagram(udp: &UdpSocket, client: SocketAddr, query: &[u8]) -> Result<()> {
    for reply in over_udp(&Message::from_vec(query)?)? {
        udp.send_to(&reply, client)?;
    }
    Ok(())
}

/// Answers one question after the other (RFC 7766, section 6.2.1).
fn connection(mut stream: TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(CONNECTION_LIMIT))?;
    stream.set_write_timeout(Some(CONNECTION_LIMIT))?;
    stream.set_nodelay(true)?;
    let mut prefix = [0; 2];
    while stream.read_exact(&mut prefix).is_ok() {
        let mut query = vec![0; u16::from_be_bytes(prefix).into()];
        stream.read_exact(&mut query)?;
        let segments = over_tcp(&Message::from_vec(&query)?)?;
        if segments.is_empty() {
            break;
        }
        for segment in segments {
            stream.write_all(&segment)?;
        }
    }
    Ok(())
}

/// The datagrams that answer a query.
fn over_udp(query: &Message) -> Result<Vec<Vec<u8>>> {
    let question = Question::of(query)?;
    let truth = question.truth()?.to_vec()?;
    let lie = question.reply(vec![question.a(LIE)]);
    Ok(match question.behaviour {
        Behaviour::TwoAnswers => vec![truth, lie.to_vec()?],
        Behaviour::WrongId => {
            let mut other = lie;
            other.metadata.id = !other.metadata.id;
            vec![other.to_vec()?, truth, other.to_vec()?]
        }
        Behaviour::OtherQuestion => {
            let other = question.about_another(question.id)?;
            vec![other.to_vec()?, truth, other.to_vec()?]
        }
        Behaviour::Unsolicited => vec![truth, question.about_another(!question.id)?.to_vec()?],
        Behaviour::Truncated | Behaviour::Slow | Behaviour::Several => {
            let mut truncated = lie;
            truncated.metadata.truncation = true;
            vec![truncated.to_vec()?]
        }
        Behaviour::Silent => vec![],
        Behaviour::ServFail => vec![question.failing(ResponseCode::ServFail).to_vec()?],
        Behaviour::Refused => vec![question.failing(ResponseCode::Refused).to_vec()?],
        Behaviour::TcpServFail | Behaviour::TcpClosed => {
            let answers = match question.behaviour {
                Behaviour::TcpClosed => vec![question.a(question.address)],
                _ => vec![],
            };
            let mut truncated = question.reply(answers);
            truncated.metadata.truncation = true;
            vec![truncated.to_vec()?]
        }
        Behaviour::PointerLoop => {
            let mut bytes = question.reply(Vec::new()).to_vec()?;
            // ANCOUNT (RFC 1035, section 4.1.1), then a record whose name points to itself.
            bytes[7] = 1;
            let own_place = u16::try_from(bytes.len())? | 0xc000;
            bytes.extend(own_place.to_be_bytes());
            bytes.extend([0, 1, 0, 1, 0, 0, 0, 30, 0, 4]);
            bytes.extend(LIE.octets());
            vec![bytes]
        }
        Behaviour::HugeCount => {
            let mut bytes = lie.to_vec()?;
            bytes[6..8].copy_from_slice(&[0xff; 2]);
            vec![bytes]
        }
        _ => vec![truth],
    })
}

/// The segments that answer a query; each is written at once.
fn over_tcp(query: &Message) -> Result<Vec<Vec<u8>>> {
    let question = Question::of(query)?;
    let mut stream = framed(&question.truth()?)?;
    Ok(match question.behaviour {
        Behaviour::Slow => stream.into_iter().map(|byte| vec![byte]).collect(),
        Behaviour::TcpServFail => vec![framed(&question.failing(ResponseCode::ServFail))?],
        Behaviour::TcpClosed | Behaviour::Silent => vec![],
        Behaviour::Several => {
            let mut empty = question.reply(Vec::new());
            empty.metadata.id = !empty.metadata.id;
            let mut segment = framed(&empty)?;
            segment.append(&mut stream);
            vec![segment]
        }
        _ => vec![stream],
    })
}

/// A message behind its length (RFC 7766, section 8).
fn framed(message: &Message) -> Result<Vec<u8>> {
    let message = message.to_vec()?;
    let len = u16::try_from(message.len())?;
    Ok([&len.to_be_bytes()[..], &message].concat())
}

/// The question of a query, and the behaviour in its name.
struct Question {
    id: u16,
    query: Query,
    behaviour: Behaviour,
    address: Ipv4Addr,
}

impl Question {
    fn of(message: &Message) -> Result<Self> {
        let query = message
            .queries
            .first()
            .context("a query without question")?;
        let second = query.name.iter().nth(1).unwrap_or_default();
        let last = str::from_utf8(second)
            .ok()
            .and_then(|text| text.parse().ok());
        Ok(Self {
            id: message.metadata.id,
            query: query.clone(),
            behaviour: Behaviour::of(&query.name),
            address: Ipv4Addr::new(203, 0, 113, last.unwrap_or(1)),
        })
    }

    fn a(&self, address: Ipv4Addr) -> Record {
        a(self.query.name.clone(), address)
    }

    fn reply(&self, answers: Vec<Record>) -> Message {
        let mut message = Message::new(self.id, MessageType::Response, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.metadata.recursion_available = true;
        message.queries = vec![self.query.clone()];
        // It knows IPv4 addresses only.
        if self.query.query_type == RecordType::A {
            message.answers = answers;
        }
        message
    }

    /// An error in place of an answer.
    fn failing(&self, code: ResponseCode) -> Message {
        let mut message = self.reply(Vec::new());
        message.metadata.response_code = code;
        message
    }

    /// A lie about a name that was not asked for.
    fn about_another(&self, id: u16) -> Result<Message> {
        let name = Name::from_str("unasked")?.append_domain(&self.query.name.base_name())?;
        let mut message = self.reply(vec![a(name.clone(), LIE)]);
        message.metadata.id = id;
        message.queries = vec![Query::query(name, self.query.query_type)];
        Ok(message)
    }

    /// The message with the true records.
    fn truth(&self) -> Result<Message> {
        let mut answers = vec![self.a(self.address)];
        match self.behaviour {
            Behaviour::Large => {
                // TEST-NET-2 (RFC 5737); nobody has these.
                let others = (1..LARGE_RECORDS).map(|n| self.a([198, 51, 100, n].into()));
                answers.splice(0..0, others);
            }
            Behaviour::Chain => {
                let mut names = vec![self.query.name.clone()];
                for link in 1..=CHAIN_LEN {
                    names.push(Name::from_str(&format!("link{link}.cdn.test."))?);
                }
                let last = names.last().context("it has links")?.clone();
                answers = vec![a(last, self.address)];
                answers.extend(names.windows(2).rev().map(|pair| cname(&pair[0], &pair[1])));
            }
            Behaviour::Loop => {
                let other = Name::from_str("loop.cdn.test.")?;
                answers = vec![
                    cname(&self.query.name, &other),
                    cname(&other, &self.query.name),
                    a(other, LIE),
                    self.a(LIE),
                ];
            }
            Behaviour::OtherOwner => {
                let other = Name::from_str("other.cdn.test.")?;
                answers.insert(0, a(other.clone(), LIE));
                answers.push(a(other, LIE));
            }
            Behaviour::NoData => answers.clear(),
            Behaviour::Alias => {
                let target = Name::from_str("nowhere.cdn.test.")?;
                answers = vec![cname(&self.query.name, &target)];
            }
            Behaviour::Forbidden => {
                answers.extend(FORBIDDEN.map(|address| self.a(address)));
            }
            _ => {}
        }
        let mut message = self.reply(answers);
        if self.behaviour == Behaviour::OtherSections {
            message.authorities = vec![self.a(LIE)];
            message.additionals = vec![self.a(LIE)];
        }
        Ok(message)
    }
}

fn a(owner: Name, address: Ipv4Addr) -> Record {
    Record::from_rdata(owner, TTL, RData::A(A(address)))
}

fn cname(owner: &Name, target: &Name) -> Record {
    Record::from_rdata(owner.clone(), TTL, RData::CNAME(CNAME(target.clone())))
}

#[cfg(test)]
mod tests;
