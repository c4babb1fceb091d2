//! A packet socket on the host side of a pod's veth: what really went over the wire, and when.
//!
//! The kernel hands a frame to packet sockets behind TC egress and before TC ingress
//! (`dev_hard_start_xmit` and `__netif_receive_skb_core` in Linux net/core/dev.c): an answer that is
//! held is seen when it is released.

use std::{
    io,
    mem::{size_of, zeroed},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::lab::Lab;
use rustix::time::{ClockId, clock_gettime};

const FRAME_BYTES_MAX: usize = 2048;
/// Room for what comes while the reader is busy.
const ROOM: libc::c_int = 64 << 20;

/// The capture.
#[derive(Debug)]
pub(crate) struct Tap {
    socket: OwnedFd,
    frame: Box<[u8]>,
}

/// A frame that went over the wire.
#[derive(Debug)]
pub(crate) struct Seen<'a> {
    /// When, on the clock that [`wall`] reads.
    pub(crate) at: Duration,
    /// Its bytes, Ethernet header first.
    pub(crate) frame: &'a [u8],
}

/// The time now on the clock of the kernel's packet time stamps (`CLOCK_REALTIME`).
pub(crate) fn wall() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Realtime)).unwrap_or_default()
}

fn done(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn set(socket: &OwnedFd, option: libc::c_int, value: &libc::timeval) -> io::Result<()> {
    set_bytes(socket, option, value)
}

fn set_bytes<T>(socket: &OwnedFd, option: libc::c_int, value: &T) -> io::Result<()> {
    let length = size_of::<T>() as libc::socklen_t;
    let value: *const T = value;
    // SAFETY: the value is as long as said, and plain data.
    done(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.cast(),
            length,
        )
    })?;
    Ok(())
}

impl Tap {
    /// Begins to capture at a pod's veth. A read waits for at most `patience`.
    pub(crate) fn open(lab: &Lab, pod: &str, patience: Duration) -> Result<Self> {
        let veth = lab.host_veth(pod)?;
        let socket = lab
            .node()
            .run(|| open(&veth).with_context(|| format!("cannot capture at {veth}")))?;
        let patience = libc::timeval {
            tv_sec: patience.as_secs() as libc::time_t,
            tv_usec: patience.subsec_micros().into(),
        };
        set(&socket, libc::SO_RCVTIMEO, &patience)?;
        Ok(Self {
            socket,
            frame: vec![0; FRAME_BYTES_MAX].into(),
        })
    }

    /// The next frame, in either direction; `None` when none comes in time.
    pub(crate) fn read(&mut self) -> Result<Option<Seen<'_>>> {
        let mut control = [0u64; 16];
        let mut part = libc::iovec {
            iov_base: self.frame.as_mut_ptr().cast(),
            iov_len: self.frame.len(),
        };
        // SAFETY: all zeros is a valid msghdr.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: the header points to buffers that live here, as long as it says.
        let length = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, 0) };
        let Ok(length) = usize::try_from(length) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error).context("cannot read what was captured"),
            };
        };
        let at = stamp(&message).context("a frame without time stamp")?;
        Ok(Some(Seen {
            at,
            frame: &self.frame[..length],
        }))
    }

    /// An error if frames were lost since the beginning.
    pub(crate) fn complete(&self) -> Result<()> {
        let mut statistics = [0u32; 2];
        let mut length = size_of_val(&statistics) as libc::socklen_t;
        // SAFETY: the buffer is as long as said: `struct tpacket_stats` (linux/if_packet.h).
        done(unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                statistics.as_mut_ptr().cast(),
                &raw mut length,
            )
        })?;
        let [_, lost] = statistics;
        ensure!(lost == 0, "the capture has lost {lost} frames");
        Ok(())
    }
}

fn open(veth: &str) -> io::Result<OwnedFd> {
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // Without a protocol it captures nothing before it is bound.
    // SAFETY: no memory is handed over.
    let socket = done(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
    // SAFETY: the descriptor is new and ours.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    set_bytes(&socket, libc::SO_TIMESTAMPNS, &1 as &libc::c_int)?;
    set_bytes(&socket, libc::SO_RCVBUFFORCE, &ROOM)?;
    let name = std::ffi::CString::new(veth)?;
    // SAFETY: the string ends with a zero.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    // SAFETY: all zeros is a valid address.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = done(index as libc::c_int)?;
    let address: *const libc::sockaddr_ll = &address;
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: the address is as long as said.
    done(unsafe { libc::bind(socket.as_raw_fd(), address.cast(), length) })?;
    Ok(socket)
}

fn stamp(message: &libc::msghdr) -> Option<Duration> {
    // SAFETY: recvmsg(2) has filled the control buffer that the header points to.
    let header = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    if (header.cmsg_level, header.cmsg_type) != (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) {
        return None;
    }
    // SAFETY: behind this header stands a timespec (socket(7)).
    let time = unsafe {
        libc::CMSG_DATA(header)
            .cast::<libc::timespec>()
            .read_unaligned()
    };
    let seconds = u64::try_from(time.tv_sec).ok()?;
    Some(Duration::new(seconds, u32::try_from(time.tv_nsec).ok()?))
}

/// Of an Ethernet frame with IPv4: protocol, and what is behind the IPv4 header.
fn ipv4(frame: &[u8]) -> Option<(u8, [u8; 4], &[u8])> {
    if frame.get(12..14)? != [0x08, 0x00] {
        return None;
    }
    let packet = &frame[14..];
    let header = usize::from(packet.first()? & 0x0f) * 4;
    let destination = packet.get(16..20)?.try_into().ok()?;
    Some((*packet.get(9)?, destination, packet.get(header..)?))
}

/// The DNS message in a frame from a DNS server to the pod.
pub(crate) fn dns_answer(frame: &[u8]) -> Option<&[u8]> {
    let (protocol, _, udp) = ipv4(frame)?;
    let is_answer = protocol == 17 && udp.get(..2)? == [0, 53];
    is_answer.then(|| udp.get(8..)).flatten()
}

/// The connection that a frame of the pod opens: its destination and its own port.
pub(crate) fn syn(frame: &[u8]) -> Option<([u8; 4], u16)> {
    let (protocol, destination, tcp) = ipv4(frame)?;
    // SYN without ACK (RFC 9293, section 3.1).
    let is_syn = protocol == 6 && tcp.get(13)? & 0x12 == 0x02;
    is_syn.then_some((destination, u16::from_be_bytes([tcp[0], tcp[1]])))
}
