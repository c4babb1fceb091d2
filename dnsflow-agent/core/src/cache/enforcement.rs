//! How the addresses of entries are enforced: plans become flows of their own or of groups, and flows have a limit.

use std::{collections::BTreeMap, net::IpAddr};

use crate::{
    Timestamp,
    cache::{Cache, entries::Entry, ports::Key},
    installed::{Batch, Enforced, Flows, Groups, Wanted, Written},
    io::input::BatchId,
    policy::plan::{Planned, Room, Space},
    values::{
        flow::{Cookie, FlowKey, Target, Traffic},
        ids::PortId,
        limits::FLOWS_PER_ADDRESS_MAX,
        name::DomainName,
    },
};

impl Cache {
    /// Makes these the flows of an entry. The flows in `found` are in the switch already.
    pub(crate) fn enforce(
        &mut self,
        (port, address): Key,
        planned: Planned,
        found: Option<&BTreeMap<FlowKey, Cookie>>,
        batch: &mut Batch,
    ) -> Enforced {
        let groups = &mut self.groups;
        let (enforced, is_ending, written_in) =
            self.ports.enforce((port, address), |entry, place| {
                let wanted = Wanted { planned, found };
                let enforced = entry.installed.enforce(place, wanted, groups, batch);
                entry.cut = enforced.cut;
                entry.forget_former_without_mark();
                let is_tried = !groups.are_refused(batch.now());
                entry.tried_in = is_tried.then(|| groups.version(port));
                let is_ending = entry.installed.is_ending();
                let written_in = entry.installed.unconfirmed_in();
                (enforced, is_ending, written_in)
            });
        self.note_unplanned(port, address, false);
        if let Some(room) = enforced.cut {
            *self.cut.entry((port, room)).or_default() += 1;
        }
        if is_ending {
            self.ending.insert((port, address));
        }
        self.note_unconfirmed((port, address), written_in);
        self.prolong_mark((port, address), batch);
        enforced
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

    /// How many flows of a known address may change at most with a further name. If a rule denies the name, the flows
    /// of the address's group become flows of its own. Flows that had no room may get some.
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
            false => totals.flows.min(addresses * FLOWS_PER_ADDRESS_MAX),
        }
    }

    /// How many flows of its own an address may have now.
    pub(crate) fn room(&self, port: PortId, address: IpAddr) -> Room {
        let entries = &self.port(port).entries;
        let entry = entries.get(address);
        let own = entry.map_or(0, Entry::flow_count);
        let own_if_large = entry.map_or(0, Entry::flow_count_if_large);
        let large = &self.ports.totals().flows_of_large;
        let of_pod = self.ports.sandbox(port).map_or(0, |pod| large.of(pod));
        let of_pod = of_pod.saturating_sub(own_if_large);
        let of_node = large.total() - own_if_large;
        let max = self.limits.flows_per_node_max();
        let reserve = max / 4;
        let is_full = of_node + FLOWS_PER_ADDRESS_MAX > max;
        let is_reserved = of_node + reserve >= max && of_pod >= reserve / self.ports.pods().max(1);
        if is_full || is_reserved {
            Room::Least
        } else if entries.sizes().flows - own >= self.limits.flows_per_port_max() {
            Room::Little
        } else {
            Room::Usual
        }
    }

    /// How many flows of its own an address may have so that what is open stays open: port and node may have a quarter
    /// more for that than for flows to come.
    fn spare(&self, port: PortId, address: IpAddr) -> usize {
        let entries = &self.port(port).entries;
        let entry = entries.get(address);
        let of_port = entries.sizes().flows - entry.map_or(0, Entry::flow_count);
        let of_node = self.ports.totals().flows_of_large.total();
        let of_node = of_node - entry.map_or(0, Entry::flow_count_if_large);
        let with_quarter = |max: usize| max.saturating_add(max / 4);
        let left_of_port = with_quarter(self.limits.flows_per_port_max()).saturating_sub(of_port);
        let left_of_node = with_quarter(self.limits.flows_per_node_max()).saturating_sub(of_node);
        left_of_port.min(left_of_node)
    }

    /// The room, with the traffic of the flows that stay. Without any, those of its mark count.
    pub(crate) fn space(&self, port: PortId, address: IpAddr) -> Space {
        let room = self.room(port, address);
        let entry = self.entry(port, address).filter(|_| room < Room::Usual);
        let Some(entry) = entry else {
            return Space {
                room,
                ..Space::default()
            };
        };
        let spare = self.spare(port, address);
        let mut has: Vec<Traffic> = entry.traffic().collect();
        if has.is_empty()
            && let Some(flows) = entry.installed.of_mark(&self.groups)
            && flows.len() <= spare
        {
            has.extend(flows.traffic());
        }
        Space { room, has, spare }
    }

    /// Removes the flows of an entry, or its mark, because it is not known where to write them.
    pub(crate) fn withdraw(&mut self, (port, address): Key, batch: &mut Batch) -> Enforced {
        let entry = self.entry(port, address);
        let former: Vec<Traffic> = entry.into_iter().flat_map(Entry::traffic).collect();
        let of_mark = entry.and_then(|entry| entry.installed.of_mark(&self.groups));
        let of_mark: Vec<Traffic> = of_mark.into_iter().flat_map(Flows::traffic).collect();
        let enforced = self.enforce((port, address), Planned::default(), None, batch);
        match former.is_empty() {
            true => self.note_former_of_mark((port, address), of_mark),
            false => self.note_former((port, address), former),
        }
        enforced
    }

    /// Notes the traffic of former flows of an address. It is forgotten when the address has flows, or once the kernel
    /// has taken a mark.
    pub(crate) fn note_former(&mut self, key: Key, former: impl IntoIterator<Item = Traffic>) {
        if self.ports.enforce(key, |entry, _| entry.set_former(former)) {
            self.former.insert(key);
        }
    }

    /// Notes former flows of an address that a mark has stood for, as far as there is room for what is open.
    pub(crate) fn note_former_of_mark(&mut self, key: Key, former: Vec<Traffic>) {
        if former.len() <= self.spare(key.0, key.1) {
            self.note_former(key, former);
        }
    }

    /// Forgets the former flows of an address that has no mark in their place.
    pub(crate) fn forget_former_without_mark(&mut self, key: Key) {
        self.ports
            .enforce(key, |entry, _| entry.forget_former_without_mark());
    }

    /// Forgets the former flows of addresses whose marks the kernel has been told of, and has not refused.
    pub(super) fn forget_former(&mut self) {
        let ports = &mut self.ports;
        self.former
            .retain(|key| ports.enforce(*key, |entry, _| entry.forget_former_behind_mark()));
    }

    /// Whether an address has not all flows of its rules because others have many, or would not have them now.
    pub(crate) fn is_short(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self.entry(port, address);
        let cut = entry.and_then(|entry| entry.cut);
        cut.is_some_and(|room| room < Room::Usual) || self.room(port, address) < Room::Usual
    }

    /// Whether flows of an earlier run tell which ports of an address are open: the flows and the mark that the address
    /// has are not sent, or rules have no flow.
    pub(crate) fn is_unsettled(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self.entry(port, address);
        entry.is_some_and(|entry| {
            let is_cut = entry.cut.is_some_and(|room| room < Room::Usual);
            is_cut || entry.installed.is_unsent() || entry.installed.is_untold()
        })
    }

    /// At the end of the first comparison, forgets flows of an address that is short of room, if they were not sent and
    /// the comparison has not found them. Returns whether there are some.
    pub(crate) fn forget_unseen(&mut self, port: PortId, address: IpAddr, comparison: u32) -> bool {
        self.room(port, address) < Room::Usual
            && self.ports.enforce((port, address), |entry, _| {
                entry.installed.forget_unseen(comparison)
            })
    }

    /// Then likewise takes the mark from an address that has flows of its own in the switch, if the kernel has not been
    /// told of it. If the kernel refused the mark, there would be no room for flows that have gone for it.
    pub(crate) fn forget_untold(&mut self, port: PortId, address: IpAddr, batch: &mut Batch) {
        let groups = &mut self.groups;
        self.ports.enforce((port, address), |entry, place| {
            if entry.installed.is_untold() {
                entry.installed.unmark(place, groups, batch);
            }
        });
    }

    /// Whether an address has more room than its last plan, in which not all flows of its rules were, or may have a
    /// mark since.
    pub(crate) fn has_room_again(&self, port: PortId, address: IpAddr, now: Timestamp) -> bool {
        let Some(entry) = self.entry(port, address) else {
            return false;
        };
        let may_be_marked = || {
            let is_new = !entry.needs_flows() && entry.installed.group().is_none();
            let is_tried = entry.tried_in == Some(self.groups.version(port));
            is_new && !entry.is_backend && !is_tried && self.groups.are_tried(port, now)
        };
        let is_more = |room| room < self.room(port, address) || may_be_marked();
        entry
            .cut
            .is_some_and(|room| room < Room::Usual && is_more(room))
    }

    /// How many plans were made since the last call that have not all flows of their rules.
    pub(crate) fn take_cut(&mut self) -> BTreeMap<(PortId, Room), usize> {
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

    /// The flows that let a pod reach an address, and their target: flows of the address, or those of its group.
    pub(crate) fn flows_of<'a>(
        &'a self,
        address: IpAddr,
        entry: &'a Entry,
    ) -> Option<(Target, &'a Flows)> {
        let group = entry.installed.group();
        match group.filter(|_| !entry.installed.is_ending()) {
            None => Some((address.into(), entry.installed.own()?)),
            Some(id) => Some((self.groups.target(id)?, self.groups.flows(id)?)),
        }
    }

    /// Whether flows that let a port reach an address must be restored.
    pub(crate) fn is_lost(&self, port: PortId, address: IpAddr) -> bool {
        let entry = self.entry(port, address);
        entry.is_some_and(|entry| entry.installed.is_lost(&self.groups))
    }

    /// How the flows for an address came into the switch; `None` if there is no such entry.
    pub(crate) fn written(&self, port: PortId, address: IpAddr) -> Option<Written> {
        let entry = self.entry(port, address)?;
        Some(entry.installed.written(&self.groups))
    }

    /// The batch that an address waits for to follow an edit ([`Installed::awaits`]).
    ///
    /// [`Installed::awaits`]: crate::installed::Installed::awaits
    pub(crate) fn awaits(&self, port: PortId, address: IpAddr) -> Option<BatchId> {
        let entry = self.entry(port, address)?;
        entry.installed.awaits(&self.groups)
    }
}
