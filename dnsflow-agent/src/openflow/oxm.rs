//! Matches and actions as bytes.
//!
//! A match is written in the order and the form of Open vSwitch on OpenFlow 1.5 (`nx_put_raw` in
//! its `lib/nx-match.c`), so that both can be compared byte by byte: registers in pairs, as the
//! 64-bit packet registers of OXM class 0x8001. Other forms of registers are read as well.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use bytes::{BufMut, BytesMut};
use dnsflow_core::values::flow::{
    Action, Addresses, Ends, Masked, Match, Protocol, Sentinel, Tag, Transport,
};

use super::{
    ProtocolError,
    shards::{Family, Shard},
    wire::{MESSAGE_MAX, Reader},
};

/// Registers that Open vSwitch has (`FLOW_N_REGS` in its `include/openvswitch/flow.h`).
const REGISTERS: u8 = 16;
/// The longest action list: the rest of a message is for header and match.
const ACTIONS_MAX: usize = MESSAGE_MAX - 0xfff;
/// The bit of the mark of a connection that OVN has blocked: `ct_mark.blocked`
/// (`OVN_CT_BLOCKED_BIT` in OVN's include/ovn/logical-fields.h; bit 0 in 22.03 to 26.03).
pub const BLOCKED: u32 = 1;

/// Why a flow cannot be put into bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum EncodeError {
    #[error("there is no register {0}; Open vSwitch has 16")]
    NoSuchRegister(u8),
    #[error("copied actions of {0} bytes are not whole; an action's length is a multiple of 8")]
    PartialAction(usize),
    #[error("the action list is {0} bytes long; {ACTIONS_MAX} fit into a message")]
    TooLong(usize),
}

// OXM headers (section 7.2.3.2): class, field, mask flag, length of the payload.
const fn header(class: u16, field: u8, length: u8) -> u32 {
    (class as u32) << 16 | (field as u32) << 9 | length as u32
}

/// The flag in an OXM header that says that a mask follows the value.
const HAS_MASK: u32 = 0x100;

/// `OFPXMC_OPENFLOW_BASIC` (section 7.2.3.3).
const BASIC: u16 = 0x8000;
/// `OFPXMC_PACKET_REGS` (section 7.2.3.3): 64-bit registers; number n holds reg2n above reg2n+1.
const PACKET_REGS: u16 = 0x8001;
/// `NXM_NX` (`lib/nx-match.c` in Open vSwitch): 32-bit registers at field 0, 128-bit ones at 111.
const NXM_NX: u16 = 0x0001;
/// `NXM_NX_XXREG0` (`include/openvswitch/meta-flow.h` in Open vSwitch).
const XXREG0: u8 = 111;

// enum oxm_ofb_match_fields (section 7.2.3.7).
const IN_PORT: u32 = header(BASIC, 0, 4);
const METADATA: u32 = header(BASIC, 2, 8);
const ETH_TYPE: u32 = header(BASIC, 5, 2);
const IP_PROTO: u32 = header(BASIC, 10, 1);
const IPV4_SRC: u32 = header(BASIC, 11, 4);
const IPV4_DST: u32 = header(BASIC, 12, 4);
const TCP_DST: u32 = header(BASIC, 14, 2);
const UDP_DST: u32 = header(BASIC, 16, 2);
const SCTP_DST: u32 = header(BASIC, 18, 2);
const IPV6_SRC: u32 = header(BASIC, 26, 16);
const IPV6_DST: u32 = header(BASIC, 27, 16);
const TUNNEL_ID: u32 = header(BASIC, 38, 8);
const TUNNEL_ID_MASKED: u32 = masked(TUNNEL_ID);
/// `NXM_NX_PKT_MARK` (`include/openvswitch/meta-flow.h` in Open vSwitch).
const PKT_MARK: u32 = header(NXM_NX, 33, 4);
const PKT_MARK_MASKED: u32 = masked(PKT_MARK);
/// `NXM_NX_CT_STATE` (the same file), with a mask.
const CT_STATE_MASKED: u32 = masked(header(NXM_NX, 105, 4));
/// The connection's destination was translated (`CS_DST_NAT` in Open vSwitch's `include/openvswitch/packets.h`).
const CT_DST_NAT: u32 = 0x80;
/// Of a connection that is tracked, and has had a packet of either side (`CS_TRACKED`, `CS_ESTABLISHED`, likewise).
const CT_ESTABLISHED: u32 = 0x22;

