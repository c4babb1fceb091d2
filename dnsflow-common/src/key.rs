//! The keys and values of the maps that the BPF programs and the agent share, and their limits.
//!
//! A map compares keys byte by byte. So no layout here has padding, and an address has one form only.
//! Integers are in native byte order.

use core::net::{IpAddr, SocketAddr};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    question::{BASE_MAX, Depth, NameHash},
    walk::{IpHeader, Reader, Version},
};

/// How many resolvers can be trusted.
pub const RESOLVERS_MAX: u32 = 1024;
/// The number of addresses of all interfaces together ([`SourceKey`]): four for each of 4,096 interfaces.
pub const SOURCES_MAX: u32 = 16_384;
/// How many addresses of one interface count.
pub const SOURCES_PER_INTERFACE_MAX: usize = 16;
/// How many queries of one interface are remembered. An answered query is forgotten at once. With 512
/// queries, a pod can ask a resolver that takes half a second a thousand times a second.
pub const PENDING_PER_INTERFACE: u32 = PENDING_SETS * PENDING_WAYS;
/// The sets of slots of an interface. The ports and the id of a query say in which set it is …
const PENDING_SETS: u32 = 32;
/// … and it may be in each slot of the set. In a full set, the oldest query is replaced.
pub const PENDING_WAYS: u32 = 16;
/// How many queries of all interfaces together are remembered: those of 256 interfaces that have filled all
/// their slots. Of more, the map drops the least recently used.
pub const PENDING_MAX: u32 = 256 * PENDING_PER_INTERFACE;
/// The layout of [`SlotKey`] and [`Pending`], and how a query finds its slot. The map outlives the agent: the
/// programs of an agent with another layout begin with an empty one.
pub const PENDING_LAYOUT: u32 = 1;
/// How long a query waits for its answer: twice the time after which resolvers usually ask again
/// (`timeout` in resolv.conf(5)).
pub const PENDING_AGE_MAX_NS: u64 = 10_000_000_000;
/// How many datagrams in fragments are remembered at a time: more than one interface begins in
/// [`FRAGMENT_AGE_MAX_NS`] with its share of the ring buffer.
pub const FRAGMENTS_MAX: u32 = 16_384;
/// How long later fragments are let through behind the first. A server sends them back to back.
pub const FRAGMENT_AGE_MAX_NS: u64 = 1_000_000_000;
/// How many interfaces have a name set.
pub const NAME_SETS_MAX: u32 = 4096;
/// The bit that is set in the number of a name set without names.
pub const NAME_SET_EMPTY: u32 = 1 << 31;
/// The bit that is set in the number of a name set where no answer is held.
pub const NAME_SET_UNHELD: u32 = 1 << 30;
/// The number of names of all name sets together.
pub const NAMES_MAX: u32 = 131_072;
/// How many interfaces have a share of the ring buffer.
pub const SHARES_MAX: u32 = NAME_SETS_MAX;
/// How many frames are remembered that were held. None of them is held again. More than one interface adds in two
/// seconds with its share of the ring buffer; a frame is held for half a second, by default.
pub const HELD_MAX: u32 = 16_384;
/// How long a frame that was held is not held again: longer than any agent holds a frame (`--hold-max`).
pub const HELD_AGAIN_NS: u64 = 10_000_000_000;

/// An IP address. An IPv4 address is in the first four octets, with zeros behind it.
#[derive(
    Clone,
    Copy,
    Debug,
    Eq,
    FromBytes,
    Hash,
    Immutable,
    IntoBytes,
    KnownLayout,
    Ord,
    PartialEq,
    PartialOrd,
)]
#[repr(C)]
pub struct Address {
    octets: [u8; 16],
}

impl Address {
    /// 0.0.0.0, and ::.
    pub(crate) const UNSPECIFIED: Self = Self { octets: [0; 16] };

