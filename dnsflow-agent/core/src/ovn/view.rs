//! The rows of OVN's databases as they were last reported, with the look-ups that the engine needs.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use ipnet::IpNet;

use super::acl::{excluded_networks, exclusions};
use super::hash::default_port_group;
use super::rows::{
    Acl, Changes, Datapath, Encapsulation, GatewayPort, LoadBalancer, LogicalFlow, LogicalSwitch,
    NbUpdate, NodeSet, PortBinding, PortGroup, RowId, SbUpdate, TemplateVariables, UnreadFronts,
};
use super::template::acl_match;

/// The rows of one table.
#[derive(Debug)]
pub struct Table<Row> {
    rows: BTreeMap<RowId, Row>,
}

/// One row before and after a change.
#[derive(Debug)]
pub struct Changed<Row> {
    /// The row's identity.
    pub id: RowId,
    /// The row before the change; `None` if the row is new.
    pub old: Option<Row>,
    /// The row after the change; `None` if the row is gone.
    pub new: Option<Row>,
}

impl<Row> Default for Table<Row> {
    fn default() -> Self {
        Self {
            rows: BTreeMap::new(),
        }
    }
}

impl<Row: Clone + Eq> Table<Row> {
    /// Applies `changes` and returns the rows that really changed, in order. With `reset`, rows that
    /// `changes` does not name are gone.
    pub fn apply(&mut self, reset: bool, changes: Changes<Row>) -> Vec<Changed<Row>> {
        let mut changed = Vec::new();
        self.apply_each(reset, changes, |id, old, new| {
            let new = new.cloned();
            changed.push(Changed { id, old, new });
        });
        changed.sort_by_key(|change| change.id);
        changed
    }

    /// The same for a large table: hands each row that really changed to `each`, before and after, and copies
    /// none.
    fn apply_each(
        &mut self,
        reset: bool,
        changes: Changes<Row>,
        mut each: impl FnMut(RowId, Option<Row>, Option<&Row>),
    ) {
        let mut gone: BTreeSet<RowId> = match reset {
            true => self.rows.keys().copied().collect(),
            false => BTreeSet::new(),
        };
        for (id, new) in changes {
            gone.remove(&id);
            let old = match new {
                Some(row) => self.rows.insert(id, row),
                None => self.rows.remove(&id),
            };
            let new = self.rows.get(&id);
            if old.as_ref() != new {
                each(id, old, new);
            }
        }
        for id in gone {
            each(id, self.rows.remove(&id), None);
        }
    }

    /// The row, while it exists.
    pub fn find(&self, id: RowId) -> Option<&Row> {
        self.rows.get(&id)
    }

    /// How many rows there are.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The rows whose identities begin with these 32 bits.
    fn beginning_with(&self, prefix: u32) -> impl Iterator<Item = (RowId, &Row)> {
        let rows = self.rows.range(RowId::beginning_with(prefix));
        rows.map(|(id, row)| (*id, row))
    }

    /// Every row.
    pub fn iter(&self) -> impl Iterator<Item = (RowId, &Row)> {
        self.rows.iter().map(|(id, row)| (*id, row))
    }
}

/// An index: for each key, the rows that have it.
#[derive(Debug)]
struct Index<Key>(HashMap<Key, BTreeSet<RowId>>);

impl<Key> Default for Index<Key> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<Key: Eq + std::hash::Hash> Index<Key> {
    fn add(&mut self, key: Key, id: RowId) {
        self.0.entry(key).or_default().insert(id);
    }

    fn remove<Q>(&mut self, key: &Q, id: RowId)
    where
        Key: std::borrow::Borrow<Q>,
        Q: Eq + std::hash::Hash + ?Sized,
    {
        if let Some(ids) = self.0.get_mut(key) {
            ids.remove(&id);
            if ids.is_empty() {
                self.0.remove(key);
            }
        }
    }

    /// The key itself, if some row has it.
    fn key<Q>(&self, key: &Q) -> Option<&Key>
    where
        Key: std::borrow::Borrow<Q>,
        Q: Eq + std::hash::Hash + ?Sized,
    {
        self.0.get_key_value(key).map(|(key, _)| key)
    }

    fn contains(&self, key: &Key) -> bool {
        self.0.contains_key(key)
    }

    fn ids<Q>(&self, key: &Q) -> impl Iterator<Item = RowId>
    where
        Key: std::borrow::Borrow<Q>,
        Q: Eq + std::hash::Hash + ?Sized,
    {
        self.0.get(key).into_iter().flatten().copied()
    }
}

