//! What each pod was told: addresses, the names that lead to them, until when, and the limits.

pub mod snapshot;

mod ended;
mod standing;

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet},
    net::{IpAddr, Ipv6Addr},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
    time::Duration,
};

use ipnet::Ipv6Net;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::{
    Timestamp,
    cache::snapshot::{SavedEntry, SavedName, Snapshot},
    installed::{
        Batch, Enforced, Flows, GroupId, Groups, Installed, Place, ReadMark, Reading, Wanted,
        Written,
    },
    io::{
        input::{BatchId, MarkFound},
        output::Output,
        report::Report,
    },
    pods::ports::Ports,
    policy::plan::{Plan, Room, RuleInPlace},
    tools::{
        deadline::{self, Deadline, Why},
        shares::Shares,
    },
    values::{
        flow::{Cookie, FlowKey, Target},
        ids::PortId,
        limits::{
            CHANGES_UNDER_WAY_MAX, COUNTERS_DELAY_MAX, CacheLimits, FLOWS_PER_ADDRESS_MAX,
            LIMITS_REPORTED_MAX, Limit, MARK_SLACK, NAMES_PER_ADDRESS_MAX, UNJUDGED_DEFERRED_MAX,
        },
        name::{DomainName, FromEnd},
        resolver::ServerId,
    },
};

pub(crate) use ended::{End, EndedName, EndedNames};
use standing::{AtAddress, ByRules};
pub(crate) use standing::{Claim, Standing};

/// What every pod was told.
#[derive(Debug)]
pub(crate) struct Cache {
    limits: CacheLimits,
    ports: BTreeMap<PortId, PortCache>,
    /// The number of names of each port that a rule denies.
    denied_names: Shares<PortId>,
    /// The number of all other names of each port.
    other_names: Shares<PortId>,
    /// When each entry is looked at again ([`Entry::looked_at`]). Each entry has at most one item.
    /// The time may be earlier than the next end of the entry.
    due: BTreeSet<(Timestamp, PortId, IpAddr)>,
    /// The entries that are due. The switch has to tell first whether they are in use.
    undecided: BTreeSet<(PortId, IpAddr)>,
    /// With groups, the addresses that a load balancer leads to.
    backends: BTreeSet<(PortId, IpAddr)>,
    /// The ports that were told names before it was known whether a rule mentions the names, with the number of their
    /// answers that were deferred.
    unjudged: BTreeMap<PortId, usize>,
    /// The entries of an earlier run, by logical port, until the port comes.
    saved: BTreeMap<Arc<str>, Vec<SavedEntry>>,
    /// When they were taken over. The time that is left for a name is counted from then on.
    loaded_at: Timestamp,
    /// The entries in the snapshot of pods that are gone, by logical port, until the flows of the earlier run have been
    /// adopted. A snapshot has them as well: if this run ends before, the next one has to know whose the flows were.
    gone: BTreeMap<Arc<str>, Vec<SavedEntry>>,
    /// Their addresses.
    left_by_gone: HashSet<IpAddr>,
    /// Whether what an earlier run has left is adopted. Until then, not all rules may be known, and a name of the snapshot
    /// that was denied stays so.
    has_adopted: bool,
    /// The number of flows that entries have of their own.
    flows: usize,
    /// How many plans were made, for each port, that have not all flows of their rules.
    cut: BTreeMap<(PortId, Room), usize>,
    /// The next reading of counters.
    reading: CounterReading,
    /// The groups of the entries.
    groups: Groups,
    /// The number of changes so far of what a snapshot would hold.
    version: u64,
}

/// What one port was told.
#[derive(Debug, Default)]
struct PortCache {
    entries: HashMap<IpAddr, Entry>,
    /// Those addresses of the entries that are of IPv6, in order.
    ipv6: BTreeSet<Ipv6Addr>,
    /// For each name, the addresses whose entries have the name.
    addresses_of: BTreeMap<FromEnd, Addresses>,
    /// The addresses whose entries have adopted flows.
    adopting: BTreeSet<IpAddr>,
    /// What the snapshot says of the port.
    former: Former,
    /// The number of names that all addresses have together.
    names: usize,
    /// The number of those that a rule denies.
    denied_names: usize,
    /// The number of flows of their own that all addresses have together.
    flows: usize,
    /// The limits whose reports were given out.
    limits_reported: BTreeSet<Limit>,
    /// The last names that have ended.
    ended: EndedNames,
    /// The eviction candidates: the entries that mattered least when all entries were last looked
    /// at, with their importance, the least important last.
    candidates: Vec<(Importance, IpAddr)>,
    /// The same of the entries that may give up a denied name.
    denied_candidates: Vec<(Importance, IpAddr)>,
    /// The eviction candidates among the addresses of one name.
    of_name: Option<NameCandidates>,
    /// Upper bound for the number of addresses whose use is unknown: those that came after the last
    /// complete reading of counters had begun.
    uncounted: usize,
    /// The number of those that came after the reading under way had begun.
    uncounted_next: usize,
    /// The number of comparisons after which all entries had to stay.
    all_in_use_after: Option<u32>,
    /// Whether a look has found that all entries are denied, and no entry has changed since that is not.
    all_are_denied: bool,
    /// How often all entries were looked at to find the least important ones.
    #[cfg(test)]
    looks: usize,
}

/// Whose the flows of an earlier run are that are found for a port, as far as the snapshot says.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Former {
    /// The pod's: the snapshot has the pod.
    Same,
    /// Another pod's, which the snapshot has under the port's name.
    Another,
    /// The snapshot has no pod under the port's name. The pod may have come after the snapshot, or have the address of a
    /// pod that is gone.
    #[default]
    Unknown,
}

/// The addresses of a name that may make room for others of one answer.
#[derive(Debug)]
struct NameCandidates {
    name: DomainName,
    /// The time of the answer.
    at: Timestamp,
    addresses: Vec<IpAddr>,
}

/// The addresses of a name: mostly one.
type Addresses = SmallVec<[IpAddr; 1]>;

/// The importance of an entry, the least first: [`Installed::eviction_priority`], then the time at
/// which the entry is due.
type Importance = (u8, Option<Timestamp>);

/// Greater than every value of [`Installed::eviction_priority`].
const IN_USE: u8 = 2;
/// The importance of a name that no rule denies, beside one that a rule denies.
const BESIDE_DENIED: u8 = 3;

/// Who gives way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Yielding {
    /// Addresses that no rule denies and that are out of use.
    Unused,
    /// The same, or else addresses in use.
    Undenied,
    /// The same, or else names that no rule denies of addresses that a rule denies.
    Others,
    /// Names that a rule denies.
    Denied,
}

/// One entry of so many becomes a candidate when all are looked at.
const CANDIDATES_PART: usize = 16;

/// One address that a pod was told.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// The names that lead to the address, and until when.
    pub(crate) names: Names,
    /// The flows of an earlier run that were found in the switch, if any.
    pub(crate) adopted: Option<Box<Adopted>>,
    /// The flows that follow from names and rules.
    pub(crate) installed: Installed,
    /// Whether the address is never opened. Then only the rules count that deny it.
    pub(crate) is_refused: bool,
    /// Whether a load balancer leads to the address, or has done so since the pod was told it: an address that came and
    /// went as one would change flows each time.
    is_backend: bool,
    /// Whether a name was remembered over the budget, and no plan was made since.
    is_unplanned: bool,
    /// The room of the last plan, if not all flows of its rules were in it.
    pub(crate) cut: Option<Room>,
    /// When the entry is looked at again, if ever.
    looked_at: Option<Timestamp>,
}

/// Flows of an earlier run whose names are not known.
#[derive(Debug)]
pub(crate) struct Adopted {
    /// The flows, and their cookies.
    pub(crate) flows: BTreeMap<FlowKey, Cookie>,
    /// The rules that have given the flows ever since; `None` while the flows are being adopted. No other rule counts:
    /// no answer has said that the address is one of its names.
    pub(crate) rules: Option<Vec<RuleInPlace>>,
    /// Whether the flows are in the switch already, while they are being adopted.
    pub(crate) in_switch: bool,
    /// How long the flows are kept in any case.
    pub(crate) term: Term,
    /// Flows that allow are not kept for longer, used or not: their rule may have been edited while no agent ran.
    pub(crate) latest_end: Timestamp,
}

/// How long a name counts for an address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Term {
    /// A name that no rule denies counts until this time.
    pub(crate) until: Timestamp,
    /// A name that a rule denies counts at least until this time: afterwards the address would be
    /// open again.
    pub(crate) deny_until: Timestamp,
    /// Whether a rule denies the name. Then the name is kept to its end, whatever else has to go.
    pub(crate) is_denied: bool,
    /// What it counts by.
    pub(crate) origin: Origin,
    /// The server that has told it last, where that is known.
    pub(crate) server: Option<ServerId>,
}

// There is one for each name of each address of each pod.
const _: () = assert!(size_of::<Term>() == 24);

/// What a name counts by.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// An answer, within its TTL.
    Answer,
    /// An answer of an earlier run of the agent.
    Snapshot,
    /// The address is in use: the TTL is over.
    InUse,
}

impl Adopted {
    /// Whether flows that allow are kept no longer.
    pub(crate) fn is_late(&self, now: Timestamp) -> bool {
        self.latest_end <= now
    }
}

impl Term {
    /// When the name ends.
    pub(crate) fn end(&self) -> Timestamp {
        match self.is_denied {
            true => self.until.max(self.deny_until),
            false => self.until,
        }
    }

    /// Whether the name is one of the snapshot that was denied.
    fn is_saved_denial(&self) -> bool {
        self.is_denied && self.origin == Origin::Snapshot
    }

    /// Notes that a rule denies the name.
    pub(crate) fn deny(&mut self) {
        self.is_denied = true;
    }

    /// Notes that no rule denies the name any more. The name counts until this time at least, and no longer than
    /// if it were denied.
    fn release(&mut self, until: Timestamp) {
        self.is_denied = false;
        self.until = self.until.max(until.min(self.deny_until));
    }

    fn prolong(&mut self, other: Self) {
        self.origin = other.origin;
        self.server = other.server.or(self.server);
        self.until = self.until.max(other.until);
        self.deny_until = self.deny_until.max(other.deny_until);
        self.is_denied |= other.is_denied;
    }
}

