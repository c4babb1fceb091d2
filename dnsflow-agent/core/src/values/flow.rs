//! OpenFlow flows as dnsflow writes them: only the fields and actions that its rules need.
//!
//! The `openflow` edge encodes flows to bytes; this module is about their identity. OVS identifies
//! a flow by table, priority and match, and so does [`FlowKey`].

pub mod text;

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

/// Marks a flow as dnsflow's: the upper half of every [`Cookie`] ("DNSF" in ASCII).
///
/// OVN uses the first 32 bits of a UUID as cookie. The upper half of OVN's cookies is therefore
/// always zero (`ofctrl_add_flow` in OVN's `controller/ofctrl.c`).
pub const COOKIE_MAGIC: u32 = 0x444e_5346;

/// The cookie of a dnsflow flow: [`COOKIE_MAGIC`] above, a tag of the flow's action list below.
///
/// Renewing flows by cookie rewrites their actions, so one cookie stands for one action list.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Cookie(u64);

impl Cookie {
    /// The mask that, together with [`Cookie::OURS`], selects every dnsflow flow.
    pub const OURS_MASK: u64 = 0xffff_ffff_0000_0000;
    /// The value to compare under [`Cookie::OURS_MASK`].
    pub const OURS: u64 = (COOKIE_MAGIC as u64) << 32;

    /// The cookie with this tag in its lower half.
    pub const fn new(tag: u32) -> Self {
        Self(Self::OURS | tag as u64)
    }

    /// Reads a cookie found in the switch; `None` when the flow is not dnsflow's.
    pub const fn from_switch(cookie: u64) -> Option<Self> {
        if cookie & Self::OURS_MASK == Self::OURS {
            Some(Self(cookie))
        } else {
            None
        }
    }

    /// Whether this is the cookie of a [`Sentinel`]: its last bit is set.
    pub const fn is_of_sentinel(self) -> bool {
        self.0 & 1 == 1
    }

    /// The 64 bits as OpenFlow carries them.
    pub const fn bits(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Cookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cookie({:#018x})", self.0)
    }
}

/// A 32-bit value under a mask, as a register test or a register load. Bits outside the mask
/// are zero in the value.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Masked {
    value: u32,
    mask: u32,
}

impl Masked {
    /// `value` under `mask`; bits of `value` outside `mask` are dropped.
    pub const fn new(value: u32, mask: u32) -> Self {
        Self {
            value: value & mask,
            mask,
        }
    }

    /// The value; bits outside the mask are zero.
    pub const fn value(self) -> u32 {
        self.value
    }

    /// The mask.
    pub const fn mask(self) -> u32 {
        self.mask
    }
}

/// Tests of registers, by their numbers.
pub type Registers = BTreeMap<u8, Masked>;

/// Source and destination address of one family.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Addresses {
    /// `eth_type` 0x0800.
    V4 {
        /// The pod's address.
        src: Ipv4Addr,
        /// The address that the pod was told.
        dst: Ipv4Addr,
    },
    /// `eth_type` 0x86dd.
    V6 {
        /// The pod's address.
        src: Ipv6Addr,
        /// The address that the pod was told.
        dst: Ipv6Addr,
    },
}

impl Addresses {
    /// From `src` to `dst`; `None` if they are not of one family.
    pub fn between(src: IpAddr, dst: IpAddr) -> Option<Self> {
        match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Some(Self::V4 { src, dst }),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Some(Self::V6 { src, dst }),
            _ => None,
        }
    }

    /// The pod's address.
    pub fn src(self) -> IpAddr {
        match self {
            Self::V4 { src, .. } => src.into(),
            Self::V6 { src, .. } => src.into(),
        }
    }

    /// The address that the pod was told.
    pub fn dst(self) -> IpAddr {
        match self {
            Self::V4 { dst, .. } => dst.into(),
            Self::V6 { dst, .. } => dst.into(),
        }
    }
}

/// Whose packets a flow is for, and where they go.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Ends {
    /// From one address to one address.
    Addresses(Addresses),
    /// From one address, with these bits in the mark: to the addresses of a group.
    Group {
        /// The pod's address.
        src: IpAddr,
        /// The bits of the packet's mark.
        mark: Masked,
        /// Whether only packets are meant that go where the pod has sent them. A load balancer sends a packet elsewhere
        /// behind the program that marks; the mark says nothing about that address.
        is_untranslated: bool,
    },
}

impl FlowKey {
    /// The traffic of the flow.
    pub fn traffic(&self) -> Traffic {
        (self.matches.ends.src(), self.matches.transport)
    }
}

impl Ends {
    /// The pod's address.
    pub fn src(self) -> IpAddr {
        match self {
            Self::Addresses(addresses) => addresses.src(),
            Self::Group { src, .. } => src,
        }
    }

    /// The address that the pod was told; `None` if the flow is for all addresses of a group.
    pub fn dst(self) -> Option<IpAddr> {
        match self {
            Self::Addresses(addresses) => Some(addresses.dst()),
            Self::Group { .. } => None,
        }
    }
}

