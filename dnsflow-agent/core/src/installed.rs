//! How the access to one address is enforced: by flows of its own, or by a verdict.
//!
//! Each cache entry carries an [`Installed`] and does not look into it. The cache says which flow templates are
//! wanted ([`Installed::enforce`]) and asks whether the address is in use.

mod batch;
mod flows;
mod verdicts;

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use crate::{
    Timestamp,
    flow::{Cookie, FlowBody, FlowKey},
    ids::PortId,
    input::{BatchId, MarkChange, MarkFound},
    limits::COUNTERS_DELAY_MAX,
    plan::Plan,
};

pub(crate) use batch::{Batch, Written};
pub(crate) use flows::Flows;
pub(crate) use verdicts::{VerdictId, Verdicts};

/// What lets a pod reach one address.
#[derive(Debug)]
pub(crate) enum Installed {
    /// Flows to the address.
    Flows(Flows),
    /// The mark of the packets to the address.
    Marked(Marked),
}

/// An address with a verdict.
#[derive(Debug)]
pub(crate) struct Marked {
    verdict: VerdictId,
    /// The end that the kernel was told; `None` until the flows of the verdict are in force.
    until: Option<Timestamp>,
    /// When the kernel was told of the verdict.
    set_at: Timestamp,
    /// When a packet was last marked, or the kernel was first told of a verdict.
    used_at: Timestamp,
    /// Whether a packet was marked.
    is_used: bool,
    /// Whether the use was read after the pod has had the time to use the address.
    is_counted: bool,
    /// The last reading that has found the mark.
    found_in: u32,
}

/// A reading of all marks: a part of a comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// The number of the comparison.
    pub(crate) number: u32,
    /// When the reading began.
    pub(crate) since: Timestamp,
    /// Whether marks of an earlier run still wait to be adopted.
    pub(crate) is_first: bool,
}

/// What a mark that the kernel has is to its address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ReadMark {
    /// The mark of its verdict, or of the former one as long as that has flows.
    Right,
    /// Not the mark of its verdict, which is in force.
    Wrong,
    /// The mark of a former verdict, which ends. The flows of its verdict have not come into force.
    Over,
}

/// How much an address is used.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Usage {
    /// The packets; `None` where they are not counted for the address.
    pub(crate) packets: Option<u64>,
    /// When the last packet was seen, if there was one.
    pub(crate) at: Option<Timestamp>,
}

/// What [`Installed::enforce`] has changed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Enforced {
    /// How many flows of the address are new.
    pub(crate) added: usize,
    /// Whether flows of the address were added or removed.
    pub(crate) changed: bool,
}

/// Whose access is enforced, and how long the kernel may enforce it without the agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The port.
    pub(crate) port: PortId,
    /// The address.
    pub(crate) address: IpAddr,
    /// A mark ends then.
    pub(crate) until: Timestamp,
    /// Whether the address gets flows of its own, because a rule denies a name of it, or a load balancer leads to it:
    /// they also match a packet that a load balancer has sent to the address, whose destination was another one when
    /// it was marked.
    pub(crate) needs_flows: bool,
}

impl Default for Installed {
    fn default() -> Self {
        Self::Flows(Flows::default())
    }
}