// IEEE 802 numbers.
const ETH_IPV4: u16 = 0x0800;
const ETH_IPV6: u16 = 0x86dd;

/// `OFPMT_OXM` (section 7.2.3.1).
const OFPMT_OXM: u16 = 0x0001;
/// `OFPIT_APPLY_ACTIONS` (section 7.2.5).
pub(super) const OFPIT_APPLY_ACTIONS: u16 = 0x0004;
/// `OFPAT_SET_FIELD` (section 7.2.6).
const OFPAT_SET_FIELD: u16 = 0x0019;
/// `OFPAT_COPY_FIELD` (section 7.2.6).
const OFPAT_COPY_FIELD: u16 = 0x001c;
/// `OFPAT_EXPERIMENTER` (section 7.2.6).
const OFPAT_EXPERIMENTER: u16 = 0xffff;
/// `NX_VENDOR_ID` (`include/openflow/openflow-common.h` in Open vSwitch).
const NX_VENDOR_ID: u32 = 0x0000_2320;
/// `NXAST_RESUBMIT_TABLE` (`lib/ofp-actions.c` in Open vSwitch).
const NXAST_RESUBMIT_TABLE: u16 = 0x000e;
/// `NXAST_LEARN` (the same file).
const NXAST_LEARN: u16 = 0x0010;
/// `NXAST_CT` (the same file).
const NXAST_CT: u16 = 0x0023;
/// `NX_CT_F_COMMIT` (the same file).
const NX_CT_F_COMMIT: u16 = 1;
/// `NX_CT_RECIRC_NONE` (the same file): the packet is not looked up again.
const NX_CT_RECIRC_NONE: u8 = 0xff;
/// `NXM_NX_CT_MARK` (`include/openvswitch/meta-flow.h` in Open vSwitch).
const CT_MARK: u8 = 107;
/// `NX_LEARN_F_DELETE_LEARNED` (the same file).
const NX_LEARN_F_DELETE_LEARNED: u16 = 1 << 1;
/// `OFPP_IN_PORT` in the 16 bits of the Nicira extensions: the port of the packet.
const OFPP_IN_PORT: u16 = 0xfff8;

/// The OXM field of a protocol's destination port.
fn port_field(protocol: Protocol) -> u32 {
    match protocol {
        Protocol::Tcp => TCP_DST,
        Protocol::Udp => UDP_DST,
        Protocol::Sctp => SCTP_DST,
    }
}

/// Refuses a match that names a register that does not exist.
pub(super) fn check(matches: &Match) -> Result<(), EncodeError> {
    matches
        .registers
        .keys()
        .find(|&&register| register >= REGISTERS)
        .map_or(Ok(()), |&register| {
            Err(EncodeError::NoSuchRegister(register))
        })
}

/// Appends a match; `None` matches everything.
pub(super) fn put_match(output: &mut BytesMut, matches: Option<&Match>) {
    put_oxm(output, |output| {
        if let Some(matches) = matches {
            put_fields(output, matches);
        }
    });
}

