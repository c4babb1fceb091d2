//! Which answers are trusted: a trusted resolver sends them, and they answer a question that the pod
//! asked from one of its own addresses.

use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::{bpf_ktime_get_ns, bpf_skb_load_bytes},
};
use dnsflow_common::{
    Reason, bound,
    key::{PENDING_AGE_MAX_NS, PENDING_WAYS, Pending, Query, ResolverKey, SlotKey, SourceKey},
    question::{BUFFER_LEN, Names, QUESTION_MAX, Question, question},
    walk::{DNS_LEN, MAC_DST_AT, MAC_SRC_AT, Reader as _, Version},
};

use crate::{filter, found::Found, maps, skb::Frame};

/// Checks that the packet comes from a trusted resolver.
#[inline(always)]
pub fn from_resolver(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    trusted(ResolverKey::source(frame, found.ip(), found.src_port))
}

/// Checks that the packet goes to a trusted resolver.
#[inline(always)]
pub fn to_resolver(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    trusted(ResolverKey::destination(frame, found.ip(), found.dst_port))
}

#[inline(always)]
fn trusted(key: Option<ResolverKey>) -> Result<(), Reason> {
    let key = key.ok_or(Reason::CopyFailed)?;
    match maps::RESOLVERS.get_ptr(&key) {
        Some(_) => Ok(()),
        None => Err(Reason::UntrustedResolver),
    }
}

/// Checks that the packet comes from a MAC and an IP address of the pod's port.
#[inline(always)]
pub fn from_own_address(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    let key = SourceKey::source(frame, frame.ifindex(), found.ip());
    own(frame, key, MAC_SRC_AT)
}

/// Checks that the packet goes to a MAC and an IP address of the pod's port.
#[inline(always)]
pub fn to_own_address(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    let key = SourceKey::destination(frame, frame.ifindex(), found.ip());
    own(frame, key, MAC_DST_AT)
}

#[inline(always)]
fn own(frame: &Frame<'_>, key: Option<SourceKey>, mac_at: u32) -> Result<(), Reason> {
    let key = key.ok_or(Reason::CopyFailed)?;
    // SAFETY: the value is bytes, and each value of a byte is valid. If the agent removes or replaces it meanwhile, it
    // may be that of another port (`maps`): one packet is then judged by the MAC address of that port.
    let Some(known) = (unsafe { maps::SOURCES.get(&key) }) else {
        return Err(Reason::ForeignAddress);
    };
    let known = u64::from_ne_bytes(*known);
    let Some([a, b, c, d, e, f]) = frame.read::<6>(mac_at) else {
        return Err(Reason::CopyFailed);
    };
    match known == 0 || known == u64::from_ne_bytes([a, b, c, d, e, f, 0, 0]) {
        true => Ok(()),
        false => Err(Reason::ForeignAddress),
    }
}

/// Remembers a query of the pod. The answer to the query counts later.
#[inline(always)]
pub fn remember(frame: &Frame<'_>, found: &Found) -> Result<Reason, Reason> {
    let question = read(frame, found, &filter::Nothing)?;
    let ports = (found.src_port, found.dst_port);
    let id = id(frame, found)?;
    let Some(query) = Query::sent(frame, found.ip(), ports, id) else {
        return Err(Reason::CopyFailed);
    };
    let pending = Pending {
        query,
        question: question.hash,
        asked_at_ns: now_ns(),
    };
    let (slot, flags, reason) = slot_for(frame.ifindex(), &pending);
    if maps::PENDING.insert(&slot, &pending, flags).is_ok() {
        return Ok(reason);
    }
    // A query that another CPU sees has taken the free slot meanwhile.
    let (slot, _, reason) = slot_for(frame.ifindex(), &pending);
    match maps::PENDING.insert(&slot, &pending, ANY) {
        Ok(()) => Ok(reason),
        Err(_) => Err(Reason::QueryLost),
    }
}

/// `BPF_ANY` and `BPF_NOEXIST` (Linux `include/uapi/linux/bpf.h`): whatever is there, and only if nothing is.
const ANY: u64 = 0;
const NOTHING_THERE: u64 = 1;

/// The slot for a query, and the flags for the write. A query takes the first slot of its set that is free or has the
/// same query, else the slot of the oldest query.
///
/// The content of a slot may be another query's, also of another interface (`maps`). The slot itself is one of this
/// interface all the same. So at worst a query of the same pod is replaced that was not the oldest.
#[inline(always)]
fn slot_for(ifindex: u32, pending: &Pending) -> (SlotKey, u64, Reason) {
    let mut key = SlotKey {
        ifindex,
        slot: pending.query.set(),
    };
    let mut best = key.slot;
    let mut oldest = u64::MAX;
    for _ in 0..PENDING_WAYS {
        // SAFETY: its fields are words, and each value of a word is valid.
        let Some(other) = (unsafe { maps::PENDING.get(&key) }) else {
            return (key, NOTHING_THERE, Reason::QueryRecorded);
        };
        if other.query.is(&pending.query) {
            return (key, ANY, Reason::QueryRecorded);
        }
        if other.asked_at_ns < oldest {
            oldest = other.asked_at_ns;
            best = key.slot;
        }
        key.slot += 1;
    }
    key.slot = best;
    match pending.asked_at_ns.wrapping_sub(oldest) <= PENDING_AGE_MAX_NS {
        true => (key, ANY, Reason::QueryDisplaced),
        false => (key, ANY, Reason::QueryRecorded),
    }
}

