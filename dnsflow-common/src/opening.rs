//! The addresses of an answer, as the program reads them that opens them without the agent.
//!
//! The program opens what is certain and leaves the rest to the agent. So an answer is read only if its records are one
//! chain of CNAMEs in order and the addresses of the last name, and if each name stands there in one piece, or as a
//! pointer to one that does. What is read here, the agent reads alike.

use zerocopy::IntoBytes as _;

use crate::{
    bound::{Word, masked},
    key::Address,
    walk::Version,
};

/// The most records.
pub const RECORDS_MAX: u32 = 16;
/// The most CNAMEs among them.
pub const CNAMES_MAX: u32 = 7;
/// The longest message.
pub const MESSAGE_MAX: u32 = 1024;
const BYTE: u32 = MESSAGE_MAX - 1;
/// The words of the message, and what is behind it: a word may begin at each of its bytes.
const WORDS: usize = MESSAGE_MAX as usize / 8 + 1;
const WORD: u32 = MESSAGE_MAX / 8 - 1;

/// The longest name, with the root label, and the most labels.
const NAME_MAX: u32 = 128;
const LABELS_MAX: u32 = 32;
/// The longest label (RFC 1035, section 2.3.4).
const LABEL_MAX: u32 = 63;
/// The length of a header, and where its fields are (RFC 1035, section 4.1.1).
const HEADER_LEN: u32 = 12;
const FLAGS: u32 = 2;
const ANSWER_RECORDS: u32 = 6;
/// TC: the pod asks again over TCP.
const TRUNCATED: u32 = 0x0200;
/// Type and class behind a question's name (RFC 1035, section 4.1.2).
const TYPE_AND_CLASS_LEN: u32 = 4;
/// The bits of a pointer, in front of the place (RFC 1035, section 4.1.4), and its length.
const POINTER: u32 = 0xc000;
const POINTER_LEN: u32 = 2;
/// Where the fields of a record are behind its owner, and their length (RFC 1035, section 4.1.3).
const CLASS: u32 = 2;
const TTL: u32 = 4;
const DATA_LEN: u32 = 8;
const RECORD_HEAD_LEN: u32 = 10;
/// Types (RFC 1035, section 3.2.2; RFC 3596, section 2.1), and the class IN.
const A: u32 = 1;
const CNAME: u32 = 5;
const AAAA: u32 = 28;
const IN: u32 = 1;

/// A message, and what was read in it.
#[derive(Debug)]
#[repr(C)]
pub struct Message {
    /// The message. In words, because the kernel reads eight bytes at once only where these are aligned.
    words: [u64; WORDS],
    addresses: [Address; RECORDS_MAX as usize],
    /// The hashes of the names of the chain.
    names: [u64; CNAMES_MAX as usize + 1],
    len: Word,
    /// The type that was asked for.
    asked: Word,
    /// How many records there are, how many of them are read, and how many of these are CNAMEs.
    records: Word,
    read: Word,
    cnames: Word,
    /// Where the next record begins, and how long its owner is.
    at: Word,
    owner_len: Word,
    /// The last name of the chain: its place, and its length with the root label.
    name: Word,
    name_len: Word,
    /// The shortest TTL of all records.
    ttl: Word,
    /// What a loop has found.
    found: Word,
    label: Word,
}

impl Default for Message {
    fn default() -> Self {
        Self {
            words: [0; WORDS],
            addresses: [Address::UNSPECIFIED; RECORDS_MAX as usize],
            names: [0; CNAMES_MAX as usize + 1],
            len: Word::default(),
            asked: Word::default(),
            records: Word::default(),
            read: Word::default(),
            cnames: Word::default(),
            at: Word::default(),
            owner_len: Word::default(),
            name: Word::default(),
            name_len: Word::default(),
            ttl: Word::default(),
            found: Word::default(),
            label: Word::default(),
        }
    }
}

