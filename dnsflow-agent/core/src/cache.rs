//! The DNS answers to each pod: addresses, their names, the ends of both, and the limits.
//!
//! `Cache` composes owners, each of which keeps an invariant: the entries of a port with their names (`entries.rs`),
//! all ports (`ports.rs`), candidates for eviction (`candidates.rs`), ended names (`ended.rs`), the times at which
//! entries are checked (`due.rs`), the next reading of counters (`counter_reading.rs`), and what an earlier run has left
//! (`earlier_run.rs`).
//!
//! This file has the way of an answer. Other ways lead through the owners as well: room (`room.rs`), the end of names
//! and entries (`expiry.rs`), the journal (`journal.rs`), flows (`enforcement.rs`) and marks (`marks.rs`).

pub mod journal;

mod candidates;
mod counter_reading;
mod due;
mod earlier_run;
mod ended;
mod enforcement;
mod entries;
mod expiry;
mod marks;
mod ports;
mod room;

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use crate::{
    Timestamp,
    cache::{
        counter_reading::CounterReading,
        due::Due,
        earlier_run::EarlierRun,
        entries::names::AtAddress,
        ports::{CachedPort, CachedPorts, Key},
    },
    installed::{Batch, Groups},
    io::output::Output,
    policy::refused::Translation,
    values::{
        ids::{PortId, SandboxId},
        limits::{CLOSED_NAMED_MAX, CacheLimits, Limit, UNKNOWN_DEFERRED_MAX},
        name::DomainName,
    },
};

pub(crate) use ended::{End, FailedConnection, FailedQuestion};
pub use entries::names::Origin;
pub(crate) use entries::{
    Entry,
    names::{Claim, Standing, Term},
};

/// The DNS answers to all pods.
#[derive(Debug)]
pub(crate) struct Cache {
    limits: CacheLimits,
    ports: CachedPorts,
    /// When entries are looked at again.
    due: Due,
    /// The addresses with marks that a load balancer leads to.
    backends: BTreeSet<Key>,
    /// The ports that were told names before it was known whether a rule mentions the names, with the number of their
    /// answers that were deferred.
    mention_unknown: BTreeMap<PortId, usize>,
    /// The entries of an earlier run.
    earlier: EarlierRun,
    /// How many plans were made, for each port, whose flows have no room.
    cut: BTreeMap<PortId, usize>,
    /// What edits have closed since it was last told, by port.
    closed: BTreeMap<PortId, Closed>,
    /// The next reading of counters.
    reading: CounterReading,
    /// The groups of the entries.
    groups: Groups,
}

/// The addresses of a pod that were used lately, and that an edit has closed.
#[derive(Debug, Default)]
pub(crate) struct Closed {
    /// By a name, and the rule that denies it now.
    pub(crate) named: BTreeMap<(DomainName, Option<u32>), Vec<IpAddr>>,
    /// The number of those that are not among them.
    pub(crate) left_out: usize,
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

/// The effect of a [`Resolution`].
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Learned {
    /// Whether the address did not have the name before.
    pub(crate) is_news: bool,
    /// Addresses that have lost a name to make room. The rest of their names is to be planned again.
    pub(crate) replan: Vec<(PortId, IpAddr)>,
}

/// Namespace and logical port of a port; `None` if the rules of no namespace hold for the port.
pub(crate) type Whose<'a> = &'a dyn Fn(PortId) -> Option<(String, String)>;

impl Cache {
    /// An empty cache. `mark_mask`: the bits of the mark that say a packet's group, if packets are marked.
    pub(crate) fn new(
        limits: CacheLimits,
        mark_mask: Option<u32>,
        translation: Translation,
    ) -> Self {
        Self {
            limits,
            ports: CachedPorts::new(translation),
            due: Due::default(),
            backends: BTreeSet::new(),
            mention_unknown: BTreeMap::new(),
            earlier: EarlierRun::default(),
            cut: BTreeMap::new(),
            closed: BTreeMap::new(),
            reading: CounterReading::default(),
            groups: Groups::new(mark_mask),
        }
    }

    /// How long entries last, and how many there may be.
    pub(crate) fn limits(&self) -> &CacheLimits {
        &self.limits
    }

    // Ports.

    /// Adds a port. Returns the answers of an earlier run to its pod: address, name and term.
    pub(crate) fn open(
        &mut self,
        (port, sandbox): (PortId, SandboxId),
        name: &str,
        pod: Option<&str>,
    ) -> Vec<(IpAddr, DomainName, Term)> {
        self.ports.open(port, sandbox);
        self.of_earlier_run(port, name, pod)
    }

    /// A port has another sandbox: its names count with those of the other ports there.
    pub(crate) fn regroup(&mut self, port: PortId, sandbox: SandboxId) {
        self.ports.regroup(port, sandbox);
    }