/// The transaction id.
#[inline(always)]
pub fn id(frame: &Frame<'_>, found: &Found) -> Result<u16, Reason> {
    match frame.read(found.message) {
        Some(id) => Ok(u16::from_be_bytes(id)),
        None => Err(Reason::TruncatedDns),
    }
}

/// Whether the program saw the pod's question.
#[derive(Clone, Copy, Eq, PartialEq)]
pub enum Asked {
    /// The program saw the question. The answer has used up the remembered query.
    Seen,
    /// The pod may have asked before the program was attached, or the question is in a TCP segment,
    /// which the agent reads.
    Perhaps,
}

/// Judges an answer of a trusted resolver, and uses up the query that it belongs to.
#[inline(always)]
pub fn answer(frame: &Frame<'_>, found: &Found) -> Result<Asked, Reason> {
    // The question is read before the query is looked up, although some answers belong to no query. The
    // verifier walks through this code once for each state that it knows here, and here it knows fewer.
    let question = read(
        frame,
        found,
        &filter::Mentioned::by_rules_for(frame.ifindex()),
    )?;
    let ports = (found.src_port, found.dst_port);
    let id = id(frame, found)?;
    let Some(query) = Query::answered(frame, found.ip(), ports, id) else {
        return Err(Reason::CopyFailed);
    };
    let Some((slot, asked, asked_at_ns)) = find(frame.ifindex(), &query) else {
        may_be_unasked(frame, found)?;
        return mentioned(&question).map(|()| Asked::Perhaps);
    };
    if asked != question.hash {
        return Err(Reason::OtherQuestion);
    }
    // Two CPUs may see two copies of an answer at once. One of them finds the entry to remove.
    if maps::PENDING.remove(&slot).is_err() {
        return Err(Reason::NotAsked);
    }
    if now_ns().wrapping_sub(asked_at_ns) > PENDING_AGE_MAX_NS {
        return Err(Reason::TooOld);
    }
    mentioned(&question).map(|()| Asked::Seen)
}

/// The slot of a query, the hash of its question, and the time of the question.
///
/// The content of a slot may be another query's, also of another interface, or some words of each (`maps`). So the
/// query is compared whole, with the addresses of pod and resolver. A removal looks for the slot once more, and this
/// slot is one of this interface: no query of another pod is used up. An answer could count in error only if it has
/// addresses, ports and id of one query and the question of the other. A trusted resolver would have to send it.
#[inline(always)]
fn find(ifindex: u32, query: &Query) -> Option<(SlotKey, u64, u64)> {
    let mut key = SlotKey {
        ifindex,
        slot: query.set(),
    };
    for _ in 0..PENDING_WAYS {
        // SAFETY: its fields are words, and each value of a word is valid.
        if let Some(pending) = unsafe { maps::PENDING.get(&key) }
            && pending.query.is(query)
        {
            return Some((key, pending.question, pending.asked_at_ns));
        }
        key.slot += 1;
    }
    None
}

/// Checks whether the pod may have asked before the program could see the question.
#[inline(always)]
fn may_be_unasked(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    // SAFETY: the value is one word, of this key or of another one (`maps`).
    match unsafe { maps::UNASKED_UNTIL.get(&frame.ifindex()) } {
        // Nobody saw the address that the pod asked from, but the answer goes to that address.
        Some(until_ns) if now_ns() < *until_ns => to_own_address(frame, found),
        _ => Err(Reason::NotAsked),
    }
}

#[inline(always)]
fn mentioned(question: &Question) -> Result<(), Reason> {
    match question.mentioned {
        true => Ok(()),
        false => Err(Reason::NoRule),
    }
}

#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper takes nothing.
    unsafe { bpf_ktime_get_ns() }
}

/// Whether the question that was read last is for the addresses that a pod of this IP version needs: A (RFC 1035, section
/// 3.2.2), or AAAA (RFC 3596).
#[inline(always)]
pub fn is_for_addresses(version: Version) -> bool {
    let kind = match version {
        Version::V4 => 1,
        Version::V6 => 28,
    };
    match maps::QUESTION.get_ptr(0) {
        // SAFETY: as in `read`.
        Some(buffer) => unsafe { (*buffer).may_be_of_type(kind) },
        None => false,
    }
}

/// Reads the question of the DNS message.
#[inline(always)]
fn read<N: Names>(frame: &Frame<'_>, found: &Found, names: &N) -> Result<Question, Reason> {
    let Some(buffer) = maps::QUESTION.get_ptr_mut(0) else {
        return Err(Reason::CopyFailed);
    };
    // SAFETY: `buffer` is this CPU's map value, which no other CPU uses (`maps`).
    let buffer = unsafe { &mut *buffer };
    let at = found.message + DNS_LEN;
    let len = found
        .message_len
        .saturating_sub(DNS_LEN)
        .min(frame.len().saturating_sub(at))
        .min(QUESTION_MAX);
    if len == 0 {
        return Err(Reason::TruncatedQuestion);
    }
    // SAFETY: the buffer has room for as many bytes as `length` can give.
    let error = unsafe {
        let to = buffer.bytes.as_mut_ptr().cast();
        bpf_skb_load_bytes(
            frame.ctx.as_ptr(),
            at,
            to,
            bound::length::<{ BUFFER_LEN as u32 - 1 }>(len),
        )
    };
    if error != 0 {
        return Err(Reason::CopyFailed);
    }
    question(buffer, len, names)
}
