//! Addresses that are never opened, whatever a DNS answer says.
//!
//! A name's owner decides where the name leads. Without this list, whoever owns a name that a
//! firewall mentions could open the way into the node, its metadata service or the cluster itself
//! ("DNS rebinding"). An address is looked at in every form in which it reaches the same host:
//! plain, IPv4-mapped, behind a NAT64 or a 6to4 relay.

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{
    Timestamp,
    counter_vec::{CounterVec, Label as _, labels},
    limits::REFUSALS_REPORTED_MAX,
    name::DomainName,
    output::Output,
    ports::PortId,
    report::Report,
};

labels! {
    /// Why an address is never opened.
    Refused {
        /// 0.0.0.0/8 and ::, which systems take for themselves (RFC 1122, section 3.2.1.3;
        /// RFC 4291, section 2.5.2).
        Unspecified = "unspecified",
        /// 127.0.0.0/8 and ::1 (RFC 1122, section 3.2.1.3; RFC 4291, section 2.5.3).
        Loopback = "loopback",
        /// Where a cloud tells an instance its secrets.
        Metadata = "metadata",
        /// 169.254.0.0/16, fe80::/10 and what fec0::/10 was (RFC 3927; RFC 4291, section 2.5.6;
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

/// Where clouds serve metadata.
const METADATA: &[IpNet] = &[
    // Most of them: Amazon, Google, Azure, OpenStack.
    v4([169, 254, 169, 254], 32),
    // Amazon's link-local services over IPv6, metadata at fd00:ec2::254 among them.
    v6([0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0], 32),
    // Google over IPv6, fd20:ce::254.
    v6([0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254], 128),
    // Azure's "wire server".
    v4([168, 63, 129, 16], 32),
    // Alibaba.
    v4([100, 100, 100, 200], 32),
    // Oracle.
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

/// The most networks in one list: each answer's addresses are compared with all of them.
pub const NETWORKS_MAX: usize = 256;

/// What `--deny-answers` names.
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
    allowed: Vec<IpNet>,
    denied: Vec<IpNet>,
    private: bool,
    cluster: Vec<IpNet>,
    learned: Vec<IpNet>,
}

impl Refusals {
    /// Refuses what is always refused, the cluster's networks `cluster` beside
    /// [`OVN_KUBERNETES_NETWORKS`], and `denied`; but never what is in `allowed`.
    pub fn new(
        cluster: &[IpNet],
        denied: &[DeniedNetwork],
        allowed: &[IpNet],
    ) -> Result<Self, TooManyNetworks> {
        for count in [cluster.len(), denied.len(), allowed.len()] {
            if count > NETWORKS_MAX {
                return Err(TooManyNetworks(count));
            }
        }
        let networks = denied.iter().filter_map(|denied| match denied {
            DeniedNetwork::Network(network) => Some(*network),
            DeniedNetwork::Private => None,
        });
        Ok(Self {
            allowed: allowed.to_vec(),
            denied: networks.collect(),
            private: denied.contains(&DeniedNetwork::Private),
            cluster: [OVN_KUBERNETES_NETWORKS, cluster].concat(),
            learned: Vec::new(),
        })
    }

    /// Refuses these networks of the cluster, too, in place of those learned before. Returns
    /// whether that changes anything.
    pub fn learn(&mut self, networks: &[IpNet]) -> Result<bool, TooManyNetworks> {
        if networks.len() > NETWORKS_MAX {
            return Err(TooManyNetworks(networks.len()));
        }
        let changed = self.learned != networks;
        self.learned = networks.to_vec();
        Ok(changed)
    }

    /// Whether the address may be opened, or why not.
    pub fn check(&self, address: IpAddr) -> Result<(), Refused> {
        if self.allows(address) {
            return Ok(());
        }
        self.check_form(address)?;
        let IpAddr::V6(address) = address else {
            return Ok(());
        };
        for inner in embedded(address).into_iter().map(IpAddr::V4) {
            if !self.allows(inner) {
                self.check_form(inner)?;
            }
        }
        Ok(())
    }

    fn allows(&self, address: IpAddr) -> bool {
        contain(&self.allowed, address)
    }

    /// Checks one form of an address.
    fn check_form(&self, address: IpAddr) -> Result<(), Refused> {
        if contain(&self.denied, address) {
            return Err(Refused::Denied);
        }
        if contain(METADATA, address) {
            return Err(Refused::Metadata);
        }
        if contain(&self.cluster, address) || contain(&self.learned, address) {
            return Err(Refused::Cluster);
        }
        special(address)?;
        if self.private && contain(PRIVATE, address) {
            return Err(Refused::Private);
        }
        Ok(())
    }
}

/// The owner of what is never opened: takes it out of answers, counts it and reports it.
#[derive(Debug)]
pub(crate) struct RefusedAddresses {
    refusals: Refusals,
    counts: CounterVec<Refused>,
    /// By port, what was reported, so that each is reported once in a while only.
    reported: HashMap<PortId, BTreeSet<(DomainName, IpAddr)>>,
}

impl RefusedAddresses {
    /// Nothing was refused yet.
    pub(crate) fn new(refusals: Refusals) -> Self {
        Self {
            refusals,
            counts: CounterVec::default(),
            reported: HashMap::new(),
        }
    }

    /// Opens no address of these networks, which OVN knows to be the cluster's own.
    pub(crate) fn learn_networks(&mut self, mut networks: Vec<IpNet>, out: &mut Output) {
        let left_out = networks.len().saturating_sub(NETWORKS_MAX);
        // The largest first.
        networks.sort_by_key(IpNet::prefix_len);
        networks.truncate(NETWORKS_MAX);
        networks.sort_unstable();
        if let Ok(true) = self.refusals.learn(&networks) {
            out.report(Report::ClusterNetworks { networks, left_out });
        }
    }

    /// Takes the addresses out of an answer to `port` that are never opened. Each is counted, and
    /// reported if that is news and the pod has not led to too many reports.
    pub(crate) fn take_out(
        &mut self,
        id: PortId,
        port: &str,
        name: &DomainName,
        addresses: &mut Vec<(IpAddr, Duration)>,
        now: Timestamp,
        out: &mut Output,
    ) {
        addresses.retain(|(address, _)| match self.refusals.check(*address) {
            Ok(()) => true,
            Err(reason) => {
                self.refuse(id, port, Some(name), *address, reason, now, out);
                false
            }
        });
    }

    /// Counts and reports an address that is not opened.
    #[expect(clippy::too_many_arguments, reason = "they are the report")]
    fn refuse(
        &mut self,
        id: PortId,
        port: &str,
        name: Option<&DomainName>,
        address: IpAddr,
        reason: Refused,
        now: Timestamp,
        out: &mut Output,
    ) {
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
            out.report_of_pod(id, report, now);
        }
    }

    /// A port is gone.
    pub(crate) fn forget(&mut self, port: PortId) {
        self.reported.remove(&port);
    }

    /// Addresses that were not opened, by reason.
    pub(crate) fn counts(&self) -> &CounterVec<Refused> {
        &self.counts
    }

    /// How many ports there is a memory for, and how much there is at most for one.
    #[cfg(test)]
    pub(crate) fn remembered(&self) -> (usize, usize) {
        let most = self.reported.values().map(BTreeSet::len).max();
        (self.reported.len(), most.unwrap_or_default())
    }
}

fn contain(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

/// Addresses that name no host elsewhere.
fn special(address: IpAddr) -> Result<(), Refused> {
    let refused = match address {
        IpAddr::V4(address) => match address.octets() {
            [0, ..] => Refused::Unspecified,
            [127, ..] => Refused::Loopback,
            [169, 254, ..] => Refused::LinkLocal,
            [224..=239, ..] => Refused::Multicast,
            [255, 255, 255, 255] => Refused::Broadcast,
            [240..=255, ..] => Refused::Reserved,
            _ => return Ok(()),
        },
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Refused::Unspecified,
        IpAddr::V6(Ipv6Addr::LOCALHOST) => Refused::Loopback,
        IpAddr::V6(address) => match address.segments()[0] {
            0xff00..=0xffff => Refused::Multicast,
            0xfe80..=0xfeff => Refused::LinkLocal,
            _ => return Ok(()),
        },
    };
    Err(refused)
}

/// The IPv4 addresses that an IPv6 address may stand for.
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
