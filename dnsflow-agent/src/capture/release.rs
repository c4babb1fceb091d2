//! Puts a held frame back on its veth.
//!
//! The frame leaves through a packet socket (packet(7)). Its packets carry a mark, and the TC program lets this mark
//! pass. Other programs behind it, and the queueing discipline, treat the frame like every other one. The mark stays
//! in the node, because a packet that enters another network namespace loses it (`skb_scrub_packet` in Linux
//! net/core/skbuff.c).
//!
//! No byte is changed: the header in front of the frame describes the offloads that the sender has left to a device.
//! The socket never receives and never waits. Nothing is allocated for a frame.
//!
//! The kernel charges a frame to its socket until the pod's stack has taken it (`skb_orphan` in `ip_rcv_core`, Linux
//! net/ipv4/ip_input.c). An interface with a slow queue, for example with a bandwidth limit, would fill the socket for
//! all others. So the TC program sends a copy in place of the frame, which is charged to nobody (`send_copy` in
//! `dnsflow-ebpf/src/hold.rs`). Nothing is charged to the socket any more when the sending call returns.

mod offload;

use std::{
    io::{self, IoSlice},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType,
        addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque},
        sendmsg_addr, socket_with, sockopt,
    },
};
use zerocopy::IntoBytes as _;

use self::offload::{OffloadError, VnetHeader};
use super::CaptureError;

/// Bytes that may be charged to the socket, when the kernel has no memory for copies. The kernel doubles the number, as
/// it counts what a frame takes in memory (socket(7)).
const SEND_BUFFER_LEN: usize = 1 << 20;

/// `PACKET_VNET_HDR`: a header in front of each frame (Linux include/uapi/linux/if_packet.h).
const PACKET_VNET_HDR: libc::c_int = 15;

/// Where the EtherType stands (IEEE 802.3).
const ETHERTYPE_AT: usize = 12;

/// The way back.
#[derive(Debug)]
pub struct Releaser {
    socket: OwnedFd,
    lost: LostAnswers,
}

/// Why a frame is not back on its veth.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// Too many bytes are charged to the socket already. A later try can succeed.
    #[error("too many bytes wait in the queues of interfaces already")]
    Full,
    /// There is no such interface any more, or it is down.
    #[error("the interface is gone, or down")]
    InterfaceGone,
    /// The frame is too long for the interface, and is not to be cut in segments.
    #[error("the frame is longer than the interface's MTU")]
    TooLong,
    /// The way to the pod was closed.
    #[error("the frame was dropped on the interface: by its queue, a tc program or the pod's end")]
    Dropped,
    /// The frame has a VLAN tag, which no pod's frame has.
    #[error("the frame has a VLAN tag")]
    Tagged,
    /// The frame is to be cut in segments, but is not TCP.
    #[error("the frame needs segmentation, but is no TCP segment")]
    NotSegmentable,
    /// Anything else.
    #[error("the kernel refused the frame")]
    Io(#[source] io::Error),
}

impl ReleaseError {
    /// The reasons, in the order of their counters: labels of a metric.
    const REASONS: [&str; 7] = [
        "full",
        "interface_gone",
        "too_long",
        "dropped",
        "tagged",
        "not_segmentable",
        "refused",
    ];

    const fn index(&self) -> usize {
        match self {
            Self::Full => 0,
            Self::InterfaceGone => 1,
            Self::TooLong => 2,
            Self::Dropped => 3,
            Self::Tagged => 4,
            Self::NotSegmentable => 5,
            Self::Io(_) => 6,
        }
    }

    /// The reason in one word, as the counter has it.
    pub const fn reason(&self) -> &'static str {
        Self::REASONS[self.index()]
    }
}

/// How many frames did not get back onto their veths, by reason. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct LostAnswers(Arc<[AtomicU64; ReleaseError::REASONS.len()]>);

impl LostAnswers {
    /// Every reason with its count, zeros included.
    pub fn read(&self) -> Vec<(&'static str, u64)> {
        let Self(counts) = self;
        let counts = counts.iter().map(|count| count.load(Ordering::Relaxed));
        ReleaseError::REASONS.into_iter().zip(counts).collect()
    }

    fn count(&self, error: &ReleaseError) {
        let Self(counts) = self;
        counts[error.index()].fetch_add(1, Ordering::Relaxed);
    }
}

