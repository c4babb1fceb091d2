//! The packet walk and the question on any frame: what is found lies where it says, and the place
//! where the bytes are kept makes no difference.

#![no_main]

use dnsflow_common::{
    key::{FragmentKey, PENDING_PER_INTERFACE, Query, ResolverKey, SourceKey},
    question::{Buffer, NameHash, Names, question},
    walk::{
        DNS_LEN, IpHeader, Packet, Ports, Reader, Segment, Sent, ServerPorts as _, from_pod,
        from_server,
    },
};
use libfuzzer_sys::fuzz_target;

/// A frame kept in two places, as a packet buffer with a page fragment is.
struct Split<'a> {
    head: &'a [u8],
    tail: &'a [u8],
}

impl Reader for Split<'_> {
    fn len(&self) -> u32 {
        (self.head.len() + self.tail.len()) as u32
    }

    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut piece = [0; N];
        for (at, to) in piece.iter_mut().enumerate() {
            let at = offset as usize + at;
            let tail = at.wrapping_sub(self.head.len());
            *to = *self.head.get(at).or_else(|| self.tail.get(tail))?;
        }
        Some(piece)
    }
}

/// Every name whose hash is even.
struct Even;

impl Names for Even {
    fn all(&self) -> bool {
        false
    }

    fn mentions(&self, hash: NameHash) -> bool {
        hash.0.is_multiple_of(2)
    }
}

fn read_question(frame: &[u8], payload: u32, payload_len: u32) {
    let start = (payload + DNS_LEN) as usize;
    let end = frame.len().min((payload + payload_len) as usize);
    let bytes = frame.get(start..end).unwrap_or_default();
    let mut buffer = Buffer::default();
    let len = bytes.len().min(buffer.bytes.len());
    buffer.bytes[..len].copy_from_slice(&bytes[..len]);
    let clean = question(&mut buffer, len as u32, &Even);
    // What stands behind the end, and what was read before, changes nothing.
    buffer.bytes[len..].fill(0xc0);
    assert_eq!(question(&mut buffer, len as u32, &Even), clean);
}

fn keys(frame: &[u8], ip: IpHeader) {
    assert!(ip.addresses(&frame).is_some());
    assert!(ResolverKey::source(&frame, ip, 53).is_some());
    assert!(ResolverKey::destination(&frame, ip, 53).is_some());
    assert!(SourceKey::source(&frame, 1, ip).is_some());
    assert!(SourceKey::destination(&frame, 1, ip).is_some());
    let sent = Query::sent(&frame, ip, (1, 53), 1);
    assert!(sent.is_some_and(|query| query.set() < PENDING_PER_INTERFACE));
    assert!(Query::answered(&frame, ip, (53, 1), 1).is_some());
    assert!(FragmentKey::new(&frame, 1, ip, 1).is_some());
}

fn segment(frame: &[u8], found: Segment) {
    assert!(found.ip.l3 < found.l4 && found.l4 < found.payload);
    assert!(found.payload as usize <= frame.len());
    keys(frame, found.ip);
    let _ = found.payload_of(frame);
}

fuzz_target!(|data: &[u8]| {
    let Some((split_at, frame)) = data.split_first() else {
        return;
    };
    let (head, tail) = frame.split_at(usize::from(*split_at).min(frame.len()));
    let split = Split { head, tail };
    let len = frame.len() as u32;

    let found = from_server(&frame, &Ports::DNS);
    assert_eq!(from_server(&split, &Ports::DNS), found);
    match found {
        Ok(Packet::UdpAnswer(found)) => {
            assert!(found.ip.l3 < found.l4 && found.l4 < found.payload);
            assert!(found.payload + DNS_LEN <= len && found.payload_len >= DNS_LEN);
            keys(frame, found.ip);
            read_question(frame, found.payload, found.payload_len);
            let _ = found.payload_of(frame);
        }
        Ok(Packet::TcpSegment(found)) => segment(frame, found),
        Ok(Packet::Fragment(found)) => {
            assert!(found.ip.l3 < found.payload && found.payload <= len);
            assert_eq!(found.first.is_some(), found.offset == 0);
            assert!(found.offset > 0 || found.more);
            keys(frame, found.ip);
            if let Some(first) = found.first {
                assert!(found.payload <= first.l4 && first.l4 < first.message);
                read_question(frame, first.message, first.message_len);
            }
            let _ = found.payload_of(frame);
        }
        Err(_) => {}
    }

    let query = from_pod(&frame, &Ports::DNS);
    assert_eq!(from_pod(&split, &Ports::DNS), query);
    match query {
        Ok(Sent::UdpQuery(found)) => {
            assert!(found.ip.l3 < found.l4 && found.l4 < found.payload);
            assert!(found.payload + DNS_LEN <= len && found.payload_len >= DNS_LEN);
            keys(frame, found.ip);
            read_question(frame, found.payload, found.payload_len);
        }
        Ok(Sent::TcpSegment(found)) => segment(frame, found),
        Ok(Sent::Attempt(found)) => {
            assert!(found.ip.l3 < len && !Ports::DNS.contains(found.dst_port));
            keys(frame, found.ip);
        }
        Err(_) => {}
    }
});
