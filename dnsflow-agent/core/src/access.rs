//! The seam between access and flows: joins ports, rules and cache entries into plans, and hands each plan to the
//! entry's [`Installed`](crate::installed::Installed).
//!
//! An [`Access`] is borrowed from the engine for one step. It owns nothing.

mod answer;
mod classes;
mod elements;

use std::{
    cell::{LazyCell, OnceCell},
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

use crate::{
    Timestamp,
    cache::{Cache, Claim, Entry, Learning, Resolution, Standing, Term},
    installed::{Batch, Flows, GroupId, ReadMark, Reading},
    io::{
        input::{MarkChange, MarkFound},
        output::Output,
        report::Report,
    },
    ovn::view::TunnelKeys,
    pods::{budget::FlowBudget, ports::Ports},
    policy::{
        Mention, Policy,
        plan::{
            Basis, ManyNames, MatchedRules, Planned, Planner, PortFacts, Room, Space, keys_of,
            matched_by_any,
        },
        refused::{ChangedNetworks, Recheck, Refusal, Refused, RefusedAddresses},
        rules::{ChangedName, ChangedNames, ChangedRules},
    },
    values::{
        connection::BlockedConnection,
        firewall::{Rule, RuleAction},
        flow::{Cookie, Ends, FlowKey, InstalledFlow, Target},
        ids::PortId,
        limits::{Limit, NAMES_PER_ADDRESS_MAX, UNKNOWN_MAX},
        name::DomainName,
    },
};

pub(crate) use answer::{Asked, Outcome, ReadAnswer};
pub(crate) use classes::Classes;

/// The flow templates of rules, until something changes that they were made from.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    planner: Planner,
    /// The ports by their tunnel keys. Made when first asked for.
    by_keys: Option<HashMap<TunnelKeys, PortId>>,
}

impl Plans {
    /// Forgets the flow templates: rules, ports or the pipeline may have changed.
    pub(crate) fn forget(&mut self) {
        self.planner.forget();
        self.by_keys = None;
    }

    /// Makes the flows of plans.
    pub(crate) fn planner(&mut self) -> &mut Planner {
        &mut self.planner
    }

    /// The port that a flow is for.
    fn port_of(&mut self, key: &FlowKey, ports: &Ports, policy: &Policy) -> Option<PortId> {
        let by_keys = self.by_keys.get_or_insert_with(|| {
            let ports = ports.iter();
            ports
                .filter_map(|(id, port)| Some((policy.tunnel_keys(&port.row)?, id)))
                .collect()
        });
        by_keys.get(&keys_of(key)?).copied()
    }
}

/// The DNS answers to the pods, and the owners that limit them.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) cache: Cache,
    pub(crate) plans: Plans,
    pub(crate) budget: FlowBudget,
    pub(crate) refused: RefusedAddresses,
    pub(crate) classes: Classes,
}

/// Who has flows in the switch.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Holder {
    /// An address of a port.
    Entry(PortId, IpAddr),
    /// A group.
    Group(GroupId),
}

/// Flows of groups by port and mark.
type FlowsByMark = HashMap<(PortId, u32), Vec<(FlowKey, Cookie)>>;

/// What became of the marks of an earlier run.
#[derive(Debug, Default)]
pub(crate) struct MarksTakenOver {
    /// How many were removed.
    pub(crate) removed: usize,
    /// Whether one stays beside flows that are still to be sent.
    pub(crate) any_stays: bool,
    /// Addresses that have no group in place of their marks.
    without_group: Vec<(PortId, MarkFound)>,
    /// The flows that numbers stood for.
    flows: FlowsByMark,
}

/// Logical ports, as OVN knows them, with the addresses of their pods.
#[derive(Debug)]
pub(crate) struct Senders(HashSet<(TunnelKeys, IpAddr)>);

impl Senders {
    /// Whether the flow is for packets of one.
    pub(crate) fn have(&self, key: &FlowKey) -> bool {
        keys_of(key).is_some_and(|keys| self.0.contains(&(keys, key.matches.ends.src())))
    }
}

/// The access of the pods, by rules and DNS answers.
#[derive(Debug)]
pub(crate) struct Access<'a> {
    pub(crate) ports: &'a Ports,
    pub(crate) policy: &'a Policy,
    pub(crate) cache: &'a mut Cache,
    pub(crate) plans: &'a mut Plans,
    pub(crate) budget: &'a mut FlowBudget,
    pub(crate) refused: &'a mut RefusedAddresses,
    pub(crate) classes: &'a mut Classes,
}

impl<'a> Access<'a> {
    /// The access of these ports by this policy and by their DNS answers.
    pub(crate) fn new(ports: &'a Ports, policy: &'a Policy, told: &'a mut Told) -> Self {
        let Told {
            cache,
            plans,
            budget,
            refused,
            classes,
        } = told;
        Self {
            ports,
            policy,
            cache,
            plans,
            budget,
            refused,
            classes,
        }
    }
}

