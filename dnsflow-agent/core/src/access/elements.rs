//! The elements of the kernel's array of classes: which are free, and how many each port has.
//!
//! A program may read an element that no key leads to any more. So each rests before another class has it. A port has a
//! limit for the elements of its classes and for those that rest, because each edit takes all of its classes away
//! (`docs/decisions/kernel-opens.md`, "Elements").

use std::{
    collections::VecDeque,
    mem::{replace, take},
};

use dnsflow_common::key::CLASSES_MAX;

use crate::{
    Timestamp,
    tools::shares::Shares,
    values::{
        ids::PortId,
        limits::{CLASS_RESTS, CLASSES_PER_PORT_MAX},
    },
};

/// The number of an element.
pub(super) type Element = u32;

/// All elements.
#[derive(Debug)]
pub(super) struct Elements {
    /// How many count for each port, also of those that rest.
    shares: Shares<PortId>,
    per_port_max: usize,
    free: Vec<Element>,
    /// If no more are free, each further one is another port's.
    free_min: usize,
    /// Those that a class has lost, by whom they count for: the command is not taken yet, …
    lost: Vec<(PortId, Element)>,
    /// … or is being carried out, …
    leaving: Vec<(PortId, Element)>,
    /// … or was carried out: they rest until then. The first to end stands first.
    resting: VecDeque<(Timestamp, PortId, Element)>,
}

impl Default for Elements {
    fn default() -> Self {
        Self::new(CLASSES_MAX, CLASSES_PER_PORT_MAX)
    }
}

impl Elements {
    /// So many, which are free.
    pub(super) fn new(count: u32, per_port_max: usize) -> Self {
        Self {
            shares: Shares::default(),
            per_port_max,
            free: (0..count).rev().collect(),
            free_min: count as usize / 4,
            lost: Vec::new(),
            leaving: Vec::new(),
            resting: VecDeque::new(),
        }
    }

    /// Whether a port may have a further element, and there is one.
    pub(super) fn has_room(&self, port: PortId) -> bool {
        self.shares.of(port) < self.per_port_max && !self.free.is_empty()
    }

    /// Whether few elements are free: each further one is another port's.
    pub(super) fn are_few(&self) -> bool {
        self.free.len() <= self.free_min
    }

    /// The port that has most, if it has more than this one even after it has given one back: until that one has rested,
    /// it counts for this port.
    pub(super) fn most_beside(&self, port: PortId) -> Option<PortId> {
        let has_more = |most: &PortId| self.shares.of(port) + 2 < self.shares.of(*most);
        self.shares.most().filter(has_more)
    }

    /// Takes a free element.
    pub(super) fn take(&mut self, port: PortId) -> Option<Element> {
        let element = self.free.pop()?;
        self.shares.change(port, 0, 1);
        Some(element)
    }

    /// A class of a port has lost its element. Until that has rested, it counts for the port for which it was lost.
    pub(super) fn lose(&mut self, port: PortId, element: Element, lost_for: PortId) {
        self.shares.change(port, 1, 0);
        self.shares.change(lost_for, 0, 1);
        self.lost.push((lost_for, element));
    }

    /// The commands are taken, and those that were taken before have been carried out.
    pub(super) fn commands_taken(&mut self, now: Timestamp) {
        let lost = take(&mut self.lost);
        let left = replace(&mut self.leaving, lost).into_iter();
        let until = now + CLASS_RESTS;
        self.resting
            .extend(left.map(|(port, element)| (until, port, element)));
    }

    /// Elements that have rested are free.
    pub(super) fn end_rests(&mut self, now: Timestamp) {
        while let Some((_, port, element)) = self.resting.pop_front_if(|(until, ..)| *until <= now)
        {
            self.shares.change(port, 1, 0);
            self.free.push(element);
        }
    }
}