    /// The form of an address in keys. An IPv4 and an IPv6 address can have the same form.
    pub fn new(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self::v4(v4.octets()),
            IpAddr::V6(v6) => Self {
                octets: v6.octets(),
            },
        }
    }

    #[inline(always)]
    fn v4([a, b, c, d]: [u8; 4]) -> Self {
        Self {
            octets: [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// The address as two words.
    #[inline(always)]
    fn words(self) -> [u64; 2] {
        zerocopy::transmute!(self.octets)
    }

    /// The address whose words these are.
    #[inline(always)]
    pub(crate) fn from_words(words: [u64; 2]) -> Self {
        Self {
            octets: zerocopy::transmute!(words),
        }
    }

    /// The address of this IP version.
    fn ip(self, version: u32) -> IpAddr {
        let [a, b, c, d, ..] = self.octets;
        match version {
            4 => IpAddr::from([a, b, c, d]),
            _ => IpAddr::from(self.octets),
        }
    }

    /// The source address in this header.
    #[inline(always)]
    fn src<R: Reader>(frame: &R, ip: IpHeader) -> Option<Self> {
        Self::read(frame, ip.version, ip.src())
    }

    /// The destination address in this header.
    #[inline(always)]
    fn dst<R: Reader>(frame: &R, ip: IpHeader) -> Option<Self> {
        Self::read(frame, ip.version, ip.dst())
    }

    #[inline(always)]
    fn read<R: Reader>(frame: &R, version: Version, offset: u32) -> Option<Self> {
        match version {
            Version::V4 => frame.read(offset).map(Self::v4),
            Version::V6 => frame.read(offset).map(|octets| Self { octets }),
        }
    }
}

/// A trusted resolver, as pods see it.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct ResolverKey {
    address: Address,
    version: u16,
    port: u16,
}

impl ResolverKey {
    /// The resolver at this address and port.
    pub fn new(address: IpAddr, port: u16) -> Self {
        Self {
            address: Address::new(address),
            version: if address.is_ipv4() { 4 } else { 6 },
            port,
        }
    }

    /// Where a packet comes from; `None` where the frame ends before.
    #[inline(always)]
    pub fn source<R: Reader>(frame: &R, ip: IpHeader, port: u16) -> Option<Self> {
        Some(Self {
            address: Address::src(frame, ip)?,
            version: ip.version as u16,
            port,
        })
    }

    /// Where a packet goes; `None` where the frame ends before.
    #[inline(always)]
    pub fn destination<R: Reader>(frame: &R, ip: IpHeader, port: u16) -> Option<Self> {
        Some(Self {
            address: Address::dst(frame, ip)?,
            version: ip.version as u16,
            port,
        })
    }
}

/// An address of a pod's port. A question counts if it comes from one of them.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct SourceKey {
    /// The pod's interface.
    pub ifindex: u32,
    /// The IP version.
    pub version: u32,
    address: Address,
}

impl SourceKey {
    /// This address at an interface.
    pub fn new(ifindex: u32, address: IpAddr) -> Self {
        Self {
            ifindex,
            version: if address.is_ipv4() { 4 } else { 6 },
            address: Address::new(address),
        }
    }

    /// Where a packet from the pod comes from; `None` where the frame ends before.
    #[inline(always)]
    pub fn source<R: Reader>(frame: &R, ifindex: u32, ip: IpHeader) -> Option<Self> {
        Some(Self {
            ifindex,
            version: ip.version as u32,
            address: Address::src(frame, ip)?,
        })
    }

    /// Where a packet to the pod goes; `None` where the frame ends before.
    #[inline(always)]
    pub fn destination<R: Reader>(frame: &R, ifindex: u32, ip: IpHeader) -> Option<Self> {
        Some(Self {
            ifindex,
            version: ip.version as u32,
            address: Address::dst(frame, ip)?,
        })
    }
}

/// The Ethernet address that belongs to a [`SourceKey`], and two zeros. If all octets are zero, nobody says
/// which address the port has, and every address counts.
pub type SourceMac = [u8; 8];

