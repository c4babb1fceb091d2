//! Addresses that are never opened, whatever a DNS answer says.
//!
//! A name's owner decides where the name leads. Without this list, whoever owns a name that a
//! firewall mentions could open the way into the node, its metadata service or the cluster itself
//! ("DNS rebinding"). An address is looked at in every form in which it reaches the same host:
//! plain, IPv4-mapped, behind a NAT64 or a 6to4 relay.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{
    Command,
    io::{output::Output, report::Report},
    ovn::{
        rows::Interface,
        view::{ClusterChanges, Concerned, Owners, PodNetworks},
    },
    tools::counter_vec::{CounterVec, Label as _, labels},
    values::{
        ids::PortId,
        limits::{CLUSTER_NETWORKS_MAX, COVERING_NAMED_MAX, REFUSALS_REPORTED_MAX},
        name::DomainName,
        resolver::Resolver,
    },
};

labels! {
    /// Why an address is never opened.
    Refused {
        /// 0.0.0.0/8 and ::, which systems take for themselves (RFC 1122, section 3.2.1.3;
        /// RFC 4291, section 2.5.2).
        Unspecified = "unspecified",
        /// 127.0.0.0/8 and ::1 (RFC 1122, section 3.2.1.3; RFC 4291, section 2.5.3).
        Loopback = "loopback",
        /// The metadata service of a cloud, which tells an instance its secrets.
        Metadata = "metadata",
        /// 169.254.0.0/16, fe80::/10 and the former fec0::/10 (RFC 3927; RFC 4291, section 2.5.6;
        /// RFC 3879).
        LinkLocal = "link_local",
        /// 224.0.0.0/4 and ff00::/8 (RFC 5771; RFC 4291, section 2.7).
        Multicast = "multicast",
        /// 255.255.255.255 (RFC 919, section 7).
        Broadcast = "broadcast",
        /// 240.0.0.0/4, reserved (RFC 1112, section 4).
        Reserved = "reserved",
        /// A network of the cluster itself.
        Cluster = "cluster",
        /// The address of a Service of the cluster.
        Service = "service",
        /// An address of a node of the cluster: the kubelet listens there.
        Node = "node",
        /// An address of an API server of the cluster.
        ApiServer = "api_server",
        /// A private network, refused by option.
        Private = "private",
        /// A network that an option refuses.
        Denied = "denied",
    }
}

const fn v4(octets: [u8; 4], length: u8) -> IpNet {
    let [a, b, c, d] = octets;
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), length))
}

const fn v6(segments: [u16; 8], length: u8) -> IpNet {
    let [a, b, c, d, e, f, g, h] = segments;
    IpNet::V6(Ipv6Net::new_assert(
        Ipv6Addr::new(a, b, c, d, e, f, g, h),
        length,
    ))
}

/// Networks that ovn-kubernetes uses inside every cluster unless told otherwise: join, transit and
/// masquerade (go-controller/pkg/config/config.go), and the join network of user-defined networks
/// (`UserDefinedPrimaryNetworkJoinSubnetV4` in go-controller/pkg/types/const.go).
pub const OVN_KUBERNETES_NETWORKS: &[IpNet] = &[
    v4([100, 64, 0, 0], 16),
    v6([0xfd98, 0, 0, 0, 0, 0, 0, 0], 64),
    v4([100, 88, 0, 0], 16),
    v6([0xfd97, 0, 0, 0, 0, 0, 0, 0], 64),
    v4([169, 254, 0, 0], 17),
    v6([0xfd69, 0, 0, 0, 0, 0, 0, 0], 112),
    v4([100, 65, 0, 0], 16),
    v6([0xfd99, 0, 0, 0, 0, 0, 0, 0], 64),
];

/// The metadata services of clouds, and services that trust packets from within a machine.
const METADATA: &[IpNet] = &[
    // Most of them: Amazon, Google, Azure, OpenStack.
    v4([169, 254, 169, 254], 32),
    // Amazon's link-local services over IPv6, metadata at fd00:ec2::254 among them ("Configure the
    // Instance Metadata Service options", Amazon EC2 User Guide).
    v6([0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0], 32),
    // Google over IPv6, fd20:ce::254 ("About VM metadata", Compute Engine documentation).
    v6([0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254], 128),
    // Azure's "wire server" ("What is IP address 168.63.129.16?", Azure Virtual Network documentation).
    v4([168, 63, 129, 16], 32),
    // Alibaba ("View instance metadata", Elastic Compute Service documentation).
    v4([100, 100, 100, 200], 32),
    // Oracle, where classic instances have it ("Retrieving Instance Metadata", Compute Classic).
    v4([192, 0, 0, 192], 32),
];

/// RFC 1918, RFC 6598 and RFC 4193.
const PRIVATE: &[IpNet] = &[
    v4([10, 0, 0, 0], 8),
    v4([172, 16, 0, 0], 12),
    v4([192, 168, 0, 0], 16),
    v4([100, 64, 0, 0], 10),
    v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7),
];

/// All addresses.
const EVERYWHERE: [IpNet; 2] = [v4([0, 0, 0, 0], 0), v6([0, 0, 0, 0, 0, 0, 0, 0], 0)];

/// The most networks in one list of an option.
pub const NETWORKS_MAX: usize = 256;

/// Networks whose addresses name no host elsewhere, and why they are refused. Of two that have an
/// address, the first counts.
const SPECIAL: &[(IpNet, Refused)] = &[
    (v4([0, 0, 0, 0], 8), Refused::Unspecified),
    (v4([127, 0, 0, 0], 8), Refused::Loopback),
    (v4([169, 254, 0, 0], 16), Refused::LinkLocal),
    (v4([224, 0, 0, 0], 4), Refused::Multicast),
    (v4([255, 255, 255, 255], 32), Refused::Broadcast),
    (v4([240, 0, 0, 0], 4), Refused::Reserved),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 128), Refused::Unspecified),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), Refused::Loopback),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 9), Refused::LinkLocal),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), Refused::Multicast),
];

