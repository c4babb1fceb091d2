//! Opening the addresses of an answer without the agent.
//!
//! The agent says for a class of names which mark packets to their addresses get ([`Class`]). The flows that match this
//! mark are in force then. So the program only has to make the entries, and the answer need not wait.

use aya_ebpf::{EbpfContext as _, helpers::generated::bpf_skb_load_bytes};
use dnsflow_common::{
    Reason,
    bound::{self, Word},
    key::{Class, ClassKey, Entry, EntryKey, KeyedMark},
    opening::{MESSAGE_MAX, Message, RECORDS_MAX},
    record::{KIND_ANSWER, KIND_OPENED},
    walk::Reader as _,
};

use crate::{
    capture,
    found::{Found, Kind},
    hold, maps,
    skb::Frame,
    trust::now_ns,
};

/// What the program works on.
#[repr(C)]
pub struct Opening {
    message: Message,
    /// Whether the answer is held if it is left to the agent.
    holds: Word,
    /// The kind of its record.
    kind: Word,
    /// Where its class is, and the mark.
    place: Word,
    mark: Word,
    /// How many of its addresses have no entry.
    fresh: Word,
    /// The entries that were made, by their numbers.
    made: Word,
}

/// `BPF_NOEXIST` (Linux include/uapi/linux/bpf.h): only if there is nothing.
const NOTHING_THERE: u64 = 1;

/// What an insertion says of a key that is there (`EEXIST` in Linux include/uapi/asm-generic/errno-base.h).
const IS_THERE: i32 = -17;

/// Whether the addresses of this answer may be opened, as far as its headers say.
#[inline(always)]
pub fn may_open(frame: &Frame<'_>, found: &Found) -> bool {
    // SAFETY: the context is the kernel's.
    let gso_size = unsafe { (*frame.ctx.skb.skb).gso_size };
    maps::mark_mask() != 0
        && found.kind() == Kind::Message
        && !found.is_first_fragment()
        && !found.has_tag()
        && !frame.has_tag_outside()
        && gso_size == 0
}

/// Goes on with the program that opens, if there is one.
#[inline(always)]
pub fn go_on(frame: &Frame<'_>, holds: bool) -> Result<(), Reason> {
    opening()?.holds.set(holds.into());
    // SAFETY: nothing here is to be dropped.
    unsafe { maps::OPENERS.tail_call(frame.ctx, 0) }
    Ok(())
}

/// Opens the addresses of the answer, or leaves it to the agent. Says what became of the frame.
#[inline(always)]
pub fn open(frame: &Frame<'_>) -> Result<Reason, Reason> {
    let opening = opening()?;
    let kind = match opening.prepare(frame) {
        Some(()) => KIND_OPENED,
        None => {
            if opening.holds.get() != 0 {
                hold::go_on(frame);
            }
            KIND_ANSWER
        }
    };
    opening.kind.set(kind.into());
    let kind = opening.kind.get() as u16;
    // First the record: the agent knows of each entry.
    let now = now_ns();
    let reason = capture::capture(frame, kind, now);
    if kind != KIND_OPENED {
        return Ok(reason);
    }
    match reason {
        Reason::Opened => opening.make_entries(frame.ifindex(), now, reason),
        // Nobody reads the ring buffer.
        Reason::RingFull | Reason::OverShare if !hold::is_agent_well(now) => {
            opening.make_entries(frame.ifindex(), now, Reason::OpenedUntold)
        }
        _ => Err(reason),
    }
}

/// Where the class is.
#[inline(always)]
fn place_of(key: &ClassKey) -> Option<u32> {
    // SAFETY: the value is one word, of this key or of another one (`maps`).
    unsafe { maps::CLASS_PLACES.get(key) }.copied()
}

#[inline(always)]
fn opening() -> Result<&'static mut Opening, Reason> {
    let opening = maps::OPENING.get_ptr_mut(0).ok_or(Reason::CopyFailed)?;
    // SAFETY: the value is one that no other CPU uses (`maps`).
    Ok(unsafe { &mut *opening })
}

impl Opening {
    /// Reads the addresses, and finds the mark of the class. `None`: the answer is left to the agent.
    #[inline(always)]
    fn prepare(&mut self, frame: &Frame<'_>) -> Option<()> {
        self.read(frame)?;
        self.fresh.set(0);
        let mut number = 0;
        while number < RECORDS_MAX {
            if number >= self.message.count() {
                break;
            }
            if maps::is_refused(self.message.version(), self.message.address(number)) {
                return None;
            }
            let key = self.key(frame.ifindex(), number);
            number += 1;
            // What is read may be another address's (`maps`): then the agent decides.
            // SAFETY: the memory stays that of an element of this map, and its fields are words.
            match unsafe { maps::ENTRIES.get(&key) } {
                None => self.fresh.set(self.fresh.get() + 1),
                Some(entry) if entry.mark != KeyedMark::new(&key, self.mark.get()) => return None,
                Some(_) => {}
            }
        }
        let fresh = u64::from(self.fresh.get());
        (fresh == 0 || maps::may_make_entries(frame.ifindex(), fresh)).then_some(())
    }

