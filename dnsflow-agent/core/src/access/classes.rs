//! The classes of names whose addresses the kernel opens by itself.
//!
//! Which rules match a name depends on the longest of the names that the rules mention, of those that it lies at or
//! below, and on whether it lies at it, one label below, or deeper. So all names of a class have one plan for each IP
//! version. Once the switch has the flows of its group, the kernel may open further addresses of the class: nothing is
//! to be written to the switch (`docs/decisions/kernel-opens.md`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{
    Command, Timestamp,
    access::elements::{Element, Elements},
    installed::{Groups, NotInForce},
    io::{input::ClassChange, output::Output},
    values::{class::NameClass, flow::Tag, ids::PortId},
};

/// The classes that the kernel knows, and what it is still to be told.
#[derive(Debug, Default)]
pub(crate) struct Classes {
    of_ports: BTreeMap<PortId, OfPort>,
    /// Where the kernel has them.
    elements: Elements,
    changes: Vec<ClassChange>,
    /// How often the commands were taken.
    turn: u64,
    /// The classes whose commands are being carried out, and those whose commands were not taken yet.
    under_way: Vec<(PortId, NameClass)>,
    decided: Vec<(PortId, NameClass)>,
    earlier: Earlier,
    /// Whether the kernel is still to be told that the programs of earlier agents open nothing.
    ends_earlier: bool,
}

/// Whether the programs of earlier agents may open addresses. They do so by classes that this agent does not know.
#[derive(Debug, Default)]
enum Earlier {
    /// The rules are not known yet.
    #[default]
    Unknown,
    /// They may, at these interfaces: the rules have not changed since these agents.
    Allowed(BTreeSet<u32>),
    /// They may not, or are gone.
    Ended,
}

/// The classes of one port.
#[derive(Debug)]
struct OfPort {
    ifindex: u32,
    groups: BTreeMap<NameClass, ToldGroup>,
    /// Addresses with flows of their own that the kernel has opened by a mark as well, and when that was heard.
    marked_beside: BTreeMap<IpAddr, Timestamp>,
}

/// The group of a class, as the kernel was told.
#[derive(Clone, Copy, Debug)]
struct ToldGroup {
    group: Tag,
    element: Element,
    /// The turn in which the agent has decided to tell the kernel.
    turn: u64,
    /// When the kernel had been told. A mark that it has set before may be by former rules.
    at: Option<Timestamp>,
}

impl Classes {
    /// The kernel may open further addresses of this class of a port: they have this group, which is in force. Without an
    /// element, the agent goes on to open them, and each answer asks again.
    pub(crate) fn open(
        &mut self,
        (port, class): (PortId, NameClass),
        tag: Tag,
        groups: &Groups,
        now: Timestamp,
    ) {
        let (Some(ifindex), Some(mark)) = (groups.interface(port), groups.mark(tag)) else {
            return;
        };
        let of_port = self.of_ports.get(&port);
        match of_port.and_then(|of_port| of_port.groups.get(&class)) {
            Some(told) if told.group == tag => return,
            Some(_) => self.take_away(port, port, |groups| groups.remove_entry(&class)),
            None => {}
        }
        let Some(element) = self.element(port, now) else {
            return;
        };
        let of_port = self.of_ports.entry(port).or_insert_with(|| OfPort {
            ifindex,
            groups: BTreeMap::new(),
            marked_beside: BTreeMap::new(),
        });
        let told = ToldGroup {
            group: tag,
            element,
            turn: self.turn,
            at: None,
        };
        of_port.groups.insert(class.clone(), told);
        self.decided.push((port, class.clone()));
        self.changes.push(ClassChange::Set {
            ifindex,
            class,
            mark,
            element,
        });
    }

    /// An element for a further class of a port. If few are free, the port that has most gives one back for it.
    fn element(&mut self, port: PortId, now: Timestamp) -> Option<Element> {
        self.elements.end_rests(now);
        if !self.elements.has_room(port) {
            return None;
        }
        if self.elements.are_few() {
            let most = self.elements.most_beside(port)?;
            self.take_away(most, port, BTreeMap::pop_last);
        }
        self.elements.take(port)
    }

    /// Takes one of its classes from a port, for this one.
    fn take_away(
        &mut self,
        port: PortId,
        lost_for: PortId,
        which: impl FnOnce(&mut BTreeMap<NameClass, ToldGroup>) -> Option<(NameClass, ToldGroup)>,
    ) {
        let Some(of_port) = self.of_ports.get_mut(&port) else {
            return;
        };
        let ifindex = of_port.ifindex;
        if let Some((class, told)) = which(&mut of_port.groups) {
            self.elements.lose(port, told.element, lost_for);
            self.changes.push(ClassChange::Remove { ifindex, class });
        }
    }

    /// The kernel does not have the classes of these elements. The next answer of each tries again.
    pub(crate) fn refused(&mut self, elements: &BTreeSet<Element>) {
        self.retain(|_, told| !elements.contains(&told.element));
    }

    /// Whether the kernel could open addresses of this class by the rules of today when it captured a frame.
    pub(crate) fn had(&self, port: PortId, class: &NameClass, captured_at: Timestamp) -> bool {
        let of_port = self.of_ports.get(&port);
        let told = of_port.and_then(|of_port| of_port.groups.get(class));
        let at = told.and_then(|told| told.at);
        at.is_some_and(|at| at <= captured_at)
    }