/// A prefix behind which a NAT64 of the network reaches IPv4 (RFC 6052, section 2.2).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Nat64Prefix(Ipv6Net);

/// Why a text is no NAT64 prefix.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{0}` is no NAT64 prefix; use IPv6 with a length of 32, 40, 48, 56, 64 or 96")]
pub struct Nat64PrefixError(String);

impl FromStr for Nat64Prefix {
    type Err = Nat64PrefixError;

    fn from_str(text: &str) -> Result<Self, Nat64PrefixError> {
        let network = text.parse::<Ipv6Net>().ok();
        network
            .filter(|network| [32, 40, 48, 56, 64, 96].contains(&network.prefix_len()))
            .map(|network| Self(network.trunc()))
            .ok_or_else(|| Nat64PrefixError(text.to_owned()))
    }
}

impl Nat64Prefix {
    /// The IPv4 address that an address with this prefix stands for.
    fn embedded(self, address: Ipv6Addr) -> Option<Ipv4Addr> {
        // Bits 64 to 71 are left out (RFC 6052, section 2.2).
        let place = match self.0.prefix_len() {
            32 => [4, 5, 6, 7],
            40 => [5, 6, 7, 9],
            48 => [6, 7, 9, 10],
            56 => [7, 9, 10, 11],
            64 => [9, 10, 11, 12],
            _ => [12, 13, 14, 15],
        };
        let octets = address.octets();
        let is_in = self.0.contains(&address);
        is_in.then(|| Ipv4Addr::from(place.map(|index| octets[index])))
    }
}

/// Which addresses of IPv4 an address of IPv6 may stand for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Translation {
    /// The prefixes beside those that everybody has.
    prefixes: Arc<[Nat64Prefix]>,
}

impl Translation {
    /// The addresses of IPv4 that this one may stand for.
    pub(crate) fn inner(&self, address: Ipv6Addr) -> impl Iterator<Item = Ipv4Addr> {
        let by_option = self.prefixes.iter();
        let by_option = by_option.filter_map(move |prefix| prefix.embedded(address));
        embedded(address).into_iter().chain(by_option)
    }

    /// The networks in which an address may stand for one of IPv4.
    fn networks(&self) -> impl Iterator<Item = Ipv6Net> {
        let by_option = self.prefixes.iter().map(|prefix| prefix.0);
        TRANSLATING.iter().copied().chain(by_option)
    }
}

/// Networks in order. None overlaps another.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Networks(Vec<IpNet>);

impl Networks {
    fn new(networks: impl IntoIterator<Item = IpNet>) -> Self {
        let all: Vec<IpNet> = networks.into_iter().collect();
        let mut networks = IpNet::aggregate(&all);
        networks.sort_unstable_by_key(IpNet::network);
        Self(networks)
    }

    fn contains(&self, address: IpAddr) -> bool {
        let after = self
            .0
            .partition_point(|network| network.network() <= address);
        let before = after.checked_sub(1).map(|at| self.0[at]);
        before.is_some_and(|network| network.contains(&address))
    }

    /// The networks of one of both alone. An address that is in one of both alone is in one of them.
    fn difference(&self, other: &Self) -> Self {
        let [one, other]: [BTreeSet<IpNet>; 2] =
            [self, other].map(|networks| networks.0.iter().copied().collect());
        Self::new(one.symmetric_difference(&other).copied())
    }

    fn overlaps(&self, other: &IpNet) -> bool {
        self.0.iter().any(|network| overlap(network, other))
    }
}

/// Whether the kernel leaves a network of pods to the agent at every port, and not only at those that it concerns. A
/// tenant can choose all addresses of the Internet for its network. Names seldom lead to private ones.
fn is_left_at_all(whose: &Concerned, network: &IpNet) -> bool {
    *whose == Concerned::Everybody || PRIVATE.iter().any(|private| private.contains(network))
}

fn overlap(one: &IpNet, other: &IpNet) -> bool {
    one.contains(&other.network()) || other.contains(&one.network())
}

/// The port that an address would be opened to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Whose<'a> {
    /// The user-defined network of the port.
    pub network: Option<&'a str>,
    /// The namespace whose rules hold for the port.
    pub namespace: Option<&'a str>,
}

/// The addresses and networks that were learned of the cluster.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Learned {
    pods: BTreeMap<Concerned, Networks>,
    /// The networks that the API server takes the addresses of Services from.
    service_networks: Networks,
    /// The addresses of Services, and whom each concerns.
    services: BTreeSet<(IpAddr, Concerned)>,
    /// Likewise those that other load balancers have in front, which are not refused.
    fronts: BTreeSet<(IpAddr, Concerned)>,
    /// Whether some load balancers cannot be read.
    are_fronts_unread: bool,
    nodes: BTreeSet<IpAddr>,
    /// The addresses of this node's interfaces.
    own: BTreeSet<IpAddr>,
    /// The addresses of API servers.
    api_servers: BTreeSet<IpAddr>,
    /// The addresses of the cluster's DNS Services.
    dns: BTreeSet<IpAddr>,
    /// The addresses of the DNS cache of this node, which are no Service's unless another list has them.
    dns_cache: BTreeSet<IpAddr>,
}

/// The addresses to check again, in each of their forms: it may have changed whether they are refused.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Recheck {
    /// These, for all ports.
    addresses: BTreeSet<IpAddr>,
    /// Those in these networks, for the ports that each concerns.
    networks: BTreeMap<Concerned, Networks>,
    /// Whether all load balancers can be read again: each address has counted as one in front.
    pub(crate) are_fronts_read: bool,
}

