//! The rules of one namespace with pods here, paired with OVN's rows for them.
//!
//! Each row and each rule is parsed and hashed once, when it comes. A change of one concerns the ACLs with the same
//! address sets, then the names of these ACLs, then the places in the EgressFirewall that have these names. No change
//! goes through all rules or all rows, except the first one and those that concern every rule.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use smallvec::SmallVec;

use super::{
    ActiveRule, ChangedNames, NamePattern, NamespaceRules, Problem, RuleSet, denials_by_name,
    differing, end_of, ports, problem_of_resource, rule_at, to_copy,
};
use crate::{
    ovn::{
        acl::{self, AclMatch, AclMatchError, NameMatch},
        hash::{Family, address_set_hashes},
        rows::RowId,
        template::{AclTemplate, AclTemplateError, CachedActions, acl_match},
        view::AclRow,
    },
    values::{
        firewall::{Destination, Firewall, Floor, IpVersions, Rule, RuleAction},
        flow::Transport,
        name::{DnsName, DomainName},
    },
};

/// The hash of an address set, and its family.
type AddressSet = (Family, u64);

/// An ACL of the namespace, with its logical flows.
#[derive(Debug)]
struct Row {
    index: u32,
    is_present: bool,
    allows: bool,
    matches: Result<AclMatch, AclMatchError>,
    flows: Box<[Flow]>,
    /// The use of the ACL for the rules.
    part: Part,
}

/// A logical flow for a name.
#[derive(Debug)]
struct Flow {
    matches: NameMatch,
    template: Result<Arc<AclTemplate>, AclTemplateError>,
}

/// The use of an ACL for the rules.
#[derive(Debug, Default)]
struct Part {
    /// The problem for which the ACL cannot be used.
    failure: Option<Box<Problem>>,
    /// A limitation, if there is no other problem.
    caveat: Option<Box<Problem>>,
    /// The name that its logical flows will be for.
    waits_for: Option<DnsName>,
    /// By port group, its rules: usually one; two while ovn-northd is between two versions of the ACL.
    rules: Box<[(String, Arc<ActiveRule>)]>,
}

impl Part {
    /// The names that it is for.
    fn names(&self) -> impl Iterator<Item = &DomainName> {
        self.written_names().map(DnsName::name)
    }

    /// The same, with wildcards.
    fn written_names(&self) -> impl Iterator<Item = &DnsName> {
        let rules = self.rules.iter().map(|(_, rule)| &rule.name);
        rules.chain(&self.waits_for)
    }
}

impl Row {
    fn read(row: &AclRow<'_>) -> Self {
        let AclRow {
            acl,
            is_present,
            flows,
        } = row;
        let flows = flows.iter().filter_map(|(_, flow)| {
            // A logical flow that is not for a name is OVN's alone.
            let Some(Ok(AclMatch::Name(matches))) = acl_match(flow).map(acl::parse) else {
                return None;
            };
            Some(Flow {
                matches,
                template: AclTemplate::parse(flow).map(Arc::new),
            })
        });
        Self {
            index: acl.rule_index,
            is_present: *is_present,
            allows: acl.allows(),
            matches: acl::parse(&acl.matches),
            flows: flows.collect(),
            part: Part::default(),
        }
    }

    /// The matches of the ACL and of its logical flows.
    fn names(&self) -> impl Iterator<Item = &NameMatch> {
        let of_acl = match &self.matches {
            Ok(AclMatch::Name(matches)) => Some(matches),
            _ => None,
        };
        of_acl
            .into_iter()
            .chain(self.flows.iter().map(|flow| &flow.matches))
    }

    fn address_sets(&self) -> BTreeSet<AddressSet> {
        self.names().flat_map(address_sets).collect()
    }

