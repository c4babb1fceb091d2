//! Reads captures: pcap and pcapng, of Ethernet and of Linux' cooked interfaces (`tcpdump -i any`).

use std::{fs::File, io, path::Path, time::Duration};

use pcap_parser::{
    Block, Linktype, PcapBlockOwned, PcapError, create_reader,
    traits::{PcapNGPacketBlock as _, PcapReaderIterator},
};

/// What is read of a capture at once: more than the longest packet, which Linux takes for 256 KiB at most.
const BUFFER: usize = 1024 * 1024;
/// Interfaces of a capture that are remembered.
const INTERFACES_MAX: usize = 4096;

/// The length of Ethernet's addresses, in front of the type.
pub(super) const ETHERNET_ADDRESSES: usize = 12;
/// Linux' cooked header, version 1: the protocol stands at its end (tcpdump.org's LINKTYPE_LINUX_SLL).
const COOKED_LEN: usize = 16;
/// Version 2: the protocol stands at its beginning (LINKTYPE_LINUX_SLL2).
const COOKED_2_LEN: usize = 20;
/// LINKTYPE_LINUX_SLL2.
const COOKED_2: Linktype = Linktype(276);

/// Why a capture cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file cannot be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// It is no capture, or is broken.
    #[error("{path}: neither pcap nor pcapng, or broken behind {packets} packets")]
    Format {
        /// The file.
        path: String,
        /// The packets before.
        packets: u64,
    },
    /// Of another kind of interface.
    #[error("{path}: link type {link} is neither Ethernet nor Linux cooked")]
    Link {
        /// The file.
        path: String,
        /// The number of the link type.
        link: i32,
    },
}

/// A packet of a capture.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Packet {
    /// When it was captured, since 1970.
    pub at: Duration,
    /// Its bytes from the Ethernet header on. Where the capture has none, the addresses are zero.
    pub frame: Vec<u8>,
}

#[derive(Clone, Copy)]
struct Interface {
    link: Linktype,
    /// Units of time in a second.
    resolution: u64,
    /// Seconds to be added.
    offset_s: i64,
}

/// A capture that is being read.
pub struct Capture {
    path: String,
    reader: Box<dyn PcapReaderIterator>,
    interfaces: Vec<Interface>,
    packets: u64,
    cut: u64,
}

impl Capture {
    /// Opens a capture.
    pub fn open(path: &Path) -> Result<Self, CaptureError> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|source| CaptureError::Io {
            path: name.clone(),
            source,
        })?;
        let reader = create_reader(BUFFER, file).map_err(|_| CaptureError::Format {
            path: name.clone(),
            packets: 0,
        })?;
        Ok(Self {
            path: name,
            reader,
            interfaces: Vec::new(),
            packets: 0,
            cut: 0,
        })
    }

    /// How many packets were not captured whole.
    pub fn cut(&self) -> u64 {
        self.cut
    }

    /// The next packet; `None` at the end.
    pub fn read(&mut self) -> Result<Option<Packet>, CaptureError> {
        loop {
            let is_exhausted = self.reader.reader_exhausted();
            match self.reader.next() {
                Ok((length, block)) => {
                    let found = found_in(&block, &mut self.interfaces);
                    self.reader.consume(length);
                    let Some(Found {
                        at,
                        bytes,
                        len,
                        link,
                    }) = found
                    else {
                        continue;
                    };
                    self.packets += 1;
                    self.cut += u64::from(bytes.len() < len);
                    let frame = ethernet(bytes, link).ok_or_else(|| CaptureError::Link {
                        path: self.path.clone(),
                        link: link.0,
                    })?;
                    return Ok(Some(Packet { at, frame }));
                }
                Err(PcapError::Eof) => return Ok(None),
                Err(PcapError::Incomplete(_)) if !is_exhausted => {
                    if self.reader.refill().is_err() {
                        return Err(self.broken());
                    }
                }
                Err(_) => return Err(self.broken()),
            }
        }
    }

    fn broken(&self) -> CaptureError {
        CaptureError::Format {
            path: self.path.clone(),
            packets: self.packets,
        }
    }
}

/// What a block holds of a packet.
struct Found {
    at: Duration,
    bytes: Vec<u8>,
    /// Its length when it was captured.
    len: usize,
    link: Linktype,
}

fn found_in(block: &PcapBlockOwned<'_>, interfaces: &mut Vec<Interface>) -> Option<Found> {
    match block {
        PcapBlockOwned::LegacyHeader(header) => {
            let nanos = header.is_nanosecond_precision();
            *interfaces = vec![Interface {
                link: header.network,
                resolution: if nanos { 1_000_000_000 } else { 1_000_000 },
                offset_s: 0,
            }];
            None
        }
        PcapBlockOwned::Legacy(packet) => {
            let interface = interfaces.first()?;
            let fraction = u64::from(packet.ts_usec) * (1_000_000_000 / interface.resolution);
            Some(Found {
                at: Duration::from_secs(packet.ts_sec.into()) + Duration::from_nanos(fraction),
                bytes: packet.data.to_vec(),
                len: usize::try_from(packet.origlen).ok()?,
                link: interface.link,
            })
        }
        PcapBlockOwned::NG(Block::SectionHeader(_)) => {
            interfaces.clear();
            None
        }
        PcapBlockOwned::NG(Block::InterfaceDescription(description)) => {
            if interfaces.len() < INTERFACES_MAX {
                interfaces.push(Interface {
                    link: description.linktype,
                    resolution: description.ts_resolution().unwrap_or(1_000_000).max(1),
                    offset_s: description.ts_offset(),
                });
            }
            None
        }
        PcapBlockOwned::NG(Block::EnhancedPacket(packet)) => {
            let interface = interfaces.get(usize::try_from(packet.if_id).ok()?)?;
            let units = u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low);
            let fraction = u128::from(units % interface.resolution) * 1_000_000_000;
            let fraction = fraction / u128::from(interface.resolution);
            let seconds = (units / interface.resolution).saturating_add_signed(interface.offset_s);
            Some(Found {
                at: Duration::from_secs(seconds)
                    + Duration::from_nanos(u64::try_from(fraction).unwrap_or_default()),
                bytes: packet.packet_data().to_vec(),
                len: usize::try_from(packet.origlen).ok()?,
                link: interface.link,
            })
        }
        // Packets without a time, statistics, names and the like.
        PcapBlockOwned::NG(_) => None,
    }
}

/// A packet with an Ethernet header; `None` where its link is of another kind.
fn ethernet(bytes: Vec<u8>, link: Linktype) -> Option<Vec<u8>> {
    let (protocol, payload) = match link {
        Linktype::ETHERNET => return Some(bytes),
        Linktype::LINUX_SLL => (
            bytes.get(COOKED_LEN - 2..COOKED_LEN),
            bytes.get(COOKED_LEN..),
        ),
        COOKED_2 => (bytes.get(..2), bytes.get(COOKED_2_LEN..)),
        _ => return None,
    };
    let mut frame = vec![0; ETHERNET_ADDRESSES];
    frame.extend(protocol.unwrap_or_default());
    frame.extend(payload.unwrap_or_default());
    Some(frame)
}