/// Appends a match for these flows of ours.
pub(super) fn put_shard(output: &mut BytesMut, shard: Shard) {
    put_oxm(output, |output| match shard {
        Shard::All | Shard::Ends { .. } => {}
        Shard::Destinations { family, bits, mask } => {
            output.put_u32(ETH_TYPE);
            match family {
                Family::V4 => {
                    output.put_u16(ETH_IPV4);
                    output.put_u32(masked(IPV4_DST));
                    output.put_u32(bits.into());
                    output.put_u32(mask.into());
                }
                Family::V6 => {
                    output.put_u16(ETH_IPV6);
                    output.put_u32(masked(IPV6_DST));
                    output.put_u128(bits.into());
                    output.put_u128(mask.into());
                }
            }
        }
        Shard::Groups { bits, mask } => put_tag_bits(output, bits, mask),
        Shard::Untagged => put_tag_bits(output, 0, Tag::GUARD),
    });
}

/// The header of the same field with a mask behind the value (section 7.2.3.2); the length includes
/// the mask.
const fn masked(header: u32) -> u32 {
    let length = header & 0xff;
    (header | HAS_MASK) + length
}

/// Appends a `struct ofp_match` of these fields, with its padding (section 7.2.3.1).
fn put_oxm(output: &mut BytesMut, fields: impl FnOnce(&mut BytesMut)) {
    let start = output.len();
    output.put_u16(OFPMT_OXM);
    output.put_u16(0);
    fields(output);
    let length = output.len() - start;
    // A match of ours is at most 4 + 6 + 40 + 5 + 6 + 12 + 8 * 20 + 12 bytes long.
    let announced = u16::try_from(length).unwrap_or(u16::MAX);
    output[start + 2..start + 4].copy_from_slice(&announced.to_be_bytes());
    output.put_bytes(0, length.next_multiple_of(8) - length);
}

fn put_fields(output: &mut BytesMut, matches: &Match) {
    let Match {
        metadata,
        registers,
        ends,
        transport,
    } = matches;
    put_network(output, *ends);
    if let Some(Transport { protocol, port }) = transport {
        output.put_u32(IP_PROTO);
        output.put_u8(protocol.number());
        if let Some(port) = port {
            output.put_u32(port_field(*protocol));
            output.put_u16(*port);
        }
    }
    put_tag(output, *ends);
    put_registers(output, registers);
    match ends {
        Ends::Marked { bit } => put_mark(output, Masked::new(*bit, *bit)),
        Ends::Untranslated => put_state(output, 0, CT_DST_NAT),
        Ends::Established(_) => put_state(output, CT_ESTABLISHED, CT_ESTABLISHED),
        Ends::Addresses(_) | Ends::Tagged { .. } | Ends::AnyTag => {}
    }
    output.put_u32(METADATA);
    output.put_u64(*metadata);
}

/// Appends these bits of the state of a connection, with their mask.
fn put_state(output: &mut BytesMut, bits: u32, mask: u32) {
    output.put_u32(CT_STATE_MASKED);
    output.put_u32(bits);
    output.put_u32(mask);
}

/// Appends the EtherType and the addresses.
fn put_network(output: &mut BytesMut, ends: Ends) {
    let mut put_type = |eth_type| {
        output.put_u32(ETH_TYPE);
        output.put_u16(eth_type);
    };
    match ends {
        Ends::Addresses(Addresses::V4 { src, dst })
        | Ends::Established(Addresses::V4 { src, dst }) => {
            put_type(ETH_IPV4);
            output.put_u32(IPV4_SRC);
            output.put_slice(&src.octets());
            output.put_u32(IPV4_DST);
            output.put_slice(&dst.octets());
        }
        Ends::Addresses(Addresses::V6 { src, dst })
        | Ends::Established(Addresses::V6 { src, dst }) => {
            put_type(ETH_IPV6);
            output.put_u32(IPV6_SRC);
            output.put_slice(&src.octets());
            output.put_u32(IPV6_DST);
            output.put_slice(&dst.octets());
        }
        Ends::Tagged { is_ipv6: false, .. } => put_type(ETH_IPV4),
        Ends::Tagged { is_ipv6: true, .. } => put_type(ETH_IPV6),
        Ends::Untranslated | Ends::AnyTag | Ends::Marked { .. } => {}
    }
}

