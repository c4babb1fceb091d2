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

/// The cookie of a dnsflow flow: [`COOKIE_MAGIC`] above. Below, a hash of the flow's action list, or of a flow that gives
/// packets a [`Tag`], the tag.
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

    /// The cookie of the flows that give packets this tag, and take these bits out of their mark: with other bits, their
    /// actions are others.
    pub const fn of_tag(tag: Tag, mask: Option<u32>) -> Self {
        let of_mask = match mask {
            // The highest bits of a product depend on all bits of the mask.
            Some(mask) => 1 + (mask.wrapping_mul(0x9e37_79b1) >> 26) % Self::MASKS,
            None => 0,
        };
        Self::new(Self::HAS_TAG | of_mask << Self::MASK_SHIFT | tag.bits() << 1)
    }

    /// The tag that flows with this cookie give packets, if they do.
    pub const fn tag(self) -> Option<Tag> {
        let low = self.0 as u32;
        match low & Self::HAS_TAG != 0 && low & 1 == 0 {
            true => Tag::of_bits(low >> 1 & ((1 << (Self::MASK_SHIFT - 1)) - 1)),
            false => None,
        }
    }

    /// The bit that tells the cookie of a tag from that of an action list.
    pub const HAS_TAG: u32 = 1 << 31;
    /// From this bit on, the cookie of a tag tells masks apart, as far as 63 numbers do.
    const MASK_SHIFT: u32 = 25;
    const MASKS: u32 = 63;

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

/// The tag of packets to the addresses of a group: the tunnel's key (`tun_id`), as long as a packet is in the pipeline
/// of its pod's logical switch.
///
/// OVN itself sets the lower 24 bits of the field before it puts a packet into a tunnel, and nothing above them
/// (`put_encapsulation` in its `controller/physical.c`). So a tag has 24 bits: 12 with the number of the group, 10 with
/// that of its scope, one that is zero, and one that every tag has.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Tag(u32);

impl Tag {
    /// The greatest number of a group.
    pub const NUMBER_MAX: u16 = (1 << Self::NUMBER_BITS) - 1;
    /// The greatest number of a scope.
    pub const SCOPE_MAX: u16 = (1 << Self::SCOPE_BITS) - 1;
    /// The bit that every tag has: no packet without a tag has it.
    pub const GUARD: u32 = 1 << 23;
    const NUMBER_BITS: u32 = 12;
    const SCOPE_BITS: u32 = 10;

    /// The tag of a group with this number in this scope. Further bits of the two do not count.
    pub const fn new(scope: u16, number: u16) -> Self {
        let scope = (scope & Self::SCOPE_MAX) as u32;
        let number = (number & Self::NUMBER_MAX) as u32;
        Self(Self::GUARD | scope << Self::NUMBER_BITS | number)
    }

    /// The tag with these bits, if they are those of one.
    pub const fn of_bits(bits: u32) -> Option<Self> {
        let tag = Self(bits);
        match Self::new(tag.scope(), tag.number()).0 == bits {
            true => Some(tag),
            false => None,
        }
    }

    /// The number of the scope.
    pub const fn scope(self) -> u16 {
        (self.0 >> Self::NUMBER_BITS) as u16 & Self::SCOPE_MAX
    }

    /// The number of the group; zero of a packet without a mark.
    pub const fn number(self) -> u16 {
        self.0 as u16 & Self::NUMBER_MAX
    }

    /// The bits of the field.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tag({:#x})", self.0)
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
    /// Without a tag, from one address to one address. The flow gives them the tag of the address's group.
    Addresses(Addresses),
    /// The same, where the packet is one of an established connection.
    Established(Addresses),
    /// With this tag: to the addresses of a group.
    Tagged {
        /// The tag.
        tag: Tag,
        /// Whether the packets are of IPv6, not of IPv4.
        is_ipv6: bool,
    },
    /// Without a tag, where the pod has sent them. The flow makes the tag of the mark, which says nothing about an address
    /// behind a load balancer: the program that marks saw the packet before.
    Untranslated,
    /// With any tag. The flow takes it away.
    AnyTag,
    /// With this bit in the mark. The flow takes the mark away.
    Marked {
        /// The bit.
        bit: u32,
    },
}

impl Ends {
    /// The pod's address, if the flow is for one.
    pub fn src(self) -> Option<IpAddr> {
        self.addresses().map(Addresses::src)
    }