    /// Whether it is an ACL that ovn-kubernetes makes of the rule at its index. The labels of nodes, which an ACL does not
    /// show, count as equal, and so does a match of another form.
    fn is_of(&self, rule: &Rule) -> bool {
        // Where not all ports are read, they count as equal, too.
        let has_ports =
            |found: &[Transport]| rule.has_more_ports() || ports(found) == ports(&rule.ports);
        let is_right = match (&rule.destination, &self.matches) {
            (Destination::Invalid(_), _) => return true,
            (_, Err(_)) => true,
            (Destination::Name(name), Ok(AclMatch::Name(matches))) => {
                stands_for(matches, name) && has_ports(&matches.transports)
            }
            (Destination::Nodes, Ok(AclMatch::Nodes(matches))) => has_ports(&matches.transports),
            (Destination::Cidr(network), Ok(AclMatch::Network(matches))) => {
                matches.network == network.trunc() && has_ports(&matches.transports)
            }
            (Destination::Cidr(_) | Destination::Nodes, Ok(AclMatch::Other)) => true,
            _ => false,
        };
        is_right && self.allows == (rule.action == RuleAction::Allow)
    }
}

fn address_sets(matches: &NameMatch) -> impl Iterator<Item = AddressSet> {
    let v4 = matches.v4.map(|hash| (Family::V4, hash));
    let v6 = matches.v6.map(|hash| (Family::V6, hash));
    v4.into_iter().chain(v6)
}

/// Whether the address sets of a match can be those of a name.
fn stands_for(matches: &NameMatch, name: &DnsName) -> bool {
    let mut sets = address_sets(matches);
    sets.all(|(family, hash)| address_set_hashes(name, family).contains(&hash))
}

/// The address sets that can stand for a rule.
fn address_sets_of(rule: &Rule) -> SmallVec<[AddressSet; 4]> {
    let Destination::Name(name) = &rule.destination else {
        return SmallVec::new();
    };
    let mut all = SmallVec::new();
    for family in [Family::V4, Family::V6] {
        let [written, resolver] = address_set_hashes(name, family);
        all.push((family, written));
        if resolver != written {
            all.push((family, resolver));
        }
    }
    all
}

fn name_of(rule: &Rule) -> Option<&DnsName> {
    match &rule.destination {
        Destination::Name(name) => Some(name),
        _ => None,
    }
}

/// One for a rule that denies, and one if it is for a name.
fn denials_of(rule: &Rule) -> [usize; 2] {
    let denies = rule.action == RuleAction::Deny;
    [denies, denies && name_of(rule).is_some()].map(usize::from)
}

/// Adds to a list in order, in which nothing stands twice.
fn add<T: Ord, const N: usize>(list: &mut SmallVec<[T; N]>, item: T)
where
    [T; N]: smallvec::Array<Item = T>,
{
    if let Err(at) = list.binary_search(&item) {
        list.insert(at, item);
    }
}

fn remove<T: Ord, const N: usize>(list: &mut SmallVec<[T; N]>, item: &T)
where
    [T; N]: smallvec::Array<Item = T>,
{
    if let Ok(at) = list.binary_search(item) {
        list.remove(at);
    }
}

/// An EgressFirewall beside the ACLs in the NB database: whether they are made of it.
#[derive(Clone, Debug, Default)]
struct Judgement {
    rules: Arc<[Rule]>,
    /// The ACLs that are not those of the rules at their indices.
    wrong: BTreeSet<RowId>,
    /// The rules for names without an ACL.
    missing: BTreeSet<u32>,
}

/// The parts that changes concern.
#[derive(Debug, Default)]
struct Touched {
    /// Those of the rules that have come or gone.
    address_sets: HashSet<AddressSet>,
    rows: BTreeSet<RowId>,
    names: BTreeSet<DomainName>,
    indices: BTreeSet<u32>,
}

/// The changes of the rules.
#[derive(Debug, Default)]
pub(crate) struct PairingChanges {
    /// By port group, the names whose rules have changed.
    pub(crate) names: BTreeMap<String, ChangedNames>,
    /// The rules whose problems have changed, in order.
    pub(crate) problems: Vec<u32>,
    /// Whether a dry run has begun or ended.
    pub(crate) is_other_run: bool,
}

/// Where a name occurs.
#[derive(Debug, Default)]
struct OfName {
    /// The indices of its rules.
    rules: SmallVec<[u32; 2]>,
    /// The ACLs for it.
    rows: SmallVec<[RowId; 1]>,
    /// How far OVN is with the name itself, and with its wildcard.
    states: [State; 2],
    /// The IP versions of the cluster, if there are logical flows: each ACL for a name has an address set of each.
    versions: Option<IpVersions>,
    /// Whether an ACL denies the name itself, and the wildcard of it, and no rule does: OVN follows an EgressFirewall that
    /// was not read yet.
    denies: [bool; 2],
}