/// An address to be learned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resolution<'a> {
    /// The port that was told.
    pub(crate) port: PortId,
    /// The address.
    pub(crate) address: IpAddr,
    /// The name that leads to it.
    pub(crate) name: &'a DomainName,
    /// How long the name counts.
    pub(crate) term: Term,
    /// Whether a rule denies the name that OVN may enforce later: all addresses of the name count.
    pub(crate) is_to_be_denied: bool,
    /// The rules of the name, once they were asked for ([`Learning::standing`]).
    pub(crate) standing: &'a OnceCell<Standing>,
}

/// A flow of an earlier run, for one address.
pub(crate) struct FormerFlow {
    /// The flow.
    pub(crate) key: FlowKey,
    /// Its cookie.
    pub(crate) cookie: Cookie,
    /// Whether it is in the switch. If not, a group has this flow for the address.
    pub(crate) in_switch: bool,
}

/// The step in which an address is learned.
pub(crate) struct Learning<'a> {
    /// The address.
    pub(crate) resolution: Resolution<'a>,
    /// Whose limits may be reached.
    pub(crate) whose: Whose<'a>,
    /// The rules of a name of the port, and of whether a rule denies the name.
    pub(crate) standing: &'a dyn Fn(&DomainName, bool) -> Standing,
    /// Gives another number when the rules for the port may be others.
    pub(crate) version: &'a dyn Fn() -> Option<u64>,
    /// The changes of flows.
    pub(crate) batch: &'a mut Batch,
    /// Counters and reports.
    pub(crate) out: &'a mut Output,
    /// Addresses that lose a name to make room.
    pub(crate) replan: Vec<(PortId, IpAddr)>,
}

/// When the counters are to be read.
#[derive(Debug, Default)]
struct CounterReading {
    /// In a comparison that begins at this time or later, if in any.
    at: Option<Timestamp>,
    /// Whether the switch is to be told.
    is_news: bool,
}

/// What came of a [`Resolution`].
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Learned {
    /// Whether the address did not have the name before.
    pub(crate) is_news: bool,
    /// Addresses that have lost a name to make room. The rest of their names is to be planned again.
    pub(crate) replan: Vec<(PortId, IpAddr)>,
    /// Whether the counters should be read soon, to know which addresses are in use.
    pub(crate) read_counters_soon: bool,
}

/// Namespace and logical port of a port; `None` if the rules of no namespace hold for the port.
pub(crate) type Whose<'a> = &'a dyn Fn(PortId) -> Option<(String, String)>;

impl Cache {
    /// An empty cache. `mark_mask`: the bits of the mark that say a packet's group, if addresses get groups.
    pub(crate) fn new(limits: CacheLimits, mark_mask: Option<u32>) -> Self {
        Self {
            limits,
            ports: BTreeMap::new(),
            denied_names: Shares::default(),
            other_names: Shares::default(),
            due: BTreeSet::new(),
            undecided: BTreeSet::new(),
            backends: BTreeSet::new(),
            unjudged: BTreeMap::new(),
            saved: BTreeMap::new(),
            loaded_at: Timestamp::default(),
            gone: BTreeMap::new(),
            left_by_gone: HashSet::new(),
            has_adopted: false,
            flows: 0,
            cut: BTreeMap::new(),
            reading: CounterReading::default(),
            groups: Groups::new(mark_mask),
            version: 0,
        }
    }

    // Ports.

    /// Adds a port. Returns what its pod was told in an earlier run: address, name and term.
    pub(crate) fn open(
        &mut self,
        port: PortId,
        name: &str,
        pod: Option<&str>,
    ) -> Vec<(IpAddr, DomainName, Term)> {
        let saved = self.saved.remove(name).unwrap_or_default();
        let loaded_at = self.loaded_at;
        let is_same = |saved: &SavedEntry| saved.pod.as_deref() == pod;
        let (saved, of_others): (Vec<_>, Vec<_>) = saved.into_iter().partition(is_same);
        let former = match (saved.is_empty(), of_others.is_empty()) {
            (_, false) => Former::Another,
            (true, true) => Former::Unknown,
            (false, true) => Former::Same,
        };
        self.note_gone(of_others);
        let cache = PortCache {
            former,
            ..PortCache::default()
        };
        self.ports.insert(port, cache);
        saved
            .into_iter()
            .flat_map(|saved| {
                let names = saved.names.into_iter();
                names.map(move |saved_name| {
                    let SavedName {
                        name,
                        rest,
                        deny_rest,
                        is_denied,
                    } = saved_name;
                    let term = Term {
                        until: loaded_at + rest,
                        deny_until: loaded_at + deny_rest,
                        is_denied,
                        origin: Origin::Snapshot,
                        server: None,
                    };
                    (saved.address, name, term)
                })
            })
            .collect()
    }

    /// Removes a port with all of its entries.
    pub(crate) fn close(&mut self, port: PortId, batch: &mut Batch) {
        let gone = self.ports.remove(&port);
        for (address, entry) in gone.into_iter().flat_map(|port| port.entries) {
            self.end_looks(port, address, &entry);
            self.flows -= entry.installed.len();
            self.close_entry(port, address, &entry, batch);
        }
        self.groups.closed(port);
        self.count_names(port);
        self.unjudged.remove(&port);
    }

    /// Forgets the ports of an earlier run that have not come back: all ports were opened. Their pods are gone.
    pub(crate) fn forget_saved(&mut self) {
        let saved = std::mem::take(&mut self.saved);
        self.note_gone(saved.into_values().flatten().collect());
    }

    /// Notes that the pods of these entries are gone. A snapshot has no more of them than names that all pods may have.
    fn note_gone(&mut self, entries: Vec<SavedEntry>) {
        if self.has_adopted || entries.is_empty() {
            return;
        }
        let known: usize = self.gone.values().map(Vec::len).sum();
        let most = self.limits.names_per_node_max.saturating_sub(known);
        for (place, entry) in entries.into_iter().enumerate() {
            self.left_by_gone.insert(entry.address);
            if place < most {
                let of_port = self.gone.entry(Arc::clone(&entry.port)).or_default();
                of_port.push(entry);
            }
        }
        self.version += 1;
    }

    /// The flows of the earlier run have been adopted or removed: nothing is left of pods that are gone.
    pub(crate) fn has_adopted_all(&mut self) {
        self.left_by_gone = HashSet::new();
        self.version += u64::from(!self.gone.is_empty());
        self.gone = BTreeMap::new();
        self.has_adopted = true;
    }

    /// The addresses of a port with a name of the snapshot that is denied.
    pub(crate) fn saved_denials(&self, port: PortId) -> Vec<IpAddr> {
        let entries = self.ports.get(&port).into_iter().flat_map(|p| &p.entries);
        let has_one = |entry: &Entry| entry.names.iter().any(|(_, term)| term.is_saved_denial());
        let denied = entries.filter(|(_, entry)| has_one(entry));
        denied.map(|(address, _)| *address).collect()
    }

    /// The number of addresses of a port.
    pub(crate) fn count(&self, port: PortId) -> usize {
        self.ports.get(&port).map_or(0, |port| port.entries.len())
    }

    // Entries.

    /// An entry, if there is one.
    pub(crate) fn entry(&self, port: PortId, address: IpAddr) -> Option<&Entry> {
        self.ports.get(&port)?.entries.get(&address)
    }

    /// The same, to be changed.
    pub(crate) fn entry_mut(&mut self, port: PortId, address: IpAddr) -> Option<&mut Entry> {
        self.ports.get_mut(&port)?.entries.get_mut(&address)
    }

    /// Notes that a flow of an earlier run was found. Returns `false` if the names of the address are known, if the flow is another pod's, or
    /// the port is gone.
    pub(crate) fn adopt(
        &mut self,
        (port, address): (PortId, IpAddr),
        flow: FormerFlow,
        term: Term,
        now: Timestamp,
    ) -> bool {
        let latest_end = now + self.limits.max_ttl;
        let FormerFlow {
            key,
            cookie,
            in_switch,
        } = flow;
        let port = self.ports.get_mut(&port);
        let is_own = |port: &PortCache| match port.former {
            Former::Same => true,
            Former::Another => false,
            Former::Unknown => !self.left_by_gone.contains(&address),
        };
        let Some(port) = port.filter(|port| is_own(port)) else {
            return false;
        };
        let entry = port.entry_or_new(address);
        if !entry.names.is_empty() {
            return false;
        }
        let adopted = entry.adopted.get_or_insert_with(|| {
            Box::new(Adopted {
                flows: BTreeMap::new(),
                rules: None,
                in_switch,
                term,
                latest_end,
            })
        });
        adopted.flows.insert(key, cookie);
        (adopted.rules, adopted.in_switch) = (None, in_switch);
        adopted.term = term;
        port.adopting.insert(address);
        port.changed(address);
        true
    }

    /// The addresses of a port that have adopted flows.
    pub(crate) fn adopting(&self, port: PortId) -> impl Iterator<Item = IpAddr> {
        let port = self.ports.get(&port).into_iter();
        port.flat_map(|port| port.adopting.iter().copied())
    }

    /// Every entry.
    pub(crate) fn entries_mut(&mut self) -> impl Iterator<Item = (PortId, IpAddr, &mut Entry)> {
        self.ports.iter_mut().flat_map(|(id, port)| {
            let entries = port.entries.iter_mut();
            entries.map(|(address, entry)| (*id, *address, entry))
        })
    }

    /// The addresses of a port.
    pub(crate) fn addresses(&self, port: PortId) -> Vec<IpAddr> {
        let port = self.ports.get(&port);
        port.map_or_else(Vec::new, |port| port.entries.keys().copied().collect())
    }

    /// The addresses of a port in a network of IPv6.
    pub(crate) fn addresses_in(
        &self,
        port: PortId,
        network: Ipv6Net,
    ) -> impl Iterator<Item = Ipv6Addr> {
        let port = self.ports.get(&port).into_iter();
        port.flat_map(move |port| port.ipv6.range(network.network()..=network.broadcast()))
            .copied()
    }

    /// How many flows should be in the switch.
    pub(crate) fn flow_count(&self) -> usize {
        self.flows + self.groups.flow_count()
    }

    /// How many names all addresses have.
    pub(crate) fn name_count(&self) -> usize {
        self.denied_names.total() + self.other_names.total()
    }

