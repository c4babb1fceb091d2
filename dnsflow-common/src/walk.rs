//! The way from a frame's first byte to its DNS message: Ethernet, VLAN tags, IPv4 or IPv6 with options and extension
//! headers, UDP or TCP, DNS header.
//!
//! The BPF programs use it to decide on captures, the agent uses it on captured frames. Both run the same code, so
//! they cannot disagree. It reads headers only, never allocates, never panics, and reads nothing outside the frame.
//! It never takes the bytes of a later fragment for a header.

mod ip;
mod link;
mod reader;
mod transport;

pub use self::{
    ip::{Addresses, EXTENSIONS_MAX, IpHeader, PROTOCOL_TCP, PROTOCOL_UDP, Version},
    link::{MAC_DST_AT, MAC_SRC_AT, TAGS_MAX, Tags},
    reader::{PORTS_MAX, Ports, Reader, ServerPorts},
    transport::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
};
use self::{
    ip::{Ip, Part},
    transport::{TcpHeader, tcp, udp},
};
use crate::Reason;

/// What a DNS server sends that matters. Offsets count from the frame's first byte.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Packet {
    /// A whole UDP datagram with a DNS answer.
    UdpAnswer(Message),
    /// A piece of a TCP stream in which DNS answers may be, or its beginning or end.
    TcpSegment(Segment),
    /// A piece of a UDP datagram in which a DNS answer may be.
    Fragment(Fragment),
}

/// What a pod sends that matters. Offsets count from the frame's first byte.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Sent {
    /// A whole UDP datagram with a DNS query.
    UdpQuery(Message),
    /// A piece of a TCP stream in which DNS queries may be, or its beginning or end.
    TcpSegment(Segment),
    /// What may begin a connection to something else than a DNS server.
    Attempt(Attempt),
}

/// The ports from this one on are those that Linux gives to clients, up to 60999
/// (`net.ipv4.ip_local_port_range` in Linux Documentation/networking/ip-sysctl.rst).
pub const CLIENT_PORT_MIN: u16 = 32_768;

/// What may begin a connection: a TCP segment with SYN and without ACK, or a whole UDP datagram from
/// [`CLIENT_PORT_MIN`] or a port above. A datagram from another port is more often the answer of a
/// server, which no rule for connections concerns.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Attempt {
    /// The IP header.
    pub ip: IpHeader,
    /// The VLAN tags within the frame.
    pub tags: Tags,
    /// The IP protocol: [`PROTOCOL_TCP`] or [`PROTOCOL_UDP`].
    pub protocol: u8,
    /// The destination port.
    pub dst_port: u16,
}

/// A DNS message that fills a UDP datagram.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Message {
    /// The IP header.
    pub ip: IpHeader,
    /// The VLAN tags within the frame.
    pub tags: Tags,
    /// The UDP source port.
    pub src_port: u16,
    /// The UDP destination port.
    pub dst_port: u16,
    /// Where the UDP header begins.
    pub l4: u32,
    /// Where the DNS message begins.
    pub payload: u32,
    /// The DNS message's length as the headers say; where a frame was cut, more than is there.
    pub payload_len: u32,
}

/// A segment of a TCP stream: data, or one of SYN, FIN and RST, or several of these.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Segment {
    /// The IP header.
    pub ip: IpHeader,
    /// The VLAN tags within the frame.
    pub tags: Tags,
    /// The TCP source port.
    pub src_port: u16,
    /// The TCP destination port.
    pub dst_port: u16,
    /// The sequence number of the first byte of data, or of the SYN in front of it.
    pub seq: u32,
    /// The acknowledgment number; it counts where [`TCP_ACK`] is set.
    pub ack: u32,
    /// The control bits: [`TCP_SYN`], [`TCP_FIN`], [`TCP_RST`] and others.
    pub flags: u8,
    /// Where the TCP header begins.
    pub l4: u32,
    /// Where the data begin.
    pub payload: u32,
    /// The length of the data as the headers say; where a frame was cut, more than is there.
    pub payload_len: u32,
}

