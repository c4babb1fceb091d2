//! Flows of others that have the key which a flow of ours has or could have. They are never overwritten.

use std::collections::HashMap;

use crate::{
    io::{output::Output, report::Report},
    values::{
        flow::{FlowChange, FlowKey},
        limits::FOREIGN_FLOWS_MAX,
    },
};

/// The flows of others.
#[derive(Debug, Default)]
pub(super) struct ForeignFlows(HashMap<FlowKey, Foreign>);

/// A flow of somebody else.
#[derive(Debug)]
struct Foreign {
    cookie: u64,
    /// Whether people were told that it is in the way of one of ours.
    is_reported: bool,
}

impl Foreign {
    /// One of our flows should be there. Reports so once.
    fn is_in_the_way(&mut self, key: &FlowKey, out: &mut Output) {
        if !std::mem::replace(&mut self.is_reported, true) {
            out.report(Report::ForeignFlow {
                table: key.table,
                priority: key.priority,
                cookie: self.cookie,
            });
        }
    }
}

impl ForeignFlows {
    /// Whether there are none.
    pub(super) fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether there is no room for more.
    pub(super) fn are_full(&self) -> bool {
        self.0.len() >= FOREIGN_FLOWS_MAX
    }

    /// Notes one. `is_ours`: one of our flows should have the key.
    pub(super) fn note(&mut self, key: FlowKey, cookie: u64, is_ours: bool, out: &mut Output) {
        let foreign = self.0.entry(key.clone()).or_insert(Foreign {
            cookie,
            is_reported: false,
        });
        if is_ours {
            foreign.is_in_the_way(&key, out);
        }
    }

    /// Whether somebody else has a flow with this key.
    pub(super) fn contain(&self, key: &FlowKey) -> bool {
        self.0.contains_key(key)
    }

    /// One has gone. Returns whether it was known.
    pub(super) fn gone(&mut self, key: &FlowKey) -> bool {
        self.0.remove(key).is_some()
    }

    /// Removes the changes that would overwrite flows of others.
    pub(super) fn leave(&mut self, changes: &mut Vec<FlowChange>, out: &mut Output) {
        if self.are_none() {
            return;
        }
        changes.retain(|change| {
            let foreign = match change {
                FlowChange::Add(key, _) => self.0.get_mut(key).map(|foreign| (key, foreign)),
                FlowChange::Delete(..) | FlowChange::Renew(_) => None,
            };
            let is_ours = foreign.is_none();
            if let Some((key, foreign)) = foreign {
                foreign.is_in_the_way(key, out);
            }
            is_ours
        });
    }

    /// The connection is lost.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// How many are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
