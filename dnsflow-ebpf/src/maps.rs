//! The maps and constants that the agent and the programs share, by name.
//!
//! # Values of one CPU
//!
//! The programs keep their working data in values that belong to one CPU. They run with bottom halves off
//! (`__dev_queue_xmit` and `process_backlog` in Linux net/core/dev.c), so no other packet comes in between on this
//! CPU. A kernel with `CONFIG_PREEMPT_RT` takes a lock of the CPU for this (`__local_bh_disable_ip` in
//! kernel/softirq.c). Since Linux 6.18, it has the lock only with `CONFIG_PREEMPT_RT_NEEDS_BH_LOCK`. Without the
//! lock, two packets of one CPU can share these values: the program may judge one packet by the bytes of the other,
//! or hand these bytes over with it. Memory stays in bounds, because the verifier bounds each access. dnsflow is not
//! made for such kernels.
//!
//! # Elements of a hash map
//!
//! A looked-up element can belong to another key before the program has read it. The kernel reuses removed and
//! replaced elements at once, and does not wait for programs that still read them (in Linux kernel/bpf/hashtab.c,
//! `free_htab_elem` for preallocated elements, `prealloc_lru_pop` for those of LRU maps). Before Linux 6.1, it waits
//! in maps without preallocation (`BPF_F_NO_PREALLOC`); since then, not even there (`htab_elem_free` calls
//! `bpf_mem_cache_free`). While the program runs, the memory stays that of an element of the map: it goes back to the
//! rest of the kernel only after a grace period (kernel/bpf/memalloc.c). So a value that lets a packet pass says whose it
//! is, in the word that lets it pass ([`KeyedMark`](dnsflow_common::key::KeyedMark)).

use core::arch::asm;

use crate::{found::Found, opening::Opening};
use aya_ebpf::{
    Global,
    bindings::BPF_F_NO_PREALLOC,
    helpers::generated::bpf_get_smp_processor_id,
    macros::map,
    maps::{
        Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, Queue, RingBuf,
        lpm_trie::Key,
    },
};
use dnsflow_common::{
    Reason,
    key::{
        ADDRESS_WORDS, Address, AddressBit, AttemptKey, CLASSES_MAX, Class, ClassKey, ENTRIES_MAX,
        Entry, EntryKey, FRAGMENTS_MAX, FragmentKey, HELD_MAX, HeldKey, NAME_SETS_MAX, NAMES_MAX,
        NETWORKS_MAX, NameKey, NetworkKey, PENDING_MAX, Pending, RESOLVERS_MAX, ResolverKey,
        SHARES_MAX, SOURCES_MAX, Share, SlotKey, SourceKey, SourceMac,
    },
    question::Buffer,
    record::{ASIDE_BYTES, ATTEMPTS_MAX, DEFERRED_MAX, Deferred, MAX_CAPTURE, RecordHeader},
    walk::{PORTS_MAX, Ports, ServerPorts, Version},
};

/// A record while it is put together.
#[repr(C)]
pub struct Scratch {
    /// The header.
    pub header: RecordHeader,
    /// The captured bytes.
    pub frame: [u8; MAX_CAPTURE],
}

/// Records for the agent. It sets the size when it loads the programs.
#[map]
pub static RECORDS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// Attempts of the watched interfaces, and the answers to them that no rule mentions, for a thread that
/// opens nothing.
#[map]
pub static ASIDE: RingBuf = RingBuf::with_byte_size(ASIDE_BYTES, 0);

/// The interfaces whose attempts the agent is told of: those of pods behind an EgressFirewall.
#[map]
pub static WATCHED: HashMap<u32, u8> = HashMap::with_max_entries(NAME_SETS_MAX, 0);

/// The interfaces of pods whose names are recorded: the agent is handed every answer.
#[map]
pub static RECORDED: HashMap<u32, u8> = HashMap::with_max_entries(NAME_SETS_MAX, 0);

/// When the agent was last told of an attempt, in nanoseconds of `CLOCK_MONOTONIC`.
#[map]
pub static ATTEMPTS: LruHashMap<AttemptKey, u64> = LruHashMap::with_max_entries(ATTEMPTS_MAX, 0);