/// How far OVN is with a name.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum State {
    /// There is no ACL.
    #[default]
    NoAcl,
    /// There is an ACL, but no logical flow of it.
    Waiting,
    /// There are logical flows.
    Served,
}

impl OfName {
    fn state(&self, name: &DnsName) -> State {
        self.states[usize::from(name.is_wildcard())]
    }
}

/// The rules of a namespace beside OVN's rows.
#[derive(Debug, Default)]
pub(crate) struct Pairing {
    namespace: String,
    /// Whether names stand for their sub-domains, where the EgressFirewall does not say.
    subdomains: bool,
    /// The EgressFirewall that the rules are of.
    firewall: Firewall,
    floor: Floor,
    is_dry_run: bool,
    rows: BTreeMap<RowId, Row>,
    rows_by_index: BTreeMap<u32, SmallVec<[RowId; 1]>>,
    rows_by_address_set: HashMap<AddressSet, SmallVec<[RowId; 1]>>,
    /// The ACLs that deny.
    denying: BTreeSet<RowId>,
    /// The number of rules that deny.
    denials: usize,
    /// The number of those for a name.
    denials_by_name: usize,
    /// The indices of rules by the address sets that can stand for their names.
    rules_by_address_set: HashMap<AddressSet, SmallVec<[u32; 2]>>,
    names: HashMap<DomainName, OfName>,
    judgements: Vec<Judgement>,
    rules: NamespaceRules,
    touched: Touched,
    /// How many ACLs and rules were read or compared with each other.
    #[cfg(test)]
    pub(crate) work: usize,
}

impl Pairing {
    /// Without rules and rows.
    pub(crate) fn new(namespace: &str, subdomains: bool) -> Self {
        Self {
            namespace: namespace.to_owned(),
            subdomains,
            ..Self::default()
        }
    }

    /// The rules that OVN enforces, and their problems.
    pub(crate) fn rules(&self) -> &NamespaceRules {
        &self.rules
    }

    /// The EgressFirewall that the rules are of.
    pub(crate) fn firewall(&self) -> &Firewall {
        &self.firewall
    }

    /// Whether a rule of the EgressFirewall denies.
    pub(crate) fn denies(&self) -> bool {
        self.denials > 0
    }

    /// Whether a rule for a name denies.
    pub(crate) fn denies_by_name(&self) -> bool {
        self.denials_by_name > 0
    }

    /// The ACLs that deny.
    pub(crate) fn denying(&self) -> &BTreeSet<RowId> {
        &self.denying
    }

    /// Whether a rule has this name, without a wildcard.
    pub(crate) fn mentions(&self, name: &[u8]) -> bool {
        let of_name = self.names.get(name);
        of_name.is_some_and(|one| !one.rules.is_empty())
    }

    /// Whether a rule has this name, without a wildcard, or an ACL of OVN.
    pub(crate) fn knows(&self, name: &[u8]) -> bool {
        self.names.contains_key(name)
    }

    /// Whether a rule for this name that OVN does not enforce yet denies names with so many labels in front, or an ACL
    /// of OVN does, for an EgressFirewall that was not read yet.
    pub(crate) fn is_to_deny(&self, name: &[u8], extra: usize) -> bool {
        let of_name = self.names.get(name);
        let [itself, wildcard] = of_name.map(|one| one.denies).unwrap_or_default();
        let below = self.firewall.subdomains.unwrap_or(self.subdomains);
        if itself && (below || extra == 0) || wildcard && extra == 1 {
            return true;
        }
        let of_name = of_name.filter(|_| self.denies_by_name());
        let mut rules = of_name.into_iter().flat_map(|one| {
            let rules = one.rules.iter();
            rules.filter_map(move |index| Some((one, rule_at(&self.firewall.rules, *index)?)))
        });
        rules.any(|(of_name, rule)| match &rule.destination {
            Destination::Name(name) if rule.action == RuleAction::Deny => {
                let pattern = NamePattern::of(name, &self.firewall, self.subdomains);
                of_name.state(name) != State::Served && pattern.covers(extra)
            }
            _ => false,
        })
    }

