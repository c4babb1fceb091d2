//! Real connections of a pod, many at a time, and the server that answers them over UDP.
//!
//! Each attempt has a source port of its own, which the caller gives: a connection that comes a
//! second time with the same addresses and ports meets what conntrack remembers of the first one.

use std::{
    fmt,
    io::{Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    process::Command,
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Error, Result, bail, ensure};
use rustix::net::{
    AddressFamily, SocketType, bind, connect, ipproto, socket,
    sockopt::{Timeout, set_socket_reuseaddr, set_socket_timeout},
};

use crate::{
    lab::Lab,
    pod::Pod,
    process::{run, spawn_detached, wait_listening},
    topology::{web_addresses, web_addresses_v6},
    web::PORTS,
};

/// How long a datagram waits for its echo before it is sent again.
const RESEND: Duration = Duration::from_millis(250);

/// What the datagrams say.
const GREETING: &[u8] = b"dnsflow";

/// A transport that has connections or datagrams to try.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Protocol {
    /// A web page is read to its end.
    Tcp,
    /// A datagram comes back.
    Udp,
}

impl Protocol {
    /// As rules and OVN write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl FromStr for Protocol {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "tcp" => Ok(Self::Tcp),
            "udp" => Ok(Self::Udp),
            _ => bail!("`{text}` is neither tcp nor udp"),
        }
    }
}

/// One attempt to reach a server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Attempt {
    /// The transport.
    pub protocol: Protocol,
    /// The server.
    pub to: SocketAddr,
    /// The pod's port.
    pub source_port: u16,
    /// After how long it is given up.
    pub limit: Duration,
}

/// What came of an attempt.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The server answered after this long.
    Reached(Duration),
    /// Nothing came within the limit.
    TimedOut,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            protocol,
            to,
            source_port,
            limit,
        } = self;
        let limit = limit.as_millis();
        write!(f, "{},{to},{source_port},{limit}", protocol.name())
    }
}

impl FromStr for Attempt {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let [protocol, to, source_port, limit] = text.split(',').collect::<Vec<_>>()[..] else {
            bail!("`{text}` is not PROTOCOL,ADDRESS:PORT,SOURCE-PORT,MILLISECONDS");
        };
        Ok(Self {
            protocol: protocol.parse()?,
            to: to.parse()?,
            source_port: source_port.parse()?,
            limit: Duration::from_millis(limit.parse()?),
        })
    }
}

impl Attempt {
    /// Makes the attempt. An error that is not silence is an error.
    fn make(&self) -> Result<Outcome> {
        let start = Instant::now();
        let reached = match self.protocol {
            Protocol::Tcp => self.read_page(start)?,
            Protocol::Udp => self.exchange(start)?,
        };
        Ok(if reached {
            Outcome::Reached(start.elapsed())
        } else {
            Outcome::TimedOut
        })
    }

    fn socket(&self, kind: SocketType) -> Result<std::os::fd::OwnedFd> {
        let (family, any) = match self.to {
            SocketAddr::V4(_) => (AddressFamily::INET, Ipv4Addr::UNSPECIFIED.into()),
            SocketAddr::V6(_) => (AddressFamily::INET6, Ipv6Addr::UNSPECIFIED.into()),
        };
        let protocol = match kind {
            SocketType::DGRAM => ipproto::UDP,
            _ => ipproto::TCP,
        };
        let socket = socket(family, kind, Some(protocol))?;
        set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &SocketAddr::new(any, self.source_port))
            .with_context(|| format!("cannot bind to port {}", self.source_port))?;
        Ok(socket)
    }

    fn read_page(&self, start: Instant) -> Result<bool> {
        let socket = self.socket(SocketType::STREAM)?;
        // connect(2) gives up after the timeout for sending (socket(7), SO_SNDTIMEO).
        set_socket_timeout(&socket, Timeout::Send, Some(self.limit))?;
        if let Err(error) = connect(&socket, &self.to) {
            return silence(error.into());
        }
        let left = self.limit.saturating_sub(start.elapsed());
        let left = left.max(Duration::from_millis(1));
        set_socket_timeout(&socket, Timeout::Recv, Some(left))?;
        let mut stream = TcpStream::from(socket);
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut page = String::new();
        if let Err(error) = stream.read_to_string(&mut page) {
            return silence(error);
        }
        ensure!(page.starts_with("HTTP/1.1 200 "), "not a page: {page:?}");
        Ok(true)
    }

    fn exchange(&self, start: Instant) -> Result<bool> {
        let socket = UdpSocket::from(self.socket(SocketType::DGRAM)?);
        socket.connect(self.to)?;
        let mut buffer = [0; GREETING.len()];
        loop {
            let left = self.limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            socket.send(GREETING)?;
            socket.set_read_timeout(Some(left.min(RESEND)))?;
            match socket.recv(&mut buffer) {
                Ok(length) if buffer[..length] == *GREETING => return Ok(true),
                Ok(length) => bail!("not the echo: {:?}", &buffer[..length]),
                Err(error) => silence(error)?,
            };
        }
    }
}

