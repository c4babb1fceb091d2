//! OpenFlow messages as bytes: framing, the requests that a [`Session`](super::Session) sends and
//! the replies that it reads.
//!
//! Section numbers are those of the OpenFlow Switch Specification 1.5.1 (ONF TS-025). Numbers in
//! messages are big-endian. Reading never panics and never trusts a length: what does not fit is
//! a [`ProtocolError`].

use bytes::{BufMut, Bytes, BytesMut};
use dnsflow_core::values::flow::{Action, Cookie, FlowChange, Match};

use super::{
    LostReason, ProtocolError,
    oxm::{self, EncodeError, OFPIT_APPLY_ACTIONS},
    shards::Shard,
};

/// `ofp_header.version` of OpenFlow 1.5 (section 7.1.1).
pub(super) const VERSION: u8 = 0x06;
/// Bytes of `struct ofp_header` (section 7.1.1).
pub(super) const HEADER_LEN: usize = 8;
/// The greatest value of the 16-bit `ofp_header.length`.
pub(super) const MESSAGE_MAX: usize = 0xffff;

// enum ofp_type (section 7.1.1).
pub(super) const OFPT_HELLO: u8 = 0x00;
pub(super) const OFPT_ERROR: u8 = 0x01;
pub(super) const OFPT_ECHO_REQUEST: u8 = 0x02;
pub(super) const OFPT_ECHO_REPLY: u8 = 0x03;
pub(super) const OFPT_PACKET_OUT: u8 = 0x0d;
pub(super) const OFPT_FLOW_MOD: u8 = 0x0e;
pub(super) const OFPT_MULTIPART_REQUEST: u8 = 0x12;
pub(super) const OFPT_MULTIPART_REPLY: u8 = 0x13;
pub(super) const OFPT_BARRIER_REQUEST: u8 = 0x14;
pub(super) const OFPT_BARRIER_REPLY: u8 = 0x15;
pub(super) const OFPT_BUNDLE_CONTROL: u8 = 0x21;
pub(super) const OFPT_BUNDLE_ADD_MESSAGE: u8 = 0x22;

// enum ofp_multipart_type (section 7.3.5).
pub(super) const OFPMP_FLOW_DESC: u16 = 0x0001;
pub(super) const OFPMP_AGGREGATE_STATS: u16 = 0x0002;
pub(super) const OFPMP_FLOW_MONITOR: u16 = 0x0010;
/// More replies follow (section 7.3.5).
const OFPMPF_REPLY_MORE: u16 = 0x0001;

// enum ofp_flow_mod_command (section 7.3.4.2).
const OFPFC_ADD: u8 = 0x00;
const OFPFC_MODIFY: u8 = 0x01;
const OFPFC_DELETE_STRICT: u8 = 0x04;

/// Wildcard for tables (section 7.3.4.2).
const OFPTT_ALL: u8 = 0xff;
/// No buffered packet (section 7.3.4.2).
const OFP_NO_BUFFER: u32 = 0xffff_ffff;
/// Wildcard for ports (section 7.2.1).
const OFPP_ANY: u32 = 0xffff_ffff;
/// Sent by a controller (section 7.2.1).
const OFPP_CONTROLLER: u32 = 0xffff_fffd;
/// Wildcard for groups (section 7.3.4.3).
const OFPG_ANY: u32 = 0xffff_ffff;

/// A bundle's decision (`enum ofp_bundle_ctrl_type`, section 7.3.9).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u16)]
pub(super) enum BundleControl {
    /// `OFPBCT_OPEN_REQUEST`
    Open = 0x0000,
    /// `OFPBCT_COMMIT_REQUEST`
    Commit = 0x0004,
    /// `OFPBCT_DISCARD_REQUEST`
    Discard = 0x0006,
}

/// `OFPBF_ATOMIC | OFPBF_ORDERED` (section 7.3.9): all or nothing, in the order added.
const BUNDLE_FLAGS: u16 = 0x0001 | 0x0002;

// enum ofp_flow_monitor_command (section 7.3.5).
const OFPFMC_ADD: u8 = 0x00;
const OFPFMC_DELETE: u8 = 0x02;

