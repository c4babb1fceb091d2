//! Pods and a name server that do harm as fast as they can.
//!
//! The server answers every question at once. The first byte of a question's name says how (`Kind`). A name
//! that ends its first label in a number leads to the address with that number ([`address`]). Server and
//! attackers are threads of the test, with sockets in the namespaces of the lab's pods. Attackers run at the
//! lowest priority, because the tests are for what attackers do to the agent and the switch, and not for the
//! processors that they take from a shared machine.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::setpriority_process;

use crate::{
    frames::{Answer, Frame, query},
    lab::Lab,
    wire::Wire,
};

/// How often a thread looks whether it should stop.
const TURN: Duration = Duration::from_millis(20);
/// A connection that says nothing for so long is given up.
const SILENCE: Duration = Duration::from_secs(2);
/// The DNS header (RFC 1035, section 4.1.1).
const HEADER: usize = 12;
const MESSAGE_MAX: usize = u16::MAX as usize;
const TTL: u32 = 60;

/// The network of the addresses that the server gives: 198.18.0.0/15 is for benchmarks (RFC 2544).
pub const NETWORK: &str = "198.18.0.0/15";
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 0]);
/// Addresses of the lower half; the upper half belongs to numbered names.
const HALF: u32 = 1 << 16;
/// Odd, so that counting in such steps meets all addresses before it meets one again.
const STEP: u32 = 40_503;

/// How the server answers a question.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// `n7.…`: one address, always the same.
    Numbered(u32),
    /// `r….…`: eight addresses, never the same.
    Random,
    /// `s….…`: a thousand addresses, always the same; over TCP.
    Same,
    /// `w….…`: as many addresses as a message has room for, never the same; over TCP.
    Whole,
    /// `h….…`: half of such a message, and nothing behind it; over TCP.
    Half,
    /// `d….…`: a thousand addresses, always the same, as `s`; asked for with as many labels as possible.
    Deep,
    /// `c….…`: a thousand CNAMEs with as many labels as possible, sixteen of which are a chain; over TCP.
    Aliases,
    /// `t….…`: an HTTPS record with a thousand address hints, the last of which fills the message; over TCP.
    Hints,
    /// `p….…`: a thousand addresses of a name that stands behind thousands of pointers; over TCP.
    Pointers,
}

/// The letters of the messages that cost by their shape, each with the number of a question for it: in
/// `name`, a number that is divisible by four stands for as many labels as possible.
pub const SHAPES: [(char, u64); 4] = [('d', 0), ('c', 0), ('t', 2), ('p', 2)];

const RANDOM_ADDRESSES: usize = 8;
const SAME_ADDRESSES: usize = 1000;
/// The bytes of an A record whose name is a pointer.
const RECORD: usize = 16;
const ALIASES: u16 = 1000;
const CHAIN: u16 = 16;
/// As many as stand where a pointer can lead to.
const POINTERS: usize = 8000;
/// Types and the class of records (RFC 1035, section 3.2; RFC 9460, section 14.1; RFC 6895, section 3.1).
const A: u16 = 1;
const CNAME: u16 = 5;
const HTTPS: u16 = 65;
const PRIVATE: u16 = 0xff00;
const IN: u16 = 1;

/// The address that the name with this number leads to.
pub fn address(number: u32) -> Ipv4Addr {
    (FIRST + HALF + number % HALF).into()
}

impl Kind {
    /// Of a question.
    fn of(question: &[u8]) -> Option<Self> {
        let length = usize::from(*question.first()?);
        let label = question.get(1..=length)?;
        Some(match label.first()? {
            b'n' => Self::Numbered(str::from_utf8(&label[1..]).ok()?.parse().ok()?),
            b'r' => Self::Random,
            b's' => Self::Same,
            b'w' => Self::Whole,
            b'h' => Self::Half,
            b'd' => Self::Deep,
            b'c' => Self::Aliases,
            b't' => Self::Hints,
            b'p' => Self::Pointers,
            _ => return None,
        })
    }
}

/// The question of a query: name, type and class.
fn question(query: &[u8]) -> Option<&[u8]> {
    let mut end = HEADER;
    while let length @ 1.. = *query.get(end)? {
        end += 1 + usize::from(length);
    }
    query.get(HEADER..end + 5)
}

