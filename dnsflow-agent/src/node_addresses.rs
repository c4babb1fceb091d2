//! The addresses of this node's interfaces, and the networks of Services in its routes, as the kernel has them
//! (rtnetlink(7)).
//!
//! The agent runs in the network namespace of the node, and asks the kernel again every 30 s. It takes no right. An
//! answer that the kernel does not give must never look like a node without addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use dnsflow_core::{Input, values::resolver::Resolver};
use ipnet::IpNet;
use rustix::net::SocketFlags;
use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};

use crate::{
    capture::survey::{self, Link},
    causes::Causes,
    netlink,
};

/// The interval between two questions.
const INTERVAL: Duration = Duration::from_secs(30);
/// At most this many addresses are told; the first ones in their order.
const ADDRESSES_MAX: usize = 256;
/// The interface on which NodeLocal DNSCache answers, by its default (`-interfacename` in cmd/node-cache/main.go of
/// kubernetes/dns).
pub const DNS_CACHE_INTERFACE: &str = "nodelocaldns";
/// The kind of that interface (`EnsureDummyDevice` in pkg/netif/netif.go there).
const DNS_CACHE_KIND: &str = "dummy";
/// The kinds of interfaces that plugins of CNI make on a node and give addresses, both of which a
/// NetworkAttachmentDefinition names (`bridge` and `ptp` in plugins/main of containernetworking/plugins).
const PLUGIN_KINDS: [&str; 2] = ["bridge", "veth"];
/// The port on which it answers pods (`-dnsport` there).
const DNS_PORT: u16 = 53;

// Linux include/uapi/linux/rtnetlink.h and if_addr.h.
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
/// `struct ifaddrmsg`: family, prefix length, flags, scope, index.
const IFADDRMSG_LEN: usize = 8;
const IFA_ADDRESS: u16 = 1;
/// The address itself, where [`IFA_ADDRESS`] is that of the peer.
const IFA_LOCAL: u16 = 2;

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
/// `struct rtmsg`: family, lengths of the prefixes of destination and source, type of service, table, protocol, scope,
/// type, flags.
const RTMSG_LEN: usize = 12;
const RT_TABLE_MAIN: u8 = 254;
const RTA_DST: u16 = 1;
const RTA_GATEWAY: u16 = 5;

/// The next hops of ovn-kubernetes' routes to the networks of Services, which no host has
/// (`DummyNextHopMasqueradeIP` in its go-controller/pkg/config/config.go: the fourth address of the masquerade subnet, of
/// 169.254.0.0/17 and of 169.254.169.0/29 as in former releases; `configureSvcRouteViaInterface` in
/// go-controller/pkg/node/gateway_init.go).
const SERVICE_NEXT_HOPS: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 0, 4)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 4)),
    IpAddr::V6(Ipv6Addr::new(0xfd69, 0, 0, 0, 0, 0, 0, 4)),
];
/// A network of Services has at most this many bits of addresses (Kubernetes, `maxCIDRBits` in
/// cmd/kube-apiserver/app/options/validation.go).
const SERVICE_BITS_MAX: u8 = 20;

/// The addresses that were found.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NodeAddresses {
    /// Those of the node's own interfaces with a network behind them, but for loopback and link-local ones.
    pub all: BTreeSet<IpAddr>,
    /// Those of interfaces that a tenant can have made, each with its interface.
    pub of_plugins: BTreeSet<(String, IpAddr)>,
    /// The DNS cache of the node.
    pub dns_cache: BTreeSet<Resolver>,
    /// The networks of Services, by the routes of ovn-kubernetes.
    pub service_networks: BTreeSet<IpNet>,
}

impl NodeAddresses {
    /// Asks the kernel.
    ///
    /// # Errors
    ///
    /// If the kernel does not answer.
    pub fn find() -> io::Result<Self> {
        let links = survey::links()?;
        let links: BTreeMap<u32, (String, Link)> = links
            .into_iter()
            .map(|(name, link)| (link.ifindex, (name, link)))
            .collect();
        let socket = netlink::open(None, SocketFlags::empty())?;
        let mut found = Self::default();
        // struct ifaddrmsg of no family: both.
        let body = [0; IFADDRMSG_LEN];
        netlink::dump(&socket, RTM_GETADDR, &body, "addresses", |message| {
            // An interface that has just come is there when the kernel is asked again.
            if let Some((ifindex, network)) = address(message)
                && let Some((name, link)) = links.get(&ifindex)
            {
                found.add(name, link.kind.as_deref(), network);
            }
        })?;
        let body = [0; RTMSG_LEN];
        netlink::dump(&socket, RTM_GETROUTE, &body, "routes", |message| {
            found.service_networks.extend(service_network(message));
        })?;
        Ok(found)
    }