impl Recheck {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.addresses.is_empty() && self.networks.is_empty()
    }

    /// The addresses to check for all ports.
    pub(crate) fn addresses(&self) -> &BTreeSet<IpAddr> {
        &self.addresses
    }

    /// The networks to check for this port.
    pub(crate) fn networks_of(
        &self,
        row: &Interface,
        namespace: Option<&str>,
    ) -> ChangedNetworks<'_> {
        self.networks_for(Whose::of(row, namespace))
    }

    /// The networks to check for all ports.
    pub(crate) fn networks_of_all(&self) -> ChangedNetworks<'_> {
        self.networks_for(Whose::default())
    }

    fn networks_for(&self, whose: Whose<'_>) -> ChangedNetworks<'_> {
        if self.networks.is_empty() {
            return ChangedNetworks(Vec::new());
        }
        let networks = whose.concerned();
        ChangedNetworks(
            networks
                .filter_map(|concerned| self.networks.get(&concerned))
                .collect(),
        )
    }
}

/// The networks of a [`Recheck`] that concern a port.
#[derive(Clone, Debug)]
pub(crate) struct ChangedNetworks<'a>(Vec<&'a Networks>);

impl ChangedNetworks<'_> {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A network of `--deny-answers`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DeniedNetwork {
    /// A network.
    Network(IpNet),
    /// All private networks.
    Private,
}

/// Why a text names no networks.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{0}` is no network; use an address or a CIDR such as 10.0.0.0/8{1}")]
pub struct NetworkError(String, &'static str);

/// Reads a network: a CIDR, or an address for itself alone. Bits behind the prefix are cleared.
pub fn parse_network(text: &str) -> Result<IpNet, NetworkError> {
    let address = || text.parse::<IpAddr>().map(IpNet::from);
    text.parse::<IpNet>()
        .or_else(|_| address())
        .map(|network| network.trunc())
        .map_err(|_| NetworkError(text.to_owned(), ""))
}

impl FromStr for DeniedNetwork {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        if text == "private" {
            return Ok(Self::Private);
        }
        parse_network(text)
            .map(Self::Network)
            .map_err(|NetworkError(text, _)| NetworkError(text, ", or `private`"))
    }
}

/// More than [`NETWORKS_MAX`] networks.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0} networks given, more than {NETWORKS_MAX}; join neighbouring ones")]
pub struct TooManyNetworks(pub usize);

/// The addresses that are never opened.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Refusals {
    allowed: Networks,
    denied: Networks,
    private: bool,
    cluster: Networks,
    /// Those of them that are given: [`OVN_KUBERNETES_NETWORKS`] are not left out of a rule.
    given: Networks,
    translation: Translation,
    learned: Learned,
}

impl Refusals {
    /// Refuses the addresses that are always refused, the cluster's networks `cluster` beside
    /// [`OVN_KUBERNETES_NETWORKS`], and `denied`. Addresses in `allowed` are never refused. An
    /// address behind one of the prefixes `nat64` is checked by the IPv4 address in it.
    pub fn new(
        cluster: &[IpNet],
        denied: &[DeniedNetwork],
        allowed: &[IpNet],
        nat64: &[Nat64Prefix],
    ) -> Result<Self, TooManyNetworks> {
        for count in [cluster.len(), denied.len(), allowed.len(), nat64.len()] {
            if count > NETWORKS_MAX {
                return Err(TooManyNetworks(count));
            }
        }
        let networks = denied.iter().filter_map(|denied| match denied {
            DeniedNetwork::Network(network) => Some(*network),
            DeniedNetwork::Private => None,
        });
        Ok(Self {
            allowed: Networks::new(allowed.iter().copied()),
            denied: Networks::new(networks),
            private: denied.contains(&DeniedNetwork::Private),
            cluster: Networks::new(OVN_KUBERNETES_NETWORKS.iter().chain(cluster).copied()),
            given: Networks::new(cluster.iter().copied()),
            translation: Translation {
                prefixes: nat64.into(),
            },
            learned: Learned::default(),
        })
    }

    /// Whether the address may be opened to a pod on the default network, or why not.
    pub fn check(&self, address: IpAddr) -> Result<(), Refused> {
        self.check_for(address, Whose::default())
    }

    /// Whether the address may be opened to a pod, or why not.
    pub fn check_for(&self, address: IpAddr, whose: Whose<'_>) -> Result<(), Refused> {
        if self.allows(address) {
            return Ok(());
        }
        self.check_form(address, whose)?;
        let IpAddr::V6(address) = address else {
            return Ok(());
        };
        for inner in self.inner(address) {
            if !self.allows(inner) {
                self.check_form(inner, whose)?;
            }
        }
        Ok(())
    }

    /// Which addresses of IPv4 an address of IPv6 may stand for.
    pub(crate) fn translation(&self) -> &Translation {
        &self.translation
    }

    /// The addresses of IPv4 that an address of IPv6 may stand for.
    fn inner(&self, address: Ipv6Addr) -> impl Iterator<Item = IpAddr> {
        self.translation.inner(address).map(IpAddr::V4)
    }

    /// The networks whose addresses the kernel leaves to the agent at every port: all that are refused to every port,
    /// some that are refused to a tenant alone ([`is_left_at_all`]), and those that may have a load balancer in front.
    fn networks(&self) -> BTreeSet<IpNet> {
        let special = SPECIAL.iter().map(|(network, _)| network);
        let private = PRIVATE.iter().filter(|_| self.private);
        let pods = self.learned.pods.iter().flat_map(|(whose, networks)| {
            let networks = networks.0.iter();
            networks.filter(|network| is_left_at_all(whose, network))
        });
        let of_all = [&self.cluster, &self.denied, &self.learned.service_networks];
        let networks = of_all.into_iter().flat_map(|networks| &networks.0);
        let networks = networks.chain(pods).chain(special).chain(METADATA);
        let fronts = EVERYWHERE.iter().filter(|_| self.learned.are_fronts_unread);
        networks.chain(private).chain(fronts).copied().collect()
    }