/// The part of a query that its answer repeats: the resolver's address, the pod's address, and one word
/// with IP version, resolver's port, pod's port and transaction id. The parts are words, so that a
/// comparison needs one branch only: the verifier follows both ways of each branch.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct Query {
    words: [u64; 5],
}

impl Query {
    /// A query from the pod; `None` where the frame ends before.
    #[inline(always)]
    pub fn sent<R: Reader>(
        frame: &R,
        ip: IpHeader,
        (pod_port, resolver_port): (u16, u16),
        id: u16,
    ) -> Option<Self> {
        let (resolver, pod) = (Address::dst(frame, ip)?, Address::src(frame, ip)?);
        Some(Self::new(resolver, pod, ip, resolver_port, pod_port, id))
    }

    /// The query that an answer belongs to; `None` where the frame ends before.
    #[inline(always)]
    pub fn answered<R: Reader>(
        frame: &R,
        ip: IpHeader,
        (resolver_port, pod_port): (u16, u16),
        id: u16,
    ) -> Option<Self> {
        let (resolver, pod) = (Address::src(frame, ip)?, Address::dst(frame, ip)?);
        Some(Self::new(resolver, pod, ip, resolver_port, pod_port, id))
    }

    #[inline(always)]
    fn new(
        resolver: Address,
        pod: Address,
        ip: IpHeader,
        resolver_port: u16,
        pod_port: u16,
        id: u16,
    ) -> Self {
        let ([a, b], [c, d]) = (resolver.words(), pod.words());
        let rest = u64::from(ip.version as u16) << 48
            | u64::from(resolver_port) << 32
            | u64::from(pod_port) << 16
            | u64::from(id);
        Self {
            words: [a, b, c, d, rest],
        }
    }

    /// Whether both are the same query, with one branch.
    #[inline(always)]
    pub fn is(&self, other: &Self) -> bool {
        let ([a, b, c, d, e], [f, g, h, i, j]) = (&self.words, &other.words);
        ((a ^ f) | (b ^ g) | (c ^ h) | (d ^ i) | (e ^ j)) == 0
    }

    /// Address and port of the resolver.
    pub fn resolver(&self) -> SocketAddr {
        let [a, b, _, _, rest] = self.words;
        let version = (rest >> 48) as u32;
        SocketAddr::new(Address::from_words([a, b]).ip(version), (rest >> 32) as u16)
    }

    /// The first slot of the query's set.
    #[inline(always)]
    pub fn set(&self) -> u32 {
        // Pods choose ports and ids at random, or one after the other (RFC 5452). The upper bits of the
        // product depend on all bits of both (Knuth, The Art of Computer Programming, volume 3, section 6.4:
        // multiplicative hashing).
        let [.., rest] = self.words;
        let mixed = rest.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> (64 - PENDING_SETS.trailing_zeros())) as u32 * PENDING_WAYS
    }
}

/// A slot for a query.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct SlotKey {
    /// The index of the pod's interface. Query and answer pass the same interface.
    pub ifindex: u32,
    /// The number of the slot, below [`PENDING_PER_INTERFACE`].
    pub slot: u32,
}

/// What is remembered of a query.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Pending {
    /// The query.
    pub query: Query,
    /// The question's hash.
    pub question: u64,
    /// When it was asked, in nanoseconds of `CLOCK_MONOTONIC`.
    pub asked_at_ns: u64,
}

/// A frame that was held.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct HeldKey {
    /// The interface that it goes out of.
    pub ifindex: u32,
    /// Its length.
    pub frame_len: u32,
    /// Its TCP sequence number, or the id of its DNS message.
    pub sequence: u32,
    /// The server's port, then the pod's.
    pub ports: [u16; 2],
}

