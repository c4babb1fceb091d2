//! The rules of the node, and where OVN enforces them. Plans are made from this and from what the
//! pods were told.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque, btree_map::Entry};

use crate::{
    Command, Timestamp,
    blocked::BlockedConnection,
    deadline::{self, Deadline, Why},
    firewall::{Destination, Firewall, FirewallId, FirewallUpdate, Rule, RuleAction},
    input::{FlowQuestion, FoundFlow, LOGICAL_FLOW_SAMPLE_MAX},
    limits::{
        ACTION_TEXTS_MAX, COPY_INTERVAL, COUNTED_PER_NAMESPACE_MAX, FORMER_FIREWALLS_MAX,
        TAKEOVER_MAX,
    },
    name::DomainName,
    output::Output,
    ovn::{
        rows::{Interface, NbUpdate, Pipeline, RowId, SbUpdate},
        template::{ActionTemplate, ActionText, CachedActions},
        view::{ClusterNetworks, OvnView, Touched, TunnelKeys},
    },
    pipeline::{Locator, Question},
    plan::{PortFacts, PortMatch},
    ports::PortId,
    profile::StaticProfile,
    report::{Report, Severity},
    rules::{
        ACL_PRIORITY_OFFSET, ChangedRules, NamespaceRules, NotTakenOver, Problem, RuleSet,
        is_dry_run, is_enforced, pair,
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

/// Rules, OVN's rows, and what was learned from the switch.
#[derive(Debug)]
pub(crate) struct Policy {
    subdomains: bool,
    /// Whether all is a dry run.
    dry_run: bool,
    profile: Option<StaticProfile>,
    ovn: OvnView,
    firewalls: BTreeMap<FirewallId, Firewall>,
    /// By namespace, when the rules of its EgressFirewall came, if they were not there at the agent's start.
    came_at: BTreeMap<String, Timestamp>,
    /// Whether EgressFirewalls were read.
    firewalls_read: bool,
    /// Whether OVN's northbound database was read: its ACLs tell the namespaces of port groups.
    nb_read: bool,
    /// By namespace, the names that an EgressFirewall mentions which OVN enforces or may enforce,
    /// without wildcards.
    names: BTreeMap<String, BTreeSet<DomainName>>,
    /// By namespace, the EgressFirewalls that OVN does not enforce yet.
    unfollowed: BTreeMap<String, Unfollowed>,
    rules: BTreeMap<String, NamespaceRules>,
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
    cached_actions: CachedActions,
}

impl Policy {
    pub(crate) fn new(subdomains: bool, dry_run: bool, profile: Option<StaticProfile>) -> Self {
        Self {
            subdomains,
            dry_run,
            profile,
            ovn: OvnView::default(),
            firewalls: BTreeMap::new(),
            came_at: BTreeMap::new(),
            firewalls_read: false,
            nb_read: false,
            names: BTreeMap::new(),
            unfollowed: BTreeMap::new(),
            rules: BTreeMap::new(),
            namespace_by_group: HashMap::new(),
            changed_problems: BTreeSet::new(),
            reported: BTreeMap::new(),
            watched: None,
            tables_changed: false,
            copy_at: None,
            locator: Locator::new(Pipeline::Egress),
            cached_actions: CachedActions::new(),
        }
    }

    /// Whether the options say where rules are enforced (a bridge without OVN).
    pub(crate) fn is_static(&self) -> bool {
        self.profile.is_some()
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
        let rules = self.rules.get(namespace).into_iter();
        let problems = rules.flat_map(|rules| &rules.problems);
        problems.map(|(index, problem)| (*index, problem))
    }

    /// What is wrong with all EgressFirewalls.
    pub(crate) fn all_problems(&self) -> impl Iterator<Item = &Problem> {
        self.rules
            .values()
            .flat_map(|rules| rules.problems.values())
    }

    /// Whether OVN enforces the EgressFirewall before the present one, as far as that is known.
    pub(crate) fn enforces_former(&self, namespace: &str) -> bool {
        let unfollowed = self.unfollowed.get(namespace);
        unfollowed.is_some_and(|one| one.enforces_former)
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

    /// Takes the networks and addresses of the cluster itself, if they may have changed since they
    /// were last taken.
    pub(crate) fn take_changed_networks(&mut self) -> Option<ClusterNetworks> {
        self.ovn.take_changed_networks()
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
            match self.firewalls.insert(id, firewall.clone()) {
                Some(before) if before.is_like(&firewall) => {}
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
        if self.is_static() {
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
    fn follow(&mut self, id: &FirewallId) -> Option<Firewall> {
        let acls = || self.ovn.present_acls(&id.namespace);
        let latest = self.firewalls.get(id)?;
        let unfollowed = self.unfollowed.get_mut(&id.namespace)?;
        if is_enforced(latest, acls()) {
            self.unfollowed.remove(&id.namespace);
            return None;
        }
        let former = &mut unfollowed.former;
        let enforced = former.iter().rposition(|one| is_enforced(one, acls()));
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
        let unfollowed = self.unfollowed.get(namespace);
        let former = unfollowed.filter(|one| one.enforces_former);
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
            self.pair_namespace(&namespace);
        }
    }

    /// Pairs the rules of these namespaces with OVN again; returns how the rules of port groups
    /// changed.
    pub(crate) fn pair_namespaces(
        &mut self,
        namespaces: &BTreeSet<String>,
        now: Timestamp,
    ) -> BTreeMap<String, ChangedRules> {
        let mut groups: BTreeMap<String, ChangedRules> = BTreeMap::new();
        for namespace in namespaces {
            for (group, changed) in self.pair_namespace(namespace) {
                match groups.entry(group) {
                    Entry::Vacant(new) => {
                        new.insert(changed);
                    }
                    Entry::Occupied(mut known) => known.get_mut().add(changed),
                }
            }
        }
        self.tables_changed |= !groups.is_empty();
        if !namespaces.is_empty() {
            self.copy_soon(now);
        }
        groups
    }

    /// Pairs the namespace's rules with OVN again; returns how the rules of port groups changed.
    fn pair_namespace(&mut self, namespace: &str) -> BTreeMap<String, ChangedRules> {
        let id = FirewallId {
            namespace: namespace.to_owned(),
            name: FIREWALL_NAME.to_owned(),
        };
        let older = self.follow(&id);
        self.collect_names(namespace);
        let pair = |firewall: &Firewall| {
            let acls = self.ovn.acls(namespace);
            pair(
                namespace,
                firewall,
                acls,
                self.subdomains,
                &self.cached_actions,
            )
        };
        let mut new = match (self.firewalls.get(&id), &self.profile) {
            (Some(firewall), None) => {
                let mut new = pair(firewall);
                if let Some(older) = &older {
                    new.sets = pair(older).sets;
                    new.problems
                        .retain(|_, problem| *problem != Problem::StaleAcl);
                }
                self.tell_if_late(namespace, firewall, older.is_some(), &mut new.problems);
                new
            }
            (Some(firewall), Some(profile)) => profile.rules(namespace, firewall, self.subdomains),
            (None, _) => NamespaceRules::default(),
        };
        if self.is_dry_run(namespace) {
            new.sets.values_mut().for_each(RuleSet::make_dry_run);
        }
        if self.profile.is_none() && !self.ovn.has_ports_of(namespace) {
            // OVN makes nothing of the rules here, so nothing is waited for.
            new.problems.retain(|_, problem| {
                problem.severity() != Severity::Waiting
                    && !matches!(problem, Problem::NotTakenOver(_))
            });
        }
        let old = self.rules.remove(namespace).unwrap_or_default();
        let none = RuleSet::default();
        let all: BTreeSet<&String> = old.sets.keys().chain(new.sets.keys()).collect();
        let mut groups = BTreeMap::new();
        for group in all {
            let (before, after) = (old.sets.get(group), new.sets.get(group));
            let holder = match after {
                Some(_) => self
                    .namespace_by_group
                    .insert(group.clone(), namespace.to_owned()),
                None => self.namespace_by_group.remove(group),
            };
            // If not, the rules of another namespace have held for the group until now, or none.
            if holder.as_deref() != before.map(|_| namespace) {
                groups.insert(group.clone(), ChangedRules::All);
            } else if before != after {
                let changed = before
                    .unwrap_or(&none)
                    .changed_rules(after.unwrap_or(&none));
                groups.insert(group.clone(), changed);
            }
        }
        if old.problems != new.problems {
            self.changed_problems.insert(namespace.to_owned());
        }
        if new != NamespaceRules::default() {
            self.rules.insert(namespace.to_owned(), new);
        }
        groups
    }

    /// Adds the problem that ovn-kubernetes has not taken over an EgressFirewall in time, at the
    /// rule that is the likely cause.
    fn tell_if_late(
        &self,
        namespace: &str,
        firewall: &Firewall,
        has_older: bool,
        problems: &mut BTreeMap<u32, Problem>,
    ) {
        let waits = |problem: &Problem| matches!(problem, Problem::NoAcl(_));
        let is_late = self.unfollowed.get(namespace).is_some_and(|one| one.late);
        if !is_late || !(has_older || problems.values().any(waits)) {
            return;
        }
        let wildcard = problems.iter().find_map(|(index, problem)| match problem {
            Problem::NoAcl(name) if name.is_wildcard() => Some((*index, name.clone())),
            _ => None,
        });
        let first = problems.iter().find(|(_, problem)| waits(problem));
        let index = match (&wildcard, first) {
            (Some((index, _)), _) => *index,
            (None, Some((index, _))) => *index,
            (None, None) => 0,
        };
        let problem = Problem::NotTakenOver(NotTakenOver {
            has_older,
            refusal: firewall.refusal.clone(),
            wildcard: wildcard.map(|(_, name)| name),
        });
        problems.insert(index, problem);
    }

    /// Reports the problems of EgressFirewalls that have changed.
    pub(crate) fn tell_problems(&mut self, out: &mut Output) {
        for namespace in std::mem::take(&mut self.changed_problems) {
            let rules = self.rules.get(&namespace);
            let problems = rules.map(|rules| rules.problems.clone());
            let problems = problems.unwrap_or_default();
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
                let namespace = self.namespace_by_group.get(group)?;
                self.rules.get(namespace)?.sets.get(group)
            })
            .collect()
    }

    /// The port groups that the port of an interface is in.
    fn groups<'a>(&'a self, row: &'a Interface) -> Box<dyn Iterator<Item = &'a str> + 'a> {
        match &self.profile {
            None => Box::new(self.ovn.groups_of(&row.iface_id)),
            Some(_) => Box::new(StaticProfile::namespace_of(row).into_iter()),
        }
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
        let written = &self.enforced(namespace)?.rules;
        let denies = |rule: &&Rule| rule.action == RuleAction::Deny;
        let by_name = |rule: &Rule| matches!(rule.destination, Destination::Name(_));
        let rules = self.rules.get(namespace)?;
        let active = || rules.sets.values().flat_map(|set| set.rules());
        let ours = active().any(|rule| rule.verdict == RuleAction::Deny);
        if self.is_static() || ours || written.iter().filter(denies).any(by_name) {
            return None;
        }
        // The flow monitor watches only the tables of rules by name.
        let places: BTreeSet<(Pipeline, u8)> = active()
            .flat_map(|rule| &rule.templates)
            .map(|template| (template.pipeline, template.table_id))
            .collect();
        let mut cookies = BTreeSet::new();
        for (acl, flows) in self.ovn.acls_with_rows(namespace) {
            // `allow`, `allow-related` and `allow-stateless`. Every other action denies.
            let denies = !acl.action.starts_with("allow");
            for (row, flow) in flows {
                let cookie = row.prefix();
                // ovn-northd may not have followed the change of an ACL yet.
                if !denies && !before.contains(&cookie) {
                    continue;
                }
                if !places.contains(&(flow.pipeline, flow.table_id)) {
                    return None;
                }
                cookies.insert(cookie);
            }
        }
        let understood = !cookies.is_empty() || !written.iter().any(|rule| denies(&rule));
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
    fn namespace_of_pod<'a>(&'a self, row: &'a Interface) -> Option<&'a str> {
        match &self.profile {
            Some(_) => StaticProfile::namespace_of(row),
            None => self.ovn.namespace_of(&row.iface_id),
        }
    }

    /// Updates the names that the EgressFirewalls of a namespace mention.
    fn collect_names(&mut self, namespace: &str) {
        let id = FirewallId {
            namespace: namespace.to_owned(),
            name: FIREWALL_NAME.to_owned(),
        };
        let former = self.unfollowed.get(namespace).map(|one| &one.former);
        let firewalls = self.firewalls.get(&id).into_iter();
        let names = firewalls
            .chain(former.into_iter().flatten())
            .flat_map(|firewall| firewall.rules.iter())
            .filter_map(|rule| match &rule.destination {
                Destination::Name(name) => Some(name.name().clone()),
                _ => None,
            });
        let names: BTreeSet<DomainName> = names.collect();
        if names.is_empty() {
            self.names.remove(namespace);
        } else {
            self.names.insert(id.namespace, names);
        }
    }

    /// The names that an EgressFirewall of the namespace mentions which OVN enforces or may
    /// enforce, without wildcards.
    pub(crate) fn names_in(&self, namespace: &str) -> BTreeSet<DomainName> {
        self.names.get(namespace).cloned().unwrap_or_default()
    }

    /// Whether a rule for an interface's pod mentions this name or a name above it. The rules count
    /// as they are written, whether or not OVN enforces them yet.
    pub(crate) fn mention(&self, row: &Interface, name: &DomainName) -> Mention {
        if !self.knows_names_for(row) {
            return Mention::Unknown;
        }
        let names = self
            .filtered_as(row)
            .and_then(|namespace| self.names.get(namespace));
        match names.is_some_and(|names| name.suffixes().any(|suffix| names.contains(suffix))) {
            true => Mention::Some,
            false => Mention::None,
        }
    }

    /// Whether the rules for an interface's pod are known.
    pub(crate) fn knows_names_for(&self, row: &Interface) -> bool {
        let may_have_namespace = || self.nb_read || self.namespace_of_pod(row).is_some();
        let has_namespace =
            self.is_static() || self.ovn.is_bound(&row.iface_id) && may_have_namespace();
        self.firewalls_read && has_namespace
    }

    /// The namespace whose names matter at an interface.
    pub(crate) fn filtered_as<'a>(&'a self, row: &'a Interface) -> Option<&'a str> {
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

    /// Where the packets of the port of an interface are found.
    pub(crate) fn port_match(&self, row: &Interface) -> Option<PortMatch> {
        match &self.profile {
            None => self.tunnel_keys(row).map(PortMatch::Ovn),
            Some(_) => row.ofport.map(PortMatch::InPort),
        }
    }

    /// The same in OVN's pipeline.
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
            port_match: self.port_match(row)?,
            addresses: &row.addresses,
            sets,
            base: self.base()?,
            cached_actions: &self.cached_actions,
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

    /// The OpenFlow table that templates count from.
    fn base(&self) -> Option<u8> {
        match self.profile {
            None => self.locator.base(),
            Some(_) => Some(0),
        }
    }

    /// Whether a plan can be trusted to be complete.
    pub(crate) fn can_plan(&self) -> bool {
        self.base().is_some() || self.stage().is_none()
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
        let Some(base) = self.base() else {
            return BTreeSet::new();
        };
        self.rules
            .values()
            .flat_map(|rules| rules.sets.values())
            .flat_map(|set| set.rules())
            .flat_map(|rule| &rule.templates)
            .map(|template| template.table(base))
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
    fn stage(&self) -> Option<u8> {
        self.ovn
            .logical_flows()
            .map(|(_, flow)| flow)
            .find(|flow| flow.stage_hint.is_some() && flow.pipeline == Pipeline::Egress)
            .map(|flow| flow.table_id)
    }

    /// Looks for the pipeline's first table, unless the table is known or is being looked for.
    pub(crate) fn locate(&mut self, out: &mut Output) {
        let question = self.stage().and_then(|stage| self.locator.locate(stage));
        ask(question, out);
    }

    /// The switch has new flows: the pipeline's first table may have changed, and more actions may
    /// be found to copy.
    pub(crate) fn verify(&mut self, now: Timestamp, out: &mut Output) {
        ask(self.locator.verify(), out);
        self.copy_soon(now);
    }

    /// Open questions will get no answer.
    pub(crate) fn interrupted(&mut self) {
        self.locator.interrupted();
    }

    fn copy_soon(&mut self, now: Timestamp) {
        self.copy_at.get_or_insert(now);
    }

    /// When [`Policy::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        deadline::first([
            deadline::at(self.locator.deadline(), Why::Pipeline),
            deadline::at(self.copy_at, Why::Copy),
            deadline::at(self.late_at(), Why::Takeover),
        ])
    }

    /// Asks the switch again what is due, if there is a connection.
    pub(crate) fn timeout(&mut self, switch_is_up: bool, now: Timestamp, out: &mut Output) {
        if self.copy_at.take_if(|at| *at <= now).is_some() && switch_is_up {
            self.look_for_actions(now, out);
        }
        let stage = self.stage();
        let question = stage.and_then(|stage| self.locator.retry(stage, now));
        ask(question, out);
        self.look_at_late(now);
    }

    /// Takes in some logical flows of a stage.
    pub(crate) fn sampled(
        &mut self,
        table_id: u8,
        mut flows: Vec<RowId>,
        now: Timestamp,
        out: &mut Output,
    ) {
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
        ask(self.locator.sampled(table_id, &sample, now), out);
    }

    /// Takes in flows that were looked up by cookie. They show the pipeline's first table, and
    /// actions to copy. Returns whether plans may have changed.
    pub(crate) fn learn(&mut self, found: &[FoundFlow], now: Timestamp) -> bool {
        let tables = found.iter().map(|flow| (flow.cookie, flow.table));
        let moved = self.locator.found(tables, now);
        let mut learned = false;
        let wanted = self.sources();
        for (id, flow) in self.ovn.logical_flows() {
            let source = ActionText::of(flow);
            if !wanted.contains(&source) {
                continue;
            }
            let made = found.iter().find(|made| made.cookie == id.prefix());
            if let Some(made) = made
                && self.cached_actions.get(&source) != Some(&made.actions)
            {
                self.cached_actions.insert(source, made.actions.clone());
                learned = true;
            }
        }
        if learned {
            // Actions that can be copied are no problem any more.
            let namespaces: Vec<String> = self.rules.keys().cloned().collect();
            for namespace in namespaces {
                self.pair_namespace(&namespace);
            }
        }
        self.tables_changed |= learned || moved;
        learned || moved
    }

    /// The actions that rules would copy.
    fn sources(&self) -> BTreeSet<ActionText> {
        self.rules
            .values()
            .flat_map(|rules| rules.sets.values())
            .flat_map(|set| set.rules())
            .flat_map(|rule| &rule.templates)
            .filter_map(|template| match &template.actions {
                ActionTemplate::Copy { source, .. } => Some(source.clone()),
                ActionTemplate::Build(_) => None,
            })
            .collect()
    }

    /// Looks for OVN's own flows whose actions rules would copy. Known ones are looked up again,
    /// because a restarted ovn-controller numbers its meters anew.
    fn look_for_actions(&mut self, now: Timestamp, out: &mut Output) {
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

fn ask(question: Option<Question>, out: &mut Output) {
    match question {
        Some(Question::Sample { pipeline, table_id }) => {
            out.command(Command::SampleLogicalFlows { pipeline, table_id });
        }
        Some(Question::Cookies(cookies)) => out.command(Command::Ask(FlowQuestion::Find(cookies))),
        None => {}
    }
}