/// For each namespace, the rules by network: most have few.
type RulesByNetwork<'a> = HashMap<&'a str, Vec<(u32, IpNet, &'a Rule)>>;

impl Access<'_> {
    /// Counts and reports the plans that have not all flows of their rules.
    pub(crate) fn report_cut_plans(&mut self, out: &mut Output) {
        for ((port, room), plans) in self.cache.take_cut() {
            out.counters.addresses_cut += plans as u64;
            let limit = room.limit();
            let max = self.cache.limits().of(&limit);
            self.limit_reached(port, limit, max, out);
        }
    }

    /// Reports a limit, and the number behind it, at most once a minute for each pod.
    fn limit_reached(&mut self, port: PortId, limit: Limit, max: usize, out: &mut Output) {
        let now = out.now();
        if let Some((namespace, name)) = self.whose(port)
            && self.budget.is_to_be_reported(port, &limit, now)
        {
            out.report(Report::LimitReached {
                namespace,
                port: name,
                limit,
                max,
            });
        }
    }

    /// Namespace and logical port of a port; `None` if the rules of no namespace hold for the port.
    fn whose(&self, port: PortId) -> Option<(String, String)> {
        whose(self.ports, self.policy, port)
    }

    /// These ports, as far as OVN knows them: no flow is for packets of the others.
    pub(crate) fn senders(&self, ports: impl IntoIterator<Item = PortId>) -> Senders {
        let ports = ports.into_iter().filter_map(|id| self.ports.get(id));
        let keys = ports.filter_map(|port| Some((port, self.policy.tunnel_keys(&port.row)?)));
        let senders = keys.flat_map(|(port, keys)| {
            let addresses = port.row.addresses.iter();
            addresses.map(move |address| (keys, *address))
        });
        Senders(senders.collect())
    }

    /// Forgets names that no rule mentions, at ports that were told names before the rules were
    /// known.
    pub(crate) fn forget_unmentioned(&mut self) {
        for id in self.cache.with_unknown_mentions() {
            let Some(port) = self.ports.get(id) else {
                continue;
            };
            let mention = |name: &DomainName| self.policy.mention(&port.row, name);
            if self.policy.knows_names_for(&port.row) {
                self.cache
                    .forget_unmentioned(id, |name| mention(name) == Mention::Some);
            }
        }
    }

    /// Notes that a name leads to an address. Returns whether the address did not have the name
    /// before.
    pub(crate) fn learn(
        &mut self,
        resolution: Resolution<'_>,
        batch: &mut Batch,
        out: &mut Output,
    ) -> bool {
        let (ports, policy) = (self.ports, self.policy);
        let whose = |port| whose(ports, policy, port);
        let learned = self.cache.learn(Learning {
            resolution,
            whose: &whose,
            standing: &|name, is_denied| {
                standing(ports, policy, (resolution.port, name), is_denied)
            },
            version: &|| rules_version(ports, policy, resolution.port),
            batch,
            out,
            replan: Vec::new(),
        });
        for (port, address) in learned.replan {
            self.replan_entries(port, [address], batch);
        }
        if learned.is_news {
            self.check_address(resolution.port, resolution.address);
        }
        learned.is_news
    }

    /// Takes over who has an address now, ahead of its turn: no decision is made by owners of before.
    fn catch_up(&mut self, address: IpAddr) {
        if self.policy.waiting_addresses() > 0 {
            let changed = |form| self.policy.changed_owners(form);
            self.refused.catch_up(address, changed);
        }
    }

    /// Notes whether an entry's address is never opened, and whether a load balancer has it in front or leads to it.
    /// Returns the change for which the address is to be planned anew.
    fn check_address(&mut self, id: PortId, address: IpAddr) -> Option<AddressChange> {
        self.catch_up(address);
        let row = &self.ports.get(id)?.row;
        let namespace = self.policy.namespace_of_rules(row);
        let checked = self.refused.check(address, row, namespace);
        let is_front = self.refused.is_front(address, row, namespace);
        let comes_in_front = is_front && self.cache.note_front(id, address);
        if self.policy.is_backend(address) {
            self.cache.note_backend(id, address);
        }
        let entry = self.cache.entry_mut(id, address)?;
        let was_refused = std::mem::replace(&mut entry.is_refused, checked.is_err());
        match checked {
            Err(reason) if !was_refused => Some(AddressChange::Refused(reason)),
            Ok(()) if was_refused => Some(AddressChange::Allowed),
            Ok(()) | Err(_) => comes_in_front.then_some(AddressChange::Front),
        }
    }

    /// Checks addresses again: closes open ones that are never opened now, and opens those that were refused. Those that
    /// a load balancer has in front get flows of their own, and those that it leads to get them later
    /// ([`Cache::compared`]). Returns the ports at which the kernel opens nothing any more.
    pub(crate) fn recheck(
        &mut self,
        recheck: &Recheck,
        batch: &mut Batch,
        out: &mut Output,
    ) -> Vec<PortId> {
        let ports = self.ports;
        let mut closed = Vec::new();
        if recheck.are_fronts_read {
            self.cache.forget_fronts();
        }
        for (id, port) in ports.iter() {
            let namespace = self.policy.namespace_of_rules(&port.row);
            let networks = recheck.networks_of(&port.row, namespace);
            if !networks.is_empty() && !self.may_be_opened_by_kernel(id) {
                self.forget_classes(id, batch);
                closed.push(id);
            }
            let addresses = self.to_recheck(id, recheck, &networks);
            self.recheck_addresses(id, addresses, batch, out);
        }
        closed
    }

    /// Whether the kernel may open addresses to a port: it knows all networks whose addresses are refused there.
    pub(crate) fn may_be_opened_by_kernel(&self, id: PortId) -> bool {
        self.ports.get(id).is_some_and(|port| {
            let namespace = self.policy.namespace_of_rules(&port.row);
            self.refused.kernel_knows_all(&port.row, namespace)
        })
    }

    /// The same for all addresses of one port, whose network or namespace may be another one.
    pub(crate) fn recheck_port(&mut self, id: PortId, batch: &mut Batch, out: &mut Output) {
        if !self.may_be_opened_by_kernel(id) {
            self.forget_classes(id, batch);
        }
        self.recheck_addresses(id, self.cache.addresses(id), batch, out);
    }

    fn recheck_addresses(
        &mut self,
        id: PortId,
        addresses: impl IntoIterator<Item = IpAddr>,
        batch: &mut Batch,
        out: &mut Output,
    ) {
        let ports = self.ports;
        let Some(port) = ports.get(id) else {
            return;
        };
        let mut changed = Vec::new();
        for address in addresses {
            let Some(change) = self.check_address(id, address) else {
                continue;
            };
            if let AddressChange::Refused(reason) = change {
                let entry = self.cache.entry(id, address);
                let name = entry.and_then(|entry| entry.names.keys().next().cloned());
                let whose = (id, port.row.iface_id.as_str());
                let refusal = Refusal {
                    name: name.as_ref(),
                    address,
                    reason,
                };
                self.refused.refuse(whose, refusal, out);
            }
            changed.push(address);
        }
        if !changed.is_empty() {
            let marked_beside = self.classes.take_beside(id, &changed);
            self.close_beside(id, marked_beside, batch);
            self.replan_entries(id, changed, batch);
        }
    }

    /// The addresses of a port, which these networks of the recheck concern, that are to be checked again.
    fn to_recheck(
        &self,
        port: PortId,
        recheck: &Recheck,
        networks: &ChangedNetworks<'_>,
    ) -> BTreeSet<IpAddr> {
        let entries = &self.cache.port(port).entries;
        let addresses = recheck.addresses();
        if !networks.is_empty() || entries.len() < addresses.len() {
            let all = self.cache.addresses(port).into_iter();
            let is_one = |address: &_| self.refused.is_rechecked(*address, recheck, networks);
            return all.filter(is_one).collect();
        }
        let addresses = addresses.iter();
        addresses
            .flat_map(|address| entries.forms_of(*address))
            .collect()
    }

    /// Whether a flow leads to an address that is to be checked again.
    pub(crate) fn is_rechecked<'a>(
        &'a self,
        recheck: &'a Recheck,
    ) -> impl Fn(&FlowKey) -> bool + 'a {
        let concerned = self.ports.iter().filter_map(|(_, port)| {
            let namespace = self.policy.namespace_of_rules(&port.row);
            let networks = recheck.networks_of(&port.row, namespace);
            match networks.is_empty() {
                true => None,
                false => Some((self.policy.tunnel_keys(&port.row)?, networks)),
            }
        });
        let by_keys: HashMap<TunnelKeys, ChangedNetworks<'a>> = concerned.collect();
        // The port may be gone.
        let of_all = recheck.networks_of_all();
        move |key| {
            let networks = keys_of(key).and_then(|keys| by_keys.get(&keys));
            let networks = networks.unwrap_or(&of_all);
            let dst = key.matches.ends.dst();
            dst.is_some_and(|dst| self.refused.is_rechecked(dst, recheck, networks))
        }
    }

    /// Adds a port, with the answers of an earlier run to its pod, and the state that its namespace shares.
    pub(crate) fn open_port(&mut self, id: PortId, batch: &mut Batch, out: &mut Output) {
        let Some(port) = self.ports.get(id) else {
            return;
        };
        let pod = port.row.iface_id_ver.as_deref();
        let known = self.cache.open((id, port.sandbox), &port.row.iface_id, pod);
        self.learn_all(id, known, batch, out);
        self.replan(id, batch);
    }

    fn learn_all(
        &mut self,
        port: PortId,
        known: Vec<(IpAddr, DomainName, Term)>,
        batch: &mut Batch,
        out: &mut Output,
    ) {
        for (address, name, term) in known {
            let resolution = Resolution {
                port,
                address,
                name: &name,
                term,
                is_to_be_denied: false,
                standing: &OnceCell::new(),
            };
            self.learn(resolution, batch, out);
        }
    }

    // Plans.

    /// The kernel opens nothing more at the ports of a port's pod by the rules as they were, since an answer is for all of
    /// them. It closes what it has opened beside flows.
    pub(crate) fn forget_classes(&mut self, port: PortId, batch: &mut Batch) {
        for port in self.ports.of_pod(port) {
            let marked_beside = self.classes.forget(port);
            self.close_beside(port, marked_beside, batch);
        }
    }

    /// Removes the kernel's marks of addresses that the agent has given none.
    fn close_beside(&self, port: PortId, addresses: BTreeSet<IpAddr>, batch: &mut Batch) {
        let Some(ifindex) = self.cache.groups().interface(port) else {
            return;
        };
        for address in addresses {
            let entry = self.cache.entry(port, address);
            if !entry.is_some_and(|entry| entry.installed.is_marked()) {
                batch.mark(MarkChange::Remove { ifindex, address });
            }
        }
    }

    /// Plans all entries of a port again.
    pub(crate) fn replan(&mut self, port: PortId, batch: &mut Batch) {
        self.forget_classes(port, batch);
        self.replan_entries(port, self.cache.addresses(port), batch);
    }

    /// Plans the entries of a port again to which these rules matter, or mattered before. Returns the addresses that are
    /// short of room: others may make room behind them.
    #[must_use]
    pub(crate) fn replan_changed(
        &mut self,
        port: PortId,
        changed: &ChangedRules,
        batch: &mut Batch,
    ) -> Vec<IpAddr> {
        self.forget_classes(port, batch);
        let ChangedRules::Of(names) = changed else {
            return self.replan_with(port, self.cache.addresses(port), None, batch);
        };
        let following = self.groups_follow(port, names, batch);
        let entries = &self.cache.port(port).entries;
        let follows = |address: IpAddr| {
            let entry = self.cache.entry(port, address);
            entry.is_some_and(|entry| entry.follows_group(&following))
        };
        let do_all_follow = LazyCell::new(|| {
            let mut entries = entries.iter();
            entries.all(|(_, entry)| entry.follows_group(&following))
        });
        // A name may have given way, and its flows are there.
        let mut addresses: BTreeSet<IpAddr> = entries.unplanned().clone();
        for (name, change) in names {
            let mut below = entries.below(name).peekable();
            match change {
                ChangedName::InPlace if below.peek().is_none() || *do_all_follow => {}
                ChangedName::InPlace => addresses.extend(below.filter(|at| !follows(*at))),
                ChangedName::Otherwise => addresses.extend(below),
            }
        }
        self.replan_with(port, addresses, None, batch)
    }

    /// Brings the flows of a port's groups in line with the rules of these names. Returns the groups whose addresses have
    /// nothing to change where their patterns stay.
    fn groups_follow(
        &mut self,
        port_id: PortId,
        names: &ChangedNames,
        batch: &mut Batch,
    ) -> BTreeSet<GroupId> {
        let Some(port) = self.ports.get(port_id) else {
            return BTreeSet::new();
        };
        let sets = self.policy.sets(&port.row);
        let facts = self.policy.facts_to_install(port_id, &port.row, &sets);
        let groups = self.cache.groups_mut();
        let facts = facts.and_then(|facts| groups.facts(facts));
        let before = batch.len();
        let following = facts.map(|facts| {
            groups.follow(facts, names, batch, |patterns| {
                let matched = patterns.rules(facts.sets);
                let to = match patterns.is_v6() {
                    true => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
                    false => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                };
                let planner = &mut self.plans.planner;
                planner.for_patterns(facts, to, &matched, &Space::default())
            })
        });
        if batch.adds_since(before) {
            batch.end_gap();
        }
        following.unwrap_or_default()
    }

    /// Plans entries again that were short of room, if they have more now.
    pub(crate) fn replan_short(
        &mut self,
        port: PortId,
        mut addresses: Vec<IpAddr>,
        batch: &mut Batch,
    ) {
        let now = batch.now();
        addresses.retain(|address| self.cache.has_room_again(port, *address, now));
        self.replan_entries(port, addresses, batch);
    }

    /// Plans some entries of a port again.
    fn replan_entries(
        &mut self,
        port: PortId,
        addresses: impl IntoIterator<Item = IpAddr>,
        batch: &mut Batch,
    ) {
        self.replan_with(port, addresses, None, batch);
    }

    /// The same; the flows in `found` are in the switch already. Returns the addresses that are short of room.
    fn replan_with(
        &mut self,
        port_id: PortId,
        addresses: impl IntoIterator<Item = IpAddr>,
        found: Option<&FoundFlows>,
        batch: &mut Batch,
    ) -> Vec<IpAddr> {
        let now = batch.now();
        let mut short = Vec::new();
        let Some(port) = self.ports.get(port_id) else {
            return short;
        };
        let sets = self.policy.sets(&port.row);
        let facts = self.policy.facts_to_install(port_id, &port.row, &sets);
        let facts = facts.and_then(|facts| self.cache.groups().facts(facts));
        let released = self.released(now);
        let policy = self.policy;
        let version = || policy.rules_version(&port.row);
        let mut opens = false;
        for address in addresses {
            let denies = |name: &DomainName| sets.iter().any(|set| set.denies(name));
            let cache = &mut *self.cache;
            let may_end_earlier = cache.deny_names(port_id, address, denies, released);
            if let Some(found) = found {
                cache.note_former((port_id, address), found.keys().map(FlowKey::traffic));
            }
            let space = cache.space(port_id, address);
            let Some(entry) = cache.entry_mut(port_id, address) else {
                continue;
            };
            let planner = &mut self.plans.planner;
            let before = batch.len();
            let enforced = match facts {
                Some(facts) => {
                    let planning = Planning {
                        address,
                        space,
                        version: &version,
                        further: None,
                        may_stay: false,
                    };
                    let planned = plan(planner, facts, entry, planning).unwrap_or_default();
                    cache.enforce((port_id, address), planned, found, batch)
                }
                None => {
                    entry.names.take_deciding();
                    cache.withdraw((port_id, address), batch)
                }
            };
            if enforced.cut.is_some_and(|room| room < Room::Usual) {
                short.push(address);
            }
            if let Some(awaited) = self.cache.awaits(port_id, address) {
                batch.awaits(awaited);
            }
            if may_end_earlier {
                self.cache.look_in_time(port_id, address);
            }
            if batch.adds_since(before) {
                batch.is_for(&port.row, address);
                opens = true;
            }
            // A mark may open the address without a change of flows.
            opens |= enforced.added > 0;
        }
        if opens {
            batch.end_gap();
        }
        short
    }

    /// Until when a name counts at least that no rule denies any more: as long as an address out of use, so that
    /// nothing is forgotten while rules are replaced.
    fn released(&self, now: Timestamp) -> Timestamp {
        now + self.cache.limits().idle_grace
    }

    /// Decides over the entries that are due. To be called when their use is known.
    pub(crate) fn decide_undecided(&mut self, batch: &mut Batch) {
        let mut undecided: BTreeMap<PortId, Vec<IpAddr>> = BTreeMap::new();
        for (port, address) in self.cache.take_undecided() {
            undecided.entry(port).or_default().push(address);
        }
        for (port_id, addresses) in undecided {
            let Some(port) = self.ports.get(port_id) else {
                continue;
            };
            let sets = self.policy.sets(&port.row);
            let facts = self.policy.facts_to_install(port_id, &port.row, &sets);
            let facts = facts.and_then(|facts| self.cache.groups().facts(facts));
            for address in &addresses {
                let planner = &mut self.plans.planner;
                let plan_of = |name: &DomainName| Some(planner.for_names(facts?, *address, [name]));
                self.cache.decide(port_id, *address, plan_of, batch);
            }
            self.replan_entries(port_id, addresses, batch);
        }
    }

    /// The kernel has refused the mark of an address: the address gets flows of its own.
    pub(crate) fn mark_refused(&mut self, port: PortId, address: IpAddr, batch: &mut Batch) {
        self.cache.mark_refused(port, address, batch);
        self.replan_entries(port, [address], batch);
    }

    /// The planner of all flows.
    pub(crate) fn planner(&mut self) -> &mut Planner {
        &mut self.plans.planner
    }

    /// Leaves only connections that a flow of ours in the switch lets pass. A connection that OVN alone allows or denies
    /// is none of them.
    pub(crate) fn retain_passing(&self, connections: &mut Vec<BlockedConnection>) {
        let mut by_network = HashMap::new();
        connections.retain(|connection| self.lets_pass(connection, &mut by_network));
    }

    /// Whether a flow of ours in the switch lets the pod's packets of this connection pass.
    fn lets_pass<'a>(
        &'a self,
        connection: &BlockedConnection,
        by_network: &mut RulesByNetwork<'a>,
    ) -> bool {
        let port = self.ports.named(&connection.port);
        let Some((id, port)) = port.and_then(|id| Some((id, self.ports.get(id)?))) else {
            return false;
        };
        let entry = self.cache.entry(id, connection.dst);
        let is_for = |transport| connection.is_for(std::iter::once(transport));
        let flows = entry.and_then(|entry| self.cache.flows_of(connection.dst, entry));
        let Some(priority) = flows.and_then(|(_, flows)| flows.deciding(connection.src, is_for))
        else {
            return false;
        };
        let sets = self.policy.sets(&port.row);
        let rule = sets.into_iter().find_map(|set| {
            let first = *set.at_priority(priority).first()?;
            set.rules().get(first)
        });
        let Some(rule) = rule.filter(|rule| rule.action == RuleAction::Allow) else {
            return false;
        };
        let rules = by_network.entry(&rule.namespace).or_insert_with(|| {
            let rules = self.policy.rules_by_network(&rule.namespace);
            rules.collect()
        });
        let mut before = rules.iter().take_while(|(index, ..)| *index < rule.index);
        let deciding = before.find(|(_, network, rule)| {
            let is_for = || connection.is_for(rule.ports.iter().copied());
            network.contains(&connection.dst) && (rule.ports.is_empty() || is_for())
        });
        deciding.is_none_or(|(.., rule)| rule.action == RuleAction::Allow)
    }

    // What the switch has.

    /// The port and the address of a flow; `None` if the flow is one of a group.
    fn entry_key(&mut self, key: &FlowKey) -> Option<(PortId, IpAddr)> {
        let address = key.matches.ends.dst()?;
        let port = self.plans.port_of(key, self.ports, self.policy)?;
        Some((port, address))
    }

    /// Of these flows, those that a rule which denies would write at one of these ports, whatever the name, for an address
    /// without a known name.
    pub(crate) fn denials<'k>(
        &mut self,
        ports: &BTreeSet<PortId>,
        flows: impl Iterator<Item = (&'k FlowKey, Cookie)>,
    ) -> HashSet<FlowKey> {
        let denials = flows.filter(|(key, cookie)| {
            let port_id = self.entry_key(key).and_then(|(port, address)| {
                // Where names are known, they decide.
                let has_names = self.cache.entry(port, address).is_some();
                (ports.contains(&port) && !has_names).then_some(port)
            });
            let Some((port_id, port)) = port_id.and_then(|id| Some((id, self.ports.get(id)?)))
            else {
                return false;
            };
            let sets = self.policy.sets(&port.row);
            let facts = self.policy.facts_to_install(port_id, &port.row, &sets);
            let facts = facts.and_then(|facts| self.cache.groups().facts(facts));
            let planner = &mut self.plans.planner;
            facts.is_some_and(|facts| planner.is_denial(facts, (key, *cookie)))
        });
        denials.map(|(key, _)| key.clone()).collect()
    }

    /// Who has the flows that a flow would be one of.
    pub(crate) fn holder_of(&mut self, key: &FlowKey) -> Option<Holder> {
        match key.matches.ends {
            Ends::Group { mark, .. } => {
                let id = self.cache.groups().of_mark(mark)?;
                Some(Holder::Group(id))
            }
            Ends::Addresses(_) => {
                let (port, address) = self.entry_key(key)?;
                Some(Holder::Entry(port, address))
            }
        }
    }

    /// Whether the address of a flow of an earlier run waits for a mark by which packets get the same actions. The flow
    /// itself may end marks.
    pub(crate) fn awaits_mark(&mut self, key: &FlowKey, cookie: Cookie) -> bool {
        let Some((port, address)) = self.entry_key(key) else {
            return false;
        };
        let groups = self.cache.groups();
        let entry = self.cache.entry(port, address);
        let body = entry.and_then(|entry| entry.installed.awaited(key, groups));
        body.is_some_and(|body| {
            body.cookie == cookie || self.plans.planner.cookie_without_mark(body) == cookie
        })
    }

    /// Whether this is a flow of a group of an earlier run, with whose number packets are still marked.
    pub(crate) fn is_of_former(&self, key: &FlowKey) -> bool {
        let groups = self.cache.groups();
        matches!(key.matches.ends, Ends::Group { mark, .. } if groups.is_former(mark.value()))
    }

    /// The flows of a holder, and their target.
    pub(crate) fn flows(&mut self, holder: Holder) -> Option<(Target, &mut Flows)> {
        match holder {
            Holder::Entry(port, address) => {
                let entry = self.cache.entry_mut(port, address)?;
                Some((address.into(), entry.installed.own_mut()?))
            }
            Holder::Group(id) => {
                let target = self.cache.groups().target(id)?;
                Some((target, self.cache.groups_mut().flows_mut(id)?))
            }
        }
    }

    /// Some of the flows of a holder are missing in the switch.
    pub(crate) fn lost(&mut self, holder: Holder) {
        if let Holder::Group(id) = holder {
            self.cache.groups_mut().lost(id);
        }
    }

    /// The switch has a flow whose removal waits. If it is one of a group, the number rests on.
    pub(crate) fn ends(&mut self, key: &FlowKey, now: Timestamp) {
        if let Ends::Group { mark, .. } = key.matches.ends {
            self.cache.groups_mut().ends(mark, now);
        }
    }

    /// Everybody who has flows.
    pub(crate) fn holders(&mut self) -> Vec<Holder> {
        let groups = self.cache.groups().ids().into_iter().map(Holder::Group);
        let entries = self.cache.entries_mut();
        let entries = entries
            .filter(|(.., entry)| entry.installed.own().is_some_and(|flows| !flows.is_empty()));
        let entries = entries.map(|(port, address, _)| Holder::Entry(port, address));
        entries.chain(groups).collect()
    }

    /// Counters were read ([`Cache::counters_read`]).
    pub(crate) fn counters_read(&mut self, since: Timestamp) {
        self.cache.counters_read(since);
    }

    /// Whether an answer to a pod concerns a port of it: rules hold for the port, or may come to hold
    /// ([`Ports::of_pod_with_ways_out`]). ovn-kubernetes enforces an EgressFirewall on the primary network alone.
    fn is_concerned(&self, port: PortId, is_way_out: bool) -> bool {
        let row = self.ports.get(port).map(|port| &port.row);
        is_way_out || row.is_some_and(|row| self.policy.namespace_of_rules(row).is_some())
    }

    /// Forgets the names of ports that answers do not concern. They were told before OVN's databases were read, or an
    /// earlier run has learned them so.
    fn forget_unconcerned(&mut self) {
        let ports = self.ports.iter().map(|(id, _)| id);
        let ports: Vec<PortId> = ports.filter(|id| self.cache.count(*id) > 0).collect();
        for id in ports {
            let of_pod = self.ports.of_pod_with_ways_out(id);
            let this = of_pod.into_iter().find(|(port, _)| *port == id);
            if this.is_some_and(|(id, is_way_out)| !self.is_concerned(id, is_way_out)) {
                self.cache.forget_unmentioned(id, |_| false);
            }
        }
    }

    /// The first comparison has ended: from now on the rules alone say which names of the earlier run are denied.
    pub(crate) fn start_is_over(&mut self, batch: &mut Batch) {
        self.cache.start_is_over();
        self.forget_unconcerned();
        let ports: Vec<PortId> = self.ports.iter().map(|(id, _)| id).collect();
        for port in ports {
            let denied = self.cache.port(port).entries.denied();
            self.replan_entries(port, denied, batch);
        }
    }

    /// The first comparison has ended, and tells which flows there are. Until now it was not known what is open. An
    /// address that is short of room has the flows that were found, or those that its mark stood for if it has no group
    /// now, and gets no others in their place. Adds the flows that nobody wants to `unknown`, as far as one comparison
    /// removes them, and returns whether that is all.
    pub(crate) fn keep_found(
        &mut self,
        (found, of_marks): (BTreeMap<(PortId, IpAddr), FoundFlows>, MarksTakenOver),
        comparison: u32,
        unknown: &mut HashMap<FlowKey, InstalledFlow>,
        batch: &mut Batch,
    ) -> bool {
        // First all that is open: the flows of the node are then those that there are, and more.
        for (key, flows) in &found {
            let former = flows.keys().map(FlowKey::traffic);
            self.cache.note_former(*key, former);
        }
        let mut kept = HashSet::new();
        for ((port, address), flows) in &found {
            if self.cache.is_short(*port, *address) {
                self.cache.forget_untold(*port, *address, batch);
                self.cache.forget_unseen(*port, *address, comparison);
                self.replan_with(*port, [*address], Some(flows), batch);
                kept.insert((*port, *address));
            } else {
                self.cache.forget_former_without_mark((*port, *address));
            }
        }
        let ports: Vec<PortId> = self.ports.iter().map(|(id, _)| id).collect();
        for port in ports {
            for address in self.cache.addresses(port) {
                if !kept.contains(&(port, address))
                    && self.cache.forget_unseen(port, address, comparison)
                {
                    self.replan_with(port, [address], found.get(&(port, address)), batch);
                }
            }
        }
        for (port, mark) in of_marks.without_group {
            let key = (port, mark.address);
            if let Some(flows) = of_marks.flows.get(&(port, mark.mark))
                && !found.contains_key(&key)
                && self.cache.is_short(port, mark.address)
            {
                let former = flows.iter().map(|(key, _)| key.traffic());
                self.cache.note_former_of_mark(key, former.collect());
                self.replan_with(port, [mark.address], None, batch);
            }
        }
        let mut are_all_taken = true;
        for ((port, address), flows) in found {
            let entry = self.cache.entry_mut(port, address);
            let mut own = entry.and_then(|entry| entry.installed.own_mut());
            for (key, cookie) in flows {
                match own.as_mut().filter(|own| own.has(&key, cookie)) {
                    Some(own) => own.seen(&key, comparison),
                    None if unknown.len() < UNKNOWN_MAX => {
                        let flow = InstalledFlow {
                            key: key.clone(),
                            cookie,
                            packets: 0,
                            hard_timeout_s: 0,
                        };
                        unknown.insert(key, flow);
                    }
                    None => are_all_taken = false,
                }
            }
        }
        are_all_taken
    }

    /// At a start, addresses that a load balancer leads to keep the marks of the earlier run: they get flows of their
    /// own as in a run ([`Cache::compared`]), some at a time. The other marks stay in `marks`.
    pub(crate) fn keep_marks(
        &mut self,
        marks: &mut Vec<(PortId, MarkFound)>,
        reading: Reading,
        batch: &mut Batch,
    ) {
        let given_up: HashSet<(PortId, IpAddr)> = marks
            .iter()
            .map(|(port, found)| (*port, found.address))
            .filter(|(port, address)| self.cache.give_up_unsent(*port, *address))
            .collect();
        let ports: BTreeSet<PortId> = given_up.iter().map(|(port, _)| *port).collect();
        // The flows that are given up have left room to others.
        for port in ports {
            self.replan(port, batch);
        }
        marks.retain(|(port, found)| {
            if !given_up.contains(&(*port, found.address)) {
                return true;
            }
            self.cache.note_backend(*port, found.address);
            let read = self.cache.mark_found(*port, found, reading, batch);
            read != Some(ReadMark::Right)
        });
    }

    /// Goes on with the marks of an earlier run at addresses that are known. Removes all others from the kernel, but for
    /// those of addresses that were told again meanwhile, or whose groups are not in force ([`Cache::end_former`]). The
    /// flows of former numbers may be in `found`.
    pub(crate) fn take_over_marks(
        &mut self,
        marks: Vec<(PortId, MarkFound)>,
        found: &HashMap<FlowKey, InstalledFlow>,
        comparison: u32,
        batch: &mut Batch,
    ) -> MarksTakenOver {
        let mut result = MarksTakenOver::default();
        if marks.is_empty() {
            return result;
        }
        // What a number stood for: flows that nobody has now, and those of the group that has the number again.
        let shown = found.iter().map(|(key, flow)| (key.clone(), flow.cookie));
        let shown = shown.chain(self.cache.groups().shown(comparison)).collect();
        result.flows = self.by_mark(shown);
        for (port, mark) in marks {
            let MarkFound {
                ifindex, address, ..
            } = mark;
            self.check_address(port, address);
            self.replan_entries(port, [address], batch);
            let entry = self.cache.entry(port, address);
            match entry.map(|entry| entry.installed.group()) {
                // The kernel has a mark, and refuses no other one in its place.
                Some(Some(_)) => self.cache.note_former((port, address), []),
                Some(None) => result.without_group.push((port, mark)),
                None => {}
            }
            let entry = self.cache.entry(port, address).filter(|entry| {
                let opens = entry.installed.group().is_some() || entry.installed.is_unsent();
                opens && !entry.needs_flows()
            });
            let Some(entry) = entry else {
                batch.mark(MarkChange::Remove { ifindex, address });
                result.removed += 1;
                continue;
            };
            let has_flows = entry.installed.is_unsent();
            let is_removed = self.cache.end_former(port, &mark, comparison, batch);
            result.removed += usize::from(is_removed);
            result.any_stays |= has_flows && !is_removed;
        }
        result
    }

    /// Flows of groups by port and mark, without those in which marks end.
    fn by_mark(&mut self, flows: Vec<(FlowKey, Cookie)>) -> FlowsByMark {
        let marks_end = self.policy.marks_end().flatten();
        let mut by_mark = FlowsByMark::new();
        for (key, cookie) in flows {
            if let Ends::Group { mark, .. } = key.matches.ends
                && marks_end != Some(key.table)
                && let Some(port) = self.plans.port_of(&key, self.ports, self.policy)
            {
                let of_mark = by_mark.entry((port, mark.value())).or_default();
                of_mark.push((key, cookie));
            }
        }
        by_mark
    }
}