    /// Whether these are all networks that are refused to a port.
    fn are_all_left(&self, whose: Whose<'_>) -> bool {
        whose.concerned().all(|whose| {
            let networks = self.learned.pods.get(&whose);
            let mut networks = networks.into_iter().flat_map(|networks| &networks.0);
            networks.all(|network| is_left_at_all(&whose, network))
        })
    }

    /// Whether the address is refused by itself to some port or to all, or is in front of a load balancer.
    fn is_left_by_itself(&self, address: IpAddr) -> bool {
        let Learned {
            services,
            fronts,
            nodes,
            own,
            api_servers,
            dns,
            dns_cache,
            ..
        } = &self.learned;
        let mut known = [services, fronts].into_iter();
        let is_in_front = known.any(|known| concerned_by(known, address).next().is_some());
        let single = [nodes, own, api_servers, dns, dns_cache];
        is_in_front || single.iter().any(|all| all.contains(&address))
    }

    /// Whether a load balancer may have the address in front, as these ports see it. Of an address of IPv6 that stands
    /// for one of IPv4, load balancers know nothing.
    fn is_front(&self, address: IpAddr, whose: Whose<'_>) -> bool {
        let Learned {
            services,
            fronts,
            are_fronts_unread,
            ..
        } = &self.learned;
        let known = [services, fronts].into_iter();
        let mut concerned = known.flat_map(|known| concerned_by(known, address));
        *are_fronts_unread || concerned.any(|concerned| whose.is(concerned))
    }

    fn allows(&self, address: IpAddr) -> bool {
        self.allowed.contains(address)
    }

    /// The allowed networks, and the reasons for which their addresses would be refused otherwise.
    fn overridden(&self) -> BTreeMap<IpNet, BTreeSet<&'static str>> {
        let Learned {
            pods,
            service_networks,
            services,
            fronts: _,
            are_fronts_unread: _,
            nodes,
            own,
            api_servers,
            dns,
            dns_cache,
        } = &self.learned;
        let reasons = |allowed: &IpNet| {
            let any = |networks: &[IpNet]| networks.iter().any(|one| overlap(one, allowed));
            let any_of = |addresses: &BTreeSet<IpAddr>| {
                let mut addresses = addresses.range(allowed.network()..);
                addresses
                    .next()
                    .is_some_and(|first| allowed.contains(first))
            };
            // `Everybody` is the first in order.
            let mut services = services.range((allowed.network(), Concerned::Everybody)..);
            let service = services.next();
            let is_pods = pods.values().any(|networks| networks.overlaps(allowed));
            let is_service = service.is_some_and(|(first, _)| allowed.contains(first))
                || any_of(dns)
                || service_networks.overlaps(allowed);
            let found = [
                (Refused::Denied, self.denied.overlaps(allowed)),
                (Refused::Metadata, any(METADATA)),
                (Refused::Cluster, self.cluster.overlaps(allowed) || is_pods),
                (Refused::Service, is_service),
                (
                    Refused::Node,
                    [nodes, own, dns_cache].into_iter().any(any_of),
                ),
                (Refused::ApiServer, any_of(api_servers)),
                (Refused::Private, self.private && any(PRIVATE)),
                (
                    Refused::Reserved,
                    SPECIAL.iter().any(|(one, _)| overlap(one, allowed)),
                ),
            ];
            let found = found.into_iter().filter(|(_, is_so)| *is_so);
            found.map(|(reason, _)| reason.as_str()).collect()
        };
        let allowed = self.allowed.0.iter();
        allowed
            .map(|network| (*network, reasons(network)))
            .collect()
    }

    /// Whether the address belongs to the cluster itself: no EgressFirewall is asked about it, because
    /// ovn-kubernetes leaves the cluster's networks out of its rules, and rewrites a Service's address before
    /// it comes to them. An address that no Service has comes to them as it is. So do addresses of the default network
    /// on a user-defined one, also those of the Services that its pods may use
    /// (go-controller/pkg/ovn/controller/services/services_controller.go, `configureUDNEnabledServiceRoute`). The
    /// networks of [`OVN_KUBERNETES_NETWORKS`] come to the rules, too: these leave out the subnets of pods alone
    /// (`generateMatch` in go-controller/pkg/ovn/egressfirewall.go).
    fn is_inside(&self, address: IpAddr, whose: Whose<'_>) -> bool {
        let Learned {
            pods,
            service_networks: _,
            services,
            fronts: _,
            are_fronts_unread: _,
            nodes: _,
            own: _,
            api_servers: _,
            dns,
            dns_cache,
        } = &self.learned;
        let is_in = |concerned: Concerned| {
            let pods = pods.get(&concerned);
            pods.is_some_and(|pods| pods.contains(address))
                || services.contains(&(address, concerned))
        };
        let is_of_cluster = self.given.contains(address) && !dns_cache.contains(&address);
        let is_on_default = whose.network.is_none();
        let mut concerned = whose.concerned();
        is_of_cluster
            || is_on_default && dns.contains(&address)
            || concerned.any(|one| (is_on_default || one != Concerned::Everybody) && is_in(one))
    }

    /// An address, and those that it may stand for.
    fn forms(&self, address: IpAddr) -> impl Iterator<Item = IpAddr> {
        let inner = match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => Some(self.inner(address)),
        };
        [address].into_iter().chain(inner.into_iter().flatten())
    }

    /// Checks one form of an address.
    fn check_form(&self, address: IpAddr, whose: Whose<'_>) -> Result<(), Refused> {
        if self.denied.contains(address) {
            return Err(Refused::Denied);
        }
        if contain(METADATA, address) {
            return Err(Refused::Metadata);
        }
        if self.cluster.contains(address) {
            return Err(Refused::Cluster);
        }
        let Learned {
            pods,
            service_networks,
            services,
            fronts: _,
            are_fronts_unread: _,
            nodes,
            own,
            api_servers,
            dns,
            dns_cache,
        } = &self.learned;
        for concerned in whose.concerned() {
            if pods
                .get(&concerned)
                .is_some_and(|pods| pods.contains(address))
            {
                return Err(Refused::Cluster);
            }
            if services.contains(&(address, concerned)) {
                return Err(Refused::Service);
            }
        }
        if service_networks.contains(address) || dns.contains(&address) {
            return Err(Refused::Service);
        }
        if api_servers.contains(&address) {
            return Err(Refused::ApiServer);
        }
        let of_node = [nodes, own, dns_cache];
        if of_node.iter().any(|all| all.contains(&address)) {
            return Err(Refused::Node);
        }
        if let Some((_, reason)) = SPECIAL.iter().find(|(net, _)| net.contains(&address)) {
            return Err(*reason);
        }
        if self.private && contain(PRIVATE, address) {
            return Err(Refused::Private);
        }
        Ok(())
    }
}