/// Appends the tunnel key.
fn put_tag(output: &mut BytesMut, ends: Ends) {
    let exactly = match ends {
        Ends::Addresses(_) | Ends::Established(_) | Ends::Untranslated => 0,
        Ends::Tagged { tag, .. } => tag.bits(),
        Ends::AnyTag => return put_tag_bits(output, Tag::GUARD, Tag::GUARD),
        Ends::Marked { .. } => return,
    };
    output.put_u32(TUNNEL_ID);
    output.put_u64(exactly.into());
}

/// Appends these bits of the tag, with their mask.
fn put_tag_bits(output: &mut BytesMut, bits: u32, mask: u32) {
    output.put_u32(TUNNEL_ID_MASKED);
    output.put_u64(bits.into());
    output.put_u64(mask.into());
}

/// Appends the bits of the mark, with their mask unless all bits count.
fn put_mark(output: &mut impl BufMut, mark: Masked) {
    if mark.mask() == u32::MAX {
        output.put_u32(PKT_MARK);
        output.put_u32(mark.value());
    } else {
        output.put_u32(PKT_MARK_MASKED);
        output.put_u32(mark.value());
        output.put_u32(mark.mask());
    }
}

fn put_registers(output: &mut BytesMut, registers: &BTreeMap<u8, Masked>) {
    let wide = |value: fn(Masked) -> u32, pair: u8| -> u64 {
        let word = |register| u64::from(registers.get(&register).copied().map_or(0, value));
        word(2 * pair) << 32 | word(2 * pair + 1)
    };
    for pair in 0..REGISTERS / 2 {
        let value = wide(Masked::value, pair);
        match wide(Masked::mask, pair) {
            0 => {}
            u64::MAX => {
                output.put_u32(header(PACKET_REGS, pair, 8));
                output.put_u64(value);
            }
            mask => {
                output.put_u32(header(PACKET_REGS, pair, 16) | HAS_MASK);
                output.put_u64(value);
                output.put_u64(mask);
            }
        }
    }
}

/// Reads a `struct ofp_match` with its padding. `None` if the match is well-formed but is not of a
/// flow of ours: it has a field that a [`Match`] cannot hold, or lacks one that every [`Match`]
/// has.
pub(super) fn read_match(reader: &mut Reader<'_>) -> Result<Option<Match>, ProtocolError> {
    const WHAT: &str = "match";
    let kind = reader.u16()?;
    let length = usize::from(reader.u16()?);
    let payload = length
        .checked_sub(4)
        .filter(|_| kind == OFPMT_OXM)
        .ok_or(ProtocolError::Malformed(WHAT))?;
    let mut list = reader.sub(WHAT, payload)?;
    reader.take(length.next_multiple_of(8) - length)?;
    let mut fields = Some(Fields::default());
    while !list.is_empty() {
        let header = list.u32()?;
        let value = list.take((header & 0xff) as usize)?;
        fields = fields.and_then(|fields| fields.with(header, value));
    }
    Ok(fields.and_then(Fields::finish))
}

/// The fields of a match as they are read, one by one.
#[derive(Default)]
struct Fields {
    metadata: Option<u64>,
    registers: BTreeMap<u8, Masked>,
    eth_type: Option<u16>,
    ip_proto: Option<u8>,
    port: Option<(u32, u16)>,
    v4: [Option<Ipv4Addr>; 2],
    v6: [Option<Ipv6Addr>; 2],
    tunnel: Option<Tunnel>,
    mark: Option<Masked>,
    state: Option<State>,
}

/// The state of a connection in a match.
enum State {
    Untranslated,
    Established,
}

/// The tunnel key in a match.
enum Tunnel {
    Zero,
    Tag(Tag),
    AnyTag,
}

