//! The pods' interfaces and their logical ports: which pod a frame belongs to, and which ports
//! belong to one pod.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    time::Duration,
};

use crate::{
    Command, Timestamp,
    io::{
        input::{AttachCommand, SourceAddresses},
        output::Output,
        report::{NotTrusted, Report},
    },
    ovn::{
        rows::{Interface, InterfaceUpdate, RowId},
        view::{Changed, Table},
    },
    tools::deadline::{self, Deadline, Why},
    values::ids::{PortId, SandboxId},
};

/// For so long attaching may fail before people are told: a row of a pod that comes or goes may be there
/// without its veth.
const NOT_ATTACHED_FOR: Duration = Duration::from_secs(5);

/// A logical port with an interface on this node.
#[derive(Debug)]
pub(crate) struct Port {
    /// The `Interface` row.
    pub(crate) interface: RowId,
    /// The content of the row.
    pub(crate) row: Interface,
    /// The interface index of the veth's host side, once the veth was found.
    pub(crate) ifindex: Option<u32>,
    /// The pod's sandbox.
    pub(crate) sandbox: SandboxId,
}

/// A sandbox that the CNI has named.
#[derive(Debug)]
struct Sandbox {
    id: SandboxId,
    ports: BTreeSet<PortId>,
}

/// A change of a port. Changes are applied in their order: a later change may close a port that an
/// earlier one opened.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum PortChange {
    /// A pod's interface has come.
    Opened(PortId),
    /// The addresses or the network have changed.
    Moved(PortId),
    /// The interface is gone, and its veth.
    Closed {
        /// The port.
        port: PortId,
        /// The interface index of the veth's host side, if it was known.
        ifindex: Option<u32>,
    },
}

/// Interfaces and ports of the node.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    interfaces: Table<Interface>,
    /// The user-defined networks that are the primary ones of their pods, once OVN's databases were
    /// read.
    primary_networks: Option<BTreeSet<String>>,
    /// The addresses that count at each interface, as they were last commanded.
    sources: BTreeMap<RowId, SourceAddresses>,
    /// Why nothing counts at an interface, as it was last reported.
    not_trusted: BTreeMap<RowId, NotTrusted>,
    /// The interface index of each veth that was found.
    found: BTreeMap<RowId, u32>,
    /// Interfaces, of those that are there, to which attaching was tried; with the reason where the programs are not
    /// attached.
    tried: BTreeMap<RowId, Option<String>>,
    /// Interfaces to which the programs are not attached although that was tried: when that is to be
    /// reported, or `None` once it was.
    failing: BTreeMap<RowId, Option<Timestamp>>,
    ports: BTreeMap<PortId, Port>,
    next: u32,
    by_name: HashMap<String, PortId>,
    by_ifindex: HashMap<u32, PortId>,
    /// The sandboxes by the CNI's names.
    sandboxes: HashMap<String, Sandbox>,
    next_sandbox: u32,
    /// The ports that have another sandbox than before.
    regrouped: Vec<PortId>,
}

impl Ports {
    // What changes them.

    /// Applies changed rows.
    pub(crate) fn apply(&mut self, update: InterfaceUpdate, out: &mut Output) -> Vec<PortChange> {
        let mut changes = Vec::new();
        let changed = self.interfaces.apply(update.reset, update.interfaces);
        // First the rows that are gone: the new row of a recreated pod may come in the same
        // transaction.
        let (gone, rest): (Vec<_>, Vec<_>) = changed.into_iter().partition(|c| c.new.is_none());
        for Changed { id, old, .. } in gone {
            self.found.remove(&id);
            self.tried.remove(&id);
            self.failing.remove(&id);
            self.sources.remove(&id);
            self.not_trusted.remove(&id);
            out.command(Command::Attachment(AttachCommand::Detach { interface: id }));
            if let Some(old) = old {
                self.interface_gone(id, &old, &mut changes);
            }
        }
        for Changed { id, old, new } in rest {
            let Some(row) = new else { continue };
            // A veth that replaces another one has the same name and another index.
            let policed = row.policing_kbps > 0;
            let replaced = |old: &Interface| {
                (&old.name, old.ifindex) != (&row.name, row.ifindex)
                    || (old.policing_kbps > 0) != policed
            };
            if old.as_ref().is_none_or(replaced) {
                let sources = self.sources_of(&row).unwrap_or_default();
                self.sources.insert(id, sources.clone());
                out.command(Command::Attachment(AttachCommand::Attach {
                    interface: id,
                    name: row.name.to_string(),
                    policed,
                    sources,
                }));
            }
            self.trust_sources(id, &row, out);
            if let Some(old) = old.filter(|old| old.iface_id != row.iface_id) {
                self.interface_gone(id, &old, &mut changes);
            }
            self.interface_present(id, row, &mut changes);
        }
        changes
    }