    /// Makes `plan` the flows of an entry.
    pub(crate) fn enforce(
        &mut self,
        port: PortId,
        address: IpAddr,
        plan: Plan,
        batch: &mut Batch,
    ) -> Enforced {
        let Some(of_port) = self.ports.get_mut(&port) else {
            return Enforced::default();
        };
        let Some(entry) = of_port.entries.get_mut(&address) else {
            return Enforced::default();
        };
        entry.is_unplanned = false;
        let place = entry.place(port, address);
        let adopted = entry.adopted.as_ref().filter(|adopted| adopted.in_switch);
        let wanted = Wanted {
            plan,
            adopted: adopted.map(|adopted| &adopted.flows),
        };
        let before = entry.installed.len();
        let groups = &mut self.groups;
        let enforced = entry.installed.enforce(place, wanted, groups, batch);
        let after = entry.installed.len();
        let has_adopted = entry.adopted.is_some();
        of_port.flows = of_port.flows + after - before;
        self.flows = self.flows + after - before;
        self.version += u64::from(enforced.changed);
        if has_adopted {
            self.forget_unruled(port, address);
        }
        self.prolong_mark(port, address, batch);
        enforced
    }

    /// How many flows of what an address has already may change if a name of it comes: those that it has by a mark get
    /// their place in the switch where a rule denies, and those that had no room may get some.
    pub(crate) fn changes_at_most(&self, port: PortId, address: IpAddr) -> usize {
        self.entry(port, address).map_or(0, |entry| {
            let of_mark = entry.installed.group();
            let of_mark = of_mark.and_then(|group| self.groups.flows(group));
            let without_room = entry.cut.map_or(0, |_| FLOWS_PER_ADDRESS_MAX);
            entry.installed.len() + of_mark.map_or(0, Flows::len) + without_room
        })
    }

    /// How many flows go at most where a port is told so many addresses of a name: of those that make room.
    pub(crate) fn removed_at_most(&self, id: PortId, name: &DomainName, addresses: usize) -> usize {
        let limits = &self.limits;
        let has_room = self.ports.get(&id).is_some_and(|port| {
            port.entries.len() + addresses <= limits.addresses_per_port_max
                && port.names + addresses <= limits.names_per_port_max()
                && port.of_name(name).len() + addresses <= limits.addresses_per_name_max
        });
        let node_has_room = self.name_count() + addresses <= limits.names_per_node_max
            && self.denied_names.total() + addresses <= limits.denied_names_per_node_max();
        match has_room && node_has_room {
            true => 0,
            false => self.flows.min(addresses * FLOWS_PER_ADDRESS_MAX),
        }
    }

    /// How many flows an address may have now.
    pub(crate) fn room(&self, port: PortId, address: IpAddr) -> Room {
        let Some(port) = self.ports.get(&port) else {
            return Room::Usual;
        };
        let own = port.entries.get(&address);
        let own = own.map_or(0, |entry| entry.installed.len());
        match port.flows - own < self.limits.flows_per_port_max() {
            true => Room::Usual,
            false => Room::Little,
        }
    }

    /// The plan of an address was made in this room; `is_cut`: not all flows of its rules are in it.
    pub(crate) fn planned(&mut self, port: PortId, address: IpAddr, room: Room, is_cut: bool) {
        if let Some(entry) = self.entry_mut(port, address) {
            entry.cut = is_cut.then_some(room);
            if is_cut {
                *self.cut.entry((port, room)).or_default() += 1;
            }
        }
    }

    /// Whether an address has more room than its last plan, in which not all flows of its rules were.
    pub(crate) fn has_room_again(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self.entry(port, address);
        let cut = entry.and_then(|entry| entry.cut);
        cut.is_some_and(|room| room < self.room(port, address))
    }

    /// How many plans were made since the last call that have not all flows of their rules.
    pub(crate) fn take_cut(&mut self) -> BTreeMap<(PortId, Room), usize> {
        std::mem::take(&mut self.cut)
    }

    fn close_entry(&mut self, port: PortId, address: IpAddr, entry: &Entry, batch: &mut Batch) {
        let place = entry.place(port, address);
        entry.installed.close(place, &mut self.groups, batch);
    }

    // Groups.

    /// The groups of the entries.
    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The same, to be changed.
    pub(crate) fn groups_mut(&mut self) -> &mut Groups {
        &mut self.groups
    }