    /// The commands are taken, and those that were taken before have been carried out: the kernel has been told of their
    /// classes.
    pub(crate) fn commands_taken(&mut self, now: Timestamp) {
        self.turn += 1;
        self.elements.commands_taken(now);
        let decided = std::mem::take(&mut self.decided);
        for (port, class) in std::mem::replace(&mut self.under_way, decided) {
            let of_port = self.of_ports.get_mut(&port);
            let told = of_port.and_then(|of_port| of_port.groups.get_mut(&class));
            // The class may have gone and come back since.
            if let Some(told) = told.filter(|told| told.turn + 2 == self.turn) {
                told.at = Some(now);
            }
        }
    }

    /// The kernel has opened an address of a class that it knows, which has flows of its own. The next reading of the
    /// marks removes the mark.
    pub(crate) fn note_beside(&mut self, port: PortId, address: IpAddr, now: Timestamp) {
        if let Some(of_port) = self.of_ports.get_mut(&port) {
            of_port.marked_beside.insert(address, now);
        }
    }

    /// A reading of all marks has removed those that were noted before it began.
    pub(crate) fn marks_read(&mut self, since: Timestamp) {
        for of_port in self.of_ports.values_mut() {
            of_port.marked_beside.retain(|_, at| *at >= since);
        }
    }

    /// Whether the programs of earlier agents may open addresses is still to be decided.
    pub(crate) fn are_earlier_unknown(&self) -> bool {
        matches!(self.earlier, Earlier::Unknown)
    }

    /// The rules are known. They are those of the earlier agents, or not. The interfaces are those at which their
    /// programs may open addresses.
    pub(crate) fn decide_earlier(&mut self, are_rules_same: bool, interfaces: BTreeSet<u32>) {
        self.earlier = Earlier::Allowed(interfaces);
        if !are_rules_same {
            self.end_earlier();
        }
    }

    /// The programs of earlier agents may open nothing any more. Returns whether they could before.
    pub(crate) fn end_earlier(&mut self) -> bool {
        let is_news = self.may_earlier_open();
        if is_news {
            self.earlier = Earlier::Ended;
            self.ends_earlier = true;
        }
        is_news
    }

    /// The programs of earlier agents are gone, and their records are read.
    pub(crate) fn earlier_are_read(&mut self) {
        self.earlier = Earlier::Ended;
    }

    /// Whether the programs of earlier agents may open addresses at any interface.
    pub(crate) fn may_earlier_open(&self) -> bool {
        matches!(self.earlier, Earlier::Allowed(_))
    }

    /// The same at this interface.
    pub(crate) fn may_earlier_open_at(&self, ifindex: u32) -> bool {
        matches!(&self.earlier, Earlier::Allowed(interfaces) if interfaces.contains(&ifindex))
    }

    /// Takes out those of these addresses, which are never opened any more.
    pub(crate) fn take_beside(&mut self, port: PortId, addresses: &[IpAddr]) -> BTreeSet<IpAddr> {
        let of_port = self.of_ports.get_mut(&port).into_iter();
        let taken = of_port.flat_map(|of_port| {
            let known = &mut of_port.marked_beside;
            addresses
                .iter()
                .filter(move |address| known.remove(*address).is_some())
                .copied()
        });
        taken.collect()
    }

    /// The rules for a port, or where they are enforced, may be others: the kernel opens nothing at its interface
    /// before an answer has shown that the rules are in force. Returns the addresses whose marks by these rules are
    /// nobody's.
    #[must_use]
    pub(crate) fn forget(&mut self, port: PortId) -> BTreeSet<IpAddr> {
        let Some(of_port) = self.of_ports.remove(&port) else {
            return BTreeSet::new();
        };
        let OfPort {
            ifindex,
            groups,
            marked_beside,
        } = of_port;
        for (class, told) in groups {
            self.elements.lose(port, told.element, port);
            self.changes.push(ClassChange::Remove { ifindex, class });
        }
        marked_beside.into_keys().collect()
    }

    /// The same for groups and ports that are not in force any more.
    pub(crate) fn out_of_force(&mut self, gone: &NotInForce) {
        if gone.groups.is_empty() && gone.ports.is_empty() {
            // As at nearly every input.
            return;
        }
        self.end_earlier();
        self.retain(|port, told| !gone.groups.contains(&told.group) && !gone.ports.contains(&port));
    }

    /// Takes all other classes away.
    fn retain(&mut self, stays: impl Fn(PortId, &ToldGroup) -> bool) {
        for (port, of_port) in &mut self.of_ports {
            let ifindex = of_port.ifindex;
            for (class, told) in of_port.groups.extract_if(.., |_, told| !stays(*port, told)) {
                self.elements.lose(*port, told.element, *port);
                self.changes.push(ClassChange::Remove { ifindex, class });
            }
        }
    }

    /// Tells the kernel of the changes.
    pub(crate) fn give_out(&mut self, out: &mut Output) {
        if std::mem::take(&mut self.ends_earlier) {
            out.command(Command::EndEarlierOpening);
        }
        if !self.changes.is_empty() {
            out.command(Command::ChangeClasses(std::mem::take(&mut self.changes)));
        }
    }
}

#[cfg(test)]
mod tests;