/// The answer to a query, and its kind. `None` for what is no query that the server knows.
fn answer(query: &[u8], next: &AtomicU32) -> Option<(Kind, Vec<u8>)> {
    let question = question(query)?;
    let kind = Kind::of(question)?;
    let room = (MESSAGE_MAX - HEADER - question.len()) / RECORD;
    let mut answer = Vec::with_capacity(MESSAGE_MAX);
    answer.extend(query.get(..2)?);
    // QR, RD, RA; one question. The number of records comes last.
    answer.extend([0x81, 0x80, 0, 1, 0, 0]);
    answer.extend([0; 4]);
    answer.extend(question);
    let of_question = pointer(HEADER);
    let mut count = 0_u16;
    let mut record = |answer: &mut Vec<u8>, owner: &[u8], code: u16, data: &[u8]| {
        count += 1;
        answer.extend(owner);
        answer.extend(code.to_be_bytes());
        answer.extend(IN.to_be_bytes());
        answer.extend(TTL.to_be_bytes());
        answer.extend((data.len() as u16).to_be_bytes());
        answer.extend(data);
    };
    let nth = |number: u32| (FIRST + number.wrapping_mul(STEP) % HALF).to_be_bytes();
    let addresses = |kind| match kind {
        Kind::Random => {
            let from = next.fetch_add(RANDOM_ADDRESSES as u32, Relaxed);
            from..from + RANDOM_ADDRESSES as u32
        }
        Kind::Whole | Kind::Half => {
            let from = next.fetch_add(room as u32, Relaxed);
            from..from + room as u32
        }
        _ => 0..SAME_ADDRESSES as u32,
    };
    match kind {
        Kind::Numbered(number) => {
            let address = FIRST + HALF + number % HALF;
            record(&mut answer, &of_question, A, &address.to_be_bytes());
        }
        Kind::Random | Kind::Same | Kind::Whole | Kind::Half | Kind::Deep => {
            for number in addresses(kind) {
                record(&mut answer, &of_question, A, &nth(number));
            }
        }
        Kind::Aliases => {
            // A label of its own in place of the first two, which have one byte each.
            let alias = |number: u16| {
                let [high, low] = number.to_be_bytes();
                [&[2, b'a' + high, low], &pointer(HEADER + 4)[..]].concat()
            };
            for number in CHAIN..ALIASES {
                record(&mut answer, &alias(number), CNAME, &alias(number + ALIASES));
            }
            record(&mut answer, &of_question, CNAME, &alias(0));
            for number in 1..CHAIN {
                record(&mut answer, &alias(number - 1), CNAME, &alias(number));
            }
        }
        Kind::Hints => {
            let room = (MESSAGE_MAX - answer.len() - RECORD) / 4 - 2;
            // Priority 1, the target is the owner, and one parameter (RFC 9460, sections 2.2 and 7.3).
            let mut data = vec![0, 1, 0, 0, 4];
            data.extend((room as u16 * 4).to_be_bytes());
            data.extend((0..room).flat_map(|hint| nth(hint.min(SAME_ADDRESSES - 1) as u32)));
            record(&mut answer, &of_question, HTTPS, &data);
        }
        Kind::Pointers => {
            // The data of a record of a private type: each pointer leads to the one before it.
            let first = answer.len() + 12;
            let places = (0..POINTERS).map(|number| match number {
                0 => HEADER,
                _ => first + 2 * (number - 1),
            });
            let data: Vec<u8> = places.flat_map(pointer).collect();
            record(&mut answer, &of_question, PRIVATE, &data);
            let last = pointer(first + 2 * (POINTERS - 1));
            for number in addresses(kind) {
                record(&mut answer, &last, A, &nth(number));
            }
        }
    }
    answer.get_mut(6..8)?.copy_from_slice(&count.to_be_bytes());
    Some((kind, answer))
}

/// A pointer to a place of the message (RFC 1035, section 4.1.4).
fn pointer(place: usize) -> [u8; 2] {
    (0xc000 | place as u16).to_be_bytes()
}

/// A message behind its length (RFC 7766, section 8).
fn framed(message: &[u8]) -> Result<Vec<u8>> {
    let length = u16::try_from(message.len())?;
    Ok([&length.to_be_bytes()[..], message].concat())
}