    /// The flows that let a pod reach an address, and what they are for: flows of the address, or those of its
    /// group.
    pub(crate) fn flows_of<'a>(
        &'a self,
        address: IpAddr,
        entry: &'a Entry,
    ) -> Option<(Target, &'a Flows)> {
        match entry.installed.group() {
            None => Some((address.into(), entry.installed.own()?)),
            Some(id) => Some((self.groups.target(id)?, self.groups.flows(id)?)),
        }
    }

    /// The flows of a group, to be changed.
    pub(crate) fn group_flows_mut(&mut self, id: GroupId) -> Option<&mut Flows> {
        self.groups.flows_mut(id)
    }

    /// Whether flows that let a port reach an address must be restored.
    pub(crate) fn is_lost(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self.entry(port, address);
        entry.is_some_and(|entry| entry.installed.is_lost(&self.groups))
    }

    /// How what lets a port reach an address came into the switch; `None` if there is no such entry.
    pub(crate) fn written(&self, port: PortId, address: IpAddr) -> Option<Written> {
        let entry = self.entry(port, address)?;
        Some(entry.installed.written(&self.groups))
    }

    /// The batch that an address waits for to follow an edit ([`Installed::awaits`]).
    pub(crate) fn awaits(&self, port: PortId, address: IpAddr) -> Option<BatchId> {
        let entry = self.entry(port, address)?;
        entry.installed.awaits(&self.groups)
    }

    /// Packets of the port are marked at this interface from now on. Returns whether that is news: then all entries
    /// of the port are to be planned again.
    pub(crate) fn attached(&mut self, port: PortId, ifindex: u32, batch: &mut Batch) -> bool {
        let is_news = self.groups.attached(port, ifindex);
        if is_news {
            // The interface that the port had before is gone, and nothing passes it.
            self.mark(
                self.addresses(port)
                    .into_iter()
                    .map(|address| (port, address)),
                batch,
            );
        }
        is_news
    }

    /// The switch has confirmed a batch, but for flows that somebody else has (`is_foreign`): addresses whose groups
    /// are in force now get their marks.
    pub(crate) fn applied(
        &mut self,
        written_in: BatchId,
        is_foreign: impl Fn(&FlowKey) -> bool,
        batch: &mut Batch,
    ) {
        let marked = self.groups.written(written_in, is_foreign);
        self.mark(marked, batch);
    }

    /// A comparison has ended, likewise. Addresses that a load balancer leads to get flows in place of their marks, some
    /// at a time. Removes the flows of groups that no address has.
    pub(crate) fn compared(&mut self, comparison: u32, batch: &mut Batch) {
        let marked = self.groups.compared(comparison);
        self.mark(marked, batch);
        if self.groups.are_on() {
            self.replace_marks(comparison, batch);
        }
        self.groups.sweep(batch);
    }

    /// A load balancer leads to an address.
    pub(crate) fn note_backend(&mut self, port: PortId, address: IpAddr) {
        if self.groups.are_on()
            && let Some(entry) = self.entry_mut(port, address)
            && !std::mem::replace(&mut entry.is_backend, true)
        {
            self.backends.insert((port, address));
        }
    }

    /// At a start, takes flows of its own from an address that a load balancer leads to, if they were not sent: the kernel
    /// has a mark for the address. Returns whether it has. The address counts as one without a load balancer until
    /// [`Cache::note_backend`].
    pub(crate) fn give_up_unsent(&mut self, id: PortId, address: IpAddr) -> bool {
        let Some(port) = self.ports.get_mut(&id) else {
            return false;
        };
        let entry = port.entries.get_mut(&address);
        let entry = entry.filter(|entry| entry.is_backend && !entry.is_denied());
        let Some(entry) = entry.filter(|entry| entry.installed.is_unsent()) else {
            return false;
        };
        port.flows -= entry.installed.len();
        self.flows -= entry.installed.len();
        entry.installed = Installed::default();
        entry.is_backend = false;
        true
    }

    /// Removes the marks in whose place this comparison has found flows. Gives flows to addresses that a load balancer
    /// leads to, and that have nothing but a mark: as many as one pod may have under way. The last address overshoots
    /// that.
    fn replace_marks(&mut self, comparison: u32, batch: &mut Batch) {
        let before = batch.len();
        for (id, address) in std::mem::take(&mut self.backends) {
            let port = self.ports.get_mut(&id);
            let Some(entry) = port.and_then(|port| port.entries.get_mut(&address)) else {
                continue;
            };
            if !entry.is_backend {
                // Of a later entry.
                continue;
            }
            self.backends.insert((id, address));
            let place = entry.place(id, address);
            let groups = &mut self.groups;
            let is_removed = entry.installed.compared(place, comparison, groups, batch);
            self.version += u64::from(is_removed);
            if batch.len() - before < CHANGES_UNDER_WAY_MAX {
                self.replace_mark(id, address, batch);
            }
        }
    }

    /// Whether an address has nothing but a mark, and a load balancer leads to the address: then nothing is open behind
    /// the load balancer. The flows of such addresses take half of the port's room at most, so that they leave room to
    /// what the pod is told.
    pub(crate) fn lacks_flows(&self, port: PortId, address: IpAddr) -> bool {
        self.ports.get(&port).is_some_and(|port| {
            let entry = port.entries.get(&address);
            entry.is_some_and(Entry::lacks_flows)
                && port.flows < self.limits.flows_per_port_max() / 2
        })
    }

    /// Gives flows to an address that lacks them. Its mark stays until the switch has them.
    pub(crate) fn replace_mark(&mut self, port: PortId, address: IpAddr, batch: &mut Batch) {
        if self.lacks_flows(port, address)
            && let Some(of_port) = self.ports.get_mut(&port)
            && let Some(entry) = of_port.entries.get_mut(&address)
        {
            let place = entry.place(port, address);
            entry.installed.replace(place, &self.groups, batch);
            of_port.flows += entry.installed.len();
            self.flows += entry.installed.len();
            self.version += 1;
        }
    }

    fn mark(&mut self, addresses: impl IntoIterator<Item = (PortId, IpAddr)>, batch: &mut Batch) {
        let now = batch.now();
        for (port, address) in addresses {
            let entry = self
                .ports
                .get_mut(&port)
                .and_then(|p| p.entries.get_mut(&address));
            if let Some(entry) = entry.filter(|entry| entry.may_be_marked(now)) {
                let place = entry.place(port, address);
                entry.installed.mark(place, &mut self.groups, batch);
            }
        }
    }

    /// Makes sure that the mark of an address does not end before the agent has decided over the address. An address
    /// that had ended when its group came into force is marked now, if it has a name again.
    fn prolong_mark(&mut self, port: PortId, address: IpAddr, batch: &mut Batch) {
        let now = batch.now();
        let entry = self
            .ports
            .get_mut(&port)
            .and_then(|p| p.entries.get_mut(&address));
        if let Some(entry) = entry.filter(|entry| entry.may_be_marked(now)) {
            let place = entry.place(port, address);
            let needed = entry.ends_at() + MARK_SLACK / 2;
            let groups = &mut self.groups;
            entry.installed.prolong(place, needed, groups, batch);
        }
    }

    /// The kernel has refused a mark. The next plan gives the address flows of its own.
    pub(crate) fn mark_refused(&mut self, port: PortId, address: IpAddr, batch: &mut Batch) {
        let now = batch.now();
        self.groups.refused(now);
        let of_port = self.ports.get_mut(&port);
        if let Some(entry) = of_port.and_then(|of_port| of_port.entries.get_mut(&address)) {
            let place = entry.place(port, address);
            entry.installed.unmark(place, &mut self.groups, batch);
            self.version += 1;
        }
    }

    /// Compares a mark that the kernel has with the one that it should have, and sets that one if they differ, or
    /// removes it. `None` if the address should have none.
    pub(crate) fn mark_found(
        &mut self,
        port: PortId,
        found: &MarkFound,
        reading: Reading,
        batch: &mut Batch,
    ) -> Option<ReadMark> {
        let address = found.address;
        let entry = self.ports.get_mut(&port)?.entries.get_mut(&address)?;
        let place = entry.place(port, address);
        let read = entry.installed.read(found, reading, &self.groups)?;
        match read {
            ReadMark::Right | ReadMark::Former => {}
            ReadMark::Wrong => entry.installed.mark(place, &mut self.groups, batch),
            ReadMark::Over => entry.installed.remove_former(found, batch),
        }
        Some(read)
    }

    /// Decides over a mark of an earlier run, whose address has a group with another number, which is not in force. The
    /// mark stays until then, unless its number stands for a plan whose flows this comparison has not found: then it
    /// stood for another one. Returns whether the mark is removed.
    pub(crate) fn end_former(
        &mut self,
        port: PortId,
        found: &MarkFound,
        comparison: u32,
        batch: &mut Batch,
    ) -> bool {
        let groups = &mut self.groups;
        let number = groups.number_in(found.mark);
        let Some(port) = self.ports.get_mut(&port) else {
            return false;
        };
        let entry = port.entries.get_mut(&found.address);
        let Some(entry) = entry.filter(|entry| entry.installed.group() != number) else {
            return false;
        };
        let flows = number.and_then(|number| groups.flows(number));
        let is_another = flows.is_some_and(|flows| !flows.are_all_seen(comparison));
        match is_another {
            true => entry.installed.remove_former(found, batch),
            false => groups.keep_former(found.mark),
        }
        is_another
    }

    /// All marks are read. Sets those that are missing, and returns how many they are.
    pub(crate) fn marks_read(&mut self, reading: Reading, batch: &mut Batch) -> usize {
        let now = batch.now();
        self.groups.marks_read(reading);
        let mut missing = 0;
        for (id, port) in &mut self.ports {
            if self.groups.interface(*id).is_none() {
                continue;
            }
            for (address, entry) in &mut port.entries {
                if entry.may_be_marked(now) && entry.installed.is_unread(reading, &self.groups) {
                    let place = entry.place(*id, *address);
                    entry.installed.mark(place, &mut self.groups, batch);
                    missing += 1;
                }
            }
        }
        missing
    }

    /// Notes that rules may not mention all names of this port: the rules are not known yet.
    pub(crate) fn judge_later(&mut self, port: PortId) {
        if self.ports.contains_key(&port) {
            self.unjudged.entry(port).or_default();
        }
    }

    /// Whether one more answer to this port may be deferred before the rules are known.
    pub(crate) fn defer_unjudged(&mut self, port: PortId) -> bool {
        let deferred = self.unjudged.get_mut(&port);
        let room = deferred.filter(|deferred| **deferred < UNJUDGED_DEFERRED_MAX);
        room.map(|deferred| *deferred += 1).is_some()
    }

    /// Whether [`Cache::judge`] is to be called for some port.
    pub(crate) fn has_unjudged(&self) -> bool {
        !self.unjudged.is_empty()
    }

    /// The ports for which [`Cache::judge`] is to be called.
    pub(crate) fn unjudged(&self) -> Vec<PortId> {
        self.unjudged.keys().copied().collect()
    }

    /// Forgets the names of a port that no rule mentions. They have no flows.
    pub(crate) fn judge(&mut self, id: PortId, is_mentioned: impl Fn(&DomainName) -> bool) {
        self.unjudged.remove(&id);
        for address in self.addresses(id) {
            let Some(port) = self.ports.get_mut(&id) else {
                return;
            };
            let names = port.entries.get(&address).map(|entry| &entry.names);
            let names = names.into_iter().flat_map(Names::keys);
            let over: Vec<_> = names.filter(|name| !is_mentioned(name)).cloned().collect();
            for name in &over {
                port.forget_name(name, address);
            }
            let entry = port.entries.get(&address);
            if entry.is_some_and(Entry::is_over) {
                self.take(id, address);
            }
            self.count_names(id);
        }
    }

    /// Removes an entry, and what is kept elsewhere about the entry.
    fn take(&mut self, id: PortId, address: IpAddr) -> Option<Entry> {
        let entry = self.ports.get_mut(&id)?.take(address)?;
        self.end_looks(id, address, &entry);
        self.flows -= entry.installed.len();
        self.count_names(id);
        self.version += 1;
        Some(entry)
    }

    /// Removes an entry from those that are due.
    fn end_looks(&mut self, port: PortId, address: IpAddr, entry: &Entry) {
        if let Some(at) = entry.looked_at {
            self.due.remove(&(at, port, address));
        }
        self.undecided.remove(&(port, address));
    }

    /// Makes sure that an entry is looked at no later than its next end.
    pub(crate) fn look_in_time(&mut self, port: PortId, address: IpAddr) {
        let ports = &mut self.ports;
        let entry = ports
            .get_mut(&port)
            .and_then(|p| p.entries.get_mut(&address));
        let Some((entry, due)) = entry.and_then(|entry| entry.due().map(|due| (entry, due))) else {
            return;
        };
        if entry.looked_at.is_some_and(|at| at <= due) {
            return;
        }
        if let Some(late) = entry.looked_at.replace(due) {
            self.due.remove(&(late, port, address));
        }
        self.due.insert((due, port, address));
    }

    /// Updates the numbers of names of a port.
    fn count_names(&mut self, id: PortId) {
        let port = self.ports.get(&id);
        let (denied, names) = port.map_or((0, 0), |port| (port.denied_names, port.names));
        self.denied_names.set(id, denied);
        self.other_names.set(id, names - denied);
    }

    /// Notes for each name of an entry whether a rule denies the name ([`Names::deny`]). Returns whether a name may end
    /// earlier now.
    pub(crate) fn deny_names(
        &mut self,
        id: PortId,
        address: IpAddr,
        is_denied: impl Fn(&DomainName) -> bool,
        released: Timestamp,
    ) -> bool {
        let Some(port) = self.ports.get_mut(&id) else {
            return false;
        };
        let keeps = !self.has_adopted;
        let is_denied =
            |name: &DomainName, term: &Term| is_denied(name) || keeps && term.is_saved_denial();
        let may_end_earlier = port.change_names(address, |names| names.deny(is_denied, released));
        self.count_names(id);
        may_end_earlier.unwrap_or_default()
    }

    // What pods are told.

    /// The number of addresses of one answer that are looked at. If a rule denies the name, all of
    /// them have to be closed. Otherwise as many are enough as may be kept for one name.
    pub(crate) fn addresses_per_answer_max(&self, is_denied: bool) -> usize {
        match is_denied {
            false => self.limits.addresses_per_name_max,
            true => self.limits.addresses_per_port_max,
        }
    }

    /// Whether the port was told that this name leads to the address.
    pub(crate) fn knows(&self, port: PortId, address: IpAddr, name: &DomainName) -> bool {
        let entry = self.entry(port, address);
        entry.is_some_and(|entry| entry.names.until(name).is_some())
    }

    /// Whether an address has a name that was remembered over the budget, and opens nothing yet.
    pub(crate) fn is_unplanned(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self.entry(port, address);
        entry.is_some_and(|entry| entry.is_unplanned)
    }

    /// Notes that a name of an address was remembered over the budget.
    pub(crate) fn leave_unplanned(&mut self, port: PortId, address: IpAddr) {
        if let Some(entry) = self.entry_mut(port, address) {
            entry.is_unplanned = true;
        }
    }

    /// The term of an address that was told at `at` with this TTL.
    pub(crate) fn term(&self, at: Timestamp, ttl: Duration) -> Term {
        let CacheLimits {
            min_ttl,
            max_ttl,
            deny_ttl,
            ..
        } = self.limits;
        Term {
            until: at + ttl.max(min_ttl).min(max_ttl.max(min_ttl)),
            deny_until: at + deny_ttl,
            is_denied: false,
            origin: Origin::Answer,
            server: None,
        }
    }

    /// Notes that a name leads to an address.
    pub(crate) fn learn(&mut self, mut learning: Learning<'_>) -> Learned {
        let Resolution {
            port: port_id,
            address,
            name,
            term,
            ..
        } = learning.resolution;
        let mut learned = Learned::default();
        let Some(port) = self.ports.get_mut(&port_id) else {
            return learned;
        };
        if port.change_names(address, |names| names.prolong(name, term)) == Some(true) {
            self.count_names(port_id);
            self.version += 1;
            self.prolong_mark(port_id, address, learning.batch);
            return learned;
        }
        let at_address = self.at_address(&learning);
        if let AtAddress::Alike(alike) = at_address {
            self.prolong_alike(&alike, &mut learning);
            return learned;
        }
        let room = self.make_room(&at_address, &mut learning);
        learned.replan = std::mem::take(&mut learning.replan);
        if let Err(limit) = room {
            learned.read_counters_soon = !matches!(
                limit,
                Limit::NamesOfAddress(_) | Limit::DeniedAddresses | Limit::DeniedNamesOfNode
            );
            let now = learning.batch.now();
            let Learning { whose, out, .. } = learning;
            match limit {
                Limit::NamesOfAddress(_) => out.counters.names_dropped += 1,
                _ => out.counters.addresses_refused += 1,
            }
            self.leave_out((port_id, address), name, limit.clone(), now);
            self.limit_reached(port_id, limit, whose, out);
            return learned;
        }
        let Some(port) = self.ports.get_mut(&port_id) else {
            return learned;
        };
        learned.read_counters_soon = port.add(learning.resolution, &self.limits);
        self.version += 1;
        self.count_names(port_id);
        self.look_in_time(port_id, address);
        self.prolong_mark(port_id, address, learning.batch);
        learned.is_news = true;
        learned
    }

    /// What becomes of a further name of its address.
    fn at_address(&mut self, learning: &Learning<'_>) -> AtAddress {
        let Learning {
            resolution,
            standing,
            version,
            ..
        } = learning;
        let Resolution {
            port,
            address,
            name,
            term,
            ..
        } = resolution;
        // A snapshot has no more names of an address than there were.
        let is_saved = term.origin == Origin::Snapshot;
        let entry = self.entry_mut(*port, *address).filter(|_| !is_saved);
        let Some(entry) = entry.filter(|entry| entry.names.len() >= NAMES_PER_ADDRESS_MAX) else {
            return AtAddress::Room;
        };
        let by_rules = entry.names.by_rules(version(), standing);
        let further = || standing(name, term.is_denied);
        by_rules.at_address(resolution.standing.get_or_init(further))
    }

    /// A name of a full address stands for a further one that the same rules match: it counts for as long, and what is
    /// open or closed stays as it is.
    fn prolong_alike(&mut self, alike: &DomainName, learning: &mut Learning<'_>) {
        let Resolution {
            port: id,
            address,
            name,
            term,
            ..
        } = learning.resolution;
        if let Some(port) = self.ports.get_mut(&id) {
            port.change_names(address, |names| names.prolong(alike, term));
        }
        self.version += 1;
        self.prolong_mark(id, address, learning.batch);
        self.drop_name((id, address), name, learning);
    }

    /// Takes a name from a full address for a further one ([`ByRules::first_to_go`]).
    fn give_way_at_address(&mut self, learning: &mut Learning<'_>) {
        let Resolution {
            port: id, address, ..
        } = learning.resolution;
        let further = learning.resolution.standing.get();
        let names = self.entry_mut(id, address).map(|entry| &mut entry.names);
        let first = further.and_then(|further| names?.first_to_go(further));
        let Some((first, alike)) = first else {
            return;
        };
        self.drop_name((id, address), &first, learning);
        if let Some(port) = self.ports.get_mut(&id) {
            if let Some(alike) = alike {
                port.change_names(address, |names| names.stand_for(&alike, &first));
            }
            port.forget_name(&first, address);
        }
        self.count_names(id);
    }

    /// Counts a name for which a full address has no room.
    fn drop_name(
        &mut self,
        (id, address): (PortId, IpAddr),
        name: &DomainName,
        learning: &mut Learning<'_>,
    ) {
        let limit = Limit::NamesOfAddress(address);
        self.leave_out((id, address), name, limit, learning.batch.now());
        learning.out.counters.names_dropped += 1;
    }

    /// Makes room for one more name of an address, and for the address if it is new. Notes the addresses that
    /// have lost a name for that.
    ///
    /// # Errors
    ///
    /// The limit that leaves no room: all that is there may be in use, or is denied. Nobody has given way then, unless
    /// an address of the pod without a name has.
    fn make_room(
        &mut self,
        at_address: &AtAddress,
        learning: &mut Learning<'_>,
    ) -> Result<(), Limit> {
        let Resolution {
            port: id,
            address,
            name,
            term,
            is_to_be_denied,
            ..
        } = learning.resolution;
        let comparisons = learning.batch.comparisons();
        let limits = self.limits;
        let Some(port) = self.ports.get_mut(&id) else {
            return Ok(());
        };
        let is_denied = term.is_denied || is_to_be_denied;
        // A snapshot has no more addresses of a name than there were.
        let is_saved = term.origin == Origin::Snapshot;
        // First who gives way, so that nobody does in vain.
        if *at_address == AtAddress::Full {
            return Err(Limit::NamesOfAddress(address));
        }
        let gives_way = *at_address == AtAddress::GivesWay;
        let has_all = port.of_name(name).len() >= limits.addresses_per_name_max;
        let of_name = match has_all && !is_denied && !is_saved {
            false => None,
            true => {
                let candidate =
                    port.candidate_of_name(name, limits.idle_grace, learning.batch.now());
                Some(candidate.ok_or_else(|| Limit::AddressesOfName(name.clone()))?)
            }
        };
        let is_new = !port.entries.contains_key(&address);
        let is_full = is_new && port.entries.len() >= limits.addresses_per_port_max;
        let has_all_names =
            port.names >= limits.names_per_port_max() && of_name.is_none() && !gives_way;
        let yielding = match is_denied {
            true => Yielding::Undenied,
            false => Yielding::Unused,
        };
        let of_pod = match is_full || has_all_names {
            false => None,
            true => port.candidate(
                yielding,
                limits.idle_grace,
                comparisons,
                learning.batch.now(),
            ),
        };
        match of_pod {
            None if is_full => return Err(self.limit_of_pod(id)),
            None if has_all_names => return Err(Limit::NamesOfPod),
            _ => {}
        }
        self.make_room_for_denied(learning)?;
        if let Some(candidate) = of_name {
            let limit = Limit::AddressesOfName(name.clone());
            self.give_up_name((id, candidate), name, limit, learning);
        }
        if gives_way {
            self.give_way_at_address(learning);
            return Ok(());
        }
        if let Some(candidate) = of_pod {
            let limit = match is_full {
                true => Limit::AddressesOfPod,
                false => Limit::NamesOfPod,
            };
            self.give_up((id, candidate), yielding, limit, learning);
        }
        self.make_room_on_node(learning)
    }

    /// Makes room for one more name that a rule denies, among all of the node. The port that has most of them gives one
    /// up, unless this one would have as many then: no pod pushes out what is denied for itself, and pods that push out
    /// each other's come to an end.
    fn make_room_for_denied(&mut self, learning: &mut Learning<'_>) -> Result<(), Limit> {
        let Resolution { port, term, .. } = learning.resolution;
        let denied = &self.denied_names;
        if !term.is_denied || denied.total() < self.limits.denied_names_per_node_max() {
            return Ok(());
        }
        let limit = Limit::DeniedNamesOfNode;
        let most = denied.most();
        let most = most.filter(|most| denied.of(port) + 1 < denied.of(*most));
        let most = most.ok_or_else(|| limit.clone())?;
        self.give_way(most, Yielding::Denied, limit, learning)
    }

    /// Makes room for one more name among all of the node. The port that has most gives way, used or not; if it is this
    /// one, what it does not use. Names that a rule denies are not concerned, unless an edit has denied more than their
    /// share.
    fn make_room_on_node(&mut self, learning: &mut Learning<'_>) -> Result<(), Limit> {
        let Resolution { port, term, .. } = learning.resolution;
        if self.name_count() < self.limits.names_per_node_max {
            return Ok(());
        }
        let (denied, others) = (&self.denied_names, &self.other_names);
        let over = denied.total() > self.limits.denied_names_per_node_max();
        if let Some(most) = denied.most().filter(|_| over) {
            let limit = Limit::DeniedNamesOfNode;
            return self.give_way(most, Yielding::Denied, limit, learning);
        }
        let most = others.most().unwrap_or(port);
        let has_more = others.of(port) + 1 < others.of(most);
        let (most, yielding) = match term.is_denied || has_more {
            true => (most, Yielding::Others),
            false => (port, Yielding::Unused),
        };
        self.give_way(most, yielding, Limit::NamesOfNode, learning)
    }

    /// The limit that leaves no room among the addresses of a port: they are in use, or all are
    /// denied.
    fn limit_of_pod(&self, id: PortId) -> Limit {
        match self.ports.get(&id).is_some_and(|port| port.all_are_denied) {
            true => Limit::DeniedAddresses,
            false => Limit::AddressesOfPod,
        }
    }

    /// Forgets of a port what matters least, because of a limit.
    ///
    /// # Errors
    ///
    /// The limit, if nothing gives way.
    fn give_way(
        &mut self,
        id: PortId,
        yielding: Yielding,
        limit: Limit,
        learning: &mut Learning<'_>,
    ) -> Result<(), Limit> {
        let comparisons = learning.batch.comparisons();
        let idle_grace = self.limits.idle_grace;
        let port = self.ports.get_mut(&id);
        let address = port
            .and_then(|port| {
                port.candidate(yielding, idle_grace, comparisons, learning.batch.now())
            })
            .ok_or_else(|| limit.clone())?;
        self.give_up((id, address), yielding, limit, learning);
        Ok(())
    }

    /// Forgets an address because of a limit; or one of its names, if only that gives way, or if the address is the one
    /// that is learned.
    fn give_up(
        &mut self,
        (id, address): (PortId, IpAddr),
        yielding: Yielding,
        limit: Limit,
        learning: &mut Learning<'_>,
    ) {
        let Some(entry) = self.entry(id, address) else {
            return;
        };
        let Resolution {
            port,
            address: learned,
            ..
        } = learning.resolution;
        let name = match yielding {
            Yielding::Denied => entry.names.least_denied(),
            _ if entry.is_denied() || (id, address) == (port, learned) => entry.names.least(),
            _ => None,
        };
        if let Some(name) = name {
            self.give_up_name((id, address), &name, limit, learning);
            return;
        }
        let names: Vec<DomainName> = entry.names.keys().cloned().collect();
        for name in &names {
            self.leave_out((id, address), name, limit.clone(), learning.batch.now());
        }
        self.evicted(id, address, limit, learning);
        if let Some(entry) = self.take(id, address) {
            self.close_entry(id, address, &entry, learning.batch);
        }
    }

    /// Takes a name from an address because of a limit.
    fn give_up_name(
        &mut self,
        (id, address): (PortId, IpAddr),
        name: &DomainName,
        limit: Limit,
        learning: &mut Learning<'_>,
    ) {
        self.leave_out((id, address), name, limit.clone(), learning.batch.now());
        self.evicted(id, address, limit, learning);
        if let Some(port) = self.ports.get_mut(&id) {
            port.forget_name(name, address);
        }
        self.count_names(id);
        self.end_expired(id, address, learning.batch);
        learning.replan.push((id, address));
    }

    /// Counts an address that makes room because of a limit, and reports the limit if the address is open.
    fn evicted(&mut self, id: PortId, address: IpAddr, limit: Limit, learning: &mut Learning<'_>) {
        learning.out.counters.addresses_evicted += 1;
        let entry = self.entry(id, address);
        if entry.is_some_and(|entry| !entry.installed.is_empty()) {
            self.limit_reached(id, limit, learning.whose, learning.out);
        }
    }

    /// Reports a limit that keeps an allowed address closed, or a denied one open. The limit is
    /// reported again only after its port was far below it.
    pub(crate) fn limit_reached(
        &mut self,
        id: PortId,
        limit: Limit,
        whose: Whose<'_>,
        out: &mut Output,
    ) {
        let max = self.limits.of(&limit);
        let Some(reported) = self
            .ports
            .get_mut(&id)
            .map(|port| &mut port.limits_reported)
        else {
            return;
        };
        if reported.contains(&limit) {
            return;
        }
        let Some((namespace, port)) = whose(id) else {
            return;
        };
        if reported.len() >= LIMITS_REPORTED_MAX {
            reported.clear();
        }
        reported.insert(limit.clone());
        let report = Report::LimitReached {
            namespace,
            port,
            limit,
            max,
        };
        out.report_of_pod(id, report);
    }

    /// Remembers that a limit left no room for what a port was told.
    pub(crate) fn leave_out(
        &mut self,
        (id, address): (PortId, IpAddr),
        name: &DomainName,
        limit: Limit,
        now: Timestamp,
    ) {
        if let Some(port) = self.ports.get_mut(&id) {
            port.ended.push(EndedName {
                address,
                name: name.clone(),
                at: now,
                why: End::Limit(limit),
            });
        }
    }

    /// The counters of all flows that there are now are to be read, unless a reading is planned already. It does not tell
    /// the use of addresses that come from now on.
    pub(crate) fn read_counters_soon(&mut self, now: Timestamp) {
        if self.reading.at.is_none() {
            self.reading = CounterReading {
                at: Some(now + COUNTERS_DELAY_MAX),
                is_news: true,
            };
            for port in self.ports.values_mut() {
                port.uncounted_next = 0;
            }
        }
    }

    /// From when on the counters are to be read, if that is news since the last call.
    pub(crate) fn take_reading(&mut self) -> Option<Timestamp> {
        let is_news = std::mem::take(&mut self.reading.is_news);
        self.reading.at.filter(|_| is_news)
    }

    /// Counters were read, from `since` on. If that is late enough, the use of all addresses is known that were there when
    /// the reading was planned.
    pub(crate) fn counters_read(&mut self, since: Timestamp) {
        if self.reading.at.take_if(|at| *at <= since).is_some() {
            for port in self.ports.values_mut() {
                port.uncounted = port.uncounted_next;
            }
        }
    }

    // What ends.

    /// When [`Cache::expire`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        deadline::at(self.due.first().map(|(at, ..)| *at), Why::Expiry)
    }

    /// Looks at the entries that are due. Entries without flows end. The others are decided over
    /// when the switch has told whether they are in use ([`Cache::take_undecided`]).
    pub(crate) fn expire(&mut self, batch: &mut Batch) {
        let now = batch.now();
        while let Some(&(at, port, address)) = self.due.first() {
            if at > now {
                break;
            }
            self.due.pop_first();
            let Some(entry) = self.entry_mut(port, address) else {
                continue;
            };
            entry.looked_at = None;
            match entry.due() {
                Some(due) if due > now => self.look_in_time(port, address),
                _ if entry.installed.is_empty() => self.end_expired(port, address, batch),
                _ => {
                    self.undecided.insert((port, address));
                }
            }
        }
    }

    /// Takes the entries that [`Cache::decide`] is to be called for. To be called when the use of
    /// their flows is known.
    pub(crate) fn take_undecided(&mut self) -> BTreeSet<(PortId, IpAddr)> {
        std::mem::take(&mut self.undecided)
    }

    /// Decides over an entry that is due. A name stays while its flows are in use; `plan_of`
    /// returns the flows of a name.
    pub(crate) fn decide(
        &mut self,
        port: PortId,
        address: IpAddr,
        mut plan_of: impl FnMut(&DomainName) -> Option<Plan>,
        batch: &mut Batch,
    ) {
        let now = batch.now();
        let idle_grace = self.limits.idle_grace;
        let Some(entry) = self.entry_mut(port, address) else {
            return;
        };
        let mut extended = Vec::new();
        for (name, term) in entry.names.iter().filter(|(_, term)| term.end() <= now) {
            let used_at = plan_of(name).and_then(|plan| entry.installed.used_at(&plan));
            let in_use = used_at.map(|used_at| used_at + idle_grace);
            if let Some(in_use) = in_use.filter(|in_use| *in_use > now) {
                let until = in_use.max(term.until);
                let origin = Origin::InUse;
                let term = Term {
                    until,
                    origin,
                    ..*term
                };
                extended.push((name.clone(), term));
            }
        }
        for (name, term) in extended {
            entry.names.insert(name, term);
        }
        if let Some(adopted) = &mut entry.adopted
            && adopted.term.end() <= now
        {
            let used_at = entry.installed.keys_used_at(adopted.flows.keys());
            let in_use = used_at.map(|used_at| used_at + idle_grace);
            let in_use = in_use.map(|in_use| match adopted.is_late(now) {
                true => in_use,
                false => in_use.min(adopted.latest_end),
            });
            adopted.term.until = in_use
                .filter(|in_use| *in_use > now)
                .unwrap_or(adopted.term.until);
        }
        self.end_expired(port, address, batch);
    }

    /// Removes what has expired of an entry, and an entry that nothing holds any more.
    fn end_expired(&mut self, port_id: PortId, address: IpAddr, batch: &mut Batch) {
        let now = batch.now();
        let Some(port) = self.ports.get_mut(&port_id) else {
            return;
        };
        let Some(entry) = port.entries.get_mut(&address) else {
            return;
        };
        entry.adopted.take_if(|adopted| adopted.term.end() <= now);
        if entry.adopted.is_none() {
            port.adopting.remove(&address);
        }
        let expired =
            |(name, term): (&DomainName, &Term)| (term.end() <= now).then(|| name.clone());
        let expired: Vec<DomainName> = entry.names.iter().filter_map(expired).collect();
        for name in expired {
            port.forget_name(&name, address);
            port.ended.push(EndedName {
                address,
                name,
                at: now,
                why: End::Expired,
            });
        }
        port.changed(address);
        let is_over = port.entries.get(&address).is_some_and(Entry::is_over);
        self.count_names(port_id);
        if !is_over {
            self.look_in_time(port_id, address);
            self.prolong_mark(port_id, address, batch);
        } else if let Some(entry) = self.take(port_id, address) {
            self.close_entry(port_id, address, &entry, batch);
        }
    }

    /// Forgets the adopted flows of an entry that its plan does not have, for good: a rule that comes later does not
    /// bring them back. Removes an entry that nothing holds any more.
    fn forget_unruled(&mut self, port_id: PortId, address: IpAddr) {
        let Some(port) = self.ports.get_mut(&port_id) else {
            return;
        };
        let Some(entry) = port.entries.get_mut(&address) else {
            return;
        };
        let Some(mut adopted) = entry.adopted.take() else {
            return;
        };
        let flows = match entry.installed.group() {
            None => entry.installed.own(),
            Some(id) => self.groups.flows(id),
        };
        adopted
            .flows
            .retain(|key, cookie| flows.is_some_and(|flows| flows.has(key, *cookie)));
        adopted.in_switch = false;
        entry.adopted = Some(adopted).filter(|adopted| !adopted.flows.is_empty());
        if entry.adopted.is_none() {
            port.adopting.remove(&address);
        }
        let is_over = entry.is_over();
        port.changed(address);
        if is_over {
            self.take(port_id, address);
        } else {
            self.look_in_time(port_id, address);
        }
    }

    // What people ask.

    /// The addresses of a port that a name leads to.
    pub(crate) fn addresses_of(&self, port: PortId, name: &DomainName) -> Vec<IpAddr> {
        let port = self.ports.get(&port);
        let addresses = port.map(|port| port.of_name(name));
        addresses.map_or_else(Vec::new, <[IpAddr]>::to_vec)
    }

    /// The addresses of a port that a name leads to, or a name below it. There may be others among them.
    pub(crate) fn addresses_below<'a>(
        &'a self,
        port: PortId,
        name: &'a DomainName,
    ) -> impl Iterator<Item = IpAddr> + 'a {
        let port = self.ports.get(&port).into_iter();
        let names = port.flat_map(|port| port.addresses_of.range(FromEnd(name.clone())..));
        let below = names.take_while(|(other, _)| other.may_be_below(name));
        below.flat_map(|(_, addresses)| addresses.iter().copied())
    }

    /// The last names of a port that have ended, the latest first.
    pub(crate) fn ended(&self, port: PortId) -> impl Iterator<Item = &EndedName> {
        let port = self.ports.get(&port).into_iter();
        port.flat_map(|port| port.ended.latest())
    }

    /// The limits that a port has reached.
    pub(crate) fn limits_reached(&self, port: PortId) -> impl Iterator<Item = &Limit> {
        let port = self.ports.get(&port).into_iter();
        port.flat_map(|port| &port.limits_reported)
    }

    /// How long ago the last answer was that a term counts by, at most: what prolongs a denial begins
    /// with each answer.
    pub(crate) fn told_since(&self, term: &Term, now: Timestamp) -> Duration {
        let left = term.deny_until.since(now);
        self.limits.deny_ttl.saturating_sub(left)
    }

    // What outlives the agent.

    /// Takes over the snapshot of an earlier run.
    pub(crate) fn load_snapshot(&mut self, saved: Vec<SavedEntry>, now: Timestamp) {
        self.loaded_at = now;
        for entry in saved {
            let of_port = self.saved.entry(Arc::clone(&entry.port)).or_default();
            of_port.push(entry);
        }
    }

    /// A number that grows whenever a snapshot would differ.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The next part of a snapshot: the names of all addresses of one port, then those of ports and pods that are not
    /// there. `None` if it has all of them.
    ///
    /// A name whose flows are not wanted or cannot be written yet is one of them: the rules may not be known, or the
    /// switch may be away.
    pub(crate) fn next_part(
        &self,
        ports: &Ports,
        snapshot: &mut Snapshot,
    ) -> Option<Vec<SavedEntry>> {
        let Snapshot {
            at,
            port,
            awaited,
            gone,
        } = snapshot;
        let rest = (port.map_or(Unbounded, Excluded), Unbounded);
        if let Some((id, cache)) = self.ports.range(rest).next() {
            *port = Some(*id);
            let row = ports.get(*id).map(|port| &port.row);
            let entries =
                row.map(|row| cache.saved_entries(&row.iface_id, row.iface_id_ver.as_deref(), *at));
            return Some(entries.unwrap_or_default());
        }
        let age = at.since(self.loaded_at);
        let not_there = [(&self.saved, awaited), (&self.gone, gone)];
        not_there.into_iter().find_map(|(ports, last)| {
            let rest = (last.as_deref().map_or(Unbounded, Excluded), Unbounded);
            let (port, entries) = ports.range::<str, _>(rest).next()?;
            *last = Some(Arc::clone(port));
            Some(entries.iter().map(|entry| entry.aged(age)).collect())
        })
    }

    /// How long entries last, and how many there may be.
    pub(crate) fn limits(&self) -> &CacheLimits {
        &self.limits
    }

    /// Changes the limits of a cache in use.
    #[cfg(test)]
    pub(crate) fn limits_mut(&mut self) -> &mut CacheLimits {
        &mut self.limits
    }

    /// Whether nothing is left to look at.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.due.is_empty()
    }

    /// How many items the collections have: ports, names, entries that are due, and others.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> [usize; 5] {
        [
            self.ports.len(),
            self.name_count(),
            self.due.len(),
            self.undecided.len(),
            self.unjudged.len(),
        ]
    }

    /// How often all entries of a port were looked at to find the least important ones.
    #[cfg(test)]
    pub(crate) fn looks(&self, port: PortId) -> usize {
        self.ports.get(&port).map_or(0, |port| port.looks)
    }

    /// How many names of full addresses were looked at for further ones.
    #[cfg(test)]
    pub(crate) fn names_looked_at(&self) -> usize {
        let entries = self.ports.values().flat_map(|port| port.entries.values());
        entries.map(|entry| entry.names.looked_at).sum()
    }

    /// Checks that each collection is within its limit, and that all agree.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        let limits = &self.limits;
        let mut looked_at = BTreeSet::new();
        for (id, port) in &self.ports {
            let pairs: usize = port.entries.values().map(|entry| entry.names.len()).sum();
            let by_name: usize = port.addresses_of.values().map(Addresses::len).sum();
            assert_eq!((pairs, by_name), (port.names, port.names), "{id:?}");
            let names = port.entries.values().flat_map(|entry| entry.names.iter());
            let denied = names.filter(|(_, term)| term.is_denied).count();
            let counted = (self.denied_names.of(*id), self.other_names.of(*id));
            assert_eq!(counted, (denied, pairs - denied), "{id:?}");
            assert_eq!(denied, port.denied_names, "{id:?}");
            let is_denied = |entry: &Entry| !port.all_are_denied || entry.is_denied();
            assert!(port.entries.values().all(is_denied), "{id:?}");
            assert!(
                port.entries.len() <= limits.addresses_per_port_max,
                "{id:?}"
            );
            assert!(port.names <= limits.names_per_port_max(), "{id:?}");
            assert!(port.limits_reported.len() <= LIMITS_REPORTED_MAX, "{id:?}");
            assert!(
                port.ended.len() <= crate::values::limits::ENDED_NAMES_MAX,
                "{id:?}"
            );
            for candidates in [&port.candidates, &port.denied_candidates] {
                assert!(candidates.len() <= limits.addresses_per_port_max, "{id:?}");
            }
            let adopting = port.entries.iter();
            let adopting = adopting.filter(|(_, entry)| entry.adopted.is_some());
            let adopting: BTreeSet<IpAddr> = adopting.map(|(address, _)| *address).collect();
            assert_eq!(adopting, port.adopting, "{id:?}");
            let ipv6 = port.entries.keys().filter(|address| address.is_ipv6());
            let in_order = port.ipv6.iter().copied().map(IpAddr::V6);
            assert!(
                ipv6.copied()
                    .collect::<BTreeSet<_>>()
                    .into_iter()
                    .eq(in_order),
                "{id:?}"
            );
            for (address, entry) in &port.entries {
                let others = entry.names.len() - entry.names.denied();
                assert!(others <= NAMES_PER_ADDRESS_MAX, "{id:?} {address}");
                looked_at.extend(entry.looked_at.map(|at| (at, *id, *address)));
                assert!(
                    entry.looked_at.is_some() || self.undecided.contains(&(*id, *address)),
                    "{id:?} {address} stays for ever"
                );
            }
        }
        for (id, port) in &self.ports {
            let flows = port.entries.values().map(|entry| entry.installed.len());
            assert_eq!(flows.sum::<usize>(), port.flows, "{id:?}");
        }
        assert_eq!(looked_at, self.due, "one item for each entry");
        let entries = self.ports.values().flat_map(|port| port.entries.values());
        let flows: usize = entries.map(|entry| entry.installed.len()).sum();
        assert_eq!(flows, self.flows);
        assert!(self.name_count() <= limits.names_per_node_max);
        let is_there = |(id, address): &(PortId, IpAddr)| self.entry(*id, *address).is_some();
        assert!(self.undecided.iter().all(is_there));
        assert!(self.unjudged.keys().all(|id| self.ports.contains_key(id)));
    }
}