    /// Removes a port with all of its entries.
    pub(crate) fn close(&mut self, port: PortId, batch: &mut Batch) {
        if let Some(gone) = self.ports.close(port) {
            self.port_gone(port, &gone.entries);
            for (address, entry) in gone.entries.iter() {
                self.due.forget((port, address), entry.look);
                let place = entry.place((port, address));
                entry.installed.close(place, &mut self.groups, batch);
            }
        }
        self.groups.closed(port, batch);
        self.closed.remove(&port);
        self.mention_unknown.remove(&port);
        self.reading.closed(port);
    }

    /// The answers to a port.
    pub(crate) fn port(&self, port: PortId) -> &CachedPort {
        self.ports.get(port)
    }

    /// The number of addresses of a port.
    pub(crate) fn count(&self, port: PortId) -> usize {
        self.port(port).entries.len()
    }

    /// The addresses of a port.
    pub(crate) fn addresses(&self, port: PortId) -> Vec<IpAddr> {
        let entries = self.port(port).entries.iter();
        entries.map(|(address, _)| address).collect()
    }

    /// How many names all addresses have.
    pub(crate) fn name_count(&self) -> usize {
        self.ports.totals().names()
    }

    // Entries.

    /// An entry, if there is one.
    pub(crate) fn entry(&self, port: PortId, address: IpAddr) -> Option<&Entry> {
        self.port(port).entries.get(address)
    }

    /// The same, if the address is not open for established connections alone.
    pub(crate) fn counting_entry(&self, port: PortId, address: IpAddr) -> Option<&Entry> {
        let entry = self.entry(port, address);
        entry.filter(|entry| !entry.has_ended())
    }

    /// An entry, if there is one, to be changed.
    pub(crate) fn entry_mut(&mut self, port: PortId, address: IpAddr) -> Option<&mut Entry> {
        self.ports.entry_mut((port, address))
    }

    /// Every entry.
    pub(crate) fn entries_mut(&mut self) -> impl Iterator<Item = (PortId, IpAddr, &mut Entry)> {
        self.ports.entries_mut()
    }

    /// Whether the port was told that this name leads to the address.
    pub(crate) fn knows(&self, port: PortId, address: IpAddr, name: &DomainName) -> bool {
        let entry = self.entry(port, address);
        entry.is_some_and(|entry| entry.names.until(name).is_some())
    }

    /// Notes for each name of an entry whether a rule denies the name ([`Names::deny`]). Returns whether a name may end
    /// earlier now.
    ///
    /// [`Names::deny`]: entries::names::Names
    pub(crate) fn deny_names(
        &mut self,
        port: PortId,
        address: IpAddr,
        is_denied: impl Fn(&DomainName) -> bool,
        released: Timestamp,
    ) -> bool {
        // Not all rules may be known yet.
        let keeps = !self.is_start_over();
        let is_denied = |name: &DomainName, term: &Term| is_denied(name) || keeps && term.is_denied;
        self.ports
            .change(port, |port| port.entries.deny(address, is_denied, released))
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
            is_ended: false,
            origin: Origin::Answer,
            server: None,
        }
    }

    /// The longest possible time since the last answer of a term: each answer prolongs a denial from then on.
    pub(crate) fn told_since(&self, term: &Term, now: Timestamp) -> Duration {
        let left = term.deny_until.since(now);
        self.limits.deny_ttl.saturating_sub(left)
    }

    /// Notes that a name leads to an address.
    pub(crate) fn learn(&mut self, mut learning: Learning<'_>) -> Learned {
        let told = learning.resolution;
        let key = (told.port, told.address);
        let mut learned = Learned::default();
        let has_ended = !told.term.is_ended && self.has_ended(told.port, told.address);
        if !self.ports.contains(told.port) || self.prolong(told.name, &mut learning) {
            if has_ended {
                // The name ends earlier than the connections would have.
                learned.is_news = true;
                self.look_in_time(told.port, told.address);
            }
            return learned;
        }
        let at_address = self.at_address(&learning);
        if let AtAddress::Alike(alike) = at_address {
            // What is open or closed stays as it is.
            self.prolong(&alike, &mut learning);
            self.drop_name(told.name, &mut learning);
            return learned;
        }
        let room = self.make_room(&at_address, &mut learning);
        let Learning {
            whose,
            batch,
            out,
            replan,
            ..
        } = learning;
        learned.replan = replan;
        let is_use_asked = match room {
            Ok(()) => {
                learned.is_news = true;
                let may_fill = self.add(told);
                self.look_by(key, told.term.end());
                self.prolong_mark(key, batch);
                may_fill
            }
            Err(limit) => {
                match limit {
                    Limit::NamesOfAddress(_) => out.counters.names_dropped += 1,
                    _ => out.counters.addresses_refused += 1,
                }
                self.leave_out(key, told.name, limit.clone(), batch.now());
                self.limit_reached(told.port, limit.clone(), whose, out);
                !matches!(
                    limit,
                    Limit::NamesOfAddress(_) | Limit::DeniedAddresses | Limit::DeniedNamesOfNode
                )
            }
        };
        if is_use_asked {
            self.reading.plan(batch.now());
        }
        learned
    }

