#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use dnsflow_core::ovn::rows::RowId;
use dnsflow_ovsdb::{
    OvsdbCounters,
    fixtures::{self, DUAL_RESOLVER_NB, UDN_NB, V4_NB},
};
use proptest::{collection::vec, option, prelude::*};
use serde_json::{Value, json};

use super::*;

/// What the server's condition lets through.
fn ours(_: &str, row: &Value) -> bool {
    row["external_ids"]["k8s.ovn.org/owner-type"] == "EgressFirewall"
}

fn acls(text: &str) -> Vec<(RowId, Acl)> {
    let replica = fixtures::replica(&DATABASE, text, ours);
    let counters = Arc::<OvsdbCounters>::default();
    let update = whole(
        &replica,
        &mut Converter::new(DATABASE.name, counters.clone()),
        &mut Balancers::default(),
    );
    assert!(update.reset);
    assert_eq!(counters.rows_skipped.load(Relaxed), 0);
    update
        .acls
        .into_iter()
        .map(|(id, acl)| (id, acl.unwrap()))
        .collect()
}

#[test]
fn the_rules_that_ovn_kubernetes_writes() {
    let acls = acls(V4_NB);
    assert_eq!(acls.len(), 8);
    let (id, first) = acls
        .iter()
        .find(|(_, acl)| &*acl.namespace == "ns1" && acl.rule_index == 0)
        .unwrap();
    assert_eq!(id.to_string(), "32cb9193-de93-4a3e-b594-9d441b70c27f");
    assert_eq!(id.prefix(), 0x32cb_9193);
    assert_eq!(
        *first,
        Acl {
            namespace: "ns1".into(),
            rule_index: 0,
            priority: 10000,
            matches: "(ip4.dst == $a18346816605274050565) && inport == @a9633447981174624809"
                .into(),
            action: "allow".into(),
        }
    );
    for (_, acl) in acls {
        assert_eq!(u32::from(acl.priority), 10000 - acl.rule_index);
    }
}

#[test]
fn user_defined_networks_and_dual_stack_read_the_same_way() {
    for text in [UDN_NB, DUAL_RESOLVER_NB] {
        let acls = acls(text);
        assert!(!acls.is_empty());
        for (_, acl) in acls {
            assert_eq!(u32::from(acl.priority), 10000 - acl.rule_index);
        }
    }
}

#[test]
fn rows_with_unusable_cells_are_left_out_and_counted_and_the_others_stay() {
    let id = |number: u8| RowId::new(u128::from(number)).to_string();
    let row = |ids: Value| json!({"initial": {"external_ids": ["map", ids], "priority": 9999}});
    let mut replica = Replica::new(&DATABASE);
    let rows = json!({"ACL": {
        id(1): row(json!([["k8s.ovn.org/name", "ns"], ["rule-index", "one"]])),
        id(2): row(json!([["k8s.ovn.org/name", "ns"]])),
        id(3): row(json!([["rule-index", "1"]])),
        id(4): row(json!([["k8s.ovn.org/name", "ns"], ["rule-index", "-1"]])),
        id(5): json!({"initial": {
            "external_ids": ["map", [["k8s.ovn.org/name", "ns"], ["rule-index", "1"]]],
            "priority": 65536,
        }}),
        id(6): json!({"initial": {"external_ids": 7}}),
        id(7): row(json!([["k8s.ovn.org/name", "ns"], ["rule-index", "1"]])),
    }});
    replica.apply_value(rows).unwrap();
    let counters = Arc::<OvsdbCounters>::default();
    let update = whole(
        &replica,
        &mut Converter::new(DATABASE.name, counters.clone()),
        &mut Balancers::default(),
    );
    assert_eq!(counters.rows_skipped.load(Relaxed), 6);
    assert_eq!(update.acls.len(), 1);
    assert_eq!(update.acls[0].0, RowId::new(7));
}

