//! A network namespace with a veth pair in it, made with rtnetlink alone: a machine without
//! iproute2 runs these tests too.

use std::{
    fs::File,
    io,
    net::IpAddr,
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
};

pub(crate) use dnsflow_tests::wire::{Wire, ifindex};
use dnsflow_tests::{
    process::{PATIENT, wait_until},
    support::{not_run, this_test},
};
use rustix::{
    net::{SendFlags, netlink::SocketAddrNetlink},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

// Linux include/uapi/linux/{netlink,rtnetlink,if_link,veth}.h.
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_NEWTFILTER: u16 = 44;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_REQUEST_ACK: u16 = 1 | 4;
const NLM_F_CREATE_EXCL: u16 = 0x200 | 0x400;
const NLMSG_ERROR: u16 = 2;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_LINK: u16 = 5;
const IFLA_VLAN_ID: u16 = 1;
const VETH_INFO_PEER: u16 = 1;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
// Linux include/uapi/linux/pkt_sched.h and pkt_cls.h.
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_BURST: u16 = 6;
const TCA_BPF_OPS_LEN: u16 = 4;
const TCA_BPF_OPS: u16 = 5;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// `IFA_F_NODAD`: the address can be used at once.
const IFA_F_NODAD: u8 = 2;
/// `IF_OPER_UP` (Linux include/uapi/linux/if.h).
const IF_OPER_UP: u8 = 6;
/// `TC_H_INGRESS`: the parent of the ingress qdisc and of clsact.
const TC_H_INGRESS: u32 = 0xffff_fff1;
/// The handle of clsact.
const CLSACT: u32 = 0xffff_0000;
/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)`
const TC_H_CLSACT_INGRESS: u32 = 0xffff_fff2;
/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)`
const TC_H_CLSACT_EGRESS: u32 = 0xffff_fff3;

/// Runs `test` on a thread in a network namespace of its own, which goes with the thread.
/// `None`, and a word about it, where this process may not make one.
pub(crate) fn in_new_netns<T: Send>(test: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name(this_test())
            .spawn_scoped(scope, || {
                // SAFETY: moves only this thread into a new network namespace.
                if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                    let error = io::Error::last_os_error();
                    not_run(
                        &this_test(),
                        format!("cannot make a network namespace: {error}"),
                    );
                    return None;
                }
                Some(test())
            })
            .expect("a thread")
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Another network namespace, for a while the one of this thread.
pub(crate) struct Elsewhere {
    namespace: File,
    here: File,
}

impl Elsewhere {
    /// Makes one, beside the one that this thread is in.
    pub(crate) fn new() -> Self {
        let current = || File::open("/proc/thread-self/ns/net").expect("the namespace");
        let here = current();
        // SAFETY: a new network namespace leaves memory and file descriptors as they are.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("a network namespace");
        let elsewhere = Self {
            namespace: current(),
            here,
        };
        move_to(&elsewhere.here);
        elsewhere
    }

    /// Runs `f` in it. Sockets that it makes stay there.
    pub(crate) fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        move_to(&self.namespace);
        let result = f();
        move_to(&self.here);
        result
    }

    /// Moves an interface there, up and with these addresses.
    pub(crate) fn adopt(&self, name: &str, addresses: &[(IpAddr, u8)]) {
        let message = [
            ifinfomsg(0),
            attribute(IFLA_IFNAME, &nul(name)),
            attribute(IFLA_NET_NS_FD, &self.namespace.as_raw_fd().to_ne_bytes()),
        ]
        .concat();
        request(RTM_NEWLINK, 0, &message).expect("moved");
        self.run(|| {
            for (address, prefix_len) in addresses {
                add_address(name, *address, *prefix_len);
            }
            let message = [ifinfomsg(libc::IFF_UP), attribute(IFLA_IFNAME, &nul(name))].concat();
            request(RTM_NEWLINK, 0, &message).expect("up");
            wait_until_up(name);
        });
    }
}

fn move_to(namespace: &File) {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .expect("a network namespace can be entered");
}

fn add_address(name: &str, address: IpAddr, prefix_len: u8) {
    let (family, bytes) = match address {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec()),
    };
    // struct ifaddrmsg: family, prefix length, flags, scope, index.
    let mut message = vec![family as u8, prefix_len, IFA_F_NODAD, 0];
    message.extend(ifindex(name).to_ne_bytes());
    message.extend(attribute(IFA_LOCAL, &bytes));
    message.extend(attribute(IFA_ADDRESS, &bytes));
    request(RTM_NEWADDR, NLM_F_CREATE_EXCL, &message).expect("an address");
}

/// Makes two interfaces, up, that are each other's cable.
pub(crate) fn add_veth(name: &str, peer: &str, mtu: u32) {
    add_veth_at(0, name, peer, mtu);
}

