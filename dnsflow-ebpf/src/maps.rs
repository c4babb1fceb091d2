//! The maps and constants that the agent shares with the program, by name.

use aya_ebpf::{
    Global,
    macros::map,
    maps::{PerCpuArray, RingBuf},
};
use dnsflow_common::{
    Reason,
    record::{MAX_CAPTURE, RecordHeader},
    walk::{PORTS_MAX, Ports, ServerPorts},
};

/// A record while it is put together.
#[repr(C)]
pub struct Scratch {
    /// The header.
    pub header: RecordHeader,
    /// The captured bytes.
    pub frame: [u8; MAX_CAPTURE],
}

/// Records for the agent. It sets the size when it loads the program.
#[map]
pub static RECORDS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// One record per CPU: TC programs run with preemption off, one at a time on a CPU.
#[map]
pub static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// Packets by [`Reason::index`].
#[map]
static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Reason::COUNT, 0);

/// The UDP ports that DNS servers answer from; the agent may set others before it loads the
/// program.
#[unsafe(no_mangle)]
static DNS_PORTS: Global<[u16; PORTS_MAX]> = Global::new(*Ports::DNS.as_array());

/// The ports that the agent has set, read where they are needed.
pub struct DnsPorts;

impl ServerPorts for DnsPorts {
    #[inline(always)]
    fn contains(&self, port: u16) -> bool {
        Ports::from_array(DNS_PORTS.load()).contains(port)
    }
}

/// Counts a packet under its reason.
#[inline(always)]
pub fn count(reason: Reason) {
    if let Some(counter) = COUNTERS.get_ptr_mut(reason.index()) {
        // SAFETY: the counter is this CPU's own, and no other program runs on it meanwhile.
        unsafe { *counter += 1 };
    }
}