#[test]
fn only_rows_that_read_differently_are_told() {
    let mut replica = fixtures::replica(&DATABASE, V4_NB, ours);
    let mut converter = Converter::new(DATABASE.name, Arc::default());
    let id = RowId::new(0x32cb9193_de93_4a3e_b594_9d441b70c27f);
    let mut change = |columns: Value| {
        let changes = replica
            .apply_value(json!({"ACL": {id.to_string(): {"modify": columns}}}))
            .unwrap();
        changed(
            &replica,
            &changes,
            &mut converter,
            &mut Balancers::default(),
        )
    };
    let update = change(json!({"external_ids": ["map", [["unrelated", "x"]]]}));
    assert_eq!(update, NbUpdate::default());
    let update = change(json!({"action": "drop"}));
    let [(found, Some(acl))] = &update.acls[..] else {
        panic!("{update:?}")
    };
    assert_eq!((*found, &acl.action[..]), (id, "drop"));
    // A row that becomes unreadable is gone, and comes back.
    let update = change(json!({"external_ids": ["map", [["rule-index", "x"]]]}));
    assert_eq!(update.acls, [(id, None)]);
    let update = change(json!({"external_ids": ["map", [["rule-index", "5"]]]}));
    assert_eq!(update.acls[0].1.as_ref().unwrap().rule_index, 5);
}

#[test]
fn what_leads_into_the_cluster_is_read_with_the_network_that_it_belongs_to() {
    let is_wanted = |table: &str, row: &Value| table != "ACL" || ours(table, row);
    let replica = fixtures::replica(&DATABASE, UDN_NB, is_wanted);
    let counters = Arc::<OvsdbCounters>::default();
    let update = whole(
        &replica,
        &mut Converter::new(DATABASE.name, counters.clone()),
        &mut Balancers::default(),
    );
    assert_eq!(counters.rows_skipped.load(Relaxed), 0);
    let switches = update.switches.into_iter().filter_map(|(_, switch)| switch);
    let mut pods: Vec<_> = switches
        .filter_map(|switch| Some((switch.network, switch.networks.first()?.to_string())))
        .collect();
    pods.sort_unstable();
    let udn = |name: &str, net: &str| (Some(name.to_owned()), net.to_owned());
    let wanted = [
        (None, "10.244.0.0/24".to_owned()),
        udn("cluster_udn_cudn4", "10.140.0.0/24"),
        udn("cluster_udn_cudn5", "10.150.0.0/16"),
        udn("ns3_udn3", "10.130.0.0/24"),
    ];
    assert_eq!(pods, wanted);
}

#[test]
fn services_and_gateways_that_ovn_kubernetes_writes() {
    let is_wanted = |table: &str, row: &Value| match table {
        "Load_Balancer" => true,
        _ => ours(table, row) || table == "Logical_Router_Port",
    };
    let replica = fixtures::replica(&DATABASE, V4_NB, is_wanted);
    let counters = Arc::<OvsdbCounters>::default();
    let update = whole(
        &replica,
        &mut Converter::new(DATABASE.name, counters.clone()),
        &mut Balancers::default(),
    );
    assert_eq!(counters.rows_skipped.load(Relaxed), 0);
    let services = update.load_balancers.into_iter();
    let services: Vec<_> = services.filter_map(|(_, service)| service).collect();
    assert!(!services.is_empty());
    for service in services {
        assert_eq!(service.service.as_deref(), Some("kube-system/dns-default"));
        assert_eq!(service.addresses, [[10, 96, 0, 10].into()].into());
    }
    let gateways = update.gateway_ports.into_iter();
    let gateways: Vec<_> = gateways.filter_map(|(_, port)| port).collect();
    let [gateway] = &gateways[..] else {
        panic!("one node: {gateways:?}");
    };
    assert_eq!(gateway.addresses, [[172, 18, 0, 2].into()].into());
}

