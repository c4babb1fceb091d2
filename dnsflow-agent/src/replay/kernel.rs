//! What the TC programs do with a packet, by plain maps. The packet walk, the reading of questions and the keys
//! are those of the programs (`dnsflow-common`). What is decided by them is written a second time here: the
//! programs themselves need a kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dnsflow_common::{
    Reason,
    key::Query,
    question::{Buffer, NameHash, Names, Question, question},
    walk::{self, DNS_LEN, IpHeader, PROTOCOL_TCP, Packet, Ports},
};
use dnsflow_core::{flow::Protocol, resolver::Resolver};

/// Questions without an answer that are remembered. Beyond, all are forgotten.
const PENDING_MAX: usize = 65_536;

/// The programs' maps.
pub(super) struct Kernel {
    ports: Ports,
    resolvers: Vec<Resolver>,
    /// The hash of each question, by what an answer to it has.
    pending: BTreeMap<Query, u64>,
    /// Source, destination and number of datagrams whose first fragment is an answer.
    fragments: BTreeSet<(IpAddr, IpAddr, u32)>,
}

/// What a pod has sent that matters.
pub(super) enum Sent {
    /// A question to a DNS server, which is remembered.
    Question,
    /// A part of a TCP connection to a DNS server.
    Segment,
    /// What may begin a connection.
    Attempt(Protocol, u16),
}

/// Every name matters: which ones a rule mentions, the engine says.
struct All;

impl Names for All {
    fn all(&self) -> bool {
        true
    }

    fn mentions(&self, _: NameHash) -> bool {
        true
    }
}

impl Kernel {
    pub(super) fn new(ports: Ports, resolvers: &[Resolver]) -> Self {
        Self {
            ports,
            resolvers: resolvers.to_vec(),
            pending: BTreeMap::new(),
            fragments: BTreeSet::new(),
        }
    }

    /// Whether a packet to a pod goes to the agent; why not, where it has to do with DNS.
    pub(super) fn hand_over(&mut self, frame: &[u8]) -> Result<(), &'static str> {
        self.answer(frame).map_err(Reason::as_str)
    }

    /// What a packet from a pod is.
    pub(super) fn look_at_sent(&mut self, frame: &[u8]) -> Result<Sent, &'static str> {
        self.sent(frame).map_err(Reason::as_str)
    }

    fn answer(&mut self, frame: &[u8]) -> Result<(), Reason> {
        match walk::from_server(&frame, &self.ports)? {
            Packet::TcpSegment(found) => self.trusts(frame, found.ip, found.src_port, true),
            Packet::UdpAnswer(found) => {
                self.trusts(frame, found.ip, found.src_port, true)?;
                let ports = (found.src_port, found.dst_port);
                self.asked(frame, found.ip, ports, found.payload, found.payload_len)
            }
            Packet::Fragment(found) => {
                let addresses = found.ip.addresses(&frame);
                let addresses = addresses.ok_or(Reason::TruncatedDns)?;
                let key = (addresses.src, addresses.dst, found.id);
                let Some(first) = found.first else {
                    return match self.fragments.contains(&key) {
                        true => Ok(()),
                        false => Err(Reason::UnexpectedFragment),
                    };
                };
                self.trusts(frame, found.ip, first.src_port, true)?;
                let ports = (first.src_port, first.dst_port);
                self.asked(frame, found.ip, ports, first.message, first.message_len)?;
                if self.fragments.len() >= PENDING_MAX {
                    self.fragments.clear();
                }
                self.fragments.insert(key);
                Ok(())
            }
        }
    }

    fn trusts(&self, frame: &[u8], ip: IpHeader, port: u16, is_source: bool) -> Result<(), Reason> {
        let addresses = ip.addresses(&frame).ok_or(Reason::TruncatedDns)?;
        let address = if is_source {
            addresses.src
        } else {
            addresses.dst
        };
        match self.resolvers.contains(&Resolver { address, port }) {
            true => Ok(()),
            false => Err(Reason::UntrustedResolver),
        }
    }

    fn asked(
        &mut self,
        frame: &[u8],
        ip: IpHeader,
        ports: (u16, u16),
        payload: u32,
        payload_len: u32,
    ) -> Result<(), Reason> {
        let found = read(frame, payload, payload_len)?;
        let key = id(frame, payload).and_then(|id| Query::answered(&frame, ip, ports, id));
        let key = key.ok_or(Reason::TruncatedDns)?;
        match self.pending.get(&key) {
            None => Err(Reason::NotAsked),
            Some(asked) if *asked != found.hash => Err(Reason::OtherQuestion),
            Some(_) => {
                self.pending.remove(&key);
                Ok(())
            }
        }
    }

    fn sent(&mut self, frame: &[u8]) -> Result<Sent, Reason> {
        match walk::from_pod(&frame, &self.ports)? {
            walk::Sent::Attempt(found) => {
                let protocol = match found.protocol {
                    PROTOCOL_TCP => Protocol::Tcp,
                    _ => Protocol::Udp,
                };
                Ok(Sent::Attempt(protocol, found.dst_port))
            }
            walk::Sent::TcpSegment(found) => {
                self.trusts(frame, found.ip, found.dst_port, false)?;
                Ok(Sent::Segment)
            }
            walk::Sent::UdpQuery(found) => {
                self.trusts(frame, found.ip, found.dst_port, false)?;
                let asked = read(frame, found.payload, found.payload_len)?;
                let ports = (found.src_port, found.dst_port);
                let id = id(frame, found.payload);
                let key = id.and_then(|id| Query::sent(&frame, found.ip, ports, id));
                if self.pending.len() >= PENDING_MAX {
                    self.pending.clear();
                }
                self.pending
                    .insert(key.ok_or(Reason::TruncatedDns)?, asked.hash);
                Ok(Sent::Question)
            }
        }
    }
}