/// The same, where the first one gets this index: any, if it is zero.
pub(crate) fn add_veth_at(index: u32, name: &str, peer: &str, mtu: u32) {
    let peer_attributes = [
        ifinfomsg(0),
        attribute(IFLA_IFNAME, &nul(peer)),
        attribute(IFLA_MTU, &mtu.to_ne_bytes()),
    ]
    .concat();
    let link_info = [
        attribute(IFLA_INFO_KIND, b"veth"),
        attribute(IFLA_INFO_DATA, &attribute(VETH_INFO_PEER, &peer_attributes)),
    ]
    .concat();
    let mut message = [
        ifinfomsg(0),
        attribute(IFLA_IFNAME, &nul(name)),
        attribute(IFLA_MTU, &mtu.to_ne_bytes()),
        attribute(IFLA_LINKINFO, &link_info),
    ]
    .concat();
    message[IFI_INDEX].copy_from_slice(&index.to_ne_bytes());
    request(RTM_NEWLINK, NLM_F_CREATE_EXCL, &message).expect("a veth pair");
    // A veth does not go up before it has a peer.
    for name in [name, peer] {
        let message = [ifinfomsg(libc::IFF_UP), attribute(IFLA_IFNAME, &nul(name))].concat();
        request(RTM_NEWLINK, 0, &message).expect("up");
    }
    for name in [name, peer] {
        wait_until_up(name);
    }
}

/// Waits until an interface sends what it is given. Some time after the carrier came, the kernel sets the
/// operational state and puts the queue in place (`linkwatch_do_dev` in Linux net/core/link_watch.c). Until then every
/// frame is dropped, although the interface is said to have its queue (`dev_activate` in net/sched/sch_generic.c).
pub(crate) fn wait_until_up(name: &str) {
    wait_until("the carrier", PATIENT, || Ok(is_up(name))).expect("the interface is ready");
}

fn is_up(name: &str) -> bool {
    let message = [ifinfomsg(0), attribute(IFLA_IFNAME, &nul(name))].concat();
    let reply = exchange(RTM_GETLINK, NLM_F_REQUEST, &message).expect("an answer");
    assert_eq!(u16::from_ne_bytes([reply[4], reply[5]]), RTM_NEWLINK);
    let mut attributes = &reply[32..];
    while let [len_low, len_high, kind_low, kind_high, ..] = *attributes {
        let len = usize::from(u16::from_ne_bytes([len_low, len_high]));
        if u16::from_ne_bytes([kind_low, kind_high]) == IFLA_OPERSTATE {
            return attributes[4..len] == [IF_OPER_UP];
        }
        attributes = attributes
            .get(len.next_multiple_of(4)..)
            .unwrap_or_default();
    }
    panic!("{name} has no operational state");
}

/// Makes an interface, up, whose frames pass another one with a VLAN tag.
pub(crate) fn add_vlan(name: &str, link: &str, id: u16) -> io::Result<()> {
    let link_info = [
        attribute(IFLA_INFO_KIND, b"vlan"),
        attribute(IFLA_INFO_DATA, &attribute(IFLA_VLAN_ID, &id.to_ne_bytes())),
    ]
    .concat();
    let message = [
        ifinfomsg(libc::IFF_UP),
        attribute(IFLA_IFNAME, &nul(name)),
        attribute(IFLA_LINK, &ifindex(link).to_ne_bytes()),
        attribute(IFLA_LINKINFO, &link_info),
    ]
    .concat();
    request(RTM_NEWLINK, NLM_F_CREATE_EXCL, &message)
}

/// Removes an interface, and with it the other end.
pub(crate) fn remove_link(name: &str) {
    let message = [ifinfomsg(0), attribute(IFLA_IFNAME, &nul(name))].concat();
    request(RTM_DELLINK, 0, &message).expect("removed");
}

/// Adds a qdisc of the kind `ingress`, as Open vSwitch's ingress policing does, or `clsact`.
pub(crate) fn add_qdisc_at_ingress(ifindex: u32, kind: &str) {
    let kind = attribute(TCA_KIND, &nul(kind));
    let message = [tcmsg([ifindex, CLSACT, TC_H_INGRESS, 0]), kind].concat();
    request(RTM_NEWQDISC, NLM_F_CREATE_EXCL, &message).expect("a qdisc");
}

/// Removes the clsact qdisc with its filters.
pub(crate) fn remove_clsact(ifindex: u32) {
    let message = tcmsg([ifindex, CLSACT, TC_H_INGRESS, 0]);
    request(RTM_DELQDISC, 0, &message).expect("removed");
}

/// struct tcmsg: family and padding, then ifindex, handle, parent, info.
fn tcmsg(words: [u32; 4]) -> Vec<u8> {
    let words = words.into_iter().flat_map(u32::to_ne_bytes);
    [0; 4].into_iter().chain(words).collect()
}