#[test]
fn the_address_sets_of_nodes_are_read_and_not_those_of_a_namespace_of_that_name() {
    let is_wanted = |table: &str, row: &Value| {
        table == "Address_Set" && row["external_ids"]["k8s.ovn.org/name"] == "node-ips"
    };
    let counters = Arc::<OvsdbCounters>::default();
    let sets = |replica: &Replica| {
        let mut converter = Converter::new(DATABASE.name, counters.clone());
        let sets = whole(replica, &mut converter, &mut Balancers::default())
            .node_sets
            .into_iter();
        let addresses = sets.filter_map(|(_, set)| Some(set?.addresses));
        addresses.flatten().collect::<BTreeSet<_>>()
    };
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    for (text, wanted) in [
        (V4_NB, &["172.18.0.2"][..]),
        (DUAL_RESOLVER_NB, &["172.18.0.2", "fd00:172:18::2"]),
    ] {
        let replica = fixtures::replica(&DATABASE, text, is_wanted);
        let wanted = wanted.iter().map(|text| address(text)).collect();
        assert_eq!(sets(&replica), wanted);
    }
    let id = |number: u8| RowId::new(u128::from(number)).to_string();
    let row = |owner: &str, addresses: Value| {
        let ids = json!(["map", [["k8s.ovn.org/owner-type", owner]]]);
        json!({"initial": {"addresses": ["set", addresses], "external_ids": ids}})
    };
    let mut replica = Replica::new(&DATABASE);
    let rows = json!({"Address_Set": {
        id(1): row("EgressIP", json!(["192.0.2.1", "2001:db8::1"])),
        id(2): row("Namespace", json!(["10.244.0.5"])),
        id(3): row("ClusterNodeIPs", json!(["node1"])),
    }});
    replica.apply_value(rows).unwrap();
    let wanted = ["192.0.2.1", "2001:db8::1"].map(address).into();
    assert_eq!(sets(&replica), wanted);
    assert_eq!(counters.rows_skipped.load(Relaxed), 1);
}

fn id(number: u8) -> String {
    RowId::new(u128::from(number)).to_string()
}

fn balancer(name: &str, ids: Value, vips: Value) -> Value {
    json!({"initial": {"name": name, "vips": ["map", vips], "external_ids": ["map", ids]}})
}

fn of_service() -> Value {
    json!([
        ["k8s.ovn.org/owner", "ns1/web"],
        ["k8s.ovn.org/kind", "Service"]
    ])
}

/// What is read of these rows, all of which can be.
fn read(rows: Value) -> (Replica, NbUpdate) {
    let mut replica = Replica::new(&DATABASE);
    replica.apply_value(rows).unwrap();
    let counters = Arc::<OvsdbCounters>::default();
    let update = whole(
        &replica,
        &mut Converter::new(DATABASE.name, counters.clone()),
        &mut Balancers::default(),
    );
    assert_eq!(counters.rows_skipped.load(Relaxed), 0);
    (replica, update)
}

fn set(addresses: &[&str]) -> BTreeSet<IpAddr> {
    let addresses = addresses.iter();
    addresses.map(|text| text.parse().unwrap()).collect()
}

#[test]
fn addresses_of_load_balancers_come_with_ports_and_without() {
    let rows = json!({"Load_Balancer": {
        id(1): balancer("Service_ns1/web_TCP_cluster", of_service(), json!([
            ["10.96.0.7:80", "10.244.0.3:8080"], ["[fd00:10:96::7]:80", ""], ["198.51.100.7", ""],
            ["[fd00:10:96::8]", ""], ["web:80", ""],
        ])),
        id(2): balancer("Service_ns1/web_TCP_node_router_node1", of_service(), json!([["198.51.100.8:80", ""]])),
        id(4): balancer("Service_ns1/web_TCP_node_switch_template_IPv4", of_service(), json!([
            ["^NODEIP_IPv4_0:31080", "203.0.113.7:80,^Service_ns1_web_TCP_80_node_local"],
        ])),
    }});
    let (_, update) = read(rows);
    let [(_, Some(service)), (_, Some(template))] = &update.load_balancers[..] else {
        panic!("{:?}", update.load_balancers);
    };
    assert_eq!(*service.backends, ["10.244.0.3".parse::<IpAddr>().unwrap()]);
    assert!(template.addresses.is_empty());
    assert_eq!(
        *template.backends,
        ["203.0.113.7".parse::<IpAddr>().unwrap()]
    );
    let addresses = [
        "10.96.0.7",
        "198.51.100.7",
        "fd00:10:96::7",
        "fd00:10:96::8",
    ];
    assert_eq!(service.addresses, set(&addresses));
}

