//! The rules of the node, and where OVN enforces them. Plans are made from this and from what the
//! pods were told.

pub mod pipeline;
pub mod plan;
pub mod refused;
pub mod rules;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque, btree_map::Entry},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
    sync::Arc,
};

use crate::{
    Command, Timestamp,
    io::{
        input::{FlowQuestion, FoundFlow, LOGICAL_FLOW_SAMPLE_MAX},
        output::Output,
        report::Report,
    },
    ovn::{
        rows::{Interface, NbUpdate, Pipeline, RowId, SbUpdate, Stage},
        template::{ActionText, CachedActions},
        view::{ClusterChanges, OvnView, Owners, Touched, TunnelKeys},
    },
    policy::{
        pipeline::{Locator, Question},
        plan::PortFacts,
        rules::{
            ACL_PRIORITY_OFFSET, AlikeNames, ChangedRules, NamePattern, NotTakenOver, Problem,
            RuleSet, is_dry_run,
            pairing::{Pairing, PairingChanges, differing},
            problems_of_resource,
        },
    },
    tools::deadline::{self, Deadline, Why},
    values::{
        connection::BlockedConnection,
        firewall::{Destination, Firewall, FirewallId, FirewallUpdate, Rule, RuleAction},
        ids::PortId,
        limits::{
            ACTION_TEXTS_MAX, COPY_INTERVAL, COUNTED_PER_NAMESPACE_MAX, FORMER_FIREWALLS_MAX,
            TAKEOVER_MAX,
        },
        name::DomainName,
    },
};

/// The only name that OVN-Kubernetes allows an EgressFirewall to have.
pub const FIREWALL_NAME: &str = "default";

/// Whether a rule mentions a name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mention {
    /// A rule mentions the name.
    Some,
    /// No rule mentions the name.
    None,
    /// Not known: EgressFirewalls were not read yet, or OVN does not know the port.
    Unknown,
}

/// An EgressFirewall that OVN does not enforce yet.
#[derive(Debug)]
struct Unfollowed {
    /// When it came.
    since: Timestamp,
    /// Whether it was looked at after it had become late.
    late: bool,
    /// The EgressFirewalls before it, the latest last. OVN may still enforce one of them.
    former: VecDeque<Firewall>,
    /// Whether OVN enforces the first of `former`.
    enforces_former: bool,
}

/// A namespace with an EgressFirewall and with pods here.
#[derive(Debug)]
struct Local {
    /// The rules that OVN enforces.
    pairing: Pairing,
    /// Another one, also than that of any other namespace, when the rules may be others.
    version: u64,
    /// The EgressFirewalls that `differing` and `other_names` were found for: the one that OVN enforces, the latest,
    /// and those in between.
    compared: Vec<Arc<[Rule]>>,
    /// The indices at which the latest EgressFirewall has another rule than the one that OVN enforces.
    differing: Vec<u32>,
    /// Names without wildcards of rules that only an EgressFirewall has that OVN does not enforce, and which names at
    /// or below each of them these rules deny.
    other_names: BTreeMap<DomainName, Vec<NamePattern>>,
    /// Another one when the names may be others.
    names_version: u64,
    /// The problems that are not those of the pairing, by rule index; `None` if there is none.
    other_problems: BTreeMap<u32, Option<Problem>>,
}

impl Local {
    fn new(namespace: &str, subdomains: bool) -> Self {
        Self {
            pairing: Pairing::new(namespace, subdomains),
            version: 0,
            compared: Vec::new(),
            differing: Vec::new(),
            other_names: BTreeMap::new(),
            names_version: 0,
            other_problems: BTreeMap::new(),
        }
    }

    /// What is wrong, by rule index.
    fn problems(&self) -> impl Iterator<Item = (u32, &Problem)> {
        let others = &self.other_problems;
        let problems = self.pairing.rules().problems.iter();
        let problems = problems.filter(|(index, _)| !others.contains_key(*index));
        let others = others
            .iter()
            .filter_map(|(index, problem)| Some((*index, problem.as_ref()?)));
        problems
            .map(|(index, problem)| (*index, problem))
            .chain(others)
    }

    /// Whether a rule mentions this name, in wire form, or one above it.
    fn mentions(&self, name: &DomainName) -> bool {
        let mut suffixes = name.suffixes();
        suffixes
            .any(|suffix| self.pairing.mentions(suffix) || self.other_names.contains_key(suffix))
    }

    /// Whether a rule has this name, in wire form, or an ACL of OVN.
    fn knows(&self, name: &[u8]) -> bool {
        self.pairing.knows(name) || self.other_names.contains_key(name)
    }

    /// Whether a rule that OVN does not enforce yet denies this name.
    fn is_to_deny(&self, name: &DomainName) -> bool {
        let mut suffixes = name.suffixes().enumerate();
        suffixes.any(|(extra, suffix)| {
            let patterns = self.other_names.get(suffix).into_iter().flatten();
            self.pairing.is_to_deny(suffix, extra)
                || patterns.into_iter().any(|pattern| pattern.covers(extra))
        })
    }

    /// Compares the EgressFirewall that OVN enforces with the latest one, and with those before it. Returns whether
    /// the names may be others.
    fn compare(
        &mut self,
        latest: &Firewall,
        former: &VecDeque<Firewall>,
        subdomains: bool,
    ) -> bool {
        let others = || [latest].into_iter().chain(former);
        let enforced = Arc::clone(&self.pairing.firewall().rules);
        let all = || {
            [&enforced]
                .into_iter()
                .chain(others().map(|one| &one.rules))
        };
        let is_known = self.compared.len() == all().count()
            && all()
                .zip(&self.compared)
                .all(|(one, known)| Arc::ptr_eq(one, known));
        if is_known {
            return false;
        }
        self.compared = all().cloned().collect();
        self.other_names.clear();
        for firewall in others() {
            for index in differing(&enforced, &firewall.rules) {
                let rule = usize::try_from(index).ok();
                let Some(rule) = rule.and_then(|index| firewall.rules.get(index)) else {
                    continue;
                };
                if let Destination::Name(name) = &rule.destination {
                    let denied = self.other_names.entry(name.name().clone()).or_default();
                    if rule.action == RuleAction::Deny {
                        denied.push(NamePattern::of(name, firewall, subdomains));
                    }
                }
            }
        }
        self.differing = differing(&enforced, &latest.rules);
        true
    }

