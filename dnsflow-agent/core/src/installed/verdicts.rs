//! The verdicts: sets of flow templates that packets are matched to by their marks.
//!
//! A verdict is a plan that is in use, with a number. The program on a pod's veth writes the number into the mark
//! of each packet to an address that has the verdict; the flows of the verdict match the mark. Opening an address
//! whose verdict is in force changes nothing in the switch (`docs/decisions/verdict.md`).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
};

use super::{
    Reading,
    batch::{Batch, Written},
    flows::Flows,
};
use crate::{
    Timestamp,
    io::input::BatchId,
    policy::plan::{Plan, PortFacts},
    values::{
        flow::{Cookie, FlowKey, Masked, Target},
        ids::PortId,
        limits::{
            CHANGES_UNDER_WAY_MAX, MARKS_REFUSED, VERDICT_RESTS, VERDICT_STAYS,
            VERDICTS_PER_PORT_MAX,
        },
    },
};

/// The number of a verdict, from 1 on.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct VerdictId(u32);

/// All verdicts of the node.
#[derive(Debug)]
pub(crate) struct Verdicts {
    /// The bits of the mark that are ours; `None` if addresses have flows of their own.
    mask: Option<u32>,
    /// The interfaces whose packets are marked.
    interfaces: BTreeMap<PortId, u32>,
    by_plan: HashMap<Plan, VerdictId>,
    verdicts: BTreeMap<VerdictId, Verdict>,
    /// Numbers that were in use lately: the switch may have megaflows of them.
    resting: BTreeMap<VerdictId, Timestamp>,
    /// Numbers of an earlier run that packets are still marked with: the verdicts of their addresses have other ones, and
    /// are not in force.
    former: BTreeSet<VerdictId>,
    /// When the last complete reading of the kernel's marks began.
    read_at: Option<Timestamp>,
    /// The kernel has refused a mark: addresses get flows of their own until then.
    refused_until: Option<Timestamp>,
}

#[derive(Debug)]
struct Verdict {
    port: PortId,
    plan: Plan,
    flows: Flows,
    /// Whether the switch has confirmed the flows, and none was lost since.
    in_force: bool,
    /// How many addresses have the verdict.
    addresses: usize,
    /// Since when no address has the verdict, if none has.
    unused_since: Timestamp,
    /// The addresses that get their marks when the flows are in force.
    waiting: BTreeSet<IpAddr>,
}

impl Verdicts {
    /// There are none. `mask` are the bits of the mark that are ours.
    pub(crate) fn new(mask: Option<u32>) -> Self {
        Self {
            mask: mask.filter(|mask| *mask != 0),
            interfaces: BTreeMap::new(),
            by_plan: HashMap::new(),
            verdicts: BTreeMap::new(),
            resting: BTreeMap::new(),
            former: BTreeSet::new(),
            read_at: None,
            refused_until: None,
        }
    }

    /// Whether addresses get verdicts on this node.
    pub(crate) fn are_on(&self) -> bool {
        self.mask.is_some()
    }