    /// A name of the address counts for as long as the one that is learned. Returns whether the address has the name.
    fn prolong(&mut self, name: &DomainName, learning: &mut Learning<'_>) -> bool {
        let told = learning.resolution;
        let is_known = self.ports.change(told.port, |port| {
            let entries = &mut port.entries;
            entries.prolong(told.address, name, told.term)
        });
        if is_known {
            self.prolong_mark((told.port, told.address), learning.batch);
        }
        is_known
    }

    /// Adds a name to an address. Returns whether it should be known soon which addresses are in use, because some may have
    /// to go.
    fn add(&mut self, told: Resolution<'_>) -> bool {
        let half_of_name = self.limits.addresses_per_name_max / 2;
        let half_of_port = self.limits.addresses_per_port_max / 2;
        let (is_new, of_name) = self.ports.change(told.port, |port| {
            let (is_new, mut of_name) = port.entries.add(told);
            if of_name > half_of_name && port.entries.sizes().ended > 0 {
                of_name = port.entries.counting_of_name(told.name);
            }
            // A limit that is far away is reported again when it is reached.
            let is_name_near = of_name > half_of_name;
            let is_port_near = port.entries.len() > half_of_port;
            port.limits_reported.retain(|limit| match limit {
                Limit::AddressesOfName(name) => name != told.name || is_name_near,
                _ => is_port_near,
            });
            (is_new, of_name)
        });
        let uncounted = self.reading.came(told.port, usize::from(is_new));
        of_name > half_of_name || uncounted > half_of_port
    }

    // Edits.

    /// An edit has closed an address that the pod has used lately. `rule` is the one that denies it now.
    pub(crate) fn note_closed(&mut self, port: PortId, address: IpAddr, rule: Option<u32>) {
        let entry = self.entry(port, address);
        let Some(name) = entry.and_then(|entry| entry.names.keys().next().cloned()) else {
            return;
        };
        let closed = self.closed.entry(port).or_default();
        let has_room = closed.named.len() < CLOSED_NAMED_MAX;
        let key = (name, rule);
        match closed.named.get_mut(&key) {
            Some(addresses) if addresses.len() < CLOSED_NAMED_MAX => addresses.push(address),
            None if has_room => drop(closed.named.insert(key, vec![address])),
            Some(_) | None => closed.left_out += 1,
        }
    }

    /// Takes out what edits have closed, by port.
    pub(crate) fn take_closed(&mut self) -> BTreeMap<PortId, Closed> {
        std::mem::take(&mut self.closed)
    }

    // Names before the rules are known.

    /// Notes that rules may not mention all names of this port: the rules are not known yet.
    pub(crate) fn note_unknown_mention(&mut self, port: PortId) {
        if self.ports.contains(port) {
            self.mention_unknown.entry(port).or_default();
        }
    }

    /// Whether one more answer to this port may be deferred before the rules are known.
    pub(crate) fn defer_unknown(&mut self, port: PortId) -> bool {
        let deferred = self.mention_unknown.get_mut(&port);
        let room = deferred.filter(|deferred| **deferred < UNKNOWN_DEFERRED_MAX);
        room.map(|deferred| *deferred += 1).is_some()
    }

    /// The ports for which [`Cache::forget_unmentioned`] is to be called.
    pub(crate) fn with_unknown_mentions(&self) -> Vec<PortId> {
        self.mention_unknown.keys().copied().collect()
    }

    /// Forgets the names of a port that no rule mentions. They have no flows.
    pub(crate) fn forget_unmentioned(
        &mut self,
        id: PortId,
        is_mentioned: impl Fn(&DomainName) -> bool,
    ) {
        self.mention_unknown.remove(&id);
        for address in self.addresses(id) {
            let is_over = self.ports.change(id, |port| {
                let entries = &mut port.entries;
                entries.forget_names(address, |name, _| !is_mentioned(name));
                entries.get(address).is_some_and(Entry::is_over)
            });
            if is_over {
                self.take((id, address));
            }
        }
    }

    // Counters.

    /// From when on the counters are to be read, if that is news since the last call.
    pub(crate) fn take_reading(&mut self) -> Option<Timestamp> {
        self.reading.take_news()
    }

    /// Counters were read, from `since` on.
    pub(crate) fn counters_read(&mut self, since: Timestamp) {
        self.reading.read(since);
    }
}

#[cfg(test)]
mod tests;
