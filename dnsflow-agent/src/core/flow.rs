//! OpenFlow flows as dnsflow writes them: only the fields and actions that its rules need.
//!
//! The byte encoding lives in the `openflow` edge; this module is about identity. OVS keys a flow
//! by table, priority and match, and so does [`FlowKey`].

use std::{
    collections::BTreeMap,
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

/// Marks a flow as dnsflow's: the upper half of every [`Cookie`] ("DNSF" in ASCII).
///
/// OVN uses the first 32 bits of a UUID as cookie, so that its upper half is always zero
/// (`ofctrl_add_flow` in OVN's `controller/ofctrl.c`).
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

/// The transport protocols that an EgressFirewall rule can name.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Protocol {
    /// IP protocol 6.
    Tcp,
    /// IP protocol 17.
    Udp,
    /// IP protocol 132.
    Sctp,
}

/// A transport protocol, with or without a destination port.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Transport {
    /// The protocol.
    pub protocol: Protocol,
    /// The destination port; `None` for every port of the protocol.
    pub port: Option<u16>,
}

/// What a packet must look like. Together with table and priority it identifies a flow.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Match {
    /// The OVN datapath (`Datapath_Binding.tunnel_key`), in the `metadata` field; `None` where
    /// the bridge is not OVN's.
    pub metadata: Option<u64>,
    /// OVS register tests by register number (0 to 15), among them reg14, the logical input port.
    pub registers: BTreeMap<u8, Masked>,
    /// The OpenFlow input port, for bridges without OVN.
    pub in_port: Option<u32>,
    /// Source and destination address.
    pub addresses: Addresses,
    /// Protocol and port; `None` for every packet between the two addresses.
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
    /// `resubmit(,table)`.
    Resubmit {
        /// The table to continue in.
        table: u8,
    },
    /// The bytes of an action list copied from one of OVN's own flows, header and padding
    /// included, as they stood in the flow dump.
    Copied(Vec<u8>),
}

/// What identifies a flow in a bridge: OVS replaces a flow that has the same key.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FlowKey {
    /// The OpenFlow table.
    pub table: u8,
    /// The OpenFlow priority.
    pub priority: u16,
    /// The match.
    pub matches: Match,
}

/// What a flow does once it matches.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FlowBody {
    /// The owner's mark and the tag of the action list.
    pub cookie: Cookie,
    /// The switch removes the flow after this many seconds without renewal; 0 means never.
    pub hard_timeout_s: u16,
    /// What happens to the packet; empty means drop.
    pub actions: Vec<Action>,
}

/// One change to the flow tables.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FlowChange {
    /// Adds a flow, or replaces the one with the same key.
    Add(FlowKey, FlowBody),
    /// Removes exactly this flow, and only if it carries this cookie.
    Delete(FlowKey, Cookie),
    /// Restarts the hard timeout of every flow with the body's cookie (`OFPFC_MODIFY`).
    Renew(FlowBody),
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
    /// Its hard timeout in seconds; 0 means none.
    pub hard_timeout_s: u16,
}