    /// The problems of the rules that OVN does not enforce.
    fn problems_of_latest(&self, latest: &Firewall) -> BTreeMap<u32, Option<Problem>> {
        let mut problems = BTreeMap::new();
        for index in &self.differing {
            let rule = usize::try_from(*index).ok();
            let rule = rule.and_then(|index| latest.rules.get(index));
            let problem = rule.and_then(|rule| self.pairing.problem_of_other(rule));
            problems.insert(*index, problem);
        }
        // OVN is about to follow: what it has beyond the rules is not left behind.
        let end = u32::try_from(self.pairing.firewall().rules.len()).unwrap_or(u32::MAX);
        let stale = self.pairing.rules().problems.range(end..);
        let stale = stale.filter(|(_, problem)| **problem == Problem::StaleAcl);
        problems.extend(stale.map(|(index, _)| (*index, None)));
        problems
    }
}

/// Rules, OVN's rows, and what was learned from the switch.
#[derive(Debug)]
pub(crate) struct Policy {
    subdomains: bool,
    /// Whether all is a dry run.
    dry_run: bool,
    ovn: OvnView,
    firewalls: BTreeMap<FirewallId, Firewall>,
    /// By namespace, when the rules of its EgressFirewall came, if they were not there at the agent's start.
    came_at: BTreeMap<String, Timestamp>,
    /// Whether EgressFirewalls were read.
    firewalls_read: bool,
    /// Whether OVN's northbound database was read: its ACLs tell the namespaces of port groups.
    nb_read: bool,
    /// By namespace, the EgressFirewalls that OVN does not enforce yet. In a namespace without a pod here, nobody looks
    /// whether OVN does.
    unfollowed: BTreeMap<String, Unfollowed>,
    /// The namespaces with pods here.
    locals: BTreeMap<String, Local>,
    /// What is wrong with the rules of the others, for which only the resource is looked at.
    problems_elsewhere: BTreeMap<String, BTreeMap<u32, Problem>>,
    /// How many times the rules of a namespace with pods here were paired.
    pairings: u64,
    /// The namespace whose rules hold for each port group, by the group's name in the northbound
    /// database.
    namespace_by_group: HashMap<String, String>,
    /// The namespaces whose problems may have changed since the last report.
    changed_problems: BTreeSet<String>,
    /// The problems of each namespace's rules, as they were reported.
    reported: BTreeMap<String, BTreeMap<u32, Problem>>,
    /// The priorities of the logical flows that were last asked for.
    watched: Option<BTreeSet<u16>>,
    /// Whether the tables of the rules may have changed since they were last taken.
    tables_changed: bool,
    /// When to look again for actions to copy.
    copy_at: Option<Timestamp>,
    locator: Locator,
    marks_end: Option<MarksEnd>,
    cached_actions: CachedActions,
}

impl Policy {
    /// `marks`: whether packets are marked.
    pub(crate) fn new(subdomains: bool, dry_run: bool, marks: bool) -> Self {
        Self {
            subdomains,
            dry_run,
            ovn: OvnView::default(),
            firewalls: BTreeMap::new(),
            came_at: BTreeMap::new(),
            firewalls_read: false,
            nb_read: false,
            unfollowed: BTreeMap::new(),
            locals: BTreeMap::new(),
            problems_elsewhere: BTreeMap::new(),
            pairings: 0,
            namespace_by_group: HashMap::new(),
            changed_problems: BTreeSet::new(),
            reported: BTreeMap::new(),
            watched: None,
            tables_changed: false,
            copy_at: None,
            locator: Locator::default(),
            marks_end: marks.then(MarksEnd::default),
            cached_actions: CachedActions::new(),
        }
    }

    pub(crate) fn firewall_count(&self) -> usize {
        self.firewalls.len()
    }

    /// The EgressFirewalls that count, by namespace.
    pub(crate) fn firewalls(&self) -> impl Iterator<Item = (&str, &Firewall)> {
        let firewalls = self.firewalls.iter();
        let named = firewalls.filter(|(id, _)| id.name == FIREWALL_NAME);
        named.map(|(id, firewall)| (id.namespace.as_str(), firewall))
    }

    /// What is wrong with the EgressFirewall of a namespace, by rule index.
    pub(crate) fn problems(&self, namespace: &str) -> impl Iterator<Item = (u32, &Problem)> {
        let local = self.locals.get(namespace).into_iter();
        let problems = self.problems_elsewhere.get(namespace).into_iter().flatten();
        let problems = problems.map(|(index, problem)| (*index, problem));
        local.flat_map(Local::problems).chain(problems)
    }

    /// What is wrong with all EgressFirewalls.
    pub(crate) fn all_problems(&self) -> impl Iterator<Item = &Problem> {
        let problems = self.problems_elsewhere.values();
        let problems = problems.flat_map(BTreeMap::values);
        let locals = self.locals.values().flat_map(Local::problems);
        locals.map(|(_, problem)| problem).chain(problems)
    }

    /// Whether OVN enforces the EgressFirewall before the present one, as far as that is known.
    pub(crate) fn enforces_former(&self, namespace: &str) -> bool {
        let unfollowed = self.unfollowed.get(namespace);
        unfollowed.is_some_and(|one| one.enforces_former) && self.locals.contains_key(namespace)
    }