/// The share of an interface: the times at which all that it has handed over is paid for, in nanoseconds of
/// `CLOCK_MONOTONIC` (the "theoretical arrival time" of the generic cell rate algorithm, ITU-T I.371). If
/// two CPUs pay at once, one payment may be lost. Other interfaces lose nothing by that.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(C)]
pub struct Share {
    /// When the bytes in the ring buffer are paid for.
    pub ring_paid_at_ns: u64,
    /// When the deferred answers are paid for.
    pub deferred_paid_at_ns: u64,
    /// Packets that were left out because the share was used up.
    pub left_out: u64,
    /// Packets that could have been TCP segments to or from a DNS server, and were not handed to the agent, whatever the
    /// reason.
    pub segments_left_out: u64,
    /// Of the attempts that the agent is told of.
    pub attempts_paid_at_ns: u64,
    /// Attempts that the agent was not told of because the share was used up.
    pub attempts_left_out: u64,
}

/// An attempt: a pod may begin a connection. Neither the pod's address nor its port is part of the key:
/// a pod that connects to one place again and again is told of once in a while.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct AttemptKey {
    /// The pod's interface.
    pub ifindex: u32,
    /// The destination port.
    pub dst_port: u16,
    version: u8,
    /// The IP protocol.
    pub protocol: u8,
    dst: Address,
}

impl AttemptKey {
    /// The key of an attempt; `None` where the frame ends before.
    #[inline(always)]
    pub fn new<R: Reader>(
        frame: &R,
        ifindex: u32,
        ip: IpHeader,
        protocol: u8,
        dst_port: u16,
    ) -> Option<Self> {
        Some(Self {
            ifindex,
            dst_port,
            version: ip.version as u8,
            protocol,
            dst: Address::dst(frame, ip)?,
        })
    }

    /// The destination address.
    pub fn dst(&self) -> IpAddr {
        self.dst.ip(self.version.into())
    }
}

/// A UDP datagram in fragments (RFC 791, section 3.2; RFC 8200, section 4.5). Both RFCs also compare the
/// protocol, which is always UDP here.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct FragmentKey {
    /// The interface that the fragments go out of.
    pub ifindex: u32,
    /// The identification.
    pub id: u32,
    /// The source address.
    pub src: Address,
    /// The destination address.
    pub dst: Address,
    /// The IP version of both.
    pub version: u32,
}

impl FragmentKey {
    /// The key of a fragment; `None` where the frame ends before.
    #[inline(always)]
    pub fn new<R: Reader>(frame: &R, ifindex: u32, ip: IpHeader, id: u32) -> Option<Self> {
        Some(Self {
            ifindex,
            id,
            src: Address::src(frame, ip)?,
            dst: Address::dst(frame, ip)?,
            version: ip.version as u32,
        })
    }
}

/// How many addresses of all interfaces together can have an entry ([`EntryKey`]).
pub const ENTRIES_MAX: u32 = 262_144;
/// The layout of [`EntryKey`] and [`Entry`]. The map outlives the agent: an agent with another layout begins
/// with an empty one.
pub const ENTRY_LAYOUT: u32 = 2;
/// The time of use in an entry is not older than this while packets pass: the program does not write to
/// memory that all CPUs share for each packet.
pub const ENTRY_USED_EVERY_NS: u64 = 1_000_000_000;

/// An address that a pod may reach by a group.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct EntryKey {
    /// The pod's interface.
    pub ifindex: u32,
    version: u32,
    address: Address,
}

impl EntryKey {
    /// The entry of an address at an interface.
    pub fn new(ifindex: u32, address: IpAddr) -> Self {
        Self {
            ifindex,
            version: if address.is_ipv4() { 4 } else { 6 },
            address: Address::new(address),
        }
    }

    /// The entry of an address that an answer has told.
    #[inline(always)]
    pub const fn told(ifindex: u32, version: Version, address: Address) -> Self {
        Self {
            ifindex,
            version: version as u32,
            address,
        }
    }