/// A fragment of a UDP datagram.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Fragment {
    /// The IP header.
    pub ip: IpHeader,
    /// The VLAN tags within the frame.
    pub tags: Tags,
    /// What the fragments of one datagram have in common; 16 bits with IPv4.
    pub id: u32,
    /// Where in what was fragmented this piece begins, in bytes.
    pub offset: u32,
    /// Whether others follow behind this piece.
    pub more: bool,
    /// Where the piece begins.
    pub payload: u32,
    /// The piece's length as the headers say; where a frame was cut, more than is there.
    pub payload_len: u32,
    /// The UDP header, which the first fragment alone has.
    pub first: Option<FirstFragment>,
}

/// What the first fragment of a UDP datagram says about all of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FirstFragment {
    /// The UDP source port.
    pub src_port: u16,
    /// The UDP destination port.
    pub dst_port: u16,
    /// Where the UDP header begins: with IPv6 extension headers behind the fragment header, not
    /// where the piece begins.
    pub l4: u32,
    /// Where the DNS message begins.
    pub message: u32,
    /// The whole DNS message's length.
    pub message_len: u32,
}

/// `frame`'s bytes from `start` on, `len` of them; `None` where it was cut before.
fn piece(frame: &[u8], start: u32, len: u32) -> Option<&[u8]> {
    let start = usize::try_from(start).ok()?;
    let len = usize::try_from(len).ok()?;
    frame.get(start..)?.get(..len)
}

impl Message {
    /// The DNS message in `frame`, the frame that was walked; `None` where the frame was cut
    /// before the message's end.
    pub fn payload_of<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8]> {
        piece(frame, self.payload, self.payload_len)
    }
}

impl Segment {
    /// The data in `frame`, the frame that was walked; `None` where the frame was cut before
    /// their end.
    pub fn payload_of<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8]> {
        piece(frame, self.payload, self.payload_len)
    }
}

impl Fragment {
    /// The piece in `frame`, the frame that was walked; `None` where the frame was cut before
    /// its end.
    pub fn payload_of<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8]> {
        piece(frame, self.payload, self.payload_len)
    }
}

/// Finds a packet of a DNS server in a frame, with a source port in `ports`. There are three kinds: a response to a
/// standard query, without error and with a record in its answer section; a fragment of such a response; and a TCP
/// segment that has data, or begins or ends the stream.
///
/// A later fragment has no port. So every later fragment of UDP is found, and the caller has to know whether its
/// first one mattered.
///
/// Any other packet gives the reason. Checksums are not verified: with offloads, only the receiver completes them.
#[inline(always)]
pub fn from_server<R: Reader, P: ServerPorts>(frame: &R, ports: &P) -> Result<Packet, Reason> {
    match from_server_or_empty(frame, ports)? {
        (packet, None) => Ok(packet),
        (_, Some(reason)) => Err(reason),
    }
}