/// Whether an error means that nothing came in time.
fn is_silence(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// Makes this thread, and those that it starts, the last to be given a processor. The system call is for one
/// thread alone (setpriority(2), "C library/kernel differences").
fn come_last() -> Result<()> {
    Ok(setpriority_process(None, 19)?)
}

/// Threads that go on until they are stopped. Dropping it stops them.
#[derive(Debug, Default)]
struct Threads {
    stop: Arc<AtomicBool>,
    running: Vec<JoinHandle<Result<u64>>>,
}

impl Threads {
    fn start(
        &mut self,
        name: &str,
        work: impl FnOnce(&AtomicBool) -> Result<u64> + Send + 'static,
    ) -> Result<()> {
        let stop = Arc::clone(&self.stop);
        let builder = thread::Builder::new().name(name.to_owned());
        self.running.push(builder.spawn(move || work(&stop))?);
        Ok(())
    }

    /// Stops them; returns what each has counted, by name.
    fn stop(&mut self) -> Result<Vec<(String, u64)>> {
        self.stop.store(true, Relaxed);
        let mut counts = Vec::new();
        for thread in self.running.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            let count = thread.join().map_err(|_| anyhow!("{name} has panicked"))?;
            counts.push((name.clone(), count.context(name)?));
        }
        Ok(counts)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("{error:#}");
        }
    }
}

/// The name server. Dropping it ends it.
#[derive(Debug)]
pub struct NameServer {
    threads: Threads,
}

impl NameServer {
    /// Answers on these ports of a pod, over UDP and TCP. A hostile one is the last to be given a processor,
    /// as attackers are.
    pub fn start(lab: &Lab, pod: &str, ports: &[u16], is_hostile: bool) -> Result<Self> {
        let mut threads = Threads::default();
        let next = Arc::<AtomicU32>::default();
        let halves = Arc::<Mutex<Vec<TcpStream>>>::default();
        for port in ports {
            let any = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, *port);
            let (udp, tcp) = lab
                .pod(pod)
                .netns()
                .run(|| Ok((UdpSocket::bind(any)?, TcpListener::bind(any)?)))?;
            udp.set_read_timeout(Some(TURN))?;
            tcp.set_nonblocking(true)?;
            let counter = Arc::clone(&next);
            let yield_first = move || if is_hostile { come_last() } else { Ok(()) };
            threads.start("server, UDP", move |stop| {
                yield_first()?;
                serve_udp(&udp, &counter, stop)
            })?;
            let (counter, halves) = (Arc::clone(&next), Arc::clone(&halves));
            threads.start("server, TCP", move |stop| {
                yield_first()?;
                serve_tcp(&tcp, &counter, &halves, stop)
            })?;
        }
        Ok(Self { threads })
    }

    /// Ends it.
    pub fn stop(mut self) -> Result<()> {
        self.threads.stop().map(drop)
    }
}

fn serve_udp(socket: &UdpSocket, next: &AtomicU32, stop: &AtomicBool) -> Result<u64> {
    let mut buffer = [0; 1500];
    let mut count = 0;
    while !stop.load(Relaxed) {
        match socket.recv_from(&mut buffer) {
            Ok((length, client)) => {
                if let Some((_, answer)) = answer(&buffer[..length], next) {
                    // The client may be gone, or have never been there.
                    count += u64::from(socket.send_to(&answer, client).is_ok());
                }
            }
            // A client that is gone says so by ICMP.
            Err(error) if is_silence(&error) || error.kind() == ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(count)
}

fn serve_tcp(
    listener: &TcpListener,
    next: &Arc<AtomicU32>,
    halves: &Arc<Mutex<Vec<TcpStream>>>,
    stop: &AtomicBool,
) -> Result<u64> {
    let mut count = 0;
    while !stop.load(Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                count += 1;
                let (next, halves) = (Arc::clone(next), Arc::clone(halves));
                let builder = thread::Builder::new().stack_size(1 << 18);
                // It ends when the client has gone, or says nothing.
                builder.spawn(move || serve_connection(stream, &next, &halves))?;
            }
            Err(error) if is_silence(&error) => thread::sleep(TURN / 20),
            Err(error) => return Err(error.into()),
        }
    }
    halves
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clear();
    Ok(count)
}