/// The change of an address for which it is planned anew.
#[derive(Clone, Copy, Debug)]
enum AddressChange {
    /// It was not refused before, and is now.
    Refused(Refused),
    /// It was refused, and is not any more.
    Allowed,
    /// A load balancer has it in front, and had not before.
    Front,
}

/// Flows that were found in the switch, with their cookies.
pub(crate) type FoundFlows = BTreeMap<FlowKey, Cookie>;

/// Namespace and logical port of a port; `None` if the rules of no namespace hold for the port.
fn whose(ports: &Ports, policy: &Policy, port: PortId) -> Option<(String, String)> {
    let row = &ports.get(port)?.row;
    let namespace = policy.namespace_of_rules(row)?;
    Some((namespace.to_owned(), row.iface_id.clone()))
}

/// Another number when the rules for a port may be others.
fn rules_version(ports: &Ports, policy: &Policy, port: PortId) -> Option<u64> {
    Some(policy.rules_version(&ports.get(port)?.row))
}

/// The rules of a name of a port, of which `is_denied` says whether one denies the name.
fn standing(
    ports: &Ports,
    policy: &Policy,
    (port, name): (PortId, &DomainName),
    is_denied: bool,
) -> Standing {
    let row = ports.get(port).map(|port| &port.row);
    let known = row.filter(|row| policy.knows_names_for(row));
    let alike = known.and_then(|row| policy.alike(row, name));
    let is_matched = |row| {
        let mut sets = policy.sets(row).into_iter();
        sets.any(|set| set.matching_indices(name).next().is_some())
    };
    let claim = match known {
        _ if is_denied => Claim::Denied,
        None => Claim::Allowed,
        Some(row) if policy.is_to_be_denied(row, name) => Claim::ToBeDenied,
        Some(row) if is_matched(row) => Claim::Allowed,
        Some(_) if alike.is_some() => Claim::Mentioned,
        Some(_) => Claim::None,
    };
    Standing { claim, alike }
}