    /// The entry of a packet from the pod; `None` where the frame ends before.
    #[inline(always)]
    pub fn destination<R: Reader>(frame: &R, ifindex: u32, ip: IpHeader) -> Option<Self> {
        Some(Self {
            ifindex,
            version: ip.version as u32,
            address: Address::dst(frame, ip)?,
        })
    }

    /// The address.
    pub fn address(&self) -> IpAddr {
        self.address.ip(self.version)
    }

    /// A number that tells keys apart. It never is the same for two keys that differ in one of their words, as IPv4
    /// addresses of one interface do, and interfaces of one address. Of other pairs, it is the same for one in 2³².
    #[inline(always)]
    fn check(&self) -> u32 {
        // The golden ratio. A product passes differences on to higher bits (Knuth, The Art of Computer Programming,
        // volume 3, section 6.4), and the rotation to lower ones. Each step can be undone: no difference gets lost.
        const FACTOR: u32 = 0x9e37_79b9;
        let [first, second, third, fourth]: [u32; 4] = zerocopy::transmute!(self.address.octets);
        // The versions differ in bit 30, which the index of the first billion interfaces does not have.
        let mut check = self.ifindex ^ self.version << 29;
        for word in [fourth, third, second, first] {
            check = check.wrapping_mul(FACTOR).rotate_left(16) ^ word;
        }
        check
    }
}

/// The mark of an entry, and a check of its key. Both are in one word, which is read and written at once: whoever reads
/// it has the mark and the check of the same entry.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct KeyedMark(u64);

impl KeyedMark {
    /// The mark of packets to this address at this interface.
    #[inline(always)]
    pub fn new(key: &EntryKey, mark: u32) -> Self {
        Self(u64::from(mark) << 32 | u64::from(key.check()))
    }

    /// The mark, if it is that of this key.
    #[inline(always)]
    pub fn of(self, key: &EntryKey) -> Option<u32> {
        (self.0 as u32 == key.check()).then(|| self.mark())
    }

    /// The mark, whosever it is.
    #[inline(always)]
    pub fn mark(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// How packets to an address are marked. Times are in nanoseconds of `CLOCK_MONOTONIC`.
///
/// The kernel may give the element to another key while a program reads it. So whoever reads the end reads it before the
/// mark: the kernel writes the mark first (`memcpy` of `copy_map_value` in Linux include/linux/bpf.h).
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(C)]
pub struct Entry {
    /// The bits that the mark gets, within the mask, and whose they are.
    pub mark: KeyedMark,
    /// The entry counts until then.
    pub until_ns: u64,
    /// When a packet was last marked, by [`ENTRY_USED_EVERY_NS`]; zero if none was.
    pub used_ns: u64,
}

impl Entry {
    /// An entry that no packet has used.
    #[inline(always)]
    pub fn new(key: &EntryKey, mark: u32, until_ns: u64) -> Self {
        Self {
            mark: KeyedMark::new(key, mark),
            until_ns,
            used_ns: 0,
        }
    }
}

/// How many classes all interfaces together can have ([`Class`]).
pub const CLASSES_MAX: u32 = 16_384;

/// A class of names at an interface: those that lie alike below one name that rules mention, and below no longer one.
/// For addresses of one IP version, the same rules match all of them.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct ClassKey {
    /// The hash of the name that rules mention.
    base: u64,
    /// The pod's interface.
    pub ifindex: u32,
    /// Where the names lie below it, and the IP version of the addresses.
    kind: u32,
}

impl ClassKey {
    /// The class of names that lie so below the base.
    #[inline(always)]
    pub const fn new(ifindex: u32, base: NameHash, depth: Depth, version: Version) -> Self {
        Self {
            base: base.0,
            ifindex,
            kind: (depth as u32) << 8 | version as u32,
        }
    }

    /// Whether both are the same, with one branch.
    #[inline(always)]
    pub fn is(&self, other: &Self) -> bool {
        let rest = (self.ifindex ^ other.ifindex) | (self.kind ^ other.kind);
        (self.base ^ other.base) | u64::from(rest) == 0
    }
}

