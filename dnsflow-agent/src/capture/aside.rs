//! What the programs tell aside from the answers that open addresses: where pods behind an EgressFirewall
//! try to connect to, and which of their answers no rule mentions.

use std::{io, os::fd::AsFd as _};

use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use dnsflow_common::record;
use dnsflow_core::{
    Timestamp,
    io::input::Frame,
    values::{connection::Attempt, flow::Protocol},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::{CaptureError, Drained, program::take_map, records};

/// A record of the ring buffer `ASIDE`.
#[derive(Clone, Copy, Debug)]
pub enum AsideRecord<'a> {
    /// A pod tries to connect somewhere.
    Attempt(Attempt),
    /// A pod got this answer. No rule mentions its name.
    Answer(Frame<'a>),
}

/// The ring buffer `ASIDE`.
pub struct Aside(RingBuf<MapData>);

impl Aside {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, CaptureError> {
        take_map(ebpf, "ASIDE").map(Self)
    }

    /// Waits until there is something to [`drain`](Self::drain). May be cancelled.
    ///
    /// # Errors
    ///
    /// When the kernel refuses to watch the ring buffer, or the runtime shuts down.
    pub async fn readable(&self) -> io::Result<()> {
        // SAFETY: the ring buffer owns its map's descriptor, always gives this one, and keeps it open
        // for longer than the wait.
        let ring = unsafe { AsyncFd::register_with_interest(self.0.as_fd(), Interest::READABLE) }?;
        ring.readable().await?.retain_ready();
        Ok(())
    }

    /// Hands at most `limit` records to `each`, oldest first.
    pub fn drain(&mut self, limit: usize, mut each: impl FnMut(AsideRecord<'_>)) -> Drained {
        for _ in 0..limit {
            let Some(item) = self.0.next() else {
                return Drained::Empty;
            };
            if let Some(told) = record::Aside::parse(&item).and_then(told) {
                each(told);
            }
        }
        Drained::Limit
    }
}

fn told(record: record::Aside<'_>) -> Option<AsideRecord<'_>> {
    match record {
        record::Aside::Answer(answer) => Some(AsideRecord::Answer(records::frame(answer)?)),
        record::Aside::Attempt(record::Attempt { header, key }) => {
            Some(AsideRecord::Attempt(Attempt {
                ifindex: key.ifindex,
                protocol: Protocol::of_number(key.protocol)?,
                address: key.dst(),
                port: key.dst_port,
                at: Timestamp::from_nanos(header.captured_at_ns),
            }))
        }
    }
}
