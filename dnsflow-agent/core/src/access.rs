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
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use crate::{
    Timestamp,
    cache::{Cache, Claim, Closed, Entry, Learning, Resolution, Standing, Term},
    installed::{Batch, Fit, Flows, Followed, Groups, Tagging, Written},
    io::{input::MarkChange, output::Output, report::Report},
    ovn::view::TunnelKeys,
    pods::{budget::FlowBudget, ports::Ports},
    policy::{
        Mention, Policy,
        plan::{Patterns, Planner, PortFacts, keys_of, matched_by_any},
        refused::{ChangedNetworks, Recheck, Refusal, Refused, RefusedAddresses},
        rules::{ChangedName, ChangedNames, ChangedRules, RuleSet, is_dry_run},
    },
    values::{
        connection::BlockedConnection,
        firewall::{Destination, Rule, RuleAction},
        flow::{Cookie, Ends, FlowKey, Tag, Target},
        ids::PortId,
        limits::{CHANGES_UNDER_WAY_MAX, CLOSED_PER_EDIT_MAX, Limit, USED_LATELY},
        name::DomainName,
    },
};

use answer::rules;
pub(crate) use answer::{Asked, Outcome, ReadAnswer};
pub(crate) use classes::Classes;

/// Changes behind which the groups of a scope are in line with the rules, and the groups whose addresses have nothing to
/// change.
type FollowedScope = (ChangedRules, Arc<BTreeSet<Tag>>);

/// The flow templates of rules, until something changes that they were made from.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    planner: Planner,
    /// The ports by their tunnel keys. Made when first asked for.
    by_keys: Option<HashMap<TunnelKeys, PortId>>,
    /// The scopes whose groups are in line with the rules, each with whether after all changes.
    followed: HashMap<(u16, bool), FollowedScope>,
}

impl Plans {
    /// A further input may change something.
    pub(crate) fn begin(&mut self) {
        self.followed.clear();
    }

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
    /// An address of a port: those that give its packets their tag.
    Entry(PortId, IpAddr),
    /// The group of a tag: those that do what rules say.
    Group(Tag),
    /// A port: those that make tags of marks.
    Port(PortId),
    /// The logical switch with this key: those in which tags end.
    Switch(u32),
}

/// Logical ports, as OVN knows them, with the addresses of their pods.
#[derive(Debug)]
pub(crate) struct Senders(HashSet<(TunnelKeys, IpAddr)>);

