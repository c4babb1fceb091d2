//! Interfaces of this network namespace that come and go, as rtnetlink tells (rtnetlink(7)).

use std::{io, os::fd::OwnedFd};

use rustix::{
    io::Errno,
    net::{RecvFlags, SocketFlags, bind, netlink::SocketAddrNetlink, recv},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime::Handle,
};

use super::CaptureError;
use crate::netlink;

/// What happened to an interface.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum LinkEvent {
    /// It is there: it came, or something about it changed.
    Present {
        /// Its name.
        name: String,
        /// Its index.
        ifindex: u32,
    },
    /// It is gone from this network namespace.
    Gone {
        /// The index that it had.
        ifindex: u32,
    },
    /// Events were lost: anything may have happened.
    Overrun,
}

/// The stream of [`LinkEvent`]s.
#[derive(Debug)]
pub struct LinkEvents {
    socket: AsyncFd<OwnedFd>,
    buffer: Box<[u8; BUFFER_LEN]>,
}

/// The kernel's messages are made for a page; a link's statistics and virtual functions can make
/// them longer, and netlink(7) advises 8 KiB at least.
const BUFFER_LEN: usize = 32 * 1024;
/// The multicast group of link changes (`RTMGRP_LINK`, Linux `include/uapi/linux/rtnetlink.h`).
const RTMGRP_LINK: u32 = 1;

impl LinkEvents {
    /// Events from now on, to be read within `runtime`.
    pub(super) fn new(runtime: &Handle) -> Result<Self, CaptureError> {
        let _entered = runtime.enter();
        let open = || -> io::Result<OwnedFd> {
            let socket = netlink::open(None, SocketFlags::NONBLOCK)?;
            bind(&socket, &SocketAddrNetlink::new(0, RTMGRP_LINK))?;
            Ok(socket)
        };
        let failed = |source| CaptureError::Io {
            operation: "listen for changes of interfaces (rtnetlink)",
            source,
        };
        let socket = open().map_err(failed)?;
        // SAFETY: an `OwnedFd` is one descriptor that stays open as long as it lives.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) };
        Ok(Self {
            socket: socket.map_err(|error| failed(error.into()))?,
            buffer: Box::new([0; BUFFER_LEN]),
        })
    }

    /// Waits until there is something to [`drain`](Self::drain). May be cancelled.
    ///
    /// # Errors
    ///
    /// When the runtime shuts down.
    pub async fn readable(&self) -> io::Result<()> {
        self.socket.readable().await?.retain_ready();
        Ok(())
    }

    /// Hands out the events that are there.
    ///
    /// # Errors
    ///
    /// Where the socket cannot be read any more.
    pub fn drain(&mut self, mut each: impl FnMut(LinkEvent)) -> io::Result<()> {
        let buffer = &mut self.buffer;
        let drained = self.socket.try_io_mut(Interest::READABLE, |socket| {
            loop {
                match recv(&*socket, &mut buffer[..], RecvFlags::TRUNC) {
                    Ok((_, len)) => match buffer.get(..len) {
                        Some(messages) => parse(messages, &mut each),
                        None => each(LinkEvent::Overrun),
                    },
                    Err(Errno::NOBUFS) => each(LinkEvent::Overrun),
                    Err(error) => return Err(io::Error::from(error)),
                }
            }
        });
        match drained {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

// Linux include/uapi/linux/rtnetlink.h and if_link.h.
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const IFINFOMSG_LEN: usize = 16;
const IFLA_IFNAME: u16 = 3;

/// Reads the messages of one datagram. What is too short or of another type is passed over.
fn parse(datagram: &[u8], each: &mut impl FnMut(LinkEvent)) {
    netlink::messages(datagram).filter_map(event).for_each(each);
}

fn event(message: netlink::Message<'_>) -> Option<LinkEvent> {
    // struct ifinfomsg: family, padding, type, index, flags, change.
    let ifindex = netlink::u32_at(message.body, 4)?;
    match message.kind {
        RTM_DELLINK => Some(LinkEvent::Gone { ifindex }),
        RTM_NEWLINK => {
            let attributes = message.body.get(IFINFOMSG_LEN..)?;
            let name = netlink::text(netlink::attribute(attributes, IFLA_IFNAME)?)?;
            Some(LinkEvent::Present { name, ifindex })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
