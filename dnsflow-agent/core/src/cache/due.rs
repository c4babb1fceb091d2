//! When entries are looked at again.
//!
//! Each entry that waits for its time has one item in [`Due`], and its [`Look`] says when; the time may be earlier than
//! the next end of the entry. An entry whose time has come is undecided until the switch has told whether it is in use.

use std::{collections::BTreeSet, net::IpAddr};

use crate::{
    Timestamp,
    cache::ports::Key,
    tools::deadline::{self, Deadline, Why},
    values::ids::PortId,
};

/// When an entry is looked at again, if ever. Only [`Due`] changes it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Look(Option<Timestamp>);

/// The entries that are due, now or later.
#[derive(Debug, Default)]
pub(super) struct Due {
    items: BTreeSet<(Timestamp, PortId, IpAddr)>,
    undecided: BTreeSet<Key>,
}

impl Due {
    /// When the first entry is to be looked at.
    pub(super) fn deadline(&self) -> Option<Deadline> {
        deadline::at(self.items.first().map(|(at, ..)| *at), Why::Expiry)
    }

    /// Makes sure that an entry is looked at by this time.
    pub(super) fn look_by(&mut self, (port, address): Key, look: &mut Look, by: Timestamp) {
        if look.0.is_some_and(|at| at <= by) {
            return;
        }
        if let Some(late) = look.0.replace(by) {
            self.items.remove(&(late, port, address));
        }
        self.items.insert((by, port, address));
    }

    /// Takes an entry whose time has come. Its look is over ([`Look::default`]).
    pub(super) fn pop(&mut self, now: Timestamp) -> Option<Key> {
        let (at, port, address) = *self.items.first()?;
        (at <= now).then(|| {
            self.items.pop_first();
            (port, address)
        })
    }

    /// An entry whose time has come waits until its use is known.
    pub(super) fn wait_for_use(&mut self, key: Key) {
        self.undecided.insert(key);
    }

    /// Takes the entries whose use is known by now.
    pub(super) fn take_undecided(&mut self) -> BTreeSet<Key> {
        std::mem::take(&mut self.undecided)
    }

    /// An entry is gone.
    pub(super) fn forget(&mut self, (port, address): Key, look: Look) {
        if let Some(at) = look.0 {
            self.items.remove(&(at, port, address));
        }
        self.undecided.remove(&(port, address));
    }
}

#[cfg(test)]
mod tests;