/// The tunnel keys by which OVN's pipeline knows a logical port.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct TunnelKeys {
    /// The datapath's tunnel key, in `metadata`.
    pub datapath: u32,
    /// The port's tunnel key, in reg14.
    pub port: u32,
}

/// Whose packets a network of the cluster matters to.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Concerned {
    /// Those of all pods.
    Everybody,
    /// Those of the ports on this user-defined network.
    Network(String),
    /// Those of the ports that the rules of this namespace hold for.
    Namespace(String),
}

/// Networks of pods: those of the switches, and those that ovn-kubernetes leaves out of every rule by CIDR. A
/// user-defined network concerns its own pods alone: whoever may make such a network chooses its addresses.
pub type PodNetworks = BTreeMap<Concerned, BTreeSet<IpNet>>;

/// Whose an address is inside of the cluster.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Owners {
    /// Whom it concerns that a Service has the address; nobody where no Service has it.
    pub services: BTreeSet<Concerned>,
    /// Likewise for another load balancer that has the address in front.
    pub fronts: BTreeSet<Concerned>,
    /// Whether a node has it.
    pub is_node: bool,
    /// Whether an API server has it.
    pub is_api_server: bool,
}

/// The changes of the cluster's own networks and addresses.
#[derive(Debug)]
pub struct ClusterChanges<Addresses> {
    /// All networks of pods, if they may be others.
    pub pods: Option<PodNetworks>,
    /// The addresses that may have other owners, with their owners now.
    pub addresses: Addresses,
    /// The addresses to which a load balancer may lead now, or may lead no more.
    pub backends: BTreeSet<IpAddr>,
    /// Whether some load balancers cannot be read: any address may be one in front.
    pub are_fronts_unread: bool,
}

/// The rows that have each address.
#[derive(Debug, Default)]
struct AddressIndex(BTreeSet<(IpAddr, RowId)>);

impl AddressIndex {
    /// A row has some addresses no more, and has others now. Adds them to `touched`.
    fn update(
        &mut self,
        id: RowId,
        gone: impl Iterator<Item = IpAddr>,
        new: impl Iterator<Item = IpAddr>,
        touched: &mut BTreeSet<IpAddr>,
    ) {
        for address in gone {
            self.0.remove(&(address, id));
            touched.insert(address);
        }
        for address in new {
            self.0.insert((address, id));
            touched.insert(address);
        }
    }

    /// The addresses of a row are others. Adds those that it had or has alone to `touched`.
    fn replace(
        &mut self,
        id: RowId,
        old: &BTreeSet<IpAddr>,
        new: &BTreeSet<IpAddr>,
        touched: &mut BTreeSet<IpAddr>,
    ) {
        let [gone, come] = [old.difference(new), new.difference(old)];
        self.update(id, gone.copied(), come.copied(), touched);
    }

    fn ids(&self, address: IpAddr) -> impl Iterator<Item = RowId> {
        let [first, last] = [u128::MIN, u128::MAX].map(|bits| (address, RowId::new(bits)));
        self.0.range(first..=last).map(|(_, id)| *id)
    }

    fn has(&self, address: IpAddr) -> bool {
        self.ids(address).next().is_some()
    }
}

/// The addresses that are missing in a sorted list.
fn missing(addresses: &[IpAddr], sorted: &[IpAddr]) -> impl Iterator<Item = IpAddr> {
    let addresses = addresses.iter().copied();
    addresses.filter(|address| sorted.binary_search(address).is_err())
}

/// Addresses that are taken in parts.
#[derive(Debug, Default)]
struct TakenInTurns {
    addresses: BTreeSet<IpAddr>,
    /// The next part begins behind this one: addresses that come again and again keep no other one waiting.
    last: Option<IpAddr>,
}

impl TakenInTurns {
    /// Takes the next ones, so many at most.
    fn take(&mut self, most: usize) -> BTreeSet<IpAddr> {
        let Self { addresses, last } = self;
        if addresses.len() <= most {
            return std::mem::take(addresses);
        }
        let behind = (last.map_or(Unbounded, Excluded), Unbounded);
        let turn = addresses.range(behind).chain(&*addresses);
        let part: Vec<IpAddr> = turn.take(most).copied().collect();
        *last = part.last().copied();
        for address in &part {
            addresses.remove(address);
        }
        part.into_iter().collect()
    }
}