/// `OFPFMF_ADD | OFPFMF_REMOVED | OFPFMF_MODIFY` (section 7.3.5). Without `OFPFMF_INITIAL`: a dump
/// reports the flows. Without `OFPFMF_INSTRUCTIONS`: a cookie stands for the action list. Without
/// `OFPFMF_NO_ABBREV`, which Open vSwitch refuses: our own changes come as their xid alone.
const MONITOR_FLAGS: u16 = 0x0002 | 0x0004 | 0x0008;

// enum ofp_flow_update_event (section 7.3.5).
const OFPFME_INITIAL: u16 = 0x0000;
const OFPFME_ADDED: u16 = 0x0001;
const OFPFME_REMOVED: u16 = 0x0002;
const OFPFME_MODIFIED: u16 = 0x0003;
const OFPFME_ABBREV: u16 = 0x0004;
const OFPFME_PAUSED: u16 = 0x0005;
const OFPFME_RESUMED: u16 = 0x0006;

/// A message off the wire.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) version: u8,
    pub(super) kind: u8,
    pub(super) xid: u32,
    /// What follows the header.
    pub(super) body: Bytes,
}

impl Message {
    /// Takes the first message out of `input`; `None` if it is not complete yet.
    pub(super) fn split(input: &mut BytesMut) -> Result<Option<Self>, ProtocolError> {
        let Some(header) = input.first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        let [version, kind, l0, l1, x0, x1, x2, x3] = *header;
        let length = usize::from(u16::from_be_bytes([l0, l1]));
        if length < HEADER_LEN {
            return Err(ProtocolError::Malformed("header"));
        }
        if input.len() < length {
            return Ok(None);
        }
        let mut message = input.split_to(length).freeze();
        Ok(Some(Self {
            version,
            kind,
            xid: u32::from_be_bytes([x0, x1, x2, x3]),
            body: message.split_off(HEADER_LEN),
        }))
    }
}

/// Reads big-endian numbers. If the bytes end too early, the error names what was being read.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub(super) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { rest: bytes, what }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8], ProtocolError> {
        let (head, tail) = self
            .rest
            .split_at_checked(length)
            .ok_or(ProtocolError::Malformed(self.what))?;
        self.rest = tail;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        let (head, tail) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(ProtocolError::Malformed(self.what))?;
        self.rest = tail;
        Ok(*head)
    }

    pub(super) fn u8(&mut self) -> Result<u8, ProtocolError> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Result<u16, ProtocolError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, ProtocolError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, ProtocolError> {
        self.array().map(u64::from_be_bytes)
    }

    /// A reader of the next `length` bytes, which this one skips.
    pub(super) fn sub(&mut self, what: &'static str, length: usize) -> Result<Self, ProtocolError> {
        Ok(Self::new(what, self.take(length)?))
    }

    /// The next element of a list. Each element begins with its 16-bit length, which is at least
    /// `min`.
    fn element(&mut self, what: &'static str, min: usize) -> Result<Self, ProtocolError> {
        let length = usize::from(self.clone().u16()?);
        if length < min {
            return Err(ProtocolError::Malformed(what));
        }
        self.sub(what, length)
    }
}

/// Appends a message; `body` writes what follows the header.
fn put_message(output: &mut BytesMut, kind: u8, xid: u32, body: impl FnOnce(&mut BytesMut)) {
    let start = output.len();
    output.put_u8(VERSION);
    output.put_u8(kind);
    output.put_u16(0);
    output.put_u32(xid);
    body(output);
    // Only flow_mods vary much in length, and `oxm::action_list` bounds them.
    let length = u16::try_from(output.len() - start).unwrap_or(u16::MAX);
    output[start + 2..start + 4].copy_from_slice(&length.to_be_bytes());
}

/// `OFPT_HELLO` with the bitmap of the one version we speak (section 7.5.1).
pub(super) fn put_hello(output: &mut BytesMut, xid: u32) {
    put_message(output, OFPT_HELLO, xid, |body| {
        body.put_u16(OFPHET_VERSIONBITMAP);
        body.put_u16(8);
        body.put_u32(1 << VERSION);
    });
}

/// `ofp_hello_elem_header.type` of the version bitmap (section 7.5.1).
const OFPHET_VERSIONBITMAP: u16 = 0x0001;

