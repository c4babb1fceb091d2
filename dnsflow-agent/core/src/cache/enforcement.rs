//! How the addresses of entries are enforced: their patterns become tags.

use std::net::IpAddr;

use crate::{
    cache::{Cache, entries::Entry, ports::Key},
    installed::{Batch, Enforced, Fit, Flows, Groups, Tagging, Written},
    io::input::BatchId,
    policy::plan::Patterns,
    values::{
        flow::{Tag, Target},
        ids::PortId,
        limits::NAMES_PER_ADDRESS_MAX,
        name::DomainName,
    },
};

impl Cache {
    /// Enforces the patterns of an entry.
    pub(crate) fn enforce(
        &mut self,
        (port, address): Key,
        patterns: Option<&Patterns>,
        tagging: &mut Tagging<'_>,
        batch: &mut Batch,
    ) -> Enforced {
        let groups = &mut self.groups;
        let mut is_cut = false;
        let enforced = self.ports.enforce((port, address), |entry, place| {
            let enforced = entry
                .installed
                .enforce((place, patterns), tagging, groups, batch);
            let before = std::mem::replace(&mut entry.fit, enforced.fit);
            is_cut = enforced.fit == Fit::Cut && (before != Fit::Cut || enforced.changed);
            enforced
        });
        if is_cut {
            *self.cut.entry(port).or_default() += 1;
        }
        self.planned((port, address), batch);
        enforced
    }

    /// Takes the tag from an entry, because it is not known where to write its flows.
    pub(crate) fn withdraw(&mut self, key: Key, batch: &mut Batch) -> Enforced {
        let groups = &mut self.groups;
        let enforced = self.ports.enforce(key, |entry, place| {
            entry.fit = Fit::Exact;
            entry.installed.withdraw(place, groups, batch)
        });
        self.planned(key, batch);
        enforced
    }

    fn planned(&mut self, key: Key, batch: &mut Batch) {
        self.note_unplanned(key.0, key.1, false);
        self.prolong_mark(key, batch);
    }

    /// Whether an address has a name that was remembered over the budget, and opens nothing yet.
    pub(crate) fn is_unplanned(&self, port: PortId, address: IpAddr) -> bool {
        self.port(port).entries.unplanned().contains(&address)
    }

    /// Notes whether a name of an address was remembered over the budget, without a plan since.
    pub(crate) fn note_unplanned(&mut self, port: PortId, address: IpAddr, is_unplanned: bool) {
        self.ports.change(port, |port| {
            port.entries.set_unplanned(address, is_unplanned);
        });
    }

    // How many flows.

    /// How many flows should be in the switch.
    pub(crate) fn flow_count(&self) -> usize {
        self.ports.totals().flows + self.groups.flow_count()
    }

    /// How many flows go at most where a port is told so many addresses of a name: of those that make room.
    pub(crate) fn removed_at_most(&self, id: PortId, name: &DomainName, addresses: usize) -> usize {
        let (limits, totals) = (&self.limits, self.ports.totals());
        let entries = &self.port(id).entries;
        let has_room = self.ports.contains(id)
            && entries.len() + addresses <= limits.addresses_per_port_max
            && entries.sizes().names + addresses <= limits.names_per_port_max()
            && entries.of_name(name).len() + addresses <= limits.addresses_per_name_max
            && totals.names() + addresses <= limits.names_per_node_max
            && totals.denied_names.total() + addresses <= limits.denied_names_per_node_max();
        match has_room {
            true => 0,
            false => totals.flows.min(addresses),
        }
    }

    /// How many plans were made since the last call whose flows have no room, for each port.
    pub(crate) fn take_cut(&mut self) -> std::collections::BTreeMap<PortId, usize> {
        std::mem::take(&mut self.cut)
    }

    // What has become of them.

    /// The groups of the entries.
    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The same, to be changed.
    pub(crate) fn groups_mut(&mut self) -> &mut Groups {
        &mut self.groups
    }

    /// The flows that do what rules say of an address, and their target.
    pub(crate) fn flows_of<'a>(&'a self, entry: &Entry) -> Option<(Target, &'a Flows)> {
        let tag: Tag = entry.installed.tag()?;
        Some((Target::Tag(tag), self.groups.flows(tag)?))
    }

    /// Whether flows that let a port reach an address must be restored.
    pub(crate) fn is_lost(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self.entry(port, address);
        entry.is_some_and(|entry| entry.installed.is_lost(&self.groups))
    }

    /// Whether the flows of an address's patterns had no room, and to look for some costs little: not with many names.
    pub(crate) fn may_have_room(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self
            .entry(port, address)
            .filter(|entry| entry.fit == Fit::Cut);
        entry.is_some_and(|entry| entry.names.len() <= NAMES_PER_ADDRESS_MAX)
    }

    /// How the flows for an address came into the switch ([`Installed::written`]), if there is such an entry.
    ///
    /// [`Installed::written`]: crate::installed::Installed::written
    pub(crate) fn written(
        &self,
        port: PortId,
        address: IpAddr,
    ) -> impl Iterator<Item = Written> + use<> {
        let entry = self.entry(port, address);
        let written = entry.map(|entry| entry.installed.written(port, &self.groups));
        written.into_iter().flatten()
    }

    /// The batches that an address waits for to follow an edit ([`Installed::awaits`]).
    ///
    /// [`Installed::awaits`]: crate::installed::Installed::awaits
    pub(crate) fn awaits(&self, port: PortId, address: IpAddr) -> impl Iterator<Item = BatchId> {
        let entry = self.entry(port, address).into_iter();
        entry.flat_map(move |entry| entry.installed.awaits(port, &self.groups))
    }
}