impl Senders {
    /// Whether the flow is for packets of one.
    pub(crate) fn have(&self, key: &FlowKey) -> bool {
        let src = key.matches.ends.src();
        keys_of(key)
            .zip(src)
            .is_some_and(|sender| self.0.contains(&sender))
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
    /// Counts and reports the plans whose flows have no room.
    pub(crate) fn report_cut_plans(&mut self, out: &mut Output) {
        for (port, plans) in self.cache.take_cut() {
            out.counters.addresses_cut += plans as u64;
            let limit = Limit::FlowsOfNamespace;
            let max = self.cache.limits().of(&limit);
            self.limit_reached(port, limit, max, out);
        }
    }

    /// Reports what edits have closed that pods have used lately.
    pub(crate) fn report_closed(&mut self, out: &mut Output) {
        for (id, Closed { named, left_out }) in self.cache.take_closed() {
            let row = self.ports.get(id).map(|port| &port.row);
            // Of its rules, none may be left.
            let namespace = row.and_then(|row| self.policy.namespace_of_names(row));
            let Some((namespace, row)) = namespace.zip(row) else {
                continue;
            };
            let rest = (left_out > 0).then_some((None, None, Vec::new(), left_out));
            let named = named.into_iter();
            let named = named.map(|((name, rule), addresses)| (Some(name), rule, addresses, 0));
            for (name, rule, addresses, left_out) in named.chain(rest) {
                out.report_of_pod(
                    id,
                    Report::Closed {
                        namespace: namespace.to_owned(),
                        port: row.iface_id.clone(),
                        name,
                        addresses,
                        left_out,
                        rule,
                    },
                );
            }
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
        self.replan_port(id, batch);
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

    /// Plans the groups and all entries of a port again.
    pub(crate) fn replan(&mut self, port: PortId, batch: &mut Batch) {
        self.forget_classes(port, batch);
        self.follow(port, &ChangedRules::All, batch);
        self.replan_edited(port, self.cache.addresses(port), batch);
    }

    /// Plans all entries of a port again, whose rules are as they were.
    pub(crate) fn replan_port(&mut self, port: PortId, batch: &mut Batch) {
        self.forget_classes(port, batch);
        self.follow(port, &ChangedRules::Of(ChangedNames::new()), batch);
        self.replan_entries(port, self.cache.addresses(port), batch);
    }

    /// Plans the groups of a port again to which these rules matter, or mattered before, and then the entries whose
    /// patterns may be others.
    pub(crate) fn replan_changed(
        &mut self,
        port: PortId,
        changed: &ChangedRules,
        batch: &mut Batch,
    ) {
        let ChangedRules::Of(names) = changed else {
            return self.replan(port, batch);
        };
        self.forget_classes(port, batch);
        let Some(following) = self.follow(port, changed, batch) else {
            return self.replan_edited(port, self.cache.addresses(port), batch);
        };
        let entries = &self.cache.port(port).entries;
        let follows = |address: IpAddr| {
            let entry = self.cache.entry(port, address);
            entry.is_some_and(|entry| entry.follows(&following))
        };
        let do_all_follow = LazyCell::new(|| {
            let mut entries = entries.iter();
            entries.all(|(_, entry)| entry.follows(&following))
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
        self.replan_edited(port, addresses.into_iter().collect(), batch);
    }

    /// Plans addresses again behind an edit, and notes those that were used lately and that it closes.
    fn replan_edited(&mut self, port: PortId, addresses: Vec<IpAddr>, batch: &mut Batch) {
        let now = batch.now();
        let was_used = |address: &IpAddr| {
            let installed = &self.cache.entry(port, *address)?.installed;
            let (used_at, tag) = installed.usage().at.zip(installed.tag())?;
            Some(used_at + USED_LATELY > now && self.cache.groups().let_pass(tag, now))
        };
        let used = addresses.iter().copied();
        let used = used.filter(|at| was_used(at) == Some(true));
        let used: Vec<IpAddr> = used.take(CLOSED_PER_EDIT_MAX).collect();
        self.replan_entries(port, addresses, batch);
        for address in used {
            let entry = self.cache.entry(port, address);
            let tag = entry.and_then(|entry| entry.installed.tag());
            if !tag.is_some_and(|tag| self.cache.groups().lets_pass(tag)) {
                let rule = self.denying_rule(port, address);
                if self.is_closed(port, address, rule) {
                    self.cache.note_closed(port, address, rule);
                }
            }
        }
    }

    /// Whether a rule by network, or one that denies a name of the address, denies all packets to it.
    fn is_closed(&self, port: PortId, address: IpAddr, denied_by: Option<u32>) -> bool {
        let row = self.ports.get(port).map(|port| &port.row);
        let Some(namespace) = row.and_then(|row| self.policy.namespace_of_names(row)) else {
            return false;
        };
        // OVN may not enforce it yet.
        let Some(firewall) = self.policy.present(namespace) else {
            return false;
        };
        let before = denied_by.map_or(firewall.rules.len(), |index| index as usize);
        let mut before = firewall.rules.iter().take(before);
        let is_for = |rule: &&Rule| match &rule.destination {
            Destination::Cidr(network) => network.contains(&address),
            _ => false,
        };
        match before.find(is_for) {
            Some(rule) => rule.action == RuleAction::Deny && rule.ports.is_empty(),
            None => denied_by.is_some(),
        }
    }

    /// The first rule that denies a name of an address.
    fn denying_rule(&self, port: PortId, address: IpAddr) -> Option<u32> {
        let row = &self.ports.get(port)?.row;
        let sets = self.policy.sets(row);
        let names = self.cache.entry(port, address)?.names.keys();
        let matched = matched_by_any(&sets, names);
        let denying = rules(&sets, &matched).filter(|rule| rule.action == RuleAction::Deny);
        denying.map(|rule| rule.index).min()
    }

    /// Brings the flows of a port and of its groups in line with the rules. Returns the groups whose addresses have nothing to
    /// change; `None` if all addresses of the port are to be planned anew.
    fn follow(
        &mut self,
        port_id: PortId,
        changed: &ChangedRules,
        batch: &mut Batch,
    ) -> Option<Arc<BTreeSet<Tag>>> {
        let port = self.ports.get(port_id)?;
        let sets = self.policy.sets(&port.row);
        let facts = facts_to_install(
            (self.ports, self.policy),
            self.cache.groups(),
            port_id,
            &sets,
        );
        let groups = self.cache.groups_mut();
        if sets.is_empty() || is_dry_run(&sets) {
            groups.leave(port_id, batch);
        }
        let facts = facts?;
        let Plans {
            planner, followed, ..
        } = &mut *self.plans;
        let before = batch.len();
        let mut tagging = Tagging { facts, planner };
        let Followed {
            scope,
            is_anew,
            is_stale,
        } = groups.follow_port(&mut tagging, batch)?;
        let changed = match is_stale {
            true => &ChangedRules::All,
            false => changed,
        };
        // The ports of a scope have the same groups.
        let key = (scope, matches!(changed, ChangedRules::All));
        let known = followed.get(&key);
        let known = known.filter(|(known, _)| known == changed);
        let following = known.map(|(_, following)| Arc::clone(following));
        let following = following.unwrap_or_else(|| {
            let names = match changed {
                ChangedRules::All => None,
                ChangedRules::Of(names) => Some(names),
            };
            let following = Arc::new(groups.follow(scope, tagging, names, batch));
            followed.insert(key, (changed.clone(), Arc::clone(&following)));
            following
        });
        if batch.adds_since(before) {
            batch.end_gap();
        }
        (!is_anew).then_some(following)
    }

    /// Plans some entries of a port again.
    fn replan_entries(
        &mut self,
        port_id: PortId,
        addresses: impl IntoIterator<Item = IpAddr>,
        batch: &mut Batch,
    ) {
        let now = batch.now();
        let Some(port) = self.ports.get(port_id) else {
            return;
        };
        let sets = self.policy.sets(&port.row);
        let facts = facts_to_install(
            (self.ports, self.policy),
            self.cache.groups(),
            port_id,
            &sets,
        );
        let released = self.released(now);
        let mut opens = false;
        for address in addresses {
            let denies = |name: &DomainName| sets.iter().any(|set| set.denies(name));
            let cache = &mut *self.cache;
            let may_end_earlier = cache.deny_names(port_id, address, denies, released);
            cache.drop_ended((port_id, address), |name| is_matched(&sets, name), now);
            let Some(entry) = cache.entry(port_id, address) else {
                continue;
            };
            let before = batch.len();
            // Established connections go on behind it.
            let ends = entry.has_ended() && entry.installed.is_open();
            let enforced = match facts {
                Some(facts) => {
                    let patterns = patterns_of(&sets, entry, address);
                    let planner = &mut self.plans.planner;
                    let mut tagging = Tagging { facts, planner };
                    cache.enforce((port_id, address), patterns.as_ref(), &mut tagging, batch)
                }
                None => cache.withdraw((port_id, address), batch),
            };
            for awaited in self.cache.awaits(port_id, address) {
                batch.awaits(awaited);
            }
            if may_end_earlier {
                self.cache.look_in_time(port_id, address);
            }
            if batch.adds_since(before) {
                batch.is_for(&port.row, address);
            }
            // A mark may open the address without a change of flows.
            opens |= !ends && (batch.adds_since(before) || enforced.added > 0);
        }
        if opens {
            batch.end_gap();
        }
    }

    /// The flows of these groups have gone in other batches than those that they waited for.
    pub(crate) fn go_in(&mut self, moved: Vec<(Tag, Written)>) {
        for (tag, written) in moved {
            self.cache.groups_mut().go_in(tag, written);
        }
    }

    /// Gives flows to addresses with nothing but a mark that a load balancer leads to: as many as one pod may have under
    /// way.
    pub(crate) fn replace_marks(&mut self, batch: &mut Batch) {
        let before = batch.len();
        while batch.len() - before < CHANGES_UNDER_WAY_MAX
            && let Some(key) = self.cache.take_backend()
        {
            self.replace_mark(key, batch);
        }
    }

    /// At a start, flows of these give addresses their tags, and go on doing so in place of marks.
    pub(crate) fn keep_flows<'k>(
        &mut self,
        flows: impl Iterator<Item = &'k FlowKey>,
        batch: &mut Batch,
    ) {
        for key in flows {
            if let Some(Holder::Entry(port, address)) = self.holder_of(key) {
                self.replace_mark((port, address), batch);
            }
        }
    }

    /// Gives its tag to an address with a mark by flows.
    fn replace_mark(&mut self, key: (PortId, IpAddr), batch: &mut Batch) {
        let Some(port) = self.ports.get(key.0) else {
            return;
        };
        let sets = self.policy.sets(&port.row);
        if let Some(facts) =
            facts_to_install((self.ports, self.policy), self.cache.groups(), key.0, &sets)
        {
            let planner = &mut self.plans.planner;
            let mut tagging = Tagging { facts, planner };
            self.cache.replace_mark(key, &mut tagging, batch);
        }
    }

    /// Until when a name counts at least that no rule denies any more: as long as an address out of use, so that
    /// nothing is forgotten while rules are replaced.
    fn released(&self, now: Timestamp) -> Timestamp {
        now + self.cache.limits().idle_grace
    }

    /// Decides over the entries that are due. To be called when their use is known. Returns for how many of them only
    /// established connections go on.
    pub(crate) fn decide_undecided(&mut self, batch: &mut Batch) -> usize {
        let mut ended = 0;
        let mut undecided: BTreeMap<PortId, Vec<IpAddr>> = BTreeMap::new();
        for (port, address) in self.cache.take_undecided() {
            undecided.entry(port).or_default().push(address);
        }
        for (port_id, addresses) in undecided {
            let Some(port) = self.ports.get(port_id) else {
                continue;
            };
            let sets = self.policy.sets(&port.row);
            let is_matched = |name: &DomainName| is_matched(&sets, name);
            for address in &addresses {
                let has_ended = self.cache.decide(port_id, *address, is_matched, batch);
                ended += usize::from(has_ended);
            }
            self.replan_entries(port_id, addresses, batch);
        }
        ended
    }

    /// The kernel has refused the mark of an address: the address gets its tag by flows.
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
        let own = port.row.addresses.iter();
        let mut own = own.filter(|own| **own == connection.src);
        let entry = own
            .next()
            .and_then(|_| self.cache.entry(id, connection.dst));
        let is_for = |transport| connection.is_for(std::iter::once(transport));
        let flows = entry.and_then(|entry| self.cache.flows_of(entry));
        let Some(priority) = flows.and_then(|(_, flows)| flows.deciding(is_for)) else {
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

    /// Of these flows, those that deny what nobody knows the names of, at one of these ports: those of groups that nobody
    /// knows and that a rule which denies would write, whatever the name, and those that give packets their tags.
    pub(crate) fn denials<'k>(
        &mut self,
        ports: &BTreeSet<PortId>,
        flows: impl Iterator<Item = (&'k FlowKey, Cookie)> + Clone,
    ) -> HashSet<FlowKey> {
        let mut denying = HashSet::new();
        let mut denials = HashSet::new();
        for port_id in ports {
            let Some(port) = self.ports.get(*port_id) else {
                continue;
            };
            let sets = self.policy.sets(&port.row);
            let Some(facts) = facts_to_install(
                (self.ports, self.policy),
                self.cache.groups(),
                *port_id,
                &sets,
            ) else {
                continue;
            };
            for (key, cookie) in flows.clone() {
                if let Ends::Tagged { tag, .. } = key.matches.ends
                    && !self.cache.groups().contain(tag)
                    && key.matches.metadata == u64::from(facts.keys.datapath)
                    && self.plans.planner.is_denial(facts, (key, cookie))
                {
                    denying.insert((*port_id, tag));
                    denials.insert(key.clone());
                }
            }
        }
        for (key, cookie) in flows {
            let Some(Holder::Entry(port, address)) = self.holder_of(key) else {
                continue;
            };
            // Where names are known, they decide.
            let has_names = self.cache.entry(port, address).is_some();
            let tag = cookie.tag();
            if !has_names && tag.is_some_and(|tag| denying.contains(&(port, tag))) {
                denials.insert(key.clone());
            }
        }
        denials
    }

    /// Who has the flows that a flow would be one of.
    pub(crate) fn holder_of(&mut self, key: &FlowKey) -> Option<Holder> {
        match key.matches.ends {
            Ends::Addresses(addresses) | Ends::Established(addresses) => {
                let port = self.plans.port_of(key, self.ports, self.policy)?;
                Some(Holder::Entry(port, addresses.dst()))
            }
            Ends::Tagged { tag, .. } => {
                let is_one = self.cache.groups().contain(tag);
                is_one.then_some(Holder::Group(tag))
            }
            Ends::Untranslated => {
                let port = self.plans.port_of(key, self.ports, self.policy)?;
                Some(Holder::Port(port))
            }
            Ends::AnyTag | Ends::Marked { .. } => {
                let datapath = u32::try_from(key.matches.metadata).ok()?;
                Some(Holder::Switch(datapath))
            }
        }
    }

    /// Who has the flows in place of one that nobody has: of one that makes tags of marks, those of the port's addresses.
    /// The group of an address comes before the address.
    pub(crate) fn replacing(&mut self, key: &FlowKey) -> Vec<Holder> {
        let addresses = match self.holder_of(key) {
            Some(Holder::Port(port)) => {
                let addresses = self.cache.addresses(port).into_iter();
                addresses.map(|address| (port, address)).collect()
            }
            Some(Holder::Entry(port, address)) => vec![(port, address)],
            holder => return holder.into_iter().collect(),
        };
        let holders = addresses.into_iter().flat_map(|(port, address)| {
            let entry = self.cache.entry(port, address);
            let tag = entry.and_then(|entry| entry.installed.tag());
            let group = tag.map(Holder::Group);
            group.into_iter().chain([Holder::Entry(port, address)])
        });
        holders.collect()
    }

    /// The flows of a holder, and their target.
    pub(crate) fn flows(&mut self, holder: Holder) -> Option<(Target, &mut Flows)> {
        if let Holder::Entry(port, address) = holder {
            let entry = self.cache.entry_mut(port, address)?;
            return Some((address.into(), entry.installed.own_mut()?));
        }
        let groups = self.cache.groups_mut();
        match holder {
            Holder::Group(tag) => Some((Target::Tag(tag), groups.flows_mut(tag)?)),
            Holder::Port(port) => Some((Target::Whole, groups.flows_of_port_mut(port)?)),
            Holder::Switch(datapath) => Some((Target::Whole, groups.ends_mut(datapath)?)),
            Holder::Entry(..) => None,
        }
    }

    /// Some of the flows of a holder are missing in the switch.
    pub(crate) fn lost(&mut self, holder: Holder) {
        match holder {
            Holder::Group(tag) => self.cache.groups_mut().lost(tag),
            Holder::Port(port) => self.cache.groups_mut().lost_at(port),
            Holder::Entry(..) | Holder::Switch(_) => {}
        }
    }

    /// These flows of nobody deny addresses, and stay.
    pub(crate) fn denials_stay<'k>(&mut self, flows: impl IntoIterator<Item = &'k FlowKey>) {
        let holders = flows.into_iter().filter_map(|key| self.holder_of(key));
        let addresses = holders.filter_map(|holder| match holder {
            Holder::Entry(port, address) => Some((port, address)),
            Holder::Group(_) | Holder::Port(_) | Holder::Switch(_) => None,
        });
        let addresses = addresses.collect();
        self.cache.groups_mut().denials_stay(addresses);
    }

    /// The switch has a flow whose removal waits, or that nobody has. Its tag rests on.
    pub(crate) fn ends(&mut self, key: &FlowKey, cookie: Cookie, now: Timestamp) {
        let tag = match key.matches.ends {
            Ends::Tagged { tag, .. } => Some(tag),
            _ => cookie.tag(),
        };
        if let Some(tag) = tag {
            self.cache.groups_mut().rest(tag, now);
        }
    }

    /// Everybody who has flows.
    pub(crate) fn holders(&mut self) -> Vec<Holder> {
        let (tags, ports, switches) = self.cache.groups().holders();
        let entries = self.cache.entries_mut();
        let entries = entries.filter(|(.., entry)| entry.installed.own().is_some());
        let entries = entries.map(|(port, address, _)| Holder::Entry(port, address));
        // Those that tags lead to first: they are restored in this order.
        let groups = tags.into_iter().map(Holder::Group);
        let ports = ports.into_iter().map(Holder::Port);
        let switches = switches.into_iter().map(Holder::Switch);
        groups.chain(ports).chain(switches).chain(entries).collect()
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

    /// The first comparison has ended: from now on the rules alone say which names of the earlier run are denied, and it is
    /// known which tags are taken.
    pub(crate) fn start_is_over(&mut self, batch: &mut Batch) {
        self.cache.start_is_over();
        self.forget_unconcerned();
        let ports: Vec<PortId> = self.ports.iter().map(|(id, _)| id).collect();
        for port in ports {
            let entries = &self.cache.port(port).entries;
            let mut anew: BTreeSet<IpAddr> = entries.denied().into_iter().collect();
            let waiting = entries.iter();
            // One whose time is over gets no further one.
            let waiting = waiting.filter(|(_, entry)| {
                entry.fit == Fit::Provisional && entry.ends_at() > batch.now()
            });
            anew.extend(waiting.map(|(address, _)| address));
            self.replan_entries(port, anew, batch);
        }
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

/// The facts from which flows of a port are planned; `None` if it is not known yet where to write them, or whether its
/// packets are marked, and in a dry run.
fn facts_to_install<'a>(
    (ports, policy): (&'a Ports, &'a Policy),
    groups: &Groups,
    port: PortId,
    sets: &'a [&'a RuleSet],
) -> Option<PortFacts<'a>> {
    let facts = policy.facts_to_install(port, &ports.get(port)?.row, sets)?;
    groups.knows(port).then_some(facts)
}

/// Whether a rule matches a name.
fn is_matched(sets: &[&RuleSet], name: &DomainName) -> bool {
    let mut sets = sets.iter();
    sets.any(|set| set.matching_indices(name).next().is_some())
}

/// The patterns of an entry's names; `None` if no rule matches one.
fn patterns_of(sets: &[&RuleSet], entry: &Entry, address: IpAddr) -> Option<Patterns> {
    let matched = matched_by_any(sets, entry.names.keys());
    Patterns::of(sets, (address.is_ipv6(), entry.is_refused), &matched)
}
