//! How far the mark of a packet gets.
//!
//! The program at the pod's veth marks each packet to an address that the pod was told, whoever decides over it. OVN,
//! the node's other bridges and the host use the mark of a packet as well. A packet socket in the node's namespace sees
//! each frame that an interface sends, with the mark that it has then.

use std::{
    io,
    io::ErrorKind,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use anyhow::{Context, Result};
use dnsflow_tests::{
    firewall::RuleSpec,
    lab,
    lab::{Datapath, Lab},
    process::{PATIENT, wait_until},
    support::{LEFT_TO_VM, is_by_marks, not_run, this_test},
    topology::NODE,
};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, socket_with, sockopt::set_socket_recv_buffer_size_force,
};

/// `--mark-mask`, by default.
const MASK: u32 = 0xffe0_0000;
/// `ETH_P_ALL` (Linux include/uapi/linux/if_ether.h), in network byte order.
const EVERY_PROTOCOL: u16 = 3u16.to_be();
/// Behind the Ethernet header, the destination of an IPv4 packet (RFC 791, section 3.1).
const DESTINATION: usize = 14 + 16;
/// Room for what comes before somebody looks.
const ROOM: usize = 8 << 20;
/// Addresses of Services.
const SERVICES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 96, 7, 1), Ipv4Addr::new(10, 96, 7, 2)];
/// The addresses of load balancers that are nobody's Services.
const UNKNOWN: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 80), Ipv4Addr::new(192, 0, 2, 81)];
/// A port of theirs for datagrams, to which nobody replies.
const SILENT: u16 = 9000;
/// Addresses that no load balancer knows.
const PLAIN: [Ipv4Addr; 2] = [Ipv4Addr::new(203, 0, 113, 4), Ipv4Addr::new(203, 0, 113, 5)];
/// A connection that is not there by then is denied.
const BLOCKED: Duration = Duration::from_secs(2);
/// A port of the pod.
const SERVER: u16 = 8080;
/// Servers of the "internet".
const ALLOWED: [Ipv4Addr; 3] = [
    Ipv4Addr::new(203, 0, 113, 1),
    Ipv4Addr::new(203, 0, 113, 2),
    Ipv4Addr::new(203, 0, 113, 3),
];

/// The frames that the interfaces of the node send and take, or only those that are marked.
struct Frames {
    socket: OwnedFd,
}

impl Frames {
    fn open(lab: &Lab, only_marked: bool) -> Result<Self> {
        // The mark, `SKF_AD_OFF + SKF_AD_MARK` (Linux include/uapi/linux/filter.h), under the mask.
        const MARK: u32 = 0xffff_f000 + 20;
        let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let filter = [
            step(0x20, 0, 0, MARK),
            step(0x54, 0, 0, MASK),
            step(0x15, 0, 1, 0),
            step(0x06, 0, 0, 0),
            step(0x06, 0, 0, 0xffff),
        ];
        let socket = lab.node().run(|| {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            // Without a protocol, it gets nothing yet.
            let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None);
            socket.context("a packet socket")
        })?;
        if only_marked {
            let program = libc::sock_fprog {
                len: filter.len() as u16,
                filter: filter.as_ptr().cast_mut(),
            };
            let length = size_of_val(&program) as libc::socklen_t;
            // SAFETY: the program is as long as said, and its steps outlive the call, which copies them.
            let attached = unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_ATTACH_FILTER,
                    (&raw const program).cast(),
                    length,
                )
            };
            if attached < 0 {
                return Err(io::Error::last_os_error()).context("cannot filter by the mark");
            }
        }
        set_socket_recv_buffer_size_force(&socket, ROOM)?;
        // SAFETY: all zeros is a valid address: every interface.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = EVERY_PROTOCOL;
        let length = size_of_val(&address) as libc::socklen_t;
        // SAFETY: the address is as long as said.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
        if bound < 0 {
            return Err(io::Error::last_os_error()).context("cannot bind a packet socket");
        }
        Ok(Self { socket })
    }

    /// How many frames went to this address since the last call that took frames out.
    fn to(&self, address: Ipv4Addr) -> Result<usize> {
        let mut count = 0;
        let mut frame = [0; 2048];
        loop {
            let length = rustix::io::read(&self.socket, &mut frame);
            match length {
                Ok(length) => {
                    let frame = frame.get(..length).unwrap_or(&frame);
                    let is_ip = frame.get(12..14) == Some(&[8, 0]);
                    let to = frame.get(DESTINATION..DESTINATION + 4);
                    count += usize::from(is_ip && to == Some(&address.octets()));
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(count),
                Err(error) => return Err(error).context("cannot read frames"),
            }
        }
    }
}

/// A socket of the "internet" that takes datagrams and never replies.
fn silent_server(lab: &Lab) -> Result<UdpSocket> {
    let socket = lab
        .pod("inet")
        .netns()
        .run(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, SILENT))?))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// How many datagrams have come since the last call.