    /// What flows of the port are planned from. `None` if it is not known yet where its packets are marked.
    pub(crate) fn facts<'a>(&self, facts: PortFacts<'a>) -> Option<PortFacts<'a>> {
        if self.are_on() && !self.interfaces.contains_key(&facts.port) {
            return None;
        }
        Some(PortFacts {
            mark_mask: self.mask,
            ..facts
        })
    }

    // Interfaces.

    /// Packets of the port are marked at this interface. Returns whether that is news.
    pub(crate) fn attached(&mut self, port: PortId, ifindex: u32) -> bool {
        if !self.are_on() {
            return false;
        }
        // A port that goes late: the index was its interface's.
        self.interfaces
            .retain(|other, known| *other == port || *known != ifindex);
        self.interfaces.insert(port, ifindex) != Some(ifindex)
    }

    /// The interface of a port.
    pub(crate) fn interface(&self, port: PortId) -> Option<u32> {
        self.interfaces.get(&port).copied()
    }

    /// The port is gone.
    pub(crate) fn closed(&mut self, port: PortId) {
        self.interfaces.remove(&port);
    }

    // Addresses.

    /// Whether the kernel has refused a mark lately: no further address is tried.
    pub(crate) fn are_refused(&self, now: Timestamp) -> bool {
        self.refused_until.is_some_and(|until| until > now)
    }

    /// The verdict of one more address with this plan. Its flows are in force, on their way, or in the batch from
    /// now on. `None` if the port's packets are not marked, no number is left (for this port, or at all), or the numbers
    /// of an earlier run are not known.
    pub(crate) fn take(
        &mut self,
        port: PortId,
        plan: &Plan,
        batch: &mut Batch,
    ) -> Option<VerdictId> {
        self.interfaces.get(&port)?;
        if !self.knows_marks(batch) {
            return None;
        }
        let id = match self.by_plan.get(plan) {
            Some(id) => *id,
            None => self.make(port, plan, batch)?,
        };
        self.write(id, batch);
        let verdict = self.verdicts.get_mut(&id)?;
        verdict.addresses += 1;
        // A port that comes again has the same plans, and another id.
        verdict.port = port;
        Some(id)
    }

    /// Whether the marks of an earlier run have no say in what the flows in this batch open: their numbers are known, and
    /// those that stand for another plan now are removed.
    fn knows_marks(&self, batch: &Batch) -> bool {
        batch.id().is_none() || batch.has_adopted && self.read_at.is_some()
    }

    /// Writes the flows of a verdict that are lost. Where the switch is connected and not compared, it is not known
    /// whether the flows are there: all of them are written, but for those that wait for the first comparison.
    pub(crate) fn write(&mut self, id: VerdictId, batch: &mut Batch) {
        if !self.knows_marks(batch) {
            return;
        }
        let target = self.target(id);
        let verdict = self
            .verdicts
            .get_mut(&id)
            .filter(|verdict| !verdict.in_force);
        let Some((verdict, target)) = verdict.zip(target) else {
            return;
        };
        let is_unsent = matches!(verdict.flows.written, Written::Unsent { .. });
        if is_unsent && batch.is_before_comparison() {
            verdict.flows.write_again(target, batch);
        } else {
            verdict.flows.restore(target, batch);
        }
    }

    fn make(&mut self, port: PortId, plan: &Plan, batch: &mut Batch) -> Option<VerdictId> {
        let now = batch.now();
        let of_port = self
            .verdicts
            .values()
            .filter(|verdict| verdict.port == port);
        if of_port.count() >= VERDICTS_PER_PORT_MAX {
            return None;
        }
        let id = self.number(plan, now)?;
        let target = self.target(id)?;
        let mut flows = Flows::default();
        flows.enforce(target, plan.clone(), None, batch);
        self.by_plan.insert(plan.clone(), id);
        let verdict = Verdict {
            port,
            plan: plan.clone(),
            flows,
            in_force: false,
            addresses: 0,
            unused_since: now,
            waiting: BTreeSet::new(),
        };
        self.verdicts.insert(id, verdict);
        Some(id)
    }

    /// A number for a plan: mostly the one that the same plan had in the last run.
    fn number(&mut self, plan: &Plan, now: Timestamp) -> Option<VerdictId> {
        self.resting.retain(|_, until| *until > now);
        let mask = self.mask?;
        let max = mask >> mask.trailing_zeros();
        let mut hasher = DefaultHasher::new();
        plan.hash(&mut hasher);
        let first = (hasher.finish() % u64::from(max)) as u32;
        let ids = (0..max).map(|at| VerdictId((first + at) % max + 1));
        let is_free = |id: &VerdictId| {
            let is_marked = self.resting.contains_key(id) || self.former.contains(id);
            !self.verdicts.contains_key(id) && !is_marked
        };
        ids.take(NUMBERS_TRIED).find(is_free)
    }

    /// An address has this verdict no longer.
    pub(crate) fn release(&mut self, id: VerdictId, address: IpAddr, now: Timestamp) {
        if let Some(verdict) = self.verdicts.get_mut(&id) {
            verdict.waiting.remove(&address);
            verdict.addresses = verdict.addresses.saturating_sub(1);
            verdict.unused_since = now;
        }
    }

    /// The address gets its mark when the flows of the verdict are in force.
    pub(crate) fn wait(&mut self, id: VerdictId, address: IpAddr) {
        if let Some(verdict) = self.verdicts.get_mut(&id) {
            verdict.waiting.insert(address);
        }
    }

    /// The kernel has refused a mark, mostly because it has no room: for a while, no address is tried.
    pub(crate) fn refused(&mut self, now: Timestamp) {
        self.refused_until = Some(now + MARKS_REFUSED);
    }

    // Verdicts.

    /// The bits in the mark of packets with this verdict.
    pub(crate) fn mark(&self, id: VerdictId) -> Option<Masked> {
        self.mask.map(|mask| id.mark(mask))
    }

    /// What the flows of a verdict match in place of the destination.
    pub(crate) fn target(&self, id: VerdictId) -> Option<Target> {
        self.mark(id).map(Target::Verdict)
    }

    /// The verdict that a flow with these bits belongs to.
    pub(crate) fn of_mark(&self, mark: Masked) -> Option<VerdictId> {
        let mask = self.mask.filter(|mask| *mask == mark.mask())?;
        let id = VerdictId(mark.value() >> mask.trailing_zeros());
        self.verdicts.contains_key(&id).then_some(id)
    }

    /// Packets are still marked with this number of an earlier run. It is given to no plan until the marks are read again.
    pub(crate) fn keep_former(&mut self, mark: u32) {
        self.former.extend(self.number_in(mark));
    }

    /// The number in a mark.
    pub(crate) fn number_in(&self, mark: u32) -> Option<VerdictId> {
        let mask = self.mask?;
        Some(VerdictId(mark >> mask.trailing_zeros()))
    }

    /// The plan of a verdict.
    pub(crate) fn plan(&self, id: VerdictId) -> Plan {
        let verdict = self.verdicts.get(&id);
        verdict
            .map(|verdict| verdict.plan.clone())
            .unwrap_or_default()
    }

    /// Whether this is the plan of the verdict.
    pub(crate) fn is_plan(&self, id: VerdictId, plan: &Plan) -> bool {
        self.verdicts
            .get(&id)
            .is_some_and(|verdict| verdict.plan == *plan)
    }

    /// Whether the verdict of this mark ends: no address has had it for a while before `at`, or there is none.
    pub(crate) fn is_over(&self, mark: u32, at: Timestamp) -> bool {
        let verdict = self.number_in(mark).and_then(|id| self.verdicts.get(&id));
        verdict.is_none_or(|verdict| verdict.is_over(at))
    }

    /// Whether the flows are in force.
    pub(crate) fn is_in_force(&self, id: VerdictId) -> bool {
        self.verdicts
            .get(&id)
            .is_some_and(|verdict| verdict.in_force)
    }

    /// The flows of a verdict.
    pub(crate) fn flows(&self, id: VerdictId) -> Option<&Flows> {
        self.verdicts.get(&id).map(|verdict| &verdict.flows)
    }

    /// The same, to be changed.
    pub(crate) fn flows_mut(&mut self, id: VerdictId) -> Option<&mut Flows> {
        self.verdicts.get_mut(&id).map(|verdict| &mut verdict.flows)
    }

    /// Every verdict.
    pub(crate) fn ids(&self) -> Vec<VerdictId> {
        self.verdicts.keys().copied().collect()
    }

    /// The flows of all verdicts that this comparison has found.
    pub(crate) fn shown(&self, comparison: u32) -> impl Iterator<Item = (FlowKey, Cookie)> {
        self.verdicts.iter().flat_map(move |(id, verdict)| {
            let target = self.target(*id).into_iter();
            target.flat_map(move |target| verdict.flows.shown(target, comparison))
        })
    }

    /// How many flows all verdicts have.
    pub(crate) fn flow_count(&self) -> usize {
        self.verdicts
            .values()
            .map(|verdict| verdict.flows.len())
            .sum()
    }

    /// A flow of the verdict was lost.
    pub(crate) fn lost(&mut self, id: VerdictId) {
        if let Some(verdict) = self.verdicts.get_mut(&id) {
            verdict.in_force = false;
        }
    }

    /// The connection is lost: the switch may come back without the flows. `comparisons` is how many have ended.
    pub(crate) fn disconnected(&mut self, comparisons: u32) {
        for verdict in self.verdicts.values_mut() {
            verdict.in_force = false;
            verdict.flows.written = Written::Unsent { comparisons };
        }
    }

    /// The switch has confirmed a batch, but for flows that somebody else has (`is_foreign`). Returns the addresses that
    /// get their marks now.
    pub(crate) fn written(
        &mut self,
        batch: BatchId,
        is_foreign: impl Fn(&FlowKey) -> bool,
    ) -> Vec<(PortId, IpAddr)> {
        self.come_into_force(|target, flows| {
            flows.written == Written::In(batch)
                && !flows.is_lost()
                && !flows.keys(target).any(|key| is_foreign(&key))
        })
    }

    /// A comparison has ended. Returns the addresses that get their marks now.
    pub(crate) fn compared(&mut self, comparison: u32) -> Vec<(PortId, IpAddr)> {
        self.come_into_force(|_, flows| flows.are_all_seen(comparison))
    }

    fn come_into_force(
        &mut self,
        is_there: impl Fn(Target, &Flows) -> bool,
    ) -> Vec<(PortId, IpAddr)> {
        let mut marked = Vec::new();
        let Some(mask) = self.mask else {
            return marked;
        };
        for (id, verdict) in &mut self.verdicts {
            let target = Target::Verdict(id.mark(mask));
            if !verdict.in_force && is_there(target, &verdict.flows) {
                verdict.in_force = true;
                let waiting = std::mem::take(&mut verdict.waiting);
                marked.extend(waiting.into_iter().map(|address| (verdict.port, address)));
            }
        }
        marked
    }

    /// All marks of the kernel were read. Those of verdicts that were over at the beginning are removed, and so are those
    /// of an earlier run, unless this is the first reading.
    pub(crate) fn marks_read(&mut self, reading: Reading) {
        self.read_at = Some(reading.since);
        if !reading.is_first {
            self.former = BTreeSet::new();
        }
    }

    /// Removes the flows of verdicts that no address has had for a while. An address whose next verdict has not come
    /// into force keeps the mark of the former one, so the end is that of the last reading: no mark of these verdicts
    /// is left in the kernel.
    pub(crate) fn sweep(&mut self, batch: &mut Batch) {
        let now = batch.now();
        let Some(read_at) = self.read_at else {
            return;
        };
        let verdicts = self.verdicts.iter();
        let over = verdicts.filter(|(_, verdict)| verdict.is_over(read_at));
        let over: Vec<VerdictId> = over.map(|(id, _)| *id).collect();
        let before = batch.len();
        for id in over {
            if batch.len() - before >= CHANGES_UNDER_WAY_MAX {
                // Another pod's flows would stand behind the others. Nothing is marked with their numbers meanwhile.
                break;
            }
            let target = self.target(id);
            if let Some((verdict, target)) = self.verdicts.remove(&id).zip(target) {
                verdict.flows.close(target, batch);
                self.by_plan.remove(&verdict.plan);
                self.resting.insert(id, now + VERDICT_RESTS);
            }
        }
    }
}

impl VerdictId {
    /// The number in these bits.
    fn mark(self, mask: u32) -> Masked {
        Masked::new(self.0 << mask.trailing_zeros(), mask)
    }
}

impl Verdict {
    /// Whether no address has had the verdict for a while before `at`.
    fn is_over(&self, at: Timestamp) -> bool {
        self.addresses == 0 && self.unused_since + VERDICT_STAYS <= at
    }
}

/// How many numbers are tried for a plan. With half of all numbers in use, this many neighbours are practically
/// never in use together.
const NUMBERS_TRIED: usize = 256;