/// The namespaces and ports that an update of the databases concerns.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct Touched {
    /// Namespaces whose ACLs or logical flows changed, with the rows of these ACLs.
    pub namespaces: BTreeMap<String, BTreeSet<RowId>>,
    /// Logical ports whose tunnel keys or port groups changed.
    pub ports: BTreeSet<String>,
}

impl Touched {
    fn touch_acl(&mut self, namespace: &str, id: RowId) {
        match self.namespaces.get_mut(namespace) {
            Some(ids) => {
                ids.insert(id);
            }
            None => {
                self.namespaces.insert(namespace.to_owned(), [id].into());
            }
        }
    }
}

/// An ACL of an EgressFirewall, and its logical flows.
#[derive(Clone, Debug)]
pub struct AclRow<'a> {
    /// The ACL.
    pub acl: &'a Acl,
    /// Whether it is in the NB database. If not, only its logical flows are left.
    pub is_present: bool,
    /// Its logical flows.
    pub flows: Vec<(RowId, &'a LogicalFlow)>,
}

/// The rows of the NB and SB databases.
#[derive(Debug, Default)]
pub struct OvnView {
    acls: Table<Acl>,
    /// ACLs that are gone from the NB database, while the SB database still has their logical
    /// flows: OVN enforces an ACL as long as its logical flows are there.
    departed: BTreeMap<RowId, Acl>,
    acls_by_namespace: Index<Arc<str>>,
    /// The same for the ACLs that have logical flows.
    enforced_by_namespace: Index<Arc<str>>,
    /// The priorities of ACLs, and how many have each.
    priorities: BTreeMap<u16, usize>,
    /// Whether there may be other priorities than when last asked.
    priorities_changed: bool,
    switches: Table<LogicalSwitch>,
    gateway_ports: Table<GatewayPort>,
    load_balancers: Table<LoadBalancer>,
    template_variables: Table<TemplateVariables>,
    unread_fronts: Table<UnreadFronts>,
    node_sets: Table<NodeSet>,
    encapsulations: Table<Encapsulation>,
    /// What ACLs leave out ([`exclusions`]), and the number of ACLs that do. Not by network: a user-defined network can
    /// have 400 (`Layer3Config` in ovn-kubernetes' go-controller/pkg/crd/userdefinednetwork/v1/shared.go), which each
    /// ACL of its namespaces repeats.
    excluded: BTreeMap<(Concerned, String), usize>,
    /// The load balancers that have each address in front.
    fronts_at: AddressIndex,
    template_variables_at: AddressIndex,
    unread_fronts_changed: bool,
    /// The load balancers that lead to each address.
    backends_at: AddressIndex,
    // Of three tables: rows of two may have one id.
    node_sets_at: AddressIndex,
    gateways_at: AddressIndex,
    encapsulations_at: AddressIndex,
    pod_networks_changed: bool,
    /// The addresses whose owners may be others than when last asked.
    touched_addresses: TakenInTurns,
    /// The addresses to which other load balancers may lead than when last asked.
    touched_backends: TakenInTurns,
    primary_networks_changed: bool,
    datapaths: Table<Datapath>,
    bindings: Table<PortBinding>,
    bindings_by_port: Index<String>,
    bindings_by_namespace: Index<String>,
    groups: Table<PortGroup>,
    groups_by_port: Index<String>,
    flows: Table<LogicalFlow>,
    flows_by_hint: Index<u32>,
}