/// Whether an error is no more than silence; others are errors.
fn silence(error: std::io::Error) -> Result<bool> {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    let in_progress = error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error());
    if in_progress || matches!(error.kind(), TimedOut | WouldBlock) {
        Ok(false)
    } else {
        Err(error.into())
    }
}

/// Makes all these attempts at the same time and prints a line for each, in their order: the
/// milliseconds until the answer, or `timeout`.
pub fn make_all(attempts: &[Attempt]) -> Result<()> {
    let running: Vec<_> = attempts
        .iter()
        .copied()
        .map(|attempt| thread::spawn(move || attempt.make()))
        .collect();
    for (attempt, thread) in attempts.iter().zip(running) {
        let outcome = thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            .with_context(|| attempt.to_string())?;
        match outcome {
            Outcome::Reached(after) => println!("{}", after.as_millis()),
            Outcome::TimedOut => println!("timeout"),
        }
    }
    Ok(())
}

/// Sends every datagram back from the address that it came to, until the process is killed.
pub fn serve_echo(sockets: &[SocketAddr]) -> Result<()> {
    let mut servers = Vec::new();
    for address in sockets {
        let socket =
            UdpSocket::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        servers.push(thread::spawn(move || -> Result<()> {
            let mut buffer = [0; 2048];
            loop {
                let (length, from) = socket.recv_from(&mut buffer)?;
                socket.send_to(&buffer[..length], from)?;
            }
        }));
    }
    for server in servers {
        server
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    }
    Ok(())
}

impl Pod<'_> {
    /// Makes all these attempts from the pod at the same time.
    pub fn probe(&self, attempts: &[Attempt]) -> Result<Vec<Outcome>> {
        let mut command = Command::new(self.lab().helper());
        command.arg("probe");
        command.args(attempts.iter().map(Attempt::to_string));
        self.enter(&mut command)?;
        let outcomes = run(&mut command)?
            .lines()
            .map(|line| match line {
                "timeout" => Ok(Outcome::TimedOut),
                after => Ok(Outcome::Reached(Duration::from_millis(after.parse()?))),
            })
            .collect::<Result<Vec<_>>>()?;
        ensure!(outcomes.len() == attempts.len(), "not one line for each");
        Ok(outcomes)
    }
}

impl Lab {
    /// Starts a server in the "internet" that sends datagrams back, at the addresses and ports of
    /// the web servers; returns when it listens. It ends with the lab.
    pub fn serve_echo(&self) -> Result<()> {
        let mut command = Command::new(self.helper());
        command.arg("echo");
        let addresses = web_addresses().map(std::net::IpAddr::from);
        let mut tables = vec!["udp"];
        if self.cluster().dual_stack {
            tables.push("udp6");
        }
        let addresses_v6 = web_addresses_v6().map(std::net::IpAddr::from);
        let addresses_v6 = addresses_v6.filter(|_| self.cluster().dual_stack);
        for address in addresses.chain(addresses_v6) {
            command.args(PORTS.map(|port| SocketAddr::new(address, port).to_string()));
        }
        // The directory marks the process as this lab's.
        command.arg(self.base()).current_dir("/");
        self.pod("inet").netns().enter(&mut command)?;
        let log = self.base().join("log/echo.log");
        let pid = spawn_detached(&mut command, &log, &self.socket("echo.pid"))?;
        for table in tables {
            for port in PORTS {
                wait_listening(pid, table, port)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_written_as_it_is_read() {
        let attempt = Attempt {
            protocol: Protocol::Udp,
            to: "[2001:db8::1]:80".parse().expect("an address"),
            source_port: 10_000,
            limit: Duration::from_millis(400),
        };
        let text = attempt.to_string();
        assert_eq!(text, "udp,[2001:db8::1]:80,10000,400");
        assert_eq!(text.parse::<Attempt>().expect("an attempt"), attempt);
    }
}