/// Serves a connection until its client is gone. One with half a message is left open.
fn serve_connection(
    mut stream: TcpStream,
    next: &AtomicU32,
    halves: &Mutex<Vec<TcpStream>>,
) -> Option<()> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(SILENCE)).ok()?;
    stream.set_write_timeout(Some(SILENCE)).ok()?;
    let mut prefix = [0; 2];
    loop {
        stream.read_exact(&mut prefix).ok()?;
        let mut query = vec![0; u16::from_be_bytes(prefix).into()];
        stream.read_exact(&mut query).ok()?;
        let (kind, answer) = answer(&query, next)?;
        let bytes = framed(&answer).ok()?;
        if kind == Kind::Half {
            stream.write_all(&bytes[..bytes.len() / 2]).ok()?;
            let mut halves = halves.lock().unwrap_or_else(PoisonError::into_inner);
            halves.push(stream);
            return Some(());
        }
        stream.write_all(&bytes).ok()?;
    }
}

/// The attackers of one pod, and of a host outside that helps it. Dropping it stops them.
#[derive(Debug)]
pub struct Flood<'a> {
    lab: &'a Lab,
    pod: &'a str,
    /// The pod's own address.
    address: Ipv4Addr,
    /// The name server that they ask.
    server: SocketAddrV4,
    threads: Threads,
}

/// The longest name on the wire (RFC 1035, section 2.3.4).
const NAME_BYTES_MAX: usize = 255;
const LABEL_BYTES_MAX: usize = 63;

/// A name below `domain` that begins with this letter. One in four has as many labels as possible, one as
/// many bytes.
fn name(letter: char, number: u64, domain: &str) -> String {
    let first = format!("{letter}{number:x}");
    // Each label has its length before it; the root has none behind it.
    let mut left = NAME_BYTES_MAX - domain.len() - 2;
    match number % 4 {
        0 => {
            let digits = first.chars().chain(std::iter::repeat('a'));
            let labels = digits.flat_map(|digit| [digit, '.']).take(left / 2 * 2);
            labels.chain(domain.chars()).collect()
        }
        1 => {
            let mut name = domain.to_owned();
            while left > LABEL_BYTES_MAX + 1 {
                name = format!("{}.{name}", "b".repeat(LABEL_BYTES_MAX));
                left -= LABEL_BYTES_MAX + 1;
            }
            let fill = "c".repeat(left - first.len() - 1);
            format!("{first}{fill}.{name}")
        }
        _ => format!("{first}.{domain}"),
    }
}

/// A query for a name below `domain` that begins with this letter, of the type of the server's records.
fn asking(id: u16, letter: char, number: u64, domain: &str) -> Vec<u8> {
    let mut query = query(id, &name(letter, number, domain));
    if letter == 't' {
        let [.., high, low, _, _] = &mut query[..] else {
            return query;
        };
        [*high, *low] = HTTPS.to_be_bytes();
    }
    query
}

impl<'a> Flood<'a> {
    /// None yet.
    pub fn new(lab: &'a Lab, pod: &'a str, address: Ipv4Addr, server: SocketAddrV4) -> Self {
        Self {
            lab,
            pod,
            address,
            server,
            threads: Threads::default(),
        }
    }

    /// Stops them; returns how many messages each has sent, by name.
    pub fn stop(mut self) -> Result<Vec<(String, u64)>> {
        self.threads.stop()
    }

    fn start(
        &mut self,
        name: &str,
        work: impl FnOnce(&AtomicBool) -> Result<u64> + Send + 'static,
    ) -> Result<()> {
        let netns = self.lab.pod(self.pod).netns();
        self.threads.start(name, move |stop| {
            netns.run(|| {
                come_last()?;
                work(stop)
            })
        })
    }

