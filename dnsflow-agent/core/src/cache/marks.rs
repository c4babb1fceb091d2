//! The marks that the kernel has for addresses with groups: when they are set, compared, prolonged and replaced by
//! flows.

use std::net::IpAddr;

use crate::{
    Timestamp,
    cache::{Cache, entries::Entry, ports::Key},
    installed::{Batch, GroupId, Installed, ReadMark, Reading},
    io::input::{BatchId, MarkFound},
    policy::plan::Room,
    values::{
        flow::FlowKey,
        ids::PortId,
        limits::{CHANGES_UNDER_WAY_MAX, MARK_SLACK},
    },
};

/// Who misses flows in the switch that it has answered for: it does not take them.
#[derive(Debug, Default)]
pub(crate) struct Missing {
    /// Addresses with flows of their own.
    pub(crate) entries: Vec<Key>,
    /// Groups.
    pub(crate) groups: Vec<GroupId>,
}

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
        let is_news = self.groups.attached(port, ifindex);
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
        for key in self.unconfirmed.remove(&written_in).unwrap_or_default() {
            if let Some(entry) = self.ports.entry_mut(key) {
                let place = entry.place(key);
                let groups = &mut self.groups;
                entry.installed.confirmed(place, written_in, groups, batch);
            }
        }
    }

    /// The switch has refused a batch, or some of it: the next comparison tells of its flows.
    pub(crate) fn not_confirmed(&mut self, written_in: BatchId) {
        self.unconfirmed.remove(&written_in);
    }

    /// The connection is lost: no batch is confirmed any more. `comparisons` is how many have ended.
    pub(crate) fn disconnected(&mut self, comparisons: u32) {
        self.groups.disconnected(comparisons);
        self.unconfirmed.clear();
    }

    /// Notes which batch has the flows that are to replace the mark of an address.
    pub(super) fn note_unconfirmed(&mut self, key: Key, written_in: Option<BatchId>) {
        if let Some(written_in) = written_in {
            self.unconfirmed.entry(written_in).or_default().insert(key);
        }
    }

    /// A comparison has ended, likewise. Addresses that a load balancer leads to get flows in place of their marks, some
    /// at a time. Removes the flows of groups that no address has.
    pub(crate) fn compared(&mut self, comparison: u32, missing: Missing, batch: &mut Batch) {
        self.forget_former();
        let marked = self.groups.compared(comparison);
        self.mark(marked, batch);
        // What the switch does not take is not waited for.
        for key in missing
            .groups
            .iter()
            .flat_map(|id| self.groups.awaiting(*id))
        {
            if let Some(entry) = self.ports.entry_mut(key) {
                let place = entry.place(key);
                entry.installed.end_former(place, &self.groups, batch);
            }
        }
        for key in missing.entries {
            let entry = self.ports.entry_mut(key);
            if let Some(entry) = entry.filter(|entry| entry.installed.is_ending()) {
                let place = entry.place(key);
                entry.installed.end_mark(place, &mut self.groups, batch);
            }
        }
        self.end_marks(comparison, batch);
        if self.groups.are_on() {
            self.replace_marks(comparison, batch);
        }
        self.groups.sweep(batch);
    }

    /// Ends marks by former rules, where this comparison has found the flows that replace them.
    fn end_marks(&mut self, comparison: u32, batch: &mut Batch) {
        let groups = &mut self.groups;
        let ports = &mut self.ports;
        self.ending.retain(|key| {
            let entry = ports.entry_mut(*key);
            entry
                .filter(|entry| entry.installed.is_ending())
                .is_some_and(|entry| {
                    let place = entry.place(*key);
                    !entry.installed.compared(place, comparison, groups, batch)
                })
        });
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

    /// The kernel has refused a mark. The next plan gives the address flows of its own.
    pub(crate) fn mark_refused(&mut self, port: PortId, address: IpAddr, batch: &mut Batch) {
        self.groups.refused(batch.now());
        let groups = &mut self.groups;
        self.ports.enforce((port, address), |entry, place| {
            entry.installed.unmark(place, groups, batch);
        });
    }

    // What the kernel has.

    /// Compares a mark that the kernel has with the one that it should have, and sets that one if they differ, or
    /// removes it. `None` if the address should have none.
    pub(crate) fn mark_found(
        &mut self,
        port: PortId,
        found: &MarkFound,
        reading: Reading,
        batch: &mut Batch,
    ) -> Option<ReadMark> {
        let key = (port, found.address);
        let entry = self.ports.entry_mut(key)?;
        let read = entry.installed.read(found, reading, &self.groups)?;
        match read {
            ReadMark::Right => {}
            ReadMark::Former if reading.is_first => {}
            ReadMark::Former => self.groups.found_former(found.mark),
            ReadMark::Wrong => {
                let place = entry.place(key);
                entry.installed.mark(place, &mut self.groups, batch);
            }
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
        let entry = self.ports.entry_mut((port, found.address));
        let Some(entry) = entry.filter(|entry| entry.installed.group() != number) else {
            return false;
        };
        let flows = number.and_then(|number| groups.flows(number));
        let is_another = flows.is_some_and(|flows| !flows.are_all_seen(comparison));
        match is_another {
            true => entry.installed.remove_former(found, batch),
            false => {
                entry.installed.keep_former(found, groups);
                groups.keep_former(found.mark);
            }
        }
        is_another
    }

    /// All marks are read. Sets those that are missing, and returns how many they are.
    pub(crate) fn marks_read(&mut self, reading: Reading, batch: &mut Batch) -> usize {
        let now = batch.now();
        let groups = &mut self.groups;
        groups.marks_read(reading);
        let mut missing = 0;
        for (port, address, entry) in self.ports.entries_mut() {
            if entry.installed.is_unread(reading, groups)
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
        if self.groups.are_on()
            && let Some(entry) = self.entry_mut(port, address)
            && !std::mem::replace(&mut entry.is_backend, true)
        {
            self.backends.insert((port, address));
        }
    }

    /// A load balancer has an address in front. Returns whether that is news.
    pub(crate) fn note_front(&mut self, port: PortId, address: IpAddr) -> bool {
        self.groups.are_on()
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

    /// At a start, takes flows of its own from an address that a load balancer leads to, if they were not sent: the kernel
    /// has a mark for the address. Returns whether it has. The address counts as one without a load balancer until
    /// [`Cache::note_backend`].
    pub(crate) fn give_up_unsent(&mut self, port: PortId, address: IpAddr) -> bool {
        self.ports.enforce((port, address), |entry, _| {
            let gives_up = entry.is_backend && !entry.needs_flows() && entry.installed.is_unsent();
            if gives_up {
                entry.installed = Installed::default();
                entry.is_backend = false;
            }
            gives_up
        })
    }

    /// Removes the marks in whose place this comparison has found flows. Gives flows to addresses that a load balancer
    /// leads to, and that have nothing but a mark: as many as one pod may have under way. The last address overshoots
    /// that.
    fn replace_marks(&mut self, comparison: u32, batch: &mut Batch) {
        let before = batch.len();
        for key in std::mem::take(&mut self.backends) {
            let entry = self.ports.entry_mut(key);
            // One that is none is of a later entry.
            let Some(entry) = entry.filter(|entry| entry.is_backend) else {
                continue;
            };
            self.backends.insert(key);
            let place = entry.place(key);
            let groups = &mut self.groups;
            entry.installed.compared(place, comparison, groups, batch);
            if batch.len() - before < CHANGES_UNDER_WAY_MAX {
                self.replace_mark(key.0, key.1, batch);
            }
        }
    }

    /// Whether an address has only a mark, and a load balancer leads to it: it is closed behind the load balancer.
    /// The flows of such addresses take half of the port's room at most, to leave room for the answers to the pod.
    pub(crate) fn lacks_flows(&self, port: PortId, address: IpAddr) -> bool {
        let entries = &self.port(port).entries;
        let entry = entries.get(address);
        entry.is_some_and(|entry| entry.is_backend && entry.installed.is_by_mark_alone())
            && entries.sizes().flows < self.limits.flows_per_port_max() / 2
            && self.room(port, address) != Room::Least
    }

    /// Gives flows to an address that lacks them. Its mark stays until the switch has them.
    pub(crate) fn replace_mark(&mut self, port: PortId, address: IpAddr, batch: &mut Batch) {
        if self.lacks_flows(port, address) {
            let groups = &self.groups;
            let written_in = self.ports.enforce((port, address), |entry, place| {
                entry.installed.replace(place, groups, batch);
                entry.installed.unconfirmed_in()
            });
            self.note_unconfirmed((port, address), written_in);
        }
    }
}
