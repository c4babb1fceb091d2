//! Changes that go to the switch together.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use crate::{
    Command, Timestamp,
    io::{
        input::{BatchId, MarkChange},
        output::Output,
    },
    ovn::rows::Interface,
    pods::budget::Changes,
    values::{
        connection::Path,
        flow::{Addresses, FlowChange},
        limits::PATHS_PER_LOOK_MAX,
    },
};

/// Changes that are being planned. [`Switch::begin`](crate::switch::Switch::begin) makes the batch before
/// anything is planned. Each flow can therefore note at once which batch writes it, and whether the
/// batch will be sent at all.
#[derive(Debug)]
#[must_use = "changes count once the batch is committed"]
pub(crate) struct Batch {
    pub(crate) written: Written,
    /// When the flows in the batch count as written.
    pub(crate) written_at: Timestamp,
    /// The time of the step that plans changes, in the end that of the sending.
    pub(crate) at: Timestamp,
    /// How many comparisons with the switch have ended.
    pub(crate) comparisons: u32,
    /// Whether a rule denies the addresses of the batch: then it goes before the waiting changes of its pod.
    pub(crate) denies: bool,
    /// Whether it waits with the changes of one pod.
    pub(crate) waits: bool,
    /// Whether the batch restores missing flows: OVN may have blocked connections meanwhile.
    pub(crate) ends_gap: bool,
    /// Whether one of the changes may write over a flow of ours with other actions.
    pub(crate) replaces: bool,
    pub(crate) changes: Vec<FlowChange>,
    /// The changes of earlier answers: the first so many of `changes`.
    pub(crate) before: usize,
    /// The changes of marks. They are carried out before the changes of flows, whether the batch is sent or not.
    pub(crate) marks: Vec<MarkChange>,
    /// The batches whose flows let an address follow an edit: until they are in force, packets keep a former mark.
    pub(crate) awaited: BTreeSet<BatchId>,
    /// The paths of its flows; one more than [`PATHS_PER_LOOK_MAX`] if there are too many.
    pub(crate) paths: BTreeSet<Path>,
}

/// How much an answer may change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    /// So many flows, at most.
    pub(crate) most: usize,
    /// Whether a rule denies the name.
    pub(crate) denies: bool,
}

/// How the flows of an entry came into the switch.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Written {
    /// Before any batch that is still known.
    #[default]
    Before,
    /// In this batch.
    In(BatchId),
    /// Not yet: the switch was away or not compared. The next comparison writes them.
    Unsent {
        /// How many comparisons had ended.
        comparisons: u32,
    },
}

impl Batch {
    /// Takes the changes out.
    pub(crate) fn take(&mut self) -> Self {
        Self {
            changes: std::mem::take(&mut self.changes),
            marks: std::mem::take(&mut self.marks),
            awaited: std::mem::take(&mut self.awaited),
            paths: std::mem::take(&mut self.paths),
            ..*self
        }
    }

    /// Adds the changes of another answer for the same batch.
    pub(crate) fn add(&mut self, more: Self) {
        self.changes.extend(more.changes);
        self.marks.extend(more.marks);
        self.awaited.extend(more.awaited);
        let room = (PATHS_PER_LOOK_MAX + 1).saturating_sub(self.paths.len());
        self.paths.extend(more.paths.into_iter().take(room));
        self.ends_gap |= more.ends_gap;
        self.replaces |= more.replaces;
    }

    /// Takes the changes out, and leaves the paths: there is more of the batch.
    pub(crate) fn take_changes(&mut self) -> Self {
        Self {
            changes: std::mem::take(&mut self.changes),
            marks: Vec::new(),
            awaited: BTreeSet::new(),
            paths: BTreeSet::new(),
            ..*self
        }
    }

    /// How many comparisons with the switch have ended.
    pub(crate) fn comparisons(&self) -> u32 {
        self.comparisons
    }

    /// Notes that a flow that opens an address was missing, and is among the changes.
    pub(crate) fn end_gap(&mut self) {
        self.ends_gap = true;
    }

    /// Notes that an edit counts for an address when the switch has this batch.
    pub(crate) fn awaits(&mut self, batch: BatchId) {
        self.awaited.insert(batch);
    }

    /// Notes that changes are for packets from this interface to `address`.
    pub(crate) fn is_for(&mut self, interface: &Interface, address: IpAddr) {
        for own in &interface.addresses {
            if self.paths.len() <= PATHS_PER_LOOK_MAX
                && let Some(addresses) = Addresses::between(*own, address)
            {
                self.paths.insert(Path {
                    interface: Arc::clone(&interface.name),
                    addresses,
                });
            }
        }
    }

    /// Whether one of the changes from index `from` on adds a flow.
    pub(crate) fn adds_since(&self, from: usize) -> bool {
        let is_addition = |change: &FlowChange| matches!(change, FlowChange::Add(..));
        self.changes.iter().skip(from).any(is_addition)
    }

    /// How many changes the answer has added that is being planned.
    pub(crate) fn added(&self) -> usize {
        self.changes.len() - self.before
    }

    /// How many changes there are.
    pub(crate) fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Adds changes.
    pub(crate) fn extend(&mut self, changes: impl IntoIterator<Item = FlowChange>) {
        self.changes.extend(changes);
    }

    /// Adds a change of a mark.
    pub(crate) fn mark(&mut self, change: MarkChange) {
        self.marks.push(change);
    }

    /// How many changes of flows and marks there are.
    pub(crate) fn cost(&self) -> Changes {
        Changes {
            flows: self.changes.len(),
            marks: self.marks.len(),
        }
    }

    /// Gives out the changes of marks.
    pub(crate) fn give_out_marks(&mut self, out: &mut Output) {
        if !self.marks.is_empty() {
            out.command(Command::Mark(std::mem::take(&mut self.marks)));
        }
    }

    /// The time of the step that plans changes now.
    pub(crate) fn now(&self) -> Timestamp {
        self.at
    }

    /// How the flows in the batch come into the switch.
    pub(crate) fn written(&self) -> Written {
        self.written
    }

    /// When the flows in the batch count as written: long ago (zero) until the switch has been
    /// compared.
    pub(crate) fn written_at(&self) -> Timestamp {
        self.written_at
    }

    /// Whether the batch will be sent before the first comparison.
    pub(crate) fn is_before_comparison(&self) -> bool {
        self.id().is_some() && self.written_at == Timestamp::default()
    }

    /// The number of the batch, if it will be sent.
    pub(crate) fn id(&self) -> Option<BatchId> {
        match self.written {
            Written::In(id) => Some(id),
            Written::Before | Written::Unsent { .. } => None,
        }
    }
}