    /// Reads the message, and finds its class.
    #[inline(always)]
    fn read(&mut self, frame: &Frame<'_>) -> Option<()> {
        // SAFETY: both are values that no other CPU uses (`maps`). The program before has written them for this frame.
        let (found, question) = unsafe {
            (
                &*maps::FOUND.get_ptr(0)?,
                &mut *maps::QUESTION.get_ptr_mut(0)?,
            )
        };
        let at = found.message;
        let len = found.message_len.min(frame.len().saturating_sub(at));
        if len == 0 || len > MESSAGE_MAX {
            return None;
        }
        // SAFETY: the buffer has room for as many bytes as `length` can give.
        let error = unsafe {
            bpf_skb_load_bytes(
                frame.ctx.as_ptr(),
                at,
                self.message.bytes_mut().as_mut_ptr().cast(),
                bound::length::<{ MESSAGE_MAX - 1 }>(len),
            )
        };
        if error != 0 {
            return None;
        }
        self.message.read(len, question.name_len())?;
        let base = question.base()?;
        let key = ClassKey::new(
            frame.ifindex(),
            base.hash,
            base.depth,
            self.message.version(),
        );
        let place = place_of(&key)?;
        self.place.set(place);
        let class: &Class = maps::CLASSES.get(place)?;
        let is_it = class.key.is(&key)
            && class.base_len == base.len
            && question.base_is(&class.base, &base);
        self.mark.set(class.mark);
        is_it.then_some(())
    }

    /// Makes the entries of all addresses, or none.
    #[inline(always)]
    fn make_entries(&mut self, ifindex: u32, now: u64, reason: Reason) -> Result<Reason, Reason> {
        let until_ns = now + maps::entry_time_ns(self.message.ttl());
        maps::count_entries(ifindex, self.fresh.get().into());
        self.made.set(0);
        let mut number = 0;
        while number < RECORDS_MAX {
            if number >= self.message.count() {
                break;
            }
            let key = self.key(ifindex, number);
            let entry = Entry::new(&key, self.mark.get(), until_ns);
            match maps::ENTRIES.insert(&key, &entry, NOTHING_THERE) {
                Ok(()) => self.made.set(self.made.get() | 1 << number),
                Err(IS_THERE) => self.move_end(&key, now, until_ns),
                Err(_) => {
                    self.take_back(ifindex);
                    return Err(Reason::EntriesFull);
                }
            }
            number += 1;
        }
        // An edit may have taken the class away since it was read. The agent may have read the record before the
        // entries were there.
        if !self.is_class(ifindex) {
            self.take_back(ifindex);
        }
        Ok(reason)
    }

    /// Whether the class is still the one that was found.
    #[inline(always)]
    fn is_class(&self, ifindex: u32) -> bool {
        // SAFETY: as in `read`.
        let question = maps::QUESTION
            .get_ptr(0)
            .map(|question| unsafe { &*question });
        let base = question.and_then(|question| question.base());
        let version = self.message.version();
        let place =
            base.and_then(|base| place_of(&ClassKey::new(ifindex, base.hash, base.depth, version)));
        place == Some(self.place.get())
    }

    /// Moves the end of an entry on. An agent that is well does so itself, but for an entry that has ended: the answer
    /// does not wait for the agent.
    ///
    /// Only the end is written, so that the agent's mark stays. If the agent replaces or removes the entry between the
    /// check of the key and the write, the write meets memory that is no longer this entry: nothing, or another entry
    /// (`maps`), whose end the agent knows.
    #[inline(always)]
    fn move_end(&self, key: &EntryKey, now: u64, until_ns: u64) {
        let Some(entry) = maps::ENTRIES.get_ptr_mut(key) else {
            return;
        };
        // SAFETY: the memory stays that of an element of this map. Its fields are words, and each is written at once.
        unsafe {
            let before_ns = (*entry).until_ns;
            let is_over = before_ns <= now || !hold::is_agent_well(now);
            let is_own = (*entry).mark == KeyedMark::new(key, self.mark.get());
            if is_over && is_own && before_ns < until_ns {
                (*entry).until_ns = until_ns;
            }
        }
    }

    /// Removes the entries that were made.
    #[inline(always)]
    fn take_back(&self, ifindex: u32) {
        let mut number = 0;
        while number < RECORDS_MAX {
            if self.made.get() & 1 << number != 0 {
                let _ = maps::ENTRIES.remove(&self.key(ifindex, number));
            }
            number += 1;
        }
    }

    #[inline(always)]
    fn key(&self, ifindex: u32, number: u32) -> EntryKey {
        EntryKey::told(
            ifindex,
            self.message.version(),
            self.message.address(number),
        )
    }
}