impl<'a> Whose<'a> {
    /// This port's, where the rules of this namespace hold for it.
    fn of(row: &'a Interface, namespace: Option<&'a str>) -> Self {
        Self {
            network: row.network.as_deref(),
            namespace,
        }
    }

    /// Whether something concerns the packets of the pod.
    fn is(self, concerned: &Concerned) -> bool {
        match concerned {
            Concerned::Everybody => true,
            Concerned::Network(name) => self.network == Some(name.as_str()),
            Concerned::Namespace(name) => self.namespace == Some(name.as_str()),
        }
    }

    /// The parts of the cluster that concern the packets of the pod.
    fn concerned(self) -> impl Iterator<Item = Concerned> {
        let network = self.network.map(|name| Concerned::Network(name.to_owned()));
        let namespace = self
            .namespace
            .map(|name| Concerned::Namespace(name.to_owned()));
        [Some(Concerned::Everybody), network, namespace]
            .into_iter()
            .flatten()
    }
}

/// An address that is not opened to a port.
pub(crate) struct Refusal<'a> {
    /// The name that leads to it; it is reported only with one.
    pub(crate) name: Option<&'a DomainName>,
    /// The address.
    pub(crate) address: IpAddr,
    /// Why it is not opened.
    pub(crate) reason: Refused,
}

/// The owner of the addresses that are never opened. Takes them out of answers, counts them and
/// reports them.
#[derive(Debug)]
pub(crate) struct RefusedAddresses {
    refusals: Refusals,
    counts: CounterVec<Refused>,
    /// By port, the refusals that were reported: each is reported once in a while only.
    reported: HashMap<PortId, BTreeSet<(DomainName, IpAddr)>>,
    /// The allowed networks that would be refused otherwise, as they were reported.
    overridden: BTreeMap<IpNet, BTreeSet<&'static str>>,
    /// Other networks and Services at the address of a trusted DNS server, as reported.
    covered: BTreeMap<Resolver, BTreeSet<String>>,
    /// Whether networks of pods have no room.
    are_left_out: bool,
    /// The networks whose addresses the kernel leaves to the agent.
    left_by_kernel: BTreeSet<IpNet>,
    /// The single addresses that it leaves to the agent.
    addresses_left: BTreeSet<IpAddr>,
    /// Of both, those that have come since the kernel was last told, and those that have gone.
    left_changed: BTreeMap<IpNet, bool>,
    /// Whether it was reported that some load balancers cannot be read.
    unread_told: bool,
    /// How many addresses were learned, looked up in the cache, or checked.
    #[cfg(test)]
    pub(crate) work: std::cell::Cell<usize>,
}

impl RefusedAddresses {
    /// Nothing was refused yet. Reports the networks that `--allow-answers` opens.
    pub(crate) fn new(refusals: Refusals, out: &mut Output) -> Self {
        let mut refused = Self {
            refusals,
            counts: CounterVec::default(),
            reported: HashMap::new(),
            overridden: BTreeMap::new(),
            covered: BTreeMap::new(),
            are_left_out: false,
            left_by_kernel: BTreeSet::new(),
            addresses_left: BTreeSet::new(),
            left_changed: BTreeMap::new(),
            unread_told: false,
            #[cfg(test)]
            work: std::cell::Cell::default(),
        };
        refused.tell_overridden(out);
        refused.leave_networks();
        refused
    }

    /// Refuses from now on the networks and addresses that OVN knows to be the cluster's own.
    /// Returns the addresses to check again.
    pub(crate) fn learn(
        &mut self,
        changes: ClusterChanges<impl Iterator<Item = (IpAddr, Owners)>>,
        out: &mut Output,
    ) -> Recheck {
        let networks = changes.pods.map(|pods| self.learn_pods(pods, out));
        let mut networks = networks.unwrap_or_default();
        let unread = &mut self.refusals.learned.are_fronts_unread;
        let were_unread = std::mem::replace(unread, changes.are_fronts_unread);
        if were_unread != changes.are_fronts_unread {
            networks.insert(Concerned::Everybody, Networks(EVERYWHERE.to_vec()));
        }
        let mut changed = BTreeSet::new();
        for (address, owners) in changes.addresses {
            #[cfg(test)]
            self.work.update(|work| work + 1);
            // Also if its owners were caught up with: what was decided before is still to be checked.
            self.learn_owners(address, owners);
            changed.insert(address);
        }
        // Pods come and go all the time. Nobody was told their addresses, unless an option opens them.
        let pods_of_all = self.refusals.learned.pods.get(&Concerned::Everybody);
        let is_pod = |address| pods_of_all.is_some_and(|pods| pods.contains(address));
        let backends = changes.backends.into_iter();
        let may_be_told = |address| self.refusals.allows(address) || !is_pod(address);
        changed.extend(backends.filter(|address| may_be_told(*address)));
        let recheck = Recheck {
            addresses: changed,
            networks,
            are_fronts_read: were_unread && !changes.are_fronts_unread,
        };
        self.changed(&recheck, out);
        recheck
    }