    /// Whether a name without a wildcard stands for its sub-domains as well, where the EgressFirewall
    /// does not say.
    pub(crate) fn subdomains(&self) -> bool {
        self.subdomains
    }

    // What changes it.

    pub(crate) fn apply_nb(&mut self, update: NbUpdate) -> Touched {
        self.nb_read |= update.reset;
        self.ovn.apply_nb(update)
    }

    pub(crate) fn apply_sb(&mut self, update: SbUpdate) -> Touched {
        self.ovn.apply_sb(update)
    }

    /// Takes what may have changed of the networks and addresses of the cluster itself since it was last taken.
    pub(crate) fn take_cluster_changes(
        &mut self,
    ) -> Option<ClusterChanges<impl Iterator<Item = (IpAddr, Owners)>>> {
        self.ovn.take_cluster_changes()
    }

    /// Whether a load balancer leads to the address.
    pub(crate) fn is_backend(&self, address: IpAddr) -> bool {
        self.ovn.is_backend(address)
    }

    /// Takes the user-defined networks that are primary networks of pods, if they may have changed
    /// since they were last taken.
    pub(crate) fn take_changed_primary_networks(&mut self) -> Option<BTreeSet<String>> {
        self.ovn.take_changed_primary_networks()
    }

    /// Takes in EgressFirewalls. Returns the namespaces whose EgressFirewall may have changed.
    pub(crate) fn apply_firewalls(
        &mut self,
        update: FirewallUpdate,
        now: Timestamp,
    ) -> BTreeSet<String> {
        let mut namespaces: BTreeSet<String> = BTreeSet::new();
        let is_start = !self.firewalls_read;
        self.firewalls_read |= update.reset;
        if update.reset {
            let kept: BTreeSet<&FirewallId> = update.firewalls.iter().map(|(id, _)| id).collect();
            self.firewalls.retain(|id, _| {
                let keep = kept.contains(id);
                if !keep {
                    self.unfollowed.remove(&id.namespace);
                    self.came_at.remove(&id.namespace);
                    namespaces.insert(id.namespace.clone());
                }
                keep
            });
        }
        for (id, firewall) in update.firewalls {
            namespaces.insert(id.namespace.clone());
            let Some(firewall) = firewall else {
                self.unfollowed.remove(&id.namespace);
                self.came_at.remove(&id.namespace);
                self.firewalls.remove(&id);
                continue;
            };
            let namespace = id.namespace.clone();
            match self.firewalls.insert(id.clone(), firewall.clone()) {
                Some(before) if before.is_like(&firewall) => {
                    // All copies share the rules.
                    let rules = before.rules;
                    self.firewalls.insert(id, Firewall { rules, ..firewall });
                }
                before => {
                    if !is_start {
                        self.came_at.insert(namespace.clone(), now);
                    }
                    self.expect_takeover(namespace, before, now);
                }
            }
        }
        namespaces
    }

    /// Notes a changed EgressFirewall, which OVN may not enforce yet.
    fn expect_takeover(&mut self, namespace: String, before: Option<Firewall>, now: Timestamp) {
        // Without a pod here, nobody has to know whether OVN enforces the first one.
        if before.is_none() && !self.locals.contains_key(&namespace) {
            return;
        }
        let known = self.unfollowed.remove(&namespace);
        let mut former = known.map(|known| known.former).unwrap_or_default();
        former.extend(before);
        if former.len() > FORMER_FIREWALLS_MAX {
            // OVN may enforce the first one. The first one is therefore forgotten last.
            former.remove(1);
        }
        let unfollowed = Unfollowed {
            since: now,
            late: false,
            former,
            enforces_former: false,
        };
        self.unfollowed.insert(namespace, unfollowed);
    }

    /// Finds the EgressFirewall of a namespace that OVN enforces, the latest first. Returns it if
    /// it is not the latest. If none is found, OVN's rows are judged by the latest.
    fn follow(
        &mut self,
        namespace: &str,
        latest: &Firewall,
        pairing: &mut Pairing,
    ) -> Option<Firewall> {
        let unfollowed = self.unfollowed.get_mut(namespace)?;
        if pairing.is_enforced(latest) {
            self.unfollowed.remove(namespace);
            return None;
        }
        let former = &mut unfollowed.former;
        let enforced = former.iter().rposition(|one| pairing.is_enforced(one));
        unfollowed.enforces_former = enforced.is_some();
        former.drain(..enforced?);
        former.front().cloned()
    }

    /// How many former EgressFirewalls of a namespace are remembered.
    #[cfg(test)]
    pub(crate) fn former_count(&self, namespace: &str) -> usize {
        let unfollowed = self.unfollowed.get(namespace);
        unfollowed.map_or(0, |one| one.former.len())
    }

    /// The EgressFirewall of a namespace that OVN enforces, as far as that is known.
    pub(crate) fn enforced(&self, namespace: &str) -> Option<&Firewall> {
        let former = self.unfollowed.get(namespace);
        let former = former.filter(|_| self.enforces_former(namespace));
        let former = former.and_then(|one| one.former.front());
        former.or_else(|| self.present(namespace))
    }

    /// The EgressFirewall of a namespace, whether or not OVN enforces it.
    pub(crate) fn present(&self, namespace: &str) -> Option<&Firewall> {
        self.firewalls.get(&FirewallId {
            namespace: namespace.to_owned(),
            name: FIREWALL_NAME.to_owned(),
        })
    }

    /// When the rules of a namespace's EgressFirewall came.
    pub(crate) fn came_at(&self, namespace: &str) -> Option<Timestamp> {
        self.came_at.get(namespace).copied()
    }

    /// Whether the flows of a namespace's rules are planned, and not installed: by the option, or by the
    /// annotation of the EgressFirewall.
    pub(crate) fn is_dry_run(&self, namespace: &str) -> bool {
        let present = self.present(namespace);
        self.dry_run || present.is_some_and(|firewall| firewall.dry_run)
    }