    /// Asks over UDP for names below `domain` that nobody has asked for, 64 at a time.
    pub fn ask(&mut self, domain: &str) -> Result<()> {
        let (server, domain) = (self.server, domain.to_owned());
        self.start("questions over UDP", move |stop| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(server)?;
            socket.set_read_timeout(Some(TURN))?;
            let mut buffer = [0; 1500];
            let mut count = 0;
            while !stop.load(Relaxed) {
                for _ in 0..64 {
                    socket.send(&query(count as u16, &name('r', count, &domain)))?;
                    count += 1;
                }
                let mut answers = 0;
                while answers < 64 && socket.recv(&mut buffer).is_ok() {
                    answers += 1;
                }
            }
            Ok(count)
        })
    }

    /// Asks over so many connections, one question after the other: for messages as long as there can be,
    /// with addresses that nobody was told (`w`), for the same thousand addresses (`s`), or for one of
    /// [`SHAPES`].
    pub fn ask_over_tcp(&mut self, letter: char, domain: &str, connections: u64) -> Result<()> {
        for connection in 0..connections {
            let (server, domain) = (self.server, domain.to_owned());
            self.start(&format!("answers over TCP, {letter}"), move |stop| {
                let mut count = 0;
                while !stop.load(Relaxed) {
                    let Ok(mut stream) = TcpStream::connect_timeout(&server.into(), SILENCE) else {
                        continue;
                    };
                    stream.set_read_timeout(Some(SILENCE))?;
                    // A message that is lost ends the connection, and the next one begins.
                    while !stop.load(Relaxed) {
                        let shape = SHAPES.into_iter().find(|(of, _)| *of == letter);
                        let number = match (letter, shape) {
                            ('s', _) => 2,
                            (_, Some((_, number))) => number,
                            _ => connection + (count << 8),
                        };
                        let query = framed(&asking(count as u16, letter, number, &domain))?;
                        let mut prefix = [0; 2];
                        let answered = stream
                            .write_all(&query)
                            .and_then(|()| stream.read_exact(&mut prefix))
                            .and_then(|()| {
                                stream.read_exact(&mut vec![0; u16::from_be_bytes(prefix).into()])
                            });
                        if answered.is_err() {
                            break;
                        }
                        count += 1;
                    }
                }
                Ok(count)
            })?;
        }
        Ok(())
    }

    /// Keeps so many connections open, each with half a message, and replaces the oldest again and again.
    pub fn leave_half_open(&mut self, domain: &str, connections: usize) -> Result<()> {
        let (server, domain) = (self.server, domain.to_owned());
        self.start("half messages over TCP", move |stop| {
            let mut open = VecDeque::new();
            let mut count = 0;
            while !stop.load(Relaxed) {
                if open.len() == connections {
                    open.pop_front();
                    thread::sleep(TURN);
                }
                let Ok(mut stream) = TcpStream::connect_timeout(&server.into(), SILENCE) else {
                    continue;
                };
                let query = framed(&query(count as u16, &name('h', count, &domain)))?;
                if stream.write_all(&query).is_ok() {
                    open.push_back(stream);
                    count += 1;
                }
            }
            Ok(count)
        })
    }

    /// Sends questions with sources that are not the pod's: another MAC address, another IP address; one in
    /// four is its own, from a port where nobody waits. Each packet has a mark.
    pub fn forge_questions(&mut self, domain: &str) -> Result<()> {
        // As ovn-kubernetes makes it.
        let [a, b, c, d] = self.address.octets();
        let mac = [0x0a, 0x58, a, b, c, d];
        let frames: Vec<_> = (0..FRAMES)
            .map(|number| {
                let own = Frame {
                    mac_src: mac,
                    src: (self.address, 20_000 + number).into(),
                    dst: self.server.into(),
                    ..Frame::from_pod(query(number, &name('r', number.into(), domain)))
                };
                let frame = match number % 4 {
                    0 => own,
                    1 => Frame {
                        mac_src: [2, 0, 0, 0, 0, number as u8],
                        ..own
                    },
                    _ => Frame {
                        src: ([10, 244, 9, number as u8], 20_000 + number).into(),
                        ..own
                    },
                };
                frame.build()
            })
            .collect();
        self.start("forged questions", move |stop| {
            send_all(&frames, QUESTIONS_PER_SECOND, stop)
        })
    }

    /// Sends answers in the name of the server that nobody has asked for, from the "internet". They all lead
    /// to `forged`. Each packet has a mark.
    pub fn forge_answers(&mut self, domain: &str, forged: Ipv4Addr) -> Result<()> {
        let frames: Vec<_> = (0..FRAMES)
            .map(|number| {
                let answer = Answer {
                    id: number,
                    ..Answer::new(&name('r', number.into(), domain), &[forged])
                };
                let frame = Frame {
                    mac_dst: GATEWAY_MAC,
                    src: self.server.into(),
                    dst: (self.address, 20_000 + number).into(),
                    ..Frame::to_pod(answer.build())
                };
                frame.build()
            })
            .collect();
        let netns = self.lab.pod("inet").netns();
        self.threads.start("forged answers", move |stop| {
            netns.run(|| {
                come_last()?;
                send_all(&frames, ANSWERS_PER_SECOND, stop)
            })
        })
    }
}

