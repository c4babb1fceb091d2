//! The pods' side: questions, and connections to the addresses that they lead to.

use std::{
    io,
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use dnsflow_tests::{lab::Lab, topology::DNS_SERVICE};
use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SocketType, connect, recv, socket, sockopt},
};

use super::wire;

/// An answer that takes longer is lost.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// How often a name is asked for before the row fails.
const TRIES_MAX: u32 = 3;
const ANSWER_BYTES_MAX: usize = 1500;
/// How long a connection is waited for before it goes on by itself: far longer than it takes, far
/// shorter than the second after which a lost SYN is sent again.
const CONNECT_LIMIT: Duration = Duration::from_millis(20);
/// Where the acceptor listens in the "internet".
pub(crate) const PORT: u16 = 9000;

/// A socket of a pod that asks a DNS server.
#[derive(Debug)]
pub(crate) struct Asker {
    socket: UdpSocket,
    next_id: u16,
    buffer: [u8; ANSWER_BYTES_MAX],
}

impl Asker {
    /// A new socket in the pod, for the cluster's DNS service.
    pub(crate) fn new(lab: &Lab, pod: &str) -> Result<Self> {
        Self::of_server(lab, pod, SocketAddrV4::new(DNS_SERVICE, 53))
    }

    /// The same, for another server.
    pub(crate) fn of_server(lab: &Lab, pod: &str, server: SocketAddrV4) -> Result<Self> {
        let socket = lab.pod(pod).netns().run(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(server)?;
            Ok(socket)
        })?;
        super::room(&socket)?;
        socket.set_read_timeout(Some(ANSWER_LIMIT))?;
        Ok(Self {
            socket,
            next_id: 1,
            buffer: [0; ANSWER_BYTES_MAX],
        })
    }

    /// Asks, waits for the answer, and says how long it took.
    pub(crate) fn ask(&mut self, name: &str) -> Result<Duration> {
        let start = Instant::now();
        let id = self.send(name)?;
        while self.receive()? != id {}
        Ok(start.elapsed())
    }

    /// The same, and asks again if an answer is lost, as a resolver does: a datagram has no promise. `None`: one was lost.
    pub(crate) fn ask_until_answered(&mut self, name: &str) -> Result<Option<Duration>> {
        let mut lost = 0;
        loop {
            match self.ask(name) {
                Ok(took) => return Ok((lost == 0).then_some(took)),
                Err(error) if is_timeout(&error) && lost + 1 < TRIES_MAX => lost += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Asks for all of these names, with at most so many questions open at a time; returns how
    /// long each answer took.
    pub(crate) fn ask_all(
        &mut self,
        names: impl IntoIterator<Item = String>,
        in_flight: usize,
    ) -> Result<Vec<Duration>> {
        let mut sent = vec![None; 1 << 16];
        let mut took = Vec::new();
        let mut open = 0;
        let mut names = names.into_iter();
        loop {
            while open < in_flight
                && let Some(name) = names.next()
            {
                let start = Instant::now();
                let id = self.send(&name)?;
                sent[usize::from(id)] = Some(start);
                open += 1;
            }
            if open == 0 {
                return Ok(took);
            }
            let id = self.receive()?;
            if let Some(start) = sent[usize::from(id)].take() {
                took.push(start.elapsed());
                open -= 1;
            }
        }
    }

    /// Asks for each of these names after a pause, whatever becomes of the one before.
    pub(crate) fn ask_paced(
        &mut self,
        names: impl IntoIterator<Item = String>,
        pause: Duration,
    ) -> Result<()> {
        for name in names {
            self.ask(&name)?;
            std::thread::sleep(pause);
        }
        Ok(())
    }

    /// Sends the question for a name without waiting; returns its id.
    pub(crate) fn send(&mut self, name: &str) -> Result<u16> {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        self.socket
            .send(&wire::query(id, name))
            .context("a query")?;
        Ok(id)
    }

    /// Waits for the next answer, whatever it answers; returns its id.
    pub(crate) fn receive(&mut self) -> Result<u16> {
        let length = self.socket.recv(&mut self.buffer).context("no answer")?;
        wire::id(&self.buffer[..length]).context("an answer without id")
    }

    /// Takes the answers that are there already; returns how many.
    pub(crate) fn receive_all(&mut self) -> Result<u32> {
        let mut count = 0;
        loop {
            match recv(&self.socket, &mut self.buffer, RecvFlags::DONTWAIT) {
                Ok(_) => count += 1,
                Err(Errno::AGAIN) => return Ok(count),
                Err(error) => return Err(error).context("no answer"),
            }
        }
    }
}

fn is_timeout(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// TCP sockets of a pod, each for one connection.
#[derive(Debug)]
pub(crate) struct Connector<'a> {
    lab: &'a Lab,
    pod: &'a str,
    ready: Vec<OwnedFd>,
}

/// What became of an attempt to connect.
#[derive(Debug)]
pub(crate) enum Connected {
    /// It is established, and closed again.
    Established,
    /// It is still on its way; dropping the socket ends it.
    Pending(OwnedFd),
}

impl<'a> Connector<'a> {
    /// Connections from this pod.
    pub(crate) fn new(lab: &'a Lab, pod: &'a str) -> Self {
        Self {
            lab,
            pod,
            ready: Vec::new(),
        }
    }

    /// Makes sure that the next [`Connector::connect`] has its socket.
    pub(crate) fn prepare(&mut self) -> Result<()> {
        const BATCH: usize = 64;
        if self.ready.is_empty() {
            self.ready = self
                .lab
                .pod(self.pod)
                .netns()
                .run(|| (0..BATCH).map(|_| tcp_socket()).collect())?;
        }
        Ok(())
    }

    /// Connects to the acceptor at this address.
    pub(crate) fn connect(&mut self, to: Ipv4Addr) -> Result<Connected> {
        self.prepare()?;
        let socket = self.ready.pop().context("it was prepared")?;
        match connect(&socket, &SocketAddrV4::new(to, PORT)) {
            Ok(()) => Ok(Connected::Established),
            // connect(2): so it ends when SO_SNDTIMEO is over.
            Err(Errno::INPROGRESS) => Ok(Connected::Pending(socket)),
            Err(error) => Err(error).with_context(|| format!("cannot connect to {to}")),
        }
    }

    /// Connects to the acceptor at this address, and waits also past a lost SYN, and for a network that is not
    /// there yet.
    pub(crate) fn connect_patiently(&mut self, to: Ipv4Addr) -> Result<()> {
        const LIMIT: Duration = Duration::from_secs(30);
        let start = Instant::now();
        let Connected::Pending(mut socket) = self.connect(to)? else {
            return Ok(());
        };
        loop {
            // connect(2) on a socket that is connecting waits again.
            match connect(&socket, &SocketAddrV4::new(to, PORT)) {
                Ok(()) | Err(Errno::ISCONN) => return Ok(()),
                Err(Errno::ALREADY | Errno::INPROGRESS) if start.elapsed() < LIMIT => {}
                // The network of a machine that has just booted answers no ARP request for seconds.
                Err(Errno::HOSTUNREACH) if start.elapsed() < LIMIT => match self.connect(to)? {
                    Connected::Established => return Ok(()),
                    Connected::Pending(again) => socket = again,
                },
                Err(error) => return Err(error).with_context(|| format!("{to} does not answer")),
            }
        }
    }
}

/// A socket that gives up waiting after [`CONNECT_LIMIT`], and leaves nothing behind when closed.
fn tcp_socket() -> Result<OwnedFd> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    let send = sockopt::Timeout::Send;
    sockopt::set_socket_timeout(&socket, send, Some(CONNECT_LIMIT))?;
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    Ok(socket)
}

/// Accepts connections on every address of the "internet", and closes them. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Acceptor {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Listens on [`PORT`].
    pub(crate) fn start(lab: &Lab) -> Result<Self> {
        let internet = lab.pod("inet").netns();
        let listener = internet.run(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("bench-accept".into())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    // The client closes first, and resets; an error is its doing.
                    drop(listener.accept());
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Ends it: one more connection wakes it up.
    pub(crate) fn stop(mut self, lab: &Lab) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let internet = lab.pod("inet").netns();
        internet.run(|| Ok(TcpStream::connect((Ipv4Addr::LOCALHOST, PORT))?))?;
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            bail!("the acceptor has panicked");
        }
        Ok(())
    }
}
