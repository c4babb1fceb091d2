//! What the TC programs decide, by plain maps: for `dnsflow replay`, and for the tests that compare it with
//! the programs.
//!
//! The packet walk, the reading of questions and the keys are those of the programs (`dnsflow-common`). What
//! is decided by them is written a second time here: the programs themselves need a kernel. `kernel_and_host_agree`
//! in `tests/tests/bpf` runs both over the same frames. Left out are time, the sizes of the maps, and holding.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use dnsflow_common::{
    Reason,
    key::{Query, ResolverKey, SourceKey, SourceMac},
    question::{Buffer, NameHash, Names, Question, question},
    walk::{
        self, DNS_LEN, IpHeader, MAC_DST_AT, MAC_SRC_AT, PROTOCOL_TCP, PROTOCOL_UDP, Packet, Ports,
        Reader as _, TCP_ACK, TCP_SYN,
    },
};
use dnsflow_core::values::flow::Protocol;

/// Questions without an answer that are remembered, and datagrams in fragments. Beyond, all are forgotten.
const PENDING_MAX: usize = 65_536;

/// The programs' maps.
pub struct Kernel {
    /// The ports of DNS servers.
    pub ports: Ports,
    /// The DNS servers that are trusted.
    pub resolvers: BTreeSet<ResolverKey>,
    /// The addresses of the pods' ports.
    pub sources: BTreeMap<SourceKey, SourceMac>,
    /// The names that matter; `None` where all do.
    pub names: Option<BTreeSet<NameHash>>,
    /// Whether attempts are told of.
    pub is_watched: bool,
    /// The hash of each question, by its interface and what an answer to it has.
    pending: BTreeMap<(u32, Query), u64>,
    /// Interface, source, destination and number of datagrams whose first fragment is an answer.
    fragments: BTreeSet<(u32, IpAddr, IpAddr, u32)>,
}

/// What a pod has sent that matters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sent {
    /// A question to a DNS server, which is remembered.
    Question,
    /// A part of a TCP connection to a DNS server, which the agent gets.
    Segment,
    /// What may begin a connection, with the destination port.
    Attempt(Protocol, u16),
}

struct Mentioned<'a>(Option<&'a BTreeSet<NameHash>>);

impl Names for Mentioned<'_> {
    fn all(&self) -> bool {
        self.0.is_none()
    }

    fn mentions(&self, hash: NameHash) -> bool {
        self.0.is_none_or(|names| names.contains(&hash))
    }
}

impl Kernel {
    /// Trusts no DNS server and knows no pod. All names matter, and attempts are told of.
    pub fn new(ports: Ports) -> Self {
        Self {
            ports,
            resolvers: BTreeSet::new(),
            sources: BTreeMap::new(),
            names: None,
            is_watched: true,
            pending: BTreeMap::new(),
            fragments: BTreeSet::new(),
        }
    }

    /// Whether the agent gets a packet to a pod; why not, if it does not.
    pub fn egress(&mut self, ifindex: u32, frame: &[u8]) -> Result<(), Reason> {
        let (packet, empty) = walk::from_server_or_empty(&frame, &self.ports)?;
        let judged = self.judge(ifindex, frame, &packet, empty.is_none());
        // An answer without records uses up its query, if it answers one.
        empty.map_or(judged, Err)
    }

    fn judge(
        &mut self,
        ifindex: u32,
        frame: &[u8],
        packet: &Packet,
        has_records: bool,
    ) -> Result<(), Reason> {
        match packet {
            Packet::TcpSegment(found) => {
                self.trusts(ResolverKey::source(&frame, found.ip, found.src_port))?;
                self.any_name()?;
                let key = SourceKey::destination(&frame, ifindex, found.ip);
                self.own(frame, key, MAC_DST_AT)
            }
            Packet::UdpAnswer(found) => {
                self.trusts(ResolverKey::source(&frame, found.ip, found.src_port))?;
                let ports = (found.src_port, found.dst_port);
                let message = (found.payload, found.payload_len);
                self.asked(ifindex, frame, found.ip, ports, message)
            }
            Packet::Fragment(found) => {
                let addresses = found.ip.addresses(&frame).ok_or(Reason::CopyFailed)?;
                let key = (ifindex, addresses.src, addresses.dst, found.id);
                let Some(first) = found.first else {
                    return match self.fragments.contains(&key) {
                        true => Ok(()),
                        false => Err(Reason::UnexpectedFragment),
                    };
                };
                self.trusts(ResolverKey::source(&frame, found.ip, first.src_port))?;
                let ports = (first.src_port, first.dst_port);
                let message = (first.message, first.message_len);
                self.asked(ifindex, frame, found.ip, ports, message)?;
                if !has_records {
                    return Ok(());
                }
                if self.fragments.len() >= PENDING_MAX {
                    self.fragments.clear();
                }
                self.fragments.insert(key);
                Ok(())
            }
        }
    }