#[test]
fn load_balancers_that_are_nobodys_services_are_read() {
    let network = json!([
        ["k8s.ovn.org/network", "udn1"],
        ["k8s.ovn.org/owner", "ns1/web"]
    ]);
    let rows = json!({"Load_Balancer": {
        id(1): balancer("a_node_router_", json!([]), json!([["192.0.2.80:80", "203.0.113.3:80"]])),
        id(2): balancer("", network, json!([["192.0.2.81:80", ""]])),
    }});
    let (_, update) = read(rows);
    let rows = update
        .load_balancers
        .into_iter()
        .map(|(_, row)| row.unwrap());
    let rows: Vec<_> = rows
        .map(|row| (row.service, row.network, row.addresses))
        .collect();
    let udn1 = Some("udn1".to_owned());
    assert_eq!(
        rows,
        [
            (None, None, set(&["192.0.2.80"])),
            (None, udn1, set(&["192.0.2.81"])),
        ]
    );
}

/// Variables for backends have ports.
#[test]
fn addresses_without_ports_in_template_variables_may_be_in_front() {
    let variables = |pairs: Value| json!({"variables": ["map", pairs]});
    let table =
        |row: &str, pairs: Value| json!({"Chassis_Template_Var": {id(1): {row: variables(pairs)}}});
    let pods = json!([
        "Service_ns1_web_TCP_80_node_local",
        "10.244.0.3:8080,10.244.0.4:8080"
    ]);
    let (mut replica, update) = read(table(
        "initial",
        json!([
            ["NODEIP_IPv4_0", "172.18.0.2"],
            ["NODEIP_IPv6_0", "fd00:172:18::2"],
            pods,
            ["empty", ""],
        ]),
    ));
    let found = |update: NbUpdate| {
        let rows = update.template_variables.into_iter();
        let addresses = rows.filter_map(|(_, row)| Some(row?.addresses));
        addresses.flatten().collect::<BTreeSet<_>>()
    };
    assert_eq!(found(update), set(&["172.18.0.2", "fd00:172:18::2"]));
    // One that was left out gets an address, one loses its own, and one that was left out goes.
    let mut change = |pairs: Value| {
        replica.apply_value(table("modify", pairs)).unwrap();
        let counters = Arc::<OvsdbCounters>::default();
        found(whole(
            &replica,
            &mut Converter::new(DATABASE.name, counters),
            &mut Balancers::default(),
        ))
    };
    let changed = change(json!([
        ["empty", "172.18.0.3"],
        ["NODEIP_IPv6_0", "10.244.0.5:80"],
        pods,
    ]));
    assert_eq!(changed, set(&["172.18.0.2", "172.18.0.3"]));
    let changed = change(json!([
        ["NODEIP_IPv4_0", "172.18.0.2"],
        ["NODEIP_IPv6_0", "fd00:172:18::2"]
    ]));
    assert_eq!(changed, set(&["172.18.0.3", "fd00:172:18::2"]));
}

/// What the core knows of load balancers: the addresses of each, and those that cannot be read.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Known {
    addresses: BTreeMap<RowId, usize>,
    unread: BTreeSet<RowId>,
}

impl Known {
    fn apply(&mut self, update: NbUpdate) {
        for (id, row) in update.load_balancers {
            match row {
                Some(row) => self
                    .addresses
                    .insert(id, row.addresses.len() + row.backends.len()),
                None => self.addresses.remove(&id),
            };
        }
        for (id, unread) in update.unread_fronts {
            match unread {
                Some(UnreadFronts) => self.unread.insert(id),
                None => self.unread.remove(&id),
            };
        }
    }
}

/// The most addresses, in these tests.
const MAX: usize = 8;

/// A load balancer of a namespace, with so many addresses in front and one behind, or one that cannot be read.
type Balancer = Option<(u8, u8)>;

fn row_of(number: u8, balancer: Balancer) -> Value {
    let Some((namespace, addresses)) = balancer else {
        return json!({"initial": {"vips": 7}});
    };
    let vip = |last| json!([format!("203.0.{number}.{last}:80"), "198.51.100.1:80"]);
    let vips: Vec<_> = (0..addresses).map(vip).collect();
    let ids = json!([
        ["k8s.ovn.org/owner", format!("ns{namespace}/web{number}")],
        ["k8s.ovn.org/kind", "Service"]
    ]);
    self::balancer("web", ids, json!(vips))
}