impl OvnView {
    /// Applies a change of the NB database.
    pub fn apply_nb(&mut self, update: NbUpdate) -> Touched {
        let mut touched = Touched::default();
        let switches_changed = !self
            .switches
            .apply(update.reset, update.switches)
            .is_empty();
        self.primary_networks_changed |= switches_changed || update.reset;
        self.pod_networks_changed |= switches_changed;
        let none = BTreeSet::new();
        let touched_addresses = &mut self.touched_addresses.addresses;
        let gateway_ports = &mut self.gateway_ports;
        gateway_ports.apply_each(update.reset, update.gateway_ports, |id, old, new| {
            let old = old.as_ref().map_or(&none, |port| &port.addresses);
            let new = new.map_or(&none, |port| &port.addresses);
            self.gateways_at.replace(id, old, new, touched_addresses);
        });
        let node_sets = &mut self.node_sets;
        node_sets.apply_each(update.reset, update.node_sets, |id, old, new| {
            let old = old.as_ref().map_or(&none, |set| &set.addresses);
            let new = new.map_or(&none, |set| &set.addresses);
            self.node_sets_at.replace(id, old, new, touched_addresses);
        });
        let load_balancers = &mut self.load_balancers;
        load_balancers.apply_each(update.reset, update.load_balancers, |id, old, new| {
            let is_others = match (&old, new) {
                (Some(old), Some(new)) => {
                    (&old.service, &old.network) != (&new.service, &new.network)
                }
                _ => false,
            };
            let mut rows = old.iter().chain(new);
            let is_of_api_server = rows.any(LoadBalancer::is_of_api_server);
            let [had, has] =
                [old.as_ref(), new].map(|row| row.map_or(&[][..], |row| &row.backends));
            let [gone, come] = [missing(had, has), missing(has, had)];
            let touched_backends = &mut self.touched_backends.addresses;
            self.backends_at.update(id, gone, come, touched_backends);
            let old = old.as_ref().map_or(&none, |row| &row.addresses);
            let new = new.map_or(&none, |row| &row.addresses);
            self.fronts_at.replace(id, old, new, touched_addresses);
            if is_others {
                touched_addresses.extend(new);
            }
            if is_of_api_server {
                touched_addresses.extend(had.iter().chain(has));
            }
        });
        let variables = &mut self.template_variables;
        variables.apply_each(update.reset, update.template_variables, |id, old, new| {
            let old = old.as_ref().map_or(&none, |row| &row.addresses);
            let new = new.map_or(&none, |row| &row.addresses);
            let index = &mut self.template_variables_at;
            index.replace(id, old, new, touched_addresses);
        });
        let unread = self.unread_fronts.apply(update.reset, update.unread_fronts);
        self.unread_fronts_changed |= !unread.is_empty();
        let acls = self.share_namespaces(update.acls);
        let mut table = std::mem::take(&mut self.acls);
        table.apply_each(update.reset, acls, |id, old, new| {
            self.acl_changed(id, old, new, &mut touched);
        });
        self.acls = table;
        touched
    }

    fn acl_changed(
        &mut self,
        id: RowId,
        old: Option<Acl>,
        new: Option<&Acl>,
        touched: &mut Touched,
    ) {
        self.count_excluded(old.as_ref(), new);
        if let Some(acl) = self.departed.remove(&id) {
            self.forget_acl(id, &acl);
        }
        match (old, new) {
            (Some(old), None) if self.flows_by_hint.contains(&id.prefix()) => {
                touched.touch_acl(&old.namespace, id);
                self.departed.insert(id, old);
            }
            (old, new) => {
                // Before the old one is forgotten: most changes leave the priority as it is.
                if let Some(acl) = new {
                    let count = self.priorities.entry(acl.priority).or_insert(0);
                    *count += 1;
                    self.priorities_changed |= *count == 1;
                }
                if let Some(acl) = old {
                    touched.touch_acl(&acl.namespace, id);
                    self.forget_acl(id, &acl);
                }
                if let Some(acl) = new {
                    touched.touch_acl(&acl.namespace, id);
                    let namespace = &acl.namespace;
                    self.acls_by_namespace.add(Arc::clone(namespace), id);
                    if self.flows_by_hint.contains(&id.prefix()) {
                        self.enforced_by_namespace.add(Arc::clone(namespace), id);
                    }
                }
            }
        }
        self.touch_others(id, touched);
    }

    /// Touches the other ACLs whose row ids begin with the same 32 bits: which logical flows are theirs
    /// depends on each other.
    fn touch_others(&self, id: RowId, touched: &mut Touched) {
        for (other, acl) in self.acls_of_hint(id.prefix()) {
            if other != id {
                touched.touch_acl(&acl.namespace, other);
            }
        }
    }

    /// Lets the ACLs of a namespace share its name. A zone has tens of thousands of them.
    fn share_namespaces(&self, mut acls: Changes<Acl>) -> Changes<Acl> {
        let mut names: HashSet<Arc<str>> = HashSet::new();
        for acl in acls.iter_mut().filter_map(|(_, acl)| acl.as_mut()) {
            let known = self.acls_by_namespace.key(&acl.namespace);
            match known.or_else(|| names.get(&acl.namespace)) {
                Some(name) => acl.namespace = Arc::clone(name),
                None => {
                    names.insert(Arc::clone(&acl.namespace));
                }
            }
        }
        acls
    }

