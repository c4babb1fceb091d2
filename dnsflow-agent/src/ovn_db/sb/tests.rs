#![allow(clippy::unwrap_used)]

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

use dnsflow_ovsdb::{
    OvsdbCounters, Uuid,
    fixtures::{self, SOUTHBOUND, Transcript, UDN_SB, V4_SB},
    session::{Event, Session},
};
use serde_json::{Value, json};

use super::*;

fn converter() -> (Converter, Arc<OvsdbCounters>) {
    let counters = Arc::<OvsdbCounters>::default();
    (Converter::new(DATABASE.name, counters.clone()), counters)
}

#[test]
fn the_ports_and_groups_that_ovn_northd_writes() {
    let replica = fixtures::replica(&DATABASE, V4_SB, |table, row| {
        table != "Port_Binding" || row.get("type").is_none()
    });
    let (mut converter, counters) = converter();
    let update = whole(&replica, &mut converter);
    assert_eq!(counters.rows_skipped.load(Relaxed), 0);
    assert_eq!(update.datapaths.len(), 6);
    assert_eq!(update.port_groups.len(), 5);
    let (_, port) = update
        .port_bindings
        .iter()
        .find(|(_, port)| port.as_ref().unwrap().logical_port == "ns1_p1")
        .unwrap();
    let port = port.as_ref().unwrap();
    assert_eq!(
        (port.tunnel_key, port.namespace.as_deref()),
        (4, Some("ns1"))
    );
    let (_, datapath) = update
        .datapaths
        .iter()
        .find(|(id, _)| *id == port.datapath)
        .unwrap();
    assert_eq!(datapath.as_ref().unwrap().tunnel_key, 3);
    let groups: Vec<&PortGroup> = update
        .port_groups
        .iter()
        .filter_map(|(_, group)| group.as_ref())
        .collect();
    assert!(groups.contains(&&PortGroup {
        name: "a9633447981174624809".into(),
        ports: ["ns1_p1", "ns1_p2"].map(str::to_owned).into(),
    }));
}

#[test]
fn port_groups_of_user_defined_networks() {
    let replica = fixtures::replica(&DATABASE, UDN_SB, |table, _| table == "Port_Group");
    let update = whole(&replica, &mut converter().0);
    let groups: Vec<PortGroup> = update
        .port_groups
        .into_iter()
        .filter_map(|(_, group)| group)
        .collect();
    assert!(groups.contains(&PortGroup {
        name: "a3614501052075661832".into(),
        ports: ["ns5.cudn5_ns5_p1".to_owned()].into(),
    }));
}

#[test]
fn the_recorded_conversation_becomes_one_update_for_each_transaction() {
    let mut wanted = conditions();
    wanted.insert(LOGICAL_FLOW, Condition::AnyOf(vec![priority_is(11000)]));
    let mut session = Session::new(&DATABASE, wanted, Instant::now());
    let mut transcript = Transcript::new(SOUTHBOUND);
    let (mut converter, counters) = converter();
    transcript.play(&mut session).unwrap();

    assert_eq!(transcript.play(&mut session).unwrap(), [Event::Synced]);
    let update = whole(session.replica(), &mut converter);
    assert_eq!(
        (
            update.datapaths.len(),
            update.port_bindings.len(),
            update.port_groups.len()
        ),
        (1, 1, 1)
    );
    assert_eq!(
        update.logical_flows.len(),
        2,
        "the one without stage-hint is no ACL's"
    );
    let flow = update.logical_flows[0].1.as_ref().unwrap();
    assert_eq!(
        (flow.pipeline, flow.table_id, flow.priority, flow.stage_hint),
        (Pipeline::Egress, 4, 11000, Some(0x32cb_9193))
    );

    let events = transcript.play(&mut session).unwrap();
    let [Event::Changed(changes)] = &events[..] else {
        panic!("{events:?}")
    };
    let update = changed(session.replica(), changes, &mut converter);
    assert!(!update.reset);
    let ports = &update.port_bindings;
    assert_eq!(
        ports.len(),
        1,
        "an external id that nobody reads is no change"
    );
    assert_eq!(ports[0].1.as_ref().unwrap().logical_port, "ns1_p2");
    assert_eq!(update.port_groups.len(), 1);
    let actions: Vec<Option<&str>> = update
        .logical_flows
        .iter()
        .map(|(_, flow)| flow.as_ref().map(|flow| flow.actions.as_str()))
        .collect();
    assert_eq!(actions, [Some("next;"), Some("drop;"), None]);
    assert_eq!(counters.rows_skipped.load(Relaxed), 0);
}

#[test]
fn rows_with_unusable_cells_are_left_out_and_counted() {
    let id = |number: u8| Uuid::new(u128::from(number)).to_string();
    let rows = json!({
        "Port_Group": {
            id(1): {"initial": {"name": "a5"}},
            id(2): {"initial": {"name": "x_a5"}},
            id(3): {"initial": {"name": "-3_a5"}},
            id(4): {"initial": {"name": "3_a_5"}},
        },
        "Port_Binding": {id(5): {"initial": {"logical_port": "p", "tunnel_key": 1}}},
        "Datapath_Binding": {id(6): {"initial": {"tunnel_key": -1}}},
        "Logical_Flow": {
            id(7): {"initial": {
                "pipeline": "sideways",
                "external_ids": ["map", [["stage-hint", "1"]]],
            }},
            id(8): {"initial": {
                "pipeline": "egress",
                "external_ids": ["map", [["stage-hint", "xyz"]]],
            }},
            id(9): {"initial": {
                "pipeline": "egress",
                "table_id": 256,
                "external_ids": ["map", [["stage-hint", "1"]]],
            }},
            id(10): {"initial": {"pipeline": "sideways"}},
        },
    });
    let mut replica = Replica::new(&DATABASE);
    replica.apply_value(rows).unwrap();
    let (mut converter, counters) = converter();
    let update = whole(&replica, &mut converter);
    assert_eq!(counters.rows_skipped.load(Relaxed), 8);
    assert_eq!(update.port_groups.len(), 1);
    assert_eq!(update.port_groups[0].1.as_ref().unwrap().name, "a_5");
    assert_eq!(update.port_bindings, []);
    assert_eq!(update.datapaths, []);
    assert_eq!(update.logical_flows, []);
}

#[test]
fn the_condition_compares_one_column_by_equality_only() {
    // What makes ovsdb-server look rows up instead of evaluating every clause.
    let clauses: Vec<Value> = [1, 2]
        .map(|priority| priority_is(priority).to_json())
        .into();
    assert_eq!(
        clauses,
        [json!(["priority", "==", 1]), json!(["priority", "==", 2])]
    );
}

#[test]
fn the_addresses_of_nodes_are_those_of_their_tunnels() {
    let id = |number: u8| Uuid::new(u128::from(number)).to_string();
    let mut replica = Replica::new(&DATABASE);
    let rows = json!({"Encap": {
        id(1): {"initial": {"ip": "172.18.0.2"}},
        id(2): {"initial": {"ip": "fd00::2"}},
        id(3): {"initial": {"ip": "node3"}},
    }});
    replica.apply_value(rows).unwrap();
    let (mut converter, counters) = converter();
    let update = whole(&replica, &mut converter);
    assert_eq!(counters.rows_skipped.load(Relaxed), 1);
    let nodes = update
        .encapsulations
        .into_iter()
        .filter_map(|(_, encap)| encap);
    let mut nodes: Vec<_> = nodes.map(|encap| encap.ip.to_string()).collect();
    nodes.sort_unstable();
    assert_eq!(nodes, ["172.18.0.2", "fd00::2"]);
}
