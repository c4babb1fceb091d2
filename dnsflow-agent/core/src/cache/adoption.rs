//! The state that outlives the agent: the flows of an earlier run, which entries adopt, and the snapshot.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use crate::{
    Timestamp,
    cache::{
        Cache,
        confirmed_rules::ConfirmedRules,
        entries::{Entry, names::Term},
        ports::Key,
        snapshot::{Saved, SavedEntry, Snapshot},
    },
    io::input::MarkFound,
    pods::ports::Ports,
    policy::{plan::RuleInPlace, rules::ChangedNames},
    values::{
        flow::{Cookie, FlowKey},
        ids::PortId,
        limits::{Limit, MARKS_ADOPTED_MAX},
    },
};

/// Flows of an earlier run whose names are not known.
#[derive(Debug)]
pub(crate) struct Adopted {
    /// The flows, and their cookies.
    pub(crate) flows: BTreeMap<FlowKey, Cookie>,
    /// The rules that have given the flows ever since, sorted; `None` while the flows are being adopted. No other rule
    /// counts: no answer has said that the address is one of its names.
    pub(crate) rules: Option<Vec<RuleInPlace>>,
    /// Whether one of the flows closes all ports for a rule that denies some ([`Ruled::closes`]).
    ///
    /// [`Ruled::closes`]: crate::policy::plan::Ruled
    pub(crate) closes: bool,
    /// Whether the flows are in the switch already, while they are being adopted.
    pub(super) in_switch: bool,
    /// How long the flows are kept in any case.
    pub(crate) term: Term,
    /// Flows that allow are not kept for longer, used or not: their rule may have been edited while no agent ran.
    pub(super) latest_end: Timestamp,
}

impl Adopted {
    /// Whether rules of these names matter to the flows. One that closes all ports goes once the rules behind its own
    /// that deny have their flows, whatever their names.
    pub(crate) fn is_of_any(&self, names: &ChangedNames) -> bool {
        let is_one = |((name, ..), _): &RuleInPlace| names.contains_key(name);
        let rules = self.rules.as_ref();
        self.closes || rules.is_none_or(|rules| rules.iter().any(is_one))
    }

    /// Whether flows that allow are kept no longer.
    pub(crate) fn is_late(&self, now: Timestamp) -> bool {
        self.latest_end <= now
    }
}

/// A flow of an earlier run, for one address.
pub(crate) struct FormerFlow {
    /// The flow.
    pub(crate) key: FlowKey,
    /// Its cookie.
    pub(crate) cookie: Cookie,
    /// Whether it is in the switch. If not, a group has this flow for the address.
    pub(crate) in_switch: bool,
}

impl Cache {
    /// Takes over the snapshot of an earlier run.
    pub(crate) fn load_snapshot(&mut self, saved: Saved, now: Timestamp) {
        self.rules.load(saved.rules);
        self.earlier.load(saved.entries, now);
    }

    /// The rules of a namespace in the snapshot of an earlier run, until all of its flows have been adopted; `None` if it
    /// does not have the namespace.
    pub(crate) fn former_rules(&self, namespace: &str) -> Option<Arc<[RuleInPlace]>> {
        let is_adopted = self.earlier.is_adopted();
        let rules = self.rules.of(namespace).filter(|_| !is_adopted);
        rules.cloned()
    }

    /// The rules by which the flows in the switch were written.
    pub(crate) fn confirmed_rules(&self) -> &ConfirmedRules {
        &self.rules
    }

    /// The same, to be changed.
    pub(crate) fn confirmed_rules_mut(&mut self) -> &mut ConfirmedRules {
        &mut self.rules
    }

    /// Whether there is a snapshot of an earlier run with rules, and it has no pod under the name of this port.
    pub(crate) fn snapshot_lacks_pod_of(&self, port: PortId) -> bool {
        let may_lack = !self.earlier.is_adopted() && !self.rules.is_empty();
        may_lack && self.earlier.lacks_pod_of(port)
    }

    /// Forgets the ports of an earlier run that have not come back: all ports were opened. Their pods are gone.
    pub(crate) fn forget_saved(&mut self) {
        self.earlier.forget_awaited();
    }