/// An address that is planned.
struct Planning<'a> {
    address: IpAddr,
    space: Space,
    /// Gives another number when the rules for the port may be others.
    version: &'a dyn Fn() -> u64,
    /// The rules of the name that has come since the last plan, if one has.
    further: Option<&'a MatchedRules>,
    /// Whether nothing else has changed since then.
    may_stay: bool,
}

/// The flows that follow from names and rules; `None` if they stay.
fn plan(
    planner: &mut Planner,
    facts: PortFacts<'_>,
    entry: &mut Entry,
    planning: Planning<'_>,
) -> Option<Planned> {
    let Planning {
        address,
        space,
        version,
        further,
        may_stay,
    } = planning;
    if entry.names.len() > NAMES_PER_ADDRESS_MAX {
        let known = entry.names.take_deciding();
        let is_denied = entry.is_denied();
        let many = ManyNames {
            names: entry.names.keys(),
            basis: Basis {
                version: version(),
                denials_only: entry.is_refused,
                is_denied,
            },
            space,
            known,
            further: further.map(|rules| &rules[..]),
            // An address without a denied name may get a mark in place of its flows.
            may_stay: may_stay && is_denied,
        };
        let (planned, deciding) = planner.for_many(facts, address, many);
        entry.names.set_deciding(deciding);
        return planned;
    }
    let denies = |rule: &(usize, usize)| {
        let (set, rule) = *rule;
        facts.sets[set].rules()[rule].action == RuleAction::Deny
    };
    let mut matched = matched_by_any(facts.sets, entry.names.keys());
    if !entry.is_refused {
        return Some(planner.for_patterns(facts, address, &matched, &space));
    }
    matched.retain(|rule| !entry.is_refused || denies(rule));
    Some(planner.for_rules(facts, address, &matched, &space))
}
