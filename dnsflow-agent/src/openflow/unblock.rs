//! Clears OVN's mark on connections that ovs-vswitchd itself tracks.
//!
//! In the userspace datapath, only a packet that a `ct` action tracks and commits can change a connection. dpctl can
//! only dump and flush, and the OpenFlow extension `NXT_CT_FLUSH` can only flush. So the client hands the switch a
//! packet with the connection's addresses and ports (`OFPT_PACKET_OUT`). The packet goes through one action and is
//! not forwarded: `ct(commit,zone=…,exec(set_field:0/1->ct_mark))`.
//!
//! A packet of TCP has no flag at all. Open vSwitch calls such a packet invalid before it checks the connection's
//! state, so the state stays. It still sets the mark of the packet's connection (`tcp_conn_update` in its
//! lib/conntrack-tcp.c, `process_one` in lib/conntrack.c, the same in 3.1 to 4.0). If the connection has ended, the
//! packet makes no new one. The kernel would not find the connection of an invalid packet, so netlink is used there.

use std::{io, net::IpAddr, path::Path};

use bytes::{BufMut as _, BytesMut};
use dnsflow_core::values::{connection::BlockedConnection, flow::Protocol};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

use super::{
    ProtocolError,
    error::SwitchError,
    wire::{self, Message},
};