impl From<Addresses> for Ends {
    fn from(addresses: Addresses) -> Self {
        Self::Addresses(addresses)
    }
}

/// The destination, or the mark in its place, of a flow of a [`FlowTemplate`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Target {
    /// The address.
    Address(IpAddr),
    /// The bits that the program on the pod's veth sets in the mark of packets to the addresses of a group.
    Group(Masked),
}

impl From<IpAddr> for Target {
    fn from(address: IpAddr) -> Self {
        Self::Address(address)
    }
}

/// The transport protocols that an EgressFirewall rule can name.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// IP protocol 6.
    Tcp = 6,
    /// IP protocol 17.
    Udp = 17,
    /// IP protocol 132.
    Sctp = 132,
}

impl Protocol {
    const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The number in an IP header.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The protocol of this number, if rules can name it.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.number() == number)
    }

    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    /// The protocol of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}

/// A transport protocol, with or without a destination port.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Transport {
    /// The protocol.
    pub protocol: Protocol,
    /// The destination port; `None` for every port of the protocol.
    pub port: Option<u16>,
}

impl Transport {
    /// Whether a rule with this protocol and port is for connections to another one.
    pub fn is_for(self, wanted: Self) -> bool {
        self.protocol == wanted.protocol && (self.port.is_none() || self.port == wanted.port)
    }
}

/// The traffic of a flow, whatever its destination: from this address of the pod, by this protocol and port, or by all.
pub type Traffic = (IpAddr, Option<Transport>);

/// The match of a flow. Together with table and priority it identifies the flow.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Match {
    /// The OVN datapath (`Datapath_Binding.tunnel_key`), in the `metadata` field.
    pub metadata: u64,
    /// OVS register tests by register number (0 to 15), among them reg14, the logical input port.
    pub registers: Arc<Registers>,
    /// Source, and destination or group.
    pub ends: Ends,
    /// Protocol and port; `None` for every packet between the two ends.
    pub transport: Option<Transport>,
}

/// One action of a flow. A flow with no actions drops the packet.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Action {
    /// `set_field` of some bits of a register.
    SetRegister {
        /// The register number, 0 to 15.
        register: u8,
        /// The bits and their value.
        bits: Masked,
    },
    /// `set_field` of some bits of the packet's mark.
    SetMark(Masked),
    /// `resubmit(,table)`.
    Resubmit {
        /// The table to continue in.
        table: u8,
    },
    /// The bytes of an action list copied from one of OVN's own flows, header and padding
    /// included, as they stood in the flow dump.
    Copied(Vec<u8>),
    /// `learn(…, delete_learned)` with nothing to learn: this makes a flow a [`Sentinel`].
    DeleteLearned(Sentinel),
}

/// A sentinel flow: when it goes, all flows with one cookie in one table go, too.
///
/// The flows that open addresses must not outlive the agent for long. If each had a hard timeout, ovs-vswitchd would
/// check each of them after every pass of its revalidators (`run` in its ofproto/ofproto-dpif.c). So only the
/// sentinel flow has a hard timeout, and no packet meets it. Its action is `learn` with `delete_learned`
/// (ovs-actions(7)) for a cookie and a table. When the last flow with this action is gone, Open vSwitch removes all
/// flows of the table with this cookie, whoever wrote them (`learned_cookies_flush` in its ofproto/ofproto.c).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Sentinel {
    /// The table.
    pub table: u8,
    /// The cookie of the flows that depend on it.
    pub cookie: Cookie,
}

impl Sentinel {
    /// The flow's identity. No datapath of OVN's has this `metadata`, and no host has this address.
    pub fn key(self) -> FlowKey {
        FlowKey {
            table: self.table,
            priority: 0,
            matches: Match {
                metadata: self.cookie.bits(),
                registers: Arc::default(),
                ends: Ends::Addresses(Addresses::V4 {
                    src: Ipv4Addr::BROADCAST,
                    dst: Ipv4Addr::BROADCAST,
                }),
                transport: None,
            },
        }
    }

    /// The actions of the flow.
    pub fn actions(self) -> Arc<[Action]> {
        Arc::new([Action::DeleteLearned(self)])
    }

    /// The sentinel flow that has this key, if the key is one of a sentinel flow.
    pub fn of(key: &FlowKey) -> Option<Self> {
        let cookie = Cookie::from_switch(key.matches.metadata)?;
        let sentinel = Self {
            table: key.table,
            cookie,
        };
        (*key == sentinel.key()).then_some(sentinel)
    }
}

/// The identity of a flow in a bridge: OVS replaces a flow that has the same key.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FlowKey {
    /// The OpenFlow table.
    pub table: u8,
    /// The OpenFlow priority.
    pub priority: u16,
    /// The match.
    pub matches: Match,
}

/// Cookie, timeout and actions of a flow.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct FlowBody {
    /// The cookie, made from the action list.
    pub cookie: Cookie,
    /// The switch removes the flow after this many seconds without renewal. 0 means never: the flow
    /// goes with its [`Sentinel`].
    pub hard_timeout_s: u16,
    /// The actions; none means drop.
    pub actions: Arc<[Action]>,
}