    /// Notes that a flow of an earlier run was found. Returns `false` if the names of the address are known, or the port is
    /// gone.
    pub(crate) fn adopt(
        &mut self,
        (port, address): Key,
        flow: FormerFlow,
        term: Term,
        now: Timestamp,
    ) -> bool {
        let latest_end = now + self.limits.max_ttl;
        self.ports.change(port, |port| {
            port.entries.adopt(address, flow, term, latest_end)
        })
    }

    /// Takes out the marks of an earlier run for whose addresses there is no room, with the limit: of a port's addresses,
    /// those that were used last stay, and ports take turns up to the limit of the node. A known address has its room.
    pub(crate) fn take_without_room(
        &self,
        marks: &mut Vec<(PortId, MarkFound)>,
    ) -> Vec<(PortId, MarkFound, Limit)> {
        marks.sort_unstable_by_key(|(_, found)| Reverse((found.used_at, found.until)));
        let mut unknown: BTreeMap<PortId, usize> = BTreeMap::new();
        let mut in_turns: Vec<(usize, PortId, MarkFound)> = Vec::with_capacity(marks.len());
        for (port, found) in marks.drain(..) {
            let turn = match self.entry(port, found.address) {
                Some(_) => 0,
                None => {
                    let of_port = unknown.entry(port).or_default();
                    *of_port += 1;
                    *of_port
                }
            };
            in_turns.push((turn, port, found));
        }
        in_turns.sort_by_key(|(turn, ..)| *turn);
        let taken = self.ports.totals().taken();
        let room_of_node = self.limits.names_per_node_max.saturating_sub(taken);
        let room_of_node = room_of_node.min(MARKS_ADOPTED_MAX);
        let mut adopted = 0;
        let mut left_out = Vec::new();
        for (turn, port, found) in in_turns {
            let room = self.limits.addresses_per_port_max;
            let room = room.saturating_sub(self.count(port));
            if turn > room {
                left_out.push((port, found, Limit::AddressesOfPod));
            } else if turn > 0 && adopted >= room_of_node {
                left_out.push((port, found, Limit::NamesOfNode));
            } else {
                adopted += usize::from(turn > 0);
                marks.push((port, found));
            }
        }
        left_out
    }

    /// The flows of the earlier run have been adopted, or are being removed.
    pub(crate) fn has_adopted_all(&mut self) {
        self.earlier.adopted_all();
    }

    /// Forgets the adopted flows of an entry that its plan does not have, for good: a rule that comes later does not
    /// bring them back. Removes an entry that nothing holds any more.
    pub(super) fn forget_unruled(&mut self, (port, address): Key) {
        let groups = &self.groups;
        let is_over = self.ports.change(port, |port| {
            port.entries.retain_adopted(address, |adopted, installed| {
                let flows = match installed.group() {
                    None => installed.own(),
                    Some(id) => groups.flows(id),
                };
                let is_ruled =
                    |key: &FlowKey, cookie| flows.is_some_and(|flows| flows.has(key, cookie));
                adopted.flows.retain(|key, cookie| is_ruled(key, *cookie));
                adopted.in_switch = false;
                !adopted.flows.is_empty()
            });
            port.entries.get(address).is_some_and(Entry::is_over)
        });
        match is_over {
            true => drop(self.take((port, address))),
            false => self.look_in_time(port, address),
        }
    }

    /// A number that grows whenever a snapshot would differ.
    pub(crate) fn version(&self) -> u64 {
        self.version + self.earlier.version() + self.rules.version()
    }

    /// The next part of a snapshot: the names of all addresses of one port, then those of ports that are not there.
    /// `None` if it has all of them.
    ///
    /// A name whose flows are not wanted or cannot be written yet is one of them: the rules may not be known, or the
    /// switch may be away.
    pub(crate) fn next_part(
        &self,
        ports: &Ports,
        snapshot: &mut Snapshot,
    ) -> Option<Vec<SavedEntry>> {
        let Some((id, port)) = self.ports.next_after(snapshot.port) else {
            return self.earlier.next_part(snapshot);
        };
        snapshot.port = Some(id);
        let row = ports.get(id).map(|port| &port.row);
        let entries = row.map(|row| {
            let pod = row.iface_id_ver.as_deref();
            port.entries.saved((&row.iface_id, pod), snapshot.at)
        });
        Some(entries.unwrap_or_default())
    }
}
