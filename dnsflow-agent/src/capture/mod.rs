//! The capture edge: loads the TC program, attaches it to the pods' veths and hands what it
//! captured to the core.
//!
//! It never interprets a packet: what is in a frame is the core's business. It never changes
//! one either: the program's verdict is always "continue".
//!
//! [`load`] gives five parts that are driven apart: [`Attachments`], [`Records`] and
//! [`LinkEvents`] by the hot thread, [`Counters`] and [`ProgramLog`] from wherever it suits.

mod attachments;
mod counters;
mod links;
mod netlink;
mod program;
mod program_log;
mod qdisc;
mod records;
pub mod survey;

use std::io;

use aya::EbpfError;
use dnsflow_common::walk::Ports;

pub use self::{
    attachments::{Attach, AttachError, Attachments},
    counters::Counters,
    links::{LinkEvent, LinkEvents},
    program::{AttachKind, OBJECT, PROGRAM, Program, TcLink},
    program_log::ProgramLog,
    records::{Drained, Records},
};

/// What can be set before the program is loaded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Options {
    /// The size of the ring buffer.
    pub ring: RingSize,
    /// The ports that DNS servers answer from.
    pub ports: Ports,
    /// How to attach; `None` takes TCX where the kernel has it, else clsact.
    pub attach: Option<AttachKind>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ring: RingSize::DEFAULT,
            ports: Ports::DNS,
            attach: None,
        }
    }
}

/// A size that a BPF ring buffer can have: a power of two, from 32 KiB to 1 GiB.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RingSize(u32);

impl RingSize {
    /// 4 MiB: at 200 bytes an answer, 100 ms of 200,000 answers a second.
    pub const DEFAULT: Self = Self(4 << 20);

    /// The smallest one: a multiple of every page size up to 32 KiB that holds the largest record.
    const MIN: u32 = 32 << 10;
    /// The largest one.
    const MAX: u32 = 1 << 30;

    /// A size in bytes.
    pub fn new(bytes: u32) -> Result<Self, CaptureError> {
        if bytes.is_power_of_two() && (Self::MIN..=Self::MAX).contains(&bytes) {
            Ok(Self(bytes))
        } else {
            Err(CaptureError::RingSize { bytes })
        }
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u32 {
        self.0
    }
}

/// Why capturing cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The size is not one that a ring buffer can have.
    #[error(
        "a ring buffer of {bytes} bytes is impossible: it must be a power of two, from {} to {}",
        RingSize::MIN,
        RingSize::MAX
    )]
    RingSize {
        /// The size in bytes.
        bytes: u32,
    },
    /// The kernel refuses BPF to this process.
    #[error(
        "the kernel does not let this process load a BPF program: it needs root, or the \
         capabilities CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    )]
    Permission(#[source] EbpfError),
    /// The kernel has no ring buffer map.
    #[error("this kernel has no BPF ring buffer: dnsflow needs Linux 5.8 or newer")]
    NoRingBuffer(#[source] EbpfError),
    /// The kernel refuses the program.
    #[error("cannot load the BPF program")]
    Load(#[source] EbpfError),
    /// The object lacks something: it is not the one of this agent.
    #[error("the BPF object has no {what} of the name and type that the agent expects")]
    Object {
        /// What is missing.
        what: &'static str,
    },
    /// A file descriptor cannot be watched or read.
    #[error("cannot {operation}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// A loaded program, attached to nothing yet.
#[derive(Debug)]
pub struct Capture {
    /// Attaches and detaches.
    pub attachments: Attachments<Program>,
    /// What was captured.
    pub records: Records,
    /// How many packets met which end.
    pub counters: Counters,
    /// Interfaces that come and go.
    pub links: LinkEvents,
    /// What the program has to say.
    pub log: ProgramLog,
}

/// Loads the embedded program. To be called within a tokio runtime, the one that will drive
/// [`Records`].
pub fn load(options: &Options) -> Result<Capture, CaptureError> {
    let mut program = Program::load(options)?;
    let records = Records::new(program.take_map("RECORDS")?)?;
    let counters = Counters::new(program.take_map("COUNTERS")?, &records)?;
    let log = ProgramLog::new(program.ebpf_mut())?;
    Ok(Capture {
        records,
        counters,
        log,
        links: LinkEvents::new()?,
        attachments: Attachments::new(program),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_sizes_that_the_kernel_would_refuse_are_refused() {
        for bytes in [0, 1 << 14, 48 << 10, (1 << 30) + 4096, 1 << 31] {
            assert!(RingSize::new(bytes).is_err(), "{bytes}");
        }
        for bytes in [32 << 10, 1 << 20, 1 << 30, RingSize::DEFAULT.bytes()] {
            assert_eq!(RingSize::new(bytes).expect("fits").bytes(), bytes);
        }
    }
}
