//! Messages and attributes of netlink (netlink(7), rtnetlink(7)). What is too short ends the
//! reading; nothing panics.

// Linux include/uapi/linux/netlink.h and rtnetlink.h.
/// `struct nlmsghdr`: length, type, flags, sequence, port.
pub(super) const HEADER_LEN: usize = 16;
/// `struct rtattr`: length, type.
const ATTRIBUTE_HEADER_LEN: usize = 4;
const ALIGN_TO: usize = 4;

/// A message without its header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    /// `nlmsg_type`.
    pub(super) kind: u16,
    /// What follows the header.
    pub(super) body: &'a [u8],
}

/// The messages in a datagram.
pub(super) fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
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
pub(super) fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16_at(attributes, 0)?);
        let value = attributes.get(ATTRIBUTE_HEADER_LEN..len)?;
        if u16_at(attributes, 2)? == kind {
            return Some(value);
        }
        attributes = attributes.get(len.next_multiple_of(ALIGN_TO)..)?;
    }
}

/// A text value, without the NUL at its end.
pub(super) fn text(value: &[u8]) -> Option<String> {
    let text = value.split(|byte| *byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..)?
        .first_chunk()
        .copied()
        .map(u16::from_ne_bytes)
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes
        .get(at..)?
        .first_chunk()
        .copied()
        .map(u32::from_ne_bytes)
}
