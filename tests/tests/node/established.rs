//! The end of an address's time closes it for new connections. Those that are open go on, as a pool of connections to a
//! database does that nobody uses for a while.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::Result;
use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::Lab,
    ovs::{Daemon, Stop},
    pod::Pod,
    process::{PATIENT, wait_until},
    standstill::{play, unexplained},
};
use rustix::net::{
    AddressFamily, SocketType, bind, connect, socket,
    sockopt::{Timeout, set_socket_reuseaddr, set_socket_timeout},
};

const NAME: &str = "www.example.com";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(ADDRESS), 5432);
/// A pool of them.
const CONNECTIONS: usize = 10;
/// What is closed stays so for this time, in which a SYN is repeated (RFC 6298, section 2.1).
const CLOSED_FOR: Duration = Duration::from_secs(3);
/// The same for a datagram, and for data over a connection.
const UNANSWERED: Duration = Duration::from_millis(500);

/// Sends back what comes, over TCP and UDP, until the test ends.
fn serve(lab: &Lab) {
    let netns = lab.pod("inet").netns();
    let bind = || Ok((TcpListener::bind(SERVER)?, UdpSocket::bind(SERVER)?));
    let (tcp, udp) = netns.run(bind).expect("a server");
    thread::spawn(move || {
        for stream in tcp.incoming() {
            let mut stream = stream.expect("a connection");
            thread::spawn(move || {
                let mut octet = [0];
                while matches!(stream.read(&mut octet), Ok(1)) && stream.write_all(&octet).is_ok() {
                }
            });
        }
    });
    thread::spawn(move || {
        let mut octet = [0];
        while let Ok((_, from)) = udp.recv_from(&mut octet) {
            // A pod that has gone does not matter.
            let _sent = udp.send_to(&octet, from);
        }
    });
}

/// Whether the server answers over an open connection. What was lost before is sent again by TCP.
fn answers(stream: &TcpStream, within: Duration) -> Result<bool> {
    let mut stream = stream;
    stream.set_read_timeout(Some(within))?;
    stream.write_all(b"?")?;
    Ok(matches!(stream.read(&mut [0]), Ok(1)))
}

/// Whether a datagram is answered.
fn is_answered(socket: &UdpSocket, within: Duration) -> Result<bool> {
    socket.set_read_timeout(Some(within))?;
    socket.send(b"?")?;
    Ok(matches!(socket.recv(&mut [0]), Ok(1)))
}

fn udp() -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(SERVER)?;
    Ok(socket)
}

/// Whether a connection can be made from this port, which had one before.
fn connects_from(own: SocketAddr) -> Result<bool> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    set_socket_reuseaddr(&socket, true)?;
    set_socket_timeout(&socket, Timeout::Send, Some(CLOSED_FOR))?;
    bind(&socket, &own)?;
    Ok(connect(&socket, &SERVER).is_ok())
}

/// Whether a new connection can be made, and a datagram from a new port is answered.
fn is_open() -> Result<[bool; 2]> {
    let connected = TcpStream::connect_timeout(&SERVER, CLOSED_FOR);
    Ok([connected.is_ok(), is_answered(&udp()?, UNANSWERED)?])
}

/// The flows that give a tag to packets to the address: of all packets, and of established connections.
fn tag_flows(flows: &[String]) -> (usize, usize) {
    let to = format!("nw_dst={ADDRESS} ");
    let flows = flows.iter().filter(|flow| flow.contains(&to));
    let (established, all): (Vec<_>, Vec<_>) = flows.partition(|flow| flow.contains("+est"));
    (all.len(), established.len())
}

/// Asks for the name again and again, until what it opens is used in its time: that is short, and a machine may be slow.
fn while_open<T: Send>(pod: &Pod<'_>, try_once: impl Fn() -> Result<Option<T>> + Sync) -> T {
    let mut done = None;
    wait_until("the address to be open", PATIENT, || {
        pod.resolve(NAME)?;
        done = pod.netns().run(&try_once)?;
        Ok(done.is_some())
    })
    .expect("an answer opens it");
    done.expect("it is done")
}