fn id(frame: &[u8], payload: u32) -> Option<u16> {
    let at = usize::try_from(payload).ok()?;
    let bytes = frame.get(at..at + 2)?;
    Some(u16::from_be_bytes(bytes.try_into().ok()?))
}

fn read(frame: &[u8], payload: u32, payload_len: u32) -> Result<Question, Reason> {
    let place = |at: u32| usize::try_from(at).unwrap_or(usize::MAX);
    let start = place(payload.saturating_add(DNS_LEN));
    let end = frame.len().min(place(payload.saturating_add(payload_len)));
    let bytes = frame.get(start..end).unwrap_or_default();
    let mut buffer = Buffer::default();
    let len = bytes.len().min(buffer.bytes.len());
    buffer.bytes[..len].copy_from_slice(&bytes[..len]);
    question(&mut buffer, u32::try_from(len).unwrap_or_default(), &All)
}

/// Where the source address stands in an IPv4 and in an IPv6 header (RFC 791, section 3.1; RFC 8200,
/// section 3), and how long an address is.
const ADDRESSES: [(u16, usize, usize); 2] = [(0x0800, 12, 4), (0x86dd, 8, 16)];
/// The types of VLAN tags (IEEE 802.1Q and 802.1ad).
const TAGS: [u16; 2] = [0x8100, 0x88a8];

/// Source and destination of an IP packet in a frame.
pub(super) fn addresses(frame: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let kind = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    let mut at = 12;
    while TAGS.contains(&kind(at)?) {
        at += 4;
    }
    let (_, offset, len) = ADDRESSES
        .iter()
        .find(|(known, ..)| kind(at) == Some(*known))?;
    let address = |number: usize| -> Option<IpAddr> {
        let start = at + 2 + offset + number * len;
        let bytes = frame.get(start..start + len)?;
        match *len {
            4 => Some(<[u8; 4]>::try_from(bytes).ok()?.into()),
            _ => Some(<[u8; 16]>::try_from(bytes).ok()?.into()),
        }
    };
    Some((address(0)?, address(1)?))
}