    /// When the next EgressFirewall becomes late.
    fn late_at(&self) -> Option<Timestamp> {
        let waiting = self.unfollowed.values().filter(|one| !one.late);
        waiting.map(|one| one.since + TAKEOVER_MAX).min()
    }

    /// Looks at the EgressFirewalls that have become late. Only the reports on them change.
    fn look_at_late(&mut self, now: Timestamp) {
        if self.late_at().is_none_or(|at| at > now) {
            return;
        }
        let is_late = |one: &Unfollowed| !one.late && one.since + TAKEOVER_MAX <= now;
        let late = self.unfollowed.iter_mut().filter(|(_, one)| is_late(one));
        let late = late.map(|(namespace, one)| {
            one.late = true;
            namespace.clone()
        });
        for namespace in late.collect::<Vec<_>>() {
            self.pair_namespace(&namespace, &BTreeSet::new(), now);
        }
    }

    /// Whether rules of the namespace are looked at: there is a pod of it here.
    pub(crate) fn is_local(&self, namespace: &str) -> bool {
        self.locals.contains_key(namespace)
    }

    /// Pairs the rules of these namespaces with OVN again, of whose ACLs these have changed; returns how the rules of
    /// port groups changed.
    pub(crate) fn pair_namespaces(
        &mut self,
        namespaces: &BTreeMap<String, BTreeSet<RowId>>,
        now: Timestamp,
    ) -> BTreeMap<String, ChangedRules> {
        let mut groups: BTreeMap<String, ChangedRules> = BTreeMap::new();
        for (namespace, rows) in namespaces {
            for (group, changed) in self.pair_namespace(namespace, rows, now) {
                match groups.entry(group) {
                    Entry::Vacant(new) => {
                        new.insert(changed);
                    }
                    Entry::Occupied(mut known) => known.get_mut().add(changed),
                }
            }
        }
        self.tables_changed |= !groups.is_empty();
        if namespaces.keys().any(|namespace| self.is_local(namespace)) {
            self.copy_soon(now);
        }
        groups
    }

    /// Pairs the namespace's rules with OVN again; returns how the rules of port groups changed.
    fn pair_namespace(
        &mut self,
        namespace: &str,
        rows: &BTreeSet<RowId>,
        now: Timestamp,
    ) -> BTreeMap<String, ChangedRules> {
        let firewall = self.present(namespace).cloned();
        let known = self.locals.remove_entry(namespace);
        let is_here = self.ovn.is_here(namespace);
        match firewall.filter(|_| is_here) {
            Some(firewall) => {
                if known.is_none() {
                    // It may be one that OVN does not enforce.
                    self.unfollowed
                        .entry(namespace.to_owned())
                        .or_insert_with(|| Unfollowed {
                            since: now,
                            late: false,
                            former: VecDeque::new(),
                            enforces_former: false,
                        });
                }
                self.pair_local(namespace, known, &firewall, rows)
            }
            // No row matters where there is no pod.
            None if known.is_none() && !rows.is_empty() => BTreeMap::new(),
            None => self.pair_elsewhere(namespace, known.map(|(_, local)| local)),
        }
    }

    /// The rules of a namespace with pods here follow these ACLs, and the EgressFirewall that OVN enforces.
    fn pair_local(
        &mut self,
        namespace: &str,
        known: Option<(String, Local)>,
        firewall: &Firewall,
        rows: &BTreeSet<RowId>,
    ) -> BTreeMap<String, ChangedRules> {
        let is_new = known.is_none();
        let (key, mut local) =
            known.unwrap_or_else(|| (namespace.to_owned(), Local::new(namespace, self.subdomains)));
        let pairing = &mut local.pairing;
        if is_new {
            self.problems_elsewhere.remove(namespace);
            for id in self.ovn.acls_of(namespace) {
                pairing.set_row(id, self.ovn.acl_in(namespace, id).as_ref());
            }
        } else {
            for id in rows {
                pairing.set_row(*id, self.ovn.acl_in(namespace, *id).as_ref());
            }
        }
        let older = self.follow(namespace, firewall, pairing);
        let none = VecDeque::new();
        let unfollowed = self.unfollowed.get(namespace);
        let former = unfollowed.map_or(&none, |one| &one.former);
        let is_wanted = |rules: &Arc<[Rule]>| {
            let mut all = [firewall].into_iter().chain(former);
            all.any(|one| Arc::ptr_eq(&one.rules, rules))
        };
        pairing.keep_judgements(is_wanted);
        pairing.set_firewall(older.as_ref().unwrap_or(firewall));
        let before: BTreeSet<String> = pairing.rules().sets.keys().cloned().collect();
        let mut changes = pairing.settle(&self.cached_actions);
        changes.is_other_run = pairing.set_dry_run(self.dry_run || firewall.dry_run);
        self.pairings += 1;
        local.version = self.pairings;
        if local.compare(firewall, former, self.subdomains) {
            local.names_version = self.pairings;
        }
        let mut problems = match older {
            Some(_) => local.problems_of_latest(firewall),
            None => BTreeMap::new(),
        };
        std::mem::swap(&mut local.other_problems, &mut problems);
        if let Some((index, problem)) = self.if_late(namespace, firewall, older.is_some(), &local) {
            local.other_problems.insert(index, Some(problem));
        }
        if is_new || changes.problems || problems != local.other_problems {
            self.changed_problems.insert(namespace.to_owned());
        }
        let groups = self.changed_groups(namespace, &before, &local, &mut changes);
        self.locals.insert(key, local);
        groups
    }