fn taken(server: &UdpSocket) -> Result<usize> {
    let mut count = 0;
    loop {
        match server.recv_from(&mut [0; 16]) {
            Ok(_) => count += 1,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(count),
            Err(error) => return Err(error).context("cannot take datagrams"),
        }
    }
}

/// Makes a load balancer, which the pods' switch has.
fn add_load_balancer(lab: &Lab, (front, behind): (Ipv4Addr, Ipv4Addr), protocol: &str, port: u16) {
    let name = format!("{front}-{protocol}");
    let [front, behind] = [front, behind].map(|address| format!("{address}:{port}"));
    lab.nbctl(&["lb-add", &name, &front, &behind, protocol])
        .expect("a load balancer");
    lab.nbctl(&["ls-lb-add", NODE, &name])
        .expect("on the pods' switch");
}

/// A Service without a selector can lead to any address, and so can a load balancer that is no Service's. The rules are
/// about the address that it leads to.
#[test]
fn rules_about_a_name_hold_behind_load_balancing() {
    let lab = lab!("marks-service", agent);
    let [denied, other, unnamed] = ALLOWED;
    let rules = [
        RuleSpec::deny_name("bad.example.com"),
        RuleSpec::allow("0.0.0.0/0").expect("a CIDR"),
    ];
    lab.set_firewall("ns1", &rules).expect("the rows");
    let names = [
        ("bad.example.com", denied),
        ("good.example.com", other),
        ("a.good.example.com", PLAIN[0]),
        ("b.good.example.com", PLAIN[1]),
        ("evil.good.example.com", UNKNOWN[0]),
        ("worse.good.example.com", UNKNOWN[1]),
    ];
    let records = names.map(|(name, address)| format!("{name}. 600 IN A {address}"));
    lab.serve_dns(&records.each_ref().map(String::as_str))
        .expect("it listens");
    for (service, endpoint) in SERVICES.into_iter().zip([denied, other]) {
        add_load_balancer(&lab, (service, endpoint), "tcp", 80);
        // As ovn-kubernetes has it.
        lab.nbctl(&[
            "set",
            "Load_Balancer",
            &format!("{service}-tcp"),
            "external_ids:k8s.ovn.org/kind=Service",
            "external_ids:k8s.ovn.org/owner=ns1/outside",
        ])
        .expect("a Service's");
    }
    for unknown in UNKNOWN {
        add_load_balancer(&lab, (unknown, unnamed), "tcp", 80);
        add_load_balancer(&lab, (unknown, unnamed), "udp", SILENT);
    }
    lab.sync().expect("OVN has followed");
    let pins = format!(
        "--pin-dir={}",
        lab.pins().expect("a BPF file system").display()
    );
    let agent = lab.start_agent(&[&pins]).expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let server = silent_server(&lab).expect("a server");
    // Each from a port of its own.
    let send = |to: Ipv4Addr| {
        let bind = || Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?);
        let socket = pod.netns().run(bind).expect("a socket in the pod");
        socket.send_to(b"datagram", (to, SILENT)).expect("sent");
    };
    let fetch = |address: Ipv4Addr, limit| {
        let fetched = pod.fetch(&format!("http://{address}/"), limit);
        fetched.expect("curl runs").result
    };
    let resolve = |name: &str, address| {
        let told = pod.resolve(&format!("{name}.example.com"));
        assert_eq!(told.expect("it is known"), [address]);
    };
    let [to_denied, to_other] = SERVICES;
    fetch(to_denied, PATIENT).expect("nobody was told the name");
    resolve("bad", denied);
    // On a slow machine, the answer may go back before the flow is there. A mark counts as one.
    let wait_for_flow = |address| {
        wait_until("the address's own flow", PATIENT, || {
            let flows = lab.dnsflow_flows()?;
            Ok(flows
                .iter()
                .any(|flow| flow.contains(&format!("nw_dst={address} "))))
        })
        .expect("it comes");
    };
    wait_for_flow(denied);
    for address in [denied, to_denied] {
        fetch(address, BLOCKED).expect_err("a rule denies it");
    }
    fetch(to_other, PATIENT).expect("no rule denies it");
    for unknown in UNKNOWN {
        fetch(unknown, PATIENT).expect("no rule denies it");
        wait_until("a datagram", PATIENT, || {
            send(unknown);
            Ok(taken(&server)? > 0)
        })
        .expect("no rule denies it");
    }
    let rules = [
        RuleSpec::allow_name("good.example.com"),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ];
    lab.set_firewall("ns1", &rules).expect("the rows");
    lab.sync().expect("OVN has followed");
    for service in [to_other, UNKNOWN[0], UNKNOWN[1]] {
        wait_until("the address is denied", PATIENT, || {
            let fetched = pod.fetch(&format!("http://{service}/"), BLOCKED)?;
            Ok(fetched.result.is_err())
        })
        .expect("nobody was told the name");
    }
    resolve("good", other);
    wait_for_flow(other);
    for address in [other, to_other] {
        fetch(address, PATIENT).expect("a rule allows it");
    }
    // By marks, the kernel opens further addresses of such names by itself.
    for (name, address) in [("a", PLAIN[0]), ("b", PLAIN[1])] {
        resolve(&format!("{name}.good"), address);
        fetch(address, PATIENT).expect("a rule allows it");
    }
    // Whoever owns the name chooses its address. The rules are about the one behind it.
    for (name, address) in [("evil", UNKNOWN[0]), ("worse", UNKNOWN[1])] {
        resolve(&format!("{name}.good"), address);
        wait_for_flow(address);
    }
    taken(&server).expect("datagrams from before");
    let mut fetched = UNKNOWN.to_vec();
    fetched.retain(|unknown| {
        for _ in 0..6 {
            send(*unknown);
        }
        // Emulated, a connection takes longer.
        fetch(*unknown, 5 * BLOCKED).is_ok()
    });
    let datagrams = taken(&server).expect("datagrams");
    assert_eq!(
        (fetched, datagrams),
        (Vec::new(), 0),
        "no rule allows the address behind"
    );
    if is_by_marks() {
        let marked = lab.marked("ns1_pod1").expect("the marks");
        assert!(marked.contains(&PLAIN[1].into()), "{marked:?}");
        assert!(
            !UNKNOWN
                .iter()
                .any(|unknown| marked.contains(&(*unknown).into())),
            "{marked:?}"
        );
    }
    drop(agent);
}