impl From<OffloadError> for ReleaseError {
    fn from(error: OffloadError) -> Self {
        match error {
            OffloadError::Tagged => Self::Tagged,
            OffloadError::NotTcp => Self::NotSegmentable,
        }
    }
}

/// What `packet_snd` (Linux net/packet/af_packet.c) answers.
impl From<Errno> for ReleaseError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::AGAIN => Self::Full,
            Errno::NXIO | Errno::NODEV | Errno::NETDOWN => Self::InterfaceGone,
            Errno::MSGSIZE => Self::TooLong,
            Errno::NOBUFS => Self::Dropped,
            error => Self::Io(error.into()),
        }
    }
}

impl Releaser {
    /// The way back into the interfaces of this network namespace, with this mark on each packet.
    ///
    /// # Errors
    ///
    /// If the kernel refuses the socket or one of its options.
    pub fn open(mark: u32) -> Result<Self, CaptureError> {
        Ok(Self {
            socket: open_socket(mark)?,
            lost: LostAnswers::default(),
        })
    }

    /// How many frames did not get back, from now on too.
    pub fn lost(&self) -> LostAnswers {
        self.lost.clone()
    }

    /// Puts a frame, Ethernet header first, out of an interface. A TCP segment that devices are to
    /// cut in smaller ones comes with the length of their data, `gso_size`; any other with zero.
    ///
    /// # Errors
    ///
    /// If the frame did not leave, which is counted. An error says nothing about the next frame.
    pub fn release(&self, ifindex: u32, frame: &[u8], gso_size: u16) -> Result<(), ReleaseError> {
        let Self { socket, lost } = self;
        send(socket, ifindex, frame, gso_size).inspect_err(|error| lost.count(error))
    }
}

fn open_socket(mark: u32) -> Result<OwnedFd, CaptureError> {
    let failed = |operation| {
        move |source: Errno| CaptureError::Io {
            operation,
            source: source.into(),
        }
    };
    let socket = socket_with(
        AddressFamily::PACKET,
        SocketType::RAW,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        // No protocol: nothing is received.
        None,
    )
    .map_err(failed("open a packet socket (it needs CAP_NET_RAW)"))?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_MARK, mark).map_err(failed(
        "mark a packet socket's packets (it needs CAP_NET_ADMIN)",
    ))?;
    set_option(&socket, libc::SOL_PACKET, PACKET_VNET_HDR, 1)
        .map_err(failed("set a packet socket's PACKET_VNET_HDR"))?;
    sockopt::set_socket_send_buffer_size_force(&socket, SEND_BUFFER_LEN).map_err(failed(
        "set a packet socket's send buffer (it needs CAP_NET_ADMIN)",
    ))?;
    Ok(socket)
}

fn send(socket: &OwnedFd, ifindex: u32, frame: &[u8], gso_size: u16) -> Result<(), ReleaseError> {
    let header = VnetHeader::of(frame, gso_size)?;
    sendmsg_addr(
        socket,
        &LinkAddress::new(ifindex, frame),
        &[IoSlice::new(header.as_bytes()), IoSlice::new(frame)],
        &mut SendAncillaryBuffer::default(),
        SendFlags::empty(),
    )?;
    Ok(())
}

fn set_option(
    socket: &OwnedFd,
    level: libc::c_int,
    name: libc::c_int,
    value: u32,
) -> Result<(), Errno> {
    // SAFETY: the value is of the length given, and lives longer than the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

/// Which interface a frame goes out of.
struct LinkAddress(libc::sockaddr_ll);

impl LinkAddress {
    fn new(ifindex: u32, frame: &[u8]) -> Self {
        // Before Linux 5.1, nobody but the sender says what a raw packet is.
        let ethertype = frame
            .get(ETHERTYPE_AT..)
            .and_then(<[u8]>::first_chunk)
            .map_or(0, |ethertype| u16::from_ne_bytes(*ethertype));
        Self(libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: ethertype,
            sll_ifindex: ifindex.cast_signed(),
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        })
    }
}

// SAFETY: what is handed out is a whole `sockaddr_ll`.
unsafe impl SocketAddrArg for LinkAddress {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        let Self(address) = self;
        f(
            (&raw const *address).cast(),
            size_of_val(address) as SocketAddrLen,
        )
    }
}

#[cfg(test)]
mod tests;