    /// How the rules of the namespace's port groups have changed.
    fn changed_groups(
        &mut self,
        namespace: &str,
        before: &BTreeSet<String>,
        local: &Local,
        changes: &mut PairingChanges,
    ) -> BTreeMap<String, ChangedRules> {
        let after = &local.pairing.rules().sets;
        let mut groups = BTreeMap::new();
        for group in before.iter().chain(after.keys()) {
            let holder = match after.contains_key(group) {
                true => self
                    .namespace_by_group
                    .insert(group.clone(), namespace.to_owned()),
                false => self.namespace_by_group.remove(group),
            };
            if groups.contains_key(group) {
                continue;
            }
            let was_holder = before.contains(group).then_some(namespace);
            // If not, the rules of another namespace have held for the group until now, or none.
            if holder.as_deref() != was_holder || changes.is_other_run {
                groups.insert(group.clone(), ChangedRules::All);
            } else if let Some(names) = changes.names.remove(group) {
                groups.insert(group.clone(), ChangedRules::Of(names));
            }
        }
        groups
    }

    /// Of a namespace without pods here, only the resource is looked at: OVN makes nothing of the rules here, so
    /// nothing is waited for.
    fn pair_elsewhere(
        &mut self,
        namespace: &str,
        known: Option<Local>,
    ) -> BTreeMap<String, ChangedRules> {
        // If a pod comes, OVN's rows tell whether the latest EgressFirewall is enforced.
        if let Some(unfollowed) = self.unfollowed.get(namespace)
            && !unfollowed.enforces_former
            && (unfollowed.late || unfollowed.former.is_empty())
        {
            self.unfollowed.remove(namespace);
        }
        let problems = self.present(namespace).map(problems_of_resource);
        let problems = problems.unwrap_or_default();
        let mut groups = BTreeMap::new();
        if let Some(local) = known {
            self.changed_problems.insert(namespace.to_owned());
            for group in local.pairing.rules().sets.keys() {
                self.namespace_by_group.remove(group);
                groups.insert(group.clone(), ChangedRules::All);
            }
        }
        let before = match problems.is_empty() {
            true => self.problems_elsewhere.remove(namespace),
            false => self
                .problems_elsewhere
                .insert(namespace.to_owned(), problems.clone()),
        };
        if before.unwrap_or_default() != problems {
            self.changed_problems.insert(namespace.to_owned());
        }
        groups
    }

    /// The problem that ovn-kubernetes has not taken over an EgressFirewall in time, at the rule that is the likely
    /// cause.
    fn if_late(
        &self,
        namespace: &str,
        firewall: &Firewall,
        has_older: bool,
        local: &Local,
    ) -> Option<(u32, Problem)> {
        let is_late = self.unfollowed.get(namespace).is_some_and(|one| one.late);
        if !is_late {
            return None;
        }
        let waits = local
            .problems()
            .filter(|(_, problem)| matches!(problem, Problem::NoAcl(_)));
        let first = waits.map(|(index, _)| index).min();
        if !has_older && first.is_none() {
            return None;
        }
        let wildcards = local
            .problems()
            .filter_map(|(index, problem)| match problem {
                Problem::NoAcl(name) if name.is_wildcard() => Some((index, name)),
                _ => None,
            });
        let wildcard = wildcards.min_by_key(|(index, _)| *index);
        let index = wildcard.map(|(index, _)| index).or(first);
        let problem = Problem::NotTakenOver(NotTakenOver {
            has_older,
            refusal: firewall.refusal.clone(),
            wildcard: wildcard.map(|(_, name)| name.clone()),
        });
        Some((index.unwrap_or_default(), problem))
    }

    /// Reports the problems of EgressFirewalls that have changed.
    pub(crate) fn tell_problems(&mut self, out: &mut Output) {
        for namespace in std::mem::take(&mut self.changed_problems) {
            let problems = self.problems(&namespace);
            let problems: BTreeMap<u32, Problem> = problems
                .map(|(index, problem)| (index, problem.clone()))
                .collect();
            let reported = self.reported.get(&namespace);
            if reported == Some(&problems) || (reported.is_none() && problems.is_empty()) {
                continue;
            }
            let reported = reported.into_iter().flat_map(BTreeMap::values);
            let reported: HashSet<&Problem> = reported.collect();
            let news = problems.iter();
            let news = news.filter(|(_, problem)| !reported.contains(problem));
            out.report(Report::Problems {
                namespace: namespace.clone(),
                news: news.map(|(index, _)| *index).collect(),
                problems: problems
                    .iter()
                    .map(|(index, problem)| (*index, (problem.to_string(), problem.severity())))
                    .collect(),
            });
            if problems.is_empty() {
                self.reported.remove(&namespace);
            } else {
                self.reported.insert(namespace, problems);
            }
        }
    }

    // What is known of a port.

    /// The rules that hold for the port of an interface.
    pub(crate) fn sets(&self, row: &Interface) -> Vec<&RuleSet> {
        self.groups(row)
            .filter_map(|group| {
                let local = self.locals.get(self.namespace_by_group.get(group)?)?;
                local.pairing.rules().sets.get(group)
            })
            .collect()
    }

    /// All rules that hold for port groups.
    fn all_sets(&self) -> impl Iterator<Item = &RuleSet> {
        let locals = self.locals.values();
        locals.flat_map(|local| local.pairing.rules().sets.values())
    }

    /// The port groups that the port of an interface is in.
    fn groups(&self, row: &Interface) -> impl Iterator<Item = &str> {
        self.ovn.groups_of(&row.iface_id)
    }

    /// The namespace whose rules hold for the port of an interface.
    pub(crate) fn namespace_of(&self, row: &Interface) -> Option<&str> {
        self.groups(row)
            .find_map(|group| self.namespace_by_group.get(group))
            .map(String::as_str)
    }