/// Different frames that are forged.
const FRAMES: u16 = 1024;
/// The gateway router's Ethernet address outside.
const GATEWAY_MAC: [u8; 6] = [0x0a, 0x58, 0xac, 0x12, 0, 2];
/// Frames with the same mark.
const MARKED: usize = 16;
/// Five times as many each second cost first packets in the lab's switch whatever their port: it forwards in
/// user space, on the thread that also takes flows.
const QUESTIONS_PER_SECOND: f64 = 4_000.0;
/// These come in where the answers of the whole "internet" do.
const ANSWERS_PER_SECOND: f64 = 1_000.0;

/// Sends these frames again and again, so many each second; returns how many the kernel took.
fn send_all(frames: &[Vec<u8>], per_second: f64, stop: &AtomicBool) -> Result<u64> {
    let wire = Wire::open("eth0");
    let mut count = 0;
    let begin = Instant::now();
    for (turn, frames) in (1_u32..).zip(frames.chunks(MARKED).cycle()) {
        if stop.load(Relaxed) {
            break;
        }
        wire.mark(turn)?;
        count += frames.iter().filter(|frame| wire.offer(frame)).count() as u64;
        let due = Duration::from_secs_f64(f64::from(turn) * MARKED as f64 / per_second);
        thread::sleep(due.saturating_sub(begin.elapsed()));
    }
    ensure!(count > 0, "no frame was taken");
    Ok(count)
}

#[cfg(test)]
mod tests {
    use hickory_proto::{op::Message, rr::RData};

    use super::*;

    /// In a name of as many bytes as there can be.
    const LABELS_MAX: usize = 127;

    fn told(letter: char, number: u64) -> Message {
        let query = asking(7, letter, number, "example.com");
        let (_, answer) = answer(&query, &AtomicU32::new(0)).expect("a query");
        Message::from_vec(&answer).expect("another reader reads it")
    }

    #[test]
    fn messages_that_cost_by_their_shape_have_that_shape() {
        let [deep, aliases, hints, pointers] = SHAPES.map(|(letter, number)| told(letter, number));
        let labels = |message: &Message| message.queries[0].name.num_labels();
        assert!(labels(&deep) > 100 && labels(&aliases) > 100);
        assert_eq!(deep.answers.len(), SAME_ADDRESSES);
        assert_eq!(aliases.answers.len(), usize::from(ALIASES));
        let mut end = &aliases.queries[0].name;
        let mut steps = 0;
        while let Some(record) = aliases.answers.iter().find(|record| record.name == *end)
            && let RData::CNAME(target) = &record.data
        {
            end = &target.0;
            steps += 1;
        }
        assert_eq!(steps, CHAIN);
        let [record] = &hints.answers[..] else {
            panic!("{hints}")
        };
        assert!(matches!(&record.data, RData::HTTPS(_)));
        let length = hints.to_vec().expect("encodes").len();
        assert!(length > MESSAGE_MAX - 64, "{length}");
        let of_question = pointers.answers.iter();
        let of_question = of_question.filter(|record| record.name == pointers.queries[0].name);
        assert_eq!(of_question.count(), 1 + SAME_ADDRESSES);
    }

    #[test]
    fn names_are_as_long_and_as_deep_as_can_be() {
        for number in (0..4000).step_by(4) {
            let deepest = name('r', number, "e.c");
            assert_eq!(deepest.split('.').count(), LABELS_MAX);
            let longest = query(1, &name('r', number + 1, "example.com"));
            let question = question(&longest).expect("a question");
            assert_eq!(question.len() - 4, NAME_BYTES_MAX);
        }
    }

    #[test]
    fn answers_are_what_the_name_says() {
        let message = told('w', 2);
        assert!(message.answers.len() > 4000, "{}", message.answers.len());
        assert_eq!(told('s', 2).answers.len(), SAME_ADDRESSES);
        assert_eq!(told('r', 0).answers.len(), RANDOM_ADDRESSES);
        let query = query(1, "n7.example.com");
        let (_, answer) = answer(&query, &AtomicU32::new(0)).expect("a query");
        let message = Message::from_vec(&answer).expect("another reader reads it");
        let [record] = &message.answers[..] else {
            panic!("{message}")
        };
        assert!(matches!(&record.data, RData::A(found) if found.0 == address(7)));
    }
}