impl PortCache {
    /// The names of every address, for a snapshot of this time.
    fn saved_entries(&self, port: &str, pod: Option<&str>, at: Timestamp) -> Vec<SavedEntry> {
        let port: Arc<str> = port.into();
        let pod: Option<Arc<str>> = pod.map(Into::into);
        let entries = self.entries.iter().map(|(address, entry)| {
            let names = entry.names.iter();
            SavedEntry {
                port: Arc::clone(&port),
                pod: pod.clone(),
                address: *address,
                names: names
                    .map(|(name, term)| SavedName {
                        name: name.clone(),
                        rest: term.until.since(at),
                        deny_rest: term.deny_until.since(at),
                        is_denied: term.is_denied,
                    })
                    .collect(),
            }
        });
        entries.collect()
    }

    /// The entry of an address.
    fn entry_or_new(&mut self, address: IpAddr) -> &mut Entry {
        self.entries.entry(address).or_insert_with(|| {
            if let IpAddr::V6(address) = address {
                self.ipv6.insert(address);
            }
            Entry::default()
        })
    }

    /// The addresses whose entries have this name.
    fn of_name(&self, name: &DomainName) -> &[IpAddr] {
        let addresses = self.addresses_of.get(&FromEnd(name.clone()));
        addresses.map_or(&[], |addresses| addresses.as_slice())
    }