/// The same, and responses with an error or without a record: they answer a query, too. They come with the reason
/// for which there is nothing to read in them.
#[inline(always)]
pub fn from_server_or_empty<R: Reader, P: ServerPorts>(
    frame: &R,
    ports: &P,
) -> Result<(Packet, Option<Reason>), Reason> {
    let (tags, ip) = headers(frame)?;
    match (ip.protocol, ip.part) {
        (PROTOCOL_TCP, Part::Whole) => {
            let header = tcp(frame, &ip)?;
            match ports.contains(header.src_port()) {
                true => {
                    let segment = segment(frame, tags, &ip, header)?;
                    Ok((Packet::TcpSegment(segment), None))
                }
                false => Err(Reason::OtherPort),
            }
        }
        (PROTOCOL_TCP, _) => Err(Reason::FragmentedTcp),
        (
            _,
            Part::Later {
                id,
                offset,
                more,
                payload,
            },
        ) => {
            let fragment = Fragment {
                ip: ip.header,
                tags,
                id,
                offset,
                more,
                payload,
                payload_len: ip.payload_len,
                first: None,
            };
            Ok((Packet::Fragment(fragment), None))
        }
        (PROTOCOL_UDP, part) => {
            let udp = udp(frame, &ip)?;
            if !ports.contains(udp.src_port) {
                return Err(Reason::OtherPort);
            }
            udp.check_len(&ip)?;
            let empty = response(frame, udp.payload, udp.payload_len)?;
            let packet = match part {
                Part::First { id, payload } => Packet::Fragment(Fragment {
                    ip: ip.header,
                    tags,
                    id,
                    offset: 0,
                    more: true,
                    payload,
                    // The extension headers between the piece's beginning and the UDP header
                    // belong to it.
                    payload_len: ip.payload_len + (ip.payload - payload),
                    first: Some(FirstFragment {
                        src_port: udp.src_port,
                        dst_port: udp.dst_port,
                        l4: ip.payload,
                        message: udp.payload,
                        message_len: udp.payload_len,
                    }),
                }),
                _ => Packet::UdpAnswer(Message {
                    ip: ip.header,
                    tags,
                    src_port: udp.src_port,
                    dst_port: udp.dst_port,
                    l4: ip.payload,
                    payload: udp.payload,
                    payload_len: udp.payload_len,
                }),
            };
            Ok((packet, empty))
        }
        _ => Err(Reason::OtherProtocol),
    }
}

/// Reads a TCP segment that has data, or begins or ends a stream.
#[inline(always)]
fn segment<R: Reader>(
    frame: &R,
    tags: Tags,
    ip: &Ip,
    header: TcpHeader,
) -> Result<Segment, Reason> {
    let tcp = header.check(frame, ip)?;
    if tcp.payload_len == 0 && tcp.flags & (TCP_SYN | TCP_FIN | TCP_RST) == 0 {
        return Err(Reason::TcpWithoutData);
    }
    Ok(Segment {
        ip: ip.header,
        tags,
        src_port: tcp.src_port,
        dst_port: tcp.dst_port,
        seq: tcp.seq,
        ack: tcp.ack,
        flags: tcp.flags,
        l4: ip.payload,
        payload: tcp.payload,
        payload_len: tcp.payload_len,
    })
}

/// Finds what matters of what a pod sends: a standard query over UDP with one question, to one of
/// `ports`; a segment of a TCP stream to one of `ports` that has data or begins or ends the stream; what
/// may begin a connection to another port.
///
/// A query in fragments is none: it would have to be longer than what a question can fill.
#[inline(always)]
pub fn from_pod<R: Reader, P: ServerPorts>(frame: &R, ports: &P) -> Result<Sent, Reason> {
    let (tags, ip) = headers(frame)?;
    match (ip.protocol, ip.part) {
        (PROTOCOL_TCP, Part::Whole) => {
            let header = tcp(frame, &ip)?;
            let dst_port = header.dst_port();
            if ports.contains(dst_port) {
                return segment(frame, tags, &ip, header).map(Sent::TcpSegment);
            }
            return match header.begins() {
                true => Ok(Sent::Attempt(Attempt {
                    ip: ip.header,
                    tags,
                    protocol: PROTOCOL_TCP,
                    dst_port,
                })),
                false => Err(Reason::OtherPort),
            };
        }
        (PROTOCOL_TCP, _) => return Err(Reason::FragmentedTcp),
        (PROTOCOL_UDP, Part::Whole) => {}
        (PROTOCOL_UDP, _) => return Err(Reason::FragmentedQuery),
        _ => return Err(Reason::OtherProtocol),
    }
    let udp = udp(frame, &ip)?;
    if !ports.contains(udp.dst_port) {
        return match udp.src_port >= CLIENT_PORT_MIN {
            true => Ok(Sent::Attempt(Attempt {
                ip: ip.header,
                tags,
                protocol: PROTOCOL_UDP,
                dst_port: udp.dst_port,
            })),
            false => Err(Reason::OtherPort),
        };
    }
    udp.check_len(&ip)?;
    query(frame, udp.payload, udp.payload_len)?;
    Ok(Sent::UdpQuery(Message {
        ip: ip.header,
        tags,
        src_port: udp.src_port,
        dst_port: udp.dst_port,
        l4: ip.payload,
        payload: udp.payload,
        payload_len: udp.payload_len,
    }))
}

