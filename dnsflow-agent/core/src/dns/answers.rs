//! From a captured frame to the answers that count: which servers are trusted, DNS messages put
//! together from TCP segments and IP fragments.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use dnsflow_common::walk::{self, Message, Packet, Ports as DnsPorts, Sent};
use smallvec::SmallVec;

use crate::{
    Command,
    dns::{
        DnsError, Failure, Response,
        fragments::{DatagramKey, Fragment, FragmentEvent, FragmentReassembly},
        tcp::{ConnectionKey, Fed, Segment, Sender, ServerEnd, TcpEvent, TcpReassembly},
    },
    io::{input::Frame, output::Output, report::Report},
    tools::counter_vec::CounterVec,
    values::resolver::{Resolver, ServerId, Servers},
};

/// Reads frames, and decides which answers count.
#[derive(Debug)]
pub(crate) struct Answers {
    /// The ports that DNS servers answer from.
    dns_ports: DnsPorts,
    /// The DNS servers of the options.
    resolvers: BTreeSet<Resolver>,
    /// The DNS servers of the cluster; `None` before the cluster was asked.
    cluster: Option<BTreeSet<Resolver>>,
    /// The DNS cache of this node.
    dns_cache: BTreeSet<Resolver>,
    /// The DNS servers that are trusted, as they were last reported.
    trusted: Option<BTreeSet<Resolver>>,
    /// All that were trusted at some time.
    servers: Servers,
    /// Whether they were reported.
    trust_reported: bool,
    tcp: TcpReassembly,
    fragments: FragmentReassembly,
}

/// The result of reading a frame.
#[derive(Debug, Default)]
pub(crate) struct Read<'a> {
    /// The responses that are complete now: mostly one.
    pub(crate) responses: SmallVec<[Response<'a>; 1]>,
    /// Errors in place of responses. Those over UDP do not come here.
    pub(crate) failures: Vec<Failure>,
    /// The end of the connection, if the server has ended it without an answer.
    pub(crate) end: Option<ServerEnd>,
    /// The server that has sent them.
    pub(crate) server: Option<ServerId>,
    /// The connection in which the frame is one of many.
    pub(crate) connection: Option<ConnectionKey>,
    /// Whether the frame itself carries the responses. If not, the frame is not held for them.
    pub(crate) carries: bool,
}

impl Answers {
    /// The ports that DNS servers answer from.
    pub(crate) fn ports(&self) -> &DnsPorts {
        &self.dns_ports
    }

    /// Nothing was read yet. The DNS servers of the options are trusted.
    pub(crate) fn new(
        dns_ports: DnsPorts,
        resolvers: BTreeSet<Resolver>,
        out: &mut Output,
    ) -> Self {
        let mut answers = Self {
            dns_ports,
            resolvers,
            cluster: None,
            dns_cache: BTreeSet::new(),
            trusted: None,
            servers: Servers::default(),
            trust_reported: false,
            tcp: TcpReassembly::default(),
            fragments: FragmentReassembly::default(),
        };
        answers.trust_all(out);
        answers
    }

    /// Trusts these DNS servers of the cluster.
    pub(crate) fn trust(&mut self, cluster: BTreeSet<Resolver>, out: &mut Output) {
        self.cluster = Some(cluster);
        self.trust_all(out);
    }

    /// Trusts this DNS cache of the node.
    pub(crate) fn trust_dns_cache(&mut self, dns_cache: BTreeSet<Resolver>, out: &mut Output) {
        self.dns_cache = dns_cache;
        self.trust_all(out);
    }

    fn trust_all(&mut self, out: &mut Output) {
        let cluster = self.cluster.iter().flatten();
        let all = cluster.chain(&self.resolvers).chain(&self.dns_cache);
        let all: BTreeSet<Resolver> = all.copied().collect();
        if self.trusted.as_ref() != Some(&all) {
            out.command(Command::TrustResolvers(all.clone()));
            self.servers.add(&all);
            self.trusted = Some(all.clone());
            self.trust_reported = false;
        }
        // An empty set is reported only after the cluster was asked.
        if !self.trust_reported && (self.cluster.is_some() || !all.is_empty()) {
            self.trust_reported = true;
            out.report(Report::Trusting(all));
        }
    }

