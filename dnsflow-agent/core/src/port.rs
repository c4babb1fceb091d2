//! A pod's logical port: its interface, and the addresses that the pod was told.

use std::{
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    Timestamp,
    flow::{Cookie, FlowChange, FlowKey, FlowPattern},
    input::BatchId,
    name::DomainName,
    ovn::rows::{Interface, RowId},
};

/// A port within the engine; never used again for another one.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortId(pub u32);

/// A logical port with an interface on this node.
#[derive(Debug)]
pub struct Port {
    /// The `Interface` row.
    pub interface: RowId,
    /// What the row says.
    pub row: Interface,
    /// The host side of the veth, while the program is attached to it.
    pub ifindex: Option<u32>,
    /// What the pod was told, by address.
    pub leases: HashMap<IpAddr, Lease>,
    /// The addresses of each name: those whose lease holds it.
    pub addresses_of: HashMap<DomainName, Addresses>,
    /// Limits that were told to have been reached: of a name, or (`None`) of the whole port.
    pub limits_told: BTreeSet<Option<DomainName>>,
    /// The leases that mattered least when all were last looked at, and how much; the least last.
    expendable: Vec<(Importance, IpAddr)>,
    /// Addresses that came since the beginning of the last count that has ended.
    uncounted: usize,
    /// How many of them came since the beginning of the one under way.
    uncounted_next: usize,
    /// After so many comparisons all were in use, for all that was known.
    all_in_use_after: Option<u32>,
}

/// The addresses of a name: mostly one.
pub type Addresses = SmallVec<[IpAddr; 1]>;

/// How little a lease matters, least first: [`Lease::dispensability`], then when it is due.
type Importance = (u8, Option<Timestamp>);

/// So many leases are forgotten for each time that all are looked at.
const EXPENDABLE_PART: usize = 16;

impl Port {
    /// A port that was told nothing yet.
    pub fn new(interface: RowId, row: Interface) -> Self {
        Self {
            interface,
            row,
            ifindex: None,
            leases: HashMap::new(),
            addresses_of: HashMap::new(),
            limits_told: BTreeSet::new(),
            expendable: Vec::new(),
            uncounted: 0,
            uncounted_next: 0,
            all_in_use_after: None,
        }
    }

    /// An address was remembered. Returns of how many it is not known whether they are in use, at most.
    pub fn note_address(&mut self, is_new: bool) -> usize {
        self.uncounted += usize::from(is_new);
        self.uncounted_next += usize::from(is_new);
        self.uncounted
    }

    /// Of all addresses that there are now it will be known, …
    pub fn count_begins(&mut self) {
        self.uncounted_next = 0;
    }

    /// … and now it is.
    pub fn count_ends(&mut self) {
        self.uncounted = self.uncounted_next;
    }

    /// The address whose lease matters least; `None` where all are in use.
    ///
    /// To look at all leases for each one that is to be forgotten would take longer than everything
    /// else that an answer asks for. So a sixteenth is chosen at a time, and each of those goes if it
    /// still matters as little. Where there is none, the next look comes after the next comparison with
    /// the switch: `comparisons` is how many there were.
    pub fn expendable(
        &mut self,
        idle_grace: Duration,
        comparisons: u32,
        now: Timestamp,
    ) -> Option<IpAddr> {
        for look in [false, true] {
            if look {
                if self.all_in_use_after == Some(comparisons) {
                    return None;
                }
                self.expendable = self.least(idle_grace, now);
            }
            while let Some((importance, address)) = self.expendable.pop() {
                let lease = self.leases.get(&address);
                if lease.and_then(|lease| lease.importance(idle_grace, now)) == Some(importance) {
                    return Some(address);
                }
            }
        }
        self.all_in_use_after = Some(comparisons);
        None
    }

