//! The end of names and entries: when their time is over and they are not in use, or nothing holds them any more.

use std::{collections::BTreeSet, net::IpAddr};

use crate::{
    Timestamp,
    cache::{
        Cache,
        due::Look,
        ended::{End, EndedName},
        entries::{Entry, names::Term},
        ports::Key,
    },
    installed::Batch,
    tools::deadline::Deadline,
    values::{ids::PortId, limits::ENDED_STAYS, name::DomainName},
};

impl Entry {
    /// Whether the address, which is not in use, goes on for its established connections: packets have gone there, no rule
    /// denies it, and no name counts any more that a rule matches.
    fn may_end(&self, now: Timestamp, is_matched: impl Fn(&DomainName) -> bool) -> bool {
        let matched = || self.names.iter().filter(|(name, _)| is_matched(name));
        !self.has_ended()
            && !self.is_denied()
            && self.may_have_connections
            && matched().next().is_some()
            && matched().all(|(_, term)| term.end() <= now)
    }
}

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
    /// Behind that, established connections to the address go on. Returns whether they do from now on.
    pub(crate) fn decide(
        &mut self,
        port: PortId,
        address: IpAddr,
        is_matched: impl Fn(&DomainName) -> bool,
        batch: &mut Batch,
    ) -> bool {
        let now = batch.now();
        if let Some(entry) = self.entry_mut(port, address) {
            entry.note_use();
        }
        let Some(entry) = self.entry(port, address) else {
            return false;
        };
        let used_at = entry.installed.used_at();
        let stays = match entry.has_ended() {
            true => ENDED_STAYS,
            false => self.limits.idle_grace,
        };
        let in_use_until = used_at.map(|used_at| used_at + stays);
        let in_use_until = in_use_until.filter(|until| *until > now);
        let ends = in_use_until.is_none()
            && entry.may_end(now, &is_matched)
            && self.port(port).entries.sizes().ended < self.limits.ended_per_port_max()
            && self.ports.totals().ended.total() < self.limits.ended_per_node_max();
        self.ports.change(port, |port| {
            port.entries.stay_in_use(address, now, |name| {
                in_use_until.filter(|_| is_matched(name))
            });
            if ends {
                let is_over =
                    |name: &DomainName, term: &Term| term.end() <= now && is_matched(name);
                port.entries.end_names(address, now + ENDED_STAYS, is_over);
            }
        });
        self.end_expired((port, address), batch);
        ends
    }

    /// Whether only established connections to an address pass.
    pub(crate) fn has_ended(&self, port: PortId, address: IpAddr) -> bool {
        self.entry(port, address).is_some_and(Entry::has_ended)
    }

    /// Names that have ended go where the address has another name that counts and that a rule matches (`is_matched`): as
    /// long as that one counts, they would count, too.
    pub(crate) fn drop_ended(
        &mut self,
        (port, address): Key,
        is_matched: impl Fn(&DomainName) -> bool,
        at: Timestamp,
    ) {
        let entry = self.entry(port, address);
        if !entry.is_some_and(|entry| entry.names.any_has_ended()) {
            return;
        }
        self.ports.change(port, |port| {
            let names = port.entries.get(address).map(|entry| &entry.names);
            let counts = |(name, term): (&DomainName, &Term)| term.counts() && is_matched(name);
            if !names.is_some_and(|names| names.iter().any(counts)) {
                return;
            }
            for name in port.entries.forget_names(address, |_, term| !term.counts()) {
                let why = End::Expired;
                let ended = EndedName {
                    address,
                    name,
                    at,
                    why,
                };
                port.ended.push(ended);
            }
        });
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