    /// Changes the terms of an entry's names.
    fn change_names<T>(
        &mut self,
        address: IpAddr,
        change: impl FnOnce(&mut Names) -> T,
    ) -> Option<T> {
        let names = &mut self.entries.get_mut(&address)?.names;
        let before = names.denied();
        let result = change(names);
        self.denied_names = self.denied_names + names.denied() - before;
        self.changed(address);
        Some(result)
    }

    /// Adds a name to an address. Returns whether the counters should be read soon, because some
    /// addresses may have to go.
    fn add(&mut self, resolution: Resolution<'_>, limits: &CacheLimits) -> bool {
        let Resolution {
            address,
            name,
            term,
            standing,
            ..
        } = resolution;
        let entry = self.entry_or_new(address);
        let is_new = usize::from(entry.names.is_empty());
        entry.names.add(name.clone(), term, standing.get());
        self.names += 1;
        self.denied_names += usize::from(term.is_denied);
        self.changed(address);
        self.uncounted += is_new;
        self.uncounted_next += is_new;
        let addresses = self.addresses_of.entry(FromEnd(name.clone())).or_default();
        addresses.push(address);
        let of_name = addresses.len();
        if !self.limits_reported.is_empty() {
            // A limit that is far away is reported again when it is reached.
            if of_name <= limits.addresses_per_name_max / 2 {
                let limit = Limit::AddressesOfName(name.clone());
                self.limits_reported.remove(&limit);
            }
            if self.entries.len() <= limits.addresses_per_port_max / 2 {
                let is_of_name = |limit: &Limit| matches!(limit, Limit::AddressesOfName(_));
                self.limits_reported.retain(is_of_name);
            }
        }
        of_name > limits.addresses_per_name_max / 2
            || self.uncounted > limits.addresses_per_port_max / 2
    }