proptest! {
    /// Whatever has come and gone, the core knows no more addresses than there is room for, and of each other row that
    /// it is not read. It knows the rows that it would know if they were read anew, but for those that were left out and
    /// would hardly have room.
    #[test]
    fn load_balancers_without_room_are_left_out_as_unread(
        steps in vec((0..6u8, option::of(option::weighted(0.8, (0..3u8, 0..6u8)))), 1..20),
    ) {
        let mut replica = Replica::new(&DATABASE);
        let mut converter = Converter::new(DATABASE.name, Arc::default());
        let mut balancers = Balancers::limited_to(MAX);
        let mut known = Known::default();
        let mut rows = BTreeSet::new();
        for (number, row) in steps {
            let mut apply = |update: Value| {
                replica.apply_value(json!({"Load_Balancer": {id(number): update}})).unwrap()
            };
            let mut changes = Vec::new();
            if rows.remove(&number) {
                changes.extend(apply(json!({"delete": null})));
            }
            if let Some(balancer) = row {
                changes.extend(apply(row_of(number, balancer)));
                rows.insert(number);
            }
            known.apply(changed(&replica, &changes, &mut converter, &mut balancers));
            let [anew, with_less_room] = [MAX, MAX / 4 * 3].map(|max| {
                let mut anew = Known::default();
                anew.apply(whole(&replica, &mut converter, &mut Balancers::limited_to(max)));
                anew
            });
            // What was left out comes where it would have room among less.
            prop_assert!(anew.unread.is_subset(&known.unread));
            prop_assert!(known.unread.is_subset(&with_less_room.unread));
            for (id, addresses) in &known.addresses {
                prop_assert_eq!(anew.addresses.get(id), Some(addresses));
            }
            let all: usize = known.addresses.values().sum();
            prop_assert!(all <= MAX, "{} addresses", all);
            let mut told: BTreeSet<_> = known.addresses.keys().copied().collect();
            prop_assert!(told.is_disjoint(&known.unread));
            told.extend(&known.unread);
            prop_assert_eq!(told, rows.iter().map(|number| RowId::new(u128::from(*number))).collect());
        }
    }
}

/// A load balancer with five addresses, behind and in front, does not come and go with an address of another one.
#[test]
fn a_load_balancer_that_was_left_out_comes_when_there_is_more_room() {
    let mut replica = Replica::new(&DATABASE);
    let mut converter = Converter::new(DATABASE.name, Arc::default());
    let mut balancers = Balancers::limited_to(MAX);
    let mut known = Known::default();
    let rows = json!({id(1): row_of(1, Some((1, 4)))});
    replica.apply_value(json!({"Load_Balancer": rows})).unwrap();
    known.apply(whole(&replica, &mut converter, &mut balancers));
    for (others, is_left_out) in [(3, false), (4, true), (3, true), (2, true), (1, false)] {
        let other = row_of(2, Some((2, others - 1)));
        let changes = replica.apply_value(json!({"Load_Balancer": {id(2): other}}));
        let changes = changes.unwrap();
        known.apply(changed(&replica, &changes, &mut converter, &mut balancers));
        assert_eq!(
            known.unread.contains(&RowId::new(1)),
            is_left_out,
            "{others} others"
        );
        let update = json!({"Load_Balancer": {id(2): {"delete": null}}});
        replica.apply_value(update).unwrap();
    }
}

#[test]
fn a_load_balancer_without_room_is_counted() {
    let mut replica = Replica::new(&DATABASE);
    let rows = [(1, (1, 5)), (2, (1, 6)), (3, (2, 1))];
    let rows = rows.map(|(number, row)| (id(number), row_of(number, Some(row))));
    let rows: BTreeMap<_, _> = rows.into();
    replica.apply_value(json!({"Load_Balancer": rows})).unwrap();
    let counters = Arc::<OvsdbCounters>::default();
    let mut converter = Converter::new(DATABASE.name, counters.clone());
    let mut known = Known::default();
    known.apply(whole(
        &replica,
        &mut converter,
        &mut Balancers::limited_to(MAX),
    ));
    // Of the namespace that has most, the largest.
    assert_eq!(known.unread, [RowId::new(2)].into());
    assert_eq!(counters.rows_skipped.load(Relaxed), 1);
}