impl Installed {
    /// Whether nothing is open.
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Self::Flows(flows) => flows.is_empty(),
            Self::Marked(_) => false,
        }
    }

    /// How many flows of its own the address should have.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Flows(flows) => flows.len(),
            Self::Marked(_) => 0,
        }
    }

    /// Whether some of the flows that let the pod reach the address must be restored.
    pub(crate) fn is_lost(&self, verdicts: &Verdicts) -> bool {
        let flows = match self {
            Self::Flows(flows) => Some(flows),
            Self::Marked(marked) => verdicts.flows(marked.verdict),
        };
        flows.is_some_and(Flows::is_lost)
    }

    /// The verdict of the address, if it has one.
    pub(crate) fn verdict(&self) -> Option<VerdictId> {
        match self {
            Self::Flows(_) => None,
            Self::Marked(marked) => Some(marked.verdict),
        }
    }

    /// Whether the kernel marks packets to the address.
    pub(crate) fn is_marked(&self) -> bool {
        matches!(self, Self::Marked(marked) if marked.until.is_some())
    }

    /// The flow like this one, whatever the destination, of a verdict that the kernel is still to be told of.
    pub(crate) fn awaited<'a>(
        &self,
        key: &FlowKey,
        verdicts: &'a Verdicts,
    ) -> Option<&'a FlowBody> {
        match self {
            Self::Marked(marked) if marked.until.is_none() => {
                verdicts.flows(marked.verdict)?.body(key)
            }
            Self::Marked(_) | Self::Flows(_) => None,
        }
    }

    /// The flows of its own.
    pub(crate) fn own(&self) -> Option<&Flows> {
        match self {
            Self::Flows(flows) => Some(flows),
            Self::Marked(_) => None,
        }
    }

    /// The same, to be changed.
    pub(crate) fn own_mut(&mut self) -> Option<&mut Flows> {
        match self {
            Self::Flows(flows) => Some(flows),
            Self::Marked(_) => None,
        }
    }

    /// How what lets the pod reach the address came into the switch.
    pub(crate) fn written(&self, verdicts: &Verdicts) -> Written {
        match self {
            Self::Flows(flows) => flows.written,
            Self::Marked(marked) if verdicts.is_in_force(marked.verdict) => Written::Before,
            Self::Marked(marked) => {
                let written = verdicts.flows(marked.verdict).map(|flows| flows.written);
                match written.unwrap_or_default() {
                    // The address was open before the connection was lost.
                    Written::Unsent { .. } if marked.until.is_some() => Written::Before,
                    written => written,
                }
            }
        }
    }

    /// The batch with the flows of its verdict, if the kernel marks packets with a former one until the switch has them.
    pub(crate) fn awaits(&self, verdicts: &Verdicts) -> Option<BatchId> {
        match self.written(verdicts) {
            Written::In(batch) if self.is_marked() => Some(batch),
            _ => None,
        }
    }

    /// Makes `wanted` what lets the pod reach the address, and restores lost flows. The flows in `adopted` are
    /// in the switch already. If the address does not need flows of its own and there is a verdict for `wanted`, the
    /// address gets the verdict, else flows of its own.
    pub(crate) fn enforce(
        &mut self,
        place: Place,
        wanted: Plan,
        adopted: Option<&BTreeMap<FlowKey, Cookie>>,
        verdicts: &mut Verdicts,
        batch: &mut Batch,
        now: Timestamp,
    ) -> Enforced {
        let Place {
            port,
            address,
            needs_flows,
            ..
        } = place;
        if let Self::Marked(marked) = self
            && !needs_flows
            && verdicts.is_plan(marked.verdict, &wanted)
        {
            verdicts.write(marked.verdict, batch, now);
            return Enforced::default();
        }
        let count = wanted.len();
        // The kernel has room for another mark of an address that has one.
        let is_tried = matches!(self, Self::Marked(_)) || !verdicts.are_refused(now);
        let verdict = match count {
            0 => None,
            _ if needs_flows || !is_tried => None,
            _ => verdicts.take(port, &wanted, batch, now),
        };
        match (&mut *self, verdict) {
            // The mark comes after the flows of the verdict, so that its own flows would go first. The next plan
            // finds the verdict in force.
            (Self::Flows(flows), Some(verdict))
                if !flows.is_empty() && !verdicts.is_in_force(verdict) =>
            {
                verdicts.release(verdict, address, now);
                flows.enforce(address.into(), of_address(wanted), adopted, batch, now)
            }
            (Self::Flows(flows), None) => {
                flows.enforce(address.into(), of_address(wanted), adopted, batch, now)
            }
            (Self::Flows(flows), Some(verdict)) => {
                flows.enforce(address.into(), Plan::new(), None, batch, now);
                let mut marked = Marked::new(verdict, now);
                marked.set(place, verdicts, batch, now);
                *self = Self::Marked(marked);
                Enforced {
                    added: count,
                    changed: true,
                }
            }
            (Self::Marked(marked), Some(verdict)) => {
                let before = std::mem::replace(&mut marked.verdict, verdict);
                verdicts.release(before, address, now);
                marked.set(place, verdicts, batch, now);
                Enforced {
                    added: count,
                    changed: true,
                }
            }
            (Self::Marked(marked), None) => {
                marked.remove(place, verdicts, batch, now);
                let mut flows = Flows::default();
                let enforced =
                    flows.enforce(address.into(), of_address(wanted), adopted, batch, now);
                *self = Self::Flows(flows);
                Enforced {
                    changed: true,
                    ..enforced
                }
            }
        }
    }

    /// Closes the address.
    pub(crate) fn close(
        &self,
        place: Place,
        verdicts: &mut Verdicts,
        batch: &mut Batch,
        now: Timestamp,
    ) {
        match self {
            Self::Flows(flows) => flows.close(place.address.into(), batch),
            Self::Marked(marked) => marked.remove(place, verdicts, batch, now),
        }
    }

    // Marks.

    /// Tells the kernel of the verdict, whose flows are in force, or of another interface.
    pub(crate) fn mark(
        &mut self,
        place: Place,
        verdicts: &mut Verdicts,
        batch: &mut Batch,
        now: Timestamp,
    ) {
        if let Self::Marked(marked) = self {
            marked.set(place, verdicts, batch, now);
        }
    }

    /// Tells the kernel a later end, if the end that it knows comes before `needed`, or if it knows none and the
    /// verdict's flows are in force.
    pub(crate) fn prolong(
        &mut self,
        place: Place,
        needed: Timestamp,
        verdicts: &mut Verdicts,
        batch: &mut Batch,
        now: Timestamp,
    ) {
        if let Self::Marked(marked) = self
            && match marked.until {
                Some(until) => until < needed,
                None => verdicts.is_in_force(marked.verdict),
            }
        {
            marked.set(place, verdicts, batch, now);
        }
    }

    /// Gives the address flows in place of its mark, which the kernel does not take.
    pub(crate) fn unmark(
        &mut self,
        place: Place,
        verdicts: &mut Verdicts,
        batch: &mut Batch,
        now: Timestamp,
    ) {
        let Self::Marked(marked) = self else {
            return;
        };
        let plan = verdicts.plan(marked.verdict);
        marked.remove(place, verdicts, batch, now);
        let mut flows = Flows::default();
        flows.enforce(place.address.into(), of_address(plan), None, batch, now);
        *self = Self::Flows(flows);
    }

    /// Records what the kernel has for the address; `None` if it should have no mark.
    pub(crate) fn read(
        &mut self,
        found: &MarkFound,
        reading: Reading,
        verdicts: &Verdicts,
    ) -> Option<ReadMark> {
        let Self::Marked(marked) = self else {
            return None;
        };
        marked.found_in = reading.number;
        if marked.until.is_none() {
            marked.go_on_with(found, reading.since);
        } else if marked.set_at > reading.since {
            return Some(ReadMark::Right);
        } else {
            if let Some(used_at) = found.used_at {
                marked.is_used = true;
                marked.used_at = marked.used_at.max(used_at);
            }
            marked.is_counted |= marked.set_at + COUNTERS_DELAY_MAX <= reading.since;
        }
        let mark = verdicts.mark(marked.verdict);
        Some(if mark.is_some_and(|mark| mark.value() == found.mark) {
            ReadMark::Right
        } else if verdicts.is_in_force(marked.verdict) {
            match marked.until {
                Some(_) => ReadMark::Wrong,
                // The kernel is told of it behind the reading.
                None => ReadMark::Right,
            }
        } else if !reading.is_first && verdicts.is_over(found.mark, reading.since) {
            ReadMark::Over
        } else {
            ReadMark::Right
        })
    }

    /// Removes the mark of a former verdict from the kernel. The address gets the one of its verdict when that is in
    /// force.
    pub(crate) fn remove_former(&mut self, found: &MarkFound, batch: &mut Batch) {
        if let Self::Marked(marked) = self {
            marked.until = None;
            batch.mark(MarkChange::Remove {
                ifindex: found.ifindex,
                address: found.address,
            });
        }
    }

    /// The address goes on with the use of a mark of an earlier run, found at `since`.
    pub(crate) fn go_on_with(&mut self, found: &MarkFound, since: Timestamp) {
        if let Self::Marked(marked) = self {
            marked.go_on_with(found, since);
        }
    }

    /// Whether the kernel should have had a mark that this reading has not found, or should have been told of one.
    pub(crate) fn is_unread(&self, reading: Reading, verdicts: &Verdicts) -> bool {
        match self {
            Self::Flows(_) => false,
            Self::Marked(marked) if marked.until.is_none() => verdicts.is_in_force(marked.verdict),
            Self::Marked(marked) => {
                marked.set_at <= reading.since && marked.found_in != reading.number
            }
        }
    }

    // Whether it is in use.

    /// The priority of the entry for eviction: 0 if the address is not open, 1 if it is out of use.
    /// `None` if the address may be in use.
    pub(crate) fn eviction_priority(&self, idle_grace: Duration, now: Timestamp) -> Option<u8> {
        match self {
            Self::Flows(flows) => flows.eviction_priority(idle_grace, now),
            Self::Marked(marked) => {
                let is_in_use = marked.is_used && marked.used_at + idle_grace > now;
                (marked.is_counted && !is_in_use).then_some(1)
            }
        }
    }

    /// How much the address is used, as far as is known.
    pub(crate) fn usage(&self) -> Usage {
        match self {
            Self::Flows(flows) => flows.usage(),
            Self::Marked(marked) => Usage {
                packets: None,
                at: marked.is_used.then_some(marked.used_at),
            },
        }
    }

    /// When one of the flows of this plan was last used. A mark does not tell by which of the flows of its verdict
    /// a packet passed.
    pub(crate) fn used_at(&self, plan: &Plan) -> Option<Timestamp> {
        match self {
            Self::Flows(flows) => flows.used_at(plan),
            Self::Marked(marked) => marked.last_use().filter(|_| !plan.is_empty()),
        }
    }

    /// When one of the flows with these keys was last used.
    pub(crate) fn keys_used_at<'a>(
        &self,
        keys: impl Iterator<Item = &'a FlowKey>,
    ) -> Option<Timestamp> {
        match self {
            Self::Flows(flows) => flows.keys_used_at(keys),
            Self::Marked(marked) => keys.last().and_then(|_| marked.last_use()),
        }
    }

    // What the switch says.

    /// Notes that this comparison has found the flow with this key.
    pub(crate) fn seen(&mut self, key: &FlowKey, comparison: u32) {
        if let Some(flows) = self.own_mut() {
            flows.seen(key, comparison);
        }
    }
}