    /// Takes over the networks of pods. Returns those that have come or gone.
    fn learn_pods(&mut self, pods: PodNetworks, out: &mut Output) -> BTreeMap<Concerned, Networks> {
        let count = |pods: &PodNetworks| -> usize { pods.values().map(BTreeSet::len).sum() };
        let all = count(&pods);
        let pods = limited(pods);
        let left_out = all - count(&pods);
        let pods = pods.into_iter();
        let pods = pods.map(|(whose, nets)| (whose, Networks::new(nets)));
        let before = std::mem::replace(&mut self.refusals.learned.pods, pods.collect());
        let pods = &self.refusals.learned.pods;
        let known = pods.get(&Concerned::Everybody);
        let were_left_out = std::mem::replace(&mut self.are_left_out, left_out > 0);
        if known != before.get(&Concerned::Everybody) || were_left_out != self.are_left_out {
            out.report(Report::ClusterNetworks {
                networks: known.cloned().unwrap_or_default().0,
                left_out,
            });
        }
        let none = Networks::default();
        let all = before.keys().chain(pods.keys());
        let changed = all.filter_map(|concerned| {
            let [before, now] = [&before, pods].map(|pods| pods.get(concerned).unwrap_or(&none));
            (before != now).then(|| (concerned.clone(), before.difference(now)))
        });
        changed.collect()
    }

    /// Before a decision over an address: takes over the owners that are not learned yet (`changed`), of each of its
    /// forms.
    pub(crate) fn catch_up(&mut self, address: IpAddr, changed: impl Fn(IpAddr) -> Option<Owners>) {
        let forms: Vec<_> = self.refusals.forms(address).collect();
        for form in forms {
            if let Some(owners) = changed(form) {
                self.learn_owners(form, owners);
            }
        }
    }

    /// Takes over the owners of an address.
    fn learn_owners(&mut self, address: IpAddr, owners: Owners) {
        let Owners {
            services,
            fronts,
            is_node,
            is_api_server,
        } = owners;
        let learned = &mut self.refusals.learned;
        replace_of_address(&mut learned.services, address, &services);
        replace_of_address(&mut learned.fronts, address, &fronts);
        let Learned {
            nodes, api_servers, ..
        } = learned;
        for (addresses, is_in) in [(nodes, is_node), (api_servers, is_api_server)] {
            match is_in {
                true => addresses.insert(address),
                false => addresses.remove(&address),
            };
        }
    }

    /// Refuses from now on these addresses of the cluster's DNS Services. Returns the addresses to check again.
    pub(crate) fn learn_dns(&mut self, dns: BTreeSet<IpAddr>, out: &mut Output) -> Recheck {
        let before = std::mem::replace(&mut self.refusals.learned.dns, dns.clone());
        self.replaced(&before, &dns, out)
    }

    /// Refuses from now on these addresses of the DNS cache of this node. Returns the addresses to check again.
    pub(crate) fn learn_dns_cache(
        &mut self,
        dns_cache: BTreeSet<IpAddr>,
        out: &mut Output,
    ) -> Recheck {
        let known = &mut self.refusals.learned.dns_cache;
        let before = std::mem::replace(known, dns_cache.clone());
        self.replaced(&before, &dns_cache, out)
    }

    /// Refuses from now on these addresses of this node's interfaces. Returns the addresses to check again.
    pub(crate) fn learn_own(&mut self, own: BTreeSet<IpAddr>, out: &mut Output) -> Recheck {
        let before = std::mem::replace(&mut self.refusals.learned.own, own.clone());
        self.replaced(&before, &own, out)
    }

    /// Other addresses have taken the place of these. Returns those to check again.
    fn replaced(
        &mut self,
        before: &BTreeSet<IpAddr>,
        now: &BTreeSet<IpAddr>,
        out: &mut Output,
    ) -> Recheck {
        let recheck = Recheck {
            addresses: before.symmetric_difference(now).copied().collect(),
            ..Recheck::default()
        };
        self.changed(&recheck, out);
        recheck
    }

    /// Refuses from now on the networks of the cluster's Services. Returns those to check again.
    pub(crate) fn learn_service_networks(
        &mut self,
        networks: BTreeSet<IpNet>,
        out: &mut Output,
    ) -> Recheck {
        let networks = Networks::new(networks);
        let known = &mut self.refusals.learned.service_networks;
        if *known == networks {
            return Recheck::default();
        }
        let changed = known.difference(&networks);
        *known = networks;
        let recheck = Recheck {
            networks: [(Concerned::Everybody, changed)].into(),
            ..Recheck::default()
        };
        self.changed(&recheck, out);
        recheck
    }

    /// Reports the networks that `--allow-answers` opens, if these addresses may change them.
    fn changed(&mut self, recheck: &Recheck, out: &mut Output) {
        self.leave_addresses(&recheck.addresses);
        if !recheck.networks.is_empty() {
            self.leave_networks();
        }
        let mut addresses = recheck.addresses.iter();
        if !recheck.networks.is_empty() || addresses.any(|address| self.refusals.allows(*address)) {
            self.tell_overridden(out);
        }
    }

    /// Notes which networks the kernel has to leave to the agent.
    fn leave_networks(&mut self) {
        let mut networks = self.refusals.networks();
        let translating = self.refusals.translation.networks();
        networks.extend(translating.map(IpNet::V6));
        let before = std::mem::replace(&mut self.left_by_kernel, networks);
        for network in before.symmetric_difference(&self.left_by_kernel) {
            let is_left = self.is_left(network);
            self.left_changed.insert(*network, is_left);
        }
    }

    /// The same for single addresses that may have changed.
    fn leave_addresses(&mut self, changed: &BTreeSet<IpAddr>) {
        for address in changed {
            let is_news = match self.refusals.is_left_by_itself(*address) {
                true => self.addresses_left.insert(*address),
                false => self.addresses_left.remove(address),
            };
            if is_news {
                let network = IpNet::from(*address);
                let is_left = self.is_left(&network);
                self.left_changed.insert(network, is_left);
            }
        }
    }