/// Answers that no rule mentions, the newest ones: a rule may come.
#[map]
pub static DEFERRED: Queue<Deferred> = Queue::with_max_entries(DEFERRED_MAX, 0);

/// Until when answers may be held, in nanoseconds of `CLOCK_MONOTONIC`: the agent moves it on as
/// long as it is well.
#[map]
pub static HOLD_UNTIL: Array<u64> = Array::with_max_entries(1, 0);

/// The program that takes answers off the wire. Not pinned: when the agent, which alone has it open, ends in whatever
/// way, the kernel takes the program out (`prog_array_map_clear` in Linux `kernel/bpf/arraymap.c`).
#[map]
pub static HOLDERS: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Until when frames are captured, likewise; zero without an end. The programs can outlive their agent.
#[map]
pub static CAPTURE_UNTIL: Array<u64> = Array::with_max_entries(1, 0);

/// One record per CPU, by its number; the agent sets how many there are. Not a per-CPU array: its
/// values may not be longer than 32 KiB (`PCPU_MIN_UNIT_SIZE`, Linux `include/linux/percpu.h`).
#[map]
static SCRATCH: Array<Scratch> = Array::with_max_entries(1, 0);

/// This CPU's record, which [no other CPU uses](self#values-of-one-cpu).
#[inline(always)]
pub fn scratch() -> Option<*mut Scratch> {
    // SAFETY: the helper takes nothing and only tells a number.
    SCRATCH.get_ptr_mut(unsafe { bpf_get_smp_processor_id() } as u32)
}

/// The question that is looked at.
#[map]
pub static QUESTION: PerCpuArray<Buffer> = PerCpuArray::with_max_entries(1, 0);

/// What the walk found.
#[map]
pub static FOUND: PerCpuArray<Found> = PerCpuArray::with_max_entries(1, 0);

/// Packets to the pods, by [`Reason::index`].
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Reason::COUNT, 0);

/// Packets from the pods, by [`Reason::index`].
#[map]
pub static QUERY_COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Reason::COUNT, 0);

/// The trusted resolvers.
#[map]
pub static RESOLVERS: HashMap<ResolverKey, u8> = HashMap::with_max_entries(RESOLVERS_MAX, 0);

/// The addresses of the pods' ports, with the Ethernet address that belongs to each.
#[map]
pub static SOURCES: HashMap<SourceKey, SourceMac> = HashMap::with_max_entries(SOURCES_MAX, 0);

/// The queries that wait for their answers, in slots of their interface. The agent removes those of interfaces that are
/// gone. An LRU map: if it is full, old queries make room. Its layout is
/// [`PENDING_LAYOUT`](dnsflow_common::key::PENDING_LAYOUT).
#[map]
pub static PENDING: LruHashMap<SlotKey, Pending> = LruHashMap::with_max_entries(PENDING_MAX, 0);

/// What each interface may still hand to the agent. Not an LRU map: a share that gives way begins anew, with all of its
/// burst and without the packets that were left out. LRU maps drop entries long before they are full if there are many
/// CPUs, because each of them sets 128 aside (`bpf_common_lru_pop_free` in Linux kernel/bpf/bpf_lru_list.c). The agent
/// removes the shares of interfaces that are gone.
#[map]
pub static SHARES: HashMap<u32, Share> = HashMap::with_max_entries(SHARES_MAX, 0);

/// Until when the agent reads the ring buffer for certain, in nanoseconds of `CLOCK_MONOTONIC`: it moves that on.
/// Beyond, no share of the ring buffer comes back.
#[map]
pub static READ_UNTIL: Array<u64> = Array::with_max_entries(1, 0);

/// When a frame was held, in nanoseconds of `CLOCK_MONOTONIC`. An interface whose share is used up adds none, so none
/// pushes out the others'.
#[map]
pub static HELD: LruHashMap<HeldKey, u64> = LruHashMap::with_max_entries(HELD_MAX, 0);

