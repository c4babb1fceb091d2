//! The end of names and entries: when their time is over and they are not in use, or nothing holds them any more.

use std::{collections::BTreeSet, net::IpAddr};

use crate::{
    Timestamp,
    cache::{
        Cache,
        due::Look,
        ended::{End, EndedName},
        entries::Entry,
        ports::Key,
    },
    installed::Batch,
    tools::deadline::Deadline,
    values::{ids::PortId, name::DomainName},
};

impl Cache {
    /// When [`Cache::expire`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        self.due.deadline()
    }

    /// Makes sure that an entry is looked at no later than its next end.
    pub(crate) fn look_in_time(&mut self, port: PortId, address: IpAddr) {
        let key = (port, address);
        if let Some(entry) = self.ports.entry_mut(key)
            && let Some(end) = entry.due()
        {
            self.due.look_by(key, &mut entry.look, end);
        }
    }

    /// Makes sure that an entry is looked at no later than at the end of a name that has come.
    pub(super) fn look_by(&mut self, key: Key, end: Timestamp) {
        if let Some(entry) = self.ports.entry_mut(key) {
            self.due.look_by(key, &mut entry.look, end);
        }
    }

    /// Looks at the entries that are due. Entries without flows end. The others are decided over
    /// when the switch has told whether they are in use ([`Cache::take_undecided`]).
    pub(crate) fn expire(&mut self, batch: &mut Batch) {
        let now = batch.now();
        while let Some(key) = self.due.pop(now) {
            let Some(entry) = self.ports.entry_mut(key) else {
                continue;
            };
            entry.look = Look::default();
            match entry.due() {
                Some(due) if due > now => self.look_in_time(key.0, key.1),
                _ if entry.installed.is_empty() => self.end_expired(key, batch),
                _ => self.due.wait_for_use(key),
            }
        }
    }

    /// Takes the entries that [`Cache::decide`] is to be called for. To be called when the use of
    /// their flows is known.
    pub(crate) fn take_undecided(&mut self) -> BTreeSet<Key> {
        self.due.take_undecided()
    }

    /// Decides over an entry that is due. A name that a rule matches (`is_matched`) stays while the address is in use.
    pub(crate) fn decide(
        &mut self,
        port: PortId,
        address: IpAddr,
        is_matched: impl Fn(&DomainName) -> bool,
        batch: &mut Batch,
    ) {
        let now = batch.now();
        let idle_grace = self.limits.idle_grace;
        let entry = self.entry(port, address);
        let used_at = entry.and_then(|entry| entry.installed.used_at());
        let in_use_until = used_at.map(|used_at| used_at + idle_grace);
        let in_use_until = in_use_until.filter(|until| *until > now);
        self.ports.change(port, |port| {
            port.entries.stay_in_use(address, now, |name| {
                in_use_until.filter(|_| is_matched(name))
            });
        });
        self.end_expired((port, address), batch);
    }

    /// Removes the expired names of an entry, and the entry if nothing holds it any more.
    pub(super) fn end_expired(&mut self, key: Key, batch: &mut Batch) {
        let (port, address) = key;
        let now = batch.now();
        let is_over = self.ports.change(port, |port| {
            let entries = &mut port.entries;
            for name in entries.forget_names(address, |_, term| term.end() <= now) {
                port.ended.push(EndedName {
                    address,
                    name,
                    at: now,
                    why: End::Expired,
                });
            }
            Some(port.entries.get(address)?.is_over())
        });
        match is_over {
            Some(true) => self.close_entry(key, batch),
            Some(false) => {
                self.look_in_time(port, address);
                self.prolong_mark(key, batch);
            }
            None => {}
        }
    }

    /// Removes an entry, and closes its address.
    pub(super) fn close_entry(&mut self, key: Key, batch: &mut Batch) {
        if let Some(entry) = self.take(key) {
            let place = entry.place(key);
            entry.installed.close(place, &mut self.groups, batch);
        }
    }

    /// Removes an entry without closing its address, and its items in other owners.
    pub(super) fn take(&mut self, key: Key) -> Option<Entry> {
        let entry = self.ports.change(key.0, |port| port.entries.take(key.1))?;
        self.due.forget(key, entry.look);
        Some(entry)
    }
}