    /// The cookies of the flows with which OVN denies packets of a namespace's pods, by CIDR and
    /// the like. `None` if OVN denies in another way, or with more flows than are worth counting.
    /// The cookies of `before` are kept with which OVN may still deny.
    pub(crate) fn denying(&self, namespace: &str, before: &BTreeSet<u32>) -> Option<BTreeSet<u32>> {
        let local = self.locals.get(namespace)?;
        let rules = local.pairing.rules();
        let ours = rules.sets.values().any(RuleSet::any_denies);
        if ours || local.pairing.denies_by_name() {
            return None;
        }
        // The flow monitor watches only the tables of rules by name.
        let places: BTreeSet<(Pipeline, u8)> =
            rules.sets.values().flat_map(RuleSet::places).collect();
        // ovn-northd may not have followed the change of an ACL yet.
        let before_acls = before
            .iter()
            .flat_map(|cookie| self.ovn.flows_of_cookie(*cookie))
            .filter_map(|flow| flow.stage_hint)
            .flat_map(|hint| self.ovn.acls_of_hint(hint))
            .map(|(id, _)| id);
        let denying = local.pairing.denying();
        let acls: BTreeSet<RowId> = denying.iter().copied().chain(before_acls).collect();
        let mut cookies = BTreeSet::new();
        for id in acls {
            let Some(acl) = self.ovn.acl_in(namespace, id) else {
                continue;
            };
            for (row, flow) in acl.flows {
                let cookie = row.prefix();
                if !denying.contains(&id) && !before.contains(&cookie) {
                    continue;
                }
                if !places.contains(&(flow.pipeline, flow.table_id)) {
                    return None;
                }
                cookies.insert(cookie);
            }
        }
        let understood = !cookies.is_empty() || !local.pairing.denies();
        (understood && cookies.len() <= COUNTED_PER_NAMESPACE_MAX).then_some(cookies)
    }

    /// Whether a rule before `index` of the EgressFirewall denies these packets by their address.
    /// Rules by name or by node are not looked at.
    pub(crate) fn is_denied_before(
        &self,
        namespace: &str,
        index: u32,
        connection: &BlockedConnection,
    ) -> bool {
        let rules = self.enforced(namespace).map(|firewall| &firewall.rules[..]);
        let before = usize::try_from(index).unwrap_or(usize::MAX);
        let decides = |rule: &&Rule| {
            let is_there = matches!(&rule.destination, Destination::Cidr(network) if network.contains(&connection.dst));
            is_there && (rule.ports.is_empty() || connection.is_for(rule.ports.iter().copied()))
        };
        let mut rules = rules.unwrap_or_default().iter().take(before);
        rules
            .find(decides)
            .is_some_and(|rule| rule.action == RuleAction::Deny)
    }

    /// The namespace of the pod that an interface belongs to.
    fn namespace_of_pod(&self, row: &Interface) -> Option<&str> {
        self.ovn.namespace_of(&row.iface_id)
    }

    /// The names that an EgressFirewall of the namespace mentions which OVN enforces or may
    /// enforce, without wildcards, and their version; `None` if the version is `known`.
    pub(crate) fn names_in(
        &self,
        namespace: &str,
        known: Option<u64>,
    ) -> Option<(u64, BTreeSet<DomainName>)> {
        let Some(local) = self.locals.get(namespace) else {
            return Some((0, BTreeSet::new()));
        };
        let version = local.names_version;
        (known != Some(version)).then(|| {
            let names = local.pairing.mentioned().chain(local.other_names.keys());
            (version, names.cloned().collect())
        })
    }

    /// Whether a rule for an interface's pod mentions this name or a name above it. The rules count
    /// as they are written, whether or not OVN enforces them yet.
    pub(crate) fn mention(&self, row: &Interface, name: &DomainName) -> Mention {
        if !self.knows_names_for(row) {
            return Mention::Unknown;
        }
        let namespace = self.filtered_as(row);
        let local = namespace.and_then(|namespace| self.locals.get(namespace));
        match local.is_some_and(|local| local.mentions(name)) {
            true => Mention::Some,
            false => Mention::None,
        }
    }

    /// Whether a rule for an interface's pod denies this name that OVN does not enforce yet. When OVN does, answers that
    /// came before are gone.
    pub(crate) fn is_to_be_denied(&self, row: &Interface, name: &DomainName) -> bool {
        let namespace = self.filtered_as(row);
        let local = namespace.and_then(|namespace| self.locals.get(namespace));
        local.is_some_and(|local| local.is_to_deny(name))
    }

    /// The names that the same rules for an interface's pod match as this one: those that OVN enforces, and those that it
    /// may enforce later. `None` if no rule mentions the name.
    pub(crate) fn alike(&self, row: &Interface, name: &DomainName) -> Option<AlikeNames> {
        let sets = self.sets(row);
        let namespace = self.filtered_as(row);
        let local = namespace.and_then(|namespace| self.locals.get(namespace));
        AlikeNames::of(name, |suffix| {
            sets.iter().any(|set| set.has_rules(suffix))
                || local.is_some_and(|local| local.knows(suffix))
        })
    }

    /// Another number when the rules for an interface's pod may be others: those that hold, those that are mentioned, or
    /// whether they are known.
    pub(crate) fn rules_version(&self, row: &Interface) -> u64 {
        let version_of = |namespace: &str| self.locals.get(namespace).map(|local| local.version);
        let mut hasher = DefaultHasher::new();
        self.knows_names_for(row).hash(&mut hasher);
        self.filtered_as(row).and_then(version_of).hash(&mut hasher);
        for group in self.groups(row) {
            let namespace = self.namespace_by_group.get(group);
            let version = namespace.and_then(|namespace| version_of(namespace));
            (group, version).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Whether the rules for an interface's pod are known.
    pub(crate) fn knows_names_for(&self, row: &Interface) -> bool {
        let may_have_namespace = || self.nb_read || self.namespace_of_pod(row).is_some();
        self.firewalls_read && self.ovn.is_bound(&row.iface_id) && may_have_namespace()
    }

    /// The namespace whose names matter at an interface.
    pub(crate) fn filtered_as(&self, row: &Interface) -> Option<&str> {
        let by_binding = self.namespace_of_pod(row);
        by_binding.or_else(|| self.namespace_of(row))
    }

    /// Of what has changed in port groups, what concerns the port of an interface.
    pub(crate) fn changed_for<'a>(
        &'a self,
        row: &'a Interface,
        groups: &'a BTreeMap<String, ChangedRules>,
    ) -> Vec<&'a ChangedRules> {
        self.groups(row)
            .filter_map(|group| groups.get(group))
            .collect()
    }