    fn is_left(&self, network: &IpNet) -> bool {
        self.left_by_kernel.contains(network)
            || is_single(network) && self.addresses_left.contains(&network.addr())
    }

    /// Tells the kernel which addresses it leaves to the agent from now on: those that may be refused, in whatever
    /// form, and those in front of load balancers. Without marks, it opens none. Returns whether there are further ones.
    /// While addresses wait to be learned, no network goes: it may have them.
    pub(crate) fn give_out_networks(
        &mut self,
        (has_marks, addresses_wait): (bool, bool),
        out: &mut Output,
    ) -> bool {
        let mut changes = std::mem::take(&mut self.left_changed);
        if addresses_wait {
            let waits = |network: &IpNet, is_left: &mut bool| !*is_left && !is_single(network);
            self.left_changed = changes.extract_if(.., waits).collect();
        }
        let are_further = changes.values().any(|is_left| *is_left);
        let are_unread = self.refusals.learned.are_fronts_unread;
        if has_marks && std::mem::replace(&mut self.unread_told, are_unread) != are_unread {
            out.report(Report::LoadBalancersUnread(are_unread));
        }
        if has_marks && !changes.is_empty() {
            out.command(Command::LeaveNetworks(changes));
        }
        are_further
    }

    /// Reports the networks that `--allow-answers` opens, if they have changed.
    fn tell_overridden(&mut self, out: &mut Output) {
        let mut overridden = self.refusals.overridden();
        overridden.retain(|_, reasons| !reasons.is_empty());
        if self.overridden != overridden {
            self.overridden.clone_from(&overridden);
            out.report(Report::AllowedAnyway(overridden));
        }
    }

    /// Reports the trusted DNS servers at whose address somebody else may answer: another network, or one of several
    /// Services there.
    pub(crate) fn look_at_resolvers<'a, Services: Iterator<Item = &'a str>>(
        &mut self,
        resolvers: &BTreeSet<Resolver>,
        services_at: impl Fn(IpAddr) -> Services,
        out: &mut Output,
    ) {
        let mut covered = BTreeMap::new();
        for resolver in resolvers {
            let pods = self.refusals.learned.pods.iter();
            let networks = pods.filter_map(|(whose, networks)| match whose {
                Concerned::Network(name) => networks
                    .contains(resolver.address)
                    .then(|| format!("the user-defined network {name}")),
                Concerned::Everybody | Concerned::Namespace(_) => None,
            });
            let mut services = BTreeSet::new();
            for service in services_at(resolver.address) {
                services.insert(service);
                if services.len() > COVERING_NAMED_MAX {
                    break;
                }
            }
            let services = services.iter().filter(|_| services.len() > 1);
            let services = services.map(|service| format!("the Service {service}"));
            let by = networks.chain(services).take(COVERING_NAMED_MAX);
            let by: BTreeSet<String> = by.collect();
            if !by.is_empty() {
                if self.covered.get(resolver) != Some(&by) {
                    out.report(Report::ResolverCovered {
                        resolver: *resolver,
                        by: by.clone(),
                    });
                }
                covered.insert(*resolver, by);
            }
        }
        self.covered = covered;
    }

    /// Checks whether an address may be opened to this port, or why not.
    pub(crate) fn check(
        &self,
        address: IpAddr,
        row: &Interface,
        namespace: Option<&str>,
    ) -> Result<(), Refused> {
        #[cfg(test)]
        self.work.update(|work| work + 1);
        self.refusals.check_for(address, Whose::of(row, namespace))
    }

    /// Whether the kernel knows all networks that are refused to this port. If not, it opens nothing there.
    pub(crate) fn kernel_knows_all(&self, row: &Interface, namespace: Option<&str>) -> bool {
        self.refusals.are_all_left(Whose::of(row, namespace))
    }

    /// Whether a load balancer may have an address in front, as this port sees it.
    pub(crate) fn is_front(
        &self,
        address: IpAddr,
        row: &Interface,
        namespace: Option<&str>,
    ) -> bool {
        self.refusals.is_front(address, Whose::of(row, namespace))
    }

    /// Whether an address belongs to the cluster itself, as this port sees it; nodes are outside.
    pub(crate) fn is_inside(
        &self,
        address: IpAddr,
        row: &Interface,
        namespace: Option<&str>,
    ) -> bool {
        self.refusals.is_inside(address, Whose::of(row, namespace))
    }

    /// Whether an address, or one that it may stand for, is in one of these networks.
    pub(crate) fn is_in(&self, address: IpAddr, networks: &ChangedNetworks<'_>) -> bool {
        #[cfg(test)]
        self.work.update(|work| work + 1);
        let is_in = |form| networks.0.iter().any(|networks| networks.contains(form));
        self.refusals.forms(address).any(is_in)
    }

    /// Whether an address is to be checked again for a port that these networks of the recheck concern.
    pub(crate) fn is_rechecked(
        &self,
        address: IpAddr,
        recheck: &Recheck,
        networks: &ChangedNetworks<'_>,
    ) -> bool {
        let mut forms = self.refusals.forms(address);
        forms.any(|form| recheck.addresses.contains(&form))
            || !networks.is_empty() && self.is_in(address, networks)
    }

    /// Whether an address is one of a node.
    pub(crate) fn is_node(&self, address: IpAddr) -> bool {
        let Learned { nodes, own, .. } = &self.refusals.learned;
        nodes.contains(&address) || own.contains(&address)
    }