/// A flow without its destination: the flow of a rule and a port, for every address in the answers to the pod. A node
/// has few templates, and many flows.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct FlowTemplate {
    /// The OpenFlow table.
    pub table: u8,
    /// The OpenFlow priority.
    pub priority: u16,
    /// As in [`Match`].
    pub metadata: u64,
    /// As in [`Match`].
    pub registers: Arc<Registers>,
    /// The pod's address.
    pub src: IpAddr,
    /// As in [`Match`].
    pub transport: Option<Transport>,
    /// Whether the rule of the flow denies.
    pub denies: bool,
    /// The actions of the flow.
    pub body: FlowBody,
}

impl FlowTemplate {
    /// The flow's identity with this target; `None` if it is an address that is not of the pod's family.
    pub fn key(&self, target: impl Into<Target>) -> Option<FlowKey> {
        let src = self.src;
        let ends = match target.into() {
            Target::Address(dst) => Addresses::between(src, dst)?.into(),
            Target::Group(mark) => Ends::Group {
                src,
                mark,
                is_untranslated: !self.ends_marks(),
            },
        };
        Some(FlowKey {
            table: self.table,
            priority: self.priority,
            matches: Match {
                metadata: self.metadata,
                registers: Arc::clone(&self.registers),
                ends,
                transport: self.transport,
            },
        })
    }

    /// The change that adds or replaces the flow to this target; `None` as with [`FlowTemplate::key`].
    pub fn addition(&self, target: impl Into<Target>) -> Option<FlowChange> {
        Some(FlowChange::Add(self.key(target)?, self.body.clone()))
    }

    /// The change that removes the flow to this target; `None` as with [`FlowTemplate::key`].
    pub fn deletion(&self, target: impl Into<Target>) -> Option<FlowChange> {
        Some(FlowChange::Delete(
            self.key(target)?,
            Some(self.body.cookie),
        ))
    }

    /// Whether the marks of packets end in the flow. It needs the mark in its match: else it would lead back to itself.
    pub fn ends_marks(&self) -> bool {
        let table = self.table;
        matches!(self.body.actions[..], [Action::SetMark(_), Action::Resubmit { table: to }] if to == table)
    }

    /// The traffic of the flow.
    pub fn traffic(&self) -> Traffic {
        (self.src, self.transport)
    }

    /// The packets of its port that the flow is for, whatever its priority, if its destination is the same.
    pub fn packets(&self) -> (u8, Arc<Registers>, Traffic) {
        (self.table, Arc::clone(&self.registers), self.traffic())
    }

    /// Compares the keys of two templates' flows to one destination.
    pub fn cmp_key(&self, other: &Self) -> Ordering {
        self.partial_key().cmp(&other.partial_key())
    }

    /// Compares the key of the template's flow to some destination with a key to the same destination.
    pub fn cmp_to(&self, key: &FlowKey) -> Ordering {
        let Match {
            metadata,
            registers,
            ends,
            transport,
        } = &key.matches;
        let src = ends.src();
        let key = (
            key.table,
            key.priority,
            *metadata,
            &**registers,
            src,
            *transport,
        );
        self.partial_key().cmp(&key)
    }

    fn partial_key(&self) -> PartialKey<'_> {
        (
            self.table,
            self.priority,
            self.metadata,
            &self.registers,
            self.src,
            self.transport,
        )
    }
}

/// All fields of a [`FlowKey`] without the destination.
type PartialKey<'a> = (
    u8,
    u16,
    u64,
    &'a BTreeMap<u8, Masked>,
    IpAddr,
    Option<Transport>,
);

/// One change to the flow tables.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FlowChange {
    /// Adds a flow, or replaces the one with the same key.
    Add(FlowKey, FlowBody),
    /// Removes exactly this flow, and only if it carries this cookie; without one, any cookie of ours.
    Delete(FlowKey, Option<Cookie>),
    /// Restarts the hard timeout of every flow with the body's cookie (`OFPFC_MODIFY`).
    Renew(FlowBody),
}

impl FlowChange {
    /// The one flow that is changed; `None` for a change of many.
    pub fn key(&self) -> Option<&FlowKey> {
        match self {
            Self::Add(key, _) | Self::Delete(key, _) => Some(key),
            Self::Renew(_) => None,
        }
    }

    /// Whether this removes a flow. A sentinel flow does not count.
    pub fn ends_flow(&self) -> bool {
        match self {
            Self::Delete(_, cookie) => !cookie.is_some_and(Cookie::is_of_sentinel),
            Self::Add(..) | Self::Renew(_) => false,
        }
    }
}

/// A flow of ours as the switch reports it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct InstalledFlow {
    /// Its identity.
    pub key: FlowKey,
    /// Its cookie.
    pub cookie: Cookie,
    /// Packets that it has matched.
    pub packets: u64,
    /// Its hard timeout, in seconds; zero without one.
    pub hard_timeout_s: u16,
}
