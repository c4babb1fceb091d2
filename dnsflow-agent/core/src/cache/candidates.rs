//! Who gives way among the entries of one port, where there is no room.
//!
//! To look at all entries for each one that is to be forgotten would take longer than everything else that an answer
//! asks for. [`Candidates`] remembers those that mattered least at the last look. One of them is given out only if it
//! still matters as little. Answers can ask for different things in turns, so no question ends the memory for another
//! one.

use std::{collections::BinaryHeap, net::IpAddr, time::Duration};

use crate::{
    Timestamp,
    cache::entries::{Entries, Entry},
    installed::Batch,
    values::name::DomainName,
};

/// Who gives way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Yielding {
    /// Addresses that no rule denies and that are out of use.
    Unused,
    /// The same, or else addresses in use.
    Undenied,
    /// The same, or else names that no rule denies of addresses that a rule denies.
    Others,
    /// Names that a rule denies.
    Denied,
}

impl Yielding {
    /// Whether an entry of this importance is one of them.
    fn includes(self, (priority, _): Importance) -> bool {
        match self {
            Self::Unused => priority < IN_USE,
            Self::Undenied => priority < BESIDE_DENIED,
            Self::Others | Self::Denied => true,
        }
    }
}

/// What is to give way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Wanted {
    /// Who gives way.
    pub(super) yielding: Yielding,
    /// Whether a name is to go: an address without one stays.
    pub(super) with_names: bool,
}

/// The entries of one port that may give way.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// The entries that mattered least when all entries were last looked
    /// at, with their importance, the least important last.
    least: Vec<(Importance, IpAddr)>,
    /// The same of the entries that may give up a denied name.
    least_denied: Vec<(Importance, IpAddr)>,
    /// Those among the addresses of one name.
    of_name: Option<OfName>,
    /// The number of comparisons after which all entries had to stay.
    all_in_use_after: Option<u32>,
    /// The same for the entries with a name.
    all_named_in_use_after: Option<u32>,
    /// How often all entries were looked at to find the least important ones.
    #[cfg(test)]
    pub(super) looks: usize,
}

/// The addresses of a name that may make room for others of one answer.
#[derive(Debug)]
struct OfName {
    name: DomainName,
    /// The time of the answer.
    at: Timestamp,
    addresses: Vec<IpAddr>,
}

/// The importance of an entry, the least first: `Installed::eviction_priority`, then the time at
/// which the entry is due.
type Importance = (u8, Option<Timestamp>);

/// Greater than every priority of an address out of use.
const IN_USE: u8 = 2;
/// The importance of a name that no rule denies, beside one that a rule denies.
const BESIDE_DENIED: u8 = 3;

/// One entry of so many becomes a candidate when all are looked at.
const CANDIDATES_PART: usize = 16;

impl Candidates {
    /// The address that matters least for a name; `None` if all have to stay. All addresses of the
    /// name are looked at once for each answer.
    pub(super) fn next_of_name(
        &mut self,
        entries: &Entries,
        name: &DomainName,
        idle_grace: Duration,
        now: Timestamp,
    ) -> Option<IpAddr> {
        let is_of_this = |of: &OfName| of.name == *name && of.at == now;
        if !self.of_name.as_ref().is_some_and(is_of_this) {
            let addresses = entries.of_name(name).iter();
            let least = addresses.filter_map(|address| {
                let entry = entries.get(*address)?;
                let wanted = Wanted {
                    yielding: Yielding::Unused,
                    with_names: true,
                };
                let (priority, _) = importance(entry, wanted, idle_grace, now)?;
                Some((priority, entry.names.until(name), *address))
            });
            let mut least: Vec<_> = least.collect();
            least.sort_unstable();
            let addresses = least.into_iter().rev().map(|(.., address)| address);
            self.of_name = Some(OfName {
                name: name.clone(),
                at: now,
                addresses: addresses.collect(),
            });
        }
        self.of_name.as_mut()?.addresses.pop()
    }

    /// The address whose entry matters least among those that give way; `None` if there is none.
    ///
    /// A sixteenth of the entries is chosen at a time. If all are in use, the next look comes after the next comparison
    /// with the switch. If all are denied, it comes after one of them is not.
    pub(super) fn next(
        &mut self,
        entries: &mut Entries,
        wanted: Wanted,
        idle_grace: Duration,
        batch: &Batch,
    ) -> Option<IpAddr> {
        let now = batch.now();
        let looked_after = Some(batch.comparisons());
        let Wanted {
            yielding,
            with_names,
        } = wanted;
        let current = |entry: &Entry| importance(entry, wanted, idle_grace, now);
        let spares_denied = matches!(yielding, Yielding::Unused | Yielding::Undenied);
        if spares_denied && entries.are_all_denied(with_names) {
            return None;
        }
        for look in [false, true] {
            if look {
                let spares_used = yielding == Yielding::Unused;
                if spares_used && *self.all_in_use_after(with_names) == looked_after {
                    return None;
                }
                #[cfg(test)]
                {
                    self.looks += 1;
                }
                *self.least(yielding) = least(entries, current);
            }
            // Those that this question spares stay for others.
            let gives_way = |(known, _): &mut (Importance, IpAddr)| yielding.includes(*known);
            while let Some((known, address)) = self.least(yielding).pop_if(gives_way) {
                if entries.get(address).and_then(current) == Some(known) {
                    return Some(address);
                }
            }
        }
        if spares_denied {
            *self.all_in_use_after(with_names) = looked_after;
            entries.look_for_undenied();
        }
        None
    }

    fn all_in_use_after(&mut self, with_names: bool) -> &mut Option<u32> {
        match with_names {
            true => &mut self.all_named_in_use_after,
            false => &mut self.all_in_use_after,
        }
    }

    fn least(&mut self, yielding: Yielding) -> &mut Vec<(Importance, IpAddr)> {
        match yielding {
            Yielding::Denied => &mut self.least_denied,
            Yielding::Unused | Yielding::Undenied | Yielding::Others => &mut self.least,
        }
    }

    /// How many there are of each kind.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.least.len(), self.least_denied.len()]
    }
}

/// The entries that matter least, the least last.
fn least(
    entries: &Entries,
    importance: impl Fn(&Entry) -> Option<Importance>,
) -> Vec<(Importance, IpAddr)> {
    let count = entries.len().div_ceil(CANDIDATES_PART);
    let mut least = BinaryHeap::with_capacity(count + 1);
    for (address, entry) in entries.iter() {
        if let Some(importance) = importance(entry) {
            least.push((importance, address));
            if least.len() > count {
                least.pop();
            }
        }
    }
    let mut least = least.into_sorted_vec();
    least.reverse();
    least
}

/// The importance of an entry; `None` if it does not give way.
fn importance(
    entry: &Entry,
    wanted: Wanted,
    idle_grace: Duration,
    now: Timestamp,
) -> Option<Importance> {
    let yielding = wanted.yielding;
    if wanted.with_names && entry.names.is_empty() {
        return None;
    }
    if yielding == Yielding::Denied {
        let denied = entry.names.first_to_end(true);
        return denied.map(|(_, end)| (0, Some(end)));
    }
    if entry.is_denied() {
        let other = entry.names.first_to_end(false);
        let other = other.map(|(_, end)| (BESIDE_DENIED, Some(end)));
        return other.filter(|_| yielding == Yielding::Others);
    }
    let priority = entry.installed.eviction_priority(idle_grace, now);
    let is_spared = yielding == Yielding::Unused;
    let priority = priority.or((!is_spared).then_some(IN_USE))?;
    Some((priority, entry.due()))
}