    /// Whether it is known which DNS servers are trusted. If there are none, the cluster may not have said all.
    pub(crate) fn knows_servers(&self) -> bool {
        self.cluster.is_some() && self.trusted.as_ref().is_some_and(|all| !all.is_empty())
    }

    /// The DNS servers that are trusted; `None` before they were first reported.
    pub(crate) fn trusted(&self) -> Option<&BTreeSet<Resolver>> {
        self.trusted.as_ref()
    }

    /// The server with a number.
    pub(crate) fn server(&self, id: ServerId) -> Option<Resolver> {
        self.servers.get(id)
    }

    /// Forgets unfinished messages of this interface.
    pub(crate) fn forget_interface(&mut self, ifindex: u32) {
        self.tcp.forget_interface(ifindex);
        self.fragments.forget_interface(ifindex);
    }

    /// Reads a frame that passed an interface of the pod with these addresses. A frame of an unknown interface is only
    /// counted, and so is one to another address: the interface's index was another pod's when the frame was captured.
    /// A frame of a server that is not trusted now is only counted, too: the programs have judged it by the trust of
    /// their time, and it may have waited in the kernel since.
    pub(crate) fn read<'a>(
        &mut self,
        frame: Frame<'a>,
        pod: Option<&[IpAddr]>,
        out: &mut Output,
    ) -> Read<'a> {
        let now = out.now();
        out.counters.frames += 1;
        let mut read = Read::default();
        if frame.from_pod {
            self.read_sent(frame, pod.is_some(), out);
            return read;
        }
        let Ok(packet) = walk::from_server(&frame.bytes, &self.dns_ports) else {
            out.counters.frames_not_dns += 1;
            return read;
        };
        let (Packet::UdpAnswer(Message { ip, .. })
        | Packet::TcpSegment(walk::Segment { ip, .. })
        | Packet::Fragment(walk::Fragment { ip, .. })) = &packet;
        let to = ip.addresses(&frame.bytes).map(|of| of.dst);
        if !pod.is_some_and(|pod| to.is_some_and(|to| pod.contains(&to))) {
            out.counters.frames_unknown_interface += 1;
            return read;
        }
        let port = match &packet {
            Packet::UdpAnswer(Message { src_port, .. })
            | Packet::TcpSegment(walk::Segment { src_port, .. }) => Some(*src_port),
            // A later fragment has no port numbers. Only the whole datagram shows whose it is.
            Packet::Fragment(_) => None,
        };
        let from = ip.addresses(&frame.bytes).map(|of| of.src);
        let source = from.zip(port).map(SocketAddr::from);
        if source.is_some_and(|source| !self.is_trusted(source)) {
            out.counters.frames_untrusted_server += 1;
            return read;
        }
        match packet {
            Packet::UdpAnswer(found) => match found.payload_of(frame.bytes) {
                Some(message) => {
                    read.server = source.and_then(|source| self.servers.number(source.into()));
                    read.message(message, out);
                    read.carries = true;
                }
                None => out.counters.frames_not_dns += 1,
            },
            Packet::TcpSegment(found) => {
                if let Some(segment) = segment(&found, Sender::Server, frame) {
                    let Fed { answers, end } = self.tcp.feed(&segment, now);
                    answers.into_iter().for_each(|one| read.message(one, out));
                    read.end = end;
                    read.server = self.servers.number(segment.key.server.into());
                    read.connection = Some(segment.key);
                    read.carries = true;
                }
            }
            Packet::Fragment(found) => {
                if let Some(fragment) = fragment(&found, frame)
                    && let Some(datagram) = self.fragments.feed(&fragment, now)
                {
                    if self.is_trusted(datagram.source) {
                        read.server = self.servers.number(datagram.source.into());
                        read.message(datagram.payload, out);
                    } else {
                        out.counters.frames_untrusted_server += 1;
                    }
                }
            }
        }
        read
    }

    /// Reads a segment that a pod has sent. Answers count only for the questions in it.
    fn read_sent(&mut self, frame: Frame<'_>, is_known: bool, out: &mut Output) {
        let now = out.now();
        let Ok(Sent::TcpSegment(found)) = walk::from_pod(&frame.bytes, &self.dns_ports) else {
            out.counters.frames_not_dns += 1;
            return;
        };
        if !is_known {
            out.counters.frames_unknown_interface += 1;
        } else if let Some(segment) = segment(&found, Sender::Pod, frame) {
            self.tcp.feed(&segment, now);
        }
    }

    /// Whether this is a DNS server that is trusted now.
    fn is_trusted(&self, source: SocketAddr) -> bool {
        let trusted = self.trusted.as_ref();
        trusted.is_some_and(|trusted| trusted.contains(&source.into()))
    }

    /// The outcomes of TCP segments.
    pub(crate) fn tcp_events(&self) -> &CounterVec<TcpEvent> {
        self.tcp.events()
    }

    /// The outcomes of IP fragments.
    pub(crate) fn fragment_events(&self) -> &CounterVec<FragmentEvent> {
        self.fragments.events()
    }

    /// How many TCP connections and fragmented datagrams are followed.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> [usize; 2] {
        [self.tcp.len(), self.fragments.len()]
    }
}

