//! The marks that the kernel has for addresses: when they are set, compared, prolonged and replaced by flows.

use std::{collections::BTreeSet, net::IpAddr};

use crate::{
    Timestamp,
    cache::{Cache, entries::Entry, ports::Key},
    installed::{Batch, ReadMark, Reading, Tagging, Written},
    io::input::{BatchId, MarkFound},
    values::{
        flow::{FlowKey, Tag},
        ids::PortId,
        limits::{CHANGES_UNDER_WAY_MAX, MARK_SLACK},
    },
};

impl Entry {
    /// Whether the kernel may be told of the address. One that has ended waits until its use is known.
    fn may_be_marked(&self, now: Timestamp) -> bool {
        self.installed.is_marked() || self.ends_at() > now
    }
}

impl Cache {
    /// Packets of the port are marked at this interface from now on. Returns whether that is news: then all entries
    /// of the port are to be planned again.
    pub(crate) fn attached(&mut self, port: PortId, ifindex: u32, batch: &mut Batch) -> bool {
        let is_news = self.groups.attached(port, ifindex, batch.now());
        if is_news {
            // The interface that the port had before is gone, and nothing passes it.
            let addresses = self.addresses(port).into_iter();
            self.mark(addresses.map(|address| (port, address)), batch);
        }
        is_news
    }

    /// The switch has confirmed a batch, but for flows that somebody else has (`is_foreign`): addresses whose groups
    /// are in force now get their marks.
    pub(crate) fn confirmed(
        &mut self,
        written_in: BatchId,
        is_foreign: impl Fn(&FlowKey) -> bool,
        batch: &mut Batch,
    ) {
        let marked = self.groups.written(written_in, is_foreign);
        self.mark(marked, batch);
    }

    /// The connection is lost: no batch is confirmed any more. `comparisons` is how many have ended.
    pub(crate) fn disconnected(&mut self, comparisons: u32) {
        self.groups.disconnected(comparisons);
    }

    /// A comparison has ended, likewise, which began at `since`, and has shown all flows and marks (`is_complete`) or some. The
    /// switch does not take the flows of `missing`: nothing waits for them any longer. Removes the flows of groups that no
    /// address has.
    pub(crate) fn compared(
        &mut self,
        (comparison, since, is_complete): (u32, Timestamp, bool),
        missing: &BTreeSet<Tag>,
        batch: &mut Batch,
    ) {
        let marked = self.groups.compared(comparison, (since, is_complete));
        self.mark(marked, batch);
        if !missing.is_empty() && self.groups.are_marked() {
            let groups = &self.groups;
            for (port, address, entry) in self.ports.entries_mut() {
                if entry
                    .installed
                    .tag()
                    .is_some_and(|tag| missing.contains(&tag))
                {
                    let place = entry.place((port, address));
                    entry.installed.end_former(place, groups, batch);
                }
            }
        }
        self.groups.sweep(batch);
    }

    fn mark(&mut self, addresses: impl IntoIterator<Item = Key>, batch: &mut Batch) {
        let now = batch.now();
        for key in addresses {
            let entry = self.ports.entry_mut(key);
            if let Some(entry) = entry.filter(|entry| entry.may_be_marked(now)) {
                let place = entry.place(key);
                entry.installed.mark(place, &mut self.groups, batch);
            }
        }
    }

    /// Makes sure that the mark of an address does not end before the agent has decided over the address. An address
    /// that had ended when its group came into force is marked now, if it has a name again.
    pub(super) fn prolong_mark(&mut self, key: Key, batch: &mut Batch) {
        let now = batch.now();
        let entry = self.ports.entry_mut(key);
        if let Some(entry) = entry.filter(|entry| entry.may_be_marked(now)) {
            let place = entry.place(key);
            let needed = entry.ends_at() + MARK_SLACK / 2;
            let groups = &mut self.groups;
            entry.installed.prolong(place, needed, groups, batch);
        }
    }

    /// The kernel has refused a mark. The next plan gives the address its tag by flows.
    pub(crate) fn mark_refused(&mut self, port: PortId, address: IpAddr, batch: &mut Batch) {
        self.groups.refused(batch.now());
        let groups = &mut self.groups;
        self.ports.enforce((port, address), |entry, place| {
            entry.installed.mark_refused(place, groups, batch);
        });
    }

    // What the kernel has.