    /// Counts the ACLs that leave out the same.
    fn count_excluded(&mut self, old: Option<&Acl>, new: Option<&Acl>) {
        let excluded = |acl: &Acl| {
            let exclusions = exclusions(&acl.matches);
            (!exclusions.is_empty()).then(|| (concerned(acl), exclusions.to_owned()))
        };
        let [old, new] = [old, new].map(|acl| acl.and_then(excluded));
        if old == new {
            return;
        }
        if let Some(new) = new {
            let count = self.excluded.entry(new).or_insert(0);
            *count += 1;
            self.pod_networks_changed |= *count == 1;
        }
        if let Some(old) = old
            && let Some(count) = self.excluded.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.excluded.remove(&old);
                self.pod_networks_changed = true;
            }
        }
    }

    /// The possible changes of the cluster's own networks and addresses since the last call: all of the networks, and
    /// so many addresses of each kind at most. The others wait for a further call.
    pub fn take_cluster_changes(
        &mut self,
        most: usize,
    ) -> Option<ClusterChanges<impl Iterator<Item = (IpAddr, Owners)>>> {
        let is_changed = std::mem::take(&mut self.pod_networks_changed);
        let touched = self.touched_addresses.take(most);
        let backends = self.touched_backends.take(most);
        let unread_changed = std::mem::take(&mut self.unread_fronts_changed);
        if !is_changed && touched.is_empty() && backends.is_empty() && !unread_changed {
            return None;
        }
        let view = &*self;
        Some(ClusterChanges {
            pods: is_changed.then(|| view.pod_networks()),
            addresses: touched
                .into_iter()
                .map(|address| (address, view.owners_of(address))),
            backends,
            are_fronts_unread: view.unread_fronts.iter().next().is_some(),
        })
    }

    /// How many addresses wait for [`OvnView::take_cluster_changes`], of the kind of which more wait.
    pub fn waiting_addresses(&self) -> usize {
        let waiting = [&self.touched_addresses, &self.touched_backends];
        let waiting = waiting.map(|kind| kind.addresses.len());
        waiting.into_iter().max().unwrap_or_default()
    }

    /// The owners of an address that waits, in which they may be others than when last taken.
    pub fn changed_owners(&self, address: IpAddr) -> Option<Owners> {
        let is_touched = self.touched_addresses.addresses.contains(&address);
        is_touched.then(|| self.owners_of(address))
    }

    fn load_balancers_at(&self, address: IpAddr) -> impl Iterator<Item = &LoadBalancer> {
        let ids = self.fronts_at.ids(address);
        ids.filter_map(|id| self.load_balancers.find(id))
    }

    /// The addresses to which the Services at an address lead.
    pub fn backends_behind(&self, address: IpAddr) -> impl Iterator<Item = IpAddr> {
        let rows = self.load_balancers_at(address);
        let rows = rows.filter(|row| row.service.is_some());
        rows.flat_map(|row| row.backends.iter().copied())
    }

    /// The Services, by namespace and name, that have an address; some more than once.
    pub fn services_at(&self, address: IpAddr) -> impl Iterator<Item = &str> {
        let rows = self.load_balancers_at(address);
        rows.filter_map(|row| row.service.as_deref())
    }

    /// Whether a load balancer leads to the address.
    pub fn is_backend(&self, address: IpAddr) -> bool {
        self.backends_at.has(address)
    }

    /// Whether the Service of the API server leads to the address.
    fn leads_to_api_server(&self, address: IpAddr) -> bool {
        let mut ids = self.backends_at.ids(address);
        ids.any(|id| {
            let row = self.load_balancers.find(id);
            row.is_some_and(LoadBalancer::is_of_api_server)
        })
    }

    fn pod_networks(&self) -> PodNetworks {
        let mut pods = PodNetworks::new();
        for (_, switch) in self.switches.iter() {
            let networks = pods.entry(on(switch.network.as_ref())).or_default();
            networks.extend(switch.networks.iter().copied());
        }
        for (concerned, exclusions) in self.excluded.keys() {
            let networks = pods.entry(concerned.clone()).or_default();
            networks.extend(excluded_networks(exclusions));
        }
        pods.retain(|_, networks| !networks.is_empty());
        pods
    }

    fn owners_of(&self, address: IpAddr) -> Owners {
        let rows = |is_service| {
            let rows = self.load_balancers_at(address);
            let rows = rows.filter(move |row| row.service.is_some() == is_service);
            rows.map(|row| on(row.network.as_ref()))
        };
        let is_variable = self.template_variables_at.has(address);
        Owners {
            services: rows(true).collect(),
            fronts: rows(false)
                .chain(is_variable.then_some(Concerned::Everybody))
                .collect(),
            is_node: self.gateways_at.has(address)
                || self.encapsulations_at.has(address)
                || self.node_sets_at.has(address),
            is_api_server: self.leads_to_api_server(address),
        }
    }

    /// The user-defined networks that are the primary ones of their pods, if they may be others than
    /// when last asked.
    pub fn take_changed_primary_networks(&mut self) -> Option<BTreeSet<String>> {
        if !std::mem::take(&mut self.primary_networks_changed) {
            return None;
        }
        let switches = self.switches.iter();
        let primary = switches.filter(|(_, switch)| switch.is_primary);
        let networks = primary.filter_map(|(_, switch)| switch.network.clone());
        Some(networks.collect())
    }

    fn forget_acl(&mut self, id: RowId, acl: &Acl) {
        if let Some(count) = self.priorities.get_mut(&acl.priority) {
            *count -= 1;
            if *count == 0 {
                self.priorities.remove(&acl.priority);
                self.priorities_changed = true;
            }
        }
        self.acls_by_namespace.remove(&acl.namespace, id);
        self.enforced_by_namespace.remove(&acl.namespace, id);
    }

    /// Applies a change of the SB database.
    pub fn apply_sb(&mut self, update: SbUpdate) -> Touched {
        let SbUpdate {
            reset,
            datapaths,
            port_bindings,
            port_groups,
            logical_flows,
            encapsulations,
        } = update;
        let mut touched = Touched::default();
        for Changed { id, old, new } in self.encapsulations.apply(reset, encapsulations) {
            let [old, new] = [old, new].map(|row| row.map(|row| row.ip).into_iter().collect());
            let touched = &mut self.touched_addresses.addresses;
            self.encapsulations_at.replace(id, &old, &new, touched);
        }
        let datapaths = self.datapaths.apply(reset, datapaths);
        if !datapaths.is_empty() {
            let changed: BTreeSet<RowId> = datapaths.iter().map(|change| change.id).collect();
            touched.ports.extend(
                self.bindings
                    .iter()
                    .filter(|(_, binding)| changed.contains(&binding.datapath))
                    .map(|(_, binding)| binding.logical_port.clone()),
            );
        }
        for Changed { id, old, new } in self.bindings.apply(reset, port_bindings) {
            if let Some(binding) = old {
                self.bindings_by_port.remove(&binding.logical_port, id);
                touched.ports.insert(binding.logical_port);
                if let Some(namespace) = binding.namespace {
                    self.bindings_by_namespace.remove(&namespace, id);
                    // The last of its ports.
                    if !self.has_ports_of(&namespace) {
                        touched.namespaces.entry(namespace).or_default();
                    }
                }
            }
            if let Some(binding) = new {
                self.bindings_by_port.add(binding.logical_port.clone(), id);
                touched.ports.insert(binding.logical_port);
                if let Some(namespace) = binding.namespace {
                    // The first of its ports.
                    if !self.has_ports_of(&namespace) {
                        touched.namespaces.entry(namespace.clone()).or_default();
                    }
                    self.bindings_by_namespace.add(namespace, id);
                }
            }
        }
        for Changed { id, old, new } in self.groups.apply(reset, port_groups) {
            let old = old.map(|group| group.ports).unwrap_or_default();
            let new = new.map(|group| group.ports).unwrap_or_default();
            for gone in old.difference(&new) {
                self.groups_by_port.remove(gone, id);
            }
            for added in new.difference(&old) {
                self.groups_by_port.add(added.clone(), id);
            }
            touched
                .ports
                .extend(old.symmetric_difference(&new).cloned());
        }
        for Changed { id, old, new } in self.flows.apply(reset, logical_flows) {
            for (flow, is_new) in old
                .iter()
                .map(|f| (f, false))
                .chain(new.iter().map(|f| (f, true)))
            {
                let Some(hint) = flow.stage_hint else {
                    continue;
                };
                if is_new {
                    self.flows_by_hint.add(hint, id);
                } else {
                    self.flows_by_hint.remove(&hint, id);
                }
                let acls = self.acls_of_hint(hint);
                let acls = acls.map(|(id, acl)| (id, Arc::clone(&acl.namespace)));
                for (id, namespace) in acls.collect::<Vec<_>>() {
                    touched.touch_acl(&namespace, id);
                    match self.flows_by_hint.contains(&hint) {
                        true => self.enforced_by_namespace.add(namespace, id),
                        false => self.enforced_by_namespace.remove(&namespace, id),
                    }
                }
            }
        }
        let over: Vec<RowId> = self
            .departed
            .keys()
            .copied()
            .filter(|id| !self.flows_by_hint.contains(&id.prefix()))
            .collect();
        for id in over {
            if let Some(acl) = self.departed.remove(&id) {
                self.forget_acl(id, &acl);
                self.touch_others(id, &mut touched);
            }
        }
        touched
    }

    /// The ACLs that a stage hint may name.
    pub fn acls_of_hint(&self, hint: u32) -> impl Iterator<Item = (RowId, &Acl)> {
        let departed = self.departed.range(RowId::beginning_with(hint));
        let departed = departed.map(|(id, acl)| (*id, acl));
        self.acls.beginning_with(hint).chain(departed)
    }

    /// The rows of the ACLs of a namespace's EgressFirewall.
    pub fn acls_of(&self, namespace: &str) -> impl Iterator<Item = RowId> {
        self.acls_by_namespace.ids(namespace)
    }

    /// An ACL of a namespace's EgressFirewall, with its logical flows.
    pub fn acl_in(&self, namespace: &str, id: RowId) -> Option<AclRow<'_>> {
        let present = self.acls.find(id);
        let acl = present.or_else(|| self.departed.get(&id))?;
        if &*acl.namespace != namespace {
            return None;
        }
        // The row ids of two ACLs can begin with the same 32 bits. The match then decides.
        let is_alone = self.acls_of_hint(id.prefix()).count() == 1;
        let flows = self
            .flows_by_hint
            .ids(&id.prefix())
            .filter_map(|id| Some((id, self.flows.find(id)?)))
            .filter(|(_, flow)| is_alone || acl_match(flow) == Some(&acl.matches))
            .collect();
        Some(AclRow {
            acl,
            is_present: present.is_some(),
            flows,
        })
    }

    /// The priorities that ACLs of EgressFirewalls have, if they may be others than when last asked.
    pub fn take_changed_priorities(&mut self) -> Option<impl Iterator<Item = u16>> {
        std::mem::take(&mut self.priorities_changed).then(|| self.priorities.keys().copied())
    }

    /// Row ids of the watched logical flows.
    pub fn logical_flows(&self) -> impl Iterator<Item = (RowId, &LogicalFlow)> {
        self.flows.iter()
    }

    /// The logical flows whose OpenFlow flows have this cookie.
    pub fn flows_of_cookie(&self, cookie: u32) -> impl Iterator<Item = &LogicalFlow> {
        self.flows.beginning_with(cookie).map(|(_, flow)| flow)
    }

    /// Whether this node's OVN has a pod of the namespace, or enforces rules for one: a logical port may not
    /// say its namespace.
    pub fn is_here(&self, namespace: &str) -> bool {
        let mut enforced = self.enforced_by_namespace.ids(namespace);
        self.has_ports_of(namespace) || enforced.next().is_some()
    }

    /// Whether this node's OVN has a pod of the namespace.
    pub fn has_ports_of(&self, namespace: &str) -> bool {
        self.bindings_by_namespace.ids(namespace).next().is_some()
    }

    /// The tunnel keys of a logical port.
    pub fn tunnel_keys(&self, logical_port: &str) -> Option<TunnelKeys> {
        let binding = self
            .bindings_by_port
            .ids(logical_port)
            .find_map(|id| self.bindings.find(id))?;
        Some(TunnelKeys {
            datapath: self.datapaths.find(binding.datapath)?.tunnel_key,
            port: binding.tunnel_key,
        })
    }

    /// Whether the logical port is in the SB database.
    pub fn is_bound(&self, logical_port: &str) -> bool {
        self.bindings_by_port.ids(logical_port).next().is_some()
    }

    /// The namespace of the pod that a logical port belongs to.
    pub fn namespace_of(&self, logical_port: &str) -> Option<&str> {
        self.bindings_by_port
            .ids(logical_port)
            .find_map(|id| self.bindings.find(id)?.namespace.as_deref())
    }

    /// The NB names of the port groups that hold a logical port.
    pub fn groups_of<'a>(&'a self, logical_port: &str) -> impl Iterator<Item = &'a str> {
        self.groups_by_port
            .ids(logical_port)
            .filter_map(|id| Some(self.groups.find(id)?.name.as_str()))
    }
}