#[test]
fn a_mark_ends_behind_the_rules_whoever_decides() {
    let lab = lab!("marks-end", agent);
    if lab.datapath() != Datapath::System {
        not_run(
            &this_test(),
            format!("the packets of the userspace datapath have no marks; {LEFT_TO_VM}"),
        );
        return;
    }
    let [by_network, by_name, by_ovn] = ALLOWED;
    let rules = [
        RuleSpec::allow(&format!("{by_network}/32")).expect("a CIDR"),
        RuleSpec::allow_name("example.com"),
        RuleSpec::deny("0.0.0.0/0").expect("a CIDR"),
    ];
    lab.set_firewall("ns1", &rules).expect("the rows");
    let records = ALLOWED.map(|address| format!("www.example.com. 600 IN A {address}"));
    lab.serve_dns(&records.each_ref().map(String::as_str))
        .expect("it listens");
    let pins = format!(
        "--pin-dir={}",
        lab.pins().expect("a BPF file system").display()
    );
    let _agent = lab
        .start_agent(&["--open-by=marks", &pins])
        .expect("the agent is ready");
    let pod = lab.pod("ns1_pod1");
    let told = pod.resolve("www.example.com").expect("it is known");
    assert_eq!(told.len(), ALLOWED.len());
    lab.resolve_centrally("example.com", &[by_ovn.into()])
        .expect("OVN knows it, too");
    lab.sync().expect("the flows are there");
    wait_until("the marks", PATIENT, || {
        let marks = lab.marked("ns1_pod1")?;
        let mut addresses = ALLOWED.iter();
        Ok(addresses.all(|address| marks.contains(&(*address).into())))
    })
    .expect("they come");
    for (who, address) in [
        ("a rule by CIDR", by_network),
        ("dnsflow", by_name),
        ("OVN's own set of addresses", by_ovn),
    ] {
        let all = Frames::open(&lab, false).expect("a socket");
        let marked = Frames::open(&lab, true).expect("a socket");
        let fetched = pod.fetch(&format!("http://{address}/"), PATIENT);
        fetched.expect("curl runs").result.expect("it is open");
        let seen = all.to(address).expect("frames");
        // The veth of the pod, and the way out.
        assert!(seen > 2, "where {who} decides: {seen} frames");
        assert_eq!(marked.to(address).expect("frames"), 0, "{who} decides");
    }
    // A reply to a client whose address is open for the pod: OVN lets it pass by its connection. The pod's gateway gives
    // the reply another source, so that there is no connection; it has gone through the node all the same.
    let internet = lab.pod("inet");
    let netns = pod.netns();
    let server = netns.run(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, SERVER))?));
    let server = server.expect("a server in the pod");
    let all = Frames::open(&lab, false).expect("a socket");
    let marked = Frames::open(&lab, true).expect("a socket");
    let client = by_name.to_string();
    let url = format!("http://10.244.0.5:{SERVER}/");
    let asked = ["--interface", &client, "--max-time", "2", "--silent", &url];
    internet
        .run("curl", &asked)
        .expect_err("there is no connection");
    // The pod's kernel repeats a SYN-ACK for half a minute.
    let mut seen = 0;
    wait_until("a reply", PATIENT, || {
        seen += all.to(by_name)?;
        Ok(seen > 2)
    })
    .expect("it comes");
    assert_eq!(marked.to(by_name).expect("frames"), 0, "a reply");
    drop(server);
}