    /// The names of the rules, without wildcards.
    pub(crate) fn mentioned(&self) -> impl Iterator<Item = &DomainName> {
        let mentioned = self.names.iter().filter(|(_, one)| !one.rules.is_empty());
        mentioned.map(|(name, _)| name)
    }

    /// The addresses of the nodes that a rule at this index selects, in order, as its ACL has them. `None` if OVN has no
    /// ACL of it, or follows an edit.
    pub(crate) fn nodes_at(&self, index: u32, rule: &Rule) -> Option<&[IpAddr]> {
        let [id] = self.rows_by_index.get(&index)?[..] else {
            return None;
        };
        let row = self.rows.get(&id).filter(|row| row.is_present)?;
        match &row.matches {
            Ok(AclMatch::Nodes(matches)) if row.is_of(rule) => Some(&matches.addresses),
            _ => None,
        }
    }

    /// Whether OVN has an ACL that ovn-kubernetes makes of the rule at this index.
    pub(crate) fn has_acl_of(&self, index: u32, rule: &Rule) -> bool {
        let rows = self.rows_by_index.get(&index).into_iter().flatten();
        let mut rows = rows.filter_map(|id| self.rows.get(id));
        rows.any(|row| row.is_of(rule))
    }

    /// Whether an ACL denies whose index lies beyond the rules: ovn-kubernetes has left it behind, or is about to follow.
    pub(crate) fn denies_beyond(&self) -> bool {
        let beyond = self.rows_by_index.range(end_of(&self.firewall.rules)..);
        let mut rows = beyond.flat_map(|(_, rows)| rows);
        rows.any(|id| self.denying.contains(id))
    }

    // What changes it.

    /// An ACL has changed, or its logical flows have; `None` if it is no longer one of the namespace's.
    pub(crate) fn set_row(&mut self, id: RowId, row: Option<&AclRow<'_>>) {
        let old = self.rows.remove(&id);
        let new = row.map(Row::read);
        #[cfg(test)]
        {
            self.work += 1;
        }
        if let Some(old) = &old {
            self.touched.indices.insert(old.index);
            self.leave(id, &old.part);
            unlist(&mut self.rows_by_index, old.index, id);
            for set in old.address_sets() {
                if let Some(rows) = self.rows_by_address_set.get_mut(&set) {
                    remove(rows, &id);
                    if rows.is_empty() {
                        self.rows_by_address_set.remove(&set);
                    }
                }
            }
        }
        self.denying.remove(&id);
        let indices = [&old, &new].map(|row| row.as_ref().map(|row| row.index));
        if let Some(new) = new {
            self.touched.rows.insert(id);
            if !new.allows {
                self.denying.insert(id);
            }
            add(self.rows_by_index.entry(new.index).or_default(), id);
            for set in new.address_sets() {
                add(self.rows_by_address_set.entry(set).or_default(), id);
            }
            self.rows.insert(id, new);
        }
        let mut judgements = std::mem::take(&mut self.judgements);
        for judgement in &mut judgements {
            judgement.wrong.remove(&id);
            for index in indices.iter().flatten() {
                self.judge_at(judgement, *index, Some(id));
            }
        }
        self.judgements = judgements;
    }

    /// Makes the rules those of this EgressFirewall.
    pub(crate) fn set_firewall(&mut self, firewall: &Firewall) {
        if self.firewall.subdomains != firewall.subdomains {
            self.touched.rows.extend(self.rows.keys());
        }
        let old = std::mem::replace(&mut self.firewall, firewall.clone());
        let differing = differing(&old.rules, &firewall.rules);
        #[cfg(test)]
        {
            self.work += differing.len();
        }
        // From behind: one name may have thousands of rules, whose indices are a list in order.
        let mut has_other_floor = false;
        for index in differing.iter().rev() {
            if let Some(rule) = rule_at(&old.rules, *index) {
                self.unlist_rule(*index, rule);
            }
        }
        for index in &differing {
            let rule = rule_at(&firewall.rules, *index);
            has_other_floor |= self.floor.set(*index, rule);
            if let Some(rule) = rule {
                self.list_rule(*index, rule);
            }
        }
        if has_other_floor {
            self.touched
                .indices
                .extend(denials_by_name(&firewall.rules));
        }
        self.touched.indices.extend(differing);
        // Which ACLs lie beyond the rules.
        let (one, other) = (end_of(&old.rules), end_of(&firewall.rules));
        let rows = self
            .rows_by_index
            .range(one.min(other)..one.max(other))
            .flat_map(|(_, rows)| rows);
        self.touched.rows.extend(rows);
    }