impl Fields {
    /// Adds one field; `None` if a [`Match`] cannot hold it.
    fn with(mut self, header: u32, value: &[u8]) -> Option<Self> {
        match header {
            METADATA => self.metadata = Some(u64::from_be_bytes(value.try_into().ok()?)),
            ETH_TYPE => self.eth_type = Some(u16::from_be_bytes(value.try_into().ok()?)),
            IP_PROTO => self.ip_proto = value.first().copied(),
            IPV4_SRC => self.v4[0] = Some(<[u8; 4]>::try_from(value).ok()?.into()),
            IPV4_DST => self.v4[1] = Some(<[u8; 4]>::try_from(value).ok()?.into()),
            IPV6_SRC => self.v6[0] = Some(<[u8; 16]>::try_from(value).ok()?.into()),
            IPV6_DST => self.v6[1] = Some(<[u8; 16]>::try_from(value).ok()?.into()),
            TUNNEL_ID => {
                let key = u64::from_be_bytes(value.try_into().ok()?);
                self.tunnel = Some(match u32::try_from(key).ok()? {
                    0 => Tunnel::Zero,
                    bits => Tunnel::Tag(Tag::of_bits(bits)?),
                });
            }
            TUNNEL_ID_MASKED => {
                let guard = u64::from(Tag::GUARD).to_be_bytes();
                if value != [guard, guard].concat() {
                    return None;
                }
                self.tunnel = Some(Tunnel::AnyTag);
            }
            PKT_MARK | PKT_MARK_MASKED => {
                let (value, mask) = value.split_at_checked(4)?;
                let mask = match mask {
                    [] => u32::MAX,
                    mask => u32::from_be_bytes(mask.try_into().ok()?),
                };
                let value = u32::from_be_bytes(value.try_into().ok()?);
                self.mark = Some(Masked::new(value, mask));
            }
            CT_STATE_MASKED => {
                let (bits, mask) = value.split_first_chunk()?;
                let mask = mask.try_into().map(u32::from_be_bytes).ok()?;
                self.state = Some(match (u32::from_be_bytes(*bits), mask) {
                    (0, CT_DST_NAT) => State::Untranslated,
                    (CT_ESTABLISHED, CT_ESTABLISHED) => State::Established,
                    _ => return None,
                });
            }
            TCP_DST | UDP_DST | SCTP_DST => {
                self.port = Some((header, u16::from_be_bytes(value.try_into().ok()?)));
            }
            _ => self.add_registers(header, value)?,
        }
        Some(self)
    }

    /// Splits a register field of any width into 32-bit registers.
    fn add_registers(&mut self, header: u32, payload: &[u8]) -> Option<()> {
        let class = (header >> 16) as u16;
        let field = (header >> 9 & 0x7f) as u8;
        // The number of 32-bit registers in the field, and the field's index.
        let (words, index) = match (class, field) {
            (NXM_NX, 0..REGISTERS) => (1, field),
            (NXM_NX, XXREG0..=114) => (4, field - XXREG0),
            (PACKET_REGS, 0..8) => (2, field),
            _ => return None,
        };
        let (value, mask) = if header & HAS_MASK == 0 {
            (payload, None)
        } else {
            let (value, mask) = payload.split_at(payload.len() / 2);
            (value, Some(mask))
        };
        if value.len() != 4 * usize::from(words) {
            return None;
        }
        let word = |bytes: &[u8], at: u8| -> Option<u32> {
            let at = 4 * usize::from(at);
            Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
        };
        for at in 0..words {
            let mask = mask.map_or(Some(u32::MAX), |mask| word(mask, at))?;
            if mask != 0 {
                self.registers
                    .insert(index * words + at, Masked::new(word(value, at)?, mask));
            }
        }
        Some(())
    }