    /// These user-defined networks are the primary ones of their pods.
    pub(crate) fn learn_primary_networks(&mut self, networks: BTreeSet<String>, out: &mut Output) {
        if self.primary_networks.as_ref() == Some(&networks) {
            return;
        }
        self.primary_networks = Some(networks);
        let on_user_networks = self.interfaces.iter();
        let concerned: Vec<_> = on_user_networks
            .filter(|(_, row)| row.network.is_some())
            .map(|(id, row)| (id, row.clone()))
            .collect();
        for (id, row) in concerned {
            self.trust_sources(id, &row, out);
        }
    }

    /// Whether the interface is on a primary user-defined network: its pod sends by no other one.
    pub(crate) fn is_on_primary_network(&self, row: &Interface) -> bool {
        let network = row.network.as_ref();
        let primary = self.primary_networks.as_ref();
        network
            .zip(primary)
            .is_some_and(|(network, primary)| primary.contains(network))
    }

    /// Whether nothing counts at the interface because it is on a secondary network, as far as that is known.
    pub(crate) fn is_on_secondary_network(&self, row: &Interface) -> bool {
        row.network.is_some() && !self.is_on_primary_network(row)
    }

    /// Commands which addresses count at an interface, if they are others than before, and reports
    /// where none does.
    fn trust_sources(&mut self, id: RowId, row: &Interface, out: &mut Output) {
        let sources = self.sources_of(row);
        let reason = sources.as_ref().err().cloned();
        let sources = sources.unwrap_or_default();
        if self.sources.get(&id) != Some(&sources) {
            self.sources.insert(id, sources.clone());
            out.command(Command::Attachment(AttachCommand::TrustSources {
                interface: id,
                sources,
            }));
        }
        // Which networks are primary is known a moment later than the interfaces.
        let is_final = row.network.is_none() || self.primary_networks.is_some();
        if is_final && self.not_trusted.get(&id) != reason.as_ref() {
            match reason {
                None => self.not_trusted.remove(&id),
                Some(reason) => {
                    out.report(Report::PortNotTrusted {
                        port: row.iface_id.clone(),
                        reason: reason.clone(),
                    });
                    self.not_trusted.insert(id, reason)
                }
            };
        }
    }

    /// The addresses that count at an interface.
    ///
    /// The link-local address that port security of OVN lets pass as well is none of them: a router
    /// does not forward from it (RFC 4291, section 2.5.6), and a resolver is behind one.
    fn sources_of(&self, row: &Interface) -> Result<SourceAddresses, NotTrusted> {
        if let Some(network) = &row.network
            && !self.is_on_primary_network(row)
        {
            return Err(NotTrusted::SecondaryNetwork(network.clone()));
        }
        if row.addresses.is_empty() || row.mac.is_none() {
            return Err(NotTrusted::NoAddresses);
        }
        Ok(SourceAddresses {
            mac: row.mac,
            ips: row.addresses.clone(),
        })
    }

    fn interface_present(&mut self, id: RowId, row: Interface, changes: &mut Vec<PortChange>) {
        if let Some(&port_id) = self.by_name.get(&row.iface_id)
            && let Some(port) = self.ports.get_mut(&port_id)
        {
            let same_pod = port.row.iface_id_ver == row.iface_id_ver;
            if port.interface == id && same_pod {
                let moved = port.row.addresses != row.addresses || port.row.network != row.network;
                let old = std::mem::replace(&mut port.row, row);
                if old.sandbox != port.row.sandbox {
                    let new = port.row.sandbox.clone();
                    self.leave_sandbox(old.sandbox, port_id);
                    let sandbox = self.enter_sandbox(new, port_id);
                    if let Some(port) = self.ports.get_mut(&port_id) {
                        port.sandbox = sandbox;
                        self.regrouped.push(port_id);
                    }
                }
                changes.extend(moved.then_some(PortChange::Moved(port_id)));
                return;
            }
            // Another pod under the same name.
            self.close(port_id, changes);
        }
        self.open(id, row, changes);
    }