/// The flows of a plan that an address without a mark needs.
fn of_address(mut plan: Plan) -> Plan {
    plan.retain(|template| !template.ends_marks());
    plan
}

impl Marked {
    fn new(verdict: VerdictId, now: Timestamp) -> Self {
        Self {
            verdict,
            until: None,
            set_at: now,
            used_at: now,
            is_used: false,
            is_counted: false,
            found_in: 0,
        }
    }

    /// When the mark was last used, or set. `None` if the kernel has never had it: no packet can have used it.
    fn last_use(&self) -> Option<Timestamp> {
        (self.until.is_some() || self.is_used).then_some(self.used_at)
    }

    /// What an earlier run has told the kernel gets no new term: it was used when the kernel says so, and not at all
    /// if its time was over.
    fn go_on_with(&mut self, found: &MarkFound, since: Timestamp) {
        let used_at = found.used_at.filter(|_| found.until > since);
        self.is_used = used_at.is_some();
        self.used_at = used_at.unwrap_or_default();
    }

    /// Tells the kernel of the verdict, or does so as soon as its flows are in force.
    fn set(&mut self, place: Place, verdicts: &mut Verdicts, batch: &mut Batch, now: Timestamp) {
        let Place {
            port,
            address,
            until,
            ..
        } = place;
        if !verdicts.is_in_force(self.verdict) {
            verdicts.wait(self.verdict, address);
        } else if let (Some(ifindex), Some(mark)) =
            (verdicts.interface(port), verdicts.mark(self.verdict))
        {
            batch.mark(MarkChange::Set {
                ifindex,
                address,
                mark: mark.value(),
                until,
            });
            self.until = Some(until);
            self.set_at = now;
        }
    }

    fn remove(&self, place: Place, verdicts: &mut Verdicts, batch: &mut Batch, now: Timestamp) {
        let Place { port, address, .. } = place;
        verdicts.release(self.verdict, address, now);
        if self.until.is_some()
            && let Some(ifindex) = verdicts.interface(port)
        {
            batch.mark(MarkChange::Remove { ifindex, address });
        }
    }
}