    /// Puts the fields together.
    fn finish(self) -> Option<Match> {
        const NO_V4: [Option<Ipv4Addr>; 2] = [None, None];
        const NO_V6: [Option<Ipv6Addr>; 2] = [None, None];
        let network = match (self.eth_type, self.v4, self.v6) {
            (None, NO_V4, NO_V6) => None,
            (Some(ETH_IPV4), v4, NO_V6) => Some((false, v4.map(|one| one.map(IpAddr::V4)))),
            (Some(ETH_IPV6), NO_V4, v6) => Some((true, v6.map(|one| one.map(IpAddr::V6)))),
            _ => return None,
        };
        let ends = match (network, self.tunnel, self.mark, self.state) {
            (Some((_, [Some(src), Some(dst)])), Some(Tunnel::Zero), None, state) => {
                let addresses = Addresses::between(src, dst)?;
                match state {
                    None => Ends::Addresses(addresses),
                    Some(State::Established) => Ends::Established(addresses),
                    Some(State::Untranslated) => return None,
                }
            }
            (Some((is_ipv6, [None, None])), Some(Tunnel::Tag(tag)), None, None) => {
                Ends::Tagged { tag, is_ipv6 }
            }
            (None, Some(Tunnel::Zero), None, Some(State::Untranslated)) => Ends::Untranslated,
            (None, Some(Tunnel::AnyTag), None, None) => Ends::AnyTag,
            (None, None, Some(mark), None)
                if mark.mask().is_power_of_two() && mark.value() == mark.mask() =>
            {
                Ends::Marked { bit: mark.mask() }
            }
            _ => return None,
        };
        let transport = match (self.ip_proto, self.port) {
            (None, None) => None,
            (None, Some(_)) => return None,
            (Some(_), _) if self.eth_type.is_none() => return None,
            (Some(number), port) => {
                let protocol = Protocol::of_number(number)?;
                let port = match port {
                    None => None,
                    Some((field, port)) if field == port_field(protocol) => Some(port),
                    Some(_) => return None,
                };
                Some(Transport { protocol, port })
            }
        };
        Some(Match {
            metadata: self.metadata?,
            registers: self.registers.into(),
            ends,
            transport,
        })
    }
}

/// The bytes of an action list (section 7.2.6).
pub(super) fn action_list(actions: &[Action]) -> Result<Vec<u8>, EncodeError> {
    let mut output = Vec::with_capacity(64);
    for action in actions {
        match action {
            Action::SetRegister { register, .. } if *register >= REGISTERS => {
                return Err(EncodeError::NoSuchRegister(*register));
            }
            Action::SetRegister { register, bits } => {
                put_set_register(&mut output, *register, *bits)
            }
            Action::SetMark(bits) => {
                output.put_u16(OFPAT_SET_FIELD);
                output.put_u16(16);
                put_mark(&mut output, *bits);
                output.resize(output.len().next_multiple_of(8), 0);
            }
            Action::SetTunnel(key) => {
                output.put_u16(OFPAT_SET_FIELD);
                output.put_u16(16);
                output.put_u32(TUNNEL_ID);
                output.put_u64((*key).into());
            }
            Action::MoveMark { mask } => put_move_mark(&mut output, *mask),
            Action::Resubmit { table } => {
                output.put_u16(OFPAT_EXPERIMENTER);
                output.put_u16(16);
                output.put_u32(NX_VENDOR_ID);
                output.put_u16(NXAST_RESUBMIT_TABLE);
                output.put_u16(OFPP_IN_PORT);
                output.put_u8(*table);
                output.put_bytes(0, 3);
            }
            Action::Copied(bytes) if !bytes.len().is_multiple_of(8) => {
                return Err(EncodeError::PartialAction(bytes.len()));
            }
            Action::Copied(bytes) => output.put_slice(bytes),
            Action::DeleteLearned(sentinel) => put_learn(&mut output, *sentinel),
        }
        if output.len() > ACTIONS_MAX {
            return Err(EncodeError::TooLong(output.len()));
        }
    }
    Ok(output)
}