/// Reads everything below UDP and TCP.
#[inline(always)]
fn headers<R: Reader>(frame: &R) -> Result<(Tags, Ip), Reason> {
    let link = link::link(frame)?;
    let ip = match link.ethertype {
        link::ETHERTYPE_IPV4 => ip::ipv4(frame, link.l3)?,
        link::ETHERTYPE_IPV6 => ip::ipv6(frame, link.l3)?,
        _ => return Err(Reason::NotIp),
    };
    Ok((link.tags, ip))
}

/// The IP header of a frame, whatever follows it: another protocol, a later fragment, an unknown extension
/// header. `None` if the frame has none, or too many VLAN tags.
#[inline(always)]
pub fn ip_header<R: Reader>(frame: &R) -> Option<IpHeader> {
    let link = link::link(frame).ok()?;
    let version = match link.ethertype {
        link::ETHERTYPE_IPV4 => Version::V4,
        link::ETHERTYPE_IPV6 => Version::V6,
        _ => return None,
    };
    let [first] = frame.read::<1>(link.l3)?;
    (u16::from(first >> 4) == version as u16).then_some(IpHeader {
        version,
        l3: link.l3,
    })
}

/// The DNS header (RFC 1035, section 4.1.1).
pub const DNS_LEN: u32 = 12;
/// QR in the third byte: a response.
const DNS_QR: u8 = 0x80;
/// The opcode in the third byte; QUERY is 0.
const DNS_OPCODE: u8 = 0x78;
/// The response code in the fourth byte; NOERROR is 0.
const DNS_RCODE: u8 = 0x0f;

#[inline(always)]
fn dns_header<R: Reader>(
    frame: &R,
    payload: u32,
    payload_len: u32,
) -> Result<[u8; DNS_LEN as usize], Reason> {
    if payload_len < DNS_LEN {
        return Err(Reason::TruncatedDns);
    }
    frame.read(payload).ok_or(Reason::TruncatedDns)
}

/// Checks that a DNS header is that of an answer. Gives the reason for which there is nothing to read in it, if it
/// repeats its question all the same.
#[inline(always)]
fn response<R: Reader>(
    frame: &R,
    payload: u32,
    payload_len: u32,
) -> Result<Option<Reason>, Reason> {
    let header = dns_header(frame, payload, payload_len)?;
    if header[2] & DNS_QR == 0 {
        return Err(Reason::NotResponse);
    }
    if header[2] & DNS_OPCODE != 0 {
        return Err(Reason::Opcode);
    }
    let empty = match u16::from_be_bytes([header[6], header[7]]) {
        _ if header[3] & DNS_RCODE != 0 => Some(Reason::Rcode),
        0 => Some(Reason::NoAnswers),
        _ => None,
    };
    match one_question(&header) {
        Ok(()) => Ok(empty),
        Err(reason) => Err(empty.unwrap_or(reason)),
    }
}

/// Checks that a DNS header is that of a query.
#[inline(always)]
fn query<R: Reader>(frame: &R, payload: u32, payload_len: u32) -> Result<(), Reason> {
    let header = dns_header(frame, payload, payload_len)?;
    if header[2] & DNS_QR != 0 {
        return Err(Reason::NotQuery);
    }
    if header[2] & DNS_OPCODE != 0 {
        return Err(Reason::Opcode);
    }
    one_question(&header)
}

/// One question is what all servers take (RFC 9619).
#[inline(always)]
fn one_question(header: &[u8; DNS_LEN as usize]) -> Result<(), Reason> {
    match u16::from_be_bytes([header[4], header[5]]) {
        1 => Ok(()),
        _ => Err(Reason::Questions),
    }
}

#[cfg(test)]
mod tests;
