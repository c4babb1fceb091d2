//! The question of a DNS message: read, hashed, and looked up suffix by suffix.
//!
//! A name server may answer with another case than that of the question, so all hashes are of lower-case
//! names (RFC 4343). The hashes resist no attacker, and need not. If two names have the same hash, the
//! answer goes to the agent, which compares the names. If two questions have the same hash, the answer must
//! still come from a trusted resolver.

use crate::{
    Reason,
    bound::{Word, masked},
};

/// The longest name in wire format, root label included (RFC 1035, section 3.1).
const NAME_MAX: u32 = 255;
/// The longest label; larger values are pointers and other types (RFC 1035, section 4.1.4).
const LABEL_MAX: u8 = 63;
/// Type and class behind the name (RFC 1035, section 4.1.2).
const TYPE_AND_CLASS: u32 = 4;
/// The longest question.
pub const QUESTION_MAX: u32 = NAME_MAX + TYPE_AND_CLASS;
/// The longest base that is compared byte by byte ([`Buffer::base_is`]), without the root label.
pub const BASE_MAX: u32 = 128;
/// A power of two that holds the longest question, so that an index is bounded with one AND.
pub const BUFFER_LEN: usize = 512;

/// The hash of a name without regard to case.
///
/// FNV-1a with 64 bits (Fowler, Noll, Vo) over the name's uncompressed wire format without the root label,
/// *last byte first*. The hash of a name is thus a step on the way to the hash of each of its sub-domains,
/// and one pass over a name gives the hashes of all its suffixes.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NameHash(pub u64);

impl NameHash {
    /// The hash of the root.
    const ROOT: Self = Self(0xcbf2_9ce4_8422_2325);
    const PRIME: u64 = 0x0000_0100_0000_01b3;

    /// The hash of a name: each label behind its length octet, without the root label.
    pub fn of(wire: &[u8]) -> Self {
        wire.iter()
            .rev()
            .fold(Self::ROOT, |hash, &byte| hash.lower(byte))
    }

    /// Takes in one byte, an upper-case letter as lower case. No length octet is a letter: they are all
    /// smaller.
    #[inline(always)]
    fn lower(self, byte: u8) -> Self {
        self.byte(lower(byte.into()))
    }

    #[inline(always)]
    fn byte(self, byte: u64) -> Self {
        Self((self.0 ^ byte).wrapping_mul(Self::PRIME))
    }
}

/// An upper-case letter as lower case, and each other byte as it is. There is no branch, because the verifier would
/// follow both ways of the branch for each byte.
#[inline(always)]
pub(crate) fn lower(byte: u64) -> u64 {
    // The top bit says whether the byte is from A to Z.
    let upper = (!byte.wrapping_sub(b'A'.into()) & byte.wrapping_sub(u64::from(b'Z') + 1)) >> 63;
    byte + (upper << 5)
}

/// A set of names.
pub trait Names {
    /// Whether the set has all names.
    fn all(&self) -> bool;

    /// Whether the set has the name with this hash.
    fn mentions(&self, hash: NameHash) -> bool;
}

/// A question, copied from its first byte on. The bytes behind its end are never read.
#[repr(C)]
pub struct Buffer {
    /// The bytes.
    pub bytes: [u8; BUFFER_LEN],
    /// For the place of each label: the place of the label in front of it. This is a table and not a list
    /// with a counter, because each value of the counter would be a case of its own to the verifier.
    fronts: [u8; PLACES],
    /// The place of the root label, and that of the last label before it.
    end: Word,
    last: Word,
    /// The number of bytes.
    len: Word,
    /// Whether a suffix was found mentioned.
    mentioned: Word,
    /// The place of the longest suffix that was found mentioned, and the two halves of its hash.
    base: Word,
    base_hash: [Word; 2],
}

/// The longest suffix of a question's name that is in the set of names.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Base {
    /// Its hash.
    pub hash: NameHash,
    /// Its place in the question.
    pub at: u32,
    /// How many bytes it has, without the root label.
    pub len: u32,
    /// Where the question's name lies below it.
    pub depth: Depth,
}

/// Where a name lies below another one. Rules tell these apart, and no others.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(u32)]
pub enum Depth {
    /// It is the name itself.
    Itself = 0,
    /// One label below.
    Child = 1,
    /// Deeper.
    Deeper = 2,
}

impl Default for Buffer {
    fn default() -> Self {
        Self {
            bytes: [0; BUFFER_LEN],
            fronts: [0; PLACES],
            end: Word::default(),
            last: Word::default(),
            len: Word::default(),
            mentioned: Word::default(),
            base: Word::default(),
            base_hash: Default::default(),
        }
    }
}

impl Buffer {
    /// How long the question's name is, without the root label.
    #[inline(always)]
    pub fn name_len(&self) -> u32 {
        self.end.get()
    }

    /// Whether the question has this type, or another one with the same lower octet: CAA (RFC 8659) looks like A. The
    /// upper octet would cost the verifier thousands of instructions.
    #[inline(always)]
    pub fn may_be_of_type(&self, kind: u8) -> bool {
        self.bytes[masked::<BYTE>(self.end.get() + 2) as usize] == kind
    }