/// Whether the sender of this `OFPT_HELLO` speaks OpenFlow 1.5 (section 6.3): by its bitmap, or,
/// without a bitmap, by the highest version in the header.
pub(super) fn hello_accepts(message: &Message) -> Result<bool, ProtocolError> {
    let mut elements = Reader::new("hello", &message.body);
    while !elements.is_empty() {
        let kind = elements.u16()?;
        let length = usize::from(elements.u16()?);
        let payload = length
            .checked_sub(4)
            .ok_or(ProtocolError::Malformed("hello"))?;
        let mut element = elements.sub("hello", payload)?;
        if kind == OFPHET_VERSIONBITMAP {
            return Ok(element.u32()? & (1 << VERSION) != 0);
        }
        // Elements are padded to eight bytes; their length does not include the padding.
        let padding = length.next_multiple_of(8) - length;
        elements.take(padding.min(elements.rest().len()))?;
    }
    Ok(message.version >= VERSION)
}

/// `OFPT_ECHO_REQUEST` or `OFPT_ECHO_REPLY` (sections 7.5.2 and 7.5.3).
pub(super) fn put_echo(output: &mut BytesMut, kind: u8, xid: u32, data: &[u8]) {
    put_message(output, kind, xid, |body| body.put_slice(data));
}

/// `OFPT_BARRIER_REQUEST` (section 7.3.7).
pub(super) fn put_barrier(output: &mut BytesMut, xid: u32) {
    put_message(output, OFPT_BARRIER_REQUEST, xid, |_| ());
}

/// `OFPT_PACKET_OUT` (section 7.3.6) of a packet that takes OVN's mark off its connection in this
/// conntrack zone, and goes nowhere.
pub(super) fn put_packet_out(output: &mut BytesMut, xid: u32, zone: u16, packet: &[u8]) {
    put_message(output, OFPT_PACKET_OUT, xid, |body| {
        let actions = oxm::unblock_actions(zone);
        body.put_u32(OFP_NO_BUFFER);
        body.put_u16(actions.len() as u16);
        body.put_bytes(0, 2);
        oxm::put_in_port(body, OFPP_CONTROLLER);
        body.put_slice(&actions);
        body.put_slice(packet);
    });
}

/// `OFPT_BUNDLE_CONTROL` (section 7.3.9).
pub(super) fn put_bundle_control(
    output: &mut BytesMut,
    xid: u32,
    bundle: u32,
    control: BundleControl,
) {
    put_message(output, OFPT_BUNDLE_CONTROL, xid, |body| {
        body.put_u32(bundle);
        body.put_u16(control as u16);
        body.put_u16(BUNDLE_FLAGS);
    });
}

/// `OFPT_BUNDLE_ADD_MESSAGE` with a flow_mod inside, both of the same xid (section 7.3.9).
pub(super) fn put_bundle_add(
    output: &mut BytesMut,
    xid: u32,
    bundle: u32,
    change: &FlowChange,
    table: u8,
) -> Result<(), EncodeError> {
    let flow_mod = FlowMod::new(change, table)?;
    put_message(output, OFPT_BUNDLE_ADD_MESSAGE, xid, |body| {
        body.put_u32(bundle);
        body.put_u16(0);
        body.put_u16(BUNDLE_FLAGS);
        flow_mod.put(body, xid);
    });
    Ok(())
}

/// `OFPT_FLOW_MOD` (section 7.3.4.2) for `change` in one table.
pub(super) fn put_flow_mod(
    output: &mut BytesMut,
    xid: u32,
    change: &FlowChange,
    table: u8,
) -> Result<(), EncodeError> {
    FlowMod::new(change, table)?.put(output, xid);
    Ok(())
}

/// All bits of the cookie but the last. With the whole cookie, Open vSwitch walks over every flow
/// that has the cookie, and thousands of ours have the same one. With any other mask, it looks the
/// flow up by its match (`collect_rules_strict` in its `ofproto/ofproto.c`), and then compares the
/// cookie.
const DELETE_COOKIE_MASK: u64 = !1;

/// The fields of `struct ofp_flow_mod` (section 7.3.4.2) in which our changes differ.
struct FlowMod<'a> {
    command: u8,
    table: u8,
    cookie: Cookie,
    cookie_mask: u64,
    hard_timeout_s: u16,
    priority: u16,
    matches: Option<&'a Match>,
    actions: Vec<u8>,
}