/// `OFPAT_SET_FIELD`, with a mask unless it sets the whole register. Open vSwitch refuses
/// `NXAST_REG_LOAD` on OpenFlow 1.5.
fn put_set_register(output: &mut Vec<u8>, register: u8, bits: Masked) {
    output.put_u16(OFPAT_SET_FIELD);
    output.put_u16(16);
    if bits.mask() == u32::MAX {
        output.put_u32(header(NXM_NX, register, 4));
        output.put_u32(bits.value());
        output.put_bytes(0, 4);
    } else {
        output.put_u32(header(NXM_NX, register, 8) | HAS_MASK);
        output.put_u32(bits.value());
        output.put_u32(bits.mask());
    }
}

/// `struct ofp15_action_copy_field` (`lib/ofp-actions.c` of Open vSwitch), from these bits of the mark to the lowest of the
/// tunnel key.
fn put_move_mark(output: &mut Vec<u8>, mask: u32) {
    output.put_u16(OFPAT_COPY_FIELD);
    output.put_u16(24);
    // Each is at most 32.
    output.put_u16(mask.count_ones() as u16);
    output.put_u16(mask.trailing_zeros() as u16);
    output.put_u16(0); // the first bit of the tunnel key
    output.put_bytes(0, 2);
    output.put_u32(PKT_MARK);
    output.put_u32(TUNNEL_ID);
    output.put_bytes(0, 4);
}

/// `struct nx_action_learn` without anything to learn (`lib/ofp-actions.c` of Open vSwitch).
fn put_learn(output: &mut Vec<u8>, Sentinel { table, cookie }: Sentinel) {
    output.put_u16(OFPAT_EXPERIMENTER);
    output.put_u16(32);
    output.put_u32(NX_VENDOR_ID);
    output.put_u16(NXAST_LEARN);
    output.put_u16(0); // idle_timeout
    output.put_u16(0); // hard_timeout
    output.put_u16(0); // priority
    output.put_u64(cookie.bits());
    output.put_u16(NX_LEARN_F_DELETE_LEARNED);
    output.put_u8(table);
    output.put_u8(0);
    output.put_u16(0); // fin_idle_timeout
    output.put_u16(0); // fin_hard_timeout
}

/// A match of this port alone.
pub(super) fn put_in_port(output: &mut BytesMut, port: u32) {
    put_oxm(output, |fields| {
        fields.put_u32(IN_PORT);
        fields.put_u32(port);
    });
}

/// `ct(commit,zone=ZONE,exec(set_field:0/1->ct_mark))`: `struct nx_action_conntrack` (`lib/ofp-actions.c`
/// of Open vSwitch) with an `OFPAT_SET_FIELD` in it.
pub(super) fn unblock_actions(zone: u16) -> Vec<u8> {
    let mut output = Vec::with_capacity(40);
    output.put_u16(OFPAT_EXPERIMENTER);
    output.put_u16(40);
    output.put_u32(NX_VENDOR_ID);
    output.put_u16(NXAST_CT);
    output.put_u16(NX_CT_F_COMMIT);
    output.put_u32(0); // zone_src: the zone is given
    output.put_u16(zone);
    output.put_u8(NX_CT_RECIRC_NONE);
    output.put_bytes(0, 3);
    output.put_u16(0); // alg
    output.put_u16(OFPAT_SET_FIELD);
    output.put_u16(16);
    output.put_u32(header(NXM_NX, CT_MARK, 8) | HAS_MASK);
    output.put_u32(0);
    output.put_u32(BLOCKED);
    output
}

/// Appends the instruction with the actions. Without actions there is no instruction, and the flow
/// drops.
pub(super) fn put_apply_actions(output: &mut BytesMut, actions: &[u8]) {
    if actions.is_empty() {
        return;
    }
    output.put_u16(OFPIT_APPLY_ACTIONS);
    // `action_list` keeps it below `ACTIONS_MAX`.
    output.put_u16(u16::try_from(8 + actions.len()).unwrap_or(u16::MAX));
    output.put_bytes(0, 4);
    output.put_slice(actions);
}

#[cfg(test)]
mod tests;