    /// Whether a dry run is made of the rules. Returns whether that has changed.
    pub(crate) fn set_dry_run(&mut self, is_dry_run: bool) -> bool {
        let sets = self.rules.sets.values_mut();
        sets.for_each(|set| set.set_dry_run(is_dry_run));
        std::mem::replace(&mut self.is_dry_run, is_dry_run) != is_dry_run
    }

    /// The actions that can be copied are others.
    pub(crate) fn actions_changed(&mut self) {
        self.touched.rows.extend(self.rows.keys());
    }

    fn list_rule(&mut self, index: u32, rule: &Rule) {
        let [denies, denies_by_name] = denials_of(rule);
        self.denials += denies;
        self.denials_by_name += denies_by_name;
        for set in address_sets_of(rule) {
            add(self.rules_by_address_set.entry(set).or_default(), index);
            self.touched.address_sets.insert(set);
        }
        if let Some(name) = name_of(rule) {
            let of_name = self.names.entry(name.name().clone()).or_default();
            add(&mut of_name.rules, index);
        }
    }

    fn unlist_rule(&mut self, index: u32, rule: &Rule) {
        let [denies, denies_by_name] = denials_of(rule);
        self.denials -= denies;
        self.denials_by_name -= denies_by_name;
        for set in address_sets_of(rule) {
            if let Some(rules) = self.rules_by_address_set.get_mut(&set) {
                remove(rules, &index);
                if rules.is_empty() {
                    self.rules_by_address_set.remove(&set);
                }
            }
            self.touched.address_sets.insert(set);
        }
        if let Some(name) = name_of(rule)
            && let Some(of_name) = self.names.get_mut(name.name())
        {
            remove(&mut of_name.rules, &index);
            self.touched.names.insert(name.name().clone());
        }
    }

    /// The part of an ACL counts no longer.
    fn leave(&mut self, id: RowId, part: &Part) {
        for name in part.names() {
            if let Some(of_name) = self.names.get_mut(name) {
                remove(&mut of_name.rows, &id);
            }
            self.touched.names.insert(name.clone());
        }
    }

    /// Carries out the work for all changes since the last call.
    pub(crate) fn settle(&mut self, cached_actions: &CachedActions) -> PairingChanges {
        let mut changes = PairingChanges::default();
        for set in std::mem::take(&mut self.touched.address_sets) {
            let rows = self.rows_by_address_set.get(&set);
            self.touched.rows.extend(rows.into_iter().flatten());
        }
        for id in std::mem::take(&mut self.touched.rows) {
            self.settle_row(id, cached_actions);
        }
        for name in std::mem::take(&mut self.touched.names) {
            self.settle_name(&name, &mut changes);
        }
        for index in std::mem::take(&mut self.touched.indices) {
            #[cfg(test)]
            {
                self.work += 1;
            }
            let problem = self.problem_at(index);
            let problems = &mut self.rules.problems;
            if problems.get(&index) != problem.as_ref() {
                changes.problems.push(index);
                match problem {
                    Some(problem) => problems.insert(index, problem),
                    None => problems.remove(&index),
                };
            }
        }
        changes
    }

    fn settle_row(&mut self, id: RowId, cached_actions: &CachedActions) {
        #[cfg(test)]
        {
            self.work += 1;
        }
        let Some(row) = self.rows.get_mut(&id) else {
            return;
        };
        let old = std::mem::take(&mut row.part);
        self.leave(id, &old);
        let Some(row) = self.rows.get(&id) else {
            return;
        };
        let part = self.part_of(row, cached_actions);
        self.touched.indices.insert(row.index);
        for name in part.names() {
            let of_name = self.names.entry(name.clone()).or_default();
            add(&mut of_name.rows, id);
            self.touched.names.insert(name.clone());
        }
        if let Some(row) = self.rows.get_mut(&id) {
            row.part = part;
        }
    }