impl<'a> FlowMod<'a> {
    fn new(change: &'a FlowChange, table: u8) -> Result<Self, EncodeError> {
        let encode = |matches: Option<&Match>, actions: &[Action]| {
            matches.map_or(Ok(()), oxm::check)?;
            oxm::action_list(actions)
        };
        Ok(match change {
            FlowChange::Add(key, body) => Self {
                command: OFPFC_ADD,
                table,
                cookie: body.cookie,
                cookie_mask: 0,
                hard_timeout_s: body.hard_timeout_s,
                priority: key.priority,
                matches: Some(&key.matches),
                actions: encode(Some(&key.matches), &body.actions)?,
            },
            FlowChange::Delete(key, cookie) => Self {
                command: OFPFC_DELETE_STRICT,
                table,
                cookie: cookie.unwrap_or(Cookie::new(0)),
                cookie_mask: cookie.map_or(Cookie::OURS_MASK, |_| DELETE_COOKIE_MASK),
                hard_timeout_s: 0,
                priority: key.priority,
                matches: Some(&key.matches),
                actions: encode(Some(&key.matches), &[])?,
            },
            FlowChange::Renew(body) => Self {
                command: OFPFC_MODIFY,
                table,
                cookie: body.cookie,
                cookie_mask: u64::MAX,
                // A modification does not change a flow's timeouts, and restarts the hard timeout.
                hard_timeout_s: 0,
                priority: 0,
                matches: None,
                actions: encode(None, &body.actions)?,
            },
        })
    }

    fn put(&self, output: &mut BytesMut, xid: u32) {
        put_message(output, OFPT_FLOW_MOD, xid, |body| {
            body.put_u64(self.cookie.bits());
            body.put_u64(self.cookie_mask);
            body.put_u8(self.table);
            body.put_u8(self.command);
            body.put_u16(0); // idle_timeout
            body.put_u16(self.hard_timeout_s);
            body.put_u16(self.priority);
            body.put_u32(OFP_NO_BUFFER);
            body.put_u32(OFPP_ANY);
            body.put_u32(OFPG_ANY);
            // No flags. OFPFF_SEND_FLOW_REM would report to every controller, also to
            // ovn-controller, what the flow monitor reports to this client alone;
            // OFPFF_RESET_COUNTS would lose the counters.
            body.put_u16(0);
            body.put_u16(0); // importance
            oxm::put_match(body, self.matches);
            oxm::put_apply_actions(body, &self.actions);
        });
    }
}

/// `OFPMP_FLOW_DESC` (section 7.3.5), which describes flows with their counters.
pub(super) fn put_flow_desc_request(
    output: &mut BytesMut,
    xid: u32,
    cookie: u64,
    cookie_mask: u64,
    shard: Shard,
) {
    put_flows_request(output, xid, OFPMP_FLOW_DESC, (cookie, cookie_mask), shard);
}

/// `OFPMP_AGGREGATE_STATS` for every table (section 7.3.5): the sum of the counters of the flows
/// with exactly this cookie. Open vSwitch finds the flows by a hash of the cookie
/// (`collect_rules_loose` in its `ofproto/ofproto.c`).
pub(super) fn put_aggregate_request(output: &mut BytesMut, xid: u32, cookie: u64) {
    let cookie = (cookie, u64::MAX);
    put_flows_request(output, xid, OFPMP_AGGREGATE_STATS, cookie, Shard::All);
}

/// `struct ofp_flow_stats_request` and `struct ofp_aggregate_stats_request`, which are alike.
fn put_flows_request(
    output: &mut BytesMut,
    xid: u32,
    kind: u16,
    (cookie, cookie_mask): (u64, u64),
    shard: Shard,
) {
    put_multipart_request(output, xid, kind, |body| {
        body.put_u8(match shard {
            Shard::Ends { table } => table,
            _ => OFPTT_ALL,
        });
        body.put_bytes(0, 3);
        body.put_u32(OFPP_ANY);
        body.put_u32(OFPG_ANY);
        body.put_bytes(0, 4);
        body.put_u64(cookie);
        body.put_u64(cookie_mask);
        oxm::put_shard(body, shard);
    });
}

