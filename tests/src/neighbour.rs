//! A pod that only wants its own names: what others do to it can be seen.

use std::{
    fs,
    io::{self, ErrorKind},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    ops::Range,
    os::fd::AsRawFd as _,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::{
    net::sockopt::set_socket_linger,
    time::{ClockId, clock_gettime},
};

use crate::{flood::address, frames::query, lab::Lab, pod::DNS};

/// An answer that takes longer is lost.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// A SYN is repeated after one second, and then after two more (RFC 6298, section 2.1).
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// With so many names that cannot be reached, the rest is not tried.
const UNREACHED_MAX: usize = 5;
/// Where the "internet" listens.
const PORT: u16 = 80;

/// What became of a pod's names.
#[derive(Clone, Debug, Default)]
pub struct Visits {
    /// From the question to the connection, of each name that was answered and reached.
    pub took: Vec<Duration>,
    /// The numbers of the names that were answered.
    pub answered: Vec<u32>,
    /// What was lost.
    pub losses: Vec<Loss>,
}

/// What a name has lost.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// Which part of it.
    pub kind: LossKind,
    /// When its question was sent.
    pub asked: Instant,
    /// When the connection was made, or it was given up.
    pub ended: Instant,
}

/// A part of a visit that can be lost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LossKind {
    /// No answer came.
    Answer,
    /// A SYN was sent again.
    FirstPacket,
    /// There was no connection.
    Connection,
}

impl Loss {
    /// Whether both were under way at the same time.
    pub fn meets(&self, other: &Self) -> bool {
        self.asked <= other.ended && other.asked <= self.ended
    }
}

impl Visits {
    /// How many names were tried.
    pub fn count(&self) -> usize {
        let unanswered = self.lost(LossKind::Answer);
        self.answered.len() + unanswered
    }

    /// How many have lost this.
    pub fn lost(&self, kind: LossKind) -> usize {
        let losses = self.losses.iter().filter(|loss| loss.kind == kind);
        losses.count()
    }

    /// How many names have lost something while the other pod lost nothing.
    pub fn lost_beside(&self, other: &Self) -> usize {
        let alone = |loss: &&Loss| !other.losses.iter().any(|of_other| of_other.meets(loss));
        self.losses.iter().filter(alone).count()
    }
}

/// The name with this number below `domain`.
pub fn numbered(number: u32, domain: &str) -> String {
    format!("n{number}.{domain}")
}

/// Asks for each of these names, one every `pause`, and connects at once to where it leads.
pub fn visit(
    lab: &Lab,
    pod: &str,
    domain: &str,
    numbers: Range<u32>,
    pause: Duration,
) -> Result<Visits> {
    lab.pod(pod).netns().run(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(DNS)?;
        let mut visits = Visits::default();
        let begin = Instant::now();
        for (turn, number) in (1..).zip(numbers) {
            if visits.lost(LossKind::Connection) == UNREACHED_MAX {
                break;
            }
            let asked = Instant::now();
            let lost = if ask(&socket, number, domain)? {
                visits.answered.push(number);
                let connected = connect((address(number), PORT).into());
                if connected.is_ok() {
                    visits.took.push(asked.elapsed());
                }
                match connected {
                    Ok(0) => None,
                    Ok(_) => Some(LossKind::FirstPacket),
                    Err(error) if error.kind() == ErrorKind::TimedOut => Some(LossKind::Connection),
                    Err(error) => return Err(error).context(numbered(number, domain)),
                }
            } else {
                Some(LossKind::Answer)
            };
            visits.losses.extend(lost.map(|kind| Loss {
                kind,
                asked,
                ended: Instant::now(),
            }));
            thread::sleep((pause * turn).saturating_sub(begin.elapsed()));
        }
        Ok(visits)
    })
}

/// Asks for a name; whether the answer came.
fn ask(socket: &UdpSocket, number: u32, domain: &str) -> Result<bool> {
    let id = number as u16;
    socket.send(&query(id, &numbered(number, domain)))?;
    let end = Instant::now() + ANSWER_LIMIT;
    let mut buffer = [0; 1500];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        socket.set_read_timeout(Some(left))?;
        match socket.recv(&mut buffer) {
            Ok(length) if length > 2 && buffer[..2] == id.to_be_bytes() => return Ok(true),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Connects, and ends the connection without leaving anything behind. Returns how many SYNs were sent again.
fn connect(to: SocketAddr) -> io::Result<u32> {
    let stream = TcpStream::connect_timeout(&to, CONNECT_LIMIT)?;
    set_socket_linger(&stream, Some(Duration::ZERO))?;
    sent_again(&stream)
}

/// How many SYNs were sent again in this thread's network namespace, ever (`TCPSynRetrans`, Linux
/// `net/ipv4/proc.c`).
pub fn syns_repeated() -> Result<u64> {
    let file = fs::read_to_string("/proc/thread-self/net/netstat")?;
    let mut lines = file.lines().filter(|line| line.starts_with("TcpExt:"));
    let names = lines.next().context("the names")?.split(' ');
    let values = lines.next().context("the values")?.split(' ');
    let mut found = names
        .zip(values)
        .filter(|(name, _)| *name == "TCPSynRetrans");
    let (_, count) = found.next().context("TCPSynRetrans")?;
    Ok(count.parse()?)
}

/// How many segments of this connection were sent again: of one that has only just been made, SYNs
/// (`tcpi_total_retrans` of tcp(7), `TCP_INFO`).
pub fn sent_again(stream: &TcpStream) -> io::Result<u32> {
    // SAFETY: all its fields are numbers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes there, and both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok(info.tcpi_total_retrans),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The time since the machine has started, which is the same in all processes (`CLOCK_MONOTONIC`).
pub fn uptime() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