/// Until when answers count at an interface although their question was not seen, in nanoseconds
/// of `CLOCK_MONOTONIC`: the program for questions may have come too late for it. The agent removes the entries of
/// interfaces that are gone.
#[map]
pub static UNASKED_UNTIL: HashMap<u32, u64> = HashMap::with_max_entries(NAME_SETS_MAX, 0);

/// When the first fragment of a datagram was captured, in nanoseconds of `CLOCK_MONOTONIC`. As with [`HELD`], no
/// interface pushes out the others'.
#[map]
pub static FRAGMENTS: LruHashMap<FragmentKey, u64> = LruHashMap::with_max_entries(FRAGMENTS_MAX, 0);

/// The name set of an interface, with [`NAME_SET_EMPTY`] where it has no names, and [`NAME_SET_UNHELD`] where no answer
/// is held. An interface that is not here has no filter.
///
/// [`NAME_SET_EMPTY`]: dnsflow_common::key::NAME_SET_EMPTY
/// [`NAME_SET_UNHELD`]: dnsflow_common::key::NAME_SET_UNHELD
#[map]
pub static NAME_SETS: HashMap<u32, u32> = HashMap::with_max_entries(NAME_SETS_MAX, 0);

/// The addresses that pods may reach by a group. The agent adds and removes entries, and
/// [`dnsflow_open`](crate::dnsflow_open) adds some. Not an LRU map: an entry in use would go for one that nobody uses.
/// Each entry is allocated when it is added, so that a node without entries pays for none. Its layout is
/// [`ENTRY_LAYOUT`](dnsflow_common::key::ENTRY_LAYOUT).
#[map]
pub static ENTRIES: HashMap<EntryKey, Entry> =
    HashMap::with_max_entries(ENTRIES_MAX, BPF_F_NO_PREALLOC);

/// How many entries the programs have made at each interface, since the agent knows the interface. The programs alone
/// count.
#[map]
static ENTRIES_MADE: HashMap<u32, u64> =
    HashMap::with_max_entries(NAME_SETS_MAX, BPF_F_NO_PREALLOC);

/// How many they may have made. The agent alone says it, so that no count is lost between the two. Where it says nothing,
/// they make none.
#[map]
static ENTRIES_ALLOWED: HashMap<u32, u64> =
    HashMap::with_max_entries(NAME_SETS_MAX, BPF_F_NO_PREALLOC);

/// Whether the program may make so many entries at an interface. Packets on several CPUs may each get this room.
#[inline(always)]
pub fn may_make_entries(ifindex: u32, count: u64) -> bool {
    // SAFETY: the values are words, of this key or of another one (see above).
    let (made, allowed) = unsafe { (ENTRIES_MADE.get(&ifindex), ENTRIES_ALLOWED.get(&ifindex)) };
    match (made, allowed) {
        (Some(made), Some(allowed)) => made + count <= *allowed,
        _ => false,
    }
}

/// Counts entries that the program makes at an interface. Those that it takes back stay counted until the agent counts
/// anew.
#[inline(always)]
pub fn count_entries(ifindex: u32, count: u64) {
    if let Some(made) = ENTRIES_MADE.get_ptr_mut(&ifindex) {
        // `BPF_ATOMIC | BPF_ADD` (Linux Documentation/bpf/standardization/instruction-set.rst): another CPU may count for
        // the same interface. The core library has no such addition for this target.
        // SAFETY: the memory stays that of an element of this map, whose values are aligned words.
        unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) made, in(reg) count) };
    }
}

/// Where the class of a name is in [`CLASSES`].
#[map]
pub static CLASS_PLACES: HashMap<ClassKey, u32> =
    HashMap::with_max_entries(CLASSES_MAX, BPF_F_NO_PREALLOC);

/// The classes whose addresses [`dnsflow_open`](crate::dnsflow_open) opens. An array, because the elements of a hash
/// map [may be those of other keys](self#elements-of-a-hash-map).
#[map]
pub static CLASSES: Array<Class> = Array::with_max_entries(CLASSES_MAX, 0);