    /// The leases that matter least, the least last.
    fn least(&self, idle_grace: Duration, now: Timestamp) -> Vec<(Importance, IpAddr)> {
        let count = self.leases.len().div_ceil(EXPENDABLE_PART);
        let mut least = BinaryHeap::with_capacity(count + 1);
        for (address, lease) in &self.leases {
            if let Some(importance) = lease.importance(idle_grace, now) {
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

    /// Takes a name from an address's lease.
    pub fn forget_name(&mut self, name: &DomainName, address: IpAddr) {
        if let Some(lease) = self.leases.get_mut(&address) {
            lease.names.remove(name);
        }
        if let Some(addresses) = self.addresses_of.get_mut(name) {
            addresses.retain(|other| *other != address);
            if addresses.is_empty() {
                self.addresses_of.remove(name);
            }
        }
    }

    /// Takes the whole lease of an address.
    pub fn take_lease(&mut self, address: IpAddr) -> Option<Lease> {
        let names: Vec<DomainName> = self.leases.get(&address)?.names.keys().cloned().collect();
        for name in &names {
            self.forget_name(name, address);
        }
        self.leases.remove(&address)
    }
}

/// Names, and until when each of them counts; in order, each once.
///
/// Nearly always one, and never many.
#[derive(Debug, Default)]
pub struct Names(SmallVec<[(DomainName, Timestamp); 1]>);

impl Names {
    fn place(&self, name: &DomainName) -> Result<usize, usize> {
        self.0.binary_search_by(|(other, _)| other.cmp(name))
    }

    /// Until when this name counts; `None` where it is not among them.
    pub fn get(&self, name: &DomainName) -> Option<Timestamp> {
        self.place(name).ok().map(|at| self.0[at].1)
    }

    /// Lets a name count at least until then; says whether it is among them at all.
    pub fn prolong(&mut self, name: &DomainName, until: Timestamp) -> bool {
        let place = self.place(name);
        if let Ok(at) = place {
            self.0[at].1 = until.max(self.0[at].1);
        }
        place.is_ok()
    }

    /// Says until when a name counts, whether it is known or not.
    pub fn insert(&mut self, name: DomainName, until: Timestamp) {
        match self.place(&name) {
            Ok(at) => self.0[at].1 = until,
            Err(at) => self.0.insert(at, (name, until)),
        }
    }

    /// Takes a name out.
    pub fn remove(&mut self, name: &DomainName) {
        if let Ok(at) = self.place(name) {
            self.0.remove(at);
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, with their ends.
    pub fn iter(&self) -> impl Iterator<Item = (&DomainName, &Timestamp)> {
        self.0.iter().map(|(name, until)| (name, until))
    }

    /// All of them.
    pub fn keys(&self) -> impl Iterator<Item = &DomainName> {
        self.iter().map(|(name, _)| name)
    }

    /// Their ends.
    pub fn values(&self) -> impl Iterator<Item = &Timestamp> {
        self.iter().map(|(_, until)| until)
    }
}

/// One address that a pod was told, and the flows that open it.
#[derive(Debug, Default)]
pub struct Lease {
    /// The names that lead to the address, and until when.
    pub names: Names,
    /// Flows found in the switch at the start, if any.
    pub adopted: Option<Box<Adopted>>,
    /// The flows that the names and the rules come to, in the order of
    /// [`FlowPattern::cmp_place`].
    pub flows: Box<[LeasedFlow]>,
    /// The batch that wrote one of them last.
    pub written_in: Option<BatchId>,
}

/// Flows found in the switch at the start, whose names nobody remembers.
#[derive(Debug)]
pub struct Adopted {
    /// Their cookies.
    pub flows: BTreeMap<FlowKey, Cookie>,
    /// Until when they are kept in any case.
    pub until: Timestamp,
}

impl Lease {
    /// The next moment at which something expires.
    pub fn due(&self) -> Option<Timestamp> {
        let adopted = self.adopted.as_ref().map(|adopted| adopted.until);
        self.names.values().copied().chain(adopted).min()
    }

    /// How little it matters, least first: nothing open, out of use. `None`: in use, for all that
    /// is known.
    pub fn dispensability(&self, idle_grace: Duration, now: Timestamp) -> Option<u8> {
        if self.flows.is_empty() {
            Some(0)
        } else if self
            .flows
            .iter()
            .any(|flow| !flow.counted || flow.is_in_use(idle_grace, now))
        {
            None
        } else {
            Some(1)
        }
    }

    fn importance(&self, idle_grace: Duration, now: Timestamp) -> Option<Importance> {
        Some((self.dispensability(idle_grace, now)?, self.due()))
    }

    /// The flow with the place of this pattern.
    pub fn flow_at(&self, pattern: &FlowPattern) -> Option<&LeasedFlow> {
        let flows = &self.flows;
        let at = flows.binary_search_by(|flow| flow.pattern.cmp_place(pattern));
        at.ok().map(|at| &flows[at])
    }

    /// The flow with this key, which is for the lease's address.
    pub fn flow_with(&self, key: &FlowKey) -> Option<&LeasedFlow> {
        let mut flows = self.flows.iter();
        flows.find(|flow| flow.pattern.is_place_of(key))
    }

    /// The same, to be changed.
    pub fn flow_with_mut(&mut self, key: &FlowKey) -> Option<&mut LeasedFlow> {
        let mut flows = self.flows.iter_mut();
        flows.find(|flow| flow.pattern.is_place_of(key))
    }

    /// What closes the lease's address.
    pub fn deletions(&self, address: IpAddr) -> impl Iterator<Item = FlowChange> {
        let patterns = self.flows.iter().map(|flow| &flow.pattern);
        patterns.filter_map(move |pattern| pattern.deletion(address))
    }

    /// Whether some of its flows are to be put back.
    pub fn is_lost(&self) -> bool {
        self.flows.iter().any(|flow| flow.lost)
    }

    /// Whether nothing holds the lease any more.
    pub fn is_over(&self) -> bool {
        self.names.is_empty() && self.adopted.is_none()
    }
}

/// A flow that should be in the switch: its destination is the lease's address.
#[derive(Debug)]
pub struct LeasedFlow {
    /// All the rest of it.
    pub pattern: Arc<FlowPattern>,
    /// When it was last written; long ago (zero) while the switch is away.
    pub written_at: Timestamp,
    /// Packets that it had matched when last asked.
    pub packets: u64,
    /// When it was last seen to match a packet, or written.
    pub used_at: Timestamp,
    /// The comparison that last found it in the switch.
    pub seen_in: u32,
    /// Whether the switch has told since it was written, and long enough after, what it has
    /// matched.
    pub counted: bool,
    /// Whether it is missing in the switch, and to be put back.
    pub lost: bool,
}

impl LeasedFlow {
    /// Whether packets have passed lately, by what the switch last said.
    fn is_in_use(&self, idle_grace: Duration, now: Timestamp) -> bool {
        self.packets > 0 && self.used_at + idle_grace > now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> DomainName {
        text.parse().expect("a name")
    }

    #[test]
    fn names_are_kept_once_and_in_order() {
        let at = Timestamp::from_nanos;
        let mut names = Names::default();
        for (text, until) in [("b.test", 1), ("a.test", 2), ("c.test", 3), ("b.test", 4)] {
            names.insert(name(text), at(until));
        }
        let kept: Vec<_> = names
            .iter()
            .map(|(name, until)| (name.to_string(), *until))
            .collect();
        let wanted = [("a.test", 2), ("b.test", 4), ("c.test", 3)];
        assert_eq!(
            kept,
            wanted.map(|(text, until)| (text.to_owned(), at(until)))
        );
        names.remove(&name("b.test"));
        assert_eq!((names.len(), names.get(&name("b.test"))), (2, None));
    }

    #[test]
    fn a_known_name_is_only_ever_prolonged() {
        let at = Timestamp::from_nanos;
        let mut names = Names::default();
        names.insert(name("a.test"), at(5));
        assert!(names.prolong(&name("a.test"), at(3)));
        assert_eq!(names.get(&name("a.test")), Some(at(5)));
        assert!(names.prolong(&name("a.test"), at(7)));
        assert_eq!(names.get(&name("a.test")), Some(at(7)));
        assert!(!names.prolong(&name("b.test"), at(9)));
        assert_eq!(names.get(&name("b.test")), None);
    }
}