/// A queueing discipline of an interface, as a limit of the bandwidth to a pod makes one.
#[derive(Clone, Copy)]
pub(crate) struct Queue {
    pub(crate) bytes_per_second: u32,
    /// What passes at once.
    pub(crate) burst: u32,
    /// Bytes that wait at most.
    pub(crate) room: u32,
}

impl Queue {
    /// What waits in it waits for hours.
    pub(crate) const SLOW: Self = Self {
        bytes_per_second: 1_000,
        burst: 2_000,
        room: 64 << 20,
    };

    pub(crate) fn put_onto(self, ifindex: u32) -> io::Result<()> {
        // The parent is TC_H_ROOT.
        let mut message = tcmsg([ifindex, 0, 0xffff_ffff, 0]);
        message.extend(attribute(TCA_KIND, b"tbf\0"));
        // struct tc_ratespec: cell_log, linklayer (TC_LINKLAYER_ETHERNET), overhead, cell_align, mpu, rate.
        let mut parameters = vec![0, 1, 0, 0, 0, 0, 0, 0];
        parameters.extend(self.bytes_per_second.to_ne_bytes());
        // struct tc_tbf_qopt: the rate above, no peak rate, limit, buffer, mtu.
        parameters.extend([0; 12]);
        for word in [self.room, 0, 0] {
            parameters.extend(word.to_ne_bytes());
        }
        let options = [
            attribute(TCA_TBF_PARMS, &parameters),
            attribute(TCA_TBF_BURST, &self.burst.to_ne_bytes()),
        ];
        message.extend(attribute(TCA_OPTIONS, &options.concat()));
        request(RTM_NEWQDISC, NLM_F_CREATE_EXCL, &message)
    }
}

/// A place for a filter of somebody else's.
#[derive(Clone, Copy)]
pub(crate) struct FilterPlace {
    pub(crate) is_egress: bool,
    pub(crate) priority: u32,
    /// The Ethernet type.
    pub(crate) protocol: u16,
}

impl FilterPlace {
    /// For all packets to the pod (ETH_P_ALL).
    pub(crate) const fn egress(priority: u32) -> Self {
        Self {
            is_egress: true,
            priority,
            protocol: 3,
        }
    }

    fn put(self, ifindex: u32, options: &[Vec<u8>]) {
        let parent = match self.is_egress {
            true => TC_H_CLSACT_EGRESS,
            false => TC_H_CLSACT_INGRESS,
        };
        let info = self.priority << 16 | u32::from(self.protocol.to_be());
        let message = [
            tcmsg([ifindex, 0, parent, info]),
            attribute(TCA_KIND, b"bpf\0"),
            attribute(TCA_OPTIONS, &options.concat()),
        ];
        request(RTM_NEWTFILTER, NLM_F_CREATE_EXCL, &message.concat()).expect("a filter");
    }
}

/// Adds a filter of somebody else's where clsact's filters stand. It drops nothing.
pub(crate) fn add_foreign_filter(ifindex: u32, place: FilterPlace) {
    // struct sock_filter: return 0, which means no match.
    let program = [6, 0, 0, 0, 0, 0, 0, 0];
    let options = [
        attribute(TCA_BPF_OPS_LEN, &1_u16.to_ne_bytes()),
        attribute(TCA_BPF_OPS, &program),
    ];
    place.put(ifindex, &options);
}

/// Adds a program of somebody else's as a filter with direct action.
pub(crate) fn add_foreign_program(ifindex: u32, place: FilterPlace, program: i32) {
    let options = [
        attribute(TCA_BPF_FD, &program.to_ne_bytes()),
        attribute(TCA_BPF_NAME, b"theirs\0"),
        attribute(TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes()),
    ];
    place.put(ifindex, &options);
}

/// struct ifinfomsg: the flags to set, and the same as the mask of what changes.
/// The place of the index in struct ifinfomsg, behind family, padding and type.
const IFI_INDEX: std::ops::Range<usize> = 4..8;

fn ifinfomsg(flags: i32) -> Vec<u8> {
    let mut message = vec![0; 8];
    message.extend(flags.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message
}

fn nul(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn request(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let reply = exchange(kind, NLM_F_REQUEST_ACK | flags, body)?;
    assert_eq!(u16::from_ne_bytes([reply[4], reply[5]]), NLMSG_ERROR);
    match i32::from_ne_bytes([reply[16], reply[17], reply[18], reply[19]]) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// Sends a message and returns the kernel's.
fn exchange(kind: u16, flags: u16, body: &[u8]) -> io::Result<Vec<u8>> {
    let socket = socket(libc::AF_NETLINK, libc::SOCK_RAW, 0)?;
    let mut message = (16 + body.len() as u32).to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    let kernel = SocketAddrNetlink::new(0, 0);
    rustix::net::sendto(&socket, &message, SendFlags::empty(), &kernel)?;
    let mut reply = vec![0; 8192];
    let len = rustix::io::read(&socket, &mut reply[..])?;
    reply.truncate(len);
    Ok(reply)
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