    fn part_of(&self, row: &Row, cached_actions: &CachedActions) -> Part {
        let mut part = Part::default();
        let mut rules: Vec<(String, Arc<ActiveRule>)> = Vec::new();
        let index = row.index;
        if index >= end_of(&self.firewall.rules) {
            part.failure = Some(Problem::StaleAcl.into());
        }
        match &row.matches {
            Ok(AclMatch::Name(matches)) => {
                let rule = self.rule_of(matches, index);
                part.waits_for = rule.map(|(name, _)| name.clone());
            }
            Ok(AclMatch::Nodes(_) | AclMatch::Network(_) | AclMatch::Other) => {}
            Err(error) => part.failure = Some(Problem::AclMatch(error.clone()).into()),
        }
        for Flow { matches, template } in &row.flows {
            // For a name that no rule mentions: the resource was edited and OVN has not followed yet.
            let Some((name, action)) = self.rule_of(matches, index) else {
                continue;
            };
            let template = match template {
                Ok(template) => template,
                Err(error) => {
                    let problem = Problem::Template(name.clone(), error.clone());
                    part.failure = Some(problem.into());
                    rules.clear();
                    break;
                }
            };
            if part.caveat.is_none() {
                part.caveat = to_copy(template, name, cached_actions).map(Box::new);
            }
            let rule = ActiveRule {
                namespace: self.namespace.clone(),
                index,
                name: name.clone(),
                pattern: NamePattern::of(name, &self.firewall, self.subdomains),
                v4: matches.v4.is_some(),
                v6: matches.v6.is_some(),
                transports: matches.transports.clone(),
                action,
                templates: vec![Arc::clone(template)],
            };
            let known = rules
                .iter_mut()
                .find(|(group, known)| *group == matches.port_group && known.is_like(&rule));
            match known {
                Some((_, known)) => {
                    Arc::make_mut(known).templates.push(Arc::clone(template));
                }
                None => rules.push((matches.port_group.clone(), Arc::new(rule))),
            }
        }
        part.rules = rules.into();
        part
    }

    /// Name and action of the rule that the address sets of both families stand for. Two spellings of a name
    /// can have one address set: of several rules, the rule at `index` counts, else the first.
    fn rule_of(&self, matches: &NameMatch, index: u32) -> Option<(&DnsName, RuleAction)> {
        let rules = |set: AddressSet| {
            let rules = self.rules_by_address_set.get(&set);
            rules.map(SmallVec::as_slice).unwrap_or_default()
        };
        let mut sets = address_sets(matches).map(rules);
        let rules = sets.next()?;
        let both = sets.next();
        let is_for_both =
            |rule: &&u32| both.is_none_or(|others| others.binary_search(rule).is_ok());
        let here = rules.binary_search(&index).ok().map(|at| &rules[at]);
        let found = here
            .filter(is_for_both)
            .or_else(|| rules.iter().find(is_for_both))?;
        let rule = rule_at(&self.firewall.rules, *found)?;
        Some((name_of(rule)?, rule.action))
    }

