//! The flows of one target, an address or a group, and the switch's reports about them.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use super::{
    Enforced, Fit, Usage,
    batch::{Batch, Written},
};
use crate::{
    Timestamp,
    policy::plan::Plan,
    values::{
        flow::{Cookie, FlowBody, FlowKey, FlowTemplate, InstalledFlow, Target, Transport},
        limits::COUNTERS_DELAY_MAX,
    },
};

/// The flows of one target, for one port.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    /// In the order of [`FlowTemplate::cmp_key`].
    flows: Box<[Flow]>,
    /// How many of them must be restored.
    lost: usize,
    /// The batch that wrote one of them last.
    pub(crate) written: Written,
    /// How many flows were looked at in the search for keys.
    #[cfg(test)]
    looked_at: std::cell::Cell<usize>,
}

/// A flow, and its use.
#[derive(Debug)]
pub(crate) struct FlowState<'a> {
    /// The flow.
    pub(crate) key: FlowKey,
    /// Its cookie and its actions.
    pub(crate) body: &'a FlowBody,
    /// The packets that it had matched at the last comparison.
    pub(crate) packets: u64,
    /// When it was last seen to match a packet, or was written.
    pub(crate) used_at: Timestamp,
    /// Whether it is missing in the switch, and is being restored.
    pub(crate) is_lost: bool,
}

/// Whether the switch has a flow that it should have, as far as that is known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Presence {
    /// It has.
    There,
    /// The flow is missing, and is being restored.
    Lost,
    /// The switch has not confirmed the flow.
    Unconfirmed,
}

/// A flow that should be in the switch.
#[derive(Debug)]
struct Flow {
    /// The flow without its destination.
    template: Arc<FlowTemplate>,
    /// When the flow was last written, or began to have all packets; long ago (zero) while the switch is away.
    written_at: Timestamp,
    /// The packets that the flow had matched at the last comparison.
    packets: u64,
    /// When the flow was last seen to match a packet, or first written.
    used_at: Timestamp,
    /// The last comparison that found the flow in the switch.
    seen_in: u32,
    /// Whether the switch has reported the packets of the flow, long enough after it was written.
    counted: bool,
    /// Whether the flow is missing in the switch and must be restored.
    lost: bool,
}

impl Flow {
    /// When the flow was last used, or written. `None` if no comparison has ever found it, and it is missing: no packet
    /// can have used it.
    fn last_use(&self) -> Option<Timestamp> {
        let was_never_there = self.lost && self.seen_in == 0;
        (!was_never_there).then_some(self.used_at)
    }
}

impl Flows {
    /// Whether nothing is open.
    pub(crate) fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// How many flows there should be.
    pub(crate) fn len(&self) -> usize {
        self.flows.len()
    }