    /// The address that matters least for a name; `None` if all have to stay. All addresses of the
    /// name are looked at once for each answer.
    fn candidate_of_name(
        &mut self,
        name: &DomainName,
        idle_grace: Duration,
        now: Timestamp,
    ) -> Option<IpAddr> {
        let is_of_this = |of: &NameCandidates| of.name == *name && of.at == now;
        if !self.of_name.as_ref().is_some_and(is_of_this) {
            let addresses = self.of_name(name).iter();
            let least = addresses.filter_map(|address| {
                let entry = self.entries.get(address)?;
                let (priority, _) = entry.importance(Yielding::Unused, idle_grace, now)?;
                Some((priority, entry.names.until(name), *address))
            });
            let mut least: Vec<_> = least.collect();
            least.sort_unstable();
            self.of_name = Some(NameCandidates {
                name: name.clone(),
                at: now,
                addresses: least
                    .into_iter()
                    .rev()
                    .map(|(.., address)| address)
                    .collect(),
            });
        }
        self.of_name.as_mut()?.addresses.pop()
    }

    /// An entry has changed: it may not be denied any more.
    fn changed(&mut self, address: IpAddr) {
        self.all_are_denied = self.all_are_denied && {
            let entry = self.entries.get(&address);
            entry.is_none_or(|entry| entry.is_over() || entry.is_denied())
        };
    }

    /// The address whose entry matters least among those that give way; `None` if there is none.
    ///
    /// To look at all entries for each one that is to be forgotten would take longer than everything
    /// else that an answer asks for. So a sixteenth is chosen at a time, and each of those goes if it
    /// still matters as little. If all are in use, the next look comes after the next comparison with
    /// the switch: `comparisons` is how many there were. If all are denied, it comes after one of them is not.
    fn candidate(
        &mut self,
        yielding: Yielding,
        idle_grace: Duration,
        comparisons: u32,
        now: Timestamp,
    ) -> Option<IpAddr> {
        let spares_denied = matches!(yielding, Yielding::Unused | Yielding::Undenied);
        if spares_denied && self.all_are_denied {
            return None;
        }
        for look in [false, true] {
            if look {
                let spares_used = yielding == Yielding::Unused;
                if self.all_in_use_after == Some(comparisons) && spares_used {
                    return None;
                }
                #[cfg(test)]
                {
                    self.looks += 1;
                }
                *self.candidates(yielding) = self.least(yielding, idle_grace, now);
            }
            while let Some((importance, address)) = self.candidates(yielding).pop() {
                let entry = self.entries.get(&address);
                let current = entry.and_then(|e| e.importance(yielding, idle_grace, now));
                if current == Some(importance) {
                    return Some(address);
                }
            }
        }
        if spares_denied {
            self.all_in_use_after = Some(comparisons);
            self.all_are_denied = self.entries.values().all(Entry::is_denied);
        }
        None
    }