    /// Adds an address of an interface of this kind.
    fn add(&mut self, interface: &str, kind: Option<&str>, network: IpNet) {
        let address = network.addr();
        if interface == DNS_CACHE_INTERFACE && kind == Some(DNS_CACHE_KIND) {
            self.dns_cache.insert(Resolver {
                address,
                port: DNS_PORT,
            });
        }
        if is_of_every_node(address) || may_move(network) {
            return;
        }
        match kind.is_some_and(|kind| PLUGIN_KINDS.contains(&kind)) {
            true => self.of_plugins.insert((interface.to_owned(), address)),
            false => self.all.insert(address),
        };
    }
}

/// Reads a route, if it is one of ovn-kubernetes to a network of Services.
fn service_network(message: netlink::Message<'_>) -> Option<IpNet> {
    let &[_, prefix_len, _, _, table, ..] = message.body.first_chunk::<RTMSG_LEN>()?;
    if message.kind != RTM_NEWROUTE || table != RT_TABLE_MAIN {
        return None;
    }
    let attributes = message.body.get(RTMSG_LEN..)?;
    let address = |kind| netlink::attribute(attributes, kind).and_then(ip);
    let next_hop = address(RTA_GATEWAY)?;
    let network = IpNet::new(address(RTA_DST)?, prefix_len).ok()?;
    let is_small = network.max_prefix_len() - prefix_len <= SERVICE_BITS_MAX;
    (SERVICE_NEXT_HOPS.contains(&next_hop) && is_small).then(|| network.trunc())
}

/// Reads an address of either family.
fn ip(octets: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(octets).map(IpAddr::from);
    let v6 = || <[u8; 16]>::try_from(octets).map(IpAddr::from);
    v4().or_else(|_| v6()).ok()
}

/// Reads one address with the length of its prefix, and the index of its interface.
fn address(message: netlink::Message<'_>) -> Option<(u32, IpNet)> {
    if message.kind != RTM_NEWADDR {
        return None;
    }
    let prefix_len = *message.body.get(1)?;
    let attributes = message.body.get(IFADDRMSG_LEN..)?;
    let attribute = |kind| netlink::attribute(attributes, kind);
    let octets = attribute(IFA_LOCAL).or_else(|| attribute(IFA_ADDRESS))?;
    let network = IpNet::new(ip(octets)?, prefix_len).ok()?;
    Some((netlink::u32_at(message.body, 4)?, network))
}

/// Whether the address has no network behind it: it is a virtual one, which moves from node to node (keepalived,
/// kube-vip). If it was refused, a name would lead there from some nodes, and from others not.
fn may_move(network: IpNet) -> bool {
    network.prefix_len() == network.max_prefix_len()
}

/// Whether the address is refused whatever interface has it. Each pod's veth has one of IPv6.
fn is_of_every_node(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_link_local(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unicast_link_local(),
    }
}

/// Tells the core the addresses and the DNS cache, and `service_networks` the networks of Services, at each change. Ends
/// when nobody listens.
pub async fn watch(inputs: mpsc::Sender<Input>, service_networks: watch::Sender<BTreeSet<IpNet>>) {
    let mut told = None;
    let mut told_cache = BTreeSet::new();
    let mut causes = Causes::<String>::default();
    loop {
        match NodeAddresses::find() {
            Ok(found) => {
                causes.end();
                replace(&service_networks, found.service_networks);
                if told_cache != found.dns_cache {
                    let input = Input::DnsCache(found.dns_cache.clone());
                    if inputs.send(input).await.is_err() {
                        return;
                    }
                    told_cache = found.dns_cache;
                }
                if told.as_ref() != Some(&found.all) {
                    if inputs.send(input(&found.all)).await.is_err() {
                        return;
                    }
                    told = Some(found.all);
                }
            }
            Err(error) => {
                let cause = error.to_string();
                if causes.is_news(cause.clone()) {
                    tracing::warn!(
                        cause,
                        "cannot read the addresses of this node; trying again; the known ones stay in force"
                    );
                }
            }
        }
        tokio::select! {
            () = sleep(INTERVAL) => {}
            () = inputs.closed() => return,
        }
    }
}