/// `OFPMP_FLOW_MONITOR` that begins (`watch`) or ends the monitor of one table (section
/// 7.3.5). The table's number is the monitor's identifier.
pub(super) fn put_flow_monitor_request(output: &mut BytesMut, xid: u32, table: u8, watch: bool) {
    put_multipart_request(output, xid, OFPMP_FLOW_MONITOR, |body| {
        body.put_u32(table.into());
        body.put_u32(OFPP_ANY);
        body.put_u32(OFPG_ANY);
        body.put_u16(MONITOR_FLAGS);
        body.put_u8(table);
        body.put_u8(if watch { OFPFMC_ADD } else { OFPFMC_DELETE });
        oxm::put_match(body, None);
    });
}

fn put_multipart_request(
    output: &mut BytesMut,
    xid: u32,
    kind: u16,
    request: impl FnOnce(&mut BytesMut),
) {
    put_message(output, OFPT_MULTIPART_REQUEST, xid, |body| {
        body.put_u16(kind);
        body.put_u16(0);
        body.put_bytes(0, 4);
        request(body);
    });
}

/// A part of a multipart reply.
#[derive(Clone, Debug)]
pub(super) struct MultipartReply<'a> {
    /// One of `OFPMP_*`.
    pub(super) kind: u16,
    /// Whether further parts follow.
    pub(super) more: bool,
    body: &'a [u8],
}

impl<'a> MultipartReply<'a> {
    /// Reads the fixed part (section 7.3.5).
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new("multipart reply", body);
        let kind = reader.u16()?;
        let flags = reader.u16()?;
        reader.take(4)?;
        Ok(Self {
            kind,
            more: flags & OFPMPF_REPLY_MORE != 0,
            body: reader.rest(),
        })
    }

    /// The entries of an `OFPMP_FLOW_DESC` reply.
    pub(super) fn flow_descs(&self) -> impl Iterator<Item = Result<FlowDesc<'a>, ProtocolError>> {
        entries(self.body, "flow description", FlowDesc::parse)
    }

    /// Reads an `OFPMP_AGGREGATE_STATS` reply (`struct ofp_aggregate_stats_reply`).
    pub(super) fn aggregate(&self) -> Result<Stats, ProtocolError> {
        Stats::parse(&mut Reader::new("aggregate statistics", self.body))
    }

    /// The entries of an `OFPMP_FLOW_MONITOR` reply.
    pub(super) fn flow_updates(&self) -> impl Iterator<Item = Result<FlowUpdate, ProtocolError>> {
        entries(self.body, "flow update", FlowUpdate::parse)
    }
}

/// Splits a list of entries that begin with their length. It ends at the first error.
fn entries<'a, T>(
    body: &'a [u8],
    what: &'static str,
    parse: impl Fn(&mut Reader<'a>) -> Result<T, ProtocolError>,
) -> impl Iterator<Item = Result<T, ProtocolError>> {
    let mut list = Reader::new(what, body);
    std::iter::from_fn(move || {
        if list.is_empty() {
            return None;
        }
        let entry = list
            .element(what, 4)
            .and_then(|mut entry| parse(&mut entry));
        if entry.is_err() {
            list = Reader::new(what, &[]);
        }
        Some(entry)
    })
}

/// A flow as `OFPMP_FLOW_DESC` describes it (`struct ofp_flow_desc`, section 7.3.5).
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct FlowDesc<'a> {
    pub(super) table: u8,
    pub(super) priority: u16,
    pub(super) cookie: u64,
    /// `None` if the match is not one of ours: it has a field that [`Match`] cannot hold.
    pub(super) matches: Option<Match>,
    pub(super) stats: Stats,
    pub(super) hard_timeout_s: u16,
    /// The actions of `OFPIT_APPLY_ACTIONS`; empty where there are none.
    pub(super) actions: &'a [u8],
}

impl<'a> FlowDesc<'a> {
    fn parse(entry: &mut Reader<'a>) -> Result<Self, ProtocolError> {
        entry.take(4)?; // length, padding
        let table = entry.u8()?;
        entry.u8()?;
        let priority = entry.u16()?;
        entry.u16()?; // idle_timeout
        let hard_timeout_s = entry.u16()?;
        entry.take(4)?; // flags, importance
        Ok(Self {
            table,
            priority,
            hard_timeout_s,
            cookie: entry.u64()?,
            matches: oxm::read_match(entry)?,
            stats: Stats::parse(entry)?,
            actions: applied_actions(entry)?,
        })
    }
}

