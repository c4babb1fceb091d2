//! What the programs must do, said again with the same walk and the plainest of maps.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dnsflow_common::{
    Reason,
    key::{FragmentKey, Query, ResolverKey, SourceKey},
    question::{Buffer, NameHash, Names, Question, question},
    walk::{self, DNS_LEN, IpHeader, MAC_DST_AT, MAC_SRC_AT, Packet, Ports, Sent},
};
use dnsflow_tests::frames::POD_MAC;

/// The kernel runs programs under test on this namespace's loopback interface.
const IFINDEX: u32 = 1;

/// The maps.
#[derive(Default)]
pub(crate) struct Model {
    pub(crate) resolvers: BTreeSet<ResolverKey>,
    /// The pod's addresses.
    pub(crate) sources: BTreeSet<SourceKey>,
    pub(crate) pending: BTreeMap<Query, u64>,
    pub(crate) fragments: Vec<FragmentKey>,
    /// The names that matter; `None` where all do.
    pub(crate) names: Option<BTreeSet<NameHash>>,
}

struct Mentioned<'a>(&'a Option<BTreeSet<NameHash>>);

impl Names for Mentioned<'_> {
    fn all(&self) -> bool {
        self.0.is_none()
    }

    fn mentions(&self, hash: NameHash) -> bool {
        self.0.as_ref().is_none_or(|names| names.contains(&hash))
    }
}

impl Model {
    /// A frame to the pod.
    pub(crate) fn egress(&mut self, frame: &[u8]) -> Reason {
        match self.answer(frame) {
            Ok(()) => Reason::Captured,
            Err(reason) => reason,
        }
    }

    /// A frame from the pod.
    pub(crate) fn ingress(&mut self, frame: &[u8]) -> Reason {
        match self.query(frame) {
            Ok(reason) | Err(reason) => reason,
        }
    }

    fn answer(&mut self, frame: &[u8]) -> Result<(), Reason> {
        let resolver = |ip, port| ResolverKey::source(&frame, ip, port).expect("walked");
        let fragment = |ip, id| FragmentKey::new(&frame, IFINDEX, ip, id).expect("walked");
        match walk::from_server(&frame, &Ports::DNS)? {
            Packet::TcpSegment(found) => {
                self.trusted(&resolver(found.ip, found.src_port))?;
                self.any_name()?;
                let key = SourceKey::destination(&frame, IFINDEX, found.ip);
                self.own(frame, &key.expect("walked"), MAC_DST_AT)
            }
            Packet::UdpAnswer(found) => {
                self.trusted(&resolver(found.ip, found.src_port))?;
                let ports = (found.src_port, found.dst_port);
                self.asked(frame, found.ip, ports, found.payload, found.payload_len)
            }
            Packet::Fragment(found) => match found.first {
                Some(first) => {
                    self.trusted(&resolver(found.ip, first.src_port))?;
                    let ports = (first.src_port, first.dst_port);
                    self.asked(frame, found.ip, ports, first.message, first.message_len)?;
                    self.fragments.push(fragment(found.ip, found.id));
                    Ok(())
                }
                None if self.fragments.contains(&fragment(found.ip, found.id)) => Ok(()),
                None => Err(Reason::UnexpectedFragment),
            },
        }
    }

    fn trusted(&self, resolver: &ResolverKey) -> Result<(), Reason> {
        match self.resolvers.contains(resolver) {
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
        let found = read(frame, payload, payload_len, &Mentioned(&self.names))?;
        let id = id(frame, payload);
        let key = Query::answered(&frame, ip, ports, id).expect("walked");
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

    /// Whether this is the pod's end of a packet.
    fn own(&self, frame: &[u8], key: &SourceKey, mac_at: u32) -> Result<(), Reason> {
        let mac = &frame[mac_at as usize..][..6];
        match self.sources.contains(key) && mac == POD_MAC {
            true => Ok(()),
            false => Err(Reason::ForeignAddress),
        }
    }

    fn any_name(&self) -> Result<(), Reason> {
        match self.names.as_ref().is_some_and(BTreeSet::is_empty) {
            true => Err(Reason::NoRule),
            false => Ok(()),
        }
    }

    fn query(&mut self, frame: &[u8]) -> Result<Reason, Reason> {
        let sent = walk::from_pod(&frame, &Ports::DNS)?;
        let (ip, tags, port) = match &sent {
            Sent::UdpQuery(found) => (found.ip, found.tags, found.dst_port),
            Sent::TcpSegment(found) => (found.ip, found.tags, found.dst_port),
            // The interface is not watched.
            Sent::Attempt(_) => return Err(Reason::OtherPort),
        };
        if !tags.is_empty() {
            return Err(Reason::Tagged);
        }
        let resolver = ResolverKey::destination(&frame, ip, port);
        self.trusted(&resolver.expect("walked"))?;
        let source = SourceKey::source(&frame, IFINDEX, ip);
        self.own(frame, &source.expect("walked"), MAC_SRC_AT)?;
        let Sent::UdpQuery(found) = sent else {
            return self.any_name().map(|()| Reason::Captured);
        };
        let nothing = Some(BTreeSet::new());
        let asked = read(
            frame,
            found.payload,
            found.payload_len,
            &Mentioned(&nothing),
        )?;
        let ports = (found.src_port, found.dst_port);
        let id = id(frame, found.payload);
        let key = Query::sent(&frame, found.ip, ports, id).expect("walked");
        self.pending.insert(key, asked.hash);
        Ok(Reason::QueryRecorded)
    }
}

fn id(frame: &[u8], payload: u32) -> u16 {
    let at = payload as usize;
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

fn read(
    frame: &[u8],
    payload: u32,
    payload_len: u32,
    names: &impl Names,
) -> Result<Question, Reason> {
    let start = (payload + DNS_LEN) as usize;
    let end = frame.len().min((payload + payload_len) as usize);
    let bytes = frame.get(start..end).unwrap_or_default();
    let mut buffer = Buffer::default();
    let len = bytes.len().min(buffer.bytes.len());
    buffer.bytes[..len].copy_from_slice(&bytes[..len]);
    question(&mut buffer, len as u32, names)
}

/// How often each reason was met.
pub(crate) type Met = HashMap<Reason, u32>;