impl Message {
    /// The place of the message.
    #[inline(always)]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.words.as_mut_bytes()
    }

    /// Reads the answer of which `len` bytes are in the buffer. The question's name was read before, and has `name_len`
    /// bytes without the root label. `None`: it is left to the agent.
    #[inline(always)]
    pub fn read(&mut self, len: u32, name_len: u32) -> Option<()> {
        self.len.set(len);
        let len = self.len.get();
        let question_end = HEADER_LEN + name_len + 1 + TYPE_AND_CLASS_LEN;
        if len > MESSAGE_MAX || question_end > len || self.u16(FLAGS) & TRUNCATED != 0 {
            return None;
        }
        let asked = self.u16(question_end - TYPE_AND_CLASS_LEN);
        let records = self.u16(ANSWER_RECORDS);
        if asked != A && asked != AAAA
            || self.u16(question_end - 2) != IN
            || records == 0
            || records > RECORDS_MAX
        {
            return None;
        }
        self.asked.set(asked);
        self.records.set(records);
        self.read.set(0);
        self.cnames.set(0);
        self.at.set(question_end);
        self.name.set(HEADER_LEN);
        self.name_len.set(name_len + 1);
        self.ttl.set(u32::MAX);
        self.note_name()?;
        self.follow()?;
        self.take_addresses()
    }

    /// Follows the chain of CNAMEs.
    #[inline(always)]
    fn follow(&mut self) -> Option<()> {
        let mut count = 0;
        while count < CNAMES_MAX {
            if self.read.get() >= self.records.get() {
                return None;
            }
            let (kind, data, data_len) = self.record()?;
            if kind != CNAME {
                break;
            }
            count += 1;
            self.note_ttl(data);
            self.read.set(self.read.get() + 1);
            self.cnames.set(count);
            self.at.set(data + data_len);
            self.name.set(data);
            self.name_len.set(data_len);
            self.note_name()?;
        }
        Some(())
    }

    /// Takes the addresses of the last name: all other records.
    #[inline(always)]
    fn take_addresses(&mut self) -> Option<()> {
        let mut count = 0;
        while count < RECORDS_MAX {
            if self.read.get() >= self.records.get() {
                break;
            }
            let (kind, data, data_len) = self.record()?;
            // One comparison for both: the verifier follows both ways of each.
            let size = match self.asked.get() {
                A => 4,
                _ => 16,
            };
            if (kind ^ self.asked.get()) | (data_len ^ size) != 0 {
                return None;
            }
            self.note_ttl(data);
            let words = match size {
                4 => [self.u64(data) & u64::from(u32::MAX), 0],
                _ => [self.u64(data), self.u64(data + 8)],
            };
            let place = masked::<{ RECORDS_MAX - 1 }>(self.count());
            self.addresses[place as usize] = Address::from_words(words.map(u64::to_le));
            self.read.set(self.read.get() + 1);
            self.at.set(data + data_len);
            count += 1;
        }
        (count > 0).then_some(())
    }

    /// Type, place and length of the data of the next record, which must be of the last name.
    #[inline(always)]
    fn record(&mut self) -> Option<(u32, u32, u32)> {
        let at = self.at.get();
        let owner = self.u16(at);
        if owner >= POINTER {
            self.owner_len.set(POINTER_LEN);
            self.found
                .set(u32::from(owner == POINTER | self.name.get()));
        } else {
            self.owner_len.set(self.name_len.get());
            self.is_name_at(at);
        }
        let head = at + self.owner_len.get();
        let data = head + RECORD_HEAD_LEN;
        let data_len = self.u16(head + DATA_LEN);
        let is_usable = self.found.get() != 0
            && data + data_len <= self.len.get()
            && self.u16(head + CLASS) == IN;
        is_usable.then(|| (self.u16(head), data, data_len))
    }

    /// Notes the TTL of the record with its data there.
    #[inline(always)]
    fn note_ttl(&mut self, data: u32) {
        let at = data - RECORD_HEAD_LEN + TTL;
        let ttl = self.u32(at);
        // A value with the most significant bit set counts as zero (RFC 2181, section 8).
        let ttl = if ttl >> 31 == 0 { ttl } else { 0 };
        self.ttl.set(ttl.min(self.ttl.get()));
    }

    /// Finds out whether the bytes of the last name are there as well.
    #[inline(always)]
    fn is_name_at(&mut self, place: u32) {
        self.found.set(1);
        let mut at = 0;
        while at < NAME_MAX {
            // Read anew: the verifier must not learn the length from where the loop ends.
            if at >= self.name_len.get() {
                break;
            }
            let left = self.name_len.get() - at;
            let differs = (self.u64(self.name.get() + at) ^ self.u64(place + at)) & mask(left);
            self.found.set(self.found.get() & u32::from(differs == 0));
            at += 8;
        }
    }

    /// Notes the last name of the chain, which stands there in one piece and was not in the chain before.
    #[inline(always)]
    fn note_name(&mut self) -> Option<()> {
        let len = self.name_len.get();
        if len == 0 || len > NAME_MAX || self.name.get() + len > self.len.get() {
            return None;
        }
        self.find_root();
        if self.found.get() == 0 {
            return None;
        }
        let hash = self.hash();
        let mut before = 0;
        while before < CNAMES_MAX {
            if before >= self.cnames.get() {
                break;
            }
            if self.names[before as usize] == hash {
                return None;
            }
            before += 1;
        }
        self.names[masked::<CNAMES_MAX>(self.cnames.get()) as usize] = hash;
        Some(())
    }

    /// Finds out whether the labels of the last name end with the root label, and the name with them.
    #[inline(always)]
    fn find_root(&mut self) {
        self.found.set(0);
        self.label.set(0);
        let mut labels = 0;
        while labels < LABELS_MAX {
            let at = self.label.get();
            if at >= self.name_len.get() {
                break;
            }
            let len = self.u64(self.name.get() + at) as u32 & 0xff;
            if len > LABEL_MAX {
                break;
            }
            if len == 0 {
                self.found.set(u32::from(at + 1 == self.name_len.get()));
                break;
            }
            self.label.set(at + 1 + len);
            labels += 1;
        }
    }

    /// The hash of the last name, in lower case.
    #[inline(always)]
    fn hash(&self) -> u64 {
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        let mut at = 0;
        while at < NAME_MAX {
            if at >= self.name_len.get() {
                break;
            }
            let left = self.name_len.get() - at;
            let word = self.u64(self.name.get() + at) & mask(left);
            hash = (hash ^ lower_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
            hash ^= hash >> 32;
            at += 8;
        }
        hash
    }

    /// How many addresses were read.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.read.get() - self.cnames.get()
    }

    /// The address of this number.
    #[inline(always)]
    pub fn address(&self, number: u32) -> Address {
        self.addresses[masked::<{ RECORDS_MAX - 1 }>(number) as usize]
    }

    /// The shortest TTL of all records, in seconds.
    #[inline(always)]
    pub fn ttl(&self) -> u32 {
        self.ttl.get()
    }

    /// The IP version of the addresses.
    #[inline(always)]
    pub fn version(&self) -> Version {
        match self.asked.get() {
            A => Version::V4,
            _ => Version::V6,
        }
    }

    #[inline(always)]
    fn u16(&self, at: u32) -> u32 {
        u32::from((self.u64(at) as u16).swap_bytes())
    }

    #[inline(always)]
    fn u32(&self, at: u32) -> u32 {
        (self.u64(at) as u32).swap_bytes()
    }

    /// Eight bytes, the first one as the least significant.
    #[inline(always)]
    fn u64(&self, at: u32) -> u64 {
        let at = masked::<BYTE>(at);
        let word = masked::<WORD>(at >> 3) as usize;
        let bits = (at & 7) * 8;
        let [first, second] = [self.words[word], self.words[word + 1]].map(u64::from_le);
        first >> bits | second << 1 << (63 - bits)
    }
}

/// The first bytes of a word: as many as are left of a name, eight at most.
#[inline(always)]
fn mask(left: u32) -> u64 {
    u64::MAX >> (64 - 8 * left.min(8))
}

/// Eight bytes, each in lower case.
#[inline(always)]
fn lower_bytes(word: u64) -> u64 {
    const EACH: u64 = 0x0101_0101_0101_0101;
    let low = word & (0x7f * EACH);
    // The highest bit of a byte says that it is at least 'A', and that it is beyond 'Z'.
    let from = low + (0x80 - b'A' as u64) * EACH;
    let beyond = low + (0x80 - b'Z' as u64 - 1) * EACH;
    let is_upper = from & !beyond & !word & (0x80 * EACH);
    word | is_upper >> 2
}

#[cfg(test)]
mod tests;