/// Finds the actions among a flow's instructions (section 7.2.5), which come last.
fn applied_actions<'a>(entry: &mut Reader<'a>) -> Result<&'a [u8], ProtocolError> {
    const WHAT: &str = "instructions";
    while !entry.is_empty() {
        let kind = entry.u16()?;
        let length = usize::from(entry.u16()?);
        let body = length
            .checked_sub(4)
            .ok_or(ProtocolError::Malformed(WHAT))?;
        let mut instruction = entry.sub(WHAT, body)?;
        if kind == OFPIT_APPLY_ACTIONS {
            instruction.take(4)?; // padding
            return Ok(instruction.rest());
        }
    }
    Ok(&[])
}

/// `OXS_OF_FLOW_COUNT`: class 0x8002, field 3, four bytes (section 7.2.4).
const OXS_FLOW_COUNT: u32 = 0x8002_0604;
/// `OXS_OF_PACKET_COUNT`: class 0x8002, field 4, eight bytes (section 7.2.4).
const OXS_PACKET_COUNT: u32 = 0x8002_0808;

/// The counters in a `struct ofp_stats` (section 7.2.4); 0 for those that are missing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Stats {
    /// Only in an aggregate.
    pub(super) flows: u32,
    pub(super) packets: u64,
}

impl Stats {
    fn parse(entry: &mut Reader<'_>) -> Result<Self, ProtocolError> {
        const WHAT: &str = "flow statistics";
        entry.take(2)?;
        let length = usize::from(entry.u16()?);
        let payload = length
            .checked_sub(4)
            .ok_or(ProtocolError::Malformed(WHAT))?;
        let mut fields = entry.sub(WHAT, payload)?;
        entry.take(length.next_multiple_of(8) - length)?;
        let mut stats = Self::default();
        while !fields.is_empty() {
            let header = fields.u32()?;
            let mut value = fields.sub(WHAT, (header & 0xff) as usize)?;
            match header {
                OXS_FLOW_COUNT => stats.flows = value.u32()?,
                OXS_PACKET_COUNT => stats.packets = value.u64()?,
                _ => {}
            }
        }
        Ok(stats)
    }
}

/// What a flow monitor reports (section 7.3.5).
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum FlowUpdate {
    /// Someone else changed this flow.
    Changed {
        table: u8,
        priority: u16,
        cookie: u64,
        matches: Option<Match>,
        /// `OFPFME_REMOVED` or `OFPFME_MODIFIED`. Not for `OFPFME_ADDED`, also if a flow of the same key was replaced.
        lost: Option<LostReason>,
    },
    /// `OFPFME_ABBREV`: our own change. `OFPFME_INITIAL`: not asked for.
    Uninteresting,
    /// `OFPFME_PAUSED`: the client read too slowly; from here on, updates are left out.
    Paused,
    /// `OFPFME_RESUMED`: updates are complete again from here.
    Resumed,
}

impl FlowUpdate {
    fn parse(entry: &mut Reader<'_>) -> Result<Self, ProtocolError> {
        entry.take(2)?; // length
        let event = entry.u16()?;
        match event {
            OFPFME_ADDED | OFPFME_REMOVED | OFPFME_MODIFIED => {}
            OFPFME_PAUSED => return Ok(Self::Paused),
            OFPFME_RESUMED => return Ok(Self::Resumed),
            OFPFME_INITIAL | OFPFME_ABBREV => return Ok(Self::Uninteresting),
            _ => return Err(ProtocolError::Malformed("flow update")),
        }
        let table = entry.u8()?;
        let reason = entry.u8()?;
        entry.take(4)?; // idle_timeout, hard_timeout
        let priority = entry.u16()?;
        entry.take(4)?;
        let cookie = entry.u64()?;
        let matches = oxm::read_match(entry)?;
        let lost = match event {
            OFPFME_REMOVED => Some(LostReason::from_wire(reason)),
            OFPFME_MODIFIED => Some(LostReason::Modified),
            _ => None,
        };
        Ok(Self::Changed {
            table,
            priority,
            cookie,
            matches,
            lost,
        })
    }
}

impl LostReason {
    /// `enum ofp_flow_removed_reason` (section 7.4.2).
    fn from_wire(reason: u8) -> Self {
        match reason {
            0x00 => Self::IdleTimeout,
            0x01 => Self::HardTimeout,
            0x02 => Self::Deleted,
            0x05 => Self::Evicted,
            other => Self::Other(other),
        }
    }
}

#[cfg(test)]
mod tests;