    /// The rules of a name follow its ACLs.
    fn settle_name(&mut self, name: &DomainName, changes: &mut PairingChanges) {
        #[cfg(test)]
        {
            self.work += 1;
        }
        let Some(of_name) = self.names.get_mut(name) else {
            return;
        };
        let rows = of_name.rows.iter().filter_map(|id| self.rows.get(id));
        let denies = [false, true].map(|wildcard| {
            let is_it = |one: &DnsName| one.name() == name && one.is_wildcard() == wildcard;
            let rules = of_name.rules.iter();
            let rules = rules.filter_map(|index| rule_at(&self.firewall.rules, *index));
            let mut denials = rules.filter(|rule| rule.action == RuleAction::Deny);
            let mut denying = rows.clone().filter(|row| !row.allows);
            !denials.any(|rule| name_of(rule).is_some_and(is_it))
                && denying.any(|row| row.part.written_names().any(is_it))
        });
        let parts = rows.map(|row| &row.part);
        let states = [false, true].map(|wildcard| {
            let is_it = |one: &DnsName| one.name() == name && one.is_wildcard() == wildcard;
            let serves = |part: &Part| part.rules.iter().any(|(_, rule)| is_it(&rule.name));
            let waits = |part: &Part| part.waits_for.as_ref().is_some_and(is_it);
            match parts.clone().any(serves) {
                true => State::Served,
                false if parts.clone().any(waits) => State::Waiting,
                false => State::NoAcl,
            }
        });
        let rules = parts.flat_map(|part| &part.rules);
        let rules = rules.filter(|(_, rule)| rule.name.name() == name);
        let versions = rules.clone().next().map(|(_, rule)| IpVersions {
            v4: rule.v4,
            v6: rule.v6,
        });
        let end = end_of(&self.firewall.rules);
        let is_in_place = |wildcard| {
            let mut rules = rules.clone();
            rules.any(|(_, rule)| rule.name.is_wildcard() == wildcard && rule.index < end)
        };
        let in_place = [false, true].map(is_in_place);
        let mut new: BTreeMap<&str, Vec<Arc<ActiveRule>>> = BTreeMap::new();
        for (group, rule) in rules {
            // An ACL beyond the rules serves only while no other ACL is for its name: OVN is about to follow an
            // EgressFirewall that became shorter.
            if rule.index < end || !in_place[usize::from(rule.name.is_wildcard())] {
                new.entry(group).or_default().push(Arc::clone(rule));
            }
        }
        let sets = &mut self.rules.sets;
        for group in new.keys() {
            if !sets.contains_key(*group) {
                let mut set = RuleSet::of(group);
                set.set_dry_run(self.is_dry_run);
                sets.insert((*group).to_owned(), set);
            }
        }
        for (group, set) in sets.iter_mut() {
            let rules = new.remove(group.as_str()).unwrap_or_default();
            if let Some(change) = set.replace(name, rules) {
                let names = changes.names.entry(group.clone()).or_default();
                names.insert(name.clone(), change);
            }
        }
        sets.retain(|_, set| !set.rules().is_empty());
        if (of_name.states, of_name.versions) != (states, versions) {
            self.touched.indices.extend(of_name.rules.iter().copied());
            (of_name.states, of_name.versions) = (states, versions);
        }
        of_name.denies = denies;
        if of_name.rules.is_empty() && of_name.rows.is_empty() {
            self.names.remove(name);
        }
    }

    /// The problem at an index, the first of these: a failure of an ACL, an error of the resource, a limitation of an
    /// ACL, a step that OVN has not done yet, a limitation by the resource.
    fn problem_at(&self, index: u32) -> Option<Problem> {
        let rows = self.rows_by_index.get(&index).into_iter().flatten();
        let parts = rows.filter_map(|id| self.rows.get(id)).map(|row| &row.part);
        let mut failures = parts.clone().rev().filter_map(|part| part.failure.as_ref());
        if let Some(failure) = failures.next() {
            return Some((**failure).clone());
        }
        let rule = rule_at(&self.firewall.rules, index)?;
        let caveat = parts.filter_map(|part| part.caveat.as_ref()).next();
        match (&rule.destination, caveat) {
            (Destination::Invalid(reason), _) => Some(Problem::Invalid(reason.clone())),
            (_, Some(caveat)) => Some((**caveat).clone()),
            (Destination::Name(name), None) => {
                let of_name = self.names.get(name.name());
                match of_name.map_or(State::NoAcl, |of_name| of_name.state(name)) {
                    State::Served => {
                        let versions = of_name.and_then(|of_name| of_name.versions);
                        problem_of_resource(index, rule, &self.floor, versions)
                    }
                    State::Waiting => Some(waiting(name, true)),
                    State::NoAcl => Some(waiting(name, false)),
                }
            }
            (Destination::Cidr(_) | Destination::Nodes, None) => None,
        }
    }