    /// The address that the pod was told, if the flow is for one.
    pub fn dst(self) -> Option<IpAddr> {
        self.addresses().map(Addresses::dst)
    }

    /// Both addresses, if the flow is for two.
    pub fn addresses(self) -> Option<Addresses> {
        match self {
            Self::Addresses(addresses) | Self::Established(addresses) => Some(addresses),
            Self::Tagged { .. } | Self::Untranslated | Self::AnyTag | Self::Marked { .. } => None,
        }
    }
}

impl From<Addresses> for Ends {
    fn from(addresses: Addresses) -> Self {
        Self::Addresses(addresses)
    }
}

/// The part of the ends of a [`FlowTemplate`]'s flows that the template does not have.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Target {
    /// The address that the pod was told.
    Address(IpAddr),
    /// The tag of the group.
    Tag(Tag),
    /// None: the template has one flow.
    Whole,
}

impl From<IpAddr> for Target {
    fn from(address: IpAddr) -> Self {
        Self::Address(address)
    }
}

/// The part of the ends of a template's flows that it has.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Source {
    /// The pod's address: the flows give tags.
    Address(IpAddr),
    /// The same: the flows give tags to packets of established connections.
    Established(IpAddr),
    /// The IP version of tagged packets: the flows do what rules say.
    Tagged {
        /// Whether it is IPv6.
        is_ipv6: bool,
    },
    /// All: the template has one flow.
    Whole(Ends),
}

impl Source {
    fn of(ends: Ends) -> Self {
        match ends {
            Ends::Addresses(addresses) => Self::Address(addresses.src()),
            Ends::Established(addresses) => Self::Established(addresses.src()),
            Ends::Tagged { is_ipv6, .. } => Self::Tagged { is_ipv6 },
            Ends::Untranslated | Ends::AnyTag | Ends::Marked { .. } => Self::Whole(ends),
        }
    }

    /// The ends with this target; `None` if they do not belong together.
    fn with(self, target: Target) -> Option<Ends> {
        match (self, target) {
            (Self::Address(src), Target::Address(dst)) => {
                Addresses::between(src, dst).map(Ends::Addresses)
            }
            (Self::Established(src), Target::Address(dst)) => {
                Addresses::between(src, dst).map(Ends::Established)
            }
            (Self::Tagged { is_ipv6 }, Target::Tag(tag)) => Some(Ends::Tagged { tag, is_ipv6 }),
            (Self::Whole(ends), Target::Whole) => Some(ends),
            (Self::Address(_) | Self::Established(_) | Self::Tagged { .. } | Self::Whole(_), _) => {
                None
            }
        }
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
    /// `set_field` of the whole tunnel key: to a tag, or to zero.
    SetTunnel(u32),
    /// `move` of these bits of the packet's mark, which stand side by side, to the lowest bits of the tunnel key.
    MoveMark {
        /// The bits.
        mask: u32,
    },
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

/// A flow without its destination or its tag: the flow of a rule, for every group, or that of a port, for every address
/// that has one tag. A node has few templates, and many flows.
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
    /// The part of the ends that the template has.
    pub source: Source,
    /// As in [`Match`].
    pub transport: Option<Transport>,
    /// Whether the rule of the flow denies.
    pub denies: bool,
    /// The actions of the flow.
    pub body: FlowBody,
}

impl FlowTemplate {
    /// The flow's identity with this target; `None` if they do not belong together, as addresses of two families.
    pub fn key(&self, target: impl Into<Target>) -> Option<FlowKey> {
        Some(FlowKey {
            table: self.table,
            priority: self.priority,
            matches: Match {
                metadata: self.metadata,
                registers: Arc::clone(&self.registers),
                ends: self.source.with(target.into())?,
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

    /// Compares the keys of two templates' flows with one target.
    pub fn cmp_key(&self, other: &Self) -> Ordering {
        self.partial_key().cmp(&other.partial_key())
    }

    /// Compares the key of the template's flow with some target with a key with the same target.
    pub fn cmp_to(&self, key: &FlowKey) -> Ordering {
        let Match {
            metadata,
            registers,
            ends,
            transport,
        } = &key.matches;
        let key = (
            key.table,
            key.priority,
            *metadata,
            &**registers,
            Source::of(*ends),
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
            self.source,
            self.transport,
        )
    }
}

/// All fields of a [`FlowKey`] without its target.
type PartialKey<'a> = (
    u8,
    u16,
    u64,
    &'a BTreeMap<u8, Masked>,
    Source,
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