    /// Whether some of the flows must be restored.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost > 0
    }

    /// Makes `wanted` the flows of `target`, and restores lost flows.
    pub(crate) fn enforce(&mut self, target: Target, wanted: Plan, batch: &mut Batch) -> Enforced {
        let now = batch.now();
        let changes_before = batch.len();
        let before = self.flows.len();
        let mut added = 0;
        let mut flows = Vec::with_capacity(wanted.len());
        let mut old = std::mem::take(&mut self.flows).into_iter().peekable();
        for template in wanted {
            while let Some(gone) = old.next_if(|flow| flow.template.cmp_key(&template).is_lt()) {
                batch.extend(gone.template.deletion(target));
            }
            let flow = match old.next_if(|flow| flow.template.cmp_key(&template).is_eq()) {
                Some(flow) if flow.template.body == template.body && !flow.lost => {
                    Flow { template, ..flow }
                }
                Some(flow) => {
                    if flow.lost {
                        batch.end_gap();
                    }
                    let is_other = flow.template.body != template.body;
                    batch.replaces |= is_other;
                    batch.extend(template.addition(target));
                    Flow {
                        template,
                        written_at: batch.written_at(),
                        // A dump under way has shown the one before.
                        seen_in: if is_other { 0 } else { flow.seen_in },
                        counted: false,
                        lost: false,
                        ..flow
                    }
                }
                None => {
                    added += 1;
                    batch.extend(template.addition(target));
                    Flow {
                        template,
                        written_at: batch.written_at(),
                        packets: 0,
                        used_at: now,
                        seen_in: 0,
                        counted: false,
                        lost: false,
                    }
                }
            };
            flows.push(flow);
        }
        self.flows = flows.into_boxed_slice();
        self.lost = 0;
        batch.extend(old.filter_map(|gone| gone.template.deletion(target)));
        // What only ends may wait, while the rest is on its way in an earlier batch.
        if batch.adds_since(changes_before) {
            self.written = batch.written();
        }
        Enforced {
            added,
            changed: added > 0 || self.flows.len() != before,
            fit: Fit::Exact,
        }
    }

    /// Removes the flows.
    pub(crate) fn close(&self, target: Target, batch: &mut Batch) {
        let templates = self.flows.iter().map(|flow| &flow.template);
        batch.extend(templates.filter_map(|template| template.deletion(target)));
    }

    // Whether it is in use.

    /// The priority of the entry for eviction: 0 if the address is not open, 1 if it is out of use.
    /// `None` if the address may be in use.
    pub(crate) fn eviction_priority(&self, idle_grace: Duration, now: Timestamp) -> Option<u8> {
        let is_in_use = |flow: &Flow| flow.packets > 0 && flow.used_at + idle_grace > now;
        if self.flows.is_empty() {
            Some(0)
        } else if self
            .flows
            .iter()
            .any(|flow| !flow.counted || is_in_use(flow))
        {
            None
        } else {
            Some(1)
        }
    }

    /// When one of the flows was last used.
    pub(crate) fn used_at(&self) -> Option<Timestamp> {
        self.flows.iter().filter_map(Flow::last_use).max()
    }

    // What the switch says.

    /// Whether the flow with this key, which is for the entry's address, has this cookie.
    pub(crate) fn has(&self, key: &FlowKey, cookie: Cookie) -> bool {
        let flow = self.with(key);
        flow.is_some_and(|flow| flow.template.body.cookie == cookie)
    }

    /// Whether there should be a flow with this key.
    pub(crate) fn contains(&self, key: &FlowKey) -> bool {
        self.with(key).is_some()
    }

    /// Records a flow that a comparison, which began at `since`, has found in the switch. Returns
    /// `false` if there should be no such flow.
    pub(crate) fn compare(
        &mut self,
        found: &InstalledFlow,
        comparison: u32,
        since: Timestamp,
        now: Timestamp,
    ) -> bool {
        let Some(flow) = self.with_mut(&found.key) else {
            return false;
        };
        if flow.template.body.cookie != found.cookie {
            return false;
        }
        flow.seen_in = comparison;
        if found.packets != flow.packets {
            flow.packets = found.packets;
            flow.used_at = now;
        }
        flow.counted |= flow.written_at + COUNTERS_DELAY_MAX <= since;
        true
    }

    /// Marks the flows that the comparison, which began at `since`, has not found; returns how many
    /// they are. A flow whose key a foreign flow has is not lost.
    pub(crate) fn mark_lost(
        &mut self,
        target: Target,
        comparison: u32,
        since: Timestamp,
        foreign: impl Fn(&FlowKey) -> bool,
    ) -> usize {
        let mut lost = 0;
        for flow in &mut self.flows {
            // The dump may not show a flow that was written after it began.
            let is_new = flow.written_at >= since;
            if flow.seen_in != comparison && !is_new && !flow.lost {
                let key = flow.template.key(target);
                flow.lost = key.is_some_and(|key| !foreign(&key));
                lost += usize::from(flow.lost);
            }
        }
        self.lost += lost;
        lost
    }

    /// Whether this comparison, which began at `since`, should have found flows that it has not found.
    pub(crate) fn are_any_missing(&self, comparison: u32, since: Timestamp) -> bool {
        let is_missing = |flow: &Flow| flow.seen_in != comparison && flow.written_at < since;
        self.flows.iter().any(is_missing)
    }

    /// Whether this comparison has found all of the flows.
    pub(crate) fn are_all_seen(&self, comparison: u32) -> bool {
        let mut flows = self.flows.iter();
        flows.all(|flow| flow.seen_in == comparison && !flow.lost)
    }

    /// Marks the flow with this key and cookie as lost; returns `false` if there should be no such
    /// flow.
    pub(crate) fn lose(&mut self, key: &FlowKey, cookie: Cookie) -> bool {
        let flow = self.with_mut(key);
        let flow = flow.filter(|flow| flow.template.body.cookie == cookie);
        let is_ours = flow.is_some();
        if let Some(flow) = flow {
            let was_lost = std::mem::replace(&mut flow.lost, true);
            self.lost += usize::from(!was_lost);
        }
        is_ours
    }

    /// Writes the lost flows; returns how many they are.
    pub(crate) fn restore(&mut self, target: Target, batch: &mut Batch) -> usize {
        if std::mem::take(&mut self.lost) == 0 {
            return 0;
        }
        let now = batch.now();
        let before = batch.len();
        for flow in self.flows.iter_mut().filter(|flow| flow.lost) {
            flow.lost = false;
            flow.written_at = now;
            flow.counted = false;
            batch.extend(flow.template.addition(target));
        }
        let written = batch.len() - before;
        if written > 0 {
            batch.end_gap();
            self.written = batch.written();
        }
        written
    }

    /// Writes all flows, whether or not they are in the switch.
    pub(crate) fn write_again(&mut self, target: Target, batch: &mut Batch) {
        self.lose_all();
        self.restore(target, batch);
    }

    /// None of the flows is known to be in the switch.
    pub(crate) fn lose_all(&mut self) {
        for flow in &mut self.flows {
            flow.lost = true;
        }
        self.lost = self.flows.len();
    }

    /// The priority of the flow that decides over packets for which `is_for` holds, if that flow is in the switch. The
    /// first rule that matches has the highest priority.
    pub(crate) fn deciding(&self, is_for: impl Fn(Transport) -> bool) -> Option<u16> {
        let matches = |flow: &&Flow| flow.template.transport.is_none_or(&is_for);
        let flows = self.flows.iter().filter(matches);
        let deciding = flows.max_by_key(|flow| flow.template.priority)?;
        (!deciding.lost).then_some(deciding.template.priority)
    }

    /// The flows of rules, without their destination, and whether the switch has each. `are_confirmed`: whether the switch
    /// has confirmed the batch that wrote some of them last. It may have refused those that were written at `refused_at`.
    pub(crate) fn presence(
        &self,
        are_confirmed: bool,
        refused_at: BTreeSet<Timestamp>,
    ) -> impl Iterator<Item = (&FlowTemplate, Presence)> {
        let last = self.flows.iter().map(|flow| flow.written_at).max();
        self.flows.iter().map(move |flow| {
            let presence = if flow.lost {
                Presence::Lost
            } else if !are_confirmed && Some(flow.written_at) == last
                || refused_at.contains(&flow.written_at)
            {
                Presence::Unconfirmed
            } else {
                Presence::There
            };
            (&*flow.template, presence)
        })
    }

    /// The keys of the flows of `target`.
    pub(crate) fn keys(&self, target: Target) -> impl Iterator<Item = FlowKey> {
        let templates = self.flows.iter().map(|flow| &flow.template);
        templates.filter_map(move |template| template.key(target))
    }

    /// How much all of them are used.
    pub(crate) fn usage(&self) -> Usage {
        let used = self.flows.iter().filter(|flow| flow.packets > 0);
        Usage {
            packets: Some(self.flows.iter().map(|flow| flow.packets).sum()),
            at: used.map(|flow| flow.used_at).max(),
        }
    }

    /// Each flow of `target`, and its use.
    pub(crate) fn states(&self, target: Target) -> impl Iterator<Item = FlowState<'_>> {
        let flows = self.flows.iter();
        flows.filter_map(move |flow| {
            Some(FlowState {
                key: flow.template.key(target)?,
                body: &flow.template.body,
                packets: flow.packets,
                used_at: flow.used_at,
                is_lost: flow.lost,
            })
        })
    }

    fn with(&self, key: &FlowKey) -> Option<&Flow> {
        self.position(key).map(|at| &self.flows[at])
    }

    fn with_mut(&mut self, key: &FlowKey) -> Option<&mut Flow> {
        self.position(key).map(|at| &mut self.flows[at])
    }

    /// Where the flow with this key is.
    fn position(&self, key: &FlowKey) -> Option<usize> {
        let found = self.flows.binary_search_by(|flow| {
            #[cfg(test)]
            self.looked_at.update(|looks| looks + 1);
            flow.template.cmp_to(key)
        });
        found.ok()
    }

    /// How many flows were looked at in the search for keys since the last call.
    #[cfg(test)]
    pub(crate) fn take_looked_at(&self) -> usize {
        self.looked_at.take()
    }

    /// The templates of the flows.
    #[cfg(test)]
    pub(crate) fn templates(&self) -> impl Iterator<Item = &Arc<FlowTemplate>> {
        self.flows.iter().map(|flow| &flow.template)
    }
}
