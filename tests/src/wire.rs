//! Raw frames at an interface.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    ptr,
    time::Duration,
};

use rustix::net::sockopt::{Timeout, set_socket_timeout};

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
        Self(packet_socket(name, &[], Duration::from_secs(10)))
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

    /// Sends a frame out of the interface; whether the kernel took it.
    pub fn offer(&self, frame: &[u8]) -> bool {
        rustix::io::write(&self.0, frame).is_ok()
    }

    /// Bytes of memory that frames on their way are charged for (socket(7), SIOCOUTQ).
    ///
    /// # Panics
    ///
    /// Where the kernel does not say.
    pub fn charged(&self) -> i32 {
        let mut bytes = 0;
        // SAFETY: the kernel writes an int, which lives longer than the call. TIOCOUTQ is the number of SIOCOUTQ.
        let asked = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        assert_eq!(asked, 0, "{}", io::Error::last_os_error());
        bytes
    }

    /// Gives the packets from now on this mark (socket(7), SO_MARK).
    pub fn mark(&self, mark: u32) -> io::Result<()> {
        // SAFETY: the value is of the length given.
        let set = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MARK,
                (&raw const mark).cast(),
                size_of_val(&mark) as u32,
            )
        };
        if set == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Waits until this frame comes in; others, such as IPv6's own, are passed over.
    ///
    /// # Panics
    ///
    /// Where it does not come for ten seconds.
    #[track_caller]
    pub fn expect(&self, frame: &[u8]) {
        self.expect_any(&[frame]);
    }

    /// Waits until one of these frames comes in.
    ///
    /// # Panics
    ///
    /// Where none comes for ten seconds.
    #[track_caller]
    pub fn expect_any(&self, frames: &[impl AsRef<[u8]>]) {
        self.expect_that(|found| frames.iter().any(|frame| frame.as_ref() == found));
    }

    /// Waits until a frame comes in that is the wanted one.
    ///
    /// # Panics
    ///
    /// Where none comes for ten seconds.
    #[track_caller]
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

/// A packet socket for all frames of the interface of this name in this thread's network namespace.
/// `options`: of the level `SOL_PACKET`, with their values. No read waits for longer than `timeout`.
///
/// # Panics
///
/// Where the kernel refuses, or there is no such interface.
pub fn packet_socket(name: &str, options: &[(i32, u32)], timeout: Duration) -> OwnedFd {
    // With protocol 0, the socket takes no frame of other interfaces before it is bound (packet(7)).
    // SAFETY: plain integers; the descriptor is new and ours.
    let socket = unsafe {
        let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
        assert_ne!(fd, -1, "{}", io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    };
    for (option, value) in options {
        // SAFETY: the value is of the length given.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                *option,
                ptr::from_ref(value).cast(),
                size_of_val(value) as u32,
            )
        };
        assert_eq!(set, 0, "{}", io::Error::last_os_error());
    }
    // SAFETY: all zero is a valid address.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
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
    set_socket_timeout(&socket, Timeout::Recv, Some(timeout)).expect("a timeout");
    socket
}
