//! Changes that go to the switch together.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use crate::{
    Timestamp,
    flow::{Addresses, FlowChange},
    input::BatchId,
    limits::PATHS_PER_LOOK_MAX,
    ovn::rows::Interface,
    revalidation::Path,
};

/// Changes that are being planned. [`Switch::begin`](super::Switch::begin) makes it, so that what is
/// planned into it can note at once which batch that is, and whether it will be sent at all.
#[derive(Debug)]
#[must_use = "changes count once the batch is committed"]
pub(crate) struct Batch {
    pub(super) written: Written,
    /// When the flows that are planned into it count as written.
    pub(super) written_at: Timestamp,
    /// When it is sent.
    pub(super) at: Timestamp,
    /// Whether it writes flows anew that were missing: OVN may have blocked connections meanwhile.
    pub(super) ends_gap: bool,
    pub(super) changes: Vec<FlowChange>,
    /// What its flows are for; one more than is looked at where there are too many.
    pub(super) paths: BTreeSet<Path>,
}

/// How flows came into the switch, or did not.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Written {
    /// Long ago, for all that is known.
    #[default]
    Before,
    /// In this batch.
    In(BatchId),
    /// Not at all: the switch was away or not compared yet, after so many comparisons. The next
    /// comparison covers it.
    Unsent {
        /// How many comparisons had ended.
        comparisons: u32,
    },
}

impl Batch {
    /// Takes the changes out.
    pub(super) fn take(&mut self) -> Self {
        Self {
            changes: std::mem::take(&mut self.changes),
            paths: std::mem::take(&mut self.paths),
            ..*self
        }
    }

    /// Notes that a flow that opens an address was missing, and is among the changes.
    pub(crate) fn end_gap(&mut self) {
        self.ends_gap = true;
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

    /// Whether one of the changes from the one numbered `from` on adds a flow.
    pub(crate) fn adds_since(&self, from: usize) -> bool {
        let is_addition = |change: &FlowChange| matches!(change, FlowChange::Add(..));
        self.changes.iter().skip(from).any(is_addition)
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

    /// What flows note that are written in it.
    pub(super) fn written(&self) -> Written {
        self.written
    }

    /// When the flows that are planned into it count as written: long ago (zero) until the switch has
    /// been compared.
    pub(super) fn written_at(&self) -> Timestamp {
        self.written_at
    }

    /// The number under which it is sent, if it is.
    pub(super) fn id(&self) -> Option<BatchId> {
        match self.written {
            Written::In(id) => Some(id),
            Written::Before | Written::Unsent { .. } => None,
        }
    }
}