/// A class whose addresses the program opens without the agent: packets to them get the mark. The agent writes an
/// element of the array `CLASSES` before any key leads there, and writes it again only when no program can read it any
/// more.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Class {
    /// Whose it is.
    pub key: ClassKey,
    /// The bits that the mark gets, within the mask.
    pub mark: u32,
    /// How long the base is.
    pub base_len: u32,
    /// The base: each label behind its length octet, in lower case, without the root label.
    pub base: [u8; BASE_MAX as usize],
}

/// How many networks can be refused ([`NetworkKey`]): 4,096 of pods, 256 each of up to four options and of Services, and
/// some that are always there. Single addresses have bits ([`AddressBit`]).
pub const NETWORKS_MAX: u32 = 8192;

/// A network whose addresses the program never opens: a key of the trie `NETWORKS`, but for the length of the prefix in
/// front of it, which counts the bits of the version as well.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct NetworkKey {
    version: u32,
    address: Address,
}

impl NetworkKey {
    /// The bits in front of the address.
    const VERSION_BITS: u32 = u32::BITS;

    /// The network of an address, and the bits of the key that count if so many bits of the address do.
    pub fn new(address: IpAddr, prefix_len: u8) -> (u32, Self) {
        let key = Self {
            version: if address.is_ipv4() { 4 } else { 6 },
            address: Address::new(address),
        };
        (Self::VERSION_BITS + u32::from(prefix_len), key)
    }

    /// The same of one address that an answer has told.
    #[inline(always)]
    pub const fn told(version: Version, address: Address) -> (u32, Self) {
        let bits = match version {
            Version::V4 => 32,
            Version::V6 => 128,
        };
        let version = version as u32;
        (Self::VERSION_BITS + bits, Self { version, address })
    }
}

/// The words of all [`AddressBit`]s: 1 MiB.
pub const ADDRESS_WORDS: u32 = 1 << 17;

/// The bit of a single address that the program never opens. Of the addresses that share a bit, it opens none if it is
/// to leave one to the agent. So there is room for any number of addresses.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct AddressBit {
    /// The number of the word in the map.
    pub word: u32,
    /// The bit in this word alone.
    pub mask: u64,
}

impl AddressBit {
    /// The bit of an address.
    pub fn new(address: IpAddr) -> Self {
        let version = match address {
            IpAddr::V4(_) => Version::V4,
            IpAddr::V6(_) => Version::V6,
        };
        Self::told(version, Address::new(address))
    }

    /// The same of one address that an answer has told.
    #[inline(always)]
    pub fn told(version: Version, address: Address) -> Self {
        // Multiplied by the golden ratio: the upper bits depend on all bits (Knuth, The Art of Computer Programming,
        // volume 3, section 6.4).
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let [first, second] = address.words();
        let hash = (first ^ version as u64).wrapping_mul(FACTOR);
        let hash = (hash ^ hash >> 32 ^ second).wrapping_mul(FACTOR);
        let bits = u64::BITS - ADDRESS_WORDS.ilog2();
        Self {
            word: (hash >> bits) as u32,
            mask: 1 << (hash >> (bits - u64::BITS.ilog2()) & 63),
        }
    }
}

/// A name that the rules of a name set mention.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, Ord, PartialEq, PartialOrd,
)]
#[repr(C)]
pub struct NameKey {
    /// The name's hash.
    pub hash: u64,
    /// The name set.
    pub name_set: u32,
    reserved: u32,
}

