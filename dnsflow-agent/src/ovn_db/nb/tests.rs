#![allow(clippy::unwrap_used)]

use std::sync::{Arc, atomic::Ordering::Relaxed};

use dnsflow_core::ovn::rows::RowId;
use serde_json::{Value, json};

use super::*;
use crate::ovsdb::{
    OvsdbCounters,
    fixtures::{self, DUAL_RESOLVER_NB, UDN_NB, V4_NB},
};

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
        .find(|(_, acl)| acl.namespace == "ns1" && acl.rule_index == 0)
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
    replica.apply(rows).unwrap();
    let counters = Arc::<OvsdbCounters>::default();
    let update = whole(
        &replica,
        &mut Converter::new(DATABASE.name, counters.clone()),
    );
    assert_eq!(counters.rows_skipped.load(Relaxed), 6);
    assert_eq!(update.acls.len(), 1);
    assert_eq!(update.acls[0].0, RowId::new(7));
}

#[test]
fn only_rows_that_read_differently_are_told() {
    let mut replica = fixtures::replica(&DATABASE, V4_NB, ours);
    let mut converter = Converter::new(DATABASE.name, Arc::default());
    let id = RowId::parse("32cb9193-de93-4a3e-b594-9d441b70c27f").unwrap();
    let mut change = |columns: Value| {
        let changes = replica
            .apply(json!({"ACL": {id.to_string(): {"modify": columns}}}))
            .unwrap();
        changed(&replica, &changes, &mut converter)
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