/// Whom the networks and Services of a user-defined network concern, or those of the default network.
fn on(network: Option<&String>) -> Concerned {
    match network {
        Some(network) => Concerned::Network(network.clone()),
        None => Concerned::Everybody,
    }
}

/// Whom the networks concern that an ACL leaves out. Those of an EgressFirewall on the default network are
/// the cluster's; another's are those of its namespace's network.
fn concerned(acl: &Acl) -> Concerned {
    let group = default_port_group(&acl.namespace);
    let mut words = acl.matches.split(|c: char| !c.is_ascii_alphanumeric());
    match words.any(|word| word == group) {
        true => Concerned::Everybody,
        false => Concerned::Namespace(acl.namespace.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn id(bits: u128) -> RowId {
        RowId::new(bits)
    }

    fn binding(port: &str, datapath: u128, key: u32) -> PortBinding {
        PortBinding {
            logical_port: port.into(),
            datapath: id(datapath),
            tunnel_key: key,
            namespace: None,
        }
    }

    /// Somebody touches low addresses again and again.
    #[test]
    fn addresses_that_come_again_keep_no_other_one_waiting() {
        let at = |host| IpAddr::from([10, 0, 0, host]);
        let mut waiting = TakenInTurns::default();
        waiting.addresses.extend((0..10).map(at));
        let mut taken = BTreeSet::new();
        for _ in 0..4 {
            taken.extend(waiting.take(3));
            waiting.addresses.extend((0..5).map(at));
        }
        assert_eq!(taken, (0..10).map(at).collect());
        assert_eq!(waiting.take(5).len(), 5, "all of the rest");
    }

    #[test]
    fn a_reset_removes_what_it_does_not_name() {
        let mut table = Table::default();
        table.apply(true, vec![(id(1), Some("a")), (id(2), Some("b"))]);
        let changed = table.apply(true, vec![(id(2), Some("b")), (id(3), Some("c"))]);
        let ids: Vec<_> = changed.iter().map(|c| (c.id, c.new)).collect();
        assert_eq!(ids, [(id(1), None), (id(3), Some("c"))]);
    }

    #[test]
    fn the_priorities_are_others_only_when_one_comes_or_goes() {
        let mut view = OvnView::default();
        let mut change = |priority, matches: &str| {
            let acl = Acl {
                namespace: "ns1".into(),
                rule_index: 0,
                priority,
                matches: matches.into(),
                action: "allow".into(),
            };
            view.apply_nb(NbUpdate {
                acls: vec![(id(1), Some(acl))],
                ..NbUpdate::default()
            });
            let priorities = view.take_changed_priorities();
            priorities.map(|priorities| priorities.collect::<Vec<_>>())
        };
        assert_eq!(change(10_000, "a"), Some(vec![10_000]));
        assert_eq!(change(10_000, "b"), None);
        assert_eq!(change(9_999, "b"), Some(vec![9_999]));
    }

    #[test]
    fn a_port_has_tunnel_keys_once_binding_and_datapath_are_known() {
        let mut view = OvnView::default();
        let touched = view.apply_sb(SbUpdate {
            port_bindings: vec![(id(1), Some(binding("ns1_p1", 9, 4)))],
            ..SbUpdate::default()
        });
        assert_eq!(touched.ports, ["ns1_p1".to_owned()].into());
        assert_eq!(view.tunnel_keys("ns1_p1"), None);
        let touched = view.apply_sb(SbUpdate {
            datapaths: vec![(id(9), Some(Datapath { tunnel_key: 3 }))],
            ..SbUpdate::default()
        });
        assert_eq!(touched.ports, ["ns1_p1".to_owned()].into());
        assert_eq!(
            view.tunnel_keys("ns1_p1"),
            Some(TunnelKeys {
                datapath: 3,
                port: 4
            })
        );
    }

    #[test]
    fn group_membership_follows_the_rows() {
        let mut view = OvnView::default();
        let group = |ports: &[&str]| PortGroup {
            name: "a7".into(),
            ports: ports.iter().map(|&port| port.into()).collect(),
        };
        let update = |ports: &[&str]| SbUpdate {
            port_groups: vec![(id(1), Some(group(ports)))],
            ..SbUpdate::default()
        };
        view.apply_sb(update(&["p1", "p2"]));
        let touched = view.apply_sb(update(&["p2", "p3"]));
        assert_eq!(touched.ports, ["p1".to_owned(), "p3".to_owned()].into());
        let groups = |port: &str| view.groups_of(port).collect::<Vec<_>>();
        assert_eq!(
            (groups("p1"), groups("p2"), groups("p3")),
            (vec![], vec!["a7"], vec!["a7"])
        );
    }
}
