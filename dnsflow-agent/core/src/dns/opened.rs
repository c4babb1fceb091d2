//! The addresses that the program in the kernel has opened.

use std::{net::IpAddr, time::Duration};

use dnsflow_common::{
    key::EntryKey,
    opening::{MESSAGE_MAX, Message},
    walk::{self, Packet, Ports},
};

use crate::values::limits::DNS_MESSAGE_MIN;

/// What the kernel opens of an answer, if its class is known.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Opened {
    pub(crate) addresses: Vec<IpAddr>,
    /// The TTL of each.
    pub(crate) ttl: Duration,
}

/// Reads an answer as the kernel does, by the same code; `None` if it leaves the answer to the agent.
pub(crate) fn read(frame: &[u8], ports: &Ports) -> Option<Opened> {
    let Ok(Packet::UdpAnswer(message)) = walk::from_server(&frame, ports) else {
        return None;
    };
    read_message(message.payload_of(frame)?)
}

pub(super) fn read_message(bytes: &[u8]) -> Option<Opened> {
    let mut message = Message::default();
    if bytes.len() > MESSAGE_MAX as usize {
        return None;
    }
    message.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    let len = u32::try_from(bytes.len()).ok()?;
    message.read(len, name_len(bytes)?)?;
    let addresses = (0..message.count()).map(|number| {
        // The key of an entry says which version its address has.
        EntryKey::told(0, message.version(), message.address(number)).address()
    });
    Some(Opened {
        addresses: addresses.collect(),
        ttl: Duration::from_secs(message.ttl().into()),
    })
}

/// The length of the question's name without the root label.
fn name_len(message: &[u8]) -> Option<u32> {
    let mut at = DNS_MESSAGE_MIN;
    loop {
        match usize::from(*message.get(at)?) {
            0 => return u32::try_from(at - DNS_MESSAGE_MIN).ok(),
            len => at += 1 + len,
        }
    }
}