/// Some connections over TCP, and a socket of UDP, each with an answer.
fn open_all() -> Result<Option<(Vec<TcpStream>, UdpSocket)>> {
    let connect = |_| TcpStream::connect_timeout(&SERVER, CLOSED_FOR);
    let pool: Result<Vec<TcpStream>, _> = (0..CONNECTIONS).map(connect).collect();
    let (Ok(pool), datagrams) = (pool, udp()?) else {
        return Ok(None);
    };
    let are_answered = all_answer(&pool)? && is_answered(&datagrams, UNANSWERED)?;
    Ok(are_answered.then_some((pool, datagrams)))
}

/// Whether the server answers over each of these connections.
fn all_answer(pool: &[TcpStream]) -> Result<bool> {
    let mut answered = pool.iter().map(|stream| answers(stream, PATIENT));
    answered.try_fold(true, |all, one| Ok(all && one?))
}

#[test]
fn connections_go_on_behind_the_time_of_their_address() {
    play(|| {
        let lab = lab!("established", agent);
        go_on(&lab);
    });
}

fn go_on(lab: &Lab) {
    let deny = RuleSpec::deny("0.0.0.0/0").expect("a CIDR");
    let rules = [RuleSpec::allow_name("example.com"), deny.clone()];
    lab.set_firewall("ns1", &rules)
        .expect("the rows are written");
    lab.serve_dns(&[&format!("{NAME}. 1 IN A {ADDRESS}")])
        .expect("the server starts");
    serve(lab);
    let _agent = lab
        .start_agent(&["--min-ttl", "1s", "--idle-grace", "2s"])
        .expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let netns = pod.netns();
    let ended = || {
        let mut flows = Vec::new();
        wait_until("only established connections to be left", PATIENT, || {
            flows = lab.dnsflow_flows()?;
            Ok(tag_flows(&flows) == (0, 1))
        })
        .unwrap_or_else(|error| panic!("{error:#}: {flows:#?}\n{}", lab.counted()));
    };
    let go_on = |pool: &[TcpStream]| {
        let answered = all_answer(pool).expect("they are open");
        assert!(answered, "an open connection has died");
    };

    let (mut pool, datagrams) = while_open(&pod, open_all);
    ended();
    go_on(&pool);
    wait_until("the server to answer over UDP", PATIENT, || {
        is_answered(&datagrams, UNANSWERED)
    })
    .expect("it goes on, too");
    let open = netns.run(is_open).expect("they try");
    assert_eq!(open, [false; 2], "new ones over TCP and UDP");

    // The same addresses and ports, behind a FIN.
    let gone = pool.pop().expect("one of some");
    let own = gone.local_addr().expect("it has one");
    // In TIME-WAIT, the port is free for another socket if both allow that.
    set_socket_reuseaddr(&gone, true).expect("an option");
    drop(gone);
    let again = netns.run(|| connects_from(own));
    assert!(!again.expect("it tries"), "the same ports again");
    go_on(&pool);

    // OVN takes all flows away for a moment.
    lab.stop_daemon(Daemon::OvnController, Stop::Kill)
        .expect("it ends");
    lab.start_daemon(Daemon::OvnController).expect("it starts");
    lab.sync().expect("OVN is in step");
    ended();
    go_on(&pool);

    // An answer opens the address again.
    while_open(&pod, || Ok((is_open()? == [true; 2]).then_some(())));
    go_on(&pool);
    ended();

    go_on(&pool);
    wait_until("the agent to see that it is used", PATIENT, || {
        let (listed, _) = lab.ask_agent(&["cache", "list"])?;
        Ok(listed
            .lines()
            .last()
            .is_some_and(|line| line.ends_with("ago")))
    })
    .expect("it reads the counters");
    lab.set_firewall("ns1", &[deny])
        .expect("the rows are written");
    lab.sync().expect("OVN is in step");
    wait_until("the rule to end", PATIENT, || {
        Ok(tag_flows(&lab.dnsflow_flows()?) == (0, 0))
    })
    .expect("an edit closes");
    for stream in &pool {
        assert!(!answers(stream, UNANSWERED).expect("it is sent"));
    }
    let (told, _) = lab
        .ask_agent(&["observe", "--event", "closed"])
        .expect("it answers");
    if !told.contains(&ADDRESS.to_string()) || !told.contains(NAME) {
        // It may have been used more than a minute before.
        unexplained(told);
    }
}