/// The networks whose addresses it does not open.
#[map]
static NETWORKS: LpmTrie<NetworkKey, u8> = LpmTrie::with_max_entries(NETWORKS_MAX, 0);

/// The bits of single addresses that it does not open.
#[map]
static ADDRESSES: Array<u64> = Array::with_max_entries(ADDRESS_WORDS, 0);

/// Whether the address is in one of the networks, or has the bit of a single one.
#[inline(always)]
pub fn is_refused(version: Version, address: Address) -> bool {
    /// The key of the trie, whose fields are words.
    #[repr(C)]
    struct Aligned(u32, NetworkKey);

    let (prefix_len, network) = NetworkKey::told(version, address);
    let key = Aligned(prefix_len, network);
    // SAFETY: both have the same fields, without padding, and a pointer to one need not be aligned.
    let key: &Key<NetworkKey> = unsafe { &*(&raw const key).cast() };
    let AddressBit { word, mask } = AddressBit::told(version, address);
    let has_bit = ADDRESSES.get(word).is_none_or(|word| word & mask != 0);
    has_bit || NETWORKS.get(key).is_some()
}

/// The answer whose addresses are to be opened.
#[map]
pub static OPENING: PerCpuArray<Opening> = PerCpuArray::with_max_entries(1, 0);

/// The program that opens. It is pinned if links are: then the programs go on to open when the agent has ended.
#[map]
pub static OPENERS: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// The names of all name sets.
#[map]
pub static NAMES: HashMap<NameKey, u8> = HashMap::with_max_entries(NAMES_MAX, 0);

/// The ports that DNS servers answer from; the agent may set others before it loads the programs.
#[unsafe(no_mangle)]
static DNS_PORTS: Global<[u16; PORTS_MAX]> = Global::new(*Ports::DNS.as_array());

/// The mark (`SO_MARK`, socket(7)) of frames that the agent puts back; zero means none.
#[unsafe(no_mangle)]
static RELEASE_MARK: Global<u32> = Global::new(0);

/// The bits of a packet's mark that say its group; zero if no packet is marked. The kernel removes the branches
/// that a constant decides.
#[unsafe(no_mangle)]
static MARK_MASK: Global<u32> = Global::new(0);

/// How long an entry lasts that the program makes, in seconds: at least, at most, and in addition to each.
#[unsafe(no_mangle)]
static ENTRY_TIMES: Global<[u32; 3]> = Global::new([0; 3]);

/// How long an entry lasts for an answer with this TTL, in nanoseconds.
#[inline(always)]
pub fn entry_time_ns(ttl: u32) -> u64 {
    let [least, most, more] = ENTRY_TIMES.load();
    let seconds = ttl.max(least).min(most);
    (u64::from(seconds) + u64::from(more)) * 1_000_000_000
}

/// Whether interfaces have shares; the agent may set zero before it loads the programs.
#[unsafe(no_mangle)]
static SHARED: Global<u32> = Global::new(1);

/// Whether each interface has a share of what the agent is handed.
#[inline(always)]
pub fn is_shared() -> bool {
    SHARED.load() != 0
}

/// The bits of the mark that say a packet's group; zero if no packet is marked.
#[inline(always)]
pub fn mark_mask() -> u32 {
    MARK_MASK.load()
}

/// Whether this is the mark of frames that the agent puts back.
#[inline(always)]
pub fn is_release_mark(mark: u32) -> bool {
    mark != 0 && mark == RELEASE_MARK.load()
}

/// The ports that the agent has set, read where they are needed.
pub struct DnsPorts;

impl ServerPorts for DnsPorts {
    #[inline(always)]
    fn contains(&self, port: u16) -> bool {
        Ports::from_array(DNS_PORTS.load()).contains(port)
    }
}

/// Counts a packet under its reason.
#[inline(always)]
pub fn count(counters: &PerCpuArray<u64>, reason: Reason) {
    if let Some(counter) = counters.get_ptr_mut(reason.index()) {
        // SAFETY: no other CPU uses the counter. Where another packet of this CPU may come in between (see above), one
        // of them may not be counted.
        unsafe { *counter += 1 };
    }
}
