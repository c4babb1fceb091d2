//! Messages and attributes of netlink (netlink(7), rtnetlink(7)). What is too short ends the
//! reading; nothing panics.

use std::{io, os::fd::OwnedFd};

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType,
    netlink::SocketAddrNetlink, recv, sendto, socket_with,
};

// Linux include/uapi/linux/netlink.h and rtnetlink.h.
/// `struct nlmsghdr`: length, type, flags, sequence, port.
pub(crate) const HEADER_LEN: usize = 16;
/// `struct rtattr`: length, type.
const ATTRIBUTE_HEADER_LEN: usize = 4;
const ALIGN_TO: usize = 4;
/// What is left of an attribute's type without the flags for nested values and byte order.
const NLA_TYPE_MASK: u16 = 0x3fff;
/// `enum` of `nlmsg_type`: the result of a request, zero or a negative error number.
const NLMSG_ERROR: u16 = 2;
/// The end of a dump.
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`
const NLM_F_REQUEST_DUMP: u16 = 0x301;
/// `NLM_F_REQUEST | NLM_F_ACK`
const NLM_F_REQUEST_ACK: u16 = 0x005;
/// The flag of an attribute that holds attributes.
const NLA_F_NESTED: u16 = 0x8000;
/// The kernel makes no longer datagrams for a dump (`netlink_dump` in Linux net/netlink/af_netlink.c).
const DATAGRAM_LEN: usize = 32 * 1024;
/// The most datagrams of one dump; each has ten entries or more.
const DATAGRAMS_MAX: usize = 100_000;

/// A socket of this protocol; `None` is `NETLINK_ROUTE`.
pub(crate) fn open(protocol: Option<Protocol>, flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        flags,
        protocol,
    )?)
}

/// Sends a request to the kernel.
pub(crate) fn send(socket: &OwnedFd, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let kernel = SocketAddrNetlink::new(0, 0);
    let request = request(kind, flags, body);
    sendto(socket, &request, SendFlags::empty(), &kernel)?;
    Ok(())
}

/// Requests a change, and waits until the kernel says how it went.
pub(crate) fn change(socket: &OwnedFd, kind: u16, body: &[u8]) -> io::Result<()> {
    send(socket, kind, NLM_F_REQUEST_ACK, body)?;
    let mut reply = [0; 8192];
    let (_, len) = recv(socket, &mut reply[..], RecvFlags::empty())?;
    let mut replies = messages(reply.get(..len).unwrap_or_default());
    let reply = replies.find(|message| message.kind == NLMSG_ERROR);
    result(reply.map_or(&[], |message| message.body))
}

/// Requests a list, and hands its messages to `each`. `of` says in an error what is listed.
pub(crate) fn dump(
    socket: &OwnedFd,
    kind: u16,
    body: &[u8],
    of: &str,
    mut each: impl FnMut(Message<'_>),
) -> io::Result<()> {
    send(socket, kind, NLM_F_REQUEST_DUMP, body)?;
    let mut datagram = vec![0; DATAGRAM_LEN];
    for _ in 0..DATAGRAMS_MAX {
        let (_, len) = recv(socket, &mut datagram[..], RecvFlags::empty())?;
        for message in messages(datagram.get(..len).unwrap_or_default()) {
            match message.kind {
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => return result(message.body),
                _ => each(message),
            }
        }
    }
    let endless = format!("the kernel's list of {of} has no end");
    Err(io::Error::other(endless))
}

/// A message without its header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message<'a> {
    /// `nlmsg_type`.
    pub(crate) kind: u16,
    /// What follows the header.
    pub(crate) body: &'a [u8],
}

/// The messages in a datagram.
pub(crate) fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let len = usize::try_from(u32_at(datagram, 0)?).ok()?;
        let body = datagram.get(HEADER_LEN..len)?;
        let kind = u16_at(datagram, 4)?;
        datagram = datagram
            .get(len.next_multiple_of(ALIGN_TO)..)
            .unwrap_or_default();
        Some(Message { kind, body })
    })
}

/// The value of the first attribute of this kind.
pub(crate) fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16_at(attributes, 0)?);
        let value = attributes.get(ATTRIBUTE_HEADER_LEN..len)?;
        if u16_at(attributes, 2)? & NLA_TYPE_MASK == kind {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(ALIGN_TO)..)?;
    }
}

/// A request with this body, in the first sequence and to the kernel.
fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    // Bodies are a few attributes of some bytes each.
    let len = u32::try_from(HEADER_LEN + body.len()).unwrap_or(u32::MAX);
    let mut request = len.to_ne_bytes().to_vec();
    request.extend(kind.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    // Sequence and port.
    request.extend([0; 8]);
    request.extend(body);
    request
}

/// Appends an attribute.
pub(crate) fn put(attributes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    // Values are some bytes long.
    let len = u16::try_from(ATTRIBUTE_HEADER_LEN + value.len()).unwrap_or(u16::MAX);
    attributes.extend(len.to_ne_bytes());
    attributes.extend(kind.to_ne_bytes());
    attributes.extend(value);
    attributes.resize(attributes.len().next_multiple_of(ALIGN_TO), 0);
}

/// Appends an attribute that holds what `fill` appends.
pub(crate) fn put_nested(attributes: &mut Vec<u8>, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
    let mut nested = Vec::new();
    fill(&mut nested);
    put(attributes, kind | NLA_F_NESTED, &nested);
}

/// What a message of the kind [`NLMSG_ERROR`] says (`struct nlmsgerr` begins with the negative
/// error number, or zero).
fn result(body: &[u8]) -> io::Result<()> {
    match u32_at(body, 0).map(u32::cast_signed) {
        Some(0) => Ok(()),
        Some(number) => Err(io::Error::from_raw_os_error(number.wrapping_neg())),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// A text value, without the NUL at its end.
pub(crate) fn text(value: &[u8]) -> Option<String> {
    let text = value.split(|byte| *byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..)?
        .first_chunk()
        .copied()
        .map(u16::from_ne_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes
        .get(at..)?
        .first_chunk()
        .copied()
        .map(u32::from_ne_bytes)
}
