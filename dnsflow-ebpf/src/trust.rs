//! Which answers are trusted: those of trusted resolvers, to what the pod asked.

use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::{bpf_ktime_get_ns, bpf_skb_load_bytes},
};
use dnsflow_common::{
    Reason, bound,
    key::{PENDING_AGE_MAX_NS, Pending, PendingKey, ResolverKey},
    question::{BUFFER_LEN, Names, QUESTION_MAX, Question, question},
    walk::{self, DNS_LEN, Reader as _},
};

use crate::{filter, found::Found, maps, skb::Frame};

/// Whether this comes from a trusted resolver.
#[inline(always)]
pub fn resolver(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    trusted(ResolverKey::source(frame, found.ip(), found.src_port))
}

#[inline(always)]
fn trusted(key: Option<ResolverKey>) -> Result<(), Reason> {
    let key = key.ok_or(Reason::CopyFailed)?;
    match maps::RESOLVERS.get_ptr(&key) {
        Some(_) => Ok(()),
        None => Err(Reason::UntrustedResolver),
    }
}

/// Remembers a pod's query.
#[inline(always)]
pub fn remember(frame: &Frame<'_>) -> Result<Reason, Reason> {
    let query = walk::to_server(frame, &maps::DnsPorts)?;
    let found = Found::message(&query).put_down()?;
    trusted(ResolverKey::destination(frame, found.ip(), found.dst_port))?;
    let question = read(frame, &found, &filter::Nothing)?;
    let ports = (found.src_port, found.dst_port);
    let id = id(frame, &found)?;
    let Some(key) = PendingKey::query(frame, frame.ifindex(), found.ip(), ports, id) else {
        return Err(Reason::CopyFailed);
    };
    let pending = Pending {
        question: question.hash,
        asked_at_ns: now_ns(),
    };
    match maps::PENDING.insert(&key, &pending, 0) {
        Ok(()) => Ok(Reason::QueryRecorded),
        Err(_) => Err(Reason::QueryLost),
    }
}

/// The transaction id.
#[inline(always)]
fn id(frame: &Frame<'_>, found: &Found) -> Result<u16, Reason> {
    match frame.read(found.message) {
        Some(id) => Ok(u16::from_be_bytes(id)),
        None => Err(Reason::TruncatedDns),
    }
}

/// Judges an answer of a trusted resolver, and uses up the query that it belongs to.
#[inline(always)]
pub fn answer(frame: &Frame<'_>, found: &Found) -> Result<(), Reason> {
    // Before the query is looked up, although some answers have none: a verifier goes through this
    // once for each thing that it knows by now.
    let question = read(
        frame,
        found,
        &filter::Mentioned::by_rules_for(frame.ifindex()),
    )?;
    let ports = (found.src_port, found.dst_port);
    let id = id(frame, found)?;
    let Some(key) = PendingKey::answer(frame, frame.ifindex(), found.ip(), ports, id) else {
        return Err(Reason::CopyFailed);
    };
    // SAFETY: an entry that is replaced meanwhile has the hash and the time of a query that the
    // pod sent, old or new.
    let Some(pending) = (unsafe { maps::PENDING.get(&key) }) else {
        return match may_be_unasked(frame) {
            true => mentioned(&question),
            false => Err(Reason::NotAsked),
        };
    };
    let asked_at_ns = pending.asked_at_ns;
    if pending.question != question.hash {
        return Err(Reason::OtherQuestion);
    }
    // Of two copies of an answer at once on two CPUs, one finds the entry to remove.
    if maps::PENDING.remove(&key).is_err() {
        return Err(Reason::NotAsked);
    }
    if now_ns().wrapping_sub(asked_at_ns) > PENDING_AGE_MAX_NS {
        return Err(Reason::TooOld);
    }
    mentioned(&question)
}

/// Whether the question may have been asked before it could be seen.
#[inline(always)]
fn may_be_unasked(frame: &Frame<'_>) -> bool {
    // SAFETY: the value is a number that is only ever replaced.
    match unsafe { maps::UNASKED_UNTIL.get(&frame.ifindex()) } {
        Some(until_ns) => now_ns() < *until_ns,
        None => false,
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

/// Reads the question of the DNS message.
#[inline(always)]
fn read<N: Names>(frame: &Frame<'_>, found: &Found, names: &N) -> Result<Question, Reason> {
    let Some(buffer) = maps::QUESTION.get_ptr_mut(0) else {
        return Err(Reason::CopyFailed);
    };
    // SAFETY: `buffer` is this CPU's map value, used by nothing else meanwhile.
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