    /// The longest suffix that was found mentioned, if any was.
    #[inline(always)]
    pub fn base(&self) -> Option<Base> {
        let at = self.base.get();
        if at == NOWHERE.into() {
            return None;
        }
        let [upper, lower] = &self.base_hash;
        let depth = match self.fronts[masked::<PLACE>(at) as usize] {
            NOWHERE => Depth::Itself,
            0 => Depth::Child,
            _ => Depth::Deeper,
        };
        Some(Base {
            hash: NameHash(u64::from(upper.get()) << 32 | u64::from(lower.get())),
            at,
            len: self.end.get().wrapping_sub(at),
            depth,
        })
    }

    /// Whether the bytes of the base are those of this name, in lower case, whose length is that of the base.
    #[inline(always)]
    pub fn base_is(&mut self, name: &[u8; BASE_MAX as usize], base: &Base) -> bool {
        self.mentioned.set(1);
        let mut at = 0;
        while at < BASE_MAX {
            if at >= base.len {
                break;
            }
            let byte = self.bytes[masked::<BYTE>(base.at + at) as usize];
            let same =
                lower(byte.into()) == u64::from(name[masked::<{ BASE_MAX - 1 }>(at) as usize]);
            self.mentioned.set(self.mentioned.get() & u32::from(same));
            at += 1;
        }
        base.len <= BASE_MAX && self.mentioned.get() != 0
    }
}

/// What the pod asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Question {
    /// The hash of name, type and class.
    pub hash: u64,
    /// Whether the name or a suffix of it is in the set of names.
    pub mentioned: bool,
}

/// The hash of a question of class IN (RFC 1035, section 3.2.4) for a name, as in [`NameHash::of`], and a type.
pub fn question_hash(name: &[u8], kind: u16) -> u64 {
    let [upper, lower] = kind.to_be_bytes();
    let type_and_class = [upper, lower, 0, 1];
    let hash = type_and_class
        .iter()
        .fold(NameHash::of(name), |hash, &byte| hash.byte(byte.into()));
    hash.0
}

const BYTE: u32 = BUFFER_LEN as u32 - 1;
/// The places where a label can begin, and more: all values of `u8`.
const PLACES: usize = 256;
const PLACE: u32 = PLACES as u32 - 1;
/// No place: not even the root label fits there.
const NOWHERE: u8 = 255;

/// Reads the question in the first `len` bytes of `buffer`.
///
/// # Errors
///
/// The question does not end within these bytes, or its name is not a name.
#[inline(always)]
pub fn question<N: Names>(buffer: &mut Buffer, len: u32, names: &N) -> Result<Question, Reason> {
    buffer.len.set(len);
    let len = buffer.len.get();
    let mut end = 0;
    let mut labels = 0;
    let mut last = NOWHERE;
    loop {
        if end >= len {
            return Err(Reason::TruncatedQuestion);
        }
        let label = buffer.bytes[masked::<BYTE>(end) as usize];
        if label == 0 {
            break;
        }
        if label > LABEL_MAX {
            return Err(Reason::InvalidQuestion);
        }
        buffer.fronts[masked::<PLACE>(end) as usize] = last;
        last = end as u8;
        labels += 1;
        end += 1 + u32::from(label);
        // The root label needs a place, too. A label takes at least two bytes, so the second condition never
        // holds alone. The verifier needs that condition to see that the loop ends.
        if end >= NAME_MAX || labels > NAME_MAX / 2 {
            return Err(Reason::InvalidQuestion);
        }
    }
    if end + 1 + TYPE_AND_CLASS > len {
        return Err(Reason::TruncatedQuestion);
    }
    buffer.end.set(end);
    buffer.last.set(last.into());
    let end = buffer.end.get();
    let mut start = buffer.last.get() as u8;

    // The loop writes its finding to memory, and compares a masked place. So the verifier does not remember
    // to the end of the loop where labels begin.
    buffer.mentioned.set(u32::from(names.all()));
    buffer.base.set(NOWHERE.into());
    let mut hash = NameHash::ROOT;
    let mut done = 0;
    while done < NAME_MAX && done < end {
        done += 1;
        let at = masked::<BYTE>(end - done);
        hash = hash.lower(buffer.bytes[at as usize]);
        if at == u32::from(start) {
            start = buffer.fronts[masked::<PLACE>(at) as usize];
            if names.mentions(hash) {
                buffer.mentioned.set(1);
                buffer.base.set(at);
                let [upper, lower] = &mut buffer.base_hash;
                upper.set((hash.0 >> 32) as u32);
                lower.set(hash.0 as u32);
            }
        }
    }
    for at in 1..=TYPE_AND_CLASS {
        hash = hash.byte(buffer.bytes[masked::<BYTE>(end + at) as usize].into());
    }
    Ok(Question {
        hash: hash.0,
        mentioned: buffer.mentioned.get() != 0,
    })
}

#[cfg(test)]
mod tests;