    /// Compares a mark that the kernel has with the one that it should have, and sets that one if they differ.
    /// `None` if the address should have none. `is_confirmed` says whether the switch has confirmed flows.
    pub(crate) fn mark_found(
        &mut self,
        (port, found): (PortId, &MarkFound),
        reading: Reading,
        is_confirmed: impl Fn(Written) -> bool,
        batch: &mut Batch,
    ) -> Option<ReadMark> {
        let key = (port, found.address);
        let groups = &mut self.groups;
        let entry = self.ports.entry_mut(key)?;
        let place = entry.place(key);
        // Only a batch that is sent ends the flows.
        if batch.id().is_some()
            && entry
                .installed
                .may_go_over(place, found, groups, batch.now())
        {
            return self.ports.enforce(key, |entry, place| {
                entry.installed.go_over(place, groups, batch);
                let installed = &mut entry.installed;
                installed.read((port, found), reading, is_confirmed, groups)
            });
        }
        let read = entry
            .installed
            .read((port, found), reading, is_confirmed, groups)?;
        if read == ReadMark::Wrong {
            entry.installed.mark(place, groups, batch);
        }
        Some(read)
    }

    /// At a start, an address goes on with its mark until its flows are in force, if the mark's group is known. Returns
    /// whether it does.
    pub(crate) fn keep_mark(&mut self, port: PortId, found: &MarkFound) -> bool {
        let groups = &self.groups;
        let key = (port, found.address);
        let (stays, is_backend) = self.ports.enforce(key, |entry, place| {
            let stays = entry.installed.keep_found(place, found, groups);
            (stays, entry.is_backend && entry.installed.is_by_mark())
        });
        if is_backend {
            self.backends.insert(key);
        }
        stays
    }

    /// Whether there is a group for this mark at a port.
    pub(crate) fn is_mark_known(&self, port: PortId, found: &MarkFound) -> bool {
        let tag = self.groups.tag_of(port, found.mark);
        tag.is_some_and(|tag| self.groups.contain(tag))
    }

    /// All marks are read. Sets those that are missing, and returns how many they are. Of the addresses with flows that may
    /// have marks, some at a time get one.
    pub(crate) fn marks_read(&mut self, reading: Reading, batch: &mut Batch) -> usize {
        let now = batch.now();
        let groups = &mut self.groups;
        let mut missing = 0;
        let mut beside = 0;
        for (port, address, entry) in self.ports.entries_mut() {
            if beside < CHANGES_UNDER_WAY_MAX && entry.ends_at() > now {
                let place = entry.place((port, address));
                beside += usize::from(entry.installed.mark_beside(place, groups, batch));
            }
            if entry.installed.is_unread(port, reading, groups)
                && groups.interface(port).is_some()
                && entry.may_be_marked(now)
            {
                let place = entry.place((port, address));
                entry.installed.mark(place, groups, batch);
                missing += 1;
            }
        }
        missing
    }

    // Behind load balancers.

    /// A load balancer leads to an address.
    pub(crate) fn note_backend(&mut self, port: PortId, address: IpAddr) {
        if self.groups.are_marked()
            && let Some(entry) = self.entry_mut(port, address)
            && !std::mem::replace(&mut entry.is_backend, true)
            && entry.installed.is_by_mark()
        {
            self.backends.insert((port, address));
        }
    }

    /// A load balancer has an address in front. Returns whether that is news.
    pub(crate) fn note_front(&mut self, port: PortId, address: IpAddr) -> bool {
        self.groups.are_marked()
            && self
                .entry_mut(port, address)
                .is_some_and(|entry| !std::mem::replace(&mut entry.is_front, true))
    }

    /// No load balancer has an address in front, but for those that [`Cache::note_front`] is told next. An address keeps
    /// its flows until its next plan.
    pub(crate) fn forget_fronts(&mut self) {
        for (_, _, entry) in self.ports.entries_mut() {
            entry.is_front = false;
        }
    }

    /// Takes one of the addresses with nothing but a mark that a load balancer leads to: they are closed behind it.
    pub(crate) fn take_backend(&mut self) -> Option<Key> {
        self.backends.pop_first()
    }

    /// Gives its tag to an address by flows, if it has a mark. That stays until the switch has the flows.
    pub(crate) fn replace_mark(&mut self, key: Key, tagging: &mut Tagging<'_>, batch: &mut Batch) {
        let groups = &self.groups;
        self.backends.remove(&key);
        self.ports.enforce(key, |entry, place| {
            entry.installed.replace_mark(place, tagging, groups, batch);
        });
    }

    /// Whether an address has only a mark, and a load balancer leads to it: it is closed behind the load balancer.
    pub(crate) fn lacks_flows(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self.entry(port, address);
        entry.is_some_and(|entry| entry.is_backend && entry.installed.is_by_mark())
    }
}