impl NameKey {
    /// The name of this hash in a name set.
    #[inline(always)]
    pub const fn new(name_set: u32, hash: NameHash) -> Self {
        Self {
            hash: hash.0,
            name_set,
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    #[test]
    fn families_are_apart() {
        let v4 = Ipv4Addr::new(10, 96, 0, 10);
        let v6 = Ipv6Addr::from([10, 96, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_ne!(
            ResolverKey::new(v4.into(), 53),
            ResolverKey::new(v6.into(), 53)
        );
        assert_ne!(SourceKey::new(7, v4.into()), SourceKey::new(7, v6.into()));
        assert_ne!(EntryKey::new(7, v4.into()), EntryKey::new(7, v6.into()));
        for address in [v4.into(), v6.into()] {
            assert_eq!(EntryKey::new(7, address).address(), address);
        }
    }

    fn key_of_words(ifindex: u32, words: [u32; 4]) -> EntryKey {
        let octets: [u8; 16] = zerocopy::transmute!(words);
        EntryKey::new(ifindex, octets.into())
    }

    proptest! {
        /// Addresses of IPv4, also in the forms that IPv6 has for them, and interfaces of one address.
        #[test]
        fn keys_that_differ_in_one_word_have_different_checks(
            ifindex in 1..=i32::MAX as u32,
            words: [u32; 4],
            place in 0..4_usize,
            [one, other]: [u32; 2],
        ) {
            prop_assume!(one != other);
            let v4 = |address: u32| EntryKey::new(ifindex, Ipv4Addr::from(address).into());
            // For certain, not only for these: the difference is that of the addresses.
            prop_assert_eq!(v4(one).check() ^ v4(other).check(), one.to_be() ^ other.to_be());
            let with = |word| {
                let mut words = words;
                words[place] = word;
                key_of_words(ifindex, words)
            };
            prop_assert_ne!(with(one).check(), with(other).check());
            for key in [v4(one), with(one)] {
                let elsewhere = EntryKey { ifindex: other, ..key };
                prop_assert_eq!(key.check() == elsewhere.check(), other == ifindex);
            }
        }

        #[test]
        fn a_mark_is_that_of_its_own_key_alone(
            ifindex: u32, [one, other]: [u32; 2], words: [u32; 4], mark: u32,
        ) {
            prop_assume!(one != other);
            let [own, another] = [one, other].map(|address| EntryKey::new(ifindex, Ipv4Addr::from(address).into()));
            let v6 = key_of_words(ifindex, words);
            for (own, another) in [(own, another), (own, v6), (v6, own)] {
                let word = KeyedMark::new(&own, mark);
                prop_assert_eq!(word.of(&own), Some(mark));
                prop_assert_eq!(word.of(&another), None);
                prop_assert_eq!(word.mark(), mark);
            }
        }
    }

    /// Many pods with the same addresses, which lie side by side, in all forms.
    #[test]
    fn of_keys_that_are_alike_few_have_the_same_check() {
        let forms: [fn(u32) -> IpAddr; 5] = [
            |at| Ipv4Addr::from(0xcb00_7100 + at).into(),
            |at| Ipv4Addr::from(0xcb00_7100 + at).to_ipv6_mapped().into(),
            |at| Ipv6Addr::from(0x0064_ff9b << 96 | u128::from(0xcb00_7100 + at)).into(),
            |at| Ipv6Addr::from(0x2001_0db8 << 96 | u128::from(at)).into(),
            |at| Ipv6Addr::from(0x2001_0db8 << 96 | u128::from(at + 1) << 64 | 1).into(),
        ];
        let keys = (1..=1000).flat_map(|ifindex| {
            let addresses = forms.iter().flat_map(|form| (0..200).map(form));
            addresses.map(move |address| EntryKey::new(ifindex, address))
        });
        let mut checks: std::vec::Vec<_> = keys.map(|key| key.check()).collect();
        let all = checks.len();
        checks.sort_unstable();
        checks.dedup();
        let shared = all - checks.len();
        // Of random numbers, 116.
        assert!(shared < 2 * 116, "{shared} of {all}");
    }

    /// The tenant's addresses are one after the other, or as far apart as it likes; the others' are not its own.
    #[test]
    fn addresses_left_to_the_agent_share_their_bits_with_few_others() {
        const LEFT: u32 = 1 << 17;
        let v4 = |at: u32| IpAddr::from(Ipv4Addr::from(at));
        let v6 = |at: u32| IpAddr::from(Ipv6Addr::from(u128::from(at) << 64 | 0x2001_0db8 << 96));
        let ways: [fn(u32) -> u32; 4] = [
            |at| at + 0x0a00_0000,
            |at| at << 8,
            |at| at << 15 | 1,
            |at| at.reverse_bits(),
        ];
        let mut words = std::vec![0; ADDRESS_WORDS as usize];
        for way in ways {
            for make in [v4 as fn(u32) -> IpAddr, v6] {
                words.fill(0);
                for at in 0..LEFT {
                    let AddressBit { word, mask } = AddressBit::new(make(way(at)));
                    words[word as usize] |= mask;
                }
                let others = (0..100_000).map(|at: u32| 0xcb00_7100 ^ at.wrapping_mul(0x0101_6b35));
                let shares = |other: &u32| {
                    let AddressBit { word, mask } = AddressBit::new(make(*other));
                    words[word as usize] & mask != 0
                };
                let shared = others.filter(shares).count();
                // Of 2^23 bits, the tenant has a 64th.
                assert!(shared < 2 * 100_000 / 64, "{shared}");
            }
        }
    }

    #[test]
    fn queries_one_after_the_other_are_spread_over_all_sets() {
        let query = |id: u16, port: u16| {
            let ip = IpHeader {
                version: Version::V4,
                l3: 14,
            };
            Query::sent(&&[7; 34][..], ip, (port, 53), id).expect("long enough")
        };
        for way in [|at| (at, 40_000), |at| (7, at)] {
            let mut counts = [0; PENDING_SETS as usize];
            for at in 0..PENDING_PER_INTERFACE as u16 {
                let (id, port) = way(at);
                let set = query(id, port).set();
                assert!(set % PENDING_WAYS == 0 && set < PENDING_PER_INTERFACE);
                counts[(set / PENDING_WAYS) as usize] += 1;
            }
            let most = counts.iter().max().copied();
            assert!(most <= Some(2 * PENDING_WAYS), "{counts:?}");
        }
    }

    /// A pod that goes on asking while the network is away for seconds.
    #[test]
    fn bursts_of_queries_find_a_free_slot() {
        let ip = IpHeader {
            version: Version::V4,
            l3: 14,
        };
        // splitmix64 (Steele, Lea, Flood, 2014), from one seed: the same numbers each time.
        let mut state = 0_u64;
        let mut random = move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        };
        for burst in 0..1000 {
            let mut counts = [0; PENDING_SETS as usize];
            for _ in 0..120 {
                let number = random();
                // Linux chooses the port (`ip_local_port_range` in ip(7)), the resolver library the id.
                let port = 32_768 + (number >> 32) % 28_232;
                let query = Query::sent(&&[7; 34][..], ip, (port as u16, 53), number as u16);
                let set = query.expect("long enough").set();
                counts[(set / PENDING_WAYS) as usize] += 1;
            }
            let most = counts.iter().max().copied();
            assert!(most <= Some(PENDING_WAYS), "{burst}: {counts:?}");
        }
    }

    #[test]
    fn a_query_is_itself_alone() {
        let frame: [u8; 54] = core::array::from_fn(|at| at as u8);
        let ip = |version| IpHeader { version, l3: 14 };
        let sent = |frame: &[u8], version, ports, id| {
            Query::sent(&frame, ip(version), ports, id).expect("long enough")
        };
        let query = sent(&frame, Version::V4, (1, 2), 3);
        assert!(query.is(&query));
        let mut other = frame;
        other[29] ^= 1;
        for other in [
            sent(&other, Version::V4, (1, 2), 3),
            sent(&frame, Version::V6, (1, 2), 3),
            sent(&frame, Version::V4, (2, 1), 3),
            sent(&frame, Version::V4, (1, 2), 4),
        ] {
            assert!(!query.is(&other), "{other:?}");
        }
    }
}
