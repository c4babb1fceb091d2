//! Raw frames at an interface.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    time::Duration,
};

/// The index of an interface in this thread's network namespace; zero where there is none.
///
/// # Panics
///
/// Where the name has a NUL in it.
pub fn ifindex(name: &str) -> u32 {
    let name = std::ffi::CString::new(name).expect("no NUL");
    // SAFETY: the name ends with a NUL.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// An interface, as raw frames.
pub struct Wire(OwnedFd);

impl Wire {
    /// Opens the interface of this name in this thread's network namespace.
    ///
    /// # Panics
    ///
    /// Where the kernel refuses, or there is no such interface.
    pub fn open(name: &str) -> Self {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        let socket = socket(libc::AF_PACKET, libc::SOCK_RAW, i32::from(protocol));
        let socket = socket.expect("a socket");
        // SAFETY: all zero is a valid address.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = ifindex(name) as i32;
        // SAFETY: the address is of the length given.
        let bound = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as u32,
            )
        };
        assert_eq!(bound, 0, "{}", io::Error::last_os_error());
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(Duration::from_secs(10)),
        )
        .expect("a timeout");
        Self(socket)
    }

    /// Sends a frame out of the interface.
    ///
    /// # Panics
    ///
    /// Where the kernel does not take it.
    pub fn send(&self, frame: &[u8]) {
        let sent = rustix::io::write(&self.0, frame).expect("sent");
        assert_eq!(sent, frame.len());
    }

    /// Waits until this frame comes in; others, such as IPv6's own, are passed over.
    ///
    /// # Panics
    ///
    /// Where it does not come for ten seconds.
    pub fn expect(&self, frame: &[u8]) {
        self.expect_any(&[frame]);
    }

    /// Waits until one of these frames comes in.
    ///
    /// # Panics
    ///
    /// Where none comes for ten seconds.
    pub fn expect_any(&self, frames: &[impl AsRef<[u8]>]) {
        self.expect_that(|found| frames.iter().any(|frame| frame.as_ref() == found));
    }

    /// Waits until a frame comes in that is the wanted one.
    ///
    /// # Panics
    ///
    /// Where none comes for ten seconds.
    pub fn expect_that(&self, is_wanted: impl Fn(&[u8]) -> bool) {
        let mut buffer = vec![0; 1 << 17];
        loop {
            let len = rustix::io::read(&self.0, &mut buffer[..]).expect("the frame arrives");
            if is_wanted(&buffer[..len]) {
                return;
            }
        }
    }
}

fn socket(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain integers; the descriptor is new and ours.
    unsafe {
        match libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}