fn replace<T: Eq>(sender: &watch::Sender<T>, new: T) {
    sender.send_if_modified(|known| {
        let is_other = *known != new;
        *known = new;
        is_other
    });
}

fn input(all: &BTreeSet<IpAddr>) -> Input {
    if all.len() > ADDRESSES_MAX {
        tracing::warn!(
            count = all.len(),
            "more than {ADDRESSES_MAX} addresses of this node: the others are left out; --deny-answers names their networks"
        );
    }
    Input::NodeAddresses(all.iter().take(ADDRESSES_MAX).copied().collect())
}

/// Tells the core the networks of Services that the API server names, which may have none, and those of the node's
/// routes. Ends when nobody listens, or nobody watches the cluster or the node any more.
pub async fn tell_service_networks(
    mut cluster: mpsc::Receiver<BTreeSet<IpNet>>,
    mut node: watch::Receiver<BTreeSet<IpNet>>,
    inputs: mpsc::Sender<Input>,
) {
    let mut known = BTreeSet::new();
    loop {
        let mut all = node.borrow_and_update().clone();
        all.extend(&known);
        if inputs.send(Input::ServiceNetworks(all)).await.is_err() {
            return;
        }
        tokio::select! {
            update = cluster.recv() => match update {
                Some(update) => known = update,
                None => return,
            },
            changed = node.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

/// Tells the core the DNS servers of the cluster. Ends when nobody listens, or nobody watches the cluster any more.
pub async fn tell_resolvers(
    mut cluster: mpsc::Receiver<BTreeSet<Resolver>>,
    inputs: mpsc::Sender<Input>,
) {
    while let Some(resolvers) = cluster.recv().await {
        if inputs.send(Input::Resolvers(resolvers)).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of the kernel about an address of this interface, in a network of 24 bits.
    fn message(ifindex: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![0, 24, 0, 0];
        body.extend(ifindex.to_ne_bytes());
        for (kind, value) in attributes {
            netlink::put(&mut body, *kind, value);
        }
        body
    }

    fn read(body: &[u8]) -> Option<(u32, String)> {
        let read = address(netlink::Message {
            kind: RTM_NEWADDR,
            body,
        });
        read.map(|(ifindex, network)| (ifindex, network.to_string()))
    }

    #[test]
    fn an_address_without_a_network_may_move() {
        let may_move = |text: &str| may_move(text.parse().expect("a network"));
        assert!(may_move("192.0.2.100/32") && may_move("2001:db8::100/128"));
        assert!(!may_move("192.0.2.1/24") && !may_move("2001:db8::1/64"));
    }

    #[test]
    fn the_address_of_the_node_is_read_and_not_that_of_the_peer() {
        let peer = (IFA_ADDRESS, &[192, 0, 2, 1][..]);
        let own = (IFA_LOCAL, &[192, 0, 2, 2][..]);
        assert_eq!(
            read(&message(7, &[peer, own])),
            Some((7, "192.0.2.2/24".to_owned()))
        );
        let v6 = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        let octets = v6.octets();
        let alone = message(9, &[(IFA_ADDRESS, &octets[..])]);
        assert_eq!(read(&alone), Some((9, "2001:db8::1/24".to_owned())));
        assert_eq!(read(&message(9, &[(IFA_LOCAL, &[1, 2, 3][..])])), None);
        assert_eq!(read(&alone[..6]), None);
    }

    #[test]
    fn a_route_of_ovn_kubernetes_leads_to_the_network_of_services() {
        let read = |len: u8, table: u8, dst: [u8; 4], next_hop: [u8; 4]| {
            let mut body = vec![2, len, 0, 0, table, 0, 0, 0, 0, 0, 0, 0];
            netlink::put(&mut body, RTA_DST, &dst);
            netlink::put(&mut body, RTA_GATEWAY, &next_hop);
            let kind = RTM_NEWROUTE;
            let body = &body;
            let found = service_network(netlink::Message { kind, body });
            found.map(|network| network.to_string())
        };
        let services = Some("10.96.0.0/12".to_owned());
        for next_hop in [[169, 254, 0, 4], [169, 254, 169, 4]] {
            assert_eq!(read(12, RT_TABLE_MAIN, [10, 96, 0, 0], next_hop), services);
        }
        let next_hop = [169, 254, 0, 4];
        assert_eq!(read(12, 7, [10, 96, 0, 0], next_hop), None, "of a VRF");
        let large = read(11, RT_TABLE_MAIN, [10, 96, 0, 0], next_hop);
        assert_eq!(large, None, "no network of Services is so large");
        let other = read(12, RT_TABLE_MAIN, [10, 96, 0, 0], [169, 254, 0, 1]);
        assert_eq!(other, None, "of another router");
        // Without attributes, and cut.
        for len in [RTMSG_LEN, 3] {
            let body = &[2, 12, 0, 0, 254, 0, 0, 0, 0, 0, 0, 0][..len];
            let kind = RTM_NEWROUTE;
            assert_eq!(service_network(netlink::Message { kind, body }), None);
        }
    }

    /// What is found of an interface with this address.
    fn of(interface: &str, kind: Option<&str>, network: &str) -> (usize, usize, usize) {
        let mut found = NodeAddresses::default();
        found.add(interface, kind, network.parse().expect("a network"));
        (
            found.all.len(),
            found.dns_cache.len(),
            found.of_plugins.len(),
        )
    }

    #[test]
    fn an_interface_that_a_tenant_can_have_made_gives_the_node_no_address() {
        for kind in [
            None,
            Some("openvswitch"),
            Some("bond"),
            Some("vlan"),
            Some("tun"),
        ] {
            assert_eq!(of("one", kind, "192.0.2.1/24"), (1, 0, 0), "{kind:?}");
        }
        for kind in ["bridge", "veth"] {
            assert_eq!(of("one", Some(kind), "192.0.2.1/24"), (0, 0, 1), "{kind}");
            assert_eq!(of("one", Some(kind), "2001:db8::1/64"), (0, 0, 1), "{kind}");
        }
    }

    #[test]
    fn an_interface_that_a_tenant_can_have_made_is_no_dns_cache() {
        let address = "169.254.20.10/32";
        assert_eq!(of("nodelocaldns", Some("dummy"), address), (0, 1, 0));
        assert_eq!(of("kube-ipvs0", Some("dummy"), address), (0, 0, 0));
        for kind in [None, Some("bridge"), Some("veth"), Some("macvlan")] {
            assert_eq!(of("nodelocaldns", kind, address), (0, 0, 0), "{kind:?}");
        }
    }

    #[test]
    fn the_kernel_answers_and_addresses_that_every_node_has_are_left_out() {
        let found = NodeAddresses::find().expect("the kernel answers");
        let every = [
            IpAddr::from(Ipv4Addr::LOCALHOST),
            Ipv6Addr::LOCALHOST.into(),
        ];
        assert!(
            every.iter().all(|one| !found.all.contains(one)),
            "{found:?}"
        );
    }

    #[tokio::test]
    async fn the_networks_of_routes_are_told_beside_those_of_the_cluster() {
        let network = |text: &str| text.parse::<IpNet>().expect("a network");
        let (cluster, of_cluster) = mpsc::channel(1);
        let (routes, of_routes) = watch::channel([network("10.96.0.0/16")].into());
        let (inputs, mut told) = mpsc::channel(1);
        let telling = tokio::spawn(tell_service_networks(of_cluster, of_routes, inputs));
        let mut told = async || match told.recv().await {
            Some(Input::ServiceNetworks(told)) => told.iter().map(ToString::to_string).collect(),
            other => panic!("{other:?}"),
        };
        let all: Vec<String> = told().await;
        assert_eq!(all, ["10.96.0.0/16"]);
        cluster
            .send([network("10.97.0.0/16")].into())
            .await
            .expect("open");
        assert_eq!(told().await, ["10.96.0.0/16", "10.97.0.0/16"]);
        routes.send_replace(BTreeSet::new());
        assert_eq!(told().await, ["10.97.0.0/16"]);
        drop(cluster);
        telling.await.expect("it ends");
    }
}
