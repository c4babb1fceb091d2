//! The rules of the node, and where OVN enforces them. Plans are made from this and from the answers to the pods.

pub mod pipeline;
pub mod plan;
pub mod refused;
pub mod rules;

mod firewalls;
mod local;
mod logical_flows;
mod problems;
mod tables;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use crate::{
    Timestamp,
    io::output::Output,
    ovn::{
        rows::{Interface, NbUpdate, Pipeline, RowId, SbUpdate},
        template::CachedActions,
        view::{ClusterChanges, OvnView, Owners, Touched, TunnelKeys},
    },
    policy::{
        firewalls::Firewalls,
        local::Local,
        plan::PortFacts,
        problems::{Changed, Problems},
        rules::{AlikeNames, ChangedRules, Problem, RuleSet, is_dry_run, pairing::PairingChanges},
        tables::Tables,
    },
    values::{
        firewall::{Destination, Firewall, FirewallUpdate, Rule},
        ids::PortId,
        limits::COUNTED_PER_NAMESPACE_MAX,
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

/// Rules, OVN's rows, and facts from the switch.
#[derive(Debug)]
pub(crate) struct Policy {
    subdomains: bool,
    /// Whether all is a dry run.
    dry_run: bool,
    ovn: OvnView,
    firewalls: Firewalls,
    /// Whether OVN's northbound database was read: its ACLs tell the namespaces of port groups.
    nb_read: bool,
    /// The namespaces with pods here.
    locals: BTreeMap<String, Local>,
    problems: Problems,
    /// How many times the rules of a namespace with pods here were paired.
    pairings: u64,
    /// The namespace whose rules hold for each port group, by the group's name in the northbound
    /// database.
    namespace_by_group: HashMap<String, String>,
    /// The port groups that the rules of another namespace hold for than when last asked.
    moved_groups: BTreeSet<String>,
    /// The priorities of the logical flows that were last asked for.
    watched: Option<BTreeSet<u16>>,
    /// Whether the tables of the rules may have changed since they were last taken.
    tables_changed: bool,
    /// When to look again for actions to copy.
    copy_at: Option<Timestamp>,
    tables: Tables,
    cached_actions: CachedActions,
    /// How many rules were looked at for those by network.
    #[cfg(test)]
    pub(crate) looked_at: std::cell::Cell<usize>,
}

impl Policy {
    /// `marks`: whether packets are marked.
    pub(crate) fn new(subdomains: bool, dry_run: bool) -> Self {
        Self {
            subdomains,
            dry_run,
            ovn: OvnView::default(),
            firewalls: Firewalls::default(),
            nb_read: false,
            locals: BTreeMap::new(),
            problems: Problems::default(),
            pairings: 0,
            namespace_by_group: HashMap::new(),
            moved_groups: BTreeSet::new(),
            watched: None,
            tables_changed: false,
            copy_at: None,
            tables: Tables::default(),
            cached_actions: CachedActions::new(),
            #[cfg(test)]
            looked_at: std::cell::Cell::default(),
        }
    }

    pub(crate) fn firewall_count(&self) -> usize {
        self.firewalls.len()
    }

    /// The EgressFirewalls that count, by namespace.
    pub(crate) fn firewalls(&self) -> impl Iterator<Item = (&str, &Firewall)> {
        self.firewalls.iter()
    }

    /// The problems of a namespace's EgressFirewall, by rule index.
    pub(crate) fn problems(&self, namespace: &str) -> impl Iterator<Item = (u32, &Problem)> {
        let local = self.locals.get(namespace).into_iter();
        let elsewhere = self.problems.elsewhere(namespace);
        local.flat_map(Local::problems).chain(elsewhere)
    }

    /// The problem of a namespace's rule at an index.
    pub(crate) fn problem_at(&self, namespace: &str, index: u32) -> Option<&Problem> {
        match self.locals.get(namespace) {
            Some(local) => local.problem_at(index),
            None => self
                .problems
                .elsewhere_at(namespace, index)
                .map(Arc::as_ref),
        }
    }

    /// The same, to keep it.
    fn kept_problem_at(&self, namespace: &str, index: u32) -> Option<Arc<Problem>> {
        match self.locals.get(namespace) {
            Some(local) => local.problem_at(index).cloned().map(Arc::new),
            None => self.problems.elsewhere_at(namespace, index).cloned(),
        }
    }

    /// The problems of all EgressFirewalls.
    pub(crate) fn all_problems(&self) -> impl Iterator<Item = &Problem> {
        let locals = self.locals.values().flat_map(Local::problems);
        let elsewhere = self.problems.all_elsewhere();
        locals.map(|(_, problem)| problem).chain(elsewhere)
    }

    /// Whether OVN enforces the EgressFirewall before the present one, as far as that is known.
    pub(crate) fn enforces_former(&self, namespace: &str) -> bool {
        self.firewalls.enforced_former(namespace).is_some() && self.is_local(namespace)
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

    /// Takes possible changes of the cluster's own networks and addresses ([`OvnView::take_cluster_changes`]).
    pub(crate) fn take_cluster_changes(
        &mut self,
        most: usize,
    ) -> Option<ClusterChanges<impl Iterator<Item = (IpAddr, Owners)>>> {
        self.ovn.take_cluster_changes(most)
    }

    /// How many addresses wait to be taken, of the kind of which more wait.
    pub(crate) fn waiting_addresses(&self) -> usize {
        self.ovn.waiting_addresses()
    }

    /// The owners of an address that waits to be taken.
    pub(crate) fn changed_owners(&self, address: IpAddr) -> Option<Owners> {
        self.ovn.changed_owners(address)
    }

    /// The addresses to which the load balancers at an address lead.
    pub(crate) fn backends_behind(&self, address: IpAddr) -> impl Iterator<Item = IpAddr> {
        self.ovn.backends_behind(address)
    }

    /// The Services, by namespace and name, that have an address; some more than once.
    pub(crate) fn services_at(&self, address: IpAddr) -> impl Iterator<Item = &str> {
        self.ovn.services_at(address)
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
        let is_local = |namespace: &str| self.locals.contains_key(namespace);
        self.firewalls.apply(update, is_local, now)
    }

    /// How many rules were looked at for problems by the resource, and for reports.
    #[cfg(test)]
    pub(crate) fn problem_work(&self) -> usize {
        self.problems.work
    }

    /// How many former EgressFirewalls of a namespace are remembered.
    #[cfg(test)]
    pub(crate) fn former_count(&self, namespace: &str) -> usize {
        self.firewalls.former(namespace).len()
    }

    /// The EgressFirewall of a namespace that OVN enforces, as far as that is known.
    pub(crate) fn enforced(&self, namespace: &str) -> Option<&Firewall> {
        let former = self.firewalls.enforced_former(namespace);
        let former = former.filter(|_| self.is_local(namespace));
        former.or_else(|| self.present(namespace))
    }

    /// The EgressFirewall of a namespace, whether or not OVN enforces it.
    pub(crate) fn present(&self, namespace: &str) -> Option<&Firewall> {
        self.firewalls.latest(namespace)
    }

    /// When the rules of a namespace's EgressFirewall came.
    pub(crate) fn came_at(&self, namespace: &str) -> Option<Timestamp> {
        self.firewalls.came_at(namespace)
    }

    /// When the rules that OVN enforces for a namespace with pods here may last have become others.
    pub(crate) fn changed_at(&self, namespace: &str) -> Option<Timestamp> {
        Some(self.locals.get(namespace)?.changed_at)
    }

    /// Whether the flows of a namespace's rules are planned, and not installed: by the option, or by the
    /// annotation of the EgressFirewall.
    pub(crate) fn is_dry_run(&self, namespace: &str) -> bool {
        let present = self.present(namespace);
        self.dry_run || present.is_some_and(|firewall| firewall.dry_run)
    }

    /// Whether answers to pods of the namespace are held until their addresses are open.
    pub(crate) fn holds(&self, namespace: &str) -> bool {
        let present = self.present(namespace);
        !present.is_some_and(|firewall| firewall.hold_off)
    }

    /// Whether answers are held at the port of an interface.
    pub(crate) fn holds_at(&self, row: &Interface) -> bool {
        let namespace = self.namespace_of_names(row);
        namespace.is_none_or(|namespace| self.holds(namespace))
    }

    /// Whether rules of the namespace are looked at: there is a pod of it here.
    pub(crate) fn is_local(&self, namespace: &str) -> bool {
        self.locals.contains_key(namespace)
    }

    /// The addresses of the nodes that a rule selects, in order. `None` if OVN has no ACL of the rule.
    pub(crate) fn nodes_of(&self, namespace: &str, index: u32, rule: &Rule) -> Option<&[IpAddr]> {
        self.locals.get(namespace)?.pairing.nodes_at(index, rule)
    }

    /// Whether OVN has an ACL of a rule without a name.
    pub(crate) fn has_acl_of(&self, namespace: &str, index: u32, rule: &Rule) -> bool {
        let local = self.locals.get(namespace);
        local.is_some_and(|local| local.pairing.has_acl_of(index, rule))
    }

    /// Whether OVN denies by an ACL of which the namespace's EgressFirewall has no rule, or by one of a namespace without
    /// an EgressFirewall.
    pub(crate) fn denies_beyond_rules(&self, namespace: &str) -> bool {
        match self.locals.get(namespace) {
            Some(local) => local.pairing.denies_beyond(),
            None => {
                let rows = self.ovn.acls_of(namespace);
                let mut rows = rows.filter_map(|id| self.ovn.acl_in(namespace, id));
                rows.any(|row| !row.acl.allows())
            }
        }
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
                    self.firewalls.entered(namespace, now);
                }
                let changes = self.pair_local(namespace, known, &firewall, rows);
                if let Some(local) = self.locals.get_mut(namespace) {
                    local.changed_at = now;
                }
                changes
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
            self.problems.entered(namespace);
            for id in self.ovn.acls_of(namespace) {
                pairing.set_row(id, self.ovn.acl_in(namespace, id).as_ref());
            }
        } else {
            for id in rows {
                pairing.set_row(*id, self.ovn.acl_in(namespace, *id).as_ref());
            }
        }
        let older = self.firewalls.follow(namespace, firewall, pairing);
        let former = self.firewalls.former(namespace);
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
        let is_late = self.firewalls.is_late(namespace);
        let judged = local.judge_latest(firewall, older.is_some(), is_late);
        match is_new {
            true => self.problems.note_all(namespace),
            false => {
                let changed = std::mem::take(&mut changes.problems);
                self.problems
                    .note(namespace, changed.into_iter().chain(judged));
            }
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
            let holds = after.contains_key(group).then_some(namespace);
            if holder.as_deref() != holds {
                self.moved_groups.insert(group.clone());
            }
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
        self.firewalls.left(namespace);
        let rules = self.present(namespace);
        let rules = rules.map(|firewall| Arc::clone(&firewall.rules));
        self.problems
            .set_elsewhere(namespace, &rules.unwrap_or_default());
        let mut groups = BTreeMap::new();
        if let Some(local) = known {
            self.problems.note_all(namespace);
            for group in local.pairing.rules().sets.keys() {
                self.namespace_by_group.remove(group);
                self.moved_groups.insert(group.clone());
                groups.insert(group.clone(), ChangedRules::All);
            }
        }
        groups
    }

    /// Reports the problems of EgressFirewalls that have changed.
    pub(crate) fn tell_problems(&mut self, out: &mut Output) {
        for (namespace, changed) in self.problems.take_changed() {
            let rules = match changed {
                Changed::Of(rules) => rules,
                Changed::All => {
                    let rules = self.problems(&namespace).map(|(index, _)| index);
                    let reported = self.problems.reported_rules(&namespace);
                    rules.chain(reported).collect()
                }
            };
            #[cfg(test)]
            {
                self.problems.work += rules.len();
            }
            let is_other = |index: &u32| {
                let reported = self.problems.reported_at(&namespace, *index);
                reported != self.problem_at(&namespace, *index)
            };
            let changed = rules.into_iter().filter(is_other);
            let changed = changed.map(|index| (index, self.kept_problem_at(&namespace, index)));
            let changed = changed.collect();
            if let Some(report) = self.problems.report(namespace, changed) {
                out.report(report);
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
    pub(crate) fn namespace_of_rules(&self, row: &Interface) -> Option<&str> {
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

    /// The rules of the EgressFirewall by network, in their order, with their indices.
    pub(crate) fn rules_by_network(
        &self,
        namespace: &str,
    ) -> impl Iterator<Item = (u32, IpNet, &Rule)> {
        let rules = self.enforced(namespace).map(|firewall| &firewall.rules[..]);
        let rules = (0..).zip(rules.unwrap_or_default());
        rules.filter_map(|(index, rule)| {
            #[cfg(test)]
            self.looked_at.update(|looked_at| looked_at + 1);
            match rule.destination {
                Destination::Cidr(network) => Some((index, network, rule)),
                _ => None,
            }
        })
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
        (known != Some(version)).then(|| (version, local.names().cloned().collect()))
    }

    /// Whether a rule for an interface's pod mentions this name or a name above it. The rules count
    /// as they are written, whether or not OVN enforces them yet.
    pub(crate) fn mention(&self, row: &Interface, name: &DomainName) -> Mention {
        if !self.knows_names_for(row) {
            return Mention::Unknown;
        }
        let namespace = self.namespace_of_names(row);
        let local = namespace.and_then(|namespace| self.locals.get(namespace));
        match local.is_some_and(|local| local.mentions(name)) {
            true => Mention::Some,
            false => Mention::None,
        }
    }

    /// Whether a rule for an interface's pod denies this name that OVN does not enforce yet. When OVN does, answers that
    /// came before are gone.
    pub(crate) fn is_to_be_denied(&self, row: &Interface, name: &DomainName) -> bool {
        let namespace = self.namespace_of_names(row);
        let local = namespace.and_then(|namespace| self.locals.get(namespace));
        local.is_some_and(|local| local.is_to_deny(name))
    }

    /// The names that the same rules for an interface's pod match as this one: those that OVN enforces, and those that it
    /// may enforce later. `None` if no rule mentions the name.
    pub(crate) fn alike(&self, row: &Interface, name: &DomainName) -> Option<AlikeNames> {
        let sets = self.sets(row);
        let namespace = self.namespace_of_names(row);
        let local = namespace.and_then(|namespace| self.locals.get(namespace));
        AlikeNames::of(name, |suffix| {
            sets.iter().any(|set| set.has_rules(suffix))
                || local.is_some_and(|local| local.knows(suffix))
        })
    }

    /// A hash of the rules in force for an interface's pod, each with the priorities of its flows, in whatever order.
    pub(crate) fn hash_of_rules(&self, row: &Interface) -> u64 {
        let sets = self.sets(row);
        let rules = sets.iter().flat_map(|set| set.rules());
        let hashes = rules.flat_map(|rule| {
            let templates = rule.templates.iter();
            templates.map(|template| {
                let mut hasher = DefaultHasher::new();
                (rule.text(), template.priority).hash(&mut hasher);
                hasher.finish()
            })
        });
        hashes.fold(0, u64::wrapping_add)
    }

    /// Another number when the rules for an interface's pod may be others: those that hold, those that are mentioned, or
    /// whether they are known.
    pub(crate) fn rules_version(&self, row: &Interface) -> u64 {
        let version_of = |namespace: &str| self.locals.get(namespace).map(|local| local.version);
        let mut hasher = DefaultHasher::new();
        self.knows_names_for(row).hash(&mut hasher);
        self.namespace_of_names(row)
            .and_then(version_of)
            .hash(&mut hasher);
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
        self.firewalls.are_read() && self.ovn.is_bound(&row.iface_id) && may_have_namespace()
    }

    /// The namespace whose names matter at an interface.
    pub(crate) fn namespace_of_names(&self, row: &Interface) -> Option<&str> {
        let by_binding = self.namespace_of_pod(row);
        by_binding.or_else(|| self.namespace_of_rules(row))
    }

    /// The port groups that the rules of another namespace hold for than when last asked.
    pub(crate) fn take_moved_groups(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.moved_groups)
    }

    /// Whether the port of an interface is in one of these port groups.
    pub(crate) fn is_in_any(&self, row: &Interface, groups: &BTreeSet<String>) -> bool {
        self.groups(row).any(|group| groups.contains(group))
    }

    /// Those changes in port groups that concern the port of an interface.
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
            base: self.tables.first()?,
            cached_actions: &self.cached_actions,
            tags_end: self.tables.tags_end()?,
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
}
