//! What a lab runs inside its namespaces besides Debian's programs: the web server, an echo server, a
//! DNS server that lies, many connections at a time, a DNS query of exactly one packet or one
//! connection, and fresh names.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use dnsflow_tests::{
    neighbour::{sent_again, syns_repeated, uptime},
    process::PATIENT,
};
use hickory_proto::{
    op::{Edns, Message, Query},
    rr::{Name, RData},
};

const ANSWER_BYTES_MAX: usize = 65535;
/// How long an answer may take: no longer than a resolver that asks five times, since a lost answer costs so much time.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// A connection without an answer for this long is denied.
const DENIED_AFTER: Duration = Duration::from_millis(20);
/// Seven SYNs: one is sent again after 1, 2, 3, 4, 5 and 7 seconds (`tcp_syn_linear_timeouts` in Linux
/// `Documentation/networking/ip-sysctl.rst`).
const CONNECT_LIMIT: Duration = Duration::from_secs(8);
/// The longest answer over UDP that a query with EDNS asks for (RFC 6891, section 6.2.5): longer
/// than a link takes.
const EDNS_BYTES: u16 = 4096;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match *arguments {
        // The directory of the lab stands there for whoever looks for its processes.
        ["web", ref sockets @ .., _lab] => sockets
            .iter()
            .map(|socket| socket.parse().map_err(anyhow::Error::from))
            .collect::<Result<Vec<SocketAddr>>>()
            .and_then(|sockets| dnsflow_tests::web::serve(&sockets)),
        ["echo", ref sockets @ .., _lab] => sockets
            .iter()
            .map(|socket| socket.parse().map_err(anyhow::Error::from))
            .collect::<Result<Vec<SocketAddr>>>()
            .and_then(|sockets| dnsflow_tests::probe::serve_echo(&sockets)),
        ["probe", ref attempts @ ..] => attempts
            .iter()
            .map(|attempt| attempt.parse())
            .collect::<Result<Vec<_>>>()
            .and_then(|attempts| dnsflow_tests::probe::make_all(&attempts)),
        ["liar", port, _lab] => port
            .parse()
            .map_err(Into::into)
            .and_then(dnsflow_tests::liar::serve),
        ["resolve", server, kind, ref names @ ..] => names
            .iter()
            .try_for_each(|name| resolve(kind, name, None, |query| over_udp(server, query))),
        ["resolve-edns", server, kind, ref names @ ..] => names.iter().try_for_each(|name| {
            let mut edns = Edns::new();
            edns.set_max_payload(EDNS_BYTES);
            resolve(kind, name, Some(edns), |query| over_udp(server, query))
        }),
        ["resolve-tcp", server, kind, ref names @ ..] => names
            .iter()
            .try_for_each(|name| resolve(kind, name, None, |query| over_tcp(server, query))),
        ["first-packets", server, ref pairs @ ..] => pairs
            .iter()
            .enumerate()
            .try_for_each(|(number, pair)| first_packet(server, pair, number % 4 == 3)),
        ["fresh-names", server, port, pause, ref names @ ..] => {
            fresh_names(server, port, pause, names)
        }
        _ => {
            eprintln!(
                "dnsflow-lab-helper web|echo ADDRESS:PORT... LAB | liar PORT LAB | \
                 probe PROTOCOL,ADDRESS:PORT,SOURCE-PORT,MILLISECONDS... | \
                 resolve|resolve-edns|resolve-tcp SERVER:PORT A|AAAA NAME... | \
                 first-packets SERVER:PORT NAME=ADDRESS:PORT... | \
                 fresh-names SERVER:PORT PORT MILLISECONDS NAME..."
            );
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Connects to an address that is denied, asks for the name that leads there, and connects again
/// at once. Prints the name, how many SYNs the second connection or queries before it had to be repeated, and when that
/// began and ended, as [`uptime`] has it.
fn first_packet(server: &str, pair: &str, by_tcp: bool) -> Result<()> {
    let (name, address) = pair.split_once('=').context("NAME=ADDRESS:PORT")?;
    let address: SocketAddr = address.parse()?;
    let denied = TcpStream::connect_timeout(&address, DENIED_AFTER);
    let denied_as = denied.map_err(|error| error.kind()).err();
    if denied_as != Some(ErrorKind::TimedOut) {
        bail!("{address} is not denied: {denied_as:?}");
    }
    let before = syns_repeated()?;
    let query = query("A", name, None)?;
    let asked = uptime();
    let mut queries_repeated = 0;
    loop {
        let answer = if by_tcp {
            over_tcp(server, &query)
        } else {
            over_udp(server, &query)
        };
        match answer {
            Ok(_) => break,
            // As a resolver does.
            Err(_) if uptime() < asked + PATIENT => queries_repeated += 1,
            Err(error) => return Err(error.context(name.to_owned())),
        }
    }
    let began = match queries_repeated {
        0 => uptime(),
        _ => asked,
    };
    match TcpStream::connect_timeout(&address, PATIENT) {
        Ok(_) => {}
        // Somebody answers, which is all that is asked.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
        Err(error) => bail!("{name}, {address}: {error}"),
    }
    let ended = uptime();
    println!(
        "{name} {} {} {}",
        syns_repeated()? - before + queries_repeated,
        began.as_millis(),
        ended.as_millis()
    );
    Ok(())
}

/// Asks for one of these names after each `pause` in milliseconds, whatever became of those before, and connects at once.
/// Prints the name, `first`, `late` (a SYN was sent again) or `lost` (no answer or no connection), and the milliseconds
/// from question to connection.
fn fresh_names(server: &str, port: &str, pause: &str, names: &[&str]) -> Result<()> {
    let port = port.parse()?;
    let pause = Duration::from_millis(pause.parse()?);
    thread::scope(|scope| {
        let mut visits = Vec::new();
        for (number, name) in names.iter().enumerate() {
            if number > 0 {
                thread::sleep(pause);
            }
            visits.push(scope.spawn(move || {
                let asked = Instant::now();
                (connect_by_name(server, name, port), asked.elapsed())
            }));
        }
        for (name, visit) in names.iter().zip(visits) {
            let (connected, took) = visit
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let outcome = match connected {
                Ok(0) => "first",
                Ok(_) => "late",
                Err(error) => {
                    eprintln!("{name}: {error:#}");
                    "lost"
                }
            };
            println!("{name} {outcome} {}", took.as_millis());
        }
    });
    Ok(())
}

/// Connects to where the name leads in the server's family; how many SYNs had to be sent again.
fn connect_by_name(server: &str, name: &str, port: u16) -> Result<u32> {
    let kind = match server.parse()? {
        SocketAddr::V4(_) => "A",
        SocketAddr::V6(_) => "AAAA",
    };
    let answer = over_udp(server, &query(kind, name, None)?)?;
    let mut addresses = answer
        .answers
        .iter()
        .filter_map(|record| match record.data {
            RData::A(address) => Some(IpAddr::from(address.0)),
            RData::AAAA(address) => Some(address.0.into()),
            _ => None,
        });
    let address = addresses.next().context("no address")?;
    let stream = TcpStream::connect_timeout(&(address, port).into(), CONNECT_LIMIT)?;
    Ok(sent_again(&stream)?)
}

/// A query for the name's addresses.
fn query(kind: &str, name: &str, edns: Option<Edns>) -> Result<Message> {
    let mut query = Message::query();
    query.metadata.recursion_desired = true;
    query.edns = edns;
    // A label may hold any byte (RFC 2181, section 11).
    let labels = name.trim_end_matches('.').split('.');
    let mut name = Name::from_labels(labels.map(str::as_bytes))?;
    // As it comes back in the answer.
    name.set_fqdn(true);
    query.add_query(Query::query(name, kind.parse()?));
    Ok(query)
}

/// Sends one query for the name's addresses and prints those of the answer.
fn resolve(
    kind: &str,
    name: &str,
    edns: Option<Edns>,
    exchange: impl Fn(&Message) -> Result<Message>,
) -> Result<()> {
    let answer = exchange(&query(kind, name, edns)?)?;
    if answer.metadata.truncation {
        bail!("the answer is truncated");
    }
    if answer.answers.is_empty() {
        bail!("no answer: {}", answer.metadata.response_code);
    }
    for record in &answer.answers {
        match record.data {
            RData::A(address) => println!("{}", address.0),
            RData::AAAA(address) => println!("{}", address.0),
            _ => {}
        }
    }
    Ok(())
}

/// Waits for the answer to this query, past everything else that comes.
fn over_udp(server: &str, query: &Message) -> Result<Message> {
    let server: SocketAddr = server.parse()?;
    let socket = match server {
        SocketAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?,
        SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?,
    };
    socket.connect(server)?;
    socket.send(&query.to_vec()?)?;
    let end = Instant::now() + ANSWER_LIMIT;
    let mut buffer = vec![0; ANSWER_BYTES_MAX];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let length = socket.recv(&mut buffer).context("no answer")?;
        if let Some(answer) = answer_to(query, &buffer[..length])? {
            return Ok(answer);
        }
    }
}

/// The same over TCP (RFC 7766).
fn over_tcp(server: &str, query: &Message) -> Result<Message> {
    let mut stream = TcpStream::connect_timeout(&server.parse()?, ANSWER_LIMIT)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    let query_bytes = query.to_vec()?;
    let length = u16::try_from(query_bytes.len())?;
    stream.write_all(&[&length.to_be_bytes()[..], &query_bytes].concat())?;
    loop {
        let mut prefix = [0; 2];
        stream.read_exact(&mut prefix).context("no answer")?;
        let mut bytes = vec![0; u16::from_be_bytes(prefix).into()];
        stream.read_exact(&mut bytes)?;
        if let Some(answer) = answer_to(query, &bytes)? {
            return Ok(answer);
        }
    }
}

/// The message, if it has the query's id and question.
fn answer_to(query: &Message, bytes: &[u8]) -> Result<Option<Message>> {
    let answer = Message::from_vec(bytes)?;
    let is_ours = answer.metadata.id == query.metadata.id && answer.queries == query.queries;
    Ok(is_ours.then_some(answer))
}
