//! Marks of blocked connections in the kernel's own connection tracking, without Open vSwitch: what
//! the agent changes of an entry, and what it leaves.

use std::{fs, net::Ipv4Addr, path::Path};

use anyhow::{Context, Result, ensure};
use dnsflow_agent::conntrack::{Outcome, blocked_in_kernel, clear_in_kernel};
use dnsflow_core::values::{connection::BlockedConnection, flow::Protocol};
use dnsflow_tests::support::{LEFT_TO_VM, not_run, this_test};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, sendto,
    socket_with,
};

/// The kernel's own list, as it prints it (`ct_seq_show` in Linux
/// net/netfilter/nf_conntrack_standalone.c).
const LIST: &str = "/proc/thread-self/net/nf_conntrack";
const POD: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 5);
const ADDRESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);

/// Appends a netlink attribute.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = (4 + value.len()) as u16;
    let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn tuple(kind: u16, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Vec<u8> {
    const NESTED: u16 = 0x8000;
    let ip = [attribute(1, &from.0.octets()), attribute(2, &to.0.octets())];
    let l4 = [
        attribute(1, &[17]),
        attribute(2, &from.1.to_be_bytes()),
        attribute(3, &to.1.to_be_bytes()),
    ];
    let parts = [
        attribute(1 | NESTED, &ip.concat()),
        attribute(2 | NESTED, &l4.concat()),
    ];
    attribute(kind | NESTED, &parts.concat())
}

/// Adds a UDP connection from the pod's `port` with this mark, as `conntrack --create` does.
fn create(port: u16, zone: u16, mark: u32) -> Result<()> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::NETFILTER),
    )?;
    let attributes = [
        tuple(1, (POD, port), (ADDRESS, 443)),
        tuple(2, (ADDRESS, 443), (POD, port)),
        attribute(7, &600_u32.to_be_bytes()),
        attribute(8, &mark.to_be_bytes()),
        attribute(18, &zone.to_be_bytes()),
    ];
    let body = [vec![2, 0, 0, 0], attributes.concat()].concat();
    let mut request = (16 + body.len() as u32).to_ne_bytes().to_vec();
    request.extend((1_u16 << 8).to_ne_bytes());
    // NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE
    request.extend(0x605_u16.to_ne_bytes());
    request.extend([0; 8]);
    request.extend(body);
    let kernel = netlink::SocketAddrNetlink::new(0, 0);
    sendto(&socket, &request, SendFlags::empty(), &kernel)?;
    let mut reply = [0; 1024];
    let (_, len) = recv(&socket, &mut reply[..], RecvFlags::empty())?;
    let error = reply[16..len].first_chunk().context("a short reply")?;
    let error = i32::from_ne_bytes(*error);
    ensure!(error == 0, "the kernel refuses with {error}");
    Ok(())
}

/// What the kernel's list says of the connection from this port of the pod: its zone and its mark.
fn listed(port: u16) -> Option<(u16, u32)> {
    let list = fs::read_to_string(LIST).expect("the list is readable");
    let wanted = format!("src={POD} dst={ADDRESS} sport={port} ");
    let line = list.lines().find(|line| line.contains(&wanted))?;
    let value = |key: &str| {
        let value = line.split(' ').find_map(|field| field.strip_prefix(key));
        value.map_or(0, |value| value.parse().expect("a number"))
    };
    Some((value("zone=") as u16, value("mark=")))
}

fn connection(port: u16, zone: u16) -> BlockedConnection {
    BlockedConnection {
        port: "ns1_pod1".into(),
        zone,
        protocol: Protocol::Udp,
        src: POD.into(),
        src_port: port,
        dst: ADDRESS.into(),
        dst_port: 443,
    }
}

/// Runs `test` in a network namespace of its own; that goes with the thread.
fn in_new_netns(test: impl FnOnce() + Send + 'static) {
    let name = this_test();
    if !Path::new(LIST).exists() {
        not_run(&name, format!("this kernel has no {LIST}; {LEFT_TO_VM}"));
        return;
    }
    let thread = std::thread::spawn(move || {
        // SAFETY: moves only this thread into a new network namespace.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            let error = std::io::Error::last_os_error();
            not_run(&name, format!("no network namespace: {error}"));
            return;
        }
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn the_mark_of_a_blocked_connection_goes_and_all_else_stays() {
    in_new_netns(|| {
        create(1000, 7, 0x8000_0001).expect("the kernel takes it");
        create(1001, 7, 0x8000_0000).expect("the kernel takes it");
        create(1000 + 2, 8, 0x1).expect("the kernel takes it");
        let marked = blocked_in_kernel().expect("the kernel tells");
        let mut found: Vec<_> = marked
            .connections
            .iter()
            .map(|c| (c.src.port(), c.zone))
            .collect();
        found.sort_unstable();
        assert_eq!((found, marked.left_out), (vec![(1000, 7), (1002, 8)], 0));

        // One in another zone, one that is not there, and the one.
        let asked = [
            connection(1002, 7),
            connection(1003, 7),
            connection(1000, 7),
        ];
        let outcome = clear_in_kernel(&asked).expect("the kernel takes it");
        assert_eq!(
            outcome,
            Outcome {
                unblocked: 1,
                failed: 0
            }
        );
        assert_eq!(listed(1000), Some((7, 0x8000_0000)), "only that bit");
        assert_eq!(listed(1001), Some((7, 0x8000_0000)));
        assert_eq!(listed(1002), Some((8, 0x1)), "another zone");
        assert_eq!(listed(1003), None, "nothing is made");
    });
}

#[test]
fn many_blocked_connections_are_all_told() {
    const MANY: u16 = 5000;
    in_new_netns(|| {
        for port in 1..=MANY {
            create(port, 7, u32::from(port)).expect("the kernel takes it");
        }
        let marked = blocked_in_kernel().expect("the kernel tells");
        let odd = usize::from(MANY) / 2;
        assert_eq!(marked.connections.len(), odd);
        let asked: Vec<_> = marked
            .connections
            .iter()
            .map(|c| connection(c.src.port(), c.zone))
            .collect();
        let outcome = clear_in_kernel(&asked).expect("the kernel takes it");
        assert_eq!(
            outcome,
            Outcome {
                unblocked: odd,
                failed: 0
            }
        );
        assert_eq!(
            blocked_in_kernel().expect("the kernel tells").connections,
            []
        );
    });
}