    fn interface_gone(&mut self, id: RowId, row: &Interface, changes: &mut Vec<PortChange>) {
        let Some(&port_id) = self.by_name.get(&row.iface_id) else {
            return;
        };
        if self.get(port_id).is_none_or(|port| port.interface != id) {
            return;
        }
        self.close(port_id, changes);
        let heir = self
            .interfaces
            .iter()
            .find(|(_, other)| other.iface_id == row.iface_id)
            .map(|(id, other)| (id, other.clone()));
        if let Some((id, row)) = heir {
            self.open(id, row, changes);
        }
    }

    fn open(&mut self, interface: RowId, row: Interface, changes: &mut Vec<PortChange>) {
        let id = PortId(self.next);
        self.next += 1;
        self.by_name.insert(row.iface_id.clone(), id);
        let sandbox = self.enter_sandbox(row.sandbox.clone(), id);
        let ifindex = self.found.get(&interface).copied();
        self.by_ifindex.extend(ifindex.map(|ifindex| (ifindex, id)));
        let port = Port {
            interface,
            row,
            ifindex,
            sandbox,
        };
        self.ports.insert(id, port);
        changes.push(PortChange::Opened(id));
    }

    fn close(&mut self, id: PortId, changes: &mut Vec<PortChange>) {
        let Some(port) = self.ports.remove(&id) else {
            return;
        };
        self.by_name.remove(&port.row.iface_id);
        if let Some(ifindex) = port.ifindex {
            self.by_ifindex.remove(&ifindex);
        }
        self.leave_sandbox(port.row.sandbox, id);
        changes.push(PortChange::Closed {
            port: id,
            ifindex: port.ifindex,
        });
    }

    /// Adds a port to a sandbox. Returns the number of the sandbox.
    fn enter_sandbox(&mut self, sandbox: Option<String>, id: PortId) -> SandboxId {
        let next = SandboxId(self.next_sandbox);
        let known = sandbox.map(|name| {
            let known = self.sandboxes.entry(name).or_insert_with(|| Sandbox {
                id: next,
                ports: BTreeSet::new(),
            });
            known.ports.insert(id);
            known.id
        });
        let sandbox = known.unwrap_or(next);
        self.next_sandbox += u32::from(sandbox == next);
        sandbox
    }

    fn leave_sandbox(&mut self, sandbox: Option<String>, id: PortId) {
        if let Some(sandbox) = sandbox
            && let Some(known) = self.sandboxes.get_mut(&sandbox)
        {
            known.ports.remove(&id);
            if known.ports.is_empty() {
                self.sandboxes.remove(&sandbox);
            }
        }
    }

    /// Takes the ports that have another sandbox than when last asked.
    pub(crate) fn take_regrouped(&mut self) -> Vec<PortId> {
        std::mem::take(&mut self.regrouped)
    }

    /// The veth of an interface was found. Returns whether the interface is known.
    pub(crate) fn found(&mut self, interface: RowId, ifindex: u32) -> bool {
        let Some(row) = self.interfaces.find(interface) else {
            return false;
        };
        // An index that was another veth's: that one is gone, and its row goes late.
        self.found.retain(|_, known| *known != ifindex);
        self.found.insert(interface, ifindex);
        if let Some(&port_id) = self.by_name.get(&row.iface_id)
            && let Some(port) = self.ports.get_mut(&port_id)
            && port.interface == interface
        {
            if let Some(old) = port.ifindex.replace(ifindex) {
                self.by_ifindex.remove(&old);
            }
            let taken = self.by_ifindex.insert(ifindex, port_id);
            if let Some(taken) = taken.filter(|taken| *taken != port_id)
                && let Some(port) = self.ports.get_mut(&taken)
            {
                port.ifindex = None;
            }
        }
        true
    }

    /// The programs were attached to the veth of an interface for the first time.
    pub(crate) fn attached(&mut self, interface: RowId) {
        if self.interfaces.find(interface).is_some() {
            self.tried.insert(interface, None);
        }
        self.failing.remove(&interface);
    }

    /// The programs could not be attached yet.
    pub(crate) fn not_attached(&mut self, interface: RowId, reason: String, now: Timestamp) {
        if self.interfaces.find(interface).is_some() {
            self.tried.insert(interface, Some(reason));
            let report_at = Some(now + NOT_ATTACHED_FOR);
            self.failing.entry(interface).or_insert(report_at);
        }
    }