    /// What a packet from a pod is; why it does not matter, if it does not.
    pub fn ingress(&mut self, ifindex: u32, frame: &[u8]) -> Result<Sent, Reason> {
        let sent = walk::from_pod(&frame, &self.ports)?;
        let (ip, tags, dst_port, begins) = match &sent {
            walk::Sent::UdpQuery(found) => {
                (found.ip, found.tags, found.dst_port, Some(PROTOCOL_UDP))
            }
            walk::Sent::TcpSegment(found) => {
                let is_first = found.flags & (TCP_SYN | TCP_ACK) == TCP_SYN;
                let begins = is_first.then_some(PROTOCOL_TCP);
                (found.ip, found.tags, found.dst_port, begins)
            }
            walk::Sent::Attempt(_) if !self.is_watched => return Err(Reason::OtherPort),
            walk::Sent::Attempt(found) => {
                (found.ip, found.tags, found.dst_port, Some(found.protocol))
            }
        };
        if !tags.is_empty() {
            return Err(Reason::Tagged);
        }
        let to_resolver = match sent {
            walk::Sent::Attempt(_) => Err(Reason::OtherPort),
            _ => self.trusts(ResolverKey::destination(&frame, ip, dst_port)),
        };
        let begins = begins.filter(|_| self.is_watched);
        if let (Err(reason), None) = (to_resolver, begins) {
            return Err(reason);
        }
        self.own(frame, SourceKey::source(&frame, ifindex, ip), MAC_SRC_AT)?;
        match (to_resolver, begins, sent) {
            (Err(_), Some(PROTOCOL_TCP), _) => Ok(Sent::Attempt(Protocol::Tcp, dst_port)),
            (Err(_), ..) => Ok(Sent::Attempt(Protocol::Udp, dst_port)),
            (Ok(()), _, walk::Sent::UdpQuery(found)) => {
                // Which names matter is looked at when the answer comes.
                let asked = read(frame, (found.payload, found.payload_len), None)?;
                let id = id(frame, found.payload)?;
                let key = Query::sent(&frame, ip, (found.src_port, dst_port), id);
                let key = key.ok_or(Reason::CopyFailed)?;
                if self.pending.len() >= PENDING_MAX {
                    self.pending.clear();
                }
                self.pending.insert((ifindex, key), asked.hash);
                Ok(Sent::Question)
            }
            (Ok(()), ..) => self.any_name().map(|()| Sent::Segment),
        }
    }

    fn trusts(&self, resolver: Option<ResolverKey>) -> Result<(), Reason> {
        match self
            .resolvers
            .contains(&resolver.ok_or(Reason::CopyFailed)?)
        {
            true => Ok(()),
            false => Err(Reason::UntrustedResolver),
        }
    }

    /// Whether this is the pod's end of a packet.
    fn own(&self, frame: &[u8], key: Option<SourceKey>, mac_at: u32) -> Result<(), Reason> {
        let known = self.sources.get(&key.ok_or(Reason::CopyFailed)?);
        let mac = frame.read::<6>(mac_at).ok_or(Reason::CopyFailed)?;
        match known {
            Some(known) if *known == SourceMac::default() || known[..6] == mac => Ok(()),
            _ => Err(Reason::ForeignAddress),
        }
    }

    fn any_name(&self) -> Result<(), Reason> {
        match self.names.as_ref().is_some_and(BTreeSet::is_empty) {
            true => Err(Reason::NoRule),
            false => Ok(()),
        }
    }

    fn asked(
        &mut self,
        ifindex: u32,
        frame: &[u8],
        ip: IpHeader,
        ports: (u16, u16),
        message: (u32, u32),
    ) -> Result<(), Reason> {
        let found = read(frame, message, self.names.as_ref())?;
        let key = Query::answered(&frame, ip, ports, id(frame, message.0)?);
        let key = (ifindex, key.ok_or(Reason::CopyFailed)?);
        match self.pending.get(&key) {
            None => return Err(Reason::NotAsked),
            Some(asked) if *asked != found.hash => return Err(Reason::OtherQuestion),
            Some(_) => self.pending.remove(&key),
        };
        match found.mentioned {
            true => Ok(()),
            false => Err(Reason::NoRule),
        }
    }
}

fn id(frame: &[u8], message: u32) -> Result<u16, Reason> {
    let id = frame.read(message).ok_or(Reason::TruncatedDns)?;
    Ok(u16::from_be_bytes(id))
}

/// Reads the question of a message, which begins at an offset and has a length.
fn read(
    frame: &[u8],
    (message, len): (u32, u32),
    names: Option<&BTreeSet<NameHash>>,
) -> Result<Question, Reason> {
    let place = |at: u32| usize::try_from(at).unwrap_or(usize::MAX);
    let start = place(message.saturating_add(DNS_LEN));
    let end = frame.len().min(place(message.saturating_add(len)));
    let bytes = frame.get(start..end).unwrap_or_default();
    let mut buffer = Buffer::default();
    let len = bytes.len().min(buffer.bytes.len());
    buffer.bytes[..len].copy_from_slice(&bytes[..len]);
    let len = u32::try_from(len).unwrap_or_default();
    question(&mut buffer, len, &Mentioned(names))
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