    /// Takes the addresses out of an answer that are never opened to its port. Each is counted.
    /// Each is reported unless it was reported lately, or the pod has caused too many reports.
    pub(crate) fn take_out(
        &mut self,
        port: (PortId, &Interface, Option<&str>),
        name: &DomainName,
        addresses: &mut Vec<(IpAddr, Duration)>,
        out: &mut Output,
    ) {
        let (id, row, namespace) = port;
        addresses.retain(|(address, _)| match self.check(*address, row, namespace) {
            Ok(()) => true,
            Err(reason) => {
                let refusal = Refusal {
                    name: Some(name),
                    address: *address,
                    reason,
                };
                self.refuse((id, &row.iface_id), refusal, out);
                false
            }
        });
    }

    /// Counts and reports an address that is not opened.
    pub(crate) fn refuse(
        &mut self,
        (id, port): (PortId, &str),
        refusal: Refusal<'_>,
        out: &mut Output,
    ) {
        let Refusal {
            name,
            address,
            reason,
        } = refusal;
        self.counts.count(reason);
        let Some(name) = name else { return };
        let reported = self.reported.entry(id).or_default();
        if reported.len() >= REFUSALS_REPORTED_MAX {
            reported.clear();
        }
        if reported.insert((name.clone(), address)) {
            let report = Report::AddressRefused {
                port: port.to_owned(),
                name: name.clone(),
                address,
                reason: reason.as_str(),
            };
            out.report_of_pod(id, report);
        }
    }

    /// The addresses that were refused to a port of late, each with the name that led to it.
    pub(crate) fn reported(&self, id: PortId) -> impl Iterator<Item = &(DomainName, IpAddr)> {
        self.reported.get(&id).into_iter().flatten()
    }

    /// Forgets a port that is gone.
    pub(crate) fn forget(&mut self, port: PortId) {
        self.reported.remove(&port);
    }

    /// Addresses that were not opened, by reason.
    pub(crate) fn counts(&self) -> &CounterVec<Refused> {
        &self.counts
    }

    /// The number of ports with reported refusals, and the greatest number for one port.
    #[cfg(test)]
    pub(crate) fn remembered(&self) -> (usize, usize) {
        let most = self.reported.values().map(BTreeSet::len).max();
        (self.reported.len(), most.unwrap_or_default())
    }
}

fn is_single(network: &IpNet) -> bool {
    network.prefix_len() == network.max_prefix_len()
}

/// Whom an address of this list concerns.
fn concerned_by(
    known: &BTreeSet<(IpAddr, Concerned)>,
    address: IpAddr,
) -> impl Iterator<Item = &Concerned> {
    // `Everybody` is the first in order.
    let known = known.range((address, Concerned::Everybody)..);
    known
        .take_while(move |(one, _)| *one == address)
        .map(|(_, whose)| whose)
}

/// Whom an address of this list concerns, becomes this.
fn replace_of_address(
    known: &mut BTreeSet<(IpAddr, Concerned)>,
    address: IpAddr,
    now: &BTreeSet<Concerned>,
) {
    let before: BTreeSet<Concerned> = concerned_by(known, address).cloned().collect();
    for whose in before.difference(now) {
        known.remove(&(address, whose.clone()));
    }
    for whose in now.difference(&before) {
        known.insert((address, whose.clone()));
    }
}

/// The networks within the limit: first those that concern everybody, then the largest of each tenant, then the second
/// largest of each. So whoever has most loses its smallest.
fn limited(pods: PodNetworks) -> PodNetworks {
    let networks = pods.into_iter().flat_map(|(concerned, networks)| {
        let mut networks: Vec<_> = networks.into_iter().collect();
        networks.sort_by_key(IpNet::prefix_len);
        let networks = networks.into_iter().enumerate();
        networks.map(move |(rank, network)| (rank, concerned.clone(), network))
    });
    let mut networks: Vec<_> = networks.collect();
    let place = |rank, whose: &_| (*whose != Concerned::Everybody, rank);
    networks.sort_by_key(|(rank, whose, network)| (place(*rank, whose), network.prefix_len()));
    networks.truncate(CLUSTER_NETWORKS_MAX);
    let mut limited = PodNetworks::new();
    for (_, concerned, network) in networks {
        limited.entry(concerned).or_default().insert(network);
    }
    limited
}

fn contain(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

/// The networks outside of which [`embedded`] finds nothing.
const TRANSLATING: [Ipv6Net; 3] = [
    Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 64),
    Ipv6Net::new_assert(Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 32),
    Ipv6Net::new_assert(Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
];

/// The IPv4 addresses that an IPv6 address may stand for, without an option.
fn embedded(address: Ipv6Addr) -> Vec<Ipv4Addr> {
    let octets = address.octets();
    let at = |place: [usize; 4]| Ipv4Addr::from(place.map(|index| octets[index]));
    match octets {
        // ::/96, IPv4-compatible, and ::ffff:0:0/96, IPv4-mapped (RFC 4291, section 2.5.5).
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ..]
        | [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, ..] => {
            vec![at([12, 13, 14, 15])]
        }
        // ::ffff:0:0:0/96, IPv4-translated (RFC 2765, section 2.1).
        [0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, ..] => vec![at([12, 13, 14, 15])],
        // 64:ff9b::/96, NAT64's well-known prefix (RFC 6052, section 2.1).
        [0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0, ..] => vec![at([12, 13, 14, 15])],
        // 64:ff9b:1::/48, for NAT64 with a prefix of the network's own (RFC 8215): where the
        // address stands depends on the prefix's length (RFC 6052, section 2.2). A place that is
        // not the right one mostly reads as 0.x, which leads nowhere in any case.
        [0, 0x64, 0xff, 0x9b, 0, 1, ..] => [
            [6, 7, 9, 10],
            [7, 9, 10, 11],
            [9, 10, 11, 12],
            [12, 13, 14, 15],
        ]
        .map(at)
        .into_iter()
        .filter(|inner| inner.octets()[0] != 0)
        .collect(),
        // 2002::/16, 6to4 (RFC 3056, section 2).
        [0x20, 0x02, ..] => vec![at([2, 3, 4, 5])],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