    /// When [`Ports::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        let report_at = self.failing.values().flatten().min();
        deadline::at(report_at.copied(), Why::Attachment)
    }

    /// Reports the interfaces to which the programs could not be attached for so long, once each.
    pub(crate) fn timeout(&mut self, out: &mut Output) {
        let now = out.now();
        for (interface, report_at) in &mut self.failing {
            if report_at.take_if(|at| *at <= now).is_some()
                && let Some(row) = self.interfaces.find(*interface)
                && let Some(Some(reason)) = self.tried.get(interface)
            {
                out.report(Report::NotAttached {
                    port: row.iface_id.clone(),
                    pod_uid: row.iface_id_ver.clone(),
                    interface: row.name.to_string(),
                    reason: reason.clone(),
                });
            }
        }
    }

    // What is known of them.

    /// A port, while it is there.
    pub(crate) fn get(&self, id: PortId) -> Option<&Port> {
        self.ports.get(&id)
    }

    /// The addresses of a port's pod.
    pub(crate) fn addresses(&self, id: PortId) -> impl Iterator<Item = IpAddr> {
        let port = self.ports.get(&id).into_iter();
        port.flat_map(|port| port.row.addresses.iter().copied())
    }

    /// Every port.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PortId, &Port)> {
        self.ports.iter().map(|(id, port)| (*id, port))
    }

    /// The logical port of this name.
    pub(crate) fn named(&self, name: &str) -> Option<PortId> {
        self.by_name.get(name).copied()
    }

    /// The port of an interface.
    pub(crate) fn of_interface(&self, interface: RowId) -> Option<PortId> {
        let mut ports = self.ports.iter();
        let (id, _) = ports.find(|(_, port)| port.interface == interface)?;
        Some(*id)
    }

    /// The port of a veth.
    pub(crate) fn at_veth(&self, ifindex: u32) -> Option<PortId> {
        self.by_ifindex.get(&ifindex).copied()
    }

    /// How many ports have a veth that was found.
    pub(crate) fn with_veth(&self) -> usize {
        self.by_ifindex.len()
    }

    /// Whether attaching was tried for every interface.
    pub(crate) fn are_tried(&self) -> bool {
        self.tried.len() == self.interfaces.len()
    }

    /// Whether the programs are attached to an interface: `None` while that was not tried, else the
    /// reason why they are not.
    pub(crate) fn attachment(&self, interface: RowId) -> Option<Option<&str>> {
        self.tried.get(&interface).map(Option::as_deref)
    }

    /// Why DNS answers at an interface are ignored, if so.
    pub(crate) fn not_trusted(&self, interface: RowId) -> Option<&NotTrusted> {
        self.not_trusted.get(&interface)
    }

    /// Every port of the same pod: a pod on a user-defined network asks on one port and connects on another.
    pub(crate) fn of_pod(&self, port: PortId) -> Vec<PortId> {
        let sandbox = self.get(port).and_then(|port| port.row.sandbox.as_ref());
        let of_pod = sandbox.and_then(|sandbox| self.sandboxes.get(sandbox));
        match of_pod {
            Some(sandbox) => sandbox.ports.iter().copied().collect(),
            None => vec![port],
        }
    }

    /// The ports of the same pod, each with whether the pod may send by it to the outside of the cluster: with a primary
    /// user-defined network by that alone, else by all but those on secondary networks. While OVN's databases are not
    /// read, by all.
    pub(crate) fn of_pod_with_ways_out(&self, port: PortId) -> Vec<(PortId, bool)> {
        let is_on_primary = |row| self.is_on_primary_network(row);
        let ports = self.of_pod(port).into_iter();
        let ports = ports.filter_map(|id| Some((id, &self.get(id)?.row)));
        let ports: Vec<(PortId, &Interface)> = ports.collect();
        let has_primary = ports.iter().any(|(_, row)| is_on_primary(row));
        let are_known = self.primary_networks.is_some();
        let ports = ports.into_iter().map(|(id, row)| {
            let is_way_out = match has_primary {
                true => is_on_primary(row),
                false => !are_known || row.network.is_none(),
            };
            (id, is_way_out)
        });
        ports.collect()
    }
}

#[cfg(test)]
mod tests;