    fn candidates(&mut self, yielding: Yielding) -> &mut Vec<(Importance, IpAddr)> {
        match yielding {
            Yielding::Denied => &mut self.denied_candidates,
            Yielding::Unused | Yielding::Undenied | Yielding::Others => &mut self.candidates,
        }
    }

    /// The entries that matter least, the least last.
    fn least(
        &self,
        yielding: Yielding,
        idle_grace: Duration,
        now: Timestamp,
    ) -> Vec<(Importance, IpAddr)> {
        let count = self.entries.len().div_ceil(CANDIDATES_PART);
        let mut least = BinaryHeap::with_capacity(count + 1);
        for (address, entry) in &self.entries {
            if let Some(importance) = entry.importance(yielding, idle_grace, now) {
                least.push((importance, *address));
                if least.len() > count {
                    least.pop();
                }
            }
        }
        let mut least = least.into_sorted_vec();
        least.reverse();
        least
    }

    /// Takes a name from an address. The caller then calls [`Cache::count_names`].
    fn forget_name(&mut self, name: &DomainName, address: IpAddr) {
        if let Some(entry) = self.entries.get_mut(&address)
            && let Some(term) = entry.names.remove(name)
        {
            self.names -= 1;
            self.denied_names -= usize::from(term.is_denied);
        }
        self.changed(address);
        let name = FromEnd(name.clone());
        if let Some(addresses) = self.addresses_of.get_mut(&name) {
            addresses.retain(|other| *other != address);
            if addresses.is_empty() {
                self.addresses_of.remove(&name);
            }
        }
    }

    /// Removes the entry of an address, with its names.
    fn take(&mut self, address: IpAddr) -> Option<Entry> {
        let names: Vec<DomainName> = self.entries.get(&address)?.names.keys().cloned().collect();
        for name in &names {
            self.forget_name(name, address);
        }
        self.adopting.remove(&address);
        if let IpAddr::V6(address) = address {
            self.ipv6.remove(&address);
        }
        let entry = self.entries.remove(&address)?;
        self.flows -= entry.installed.len();
        Some(entry)
    }
}

impl Entry {
    /// The next end of a name or of the adopted flows.
    fn due(&self) -> Option<Timestamp> {
        let adopted = self.adopted.as_ref().map(|adopted| adopted.term.end());
        self.names.ends().chain(adopted).min()
    }

    /// Whether a rule denies a name of the address, or adopted flows deny the address.
    fn is_denied(&self) -> bool {
        let adopted = self.adopted.as_ref();
        self.names.iter().any(|(_, term)| term.is_denied)
            || adopted.is_some_and(|adopted| adopted.term.is_denied)
    }

    /// The importance of the entry. `None` if it does not give way.
    fn importance(
        &self,
        yielding: Yielding,
        idle_grace: Duration,
        now: Timestamp,
    ) -> Option<Importance> {
        if yielding == Yielding::Denied {
            let denied = self.names.iter().filter(|(_, term)| term.is_denied);
            return denied.map(|(_, term)| (0, Some(term.end()))).min();
        }
        if self.is_denied() {
            let others = self.names.iter().filter(|(_, term)| !term.is_denied);
            let least = others.map(|(_, term)| (BESIDE_DENIED, Some(term.end())));
            return least.min().filter(|_| yielding == Yielding::Others);
        }
        let priority = self.installed.eviction_priority(idle_grace, now);
        let is_spared = yielding == Yielding::Unused;
        let priority = priority.or((!is_spared).then_some(IN_USE))?;
        Some((priority, self.due()))
    }

    /// The last end of a name or of the adopted flows.
    fn ends_at(&self) -> Timestamp {
        let adopted = self.adopted.as_ref().map(|adopted| adopted.term.end());
        self.names.ends().chain(adopted).max().unwrap_or_default()
    }

    /// Whether the kernel may be told of the address. One that has ended waits until its use is known.
    fn may_be_marked(&self, now: Timestamp) -> bool {
        self.installed.is_marked() || self.ends_at() > now
    }

    /// Where the entry is enforced, and until when without the agent.
    fn place(&self, port: PortId, address: IpAddr) -> Place {
        Place {
            port,
            address,
            until: self.ends_at() + MARK_SLACK,
            is_denied: self.is_denied(),
            is_backend: self.is_backend,
        }
    }

    /// Whether the address has nothing but a mark, and a load balancer leads to it.
    fn lacks_flows(&self) -> bool {
        self.is_backend && self.installed.is_by_mark_alone()
    }

    /// Whether the entry has neither names nor adopted flows.
    fn is_over(&self) -> bool {
        self.names.is_empty() && self.adopted.is_none()
    }
}

/// Names with their terms, in order, each once.
///
/// Nearly always there is one name.
#[derive(Debug, Default)]
pub(crate) struct Names {
    terms: SmallVec<[(DomainName, Term); 1]>,
    /// The names by their rules, if there are as many as are kept and a further one has asked for them.
    by_rules: Option<Box<ByRules>>,
    /// How many names were looked at for further ones.
    #[cfg(test)]
    looked_at: usize,
}

impl Names {
    fn place(&self, name: &DomainName) -> Result<usize, usize> {
        self.terms.binary_search_by(|(other, _)| other.cmp(name))
    }

    /// The end of this name; `None` if there is no such name.
    pub(crate) fn until(&self, name: &DomainName) -> Option<Timestamp> {
        self.place(name).ok().map(|at| self.terms[at].1.end())
    }

    /// Prolongs the term of a name. Returns whether there is such a name.
    pub(crate) fn prolong(&mut self, name: &DomainName, term: Term) -> bool {
        let place = self.place(name);
        if let Ok(at) = place {
            self.terms[at].1.prolong(term);
        }
        place.is_ok()
    }

    /// Sets the term of a name, and adds the name if it is new.
    pub(crate) fn insert(&mut self, name: DomainName, term: Term) {
        self.by_rules = None;
        match self.place(&name) {
            Ok(at) => self.terms[at].1 = term,
            Err(at) => self.terms.insert(at, (name, term)),
        }
    }

    /// Adds a name, whose rules are known if the names by their rules may be.
    fn add(&mut self, name: DomainName, term: Term, standing: Option<&Standing>) {
        let by_rules = self.by_rules.take().zip(standing);
        self.insert(name.clone(), term);
        self.by_rules = by_rules.map(|(mut by_rules, standing)| {
            by_rules.add(name, standing.clone());
            by_rules
        });
    }

    /// Removes a name. Returns its term, if there was such a name.
    pub(crate) fn remove(&mut self, name: &DomainName) -> Option<Term> {
        let at = self.place(name).ok()?;
        if let Some(by_rules) = &mut self.by_rules {
            by_rules.remove(name);
        }
        Some(self.terms.remove(at).1)
    }

    /// Of the names that no rule denies, the one that ends first.
    fn least(&self) -> Option<DomainName> {
        let names = self.iter().filter(|(_, term)| !term.is_denied);
        let least = names.min_by_key(|(_, term)| term.until);
        least.map(|(name, _)| name.clone())
    }

    /// Of the names that a rule denies, the one that ends first.
    fn least_denied(&self) -> Option<DomainName> {
        let names = self.iter().filter(|(_, term)| term.is_denied);
        let least = names.min_by_key(|(_, term)| term.end());
        least.map(|(name, _)| name.clone())
    }

    /// The names by their rules of this version.
    fn by_rules(
        &mut self,
        version: Option<u64>,
        standing: impl Fn(&DomainName, bool) -> Standing,
    ) -> &ByRules {
        let known = self.by_rules.take().filter(|known| known.is_of(version));
        #[cfg(test)]
        if known.is_none() {
            self.looked_at += self.len();
        }
        let terms = &self.terms;
        self.by_rules.insert(known.unwrap_or_else(|| {
            let names = terms.iter();
            let names = names.map(|(name, term)| (name.clone(), standing(name, term.is_denied)));
            Box::new(ByRules::new(version, names))
        }))
    }

    /// The name that gives way to a further one ([`ByRules::first_to_go`]).
    fn first_to_go(&mut self, further: &Standing) -> Option<(DomainName, Option<DomainName>)> {
        #[cfg(test)]
        {
            self.looked_at += self.len();
        }
        let by_rules = self.by_rules.as_ref()?;
        by_rules.first_to_go(further, |name| self.until(name))
    }

    /// Has one of the names count for as long as another one.
    fn stand_for(&mut self, name: &DomainName, other: &DomainName) {
        if let (Ok(at), Ok(other)) = (self.place(name), self.place(other)) {
            let mut term = self.terms[other].1;
            term.prolong(self.terms[at].1);
            self.terms[at].1 = term;
        }
    }

    /// The number of names that a rule denies.
    fn denied(&self) -> usize {
        self.iter().filter(|(_, term)| term.is_denied).count()
    }

    /// The number of names.
    pub(crate) fn len(&self) -> usize {
        self.terms.len()
    }

    /// Whether there is no name.
    pub(crate) fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// The names with their terms.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&DomainName, &Term)> {
        self.terms.iter().map(|(name, term)| (name, term))
    }

    /// Notes for each name whether a rule denies the name. The rule can be younger than the answer. A name that no
    /// rule denies any more counts until `released` at least. Returns whether a name may end earlier now.
    pub(crate) fn deny(
        &mut self,
        is_denied: impl Fn(&DomainName, &Term) -> bool,
        released: Timestamp,
    ) -> bool {
        let mut any = false;
        self.by_rules = None;
        for (name, term) in &mut self.terms {
            if is_denied(name, term) {
                term.deny();
            } else if term.is_denied {
                term.release(released);
                any = true;
            }
        }
        any
    }

    /// The names.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &DomainName> {
        self.iter().map(|(name, _)| name)
    }

    /// The ends of the names.
    pub(crate) fn ends(&self) -> impl Iterator<Item = Timestamp> {
        self.iter().map(|(_, term)| term.end())
    }
}

#[cfg(test)]
mod tests;