/// Why marks cannot be taken off.
#[derive(Debug, thiserror::Error)]
pub enum UnblockError {
    /// The socket cannot be used.
    #[error("the bridge's management socket")]
    Io(#[from] io::Error),
    /// The switch does not speak OpenFlow 1.5.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// The switch does not take such a packet.
    #[error("the switch refuses a packet: {0}")]
    Refused(String),
}

/// Takes the mark off these connections, over its own connection to the bridge. Returns the number
/// of connections that still have the mark.
///
/// # Errors
///
/// If the switch cannot be reached, or refuses all packets.
pub async fn unblock(
    socket: &Path,
    connections: &[BlockedConnection],
) -> Result<usize, UnblockError> {
    let mut stream = UnixStream::connect(socket).await?;
    let mut output = BytesMut::new();
    // The switch takes no request before the greeting.
    wire::put_hello(&mut output, 1);
    stream.write_all(&output).await?;
    output.clear();
    let mut input = BytesMut::new();
    let hello = receive(&mut stream, &mut input).await?;
    if hello.kind != wire::OFPT_HELLO || !wire::hello_accepts(&hello)? {
        return Err(ProtocolError::NoHello(hello.kind).into());
    }
    let mut failed = 0;
    for (connection, xid) in connections.iter().zip(2..) {
        match packet(connection) {
            Some(packet) => wire::put_packet_out(&mut output, xid, connection.zone, &packet),
            None => failed += 1,
        }
    }
    wire::put_barrier(&mut output, 1);
    stream.write_all(&output).await?;
    let mut refusal = None;
    loop {
        let message = receive(&mut stream, &mut input).await?;
        match message.kind {
            wire::OFPT_BARRIER_REPLY => break,
            wire::OFPT_ERROR => {
                failed += 1;
                refusal = Some(SwitchError::parse(&message.body)?.to_string());
            }
            _ => {}
        }
    }
    match refusal {
        Some(refusal) if failed == connections.len() => Err(UnblockError::Refused(refusal)),
        _ => Ok(failed),
    }
}

async fn receive(stream: &mut UnixStream, input: &mut BytesMut) -> Result<Message, UnblockError> {
    loop {
        if let Some(message) = Message::split(input)? {
            return Ok(message);
        }
        if stream.read_buf(input).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
    }
}

const TCP_LEN: usize = 20;
const UDP_LEN: usize = 8;

/// A packet of this connection, Ethernet header first, that by itself changes nothing of the
/// connection. `None` for SCTP, whose hosts always send packets (RFC 9260, section 8.3).
fn packet(connection: &BlockedConnection) -> Option<Vec<u8>> {
    let (number, mut l4) = match connection.protocol {
        Protocol::Tcp => {
            let mut tcp = vec![0; TCP_LEN];
            // The header's length in words of four bytes; no flags (RFC 9293, section 3.1).
            tcp[12] = 5 << 4;
            (6, tcp)
        }
        Protocol::Udp => {
            let mut udp = vec![0; UDP_LEN];
            udp[5] = 8;
            (17, udp)
        }
        Protocol::Sctp => return None,
    };
    l4[..2].copy_from_slice(&connection.src_port.to_be_bytes());
    l4[2..4].copy_from_slice(&connection.dst_port.to_be_bytes());
    let len = l4.len() as u16;
    let mut pseudo = Vec::new();
    let mut packet = vec![0; 12];
    match (connection.src, connection.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let mut header = [0; 20];
            header[0] = 0x45;
            header[2..4].copy_from_slice(&(20 + len).to_be_bytes());
            header[8] = 64;
            header[9] = number;
            header[12..16].copy_from_slice(&src.octets());
            header[16..].copy_from_slice(&dst.octets());
            let sum = checksum(&header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            pseudo.put_slice(&header[12..]);
            packet.put_u16(0x0800);
            packet.put_slice(&header);
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            pseudo.put_slice(&src.octets());
            pseudo.put_slice(&dst.octets());
            packet.put_u16(0x86dd);
            packet.put_u32(6 << 28);
            packet.put_u16(len);
            packet.put_u8(number);
            packet.put_u8(64);
            packet.put_slice(&pseudo);
        }
        _ => return None,
    }
    // The pseudo header's other fields come to the same sum in both families (RFC 768, RFC 8200,
    // section 8.1).
    pseudo.put_u16(number.into());
    pseudo.put_u16(len);
    pseudo.put_slice(&l4);
    let sum = match checksum(&pseudo) {
        0 => 0xffff,
        sum => sum,
    };
    let at = if number == 6 { 16 } else { 6 };
    l4[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    packet.put_slice(&l4);
    Some(packet)
}

/// The Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2);
    let sum: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    // Folded twice, it fits.
    !(folded as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(protocol: Protocol, src: &str, dst: &str) -> BlockedConnection {
        BlockedConnection {
            port: "ns1_pod1".into(),
            zone: 7,
            protocol,
            src: src.parse().expect("an address"),
            src_port: 40_000,
            dst: dst.parse().expect("an address"),
            dst_port: 443,
        }
    }

    #[test]
    fn packets_are_whole_and_their_checksums_right() {
        for (protocol, number) in [(Protocol::Tcp, 6), (Protocol::Udp, 17)] {
            let v4 = packet(&connection(protocol, "10.244.0.5", "203.0.113.2")).expect("one");
            let (ip, l4) = v4[14..].split_at(20);
            assert_eq!(checksum(ip), 0);
            assert_eq!(
                usize::from(u16::from_be_bytes([ip[2], ip[3]])),
                v4.len() - 14
            );
            let pseudo = [&ip[12..], &[0, number, 0, l4.len() as u8], l4].concat();
            assert_eq!(checksum(&pseudo), 0);
            assert_eq!(l4[..4], [0x9c, 0x40, 0x01, 0xbb]);

            let v6 = packet(&connection(protocol, "fd00::5", "2001:db8::2")).expect("one");
            let (ip, l4) = v6[14..].split_at(40);
            assert_eq!(usize::from(u16::from_be_bytes([ip[4], ip[5]])), l4.len());
            let pseudo = [&ip[8..], &[0, number, 0, l4.len() as u8], l4].concat();
            assert_eq!(checksum(&pseudo), 0);
        }
    }

    #[test]
    fn a_packet_of_tcp_has_no_flags() {
        let packet = packet(&connection(Protocol::Tcp, "10.244.0.5", "203.0.113.2")).expect("one");
        assert_eq!(packet[34 + 12..34 + 14], [0x50, 0]);
    }

    #[test]
    fn sctp_and_mixed_families_have_no_packet() {
        assert_eq!(
            packet(&connection(Protocol::Sctp, "10.244.0.5", "203.0.113.2")),
            None
        );
        assert_eq!(
            packet(&connection(Protocol::Tcp, "10.244.0.5", "2001:db8::2")),
            None
        );
    }
}