    /// The tunnel keys of the port of an interface.
    pub(crate) fn tunnel_keys(&self, row: &Interface) -> Option<TunnelKeys> {
        self.ovn.tunnel_keys(&row.iface_id)
    }

    /// The facts that plans for the port of an interface are made from. `None` while they are not
    /// known.
    pub(crate) fn facts<'a>(
        &'a self,
        port: PortId,
        row: &'a Interface,
        sets: &'a [&'a RuleSet],
    ) -> Option<PortFacts<'a>> {
        Some(PortFacts {
            port,
            keys: self.tunnel_keys(row)?,
            addresses: &row.addresses,
            sets,
            base: self.locator.base()?,
            cached_actions: &self.cached_actions,
            marks_end: self.marks_end()?,
            mark_mask: None,
        })
    }

    /// The same for flows that are installed: `None` in a dry run as well, which installs none.
    pub(crate) fn facts_to_install<'a>(
        &'a self,
        port: PortId,
        row: &'a Interface,
        sets: &'a [&'a RuleSet],
    ) -> Option<PortFacts<'a>> {
        self.facts(port, row, sets).filter(|_| !is_dry_run(sets))
    }

    // Where OVN's pipeline is in the switch.

    /// Whether a plan can be trusted to be complete.
    pub(crate) fn can_plan(&self) -> bool {
        self.stage().is_none() || self.locator.base().is_some() && self.marks_end().is_some()
    }

    /// The OpenFlow table in which marks end, if they end in one; `None` if that is not known yet.
    pub(crate) fn marks_end(&self) -> Option<Option<u8>> {
        match &self.marks_end {
            Some(end) => match end.locator.base() {
                None if end.is_nowhere => Some(None),
                table => table.map(Some),
            },
            None => Some(None),
        }
    }

    /// Has the tables of the rules sent to the switch again.
    pub(crate) fn tables_are_unknown(&mut self) {
        self.tables_changed = true;
    }

    /// Takes the OpenFlow tables of the rules, if they may have changed since they were last taken.
    pub(crate) fn take_changed_tables(&mut self) -> Option<BTreeSet<u8>> {
        std::mem::take(&mut self.tables_changed).then(|| self.tables())
    }

    fn tables(&self) -> BTreeSet<u8> {
        let Some(base) = self.locator.base() else {
            return BTreeSet::new();
        };
        self.all_sets()
            .flat_map(RuleSet::places)
            .map(|(_, table_id)| base.saturating_add(table_id))
            .chain(self.marks_end().flatten())
            .collect()
    }

    /// Asks for the logical flows of every ACL. Those of rules without a name are asked for, too:
    /// their actions may be copied.
    pub(crate) fn watch_logical_flows(&mut self, out: &mut Output) {
        let changed = self.ovn.take_changed_priorities();
        // Without any ACL, too, it is asked once.
        let first = self.watched.is_none().then(BTreeSet::new);
        let offset = |priority: u16| priority.saturating_add(ACL_PRIORITY_OFFSET);
        let changed = changed.map(|priorities| priorities.map(offset).collect());
        let Some(priorities): Option<BTreeSet<u16>> = changed.or(first) else {
            return;
        };
        if self.watched.as_ref() != Some(&priorities) {
            self.watched = Some(priorities.clone());
            out.command(Command::WatchLogicalFlows { priorities });
        }
    }

    /// Whether these are the logical flows that were last asked for.
    pub(crate) fn watches(&self, priorities: &BTreeSet<u16>) -> bool {
        self.watched.as_ref() == Some(priorities)
    }

    /// A stage in which rules are enforced. The pipeline's first table is found by this stage.
    fn stage(&self) -> Option<Stage> {
        let mut flows = self.ovn.logical_flows().map(|(_, flow)| flow);
        flows
            .find(|flow| flow.stage_hint.is_some() && flow.pipeline == Pipeline::Egress)
            .map(|flow| Stage::Table(flow.pipeline, flow.table_id))
    }

    /// Looks for the pipeline's first table and for the one in which marks end, unless they are known or are being
    /// looked for.
    pub(crate) fn locate(&mut self, out: &mut Output) {
        let Some(stage) = self.stage() else {
            return;
        };
        ask(self.locator.locate(stage), out);
        if let Some(end) = self.marks_end.as_mut().filter(|end| !end.is_nowhere) {
            ask(end.locator.locate(Stage::OutPortSecurity), out);
        }
    }

    /// The switch has new flows: the pipeline's first table may have changed, and more actions may
    /// be found to copy.
    pub(crate) fn verify(&mut self, out: &mut Output) {
        let now = out.now();
        ask(self.locator.verify(), out);
        if let Some(end) = &mut self.marks_end {
            let question = match end.is_nowhere {
                true => end.locator.locate(Stage::OutPortSecurity),
                false => end.locator.verify(),
            };
            ask(question, out);
        }
        self.copy_soon(now);
    }

    /// Open questions will get no answer.
    pub(crate) fn interrupted(&mut self) {
        self.locator.interrupted();
        if let Some(end) = &mut self.marks_end {
            end.locator.interrupted();
        }
    }

    fn copy_soon(&mut self, now: Timestamp) {
        self.copy_at.get_or_insert(now);
    }

    /// When [`Policy::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        deadline::first([
            deadline::at(self.locator.deadline(), Why::Pipeline),
            deadline::at(
                self.marks_end
                    .as_ref()
                    .and_then(|end| end.locator.deadline()),
                Why::Pipeline,
            ),
            deadline::at(self.copy_at, Why::Copy),
            deadline::at(self.late_at(), Why::Takeover),
        ])
    }

    /// Asks the switch again what is due, if there is a connection.
    pub(crate) fn timeout(&mut self, switch_is_up: bool, out: &mut Output) {
        let now = out.now();
        if self.copy_at.take_if(|at| *at <= now).is_some() && switch_is_up {
            self.look_for_actions(out);
        }
        let stage = self.stage();
        let question = stage.and_then(|stage| self.locator.retry(stage, now));
        ask(question, out);
        if let Some(end) = &mut self.marks_end {
            ask(end.locator.retry(Stage::OutPortSecurity, now), out);
        }
        self.look_at_late(now);
    }

    /// Takes in some logical flows of a stage. Returns whether plans may have changed.
    pub(crate) fn sampled(
        &mut self,
        stage: Stage,
        mut flows: Vec<RowId>,
        out: &mut Output,
    ) -> bool {
        let now = out.now();
        let Stage::Table(_, table_id) = stage else {
            return self.end_sampled(stage, &flows, out);
        };
        // The logical flows of rules come first. They are installed, since the namespace has a pod
        // here. The exceptions are those whose address set is empty.
        let mut ours: Vec<(bool, RowId)> = self
            .ovn
            .logical_flows()
            .filter(|(_, flow)| flow.table_id == table_id)
            .map(|(id, flow)| (flow.matches.contains('$'), id))
            .collect();
        ours.sort_unstable();
        let ours = ours.into_iter().map(|(_, id)| id);
        let mut sample: Vec<RowId> = ours.take(LOGICAL_FLOW_SAMPLE_MAX).collect();
        sample.append(&mut flows);
        ask(self.locator.sampled(stage, &sample, now), out);
        false
    }

    /// Takes in some logical flows of the stage in which marks end. Where OVN has no such stage, they end nowhere.
    fn end_sampled(&mut self, stage: Stage, flows: &[RowId], out: &mut Output) -> bool {
        let now = out.now();
        let Some(end) = &mut self.marks_end else {
            return false;
        };
        let has_stage = !flows.is_empty();
        if has_stage {
            ask(end.locator.sampled(stage, flows, now), out);
        } else {
            end.locator.interrupted();
        }
        let was_nowhere = std::mem::replace(&mut end.is_nowhere, !has_stage);
        let is_news = end.is_nowhere && !was_nowhere;
        if is_news {
            out.report(Report::MarksEndNowhere);
        }
        is_news
    }

    /// Takes in flows that were looked up by cookie. They show the pipeline's first table, and
    /// actions to copy. Returns whether plans may have changed.
    pub(crate) fn learn(&mut self, found: &[FoundFlow], now: Timestamp) -> bool {
        let tables = found.iter().map(|flow| (flow.cookie, flow.table));
        let mut moved = self.locator.found(tables.clone(), now);
        if let Some(end) = &mut self.marks_end {
            moved |= end.locator.found(tables, now);
        }
        let mut learned: BTreeMap<ActionText, &Vec<u8>> = BTreeMap::new();
        for made in found {
            for flow in self.ovn.flows_of_cookie(made.cookie) {
                let source = ActionText::of(flow);
                if self.is_source(&source)
                    && self.cached_actions.get(&source) != Some(&made.actions)
                {
                    learned.insert(source, &made.actions);
                }
            }
        }
        let learned: Vec<_> = learned
            .into_iter()
            .map(|(source, actions)| (source, actions.clone()))
            .collect();
        let has_learned = !learned.is_empty();
        self.cached_actions.extend(learned);
        if has_learned {
            // Actions that can be copied are no problem any more.
            let namespaces: Vec<String> = self.locals.keys().cloned().collect();
            for namespace in namespaces {
                if let Some(local) = self.locals.get_mut(&namespace) {
                    local.pairing.actions_changed();
                }
                self.pair_namespace(&namespace, &BTreeSet::new(), now);
            }
        }
        self.tables_changed |= has_learned || moved;
        has_learned || moved
    }

    /// The actions that rules would copy.
    fn sources(&self) -> BTreeSet<ActionText> {
        self.all_sets()
            .flat_map(RuleSet::sources)
            .cloned()
            .collect()
    }

    fn is_source(&self, source: &ActionText) -> bool {
        self.all_sets().any(|set| set.has_source(source))
    }

    /// Looks for OVN's own flows whose actions rules would copy. Known ones are looked up again,
    /// because a restarted ovn-controller numbers its meters anew.
    fn look_for_actions(&mut self, out: &mut Output) {
        let now = out.now();
        let wanted = self.sources();
        self.cached_actions
            .retain(|source, _| wanted.contains(source));
        if wanted.is_empty() {
            return;
        }
        let cookies: Vec<u32> = self
            .ovn
            .logical_flows()
            .filter(|(_, flow)| wanted.contains(&ActionText::of(flow)))
            .map(|(id, _)| id.prefix())
            .take(ACTION_TEXTS_MAX)
            .collect();
        if !cookies.is_empty() {
            out.command(Command::Ask(FlowQuestion::Find(cookies)));
        }
        if !wanted
            .iter()
            .all(|source| self.cached_actions.contains_key(source))
        {
            self.copy_at = Some(now + COPY_INTERVAL);
        }
    }
}

/// Where the marks of packets end: a mark is read by the flows of rules, and has no meaning behind them.
#[derive(Debug, Default)]
struct MarksEnd {
    locator: Locator,
    /// Whether OVN has no stage that is known to be behind all rules.
    is_nowhere: bool,
}

fn ask(question: Option<Question>, out: &mut Output) {
    match question {
        Some(Question::Sample(stage)) => out.command(Command::SampleLogicalFlows(stage)),
        Some(Question::Cookies(cookies)) => out.command(Command::Ask(FlowQuestion::Find(cookies))),
        None => {}
    }
}