impl<'a> Read<'a> {
    /// Adds a DNS message, of which the question is read. A message that is no usable answer is counted.
    fn message(&mut self, message: impl Into<Cow<'a, [u8]>>, out: &mut Output) {
        match usable(Response::or_failure(message.into()), out) {
            Some(Ok(response)) => self.responses.push(response),
            Some(Err(failure)) => {
                out.counters.answers_unusable += 1;
                self.failures.push(failure);
            }
            None => {}
        }
    }
}

/// Counts a message that is no usable answer.
pub(crate) fn usable<T>(read: Result<T, DnsError>, out: &mut Output) -> Option<T> {
    match read {
        Ok(read) => return Some(read),
        Err(DnsError::Malformed(_)) => out.counters.answers_malformed += 1,
        Err(_) => out.counters.answers_unusable += 1,
    }
    None
}

/// The TCP segment in a frame; `None` where the frame was cut within its headers.
fn segment<'a>(found: &walk::Segment, sender: Sender, frame: Frame<'a>) -> Option<Segment<'a>> {
    let addresses = found.ip.addresses(&frame.bytes)?;
    let source = SocketAddr::new(addresses.src, found.src_port);
    let destination = SocketAddr::new(addresses.dst, found.dst_port);
    let (client, server) = match sender {
        Sender::Pod => (source, destination),
        Sender::Server => (destination, source),
    };
    Some(Segment {
        key: ConnectionKey {
            ifindex: frame.ifindex,
            server,
            client,
        },
        sender,
        sequence: found.seq,
        acknowledgment: found.ack,
        flags: found.flags,
        payload: captured(frame, found.payload, found.payload_len),
        payload_len: usize::try_from(found.payload_len).ok()?,
        left_out: frame.left_out,
    })
}

/// The fragment in a frame; `None` where the frame was cut within its headers.
fn fragment<'a>(found: &walk::Fragment, frame: Frame<'a>) -> Option<Fragment<'a>> {
    let addresses = found.ip.addresses(&frame.bytes)?;
    Some(Fragment {
        key: DatagramKey {
            ifindex: frame.ifindex,
            source: addresses.src,
            destination: addresses.dst,
            id: found.id,
        },
        // The walk lets no other through.
        protocol: PROTOCOL_UDP,
        offset: found.offset,
        more: found.more,
        payload: captured(frame, found.payload, found.payload_len),
        payload_len: usize::try_from(found.payload_len).ok()?,
    })
}

/// IP protocol 17 (RFC 768).
const PROTOCOL_UDP: u8 = 17;

/// The captured part of a payload.
fn captured(frame: Frame<'_>, start: u32, len: u32) -> &[u8] {
    let start = usize::try_from(start).unwrap_or(usize::MAX);
    let rest = frame.bytes.get(start..).unwrap_or_default();
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    rest.get(..len).unwrap_or(rest)
}

#[cfg(test)]
mod tests;