    /// The problem of a rule at an index where the EgressFirewall that OVN enforces has another rule.
    pub(crate) fn problem_of_other(
        &self,
        index: u32,
        rule: &Rule,
        floor: &Floor,
    ) -> Option<Problem> {
        let name = match &rule.destination {
            Destination::Invalid(reason) => return Some(Problem::Invalid(reason.clone())),
            Destination::Cidr(_) | Destination::Nodes => return None,
            Destination::Name(name) => name,
        };
        let sets = address_sets_of(rule).into_iter();
        let rows = sets.filter_map(|set| self.rows_by_address_set.get(&set));
        let rows = rows.flatten().filter_map(|id| self.rows.get(id));
        let mut flows = rows.clone().flat_map(|row| &row.flows);
        if let Some(flow) =
            flows.find(|flow| flow.template.is_ok() && stands_for(&flow.matches, name))
        {
            let versions = IpVersions {
                v4: flow.matches.v4.is_some(),
                v6: flow.matches.v6.is_some(),
            };
            return problem_of_resource(index, rule, floor, Some(versions));
        }
        let has_acl = rows.clone().any(|row| match &row.matches {
            Ok(AclMatch::Name(matches)) => stands_for(matches, name),
            _ => false,
        });
        Some(waiting(name, has_acl))
    }

    // Whether OVN's ACLs are those of an EgressFirewall.

    /// Whether the ACLs in the NB database are those that ovn-kubernetes makes of an EgressFirewall: each rule for
    /// a name has its own ACL, and no ACL with the index of a rule is for something else. An ACL beyond the rules
    /// counts as agreement.
    pub(crate) fn is_enforced(&mut self, firewall: &Firewall) -> bool {
        let rules = &firewall.rules;
        let mut known = self.judgements.iter();
        let known = known.rposition(|one| Arc::ptr_eq(&one.rules, rules));
        let at = known.unwrap_or_else(|| {
            // Only what is not the same as in the one before is looked at.
            let mut new = self.judgements.last().cloned().unwrap_or_default();
            let before = std::mem::replace(&mut new.rules, Arc::clone(rules));
            for index in differing(&before, rules) {
                #[cfg(test)]
                {
                    self.work += 1;
                }
                self.judge_at(&mut new, index, None);
            }
            self.judgements.push(new);
            self.judgements.len() - 1
        });
        let judgement = &self.judgements[at];
        judgement.wrong.is_empty() && judgement.missing.is_empty()
    }

    /// Judges the ACLs at an index: all of them, or one.
    fn judge_at(&self, judgement: &mut Judgement, index: u32, only: Option<RowId>) {
        let rule = rule_at(&judgement.rules, index);
        let rows = self.rows_by_index.get(&index).into_iter().flatten();
        let rows = rows.filter_map(|id| Some((*id, self.rows.get(id)?)));
        let mut has_any = false;
        for (id, row) in rows.filter(|(_, row)| row.is_present) {
            has_any = true;
            if only.is_some_and(|only| only != id) {
                continue;
            }
            match rule.is_none_or(|rule| row.is_of(rule)) {
                true => judgement.wrong.remove(&id),
                false => judgement.wrong.insert(id),
            };
        }
        match rule.and_then(name_of).is_some() && !has_any {
            true => judgement.missing.insert(index),
            false => judgement.missing.remove(&index),
        };
    }

    /// Forgets the judgements of all EgressFirewalls but these, and keeps one to go on from.
    pub(crate) fn keep_judgements(&mut self, keep: impl Fn(&Arc<[Rule]>) -> bool) {
        let last = self.judgements.pop();
        self.judgements.retain(|one| keep(&one.rules));
        self.judgements.extend(last);
    }
}

fn unlist(lists: &mut BTreeMap<u32, SmallVec<[RowId; 1]>>, index: u32, id: RowId) {
    if let Some(rows) = lists.get_mut(&index) {
        remove(rows, &id);
        if rows.is_empty() {
            lists.remove(&index);
        }
    }
}

fn waiting(name: &DnsName, has_acl: bool) -> Problem {
    match has_acl {
        true => Problem::NoLogicalFlows(name.clone()),
        false => Problem::NoAcl(name.clone()),
    }
}

#[cfg(test)]
mod tests;
